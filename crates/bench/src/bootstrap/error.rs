//! Why two programs could not exchange bytes, and what to do about it.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use super::MAX_MESSAGE;

/// The reason two programs could not exchange bytes.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BootstrapError {
    /// The name has no address.
    #[error("cannot find an address for `{host}`: {source}; check the name")]
    Unresolved {
        /// The requested host.
        host: String,
        /// The resolver's error.
        source: io::Error,
    },
    /// None of the addresses could be connected to.
    #[error("cannot reach {}; {}", listed(host, attempts), unreached(attempts))]
    Unreachable {
        /// The requested host.
        host: String,
        /// Each address with the system's error.
        attempts: Vec<(SocketAddr, io::Error)>,
    },
    /// Another program answers there.
    #[error("{address} does not speak the tcpx bootstrap protocol (it sent {found:02x?})")]
    WrongProtocol {
        /// The other side.
        address: String,
        /// Its first bytes.
        found: Vec<u8>,
    },
    /// The other side runs another version.
    #[error(
        "{address} speaks bootstrap version {found}, this program version {expected}; use the same tcpx on both sides"
    )]
    WrongVersion {
        /// The other side.
        address: String,
        /// Its version.
        found: u8,
        /// The version of this program.
        expected: u8,
    },
    /// The other side connected, but sends nothing.
    #[error("no answer from {address} within {after:?}; {}", NO_ANSWER)]
    NoAnswer {
        /// The other side.
        address: String,
        /// The time limit.
        after: Duration,
    },
    /// The other side closed the connection.
    #[error("{address} closed the connection")]
    Closed {
        /// The other side.
        address: String,
    },
    /// A message above [`MAX_MESSAGE`], in either direction.
    #[error("a message of {len} bytes is longer than the {MAX_MESSAGE} allowed")]
    TooLong {
        /// Its length.
        len: usize,
    },
    /// No client connected.
    #[error("nobody connected within {after:?}")]
    NobodyCame {
        /// The time limit.
        after: Duration,
    },
    /// Any other error of the system.
    #[error("bootstrap connection with {address}: {source}")]
    Io {
        /// The other side.
        address: String,
        /// The system's error.
        source: io::Error,
    },
}

/// Possible causes when a connected peer is silent.
const NO_ANSWER: &str = "see whether that process is stopped or serves another client, and whether \
    the network drops large packets (a smaller MTU on the way)";

impl BootstrapError {
    /// Returns the remedy, which the text of the error contains too.
    pub fn remedy(&self) -> Option<String> {
        Some(match self {
            Self::Unresolved { .. } => "check the name".into(),
            Self::Unreachable { attempts, .. } => unreached(attempts),
            Self::WrongProtocol { .. } => "check the port: another program listens there".into(),
            Self::WrongVersion { .. } => "use the same tcpx on both sides".into(),
            Self::NoAnswer { .. } => NO_ANSWER.into(),
            Self::Closed { .. } => "see what the other side says".into(),
            Self::TooLong { .. } | Self::NobodyCame { .. } | Self::Io { .. } => return None,
        })
    }
}

/// Names the host, then each address with what happened there.
fn listed(host: &str, attempts: &[(SocketAddr, io::Error)]) -> String {
    if let [(address, error)] = attempts
        && address.to_string() == host
    {
        return format!("{host}: {error}");
    }
    let each = attempts
        .iter()
        .map(|(address, error)| format!("{address}: {error}"));
    format!("{host}: {}", each.collect::<Vec<_>>().join("; "))
}

/// Returns the remedy for addresses that could not be connected to.
fn unreached(attempts: &[(SocketAddr, io::Error)]) -> String {
    let port = attempts.first().map_or(0, |(address, _)| address.port());
    let is = |kind| attempts.iter().any(|(_, error)| error.kind() == kind);
    let mut hints = Vec::new();
    if is(io::ErrorKind::ConnectionRefused) {
        hints.push(format!(
            "start the server there on port {port}, or have the firewall pass that port instead of \
             rejecting it"
        ));
    }
    if is(io::ErrorKind::TimedOut) {
        hints.push(format!(
            "let TCP to port {port} pass the firewall of the server, or name an address of it that \
             leads there from here"
        ));
    }
    if hints.is_empty() {
        hints.push("check the address and the route to it".into());
    }
    hints.join("; ")
}
