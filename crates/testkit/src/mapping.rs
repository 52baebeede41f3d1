//! Memory that a test unmaps or protects while it is registered.

use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};
use serde::{Deserialize, Serialize};

/// The allowed access to memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Access {
    /// The memory is unmapped.
    Unmapped,
    /// No access.
    None,
    /// Read only.
    Read,
    /// Read and write.
    All,
}

/// Address of the next mapping. Mappings are a gibibyte apart and far from those of the kernel, so
/// that nothing takes the place of unmapped memory.
static NEXT: AtomicUsize = AtomicUsize::new(0x10_0000_0000);
const STEP: usize = 1 << 30;

/// Pages at an address of their own.
#[derive(Debug)]
pub(crate) struct Mapping {
    pub(crate) address: usize,
    pub(crate) len: usize,
}

impl Mapping {
    pub(crate) fn new(len: usize) -> Self {
        assert!(len < STEP);
        let address = NEXT.fetch_add(STEP, Ordering::Relaxed);
        let mapping = Self { address, len };
        mapping.map(0, len);
        mapping
    }

    fn at(&self, offset: usize, len: usize) -> *mut c_void {
        assert!(offset <= self.len && len <= self.len - offset, "inside");
        std::ptr::with_exposed_provenance_mut(self.address + offset)
    }

    fn map(&self, offset: usize, len: usize) {
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        let at = self.at(offset, len);
        // SAFETY: the flag makes the kernel refuse addresses in use.
        let mapped =
            unsafe { mmap_anonymous(at, len, protection, flags | MapFlags::FIXED_NOREPLACE) };
        assert_eq!(mapped.expect("free addresses"), at);
    }

    pub(crate) fn allow(&self, access: Access, offset: usize, len: usize) {
        let at = self.at(offset, len);
        let flags = match access {
            Access::Unmapped | Access::None => MprotectFlags::empty(),
            Access::Read => MprotectFlags::READ,
            Access::All => MprotectFlags::READ | MprotectFlags::WRITE,
        };
        // SAFETY: pages of this mapping, which nothing borrows: all access goes by copies.
        unsafe {
            match access {
                Access::Unmapped => munmap(at, len).expect("mapped until now"),
                // Unmapped pages cannot be protected: they are mapped again, zeroed.
                _ if mprotect(at, len, flags).is_err() => {
                    munmap(at, len).expect("a range of ours");
                    self.map(offset, len);
                    mprotect(at, len, flags).expect("mapped again");
                }
                _ => {}
            }
        }
    }

    pub(crate) fn read(&self, offset: usize, out: &mut [u8]) {
        let at = self.at(offset, out.len()).cast::<u8>();
        // SAFETY: inside the mapping; a test reads only what it allows.
        unsafe { std::ptr::copy(at, out.as_mut_ptr(), out.len()) };
    }

    pub(crate) fn write(&self, offset: usize, bytes: &[u8]) {
        let at = self.at(offset, bytes.len()).cast::<u8>();
        // SAFETY: as in `read`.
        unsafe { std::ptr::copy(bytes.as_ptr(), at, bytes.len()) };
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: nothing uses it any more; unmapping unmapped pages is harmless.
        let _ = unsafe { munmap(self.at(0, self.len), self.len) };
    }
}
