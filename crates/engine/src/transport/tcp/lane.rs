//! One TCP stream of a connection.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use tcpx_net::{Stream, set_congestion_control};

use super::Connection;
use super::rx::{Ended, Received, Rx};
use super::tx::{Sent, Tx, Work};
use crate::core::Core;
use crate::error::Error;
use crate::plan::Chunk;
use crate::progress::Worker;
use crate::run::Run;
use crate::transport::plugin::Comms;

/// A sleeping receiver of a large payload is woken for this much. Well below any receive buffer: near it, the
/// sender would have no room left to send what the receiver waits for.
const BULK_WAKE_BYTES: usize = 256 << 10;

/// A chunk that has been sent or asked for and is not settled.
pub(super) struct Flying {
    pub(super) run: Arc<Run>,
    pub(super) index: usize,
}

impl Flying {
    pub(super) fn chunk(&self) -> &Chunk {
        self.run.plan.chunk(self.index)
    }
}

/// Chunks in flight on a lane, oldest first; neither queue is longer than the window.
#[derive(Default)]
pub(super) struct InFlight {
    pub(super) writes: VecDeque<Flying>,
    pub(super) reads: VecDeque<Flying>,
}

/// One TCP stream of a connection.
pub(crate) struct Lane {
    pub(super) stream: Stream,
    pub(crate) local: SocketAddr,
    pub(crate) remote: SocketAddr,
    /// Whether the peer is on this machine.
    pub(super) is_local: bool,
    /// The thread that drives this lane when nobody else does, and its name for it.
    pub(super) worker: Arc<Worker>,
    pub(super) token: OnceLock<u64>,
    pub(super) tx: Mutex<Tx>,
    pub(super) rx: Mutex<Rx>,
    pub(super) work: Mutex<Work>,
    pub(super) in_flight: Mutex<InFlight>,
    /// Something was added to `work` (or may now leave it) since the last look.
    pub(super) dirty: AtomicBool,
    /// The kernel took no more bytes at the last attempt.
    pub(super) blocked: AtomicBool,
    /// The worker drives the lane, or watches whether another does.
    in_care: AtomicBool,
    /// Copies to or from a device are under way, or wait for a slot: nobody reports their end, so it must
    /// be looked for.
    pub(super) staging_out: AtomicBool,
    pub(super) staging_in: AtomicBool,
    /// The comms beside the stream, if there are any.
    pub(super) comm_out: CommWatch,
    pub(super) comm_in: CommWatch,
    /// The peer's WRITE chunks that have been dealt with.
    pub(super) landed: AtomicU64,
    /// How many of those the peer has been told of. ≤ landed; written by the holder of `tx`.
    pub(super) acked: AtomicU64,
    /// Our WRITE chunks that the peer has acknowledged.
    pub(super) acknowledged: AtomicU64,
    /// Bytes of our chunks in flight.
    pub(super) load: AtomicUsize,
    /// The stream is reported as readable once this many bytes are there. More than 1 only while at
    /// least that much of a payload is still to come; changes under the lock of `rx`.
    pub(super) wake_level: AtomicUsize,
    /// Counts drives by callers: while it moves, the worker stands back.
    pub(super) attended: AtomicU64,
    /// Payload bytes that the kernel took. Unlike our own pings they show that the peer still reads.
    pub(super) payload_sent: AtomicU64,
    pub(crate) bytes_sent: AtomicU64,
    pub(crate) bytes_received: AtomicU64,
}

/// What others may know of a comm.
#[derive(Default)]
pub(super) struct CommWatch {
    /// The plugin has messages in hand.
    waiting: AtomicBool,
    /// Bytes of messages that were completed.
    moved: AtomicU64,
}

impl CommWatch {
    pub(super) fn update(&self, waiting: bool, moved: u64) {
        self.waiting.store(waiting, Ordering::Relaxed);
        self.moved.fetch_add(moved, Ordering::Relaxed);
    }

    /// How much it has moved, if something is to be moved.
    pub(super) fn moved(&self) -> Option<u64> {
        let moved = self.moved.load(Ordering::Relaxed);
        self.waiting.load(Ordering::Relaxed).then_some(moved)
    }
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
    pub(crate) fn new(
        stream: Stream,
        early: &[u8],
        comms: Option<Comms>,
        core: &Core,
    ) -> std::io::Result<Self> {
        let flows = comms.map(Comms::open).transpose();
        let (outflow, inflow) = flows.map_err(std::io::Error::other)?.unzip();
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
            tx: Mutex::new(Tx::new(core.staging.pool.slot_bytes(), outflow)),
            rx: Mutex::new(Rx::new(early, inflow)),
            work: Mutex::default(),
            in_flight: Mutex::default(),
            dirty: AtomicBool::new(false),
            blocked: AtomicBool::new(false),
            in_care: AtomicBool::new(false),
            staging_out: AtomicBool::new(false),
            staging_in: AtomicBool::new(false),
            comm_out: CommWatch::default(),
            comm_in: CommWatch::default(),
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

    /// Whether somebody must look again soon, though nothing will be reported.
    pub(crate) fn is_staging(&self) -> bool {
        self.staging_out.load(Ordering::Acquire) || self.staging_in.load(Ordering::Acquire)
    }

    /// Whether something is left that nobody will report: whoever stops driving the lane must see that another goes on.
    pub(super) fn is_unfinished(&self) -> bool {
        self.is_staging() || self.is_blocked() || self.is_dirty()
    }

    /// Whether the worker drives the lane, or watches whether another does.
    pub(super) fn is_in_care(&self) -> bool {
        // What was found unfinished is seen by a worker that is leaving, or else that it has left is seen here.
        fence(Ordering::SeqCst);
        self.in_care.load(Ordering::Relaxed)
    }

    pub(crate) fn take_care(&self, yes: bool) {
        self.in_care.store(yes, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Whether there is something to send that nobody is sending.
    pub(crate) fn is_dirty(&self) -> bool {
        self.dirty.load(Ordering::Acquire)
    }

    pub(super) fn mark_dirty(&self) {
        self.dirty.store(true, Ordering::SeqCst);
    }

    /// Queues a small frame.
    pub(super) fn push_control(&self, encode: impl FnOnce(&mut Vec<u8>)) {
        let mut work = self.work.lock();
        if !work.closed {
            encode(&mut work.control);
        }
        drop(work);
        self.mark_dirty();
    }

    /// Queues a run; false when the connection has ended.
    pub(super) fn push_run(&self, run: &Arc<Run>) -> bool {
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
    pub(super) fn call_worker(&self) {
        if let Some(token) = self.token.get() {
            self.worker.call(*token);
        }
    }

    /// Sends what is waiting, as far as the kernel takes it and `budget` lasts. Returns whether bytes
    /// went out.
    pub(super) fn pump(&self, connection: &Arc<Connection>, budget: usize) -> Result<bool, Ended> {
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
            let idle = tx.is_idle() && !tx.is_staging();
            self.staging_out
                .store(sent == Sent::Waiting || tx.is_flowing(), Ordering::Release);
            // With the lock: what another thread finds out after us is not overwritten.
            self.blocked.store(sent == Sent::Blocked, Ordering::Release);
            drop(tx);
            match sent {
                // Not worth another look: whoever adds work from now on marks it.
                Sent::Some if idle && self.work.lock().is_empty() => {
                    progress = true;
                    if !self.dirty.load(Ordering::SeqCst) {
                        return Ok(progress);
                    }
                }
                Sent::Some => progress = true,
                Sent::Blocked | Sent::Waiting => return Ok(progress),
                Sent::Nothing if !self.dirty.load(Ordering::SeqCst) => return Ok(progress),
                Sent::Nothing => {}
            }
        }
        self.mark_dirty();
        Ok(progress)
    }

    /// Receives what is there, as far as `budget` lasts.
    pub(super) fn fill(&self, connection: &Arc<Connection>, budget: usize) -> Result<Drive, Ended> {
        let mut drive = Drive::default();
        for _ in 0..budget {
            let Some(mut rx) = self.rx.try_lock() else {
                return Ok(drive);
            };
            let received = rx.step(self, connection)?;
            self.staging_in.store(rx.is_staging(), Ordering::Release);
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
    pub(super) fn unacked(&self) -> u64 {
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
    pub(super) fn lower_wake_level(&self, left: usize) {
        if left < self.wake_level.load(Ordering::Relaxed) {
            self.set_wake_level(1);
        }
    }

    pub(super) fn set_wake_level(&self, bytes: usize) {
        if self.wake_level.swap(bytes, Ordering::Relaxed) != bytes
            && self.stream.set_wake_level(bytes).is_err()
        {
            self.wake_level.store(1, Ordering::Relaxed);
        }
    }

    /// Stops the current system calls' use of memory for which `is_hit` holds, and with
    /// `regions_too` of memory that was revoked. Returns once no call uses it any more.
    ///
    /// # Errors
    /// A plugin could not be made to: its comm is closed, and the connection must end.
    pub(super) fn let_go(
        &self,
        is_hit: impl FnMut(&Arc<Run>) -> bool,
        regions_too: bool,
    ) -> Result<(), Error> {
        let sending = self.tx.lock().let_go(is_hit, regions_too);
        // The receiving half looks before each call; taking its lock waits for the current one.
        sending.and(self.rx.lock().let_go())
    }

    /// Whether something is in flight or waiting to leave.
    pub(super) fn is_busy(&self) -> bool {
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
        self.is_staging()
            || self
                .tx
                .try_lock()
                .is_none_or(|tx| !tx.is_idle() || tx.is_staging())
            // Whoever is receiving may be about to find something that has to be watched.
            || self.rx.try_lock().is_none_or(|rx| rx.left() > 0)
    }
}
