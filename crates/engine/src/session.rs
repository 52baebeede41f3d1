//! Sessions: one per process and role. They own the listeners, the threads, the regions and the peers.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex, RwLock};
use tcpx_net::interfaces::{self, Interface};
use tcpx_net::{Listener, Poller, SocketOptions, Span};
use tcpx_proto::frame::MAX_NOTIFICATION_BYTES;
use tcpx_proto::handshake::{Established, Identity};
use tcpx_proto::info::{ConnectionInfo, Name, Secret, SessionId};

use crate::completion::deadline;
use crate::config::{Config, TransportKind};
use crate::control::{Control, ControlLoop};
use crate::error::{Error, Side};
use crate::inbox::{Inbox, Notification};
use crate::memory::Buffer;
use crate::peer::{Peer, PeerShared, Waiting};
use crate::plan::{Limits, Op, Piece, Plan};
use crate::progress::Worker;
use crate::region::{LocalSlice, Memory, MemoryKind, Region, Regions, Segment};
use crate::routes::LocalAddress;
use crate::tagged::{self, Receive};
use crate::transfer::Transfer;
use crate::transport::Link;
use crate::transport::local::Local;

/// A session: registers memory, knows peers, makes transfers. Clones are handles to the same
/// session; it closes with [`Session::close`] or with the last handle.
///
/// ```
/// use std::time::Duration;
/// use tcpx::{Buffer, Config, Op, Segment, Session};
///
/// # fn main() -> Result<(), tcpx::Error> {
/// // Two sessions; in real life they are in two processes on two machines.
/// let config = |name: &str| Config::from_env()?.with_name(name)?.with("interfaces", "lo");
/// let alice = Session::new(config("alice")?)?;
/// let bob = Session::new(config("bob")?)?;
///
/// // Bob offers memory; the application carries the descriptor and the connection info to Alice.
/// let target = Buffer::new(1 << 20);
/// let region = bob.register(&target)?;
/// let (descriptor, info) = (region.descriptor(), bob.connection_info());
///
/// // Alice writes into it, and Bob is told when everything is there.
/// let source = Buffer::from_bytes(&[7; 4096]);
/// let local = alice.register(&source)?;
/// let peer = alice.add_peer(&info)?;
/// let segments = [Segment { local: local.at(0), remote: descriptor.at(8192), len: 4096 }];
/// let transfer = alice.prepare(Op::Write, &peer, segments)?;
/// transfer.post_with_notification(b"block 2 is there")?;
/// transfer.wait(Duration::from_secs(10))?;
///
/// let notification = bob.wait_notification(Duration::from_secs(10))?;
/// assert_eq!((notification.from.as_str(), notification.message.as_slice()), ("alice", &b"block 2 is there"[..]));
/// assert_eq!(target.to_vec()[8192..12288], [7; 4096]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Session {
    handle: Arc<Handle>,
}

impl Session {
    /// Starts a session: it listens and serves its regions from now on, whether or not the application does
    /// anything.
    ///
    /// # Errors
    /// No interface can be used, or the system is out of something.
    pub fn new(config: Config) -> Result<Self, Error> {
        let (core, threads) = Core::start(config)?;
        Ok(Self {
            handle: Arc::new(Handle {
                core,
                threads: Mutex::new(threads),
            }),
        })
    }

    /// What this session calls itself.
    #[must_use]
    pub fn name(&self) -> &str {
        self.core().name()
    }

    /// The configuration in force.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.core().config
    }

    /// Where this session listens.
    #[must_use]
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.core().addresses.clone()
    }

    /// What a peer needs to connect to this session. It contains the session's secret: whoever has
    /// it may connect, nobody else can.
    #[must_use]
    pub fn connection_info(&self) -> Vec<u8> {
        self.core().info.clone()
    }

    /// Makes a peer known by its connection info; connecting happens later. The same info again
    /// gives the same peer; info of a new session under a known name replaces the old session, whose
    /// transfers fail. A session's own info gives a peer that stands for itself.
    ///
    /// # Errors
    /// The bytes are no connection info, or the session is closed.
    pub fn add_peer(&self, info: &[u8]) -> Result<Peer, Error> {
        let info = ConnectionInfo::decode(info).map_err(Error::BadConnectionInfo)?;
        Ok(self.peer_of(self.core().add_peer(info)?))
    }

    /// The peer of that name: one that was added, one that connected to us, or the session itself.
    #[must_use]
    pub fn peer(&self, name: &str) -> Option<Peer> {
        Some(self.peer_of(self.core().find_peer(name)?))
    }

    /// Every peer that was added or has connected to us.
    #[must_use]
    pub fn peers(&self) -> Vec<Peer> {
        let own = self.core().identity.id;
        let peers = self.core().all_peers().into_iter();
        peers
            .filter(|p| p.id != own)
            .map(|p| self.peer_of(p))
            .collect()
    }

    /// Forgets a peer and ends its connections. Its transfers fail. It may be added again.
    ///
    /// # Errors
    /// There is no peer of that name.
    pub fn remove_peer(&self, name: &str) -> Result<(), Error> {
        self.core().remove_peer(name)
    }

    /// The next peer that has connected to us.
    ///
    /// # Errors
    /// None came within `timeout`, or the session was closed.
    pub fn accept(&self, timeout: Duration) -> Result<Peer, Error> {
        Ok(self.peer_of(self.core().accept(timeout)?))
    }

    /// Registers a buffer, which the registration keeps alive.
    ///
    /// # Errors
    /// The buffer is empty, or the session is closed.
    pub fn register(&self, buffer: &Buffer) -> Result<Region, Error> {
        self.core().check_open()?;
        let owner = Some(buffer.clone());
        self.core()
            .regions
            .add(self.core(), buffer.span(), MemoryKind::Host, owner)
    }

    /// Registers memory that the caller owns. Overlapping and repeated registrations are legal.
    ///
    /// # Safety
    /// The memory must stay mapped, readable and writable until the region is deregistered or dropped.
    /// Peers who have its descriptor write to it at any time.
    ///
    /// # Errors
    /// The range is empty or wraps, the kind is not supported, or the session is closed.
    pub unsafe fn register_raw(
        &self,
        address: *mut u8,
        len: usize,
        kind: MemoryKind,
    ) -> Result<Region, Error> {
        self.core().check_open()?;
        // SAFETY: the caller promises what `Span::new` asks for until the registration ends, and the
        // registry makes sure that no span of it is used afterwards.
        let span = unsafe { Span::new(address, len) };
        self.core().regions.add(self.core(), span, kind, None)
    }

    /// Plans a transfer over any number of segments. Nothing moves until it is posted; a
    /// transfer may be posted any number of times.
    ///
    /// # Errors
    /// A segment does not fit its region, or a local region is not registered with this session. The
    /// peer's side is checked by the peer.
    pub fn prepare<'a>(
        &self,
        op: Op,
        peer: &Peer,
        segments: impl IntoIterator<Item = Segment<'a>>,
    ) -> Result<Transfer, Error> {
        let core = self.core();
        core.check_open()?;
        let (pieces, memory) = core.resolve(segments)?;
        let lanes = peer
            .shared
            .link()
            .map_or(core.config.lanes(), |link| link.lanes());
        let limits = Limits {
            chunk_bytes: core.config.chunk_bytes(),
            lanes,
        };
        let plan = Plan::new(op, &pieces, memory, limits);
        Ok(Transfer::one_sided(peer.clone(), Arc::new(plan)))
    }

    /// Sends `len` bytes to the peer under a tag. Done when the peer has received them into the
    /// buffer that it posted for that tag; messages of one tag are received in the order in which they were sent.
    ///
    /// # Errors
    /// The range does not fit the region, or the peer is not reachable by any means.
    pub fn send(
        &self,
        peer: &Peer,
        source: LocalSlice<'_>,
        len: usize,
        tag: u64,
    ) -> Result<Transfer, Error> {
        let core = self.core();
        core.check_open()?;
        let (span, memory) = core.slice(source, len)?;
        let send = tagged::Send::new(core.next_id(), tag, span, memory);
        peer.shared.tagged.add_send(&send);
        if let Err(error) = peer.shared.start(core, Waiting::Send(Arc::clone(&send))) {
            peer.shared.tagged.sent(send.id, Some(error.clone()));
            return Err(error);
        }
        Ok(Transfer::sending(peer.clone(), send))
    }

    /// Receives the next message that the peer sends under a tag, up to `len` bytes;
    /// [`Transfer::received`] tells how many it had. A longer one fails on both sides.
    ///
    /// # Errors
    /// The range does not fit the region.
    pub fn recv(
        &self,
        peer: &Peer,
        target: LocalSlice<'_>,
        len: usize,
        tag: u64,
    ) -> Result<Transfer, Error> {
        let core = self.core();
        core.check_open()?;
        let (span, memory) = core.slice(target, len)?;
        let receive = Receive::new(tag, span, memory);
        if let Some((link, arrival)) = peer.shared.tagged.post(&receive) {
            tagged::matched(&link, &receive, arrival);
        }
        Ok(Transfer::receiving(peer.clone(), receive))
    }

    /// Sends a message on its own. It is queued when this returns; standalone messages to one peer arrive
    /// in order. Empty messages are legal.
    ///
    /// # Errors
    /// The message is too long, or the peer is not reachable by any means.
    pub fn notify(&self, peer: &Peer, message: &[u8]) -> Result<(), Error> {
        self.core().check_open()?;
        check_message(message)?;
        peer.shared
            .start(self.core(), Waiting::Notification(message.to_vec()))
    }

    /// Takes every notification that has arrived, oldest first. Never waits.
    #[must_use]
    pub fn notifications(&self) -> Vec<Notification> {
        self.core().inbox.take_all()
    }

    /// Waits for the next notification.
    ///
    /// # Errors
    /// None came within `timeout`.
    pub fn wait_notification(&self, timeout: Duration) -> Result<Notification, Error> {
        self.core()
            .inbox
            .take_one(deadline(timeout))
            .ok_or(Error::Timeout {
                what: "a notification",
                after: timeout,
            })
    }

    /// Closes the session: ends its connections and threads; transfers in flight fail here and at the peers.
    /// May be called more than once.
    pub fn close(&self) {
        self.handle.close();
    }

    fn core(&self) -> &Arc<Core> {
        &self.handle.core
    }

    fn peer_of(&self, shared: Arc<PeerShared>) -> Peer {
        Peer {
            shared,
            core: Arc::clone(self.core()),
        }
    }
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session")
            .field("name", &self.name())
            .field("addresses", &self.core().addresses)
            .finish_non_exhaustive()
    }
}

pub(crate) fn check_message(message: &[u8]) -> Result<(), Error> {
    if message.len() as u64 > MAX_NOTIFICATION_BYTES {
        return Err(Error::NotificationTooLong {
            len: message.len(),
            max: MAX_NOTIFICATION_BYTES,
        });
    }
    Ok(())
}

/// What the handles of a session share; closes it when the last one goes.
struct Handle {
    core: Arc<Core>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Handle {
    fn close(&self) {
        self.core.close();
        let threads = std::mem::take(&mut *self.threads.lock());
        let this = std::thread::current().id();
        for thread in threads {
            // A thread of ours can hold the last handle only by way of a bug; it must not wait for itself.
            if thread.thread().id() != this && thread.join().is_err() {
                tracing::error!("a thread of the session panicked");
            }
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.close();
    }
}

/// The inside of a session, shared with its threads, peers and transfers.
pub(crate) struct Core {
    pub(crate) config: Config,
    pub(crate) identity: Identity,
    pub(crate) regions: Regions,
    pub(crate) inbox: Inbox,
    pub(crate) control: Control,
    pub(crate) local: Local,
    /// Where lanes may leave from.
    pub(crate) local_addresses: Vec<LocalAddress>,
    addresses: Vec<SocketAddr>,
    info: Vec<u8>,
    workers: Vec<Arc<Worker>>,
    next_worker: AtomicUsize,
    next_id: AtomicU64,
    peers: RwLock<Peers>,
    own_peer: OnceLock<Arc<PeerShared>>,
    accepted: Mutex<VecDeque<Arc<PeerShared>>>,
    accepted_changed: Condvar,
    closing: AtomicBool,
}

#[derive(Default)]
struct Peers {
    by_id: HashMap<SessionId, Arc<PeerShared>>,
    /// The session that a name stands for now.
    by_name: HashMap<String, SessionId>,
}

impl Core {
    fn start(config: Config) -> Result<(Arc<Self>, Vec<JoinHandle<()>>), Error> {
        if config.transport() == TransportKind::Plugin {
            return Err(Error::Config(crate::config::ConfigError::BadValue {
                name: "transport".into(),
                value: "plugin".into(),
                expected: "tcp: this build has no plugin transport".into(),
            }));
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
        for peer in self.all_peers() {
            for connection in peer.connections() {
                connection.revoke();
            }
        }
    }

    fn find_peer(&self, name: &str) -> Option<Arc<PeerShared>> {
        let peers = self.peers.read();
        peers.by_id.get(peers.by_name.get(name)?).cloned()
    }

    fn add_peer(&self, info: ConnectionInfo) -> Result<Arc<PeerShared>, Error> {
        self.check_open()?;
        if info.id() == self.identity.id {
            return Ok(Arc::clone(self.own_peer()));
        }
        let name = info.name().as_str().to_owned();
        let mut peers = self.peers.write();
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
        drop(peers);
        peer.set_info(info);
        if let Some(old) = replaced {
            let reason = "a new session has taken its name".to_owned();
            old.remove("replaced", &Error::PeerLost { peer: name, reason });
        }
        Ok(peer)
    }

    fn remove_peer(&self, name: &str) -> Result<(), Error> {
        let mut peers = self.peers.write();
        let id = peers
            .by_name
            .get(name)
            .copied()
            .filter(|id| *id != self.identity.id);
        let peer = id.and_then(|id| peers.by_id.remove(&id));
        if id.is_some() {
            peers.by_name.remove(name);
        }
        drop(peers);
        let peer = peer.ok_or_else(|| Error::UnknownPeer(name.to_owned()))?;
        let reason = "removed by this side".to_owned();
        peer.remove(
            "the peer removed us",
            &Error::PeerLost {
                peer: name.to_owned(),
                reason,
            },
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
    /// costs no memory.
    pub(crate) fn forget_if_gone(&self, peer: &Arc<PeerShared>) {
        let mut peers = self.peers.write();
        if peer.id == self.identity.id || !peer.is_gone() {
            return;
        }
        peers.by_id.remove(&peer.id);
        if peers.by_name.get(peer.name()) == Some(&peer.id) {
            peers.by_name.remove(peer.name());
        }
        drop(peers);
        self.accepted.lock().retain(|p| !Arc::ptr_eq(p, peer));
    }

    pub(crate) fn accepted(&self, peer: &Arc<PeerShared>) {
        self.accepted.lock().push_back(Arc::clone(peer));
        self.accepted_changed.notify_one();
    }

    fn accept(&self, timeout: Duration) -> Result<Arc<PeerShared>, Error> {
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
    fn resolve<'a>(
        self: &Arc<Self>,
        segments: impl IntoIterator<Item = Segment<'a>>,
    ) -> Result<(Vec<Piece>, Vec<Arc<Memory>>), Error> {
        let segments = segments.into_iter();
        let mut pieces = Vec::with_capacity(segments.size_hint().0);
        let mut memory: Vec<Arc<Memory>> = Vec::new();
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
            let known = memory
                .iter()
                .rev()
                .any(|m| Arc::ptr_eq(m, local.region.memory()));
            if !known {
                self.check_region(local.region)?;
                memory.push(Arc::clone(local.region.memory()));
            }
            let address = remote.region.address() + remote.offset as u64;
            pieces.push(Piece {
                local: span,
                key: remote.region.key(),
                address,
            });
        }
        Ok((pieces, memory))
    }

    fn slice(
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

    fn close(&self) {
        if self.closing.swap(true, Ordering::AcqRel) {
            return;
        }
        let peers = std::mem::take(&mut *self.peers.write());
        for peer in peers.by_id.into_values() {
            peer.remove("the session was closed", &Error::Closed);
        }
        self.local.close();
        self.accepted_changed.notify_all();
        self.control.stop();
        for worker in &self.workers {
            worker.stop();
        }
    }
}

fn socket_options(config: &Config) -> SocketOptions {
    SocketOptions {
        buffer_bytes: config.socket_buffer_bytes(),
        dead_after: config.peer_timeout(),
    }
}

fn choose_interfaces(config: &Config) -> Result<Vec<Interface>, Error> {
    let found = interfaces::discover().map_err(|e| {
        Error::io(
            "cannot list the network interfaces",
            std::io::Error::other(e),
        )
    })?;
    let select = |selector: &interfaces::InterfaceSelector| {
        selector
            .select(&found)
            .map_err(|e| Error::Interfaces(Arc::new(e)))
    };
    let mut chosen = select(config.interfaces())?;
    if !config.control_interface().is_default() {
        for interface in select(config.control_interface())? {
            // Last: lanes use it only when the others lead nowhere.
            if !chosen.contains(&interface) {
                chosen.push(interface);
            }
        }
    }
    Ok(chosen)
}

/// One address of each family and interface.
fn lane_addresses(chosen: &[Interface]) -> Vec<LocalAddress> {
    let mut out = Vec::new();
    for interface in chosen {
        let addresses = interface.lane_addresses();
        for v4 in [true, false] {
            let Some(ip) = addresses.iter().find(|ip| ip.is_ipv4() == v4) else {
                continue;
            };
            let prefix = interface
                .addresses
                .iter()
                .find(|a| a.ip == *ip)
                .map(|a| a.prefix_len);
            out.push(LocalAddress {
                ip: *ip,
                prefix_len: prefix.unwrap_or(0),
            });
        }
    }
    out
}

fn listen(
    chosen: &[Interface],
    config: &Config,
    options: &SocketOptions,
) -> Result<(Vec<Listener>, Vec<SocketAddr>), Error> {
    let mut listeners = Vec::new();
    let mut addresses = Vec::new();
    let mut failure = None;
    for local in lane_addresses(chosen)
        .into_iter()
        .take(ConnectionInfo::MAX_ADDRESSES)
    {
        let address = SocketAddr::new(local.ip, config.listen_port());
        let bound = Listener::bind(address, options)
            .and_then(|listener| Ok((listener.local_addr()?, listener)));
        match bound {
            Ok((address, listener)) => {
                addresses.push(address);
                listeners.push(listener);
            }
            Err(error) => {
                tracing::warn!(%address, %error, "cannot listen");
                failure = Some(error);
            }
        }
    }
    match failure {
        Some(error) if listeners.is_empty() => {
            Err(Error::io("cannot listen on any interface", error))
        }
        _ => Ok((listeners, addresses)),
    }
}

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

// Used by `Link`, which is handed around between threads.
const _: fn() = || {
    fn shared<T: Send + Sync>() {}
    shared::<Session>();
    shared::<Link>();
};
