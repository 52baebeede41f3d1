//! The engine's error type, sorted by who has to act.
//!
//! [`Error`] names the failure, [`Error::kind`] gives programs a value to branch on, and the causes
//! inside tell why it failed: on the peer's side ([`peer`]), in a plugin ([`plugin`]) or in the
//! system ([`io`]). All errors are comparable. Texts are for people; strings inside an error came
//! from the peer or the plugin, or describe the failed call.

mod incompatible;
mod io;
mod peer;
mod plugin;
mod ports;
mod remedy;

use std::net::SocketAddr;
use std::path::PathBuf;
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
use self::ports::Taken;
use crate::config::{ConfigError, PortRange};
use crate::ids::MemId;

/// Side of a segment that an error concerns.
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

/// Coarse category of an [`Error`]: programs branch on it, and C status codes and NIXL statuses are
/// derived from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The call is invalid: fix the arguments.
    InvalidArgument,
    /// The named object does not exist.
    NotFound,
    /// The state of the object forbids the call.
    NotAllowed,
    /// Temporary: the transfer is still in flight, or the peer does not keep up. Try again later.
    Busy,
    /// The caller's time limit expired; nothing was cancelled.
    Timeout,
    /// The peer is gone, unreachable or silent.
    Disconnected,
    /// The peer answered with a refusal.
    Refused,
    /// The transfer was aborted by this side.
    Aborted,
    /// A tagged message was longer than the buffer posted for it.
    Truncated,
    /// This machine lacks a required resource or permission.
    Environment,
    /// The session is closed.
    Closed,
    /// The handle belongs to the parent of this forked process.
    Forked,
    /// The peer broke the protocol.
    ProtocolViolation,
    /// Not available in this build, on this machine, or with this peer.
    NotSupported,
}

/// An error of the engine. Cheap to clone and comparable; [`Error::kind`] gives its category.
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
        /// The side whose region is too short.
        side: Side,
        /// Requested offset.
        offset: usize,
        /// Requested length.
        len: usize,
        /// Length of the region.
        region_len: usize,
    },

    /// The region to register is empty or wraps around the address space.
    #[error(
        "cannot register {len} bytes at {address:#x}: a region needs at least one byte and must \
         not wrap"
    )]
    BadRegion {
        /// Requested address.
        address: usize,
        /// Requested length.
        len: usize,
    },

    /// Memory registered as GPU memory is not on a GPU.
    #[error(
        "the memory at {address:#x} is on no CUDA device, although device {device} was given: \
         register it as host memory"
    )]
    NotOnDevice {
        /// Start of the memory.
        address: usize,
        /// The device that the caller gave.
        device: u32,
    },

    /// A GPU or its driver refused or failed.
    /// Check the machine, unless the error inside names an argument.
    #[error(transparent)]
    Device(#[from] tcpx_cuda::Error),

    /// A NCCL net plugin cannot be used, or failed.
    /// Check `TCPX_PLUGIN` and the plugin's own settings.
    #[error("{0}")]
    Plugin(#[from] tcpx_ncclnet::Error),

    /// A NCCL net plugin violated the plugin API. The provider of the plugin must act.
    #[error("the plugin broke its contract: {0}")]
    PluginBroke(PluginFault),

    /// The peer was reached, but the plugin that carries payload could not connect to it. The cause
    /// tells whether this side, the peer or the plugin must act.
    #[error("the plugin cannot connect to peer {peer:?}: {cause}")]
    PluginNotConnected {
        /// The peer.
        peer: String,
        /// Why.
        cause: CommCause,
    },

    /// A plugin has outstanding messages and completes none. Typical causes: the peer hangs, or the
    /// plugin's network is gone. Check the peer, then the plugin's log.
    #[error(
        "the plugin has completed no message of peer {peer:?} for {after:?} (limit: \
         TCPX_PEER_TIMEOUT)"
    )]
    PluginStalled {
        /// The peer.
        peer: String,
        /// Time without a completed message.
        after: Duration,
    },

    /// A copy failed because an earlier copy on the same queue failed.
    #[error("the device failed while it was copying: an earlier error says why")]
    DeviceLost,

    /// The region was deregistered, before or during the transfer.
    #[error("region {0} is no longer registered: register it again and prepare the transfer anew")]
    RegionDeregistered(MemId),

    /// Registered memory of this process is unmapped, or protected against this access. Typical
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

    /// The transfer was not posted, so there is no end to wait for.
    #[error("the transfer was never posted: post it before waiting for its end")]
    NotPosted,

    /// A tagged send or receive cannot be posted a second time.
    #[error("a tagged {0} is posted when it is made and cannot be posted again")]
    NotRepostable(&'static str),

    /// Too many bytes are queued for the peer. Typical causes: the peer's application does not take
    /// its notifications, or the network is slow. Try again later.
    #[error(
        "peer {peer:?} does not keep up: {queued} bytes of messages are queued for it (limit: half \
         of TCPX_QUEUE_BYTES)"
    )]
    PeerBehind {
        /// The peer.
        peer: String,
        /// Bytes queued.
        queued: usize,
    },

    /// The notification is longer than a session keeps for one peer.
    #[error("a notification of {len} bytes is over the limit of {max}")]
    NotificationTooLong {
        /// Length of the notification.
        len: usize,
        /// Longest allowed notification.
        max: u64,
    },

    /// A tagged message does not fit the buffer that was posted for it.
    #[error("a tagged message of {len} bytes does not fit the posted buffer of {capacity}")]
    MessageTruncated {
        /// Length of the message.
        len: u64,
        /// Length of the buffer.
        capacity: u64,
    },

    /// No connection to the peer could be made. Typical causes: its process has ended, its
    /// connection info is stale, or the network does not reach it. Check each attempt.
    #[error("peer {peer:?} cannot be reached: {}", Listed(attempts))]
    PeerUnreachable {
        /// The peer.
        peer: String,
        /// Addresses that were tried, with the result of each; lanes with equal results are merged.
        attempts: Vec<Attempt>,
    },

    /// The caller's time limit expired before a connection to the peer was made. The attempt
    /// continues; the caller may wait again. Causes as for [`Error::PeerUnreachable`].
    #[error("peer {peer:?} was not reached within {after:?}: {}", Listed(attempts))]
    NotReachedInTime {
        /// The peer.
        peer: String,
        /// The limit.
        after: Duration,
        /// Addresses tried so far, with the result of each.
        attempts: Vec<Attempt>,
    },

    /// The two sessions are incompatible: one requires a feature that the other does not offer.
    /// Configure both alike.
    #[error("{}", incompatible(peer, *peer_lacks, *session_lacks))]
    Incompatible {
        /// The peer.
        peer: String,
        /// Features that this session requires and the peer does not offer.
        peer_lacks: Features,
        /// Features that the peer requires and this session does not offer.
        session_lacks: Features,
    },

    /// Neither side has loaded the other's connection info, so no connection can be made.
    #[error(
        "peer {0:?} is not connected and its connection info is not loaded: load it to connect"
    )]
    PeerNotConnected(String),

    /// The connection to the peer ended. The cause tells which side ended it; data in flight may or
    /// may not have reached the peer.
    #[error("lost the connection to peer {peer:?}: {cause}")]
    PeerLost {
        /// The peer.
        peer: String,
        /// Why.
        cause: LostCause,
    },

    /// The peer's machine still answers, but its process does not. Typical causes: the process is
    /// stopped (for instance by a debugger) or starved. Check the peer.
    #[error("peer {peer:?} has made no progress for {after:?} (limit: TCPX_PEER_TIMEOUT)")]
    PeerSilent {
        /// The peer.
        peer: String,
        /// Time without progress.
        after: Duration,
    },

    /// The peer refused a chunk. Typical cause: the descriptor names memory that is no longer
    /// registered. Get a new descriptor from the peer.
    #[error("peer {peer:?} refused the transfer ({status:?}): {text}")]
    PeerRefused {
        /// The peer.
        peer: String,
        /// The peer's reason.
        status: Status,
        /// The peer's explanation.
        text: String,
    },

    /// The setting `same_host=require` demands direct copies, which are not possible. Remove the
    /// obstacle that the reason names, or set `TCPX_SAME_HOST=auto`.
    #[error(
        "memory of peer {peer:?} cannot be copied directly, as TCPX_SAME_HOST=require demands: \
         {reason}"
    )]
    NotSameHost {
        /// The peer.
        peer: String,
        /// Why direct copies are not possible.
        reason: String,
    },

    /// The peer broke the protocol; its connection was closed. Run the same release on both sides.
    #[error("peer {peer:?} broke the protocol: {what}")]
    PeerMisbehaved {
        /// The peer.
        peer: String,
        /// The violation.
        what: Misbehaviour,
    },

    /// The caller's time limit expired. Nothing was cancelled; the caller may wait again.
    #[error("{what} did not happen within {after:?}")]
    Timeout {
        /// The awaited event, for people: programs know it from the call.
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

    /// The handle belongs to the parent of this forked process. Create a session in this process;
    /// dropping an inherited handle does nothing.
    #[error(transparent)]
    Forked(#[from] Forked),

    /// No network interface can be used.
    #[error(transparent)]
    Interfaces(Arc<SelectError>),

    /// Every port that the session may listen on is taken at one of its addresses. Typical cause:
    /// more sessions run on this host than the setting `listen_port` has ports.
    #[error("{}", Taken(ports, address))]
    PortsTaken {
        /// The ports that the session may take.
        ports: PortRange,
        /// The last port that was tried, with the address at which it is taken.
        address: SocketAddr,
    },

    /// None of the host names in the peer's connection info resolves to an address. Check the names
    /// that the peer advertises, and this machine's resolver.
    #[error(
        "peer {peer:?} cannot be reached: {host}, which it advertises, cannot be resolved: {source}"
    )]
    PeerNotResolved {
        /// The peer.
        peer: String,
        /// The last host name that was tried.
        host: String,
        /// The resolver's error.
        source: IoError,
    },

    /// The trace that the setting `trace` asks for cannot be written. Typical causes: the folder does
    /// not exist, or this process may not write to it.
    #[error(
        "the trace {} cannot be written: {source}; name a file that this process may write in TCPX_TRACE, or \
         unset it",
        path.display()
    )]
    Trace {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: IoError,
    },

    /// The operating system refused a call. Check the limits and permissions of this process.
    #[error("{what}: {source}")]
    Io {
        /// The operation that failed, for people.
        what: &'static str,
        /// The system's error.
        source: IoError,
    },
}

impl Error {
    /// Returns the category of the error.
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
            | Self::PeerNotResolved { .. }
            | Self::PeerSilent { .. } => ErrorKind::Disconnected,
            Self::PeerRefused {
                status: Status::Truncated,
                ..
            } => ErrorKind::Truncated,
            Self::PeerRefused { .. } => ErrorKind::Refused,
            Self::PeerMisbehaved { .. } => ErrorKind::ProtocolViolation,
            Self::Timeout { .. } | Self::NotReachedInTime { .. } => ErrorKind::Timeout,
            Self::Aborted => ErrorKind::Aborted,
            Self::Closed => ErrorKind::Closed,
            Self::Forked(_) => ErrorKind::Forked,
            Self::Interfaces(_)
            | Self::PortsTaken { .. }
            | Self::Trace { .. }
            | Self::Io { .. } => ErrorKind::Environment,
        }
    }

    /// Returns the remedy, if the causes suggest one. The text of the error includes it.
    #[must_use]
    pub fn remedy(&self) -> Option<String> {
        match self {
            Self::PeerUnreachable { attempts, .. } | Self::NotReachedInTime { attempts, .. } => {
                remedy::remedy(attempts)
            }
            _ => None,
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
