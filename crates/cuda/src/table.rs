//! Pure: how lists of ranges become work for the kernel, and room for it in a ring.

use crate::error::Error;
use crate::{Entry, Range};

/// The most that one warp copies. Longer ranges are cut by the host, so that one long range among many
/// short ones does not become one warp's work; shorter pieces would only mean more of them. In two
/// rounds of 4 KiB a warp has it done.
pub(crate) const PIECE: u64 = 8 << 10;

/// Addresses, and offsets of the source, have this many bits; the length has the rest.
const ADDRESS_BITS: u32 = 48;

/// What one warp copies, as `kernels/copy.cu` reads it: one 16-byte load.
#[repr(C, align(16))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Item {
    /// Where from, in the low 48 bits; the length, in the high 16.
    from_and_len: u64,
    /// Where to.
    to: u64,
}

impl Item {
    #[inline]
    pub(crate) fn new(from: u64, to: u64, len: u64) -> Self {
        debug_assert!(from >> ADDRESS_BITS == 0 && (1..=PIECE).contains(&len));
        Self {
            from_and_len: from | len << ADDRESS_BITS,
            to,
        }
    }

    #[cfg(test)]
    fn parts(self) -> (u64, u64, u64) {
        let mask = (1 << ADDRESS_BITS) - 1;
        (
            self.from_and_len & mask,
            self.to,
            self.from_and_len >> ADDRESS_BITS,
        )
    }
}

/// Which side of a list's elements is meant.
pub(crate) trait View {
    type Of;
    fn start(of: &Self::Of) -> u64;
    fn len(of: &Self::Of) -> u64;
}

/// Ranges, as they are.
pub(crate) struct Ranges;
/// The sources of entries.
pub(crate) struct Sources;
/// The targets of entries.
pub(crate) struct Targets;

impl View for Ranges {
    type Of = Range;
    #[inline]
    fn start(of: &Range) -> u64 {
        of.address as u64
    }
    #[inline]
    fn len(of: &Range) -> u64 {
        of.len as u64
    }
}

impl View for Sources {
    type Of = Entry;
    #[inline]
    fn start(of: &Entry) -> u64 {
        of.from
    }
    #[inline]
    fn len(of: &Entry) -> u64 {
        of.len
    }
}

impl View for Targets {
    type Of = Entry;
    #[inline]
    fn start(of: &Entry) -> u64 {
        of.to
    }
    #[inline]
    fn len(of: &Entry) -> u64 {
        of.len
    }
}

/// A list's sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Measure {
    pub(crate) bytes: u64,
    pub(crate) count: usize,
}

/// Adds a list up, and checks that every address fits an item.
pub(crate) fn measure<V: View>(list: &[V::Of]) -> Result<Measure, Error> {
    let (mut bytes, mut ends) = (0_u64, 0_u64);
    // So few lengths that fit an item cannot overflow; those that do not fit are refused below.
    for part in list.chunks(1 << 15) {
        let mut sum = 0_u64;
        for place in part {
            let (start, len) = (V::start(place), V::len(place));
            // The highest bit of all is the highest bit of any. Where the end wraps, one of the two is high.
            ends |= start | len | start.wrapping_add(len);
            sum = sum.wrapping_add(len);
        }
        bytes = bytes.saturating_add(sum);
    }
    if ends >> ADDRESS_BITS != 0 {
        return Err(Error::BadAddress { end: ends });
    }
    Ok(Measure {
        bytes,
        count: list.len(),
    })
}

/// One side of a copy: a place to continue from.
pub(crate) trait Side {
    /// Whether it has no places of its own: it goes on for as long as the other side does.
    const IS_DENSE: bool;

    /// Where the next bytes are, and how many lie there together.
    fn next(&self) -> (u64, u64);
    /// Goes on by at most as many bytes as lie together.
    fn advance(&mut self, bytes: u64);
    /// An upper bound of the places left.
    fn places(&self) -> usize;

    /// How many places lie ahead whole.
    fn whole(&self) -> usize;
    /// The start and length of one of these, which lies `ahead` bytes ahead.
    fn peek(&self, index: usize, ahead: u64) -> (u64, u64);
    /// Goes on by `count` of these, `bytes` in all.
    fn skip(&mut self, count: usize, bytes: u64);
}

/// A list of places, one after the other.
pub(crate) struct List<'a, V: View> {
    /// What is left of it; the first place is not empty.
    rest: &'a [V::Of],
    /// How much of the first place is done; less than its length.
    offset: u64,
}

impl<'a, V: View> List<'a, V> {
    pub(crate) fn new(list: &'a [V::Of]) -> Self {
        let mut side = Self { rest: list, offset: 0 };
        side.skip(0, 0);
        side
    }
}

impl<V: View> Side for List<'_, V> {
    const IS_DENSE: bool = false;

    #[inline]
    fn next(&self) -> (u64, u64) {
        match self.rest.first() {
            Some(place) => (V::start(place) + self.offset, V::len(place) - self.offset),
            None => (0, 0),
        }
    }

    #[inline]
    fn advance(&mut self, bytes: u64) {
        self.offset += bytes;
        if self.rest.first().is_none_or(|place| V::len(place) == self.offset) {
            self.skip(1, 0);
        }
    }

    fn places(&self) -> usize {
        self.rest.len()
    }

    #[inline]
    fn whole(&self) -> usize {
        if self.offset == 0 { self.rest.len() } else { 0 }
    }

    #[inline]
    fn peek(&self, index: usize, _: u64) -> (u64, u64) {
        let place = &self.rest[index];
        (V::start(place), V::len(place))
    }

    #[inline]
    fn skip(&mut self, count: usize, _: u64) {
        self.offset = 0;
        self.rest = self.rest.get(count..).unwrap_or_default();
        while let [place, rest @ ..] = self.rest
            && V::len(place) == 0
        {
            self.rest = rest;
        }
    }
}

/// Bytes that lie back to back: the pinned side.
pub(crate) struct Dense(pub(crate) u64);

impl Side for Dense {
    const IS_DENSE: bool = true;

    #[inline]
    fn next(&self) -> (u64, u64) {
        (self.0, u64::MAX)
    }
    #[inline]
    fn advance(&mut self, bytes: u64) {
        self.0 += bytes;
    }
    fn places(&self) -> usize {
        0
    }
    #[inline]
    fn whole(&self) -> usize {
        usize::MAX
    }
    #[inline]
    fn peek(&self, _: usize, ahead: u64) -> (u64, u64) {
        (self.0 + ahead, u64::MAX)
    }
    #[inline]
    fn skip(&mut self, _: usize, bytes: u64) {
        self.0 += bytes;
    }
}

/// Both sides of a copy, with what is left of it.
pub(crate) struct Walk<F, T> {
    from: F,
    to: T,
    left: u64,
}

impl<F: Side, T: Side> Walk<F, T> {
    /// `bytes` is the total of the side (or sides) that is a list.
    pub(crate) fn new(from: F, to: T, bytes: u64) -> Self {
        Self {
            from,
            to,
            left: bytes,
        }
    }

    /// Bytes left.
    pub(crate) fn left(&self) -> u64 {
        self.left
    }

    /// At most this many items are left.
    pub(crate) fn most_items(&self) -> usize {
        let cuts = self.from.places() + self.to.places();
        cuts.saturating_add(usize::try_from(self.left / PIECE).unwrap_or(usize::MAX))
    }

    /// Fills `items` with the next work, of at most `most` bytes; returns how many items and bytes.
    #[inline]
    pub(crate) fn fill(&mut self, items: &mut [Item], most: u64) -> (usize, u64) {
        let most = most.min(self.left);
        let (mut count, mut bytes) = (0, 0);
        while count < items.len() && bytes < most {
            let (pieces, moved) = self.fill_whole(&mut items[count..], most - bytes);
            count += pieces;
            bytes += moved;
            if count == items.len() || bytes == most {
                break;
            }
            let ((from, here), (to, there)) = (self.from.next(), self.to.next());
            let len = here.min(there).min(PIECE).min(most - bytes);
            items[count] = Item::new(from, to, len);
            self.from.advance(len);
            self.to.advance(len);
            count += 1;
            bytes += len;
        }
        self.left -= bytes;
        (count, bytes)
    }

    /// The nearly always whole work of `fill`, about a nanosecond each: places that need no cutting and are
    /// equally long on both sides.
    #[inline]
    fn fill_whole(&mut self, items: &mut [Item], most: u64) -> (usize, u64) {
        let room = self.from.whole().min(self.to.whole()).min(items.len());
        let (mut count, mut bytes) = (0, 0);
        for item in &mut items[..room] {
            let ((from, here), (to, there)) = (self.from.peek(count, bytes), self.to.peek(count, bytes));
            let len = if F::IS_DENSE { there } else { here };
            let is_equal = F::IS_DENSE || T::IS_DENSE || here == there;
            // An empty place wraps to a long one.
            if len.wrapping_sub(1) >= PIECE || !is_equal || len > most - bytes {
                break;
            }
            *item = Item::new(from, to, len);
            count += 1;
            bytes += len;
        }
        self.from.skip(count, bytes);
        self.to.skip(count, bytes);
        (count, bytes)
    }

    /// The next bytes that lie together on both sides, without regard to pieces; for the copy engine.
    pub(crate) fn next_run(&mut self) -> Option<(u64, u64, u64)> {
        if self.left == 0 {
            return None;
        }
        let ((from, here), (to, there)) = (self.from.next(), self.to.next());
        let len = here.min(there).min(self.left);
        self.from.advance(len);
        self.to.advance(len);
        self.left -= len;
        Some((from, to, len))
    }
}

/// Room in a ring of items: reserved at the head, freed at the tail, in order.
#[derive(Debug)]
pub(crate) struct Ring {
    capacity: u64,
    /// `tail <= head <= tail + capacity`; both only grow.
    head: u64,
    tail: u64,
}

impl Ring {
    pub(crate) fn new(capacity: usize) -> Self {
        Self {
            capacity: capacity as u64,
            head: 0,
            tail: 0,
        }
    }

    /// Where `count` items lie together; none while there is no such room.
    pub(crate) fn reserve(&mut self, count: usize) -> Option<usize> {
        // Blocks of the kernel read eight items, one line of memory, at once.
        let count = (count as u64).next_multiple_of(8);
        if count > self.capacity {
            return None;
        }
        let at = self.head % self.capacity;
        let skipped = if at + count > self.capacity {
            self.capacity - at
        } else {
            0
        };
        if self.head == self.tail {
            // Nothing is in use: what is skipped is free again at once.
            self.tail += skipped;
        }
        if self.head + skipped + count > self.tail + self.capacity {
            return None;
        }
        let start = self.head + skipped;
        self.head = start + count;
        usize::try_from(start % self.capacity).ok()
    }

    /// Gives back the end of what was reserved last: `used` of `reserved` items are kept.
    pub(crate) fn trim(&mut self, reserved: usize, used: usize) {
        self.head -= (reserved as u64).next_multiple_of(8) - (used as u64).next_multiple_of(8);
    }

    /// The position to free up to, when what has been reserved until now is no longer used.
    pub(crate) fn position(&self) -> u64 {
        self.head
    }

    /// Frees everything reserved before `position`.
    pub(crate) fn free(&mut self, position: u64) {
        self.tail = self.tail.max(position);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Items as (from, to, len), with what was left over after the last call.
    fn all<F: Side, T: Side>(mut walk: Walk<F, T>, room: usize, most: u64) -> Vec<(u64, u64, u64)> {
        let mut found = Vec::new();
        let mut items = vec![Item::default(); room];
        while walk.left() > 0 {
            let bound = walk.most_items();
            let before = walk.left();
            let (count, bytes) = walk.fill(&mut items, most);
            assert!(
                count <= bound,
                "{count} items, at most {bound} were announced"
            );
            assert!(bytes > 0 && bytes <= most && before - bytes == walk.left());
            found.extend(items[..count].iter().map(|item| item.parts()));
        }
        found
    }

    /// Where each byte comes from and goes to.
    fn bytes(items: &[(u64, u64, u64)]) -> Vec<(u64, u64)> {
        let each = |&(from, to, len): &(u64, u64, u64)| (0..len).map(move |i| (from + i, to + i));
        items.iter().flat_map(each).collect()
    }

    fn positions(list: &[Range]) -> Vec<u64> {
        let each = |range: &Range| {
            let start = range.address as u64;
            start..start + range.len as u64
        };
        list.iter().flat_map(each).collect()
    }

    fn ranges() -> impl Strategy<Value = Vec<Range>> {
        let len = prop_oneof![3 => 0_usize..70, 1 => 0_usize..40_000, 1 => Just(PIECE as usize)];
        let range = (0_usize..1 << 40, len).prop_map(|(address, len)| Range { address, len });
        proptest::collection::vec(range, 0..30)
    }

    proptest! {
        #[test]
        fn lists_and_dense_sides_pair_byte_by_byte(list in ranges(), room in 1_usize..40, most in 1_u64..50_000) {
            let total = measure::<Ranges>(&list)?.bytes;
            let expected: Vec<(u64, u64)> = positions(&list).into_iter().zip(7..).collect();
            let walk = Walk::new(List::<Ranges>::new(&list), Dense(7), total);
            let items = all(walk, room, most);
            prop_assert!(items.iter().all(|item| item.2 <= PIECE));
            prop_assert_eq!(bytes(&items), expected);
        }

        #[test]
        fn two_lists_pair_byte_by_byte(from in ranges(), mut to in ranges(), room in 1_usize..40) {
            let total = measure::<Ranges>(&from)?.bytes;
            // Makes both equally long.
            let mut left = total as usize;
            for range in &mut to {
                range.len = range.len.min(left);
                left -= range.len;
            }
            to.push(Range { address: 5, len: left });
            let expected: Vec<(u64, u64)> = positions(&from).into_iter().zip(positions(&to)).collect();
            let sides = || (List::<Ranges>::new(&from), List::<Ranges>::new(&to));
            let walk = Walk::new(sides().0, sides().1, total);
            prop_assert_eq!(bytes(&all(walk, room, u64::MAX)), expected.clone());
            let mut walk = Walk::new(sides().0, sides().1, total);
            let runs: Vec<_> = std::iter::from_fn(|| walk.next_run()).collect();
            prop_assert!(runs.len() <= from.len() + to.len());
            prop_assert_eq!(bytes(&runs), expected);
        }

        #[test]
        fn the_ring_never_gives_what_is_in_use(
            steps in proptest::collection::vec((1_usize..40, 0_usize..40, any::<bool>()), 1..200),
        ) {
            let mut ring = Ring::new(64);
            // Start, end and position of what is in use, oldest first.
            let mut used = std::collections::VecDeque::<(usize, usize, u64)>::new();
            for (wanted, trimmed, frees) in steps {
                if frees && let Some((_, _, position)) = used.pop_front() {
                    ring.free(position);
                }
                let Some(start) = ring.reserve(wanted) else {
                    prop_assert!(!used.is_empty(), "an empty ring refused {wanted}");
                    continue;
                };
                let kept = wanted - trimmed.min(wanted - 1);
                ring.trim(wanted, kept);
                let end = start + kept.next_multiple_of(8);
                prop_assert!(start % 8 == 0 && end <= 64);
                prop_assert!(used.iter().all(|&(from, to, _)| end <= from || to <= start));
                used.push_back((start, end, ring.position()));
            }
        }
    }

    #[test]
    fn entries_have_two_sides() {
        let entries = [(1, 100, 5), (50, 7, 0), (9, 300, PIECE + 1)].map(|(from, to, len)| Entry {
            from,
            to,
            len,
        });
        let total = measure::<Sources>(&entries).unwrap().bytes;
        let (from, to) = (
            List::<Sources>::new(&entries),
            List::<Targets>::new(&entries),
        );
        let items = all(Walk::new(from, to, total), 10, u64::MAX);
        assert_eq!(
            items,
            [(1, 100, 5), (9, 300, PIECE), (9 + PIECE, 300 + PIECE, 1)]
        );
    }

    #[test]
    fn addresses_that_do_not_fit_an_item_are_refused() {
        for (address, len) in [
            (1 << 48, 1),
            ((1 << 48) - 1, 1),
            (usize::MAX, usize::MAX),
            (0, 1 << 48),
        ] {
            let list = [
                Range {
                    address: 4096,
                    len: 8,
                },
                Range { address, len },
            ];
            assert!(matches!(
                measure::<Ranges>(&list),
                Err(Error::BadAddress { .. })
            ));
        }
        let list = [Range {
            address: (1 << 48) - 9,
            len: 8,
        }];
        assert_eq!(measure::<Ranges>(&list), Ok(Measure { bytes: 8, count: 1 }));
    }
}
