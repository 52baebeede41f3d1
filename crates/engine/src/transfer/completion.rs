//! The end of a transfer, and how its owner learns of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use super::events::Queue;
use crate::error::Error;
use crate::stats::{Meter, Outcome};
use crate::sync::{Condvar, Mutex, Rank};
use crate::trace::{End, TransferTrace};

/// State of a transfer.
///
/// ```text
/// Prepared ──post──► InProgress ──► Done ──post──► InProgress …
///                        │  └─────► Failed
///                        └─abort──► Aborting ──► Aborted
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum TransferState {
    /// Never posted.
    Prepared = 0,
    /// Posted; bytes may be moving.
    InProgress = 1,
    /// Every byte is in place.
    Done = 2,
    /// The transfer failed; [`Transfer::error`](crate::Transfer::error) returns the reason.
    Failed = 3,
    /// Aborted by this side; bytes in flight may still land at the peer.
    Aborting = 4,
    /// Aborted, and nothing is in flight any more.
    Aborted = 5,
}

impl TransferState {
    /// Returns whether the state remains until the transfer is posted again.
    #[must_use]
    pub fn is_terminal(self) -> bool {
        matches!(self, Self::Done | Self::Failed | Self::Aborted)
    }

    fn from_u8(value: u8) -> Self {
        match value {
            0 => Self::Prepared,
            1 => Self::InProgress,
            2 => Self::Done,
            3 => Self::Failed,
            4 => Self::Aborting,
            _ => Self::Aborted,
        }
    }
}

/// The end of one posted operation: set once, observed by any thread.
///
/// Begins as in progress. [`Completion::record`] keeps the first error, [`Completion::begin_abort`]
/// or [`Completion::commit`] decides whether the operation may still be aborted,
/// [`Completion::decide`] whether it may still fail, and [`Completion::finish`] ends it and wakes
/// all waiters. Changes happen under one lock; reading the state takes none.
#[derive(Debug)]
pub(crate) struct Completion {
    state: AtomicU8,
    /// Guards changes of `state` as well, so that a waiter cannot miss one.
    ending: Mutex<Ending>,
    changed: Condvar,
    /// Counts the operation, if it is a counted one.
    meter: Option<Meter>,
    /// Records its end, where there is a trace.
    trace: Option<TransferTrace>,
}

/// Learns of the end of an operation, on the thread that ends it. Called with no lock of the
/// completion held.
pub(crate) trait Watcher: Send + Sync + std::fmt::Debug {
    fn ended(&self);
}

#[derive(Debug, Default)]
struct Ending {
    /// The first error.
    error: Option<Error>,
    verdict: Verdict,
    /// Event loops to notify of the end, each with its key. Empty once the operation has ended.
    armed: Vec<(Arc<Queue>, u64)>,
    watcher: Option<Arc<dyn Watcher>>,
}

/// What can still become of an operation without an error.
#[derive(Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Verdict {
    #[default]
    Open,
    /// The notification is being sent: too late to abort.
    Committed,
    /// The operation has succeeded: errors are no longer recorded.
    Succeeded,
}

impl Completion {
    /// Makes the completion of an operation that is not counted.
    pub(crate) fn new() -> Self {
        Self {
            meter: None,
            trace: None,
            state: AtomicU8::new(TransferState::InProgress as u8),
            ending: Mutex::new(Rank::Completion, Ending::default()),
            changed: Condvar::new(),
        }
    }

    /// Makes the completion of an operation that is counted until it ends, and recorded if there is a
    /// trace.
    pub(crate) fn metered(meter: Meter, trace: Option<TransferTrace>) -> Self {
        Self {
            meter: Some(meter),
            trace,
            ..Self::new()
        }
    }

    /// Sets the length of an operation that was unknown at its start.
    pub(crate) fn set_bytes(&self, bytes: u64) {
        if let Some(meter) = &self.meter {
            meter.set_bytes(bytes);
        }
    }

    #[inline]
    pub(crate) fn state(&self) -> TransferState {
        TransferState::from_u8(self.state.load(Ordering::Acquire))
    }

    pub(crate) fn error(&self) -> Option<Error> {
        self.ending.lock().error.clone()
    }

    /// Notifies `queue` of the end, once, unless the operation has already ended.
    /// Returns the state.
    pub(crate) fn arm(&self, queue: &Arc<Queue>, key: u64) -> TransferState {
        let mut ending = self.ending.lock();
        let state = self.state();
        let is_armed = |(known, its): &(Arc<Queue>, u64)| Arc::ptr_eq(known, queue) && *its == key;
        if !state.is_terminal() && !ending.armed.iter().any(is_armed) {
            ending.armed.push((Arc::clone(queue), key));
        }
        state
    }

    /// Calls `watcher` at the end of the operation. Returns false, and never calls it, if the
    /// operation has already ended. There is one watcher at most.
    pub(crate) fn watch(&self, watcher: Arc<dyn Watcher>) -> bool {
        let mut ending = self.ending.lock();
        let is_in_time = !self.state().is_terminal();
        if is_in_time {
            debug_assert!(ending.watcher.is_none(), "a second watcher");
            ending.watcher = Some(watcher);
        }
        is_in_time
    }

    /// Records the first error of an operation, unless the operation has already succeeded.
    pub(crate) fn record(&self, error: Error) {
        let mut ending = self.ending.lock();
        if ending.verdict < Verdict::Succeeded {
            ending.error.get_or_insert(error);
        }
    }

    /// Begins to abort the operation; returns false if it has ended or was committed.
    pub(crate) fn begin_abort(&self) -> bool {
        let mut ending = self.ending.lock();
        if self.state() != TransferState::InProgress || ending.verdict > Verdict::Open {
            return false;
        }
        ending.error.get_or_insert(Error::Aborted);
        self.state
            .store(TransferState::Aborting as u8, Ordering::Release);
        true
    }

    #[inline]
    pub(crate) fn is_aborting(&self) -> bool {
        self.state() == TransferState::Aborting
    }

    /// Ends the operation: aborted if an abort was requested, failed if an error was recorded, done
    /// otherwise. Returns the final state.
    pub(crate) fn finish(&self) -> TransferState {
        let mut ending = self.ending.lock();
        let before = self.state();
        let state = match before {
            TransferState::InProgress if ending.error.is_none() => TransferState::Done,
            TransferState::InProgress => TransferState::Failed,
            TransferState::Aborting => TransferState::Aborted,
            ended => ended,
        };
        // Counted before any thread can see the end.
        if let Some(meter) = self.meter.as_ref().filter(|_| !before.is_terminal()) {
            meter.end(match (state, &ending.error) {
                (TransferState::Done, _) => Outcome::Completed,
                (TransferState::Failed, Some(error)) => Outcome::Failed(error.kind()),
                _ => Outcome::Aborted,
            });
        }
        if let Some(trace) = self.trace.as_ref().filter(|_| !before.is_terminal()) {
            let end = match state {
                TransferState::Done => End::Done,
                TransferState::Failed => End::Failed,
                _ => End::Aborted,
            };
            trace.ended(end, ending.error.as_ref());
        }
        self.state.store(state as u8, Ordering::Release);
        let armed = std::mem::take(&mut ending.armed);
        let watcher = ending.watcher.take();
        drop(ending);
        self.changed.notify_all();
        for (queue, key) in armed {
            queue.ended(key);
        }
        if let Some(watcher) = watcher {
            watcher.ended();
        }
        state
    }

    /// Decides that the peer will be notified: from here on the operation cannot be aborted.
    /// Returns false if it was aborted or has failed; then the peer must not be notified.
    pub(crate) fn commit(&self) -> bool {
        self.reach(Verdict::Committed)
    }

    /// Decides that the operation has succeeded: from here on it can neither be aborted nor fail.
    /// Returns false if it was aborted or has failed.
    pub(crate) fn decide(&self) -> bool {
        self.reach(Verdict::Succeeded)
    }

    fn reach(&self, verdict: Verdict) -> bool {
        let mut ending = self.ending.lock();
        let clean = self.state() == TransferState::InProgress && ending.error.is_none();
        if clean {
            ending.verdict = verdict;
        }
        clean
    }

    /// Sleeps until the operation has ended or `deadline` has passed; returns whether it has ended.
    pub(crate) fn wait_until(&self, deadline: Instant) -> bool {
        let mut ending = self.ending.lock();
        while !self.state().is_terminal() {
            if self.changed.wait_until(&mut ending, deadline).timed_out() {
                return self.state().is_terminal();
            }
        }
        true
    }
}

/// Returns the moment `timeout` from now; a timeout that overflows becomes a century.
pub(crate) fn deadline(timeout: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(timeout)
        .unwrap_or_else(|| now + Duration::from_secs(100 * 365 * 86_400))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transfer::Events;

    /// The peer may have been notified between the decision and the end.
    #[test]
    fn operation_that_has_succeeded_cannot_fail() {
        let completion = Completion::new();
        assert!(completion.commit() && completion.decide());
        completion.record(Error::Closed);
        assert!(!completion.begin_abort());
        assert_eq!(completion.finish(), TransferState::Done);
    }

    #[test]
    fn committed_operation_can_fail_until_it_has_succeeded() {
        let completion = Completion::new();
        assert!(completion.commit());
        completion.record(Error::Closed);
        assert!(!completion.decide());
        assert_eq!(completion.finish(), TransferState::Failed);
    }

    /// Arming checks the state under the lock that the end takes: it sees an end that it has waited
    /// for, and leaves nothing armed that would never be notified.
    #[test]
    fn arming_sees_an_end_that_it_waited_for() {
        let (completion, events) = (Completion::new(), Events::new().unwrap());
        let queue = events.queue().unwrap();
        let ending = completion.ending.lock();
        let state = std::thread::scope(|scope| {
            let arming = scope.spawn(|| completion.arm(queue, 7));
            // Long enough to reach the lock; a slower thread sees the end anyway.
            std::thread::sleep(Duration::from_millis(50));
            completion
                .state
                .store(TransferState::Done as u8, Ordering::Release);
            drop(ending);
            arming.join().unwrap()
        });
        assert_eq!(state, TransferState::Done);
        assert!(completion.ending.lock().armed.is_empty());
    }
}
