//! Violations of a lane's protocol by the peer.

use super::{ChunkId, MAX_PINGS};
use crate::frame::Kind;

/// Reports a peer that broke the protocol of a lane; the connection must end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Violation {
    /// The peer settled a chunk that is not in flight.
    #[error("it settled {id} with {kind:?}, which is not in flight on this lane")]
    NotInFlight {
        /// The chunk that the peer named.
        id: ChunkId,
        /// The kind of its frame.
        kind: Kind,
    },
    /// The peer's answer to a READ has another length than requested.
    #[error("it answered {id} with {found} bytes where {expected} were asked for")]
    WrongLength {
        /// The chunk.
        id: ChunkId,
        /// Bytes requested.
        expected: u64,
        /// Bytes announced.
        found: u64,
    },
    /// The peer has more READ requests in flight than its window allows.
    #[error("it has more than {window} READ requests in flight on one lane")]
    TooManyRequests {
        /// The window of the peer.
        window: usize,
    },
    /// The peer has more WRITE chunks in flight than its window allows.
    #[error("it has more than {window} WRITE chunks in flight on one lane")]
    TooManyWrites {
        /// The window of the peer.
        window: usize,
    },
    /// The peer has more unanswered pings than allowed. Typical cause: it does not read.
    #[error("it has more than {MAX_PINGS} unanswered pings on one lane")]
    TooManyPings,
    /// The peer set up comms on a lane in use.
    #[error("it set comms up on a lane that is in use")]
    LateComm,
    /// The peer left out a message.
    #[error("it sent message {found} where {expected} is next")]
    MessageMissing {
        /// The number that is next.
        expected: u32,
        /// The number that came.
        found: u32,
    },
    /// The peer acknowledged a message that was not sent.
    #[error("it received the messages before {found}, of which {sent} is the last")]
    MessageNotSent {
        /// The number of the last message sent.
        sent: u32,
        /// The number that the peer named.
        found: u32,
    },
    /// The peer named a lane that the connection does not have.
    #[error("it has lost lane {lane} of {lanes}")]
    NoSuchLane {
        /// The lane that the peer named.
        lane: u16,
        /// Number of lanes of the connection.
        lanes: usize,
    },
}
