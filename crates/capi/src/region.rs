//! Registered memory, and descriptors of peers' memory.

use std::ffi::c_void;
use std::ptr::null_mut;

use tcpx::{MemoryKind, Region, RemoteRegion};

use crate::bytes::tcpx_bytes;
use crate::ffi::{self, Boxed, borrow, out, slice, take};
use crate::status::{Failure, tcpx_status};

/// The kind of memory of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub enum tcpx_memory {
    /// Ordinary memory of the process.
    TCPX_MEMORY_HOST = 0,
    /// Memory of a CUDA device.
    TCPX_MEMORY_CUDA = 1,
    /// Detected from the address, with the device.
    TCPX_MEMORY_AUTO = 2,
}

/// Memory registered by this session.
pub struct tcpx_region {
    pub(crate) region: Region,
}

impl Boxed for tcpx_region {}

/// A peer's region: address, length and the key that grants access.
pub struct tcpx_remote_region {
    pub(crate) region: RemoteRegion,
}

impl Boxed for tcpx_remote_region {
    const BELONGS_TO_PROCESS: bool = false;
}

/// Converts a `tcpx_memory` and a device number.
pub(crate) fn memory_kind(kind: u32, device: u32) -> Result<MemoryKind, Failure> {
    const HOST: u32 = tcpx_memory::TCPX_MEMORY_HOST as u32;
    const CUDA: u32 = tcpx_memory::TCPX_MEMORY_CUDA as u32;
    const AUTO: u32 = tcpx_memory::TCPX_MEMORY_AUTO as u32;
    match kind {
        HOST | AUTO => Ok(MemoryKind::Host),
        CUDA => Ok(MemoryKind::Cuda { device }),
        value => Err(Failure::BadNumber {
            name: "kind",
            value,
            expected: "TCPX_MEMORY_HOST, TCPX_MEMORY_CUDA or TCPX_MEMORY_AUTO",
        }),
    }
}

/// Returns the registration's number within its session, from 1 up; 0 for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_region_id(region: *const tcpx_region) -> u64 {
    ffi::call_or(0, || Ok(borrow!(region)?.region.id().0))
}

/// Returns the address of the first byte; NULL for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_region_address(region: *const tcpx_region) -> *mut c_void {
    ffi::call_or(null_mut(), || {
        Ok(borrow!(region)?.region.address() as *mut c_void)
    })
}

/// Returns the size of the region in bytes; 0 for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_region_size(region: *const tcpx_region) -> u64 {
    ffi::call_or(0, || Ok(borrow!(region)?.region.len() as u64))
}

/// Returns the descriptor that a peer needs to address this region, for its
/// `tcpx_remote_region_from_bytes`. The same range always has the same descriptor, whenever it is
/// registered with this session.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_region_descriptor(
    region: *const tcpx_region,
    descriptor: *mut tcpx_bytes,
) -> tcpx_status {
    ffi::call(|| {
        let (region, out) = (borrow!(region)?, out!(descriptor)?);
        out.write(region.region.descriptor().to_bytes().into());
        Ok(())
    })
}

/// Does what `tcpx_region_descriptor` does, in 15 bytes instead of 38, for
/// `tcpx_remote_region_from_short` at peers that learn the region's address, size, kind and device
/// by other means. If the region has another kind or device than given here, returns the full
/// descriptor, which that function accepts too.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_region_short_descriptor(
    region: *const tcpx_region,
    kind: u32,
    device: u32,
    descriptor: *mut tcpx_bytes,
) -> tcpx_status {
    ffi::call(|| {
        let (region, out) = (&borrow!(region)?.region, out!(descriptor)?);
        let bytes = match region.short_descriptor(memory_kind(kind, device)?) {
            Some(short) => short.to_vec(),
            None => region.descriptor().to_bytes(),
        };
        out.write(bytes.into());
        Ok(())
    })
}

/// Returns this session's region as its peers see it, for transfers of the session to itself: the
/// result of `tcpx_remote_region_from_bytes` for its descriptor.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_region_as_remote(
    region: *const tcpx_region,
    remote: *mut *mut tcpx_remote_region,
) -> tcpx_status {
    ffi::call(|| {
        let (region, out) = (borrow!(region)?.region.descriptor(), out!(remote)?);
        out.give(tcpx_remote_region { region });
        Ok(())
    })
}

/// Ends the registration before its handle is freed, for handles that are shared. When this
/// returns, the memory is no longer accessed and may be freed; transfers that use it fail.
/// TCPX_ERROR_NOT_ALLOWED if it has already ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_region_deregister(region: *const tcpx_region) -> tcpx_status {
    ffi::call(|| Ok(borrow!(region)?.region.deregister()?))
}

/// Frees the handle, and ends the registration as tcpx_region_deregister does.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_region_free(region: *mut tcpx_region) {
    ffi::call_or((), || {
        if let Some(region) = take!(region) {
            // The only possible error is that it has already ended.
            let _ = region.region.deregister();
        }
        Ok(())
    });
}

/// Reads the descriptor of a peer's region.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_remote_region_from_bytes(
    descriptor: *const c_void,
    descriptor_len: usize,
    region: *mut *mut tcpx_remote_region,
) -> tcpx_status {
    ffi::call(|| {
        let (descriptor, out) = (slice!(descriptor, descriptor_len)?, out!(region)?);
        out.give(tcpx_remote_region {
            region: RemoteRegion::from_bytes(descriptor)?,
        });
        Ok(())
    })
}

/// Reads a descriptor of `tcpx_region_short_descriptor` for a region of this address, size, kind
/// and device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_remote_region_from_short(
    descriptor: *const c_void,
    descriptor_len: usize,
    address: u64,
    size: u64,
    kind: u32,
    device: u32,
    region: *mut *mut tcpx_remote_region,
) -> tcpx_status {
    ffi::call(|| {
        let (descriptor, out) = (slice!(descriptor, descriptor_len)?, out!(region)?);
        let kind = memory_kind(kind, device)?;
        let region = match <[u8; RemoteRegion::SHORT_LEN]>::try_from(descriptor) {
            Ok(short) => RemoteRegion::from_short(short, address, size, kind)?,
            Err(_) => RemoteRegion::from_bytes(descriptor)?,
        };
        out.give(tcpx_remote_region { region });
        Ok(())
    })
}

/// Returns the address of the first byte, in its owner's address space; 0 for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_remote_region_address(region: *const tcpx_remote_region) -> u64 {
    ffi::call_or(0, || Ok(borrow!(region)?.region.address()))
}

/// Returns the size of the region in bytes; 0 for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_remote_region_size(region: *const tcpx_remote_region) -> u64 {
    ffi::call_or(0, || Ok(borrow!(region)?.region.len() as u64))
}

/// Returns the kind of memory at its owner, and its CUDA device (0 for host memory).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_remote_region_memory(
    region: *const tcpx_remote_region,
    kind: *mut tcpx_memory,
    device: *mut u32,
) -> tcpx_status {
    ffi::call(|| {
        let region = borrow!(region)?;
        let (kind, device) = (out!(kind)?, out!(device)?);
        let (found, number) = match region.region.kind() {
            MemoryKind::Cuda { device } => (tcpx_memory::TCPX_MEMORY_CUDA, device),
            _ => (tcpx_memory::TCPX_MEMORY_HOST, 0),
        };
        kind.write(found);
        device.write(number);
        Ok(())
    })
}

/// Frees a remote region; prepared transfers keep what they need.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_remote_region_free(region: *mut tcpx_remote_region) {
    ffi::end(take!(region));
}
