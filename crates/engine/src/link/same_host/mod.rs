//! Memory of a session on the same host: copied by whoever asks, without the network.
//!
//! Two sessions that have a connection within one machine find each other on a Unix socket and prove
//! that each can reach the other's memory ([`exchange`]). From then on a run is moved by threads of
//! the session that posts it: host memory by one system call of the kernel ([`copy`]), memory of a
//! device by the device itself, which has the peer's memory mapped ([`device`]). The connection goes
//! on carrying messages, and everything that cannot be moved like this.
//!
//! Keys and bounds are those that the owner gives out ([`regions`]), and a gate that the owner can
//! close stands before each access ([`grants`]).

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
use self::regions::{Missing, Regions};
use self::wired::Wired;
use super::desk::{Copying, INLINE_BYTES, Step};
use super::{Above, Context, SameHostInfo};
use crate::config::SameHostKind;
use crate::error::Error;
use crate::log::limited;
use crate::sync::{Mutex, Rank};
use crate::transfer::{After, Offered, Run};

/// Gates that either side has for the other: regions that are open at the same time.
const GATES: usize = 4096;

/// How long the two sides may take to find each other, and an answer to come. Then lanes do it.
const PATIENCE: Duration = Duration::from_secs(1);

/// The same where lanes must not do it.
const LONG_PATIENCE: Duration = Duration::from_secs(10);

fn patience(context: &Context) -> Duration {
    match context.config.same_host() {
        SameHostKind::Require => LONG_PATIENCE,
        SameHostKind::Auto | SameHostKind::Off => PATIENCE,
    }
}

/// The lanes of the connection, which carry what cannot be copied.
pub(crate) trait Lanes: Send + Sync {
    /// Moves what is left of a run.
    fn carry(&self, run: &Arc<Run>);

    /// Settles chunks of a run, and concludes it if they were the last.
    fn settle(&self, run: &Arc<Run>, chunks: u32);
}

/// The peer of a connection, where it is on the same host.
pub(crate) struct SameHost {
    this: Weak<Self>,
    context: Arc<Context>,
    above: Arc<dyn Above>,
    lanes: Weak<dyn Lanes>,
    /// Whether this side can reach the peer's memory; otherwise why not. None until it is known.
    decision: OnceLock<Result<(), Arc<str>>>,
    /// Until when it must be known.
    deadline: Instant,
    /// Runs that wait for the decision.
    waiting: Mutex<Vec<Arc<Run>>>,
    wired: OnceLock<Wired>,
    /// The peer has shown that it can reach our memory.
    is_proven: AtomicBool,
    /// The connection, or the wire, has ended: lanes do what is left.
    is_over: AtomicBool,
    /// Why the connection has ended.
    end: OnceLock<Error>,
    regions: Regions,
    devices: Devices,
    /// Bytes that were copied.
    moved: AtomicU64,
}

impl SameHost {
    /// Makes one for a connection. `refusal` says why there is nothing to be found out.
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
            is_proven: AtomicBool::new(false),
            is_over: AtomicBool::new(false),
            end: OnceLock::new(),
            regions: Regions::new(),
            devices: Devices::new(),
            moved: AtomicU64::new(0),
        })
    }

    /// Whether it is not known yet whether this side can reach the peer's memory.
    pub(crate) fn is_deciding(&self) -> bool {
        self.decision.get().is_none()
    }

    /// Whether the connection, or the wire, has ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    /// Until when it must be known.
    pub(crate) fn deadline(&self) -> Instant {
        self.deadline
    }

    /// What people are shown.
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

    /// Takes a run on, or says that lanes must carry it.
    pub(crate) fn submit(&self, run: &Arc<Run>) -> bool {
        // What reads a tagged message has a key of its own each time: opening that costs more than it
        // saves.
        if matches!(run.after, After::Tell(_)) {
            return false;
        }
        match self.decision.get() {
            _ if self.has_ended() => false,
            Some(Ok(())) => {
                let is_taken = self.start(run);
                // Whoever ends it takes what was taken on before.
                if self.has_ended() {
                    self.abandon();
                }
                is_taken
            }
            Some(Err(reason)) => self.refuse(run, reason),
            None => {
                let mut waiting = self.waiting.lock();
                // With the lock: whoever decides takes what waits.
                if self.is_deciding() {
                    waiting.push(Arc::clone(run));
                    return true;
                }
                drop(waiting);
                self.submit(run)
            }
        }
    }

    /// Leaves a run to lanes, or fails it where that is not wanted.
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

    /// Starts a run whose regions are open; opens those that are not.
    fn start(&self, run: &Arc<Run>) -> bool {
        match self.regions.missing(run.plan.keys()) {
            Missing::Path(reason) => return self.refuse(run, &reason),
            Missing::Answers(keys) => {
                let Some(requests) = self.regions.park(run, &keys) else {
                    return self.refuse(run, "too many regions are asked for at once");
                };
                self.ask(&requests);
                return true;
            }
            Missing::Nothing => {}
        }
        if let Some(device) = run.plan.only_device() {
            return self.start_on_device(run, device);
        }
        // Between a device and host memory, lanes copy ahead and in batches.
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
        // Answers that do not come are noticed there.
        self.context.control.stay_awake();
    }

    fn this(&self) -> Arc<Self> {
        self.this.upgrade().expect("whoever calls holds it")
    }

    /// Notes whether this side can reach the peer's memory, once, and starts what has waited.
    fn decide(&self, decision: Result<(), &str>) {
        if self.decision.set(decision.map_err(Into::into)).is_err() {
            return;
        }
        match decision {
            Ok(()) => limited!(
                INFO,
                peer = self.above.name(),
                "memory of this peer is copied directly: it is on this host"
            ),
            Err(reason) => limited!(
                INFO,
                peer = self.above.name(),
                reason,
                "this peer is on this host, but its memory cannot be copied directly: lanes carry it"
            ),
        }
        let waiting = std::mem::take(&mut *self.waiting.lock());
        self.submit_again(waiting);
    }

    /// Goes on with runs that have waited.
    fn submit_again(&self, runs: Vec<Arc<Run>>) {
        for run in runs {
            if !self.submit(&run) {
                self.carry_by_lanes(&run);
            }
        }
    }

    /// Has lanes carry what is left of a run that was taken on.
    fn carry_by_lanes(&self, run: &Arc<Run>) {
        run.is_beside.store(false, Ordering::Relaxed);
        match self.lanes.upgrade() {
            Some(lanes) => lanes.carry(run),
            None => run.fail_now(self.end_error()),
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

    /// Leaves a run, of which a chunk was given back, to whoever can go on with it.
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

    /// Leaves everything to lanes, or fails it where that is not wanted, for this reason.
    pub(crate) fn give_up(&self, reason: &str) {
        self.decide(Err(reason));
    }

    /// Leaves to lanes what has waited for too long. Returns whether something waits.
    pub(crate) fn look_after(&self, now: Instant) -> bool {
        if self.is_deciding() && now >= self.deadline {
            self.give_up("the two sides did not find each other in time");
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

    /// Moves what can be moved for a caller who polls a run that is copied.
    pub(crate) fn drive_for(&self, run: &Run) {
        self.context.desk.step_for(run);
    }

    /// Leaves what was taken on after the end to lanes, which know how it has ended.
    fn abandon(&self) {
        let left = [self.regions.clear(), self.context.desk.take(self)];
        for run in left.into_iter().flatten() {
            self.carry_by_lanes(&run);
        }
    }

    /// Waits for what a device copies of a run, or of memory that was revoked.
    pub(crate) fn wait_for_device(&self, run: Option<&Arc<Run>>) {
        self.devices.wait(|moving| match run {
            Some(run) => std::ptr::eq(moving, &**run),
            None => moving.plan.revoked().is_some(),
        });
    }

    /// Lets nobody in from here on.
    pub(crate) fn close_gates(&self) {
        if let Some(wired) = self.wired.get() {
            wired.grants.end();
        }
    }

    /// Why the connection has ended, which is no longer there to be asked.
    fn end_error(&self) -> Error {
        self.end.get().cloned().unwrap_or(Error::Closed)
    }

    /// Ends it. What was taken on fails with `error`.
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
        // From here on no thread copies: whoever still holds a chunk has copied it.
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
        match self.context.copies.guarded(|| self.copy(&chunk)) {
            Ok(()) => {
                let bytes = chunk.bytes() as u64;
                self.moved.fetch_add(bytes, Ordering::Relaxed);
                self.settle(run, 1);
            }
            Err(Trouble::Failed(error)) => {
                run.fail_now(error);
                self.settle(run, 1);
            }
            // From here on the run is somebody else's: this thread takes no more of its chunks.
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
    /// It fails, as it would on lanes.
    Failed(Error),
    /// The owner has closed this gate: it has to be asked again.
    Gate(usize),
    /// The peer has ended: lanes know how.
    Gone,
    /// The peer's memory cannot be reached any more.
    Path(String),
}
