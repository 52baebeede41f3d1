//! How a transfer ends, and how its owner learns of it.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::{Duration, Instant};

use crate::error::Error;
use crate::sync::{Condvar, Mutex, Rank};

/// Where a transfer stands.
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
    /// Every byte is where it belongs.
    Done = 2,
    /// It failed; [`Transfer::error`](crate::Transfer::error) says why.
    Failed = 3,
    /// Aborted by this side; bytes that were already on their way may still land at the peer.
    Aborting = 4,
    /// Aborted, and nothing of it is on its way any more.
    Aborted = 5,
}

impl TransferState {
    /// Whether nothing more will happen until the transfer is posted again.
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

/// The end of one posted operation: set once, watched by anybody.
#[derive(Debug)]
pub(crate) struct Completion {
    state: AtomicU8,
    /// The operation's notification is on its way: too late to abort. Changes under the lock of `error`.
    committed: AtomicBool,
    /// The first error; guards changes of `state` too, so that a waiter cannot miss one.
    error: Mutex<Option<Error>>,
    changed: Condvar,
}

impl Completion {
    pub(crate) fn new() -> Self {
        Self {
            state: AtomicU8::new(TransferState::InProgress as u8),
            committed: AtomicBool::new(false),
            error: Mutex::new(Rank::Completion, None),
            changed: Condvar::new(),
        }
    }

    #[inline]
    pub(crate) fn state(&self) -> TransferState {
        TransferState::from_u8(self.state.load(Ordering::Acquire))
    }

    pub(crate) fn error(&self) -> Option<Error> {
        self.error.lock().clone()
    }

    /// Keeps the first error of an operation that has not ended yet.
    pub(crate) fn record(&self, error: Error) {
        self.error.lock().get_or_insert(error);
    }

    /// Marks an operation as being aborted; false when it has ended already or was committed.
    pub(crate) fn begin_abort(&self) -> bool {
        let mut error = self.error.lock();
        if self.state() != TransferState::InProgress || self.committed.load(Ordering::Relaxed) {
            return false;
        }
        error.get_or_insert(Error::Aborted);
        self.state
            .store(TransferState::Aborting as u8, Ordering::Release);
        true
    }

    #[inline]
    pub(crate) fn is_aborting(&self) -> bool {
        self.state() == TransferState::Aborting
    }

    /// Ends the operation: aborted if that was asked for, failed if an error was recorded, done
    /// otherwise. Returns how it ended.
    pub(crate) fn finish(&self) -> TransferState {
        let error = self.error.lock();
        let state = match self.state() {
            TransferState::InProgress if error.is_none() => TransferState::Done,
            TransferState::InProgress => TransferState::Failed,
            TransferState::Aborting => TransferState::Aborted,
            ended => ended,
        };
        self.state.store(state as u8, Ordering::Release);
        drop(error);
        self.changed.notify_all();
        state
    }

    /// Decides that the peer is going to be notified: from here on the operation cannot be aborted any more. False
    /// when it was aborted or has failed, and then the peer must not be notified.
    pub(crate) fn commit(&self) -> bool {
        let error = self.error.lock();
        let clean = self.state() == TransferState::InProgress && error.is_none();
        if clean {
            self.committed.store(true, Ordering::Relaxed);
        }
        clean
    }

    /// Sleeps until the operation has ended or `deadline` has passed; says whether it has ended.
    pub(crate) fn wait_until(&self, deadline: Instant) -> bool {
        let mut error = self.error.lock();
        while !self.state().is_terminal() {
            if self.changed.wait_until(&mut error, deadline).timed_out() {
                return self.state().is_terminal();
            }
        }
        true
    }
}

/// The moment `timeout` from now; a timeout too long to add is a century.
pub(crate) fn deadline(timeout: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(timeout)
        .unwrap_or_else(|| now + Duration::from_secs(100 * 365 * 86_400))
}
