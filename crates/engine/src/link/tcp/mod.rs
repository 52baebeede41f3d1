//! A link to another process: a set of authenticated TCP streams, its lanes.
//!
//! Each lane has a sending half ([`send`]) and a receiving half ([`receive`]), each behind its own
//! lock, and books that both share: the protocol's state machine and the queued frames, to which
//! any thread may add. The holder of a half's lock makes one system call at a time with it; a
//! worker thread, a polling caller and a posting caller may all drive a lane. The results of a step
//! are [`event`]s, which are handled after the lock is released. Lanes share the counters of the
//! runs that they take chunks from, the slot pool and the registry, but none of their own locks.

mod count;
mod drive;
mod ended;
mod event;
mod failover;
mod lane;
mod liveness;
mod messages;
mod payload;
mod ping;
mod receive;
mod send;
#[cfg(test)]
mod tests;
mod traced;

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use tcpx_proto::connection::Losses;
use tcpx_proto::frame::{Header, Kind, Status};
use tcpx_proto::handshake::{Established, Features, RejectCode};
use tcpx_proto::info::ConnectionInfo;

use self::drive::{DrivenLane, Pause};
use self::failover::{Lost, carrier_of};
pub(crate) use self::lane::Lane;
use self::liveness::Liveness;
use self::messages::Messages;
use self::ping::Pings;
use super::desk::Step;
use super::same_host::{Lanes, SameHost};
use super::{
    Above, Context, Drive, LaneInfo, Link, Origin, Rejoined, SameHostInfo, Share, Wanted,
    WantedStream,
};
use crate::carrier::{Allowance, LetGo};
use crate::config::SameHostKind;
use crate::error::{Error, LostCause, Misbehaviour};
use crate::log::limited;
use crate::stats::{LaneStats, Route};
use crate::sync::{Mutex, Rank};
use crate::trace::End;
use crate::transfer::{Announcement, ChunkRef, Run};

/// An authenticated connection to a peer.
///
/// The control thread makes the connection with all its lanes, and then calls
/// [`Connection::start`]. It ends once, by [`Connection::end_with`] or a goodbye; the control
/// thread takes it apart afterwards.
pub(crate) struct Connection {
    this: Weak<Self>,
    context: Arc<Context>,
    above: Arc<dyn Above>,
    established: Established,
    /// Sender of the notifications that arrive.
    origin: Arc<Origin>,
    /// The peer's share of the memory that the session keeps for peers.
    share: Arc<Share>,
    /// The lanes, each with its newest stream.
    lanes: ArcSwap<Vec<Arc<Lane>>>,
    /// Number of bulk lanes, which come first.
    /// One express lane for messages and small transfers may follow.
    bulk_lanes: usize,
    windows: Windows,
    messages: Messages,
    /// Lost streams, and the WRITE chunks that were in flight on them.
    losses: Mutex<Losses<ChunkRef>>,
    lost: Mutex<Lost>,
    /// For each lane, the next generation of a stream that this side makes.
    next_generation: Box<[AtomicU32]>,
    /// Bytes moved on lost streams.
    retired: AtomicU64,
    /// Chunks that the peer may have in flight per lane.
    own_window: usize,
    /// Chunks after which acknowledgements are sent at the latest, to keep the peer's window open.
    ack_every: usize,
    /// Why the connection ended.
    end: OnceLock<Error>,
    pings: Pings,
    pause: Pause,
    liveness: Mutex<Liveness>,
    /// Direct copies, if the peer is on this host.
    same_host: Arc<SameHost>,
}

/// The windows of a connection, from which its lanes are made.
#[derive(Clone, Copy)]
pub(crate) struct Windows {
    /// Chunks that this side may have in flight per lane: the smaller of both settings.
    pub(crate) ours: usize,
    /// Chunks that the peer may have in flight per lane.
    pub(crate) peers: usize,
    /// The number of lanes of the connection.
    pub(crate) lanes: usize,
}

impl Windows {
    /// Returns the windows of a connection with this number of bulk lanes, as both sides have
    /// announced them.
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
        windows: Windows,
        lanes: Vec<Lane>,
    ) -> Arc<Self> {
        let lanes: Vec<_> = lanes.into_iter().map(Arc::new).collect();
        let own_window = context.config.window();
        let claim = (!established.owners.is_empty()).then(|| established.clone());
        let origin = Origin::new(above.name(), claim);
        let refusal = no_same_host(&context, &established, &lanes);
        for lane in &lanes {
            lane.counters.belongs_to(above.counters());
            let name = match lane.index() < windows.lanes {
                true => format!("lane {}", lane.index()),
                false => "express lane".into(),
            };
            lane.trace.name(context.config.name(), above.name(), &name);
        }
        let connection = Arc::new_cyclic(|this: &Weak<Self>| Self {
            this: this.clone(),
            same_host: SameHost::new(&context, &above, this.clone(), refusal),
            own_window,
            ack_every: (own_window / 4).max(1),
            context,
            origin,
            share: Arc::clone(above.share()),
            above,
            windows,
            bulk_lanes: windows.lanes,
            messages: Messages::new(carrier_of(&lanes, windows.lanes).expect("it has a lane")),
            losses: Mutex::new(Rank::Leaf, Losses::new(lanes.len())),
            lost: Mutex::new(Rank::Leaf, Lost::default()),
            next_generation: lanes.iter().map(|_| AtomicU32::new(1)).collect(),
            retired: AtomicU64::new(0),
            established,
            lanes: ArcSwap::from_pointee(lanes),
            end: OnceLock::new(),
            pings: Pings::new(),
            pause: Pause::new(),
            liveness: Mutex::new(Rank::Liveness, Liveness::new()),
        });
        // Revocations consider the link from its first byte on.
        connection.context.add_link(connection.link());
        connection
    }

    /// Returns the direct path to a peer on this host.
    pub(crate) fn same_host(&self) -> &Arc<SameHost> {
        &self.same_host
    }

    /// Lets the workers drive the lanes. Nothing is received before this; work that was already
    /// submitted is being sent.
    pub(crate) fn start(&self) {
        if let Err(error) = self.start_lanes() {
            self.end_with(Error::io("cannot drive a lane", error));
        }
    }

    fn start_lanes(&self) -> std::io::Result<()> {
        for lane in self.lanes.load().iter() {
            self.start_lane(lane)?;
            lane.call_worker();
        }
        Ok(())
    }

    fn start_lane(&self, lane: &Arc<Lane>) -> std::io::Result<()> {
        let driven = DrivenLane {
            connection: self.this(),
            lane: Arc::clone(lane),
        };
        let token = lane.worker.add(Arc::new(driven))?;
        lane.token.set(token).expect("a lane is started once");
        Ok(())
    }

    fn this(&self) -> Arc<Self> {
        self.this.upgrade().expect("the caller holds a reference")
    }

    fn link(&self) -> Arc<dyn Link> {
        self.this()
    }

    fn has_ended(&self) -> bool {
        self.end.get().is_some()
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

    fn let_go_of(&self, which: LetGo<'_>) {
        for lane in self.lanes.load().iter() {
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

    /// Ends the connection; everything in flight fails with `error`.
    fn end_with(&self, error: Error) {
        if self.end.set(error).is_ok() {
            self.shut();
        }
    }

    fn shut(&self) {
        self.same_host.close_gates();
        for lane in self.lanes.load().iter() {
            lane.stream.shutdown();
        }
        self.context.control.reap(self.link());
    }

    /// Ends the connection of a peer that broke the protocol.
    fn end_misbehaved(&self, what: Misbehaviour) {
        let peer = self.above.name().to_owned();
        limited!(
            WARN,
            peer,
            %what,
            remedy = "run the same release on both sides",
            "a peer broke the protocol, its connection is closed"
        );
        self.end_with(Error::PeerMisbehaved { peer, what });
    }
}

/// Returns why the peer's memory is not copied directly, if that is known from the start.
fn no_same_host(
    context: &Context,
    established: &Established,
    lanes: &[Arc<Lane>],
) -> Option<&'static str> {
    if context.config.same_host() == SameHostKind::Off {
        Some("same_host is off")
    } else if !lanes.first().is_some_and(|lane| lane.stream.is_local()) {
        Some("it is on another host")
    } else if !established.features.contains(Features::SAME_HOST) {
        Some("the peer does not offer it")
    } else {
        None
    }
}

impl Lanes for Connection {
    fn carry(&self, run: &Arc<Run>) {
        self.offer(run);
        self.context.control.stay_awake();
    }

    fn settle(&self, run: &Arc<Run>, chunks: u32) {
        if let Some(error) = self.end.get() {
            // The notification would not arrive.
            run.completion.record(error.clone());
        }
        if run.settle(chunks) {
            let notify = |message: &[u8]| self.send_notify(run.id, message);
            let measure = |elapsed| self.above.measured(run.plan.bytes, elapsed);
            run.conclude(notify, measure);
        }
    }
}

impl Link for Connection {
    #[cfg(test)]
    fn as_any(self: Arc<Self>) -> Arc<dyn std::any::Any + Send + Sync> {
        self
    }

    /// Sends the first chunk from this thread, as far as the kernel accepts it at once, so that it
    /// is in flight before a worker is awake; the workers send the rest.
    fn submit(&self, run: &Arc<Run>) {
        if !self.has_ended() && self.same_host.submit(run) {
            return;
        }
        self.offer(run);
        self.context.control.stay_awake();
    }

    fn notify(&self, transfer: u64, message: &[u8]) {
        self.send_notify(transfer, message);
    }

    fn try_notify(&self, message: &[u8]) -> Result<(), Error> {
        self.check_keeps_up()?;
        self.send_notify(0, message);
        Ok(())
    }

    fn check_keeps_up(&self) -> Result<(), Error> {
        let queued = self.messages.kept();
        if queued > self.context.quota.of_a_peer() {
            return Err(self.behind(queued));
        }
        Ok(())
    }

    fn announce(&self, message: &Announcement) {
        let mut frame = Vec::new();
        let copies = &self.context.copies;
        copies.guarded(|| message.encode(&mut frame));
        self.message(|out| out.append(&mut frame));
    }

    fn send_done(&self, transfer: u64, status: Status, text: &str) {
        let header = Header {
            flags: status as u8,
            ..Header::new(Kind::SendDone, transfer)
        };
        self.message_owed(|out| header.encode_with_text(out, text));
    }

    fn drive_for(&self, run: &Run) {
        if run.is_beside.load(Ordering::Relaxed) {
            self.copy_for(run);
            return;
        }
        let lanes = self.lanes.load();
        if run.is_short() {
            if let Some(lane) = lanes.get(run.lane.load(Ordering::Relaxed)) {
                self.attend(lane);
            }
        } else if self.context.config.workers() == 1 && self.pause.is_over() {
            // With more workers, the workers drive the lanes in parallel.
            let mut drive = Drive::default();
            for lane in lanes.iter().take(self.bulk_lanes) {
                drive |= self.attend(lane);
            }
            if !drive.progress {
                self.pause.begin();
            }
        }
    }

    fn copy_for(&self, run: &Run) -> Step {
        match run.is_beside.load(Ordering::Relaxed) {
            true => self.context.desk.step_for(run),
            false => Step::Over,
        }
    }

    fn drive_control(&self) {
        if let Some(lane) = self.lanes.load().get(self.messages.carrier()) {
            self.attend(lane);
        }
    }

    fn needs_this_core(&self, run: &Run) -> bool {
        run.is_short() && !run.is_beside.load(Ordering::Relaxed) && {
            let lanes = self.lanes.load();
            let lane = lanes.get(run.lane.load(Ordering::Relaxed));
            lane.is_some_and(|lane| lane.needs_this_core())
        }
    }

    fn hurry(&self) {
        // Only the carrier has such frames: if it is lost, the next one takes them at once.
        let lanes = self.lanes.load();
        let carrier = lanes.get(self.messages.carrier());
        if carrier.is_some_and(|lane| lane.has_patient()) {
            self.send_messages();
        }
    }

    fn hand_over(&self) {
        self.context.desk.hand_over();
        for lane in self.lanes.load().iter() {
            lane.call_worker();
        }
    }

    fn lanes(&self) -> usize {
        self.bulk_lanes
    }

    fn streams(&self) -> usize {
        self.lanes.load().len()
    }

    fn lane_infos(&self) -> Vec<LaneInfo> {
        let lanes = self.lanes.load();
        let bulk = lanes.iter().take(self.bulk_lanes);
        bulk.map(|lane| lane.info()).collect()
    }

    fn lane_stats(&self, with_kernel: bool) -> (Vec<LaneStats>, u64) {
        self.stats(with_kernel)
    }

    fn route(&self) -> Option<Route> {
        Some(Self::route(self))
    }

    fn same_host_info(&self) -> Option<SameHostInfo> {
        Some(self.same_host.info())
    }

    fn number(&self) -> Option<u64> {
        Some(self.established.connection)
    }

    fn recover(&self) -> Vec<Wanted> {
        Self::recover(self)
    }

    fn wanted_stream(&self, lane: usize) -> Option<WantedStream> {
        Self::wanted_stream(self, lane)
    }

    fn adopt(&self, rejoined: Rejoined) -> bool {
        Self::adopt(self, rejoined)
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
        self.same_host.wait_for_device(Some(run));
        self.let_go_of(LetGo::Aborted(run));
    }

    fn revoke(&self) {
        self.same_host.wait_for_device(None);
        self.let_go_of(LetGo::Revoked(&Allowance::new()));
    }

    fn mark(&self) -> Box<dyn super::Mark> {
        Box::new(self.put_mark())
    }

    fn check_liveness(&self, now: Instant, timeout: Duration) -> bool {
        self.same_host.look_after(now) | self.look_after(now, timeout)
    }

    fn close(&self, reason: &str, error: Error) {
        // Recorded first: the peer answers a goodbye by closing,
        // which is not why the connection ended.
        if self.end.set(error).is_err() {
            return;
        }
        let header = Header::new(Kind::Goodbye, 0);
        if let Some(lane) = self.lanes.load().get(self.messages.carrier()) {
            lane.push_control(|out| header.encode_with_text(out, reason));
            self.pump(lane, 4);
        }
        self.shut();
    }

    fn kill(&self, error: Error) {
        self.end_with(error);
    }

    fn forgotten(&self, code: RejectCode) {
        for lane in self.lanes.load().iter() {
            self.hear_out(lane);
        }
        // The session has probably given up the plugin, and had no lane to tell why.
        let ended = code == RejectCode::UnknownConnection;
        let cause = ended.then(|| self.plugin_cause()).flatten();
        let peer = self.above.name().to_owned();
        self.end_with(Error::PeerLost {
            peer,
            cause: cause.unwrap_or(LostCause::Forgotten(code)),
        });
    }

    fn give_up(&self) {
        let alone = self.lost.lock().alone.clone();
        if let Some((_, cause)) = alone {
            let peer = self.above.name().to_owned();
            self.end_with(Error::PeerLost { peer, cause });
        }
    }

    fn drain(&self) {
        let Some(error) = self.end.get() else { return };
        self.same_host.end(error);
        let fail = |chunk: ChunkRef| {
            self.trace_settled(&chunk, End::Failed, Some(error));
            chunk.run.fail_now(error.clone());
            if chunk.run.settle(1) {
                chunk.run.conclude_failed();
            }
        };
        for lane in self.lanes.load().iter() {
            lane.sender.lock().close(lane);
            let receiving = lane.receiver.lock().close(lane, self);
            // Wait for the delivery of bytes received before.
            drop(lane.delivery.lock());
            let remains = lane.books.lock().lane.close();
            for run in remains.offers {
                run.0.fail_now(error.clone());
            }
            let receiving = receiving.into_iter().map(|(chunk, _)| chunk);
            let chunks = remains.reads.into_iter().chain(remains.writes);
            chunks.chain(receiving).for_each(fail);
        }
        let unknown = self.losses.lock().end();
        unknown.into_iter().for_each(fail);
        let parked = std::mem::take(&mut self.lost.lock().parked);
        for run in parked {
            run.fail_now(error.clone());
        }
        self.messages.close();
    }

    fn reap(&self) {
        for lane in self.lanes.load().iter() {
            if let Some(token) = lane.token.get() {
                lane.worker.remove(*token, &lane.stream);
            }
        }
        self.drain();
        // From here on the link does not touch memory.
        let link = self.link();
        self.context.remove_link(&link);
        self.pings.changed();
        let error = self.end.get().cloned().unwrap_or(Error::Closed);
        limited!(DEBUG, peer = self.above.name(), %error, "connection ended");
        self.above.lost(&link, &error);
    }
}
