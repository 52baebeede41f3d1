//! Runs of GPU memory use the lanes over the nearest interfaces.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tcpx_net::{Listener, SocketOptions, Span, Stream};
use tcpx_proto::frame::down::StreamId;
use tcpx_proto::lane::Op;

use super::super::drive::BUDGET;
use super::super::{Connection, Lane, Windows};
use crate::carrier::comm::RawLane;
use crate::error::{Error, LostCause};
use crate::link::{Link, Rejoined};
use crate::memory::InterfaceSet;
use crate::testing::{LONG, Pair, connection, wait_until};
use crate::transfer::{After, Limits, Pieces, Plan, Run};

/// The interface of each bulk lane.
const INTERFACES: [usize; 4] = [0, 1, 0, 1];

/// A connection with four lanes over two interfaces that only the test drives, and the other ends.
struct Undriven {
    connection: Arc<Connection>,
    _pair: Pair,
    _far: Vec<Stream>,
}

/// Returns a stream and its other end.
fn stream() -> (Stream, Stream) {
    let options = SocketOptions {
        buffer_bytes: 64 << 10,
        dead_after: LONG,
    };
    let listener = Listener::bind(([127, 0, 0, 1], 0).into(), &options).unwrap();
    let near = Stream::connect(listener.local_addr().unwrap(), None, &options).unwrap();
    let mut far = None;
    wait_until("the stream is connected", || {
        far = listener.accept().ok();
        far.is_some()
    });
    (near, far.unwrap().0)
}

fn id(lane: usize, generation: u32) -> StreamId {
    StreamId {
        lane: lane as u16,
        generation,
    }
}

impl Undriven {
    fn new() -> Self {
        let pair = Pair::new();
        let of = connection(pair.alice.core());
        let windows = Windows::new(&of.context, &of.established, INTERFACES.len());
        let worker = || Arc::clone(&of.lanes.load()[0].worker);
        let mut far = Vec::new();
        let lanes = INTERFACES.iter().enumerate().map(|(index, interface)| {
            let (stream, other) = stream();
            far.push(other);
            let early = Vec::new();
            let raw = RawLane { stream, early };
            let lane = Lane::new(id(index, 0), raw, None, windows, worker(), &of.context);
            let mut lane = lane.unwrap();
            lane.interface = InterfaceSet::one(*interface);
            lane
        });
        let connection = Connection::new(
            Arc::clone(&of.context),
            Arc::clone(&of.above),
            of.established.clone(),
            windows,
            lanes.collect(),
        );
        Self {
            connection,
            _pair: pair,
            _far: far,
        }
    }

    /// Submits a READ of 16 chunks of memory that is near these interfaces.
    fn submit(&self, near: InterfaceSet) -> Arc<Run> {
        self.submit_in_chunks(16, 1 << 20, near)
    }

    fn submit_in_chunks(&self, count: usize, chunk_bytes: usize, near: InterfaceSet) -> Arc<Run> {
        let run = self.run(count, chunk_bytes, near);
        self.has_lane(&run);
        self.connection.submit(&run);
        run
    }

    fn run(&self, count: usize, chunk_bytes: usize, near: InterfaceSet) -> Arc<Run> {
        // SAFETY: nothing accesses the memory, since the READ is never answered.
        let local = unsafe { Span::new(4096 as *mut u8, count * chunk_bytes) };
        let limits = Limits {
            chunk_bytes,
            lanes: INTERFACES.len(),
        };
        let mut plan = Plan::new(Op::Read, Pieces::untouched(local, 0), limits);
        plan.near = near;
        assert_eq!(plan.len(), count);
        let number = self.connection.context.next_id();
        Arc::new(Run::new(number, Arc::new(plan), After::Nothing))
    }

    /// Returns the lanes that take chunks of the run.
    fn lanes_of(&self, run: &Arc<Run>) -> Vec<usize> {
        let lanes = self.connection.lanes.load();
        let has_it = |lane: &&Arc<Lane>| lane.queued_runs().iter().any(|r| Arc::ptr_eq(r, run));
        lanes.iter().filter(has_it).map(|l| l.index()).collect()
    }

    /// Takes lost lanes apart, and waits until these lanes take chunks of the run: the session's own
    /// thread takes lost lanes apart as well, and may have begun.
    fn recover(&self, run: &Arc<Run>, expected: &[usize]) {
        self.connection.recover();
        wait_until("the run has other lanes", || self.lanes_of(run) == expected);
    }

    /// Checks that a run has a lane: otherwise it would be offered for ever.
    #[track_caller]
    fn has_lane(&self, run: &Run) {
        let lanes = self.connection.lanes.load();
        let mut near = self.connection.near_lanes(run, &lanes);
        assert!(near.any(|lane| !lane.is_down()), "the run has no lane");
    }

    fn lose(&self, lane: usize) {
        let lanes = self.connection.lanes.load();
        self.connection
            .lane_lost(&lanes[lane], LostCause::LaneDropped);
    }

    /// Gives a lost lane a new stream; returns its other end.
    fn bring_back(&self, lane: usize) -> Stream {
        let (stream, far) = stream();
        let early = Vec::new();
        let rejoined = Rejoined {
            stream: id(lane, 1),
            raw: RawLane { stream, early },
            comms: None,
            owners: Vec::new(),
            worker: Arc::clone(&self.connection.lanes.load()[lane].worker),
        };
        assert!(self.connection.adopt(rejoined));
        far
    }
}

impl Drop for Undriven {
    fn drop(&mut self) {
        self.connection.kill(Error::Closed);
    }
}

#[test]
fn a_run_uses_the_lanes_over_the_interfaces_near_its_memory() {
    let undriven = Undriven::new();
    for (interface, expected) in [(0, [0, 2]), (1, [1, 3])] {
        let run = undriven.submit(InterfaceSet::one(interface));
        assert_eq!(undriven.lanes_of(&run), expected);
        // Each of the two lanes requests its half.
        assert_eq!(run.lanes.load(Ordering::Relaxed), 2);
    }
    let of_host = undriven.submit(InterfaceSet::ALL);
    assert_eq!(undriven.lanes_of(&of_host), [0, 1, 2, 3]);
    assert_eq!(of_host.lanes.load(Ordering::Relaxed), 4);
}

#[test]
fn runs_with_few_chunks_use_all_lanes_alike() {
    let undriven = Undriven::new();
    let mut uses = [0; INTERFACES.len()];
    for _ in 0..8 {
        let run = undriven.submit_in_chunks(2, 128 << 10, InterfaceSet::ALL);
        let lanes = undriven.lanes_of(&run);
        assert_eq!(lanes.len(), 2);
        for lane in lanes {
            uses[lane] += 1;
        }
        // The first lane takes its chunk at once.
        let lanes = undriven.connection.lanes.load();
        let first = &lanes[run.lane.load(Ordering::Relaxed)];
        undriven.connection.pump(first, BUDGET);
    }
    assert_eq!(uses, [4; INTERFACES.len()]);
}

/// Workers take chunks later than an application posts its transfers.
#[test]
fn a_run_begins_on_a_lane_with_few_queued_runs() {
    let undriven = Undriven::new();
    let run = || undriven.run(2, 128 << 10, InterfaceSet::ALL);
    let queue = |lane: usize| {
        let lanes = undriven.connection.lanes.load();
        assert!(lanes[lane].push_run(&run()));
    };
    [0, 0, 0, 1, 1, 2, 3, 3, 3].into_iter().for_each(queue);
    let next = run();
    undriven.connection.submit(&next);
    assert_eq!(undriven.lanes_of(&next), [2, 3]);
    assert_eq!(next.lane.load(Ordering::Relaxed), 2);
}

/// A lane requests its share of a READ at once, which is larger if fewer lanes take part.
#[test]
fn near_lanes_share_a_run_among_themselves() {
    let asked = |near| {
        let undriven = Undriven::new();
        let run = undriven.submit(near);
        let lanes = undriven.connection.lanes.load();
        let first = &lanes[run.lane.load(Ordering::Relaxed)];
        undriven.connection.pump(first, BUDGET);
        first.load.load(Ordering::Relaxed)
    };
    let (near, all) = (asked(InterfaceSet::one(1)), asked(InterfaceSet::ALL));
    assert!(near > all, "{near} of {all}");
}

#[test]
fn a_run_without_a_near_lane_uses_all() {
    let undriven = Undriven::new();
    // No lane uses such an interface.
    let run = undriven.submit(InterfaceSet::one(7));
    assert_eq!(undriven.lanes_of(&run), [0, 1, 2, 3]);
}

#[test]
fn runs_of_a_lost_lane_prefer_near_lanes() {
    let undriven = Undriven::new();
    let run = undriven.submit(InterfaceSet::one(1));
    undriven.lose(1);
    undriven.recover(&run, &[3]);
    // Later runs as well.
    assert_eq!(
        undriven.lanes_of(&undriven.submit(InterfaceSet::one(1))),
        [3]
    );
    undriven.lose(3);
    undriven.has_lane(&run);
    undriven.recover(&run, &[0, 2]);
    assert_eq!(run.lanes.load(Ordering::Relaxed), 4);
}

#[test]
fn restored_near_lane_takes_part_again() {
    let undriven = Undriven::new();
    let run = undriven.submit(InterfaceSet::one(1));
    undriven.lose(1);
    undriven.lose(3);
    undriven.has_lane(&run);
    undriven.recover(&run, &[0, 2]);
    let _far = undriven.bring_back(3);
    assert_eq!(undriven.lanes_of(&run), [0, 2, 3]);
    // Further runs use only this lane.
    let run = undriven.submit(InterfaceSet::one(1));
    assert_eq!(undriven.lanes_of(&run), [3]);
}
