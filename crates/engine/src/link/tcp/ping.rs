//! Pings: round trips, and marks behind everything that waits to leave.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::Connection;
use crate::link;
use crate::sync::{Condvar, Mutex, Rank};
use crate::transfer::deadline;

/// The pings of a connection whose answers are waited for.
pub(super) struct Pings {
    next: AtomicU64,
    /// When each was answered, if it was.
    waiting: Mutex<HashMap<u64, Option<Instant>>>,
    changed: Condvar,
}

impl Pings {
    pub(super) fn new() -> Self {
        Self {
            next: AtomicU64::new(0),
            waiting: Mutex::new(Rank::Leaf, HashMap::new()),
            changed: Condvar::new(),
        }
    }

    /// Makes the number of a ping. Not 0, which nobody waits for.
    fn begin(&self) -> u64 {
        let token = self.next.fetch_add(1, Ordering::Relaxed) + 1;
        self.waiting.lock().insert(token, None);
        token
    }

    /// Notes the answer to a ping.
    pub(super) fn answered(&self, token: u64) {
        if let Some(answer) = self.waiting.lock().get_mut(&token) {
            *answer = Some(Instant::now());
        }
        self.changed.notify_all();
    }

    /// Wakes everybody who waits, after the connection has ended.
    pub(super) fn end(&self) {
        // With the lock: whoever waits either sees the end or is woken.
        drop(self.waiting.lock());
        self.changed.notify_all();
    }
}

impl Connection {
    /// Sends a ping on a lane and waits for the answer.
    pub(super) fn ping(&self, index: usize, timeout: Duration) -> Option<Duration> {
        let lane = self.lanes.get(index)?;
        let token = self.pings.begin();
        let start = Instant::now();
        let until = deadline(timeout);
        lane.push_ping(token);
        self.check(lane.pump(self, 1));
        lane.call_worker();
        let mut waiting = self.pings.waiting.lock();
        while waiting.get(&token) == Some(&None) && !self.has_ended() {
            let changed = &self.pings.changed;
            if changed.wait_until(&mut waiting, until).timed_out() {
                break;
            }
        }
        let answered = waiting.remove(&token).flatten()?;
        Some(answered.duration_since(start))
    }

    /// Puts a ping on each lane, behind everything that waits to leave there.
    pub(super) fn put_mark(&self) -> Mark {
        let pings = self.lanes.iter().map(|lane| {
            let ping = self.pings.begin();
            lane.push_mark(ping);
            self.check(lane.pump(self, 1));
            lane.call_worker();
            ping
        });
        let pings = pings.collect();
        self.context.control.stay_awake();
        Mark {
            connection: self.this(),
            pings,
        }
    }
}

/// A ping on each lane of a connection, behind everything that waited to leave there when it was made.
pub(super) struct Mark {
    connection: Arc<Connection>,
    /// The pings' numbers.
    pings: Vec<u64>,
}

impl link::Mark for Mark {
    fn is_reached(&self) -> bool {
        let waiting = self.connection.pings.waiting.lock();
        let is_answered = |ping| waiting.get(ping) != Some(&None);
        self.connection.has_ended() || self.pings.iter().all(is_answered)
    }
}
