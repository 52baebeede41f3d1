//! One posting of a planned transfer.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tcpx_proto::frame::MAX_EXTRA_BYTES;
use tcpx_proto::lane::Op;

use super::completion::{Completion, TransferState};
use super::plan::Plan;
use super::tally::Tally;
use crate::error::Error;
use crate::memory::Place;
use crate::stats::{Meter, PeerCounters, TransferKind};
use crate::trace::{Trace, TransferNames, TransferTrace};

/// Up to this size the round trip takes longer than the bytes.
const SHORT_BYTES: u64 = 256 << 10;

/// Action at the end of a run.
pub(crate) enum After {
    Nothing,
    /// Notifies the peer if the run succeeded.
    Notify(Box<[u8]>),
    /// Reports the result to a waiter.
    Tell(Arc<dyn Conclusion>),
}

/// A waiter for the end of a run. Called while neither half of a lane is locked.
pub(crate) trait Conclusion: Send + Sync {
    /// Called when every byte is in place.
    fn landed(&self);
    /// Called when the run failed.
    fn failed(&self, error: Error);
}

/// One posting of a [`Plan`]. Lanes take chunks from the run until none are left; the thread that
/// settles the last chunk concludes the run. Lanes share nothing but the counters of the [`Tally`].
pub(crate) struct Run {
    pub(crate) id: u64,
    pub(crate) plan: Arc<Plan>,
    pub(crate) after: After,
    pub(crate) completion: Completion,
    pub(crate) started: Instant,
    /// The lane of a run with one chunk: a caller that polls the run drives this lane.
    pub(crate) lane: AtomicUsize,
    /// Number of lanes that take chunks from the run, if it has several; 0 while unknown.
    pub(crate) lanes: AtomicUsize,
    /// True if threads of this process copy the run instead of sending it on lanes.
    pub(crate) is_beside: AtomicBool,
    /// True if the notification must not overtake messages that are queued on the message lane.
    pub(crate) in_order: bool,
    /// True if the run waited before it could start: its duration does not tell how fast the path is.
    has_waited: AtomicBool,
    /// True once the run is known to be aborted, or released too late for that.
    is_abort_noted: AtomicBool,
    /// True once the application has its memory back, although the run may not have ended.
    let_go: AtomicBool,
    /// Counts chunks; the thread that settles the last chunk concludes the run.
    tally: Tally,
}

impl Run {
    pub(crate) fn new(id: u64, plan: Arc<Plan>, after: After) -> Self {
        let chunks = plan.len() as u32;
        Self {
            id,
            plan,
            after,
            completion: Completion::new(),
            started: Instant::now(),
            lane: AtomicUsize::new(0),
            lanes: AtomicUsize::new(0),
            is_beside: AtomicBool::new(false),
            in_order: false,
            has_waited: AtomicBool::new(false),
            is_abort_noted: AtomicBool::new(false),
            let_go: AtomicBool::new(false),
            tally: Tally::new(chunks),
        }
    }

    /// Counts the run as a transfer to this peer, and records it if there is a trace. The caller must
    /// make sure that the run ends.
    pub(crate) fn count_for(
        &mut self,
        (peer, names): (&Arc<PeerCounters>, &TransferNames),
        trace: &Trace,
    ) {
        let (kind, name) = match self.plan.op {
            Op::Read => (TransferKind::Read, names.read),
            Op::Write => (TransferKind::Write, names.write),
        };
        let (bytes, started) = (self.plan.bytes, self.started);
        let meter = Meter::start(peer, kind, bytes, started);
        let chunks = self.plan.len();
        let trace = TransferTrace::posted(trace, (self.id, name), (bytes, chunks), started);
        self.completion = Completion::metered(meter, trace);
    }

    /// Takes the next chunk, if any.
    #[inline]
    pub(crate) fn take(&self) -> Option<usize> {
        self.tally.take()
    }

    /// Returns a chunk that was taken and has not moved, so that it is handed out again. Returns
    /// true if the run is closed and this was the last chunk to be settled, as [`Run::settle`]
    /// does.
    #[must_use]
    pub(crate) fn give_back(&self, index: usize) -> bool {
        self.tally.give_back(index)
    }

    /// Returns the location and length of the next chunk, if any. Another lane may take it first.
    pub(crate) fn peek(&self) -> Option<(Place<'_>, usize)> {
        self.tally.peek().map(|index| {
            let layout = self.plan.layout(index);
            (self.plan.place(layout), layout.bytes)
        })
    }

    /// Returns whether the run takes about one round trip, so that spinning is worthwhile.
    #[inline]
    pub(crate) fn is_short(&self) -> bool {
        self.plan.len() == 1 && self.plan.bytes <= SHORT_BYTES
    }

    /// Returns an upper bound of the chunks left to take.
    #[inline]
    pub(crate) fn left_to_take(&self) -> usize {
        self.tally.left_to_take()
    }

    /// Settles `chunks` chunks that had been taken. Returns true for the call that settles the last
    /// one: its caller concludes the run.
    #[must_use]
    pub(crate) fn settle(&self, chunks: u32) -> bool {
        self.tally.settle(chunks)
    }

    /// Closes the run: hands out no more chunks and settles the chunks that no lane has. Returns as
    /// [`Run::settle`] does.
    #[must_use]
    pub(crate) fn close(&self) -> bool {
        self.tally.close()
    }

    /// Fails the run; returns as [`Run::settle`] does.
    #[must_use]
    pub(crate) fn fail(&self, error: Error) -> bool {
        self.completion.record(error);
        self.close()
    }

    /// Fails the run, and concludes it if none of its chunks is in flight.
    pub(crate) fn fail_now(&self, error: Error) {
        if self.fail(error) {
            self.conclude_failed();
        }
    }

    /// Records that the run has to wait before it can start.
    pub(crate) fn note_wait(&self) {
        self.has_waited.store(true, Ordering::Relaxed);
    }

    /// Records that the run is aborted, or was released too late for that. Returns false if that is
    /// known.
    pub(crate) fn note_abort(&self) -> bool {
        !self.is_abort_noted.swap(true, Ordering::Relaxed)
    }

    /// Ends a run that has no chunks in flight. On success, `notify` sends or queues its
    /// notification, and `measure` gets its duration, if that says how fast the path is, before it counts as done.
    pub(crate) fn conclude(&self, notify: impl FnOnce(&[u8]), measure: impl FnOnce(Duration)) {
        if !self.completion.decide() {
            self.conclude_failed();
            return;
        }
        match &self.after {
            After::Nothing => {}
            After::Notify(message) => notify(message),
            After::Tell(waiting) => waiting.landed(),
        }
        if !self.has_waited.load(Ordering::Relaxed) {
            measure(self.started.elapsed());
        }
        self.completion.finish();
    }

    /// Ends a failed run that has no chunks in flight.
    pub(crate) fn conclude_failed(&self) {
        let error = self.completion.error().unwrap_or(Error::Aborted);
        if let After::Tell(waiting) = &self.after {
            waiting.failed(error);
        }
        let state = self.completion.finish();
        debug_assert_ne!(state, TransferState::Done);
    }

    /// Returns whether the notification travels in a separate frame.
    pub(crate) fn sends_notify(&self) -> bool {
        matches!(&self.after, After::Notify(message) if !self.rides_along(message))
    }

    /// Returns whether the notification travels inside the only chunk of a WRITE.
    pub(crate) fn rides_along(&self, message: &[u8]) -> bool {
        self.plan.op == Op::Write && self.plan.len() == 1 && message.len() <= MAX_EXTRA_BYTES
    }

    /// Returns whether the run must travel on the message lane: its notification may ride along,
    /// and the previous notification is still queued on that lane.
    pub(crate) fn follows_messages(&self) -> bool {
        self.in_order && self.plan.op == Op::Write && self.plan.len() == 1
    }

    /// Returns the memory to the application: the rest of the run is not sent from there.
    pub(crate) fn let_go(&self) {
        self.let_go.store(true, Ordering::Release);
    }

    /// Returns whether the application has its memory back.
    pub(crate) fn was_let_go(&self) -> bool {
        self.let_go.load(Ordering::Acquire)
    }

    /// Returns whether local memory must no longer be touched on behalf of this run.
    #[inline]
    pub(crate) fn is_aborted(&self) -> bool {
        self.completion.is_aborting()
    }
}

/// Bytes of a chunk of the runs below.
#[cfg(test)]
const TEST_CHUNK: usize = 1 << 20;

#[cfg(test)]
impl Run {
    /// Makes a READ of `chunks` chunks, for tests that never touch its memory.
    pub(crate) fn untouched(chunks: usize) -> Self {
        Self::of_untouched(Op::Read, 0..(chunks * TEST_CHUNK) as u64)
    }

    /// Makes a WRITE to a range of the peer's memory, for tests that never touch any.
    pub(crate) fn untouched_write(to: std::ops::Range<u64>) -> Self {
        Self::of_untouched(Op::Write, to)
    }

    fn of_untouched(op: Op, remote: std::ops::Range<u64>) -> Self {
        use crate::transfer::{Limits, Pieces};

        let address = std::ptr::without_provenance_mut(4096);
        // SAFETY: nothing accesses the memory.
        let local = unsafe { tcpx_net::Span::new(address, (remote.end - remote.start) as usize) };
        let limits = Limits {
            chunk_bytes: TEST_CHUNK,
            lanes: 1,
        };
        let plan = Plan::new(op, Pieces::untouched(local, remote.start), limits);
        Self::new(1, Arc::new(plan), After::Nothing)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;

    #[test]
    fn every_chunk_is_handed_out_once_and_the_last_settles() {
        let run = Run::untouched(3);
        let taken: Vec<_> = std::iter::from_fn(|| run.take()).collect();
        assert_eq!(taken, [0, 1, 2]);
        assert!(!run.settle(1));
        assert!(!run.settle(1));
        assert!(run.settle(1));
        assert_eq!(run.completion.finish(), TransferState::Done);
    }

    #[test]
    fn closing_settles_untaken_chunks_only_once() {
        let run = Run::untouched(5);
        run.take();
        run.take();
        assert!(!run.fail(Error::Closed));
        assert!(!run.close());
        assert_eq!(run.take(), None);
        assert!(!run.settle(1));
        assert!(run.settle(1));
        assert_eq!(run.completion.finish(), TransferState::Failed);
    }

    #[test]
    fn returned_chunk_is_handed_out_again() {
        let run = Run::untouched(2);
        let taken: Vec<_> = std::iter::from_fn(|| run.take()).collect();
        assert!(run.left_to_take() == 0 && run.peek().is_none());
        assert!(!run.give_back(taken[0]));
        assert!(run.left_to_take() > 0 && run.peek().is_some());
        assert_eq!(run.take(), Some(0));
        assert_eq!(run.take(), None);
        assert!(!run.settle(1));
        assert!(run.settle(1));
    }

    #[test]
    fn closing_settles_chunks_returned_before_and_after() {
        let run = Run::untouched(3);
        let taken: Vec<_> = std::iter::from_fn(|| run.take()).collect();
        assert!(!run.give_back(taken[0]));
        assert!(!run.close());
        assert!(run.left_to_take() == 0 && run.take().is_none());
        assert!(!run.give_back(taken[1]));
        assert!(run.give_back(taken[2]));
    }

    #[test]
    fn threads_that_take_close_and_settle_agree_on_one_conclusion() {
        for _ in 0..200 {
            let run = Run::untouched(64);
            let concluded = AtomicU32::new(0);
            let conclude = |last| {
                if last {
                    concluded.fetch_add(1, Ordering::Relaxed);
                }
            };
            std::thread::scope(|scope| {
                for _ in 0..3 {
                    scope.spawn(|| {
                        while run.take().is_some() {
                            conclude(run.settle(1))
                        }
                    });
                }
                scope.spawn(|| conclude(run.close()));
            });
            assert_eq!(concluded.into_inner(), 1);
        }
    }
}
