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

/// The aborted WRITEs to one peer that have not ended, and the WRITEs that wait for them. A WRITE
/// that was released too late to be aborted counts as aborted: its bytes are in flight as well.
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
    held: Vec<Held>,
}

/// A WRITE that waits.
struct Held {
    run: Arc<Run>,
    /// The aborted WRITE that it waits for; there may be others.
    blocker: Arc<Run>,
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
        let mut writes = self.writes.lock();
        let is_new = !writes.aborted.iter().any(|known| Arc::ptr_eq(known, run));
        if is_new {
            writes.aborted.push(Arc::clone(run));
            self.count.store(writes.aborted.len(), Ordering::Release);
        }
        is_new
    }

    /// Returns whether a run must wait, and keeps it if so, after a call of `note`. Closing must be
    /// visible to `is_closing` before it takes what is held.
    ///
    /// # Errors
    /// It must wait, and the session is closing: there is nobody to start it.
    fn holds(
        &self,
        run: &Arc<Run>,
        is_closing: impl FnOnce() -> bool,
        note: impl FnOnce(),
    ) -> Result<bool, Error> {
        if self.count.load(Ordering::Acquire) == 0 || run.plan.op != Op::Write {
            return Ok(false);
        }
        run.plan.remote_ranges();
        let known = self.compute_ranges();
        let mut writes = self.writes.lock();
        // Runs that were aborted while they were held. Dropped without the lock: a run may be the
        // last holder of memory.
        let is_over = |held: &mut Held| has_ended(&held.run);
        let ended: Vec<_> = writes.held.extract_if(.., is_over).collect();
        let outcome = match writes.blocker(run) {
            None => Ok(false),
            Some(_) if is_closing() => Err(Error::Closed),
            Some(blocker) => {
                // First: another thread may start the run at once.
                run.note_wait();
                note();
                let run = Arc::clone(run);
                writes.held.push(Held { run, blocker });
                Ok(true)
            }
        };
        drop(writes);
        drop((ended, known));
        outcome
    }

    /// Computes the ranges of the aborted WRITEs without the lock, which every posting takes
    /// meanwhile. Returns them, since the last holder of a run must not drop it under the lock.
    fn compute_ranges(&self) -> Vec<Arc<Run>> {
        let known = self.writes.lock().aborted.clone();
        for aborted in known.iter().filter(|run| !has_ended(run)) {
            aborted.plan.remote_ranges();
        }
        known
    }

    /// Takes the runs that need not wait any more, in the order of their postings.
    fn take_free(&self) -> Vec<Arc<Run>> {
        // First: the end of a run that is not seen below is requested again. A swap, so that the
        // ends whose requests were saved are seen.
        self.is_requested.swap(false, Ordering::SeqCst);
        let is_any_held = !self.writes.lock().held.is_empty();
        let known = is_any_held.then(|| self.compute_ranges());
        let mut writes = self.writes.lock();
        // Dropped without the lock, as in `holds`.
        let mut ended: Vec<_> = writes
            .aborted
            .extract_if(.., |run| has_ended(run))
            .collect();
        self.count.store(writes.aborted.len(), Ordering::Release);
        let mut free = Vec::new();
        for Held { run, blocker } in std::mem::take(&mut writes.held) {
            let next = match has_ended(&blocker) {
                true => writes.blocker(&run),
                false => Some(Arc::clone(&blocker)),
            };
            ended.push(blocker);
            match next {
                _ if has_ended(&run) => ended.push(run),
                Some(blocker) => writes.held.push(Held { run, blocker }),
                None => free.push(run),
            }
        }
        drop(writes);
        drop((ended, known));
        free
    }

    /// Takes all runs that wait.
    pub(super) fn take_all(&self) -> Vec<Arc<Run>> {
        let held = std::mem::take(&mut self.writes.lock().held);
        held.into_iter().map(|held| held.run).collect()
    }
}

impl Writes {
    /// Returns an aborted WRITE that may still change memory that this one changes.
    fn blocker(&self, run: &Run) -> Option<Arc<Run>> {
        let mine = run.plan.remote_ranges();
        let mut others = self.aborted.iter().filter(|aborted| !has_ended(aborted));
        let blocker = others.find(|aborted| aborted.plan.remote_ranges().overlap(mine));
        blocker.cloned()
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
    ///
    /// # Errors
    /// It must wait, and the session is closing.
    pub(super) fn holds(&self, core: &SessionCore, work: &Waiting) -> Result<bool, Error> {
        match work {
            Waiting::Run(run) => {
                let note = || self.trace_wait(run);
                self.aborted.holds(run, || core.is_closing(), note)
            }
            Waiting::Notification(_) | Waiting::Send(_) => Ok(false),
        }
    }

    /// Starts the WRITEs that need not wait for an aborted one any more.
    pub(crate) fn release(self: &Arc<Self>, core: &SessionCore) {
        for (run, error) in self.start_all(core, || self.aborted.take_free()) {
            run.fail_now(error);
        }
    }

    /// Fails the WRITEs that wait for the end of an aborted one.
    pub(crate) fn fail_held(&self, error: &Error) {
        for run in self.aborted.take_all() {
            run.fail_now(error.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(to: std::ops::Range<u64>) -> Arc<Run> {
        Arc::new(Run::untouched_write(to))
    }

    fn end(run: &Run) {
        run.fail_now(Error::Aborted);
    }

    /// Returns whether a run is held while the session is open.
    fn is_held(aborted: &Aborted, run: &Arc<Run>) -> bool {
        aborted.holds(run, || false, || {}).unwrap()
    }

    fn ids(runs: &[Arc<Run>]) -> Vec<*const Run> {
        runs.iter().map(Arc::as_ptr).collect()
    }

    #[test]
    fn only_writes_to_the_same_memory_wait() {
        let aborted = Aborted::new();
        let first = write(4096..8192);
        assert!(!is_held(&aborted, &write(0..10_000)));
        assert!(aborted.add(&first) && !aborted.add(&first));
        for (to, waits) in [
            (0..4096, false),
            (8192..9000, false),
            (0..4097, true),
            (5000..5001, true),
            (8191..9000, true),
        ] {
            assert_eq!(is_held(&aborted, &write(to.clone())), waits, "{to:?}");
        }
        assert!(!is_held(&aborted, &Arc::new(Run::untouched(1))));
        let while_closing = |run| aborted.holds(&run, || true, || unreachable!("it is not kept"));
        assert_eq!(while_closing(write(5000..5001)), Err(Error::Closed));
        assert_eq!(while_closing(write(9000..9001)), Ok(false));
        end(&first);
        assert!(!is_held(&aborted, &write(5000..5001)));
    }

    #[test]
    fn held_writes_are_free_when_nothing_blocks_them_any_more() {
        let aborted = Aborted::new();
        let blockers = [write(0..100), write(50..200), write(300..400)];
        for blocker in &blockers {
            aborted.add(blocker);
        }
        let held = [
            write(0..150),
            write(60..400),
            write(350..360),
            write(10..20),
        ];
        for run in &held {
            assert!(is_held(&aborted, run));
        }
        assert!(aborted.take_free().is_empty());
        end(&blockers[0]);
        assert_eq!(ids(&aborted.take_free()), ids(&held[3..]));
        end(&blockers[1]);
        assert_eq!(ids(&aborted.take_free()), ids(&held[..1]));
        // Aborted meanwhile: neither free nor kept.
        end(&held[1]);
        end(&blockers[2]);
        assert_eq!(ids(&aborted.take_free()), ids(&held[2..3]));
        assert_eq!(aborted.count.load(Ordering::Relaxed), 0);
        assert!(aborted.take_all().is_empty());
        let writes = aborted.writes.lock();
        assert!(writes.aborted.is_empty());
        drop(writes);
        assert!(
            [&blockers[..], &held[..]]
                .concat()
                .iter()
                .all(|run| Arc::strong_count(run) == 2)
        );
    }

    #[test]
    fn writes_that_ended_while_they_were_held_are_let_go() {
        let aborted = Aborted::new();
        let blocker = write(0..100);
        aborted.add(&blocker);
        let held = write(0..100);
        assert!(is_held(&aborted, &held));
        end(&held);
        // With the next posting, and without one.
        assert!(is_held(&aborted, &write(1..2)));
        assert_eq!(Arc::strong_count(&held), 1);
        let held = write(0..100);
        assert!(is_held(&aborted, &held));
        end(&held);
        assert!(aborted.take_free().is_empty());
        assert_eq!(Arc::strong_count(&held), 1);
        assert_eq!(aborted.take_all().len(), 1);
    }
}
