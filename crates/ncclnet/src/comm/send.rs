//! The sending end.

use std::time::{Duration, Instant};

use super::{Comm, Direction, MemoryHandle, Request, sealed};
use crate::error::Error;

/// The sending end of a connection.
pub type SendComm = Comm<Sending>;

/// Marks a [`SendComm`].
#[derive(Debug)]
pub struct Sending {
    connected: Connected,
}

/// Whether the plugin is done with connecting.
#[derive(Debug, Clone, Copy)]
enum Connected {
    /// It said so: it gave the comm after it had been asked several times.
    Yes,
    /// It gave the comm at once, and nobody has said that the peer accepted it.
    Perhaps,
    /// The peer has accepted it, since then.
    Accepted(Instant),
}

/// How long a plugin's thread may need to notice that the peer has accepted.
const NOTICE_TIME: Duration = Duration::from_millis(100);

impl Direction for Sending {}

impl sealed::Direction for Sending {
    const SENDS: bool = true;

    fn settle(&self) -> bool {
        match self.connected {
            Connected::Yes => true,
            Connected::Perhaps => false,
            Connected::Accepted(since) => {
                // The peer's word can be faster than the thread that connects.
                std::thread::sleep(NOTICE_TIME.saturating_sub(since.elapsed()));
                true
            }
        }
    }
}

impl Sending {
    /// `at_once`: the plugin gave the comm on the first call.
    pub(super) fn new(at_once: bool) -> Self {
        let connected = if at_once {
            Connected::Perhaps
        } else {
            Connected::Yes
        };
        Self { connected }
    }
}

impl SendComm {
    /// The peer has accepted the connection.
    ///
    /// A plugin should give a comm when it is connected. Some (Fast Socket) give it at once and let a thread connect it,
    /// which would touch the memory of a comm that was closed meanwhile. So a comm that was given by the first call and
    /// is dropped before this is not closed but left behind; unless memory was registered on it, which the plugin must let go
    /// of: say this before.
    pub fn accepted(&mut self) {
        if let Connected::Perhaps = self.direction.connected {
            self.direction.connected = Connected::Accepted(Instant::now());
        }
    }

    /// Queues a message: `bytes` bytes at `offset` of registered memory. `None` means that there is no
    /// room now: test the oldest request and try again.
    ///
    /// Messages arrive in the order in which they are sent. Most plugins ignore the tag.
    /// The memory must keep its contents until the request is done.
    ///
    /// # Errors
    ///
    /// [`Error::TooLarge`], [`Error::OutOfBounds`] and [`Error::Foreign`] are harmless; after any other
    /// error the comm is dead.
    pub fn isend(
        &mut self,
        memory: &MemoryHandle,
        offset: usize,
        bytes: usize,
        tag: i32,
    ) -> Result<Option<Request>, Error> {
        let message = self.message("isend", memory, offset, bytes, tag)?;
        if self.is_full() {
            return Ok(None);
        }
        let mut request = std::ptr::null_mut();
        // SAFETY: the comm is open and `&mut self` keeps others out; the range is inside memory that
        // `register`'s caller keeps until the request is done.
        let code = unsafe {
            self.core
                .calls
                .isend
                .call(self.raw, message, &raw mut request)
        };
        self.outcome("isend", code)?;
        Ok(self.posted(request))
    }
}
