//! Notifications that have arrived.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use crate::sync::{Condvar, Mutex, Rank};

/// A message from a peer: sent on its own, or with a transfer and then delivered once the transfer
/// is complete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notification {
    /// The name of the sending session.
    pub from: String,
    /// The message; any bytes, possibly none.
    pub message: Vec<u8>,
}

/// Notifications in order of arrival.
pub(crate) struct Inbox {
    messages: Mutex<VecDeque<Notification>>,
    arrived: Condvar,
    /// Nothing more arrives.
    closed: AtomicBool,
}

impl Inbox {
    pub(crate) fn new() -> Self {
        Self {
            messages: Mutex::new(Rank::Inbox, VecDeque::new()),
            arrived: Condvar::new(),
            closed: AtomicBool::new(false),
        }
    }

    pub(crate) fn push(&self, from: &str, message: Vec<u8>) {
        self.messages.lock().push_back(Notification {
            from: from.to_owned(),
            message,
        });
        self.arrived.notify_one();
    }

    pub(crate) fn take_all(&self) -> Vec<Notification> {
        std::mem::take(&mut *self.messages.lock()).into()
    }

    /// Those who wait are told that they wait in vain.
    pub(crate) fn close(&self) {
        let messages = self.messages.lock();
        self.closed.store(true, Ordering::Relaxed);
        drop(messages);
        self.arrived.notify_all();
    }

    /// None if nothing comes in time, or at all.
    pub(crate) fn take_one(&self, deadline: Instant) -> Option<Notification> {
        let mut messages = self.messages.lock();
        loop {
            if let Some(message) = messages.pop_front() {
                return Some(message);
            }
            if self.closed.load(Ordering::Relaxed) {
                return None;
            }
            if self.arrived.wait_until(&mut messages, deadline).timed_out() {
                return messages.pop_front();
            }
        }
    }
}
