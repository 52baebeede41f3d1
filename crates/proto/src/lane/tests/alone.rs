//! One lane, step by step.

use alloc::format;
use alloc::rc::Rc;
use alloc::vec::Vec;
use core::cell::Cell;

use super::*;

#[test]
fn a_lane_asks_for_its_share_of_an_offer_and_for_more_as_answers_come() {
    let run = Run::new(Op::Read, 1, &[10; 16]);
    let mut lanes = [Alone::new(64, 64, 4), Alone::new(64, 64, 4)];
    for lane in &mut lanes {
        lane.offer(run.clone()).unwrap();
        assert_eq!(drain(lane), ["request"; 4]);
    }
    let [first, second] = &mut lanes;
    for seq in [2, 0] {
        let data = frame(Kind::Data, chunk(1, seq), 10);
        assert_eq!(
            first.handle_frame(&data),
            Ok(Meaning::Data(run.pieces[seq as usize]))
        );
    }
    assert_eq!(drain(first), ["request"; 2]);
    assert_eq!(drain(second), [""; 0]);
}

#[test]
fn a_lane_asks_for_less_as_an_offer_ends() {
    let run = Run::new(Op::Read, 1, &[10; 16]);
    let mut lane = Alone::new(64, 64, 2);
    lane.offer(run.clone()).unwrap();
    assert_eq!(drain(&mut lane), ["request"; 6]);
    // Others take chunks, until four are left.
    for _ in 0..6 {
        assert!(matches!(run.take(), Take::Chunk(_)));
    }
    for (seq, more) in [(0, 0), (1, 0), (2, 1)] {
        let data = frame(Kind::Data, chunk(1, seq), 10);
        lane.handle_frame(&data).unwrap();
        assert_eq!(drain(&mut lane).len(), more);
    }
}

#[test]
fn shares_are_counted_for_each_transfer() {
    let mut lane = Alone::new(64, 64, 2);
    for transfer in 1..=3 {
        lane.offer(Run::new(Op::Read, transfer, &[1; 4])).unwrap();
    }
    lane.offer(Run::new(Op::Read, 4, &[1])).unwrap();
    assert_eq!(drain(&mut lane), ["request"; 2 + 2 + 2 + 1]);
}

#[test]
fn payload_follows_where_other_lanes_leave_a_chunk() {
    let mut lane = Alone::new(64, 64, 4);
    assert!(!lane.has_payload());
    let run = Run::new(Op::Write, 1, &[10; 6]);
    lane.offer(run.clone()).unwrap();
    for left in (0..6).rev() {
        assert!(matches!(run.take(), Take::Chunk(_)));
        assert_eq!(lane.has_payload(), left >= 4, "{left} are left");
    }
    // No other lane has this offer.
    lane.offer(Run::new(Op::Write, 2, &[10])).unwrap();
    assert!(lane.has_payload());
}

#[test]
fn a_window_of_requests_and_a_window_of_writes_are_in_flight_at_most() {
    let mut lane = Alone::new(3, 64, 1);
    lane.offer(Run::new(Op::Read, 1, &[1; 10])).unwrap();
    lane.offer(Run::new(Op::Write, 2, &[1; 10])).unwrap();
    assert_eq!(
        drain(&mut lane),
        ["request", "request", "request", "write", "write", "write"]
    );
    assert_eq!(lane.load(), 6);
    lane.handle_frame(&frame(Kind::Ack, chunk(2, 1), 0))
        .unwrap();
    lane.handle_frame(&frame(Kind::ReadError, chunk(1, 2), 0))
        .unwrap();
    assert_eq!(drain(&mut lane), ["request", "write"]);
}

/// However many offers wait for a full window, each is examined a bounded number of times.
#[test]
fn a_queue_of_offers_costs_the_same_for_each() {
    const WINDOW: usize = 16;
    for op in [Op::Write, Op::Read] {
        let looks = Rc::new(Cell::new(0));
        let count = 20_000_u64;
        let mut lane = Lane::<Counted, u32>::new(WINDOW, WINDOW, 4);
        for transfer in 0..count {
            let run = Run::new(op, transfer, &[64]);
            let looks = Rc::clone(&looks);
            lane.offer(Counted { run, looks }).unwrap();
            // The posting thread sends at once what the window allows.
            while lane.poll_transmit(&mut { ROOM }).is_some() {}
        }
        for transfer in 0..count {
            let (kind, bytes) = match op {
                Op::Write => (Kind::Ack, 0),
                Op::Read => (Kind::Data, 64),
            };
            lane.handle_frame(&frame(kind, chunk(transfer, 0), bytes))
                .unwrap();
            while lane.poll_transmit(&mut { ROOM }).is_some() {}
        }
        assert!(!lane.has_work() && !lane.is_busy());
        let each = looks.get() as u64 / count;
        assert!(each <= 8, "{op:?}: {each} looks at each of {count} offers");
    }
}

/// Where a payload finds no room, offers take turns: a bounded number of examinations per answer.
#[test]
fn offers_without_room_are_looked_at_in_turns() {
    let mut lane = Lane::<Counted, u32>::new(16, 16, 1);
    let looks = Rc::new(Cell::new(0));
    for transfer in 0..20_000 {
        let run = Run::new(Op::Write, transfer, &[64]);
        let looks = Rc::clone(&looks);
        lane.offer(Counted { run, looks }).unwrap();
    }
    struct Asked(usize);
    impl Room<Counted, u32> for Asked {
        fn for_write(&mut self, _: &Counted) -> bool {
            self.0 += 1;
            false
        }

        fn for_answer(&mut self, _: &u32) -> bool {
            false
        }
    }
    let mut asked = Asked(0);
    assert!(lane.poll_transmit(&mut asked).is_none());
    assert!((1..=MAX_LOOKS).contains(&asked.0), "{}", asked.0);
}

#[test]
fn answers_and_chunks_of_ours_take_turns() {
    let mut lane = Alone::new(64, 64, 1);
    lane.offer(Run::new(Op::Write, 1, &[1; 4])).unwrap();
    (0..3).for_each(|answer| lane.handle_request(answer));
    assert_eq!(
        drain(&mut lane),
        [
            "answer", "write", "answer", "write", "answer", "write", "write"
        ]
    );
    // The turn is remembered while nothing is sent.
    lane.handle_request(3);
    lane.offer(Run::new(Op::Write, 2, &[1])).unwrap();
    assert_eq!(drain(&mut lane), ["answer", "write"]);
    lane.handle_request(4);
    assert_eq!(drain(&mut lane), ["answer"]);
    lane.handle_request(5);
    lane.offer(Run::new(Op::Write, 3, &[1])).unwrap();
    assert_eq!(drain(&mut lane), ["write", "answer"]);
}

#[test]
fn an_offer_without_room_does_not_block_others() {
    /// Room for transfers and answers with an odd number.
    struct Odd;
    impl Room<Run, u32> for Odd {
        fn for_write(&mut self, offer: &Run) -> bool {
            offer.transfer() % 2 == 1
        }
        fn for_answer(&mut self, answer: &u32) -> bool {
            answer % 2 == 1
        }
    }
    let mut lane = Alone::new(64, 64, 1);
    for number in 0..4 {
        lane.offer(Run::new(Op::Write, u64::from(number), &[1]))
            .unwrap();
        lane.handle_request(number);
    }
    let mut sent = Vec::new();
    while let Some(transmit) = lane.poll_transmit(&mut Odd) {
        sent.push(match transmit {
            Transmit::Write(piece) => piece.id.transfer,
            Transmit::Answer(answer) => 10 + u64::from(answer),
            other => panic!("{other:?}"),
        });
    }
    assert_eq!(sent, [11, 1, 13, 3]);
    assert_eq!(drain(&mut lane).len(), 4);
}

#[test]
fn offers_that_others_have_emptied_do_not_hide_the_one_behind_them() {
    for op in [Op::Read, Op::Write] {
        let mut lane = Alone::new(64, 64, 1);
        for transfer in 1..=500 {
            let empty = Run::new(op, transfer, &[1]);
            lane.offer(empty.clone()).unwrap();
            empty.take();
        }
        lane.offer(Run::new(op, 501, &[1])).unwrap();
        assert_eq!(drain(&mut lane).len(), 1, "{op:?}");
        assert!(!lane.has_work());
    }
}

#[test]
fn a_dead_offer_is_handed_back_once() {
    for op in [Op::Read, Op::Write] {
        let mut lane = Alone::new(64, 64, 1);
        let run = Run::new(op, 1, &[1; 4]);
        lane.offer(run.clone()).unwrap();
        assert!(lane.poll_transmit(&mut { ROOM }).is_some());
        run.dead.set(true);
        assert_eq!(
            lane.poll_transmit(&mut { ROOM }),
            Some(Transmit::Dead(run.clone()))
        );
        assert_eq!(lane.poll_transmit(&mut { ROOM }), None);
        // Chunks sent before are still in flight.
        assert_eq!(lane.load(), 1);
        assert_eq!(in_flight(lane.close()), [run.pieces[0]]);
    }
}

#[test]
fn a_chunk_that_is_withdrawn_frees_its_place_and_cannot_be_settled_again() {
    let mut lane = Alone::new(1, 64, 1);
    let run = Run::new(Op::Write, 1, &[7, 8]);
    lane.offer(run.clone()).unwrap();
    assert_eq!(drain(&mut lane), ["write"]);
    assert_eq!(lane.withdraw(chunk(1, 1)), None);
    assert_eq!(lane.withdraw(chunk(1, 0)), Some(run.pieces[0]));
    assert_eq!((lane.load(), lane.withdraw(chunk(1, 0))), (0, None));
    assert_eq!(
        lane.handle_frame(&frame(Kind::Ack, chunk(1, 0), 0)),
        Err(Violation::NotInFlight {
            id: chunk(1, 0),
            kind: Kind::Ack
        })
    );
    assert_eq!(drain(&mut lane), ["write"]);
    assert_eq!(lane.load(), 8);
}

#[test]
fn a_peer_may_have_a_window_of_unsettled_chunks() {
    let mut lane = Alone::new(64, 2, 1);
    let write = |seq| frame(Kind::Write, chunk(9, seq), 1);
    let full = Err(Violation::TooManyWrites { window: 2 });
    lane.handle_frame(&write(0)).unwrap();
    lane.handle_frame(&write(1)).unwrap();
    assert_eq!(lane.handle_frame(&write(2)), full);
    // Landing is not enough: a landed chunk whose Ack was not sent still counts.
    lane.handle_landed(chunk(9, 1), None);
    assert_eq!(lane.handle_frame(&write(2)), full);
    assert_eq!(lane.replies(), 1);
    assert_eq!(urgent(&mut lane), [(Kind::Ack, chunk(9, 1))]);
    assert_eq!(
        lane.handle_frame(&write(2)),
        Ok(Meaning::Write(chunk(9, 2)))
    );
    // A refusal settles its chunk by itself.
    lane.handle_landed(chunk(9, 0), Some((Status::OutOfBounds, "no".into())));
    assert_eq!(urgent(&mut lane), [(Kind::WriteError, chunk(9, 0))]);
    assert_eq!(urgent(&mut lane), []);
    lane.handle_frame(&write(3)).unwrap();
    assert_eq!(lane.handle_frame(&write(4)), full);
}

#[test]
fn a_peer_may_have_a_window_of_unanswered_requests() {
    let mut lane = Alone::new(64, 2, 1);
    let read = |seq| frame(Kind::Read, chunk(9, seq), 1);
    for seq in 0..2 {
        assert_eq!(
            lane.handle_frame(&read(seq)),
            Ok(Meaning::Request(chunk(9, seq)))
        );
        lane.handle_request(seq);
    }
    assert_eq!(
        lane.handle_frame(&read(2)),
        Err(Violation::TooManyRequests { window: 2 })
    );
    assert_eq!(lane.poll_transmit(&mut { ROOM }), Some(Transmit::Answer(0)));
    assert_eq!(
        lane.handle_frame(&read(2)),
        Ok(Meaning::Request(chunk(9, 2)))
    );
}

#[test]
fn an_answer_of_another_length_does_not_settle_its_chunk() {
    let mut lane = Alone::new(64, 64, 1);
    let run = Run::new(Op::Read, 1, &[10]);
    lane.offer(run.clone()).unwrap();
    assert_eq!(drain(&mut lane), ["request"]);
    for found in [0, 9, 11] {
        assert_eq!(
            lane.handle_frame(&frame(Kind::Data, chunk(1, 0), found)),
            Err(Violation::WrongLength {
                id: chunk(1, 0),
                expected: 10,
                found
            })
        );
    }
    // The end of the connection settles the chunk.
    assert_eq!(in_flight(lane.close()), run.pieces[..]);
}

#[test]
fn a_mark_is_sent_behind_the_replies_for_what_has_landed() {
    let mut lane = Alone::new(64, 64, 1);
    for seq in 0..2 {
        lane.handle_frame(&frame(Kind::Write, chunk(1, seq), 1))
            .unwrap();
    }
    lane.handle_frame(&Header::new(Kind::Ping, 5)).unwrap();
    lane.push_pong(5);
    lane.handle_landed(chunk(1, 0), None);
    assert!(lane.push_mark(77));
    lane.handle_landed(chunk(1, 1), None);
    assert_eq!(
        urgent(&mut lane),
        [
            (Kind::Pong, chunk(5, 0)),
            (Kind::Ack, chunk(1, 0)),
            (Kind::Ping, chunk(77, 0)),
            (Kind::Ack, chunk(1, 1)),
        ]
    );
}

#[test]
fn unanswered_pings_of_a_peer_are_limited() {
    let mut lane = Alone::new(1, 1, 1);
    let ping = |lane: &mut Alone| lane.handle_frame(&Header::new(Kind::Ping, 7));
    for _ in 0..MAX_PINGS {
        assert_eq!(ping(&mut lane), Ok(Meaning::Ping(7)));
    }
    assert_eq!(ping(&mut lane), Err(Violation::TooManyPings));
    // A ping counts as answered when its Pong can leave, not while it waits.
    for _ in 0..10 {
        lane.push_pong(7);
    }
    assert_eq!(ping(&mut lane), Err(Violation::TooManyPings));
    assert_eq!(urgent(&mut lane).len(), 10);
    for _ in 0..10 {
        assert_eq!(ping(&mut lane), Ok(Meaning::Ping(7)));
    }
    assert_eq!(ping(&mut lane), Err(Violation::TooManyPings));
    lane.push_pong(7);
    lane.close();
    assert_eq!(urgent(&mut lane), []);
}

#[test]
fn a_lane_asks_no_more_than_its_peer_allows() {
    let mut lane = Alone::new(1, 1, 1);
    for token in 1..MAX_PINGS as u64 {
        assert!(lane.push_ping(token));
    }
    assert!(!lane.push_ping(5000));
    // There is room for one mark, and for nothing else.
    assert!(lane.push_mark(77));
    assert!(!lane.push_mark(78));
    assert_eq!(urgent(&mut lane).len(), MAX_PINGS);
    assert!(!lane.push_ping(5000));
    for _ in 0..2 {
        lane.handle_frame(&Header::new(Kind::Pong, 1)).unwrap();
    }
    assert!(lane.push_ping(5000));
    assert!(!lane.push_ping(5001));
    // Excess Pongs are not credited to later pings.
    for _ in 0..2 * MAX_PINGS {
        lane.handle_frame(&Header::new(Kind::Pong, 1)).unwrap();
    }
    assert!(lane.push_ping(1));
    assert_eq!(lane.pings, 1);
}

#[test]
fn a_long_notification_does_not_keep_its_memory() {
    let mut lane = Alone::new(64, 64, 1);
    lane.push_control(|out| out.resize(1 << 20, 0));
    let mut out = Vec::new();
    lane.encode_urgent(&mut out);
    assert_eq!(out.len(), 1 << 20);
    assert!(lane.control.capacity() <= CONTROL_BYTES);
}

#[test]
fn a_closed_lane_takes_and_sends_nothing() {
    let mut lane = Alone::new(2, 2, 1);
    let (read, write) = (
        Run::new(Op::Read, 1, &[1; 4]),
        Run::new(Op::Write, 2, &[1; 4]),
    );
    lane.offer(read.clone()).unwrap();
    lane.offer(write.clone()).unwrap();
    drain(&mut lane);
    lane.handle_frame(&frame(Kind::Write, chunk(9, 0), 1))
        .unwrap();
    lane.handle_landed(chunk(9, 0), None);
    lane.handle_request(1);
    assert!(lane.push_mark(5));
    lane.handle_frame(&frame(Kind::Write, chunk(9, 1), 1))
        .unwrap();
    lane.handle_landed(chunk(9, 1), None);
    assert!(lane.is_busy() && lane.has_work());

    let remains = lane.close();
    assert_eq!(remains.offers, [read.clone(), write.clone()]);
    assert_eq!(
        in_flight(remains),
        [&read.pieces[..2], &write.pieces[..2]].concat()
    );

    assert_eq!(lane.offer(read.clone()), Err(read));
    lane.push_control(|_| panic!("nothing is queued"));
    assert!(!lane.push_mark(6) && !lane.push_ping(6));
    lane.handle_request(2);
    lane.handle_landed(chunk(9, 0), None);
    assert_eq!(urgent(&mut lane), []);
    assert_eq!(lane.poll_transmit(&mut { ROOM }), None);
    assert_eq!((lane.load(), lane.replies()), (0, 0));
    assert!(!lane.is_busy() && !lane.has_work());
    let again = lane.close();
    assert!(again.offers.is_empty() && in_flight(again).is_empty());
}

#[test]
fn a_closed_lane_returns_outcomes_that_the_peer_may_not_have() {
    let refusal = |seq: u32| (seq % 2 == 1).then(|| (Status::Other, format!("no {seq}")));
    let ending = |seq| Ending {
        id: chunk(9, seq),
        refusal: refusal(seq),
    };
    // Of 6 chunks, this many outcomes were sent; the others landed and wait.
    for told in 0..=6 {
        let mut lane = Alone::new(1, 4, 1);
        for seq in 0..6 {
            let write = frame(Kind::Write, chunk(9, seq), 1);
            assert_eq!(lane.handle_frame(&write), Ok(Meaning::Write(chunk(9, seq))));
            lane.handle_landed(chunk(9, seq), refusal(seq));
            if seq < told {
                assert_eq!(urgent(&mut lane).len(), 1);
            } else if lane.replies() == 4 {
                break;
            }
        }
        let last = lane.replies() as u32 + told;
        let first = last.saturating_sub(4);
        let endings: Vec<_> = (first..last).map(ending).collect();
        assert_eq!(lane.close().endings, endings, "{told} were told");
        assert_eq!(lane.close().endings, []);
    }
    // Outcomes queued before a mark were not sent, and not received.
    let mut lane = Alone::new(1, 4, 1);
    lane.handle_frame(&frame(Kind::Write, chunk(9, 0), 1))
        .unwrap();
    lane.handle_landed(chunk(9, 0), None);
    assert!(lane.push_mark(5));
    assert_eq!(lane.close().endings, [ending(0)]);
}

#[test]
fn violations_name_the_chunk_and_the_limit() {
    let violations = [
        Violation::NotInFlight {
            id: chunk(1, 2),
            kind: Kind::Ack,
        },
        Violation::WrongLength {
            id: chunk(1, 2),
            expected: 10,
            found: 9,
        },
        Violation::TooManyRequests { window: 8 },
        Violation::TooManyPings,
    ];
    let texts: Vec<_> = violations
        .iter()
        .map(|violation| format!("{violation}"))
        .collect();
    assert_eq!(
        texts,
        [
            "it settled chunk 2 of transfer 1 with Ack, which is not in flight on this lane",
            "it answered chunk 2 of transfer 1 with 9 bytes where 10 were asked for",
            "it has more than 8 READ requests in flight on one lane",
            "it has more than 1024 unanswered pings on one lane",
        ]
    );
}
