//! What other threads ask of the control thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tcpx_net::{Poller, Waker};

use super::peer::PeerShared;
use crate::link::{Control, Link};
use crate::sync::{Mutex, Rank};

/// The control thread's mailbox.
pub(crate) struct Mailbox {
    /// None once the thread has ended: what nobody will carry out is not kept, it may hold the session.
    commands: Mutex<Option<Vec<Command>>>,
    waker: Waker,
    /// Lanes that were paused may go on.
    resume: AtomicBool,
    /// Messages to neighbours wait for room.
    neighbour_waits: AtomicBool,
    /// The thread sleeps without a limit: whoever starts work wakes it, so that it watches over that.
    dozing: AtomicBool,
}

/// Something that the control thread is asked to do.
pub(crate) enum Command {
    /// Connect to a peer, which learns how it went.
    Connect(Arc<PeerShared>),
    /// Take a link apart that has ended.
    Reap(Arc<dyn Link>),
    /// Look after a link that has lost a lane.
    LaneLost(Arc<dyn Link>),
    /// End.
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

    /// Asks for a connection; the peer learns how it went.
    pub(crate) fn connect(&self, peer: Arc<PeerShared>) {
        self.push(Command::Connect(peer));
    }

    /// Ends the thread.
    pub(crate) fn stop(&self) {
        self.push(Command::Stop);
    }

    /// Makes the thread look at what else there is.
    pub(crate) fn wake(&self) {
        self.waker.wake();
    }

    /// Says whether lanes that were paused are to be driven, once for all that was asked.
    pub(crate) fn take_resume(&self) -> bool {
        self.resume.load(Ordering::SeqCst) && self.resume.swap(false, Ordering::SeqCst)
    }

    /// Says whether messages to neighbours wait for room, once for all that was asked.
    pub(crate) fn take_neighbour_waits(&self) -> bool {
        self.neighbour_waits.swap(false, Ordering::SeqCst)
    }

    /// Says whether the thread is about to sleep without a limit.
    pub(crate) fn set_dozing(&self, yes: bool) {
        self.dozing.store(yes, Ordering::SeqCst);
    }

    #[cfg(test)]
    pub(crate) fn has_stopped(&self) -> bool {
        self.commands.lock().is_none()
    }

    fn push(&self, command: Command) {
        if let Some(commands) = &mut *self.commands.lock() {
            commands.push(command);
        }
        self.waker.wake();
    }

    /// Takes what has come.
    pub(crate) fn take(&self) -> Vec<Command> {
        let mut commands = self.commands.lock();
        commands.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Takes what has come and keeps nothing from now on.
    pub(crate) fn close(&self) -> Vec<Command> {
        self.commands.lock().take().unwrap_or_default()
    }
}

impl Control for Mailbox {
    /// Costs one load when somebody watches.
    fn stay_awake(&self) {
        if self.dozing.load(Ordering::SeqCst) && self.dozing.swap(false, Ordering::SeqCst) {
            self.waker.wake();
        }
    }

    /// Once the thread has ended, whoever closes the session takes links apart.
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
