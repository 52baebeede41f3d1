//! A lane whose peer sends any frames.

use std::collections::BTreeMap;

use tcpx_proto::frame::{HEADER_BYTES, Header, Kind, Status};
use tcpx_proto::lane::{Chunk, ChunkId, Lane, MAX_PINGS, Meaning, Op, Transmit, Violation};

use super::{Rooms, Run, decode, windows};

/// The expected state of the lane.
struct Books {
    window: usize,
    /// Lengths of this side's chunks in flight.
    writes: BTreeMap<ChunkId, u64>,
    reads: BTreeMap<ChunkId, u64>,
    landing: Vec<ChunkId>,
    /// The peer's chunks that have ended, in this order.
    ended: Vec<ChunkId>,
    replies: usize,
    unanswered: usize,
    pings: usize,
}

/// Feeds frames until one of them breaks the protocol, which then must end the connection.
pub(super) fn check(data: &[u8]) {
    let [sizes, records @ ..] = data else { return };
    let [window, own_window] = windows(*sizes);
    let mut lane = Lane::<Run, ()>::new(window, own_window, 1);
    let mut books = Books {
        window: own_window,
        writes: BTreeMap::new(),
        reads: BTreeMap::new(),
        landing: Vec::new(),
        ended: Vec::new(),
        replies: 0,
        unanswered: 0,
        pings: 0,
    };
    for (op, transfer) in [(Op::Write, 1), (Op::Read, 2)] {
        assert!(lane.offer(Run::new(op, transfer, 12)).is_ok());
    }
    for record in records.as_chunks::<{ 1 + HEADER_BYTES }>().0 {
        let (action, head) = record.split_first().expect("a record");
        act(&mut lane, &mut books, *action);
        let head = head.first_chunk().expect("a header");
        if let Ok(header) = Header::decode(head) {
            let meaning = lane.handle_frame(&header);
            if !is_due(&mut books, &header, meaning) {
                break;
            }
            if header.kind == Kind::Read {
                books.unanswered += 1;
                lane.handle_request(());
            }
        }
        let lengths = books.writes.values().chain(books.reads.values());
        assert_eq!(lane.load(), lengths.sum::<u64>());
        assert_eq!(lane.replies(), books.replies);
        assert!(books.landing.len() + books.replies <= own_window);
        assert!(books.unanswered <= own_window);
    }
    let remains = lane.close();
    let endings: Vec<_> = remains.endings.iter().map(|ending| ending.id).collect();
    let unheard = books.ended.len().saturating_sub(own_window);
    assert_eq!(endings, books.ended[unheard..]);
    for piece in remains.reads.into_iter().chain(remains.writes) {
        let lengths = [
            books.writes.remove(&piece.id),
            books.reads.remove(&piece.id),
        ];
        assert_eq!(lengths.iter().flatten().count(), 1);
    }
    assert!(books.writes.is_empty() && books.reads.is_empty(), "lost");
}

/// Performs an action of this side between two frames.
fn act(lane: &mut Lane<Run, ()>, books: &mut Books, action: u8) {
    if action & 1 != 0 {
        match lane.poll_transmit(&mut Rooms(action & 2 != 0, action & 4 != 0)) {
            Some(Transmit::Write(piece)) => drop(books.writes.insert(piece.id, piece.bytes())),
            Some(Transmit::Request(piece)) => drop(books.reads.insert(piece.id, piece.bytes())),
            Some(Transmit::Answer(())) => books.unanswered -= 1,
            Some(Transmit::Dead(_)) => panic!("nothing is dead"),
            None => {}
        }
    }
    if action & 8 != 0
        && let Some(id) = books.landing.pop()
    {
        let refusal = (action & 16 != 0).then(|| (Status::Other, "no".into()));
        lane.handle_landed(id, refusal);
        books.ended.push(id);
        books.replies += 1;
    }
    if action & 32 != 0 {
        let mut out = Vec::new();
        lane.encode_urgent(&mut out);
        assert_eq!(decode(&out).len(), books.replies);
        books.replies = 0;
    }
}

/// Checks the reported meaning of a frame. Returns whether the connection continues.
fn is_due(
    books: &mut Books,
    header: &Header,
    meaning: Result<Meaning<super::Piece>, Violation>,
) -> bool {
    let id = ChunkId {
        transfer: header.transfer,
        seq: header.seq,
    };
    let ours = match header.kind {
        Kind::Ack | Kind::WriteError => &mut books.writes,
        _ => &mut books.reads,
    };
    match meaning {
        Ok(Meaning::Write(named)) => {
            assert_eq!((header.kind, named), (Kind::Write, id));
            books.landing.push(id);
            assert!(books.landing.len() + books.replies <= books.window);
        }
        Ok(Meaning::Request(named)) => {
            assert_eq!((header.kind, named), (Kind::Read, id));
            assert!(books.unanswered < books.window);
        }
        Ok(Meaning::Data(piece)) => {
            assert_eq!((header.kind, piece.id), (Kind::Data, id));
            assert_eq!(ours.remove(&id), Some(header.payload));
        }
        Ok(Meaning::Acknowledged(piece)) => {
            assert_eq!((header.kind, piece.id), (Kind::Ack, id));
            assert_eq!(ours.remove(&id), Some(piece.bytes()));
        }
        Ok(Meaning::Refused(piece, _)) => {
            assert!(matches!(header.kind, Kind::WriteError | Kind::ReadError));
            assert_eq!(piece.id, id);
            assert_eq!(ours.remove(&id), Some(piece.bytes()));
        }
        Ok(Meaning::Message | Meaning::Ping(_) | Meaning::Pong(_)) => {
            assert!(header.kind as u8 >= Kind::Notify as u8);
            books.pings += usize::from(header.kind == Kind::Ping);
            assert!(books.pings <= MAX_PINGS);
        }
        Ok(Meaning::Received(next)) => {
            assert_eq!((header.kind, next), (Kind::Received, header.seq));
        }
        Err(Violation::TooManyPings) => {
            assert_eq!((header.kind, books.pings), (Kind::Ping, MAX_PINGS));
            return false;
        }
        Err(Violation::NotInFlight { .. }) => {
            assert!(!ours.contains_key(&id));
            return false;
        }
        Err(Violation::WrongLength { .. }) => {
            assert_eq!(header.kind, Kind::Data);
            assert!(ours.get(&id).is_some_and(|bytes| *bytes != header.payload));
            return false;
        }
        Err(Violation::TooManyWrites { .. }) => {
            assert_eq!(header.kind, Kind::Write);
            assert_eq!(books.landing.len() + books.replies, books.window);
            return false;
        }
        Err(Violation::TooManyRequests { .. }) => {
            assert_eq!((header.kind, books.unanswered), (Kind::Read, books.window));
            return false;
        }
        Err(violation) => {
            assert_eq!((header.kind, violation), (Kind::Comm, Violation::LateComm));
            return false;
        }
    }
    true
}
