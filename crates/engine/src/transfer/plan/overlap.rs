//! The peer's memory that a plan concerns. Pure.

use std::ops::Range;

use super::Plan;

/// Ranges of the peer's memory, sorted and disjoint.
#[derive(Debug)]
pub(crate) struct Ranges(Vec<Range<u64>>);

impl Ranges {
    /// Returns whether any byte belongs to both.
    pub(crate) fn overlap(&self, other: &Self) -> bool {
        let (few, many) = match self.0.len() <= other.0.len() {
            true => (&self.0, &other.0),
            false => (&other.0, &self.0),
        };
        few.iter().any(|range| {
            // Only the first range that ends behind its start can meet it, or a later one.
            let at = many.partition_point(|other| other.end <= range.start);
            many.get(at).is_some_and(|other| other.start < range.end)
        })
    }
}

impl Plan {
    /// Returns the ranges of the peer's memory, computed once. Keys do not matter: one range of
    /// memory may have several.
    pub(crate) fn remote_ranges(&self) -> &Ranges {
        self.remote.get_or_init(|| self.find_remote_ranges())
    }

    /// Returns whether the ranges were computed.
    pub(crate) fn knows_remote_ranges(&self) -> bool {
        self.remote.get().is_some()
    }

    fn find_remote_ranges(&self) -> Ranges {
        let mut ranges: Vec<Range<u64>> = Vec::new();
        for chunk in &self.chunks {
            let table = self.read_table(chunk).expect("a table of its own");
            // The end cannot overflow: the region of the entry contains it.
            let each = table.entries();
            ranges.extend(each.map(|e| e.address..e.address + u64::from(e.len)));
        }
        ranges.sort_unstable_by_key(|range| (range.start, range.end));
        ranges.dedup_by(|next, last| {
            let joins = next.start <= last.end;
            if joins {
                last.end = last.end.max(next.end);
            }
            joins
        });
        ranges.shrink_to_fit();
        Ranges(ranges)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::Plan;
    use crate::transfer::plan::tests::{piece, plan};

    proptest! {
        #[test]
        fn plans_overlap_if_they_have_a_byte_in_common(
            lists in prop::array::uniform2(
                prop::collection::vec((0..200_u64, 0..9_usize, 1..3_u8), 0..12)),
        ) {
            let plans = lists.each_ref().map(|list| {
                let each = list.iter().enumerate();
                let each = each.map(|(i, &(at, len, key))| piece(4096 + i * 64, at, len, key));
                plan(&each.collect::<Vec<_>>(), 16, 1)
            });
            let bytes = lists.map(|list| {
                let bytes = list.iter().flat_map(|&(at, len, _)| at..at + len as u64);
                bytes.collect::<HashSet<_>>()
            });
            let expected = !bytes[0].is_disjoint(&bytes[1]);
            let [a, b] = plans.each_ref().map(Plan::remote_ranges);
            prop_assert_eq!(a.overlap(b), expected);
            prop_assert_eq!(b.overlap(a), expected);
        }
    }
}
