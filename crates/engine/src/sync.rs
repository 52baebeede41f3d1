//! Locks with ranks, which detect a wrong lock order in any debug run.
//!
//! Two threads that take the same two locks in opposite orders deadlock, but only when they
//! collide. Each lock here has a [`Rank`], and a thread takes locks only in the order of their
//! ranks. In debug builds a blocking call that breaks this order panics at once, even on a single
//! thread, and names both ranks. In release builds locks and guards are the `parking_lot` types,
//! without any additional field or instruction.
//!
//! | call | checks the order | counts as held |
//! |---|---|---|
//! | `lock`, `read`, `write`, `try_lock_for` | yes: it may wait | yes |
//! | `try_lock` | no: it never waits | yes |
//! | `Condvar::wait_until` | yes: it takes its lock again | not while asleep |
//!
//! A read lock has the same rank as a write lock: a second read of one lock deadlocks if a writer
//! began to wait in between.

use std::fmt;
use std::ops::{Deref, DerefMut};
/// Atomics of the modules that `models/` checks; the models substitute their own.
pub(crate) use std::sync::atomic;
#[cfg(test)]
use std::time::Duration;
use std::time::Instant;

use parking_lot::WaitTimeoutResult;

macro_rules! ranks {
    ($($(#[$doc:meta])* $name:ident,)+) => {
        /// The position of a lock in the lock order.
        ///
        /// A thread that holds a lock may wait only for locks of later ranks: `Session` is taken
        /// first, `Counters` last. Two locks of the same rank are never held together.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        #[repr(u8)]
        pub(crate) enum Rank {
            $($(#[$doc])* $name,)+
        }

        impl Rank {
            /// Lists every rank in its order.
            #[cfg(any(debug_assertions, test))]
            const ALL: &[Self] = &[$(Self::$name,)+];
        }
    };
}

ranks! {
    /// The threads of a session, held until closing has finished.
    Session,
    /// The last posting of a transfer, held while a new posting is made.
    Posting,
    /// One registration, held until its revocation has finished.
    Registration,
    /// The table of a session's peers.
    Peers,
    /// The state of one peer.
    PeerState,
    /// The link in use to one peer.
    PeerLink,
    /// The state of a connection that the control thread recorded at its last liveness check.
    Liveness,
    /// The receiving steps of a lane, held until their events are delivered.
    Delivery,
    /// The record of messages received on a connection, held while one message is delivered.
    Messages,
    /// Tagged messages of one peer.
    Tagged,
    /// The reader of a tagged message.
    Reading,
    /// Copies that no lane's locks protect.
    Copies,
    /// Messages that the peer of a connection may not have received.
    Outbox,
    /// The receiving half of a lane, held for one step.
    LaneReceive,
    /// The sending half of a lane, held for one step.
    LaneSend,
    /// The books of a lane, which both halves share.
    LaneBooks,
    /// The registered regions.
    Registry,
    /// Copies of a session within itself: the queue, and the devices that copy.
    Local,
    /// Devices whose staging has been prepared.
    Staging,
    /// The pool of staging slots.
    Pool,
    /// The links of a session.
    Links,
    /// Commands to the control thread.
    Control,
    /// The lanes of a worker thread.
    Worker,
    /// Accepted peers and notifications that the application has not taken yet.
    Inbox,
    /// The completion of one posted operation.
    Completion,
    /// Requests to a neighbour process, and the layout of plans copied from it.
    Neighbour,
    /// Locks under which only counter locks are taken.
    Leaf,
    /// The table of peers that have counters; taken wherever a peer is dropped.
    Book,
    /// The lanes in a peer's counters; taken wherever a lane is dropped.
    Counters,
}

/// Mutual exclusion lock with a rank. See [`parking_lot::Mutex`].
pub(crate) struct Mutex<T> {
    order: Order,
    inner: parking_lot::Mutex<T>,
}

impl<T> Mutex<T> {
    /// Makes an unlocked mutex of this rank.
    #[inline]
    pub(crate) const fn new(rank: Rank, value: T) -> Self {
        Self {
            order: Order::new(rank),
            inner: parking_lot::Mutex::new(value),
        }
    }

    /// Waits for the lock.
    ///
    /// # Panics
    ///
    /// In debug builds, if this thread holds a lock of the same or a later rank.
    #[inline]
    #[track_caller]
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.order.check();
        MutexGuard {
            inner: self.inner.lock(),
            held: self.order.held(),
        }
    }

    /// Takes the lock if it is free. The order is not checked.
    #[inline]
    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        Some(MutexGuard {
            inner: self.inner.try_lock()?,
            held: self.order.held(),
        })
    }

    /// Waits for the lock up to `timeout`.
    ///
    /// # Panics
    ///
    /// In debug builds, if this thread holds a lock of the same or a later rank.
    #[cfg(test)]
    #[track_caller]
    pub(crate) fn try_lock_for(&self, timeout: Duration) -> Option<MutexGuard<'_, T>> {
        self.order.check();
        Some(MutexGuard {
            inner: self.inner.try_lock_for(timeout)?,
            held: self.order.held(),
        })
    }
}

impl<T: fmt::Debug> fmt::Debug for Mutex<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

/// Access to the value in a [`Mutex`].
#[must_use = "the lock is released at once"]
pub(crate) struct MutexGuard<'a, T> {
    inner: parking_lot::MutexGuard<'a, T>,
    held: Held,
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.inner
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.inner
    }
}

/// Reader-writer lock with a rank. See [`parking_lot::RwLock`].
pub(crate) struct RwLock<T> {
    order: Order,
    inner: parking_lot::RwLock<T>,
}

impl<T> RwLock<T> {
    /// Makes an unlocked lock of this rank.
    #[inline]
    pub(crate) const fn new(rank: Rank, value: T) -> Self {
        Self {
            order: Order::new(rank),
            inner: parking_lot::RwLock::new(value),
        }
    }

    /// Waits for shared access.
    ///
    /// # Panics
    ///
    /// In debug builds, if this thread holds a lock of the same or a later rank.
    #[inline]
    #[track_caller]
    pub(crate) fn read(&self) -> RwLockReadGuard<'_, T> {
        self.order.check();
        RwLockReadGuard {
            inner: self.inner.read(),
            _held: self.order.held(),
        }
    }

    /// Waits for exclusive access.
    ///
    /// # Panics
    ///
    /// In debug builds, if this thread holds a lock of the same or a later rank.
    #[inline]
    #[track_caller]
    pub(crate) fn write(&self) -> RwLockWriteGuard<'_, T> {
        self.order.check();
        RwLockWriteGuard {
            inner: self.inner.write(),
            _held: self.order.held(),
        }
    }
}

impl<T: fmt::Debug> fmt::Debug for RwLock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

/// Shared access to the value in a [`RwLock`].
#[must_use = "the lock is released at once"]
pub(crate) struct RwLockReadGuard<'a, T> {
    inner: parking_lot::RwLockReadGuard<'a, T>,
    _held: Held,
}

impl<T> Deref for RwLockReadGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.inner
    }
}

/// Exclusive access to the value in a [`RwLock`].
#[must_use = "the lock is released at once"]
pub(crate) struct RwLockWriteGuard<'a, T> {
    inner: parking_lot::RwLockWriteGuard<'a, T>,
    _held: Held,
}

impl<T> Deref for RwLockWriteGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.inner
    }
}

impl<T> DerefMut for RwLockWriteGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.inner
    }
}

/// Wakes threads that wait for a change of a [`Mutex`]'s value. See [`parking_lot::Condvar`].
#[derive(Debug, Default)]
pub(crate) struct Condvar(parking_lot::Condvar);

impl Condvar {
    /// Makes a condition variable without waiters.
    #[inline]
    pub(crate) const fn new() -> Self {
        Self(parking_lot::Condvar::new())
    }

    /// Releases the lock and sleeps until a notification or `deadline`, then waits for the lock.
    ///
    /// # Panics
    ///
    /// In debug builds, if this thread holds another lock of the same or a later rank.
    #[inline]
    #[track_caller]
    pub(crate) fn wait_until<T>(
        &self,
        guard: &mut MutexGuard<'_, T>,
        deadline: Instant,
    ) -> WaitTimeoutResult {
        let _asleep = guard.held.release();
        self.0.wait_until(&mut guard.inner, deadline)
    }

    /// Wakes one of the waiting threads.
    #[inline]
    pub(crate) fn notify_one(&self) {
        self.0.notify_one();
    }

    /// Wakes all waiting threads.
    #[inline]
    pub(crate) fn notify_all(&self) {
        self.0.notify_all();
    }
}

#[cfg(debug_assertions)]
use checked::{Held, Order};
#[cfg(not(debug_assertions))]
use unchecked::{Held, Order};

/// Counts the locks that each thread holds, by rank.
#[cfg(debug_assertions)]
mod checked {
    use std::cell::Cell;

    use super::Rank;

    thread_local! {
        /// The number of locks of each rank that this thread holds.
        ///
        /// Counters, not a stack, because guards are dropped in any order; counters above one,
        /// because `try_lock` ignores the order. The array needs no destructor, so a thread may
        /// drop guards until it ends.
        static HELD: [Cell<u32>; Rank::ALL.len()] = const { [const { Cell::new(0) }; _] };
    }

    /// The rank of a lock.
    pub(super) struct Order(Rank);

    impl Order {
        pub(super) const fn new(rank: Rank) -> Self {
            Self(rank)
        }

        /// Panics if this thread holds a lock of the same or a later rank.
        ///
        /// Skips the check in a thread that is already panicking: a second panic would abort the
        /// process and hide the first.
        #[track_caller]
        pub(super) fn check(&self) {
            let rank = self.0;
            let last = HELD.with(|held| held.iter().rposition(|count| count.get() > 0));
            if let Some(last) = last.map(|last| Rank::ALL[last])
                && last >= rank
                && !std::thread::panicking()
            {
                panic!("lock order: {rank:?} is taken while this thread holds {last:?}");
            }
        }

        /// Counts this lock as held until the returned value is dropped.
        pub(super) fn held(&self) -> Held {
            add(self.0);
            Held(self.0)
        }
    }

    /// The rank of a lock that is counted as held.
    pub(super) struct Held(Rank);

    impl Held {
        /// Stops counting the lock until the returned value is dropped. Checks the order as
        /// [`Order::check`] does, because the thread will wait for the lock again.
        #[track_caller]
        pub(super) fn release(&self) -> Released {
            remove(self.0);
            // Made before the check, which may unwind: `Released` restores the count that the
            // guard's drop will decrement.
            let released = Released(self.0);
            Order(self.0).check();
            released
        }
    }

    impl Drop for Held {
        fn drop(&mut self) {
            remove(self.0);
        }
    }

    /// The rank of a lock that is released temporarily.
    pub(super) struct Released(Rank);

    impl Drop for Released {
        fn drop(&mut self) {
            add(self.0);
        }
    }

    fn add(rank: Rank) {
        HELD.with(|held| held[rank as usize].update(|count| count + 1));
    }

    fn remove(rank: Rank) {
        HELD.with(|held| held[rank as usize].update(|count| count - 1));
    }
}

/// Replaces `checked` in release builds: zero-sized types, empty functions.
#[cfg(not(debug_assertions))]
mod unchecked {
    use super::Rank;

    pub(super) struct Order;

    impl Order {
        #[inline(always)]
        pub(super) const fn new(_: Rank) -> Self {
            Self
        }

        #[inline(always)]
        pub(super) fn check(&self) {}

        #[inline(always)]
        pub(super) fn held(&self) -> Held {
            Held
        }
    }

    pub(super) struct Held;

    impl Held {
        #[inline(always)]
        pub(super) fn release(&self) -> Self {
            Self
        }
    }
}

#[cfg(test)]
mod tests;
