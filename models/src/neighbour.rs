//! Gates, by which the owner of memory stops access by another process.

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

use crate::sync::atomic::{self, AtomicU32};

#[path = "../../crates/net/src/neighbour/gates/gate.rs"]
mod gate;

use gate::Gate;

/// Memory behind a gate; loom detects accesses that are not ordered.
struct Guarded {
    gate: Gate,
    memory: UnsafeCell<u32>,
}

// SAFETY: the gate orders accesses to the memory, which the models check.
unsafe impl Sync for Guarded {}
// SAFETY: nothing in it belongs to a thread.
unsafe impl Send for Guarded {}

impl Guarded {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            gate: Gate {
                users: AtomicU32::new(0),
                closed: AtomicU32::new(0),
            },
            memory: UnsafeCell::new(0),
        })
    }

    /// Accesses the memory, unless the gate is closed.
    fn access(&self) -> bool {
        let may = self.gate.enter();
        if may {
            self.touch();
            self.gate.leave();
        }
        may
    }

    /// Closes the gate and waits until nothing is inside.
    fn take_back(&self) {
        self.gate.close();
        while self.gate.users() != 0 {
            thread::yield_now();
        }
    }

    fn touch(&self) {
        // SAFETY: loom fails the model if another access is in progress.
        self.memory.with_mut(|value| unsafe { *value += 1 });
    }
}

/// The owner frees memory behind a closed gate without users: no access is in progress or follows.
pub fn nobody_is_inside_a_closed_gate() {
    loom::model(|| {
        let guarded = Guarded::new();
        let user = Arc::clone(&guarded);
        let user = thread::spawn(move || {
            user.access();
            user.access();
        });
        guarded.take_back();
        guarded.touch();
        assert!(!guarded.gate.enter(), "the gate is closed");
        user.join().unwrap();
    });
}

/// A reopened gate has no user of the memory that was behind it before.
pub fn a_gate_opens_only_when_it_is_empty() {
    loom::model(|| {
        let guarded = Guarded::new();
        guarded.gate.close();
        let user = Arc::clone(&guarded);
        let user = thread::spawn(move || user.access());
        // Fails while a user tries the closed gate: the owner retries.
        if guarded.gate.reopen() {
            guarded.take_back();
        }
        guarded.touch();
        user.join().unwrap();
        assert_eq!(guarded.gate.users(), 0);
    });
}
