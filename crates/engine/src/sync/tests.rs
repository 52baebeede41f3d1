use std::sync::Arc;
use std::thread;

use super::*;

#[test]
fn every_rank_indexes_the_list() {
    for (index, rank) in Rank::ALL.iter().enumerate() {
        assert_eq!(*rank as usize, index);
    }
}

#[test]
fn order_of_ranks_passes() {
    let session = Mutex::new(Rank::Session, 1);
    let peers = RwLock::new(Rank::Peers, 2);
    let registry = RwLock::new(Rank::Registry, 3);
    let leaf = Mutex::new(Rank::Leaf, 4);
    for _ in 0..2 {
        let mut session = session.lock();
        let peers = peers.read();
        let mut registry = registry.write();
        let leaf = leaf.try_lock_for(Duration::ZERO).unwrap();
        *session += *leaf;
        *registry += *peers;
    }
    assert_eq!(*session.lock(), 9);
    assert_eq!(*registry.read(), 7);
}

#[test]
fn try_lock_takes_any_order() {
    let session = Mutex::new(Rank::Session, ());
    let other = Mutex::new(Rank::Session, ());
    let peer = Mutex::new(Rank::PeerState, ());
    let _peer = peer.lock();
    let _session = session.try_lock().unwrap();
    let _other = other.try_lock().unwrap();
    assert!(session.try_lock().is_none());
}

#[test]
fn guards_drop_in_any_order() {
    let session = Mutex::new(Rank::Session, ());
    let peer = Mutex::new(Rank::PeerState, ());
    let leaf = Mutex::new(Rank::Leaf, ());
    let first = session.lock();
    let second = peer.lock();
    let third = leaf.lock();
    drop(first);
    drop(third);
    // Dropped guards are no longer counted, remaining guards are.
    let third = leaf.lock();
    drop(second);
    drop(third);
    let _first = session.lock();
}

#[test]
fn condvar_releases_its_lock_while_asleep() {
    let pair = Arc::new((Mutex::new(Rank::PeerState, 0), Condvar::new()));
    let other = pair.clone();
    let (state, changed) = &*pair;
    let far = Instant::now() + Duration::from_secs(3600);

    let mut guard = state.lock();
    let helper = thread::spawn(move || {
        let (state, changed) = &*other;
        *state.lock() = 1;
        changed.notify_one();
        let far = Instant::now() + Duration::from_secs(3600);
        let mut guard = state.lock();
        while *guard != 2 {
            assert!(!changed.wait_until(&mut guard, far).timed_out());
        }
    });
    while *guard != 1 {
        assert!(!changed.wait_until(&mut guard, far).timed_out());
    }
    *guard = 2;
    changed.notify_all();
    drop(guard);
    helper.join().unwrap();

    let mut guard = state.lock();
    assert!(changed.wait_until(&mut guard, Instant::now()).timed_out());
}

#[cfg(not(debug_assertions))]
#[test]
fn release_builds_add_nothing() {
    assert_eq!(
        size_of::<Mutex<u64>>(),
        size_of::<parking_lot::Mutex<u64>>()
    );
    assert_eq!(
        size_of::<RwLock<u64>>(),
        size_of::<parking_lot::RwLock<u64>>()
    );
    assert_eq!(
        size_of::<MutexGuard<'_, u64>>(),
        size_of::<parking_lot::MutexGuard<'_, u64>>()
    );
    let leaf = Mutex::new(Rank::Leaf, ());
    let session = Mutex::new(Rank::Session, ());
    let _leaf = leaf.lock();
    let _session = session.lock();
}

/// Checks that only debug builds make.
#[cfg(debug_assertions)]
mod violations {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    /// Runs `f` and returns the message of its panic.
    fn panic_of(f: impl FnOnce()) -> String {
        let panic = catch_unwind(AssertUnwindSafe(f)).expect_err("no panic");
        *panic.downcast::<String>().expect("a formatted message")
    }

    #[test]
    #[should_panic(expected = "Session is taken while this thread holds PeerState")]
    fn lock_of_an_earlier_rank() {
        let session = Mutex::new(Rank::Session, ());
        let peer = Mutex::new(Rank::PeerState, ());
        let _peer = peer.lock();
        let _session = session.lock();
    }

    #[test]
    #[should_panic(expected = "PeerState is taken while this thread holds PeerState")]
    fn lock_of_the_same_rank() {
        let one = Mutex::new(Rank::PeerState, ());
        let two = Mutex::new(Rank::PeerState, ());
        let _one = one.lock();
        let _two = two.lock();
    }

    #[test]
    #[should_panic(expected = "Registry is taken while this thread holds Registry")]
    fn second_read() {
        let registry = RwLock::new(Rank::Registry, ());
        let _one = registry.read();
        let _two = registry.read();
    }

    #[test]
    #[should_panic(expected = "Peers is taken while this thread holds Leaf")]
    fn write_under_a_later_rank() {
        let peers = RwLock::new(Rank::Peers, ());
        let leaf = Mutex::new(Rank::Leaf, ());
        let _leaf = leaf.lock();
        let _peers = peers.write();
    }

    #[test]
    #[should_panic(expected = "Peers is taken while this thread holds Registry")]
    fn lock_under_a_write() {
        let peers = Mutex::new(Rank::Peers, ());
        let registry = RwLock::new(Rank::Registry, ());
        let _registry = registry.write();
        let _peers = peers.lock();
    }

    #[test]
    #[should_panic(expected = "Session is taken while this thread holds PeerState")]
    fn lock_with_a_timeout() {
        let session = Mutex::new(Rank::Session, ());
        let peer = Mutex::new(Rank::PeerState, ());
        let _peer = peer.lock();
        let _session = session.try_lock_for(Duration::ZERO);
    }

    #[test]
    #[should_panic(expected = "Session is taken while this thread holds PeerState")]
    fn lock_under_a_lock_that_was_tried() {
        let session = Mutex::new(Rank::Session, ());
        let peer = Mutex::new(Rank::PeerState, ());
        let _peer = peer.try_lock().unwrap();
        let _session = session.lock();
    }

    #[test]
    #[should_panic(expected = "PeerState is taken while this thread holds Pool")]
    fn remaining_guard_counts_after_another_is_dropped() {
        let peer = Mutex::new(Rank::PeerState, ());
        let queue = Mutex::new(Rank::Pool, ());
        let other = Mutex::new(Rank::Pool, ());
        let _queue = queue.lock();
        drop(other.try_lock().unwrap());
        let _peer = peer.lock();
    }

    #[test]
    #[should_panic(expected = "PeerState is taken while this thread holds Leaf")]
    fn last_of_several_ranks_counts() {
        let session = Mutex::new(Rank::Session, ());
        let peer = Mutex::new(Rank::PeerState, ());
        let leaf = Mutex::new(Rank::Leaf, ());
        let _session = session.lock();
        let _leaf = leaf.lock();
        let _peer = peer.lock();
    }

    #[test]
    fn wait_under_a_later_rank() {
        let peer = Mutex::new(Rank::PeerState, ());
        let leaf = Mutex::new(Rank::Leaf, ());
        let changed = Condvar::new();
        let mut guard = peer.lock();
        let outer = leaf.lock();
        let message = panic_of(|| {
            changed.wait_until(&mut guard, Instant::now());
        });
        assert!(message.contains("PeerState is taken while this thread holds Leaf"));
        drop(outer);
        // The guard is still counted.
        let message = panic_of(|| drop(peer.lock()));
        assert!(message.contains("PeerState is taken while this thread holds PeerState"));
    }

    #[test]
    fn lock_counts_again_after_a_wait() {
        let session = Mutex::new(Rank::Session, ());
        let peer = Mutex::new(Rank::PeerState, ());
        let mut guard = peer.lock();
        assert!(
            Condvar::new()
                .wait_until(&mut guard, Instant::now())
                .timed_out()
        );
        let message = panic_of(|| drop(session.lock()));
        assert!(message.contains("Session is taken while this thread holds PeerState"));
        drop(guard);
        drop(session.lock());
    }

    #[test]
    fn threads_are_independent() {
        let session = Mutex::new(Rank::Session, ());
        let leaf = Mutex::new(Rank::Leaf, ());
        let _leaf = leaf.lock();
        thread::scope(|scope| {
            scope.spawn(|| drop(session.lock())).join().unwrap();
        });
        let message = panic_of(|| drop(session.lock()));
        assert!(message.contains("Session is taken while this thread holds Leaf"));
    }

    #[test]
    fn panicking_thread_may_lock() {
        struct LockOnDrop<'a>(&'a Mutex<u32>);
        impl Drop for LockOnDrop<'_> {
            fn drop(&mut self) {
                *self.0.lock() += 1;
            }
        }
        let session = Mutex::new(Rank::Session, 0);
        let leaf = Mutex::new(Rank::Leaf, ());
        let leaf = leaf.lock();
        let message = panic_of(|| {
            let _locks = LockOnDrop(&session);
            panic!("{}", "first");
        });
        assert_eq!(message, "first");
        drop(leaf);
        assert_eq!(*session.lock(), 1);
    }
}
