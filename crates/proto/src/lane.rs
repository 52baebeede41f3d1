//! The protocol of one lane: the chunks in flight, the next frame to send, the meaning of a frame.
//!
//! Pure: no I/O, no clock, no threads. A lane never sees payload; it identifies a chunk by its
//! [`ChunkId`] and its length. The caller owns sockets, memory and time, and drives two values:
//!
//! - [`Lane`] is the state that both directions of the stream share. `offer`, `push_control` and
//!   the `handle_…` methods are its input; [`Lane::encode_urgent`] and [`Lane::poll_transmit`] its
//!   output.
//! - [`Landing`] restores the order of received frames, whichever way and however fast each payload
//!   arrived.
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
//! Data or ReadError. Each names its chunk, so that the answers may come in any order. The state
//! that a peer can make a lane keep is bounded: at most `own_window` unanswered requests, as many
//! WRITE chunks whose outcome it was not told, and [`MAX_PINGS`] unanswered pings. More is a
//! [`Violation`]. Each side keeps its own numbers below the limits of the other, so that honest
//! sides never violate one and neither ever has to stop reading: two sides that both stopped would
//! wait for each other for ever.

mod landing;
mod offer;
mod outstanding;
mod silence;
#[cfg(test)]
mod tests;
mod violation;

use alloc::collections::VecDeque;
use alloc::string::String;
use alloc::vec::Vec;

pub use self::landing::{Landing, Ticket};
pub use self::offer::{Chunk, ChunkId, Offer, Op, Take};
use self::outstanding::Outstanding;
pub use self::silence::{Silence, Stall};
pub use self::violation::Violation;
use crate::frame::down::Ending;
use crate::frame::{Header, Kind, Status};

/// Reports whether there is room to send another payload now. Asked right before each choice.
pub trait Room<O, A> {
    /// Returns whether a WRITE chunk of this offer can be sent, or prepared to be sent.
    fn for_write(&mut self, offer: &O) -> bool;
    /// Returns whether this answer can be sent, or prepared to be sent.
    fn for_answer(&mut self, answer: &A) -> bool;
}

/// The next thing to send.
#[derive(Debug, PartialEq, Eq)]
pub enum Transmit<O: Offer, A> {
    /// A READ request, which has no payload.
    Request(O::Chunk),
    /// A WRITE chunk with its payload.
    Write(O::Chunk),
    /// The answer to a READ request of the peer.
    Answer(A),
    /// The offer is dead and no longer queued: nothing of it is sent.
    Dead(O),
}

/// The meaning of a frame of the peer.
#[derive(Debug, PartialEq, Eq)]
pub enum Meaning<C> {
    /// A WRITE chunk: grant its table, let its payload land, then call
    /// [`Lane::handle_landed`].
    Write(ChunkId),
    /// A READ request: grant its table, then call [`Lane::handle_request`].
    Request(ChunkId),
    /// The bytes of a READ chunk of this side, which is settled once they have landed.
    Data(C),
    /// A WRITE chunk of this side has landed: it is settled.
    Acknowledged(C),
    /// The peer refused a chunk of this side, which is settled; the payload is a text for people.
    Refused(C, Status),
    /// A message for the connection or the session: Notify, Send, SendDone, LaneDown or Goodbye.
    Message,
    /// The peer has received the numbered messages before this one.
    Received(u32),
    /// A ping: answer with Pong, at once if the number is 0, else after everything received before
    /// it.
    Ping(u64),
    /// The answer to a ping of this side.
    Pong(u64),
}

/// One lane: chunks in flight and everything that waits to be sent on it.
///
/// `O` is the source of chunks, `A` the state that the caller keeps of a READ request until it is
/// answered. Nothing here is shared: the caller serialises access.
#[derive(Debug)]
pub struct Lane<O: Offer, A> {
    writes: Outstanding<O::Chunk>,
    reads: Outstanding<O::Chunk>,
    /// Total bytes of the chunks in flight.
    load: u64,
    lanes: usize,
    own_window: usize,
    /// Encoded frames that concern no chunk.
    control: Vec<u8>,
    /// Number of this side's pings that the peer has not answered. ≤ MAX_PINGS
    pings: usize,
    /// Number of the peer's pings whose Pong was not encoded by [`Lane::encode_urgent`].
    /// ≤ MAX_PINGS
    unanswered: usize,
    /// Number of those answers in `control`. ≤ unanswered
    pongs: usize,
    /// Outcomes of the peer's WRITE chunks, not sent yet. At most `own_window`, since `unsettled`
    /// is.
    replies: VecDeque<Ending>,
    /// The outcomes sent last: if the stream is lost, the peer may not have received them. It
    /// receives them in this order and has at most a window in flight, so that it waits for no
    /// older ones. ≤ own_window
    told: VecDeque<Ending>,
    /// Number of the peer's WRITE chunks whose outcome was not sent. ≤ own_window
    unsettled: usize,
    /// At most `own_window`.
    answers: VecDeque<A>,
    write_offers: VecDeque<O>,
    read_offers: VecDeque<O>,
    /// Whether the last payload was an answer: the next is a WRITE chunk, if there is one.
    answered: bool,
    closed: bool,
}

/// The state of a lane when it was closed.
#[derive(Debug)]
pub struct Remains<O: Offer> {
    /// Offers that were queued.
    pub offers: Vec<O>,
    /// READ chunks that were in flight.
    pub reads: Vec<O::Chunk>,
    /// WRITE chunks that were in flight: they may have landed, or be about to.
    pub writes: Vec<O::Chunk>,
    /// Outcomes of the peer's WRITE chunks that it may not have received, oldest first. At most as
    /// many as it may keep in flight.
    pub endings: Vec<Ending>,
}

/// Maximum offers put back in one call because they must wait. Offers take turns, so that the
/// others are next. Offers emptied by other lanes do not count: each is examined once and then
/// dropped.
const MAX_LOOKS: usize = 64;

/// Minimum chunks that a lane requests towards the end of an offer: enough to keep the peer busy.
pub const MIN_SHARE: usize = 4;

/// Maximum unanswered pings of either side on one lane.
pub const MAX_PINGS: usize = 1024;

/// Capacity that an idle control buffer keeps: a long notification must not keep its memory
/// allocated.
const CONTROL_BYTES: usize = 64 << 10;

impl<O: Offer, A> Lane<O, A> {
    /// Creates one of `lanes` lanes of a connection. This side keeps at most `window` chunks in
    /// flight each way, the peer at most `own_window`.
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

    /// Queues an offer; returns it if the lane is closed.
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

    /// Queues a frame that concerns no chunk; does nothing once the lane is closed.
    pub fn push_control(&mut self, encode: impl FnOnce(&mut Vec<u8>)) {
        if !self.closed {
            encode(&mut self.control);
        }
    }

    /// Queues a ping; returns false if the peer has so many to answer that it would not allow
    /// another.
    #[must_use]
    pub fn push_ping(&mut self, token: u64) -> bool {
        // The last one is reserved for the mark before the end.
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

    /// Queues a ping after the replies for everything that has landed so far; else as
    /// [`Lane::push_ping`].
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

    /// Interprets a frame of the peer, and takes the chunk that it settles out of the books.
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
                // An unrequested Pong is harmless: only the peer is responsible for the limit.
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

    /// Settles a chunk of this side that the peer named.
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
        // Checked before the chunk is removed: the end of the connection settles all chunks in
        // flight.
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

    /// Queues the answer to a READ request of the peer, after [`Lane::handle_frame`] has accepted
    /// it.
    pub fn handle_request(&mut self, answer: A) {
        if !self.closed {
            self.answers.push_back(answer);
        }
    }

    /// Tells the peer the outcome of its WRITE chunk: it has landed, or was refused.
    pub fn handle_landed(&mut self, id: ChunkId, refusal: Option<(Status, String)>) {
        if !self.closed {
            self.replies.push_back(Ending { id, refusal });
        }
    }

    /// Appends the frames that must not wait for payload: control frames, then outcomes of the
    /// peer's chunks.
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
    /// nothing and keep the peer busy; then answers and WRITE chunks in turn. The returned chunk is
    /// in flight: the caller must send it, or settle a WRITE chunk by [`Lane::withdraw`].
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
        // Examines each offer once: a share that is used up is freed when an answer comes.
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

    /// Returns whether this lane has requested its share of an offer. Requests cost nothing to
    /// send: without a share the first lane would request everything, and towards the end a slow
    /// lane would hold chunks that the others could have had long before.
    fn has_its_share(&self, offer: &O) -> bool {
        let chunks = offer.chunks();
        // Most offers have one chunk and need no search.
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

    /// Takes a chunk of an offer, and queues the offer again if it has more; `None` if other lanes
    /// were faster.
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

    /// Returns the queued offers.
    pub fn queued_offers(&self) -> impl Iterator<Item = &O> {
        self.read_offers.iter().chain(&self.write_offers)
    }

    /// Returns the number of queued offers.
    #[must_use]
    pub fn offered(&self) -> usize {
        self.read_offers.len() + self.write_offers.len()
    }

    /// Returns the bytes of this side's chunks in flight.
    #[must_use]
    pub fn load(&self) -> u64 {
        self.load
    }

    /// Returns how many of the peer's chunks have replies that wait to be sent.
    #[must_use]
    pub fn replies(&self) -> usize {
        self.replies.len()
    }

    /// Returns whether something waits to be sent.
    #[must_use]
    pub fn has_work(&self) -> bool {
        !self.control.is_empty()
            || !self.replies.is_empty()
            || !self.answers.is_empty()
            || !self.write_offers.is_empty()
            || !self.read_offers.is_empty()
    }

    /// Returns whether chunks wait because the window is full.
    #[must_use]
    pub fn waits_for_window(&self) -> bool {
        (self.writes.is_full() && !self.write_offers.is_empty())
            || (self.reads.is_full() && !self.read_offers.is_empty())
    }

    /// Returns whether payload waits to be sent on this lane: an answer, or a WRITE of which the
    /// other lanes will probably leave a chunk.
    #[must_use]
    pub fn has_payload(&self) -> bool {
        let has_chunks = |offer: &O| offer.left() >= offer.chunks().min(self.lanes).max(1);
        !self.answers.is_empty() || self.write_offers.iter().take(MAX_LOOKS).any(has_chunks)
    }

    /// Returns whether this side waits for the peer or the peer for it, so that silence matters.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        !self.writes.chunks.is_empty()
            || !self.reads.chunks.is_empty()
            || !self.answers.is_empty()
            || !self.control.is_empty()
    }

    /// Closes the lane: nothing is queued or chosen from now on. Returns the state in flight,
    /// except the chunks that [`Lane::handle_frame`] has returned: the caller owns them, and must
    /// end also those whose bytes have not landed.
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

    /// Returns the last outcomes, as many as the peer can wait for.
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
