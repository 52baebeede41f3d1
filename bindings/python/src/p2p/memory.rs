//! Registrations. Each has its own number; a registration inside another one shares its keys and
//! lifetime.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use tcpx::{Error, LocalSlice, MemoryKind, Region, Session};

/// Memory registered with the engine, used by one or more registrations. The engine's registration
/// ends with the last of these; if there are none, with the last reference.
pub(super) struct Memory {
    pub(super) region: Region,
    /// Number of registrations that use it; changes under the registry's lock.
    users: AtomicU64,
}

impl Memory {
    fn new(session: &Session, address: u64, len: u64) -> Result<Arc<Self>, Error> {
        let pointer = address as usize as *mut u8;
        let size = usize::try_from(len).unwrap_or(usize::MAX);
        // SAFETY: the program keeps the memory until it ends the registration, or the transfer that
        // it is for has ended, as the interface requires.
        let region = unsafe { session.register_raw(pointer, size, MemoryKind::Host) }?;
        Ok(Arc::new(Self {
            region,
            users: AtomicU64::new(0),
        }))
    }

    fn start(&self) -> u64 {
        self.region.address() as u64
    }

    pub(super) fn covers(&self, address: u64, len: u64) -> bool {
        let Some(offset) = address.checked_sub(self.start()) else {
            return false;
        };
        offset
            .checked_add(len)
            .is_some_and(|end| end <= self.region.len() as u64)
    }

    /// Returns the slice at an address. The engine refuses one outside of the region.
    pub(super) fn at(&self, address: u64) -> LocalSlice<'_> {
        let offset = address.wrapping_sub(self.start());
        self.region
            .at(usize::try_from(offset).unwrap_or(usize::MAX))
    }
}

#[derive(Default)]
pub(super) struct Registry {
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    by_id: HashMap<u64, Arc<Memory>>,
    /// By first address.
    by_start: BTreeMap<u64, Vec<Arc<Memory>>>,
    /// The longest region ever registered: the maximum distance from an address back to the start
    /// of a region that covers it.
    longest: u64,
    next_id: u64,
    /// Ranges that stay open to peers until the end, whatever other registrations do.
    for_good: HashMap<(u64, u64), Arc<Memory>>,
}

impl Registry {
    /// Registers memory under a new number.
    pub(super) fn add(&self, session: &Session, address: u64, len: u64) -> Result<u64, Error> {
        let mut inner = self.inner.lock();
        let memory = inner.memory(session, address, len)?;
        memory.users.fetch_add(1, Ordering::Relaxed);
        let id = inner.next_id;
        inner.next_id += 1;
        inner.by_id.insert(id, memory);
        Ok(id)
    }

    /// Registers memory until the end of the endpoint, once per range.
    pub(super) fn add_for_good(
        &self,
        session: &Session,
        address: u64,
        len: u64,
    ) -> Result<Arc<Memory>, Error> {
        let mut inner = self.inner.lock();
        if let Some(known) = inner.for_good.get(&(address, len)) {
            return Ok(Arc::clone(known));
        }
        let memory = inner.memory(session, address, len)?;
        memory.users.fetch_add(1, Ordering::Relaxed);
        inner.for_good.insert((address, len), Arc::clone(&memory));
        Ok(memory)
    }

    /// Returns memory for one transfer: an existing registration, or a temporary one. Keeps nothing
    /// open that the program deregisters meanwhile.
    pub(super) fn borrow(
        &self,
        session: &Session,
        address: u64,
        len: u64,
    ) -> Result<Arc<Memory>, Error> {
        // An empty range is inside of no region: the engine reports the error.
        let found = (len > 0).then(|| self.find(address, len)).flatten();
        found.map_or_else(|| Memory::new(session, address, len), Ok)
    }

    /// Ends a registration; returns whether there was one.
    pub(super) fn remove(&self, id: u64) -> bool {
        let (memory, last) = {
            let mut inner = self.inner.lock();
            let Some(memory) = inner.by_id.remove(&id) else {
                return false;
            };
            let last = inner.release(&memory);
            (memory, last)
        };
        if last {
            // Without the lock: this waits for users of the memory. It fails only if it has already
            // ended.
            let _ = memory.region.deregister();
        }
        true
    }

    pub(super) fn get(&self, id: u64) -> Option<Arc<Memory>> {
        self.inner.lock().by_id.get(&id).cloned()
    }

    /// Returns registered memory that contains an address, for descriptors without a valid number.
    pub(super) fn find(&self, address: u64, len: u64) -> Option<Arc<Memory>> {
        self.inner.lock().covering(address, len)
    }
}

impl Inner {
    fn memory(&mut self, session: &Session, address: u64, len: u64) -> Result<Arc<Memory>, Error> {
        // An empty range is inside of no region: the engine reports the error.
        if len > 0
            && let Some(found) = self.covering(address, len)
        {
            return Ok(found);
        }
        let memory = Memory::new(session, address, len)?;
        self.by_start
            .entry(address)
            .or_default()
            .push(Arc::clone(&memory));
        self.longest = self.longest.max(len);
        Ok(memory)
    }

    fn covering(&self, address: u64, len: u64) -> Option<Arc<Memory>> {
        let from = address.saturating_sub(self.longest);
        let near = self.by_start.range(from..=address).rev();
        near.flat_map(|(_, all)| all)
            .find(|memory| memory.covers(address, len))
            .cloned()
    }

    /// Removes one user; returns whether it was the last.
    fn release(&mut self, memory: &Arc<Memory>) -> bool {
        if memory.users.fetch_sub(1, Ordering::Relaxed) > 1 {
            return false;
        }
        let start = memory.start();
        if let Some(all) = self.by_start.get_mut(&start) {
            all.retain(|other| !Arc::ptr_eq(other, memory));
            if all.is_empty() {
                self.by_start.remove(&start);
            }
        }
        true
    }
}
