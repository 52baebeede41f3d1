//! The order in which the pieces of a transfer are moved. Pure.
//!
//! Block tables name blocks in the order of tokens, while allocators hand blocks out in runs, often
//! from the last to the first. The copy engine of a device moves long ranges, and blocks that are
//! equally far apart, such as the same heads of many blocks. Other blocks take a kernel, which
//! occupies processors of the application. So pieces are moved in the order of their addresses on a
//! device if the copy engine can then move most of them. The order has no other effect: chunks of
//! one transfer land in any order, and segments that overlap have no defined result.

use tcpx_cuda::Range;
use tcpx_proto::lane::Op;

use super::{Group, Piece};
use crate::error::Side;

/// Length from which the copy engine is as fast for several ranges as for one.
const LONG: usize = 256 << 10;

/// Sorts pieces of one group by their addresses on a device, if most bytes are in long runs there
/// afterwards and are not yet; otherwise leaves them as they are. Where both sides are devices and
/// only one can have its order, the receiving side has it: it often decodes meanwhile. Host memory
/// does not count: a host handles scattered blocks well, and sorting takes time.
pub(super) fn arrange(pieces: &mut [Piece], group: &Group, op: Op) {
    let sides = match op {
        Op::Read => [Side::Local, Side::Remote],
        Op::Write => [Side::Remote, Side::Local],
    };
    for side in sides.into_iter().filter(|side| group.is_on_device(*side)) {
        if is_mostly_long(pieces.iter(), side) {
            return;
        }
        if pieces.is_sorted_by_key(|piece| piece.start(side)) {
            continue;
        }
        let order = order_of(pieces, side);
        let in_order = order.iter().map(|&(_, index)| &pieces[index as usize]);
        if is_mostly_long(in_order.clone(), side) {
            let sorted: Vec<_> = in_order.copied().collect();
            return pieces.copy_from_slice(&sorted);
        }
    }
}

/// Returns the addresses of pieces in ascending order, and the pieces' indices. Sorts short keys:
/// pieces are long.
fn order_of(pieces: &[Piece], side: Side) -> Vec<(u64, u32)> {
    let starts = pieces.iter().map(|piece| piece.start(side));
    let mut order: Vec<_> = starts.zip(0_u32..).collect();
    order.sort_unstable();
    order
}

/// Returns whether at least half of the bytes are in long runs: in adjacent or equally distant
/// pieces of 256 KiB together, or of half of everything if that is less.
fn is_mostly_long<'a>(pieces: impl Iterator<Item = &'a Piece> + Clone, side: Side) -> bool {
    let bytes = pieces.clone().map(|piece| piece.local.len()).sum::<usize>();
    let half = bytes.div_ceil(2);
    let runs = tcpx_cuda::rows(ranges(pieces, side)).map(|rows| rows.len());
    runs.filter(|len| *len >= LONG.min(half)).sum::<usize>() >= half
}

/// Joins consecutive pieces that are adjacent on one side.
fn ranges<'a>(pieces: impl Iterator<Item = &'a Piece>, side: Side) -> impl Iterator<Item = Range> {
    let mut pieces = pieces.peekable();
    std::iter::from_fn(move || {
        let mut last = pieces.next()?;
        let mut range = Range {
            address: last.start(side) as usize,
            len: last.local.len(),
        };
        while let Some(next) = pieces.next_if(|next| last.touches(next, side)) {
            range.len += next.local.len();
            last = next;
        }
        Some(range)
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;
    use tcpx_cuda::{Device, StandIn};

    use super::*;
    use crate::memory::MemoryKind;
    use crate::transfer::plan::tests::piece;

    const BLOCK: usize = 100;
    /// Not a divisor of the numbers of blocks here: multiples of it visit every block.
    const STEP: usize = 37;

    fn group(local: bool, remote: bool) -> Group {
        let device = || Arc::new(StandIn::new(1)) as Arc<dyn Device>;
        Group {
            device: local.then(device),
            remote: match remote {
                true => MemoryKind::Cuda { device: 0 },
                false => MemoryKind::Host,
            },
        }
    }

    /// Makes pieces of blocks with these numbers, `distance` bytes apart in memory.
    fn blocks(numbers: impl IntoIterator<Item = (usize, usize)>, distance: usize) -> Vec<Piece> {
        blocks_of(BLOCK, numbers, distance)
    }

    /// Makes pieces of blocks of `len` bytes.
    fn blocks_of(
        len: usize,
        numbers: impl IntoIterator<Item = (usize, usize)>,
        distance: usize,
    ) -> Vec<Piece> {
        let block = |(here, there)| {
            let (local, remote) = (4096 + here * distance, (there * distance) as u64);
            piece(local, remote, len, 1)
        };
        numbers.into_iter().map(block).collect()
    }

    fn scattered(count: usize) -> impl Iterator<Item = (usize, usize)> {
        (0..count).map(move |i| (i * STEP % count, i * (STEP + 2) % count))
    }

    /// Returns the ranges on each side after pieces were arranged.
    fn ranges_after(mut pieces: Vec<Piece>, group: &Group, op: Op) -> (usize, usize) {
        arrange(&mut pieces, group, op);
        let ranges = |side| pieces.chunk_by(|a, b| a.touches(b, side)).count();
        (ranges(Side::Local), ranges(Side::Remote))
    }

    fn starts(pieces: &[Piece]) -> Vec<(usize, u64)> {
        let starts = pieces.iter().map(|p| (p.local.address(), p.address));
        starts.collect()
    }

    #[test]
    fn blocks_in_any_order_are_one_range_on_the_device() {
        let count = 1000;
        let alone = |pieces: Vec<Piece>| {
            let local = ranges_after(pieces.clone(), &group(true, false), Op::Write);
            let remote = ranges_after(pieces, &group(false, true), Op::Write);
            (local.0, remote.1)
        };
        assert_eq!(alone(blocks(scattered(count), BLOCK)), (1, 1));
        let backwards = (0..count).rev().map(|i| (i, i * STEP % count));
        assert_eq!(alone(blocks(backwards, BLOCK)), (1, 1));
    }

    #[test]
    fn blocks_that_are_backwards_on_both_sides_are_one_range_on_both() {
        let backwards = (0..1000).rev().map(|i| (i, i));
        let found = ranges_after(blocks(backwards, BLOCK), &group(true, false), Op::Read);
        assert_eq!(found, (1, 1));
    }

    #[test]
    fn receiving_device_gets_its_order() {
        let pieces = || blocks(scattered(1000), BLOCK);
        let both = group(true, true);
        assert_eq!(ranges_after(pieces(), &both, Op::Read).0, 1);
        assert_eq!(ranges_after(pieces(), &both, Op::Write).1, 1);
        // Also if the sending device has its order already.
        let of_sender = (0..1000).map(|i| (i * STEP % 1000, i));
        assert_eq!(ranges_after(blocks(of_sender, BLOCK), &both, Op::Read).0, 1);
    }

    #[test]
    fn sending_device_gets_its_order_where_only_that_joins_pieces() {
        let (op, both) = (Op::Read, group(true, true));
        let pieces = scattered(1000).map(|(here, there)| {
            let local = 4096 + here * 2 * BLOCK;
            piece(local, (there * BLOCK) as u64, BLOCK, 1)
        });
        let (local, remote) = ranges_after(pieces.collect(), &both, op);
        assert_eq!((local, remote), (1000, 1));
    }

    #[test]
    fn host_memory_keeps_its_order() {
        let given = blocks(scattered(1000), BLOCK);
        let mut arranged = given.clone();
        arrange(&mut arranged, &group(false, false), Op::Read);
        assert_eq!(starts(&arranged), starts(&given));
    }

    #[test]
    fn host_memory_beside_a_device_does_not_count() {
        let pieces = (0..1000).map(|i| {
            let local = 4096 + (i * STEP % 1000) * 2 * BLOCK;
            piece(local, ((999 - i) * BLOCK) as u64, BLOCK, 1)
        });
        let found = ranges_after(pieces.collect(), &group(true, false), Op::Write);
        assert_eq!(found, (1000, 1000));
    }

    /// Blocks of 4 KiB, each at a distance from the next that `gap` gives.
    fn with_gaps(gap: impl Fn(usize) -> usize) -> Vec<Piece> {
        let block = |i: usize| i * STEP % 1000;
        let pieces = (0..1000).map(|i| {
            let at = 4096 + block(i) * 8192 + gap(block(i));
            piece(at, (block(i) * 3 * 8192) as u64, 4096, 1)
        });
        pieces.collect()
    }

    #[test]
    fn blocks_with_equal_gaps_are_in_order() {
        for (given, on_devices) in [
            (with_gaps(|_| 0), group(true, false)),
            (with_gaps(|i| i * i % 64), group(false, true)),
        ] {
            let mut arranged = given.clone();
            arrange(&mut arranged, &on_devices, Op::Read);
            assert!(arranged.is_sorted_by_key(|piece| piece.local.address()));
        }
    }

    #[test]
    fn blocks_with_other_gaps_keep_their_order() {
        for given in [
            with_gaps(|i| i * i % 64),
            blocks(scattered(1000), 2 * BLOCK),
        ] {
            let mut arranged = given.clone();
            arrange(&mut arranged, &group(true, false), Op::Read);
            assert_eq!(starts(&arranged), starts(&given));
        }
    }

    /// The rest needs a kernel in any order.
    #[test]
    fn half_of_the_bytes_in_long_ranges_are_enough() {
        let block = 16 << 10;
        let is_arranged = |run: usize, runs: usize, alone: usize| {
            // No three runs, and no three others, are equally far apart.
            let of_runs = (0..runs * run).map(|i| i + (i / run) * (i / run));
            let scattered = (0..alone).map(|i| 2 * (runs * run + runs * runs) + i * (i + 3));
            let numbers = of_runs.chain(scattered).rev();
            let pieces = numbers.map(|i| piece(4096 + i * block, 0, block, 1));
            let mut pieces: Vec<_> = pieces.collect();
            arrange(&mut pieces, &group(true, false), Op::Read);
            pieces.is_sorted_by_key(|piece| piece.local.address())
        };
        assert!(is_arranged(16, 4, 64) && !is_arranged(16, 4, 65));
        // Two runs of one length are rows of one call.
        assert!(is_arranged(8, 8, 0) && !is_arranged(7, 8, 0));
    }

    /// A flag behind data, for instance.
    #[test]
    fn mostly_long_memory_keeps_its_order() {
        let given = vec![
            piece(8192, 64, 4096, 1),
            piece(4096, 0, 64, 1),
            piece(4160, 9000, 8, 1),
        ];
        for (local, remote) in [(true, false), (false, true), (true, true)] {
            let mut arranged = given.clone();
            arrange(&mut arranged, &group(local, remote), Op::Write);
            assert_eq!(starts(&arranged), starts(&given));
        }
    }

    #[test]
    fn blocks_of_adjacent_regions_are_not_joined() {
        let mut pieces = blocks(scattered(10), BLOCK);
        for piece in &mut pieces {
            piece.memory = u32::from(piece.local.address() >= 4096 + 5 * BLOCK);
        }
        let found = ranges_after(pieces, &group(true, false), Op::Read);
        assert_eq!(found.0, 2);
    }

    proptest! {
        #[test]
        fn no_piece_is_lost_and_the_first_long_side_stays(
            numbers in prop::collection::vec((0..40_usize, 0..40_usize), 0..60),
            // Adjacent, with gaps that make no rows of short blocks, and rows.
            (len, gap) in prop_oneof![Just((BLOCK, 0)), Just((BLOCK, 1)), Just((1000, 24))],
            local: bool,
            remote: bool,
            is_read: bool,
        ) {
            let op = if is_read { Op::Read } else { Op::Write };
            let group = group(local, remote);
            let given = blocks_of(len, numbers, len + gap);
            let mut arranged = given.clone();
            arrange(&mut arranged, &group, op);
            let (receiver, sender) = match op {
                Op::Read => (Side::Local, Side::Remote),
                Op::Write => (Side::Remote, Side::Local),
            };
            let was_long = |side| group.is_on_device(side) && is_mostly_long(given.iter(), side);
            let is_long = |side| group.is_on_device(side) && is_mostly_long(arranged.iter(), side);
            prop_assert!(is_long(receiver) || !was_long(receiver));
            prop_assert!(is_long(receiver) || is_long(sender) || !was_long(sender));
            let sorted = |pieces: &[Piece]| {
                let mut all = starts(pieces);
                all.sort_unstable();
                all
            };
            prop_assert_eq!(sorted(&arranged), sorted(&given));
        }
    }
}
