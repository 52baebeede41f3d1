//! The receiving half of a lane.
//!
//! Bytes are read straight into their destination: the system call that finishes one payload also
//! brings the next frame's header and table, in a small tail buffer. Only what shares that buffer
//! with a header is ever copied.

mod payload;

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tcpx_net::Cursor;
use tcpx_proto::frame::{
    FLAG_INLINE, FLAG_NOTIFY, HEADER_BYTES, Header, Kind, MAX_EXTRA_BYTES, MAX_TABLE_BYTES, Status,
    Table,
};

pub(super) use self::payload::Coming;
use self::payload::{Payload, Sink};
use super::grant::Grant;
use super::lane::{Flying, Lane};
use super::tx::encode_error;
use super::{Connection, fail_run};
use crate::error::Error;
use crate::region::Refusal;
use crate::run::Run;
use crate::staging::Inbound;
use crate::tagged::Arrival;
use crate::transport::plugin::Inflow;

/// Holds the largest header, table and extra, so that a frame's start is always in one piece.
const BUFFER_BYTES: usize = 16 << 10;
const _: () = assert!(BUFFER_BYTES >= HEADER_BYTES + MAX_TABLE_BYTES + MAX_EXTRA_BYTES);

/// How much may be read past the end of a payload: the next header and a table of 250 entries. More
/// would only be payload that has to be copied.
const TAIL_BYTES: usize = 4096;

/// Payloads on the comm, and what waits for them, beyond which a peer has to wait itself: far above any window.
const MAX_COMING: usize = 4096;

/// What a call to [`Rx::step`] found.
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
enum State {
    Header,
    /// The header is read, table and extra are not.
    Middle(Header),
    Payload(Payload),
}

pub(super) struct Rx {
    buffer: Box<[u8]>,
    // Unparsed bytes: start ≤ end ≤ buffer.len()
    start: usize,
    end: usize,
    state: State,
    cursor: Cursor,
    /// The grant of the WRITE chunk that is being received.
    grant: Grant,
    /// Payload for devices, and what must wait for it to land.
    inbound: Inbound<Payload>,
    /// Payload that comes on the lane's comm, if it has one, and what must wait for it. Either this or `inbound` is empty.
    flow: Option<Inflow<Coming>>,
    /// Grants to use again.
    spare: Vec<Grant>,
    /// Bytes cannot be received for want of a slot, or before others have landed.
    starved: bool,
    /// The last look found nothing.
    quiet: bool,
    closed: bool,
}

impl Rx {
    /// `early` is what arrived behind the handshake.
    pub(super) fn new(early: &[u8], flow: Option<Inflow<Coming>>) -> Self {
        let mut buffer = vec![0; BUFFER_BYTES].into_boxed_slice();
        buffer[..early.len()].copy_from_slice(early);
        Self {
            buffer,
            start: 0,
            end: early.len(),
            state: State::Header,
            cursor: Cursor::default(),
            grant: Grant::default(),
            inbound: Inbound::new(),
            flow,
            spare: Vec::new(),
            starved: false,
            quiet: false,
            closed: false,
        }
    }

    /// Receives once and deals with every frame that is complete.
    pub(super) fn step(
        &mut self,
        lane: &Lane,
        connection: &Arc<Connection>,
    ) -> Result<Received, Ended> {
        if self.closed {
            return Ok(Received::Nothing);
        }
        // While bytes come in, copies are only asked after once there are newer ones: by then they are over.
        if self.inbound.is_deep() {
            self.land(lane, connection)?;
        }
        let received = self.step_stream(lane, connection)?;
        if received != Received::More && !self.inbound.is_empty() {
            self.land(lane, connection)?;
        }
        Ok(if self.flow(lane, connection)? {
            Received::More
        } else {
            received
        })
    }

    /// Goes on with the payloads on the comm; says whether anything has moved.
    fn flow(&mut self, lane: &Lane, connection: &Arc<Connection>) -> Result<bool, Ended> {
        let Some(flow) = self.flow.as_mut().filter(|flow| flow.is_busy()) else {
            return Ok(false);
        };
        let failed = |error| Ended::Io(io::Error::other(error));
        let moved = flow.step().map_err(failed)?;
        let received = flow.take_received();
        if received > 0 {
            lane.bytes_received.fetch_add(received, Ordering::Relaxed);
        }
        lane.comm_in.update(flow.is_waiting(), received);
        while let Some((Coming { mut payload, grant }, error)) =
            self.flow.as_mut().and_then(Inflow::due)
        {
            if let Some(error) = error {
                payload.fail(error);
            }
            self.conclude(payload, lane, connection)?;
            if self.spare.len() < connection.own_window {
                self.spare.push(grant.cleared());
            }
        }
        Ok(moved)
    }

    /// Whether payload on the comm, or what waits for it, is on its way.
    fn is_flowing(&self) -> bool {
        self.flow.as_ref().is_some_and(|flow| !flow.is_empty())
    }

    fn step_stream(
        &mut self,
        lane: &Lane,
        connection: &Arc<Connection>,
    ) -> Result<Received, Ended> {
        self.check_revoked(connection);
        if self.starved {
            // What is in the buffer comes before what is in the socket.
            self.parse(lane, connection)?;
            lane.lower_wake_level(self.left());
            if self.starved {
                return Ok(Received::Nothing);
            }
        }
        // Whoever looks again and again must not keep the bytes from coming in. Between frames only: inside
        // a payload the wake level may be above one byte.
        if self.quiet && matches!(self.state, State::Header) && !lane.stream.is_readable() {
            return Ok(Received::Nothing);
        }
        let (received, asked) = match self.receive(lane, connection) {
            Ok((0, _)) => return Ok(Received::Nothing),
            Ok(counts) => counts,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                self.quiet = true;
                return Ok(Received::Nothing);
            }
            Err(e) => return Err(Ended::Io(e)),
        };
        self.quiet = false;
        lane.bytes_received
            .fetch_add(received as u64, Ordering::Relaxed);
        self.parse(lane, connection)?;
        lane.lower_wake_level(self.left());
        Ok(if received < asked {
            Received::Drained
        } else {
            Received::More
        })
    }

    /// Bytes of the current payload that are still to come.
    pub(super) fn left(&self) -> usize {
        match &self.state {
            State::Payload(payload) => payload.left,
            _ => 0,
        }
    }

    /// Whether payload is being copied to a device, or cannot be received before that.
    pub(super) fn is_staging(&self) -> bool {
        self.starved || !self.inbound.is_empty() || self.flow.as_ref().is_some_and(Inflow::is_busy)
    }

    /// Waits until no device writes to memory on our behalf. The next step looks whether more may be written.
    pub(super) fn let_go(&mut self) -> Result<(), Error> {
        self.inbound.wait();
        self.flow.as_mut().map_or(Ok(()), Inflow::let_go)
    }

    /// Gives up; returns the READ chunks that were being received.
    pub(super) fn close(&mut self) -> Vec<Flying> {
        self.closed = true;
        let current = match std::mem::replace(&mut self.state, State::Header) {
            State::Payload(payload) => Some(payload),
            _ => None,
        };
        let coming = self.flow.as_mut().map(|flow| flow.close(Error::Closed));
        let coming = coming.into_iter().flatten().map(|coming| coming.payload);
        let payloads = self.inbound.close().chain(coming).chain(current);
        payloads
            .filter_map(|payload| match payload.sink {
                Sink::Run(flying) => Some(flying),
                _ => None,
            })
            .collect()
    }

    /// One system call: returns how many bytes came and how many could have; no bytes came if there is no slot
    /// for them.
    fn receive(&mut self, lane: &Lane, connection: &Arc<Connection>) -> io::Result<(usize, usize)> {
        if let State::Payload(payload) = &mut self.state
            && let Some((device, spans)) = payload.sink.device(&self.grant)
        {
            if self.flow.as_ref().is_some_and(|flow| !flow.is_empty()) {
                self.starved = true;
                return Ok((0, 0));
            }
            let pool = &connection.core.staging.pool;
            let room = match self.inbound.room(device.as_ref(), pool, payload.left) {
                Ok(Some(room)) => room,
                Ok(None) => {
                    self.starved = true;
                    return Ok((0, 0));
                }
                Err(error) => {
                    payload.give_up(error, &mut self.inbound, connection);
                    return Ok((0, 0));
                }
            };
            // What follows the payload may be read with its last part.
            let tail = if room.len() == payload.left {
                &mut self.buffer[..TAIL_BYTES]
            } else {
                &mut []
            };
            let count = lane.stream.recv(&[room], Cursor::default(), tail)?;
            let of_payload = count.min(payload.left);
            payload.left -= of_payload;
            let is_last = payload.left == 0;
            let filled = self.inbound.filled(
                of_payload,
                is_last,
                device.as_ref(),
                spans,
                &mut self.cursor,
            );
            if let Err(error) = filled {
                payload.give_up(error, &mut self.inbound, connection);
            }
            (self.start, self.end) = (0, count - of_payload);
            return Ok((count, room.len()));
        }
        if let State::Payload(payload) = &mut self.state {
            let spans = match &payload.sink {
                Sink::Regions { .. } => Some(self.grant.spans.as_slice()),
                Sink::Run(flying) => Some(flying.run.plan.spans(flying.chunk())),
                Sink::Message { .. } | Sink::Nowhere(_) => None,
            };
            if let Some(spans) = spans {
                // `parse` leaves nothing in the buffer while a payload is incomplete.
                let tail = &mut self.buffer[..TAIL_BYTES];
                let count = lane.stream.recv(spans, self.cursor, tail)?;
                let of_payload = count.min(payload.left);
                self.cursor.advance(spans, of_payload);
                let asked = payload.left;
                payload.left -= of_payload;
                (self.start, self.end) = (0, count - of_payload);
                return Ok((count, asked));
            }
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

    /// Looks away from memory that may no longer be touched. Whoever revokes memory or aborts a run
    /// takes this half's lock afterwards, so that no system call of ours is still using it.
    fn check_revoked(&mut self, connection: &Arc<Connection>) {
        let State::Payload(payload) = &mut self.state else {
            return;
        };
        match &payload.sink {
            Sink::Regions { .. } if self.grant.is_revoked(&connection.core.regions) => {
                payload.sink = Sink::Nowhere(Some(Refusal::Revoked));
                self.inbound.forget();
            }
            Sink::Run(flying) if may_land(&flying.run) => {}
            Sink::Run(_) => {
                let sink = std::mem::replace(&mut payload.sink, Sink::Nowhere(None));
                self.inbound.forget();
                // Once it is settled its memory is the caller's again.
                self.inbound.wait();
                if let Sink::Run(flying) = sink {
                    connection.settle(&flying.run);
                }
            }
            _ => {}
        }
    }

    /// Deals with the frames whose payload has landed on its device, and with those that had to wait for that.
    fn land(&mut self, lane: &Lane, connection: &Arc<Connection>) -> Result<(), Ended> {
        while let Some((mut payload, error)) = self.inbound.due() {
            if let Some(error) = error {
                payload.fail(error);
            }
            self.conclude(payload, lane, connection)?;
        }
        Ok(())
    }

    fn parse(&mut self, lane: &Lane, connection: &Arc<Connection>) -> Result<(), Ended> {
        self.starved = false;
        loop {
            match &mut self.state {
                State::Header => {
                    let Some(bytes) = self.buffer[self.start..self.end].first_chunk() else {
                        return Ok(());
                    };
                    let header = Header::decode(bytes).map_err(Ended::misbehaved)?;
                    self.start += HEADER_BYTES;
                    self.state = State::Middle(header);
                }
                State::Middle(header) => {
                    let header = *header;
                    let middle = self.start..self.start + header.middle_bytes();
                    if middle.end > self.end {
                        return Ok(());
                    }
                    let is_early = header.is_on_comm() && !self.inbound.is_empty();
                    if is_early || self.flow.as_ref().is_some_and(|f| f.len() >= MAX_COMING) {
                        self.starved = true;
                        return Ok(());
                    }
                    self.start = middle.end;
                    self.begin(header, middle, lane, connection)?;
                }
                State::Payload(payload) => {
                    let available = &self.buffer[self.start..self.end];
                    let mut count = available.len().min(payload.left);
                    if count > 0
                        && let Some((device, spans)) = payload.sink.device(&self.grant)
                    {
                        if self.flow.as_ref().is_some_and(|flow| !flow.is_empty()) {
                            self.starved = true;
                            return Ok(());
                        }
                        let pool = &connection.core.staging.pool;
                        let room = self.inbound.room(device.as_ref(), pool, payload.left);
                        let filled = match room {
                            Ok(None) => {
                                self.starved = true;
                                return Ok(());
                            }
                            Ok(Some(room)) => {
                                count = room.copy_from(&available[..count]);
                                let is_last = count == payload.left;
                                let at = &mut self.cursor;
                                self.inbound
                                    .filled(count, is_last, device.as_ref(), spans, at)
                            }
                            Err(error) => Err(error),
                        };
                        if let Err(error) = filled {
                            payload.give_up(error, &mut self.inbound, connection);
                        }
                        self.start += count;
                        payload.left -= count;
                        if payload.left > 0 {
                            continue;
                        }
                        count = 0;
                    }
                    let available = &self.buffer[self.start..self.end];
                    let bytes = &available[..count];
                    match &mut payload.sink {
                        Sink::Regions { .. } => {
                            self.cursor.copy_in(&self.grant.spans, bytes);
                        }
                        Sink::Run(flying) => {
                            self.cursor
                                .copy_in(flying.run.plan.spans(flying.chunk()), bytes);
                        }
                        Sink::Message { bytes: message, .. } => message.extend_from_slice(bytes),
                        Sink::Nowhere(_) => {}
                    }
                    self.start += count;
                    payload.left -= count;
                    if payload.left > 0 {
                        return Ok(());
                    }
                    let State::Payload(payload) = std::mem::replace(&mut self.state, State::Header)
                    else {
                        unreachable!("matched above")
                    };
                    self.finish(payload, lane, connection)?;
                    self.grant.clear();
                }
            }
        }
    }

    /// Deals with the start of a frame: decides where its payload goes before any of it lands.
    fn begin(
        &mut self,
        header: Header,
        middle: std::ops::Range<usize>,
        lane: &Lane,
        connection: &Arc<Connection>,
    ) -> Result<(), Ended> {
        // Looked at first: what is begun below must be finished.
        if header.is_on_comm() && self.flow.is_none() {
            let what = "a payload on a comm that is not there";
            return Err(Ended::Misbehaved(what.into()));
        }
        let middle = &self.buffer[middle];
        let (table, extra) = middle.split_at(header.table_bytes());
        let message = || Sink::Message {
            middle: middle.to_vec(),
            bytes: Vec::new(),
        };
        let sink = match header.kind {
            Kind::Write => {
                let table = Table::decode(&header, table).map_err(Ended::misbehaved)?;
                match self.grant.fill(&connection.core.regions, &table) {
                    Ok(()) => {
                        let notify = header.flags & FLAG_NOTIFY != 0;
                        Sink::Regions {
                            notification: notify.then(|| extra.to_vec()),
                        }
                    }
                    Err(refusal) => Sink::Nowhere(Some(refusal)),
                }
            }
            Kind::Read => {
                let table = Table::decode(&header, table).map_err(Ended::misbehaved)?;
                lane.respond(&header, &table, connection)?;
                Sink::Nowhere(None)
            }
            Kind::Data => {
                let flying = lane.answered(&header)?;
                lane.unload(&flying);
                if may_land(&flying.run) {
                    Sink::Run(flying)
                } else {
                    connection.settle(&flying.run);
                    Sink::Nowhere(None)
                }
            }
            Kind::Ack => {
                lane.acknowledged(header.transfer, connection)?;
                Sink::Nowhere(None)
            }
            // Answered at its end.
            Kind::Ping => Sink::Nowhere(None),
            Kind::Pong => {
                connection.ponged(header.transfer);
                Sink::Nowhere(None)
            }
            Kind::Comm => {
                return Err(Ended::Misbehaved("comms of a lane that is in use".into()));
            }
            Kind::Send | Kind::Notify => message(),
            Kind::WriteError | Kind::ReadError | Kind::SendDone | Kind::Goodbye => message(),
        };
        let left = header.payload_on_wire() as usize;
        if let Some(flow) = self.flow.as_mut().filter(|_| header.is_on_comm()) {
            let grant = std::mem::replace(&mut self.grant, self.spare.pop().unwrap_or_default());
            let payload = Payload { header, left, sink };
            flow.push(Coming { payload, grant }, header.payload as usize);
            self.state = State::Header;
            connection.core.control.stay_awake();
            return Ok(());
        }
        self.cursor = Cursor::default();
        self.state = State::Payload(Payload { header, left, sink });
        Ok(())
    }

    /// A frame is complete: deals with it, now or when everything that came before it has landed.
    fn finish(
        &mut self,
        payload: Payload,
        lane: &Lane,
        connection: &Arc<Connection>,
    ) -> Result<(), Ended> {
        if (self.inbound.is_empty() && !self.is_flowing()) || !payload.waits_its_turn() {
            return self.conclude(payload, lane, connection);
        }
        if let Some(flow) = self.flow.as_mut().filter(|flow| !flow.is_empty()) {
            let grant = Grant::default();
            flow.push(Coming { payload, grant }, 0);
            return Ok(());
        }
        self.inbound.then(payload);
        Ok(())
    }

    fn conclude(
        &mut self,
        payload: Payload,
        lane: &Lane,
        connection: &Arc<Connection>,
    ) -> Result<(), Ended> {
        let header = payload.header;
        match payload.sink {
            Sink::Regions { notification } => {
                if let Some(message) = notification {
                    connection.deliver(message);
                }
                lane.landed.fetch_add(1, Ordering::Release);
            }
            Sink::Run(flying) => connection.settle(&flying.run),
            Sink::Nowhere(refusal) => {
                if header.kind == Kind::Write {
                    let refusal = refusal.unwrap_or(Refusal::Revoked);
                    lane.push_control(|out| {
                        encode_error(out, Kind::WriteError, header.transfer, header.seq, refusal);
                    });
                    lane.landed.fetch_add(1, Ordering::Release);
                } else if header.kind == Kind::Ping {
                    let pong = Header::new(Kind::Pong, header.transfer);
                    lane.push_control(|out| pong.encode(out));
                }
            }
            Sink::Message { middle, bytes } => {
                self.finish_message(header, &middle, bytes, lane, connection)?;
            }
        }
        Ok(())
    }

    fn finish_message(
        &self,
        header: Header,
        middle: &[u8],
        bytes: Vec<u8>,
        lane: &Lane,
        connection: &Arc<Connection>,
    ) -> Result<(), Ended> {
        let text = || String::from_utf8_lossy(&bytes).into_owned();
        let refused = || connection.refused(Status::from_u8(header.flags), text());
        match header.kind {
            Kind::Notify => connection.deliver(bytes),
            Kind::Send => {
                let (table, tag) = middle.split_at(header.table_bytes());
                let table = Table::decode(&header, table).map_err(Ended::misbehaved)?;
                let inline = (header.flags & FLAG_INLINE != 0).then_some(bytes);
                connection.arrived(Arrival::new(header.transfer, tag, &table, inline));
            }
            Kind::SendDone => {
                let error = (header.flags != Status::Ok as u8).then(refused);
                connection.peer.tagged.sent(header.transfer, error);
            }
            Kind::WriteError => {
                let run = lane.find_write(header.transfer, header.seq)?;
                fail_run(&run, refused());
            }
            Kind::ReadError => {
                let flying = lane.answered(&header)?;
                lane.unload(&flying);
                fail_run(&flying.run, refused());
                connection.settle(&flying.run);
            }
            Kind::Goodbye => return Err(Ended::Goodbye(text())),
            _ => {}
        }
        Ok(())
    }
}

/// Whether the answer to a READ may still be written to local memory.
fn may_land(run: &Run) -> bool {
    if let Some(memory) = run.plan.revoked() {
        run.completion.record(Error::RegionDeregistered(memory.id));
        return false;
    }
    !run.is_aborted()
}

/// Why a lane, and with it the connection, has ended.
#[derive(Debug)]
pub(super) enum Ended {
    Io(io::Error),
    Goodbye(String),
    Misbehaved(String),
}

impl Ended {
    pub(super) fn misbehaved(error: impl std::fmt::Display) -> Self {
        Self::Misbehaved(error.to_string())
    }
}
