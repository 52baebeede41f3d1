//! NCCL net plugins as a carrier of payload.
//!
//! A plugin lane is a lane with a pair of comms beside its stream, one for each direction. The stream
//! carries every frame, as always; the *payload* of a large WRITE or READ answer travels as messages on
//! the comm, and a flag in its frame says so. A comm matches messages in the order in which they were
//! posted, and the order of the frames on the stream is the order of the messages on the comm: the
//! frames are the announcements.
//!
//! ```text
//!   CommSend ─ isend ──► comm ──► irecv ─ CommReceive    payload, in messages of at most `message_bytes`
//!   Sender ─── frames ─► stream ─────────► Receiver      tables, acknowledgements, notifications, small payload
//! ```
//!
//! - [`setup`] makes the comms after the handshake of the lanes, on threads of its own.
//! - [`send`] sends straight from registered memory where the plugin takes it and a message is in one
//!   piece, else by way of a slot.
//! - [`receive`] does likewise; on GPUDirect-TCPX the bytes lie in bounce pages, which [`unpack`]
//!   finds, and go from there to where they belong.
//! - [`memory`] has the registrations of a comm and its slots.
//!
//! Nothing calls back: the driver of the lane tests the oldest request of each comm, and looks again
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

/// Payload up to this size stays in the stream: a message on a comm costs two polls and a slot, and its frame is sent anyway.
const INLINE_BYTES: usize = 8 << 10;

/// The largest message, and what a slot holds. Shorter ones cost more calls; longer ones, once they lie in a slot, have
/// left the cache before they are sent.
const MESSAGE_BYTES: usize = 1 << 20;

/// The largest message on an unpack device. GPUDirect-TCPX is run with chunks of 512 KiB; it loses track of bounce
/// pages when a message has more than one chunk on a socket, and a ring slot holds 2048 fragments.
const UNPACK_MESSAGE_BYTES: usize = 512 << 10;

/// How long letting go of memory waits for a comm on which nothing is completed.
const LET_GO_STALL: Duration = Duration::from_secs(1);

/// How long a broken comm is kept from ending its connection: whoever closed the other end may have said why on the stream.
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

    /// The error, once it is due.
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
    /// Stands for the device of host memory, where that is staged too.
    standin: Option<Arc<dyn Device>>,
    let_go_limit: Duration,
    /// What was current where the session was opened: the best guess until it has memory of a device.
    opened_on: Option<Arc<dyn Device>>,
}

impl Net {
    pub(crate) fn open(config: &Config, staging: &Staging) -> Result<Arc<Self>, Error> {
        let current = tcpx_cuda::current().unwrap_or_else(|error| {
            tracing::debug!(%error, "which GPU is current is not known");
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

    /// The GPU that comms are made for: one that the session has memory on, else the one that was current where it was
    /// opened. None where the plugin takes no memory of devices.
    pub(crate) fn gpu(&self, regions: &Registry) -> Option<Arc<dyn Device>> {
        if !takes_gpu_memory(&self.plugin) {
            return None;
        }
        regions.first_gpu().or_else(|| self.opened_on.clone())
    }

    /// How many network devices there are.
    pub(crate) fn devices(&self) -> usize {
        self.plugin.devices().len()
    }
}

fn takes_gpu_memory(plugin: &Plugin) -> bool {
    plugin.devices().iter().any(|device| device.cuda_memory)
}

/// Waits for a comm, as long as it moves.
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
            what: "the end of a plugin's use of memory",
            after: self.since.elapsed(),
        }
    }

    /// One turn of waiting; false when it has been too long.
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
