//! The receiving end.

use super::accept::Buffers;
use super::stable::Stable;
use super::{Comm, DeviceHandle, Direction, MemoryHandle, Request, out_of_order, sealed};
use crate::error::Error;
use crate::properties::{DeviceType, MemoryKind};
use crate::window::Window;

/// The receiving end of a connection.
pub type RecvComm = Comm<Receiving>;

/// Marks a [`RecvComm`], and holds its state.
#[derive(Debug)]
pub struct Receiving {
    device_handle: Option<DeviceHandle>,
    flushes: Window,
    /// Buffers whose addresses plugins may remember from `accept`.
    _buffers: Stable<Buffers>,
}

impl Direction for Receiving {}

impl sealed::Direction for Receiving {
    const SENDS: bool = false;

    fn flushes(&self) -> usize {
        self.flushes.taken()
    }
}

impl Receiving {
    pub(super) fn new(
        device_handle: Option<DeviceHandle>,
        slots: usize,
        buffers: Stable<Buffers>,
    ) -> Self {
        Self {
            device_handle,
            flushes: Window::new(slots, false),
            _buffers: buffers,
        }
    }
}

/// A flush in progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Flush(Request);

/// The result of starting a flush.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flushing {
    /// In progress: [test](RecvComm::test_flush) it.
    Begun(Flush),
    /// The plugin has nothing to flush: the bytes are visible already.
    Needless,
    /// All slots are taken: try again when a request has ended.
    Full,
}

impl RecvComm {
    /// Returns the handle by which received bytes are found on an unpack device; `None` for devices
    /// that write the buffer themselves.
    #[must_use]
    pub fn device_handle(&self) -> Option<DeviceHandle> {
        self.direction.device_handle
    }

    /// Posts a receive of `bytes` bytes at `offset` of registered memory, at least as many as the
    /// sender sends (not every plugin checks that). `None` means that no slot is free now.
    ///
    /// Do not post more receives than will be sent: some plugins report the peer's orderly close as
    /// an error while one is outstanding.
    ///
    /// # Errors
    ///
    /// As [`SendComm::isend`](super::SendComm::isend).
    pub fn irecv(
        &mut self,
        memory: &MemoryHandle,
        offset: usize,
        bytes: usize,
        tag: i32,
    ) -> Result<Option<Request>, Error> {
        let message = self.message("irecv", memory, offset, bytes, tag)?;
        if self.is_full() {
            return Ok(None);
        }
        let mut request = std::ptr::null_mut();
        // SAFETY: the comm is open and `&mut self` excludes other calls; the range is inside memory
        // that the caller of `register` keeps until the request is done.
        let code = unsafe {
            self.core
                .calls
                .irecv
                .call(self.raw, message, &raw mut request)
        };
        self.outcome("irecv", code)?;
        Ok(self.posted(request))
    }

    /// Reports that a received message has been read: its slot, and on an unpack device its bounce
    /// pages, return to the plugin. Call it once for each receive, in order, after
    /// [`test`](Comm::test) returned `Some` **and** the reader of the bytes (a kernel, for example)
    /// has finished. Does nothing if the plugin does not need it
    /// ([`Plugin::needs_consume`](crate::Plugin::needs_consume)).
    ///
    /// # Errors
    ///
    /// [`Error::OutOfOrder`] or [`Error::Foreign`], harmless; else the comm has failed.
    pub fn consume(&mut self, request: Request) -> Result<(), Error> {
        self.check_alive("irecvConsumed")?;
        self.check_own(request)?;
        let next = self.window.to_consume();
        let Some(irecv_consumed) = self.core.calls.irecv_consumed else {
            return if self.window.is_over(request.number) {
                Ok(())
            } else {
                Err(out_of_order("irecvConsumed", request, next))
            };
        };
        if next != Some(request.number) {
            return Err(out_of_order("irecvConsumed", request, next));
        }
        let pointer = self.window.pointer(request.number);
        // SAFETY: the oldest completed receive of this comm, not consumed yet.
        let code = unsafe { irecv_consumed(self.raw, 1, pointer) };
        self.outcome("irecvConsumed", code)?;
        self.window.consumed();
        Ok(())
    }

    /// Returns whether the plugin itself writes received bytes into CUDA memory, which then has to
    /// be [flushed](RecvComm::flush).
    #[must_use]
    pub fn can_flush(&self) -> bool {
        let properties = self.properties();
        self.core.calls.iflush.is_some()
            && properties.device_type == DeviceType::Host
            && properties.reaches(MemoryKind::Cuda)
    }

    /// Starts to make received bytes visible to the GPU: once for each receive into CUDA memory,
    /// with the range of its post, when it is done. A flush takes a slot, as a receive does: leave
    /// one free.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] unless [`can_flush`](RecvComm::can_flush), for host memory and empty
    /// ranges; [`Error::TooLarge`], [`Error::OutOfBounds`], [`Error::Foreign`]. After any other
    /// error the comm is dead.
    pub fn flush(
        &mut self,
        memory: &MemoryHandle,
        offset: usize,
        bytes: usize,
    ) -> Result<Flushing, Error> {
        let message = self.message("iflush", memory, offset, bytes, 0)?;
        let legal = self.can_flush() && memory.kind() == MemoryKind::Cuda && bytes > 0;
        let Some(iflush) = self.core.calls.iflush.filter(|_| legal) else {
            return Err(Error::Unsupported {
                plugin: self.core.name.clone(),
                call: "iflush",
            });
        };
        if self.is_full() {
            return Ok(Flushing::Full);
        }
        let mut request = std::ptr::null_mut();
        // SAFETY: as for `irecv`.
        let code = unsafe { iflush.call(self.raw, message, &raw mut request) };
        self.outcome("iflush", code)?;
        if request.is_null() {
            return Ok(Flushing::Needless);
        }
        Ok(Flushing::Begun(Flush(Request {
            comm: self.id,
            number: self.direction.flushes.post(request),
        })))
    }

    /// Returns whether a flush is done. The plugin is asked about the oldest one only, so flushes
    /// complete in order.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfOrder`] if it was already done, and [`Error::Foreign`], harmless; else the
    /// comm has failed.
    pub fn test_flush(&mut self, flush: Flush) -> Result<bool, Error> {
        self.check_alive("test")?;
        self.check_own(flush.0)?;
        let next = self.direction.flushes.to_test();
        if next.is_some_and(|next| next < flush.0.number) {
            return Ok(false);
        }
        if next != Some(flush.0.number) {
            return Err(out_of_order("test", flush.0, next));
        }
        let pointer = self.direction.flushes.pointer(flush.0.number);
        let mut done = 0;
        // SAFETY: as for `test`; a flush reports no sizes.
        let code = unsafe { (self.core.calls.test)(pointer, &raw mut done, std::ptr::null_mut()) };
        self.outcome("test", code)?;
        if done != 0 {
            self.direction.flushes.tested();
        }
        Ok(done != 0)
    }
}
