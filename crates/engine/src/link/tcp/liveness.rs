//! Detection of connections that no longer make progress.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tcpx_proto::frame::down::StreamId;
use tcpx_proto::lane::{Silence, Stall};

use super::Connection;
use super::lane::Lane;
use crate::error::{Error, LostCause};
use crate::link::Link;

/// Time that a peer has to reconnect after it has closed every lane in an orderly way, if it had
/// made the connection.
const ORDERLY: Duration = Duration::from_secs(1);

/// Limits for silence on one lane while others work, and on all lanes. Far above the time that TCP
/// needs to repair a loss, below the interval of its retries after a long outage.
const ONE_SILENT: Duration = Duration::from_secs(1);
const ALL_SILENT: Duration = Duration::from_secs(3);

/// Limits how much of the time since the last check counts as a lane's silence.
const LATE: Duration = Duration::from_millis(500);

/// State of a connection that the control thread recorded at its last check.
pub(super) struct Liveness {
    epoch: Instant,
    silence: Silence,
    stream: Stall,
    /// Stall timer of the paused lanes.
    paused: Stall,
    /// Stall timers of payload beside the stream: two for each lane.
    beside: Vec<Stall>,
    /// State of each lane.
    lanes: Vec<Watched>,
}

/// Recorded state of a lane's stream.
struct Watched {
    id: StreamId,
    /// Stall timer of bytes in both directions, while the lane has work.
    moves: Stall,
    /// Stall timer of sent bytes that the peer's kernel acknowledges, while some are in flight.
    arrives: Stall,
}

impl Watched {
    fn new(lane: &Lane) -> Self {
        Self {
            id: lane.id(),
            moves: Stall::default(),
            arrives: Stall::default(),
        }
    }
}

impl Liveness {
    pub(super) fn new() -> Self {
        Self {
            epoch: Instant::now(),
            silence: Silence::default(),
            stream: Stall::default(),
            paused: Stall::default(),
            beside: Vec::new(),
            lanes: Vec::new(),
        }
    }

    /// Returns for how long the paused lanes have received nothing.
    fn paused_for(&mut self, lanes: &[Arc<Lane>], passed: Duration) -> Duration {
        self.stream = Stall::default();
        let paused = lanes.iter().filter(|lane| lane.is_paused());
        let received = paused.map(|lane| lane.bytes_received.load(Ordering::Relaxed));
        self.paused.look(Some(received.sum()), passed)
    }

    /// Checks each lane: sends a ping on lanes that have work and make no progress. Returns for
    /// each lane how long nothing that was sent has arrived.
    fn watch_lanes(&mut self, lanes: &[Arc<Lane>], passed: Duration) -> Vec<Duration> {
        // Checks are frequent: a late one means that this process did not run.
        let passed = passed.min(LATE);
        let mut silent = Vec::with_capacity(lanes.len());
        self.lanes.retain(|w| lanes.iter().any(|l| l.id() == w.id));
        for lane in lanes {
            let at = match self.lanes.iter().position(|w| w.id == lane.id()) {
                Some(at) => at,
                None => {
                    self.lanes.push(Watched::new(lane));
                    self.lanes.len() - 1
                }
            };
            let watched = &mut self.lanes[at];
            let moved = lane.is_busy().then(|| lane.moved());
            if watched.moves.look(moved, passed) > Duration::ZERO {
                // The ping shows whether the path is open.
                lane.push_ping(0);
                lane.call_worker();
            }
            let delivery = lane.stream.delivery().ok();
            let arrived = delivery.filter(|d| d.is_under_way).map(|d| d.acknowledged);
            silent.push(watched.arrives.look(arrived, passed));
        }
        silent
    }

    /// Returns for how long payload beside the streams has not moved although it should, if that
    /// exceeds the limit. Pings on the stream do not cover it: a plugin may lose a connection
    /// silently.
    fn beside_stalled(
        &mut self,
        lanes: &[Arc<Lane>],
        passed: Duration,
        limit: Duration,
    ) -> Option<Duration> {
        let beside = lanes.iter().flat_map(|l| [&l.beside_out, &l.beside_in]);
        self.beside.resize(2 * lanes.len(), Stall::default());
        let stalls = self.beside.iter_mut().zip(beside);
        let longest = stalls.map(|(stall, beside)| stall.look(beside.moved(), passed));
        longest.max().filter(|longest| *longest >= limit)
    }
}

impl Connection {
    /// Checks whether a connection with outstanding work makes progress; pings the peer, and ends
    /// the connection if no answer arrived within `timeout`. Returns whether work is outstanding.
    pub(super) fn look_after(&self, now: Instant, timeout: Duration) -> bool {
        if self.give_up_alone(now, timeout) {
            return true;
        }
        let lanes = self.live_lanes();
        let has_work = self.losses.lock().is_waiting() || self.messages.kept() > 0;
        if !has_work && !self.above.is_waiting() && !lanes.iter().any(|lane| lane.is_busy()) {
            *self.liveness.lock() = Liveness::new();
            return false;
        }
        let moved = lanes.iter().map(|lane| lane.moved()).sum::<u64>();
        let moved = moved + self.retired.load(Ordering::Relaxed);
        let mut liveness = self.liveness.lock();
        let since_epoch = now.saturating_duration_since(liveness.epoch);
        let passed = liveness.silence.passed(since_epoch, timeout);
        let silent = liveness.watch_lanes(&lanes, passed);
        self.drop_silent(&lanes, &silent, timeout);
        if lanes.iter().any(|lane| lane.is_paused()) {
            let after = liveness.paused_for(&lanes, passed);
            drop(liveness);
            self.look_after_paused(after, timeout);
            return true;
        }
        let beside = liveness.beside_stalled(&lanes, passed, timeout);
        let stalled = liveness.stream.look(Some(moved), passed);
        liveness.paused = Stall::default();
        drop(liveness);
        let peer = self.above.name().to_owned();
        if let Some(after) = beside {
            self.end_with(Error::PluginStalled { peer, after });
        } else if stalled >= timeout {
            let after = stalled;
            self.end_with(Error::PeerSilent { peer, after });
        } else if stalled > Duration::ZERO {
            // A healthy peer answers even if it has nothing else to send.
            for lane in &lanes {
                lane.push_ping(0);
                lane.call_worker();
            }
        }
        true
    }

    /// Drops lanes on which nothing arrives any more. One of several is dropped soon, because the
    /// others carry the work; if all are silent, TCP has more time to recover.
    fn drop_silent(&self, lanes: &[Arc<Lane>], silent: &[Duration], timeout: Duration) {
        let one = ONE_SILENT.min(timeout / 4);
        let all = ALL_SILENT.min(timeout / 2);
        let are_all = silent.iter().all(|after| *after >= one);
        let limit = if are_all { all } else { one };
        for (lane, after) in lanes.iter().zip(silent) {
            if *after >= limit {
                self.lane_lost(lane, LostCause::LaneSilent { after: *after });
            }
        }
    }

    /// Handles a connection that has lost all its lanes: ends it if none is restored within
    /// `timeout`. Returns whether it has no lane.
    fn give_up_alone(&self, now: Instant, timeout: Duration) -> bool {
        let Some((since, cause)) = self.lost.lock().alone.clone() else {
            return false;
        };
        // A live peer restores its lanes at once, unless the network prevents that; a peer that
        // closes them in an orderly way has left.
        let limit = match cause {
            LostCause::ClosedByPeer if self.was_accepted() => timeout.min(ORDERLY),
            _ => timeout,
        };
        if now.saturating_duration_since(since) >= limit {
            let peer = self.above.name().to_owned();
            self.end_with(Error::PeerLost { peer, cause });
        }
        true
    }

    /// Handles a connection with paused lanes. This side does not read, so the peer's silence means
    /// nothing. If the application takes nothing for half of the permitted silence, the connection
    /// ends, before the peer, which may hear nothing either, assumes that this side is dead.
    fn look_after_paused(&self, after: Duration, timeout: Duration) {
        if after < timeout / 2 {
            // In case the lanes were not called: room may also come from other peers.
            let lanes = self.live_lanes();
            let paused = lanes.iter().filter(|lane| lane.is_paused());
            return paused.for_each(|lane| lane.call_worker());
        }
        let cause = LostCause::NotTaken { after };
        let peer = self.above.name().to_owned();
        self.close(
            "its application does not take the notifications or tagged messages from this peer",
            Error::PeerLost { peer, cause },
        );
    }
}
