//! Runs whose bytes are copied by threads of this process rather than sent.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::sync::{Mutex, Rank};
use crate::transfer::Run;

/// Runs up to this size are copied by the caller who posts them.
pub(crate) const INLINE_BYTES: u64 = 256 << 10;

/// Somebody who copies the chunks of runs.
pub(crate) trait Copying: Send + Sync {
    /// Copies the next chunk of a run and settles it, or looks whether a device has.
    fn copy_chunk(&self, run: &Arc<Run>) -> Step;
}

/// What a look at a run has come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// A chunk was copied.
    Copied,
    /// A device is at work; nobody will be told when it is done.
    UnderWay,
    /// There is no chunk left to take.
    Over,
}

/// Runs that wait to be copied. Every worker takes chunks from them in turn, so that one run is
/// copied by many threads and no run waits for the end of another.
pub(crate) struct Desk {
    jobs: Mutex<VecDeque<Job>>,
    /// Whether there are jobs: what threads ask again and again.
    is_busy: AtomicBool,
    /// Wakes so many threads that call [`Desk::step`].
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

    /// Has the chunks of a run copied by `by`, by up to so many threads.
    pub(crate) fn push(&self, run: &Arc<Run>, by: Arc<dyn Copying>, threads: usize) {
        let run = Arc::clone(run);
        let mut jobs = self.jobs.lock();
        jobs.push_back(Job { run, by });
        self.is_busy.store(true, Ordering::SeqCst);
        drop(jobs);
        (self.call)(threads);
    }

    /// Copies one chunk of what waits.
    pub(crate) fn step(&self) -> Step {
        if !self.is_busy() {
            return Step::Over;
        }
        match self.next() {
            Some(job) => self.work(&job),
            None => Step::Over,
        }
    }

    /// Copies one chunk of this run, if it waits.
    pub(crate) fn step_for(&self, run: &Run) {
        let job = {
            let jobs = self.jobs.lock();
            let mut jobs = jobs.iter();
            jobs.find(|job| std::ptr::eq(&*job.run, run)).cloned()
        };
        if let Some(job) = job {
            self.work(&job);
        }
    }

    /// Takes back a run, of which threads may still be copying chunks.
    pub(crate) fn take_run(&self, run: &Run) {
        let mut jobs = self.jobs.lock();
        jobs.retain(|job| !std::ptr::eq(&*job.run, run));
        self.note(&jobs);
    }

    /// Takes back the runs that wait for somebody.
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

    /// Whether somebody must call [`Desk::step`].
    pub(crate) fn is_busy(&self) -> bool {
        self.is_busy.load(Ordering::SeqCst)
    }

    /// Wakes a thread that goes on with what waits.
    pub(crate) fn hand_over(&self) {
        if self.is_busy() {
            (self.call)(1);
        }
    }

    fn next(&self) -> Option<Job> {
        let mut jobs = self.jobs.lock();
        let job = jobs.pop_front()?;
        // At the end until it has no chunk left: other threads find it too.
        jobs.push_back(job.clone());
        Some(job)
    }

    fn work(&self, job: &Job) -> Step {
        let step = job.by.copy_chunk(&job.run);
        if step != Step::Over {
            return step;
        }
        let mut jobs = self.jobs.lock();
        jobs.retain(|known| !Arc::ptr_eq(&known.run, &job.run));
        self.note(&jobs);
        // Other jobs may wait.
        match jobs.is_empty() {
            true => Step::Over,
            false => Step::Copied,
        }
    }

    /// With the lock: what is pushed after this sets it again.
    fn note(&self, jobs: &VecDeque<Job>) {
        self.is_busy.store(!jobs.is_empty(), Ordering::SeqCst);
    }
}
