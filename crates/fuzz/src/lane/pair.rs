//! Two honest lanes, with events in any order.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use tcpx_proto::frame::{Header, Kind, Status};
use tcpx_proto::lane::{
    Chunk, ChunkId, Landing, Lane, MIN_SHARE, Meaning, Offer, Op, Remains, Ticket, Transmit,
};

use super::{Action, Piece, Rooms, Run, decode, header, windows};

/// Maximum postings that a lane examines in one call: with more, it may report nothing to send too
/// early.
const MAX_POSTINGS: usize = 60;

/// A frame to be processed in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    Write(ChunkId),
    Data(Piece),
    Note(u64),
    Mark(u64),
}

/// One end with its expected state.
struct Side {
    lane: Lane<Run, Piece>,
    landing: Landing<Turn>,
    window: usize,
    own_window: usize,
    lanes: usize,
    inbox: VecDeque<Header>,
    copies: Vec<(Ticket, Turn)>,
    postings: Vec<Run>,
    in_flight: BTreeMap<ChunkId, (Op, u64)>,
    settled: BTreeSet<ChunkId>,
    unanswered: usize,
    /// Whether the last payload was an answer.
    answered: bool,
    sent: VecDeque<Turn>,
    said: u64,
}

impl Side {
    fn new(window: usize, own_window: usize, lanes: usize) -> Self {
        Self {
            lane: Lane::new(window, own_window, lanes),
            landing: Landing::default(),
            window,
            own_window,
            lanes,
            inbox: VecDeque::new(),
            copies: Vec::new(),
            postings: Vec::new(),
            in_flight: BTreeMap::new(),
            settled: BTreeSet::new(),
            unanswered: 0,
            answered: false,
            sent: VecDeque::new(),
            said: 0,
        }
    }

    fn count(&self, wanted: impl Fn(&ChunkId, Op) -> bool) -> usize {
        let in_flight = self.in_flight.iter();
        in_flight.filter(|(id, (op, _))| wanted(id, *op)).count()
    }

    /// Whether this lane has asked for less than its share of a READ: an equal part of all chunks,
    /// and of those that are left while it ends. A single lane asks for all.
    fn may_ask(&self, run: &Run) -> bool {
        let asked = self.count(|id, op| op == Op::Read && id.transfer == run.transfer);
        let left = run.left().div_ceil(self.lanes).max(MIN_SHARE);
        self.lanes == 1 || asked < left.min(run.chunks().div_ceil(self.lanes))
    }

    /// Returns whether a chunk could be sent in this direction.
    fn can_take(&self, op: Op) -> bool {
        let may = |run: &Run| op == Op::Write || self.may_ask(run);
        let mut live = self.postings.iter().filter(|run| !run.dead.get());
        self.count(|_, other| other == op) < self.window
            && live.any(|run| run.op == op && run.has_more() && may(run))
    }

    fn post(&mut self, bits: u8) {
        if self.postings.iter().filter(|run| run.has_more()).count() < MAX_POSTINGS {
            let op = if bits & 1 != 0 { Op::Read } else { Op::Write };
            // Both sides use the same numbers.
            let run = Run::new(op, self.postings.len() as u64, u32::from(bits) + 1);
            assert!(self.lane.offer(run.clone()).is_ok());
            self.postings.push(run);
        }
    }

    fn begin(&mut self, op: Op, piece: Piece) {
        assert!(!self.settled.contains(&piece.id), "sent again");
        let before = self.in_flight.insert(piece.id, (op, piece.bytes));
        assert_eq!(before, None, "sent twice");
        assert!(self.count(|_, other| other == op) <= self.window);
    }

    fn settle(&mut self, id: ChunkId) {
        assert!(self.settled.insert(id), "settled twice");
    }

    /// Sends one frame with a chunk. Returns whether there was one.
    fn poll(&mut self, rooms: Rooms, withdraw: bool, wire: &mut VecDeque<Header>) -> bool {
        let can_write = rooms.0 && self.can_take(Op::Write);
        let can_request = self.can_take(Op::Read);
        let can_answer = rooms.1 && self.unanswered > 0;
        match self.lane.poll_transmit(&mut { rooms }) {
            None => {
                assert!(!can_write && !can_request && !can_answer, "not sent");
                return false;
            }
            Some(Transmit::Dead(run)) => assert!(run.dead.get()),
            Some(Transmit::Request(piece)) => {
                assert!(can_request);
                self.begin(Op::Read, piece);
                wire.push_back(header(Kind::Read, piece.id, piece.bytes));
            }
            Some(Transmit::Write(piece)) => {
                assert!(can_write && (!can_answer || self.answered), "not its turn");
                self.answered = false;
                self.begin(Op::Write, piece);
                if withdraw {
                    assert_eq!(self.lane.withdraw(piece.id), Some(piece));
                    self.in_flight.remove(&piece.id);
                    self.settle(piece.id);
                } else {
                    self.sent.push_back(Turn::Write(piece.id));
                    wire.push_back(header(Kind::Write, piece.id, piece.bytes));
                }
            }
            Some(Transmit::Answer(Piece { id, bytes })) => {
                assert!(can_answer && (!can_write || !self.answered), "not its turn");
                self.answered = true;
                self.unanswered -= 1;
                wire.push_back(if is_refused(id) {
                    header(Kind::ReadError, id, 0)
                } else {
                    self.sent.push_back(Turn::Data(Piece { id, bytes }));
                    header(Kind::Data, id, bytes)
                });
            }
        }
        true
    }

    /// Sends urgent frames. Returns whether there were any.
    fn flush(&mut self, wire: &mut VecDeque<Header>) -> bool {
        let mut out = Vec::new();
        self.lane.encode_urgent(&mut out);
        assert_eq!(self.lane.replies(), 0);
        wire.extend(decode(&out));
        !out.is_empty()
    }

    fn say(&mut self, mark: bool) {
        self.said += 1;
        if mark {
            if self.lane.push_mark(self.said) {
                self.sent.push_back(Turn::Mark(self.said));
            }
        } else {
            self.sent.push_back(Turn::Note(self.said));
            let note = Header::new(Kind::Notify, self.said);
            self.lane.push_control(|out| note.encode(out));
        }
    }

    /// Processes the next frame of the peer. Returns whether there was one.
    fn deliver(&mut self, peer: &mut Side) -> bool {
        let Some(header) = self.inbox.pop_front() else {
            return false;
        };
        match self.lane.handle_frame(&header).expect("an honest peer") {
            Meaning::Write(id) => self.copy(Turn::Write(id)),
            Meaning::Data(piece) => {
                self.in_flight.remove(&piece.id).expect("in flight");
                self.copy(Turn::Data(piece));
            }
            Meaning::Request(id) => {
                self.unanswered += 1;
                assert!(self.unanswered <= self.own_window);
                let bytes = header.payload;
                self.lane.handle_request(Piece { id, bytes });
            }
            Meaning::Acknowledged(piece) | Meaning::Refused(piece, _) => {
                assert_eq!(header.kind != Kind::Ack, is_refused(piece.id));
                self.in_flight.remove(&piece.id).expect("in flight");
                self.settle(piece.id);
            }
            Meaning::Message => self.arrive(Turn::Note(header.transfer)),
            Meaning::Ping(0) => self.lane.push_pong(0),
            Meaning::Ping(token) => self.arrive(Turn::Mark(token)),
            Meaning::Pong(_) => {}
            Meaning::Received(_) => unreachable!("nobody sends it"),
        }
        self.take_turns(peer);
        true
    }

    fn copy(&mut self, turn: Turn) {
        let ticket = self.landing.reserve();
        self.copies.push((ticket, turn));
    }

    fn arrive(&mut self, turn: Turn) {
        let ticket = self.landing.reserve();
        self.landing.complete(ticket, turn);
    }

    /// Completes one of the copies. Returns whether there was one.
    fn land(&mut self, pick: u8, peer: &mut Side) -> bool {
        if self.copies.is_empty() {
            return false;
        }
        let at = usize::from(pick) % self.copies.len();
        let (ticket, turn) = self.copies.swap_remove(at);
        self.landing.complete(ticket, turn);
        self.take_turns(peer);
        true
    }

    fn take_turns(&mut self, peer: &mut Side) {
        while let Some(turn) = self.landing.poll_event() {
            assert_eq!(Some(turn), peer.sent.pop_front(), "out of turn");
            match turn {
                Turn::Write(id) => {
                    let refusal = is_refused(id).then(|| (Status::Memory, "no".into()));
                    self.lane.handle_landed(id, refusal);
                    assert!(self.lane.replies() <= self.own_window);
                }
                Turn::Data(piece) => self.settle(piece.id),
                Turn::Note(_) => {}
                Turn::Mark(token) => {
                    self.lane.push_pong(token);
                }
            }
        }
    }

    fn check(&self) {
        let load: u64 = self.in_flight.values().map(|(_, bytes)| bytes).sum();
        assert_eq!(self.lane.load(), load);
        assert!(self.lane.is_busy() || load == 0 && self.unanswered == 0);
    }

    /// Closes the lane: checks that each chunk taken is settled, in flight or landing.
    fn close(mut self) {
        let Remains {
            offers,
            reads,
            writes,
            endings,
        } = self.lane.close();
        assert!(endings.len() <= self.own_window);
        for piece in reads.into_iter().chain(writes) {
            let known = self.in_flight.remove(&piece.id());
            assert!(known.is_some(), "not in flight, or there twice");
            self.settle(piece.id);
        }
        assert!(self.in_flight.is_empty(), "lost: {:?}", self.in_flight);
        let copies = std::mem::take(&mut self.copies);
        let landed: Vec<_> = self.landing.close().collect();
        for turn in copies.into_iter().map(|(_, turn)| turn).chain(landed) {
            if let Turn::Data(piece) = turn {
                self.settle(piece.id);
            }
        }
        for run in &self.postings {
            assert!((0..run.taken.get()).all(|seq| self.settled.remove(&run.piece(seq).id)));
            let held = |offer: &&Run| offer.transfer == run.transfer;
            let held = offers.iter().filter(held).count();
            assert!(held <= 1 && (held == 1 || !run.has_more() || run.dead.get()));
        }
        assert!(self.settled.is_empty(), "never posted: {:?}", self.settled);
    }
}

fn is_refused(id: ChunkId) -> bool {
    (id.transfer + u64::from(id.seq)).is_multiple_of(5)
}

const ACTIONS: [Action; 8] = [
    Action::Post,
    Action::Poll,
    Action::Flush,
    Action::Deliver,
    Action::Land,
    Action::Say,
    Action::Kill,
    Action::Ping,
];

/// Runs the operations; then everything settles, or both lanes are closed in their current state.
pub(super) fn check(data: &[u8]) {
    let [sizes, lanes, operations @ ..] = data else {
        return;
    };
    let [first, second] = windows(*sizes);
    let count = usize::from(lanes % 4) + 1;
    let mut sides = [
        Side::new(first, second, count),
        Side::new(second, first, count),
    ];
    for operation in operations {
        let [a, b] = &mut sides;
        let (side, peer) = if operation & 8 == 0 { (a, b) } else { (b, a) };
        let bits = operation >> 4;
        match ACTIONS[usize::from(operation & 7)] {
            Action::Post => side.post(bits),
            Action::Poll => {
                let rooms = Rooms(bits & 1 != 0, bits & 2 != 0);
                side.poll(rooms, bits & 4 != 0, &mut peer.inbox);
            }
            Action::Flush => drop(side.flush(&mut peer.inbox)),
            Action::Deliver => drop(side.deliver(peer)),
            Action::Land => drop(side.land(bits, peer)),
            Action::Say => {
                side.say(bits & 1 != 0);
                // Earlier messages come before what is sent from now on.
                side.flush(&mut peer.inbox);
            }
            Action::Kill => {
                if let Some(run) = side.postings.iter().rev().nth(usize::from(bits)) {
                    run.dead.set(run.has_more());
                }
            }
            Action::Ping => {
                // Refused if the peer has too many to answer.
                let _ = side.lane.push_ping(0);
            }
        }
        sides.iter().for_each(Side::check);
    }
    if lanes & 0x80 == 0 {
        drain(&mut sides);
    }
    sides.into_iter().for_each(Side::close);
}

/// Performs everything possible; nothing may be left then.
fn drain(sides: &mut [Side; 2]) {
    let mut moved = true;
    while moved {
        moved = false;
        for at in [0, 1] {
            let [a, b] = &mut *sides;
            let (side, peer) = if at == 0 { (a, b) } else { (b, a) };
            moved |= side.flush(&mut peer.inbox);
            moved |= side.poll(Rooms(true, true), false, &mut peer.inbox);
            moved |= side.deliver(peer);
            moved |= side.land(u8::MAX, peer);
            side.check();
        }
    }
    for side in sides {
        assert!(side.in_flight.is_empty() && side.landing.is_empty() && side.sent.is_empty());
        assert!(!side.lane.is_busy() && !side.lane.has_work());
        for run in &side.postings {
            assert!(run.dead.get() || !run.has_more(), "never sent");
        }
    }
}
