//! Lists of copies, laid out once and started many times.

use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::Range;
use crate::context::Context;
use crate::error::Error;
use crate::launch::{Bases, Form, INLINE_ITEMS, Inline, Launch, room_of_pairs};
use crate::pair::{Pair, pair_up};
use crate::pinned::Pinned;
use crate::rows::most_calls;
use crate::side::{Dense, List, Ranges, Side, measure};
use crate::table::{Filled, Item, Walk, pack};

/// A list of copies within a device, or between its memory and memory that is mapped there, made by
/// [`crate::Device::prepare`] for [`crate::Queue::run`].
///
/// Starting it costs one kernel launch, or one call for each of few long ranges: no work per piece.
/// It may be started any number of times, by several queues of its device at once. Dropping it
/// while it runs is allowed.
pub struct Prepared {
    bytes: u64,
    pub(crate) work: Work,
}

pub(crate) enum Work {
    /// For devices without anything to prepare.
    Lists(Vec<Range>, Vec<Range>),
    Cuda(Arc<Context>, Way),
}

/// The way a context's queue runs the list.
pub(crate) enum Way {
    /// By the copy engine: from, to, length.
    Engine(Vec<(u64, u64, u64)>),
    Inline(Launch, Box<Inline>),
    Table(Launch, Arc<Table>),
}

impl Prepared {
    /// Returns the number of bytes it copies.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Keeps the lists unchanged.
    pub(crate) fn lists(from: &[Range], to: &[Range]) -> Result<Self, Error> {
        Ok(Self {
            bytes: total(from, to)?,
            work: Work::Lists(from.to_vec(), to.to_vec()),
        })
    }
}

impl fmt::Debug for Prepared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Prepared")
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}

/// Returns the total length of two lists; fails if they differ.
fn total(from: &[Range], to: &[Range]) -> Result<u64, Error> {
    let (from, to) = (measure::<Ranges>(from)?.bytes, measure::<Ranges>(to)?.bytes);
    match from == to {
        true => Ok(from),
        false => Err(Error::Lengths { from, to }),
    }
}

/// Lays lists out for the queues of a context.
pub(crate) fn on(context: &Arc<Context>, from: &[Range], to: &[Range]) -> Result<Prepared, Error> {
    let bytes = total(from, to)?;
    let way = if from.len().max(to.len()) <= most_calls(bytes) {
        let (from, to) = (List::<Ranges>::new(from), List::<Ranges>::new(to));
        let mut walk = Walk::new(from, to, bytes);
        Way::Engine(std::iter::from_fn(|| walk.next_run(u64::MAX)).collect())
    } else {
        let (items, filled, form) = lay_out(from, to, bytes);
        let launch = Launch::new(filled, &form, Bases::NONE);
        if items.len() <= INLINE_ITEMS {
            let mut inline = Inline::new();
            inline.0[..items.len()].copy_from_slice(&items);
            Way::Inline(launch, inline)
        } else {
            Way::Table(launch, Arc::new(Table::new(context.tables(), &items)?))
        }
    };
    Ok(Prepared {
        bytes,
        work: Work::Cuda(Arc::clone(context), way),
    })
}

/// Lays lists of equal total length out. If one side is contiguous, only the other has to be walked.
fn lay_out(from: &[Range], to: &[Range], bytes: u64) -> (Vec<Item>, Filled, Form) {
    let dense = |range: &Range| Dense(range.address as u64);
    let (sources, targets) = (List::<Ranges>::new(from), List::<Ranges>::new(to));
    match (from, to) {
        (_, [to]) => lay_out_sides(sources, dense(to), bytes),
        ([from], _) => lay_out_sides(dense(from), targets, bytes),
        _ => lay_out_sides(sources, targets, bytes),
    }
}

/// Lays sides out as pairs if they are alike, else as items.
fn lay_out_sides<F: Side, T: Side>(from: F, to: T, bytes: u64) -> (Vec<Item>, Filled, Form) {
    let is_one_by_one = F::IS_DENSE || T::IS_DENSE || from.places() == to.places();
    if is_one_by_one {
        let count = from.places().max(to.places());
        let mut items = vec![Item::default(); room_of_pairs(count)];
        // SAFETY: the items' memory is as long, aligned at least as strictly, and any bytes are
        // valid for both.
        let pairs: &mut [Pair] =
            unsafe { std::slice::from_raw_parts_mut(items.as_mut_ptr().cast(), count) };
        if let Some((filled, alike)) = pair_up(&from, &to, pairs) {
            return (items, filled, Form::Pairs(alike));
        }
        items.resize(count, Item::default());
        if let Some(filled) = pack(&from, &to, &mut items) {
            return (items, filled, Form::Items);
        }
    }
    let mut walk = Walk::new(from, to, bytes);
    let mut items = vec![Item::default(); walk.most_items()];
    // There is room for everything, so that one call is enough.
    let filled = walk.fill(&mut items);
    debug_assert_eq!(walk.left(), 0);
    items.truncate(filled.items);
    (items, filled, Form::Items)
}

/// The smallest room for a table, in bytes.
const LEAST_ROOM: usize = 8 << 10;
/// The unit in which pinned memory is allocated; a larger table gets a larger part.
const PART: usize = 1 << 20;

/// Pinned memory for the tables of a context's prepared lists. Lists come and go, and pinning and
/// unpinning memory may delay the device: memory is kept for reuse, as long as there is a queue or
/// a prepared list.
pub(crate) struct Tables {
    context: Arc<Context>,
    free: Mutex<Vec<Room>>,
}

/// A part of pinned memory; its length is a power of two.
struct Room {
    memory: Arc<Pinned>,
    offset: usize,
    len: usize,
}

impl Tables {
    pub(crate) fn new(context: Arc<Context>) -> Self {
        Self {
            context,
            free: Mutex::new(Vec::new()),
        }
    }

    fn take(&self, bytes: usize) -> Result<Room, Error> {
        let len = bytes.next_power_of_two().max(LEAST_ROOM);
        let mut free = self.free.lock();
        if let Some(at) = free.iter().position(|room| room.len == len) {
            return Ok(free.swap_remove(at));
        }
        drop(free);
        let memory = Arc::new(Pinned::near(Arc::clone(&self.context), len.max(PART))?);
        let mut rooms = (0..memory.len()).step_by(len).map(|offset| Room {
            memory: Arc::clone(&memory),
            offset,
            len,
        });
        let first = rooms.next().expect("the memory has room for one");
        self.free.lock().extend(rooms);
        Ok(first)
    }
}

/// Items in pinned memory, which the kernel reads.
pub(crate) struct Table {
    /// Present until `drop`.
    room: Option<Room>,
    tables: Arc<Tables>,
}

impl Table {
    fn new(tables: Arc<Tables>, items: &[Item]) -> Result<Self, Error> {
        let room = tables.take(size_of_val(items))?;
        let table = Self {
            room: Some(room),
            tables,
        };
        // SAFETY: the room is as long, aligned at least as strictly, and used by nothing else: a
        // launch that reads it holds the table.
        unsafe {
            let to = table.address().cast_mut().cast::<Item>();
            std::ptr::copy_nonoverlapping(items.as_ptr(), to, items.len());
        }
        Ok(table)
    }

    pub(crate) fn address(&self) -> *const u8 {
        let room = self.room.as_ref().expect("it is there until the drop");
        room.memory.address().wrapping_add(room.offset)
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        self.tables.free.lock().extend(self.room.take());
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ranges() -> impl Strategy<Value = Vec<Range>> {
        let len = prop_oneof![20 => 0_usize..70, 1 => 0_usize..200_000];
        let alike = (0_usize..1 << 30).prop_map(|step| Range {
            address: step * 16,
            len: 64,
        });
        let any = (0_usize..1 << 40, len).prop_map(|(address, len)| Range { address, len });
        prop_oneof![
            proptest::collection::vec(alike, 60..90),
            proptest::collection::vec(any, 0..90)
        ]
    }

    fn positions(list: &[Range]) -> Vec<u64> {
        let each = |range: &Range| (range.address as u64)..(range.address + range.len) as u64;
        list.iter().flat_map(each).collect()
    }

    proptest! {
        #[test]
        fn every_byte_is_laid_out_once(
            from in ranges(),
            mut to in ranges(),
            is_dense: bool,
            is_turned: bool,
        ) {
            let bytes = measure::<Ranges>(&from)?.bytes;
            if is_dense {
                to.clear();
            }
            // Makes both lists equally long.
            let mut left = bytes as usize;
            to.retain_mut(|range| {
                range.len = range.len.min(left);
                left -= range.len;
                range.len > 0
            });
            if left > 0 {
                to.push(Range { address: 1 << 41, len: left });
            }
            let (from, to) = if is_turned { (to, from) } else { (from, to) };
            let (items, filled, form) = lay_out(&from, &to, bytes);
            prop_assert_eq!(items.len(), form.room(filled.items));
            prop_assert_eq!(filled.bytes, bytes);
            let runs: Vec<(u64, u64, u64)> = match form {
                Form::Items => items.iter().map(|item| item.parts()).collect(),
                Form::Pairs(alike) => {
                    // SAFETY: as in `lay_out`.
                    let pairs: &[Pair] = unsafe {
                        std::slice::from_raw_parts(items.as_ptr().cast(), filled.items)
                    };
                    let run = |pair: &Pair| {
                        let (from, to) = pair.parts();
                        let at = |start: u64, by| start.wrapping_add_signed(by);
                        (at(alike.from, from), at(alike.to, to), alike.len)
                    };
                    pairs.iter().map(run).collect()
                }
            };
            prop_assert!(runs.iter().all(|run| run.2 <= filled.longest));
            let found: Vec<_> = runs
                .iter()
                .flat_map(|&(from, to, len)| (0..len).map(move |i| (from + i, to + i)))
                .collect();
            let expected: Vec<_> = positions(&from).into_iter().zip(positions(&to)).collect();
            prop_assert_eq!(found, expected);
        }
    }

    /// Half as much for the device to read.
    #[test]
    fn blocks_of_a_contiguous_side_are_pairs() {
        let blocks: Vec<_> = (0..100)
            .map(|i| Range {
                address: (99 - i) * 8192,
                len: 4096,
            })
            .collect();
        let whole = [Range {
            address: 1 << 30,
            len: 100 * 4096,
        }];
        for (from, to) in [(&blocks[..], &whole[..]), (&whole[..], &blocks[..])] {
            let (_, filled, form) = lay_out(from, to, 100 * 4096);
            assert_eq!(filled.items, 100);
            assert!(matches!(form, Form::Pairs(_)));
        }
    }

    #[test]
    fn lists_of_different_lengths_are_refused() {
        let list = |len| [Range { address: 16, len }];
        let found = Prepared::lists(&list(4), &list(5)).unwrap_err();
        assert_eq!(found, Error::Lengths { from: 4, to: 5 });
    }
}
