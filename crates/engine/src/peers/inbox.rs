//! Notifications that have arrived.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use tcpx_proto::info::ConnectionInfo;

use crate::link::{Held, Origin};
use crate::sync::{Condvar, Mutex, Rank};

/// A message from a peer: sent on its own, or with a transfer and then delivered once the transfer
/// is complete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notification {
    /// The name of the sending session. That of a session whose connection info is loaded is proven;
    /// otherwise it is what a session that knows this one's connection info calls itself.
    pub from: String,
    /// The message; any bytes, possibly none.
    pub message: Vec<u8>,
}

/// A notification that nobody has taken.
struct Arrived {
    from: Arc<Origin>,
    message: Vec<u8>,
    /// Given back as soon as it is taken.
    _held: Option<Held>,
}

impl From<Arrived> for Notification {
    fn from(arrived: Arrived) -> Self {
        Self {
            from: arrived.from.name.clone(),
            message: arrived.message,
        }
    }
}

/// Notifications in order of arrival.
pub(crate) struct Inbox {
    messages: Mutex<VecDeque<Arrived>>,
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

    pub(crate) fn push(&self, from: &Arc<Origin>, message: Vec<u8>, held: Option<Held>) {
        self.messages.lock().push_back(Arrived {
            from: Arc::clone(from),
            message,
            _held: held,
        });
        self.arrived.notify_one();
    }

    pub(crate) fn take_all(&self) -> Vec<Notification> {
        let arrived = std::mem::take(&mut *self.messages.lock());
        arrived.into_iter().map(Notification::from).collect()
    }

    /// Drops what came under the name of a session from somebody who has not proven to be it.
    pub(crate) fn forget_impostors(&self, info: &ConnectionInfo) {
        let name = info.name().as_str();
        let mut messages = self.messages.lock();
        messages.retain(|message| message.from.name != name || message.from.is_genuine(info));
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
                return Some(message.into());
            }
            if self.closed.load(Ordering::Relaxed) {
                return None;
            }
            if self.arrived.wait_until(&mut messages, deadline).timed_out() {
                return messages.pop_front().map(Notification::from);
            }
        }
    }
}
