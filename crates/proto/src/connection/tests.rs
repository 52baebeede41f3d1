//! Shared helpers for the tests of a connection, and tests of its parts one by one.
//!
//! | module | what it tests |
//! |---|---|
//! | here | messages and losses, step by step |
//! | `cuts` | two sides that talk over the simulated network of `pair`, cut at every byte |

mod cuts;
mod pair;
mod side;

use alloc::string::String;
use alloc::vec;

use super::*;
use crate::frame::Status;
use crate::lane::ChunkId;

/// A chunk: its id and its length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Piece {
    id: ChunkId,
    bytes: u64,
}

impl Chunk for Piece {
    fn id(&self) -> ChunkId {
        self.id
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }
}

fn piece(seq: u32) -> Piece {
    let id = ChunkId { transfer: 7, seq };
    Piece { id, bytes: 10 }
}

fn landed(seq: u32) -> Ending {
    Ending {
        id: piece(seq).id,
        refusal: None,
    }
}

fn refused(seq: u32) -> Ending {
    Ending {
        refusal: Some((Status::OutOfBounds, String::from("no"))),
        ..landed(seq)
    }
}

fn stream(lane: u16, generation: u32) -> StreamId {
    StreamId { lane, generation }
}

/// Returns an outbox whose next message has this number.
fn outbox_at(first: u32) -> Outbox {
    Outbox {
        first,
        ..Outbox::default()
    }
}

fn inbox_at(next: u32) -> Inbox {
    Inbox {
        next,
        ..Inbox::default()
    }
}

/// Pushes a message of 4 bytes, which are its number.
fn push(outbox: &mut Outbox) -> u32 {
    let message = outbox.push(|number, out| out.extend(number.to_le_bytes()));
    u32::from_le_bytes(message.try_into().unwrap())
}

fn kept(outbox: &Outbox) -> Vec<u32> {
    let numbers = outbox.messages().map(|message| message.try_into().unwrap());
    numbers.map(u32::from_le_bytes).collect()
}

#[test]
fn messages_are_kept_until_the_peer_has_them() {
    let mut outbox = Outbox::default();
    assert_eq!([(); 4].map(|()| push(&mut outbox)), [1, 2, 3, 4]);
    assert_eq!(outbox.bytes(), 16);
    outbox.handle_received(3).unwrap();
    assert_eq!((kept(&outbox), outbox.bytes()), (vec![3, 4], 8));
    // Repeated and late reports change nothing.
    for again in [3, 2, 1] {
        outbox.handle_received(again).unwrap();
        assert_eq!(kept(&outbox), [3, 4]);
    }
    outbox.handle_received(5).unwrap();
    assert_eq!((kept(&outbox), outbox.bytes()), (vec![], 0));
    assert_eq!(push(&mut outbox), 5);
    outbox.close();
    assert_eq!((kept(&outbox), outbox.bytes()), (vec![], 0));
}

#[test]
fn acknowledging_an_unsent_message_is_refused() {
    let not_sent = |sent, found| Err(Violation::MessageNotSent { sent, found });
    let mut outbox = Outbox::default();
    assert_eq!(outbox.handle_received(2), not_sent(0, 2));
    assert_eq!(outbox.handle_received(0), not_sent(0, 0));
    push(&mut outbox);
    push(&mut outbox);
    assert_eq!(outbox.handle_received(4), not_sent(2, 4));
    assert_eq!(outbox.handle_received(0), not_sent(2, 0));
    assert_eq!(kept(&outbox), [1, 2], "a bogus report drops nothing");
    outbox.handle_received(3).unwrap();
    assert_eq!(outbox.handle_received(4), not_sent(2, 4));
    assert_eq!(
        outbox.handle_received(u32::MAX / 2),
        not_sent(2, u32::MAX / 2)
    );
}

#[test]
fn message_numbers_wrap_around_and_skip_0() {
    let last = u32::MAX;
    let mut outbox = outbox_at(last - 1);
    let sent = [(); 4].map(|()| push(&mut outbox));
    assert_eq!(sent, [last - 1, last, 1, 2]);
    let mut inbox = inbox_at(last - 1);
    for number in sent {
        assert_eq!(inbox.handle_message(number, 4), Ok(true), "{number}");
        assert_eq!(inbox.handle_message(number, 4), Ok(false), "{number}");
    }
    assert_eq!(inbox.handle_message(last, 4), Ok(false));
    assert_eq!(inbox.next, 3);
    let missing = Violation::MessageMissing {
        expected: 3,
        found: 4,
    };
    assert_eq!(inbox.handle_message(4, 4), Err(missing));

    outbox.handle_received(1).unwrap();
    assert_eq!(kept(&outbox), [1, 2]);
    outbox.handle_received(last).unwrap();
    assert_eq!(kept(&outbox), [1, 2], "late, from before the wrap");
    let not_sent = Violation::MessageNotSent { sent: 2, found: 4 };
    assert_eq!(outbox.handle_received(4), Err(not_sent));
    outbox.handle_received(3).unwrap();
    assert_eq!(kept(&outbox), []);
    let mut turned = outbox_at(1);
    turned.handle_received(last).unwrap();
}

#[test]
fn each_message_is_delivered_once_and_none_is_left_out() {
    let mut inbox = Inbox::default();
    assert_eq!(inbox.handle_message(0, 9), Ok(true), "not numbered");
    assert_eq!(inbox.handle_message(1, 9), Ok(true));
    assert_eq!(inbox.handle_message(1, 9), Ok(false));
    assert_eq!(inbox.handle_message(2, 9), Ok(true));
    assert_eq!(inbox.handle_message(0, 9), Ok(true), "each time");
    assert_eq!(inbox.handle_message(1, 9), Ok(false));
    let missing = |found| Err(Violation::MessageMissing { expected: 3, found });
    assert_eq!(inbox.handle_message(4, 9), missing(4));
    assert_eq!(inbox.handle_message(1 << 30, 9), missing(1 << 30));
    assert_eq!(
        inbox.handle_message(3, 9),
        Ok(true),
        "a gap changes nothing"
    );
}

#[test]
fn the_peer_is_told_when_it_keeps_much_or_asks() {
    let mut inbox = Inbox::default();
    assert_eq!(inbox.poll_received(true), None, "nothing has come");
    inbox.handle_message(0, 1 << 20).unwrap();
    assert_eq!(
        inbox.poll_received(true),
        None,
        "a message without a number is not kept"
    );
    for number in 1..RECEIVED_MESSAGES {
        inbox.handle_message(number, 1).unwrap();
        assert_eq!(inbox.poll_received(false), None, "{number}");
    }
    inbox.handle_message(32, 1).unwrap();
    assert_eq!(inbox.poll_received(false), Some(33));
    assert_eq!(inbox.poll_received(true), None, "already reported");

    inbox.handle_message(33, RECEIVED_BYTES - 1).unwrap();
    assert_eq!(inbox.poll_received(false), None);
    inbox.handle_message(34, 1).unwrap();
    assert_eq!(inbox.poll_received(false), Some(35));

    inbox.handle_message(35, 1).unwrap();
    assert_eq!(inbox.poll_received(false), None);
    assert_eq!(inbox.poll_received(true), Some(36));

    // The peer sends again because the report was lost.
    inbox.handle_message(35, 1).unwrap();
    assert_eq!(inbox.poll_received(false), Some(36));
}

#[test]
fn writes_wait_for_the_peers_word() {
    let mut losses = Losses::new(2);
    let writes = vec![piece(0), piece(1), piece(2)];
    assert_eq!(losses.close(stream(1, 0), writes), Known::default());
    assert!(losses.is_waiting());
    // Reports about another lane, about settled chunks, and in any order.
    let other = losses.handle_down(stream(0, 0), vec![landed(0)]);
    assert_eq!(other, Ok(Heard::Close));
    let endings = vec![landed(9), refused(2), landed(0)];
    let known = Known {
        settled: vec![(piece(0), landed(0)), (piece(2), refused(2))],
        again: vec![piece(1)],
    };
    let heard = losses.handle_down(stream(1, 0), endings.clone());
    assert_eq!(heard, Ok(Heard::Known(known)));
    assert!(!losses.is_waiting());
    // A repeated report decides nothing twice.
    let again = losses.handle_down(stream(1, 0), endings);
    assert_eq!(again, Ok(Heard::Known(Known::default())));
}

#[test]
fn a_word_that_comes_first_is_kept_until_the_stream_is_closed() {
    let mut losses = Losses::new(1);
    let heard = losses.handle_down(stream(0, 0), vec![landed(1)]);
    assert_eq!(heard, Ok(Heard::Close));
    assert!(
        !losses.open(stream(0, 1)),
        "the previous stream is still open"
    );
    let known = Known {
        settled: vec![(piece(1), landed(1))],
        again: vec![piece(0)],
    };
    assert_eq!(losses.close(stream(0, 0), vec![piece(0), piece(1)]), known);
    assert!(!losses.is_waiting());
    // The report was about that stream only.
    assert!(losses.open(stream(0, 1)));
    assert_eq!(losses.close(stream(0, 1), vec![piece(1)]), Known::default());
    assert!(losses.is_waiting());
}

#[test]
fn a_stream_that_never_was_here_is_answered_for_once() {
    let mut losses = Losses::<Piece>::new(1);
    losses.close(stream(0, 0), Vec::new());
    let never = losses.handle_down(stream(0, 3), vec![landed(0)]);
    assert_eq!(never, Ok(Heard::Never));
    let known = Ok(Heard::Known(Known::default()));
    assert_eq!(losses.handle_down(stream(0, 3), Vec::new()), known);
    for given_up in 0..=3 {
        assert!(!losses.open(stream(0, given_up)), "{given_up}");
    }
    // Reports on abandoned streams come after a later stream has opened.
    assert!(losses.open(stream(0, 7)));
    for given_up in [4, 6] {
        let down = stream(0, given_up);
        assert_eq!(losses.handle_down(down, Vec::new()), Ok(Heard::Never));
        assert_eq!(losses.handle_down(down, Vec::new()), known);
    }
    assert_eq!(losses.handle_down(stream(0, 0), Vec::new()), known);
    let open = losses.handle_down(stream(0, 7), Vec::new());
    assert_eq!(open, Ok(Heard::Close));
}

#[test]
fn chunks_of_each_generation_wait_for_the_word_on_it() {
    let mut losses = Losses::new(1);
    losses.close(stream(0, 0), vec![piece(0)]);
    assert!(losses.open(stream(0, 1)));
    losses.close(stream(0, 1), vec![piece(1)]);
    assert!(losses.open(stream(0, 2)));
    let again = |seq| {
        let again = vec![piece(seq)];
        Ok(Heard::Known(Known {
            again,
            ..Known::default()
        }))
    };
    // A report on an older stream does not settle chunk 1.
    assert_eq!(losses.handle_down(stream(0, 0), vec![landed(1)]), again(0));
    assert!(losses.is_waiting());
    assert_eq!(losses.handle_down(stream(0, 1), Vec::new()), again(1));
    assert!(!losses.is_waiting());
    let open = losses.handle_down(stream(0, 2), Vec::new());
    assert_eq!(open, Ok(Heard::Close));
}

#[test]
fn a_lane_outside_of_the_connection_is_refused() {
    let mut losses = Losses::<Piece>::new(2);
    let none = Err(Violation::NoSuchLane { lane: 2, lanes: 2 });
    assert_eq!(losses.handle_down(stream(2, 0), Vec::new()), none);
    assert!(!losses.open(stream(2, 1)));
    let known = losses.close(stream(2, 0), vec![piece(0)]);
    assert_eq!((known, losses.is_waiting()), (Known::default(), false));
}

#[test]
fn ending_returns_all_chunks() {
    let mut losses = Losses::new(2);
    losses.close(stream(0, 0), vec![piece(0), piece(1)]);
    losses.close(stream(1, 0), vec![piece(2)]);
    assert_eq!(losses.end(), [piece(0), piece(1), piece(2)]);
    assert!(!losses.is_waiting());
    assert_eq!(losses.end(), []);
}

#[test]
fn what_a_peer_makes_a_connection_keep_is_bounded() {
    let mut losses = Losses::new(1);
    losses.close(stream(0, 0), vec![piece(0)]);
    for generation in (2..10_000).step_by(2) {
        assert!(losses.open(stream(0, generation)));
        // Reports on streams of long ago, and twice on the present one.
        for named in [0, generation / 2, generation, generation] {
            let endings = vec![landed(named); 8];
            losses.handle_down(stream(0, named), endings).unwrap();
        }
        losses.close(stream(0, generation), Vec::new());
        let slot = &losses.slots[0];
        assert!(slot.missed.len() <= MAX_MISSED && slot.unknown.is_empty());
        assert!(slot.heard.is_none());
    }
}
