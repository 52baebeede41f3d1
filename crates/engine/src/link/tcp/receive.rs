//! The receiving half of a lane.
//!
//! Bytes are read straight into their destination: the system call that finishes one payload also
//! brings the next frame's header and table, in a small tail buffer. Only what shares that buffer with a
//! header is ever copied. [`conclude`] has what follows once a payload has landed.

mod conclude;
#[cfg(test)]
mod tests;

use std::io;
use std::sync::Arc;

use tcpx_net::{Cursor, Fault};
use tcpx_proto::frame::{FLAG_COMM, HEADER_BYTES, Header, MAX_EXTRA_BYTES, MAX_TABLE_BYTES, Table};
use tcpx_proto::lane::{Landing, Meaning, Op};

use super::Connection;
use super::event::Event;
use super::lane::{Lane, add_locked};
use super::payload::{Incoming, Sink};
use super::send::Answer;
use crate::carrier::ReceiveCarriers;
use crate::carrier::comm::CommReceive;
use crate::error::{Error, LostCause, Misbehaviour};
use crate::link::Held;
use crate::link::quota::{Reserved, cost};
use crate::memory::{Grant, Pool, Refusal};
use crate::transfer::ChunkRef;

/// Holds the largest header, table and extra, so that a frame's start is always in one piece.
const BUFFER_BYTES: usize = 16 << 10;
const _: () = assert!(BUFFER_BYTES >= HEADER_BYTES + MAX_TABLE_BYTES + MAX_EXTRA_BYTES);

/// How much may be read past the end of a payload: the next header and a table of 250 entries. More
/// would only be payload that has to be copied.
const TAIL_BYTES: usize = 4096;

/// Frames that wait for payloads before them, beyond which a peer has to wait itself: far above any
/// window.
const MAX_LANDING: usize = 4096;

/// What a call to [`Receiver::step`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Received {
    /// Bytes came and there are probably more.
    More,
    /// Bytes came, all that there were.
    Drained,
    /// Nothing is there.
    Nothing,
}

/// Where a lane stands in its stream of frames.
enum Stage {
    Header,
    /// The header is read, table and extra are not.
    Middle(Header),
    Payload(Incoming),
}

/// The receiving half of a lane: where it stands in the stream, and the carriers of payloads. Whoever
/// holds it calls [`Receiver::step`], one system call at a time, and delivers the events afterwards.
pub(super) struct Receiver {
    buffer: Box<[u8]>,
    // Unparsed bytes: start ≤ end ≤ buffer.len()
    start: usize,
    end: usize,
    stage: Stage,
    /// What has arrived, in the order of its frames.
    landing: Landing<Incoming>,
    carriers: ReceiveCarriers<Incoming>,
    /// Grants to use again.
    spare: Vec<Grant>,
    /// Replies that waited to be sent when the last chunk had landed.
    replies: usize,
    /// Bytes cannot be received for want of room.
    starved: bool,
    /// The next frame waits until there is room for what it brings; as in [`Lane`].
    paused: bool,
    /// Room for what the frame brings that begins now.
    held: Option<Held>,
    /// The last look found nothing.
    quiet: bool,
    closed: bool,
}

impl Receiver {
    /// `early` is what arrived behind the handshake.
    pub(super) fn new(early: &[u8], pool: &Arc<Pool>, comm: Option<CommReceive<Incoming>>) -> Self {
        let mut buffer = vec![0; BUFFER_BYTES].into_boxed_slice();
        buffer[..early.len()].copy_from_slice(early);
        Self {
            buffer,
            start: 0,
            end: early.len(),
            stage: Stage::Header,
            landing: Landing::default(),
            carriers: ReceiveCarriers::new(pool, comm),
            spare: Vec::new(),
            replies: 0,
            // What is here already is looked at first: the peer may say nothing more.
            starved: !early.is_empty(),
            paused: false,
            held: None,
            quiet: false,
            closed: false,
        }
    }

    /// Receives once and deals with every frame that is complete.
    pub(super) fn step(
        &mut self,
        lane: &Lane,
        connection: &Connection,
        events: &mut Vec<Event>,
    ) -> Result<Received, Ended> {
        if self.closed {
            return Ok(Received::Nothing);
        }
        // While bytes come in, copies are asked after once there are newer ones: by then they are over.
        let has_looked = self.carriers.is_deep();
        if has_looked {
            self.land(lane, connection, events)?;
        }
        let received = self.step_stream(lane, connection, events)?;
        let moved = self.step_beside(lane)?;
        // Copies of a payload that is incomplete count too: they give slots back. None is asked after twice.
        let is_due = match received {
            Received::More => false,
            Received::Nothing if has_looked && self.carriers.is_busy() => false,
            _ => self.carriers.is_busy() || !self.landing.is_empty(),
        };
        if moved || is_due {
            self.land(lane, connection, events)?;
        }
        Ok(if moved { Received::More } else { received })
    }

    /// Goes on with payloads that travel beside the stream; says whether anything has moved.
    fn step_beside(&mut self, lane: &Lane) -> Result<bool, Ended> {
        let mut moved = false;
        for carrier in self.carriers.beside() {
            moved |= carrier.step()?;
            let received = carrier.take_moved();
            if received > 0 {
                add_locked(&lane.bytes_received, received);
            }
            lane.beside_in.update(carrier.is_waiting(), received);
        }
        Ok(moved)
    }

    fn step_stream(
        &mut self,
        lane: &Lane,
        connection: &Connection,
        events: &mut Vec<Event>,
    ) -> Result<Received, Ended> {
        self.check_revoked(connection, events);
        if self.starved || self.paused {
            // What is in the buffer comes before what is in the socket.
            self.parse(lane, connection, events)?;
            lane.lower_wake_level(self.left());
            if self.starved || self.paused {
                return Ok(Received::Nothing);
            }
        }
        // Whoever looks again and again must not keep the bytes from coming in. Between frames only:
        // inside a payload the wake level may be above one byte.
        if self.quiet && matches!(self.stage, Stage::Header) && !lane.stream.is_readable() {
            return Ok(Received::Nothing);
        }
        let (received, asked) = match self.receive(lane) {
            Ok((0, _)) => return Ok(Received::Nothing),
            Ok(counts) => counts,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                self.quiet = true;
                return Ok(Received::Nothing);
            }
            Err(e) => return Err(e.into()),
        };
        self.quiet = false;
        add_locked(&lane.bytes_received, received as u64);
        self.parse(lane, connection, events)?;
        lane.lower_wake_level(self.left());
        Ok(if received < asked {
            Received::Drained
        } else {
            Received::More
        })
    }

    /// Bytes of the current payload that are still to come.
    pub(super) fn left(&self) -> usize {
        match &self.stage {
            Stage::Payload(payload) => payload.left,
            _ => 0,
        }
    }

    /// Receives without asking first whether anything is there: the kernel is going to report it.
    pub(super) fn expect_bytes(&mut self) {
        self.quiet = false;
    }

    /// Whether so many replies wait to be sent that they should leave while bytes still come in.
    pub(super) fn wants_ack(&mut self, enough: usize) -> bool {
        std::mem::take(&mut self.replies) >= enough
    }

    /// Whether payload is under way of which nobody will be told, or cannot be received before that.
    pub(super) fn is_staging(&self) -> bool {
        self.starved || self.carriers.is_busy()
    }

    /// Waits until nobody writes to memory on our behalf that may no longer be touched. The next step
    /// looks whether more may be written.
    pub(super) fn let_go(&mut self) -> Result<(), Error> {
        let mut outcome = Ok(());
        for carrier in self.carriers.each() {
            outcome = outcome.and(carrier.let_go());
        }
        outcome
    }

    /// Gives up; returns the chunks of ours that were being settled, with why they have failed where they
    /// have.
    pub(super) fn close(&mut self, connection: &Connection) -> Vec<(ChunkRef, Option<Error>)> {
        self.closed = true;
        self.held = None;
        let mut payloads: Vec<_> = self.carriers.each().flat_map(|c| c.close()).collect();
        payloads.extend(self.landing.close());
        if let Stage::Payload(current) = std::mem::replace(&mut self.stage, Stage::Header) {
            payloads.push(current);
        }
        payloads
            .into_iter()
            .filter_map(|payload| payload.into_chunk(connection))
            .collect()
    }

    /// Makes one system call: returns how many bytes came and how many could have; no bytes came if
    /// there is no room for them.
    fn receive(&mut self, lane: &Lane) -> io::Result<(usize, usize)> {
        while let Stage::Payload(payload) = &mut self.stage
            && let Some(way) = payload.way
            && let Some(place) = payload.sink.place()
        {
            // `parse` leaves nothing in the buffer while a payload is incomplete.
            let carrier = self.carriers.get(way);
            let room = match carrier.room(&place, payload.left) {
                Ok(Some(room)) => room,
                Ok(None) => {
                    self.starved = true;
                    return Ok((0, 0));
                }
                Err(error) => {
                    self.give_up(error);
                    return Ok((0, 0));
                }
            };
            let asked = room.bytes;
            // What follows the payload may be read with its last part.
            let tail = if asked == payload.left {
                &mut self.buffer[..TAIL_BYTES]
            } else {
                &mut []
            };
            let count = match lane.stream.recv(room.spans, room.at, tail) {
                // Then nothing was taken from the stream: the rest of the payload goes nowhere.
                Err(error) if Fault::is_in(&error) => {
                    self.give_up(Error::MemoryFault);
                    continue;
                }
                outcome => outcome?,
            };
            let of_payload = count.min(payload.left);
            payload.left -= of_payload;
            (self.start, self.end) = (0, count - of_payload);
            let is_last = payload.left == 0;
            if let Err(error) = carrier.filled(&place, of_payload, is_last) {
                self.give_up(error);
            }
            return Ok((count, asked));
        }
        if self.start > 0 {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let room = &mut self.buffer[self.end..];
        let asked = room.len();
        let count = lane.stream.recv(&[], Cursor::default(), room)?;
        self.end += count;
        Ok((count, asked))
    }

    /// Gives the current payload up in the middle: its bytes cannot be brought to their memory, and the
    /// rest of them goes nowhere.
    fn give_up(&mut self, error: Error) {
        if let Stage::Payload(payload) = &mut self.stage
            && let Some(way) = payload.way
        {
            self.carriers.get(way).forget();
            // Earlier parts may still be landing; a run must not end before they have.
            let _ = self.carriers.get(way).let_go();
            payload.fail(error);
        }
    }

    /// Looks away from memory that may no longer be touched. Whoever revokes memory or aborts a run
    /// takes this half's lock afterwards, so that no system call of ours is still using it.
    fn check_revoked(&mut self, connection: &Connection, events: &mut Vec<Event>) {
        let Stage::Payload(payload) = &mut self.stage else {
            return;
        };
        let (is_gone, refusal) = match &mut payload.sink {
            Sink::Regions { grant, .. } => {
                let registry = &connection.context.registry;
                (grant.is_revoked(registry), Some(Refusal::Revoked))
            }
            Sink::Run(chunk) => (!chunk.may_land(), None),
            _ => (false, None),
        };
        if !is_gone {
            return;
        }
        let Some(way) = payload.way.take() else {
            return;
        };
        self.carriers.get(way).forget();
        let sink = std::mem::replace(&mut payload.sink, Sink::Nowhere(refusal));
        if let Sink::Run(chunk) = sink {
            // Once it is settled its memory is the caller's again.
            let _ = self.carriers.get(way).let_go();
            events.push(Event::Settled(chunk));
        }
    }

    fn parse(
        &mut self,
        lane: &Lane,
        connection: &Connection,
        events: &mut Vec<Event>,
    ) -> Result<(), Ended> {
        self.starved = false;
        loop {
            match &mut self.stage {
                Stage::Header => {
                    let Some(bytes) = self.buffer[self.start..self.end].first_chunk() else {
                        return Ok(());
                    };
                    let header = Header::decode(bytes).map_err(Ended::misbehaved)?;
                    self.start += HEADER_BYTES;
                    self.stage = Stage::Middle(header);
                }
                Stage::Middle(header) => {
                    let header = *header;
                    let middle = self.start..self.start + header.middle_bytes();
                    if middle.end > self.end {
                        return Ok(());
                    }
                    if self.landing.len() >= MAX_LANDING {
                        self.starved = true;
                        return Ok(());
                    }
                    if let Some(bytes) = cost(&header)
                        && !self.reserve(bytes, lane, connection)?
                    {
                        return Ok(());
                    }
                    self.start = middle.end;
                    self.begin(header, middle, lane, connection, events)?;
                }
                Stage::Payload(_) => {
                    if !self.take_buffered() {
                        return Ok(());
                    }
                    let stage = std::mem::replace(&mut self.stage, Stage::Header);
                    if let Stage::Payload(payload) = stage {
                        self.finish(payload, lane, connection, events)?;
                    }
                }
            }
        }
    }

    /// Reserves room for what a frame makes the session keep. False where there is none: the frame waits,
    /// and the lane is paused.
    fn reserve(
        &mut self,
        bytes: usize,
        lane: &Lane,
        connection: &Connection,
    ) -> Result<bool, Ended> {
        let max = connection.context.quota.of_a_peer();
        if bytes > max {
            let cause = LostCause::NotificationTooLong { bytes, max };
            return Err(Ended::Lost(cause));
        }
        let is_full = match connection.share.reserve(bytes) {
            Reserved::Room(held) => {
                self.held = Some(held);
                false
            }
            Reserved::Nobody => false,
            Reserved::Full => true,
        };
        if is_full != self.paused {
            self.paused = is_full;
            lane.set_paused(is_full);
            // Somebody must notice when it stays so; and a worker that has found it paused must listen
            // to the stream again.
            match is_full {
                true => connection.context.control.stay_awake(),
                false => lane.call_worker(),
            }
        }
        Ok(!is_full)
    }

    /// Brings buffered bytes of the current payload where they belong; says whether it is complete.
    fn take_buffered(&mut self) -> bool {
        while let Stage::Payload(payload) = &mut self.stage
            && payload.left > 0
        {
            let available = &self.buffer[self.start..self.end];
            let mut count = available.len().min(payload.left);
            if count == 0 {
                return false;
            }
            let mut failed = None;
            if let Some(way) = payload.way
                && let Some(place) = payload.sink.place()
            {
                let carrier = self.carriers.get(way);
                match carrier.room(&place, payload.left) {
                    Ok(None) => {
                        self.starved = true;
                        return false;
                    }
                    Ok(Some(mut room)) => {
                        count = count.min(room.bytes);
                        let copied = room.at.copy_in(room.spans, &available[..count]);
                        let is_last = count == payload.left;
                        failed = match copied {
                            Ok(_) => carrier.filled(&place, count, is_last).err(),
                            Err(fault) => Some(fault.into()),
                        };
                    }
                    Err(error) => failed = Some(error),
                }
            } else if let Sink::Message { bytes, .. } | Sink::Refused { text: bytes, .. } =
                &mut payload.sink
            {
                bytes.extend_from_slice(&available[..count]);
            }
            self.start += count;
            payload.left -= count;
            if let Some(error) = failed {
                self.give_up(error);
            }
        }
        true
    }

    /// Deals with the start of a frame: decides where its payload goes before any of it lands.
    fn begin(
        &mut self,
        header: Header,
        middle: std::ops::Range<usize>,
        lane: &Lane,
        connection: &Connection,
        events: &mut Vec<Event>,
    ) -> Result<(), Ended> {
        // Looked at first: what is begun below must be finished.
        if header.is_on_comm() && self.carriers.choose(FLAG_COMM, None).is_none() {
            return Err(Ended::Misbehaved(Misbehaviour::CommMissing));
        }
        let middle = &self.buffer[middle];
        let (table, extra) = middle.split_at(header.table_bytes());
        let meaning = lane.handle_frame(&header).map_err(Ended::misbehaved)?;
        let registry = &connection.context.registry;
        let mut sink = Sink::Nowhere(None);
        match meaning {
            Meaning::Write(_) => {
                let table = Table::decode(&header, table).map_err(Ended::misbehaved)?;
                let mut grant = self.spare.pop().unwrap_or_default();
                sink = match grant.fill(registry, Op::Write, &table) {
                    Ok(()) => Sink::Regions {
                        grant,
                        notification: self.held.is_some().then(|| extra.to_vec()),
                    },
                    Err(refusal) => Sink::Nowhere(Some(refusal)),
                };
            }
            Meaning::Request(id) => {
                let table = Table::decode(&header, table).map_err(Ended::misbehaved)?;
                let mut books = lane.books.lock();
                let mut grant = books.spare.pop().unwrap_or_default();
                let filled = grant.fill(registry, Op::Read, &table);
                let outcome = filled.map(|()| grant);
                let bytes = header.payload as usize;
                books.lane.handle_request(Answer { id, bytes, outcome });
                drop(books);
                lane.mark_dirty();
                // Also whoever only serves must notice a peer that stops reading.
                connection.context.control.stay_awake();
            }
            Meaning::Data(chunk) if chunk.may_land() => sink = Sink::Run(chunk),
            Meaning::Data(chunk) | Meaning::Acknowledged(chunk) => {
                events.push(Event::Settled(chunk));
            }
            Meaning::Refused(chunk, status) => {
                let text = Vec::new();
                sink = Sink::Refused {
                    chunk,
                    status,
                    text,
                };
            }
            // Only a sign of life is asked for: it need not wait its turn.
            Meaning::Ping(0) => events.push(Event::Ping(0)),
            Meaning::Ping(_) => {}
            Meaning::Pong(token) => events.push(Event::Pong(token)),
            Meaning::Received(next) => events.push(Event::Received(next)),
            // Without room for it, nobody will look for it.
            Meaning::Message if self.held.is_none() && cost(&header).is_some() => {}
            Meaning::Message => {
                sink = Sink::Message {
                    middle: middle.to_vec(),
                    bytes: Vec::new(),
                };
            }
        }
        self.start_payload(header, sink, connection);
        Ok(())
    }

    /// Makes a payload the current one, or leaves it to the carrier beside the stream.
    fn start_payload(&mut self, header: Header, sink: Sink, connection: &Connection) {
        let flag = match header.is_on_comm() {
            true => FLAG_COMM,
            false => 0,
        };
        let way = self.carriers.choose(flag, sink.place().as_ref());
        let payload = Incoming {
            header,
            left: header.payload_on_wire() as usize,
            sink,
            way,
            held: self.held.take(),
        };
        if let Some(way) = way {
            let carrier = self.carriers.get(way);
            if carrier.is_beside() {
                let ticket = self.landing.reserve();
                if let Some(over) = carrier.push(ticket, payload) {
                    self.landing.complete(over.ticket, over.payload);
                }
                self.stage = Stage::Header;
                connection.context.control.stay_awake();
                return;
            }
            carrier.begin(header.has_more());
        }
        self.stage = Stage::Payload(payload);
    }
}

/// Why a lane has ended, and whether the connection has.
#[derive(Debug)]
pub(super) enum Ended {
    /// The stream is broken: the connection goes on.
    Broken(LostCause),
    Lost(LostCause),
    Misbehaved(Misbehaviour),
}

impl Ended {
    pub(super) fn misbehaved(what: impl Into<Misbehaviour>) -> Self {
        Self::Misbehaved(what.into())
    }
}

impl From<io::Error> for Ended {
    fn from(error: io::Error) -> Self {
        // Memory that cannot be read is not the stream's fault, and would break the next one, too.
        match Fault::is_in(&error) {
            true => Self::Lost(error.into()),
            false => Self::Broken(error.into()),
        }
    }
}

impl From<Error> for Ended {
    fn from(error: Error) -> Self {
        Self::Lost(error.into())
    }
}
