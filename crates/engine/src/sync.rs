//! Locks with ranks, which find a wrong order of locking in any debug run.
//!
//! Two threads that take the same two locks in opposite orders deadlock, but only when they meet.
//! Each lock here is made with a [`Rank`], and a thread takes locks in the order of their ranks
//! only: in debug builds a blocking call that breaks this order panics at once, on one thread, and
//! names both ranks. In release builds locks and guards are those of `parking_lot`, without any
//! further field or instruction.
//!
//! | call | checks the order | counts as held |
//! |---|---|---|
//! | `lock`, `read`, `write`, `try_lock_for` | yes: it may wait | yes |
//! | `try_lock` | no: it never waits | yes |
//! | `Condvar::wait_until` | yes: it takes its lock again | not while asleep |
//!
//! A read lock ranks as a write lock does: a second read of one lock deadlocks when a writer has
//! begun to wait in between.

use std::fmt;
use std::ops::{Deref, DerefMut};
#[cfg(test)]
use std::time::Duration;
use std::time::Instant;

use parking_lot::WaitTimeoutResult;

macro_rules! ranks {
    ($($(#[$doc:meta])* $name:ident,)+) => {
        /// The place of a lock in the order of locking.
        ///
        /// A thread that holds a lock may wait for locks of later ranks only: `Session` is taken
        /// first, `Leaf` last. Locks of the same rank are never held together.
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
    /// The threads of a session, to the end of its closing.
    Session,
    /// The last posting of a transfer, while another is made.
    Posting,
    /// One registration, to the end of its revocation.
    Registration,
    /// The table of a session's peers.
    Peers,
    /// The state of one peer.
    PeerState,
    /// The link that is in use to one peer.
    PeerLink,
    /// What the control thread saw of a connection at its last look.
    Liveness,
    /// What a lane has received, until it is delivered.
    Delivery,
    /// Which messages of a connection have come, while one is delivered.
    Messages,
    /// Tagged messages of one peer.
    Tagged,
    /// What reads a tagged message.
    Reading,
    /// Copies that no lane's locks protect.
    Copies,
    /// Messages that the peer of a connection may not have.
    Outbox,
    /// The receiving half of a lane, for one step.
    LaneReceive,
    /// The sending half of a lane, for one step.
    LaneSend,
    /// What both halves of a lane share.
    LaneBooks,
    /// The registered regions.
    Registry,
    /// Copies of a session within itself: what waits, and the devices that make them.
    Local,
    /// Devices that were prepared.
    Staging,
    /// The pool of staging slots.
    Pool,
    /// The links of a session.
    Links,
    /// Commands to the control thread.
    Control,
    /// The lanes of a worker thread.
    Worker,
    /// Peers that have connected, and notifications, until the application takes them.
    Inbox,
    /// The end of one posted operation.
    Completion,
    /// What is asked of a neighbour, and how a plan is copied from it.
    Neighbour,
    /// Locks under which no other lock is taken.
    Leaf,
}

/// Mutual exclusion with a rank. See [`parking_lot::Mutex`].
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
    /// In debug builds, where this thread holds a lock of the same or a later rank.
    #[inline]
    #[track_caller]
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.order.check();
        MutexGuard {
            inner: self.inner.lock(),
            held: self.order.held(),
        }
    }

    /// Takes the lock where nobody holds it, in any order.
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
    /// In debug builds, where this thread holds a lock of the same or a later rank.
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

/// Access to what a [`Mutex`] guards.
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

/// Shared or exclusive access, with a rank. See [`parking_lot::RwLock`].
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
    /// In debug builds, where this thread holds a lock of the same or a later rank.
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
    /// In debug builds, where this thread holds a lock of the same or a later rank.
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

/// Shared access to what a [`RwLock`] guards.
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

/// Exclusive access to what a [`RwLock`] guards.
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

/// Wakes threads that wait for a change under a [`Mutex`]. See [`parking_lot::Condvar`].
#[derive(Debug, Default)]
pub(crate) struct Condvar(parking_lot::Condvar);

impl Condvar {
    /// Makes a condition variable that nobody waits for.
    #[inline]
    pub(crate) const fn new() -> Self {
        Self(parking_lot::Condvar::new())
    }

    /// Releases the lock and sleeps until a notification or `deadline`, then waits for the lock.
    ///
    /// # Panics
    ///
    /// In debug builds, where this thread holds another lock of the same or a later rank.
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
        /// Counts, not a stack, since guards are dropped in any order; more than one, since
        /// `try_lock` takes any lock. Without a destructor: a thread may drop guards until its end.
        static HELD: [Cell<u32>; Rank::ALL.len()] = const { [const { Cell::new(0) }; _] };
    }

    /// The rank in a lock.
    pub(super) struct Order(Rank);

    impl Order {
        pub(super) const fn new(rank: Rank) -> Self {
            Self(rank)
        }

        /// Panics where this thread holds a lock of the same or a later rank.
        ///
        /// A thread that already panics goes on: a second panic would abort the process and hide
        /// the first.
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

    /// The rank in a guard, counted as held.
    pub(super) struct Held(Rank);

    impl Held {
        /// Stops counting the lock until the returned value is dropped. Checks as [`Order::check`]
        /// does: the lock is going to be waited for.
        #[track_caller]
        pub(super) fn release(&self) -> Released {
            remove(self.0);
            // Before the check, which may unwind: the guard counts down once more.
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

    /// The rank of a lock that is released for a while.
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

/// Stands in for `checked` where nothing is counted: types without size, calls without code.
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
