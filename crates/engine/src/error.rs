//! Everything that can go wrong, and who has to act on it.
//!
//! [`Error`] says what failed, [`Error::kind`] what a program branches on, and the causes inside
//! why it failed: of a peer ([`peer`]), a plugin ([`plugin`]) or the system ([`io`]). All of them
//! can be compared. Texts are for people; the ones inside came from the peer or the plugin, or say
//! what a call was for.

mod incompatible;
mod io;
mod peer;
mod plugin;

use std::sync::Arc;
use std::time::Duration;

use tcpx_net::Forked;
use tcpx_net::interfaces::SelectError;
use tcpx_proto::descriptor::DescriptorError;
use tcpx_proto::frame::Status;
use tcpx_proto::handshake::Features;
use tcpx_proto::info::InfoError;

use self::incompatible::incompatible;
pub use self::io::IoError;
use self::peer::Listed;
pub use self::peer::{Attempt, AttemptCause, LostCause, Misbehaviour};
pub use self::plugin::{CommCause, PluginFault};
use crate::config::ConfigError;
use crate::ids::MemId;

/// Which side of a segment an error is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Memory of this process.
    Local,
    /// Memory of the peer.
    Remote,
}

impl std::fmt::Display for Side {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Local => "local",
            Self::Remote => "remote",
        })
    }
}

/// The coarse sort of an [`Error`]: what a program branches on, and what the C status codes and the
/// NIXL statuses follow from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The call made no sense: fix the arguments.
    InvalidArgument,
    /// What was named does not exist.
    NotFound,
    /// The state of the object forbids the call.
    NotAllowed,
    /// Not now: the transfer is still in flight, or the peer does not keep up. Try again later.
    Busy,
    /// The caller's own time limit ran out; nothing was cancelled.
    Timeout,
    /// The peer is gone, unreachable or silent.
    Disconnected,
    /// The peer answered and said no.
    Refused,
    /// The transfer was aborted by this side.
    Aborted,
    /// A tagged message was longer than the buffer posted for it.
    Truncated,
    /// This machine did not give what was needed.
    Environment,
    /// The session is closed.
    Closed,
    /// The handle belongs to the process that this one was forked from.
    Forked,
    /// The peer broke the protocol.
    ProtocolViolation,
    /// Not available in this build, on this machine, or with this peer.
    NotSupported,
}

/// An error of the engine. Cheap to clone; [`Error::kind`] sorts it, and tests compare it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A configuration value cannot be used.
    #[error(transparent)]
    Config(#[from] ConfigError),

    /// A segment does not lie inside its region.
    #[error(
        "segment {index}: {len} bytes at offset {offset} do not fit the {side} region of \
         {region_len} bytes"
    )]
    SegmentOutOfBounds {
        /// Position in the segment list.
        index: usize,
        /// Which side is too short.
        side: Side,
        /// Offset asked for.
        offset: usize,
        /// Length asked for.
        len: usize,
        /// Bytes the region has.
        region_len: usize,
    },

    /// A region of no bytes, or one that wraps around the address space, was to be registered.
    #[error(
        "cannot register {len} bytes at {address:#x}: a region needs at least one byte and must not wrap"
    )]
    BadRegion {
        /// Address given.
        address: usize,
        /// Length given.
        len: usize,
    },

    /// Memory that was said to be on a GPU is not.
    #[error(
        "the memory at {address:#x} is not on CUDA device {device}, nor on any other: register it as host memory"
    )]
    NotOnDevice {
        /// Where the memory begins.
        address: usize,
        /// The device that it was said to be on.
        device: u32,
    },

    /// A GPU, or the driver, has refused or failed. Look at the machine, unless the error inside
    /// names an argument.
    #[error(transparent)]
    Device(#[from] tcpx_cuda::Error),

    /// A NCCL net plugin cannot be used, or has failed. Look at `TCPX_PLUGIN` and at the plugin's
    /// own settings.
    #[error("{0}")]
    Plugin(#[from] tcpx_ncclnet::Error),

    /// A NCCL net plugin did something that it must not. Whoever provides the plugin must act.
    #[error("the plugin broke its contract: {0}")]
    PluginBroke(PluginFault),

    /// The peer was reached, and the plugin that carries payload could not connect to it. The cause
    /// says whether this side, the peer or the plugin must act.
    #[error("the plugin cannot connect to peer {peer:?}: {cause}")]
    PluginNotConnected {
        /// The peer.
        peer: String,
        /// Why.
        cause: CommCause,
    },

    /// A plugin has messages in hand and completes none. Typical causes: the peer hangs, or the
    /// plugin's network is gone. Look at the peer, then at the plugin's log.
    #[error(
        "the plugin has completed no message of peer {peer:?} for {after:?} (limit: TCPX_PEER_TIMEOUT)"
    )]
    PluginStalled {
        /// The peer.
        peer: String,
        /// How long nothing was completed.
        after: Duration,
    },

    /// A copy was lost together with others on its queue.
    #[error("the device failed while it was copying: an earlier error says why")]
    DeviceLost,

    /// The region was deregistered, now or while a transfer was using it.
    #[error("region {0} is no longer registered: register it again and prepare the transfer anew")]
    RegionDeregistered(MemId),

    /// Memory of this process that is registered is not mapped, or not for this access. Typical
    /// cause: it was unmapped, freed or protected before its region was deregistered.
    #[error(
        "registered memory cannot be accessed: deregister before memory is unmapped or protected"
    )]
    MemoryFault,

    /// The region belongs to another session.
    #[error(
        "region {0} belongs to another session: register it with the session that transfers it"
    )]
    ForeignRegion(MemId),

    /// The bytes are not connection info.
    #[error("not usable as connection info: {0}")]
    BadConnectionInfo(#[source] InfoError),

    /// The bytes are not a region descriptor.
    #[error("not usable as a region descriptor: {0}")]
    BadDescriptor(#[source] DescriptorError),

    /// No peer of that name is known.
    #[error("no peer named {0:?}: load its connection info first")]
    UnknownPeer(String),

    /// The transfer is in flight and cannot be posted again yet.
    #[error("the transfer is still in flight: wait until it is done before posting it again")]
    TransferActive,

    /// There is nothing to wait for.
    #[error("the transfer was never posted: post it before waiting for its end")]
    NotPosted,

    /// A tagged send or receive cannot be posted a second time.
    #[error("a tagged {0} is posted when it is made and cannot be posted again")]
    NotRepostable(&'static str),

    /// So much waits to be sent to the peer that it takes no more for now. Typical causes: the
    /// peer's application does not take its notifications, or the network is slow. Try again later.
    #[error(
        "peer {peer:?} does not keep up: {queued} bytes of messages wait to be sent to it (limit: half of TCPX_QUEUE_BYTES)"
    )]
    PeerBehind {
        /// The peer.
        peer: String,
        /// Bytes that wait.
        queued: usize,
    },

    /// The notification is longer than a session keeps of one peer.
    #[error("a notification of {len} bytes is over the limit of {max}")]
    NotificationTooLong {
        /// Bytes given.
        len: usize,
        /// Bytes allowed.
        max: u64,
    },

    /// A tagged message does not fit the buffer that was posted for it.
    #[error("a tagged message of {len} bytes does not fit the posted buffer of {capacity}")]
    MessageTruncated {
        /// Bytes of the message.
        len: u64,
        /// Bytes of the buffer.
        capacity: u64,
    },

    /// No connection to the peer could be made. Typical causes: its process has ended, its
    /// connection info is stale, or the network does not lead to it. Look at each attempt.
    #[error("peer {peer:?} cannot be reached: {}", Listed(attempts))]
    PeerUnreachable {
        /// The peer.
        peer: String,
        /// Each address that was tried and what happened there; lanes that failed alike are one.
        attempts: Vec<Attempt>,
    },

    /// The two sessions do not fit: one requires what the other does not offer. Configure them
    /// alike.
    #[error("{}", incompatible(peer, *peer_lacks, *session_lacks))]
    Incompatible {
        /// The peer.
        peer: String,
        /// What this session requires and the peer does not offer.
        peer_lacks: Features,
        /// What the peer requires and this session does not offer.
        session_lacks: Features,
    },

    /// The peer has not loaded our info and we have not loaded its: there is no way to connect.
    #[error(
        "peer {0:?} is not connected and its connection info is not loaded: load it to connect"
    )]
    PeerNotConnected(String),

    /// The connection to the peer ended. The cause says by whom; whatever was in flight may have
    /// reached the peer or not.
    #[error("lost the connection to peer {peer:?}: {cause}")]
    PeerLost {
        /// The peer.
        peer: String,
        /// Why.
        cause: LostCause,
    },

    /// The peer's machine still answers, its process does not. Typical causes: it is stopped (by a
    /// debugger, for instance) or starved. Look at the peer.
    #[error("peer {peer:?} has made no progress for {after:?} (limit: TCPX_PEER_TIMEOUT)")]
    PeerSilent {
        /// The peer.
        peer: String,
        /// How long nothing happened.
        after: Duration,
    },

    /// The peer refused a chunk. Typical cause: the descriptor names memory that is no longer
    /// registered. Get a new descriptor from the peer.
    #[error("peer {peer:?} refused the transfer ({status:?}): {text}")]
    PeerRefused {
        /// The peer.
        peer: String,
        /// Its reason.
        status: Status,
        /// Its words.
        text: String,
    },

    /// The setting `same_host` requires that memory is copied directly, and it cannot be. Mend what
    /// the reason says, or set `TCPX_SAME_HOST=auto`.
    #[error(
        "memory of peer {peer:?} cannot be copied directly, as TCPX_SAME_HOST=require asks for: {reason}"
    )]
    NotSameHost {
        /// The peer.
        peer: String,
        /// Why not.
        reason: String,
    },

    /// The peer broke the protocol; its connection was closed. Run the same release on both sides.
    #[error("peer {peer:?} broke the protocol: {what}")]
    PeerMisbehaved {
        /// The peer.
        peer: String,
        /// How.
        what: Misbehaviour,
    },

    /// The caller's time limit ran out. Nothing was cancelled; the caller may wait again.
    #[error("{what} did not happen within {after:?}")]
    Timeout {
        /// What was waited for, for people: the caller knows it by the call.
        what: &'static str,
        /// The limit.
        after: Duration,
    },

    /// The transfer was aborted by this side.
    #[error("the transfer was aborted")]
    Aborted,

    /// The session is closed.
    #[error("the session is closed")]
    Closed,

    /// The handle belongs to the process that this one was forked from. Create a session in this
    /// process; what was inherited may be dropped, which does nothing here.
    #[error(transparent)]
    Forked(#[from] Forked),

    /// No network interface can be used.
    #[error(transparent)]
    Interfaces(Arc<SelectError>),

    /// The operating system refused something. Look at the limits and the permissions of this
    /// process.
    #[error("{what}: {source}")]
    Io {
        /// What was being done, for people.
        what: &'static str,
        /// What the system said.
        source: IoError,
    },
}

impl Error {
    /// What sort of error this is.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Config(_)
            | Self::SegmentOutOfBounds { .. }
            | Self::BadRegion { .. }
            | Self::ForeignRegion(_)
            | Self::BadConnectionInfo(_)
            | Self::BadDescriptor(_)
            | Self::NotificationTooLong { .. } => ErrorKind::InvalidArgument,
            Self::NotOnDevice { .. } => ErrorKind::InvalidArgument,
            Self::Device(
                tcpx_cuda::Error::NoLibrary { .. }
                | tcpx_cuda::Error::NoDevice
                | tcpx_cuda::Error::NoSuchDevice { .. }
                | tcpx_cuda::Error::Forked,
            ) => ErrorKind::NotSupported,
            Self::Device(tcpx_cuda::Error::OutOfAllocation { .. }) => ErrorKind::InvalidArgument,
            Self::Device(_) | Self::DeviceLost => ErrorKind::Environment,
            Self::Plugin(_) | Self::PluginBroke(_) => ErrorKind::Environment,
            Self::UnknownPeer(_) => ErrorKind::NotFound,
            Self::RegionDeregistered(_) | Self::MemoryFault | Self::NotRepostable(_) => {
                ErrorKind::NotAllowed
            }
            Self::TransferActive | Self::PeerBehind { .. } => ErrorKind::Busy,
            Self::NotPosted => ErrorKind::NotAllowed,
            Self::MessageTruncated { .. } => ErrorKind::Truncated,
            Self::Incompatible { .. } | Self::NotSameHost { .. } => ErrorKind::NotSupported,
            Self::PeerUnreachable { .. }
            | Self::PeerNotConnected(_)
            | Self::PeerLost { .. }
            | Self::PluginNotConnected { .. }
            | Self::PluginStalled { .. }
            | Self::PeerSilent { .. } => ErrorKind::Disconnected,
            Self::PeerRefused {
                status: Status::Truncated,
                ..
            } => ErrorKind::Truncated,
            Self::PeerRefused { .. } => ErrorKind::Refused,
            Self::PeerMisbehaved { .. } => ErrorKind::ProtocolViolation,
            Self::Timeout { .. } => ErrorKind::Timeout,
            Self::Aborted => ErrorKind::Aborted,
            Self::Closed => ErrorKind::Closed,
            Self::Forked(_) => ErrorKind::Forked,
            Self::Interfaces(_) | Self::Io { .. } => ErrorKind::Environment,
        }
    }

    pub(crate) fn io(what: &'static str, source: impl Into<IoError>) -> Self {
        Self::Io {
            what,
            source: source.into(),
        }
    }
}

impl From<tcpx_net::Fault> for Error {
    fn from(_: tcpx_net::Fault) -> Self {
        Self::MemoryFault
    }
}

#[cfg(test)]
mod tests;
