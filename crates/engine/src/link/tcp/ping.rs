//! Pings: round trips, and marks behind all queued frames.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::Connection;
use super::lane::Lane;
use crate::link;
use crate::sync::{Condvar, Mutex, Rank};
use crate::transfer::deadline;

/// The pings of a connection whose answers are awaited.
pub(super) struct Pings {
    next: AtomicU64,
    /// Time of the answer to each ping, if it has arrived.
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

    /// Returns the number of a new ping. Never 0, whose answer is not awaited.
    fn begin(&self) -> u64 {
        let token = self.next.fetch_add(1, Ordering::Relaxed) + 1;
        self.waiting.lock().insert(token, None);
        token
    }

    /// Records the answer to a ping.
    pub(super) fn answered(&self, token: u64) {
        if let Some(answer) = self.waiting.lock().get_mut(&token) {
            *answer = Some(Instant::now());
        }
        self.changed.notify_all();
    }

    /// Awaits the answers to these pings no longer.
    fn forget(&self, pings: &mut Vec<(Arc<Lane>, u64)>) {
        let mut waiting = self.waiting.lock();
        for (_, ping) in pings.drain(..) {
            waiting.remove(&ping);
        }
    }

    /// Wakes all waiting threads, after the connection has ended or lost a lane.
    pub(super) fn changed(&self) {
        // Taking the lock makes sure that a waiting thread either sees the change or is woken.
        drop(self.waiting.lock());
        self.changed.notify_all();
    }
}

impl Lane {
    /// Queues a ping, unless that would exceed the peer's limit for unanswered pings.
    pub(super) fn push_ping(&self, token: u64) {
        let _ = self.books.lock().lane.push_ping(token);
        self.mark_dirty();
    }

    /// Queues the answer to a ping.
    pub(super) fn push_pong(&self, token: u64) {
        self.books.lock().lane.push_pong(token);
        self.mark_dirty();
    }

    /// Queues a ping behind the replies for all landed chunks. Returns false if the lane is closed or
    /// that would exceed the peer's limit for unanswered pings.
    pub(super) fn push_mark(&self, ping: u64) -> bool {
        // Includes bytes that were just received: their notification may already be visible.
        drop(self.delivery.lock());
        let is_queued = self.books.lock().lane.push_mark(ping);
        self.mark_dirty();
        is_queued
    }
}

impl Connection {
    /// Sends a ping on a lane and waits for the answer.
    pub(super) fn ping(&self, index: usize, timeout: Duration) -> Option<Duration> {
        let lane = self.lanes.load().get(index).cloned()?;
        let token = self.pings.begin();
        let start = Instant::now();
        let until = deadline(timeout);
        lane.push_ping(token);
        self.pump(&lane, 1);
        lane.call_worker();
        let mut waiting = self.pings.waiting.lock();
        while waiting.get(&token) == Some(&None) && !self.has_ended() && !lane.is_down() {
            let changed = &self.pings.changed;
            if changed.wait_until(&mut waiting, until).timed_out() {
                break;
            }
        }
        let answered = waiting.remove(&token).flatten()?;
        Some(answered.duration_since(start))
    }

    /// Queues a ping on each live lane, behind all queued frames. Returns none if lanes are being
    /// lost or replaced: messages may be queued behind the pings then.
    fn push_marks(&self) -> Vec<(Arc<Lane>, u64)> {
        let carrier = self.messages.live_carrier();
        if carrier.is_none() || !self.is_settled() {
            return Vec::new();
        }
        let mut is_each_queued = true;
        let marked = self.live_lanes().into_iter().map(|lane| {
            let ping = self.pings.begin();
            is_each_queued &= lane.push_mark(ping);
            self.pump(&lane, 1);
            lane.call_worker();
            (lane, ping)
        });
        let mut marked: Vec<_> = marked.collect();
        self.context.control.stay_awake();
        if !is_each_queued || self.messages.live_carrier() != carrier {
            self.pings.forget(&mut marked);
        }
        marked
    }

    pub(super) fn put_mark(&self) -> Mark {
        Mark {
            connection: self.this(),
            pings: self.push_marks(),
        }
    }
}

/// A ping on each lane of a connection, behind all frames that were queued when it was made. There
/// are none while lanes are being lost or replaced.
pub(super) struct Mark {
    connection: Arc<Connection>,
    /// The lanes and their pings' numbers.
    pings: Vec<(Arc<Lane>, u64)>,
}

impl link::Mark for Mark {
    fn is_reached(&mut self) -> bool {
        let connection = &self.connection;
        if connection.has_ended() {
            return true;
        }
        let pings = &mut self.pings;
        if pings.is_empty() || pings.iter().any(|(lane, _)| lane.is_down()) {
            // Frames queued on a lost lane are sent on another one: repeat the mark behind them.
            connection.pings.forget(pings);
            *pings = connection.push_marks();
            return false;
        }
        let waiting = connection.pings.waiting.lock();
        pings
            .iter()
            .all(|(_, ping)| waiting.get(ping) != Some(&None))
    }
}
