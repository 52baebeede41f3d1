//! The inside of a session: what its threads, peers and transfers share.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex, RwLock};
use tcpx_net::{Listener, Poller, SocketOptions, Span};
use tcpx_proto::handshake::{Established, Identity};
use tcpx_proto::info::{ConnectionInfo, Name, Secret, SessionId};

use crate::addresses::{choose_interfaces, lane_addresses, listen, socket_options};
use crate::completion::deadline;
use crate::config::{Config, TransportKind};
use crate::control::{Control, ControlLoop};
use crate::error::{Error, Side};
use crate::inbox::Inbox;
use crate::peer::PeerShared;
use crate::plan::Pieces;
use crate::progress::Worker;
use crate::region::{LocalSlice, Memory, Region, Regions, Segment};
use crate::routes::{LocalAddress, Routes};
use crate::staging::Staging;
use crate::transport::local::Local;
use crate::transport::plugin::Net;
use crate::transport::tcp::Connection;

/// The inside of a session, shared with its threads, peers and transfers.
pub(crate) struct Core {
    pub(crate) config: Config,
    pub(crate) identity: Identity,
    pub(crate) regions: Regions,
    pub(crate) inbox: Inbox,
    pub(crate) control: Control,
    pub(crate) local: Local,
    pub(crate) staging: Staging,
    /// The plugin that carries payload, if one does.
    pub(crate) net: Option<Arc<Net>>,
    pub(crate) connections: Mutex<Vec<Arc<Connection>>>,
    /// Where lanes may leave from.
    pub(crate) local_addresses: Vec<LocalAddress>,
    pub(crate) addresses: Vec<SocketAddr>,
    pub(crate) info: Vec<u8>,
    workers: Vec<Arc<Worker>>,
    next_worker: AtomicUsize,
    next_id: AtomicU64,
    peers: RwLock<Peers>,
    own_peer: OnceLock<Arc<PeerShared>>,
    accepted: Mutex<VecDeque<Arc<PeerShared>>>,
    accepted_changed: Condvar,
    /// Nothing new is taken on.
    closing: AtomicBool,
    /// Connections end.
    ending: AtomicBool,
}

#[derive(Default)]
struct Peers {
    by_id: HashMap<SessionId, Arc<PeerShared>>,
    /// The session that a name stands for now.
    by_name: HashMap<String, SessionId>,
}

impl Peers {
    /// Says whether the peer was known; another one of the same session, which was added since, stays.
    fn forget(&mut self, peer: &Arc<PeerShared>) -> bool {
        let known = self.by_id.get(&peer.id);
        if !known.is_some_and(|known| Arc::ptr_eq(known, peer)) {
            return false;
        }
        self.by_id.remove(&peer.id);
        if self.by_name.get(peer.name()) == Some(&peer.id) {
            self.by_name.remove(peer.name());
        }
        true
    }
}

impl Core {
    pub(crate) fn start(config: Config) -> Result<(Arc<Self>, Vec<JoinHandle<()>>), Error> {
        let mut config = config;
        let staging = Staging::new(&config);
        let net = match config.transport() {
            TransportKind::Tcp => None,
            TransportKind::Plugin => Some(Net::open(&config, &staging)?),
        };
        if let Some(net) = &net {
            // Each network device has a lane.
            config.raise_lanes(net.devices());
        }
        let chosen = choose_interfaces(&config)?;
        let options = socket_options(&config);
        let (listeners, addresses) = listen(&chosen, &config, &options)?;
        let local_addresses = lane_addresses(&chosen);
        let identity = new_identity(&config)?;
        let info = ConnectionInfo::new(
            identity.name.clone(),
            identity.id,
            identity.secret.clone(),
            addresses.clone(),
        )
        .map_err(Error::BadConnectionInfo)?;
        let poller = Poller::new().map_err(|e| Error::io("cannot make a poller", e))?;
        let workers: std::io::Result<Vec<_>> =
            (0..config.workers()).map(|_| Worker::new()).collect();
        let core = Arc::new(Self {
            control: Control::new(&poller),
            regions: Regions::new(random()?),
            inbox: Inbox::default(),
            local: Local::default(),
            staging,
            net,
            connections: Mutex::default(),
            local_addresses,
            addresses,
            info: info.encode(),
            workers: workers.map_err(|e| Error::io("cannot make a poller", e))?,
            next_worker: AtomicUsize::new(0),
            next_id: AtomicU64::new(1),
            peers: RwLock::default(),
            own_peer: OnceLock::new(),
            accepted: Mutex::default(),
            accepted_changed: Condvar::new(),
            closing: AtomicBool::new(false),
            ending: AtomicBool::new(false),
            identity,
            config,
        });
        let own = PeerShared::new(core.name(), core.identity.id, None);
        own.set_local(&core);
        core.own_peer.get_or_init(|| Arc::clone(&own));
        let mut peers = core.peers.write();
        peers.by_name.insert(core.name().to_owned(), own.id);
        peers.by_id.insert(own.id, own);
        drop(peers);

        let mut threads = Vec::new();
        let result = core.spawn(poller, listeners, &mut threads);
        if let Err(error) = result {
            core.close();
            return Err(Error::io("cannot start the session's threads", error));
        }
        Ok((core, threads))
    }

    fn spawn(
        self: &Arc<Self>,
        poller: Poller,
        listeners: Vec<Listener>,
        threads: &mut Vec<JoinHandle<()>>,
    ) -> std::io::Result<()> {
        let control = ControlLoop::new(Arc::clone(self), poller, listeners)?;
        let builder = |name: String| std::thread::Builder::new().name(name);
        threads.push(builder("tcpx-control".into()).spawn(move || control.run())?);
        for (index, worker) in self.workers.iter().enumerate() {
            let (core, worker) = (Arc::clone(self), Arc::clone(worker));
            let thread = builder(format!("tcpx-worker-{index}"));
            threads.push(thread.spawn(move || worker.run(&core))?);
        }
        Ok(())
    }

    pub(crate) fn name(&self) -> &str {
        self.identity.name.as_str()
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    /// The number of lanes of a connection over these routes: each pair of interfaces has one, unless
    /// the configuration says how many there are, or a plugin carries the bytes.
    pub(crate) fn lanes_over(&self, routes: &Routes) -> usize {
        match self.net {
            None => self.config.lanes_for(routes.pairs()),
            Some(_) => self.config.lanes(),
        }
    }

    /// The number of lanes that a connection to the peer will have if this session makes it.
    pub(crate) fn lanes_to(&self, peer: &PeerShared) -> usize {
        peer.info().map_or(self.config.lanes(), |info| {
            self.lanes_over(&Routes::new(&self.local_addresses, info.addresses()))
        })
    }

    /// Whether connections that are being made are no longer of use.
    pub(crate) fn is_ending(&self) -> bool {
        self.ending.load(Ordering::Acquire)
    }

    pub(crate) fn check_open(&self) -> Result<(), Error> {
        if self.is_closing() {
            Err(Error::Closed)
        } else {
            Ok(())
        }
    }

    /// A number that no other transfer of this session has.
    pub(crate) fn next_id(&self) -> u64 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn next_worker(&self) -> Arc<Worker> {
        let index = self.next_worker.fetch_add(1, Ordering::Relaxed) % self.workers.len();
        Arc::clone(&self.workers[index])
    }

    pub(crate) fn call_any_worker(&self) {
        self.workers[0].wake();
    }

    pub(crate) fn socket_options(&self) -> SocketOptions {
        socket_options(&self.config)
    }

    /// The peer that stands for this session.
    pub(crate) fn own_peer(&self) -> &Arc<PeerShared> {
        self.own_peer
            .get()
            .expect("set before the session is handed out")
    }

    pub(crate) fn all_peers(&self) -> Vec<Arc<PeerShared>> {
        self.peers.read().by_id.values().cloned().collect()
    }

    /// Makes sure that revoked memory is no longer touched.
    pub(crate) fn revoke(&self) {
        self.local.quiesce();
        for connection in self.connections() {
            connection.revoke();
        }
    }

    /// Every connection that may touch memory: also those that have ended, or whose peer was removed, and that
    /// are not taken apart yet.
    pub(crate) fn connections(&self) -> Vec<Arc<Connection>> {
        self.connections.lock().clone()
    }

    pub(crate) fn find_peer(&self, name: &str) -> Option<Arc<PeerShared>> {
        let peers = self.peers.read();
        peers.by_id.get(peers.by_name.get(name)?).cloned()
    }

    pub(crate) fn add_peer(&self, info: ConnectionInfo) -> Result<Arc<PeerShared>, Error> {
        if info.id() == self.identity.id {
            self.check_open()?;
            return Ok(Arc::clone(self.own_peer()));
        }
        let name = info.name().as_str().to_owned();
        let mut peers = self.peers.write();
        // With the lock held: closing finds the peers that were added before it.
        self.check_open()?;
        let replaced = peers
            .by_name
            .get(&name)
            .filter(|id| **id != info.id() && **id != self.identity.id)
            .copied()
            .and_then(|id| peers.by_id.remove(&id));
        let peer = match peers.by_id.get(&info.id()) {
            Some(known) => Arc::clone(known),
            None => {
                let peer = PeerShared::new(&name, info.id(), None);
                peers.by_id.insert(info.id(), Arc::clone(&peer));
                peer
            }
        };
        peers.by_name.insert(name.clone(), info.id());
        // With the lock held: a peer with an address is not forgotten.
        peer.set_info(info);
        drop(peers);
        if let Some(old) = replaced {
            if old.link().is_some() {
                tracing::warn!(
                    peer = name,
                    "another session of this name takes the place of one that is connected: give sessions names of their own"
                );
            }
            self.not_accepted(&old);
            let reason = "a new session has taken its name".to_owned();
            old.remove("replaced", &Error::PeerLost { peer: name, reason });
        }
        Ok(peer)
    }

    pub(crate) fn remove_peer(&self, name: &str) -> Result<(), Error> {
        let peer = self
            .find_peer(name)
            .ok_or_else(|| Error::UnknownPeer(name.to_owned()))?;
        self.remove(&peer)
    }

    pub(crate) fn remove(&self, peer: &Arc<PeerShared>) -> Result<(), Error> {
        let name = peer.name().to_owned();
        let mut peers = self.peers.write();
        if peer.id == self.identity.id || !peers.forget(peer) {
            return Err(Error::UnknownPeer(name));
        }
        drop(peers);
        self.not_accepted(peer);
        let reason = "removed by this side".to_owned();
        peer.remove(
            "the peer removed us",
            &Error::PeerLost { peer: name, reason },
        );
        Ok(())
    }

    /// The peer that an accepted connection belongs to; none when it claims an identity that it does not own.
    pub(crate) fn inbound_peer(&self, established: &Established) -> Option<Arc<PeerShared>> {
        let id = established.peer_id;
        if id == self.identity.id {
            return None;
        }
        let mut peers = self.peers.write();
        if let Some(known) = peers.by_id.get(&id) {
            let owned = known
                .info()
                .is_none_or(|info| established.is_owned_by(&info));
            return owned.then(|| Arc::clone(known));
        }
        let name = established.peer_name.as_str();
        let peer = PeerShared::new(name, id, None);
        peers.by_id.insert(id, Arc::clone(&peer));
        // A name that was loaded on purpose is not taken over by whoever claims it.
        let taken = peers
            .by_name
            .get(name)
            .and_then(|known| peers.by_id.get(known))
            .is_some_and(|known| known.info().is_some() || known.id == self.identity.id);
        if !taken {
            peers.by_name.insert(name.to_owned(), id);
        }
        Some(peer)
    }

    /// Forgets a peer that had connected to us and has left, so that a long life with many peers
    /// costs no memory. Should it come back, it is another peer.
    pub(crate) fn forget_if_gone(&self, peer: &Arc<PeerShared>, error: &Error) {
        let mut peers = self.peers.write();
        if peer.id == self.identity.id || !peer.is_gone() {
            return;
        }
        peers.forget(peer);
        drop(peers);
        peer.tagged.end(error);
        self.not_accepted(peer);
    }

    /// A peer has connected to us. One that has done so before and was not asked for since counts once.
    pub(crate) fn accepted(&self, peer: &Arc<PeerShared>) {
        let mut accepted = self.accepted.lock();
        if !accepted.iter().any(|known| Arc::ptr_eq(known, peer)) {
            accepted.push_back(Arc::clone(peer));
        }
        drop(accepted);
        self.accepted_changed.notify_one();
    }

    fn not_accepted(&self, peer: &Arc<PeerShared>) {
        self.accepted.lock().retain(|p| !Arc::ptr_eq(p, peer));
    }

    pub(crate) fn accept(&self, timeout: Duration) -> Result<Arc<PeerShared>, Error> {
        let until = deadline(timeout);
        let mut accepted = self.accepted.lock();
        loop {
            if let Some(peer) = accepted.pop_front() {
                return Ok(peer);
            }
            self.check_open()?;
            if self
                .accepted_changed
                .wait_until(&mut accepted, until)
                .timed_out()
                && accepted.is_empty()
            {
                return Err(Error::Timeout {
                    what: "a connection from a peer",
                    after: timeout,
                });
            }
        }
    }

    /// Checks local memory and the shape of every segment.
    pub(crate) fn resolve<'a>(
        self: &Arc<Self>,
        segments: impl IntoIterator<Item = Segment<'a>>,
    ) -> Result<Pieces, Error> {
        let segments = segments.into_iter();
        let mut pieces = Pieces::with_capacity(segments.size_hint().0);
        for (index, segment) in segments.enumerate() {
            let Segment { local, remote, len } = segment;
            let bounds = |side, offset, region_len| Error::SegmentOutOfBounds {
                index,
                side,
                offset,
                len,
                region_len,
            };
            let span = local.region.memory().span;
            let Some(span) = span.slice(local.offset, len) else {
                return Err(bounds(Side::Local, local.offset, span.len()));
            };
            let there = remote.region.len();
            if remote.offset.checked_add(len).is_none_or(|end| end > there) {
                return Err(bounds(Side::Remote, remote.offset, there));
            }
            // Neighbours mostly share a region: the last one is the likeliest.
            let (memory, is_new) = pieces.add_memory(local.region.memory());
            if is_new {
                self.check_region(local.region)?;
            }
            let address = remote.region.address() + remote.offset as u64;
            let (key, kind) = (remote.region.key(), remote.region.kind());
            pieces.push(memory, span, key, address, kind);
        }
        Ok(pieces)
    }

    pub(crate) fn slice(
        self: &Arc<Self>,
        slice: LocalSlice<'_>,
        len: usize,
    ) -> Result<(Span, Arc<Memory>), Error> {
        self.check_region(slice.region)?;
        let memory = slice.region.memory();
        let span = memory
            .span
            .slice(slice.offset, len)
            .ok_or(Error::SegmentOutOfBounds {
                index: 0,
                side: Side::Local,
                offset: slice.offset,
                len,
                region_len: memory.span.len(),
            })?;
        Ok((span, Arc::clone(memory)))
    }

    fn check_region(self: &Arc<Self>, region: &Region) -> Result<(), Error> {
        if !region.belongs_to(self) {
            return Err(Error::ForeignRegion(region.id()));
        }
        if !region.is_registered() {
            return Err(Error::RegionDeregistered(region.id()));
        }
        Ok(())
    }

    /// Ends everything but the threads, which end soon after.
    pub(crate) fn close(&self) {
        if self.closing.swap(true, Ordering::AcqRel) {
            return;
        }
        // With the lock: whoever waits for a peer either sees the end or is woken.
        drop(self.accepted.lock());
        self.accepted_changed.notify_all();
        crate::closing::flush(self);
        self.ending.store(true, Ordering::Release);
        let peers = std::mem::take(&mut *self.peers.write());
        for peer in peers.by_id.into_values() {
            peer.remove(CLOSED, &Error::Closed);
        }
        self.accepted.lock().clear();
        self.local.close();
        self.control.stop();
        for worker in &self.workers {
            worker.stop();
        }
        self.inbox.close();
    }

    /// Takes apart what is left when the threads are gone: connections that ended, or were made, as the session closed.
    /// Until then they hold the session, and their transfers wait.
    pub(crate) fn take_apart(&self) {
        for connection in self.connections() {
            connection.close(CLOSED, Error::Closed);
            connection.reap();
        }
    }
}

/// What peers are told of the end.
const CLOSED: &str = "the session was closed";

fn new_identity(config: &Config) -> Result<Identity, Error> {
    let name = Name::new(config.name()).map_err(|_| {
        Error::Config(crate::config::ConfigError::BadValue {
            name: "name".into(),
            value: config.name().into(),
            expected: "1 to 255 bytes of text".into(),
        })
    })?;
    Ok(Identity {
        name,
        id: SessionId(random()?),
        secret: Secret::new(random()?),
    })
}

fn random<const N: usize>() -> Result<[u8; N], Error> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes)
        .map_err(|e| Error::io("cannot get random bytes", std::io::Error::other(e)))?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use crate::testing::{LONG, Pair, session, wait_until};

    #[test]
    fn a_peer_that_is_added_again_is_not_the_one_that_was_removed() {
        for _ in 0..20 {
            // Bob knows Alice only because she has connected to him.
            let Pair {
                alice,
                bob,
                to_alice,
                ..
            } = Pair::new();
            bob.remove_peer("alice").unwrap();
            let again = bob.add_peer(&alice.connection_info()).unwrap();
            wait_until("the old connection is gone", || {
                bob.core().connections().is_empty()
            });
            assert!(bob.peer("alice").is_some(), "it went with the old one");
            assert!(bob.remove(&to_alice).is_err(), "it was removed before");
            assert!(bob.peer("alice").is_some(), "it went with the old one");
            again.connect(LONG).unwrap();
            bob.remove(&again).unwrap();
            assert!(bob.peer("alice").is_none());
        }
    }

    #[test]
    fn a_peer_that_comes_often_is_accepted_once_and_not_after_it_was_removed() {
        let (alice, bob) = (session("alice"), session("bob"));
        let to_bob = alice.add_peer(&bob.connection_info()).unwrap();
        let to_alice = bob.add_peer(&alice.connection_info()).unwrap();
        let come_and_go = || {
            for _ in 0..3 {
                to_alice.connect(LONG).unwrap();
                wait_until("connected", || to_bob.is_connected());
                to_alice.disconnect();
                wait_until("gone", || !to_bob.is_connected());
            }
        };
        come_and_go();
        assert_eq!(alice.accept(LONG).unwrap().name(), "bob");
        assert!(alice.accept(Duration::ZERO).is_err(), "accepted twice");
        come_and_go();
        alice.remove_peer("bob").unwrap();
        assert!(alice.accept(Duration::ZERO).is_err(), "it was removed");
    }
}
