//! Transfers: prepared once, posted any number of times.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use tcpx_net::InProcess;

use super::check_message;
use super::peer::Peer;
use crate::error::Error;
use crate::link::Link;
use crate::peers::{Estimate, Reading, TaggedReceive, TaggedSend, Waiting};
use crate::sync::{Mutex, Rank};
use crate::transfer::{After, Completion, Plan, Run, TransferState, deadline};

/// Fruitless looks in a row after which a caller who polls gives way once. Few: on a small machine the
/// one that has to move next is often waiting for this very core, and elsewhere a yield costs less than
/// a look.
const PATIENT_LOOKS: u32 = 4;

/// A transfer. Dropping it releases it: what is in flight is aborted, without waiting.
pub struct Transfer {
    peer: Peer,
    kind: InProcess<Kind>,
    /// Polls that found the transfer still in flight.
    fruitless: AtomicU32,
}

enum Kind {
    OneSided {
        plan: Arc<Plan>,
        /// The last posting.
        run: Mutex<Option<Arc<Run>>>,
    },
    Send(Arc<TaggedSend>),
    Receive(Arc<TaggedReceive>),
}

impl Transfer {
    pub(crate) fn one_sided(peer: Peer, plan: Arc<Plan>) -> Self {
        Self::new(
            peer,
            Kind::OneSided {
                plan,
                run: Mutex::new(Rank::Posting, None),
            },
        )
    }

    pub(crate) fn sending(peer: Peer, send: Arc<TaggedSend>) -> Self {
        Self::new(peer, Kind::Send(send))
    }

    pub(crate) fn receiving(peer: Peer, receive: Arc<TaggedReceive>) -> Self {
        Self::new(peer, Kind::Receive(receive))
    }

    fn new(peer: Peer, kind: Kind) -> Self {
        Self {
            kind: InProcess::of(peer.core.process(), kind),
            peer,
            fruitless: AtomicU32::new(0),
        }
    }

    /// Starts the transfer, connecting first if need be, and returns without waiting. Once it has
    /// ended it may be posted again; nothing is planned anew.
    ///
    /// # Errors
    /// It is still in flight, the peer is not reachable by any means, or the session is closed. Failures that
    /// come later are reported by [`Transfer::poll`] and [`Transfer::wait`].
    pub fn post(&self) -> Result<(), Error> {
        self.start(After::Nothing)
    }

    /// As [`Transfer::post`]; the peer receives `message` once every byte is in place: at the peer for a
    /// WRITE, here for a READ.
    ///
    /// While the connection lives it is delivered exactly once where the transfer ends as done, and not
    /// at all where it fails or is aborted. When the connection is lost, neither is certain: a transfer
    /// that fails because the peer was lost ([`ErrorKind::Disconnected`](crate::ErrorKind::Disconnected))
    /// may have delivered its notification, where only the last acknowledgement was lost; and one that
    /// ended as done just before may not have, where the notification was still on its way. It is never
    /// delivered twice for one posting. Whoever posts again after such a failure gives the message a
    /// number, by which the peer knows what it has seen.
    ///
    /// # Errors
    /// As [`Transfer::post`]; or the message is too long, or the peer does not keep up with what is sent to
    /// it, as in [`Session::notify`](crate::Session::notify).
    pub fn post_with_notification(&self, message: &[u8]) -> Result<(), Error> {
        check_message(&self.peer.core, message)?;
        self.start(After::Notify(message.into()))
    }

    /// Where the transfer stands: failed in a forked child. Never waits; it may move bytes itself,
    /// so that a caller who polls does not pay for another thread's wake-up.
    pub fn poll(&self) -> TransferState {
        if !self.kind.is_current() {
            return TransferState::Failed;
        }
        let Some(active) = self.active() else {
            return TransferState::Prepared;
        };
        let state = active.completion().state();
        if state.is_terminal() {
            return state;
        }
        let link = self.peer.shared.link();
        if let Some(link) = &link {
            drive(link.as_ref(), &active);
        }
        let state = active.completion().state();
        if !state.is_terminal() {
            self.give_way(&active, link.as_deref());
        }
        state
    }

    /// Waits until the transfer has ended.
    ///
    /// # Errors
    /// Why it failed; that it was aborted; that it was never posted; or that `timeout` ran out, in
    /// which case it goes on.
    pub fn wait(&self, timeout: Duration) -> Result<(), Error> {
        self.kind.check()?;
        let Some(active) = self.active() else {
            return Err(Error::NotPosted);
        };
        let until = deadline(timeout);
        if active.is_short() {
            // Over before a sleep would have begun.
            let spin_until = until.min(Instant::now() + self.peer.core.context().config.spin());
            while !self.poll().is_terminal() && Instant::now() < spin_until {}
        }
        if !active.completion().state().is_terminal() {
            if let Some(link) = self.peer.shared.link() {
                link.hand_over();
            }
            if !active.completion().wait_until(until) {
                return Err(Error::Timeout {
                    what: "the end of the transfer",
                    after: timeout,
                });
            }
        }
        match active.completion().state() {
            TransferState::Done => Ok(()),
            _ => Err(active.completion().error().unwrap_or(Error::Aborted)),
        }
    }

    /// Gives the transfer up. Never waits for the peer. When this returns, local memory is no longer
    /// read or written on behalf of the transfer. Bytes of a WRITE that were on their way may still land at
    /// the peer until the state is [`TransferState::Aborted`]. A transfer that ends as aborted does not deliver
    /// its notification; one whose notification was already on its way ends as done.
    pub fn abort(&self) {
        if !self.kind.is_current() {
            return;
        }
        match self.active() {
            None => {}
            Some(Active::Run(run)) => self.abort_run(&run),
            Some(Active::Send(send)) => self.abort_send(&send),
            Some(Active::Receive(receive)) => self.abort_receive(&receive),
        }
    }

    /// Why the transfer failed, if it did.
    #[must_use]
    pub fn error(&self) -> Option<Error> {
        if let Err(forked) = self.kind.check() {
            return Some(forked.into());
        }
        self.active()?.completion().error()
    }

    /// Bytes that it moves.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        match &*self.kind {
            Kind::OneSided { plan, .. } => plan.bytes,
            Kind::Send(send) => send.message.source.len() as u64,
            Kind::Receive(receive) => receive.target.len() as u64,
        }
    }

    /// Bytes of the message that a tagged receive got; 0 until it is known.
    #[must_use]
    pub fn received(&self) -> u64 {
        match &*self.kind {
            Kind::Receive(receive) => receive.received.load(Ordering::Relaxed),
            _ => 0,
        }
    }

    /// How long a posting is going to take, judged by earlier transfers to the same peer.
    #[must_use]
    pub fn estimate(&self) -> Estimate {
        if !self.kind.is_current() {
            return Estimate::NONE;
        }
        self.peer.shared.estimate(self.bytes())
    }

    fn start(&self, after: After) -> Result<(), Error> {
        self.kind.check()?;
        let (plan, current) = match &*self.kind {
            Kind::OneSided { plan, run } => (plan, run),
            Kind::Send(_) => return Err(Error::NotRepostable("send")),
            Kind::Receive(_) => return Err(Error::NotRepostable("receive")),
        };
        let core = &self.peer.core;
        core.check_open()?;
        let mut current = current.lock();
        if current
            .as_ref()
            .is_some_and(|run| !run.completion.state().is_terminal())
        {
            return Err(Error::TransferActive);
        }
        if let Some(memory) = plan.revoked() {
            return Err(Error::RegionDeregistered(memory.id));
        }
        let mut run = Run::new(core.context().next_id(), Arc::clone(plan), after);
        // The last notification may still be on its way on the first lane.
        run.in_order = current
            .as_ref()
            .is_some_and(|last| last.in_order || last.sends_notify());
        let run = Arc::new(run);
        if run.sends_notify() {
            self.peer.shared.check_keeps_up()?;
        }
        if plan.len() == 0 {
            // Nothing to move; the notification still has to arrive.
            if let After::Notify(message) = &run.after {
                self.peer.shared.notify(core, message)?;
            }
            run.completion.finish();
        } else {
            self.peer
                .shared
                .start(core, Waiting::Run(Arc::clone(&run)))?;
        }
        *current = Some(run);
        self.fruitless.store(0, Ordering::Relaxed);
        Ok(())
    }

    fn active(&self) -> Option<Active> {
        match &*self.kind {
            Kind::OneSided { run, .. } => run.lock().clone().map(Active::Run),
            Kind::Send(send) => Some(Active::Send(Arc::clone(send))),
            Kind::Receive(receive) => Some(Active::Receive(Arc::clone(receive))),
        }
    }

    /// After a fruitless look: lets others use the core now and then, and at once if it is the peer that
    /// needs it.
    fn give_way(&self, active: &Active, link: Option<&dyn Link>) {
        let looks = self.fruitless.fetch_add(1, Ordering::Relaxed);
        let needed = match active {
            Active::Run(run) if looks == 0 => link.is_some_and(|link| link.needs_this_core(run)),
            _ => looks >= PATIENT_LOOKS,
        };
        if needed {
            self.fruitless.store(0, Ordering::Relaxed);
            std::thread::yield_now();
        }
    }

    fn abort_run(&self, run: &Arc<Run>) {
        if run.completion.state().is_terminal() {
            return;
        }
        // Too late once the notification is on its way: the transfer then ends as done, but it lets
        // go of local memory all the same.
        let last = run.completion.begin_abort() && run.close();
        run.let_go();
        // Also links that have ended, and are not taken apart yet, may be at work on it.
        self.peer.core.context().let_go(run);
        if last {
            run.conclude_failed();
        }
    }

    fn abort_send(&self, send: &TaggedSend) {
        if send.completion.begin_abort() {
            // From here on the peer cannot read the message any more.
            send.revoke();
            self.peer.core.context().registry.revoke();
            self.peer.shared.tagged.sent(send.id(), None);
        }
    }

    fn abort_receive(&self, receive: &Arc<TaggedReceive>) {
        let waiting = self.peer.shared.tagged.forget_receive(receive);
        // With this lock held no message is being copied into the buffer, and none will be once the
        // abort has begun.
        let reading = receive.reading.lock();
        if !receive.completion.begin_abort() {
            return;
        }
        let run = reading.as_ref().map(|reading| Arc::clone(&reading.run));
        drop(reading);
        if waiting {
            receive.completion.finish();
        } else if let Some(run) = run {
            // The receive ends with the run that reads for it.
            self.abort_run(&run);
        }
        // Otherwise its message has just been found, and whoever found it ends it.
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        self.abort();
    }
}

impl std::fmt::Debug for Transfer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = if self.kind.is_current() {
            self.active()
                .map_or(TransferState::Prepared, |a| a.completion().state())
        } else {
            TransferState::Failed
        };
        f.debug_struct("Transfer")
            .field("peer", &self.peer.name())
            .field("bytes", &self.bytes())
            .field("state", &state)
            .finish_non_exhaustive()
    }
}

/// Moves what can be moved for a caller who polls.
fn drive(link: &dyn Link, active: &Active) {
    match active {
        Active::Run(run) => link.drive_for(run),
        Active::Receive(receive) => {
            // Cloned: driving may find the message and take this lock to say so.
            let reading = receive.reading.lock().clone();
            match reading {
                Some(Reading { link, run }) => link.drive_for(&run),
                None => link.drive_control(),
            }
        }
        Active::Send(_) => link.drive_control(),
    }
}

/// The operation that a transfer's state is about.
enum Active {
    Run(Arc<Run>),
    Send(Arc<TaggedSend>),
    Receive(Arc<TaggedReceive>),
}

impl Active {
    /// Whether it takes about a round trip.
    fn is_short(&self) -> bool {
        match self {
            Self::Run(run) => run.is_short(),
            Self::Send(_) | Self::Receive(_) => true,
        }
    }

    fn completion(&self) -> &Completion {
        match self {
            Self::Run(run) => &run.completion,
            Self::Send(send) => &send.completion,
            Self::Receive(receive) => &receive.completion,
        }
    }
}
