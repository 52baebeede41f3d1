//! Device memory owned by this crate.

use std::ffi::c_void;
use std::sync::Arc;

use crate::context::Context;
use crate::error::Error;
use crate::memory::DeviceMemory;
use crate::stream::Stream;
use crate::{Device, give_way, sys};

/// Memory of a device, for benchmarks and tests. Its copies wait until they are done.
#[derive(Debug)]
pub struct DeviceBuffer {
    memory: DeviceMemory,
    context: Arc<Context>,
    stream: Stream,
}

// SAFETY: memory and a stream of the device: handles that the driver allows on any thread.
unsafe impl Send for DeviceBuffer {}
// SAFETY: as above; the driver serialises what threads queue on the stream.
unsafe impl Sync for DeviceBuffer {}

impl DeviceBuffer {
    /// Allocates `len` bytes of unspecified content on device `ordinal`, which is initialised if
    /// needed.
    pub fn alloc(ordinal: u32, len: usize) -> Result<Self, Error> {
        let context = Context::primary(sys::initialised()?, ordinal)?;
        let _scope = context.enter()?;
        Ok(Self {
            memory: DeviceMemory::on(Arc::clone(&context), len)?,
            stream: Stream::new(&context)?,
            context: Arc::clone(&context),
        })
    }

    /// Returns the address of the first byte, on the device.
    #[must_use]
    pub fn address(&self) -> usize {
        self.memory.address()
    }

    /// Returns the length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.memory.len()
    }

    /// Returns whether the length is zero.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.memory.len() == 0
    }

    /// Returns the device that holds the memory.
    #[must_use]
    pub fn device(&self) -> Arc<dyn Device> {
        self.context.arc()
    }

    /// Copies bytes from the host to `offset`.
    pub fn copy_from_host(&self, offset: usize, bytes: &[u8]) -> Result<(), Error> {
        let at = self.within(offset, bytes.len())?;
        self.run("copying to device memory", |stream| {
            // SAFETY: both ranges are valid, and stay so until `run` returns.
            unsafe {
                let from = bytes.as_ptr().cast::<c_void>();
                (self.context.api.memcpy_htod_async)(at, from, bytes.len(), stream)
            }
        })
    }

    /// Copies bytes at `offset` to the host.
    pub fn copy_to_host(&self, offset: usize, bytes: &mut [u8]) -> Result<(), Error> {
        let at = self.within(offset, bytes.len())?;
        let len = bytes.len();
        let to = bytes.as_mut_ptr().cast::<c_void>();
        self.run("copying from device memory", |stream| {
            // SAFETY: both ranges are valid, and stay so until `run` returns.
            unsafe { (self.context.api.memcpy_dtoh_async)(to, at, len, stream) }
        })
    }

    /// Sets every byte.
    pub fn fill(&self, byte: u8) -> Result<(), Error> {
        let at = self.within(0, self.memory.len())?;
        self.run("filling device memory", |stream| {
            // SAFETY: the whole buffer.
            unsafe { (self.context.api.memset_d8_async)(at, byte, self.memory.len(), stream) }
        })
    }

    fn within(&self, offset: usize, len: usize) -> Result<sys::DevicePtr, Error> {
        if offset
            .checked_add(len)
            .is_none_or(|end| end > self.memory.len())
        {
            return Err(Error::OutOfBounds {
                offset,
                len,
                size: self.memory.len(),
            });
        }
        Ok((self.memory.address() + offset) as sys::DevicePtr)
    }

    /// Starts an operation on the stream and waits until it is done.
    fn run(
        &self,
        asked: &'static str,
        start: impl FnOnce(sys::Stream) -> sys::Code,
    ) -> Result<(), Error> {
        let api = self.context.api;
        let _scope = self.context.enter()?;
        api.check(start(self.stream.raw), asked)?;
        let mut turns = 0;
        loop {
            match self.stream.query() {
                sys::NOT_READY => give_way(&mut turns),
                code => return api.check(code, asked),
            }
        }
    }
}
