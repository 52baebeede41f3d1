//! One TCP stream of a connection.
//!
//! Its locks, in the order in which they are taken: `delivery` by whoever drives the receiving half, to
//! the end of what its events lead to; `receiver` or `sender` for one step, which never blocks; `books`
//! for a moment.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use tcpx_net::{Cursor, Stream, set_congestion_control};
use tcpx_proto::frame::down::StreamId;
use tcpx_proto::frame::{Header, Kind, Status};
use tcpx_proto::lane::{self, ChunkId, Meaning, Violation};

use super::event::Event;
use super::receive::{Ended, Received, Receiver};
use super::send::{Answer, Sender, Sent};
use super::{Connection, Windows};
use crate::carrier::LetGo;
use crate::carrier::comm::{Comms, RawLane};
use crate::error::{Error, LostCause};
use crate::link::{Caller, Context, Drive, LaneInfo, Rejoined};
use crate::log::limited;
use crate::memory::{Grant, InterfaceSet};
use crate::sync::{Mutex, Rank};
use crate::transfer::{ChunkRef, Offered, Run};

/// Wakes a sleeping receiver of a large payload for this much at most. Well below any receive buffer:
/// near it, the sender would have no room left to send what the receiver waits for.
const BULK_WAKE_BYTES: usize = 256 << 10;

/// Wakes it for the rest of a payload from another machine where at least this much is left: a few
/// packets.
const MIN_WAKE_BYTES: usize = 64 << 10;

/// What both halves of a lane share: the protocol's state, and grants to use again.
pub(super) struct Books {
    pub(super) lane: lane::Lane<Offered, Answer>,
    pub(super) spare: Vec<Grant>,
}

/// One TCP stream of a connection.
pub(crate) struct Lane {
    /// Which lane it is, and how many streams that had before.
    id: StreamId,
    /// When the stream was lost, and why.
    down: OnceLock<(Instant, LostCause)>,
    /// This side has let go of the lost stream, or is about to.
    apart: AtomicBool,
    /// How many streams the lane has lost before this one.
    failovers: u32,
    pub(super) stream: Stream,
    local: SocketAddr,
    remote: SocketAddr,
    /// Whether the peer is on this machine.
    is_local: bool,
    /// The interface that it is on; every one where that is not known.
    pub(super) interface: InterfaceSet,
    /// The thread that drives this lane when nobody else does, and its name for it.
    pub(super) worker: Arc<dyn Caller>,
    pub(super) token: OnceLock<u64>,
    /// Held by whoever drives the receiving half and delivers what it finds, so that everything is
    /// delivered in the order of its arrival. Nobody waits for it but those who take the lane apart and
    /// those who put a mark.
    pub(super) delivery: Mutex<Vec<Event>>,
    pub(super) receiver: Mutex<Receiver>,
    pub(super) sender: Mutex<Sender>,
    pub(super) books: Mutex<Books>,
    /// Something was added to the books (or may now leave them) since the last look.
    dirty: AtomicBool,
    /// The kernel took no more bytes at the last attempt.
    blocked: AtomicBool,
    /// True while the worker drives this lane or watches its current driver.
    in_care: AtomicBool,
    /// Carriers have something under way of which nobody will be told: it must be looked for.
    staging_out: AtomicBool,
    staging_in: AtomicBool,
    /// The next frame is not read, for want of room for what it brings. Changes under the lock of
    /// `receiver`.
    paused: AtomicBool,
    /// Payload that travels beside the stream.
    pub(super) beside_out: Beside,
    pub(super) beside_in: Beside,
    /// Bytes of our chunks in flight.
    pub(super) load: AtomicUsize,
    /// The stream is reported as readable once this many bytes are there. More than 1 only while at
    /// least that much of a payload is still to come; changes under the lock of `receiver`.
    wake_level: AtomicUsize,
    /// So much of a payload is still to come that a sleeping worker is woken once for many packets.
    in_bulk: AtomicBool,
    /// Counts drives by callers: while it moves, the worker stands back.
    attended: AtomicU64,
    /// Payload bytes that the kernel took. Unlike our own pings they show that the peer still reads.
    pub(super) payload_sent: AtomicU64,
    pub(super) bytes_sent: AtomicU64,
    pub(super) bytes_received: AtomicU64,
}

/// Adds to a counter that only the holder of one lock changes; others read it at any time.
pub(super) fn add_locked(counter: &AtomicU64, count: u64) {
    counter.store(counter.load(Ordering::Relaxed) + count, Ordering::Relaxed);
}

/// What others may know of payload that travels beside the stream.
#[derive(Default)]
pub(super) struct Beside {
    /// Somebody beyond this process must move.
    waiting: AtomicBool,
    /// Bytes that have moved.
    moved: AtomicU64,
}

impl Beside {
    pub(super) fn update(&self, waiting: bool, moved: u64) {
        self.waiting.store(waiting, Ordering::Relaxed);
        add_locked(&self.moved, moved);
    }

    /// How much has moved, if something is to be moved.
    pub(super) fn moved(&self) -> Option<u64> {
        let moved = self.moved.load(Ordering::Relaxed);
        self.waiting.load(Ordering::Relaxed).then_some(moved)
    }
}

impl Lane {
    pub(crate) fn new(
        id: StreamId,
        raw: RawLane,
        comms: Option<Comms>,
        windows: Windows,
        worker: Arc<dyn Caller>,
        context: &Context,
    ) -> Result<Self, Error> {
        let RawLane { stream, early } = raw;
        let (comm_out, comm_in) = comms.map(Comms::open).transpose()?.unzip();
        let broken = |error| Error::io("a lane broke as it was made", error);
        let is_local = stream.is_local();
        if let Some(name) = context.config.congestion_control(is_local)
            && let Err(error) = set_congestion_control(&stream, name)
        {
            limited!(DEBUG, name, %error, "a lane keeps the system's congestion control");
        }
        let pool = &context.staging.pool;
        let local = stream.local_addr().map_err(broken)?;
        let nearness = &context.staging.nearness;
        Ok(Self {
            id,
            down: OnceLock::new(),
            apart: AtomicBool::new(false),
            failovers: 0,
            local,
            remote: stream.peer_addr().map_err(broken)?,
            is_local,
            interface: nearness.interface_at(local.ip(), is_local),
            stream,
            worker,
            token: OnceLock::new(),
            delivery: Mutex::new(Rank::Delivery, Vec::new()),
            receiver: Mutex::new(Rank::LaneReceive, Receiver::new(&early, pool, comm_in)),
            sender: Mutex::new(Rank::LaneSend, Sender::new(pool, comm_out)),
            books: Mutex::new(
                Rank::LaneBooks,
                Books {
                    lane: lane::Lane::new(windows.ours, windows.peers, windows.lanes),
                    spare: Vec::new(),
                },
            ),
            dirty: AtomicBool::new(false),
            blocked: AtomicBool::new(false),
            in_care: AtomicBool::new(false),
            staging_out: AtomicBool::new(false),
            staging_in: AtomicBool::new(false),
            paused: AtomicBool::new(false),
            beside_out: Beside::default(),
            beside_in: Beside::default(),
            load: AtomicUsize::new(0),
            wake_level: AtomicUsize::new(1),
            in_bulk: AtomicBool::new(false),
            attended: AtomicU64::new(0),
            payload_sent: AtomicU64::new(0),
            bytes_sent: AtomicU64::new(0),
            bytes_received: AtomicU64::new(0),
        })
    }

    /// Makes the lane of a stream that takes the place of a lost one.
    pub(super) fn rejoined(
        rejoined: Rejoined,
        lost: &Self,
        windows: Windows,
        context: &Context,
    ) -> Result<Self, Error> {
        let Rejoined {
            stream: id,
            raw,
            comms,
            worker,
            ..
        } = rejoined;
        let lane = Self::new(id, raw, comms, windows, worker, context)?;
        Ok(Self {
            failovers: lost.failovers.saturating_add(1),
            ..lane
        })
    }

    /// Which stream of the connection this is.
    pub(super) fn id(&self) -> StreamId {
        self.id
    }

    /// Position among the connection's lanes.
    pub(super) fn index(&self) -> usize {
        usize::from(self.id.lane)
    }

    /// Whether the stream is lost.
    #[inline]
    pub(super) fn is_down(&self) -> bool {
        self.down.get().is_some()
    }

    /// Notes that the stream is lost; false if that is known.
    pub(super) fn mark_down(&self, cause: LostCause) -> bool {
        self.down.set((Instant::now(), cause)).is_ok()
    }

    /// Why the stream was lost.
    pub(super) fn down_cause(&self) -> LostCause {
        let down = self.down.get();
        down.map_or(LostCause::LaneDropped, |(_, cause)| cause.clone())
    }

    /// For how long the stream has been lost.
    pub(super) fn down_for(&self) -> Duration {
        self.down
            .get()
            .map_or(Duration::ZERO, |(at, _)| at.elapsed())
    }

    /// True for the one call that takes the lost lane apart.
    pub(super) fn take_apart(&self) -> bool {
        !self.apart.swap(true, Ordering::AcqRel)
    }

    /// Whether somebody takes the lost lane apart, or has.
    pub(super) fn is_apart(&self) -> bool {
        self.apart.load(Ordering::Acquire)
    }

    /// The peer's address.
    pub(super) fn remote(&self) -> SocketAddr {
        self.remote
    }

    /// This end's address.
    pub(super) fn local(&self) -> SocketAddr {
        self.local
    }

    /// The runs that wait for their chunks to be taken.
    pub(super) fn queued_runs(&self) -> Vec<Arc<Run>> {
        let books = self.books.lock();
        let offers = books.lane.queued_offers();
        offers.map(|Offered(run)| Arc::clone(run)).collect()
    }

    /// Tells the peer, as far as it can hear that at once, why a connection is not made.
    pub(crate) fn say_goodbye(&self, reason: &str) {
        let mut frame = Vec::new();
        Header::new(Kind::Goodbye, 0).encode_with_text(&mut frame, reason);
        // Whether it arrives makes no difference here.
        let _ = self.stream.send(&frame, &[], Cursor::default());
        self.stream.shutdown();
    }

    pub(super) fn info(&self) -> LaneInfo {
        LaneInfo {
            index: self.index(),
            local: self.local,
            remote: self.remote,
            bytes_sent: self.bytes_sent.load(Ordering::Relaxed),
            bytes_received: self.bytes_received.load(Ordering::Relaxed),
            is_up: !self.is_down(),
            failovers: self.failovers,
        }
    }

    /// Bytes that have moved, in either direction.
    pub(super) fn moved(&self) -> u64 {
        self.payload_sent.load(Ordering::Relaxed) + self.bytes_received.load(Ordering::Relaxed)
    }

    pub(super) fn attended(&self) -> u64 {
        self.attended.load(Ordering::Relaxed)
    }

    /// Notes that a caller drives the lane.
    pub(super) fn attend(&self) {
        self.attended.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether the peer cannot move before whoever looks at this lane leaves the core.
    pub(super) fn needs_this_core(&self) -> bool {
        self.is_local && self.stream.peer_used_this_core()
    }

    /// Whether a worker should sleep until many packets are here instead of looking for each. On this
    /// machine looking costs less: the sender would have to wake the worker.
    pub(super) fn is_worth_a_sleep(&self) -> bool {
        !self.is_local && self.in_bulk.load(Ordering::Relaxed)
    }

    /// Whether a worker that goes to sleep must be woken when the stream takes bytes again.
    pub(super) fn is_blocked(&self) -> bool {
        self.blocked.load(Ordering::Acquire)
    }

    /// Whether somebody must look again soon, though nothing will be reported.
    pub(super) fn is_staging(&self) -> bool {
        self.staging_out.load(Ordering::Acquire) || self.staging_in.load(Ordering::Acquire)
    }

    /// Whether nothing is read until there is room for what the next frame brings.
    pub(super) fn is_paused(&self) -> bool {
        self.paused.load(Ordering::Acquire)
    }

    pub(super) fn set_paused(&self, yes: bool) {
        self.paused.store(yes, Ordering::Release);
    }

    /// Whether something is left that nobody will report: whoever stops driving the lane must see that
    /// another goes on.
    pub(super) fn is_unfinished(&self) -> bool {
        self.is_staging() || self.is_blocked() || self.is_dirty()
    }

    /// Whether the worker drives this lane or watches its current driver.
    pub(super) fn is_in_care(&self) -> bool {
        // What was found unfinished is seen by a worker that is leaving, or else that it has left is
        // seen here.
        fence(Ordering::SeqCst);
        self.in_care.load(Ordering::Relaxed)
    }

    pub(super) fn take_care(&self, yes: bool) {
        self.in_care.store(yes, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Whether there is something to send that nobody is sending.
    pub(super) fn is_dirty(&self) -> bool {
        self.dirty.load(Ordering::Acquire)
    }

    pub(super) fn mark_dirty(&self) {
        self.dirty.store(true, Ordering::SeqCst);
    }

    /// Queues a small frame.
    pub(super) fn push_control(&self, encode: impl FnOnce(&mut Vec<u8>)) {
        self.books.lock().lane.push_control(encode);
        self.mark_dirty();
    }

    /// Queues a ping. One that the peer would not allow is not sent: it has others to answer first.
    pub(super) fn push_ping(&self, token: u64) {
        let _ = self.books.lock().lane.push_ping(token);
        self.mark_dirty();
    }

    /// Queues the answer to a ping.
    pub(super) fn push_pong(&self, token: u64) {
        self.books.lock().lane.push_pong(token);
        self.mark_dirty();
    }

    /// Queues a ping behind the replies for everything that has landed so far; as
    /// [`Lane::push_ping`].
    pub(super) fn push_mark(&self, ping: u64) {
        // What was just received counts: its notification may have been seen already.
        drop(self.delivery.lock());
        let _ = self.books.lock().lane.push_mark(ping);
        self.mark_dirty();
    }

    /// Queues a run; false where the lane is closed.
    pub(super) fn push_run(&self, run: &Arc<Run>) -> bool {
        let queued = self.books.lock().lane.offer(Offered(Arc::clone(run)));
        if queued.is_ok() {
            self.mark_dirty();
        }
        queued.is_ok()
    }

    /// Says what a frame of the peer means.
    pub(super) fn handle_frame(&self, header: &Header) -> Result<Meaning<ChunkRef>, Violation> {
        let mut books = self.books.lock();
        let before = books.lane.load();
        let meaning = books.lane.handle_frame(header)?;
        let load = books.lane.load();
        if load != before {
            self.load.store(load as usize, Ordering::Relaxed);
            // A chunk of ours is settled: the window has room again.
            if books.lane.has_work() {
                self.mark_dirty();
            }
        }
        Ok(meaning)
    }

    /// Tells the peer that its WRITE chunk has landed, or why not. Returns how many such replies wait to
    /// be sent.
    pub(super) fn landed(&self, id: ChunkId, refusal: Option<(Status, String)>) -> usize {
        let mut books = self.books.lock();
        books.lane.handle_landed(id, refusal);
        let replies = books.lane.replies();
        drop(books);
        self.mark_dirty();
        replies
    }

    /// Wakes the worker for this lane.
    pub(super) fn call_worker(&self) {
        if let Some(token) = self.token.get() {
            self.worker.call(*token);
        }
    }

    /// Sends what is waiting, as far as the kernel takes it and `budget` lasts. Returns whether bytes
    /// went out.
    pub(super) fn pump(&self, connection: &Connection, budget: usize) -> Result<bool, Ended> {
        let mut progress = false;
        for _ in 0..budget {
            // Cleared before the look, so that what is added during it is seen by the next one.
            self.dirty.store(false, Ordering::SeqCst);
            let Some(mut sender) = self.sender.try_lock() else {
                // The holder looks at `dirty` again after it lets go.
                self.mark_dirty();
                return Ok(progress);
            };
            let sent = sender.step(self, connection);
            let events = sender.take_events();
            let has_more = sender.has_more();
            let is_waiting = matches!(sent, Ok(Sent::Waiting));
            self.staging_out
                .store(is_waiting || sender.is_beside(), Ordering::Release);
            // With the lock: what another thread finds out after us is not overwritten.
            let is_blocked = matches!(sent, Ok(Sent::Blocked));
            self.blocked.store(is_blocked, Ordering::Release);
            drop(sender);
            for event in events {
                connection.deliver(self, event);
            }
            match sent? {
                // Not worth another look: whoever adds work from now on marks it.
                Sent::Some => {
                    progress = true;
                    if !has_more && !self.dirty.load(Ordering::SeqCst) {
                        return Ok(progress);
                    }
                }
                Sent::Blocked | Sent::Waiting => return Ok(progress),
                Sent::Nothing if !self.dirty.load(Ordering::SeqCst) => return Ok(progress),
                Sent::Nothing => {}
            }
        }
        self.mark_dirty();
        Ok(progress)
    }

    /// Receives what is there, as far as `budget` lasts, and delivers what was found.
    pub(super) fn fill(&self, connection: &Connection, budget: usize) -> Result<Drive, Ended> {
        match self.delivery.try_lock() {
            Some(mut events) => self.fill_with(&mut events, connection, budget),
            None => Ok(Drive::default()),
        }
    }

    /// Receives all that is there. Waits for whoever is receiving.
    pub(super) fn hear_out(&self, connection: &Connection) -> Result<(), Ended> {
        let mut events = self.delivery.lock();
        while self.fill_with(&mut events, connection, 1)?.progress {}
        Ok(())
    }

    fn fill_with(
        &self,
        events: &mut Vec<Event>,
        connection: &Connection,
        budget: usize,
    ) -> Result<Drive, Ended> {
        let mut drive = Drive::default();
        for _ in 0..budget {
            // Held by others to let go of memory or to close, or for a glance: nothing moves meanwhile.
            let Some(mut receiver) = self.receiver.try_lock() else {
                return Ok(drive);
            };
            let received = receiver.step(self, connection, events);
            self.staging_in
                .store(receiver.is_staging(), Ordering::Release);
            self.in_bulk
                .store(receiver.left() >= MIN_WAKE_BYTES, Ordering::Relaxed);
            let wants_ack = receiver.wants_ack(connection.ack_every);
            drop(receiver);
            // Mostly there are none, and whoever looks again and again should look often.
            if !events.is_empty() {
                for event in events.drain(..) {
                    connection.deliver(self, event);
                }
            }
            match received? {
                Received::Nothing => return Ok(drive),
                Received::Drained => {
                    drive.progress = true;
                    return Ok(drive);
                }
                Received::More => {
                    drive.progress = true;
                    // Acknowledgements go out while data still comes in: they move the peer's window.
                    if wants_ack {
                        self.pump(connection, 1)?;
                    }
                }
            }
        }
        drive.more = true;
        Ok(drive)
    }

    /// Prepares for a sleep: in the middle of a large payload one wake-up for many packets is enough.
    pub(super) fn prepare_sleep(&self) {
        let Some(mut receiver) = self.receiver.try_lock() else {
            return;
        };
        receiver.expect_bytes();
        let left = receiver.left();
        let enough = match self.is_local {
            true => BULK_WAKE_BYTES,
            false => MIN_WAKE_BYTES,
        };
        if left >= enough {
            self.set_wake_level(left.min(BULK_WAKE_BYTES));
        }
    }

    /// After bytes came: less than the level must not be left to wait for. Only with the lock of
    /// `receiver`.
    pub(super) fn lower_wake_level(&self, left: usize) {
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

    /// Stops using the memory that `which` names. Returns once no system call or copy uses it any more.
    ///
    /// # Errors
    /// A plugin could not be made to: its comm is closed, and the connection must end.
    pub(super) fn let_go(&self, which: LetGo<'_>) -> Result<(), Error> {
        let sending = self.sender.lock().let_go(which, self);
        // The receiving half looks before each call; taking its lock waits for the current one.
        sending.and(self.receiver.lock().let_go())
    }

    /// Whether something is in flight or waiting to leave.
    pub(super) fn is_busy(&self) -> bool {
        self.books.lock().lane.is_busy()
            || self.is_staging()
            || self.is_paused()
            || self
                .sender
                .try_lock()
                .is_none_or(|sender| !sender.is_idle() || sender.is_staging())
            // Whoever is receiving may be about to find something that has to be watched.
            || self
                .receiver
                .try_lock()
                .is_none_or(|receiver| receiver.left() > 0)
    }
}
