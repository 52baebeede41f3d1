//! Memory for tests whose pages can be protected, so that copies fault.

/// The size of a page: 4 KiB on x86-64, up to 64 KiB on aarch64.
pub(crate) fn page() -> usize {
    rustix::param::page_size()
}

/// Pages of anonymous, private memory, readable and writable until a test says otherwise. A forked
/// process has pages of its own at the same address.
pub(crate) struct Pages {
    pub(crate) address: *mut u8,
    pub(crate) count: usize,
}

impl Pages {
    pub(crate) fn new(count: usize) -> Self {
        let (access, flags) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
        );
        let nowhere = std::ptr::null_mut();
        // SAFETY: the kernel chooses where.
        let address = unsafe { libc::mmap(nowhere, count * page(), access, flags, -1, 0) };
        assert_ne!(address, libc::MAP_FAILED);
        let address = address.cast();
        Self { address, count }
    }

    /// Returns the address of a byte.
    pub(crate) fn at(&self, offset: usize) -> *mut u8 {
        self.address.wrapping_add(offset)
    }

    /// Changes how one page may be accessed.
    pub(crate) fn protect(&self, number: usize, protection: libc::c_int) {
        let address = self.at(number * page()).cast();
        // SAFETY: the page belongs to `self`.
        assert_eq!(unsafe { libc::mprotect(address, page(), protection) }, 0);
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: tests keep no reference to the pages that outlives `self`.
        unsafe { libc::munmap(self.address.cast(), self.count * page()) };
    }
}
