//! WRITEs that follow aborted ones.
//!
//! Chunks of an aborted WRITE may be in flight, and may land after those of a later WRITE: on
//! another lane, or on a device that copies both. The application often does not wait for the end
//! of the abort: a request of NIXL that is released is gone. So a WRITE to memory that an aborted
//! one may still change begins when nothing of that one is in flight any more.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use tcpx_proto::lane::Op;

use super::peer::{PeerShared, Waiting};
use super::shared::SessionCore;
use crate::error::Error;
use crate::sync::{Mutex, Rank};
use crate::transfer::{Ranges, Run, Watcher};

/// The aborted WRITEs to one peer that have not ended, and the WRITEs that wait for them.
pub(super) struct Aborted {
    /// Length of `Writes::aborted`: posting looks at this without the lock.
    count: AtomicUsize,
    writes: Mutex<Writes>,
}

#[derive(Default)]
struct Writes {
    aborted: Vec<Write>,
    /// In the order of their postings.
    held: Vec<Write>,
}

/// A WRITE, and the peer's memory that it changes.
struct Write {
    run: Arc<Run>,
    ranges: Ranges,
}

impl Write {
    fn new(run: &Arc<Run>) -> Self {
        Self {
            run: Arc::clone(run),
            ranges: run.plan.remote_ranges(),
        }
    }

    fn has_ended(&self) -> bool {
        self.run.completion.state().is_terminal()
    }
}

impl Aborted {
    pub(super) fn new() -> Self {
        Self {
            count: AtomicUsize::new(0),
            writes: Mutex::new(Rank::Leaf, Writes::default()),
        }
    }

    fn add(&self, run: &Arc<Run>) {
        let write = Write::new(run);
        let mut writes = self.writes.lock();
        writes.aborted.push(write);
        self.count.store(writes.aborted.len(), Ordering::Release);
    }

    /// Returns whether a run must wait, and keeps it if so.
    fn holds(&self, core: &SessionCore, run: &Arc<Run>) -> bool {
        if self.count.load(Ordering::Acquire) == 0 || run.plan.op != Op::Write {
            return false;
        }
        let write = Write::new(run);
        let mut writes = self.writes.lock();
        // Closing takes the lock later, and fails what is held by then.
        let is_held = !core.is_closing() && writes.must_wait(&write);
        if is_held {
            writes.held.push(write);
        }
        is_held
    }

    /// Takes the runs that need not wait any more.
    fn take_free(&self) -> Vec<Arc<Run>> {
        let mut writes = self.writes.lock();
        // Dropped without the lock: a run may be the last holder of memory.
        let ended: Vec<_> = writes
            .aborted
            .extract_if(.., |write| write.has_ended())
            .collect();
        self.count.store(writes.aborted.len(), Ordering::Release);
        let held = std::mem::take(&mut writes.held);
        let (held, free) = held.into_iter().partition(|write| writes.must_wait(write));
        writes.held = held;
        drop(writes);
        drop(ended);
        runs(free)
    }

    fn take_all(&self) -> Vec<Arc<Run>> {
        let held = std::mem::take(&mut self.writes.lock().held);
        runs(held)
    }
}

impl Writes {
    /// Returns whether an aborted WRITE may still change memory that this one changes.
    fn must_wait(&self, write: &Write) -> bool {
        let mut aborted = self.aborted.iter();
        aborted.any(|aborted| !aborted.has_ended() && aborted.ranges.overlap(&write.ranges))
    }
}

fn runs(writes: Vec<Write>) -> Vec<Arc<Run>> {
    writes.into_iter().map(|write| write.run).collect()
}

/// Requests, at the end of an aborted run, that held runs are started.
#[derive(Debug)]
struct Release(Weak<PeerShared>);

impl Watcher for Release {
    fn ended(&self) {
        let peer = self.0.upgrade();
        if let Some((peer, home)) = peer.and_then(|peer| Some((Arc::clone(&peer), peer.home()?))) {
            home.parts.control.release(peer);
        }
    }
}

impl PeerShared {
    /// Keeps later WRITEs to the same memory back until an aborted WRITE has ended.
    pub(crate) fn note_aborted(self: &Arc<Self>, run: &Arc<Run>) {
        if run.plan.op != Op::Write {
            return;
        }
        self.aborted.add(run);
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
        for run in self.aborted.take_free() {
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
