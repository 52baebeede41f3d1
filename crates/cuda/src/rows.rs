//! Groups ranges that the copy engine moves by one call. Pure.
//!
//! One call of the engine copies a *grid*: rows of one length whose starts are equally far apart.
//! That is as fast as one long range, and takes no processors from the application, unlike the
//! kernel. The number of calls is what costs: many of them delay the application's own.

use crate::Range;

/// Minimum length of a row: with shorter ones the engine is slower than the kernel.
const LEAST_ROW: usize = 256;
/// Exclusive upper limit of the distance. The driver refuses a call whose rows are in several
/// allocations. Allocations of a cache are usually longer: the limit keeps its layers apart.
const DISTANCES: usize = 2 << 20;
/// Maximum distance as a multiple of the length. Rows that are so sparse were measured to be as fast
/// as dense ones; nothing is known of sparser ones.
const MOST_SPARSE: usize = 64;

/// Maximum calls that go to the copy engine regardless of length: that takes less time than the
/// kernel.
pub(crate) const MOST_CALLS: usize = 2;
/// Minimum average length of a call: the copy engine runs at full speed with it, and the driver is
/// free for the application's calls.
const LEAST_AVERAGE: usize = 256 << 10;

/// Ranges of one length whose starts are equally far apart; or one range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// The first range.
    pub first: Range,
    /// From the start of one range to that of the next; at least a range's length.
    pub distance: usize,
    /// The number of ranges.
    pub count: usize,
}

impl Rows {
    /// Returns the length of all ranges together.
    #[must_use]
    pub fn len(&self) -> usize {
        self.first.len * self.count
    }

    /// Returns whether there are no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the rows that end by `end`, at least the first, and the others, if any.
    fn split(self, end: usize) -> (Self, Option<Self>) {
        let further = end.saturating_sub(self.first.address + self.first.len) / self.distance;
        let count = self.count.min(1 + further);
        let address = self.first.address + count * self.distance;
        let rest = (count < self.count).then(|| Self {
            first: Range {
                address,
                ..self.first
            },
            count: self.count - count,
            ..self
        });
        (Self { count, ..self }, rest)
    }

    /// Adds a range if it is the next row.
    fn join(&mut self, range: Range) -> bool {
        let Range { address, len } = self.first;
        // Wrapping: ranges may be of another process, which can describe any.
        let last = address.wrapping_add((self.count - 1).wrapping_mul(self.distance));
        let distance = range.address.wrapping_sub(last);
        // Ranges that touch may be of two allocations, so they stay separate calls.
        let is_next = range.len == len
            && len < distance
            && match self.count {
                1 => {
                    // One call moves a long range at full speed, and is never refused.
                    (LEAST_ROW..LEAST_AVERAGE).contains(&len)
                        && distance < DISTANCES
                        && distance <= len * MOST_SPARSE
                }
                _ => distance == self.distance,
            };
        if is_next {
            self.distance = distance;
            self.count += 1;
        }
        is_next
    }
}

/// Groups consecutive ranges into as few rows as a single pass finds; drops empty ranges.
pub fn rows(ranges: impl IntoIterator<Item = Range>) -> impl Iterator<Item = Rows> {
    let mut ranges = ranges.into_iter().filter(|range| range.len > 0).peekable();
    std::iter::from_fn(move || {
        let first = ranges.next()?;
        let mut rows = Rows {
            first,
            distance: first.len,
            count: 1,
        };
        while ranges.next_if(|range| rows.join(*range)).is_some() {}
        Some(rows)
    })
}

/// Splits rows where an allocation ends. `end_of` returns the end of the allocation of an address,
/// or `None` if it is unknown: the row is returned alone.
pub(crate) fn parts(
    rows: Rows,
    mut end_of: impl FnMut(usize) -> Option<usize>,
) -> impl Iterator<Item = Rows> {
    let mut left = Some(rows);
    std::iter::from_fn(move || {
        let rows = left?;
        let (part, rest) = rows.split(end_of(rows.first.address).unwrap_or(0));
        left = rest;
        Some(part)
    })
}

/// Returns whether the copy engine moves these ranges to or from pinned memory better than the
/// kernel.
pub(crate) fn is_for_engine(ranges: &[Range]) -> bool {
    let lens = ranges.iter().map(|range| range.len as u64);
    // Wrapping: this is quicker, and lists that are so long are refused later.
    // A chunk that begins and ends within long runs has a part of each: one call more.
    let full = full_calls(lens.fold(0, u64::wrapping_add));
    let most = full.saturating_add(1).max(MOST_CALLS);
    // Long lists are seldom regular: this ends early then.
    ranges.len() <= most || rows(ranges.iter().copied()).take(most + 1).count() <= most
}

/// Returns how many calls of the copy engine for so many bytes are better than the kernel. Rounds up,
/// since chunks of whole blocks are a little shorter than they may be.
pub(crate) fn most_calls(bytes: u64) -> usize {
    full_calls(bytes).max(MOST_CALLS)
}

/// Returns the number of calls of average length for so many bytes, rounded up.
fn full_calls(bytes: u64) -> usize {
    usize::try_from(bytes.div_ceil(LEAST_AVERAGE as u64)).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn range(address: usize, len: usize) -> Range {
        Range { address, len }
    }

    fn at_distance(distance: usize, len: usize, count: usize) -> Vec<Range> {
        (0..count).map(|i| range(i * distance, len)).collect()
    }

    fn found(ranges: &[Range]) -> Vec<Rows> {
        rows(ranges.iter().copied()).collect()
    }

    #[test]
    fn equally_distant_ranges_are_one_call() {
        let list = at_distance(8192, 4096, 100);
        let all = Rows {
            first: list[0],
            distance: 8192,
            count: 100,
        };
        assert_eq!(found(&list), [all]);
        assert_eq!((all.len(), all.is_empty()), (100 * 4096, false));
        // One range is off: its row, and what follows, are other calls.
        let mut list = list;
        list[50].address += 16;
        assert_eq!(found(&list).len(), 3);
        list[50].address -= 16;
        list[50].len -= 1;
        assert_eq!(found(&list).len(), 3);
    }

    #[test]
    fn ranges_that_no_call_joins_stay_alone() {
        for list in [
            // Adjacent, descending, overlapping, the same, short, long, too far apart.
            vec![range(0, 4096), range(4096, 4096)],
            vec![range(8192, 4096), range(0, 4096)],
            vec![range(0, 4096), range(4000, 4096)],
            vec![range(0, 4096), range(0, 4096)],
            vec![range(0, LEAST_ROW - 1), range(8192, LEAST_ROW - 1)],
            vec![range(0, LEAST_AVERAGE), range(1 << 20, LEAST_AVERAGE)],
            vec![range(0, 4096), range(DISTANCES, 4096)],
        ] {
            let alone = |range: &Range| Rows {
                first: *range,
                distance: range.len,
                count: 1,
            };
            assert_eq!(found(&list), list.iter().map(alone).collect::<Vec<_>>());
        }
        let len = DISTANCES / MOST_SPARSE;
        let far = |len, distance| found(&[range(0, len), range(distance, len)]).len();
        assert_eq!((far(len, DISTANCES - 1), far(len, DISTANCES)), (1, 2));
        let sparse = LEAST_ROW * MOST_SPARSE;
        assert_eq!((far(LEAST_ROW, sparse), far(LEAST_ROW, sparse + 1)), (1, 2));
    }

    #[test]
    fn engine_gets_few_or_long_calls() {
        // Two ranges of any length; 128 of 2 MiB at one distance; eight runs of so many bytes.
        assert!(is_for_engine(&[range(0, 1), range(100, 7)]));
        assert!(!is_for_engine(&[range(0, 1), range(100, 7), range(200, 9)]));
        assert!(is_for_engine(&at_distance(1 << 15, 1 << 14, 128)));
        let runs = |runs: usize| -> Vec<Range> {
            let start = |i: usize| (i / (128 / runs)) * 100 + i * (1 << 15);
            (0..128).map(|i| range(start(i), 1 << 14)).collect()
        };
        assert!(is_for_engine(&runs(8)));
        // The same, from the middle of a run to the middle of another: a part of each, and seven.
        let cut: Vec<_> = (8..136)
            .map(|i| range(i / 16 * 100 + i * (1 << 15), 1 << 14))
            .collect();
        assert_eq!(found(&cut).len(), 9);
        assert!(is_for_engine(&cut));
        assert!(!is_for_engine(&runs(16)));
        assert!(is_for_engine(&at_distance(512, 256, 8192)));
        assert!(!is_for_engine(&at_distance(400, 200, 8192)));
        assert!(is_for_engine(&at_distance(1 << 20, 256 << 10, 9)));
        // Eight chunks of a little less than 256 KiB, of blocks of 16 tokens.
        let block = |i: usize| range(i / 14 * (1 << 20) + i * 2 * 18_432, 18_432);
        let chunks = |chunks: usize| (0..14 * chunks).map(block).collect::<Vec<_>>();
        assert_eq!(found(&chunks(8)).len(), 8);
        assert!(is_for_engine(&chunks(3)) && is_for_engine(&chunks(8)));
    }

    #[test]
    fn rows_are_split_where_allocations_end() {
        let rows = found(&at_distance(8192, 4096, 100))[0];
        let counts = |rows, end_of: &dyn Fn(usize) -> Option<usize>| -> Vec<usize> {
            let found: Vec<_> = parts(rows, end_of).collect();
            let mut at = 0;
            for part in &found {
                assert_eq!(part.first, range(at * 8192, 4096));
                assert_eq!(part.distance, 8192);
                at += part.count;
            }
            assert_eq!(at, 100);
            found.iter().map(|part| part.count).collect()
        };
        assert_eq!(counts(rows, &|_| Some(usize::MAX)), [100]);
        // The end of a row, or of the gap behind it.
        for end in [9 * 8192 + 4096, 10 * 8192] {
            assert_eq!(
                counts(rows, &|at| Some(if at < end { end } else { 1 << 30 })),
                [10, 90]
            );
        }
        let of_four = |at: usize| Some((at / 8192 / 4 + 1) * 4 * 8192);
        assert_eq!(counts(rows, &of_four), [4; 25]);
        // An unknown end, and one in the middle of the row.
        assert_eq!(counts(rows, &|_| None), [1; 100]);
        assert_eq!(counts(rows, &|at| Some(at + 100)), [1; 100]);
    }

    #[test]
    fn addresses_may_be_nonsense() {
        let list = [usize::MAX - 8192, usize::MAX - 100, 8000].map(|at| range(at, 4096));
        assert_eq!(found(&list).iter().map(|rows| rows.count).sum::<usize>(), 3);
    }

    proptest! {
        #[test]
        fn every_range_is_in_one_call_in_order(
            steps in prop::collection::vec((0..5_usize, 0..4_usize), 0..80),
        ) {
            let mut at = 1 << 30;
            let lens = [0, 1000, 4096, 8192];
            let list: Vec<_> = steps
                .into_iter()
                .map(|(gap, len)| {
                    at = at + gap * 4096 - 4096;
                    let range = range(at, lens[len]);
                    at += lens[len];
                    range
                })
                .collect();
            let back = found(&list).into_iter().flat_map(|rows| {
                (0..rows.count).map(move |i| {
                    range(rows.first.address + i * rows.distance, rows.first.len)
                })
            });
            let given = list.iter().copied().filter(|range| range.len > 0);
            prop_assert_eq!(back.collect::<Vec<_>>(), given.collect::<Vec<_>>());
        }
    }
}
