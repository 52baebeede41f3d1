//! The sending end.

use super::{Comm, Direction, MemoryHandle, Request, sealed};
use crate::error::Error;

/// The sending end of a connection.
pub type SendComm = Comm<Sending>;

/// Marks a [`SendComm`].
#[derive(Debug)]
pub struct Sending {
    /// The plugin gave the comm on the first call of `connect`, and nobody has said that the peer accepted it.
    may_be_connecting: bool,
}

impl Direction for Sending {}

impl sealed::Direction for Sending {
    const SENDS: bool = true;

    fn may_be_connecting(&self) -> bool {
        self.may_be_connecting
    }
}

impl Sending {
    pub(super) fn new(may_be_connecting: bool) -> Self {
        Self { may_be_connecting }
    }
}

impl SendComm {
    /// The peer has accepted the connection.
    ///
    /// A plugin should give a comm when it is connected. Some (Fast Socket) give it at once and let a thread connect it,
    /// which would touch the memory of a comm that was closed meanwhile. So a comm that was given by the first call and
    /// is dropped before this, and before memory was registered on it, is not closed but left behind.
    pub fn accepted(&mut self) {
        self.direction.may_be_connecting = false;
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
