//! Device memory: mapped from one process into another, and copied by the device itself.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use tcpx_cuda::{Description, Device, Mapped, Prepared, Queue, Range, Ticket};
use tcpx_net::neighbour::OwnedPass;
use tcpx_proto::lane::Op;

use super::regions::Opened;
use super::wired::Wired;
use super::{SameHost, Trouble};
use crate::error::Error;
use crate::link::desk::Step;
use crate::memory::{Memory, MemoryKind, Refusal};
use crate::sync::{Mutex, Rank};
use crate::trace::{Kind, Record, Start};
use crate::transfer::{Plan, Run};

/// Bytes of one launch: a quarter of a millisecond for a device. An abort or a revocation may have
/// to wait for one launch.
const PART_BYTES: usize = 512 << 20;

/// Launches of a run in flight at once: the next one begins when one ends.
const PARTS_AHEAD: usize = 2;

/// An allocation of the peer that contains regions.
pub(super) struct Allocation {
    export: Vec<u8>,
    description: Option<Description>,
    fds: Vec<OwnedFd>,
    /// Mappings in contexts of this process.
    mapped: Mutex<Vec<Arc<Mapped>>>,
    /// The device of the allocation, for copies through host memory.
    pub(super) device: Arc<dyn Device>,
}

impl Allocation {
    /// Returns the address of a byte of the peer, as copies of `device` access it.
    pub(super) fn reach(&self, device: &dyn Device, address: u64) -> Result<usize, Error> {
        let address = address as usize;
        let Some(description) = &self.description else {
            // The peer is another session of this process.
            return Ok(address);
        };
        let mut mapped = self.mapped.lock();
        let known = mapped.iter().find(|m| m.device().is_same(device));
        let mapping = match known {
            Some(known) => Arc::clone(known),
            None => {
                let made = Arc::new(device.import(description, &self.fds)?);
                mapped.push(Arc::clone(&made));
                made
            }
        };
        let one = Range { address, len: 1 };
        let found = mapping.range(one).ok_or(Error::DeviceLost)?;
        Ok(found.address)
    }
}

/// State of the device copies for one peer.
pub(super) struct Devices {
    state: Mutex<State>,
    allocations: Mutex<Vec<Weak<Allocation>>>,
}

#[derive(Default)]
struct State {
    /// One queue for each context in use.
    queues: Vec<(usize, Box<dyn Queue>)>,
    /// Runs in flight, oldest first.
    runs: Vec<Moving>,
    /// Bytes copied.
    moved: u64,
}

/// A run that a device copies.
struct Moving {
    run: Arc<Run>,
    laid_out: Arc<LaidOut>,
    /// Number of chunks taken for the run: all that were left.
    chunks: u32,
    /// Number of parts started.
    started: usize,
    /// Parts in flight, oldest first.
    /// The owner cannot reclaim its memory while the passes are held.
    parts: VecDeque<(Ticket, Vec<OwnedPass>)>,
    opened: Vec<Arc<Opened>>,
}

/// A plan, laid out for copies by a device.
struct LaidOut {
    device: usize,
    opened: Vec<Weak<Opened>>,
    /// Separate launches: an abort or a revocation waits for single parts.
    parts: Vec<Prepared>,
}

impl Devices {
    pub(super) fn new() -> Self {
        Self {
            state: Mutex::new(Rank::Local, State::default()),
            allocations: Mutex::new(Rank::Neighbour, Vec::new()),
        }
    }

    /// Returns the bytes that devices have copied.
    pub(super) fn moved(&self) -> u64 {
        self.state.lock().moved
    }

    /// Waits for the copies of the selected runs. A later look at a run finds its result.
    pub(super) fn wait(&self, is_meant: impl Fn(&Run) -> bool) {
        let mut state = self.state.lock();
        let State { queues, runs, .. } = &mut *state;
        for moving in runs.iter().filter(|moving| is_meant(&moving.run)) {
            let queue = queues.iter_mut().find(|q| q.0 == moving.laid_out.device);
            if let (Some((_, queue)), Some((ticket, _))) = (queue, moving.parts.back()) {
                let _ = queue.wait(*ticket);
            }
        }
    }
}

impl SameHost {
    /// Describes local memory for the peer: bytes and descriptors, none for host memory.
    pub(super) fn export(
        &self,
        wired: &Wired,
        memory: &Memory,
    ) -> Result<(Vec<u8>, Vec<OwnedFd>), String> {
        let device = match &memory.device {
            Some(device) if memory.kind != MemoryKind::Host => device,
            _ => return Ok((Vec::new(), Vec::new())),
        };
        if is_own(wired) {
            return Ok((Vec::new(), Vec::new()));
        }
        let range = Range {
            address: memory.span.address(),
            len: memory.span.len(),
        };
        let export = device.export(range).map_err(|error| error.to_string())?;
        let (description, fds) = export.into_parts();
        if fds.len() > tcpx_net::neighbour::MAX_FDS {
            return Err(format!(
                "its memory consists of {} allocations, and at most {} can be shared",
                fds.len(),
                tcpx_net::neighbour::MAX_FDS
            ));
        }
        Ok((description.encode(), fds))
    }

    /// Maps a region of the peer; `None` for host memory.
    pub(super) fn mapping(
        &self,
        wired: &Wired,
        (address, len): (u64, u64),
        export: &[u8],
        fds: Vec<OwnedFd>,
    ) -> Result<Option<Arc<Allocation>>, String> {
        let failed = |error: tcpx_cuda::Error| error.to_string();
        if export.is_empty() {
            let located = match is_own(wired) {
                true => tcpx_cuda::locate(address as usize, len as usize).map_err(failed)?,
                false => None,
            };
            return Ok(located.map(|device| {
                Arc::new(Allocation {
                    export: Vec::new(),
                    description: None,
                    fds,
                    mapped: Mutex::new(Rank::Leaf, Vec::new()),
                    device,
                })
            }));
        }
        let mut allocations = self.devices.allocations.lock();
        allocations.retain(|known| known.strong_count() > 0);
        let mut known = allocations.iter().filter_map(Weak::upgrade);
        if let Some(known) = known.find(|known| known.export == export) {
            return Ok(Some(known));
        }
        let mapped = tcpx_cuda::import(export, &fds).map_err(failed)?;
        let region = Range {
            address: address as usize,
            len: len as usize,
        };
        if mapped.range(region).is_none() {
            return Err("it has exported other memory than requested".into());
        }
        let made = Arc::new(Allocation {
            export: export.to_vec(),
            description: Some(mapped.description().clone()),
            fds,
            device: mapped.device(),
            mapped: Mutex::new(Rank::Leaf, vec![Arc::new(mapped)]),
        });
        allocations.push(Arc::downgrade(&made));
        Ok(Some(made))
    }

    /// Lets the device copy a run whose memory is on devices at both ends.
    pub(super) fn start_on_device(&self, run: &Arc<Run>, device: &Arc<dyn Device>) -> bool {
        let prepared = self.context.copies.guarded(|| self.enqueue(run, device));
        match prepared {
            Ok(()) => {
                self.context.desk.push(run, self.this(), 1);
                true
            }
            Err(Trouble::Failed(error)) => {
                run.fail_now(error);
                true
            }
            Err(Trouble::Gate(gate)) => {
                self.regions.forget(gate);
                self.submit(run)
            }
            Err(Trouble::Gone) => false,
            Err(Trouble::Path(reason)) => self.refuse(run, &reason),
        }
    }

    fn enqueue(&self, run: &Arc<Run>, device: &Arc<dyn Device>) -> Result<(), Trouble> {
        if let Some(memory) = run.plan.revoked() {
            return Err(Trouble::Failed(Error::RegionDeregistered(memory.id)));
        }
        let keys = run.plan.keys();
        let mut opened = Vec::with_capacity(keys.len());
        for key in keys {
            let region = self.regions.get(key).ok_or(Trouble::Gate(usize::MAX))?;
            opened.push(region);
        }
        let laid_out = self.laid_out(&run.plan, device, &opened)?;
        // A region whose gate is already closed is requested again;
        // a gate that closes later fails the run.
        enter(&opened).map_err(Trouble::Gate)?;
        run.is_beside.store(true, Ordering::Relaxed);
        let mut chunks = 0;
        while run.take().is_some() {
            chunks += 1;
        }
        let mut state = self.devices.state.lock();
        state.runs.push(Moving {
            run: Arc::clone(run),
            laid_out,
            chunks,
            started: 0,
            parts: VecDeque::new(),
            opened,
        });
        let at = state.runs.len() - 1;
        if let Err(error) = state.go_on(at) {
            // A later look at the run finds the error.
            run.completion.record(error);
        }
        Ok(())
    }

    /// Returns the plan as laid out for the device,
    /// from its last posting if the regions are the same.
    fn laid_out(
        &self,
        plan: &Plan,
        device: &Arc<dyn Device>,
        opened: &[Arc<Opened>],
    ) -> Result<Arc<LaidOut>, Trouble> {
        let mut made = plan.made.lock();
        let known = made
            .clone()
            .and_then(|made| made.downcast::<LaidOut>().ok());
        if let Some(known) = known
            && known.device == device.identity()
            && known.opened.len() == opened.len()
            && known.opened.iter().zip(opened).all(|(a, b)| {
                // Comparing addresses is not enough:
                // a dropped region may have had the same address.
                a.strong_count() > 0 && std::ptr::eq(a.as_ptr(), Arc::as_ptr(b))
            })
        {
            return Ok(known);
        }
        let (here, there) = self.ranges(plan, device, opened)?;
        let (from, to) = match plan.op {
            Op::Write => (here, there),
            Op::Read => (there, here),
        };
        let parts = in_parts(&from, &to).into_iter();
        let parts = parts.map(|(from, to)| device.prepare(&from, &to));
        let parts: Result<Vec<_>, _> = parts.collect();
        let parts = parts.map_err(|error| Trouble::Failed(error.into()))?;
        let laid_out = Arc::new(LaidOut {
            device: device.identity(),
            opened: opened.iter().map(Arc::downgrade).collect(),
            parts,
        });
        *made = Some(Arc::clone(&laid_out) as Arc<_>);
        Ok(laid_out)
    }

    /// Returns the memory of a plan at both ends, as the device accesses it.
    fn ranges(
        &self,
        plan: &Plan,
        device: &Arc<dyn Device>,
        opened: &[Arc<Opened>],
    ) -> Result<(Vec<Range>, Vec<Range>), Trouble> {
        let (mut here, mut there) = (Vec::new(), Vec::new());
        let mut last = None;
        for index in 0..plan.len() {
            let layout = plan.layout(index);
            for span in plan.spans(layout) {
                let range = Range {
                    address: span.address(),
                    len: span.len(),
                };
                // A device does not copy across allocations.
                let joins = |last: &Range| plan.is_in_one_region(last, &range);
                push(&mut here, range, joins);
            }
            let table = plan
                .read_table(layout)
                .map_err(|error| Trouble::Path(error.to_string()))?;
            let keys: Vec<_> = table.regions().collect();
            for entry in table.entries() {
                let key = keys[entry.region as usize];
                let at = plan.keys().binary_search_by_key(&key.0, |key| key.0);
                let at = at.map_err(|_| Trouble::Path("a region is missing".into()))?;
                let range = opened[at].range_on(device.as_ref(), &entry);
                let range = range.map_err(|error| self.out_of_reach(error, &entry))?;
                let is_same = last.replace(at) == Some(at);
                push(&mut there, range, |_| is_same);
            }
        }
        Ok((here, there))
    }

    /// Checks whether a device has finished a run, and starts its next parts.
    pub(super) fn look_at_device(&self, run: &Arc<Run>) -> Step {
        let mut state = self.devices.state.lock();
        let Some(at) = state.position(run) else {
            return Step::Over;
        };
        let outcome = state.go_on(at);
        if let Ok(false) = outcome {
            return Step::UnderWay;
        }
        let moving = state.runs.remove(at);
        drop(state);
        if let Err(error) = &outcome {
            run.completion.record(error.clone());
        }
        let chunks = moving.chunks;
        // The gates are left before the end of the run becomes visible.
        drop(moving);
        if run.completion.error().is_some() {
            run.fail_now(run.completion.error().unwrap_or(Error::DeviceLost));
        }
        if outcome.is_ok() {
            self.count(run, chunks.into(), run.plan.bytes);
        }
        if let Some(trace) = self.context.trace.on() {
            let record = Record::new(Kind::CopyOnDevice).chunk(run.id, 0);
            let record = record.bytes(run.plan.bytes);
            trace.span(Start::at(run.started), Start::now(), record);
        }
        self.settle(run, chunks);
        Step::Over
    }

    /// Ends the runs that devices were copying, after [`Devices::wait`].
    pub(super) fn finish_devices(&self) {
        loop {
            let first = {
                let state = self.devices.state.lock();
                state.runs.first().map(|moving| Arc::clone(&moving.run))
            };
            let Some(run) = first else { return };
            // Prevents further parts from being started.
            run.completion.record(self.end_error());
            self.look_at_device(&run);
        }
    }

    /// Maps the error of an inaccessible range to its consequence.
    pub(super) fn out_of_reach(
        &self,
        error: Option<Error>,
        entry: &tcpx_proto::frame::Entry,
    ) -> Trouble {
        match error {
            Some(error) => Trouble::Path(error.to_string()),
            None => Trouble::Failed(Error::PeerRefused {
                peer: self.above.name().to_owned(),
                status: tcpx_proto::frame::Status::OutOfBounds,
                text: format!(
                    "{} bytes at {:#x} are not inside the region",
                    entry.len, entry.address
                ),
            }),
        }
    }
}

impl State {
    fn position(&self, run: &Arc<Run>) -> Option<usize> {
        self.runs.iter().position(|m| Arc::ptr_eq(&m.run, run))
    }

    /// Removes parts that are over, and starts further ones. Returns whether the run is over.
    fn go_on(&mut self, at: usize) -> Result<bool, Error> {
        self.reap(at)?;
        let moving = &self.runs[at];
        let (started, all) = (moving.started, moving.laid_out.parts.len());
        if moving.parts.is_empty() {
            if let Some(error) = moving.run.completion.error() {
                return Err(error);
            }
            if started == all {
                return Ok(true);
            }
        }
        // In order: no run overtakes one that has waited for room.
        let is_behind = self.runs[..at].iter().any(|other| other.is_waiting());
        if started < all && moving.parts.len() < PARTS_AHEAD && !is_behind {
            self.start_part(at)?;
        }
        Ok(false)
    }

    /// Starts the next part of a run, if there is room and the run has not failed.
    fn start_part(&mut self, at: usize) -> Result<(), Error> {
        let moving = &mut self.runs[at];
        let run = &moving.run;
        if run.is_aborted() || run.completion.error().is_some() {
            return Ok(());
        }
        if let Some(memory) = run.plan.revoked() {
            run.completion.record(Error::RegionDeregistered(memory.id));
            return Ok(());
        }
        let Some(device) = run.plan.only_device() else {
            return Err(Error::DeviceLost);
        };
        let Ok(passes) = enter(&moving.opened) else {
            let refusal = Refusal::Revoked;
            run.completion.record(Error::PeerRefused {
                peer: moving.peer(),
                status: refusal.status(),
                text: refusal.to_string(),
            });
            return Ok(());
        };
        let identity = device.identity();
        let queue = match self.queues.iter().position(|queue| queue.0 == identity) {
            Some(queue) => queue,
            None => {
                self.queues.push((identity, device.queue()?));
                self.queues.len() - 1
            }
        };
        let part = &moving.laid_out.parts[moving.started];
        // SAFETY: local memory is registered and not revoked, and a revocation waits for this copy;
        // the passes and mappings in `moving` keep the peer's memory valid until the copy is over.
        match unsafe { self.queues[queue].1.run(part) } {
            Ok(ticket) => {
                moving.started += 1;
                moving.parts.push_back((ticket, passes));
                Ok(())
            }
            Err(tcpx_cuda::Error::QueueFull { .. }) => Ok(()),
            Err(error) => {
                // Dropping a failed queue waits until none of its copies runs any more.
                self.queues.remove(queue);
                Err(error.into())
            }
        }
    }

    /// Removes parts that are over, and leaves their gates.
    fn reap(&mut self, at: usize) -> Result<(), Error> {
        let moving = &mut self.runs[at];
        let mut queues = self.queues.iter_mut();
        let queue = queues.find(|queue| queue.0 == moving.laid_out.device);
        let Some((_, queue)) = queue else {
            // The queue has failed, and none of its copies runs any more.
            return match moving.parts.is_empty() {
                true => Ok(()),
                false => {
                    moving.parts.clear();
                    Err(Error::DeviceLost)
                }
            };
        };
        while let Some((ticket, _)) = moving.parts.front() {
            match queue.is_done(*ticket) {
                Ok(true) => {
                    let over = moving.started - moving.parts.len();
                    self.moved += moving.laid_out.parts[over].bytes();
                    moving.parts.pop_front();
                }
                Ok(false) => break,
                Err(error) => {
                    moving.parts.clear();
                    return Err(error.into());
                }
            }
        }
        Ok(())
    }
}

impl Moving {
    /// Returns whether the run waits for room.
    fn is_waiting(&self) -> bool {
        self.parts.is_empty() && self.started < self.laid_out.parts.len()
    }

    fn peer(&self) -> String {
        self.opened
            .first()
            .map_or_else(String::new, |region| region.peer())
    }
}

/// Passes the gates of all regions, or of none; then returns the gate that is closed.
fn enter(opened: &[Arc<Opened>]) -> Result<Vec<OwnedPass>, usize> {
    let passes = opened
        .iter()
        .map(|region| region.enter().ok_or(region.gate));
    passes.collect()
}

/// Splits two lists of the same total length into parts of up to [`PART_BYTES`].
fn in_parts(from: &[Range], to: &[Range]) -> Vec<(Vec<Range>, Vec<Range>)> {
    let from = cut(from);
    let to = cut(to);
    from.into_iter().zip(to).collect()
}

fn cut(ranges: &[Range]) -> Vec<Vec<Range>> {
    let mut parts = Vec::new();
    let (mut part, mut room) = (Vec::new(), PART_BYTES);
    for range in ranges {
        let Range {
            mut address,
            mut len,
        } = *range;
        while len > 0 {
            let count = len.min(room);
            part.push(Range {
                address,
                len: count,
            });
            address += count;
            len -= count;
            room -= count;
            if room == 0 {
                parts.push(std::mem::take(&mut part));
                room = PART_BYTES;
            }
        }
    }
    if !part.is_empty() {
        parts.push(part);
    }
    parts
}

/// Returns whether the peer is a session of this process.
fn is_own(wired: &Wired) -> bool {
    wired.neighbour.pid().as_raw_nonzero().get() as u32 == std::process::id()
}

/// Adds a range, joined to the last one if they are adjacent and may be joined.
fn push(ranges: &mut Vec<Range>, range: Range, joins: impl FnOnce(&Range) -> bool) {
    match ranges.last_mut() {
        Some(last) if last.address + last.len == range.address && joins(last) => {
            last.len += range.len;
        }
        _ => ranges.push(range),
    }
}
