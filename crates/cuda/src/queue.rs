//! Copies on one stream.

use std::ffi::{c_uint, c_void};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::context::{Context, log};
use crate::error::Error;
use crate::pinned::Pinned;
use crate::sys;
use crate::table::{Dense, Item, List, Ranges, Ring, Side, Sources, Targets, Walk, measure};
use crate::{Device, Entry, Path, Queue, Range, Ticket, give_way};

/// Copies in flight on one queue: far more than it takes to keep a device busy.
pub(crate) const TICKETS: usize = 64;

/// The kernel's way to and from the host.
const KERNEL_PATH: Path = Path::Staged;

/// Up to this many ranges go to the copy engine one by one: that costs no more than a launch.
const ENGINE_MOST_RANGES: usize = 4;
/// So do ranges of this average length: the engine is at full speed with them.
const ENGINE_LEAST_AVERAGE: u64 = 64 << 10;

/// Device memory that one launch gathers into: as much as the longest chunk that is sent at once.
const STAGING: u64 = 4 << 20;

/// Items that fit a launch's parameters, of which there can be 4 KiB.
const INLINE_ITEMS: usize = 248;
/// Items of one launch. More are several launches.
const LAUNCH_ITEMS: usize = 16 << 10;
/// Items for which the queue has memory: four launches of the largest kind, 1 MiB.
const TABLE_ITEMS: usize = 4 * LAUNCH_ITEMS;

/// Threads of a block whose items are parameters. Few, so that a small launch spreads over the device.
const INLINE_BLOCK: c_uint = 64;
/// Threads of a block whose items are in memory: it reads the items of its eight warps, one line, at once.
const TABLE_BLOCK: c_uint = 256;
const WARP: c_uint = 32;

/// How long a drop waits for copies that do not end.
const PATIENCE: Duration = Duration::from_secs(10);

#[repr(C, align(16))]
struct Inline([Item; INLINE_ITEMS]);

/// A stream and what its copies need.
pub(crate) struct CudaQueue {
    context: Arc<Context>,
    path: Path,
    stream: sys::Stream,
    /// The event of ticket `n` is at `(n - 1) % TICKETS`.
    events: Vec<sys::Event>,
    /// How far `ring` is freed by the ticket of the same place.
    ends: [u64; TICKETS],
    /// `done <= issued <= done + TICKETS`.
    issued: u64,
    done: u64,
    /// The first failure; the queue's answer to everything from then on.
    failed: Option<Error>,
    inline: Box<Inline>,
    /// Memory for items that do not fit the parameters, and who uses which part of it.
    table: Option<Pinned>,
    ring: Ring,
    /// `STAGING` bytes of device memory; zero if this queue needs none. One is enough: what is on one
    /// stream happens in order.
    staging: sys::DevicePtr,
}

// SAFETY: streams, events and device memory are handles that the driver lets any thread use; the queue is
// the only one that uses them.
unsafe impl Send for CudaQueue {}

/// What the items' addresses are relative to, and which copy comes before or after the launch.
#[derive(Clone, Copy)]
enum Route {
    /// The kernel reaches both sides.
    Direct { from: u64, to: u64 },
    /// The kernel fills the staging memory, the engine takes it to the host.
    ToHost(*mut u8),
    /// The engine fills the staging memory from the host, the kernel spreads it.
    FromHost(*const u8),
}

/// Where the items of a launch are.
enum Items {
    Inline,
    Table { start: usize },
}

impl CudaQueue {
    pub(crate) fn new(context: Arc<Context>, path: Path) -> Result<Self, Error> {
        let api = context.api;
        let scope = context.enter()?;
        context.kernels()?;
        let mut queue = Self {
            context: Arc::clone(&context),
            path,
            stream: std::ptr::null_mut(),
            events: Vec::with_capacity(TICKETS),
            ends: [0; TICKETS],
            issued: 0,
            done: 0,
            failed: None,
            inline: Box::new(Inline([Item::default(); INLINE_ITEMS])),
            table: None,
            ring: Ring::new(TABLE_ITEMS),
            staging: 0,
        };
        // From here on `drop` gives back what was made.
        // SAFETY: stores a handle.
        let code = unsafe { (api.stream_create)(&mut queue.stream, sys::STREAM_NON_BLOCKING) };
        api.check(code, "making a stream")?;
        for _ in 0..TICKETS {
            let mut event = std::ptr::null_mut();
            // SAFETY: stores a handle.
            let code = unsafe { (api.event_create)(&mut event, sys::EVENT_DISABLE_TIMING) };
            api.check(code, "making an event")?;
            queue.events.push(event);
        }
        if path == Path::Staged || (path == Path::Auto && KERNEL_PATH == Path::Staged) {
            // SAFETY: stores an address.
            let code = unsafe { (api.mem_alloc)(&mut queue.staging, STAGING as usize) };
            api.check(code, "allocating staging memory on the device")?;
        }
        drop(scope);
        queue.table = Some(context.pin(TABLE_ITEMS * size_of::<Item>())?);
        Ok(queue)
    }

    /// The way that a list goes.
    fn path(&self, ranges: usize, bytes: u64) -> Path {
        match self.path {
            Path::Auto if ranges <= ENGINE_MOST_RANGES => Path::Engine,
            Path::Auto if bytes / ENGINE_LEAST_AVERAGE >= ranges as u64 => Path::Engine,
            Path::Auto => KERNEL_PATH,
            path => path,
        }
    }

    /// Remembers a failure as the queue's last answer.
    fn check(&mut self, code: sys::Code, asked: &'static str) -> Result<(), Error> {
        if code == sys::SUCCESS {
            return Ok(());
        }
        let error = self.context.api.error(code, asked);
        self.failed = Some(error.clone());
        Err(error)
    }

    /// That the queue works and has a ticket free.
    fn admit(&mut self) -> Result<(), Error> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        if self.issued - self.done == TICKETS as u64 {
            self.reap()?;
        }
        if self.issued - self.done == TICKETS as u64 {
            return Err(self.full());
        }
        Ok(())
    }

    fn full(&self) -> Error {
        Error::QueueFull {
            tickets: (self.issued - self.done) as usize,
        }
    }

    /// Notes the oldest copies that are over. The context must be current.
    fn reap(&mut self) -> Result<(), Error> {
        while self.done < self.issued && self.query(self.done + 1)? {}
        Ok(())
    }

    /// Whether a ticket that was issued and is not known to be done, is. The context must be current.
    fn query(&mut self, ticket: u64) -> Result<bool, Error> {
        let index = index(ticket);
        // SAFETY: our own event, recorded with this ticket: at most `TICKETS` are not done.
        match unsafe { (self.context.api.event_query)(self.events[index]) } {
            sys::NOT_READY => Ok(false),
            code => {
                self.check(code, "copying on the device")?;
                self.done = ticket;
                self.ring.free(self.ends[index]);
                Ok(true)
            }
        }
    }

    /// Ends a copy: everything started until now is over when the ticket is. A ticket must be free.
    fn issue(&mut self) -> Result<Ticket, Error> {
        let ticket = self.issued + 1;
        let index = index(ticket);
        // SAFETY: our own event and stream.
        let code = unsafe { (self.context.api.event_record)(self.events[index], self.stream) };
        self.check(code, "recording an event")?;
        self.issued = ticket;
        self.ends[index] = self.ring.position();
        Ok(Ticket(ticket))
    }

    /// Starts one copy of the engine for each stretch that lies together on both sides.
    fn engine<F: Side, T: Side>(
        &mut self,
        mut walk: Walk<F, T>,
        copy: impl Fn(&sys::Api, u64, u64, usize, sys::Stream) -> sys::Code,
    ) -> Result<Ticket, Error> {
        let context = Arc::clone(&self.context);
        let _scope = context.enter()?;
        self.admit()?;
        while let Some((from, to, len)) = walk.next_run() {
            let code = copy(context.api, from, to, len as usize, self.stream);
            self.check(code, "starting a copy")?;
        }
        self.issue()
    }

    /// Starts the kernel, as often as it takes, and the copies of the route.
    fn kernel<F: Side, T: Side>(
        &mut self,
        mut walk: Walk<F, T>,
        route: Route,
    ) -> Result<Ticket, Error> {
        let context = Arc::clone(&self.context);
        let _scope = context.enter()?;
        let most = match route {
            Route::Direct { .. } => u64::MAX,
            Route::ToHost(_) | Route::FromHost(_) => STAGING,
        };
        let mut moved = 0;
        loop {
            let reserved = walk.most_items().min(LAUNCH_ITEMS);
            let items = match self.room(reserved) {
                // Nothing has been started yet, or else the caller could not repeat the call.
                Err(Error::QueueFull { .. }) if moved > 0 => {
                    self.wait(Ticket(self.done + 1))?;
                    continue;
                }
                items => items?,
            };
            let (count, bytes) = match items {
                Items::Inline => walk.fill(&mut self.inline.0, most),
                Items::Table { start } => {
                    let filled = walk.fill(self.table_items(start, reserved), most);
                    self.ring.trim(reserved, filled.0);
                    filled
                }
            };
            self.start(&items, count, moved, bytes, route)?;
            let ticket = self.issue()?;
            moved += bytes;
            if walk.left() == 0 {
                return Ok(ticket);
            }
        }
    }

    /// Room for a ticket and for items.
    fn room(&mut self, items: usize) -> Result<Items, Error> {
        self.admit()?;
        if items <= INLINE_ITEMS {
            return Ok(Items::Inline);
        }
        if let Some(start) = self.ring.reserve(items) {
            return Ok(Items::Table { start });
        }
        self.reap()?;
        match self.ring.reserve(items) {
            Some(start) => Ok(Items::Table { start }),
            None => Err(self.full()),
        }
    }

    fn table_items(&mut self, start: usize, count: usize) -> &mut [Item] {
        let table = self
            .table
            .as_ref()
            .map_or(std::ptr::null_mut(), Pinned::address);
        // SAFETY: the table has `TABLE_ITEMS`, zeroed at first, and the ring reserves within that; no
        // launch that is not over reads these.
        unsafe { std::slice::from_raw_parts_mut(table.cast::<Item>().add(start), count) }
    }

    /// Starts one launch and the copy that belongs to it: `bytes`, after `moved` that went before.
    fn start(
        &mut self,
        items: &Items,
        count: usize,
        moved: u64,
        bytes: u64,
        route: Route,
    ) -> Result<(), Error> {
        if count == 0 {
            return Ok(());
        }
        let api = self.context.api;
        // Offsets on the host's side run through all launches, the staging memory begins anew with each.
        let staging = self.staging.wrapping_sub(moved);
        match route {
            Route::Direct { from, to } => self.launch(items, count, from, to),
            Route::ToHost(to) => {
                self.launch(items, count, 0, staging)?;
                // SAFETY: the caller keeps the target valid until the ticket is done; the staging memory
                // lives as long as the queue, and the kernel before has filled as much of it.
                let code = unsafe {
                    let to = to.add(moved as usize).cast::<c_void>();
                    (api.memcpy_dtoh_async)(to, self.staging, bytes as usize, self.stream)
                };
                self.check(code, "starting a copy to the host")
            }
            Route::FromHost(from) => {
                // SAFETY: as above, the other way round.
                let code = unsafe {
                    let from = from.add(moved as usize).cast::<c_void>();
                    (api.memcpy_htod_async)(self.staging, from, bytes as usize, self.stream)
                };
                self.check(code, "starting a copy from the host")?;
                self.launch(items, count, staging, 0)
            }
        }
    }

    fn launch(&mut self, items: &Items, count: usize, from: u64, to: u64) -> Result<(), Error> {
        let kernels = self.context.kernels()?;
        let (mut count, mut from, mut to) = (count as c_uint, from, to);
        let mut table = self
            .table
            .as_ref()
            .map_or(std::ptr::null_mut(), Pinned::address);
        let (function, block, items): (_, _, *mut c_void) = match *items {
            Items::Inline => (kernels.inline, INLINE_BLOCK, (&raw mut *self.inline).cast()),
            Items::Table { start } => {
                table = table.wrapping_add(start * size_of::<Item>());
                (kernels.table, TABLE_BLOCK, (&raw mut table).cast())
            }
        };
        let mut parameters: [*mut c_void; 4] = [
            items,
            (&raw mut count).cast(),
            (&raw mut from).cast(),
            (&raw mut to).cast(),
        ];
        let grid = count.div_ceil(block / WARP);
        // SAFETY: the parameters are those of the kernel, and copied by the call. The items are ranges that
        // whoever started the copy keeps valid, or the staging memory, until the ticket is done.
        let code = unsafe {
            (self.context.api.launch_kernel)(
                function,
                grid,
                1,
                1,
                block,
                1,
                1,
                0,
                self.stream,
                parameters.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        self.check(code, "launching the copy kernel")
    }
}

/// The place of a ticket.
fn index(ticket: u64) -> usize {
    ((ticket - 1) % TICKETS as u64) as usize
}

impl Queue for CudaQueue {
    unsafe fn gather(&mut self, from: &[Range], to: *mut u8) -> Result<Ticket, Error> {
        let sum = measure::<Ranges>(from)?;
        let walk = Walk::new(List::<Ranges>::new(from), Dense(0), sum.bytes);
        match self.path(sum.count, sum.bytes) {
            Path::Engine => self.engine(walk, |api, from, offset, len, stream| {
                // SAFETY: the caller keeps both sides valid until the ticket is done.
                unsafe {
                    let to = to.add(offset as usize).cast::<c_void>();
                    (api.memcpy_dtoh_async)(to, from, len, stream)
                }
            }),
            Path::Mapped => self.kernel(
                walk,
                Route::Direct {
                    from: 0,
                    to: to.addr() as u64,
                },
            ),
            Path::Staged | Path::Auto => self.kernel(walk, Route::ToHost(to)),
        }
    }

    unsafe fn scatter(&mut self, from: *const u8, to: &[Range]) -> Result<Ticket, Error> {
        let sum = measure::<Ranges>(to)?;
        let walk = Walk::new(Dense(0), List::<Ranges>::new(to), sum.bytes);
        match self.path(sum.count, sum.bytes) {
            Path::Engine => self.engine(walk, |api, offset, to, len, stream| {
                // SAFETY: the caller keeps both sides valid until the ticket is done.
                unsafe {
                    let from = from.add(offset as usize).cast::<c_void>();
                    (api.memcpy_htod_async)(to, from, len, stream)
                }
            }),
            Path::Mapped => self.kernel(
                walk,
                Route::Direct {
                    from: from.addr() as u64,
                    to: 0,
                },
            ),
            Path::Staged | Path::Auto => self.kernel(walk, Route::FromHost(from)),
        }
    }

    unsafe fn copy(&mut self, from: &[Range], to: &[Range]) -> Result<Ticket, Error> {
        let (sum, target) = (measure::<Ranges>(from)?, measure::<Ranges>(to)?);
        if sum.bytes != target.bytes {
            return Err(Error::Lengths {
                from: sum.bytes,
                to: target.bytes,
            });
        }
        let walk = Walk::new(
            List::<Ranges>::new(from),
            List::<Ranges>::new(to),
            sum.bytes,
        );
        match self.path(sum.count.max(target.count), sum.bytes) {
            Path::Engine => self.engine(walk, |api, from, to, len, stream| {
                // SAFETY: the caller keeps both sides valid until the ticket is done.
                unsafe { (api.memcpy_dtod_async)(to, from, len, stream) }
            }),
            _ => self.kernel(walk, Route::Direct { from: 0, to: 0 }),
        }
    }

    unsafe fn unpack(
        &mut self,
        from_base: usize,
        to_base: usize,
        entries: &[Entry],
    ) -> Result<Ticket, Error> {
        let sum = measure::<Sources>(entries)?;
        measure::<Targets>(entries)?;
        let (from, to) = (List::<Sources>::new(entries), List::<Targets>::new(entries));
        let route = Route::Direct {
            from: from_base as u64,
            to: to_base as u64,
        };
        self.kernel(Walk::new(from, to, sum.bytes), route)
    }

    fn is_done(&mut self, ticket: Ticket) -> Result<bool, Error> {
        // A ticket of another queue says nothing about this one.
        let ticket = ticket.0.min(self.issued);
        if ticket <= self.done {
            return Ok(true);
        }
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let context = Arc::clone(&self.context);
        let _scope = context.enter()?;
        self.query(ticket)
    }
}

impl Drop for CudaQueue {
    fn drop(&mut self) {
        let api = self.context.api;
        let context = Arc::clone(&self.context);
        // A context that is gone has taken everything along.
        let Ok(_scope) = context.enter() else {
            return;
        };
        if !self.stream.is_null() {
            let (started, mut turns) = (Instant::now(), 0);
            // SAFETY: our own stream.
            while unsafe { (api.stream_query)(self.stream) } == sys::NOT_READY {
                if started.elapsed() > PATIENCE {
                    tracing::error!(
                        "a copy on {context:?} does not end: its memory is left as it is"
                    );
                    std::mem::forget(self.table.take());
                    return;
                }
                give_way(&mut turns);
            }
            // SAFETY: our own, and nothing is on it any more.
            let code = unsafe { (api.stream_destroy)(self.stream) };
            log(api, code, "closing a stream");
        }
        for event in self.events.drain(..) {
            // SAFETY: our own, and no longer waited for.
            let code = unsafe { (api.event_destroy)(event) };
            log(api, code, "closing an event");
        }
        if self.staging != 0 {
            // SAFETY: our own, and the copies that used it are over.
            let code = unsafe { (api.mem_free)(self.staging) };
            log(api, code, "freeing staging memory");
        }
    }
}
