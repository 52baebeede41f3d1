//! Random steps compared with a model that is too simple to be wrong.

use alloc::vec::Vec;

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

/// A step of a lane. A `pick` chooses one of the existing items, or one that does not exist.
#[derive(Clone, Debug)]
enum Step {
    Offer { read: bool, chunks: u8 },
    Kill(u8),
    Poll(bool, bool),
    Frame { kind: Kind, pick: u8, wrong: bool },
    Landed { pick: u8, refuse: bool },
    Encode,
    Mark,
    Withdraw(u8),
}

fn steps() -> impl Strategy<Value = Step> {
    use Kind::*;
    let kind = prop::sample::select(
        &[
            Write, Ack, WriteError, Read, Data, ReadError, Notify, Ping, Pong, Send, SendDone,
            Goodbye, Comm,
        ][..],
    );
    let rare = || prop::bool::weighted(0.1);
    prop_oneof![
        3 => (any::<bool>(), 1u8..6).prop_map(|(read, chunks)| Step::Offer { read, chunks }),
        1 => any::<u8>().prop_map(Step::Kill),
        8 => (any::<bool>(), any::<bool>()).prop_map(|(write, answer)| Step::Poll(write, answer)),
        8 => (kind, any::<u8>(), rare())
            .prop_map(|(kind, pick, wrong)| Step::Frame { kind, pick, wrong }),
        4 => (any::<u8>(), any::<bool>())
            .prop_map(|(pick, refuse)| Step::Landed { pick, refuse }),
        2 => Just(Step::Encode),
        1 => Just(Step::Mark),
        1 => any::<u8>().prop_map(Step::Withdraw),
    ]
}

/// Chooses one of `all`, or none about one time in sixteen.
fn pick<T: Copy>(all: &[T], pick: u8) -> Option<T> {
    let at = usize::from(pick >> 4) * all.len() / 16;
    all.get(at).copied().filter(|_| !pick.is_multiple_of(16))
}

/// The expected state of a lane.
#[derive(Default)]
struct Model {
    window: usize,
    own_window: usize,
    lanes: usize,
    writes: Vec<Piece>,
    reads: Vec<Piece>,
    queued: Vec<Run>,
    /// The peer's chunks that are landing, and those whose replies were not encoded.
    landing: Vec<ChunkId>,
    replies: Vec<(Kind, ChunkId)>,
    control: Vec<(Kind, ChunkId)>,
    answers: Vec<u32>,
    answered: bool,
    /// The next unused number for transfers, chunks of the peer and answers.
    next: u32,
}

impl Model {
    fn load(&self) -> u64 {
        self.writes
            .iter()
            .chain(&self.reads)
            .map(|piece| piece.bytes)
            .sum()
    }

    fn has_share(&self, run: &Run) -> bool {
        let asked = self
            .reads
            .iter()
            .filter(|piece| piece.id.transfer == run.transfer())
            .count();
        let of_all = run.chunks().div_ceil(self.lanes);
        let of_the_rest = run.left().div_ceil(self.lanes);
        self.lanes > 1 && run.chunks() > 1 && asked >= of_the_rest.max(MIN_SHARE).min(of_all)
    }

    /// Returns whether a chunk of a live run may be sent in this direction.
    fn can_take(&self, op: Op, in_flight: usize) -> bool {
        in_flight < self.window
            && self.queued.iter().any(|run| {
                run.op == op
                    && !run.dead.get()
                    && run.has_more()
                    && (op == Op::Write || !self.has_share(run))
            })
    }

    fn has_dead(&self, op: Op) -> bool {
        self.queued.iter().any(|run| run.op == op && run.dead.get())
    }

    /// Lets the lane choose, checks the choice, and records it.
    fn poll(&mut self, lane: &mut Alone, rooms: Rooms) {
        let Rooms(write, answer) = rooms;
        let can_request = self.can_take(Op::Read, self.reads.len());
        let can_write = write && self.can_take(Op::Write, self.writes.len());
        let can_answer = answer && !self.answers.is_empty();
        match lane.poll_transmit(&mut { rooms }) {
            Some(Transmit::Dead(run)) => {
                assert!(run.dead.get());
                let at = self.queued.iter().position(|queued| *queued == run);
                self.queued.remove(at.expect("a run that was offered"));
            }
            Some(Transmit::Request(piece)) => {
                assert!(can_request);
                self.take(Op::Read, piece);
                self.reads.push(piece);
            }
            Some(Transmit::Write(piece)) => {
                assert!(can_write && !can_request);
                assert!(!can_answer || self.answered, "the answer was due");
                self.take(Op::Write, piece);
                self.writes.push(piece);
                self.answered = false;
            }
            Some(Transmit::Answer(number)) => {
                assert!(can_answer && !can_request);
                assert!(!can_write || !self.answered, "the chunk was due");
                assert_eq!(number, self.answers.remove(0));
                self.answered = true;
            }
            None => assert!(
                !can_request && !can_write && !can_answer,
                "something could be sent"
            ),
        }
    }

    /// Checks that the chunk is the one that was just taken from its run.
    fn take(&self, op: Op, piece: Piece) {
        let run = self
            .queued
            .iter()
            .find(|run| run.transfer() == piece.id.transfer);
        let run = run.expect("a run that was offered");
        assert_eq!((run.op, run.pieces[run.taken.get() - 1]), (op, piece));
    }

    /// Predicts the meaning of a frame, and settles its chunk.
    fn meaning(&mut self, header: &Header) -> Result<Meaning<Piece>, Violation> {
        let id = chunk(header.transfer, header.seq);
        let status = Status::from_u8(header.flags);
        let kind = header.kind;
        let ours = match kind {
            Kind::Ack | Kind::WriteError => &mut self.writes,
            _ => &mut self.reads,
        };
        let at = ours.iter().position(|piece| piece.id == id);
        match kind {
            Kind::Write if self.landing.len() + self.replies.len() == self.own_window => {
                Err(Violation::TooManyWrites {
                    window: self.own_window,
                })
            }
            Kind::Write => {
                self.landing.push(id);
                Ok(Meaning::Write(id))
            }
            Kind::Read if self.answers.len() == self.own_window => {
                Err(Violation::TooManyRequests {
                    window: self.own_window,
                })
            }
            Kind::Read => Ok(Meaning::Request(id)),
            Kind::Ack | Kind::WriteError | Kind::Data | Kind::ReadError => {
                let Some(at) = at else {
                    return Err(Violation::NotInFlight { id, kind });
                };
                let (expected, found) = (ours[at].bytes, header.payload);
                if kind == Kind::Data && expected != found {
                    return Err(Violation::WrongLength {
                        id,
                        expected,
                        found,
                    });
                }
                let piece = ours.remove(at);
                Ok(match kind {
                    Kind::Ack => Meaning::Acknowledged(piece),
                    Kind::Data => Meaning::Data(piece),
                    _ => Meaning::Refused(piece, status),
                })
            }
            Kind::Ping => Ok(Meaning::Ping(header.transfer)),
            Kind::Pong => Ok(Meaning::Pong(header.transfer)),
            Kind::Comm => Err(Violation::LateComm),
            Kind::Received => Ok(Meaning::Received(header.seq)),
            Kind::Notify | Kind::Send | Kind::SendDone | Kind::Goodbye | Kind::LaneDown => {
                Ok(Meaning::Message)
            }
        }
    }

    fn next(&mut self) -> u32 {
        self.next += 1;
        self.next
    }
}

fn apply(model: &mut Model, lane: &mut Alone, step: Step) {
    match step {
        Step::Offer { read, chunks } => {
            let op = if read { Op::Read } else { Op::Write };
            let transfer = u64::from(model.next());
            let lengths: Vec<_> = (0..u64::from(chunks))
                .map(|at| 10 * transfer + at)
                .collect();
            let run = Run::new(op, transfer, &lengths);
            lane.offer(run.clone()).unwrap();
            model.queued.push(run);
        }
        Step::Kill(at) => {
            // Only runs with chunks left count as dead: an emptied run is not examined again.
            let alive: Vec<_> = model.queued.iter().filter(|run| run.has_more()).collect();
            if let Some(run) = pick(&alive, at) {
                run.dead.set(true);
            }
        }
        Step::Poll(write, answer) => model.poll(lane, Rooms(write, answer)),
        Step::Frame {
            kind,
            pick: at,
            wrong,
        } => {
            let ours = match kind {
                Kind::Ack | Kind::WriteError => &model.writes,
                _ => &model.reads,
            };
            let piece = pick(ours, at).unwrap_or(Piece {
                id: chunk(u64::from(at), 7),
                bytes: 1,
            });
            let mut header = frame(kind, piece.id, piece.bytes + u64::from(wrong));
            header.flags = at;
            let meaning = lane.handle_frame(&header);
            assert_eq!(meaning, model.meaning(&header));
            if let Ok(Meaning::Request(_)) = meaning {
                let answer = model.next();
                lane.handle_request(answer);
                model.answers.push(answer);
            }
        }
        Step::Landed { pick: at, refuse } => {
            let Some(id) = pick(&model.landing, at) else {
                return;
            };
            let place = model.landing.iter().position(|landing| *landing == id);
            model.landing.remove(place.expect("one that was picked"));
            lane.handle_landed(id, refuse.then(|| (Status::Memory, "text".into())));
            model
                .replies
                .push((if refuse { Kind::WriteError } else { Kind::Ack }, id));
        }
        Step::Mark => {
            let token = u64::from(model.next());
            assert!(lane.push_mark(token));
            model.control.append(&mut model.replies);
            model.control.push((Kind::Ping, chunk(token, 0)));
        }
        Step::Encode => {
            model.control.append(&mut model.replies);
            assert_eq!(urgent(lane), core::mem::take(&mut model.control));
        }
        Step::Withdraw(at) => {
            let piece = pick(&model.writes, at);
            let id = piece.map_or(chunk(u64::MAX, 0), |piece| piece.id);
            assert_eq!(lane.withdraw(id), piece);
            model.writes.retain(|other| other.id != id);
        }
    }
}

proptest! {
    #[test]
    fn a_lane_agrees_with_the_model(
        window in 1usize..5,
        own_window in 1usize..5,
        lanes in 1usize..4,
        steps in vec(steps(), 1..150),
    ) {
        let mut lane = Alone::new(window, own_window, lanes);
        let mut model = Model { window, own_window, lanes, ..Model::default() };
        for step in steps {
            apply(&mut model, &mut lane, step);
            prop_assert_eq!(lane.load(), model.load());
            prop_assert_eq!(lane.replies(), model.replies.len());
            prop_assert_eq!(lane.unsettled, model.landing.len() + model.replies.len());
            let waiting = !model.answers.is_empty() || !model.control.is_empty();
            prop_assert_eq!(lane.is_busy(), model.load() > 0 || waiting);
            let can_send = waiting || !model.replies.is_empty()
                || model.has_dead(Op::Read) || model.has_dead(Op::Write)
                || model.can_take(Op::Read, model.reads.len())
                || model.can_take(Op::Write, model.writes.len());
            prop_assert!(lane.has_work() || !can_send);
        }
        let remains = lane.close();
        prop_assert_eq!((remains.reads, remains.writes), (model.reads, model.writes));
        for run in model.queued {
            let held = remains.offers.iter().filter(|offer| **offer == run).count();
            prop_assert_eq!(held, usize::from(run.has_more()));
        }
    }

    #[test]
    fn landing_returns_frames_in_the_order_of_tickets(
        steps in vec((0u8..10, any::<prop::sample::Index>()), 1..200),
    ) {
        let mut landing = Landing::default();
        // The ticket, and whether it is complete. The payload is the position in this list.
        let mut all = Vec::new();
        let mut given = 0;
        for (step, index) in steps {
            match step {
                0..4 => all.push((landing.reserve(), false)),
                4..7 if !all.is_empty() => {
                    // Includes expired tickets, which must not hit another place.
                    let at = index.index(all.len());
                    landing.complete(all[at].0, at);
                    all[at].1 |= at >= given;
                }
                9 => {
                    let handed_in: Vec<_> = (given..all.len()).filter(|at| all[*at].1).collect();
                    prop_assert_eq!(landing.close().collect::<Vec<_>>(), handed_in);
                    given = all.len();
                }
                _ => {
                    let next = all.get(given).filter(|(_, handed_in)| *handed_in).map(|_| given);
                    prop_assert_eq!(landing.poll_event(), next);
                    given += usize::from(next.is_some());
                }
            }
            prop_assert_eq!(landing.len(), all.len() - given);
            prop_assert_eq!(landing.is_empty(), given == all.len());
        }
    }
}
