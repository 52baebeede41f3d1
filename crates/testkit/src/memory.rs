//! Memory whose bytes are known.

use tcpx::{Buffer, Error, MemoryKind, Region, Session};

use crate::pattern::{Content, Expected, Mismatch};

/// How much is generated and compared at a time: it stays in the cache.
const BLOCK: usize = 64 << 10;

/// A buffer that can be filled with contents and compared with them. Both are copies, so that a transfer may be
/// using the memory meanwhile.
#[derive(Clone, Debug)]
pub struct Memory {
    buffer: Buffer,
}

impl Memory {
    /// Allocates `len` zeroed bytes.
    #[must_use]
    pub fn new(len: usize) -> Self {
        Self {
            buffer: Buffer::new(len),
        }
    }

    /// Bytes in it.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "it never is")]
    pub fn len(&self) -> usize {
        self.buffer.len()
    }

    /// Writes a content.
    pub fn put(&self, offset: usize, len: usize, content: Content) {
        let mut block = vec![0; BLOCK.min(len)];
        let mut done = 0;
        while done < len {
            let block = &mut block[..BLOCK.min(len - done)];
            content.skip(done).write_to(block);
            self.buffer.write(offset + done, block);
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
        for extent in expected.cover(self.len()) {
            let mut done = 0;
            while done < extent.len {
                let count = BLOCK.min(extent.len - done);
                let (found, wanted) = (&mut found[..count], &mut wanted[..count]);
                self.buffer.read(extent.offset + done, found);
                extent.content.skip(done).write_to(wanted);
                if found != wanted {
                    let at = found.iter().zip(&*wanted).position(|(f, w)| f != w);
                    let at = at.unwrap_or(0);
                    let end = count.min(at + 16);
                    return Err(Mismatch {
                        offset: extent.offset + done + at,
                        found: found[at..end].to_vec(),
                        wanted: wanted[at..end].to_vec(),
                        extent,
                    });
                }
                done += count;
            }
        }
        Ok(())
    }

    /// Copies out of it.
    #[must_use]
    pub fn bytes(&self, offset: usize, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        self.buffer.read(offset, &mut out);
        out
    }

    /// Copies into it.
    pub fn set_bytes(&self, offset: usize, bytes: &[u8]) {
        self.buffer.write(offset, bytes);
    }

    /// Registers all of it.
    ///
    /// # Errors
    /// As [`Session::register`].
    pub fn register(&self, session: &Session) -> Result<Region, Error> {
        session.register(&self.buffer)
    }

    /// Registers a part of it, at whatever alignment.
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
        // The registration does not keep the buffer alive: this does, for ever.
        std::mem::forget(self.buffer.clone());
        let address = (self.buffer.address() + offset) as *mut u8;
        // SAFETY: the range is inside the buffer, which is never freed because of the clone that was forgotten above.
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
