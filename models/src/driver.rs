//! Calls to a worker that is about to sleep.

use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, Ordering};
use loom::thread;

#[path = "../../crates/engine/src/driver/calls.rs"]
mod calls;

use calls::Calls;

/// A worker and its wake-up: one that comes before the sleep ends it at once, as with an `eventfd`.
struct Worker {
    calls: Calls,
    is_woken: AtomicBool,
}

impl Worker {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            calls: Calls::new(),
            is_woken: AtomicBool::new(false),
        })
    }

    fn call(&self, token: u64) {
        if self.calls.call(token) {
            self.is_woken.store(true, Ordering::Release);
        }
    }

    fn sleep(&self) {
        while !self.is_woken.load(Ordering::Acquire) {
            thread::yield_now();
        }
        self.is_woken.swap(false, Ordering::AcqRel);
    }

    /// Works until all of `tokens` were called for, like the loop of a worker. Loom fails the model
    /// if a worker sleeps for ever.
    fn run(&self, mut tokens: Vec<u64>) {
        loop {
            for token in self.calls.take() {
                tokens.retain(|wanted| *wanted != token);
            }
            if tokens.is_empty() {
                return;
            }
            self.calls.doze();
            if !self.calls.is_waiting() {
                self.sleep();
            }
            self.calls.rise();
        }
    }
}

/// A call made while the worker goes to sleep is seen by the worker, or wakes it.
pub fn a_call_wakes_a_worker_that_goes_to_sleep() {
    loom::model(|| {
        let worker = Worker::new();
        let caller = Arc::clone(&worker);
        let caller = thread::spawn(move || caller.call(1));
        worker.run(vec![1]);
        caller.join().unwrap();
    });
}

/// Of two concurrent callers one wakes the worker, which finds both calls.
pub fn calls_of_two_threads_both_arrive() {
    loom::model(|| {
        let worker = Worker::new();
        let callers = [1, 2].map(|token| {
            let worker = Arc::clone(&worker);
            thread::spawn(move || worker.call(token))
        });
        worker.run(vec![1, 2]);
        for caller in callers {
            caller.join().unwrap();
        }
    });
}
