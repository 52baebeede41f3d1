//! The sending half of a lane.

use std::io;
use std::sync::Arc;

use tcpx_net::Cursor;
use tcpx_proto::frame::{FLAG_MORE, FLAG_NOTIFY, Header, Kind};
use tcpx_proto::lane::{Chunk, ChunkId, Room, Transmit};

use super::Connection;
use super::ended::Ended;
use super::event::Event;
use super::lane::{Books, Lane, add_locked};
use super::traced::HalfTrace;
use crate::carrier::comm::CommSend;
use crate::carrier::{Begin, LetGo, Outgoing, SendCarrier, SendCarriers, Way};
use crate::error::Error;
use crate::log::limited;
use crate::memory::{Grant, Place, Pool, Refusal};
use crate::transfer::{After, ChunkRef, Offered, Op, Run};

/// READ requests are gathered into one system call up to this size.
const MAX_HEAD_BYTES: usize = 32 << 10;

/// The answer to a READ request, until it is sent.
pub(super) struct Answer {
    pub(super) id: ChunkId,
    pub(super) bytes: usize,
    pub(super) outcome: Result<Grant, Refusal>,
}

/// Result of [`Sender::step`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sent {
    /// Bytes were sent; there may be more.
    Some,
    /// There is nothing to send.
    Nothing,
    /// The kernel currently accepts no more bytes.
    Blocked,
    /// A carrier is still preparing the next payload.
    Waiting,
}

/// The sending half of a lane: the frame (or the batch of small frames) that is being sent, and the
/// carriers of payloads. The holder calls [`Sender::step`], one system call at a time.
pub(super) struct Sender {
    head: Vec<u8>,
    // At most `head.len()`.
    head_sent: usize,
    /// Payload bytes of the current frame that are not in the stream yet, and their carrier.
    left: usize,
    way: Option<Way>,
    carriers: SendCarriers,
    events: Vec<Event>,
    /// True if something may be left in the books after the last step.
    has_more: bool,
    /// True while chunks wait for the window.
    waits_for_window: bool,
    closed: bool,
    trace: HalfTrace,
}

impl Sender {
    pub(super) fn new(pool: &Arc<Pool>, comm: Option<CommSend>) -> Self {
        Self {
            head: Vec::with_capacity(1024),
            head_sent: 0,
            left: 0,
            way: None,
            carriers: SendCarriers::new(pool, comm),
            events: Vec::new(),
            has_more: false,
            waits_for_window: false,
            closed: false,
            trace: HalfTrace::default(),
        }
    }

    /// Sends once: the rest of the current frame, or the next one.
    pub(super) fn step(&mut self, lane: &Lane, connection: &Connection) -> Result<Sent, Ended> {
        // Unknown until the books are checked.
        self.has_more = true;
        let moved = self.step_beside(lane)?;
        if self.is_idle() {
            self.build(lane, connection);
            if self.is_idle() {
                return Ok(if moved {
                    Sent::Some
                } else if self.is_staging() {
                    Sent::Waiting
                } else {
                    Sent::Nothing
                });
            }
        }
        let head = &self.head[self.head_sent..];
        // A frame that has begun cannot be taken back: without its bytes the connection ends.
        let ready = match self.way.filter(|_| self.left > 0) {
            Some(way) => self.carriers.get(way).ready()?,
            None => None,
        };
        if ready.is_none() && head.is_empty() {
            return Ok(Sent::Waiting);
        }
        let (spans, at) = ready.unwrap_or((&[], Cursor::default()));
        match self.trace.send(lane, head, spans, at) {
            Ok(count) => {
                add_locked(&lane.bytes_sent, count as u64);
                self.advance(count, lane)?;
                self.step_beside(lane)?;
                Ok(Sent::Some)
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(Sent::Blocked),
            Err(e) => Err(e.into()),
        }
    }

    /// Records the outcome of the last step.
    #[inline]
    pub(super) fn trace_step(&mut self, lane: &Lane, sent: &Result<Sent, Ended>) {
        if let Some(trace) = lane.trace.on() {
            let (sent, is_idle) = (sent.as_ref().ok().copied(), self.is_idle());
            let waits = self.waits_for_window;
            self.trace
                .stepped(&lane.trace, trace, sent, (is_idle, waits));
        }
    }

    /// Takes the events, for the thread that releases this half.
    pub(super) fn take_events(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    /// Returns whether no frame is partly sent.
    pub(super) fn is_idle(&self) -> bool {
        self.head_sent == self.head.len() && self.left == 0
    }

    /// Returns whether another step is worthwhile even if nothing
    /// was added to the books since the last one.
    pub(super) fn has_more(&self) -> bool {
        self.has_more || !self.is_idle() || self.is_staging()
    }

    /// Returns whether carriers have operations in flight.
    pub(super) fn is_staging(&self) -> bool {
        self.carriers.is_busy()
    }

    /// Returns whether payloads are in flight beside the stream.
    pub(super) fn is_beside(&self) -> bool {
        self.carriers.is_beside()
    }

    /// Returns the error that the plugin reported on the comm, if any.
    pub(super) fn comm_error(&self) -> Option<Error> {
        self.carriers.comm_error().cloned()
    }

    /// Advances payloads beside the stream; returns whether anything has moved.
    fn step_beside(&mut self, lane: &Lane) -> Result<bool, Ended> {
        // Never before their frames: the peer could not accept them.
        let announced = self.is_idle();
        let mut moved = false;
        for carrier in self.carriers.beside() {
            moved |= carrier.step(announced)?;
            let sent = carrier.take_moved();
            if sent > 0 {
                add_locked(&lane.bytes_sent, sent);
                add_locked(&lane.payload_sent, sent);
            }
            lane.beside_out.update(carrier.is_waiting(), sent);
            recycle(carrier.as_mut(), lane);
        }
        Ok(moved)
    }

    fn advance(&mut self, count: usize, lane: &Lane) -> Result<(), Ended> {
        let of_head = count.min(self.head.len() - self.head_sent);
        self.head_sent += of_head;
        let of_payload = count - of_head;
        if let Some(way) = self.way.filter(|_| of_payload > 0) {
            let carrier = self.carriers.get(way);
            carrier.sent(of_payload)?;
            self.left -= of_payload;
            add_locked(&lane.payload_sent, of_payload as u64);
            if self.left == 0 {
                recycle(carrier, lane);
            }
        }
        Ok(())
    }

    /// Gathers queued frames: control frames, acknowledgements, READ requests, and at most one
    /// frame with a payload.
    fn build(&mut self, lane: &Lane, connection: &Connection) {
        self.head.clear();
        // A long notification must not leave its buffer behind on every lane.
        self.head.shrink_to(2 * MAX_HEAD_BYTES);
        self.head_sent = 0;
        if self.closed {
            return;
        }
        let mut books = lane.books.lock();
        books.lane.encode_urgent(&mut self.head);
        if let Some(way) = self.carriers.preparing() {
            // Payload that can be prepared in the meantime comes first, then payload that is ready.
            let begun = self.choose(Kinds::Prepared, &mut books, lane, connection);
            lane.note_load(&books);
            // Polling a device takes microseconds.
            drop(books);
            if begun || self.begin(way, lane, None) {
                return self.prepare();
            }
            books = lane.books.lock();
        }
        let begun = self.choose(Kinds::All, &mut books, lane, connection);
        lane.note_load(&books);
        self.has_more = books.lane.has_work();
        let waits = self.has_more && books.lane.waits_for_window();
        if waits && !self.waits_for_window {
            lane.counters.waits_for_window();
        }
        self.waits_for_window = waits;
        drop(books);
        if let Some(way) = self.carriers.preparing() {
            self.prepare();
            if !begun && self.head.is_empty() && self.carriers.get(way).look() {
                self.begin(way, lane, None);
            }
        }
    }

    /// Advances payloads that are prepared before their frames begin.
    fn prepare(&mut self) {
        if let Some(way) = self.carriers.preparing() {
            // A failure affects one payload, which then reports it.
            let _ = self.carriers.get(way).step(true);
        }
    }

    /// Adds frames until one has a payload; returns whether one has.
    fn choose(
        &mut self,
        kinds: Kinds,
        books: &mut Books,
        lane: &Lane,
        connection: &Connection,
    ) -> bool {
        while self.head.len() < MAX_HEAD_BYTES {
            let mut room = RoomNow {
                carriers: &mut self.carriers,
                kinds,
            };
            let next = books.lane.poll_transmit(&mut room);
            let begun = match next {
                None => return false,
                Some(Transmit::Request(chunk)) => {
                    lane.trace.taken(&chunk);
                    encode_chunk(&mut self.head, &chunk, 0);
                    false
                }
                Some(Transmit::Write(chunk)) => {
                    lane.trace.taken(&chunk);
                    self.push(Outgoing::Chunk(chunk), lane, books)
                }
                Some(Transmit::Answer(answer)) => self.answer(answer, books, lane, connection),
                Some(Transmit::Dead(Offered(run))) => {
                    let revoked = run.plan.revoked().map(|memory| memory.id);
                    let error = revoked.map_or(Error::Aborted, Error::RegionDeregistered);
                    self.events.push(Event::Dead(run, error));
                    false
                }
            };
            if begun {
                return true;
            }
        }
        false
    }

    /// Adds the answer to a READ; returns whether its frame has begun and has a payload.
    fn answer(
        &mut self,
        answer: Answer,
        books: &mut Books,
        lane: &Lane,
        connection: &Connection,
    ) -> bool {
        let Answer { id, bytes, outcome } = answer;
        let outcome = outcome.and_then(|mut grant| {
            if grant.is_revoked(&connection.context.registry) {
                books.spare.push(grant.cleared());
                Err(Refusal::Revoked)
            } else {
                Ok(grant)
            }
        });
        match outcome {
            Ok(grant) => self.push(Outgoing::Answer { id, bytes, grant }, lane, books),
            Err(refusal) => {
                encode_refusal(&mut self.head, id, refusal);
                false
            }
        }
    }

    /// Passes a payload to its carrier; returns whether its frame has begun.
    fn push(&mut self, payload: Outgoing, lane: &Lane, books: &mut Books) -> bool {
        let way = self.carriers.choose(&payload.place(), payload.bytes());
        self.carriers.push(way, payload);
        !self.carriers.get(way).prepares() && self.begin(way, lane, Some(books))
    }

    /// Begins the frame of the next payload that is ready; returns whether there was one. `books`
    /// are the lane's books, if they are already locked.
    fn begin(&mut self, way: Way, lane: &Lane, mut books: Option<&mut Books>) -> bool {
        loop {
            let frame = self.head.len();
            let carrier = self.carriers.get(way);
            let flag = carrier.flag();
            match carrier.poll_begin() {
                Begin::Frame(payload) => {
                    self.trace.begin_sending(&lane.trace, payload);
                    self.way = Some(way);
                    // A payload beside the stream has no bytes behind its frame.
                    self.left = if flag == 0 { payload.bytes() } else { 0 };
                    encode_payload(&mut self.head, payload, flag);
                    if self.has_further_payload(way, lane, books) {
                        Header::add_flags(&mut self.head[frame..], FLAG_MORE);
                    }
                    return true;
                }
                Begin::Failed(payload, error) => match &mut books {
                    Some(books) => self.give_up(payload, error, books),
                    None => self.give_up(payload, error, &mut lane.books.lock()),
                },
                Begin::Nothing => return false,
            }
        }
    }

    /// Returns whether more payload follows the one whose frame has begun.
    fn has_further_payload(&mut self, way: Way, lane: &Lane, books: Option<&mut Books>) -> bool {
        self.carriers.get(way).has_next()
            || match books {
                Some(books) => books.lane.has_payload(),
                None => lane.books.lock().lane.has_payload(),
            }
    }

    /// Handles a payload whose memory failed before its frame had begun.
    fn give_up(&mut self, payload: Outgoing, error: Error, books: &mut Books) {
        match payload {
            Outgoing::Chunk(chunk) => {
                books.lane.withdraw(chunk.id());
                let revoked = chunk.run.plan.revoked().map(|memory| memory.id);
                let error = revoked.map_or(error, Error::RegionDeregistered);
                self.events.push(Event::Failed(chunk, error));
            }
            Outgoing::Answer { id, grant, .. } => {
                let refusal = if grant.has_dead_memory() {
                    Refusal::Revoked
                } else {
                    limited!(
                        WARN,
                        %error,
                        remedy = "deregister memory before it is unmapped or its device is reset",
                        "memory failed, a peer's READ is refused"
                    );
                    Refusal::failed(&error)
                };
                encode_refusal(&mut self.head, id, refusal);
            }
        }
    }

    /// Stops using memory: copies the unsent bytes of the current frame,
    /// so that it can still be completed.
    pub(super) fn let_go(&mut self, which: LetGo<'_>, lane: &Lane) -> Result<(), Error> {
        if let LetGo::Revoked(allowance) = which {
            // Counts copies of an earlier revocation that have not left.
            allowance.take(self.head.len() - self.head_sent);
        }
        let (mut rest, mut outcome) = (Vec::new(), Ok(()));
        for carrier in self.carriers.each() {
            outcome = outcome.and(carrier.let_go(which, &mut rest));
        }
        if !rest.is_empty() {
            self.head.drain(..self.head_sent);
            self.head_sent = 0;
            self.head.append(&mut rest);
            self.left = 0;
        }
        for carrier in self.carriers.each() {
            recycle(carrier.as_mut(), lane);
        }
        outcome
    }

    /// Gives up the current frame and refuses further ones, after waiting for copies in flight.
    /// Chunks that were taken are in the books.
    pub(super) fn close(&mut self, lane: &Lane) {
        self.closed = true;
        self.trace.close(&lane.trace);
        self.head.clear();
        self.head_sent = 0;
        self.left = 0;
        for carrier in self.carriers.each() {
            carrier.close();
        }
    }
}

/// Keeps the grants of completed answers.
fn recycle(carrier: &mut dyn SendCarrier, lane: &Lane) {
    while let Some(payload) = carrier.poll_over() {
        if let Outgoing::Answer { grant, bytes, .. } = payload {
            let path = lane.path_of(grant.place().device.is_some(), bytes);
            lane.counters.served(path, bytes as u64);
            lane.books.lock().spare.push(grant.cleared());
        }
    }
}

/// Selects payloads.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kinds {
    All,
    /// Payloads that are prepared before their frames begin.
    Prepared,
}

/// Tells whether there is currently room for another payload.
struct RoomNow<'a> {
    carriers: &'a mut SendCarriers,
    kinds: Kinds,
}

impl RoomNow<'_> {
    fn is_for(&mut self, place: &Place<'_>, bytes: usize, run: Option<&Arc<Run>>) -> bool {
        let way = self.carriers.choose(place, bytes);
        let carrier = self.carriers.get(way);
        (self.kinds == Kinds::All || carrier.prepares()) && carrier.has_room(bytes, run)
    }
}

impl Room<Offered, Answer> for RoomNow<'_> {
    fn for_write(&mut self, Offered(run): &Offered) -> bool {
        // If there is no chunk, taking one will find that out.
        run.peek()
            .is_none_or(|(place, bytes)| self.is_for(&place, bytes, Some(run)))
    }

    fn for_answer(&mut self, answer: &Answer) -> bool {
        match &answer.outcome {
            // A refused answer needs no room.
            Ok(grant) if !grant.has_dead_memory() => {
                self.is_for(&grant.place(), answer.bytes, None)
            }
            _ => true,
        }
    }
}

/// Appends the part of a frame before the bytes of a payload.
fn encode_payload(head: &mut Vec<u8>, payload: &Outgoing, flag: u8) {
    match payload {
        Outgoing::Chunk(chunk) => encode_chunk(head, chunk, flag),
        Outgoing::Answer { id, bytes, .. } => {
            let header = Header {
                flags: flag,
                seq: id.seq,
                payload: *bytes as u64,
                ..Header::new(Kind::Data, id.transfer)
            };
            header.encode(head);
        }
    }
}

/// Appends the start of a chunk's frame: a request, or the part before the bytes.
fn encode_chunk(head: &mut Vec<u8>, chunk: &ChunkRef, flag: u8) {
    let run = &chunk.run;
    let message = match &run.after {
        // Once the notification is being sent the run cannot be aborted; if it was aborted before,
        // the chunk goes without.
        After::Notify(message) if run.rides_along(message) && run.completion.commit() => {
            Some(message)
        }
        _ => None,
    };
    let kind = match run.plan.op {
        Op::Read => Kind::Read,
        Op::Write => Kind::Write,
    };
    let (regions, entries) = chunk.table_counts();
    let id = chunk.id();
    let header = Header {
        flags: flag | if message.is_some() { FLAG_NOTIFY } else { 0 },
        regions,
        entries,
        seq: id.seq,
        extra: message.map_or(0, |m| m.len() as u32),
        payload: chunk.bytes() as u64,
        ..Header::new(kind, id.transfer)
    };
    header.encode(head);
    head.extend_from_slice(chunk.table());
    if let Some(message) = message {
        head.extend_from_slice(message);
    }
}

/// Appends the refusal of a READ request.
fn encode_refusal(head: &mut Vec<u8>, id: ChunkId, refusal: Refusal) {
    let header = Header {
        flags: refusal.status() as u8,
        seq: id.seq,
        ..Header::new(Kind::ReadError, id.transfer)
    };
    header.encode_with_text(head, &refusal.to_string());
}
