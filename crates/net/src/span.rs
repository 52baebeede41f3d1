//! Raw ranges of memory that the kernel reads and writes for the engine.

use crate::guard::{self, Fault};

/// A range of host memory that transfers may touch.
///
/// The layout is that of the kernel's `iovec`, so that lists of spans go into vectored system calls
/// unchanged. A span is deliberately no Rust reference: the memory belongs to the application,
/// which may read or write it at any time, as with memory registered for RDMA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Span {
    address: *mut u8,
    len: usize,
}

// SAFETY: a span is an address and a length; the contract of `Span::new` (the memory may be used
// until the last use ends) does not depend on the thread that uses it.
unsafe impl Send for Span {}
// SAFETY: as above; all methods that access the memory are raw copies that hold no reference.
unsafe impl Sync for Span {}

impl Span {
    /// Creates a span of `len` bytes at `address`.
    ///
    /// # Safety
    /// Until the last use of this span, and of every span made from it, memory mapped there may be
    /// read and overwritten. Memory that is not mapped then, or not for that access, is a [`Fault`]
    /// of the copy. Concurrent access by others is allowed; it tears data at worst.
    #[must_use]
    pub const unsafe fn new(address: *mut u8, len: usize) -> Self {
        Self { address, len }
    }

    /// Returns the first address.
    #[must_use]
    pub fn address(&self) -> usize {
        self.address as usize
    }

    /// Returns the number of bytes in the span.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the span has no bytes.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns `len` bytes from `offset` on, or `None` unless all are inside this span.
    #[must_use]
    pub fn slice(&self, offset: usize, len: usize) -> Option<Self> {
        let end = offset.checked_add(len)?;
        if end > self.len {
            return None;
        }
        Some(Self {
            address: self.address.wrapping_add(offset),
            len,
        })
    }

    /// Returns this span and `next` as one, when `next` begins where this one ends.
    #[must_use]
    pub fn join(&self, next: Self) -> Option<Self> {
        let len = self.len.checked_add(next.len)?;
        (self.address.wrapping_add(self.len) == next.address).then_some(Self {
            address: self.address,
            len,
        })
    }

    /// Copies `bytes` to the start of the span, as many as fit, and returns their number.
    ///
    /// # Errors
    /// The span's memory is not mapped or cannot be written to.
    pub fn copy_from(&self, bytes: &[u8]) -> Result<usize, Fault> {
        let count = bytes.len().min(self.len);
        // SAFETY: `count` bytes are inside the span, which may be overwritten by the contract of
        // `new`.
        unsafe { guard::copy(bytes.as_ptr(), self.address, count)? };
        Ok(count)
    }

    /// Copies from the start of the span into `bytes`, as many as fit, and returns their number.
    ///
    /// # Errors
    /// The span's memory is not mapped or cannot be read.
    pub fn copy_to(&self, bytes: &mut [u8]) -> Result<usize, Fault> {
        let count = bytes.len().min(self.len);
        // SAFETY: as in `copy_from`; `bytes` is borrowed exclusively.
        unsafe { guard::copy(self.address, bytes.as_mut_ptr(), count)? };
        Ok(count)
    }

    /// Checks whether the span's memory can be read now.
    ///
    /// # Errors
    /// The memory is not mapped or cannot be read.
    pub fn probe(&self) -> Result<(), Fault> {
        guard::probe(self.address, self.len)
    }

    /// Copies `source` to the start of this span, as many bytes as both have. The two may overlap.
    fn copy_span(&self, source: Self) -> Result<usize, Fault> {
        let count = self.len.min(source.len);
        // SAFETY: both spans have `count` bytes, which may be used by the contract of `new`.
        unsafe { guard::copy(source.address, self.address, count)? };
        Ok(count)
    }

    /// Does what [`Span::copy_span`] does, for a target that is neither read soon nor in the cache:
    /// bypasses the cache where the processor can, so that the target is not fetched only to be
    /// overwritten. The content of overlapping bytes is unspecified.
    fn stream_span(&self, source: Self) -> Result<usize, Fault> {
        #[cfg(target_arch = "x86_64")]
        if self.len.min(source.len) >= STREAM_LEAST {
            const LINE: usize = 64;
            let count = self.len.min(source.len);
            let head = self.address.addr().wrapping_neg() % LINE;
            let lines = (count - head) / LINE;
            let tail = head + lines * LINE;
            let (from, to) = (source.address, self.address);
            // SAFETY: everything is inside the `count` bytes that both spans have, which may be
            // used by the contract of `new`; `head` aligns the lines.
            unsafe {
                guard::copy(from, to, head)?;
                guard::stream(from.wrapping_add(head), to.wrapping_add(head), lines)?;
                guard::copy(from.wrapping_add(tail), to.wrapping_add(tail), count - tail)?;
            }
            return Ok(count);
        }
        self.copy_span(source)
    }
}

/// Shorter copies are made as usual: the fence at the end would cost more than it saves.
#[cfg(target_arch = "x86_64")]
const STREAM_LEAST: usize = 1 << 10;

/// The way the target of a copy is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Store {
    /// Through the cache, for a target that is read soon. The two sides may overlap.
    Cached,
    /// Past the cache where the processor can, for a target that is not read soon. The content of
    /// overlapping bytes is unspecified.
    Streamed,
}

/// Copies from the position of `from_at` in `from` to the position of `to_at` in `to`, until either
/// list ends. Returns the number of bytes copied.
///
/// # Errors
/// Memory of either list is not mapped, or not for this access.
pub fn copy_spans(
    (from, mut from_at): (&[Span], Cursor),
    (to, mut to_at): (&[Span], Cursor),
    store: Store,
) -> Result<usize, Fault> {
    let mut copied = 0;
    while let (Some(source), Some(target)) = (from_at.rest(from).next(), to_at.rest(to).next()) {
        let count = match store {
            Store::Cached => target.copy_span(source)?,
            Store::Streamed => target.stream_span(source)?,
        };
        from_at.advance(from, count);
        to_at.advance(to, count);
        copied += count;
    }
    Ok(copied)
}

/// The position up to which a list of spans has been sent or filled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cursor {
    index: usize,
    // Always less than the length of spans[index], or 0.
    offset: usize,
}

impl Cursor {
    /// Moves forward by `count` bytes. `count` must not go past the end of `spans`.
    pub fn advance(&mut self, spans: &[Span], mut count: usize) {
        while count > 0 {
            let left = spans[self.index].len - self.offset;
            if count < left {
                self.offset += count;
                return;
            }
            count -= left;
            self.index += 1;
            self.offset = 0;
        }
    }

    /// Returns whether the position is inside a span, and not at its start.
    #[must_use]
    pub fn is_inside(&self) -> bool {
        self.offset > 0
    }

    /// Iterates over the rest of `spans`, span by span.
    pub fn rest<'a>(&self, spans: &'a [Span]) -> impl Iterator<Item = Span> + 'a {
        let offset = self.offset;
        spans[self.index.min(spans.len())..]
            .iter()
            .enumerate()
            .map(move |(i, span)| {
                let skip = if i == 0 { offset } else { 0 };
                Span {
                    address: span.address.wrapping_add(skip),
                    len: span.len - skip,
                }
            })
    }

    /// Returns the number of bytes left of `spans`.
    #[must_use]
    pub fn remaining(&self, spans: &[Span]) -> usize {
        self.rest(spans).map(|s| s.len).sum()
    }

    /// Copies `bytes` to the cursor's position and advances it; returns the number of bytes copied.
    ///
    /// # Errors
    /// Memory of the spans is not mapped or cannot be written to; the cursor has not moved.
    pub fn copy_in(&mut self, spans: &[Span], bytes: &[u8]) -> Result<usize, Fault> {
        let mut done = 0;
        for span in self.rest(spans) {
            if done == bytes.len() {
                break;
            }
            done += span.copy_from(&bytes[done..])?;
        }
        self.advance(spans, done);
        Ok(done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(bytes: &mut [u8]) -> Span {
        // SAFETY: every test keeps `bytes` alive and leaves it alone while it uses the span.
        unsafe { Span::new(bytes.as_mut_ptr(), bytes.len()) }
    }

    #[test]
    fn slices_stay_inside() {
        let mut bytes = [0; 10];
        let whole = span(&mut bytes);
        assert_eq!(whole.slice(3, 7).unwrap().len(), 7);
        assert_eq!(whole.slice(10, 0).unwrap().len(), 0);
        assert!(whole.slice(3, 8).is_none());
        assert!(whole.slice(usize::MAX, 2).is_none());
    }

    #[test]
    fn spans_that_touch_in_order_join_and_others_do_not() {
        let mut bytes = [0; 10];
        let whole = span(&mut bytes);
        let part = |at, len| whole.slice(at, len).unwrap();
        assert_eq!(part(0, 3).join(part(3, 7)), Some(whole));
        assert_eq!(part(4, 0).join(part(4, 2)), Some(part(4, 2)));
        for (one, other) in [((0, 3), (4, 6)), ((0, 4), (3, 7)), ((3, 7), (0, 3))] {
            assert_eq!(part(one.0, one.1).join(part(other.0, other.1)), None);
        }
        assert!(part(4, 0).is_empty() && !part(4, 1).is_empty());
        assert_eq!(part(4, 1).address(), whole.address() + 4);
        assert_eq!(whole.address(), bytes.as_ptr() as usize);
    }

    #[test]
    fn copies_are_as_long_as_the_shorter_side() {
        let mut bytes = [1, 2, 3, 4];
        let whole = span(&mut bytes);
        let mut out = [9; 6];
        assert_eq!(whole.copy_to(&mut out), Ok(4));
        assert_eq!(out, [1, 2, 3, 4, 9, 9]);
        assert_eq!(whole.copy_to(&mut out[..2]), Ok(2));
        assert_eq!(whole.slice(1, 2).unwrap().copy_from(&[7, 8, 9]), Ok(2));
        assert_eq!(bytes, [1, 7, 8, 4]);
    }

    #[test]
    fn the_cursor_visits_every_byte_once() {
        let mut memory = vec![0u8; 100];
        let whole = span(&mut memory);
        let spans: Vec<_> = [(0, 1), (1, 9), (10, 40), (50, 50)]
            .into_iter()
            .map(|(at, len)| whole.slice(at, len).unwrap())
            .collect();
        for step in 1..=100 {
            let mut cursor = Cursor::default();
            let mut left = 100;
            while left > 0 {
                assert_eq!(cursor.remaining(&spans), left);
                let n = step.min(left);
                cursor.advance(&spans, n);
                left -= n;
            }
            assert_eq!(cursor.remaining(&spans), 0);
        }
    }

    #[test]
    fn streaming_copies_every_byte_and_no_other() {
        let source: Vec<u8> = (0..5000).map(|i| (i * 7 + i / 256) as u8).collect();
        for (from, to, len) in [
            (0, 0, 4096),
            (3, 1, 1024),
            (1, 63, 1025),
            (17, 64, 4091),
            (9, 5, 1023),
            (0, 7, 0),
        ] {
            let (mut from_bytes, mut target) = (source.clone(), vec![0xee; 5000]);
            let from_span = span(&mut from_bytes).slice(from, len).unwrap();
            let to_span = span(&mut target).slice(to, len).unwrap();
            assert_eq!(to_span.stream_span(from_span), Ok(len));
            let mut expected = vec![0xee; 5000];
            expected[to..to + len].copy_from_slice(&source[from..from + len]);
            assert_eq!(target, expected, "{len} bytes from {from} to {to}");
        }
    }

    #[test]
    fn lists_are_copied_from_where_they_stand_until_one_ends() {
        for store in [Store::Cached, Store::Streamed] {
            let (mut source, mut target) = ((0..60).collect::<Vec<u8>>(), vec![0xff; 100]);
            let (from, to) = (span(&mut source), span(&mut target));
            let from = [(0, 7), (20, 30)].map(|(at, len)| from.slice(at, len).unwrap());
            let to = [(50, 10), (0, 10), (70, 25)].map(|(at, len)| to.slice(at, len).unwrap());
            let (mut from_at, mut to_at) = (Cursor::default(), Cursor::default());
            from_at.advance(&from, 2);
            to_at.advance(&to, 6);
            let copied = copy_spans((&from, from_at), (&to, to_at), store);
            assert_eq!(copied, Ok(35));
            let mut expected = vec![0xff; 100];
            expected[56..60].copy_from_slice(&[2, 3, 4, 5]);
            expected[..1].copy_from_slice(&[6]);
            expected[1..10].copy_from_slice(&(20..29).collect::<Vec<_>>());
            expected[70..91].copy_from_slice(&(29..50).collect::<Vec<_>>());
            assert_eq!(target, expected);
            // A target that ends first.
            let copied = copy_spans((&from, from_at), (&to[..1], to_at), store);
            assert_eq!(copied, Ok(4));
        }
    }

    #[test]
    fn copy_in_scatters_and_stops_at_the_end() {
        let mut memory = vec![0u8; 12];
        let whole = span(&mut memory);
        let spans = [whole.slice(8, 4).unwrap(), whole.slice(0, 3).unwrap()];
        let mut cursor = Cursor::default();
        assert_eq!(cursor.copy_in(&spans, &[1, 2, 3]), Ok(3));
        assert_eq!(cursor.copy_in(&spans, &[4, 5, 6, 7, 8]), Ok(4));
        assert_eq!(cursor.copy_in(&spans, &[9]), Ok(0));
        assert_eq!(memory, [5, 6, 7, 0, 0, 0, 0, 0, 1, 2, 3, 4]);
    }
}
