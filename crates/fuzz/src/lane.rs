//! Lanes. The first byte of the input chooses the peer.

mod hostile;
mod pair;

use std::cell::Cell;
use std::rc::Rc;

use tcpx_proto::frame::{HEADER_BYTES, Header, Kind};
use tcpx_proto::lane::{Chunk, ChunkId, Offer, Op, Room, Take};

/// Two honest lanes: `windows, lanes, operation…`, see [`Action`].
pub const PAIR: u8 = 0;
/// A lane whose peer sends any frames: `windows, (action, header)…`.
pub const HOSTILE: u8 = 1;

/// An action of one side in the [`PAIR`] mode: the low three bits of a byte. The next bit is the
/// side, the others are parameters.
#[derive(Clone, Copy, Debug)]
#[repr(u8)]
pub enum Action {
    /// Posts a transfer of some chunks, with bit 4 a READ.
    Post = 0,
    /// Sends the next frame; bits 4 and 5 are room, with bit 6 a WRITE chunk is withdrawn instead.
    Poll = 1,
    /// Sends urgent frames.
    Flush = 2,
    /// Processes the next frame of the peer.
    Deliver = 3,
    /// Completes one of the copies in flight.
    Land = 4,
    /// Sends a notification, or with bit 4 a ping with a number.
    Say = 5,
    /// Kills a posting.
    Kill = 6,
    /// Sends a ping for a sign of life.
    Ping = 7,
}

/// Checks any input; panics when a lane breaks a promise.
pub fn check(data: &[u8]) {
    match data.split_first() {
        Some((&PAIR, rest)) => pair::check(rest),
        Some((&HOSTILE, rest)) => hostile::check(rest),
        _ => {}
    }
}

/// Two windows of 1 to 16 chunks.
fn windows(byte: u8) -> [usize; 2] {
    [usize::from(byte & 15) + 1, usize::from(byte >> 4) + 1]
}

/// A chunk of a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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

/// A posting whose chunks are taken in order. Clones share their state.
#[derive(Clone, Debug)]
struct Run {
    op: Op,
    transfer: u64,
    chunks: u32,
    taken: Rc<Cell<u32>>,
    dead: Rc<Cell<bool>>,
}

impl Run {
    fn new(op: Op, transfer: u64, chunks: u32) -> Self {
        let (taken, dead) = Default::default();
        Self {
            op,
            transfer,
            chunks,
            taken,
            dead,
        }
    }

    fn piece(&self, seq: u32) -> Piece {
        let id = ChunkId {
            transfer: self.transfer,
            seq,
        };
        let bytes = u64::from(seq) + 1;
        Piece { id, bytes }
    }
}

impl Offer for Run {
    type Chunk = Piece;

    fn transfer(&self) -> u64 {
        self.transfer
    }

    fn op(&self) -> Op {
        self.op
    }

    fn chunks(&self) -> usize {
        self.chunks as usize
    }

    fn take(&self) -> Take<Piece> {
        if self.dead.get() {
            return Take::Dead;
        }
        if !self.has_more() {
            return Take::Nothing;
        }
        let seq = self.taken.get();
        self.taken.set(seq + 1);
        Take::Chunk(self.piece(seq))
    }

    fn left(&self) -> usize {
        (self.chunks - self.taken.get()) as usize
    }
}

/// Room for WRITE chunks, room for answers.
#[derive(Clone, Copy, Debug)]
struct Rooms(bool, bool);

impl<A> Room<Run, A> for Rooms {
    fn for_write(&mut self, _: &Run) -> bool {
        self.0
    }

    fn for_answer(&mut self, _: &A) -> bool {
        self.1
    }
}

fn header(kind: Kind, id: ChunkId, payload: u64) -> Header {
    Header {
        seq: id.seq,
        payload,
        ..Header::new(kind, id.transfer)
    }
}

/// Returns the frames that a lane has encoded, without their texts.
fn decode(mut bytes: &[u8]) -> Vec<Header> {
    let mut headers = Vec::new();
    while let Some((head, rest)) = bytes.split_first_chunk::<HEADER_BYTES>() {
        let header = Header::decode(head).expect("a frame that may be sent");
        bytes = &rest[header.payload_on_wire() as usize..];
        headers.push(header);
    }
    assert!(bytes.is_empty(), "part of a frame");
    headers
}
