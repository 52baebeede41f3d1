//! Recovery of lost lanes while their connection continues.
//!
//! A driver that finds the stream of a lane broken marks the lane as down. The control thread then
//! takes the stream apart ([`Connection::recover`]): from there on nothing from it lands. READ
//! chunks in flight are requested again at once, WRITE chunks only after the peer has taken the
//! stream apart as well and has reported which chunks had landed. The side that made the connection
//! makes a new stream for the lane; [`Connection::adopt`] puts it to use.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tcpx_proto::connection::{Heard, Known};
use tcpx_proto::frame::down::{Ending, StreamId};

use super::Connection;
use super::ended::Ended;
use super::lane::Lane;
use crate::error::{Error, LostCause};
use crate::link::{Link, Rejoined, Wanted, WantedStream};
use crate::log::limited;
use crate::memory::InterfaceSet;
use crate::stats::{Count, PathKind};
use crate::trace::{End, Kind};
use crate::transfer::{ChunkRef, Run};

/// Bytes in flight on the express lane above which further small transfers use other lanes.
const EXPRESS_BYTES: usize = 256 << 10;

/// Limits how often a plugin may fail in a row, with no chunk arrived in between, before the
/// connection ends: lanes would otherwise be restored for ever.
const MAX_COMM_FAILURES: u32 = 4;

/// Failures within this time count once: one event ends the comms of many lanes.
const SAME_FAILURE: Duration = Duration::from_millis(200);

/// State of a connection that has lost lanes.
#[derive(Default)]
pub(super) struct Lost {
    comm_failures: CommFailures,
    /// Runs that wait for a lane.
    pub(super) parked: Vec<Arc<Run>>,
    /// When the last lane was lost, and the cause of the first loss; `None` while there is a lane.
    pub(super) alone: Option<(Instant, LostCause)>,
}

/// Failures of a plugin between which no chunk has arrived.
#[derive(Default)]
struct CommFailures {
    count: u32,
    last: Option<(Instant, LostCause)>,
    /// Bytes of the chunks that had arrived at the last failure.
    arrived: u64,
}

impl CommFailures {
    /// Records a failure; returns whether the plugin is to be given up.
    fn note(&mut self, arrived: u64, now: Instant, cause: LostCause) -> bool {
        let last = self.last.replace((now, cause));
        let is_same = |(last, _)| now.saturating_duration_since(last) < SAME_FAILURE;
        if self.arrived != arrived {
            self.count = 1;
        } else if !last.is_some_and(is_same) {
            self.count += 1;
        }
        self.arrived = arrived;
        self.count >= MAX_COMM_FAILURES
    }

    /// Returns the cause of the last failure, unless a chunk has arrived since.
    fn cause(&self, arrived: u64) -> Option<LostCause> {
        let last = self.last.as_ref().filter(|_| self.arrived == arrived);
        last.map(|(_, cause)| cause.clone())
    }
}

impl Connection {
    /// Marks a lane as lost. The control thread does the rest.
    pub(super) fn lane_lost(&self, lane: &Lane, cause: LostCause) {
        if lane.mark_down(cause) {
            lane.stream.shutdown();
            self.context.control.lane_lost(self.link());
        }
    }

    /// Returns the lanes that have a stream.
    pub(super) fn live_lanes(&self) -> Vec<Arc<Lane>> {
        let lanes = self.lanes.load();
        lanes.iter().filter(|l| !l.is_down()).cloned().collect()
    }

    /// Takes lost lanes apart, and retries the chunks that were in flight on them. Returns the
    /// actions that would restore the lanes.
    pub(super) fn recover(&self) -> Vec<Wanted> {
        let lanes = self.lanes.load_full();
        for lane in lanes.iter() {
            if !lane.is_down() || lane.is_apart() || self.has_ended() {
                continue;
            }
            if !self.gives_up_plugin(lane) && lane.take_apart() {
                self.let_go_of_lane(lane);
            }
        }
        self.wanted(&lanes)
    }

    /// Ends the connection if the plugin, which has failed on a lost lane, has done nothing else
    /// for a while.
    fn gives_up_plugin(&self, lane: &Lane) -> bool {
        let Some(error) = lane.comm_error() else {
            return false;
        };
        let cause = LostCause::from(error);
        let arrived = self.above.counters().arrived(PathKind::Plugin);
        let mut lost = self.lost.lock();
        let failures = &mut lost.comm_failures;
        let gives_up = failures.note(arrived, Instant::now(), cause.clone());
        drop(lost);
        if gives_up {
            let peer = self.above.name().to_owned();
            self.close(&cause.to_string(), Error::PeerLost { peer, cause });
        }
        gives_up
    }

    /// Returns the plugin's error if it may be why the peer has ended the connection.
    pub(super) fn plugin_cause(&self) -> Option<LostCause> {
        let arrived = self.above.counters().arrived(PathKind::Plugin);
        self.lost.lock().comm_failures.cause(arrived)
    }

    fn let_go_of_lane(&self, lane: &Arc<Lane>) {
        // Runs on the control thread, which holds no lock.
        if let Some(token) = lane.token.get() {
            lane.worker.remove(*token, &lane.stream);
        }
        self.above.counters().count(Count::LanesLost);
        lane.trace.event(Kind::LaneLost, &lane.down_cause());
        self.hear_out(lane);
        // The bytes that the kernel still has are useless.
        lane.stream.reset_when_closed();
        lane.sender.lock().close(lane);
        let receiving = lane.receiver.lock().close(lane, self);
        // Wait for the delivery of bytes received before: the peer learns that they have landed.
        drop(lane.delivery.lock());
        let remains = lane.books.lock().lane.close();
        self.retired.fetch_add(lane.moved(), Ordering::Relaxed);
        let live = self.live_lanes();
        self.note_alone(&live, lane);
        let known = self.losses.lock().close(lane.id(), remains.writes);
        self.messages.tell_down(
            lane.id(),
            &remains.endings,
            carrier_of(&live, self.bulk_lanes).cloned(),
        );
        self.send_messages();
        let mut again: Vec<Arc<Run>> = remains.offers.into_iter().map(|o| o.0).collect();
        // Runs that waited for another message lane.
        again.append(&mut self.lost.lock().parked);
        self.give_back(remains.reads, &mut again);
        for (chunk, error) in receiving {
            match error {
                None => self.give_back([chunk], &mut again),
                Some(error) => {
                    self.trace_settled(&chunk, End::Failed, Some(&error));
                    chunk.run.fail_now(error);
                    self.settle(&chunk.run, None);
                }
            }
        }
        self.resolve(known, &mut again);
        let resent = again.len();
        self.offer_again(again);
        self.pings.changed();
        limited!(
            DEBUG,
            peer = self.above.name(),
            lane = lane.index(),
            cause = %lane.down_cause(),
            runs = resent,
            lanes_left = live.len(),
            "lost a lane"
        );
    }

    /// Records whether a lane is left, after `lost` was lost.
    fn note_alone(&self, live: &[Arc<Lane>], lost: &Lane) {
        let mut state = self.lost.lock();
        if live.is_empty() && state.alone.is_none() {
            state.alone = Some((Instant::now(), lost.down_cause()));
        }
    }

    /// Handles the peer's report that it has taken a stream apart.
    pub(super) fn peer_let_go(&self, stream: StreamId, endings: Vec<Ending>) {
        let heard = self.losses.lock().handle_down(stream, endings);
        match heard {
            Ok(Heard::Close) => {
                let lanes = self.lanes.load();
                if let Some(lane) = lanes.iter().find(|lane| lane.id() == stream) {
                    self.lane_lost(lane, LostCause::LaneDropped);
                }
            }
            Ok(Heard::Never) => {
                let live = self.live_lanes();
                self.messages
                    .tell_down(stream, &[], carrier_of(&live, self.bulk_lanes).cloned());
            }
            Ok(Heard::Known(known)) => {
                let mut again = Vec::new();
                self.resolve(known, &mut again);
                self.offer_again(again);
            }
            Err(violation) => self.end_misbehaved(violation.into()),
        }
    }

    /// Settles WRITE chunks that have landed and returns the others to their runs.
    fn resolve(&self, known: Known<ChunkRef>, again: &mut Vec<Arc<Run>>) {
        for (chunk, ending) in known.settled {
            match ending.refusal {
                Some((status, text)) => {
                    let error = self.refused(status, text.as_bytes());
                    self.trace_settled(&chunk, End::Failed, Some(&error));
                    chunk.run.fail_now(error);
                }
                None => {
                    self.trace_settled(&chunk, End::Done, None);
                    self.count_landed(&chunk);
                }
            }
            self.settle(&chunk.run, None);
        }
        self.give_back(known.again, again);
    }

    /// Returns chunks to their runs, which are added to `again`.
    fn give_back(&self, chunks: impl IntoIterator<Item = ChunkRef>, again: &mut Vec<Arc<Run>>) {
        for chunk in chunks {
            let run = &chunk.run;
            // The application has its memory back:
            // the copy of the unsent bytes was lost with the stream.
            if run.was_let_go() {
                let peer = self.above.name().to_owned();
                let cause = LostCause::LaneDropped;
                run.fail_now(Error::PeerLost { peer, cause });
            }
            self.trace_settled(&chunk, End::LaneLost, None);
            self.above.counters().retried(chunk.bytes() as u64);
            if chunk.give_back() {
                run.conclude_failed();
            } else if !again.iter().any(|known| Arc::ptr_eq(known, run)) {
                again.push(Arc::clone(run));
            }
        }
    }

    fn offer_again(&self, runs: Vec<Arc<Run>>) {
        for run in runs {
            self.offer(&run);
        }
    }

    /// Offers a run to the live lanes; parks it if there is none.
    pub(super) fn offer(&self, run: &Arc<Run>) {
        loop {
            let lanes = self.lanes.load();
            let Some(lane) = self.first_lane(run, &lanes) else {
                if self.park(run) {
                    return;
                }
                continue;
            };
            if lane.index() != self.messages.carrier() {
                // A notification that rides along should not overtake one that waits.
                self.hurry();
            }
            run.lane.store(lane.index(), Ordering::Relaxed);
            let near = self.near_lanes(run, &lanes);
            if run.plan.len() > 1 {
                run.lanes.store(near.clone().count(), Ordering::Relaxed);
            }
            // A lane that was closed meanwhile is down:
            // choose another, unless the connection has ended.
            if !lane.push_run(run) {
                if let Some(error) = self.end.get() {
                    return run.fail_now(error.clone());
                }
                continue;
            }
            // A worker that is awake sends several runs together. An application that posts many
            // runs at once would otherwise make a system call for each.
            let is_left = self.context.config.workers() > 1 && !run.is_short();
            if !is_left || !lane.worker.is_awake() {
                self.pump(lane, 1);
            }
            if lane.is_unfinished() {
                lane.call_worker();
            }
            // Those after it come first: the runs with fewer chunks than lanes would otherwise all
            // share the first few lanes.
            let after = near.clone().filter(|other| other.index() > lane.index());
            let before = near.filter(|other| other.index() < lane.index());
            let others = after.chain(before).filter(|other| !other.is_down());
            for other in others.take(run.plan.len() - 1) {
                if other.push_run(run) {
                    other.call_worker();
                }
            }
            if let Some(error) = self.end.get() {
                // Taking the connection apart fails the chunks in flight.
                run.fail_now(error.clone());
            }
            return;
        }
    }

    /// Chooses the lane on which a run begins: small runs use the express lane, unless it is busy.
    fn first_lane<'a>(&self, run: &Run, lanes: &'a [Arc<Lane>]) -> Option<&'a Arc<Lane>> {
        if run.follows_messages() {
            let carrier = lanes.get(self.messages.carrier());
            return carrier.filter(|lane| !lane.is_down());
        }
        let express = lanes.get(self.bulk_lanes).filter(|lane| !lane.is_down());
        let is_free = |lane: &&Arc<Lane>| lane.load.load(Ordering::Relaxed) < EXPRESS_BYTES;
        if run.is_short()
            && let Some(lane) = express.filter(is_free)
        {
            return Some(lane);
        }
        least_loaded(self.near_lanes(run, lanes), run).or(express)
    }

    /// Returns the bulk lanes that a run uses: the lanes over the interfaces nearest to its memory,
    /// or all lanes if none of these has a stream.
    pub(super) fn near_lanes<'a>(
        &self,
        run: &Run,
        lanes: &'a [Arc<Lane>],
    ) -> impl Iterator<Item = &'a Arc<Lane>> + Clone + use<'a> {
        let bulk = lanes[..self.bulk_lanes].iter();
        let near = run.plan.near;
        let is_usable = |lane: &Arc<Lane>| !lane.is_down() && lane.interface.meets(near);
        let near = match bulk.clone().any(is_usable) {
            true => near,
            false => InterfaceSet::ALL,
        };
        bulk.filter(move |lane| lane.interface.meets(near))
    }

    /// Parks a run until there is a lane. Returns false if there is one by now; fails the run if
    /// the connection has ended.
    fn park(&self, run: &Arc<Run>) -> bool {
        let mut lost = self.lost.lock();
        if let Some(error) = self.end.get() {
            drop(lost);
            run.fail_now(error.clone());
            return true;
        }
        let lanes = self.lanes.load();
        let is_there = |lane: &Arc<Lane>| !lane.is_down();
        let has_lane = match run.follows_messages() {
            true => lanes.get(self.messages.carrier()).is_some_and(is_there),
            false => lanes.iter().any(is_there),
        };
        if has_lane {
            return false;
        }
        run.note_wait();
        lost.parked.push(Arc::clone(run));
        true
    }

    /// Returns the actions that would restore lost lanes: the side that made the connection makes
    /// new streams; the other side checks whether its peer still exists.
    fn wanted(&self, lanes: &[Arc<Lane>]) -> Vec<Wanted> {
        if self.has_ended() {
            return Vec::new();
        }
        let down = lanes.iter().filter(|lane| lane.is_down());
        if !self.was_accepted() {
            return down.map(|lane| Wanted::Stream(lane.index())).collect();
        }
        let is_alone = lanes.iter().all(|lane| lane.is_down());
        let port = self.established.peer_port;
        let addresses = down.filter(|_| is_alone && port != 0).map(|lane| {
            let mut address = lane.remote();
            address.set_port(port);
            address
        });
        let mut wanted: Vec<_> = addresses.collect();
        wanted.dedup();
        wanted.into_iter().map(Wanted::SignOfLife).collect()
    }

    /// Describes the stream that a lost lane needs, with the number of its next generation.
    pub(super) fn wanted_stream(&self, lane: usize) -> Option<WantedStream> {
        let lanes = self.lanes.load();
        let lost = lanes.get(lane)?;
        if self.has_ended() || !lost.is_down() {
            return None;
        }
        let generation = self.next_generation[lane].fetch_add(1, Ordering::Relaxed);
        Some(WantedStream {
            connection: self.established.connection,
            id: StreamId {
                lane: lane as u16,
                generation,
            },
            lanes: lanes.len(),
            local: lost.local().ip(),
            remote: lost.remote(),
            is_last: lanes.iter().all(|lane| lane.is_down()),
        })
    }

    /// Puts a new stream of a lane to use; returns false if the lane no longer needs it.
    pub(super) fn adopt(&self, mut rejoined: Rejoined) -> bool {
        let index = usize::from(rejoined.stream.lane);
        let Some(old) = self.lanes.load().get(index).cloned() else {
            return false;
        };
        if rejoined.stream <= old.id() {
            // A newer stream was faster, and stays.
            return false;
        }
        if !old.is_down() {
            // The peer has detected the loss first.
            self.lane_lost(&old, LostCause::LaneDropped);
        }
        self.recover();
        let owners = std::mem::take(&mut rejoined.owners);
        if self.has_ended() || !self.origin.join(owners) {
            return false;
        }
        let stream = rejoined.stream;
        let lane = match Lane::rejoined(rejoined, &old, self.windows, &self.context) {
            Ok(lane) => Arc::new(lane),
            Err(error) => {
                let peer = self.above.name();
                limited!(DEBUG, peer, %error, "cannot use the new stream of a lane");
                return false;
            }
        };
        // Not before: an open stream must have a lane, or no other stream can be opened for it.
        if !self.losses.lock().open(stream) {
            return false;
        }
        lane.counters.belongs_to(self.above.counters());
        self.above.counters().count(Count::LanesRejoined);
        lane.trace.event(Kind::LaneBack, &old.down_cause());
        let mut lanes = (**self.lanes.load()).clone();
        lanes[index] = Arc::clone(&lane);
        // Let the new lane share the runs that other lanes have queued.
        let others = lanes.iter().filter(|l| l.index() != index && !l.is_down());
        let mut runs: Vec<Arc<Run>> = Vec::new();
        for other in others {
            runs.extend(other.queued_runs());
        }
        let mut lost = self.lost.lock();
        let parked = std::mem::take(&mut lost.parked);
        let alone = lost.alone.take();
        self.lanes.store(Arc::new(lanes));
        drop(lost);
        if let Err(error) = self.start_lane(&lane) {
            self.lane_lost(&lane, error.into());
        }
        self.messages.rejoined(&lane, index >= self.bulk_lanes);
        // The express lane does not take part in bulk runs.
        let lanes = self.lanes.load();
        let joins = |run: &&Arc<Run>| {
            !run.follows_messages() && self.near_lanes(run, &lanes).any(|l| l.index() == index)
        };
        for run in runs.iter().filter(joins) {
            lane.push_run(run);
        }
        self.offer_again(parked);
        lane.call_worker();
        self.note_failover(&lane, &old, alone);
        true
    }

    fn note_failover(&self, lane: &Lane, old: &Lane, alone: Option<(Instant, LostCause)>) {
        let after = old.down_for();
        limited!(
            INFO,
            peer = self.above.name(),
            lane = lane.index(),
            cause = %old.down_cause(),
            ?after,
            was_cut_off = alone.is_some(),
            "a lost lane is restored"
        );
    }

    /// Returns whether there is a lane, and every lost one was taken apart.
    pub(super) fn is_settled(&self) -> bool {
        let lanes = self.lanes.load();
        let mut down = lanes.iter().filter(|lane| lane.is_down());
        down.all(|lane| lane.is_apart()) && lanes.iter().any(|lane| !lane.is_down())
    }

    /// Handles the end of a lane: most causes break only its stream.
    pub(super) fn lane_ended(&self, lane: &Lane, ended: Ended) {
        let peer = self.above.name().to_owned();
        match ended {
            Ended::Broken(cause) => self.lane_lost(lane, cause),
            Ended::Lost(cause @ LostCause::NotificationTooLong { .. }) => {
                // The peer is not at fault, so it is told the reason.
                let reason = cause.to_string();
                self.close(&reason, Error::PeerLost { peer, cause });
            }
            Ended::Lost(cause) => self.end_with(Error::PeerLost { peer, cause }),
            Ended::Misbehaved(what) => self.end_misbehaved(what),
        }
    }
}

/// Chooses the message lane: the express lane, or else the first lane, on which lone transfers
/// begin as well. So a notification that rides along does not overtake the notification of the
/// previous transfer.
pub(super) fn carrier_of(lanes: &[Arc<Lane>], bulk_lanes: usize) -> Option<&Arc<Lane>> {
    let mut express = lanes.iter().filter(|lane| lane.index() >= bulk_lanes);
    express.next().or_else(|| lanes.first())
}

/// Returns the live lane with the fewest bytes in flight, counting a chunk for each run that it has
/// queued: of many runs that are posted together, a worker takes chunks later.
fn least_loaded<'a>(
    lanes: impl Iterator<Item = &'a Arc<Lane>>,
    run: &Run,
) -> Option<&'a Arc<Lane>> {
    let chunk_bytes = run.plan.bytes as usize / run.plan.len().max(1);
    lanes.filter(|lane| !lane.is_down()).min_by_key(|lane| {
        let queued = lane.queued.load(Ordering::Relaxed);
        lane.load.load(Ordering::Relaxed) + queued.saturating_mul(chunk_bytes)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const CAUSE: LostCause = LostCause::LaneDropped;

    #[test]
    fn plugin_that_only_fails_is_given_up() {
        let start = Instant::now();
        let at = |round: u32| start + round * SAME_FAILURE;
        let mut failures = CommFailures::default();
        for round in 0..MAX_COMM_FAILURES - 1 {
            // Several lanes fail at the same moment.
            assert!(!failures.note(0, at(2 * round), CAUSE));
            assert!(!failures.note(0, at(2 * round) + SAME_FAILURE / 2, CAUSE));
        }
        assert!(failures.note(0, at(2 * MAX_COMM_FAILURES), CAUSE));
        assert_eq!(failures.cause(0), Some(CAUSE));
    }

    #[test]
    fn plugin_that_works_between_failures_is_kept() {
        let start = Instant::now();
        let mut failures = CommFailures::default();
        for round in 1..100 {
            let arrived = u64::from(round / (MAX_COMM_FAILURES - 1));
            assert!(!failures.note(arrived, start + round * SAME_FAILURE, CAUSE));
            assert_eq!(failures.cause(arrived + 1), None);
        }
    }
}
