//! Memory with known bytes.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tcpx::cuda::DeviceBuffer;
use tcpx::{Buffer, Error, MemoryKind, Region, Session};

use crate::mapping::{Access, Mapping};
use crate::pattern::{Content, Expected, Mismatch};

/// Number of bytes generated and compared at a time: they stay in the cache.
const BLOCK: usize = 64 << 10;

/// Variable with the place of the memory of all tests: `host` or `vram:N`; with several, separated
/// by commas, allocations take turns. The default is host memory.
pub const PLACES: &str = "TCPX_TEST_MEMORY";

/// A buffer that can be filled with contents and compared with them. Both are copies, so that a
/// transfer may use the memory meanwhile.
#[derive(Clone, Debug)]
pub struct Memory {
    buffer: Place,
}

#[derive(Clone, Debug)]
enum Place {
    Host(Buffer),
    Gpu(Arc<DeviceBuffer>),
    Mapped(Arc<Mapping>),
}

impl Memory {
    /// Allocates `len` zeroed bytes.
    ///
    /// # Panics
    /// When there is no such GPU.
    #[must_use]
    pub fn new(len: usize) -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let places = std::env::var(PLACES).unwrap_or_else(|_| "host".into());
        let places: Vec<&str> = places.split(',').collect();
        let place = places[NEXT.fetch_add(1, Ordering::Relaxed) % places.len()];
        let Some(gpu) = place.strip_prefix("vram:") else {
            assert_eq!(place, "host", "{PLACES}");
            return Self {
                buffer: Place::Host(Buffer::new(len)),
            };
        };
        let gpu = gpu.parse().expect("a GPU's number");
        let buffer = DeviceBuffer::alloc(gpu, len).expect("there is such a GPU");
        buffer.fill(0).expect("it works");
        Self {
            buffer: Place::Gpu(Arc::new(buffer)),
        }
    }

    /// Maps `len` zeroed bytes of host memory that can be unmapped, see [`Memory::allow`].
    #[must_use]
    pub fn mapped(len: usize) -> Self {
        Self {
            buffer: Place::Mapped(Arc::new(Mapping::new(len))),
        }
    }

    /// Changes the allowed access to a range of whole pages of memory from [`Memory::mapped`].
    /// [`Access::Unmapped`] discards its bytes.
    ///
    /// # Panics
    /// When it is other memory, or the range is not inside.
    pub fn allow(&self, access: Access, offset: usize, len: usize) {
        let Place::Mapped(mapping) = &self.buffer else {
            panic!("not mapped memory");
        };
        mapping.allow(access, offset, len);
    }

    /// Returns the length in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "it never is")]
    pub fn len(&self) -> usize {
        match &self.buffer {
            Place::Host(buffer) => buffer.len(),
            Place::Gpu(buffer) => buffer.len(),
            Place::Mapped(mapping) => mapping.len,
        }
    }

    fn address(&self) -> usize {
        match &self.buffer {
            Place::Host(buffer) => buffer.address(),
            Place::Gpu(buffer) => buffer.address(),
            Place::Mapped(mapping) => mapping.address,
        }
    }

    fn read(&self, offset: usize, out: &mut [u8]) {
        match &self.buffer {
            Place::Host(buffer) => buffer.read(offset, out),
            Place::Gpu(buffer) => buffer.copy_to_host(offset, out).expect("it works"),
            Place::Mapped(mapping) => mapping.read(offset, out),
        }
    }

    /// Writes a content.
    pub fn put(&self, offset: usize, len: usize, content: Content) {
        let mut block = vec![0; BLOCK.min(len)];
        let mut done = 0;
        while done < len {
            let block = &mut block[..BLOCK.min(len - done)];
            content.skip(done).write_to(block);
            self.set_bytes(offset + done, block);
            done += block.len();
        }
    }

    /// Writes one content to all of it.
    pub fn fill(&self, content: Content) {
        self.put(0, self.len(), content);
    }

    /// Compares all of it.
    ///
    /// # Errors
    /// The first byte that differs.
    pub fn check(&self, expected: &Expected) -> Result<(), Mismatch> {
        let mut found = vec![0; BLOCK.min(self.len())];
        let mut wanted = found.clone();
        // Reads in blocks, whatever the extents are: with thousands of extents, a copy from a
        // device for each would take longer than the transfer.
        let mut block = 0..0;
        for extent in expected.cover(self.len()) {
            let (mut at, end) = (extent.offset, extent.offset + extent.len);
            while at < end {
                if !block.contains(&at) {
                    block = at..self.len().min(at + BLOCK);
                    self.read(at, &mut found[..block.len()]);
                }
                let count = end.min(block.end) - at;
                let found = &found[at - block.start..][..count];
                let wanted = &mut wanted[..count];
                extent.content.skip(at - extent.offset).write_to(wanted);
                if let Some(wrong) = found.iter().zip(&*wanted).position(|(f, w)| f != w) {
                    let shown = wrong..count.min(wrong + 16);
                    return Err(Mismatch {
                        offset: at + wrong,
                        found: found[shown.clone()].to_vec(),
                        wanted: wanted[shown].to_vec(),
                        extent,
                    });
                }
                at += count;
            }
        }
        Ok(())
    }

    /// Copies bytes out of it.
    #[must_use]
    pub fn bytes(&self, offset: usize, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        self.read(offset, &mut out);
        out
    }

    /// Copies bytes into it.
    pub fn set_bytes(&self, offset: usize, bytes: &[u8]) {
        match &self.buffer {
            Place::Host(buffer) => buffer.write(offset, bytes),
            Place::Gpu(buffer) => buffer.copy_from_host(offset, bytes).expect("it works"),
            Place::Mapped(mapping) => mapping.write(offset, bytes),
        }
    }

    /// Registers all of it.
    ///
    /// # Errors
    /// As [`Session::register`].
    pub fn register(&self, session: &Session) -> Result<Region, Error> {
        match &self.buffer {
            Place::Host(buffer) => session.register(buffer),
            Place::Gpu(_) | Place::Mapped(_) => self.register_range(session, 0, self.len()),
        }
    }

    /// Registers a part of it, at any alignment.
    ///
    /// # Errors
    /// As [`Session::register_raw`].
    ///
    /// # Panics
    /// When the range does not fit.
    pub fn register_range(
        &self,
        session: &Session,
        offset: usize,
        len: usize,
    ) -> Result<Region, Error> {
        assert!(
            offset <= self.len() && len <= self.len() - offset,
            "{len} bytes at {offset} of {}",
            self.len()
        );
        // The registration does not keep the buffer alive: a leaked clone does.
        std::mem::forget(self.buffer.clone());
        let address = (self.address() + offset) as *mut u8;
        // SAFETY: the range is inside the buffer, which is never freed because of the leaked clone
        // above.
        unsafe { session.register_raw(address, len, MemoryKind::Host) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_single_wrong_byte_is_found() {
        let memory = Memory::new(300_001);
        memory.fill(Content::Byte(3));
        memory.put(1001, 200_000, Content::pattern(5));
        let expected = Expected::untouched(3).with(1001..201_001, Content::pattern(5));
        memory.check(&expected).unwrap();
        for at in [0, 1000, 1001, 150_000, 201_000, 201_001, 300_000] {
            let [byte] = memory.bytes(at, 1)[..] else {
                panic!("one byte was asked for")
            };
            memory.set_bytes(at, &[byte ^ 1]);
            assert_eq!(memory.check(&expected).unwrap_err().offset, at);
            memory.set_bytes(at, &[byte]);
        }
        memory.check(&expected).unwrap();
    }
}
