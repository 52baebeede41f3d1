//! Pure: how lists of ranges become work for the kernel.

use crate::error::Error;
use crate::{Entry, Range};

/// Longer ranges are cut, so that one of them among many short ones does not make the grid of a launch,
/// which is as high as its longest item, mostly empty.
pub(crate) const CUT: u64 = 32 << 10;

/// The source's address has this many bits; the length has the rest.
const ADDRESS_BITS: u32 = 48;

/// One range to copy, as `kernels/copy.cu` reads it: one 16-byte load.
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

/// Pairs count in steps of this many bytes.
const STEP: u32 = 16;
/// A side's places are within half of this of its first, in either direction: 32 GiB.
const REACH: u64 = (STEP as u64) << 32;

/// One range to copy of a list whose ranges are [`Alike`]: half as long as an item, and writing it is what
/// laying out costs.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Pair(u64);

impl Pair {
    /// Takes distances in bytes from the first range, wrapped, that are multiples of [`STEP`] within
    /// [`REACH`].
    #[inline]
    fn new(from: u64, to: u64) -> Self {
        let shift = STEP.trailing_zeros();
        Self((from >> shift) & 0xffff_ffff | (to >> shift) << 32)
    }

    #[cfg(test)]
    fn parts(self) -> (i64, i64) {
        let distance = |half: u64| i64::from(half as u32 as i32) * i64::from(STEP);
        (distance(self.0), distance(self.0 >> 32))
    }
}

/// What was laid out in a table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Filled {
    /// How many items.
    pub(crate) items: usize,
    /// How many bytes they copy.
    pub(crate) bytes: u64,
    /// No item is longer.
    pub(crate) longest: u64,
}

/// What the ranges of a list of pairs have in common, and where they start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Alike {
    /// Where the first comes from: the others lie a multiple of 16 bytes before or after it.
    pub(crate) from: u64,
    /// Likewise, where it goes to.
    pub(crate) to: u64,
    /// How long each is.
    pub(crate) len: u64,
}

/// Which side of a list's elements is meant.
pub(crate) trait View {
    type Of: 'static;
    /// Whether places are worth an attempt at pairs.
    const CAN_PAIR: bool = true;
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
    /// Reading an entry costs more than writing half an item less.
    const CAN_PAIR: bool = false;
    #[inline]
    fn start(of: &Entry) -> u64 {
        u64::from(of.from)
    }
    #[inline]
    fn len(of: &Entry) -> u64 {
        u64::from(of.len)
    }
}

impl View for Targets {
    type Of = Entry;
    /// Reading an entry costs more than writing half an item less.
    const CAN_PAIR: bool = false;
    #[inline]
    fn start(of: &Entry) -> u64 {
        of.to
    }
    #[inline]
    fn len(of: &Entry) -> u64 {
        u64::from(of.len)
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
            // The highest bit of all is the highest bit of any. An end that wraps has a high start or
            // length.
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
    /// Whether [`pair_up`] is worth an attempt.
    const CAN_PAIR: bool;

    /// Where the next bytes are, and how many lie there together.
    fn next(&self) -> (u64, u64);
    /// Goes on by at most as many bytes as lie together.
    fn advance(&mut self, bytes: u64);
    /// An upper bound of the places left.
    fn places(&self) -> usize;

    /// How many places lie ahead whole.
    fn whole(&self) -> usize;
    /// The start and length of each of the next `count` of these. A dense side gives where it is.
    fn ahead(&self, count: usize) -> impl Iterator<Item = (u64, u64)>;

    /// Some of these, [`BLOCK`] together.
    type Block: Copy;
    /// The block that begins with place `first`. A dense side has places of `len`.
    fn block(&self, first: usize, len: u64) -> Self::Block;
    /// The start and length of one place of a block.
    fn of_block(block: Self::Block, i: usize) -> (u64, u64);
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
        let mut side = Self {
            rest: list,
            offset: 0,
        };
        side.skip(0, 0);
        side
    }
}

impl<'a, V: View> Side for List<'a, V> {
    const IS_DENSE: bool = false;
    const CAN_PAIR: bool = V::CAN_PAIR;

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
        if self
            .rest
            .first()
            .is_none_or(|place| V::len(place) == self.offset)
        {
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
    fn ahead(&self, count: usize) -> impl Iterator<Item = (u64, u64)> {
        let places = self.rest[..count].iter();
        places.map(|place| (V::start(place), V::len(place)))
    }

    type Block = &'a [V::Of; BLOCK];

    #[inline(always)]
    fn block(&self, first: usize, _: u64) -> Self::Block {
        let (block, _) = self.rest[first..]
            .split_first_chunk()
            .expect("asked for places that lie ahead whole");
        block
    }

    #[inline(always)]
    fn of_block(block: Self::Block, i: usize) -> (u64, u64) {
        (V::start(&block[i]), V::len(&block[i]))
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
    const CAN_PAIR: bool = true;

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
    fn ahead(&self, _: usize) -> impl Iterator<Item = (u64, u64)> {
        std::iter::repeat((self.0, u64::MAX))
    }

    /// Where it begins, and how long each place is.
    type Block = (u64, u64);

    #[inline(always)]
    fn block(&self, first: usize, len: u64) -> Self::Block {
        (self.0.wrapping_add((first as u64).wrapping_mul(len)), len)
    }

    #[inline(always)]
    fn of_block((start, len): Self::Block, i: usize) -> (u64, u64) {
        (start.wrapping_add((i as u64).wrapping_mul(len)), len)
    }

    #[inline]
    fn skip(&mut self, _: usize, bytes: u64) {
        self.0 += bytes;
    }
}

/// Lays out one item for each place, as nearly every list allows: without looking at any twice, and
/// without a branch. None if some place does not allow it (it is too long, differs in length from its
/// counterpart, or has an address that does not fit): then `items` is of no use.
pub(crate) fn pack<F: Side, T: Side>(from: &F, to: &T, items: &mut [Item]) -> Option<Filled> {
    with_wide_vectors(
        #[inline(always)]
        || pack_items(from, to, items),
    )
}

/// Lays out one pair for each place, as most lists allow. None if they are not [`Alike`], too few, too long
/// or too far apart: then `pairs` is of no use.
pub(crate) fn pair_up<F: Side, T: Side>(
    from: &F,
    to: &T,
    pairs: &mut [Pair],
) -> Option<(Filled, Alike)> {
    with_wide_vectors(
        #[inline(always)]
        || pack_pairs(from, to, pairs),
    )
}

/// Runs `work`, once it is inlined here, with the widest vectors that the processor has: they halve the
/// time, which is most of what starting a long list costs.
fn with_wide_vectors<R>(work: impl FnOnce() -> R) -> R {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx512f")]
        fn avx512<R>(work: impl FnOnce() -> R) -> R {
            work()
        }
        #[target_feature(enable = "avx2")]
        fn avx2<R>(work: impl FnOnce() -> R) -> R {
            work()
        }
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the processor has what the function is compiled for.
            return unsafe { avx512(work) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: as above.
            return unsafe { avx2(work) };
        }
    }
    work()
}

#[inline(always)]
fn pack_items<F: Side, T: Side>(from: &F, to: &T, items: &mut [Item]) -> Option<Filled> {
    let count = items.len();
    if count > from.whole().min(to.whole()) {
        return None;
    }
    let (mut bytes, mut lengths, mut addresses, mut differing) = (0_u64, 0_u64, 0_u64, 0_u64);
    let places = from.ahead(count).zip(to.ahead(count));
    for (item, ((source, here), (target, there))) in items.iter_mut().zip(places) {
        let len = if F::IS_DENSE { there } else { here };
        let source = if F::IS_DENSE {
            source.wrapping_add(bytes)
        } else {
            source
        };
        let target = if T::IS_DENSE {
            target.wrapping_add(bytes)
        } else {
            target
        };
        if !F::IS_DENSE && !T::IS_DENSE {
            differing |= here ^ there;
        }
        // The highest bit of all is the highest bit of any.
        addresses |= source | target;
        lengths |= len;
        bytes = bytes.wrapping_add(len);
        *item = Item::new(source, target, len);
    }
    let fits = differing == 0 && lengths < 2 * CUT && addresses >> ADDRESS_BITS == 0;
    fits.then_some(Filled {
        items: count,
        bytes,
        longest: lengths,
    })
}

/// Places that are looked at together: a loop over as many as the compiler knows of is made of vectors only.
pub(crate) const BLOCK: usize = 64;

#[inline(always)]
fn pack_pairs<F: Side, T: Side>(from: &F, to: &T, pairs: &mut [Pair]) -> Option<(Filled, Alike)> {
    let count = pairs.len();
    let (mut at, last) = (0, count.checked_sub(BLOCK)?);
    if count > from.whole().min(to.whole()) {
        return None;
    }
    let ((source, here), (target, there)) = (from.next(), to.next());
    let all = Alike {
        from: source,
        to: target,
        len: here.min(there),
    };
    if all.len >= 2 * CUT {
        return None;
    }
    loop {
        let (sources, targets) = (from.block(at, all.len), to.block(at, all.len));
        let block: &mut [Pair; BLOCK] = (&mut pairs[at..at + BLOCK])
            .try_into()
            .expect("as long as a block");
        let (mut odd, mut far, mut addresses) = (0, 0, 0);
        for (i, pair) in block.iter_mut().enumerate() {
            let ((source, here), (target, there)) =
                (F::of_block(sources, i), T::of_block(targets, i));
            addresses |= source | target;
            let (source, target) = (source.wrapping_sub(all.from), target.wrapping_sub(all.to));
            odd |= (here ^ all.len) | (there ^ all.len) | (source | target) & u64::from(STEP - 1);
            far |= source.wrapping_add(REACH / 2) | target.wrapping_add(REACH / 2);
            *pair = Pair::new(source, target);
        }
        // A list that is not alike mostly is not from its beginning.
        if odd != 0 || far >= REACH || addresses >> ADDRESS_BITS != 0 {
            return None;
        }
        if at == last {
            break;
        }
        // The last block begins within the one before it: what both have is the same.
        at = (at + BLOCK).min(last);
    }
    let filled = Filled {
        items: count,
        bytes: count as u64 * all.len,
        longest: all.len,
    };
    Some((filled, all))
}

/// Both sides of a copy, with what is left of it.
pub(crate) struct Walk<F, T> {
    from: F,
    to: T,
    left: u64,
}

impl<F: Side, T: Side> Walk<F, T> {
    /// `bytes` is the total of the side (or sides) that is a list; both were measured.
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
        let runs = self.from.places() + self.to.places();
        runs.saturating_add(usize::try_from(self.left / CUT).unwrap_or(usize::MAX))
    }

    /// Fills `items` with the next work.
    pub(crate) fn fill(&mut self, items: &mut [Item]) -> Filled {
        let whole = self.from.whole().min(self.to.whole()).min(items.len());
        if whole > 0
            && let Some(filled) = pack(&self.from, &self.to, &mut items[..whole])
        {
            self.from.skip(whole, filled.bytes);
            self.to.skip(whole, filled.bytes);
            self.left -= filled.bytes;
            return filled;
        }
        let mut filled = Filled::default();
        for item in items {
            let Some((from, to, len)) = self.next_run(CUT) else {
                break;
            };
            *item = Item::new(from, to, len);
            filled.items += 1;
            filled.bytes += len;
            filled.longest = filled.longest.max(len);
        }
        filled
    }

    /// The next bytes, of at most `most`, that lie together on both sides.
    pub(crate) fn next_run(&mut self, most: u64) -> Option<(u64, u64, u64)> {
        if self.left == 0 {
            return None;
        }
        let ((from, here), (to, there)) = (self.from.next(), self.to.next());
        let len = here.min(there).min(self.left).min(most);
        self.from.advance(len);
        self.to.advance(len);
        self.left -= len;
        Some((from, to, len))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Items as (from, to, len), with what was left over after the last call.
    fn all<F: Side, T: Side>(mut walk: Walk<F, T>, room: usize) -> Vec<(u64, u64, u64)> {
        let mut found = Vec::new();
        let mut items = vec![Item::default(); room];
        while walk.left() > 0 {
            let bound = walk.most_items();
            let before = walk.left();
            let filled = walk.fill(&mut items);
            assert!(
                filled.items <= bound,
                "{filled:?}, at most {bound} were announced"
            );
            assert!(filled.bytes > 0 && before - filled.bytes == walk.left());
            let parts: Vec<_> = items[..filled.items]
                .iter()
                .map(|item| item.parts())
                .collect();
            assert!(parts.iter().all(|part| part.2 <= filled.longest));
            found.extend(parts);
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
        let len = prop_oneof![20 => 0_usize..70, 1 => 0_usize..100_000, 1 => Just(CUT as usize)];
        let range = (0_usize..1 << 40, len).prop_map(|(address, len)| Range { address, len });
        proptest::collection::vec(range, 0..30)
    }

    /// Pairs as (from, to, len).
    fn paired<F: Side, T: Side>(from: &F, to: &T, count: usize) -> Option<Vec<(u64, u64, u64)>> {
        let mut pairs = vec![Pair::default(); count];
        let (filled, alike) = pair_up(from, to, &mut pairs)?;
        assert_eq!(filled.items, count);
        assert_eq!(filled.bytes, count as u64 * alike.len);
        assert_eq!(filled.longest, alike.len);
        let range = |pair: &Pair| {
            let (from, to) = pair.parts();
            (
                alike.from.wrapping_add_signed(from),
                alike.to.wrapping_add_signed(to),
                alike.len,
            )
        };
        Some(pairs.iter().map(range).collect())
    }

    /// Places of one length, some multiple of 16 bytes apart, within 32 GiB of each other.
    fn places_alike(len: usize) -> impl Strategy<Value = Vec<Range>> {
        let far = 1_usize << 31;
        let steps = proptest::collection::vec(0..far, 200);
        (0_usize..1 << 40, steps).prop_map(move |(first, steps)| {
            let place = |step: usize| Range {
                address: first + step * STEP as usize,
                len,
            };
            steps.into_iter().map(place).collect()
        })
    }

    proptest! {
        #[test]
        fn places_that_are_alike_are_paired(
            (len, from, to) in (1_u64..2 * CUT).prop_flat_map(|len| {
                (Just(len), places_alike(len as usize), places_alike(len as usize))
            }),
            count in BLOCK..=200,
            spoilt in 0..400_usize,
        ) {
            let (mut from, to) = (from[..count].to_vec(), &to[..count]);
            let expected = |from: &[Range]| -> Vec<_> {
                let pairs = from.iter().zip(to);
                pairs.map(|(from, to)| (from.address as u64, to.address as u64, len)).collect()
            };
            let sides = |from: &[Range]| {
                paired(&List::<Ranges>::new(from), &List::<Ranges>::new(to), count)
            };
            prop_assert_eq!(sides(&from), Some(expected(&from)));

            // A dense side is alike only if its places begin a multiple of 16 bytes apart.
            let gathered = paired(&List::<Ranges>::new(&from), &Dense(11), count);
            let scattered = paired(&Dense(11), &List::<Ranges>::new(to), count);
            if len % u64::from(STEP) == 0 {
                let dense = |i: usize| 11 + i as u64 * len;
                let list: Vec<_> = (0..count).map(|i| (from[i].address as u64, dense(i), len)).collect();
                prop_assert_eq!(gathered, Some(list));
                let list: Vec<_> = (0..count).map(|i| (dense(i), to[i].address as u64, len)).collect();
                prop_assert_eq!(scattered, Some(list));
            } else {
                prop_assert_eq!((gathered, scattered), (None, None));
            }

            // One place that is not like the others, wherever it is.
            if let Some(place) = from.get_mut(spoilt) {
                match spoilt % 3 {
                    0 => place.len += 1,
                    1 => place.address += 1,
                    _ => place.address += REACH as usize,
                }
                prop_assert_eq!(sides(&from), None);
            }
        }

        #[test]
        fn lists_and_dense_sides_pair_byte_by_byte(list in ranges(), room in 1_usize..40) {
            let total = measure::<Ranges>(&list)?.bytes;
            let expected: Vec<(u64, u64)> = positions(&list).into_iter().zip(7..).collect();
            let walk = Walk::new(List::<Ranges>::new(&list), Dense(7), total);
            let items = all(walk, room);
            prop_assert!(items.iter().all(|item| item.2 < 2 * CUT));
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
            prop_assert_eq!(bytes(&all(walk, room)), expected.clone());
            let mut walk = Walk::new(sides().0, sides().1, total);
            let runs: Vec<_> = std::iter::from_fn(|| walk.next_run(u64::MAX)).collect();
            prop_assert!(runs.len() <= from.len() + to.len());
            prop_assert_eq!(bytes(&runs), expected);
        }
    }

    #[test]
    fn entries_have_two_sides() {
        let entries = [(1, 100, 5), (50, 7, 0), (9, 300, 2 * CUT as u32 + 1)]
            .map(|(from, to, len)| Entry { from, to, len });
        let total = measure::<Sources>(&entries).unwrap().bytes;
        let (from, to) = (
            List::<Sources>::new(&entries),
            List::<Targets>::new(&entries),
        );
        let items = all(Walk::new(from, to, total), 10);
        assert_eq!(
            items,
            [
                (1, 100, 5),
                (9, 300, CUT),
                (9 + CUT, 300 + CUT, CUT),
                (9 + 2 * CUT, 300 + 2 * CUT, 1)
            ]
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
        let mut list = vec![
            Range {
                address: 1 << 20,
                len: 8
            };
            BLOCK
        ];
        assert!(paired(&List::<Ranges>::new(&list), &Dense(0), BLOCK).is_none());
        list.iter_mut().for_each(|range| range.len = 16);
        assert!(paired(&List::<Ranges>::new(&list), &Dense(0), BLOCK).is_some());
        assert!(paired(&List::<Ranges>::new(&list), &Dense(1 << 48), BLOCK).is_none());
        // Close to the others, but on the far side of zero.
        list[5].address = 0_usize.wrapping_sub(1 << 20);
        assert!(paired(&List::<Ranges>::new(&list), &Dense(0), BLOCK).is_none());
        list.iter_mut().for_each(|range| range.address = 1 << 48);
        assert!(paired(&List::<Ranges>::new(&list), &Dense(0), BLOCK).is_none());

        let list = [Range {
            address: (1 << 48) - 9,
            len: 8,
        }];
        assert_eq!(measure::<Ranges>(&list), Ok(Measure { bytes: 8, count: 1 }));
    }
}
