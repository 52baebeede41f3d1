//! Descriptors for event loops.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;

use tcpx_net::{InProcess, Signal};

use crate::error::Error;
use crate::sync::{Mutex, Rank};

/// A descriptor (eventfd) that becomes readable when a transfer has ended or a notification has
/// arrived, for programs with their own event loop: epoll, libuv, tokio, asyncio.
///
/// Transfers need no polling meanwhile: the threads of the session move the bytes. Each event loop
/// has its own `Events`, for any number of sessions. Clones are handles to the same descriptor,
/// which is closed with the last handle, or later if armed transfers are in flight.
///
/// 1. [`Transfer::arm`](crate::Transfer::arm) requests one event at the end of a transfer, and
///    returns the state: a transfer that has already ended causes no event.
///    [`Session::subscribe`](crate::Session::subscribe) requests an event for each later
///    notification, and for the end of the session; check for earlier notifications after
///    subscribing.
/// 2. Wait until the descriptor is readable. Do not read from it.
/// 3. [`Events::take`] returns the events and makes the descriptor unreadable again.
///
/// No event is lost, whichever thread causes it: an event that occurs while [`Events::take`] runs
/// is either returned or makes the descriptor readable again. All events that occur before they are
/// taken cost one system call together.
///
/// In a forked child every call fails with [`Error::Forked`], and the descriptor is closed.
#[derive(Clone, Debug)]
pub struct Events {
    queue: InProcess<Arc<Queue>>,
}

/// Events returned by [`Events::take`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Happened {
    /// The keys of armed transfers that have ended, in order.
    pub ended: Vec<u64>,
    /// True if a notification has arrived at a subscribed session. It may already have been taken.
    pub notified: bool,
    /// True if a subscribed session was closed.
    pub closed: bool,
    /// True if more transfers have ended: the descriptor stays readable.
    pub more: bool,
}

impl Events {
    /// Makes a descriptor without armed transfers.
    ///
    /// # Errors
    /// The process is out of file descriptors.
    pub fn new() -> Result<Self, Error> {
        let signal = Signal::new().map_err(|error| Error::io("make an eventfd", error))?;
        let state = Mutex::new(Rank::Leaf, State::default());
        Ok(Self {
            queue: InProcess::new(Arc::new(Queue { signal, state })),
        })
    }

    /// Takes the events since the last call, with at most `max` transfers. Never waits.
    ///
    /// # Errors
    /// The call is made in a forked child.
    pub fn take(&self, max: usize) -> Result<Happened, Error> {
        self.queue.check()?;
        Ok(self.queue.take(max))
    }

    /// Returns the queue, unless it belongs to another process.
    pub(crate) fn queue(&self) -> Result<&Arc<Queue>, Error> {
        self.queue.check()?;
        Ok(&self.queue)
    }

    /// Refuses the call in a forked child, where the descriptor's number may belong to another
    /// file.
    ///
    /// # Errors
    /// The call is made in a forked child.
    pub fn check(&self) -> Result<(), Error> {
        Ok(self.queue.check()?)
    }
}

impl AsFd for Events {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.queue.signal.as_fd()
    }
}

impl AsRawFd for Events {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

/// Events that have not been taken.
#[derive(Debug)]
pub(crate) struct Queue {
    signal: Signal,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    happened: Happened,
    /// True while the signal is raised.
    is_raised: bool,
}

impl Queue {
    /// Adds the end of a transfer.
    pub(crate) fn ended(&self, key: u64) {
        self.note(|happened| happened.ended.push(key));
    }

    /// Adds the arrival of a notification.
    pub(crate) fn notified(&self) {
        self.note(|happened| happened.notified = true);
    }

    /// Adds the end of a session.
    pub(crate) fn closed(&self) {
        self.note(|happened| happened.closed = true);
    }

    fn note(&self, note: impl FnOnce(&mut Happened)) {
        let mut state = self.state.lock();
        note(&mut state.happened);
        if !state.is_raised {
            state.is_raised = true;
            // Raised under the lock, so that `take` sees the flag and the descriptor in agreement.
            self.signal.raise();
        }
    }

    fn take(&self, max: usize) -> Happened {
        let mut state = self.state.lock();
        let mut happened = std::mem::take(&mut state.happened);
        if happened.ended.len() > max {
            state.happened.ended = happened.ended.split_off(max);
            happened.more = true;
        } else if state.is_raised {
            state.is_raised = false;
            self.signal.clear();
        }
        happened
    }
}

#[cfg(test)]
mod tests;
