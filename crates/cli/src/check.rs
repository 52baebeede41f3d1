//! The connection test behind `tcpx check`: two sessions meet over a bootstrap socket, connect, and
//! move a verified WRITE and READ over every lane.
//!
//! ```text
//!   client                                   server
//!     │  Hello { connection info } ────────►   │
//!     │   ◄──────── Hello { connection info }  │
//!     │  Reach { limit } ──────────────────►   │  connects to the client's addresses
//!     │  (handshake and lanes, by the engine)  │
//!     │   ◄──────────── Reached { attempts }   │
//!     │  Want { bytes } ───────────────────►   │
//!     │   ◄─────────── Region { descriptor }   │
//!     │  (WRITE over every lane)               │
//!     │  Written { seed } ─────────────────►   │  compares its memory
//!     │   ◄── Compared { difference, seed }    │  and refills it
//!     │  (READ over every lane, compares)      │
//!     │  … again while a lane was left out …   │
//!     │  … on one host, which paths memory     │
//!     │  takes, between two more sessions …    │
//!     │  … and how fast it moves, likewise …   │
//!     │  Done { problem } ─────────────────►   │
//!     │   ◄─────────────────────────── Noted   │
//! ```
//!
//! Each side ends with a [`Report`] of what it saw.

mod beside;
mod client;
mod message;
mod paths;
mod reverse;
mod server;
mod speed;

use std::net::SocketAddr;
use std::time::Duration;

use serde::Serialize;
use tcpx::{Config, LaneInfo, Peer, SameHostKind, Session};
use tcpx_bench::bootstrap::BootstrapError;

pub(crate) use self::client::run as client;
pub(crate) use self::message::MessageError;
pub(crate) use self::paths::{Kind, MemoryPath, is_local};
pub(crate) use self::reverse::Reverse;
pub(crate) use self::server::serve;
pub(crate) use self::speed::Speed;

/// The limit for the size of chunks, so that a modest buffer holds some for every lane.
const CHUNK_MAX: usize = 256 << 10;
/// The number of chunks for each lane in one transfer.
const CHUNKS: usize = 4;
/// The limit for the memory that a server lends to a client: enough for 64 lanes.
const REGION_MAX: usize = 64 * CHUNKS * CHUNK_MAX;
/// The bytes from which on a lane has carried payload: 64 acknowledgements are far smaller, and a
/// chunk is never smaller.
const PAYLOAD_MIN: u64 = 16 << 10;

/// The result of a check, as one side saw it.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    /// Whether everything worked.
    pub(crate) ok: bool,
    /// What did not work, otherwise.
    pub(crate) problem: Option<String>,
    /// This session.
    pub(crate) local: Party,
    /// The session at the other end.
    pub(crate) remote: Party,
    /// How long handshake and lanes took; known to the client.
    pub(crate) connect_seconds: Option<f64>,
    /// Bytes written and read back in all.
    pub(crate) bytes: u64,
    /// Each lane, by index.
    pub(crate) lanes: Vec<Lane>,
    /// The path of each kind of memory; known to the client.
    pub(crate) paths: Vec<MemoryPath>,
    /// Whether the server could connect to the client; known to the client.
    pub(crate) reverse: Option<Reverse>,
    /// How fast memory moves, and what limits the rate; known to the client.
    pub(crate) speed: Option<Speed>,
}

/// One end of the connection.
#[derive(Debug, Serialize)]
pub(crate) struct Party {
    /// The session's name.
    pub(crate) name: String,
    /// The addresses that this side listens on; of the other side, the ends of its lanes.
    pub(crate) addresses: Vec<SocketAddr>,
    /// The end of the bootstrap connection.
    pub(crate) bootstrap: Option<SocketAddr>,
}

/// One lane, as this side sees it.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Lane {
    pub(crate) index: usize,
    pub(crate) local: SocketAddr,
    pub(crate) remote: SocketAddr,
    /// Round trip of one empty frame; measured by the client.
    pub(crate) round_trip_seconds: Option<f64>,
    pub(crate) bytes_sent: u64,
    pub(crate) bytes_received: u64,
    /// Whether payload went both ways on this lane.
    pub(crate) ok: bool,
}

/// Why a check could not be carried out.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CheckError {
    /// The bootstrap connection failed.
    #[error(transparent)]
    Bootstrap(#[from] BootstrapError),
    /// The other side sent an unusable message.
    #[error(transparent)]
    Message(#[from] MessageError),
    /// The engine failed.
    #[error("{step}: {source}{}", if is_stuck(source) { format!(" ({STUCK})") } else { String::new() })]
    Engine {
        /// The step that failed.
        step: &'static str,
        /// The engine's error.
        source: tcpx::Error,
    },
    /// No lanes could be established.
    #[error(
        "cannot connect the lanes: {source}. The other way {reverse}{}",
        hint(reverse)
    )]
    Lanes {
        /// The engine's error.
        source: tcpx::Error,
        /// The result of the other direction.
        reverse: Box<Reverse>,
    },
    /// A direct copy changed the bytes.
    #[error("memory that was copied directly arrived changed")]
    Copied,
    /// The other side failed and said why.
    #[error("the other side reports: {0}")]
    Remote(String),
}

/// Returns a hint for a connection that is possible in one direction only.
fn hint(reverse: &Reverse) -> &'static str {
    match reverse.ok {
        true => {
            ": transfers work where the application over there connects first, since a connection \
             serves both sides"
        }
        false => "",
    }
}

/// The likely cause if lanes are established and no payload moves on them.
const STUCK: &str = "small packets pass and payload does not: see whether the network drops large \
    packets (compare the MTU of both interfaces and of the way between, `ping -M do -s 1472 HOST`)";

impl CheckError {
    /// Returns what to do about the error.
    pub(crate) fn remedy(&self) -> Option<String> {
        match self {
            Self::Bootstrap(error) => error.remedy(),
            Self::Lanes { source, .. } => source.remedy(),
            Self::Engine { source, .. } => source
                .remedy()
                .or_else(|| is_stuck(source).then(|| STUCK.into())),
            Self::Message(_) => Some("use the same tcpx on both sides".into()),
            Self::Copied | Self::Remote(_) => None,
        }
    }

    /// Returns the kind of the engine's error, if there is one.
    pub(crate) fn kind(&self) -> Option<tcpx::ErrorKind> {
        match self {
            Self::Lanes { source, .. } | Self::Engine { source, .. } => Some(source.kind()),
            _ => None,
        }
    }
}

/// Returns whether no bytes have moved for too long.
fn is_stuck(error: &tcpx::Error) -> bool {
    use tcpx::{Error, LostCause};
    matches!(
        error,
        Error::Timeout { .. }
            | Error::PeerSilent { .. }
            | Error::PeerLost {
                cause: LostCause::LaneSilent { .. } | LostCause::LaneDropped,
                ..
            }
    )
}

/// Adds the step that failed to an error of the engine.
trait Step<T> {
    fn step(self, step: &'static str) -> Result<T, CheckError>;
}

impl<T> Step<T> for Result<T, tcpx::Error> {
    fn step(self, step: &'static str) -> Result<T, CheckError> {
        self.map_err(|source| CheckError::Engine { step, source })
    }
}

/// A session for a check: small chunks, one at a time on each lane, so that every lane gets some.
/// Nothing is copied beside the lanes.
fn start(config: &Config) -> Result<Session, CheckError> {
    let chunk = config.chunk_bytes().min(CHUNK_MAX);
    let config = config.clone().with("chunk_bytes", chunk);
    config
        .and_then(|config| config.with("window", 1))
        .and_then(|config| config.with_same_host(SameHostKind::Off))
        .map_err(tcpx::Error::from)
        .and_then(Session::new)
        .step("cannot start a session")
}

fn party(session: &Session, bootstrap: Option<SocketAddr>) -> Party {
    Party {
        name: session.name().to_owned(),
        addresses: session.addresses(),
        bootstrap,
    }
}

fn remote_party(peer: &Peer, lanes: &[Lane], bootstrap: Option<SocketAddr>) -> Party {
    let mut addresses: Vec<SocketAddr> = lanes.iter().map(|lane| lane.remote).collect();
    addresses.sort();
    addresses.dedup();
    Party {
        name: peer.name().to_owned(),
        addresses,
        bootstrap,
    }
}

/// The lanes after the transfers, each judged by whether payload went both ways.
fn judge(lanes: Vec<LaneInfo>, before: &[LaneInfo], round_trips: &[Duration]) -> Vec<Lane> {
    lanes
        .into_iter()
        .map(|lane| {
            let start = before.iter().find(|old| old.index == lane.index);
            let sent = lane
                .bytes_sent
                .saturating_sub(start.map_or(0, |old| old.bytes_sent));
            let received = lane
                .bytes_received
                .saturating_sub(start.map_or(0, |old| old.bytes_received));
            Lane {
                index: lane.index,
                local: lane.local,
                remote: lane.remote,
                round_trip_seconds: round_trips.get(lane.index).map(Duration::as_secs_f64),
                bytes_sent: sent,
                bytes_received: received,
                ok: sent >= PAYLOAD_MIN && received >= PAYLOAD_MIN,
            }
        })
        .collect()
}
