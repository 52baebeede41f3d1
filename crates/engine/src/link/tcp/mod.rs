//! A link to another process: a set of authenticated TCP streams, its lanes.
//!
//! Each lane has a sending half ([`send`]) and a receiving half ([`receive`]), each behind its own lock,
//! and books that both share: the protocol's state machine and what waits to be sent, which anybody may
//! add to. Whoever holds a half's lock makes one system call at a time with it; a worker thread, a
//! polling caller and a caller who posts are all equally good drivers. What a half finds out is an
//! [`event`], dealt with after its lock is released. Lanes share the counters of the runs that they take
//! chunks from, the slot pool and the registry, and no lock of their own.

mod event;
mod lane;
mod liveness;
mod payload;
mod ping;
mod receive;
mod send;
#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use tcpx_net::Stream;
use tcpx_proto::frame::{Header, Kind, Status};
use tcpx_proto::handshake::Established;
use tcpx_proto::info::ConnectionInfo;

pub(crate) use self::lane::{Lane, Windows};
use self::liveness::Liveness;
use self::ping::Pings;
use self::receive::Ended;
use super::{Above, Context, Drive, Driven, LaneInfo, Link, Origin, Share};
use crate::carrier::{Allowance, LetGo};
use crate::error::{Error, LostCause};
use crate::log::limited;
use crate::sync::{Mutex, Rank};
use crate::transfer::{Announcement, Run};

/// System calls in each direction that a worker makes on a lane before others have their turn.
const WORKER_BUDGET: usize = 32;
/// The same for a caller who polls: fewer, so that no poll takes long.
const CALLER_BUDGET: usize = 4;

/// An authenticated connection to a peer.
///
/// Made with all its lanes by the control thread, which then calls [`Connection::start`]. It ends once,
/// by [`Connection::end_with`] or a goodbye; the control thread takes it apart afterwards.
pub(crate) struct Connection {
    this: Weak<Self>,
    context: Arc<Context>,
    above: Arc<dyn Above>,
    established: Established,
    /// Who sends the notifications that arrive.
    origin: Arc<Origin>,
    /// What the peer may make the session keep.
    share: Arc<Share>,
    lanes: Box<[Lane]>,
    /// Chunks that the peer may have in flight on a lane.
    own_window: usize,
    /// Acknowledgements go out at the latest after this many chunks, to keep the peer's window moving.
    ack_every: usize,
    /// Why the connection ended.
    end: OnceLock<Error>,
    pings: Pings,
    pause: Pause,
    liveness: Mutex<Liveness>,
}

/// Keeps a caller who polls a large transfer from asking the kernel again and again whether it takes
/// more: each question takes the socket's lock, which the answer needs.
struct Pause {
    epoch: Instant,
    /// Nanoseconds after the epoch.
    until: AtomicU64,
}

impl Pause {
    const LENGTH: Duration = Duration::from_micros(10);

    fn new() -> Self {
        Self {
            epoch: Instant::now(),
            until: AtomicU64::new(0),
        }
    }

    fn is_over(&self) -> bool {
        self.epoch.elapsed().as_nanos() as u64 >= self.until.load(Ordering::Relaxed)
    }

    fn begin(&self) {
        let until = self.epoch.elapsed() + Self::LENGTH;
        self.until.store(until.as_nanos() as u64, Ordering::Relaxed);
    }
}

impl Windows {
    /// Returns the windows of a connection, as both sides have announced them.
    pub(crate) fn new(context: &Context, established: &Established, lanes: usize) -> Self {
        let peers = context.config.window();
        let allowed = usize::try_from(established.peer_window.get()).unwrap_or(usize::MAX);
        Self {
            ours: peers.min(allowed),
            peers,
            lanes,
        }
    }
}

impl Connection {
    pub(crate) fn new(
        context: Arc<Context>,
        above: Arc<dyn Above>,
        established: Established,
        lanes: Vec<Lane>,
    ) -> Arc<Self> {
        let own_window = context.config.window();
        let claim = (!established.owners.is_empty()).then(|| established.clone());
        let origin = Origin::new(above.name(), claim);
        let connection = Arc::new_cyclic(|this| Self {
            this: this.clone(),
            own_window,
            ack_every: (own_window / 4).max(1),
            context,
            origin,
            share: Arc::clone(above.share()),
            above,
            established,
            lanes: lanes.into(),
            end: OnceLock::new(),
            pings: Pings::new(),
            pause: Pause::new(),
            liveness: Mutex::new(Rank::Leaf, Liveness::new()),
        });
        // From the first byte on, whoever revokes memory finds it.
        connection.context.add_link(connection.link());
        connection
    }

    /// Lets the workers drive the lanes. Before this nothing is received; what was submitted already
    /// goes on.
    pub(crate) fn start(&self) {
        if let Err(error) = self.start_lanes() {
            self.end_with(Error::io("cannot drive a lane", error));
        }
    }

    fn start_lanes(&self) -> std::io::Result<()> {
        for (index, lane) in self.lanes.iter().enumerate() {
            let connection = self.this();
            let token = lane
                .worker
                .add(Arc::new(DrivenLane { connection, index }))?;
            lane.token.set(token).expect("a connection is started once");
            lane.call_worker();
        }
        Ok(())
    }

    fn this(&self) -> Arc<Self> {
        self.this.upgrade().expect("whoever calls holds it")
    }

    fn link(&self) -> Arc<dyn Link> {
        self.this()
    }

    fn has_ended(&self) -> bool {
        self.end.get().is_some()
    }

    /// Queues a small frame on the first lane, which keeps such frames in order, and sends it if that is
    /// possible at once.
    fn control(&self, encode: impl FnOnce(&mut Vec<u8>)) {
        self.lanes[0].push_control(encode);
        self.send_control();
    }

    /// As [`Connection::control`], for a frame that the peer causes and that cannot be refused. A peer
    /// that never reads such frames loses its connection.
    fn control_owed(&self, encode: impl FnOnce(&mut Vec<u8>)) {
        let bytes = self.lanes[0].push_owed(encode);
        if bytes > self.context.quota.of_a_peer() {
            let peer = self.above.name().to_owned();
            let cause = LostCause::NotReading { bytes };
            self.end_with(Error::PeerLost { peer, cause });
        }
        self.send_control();
    }

    fn send_control(&self) {
        let lane = &self.lanes[0];
        self.context.control.stay_awake();
        self.check(lane.pump(self, 1));
        // What was waiting before it may have begun to move.
        if lane.is_unfinished() {
            lane.call_worker();
        }
    }

    fn send_notify(&self, transfer: u64, message: &[u8]) {
        let header = Header {
            payload: message.len() as u64,
            ..Header::new(Kind::Notify, transfer)
        };
        let encode = |out: &mut Vec<u8>| {
            header.encode(out);
            out.extend_from_slice(message);
        };
        if transfer == 0 {
            // Its application was told when too many of them waited.
            self.control(encode);
        } else {
            self.control_owed(encode);
        }
    }

    fn behind(&self, queued: usize) -> Error {
        Error::PeerBehind {
            peer: self.above.name().to_owned(),
            queued,
        }
    }

    fn refused(&self, status: Status, text: &[u8]) -> Error {
        Error::PeerRefused {
            peer: self.above.name().to_owned(),
            status,
            text: String::from_utf8_lossy(text).into_owned(),
        }
    }

    fn attend(&self, index: usize) -> Drive {
        let lane = &self.lanes[index];
        lane.attend();
        let drive = self.drive(index, CALLER_BUDGET);
        // The caller may leave now, and what it has taken from the socket the worker never hears of.
        if lane.is_unfinished() && !lane.is_in_care() {
            lane.call_worker();
        }
        drive
    }

    /// Moves what can be moved on one lane without waiting.
    fn drive(&self, index: usize, budget: usize) -> Drive {
        let lane = &self.lanes[index];
        let mut drive = match lane.fill(self, budget) {
            Ok(drive) => drive,
            Err(ended) => {
                self.ended(ended);
                return Drive::default();
            }
        };
        if lane.is_unfinished() {
            drive.progress |= self.check(lane.pump(self, budget));
            drive.more |= lane.is_dirty();
        }
        drive
    }

    fn least_loaded(&self) -> (usize, &Lane) {
        self.lanes
            .iter()
            .enumerate()
            .min_by_key(|(_, lane)| lane.load.load(Ordering::Relaxed))
            .expect("a connection has at least one lane")
    }

    fn let_go_of(&self, which: LetGo<'_>) {
        for lane in &self.lanes {
            let outcome = lane.let_go(which);
            let refused = match which {
                LetGo::Revoked(allowance) => allowance.refused(),
                LetGo::Aborted(_) => None,
            };
            let cause = match (refused, outcome) {
                (Some(bytes), _) => LostCause::Revoked { bytes },
                (None, Err(error)) => error.into(),
                (None, Ok(())) => continue,
            };
            let peer = self.above.name().to_owned();
            self.end_with(Error::PeerLost { peer, cause });
        }
    }

    /// Ends the connection; everything that was in flight fails with `error`.
    fn end_with(&self, error: Error) {
        if self.end.set(error).is_ok() {
            self.shut();
        }
    }

    fn shut(&self) {
        for lane in &self.lanes {
            lane.stream.shutdown();
        }
        self.context.control.reap(self.link());
    }

    fn check(&self, result: Result<bool, Ended>) -> bool {
        result.unwrap_or_else(|ended| {
            self.ended(ended);
            false
        })
    }

    fn ended(&self, ended: Ended) {
        let peer = self.above.name().to_owned();
        let error = match ended {
            Ended::Lost(cause @ LostCause::NotificationTooLong { .. }) => {
                // The peer has done nothing wrong: it is told.
                let reason = cause.to_string();
                return self.close(&reason, Error::PeerLost { peer, cause });
            }
            Ended::Lost(cause) => Error::PeerLost { peer, cause },
            Ended::Misbehaved(what) => {
                limited!(
                    WARN,
                    peer,
                    %what,
                    "a peer broke the protocol, its connection is closed"
                );
                Error::PeerMisbehaved { peer, what }
            }
        };
        self.end_with(error);
    }
}

impl Link for Connection {
    #[cfg(test)]
    fn as_any(self: Arc<Self>) -> Arc<dyn std::any::Any + Send + Sync> {
        self
    }

    /// The first chunk leaves from this thread as far as the kernel takes it at once, so that it is on
    /// its way before a worker is awake; the rest is the workers' to do.
    fn submit(&self, run: &Arc<Run>) {
        let (first, lane) = if run.in_order {
            (0, &self.lanes[0])
        } else {
            self.least_loaded()
        };
        run.lane.store(first, Ordering::Relaxed);
        lane.push_run(run);
        self.check(lane.pump(self, 1));
        if lane.is_unfinished() {
            lane.call_worker();
        }
        let others = self
            .lanes
            .iter()
            .enumerate()
            .filter(|(index, _)| *index != first);
        for (_, lane) in others.take(run.plan.len() - 1) {
            lane.push_run(run);
            lane.call_worker();
        }
        self.context.control.stay_awake();
        if let Some(error) = self.end.get() {
            // Chunks in flight are failed by whoever takes the connection apart.
            run.fail_now(error.clone());
        }
    }

    fn notify(&self, transfer: u64, message: &[u8]) {
        self.send_notify(transfer, message);
    }

    fn try_notify(&self, message: &[u8]) -> Result<(), Error> {
        let header = Header {
            payload: message.len() as u64,
            ..Header::new(Kind::Notify, 0)
        };
        let limit = self.context.quota.of_a_peer();
        let pushed = self.lanes[0].try_push_control(limit, |out| {
            header.encode(out);
            out.extend_from_slice(message);
        });
        pushed.map_err(|queued| self.behind(queued))?;
        self.send_control();
        Ok(())
    }

    fn check_keeps_up(&self) -> Result<(), Error> {
        let queued = self.lanes[0].books.lock().lane.queued();
        if queued > self.context.quota.of_a_peer() {
            return Err(self.behind(queued));
        }
        Ok(())
    }

    fn announce(&self, message: &Announcement) {
        let mut frame = Vec::new();
        let copies = &self.context.copies;
        copies.guarded(|| message.encode(&mut frame));
        self.control(|out| out.append(&mut frame));
    }

    fn send_done(&self, transfer: u64, status: Status, text: &str) {
        let header = Header {
            flags: status as u8,
            ..Header::new(Kind::SendDone, transfer)
        };
        self.control_owed(|out| header.encode_with_text(out, text));
    }

    fn drive_for(&self, run: &Run) {
        if run.is_short() {
            self.attend(run.lane.load(Ordering::Relaxed));
        } else if self.context.config.workers() == 1 && self.pause.is_over() {
            // With more workers the lanes are better driven in parallel by them.
            let mut drive = Drive::default();
            for index in 0..self.lanes.len() {
                drive |= self.attend(index);
            }
            if !drive.progress {
                self.pause.begin();
            }
        }
    }

    fn drive_control(&self) {
        self.attend(0);
    }

    fn needs_this_core(&self, run: &Run) -> bool {
        run.is_short() && self.lanes[run.lane.load(Ordering::Relaxed)].needs_this_core()
    }

    fn hand_over(&self) {
        for lane in &self.lanes {
            lane.call_worker();
        }
    }

    fn lanes(&self) -> usize {
        self.lanes.len()
    }

    fn lane_infos(&self) -> Vec<LaneInfo> {
        let lanes = self.lanes.iter().enumerate();
        lanes.map(|(index, lane)| lane.info(index)).collect()
    }

    fn round_trip(&self, lane: usize, timeout: Duration) -> Result<Duration, Error> {
        self.ping(lane, timeout).ok_or_else(|| {
            self.error().unwrap_or(Error::Timeout {
                what: "the answer to a ping",
                after: timeout,
            })
        })
    }

    fn error(&self) -> Option<Error> {
        self.end.get().cloned()
    }

    fn is_dead(&self) -> bool {
        self.has_ended()
    }

    fn was_accepted(&self) -> bool {
        !self.established.owners.is_empty()
    }

    fn is_owned_by(&self, info: &ConnectionInfo) -> bool {
        self.origin.is_owned_by(info)
    }

    fn let_go(&self, run: &Arc<Run>) {
        self.let_go_of(LetGo::Aborted(run));
    }

    fn revoke(&self) {
        self.let_go_of(LetGo::Revoked(&Allowance::new()));
    }

    fn mark(&self) -> Box<dyn super::Mark> {
        Box::new(self.put_mark())
    }

    fn check_liveness(&self, now: Instant, timeout: Duration) -> bool {
        self.look_after(now, timeout)
    }

    fn close(&self, reason: &str, error: Error) {
        // Said first: the peer answers a goodbye by closing, which is not why the connection ended.
        if self.end.set(error).is_err() {
            return;
        }
        let header = Header::new(Kind::Goodbye, 0);
        self.lanes[0].push_control(|out| header.encode_with_text(out, reason));
        self.check(self.lanes[0].pump(self, 4));
        self.shut();
    }

    fn kill(&self, error: Error) {
        self.end_with(error);
    }

    fn drain(&self) {
        let Some(error) = self.end.get() else { return };
        for lane in &self.lanes {
            lane.sender.lock().close();
            let receiving = lane.receiver.lock().close();
            // What was received before is being delivered.
            drop(lane.delivery.lock());
            let remains = lane.books.lock().lane.close();
            for run in remains.offers {
                run.0.fail_now(error.clone());
            }
            for chunk in remains.chunks.into_iter().chain(receiving) {
                chunk.run.fail_now(error.clone());
                if chunk.run.settle(1) {
                    chunk.run.conclude_failed();
                }
            }
        }
    }

    fn reap(&self) {
        for lane in &self.lanes {
            if let Some(token) = lane.token.get() {
                lane.worker.remove(*token, &lane.stream);
            }
        }
        self.drain();
        // From here on nothing of it touches memory.
        let link = self.link();
        self.context.remove_link(&link);
        self.pings.end();
        let error = self.end.get().cloned().unwrap_or(Error::Closed);
        limited!(DEBUG, peer = self.above.name(), %error, "connection ended");
        self.above.lost(&link, &error);
    }
}

/// One lane, as the thread that drives it knows it.
struct DrivenLane {
    connection: Arc<Connection>,
    index: usize,
}

impl DrivenLane {
    fn lane(&self) -> &Lane {
        &self.connection.lanes[self.index]
    }
}

impl Driven for DrivenLane {
    fn work(&self) -> Drive {
        self.connection.drive(self.index, WORKER_BUDGET)
    }

    fn is_dead(&self) -> bool {
        self.connection.has_ended()
    }

    fn stream(&self) -> &Stream {
        &self.lane().stream
    }

    fn attended(&self) -> u64 {
        self.lane().attended()
    }

    fn take_care(&self, yes: bool) {
        self.lane().take_care(yes);
    }

    fn prepare_sleep(&self) {
        self.lane().prepare_sleep();
    }

    fn is_dirty(&self) -> bool {
        self.lane().is_dirty()
    }

    fn is_blocked(&self) -> bool {
        self.lane().is_blocked()
    }

    fn is_staging(&self) -> bool {
        self.lane().is_staging()
    }

    fn is_paused(&self) -> bool {
        self.lane().is_paused()
    }

    fn needs_this_core(&self) -> bool {
        self.lane().needs_this_core()
    }
}
