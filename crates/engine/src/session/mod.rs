//! Sessions: one per process and role. They own the listeners, the threads, the regions and the peers.

mod closing;
pub(crate) mod peer;
pub(crate) mod transfer;

use std::net::SocketAddr;
use std::sync::Arc;
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
use crate::memory::{Buffer, LocalSlice, MemoryKind, Region, Segment};
use crate::peers::{
    Notification, PeerShared, SessionCore, TaggedReceive, TaggedSend, Waiting, post_receive,
};
use crate::sync::{Mutex, Rank};
use crate::transfer::{Limits, Op, Plan, deadline};

/// A session: registers memory, knows peers, makes transfers. Clones are handles to the same
/// session; it closes with [`Session::close`], or in the same way with the last handle.
///
/// A forked child makes a session of its own. Every call on a handle that it has inherited, of a
/// session, peer, region or transfer, fails at once with [`Error::Forked`]; calls that cannot fail
/// find nothing and do nothing, and those that tell what never changes tell it. Dropping a handle
/// is free there. The child keeps no connection and no port of its parent, whose session goes on.
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
    handle: InProcess<Arc<Handle>>,
}

impl Session {
    /// Starts a session: it listens and serves its regions from now on, whether or not the application does
    /// anything.
    ///
    /// # Errors
    /// No interface can be used, or the system is out of something.
    pub fn new(config: Config) -> Result<Self, Error> {
        let (core, threads) = driver::start(config)?;
        Ok(Self {
            handle: InProcess::new(Arc::new(Handle {
                core,
                threads: Mutex::new(Rank::Session, threads),
            })),
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
        &self.core().context().config
    }

    /// Where this session listens.
    #[must_use]
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.core().parts.addresses.clone()
    }

    /// What a peer needs to connect to this session. It contains the session's secret: whoever has
    /// it may connect, nobody else can.
    #[must_use]
    pub fn connection_info(&self) -> Vec<u8> {
        self.core().parts.info.clone()
    }

    /// Makes a peer known by its connection info; connecting happens later. The same info again
    /// gives the same peer; info of a new session under a known name replaces the old session, whose
    /// transfers fail. A session's own info gives a peer that stands for itself.
    ///
    /// # Errors
    /// The bytes are no connection info, or the session is closed.
    pub fn add_peer(&self, info: &[u8]) -> Result<Peer, Error> {
        let core = self.core_here()?;
        let info = ConnectionInfo::decode(info).map_err(Error::BadConnectionInfo)?;
        Ok(self.peer_of(core.add_peer(info)?))
    }

    /// The peer of that name: one that was added, one that connected to us, or the session itself.
    #[must_use]
    pub fn peer(&self, name: &str) -> Option<Peer> {
        Some(self.peer_of(self.core_here().ok()?.find_peer(name)?))
    }

    /// The peer that stands for this session itself.
    #[must_use]
    pub fn own_peer(&self) -> Peer {
        self.peer_of(Arc::clone(self.core().own_peer()))
    }

    /// Every peer that was added or has connected to us.
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

    /// Forgets a peer and ends its connections. Its transfers fail. It may be added again.
    ///
    /// # Errors
    /// There is no peer of that name.
    pub fn remove_peer(&self, name: &str) -> Result<(), Error> {
        self.core_here()?.remove_peer(name)
    }

    /// As [`Session::remove_peer`], for exactly this peer: one that has taken its name stays.
    ///
    /// # Errors
    /// The peer was removed before.
    pub fn remove(&self, peer: &Peer) -> Result<(), Error> {
        self.core_with(peer)?.remove(&peer.shared)
    }

    /// The next peer that has connected to us.
    ///
    /// # Errors
    /// None came within `timeout`, or the session was closed.
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

    /// Registers memory that the caller owns. Overlapping and repeated registrations are legal.
    ///
    /// What the CUDA driver says of the address counts more than `kind`: memory of a GPU is found as such
    /// even if it was announced as the host's, as long as this process uses CUDA.
    ///
    /// # Safety
    /// Until the region is deregistered or dropped the address range must belong to this memory:
    /// peers who have its descriptor read and write whatever is mapped there. Memory that is
    /// unmapped or protected too early fails the accesses to it, as long as nothing else is mapped
    /// in its place.
    ///
    /// # Errors
    /// The range is empty or wraps, it was said to be on a GPU and is not, the GPU cannot be used, or the session
    /// is closed.
    pub unsafe fn register_raw(
        &self,
        address: *mut u8,
        len: usize,
        kind: MemoryKind,
    ) -> Result<Region, Error> {
        self.core_here()?.check_open()?;
        // SAFETY: the caller promises what `Span::new` asks for until the registration ends, and the
        // registry makes sure that no span of it is used afterwards.
        let span = unsafe { Span::new(address, len) };
        self.add_region(span, kind, None)
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
        let core = self.core_with(peer)?;
        core.check_open()?;
        let (span, memory) = core.slice(source, len)?;
        let send = TaggedSend::new(core.context(), tag, span, &memory);
        peer.shared.tagged.add_send(&send)?;
        if let Err(error) = peer.shared.start(core, Waiting::Send(Arc::clone(&send))) {
            peer.shared.tagged.sent(send.id(), Some(error.clone()));
            return Err(error);
        }
        Ok(Transfer::sending(peer.clone(), send))
    }

    /// Receives the next message that the peer sends under a tag, up to `len` bytes;
    /// [`Transfer::received`] tells how many it had. A longer one fails on both sides.
    ///
    /// # Errors
    /// The range does not fit the region, or the peer will never send anything: it was removed, or it had connected to us
    /// and has left.
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
        let receive = TaggedReceive::new(tag, span, memory);
        post_receive(&peer.shared, &receive)?;
        core.parts.control.stay_awake();
        Ok(Transfer::receiving(peer.clone(), receive))
    }

    /// Sends a message on its own. It is queued when this returns; standalone messages to one peer arrive
    /// in order. Empty messages are legal. One whose peer cannot be reached, or is lost, before it arrives is lost too;
    /// [`Session::close`] waits for those on their way.
    ///
    /// # Errors
    /// The message is too long (half of `queue_bytes`), or the peer is not reachable by any means.
    /// [`Error::PeerBehind`], of kind [`Busy`](crate::ErrorKind::Busy), where the peer does not keep up:
    /// half of `queue_bytes` waits to be sent to it. Nothing was sent then; try again later.
    pub fn notify(&self, peer: &Peer, message: &[u8]) -> Result<(), Error> {
        let core = self.core_with(peer)?;
        core.check_open()?;
        check_message(core, message)?;
        peer.shared.notify(core, message)
    }

    /// Takes every notification that has arrived, oldest first. Never waits.
    #[must_use]
    pub fn notifications(&self) -> Vec<Notification> {
        self.core_here()
            .map_or_else(|_| Vec::new(), |core| core.inbox.take_all())
    }

    /// Waits for the next notification.
    ///
    /// # Errors
    /// None came within `timeout`, or the session is closed and there is none left.
    pub fn wait_notification(&self, timeout: Duration) -> Result<Notification, Error> {
        let core = self.core_here()?;
        core.inbox.take_one(deadline(timeout)).ok_or_else(|| {
            let what = "a notification";
            let late = Error::Timeout {
                what,
                after: timeout,
            };
            core.check_open().err().unwrap_or(late)
        })
    }

    /// Closes the session: ends its connections and threads. May be called more than once, and takes nothing on from
    /// the first call on.
    ///
    /// What the session was given before arrives: this waits until every peer has its notifications, and knows how its own
    /// transfers to us and its messages have ended. It waits at most 5 seconds, or as long as `peer_timeout` if that is less,
    /// for all peers together; on a plugin, a connection that notifications wait for has `connect_timeout` to come about
    /// first. What a peer that does not answer has not received by then is lost, and a warning says so. Transfers of this
    /// session, tagged messages included, are not waited for: those that are still in flight after that fail here and at the
    /// peers.
    pub fn close(&self) {
        if self.handle.is_current() {
            self.handle.close();
        }
    }

    /// Says whether calls may succeed. Never waits, and takes no lock: layers that hold locks of
    /// their own ask before they take one.
    ///
    /// # Errors
    /// The session is closed, or belongs to another process.
    pub fn check(&self) -> Result<(), Error> {
        self.core_here()?.check_open()
    }

    pub(crate) fn core(&self) -> &Arc<SessionCore> {
        &self.handle.core
    }

    /// The inside, unless the session belongs to another process: then its locks may be held for
    /// ever.
    fn core_here(&self) -> Result<&Arc<SessionCore>, Error> {
        self.handle.check()?;
        Ok(self.core())
    }

    /// As [`Session::core_here`], for what also uses a peer.
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
        // The application may have installed handlers of its own since.
        tcpx_net::check_handlers();
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

/// What the handles of a session share; closes it when the last one goes.
struct Handle {
    core: Arc<SessionCore>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Handle {
    fn close(&self) {
        // Held to the end: a second caller returns when the session is closed, too.
        let mut threads = self.threads.lock();
        if self.core.begin_close() {
            closing::flush(&self.core);
            self.core.end();
        }
        let this = std::thread::current().id();
        for thread in threads.drain(..) {
            // A thread of ours can hold the last handle only by way of a bug; it must not wait for itself.
            if thread.thread().id() != this && thread.join().is_err() {
                tracing::error!("a thread of the session panicked");
            }
        }
        self.core.take_apart();
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.close();
    }
}

// Used by `Link`, which is handed around between threads.
const _: fn() = || {
    fn shared<T: Send + Sync>() {}
    shared::<Session>();
    shared::<Arc<dyn Link>>();
};
