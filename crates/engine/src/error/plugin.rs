//! Errors that a NCCL net plugin caused.

use std::io;

use super::{IoError, Misbehaviour};

/// How a plugin violated the plugin API. The cause in
/// [`Error::PluginBroke`](super::Error::PluginBroke).
///
/// Typical cause of all: a defect in the plugin, or a version of it that this build does not
/// support. The provider of the plugin must act; `TCPX_PLUGIN` and `TCPX_PLUGIN_VERSION` choose
/// another plugin.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PluginFault {
    /// A comm's device handle does not have the size of an unpack device's handle.
    #[error("its device handle has {found} bytes, expected {expected}")]
    HandleSize {
        /// Actual size.
        found: usize,
        /// Required size.
        expected: usize,
    },

    /// A comm's device handle is null.
    #[error("its device handle is null")]
    HandleNull,

    /// A comm's device handle contains invalid addresses.
    #[error("its device handle names a ring at {ring:#x} and pages at {pages:#x}")]
    HandleAddresses {
        /// Address of the ring of fragments, according to the handle.
        ring: usize,
        /// Address of the bounce pages, according to the handle.
        pages: usize,
    },

    /// A comm's device handle points to a ring in device memory.
    #[error("its device handle names a ring at {ring:#x}, which the CPU cannot read")]
    RingOnDevice {
        /// Address of the ring, according to the handle.
        ring: usize,
    },

    /// A receive consists of more fragments than the ring holds.
    #[error("a receive has {count} fragments, {max} is the most")]
    TooManyFragments {
        /// Number of fragments of the receive.
        count: u64,
        /// Capacity of the ring.
        max: u64,
    },

    /// A fragment lies outside of the bounce pages.
    #[error(
        "a fragment of {len} bytes at {offset} ends past the 4 GiB of bounce memory that offsets \
         reach"
    )]
    FragmentOutOfBounds {
        /// Start of the fragment, relative to the bounce pages.
        offset: u32,
        /// Length of the fragment.
        len: u32,
    },

    /// The fragments of a receive overlap, leave a gap, or cover too few or too many bytes.
    #[error("{count} fragments cover {covered} bytes of a message of {len}")]
    FragmentsMismatch {
        /// Number of fragments of the receive.
        count: u64,
        /// Bytes covered from the start without a gap.
        covered: u64,
        /// Length of the message.
        len: u64,
    },

    /// A completed receive has another length than the message.
    #[error("it received {found} bytes of a message of {expected}")]
    WrongLength {
        /// Length reported by the plugin.
        found: usize,
        /// Length of the message.
        expected: usize,
    },

    /// The plugin does not know the memory of a receive when it is flushed.
    #[error("it does not know memory that it received into")]
    UnknownMemory,
}

/// Why the comms of a plugin could not be set up. The cause in
/// [`Error::PluginNotConnected`](super::Error::PluginNotConnected).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CommCause {
    /// The plugin of this side failed. Check its own settings and log.
    #[error(transparent)]
    Plugin(#[from] tcpx_ncclnet::Error),

    /// The two sides use different plugins, or different versions of the plugin API. Set
    /// `TCPX_PLUGIN` and `TCPX_PLUGIN_VERSION` alike on both sides.
    #[error(
        "one side uses the plugin {ours:?}, the other {theirs:?}: \
         both must use the same (TCPX_PLUGIN, TCPX_PLUGIN_VERSION)"
    )]
    PluginsDiffer {
        /// Name of this side's plugin.
        ours: String,
        /// Name of the peer's plugin.
        theirs: String,
    },

    /// The plugin of one side accepts only messages that are too short to be useful.
    /// Use another plugin.
    #[error("the plugin takes messages of {bytes} bytes at most, at least {min} are needed")]
    MessagesTooShort {
        /// The longest message that both sides accept.
        bytes: usize,
        /// The required length.
        min: usize,
    },

    /// The plugin did not connect in time. Typical causes: a firewall, or plugin interfaces that do
    /// not reach the peer. Check the plugin's settings and log.
    #[error("the plugin did not connect in time (limit: TCPX_CONNECT_TIMEOUT)")]
    TimedOut,

    /// The peer gave up. Act on its explanation.
    #[error("the peer says: {0}")]
    Goodbye(
        /// The peer's explanation.
        String,
    ),

    /// The peer closed the connection during setup. Typical cause: its process has ended.
    #[error("the peer closed the connection while its comms were set up")]
    ClosedByPeer,

    /// The connection over which comms are set up broke. Check the network and the peer.
    #[error(transparent)]
    Io(IoError),

    /// The peer does not read the few bytes that set up a comm. Check the peer.
    #[error("the peer does not read")]
    NotReading,

    /// The peer broke the protocol.
    #[error("the peer broke the protocol: {0}")]
    Misbehaved(Misbehaviour),

    /// This side gave up: its session is closing, or the peer was removed.
    #[error("setup was cancelled: the session is closing, or has removed the peer")]
    Cancelled,

    /// A thread that calls the plugin could not be started. Check the limits of this process.
    #[error("cannot start a thread: {0}")]
    Thread(IoError),

    /// A thread that calls the plugin panicked. Report it.
    #[error("the thread that calls the plugin's {call} panicked")]
    ThreadEnded {
        /// The call that the thread makes.
        call: &'static str,
    },
}

impl From<io::Error> for CommCause {
    /// Maps the end of a stream to the peer.
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::UnexpectedEof => Self::ClosedByPeer,
            _ => Self::Io(error.into()),
        }
    }
}

impl From<Misbehaviour> for CommCause {
    fn from(what: Misbehaviour) -> Self {
        Self::Misbehaved(what)
    }
}
