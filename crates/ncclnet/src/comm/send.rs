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

/// Whether the plugin has finished connecting.
#[derive(Debug, Clone, Copy)]
enum Connected {
    /// Certain: it returned the comm after several calls.
    Yes,
    /// Unknown: it returned the comm at once, and nobody has confirmed that the peer accepted it.
    Perhaps,
    /// The peer has accepted it, at this time.
    Accepted(Instant),
}

/// Maximum time that a plugin's thread needs to notice that the peer has accepted.
const NOTICE_TIME: Duration = Duration::from_millis(100);

impl Direction for Sending {}

impl sealed::Direction for Sending {
    const SENDS: bool = true;

    fn settle(&self) -> bool {
        match self.connected {
            Connected::Yes => true,
            Connected::Perhaps => false,
            Connected::Accepted(since) => {
                // The peer's confirmation can be faster than the thread that connects.
                std::thread::sleep(NOTICE_TIME.saturating_sub(since.elapsed()));
                true
            }
        }
    }
}

impl Sending {
    /// `at_once`: the plugin returned the comm on the first call.
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
    /// Records that the peer has accepted the connection.
    ///
    /// A plugin should return a comm when it is connected. Some (Fast Socket) return it at once and
    /// connect it on a thread, which would access the memory of a comm that was closed meanwhile.
    /// So a comm that was returned by the first call and is dropped before this call is leaked
    /// instead of closed; unless memory was registered on it, which the plugin must release: call
    /// this first.
    pub fn accepted(&mut self) {
        if let Connected::Perhaps = self.direction.connected {
            self.direction.connected = Connected::Accepted(Instant::now());
        }
    }

    /// Posts a send of `bytes` bytes at `offset` of registered memory. `None` means that no slot is
    /// free now: test the oldest request and try again.
    ///
    /// Messages arrive in the order in which they are sent. Most plugins ignore the tag.
    /// The memory must keep its contents until the request is done.
    ///
    /// # Errors
    ///
    /// [`Error::TooLarge`], [`Error::OutOfBounds`] and [`Error::Foreign`] are harmless; after any
    /// other error the comm is dead.
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
        // SAFETY: the comm is open and `&mut self` excludes other calls; the range is inside memory
        // that the caller of `register` keeps until the request is done.
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
