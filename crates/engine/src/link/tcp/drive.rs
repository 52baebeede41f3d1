//! Driving a lane without waiting, for polling callers and for worker threads.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tcpx_net::Stream;

use super::Connection;
use super::lane::Lane;
use crate::link::{Drive, Driven};

/// Limits the system calls in each direction before other lanes have their turn: few, since one
/// call may move a whole chunk.
pub(super) const BUDGET: usize = 4;

/// Keeps a caller that polls a large transfer from asking the kernel too often whether it accepts
/// more bytes: each call takes the socket's lock, which incoming acknowledgements need.
pub(super) struct Pause {
    epoch: Instant,
    /// End of the pause, in nanoseconds after the epoch.
    until: AtomicU64,
}

impl Pause {
    const LENGTH: Duration = Duration::from_micros(10);

    pub(super) fn new() -> Self {
        Self {
            epoch: Instant::now(),
            until: AtomicU64::new(0),
        }
    }

    pub(super) fn is_over(&self) -> bool {
        self.epoch.elapsed().as_nanos() as u64 >= self.until.load(Ordering::Relaxed)
    }

    pub(super) fn begin(&self) {
        let until = self.epoch.elapsed() + Self::LENGTH;
        self.until.store(until.as_nanos() as u64, Ordering::Relaxed);
    }
}

impl Connection {
    /// Moves bytes on one lane without waiting, for a polling caller. Frames that wait for others
    /// leave with this call if an earlier one has left them.
    pub(super) fn attend(&self, lane: &Lane) -> Drive {
        lane.attend();
        let drive = match lane.has_patient() {
            true => self.drive(lane, BUDGET),
            false => self.drive_if(lane, BUDGET, Lane::is_urgent),
        };
        // The caller may leave now, and the kernel will not report bytes that it has already read.
        if lane.is_unfinished() && !lane.is_in_care() {
            lane.call_worker();
        }
        drive
    }

    /// Moves bytes on one lane without waiting.
    pub(super) fn drive(&self, lane: &Lane, budget: usize) -> Drive {
        self.drive_if(lane, budget, Lane::is_unfinished)
    }

    /// Receives, and sends if `is_needed`.
    fn drive_if(&self, lane: &Lane, budget: usize, is_needed: impl Fn(&Lane) -> bool) -> Drive {
        let mut drive = match lane.fill(self, budget) {
            Ok(drive) => drive,
            Err(ended) => {
                self.lane_ended(lane, ended);
                return Drive::default();
            }
        };
        if is_needed(lane) {
            drive.progress |= self.pump(lane, budget);
            drive.more |= lane.is_dirty();
        }
        drive
    }

    /// Sends queued frames on a lane, as far as possible without waiting;
    /// returns whether bytes were sent.
    pub(super) fn pump(&self, lane: &Lane, budget: usize) -> bool {
        lane.pump(self, budget).unwrap_or_else(|ended| {
            self.lane_ended(lane, ended);
            false
        })
    }

    /// Receives the bytes that arrived on a lane before its end: the peer may have sent the reason.
    pub(super) fn hear_out(&self, lane: &Lane) {
        if let Err(ended) = lane.hear_out(self) {
            self.lane_ended(lane, ended);
        }
    }
}

/// One lane, as its worker thread knows it.
pub(super) struct DrivenLane {
    pub(super) connection: Arc<Connection>,
    pub(super) lane: Arc<Lane>,
}

impl DrivenLane {
    fn lane(&self) -> &Lane {
        &self.lane
    }
}

impl Driven for DrivenLane {
    fn work(&self) -> Drive {
        self.connection.drive(&self.lane, BUDGET)
    }

    fn is_dead(&self) -> bool {
        self.lane.is_down() || self.connection.has_ended()
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

    fn is_worth_a_sleep(&self) -> bool {
        self.lane().is_worth_a_sleep()
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
