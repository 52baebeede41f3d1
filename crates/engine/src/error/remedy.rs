//! Remedies for a peer that could not be reached.

use std::fmt::Write;
use std::io;

use super::peer::{Attempt, AttemptCause};

/// Names the remedy for each cause among the attempts, the most specific cause first.
pub(super) fn remedy(attempts: &[Attempt]) -> Option<String> {
    let mut hints: Vec<(Hint, Vec<u16>)> = Vec::new();
    for attempt in attempts {
        let (hint, port) = (Hint::of(attempt), attempt.address.port());
        match hints.iter_mut().find(|(known, _)| *known == hint) {
            Some((_, ports)) if ports.contains(&port) => {}
            Some((_, ports)) => ports.push(port),
            None => hints.push((hint, vec![port])),
        }
    }
    hints.sort_by_key(|(hint, _)| *hint);
    let texts = hints.iter().map(|(hint, ports)| hint.text(ports));
    let text = texts.collect::<Vec<_>>().join("; ");
    (!text.is_empty()).then_some(text)
}

/// The likely reason that an attempt failed. Remedies are listed in this order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Hint {
    /// Another session listens there.
    Stale,
    /// The system connected, but the handshake got no answer.
    Mute,
    /// Packets are dropped.
    Silent,
    /// No process listens there.
    Refused,
    /// A loopback address, which reaches only this host.
    Loopback,
    /// There is no route to the address.
    NoRoute,
    /// A program other than tcpx listens there.
    Stranger,
}

impl Hint {
    fn of(attempt: &Attempt) -> Self {
        match &attempt.cause {
            AttemptCause::Handshake(_) => Self::Stale,
            AttemptCause::HandshakeTimedOut => Self::Mute,
            AttemptCause::ClosedByPeer => Self::Stranger,
            _ if attempt.address.ip().is_loopback() => Self::Loopback,
            AttemptCause::TimedOut => Self::Silent,
            AttemptCause::Io(error) if error.kind() == io::ErrorKind::TimedOut => Self::Silent,
            AttemptCause::Io(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                Self::Refused
            }
            AttemptCause::Io(_) => Self::NoRoute,
        }
    }

    fn text(self, ports: &[u16]) -> String {
        match self {
            Self::Stale => "load the peer's current connection info: the session that gave this \
                 one has ended"
                .into(),
            Self::Mute => "check whether the peer's process is stopped, and whether the network \
                 drops large packets (a smaller MTU on the way)"
                .into(),
            Self::Silent => format!(
                "let TCP to {} of the peer pass its firewall (TCPX_LISTEN_PORT fixes the port \
                 there), or have TCPX_INTERFACES on both sides name interfaces that reach each \
                 other",
                listed(ports)
            ),
            Self::Refused => format!(
                "check whether the peer's process still runs and load its current connection info, \
                 or have its firewall pass TCP to {} instead of rejecting it",
                listed(ports)
            ),
            Self::Loopback => "loopback leads to this host alone: if the peer is on another one, \
                 have TCPX_INTERFACES there name an interface that reaches this host; else check \
                 whether its process still runs and load its current connection info"
                .into(),
            Self::NoRoute => "have TCPX_INTERFACES on both sides name interfaces that reach each \
                 other, and check the routes between them"
                .into(),
            Self::Stranger => "check in the peer's log why it closes connections, and whether \
                 another program listens there"
                .into(),
        }
    }
}

/// Lists ports, as `port 1` or `ports 1, 2`.
fn listed(ports: &[u16]) -> String {
    let mut text = String::from(if ports.len() == 1 { "port " } else { "ports " });
    for (index, port) in ports.iter().enumerate() {
        let comma = if index == 0 { "" } else { ", " };
        // Writing to a string does not fail.
        let _ = write!(text, "{comma}{port}");
    }
    text
}

#[cfg(test)]
mod tests {
    use tcpx_proto::handshake::HandshakeError;

    use super::*;

    fn attempt(address: &str, cause: impl Into<AttemptCause>) -> Attempt {
        Attempt {
            address: address.parse().unwrap(),
            cause: cause.into(),
        }
    }

    fn io(code: i32) -> AttemptCause {
        io::Error::from_raw_os_error(code).into()
    }

    #[test]
    fn each_cause_has_its_own_remedy() {
        let of = |attempts: &[Attempt]| remedy(attempts).unwrap();
        let (here, there) = ("127.0.0.1:7", "10.0.0.1:7");
        for (attempt, expected) in [
            (
                attempt(there, AttemptCause::TimedOut),
                "let TCP to port 7 of the peer pass its firewall",
            ),
            (attempt(there, io(110)), "pass its firewall"),
            (
                attempt(there, io(111)),
                "whether the peer's process still runs",
            ),
            (attempt(here, io(111)), "loopback leads to this host alone"),
            (attempt(there, io(113)), "check the routes"),
            (attempt(there, io(99)), "TCPX_INTERFACES on both sides"),
            (
                attempt(there, HandshakeError::PeerProofWrong),
                "load the peer's current connection info",
            ),
            (
                attempt(there, AttemptCause::HandshakeTimedOut),
                "drops large packets",
            ),
            (
                attempt(there, AttemptCause::ClosedByPeer),
                "whether another program listens there",
            ),
        ] {
            let text = of(&[attempt]);
            assert!(text.contains(expected), "{expected:?} in {text:?}");
        }
        assert_eq!(remedy(&[]), None);
    }

    #[test]
    fn each_cause_is_listed_once_with_all_ports() {
        let attempts = [
            attempt("10.0.0.1:7", AttemptCause::TimedOut),
            attempt("10.0.0.2:8", AttemptCause::TimedOut),
            attempt("[fd00::1]:8", AttemptCause::TimedOut),
            attempt("10.0.0.3:9", HandshakeError::PeerProofWrong),
        ];
        let text = remedy(&attempts).unwrap();
        assert!(text.starts_with("load the peer's current"), "{text}");
        assert_eq!(text.matches("ports 7, 8 of the peer").count(), 1, "{text}");
    }
}
