//! Sessions, which own listeners, threads, regions and peers. Usually one per process and role.

mod closing;
pub(crate) mod peer;
pub(crate) mod transfer;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use tcpx_net::{InProcess, Span};
use tcpx_proto::frame::MAX_NOTIFICATION_BYTES;
use tcpx_proto::info::ConnectionInfo;

use self::peer::Peer;
use self::transfer::Transfer;
use crate::config::Config;
use crate::driver;
use crate::error::Error;
use crate::link::{Control, Link, longest_notification};
use crate::log::limited;
use crate::memory::{Buffer, LocalSlice, MemoryKind, Region, Segment};
use crate::peers::{
    Notification, PeerShared, SessionCore, TaggedReceive, TaggedSend, Waiting, post_receive,
};
use crate::stats::{self, SessionStats};
use crate::sync::{Mutex, Rank};
use crate::trace::Recording;
use crate::transfer::{Events, Limits, Op, Plan, deadline};

/// A session: registers memory, knows peers, makes transfers. Clones are handles to the same
/// session; it closes with [`Session::close`], or in the same way with the last handle.
///
/// A forked child needs a session of its own. Every call on an inherited handle of a session, peer,
/// region or transfer fails at once with [`Error::Forked`]; calls that cannot fail return nothing
/// and do nothing, except for those that return constants. Dropping a handle does nothing there.
/// The child keeps no connection and no port of its parent, whose session continues.
///
/// ```
/// use std::time::Duration;
/// use tcpx::{Buffer, Config, Op, Segment, Session};
///
/// # fn main() -> Result<(), tcpx::Error> {
/// // Two sessions; in practice they are in two processes on two machines.
/// let config = |name: &str| Config::from_env()?.with_name(name)?.with("interfaces", "lo");
/// let alice = Session::new(config("alice")?)?;
/// let bob = Session::new(config("bob")?)?;
///
/// // Bob offers memory; the application sends the descriptor and the connection info to Alice.
/// let target = Buffer::new(1 << 20);
/// let region = bob.register(&target)?;
/// let (descriptor, info) = (region.descriptor(), bob.connection_info());
///
/// // Alice writes into it, and Bob is notified when everything is in place.
/// let source = Buffer::from_bytes(&[7; 4096]);
/// let local = alice.register(&source)?;
/// let peer = alice.add_peer(&info)?;
/// let segments = [Segment { local: local.at(0), remote: descriptor.at(8192), len: 4096 }];
/// let transfer = alice.prepare(Op::Write, &peer, segments)?;
/// transfer.post_with_notification(b"block 2 is there")?;
/// transfer.wait(Duration::from_secs(10))?;
///
/// let notification = bob.wait_notification(Duration::from_secs(10))?;
/// assert_eq!(notification.from, "alice");
/// assert_eq!(notification.message, b"block 2 is there");
/// assert_eq!(target.to_vec()[8192..12288], [7; 4096]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Session {
    handle: InProcess<Arc<Handle>>,
}

impl Session {
    /// Starts a session: from now on it listens and serves its regions, independent of the
    /// application.
    ///
    /// # Errors
    /// No interface can be used, or the system lacks a resource.
    pub fn new(config: Config) -> Result<Self, Error> {
        Config::warn_of_unknown_variables();
        let recording = Recording::start(&config)?;
        let (core, threads) = driver::start(config, recording.trace())?;
        let source = Arc::downgrade(&core) as Weak<dyn stats::Source>;
        let config = &core.context().config;
        let metrics = config.metrics().map(stats::Asked::Metrics);
        let asked = metrics
            .into_iter()
            .chain(config.top().then(stats::Asked::top));
        let served = asked
            .filter_map(|asked| stats::register(asked, source.clone()))
            .collect();
        Ok(Self {
            handle: InProcess::new(Arc::new(Handle {
                core,
                running: Mutex::new(
                    Rank::Session,
                    Running {
                        threads,
                        served,
                        recording: Some(recording),
                    },
                ),
            })),
        })
    }

    /// Returns the session's name, as peers see it.
    #[must_use]
    pub fn name(&self) -> &str {
        self.core().name()
    }

    /// Returns the configuration in use.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.core().context().config
    }

    /// Returns the addresses on which this session listens.
    #[must_use]
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.core().parts.addresses.clone()
    }

    /// Returns the connection info that a peer needs to connect to this session. It contains the
    /// session's secret, without which no process can connect.
    #[must_use]
    pub fn connection_info(&self) -> Vec<u8> {
        self.core().parts.info.clone()
    }

    /// Adds a peer by its connection info; the connection is made later. The same info again gives
    /// the same peer; info of a new session under a known name replaces the old session, whose
    /// transfers fail. A session's own info gives a peer that represents the session itself.
    ///
    /// # Errors
    /// The bytes are not connection info, or the session is closed.
    pub fn add_peer(&self, info: &[u8]) -> Result<Peer, Error> {
        let core = self.core_here()?;
        let info = ConnectionInfo::decode(info).map_err(Error::BadConnectionInfo)?;
        Ok(self.peer_of(core.add_peer(info)?))
    }

    /// Returns the peer of that name:
    /// one that was added, one that connected to us, or the session itself.
    #[must_use]
    pub fn peer(&self, name: &str) -> Option<Peer> {
        Some(self.peer_of(self.core_here().ok()?.find_peer(name)?))
    }

    /// Returns the peer that represents this session itself.
    #[must_use]
    pub fn own_peer(&self) -> Peer {
        self.peer_of(Arc::clone(self.core().own_peer()))
    }

    /// Returns every peer that was added or has connected to us.
    #[must_use]
    pub fn peers(&self) -> Vec<Peer> {
        let Ok(core) = self.core_here() else {
            return Vec::new();
        };
        let own = core.id();
        let peers = core.all_peers().into_iter();
        peers
            .filter(|p| p.id != own)
            .map(|p| self.peer_of(p))
            .collect()
    }

    /// Removes a peer and ends its connections. Its transfers fail. It may be added again.
    ///
    /// # Errors
    /// There is no peer of that name.
    pub fn remove_peer(&self, name: &str) -> Result<(), Error> {
        self.core_here()?.remove_peer(name)
    }

    /// Like [`Session::remove_peer`], for exactly this peer: another peer that has taken its name
    /// stays.
    ///
    /// # Errors
    /// The peer was already removed.
    pub fn remove(&self, peer: &Peer) -> Result<(), Error> {
        self.core_with(peer)?.remove(&peer.shared)
    }

    /// Returns the next peer that has connected to us.
    ///
    /// # Errors
    /// No peer connected within `timeout`, or the session was closed.
    pub fn accept(&self, timeout: Duration) -> Result<Peer, Error> {
        Ok(self.peer_of(self.core_here()?.accept(timeout)?))
    }

    /// Registers a buffer, which the registration keeps alive.
    ///
    /// # Errors
    /// The buffer is empty, or the session is closed.
    pub fn register(&self, buffer: &Buffer) -> Result<Region, Error> {
        self.core_here()?.check_open()?;
        let owner = Some(buffer.clone());
        self.add_region(buffer.span(), MemoryKind::Host, owner)
    }

    /// Registers memory that the caller owns. Overlapping and repeated registrations are allowed.
    ///
    /// The CUDA driver's information about the address takes precedence over `kind`: GPU memory is
    /// recognised even if it was declared as host memory, provided that this process uses CUDA.
    ///
    /// # Safety
    /// Until the region is deregistered or dropped, the address range must belong to this memory:
    /// peers that have its descriptor read and write whatever is mapped there. If memory is
    /// unmapped or protected too early, accesses to it fail, as long as nothing else is mapped in
    /// its place.
    ///
    /// # Errors
    /// The range is empty or wraps, it was declared as GPU memory and is not, the GPU cannot be
    /// used, or the session is closed.
    pub unsafe fn register_raw(
        &self,
        address: *mut u8,
        len: usize,
        kind: MemoryKind,
    ) -> Result<Region, Error> {
        self.core_here()?.check_open()?;
        // SAFETY: the caller guarantees the requirements of `Span::new` until the registration
        // ends, and the registry makes sure that no span of it is used afterwards.
        let span = unsafe { Span::new(address, len) };
        self.add_region(span, kind, None)
    }

    /// Plans a transfer over any number of segments. Nothing moves until it is posted; a transfer
    /// may be posted any number of times.
    ///
    /// # Errors
    /// A segment does not fit its region, or a local region is not registered with this session.
    /// The peer checks its own side.
    pub fn prepare<'a>(
        &self,
        op: Op,
        peer: &Peer,
        segments: impl IntoIterator<Item = Segment<'a>>,
    ) -> Result<Transfer, Error> {
        let core = self.core_with(peer)?;
        core.check_open()?;
        let pieces = core.resolve(segments)?;
        let link = peer.shared.link();
        let lanes = link.map_or_else(|| core.lanes_to(&peer.shared), |link| link.lanes());
        let nearness = &core.context().staging.nearness;
        let limits = Limits {
            chunk_bytes: core.context().config.chunk_bytes(),
            lanes: nearness.lanes_over(pieces.near(), lanes),
        };
        let plan = Plan::new(op, pieces, limits);
        Ok(Transfer::one_sided(peer.clone(), Arc::new(plan)))
    }

    /// Sends `len` bytes to the peer under a tag. Done when the peer has received them into the
    /// buffer that it posted for that tag; messages of one tag are received in the order of
    /// sending.
    ///
    /// # Errors
    /// The range does not fit the region, or there is no way to reach the peer.
    pub fn send(
        &self,
        peer: &Peer,
        source: LocalSlice<'_>,
        len: usize,
        tag: u64,
    ) -> Result<Transfer, Error> {
        let core = self.core_with(peer)?;
        core.check_open()?;
        let (span, memory) = core.slice(source, len)?;
        let send = TaggedSend::new(core.context(), peer.shared.metered(), tag, span, &memory);
        peer.shared.tagged.add_send(&send)?;
        if let Err(error) = peer.shared.start(core, Waiting::Send(Arc::clone(&send))) {
            peer.shared.tagged.sent(send.id(), Some(error.clone()));
            return Err(error);
        }
        core.context().hurry();
        Ok(Transfer::sending(peer.clone(), send))
    }

    /// Receives the next message that the peer sends under a tag, up to `len` bytes;
    /// [`Transfer::received`] returns its length. A longer message fails on both sides.
    ///
    /// # Errors
    /// The range does not fit the region, or the peer will never send anything: it was removed, or
    /// it had connected to us and has left.
    pub fn recv(
        &self,
        peer: &Peer,
        target: LocalSlice<'_>,
        len: usize,
        tag: u64,
    ) -> Result<Transfer, Error> {
        let core = self.core_with(peer)?;
        core.check_open()?;
        let (span, memory) = core.slice(target, len)?;
        let receive = TaggedReceive::new(core.context(), peer.shared.metered(), tag, span, memory);
        if let Err(error) = post_receive(&peer.shared, &receive) {
            receive.completion.record(error.clone());
            receive.completion.finish();
            return Err(error);
        }
        core.parts.control.stay_awake();
        core.context().hurry();
        Ok(Transfer::receiving(peer.clone(), receive))
    }

    /// Sends a message without a transfer. The message is queued when this returns; such messages
    /// to one peer arrive in order. Empty messages are allowed. A message is lost if its peer
    /// cannot be reached, or is lost, before it arrives; [`Session::close`] waits for messages in
    /// flight.
    ///
    /// # Errors
    /// The message is too long (half of `queue_bytes`), or there is no way to reach the peer.
    /// [`Error::PeerBehind`], of kind [`Busy`](crate::ErrorKind::Busy), if the peer does not keep
    /// up: half of `queue_bytes` is queued for it. Then nothing was sent; try again later.
    pub fn notify(&self, peer: &Peer, message: &[u8]) -> Result<(), Error> {
        let core = self.core_with(peer)?;
        core.check_open()?;
        check_message(core, message)?;
        peer.shared.notify(core, message)?;
        core.context().hurry();
        Ok(())
    }

    /// Takes all notifications that have arrived, oldest first. Never waits.
    #[must_use]
    pub fn notifications(&self) -> Vec<Notification> {
        let Ok(core) = self.core_here() else {
            return Vec::new();
        };
        core.context().hurry();
        core.inbox.take_all()
    }

    /// Waits for the next notification.
    ///
    /// # Errors
    /// None arrived within `timeout`, or the session is closed and none is left.
    pub fn wait_notification(&self, timeout: Duration) -> Result<Notification, Error> {
        let core = self.core_here()?;
        core.context().hurry();
        core.inbox.take_one(deadline(timeout)).ok_or_else(|| {
            let what = "a notification";
            let late = Error::Timeout {
                what,
                after: timeout,
            };
            core.check_open().err().unwrap_or(late)
        })
    }

    /// Notifies `events` of each later notification, and of the end of the session, as long as
    /// there is a handle of `events`. Call [`Session::notifications`] afterwards for earlier
    /// notifications. Repeated calls have no effect.
    ///
    /// # Errors
    /// The session is closed, or the call is made in a forked child.
    pub fn subscribe(&self, events: &Events) -> Result<(), Error> {
        let core = self.core_here()?;
        core.check_open()?;
        core.inbox.subscribe(events.queue()?);
        Ok(())
    }

    /// Returns counters of everything that the session has done since it was made; also after it
    /// was closed. Counting is always on and takes no lock; reading takes a few µs per peer.
    #[must_use]
    pub fn stats(&self) -> SessionStats {
        let core = self.core_here();
        core.map_or_else(|_| SessionStats::default(), |core| core.stats(false))
    }

    /// Like [`Session::stats`], with the kernel's data for each lane,
    /// which costs one system call per lane.
    #[must_use]
    pub fn stats_with_kernel(&self) -> SessionStats {
        let core = self.core_here();
        core.map_or_else(|_| SessionStats::default(), |core| core.stats(true))
    }

    /// Writes all events recorded until now to the trace (the setting `trace`), and returns its file.
    /// `None` if there is no trace, or if it can no longer be written. A trace is also written ten
    /// times a second, and completed when its last session closes.
    #[must_use]
    pub fn flush_trace(&self) -> Option<PathBuf> {
        self.core_here().ok()?;
        self.handle.running.lock().recording.as_ref()?.flush()
    }

    /// Closes the session: ends its connections and threads. May be called more than once; the
    /// first call stops new work.
    ///
    /// Messages that were queued before still arrive: this waits until every peer has its
    /// notifications, and knows how its own transfers to us and its messages have ended. It waits
    /// at most 5 seconds, or `peer_timeout` if that is shorter, for all peers together; with a
    /// plugin, a connection for which notifications wait first has `connect_timeout` to be made.
    /// Messages that an unresponsive peer has not received by then are lost, and a warning is
    /// logged. Transfers of this session, including tagged messages, are not awaited: those still
    /// in flight afterwards fail here and at the peers.
    pub fn close(&self) {
        if self.handle.is_current() {
            self.handle.close();
        }
    }

    /// Checks whether calls may succeed. Never waits, and takes no lock: layers with their own
    /// locks call this before they take one.
    ///
    /// # Errors
    /// The session is closed, or belongs to another process.
    pub fn check(&self) -> Result<(), Error> {
        self.core_here()?.check_open()
    }

    pub(crate) fn core(&self) -> &Arc<SessionCore> {
        &self.handle.core
    }

    /// Returns the core, unless the session belongs to another process:
    /// then its locks may be held for ever.
    fn core_here(&self) -> Result<&Arc<SessionCore>, Error> {
        self.handle.check()?;
        Ok(self.core())
    }

    /// Like [`Session::core_here`], for calls that also use a peer.
    fn core_with(&self, peer: &Peer) -> Result<&Arc<SessionCore>, Error> {
        peer.check()?;
        self.core_here()
    }

    fn add_region(
        &self,
        span: Span,
        kind: MemoryKind,
        owner: Option<Buffer>,
    ) -> Result<Region, Error> {
        // The application may have installed its own signal handlers since. The control thread
        // checks again while transfers are in flight.
        tcpx_net::check_handlers_anew();
        let context = self.core().context();
        context.registry.add(&context.staging, span, kind, owner)
    }

    fn peer_of(&self, shared: Arc<PeerShared>) -> Peer {
        let process = self.handle.process();
        Peer {
            shared: InProcess::of(process, shared),
            core: InProcess::of(process, Arc::clone(self.core())),
        }
    }
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session")
            .field("name", &self.name())
            .field("addresses", &self.core().parts.addresses)
            .finish_non_exhaustive()
    }
}

pub(crate) fn check_message(core: &SessionCore, message: &[u8]) -> Result<(), Error> {
    let (len, kept) = (message.len(), core.context().config.queue_bytes());
    let max = MAX_NOTIFICATION_BYTES.min(longest_notification(kept) as u64);
    if len as u64 > max {
        return Err(Error::NotificationTooLong { len, max });
    }
    Ok(())
}

/// State shared by the handles of a session; closes the session when the last one is dropped.
struct Handle {
    core: Arc<SessionCore>,
    running: Mutex<Running>,
}

/// Resources that end with a session.
struct Running {
    threads: Vec<JoinHandle<()>>,
    /// Keeps its statistics served.
    served: Vec<stats::Registration>,
    recording: Option<Recording>,
}

impl Handle {
    fn close(&self) {
        // Held until the end, so that a second caller also returns only when the session is closed.
        let mut running = self.running.lock();
        if self.core.begin_close() {
            closing::flush(&self.core);
            self.core.end();
        }
        let this = std::thread::current().id();
        running.served.clear();
        for thread in running.threads.drain(..) {
            // Only a bug lets one of our threads hold the last handle; it must not wait for itself.
            if thread.thread().id() != this && thread.join().is_err() {
                limited!(
                    ERROR,
                    remedy = "report this with what the thread has written to stderr",
                    "a thread of the session panicked"
                );
            }
        }
        self.core.take_apart();
        // Last: all that has happened is in it.
        running.recording = None;
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.close();
    }
}

// Required by `Link`, which threads share.
const _: fn() = || {
    fn shared<T: Send + Sync>() {}
    shared::<Session>();
    shared::<Arc<dyn Link>>();
};
