//! Page-locked host memory.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::Device;
use crate::context::{Context, log};
use crate::error::Error;
use crate::sys;

/// Above this size, huge pages are requested: copies need fewer page-table look-ups.
const HUGE_PAGE: usize = 2 << 20;

/// Host memory that devices access directly, made by [`crate::Device::pin`].
///
/// Zeroed, page-aligned, and freed when dropped: keep it until the copies that use it are done. A
/// forked child does not inherit it.
#[derive(Debug)]
pub struct Pinned {
    address: NonNull<u8>,
    len: usize,
    /// The context it is registered with; none for the stand-in, which needs no registration.
    context: Option<Arc<Context>>,
}

// SAFETY: this value owns the memory, and exposes its address only.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// Returns the address of the first byte.
    #[must_use]
    pub fn address(&self) -> *mut u8 {
        self.address.as_ptr()
    }

    /// Returns the length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the length is zero.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Allocates memory on the NUMA node of a device.
    ///
    /// Mapped here and then registered, instead of allocated by the driver, because only so can the
    /// node be chosen.
    pub(crate) fn near(context: Arc<Context>, len: usize) -> Result<Self, Error> {
        let mut memory = Self::map(len, context.numa_node())?;
        {
            let api = context.api;
            let _scope = context.enter()?;
            let flags = sys::HOST_PORTABLE | sys::HOST_DEVICEMAP;
            // SAFETY: the mapping has whole pages, belongs to this value, and outlives its
            // registration (see `drop`).
            let code = unsafe {
                (api.mem_host_register)(memory.address().cast::<c_void>(), memory.mapped(), flags)
            };
            api.check(code, "page-locking host memory")?;
            // From here on `drop` undoes the registration.
            memory.context = Some(Arc::clone(&context));
            let mut seen = 0;
            // SAFETY: stores a number; the memory is registered.
            let code = unsafe {
                (api.mem_host_get_device_pointer)(&mut seen, memory.address().cast::<c_void>(), 0)
            };
            api.check(code, "mapping host memory to the device")?;
            if seen != memory.address().addr() as u64 {
                // The kernels use the host's addresses.
                return Err(api.error(sys::INVALID_VALUE, "mapping host memory at its own address"));
            }
        }
        Ok(memory)
    }

    /// Allocates memory for the stand-in.
    pub(crate) fn plain(len: usize) -> Result<Self, Error> {
        Self::map(len, None)
    }

    fn map(len: usize, numa_node: Option<u32>) -> Result<Self, Error> {
        let failed = |reason: std::io::Error| Error::HostMemory {
            len,
            reason: reason.to_string(),
        };
        let memory = Self {
            address: NonNull::dangling(),
            len,
            context: None,
        };
        let mapped = memory.mapped();
        // SAFETY: the kernel chooses the address, so the mapping overlaps nothing.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                mapped,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if address == libc::MAP_FAILED {
            std::mem::forget(memory);
            return Err(failed(std::io::Error::last_os_error()));
        }
        let Some(address) = NonNull::new(address.cast::<u8>()) else {
            std::mem::forget(memory);
            return Err(failed(std::io::ErrorKind::OutOfMemory.into()));
        };
        let memory = {
            let mut memory = memory;
            memory.address = address;
            memory
        };
        let start = address.as_ptr().cast::<c_void>();
        // A child would share the pages until one of the two writes, and the device would keep the
        // page of the other one.
        // SAFETY: advice on a mapping of this value.
        if unsafe { libc::madvise(start, mapped, libc::MADV_DONTFORK) } != 0 {
            return Err(failed(std::io::Error::last_os_error()));
        }
        if mapped >= HUGE_PAGE {
            // SAFETY: as above. Without huge pages, small ones are used.
            unsafe { libc::madvise(start, mapped, libc::MADV_HUGEPAGE) };
        }
        if let Some(node) = numa_node {
            prefer_node(start, mapped, node);
        }
        Ok(memory)
    }

    /// Returns its length in whole pages.
    fn mapped(&self) -> usize {
        // SAFETY: reads a number.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        let page = usize::try_from(page).unwrap_or(4096);
        self.len.max(1).next_multiple_of(page)
    }
}

/// Makes the pages of a mapping come from a NUMA node, as long as it has free ones.
fn prefer_node(start: *mut c_void, len: usize, node: u32) {
    let mut nodes = [0_u64; 16];
    let (word, bit) = (node as usize / 64, node % 64);
    let Some(word) = nodes.get_mut(word) else {
        return;
    };
    *word = 1 << bit;
    // SAFETY: a policy for a mapping of this value; the mask has the stated number of bits. If the
    // kernel refuses (no NUMA, a strict container), the pages come from any node, which is slower
    // and correct.
    let refused = unsafe {
        libc::syscall(
            libc::SYS_mbind,
            start,
            len,
            libc::MPOL_PREFERRED,
            nodes.as_ptr(),
            nodes.len() * 64,
            0,
        )
    };
    if refused != 0 {
        let error = std::io::Error::last_os_error();
        tracing::debug!("pinned memory is not bound to NUMA node {node}: {error}");
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let start = self.address().cast::<c_void>();
        if let Some(context) = &self.context {
            let code = match context.enter() {
                // SAFETY: the memory was registered; its users have kept it until now.
                Ok(_scope) => unsafe { (context.api.mem_host_unregister)(start) },
                // A destroyed context has ended the registration.
                Err(_) => sys::SUCCESS,
            };
            log(context.api, code, "releasing page-locked memory");
        }
        // SAFETY: mapped by `map` with this length, and nothing uses it any more.
        unsafe { libc::munmap(start, self.mapped()) };
    }
}
