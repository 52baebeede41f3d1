//! Errors that a peer or the path to it caused.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tcpx_proto::codec::CodecError;
use tcpx_proto::frame::FrameError;
use tcpx_proto::frame::comm::SetupError;
use tcpx_proto::handshake::{HandshakeError, RejectCode};
use tcpx_proto::lane::Violation;

use super::remedy::remedy;
use super::{Error, IoError};

/// Why a connection ended. The cause in [`Error::PeerLost`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LostCause {
    /// The peer closed a stream without a goodbye. Typical cause: its process has ended or was
    /// killed. Check the peer.
    #[error("it closed the connection")]
    ClosedByPeer,

    /// The peer ended the connection on purpose: it closed its session, removed this one,
    /// disconnected, or gave up. Nothing needs to be done if that was expected.
    #[error("{}", goodbye(.0))]
    Goodbye(
        /// The peer's explanation.
        String,
    ),

    /// A stream broke. Typical causes: the peer's process was killed while data was in flight
    /// (connection reset), the peer's machine or the network is gone (timed out). Check the network
    /// and the peer.
    #[error(transparent)]
    Io(#[from] IoError),

    /// The plugin or a GPU failed on this side during a payload.
    /// The peer is not at fault; see the error inside.
    #[error(transparent)]
    Carrier(Arc<Error>),

    /// This side removed the peer, by [`Session::remove`](crate::Session::remove) or
    /// [`Session::remove_peer`](crate::Session::remove_peer). Add the peer again to continue.
    #[error("removed by this side")]
    Removed,

    /// This side added another session of the same name. Typical cause: the peer was restarted. Use
    /// the new peer; sessions that live at the same time need different names.
    #[error("a new session has taken its name")]
    Replaced,

    /// This side called [`Peer::disconnect`](crate::Peer::disconnect). A later transfer reconnects.
    #[error("disconnected by this side")]
    Disconnected,

    /// The peer made a new connection, because the old one had already ended on its side. Post
    /// failed transfers again.
    #[error("the peer connected anew")]
    Reconnected,

    /// The peer was reading memory that was deregistered, and the unsent part of the answers
    /// exceeds the limit for copies (16 MiB per connection). Typical causes: the peer reads slowly,
    /// or in very large chunks. Tell peers before memory is deregistered, or let them reconnect.
    #[error(
        "it was reading memory that was deregistered, and {bytes} bytes of an answer were not sent"
    )]
    Revoked {
        /// Unsent bytes of the answer that exceeded the limit.
        bytes: usize,
    },

    /// The peer does not read the answers and notifications that are sent to it. Typical causes: it
    /// is stopped, or it is not a tcpx session. Check the peer.
    #[error("it does not read: {bytes} bytes of answers and notifications are queued for it")]
    NotReading {
        /// Bytes queued.
        bytes: usize,
    },

    /// The peer has sent as many notifications, or tagged messages without a matching receive, as
    /// this session keeps for one peer, and the application has taken none for half of
    /// `TCPX_PEER_TIMEOUT`. Take notifications as they arrive, or raise `TCPX_QUEUE_BYTES`.
    #[error(
        "the application here has taken none of its notifications or tagged messages for \
         {after:?}, and they fill half of TCPX_QUEUE_BYTES"
    )]
    NotTaken {
        /// Time in which nothing was taken.
        after: Duration,
    },

    /// The peer sent a notification that is longer than this session keeps. Raise
    /// `TCPX_QUEUE_BYTES` here, or send shorter notifications.
    #[error(
        "a notification of {bytes} bytes is longer than the {max} that the session keeps of one \
         peer (half of TCPX_QUEUE_BYTES)"
    )]
    NotificationTooLong {
        /// Bytes needed to keep the notification.
        bytes: usize,
        /// Bytes available for one peer.
        max: usize,
    },

    /// The peer lost or dropped a lane. Transfers continue on other lanes and on the replacement
    /// stream; this cause is reported only if no replacement came in time.
    #[error("the peer has lost a lane")]
    LaneDropped,

    /// Nothing sent on a lane has arrived for this long, although the peer was heard on other lanes
    /// or may be reachable by another path. Typical causes: a cable, a link or a firewall rule.
    /// Transfers continue as for [`LostCause::LaneDropped`].
    #[error("nothing that was sent on a lane has arrived for {after:?}")]
    LaneSilent {
        /// Time without arrival.
        after: Duration,
    },

    /// The peer was restarted, or has ended the connection meanwhile: the process at its address
    /// does not know the session or the connection. Load the new connection info.
    #[error("the peer was restarted or has forgotten the connection ({0})")]
    Forgotten(
        /// The peer's reason.
        RejectCode,
    ),

    /// A connection was made, but had ended when the caller of
    /// [`Peer::connect`](crate::Peer::connect) looked. Check the peer's log, or connect again.
    #[error("the connection ended as soon as it was made")]
    EndedAtOnce,

    /// A protocol on top of tagged messages was using a connection that is lost; a new connection
    /// does not know its state. Such protocols report this cause, the engine does not. The caller
    /// must connect again.
    #[error("messages need the connection that was lost: connect again")]
    Stale,
}

impl From<io::Error> for LostCause {
    /// Maps the end of a stream to the peer.
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::UnexpectedEof => Self::ClosedByPeer,
            _ => Self::Io(error.into()),
        }
    }
}

impl From<Error> for LostCause {
    fn from(error: Error) -> Self {
        Self::Carrier(Arc::new(error))
    }
}

/// Returns the peer's explanation, or a default text if it is empty.
fn goodbye(text: &str) -> &str {
    match text {
        "" => "it said goodbye and gave no reason",
        text => text,
    }
}

/// An address that was tried, and the result. Part of [`Error::PeerUnreachable`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attempt {
    /// The peer's address.
    pub address: SocketAddr,
    /// The result.
    pub cause: AttemptCause,
}

impl fmt::Display for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.address, self.cause)
    }
}

/// Why an address did not lead to the peer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AttemptCause {
    /// The system could not connect. Typical causes: no process listens there (connection refused:
    /// the peer's process is gone, or its connection info is older than the process), or there is
    /// no route to the address. Check the peer, then `TCPX_INTERFACES` on both sides.
    #[error(transparent)]
    Io(#[from] IoError),

    /// The listener closed the connection before the handshake was complete. Typical causes: a
    /// program other than tcpx listens there, or the peer is shutting down. Check the peer.
    #[error("closed the connection during the handshake")]
    ClosedByPeer,

    /// The handshake failed. Typical causes: the connection info is stale, or belongs to another
    /// session than the one that listens there. Load the peer's current connection info.
    #[error(transparent)]
    Handshake(#[from] HandshakeError),

    /// No answer arrived. Typical causes: a firewall, an interface that does not reach the peer, or
    /// a stopped process. Check the network, then `TCPX_INTERFACES` on both sides;
    /// `TCPX_CONNECT_TIMEOUT` is the limit for all addresses together.
    #[error("no answer in time")]
    TimedOut,

    /// The system connected, but the handshake got no answer. Typical causes: the peer's process is
    /// stopped, or packets of the handshake are lost on the path (a smaller MTU, a firewall that
    /// inspects connections). Check the peer, then the network.
    #[error("connected, then no answer to the handshake in time")]
    HandshakeTimedOut,
}

impl From<io::Error> for AttemptCause {
    /// Maps the end of a stream to the peer.
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::UnexpectedEof => Self::ClosedByPeer,
            _ => Self::Io(error.into()),
        }
    }
}

/// Lists attempts with their remedy, for [`Error::PeerUnreachable`].
pub(super) struct Listed<'a>(pub(super) &'a [Attempt]);

impl fmt::Display for Listed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some((first, others)) = self.0.split_first() else {
            return f.write_str("none of its addresses could be tried");
        };
        first.fmt(f)?;
        others.iter().try_for_each(|other| write!(f, "; {other}"))?;
        match remedy(self.0) {
            Some(remedy) => write!(f, " (remedy: {remedy})"),
            None => Ok(()),
        }
    }
}

/// How a peer broke the protocol. The cause in [`Error::PeerMisbehaved`].
///
/// Typical cause of all but the last: a defect in the peer's release, or a program on the network
/// that is not a tcpx session. Run the same release on both sides; if the error persists, report
/// it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Misbehaviour {
    /// A frame cannot be decoded.
    #[error(transparent)]
    Frame(#[from] FrameError),

    /// A frame is not allowed in the state of its lane.
    #[error(transparent)]
    Lane(#[from] Violation),

    /// The peer's report of a lost lane cannot be decoded.
    #[error("its report of a lost lane cannot be decoded: {0}")]
    LaneDown(#[from] CodecError),

    /// A frame announced its payload on a comm of the plugin, but the lane has none.
    #[error("it announced a payload on a comm that does not exist")]
    CommMissing,

    /// The set-up of a comm cannot be decoded.
    #[error(transparent)]
    CommSetup(#[from] SetupError),

    /// A lane that needs a comm began with a frame other than the comm's setup.
    #[error("it did not set up its comms first")]
    CommNotFirst,

    /// A comm was set up a second time.
    #[error("it set up its comms twice")]
    CommTwice,

    /// A connection was accepted under an identity that belongs to another session, according to
    /// connection info loaded later. Typical cause: a process took the name of a session. Find out
    /// which process connects.
    #[error("it claimed an identity that is not its own")]
    Impostor,
}
