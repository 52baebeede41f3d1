//! Registered memory of a comm.

use std::ffi::c_int;
use std::os::fd::{AsRawFd, BorrowedFd};

use super::{Comm, Direction};
use crate::error::Error;
use crate::log::limit::limited_warning;
use crate::plugin::{Core, check};
use crate::properties::MemoryKind;
use crate::sys::calls::{Message, Ptr};

/// Memory registered on one comm, usable with that comm only. The comm deregisters the rest when it
/// is dropped, so that losing a handle leaks nothing.
#[derive(Debug)]
pub struct MemoryHandle {
    comm: u64,
    index: usize,
    /// The plugin's handle. NULL is valid: plugins that need no registration never write it.
    raw: Ptr,
    data: Ptr,
    bytes: usize,
    kind: MemoryKind,
}

// SAFETY: two addresses that are used only through the comm, whose own rules apply.
unsafe impl Send for MemoryHandle {}
// SAFETY: as above; a shared reference gives the length and the kind.
unsafe impl Sync for MemoryHandle {}

impl MemoryHandle {
    /// Returns the number of registered bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the kind of the memory.
    #[must_use]
    pub fn kind(&self) -> MemoryKind {
        self.kind
    }

    pub(super) fn message(
        &self,
        comm: u64,
        offset: usize,
        bytes: usize,
        tag: i32,
    ) -> Result<Message, Error> {
        if self.comm != comm {
            return Err(Error::Foreign {
                what: "the memory handle",
            });
        }
        let end = offset.checked_add(bytes);
        if end.is_none_or(|end| end > self.bytes) {
            return Err(Error::OutOfBounds {
                offset,
                bytes,
                registered: self.bytes,
            });
        }
        Ok(Message {
            data: self.data.wrapping_byte_add(offset),
            bytes,
            tag,
            memory: self.raw,
        })
    }
}

impl<D: Direction> Comm<D> {
    /// Registers memory for messages of this comm.
    ///
    /// GPUDirect-TCPX requires CUDA memory whose address and length are multiples of 4096 bytes. A
    /// failed registration leaves the comm unchanged.
    ///
    /// # Errors
    ///
    /// [`Error::MemoryUnsupported`] if the device cannot access it, [`Error::TooLarge`] if it is
    /// larger than
    /// [`Properties::max_registration_bytes`](crate::Properties::max_registration_bytes), or the
    /// plugin's error.
    ///
    /// # Safety
    ///
    /// `data` is `bytes` bytes of memory of that kind. It stays allocated until it is deregistered
    /// or the comm is dropped, **and** every request on it is done or the comm is dropped. While a
    /// request is outstanding, nothing writes the range it sends, and nothing reads or writes the
    /// range it receives into.
    pub unsafe fn register(
        &mut self,
        data: *mut u8,
        bytes: usize,
        kind: MemoryKind,
    ) -> Result<MemoryHandle, Error> {
        self.check_registration("regMr", bytes, kind)?;
        let limit = self.properties().max_registration_bytes;
        if bytes > limit {
            let call = "regMr";
            return Err(Error::TooLarge { call, bytes, limit });
        }
        let mut raw = std::ptr::null_mut();
        // SAFETY: the comm is open; the memory is the caller's promise.
        let code = unsafe {
            self.core
                .calls
                .reg_mr
                .call(self.raw, data.cast(), bytes, kind.raw(), &raw mut raw)
        };
        check("regMr", code)?;
        Ok(self.registered(raw, data, bytes, kind))
    }

    /// Registers memory by a dma-buf that covers it from `offset` on. The descriptor may be closed
    /// afterwards.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] if the device does not support dma-bufs; else as [`Comm::register`].
    ///
    /// # Safety
    ///
    /// As [`Comm::register`]; and the dma-buf is of that memory.
    pub unsafe fn register_dmabuf(
        &mut self,
        data: *mut u8,
        bytes: usize,
        kind: MemoryKind,
        fd: BorrowedFd<'_>,
        offset: u64,
    ) -> Result<MemoryHandle, Error> {
        self.check_registration("regMrDmaBuf", bytes, kind)?;
        let advertised = self.properties().dmabuf;
        let Some(reg_mr_dma_buf) = self.core.calls.reg_mr_dma_buf.filter(|_| advertised) else {
            return Err(Error::Unsupported {
                plugin: self.core.name.clone(),
                call: "regMrDmaBuf",
            });
        };
        let mut raw = std::ptr::null_mut();
        let fd = fd.as_raw_fd();
        // SAFETY: the comm is open; memory and dma-buf are the caller's promise.
        let code = unsafe {
            reg_mr_dma_buf(
                self.raw,
                data.cast(),
                bytes,
                kind.raw(),
                offset,
                fd,
                &raw mut raw,
            )
        };
        check("regMrDmaBuf", code)?;
        Ok(self.registered(raw, data, bytes, kind))
    }

    /// Undoes a registration. Requests on the memory should be done.
    ///
    /// # Errors
    ///
    /// [`Error::Foreign`], or the plugin's error; the handle is consumed in any case.
    pub fn deregister(&mut self, memory: MemoryHandle) -> Result<(), Error> {
        if memory.comm != self.id {
            return Err(Error::Foreign {
                what: "the memory handle",
            });
        }
        let Some(raw) = self.registrations.remove(memory.index) else {
            return Ok(());
        };
        // SAFETY: the comm is open, and the handle was registered on it and not deregistered.
        check("deregMr", unsafe {
            (self.core.calls.dereg_mr)(self.raw, raw)
        })
    }

    fn check_registration(
        &self,
        call: &'static str,
        bytes: usize,
        kind: MemoryKind,
    ) -> Result<(), Error> {
        self.check_alive(call)?;
        if !self.properties().reaches(kind) {
            return Err(Error::MemoryUnsupported {
                plugin: self.core.name.clone(),
                kind,
            });
        }
        // `isize::MAX` is the maximum size of any object.
        let limit = isize::MAX as usize;
        if bytes > limit {
            return Err(Error::TooLarge { call, bytes, limit });
        }
        Ok(())
    }

    fn registered(
        &mut self,
        raw: Ptr,
        data: *mut u8,
        bytes: usize,
        kind: MemoryKind,
    ) -> MemoryHandle {
        MemoryHandle {
            comm: self.id,
            index: self.registrations.insert(raw),
            raw,
            data: data.cast(),
            bytes,
            kind,
        }
    }
}

/// Registrations to undo before the comm is closed.
#[derive(Debug, Default)]
pub(super) struct Registrations {
    /// `None` marks a free entry.
    handles: Vec<Option<Ptr>>,
}

impl Registrations {
    fn insert(&mut self, raw: Ptr) -> usize {
        match self.handles.iter().position(Option::is_none) {
            Some(index) => {
                self.handles[index] = Some(raw);
                index
            }
            None => {
                self.handles.push(Some(raw));
                self.handles.len() - 1
            }
        }
    }

    fn remove(&mut self, index: usize) -> Option<Ptr> {
        self.handles.get_mut(index)?.take()
    }

    /// Returns whether no memory was ever registered.
    pub(super) fn is_empty(&self) -> bool {
        self.handles.is_empty()
    }

    /// Deregisters everything left.
    pub(super) fn clear(&mut self, core: &Core, comm: Ptr) {
        for raw in self.handles.drain(..).flatten() {
            // SAFETY: the comm is open still; each handle was registered on it and not
            // deregistered.
            let code: c_int = unsafe { (core.calls.dereg_mr)(comm, raw) };
            if let Err(error) = check("deregMr", code) {
                limited_warning!(
                    plugin = core.name,
                    %error,
                    remedy = "report it to the maker of the plugin; what it held stays until the process ends",
                    "memory of a comm was not deregistered"
                );
            }
        }
    }
}
