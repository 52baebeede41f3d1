//! Carriers: how the payload of one frame gets out of, or into, memory.
//!
//! A lane's frames always travel on its stream. Their payload is moved by a carrier:
//!
//! | carrier | payload travels | memory |
//! |---|---|---|
//! | [`comm`] | beside the stream, on a plugin's comm | either, as far as the plugin reaches it |
//! | [`staged`] | behind its frame | a device's, through pinned slots |
//! | [`stream`] | behind its frame | the host's, straight from and to where it lies |
//!
//! The sender takes the first of them that takes a payload, by where its memory lies and how large it
//! is; the receiver goes by the frame's flag and by where its own memory lies. A lane knows its
//! carriers as a list of [`SendCarrier`] and a list of [`ReceiveCarrier`], in this order, and names
//! none: another one is a file here and a line in [`SendCarriers::new`] and [`ReceiveCarriers::new`].
//!
//! A carrier says when the bytes of a payload are over (sent, landed, let go) and nothing else: what
//! that means is the lane's business. Nothing calls back: the driver of the lane calls `step`.

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
    /// A WRITE chunk of ours.
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

    /// Where its bytes are.
    pub(crate) fn place(&self) -> Place<'_> {
        match self {
            Self::Chunk(chunk) => chunk.place(),
            Self::Answer { grant, .. } => grant.place(),
        }
    }
}

/// Whose memory is to be let go.
#[derive(Clone, Copy)]
pub(crate) enum LetGo<'a> {
    /// Everything that was revoked, with what may be copied of answers to the peer.
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

    /// Whether `bytes` of a payload that has begun may be copied, so that it can be completed without
    /// its memory. Where not, the connection ends. The length of an answer is the peer's choice; that
    /// of our own chunks is a setting.
    pub(crate) fn may_copy(self, payload: &Outgoing, bytes: usize) -> bool {
        match (self, payload) {
            (Self::Revoked(allowance), Outgoing::Answer { .. }) => allowance.take(bytes),
            _ => true,
        }
    }
}

/// How much of the answers to a peer may be in copies, on all lanes of a connection together, when
/// their memory is revoked: a few calls' worth on each of many lanes.
const MAX_COPIED_BYTES: usize = 16 << 20;

/// What may still be copied of the answers to a peer while memory is revoked.
pub(crate) struct Allowance {
    left: Cell<usize>,
    /// Bytes that were not allowed.
    refused: Cell<Option<usize>>,
}

impl Allowance {
    pub(crate) fn new() -> Self {
        Self {
            left: Cell::new(MAX_COPIED_BYTES),
            refused: Cell::new(None),
        }
    }

    /// Counts bytes that are copied, or were and have not left; says whether there may be so many.
    pub(crate) fn take(&self, bytes: usize) -> bool {
        let left = self.left.get().checked_sub(bytes);
        match left {
            Some(left) => self.left.set(left),
            None => self.refused.set(self.refused.get().or(Some(bytes))),
        }
        left.is_some()
    }

    /// The bytes that were too many, if some were: the connection must end.
    pub(crate) fn refused(&self) -> Option<usize> {
        self.refused.get()
    }
}

/// What [`SendCarrier::poll_begin`] found.
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
/// [`poll_begin`](Self::poll_begin) until the frame may begin; then, if the payload travels behind its
/// frame, [`ready`](Self::ready) and [`sent`](Self::sent) until all of it is in the stream; and at any
/// time [`step`](Self::step). A payload is over when [`poll_over`](Self::poll_over) returns it.
pub(crate) trait SendCarrier: Send {
    /// Whether it carries a payload of so many bytes at this place.
    fn takes(&self, place: &Place<'_>, bytes: usize) -> bool;

    /// The flag of frames whose payload does not travel behind them; 0 if it does.
    fn flag(&self) -> u8 {
        0
    }

    /// Whether another payload of so many bytes may be pushed. One that is a chunk of a run could go to
    /// other lanes as well; an answer could not.
    fn has_room(&mut self, _bytes: usize, _run: Option<&Arc<Run>>) -> bool {
        true
    }

    /// Takes a payload.
    fn push(&mut self, payload: Outgoing);

    /// Whether it prepares payloads before their frames begin. The frames of others begin as soon as
    /// they are pushed.
    fn prepares(&self) -> bool {
        false
    }

    /// Waits the few microseconds that preparing a lone small payload takes; says whether it is ready.
    fn look(&mut self) -> bool {
        false
    }

    /// Whether payloads wait whose frames have not begun.
    fn has_next(&self) -> bool {
        false
    }

    /// Finds the next payload whose frame may begin, in the order in which they were pushed.
    fn poll_begin(&mut self) -> Begin<'_>;

    /// Returns the bytes that can go into the stream now, of the frame that began last: spans, and
    /// where in them. None while there are none.
    fn ready(&mut self) -> Result<Option<(&[Span], Cursor)>, Error> {
        Ok(None)
    }

    /// Counts bytes of [`ready`](Self::ready) that the stream has taken.
    fn sent(&mut self, _count: usize) -> Result<(), Error> {
        Ok(())
    }

    /// Goes on with what is under way. `announced` says that every frame that has begun has left.
    /// Returns whether anything has moved.
    ///
    /// # Errors
    /// What was announced cannot be sent: the connection must end.
    fn step(&mut self, _announced: bool) -> Result<bool, Error> {
        Ok(false)
    }

    /// Returns a payload whose memory is no longer used.
    fn poll_over(&mut self) -> Option<Outgoing>;

    /// Whether something is under way of which nobody will be told: somebody must call `step` soon.
    fn is_busy(&self) -> bool {
        false
    }

    /// Whether somebody beyond this process must move before this carrier does.
    fn is_waiting(&self) -> bool {
        false
    }

    /// Bytes that have left beside the stream since the last call.
    fn take_moved(&mut self) -> u64 {
        0
    }

    /// Stops using the memory of the payloads that `which` names. What has begun is completed from a
    /// copy, as far as [`LetGo::may_copy`] allows it: the rest of a payload that travels behind its frame
    /// may be appended to `rest`, and this carrier then has nothing more of that frame. Waits for copies
    /// under way, and a plugin's comm for its outstanding requests, for a bounded time.
    ///
    /// # Errors
    /// The memory is no longer used, but the connection must end.
    fn let_go(&mut self, which: LetGo<'_>, rest: &mut Vec<u8>) -> Result<(), Error>;

    /// Gives up everything, after waiting for copies under way.
    fn close(&mut self);
}

/// A carrier's place in the list of its half.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Way(usize);

/// The carriers of a lane's sending half, in the order of preference.
pub(crate) struct SendCarriers {
    list: Vec<Box<dyn SendCarrier>>,
    /// Whether payload may travel beside the stream.
    has_beside: bool,
    /// The one that prepares payloads before their frames begin.
    prepares: Option<Way>,
    /// Whether any but the last has ever had a payload. Most lanes carry host memory alone and are
    /// looked at millions of times a second: they ask nobody whether something is under way.
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
        // The last one takes what no other takes.
        Way(at.unwrap_or(self.list.len() - 1))
    }

    pub(crate) fn get(&mut self, way: Way) -> &mut dyn SendCarrier {
        self.list[way.0].as_mut()
    }

    pub(crate) fn each(&mut self) -> impl Iterator<Item = &mut Box<dyn SendCarrier>> {
        self.list.iter_mut()
    }

    /// The one that prepares payloads, if it has some.
    pub(crate) fn preparing(&self) -> Option<Way> {
        self.prepares
            .filter(|way| self.is_mixed && self.list[way.0].is_busy())
    }

    /// Those whose payload travels beside the stream, and that have some under way.
    pub(crate) fn beside(&mut self) -> impl Iterator<Item = &mut Box<dyn SendCarrier>> {
        let list = if self.has_beside && self.is_mixed {
            &mut self.list[..]
        } else {
            &mut []
        };
        list.iter_mut()
            .filter(|carrier| carrier.flag() != 0 && carrier.is_busy())
    }

    /// Whether something is under way.
    pub(crate) fn is_busy(&self) -> bool {
        self.is_mixed && self.list.iter().any(|carrier| carrier.is_busy())
    }

    /// Whether something is under way beside the stream.
    pub(crate) fn is_beside(&self) -> bool {
        let mut carriers = self.list.iter();
        self.has_beside
            && self.is_mixed
            && carriers.any(|carrier| carrier.flag() != 0 && carrier.is_busy())
    }
}

/// Where the next bytes of a payload go.
pub(crate) struct Room<'a> {
    pub(crate) spans: &'a [Span],
    pub(crate) at: Cursor,
    pub(crate) bytes: usize,
}

/// A payload of which nothing is under way any more, and why its bytes have not reached their memory
/// if they have not.
pub(crate) struct Over<P> {
    pub(crate) ticket: Ticket,
    pub(crate) payload: P,
    pub(crate) error: Option<Error>,
}

/// Moves payload into memory. `P` is what the lane keeps of a payload until it has landed.
///
/// For a payload that travels behind its frame the receiving half of a lane calls
/// [`begin`](Self::begin), then [`room`](Self::room) and [`filled`](Self::filled) until all of it was
/// received, then, if the carrier [`defers`](Self::defers), [`push`](Self::push). One that travels
/// beside the stream is pushed when its frame arrives. Each is over when `push` or
/// [`poll_over`](Self::poll_over) returns it.
pub(crate) trait ReceiveCarrier<P>: Send {
    /// Whether it carries the payload of a frame with this flag, to this place; none if the payload is
    /// dropped.
    fn takes(&self, flag: u8, place: Option<&Place<'_>>) -> bool;

    /// Whether payload travels beside the stream.
    fn is_beside(&self) -> bool {
        false
    }

    /// Whether a payload may still be under way when its last byte was received.
    fn defers(&self) -> bool {
        false
    }

    /// A payload begins that travels behind its frame. `more` says whether the peer has another one.
    fn begin(&mut self, _more: bool) {}

    /// Returns where the next bytes of the current payload go, of which `left` are to come; none while
    /// there is no room for them.
    fn room<'a>(&'a mut self, place: &Place<'a>, left: usize) -> Result<Option<Room<'a>>, Error>;

    /// Counts bytes that were put into [`room`](Self::room).
    fn filled(&mut self, place: &Place<'_>, count: usize, is_last: bool) -> Result<(), Error>;

    /// Gives up what was received of the current payload and has not reached its memory.
    fn forget(&mut self) {}

    /// Takes a payload that was received as a whole, or announced; returns it if nothing of it is under
    /// way.
    fn push(&mut self, ticket: Ticket, payload: P) -> Option<Over<P>>;

    /// Goes on with what is under way; returns whether anything has moved.
    ///
    /// # Errors
    /// What was announced will not come: the connection must end.
    fn step(&mut self) -> Result<bool, Error> {
        Ok(false)
    }

    /// Returns a payload of which nothing is under way any more.
    fn poll_over(&mut self) -> Option<Over<P>> {
        None
    }

    /// Whether something is under way of which nobody will be told: somebody must call `step` soon.
    fn is_busy(&self) -> bool {
        false
    }

    /// Whether so much is under way that its oldest part is probably over.
    fn is_deep(&self) -> bool {
        false
    }

    /// Whether somebody beyond this process must move before this carrier does.
    fn is_waiting(&self) -> bool {
        false
    }

    /// Bytes that have come beside the stream since the last call.
    fn take_moved(&mut self) -> u64 {
        0
    }

    /// Waits until no copy or plugin writes to memory that was revoked, or of a run that was aborted.
    ///
    /// # Errors
    /// The memory is no longer used, but the connection must end.
    fn let_go(&mut self) -> Result<(), Error>;

    /// Gives up everything, after waiting for copies under way. Returns the payloads that were not
    /// over.
    fn close(&mut self) -> Vec<P>;
}

/// The carriers of a lane's receiving half.
pub(crate) struct ReceiveCarriers<P> {
    list: Vec<Box<dyn ReceiveCarrier<P>>>,
    /// Whether payload may travel beside the stream.
    has_beside: bool,
    /// Whether any but the last has ever had a payload; as in [`SendCarriers`].
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

    /// Finds the carrier of a payload; none if it goes to no memory and travels behind its frame.
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

    /// Those whose payload travels beside the stream, and that have some under way.
    pub(crate) fn beside(&mut self) -> impl Iterator<Item = &mut Box<dyn ReceiveCarrier<P>>> {
        let list = if self.has_beside && self.is_mixed {
            &mut self.list[..]
        } else {
            &mut []
        };
        list.iter_mut()
            .filter(|carrier| carrier.is_beside() && carrier.is_busy())
    }

    /// Whether something is under way.
    pub(crate) fn is_busy(&self) -> bool {
        self.is_mixed && self.list.iter().any(|carrier| carrier.is_busy())
    }

    /// Whether so much is under way that some of it is probably over.
    pub(crate) fn is_deep(&self) -> bool {
        self.is_mixed && self.list.iter().any(|carrier| carrier.is_deep())
    }
}
