//! NCCL net plugins as a carrier of payload.
//!
//! A plugin lane is a lane with a pair of comms beside its stream, one for each direction. The
//! stream carries every frame, as on other lanes; the *payload* of a large WRITE or READ answer
//! travels as messages on the comm, which a flag in its frame indicates. A comm matches messages in
//! the order in which they were posted, and the order of the frames on the stream is the order of
//! the messages on the comm: the frames announce the messages.
//!
//! ```text
//!   CommSend ─ isend ──► comm ──► irecv ─ CommReceive    payload, in messages of limited length
//!   Sender ─── frames ─► stream ─────────► Receiver      tables, Acks, messages, small payload
//! ```
//!
//! - [`setup`] makes the comms after the handshake of the lanes, on separate threads.
//! - [`send`] sends directly from registered memory if the plugin accepts the memory and a message
//!   is contiguous, otherwise through a slot.
//! - [`receive`] mirrors this; on GPUDirect-TCPX the bytes arrive in bounce pages, which [`unpack`]
//!   finds, and are copied from there to their destination.
//! - [`memory`] holds the registrations of a comm and its slots.
//!
//! There are no callbacks: the driver of the lane tests the oldest request of each comm, and polls
//! while requests are outstanding.

mod memory;
mod receive;
mod send;
mod setup;
mod unpack;

use std::sync::Arc;
use std::time::{Duration, Instant};

use tcpx_cuda::Device;
use tcpx_ncclnet::{DeviceType, Plugin};

pub(crate) use self::receive::{CommReceive, Target};
pub(crate) use self::send::CommSend;
pub(crate) use self::setup::{Comms, RawLane, set_up};
use crate::config::Config;
use crate::error::Error;
use crate::memory::{Registry, Staging};

/// Payload up to this size stays in the stream: a message on a comm costs two polls and a slot, in
/// addition to the frame.
const INLINE_BYTES: usize = 8 << 10;

/// Returns whether a payload travels behind its frame although the lane has a comm.
pub(crate) fn is_inline(bytes: usize) -> bool {
    bytes <= INLINE_BYTES
}

/// Limits the length of a message, and sets the size of a slot. Shorter messages cost more calls;
/// longer ones have left the cache of a slot before they are sent.
const MESSAGE_BYTES: usize = 1 << 20;

/// Limits the length of a message on an unpack device. GPUDirect-TCPX is run with chunks of 512
/// KiB; it loses track of bounce pages if a message has more than one chunk on a socket, and a ring
/// slot holds 2048 fragments.
const UNPACK_MESSAGE_BYTES: usize = 512 << 10;

/// Limits how long releasing memory waits for a comm that completes no request.
const LET_GO_STALL: Duration = Duration::from_secs(1);

/// Time that a broken comm waits before it ends its lane:
/// the peer may have sent the reason on the stream.
const LAST_WORDS: Duration = Duration::from_millis(250);

/// Why and when a comm was closed.
struct Broken {
    error: Error,
    since: Instant,
}

impl Broken {
    fn new(error: Error) -> Self {
        Self {
            error,
            since: Instant::now(),
        }
    }

    /// Returns the error if the plugin has reported it.
    fn of_plugin(&self) -> Option<&Error> {
        let is_reported = matches!(self.error, Error::Plugin(tcpx_ncclnet::Error::Call { .. }));
        is_reported.then_some(&self.error)
    }

    /// Returns the error once the waiting time is over.
    fn check(&self) -> Result<(), Error> {
        if self.since.elapsed() < LAST_WORDS {
            Ok(())
        } else {
            Err(self.error.clone())
        }
    }
}

/// The plugin of a session.
pub(crate) struct Net {
    plugin: Plugin,
    message_bytes: usize,
    /// Stand-in for a GPU that stages host memory as well, if configured.
    standin: Option<Arc<dyn Device>>,
    let_go_limit: Duration,
    /// The GPU that was current when the session was opened:
    /// used until the session has device memory.
    opened_on: Option<Arc<dyn Device>>,
}

impl Net {
    pub(crate) fn open(config: &Config, staging: &Staging) -> Result<Arc<Self>, Error> {
        let current = tcpx_cuda::current().unwrap_or_else(|error| {
            tracing::debug!(%error, "cannot determine the current GPU");
            None
        });
        let plugin = match config.plugin_version() {
            0 => Plugin::open(config.plugin())?,
            version => Plugin::open_version(config.plugin(), version)?,
        };
        let limit = |device: &tcpx_ncclnet::Properties| {
            let ours = match device.device_type {
                DeviceType::Unpack => UNPACK_MESSAGE_BYTES,
                DeviceType::Host => MESSAGE_BYTES,
            };
            ours.min(device.max_message_bytes)
        };
        let message_bytes = plugin.devices().iter().map(limit).min();
        tracing::debug!(
            plugin = plugin.name(),
            library = plugin.library(),
            version = plugin.api_version(),
            devices = plugin.devices().len(),
            "plugin opened"
        );
        Ok(Arc::new(Self {
            message_bytes: message_bytes.unwrap_or(MESSAGE_BYTES),
            opened_on: current.filter(|_| takes_gpu_memory(&plugin)),
            plugin,
            standin: staging.host().cloned(),
            let_go_limit: config.peer_timeout(),
        }))
    }

    /// Returns the GPU that comms are made for: a GPU with memory of the session, otherwise the GPU
    /// that was current when the session was opened. Returns `None` if the plugin does not support
    /// device memory.
    pub(crate) fn gpu(&self, regions: &Registry) -> Option<Arc<dyn Device>> {
        if !takes_gpu_memory(&self.plugin) {
            return None;
        }
        regions.first_gpu().or_else(|| self.opened_on.clone())
    }

    /// Returns the number of network devices.
    pub(crate) fn devices(&self) -> usize {
        self.plugin.devices().len()
    }
}

fn takes_gpu_memory(plugin: &Plugin) -> bool {
    plugin.devices().iter().any(|device| device.cuda_memory)
}

/// Waits for a comm as long as it makes progress.
struct Patience {
    since: Instant,
    moved: Instant,
    limit: Duration,
    turns: u32,
}

impl Patience {
    fn new(limit: Duration) -> Self {
        let now = Instant::now();
        Self {
            since: now,
            moved: now,
            limit,
            turns: 0,
        }
    }

    fn error(&self) -> Error {
        Error::Timeout {
            what: "the release of memory by a plugin",
            after: self.since.elapsed(),
        }
    }

    /// Waits one turn; returns false once the limit is exceeded.
    fn wait(&mut self, moved: bool) -> bool {
        let now = Instant::now();
        if moved {
            self.moved = now;
            self.turns = 0;
        }
        self.turns += 1;
        if self.turns < 100 {
            std::thread::yield_now();
        } else {
            std::thread::sleep(Duration::from_micros(50));
        }
        now - self.moved < LET_GO_STALL && now - self.since < self.limit
    }
}
