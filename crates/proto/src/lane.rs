//! The protocol of one lane: which chunks are in flight, what may be sent next, what a frame means.
//!
//! Pure: no I/O, no clock, no threads. A lane never sees payload; it knows a chunk by its
//! [`ChunkId`] and its length. The caller owns sockets, memory and time, and drives two values:
//!
//! - [`Lane`] is what both directions of the stream share. `offer`, `push_control` and the
//!   `handle_…` methods go in; [`Lane::encode_urgent`] and [`Lane::poll_transmit`] come out.
//! - [`Landing`] puts what was received into the order of its frames, whichever way and however
//!   fast each payload came.
//!
//! ```text
//!            offer(run)                                    handle_frame(header)
//!                │                                                  │
//!   initiator    ▼          Write, Read                 target      ▼
//!   ┌─────────────────────┐ ─────────────► ┌───────────────────────────────────────┐
//!   │ writes: ≤ window    │                │ Write: land, then handle_landed       │
//!   │ reads:  ≤ window    │ ◄───────────── │ Read:  handle_request, poll_transmit  │
//!   └─────────────────────┘  Ack, Data,    └───────────────────────────────────────┘
//!                            errors
//! ```
//!
//! Every WRITE chunk is settled by exactly one Ack or WriteError, every READ chunk by exactly one
//! Data or ReadError. Each names its chunk, so that the answers may come in any order. What a peer
//! makes a lane keep is bounded: at most `own_window` unanswered requests, as many chunks that it was
//! not told the end of, and [`MAX_PINGS`] unanswered pings. More is a [`Violation`]. Each side keeps
//! its own number of each below the limit of the other, so that honest sides never break one and
//! neither has to stop reading: two sides that both did would wait for each other for ever.

mod landing;
mod silence;
#[cfg(test)]
mod tests;

use alloc::collections::VecDeque;
use alloc::string::String;
use alloc::vec::Vec;

pub use self::landing::{Landing, Ticket};
pub use self::silence::{Silence, Stall};
use crate::frame::down::Ending;
use crate::frame::{Header, Kind, Status};

/// Names a chunk, on whatever lane it travels: unique within the session that posted the transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ChunkId {
    /// Number of the transfer.
    pub transfer: u64,
    /// Position of the chunk in its transfer.
    pub seq: u32,
}

impl core::fmt::Display for ChunkId {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "chunk {} of transfer {}", self.seq, self.transfer)
    }
}

/// The direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// From the peer's memory into ours.
    Read,
    /// From our memory into the peer's.
    Write,
}

/// The caller's handle to a chunk of its own. Clones name the same chunk.
pub trait Chunk: Clone {
    /// Names the chunk.
    fn id(&self) -> ChunkId;
    /// Bytes of its payload.
    fn bytes(&self) -> u64;
}

/// What chunks are taken from: one posting of a transfer. Several lanes may take from the same one.
pub trait Offer {
    /// What is taken.
    type Chunk: Chunk;

    /// Number of the transfer that all of its chunks belong to.
    fn transfer(&self) -> u64;

    /// The direction of all of its chunks.
    fn op(&self) -> Op;

    /// How many chunks it has in all.
    fn chunks(&self) -> usize;

    /// The next chunk that nobody has taken.
    fn take(&self) -> Take<Self::Chunk>;

    /// How many chunks there may be left to take.
    fn left(&self) -> usize;

    /// How many of a connection's lanes take chunks from it: `all`, unless it uses some only.
    fn lanes(&self, all: usize) -> usize {
        all
    }

    /// Whether there may be a chunk left to take.
    fn has_more(&self) -> bool {
        self.left() > 0
    }
}

/// What came of taking a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Take<C> {
    /// The chunk, which the taker now answers for.
    Chunk(C),
    /// Others have taken everything.
    Nothing,
    /// No chunk may be moved any more, such as after its memory was revoked.
    Dead,
}

/// Whether there is room to send another payload now. Asked right before something is chosen.
pub trait Room<O, A> {
    /// Whether a WRITE chunk of this offer can be sent, or prepared to be sent.
    fn for_write(&mut self, offer: &O) -> bool;
    /// Whether this answer can.
    fn for_answer(&mut self, answer: &A) -> bool;
}

/// What to send next.
#[derive(Debug, PartialEq, Eq)]
pub enum Transmit<O: Offer, A> {
    /// A READ request, which has no payload.
    Request(O::Chunk),
    /// A WRITE chunk with its payload.
    Write(O::Chunk),
    /// The answer to a READ request of the peer.
    Answer(A),
    /// Nothing of this offer: it is dead, and no longer queued.
    Dead(O),
}

/// What a frame of the peer means.
#[derive(Debug, PartialEq, Eq)]
pub enum Meaning<C> {
    /// A WRITE chunk: grant its table, let its payload land, then call
    /// [`Lane::handle_landed`].
    Write(ChunkId),
    /// A READ request: grant its table, then call [`Lane::handle_request`].
    Request(ChunkId),
    /// The bytes of a READ chunk of ours, which is settled once they have landed.
    Data(C),
    /// A WRITE chunk of ours has landed: it is settled.
    Acknowledged(C),
    /// The peer refused a chunk of ours, which is settled; the payload is a text for people.
    Refused(C, Status),
    /// A message for the connection or the session: Notify, Send, SendDone, LaneDown or Goodbye.
    Message,
    /// The peer has the numbered messages before this one.
    Received(u32),
    /// Answer with Pong, at once if the number is 0, else behind everything before it.
    Ping(u64),
    /// The answer to a ping of ours.
    Pong(u64),
}

/// The peer broke the protocol of a lane; the connection must end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Violation {
    /// It settled a chunk that is not in flight.
    #[error("it settled {id} with {kind:?}, which is not in flight on this lane")]
    NotInFlight {
        /// The chunk that it named.
        id: ChunkId,
        /// What it sent.
        kind: Kind,
    },
    /// Its answer to a READ has another length than was asked for.
    #[error("it answered {id} with {found} bytes where {expected} were asked for")]
    WrongLength {
        /// The chunk.
        id: ChunkId,
        /// Bytes asked for.
        expected: u64,
        /// Bytes announced.
        found: u64,
    },
    /// It has more READ requests in flight than it was allowed.
    #[error("it has more than {window} READ requests in flight on one lane")]
    TooManyRequests {
        /// What it was allowed.
        window: usize,
    },
    /// It has more WRITE chunks in flight than it was allowed.
    #[error("it has more than {window} WRITE chunks in flight on one lane")]
    TooManyWrites {
        /// What it was allowed.
        window: usize,
    },
    /// It has more pings in flight than it was allowed. Typical cause: it does not read.
    #[error("it has more than {MAX_PINGS} unanswered pings on one lane")]
    TooManyPings,
    /// It set comms up on a lane that is in use.
    #[error("it set comms up on a lane that is in use")]
    LateComm,
    /// It left a message out.
    #[error("it sent message {found} where {expected} is next")]
    MessageMissing {
        /// The number that is next.
        expected: u32,
        /// The number that came.
        found: u32,
    },
    /// It has received a message that was not sent.
    #[error("it received the messages before {found}, of which {sent} is the last")]
    MessageNotSent {
        /// The last number that was given.
        sent: u32,
        /// What it said.
        found: u32,
    },
    /// It spoke of a lane that the connection does not have.
    #[error("it has lost lane {lane} of {lanes}")]
    NoSuchLane {
        /// The lane that it named.
        lane: u16,
        /// How many there are.
        lanes: usize,
    },
}

/// Chunks of ours in flight in one direction, oldest first.
#[derive(Debug)]
struct Outstanding<C> {
    // len ≤ window
    chunks: VecDeque<C>,
    window: usize,
}

impl<C: Chunk> Outstanding<C> {
    fn new(window: usize) -> Self {
        Self {
            chunks: VecDeque::new(),
            window,
        }
    }

    fn is_full(&self) -> bool {
        self.chunks.len() >= self.window
    }

    /// Takes a chunk out. Answers mostly come in order, so that the first is the likeliest.
    fn take(&mut self, id: ChunkId) -> Option<C> {
        let at = self.chunks.iter().position(|chunk| chunk.id() == id)?;
        self.chunks.remove(at)
    }

    fn of_transfer(&self, transfer: u64) -> usize {
        let same = |chunk: &&C| chunk.id().transfer == transfer;
        self.chunks.iter().filter(same).count()
    }
}

/// One lane: chunks in flight and everything that waits to be sent on it.
///
/// `O` is what chunks are taken from, `A` what the caller keeps of a READ request until it is
/// answered. Nothing here is shared: the caller serialises access.
#[derive(Debug)]
pub struct Lane<O: Offer, A> {
    writes: Outstanding<O::Chunk>,
    reads: Outstanding<O::Chunk>,
    /// Bytes of both.
    load: u64,
    lanes: usize,
    own_window: usize,
    /// Encoded frames without a chunk.
    control: Vec<u8>,
    /// Pings of ours that the peer has not answered. ≤ MAX_PINGS
    pings: usize,
    /// Pings of the peer whose answers were not encoded by [`Lane::encode_urgent`]. ≤ MAX_PINGS
    unanswered: usize,
    /// Their answers in `control`. ≤ unanswered
    pongs: usize,
    /// How the peer's WRITE chunks ended, to be told. At most `own_window`, since `unsettled` is.
    replies: VecDeque<Ending>,
    /// The last that were told: should the stream be lost, the peer may not have heard. It hears
    /// them in this order and has at most a window in flight, so that it waits for no others. ≤
    /// own_window
    told: VecDeque<Ending>,
    /// The peer's WRITE chunks that it was not told the end of. ≤ own_window
    unsettled: usize,
    /// At most `own_window`.
    answers: VecDeque<A>,
    write_offers: VecDeque<O>,
    read_offers: VecDeque<O>,
    /// Whether the last payload was an answer: the next is a chunk of our own, if there is one.
    answered: bool,
    closed: bool,
}

/// What was under way when a lane was closed.
#[derive(Debug)]
pub struct Remains<O: Offer> {
    /// Offers that were queued.
    pub offers: Vec<O>,
    /// READ chunks that were in flight.
    pub reads: Vec<O::Chunk>,
    /// WRITE chunks that were in flight: they may have landed, or be about to.
    pub writes: Vec<O::Chunk>,
    /// How WRITE chunks of the peer ended of which it may not have heard, oldest first. At most as
    /// many as it may keep in flight.
    pub endings: Vec<Ending>,
}

/// Offers that are put back in one call because they must wait. They take turns, so that the others
/// are next. Offers that others have emptied do not count: each is looked at once and then gone.
const MAX_LOOKS: usize = 64;

/// Chunks that a lane has asked for while an offer ends: enough to keep the peer busy meanwhile.
const MIN_SHARE: usize = 4;

/// Pings that either side may have unanswered on one lane.
pub const MAX_PINGS: usize = 1024;

/// Room that an idle control buffer keeps: a long notification must not leave its size behind.
const CONTROL_BYTES: usize = 64 << 10;

impl<O: Offer, A> Lane<O, A> {
    /// Makes one of `lanes` lanes of a connection. We keep at most `window` chunks in flight each
    /// way, the peer at most `own_window`.
    #[must_use]
    pub fn new(window: usize, own_window: usize, lanes: usize) -> Self {
        Self {
            writes: Outstanding::new(window),
            reads: Outstanding::new(window),
            load: 0,
            lanes: lanes.max(1),
            own_window,
            control: Vec::new(),
            pings: 0,
            unanswered: 0,
            pongs: 0,
            replies: VecDeque::new(),
            told: VecDeque::new(),
            unsettled: 0,
            answers: VecDeque::new(),
            write_offers: VecDeque::new(),
            read_offers: VecDeque::new(),
            answered: false,
            closed: false,
        }
    }

    /// Queues an offer; gives it back when the lane is closed.
    ///
    /// # Errors
    /// The lane is closed.
    pub fn offer(&mut self, offer: O) -> Result<(), O> {
        if self.closed {
            return Err(offer);
        }
        self.offers(offer.op()).push_back(offer);
        Ok(())
    }

    /// Queues a frame that names no chunk; does nothing once the lane is closed.
    pub fn push_control(&mut self, encode: impl FnOnce(&mut Vec<u8>)) {
        if !self.closed {
            encode(&mut self.control);
        }
    }

    /// Queues a ping; false where the peer has so many to answer that it would not allow another.
    #[must_use]
    pub fn push_ping(&mut self, token: u64) -> bool {
        // The last one is kept for the mark before the end.
        if self.closed || self.pings >= MAX_PINGS - 1 {
            return false;
        }
        self.pings += 1;
        Header::new(Kind::Ping, token).encode(&mut self.control);
        true
    }

    /// Queues the answer to a ping of the peer.
    pub fn push_pong(&mut self, token: u64) {
        if self.closed {
            return;
        }
        self.pongs += 1;
        Header::new(Kind::Pong, token).encode(&mut self.control);
    }

    /// Queues a ping behind the replies for everything that has landed so far; as [`Lane::push_ping`].
    #[must_use]
    pub fn push_mark(&mut self, token: u64) -> bool {
        if self.closed || self.pings >= MAX_PINGS {
            return false;
        }
        let mut control = core::mem::take(&mut self.control);
        self.encode_replies(&mut control);
        self.pings += 1;
        Header::new(Kind::Ping, token).encode(&mut control);
        self.control = control;
        true
    }

    /// Says what a frame of the peer means, and settles the chunk that it settles.
    ///
    /// # Errors
    /// The peer broke the protocol.
    pub fn handle_frame(&mut self, header: &Header) -> Result<Meaning<O::Chunk>, Violation> {
        let id = ChunkId {
            transfer: header.transfer,
            seq: header.seq,
        };
        let status = Status::from_u8(header.flags);
        match header.kind {
            Kind::Write => {
                if self.unsettled >= self.own_window {
                    return Err(Violation::TooManyWrites {
                        window: self.own_window,
                    });
                }
                self.unsettled += 1;
                Ok(Meaning::Write(id))
            }
            Kind::Read if self.answers.len() >= self.own_window => {
                Err(Violation::TooManyRequests {
                    window: self.own_window,
                })
            }
            Kind::Read => Ok(Meaning::Request(id)),
            Kind::Data => self.answered(id, header.payload).map(Meaning::Data),
            Kind::Ack => self.settle(id, header.kind).map(Meaning::Acknowledged),
            Kind::WriteError | Kind::ReadError => self
                .settle(id, header.kind)
                .map(|chunk| Meaning::Refused(chunk, status)),
            Kind::Ping if self.unanswered >= MAX_PINGS => Err(Violation::TooManyPings),
            Kind::Ping => {
                self.unanswered += 1;
                Ok(Meaning::Ping(header.transfer))
            }
            Kind::Pong => {
                // One that nobody has asked for is harmless: only the peer answers for the limit.
                self.pings = self.pings.saturating_sub(1);
                Ok(Meaning::Pong(header.transfer))
            }
            Kind::Notify | Kind::Send | Kind::SendDone | Kind::Goodbye | Kind::LaneDown => {
                Ok(Meaning::Message)
            }
            Kind::Received => Ok(Meaning::Received(header.seq)),
            Kind::Comm => Err(Violation::LateComm),
        }
    }

    /// Settles a chunk of ours that the peer named.
    fn settle(&mut self, id: ChunkId, kind: Kind) -> Result<O::Chunk, Violation> {
        let outstanding = match kind {
            Kind::Ack | Kind::WriteError => &mut self.writes,
            _ => &mut self.reads,
        };
        let chunk = outstanding
            .take(id)
            .ok_or(Violation::NotInFlight { id, kind })?;
        self.load -= chunk.bytes();
        Ok(chunk)
    }

    fn answered(&mut self, id: ChunkId, found: u64) -> Result<O::Chunk, Violation> {
        let asked = self.reads.chunks.iter().find(|chunk| chunk.id() == id);
        // Looked at before it is taken: the end of the connection settles what is in flight.
        match asked
            .map(Chunk::bytes)
            .filter(|expected| *expected != found)
        {
            Some(expected) => Err(Violation::WrongLength {
                id,
                expected,
                found,
            }),
            None => self.settle(id, Kind::Data),
        }
    }

    /// Queues what the peer's READ request, which [`Lane::handle_frame`] has let pass, is answered
    /// with.
    pub fn handle_request(&mut self, answer: A) {
        if !self.closed {
            self.answers.push_back(answer);
        }
    }

    /// Tells the peer that its WRITE chunk was dealt with: it has landed, or was refused.
    pub fn handle_landed(&mut self, id: ChunkId, refusal: Option<(Status, String)>) {
        if !self.closed {
            self.replies.push_back(Ending { id, refusal });
        }
    }

    /// Appends what must not wait behind payload: control frames, then how the peer's chunks ended.
    pub fn encode_urgent(&mut self, out: &mut Vec<u8>) {
        if !self.control.is_empty() {
            out.append(&mut self.control);
            self.control.shrink_to(CONTROL_BYTES);
            self.unanswered -= self.pongs;
            self.pongs = 0;
        }
        self.encode_replies(out);
    }

    fn encode_replies(&mut self, out: &mut Vec<u8>) {
        for reply in self.replies.drain(..) {
            self.unsettled -= 1;
            let header = |kind| Header {
                seq: reply.id.seq,
                ..Header::new(kind, reply.id.transfer)
            };
            match &reply.refusal {
                None => header(Kind::Ack).encode(out),
                Some((status, text)) => Header {
                    flags: *status as u8,
                    ..header(Kind::WriteError)
                }
                .encode_with_text(out, text),
            }
            if self.told.len() >= self.own_window {
                self.told.pop_front();
            }
            self.told.push_back(reply);
        }
    }

    /// Chooses what is sent next and takes it off its queue: READ requests first, since they cost
    /// nothing and keep the peer busy; then answers and WRITE chunks in turn. What is returned is in
    /// flight: the caller must send it, or settle a WRITE chunk by [`Lane::withdraw`].
    pub fn poll_transmit(&mut self, room: &mut impl Room<O, A>) -> Option<Transmit<O, A>> {
        if self.closed {
            return None;
        }
        if let Some(request) = self.poll_request() {
            return Some(request);
        }
        if self.answered {
            self.poll_write(room).or_else(|| self.poll_answer(room))
        } else {
            self.poll_answer(room).or_else(|| self.poll_write(room))
        }
    }

    fn poll_request(&mut self) -> Option<Transmit<O, A>> {
        // Each offer gets one look: a share that is used up frees itself when an answer comes.
        let mut looks = self.read_offers.len().min(MAX_LOOKS);
        while looks > 0 && !self.reads.is_full() {
            let offer = self.read_offers.pop_front()?;
            if self.has_its_share(&offer) {
                self.read_offers.push_back(offer);
                looks -= 1;
            } else if let Some(transmit) = self.take_from(offer) {
                return Some(transmit);
            }
        }
        None
    }

    /// Whether this lane has asked for its share of an offer. Requests cost nothing to send:
    /// without a share the first lane would ask for everything, and towards the end a slow one
    /// for chunks that the others could have had long before.
    fn has_its_share(&self, offer: &O) -> bool {
        let chunks = offer.chunks();
        // Most offers have one chunk, and need not be looked for.
        let lanes = offer.lanes(self.lanes).max(1);
        if chunks == 1 || lanes == 1 {
            return false;
        }
        let left = offer.left().div_ceil(lanes);
        let share = left.max(MIN_SHARE).min(chunks.div_ceil(lanes));
        self.reads.chunks.len() >= share && self.reads.of_transfer(offer.transfer()) >= share
    }

    fn poll_write(&mut self, room: &mut impl Room<O, A>) -> Option<Transmit<O, A>> {
        let mut looks = self.write_offers.len().min(MAX_LOOKS);
        while looks > 0 && !self.writes.is_full() {
            let offer = self.write_offers.pop_front()?;
            if !room.for_write(&offer) {
                self.write_offers.push_back(offer);
                looks -= 1;
            } else if let Some(transmit) = self.take_from(offer) {
                return Some(transmit);
            }
        }
        None
    }

    fn poll_answer(&mut self, room: &mut impl Room<O, A>) -> Option<Transmit<O, A>> {
        let at = self
            .answers
            .iter()
            .position(|answer| room.for_answer(answer))?;
        let answer = self.answers.remove(at)?;
        self.answered = true;
        Some(Transmit::Answer(answer))
    }

    /// Takes a chunk of an offer, and queues the offer again if it has more; none if others were
    /// faster.
    fn take_from(&mut self, offer: O) -> Option<Transmit<O, A>> {
        let chunk = match offer.take() {
            Take::Chunk(chunk) => chunk,
            Take::Nothing => return None,
            Take::Dead => return Some(Transmit::Dead(offer)),
        };
        let op = offer.op();
        self.load += chunk.bytes();
        self.outstanding(op).chunks.push_back(chunk.clone());
        if offer.has_more() {
            self.offers(op).push_back(offer);
        }
        Some(match op {
            Op::Read => Transmit::Request(chunk),
            Op::Write => {
                self.answered = false;
                Transmit::Write(chunk)
            }
        })
    }

    /// Settles a WRITE chunk that was taken and will not be sent.
    pub fn withdraw(&mut self, id: ChunkId) -> Option<O::Chunk> {
        let chunk = self.writes.take(id)?;
        self.load -= chunk.bytes();
        Some(chunk)
    }

    /// The offers that are queued.
    pub fn queued_offers(&self) -> impl Iterator<Item = &O> {
        self.read_offers.iter().chain(&self.write_offers)
    }

    /// Bytes of our chunks in flight.
    #[must_use]
    pub fn load(&self) -> u64 {
        self.load
    }

    /// How many of the peer's chunks wait for their replies to be sent.
    #[must_use]
    pub fn replies(&self) -> usize {
        self.replies.len()
    }

    /// Whether something waits to be sent.
    #[must_use]
    pub fn has_work(&self) -> bool {
        !self.control.is_empty()
            || !self.replies.is_empty()
            || !self.answers.is_empty()
            || !self.write_offers.is_empty()
            || !self.read_offers.is_empty()
    }

    /// Whether payload waits to be sent on this lane: an answer, or a WRITE of which the other lanes
    /// probably leave a chunk.
    #[must_use]
    pub fn has_payload(&self) -> bool {
        let has_chunks = |offer: &O| offer.left() >= offer.chunks().min(self.lanes).max(1);
        !self.answers.is_empty() || self.write_offers.iter().take(MAX_LOOKS).any(has_chunks)
    }

    /// Whether the peer is waited for, or waits for us: its silence matters.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        !self.writes.chunks.is_empty()
            || !self.reads.chunks.is_empty()
            || !self.answers.is_empty()
            || !self.control.is_empty()
    }

    /// Ends the lane: nothing is queued or chosen from now on. Returns what was under way, without the
    /// chunks that [`Lane::handle_frame`] has returned: they are the caller's, who must end also those
    /// whose bytes have not landed.
    pub fn close(&mut self) -> Remains<O> {
        self.closed = true;
        self.control = Vec::new();
        self.pongs = 0;
        self.answers.clear();
        self.load = 0;
        let offers = self
            .read_offers
            .drain(..)
            .chain(self.write_offers.drain(..));
        Remains {
            offers: offers.collect(),
            reads: self.reads.chunks.drain(..).collect(),
            writes: self.writes.chunks.drain(..).collect(),
            endings: self.endings(),
        }
    }

    /// Takes the last endings, as many as the peer can wait for.
    fn endings(&mut self) -> Vec<Ending> {
        let surplus = (self.told.len() + self.replies.len()).saturating_sub(self.own_window);
        let endings = self.told.drain(..).chain(self.replies.drain(..));
        endings.skip(surplus).collect()
    }

    fn outstanding(&mut self, op: Op) -> &mut Outstanding<O::Chunk> {
        match op {
            Op::Read => &mut self.reads,
            Op::Write => &mut self.writes,
        }
    }

    fn offers(&mut self, op: Op) -> &mut VecDeque<O> {
        match op {
            Op::Read => &mut self.read_offers,
            Op::Write => &mut self.write_offers,
        }
    }
}
