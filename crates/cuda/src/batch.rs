//! Moves the scattered blocks of many copies by few kernel launches.
//!
//! A kernel that reads or writes pinned memory occupies the device's processors while it waits for
//! the bus, and every launch takes time from the application's short kernels. So one launch gathers
//! the blocks of many callers' copies into a ring of device memory, and the copy engine moves each
//! copy's part of the ring to pinned memory. In the other direction, the copy engine fills the ring
//! as copies are requested, and one launch scatters all of them.
//!
//! A batch is started when it is full, when a caller waits for one of its copies and no other batch
//! of that direction is in flight, or when it has lingered for [`LINGER`], another one can be opened,
//! and a caller asks for any copy of that direction.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::error::Error;
use crate::memory::DeviceMemory;
use crate::ring::Ring;
use crate::rows::is_for_engine;
use crate::{Device, Queue, Range, Ticket, give_way};

/// Maximum bytes of a batch: launches of this size barely disturb the application's kernels.
const MAX_BYTES: usize = 16 << 20;
/// Memory of each direction, in longest batches: one being filled, one at the kernel, and one at the
/// copy engine.
const MEMORY_BATCHES: usize = 3;
/// Maximum batches of each direction at a time: more than fit if all are long, since those that
/// start before they are full should not keep others from the memory that they leave.
const BATCHES: usize = 6;
/// Maximum copies of one batch: each is a ticket of the batch's queue, which has twice as many.
const MAX_PARTS: usize = 32;
/// Bytes of an item of the ring, which reserves eight at a time: accesses of the kernel stay
/// aligned.
const ITEM_BYTES: usize = 32;
/// Minimum bytes of a batched copy: a shorter copy completes sooner without the detour.
const LEAST_BYTES: usize = 512 << 10;
/// Maximum time that a copy without a waiting caller is delayed for others to join it. At 20 GB/s, 10
/// MiB join in this time.
const LINGER: Duration = Duration::from_micros(500);

/// The direction of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Move {
    /// From blocks of device memory to pinned memory.
    Gather,
    /// From pinned memory to blocks of device memory.
    Scatter,
}

/// The urgency of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wish {
    /// The caller has other work meanwhile.
    Later,
    /// The caller can do nothing else.
    Soon,
    /// At once, whatever it costs other callers.
    Now,
}

/// Identifies one copy of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchTicket {
    direction: Move,
    /// The place of the batch, and its number.
    at: usize,
    number: u64,
    part: usize,
}

/// The batches of a device, shared by many callers.
pub struct Batches {
    identity: usize,
    gathers: Mutex<Half>,
    scatters: Mutex<Half>,
}

/// The batches of one direction.
struct Half {
    direction: Move,
    /// Maximum bytes of a batch, which always fit an empty ring.
    most: usize,
    /// Number of bytes with which a batch counts as full.
    full: usize,
    /// Places for batches, each with a queue of its own. Dropped before the memory: that waits until
    /// nothing uses it. Empty once the device has failed.
    batches: Vec<Batch>,
    /// The place of the batch that accepts copies.
    open: Option<usize>,
    /// The places of batches that have started, oldest first: they free the ring in this order.
    started: VecDeque<usize>,
    /// The number of the last batch.
    last: u64,
    ring: Ring,
    memory: DeviceMemory,
    /// The failure that ended all batches, if any.
    failed: Option<Error>,
}

struct Batch {
    queue: Box<dyn Queue>,
    number: u64,
    opened: Instant,
    used: usize,
    /// The position in the ring up to which the memory is free once the batch is over.
    end: u64,
    /// The memory of all copies, in ascending order: one range, unless lengths are odd.
    room: Vec<Range>,
    /// The blocks of all copies, in the order of that memory.
    blocks: Vec<Range>,
    parts: Vec<Part>,
}

struct Part {
    /// Its memory.
    at: Range,
    host: usize,
    /// The ticket of the copy that completes this part.
    ticket: Option<Ticket>,
}

impl Batches {
    /// Allocates at most `bytes` of the device's memory, half of it for each direction. A batch is
    /// full at `full` bytes, or at 16 MiB.
    ///
    /// # Errors
    /// The device has not enough memory.
    pub fn new(device: &dyn Device, bytes: usize, full: usize) -> Result<Self, Error> {
        let half = |direction| Half::new(device, direction, bytes / 2, full).map(Mutex::new);
        Ok(Self {
            identity: device.identity(),
            gathers: half(Move::Gather)?,
            scatters: half(Move::Scatter)?,
        })
    }

    /// Returns whether these batches belong to the device.
    #[must_use]
    pub fn is_of(&self, device: &dyn Device) -> bool {
        self.identity == device.identity()
    }

    /// Returns whether a batch moves a copy of these blocks, `len` bytes in all, better: blocks that
    /// the copy engine would not move by itself, and enough bytes that the detour does not matter,
    /// or other copies to share it with.
    #[must_use]
    pub fn suits(&self, direction: Move, blocks: &[Range], len: usize) -> bool {
        let is_busy = || {
            let half = self.half(direction).try_lock();
            half.is_none_or(|mut half| half.open.is_some() || half.is_in_flight())
        };
        !is_for_engine(blocks) && (len >= LEAST_BYTES || is_busy())
    }

    /// Returns whether a copy of `len` bytes had better wait: it is long, and there is no room for it
    /// until batches end.
    #[must_use]
    pub fn is_full(&self, direction: Move, len: usize) -> bool {
        len >= LEAST_BYTES && self.half(direction).lock().is_full(len)
    }

    /// Adds a copy between blocks of device memory and as many bytes of pinned memory at `host`.
    /// Returns `None`, and adds nothing, if there is no room for it now, it is too long, or the
    /// device has failed.
    ///
    /// # Safety
    /// As for [`Queue::gather`] and [`Queue::scatter`]: all memory stays valid and nothing else
    /// uses it until [`Batches::is_done`] or [`Batches::wait`] reports that the copy has completed.
    pub unsafe fn add(
        &self,
        direction: Move,
        blocks: &[Range],
        host: *mut u8,
    ) -> Option<BatchTicket> {
        let len = blocks.iter().map(|block| block.len).sum();
        self.half(direction).lock().add(blocks, host, len)
    }

    /// Returns whether a copy has completed. Never blocks.
    ///
    /// # Errors
    /// The device has failed; no copy is in flight any more.
    pub fn is_done(&self, ticket: BatchTicket, wish: Wish) -> Result<bool, Error> {
        match self.half(ticket.direction).try_lock() {
            Some(mut half) => half.is_done(ticket, wish),
            // The thread that holds the lock adds copies or polls for their end: the caller asks
            // again later.
            None => Ok(false),
        }
    }

    /// Waits until a copy has completed, yielding to other threads.
    ///
    /// # Errors
    /// As [`Batches::is_done`].
    pub fn wait(&self, ticket: BatchTicket) -> Result<(), Error> {
        let mut turns = 0;
        let half = self.half(ticket.direction);
        while !half.lock().is_done(ticket, Wish::Now)? {
            give_way(&mut turns);
        }
        Ok(())
    }

    fn half(&self, direction: Move) -> &Mutex<Half> {
        match direction {
            Move::Gather => &self.gathers,
            Move::Scatter => &self.scatters,
        }
    }
}

impl std::fmt::Debug for Batches {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Batches").finish_non_exhaustive()
    }
}

impl Half {
    fn new(device: &dyn Device, direction: Move, bytes: usize, full: usize) -> Result<Self, Error> {
        let memory = device.allocate(bytes.min(MEMORY_BATCHES * MAX_BYTES))?;
        let batches: Result<_, _> = (0..BATCHES).map(|_| Batch::new(device)).collect();
        let capacity = memory.len() / ITEM_BYTES / 8 * 8;
        let most = (capacity * ITEM_BYTES).min(MAX_BYTES);
        Ok(Self {
            direction,
            most,
            full: full.min(most),
            batches: batches?,
            open: None,
            started: VecDeque::with_capacity(BATCHES),
            last: 0,
            ring: Ring::new(capacity),
            memory,
            failed: None,
        })
    }

    fn add(&mut self, blocks: &[Range], host: *mut u8, len: usize) -> Option<BatchTicket> {
        if self.failed.is_some() || len == 0 || len > self.most {
            return None;
        }
        if self.open.is_some_and(|open| !self.may_join(open, len)) {
            self.start_open();
        }
        if self.next(len).is_none() {
            self.reap();
        }
        match self.next(len) {
            // What is open makes room once it is over.
            None => self.start_open(),
            // The ring begins again.
            Some(at) if self.is_beyond(at) => self.start_open(),
            Some(_) => {}
        }
        let place = self.open.or_else(|| self.spare_for(len))?;
        let address = self.next(len)?;
        let at = Range { address, len };
        self.ring.reserve(items(len))?;
        if self.open.is_none() {
            self.open_batch(place);
        }
        let direction = self.direction;
        let batch = &mut self.batches[place];
        batch.end = self.ring.position();
        let ticket = BatchTicket {
            direction,
            at: place,
            number: batch.number,
            part: batch.parts.len(),
        };
        if let Err(error) = batch.add(direction, blocks, host, at) {
            self.fail(error);
            return None;
        }
        if batch.used >= self.full || batch.parts.len() == MAX_PARTS {
            self.start_open();
        }
        Some(ticket)
    }

    /// Returns whether a copy does not make a batch too long.
    fn may_join(&self, open: usize, len: usize) -> bool {
        self.batches[open].used + len <= self.most
    }

    /// Returns the address of the memory that a copy would get now.
    fn next(&self, len: usize) -> Option<usize> {
        let at = self.ring.next(items(len))?;
        Some(self.memory.address() + at * ITEM_BYTES)
    }

    /// Returns whether the open batch has memory behind this address.
    fn is_beyond(&self, address: usize) -> bool {
        let last = self.open.and_then(|open| self.batches[open].room.last());
        last.is_some_and(|last| address < last.address)
    }

    /// Returns whether a copy finds no room until batches end. What is open is started then.
    fn is_full(&mut self, len: usize) -> bool {
        if len > self.most || self.would_take(len) {
            return false;
        }
        self.reap();
        if self.failed.is_some() || self.would_take(len) {
            return false;
        }
        self.start_open();
        self.failed.is_none()
    }

    /// Returns whether [`Half::add`] takes a copy without waiting for the end of others.
    fn would_take(&self, len: usize) -> bool {
        let Some(address) = self.next(len) else {
            return false;
        };
        let may_join = self.open.is_some_and(|open| self.may_join(open, len));
        (may_join && !self.is_beyond(address)) || self.spare().is_some()
    }

    /// Returns the place of a batch that can be opened.
    fn spare(&self) -> Option<usize> {
        let is_spare = |place: &usize| self.open != Some(*place) && !self.started.contains(place);
        (0..self.batches.len()).find(is_spare)
    }

    /// Returns such a place for a copy. Short copies do not get the last one, in which a batch waits
    /// for the end of another before it starts.
    fn spare_for(&mut self, len: usize) -> Option<usize> {
        if self.started.len() + 1 >= BATCHES {
            self.reap();
        }
        let is_last = self.started.len() + 1 == BATCHES;
        let place = self.spare();
        place.filter(|_| !is_last || len >= LEAST_BYTES.min(self.most))
    }

    fn open_batch(&mut self, place: usize) {
        self.last += 1;
        self.batches[place].open(self.last);
        self.open = Some(place);
    }

    fn is_done(&mut self, ticket: BatchTicket, wish: Wish) -> Result<bool, Error> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        // Its place was used again, so all of its copies have completed.
        if self.batches[ticket.at].number != ticket.number {
            return Ok(true);
        }
        if self.open == Some(ticket.at) {
            let is_due = match wish {
                Wish::Now => true,
                Wish::Soon => self.is_overdue() || !self.is_in_flight(),
                Wish::Later => self.is_overdue(),
            };
            if let Some(error) = &self.failed {
                return Err(error.clone());
            }
            if !is_due {
                return Ok(false);
            }
            self.start_open();
            if let Some(error) = &self.failed {
                return Err(error.clone());
            }
        }
        let outcome = self.batches[ticket.at].is_over(ticket.part);
        // Callers that wait for an earlier batch see to the open one: where the application's
        // kernels delay the earlier one, nobody asks for the copies of this one yet, and it would
        // miss the moment in which both can run.
        if outcome == Ok(false) && self.is_overdue() {
            self.start_open();
        }
        outcome.inspect_err(|error| self.fail(error.clone()))
    }

    /// Returns whether the open batch has lingered, and another one can take what follows.
    fn is_overdue(&mut self) -> bool {
        let has_lingered = |open: usize| self.batches[open].opened.elapsed() >= LINGER;
        if !self.open.is_some_and(has_lingered) {
            return false;
        }
        if self.spare().is_none() {
            self.reap();
        }
        self.spare().is_some()
    }

    /// Returns whether a batch is in flight.
    fn is_in_flight(&mut self) -> bool {
        self.reap();
        !self.started.is_empty()
    }

    /// Frees the memory of batches that are over.
    fn reap(&mut self) {
        while let Some(&oldest) = self.started.front() {
            let batch = &mut self.batches[oldest];
            let last = batch.parts.len().saturating_sub(1);
            match batch.is_over(last) {
                Ok(false) => return,
                Ok(true) => {
                    self.ring.free(batch.end);
                    self.started.pop_front();
                }
                Err(error) => self.fail(error),
            }
        }
    }

    /// Starts the open batch, if there is one.
    fn start_open(&mut self) {
        let Some(open) = self.open.take() else { return };
        self.started.push_back(open);
        if let Err(error) = self.batches[open].start(self.direction) {
            self.fail(error);
        }
    }

    /// Gives up the batches: dropping their queues waits until nothing runs any more.
    fn fail(&mut self, error: Error) {
        self.open = None;
        self.started.clear();
        self.batches.clear();
        self.failed = Some(error);
    }
}

/// Returns the items of the ring that hold so many bytes.
fn items(len: usize) -> usize {
    len.div_ceil(ITEM_BYTES)
}

impl Batch {
    fn new(device: &dyn Device) -> Result<Self, Error> {
        Ok(Self {
            queue: device.queue()?,
            number: 0,
            opened: Instant::now(),
            used: 0,
            end: 0,
            room: Vec::new(),
            blocks: Vec::new(),
            parts: Vec::with_capacity(MAX_PARTS),
        })
    }

    fn open(&mut self, number: u64) {
        self.number = number;
        self.opened = Instant::now();
        self.used = 0;
        self.room.clear();
        self.blocks.clear();
        self.parts.clear();
    }

    fn add(
        &mut self,
        direction: Move,
        blocks: &[Range],
        host: *mut u8,
        at: Range,
    ) -> Result<(), Error> {
        if direction == Move::Scatter {
            // SAFETY: the caller of `Batches::add` keeps the pinned memory; the part of the ring is
            // reserved for this copy.
            unsafe { self.queue.scatter(host, &[at])? };
        }
        self.used += at.len;
        match self.room.last_mut() {
            Some(last) if last.address + last.len == at.address => last.len += at.len,
            _ => self.room.push(at),
        }
        self.blocks.extend_from_slice(blocks);
        self.parts.push(Part {
            at,
            host: host.expose_provenance(),
            ticket: None,
        });
        Ok(())
    }

    fn start(&mut self, direction: Move) -> Result<(), Error> {
        match direction {
            Move::Gather => {
                // SAFETY: callers of `Batches::add` keep blocks and pinned memory until their
                // copies have completed, which the tickets of their parts report.
                unsafe { self.queue.copy(&self.blocks, &self.room)? };
                for part in &mut self.parts {
                    let host = std::ptr::with_exposed_provenance_mut(part.host);
                    // SAFETY: as above.
                    part.ticket = Some(unsafe { self.queue.gather(&[part.at], host)? });
                }
            }
            Move::Scatter => {
                // SAFETY: as above; the queue has filled the memory before this begins.
                let ticket = unsafe { self.queue.copy(&self.room, &self.blocks)? };
                for part in &mut self.parts {
                    part.ticket = Some(ticket);
                }
            }
        }
        Ok(())
    }

    fn is_over(&mut self, part: usize) -> Result<bool, Error> {
        match self.parts.get(part).and_then(|part| part.ticket) {
            Some(ticket) => self.queue.is_done(ticket),
            None => Ok(false),
        }
    }
}

#[cfg(test)]
mod tests;
