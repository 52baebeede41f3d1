//! Notifications that have arrived.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use tcpx_proto::info::ConnectionInfo;

use crate::link::{Held, Origin};
use crate::sync::{Condvar, Mutex, Rank};
use crate::transfer::Queue;

/// A message from a peer: sent separately,
/// or with a transfer and then delivered once the transfer is complete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notification {
    /// The name of the sending session. The name is proven if the session's connection info is
    /// loaded; otherwise it is the name that a session which knows this one's connection info
    /// claims.
    pub from: String,
    /// The message; any bytes, possibly none.
    pub message: Vec<u8>,
}

/// A notification that was not taken.
struct Arrived {
    from: Arc<Origin>,
    message: Vec<u8>,
    /// Released as soon as the notification is taken.
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
    /// True once nothing more arrives.
    closed: AtomicBool,
    /// True once there was a subscriber.
    has_subscribers: AtomicBool,
    /// Event loops to notify of notifications and of the end.
    subscribers: Mutex<Vec<Weak<Queue>>>,
}

impl Inbox {
    pub(crate) fn new() -> Self {
        Self {
            messages: Mutex::new(Rank::Inbox, VecDeque::new()),
            arrived: Condvar::new(),
            closed: AtomicBool::new(false),
            has_subscribers: AtomicBool::new(false),
            subscribers: Mutex::new(Rank::Inbox, Vec::new()),
        }
    }

    /// Notifies `queue` of later arrivals and of the end, as long as the queue exists.
    pub(crate) fn subscribe(&self, queue: &Arc<Queue>) {
        let mut subscribers = self.subscribers.lock();
        subscribers.retain(|known| known.strong_count() > 0);
        let is_known = |known: &Weak<Queue>| std::ptr::eq(known.as_ptr(), Arc::as_ptr(queue));
        if !subscribers.iter().any(is_known) {
            subscribers.push(Arc::downgrade(queue));
        }
        // Under the lock: `close` either has notified earlier subscribers, or is going to.
        if self.closed.load(Ordering::Relaxed) {
            queue.closed();
        }
        drop(subscribers);
        // Under the lock of the messages: a caller that checks for messages after this finds
        // earlier ones, which cause no event.
        let _messages = self.messages.lock();
        self.has_subscribers.store(true, Ordering::Release);
    }

    fn tell(&self, event: impl Fn(&Queue)) {
        for subscriber in self.subscribers.lock().iter().filter_map(Weak::upgrade) {
            event(&subscriber);
        }
    }

    pub(crate) fn push(&self, from: &Arc<Origin>, message: Vec<u8>, held: Option<Held>) {
        let mut messages = self.messages.lock();
        messages.push_back(Arrived {
            from: Arc::clone(from),
            message,
            _held: held,
        });
        // Under the lock: a new subscriber checks the messages afterwards, and either sees this one
        // or is seen here.
        let is_awaited = self.has_subscribers.load(Ordering::Acquire);
        drop(messages);
        self.arrived.notify_one();
        if is_awaited {
            self.tell(Queue::notified);
        }
    }

    pub(crate) fn take_all(&self) -> Vec<Notification> {
        let arrived = std::mem::take(&mut *self.messages.lock());
        arrived.into_iter().map(Notification::from).collect()
    }

    /// Drops messages that arrived under the name of a session
    /// from a sender that has not proven to be it.
    pub(crate) fn forget_impostors(&self, info: &ConnectionInfo) {
        let name = info.name().as_str();
        let mut messages = self.messages.lock();
        messages.retain(|message| message.from.name != name || message.from.is_genuine(info));
    }

    /// Wakes all waiting threads, because nothing more will arrive.
    pub(crate) fn close(&self) {
        let messages = self.messages.lock();
        self.closed.store(true, Ordering::Relaxed);
        drop(messages);
        self.arrived.notify_all();
        self.tell(Queue::closed);
    }

    /// Takes a notification; returns `None` if none arrives before `deadline` or the end.
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
