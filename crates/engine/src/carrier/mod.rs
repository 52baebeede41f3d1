//! Carriers: how the payload of one frame gets out of, or into, memory.
//!
//! A lane's frames always travel on its stream. A carrier moves their payload:
//!
//! | carrier | payload travels | memory |
//! |---|---|---|
//! | [`comm`] | beside the stream, on a plugin's comm | any that the plugin accepts |
//! | [`staged`] | behind its frame | device memory, through pinned slots |
//! | [`stream`] | behind its frame | host memory, directly |
//!
//! The sender uses the first carrier that accepts a payload, by the location of its memory and its
//! length; the receiver decides by the frame's flag and the location of its own memory. A lane has
//! its carriers as a list of [`SendCarrier`] and a list of [`ReceiveCarrier`], in this order, and
//! depends on none: a new carrier is a file here and a line in [`SendCarriers::new`] and
//! [`ReceiveCarriers::new`].
//!
//! A carrier reports when the bytes of a payload are over (sent, landed, released) and nothing
//! else: the lane decides what that means. There are no callbacks: the driver of the lane calls
//! `step`.

pub(crate) mod comm;
pub(crate) mod staged;
pub(crate) mod stream;

use std::cell::Cell;
use std::sync::Arc;

use tcpx_net::{Cursor, Span};
use tcpx_proto::lane::{ChunkId, Ticket};

use self::comm::{CommReceive, CommSend, Target};
use self::staged::{StagedReceive, StagedSend};
use self::stream::{StreamReceive, StreamSend};
use crate::error::Error;
use crate::memory::{Grant, Place, Pool};
use crate::transfer::{ChunkRef, Run};

/// A payload that is being sent.
pub(crate) enum Outgoing {
    /// A WRITE chunk of this side.
    Chunk(ChunkRef),
    /// The answer to a READ request.
    Answer {
        id: ChunkId,
        bytes: usize,
        grant: Grant,
    },
}

impl Outgoing {
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Self::Chunk(chunk) => chunk.bytes(),
            Self::Answer { bytes, .. } => *bytes,
        }
    }

    /// Returns the location of the bytes.
    pub(crate) fn place(&self) -> Place<'_> {
        match self {
            Self::Chunk(chunk) => chunk.place(),
            Self::Answer { grant, .. } => grant.place(),
        }
    }
}

/// The memory to release.
#[derive(Clone, Copy)]
pub(crate) enum LetGo<'a> {
    /// All revoked memory, with the limit for copies of answers to the peer.
    Revoked(&'a Allowance),
    /// The local memory of a run that is being aborted.
    Aborted(&'a Arc<Run>),
}

impl LetGo<'_> {
    pub(crate) fn hits(self, payload: &Outgoing) -> bool {
        match (self, payload) {
            (Self::Revoked(_), Outgoing::Chunk(chunk)) => chunk.run.plan.revoked().is_some(),
            (Self::Revoked(_), Outgoing::Answer { grant, .. }) => grant.has_dead_memory(),
            (Self::Aborted(run), Outgoing::Chunk(chunk)) => Arc::ptr_eq(&chunk.run, run),
            (Self::Aborted(_), Outgoing::Answer { .. }) => false,
        }
    }

    /// Returns whether `bytes` of a payload that has begun may be copied, so that it can be
    /// completed without its memory. If not, the connection ends. The peer chooses the length of an
    /// answer, whereas a setting limits our own chunks.
    pub(crate) fn may_copy(self, payload: &Outgoing, bytes: usize) -> bool {
        match (self, payload) {
            (Self::Revoked(allowance), Outgoing::Answer { .. }) => allowance.take(bytes),
            _ => true,
        }
    }
}

/// Limits the copies of answers to a peer, on all lanes of a connection together, when their memory
/// is revoked: a few system calls' worth on each of many lanes.
const MAX_COPIED_BYTES: usize = 16 << 20;

/// Counts the bytes of answers to a peer that may still be copied during a revocation.
pub(crate) struct Allowance {
    left: Cell<usize>,
    /// Length of the first copy that was refused.
    refused: Cell<Option<usize>>,
}

impl Allowance {
    pub(crate) fn new() -> Self {
        Self {
            left: Cell::new(MAX_COPIED_BYTES),
            refused: Cell::new(None),
        }
    }

    /// Counts bytes that are copied, or were copied earlier and have not left; returns whether they
    /// are within the limit.
    pub(crate) fn take(&self, bytes: usize) -> bool {
        let left = self.left.get().checked_sub(bytes);
        match left {
            Some(left) => self.left.set(left),
            None => self.refused.set(self.refused.get().or(Some(bytes))),
        }
        left.is_some()
    }

    /// Returns the length of the first copy that was refused, if any: then the connection must end.
    pub(crate) fn refused(&self) -> Option<usize> {
        self.refused.get()
    }
}

/// Result of [`SendCarrier::poll_begin`].
pub(crate) enum Begin<'a> {
    /// The frame of this payload begins now.
    Frame(&'a Outgoing),
    /// This payload could not be prepared; its frame has not begun.
    Failed(Outgoing, Error),
    /// No payload is ready.
    Nothing,
}

/// Moves payload out of memory.
///
/// The sending half of a lane calls, for each payload: `has_room`, [`push`](Self::push),
/// [`poll_begin`](Self::poll_begin) until the frame may begin; then, if the payload travels behind
/// its frame, [`ready`](Self::ready) and [`sent`](Self::sent) until all bytes are in the stream;
/// and at any time [`step`](Self::step). A payload is over when [`poll_over`](Self::poll_over)
/// returns it.
pub(crate) trait SendCarrier: Send {
    /// Returns whether this carrier handles a payload of `bytes` bytes at this place.
    fn takes(&self, place: &Place<'_>, bytes: usize) -> bool;

    /// Returns the flag of frames whose payload does not travel behind them; 0 if it does.
    fn flag(&self) -> u8 {
        0
    }

    /// Returns whether another payload of this length may be pushed. A chunk of a run could use
    /// other lanes as well; an answer could not.
    fn has_room(&mut self, _bytes: usize, _run: Option<&Arc<Run>>) -> bool {
        true
    }

    /// Takes a payload.
    fn push(&mut self, payload: Outgoing);

    /// Returns whether this carrier prepares payloads before their frames begin. Otherwise frames
    /// begin as soon as their payload is pushed.
    fn prepares(&self) -> bool {
        false
    }

    /// Spins for the few microseconds that preparing a lone small payload takes;
    /// returns whether it is ready.
    fn look(&mut self) -> bool {
        false
    }

    /// Returns whether payloads are queued whose frames have not begun.
    fn has_next(&self) -> bool {
        false
    }

    /// Finds the next payload whose frame may begin, in the order of `push`.
    fn poll_begin(&mut self) -> Begin<'_>;

    /// Returns the bytes that can go into the stream now, of the frame that began last: spans, and
    /// the position in them. Returns `None` while there are none.
    fn ready(&mut self) -> Result<Option<(&[Span], Cursor)>, Error> {
        Ok(None)
    }

    /// Counts bytes of [`ready`](Self::ready) that the stream has accepted.
    fn sent(&mut self, _count: usize) -> Result<(), Error> {
        Ok(())
    }

    /// Advances operations in flight. `announced` tells that every frame that has begun has left.
    /// Returns whether anything has moved.
    ///
    /// # Errors
    /// An announced payload cannot be sent: the lane must end.
    fn step(&mut self, _announced: bool) -> Result<bool, Error> {
        Ok(false)
    }

    /// Returns a payload whose memory is no longer used.
    fn poll_over(&mut self) -> Option<Outgoing>;

    /// Returns whether an operation is in flight whose end is not signalled:
    /// `step` must be called soon.
    fn is_busy(&self) -> bool {
        false
    }

    /// Returns whether this carrier waits for something outside of this process.
    fn is_waiting(&self) -> bool {
        false
    }

    /// Returns the error that a plugin reported, if any: its comm is closed.
    fn comm_error(&self) -> Option<&Error> {
        None
    }

    /// Returns the bytes that have left beside the stream since the last call.
    fn take_moved(&mut self) -> u64 {
        0
    }

    /// Stops using the memory of the payloads that `which` selects. Payloads that have begun are
    /// completed from a copy, as far as [`LetGo::may_copy`] allows: the rest of a payload that
    /// travels behind its frame may be appended to `rest`, after which this carrier is done with
    /// that frame. Waits for copies in flight, and a plugin's comm for its outstanding requests,
    /// for a bounded time.
    ///
    /// # Errors
    /// The memory is no longer used, but the connection must end.
    fn let_go(&mut self, which: LetGo<'_>, rest: &mut Vec<u8>) -> Result<(), Error>;

    /// Gives up all payloads, after waiting for copies in flight.
    fn close(&mut self);
}

/// A carrier's index in the list of its half.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Way(usize);

/// The carriers of a lane's sending half, in the order of preference.
pub(crate) struct SendCarriers {
    list: Vec<Box<dyn SendCarrier>>,
    /// True if a carrier moves payload beside the stream.
    has_beside: bool,
    /// The carrier that prepares payloads before their frames begin.
    prepares: Option<Way>,
    /// True once any carrier but the last has had a payload. Most lanes carry only host memory and
    /// are polled millions of times a second: they skip all checks of the other carriers.
    is_mixed: bool,
}

impl SendCarriers {
    pub(crate) fn new(pool: &Arc<Pool>, comm: Option<CommSend>) -> Self {
        let mut list: Vec<Box<dyn SendCarrier>> = Vec::new();
        if let Some(comm) = comm {
            list.push(Box::new(comm));
        }
        list.push(Box::new(StagedSend::new(Arc::clone(pool))));
        list.push(Box::new(StreamSend::default()));
        Self {
            has_beside: list.iter().any(|carrier| carrier.flag() != 0),
            prepares: list.iter().position(|carrier| carrier.prepares()).map(Way),
            list,
            is_mixed: false,
        }
    }

    /// Hands a payload to a carrier.
    pub(crate) fn push(&mut self, way: Way, payload: Outgoing) {
        self.is_mixed |= way.0 + 1 < self.list.len();
        self.list[way.0].push(payload);
    }

    /// Chooses the carrier of a payload.
    pub(crate) fn choose(&self, place: &Place<'_>, bytes: usize) -> Way {
        let mut carriers = self.list.iter();
        let at = carriers.position(|carrier| carrier.takes(place, bytes));
        // The last carrier accepts all remaining payloads.
        Way(at.unwrap_or(self.list.len() - 1))
    }

    pub(crate) fn get(&mut self, way: Way) -> &mut dyn SendCarrier {
        self.list[way.0].as_mut()
    }

    pub(crate) fn each(&mut self) -> impl Iterator<Item = &mut Box<dyn SendCarrier>> {
        self.list.iter_mut()
    }

    /// Returns the carrier that prepares payloads, if it has any.
    pub(crate) fn preparing(&self) -> Option<Way> {
        self.prepares
            .filter(|way| self.is_mixed && self.list[way.0].is_busy())
    }

    /// Iterates over the carriers that move payload beside the stream and have some in flight.
    pub(crate) fn beside(&mut self) -> impl Iterator<Item = &mut Box<dyn SendCarrier>> {
        let list = if self.has_beside && self.is_mixed {
            &mut self.list[..]
        } else {
            &mut []
        };
        list.iter_mut()
            .filter(|carrier| carrier.flag() != 0 && carrier.is_busy())
    }

    /// Returns the error that a plugin reported, if any.
    pub(crate) fn comm_error(&self) -> Option<&Error> {
        self.list.iter().find_map(|carrier| carrier.comm_error())
    }

    /// Returns whether any carrier has operations in flight.
    pub(crate) fn is_busy(&self) -> bool {
        self.is_mixed && self.list.iter().any(|carrier| carrier.is_busy())
    }

    /// Returns whether payload is in flight beside the stream.
    pub(crate) fn is_beside(&self) -> bool {
        let mut carriers = self.list.iter();
        self.has_beside
            && self.is_mixed
            && carriers.any(|carrier| carrier.flag() != 0 && carrier.is_busy())
    }
}

/// Destination of the next bytes of a payload.
pub(crate) struct Room<'a> {
    pub(crate) spans: &'a [Span],
    pub(crate) at: Cursor,
    pub(crate) bytes: usize,
}

/// A payload without operations in flight, with the error if its bytes did not reach their memory.
pub(crate) struct Over<P> {
    pub(crate) ticket: Ticket,
    pub(crate) payload: P,
    pub(crate) error: Option<Error>,
}

/// Moves payload into memory. `P` is the lane's own record of a payload until it has landed.
///
/// For a payload that travels behind its frame the receiving half of a lane calls
/// [`begin`](Self::begin), then [`room`](Self::room) and [`filled`](Self::filled) until all bytes
/// were received, then, if the carrier [`defers`](Self::defers), [`push`](Self::push). A payload
/// that travels beside the stream is pushed when its frame arrives. Each payload is over when
/// `push` or [`poll_over`](Self::poll_over) returns it.
pub(crate) trait ReceiveCarrier<P>: Send {
    /// Returns whether this carrier handles the payload of a frame with this flag, to this place;
    /// `place` is `None` if the payload is dropped.
    fn takes(&self, flag: u8, place: Option<&Place<'_>>) -> bool;

    /// Returns whether payload travels beside the stream.
    fn is_beside(&self) -> bool {
        false
    }

    /// Returns the error that a plugin reported, if any: its comm is closed.
    fn comm_error(&self) -> Option<&Error> {
        None
    }

    /// Returns whether a payload may still be in flight when its last byte was received.
    fn defers(&self) -> bool {
        false
    }

    /// Begins a payload that travels behind its frame.
    /// `more` tells whether the peer has another one.
    fn begin(&mut self, _more: bool) {}

    /// Returns the destination of the next bytes of the current payload, of which `left` are to
    /// come; `None` while there is no room.
    fn room<'a>(&'a mut self, place: &Place<'a>, left: usize) -> Result<Option<Room<'a>>, Error>;

    /// Counts bytes that were received into [`room`](Self::room).
    fn filled(&mut self, place: &Place<'_>, count: usize, is_last: bool) -> Result<(), Error>;

    /// Drops bytes of the current payload that have not reached their memory.
    fn forget(&mut self) {}

    /// Takes a payload that was received completely, or announced;
    /// returns it if nothing is in flight.
    fn push(&mut self, ticket: Ticket, payload: P) -> Option<Over<P>>;

    /// Advances operations in flight; returns whether anything has moved.
    ///
    /// # Errors
    /// An announced payload will not arrive: the lane must end.
    fn step(&mut self) -> Result<bool, Error> {
        Ok(false)
    }

    /// Returns a payload that has no operations in flight any more.
    fn poll_over(&mut self) -> Option<Over<P>> {
        None
    }

    /// Returns whether an operation is in flight whose end is not signalled:
    /// `step` must be called soon.
    fn is_busy(&self) -> bool {
        false
    }

    /// Returns whether so much is in flight that the oldest part is probably over.
    fn is_deep(&self) -> bool {
        false
    }

    /// Returns whether this carrier waits for something outside of this process.
    fn is_waiting(&self) -> bool {
        false
    }

    /// Returns the bytes that have arrived beside the stream since the last call.
    fn take_moved(&mut self) -> u64 {
        0
    }

    /// Waits until no copy or plugin writes to revoked memory, or to memory of an aborted run.
    ///
    /// # Errors
    /// The memory is no longer used, but the connection must end.
    fn let_go(&mut self) -> Result<(), Error>;

    /// Gives up all payloads, after waiting for copies in flight.
    /// Returns the payloads that were not over.
    fn close(&mut self) -> Vec<P>;
}

/// The carriers of a lane's receiving half.
pub(crate) struct ReceiveCarriers<P> {
    list: Vec<Box<dyn ReceiveCarrier<P>>>,
    /// True if a carrier moves payload beside the stream.
    has_beside: bool,
    /// True once any carrier but the last has had a payload; as in [`SendCarriers`].
    is_mixed: bool,
}

impl<P: Target + 'static> ReceiveCarriers<P> {
    pub(crate) fn new(pool: &Arc<Pool>, comm: Option<CommReceive<P>>) -> Self {
        let mut list: Vec<Box<dyn ReceiveCarrier<P>>> = Vec::new();
        if let Some(comm) = comm {
            list.push(Box::new(comm));
        }
        list.push(Box::new(StagedReceive::new(Arc::clone(pool))));
        list.push(Box::new(StreamReceive::default()));
        Self {
            has_beside: list.iter().any(|carrier| carrier.is_beside()),
            list,
            is_mixed: false,
        }
    }

    /// Finds the carrier of a payload;
    /// `None` if the payload is dropped and travels behind its frame.
    pub(crate) fn choose(&mut self, flag: u8, place: Option<&Place<'_>>) -> Option<Way> {
        let mut carriers = self.list.iter();
        let at = carriers.position(|carrier| carrier.takes(flag, place))?;
        self.is_mixed |= at + 1 < self.list.len();
        Some(Way(at))
    }

    pub(crate) fn get(&mut self, way: Way) -> &mut dyn ReceiveCarrier<P> {
        self.list[way.0].as_mut()
    }

    pub(crate) fn each(&mut self) -> impl Iterator<Item = &mut Box<dyn ReceiveCarrier<P>>> {
        self.list.iter_mut()
    }

    /// Iterates over the carriers that move payload beside the stream and have some in flight.
    pub(crate) fn beside(&mut self) -> impl Iterator<Item = &mut Box<dyn ReceiveCarrier<P>>> {
        let list = if self.has_beside && self.is_mixed {
            &mut self.list[..]
        } else {
            &mut []
        };
        list.iter_mut()
            .filter(|carrier| carrier.is_beside() && carrier.is_busy())
    }

    /// Returns the error that a plugin reported, if any.
    pub(crate) fn comm_error(&self) -> Option<&Error> {
        self.list.iter().find_map(|carrier| carrier.comm_error())
    }

    /// Returns whether any carrier has operations in flight.
    pub(crate) fn is_busy(&self) -> bool {
        self.is_mixed && self.list.iter().any(|carrier| carrier.is_busy())
    }

    /// Returns whether so much is in flight that some of it is probably over.
    pub(crate) fn is_deep(&self) -> bool {
        self.is_mixed && self.list.iter().any(|carrier| carrier.is_deep())
    }
}
