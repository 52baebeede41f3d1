//! The receiving half of a lane.
//!
//! Bytes are read directly into their destination: the system call that finishes one payload also
//! brings the next frame's header and table, in a small tail buffer. Only payload that shares this
//! buffer with a header is ever copied. [`conclude`] handles frames whose payload has landed.

mod conclude;
#[cfg(test)]
mod tests;

use std::io;
use std::sync::Arc;

use tcpx_net::{Cursor, Fault};
use tcpx_proto::frame::{FLAG_COMM, HEADER_BYTES, Header, MAX_EXTRA_BYTES, MAX_TABLE_BYTES, Table};
use tcpx_proto::lane::{Landing, Meaning, Op};

use super::Connection;
use super::ended::Ended;
use super::event::Event;
use super::lane::{Lane, add_locked};
use super::payload::{Incoming, Sink};
use super::send::Answer;
use super::traced::HalfTrace;
use crate::carrier::ReceiveCarriers;
use crate::carrier::comm::CommReceive;
use crate::error::{Error, LostCause, Misbehaviour};
use crate::link::Held;
use crate::link::quota::{Reserved, cost};
use crate::memory::{Grant, Pool, Refusal};
use crate::transfer::ChunkRef;

/// Holds the largest header, table and extra, so that a frame's start is always contiguous.
const BUFFER_BYTES: usize = 16 << 10;
const _: () = assert!(BUFFER_BYTES >= HEADER_BYTES + MAX_TABLE_BYTES + MAX_EXTRA_BYTES);

/// Limits the bytes read past the end of a payload: the next header and a table of 250 entries.
/// More bytes would only be payload that has to be copied.
const TAIL_BYTES: usize = 4096;

/// Limits the frames that wait for earlier payloads, far above any window; then reading pauses.
const MAX_LANDING: usize = 4096;

/// Result of [`Receiver::step`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Received {
    /// Bytes arrived, and there are probably more.
    More,
    /// Bytes arrived, and no more are available.
    Drained,
    /// No bytes were available.
    Nothing,
}

/// Position of a lane in its stream of frames.
enum Stage {
    Header,
    /// The header is read, table and extra are not.
    Middle(Header),
    Payload(Incoming),
}

/// The receiving half of a lane: its position in the stream, and the carriers of payloads. The
/// holder calls [`Receiver::step`], one system call at a time, and delivers the events afterwards.
pub(super) struct Receiver {
    buffer: Box<[u8]>,
    // Unparsed bytes: start ≤ end ≤ buffer.len().
    start: usize,
    end: usize,
    stage: Stage,
    /// Frames that wait for earlier payloads, in order.
    landing: Landing<Incoming>,
    carriers: ReceiveCarriers<Incoming>,
    /// Spare grants.
    spare: Vec<Grant>,
    /// Replies that were queued when the last chunk had landed.
    replies: usize,
    /// True while bytes cannot be received because a carrier has no room.
    starved: bool,
    /// True while the next frame waits for room for its contents; as in [`Lane`].
    paused: bool,
    /// Reserved memory for the frame that begins.
    held: Option<Held>,
    /// True if the last attempt found no bytes.
    quiet: bool,
    closed: bool,
    trace: HalfTrace,
}

impl Receiver {
    /// Makes the receiving half; `early` are the bytes that arrived after the handshake.
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
            // Parse these bytes first: the peer may send nothing more.
            starved: !early.is_empty(),
            paused: false,
            held: None,
            quiet: false,
            closed: false,
            trace: HalfTrace::default(),
        }
    }

    /// Receives once and handles every complete frame.
    pub(super) fn step(
        &mut self,
        lane: &Lane,
        connection: &Connection,
        events: &mut Vec<Event>,
    ) -> Result<Received, Ended> {
        if self.closed {
            return Ok(Received::Nothing);
        }
        // While bytes arrive, copies are polled only once newer ones follow: by then they are over.
        let has_looked = self.carriers.is_deep();
        if has_looked {
            self.land(lane, connection, events)?;
        }
        let received = self.step_stream(lane, connection, events)?;
        let moved = self.step_beside(lane)?;
        // Copies of an incomplete payload count as well: they return slots. None is polled twice.
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

    /// Returns the error that the plugin reported on the comm, if any.
    pub(super) fn comm_error(&self) -> Option<Error> {
        self.carriers.comm_error().cloned()
    }

    /// Advances payloads beside the stream; returns whether anything has moved.
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
            // Bytes in the buffer precede bytes in the socket.
            self.parse(lane, connection, events)?;
            lane.lower_wake_level(self.left());
            if self.starved || self.paused {
                return Ok(Received::Nothing);
            }
        }
        // A polling thread must not keep bytes from arriving, so check for readiness first. Only
        // between frames: inside a payload the wake level may be above one byte.
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

    /// Records why the last step received nothing.
    #[inline]
    pub(super) fn trace_step(&mut self, lane: &Lane) {
        self.trace.received(&lane.trace, self.starved, self.paused);
    }

    /// Returns the bytes of the current payload that are still to come.
    pub(super) fn left(&self) -> usize {
        match &self.stage {
            Stage::Payload(payload) => payload.left,
            _ => 0,
        }
    }

    /// Skips the readiness check before the next receive: the kernel is going to report the bytes.
    pub(super) fn expect_bytes(&mut self) {
        self.quiet = false;
    }

    /// Returns whether enough replies are queued to send them while bytes still arrive.
    pub(super) fn wants_ack(&mut self, enough: usize) -> bool {
        std::mem::take(&mut self.replies) >= enough
    }

    /// Returns whether payload is in flight, or waits for room, without a signal of its end.
    pub(super) fn is_staging(&self) -> bool {
        self.starved || self.carriers.is_busy()
    }

    /// Waits until no carrier writes to memory that may no longer be touched. The next step checks
    /// whether more may be written.
    pub(super) fn let_go(&mut self) -> Result<(), Error> {
        let mut outcome = Ok(());
        for carrier in self.carriers.each() {
            outcome = outcome.and(carrier.let_go());
        }
        outcome
    }

    /// Closes the half; returns the chunks of this side being settled,
    /// with the errors of failed ones.
    pub(super) fn close(
        &mut self,
        lane: &Lane,
        connection: &Connection,
    ) -> Vec<(ChunkRef, Option<Error>)> {
        self.closed = true;
        self.trace.close(&lane.trace);
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

    /// Makes one system call; returns the bytes received (none without room) and requested.
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
            // Bytes after the payload may be read with its last part.
            let tail = if asked == payload.left {
                &mut self.buffer[..TAIL_BYTES]
            } else {
                &mut []
            };
            let count = match self.trace.receive(lane, room.spans, room.at, tail) {
                // A failed call has taken nothing from the stream: drop the rest of the payload.
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
        let count = self.trace.receive(lane, &[], Cursor::default(), room)?;
        self.end += count;
        Ok((count, asked))
    }

    /// Gives up the current payload, which cannot reach its memory, and drops the rest of it.
    fn give_up(&mut self, error: Error) {
        if let Stage::Payload(payload) = &mut self.stage
            && let Some(way) = payload.way
        {
            self.carriers.get(way).forget();
            // Earlier parts may still be landing; a run must not end before that.
            let _ = self.carriers.get(way).let_go();
            payload.fail(error);
        }
    }

    /// Stops using memory that may no longer be touched. A revocation or an abort takes this half's
    /// lock afterwards, so that no system call is still using the memory.
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
            // Once the chunk is settled, its memory belongs to the caller again.
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
                    self.trace.end_receiving(&lane.trace);
                    let stage = std::mem::replace(&mut self.stage, Stage::Header);
                    if let Stage::Payload(payload) = stage {
                        self.finish(payload, lane, connection, events)?;
                    }
                }
            }
        }
    }

    /// Reserves memory that the session keeps for a frame. Returns false if there is none: the
    /// frame waits, and the lane is paused.
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
            // The control thread must detect a pause that is too long; and a worker that has seen
            // the lane paused must listen to the stream again.
            match is_full {
                true => connection.context.control.stay_awake(),
                false => lane.call_worker(),
            }
        }
        Ok(!is_full)
    }

    /// Copies buffered bytes of the current payload; returns whether it is complete.
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

    /// Handles the start of a frame: determines where its payload goes before a byte lands.
    fn begin(
        &mut self,
        header: Header,
        middle: std::ops::Range<usize>,
        lane: &Lane,
        connection: &Connection,
        events: &mut Vec<Event>,
    ) -> Result<(), Ended> {
        // Checked first: a frame that is begun below must be finished.
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
                // A side that only serves must also detect a peer that stops reading.
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
            // The ping only requests a sign of life: its answer need not wait for earlier frames.
            Meaning::Ping(0) => events.push(Event::Ping(0)),
            Meaning::Ping(_) => {}
            Meaning::Pong(token) => events.push(Event::Pong(token)),
            Meaning::Received(next) => events.push(Event::Received(next)),
            // Without reserved memory, the message will not be needed.
            Meaning::Message if self.held.is_none() && cost(&header).is_some() => {}
            Meaning::Message => {
                sink = Sink::Message {
                    middle: middle.to_vec(),
                    bytes: Vec::new(),
                };
            }
        }
        self.start_payload(header, sink, connection);
        if matches!(self.stage, Stage::Payload(_)) {
            self.trace.begin_receiving(&lane.trace, &header);
        }
        Ok(())
    }

    /// Makes a payload the current one, or passes it to the carrier beside the stream.
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
