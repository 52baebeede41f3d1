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
    /// Lengths of the lists at which runs that have ended are dropped from them.
    limits: (usize, usize),
}

/// A WRITE that waits.
struct Held {
    run: Arc<Run>,
    /// The aborted WRITE that it waits for; there may be others.
    blocker: Arc<Run>,
}

/// Maximum number of runs that are looked at, and started, under one lock of the peer's state.
const BATCH: usize = 64;

fn has_ended(run: &Run) -> bool {
    run.completion.state().is_terminal()
}

/// Removes what is over from a list that has doubled since the last time, or reached [`BATCH`].
/// Returns it: the last holder of a run must not drop it under a lock.
fn prune<T>(list: &mut Vec<T>, limit: &mut usize, is_over: impl Fn(&mut T) -> bool) -> Vec<T> {
    if list.len() < (*limit).max(BATCH) {
        return Vec::new();
    }
    let over = list.extract_if(.., is_over).collect();
    *limit = 2 * list.len();
    over
}

impl Aborted {
    pub(super) fn new() -> Self {
        Self {
            count: AtomicUsize::new(0),
            is_requested: AtomicBool::new(false),
            writes: Mutex::new(Rank::Leaf, Writes::default()),
        }
    }

    /// Adds an aborted WRITE; returns false if it was added before.
    fn add(&self, run: &Arc<Run>) -> bool {
        let mut writes = self.writes.lock();
        // Under the lock: another thread that aborts the run returns once it is in the list.
        if !run.note_abort() {
            return false;
        }
        let Writes {
            aborted, limits, ..
        } = &mut *writes;
        // The control thread does this as well, but may be busy.
        let over = prune(aborted, &mut limits.0, |run| has_ended(run));
        aborted.push(Arc::clone(run));
        self.count.store(aborted.len(), Ordering::Release);
        drop(writes);
        drop(over);
        true
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
        let Some(known) = self.compute_ranges() else {
            return Ok(false);
        };
        run.plan.remote_ranges();
        let mut writes = self.writes.lock();
        // Runs that were aborted while they were held.
        let Writes { held, limits, .. } = &mut *writes;
        let over = prune(held, &mut limits.1, |held| has_ended(&held.run));
        let outcome = match writes.blocker(run) {
            None => Ok(false),
            Some(_) if is_closing() => Err(Error::Closed),
            Some(blocker) => {
                // First: the run may be started once the lock is released.
                run.note_wait();
                note();
                let run = Arc::clone(run);
                writes.held.push(Held { run, blocker });
                Ok(true)
            }
        };
        drop(writes);
        drop((over, known));
        outcome
    }

    /// Computes the ranges of the aborted WRITEs without the lock, which every posting takes
    /// meanwhile. Returns the WRITEs for which that was necessary, to be dropped without a lock; or
    /// `None` if all have ended.
    fn compute_ranges(&self) -> Option<Vec<Arc<Run>>> {
        let mut is_any_left = false;
        let mut unknown = Vec::new();
        for run in &self.writes.lock().aborted {
            if !has_ended(run) {
                is_any_left = true;
                if !run.plan.knows_remote_ranges() {
                    unknown.push(Arc::clone(run));
                }
            }
        }
        for run in &unknown {
            run.plan.remote_ranges();
        }
        is_any_left.then_some(unknown)
    }

    /// Takes runs that need not wait any more, in the order of their postings. Adds what is not
    /// needed any more to `over`, to be dropped without a lock. Looks at no more than [`BATCH`] runs
    /// whose blocker has ended; returns whether there may be more.
    fn take_free(&self, over: &mut Vec<Arc<Run>>) -> (Vec<Arc<Run>>, bool) {
        // First: the end of a run that is not seen below is requested again. A swap, so that the
        // ends whose requests were saved are seen.
        self.is_requested.swap(false, Ordering::SeqCst);
        let mut writes = self.writes.lock();
        over.extend(writes.aborted.extract_if(.., |run| has_ended(run)));
        self.count.store(writes.aborted.len(), Ordering::Release);
        let (mut free, mut looks) = (Vec::new(), 0);
        for mut held in std::mem::take(&mut writes.held) {
            if has_ended(&held.run) {
                over.extend([held.run, held.blocker]);
                continue;
            }
            if has_ended(&held.blocker) && looks < BATCH {
                looks += 1;
                let Some(next) = writes.blocker(&held.run) else {
                    over.push(held.blocker);
                    free.push(held.run);
                    continue;
                };
                over.push(std::mem::replace(&mut held.blocker, next));
            }
            writes.held.push(held);
        }
        writes.limits = (2 * writes.aborted.len(), 2 * writes.held.len());
        (free, looks == BATCH)
    }

    /// Takes all runs that wait.
    pub(super) fn take_all(&self) -> Vec<Arc<Run>> {
        let held = std::mem::take(&mut self.writes.lock().held);
        held.into_iter().map(|held| held.run).collect()
    }

    /// Forgets the aborted WRITEs: nothing is posted any more.
    fn forget(&self) {
        let aborted = std::mem::take(&mut self.writes.lock().aborted);
        drop(aborted);
    }
}

impl Writes {
    /// Returns an aborted WRITE that was posted before this one, and may still change memory that
    /// this one changes.
    fn blocker(&self, run: &Run) -> Option<Arc<Run>> {
        let mine = run.plan.remote_ranges();
        let is_before = |aborted: &&Arc<Run>| aborted.id <= run.id && !has_ended(aborted);
        let mut others = self.aborted.iter().filter(is_before);
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
        let mut is_more = true;
        while is_more {
            // Without the lock under which the runs are started.
            let known = self.aborted.compute_ranges();
            let mut over = Vec::new();
            let refused = self.start_all(core, || {
                let free;
                (free, is_more) = self.aborted.take_free(&mut over);
                free
            });
            drop((over, known));
            for (run, error) in refused {
                run.fail_now(error);
            }
        }
    }

    /// Fails the WRITEs that wait for the end of an aborted one, once the session is closing.
    pub(crate) fn fail_held(&self, error: &Error) {
        for run in self.aborted.take_all() {
            run.fail_now(error.clone());
        }
        self.aborted.forget();
    }
}

#[cfg(test)]
mod tests {
    use tcpx_proto::info::ConnectionInfo;

    use super::*;
    use crate::testing::Pair;

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

    /// Takes free runs, and drops what is over.
    fn take_free(aborted: &Aborted) -> Vec<Arc<Run>> {
        drop(aborted.compute_ranges());
        aborted.take_free(&mut Vec::new()).0
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
        assert!(take_free(&aborted).is_empty());
        end(&blockers[0]);
        assert_eq!(ids(&take_free(&aborted)), ids(&held[3..]));
        end(&blockers[1]);
        assert_eq!(ids(&take_free(&aborted)), ids(&held[..1]));
        // Aborted meanwhile: neither free nor kept.
        end(&held[1]);
        end(&blockers[2]);
        assert_eq!(ids(&take_free(&aborted)), ids(&held[2..3]));
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

    /// Otherwise a WRITE would wait as long as others are posted and aborted.
    #[test]
    fn a_write_does_not_wait_for_those_posted_after_it() {
        let at = |id, to| {
            let mut run = Run::untouched_write(to);
            run.id = id;
            Arc::new(run)
        };
        let aborted = Aborted::new();
        let (first, held, later) = (at(1, 0..50), at(2, 0..100), at(3, 60..70));
        aborted.add(&first);
        assert!(is_held(&aborted, &held));
        aborted.add(&later);
        end(&first);
        assert_eq!(ids(&take_free(&aborted)), ids(&[held]));
        assert!(is_held(&aborted, &at(4, 65..66)));
    }

    #[test]
    fn runs_that_have_ended_are_let_go_before_there_are_many() {
        let aborted = Aborted::new();
        let blocker = write(0..100);
        aborted.add(&blocker);
        let lens = || {
            let writes = aborted.writes.lock();
            (writes.held.len(), writes.aborted.len())
        };
        for i in 1..10 * BATCH {
            let held = write(0..100);
            assert!(is_held(&aborted, &held));
            end(&held);
            let other = write(200..300);
            aborted.add(&other);
            end(&other);
            // Not searched while they are short.
            assert!(i >= BATCH || lens() == (i, (i + 1).min(BATCH)));
            assert!(lens().0 <= BATCH && lens().1 <= BATCH);
        }
        assert!(take_free(&aborted).is_empty());
        assert!(aborted.take_all().is_empty());
        assert_eq!(aborted.count.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn ranges_are_computed_once() {
        let aborted = Aborted::new();
        let blocker = write(0..100);
        aborted.add(&blocker);
        let computed = aborted.compute_ranges().unwrap();
        assert_eq!(ids(&computed), ids(std::slice::from_ref(&blocker)));
        assert!(aborted.compute_ranges().unwrap().is_empty());
        end(&blocker);
        assert!(aborted.compute_ranges().is_none());
    }

    /// Makes a peer of a session that is gone.
    fn orphan(pair: &Pair) -> Arc<PeerShared> {
        let info = ConnectionInfo::decode(&pair.bob.connection_info()).unwrap();
        PeerShared::new("bob", info.id(), pair.alice.core().context(), Weak::new())
    }

    #[test]
    fn writes_that_wait_while_the_session_closes_fail() {
        let pair = Pair::new();
        let peer = orphan(&pair);
        let (blocker, other, held) = (write(0..100), write(200..300), write(0..100));
        peer.note_aborted(&blocker);
        peer.note_aborted(&other);
        assert!(is_held(&peer.aborted, &held));
        end(&blocker);
        assert_eq!(held.completion.error(), Some(Error::Closed));
        assert!(
            [blocker, other]
                .iter()
                .all(|run| Arc::strong_count(run) == 1)
        );
    }

    /// More than are started under one lock; each is refused, since there is no way to the peer.
    #[test]
    fn all_that_are_free_are_started() {
        let pair = Pair::new();
        let peer = orphan(&pair);
        let blocker = write(0..100);
        peer.aborted.add(&blocker);
        let held: Vec<_> = (0..3 * BATCH).map(|_| write(0..100)).collect();
        for run in &held {
            assert!(is_held(&peer.aborted, run));
        }
        end(&blocker);
        peer.release(pair.alice.core());
        assert!(held.iter().all(|run| has_ended(run)));
    }
}
