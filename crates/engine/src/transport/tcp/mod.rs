//! Native transport: a connection is a set of authenticated TCP streams, its lanes.
//!
//! Each lane has a sending half ([`tx`]) and a receiving half ([`rx`]), each behind its own lock, and a
//! queue of work that anybody may add to. Whoever holds a half's lock does one system call at a time
//! with it; a worker thread, a polling caller and a caller who posts are all equally good drivers.
//! Lanes share nothing but the counters of the runs they take chunks from.

mod rx;
mod tx;

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use tcpx_net::{Span, Stream, set_congestion_control};
use tcpx_proto::frame::{Header, Kind, Status, Table};
use tcpx_proto::handshake::Established;

use self::rx::{Ended, Received, Rx};
use self::tx::{Sent, Tx, Work, encode_text};
use crate::completion::TransferState;
use crate::core::Core;
use crate::error::Error;
use crate::peer::PeerShared;
use crate::plan::Chunk;
use crate::progress::Worker;
use crate::region::{Memory, Refusal, Regions};
use crate::run::{After, Run};
use crate::tagged::Arrival;
use crate::transport::Link;

/// System calls in each direction that a worker makes on a lane before others have their turn.
const WORKER_BUDGET: usize = 32;
/// The same for a caller who polls: fewer, so that no poll takes long.
const CALLER_BUDGET: usize = 4;
/// A sleeping receiver of a large payload is woken for this much. Well below any receive buffer: near it, the
/// sender would have no room left to send what the receiver waits for.
const BULK_WAKE_BYTES: usize = 256 << 10;

/// A chunk that has been sent or asked for and is not settled.
struct Flying {
    run: Arc<Run>,
    index: usize,
}

impl Flying {
    fn chunk(&self) -> &Chunk {
        self.run.plan.chunk(self.index)
    }
}

/// Chunks in flight on a lane, oldest first; neither queue is longer than the window.
#[derive(Default)]
struct InFlight {
    writes: VecDeque<Flying>,
    reads: VecDeque<Flying>,
}

/// Access to local memory that a peer was granted for one chunk.
#[derive(Default)]
struct Grant {
    spans: Vec<Span>,
    memory: Vec<Arc<Memory>>,
    epoch: u64,
}

impl Grant {
    fn fill(&mut self, regions: &Regions, table: &Table<'_>) -> Result<(), Refusal> {
        // Before the look-up: what is revoked after this shows as a changed epoch.
        self.epoch = regions.epoch();
        regions.resolve(table, &mut self.spans, &mut self.memory)
    }

    fn is_revoked(&mut self, regions: &Regions) -> bool {
        let epoch = regions.epoch();
        if epoch == self.epoch {
            return false;
        }
        let dead = self.has_dead_memory();
        if !dead {
            self.epoch = epoch;
        }
        dead
    }

    fn has_dead_memory(&self) -> bool {
        self.memory.iter().any(|m| !m.is_live())
    }
}

/// One TCP stream of a connection.
pub(crate) struct Lane {
    stream: Stream,
    pub(crate) local: SocketAddr,
    pub(crate) remote: SocketAddr,
    /// Whether the peer is on this machine.
    is_local: bool,
    /// The thread that drives this lane when nobody else does, and its name for it.
    worker: Arc<Worker>,
    token: OnceLock<u64>,
    tx: Mutex<Tx>,
    rx: Mutex<Rx>,
    work: Mutex<Work>,
    in_flight: Mutex<InFlight>,
    /// Something was added to `work` (or may now leave it) since the last look.
    dirty: AtomicBool,
    /// The kernel took no more bytes at the last attempt.
    blocked: AtomicBool,
    /// The peer's WRITE chunks that have been dealt with.
    landed: AtomicU64,
    /// How many of those the peer has been told of. ≤ landed; written by the holder of `tx`.
    acked: AtomicU64,
    /// Our WRITE chunks that the peer has acknowledged.
    acknowledged: AtomicU64,
    /// Bytes of our chunks in flight.
    load: AtomicUsize,
    /// The stream is reported as readable once this many bytes are there. More than 1 only while at
    /// least that much of a payload is still to come; changes under the lock of `rx`.
    wake_level: AtomicUsize,
    /// Counts drives by callers: while it moves, the worker stands back.
    attended: AtomicU64,
    /// Payload bytes that the kernel took. Unlike our own pings they show that the peer still reads.
    payload_sent: AtomicU64,
    pub(crate) bytes_sent: AtomicU64,
    pub(crate) bytes_received: AtomicU64,
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

impl Lane {
    pub(crate) fn new(stream: Stream, early: &[u8], core: &Core) -> std::io::Result<Self> {
        let worker = core.next_worker();
        let is_local = stream.is_local();
        if let Some(name) = core.config.congestion_control(is_local)
            && let Err(error) = set_congestion_control(&stream, name)
        {
            tracing::debug!(name, %error, "a lane keeps the system's congestion control");
        }
        Ok(Self {
            local: stream.local_addr()?,
            remote: stream.peer_addr()?,
            is_local,
            stream,
            worker,
            token: OnceLock::new(),
            tx: Mutex::new(Tx::new()),
            rx: Mutex::new(Rx::new(early)),
            work: Mutex::default(),
            in_flight: Mutex::default(),
            dirty: AtomicBool::new(false),
            blocked: AtomicBool::new(false),
            landed: AtomicU64::new(0),
            acked: AtomicU64::new(0),
            acknowledged: AtomicU64::new(0),
            load: AtomicUsize::new(0),
            wake_level: AtomicUsize::new(1),
            attended: AtomicU64::new(0),
            payload_sent: AtomicU64::new(0),
            bytes_sent: AtomicU64::new(0),
            bytes_received: AtomicU64::new(0),
        })
    }

    pub(crate) fn stream(&self) -> &Stream {
        &self.stream
    }

    pub(crate) fn attended(&self) -> u64 {
        self.attended.load(Ordering::Relaxed)
    }

    /// Whether the peer cannot move before whoever looks at this lane leaves the core.
    pub(crate) fn needs_this_core(&self) -> bool {
        self.is_local && self.stream.peer_used_this_core()
    }

    /// Whether a worker that goes to sleep must be woken when the stream takes bytes again.
    pub(crate) fn is_blocked(&self) -> bool {
        self.blocked.load(Ordering::Acquire)
    }

    /// Whether there is something to send that nobody is sending.
    pub(crate) fn is_dirty(&self) -> bool {
        self.dirty.load(Ordering::Acquire)
    }

    fn mark_dirty(&self) {
        self.dirty.store(true, Ordering::SeqCst);
    }

    /// Queues a small frame.
    fn push_control(&self, encode: impl FnOnce(&mut Vec<u8>)) {
        let mut work = self.work.lock();
        if !work.closed {
            encode(&mut work.control);
        }
        drop(work);
        self.mark_dirty();
    }

    /// Queues a run; false when the connection has ended.
    fn push_run(&self, run: &Arc<Run>) -> bool {
        let mut work = self.work.lock();
        if work.closed {
            return false;
        }
        work.runs.push_back(Arc::clone(run));
        drop(work);
        self.mark_dirty();
        true
    }

    /// Wakes the worker for this lane.
    fn call_worker(&self) {
        if let Some(token) = self.token.get() {
            self.worker.call(*token);
        }
    }

    /// Sends what is waiting, as far as the kernel takes it and `budget` lasts. Returns whether bytes
    /// went out.
    fn pump(&self, connection: &Connection, budget: usize) -> Result<bool, Ended> {
        let mut progress = false;
        for _ in 0..budget {
            // Cleared before the look, so that what is added during it is seen by the next one.
            self.dirty.store(false, Ordering::SeqCst);
            let Some(mut tx) = self.tx.try_lock() else {
                // The holder looks at `dirty` again after it lets go.
                self.mark_dirty();
                return Ok(progress);
            };
            let sent = tx.step(self, connection).map_err(Ended::Io)?;
            let idle = tx.is_idle();
            drop(tx);
            self.blocked.store(sent == Sent::Blocked, Ordering::Release);
            match sent {
                // Not worth another look: whoever adds work from now on marks it.
                Sent::Some if idle && self.work.lock().is_empty() => {
                    progress = true;
                    if !self.dirty.load(Ordering::SeqCst) {
                        return Ok(progress);
                    }
                }
                Sent::Some => progress = true,
                Sent::Blocked => return Ok(progress),
                Sent::Nothing if !self.dirty.load(Ordering::SeqCst) => return Ok(progress),
                Sent::Nothing => {}
            }
        }
        self.mark_dirty();
        Ok(progress)
    }

    /// Receives what is there, as far as `budget` lasts.
    fn fill(&self, connection: &Arc<Connection>, budget: usize) -> Result<Drive, Ended> {
        let mut drive = Drive::default();
        for _ in 0..budget {
            let Some(mut rx) = self.rx.try_lock() else {
                return Ok(drive);
            };
            let received = rx.step(self, connection)?;
            drop(rx);
            match received {
                Received::Nothing => return Ok(drive),
                Received::Drained => {
                    drive.progress = true;
                    return Ok(drive);
                }
                Received::More => {
                    drive.progress = true;
                    // Acknowledgements go out while data still comes in: they move the peer's window.
                    if self.unacked() >= connection.ack_every {
                        self.pump(connection, 1)?;
                    }
                }
            }
        }
        drive.more = true;
        Ok(drive)
    }

    /// The peer's WRITE chunks that it does not know the end of yet.
    fn unacked(&self) -> u64 {
        self.landed.load(Ordering::Acquire) - self.acked.load(Ordering::Acquire)
    }

    /// Before a worker sleeps: in the middle of a large payload one wake-up for many packets is enough.
    pub(crate) fn raise_wake_level(&self) {
        if let Some(rx) = self.rx.try_lock()
            && rx.left() >= BULK_WAKE_BYTES
        {
            self.set_wake_level(BULK_WAKE_BYTES);
        }
    }

    /// After bytes came: less than the level must not be left to wait for. Only with the lock of `rx`.
    fn lower_wake_level(&self, left: usize) {
        if left < self.wake_level.load(Ordering::Relaxed) {
            self.set_wake_level(1);
        }
    }

    fn set_wake_level(&self, bytes: usize) {
        if self.wake_level.swap(bytes, Ordering::Relaxed) != bytes
            && self.stream.set_wake_level(bytes).is_err()
        {
            self.wake_level.store(1, Ordering::Relaxed);
        }
    }

    /// Stops the current system calls' use of memory for which `is_hit` holds, and with
    /// `regions_too` of memory that was revoked. Returns once no call uses it any more.
    fn let_go(&self, is_hit: impl FnMut(&Arc<Run>) -> bool, regions_too: bool) {
        self.tx.lock().let_go(is_hit, regions_too);
        // The receiving half looks before each call; taking its lock waits for the current one.
        drop(self.rx.lock());
    }

    /// Whether something is in flight or waiting to leave.
    fn is_busy(&self) -> bool {
        let in_flight = self.in_flight.lock();
        if !in_flight.reads.is_empty() || !in_flight.writes.is_empty() {
            return true;
        }
        drop(in_flight);
        let work = self.work.lock();
        if !work.responses.is_empty() || !work.control.is_empty() {
            return true;
        }
        drop(work);
        self.tx.try_lock().is_none_or(|tx| !tx.is_idle())
            || self.rx.try_lock().is_some_and(|rx| rx.left() > 0)
    }
}

/// An authenticated connection to a peer.
pub(crate) struct Connection {
    pub(crate) core: Arc<Core>,
    pub(crate) peer: Arc<PeerShared>,
    pub(crate) established: Established,
    pub(crate) lanes: Box<[Lane]>,
    /// Chunks that we may have in flight on a lane: the smaller of ours and the peer's.
    window: usize,
    /// Chunks that the peer may have in flight on a lane.
    own_window: usize,
    /// Acknowledgements go out at the latest after this many chunks, to keep the peer's window moving.
    ack_every: u64,
    /// Why the connection ended.
    end: OnceLock<Error>,
    pings: Pings,
    pause: Pause,
    pub(crate) liveness: Mutex<Liveness>,
}

#[derive(Default)]
struct Pings {
    next: AtomicU64,
    waiting: Mutex<HashMap<u64, Option<Instant>>>,
    answered: Condvar,
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

/// What the control thread saw of a connection at its last tick.
#[derive(Default)]
pub(crate) struct Liveness {
    moved: u64,
    stalled_since: Option<Instant>,
}

impl Connection {
    pub(crate) fn new(
        core: Arc<Core>,
        peer: Arc<PeerShared>,
        established: Established,
        lanes: Vec<Lane>,
    ) -> Arc<Self> {
        let own_window = core.config.window();
        let peer_window = usize::try_from(established.peer_window.get()).unwrap_or(usize::MAX);
        let connection = Arc::new(Self {
            window: own_window.min(peer_window),
            own_window,
            ack_every: (own_window as u64 / 4).max(1),
            core,
            peer,
            established,
            lanes: lanes.into(),
            end: OnceLock::new(),
            pings: Pings::default(),
            pause: Pause::new(),
            liveness: Mutex::default(),
        });
        // From the first byte on, whoever revokes memory finds it.
        let listed = &connection.core.connections;
        listed.lock().push(Arc::clone(&connection));
        connection
    }

    /// Lets the workers drive the lanes. Before this nothing is received; what was submitted already goes on.
    pub(crate) fn start(self: &Arc<Self>) {
        if let Err(error) = self.start_lanes() {
            self.kill(Error::io("cannot drive a lane", error));
        }
    }

    fn start_lanes(self: &Arc<Self>) -> std::io::Result<()> {
        for (index, lane) in self.lanes.iter().enumerate() {
            let token = lane.worker.add(self, index)?;
            lane.token.set(token).expect("a connection is started once");
            lane.call_worker();
        }
        Ok(())
    }

    /// Whether the peer made this connection.
    pub(crate) fn was_accepted(&self) -> bool {
        self.established.owner.is_some()
    }

    pub(crate) fn is_dead(&self) -> bool {
        self.end.get().is_some()
    }

    /// Starts a run. Never waits: the first chunk leaves from this thread as far as the kernel takes it at
    /// once, so that it is on its way before a worker is awake; the rest is the workers' to do.
    pub(crate) fn submit(self: &Arc<Self>, run: &Arc<Run>) {
        let (first, lane) = if run.in_order {
            (0, &self.lanes[0])
        } else {
            self.least_loaded()
        };
        run.lane.store(first, Ordering::Relaxed);
        lane.push_run(run);
        self.check(lane.pump(self, 1));
        if lane.is_dirty() || lane.is_blocked() {
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
        self.core.control.stay_awake();
        if let Some(error) = self.end.get() {
            self.fail_run(run, error.clone());
            self.drain();
        }
    }

    /// Queues a small frame on the first lane, which keeps such frames in order, and sends it if that is possible
    /// at once.
    pub(crate) fn control(self: &Arc<Self>, encode: impl FnOnce(&mut Vec<u8>)) {
        let lane = &self.lanes[0];
        lane.push_control(encode);
        self.core.control.stay_awake();
        self.check(lane.pump(self, 1));
        if lane.is_dirty() || lane.is_blocked() {
            lane.call_worker();
        }
    }

    pub(crate) fn notify(self: &Arc<Self>, transfer: u64, message: &[u8]) {
        let header = Header {
            payload: message.len() as u64,
            ..Header::new(Kind::Notify, transfer)
        };
        self.control(|out| {
            header.encode(out);
            out.extend_from_slice(message);
        });
    }

    /// Moves what can be moved without waiting on behalf of a caller who polls `run`.
    pub(crate) fn drive_for(self: &Arc<Self>, run: &Run) {
        if run.is_short() {
            self.attend(run.lane.load(Ordering::Relaxed));
        } else if self.core.config.workers() == 1 && self.pause.is_over() {
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

    /// Whether a caller who polls `run` keeps the peer from moving.
    pub(crate) fn needs_this_core(&self, run: &Run) -> bool {
        run.is_short() && self.lanes[run.lane.load(Ordering::Relaxed)].needs_this_core()
    }

    /// Moves what can be moved on the lane that carries small frames.
    pub(crate) fn drive_control(self: &Arc<Self>) {
        self.attend(0);
    }

    fn attend(self: &Arc<Self>, index: usize) -> Drive {
        let lane = &self.lanes[index];
        lane.attended.fetch_add(1, Ordering::Relaxed);
        self.drive(index, CALLER_BUDGET)
    }

    /// A caller who drove the lanes goes to sleep: the workers take over at once.
    pub(crate) fn hand_over(&self) {
        for lane in &self.lanes {
            lane.call_worker();
        }
    }

    /// A worker's turn on one lane.
    pub(crate) fn work(self: &Arc<Self>, index: usize) -> Drive {
        self.drive(index, WORKER_BUDGET)
    }

    /// Moves what can be moved on one lane without waiting.
    fn drive(self: &Arc<Self>, index: usize, budget: usize) -> Drive {
        let lane = &self.lanes[index];
        let mut drive = match lane.fill(self, budget) {
            Ok(drive) => drive,
            Err(ended) => {
                self.ended(ended);
                return Drive::default();
            }
        };
        if lane.is_dirty() || lane.is_blocked() || lane.unacked() > 0 {
            drive.progress |= self.check(lane.pump(self, budget));
            drive.more |= lane.is_dirty();
        }
        drive
    }

    /// Settles one chunk of a run.
    fn settle(self: &Arc<Self>, run: &Arc<Run>) {
        if run.settle(1) {
            self.conclude(run);
        }
    }

    /// Fails a run of this connection.
    fn fail_run(&self, run: &Arc<Run>, error: Error) {
        if run.fail(error) {
            conclude_failed(run);
        }
    }

    fn conclude(self: &Arc<Self>, run: &Arc<Run>) {
        if !run.completion.commit() {
            conclude_failed(run);
            return;
        }
        match &run.after {
            After::Nothing => {}
            After::Notify(message) if run.rides_along(message) => {}
            // Before the run counts as done: once it does, the notification is on its way.
            After::Notify(message) => self.notify(run.id, message),
            After::Receive(receive) => receive.landed(&Link::Tcp(Arc::clone(self))),
        }
        self.peer.measured(run.plan.bytes, run.started.elapsed());
        run.completion.finish();
    }

    fn deliver(&self, message: Vec<u8>) {
        self.core.inbox.push(self.peer.name(), message);
    }

    fn arrived(self: &Arc<Self>, arrival: Arrival) {
        crate::tagged::arrived(&self.peer, &Link::Tcp(Arc::clone(self)), arrival);
    }

    /// Tells the sender of a tagged message how it ended.
    pub(crate) fn send_done(self: &Arc<Self>, transfer: u64, status: Status, text: &str) {
        let header = Header {
            flags: status as u8,
            ..Header::new(Kind::SendDone, transfer)
        };
        self.control(|out| encode_text(out, header, text));
    }

    fn refused(&self, status: Status, text: String) -> Error {
        Error::PeerRefused {
            peer: self.peer.name().to_owned(),
            status,
            text,
        }
    }

    /// Sends a ping on a lane and waits for the answer.
    pub(crate) fn ping(self: &Arc<Self>, index: usize, timeout: Duration) -> Option<Duration> {
        let lane = self.lanes.get(index)?;
        let token = self.pings.next.fetch_add(1, Ordering::Relaxed) + 1;
        self.pings.waiting.lock().insert(token, None);
        let start = Instant::now();
        let deadline = start + timeout;
        lane.push_control(|out| Header::new(Kind::Ping, token).encode(out));
        self.check(lane.pump(self, 1));
        lane.call_worker();
        let mut waiting = self.pings.waiting.lock();
        while waiting.get(&token) == Some(&None) && !self.is_dead() {
            if self
                .pings
                .answered
                .wait_until(&mut waiting, deadline)
                .timed_out()
            {
                break;
            }
        }
        let answered = waiting.remove(&token).flatten()?;
        Some(answered.duration_since(start))
    }

    fn ponged(&self, token: u64) {
        if let Some(answer) = self.pings.waiting.lock().get_mut(&token) {
            *answer = Some(Instant::now());
        }
        self.pings.answered.notify_all();
    }

    /// Looks whether a connection with work outstanding still moves; asks the peer for a sign of life and
    /// gives it up when none has come within `timeout`. Returns whether work is outstanding.
    pub(crate) fn check_liveness(self: &Arc<Self>, now: Instant, timeout: Duration) -> bool {
        if !self.peer.tagged.is_waiting() && !self.lanes.iter().any(Lane::is_busy) {
            *self.liveness.lock() = Liveness::default();
            return false;
        }
        let moved = self
            .lanes
            .iter()
            .map(|l| {
                l.payload_sent.load(Ordering::Relaxed) + l.bytes_received.load(Ordering::Relaxed)
            })
            .sum();
        let mut liveness = self.liveness.lock();
        let since = match liveness.stalled_since {
            Some(since) if liveness.moved == moved => since,
            _ => {
                *liveness = Liveness {
                    moved,
                    stalled_since: Some(now),
                };
                return true;
            }
        };
        drop(liveness);
        let stalled = now.duration_since(since);
        if stalled >= timeout {
            self.kill(Error::PeerSilent {
                peer: self.peer.name().to_owned(),
                after: stalled,
            });
        } else {
            // A healthy peer answers even if it has nothing else to say.
            for lane in &self.lanes {
                lane.push_control(|out| Header::new(Kind::Ping, 0).encode(out));
                lane.call_worker();
            }
        }
        true
    }

    /// Makes sure that no system call uses memory that was revoked.
    pub(crate) fn revoke(&self) {
        for lane in &self.lanes {
            lane.let_go(|run| run.plan.revoked().is_some(), true);
        }
    }

    /// Makes sure that no system call uses local memory on behalf of `run`, which is being aborted.
    pub(crate) fn let_go(&self, run: &Arc<Run>) {
        for lane in &self.lanes {
            lane.let_go(|r| Arc::ptr_eq(r, run), false);
        }
    }

    /// Says goodbye and ends the connection.
    pub(crate) fn close(self: &Arc<Self>, reason: &str, error: Error) {
        if self.is_dead() {
            return;
        }
        let header = Header::new(Kind::Goodbye, 0);
        self.lanes[0].push_control(|out| encode_text(out, header, reason));
        self.check(self.lanes[0].pump(self, 4));
        self.kill(error);
    }

    /// Ends the connection; everything that was in flight fails with `error`.
    pub(crate) fn kill(self: &Arc<Self>, error: Error) {
        if self.end.set(error).is_err() {
            return;
        }
        for lane in &self.lanes {
            lane.stream.shutdown();
        }
        self.core.control.reap(Arc::clone(self));
    }

    /// Takes the connection apart after its end. Called by the control thread, which holds no lock.
    pub(crate) fn reap(self: &Arc<Self>) {
        for lane in &self.lanes {
            if let Some(token) = lane.token.get() {
                lane.worker.remove(*token, &lane.stream);
            }
        }
        self.drain();
        // From here on nothing of it touches memory.
        self.core
            .connections
            .lock()
            .retain(|c| !Arc::ptr_eq(c, self));
        self.pings.answered.notify_all();
        let error = self.end.get().cloned().unwrap_or(Error::Closed);
        tracing::debug!(peer = self.peer.name(), %error, "connection ended");
        self.peer.lost(self, &error);
        self.core.forget_if_gone(&self.peer);
    }

    /// Fails everything that is in flight or waiting. Only after [`Connection::kill`]; when this returns,
    /// no byte of the connection lands in memory any more.
    pub(crate) fn drain(&self) {
        let Some(error) = self.end.get() else { return };
        for lane in &self.lanes {
            lane.tx.lock().close();
            let receiving = lane.rx.lock().close();
            let mut work = lane.work.lock();
            work.closed = true;
            let runs = std::mem::take(&mut work.runs);
            work.responses.clear();
            work.control = Vec::new();
            drop(work);
            let InFlight { writes, reads } = std::mem::take(&mut *lane.in_flight.lock());
            for run in runs {
                self.fail_run(&run, error.clone());
            }
            for flying in writes.into_iter().chain(reads).chain(receiving) {
                self.fail_run(&flying.run, error.clone());
                if flying.run.settle(1) {
                    conclude_failed(&flying.run);
                }
            }
        }
    }

    fn least_loaded(&self) -> (usize, &Lane) {
        self.lanes
            .iter()
            .enumerate()
            .min_by_key(|(_, lane)| lane.load.load(Ordering::Relaxed))
            .expect("a connection has at least one lane")
    }

    fn check(self: &Arc<Self>, result: Result<bool, Ended>) -> bool {
        result.unwrap_or_else(|ended| {
            self.ended(ended);
            false
        })
    }

    fn ended(self: &Arc<Self>, ended: Ended) {
        let peer = self.peer.name().to_owned();
        let error = match ended {
            Ended::Io(e) if e.kind() == std::io::ErrorKind::UnexpectedEof => Error::PeerLost {
                peer,
                reason: "it closed the connection".into(),
            },
            Ended::Io(e) => Error::PeerLost {
                peer,
                reason: e.to_string(),
            },
            Ended::Goodbye(text) => Error::PeerLost { peer, reason: text },
            Ended::Misbehaved(what) => {
                tracing::warn!(
                    peer,
                    what,
                    "a peer broke the protocol, its connection is closed"
                );
                Error::PeerMisbehaved { peer, what }
            }
        };
        self.kill(error);
    }
}

/// Ends a run that has not succeeded.
pub(crate) fn conclude_failed(run: &Arc<Run>) {
    let error = run.completion.error().unwrap_or(Error::Aborted);
    if let After::Receive(receive) = &run.after {
        receive.failed(error);
    }
    let state = run.completion.finish();
    debug_assert_ne!(state, TransferState::Done);
}
