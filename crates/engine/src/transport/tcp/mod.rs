//! Native transport: a connection is a set of authenticated TCP streams, its lanes.
//!
//! Each lane has a sending half ([`tx`]) and a receiving half ([`rx`]), each behind its own lock, and a
//! queue of work that anybody may add to. Whoever holds a half's lock does one system call at a time
//! with it; a worker thread, a polling caller and a caller who posts are all equally good drivers.
//! Lanes share nothing but the counters of the runs they take chunks from.

mod grant;
mod lane;
mod mark;
mod rx;
mod settle;
#[cfg(test)]
mod tests;
mod tx;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use tcpx_proto::frame::{Header, Kind, Status};
use tcpx_proto::handshake::Established;

use self::lane::InFlight;
pub(crate) use self::lane::{Drive, Lane};
pub(crate) use self::mark::Mark;
use self::rx::Ended;
use self::tx::encode_text;
use crate::completion::{TransferState, deadline};
use crate::core::Core;
use crate::error::Error;
use crate::peer::PeerShared;
use crate::run::{After, Run};
use crate::tagged::Arrival;
use crate::transport::Link;

/// System calls in each direction that a worker makes on a lane before others have their turn.
const WORKER_BUDGET: usize = 32;
/// The same for a caller who polls: fewer, so that no poll takes long.
const CALLER_BUDGET: usize = 4;

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
    looked: Option<Instant>,
    stream: Stall,
    /// Those of comms that had messages in hand.
    comms: Vec<Stall>,
}

/// For how long something has not moved.
#[derive(Clone, Copy, Default)]
struct Stall {
    /// Up to where it had moved, if there is something to move.
    at: Option<u64>,
    time: Duration,
}

impl Stall {
    /// It is at `at` after another `passed`. Returns for how long it has been there.
    fn look(&mut self, at: Option<u64>, passed: Duration) -> Duration {
        let still = at.is_some() && self.at == at;
        self.at = at;
        self.time = if still {
            self.time + passed
        } else {
            Duration::ZERO
        };
        self.time
    }
}

impl Liveness {
    /// How much of the time since the last look counts as a peer's silence, of which it may have `limit`. A look that comes late
    /// means that this process did not run: what the peer has sent meanwhile is not read yet.
    fn passed(&mut self, now: Instant, limit: Duration) -> Duration {
        let before = self.looked.replace(now).unwrap_or(now);
        now.duration_since(before).min(limit / 4)
    }

    /// How long a comm has had messages in hand and completed none, if that is too long. Signs of life on the stream say nothing
    /// about it: a plugin may lose a connection without a word.
    fn comm_stalled(
        &mut self,
        lanes: &[Lane],
        passed: Duration,
        limit: Duration,
    ) -> Option<Duration> {
        let comms = lanes.iter().flat_map(|l| [&l.comm_out, &l.comm_in]);
        self.comms.resize(2 * lanes.len(), Stall::default());
        let stalls = self.comms.iter_mut().zip(comms);
        let longest = stalls.map(|(stall, comm)| stall.look(comm.moved(), passed));
        longest.max().filter(|longest| *longest >= limit)
    }
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

    /// Why the connection ended, if it has.
    pub(crate) fn error(&self) -> Option<Error> {
        self.end.get().cloned()
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
        self.core.control.stay_awake();
        if let Some(error) = self.end.get() {
            // Chunks in flight are failed by whoever takes the connection apart: the caller may hold a lane's locks.
            fail_run(run, error.clone());
        }
    }

    /// Queues a small frame on the first lane, which keeps such frames in order, and sends it if that is possible
    /// at once.
    pub(crate) fn control(self: &Arc<Self>, encode: impl FnOnce(&mut Vec<u8>)) {
        let lane = &self.lanes[0];
        lane.push_control(encode);
        self.core.control.stay_awake();
        self.check(lane.pump(self, 1));
        // What was waiting before it may have begun to move.
        if lane.is_unfinished() {
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
        let drive = self.drive(index, CALLER_BUDGET);
        // The caller may leave now, and what it has taken from the socket the worker never hears of.
        if lane.is_unfinished() && !lane.is_in_care() {
            lane.call_worker();
        }
        drive
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
        if lane.is_dirty() || lane.is_blocked() || lane.is_staging() || lane.unacked() > 0 {
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
        let token = self.new_ping();
        let start = Instant::now();
        let until = deadline(timeout);
        lane.push_control(|out| Header::new(Kind::Ping, token).encode(out));
        self.check(lane.pump(self, 1));
        lane.call_worker();
        let mut waiting = self.pings.waiting.lock();
        while waiting.get(&token) == Some(&None) && !self.is_dead() {
            if self
                .pings
                .answered
                .wait_until(&mut waiting, until)
                .timed_out()
            {
                break;
            }
        }
        let answered = waiting.remove(&token).flatten()?;
        Some(answered.duration_since(start))
    }

    /// The number of a ping whose answer is waited for. Not 0, which nobody waits for.
    fn new_ping(&self) -> u64 {
        let token = self.pings.next.fetch_add(1, Ordering::Relaxed) + 1;
        self.pings.waiting.lock().insert(token, None);
        token
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
        let passed = liveness.passed(now, timeout);
        if let Some(after) = liveness.comm_stalled(&self.lanes, passed, timeout) {
            drop(liveness);
            let peer = self.peer.name().to_owned();
            self.kill(Error::PluginStalled { peer, after });
            return true;
        }
        let stalled = liveness.stream.look(Some(moved), passed);
        drop(liveness);
        if stalled >= timeout {
            self.kill(Error::PeerSilent {
                peer: self.peer.name().to_owned(),
                after: stalled,
            });
        } else if stalled > Duration::ZERO {
            // A healthy peer answers even if it has nothing else to say.
            for lane in &self.lanes {
                lane.push_control(|out| Header::new(Kind::Ping, 0).encode(out));
                lane.call_worker();
            }
        }
        true
    }

    /// Makes sure that no system call uses memory that was revoked.
    pub(crate) fn revoke(self: &Arc<Self>) {
        for lane in &self.lanes {
            let done = lane.let_go(|run| run.plan.revoked().is_some(), true);
            self.end_unless(done);
        }
    }

    /// Makes sure that no system call uses local memory on behalf of `run`, which is being aborted.
    pub(crate) fn let_go(self: &Arc<Self>, run: &Arc<Run>) {
        for lane in &self.lanes {
            let done = lane.let_go(|r| Arc::ptr_eq(r, run), false);
            self.end_unless(done);
        }
    }

    fn end_unless(self: &Arc<Self>, done: Result<(), Error>) {
        if let Err(error) = done {
            self.kill(Error::PeerLost {
                peer: self.peer.name().to_owned(),
                reason: error.to_string(),
            });
        }
    }

    /// Says goodbye and ends the connection.
    pub(crate) fn close(self: &Arc<Self>, reason: &str, error: Error) {
        // Said first: the peer answers a goodbye by closing, which is not why the connection ended.
        if self.end.set(error).is_err() {
            return;
        }
        let header = Header::new(Kind::Goodbye, 0);
        self.lanes[0].push_control(|out| encode_text(out, header, reason));
        self.check(self.lanes[0].pump(self, 4));
        self.shut();
    }

    /// Ends the connection; everything that was in flight fails with `error`.
    pub(crate) fn kill(self: &Arc<Self>, error: Error) {
        if self.end.set(error).is_ok() {
            self.shut();
        }
    }

    fn shut(self: &Arc<Self>) {
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
        // With the lock: whoever waits either sees the end or is woken.
        drop(self.pings.waiting.lock());
        self.pings.answered.notify_all();
        let error = self.end.get().cloned().unwrap_or(Error::Closed);
        tracing::debug!(peer = self.peer.name(), %error, "connection ended");
        self.peer.lost(self, &error);
        self.core.forget_if_gone(&self.peer, &error);
    }

    /// Fails everything that is in flight or waiting. Only after [`Connection::kill`]; when this returns,
    /// no byte of the connection lands in memory any more.
    pub(crate) fn drain(&self) {
        let Some(error) = self.end.get() else { return };
        for lane in &self.lanes {
            let staged = lane.tx.lock().close();
            let receiving = lane.rx.lock().close();
            let mut work = lane.work.lock();
            work.closed = true;
            let runs = std::mem::take(&mut work.runs);
            work.responses.clear();
            work.control = Vec::new();
            drop(work);
            let InFlight { writes, reads } = std::mem::take(&mut *lane.in_flight.lock());
            for run in runs {
                fail_run(&run, error.clone());
            }
            let flying = writes.into_iter().chain(reads);
            for flying in flying.chain(staged).chain(receiving) {
                fail_run(&flying.run, error.clone());
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

/// Fails a run.
pub(crate) fn fail_run(run: &Arc<Run>, error: Error) {
    if run.fail(error) {
        conclude_failed(run);
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
