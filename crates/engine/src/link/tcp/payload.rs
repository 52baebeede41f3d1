//! The payload of a frame that is being received, and where it goes.

use tcpx_proto::frame::{Header, Kind, Status};
use tcpx_proto::lane::ChunkId;

use super::Connection;
use crate::carrier::Way;
use crate::carrier::comm::Target;
use crate::error::Error;
use crate::link::Held;
use crate::log::limited;
use crate::memory::{Grant, Place, Refusal};
use crate::transfer::ChunkRef;

/// A frame whose header, table and extra are here.
pub(super) struct Incoming {
    pub(super) header: Header,
    /// Bytes of the payload that are to come on the stream.
    pub(super) left: usize,
    pub(super) sink: Sink,
    /// How the payload gets to its memory; none if it goes to none.
    pub(super) way: Option<Way>,
    /// What is kept until the application takes it.
    pub(super) held: Option<Held>,
}

/// Where payload goes.
pub(super) enum Sink {
    /// A WRITE into our regions.
    Regions {
        grant: Grant,
        notification: Option<Vec<u8>>,
    },
    /// The answer to a READ of ours.
    Run(ChunkRef),
    /// The same, which has failed: nothing of it is under way any more.
    Failed(ChunkRef, Error),
    /// Why the peer has refused a chunk of ours.
    Refused {
        chunk: ChunkRef,
        status: Status,
        text: Vec<u8>,
    },
    /// A message of the peer, kept until it is whole.
    Message { middle: Vec<u8>, bytes: Vec<u8> },
    /// Nowhere; for a WRITE, the reason is reported at the end.
    Nowhere(Option<Refusal>),
}

impl Sink {
    /// The memory that payload goes to.
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

    /// Whether it may be dealt with only after what came before it on the lane: notifications and
    /// messages are delivered in order, after the chunks before them have landed. So are pings answered,
    /// but for those that only ask for a sign of life.
    pub(super) fn waits_its_turn(&self) -> bool {
        match self.sink {
            Sink::Regions { .. } | Sink::Run(_) => true,
            Sink::Failed(..) | Sink::Refused { .. } => false,
            Sink::Nowhere(_) | Sink::Message { .. } => match self.header.kind {
                // Numbered messages stay in their order.
                Kind::Write | Kind::Notify | Kind::Send | Kind::SendDone | Kind::LaneDown => true,
                Kind::Ping => self.header.transfer != 0,
                _ => false,
            },
        }
    }

    /// Notes that its bytes have not reached their memory.
    pub(super) fn fail(&mut self, error: Error) {
        self.way = None;
        self.sink = match std::mem::replace(&mut self.sink, Sink::Nowhere(None)) {
            Sink::Regions { .. } => {
                limited!(WARN, %error, "memory failed, a peer's WRITE is refused");
                Sink::Nowhere(Some(Refusal::failed(&error)))
            }
            Sink::Run(chunk) => Sink::Failed(chunk, error),
            other => other,
        };
    }

    /// The chunk of ours that is settled with this frame, and why it has failed if it has.
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
            // It may have had a place before.
            _ => true,
        }
    }
}
