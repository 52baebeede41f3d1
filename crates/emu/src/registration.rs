//! Registered memory, which `regMr` returns as `mhandle`.

use std::ffi::{c_int, c_void};
use std::sync::atomic::Ordering::Relaxed;

use crate::emulator::{Emulator, Flavor};
use crate::error::{Error, Misuse};
use crate::memory::Memory;
use crate::pages::PAGE;
use crate::tables::memory_kind::{CUDA, HOST};

/// One registration. It does not refer to its comm, only identifies it: `regMr` may run while
/// another thread uses the comm.
#[derive(Debug)]
pub(crate) struct Registration {
    comm: usize,
    base: usize,
    len: usize,
    kind: c_int,
}

/// A buffer that a request uses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Buffer {
    pub(crate) data: *mut u8,
    pub(crate) size: u32,
    pub(crate) kind: c_int,
    /// Offset from the start of its registration.
    pub(crate) offset: u64,
}

/// `regMr` of the TCPX table.
pub(crate) fn register(
    emulator: &Emulator,
    comm: *mut c_void,
    data: *mut c_void,
    size: c_int,
    kind: c_int,
) -> Result<*mut c_void, Error> {
    if comm.is_null() {
        return Err(Misuse::Null { what: "the comm" }.into());
    }
    let base = data as usize;
    match kind {
        HOST => {}
        CUDA if base.is_multiple_of(PAGE) => {}
        CUDA => return Err(Misuse::Unaligned { address: base }.into()),
        _ => return Err(Misuse::MemoryType { kind }.into()),
    }
    let bytes = usize::try_from(size).unwrap_or(0);
    if emulator.settings.strict {
        let rule = match bytes {
            0 => Some("it has to be positive, and below 2 GiB"),
            _ if kind == CUDA && !bytes.is_multiple_of(PAGE) => {
                Some("CUDA memory comes in pages of 4096")
            }
            _ => None,
        };
        if let Some(rule) = rule {
            return Err(Misuse::RegistrationSize {
                size: size.into(),
                rule,
            }
            .into());
        }
        if data.is_null() {
            return Err(Misuse::Null {
                what: "the memory to register",
            }
            .into());
        }
        if kind == CUDA
            && let Memory::Cuda(gpu) = Memory::current(emulator.settings.memory)?
        {
            // The real plugin would export the memory as that of the current GPU.
            let (current, of_memory) = gpu.ordinals(base)?;
            if of_memory != current {
                let address = base;
                return Err(Misuse::OtherGpu { address, current }.into());
            }
        }
    }
    emulator.registrations.fetch_add(1, Relaxed);
    let registration = Registration {
        comm: comm as usize,
        base,
        len: bytes,
        kind,
    };
    Ok(Box::into_raw(Box::new(registration)).cast())
}

/// Performs `regMr` of the plain tables: checks, and leaves `mhandle` unchanged.
pub(crate) fn register_plain(comm: *mut c_void, kind: c_int) -> Result<(), Error> {
    if comm.is_null() {
        return Err(Misuse::Null { what: "the comm" }.into());
    }
    if kind == HOST {
        Ok(())
    } else {
        Err(Misuse::MemoryType { kind }.into())
    }
}

/// `deregMr`.
///
/// # Safety
/// `mhandle` is null or came from [`register`] and was not deregistered.
pub(crate) unsafe fn deregister(emulator: &Emulator, mhandle: *mut c_void) {
    if !mhandle.is_null() {
        // SAFETY: guaranteed by the caller.
        drop(unsafe { Box::from_raw(mhandle.cast::<Registration>()) });
        emulator.registrations.fetch_sub(1, Relaxed);
    }
}

/// Checks the buffer of a request.
///
/// # Safety
/// `mhandle` is null or a live registration (always null for plain comms).
pub(crate) unsafe fn buffer(
    flavor: Flavor,
    strict: bool,
    comm: *mut c_void,
    data: *mut c_void,
    size: c_int,
    mhandle: *mut c_void,
) -> Result<Buffer, Error> {
    let size = u32::try_from(size).map_err(|_| Misuse::NegativeSize { size })?;
    if flavor == Flavor::Plain {
        if data.is_null() && size > 0 {
            return Err(Misuse::Null { what: "the buffer" }.into());
        }
        return Ok(Buffer {
            data: data.cast(),
            size,
            kind: HOST,
            offset: 0,
        });
    }
    if mhandle.is_null() {
        return Err(Misuse::Null {
            what: "the mhandle",
        }
        .into());
    }
    // SAFETY: the caller guarantees a live registration.
    let registration = unsafe { &*mhandle.cast::<Registration>() };
    let address = data as usize;
    if strict {
        if registration.comm != comm as usize {
            return Err(Misuse::ForeignRegistration.into());
        }
        let (base, len) = (registration.base, registration.len);
        let end = address.checked_add(size as usize);
        if address < base || end.is_none_or(|end| end > base + len) {
            let size = size as usize;
            return Err(Misuse::OutsideRegistration {
                address,
                size,
                base,
                len,
            }
            .into());
        }
    }
    let offset = address.wrapping_sub(registration.base) as u64;
    Ok(Buffer {
        data: data.cast(),
        size,
        kind: registration.kind,
        offset,
    })
}
