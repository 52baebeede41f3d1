//! State of one peer, and connecting to it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use tcpx_proto::info::{ConnectionInfo, SessionId};

use super::aborted::Aborted;
use super::estimate::{Estimate, Measured};
use super::shared::SessionCore;
use super::tagged::{self, Tagged, TaggedSend};
use crate::error::{Attempt, Error, LostCause, Misbehaviour};
use crate::link::{Above, Context, Held, Link, Origin, Share, is_same_link};
use crate::log::limited;
use crate::stats::{Count, OpenPeer, PeerCounters};
use crate::sync::{Condvar, Mutex, Rank, RwLock};
use crate::trace::{Kind, Record, TransferNames};
use crate::transfer::{Arrival, Run, deadline};

/// One peer of a session: its connection info, its links, and work that waits for a link.
///
/// Work goes to the link in use, or waits in `state` until [`PeerShared::attached`] starts it or
/// [`PeerShared::unreachable`] fails it. WRITEs may first wait in `aborted`. A link calls back as [`Above`] and ends with
/// [`Above::lost`]. The lock of `state` orders these steps: work that waited is started before
/// other threads find the link.
pub(crate) struct PeerShared {
    name: String,
    pub(crate) id: SessionId,
    pub(crate) tagged: Tagged,
    pub(super) aborted: Aborted,
    share: Arc<Share>,
    measured: Mutex<Measured>,
    losses: AtomicU64,
    counters: OpenPeer,
    /// What its transfers are called in a trace.
    trace_names: TransferNames,
    pub(super) context: Arc<Context>,
    home: Weak<SessionCore>,
    /// The link in use; it may have ended meanwhile.
    link: RwLock<Option<Arc<dyn Link>>>,
    state: Mutex<PeerState>,
    changed: Condvar,
}

#[derive(Default)]
struct PeerState {
    info: Option<ConnectionInfo>,
    /// All links, oldest first. There are several if both sides connected at once.
    links: Vec<Arc<dyn Link>>,
    connecting: bool,
    /// Work that waits for a connection, and the bytes of notifications in it.
    waiting: Vec<Waiting>,
    waiting_bytes: usize,
    /// Why the last attempt to connect failed.
    failure: Option<Error>,
    /// Result at each address since the current attempt began.
    standing: Vec<Attempt>,
    /// True once the peer was removed from the session.
    removed: bool,
}

impl PeerState {
    fn take_waiting(&mut self) -> Vec<Waiting> {
        self.waiting_bytes = 0;
        std::mem::take(&mut self.waiting)
    }
}

/// Work that is sent as soon as there is a connection.
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
                limited!(
                    WARN,
                    peer = peer.name(),
                    bytes = message.len(),
                    %error,
                    remedy = "see the error; send it again once the peer is connected",
                    "a notification could not be sent"
                );
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
            aborted: Aborted::new(),
            share: context.quota.share(),
            measured: Mutex::new(Rank::Leaf, Measured::default()),
            losses: AtomicU64::new(0),
            counters: context.stats.open(name),
            trace_names: TransferNames::new(&context.trace, name),
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

    /// Returns the session, unless it is gone.
    pub(super) fn home(&self) -> Option<Arc<SessionCore>> {
        self.home.upgrade()
    }

    /// What its transfers are counted by, and called in a trace.
    pub(crate) fn metered(&self) -> (&Arc<PeerCounters>, &TransferNames) {
        (&self.counters, &self.trace_names)
    }

    pub(crate) fn info(&self) -> Option<ConnectionInfo> {
        self.state.lock().info.clone()
    }

    /// Stores the peer's connection info. Ends connections accepted from a session that does not
    /// own this identity.
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

    /// Makes sure that nothing more arrives from links that have ended.
    pub(crate) fn drain_dead(&self) {
        for link in self.links() {
            if link.is_dead() {
                link.drain();
            }
        }
    }

    /// Makes this peer represent the session itself.
    pub(crate) fn set_local(&self, link: Arc<dyn Link>) {
        *self.link.write() = Some(link);
    }

    /// Returns the link in use, if there is one.
    pub(crate) fn link(&self) -> Option<Arc<dyn Link>> {
        self.link
            .read()
            .as_ref()
            .filter(|link| !link.is_dead())
            .cloned()
    }

    /// Returns all links to the peer, including ended ones that are not taken apart yet.
    pub(crate) fn links(&self) -> Vec<Arc<dyn Link>> {
        self.state.lock().links.clone()
    }

    /// Returns how often the peer has lost its last connection.
    pub(crate) fn losses(&self) -> u64 {
        self.losses.load(Ordering::Acquire)
    }

    /// Estimates the duration of a transfer of `bytes`.
    pub(crate) fn estimate(&self, bytes: u64) -> Estimate {
        self.measured.lock().estimate(bytes)
    }

    pub(crate) fn measured_round_trip(&self, rtt: Duration) {
        self.measured.lock().round_trip(rtt);
    }

    /// Returns whether a notification waits for a connection. Others are queued on a connection.
    pub(crate) fn has_waiting_notifications(&self) -> bool {
        let is_notification = |w: &Waiting| matches!(w, Waiting::Notification(_));
        self.state.lock().waiting.iter().any(is_notification)
    }

    /// Starts work now, or as soon as there is a connection and no aborted WRITE is in its way.
    /// Never waits.
    pub(crate) fn start(
        self: &Arc<Self>,
        core: &SessionCore,
        waiting: Waiting,
    ) -> Result<(), Error> {
        if self.holds(core, &waiting)? {
            return Ok(());
        }
        if let Some(link) = self.link() {
            waiting.start(self, &link);
            return Ok(());
        }
        self.start_with(core, &mut self.state.lock(), waiting)
    }

    /// Starts the runs that `take` returns, as [`PeerShared::start`] does. Returns those that cannot
    /// be started. Taking and starting happen under one lock: [`PeerShared::disconnect`] finds each
    /// of them where it was, or where it goes.
    pub(super) fn start_all(
        self: &Arc<Self>,
        core: &SessionCore,
        take: impl FnOnce() -> Vec<Arc<Run>>,
    ) -> Vec<(Arc<Run>, Error)> {
        let mut state = self.state.lock();
        let mut start = |run: &Arc<Run>| {
            let run = Waiting::Run(Arc::clone(run));
            self.start_with(core, &mut state, run).err()
        };
        let refused = |run| start(&run).map(|error| (run, error));
        take().into_iter().filter_map(refused).collect()
    }

    fn start_with(
        self: &Arc<Self>,
        core: &SessionCore,
        state: &mut PeerState,
        waiting: Waiting,
    ) -> Result<(), Error> {
        // A connection may have been made in the meantime.
        if let Some(link) = self.link() {
            waiting.start(self, &link);
            return Ok(());
        }
        self.begin_connect(core, state)?;
        if let Waiting::Notification(message) = &waiting {
            state.waiting_bytes += message.len();
        }
        if let Waiting::Run(run) = &waiting {
            run.note_wait();
            self.trace_wait(run);
        }
        state.waiting.push(waiting);
        Ok(())
    }

    /// Records that a run waits before it can start, if there is a trace.
    pub(super) fn trace_wait(&self, run: &Run) {
        if let Some(trace) = self.context.trace.on() {
            trace.event(Record::new(Kind::Queued).chunk(run.id, 0));
        }
    }

    /// Sends a notification, now or as soon as there is a connection. Never waits.
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

    /// Checks whether the peer accepts another message.
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
            state.standing.clear();
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
                return Err(Error::NotReachedInTime {
                    peer: self.name.clone(),
                    after: timeout,
                    attempts: state.standing.clone(),
                });
            }
        }
    }

    /// Ends old connections before a new one carries anything: data still arriving on an old
    /// connection must not land after newer data.
    ///
    /// A side with a live connection does not connect again, so a second connection from the same
    /// side means that the first one is dead at the other end. A connection that the other side
    /// made at the same time stays.
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

    /// Adds a connection. The first one stays in use as long as it lives, even if both sides have
    /// connected at once, because one connection keeps its messages in order.
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
        self.counters.count(Count::Connections);
        state.links.push(Arc::clone(new));
        // Our own attempt continues beside a connection that the peer made:
        // no second attempt is started.
        state.connecting &= new.was_accepted();
        let first = state.links.iter().find(|link| !link.is_dead());
        let link = Arc::clone(first.unwrap_or(new));
        // Before any other thread can find the link: waiting work goes first.
        for waiting in state.take_waiting() {
            waiting.start(self, &link);
        }
        *self.link.write() = Some(link);
        drop(state);
        self.changed.notify_all();
    }

    /// Records the state of an attempt to connect, for callers that time out before it ends.
    pub(crate) fn stands(&self, standing: Vec<Attempt>) {
        self.state.lock().standing = standing;
    }

    /// Handles the failure of an attempt to connect.
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
            // Under the lock: work that no longer waits is being sent.
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

    /// Returns whether nothing is left of the peer: neither info nor links.
    pub(crate) fn is_gone(&self) -> bool {
        let state = self.state.lock();
        state.info.is_none() && state.links.is_empty()
    }

    /// Ends all connections; work that waits for one fails as well.
    pub(crate) fn disconnect(&self, reason: &str, error: &Error) {
        let mut state = self.state.lock();
        let mut waiting = state.take_waiting();
        // Under the lock: held runs are started under it.
        waiting.extend(self.aborted.take_all().into_iter().map(Waiting::Run));
        drop(state);
        for waiting in waiting {
            waiting.fail(self, error);
        }
        for link in self.links() {
            link.close(reason, error.clone());
        }
    }

    /// Removes the peer: ends its connections and refuses further use.
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

    /// Returns whether this peer represents the session itself.
    fn is_own(&self) -> bool {
        self.home.upgrade().is_none_or(|home| home.id() == self.id)
    }

    /// Supervises the links; returns whether any has outstanding work.
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

    fn counters(&self) -> &Arc<PeerCounters> {
        &self.counters
    }

    fn notified(&self, from: &Arc<Origin>, message: Vec<u8>, held: Option<Held>) {
        self.counters.heard(message.len());
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
        let known = state.links.len();
        state.links.retain(|known| !is_same_link(known, link));
        if state.links.len() < known {
            self.counters.count(Count::ConnectionsLost);
        }
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
