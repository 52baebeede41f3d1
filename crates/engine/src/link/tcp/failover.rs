//! Lanes that are lost while their connection goes on.
//!
//! Whoever drives a lane and finds its stream broken marks the lane as down. The control thread then
//! lets go of the stream ([`Connection::recover`]): from there on nothing lands from it. READ chunks
//! that were in flight are asked for again at once, WRITE chunks once the peer has let go of the stream
//! too and has said what had landed. The side that made the connection makes a new stream for the lane;
//! [`Connection::adopt`] puts it to use.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use tcpx_proto::connection::{Heard, Known};
use tcpx_proto::frame::down::{Ending, StreamId};

use super::Connection;
use super::lane::Lane;
use super::receive::Ended;
use crate::error::{Error, LostCause};
use crate::link::{Link, Rejoined, Wanted};
use crate::log::limited;
use crate::memory::InterfaceSet;
use crate::transfer::{ChunkRef, Run};

/// Bytes in flight on the lane for small transfers, above which further ones take other lanes.
const EXPRESS_BYTES: usize = 256 << 10;

/// What a connection has lost.
#[derive(Default)]
pub(super) struct Lost {
    /// Runs that wait for a lane.
    pub(super) parked: Vec<Arc<Run>>,
    /// When the last lane was lost, and why the first of them was; none while there is a lane.
    pub(super) alone: Option<(Instant, LostCause)>,
}

impl Connection {
    /// Takes note that a lane is lost. The control thread does the rest.
    pub(super) fn lane_lost(&self, lane: &Lane, cause: LostCause) {
        if lane.mark_down(cause) {
            lane.stream.shutdown();
            self.context.control.lane_lost(self.link());
        }
    }

    /// The lanes that have a stream.
    pub(super) fn live_lanes(&self) -> Vec<Arc<Lane>> {
        let lanes = self.lanes.load();
        lanes.iter().filter(|l| !l.is_down()).cloned().collect()
    }

    /// Lets go of lanes that were lost, and sees to what was in flight on them. Returns what would bring
    /// the lanes back.
    pub(super) fn recover(&self) -> Vec<Wanted> {
        let lanes = self.lanes.load_full();
        for lane in lanes.iter() {
            if lane.is_down() && !self.has_ended() && lane.take_apart() {
                self.let_go_of_lane(lane);
            }
        }
        self.wanted(&lanes)
    }

    fn let_go_of_lane(&self, lane: &Arc<Lane>) {
        // From the control thread, which holds no lock.
        if let Some(token) = lane.token.get() {
            lane.worker.remove(*token, &lane.stream);
        }
        self.hear_out(lane);
        // What the kernel still has of it is of no use to anybody.
        lane.stream.reset_when_closed();
        lane.sender.lock().close();
        let receiving = lane.receiver.lock().close(self);
        // What was received before is being delivered: the peer learns that it has landed.
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
        // Those that waited for another lane to carry messages.
        again.append(&mut self.lost.lock().parked);
        self.give_back(remains.reads, &mut again);
        for (chunk, error) in receiving {
            match error {
                None => self.give_back([chunk], &mut again),
                Some(error) => {
                    chunk.run.fail_now(error);
                    self.settle(&chunk.run);
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
            "a lane is lost"
        );
    }

    /// Notes whether a lane is left, after `lost` was lost.
    fn note_alone(&self, live: &[Arc<Lane>], lost: &Lane) {
        let mut state = self.lost.lock();
        if live.is_empty() && state.alone.is_none() {
            state.alone = Some((Instant::now(), lost.down_cause()));
        }
    }

    /// Takes the peer's word that it has let go of a stream.
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

    /// Settles WRITE chunks that have landed and gives back those that have not.
    fn resolve(&self, known: Known<ChunkRef>, again: &mut Vec<Arc<Run>>) {
        for (chunk, ending) in known.settled {
            if let Some((status, text)) = ending.refusal {
                chunk.run.fail_now(self.refused(status, text.as_bytes()));
            }
            self.settle(&chunk.run);
        }
        self.give_back(known.again, again);
    }

    /// Gives chunks back to their runs, which are added to `again`.
    fn give_back(&self, chunks: impl IntoIterator<Item = ChunkRef>, again: &mut Vec<Arc<Run>>) {
        for chunk in chunks {
            let run = &chunk.run;
            // Its memory is the application's again: what was left of it went with the stream.
            if run.was_let_go() {
                let peer = self.above.name().to_owned();
                let cause = LostCause::LaneDropped;
                run.fail_now(Error::PeerLost { peer, cause });
            }
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

    /// Offers a run to the lanes that are there; it waits if there is none.
    pub(super) fn offer(&self, run: &Arc<Run>) {
        loop {
            let lanes = self.lanes.load();
            let Some(lane) = self.first_lane(run, &lanes) else {
                if self.park(run) {
                    return;
                }
                continue;
            };
            run.lane.store(lane.index(), Ordering::Relaxed);
            let near = self.near_lanes(run, &lanes);
            if run.plan.len() > 1 {
                run.lanes.store(near.clone().count(), Ordering::Relaxed);
            }
            // Where it was closed meanwhile it is down, and another one is found, or all has ended.
            if !lane.push_run(run) {
                if let Some(error) = self.end.get() {
                    return run.fail_now(error.clone());
                }
                continue;
            }
            // A worker that is awake sends several runs together. An application that posts many at
            // once would make a system call for each.
            let is_left = self.context.config.workers() > 1 && !run.is_short();
            if !is_left || !lane.worker.is_awake() {
                self.pump(lane, 1);
            }
            if lane.is_unfinished() {
                lane.call_worker();
            }
            let others = near.filter(|other| other.index() != lane.index());
            for other in others.take(run.plan.len() - 1) {
                if other.push_run(run) {
                    other.call_worker();
                }
            }
            if let Some(error) = self.end.get() {
                // Chunks in flight are failed by whoever takes the connection apart.
                run.fail_now(error.clone());
            }
            return;
        }
    }

    /// Chooses the lane that a run begins on: small ones take the lane that is kept for them, unless it
    /// has enough to do.
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
        least_loaded(self.near_lanes(run, lanes)).or(express)
    }

    /// The lanes for bulk that a run uses: those over the interfaces nearest to its memory, or all
    /// where none of those has a stream.
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

    /// Keeps a run until there is a lane; false if there is one by now, or the connection has ended and
    /// nobody would look.
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
        lost.parked.push(Arc::clone(run));
        true
    }

    /// Says what would bring lost lanes back: new streams from the side that made the connection; the
    /// other side learns whether its peer still exists.
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

    /// Puts a new stream of a lane to use; false where nobody waits for it any more.
    pub(super) fn adopt(&self, mut rejoined: Rejoined) -> bool {
        let index = usize::from(rejoined.stream.lane);
        let Some(old) = self.lanes.load().get(index).cloned() else {
            return false;
        };
        if rejoined.stream <= old.id() {
            // It has taken longer than a newer one, which stays.
            return false;
        }
        if !old.is_down() {
            // The peer has noticed first.
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
                limited!(DEBUG, peer = self.above.name(), %error, "a lane did not come back");
                return false;
            }
        };
        // Not before: one that is open must have a lane, or no other can be opened.
        if !self.losses.lock().open(stream) {
            return false;
        }
        let mut lanes = (**self.lanes.load()).clone();
        lanes[index] = Arc::clone(&lane);
        // Runs that the others have in hand: this one takes part.
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
        // The lane for small transfers does not join in the others' work.
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
            "a lane that was lost is back"
        );
    }

    /// Whether there is a lane, and every lost one was let go of.
    pub(super) fn is_settled(&self) -> bool {
        let lanes = self.lanes.load();
        let mut down = lanes.iter().filter(|lane| lane.is_down());
        down.all(|lane| lane.is_apart()) && lanes.iter().any(|lane| !lane.is_down())
    }

    /// Deals with the end of a lane: most break the stream alone.
    pub(super) fn lane_ended(&self, lane: &Lane, ended: Ended) {
        let peer = self.above.name().to_owned();
        match ended {
            Ended::Broken(cause) => self.lane_lost(lane, cause),
            Ended::Lost(cause @ LostCause::NotificationTooLong { .. }) => {
                // The peer has done nothing wrong: it is told.
                let reason = cause.to_string();
                self.close(&reason, Error::PeerLost { peer, cause });
            }
            Ended::Lost(cause) => self.end_with(Error::PeerLost { peer, cause }),
            Ended::Misbehaved(what) => self.end_misbehaved(what),
        }
    }
}

/// Chooses the lane for messages: the express lane, or else the first, which lone transfers begin on,
/// too. So a notification that rides along does not overtake the one of the transfer before.
pub(super) fn carrier_of(lanes: &[Arc<Lane>], bulk_lanes: usize) -> Option<&Arc<Lane>> {
    let mut express = lanes.iter().filter(|lane| lane.index() >= bulk_lanes);
    express.next().or_else(|| lanes.first())
}

/// The lane with the fewest bytes in flight, of those that are there.
fn least_loaded<'a>(lanes: impl Iterator<Item = &'a Arc<Lane>>) -> Option<&'a Arc<Lane>> {
    lanes
        .filter(|lane| !lane.is_down())
        .min_by_key(|lane| lane.load.load(Ordering::Relaxed))
}
