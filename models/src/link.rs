//! The quota of memory that peers may use, and the lanes that it pauses.

use std::sync::Arc;

use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::thread;

#[path = "../../crates/engine/src/link/quota.rs"]
mod quota;

use quota::{Quota, Reserved, Share};

/// The part of the control thread that the quota uses.
pub(crate) trait Control: Send + Sync {
    fn resume(&self);
}

/// Counts how often paused lanes were resumed.
struct Calls(AtomicUsize);

impl Control for Calls {
    fn resume(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

const LIMIT: usize = 4 << 20;

fn reserve(share: &Arc<Share>, bytes: usize) -> Option<quota::Held> {
    match share.reserve(bytes) {
        Reserved::Room(held) => Some(held),
        Reserved::Full => None,
        Reserved::Nobody => unreachable!("the session is not closing"),
    }
}

/// A lane that finds no room while memory is released is resumed afterwards.
pub fn a_paused_lane_is_resumed() {
    loom::model(|| {
        let calls = Arc::new(Calls(AtomicUsize::new(0)));
        let share = Quota::new(LIMIT, Arc::clone(&calls) as Arc<dyn Control>).share();
        let taken = reserve(&share, LIMIT / 2);
        assert!(taken.is_some());
        let application = thread::spawn(move || drop(taken));
        let is_paused = reserve(&share, LIMIT / 2).is_none();
        application.join().unwrap();
        if is_paused {
            assert!(calls.0.load(Ordering::Relaxed) > 0, "the lane is never resumed");
            assert!(reserve(&share, LIMIT / 2).is_some());
        }
    });
}
