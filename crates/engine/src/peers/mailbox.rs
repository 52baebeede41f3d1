//! Requests of other threads to the control thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tcpx_net::{Poller, Waker};

use super::peer::PeerShared;
use crate::link::{Control, Link};
use crate::sync::{Mutex, Rank};

/// Requests to the control thread, from any thread.
///
/// Commands are handled in order. Flags (`resume`, `neighbour_waits`, `dozing`) take no lock, so
/// they may be set with any lock held.
pub(crate) struct Mailbox {
    /// `None` once the thread has ended:
    /// later commands are dropped, since they may keep the session alive.
    commands: Mutex<Option<Vec<Command>>>,
    waker: Waker,
    /// True if paused lanes may resume.
    resume: AtomicBool,
    /// True if messages to neighbours are queued.
    neighbour_waits: AtomicBool,
    /// True while the thread sleeps without a limit: a thread that starts work wakes it, so that
    /// the work is supervised.
    dozing: AtomicBool,
}

/// A request to the control thread.
pub(crate) enum Command {
    /// Connect to a peer, which learns the result.
    Connect(Arc<PeerShared>),
    /// Take a link apart that has ended.
    Reap(Arc<dyn Link>),
    /// Start WRITEs that have waited for the end of an aborted one.
    Release(Arc<PeerShared>),
    /// Recover a link that has lost a lane.
    LaneLost(Arc<dyn Link>),
    /// End the thread.
    Stop,
}

impl Mailbox {
    pub(crate) fn new(poller: &Poller) -> Self {
        Self {
            commands: Mutex::new(Rank::Control, Some(Vec::new())),
            waker: poller.waker(),
            resume: AtomicBool::new(false),
            neighbour_waits: AtomicBool::new(false),
            dozing: AtomicBool::new(false),
        }
    }

    /// Requests a connection; the peer learns the result.
    pub(crate) fn connect(&self, peer: Arc<PeerShared>) {
        self.push(Command::Connect(peer));
    }

    /// Requests that WRITEs which have waited for the end of an aborted one are started. Returns
    /// false if the thread has ended.
    pub(crate) fn release(&self, peer: Arc<PeerShared>) -> bool {
        self.push(Command::Release(peer))
    }

    /// Ends the thread.
    pub(crate) fn stop(&self) {
        self.push(Command::Stop);
    }

    /// Wakes the thread, so that it checks its other work.
    pub(crate) fn wake(&self) {
        self.waker.wake();
    }

    /// Returns whether paused lanes are to be driven, once for all requests.
    pub(crate) fn take_resume(&self) -> bool {
        self.resume.load(Ordering::SeqCst) && self.resume.swap(false, Ordering::SeqCst)
    }

    /// Returns whether messages to neighbours are queued, once for all requests.
    pub(crate) fn take_neighbour_waits(&self) -> bool {
        self.neighbour_waits.swap(false, Ordering::SeqCst)
    }

    /// Sets whether the thread is about to sleep without a limit.
    pub(crate) fn set_dozing(&self, yes: bool) {
        self.dozing.store(yes, Ordering::SeqCst);
    }

    #[cfg(test)]
    pub(crate) fn has_stopped(&self) -> bool {
        self.commands.lock().is_none()
    }

    /// Returns whether the thread will take the command.
    fn push(&self, command: Command) -> bool {
        let mut commands = self.commands.lock();
        let is_open = commands.is_some();
        if let Some(commands) = &mut *commands {
            commands.push(command);
        }
        drop(commands);
        self.waker.wake();
        is_open
    }

    /// Takes all commands.
    pub(crate) fn take(&self) -> Vec<Command> {
        let mut commands = self.commands.lock();
        commands.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Takes all commands and drops later ones.
    pub(crate) fn close(&self) -> Vec<Command> {
        self.commands.lock().take().unwrap_or_default()
    }
}

impl Control for Mailbox {
    /// Costs one load while the thread is awake.
    fn stay_awake(&self) {
        if self.dozing.load(Ordering::SeqCst) && self.dozing.swap(false, Ordering::SeqCst) {
            self.waker.wake();
        }
    }

    /// Once the thread has ended, closing the session takes links apart.
    fn reap(&self, link: Arc<dyn Link>) {
        self.push(Command::Reap(link));
    }

    fn lane_lost(&self, link: Arc<dyn Link>) {
        self.push(Command::LaneLost(link));
    }

    fn neighbour_waits(&self) {
        self.neighbour_waits.store(true, Ordering::SeqCst);
        self.waker.wake();
    }

    fn resume(&self) {
        self.resume.store(true, Ordering::SeqCst);
        self.waker.wake();
    }
}
