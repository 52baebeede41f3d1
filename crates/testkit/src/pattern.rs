//! Bytes that depend on a seed and their position, so that a lost, repeated or misplaced block is
//! detected.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// Fills the initiator's side before a test: bytes that nobody wrote keep this value.
pub const LOCAL_POISON: u8 = 0xA5;
/// Fills the other side; different, so that transferred poison is detected too.
pub const REMOTE_POISON: u8 = 0x5A;

/// The content of a range of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Content {
    /// Byte `i` of the range is byte `at + i` of the pattern of `seed`.
    Pattern {
        /// The seed of the pattern.
        seed: u64,
        /// The position in the pattern at which the range begins.
        at: u64,
    },
    /// All bytes are the same.
    Byte(u8),
}

impl Content {
    /// Returns the pattern of `seed` from its start.
    #[must_use]
    pub fn pattern(seed: u64) -> Self {
        Self::Pattern { seed, at: 0 }
    }

    /// Returns the same content, starting `bytes` later.
    #[must_use]
    pub fn skip(self, bytes: usize) -> Self {
        match self {
            Self::Pattern { seed, at } => Self::Pattern {
                seed,
                at: at + bytes as u64,
            },
            Self::Byte(_) => self,
        }
    }

    /// Writes the first bytes of this content.
    pub fn write_to(self, out: &mut [u8]) {
        match self {
            Self::Byte(byte) => out.fill(byte),
            Self::Pattern { seed, at } => {
                let lead = (at.wrapping_neg() % 8) as usize;
                let (head, rest) = out.split_at_mut(lead.min(out.len()));
                for (i, byte) in head.iter_mut().enumerate() {
                    *byte = pattern_byte(seed, at + i as u64);
                }
                let mut word = (at + lead as u64) / 8;
                // Arrays instead of slices: six times faster in a build with few optimisations.
                let (words, tail) = rest.as_chunks_mut();
                for bytes in words {
                    *bytes = pattern_word(seed, word).to_le_bytes();
                    word += 1;
                }
                for (i, byte) in tail.iter_mut().enumerate() {
                    *byte = pattern_byte(seed, word * 8 + i as u64);
                }
            }
        }
    }

    /// Returns the first `len` bytes of this content.
    #[must_use]
    pub fn to_vec(self, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        self.write_to(&mut out);
        out
    }
}

fn pattern_byte(seed: u64, at: u64) -> u8 {
    pattern_word(seed, at / 8).to_le_bytes()[(at % 8) as usize]
}

/// Computes one word: cheap, and different in every byte for neighbouring words and seeds.
#[inline]
fn pattern_word(seed: u64, index: u64) -> u64 {
    let x = (index ^ seed.wrapping_mul(0x9E37_79B9_7F4A_7C15)).wrapping_mul(0xD6E8_FEB8_6659_FD93);
    (x ^ (x >> 32)).wrapping_mul(0xD6E8_FEB8_6659_FD93)
}

/// A range with a content of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extent {
    /// The start of the range.
    pub offset: usize,
    /// The length of the range.
    pub len: usize,
    /// The content of the range.
    pub content: Content,
}

/// The expected content of a whole piece of memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Expected {
    /// The content outside of all extents.
    rest: Content,
    extents: Vec<Extent>,
}

impl Expected {
    /// Expects the same content everywhere, counted from the start of the memory.
    #[must_use]
    pub fn only(content: Content) -> Self {
        Self {
            rest: content,
            extents: Vec::new(),
        }
    }

    /// Expects one byte everywhere.
    #[must_use]
    pub fn untouched(poison: u8) -> Self {
        Self::only(Content::Byte(poison))
    }

    /// Adds another content in a range; ranges must not overlap.
    #[must_use]
    pub fn with(mut self, range: Range<usize>, content: Content) -> Self {
        self.put(range.start, range.len(), content);
        self
    }

    /// Does what [`Expected::with`] does, in place.
    pub fn put(&mut self, offset: usize, len: usize, content: Content) {
        if len > 0 {
            self.extents.push(Extent {
                offset,
                len,
                content,
            });
        }
    }

    /// Returns the contents of `len` bytes of memory, in order and without gaps.
    ///
    /// # Panics
    /// When the extents overlap or do not fit.
    pub fn cover(&self, len: usize) -> Vec<Extent> {
        let mut sorted = self.extents.clone();
        sorted.sort_by_key(|e| e.offset);
        let mut out = Vec::with_capacity(2 * sorted.len() + 1);
        let mut at = 0;
        let gap = |from: usize, to: usize, out: &mut Vec<Extent>| {
            assert!(
                from <= to,
                "the test expects two things of byte {to}, or the range is too long"
            );
            if from < to {
                out.push(Extent {
                    offset: from,
                    len: to - from,
                    content: self.rest.skip(from),
                });
            }
        };
        for extent in sorted {
            gap(at, extent.offset, &mut out);
            at = extent.offset + extent.len;
            out.push(extent);
        }
        gap(at, len, &mut out);
        out
    }
}

/// The first wrong byte.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mismatch {
    /// Its offset.
    pub offset: usize,
    /// The bytes found from there on.
    pub found: Vec<u8>,
    /// The expected bytes.
    pub wanted: Vec<u8>,
    /// The extent that contains it.
    pub extent: Extent,
}

impl std::fmt::Display for Mismatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "at offset {}: found {:02x?}, expected {:02x?}, in {:?}",
            self.offset, self.found, self.wanted, self.extent
        )
    }
}

/// A small fast reproducible random generator.
#[derive(Clone, Debug)]
pub struct Dice(u64);

impl Dice {
    /// Creates a different sequence for each seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0x1234_5678_9ABC_DEF0)
    }

    /// Returns the next number below `bound`, which must not be 0.
    pub fn below(&mut self, bound: usize) -> usize {
        // splitmix64
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) % bound as u64) as usize
    }

    /// Returns the next number of a range.
    pub fn within(&mut self, range: Range<usize>) -> usize {
        range.start + self.below(range.len())
    }

    /// Shuffles a slice.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i + 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_is_the_same_however_it_is_cut() {
        let whole = Content::pattern(7).to_vec(200);
        for start in 0..40 {
            for len in [0, 1, 3, 8, 9, 17, 64, 150] {
                let piece = Content::pattern(7).skip(start).to_vec(len);
                assert_eq!(piece, whole[start..start + len], "{len} bytes at {start}");
            }
        }
    }

    #[test]
    fn patterns_of_different_seeds_and_places_differ() {
        let a = Content::pattern(1).to_vec(1 << 16);
        for other in [
            Content::pattern(2),
            Content::pattern(1).skip(1),
            Content::pattern(1).skip(4096),
        ] {
            let b = other.to_vec(1 << 16);
            let same = a.iter().zip(&b).filter(|(x, y)| x == y).count();
            assert!(same < 600, "{other:?}: {same} equal bytes of 65536");
        }
    }

    #[test]
    fn the_cover_has_no_gaps() {
        let expected = Expected::untouched(9)
            .with(20..30, Content::pattern(1))
            .with(0..5, Content::pattern(2))
            .with(30..40, Content::pattern(3));
        let cover = expected.cover(50);
        let ranges: Vec<_> = cover.iter().map(|e| (e.offset, e.len)).collect();
        assert_eq!(ranges, [(0, 5), (5, 15), (20, 10), (30, 10), (40, 10)]);
    }
}
