//! Links: ways to a peer. [`tcp`] reaches another process, [`local`] the session itself.
//!
//! Upper layers know a [`Link`] and not its transport. A link knows its peer as [`Above`], the
//! threads that drive it as [`Caller`] and [`Control`], and the state that all links of a session
//! share as [`Context`].

mod context;
pub(crate) mod desk;
pub(crate) mod local;
mod quota;
pub(crate) mod same_host;
pub(crate) mod tcp;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tcpx_net::Stream;
use tcpx_proto::frame::Status;
use tcpx_proto::frame::down::StreamId;
use tcpx_proto::handshake::{Established, OwnerProof, RejectCode};
use tcpx_proto::info::ConnectionInfo;

pub(crate) use self::context::Context;
use self::desk::Step;
pub(crate) use self::quota::{Held, Quota, Share, longest_notification};
use crate::carrier::comm::{Comms, RawLane};
use crate::error::Error;
use crate::stats::{LaneStats, PeerCounters, Route};
use crate::sync::{Mutex, Rank};
use crate::transfer::{Announcement, Arrival, Run};

/// One lane of a connected peer.
#[derive(Clone, Debug)]
pub struct LaneInfo {
    /// Index among the peer's lanes.
    pub index: usize,
    /// The local address.
    pub local: SocketAddr,
    /// The peer's address.
    pub remote: SocketAddr,
    /// Bytes sent on the lane, framing included.
    pub bytes_sent: u64,
    /// Bytes received on the lane, framing included.
    pub bytes_received: u64,
    /// Whether the lane has a stream.
    /// A lost lane gets a new stream, and its byte counts restart at 0.
    pub is_up: bool,
    /// How many times the lane's stream was lost and replaced.
    pub failovers: u32,
}

/// Whether and how memory of a peer on the same host is copied directly.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SameHostInfo {
    /// Why lanes carry everything; `None` if memory is copied directly.
    pub why_not: Option<String>,
    /// Bytes that this session has copied directly,
    /// in both directions, over the current connection.
    pub bytes: u64,
}

/// A way to a peer.
///
/// No method waits for the peer, except for [`Link::round_trip`]. A link that has ended accepts all
/// work and fails it.
pub(crate) trait Link: Send + Sync {
    /// Starts a run.
    fn submit(&self, run: &Arc<Run>);

    /// Sends a notification, of a transfer or (0) without one, however much is queued.
    fn notify(&self, transfer: u64, message: &[u8]);

    /// Sends a notification without a transfer.
    ///
    /// # Errors
    /// Too much is queued, because the peer does not keep up; nothing is sent.
    fn try_notify(&self, message: &[u8]) -> Result<(), Error> {
        self.notify(0, message);
        Ok(())
    }

    /// Checks whether the peer keeps up with the messages sent to it.
    ///
    /// # Errors
    /// As for [`Link::try_notify`].
    fn check_keeps_up(&self) -> Result<(), Error> {
        Ok(())
    }

    /// Announces a tagged message.
    fn announce(&self, message: &Announcement);

    /// Tells the sender of a tagged message how it ended.
    fn send_done(&self, transfer: u64, status: Status, text: &str);

    /// Makes progress without waiting, for a caller that polls `run`.
    fn drive_for(&self, run: &Run);

    /// Copies a chunk of `run` for a caller that waits for it,
    /// if threads of this process copy its bytes.
    fn copy_for(&self, _run: &Run) -> Step {
        Step::Over
    }

    /// Makes progress without waiting, for a caller that waits for a small frame.
    fn drive_control(&self) {}

    /// Returns whether a caller that polls `run` keeps the peer from running.
    fn needs_this_core(&self, _run: &Run) -> bool {
        false
    }

    /// Sends frames that wait for others to leave with.
    fn hurry(&self) {}

    /// Takes over from a caller that drove lanes and is going to sleep.
    fn hand_over(&self);

    /// Returns the number of lanes over which chunks are spread.
    fn lanes(&self) -> usize;

    /// Returns the number of streams, including lost ones that will be replaced.
    fn streams(&self) -> usize {
        self.lanes()
    }

    /// Returns a description of the lanes, for people.
    fn lane_infos(&self) -> Vec<LaneInfo> {
        Vec::new()
    }

    /// Returns the statistics of the lanes, with the kernel's data if requested, and the bytes of
    /// messages that the peer may not have received.
    fn lane_stats(&self, _with_kernel: bool) -> (Vec<LaneStats>, u64) {
        (Vec::new(), 0)
    }

    /// Returns how payload travels; `None` within the session.
    fn route(&self) -> Option<Route> {
        None
    }

    /// Returns whether memory is copied directly, with the reason if not.
    fn same_host_info(&self) -> Option<SameHostInfo> {
        None
    }

    /// Returns the number that the connecting side gave the connection.
    fn number(&self) -> Option<u64> {
        None
    }

    /// Takes lost lanes apart, and retries the chunks that were in flight on them. Returns the
    /// actions that would restore the lanes. Called only by the control thread.
    fn recover(&self) -> Vec<Wanted> {
        Vec::new()
    }

    /// Describes the new stream that a lane needs; `None` if it needs none.
    fn wanted_stream(&self, _lane: usize) -> Option<WantedStream> {
        None
    }

    /// Puts a new stream of a lane to use; returns false if the lane does not need it. Called only
    /// by the control thread.
    fn adopt(&self, _rejoined: Rejoined) -> bool {
        false
    }

    /// Measures a round trip on one lane.
    fn round_trip(&self, lane: usize, timeout: Duration) -> Result<Duration, Error>;

    /// Returns why the link has ended, if it has.
    fn error(&self) -> Option<Error>;

    /// Returns whether the link has ended.
    fn is_dead(&self) -> bool {
        self.error().is_some()
    }

    /// Returns whether the peer made the connection.
    fn was_accepted(&self) -> bool {
        false
    }

    /// Returns whether the peer has proven to be the session that this info describes.
    fn is_owned_by(&self, _info: &ConnectionInfo) -> bool {
        true
    }

    /// Returns when local memory is no longer used on behalf of `run`, which is being aborted.
    fn let_go(&self, run: &Arc<Run>);

    /// Returns when revoked memory is no longer used.
    fn revoke(&self);

    /// Puts a mark behind everything that is queued to be sent.
    fn mark(&self) -> Box<dyn Mark>;

    /// Checks whether the link makes progress while work is outstanding, and ends it after
    /// `timeout` without progress. Returns whether work is outstanding.
    fn check_liveness(&self, _now: Instant, _timeout: Duration) -> bool {
        false
    }

    /// Says goodbye and ends the link; work in flight fails with `error`.
    fn close(&self, reason: &str, error: Error);

    /// Ends the link; work in flight fails with `error`.
    fn kill(&self, error: Error);

    /// Ends a link that has no lane left, with the cause of the loss.
    fn give_up(&self) {}

    /// Ends a link that the peer does not know any more, unless the peer had said goodbye.
    fn forgotten(&self, _code: RejectCode) {}

    /// Fails everything in flight on a link that has ended. When this returns, nothing from the
    /// link lands in memory or reaches the session any more.
    fn drain(&self) {}

    /// Takes a link apart that has ended. Called with no lock held.
    fn reap(&self) {}

    /// Gives tests access to the concrete type.
    #[cfg(test)]
    fn as_any(self: Arc<Self>) -> Arc<dyn std::any::Any + Send + Sync>;
}

/// An action that helps a link that has lost lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// Make a new stream for this lane.
    Stream(usize),
    /// Check whether the peer still listens at this address.
    SignOfLife(SocketAddr),
}

/// Description of a stream that will replace a lost one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WantedStream {
    /// The connection's number.
    pub(crate) connection: u64,
    pub(crate) id: StreamId,
    /// The number of lanes of the connection.
    pub(crate) lanes: usize,
    /// The addresses of the lost stream.
    pub(crate) local: IpAddr,
    pub(crate) remote: SocketAddr,
    /// True if no lane is left, so that any path to the peer may be used.
    pub(crate) is_last: bool,
}

/// A stream that replaces a lost one.
pub(crate) struct Rejoined {
    pub(crate) stream: StreamId,
    pub(crate) raw: RawLane,
    pub(crate) comms: Option<Comms>,
    /// Proofs of ownership that a client presented with the stream.
    pub(crate) owners: Vec<OwnerProof>,
    /// The thread that drives the stream.
    pub(crate) worker: Arc<dyn Caller>,
}

/// Returns whether two handles refer to the same link.
pub(crate) fn is_same_link(a: &Arc<dyn Link>, b: &Arc<dyn Link>) -> bool {
    std::ptr::addr_eq(Arc::as_ptr(a), Arc::as_ptr(b))
}

/// A mark behind the frames that were queued on a link.
pub(crate) trait Mark: Send {
    /// Returns whether the peer has handled everything before the mark, or never will.
    fn is_reached(&mut self) -> bool;
}

/// The peer at the other end of a link, as the session knows it. Called while neither half of a
/// lane is locked (except for `name`), in the order of arrival on a lane.
pub(crate) trait Above: Send + Sync {
    /// Returns the peer's name.
    fn name(&self) -> &str;

    /// Returns the peer's share of the memory that the session keeps for peers.
    fn share(&self) -> &Arc<Share>;

    /// Returns the counters of traffic with the peer.
    fn counters(&self) -> &Arc<PeerCounters>;

    /// Delivers a notification.
    fn notified(&self, from: &Arc<Origin>, message: Vec<u8>, held: Option<Held>);

    /// Delivers the announcement of a tagged message.
    fn announced(&self, link: Arc<dyn Link>, arrival: Arrival, held: Option<Held>);

    /// Reports that a tagged message of this side has ended at the peer.
    fn sent(&self, transfer: u64, error: Option<Error>);

    /// Reports that a run of `bytes` took `elapsed`.
    fn measured(&self, bytes: u64, elapsed: Duration);

    /// Returns whether a caller waits for the peer to send or receive a tagged message.
    fn is_waiting(&self) -> bool;

    /// Reports that a link has ended and was taken apart.
    fn lost(&self, link: &Arc<dyn Link>, error: &Error);
}

/// Limits the streams of a connection whose proofs are kept: as many may be lost and replaced.
const MAX_OWNERS: usize = 4096;

/// The sender of a notification.
pub(crate) struct Origin {
    pub(crate) name: String,
    /// The identity that a connecting peer claimed and its proofs; `None` for a peer that this side
    /// connected to, which has already proven its identity.
    claim: Option<Mutex<Established>>,
    /// True once loaded connection info has confirmed the claim.
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

    /// Checks whether the sender is the session that the info describes.
    pub(crate) fn is_owned_by(&self, info: &ConnectionInfo) -> bool {
        let claim = self.claim.as_ref();
        let is_owned = claim.is_some_and(|claim| claim.lock().is_owned_by(info));
        if is_owned {
            self.is_proven.store(true, Ordering::Relaxed);
        }
        is_owned
    }

    /// Adds proofs that were presented with another stream of the connection. Returns false if the
    /// limit is exceeded.
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

    /// Returns whether the sender is the session of that name, according to this info, which is
    /// being loaded, or to an earlier one.
    pub(crate) fn is_genuine(&self, info: &ConnectionInfo) -> bool {
        self.is_proven.load(Ordering::Relaxed) || self.is_owned_by(info)
    }
}

/// The session's control thread, as links know it.
pub(crate) trait Control: Send + Sync {
    /// Makes sure that work that was just started is supervised.
    fn stay_awake(&self);

    /// Requests that a link that has ended is taken apart.
    fn reap(&self, link: Arc<dyn Link>);

    /// Requests recovery of a link that has lost a lane.
    fn lane_lost(&self, link: Arc<dyn Link>);

    /// Requests that queued messages to neighbours are sent once there is room.
    /// May be called with any lock held.
    fn neighbour_waits(&self);

    /// Requests that paused lanes are driven again. May be called with any lock held.
    fn resume(&self);
}

/// A worker thread, as lanes know it.
pub(crate) trait Caller: Send + Sync {
    /// Adds an object to this thread and returns its token;
    /// the thread drives it from the first call on.
    fn add(&self, driven: Arc<dyn Driven>) -> std::io::Result<u64>;

    /// Removes an object from this thread.
    fn remove(&self, token: u64, stream: &Stream);

    /// Requests that the object is driven now.
    fn call(&self, token: u64);

    /// Returns whether the thread is running,
    /// so that a call is handled soon and costs no system call.
    fn is_awake(&self) -> bool;
}

/// An object that threads drive: one lane.
pub(crate) trait Driven: Send + Sync {
    /// Makes progress without waiting.
    fn work(&self) -> Drive;

    /// Returns whether the lane has ended.
    fn is_dead(&self) -> bool;

    /// Returns the stream whose readiness the kernel reports.
    fn stream(&self) -> &Stream;

    /// Returns the number of drives by callers: while it increases, the worker stays away.
    fn attended(&self) -> u64;

    /// Records whether the worker drives the lane, or watches its current driver.
    fn take_care(&self, yes: bool);

    /// Prepares for a sleep: in the middle of a large payload,
    /// one wake-up for many packets is enough.
    fn prepare_sleep(&self);

    /// Returns whether frames are queued that no thread is sending.
    fn is_dirty(&self) -> bool;

    /// Returns whether the stream accepted no bytes at the last attempt.
    fn is_blocked(&self) -> bool;

    /// Returns whether a worker should sleep until many packets have arrived instead of polling.
    fn is_worth_a_sleep(&self) -> bool;

    /// Returns whether an operation is in flight whose end is not signalled.
    fn is_staging(&self) -> bool;

    /// Returns whether reading from the stream is paused until the lane is called.
    fn is_paused(&self) -> bool;

    /// Returns whether the peer cannot run before the polling thread leaves the core.
    fn needs_this_core(&self) -> bool;
}

/// Result of driving a lane.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Drive {
    /// True if bytes moved in either direction.
    pub(crate) progress: bool,
    /// True if there may be more to do at once.
    pub(crate) more: bool,
}

impl std::ops::BitOrAssign for Drive {
    fn bitor_assign(&mut self, other: Self) {
        self.progress |= other.progress;
        self.more |= other.more;
    }
}
