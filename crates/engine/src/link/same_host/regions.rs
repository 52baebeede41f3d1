//! Regions of the neighbour that this session may access.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tcpx_cuda::{Device, Range};
use tcpx_net::Gates;
use tcpx_net::neighbour::OwnedPass;
use tcpx_proto::descriptor::RegionKey;
use tcpx_proto::frame::Entry;
use tcpx_proto::neighbour::Message;

use super::device::Allocation;
use super::wired::Line;
use crate::error::Error;
use crate::sync::{Mutex, Rank, RwLock};
use crate::transfer::Run;

/// Limits the regions requested at the same time; runs with further ones use lanes.
const MAX_ASKED: usize = 4096;

/// An open region of the neighbour. Dropped when the last copy that uses it is over.
pub(super) struct Opened {
    pub(super) gate: usize,
    gates: Arc<Gates>,
    line: Arc<Line>,
    /// Address in the owner's address space.
    address: u64,
    len: u64,
    /// The allocation that contains the region, for device memory.
    allocation: Option<Arc<Allocation>>,
}

impl Opened {
    pub(super) fn new(
        gate: usize,
        gates: &Arc<Gates>,
        line: &Arc<Line>,
        (address, len): (u64, u64),
        allocation: Option<Arc<Allocation>>,
    ) -> Self {
        Self {
            gate,
            gates: Arc::clone(gates),
            line: Arc::clone(line),
            address,
            len,
            allocation,
        }
    }

    /// Passes the gate, unless the owner has closed it.
    pub(super) fn enter(&self) -> Option<OwnedPass> {
        self.gates.enter_owned(self.gate)
    }

    /// Returns the owner's name.
    pub(super) fn peer(&self) -> String {
        self.line.peer.clone()
    }

    /// Returns the device that holds the region.
    pub(super) fn device(&self) -> Option<&Arc<dyn Device>> {
        self.allocation
            .as_ref()
            .map(|allocation| &allocation.device)
    }

    /// Returns the address of an entry's bytes, as this process can access them: in the neighbour's
    /// address space, or in this process's for device memory.
    ///
    /// # Errors
    /// `None` if the bytes are not inside the region, otherwise the reason for which the device
    /// cannot access them.
    pub(super) fn locate(&self, entry: &Entry) -> Result<u64, Option<Error>> {
        self.check(entry)?;
        match &self.allocation {
            Some(allocation) => {
                let device = allocation.device.as_ref();
                let reached = allocation.reach(device, entry.address).map_err(Some)?;
                Ok(reached as u64)
            }
            None => Ok(entry.address),
        }
    }

    /// Returns the range of an entry's bytes, as copies of this device access them.
    ///
    /// # Errors
    /// As for [`Opened::locate`].
    pub(super) fn range_on(
        &self,
        device: &dyn Device,
        entry: &Entry,
    ) -> Result<Range, Option<Error>> {
        self.check(entry)?;
        let allocation = self.allocation.as_ref().ok_or(Some(Error::DeviceLost))?;
        let address = allocation.reach(device, entry.address).map_err(Some)?;
        let len = entry.len as usize;
        Ok(Range { address, len })
    }

    fn check(&self, entry: &Entry) -> Result<(), Option<Error>> {
        let offset = entry.address.checked_sub(self.address).ok_or(None)?;
        let end = offset.checked_add(u64::from(entry.len)).ok_or(None)?;
        if end > self.len {
            return Err(None);
        }
        Ok(())
    }
}

impl Drop for Opened {
    /// Releases the gate, so that the owner may use it for another region.
    fn drop(&mut self) {
        self.allocation = None;
        let gate = self.gate as u32;
        // If the owner does not receive this message,
        // the gate stays closed, or open without a user.
        let _ = self.line.send(&Message::Forgotten { gate }, Vec::new());
    }
}

/// How a region of the neighbour can be accessed.
#[derive(Clone)]
pub(super) enum Access {
    /// Directly.
    Open(Arc<Opened>),
    /// Only through lanes, for this reason.
    Lanes(Arc<str>),
}

/// Known regions of the neighbour.
pub(super) struct Regions {
    by_key: RwLock<HashMap<RegionKey, Access>>,
    asking: Mutex<Asking>,
}

#[derive(Default)]
struct Asking {
    by_request: HashMap<u32, RegionKey>,
    next: u32,
    /// Runs that wait for an answer.
    parked: Vec<Arc<Run>>,
    /// When the first of them began to wait.
    since: Option<Instant>,
}

/// Obstacles to starting a run.
pub(super) enum Missing {
    Nothing,
    /// Regions that were not requested, or whose answer is pending.
    Answers(Vec<RegionKey>),
    /// A region that is accessible only through lanes.
    Path(Arc<str>),
}

/// Result of [`Regions::park`].
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Parked {
    /// The run waits. These requests must be sent, for regions that were not requested yet.
    Waits(Vec<(u32, RegionKey)>),
    /// The run does not wait: every region has been answered meanwhile.
    Answered,
    /// The run does not wait: too many requests are pending.
    Full,
}

impl Regions {
    pub(super) fn new() -> Self {
        Self {
            by_key: RwLock::new(Rank::Leaf, HashMap::new()),
            asking: Mutex::new(Rank::Neighbour, Asking::default()),
        }
    }

    pub(super) fn get(&self, key: &RegionKey) -> Option<Arc<Opened>> {
        match self.by_key.read().get(key) {
            Some(Access::Open(opened)) => Some(Arc::clone(opened)),
            _ => None,
        }
    }

    /// Returns the obstacles to starting a run that uses these regions.
    pub(super) fn missing(&self, keys: &[RegionKey]) -> Missing {
        let by_key = self.by_key.read();
        let mut missing = Vec::new();
        for key in keys {
            match by_key.get(key) {
                Some(Access::Open(_)) => {}
                Some(Access::Lanes(reason)) => return Missing::Path(Arc::clone(reason)),
                None => missing.push(*key),
            }
        }
        match missing.is_empty() {
            true => Missing::Nothing,
            false => Missing::Answers(missing),
        }
    }

    /// Parks a run until an answer arrives, unless all of these regions were answered since
    /// [`missing`](Self::missing) looked: no further answer would come for them.
    pub(super) fn park(&self, run: &Arc<Run>, keys: &[RegionKey]) -> Parked {
        let mut asking = self.asking.lock();
        // Checked under the lock: a later answer finds the run.
        let by_key = self.by_key.read();
        let mut unanswered = keys
            .iter()
            .filter(|key| !by_key.contains_key(key))
            .peekable();
        if unanswered.peek().is_none() {
            return Parked::Answered;
        }
        let mut requests = Vec::new();
        for key in unanswered {
            if asking.by_request.values().any(|asked| asked == key) {
                continue;
            }
            if asking.by_request.len() >= MAX_ASKED {
                return Parked::Full;
            }
            let request = asking.next;
            asking.next = request.wrapping_add(1);
            asking.by_request.insert(request, *key);
            requests.push((request, *key));
        }
        drop(by_key);
        run.note_wait();
        asking.parked.push(Arc::clone(run));
        asking.since.get_or_insert_with(Instant::now);
        Parked::Waits(requests)
    }

    /// Returns the region of a request.
    pub(super) fn asked(&self, request: u32) -> Option<RegionKey> {
        self.asking.lock().by_request.get(&request).copied()
    }

    /// Records the answer to a request, if it grants access.
    /// Returns the runs that have waited for answers.
    pub(super) fn answered(&self, request: u32, access: Option<Access>) -> Vec<Arc<Run>> {
        let mut asking = self.asking.lock();
        let Some(key) = asking.by_request.remove(&request) else {
            return Vec::new();
        };
        let replaced = access.and_then(|access| self.by_key.write().insert(key, access));
        asking.since = None;
        let parked = std::mem::take(&mut asking.parked);
        drop(asking);
        // Dropped without the locks: dropping a region sends a message to its owner.
        drop(replaced);
        parked
    }

    /// Returns the waiting runs if the first of them has waited for too long.
    /// Later answers are still used.
    pub(super) fn take_overdue(&self, now: Instant, patience: Duration) -> Vec<Arc<Run>> {
        let mut asking = self.asking.lock();
        let is_overdue = |since: &mut Instant| now.saturating_duration_since(*since) >= patience;
        match asking.since.take_if(is_overdue) {
            Some(_) => std::mem::take(&mut asking.parked),
            None => Vec::new(),
        }
    }

    /// Forgets the region of a gate, so that it is requested again.
    pub(super) fn forget(&self, gate: usize) {
        let is_it = |access: &Access| matches!(access, Access::Open(opened) if opened.gate == gate);
        let forgotten: Vec<_> = {
            let mut by_key = self.by_key.write();
            by_key.extract_if(|_, access| is_it(access)).collect()
        };
        // Dropped without the lock: dropping a region sends a message to its owner.
        drop(forgotten);
    }

    /// Returns whether runs wait for answers.
    pub(super) fn has_parked(&self) -> bool {
        !self.asking.lock().parked.is_empty()
    }

    /// Forgets all regions; returns the runs that have waited.
    pub(super) fn clear(&self) -> Vec<Arc<Run>> {
        let known = std::mem::take(&mut *self.by_key.write());
        drop(known);
        let mut asking = self.asking.lock();
        asking.by_request.clear();
        asking.since = None;
        std::mem::take(&mut asking.parked)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEYS: [RegionKey; 2] = [RegionKey([1; 16]), RegionKey([2; 16])];

    fn run() -> Arc<Run> {
        Arc::new(Run::untouched(1))
    }

    fn access() -> Option<Access> {
        Some(Access::Lanes("it is a test".into()))
    }

    #[test]
    fn run_is_not_parked_behind_the_answer_that_it_needs() {
        let regions = Regions::new();
        assert!(matches!(regions.missing(&KEYS[..1]), Missing::Answers(_)));
        let first = regions.park(&run(), &KEYS[..1]);
        assert_eq!(first, Parked::Waits(vec![(0, KEYS[0])]));
        // Another run has found the region missing; the answer comes before it parks.
        assert_eq!(regions.answered(0, access()).len(), 1);
        assert_eq!(regions.park(&run(), &KEYS[..1]), Parked::Answered);
        assert!(!regions.has_parked());
    }

    #[test]
    fn run_waits_while_one_of_its_regions_is_unanswered() {
        let regions = Regions::new();
        let both = KEYS.iter().enumerate().map(|(at, key)| (at as u32, *key));
        assert_eq!(regions.park(&run(), &KEYS), Parked::Waits(both.collect()));
        assert_eq!(regions.answered(0, access()).len(), 1);
        // Requested already: the pending answer serves this run too.
        assert_eq!(regions.park(&run(), &KEYS), Parked::Waits(Vec::new()));
        // A refused region was not answered for good: it is requested again.
        assert_eq!(regions.answered(1, None).len(), 1);
        let again = Parked::Waits(vec![(2, KEYS[1])]);
        assert_eq!(regions.park(&run(), &KEYS), again);
    }
}
