//! WRITEs that follow aborted ones.
//!
//! Chunks of an aborted WRITE may be in flight, and may land after those of a later WRITE: on
//! another lane, or on a device that copies both. The application often does not wait for the end
//! of the abort: a request of NIXL that is released is gone. So a WRITE to memory that an aborted
//! one may still change begins when nothing of that one is in flight any more.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use tcpx_proto::lane::Op;

use super::peer::{PeerShared, Waiting};
use super::shared::SessionCore;
use crate::error::Error;
use crate::sync::{Mutex, Rank};
use crate::transfer::{Run, Watcher};

/// The aborted WRITEs to one peer that have not ended, and the WRITEs that wait for them.
pub(super) struct Aborted {
    /// Length of `Writes::aborted`: posting looks at this without the lock.
    count: AtomicUsize,
    /// True from a request to release runs until that begins: one request serves many ends.
    is_requested: AtomicBool,
    writes: Mutex<Writes>,
}

#[derive(Default)]
struct Writes {
    aborted: Vec<Arc<Run>>,
    held: Vec<Arc<Run>>,
}

fn has_ended(run: &Run) -> bool {
    run.completion.state().is_terminal()
}

impl Aborted {
    pub(super) fn new() -> Self {
        Self {
            count: AtomicUsize::new(0),
            is_requested: AtomicBool::new(false),
            writes: Mutex::new(Rank::Leaf, Writes::default()),
        }
    }

    /// Adds an aborted WRITE; returns false if it is known.
    fn add(&self, run: &Arc<Run>) -> bool {
        // Computed without the lock, which every posting takes meanwhile.
        run.plan.remote_ranges();
        let mut writes = self.writes.lock();
        let is_new = !writes.aborted.iter().any(|known| Arc::ptr_eq(known, run));
        if is_new {
            writes.aborted.push(Arc::clone(run));
            self.count.store(writes.aborted.len(), Ordering::Release);
        }
        is_new
    }

    /// Returns whether a run must wait, and keeps it if so.
    fn holds(&self, core: &SessionCore, run: &Arc<Run>) -> bool {
        if self.count.load(Ordering::Acquire) == 0 || run.plan.op != Op::Write {
            return false;
        }
        run.plan.remote_ranges();
        let mut writes = self.writes.lock();
        // Runs that were aborted while they were held. Dropped without the lock: a run may be the
        // last holder of memory.
        let ended: Vec<_> = writes.held.extract_if(.., |run| has_ended(run)).collect();
        // Closing takes the lock later, and fails what is held by then.
        let is_held = !core.is_closing() && writes.must_wait(run);
        if is_held {
            writes.held.push(Arc::clone(run));
        }
        drop(writes);
        drop(ended);
        is_held
    }

    /// Takes the runs that need not wait any more, in the order of their postings.
    fn take_free(&self) -> Vec<Arc<Run>> {
        // First: the end of a run that is not seen below is requested again.
        self.is_requested.store(false, Ordering::SeqCst);
        let mut writes = self.writes.lock();
        // Dropped without the lock, as in `holds`.
        let ended: Vec<_> = writes
            .aborted
            .extract_if(.., |run| has_ended(run))
            .collect();
        self.count.store(writes.aborted.len(), Ordering::Release);
        let held = std::mem::take(&mut writes.held);
        let (held, free) = held.into_iter().partition(|run| writes.must_wait(run));
        writes.held = held;
        drop(writes);
        drop(ended);
        free
    }

    fn take_all(&self) -> Vec<Arc<Run>> {
        std::mem::take(&mut self.writes.lock().held)
    }
}

impl Writes {
    /// Returns whether an aborted WRITE may still change memory that this one changes.
    fn must_wait(&self, run: &Run) -> bool {
        let mine = run.plan.remote_ranges();
        let mut others = self.aborted.iter().filter(|aborted| !has_ended(aborted));
        others.any(|aborted| aborted.plan.remote_ranges().overlap(mine))
    }
}

/// Requests, at the end of an aborted run, that held runs are started.
#[derive(Debug)]
struct Release(Weak<PeerShared>);

impl Watcher for Release {
    fn ended(&self) {
        let Some(peer) = self.0.upgrade() else { return };
        if peer.aborted.is_requested.swap(true, Ordering::SeqCst) {
            return;
        }
        let home = peer.home();
        let is_asked = home.is_some_and(|home| home.parts.control.release(Arc::clone(&peer)));
        if !is_asked {
            // The session has closed.
            peer.fail_held(&Error::Closed);
        }
    }
}

impl PeerShared {
    /// Keeps later WRITEs to the same memory back until a WRITE that is being aborted has ended.
    /// Must be called before anything shows that it is aborted. May be called for a run that can no
    /// longer be aborted, or repeatedly.
    pub(crate) fn note_aborted(self: &Arc<Self>, run: &Arc<Run>) {
        if run.plan.op != Op::Write || !self.aborted.add(run) {
            return;
        }
        let release = Arc::new(Release(Arc::downgrade(self)));
        if !run.completion.watch(release.clone()) {
            // The run has ended meanwhile.
            release.ended();
        }
    }

    /// Returns whether work must wait for the end of an aborted WRITE, and keeps it if so.
    pub(super) fn holds(&self, core: &SessionCore, work: &Waiting) -> bool {
        match work {
            Waiting::Run(run) => self.aborted.holds(core, run),
            Waiting::Notification(_) | Waiting::Send(_) => false,
        }
    }

    /// Starts the WRITEs that need not wait for an aborted one any more.
    pub(crate) fn release(self: &Arc<Self>, core: &SessionCore) {
        let free = self.aborted.take_free();
        for run in free.into_iter().filter(|run| !has_ended(run)) {
            if let Err(error) = self.start(core, Waiting::Run(Arc::clone(&run))) {
                run.fail_now(error);
            }
        }
    }

    /// Fails the WRITEs that wait for the end of an aborted one.
    pub(crate) fn fail_held(&self, error: &Error) {
        for run in self.aborted.take_all() {
            run.fail_now(error.clone());
        }
    }
}
