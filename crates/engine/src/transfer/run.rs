//! One posting of a planned transfer.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::time::Instant;

use tcpx_proto::frame::MAX_EXTRA_BYTES;
use tcpx_proto::lane::Op;

use super::completion::{Completion, TransferState};
use super::plan::Plan;
use crate::error::Error;
use crate::memory::Place;
use crate::sync::{Mutex, Rank};

/// `next` of a run that hands out no more chunks. Far above any chunk count, far below overflow.
const CLOSED: u32 = 1 << 31;

/// Up to this size the round trip outweighs the bytes.
const SHORT_BYTES: u64 = 256 << 10;

/// What happens when a run is over.
pub(crate) enum After {
    Nothing,
    /// The peer is notified if the run is done.
    Notify(Box<[u8]>),
    /// Somebody is told how it went.
    Tell(Arc<dyn Conclusion>),
}

/// Somebody who waits for a run. Called while neither half of a lane is locked.
pub(crate) trait Conclusion: Send + Sync {
    /// Every byte is in place.
    fn landed(&self);
    /// The bytes did not come.
    fn failed(&self, error: Error);
}

/// One posting of a [`Plan`]. Lanes take chunks from it until there are none left; whoever settles the last
/// chunk concludes it. The lanes share nothing but two counters.
pub(crate) struct Run {
    pub(crate) id: u64,
    pub(crate) plan: Arc<Plan>,
    pub(crate) after: After,
    pub(crate) completion: Completion,
    pub(crate) started: Instant,
    /// The lane of a run of one chunk: whoever polls the run drives that lane.
    pub(crate) lane: AtomicUsize,
    /// How many lanes take chunks from it, if it has several; 0 while that is not known.
    pub(crate) lanes: AtomicUsize,
    /// It is copied by threads of this process, not sent on lanes.
    pub(crate) is_beside: AtomicBool,
    /// Its notification must not overtake what the lane carries that messages travel on.
    pub(crate) in_order: bool,
    /// The application has its memory back, although the run may not be over.
    let_go: AtomicBool,
    next: AtomicU32,
    /// Chunks that are not settled yet. The run is concluded by whoever makes this 0.
    left: AtomicU32,
    /// How many chunks are in `returned`: changes under its lock.
    returns: AtomicU32,
    /// Chunks that were taken and given back, since their lane was lost.
    returned: Mutex<Returned>,
}

#[derive(Default)]
struct Returned {
    chunks: Vec<u32>,
    /// The run hands out no more chunks.
    closed: bool,
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
            let_go: AtomicBool::new(false),
            next: AtomicU32::new(0),
            left: AtomicU32::new(chunks),
            returns: AtomicU32::new(0),
            returned: Mutex::new(Rank::Leaf, Returned::default()),
        }
    }

    /// The next chunk to move, if there is one.
    #[inline]
    pub(crate) fn take(&self) -> Option<usize> {
        if self.returns.load(Ordering::Acquire) > 0
            && let Some(index) = self.take_returned()
        {
            return Some(index);
        }
        // Looked at first, so that polling an exhausted run does not count `next` up for ever.
        if self.next.load(Ordering::Relaxed) as usize >= self.plan.len() {
            return None;
        }
        let index = self.next.fetch_add(1, Ordering::Relaxed) as usize;
        (index < self.plan.len()).then_some(index)
    }

    fn take_returned(&self) -> Option<usize> {
        let mut returned = self.returned.lock();
        let index = returned.chunks.pop()?;
        self.returns
            .store(returned.chunks.len() as u32, Ordering::Release);
        Some(index as usize)
    }

    /// Gives a chunk back that was taken and has not moved: it is handed out again. True where the run
    /// hands out no more chunks and this was the last to be settled: as [`Run::settle`].
    #[must_use]
    pub(crate) fn give_back(&self, index: usize) -> bool {
        let mut returned = self.returned.lock();
        if returned.closed {
            drop(returned);
            return self.settle(1);
        }
        returned.chunks.push(index as u32);
        self.returns
            .store(returned.chunks.len() as u32, Ordering::Release);
        false
    }

    /// Where the next chunk to move is, and how many bytes it has, if there is one. Another lane may be
    /// faster.
    pub(crate) fn peek(&self) -> Option<(Place<'_>, usize)> {
        let mut index = self.next.load(Ordering::Relaxed) as usize;
        if self.returns.load(Ordering::Acquire) > 0
            && let Some(last) = self.returned.lock().chunks.last()
        {
            index = *last as usize;
        }
        (index < self.plan.len()).then(|| {
            let layout = self.plan.layout(index);
            (self.plan.place(layout), layout.bytes)
        })
    }

    /// Whether it takes about a round trip: worth a caller's undivided attention.
    #[inline]
    pub(crate) fn is_short(&self) -> bool {
        self.plan.len() == 1 && self.plan.bytes <= SHORT_BYTES
    }

    /// Returns how many chunks there may be left to take.
    #[inline]
    pub(crate) fn left_to_take(&self) -> usize {
        let taken = self.next.load(Ordering::Relaxed) as usize;
        let returned = self.returns.load(Ordering::Acquire) as usize;
        self.plan.len().saturating_sub(taken) + returned
    }

    /// Settles `chunks` chunks that had been taken. True for the call that settled the last one: its caller
    /// concludes the run.
    #[must_use]
    pub(crate) fn settle(&self, chunks: u32) -> bool {
        chunks > 0 && self.left.fetch_sub(chunks, Ordering::AcqRel) == chunks
    }

    /// Hands out no more chunks and settles those that nobody had taken; as [`Run::settle`].
    #[must_use]
    pub(crate) fn close(&self) -> bool {
        let mut returned = self.returned.lock();
        returned.closed = true;
        let given_back = std::mem::take(&mut returned.chunks).len() as u32;
        self.returns.store(0, Ordering::Release);
        drop(returned);
        let chunks = self.plan.len() as u32;
        let taken = self.next.swap(CLOSED, Ordering::AcqRel).min(chunks);
        self.settle(chunks - taken + given_back)
    }

    /// Fails the run; as [`Run::settle`].
    #[must_use]
    pub(crate) fn fail(&self, error: Error) -> bool {
        self.completion.record(error);
        self.close()
    }

    /// Fails the run, and concludes it if nothing of it is under way.
    pub(crate) fn fail_now(&self, error: Error) {
        if self.fail(error) {
            self.conclude_failed();
        }
    }

    /// Ends a run of which nothing is under way. If it is done, `notify` sends its notification before it
    /// counts as done, and so does `measure` learn of it.
    pub(crate) fn conclude(&self, notify: impl FnOnce(&[u8]), measure: impl FnOnce()) {
        if !self.completion.commit() {
            self.conclude_failed();
            return;
        }
        match &self.after {
            After::Nothing => {}
            After::Notify(message) => notify(message),
            After::Tell(waiting) => waiting.landed(),
        }
        measure();
        self.completion.finish();
    }

    /// Ends a run that has not succeeded and of which nothing is under way.
    pub(crate) fn conclude_failed(&self) {
        let error = self.completion.error().unwrap_or(Error::Aborted);
        if let After::Tell(waiting) = &self.after {
            waiting.failed(error);
        }
        let state = self.completion.finish();
        debug_assert_ne!(state, TransferState::Done);
    }

    /// Whether its notification travels in a frame of its own.
    pub(crate) fn sends_notify(&self) -> bool {
        matches!(&self.after, After::Notify(message) if !self.rides_along(message))
    }

    /// Whether the notification travels inside the only chunk of a WRITE.
    pub(crate) fn rides_along(&self, message: &[u8]) -> bool {
        self.plan.op == Op::Write && self.plan.len() == 1 && message.len() <= MAX_EXTRA_BYTES
    }

    /// Whether the run must travel on the lane that carries messages: its notification may ride along,
    /// and the one before it is still on its way there.
    pub(crate) fn follows_messages(&self) -> bool {
        self.in_order && self.plan.op == Op::Write && self.plan.len() == 1
    }

    /// Gives the application its memory back: what is left of the run is not sent from there.
    pub(crate) fn let_go(&self) {
        self.let_go.store(true, Ordering::Release);
    }

    /// Whether the application has its memory back.
    pub(crate) fn was_let_go(&self) -> bool {
        self.let_go.load(Ordering::Acquire)
    }

    /// Whether local memory must no longer be touched on behalf of this run.
    #[inline]
    pub(crate) fn is_aborted(&self) -> bool {
        self.completion.is_aborting()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transfer::{Limits, Pieces};
    use tcpx_net::Span;

    fn run(chunks: usize) -> Run {
        // SAFETY: nothing accesses the memory.
        let local = unsafe { Span::new(4096 as *mut u8, chunks * (1 << 20)) };
        let limits = Limits {
            chunk_bytes: 1 << 20,
            lanes: 1,
        };
        Run::new(
            1,
            Arc::new(Plan::new(Op::Read, Pieces::untouched(local), limits)),
            After::Nothing,
        )
    }

    #[test]
    fn every_chunk_is_handed_out_once_and_the_last_settles() {
        let run = run(3);
        let taken: Vec<_> = std::iter::from_fn(|| run.take()).collect();
        assert_eq!(taken, [0, 1, 2]);
        assert!(!run.settle(1));
        assert!(!run.settle(1));
        assert!(run.settle(1));
        assert_eq!(run.completion.finish(), TransferState::Done);
    }

    #[test]
    fn closing_settles_what_was_not_taken_and_only_once() {
        let run = run(5);
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
    fn a_chunk_that_is_given_back_is_handed_out_again() {
        let run = run(2);
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
    fn closing_settles_what_was_given_back_before_and_after() {
        let run = run(3);
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
            let run = run(64);
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
