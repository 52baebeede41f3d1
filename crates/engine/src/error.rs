//! Everything that can go wrong, and who has to act on it.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tcpx_net::interfaces::SelectError;
use tcpx_proto::descriptor::DescriptorError;
use tcpx_proto::frame::Status;
use tcpx_proto::handshake::Features;
use tcpx_proto::info::InfoError;

use crate::config::ConfigError;
use crate::region::MemId;

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
    /// The transfer is still in flight.
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
    /// The peer broke the protocol.
    ProtocolViolation,
    /// Not available in this build, on this machine, or with this peer.
    NotSupported,
}

/// An error of the engine. Cheap to clone; [`Error::kind`] sorts it.
#[derive(Clone, Debug, thiserror::Error)]
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

    /// A GPU, or the driver, has refused or failed.
    #[error(transparent)]
    Device(#[from] tcpx_cuda::Error),

    /// A NCCL net plugin cannot be used, or has failed.
    #[error("{0}")]
    Plugin(#[from] tcpx_ncclnet::Error),

    /// A NCCL net plugin did something that it must not.
    #[error("the plugin broke its contract: {what}")]
    PluginBroke {
        /// What it did.
        what: String,
    },

    /// A plugin has messages in hand and completes none.
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

    /// The notification is longer than the protocol carries.
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

    /// No connection to the peer could be made.
    #[error("peer {peer:?} cannot be reached: {attempts}")]
    PeerUnreachable {
        /// The peer.
        peer: String,
        /// Each address that was tried and what happened there.
        attempts: String,
    },

    /// The two sessions do not fit: one requires what the other does not offer.
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

    /// The connection to the peer ended.
    #[error("lost the connection to peer {peer:?}: {reason}")]
    PeerLost {
        /// The peer.
        peer: String,
        /// What was seen.
        reason: String,
    },

    /// The peer's machine still answers, its process does not.
    #[error("peer {peer:?} has made no progress for {after:?} (limit: TCPX_PEER_TIMEOUT)")]
    PeerSilent {
        /// The peer.
        peer: String,
        /// How long nothing happened.
        after: Duration,
    },

    /// The peer refused a chunk.
    #[error("peer {peer:?} refused the transfer ({status:?}): {text}")]
    PeerRefused {
        /// The peer.
        peer: String,
        /// Its reason.
        status: Status,
        /// Its words.
        text: String,
    },

    /// The peer broke the protocol; its connection was closed.
    #[error("peer {peer:?} broke the protocol: {what}")]
    PeerMisbehaved {
        /// The peer.
        peer: String,
        /// How.
        what: String,
    },

    /// The caller's time limit ran out.
    #[error("{what} did not happen within {after:?}")]
    Timeout {
        /// What was waited for.
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

    /// No network interface can be used.
    #[error(transparent)]
    Interfaces(Arc<SelectError>),

    /// The operating system refused something.
    #[error("{what}: {source}")]
    Io {
        /// What was being done.
        what: &'static str,
        /// What the system said.
        source: Arc<io::Error>,
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
            Self::Plugin(_) | Self::PluginBroke { .. } => ErrorKind::Environment,
            Self::UnknownPeer(_) => ErrorKind::NotFound,
            Self::RegionDeregistered(_) | Self::NotRepostable(_) => ErrorKind::NotAllowed,
            Self::TransferActive => ErrorKind::Busy,
            Self::NotPosted => ErrorKind::NotAllowed,
            Self::MessageTruncated { .. } => ErrorKind::Truncated,
            Self::Incompatible { .. } => ErrorKind::NotSupported,
            Self::PeerUnreachable { .. }
            | Self::PeerNotConnected(_)
            | Self::PeerLost { .. }
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
            Self::Interfaces(_) | Self::Io { .. } => ErrorKind::Environment,
        }
    }

    pub(crate) fn io(what: &'static str, source: io::Error) -> Self {
        Self::Io {
            what,
            source: Arc::new(source),
        }
    }
}

/// Names what each side is set to, and what to do about it.
fn incompatible(peer: &str, peer_lacks: Features, session_lacks: Features) -> String {
    const PLUGIN: &str = "comms of a plugin (transport=plugin)";
    const NATIVE: &str = "native lanes only (transport=tcp)";
    let mut facts = Vec::new();
    let mut hints = Vec::new();
    if peer_lacks.contains(Features::COMMS) {
        facts.push(format!(
            "peer {peer:?} offers {NATIVE} and this session requires {PLUGIN}"
        ));
    }
    if session_lacks.contains(Features::COMMS) {
        facts.push(format!(
            "peer {peer:?} requires {PLUGIN} and this session offers {NATIVE}"
        ));
    }
    if !facts.is_empty() {
        hints.push("set TCPX_TRANSPORT alike on both sides");
    }
    // No setting leads to the others: the two builds differ.
    let [theirs, ours] = [peer_lacks, session_lacks].map(|lacks| lacks.without(Features::COMMS));
    if !theirs.is_empty() {
        facts.push(format!(
            "peer {peer:?} does not offer {theirs}, which this session requires"
        ));
    }
    if !ours.is_empty() {
        facts.push(format!(
            "peer {peer:?} requires {ours}, which this session does not offer"
        ));
    }
    if !(theirs | ours).is_empty() {
        hints.push("run the same release on both sides");
    }
    format!("{}: {}", facts.join("; "), hints.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sessions_that_do_not_fit_are_told_both_settings() {
        let error = |peer_lacks: u32, session_lacks: u32| {
            let [peer_lacks, session_lacks] = [peer_lacks, session_lacks].map(Features::from_bits);
            let peer = "decode".to_owned();
            let error = Error::Incompatible {
                peer,
                peer_lacks,
                session_lacks,
            };
            assert_eq!(error.kind(), ErrorKind::NotSupported);
            error.to_string()
        };
        assert_eq!(
            error(2, 0),
            "peer \"decode\" offers native lanes only (transport=tcp) and this session requires \
             comms of a plugin (transport=plugin): set TCPX_TRANSPORT alike on both sides"
        );
        assert_eq!(
            error(0, 2),
            "peer \"decode\" requires comms of a plugin (transport=plugin) and this session offers \
             native lanes only (transport=tcp): set TCPX_TRANSPORT alike on both sides"
        );
        assert_eq!(
            error(0, 0x11),
            "peer \"decode\" requires encryption, features 0x10, which this session does not \
             offer: run the same release on both sides"
        );
        assert_eq!(
            error(0x40, 2),
            "peer \"decode\" requires comms of a plugin (transport=plugin) and this session offers \
             native lanes only (transport=tcp); peer \"decode\" does not offer features 0x40, \
             which this session requires: set TCPX_TRANSPORT alike on both sides; \
             run the same release on both sides"
        );
    }
}
