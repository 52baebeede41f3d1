//! Two sides of a connection over streams that may be cut after any byte.
//!
//! A [`Pair`] has two [`Side`]s and a [`Stream`] for each generation of each lane. [`Pair::step`]
//! moves some bytes of every stream and lets both sides send. When nothing moves any more,
//! [`Pair::idle`] lets time pass: cuts are noticed, lanes reconnect.

use alloc::collections::BTreeMap;
use alloc::rc::Rc;
use core::cell::RefCell;

use super::side::{Books, Limits, Side};
use super::*;

/// Number of steps after which a client gets the stream of a late attempt.
const LATE_STEPS: u32 = 8;

/// The side that makes streams.
const CLIENT: usize = 0;
const SERVER: usize = 1;

/// A cut of a stream.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cut {
    pub(super) stream: StreamId,
    /// The cut happens when this many bytes of the side `from` have arrived.
    pub(super) from: usize,
    pub(super) at: u64,
    /// Whether bytes of the other side continue to arrive.
    pub(super) flows_back: bool,
    /// The side that notices first; the other is told, or finds out when nothing moves.
    pub(super) first: usize,
    /// Whether it notices at once; otherwise it notices when nothing moves.
    pub(super) at_once: bool,
}

/// When a lost lane is retried. One lane is retried in any case when all are lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Comeback {
    Never,
    AtOnce,
    WhenIdle,
}

/// The outcome of an attempt to make a new stream.
#[derive(Clone, Copy, Debug)]
pub(super) enum Attempt {
    Succeeds,
    /// The server takes the stream, the client later.
    Late,
    /// The server takes the stream, the client never learns of it.
    HalfOpen,
    /// The server never sees the attempt.
    Fails,
}

/// The parameters of a [`Pair`].
#[derive(Clone, Debug)]
pub(super) struct Setup {
    pub(super) lanes: usize,
    /// The window that each side grants the other.
    pub(super) windows: [usize; 2],
    pub(super) copying: u32,
    pub(super) cuts: Vec<Cut>,
    pub(super) comeback: Comeback,
    pub(super) attempts: Vec<Attempt>,
    /// Number of bytes on a wire above which a sender waits.
    pub(super) room: usize,
    /// Moves a random number of bytes at a time.
    pub(super) seed: Option<u64>,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            lanes: 2,
            windows: [2, 3],
            copying: 0,
            cuts: Vec::new(),
            comeback: Comeback::Never,
            attempts: Vec::new(),
            room: 48,
            seed: None,
        }
    }
}

/// One direction of a stream.
#[derive(Debug)]
pub(super) struct Wire {
    queue: VecDeque<u8>,
    pub(super) delivered: u64,
    flows: bool,
}

impl Wire {
    fn new(flows: bool) -> Self {
        Self {
            queue: VecDeque::new(),
            delivered: 0,
            flows,
        }
    }
}

/// The wires of a stream, by the side that sends.
pub(super) type Stream = [Wire; 2];

/// Two sides and the streams between them.
#[derive(Debug)]
pub(super) struct Pair {
    pub(super) sides: [Side; 2],
    pub(super) streams: BTreeMap<StreamId, Stream>,
    books: Rc<RefCell<Books>>,
    cuts: Vec<Cut>,
    /// Cuts that have happened, each with the side that will notice.
    unnoticed: VecDeque<(StreamId, usize)>,
    comeback: Comeback,
    attempts: VecDeque<Attempt>,
    /// The generation tried last, by lane.
    generations: Vec<u32>,
    /// Streams that the server has and the client is about to get, each with the steps left.
    late: VecDeque<(StreamId, u32)>,
    room: usize,
    pings: usize,
    random: Option<u64>,
}

impl Pair {
    pub(super) fn new(setup: &Setup) -> Self {
        let books = Rc::<RefCell<Books>>::default();
        let side = |index: usize| {
            let limits = Limits {
                window: setup.windows[1 - index],
                own_window: setup.windows[index],
                copying: setup.copying,
            };
            Side::new(index, setup.lanes, limits, Rc::clone(&books))
        };
        let streams = (0..setup.lanes).map(|lane| {
            let id = stream(lane as u16, 0);
            (id, [Wire::new(true), Wire::new(true)])
        });
        Self {
            sides: [side(0), side(1)],
            streams: streams.collect(),
            books,
            cuts: setup.cuts.clone(),
            unnoticed: VecDeque::new(),
            comeback: setup.comeback,
            attempts: setup.attempts.iter().copied().collect(),
            generations: vec![0; setup.lanes],
            late: VecDeque::new(),
            room: setup.room,
            pings: 0,
            random: setup.seed.map(|seed| seed | 1),
        }
    }

    /// Runs until nothing is in flight any more; then checks that everything has happened exactly
    /// once.
    pub(super) fn run(&mut self) {
        let mut steps = 0;
        while self.step() || self.idle() {
            steps += 1;
            assert!(steps < 20_000, "the two sides make no progress");
        }
        self.books.borrow().assert_all_settled();
        for (side, peer) in [(0, 1), (1, 0)] {
            let all: Vec<_> = (1..=self.sides[peer].said()).collect();
            assert_eq!(self.sides[side].heard, all, "at side {side}");
            self.sides[side].assert_idle();
        }
    }

    /// Moves some bytes and lets both sides send. Returns whether anything was there to move.
    pub(super) fn step(&mut self) -> bool {
        let mut has_moved = false;
        let streams: Vec<_> = self.streams.keys().copied().collect();
        for id in streams {
            for from in [0, 1] {
                self.cut();
                has_moved |= self.deliver(id, from);
            }
        }
        self.cut();
        for (index, side) in self.sides.iter_mut().enumerate() {
            for lane in 0..self.generations.len() {
                let Some(id) = side.stream(lane) else {
                    continue;
                };
                let wire = &mut self.streams.get_mut(&id).expect("a stream")[index];
                while wire.queue.len() < self.room {
                    let mut bytes = Vec::new();
                    side.transmit(lane, &mut bytes);
                    if bytes.is_empty() {
                        break;
                    }
                    has_moved = true;
                    wire.queue.extend(bytes);
                }
            }
            has_moved |= side.step_copies();
        }
        for (_, steps) in &mut self.late {
            *steps = steps.saturating_sub(1);
        }
        while let Some((id, _)) = self.late.pop_front_if(|(_, steps)| *steps == 0) {
            self.sides[CLIENT].open(id);
            has_moved = true;
        }
        if self.comeback == Comeback::AtOnce {
            has_moved |= self.reconnect_all();
        }
        has_moved
    }

    /// Moves bytes of one wire.
    fn deliver(&mut self, id: StreamId, from: usize) -> bool {
        let receiver = &mut self.sides[1 - from];
        let lane = usize::from(id.lane);
        let wire = &mut self.streams.get_mut(&id).expect("a stream")[from];
        if receiver.stream(lane) != Some(id) {
            if !self.late.iter().any(|(late, _)| *late == id) {
                wire.queue.clear();
            }
            return false;
        }
        if !wire.flows || wire.queue.is_empty() {
            return false;
        }
        let burst = match &mut self.random {
            None => 31 + 8 * lane,
            Some(random) => {
                *random ^= *random << 13;
                *random ^= *random >> 7;
                *random ^= *random << 17;
                (*random % 80) as usize
            }
        };
        let cuts = self.cuts.iter();
        let due = cuts.filter(|cut| (cut.stream, cut.from) == (id, from));
        let until_cut = due.map(|cut| cut.at.saturating_sub(wire.delivered)).min();
        let until_cut = until_cut.map_or(usize::MAX, |bytes| bytes as usize);
        let count = burst.min(wire.queue.len()).min(until_cut);
        let bytes: Vec<_> = wire.queue.drain(..count).collect();
        wire.delivered += count as u64;
        receiver.handle_input(lane, &bytes);
        true
    }

    /// Performs the cuts that are due.
    fn cut(&mut self) {
        let streams = &self.streams;
        let is_due = |cut: &mut Cut| {
            let stream = streams.get(&cut.stream);
            stream.is_some_and(|wires| wires[cut.from].delivered >= cut.at)
        };
        let due: Vec<_> = self.cuts.extract_if(.., is_due).collect();
        for cut in due {
            let wires = self.streams.get_mut(&cut.stream).expect("just found");
            wires[cut.from].flows = false;
            wires[1 - cut.from].flows &= cut.flows_back;
            if cut.at_once {
                self.notice(cut.stream, cut.first);
            } else {
                self.unnoticed.push_back((cut.stream, cut.first));
            }
        }
    }

    fn notice(&mut self, id: StreamId, side: usize) -> bool {
        let lane = usize::from(id.lane);
        let is_open = self.sides[side].stream(lane) == Some(id);
        if is_open {
            self.sides[side].close(lane);
        }
        is_open
    }

    /// Lets time pass when nothing moves. Returns whether that changed anything.
    fn idle(&mut self) -> bool {
        if let Some((id, side)) = self.unnoticed.pop_front() {
            self.notice(id, side);
            return true;
        }
        if let Some((id, _)) = self.late.pop_front() {
            self.sides[CLIENT].open(id);
            return true;
        }
        // The other side has closed the stream, or nothing arrives from it.
        for lane in 0..self.generations.len() {
            let [ours, theirs] = [0, 1].map(|side| self.sides[side].stream(lane));
            let wires = ours.and_then(|id| self.streams.get(&id));
            let is_cut = wires.is_some_and(|wires| wires.iter().any(|wire| !wire.flows));
            if ours != theirs || is_cut {
                self.sides.iter_mut().for_each(|side| side.close(lane));
                return true;
            }
        }
        if self.comeback == Comeback::WhenIdle && self.reconnect_all() {
            return true;
        }
        let mut lanes = 0..self.generations.len();
        if lanes.all(|lane| self.sides[CLIENT].stream(lane).is_none()) {
            self.reconnect(self.generations.len() - 1);
            return true;
        }
        let has_messages = self.sides.iter().any(Side::has_messages);
        let is_asked = self.pings == 0 || has_messages && self.pings < 10;
        if is_asked {
            self.pings += 1;
            self.sides.iter_mut().for_each(Side::ping);
        }
        is_asked
    }

    fn reconnect_all(&mut self) -> bool {
        let mut has_tried = false;
        for lane in 0..self.generations.len() {
            let is_late = self.late.iter().any(|(id, _)| usize::from(id.lane) == lane);
            if self.sides[CLIENT].stream(lane).is_none() && !is_late {
                self.reconnect(lane);
                has_tried = true;
            }
        }
        has_tried
    }

    /// Tries to make a new stream of a lane.
    fn reconnect(&mut self, lane: usize) {
        self.generations[lane] += 1;
        let id = stream(lane as u16, self.generations[lane]);
        let attempt = self.attempts.pop_front().unwrap_or(Attempt::Succeeds);
        if let Attempt::Fails = attempt {
            return;
        }
        let flows = !matches!(attempt, Attempt::HalfOpen);
        self.streams
            .insert(id, [Wire::new(flows), Wire::new(flows)]);
        self.sides[SERVER].close(lane);
        assert!(self.sides[SERVER].open(id));
        match attempt {
            Attempt::Succeeds => assert!(self.sides[CLIENT].open(id)),
            Attempt::Late => self.late.push_back((id, LATE_STEPS)),
            Attempt::HalfOpen | Attempt::Fails => {}
        }
    }
}
