//! Transfers: prepared once, posted any number of times.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use tcpx_net::InProcess;

use super::check_message;
use super::peer::Peer;
use crate::error::Error;
use crate::link::Link;
use crate::link::desk::Step;
use crate::peers::{Estimate, Reading, TaggedReceive, TaggedSend, Waiting};
use crate::sync::{Mutex, Rank};
use crate::trace::{self, Record};
use crate::transfer::{After, Completion, Events, Plan, Run, TransferState, deadline};

/// Fruitless polls in a row after which a polling caller yields once. Few: on a small machine the
/// thread that has to run next often waits for this core, and elsewhere a yield costs less than a
/// poll.
const PATIENT_LOOKS: u32 = 4;

/// A transfer to or from a peer.
///
/// Made by [`Session::prepare`](crate::Session::prepare) and posted any number of times, or made
/// and posted by [`Session::send`](crate::Session::send) and
/// [`Session::recv`](crate::Session::recv). After a posting the caller polls, waits, or arms
/// [`Events`]; all methods may be called from any thread. Dropping a transfer aborts a posting in
/// flight, without waiting.
pub struct Transfer {
    peer: Peer,
    kind: InProcess<Kind>,
    /// Consecutive polls that found the transfer still in flight.
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

    /// Starts the transfer, connecting first if necessary, and returns without waiting. Once it has
    /// ended it may be posted again, without repeated planning.
    ///
    /// # Errors
    /// The transfer is still in flight, there is no way to reach the peer, or the session is
    /// closed. [`Transfer::poll`] and [`Transfer::wait`] report later failures.
    pub fn post(&self) -> Result<(), Error> {
        self.start(After::Nothing)
    }

    /// Like [`Transfer::post`]; the peer receives `message` once every byte is in place: at the
    /// peer for a WRITE, here for a READ. After a READ of up to 256 KiB that the caller polls, it
    /// leaves with the caller's next call: any post, poll, wait, drop of a transfer, or look for
    /// notifications of this session; or within two milliseconds if there is none.
    ///
    /// While the connection lives, the message is delivered exactly once if the transfer ends as
    /// done, and not at all if it fails or is aborted. When the connection is lost, neither is
    /// certain: a transfer that fails because the peer was lost
    /// ([`ErrorKind::Disconnected`](crate::ErrorKind::Disconnected)) may have delivered its
    /// notification, if only the last acknowledgement was lost; and one that ended as done just
    /// before may not have, if the notification was still in flight. It is never delivered twice
    /// for one posting. Number your messages if you post again after such a failure, so that the
    /// peer can detect duplicates.
    ///
    /// # Errors
    /// As for [`Transfer::post`]; or the message is too long, or the peer does not keep up, as for
    /// [`Session::notify`](crate::Session::notify).
    pub fn post_with_notification(&self, message: &[u8]) -> Result<(), Error> {
        check_message(&self.peer.core, message)?;
        self.start(After::Notify(message.into()))
    }

    /// Returns the state of the transfer; failed in a forked child. Never waits; may move bytes
    /// itself, so that a polling caller does not pay for another thread's wake-up.
    pub fn poll(&self) -> TransferState {
        if !self.kind.is_current() {
            return TransferState::Failed;
        }
        self.peer.core.context().hurry();
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
    /// The error of a failed transfer; it was aborted; it was never posted; or `timeout` expired,
    /// in which case the transfer continues.
    pub fn wait(&self, timeout: Duration) -> Result<(), Error> {
        self.kind.check()?;
        let Some(active) = self.active() else {
            return Err(Error::NotPosted);
        };
        self.peer.core.context().hurry();
        let until = deadline(timeout);
        if active.is_short() {
            // The transfer ends before a sleep would have begun.
            let spin_until = until.min(Instant::now() + self.peer.core.context().config.spin());
            while !self.poll().is_terminal() && Instant::now() < spin_until {}
        }
        if !active.completion().state().is_terminal() {
            if let Some(link) = self.peer.shared.link() {
                self.copy(link.as_ref(), &active, until);
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

    /// Notifies `events` when this posting of the transfer ends, and returns its state. The event
    /// occurs once, with `key`, even if the transfer fails or is aborted; there is no event if the
    /// transfer has already ended or was never posted. From here on no polling is needed.
    ///
    /// # Errors
    /// The call is made in a forked child.
    pub fn arm(&self, events: &Events, key: u64) -> Result<TransferState, Error> {
        self.kind.check()?;
        let queue = events.queue()?;
        self.peer.core.context().hurry();
        let Some(active) = self.active() else {
            return Ok(TransferState::Prepared);
        };
        let state = active.completion().arm(queue, key);
        if !state.is_terminal()
            && let Some(link) = self.peer.shared.link()
        {
            link.hand_over();
        }
        Ok(state)
    }

    /// Aborts the transfer. Never waits for the peer. When this returns, local memory is no longer
    /// read or written on behalf of the transfer. Bytes of a WRITE in flight may still land at the
    /// peer until the state is [`TransferState::Aborted`]; a WRITE that this session posts to the
    /// same addresses of this peer meanwhile starts after that, so that it has the last word, unless
    /// the connection is lost: then the abort ends without the peer's answer. A transfer that ends as aborted does
    /// not deliver its notification; one whose notification was already in flight ends as done.
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

    /// Returns why the transfer failed, if it did.
    #[must_use]
    pub fn error(&self) -> Option<Error> {
        if let Err(forked) = self.kind.check() {
            return Some(forked.into());
        }
        self.active()?.completion().error()
    }

    /// Returns the length of the transfer in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        match &*self.kind {
            Kind::OneSided { plan, .. } => plan.bytes,
            Kind::Send(send) => send.message.source.len() as u64,
            Kind::Receive(receive) => receive.target.len() as u64,
        }
    }

    /// Returns the length of the message of a tagged receive; 0 until it is known.
    #[must_use]
    pub fn received(&self) -> u64 {
        match &*self.kind {
            Kind::Receive(receive) => receive.received.load(Ordering::Relaxed),
            _ => 0,
        }
    }

    /// Estimates the duration of a posting, from earlier transfers to the same peer.
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
        // The last notification may still be in flight on the first lane.
        run.in_order = current
            .as_ref()
            .is_some_and(|last| last.in_order || last.sends_notify());
        if run.sends_notify() {
            self.peer.shared.check_keeps_up()?;
        }
        let trace = &core.context().trace;
        run.count_for(self.peer.shared.metered(), trace);
        let run = Arc::new(run);
        let posting = trace.start();
        let submitted = self.submit(&run);
        trace.span(posting, || {
            let record = Record::new(trace::Kind::Post).chunk(run.id, 0);
            record.bytes(run.plan.bytes)
        });
        if let Err(error) = submitted {
            run.completion.record(error.clone());
            run.completion.finish();
            return Err(error);
        }
        *current = Some(run);
        self.fruitless.store(0, Ordering::Relaxed);
        drop(current);
        // What waits for frames to this peer has left with the run.
        core.context().hurry();
        Ok(())
    }

    /// Copies chunks of the transfer beside the workers, if threads of this process copy it.
    fn copy(&self, link: &dyn Link, active: &Active, until: Instant) {
        let Active::Run(run) = active else { return };
        let spin_until = Instant::now() + self.peer.core.context().config.spin();
        while Instant::now() < until {
            match link.copy_for(run) {
                Step::Copied => {}
                Step::UnderWay if Instant::now() < spin_until => std::thread::yield_now(),
                Step::UnderWay | Step::Over => return,
            }
        }
    }

    fn submit(&self, run: &Arc<Run>) -> Result<(), Error> {
        let (peer, core) = (&self.peer.shared, &self.peer.core);
        if run.plan.len() > 0 {
            return peer.start(core, Waiting::Run(Arc::clone(run)));
        }
        // There are no bytes to move, but the notification still has to arrive.
        if let After::Notify(message) = &run.after {
            peer.notify(core, message)?;
        }
        run.completion.finish();
        Ok(())
    }

    fn active(&self) -> Option<Active> {
        match &*self.kind {
            Kind::OneSided { run, .. } => run.lock().clone().map(Active::Run),
            Kind::Send(send) => Some(Active::Send(Arc::clone(send))),
            Kind::Receive(receive) => Some(Active::Receive(Arc::clone(receive))),
        }
    }

    /// Yields the core after fruitless polls: now and then, and at once if the peer needs it.
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
        // Also if it is too late to abort it: bytes are in flight.
        self.peer.shared.note_aborted(run);
        // Too late once the notification is being sent: the transfer then ends as done, but still
        // releases local memory.
        let last = run.completion.begin_abort() && run.close();
        run.let_go();
        // Links that have ended, and are not taken apart yet, may also use the memory.
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
        // While this lock is held no message is being copied into the buffer, and none will be once
        // the abort has begun.
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
        // Otherwise its message has just been found, and the thread that found it ends the receive.
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        self.abort();
        if self.kind.is_current() {
            // A notification of this transfer may wait for other frames.
            self.peer.core.context().hurry();
        }
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

/// Makes progress without waiting, for a polling caller.
fn drive(link: &dyn Link, active: &Active) {
    match active {
        Active::Run(run) => link.drive_for(run),
        Active::Receive(receive) => {
            // Cloned: driving may find the message and take this lock to record it.
            let reading = receive.reading.lock().clone();
            match reading {
                Some(Reading { link, run }) => link.drive_for(&run),
                None => link.drive_control(),
            }
        }
        Active::Send(_) => link.drive_control(),
    }
}

/// The operation that determines a transfer's state.
enum Active {
    Run(Arc<Run>),
    Send(Arc<TaggedSend>),
    Receive(Arc<TaggedReceive>),
}

impl Active {
    /// Returns whether the operation takes about one round trip.
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
