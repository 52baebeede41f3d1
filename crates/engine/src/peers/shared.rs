//! The core of a session: state shared by its threads, peers and transfers.

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use tcpx_net::Span;
use tcpx_proto::handshake::{Established, Identity};
use tcpx_proto::info::{ConnectionInfo, SessionId};

use super::inbox::Inbox;
use super::mailbox::Mailbox;
use super::peer::PeerShared;
use super::routes::{LocalAddress, Routes};
use crate::error::{Error, LostCause, Side};
use crate::link::local::Local;
use crate::link::{Above, Context};
use crate::log::limited;
use crate::memory::{LocalSlice, Memory, Region, Segment};
use crate::sync::{Condvar, Mutex, Rank, RwLock};
use crate::transfer::{Pieces, deadline};

/// The worker threads, as the session knows them.
pub(crate) trait Crew: Send + Sync {
    /// Ends the threads.
    fn stop(&self);
}

/// The parts from which a session is made.
pub(crate) struct Parts {
    pub(crate) context: Arc<Context>,
    pub(crate) identity: Identity,
    pub(crate) control: Arc<Mailbox>,
    pub(crate) crew: Arc<dyn Crew>,
    /// Local addresses from which lanes may leave.
    pub(crate) local_addresses: Vec<LocalAddress>,
    /// Names of the interfaces that carry lanes, by address.
    pub(crate) interface_names: Vec<(IpAddr, String)>,
    /// Addresses on which the session listens.
    pub(crate) addresses: Vec<SocketAddr>,
    /// The encoded connection info.
    pub(crate) info: Vec<u8>,
    /// Limits how long closing waits for a slow connection attempt; `None` for the usual limit.
    pub(crate) slow_connect: Option<Duration>,
}

/// The core of a session, shared with its threads, peers and transfers.
pub(crate) struct SessionCore {
    pub(crate) parts: Parts,
    pub(crate) inbox: Inbox,
    own_peer: Arc<PeerShared>,
    peers: RwLock<Peers>,
    accepted: Mutex<VecDeque<Arc<PeerShared>>>,
    accepted_changed: Condvar,
    /// True once no new work is accepted.
    closing: AtomicBool,
    /// True once connections are being ended.
    ending: AtomicBool,
}

#[derive(Default)]
struct Peers {
    by_id: HashMap<SessionId, Arc<PeerShared>>,
    /// The current session of each name.
    by_name: HashMap<String, SessionId>,
}

impl Peers {
    /// Removes the peer, unless another of the same session replaced it; tells if it did.
    fn forget(&mut self, peer: &PeerShared) -> bool {
        let known = self.by_id.get(&peer.id);
        if !known.is_some_and(|known| std::ptr::eq(&**known, peer)) {
            return false;
        }
        self.by_id.remove(&peer.id);
        if self.by_name.get(peer.name()) == Some(&peer.id) {
            self.by_name.remove(peer.name());
        }
        true
    }
}

impl SessionCore {
    pub(crate) fn new(parts: Parts) -> Arc<Self> {
        Arc::new_cyclic(|home: &Weak<Self>| {
            let identity = &parts.identity;
            let name = identity.name.as_str();
            let own = PeerShared::new(name, identity.id, &parts.context, home.clone());
            let above: Weak<dyn Above> = Arc::downgrade(&own) as Weak<dyn Above>;
            let local = Local::new(Arc::clone(&parts.context), above);
            own.set_local(local);
            let mut peers = Peers::default();
            peers.by_name.insert(name.to_owned(), own.id);
            peers.by_id.insert(own.id, Arc::clone(&own));
            Self {
                parts,
                inbox: Inbox::new(),
                own_peer: own,
                peers: RwLock::new(Rank::Peers, peers),
                accepted: Mutex::new(Rank::Inbox, VecDeque::new()),
                accepted_changed: Condvar::new(),
                closing: AtomicBool::new(false),
                ending: AtomicBool::new(false),
            }
        })
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.parts.context
    }

    pub(crate) fn id(&self) -> SessionId {
        self.parts.identity.id
    }

    pub(crate) fn name(&self) -> &str {
        self.parts.identity.name.as_str()
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    /// Returns the number of lanes over these routes: one per pair of interfaces, and enough on
    /// those nearest to a GPU, unless the configuration sets it or a plugin carries the bytes.
    pub(crate) fn lanes_over(&self, routes: &Routes) -> usize {
        let parts = self.context().staging.nearness.parts();
        self.context().config.lanes_over(routes.pairs(), parts)
    }

    /// Returns the number of lanes of a connection to the peer, if this session makes it.
    pub(crate) fn lanes_to(&self, peer: &PeerShared) -> usize {
        let lanes = self.context().config.lanes();
        peer.info().map_or(lanes, |info| {
            self.lanes_over(&self.routes_to(info.addresses()))
        })
    }

    /// Returns the routes to a session with these addresses.
    pub(crate) fn routes_to(&self, addresses: &[SocketAddr]) -> Routes {
        let local = &self.parts.local_addresses;
        Routes::new(local, addresses, &tcpx_net::source_towards)
    }

    /// Returns whether connections in progress are no longer needed.
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

    /// Returns the peer that represents this session itself.
    pub(crate) fn own_peer(&self) -> &Arc<PeerShared> {
        &self.own_peer
    }

    pub(crate) fn all_peers(&self) -> Vec<Arc<PeerShared>> {
        self.peers.read().by_id.values().cloned().collect()
    }

    pub(crate) fn find_peer(&self, name: &str) -> Option<Arc<PeerShared>> {
        let peers = self.peers.read();
        peers.by_id.get(peers.by_name.get(name)?).cloned()
    }

    pub(crate) fn peer_by_id(&self, id: SessionId) -> Option<Arc<PeerShared>> {
        self.peers.read().by_id.get(&id).cloned()
    }

    pub(crate) fn add_peer(
        self: &Arc<Self>,
        info: ConnectionInfo,
    ) -> Result<Arc<PeerShared>, Error> {
        if info.id() == self.id() {
            self.check_open()?;
            return Ok(Arc::clone(self.own_peer()));
        }
        let name = info.name().as_str().to_owned();
        let mut peers = self.peers.write();
        // Under the lock: closing finds the peers that were added before it.
        self.check_open()?;
        // Includes peers that only claim the name, and a peer that claims the id under another
        // name: from here on both are proven.
        let replaced: Vec<_> = peers
            .by_id
            .extract_if(|id, peer| *id != self.id() && (peer.name() == name) != (*id == info.id()))
            .map(|(_, peer)| peer)
            .collect();
        for old in &replaced {
            peers.by_name.retain(|_, id| *id != old.id);
        }
        let peer = match peers.by_id.get(&info.id()) {
            Some(known) => Arc::clone(known),
            None => {
                let home = Arc::downgrade(self);
                let peer = PeerShared::new(&name, info.id(), self.context(), home);
                peers.by_id.insert(info.id(), Arc::clone(&peer));
                peer
            }
        };
        peers.by_name.insert(name.clone(), info.id());
        // Under the lock: a peer with connection info is not removed as gone.
        peer.set_info(info.clone());
        drop(peers);
        for old in replaced {
            if old.link().is_some() {
                limited!(
                    WARN,
                    peer = name,
                    remedy = "give sessions unique names",
                    "another session of this name replaces one that is connected"
                );
            }
            self.not_accepted(&old);
            let cause = LostCause::Replaced;
            let peer = name.clone();
            old.remove("replaced", &Error::PeerLost { peer, cause });
            old.drain_dead();
        }
        // After this, nothing more arrives from impostors.
        peer.drain_dead();
        self.inbox.forget_impostors(&info);
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
        if peer.id == self.id() || !peers.forget(peer) {
            return Err(Error::UnknownPeer(name));
        }
        drop(peers);
        self.not_accepted(peer);
        let cause = LostCause::Removed;
        peer.remove(
            "the peer removed us",
            &Error::PeerLost { peer: name, cause },
        );
        Ok(())
    }

    /// Returns the peer of an accepted connection; `None` if the connection claims an identity, or
    /// a proven name, that it does not own.
    pub(crate) fn inbound_peer(
        self: &Arc<Self>,
        established: &Established,
    ) -> Option<Arc<PeerShared>> {
        let id = established.peer_id;
        if id == self.id() {
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
        // Messages under a name whose connection info is loaded must come from its proven owner.
        let is_proven = peers
            .by_name
            .get(name)
            .and_then(|known| peers.by_id.get(known))
            .is_some_and(|known| known.info().is_some() || known.id == self.id());
        if is_proven {
            return None;
        }
        let peer = PeerShared::new(name, id, self.context(), Arc::downgrade(self));
        peers.by_id.insert(id, Arc::clone(&peer));
        peers.by_name.insert(name.to_owned(), id);
        Some(peer)
    }

    /// Removes a peer that had connected to us and has left, so that memory does not grow with the
    /// number of past peers. If it returns, it is a new peer.
    pub(crate) fn forget_if_gone(&self, peer: &PeerShared, error: &Error) {
        let mut peers = self.peers.write();
        if peer.id == self.id() || !peer.is_gone() {
            return;
        }
        peers.forget(peer);
        drop(peers);
        peer.tagged.end(error);
        self.not_accepted(peer);
    }

    /// Queues a peer that has connected to us for `accept`, once.
    pub(crate) fn accepted(&self, peer: &Arc<PeerShared>) {
        let mut accepted = self.accepted.lock();
        if !accepted.iter().any(|known| Arc::ptr_eq(known, peer)) {
            accepted.push_back(Arc::clone(peer));
        }
        drop(accepted);
        self.accepted_changed.notify_one();
    }

    fn not_accepted(&self, peer: &PeerShared) {
        let mut accepted = self.accepted.lock();
        accepted.retain(|known| !std::ptr::eq(&**known, peer));
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

    /// Checks local memory and the bounds of every segment.
    pub(crate) fn resolve<'a>(
        &self,
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
            // Adjacent segments usually share a region: search from the last one.
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
        &self,
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

    fn check_region(&self, region: &Region) -> Result<(), Error> {
        if !region.belongs_to(&self.context().registry) {
            return Err(Error::ForeignRegion(region.id()));
        }
        if !region.is_registered() {
            return Err(Error::RegionDeregistered(region.id()));
        }
        Ok(())
    }

    /// Stops accepting new work; returns false if that was already done.
    pub(crate) fn begin_close(&self) -> bool {
        if self.closing.swap(true, Ordering::AcqRel) {
            return false;
        }
        self.context().quota.close();
        // Taking the lock makes sure that a waiting thread either sees the end or is woken.
        drop(self.accepted.lock());
        self.accepted_changed.notify_all();
        true
    }

    /// Ends everything except for the threads, which end soon after.
    pub(crate) fn end(&self) {
        self.ending.store(true, Ordering::Release);
        let peers = std::mem::take(&mut *self.peers.write());
        for peer in peers.by_id.into_values() {
            peer.remove(CLOSED, &Error::Closed);
        }
        self.accepted.lock().clear();
        self.parts.control.stop();
        self.parts.crew.stop();
        self.inbox.close();
    }

    /// Takes links apart that ended, or were made, while the session closed, after the threads have
    /// ended. Until then they keep the session alive, and their transfers wait.
    pub(crate) fn take_apart(&self) {
        for link in self.context().links() {
            link.close(CLOSED, Error::Closed);
            link.reap();
        }
        self.context().wait_for_neighbours();
    }
}

/// Reason that peers receive when the session is closed.
const CLOSED: &str = "the session was closed";

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use std::sync::Arc;

    use tcpx_proto::info::{ConnectionInfo, Secret};

    use super::PeerShared;
    use crate::link::is_same_link;
    use crate::testing::{LONG, Pair, session, wait_until};
    use crate::{Buffer, Error, Misbehaviour, Session, TransferState};

    #[test]
    fn peer_added_again_is_a_new_peer() {
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
                bob.core().context().links().is_empty()
            });
            assert!(
                bob.peer("alice").is_some(),
                "the new peer was removed with the old one"
            );
            assert!(
                bob.remove(&to_alice).is_err(),
                "the old peer was removed twice"
            );
            assert!(
                bob.peer("alice").is_some(),
                "the new peer was removed with the old one"
            );
            again.connect(LONG).unwrap();
            bob.remove(&again).unwrap();
            assert!(bob.peer("alice").is_none());
        }
    }

    /// The info may be loaded while a connection is being made.
    #[test]
    fn impostor_is_refused_if_the_info_is_loaded_meanwhile() {
        let pair = Pair::new();
        let link = pair.bob.core().context().links().pop().unwrap();
        let info = ConnectionInfo::decode(&pair.alice.connection_info()).unwrap();
        let peer = || {
            let core = pair.bob.core();
            PeerShared::new("alice", info.id(), core.context(), Arc::downgrade(core))
        };
        let (believed, known) = (peer(), peer());
        known.set_info(info.clone());
        known.attached(&link);
        assert!(known.link().is_some(), "the genuine link was refused");
        let other = ConnectionInfo::new(
            info.name().clone(),
            info.id(),
            Secret::new([7; 32]),
            info.addresses().to_vec(),
        );
        believed.set_info(other.unwrap());
        believed.attached(&link);
        let what = Misbehaviour::Impostor;
        let peer = "alice".to_owned();
        assert_eq!(link.error(), Some(Error::PeerMisbehaved { peer, what }));
        assert!(believed.link().is_none());
    }

    #[test]
    fn notifications_of_a_replaced_session_are_kept() {
        let (alice, bob, other) = (session("alice"), session("bob"), session("bob"));
        let to_alice = bob.add_peer(&alice.connection_info()).unwrap();
        to_alice.connect(LONG).unwrap();
        // The first message arrives before the name is proven.
        for message in [b"1", b"2"] {
            bob.notify(&to_alice, message).unwrap();
            to_alice.flush(LONG).unwrap();
            alice.add_peer(&bob.connection_info()).unwrap();
        }
        alice.add_peer(&other.connection_info()).unwrap();
        let heard = alice.notifications();
        let heard: Vec<_> = heard
            .iter()
            .map(|n| (n.from.as_str(), &n.message[..]))
            .collect();
        assert_eq!(heard, [("bob", &b"1"[..]), ("bob", b"2")]);
    }

    #[test]
    fn peer_is_accepted_once_and_not_after_its_removal() {
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
        assert!(
            alice.accept(Duration::ZERO).is_err(),
            "a removed peer was accepted"
        );
    }

    #[test]
    fn message_survives_the_loss_of_another_connection() {
        const SMALL: usize = 64;
        for _ in 0..1000 {
            let (alice, bob) = (session("alice"), session("bob"));
            let to_bob = alice.add_peer(&bob.connection_info()).unwrap();
            let to_alice = bob.add_peer(&alice.connection_info()).unwrap();
            std::thread::scope(|scope| {
                scope.spawn(|| to_bob.connect(LONG).unwrap());
                scope.spawn(|| to_alice.connect(LONG).unwrap());
            });
            if [&alice, &bob].map(|s| s.core().context().links().len()) != [2, 2] {
                continue;
            }
            let region = |session: &Session| session.register(&Buffer::new(SMALL)).unwrap();
            let (here, there) = (region(&alice), region(&bob));
            let send = alice.send(&to_bob, here.at(0), SMALL, 7).unwrap();
            let used = to_bob.shared.link().expect("connected");
            let links = alice.core().context().links();
            let other = links.iter().find(|link| !is_same_link(link, &used));
            other.expect("a second one").kill(Error::Aborted);
            wait_until("the link is taken apart", || {
                [&alice, &bob].map(|s| s.core().context().links().len()) == [1, 1]
            });
            assert_eq!(send.poll(), TransferState::InProgress);
            let receive = bob.recv(&to_alice, there.at(0), SMALL, 7).unwrap();
            receive.wait(LONG).unwrap();
            send.wait(LONG).unwrap();
            return;
        }
        panic!("never two connections");
    }
}
