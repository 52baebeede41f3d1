//! What a session knows of a peer, and how to reach it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use tcpx_proto::info::{ConnectionInfo, SessionId};

use super::estimate::{Estimate, Measured};
use super::shared::SessionCore;
use super::tagged::{self, Tagged, TaggedSend};
use crate::error::{Error, LostCause, Misbehaviour};
use crate::link::{Above, Context, Held, Link, Origin, Share, is_same_link};
use crate::log::limited;
use crate::sync::{Condvar, Mutex, Rank, RwLock};
use crate::transfer::{Arrival, Run, deadline};

/// What a session knows of a peer.
pub(crate) struct PeerShared {
    name: String,
    pub(crate) id: SessionId,
    pub(crate) tagged: Tagged,
    share: Arc<Share>,
    measured: Mutex<Measured>,
    losses: AtomicU64,
    pub(super) context: Arc<Context>,
    home: Weak<SessionCore>,
    /// The link in use; it may have died since.
    link: RwLock<Option<Arc<dyn Link>>>,
    state: Mutex<PeerState>,
    changed: Condvar,
}

#[derive(Default)]
struct PeerState {
    info: Option<ConnectionInfo>,
    /// Every link, oldest first. There are several when both sides connected at once.
    links: Vec<Arc<dyn Link>>,
    connecting: bool,
    /// What waits for a connection, and the bytes of notifications in it.
    waiting: Vec<Waiting>,
    waiting_bytes: usize,
    /// Why the last attempt to connect failed.
    failure: Option<Error>,
    /// The peer was removed from the session.
    removed: bool,
}

impl PeerState {
    fn take_waiting(&mut self) -> Vec<Waiting> {
        self.waiting_bytes = 0;
        std::mem::take(&mut self.waiting)
    }
}

/// Something that is sent as soon as there is a connection.
pub(crate) enum Waiting {
    Run(Arc<Run>),
    Notification(Vec<u8>),
    Send(Arc<TaggedSend>),
}

impl Waiting {
    fn start(self, peer: &PeerShared, link: &Arc<dyn Link>) {
        match self {
            Self::Run(run) => link.submit(&run),
            Self::Notification(message) => link.notify(0, &message),
            Self::Send(send) => tagged::announce(peer, link, &send),
        }
    }

    fn fail(self, peer: &PeerShared, error: &Error) {
        match self {
            Self::Run(run) => run.fail_now(error.clone()),
            Self::Notification(message) => {
                limited!(WARN, peer = peer.name(), bytes = message.len(), %error, "a notification could not be sent");
            }
            Self::Send(send) => peer.tagged.sent(send.id(), Some(error.clone())),
        }
    }
}

impl PeerShared {
    pub(crate) fn new(
        name: &str,
        id: SessionId,
        context: &Arc<Context>,
        home: Weak<SessionCore>,
    ) -> Arc<Self> {
        Arc::new(Self {
            name: name.to_owned(),
            id,
            tagged: Tagged::new(context.quota.of_a_peer() / 2),
            share: context.quota.share(),
            measured: Mutex::new(Rank::Leaf, Measured::default()),
            losses: AtomicU64::new(0),
            context: Arc::clone(context),
            home,
            link: RwLock::new(Rank::PeerLink, None),
            state: Mutex::new(Rank::PeerState, PeerState::default()),
            changed: Condvar::new(),
        })
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn info(&self) -> Option<ConnectionInfo> {
        self.state.lock().info.clone()
    }

    /// Learns how to reach the peer. A connection that was accepted from somebody who does not own this
    /// identity is ended.
    pub(crate) fn set_info(&self, info: ConnectionInfo) {
        let mut state = self.state.lock();
        let impostors: Vec<_> = state
            .links
            .iter()
            .filter(|link| link.was_accepted() && !link.is_owned_by(&info))
            .cloned()
            .collect();
        state.info = Some(info);
        drop(state);
        for link in impostors {
            self.kill_impostor(&link);
        }
    }

    fn kill_impostor(&self, link: &Arc<dyn Link>) {
        link.kill(Error::PeerMisbehaved {
            peer: self.name.clone(),
            what: Misbehaviour::Impostor,
        });
    }

    /// Makes sure that nothing comes any more from links that have ended.
    pub(crate) fn drain_dead(&self) {
        for link in self.links() {
            if link.is_dead() {
                link.drain();
            }
        }
    }

    /// Makes this the peer that stands for the session itself.
    pub(crate) fn set_local(&self, link: Arc<dyn Link>) {
        *self.link.write() = Some(link);
    }

    /// The way to the peer, if there is one.
    pub(crate) fn link(&self) -> Option<Arc<dyn Link>> {
        self.link
            .read()
            .as_ref()
            .filter(|link| !link.is_dead())
            .cloned()
    }

    /// Every link to the peer, also those that have ended and are not taken apart.
    pub(crate) fn links(&self) -> Vec<Arc<dyn Link>> {
        self.state.lock().links.clone()
    }

    /// How often the peer was connected, and then no longer.
    pub(crate) fn losses(&self) -> u64 {
        self.losses.load(Ordering::Acquire)
    }

    /// How long a transfer of `bytes` is going to take.
    pub(crate) fn estimate(&self, bytes: u64) -> Estimate {
        self.measured.lock().estimate(bytes)
    }

    pub(crate) fn measured_round_trip(&self, rtt: Duration) {
        self.measured.lock().round_trip(rtt);
    }

    /// Whether a notification waits for a connection. Those that do not are queued on one.
    pub(crate) fn has_waiting_notifications(&self) -> bool {
        let is_notification = |w: &Waiting| matches!(w, Waiting::Notification(_));
        self.state.lock().waiting.iter().any(is_notification)
    }

    /// Starts something now, or as soon as there is a connection. Never waits.
    pub(crate) fn start(
        self: &Arc<Self>,
        core: &SessionCore,
        waiting: Waiting,
    ) -> Result<(), Error> {
        if let Some(link) = self.link() {
            waiting.start(self, &link);
            return Ok(());
        }
        let mut state = self.state.lock();
        // A connection may have come while we were not looking.
        if let Some(link) = self.link() {
            drop(state);
            waiting.start(self, &link);
            return Ok(());
        }
        self.begin_connect(core, &mut state)?;
        if let Waiting::Notification(message) = &waiting {
            state.waiting_bytes += message.len();
        }
        state.waiting.push(waiting);
        Ok(())
    }

    /// Sends a notification on its own, now or as soon as there is a connection. Never waits.
    pub(crate) fn notify(
        self: &Arc<Self>,
        core: &SessionCore,
        message: &[u8],
    ) -> Result<(), Error> {
        if let Some(link) = self.link() {
            return link.try_notify(message);
        }
        let queued = self.state.lock().waiting_bytes;
        if queued > self.context.quota.of_a_peer() {
            let peer = self.name.clone();
            return Err(Error::PeerBehind { peer, queued });
        }
        self.start(core, Waiting::Notification(message.to_vec()))
    }

    /// Looks whether the peer takes another message.
    pub(crate) fn check_keeps_up(&self) -> Result<(), Error> {
        self.link().map_or(Ok(()), |link| link.check_keeps_up())
    }

    fn begin_connect(
        self: &Arc<Self>,
        core: &SessionCore,
        state: &mut PeerState,
    ) -> Result<(), Error> {
        if core.is_closing() {
            return Err(Error::Closed);
        }
        if state.removed {
            return Err(Error::UnknownPeer(self.name.clone()));
        }
        if state.info.is_none() {
            return Err(Error::PeerNotConnected(self.name.clone()));
        }
        if !state.connecting {
            state.connecting = true;
            state.failure = None;
            core.parts.control.connect(Arc::clone(self));
        }
        Ok(())
    }

    pub(crate) fn connect(
        self: &Arc<Self>,
        core: &SessionCore,
        timeout: Duration,
    ) -> Result<(), Error> {
        let until = deadline(timeout);
        let mut state = self.state.lock();
        if self.link().is_some() {
            return Ok(());
        }
        self.begin_connect(core, &mut state)?;
        loop {
            if self.link().is_some() {
                return Ok(());
            }
            if !state.connecting {
                let gone = || Error::PeerLost {
                    peer: self.name.clone(),
                    cause: LostCause::EndedAtOnce,
                };
                return Err(state.failure.clone().unwrap_or_else(gone));
            }
            if self.changed.wait_until(&mut state, until).timed_out() && self.link().is_none() {
                return Err(Error::Timeout {
                    what: "a connection to the peer",
                    after: timeout,
                });
            }
        }
    }

    /// Before a new connection carries anything: what still comes on an old one must not land behind it.
    ///
    /// Nobody connects who has a connection, so a second one from the same side means that the first is dead
    /// at the other end. One that the other side made at the same time stays.
    pub(crate) fn fence(&self, accepted: bool) {
        for old in self.links() {
            if old.was_accepted() == accepted {
                old.kill(Error::PeerLost {
                    peer: self.name.clone(),
                    cause: LostCause::Reconnected,
                });
            }
        }
        self.drain_dead();
    }

    /// A connection is there. The first one stays in use while it lives, also when both sides have connected
    /// at once: what is sent on one connection stays in order.
    pub(crate) fn attached(&self, new: &Arc<dyn Link>) {
        let mut state = self.state.lock();
        if state.removed {
            drop(state);
            new.kill(Error::UnknownPeer(self.name.clone()));
            return;
        }
        // The info may have been loaded while the connection was being made.
        let info = state.info.as_ref();
        if info.is_some_and(|info| new.was_accepted() && !new.is_owned_by(info)) {
            drop(state);
            return self.kill_impostor(new);
        }
        state.links.push(Arc::clone(new));
        // An attempt of ours goes on beside a connection that the peer made: nobody starts a second one.
        state.connecting &= new.was_accepted();
        let first = state.links.iter().find(|link| !link.is_dead());
        let link = Arc::clone(first.unwrap_or(new));
        // Before anybody else can find the link: what has waited goes first.
        for waiting in state.take_waiting() {
            waiting.start(self, &link);
        }
        *self.link.write() = Some(link);
        drop(state);
        self.changed.notify_all();
    }

    /// An attempt to connect has failed.
    pub(crate) fn unreachable(&self, error: &Error) {
        let mut state = self.state.lock();
        state.connecting = false;
        // The peer may have connected to us in the meantime.
        let link = self.link();
        if link.is_none() {
            state.failure = Some(error.clone());
        }
        let mut waiting = state.take_waiting();
        if let Some(link) = &link {
            // With the lock held: what is not waiting any more is on its way.
            for waiting in waiting.drain(..) {
                waiting.start(self, link);
            }
        }
        drop(state);
        self.changed.notify_all();
        for waiting in waiting {
            waiting.fail(self, error);
        }
    }

    pub(crate) fn is_removed(&self) -> bool {
        self.state.lock().removed
    }

    /// Whether nothing is known of the peer but that it was once connected.
    pub(crate) fn is_gone(&self) -> bool {
        let state = self.state.lock();
        state.info.is_none() && state.links.is_empty()
    }

    /// Ends all connections; what waits for one fails too.
    pub(crate) fn disconnect(&self, reason: &str, error: &Error) {
        let waiting = self.state.lock().take_waiting();
        for waiting in waiting {
            waiting.fail(self, error);
        }
        for link in self.links() {
            link.close(reason, error.clone());
        }
    }

    /// Forgets the peer: ends its connections and refuses further use.
    pub(crate) fn remove(&self, reason: &str, error: &Error) {
        let mut state = self.state.lock();
        state.removed = true;
        state.connecting = false;
        state.failure = Some(error.clone());
        drop(state);
        self.changed.notify_all();
        self.disconnect(reason, error);
        self.tagged.end(error);
        let own = self.link.write().take_if(|_| self.is_own());
        if let Some(link) = own {
            link.close(reason, error.clone());
        }
    }

    /// Whether this peer stands for the session itself.
    fn is_own(&self) -> bool {
        self.home.upgrade().is_none_or(|home| home.id() == self.id)
    }

    /// Looks after the links; says whether any has work outstanding.
    pub(crate) fn check_liveness(&self, now: Instant, timeout: Duration) -> bool {
        let mut busy = false;
        for link in self.links() {
            busy |= link.check_liveness(now, timeout);
        }
        busy
    }
}

impl Above for PeerShared {
    fn name(&self) -> &str {
        &self.name
    }

    fn share(&self) -> &Arc<Share> {
        &self.share
    }

    fn notified(&self, from: &Arc<Origin>, message: Vec<u8>, held: Option<Held>) {
        if let Some(home) = self.home.upgrade() {
            home.inbox.push(from, message, held);
        }
    }

    fn announced(&self, link: Arc<dyn Link>, arrival: Arrival, held: Option<Held>) {
        tagged::announced(self, link, arrival, held);
    }

    fn sent(&self, transfer: u64, error: Option<Error>) {
        self.tagged.sent(transfer, error);
    }

    fn measured(&self, bytes: u64, elapsed: Duration) {
        self.measured.lock().transfer(bytes, elapsed);
    }

    fn is_waiting(&self) -> bool {
        self.tagged.is_waiting()
    }

    fn lost(&self, link: &Arc<dyn Link>, error: &Error) {
        let mut state = self.state.lock();
        state.links.retain(|known| !is_same_link(known, link));
        let next = state.links.iter().find(|link| !link.is_dead());
        *self.link.write() = next.cloned();
        let alone = next.is_none();
        if alone {
            self.losses.fetch_add(1, Ordering::Release);
        }
        drop(state);
        self.tagged.lost(link, alone, error);
        self.changed.notify_all();
        if let Some(home) = self.home.upgrade() {
            home.forget_if_gone(self, error);
        }
    }
}
