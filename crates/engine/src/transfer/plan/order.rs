//! The order in which the pieces of a transfer are moved. Pure.
//!
//! Block tables name blocks in the order of tokens, while allocators hand blocks out in runs, often
//! from the last to the first. A device moves a run that is contiguous in its memory by the copy
//! engine, and scattered blocks by a kernel, which takes processors from the application. So pieces
//! are moved in the order of their addresses on a device where that joins them. The order has no
//! other effect: chunks of one transfer land in any order anyway.

use super::{Group, Piece};
use crate::error::Side;
use tcpx_proto::lane::Op;

/// Sorts pieces of one group by their addresses on a device, if a device then has at most three
/// quarters of the ranges; otherwise leaves them as they are. If both sides are on devices and
/// either order joins as many pieces, the receiving device gets its order: it decodes meanwhile.
pub(super) fn arrange(pieces: &mut [Piece], group: &Group, op: Op) {
    let sides = match op {
        Op::Read => [Side::Local, Side::Remote],
        Op::Write => [Side::Remote, Side::Local],
    };
    let on_devices = || sides.into_iter().filter(|side| group.is_on_device(*side));
    let given: usize = on_devices().map(|side| ranges(pieces.iter(), side)).sum();
    let mut best: Option<(usize, Vec<u32>)> = None;
    for side in on_devices() {
        let Some(order) = sorted(pieces, side) else {
            continue;
        };
        let in_order = || order.iter().map(|&index| &pieces[index as usize]);
        let count: usize = on_devices().map(|side| ranges(in_order(), side)).sum();
        if best.as_ref().is_none_or(|(least, _)| count < *least) {
            best = Some((count, order));
        }
    }
    if let Some((count, order)) = best
        && count * 4 <= given * 3
    {
        let arranged: Vec<_> = order.iter().map(|&index| pieces[index as usize]).collect();
        pieces.copy_from_slice(&arranged);
    }
}

/// Returns the indices of pieces in the order of their addresses, or `None` if that is their order.
fn sorted(pieces: &[Piece], side: Side) -> Option<Vec<u32>> {
    if pieces.is_sorted_by_key(|piece| piece.start(side)) {
        return None;
    }
    let starts = pieces.iter().map(|piece| piece.start(side));
    let mut order: Vec<_> = starts.zip(0_u32..).collect();
    order.sort_unstable();
    Some(order.into_iter().map(|(_, index)| index).collect())
}

/// Counts the contiguous ranges of pieces on one side.
fn ranges<'a>(pieces: impl Iterator<Item = &'a Piece>, side: Side) -> usize {
    let (mut count, mut last) = (0, None::<&Piece>);
    for piece in pieces {
        count += usize::from(last.is_none_or(|last| !last.touches(piece, side)));
        last = Some(piece);
    }
    count
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
            ranges(pieces.iter(), Side::Local),
            ranges(pieces.iter(), Side::Remote),
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

    #[test]
    fn host_memory_keeps_its_order() {
        let given = blocks(scattered(1000), BLOCK);
        let expected = (
            ranges(given.iter(), Side::Local),
            ranges(given.iter(), Side::Remote),
        );
        let found = ranges_after(given, &group(false, false), Op::Read);
        assert_eq!(found, expected);
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
        fn no_piece_is_lost_and_no_device_has_more_ranges(
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
            let on_devices = |pieces: &[Piece]| -> usize {
                let sides = [Side::Local, Side::Remote].into_iter();
                let sides = sides.filter(|side| group.is_on_device(*side));
                sides.map(|side| ranges(pieces.iter(), side)).sum()
            };
            prop_assert!(on_devices(&arranged) <= on_devices(&given));
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
