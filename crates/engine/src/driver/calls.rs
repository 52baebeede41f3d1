//! Calls to a worker that may be asleep.
//! `models/` checks under every interleaving that no call is lost.

use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Mutex, Rank};

/// The lanes that a worker is requested to drive, and whether the worker must be woken for them.
///
/// ```text
///   caller                              worker
///   C1  has_calls = true                W1  asleep = true
///   C2  was it asleep? ─► wake it       W2  has_calls? ─► do not sleep
/// ```
///
/// All four steps are sequentially consistent: either the worker sees the call (C1 before W2), or
/// the caller sees the worker asleep (W1 before C2). Work that is announced elsewhere is found in
/// the same way: the worker checks for it after [`Calls::doze`], and the announcing thread calls
/// [`Calls::rouse`] afterwards.
pub(super) struct Calls {
    /// Called lanes, without duplicates.
    called: Mutex<Vec<u64>>,
    /// True while there are called lanes.
    has_calls: AtomicBool,
    /// True while the worker sleeps or is about to.
    asleep: AtomicBool,
}

impl Calls {
    /// Makes the calls of a worker that is awake.
    pub(super) fn new() -> Self {
        Self {
            called: Mutex::new(Rank::Worker, Vec::new()),
            has_calls: AtomicBool::new(false),
            asleep: AtomicBool::new(false),
        }
    }

    /// Calls a lane. Returns true if the caller has to wake the worker.
    #[must_use]
    pub(super) fn call(&self, token: u64) -> bool {
        let mut called = self.called.lock();
        if !called.contains(&token) {
            called.push(token);
        }
        self.has_calls.store(true, Ordering::SeqCst);
        drop(called);
        self.rouse()
    }

    /// Returns true if the caller has to wake the worker; no other thread will.
    #[must_use]
    pub(super) fn rouse(&self) -> bool {
        self.asleep.swap(false, Ordering::SeqCst)
    }

    /// Marks the worker as about to sleep. A thread that has work for it after this rouses it; the
    /// worker must check for earlier work itself.
    pub(super) fn doze(&self) {
        self.asleep.store(true, Ordering::SeqCst);
    }

    /// Marks the worker as awake.
    pub(super) fn rise(&self) {
        self.asleep.store(false, Ordering::SeqCst);
    }

    /// Returns whether there are calls.
    #[inline]
    pub(super) fn is_waiting(&self) -> bool {
        self.has_calls.load(Ordering::SeqCst)
    }

    /// Takes all calls.
    pub(super) fn take(&self) -> Vec<u64> {
        // Checked first, because workers poll this.
        if !self.is_waiting() || !self.has_calls.swap(false, Ordering::SeqCst) {
            return Vec::new();
        }
        std::mem::take(&mut *self.called.lock())
    }

    /// Returns whether the worker was awake a moment ago.
    #[inline]
    pub(super) fn is_awake(&self) -> bool {
        !self.asleep.load(Ordering::Relaxed)
    }
}
