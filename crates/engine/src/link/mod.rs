//! Links: ways to a peer. [`tcp`] leads to another process, [`local`] to the session itself.
//!
//! Everything above knows a [`Link`] and nothing of what carries it. A link knows its peer as
//! [`Above`], the threads that drive it as [`Caller`] and [`Control`], and what all links of a session
//! share as [`Context`].

pub(crate) mod desk;
pub(crate) mod local;
mod quota;
pub(crate) mod same_host;
pub(crate) mod tcp;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tcpx_net::Stream;
use tcpx_proto::frame::Status;
use tcpx_proto::frame::down::StreamId;
use tcpx_proto::handshake::{Established, OwnerProof};
use tcpx_proto::info::ConnectionInfo;

use self::desk::Desk;
pub(crate) use self::quota::{Held, Quota, Share, longest_notification};
use self::same_host::Grants;
use crate::carrier::comm::{Comms, RawLane};
use crate::config::Config;
use crate::error::Error;
use crate::memory::{Registry, Staging, Users};
use crate::sync::{Mutex, Rank, RwLock};
use crate::transfer::{Announcement, Arrival, Run};

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
    /// Whether it has a stream. A lost lane gets a new stream, and its byte counts restart at 0.
    pub is_up: bool,
    /// How many times its stream was lost and another one has taken its place.
    pub failovers: u32,
}

/// How memory of a peer on the same host is moved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SameHostInfo {
    /// Why lanes carry everything; none where memory is copied directly.
    pub why_not: Option<String>,
    /// Bytes that this session has copied directly, both ways, over the current connection.
    pub bytes: u64,
}

/// A way to a peer.
///
/// No method waits for the peer, but for [`Link::round_trip`]. A link that has ended takes everything
/// and fails it.
pub(crate) trait Link: Send + Sync {
    /// Starts a run.
    fn submit(&self, run: &Arc<Run>);

    /// Sends a notification, of a transfer or (0) on its own, whatever waits to leave.
    fn notify(&self, transfer: u64, message: &[u8]);

    /// Sends a notification on its own.
    ///
    /// # Errors
    /// So much waits to leave that the peer does not keep up; nothing is sent.
    fn try_notify(&self, message: &[u8]) -> Result<(), Error> {
        self.notify(0, message);
        Ok(())
    }

    /// Looks whether the peer keeps up with what is sent to it.
    ///
    /// # Errors
    /// As [`Link::try_notify`].
    fn check_keeps_up(&self) -> Result<(), Error> {
        Ok(())
    }

    /// Announces a tagged message.
    fn announce(&self, message: &Announcement);

    /// Tells the sender of a tagged message how it ended.
    fn send_done(&self, transfer: u64, status: Status, text: &str);

    /// Moves what can be moved for a caller who polls `run`.
    fn drive_for(&self, run: &Run);

    /// Moves what can be moved for a caller who waits for a small frame.
    fn drive_control(&self) {}

    /// Whether a caller who polls `run` keeps the peer from moving.
    fn needs_this_core(&self, _run: &Run) -> bool {
        false
    }

    /// Takes over from a caller who drove and is going to sleep.
    fn hand_over(&self);

    /// How many lanes chunks are spread over.
    fn lanes(&self) -> usize;

    /// How many streams it has, or gets back when they are lost.
    fn streams(&self) -> usize {
        self.lanes()
    }

    /// What people are shown of the lanes.
    fn lane_infos(&self) -> Vec<LaneInfo> {
        Vec::new()
    }

    /// Whether memory is copied directly, and why not.
    fn same_host_info(&self) -> Option<SameHostInfo> {
        None
    }

    /// The number that the side which made the connection gave it.
    fn number(&self) -> Option<u64> {
        None
    }

    /// Lets go of lanes that were lost, and sees to what was in flight on them. Returns what would bring
    /// them back. Only from the control thread.
    fn recover(&self) -> Vec<Wanted> {
        Vec::new()
    }

    /// Says how a new stream for a lane is made; none where nobody waits for one.
    fn wanted_stream(&self, _lane: usize) -> Option<WantedStream> {
        None
    }

    /// Puts a new stream of a lane to use; false where nobody waits for it. Only from the control
    /// thread.
    fn adopt(&self, _rejoined: Rejoined) -> bool {
        false
    }

    /// Measures a round trip on one lane.
    fn round_trip(&self, lane: usize, timeout: Duration) -> Result<Duration, Error>;

    /// Why the link has ended, if it has.
    fn error(&self) -> Option<Error>;

    /// Whether the link has ended.
    fn is_dead(&self) -> bool {
        self.error().is_some()
    }

    /// Whether the peer made the connection.
    fn was_accepted(&self) -> bool {
        false
    }

    /// Whether the peer has proven to be the session that this info is of.
    fn is_owned_by(&self, _info: &ConnectionInfo) -> bool {
        true
    }

    /// Makes sure that local memory is no longer used on behalf of `run`, which is being aborted.
    fn let_go(&self, run: &Arc<Run>);

    /// Makes sure that memory that was revoked is no longer used.
    fn revoke(&self);

    /// Puts a mark behind everything that waits to leave.
    fn mark(&self) -> Box<dyn Mark>;

    /// Looks whether the link moves while work is outstanding, and ends it when it has not for
    /// `timeout`. Returns whether work is outstanding.
    fn check_liveness(&self, _now: Instant, _timeout: Duration) -> bool {
        false
    }

    /// Says goodbye and ends the link; what is in flight fails with `error`.
    fn close(&self, reason: &str, error: Error);

    /// Ends the link; what is in flight fails with `error`.
    fn kill(&self, error: Error);

    /// Ends a link that has no lane left, with why it lost them.
    fn give_up(&self) {}

    /// Ends a link of which the peer says that it does not know it, unless the peer had said goodbye.
    fn forgotten(&self, error: Error) {
        self.kill(error);
    }

    /// Fails everything that is in flight on a link that has ended. When this returns, nothing of it
    /// lands in memory or reaches the session any more.
    fn drain(&self) {}

    /// Takes a link apart that has ended. Called with no lock held.
    fn reap(&self) {}

    /// For tests that look inside.
    #[cfg(test)]
    fn as_any(self: Arc<Self>) -> Arc<dyn std::any::Any + Send + Sync>;
}

/// What a link needs that has lost lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// A new stream for this lane.
    Stream(usize),
    /// To know whether the peer still listens at this address.
    SignOfLife(SocketAddr),
}

/// A stream that takes the place of a lost one, before it is made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WantedStream {
    /// The connection's number.
    pub(crate) connection: u64,
    pub(crate) id: StreamId,
    /// How many lanes the connection has.
    pub(crate) lanes: usize,
    /// The addresses of the stream that was lost.
    pub(crate) local: IpAddr,
    pub(crate) remote: SocketAddr,
    /// No lane is left: any way to the peer will do.
    pub(crate) is_last: bool,
}

/// A stream that takes the place of a lost one.
pub(crate) struct Rejoined {
    pub(crate) stream: StreamId,
    pub(crate) raw: RawLane,
    pub(crate) comms: Option<Comms>,
    /// What a client has presented with it.
    pub(crate) owners: Vec<OwnerProof>,
    /// The thread that drives it.
    pub(crate) worker: Arc<dyn Caller>,
}

/// Whether two handles are to the same link.
pub(crate) fn is_same_link(a: &Arc<dyn Link>, b: &Arc<dyn Link>) -> bool {
    std::ptr::addr_eq(Arc::as_ptr(a), Arc::as_ptr(b))
}

/// A mark behind what waited to leave on a link.
pub(crate) trait Mark: Send {
    /// Whether the peer has dealt with everything before the mark, or never will.
    fn is_reached(&mut self) -> bool;
}

/// The peer at the other end of a link, as the session knows it. Called while neither half of a lane is
/// locked (but for the name), in the order in which things arrived on their lane.
pub(crate) trait Above: Send + Sync {
    /// What the peer is called.
    fn name(&self) -> &str;

    /// What the peer may make the session keep.
    fn share(&self) -> &Arc<Share>;

    /// A notification has arrived.
    fn notified(&self, from: &Arc<Origin>, message: Vec<u8>, held: Option<Held>);

    /// A tagged message was announced.
    fn announced(&self, link: Arc<dyn Link>, arrival: Arrival, held: Option<Held>);

    /// A tagged message of ours has ended at the peer.
    fn sent(&self, transfer: u64, error: Option<Error>);

    /// A run of `bytes` took `elapsed`.
    fn measured(&self, bytes: u64, elapsed: Duration);

    /// Whether somebody waits for the peer to send or to receive a tagged message.
    fn is_waiting(&self) -> bool;

    /// A link has ended and was taken apart.
    fn lost(&self, link: &Arc<dyn Link>, error: &Error);
}

/// The most streams of a connection whose proofs are kept: as many may be lost and come back.
const MAX_OWNERS: usize = 4096;

/// Who sent a notification.
pub(crate) struct Origin {
    pub(crate) name: String,
    /// What a peer that connected to us has said and shown of itself; none of one that we have
    /// connected to, which has proven who it is.
    claim: Option<Mutex<Established>>,
    /// The claim was found to be true by an info that was loaded.
    is_proven: AtomicBool,
}

impl Origin {
    pub(crate) fn new(name: &str, claim: Option<Established>) -> Arc<Self> {
        Arc::new(Self {
            name: name.to_owned(),
            is_proven: AtomicBool::new(claim.is_none()),
            claim: claim.map(|claim| Mutex::new(Rank::Leaf, claim)),
        })
    }

    /// Checks whether this is the session that the info is of.
    pub(crate) fn is_owned_by(&self, info: &ConnectionInfo) -> bool {
        let claim = self.claim.as_ref();
        let is_owned = claim.is_some_and(|claim| claim.lock().is_owned_by(info));
        if is_owned {
            self.is_proven.store(true, Ordering::Relaxed);
        }
        is_owned
    }

    /// Adds what was presented with another stream of the connection. False where so many came that
    /// no more are kept.
    pub(crate) fn join(&self, owners: Vec<OwnerProof>) -> bool {
        let Some(claim) = &self.claim else {
            return true;
        };
        let mut claim = claim.lock();
        if claim.owners.len() + owners.len() > MAX_OWNERS {
            return false;
        }
        claim.owners.extend(owners);
        true
    }

    /// Whether this is the session of that name: by this info, which is being loaded, or by an earlier
    /// one.
    pub(crate) fn is_genuine(&self, info: &ConnectionInfo) -> bool {
        self.is_proven.load(Ordering::Relaxed) || self.is_owned_by(info)
    }
}

/// The session's control thread, as links know it.
pub(crate) trait Control: Send + Sync {
    /// Makes sure that somebody watches over work that was just started.
    fn stay_awake(&self);

    /// Asks for a link that has ended to be taken apart.
    fn reap(&self, link: Arc<dyn Link>);

    /// Asks for a link that has lost a lane to be looked after.
    fn lane_lost(&self, link: Arc<dyn Link>);

    /// Asks for messages to neighbours to be sent that wait for room. May be called with any lock
    /// held.
    fn neighbour_waits(&self);

    /// Asks for lanes to be driven that were paused for want of room. May be called with any lock
    /// held.
    fn resume(&self);
}

/// A thread that drives lanes, as they know it.
pub(crate) trait Caller: Send + Sync {
    /// Takes something into this thread's care and returns its number; it is driven from the first
    /// call on.
    fn add(&self, driven: Arc<dyn Driven>) -> std::io::Result<u64>;

    /// Lets go of it.
    fn remove(&self, token: u64, stream: &Stream);

    /// Asks for it to be driven now.
    fn call(&self, token: u64);

    /// Whether the thread is at work, so that a call is answered soon and costs no system call.
    fn is_awake(&self) -> bool;
}

/// Something that threads drive: one lane.
pub(crate) trait Driven: Send + Sync {
    /// Moves what can be moved without waiting.
    fn work(&self) -> Drive;

    /// Whether it has ended.
    fn is_dead(&self) -> bool;

    /// What the kernel reports as ready.
    fn stream(&self) -> &Stream;

    /// Counts drives by callers: while it moves, the worker stands back.
    fn attended(&self) -> u64;

    /// Notes whether the worker drives it, or watches its current driver.
    fn take_care(&self, yes: bool);

    /// Prepares for a sleep: in the middle of a large payload one wake-up for many packets is enough.
    fn prepare_sleep(&self);

    /// Whether there is something to send that nobody is sending.
    fn is_dirty(&self) -> bool;

    /// Whether the stream took no more bytes at the last attempt.
    fn is_blocked(&self) -> bool;

    /// Whether a worker should sleep until many packets are here instead of looking for each.
    fn is_worth_a_sleep(&self) -> bool;

    /// Whether something is under way of which nobody will be told.
    fn is_staging(&self) -> bool;

    /// Whether nothing is read from the stream until somebody calls.
    fn is_paused(&self) -> bool;

    /// Whether the peer cannot move before whoever looks at this lane leaves the core.
    fn needs_this_core(&self) -> bool;
}

/// What driving a lane achieved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Drive {
    /// Bytes moved in either direction.
    pub(crate) progress: bool,
    /// There may be more to do at once.
    pub(crate) more: bool,
}

impl std::ops::BitOrAssign for Drive {
    fn bitor_assign(&mut self, other: Self) {
        self.progress |= other.progress;
        self.more |= other.more;
    }
}

/// What all links of a session share.
pub(crate) struct Context {
    pub(crate) config: Config,
    pub(crate) registry: Arc<Registry>,
    pub(crate) staging: Staging,
    pub(crate) copies: Copies,
    /// Runs that are copied rather than sent.
    pub(crate) desk: Desk,
    /// What peers may make the session keep.
    pub(crate) quota: Arc<Quota>,
    pub(crate) control: Arc<dyn Control>,
    /// Every link to another process that may touch memory: also those that have ended, or whose peer was
    /// removed, and that are not taken apart yet.
    links: Mutex<Vec<Arc<dyn Link>>>,
    /// What neighbours may touch, as long as one of them might.
    grants: Mutex<Vec<Arc<Grants>>>,
    next_id: AtomicU64,
}

impl Context {
    pub(crate) fn new(
        config: Config,
        registry: Arc<Registry>,
        staging: Staging,
        control: Arc<dyn Control>,
        desk: Desk,
    ) -> Arc<Self> {
        let context = Arc::new(Self {
            quota: Quota::new(config.queue_bytes(), Arc::clone(&control)),
            config,
            registry,
            staging,
            copies: Copies {
                copying: RwLock::new(Rank::Copies, ()),
            },
            desk,
            control,
            links: Mutex::new(Rank::Links, Vec::new()),
            grants: Mutex::new(Rank::Links, Vec::new()),
            next_id: AtomicU64::new(1),
        });
        let users: Arc<dyn Users> = Arc::clone(&context) as Arc<dyn Users>;
        context.registry.set_users(Arc::downgrade(&users));
        context
    }

    /// Makes a number that no other transfer of this session has.
    pub(crate) fn next_id(&self) -> u64 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    /// The links that may touch memory.
    pub(crate) fn links(&self) -> Vec<Arc<dyn Link>> {
        self.links.lock().clone()
    }

    fn add_link(&self, link: Arc<dyn Link>) {
        self.links.lock().push(link);
    }

    fn remove_link(&self, link: &Arc<dyn Link>) {
        self.links.lock().retain(|known| !is_same_link(known, link));
    }

    /// Makes sure that local memory is no longer used on behalf of `run`, which is being aborted.
    pub(crate) fn let_go(&self, run: &Arc<Run>) {
        for link in self.links() {
            link.let_go(run);
        }
        self.copies.quiesce();
    }
}

impl Context {
    /// Notes what a neighbour may touch: whoever revokes memory finds it from here on.
    pub(crate) fn add_grants(&self, grants: &Arc<Grants>) {
        self.forget_grants();
        self.grants.lock().push(Arc::clone(grants));
    }

    /// Forgets what neighbours might touch that touch nothing any more.
    pub(crate) fn forget_grants(&self) {
        self.grants.lock().retain(|known| !known.is_over());
    }

    /// Waits until no neighbour touches memory of this session, after all connections have ended.
    pub(crate) fn wait_for_neighbours(&self) {
        for grants in std::mem::take(&mut *self.grants.lock()) {
            grants.wait();
        }
    }

    fn grants(&self) -> Vec<Arc<Grants>> {
        self.grants.lock().clone()
    }
}

impl Users for Context {
    fn revoke(&self) {
        self.copies.quiesce();
        for grants in self.grants() {
            grants.revoke();
        }
        self.forget_grants();
        for link in self.links() {
            link.revoke();
        }
    }
}

/// Copies of, or into, a session's memory that no lane's locks protect.
pub(crate) struct Copies {
    /// Held shared while memory is copied: taking it exclusively waits for all copies to end.
    copying: RwLock<()>,
}

impl Copies {
    /// Makes a copy. `copy` looks whether the memory is live: revoking it waits for the copy.
    pub(crate) fn guarded<T>(&self, copy: impl FnOnce() -> T) -> T {
        let _copying = self.copying.read();
        copy()
    }

    /// Waits until no copy is under way; those that begin later see what was revoked or aborted.
    pub(crate) fn quiesce(&self) {
        drop(self.copying.write());
    }

    /// Keeps copies from being made, as a revocation does, until what is returned goes.
    #[cfg(test)]
    pub(crate) fn hold(&self) -> crate::sync::RwLockWriteGuard<'_, ()> {
        self.copying.write()
    }
}
