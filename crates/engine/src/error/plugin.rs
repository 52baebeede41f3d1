//! What went wrong with a NCCL net plugin.

use std::io;

use super::{IoError, Misbehaviour};

/// How a plugin broke its contract. The cause of [`Error::PluginBroke`](super::Error::PluginBroke).
///
/// Typical cause of all: a defect of the plugin, or a version of it that this build does not know.
/// Whoever provides the plugin must act; `TCPX_PLUGIN` and `TCPX_PLUGIN_VERSION` choose another
/// one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PluginFault {
    /// A comm's device handle is of another size than the one of unpack devices.
    #[error("its device handle has {found} bytes, expected {expected}")]
    HandleSize {
        /// Bytes that it has.
        found: usize,
        /// Bytes that it must have.
        expected: usize,
    },

    /// A comm's device handle is null.
    #[error("its device handle is null")]
    HandleNull,

    /// A comm's device handle names addresses that cannot be.
    #[error("its device handle names a ring at {ring:#x} and pages at {pages:#x}")]
    HandleAddresses {
        /// Where the ring of fragments is said to be.
        ring: usize,
        /// Where the bounce pages are said to be.
        pages: usize,
    },

    /// A comm's device handle names a ring in the memory of a device.
    #[error("its device handle names a ring at {ring:#x}, which the CPU cannot read")]
    RingOnDevice {
        /// Where the ring is said to be.
        ring: usize,
    },

    /// A receive consists of more fragments than the ring holds.
    #[error("a receive has {count} fragments, {max} is the most")]
    TooManyFragments {
        /// Fragments of the receive.
        count: u64,
        /// Fragments that the ring holds.
        max: u64,
    },

    /// A fragment is outside of the bounce pages.
    #[error(
        "a fragment of {len} bytes at {offset} ends past the 4 GiB of bounce memory that offsets \
         reach"
    )]
    FragmentOutOfBounds {
        /// Where the fragment begins, from the start of the bounce pages.
        offset: u32,
        /// Bytes of the fragment.
        len: u32,
    },

    /// The fragments of a receive overlap, leave a gap, or end too early or too late.
    #[error("{count} fragments cover {covered} bytes of a message of {len}")]
    FragmentsMismatch {
        /// Fragments of the receive.
        count: u64,
        /// Bytes that they cover from the start on without a gap.
        covered: u64,
        /// Bytes of the message.
        len: u64,
    },

    /// A receive is done and has another length than was sent.
    #[error("it received {found} bytes of a message of {expected}")]
    WrongLength {
        /// Bytes that the plugin reported.
        found: usize,
        /// Bytes of the message.
        expected: usize,
    },

    /// Memory was received into and is not known when it is flushed.
    #[error("it does not know memory that it received into")]
    UnknownMemory,
}

/// Why the comms of a plugin could not be set up. The cause of
/// [`Error::PluginNotConnected`](super::Error::PluginNotConnected).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CommCause {
    /// The plugin of this side failed. Look at its own settings and log.
    #[error(transparent)]
    Plugin(#[from] tcpx_ncclnet::Error),

    /// The two sides use different plugins, or versions of its API. Set `TCPX_PLUGIN` and
    /// `TCPX_PLUGIN_VERSION` alike on both sides.
    #[error(
        "one side uses the plugin {ours:?}, the other {theirs:?}: \
         both must use the same (TCPX_PLUGIN, TCPX_PLUGIN_VERSION)"
    )]
    PluginsDiffer {
        /// What the plugin of this side calls itself.
        ours: String,
        /// What the peer's plugin calls itself.
        theirs: String,
    },

    /// One side's plugin takes only messages that are too short to be of use. Use another plugin.
    #[error("the plugin takes messages of {bytes} bytes at most, at least {min} are needed")]
    MessagesTooShort {
        /// The longest message that both sides take.
        bytes: usize,
        /// The least that is needed.
        min: usize,
    },

    /// The plugin did not connect in time. Typical causes: a firewall, or interfaces of the plugin
    /// that do not lead to the peer. Look at the plugin's settings and its log.
    #[error("the plugin's connections did not come about in time (limit: TCPX_CONNECT_TIMEOUT)")]
    TimedOut,

    /// The peer gave up. Act on its words.
    #[error("the peer says: {0}")]
    Goodbye(
        /// The peer's words.
        String,
    ),

    /// The peer closed the connection meanwhile. Typical cause: its process has ended.
    #[error("the peer closed the connection while its comms were set up")]
    ClosedByPeer,

    /// The connection over which comms are set up broke. Look at the network and the peer.
    #[error(transparent)]
    Io(IoError),

    /// The peer does not take the few bytes that set a comm up. Look at the peer.
    #[error("the peer does not read")]
    NotReading,

    /// The peer broke the protocol.
    #[error("the peer broke the protocol: {0}")]
    Misbehaved(Misbehaviour),

    /// This side gave up: its session is closing, or the peer was removed.
    #[error("it was given up: the session is closing, or has removed the peer")]
    Cancelled,

    /// A thread that calls the plugin could not be started. Look at the limits of this process.
    #[error("cannot start a thread: {0}")]
    Thread(IoError),

    /// A thread that calls the plugin has panicked. Report it.
    #[error("the plugin's {call} ended")]
    ThreadEnded {
        /// The call that the thread makes.
        call: &'static str,
    },
}

impl From<io::Error> for CommCause {
    /// Takes the end of a stream for the peer's doing.
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
