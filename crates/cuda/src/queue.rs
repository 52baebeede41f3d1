//! Copies on one CUDA stream.

use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::completion::{Completion, TICKETS, index};
use crate::context::Context;
use crate::error::Error;
use crate::launch::{Bases, Form, INLINE_ITEMS, Inline, Items, Launch, room_of_pairs};
use crate::locate::extent;
use crate::pair::{Pair, pair_up};
use crate::pinned::Pinned;
use crate::prepared::{self, Prepared, Table, Tables, Work};
use crate::ring::Ring;
use crate::rows::{MOST_CALLS, Rows, is_for_engine, most_calls, parts, rows};
use crate::side::{Dense, List, Ranges, Side, Sources, Targets, measure};
use crate::stream::Stream;
use crate::sys::{self, Grid};
use crate::table::{Filled, Item, Walk, pack};
use crate::{Device, Entry, Move, Path, Queue, Range, Ticket, give_way};

/// Maximum items of one launch. More take several launches.
const LAUNCH_ITEMS: usize = 64 << 10;
/// Number of items for which a queue has memory at first: 64 KiB.
const FIRST_TABLE: usize = 4 << 10;
/// Number of items for which it has memory once that is not enough: while one launch of maximum
/// size runs, the next is laid out.
const GROWN_TABLE: usize = 2 * LAUNCH_ITEMS;

/// Maximum time that `drop` waits for copies that do not end.
const PATIENCE: Duration = Duration::from_secs(10);

/// A stream and the resources of its copies.
pub(crate) struct CudaQueue {
    context: Arc<Context>,
    path: Path,
    completion: Completion,
    stream: Stream,
    /// The first failure, which every later call returns.
    failed: Option<Error>,
    inline: Box<Inline>,
    /// Memory for items that do not fit the parameters: the last is in use, an earlier one may
    /// still be read. Dropped explicitly, after the work.
    tables: ManuallyDrop<Vec<Pinned>>,
    /// Allocates parts of the last table.
    ring: Ring,
    /// Position up to which the ticket with the same index frees `ring`.
    ends: [u64; TICKETS],
    /// The last ticket whose part is freed: at most the last one done.
    freed: u64,
    /// The table of a prepared list, by the index of the ticket that reads it. Dropped explicitly,
    /// after the work.
    held: ManuallyDrop<[Option<Arc<Table>>; TICKETS]>,
    /// Keeps the tables of prepared lists from being unpinned between one list and the next.
    _prepared: Arc<Tables>,
}

// SAFETY: streams, events and device memory are handles that the driver allows on any thread; only
// this queue uses them.
unsafe impl Send for CudaQueue {}

/// The place where the items of a launch are laid out.
enum Place {
    Inline,
    Table { start: usize },
}

/// Returns whether a list is as long as a range.
fn is_as_long(list: &[Range], range: &Range) -> bool {
    measure::<Ranges>(list).is_ok_and(|sum| sum.bytes == range.len as u64)
}

impl CudaQueue {
    pub(crate) fn new(context: Arc<Context>, path: Path) -> Result<Self, Error> {
        let _scope = context.enter()?;
        context.kernels()?;
        let table = context.pin(FIRST_TABLE * size_of::<Item>())?;
        let stream = Stream::new(&context)?;
        Ok(Self {
            context: Arc::clone(&context),
            path,
            completion: Completion::new(Arc::clone(&context), stream.raw)?,
            stream,
            failed: None,
            inline: Inline::new(),
            tables: ManuallyDrop::new(vec![table]),
            ring: Ring::new(FIRST_TABLE),
            ends: [0; TICKETS],
            freed: 0,
            held: ManuallyDrop::new([const { None }; TICKETS]),
            _prepared: context.tables(),
        })
    }

    /// Returns the path of a copy within the device.
    fn path(&self, ranges: usize, bytes: u64) -> Path {
        match self.path {
            Path::Auto if ranges <= most_calls(bytes) => Path::Engine,
            Path::Auto => Path::Kernel,
            path => path,
        }
    }

    /// Returns whether the copy engine copies ranges to or from pinned memory.
    fn uses_engine(&self, ranges: &[Range]) -> bool {
        match self.path {
            Path::Auto => is_for_engine(ranges),
            path => path == Path::Engine,
        }
    }

    /// Converts a driver code, and records a failure as the queue's final error.
    fn check(&mut self, code: sys::Code, asked: &'static str) -> Result<(), Error> {
        if code == sys::SUCCESS {
            return Ok(());
        }
        let error = self.context.api.error(code, asked);
        self.failed = Some(error.clone());
        Err(error)
    }

    /// Records a failure as the queue's final error.
    fn note<T>(&mut self, outcome: Result<T, Error>) -> Result<T, Error> {
        if let Err(error) = &outcome {
            self.failed = Some(error.clone());
        }
        outcome
    }

    /// Checks that the queue works and has a free ticket.
    fn admit(&mut self) -> Result<(), Error> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        if self.completion.in_flight() == TICKETS {
            self.reap()?;
        }
        if self.completion.in_flight() == TICKETS {
            return Err(self.full());
        }
        Ok(())
    }

    fn full(&self) -> Error {
        Error::QueueFull {
            tickets: self.completion.in_flight(),
        }
    }

    /// Records the tickets that are done, and frees their parts of the table.
    fn reap(&mut self) -> Result<(), Error> {
        let outcome = self.completion.reap();
        self.note(outcome)?;
        self.free();
        Ok(())
    }

    /// Frees the parts of the table of all tickets that are done.
    fn free(&mut self) {
        let done = self.completion.done();
        if done > self.freed {
            self.ring.free(self.ends[index(done)]);
            for ticket in self.freed + 1..=done {
                self.held[index(ticket)] = None;
            }
            self.freed = done;
        }
    }

    /// Ends a copy: everything started so far is done when the ticket is. A ticket must be free.
    fn issue(&mut self) -> Result<Ticket, Error> {
        // First, since this ticket's end overwrites that of an earlier one.
        self.free();
        let outcome = self.completion.issue();
        let ticket = self.note(outcome)?;
        self.ends[index(ticket)] = self.ring.position();
        Ok(Ticket(ticket))
    }

    /// Starts a copy within the device: one call for each stretch that is contiguous on both sides.
    fn engine<F: Side, T: Side>(&mut self, mut walk: Walk<F, T>) -> Result<Ticket, Error> {
        let context = Arc::clone(&self.context);
        let _scope = context.enter()?;
        self.admit()?;
        while let Some((from, to, len)) = walk.next_run(u64::MAX) {
            let (copy, stream) = (context.api.memcpy_dtod_async, self.stream.raw);
            // SAFETY: the caller keeps both sides valid until the ticket is done.
            let code = unsafe { copy(to, from, len as usize, stream) };
            self.check(code, "starting a copy")?;
        }
        self.issue()
    }

    /// Starts a copy between ranges of device memory and pinned memory: one call for ranges of one
    /// length at one distance.
    fn engine_rows(
        &mut self,
        direction: Move,
        ranges: &[Range],
        host: *mut u8,
    ) -> Result<Ticket, Error> {
        measure::<Ranges>(ranges)?;
        let context = Arc::clone(&self.context);
        let _scope = context.enter()?;
        self.admit()?;
        let mut at = host;
        for rows in rows(ranges.iter().copied()) {
            if !self.start_rows(direction, rows, at)? {
                return self.kernel_instead(direction, ranges, host);
            }
            at = at.wrapping_add(rows.len());
        }
        self.issue()
    }

    /// Starts copies of the engine: one call, or one for each allocation if the driver refuses rows
    /// of several. Returns false if the kernel must copy the whole list; some rows may be under way.
    fn start_rows(&mut self, direction: Move, rows: Rows, host: *mut u8) -> Result<bool, Error> {
        let code = self.start_call(direction, &rows, host);
        if code != sys::SUCCESS && rows.count > 1 {
            return self.start_parts(direction, rows, host);
        }
        self.check(code, "starting a copy")?;
        Ok(true)
    }

    #[cold]
    fn start_parts(&mut self, direction: Move, rows: Rows, host: *mut u8) -> Result<bool, Error> {
        let api = self.context.api;
        let most = match self.path {
            Path::Auto => most_calls(rows.len() as u64),
            Path::Engine | Path::Kernel => rows.count,
        };
        let end_of = |address| extent(api, address).map(|(_, end)| end);
        let calls = parts(rows, end_of).take(most + 1).count();
        // One part is what was refused, for another reason.
        if calls == 1 || calls > most {
            return Ok(false);
        }
        let mut at = host;
        for part in parts(rows, end_of) {
            let code = self.start_call(direction, &part, at);
            if code != sys::SUCCESS && part.count > 1 {
                return Ok(false);
            }
            self.check(code, "starting a copy")?;
            at = at.wrapping_add(part.len());
        }
        Ok(true)
    }

    /// Starts the kernel for ranges of which the engine may be copying some already. Waits for room:
    /// `QueueFull` would tell the caller that nothing was started.
    #[cold]
    fn kernel_instead(
        &mut self,
        direction: Move,
        ranges: &[Range],
        host: *mut u8,
    ) -> Result<Ticket, Error> {
        loop {
            match self.kernel_ranges(direction, ranges, host) {
                Err(Error::QueueFull { .. }) => self.wait(Ticket(self.completion.done() + 1))?,
                outcome => return outcome,
            }
        }
    }

    /// Starts one copy of the engine.
    fn start_call(&self, direction: Move, rows: &Rows, host: *mut u8) -> sys::Code {
        let (api, stream) = (self.context.api, self.stream.raw);
        let (at, host) = (rows.first.address as u64, host.cast::<c_void>());
        let size = (rows.first.len, rows.count);
        let on_device = (at, rows.distance);
        // SAFETY: the caller of the queue keeps both sides valid until the ticket is done. The
        // driver reads a grid during the call only.
        unsafe {
            match (direction, rows.count) {
                (Move::Gather, 1) => (api.memcpy_dtoh_async)(host, at, size.0, stream),
                (Move::Scatter, 1) => (api.memcpy_htod_async)(at, host, size.0, stream),
                (Move::Gather, _) => {
                    (api.memcpy_2d_async)(&Grid::gather(on_device, host, size), stream)
                }
                (Move::Scatter, _) => {
                    (api.memcpy_2d_async)(&Grid::scatter(host, on_device, size), stream)
                }
            }
        }
    }

    /// Starts the kernel for ranges of device memory and pinned memory.
    fn kernel_ranges(
        &mut self,
        direction: Move,
        ranges: &[Range],
        host: *mut u8,
    ) -> Result<Ticket, Error> {
        let list = List::<Ranges>::new(ranges);
        let dense = Dense(host.expose_provenance() as u64);
        match direction {
            Move::Gather => self.kernel_between(list, dense, ranges),
            Move::Scatter => self.kernel_between(dense, list, ranges),
        }
    }

    /// Starts the kernel for two sides, of which one is dense and the other is `ranges`.
    fn kernel_between<F: Side, T: Side>(
        &mut self,
        from: F,
        to: T,
        ranges: &[Range],
    ) -> Result<Ticket, Error> {
        let count = from.places().max(to.places());
        if let Some(ticket) = self.quick(&from, &to, count, Bases::NONE)? {
            return Ok(ticket);
        }
        let bytes = measure::<Ranges>(ranges)?.bytes;
        self.kernel(Walk::new(from, to, bytes), Bases::NONE)
    }

    /// Starts the kernel for a list that takes one launch and no cutting, which is nearly every
    /// list. Returns `None`, and starts nothing, for other lists and for lists that the engine
    /// copies better.
    fn quick<F: Side, T: Side>(
        &mut self,
        from: &F,
        to: &T,
        count: usize,
        bases: Bases,
    ) -> Result<Option<Ticket>, Error> {
        if self.path == Path::Engine || !(MOST_CALLS + 1..=LAUNCH_ITEMS).contains(&count) {
            return Ok(None);
        }
        let context = Arc::clone(&self.context);
        let _scope = context.enter()?;
        let Some((place, filled, form)) = self.lay_out(from, to, count)? else {
            return Ok(None);
        };
        if self.path(count, filled.bytes) != Path::Kernel {
            self.give_back(&place, form.room(count), 0);
            return Ok(None);
        }
        self.launch(&place, filled, &form, bases)?;
        self.issue().map(Some)
    }

    /// Lays a list out as pairs, or else as items, with the room of [`Form::room`]. `None` if it is
    /// neither.
    fn lay_out<F: Side, T: Side>(
        &mut self,
        from: &F,
        to: &T,
        count: usize,
    ) -> Result<Option<(Place, Filled, Form)>, Error> {
        if F::CAN_PAIR && T::CAN_PAIR {
            let room = room_of_pairs(count);
            let place = self.room(room)?;
            if let Some((filled, alike)) = pair_up(from, to, self.pairs(&place, count)) {
                return Ok(Some((place, filled, Form::Pairs(alike))));
            }
            self.give_back(&place, room, 0);
        }
        let place = self.room(count)?;
        if let Some(filled) = pack(from, to, self.items(&place, count)) {
            return Ok(Some((place, filled, Form::Items)));
        }
        self.give_back(&place, count, 0);
        Ok(None)
    }

    /// Starts the kernel, in as many launches as needed.
    fn kernel<F: Side, T: Side>(
        &mut self,
        mut walk: Walk<F, T>,
        bases: Bases,
    ) -> Result<Ticket, Error> {
        let context = Arc::clone(&self.context);
        let _scope = context.enter()?;
        let mut waits = walk.most_items() > LAUNCH_ITEMS;
        loop {
            let reserved = walk.most_items().min(LAUNCH_ITEMS);
            let place = match self.room(reserved) {
                // Later launches must wait for earlier ones, so the first of several may wait too.
                Err(Error::QueueFull { .. }) if waits => {
                    self.wait(Ticket(self.completion.done() + 1))?;
                    continue;
                }
                place => place?,
            };
            let filled = walk.fill(self.items(&place, reserved));
            self.give_back(&place, reserved, filled.items);
            self.launch(&place, filled, &Form::Items, bases)?;
            let ticket = self.issue()?;
            if walk.left() == 0 {
                return Ok(ticket);
            }
            waits = true;
        }
    }

    /// Reserves a ticket and room for items.
    fn room(&mut self, items: usize) -> Result<Place, Error> {
        self.admit()?;
        if items <= INLINE_ITEMS {
            return Ok(Place::Inline);
        }
        let mut start = self.ring.reserve(items);
        if start.is_none() {
            self.reap()?;
            start = self.ring.reserve(items);
        }
        if start.is_none() && self.tables.len() == 1 {
            match self.grow() {
                Ok(()) => start = self.ring.reserve(items),
                // The copies in flight will free as much room as the table has.
                Err(_) if self.completion.in_flight() > 0 => {}
                Err(error) => return Err(error),
            }
        }
        start
            .map(|start| Place::Table { start })
            .ok_or_else(|| self.full())
    }

    /// Switches to a larger table.
    #[cold]
    fn grow(&mut self) -> Result<(), Error> {
        let table = self.context.pin(GROWN_TABLE * size_of::<Item>())?;
        self.tables.push(table);
        self.ring = Ring::new(GROWN_TABLE);
        // Tickets in flight have no items in the new table.
        self.ends = [0; TICKETS];
        Ok(())
    }

    /// Returns the table in use.
    fn table(&self) -> *mut u8 {
        self.tables
            .last()
            .map_or(std::ptr::null_mut(), Pinned::address)
    }

    /// Returns the first `count` items of a place from `room`.
    fn items(&mut self, place: &Place, count: usize) -> &mut [Item] {
        match *place {
            Place::Inline => &mut self.inline.0[..count],
            Place::Table { start } => {
                let table = self.table().cast::<Item>();
                // SAFETY: the table has the ring's capacity, is zeroed at first, and the ring
                // reserves within; no launch in flight reads these items.
                unsafe { std::slice::from_raw_parts_mut(table.add(start), count) }
            }
        }
    }

    /// Returns the first `count` pairs of a place from `room`.
    fn pairs(&mut self, place: &Place, count: usize) -> &mut [Pair] {
        let items = self.items(place, room_of_pairs(count));
        // SAFETY: the items' memory is as long, aligned at least as strictly, and any bytes are
        // valid for both types.
        unsafe { std::slice::from_raw_parts_mut(items.as_mut_ptr().cast(), count) }
    }

    /// Returns unused room.
    fn give_back(&mut self, place: &Place, reserved: usize, used: usize) {
        if matches!(place, Place::Table { .. }) {
            self.ring.trim(reserved, used);
        }
    }

    fn launch(
        &mut self,
        place: &Place,
        filled: Filled,
        form: &Form,
        bases: Bases,
    ) -> Result<(), Error> {
        let items = match *place {
            Place::Inline => Items::Inline(&self.inline),
            Place::Table { start } => {
                Items::Table(self.table().wrapping_add(start * size_of::<Item>()))
            }
        };
        let launch = Launch::new(filled, form, bases);
        // SAFETY: the caller of the copy keeps the ranges in the items valid until the ticket is
        // done, and the ring keeps the table's part as long.
        let code = unsafe { launch.start(&self.context, &items, self.stream.raw)? };
        self.check(code, "launching the copy kernel")
    }
}

impl Queue for CudaQueue {
    unsafe fn gather(&mut self, from: &[Range], to: *mut u8) -> Result<Ticket, Error> {
        match self.uses_engine(from) {
            true => self.engine_rows(Move::Gather, from, to),
            false => self.kernel_ranges(Move::Gather, from, to),
        }
    }

    unsafe fn scatter(&mut self, from: *const u8, to: &[Range]) -> Result<Ticket, Error> {
        match self.uses_engine(to) {
            true => self.engine_rows(Move::Scatter, to, from.cast_mut()),
            false => self.kernel_ranges(Move::Scatter, to, from.cast_mut()),
        }
    }

    unsafe fn copy(&mut self, from: &[Range], to: &[Range]) -> Result<Ticket, Error> {
        let (sources, targets) = (List::<Ranges>::new(from), List::<Ranges>::new(to));
        let count = sources.places().max(targets.places());
        // If one side is contiguous, only the other has to be walked.
        let quick = match (from, to) {
            (_, [to]) if is_as_long(from, to) => {
                self.quick(&sources, &Dense(to.address as u64), count, Bases::NONE)?
            }
            ([from], _) if is_as_long(to, from) => {
                self.quick(&Dense(from.address as u64), &targets, count, Bases::NONE)?
            }
            _ if sources.places() == targets.places() => {
                self.quick(&sources, &targets, count, Bases::NONE)?
            }
            _ => None,
        };
        if let Some(ticket) = quick {
            return Ok(ticket);
        }
        let (sum, target) = (measure::<Ranges>(from)?, measure::<Ranges>(to)?);
        if sum.bytes != target.bytes {
            return Err(Error::Lengths {
                from: sum.bytes,
                to: target.bytes,
            });
        }
        let walk = Walk::new(sources, targets, sum.bytes);
        if self.path(sum.count.max(target.count), sum.bytes) == Path::Kernel {
            return self.kernel(walk, Bases::NONE);
        }
        self.engine(walk)
    }

    unsafe fn unpack(
        &mut self,
        from_base: usize,
        to_base: usize,
        entries: &[Entry],
    ) -> Result<Ticket, Error> {
        let (from, to) = (List::<Sources>::new(entries), List::<Targets>::new(entries));
        let bases = Bases {
            from: from_base as u64,
            to: to_base as u64,
        };
        if let Some(ticket) = self.quick(&from, &to, from.places(), bases)? {
            return Ok(ticket);
        }
        let sum = measure::<Sources>(entries)?;
        measure::<Targets>(entries)?;
        self.kernel(Walk::new(from, to, sum.bytes), bases)
    }

    unsafe fn run(&mut self, prepared: &Prepared) -> Result<Ticket, Error> {
        let (owner, way) = match &prepared.work {
            // SAFETY: the caller upholds the same contract.
            Work::Lists(from, to) => return unsafe { self.copy(from, to) },
            Work::Cuda(owner, way) => (owner, way),
        };
        if !Arc::ptr_eq(owner, &self.context) {
            return Err(Error::OtherDevice);
        }
        let _scope = owner.enter()?;
        self.admit()?;
        let stream = self.stream.raw;
        let (launch, items, table) = match way {
            prepared::Way::Engine(runs) => {
                for &(from, to, len) in runs {
                    let (api, len) = (owner.api, len as usize);
                    // SAFETY: the caller keeps both sides valid until the ticket is done.
                    let code = unsafe { (api.memcpy_dtod_async)(to, from, len, stream) };
                    self.check(code, "starting a copy")?;
                }
                return self.issue();
            }
            prepared::Way::Inline(launch, items) => (launch, Items::Inline(items), None),
            prepared::Way::Table(launch, table) => {
                (launch, Items::Table(table.address()), Some(table))
            }
        };
        // SAFETY: as above, and the table is held until the ticket is done.
        let code = unsafe { launch.start(owner, &items, stream)? };
        self.check(code, "launching the copy kernel")?;
        let ticket = self.issue()?;
        self.held[index(ticket.0)] = table.cloned();
        Ok(ticket)
    }

    fn is_done(&mut self, ticket: Ticket) -> Result<bool, Error> {
        // Tickets of another queue mean nothing here, so the ticket is limited to those issued.
        let ticket = ticket.0.min(self.completion.issued());
        if ticket <= self.completion.done() {
            return Ok(true);
        }
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let outcome = self.completion.look(ticket);
        self.note(outcome)
    }
}

impl Drop for CudaQueue {
    fn drop(&mut self) {
        // A destroyed context has ended its work.
        if let Ok(_scope) = self.context.enter() {
            let (started, mut turns) = (Instant::now(), 0);
            let is_running = |code| code == sys::NOT_READY || sys::CAPTURE_ERRORS.contains(&code);
            while is_running(self.stream.query()) {
                if started.elapsed() > PATIENCE {
                    let context = &self.context;
                    // Logged once for each queue: this is its end.
                    tracing::error!(
                        remedy =
                            "see why the GPU hangs (dmesg, nvidia-smi) and restart the process",
                        "a copy on {context:?} does not end: its memory is kept"
                    );
                    return;
                }
                give_way(&mut turns);
            }
        }
        // SAFETY: dropped here and only here; nothing on the stream uses them any more.
        unsafe {
            ManuallyDrop::drop(&mut self.tables);
            ManuallyDrop::drop(&mut self.held);
        }
    }
}
