//! Connections: their set-up, and the messages on them.
//!
//! ```text
//!  receiver:  Plugin::listen ─► Listener ──accept──► RecvComm ──register──► MemoryHandle
//!                                  │ Handle (by any means)     irecv ─► test ─► (read) ─► consume
//!                                  ▼
//!  sender:    Plugin::connect ─► Connecting ──poll──► SendComm ──register──► MemoryHandle
//!                                                              isend ─► test
//! ```
//!
//! An object that fails with a code of the plugin is dead from then on: plugins free their state
//! before they return an error, so only the closing call is made afterwards. (A failed registration
//! is the one exception: it concerns that memory only.)

mod accept;
mod connect;
mod device;
mod handle;
mod memory;
mod recv;
mod send;
mod stable;

use std::ffi::{c_int, c_void};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub use accept::Listener;
pub use connect::Connecting;
pub use device::DeviceHandle;
pub use handle::Handle;
pub use memory::MemoryHandle;
pub use recv::{Flush, Flushing, Receiving, RecvComm};
pub use send::{SendComm, Sending};

use crate::error::Error;
use crate::log::limit::limited_warning;
use crate::plugin::{Core, check};
use crate::properties::Properties;
use crate::sys::calls::{Message, Ptr};
use crate::window::Window;
use memory::Registrations;

/// One end of a connection: [`SendComm`] or [`RecvComm`].
///
/// Dropping it deregisters its memory and closes it (but see [`SendComm::accepted`]). Outstanding
/// requests are abandoned; once the drop returns, the plugin no longer accesses their memory.
///
/// # Polling
///
/// A request waits in a queue of the plugin until it is tested: **testing is what moves bytes**.
/// Keep testing the oldest outstanding request on both sides; testing a newer one is refused,
/// because plugins return errors for it.
pub struct Comm<D: Direction> {
    core: Arc<Core>,
    /// The plugin's comm.
    raw: Ptr,
    /// Distinguishes this comm's memory handles and requests from those of others.
    id: u64,
    device: usize,
    alive: bool,
    registrations: Registrations,
    window: Window,
    direction: D,
}

/// The direction of a comm. Implemented by [`Sending`] and [`Receiving`] only.
pub trait Direction: sealed::Direction {}

mod sealed {
    pub trait Direction {
        const SENDS: bool;

        /// Returns the number of requests that are not messages.
        fn flushes(&self) -> usize {
            0
        }

        /// Waits until no thread of the plugin still works on a comm that it has already returned;
        /// returns false if that cannot be known.
        fn settle(&self) -> bool {
            true
        }
    }
}

// SAFETY: NCCL creates comms on one thread and uses them on another, so plugins do not tie them to
// a thread. All calls need `&mut self` or ownership: one thread at a time. The pointers in `D`
// belong to the plugin or the comm.
unsafe impl<D: Direction> Send for Comm<D> {}

/// A request: the position of a message among those posted on a comm. Valid for that comm only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Request {
    comm: u64,
    number: u64,
}

impl Request {
    /// Returns how many requests were posted on the comm before this one.
    ///
    /// On a [`RecvComm`] of an unpack device this is also the count that selects the ring's slot.
    #[must_use]
    pub fn number(self) -> u64 {
        self.number
    }
}

/// The result of a finished request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// The size of the message according to the plugin. Several plugins never report it (and it is
    /// `None` for an empty message): do not rely on it, let the sender announce sizes.
    pub reported_bytes: Option<usize>,
}

impl<D: Direction> Comm<D> {
    fn new(core: Arc<Core>, raw: Ptr, device: usize, keeps_done: bool, direction: D) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let slots = core.abi.slots;
        Self {
            core,
            raw,
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            device,
            alive: true,
            registrations: Registrations::default(),
            window: Window::new(slots, keeps_done),
            direction,
        }
    }

    /// Returns the device's index.
    #[must_use]
    pub fn device(&self) -> usize {
        self.device
    }

    /// Returns the device's properties.
    #[must_use]
    pub fn properties(&self) -> &Properties {
        &self.core.devices[self.device]
    }

    /// Returns the number of slots for requests.
    #[must_use]
    pub fn slots(&self) -> usize {
        self.window.slots()
    }

    /// Returns how many requests hold a slot: outstanding requests, receives not consumed if the
    /// plugin requires that, and flushes.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.window.taken() + self.direction.flushes()
    }

    /// Returns whether every slot is taken.
    fn is_full(&self) -> bool {
        self.in_flight() >= self.slots()
    }

    /// Returns whether no call has failed.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        self.alive
    }

    /// Moves bytes, and returns the completion once the request is done. Call it again on `None`.
    /// It must be the oldest outstanding request; after `Some` it has ended, except that a receive
    /// may have to be [consumed](RecvComm::consume).
    ///
    /// # Errors
    ///
    /// [`Error::OutOfOrder`] or [`Error::Foreign`], harmless; else the comm has failed. **Not**
    /// every plugin notices a peer that dies silently: set a deadline for progress.
    pub fn test(&mut self, request: Request) -> Result<Option<Completion>, Error> {
        self.check_alive("test")?;
        self.check_own(request)?;
        let next = self.window.to_test();
        if next != Some(request.number) {
            return Err(out_of_order("test", request, next));
        }
        let pointer = self.window.pointer(request.number);
        let mut done: c_int = 0;
        // More than the one element needed: some plugins write one for each buffer they could take.
        let mut sizes = [0 as c_int; 8];
        // SAFETY: the request belongs to this comm and is outstanding; `&mut self` excludes other
        // calls.
        let code = unsafe { (self.core.calls.test)(pointer, &raw mut done, sizes.as_mut_ptr()) };
        self.outcome("test", code)?;
        if done == 0 {
            return Ok(None);
        }
        self.window.tested();
        Ok(Some(Completion {
            reported_bytes: usize::try_from(sizes[0]).ok().filter(|bytes| *bytes > 0),
        }))
    }

    fn check_alive(&self, call: &'static str) -> Result<(), Error> {
        if self.alive {
            Ok(())
        } else {
            Err(Error::Dead { call })
        }
    }

    fn check_own(&self, request: Request) -> Result<(), Error> {
        if request.comm == self.id {
            Ok(())
        } else {
            Err(Error::Foreign {
                what: "the request",
            })
        }
    }

    /// Marks the comm as dead if a call has failed.
    fn outcome(&mut self, call: &'static str, code: c_int) -> Result<(), Error> {
        let outcome = check(call, code);
        self.alive &= outcome.is_ok();
        outcome
    }

    /// Checks and returns the part of registered memory that holds a message.
    fn message(
        &self,
        call: &'static str,
        memory: &MemoryHandle,
        offset: usize,
        bytes: usize,
        tag: i32,
    ) -> Result<Message, Error> {
        self.check_alive(call)?;
        let limit = self.properties().max_message_bytes;
        if bytes > limit {
            return Err(Error::TooLarge { call, bytes, limit });
        }
        memory.message(self.id, offset, bytes, tag)
    }

    /// Records the request that the plugin returned; `None` if it accepted nothing.
    fn posted(&mut self, request: *mut c_void) -> Option<Request> {
        (!request.is_null()).then(|| Request {
            comm: self.id,
            number: self.window.post(request),
        })
    }
}

impl<D: Direction> Drop for Comm<D> {
    fn drop(&mut self) {
        if !self.direction.settle() && self.registrations.is_empty() {
            limited_warning!(
                plugin = self.core.name,
                remedy =
                    "see whether the peer's plugin answers; the comm stays until the process ends",
                "comm left open: it may still be connecting"
            );
            // A thread of the plugin may still work on it: keep its code loaded.
            std::mem::forget(Arc::clone(&self.core));
            return;
        }
        let abandoned = self.in_flight();
        if abandoned > 0 {
            tracing::debug!(
                plugin = self.core.name,
                abandoned,
                "comm closed with requests"
            );
        }
        self.registrations.clear(&self.core, self.raw);
        let (call, close) = if D::SENDS {
            ("closeSend", self.core.calls.close_send)
        } else {
            ("closeRecv", self.core.calls.close_recv)
        };
        // SAFETY: the comm is open, and this is its last use.
        let code = unsafe { close(self.raw) };
        if let Err(error) = check(call, code) {
            limited_warning!(
                plugin = self.core.name,
                %error,
                remedy = "report it to the maker of the plugin; what it held stays until the process ends",
                "a comm was not closed cleanly"
            );
        }
    }
}

impl<D: Direction> fmt::Debug for Comm<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Comm")
            .field("plugin", &self.core.name)
            .field("device", &self.device)
            .field("alive", &self.alive)
            .field("in_flight", &self.in_flight())
            .finish()
    }
}

fn out_of_order(call: &'static str, request: Request, next: Option<u64>) -> Error {
    Error::OutOfOrder {
        call,
        asked: request.number,
        next,
    }
}
