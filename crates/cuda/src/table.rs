//! Lays out lists of ranges as items, the work of the kernel. Pure.

use crate::side::{ADDRESS_BITS, Side};

/// Maximum length of an item. Longer ranges are cut: the grid of a launch is as high as its longest
/// item, and one long range among many short ones would leave it mostly empty.
pub(crate) const CUT: u64 = 32 << 10;

/// One range to copy, as `kernels/copy.cu` reads it: one 16-byte load.
#[repr(C, align(16))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Item {
    /// The source, in the low 48 bits; the length, in the high 16.
    from_and_len: u64,
    /// The target.
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
    pub(crate) fn parts(self) -> (u64, u64, u64) {
        let mask = (1 << ADDRESS_BITS) - 1;
        (
            self.from_and_len & mask,
            self.to,
            self.from_and_len >> ADDRESS_BITS,
        )
    }
}

/// The result of laying out a table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Filled {
    /// Number of items.
    pub(crate) items: usize,
    /// Number of bytes they copy.
    pub(crate) bytes: u64,
    /// Upper bound of the length of an item.
    pub(crate) longest: u64,
}

/// Lays out one item for each place, which works for nearly every list: in one pass and without a
/// branch. Returns `None`, and leaves `items` unspecified, if a place does not allow it (it is too
/// long, differs in length from its counterpart, or has an address that does not fit).
pub(crate) fn pack<F: Side, T: Side>(from: &F, to: &T, items: &mut [Item]) -> Option<Filled> {
    with_wide_vectors(
        #[inline(always)]
        || pack_items(from, to, items),
    )
}

/// Runs `work`, inlined here, with the widest vectors of the processor: they halve the time, which
/// is most of the cost of starting a long list.
pub(crate) fn with_wide_vectors<R>(work: impl FnOnce() -> R) -> R {
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
            // SAFETY: the processor supports the features that the function is compiled for.
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

/// Both sides of a copy, with their progress.
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

    /// Returns the bytes left.
    pub(crate) fn left(&self) -> u64 {
        self.left
    }

    /// Returns an upper bound of the items left.
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

    /// Returns the next bytes, at most `most`, that are contiguous on both sides.
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
    use crate::error::Error;
    use crate::side::{Dense, List, Measure, Ranges, Sources, Targets, measure};
    use crate::{Entry, Range};

    /// Returns items as (from, to, len), including those left over after the last call.
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

    /// Lists where each byte comes from and goes to.
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

    proptest! {
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
            // Makes both lists equally long.
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
        let list = [Range {
            address: (1 << 48) - 9,
            len: 8,
        }];
        assert_eq!(measure::<Ranges>(&list), Ok(Measure { bytes: 8, count: 1 }));
    }
}
