//! One TCP stream of a connection.
//!
//! Its locks, in lock order: `delivery`, held by the driver of the receiving half until all events
//! are handled; `receiver` or `sender`, for one step, which never blocks; `books`, for a moment.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use tcpx_net::{Cursor, Stream, set_congestion_control};
use tcpx_proto::frame::down::StreamId;
use tcpx_proto::frame::{Header, Kind, Status};
use tcpx_proto::lane::{self, ChunkId, Meaning, Violation};

use super::ended::Ended;
use super::event::Event;
use super::payload::Beside;
use super::receive::{Received, Receiver};
use super::send::{Answer, Sender, Sent};
use super::traced::LaneTrace;
use super::{Connection, Windows};
use crate::carrier::LetGo;
use crate::carrier::comm::{Comms, RawLane};
use crate::error::{Error, LostCause};
use crate::link::{Caller, Context, Drive, Rejoined};
use crate::log::limited;
use crate::memory::{Grant, InterfaceSet};
use crate::stats::LaneMeter;
use crate::sync::{Mutex, Rank};
use crate::transfer::{ChunkRef, Offered, Run};

/// Limits the bytes for which a sleeping receiver of a large payload waits. Well below any receive
/// buffer: near that size, the sender would have no room to send them.
const BULK_WAKE_BYTES: usize = 256 << 10;

/// Wakes a sleeping receiver for the rest of a remote payload from this size on: a few packets.
const MIN_WAKE_BYTES: usize = 64 << 10;

/// State that both halves of a lane share: the protocol state, and spare grants.
pub(super) struct Books {
    pub(super) lane: lane::Lane<Offered, Answer>,
    pub(super) spare: Vec<Grant>,
}

/// One TCP stream of a connection.
pub(crate) struct Lane {
    /// The lane's index, and the generation of its stream.
    id: StreamId,
    /// When the stream was lost, and why.
    down: OnceLock<(Instant, LostCause)>,
    /// True once this side takes the lost stream apart.
    apart: AtomicBool,
    /// Number of streams that the lane has lost before this one.
    pub(super) failovers: u32,
    pub(super) stream: Stream,
    local: SocketAddr,
    remote: SocketAddr,
    /// True if the peer is on this machine.
    is_local: bool,
    /// The lane's interface; all interfaces if it is unknown.
    pub(super) interface: InterfaceSet,
    /// The worker that drives this lane when no caller does, and the worker's token for it.
    pub(super) worker: Arc<dyn Caller>,
    pub(super) token: OnceLock<u64>,
    /// Held by the driver of the receiving half while it delivers events, in the order of arrival.
    /// Only threads that take the lane apart or put a mark wait for it.
    pub(super) delivery: Mutex<Vec<Event>>,
    pub(super) receiver: Mutex<Receiver>,
    pub(super) sender: Mutex<Sender>,
    pub(super) books: Mutex<Books>,
    /// True if something was added to the books (or may now leave them) since the last check.
    dirty: AtomicBool,
    /// True if frames are queued that wait for others to leave with.
    has_patient: AtomicBool,
    /// True if the kernel accepted no bytes at the last attempt.
    pub(super) blocked: AtomicBool,
    /// True while the worker drives this lane or watches its current driver.
    in_care: AtomicBool,
    /// True while carriers have operations in flight whose end is not signalled.
    staging_out: AtomicBool,
    staging_in: AtomicBool,
    /// True while there is no room for the next frame's contents. Changes under `receiver`.
    paused: AtomicBool,
    /// State of payload that travels beside the stream.
    pub(super) beside_out: Beside,
    pub(super) beside_in: Beside,
    /// Bytes of this side's chunks in flight.
    pub(super) load: AtomicUsize,
    /// Queued runs, from which it may take more chunks.
    pub(super) queued: AtomicUsize,
    /// Bytes that must be available before the stream is reported as readable. Greater than 1 only
    /// while more than that is still to come; changes under `receiver`.
    wake_level: AtomicUsize,
    /// True while so much of a payload is still to come that one wake-up covers many packets.
    in_bulk: AtomicBool,
    /// Counts drives by callers: while it increases, the worker stays away.
    attended: AtomicU64,
    /// Payload bytes that the kernel accepted. They show that the peer reads, unlike our pings.
    pub(super) payload_sent: AtomicU64,
    pub(super) bytes_sent: AtomicU64,
    pub(super) bytes_received: AtomicU64,
    pub(super) counters: LaneMeter,
    pub(super) trace: LaneTrace,
    /// True if a plugin carries payload.
    pub(super) has_comm: bool,
}

/// Adds to a counter that only the holder of one lock changes; other threads may read it.
pub(super) fn add_locked(counter: &AtomicU64, count: u64) {
    counter.store(counter.load(Ordering::Relaxed) + count, Ordering::Relaxed);
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
        let has_comm = comms.is_some();
        let (comm_out, comm_in) = comms.map(Comms::open).transpose()?.unzip();
        let broken = |error| Error::io("a new lane broke", error);
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
            has_patient: AtomicBool::new(false),
            blocked: AtomicBool::new(false),
            in_care: AtomicBool::new(false),
            staging_out: AtomicBool::new(false),
            staging_in: AtomicBool::new(false),
            paused: AtomicBool::new(false),
            beside_out: Beside::default(),
            beside_in: Beside::default(),
            load: AtomicUsize::new(0),
            queued: AtomicUsize::new(0),
            wake_level: AtomicUsize::new(1),
            in_bulk: AtomicBool::new(false),
            attended: AtomicU64::new(0),
            payload_sent: AtomicU64::new(0),
            bytes_sent: AtomicU64::new(0),
            bytes_received: AtomicU64::new(0),
            counters: LaneMeter::default(),
            trace: LaneTrace::new(&context.trace),
            has_comm,
        })
    }

    /// Makes the lane of a stream that replaces a lost one.
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
            trace: lost.trace.clone(),
            ..lane
        })
    }

    /// Returns the identity of the stream within the connection.
    pub(super) fn id(&self) -> StreamId {
        self.id
    }

    /// Returns the index among the connection's lanes.
    pub(super) fn index(&self) -> usize {
        usize::from(self.id.lane)
    }

    /// Returns whether the stream is lost.
    #[inline]
    pub(super) fn is_down(&self) -> bool {
        self.down.get().is_some()
    }

    /// Returns the error that the plugin reported on the lane's comms, if any.
    pub(super) fn comm_error(&self) -> Option<Error> {
        let sending = self.sender.lock().comm_error();
        sending.or_else(|| self.receiver.lock().comm_error())
    }

    /// Marks the stream as lost; returns false if it already was.
    pub(super) fn mark_down(&self, cause: LostCause) -> bool {
        self.down.set((Instant::now(), cause)).is_ok()
    }

    /// Returns why the stream was lost.
    pub(super) fn down_cause(&self) -> LostCause {
        let down = self.down.get();
        down.map_or(LostCause::LaneDropped, |(_, cause)| cause.clone())
    }

    /// Returns how long ago the stream was lost.
    pub(super) fn down_for(&self) -> Duration {
        let down = self.down.get();
        down.map_or(Duration::ZERO, |(at, _)| at.elapsed())
    }

    /// Returns true for the one call that takes the lost lane apart.
    pub(super) fn take_apart(&self) -> bool {
        !self.apart.swap(true, Ordering::AcqRel)
    }

    /// Returns whether the lost lane is being or was taken apart.
    pub(super) fn is_apart(&self) -> bool {
        self.apart.load(Ordering::Acquire)
    }

    /// Returns the peer's address.
    pub(super) fn remote(&self) -> SocketAddr {
        self.remote
    }

    /// Returns the local address.
    pub(super) fn local(&self) -> SocketAddr {
        self.local
    }

    /// Returns the runs with chunks left to take.
    pub(super) fn queued_runs(&self) -> Vec<Arc<Run>> {
        let books = self.books.lock();
        let offers = books.lane.queued_offers();
        offers.map(|Offered(run)| Arc::clone(run)).collect()
    }

    /// Tells the peer why a connection is not made, if the message can be sent at once.
    pub(crate) fn say_goodbye(&self, reason: &str) {
        let mut frame = Vec::new();
        Header::new(Kind::Goodbye, 0).encode_with_text(&mut frame, reason);
        // Whether the message arrives makes no difference here.
        let _ = self.stream.send(&frame, &[], Cursor::default());
        self.stream.shutdown();
    }

    /// Returns the bytes moved in both directions.
    pub(super) fn moved(&self) -> u64 {
        self.payload_sent.load(Ordering::Relaxed) + self.bytes_received.load(Ordering::Relaxed)
    }

    pub(super) fn attended(&self) -> u64 {
        self.attended.load(Ordering::Relaxed)
    }

    /// Records that a caller drives the lane.
    pub(super) fn attend(&self) {
        self.attended.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns whether the peer cannot run before the polling thread leaves the core.
    pub(super) fn needs_this_core(&self) -> bool {
        self.is_local && self.stream.peer_used_this_core()
    }

    /// Returns whether a worker should sleep until many packets have arrived instead of polling.
    /// Within this machine polling costs less: the sender would have to wake the worker.
    pub(super) fn is_worth_a_sleep(&self) -> bool {
        !self.is_local && self.in_bulk.load(Ordering::Relaxed)
    }

    /// Returns whether a sleeping worker must be woken when the stream accepts bytes again.
    pub(super) fn is_blocked(&self) -> bool {
        self.blocked.load(Ordering::Acquire)
    }

    /// Returns whether the lane must be polled: nothing signals the end of an operation.
    pub(super) fn is_staging(&self) -> bool {
        self.staging_out.load(Ordering::Acquire) || self.staging_in.load(Ordering::Acquire)
    }

    /// Returns whether reading is paused until there is room for the contents of the next frame.
    pub(super) fn is_paused(&self) -> bool {
        self.paused.load(Ordering::Acquire)
    }

    pub(super) fn set_paused(&self, yes: bool) {
        self.paused.store(yes, Ordering::Release);
        if yes {
            self.counters.waits_for_room();
        }
    }

    /// Returns whether work is left that nothing will signal: a thread that stops driving the lane
    /// must make sure that another continues.
    pub(super) fn is_unfinished(&self) -> bool {
        self.is_urgent() || self.has_patient()
    }

    /// Returns whether work is left besides frames that wait for others.
    pub(super) fn is_urgent(&self) -> bool {
        self.is_staging() || self.is_blocked() || self.dirty.load(Ordering::Acquire)
    }

    /// Returns whether frames are queued that wait for others to leave with.
    pub(super) fn has_patient(&self) -> bool {
        self.has_patient.load(Ordering::Acquire)
    }

    /// Returns whether the worker drives this lane or watches its current driver.
    pub(super) fn is_in_care(&self) -> bool {
        // Either a leaving worker sees the unfinished work, or this thread sees that it has left.
        fence(Ordering::SeqCst);
        self.in_care.load(Ordering::Relaxed)
    }

    pub(super) fn take_care(&self, yes: bool) {
        self.in_care.store(yes, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Returns whether frames are queued that no thread is sending.
    pub(super) fn is_dirty(&self) -> bool {
        self.dirty.load(Ordering::Acquire) || self.has_patient()
    }

    pub(super) fn mark_dirty(&self) {
        self.dirty.store(true, Ordering::SeqCst);
    }

    /// Queues a small frame.
    pub(super) fn push_control(&self, encode: impl FnOnce(&mut Vec<u8>)) {
        self.books.lock().lane.push_control(encode);
        self.mark_dirty();
    }

    /// Queues a small frame that waits for others to leave with. The calling thread drives the lane:
    /// it looks for such frames before it leaves.
    pub(super) fn push_patient(&self, encode: impl FnOnce(&mut Vec<u8>)) {
        self.books.lock().lane.push_control(encode);
        self.has_patient.store(true, Ordering::SeqCst);
    }

    /// Queues a run; returns false if the lane is closed.
    pub(super) fn push_run(&self, run: &Arc<Run>) -> bool {
        let mut books = self.books.lock();
        let queued = books.lane.offer(Offered(Arc::clone(run)));
        self.note_load(&books);
        drop(books);
        if queued.is_ok() {
            self.mark_dirty();
        }
        queued.is_ok()
    }

    /// Interprets a frame of the peer.
    pub(super) fn handle_frame(&self, header: &Header) -> Result<Meaning<ChunkRef>, Violation> {
        let mut books = self.books.lock();
        let before = books.lane.load();
        let meaning = books.lane.handle_frame(header)?;
        if let Meaning::Acknowledged(chunk) = &meaning {
            let path = self.path_of_chunk(chunk);
            self.counters.written(path, chunk.bytes() as u64);
        }
        if books.lane.load() != before {
            self.note_load(&books);
            // A chunk of this side is settled, so the window has room again.
            if books.lane.has_work() {
                self.mark_dirty();
            }
        }
        Ok(meaning)
    }

    /// Tells the peer that its WRITE chunk has landed, or why it was refused. Returns the number of
    /// such replies that are queued.
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

    /// Sends queued frames while the kernel accepts them and `budget` lasts; tells if it sent any.
    pub(super) fn pump(&self, connection: &Connection, budget: usize) -> Result<bool, Ended> {
        let mut progress = false;
        for _ in 0..budget {
            // Cleared before the check, so that frames added during the step cause another one.
            self.dirty.store(false, Ordering::SeqCst);
            self.has_patient.store(false, Ordering::SeqCst);
            let Some(mut sender) = self.sender.try_lock() else {
                // The holder checks `dirty` again after it releases the lock.
                self.mark_dirty();
                return Ok(progress);
            };
            let sent = sender.step(self, connection);
            sender.trace_step(self, &sent);
            let events = sender.take_events();
            let has_more = sender.has_more();
            let is_waiting = matches!(sent, Ok(Sent::Waiting));
            self.staging_out
                .store(is_waiting || sender.is_beside(), Ordering::Release);
            // Stored under the lock, so that a later result of another thread is not overwritten.
            let is_blocked = matches!(sent, Ok(Sent::Blocked));
            self.note_blocked(is_blocked);
            drop(sender);
            for event in events {
                connection.deliver(self, event);
            }
            match sent? {
                // No further step is needed: every thread that adds work from now on sets `dirty`.
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

    /// Receives available bytes, as far as `budget` lasts, and delivers the events.
    pub(super) fn fill(&self, connection: &Connection, budget: usize) -> Result<Drive, Ended> {
        match self.delivery.try_lock() {
            Some(mut events) => self.fill_with(&mut events, connection, budget),
            None => Ok(Drive::default()),
        }
    }

    /// Receives all available bytes. Waits for the current receiver.
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
            // Other holders release memory, close the lane, or only look: nothing moves.
            let Some(mut receiver) = self.receiver.try_lock() else {
                return Ok(drive);
            };
            let received = receiver.step(self, connection, events);
            receiver.trace_step(self);
            self.staging_in
                .store(receiver.is_staging(), Ordering::Release);
            self.in_bulk
                .store(receiver.left() >= MIN_WAKE_BYTES, Ordering::Relaxed);
            let wants_ack = receiver.wants_ack(connection.ack_every);
            drop(receiver);
            // Usually there are no events, and polling threads should be fast.
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
                    // Acknowledgements leave while data arrives: they open the peer's window.
                    if wants_ack {
                        self.pump(connection, 1)?;
                    }
                }
            }
        }
        drive.more = true;
        Ok(drive)
    }

    /// Prepares for a sleep: in a large payload, one wake-up for many packets is enough.
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

    /// Lowers a wake level that demands more than the `left` bytes. Needs `receiver` locked.
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

    /// Stops using the memory that `which` selects; returns when no call or copy uses it.
    ///
    /// # Errors
    /// A plugin could not be stopped: its comm is closed, and the connection must end.
    pub(super) fn let_go(&self, which: LetGo<'_>) -> Result<(), Error> {
        let sending = self.sender.lock().let_go(which, self);
        // The receiving half checks before each call; taking its lock waits for the current call.
        sending.and(self.receiver.lock().let_go())
    }

    /// Returns whether frames or chunks are in flight or queued.
    pub(super) fn is_busy(&self) -> bool {
        self.books.lock().lane.is_busy()
            || self.is_staging()
            || self.is_paused()
            || self
                .sender
                .try_lock()
                .is_none_or(|sender| !sender.is_idle() || sender.is_staging())
            // The current receiver may be about to find work that must be supervised.
            || self
                .receiver
                .try_lock()
                .is_none_or(|receiver| receiver.left() > 0)
    }
}
