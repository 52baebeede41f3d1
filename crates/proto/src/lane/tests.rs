//! Shared helpers for the tests of a lane: chunks, postings, and short names for what a lane does.
//!
//! | module | what it tests |
//! |---|---|
//! | `alone` | one lane, step by step |
//! | `model` | one lane and its landing, random steps against a simple model |
//! | `stories` | two sides that talk over the simulated network of `pair` |
//! | `table` | every state against every frame, as the document prints it |

mod alone;
mod end;
mod link;
mod model;
mod pair;
mod stories;
mod table;

use alloc::rc::Rc;
use alloc::vec::Vec;
use core::cell::Cell;

use super::*;
use crate::frame::HEADER_BYTES;

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

/// A posting whose chunks are taken in order. Clones share their state.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Run {
    op: Op,
    pieces: Rc<[Piece]>,
    taken: Rc<Cell<usize>>,
    dead: Rc<Cell<bool>>,
}

impl Run {
    fn new(op: Op, transfer: u64, lengths: &[u64]) -> Self {
        let pieces = (0..).zip(lengths).map(|(seq, bytes)| Piece {
            id: ChunkId { transfer, seq },
            bytes: *bytes,
        });
        Self {
            op,
            pieces: pieces.collect(),
            taken: Rc::default(),
            dead: Rc::default(),
        }
    }

    /// Returns the chunks not taken yet.
    fn rest(&self) -> &[Piece] {
        &self.pieces[self.taken.get()..]
    }
}

impl Offer for Run {
    type Chunk = Piece;

    fn transfer(&self) -> u64 {
        self.pieces[0].id.transfer
    }

    fn op(&self) -> Op {
        self.op
    }

    fn chunks(&self) -> usize {
        self.pieces.len()
    }

    fn take(&self) -> Take<Piece> {
        if self.dead.get() {
            return Take::Dead;
        }
        let Some(piece) = self.rest().first() else {
            return Take::Nothing;
        };
        self.taken.set(self.taken.get() + 1);
        Take::Chunk(*piece)
    }

    fn left(&self) -> usize {
        self.rest().len()
    }
}

/// Returns all chunks that were in flight on a lane that was closed.
fn in_flight(remains: Remains<Run>) -> Vec<Piece> {
    [remains.reads, remains.writes].concat()
}

/// A posting that counts how often a lane examines it or others with the same counter.
#[derive(Clone, Debug)]
struct Counted {
    run: Run,
    looks: Rc<Cell<usize>>,
}

impl Counted {
    fn looked(&self) -> &Run {
        self.looks.set(self.looks.get() + 1);
        &self.run
    }
}

impl Offer for Counted {
    type Chunk = Piece;

    fn transfer(&self) -> u64 {
        self.looked().transfer()
    }

    fn op(&self) -> Op {
        self.looked().op()
    }

    fn chunks(&self) -> usize {
        self.looked().chunks()
    }

    fn take(&self) -> Take<Piece> {
        self.looked().take()
    }

    fn left(&self) -> usize {
        self.looked().left()
    }
}

/// Room for WRITE chunks, room for answers.
#[derive(Clone, Copy, Debug)]
struct Rooms(bool, bool);

impl<O, A> Room<O, A> for Rooms {
    fn for_write(&mut self, _: &O) -> bool {
        self.0
    }

    fn for_answer(&mut self, _: &A) -> bool {
        self.1
    }
}

const ROOM: Rooms = Rooms(true, true);

/// Answers are numbers here.
type Alone = Lane<Run, u32>;

fn frame(kind: Kind, id: ChunkId, payload: u64) -> Header {
    Header {
        seq: id.seq,
        payload,
        ..Header::new(kind, id.transfer)
    }
}

fn chunk(transfer: u64, seq: u32) -> ChunkId {
    ChunkId { transfer, seq }
}

/// Lists everything that the lane can send now, one word each.
fn drain(lane: &mut Alone) -> Vec<&'static str> {
    core::iter::from_fn(|| lane.poll_transmit(&mut { ROOM }))
        .map(|transmit| match transmit {
            Transmit::Request(_) => "request",
            Transmit::Write(_) => "write",
            Transmit::Answer(_) => "answer",
            Transmit::Dead(_) => "dead",
        })
        .collect()
}

/// Returns the frames that wait to be sent ahead of payload.
fn urgent(lane: &mut Alone) -> Vec<(Kind, ChunkId)> {
    let mut out = Vec::new();
    lane.encode_urgent(&mut out);
    let mut rest = &out[..];
    let mut frames = Vec::new();
    while let Some((head, behind)) = rest.split_first_chunk::<HEADER_BYTES>() {
        let header = Header::decode(head).unwrap();
        frames.push((header.kind, chunk(header.transfer, header.seq)));
        rest = &behind[header.payload_on_wire() as usize..];
    }
    assert!(rest.is_empty());
    frames
}
