//! Direct copies of memory of a session on the same host, without the network.
//!
//! Two sessions that have a connection within one machine connect over a Unix socket and prove that
//! each can access the other's memory ([`exchange`]). From then on, threads of the session that
//! posts a run move it: host memory by a system call ([`copy`]), device memory by the device
//! itself, which has the peer's memory mapped ([`device`]). The connection continues to carry
//! messages, and everything that cannot be copied directly.
//!
//! The owner assigns keys and bounds ([`regions`]), and before each access the other side passes a
//! gate that the owner can close ([`grants`]).

mod copy;
mod device;
mod exchange;
mod grants;
mod regions;
#[cfg(test)]
mod tests;
mod wired;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use tcpx_proto::neighbour::Message;

use self::device::Devices;
pub(crate) use self::exchange::Join;
pub(crate) use self::grants::Grants;
use self::regions::{Missing, Parked, Regions};
use self::wired::Wired;
use super::desk::{Copying, INLINE_BYTES, Step, of_copy};
use super::{Above, Context, SameHostInfo};
use crate::config::SameHostKind;
use crate::error::Error;
use crate::log::limited;
use crate::memory::Copier;
use crate::stats::PathKind;
use crate::sync::{Mutex, Rank};
use crate::transfer::{After, Offered, Op, Run};

/// Number of gates per direction: limits the regions that are open at the same time.
const GATES: usize = 4096;

/// Limits how long the mutual proof, and an answer, may take. After that, lanes carry the runs.
const PATIENCE: Duration = Duration::from_secs(1);

/// The same limit if lanes must not carry runs.
const LONG_PATIENCE: Duration = Duration::from_secs(10);

fn patience(context: &Context) -> Duration {
    match context.config.same_host() {
        SameHostKind::Require => LONG_PATIENCE,
        SameHostKind::Auto | SameHostKind::Off => PATIENCE,
    }
}

/// The lanes of the connection, which carry runs that cannot be copied directly.
pub(crate) trait Lanes: Send + Sync {
    /// Moves the remaining chunks of a run.
    fn carry(&self, run: &Arc<Run>);

    /// Settles chunks of a run, and concludes it if they were the last.
    fn settle(&self, run: &Arc<Run>, chunks: u32);
}

/// The direct path to a connection's peer on the same host.
pub(crate) struct SameHost {
    this: Weak<Self>,
    context: Arc<Context>,
    above: Arc<dyn Above>,
    lanes: Weak<dyn Lanes>,
    /// Whether this side can access the peer's memory, or the reason why not.
    /// Unset until it is known.
    decision: OnceLock<Result<(), Arc<str>>>,
    /// Deadline for the decision.
    deadline: Instant,
    /// Runs that wait for the decision.
    waiting: Mutex<Vec<Arc<Run>>>,
    wired: OnceLock<Wired>,
    /// Why the wire was lost before the decision,
    /// and how long to wait for the connection to report its own end.
    lost: OnceLock<(Arc<str>, Instant)>,
    /// True once the peer has proven that it can access our memory.
    is_proven: AtomicBool,
    /// True once the connection or the wire has ended: lanes carry the remaining runs.
    is_over: AtomicBool,
    /// Why the connection has ended.
    end: OnceLock<Error>,
    regions: Regions,
    devices: Devices,
    /// Copiers that no thread uses: at most as many as threads have copied chunks at once.
    copiers: Mutex<Vec<Copier>>,
    /// Bytes copied.
    moved: AtomicU64,
}

impl SameHost {
    /// Makes the direct path of a connection. `refusal` tells why there is none to be established.
    pub(crate) fn new(
        context: &Arc<Context>,
        above: &Arc<dyn Above>,
        lanes: Weak<dyn Lanes>,
        refusal: Option<&str>,
    ) -> Arc<Self> {
        let decision = OnceLock::new();
        if let Some(refusal) = refusal {
            let _ = decision.set(Err(refusal.into()));
        }
        Arc::new_cyclic(|this| Self {
            this: this.clone(),
            context: Arc::clone(context),
            above: Arc::clone(above),
            lanes,
            decision,
            deadline: Instant::now() + patience(context),
            waiting: Mutex::new(Rank::Leaf, Vec::new()),
            wired: OnceLock::new(),
            lost: OnceLock::new(),
            is_proven: AtomicBool::new(false),
            is_over: AtomicBool::new(false),
            end: OnceLock::new(),
            regions: Regions::new(),
            devices: Devices::new(),
            copiers: Mutex::new(Rank::Leaf, Vec::new()),
            moved: AtomicU64::new(0),
        })
    }

    /// Returns whether it is still unknown whether this side can access the peer's memory.
    pub(crate) fn is_deciding(&self) -> bool {
        self.decision.get().is_none()
    }

    /// Returns whether the connection or the wire has ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    /// Returns the deadline for the decision.
    pub(crate) fn deadline(&self) -> Instant {
        self.lost.get().map_or(self.deadline, |lost| lost.1)
    }

    /// Returns a description for people.
    pub(crate) fn info(&self) -> SameHostInfo {
        SameHostInfo {
            why_not: match self.decision.get() {
                Some(Ok(())) => None,
                Some(Err(reason)) => Some(reason.to_string()),
                None => Some("the two sides have not found each other yet".into()),
            },
            bytes: self.moved.load(Ordering::Relaxed) + self.devices.moved(),
        }
    }

    /// Accepts a run, or returns false if lanes must carry it.
    pub(crate) fn submit(&self, run: &Arc<Run>) -> bool {
        // The READ of a tagged message has a new key each time:
        // opening it costs more than it saves.
        if matches!(run.after, After::Tell(_)) {
            return false;
        }
        match self.decision.get() {
            _ if self.has_ended() => false,
            Some(Ok(())) => {
                let is_taken = self.start(run);
                // The ending thread handles runs that were accepted before.
                if self.has_ended() {
                    self.abandon();
                }
                is_taken
            }
            Some(Err(reason)) => self.refuse(run, reason),
            None => {
                let mut waiting = self.waiting.lock();
                // Checked under the lock: the deciding thread takes all waiting runs.
                if self.is_deciding() {
                    run.note_wait();
                    waiting.push(Arc::clone(run));
                    return true;
                }
                drop(waiting);
                self.submit(run)
            }
        }
    }

    /// Leaves a run to lanes (returns false), or fails it if the setting forbids lanes.
    fn refuse(&self, run: &Arc<Run>, reason: &str) -> bool {
        if self.context.config.same_host() != SameHostKind::Require {
            return false;
        }
        run.fail_now(Error::NotSameHost {
            peer: self.above.name().to_owned(),
            reason: reason.to_owned(),
        });
        true
    }

    /// Starts a run if its regions are open; otherwise requests them.
    fn start(&self, run: &Arc<Run>) -> bool {
        loop {
            let keys = match self.regions.missing(run.plan.keys()) {
                Missing::Path(reason) => return self.refuse(run, &reason),
                Missing::Nothing => break,
                Missing::Answers(keys) => keys,
            };
            match self.regions.park(run, &keys) {
                Parked::Waits(requests) => {
                    self.ask(&requests);
                    return true;
                }
                Parked::Full => {
                    return self.refuse(run, "too many regions are requested at once");
                }
                Parked::Answered => {}
            }
        }
        if let Some(device) = run.plan.only_device() {
            return self.start_on_device(run, device);
        }
        // Between device and host memory, lanes copy ahead and in batches.
        let may_stage = self.context.config.same_host() == SameHostKind::Require;
        if run.plan.has_devices() && !may_stage {
            return false;
        }
        run.is_beside.store(true, Ordering::Relaxed);
        if run.plan.bytes <= INLINE_BYTES && !run.plan.has_devices() {
            while self.copy_chunk(run) == Step::Copied {}
        } else {
            self.context.desk.push(run, self.this(), run.plan.len());
        }
        true
    }

    fn ask(&self, requests: &[(u32, tcpx_proto::descriptor::RegionKey)]) {
        let Some(wired) = self.wired.get() else {
            return;
        };
        for &(request, key) in requests {
            if let Err(reason) = wired.line.send(&Message::Open { request, key }, Vec::new()) {
                return self.left(&reason);
            }
        }
        // The control thread detects missing answers.
        self.context.control.stay_awake();
    }

    fn this(&self) -> Arc<Self> {
        self.this.upgrade().expect("the caller holds a reference")
    }

    /// Records whether this side can access the peer's memory, once, and starts waiting runs.
    fn decide(&self, decision: Result<(), &str>) {
        if self.decision.set(decision.map_err(Into::into)).is_err() {
            return;
        }
        match decision {
            Ok(()) => limited!(
                EACH_PEER,
                INFO,
                peer = self.above.name(),
                "memory of this peer is copied directly: it is on this host"
            ),
            Err(reason) => limited!(
                EACH_PEER,
                INFO,
                peer = self.above.name(),
                reason,
                "this peer is on this host, but its memory cannot be copied directly"
            ),
        }
        let waiting = std::mem::take(&mut *self.waiting.lock());
        self.submit_again(waiting);
    }

    /// Continues runs that have waited.
    fn submit_again(&self, runs: Vec<Arc<Run>>) {
        for run in runs {
            if !self.submit(&run) {
                self.carry_by_lanes(&run);
            }
        }
    }

    /// Leaves the rest of an accepted run to lanes.
    fn carry_by_lanes(&self, run: &Arc<Run>) {
        run.is_beside.store(false, Ordering::Relaxed);
        match self.lanes.upgrade() {
            Some(lanes) => lanes.carry(run),
            None => run.fail_now(self.end_error()),
        }
    }

    /// Counts copied chunks of a run, unless it was aborted: then they may not have been copied.
    fn count(&self, run: &Run, chunks: u64, bytes: u64) {
        if !run.is_aborted() {
            let counters = self.above.counters();
            let is_write = run.plan.op == Op::Write;
            counters.moved(PathKind::SameHost, is_write, chunks, bytes);
        }
    }

    /// Settles chunks of a run.
    fn settle(&self, run: &Arc<Run>, chunks: u32) {
        match self.lanes.upgrade() {
            Some(lanes) => lanes.settle(run, chunks),
            None => {
                run.completion.record(self.end_error());
                if run.settle(chunks) {
                    run.conclude_failed();
                }
            }
        }
    }

    /// Passes on a run, after one of its chunks was returned, according to the trouble.
    fn pass_on(&self, run: &Arc<Run>, trouble: Trouble) {
        match trouble {
            Trouble::Failed(error) => run.fail_now(error),
            Trouble::Gate(gate) => {
                self.regions.forget(gate);
                if !self.submit(run) {
                    self.carry_by_lanes(run);
                }
            }
            Trouble::Gone => {
                self.carry_by_lanes(run);
                self.left("the other process has ended or has closed its socket");
            }
            Trouble::Path(reason) => {
                self.carry_by_lanes(run);
                self.left(&reason);
            }
        }
    }

    /// Leaves everything to lanes, or fails it if the setting forbids lanes, for this reason.
    pub(crate) fn give_up(&self, reason: &str) {
        self.decide(Err(reason));
    }

    /// Leaves runs that have waited for too long to lanes. Returns whether something is pending.
    pub(crate) fn look_after(&self, now: Instant) -> bool {
        if self.is_deciding() && now >= self.deadline() {
            let lost = self.lost.get().map(|lost| &*lost.0);
            self.give_up(lost.unwrap_or("the two sides did not find each other in time"));
        }
        if !self.regions.has_parked() {
            return self.is_deciding();
        }
        for run in self.regions.take_overdue(now, patience(&self.context)) {
            if !self.refuse(&run, "the peer did not open a region in time") {
                self.carry_by_lanes(&run);
            }
        }
        true
    }

    /// Leaves runs that were accepted after the end to lanes, which know how the connection ended.
    fn abandon(&self) {
        let left = [self.regions.clear(), self.context.desk.take(self)];
        for run in left.into_iter().flatten() {
            self.carry_by_lanes(&run);
        }
    }

    /// Waits for device copies of a run, or of revoked memory.
    pub(crate) fn wait_for_device(&self, run: Option<&Arc<Run>>) {
        self.devices.wait(|moving| match run {
            Some(run) => std::ptr::eq(moving, &**run),
            None => moving.plan.revoked().is_some(),
        });
    }

    /// Closes all gates for good.
    pub(crate) fn close_gates(&self) {
        if let Some(wired) = self.wired.get() {
            wired.grants.end();
        }
    }

    /// Returns why the connection has ended; the connection itself no longer exists.
    fn end_error(&self) -> Error {
        self.end.get().cloned().unwrap_or(Error::Closed)
    }

    /// Ends the direct path. Accepted runs fail with `error`.
    pub(crate) fn end(&self, error: &Error) {
        let _ = self.end.set(error.clone());
        self.close_gates();
        self.is_over.store(true, Ordering::Release);
        let _ = self.decision.set(Err("the connection has ended".into()));
        let mut left = std::mem::take(&mut *self.waiting.lock());
        left.append(&mut self.regions.clear());
        left.append(&mut self.context.desk.take(self));
        for run in left {
            run.fail_now(error.clone());
        }
        // From here on no thread copies: a thread that still holds a chunk has copied it.
        self.context.copies.quiesce();
        self.devices.wait(|_| true);
        self.finish_devices();
        self.context.forget_grants();
    }
}

impl Copying for SameHost {
    fn copy_chunk(&self, run: &Arc<Run>) -> Step {
        if run.plan.only_device().is_some() {
            return self.look_at_device(run);
        }
        let Some(chunk) = Offered::next(run) else {
            return Step::Over;
        };
        let trace = &self.context.trace;
        let began = trace.start();
        let copied = self.context.copies.guarded(|| self.copy(&chunk));
        trace.span(began, || of_copy(&chunk, copied.is_ok()));
        match copied {
            Ok(()) => {
                let bytes = chunk.bytes() as u64;
                self.moved.fetch_add(bytes, Ordering::Relaxed);
                self.count(run, 1, bytes);
                self.settle(run, 1);
            }
            Err(Trouble::Failed(error)) => {
                run.fail_now(error);
                self.settle(run, 1);
            }
            // From here on the run is passed on: this thread takes no more of its chunks.
            Err(trouble) => {
                self.context.desk.take_run(run);
                if self.give_back(&chunk) {
                    self.pass_on(run, trouble);
                }
                return Step::Over;
            }
        }
        Step::Copied
    }
}

/// Why a chunk was not copied.
enum Trouble {
    /// The chunk fails, as it would on lanes.
    Failed(Error),
    /// The owner has closed this gate: the region must be requested again.
    Gate(usize),
    /// The peer's process has ended: lanes report the cause.
    Gone,
    /// The peer's memory is no longer accessible.
    Path(String),
}
