//! Payload: that of a frame being received, with its destination, and that which travels beside
//! the stream.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use tcpx_proto::frame::{Header, Kind, Status};
use tcpx_proto::lane::ChunkId;

use super::Connection;
use super::lane::add_locked;
use crate::carrier::Way;
use crate::carrier::comm::Target;
use crate::error::Error;
use crate::link::Held;
use crate::log::limited;
use crate::memory::{Grant, Place, Refusal};
use crate::transfer::ChunkRef;

/// A frame whose header, table and extra have been received.
pub(super) struct Incoming {
    pub(super) header: Header,
    /// Payload bytes that are still to come on the stream.
    pub(super) left: usize,
    pub(super) sink: Sink,
    /// The carrier that moves the payload to memory; `None` if it goes to no memory.
    pub(super) way: Option<Way>,
    /// Reserved memory, held until the application takes the contents.
    pub(super) held: Option<Held>,
}

/// Destination of a payload.
pub(super) enum Sink {
    /// A WRITE into local regions.
    Regions {
        grant: Grant,
        notification: Option<Vec<u8>>,
    },
    /// The answer to a READ of this side.
    Run(ChunkRef),
    /// The same, after a failure: no operation is in flight any more.
    Failed(ChunkRef, Error),
    /// The peer's reason for refusing a chunk of this side.
    Refused {
        chunk: ChunkRef,
        status: Status,
        text: Vec<u8>,
    },
    /// A message of the peer, kept until it is complete.
    Message { middle: Vec<u8>, bytes: Vec<u8> },
    /// The payload is dropped; for a WRITE, the reason is reported at the end.
    Nowhere(Option<Refusal>),
}

impl Sink {
    /// Returns the memory that receives the payload.
    pub(super) fn place(&self) -> Option<Place<'_>> {
        match self {
            Self::Regions { grant, .. } => Some(grant.place()),
            Self::Run(chunk) => Some(chunk.place()),
            _ => None,
        }
    }
}

impl Incoming {
    pub(super) fn id(&self) -> ChunkId {
        ChunkId {
            transfer: self.header.transfer,
            seq: self.header.seq,
        }
    }

    /// Returns whether the frame must wait for earlier frames on the lane: notifications and
    /// messages are delivered in order, after the chunks before them have landed. Pings are
    /// answered in order as well, except for those that only request a sign of life.
    pub(super) fn waits_its_turn(&self) -> bool {
        match self.sink {
            Sink::Regions { .. } | Sink::Run(_) => true,
            Sink::Failed(..) | Sink::Refused { .. } => false,
            Sink::Nowhere(_) | Sink::Message { .. } => match self.header.kind {
                // Numbered messages keep their order.
                Kind::Write | Kind::Notify | Kind::Send | Kind::SendDone | Kind::LaneDown => true,
                Kind::Ping => self.header.transfer != 0,
                _ => false,
            },
        }
    }

    /// Records that the payload did not reach its memory.
    pub(super) fn fail(&mut self, error: Error) {
        self.way = None;
        self.sink = match std::mem::replace(&mut self.sink, Sink::Nowhere(None)) {
            Sink::Regions { .. } => {
                limited!(
                    WARN,
                    %error,
                    remedy = "deregister memory before it is unmapped or its device is reset",
                    "memory failed, a peer's WRITE is refused"
                );
                Sink::Nowhere(Some(Refusal::failed(&error)))
            }
            Sink::Run(chunk) => Sink::Failed(chunk, error),
            other => other,
        };
    }

    /// Returns the chunk of this side that the frame settles, with the error if it failed.
    pub(super) fn into_chunk(self, connection: &Connection) -> Option<(ChunkRef, Option<Error>)> {
        match self.sink {
            Sink::Run(chunk) => Some((chunk, None)),
            Sink::Failed(chunk, error) => Some((chunk, Some(error))),
            Sink::Refused {
                chunk,
                status,
                text,
            } => Some((chunk, Some(connection.refused(status, &text)))),
            Sink::Regions { .. } | Sink::Message { .. } | Sink::Nowhere(_) => None,
        }
    }
}

impl Target for Incoming {
    fn bytes(&self) -> usize {
        self.header.payload as usize
    }

    fn place(&mut self) -> Option<Place<'_>> {
        if let Sink::Regions { grant, .. } = &self.sink
            && grant.has_dead_memory()
        {
            self.sink = Sink::Nowhere(Some(Refusal::Revoked));
        }
        match &self.sink {
            Sink::Run(chunk) if !chunk.may_land() => None,
            sink => sink.place(),
        }
    }

    fn is_dead(&self) -> bool {
        match &self.sink {
            Sink::Regions { grant, .. } => grant.has_dead_memory(),
            Sink::Run(chunk) => !chunk.may_land(),
            // The payload may have had a destination before.
            _ => true,
        }
    }
}

/// Shared view of payload that travels beside the stream.
#[derive(Default)]
pub(super) struct Beside {
    /// True while the payload waits for something outside of this process.
    waiting: AtomicBool,
    /// Bytes moved.
    moved: AtomicU64,
}

impl Beside {
    pub(super) fn update(&self, waiting: bool, moved: u64) {
        self.waiting.store(waiting, Ordering::Relaxed);
        add_locked(&self.moved, moved);
    }

    /// Returns the bytes moved, if payload is waiting.
    pub(super) fn moved(&self) -> Option<u64> {
        let moved = self.moved.load(Ordering::Relaxed);
        self.waiting.load(Ordering::Relaxed).then_some(moved)
    }
}
