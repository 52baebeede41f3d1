//! Remote sessions.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, RwLock};
use tcpx_proto::info::{ConnectionInfo, SessionId};

use crate::completion::deadline;
use crate::core::Core;
use crate::error::Error;
use crate::estimate::Measured;
use crate::run::Run;
use crate::tagged::{self, Tagged};
use crate::transport::Link;
use crate::transport::tcp::{Connection, fail_run};

/// A remote session, or this one itself. Clones are handles to the same peer.
#[derive(Clone)]
pub struct Peer {
    pub(crate) shared: Arc<PeerShared>,
    pub(crate) core: Arc<Core>,
}

/// One lane of a connected peer.
#[derive(Clone, Debug)]
pub struct LaneInfo {
    /// Position among the peer's lanes.
    pub index: usize,
    /// This end's address.
    pub local: SocketAddr,
    /// The peer's address.
    pub remote: SocketAddr,
    /// Bytes that left on it, framing included.
    pub bytes_sent: u64,
    /// Bytes that came on it, framing included.
    pub bytes_received: u64,
}

impl Peer {
    /// What the peer calls itself.
    #[must_use]
    pub fn name(&self) -> &str {
        self.shared.name()
    }

    /// Whether a connection is there now.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        self.shared.link().is_some()
    }

    /// Connects now rather than with the first transfer. Returns at once when a connection is there; either
    /// side may do this, both at once included.
    ///
    /// # Errors
    /// The peer cannot be reached, refuses us, or `timeout` runs out first (the attempt then goes
    /// on by itself).
    pub fn connect(&self, timeout: Duration) -> Result<(), Error> {
        self.shared.connect(&self.core, timeout)
    }

    /// Ends all connections to the peer; its transfers fail, also those that wait for a connection. A later
    /// transfer connects anew.
    pub fn disconnect(&self) {
        let reason = "disconnected by this side".into();
        let error = Error::PeerLost {
            peer: self.name().to_owned(),
            reason,
        };
        self.shared.disconnect("the peer disconnected", &error);
    }

    /// The lanes of the current connection; none when there is no connection.
    #[must_use]
    pub fn lanes(&self) -> Vec<LaneInfo> {
        let Some(Link::Tcp(connection)) = self.shared.link() else {
            return Vec::new();
        };
        let lanes = connection.lanes.iter().enumerate();
        lanes
            .map(|(index, lane)| LaneInfo {
                index,
                local: lane.local,
                remote: lane.remote,
                bytes_sent: lane.bytes_sent.load(Ordering::Relaxed),
                bytes_received: lane.bytes_received.load(Ordering::Relaxed),
            })
            .collect()
    }

    /// How often the peer was lost so far: connected, and then no longer. Tagged messages that were in flight have failed each
    /// time; whoever has an understanding with the peer about them begins anew.
    #[must_use]
    pub fn losses(&self) -> u64 {
        self.shared.losses.load(Ordering::Acquire)
    }

    /// Sends a ping on one lane and waits for the answer, which the peer gives without its
    /// application's help.
    ///
    /// # Errors
    /// The peer is not connected, has no such lane, or does not answer within `timeout`.
    pub fn round_trip(&self, lane: usize, timeout: Duration) -> Result<Duration, Error> {
        match self.shared.link() {
            Some(Link::Local(_)) => Ok(Duration::ZERO),
            Some(Link::Tcp(connection)) => {
                let rtt = connection.ping(lane, timeout).ok_or_else(|| {
                    connection.error().unwrap_or(Error::Timeout {
                        what: "the answer to a ping",
                        after: timeout,
                    })
                })?;
                self.shared.measured.lock().round_trip(rtt);
                Ok(rtt)
            }
            None => Err(Error::PeerNotConnected(self.name().to_owned())),
        }
    }
}

impl std::fmt::Debug for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Peer")
            .field("name", &self.name())
            .field("connected", &self.is_connected())
            .finish_non_exhaustive()
    }
}

/// What a session knows of a peer.
pub(crate) struct PeerShared {
    name: String,
    pub(crate) id: SessionId,
    pub(crate) tagged: Tagged,
    pub(crate) measured: Mutex<Measured>,
    losses: AtomicU64,
    /// The connection in use; it may have died since.
    link: RwLock<Option<Link>>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    info: Option<ConnectionInfo>,
    /// Every connection, oldest first. There are several when both sides connected at once.
    connections: Vec<Arc<Connection>>,
    connecting: bool,
    /// What waits for a connection.
    waiting: Vec<Waiting>,
    /// Why the last attempt to connect failed.
    failure: Option<Error>,
    /// The peer was removed from the session.
    removed: bool,
}

/// Something that is sent as soon as there is a connection.
pub(crate) enum Waiting {
    Run(Arc<Run>),
    Notification(Vec<u8>),
    Send(Arc<tagged::Send>),
}

impl Waiting {
    fn start(self, link: &Link) {
        match self {
            Self::Run(run) => link.submit(&run),
            Self::Notification(message) => link.notify(0, &message),
            Self::Send(send) => tagged::announce(link, &send),
        }
    }

    fn fail(self, peer: &PeerShared, error: &Error) {
        match self {
            Self::Run(run) => fail_run(&run, error.clone()),
            Self::Notification(message) => {
                tracing::warn!(peer = peer.name(), bytes = message.len(), %error, "a notification could not be sent");
            }
            Self::Send(send) => peer.tagged.sent(send.id, Some(error.clone())),
        }
    }
}

impl PeerShared {
    pub(crate) fn new(name: &str, id: SessionId, info: Option<ConnectionInfo>) -> Arc<Self> {
        Arc::new(Self {
            name: name.to_owned(),
            id,
            tagged: Tagged::default(),
            measured: Mutex::default(),
            losses: AtomicU64::new(0),
            link: RwLock::new(None),
            state: Mutex::new(State {
                info,
                ..State::default()
            }),
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
            .connections
            .iter()
            .filter(|c| c.was_accepted() && !c.established.is_owned_by(&info))
            .cloned()
            .collect();
        state.info = Some(info);
        drop(state);
        for connection in impostors {
            connection.kill(Error::PeerMisbehaved {
                peer: self.name.clone(),
                what: "it claimed an identity that is not its own".into(),
            });
        }
    }

    /// Makes this the peer that stands for the session itself.
    pub(crate) fn set_local(&self, core: &Arc<Core>) {
        *self.link.write() = Some(Link::Local(Arc::clone(core)));
    }

    /// The way to the peer, if there is one.
    pub(crate) fn link(&self) -> Option<Link> {
        self.link
            .read()
            .as_ref()
            .filter(|link| !link.is_dead())
            .cloned()
    }

    pub(crate) fn connections(&self) -> Vec<Arc<Connection>> {
        self.state.lock().connections.clone()
    }

    /// Whether a notification waits for a connection. Those that do not are queued on one.
    pub(crate) fn has_waiting_notifications(&self) -> bool {
        let is_notification = |w: &Waiting| matches!(w, Waiting::Notification(_));
        self.state.lock().waiting.iter().any(is_notification)
    }

    /// Starts something now, or as soon as there is a connection. Never waits.
    pub(crate) fn start(self: &Arc<Self>, core: &Core, waiting: Waiting) -> Result<(), Error> {
        if let Some(link) = self.link() {
            waiting.start(&link);
            return Ok(());
        }
        let mut state = self.state.lock();
        // A connection may have come while we were not looking.
        if let Some(link) = self.link() {
            drop(state);
            waiting.start(&link);
            return Ok(());
        }
        self.begin_connect(core, &mut state)?;
        state.waiting.push(waiting);
        Ok(())
    }

    fn begin_connect(self: &Arc<Self>, core: &Core, state: &mut State) -> Result<(), Error> {
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
            core.control.connect(Arc::clone(self));
        }
        Ok(())
    }

    fn connect(self: &Arc<Self>, core: &Core, timeout: Duration) -> Result<(), Error> {
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
                    reason: "the connection ended as soon as it was made".into(),
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
        for old in self.connections() {
            if old.was_accepted() == accepted {
                let reason = "the peer connected anew".into();
                old.kill(Error::PeerLost {
                    peer: self.name.clone(),
                    reason,
                });
            }
            if old.is_dead() {
                old.drain();
            }
        }
    }

    /// A connection is there. The first one stays in use while it lives, also when both sides have connected
    /// at once: what is sent on one connection stays in order.
    pub(crate) fn attached(&self, connection: &Arc<Connection>) {
        let mut state = self.state.lock();
        if state.removed {
            drop(state);
            connection.kill(Error::UnknownPeer(self.name.clone()));
            return;
        }
        state.connections.push(Arc::clone(connection));
        // An attempt of ours goes on beside a connection that the peer made: nobody starts a second one.
        state.connecting &= connection.was_accepted();
        let first = state
            .connections
            .iter()
            .find(|c| !c.is_dead())
            .unwrap_or(connection);
        let link = Link::Tcp(Arc::clone(first));
        // Before anybody else can find the link: what has waited goes first.
        for waiting in std::mem::take(&mut state.waiting) {
            waiting.start(&link);
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
        let mut waiting = std::mem::take(&mut state.waiting);
        if let Some(link) = &link {
            // With the lock held: what is not waiting any more is on its way.
            for waiting in waiting.drain(..) {
                waiting.start(link);
            }
        }
        drop(state);
        self.changed.notify_all();
        for waiting in waiting {
            waiting.fail(self, error);
        }
    }

    /// A connection has ended.
    pub(crate) fn lost(&self, connection: &Arc<Connection>, error: &Error) {
        let mut state = self.state.lock();
        state.connections.retain(|c| !Arc::ptr_eq(c, connection));
        let next = state.connections.iter().find(|c| !c.is_dead());
        *self.link.write() = next.map(|c| Link::Tcp(Arc::clone(c)));
        let alone = next.is_none();
        if alone {
            self.losses.fetch_add(1, Ordering::Release);
        }
        drop(state);
        self.tagged.lost(connection, alone, error);
        self.changed.notify_all();
    }

    pub(crate) fn is_removed(&self) -> bool {
        self.state.lock().removed
    }

    /// Whether nothing is known of the peer but that it was once connected.
    pub(crate) fn is_gone(&self) -> bool {
        let state = self.state.lock();
        state.info.is_none() && state.connections.is_empty()
    }

    /// Ends all connections; what waits for one fails too.
    pub(crate) fn disconnect(&self, reason: &str, error: &Error) {
        let waiting = std::mem::take(&mut self.state.lock().waiting);
        for waiting in waiting {
            waiting.fail(self, error);
        }
        for connection in self.connections() {
            connection.close(reason, error.clone());
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
        // The peer that stands for the session itself holds the session: let it go.
        if matches!(&*self.link.read(), Some(Link::Local(_))) {
            *self.link.write() = None;
        }
    }

    /// A run of `bytes` took `elapsed`.
    pub(crate) fn measured(&self, bytes: u64, elapsed: Duration) {
        self.measured.lock().transfer(bytes, elapsed);
    }

    /// Looks after the connections; says whether any has work outstanding.
    pub(crate) fn check_liveness(&self, now: Instant, timeout: Duration) -> bool {
        let mut busy = false;
        for connection in self.connections() {
            busy |= connection.check_liveness(now, timeout);
        }
        busy
    }
}
