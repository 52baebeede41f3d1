//! The transferred data: sizes, blocks and their order on both sides, and the bytes in them.
//!
//! Everything here is a pure function of the [`Shape`], so the two processes of a measurement agree
//! on every offset and every byte by exchanging only the shape and a seed.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Maximum blocks of one workload: a few hundred MiB of bookkeeping at worst, on either side.
pub const MAX_BLOCKS: u64 = 4 << 20;

/// Maximum bytes of one workload. A peer applies its own, lower bound from its memory.
pub const MAX_TOTAL_BYTES: u64 = 1 << 40;

/// The direction of a transfer, seen from the side that starts it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Op {
    /// Bytes flow from the target to the initiator.
    Read,
    /// Bytes flow from the initiator to the target.
    Write,
}

impl Op {
    /// Returns the side that holds the bytes before the transfer.
    pub fn source(self) -> Side {
        match self {
            Op::Read => Side::Target,
            Op::Write => Side::Initiator,
        }
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Op::Read => "READ",
            Op::Write => "WRITE",
        })
    }
}

/// One of the two processes of a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Side {
    /// Starts transfers and measures the time.
    Initiator,
    /// Serves them while its application sleeps.
    Target,
}

impl Side {
    /// Returns the other side.
    pub fn other(self) -> Side {
        match self {
            Side::Initiator => Side::Target,
            Side::Target => Side::Initiator,
        }
    }
}

/// One contiguous piece of a side's buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Offset from the start of the buffer in bytes.
    pub offset: usize,
    /// Length in bytes.
    pub len: usize,
}

/// The number of measurements of a workload, for each of the engine and the floor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Limit {
    /// Exactly this many iterations.
    Iterations(u32),
    /// As many as fit in this time, at least one per round.
    Duration(Duration),
}

/// The places of the blocks in each side's buffer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Layout {
    /// One after the other, in the order of moving.
    Ordered,
    /// In another random order on each side. Together the blocks cover the buffer.
    #[default]
    Scattered,
    /// Scattered, with gaps as long as a block between them.
    Strided,
    /// Scattered, with gaps of one half, one or one and a half blocks between them: no two are
    /// adjacent in memory, and few are equally far apart. Blocks of less than 128 bytes are strided.
    Apart,
}

/// The bytes of one transfer: direction, size, blocks, layout. A value of this type is always valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "RawShape", into = "RawShape")]
pub struct Shape {
    op: Op,
    /// `1 <= block_bytes <= total_bytes <= MAX_TOTAL_BYTES`
    total_bytes: u64,
    /// `total_bytes / block_bytes <= MAX_BLOCKS`
    block_bytes: u64,
    layout: Layout,
}

/// The reason a [`Shape`] was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShapeError {
    /// There is nothing to move.
    #[error("a workload of 0 bytes measures nothing; ask for at least 1")]
    Empty,
    /// The total is too large.
    #[error("{total_bytes} bytes in one transfer is more than the {MAX_TOTAL_BYTES} allowed")]
    TooLarge {
        /// The requested total.
        total_bytes: u64,
    },
    /// The blocks are too small for the size.
    #[error(
        "{blocks} blocks of {block_bytes} bytes is more than the {MAX_BLOCKS} allowed; use larger blocks"
    )]
    TooManyBlocks {
        /// The resulting number of blocks.
        blocks: u64,
        /// The requested block size.
        block_bytes: u64,
    },
}

impl Shape {
    /// Creates a transfer of `total_bytes` in blocks of `block_bytes`. A block size of 0 or above
    /// the total means one contiguous block; the last block is shorter if the sizes do not divide.
    pub fn new(
        op: Op,
        total_bytes: u64,
        block_bytes: u64,
        layout: Layout,
    ) -> Result<Shape, ShapeError> {
        if total_bytes == 0 {
            return Err(ShapeError::Empty);
        }
        if total_bytes > MAX_TOTAL_BYTES {
            return Err(ShapeError::TooLarge { total_bytes });
        }
        let block_bytes = match block_bytes {
            0 => total_bytes,
            n => n.min(total_bytes),
        };
        let blocks = total_bytes.div_ceil(block_bytes);
        if blocks > MAX_BLOCKS {
            return Err(ShapeError::TooManyBlocks {
                blocks,
                block_bytes,
            });
        }
        Ok(Shape {
            op,
            total_bytes,
            block_bytes,
            layout,
        })
    }

    /// Returns the direction.
    pub fn op(&self) -> Op {
        self.op
    }

    /// Returns the bytes moved by one iteration.
    pub fn total_bytes(&self) -> u64 {
        self.total_bytes
    }

    /// Returns the length of each side's buffer.
    pub fn buffer_bytes(&self) -> u64 {
        match self.layout {
            Layout::Ordered | Layout::Scattered => self.total_bytes,
            Layout::Strided | Layout::Apart => {
                self.total_bytes + (self.blocks() as u64 - 1) * self.block_bytes + self.shift()
            }
        }
    }

    /// Returns how far some of the blocks are moved up, so that their distances differ.
    fn shift(&self) -> u64 {
        match self.layout {
            Layout::Apart if self.blocks() > 1 => self.block_bytes / 2 / 64 * 64,
            _ => 0,
        }
    }

    /// Returns the bytes in one block (the last may be shorter).
    pub fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    /// Returns the layout of the blocks.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Returns the number of blocks.
    pub fn blocks(&self) -> usize {
        self.total_bytes.div_ceil(self.block_bytes) as usize
    }

    /// Returns the positions of the blocks on one side, in the order of moving. Block `i` of one
    /// side corresponds to block `i` of the other. Unless they are apart, the spans together cover
    /// the buffer exactly once.
    pub fn spans(&self, side: Side) -> Vec<Span> {
        let block = self.block_bytes as usize;
        let whole = (self.total_bytes / self.block_bytes) as usize;
        let mut gaps = SplitMix(0x5bd1_e995_7b93_11d7);
        let mut offset = |index: usize| match self.layout {
            Layout::Ordered | Layout::Scattered => index * block,
            Layout::Strided => 2 * index * block,
            Layout::Apart => 2 * index * block + (gaps.next() & 1) as usize * self.shift() as usize,
        };
        let mut spans: Vec<Span> = (0..whole)
            .map(|index| Span {
                offset: offset(index),
                len: block,
            })
            .collect();
        let end = offset(whole);
        if self.layout != Layout::Ordered {
            let mut random = SplitMix(match side {
                Side::Initiator => 0x1d87_2b41_9a4c_5e03,
                Side::Target => 0x7c3e_51f0_d26b_8a95,
            });
            // Fisher-Yates, from the end. The bias of the modulo is below 2^-40 for MAX_BLOCKS
            // entries.
            for last in (1..spans.len()).rev() {
                let other = (random.next() % (last as u64 + 1)) as usize;
                spans.swap(last, other);
            }
        }
        let rest = (self.total_bytes % self.block_bytes) as usize;
        if rest > 0 {
            // The short block stays last on both sides: corresponding blocks must have equal
            // lengths.
            spans.push(Span {
                offset: end,
                len: rest,
            });
        }
        spans
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.op, crate::units::bytes(self.total_bytes))?;
        if self.block_bytes < self.total_bytes {
            let (layout, gaps) = match self.layout {
                Layout::Ordered => ("ordered", ""),
                Layout::Scattered => ("scattered", ""),
                Layout::Strided => ("scattered", " with equal gaps"),
                Layout::Apart => ("scattered", " with gaps"),
            };
            let block = crate::units::bytes(self.block_bytes);
            write!(f, " in {layout} {block} blocks{gaps}")?;
        }
        Ok(())
    }
}

/// An unchecked [`Shape`].
#[derive(Serialize, Deserialize)]
struct RawShape {
    op: Op,
    total_bytes: u64,
    block_bytes: u64,
    layout: Layout,
}

impl TryFrom<RawShape> for Shape {
    type Error = ShapeError;

    fn try_from(raw: RawShape) -> Result<Shape, ShapeError> {
        Shape::new(raw.op, raw.total_bytes, raw.block_bytes, raw.layout)
    }
}

impl From<Shape> for RawShape {
    fn from(shape: Shape) -> RawShape {
        let Shape {
            op,
            total_bytes,
            block_bytes,
            layout,
        } = shape;
        RawShape {
            op,
            total_bytes,
            block_bytes,
            layout,
        }
    }
}

/// A shape, and how often it is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Workload {
    /// The data that one iteration moves.
    pub shape: Shape,
    /// The number of measured iterations.
    pub limit: Limit,
    /// Iterations before the first measured one, not reported.
    pub warmup: u32,
}

/// Deterministic bytes: the byte at position `p` depends only on the seed and on `p`.
///
/// Cheap (about one multiplication per word) and different everywhere: a block that landed at a
/// wrong place, twice, or not at all does not verify.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pattern {
    seed: u64,
}

/// The first wrong byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[error(
    "byte {offset} of the destination is {found:#04x}, expected {expected:#04x} (byte {source_offset} of the source)"
)]
pub struct Mismatch {
    /// Its position in the destination buffer.
    pub offset: u64,
    /// The byte of the source buffer that belongs there.
    pub source_offset: u64,
    /// The expected value.
    pub expected: u8,
    /// The value found.
    pub found: u8,
}

impl Pattern {
    /// Creates the pattern of a seed.
    pub fn new(seed: u64) -> Pattern {
        // Spreads the seed over all bits: neighbouring seeds give unrelated patterns.
        Pattern {
            seed: SplitMix(seed).next(),
        }
    }

    /// Fills `out` with the bytes at positions `at`, `at + 1`, ...
    pub fn fill(&self, at: u64, out: &mut [u8]) {
        let head = head_len(at, out.len());
        let (head, body) = out.split_at_mut(head);
        for (position, byte) in (at..).zip(&mut *head) {
            *byte = self.byte(position);
        }
        let mut position = at + head.len() as u64;
        let mut words = body.chunks_exact_mut(8);
        for word in &mut words {
            word.copy_from_slice(&self.word(position / 8).to_le_bytes());
            position += 8;
        }
        for (position, byte) in (position..).zip(words.into_remainder()) {
            *byte = self.byte(position);
        }
    }

    /// Returns the index in `bytes` of the first one that differs from the pattern at positions
    /// `at`, `at + 1`, ...
    pub fn first_difference(&self, at: u64, bytes: &[u8]) -> Option<usize> {
        let head = head_len(at, bytes.len());
        let start = at + head as u64;
        let words = bytes[head..].chunks_exact(8);
        let tail = bytes.len() - words.remainder().len();
        // Branch-free over a few words at a time, so that it runs at the speed of memory.
        let mut differences = 0;
        for (index, word) in words.enumerate() {
            let found = u64::from_le_bytes(word.try_into().expect("chunks of 8"));
            differences |= found ^ self.word(start / 8 + index as u64);
        }
        let edges = (0..head).chain(tail..bytes.len());
        let clean = differences == 0
            && edges
                .into_iter()
                .all(|index| bytes[index] == self.byte(at + index as u64));
        if clean {
            return None;
        }
        (0..bytes.len()).find(|&index| bytes[index] != self.byte(at + index as u64))
    }

    fn byte(&self, position: u64) -> u8 {
        self.word(position / 8).to_le_bytes()[(position % 8) as usize]
    }

    fn word(&self, index: u64) -> u64 {
        let mixed = (index ^ self.seed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        mixed ^ (mixed >> 29)
    }
}

/// Checks that `destination`, the buffer of the side opposite to `shape.op().source()`, has the
/// pattern of the source buffer.
pub fn verify(shape: &Shape, pattern: Pattern, destination: &[u8]) -> Result<(), Mismatch> {
    let source = shape.op().source();
    let pairs = shape
        .spans(source)
        .into_iter()
        .zip(shape.spans(source.other()));
    for (from, to) in pairs {
        let landed = &destination[to.offset..to.offset + to.len];
        if let Some(index) = pattern.first_difference(from.offset as u64, landed) {
            let source_offset = (from.offset + index) as u64;
            return Err(Mismatch {
                offset: (to.offset + index) as u64,
                source_offset,
                expected: pattern.byte(source_offset),
                found: landed[index],
            });
        }
    }
    Ok(())
}

/// Returns the bytes before the next position that is a multiple of 8.
fn head_len(at: u64, len: usize) -> usize {
    ((8 - at % 8) % 8).min(len as u64) as usize
}

/// Steele, Lea and Flood's generator: one addition and a mix. Small, seedable, and good enough for
/// a shuffle.
struct SplitMix(u64);

impl SplitMix {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    use Layout::{Apart, Ordered, Scattered, Strided};

    fn shape(total: u64, block: u64, layout: Layout) -> Shape {
        Shape::new(Op::Write, total, block, layout).unwrap()
    }

    #[test]
    fn spans_cover_the_buffer_exactly_once() {
        for shape in [
            shape(1, 1, Scattered),
            shape(64 << 10, 4 << 10, Scattered),
            shape(100_003, 977, Scattered),
            shape(100_003, 977, Ordered),
            shape(4096, 0, Scattered),
        ] {
            for side in [Side::Initiator, Side::Target] {
                let mut spans = shape.spans(side);
                assert_eq!(spans.len(), shape.blocks());
                spans.sort_by_key(|span| span.offset);
                let mut end = 0;
                for span in spans {
                    assert_eq!(span.offset, end);
                    end += span.len;
                }
                assert_eq!(end as u64, shape.total_bytes());
            }
        }
    }

    #[test]
    fn no_two_blocks_are_adjacent_if_there_are_gaps() {
        for shape in [
            shape(64 << 10, 4 << 10, Apart),
            shape(64 << 10, 4 << 10, Strided),
            shape(100_003, 977, Strided),
            shape(100_003, 977, Apart),
            shape(4096, 0, Apart),
        ] {
            for side in [Side::Initiator, Side::Target] {
                let mut spans = shape.spans(side);
                let moved: usize = spans.iter().map(|span| span.len).sum();
                assert_eq!(moved as u64, shape.total_bytes());
                spans.sort_by_key(|span| span.offset);
                let gaps = spans
                    .windows(2)
                    .map(|two| (two[1].offset - two[0].offset - two[0].len) as u64);
                let gaps: BTreeSet<_> = gaps.collect();
                let (block, shift) = (shape.block_bytes(), shape.shift());
                let expected = match shape.blocks() {
                    1 => BTreeSet::new(),
                    _ => BTreeSet::from([block - shift, block, block + shift]),
                };
                assert_eq!(gaps, expected);
                let end = spans.last().map(|last| (last.offset + last.len) as u64);
                assert!(end <= Some(shape.buffer_bytes()));
            }
        }
    }

    #[test]
    fn partners_have_equal_lengths_and_different_places() {
        let shape = shape(1_000_003, 1000, Scattered);
        let local = shape.spans(Side::Initiator);
        let remote = shape.spans(Side::Target);
        assert!(local.iter().zip(&remote).all(|(a, b)| a.len == b.len));
        let moved = local
            .iter()
            .zip(&remote)
            .filter(|(a, b)| a.offset != b.offset)
            .count();
        assert!(moved > 900, "only {moved} of 1000 blocks change places");
        assert_eq!(
            local,
            shape.spans(Side::Initiator),
            "shuffles are deterministic"
        );
    }

    #[test]
    fn one_block_when_the_block_is_the_total_or_unspecified() {
        for block in [0, 4096, 1 << 30] {
            let shape = shape(4096, block, Scattered);
            assert_eq!(
                shape.spans(Side::Target),
                [Span {
                    offset: 0,
                    len: 4096
                }]
            );
        }
    }

    #[test]
    fn impossible_shapes_are_refused() {
        assert_eq!(Shape::new(Op::Read, 0, 0, Ordered), Err(ShapeError::Empty));
        assert!(matches!(
            Shape::new(Op::Read, u64::MAX, 1, Ordered),
            Err(ShapeError::TooLarge { .. })
        ));
        assert!(matches!(
            Shape::new(Op::Read, 1 << 30, 1, Ordered),
            Err(ShapeError::TooManyBlocks { .. })
        ));
        let wire = r#"{"op":"read","total_bytes":0,"block_bytes":0,"layout":"ordered"}"#;
        assert!(
            serde_json::from_str::<Shape>(wire).is_err(),
            "the wire is checked as well"
        );
    }

    #[test]
    fn a_fill_in_pieces_is_the_same_as_a_fill_at_once() {
        let pattern = Pattern::new(7);
        let mut whole = vec![0; 1000];
        pattern.fill(3, &mut whole);
        let mut pieces = vec![0; 1000];
        let mut at = 0;
        for len in (1..).take_while(|len| len * (len + 1) / 2 < 1000) {
            pattern.fill(3 + at as u64, &mut pieces[at..at + len]);
            at += len;
        }
        pattern.fill(3 + at as u64, &mut pieces[at..]);
        assert_eq!(whole, pieces);
        assert_eq!(pattern.first_difference(3, &whole), None);
    }

    #[test]
    fn every_flipped_byte_is_found() {
        let pattern = Pattern::new(7);
        let mut bytes = vec![0; 77];
        for at in [0, 5] {
            pattern.fill(at, &mut bytes);
            for index in 0..bytes.len() {
                bytes[index] ^= 0x40;
                assert_eq!(pattern.first_difference(at, &bytes), Some(index));
                bytes[index] ^= 0x40;
            }
        }
    }

    #[test]
    fn verify_follows_the_blocks_across_the_shuffles() {
        for (op, layout) in [
            (Op::Read, Scattered),
            (Op::Write, Scattered),
            (Op::Read, Apart),
        ] {
            let shape = Shape::new(op, 100_003, 1000, layout).unwrap();
            let len = shape.buffer_bytes() as usize;
            let pattern = Pattern::new(11);
            let mut source = vec![0; len];
            pattern.fill(0, &mut source);
            let mut destination = vec![0; len];
            let from = shape.spans(op.source());
            let to = shape.spans(op.source().other());
            for (from, to) in from.iter().zip(&to) {
                destination[to.offset..to.offset + to.len]
                    .copy_from_slice(&source[from.offset..from.offset + from.len]);
            }
            assert_eq!(verify(&shape, pattern, &destination), Ok(()));
            assert!(verify(&shape, Pattern::new(12), &destination).is_err());
            let wrong = to[40].offset + 321;
            destination[wrong] ^= 1;
            let found = verify(&shape, pattern, &destination);
            assert_eq!(found.unwrap_err().offset, wrong as u64);
        }
    }
}
