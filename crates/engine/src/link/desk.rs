//! Runs whose bytes are copied by threads of this process instead of being sent.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tcpx_proto::lane::{Chunk, ChunkId};

use crate::sync::{Mutex, Rank};
use crate::trace::{End, Kind, Record};
use crate::transfer::{ChunkRef, Run};

/// Runs up to this size are copied by the caller that posts them.
pub(crate) const INLINE_BYTES: u64 = 256 << 10;

/// Limits the runs that a worker checks before it turns to its lanes.
const LOOKS: usize = 4;

/// A link that copies the chunks of runs.
pub(crate) trait Copying: Send + Sync {
    /// Copies the next chunk of a run and settles it, or checks whether a device has.
    fn copy_chunk(&self, run: &Arc<Run>) -> Step;
}

/// Result of one step on a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// A chunk was copied.
    Copied,
    /// A device is copying; its end is not signalled.
    UnderWay,
    /// There is no chunk left to take.
    Over,
}

/// Returns the trace record of a chunk that a thread has copied.
pub(super) fn of_copy(chunk: &ChunkRef, is_copied: bool) -> Record {
    let ChunkId { transfer, seq } = chunk.id();
    let record = Record::new(Kind::CopyChunk).chunk(transfer, seq);
    match is_copied && !chunk.run.is_aborted() {
        true => record.bytes(chunk.bytes() as u64),
        false => record.end(End::Failed),
    }
}

/// Runs that wait to be copied. All workers take chunks from them in turn, so that many threads
/// copy one run and no run waits for the end of another.
pub(crate) struct Desk {
    jobs: Mutex<VecDeque<Job>>,
    /// True while there are jobs; threads poll this flag.
    is_busy: AtomicBool,
    /// Wakes up to this number of threads that call [`Desk::step`].
    call: Box<dyn Fn(usize) + Send + Sync>,
}

#[derive(Clone)]
struct Job {
    run: Arc<Run>,
    by: Arc<dyn Copying>,
}

impl Desk {
    pub(crate) fn new(call: Box<dyn Fn(usize) + Send + Sync>) -> Self {
        Self {
            jobs: Mutex::new(Rank::Local, VecDeque::new()),
            is_busy: AtomicBool::new(false),
            call,
        }
    }

    /// Queues a run, whose chunks `by` copies on up to `threads` threads.
    pub(crate) fn push(&self, run: &Arc<Run>, by: Arc<dyn Copying>, threads: usize) {
        let run = Arc::clone(run);
        let mut jobs = self.jobs.lock();
        jobs.push_back(Job { run, by });
        self.is_busy.store(true, Ordering::SeqCst);
        drop(jobs);
        (self.call)(threads);
    }

    /// Copies one chunk of any queued run, for a worker.
    pub(crate) fn step(&self) -> Step {
        let mut found = Step::Over;
        // Runs that devices copy do not delay others.
        for _ in 0..LOOKS {
            if !self.is_busy() {
                break;
            }
            let Some(job) = self.next() else { break };
            match self.work(&job) {
                Step::Copied => return Step::Copied,
                Step::UnderWay => found = Step::UnderWay,
                Step::Over => {}
            }
        }
        found
    }

    /// Copies one chunk of this run, if it is queued.
    pub(crate) fn step_for(&self, run: &Run) -> Step {
        let job = {
            let jobs = self.jobs.lock();
            let mut jobs = jobs.iter();
            jobs.find(|job| std::ptr::eq(&*job.run, run)).cloned()
        };
        job.map_or(Step::Over, |job| self.work(&job))
    }

    /// Removes a run; threads may still be copying its chunks.
    pub(crate) fn take_run(&self, run: &Run) {
        let mut jobs = self.jobs.lock();
        jobs.retain(|job| !std::ptr::eq(&*job.run, run));
        self.note(&jobs);
    }

    /// Removes and returns the runs that `by` copies.
    pub(crate) fn take(&self, by: &dyn Copying) -> Vec<Arc<Run>> {
        let mut taken = Vec::new();
        let mut jobs = self.jobs.lock();
        jobs.retain(|job| {
            let stays = !std::ptr::addr_eq(Arc::as_ptr(&job.by), by);
            if !stays {
                taken.push(Arc::clone(&job.run));
            }
            stays
        });
        self.note(&jobs);
        taken
    }

    /// Returns whether [`Desk::step`] must be called.
    pub(crate) fn is_busy(&self) -> bool {
        self.is_busy.load(Ordering::SeqCst)
    }

    /// Wakes a thread that continues with the queued runs.
    pub(crate) fn hand_over(&self) {
        if self.is_busy() {
            (self.call)(1);
        }
    }

    fn next(&self) -> Option<Job> {
        let mut jobs = self.jobs.lock();
        let job = jobs.pop_front()?;
        // Kept at the end until it has no chunk left, so that other threads find it as well.
        jobs.push_back(job.clone());
        Some(job)
    }

    fn work(&self, job: &Job) -> Step {
        let step = job.by.copy_chunk(&job.run);
        if step != Step::Over {
            return step;
        }
        self.take_run(&job.run);
        Step::Over
    }

    /// Updates `is_busy` under the lock: a later push sets it again.
    fn note(&self, jobs: &VecDeque<Job>) {
        self.is_busy.store(!jobs.is_empty(), Ordering::SeqCst);
    }
}
