//! The blocks of a floor, shared among its streams.

use crate::workload::Span;

/// Minimum bytes per stream: below this a further stream costs more than it carries, so small
/// totals use fewer streams.
const MIN_BYTES_PER_STREAM: usize = 64 << 10;

/// Cuts between streams fall on multiples of this, so that no page is split.
const CUT_ALIGNMENT: usize = 4 << 10;

/// The blocks of one side, ready to be borrowed from its buffer.
#[derive(Clone, Debug)]
pub struct Blocks {
    /// In the order of moving.
    spans: Vec<Span>,
    /// Indices into `spans` by ascending offset. Sorted once, so that no round pays for it.
    by_offset: Vec<usize>,
}

impl Blocks {
    /// Returns the blocks at these spans, which must not overlap.
    pub fn new(spans: Vec<Span>) -> Blocks {
        let mut by_offset: Vec<usize> = (0..spans.len()).collect();
        by_offset.sort_unstable_by_key(|&index| spans[index].offset);
        Blocks { spans, by_offset }
    }

    /// Borrows the blocks, in order, as one list per stream of about equal bytes; cuts a block at
    /// the border between two streams. Fewer lists for small totals, never an empty one.
    pub(super) fn share<'m>(&self, memory: &'m mut [u8], streams: usize) -> Vec<Vec<&'m mut [u8]>> {
        let total: usize = self.spans.iter().map(|span| span.len).sum();
        let streams = streams.min(total.div_ceil(MIN_BYTES_PER_STREAM)).max(1);
        let each = total.div_ceil(streams).next_multiple_of(CUT_ALIGNMENT);
        let list = || Vec::with_capacity(self.spans.len() / streams + 2);
        let (mut shares, mut current, mut room) = (Vec::with_capacity(streams), list(), each);
        for mut block in self.borrow(memory) {
            while block.len() > room {
                let (head, tail) = block.split_at_mut(room);
                if !head.is_empty() {
                    current.push(head);
                }
                shares.push(std::mem::replace(&mut current, list()));
                (block, room) = (tail, each);
            }
            room -= block.len();
            current.push(block);
        }
        shares.push(current);
        shares
    }

    fn borrow<'m>(&self, memory: &'m mut [u8]) -> Vec<&'m mut [u8]> {
        let mut blocks: Vec<&'m mut [u8]> = Vec::new();
        blocks.resize_with(self.spans.len(), Default::default);
        let (mut rest, mut at) = (memory, 0);
        for &index in &self.by_offset {
            let Span { offset, len } = self.spans[index];
            let (block, after) = rest.split_at_mut(offset - at).1.split_at_mut(len);
            blocks[index] = block;
            (rest, at) = (after, offset + len);
        }
        blocks
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::{Layout, Op, Pattern, Shape, Side};

    #[test]
    fn shares_hold_every_byte_once_and_in_order() {
        for (total, block, streams) in [
            (1, 1, 4),
            (100_000, 0, 3),
            (1 << 20, 4096, 1),
            (1_000_003, 999, 4),
            (200_000, 7, 8),
        ] {
            let shape = Shape::new(Op::Write, total, block, Layout::Scattered).unwrap();
            let spans = shape.spans(Side::Initiator);
            let mut memory = vec![0; total as usize];
            Pattern::new(1).fill(0, &mut memory);
            let expected: Vec<u8> = spans
                .iter()
                .flat_map(|s| &memory[s.offset..s.offset + s.len])
                .copied()
                .collect();
            let blocks = Blocks::new(spans);
            let shares = blocks.share(&mut memory, streams);
            assert!(shares.len() <= streams);
            assert!(shares.iter().flatten().all(|block| !block.is_empty()));
            let found: Vec<u8> = shares
                .iter()
                .flatten()
                .flat_map(|b| b.iter())
                .copied()
                .collect();
            assert_eq!(found, expected);
        }
    }
}
