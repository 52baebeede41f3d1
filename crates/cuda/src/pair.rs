//! Lays out lists of equally long ranges as pairs, which are half as long as items. Pure.

use crate::side::{ADDRESS_BITS, BLOCK, Side};
use crate::table::{CUT, Filled, with_wide_vectors};

/// Pairs count in steps of this many bytes.
const STEP: u32 = 16;
/// Places of one side lie within half of this from its first, in either direction: 32 GiB.
const REACH: u64 = (STEP as u64) << 32;

/// One range to copy of a list whose ranges are [`Alike`]: half as long as an item. Writing these
/// entries is most of the cost of laying out.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Pair(u64);

impl Pair {
    /// Creates a pair from distances in bytes to the first range, wrapped, that are multiples of
    /// [`STEP`] within [`REACH`].
    #[inline]
    fn new(from: u64, to: u64) -> Self {
        let shift = STEP.trailing_zeros();
        Self((from >> shift) & 0xffff_ffff | (to >> shift) << 32)
    }

    #[cfg(test)]
    pub(crate) fn parts(self) -> (i64, i64) {
        let distance = |half: u64| i64::from(half as u32 as i32) * i64::from(STEP);
        (distance(self.0), distance(self.0 >> 32))
    }
}

/// The common properties of a list of pairs, and its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Alike {
    /// The source of the first range: the others lie a multiple of 16 bytes before or after it.
    pub(crate) from: u64,
    /// The target of the first range.
    pub(crate) to: u64,
    /// The length of each range.
    pub(crate) len: u64,
}

/// Lays out one pair for each place, which works for most lists. Returns `None`, and leaves `pairs`
/// unspecified, if the places are not [`Alike`], too few, too long or too far apart.
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
        // A list that is not alike is mostly so from its beginning.
        if odd != 0 || far >= REACH || addresses >> ADDRESS_BITS != 0 {
            return None;
        }
        if at == last {
            break;
        }
        // The last block begins within the one before: the overlap is the same in both.
        at = (at + BLOCK).min(last);
    }
    let filled = Filled {
        items: count,
        bytes: count as u64 * all.len,
        longest: all.len,
    };
    Some((filled, all))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::Range;
    use crate::side::{Dense, List, Ranges};

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

            // One place that differs from the others, at any position.
            if let Some(place) = from.get_mut(spoilt) {
                match spoilt % 3 {
                    0 => place.len += 1,
                    1 => place.address += 1,
                    _ => place.address += REACH as usize,
                }
                prop_assert_eq!(sides(&from), None);
            }
        }
    }

    #[test]
    fn addresses_that_do_not_fit_an_item_are_not_paired() {
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
        // Close to the others, but across address zero.
        list[5].address = 0_usize.wrapping_sub(1 << 20);
        assert!(paired(&List::<Ranges>::new(&list), &Dense(0), BLOCK).is_none());
        list.iter_mut().for_each(|range| range.address = 1 << 48);
        assert!(paired(&List::<Ranges>::new(&list), &Dense(0), BLOCK).is_none());
    }
}
