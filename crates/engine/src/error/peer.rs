//! What a peer did, or what happened on the way to it.

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

use super::{Error, IoError};

/// Why a connection ended. The cause of [`Error::PeerLost`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LostCause {
    /// The peer's side of a stream was closed without a goodbye. Typical cause: its process has
    /// ended or was killed. Look at the peer.
    #[error("it closed the connection")]
    ClosedByPeer,

    /// The peer ended the connection on purpose: it closed its session, removed this one,
    /// disconnected, or gave up. Nothing is to be done where that was expected.
    #[error("{}", goodbye(.0))]
    Goodbye(
        /// The peer's words.
        String,
    ),

    /// A stream broke. Typical causes: the peer's process was killed while data was on its way
    /// (connection reset), the peer's machine or the network is gone (timed out). Look at the
    /// network and the peer.
    #[error(transparent)]
    Io(#[from] IoError),

    /// The plugin, or a GPU, failed on this side with a payload in hand. The peer is not at fault;
    /// look at the error inside.
    #[error(transparent)]
    Carrier(Arc<Error>),

    /// This side removed the peer, by [`Session::remove`](crate::Session::remove) or
    /// [`Session::remove_peer`](crate::Session::remove_peer). Add it again to go on.
    #[error("removed by this side")]
    Removed,

    /// This side added another session of the same name. Typical cause: the peer was restarted.
    /// Use the new peer, and give sessions that live at the same time names of their own.
    #[error("a new session has taken its name")]
    Replaced,

    /// This side called [`Peer::disconnect`](crate::Peer::disconnect). A later transfer connects
    /// anew.
    #[error("disconnected by this side")]
    Disconnected,

    /// The peer made a new connection: at its end the old one had died before. Post again what has
    /// failed.
    #[error("the peer connected anew")]
    Reconnected,

    /// The peer was reading memory that was deregistered, and more of the answers had not left than
    /// is copied for it (16 MiB a connection). Typical causes: the peer reads slowly, or in very
    /// large chunks. Tell peers before memory is taken back, or let them connect anew.
    #[error(
        "it was reading memory that was deregistered, and {bytes} bytes of an answer had not left"
    )]
    Revoked {
        /// Bytes that were to be copied when too many were.
        bytes: usize,
    },

    /// The peer does not read the answers and notifications that are sent to it. Typical causes: it
    /// is stopped, or it is no tcpx session. Look at the peer.
    #[error("it does not read: {bytes} bytes of answers and notifications wait to be sent to it")]
    NotReading {
        /// Bytes that wait.
        bytes: usize,
    },

    /// The peer has sent as many notifications, or tagged messages without a receive, as this session
    /// keeps of one peer, and the application has taken none for half of `TCPX_PEER_TIMEOUT`. Take
    /// notifications as they come, or raise `TCPX_QUEUE_BYTES`.
    #[error(
        "nobody here has taken its notifications or tagged messages for {after:?}, and half \
         of TCPX_QUEUE_BYTES is full of them"
    )]
    NotTaken {
        /// How long nothing was taken.
        after: Duration,
    },

    /// The peer sent a notification that is longer than this session keeps. Raise
    /// `TCPX_QUEUE_BYTES` here, or send less at once.
    #[error(
        "a notification of {bytes} bytes is longer than the {max} that the session keeps of one \
         peer (half of TCPX_QUEUE_BYTES)"
    )]
    NotificationTooLong {
        /// Bytes that keeping it takes.
        bytes: usize,
        /// Bytes that are kept.
        max: usize,
    },

    /// The peer gave a lane up, or has lost it. Transfers go on on other lanes and on the stream that
    /// takes its place; seen where none came in time.
    #[error("the peer has lost a lane")]
    LaneDropped,

    /// Nothing that was sent on a lane has arrived for so long, although the peer was heard on others
    /// or may be elsewhere. Typical causes: a cable, a link or a firewall rule. As
    /// [`LostCause::LaneDropped`].
    #[error("nothing that was sent on a lane has arrived for {after:?}")]
    LaneSilent {
        /// How long that was.
        after: Duration,
    },

    /// The peer was restarted, or has ended the connection meanwhile: at its address the session, or the
    /// connection, is not known. Load the new connection info.
    #[error("the peer was restarted or has forgotten the connection ({0})")]
    Forgotten(
        /// The peer's words.
        RejectCode,
    ),

    /// A connection was made, and had ended when the caller of
    /// [`Peer::connect`](crate::Peer::connect) looked. Look at the peer's log, or connect again.
    #[error("the connection ended as soon as it was made")]
    EndedAtOnce,

    /// A protocol over tagged messages began on a connection that was lost since; another one knows
    /// nothing of it. Said by such protocols, not by the engine. The caller must connect again.
    #[error("messages need the connection that was lost: connect again")]
    Stale,
}

impl From<io::Error> for LostCause {
    /// Takes the end of a stream for the peer's doing.
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

/// Repeats the peer's words where there are any.
fn goodbye(text: &str) -> &str {
    match text {
        "" => "it said goodbye and gave no reason",
        text => text,
    }
}

/// One address that was tried and what happened there. Part of [`Error::PeerUnreachable`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attempt {
    /// The peer's address.
    pub address: SocketAddr,
    /// What happened there.
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
    /// The system could not connect. Typical causes: nobody listens there (connection refused: the
    /// peer's process is gone, or its connection info is older than the process), or there is no
    /// route to it. Look at the peer, then at `TCPX_INTERFACES` on both sides.
    #[error(transparent)]
    Io(#[from] IoError),

    /// Whoever listens there closed the connection before the handshake was over. Typical causes:
    /// something that is not tcpx listens there, or the peer is ending. Look at the peer.
    #[error("closed the connection during the handshake")]
    ClosedByPeer,

    /// The handshake failed. Typical causes: the connection info is stale, or does not belong to
    /// the session that listens there. Load the peer's current connection info.
    #[error(transparent)]
    Handshake(#[from] HandshakeError),

    /// There was no answer. Typical causes: a firewall, an interface that does not lead to the
    /// peer, or a process that is stopped. Look at the network, then at `TCPX_INTERFACES` on both
    /// sides; `TCPX_CONNECT_TIMEOUT` is the limit for all addresses together.
    #[error("no answer in time")]
    TimedOut,
}

impl From<io::Error> for AttemptCause {
    /// Takes the end of a stream for the peer's doing.
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::UnexpectedEof => Self::ClosedByPeer,
            _ => Self::Io(error.into()),
        }
    }
}

/// Lists attempts, for [`Error::PeerUnreachable`].
pub(super) struct Listed<'a>(pub(super) &'a [Attempt]);

impl fmt::Display for Listed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some((first, others)) = self.0.split_first() else {
            return f.write_str("none of its addresses could be tried");
        };
        first.fmt(f)?;
        others.iter().try_for_each(|other| write!(f, "; {other}"))
    }
}

/// How a peer broke the protocol. The cause of [`Error::PeerMisbehaved`].
///
/// Typical cause of all but the last: a defect of the peer's release, or somebody on the network
/// who is not a tcpx session at all. Run the same release on both sides; if it stays, report it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Misbehaviour {
    /// A frame cannot be decoded.
    #[error(transparent)]
    Frame(#[from] FrameError),

    /// A frame is not allowed in the state of its lane.
    #[error(transparent)]
    Lane(#[from] Violation),

    /// What it said of a lost lane cannot be decoded.
    #[error("what it said of a lost lane: {0}")]
    LaneDown(#[from] CodecError),

    /// A frame announced its payload on a comm of the plugin, and the lane has none.
    #[error("a payload on a comm that is not there")]
    CommMissing,

    /// The set-up of a comm cannot be decoded.
    #[error(transparent)]
    CommSetup(#[from] SetupError),

    /// A lane that needs a comm began with another frame than the set-up of one.
    #[error("it did not set its comms up first")]
    CommNotFirst,

    /// A comm was set up a second time.
    #[error("it set its comms up twice")]
    CommTwice,

    /// A connection was accepted under an identity that, by the connection info that was loaded
    /// since, is somebody else's. Typical cause: somebody took the name of a session. Find out who
    /// connects.
    #[error("it claimed an identity that is not its own")]
    Impostor,
}
