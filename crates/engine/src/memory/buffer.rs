//! Host memory that the engine owns.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::sync::Arc;

use tcpx_net::Span;

/// Alignment of at least one page, so that two buffers never share a page.
const ALIGNMENT: usize = if cfg!(target_arch = "x86_64") {
    4 << 10
} else {
    64 << 10
};

/// Owned, page-aligned, zeroed host memory that peers may write to. Clones share the memory, which
/// is freed with the last clone and the last region registered over it.
///
/// Reading and writing copy bytes, because a peer may be writing at the same moment.
///
/// ```
/// let buffer = tcpx::Buffer::new(1024);
/// buffer.write(10, b"hello");
/// let mut back = [0; 5];
/// buffer.read(10, &mut back);
/// assert_eq!(&back, b"hello");
/// ```
#[derive(Clone, Debug)]
pub struct Buffer {
    memory: Arc<Allocation>,
}

impl Buffer {
    /// Allocates `len` zeroed bytes.
    #[must_use]
    pub fn new(len: usize) -> Self {
        Self {
            memory: Arc::new(Allocation::new(len)),
        }
    }

    /// Allocates a copy of `bytes`.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Self {
        let buffer = Self::new(bytes.len());
        buffer.write(0, bytes);
        buffer
    }

    /// Returns the length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.memory.span.len()
    }

    /// Returns whether the buffer is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the address of the first byte.
    #[must_use]
    pub fn address(&self) -> usize {
        self.memory.span.address()
    }

    /// Copies `bytes` into the buffer.
    ///
    /// # Panics
    /// If the bytes do not fit.
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        let copied = self.range(offset, bytes.len()).copy_from(bytes);
        copied.expect("the buffer's own memory is mapped");
    }

    /// Copies out of the buffer.
    ///
    /// # Panics
    /// If `out` reaches past the end.
    pub fn read(&self, offset: usize, out: &mut [u8]) {
        let copied = self.range(offset, out.len()).copy_to(out);
        copied.expect("the buffer's own memory is mapped");
    }

    /// Returns a copy of the contents.
    #[must_use]
    pub fn to_vec(&self) -> Vec<u8> {
        let mut out = vec![0; self.len()];
        self.read(0, &mut out);
        out
    }

    pub(crate) fn span(&self) -> Span {
        self.memory.span
    }

    /// Watches the memory without keeping it alive.
    #[cfg(test)]
    pub(super) fn watch(&self) -> std::sync::Weak<impl Sized + use<>> {
        Arc::downgrade(&self.memory)
    }

    fn range(&self, offset: usize, len: usize) -> Span {
        self.memory.span.slice(offset, len).unwrap_or_else(|| {
            panic!(
                "{len} bytes at offset {offset} of a buffer of {} bytes",
                self.len()
            )
        })
    }
}

#[derive(Debug)]
struct Allocation {
    span: Span,
    layout: Layout,
}

impl Allocation {
    fn new(len: usize) -> Self {
        let layout = Layout::from_size_align(len.max(1), ALIGNMENT)
            .unwrap_or_else(|_| panic!("a buffer of {len} bytes is larger than memory can be"));
        // SAFETY: the layout has at least one byte.
        let address = unsafe { alloc_zeroed(layout) };
        if address.is_null() {
            handle_alloc_error(layout);
        }
        // SAFETY: the allocation is valid until `drop`, and every user of the span holds an `Arc`
        // of this allocation (through a `Buffer` or a region).
        let span = unsafe { Span::new(address, len) };
        Self { span, layout }
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout in `new`;
        // the last owner is gone, so nothing uses the memory.
        unsafe { dealloc(self.span.address() as *mut u8, self.layout) };
    }
}
