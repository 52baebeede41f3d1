//! The order in which the pieces of a transfer are moved. Pure.
//!
//! Block tables name blocks in the order of tokens, while allocators hand blocks out in runs, often
//! from the last to the first. Moved in the order of their addresses, neighbours become one range:
//! a device moves it by the copy engine instead of a kernel, which takes processors from the
//! application, and a system call handles fewer ranges. The order has no other effect: chunks of
//! one transfer land in any order.

use tcpx_proto::lane::Op;

use super::{Group, Piece};
use crate::error::Side;

/// Sorts pieces of one group by their addresses on one side, if at least a quarter of the ranges
/// join; otherwise leaves them as they are. The receiving side is tried first: it often decodes
/// meanwhile. Where one side is on a device, only its ranges count: a host handles scattered blocks
/// well.
pub(super) fn arrange(pieces: &mut [Piece], group: &Group, op: Op) {
    let is_on_device = |side| group.is_on_device(side);
    let sides = match (is_on_device(Side::Local), is_on_device(Side::Remote), op) {
        (true, false, _) => &[Side::Local][..],
        (false, true, _) => &[Side::Remote],
        (_, _, Op::Read) => &[Side::Local, Side::Remote],
        (_, _, Op::Write) => &[Side::Remote, Side::Local],
    };
    let given = ranges(pieces, sides);
    for side in sides {
        if pieces.is_sorted_by_key(|piece| piece.start(*side)) {
            continue;
        }
        let sorted = sorted(pieces, *side);
        if ranges(&sorted, sides) * 4 <= given * 3 {
            return pieces.copy_from_slice(&sorted);
        }
    }
}

/// Returns pieces in the order of their addresses.
fn sorted(pieces: &[Piece], side: Side) -> Vec<Piece> {
    // Short keys: pieces are long, and are moved once.
    let starts = pieces.iter().map(|piece| piece.start(side));
    let mut order: Vec<_> = starts.zip(0_u32..).collect();
    order.sort_unstable();
    let in_order = order.iter().map(|&(_, index)| pieces[index as usize]);
    in_order.collect()
}

/// Counts the contiguous ranges of pieces, as the sum over sides.
fn ranges(pieces: &[Piece], sides: &[Side]) -> usize {
    let ends = |side: &Side| {
        let joints = pieces.windows(2);
        1 + joints.filter(|two| !two[0].touches(&two[1], *side)).count()
    };
    match pieces.is_empty() {
        true => 0,
        false => sides.iter().map(ends).sum(),
    }
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
        let block = |(here, there)| {
            let (local, remote) = (4096 + here * distance, (there * distance) as u64);
            piece(local, remote, BLOCK, 1)
        };
        numbers.into_iter().map(block).collect()
    }

    fn scattered(count: usize) -> impl Iterator<Item = (usize, usize)> {
        (0..count).map(move |i| (i * STEP % count, i * (STEP + 2) % count))
    }

    /// Returns the ranges on each side after pieces were arranged.
    fn ranges_after(mut pieces: Vec<Piece>, group: &Group, op: Op) -> (usize, usize) {
        arrange(&mut pieces, group, op);
        (
            ranges(&pieces, &[Side::Local]),
            ranges(&pieces, &[Side::Remote]),
        )
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

    /// Fewer ranges for each system call.
    #[test]
    fn host_memory_is_in_order_on_the_receiving_side() {
        let pieces = || blocks(scattered(1000), BLOCK);
        let host = group(false, false);
        assert_eq!(ranges_after(pieces(), &host, Op::Read).0, 1);
        assert_eq!(ranges_after(pieces(), &host, Op::Write).1, 1);
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

    #[test]
    fn blocks_with_gaps_keep_their_order() {
        let given = blocks(scattered(1000), 2 * BLOCK);
        let mut arranged = given.clone();
        arrange(&mut arranged, &group(true, true), Op::Read);
        let starts = |pieces: &[Piece]| pieces.iter().map(|p| p.address).collect::<Vec<_>>();
        assert_eq!(starts(&arranged), starts(&given));
    }

    /// One of four blocks joins another one: that is enough, one of five is not.
    #[test]
    fn three_quarters_of_the_ranges_are_few_enough() {
        let arranged = |period: usize| {
            let starts = (0..20 * period).map(|i| i * 2 + usize::from(i % period == 0));
            let pieces = starts
                .rev()
                .map(|start| piece(4096 + start * BLOCK, 0, BLOCK, 1));
            ranges_after(pieces.collect(), &group(true, false), Op::Read).0
        };
        assert_eq!((arranged(4), arranged(5)), (60, 100));
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
        fn no_piece_is_lost_and_ranges_are_no_more_than_before(
            numbers in prop::collection::vec((0..40_usize, 0..40_usize), 0..60),
            distance in BLOCK..BLOCK + 2,
            local: bool,
            remote: bool,
            is_read: bool,
        ) {
            let op = if is_read { Op::Read } else { Op::Write };
            let group = group(local, remote);
            let given = blocks(numbers, distance);
            let mut arranged = given.clone();
            arrange(&mut arranged, &group, op);
            let sides: Vec<_> = [Side::Local, Side::Remote]
                .into_iter()
                .filter(|side| local == remote || group.is_on_device(*side))
                .collect();
            prop_assert!(ranges(&arranged, &sides) <= ranges(&given, &sides));
            let sorted = |pieces: &[Piece]| {
                let all = pieces.iter().map(|p| (p.local.address(), p.address));
                let mut all: Vec<_> = all.collect();
                all.sort_unstable();
                all
            };
            prop_assert_eq!(sorted(&arranged), sorted(&given));
        }
    }
}
