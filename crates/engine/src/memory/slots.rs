//! Pinned host memory, divided into slots of one size.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tcpx_cuda::{Batches, Device, Pinned};
use tcpx_net::Span;

use crate::error::Error;
use crate::sync::{Mutex, Rank};
use crate::trace::{Kind, Record, Trace};

/// Slots pinned at once: pinning is slow, and large pieces get large pages.
const SLAB_SLOTS: usize = 8;

/// Use of a slot. Each direction has its own slots: if sending could take all of them, two sessions
/// that send to each other could both be unable to receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Out = 0,
    In = 1,
}

/// The slots of a session. Memory is pinned on demand, up to a limit, and kept.
pub(crate) struct Pool {
    slot_bytes: usize,
    /// Slots that each direction may use, by direction.
    limits: [usize; 2],
    /// Counts waits for a slot.
    waits: AtomicU64,
    trace: Trace,
    state: Mutex<PoolState>,
}

struct PoolState {
    /// Batches of the devices that have registered memory.
    batches: Vec<Arc<Batches>>,
    /// Slots by the NUMA node of their memory.
    shelves: Vec<(Option<u32>, SlotList)>,
    // Slots in use by direction, at most `limits`.
    used: [usize; 2],
}

impl PoolState {
    /// Returns the shelf for a device's NUMA node.
    fn shelf(&mut self, device: &dyn Device, slot_bytes: usize) -> usize {
        let node = device.numa_node();
        let known = self.shelves.iter().position(|(at, _)| *at == node);
        known.unwrap_or_else(|| {
            self.shelves.push((node, SlotList::new(slot_bytes)));
            self.shelves.len() - 1
        })
    }

    /// Returns the number of slots, free and in use.
    fn len(&self) -> usize {
        self.shelves.iter().map(|(_, slots)| slots.len()).sum()
    }

    /// Takes a free slot, preferably from this shelf; returns the shelf and the slot's address.
    fn take(&mut self, shelf: usize) -> Option<(usize, usize)> {
        let others = (0..self.shelves.len()).filter(|other| *other != shelf);
        let mut shelves = [shelf].into_iter().chain(others);
        shelves.find_map(|shelf| Some((shelf, self.shelves[shelf].1.take()?)))
    }
}

/// Pinned memory divided into slots of one size, and the list of free slots.
pub(crate) struct SlotList {
    slot_bytes: usize,
    slabs: Vec<Pinned>,
    /// Addresses of free slots. The slot used last is reused first: it is still in the cache.
    free: Vec<usize>,
}

impl SlotList {
    pub(crate) fn new(slot_bytes: usize) -> Self {
        Self {
            slot_bytes,
            slabs: Vec::new(),
            free: Vec::new(),
        }
    }

    /// Adds memory, which is kept as long as the list.
    pub(crate) fn add(&mut self, slab: Pinned) {
        let base = slab.address() as usize;
        let slots = slab.len() / self.slot_bytes;
        let addresses = (0..slots).map(|index| base + index * self.slot_bytes);
        self.free.extend(addresses);
        self.slabs.push(slab);
    }

    /// Returns the number of slots, free and in use.
    fn len(&self) -> usize {
        let slots = |slab: &Pinned| slab.len() / self.slot_bytes;
        self.slabs.iter().map(slots).sum()
    }

    /// Takes a free slot and returns its address.
    pub(crate) fn take(&mut self) -> Option<usize> {
        self.free.pop()
    }

    /// Returns the slot at this address to the list.
    pub(crate) fn give(&mut self, address: usize) {
        debug_assert!(!self.free.contains(&address), "given back twice");
        self.free.push(address);
    }
}

impl Pool {
    /// Makes one without a trace.
    #[cfg(test)]
    pub(crate) fn new(slot_bytes: usize, bytes: usize) -> Arc<Self> {
        Self::traced(slot_bytes, bytes, &Trace::default())
    }

    pub(crate) fn traced(slot_bytes: usize, bytes: usize, trace: &Trace) -> Arc<Self> {
        let slots = (bytes / slot_bytes).max(2);
        Arc::new(Self {
            trace: trace.clone(),
            waits: AtomicU64::new(0),
            slot_bytes,
            limits: [slots / 2, slots - slots / 2],
            state: Mutex::new(
                Rank::Pool,
                PoolState {
                    batches: Vec::new(),
                    shelves: Vec::new(),
                    used: [0; 2],
                },
            ),
        })
    }

    /// Returns whether memory is pinned on a device's NUMA node.
    pub(crate) fn has_near(&self, device: &dyn Device) -> bool {
        let state = self.state.lock();
        let mut shelves = state.shelves.iter();
        shelves.any(|(node, slots)| *node == device.numa_node() && slots.len() > 0)
    }

    /// Returns the batches of a device, if any.
    pub(crate) fn batches(&self, device: &dyn Device) -> Option<Arc<Batches>> {
        let state = self.state.lock();
        let mut batches = state.batches.iter();
        batches.find(|batches| batches.is_of(device)).cloned()
    }

    /// Makes batches available to copies of their device.
    pub(crate) fn add_batches(&self, batches: Batches) {
        self.state.lock().batches.push(Arc::new(batches));
    }

    /// Returns the size of a slot in bytes.
    pub(crate) fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    /// Returns the number of slots that may currently still be taken.
    pub(crate) fn left(&self, direction: Direction) -> usize {
        let direction = direction as usize;
        self.limits[direction] - self.state.lock().used[direction]
    }

    /// Counts the begin of a wait for a slot.
    pub(crate) fn note_wait(&self) {
        self.waits.fetch_add(1, Ordering::Relaxed);
        if let Some(trace) = self.trace.on() {
            trace.event(Record::new(Kind::NoSlot));
        }
    }

    /// Records copies between slots and devices.
    pub(crate) fn trace(&self) -> &Trace {
        &self.trace
    }

    /// Returns the number of waits for a slot.
    pub(crate) fn waits(&self) -> u64 {
        self.waits.load(Ordering::Relaxed)
    }

    /// Takes a slot; returns `None` at the limit. A holder returns its slot without waiting for
    /// others, so a retry will succeed.
    pub(crate) fn take(
        self: &Arc<Self>,
        device: &dyn Device,
        direction: Direction,
    ) -> Result<Option<Slot>, Error> {
        let mut state = self.state.lock();
        if state.used[direction as usize] == self.limits[direction as usize] {
            return Ok(None);
        }
        let shelf = state.shelf(device, self.slot_bytes);
        let mut pinned = Ok(());
        if state.shelves[shelf].1.free.is_empty() {
            pinned = self.pin(&mut state, shelf, device);
        }
        let Some((shelf, address)) = state.take(shelf) else {
            return match pinned {
                Err(error) if state.used[direction as usize] == 0 => Err(error),
                // A slot in use will be returned.
                _ => Ok(None),
            };
        };
        state.used[direction as usize] += 1;
        Ok(Some(Slot {
            backing: Backing::Pool {
                pool: Arc::clone(self),
                direction,
                shelf,
            },
            address,
            len: self.slot_bytes,
        }))
    }

    /// Pins memory until the device's NUMA node has `slots` slots, or the limit is reached.
    pub(crate) fn grow(&self, device: &dyn Device, slots: usize) -> Result<(), Error> {
        let mut state = self.state.lock();
        let shelf = state.shelf(device, self.slot_bytes);
        while state.shelves[shelf].1.len() < slots && self.may_pin(&state) > 0 {
            self.pin(&mut state, shelf, device)?;
        }
        Ok(())
    }

    /// Returns how many more slots may be pinned.
    fn may_pin(&self, state: &PoolState) -> usize {
        self.limits[0] + self.limits[1] - state.len()
    }

    fn pin(&self, state: &mut PoolState, shelf: usize, device: &dyn Device) -> Result<(), Error> {
        let left = self.may_pin(state);
        let slots = left.min(SLAB_SLOTS);
        if slots == 0 {
            return Ok(());
        }
        let slab = device.pin(slots * self.slot_bytes)?;
        state.shelves[shelf].1.add(slab);
        Ok(())
    }
}

/// Pinned memory for one part of a chunk. Dropping the slot returns it, so it must outlive all
/// copies that use it.
pub(crate) struct Slot {
    backing: Backing,
    address: usize,
    len: usize,
}

enum Backing {
    Pool {
        pool: Arc<Pool>,
        direction: Direction,
        shelf: usize,
    },
    /// Memory outside of the pool, freed with the slot.
    Own { _pinned: Pinned },
}

impl Slot {
    /// Makes a slot outside of any pool.
    pub(crate) fn own(device: &dyn Device, len: usize) -> Result<Self, Error> {
        let pinned = device.pin(len)?;
        Ok(Self {
            address: pinned.address() as usize,
            len,
            backing: Backing::Own { _pinned: pinned },
        })
    }

    /// Returns bytes `from` to `to` of the slot, which belongs to the caller until it is dropped.
    /// No copy may use the bytes after that.
    pub(crate) fn span(&self, from: usize, to: usize) -> Span {
        debug_assert!(from <= to && to <= self.len, "inside the slot");
        // SAFETY: the span lies inside memory that stays pinned at least as long as the slot
        // exists; the holder waits for copies before it drops the slot.
        unsafe { Span::new((self.address + from) as *mut u8, to - from) }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if let Backing::Pool {
            pool,
            direction,
            shelf,
        } = &self.backing
        {
            let mut state = pool.state.lock();
            state.used[*direction as usize] -= 1;
            state.shelves[*shelf].1.give(self.address);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tcpx_cuda::StandIn;

    #[test]
    fn each_direction_has_its_share_and_slots_do_not_overlap() {
        let device = StandIn::new(1);
        let pool = Pool::new(4096, 5 * 4096);
        let take = |direction| pool.take(&device, direction).unwrap();
        let out: Vec<_> = std::iter::from_fn(|| take(Direction::Out)).collect();
        let into: Vec<_> = std::iter::from_fn(|| take(Direction::In)).collect();
        assert_eq!((out.len(), into.len()), (2, 3));
        let mut addresses: Vec<_> = out.iter().chain(&into).map(|s| s.address).collect();
        addresses.sort_unstable();
        assert!(addresses.windows(2).all(|w| w[1] - w[0] >= 4096));
        drop(out);
        assert!(take(Direction::In).is_none());
        assert!(take(Direction::Out).is_some());
    }

    #[test]
    fn memory_is_pinned_once_and_within_the_limit() {
        let device = StandIn::new(1);
        let pool = Pool::new(4096, 20 * 4096);
        assert!(!pool.has_near(&device));
        pool.grow(&device, 100).unwrap();
        assert!(pool.has_near(&device));
        assert_eq!(pool.state.lock().len(), 20);
        for _ in 0..100 {
            assert!(pool.take(&device, Direction::Out).unwrap().is_some());
        }
        assert_eq!(pool.state.lock().shelves[0].1.slabs.len(), 3);
    }

    #[test]
    fn each_device_prefers_slots_of_its_own_node() {
        let [first, second] = [0, 1].map(|node| StandIn::new(1).at("0000:01:00.0", node));
        let pool = Pool::new(4096, 6 * SLAB_SLOTS * 4096);
        pool.grow(&first, SLAB_SLOTS).unwrap();
        assert!(pool.has_near(&first) && !pool.has_near(&second));
        let shelf = |slot: &Slot| match slot.backing {
            Backing::Pool { shelf, .. } => shelf,
            Backing::Own { .. } => panic!("the slot belongs to the pool"),
        };
        let take = |device, direction| pool.take(device, direction).unwrap();
        let near = take(&second, Direction::In).unwrap();
        assert_eq!(shelf(&near), 1);
        drop(near);
        assert_eq!(shelf(&take(&first, Direction::In).unwrap()), 0);
        // All memory that may be pinned is on the first node, except for one slab.
        pool.grow(&first, usize::MAX).unwrap();
        let all: Vec<_> = std::iter::from_fn(|| take(&second, Direction::Out)).collect();
        let near = all.iter().filter(|slot| shelf(slot) == 1).count();
        assert_eq!((all.len(), near), (3 * SLAB_SLOTS, SLAB_SLOTS));
        drop(all);
        // Each slot has returned to its own shelf.
        assert_eq!(shelf(&take(&first, Direction::Out).unwrap()), 0);
    }

    #[test]
    fn the_smallest_pool_serves_both_directions() {
        let device = StandIn::new(1);
        let pool = Pool::new(1 << 20, 1);
        let out = pool.take(&device, Direction::Out).unwrap();
        let into = pool.take(&device, Direction::In).unwrap();
        assert!(out.is_some() && into.is_some());
    }
}
