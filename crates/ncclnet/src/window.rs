//! The requests of one comm: a ring of the plugin's pointers, numbered in order.
//!
//! ```text
//!     consumed ──────► tested ──────► posted
//!        │  done, being   │  the plugin   │
//!        │  read by user  │  works on it  │          posted − consumed ≤ slots
//! ```
//!
//! Plugins hold few requests, require them to be tested and consumed in the order of posting, and
//! reuse their pointers. So a request is its number in that order, and a call out of turn is
//! detected before the plugin sees it.

use std::ffi::c_void;

#[derive(Debug)]
pub(crate) struct Window {
    /// Ring of request pointers; request `n` is at `n % len`.
    ring: Box<[*mut c_void]>,
    /// Requests before this one have ended. `consumed ≤ tested`
    consumed: u64,
    /// Requests before this one are done. `tested ≤ posted`
    tested: u64,
    /// The number of the next request. `posted ≤ consumed + ring.len()`
    posted: u64,
    /// Whether a done request keeps its slot until it is consumed.
    keeps_done: bool,
}

impl Window {
    pub(crate) fn new(slots: usize, keeps_done: bool) -> Self {
        Self {
            ring: vec![std::ptr::null_mut(); slots].into_boxed_slice(),
            consumed: 0,
            tested: 0,
            posted: 0,
            keeps_done,
        }
    }

    pub(crate) fn slots(&self) -> usize {
        self.ring.len()
    }

    /// Returns how many slots are taken.
    pub(crate) fn taken(&self) -> usize {
        // Bounded by the ring's length.
        (self.posted - self.consumed) as usize
    }

    pub(crate) fn is_full(&self) -> bool {
        self.taken() == self.slots()
    }

    /// Records a request of the plugin. There is room: `is_full` was checked before the call.
    pub(crate) fn post(&mut self, request: *mut c_void) -> u64 {
        debug_assert!(!self.is_full());
        let number = self.posted;
        let slot = self.slot(number);
        self.ring[slot] = request;
        self.posted += 1;
        number
    }

    /// Returns the request to test: the oldest outstanding one.
    pub(crate) fn to_test(&self) -> Option<u64> {
        (self.tested < self.posted).then_some(self.tested)
    }

    /// Returns the request to consume: the oldest completed one.
    pub(crate) fn to_consume(&self) -> Option<u64> {
        (self.consumed < self.tested).then_some(self.consumed)
    }

    /// Returns the plugin's pointer of a request that still has its slot.
    pub(crate) fn pointer(&self, number: u64) -> *mut c_void {
        debug_assert!(self.consumed <= number && number < self.posted);
        self.ring[self.slot(number)]
    }

    /// Records that the request to test is done.
    pub(crate) fn tested(&mut self) {
        debug_assert!(self.tested < self.posted);
        self.tested += 1;
        if !self.keeps_done {
            self.consumed = self.tested;
        }
    }

    /// Records that the oldest completed request has ended.
    pub(crate) fn consumed(&mut self) {
        debug_assert!(self.consumed < self.tested);
        self.consumed += 1;
    }

    /// Returns whether a completed request has ended without being consumed.
    pub(crate) fn is_over(&self, number: u64) -> bool {
        number < self.consumed
    }

    fn slot(&self, number: u64) -> usize {
        (number % self.ring.len() as u64) as usize
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    fn pointer(n: usize) -> *mut c_void {
        std::ptr::without_provenance_mut(0x1000 + n)
    }

    proptest! {
        /// Compares any sequence of steps with two plain queues.
        #[test]
        fn agrees_with_two_queues(
            slots in 1usize..17,
            keeps_done: bool,
            steps in proptest::collection::vec(0u8..3, 0..300),
        ) {
            let mut window = Window::new(slots, keeps_done);
            let mut working = VecDeque::new();
            let mut done = VecDeque::new();
            let mut next = 0usize;
            for step in steps {
                match step {
                    0 if !window.is_full() => {
                        prop_assert_eq!(window.post(pointer(next)), next as u64);
                        working.push_back(next);
                        next += 1;
                    }
                    1 => {
                        prop_assert_eq!(window.to_test(), working.front().map(|n| *n as u64));
                        if let Some(n) = working.pop_front() {
                            prop_assert_eq!(window.pointer(n as u64), pointer(n));
                            window.tested();
                            if keeps_done {
                                done.push_back(n);
                            } else {
                                prop_assert!(window.is_over(n as u64));
                            }
                        }
                    }
                    2 => {
                        prop_assert_eq!(window.to_consume(), done.front().map(|n| *n as u64));
                        if let Some(n) = done.pop_front() {
                            prop_assert_eq!(window.pointer(n as u64), pointer(n));
                            prop_assert!(!window.is_over(n as u64));
                            window.consumed();
                            prop_assert!(window.is_over(n as u64));
                        }
                    }
                    _ => {}
                }
                prop_assert_eq!(window.taken(), working.len() + done.len());
                prop_assert_eq!(window.is_full(), working.len() + done.len() == slots);
            }
        }
    }
}
