//! One gate: two words in memory that two processes share. `models/` checks it under every
//! interleaving.

use super::atomic::{AtomicU32, Ordering};

/// One gate, alone on its cache line, so that its users do not slow down users of other gates. The
/// 64 bytes are part of the protocol, also where lines have 128.
#[repr(C, align(64))]
pub(super) struct Gate {
    /// Number of passes in use. Written by the user only.
    pub(super) users: AtomicU32,
    /// Not 0 once the gate is closed. Written by the owner only.
    pub(super) closed: AtomicU32,
}

impl Gate {
    /// Counts the user in, and returns `true`, unless the gate is closed.
    pub(super) fn enter(&self) -> bool {
        self.users.fetch_add(1, Ordering::SeqCst);
        let is_open = !self.is_closed();
        if !is_open {
            self.leave();
        }
        is_open
    }

    /// Counts the user out: its access has ended.
    pub(super) fn leave(&self) {
        self.users.fetch_sub(1, Ordering::SeqCst);
    }

    /// Closes the gate, as its owner.
    pub(super) fn close(&self) {
        self.closed.store(1, Ordering::SeqCst);
    }

    /// Opens the gate, as its owner, unless it has users. Returns whether it did.
    pub(super) fn reopen(&self) -> bool {
        let is_empty = self.users() == 0;
        if is_empty {
            self.closed.store(0, Ordering::SeqCst);
        }
        is_empty
    }

    /// Returns whether the gate is closed.
    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst) != 0
    }

    /// Returns the number of passes in use. Once it has been 0 on a closed gate, nobody is inside.
    pub(super) fn users(&self) -> u32 {
        self.users.load(Ordering::SeqCst)
    }
}
