//! Moves the scattered blocks of many copies by few kernel launches.
//!
//! A kernel that reads or writes pinned memory occupies the device's processors while it waits for
//! the bus, and every launch takes time from the application's short kernels. So one launch gathers
//! the blocks of many callers' copies into a *cell* of device memory, and the copy engine moves
//! each copy's part of the cell to pinned memory. In the other direction, the copy engine fills the
//! cell as copies are requested, and one launch scatters all of them.
//!
//! A batch is started when its cell is full, when a caller waits for one of its copies and no other
//! batch of that direction is in flight, or when it has lingered for [`LINGER`] and a caller asks for
//! any copy of that direction.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::error::Error;
use crate::memory::DeviceMemory;
use crate::rows::is_for_engine;
use crate::{Device, Queue, Range, Ticket, give_way};

/// Bytes of a cell: launches of this size barely disturb the application's kernels.
const CELL_BYTES: usize = 16 << 20;
/// Cells of each direction: one being filled, one at the kernel, and one at the copy engine.
const CELLS: usize = 3;
/// Maximum copies of one batch: each is a ticket of the cell's queue, which has twice as many.
const MAX_PARTS: usize = 32;
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
    cell: usize,
    batch: u64,
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
    /// Number of bytes with which a batch counts as full.
    full: usize,
    cells: Vec<Cell>,
    /// The cell whose batch accepts copies.
    open: Option<usize>,
    batches: u64,
    /// The failure that ended all cells, if any.
    failed: Option<Error>,
}

struct Cell {
    // Dropped first: that waits until nothing uses the memory.
    queue: Box<dyn Queue>,
    memory: DeviceMemory,
    batch: u64,
    opened: Instant,
    // ≤ memory.len()
    used: usize,
    /// The blocks of all copies, in the order of the cell's bytes.
    blocks: Vec<Range>,
    parts: Vec<Part>,
    is_started: bool,
}

struct Part {
    /// The position in the cell.
    at: Range,
    host: usize,
    /// The ticket of the copy that completes this part.
    ticket: Option<Ticket>,
}

impl Batches {
    /// Allocates at most `bytes` of the device's memory, half of it for each direction. A batch is
    /// full at `full` bytes, or when its cell is.
    ///
    /// # Errors
    /// The device has not enough memory.
    pub fn new(device: &dyn Device, bytes: usize, full: usize) -> Result<Self, Error> {
        let cell = (bytes / 2).min(CELL_BYTES);
        let cells = (bytes / 2).checked_div(cell).unwrap_or(0).min(CELLS);
        let half = |direction| {
            let cells: Result<Vec<_>, Error> =
                (0..cells).map(|_| Cell::new(device, cell)).collect();
            Ok::<_, Error>(Mutex::new(Half {
                direction,
                full: full.min(cell),
                cells: cells?,
                open: None,
                batches: 0,
                failed: None,
            }))
        };
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
    fn add(&mut self, blocks: &[Range], host: *mut u8, len: usize) -> Option<BatchTicket> {
        let at = match self.open {
            Some(open) if self.cells[open].has_room(len) => open,
            Some(open) => {
                self.start(open);
                self.open_cell(len)?
            }
            None => self.open_cell(len)?,
        };
        let direction = self.direction;
        let cell = &mut self.cells[at];
        let ticket = BatchTicket {
            direction,
            cell: at,
            batch: cell.batch,
            part: cell.parts.len(),
        };
        if let Err(error) = cell.add(direction, blocks, host, len) {
            self.fail(error);
            return None;
        }
        if cell.used >= self.full || cell.parts.len() == MAX_PARTS {
            self.start(at);
        }
        Some(ticket)
    }

    /// Begins a batch in a free cell.
    fn open_cell(&mut self, len: usize) -> Option<usize> {
        let at = self
            .cells
            .iter_mut()
            .position(|cell| len <= cell.memory.len() && cell.is_free())?;
        self.batches += 1;
        self.cells[at].open(self.batches);
        self.open = Some(at);
        Some(at)
    }

    fn is_done(&mut self, ticket: BatchTicket, wish: Wish) -> Result<bool, Error> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let cell = &mut self.cells[ticket.cell];
        // The cell was reused, so all copies of the earlier batch have completed.
        if cell.batch != ticket.batch {
            return Ok(true);
        }
        if !cell.is_started {
            let is_due = match wish {
                Wish::Now => true,
                Wish::Soon => cell.has_lingered() || !self.is_in_flight(),
                Wish::Later => cell.has_lingered(),
            };
            if !is_due {
                return Ok(false);
            }
            self.start(ticket.cell);
            if let Some(error) = &self.failed {
                return Err(error.clone());
            }
        }
        let outcome = self.cells[ticket.cell].is_over(ticket.part);
        if outcome == Ok(false) {
            self.start_overdue();
        }
        outcome.inspect_err(|error| self.fail(error.clone()))
    }

    /// Starts the open batch if it has lingered. Callers that wait for an earlier batch see to it:
    /// where the application's kernels delay that one, nobody asks for the copies of this one yet,
    /// and it would miss the moment in which both can run.
    fn start_overdue(&mut self) {
        if let Some(open) = self.open
            && self.cells[open].has_lingered()
        {
            self.start(open);
        }
    }

    /// Returns whether a batch is in flight.
    fn is_in_flight(&mut self) -> bool {
        let mut cells = self.cells.iter_mut();
        cells.any(|cell| cell.is_started && !cell.is_free())
    }

    fn start(&mut self, at: usize) {
        self.open.take_if(|open| *open == at);
        if let Err(error) = self.cells[at].start(self.direction) {
            self.fail(error);
        }
    }

    /// Gives up the cells: dropping their queues waits until nothing runs any more.
    fn fail(&mut self, error: Error) {
        self.open = None;
        self.cells.clear();
        self.failed = Some(error);
    }
}

impl Cell {
    fn new(device: &dyn Device, bytes: usize) -> Result<Self, Error> {
        Ok(Self {
            queue: device.queue()?,
            memory: device.allocate(bytes)?,
            batch: 0,
            opened: Instant::now(),
            used: 0,
            blocks: Vec::new(),
            parts: Vec::with_capacity(MAX_PARTS),
            is_started: true,
        })
    }

    fn has_room(&self, len: usize) -> bool {
        self.used + len <= self.memory.len()
    }

    /// Returns whether its batch accepts copies for so long that it is to start.
    fn has_lingered(&self) -> bool {
        self.opened.elapsed() >= LINGER
    }

    /// Returns whether every copy of its batch has completed. Callers that ask for a failed copy
    /// find the failure.
    fn is_free(&mut self) -> bool {
        self.is_started
            && match self.parts.len() {
                0 => true,
                parts => self.is_over(parts - 1).unwrap_or(false),
            }
    }

    fn open(&mut self, batch: u64) {
        self.batch = batch;
        self.opened = Instant::now();
        self.used = 0;
        self.blocks.clear();
        self.parts.clear();
        self.is_started = false;
    }

    fn add(
        &mut self,
        direction: Move,
        blocks: &[Range],
        host: *mut u8,
        len: usize,
    ) -> Result<(), Error> {
        let at = Range {
            address: self.memory.address() + self.used,
            len,
        };
        if direction == Move::Scatter {
            // SAFETY: the caller of `Batches::add` keeps the pinned memory; the cell is owned by
            // this value, and no other copy of the batch uses this part.
            unsafe { self.queue.scatter(host, &[at])? };
        }
        self.used += len;
        self.blocks.extend_from_slice(blocks);
        self.parts.push(Part {
            at,
            host: host.expose_provenance(),
            ticket: None,
        });
        Ok(())
    }

    fn start(&mut self, direction: Move) -> Result<(), Error> {
        self.is_started = true;
        let cell = [Range {
            address: self.memory.address(),
            len: self.used,
        }];
        match direction {
            Move::Gather => {
                // SAFETY: callers of `Batches::add` keep blocks and pinned memory until their
                // copies have completed, which the tickets of their parts report.
                unsafe { self.queue.copy(&self.blocks, &cell)? };
                for part in &mut self.parts {
                    let host = std::ptr::with_exposed_provenance_mut(part.host);
                    // SAFETY: as above.
                    part.ticket = Some(unsafe { self.queue.gather(&[part.at], host)? });
                }
            }
            Move::Scatter => {
                // SAFETY: as above; the queue has filled the cell before this begins.
                let ticket = unsafe { self.queue.copy(&cell, &self.blocks)? };
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
