//! Handling of frames whose payload has landed.

use tcpx_proto::frame::down::{self, StreamId};
use tcpx_proto::frame::{FLAG_INLINE, HEADER_BYTES, Header, Kind, Status, Table};

use tcpx_proto::lane::Landing;

use super::Receiver;
use crate::carrier::Over;
use crate::error::LostCause;
use crate::link::Held;
use crate::link::tcp::Connection;
use crate::link::tcp::ended::Ended;
use crate::link::tcp::event::{Event, Message};
use crate::link::tcp::lane::Lane;
use crate::link::tcp::payload::{Incoming, Sink};
use crate::memory::Refusal;
use crate::stats::PathKind;
use crate::transfer::Arrival;

impl Receiver {
    /// Handles the frames whose payload has landed, and the frames that had to wait for them.
    pub(super) fn land(
        &mut self,
        lane: &Lane,
        connection: &Connection,
        events: &mut Vec<Event>,
    ) -> Result<(), Ended> {
        for carrier in self.carriers.each() {
            while let Some(over) = carrier.poll_over() {
                complete(&mut self.landing, over);
            }
        }
        while let Some(payload) = self.landing.poll_event() {
            self.conclude(payload, lane, connection, events)?;
        }
        Ok(())
    }

    /// Handles a complete frame, now or when everything before it has landed.
    pub(super) fn finish(
        &mut self,
        payload: Incoming,
        lane: &Lane,
        connection: &Connection,
        events: &mut Vec<Event>,
    ) -> Result<(), Ended> {
        let way = payload.way.filter(|way| self.carriers.get(*way).defers());
        let may_be_due = way.is_none() && self.landing.is_empty();
        if may_be_due || !payload.waits_its_turn() {
            return self.conclude(payload, lane, connection, events);
        }
        let ticket = self.landing.reserve();
        match way {
            None => self.landing.complete(ticket, payload),
            Some(way) => {
                if let Some(over) = self.carriers.get(way).push(ticket, payload) {
                    complete(&mut self.landing, over);
                }
            }
        }
        Ok(())
    }

    fn conclude(
        &mut self,
        payload: Incoming,
        lane: &Lane,
        connection: &Connection,
        events: &mut Vec<Event>,
    ) -> Result<(), Ended> {
        let (header, id) = (payload.header, payload.id());
        match payload.sink {
            Sink::Regions {
                grant,
                notification,
            } => {
                let is_on_device = grant.place().device.is_some();
                count_landed(lane, &header, is_on_device, false);
                if self.spare.len() < connection.own_window {
                    self.spare.push(grant.cleared());
                }
                match notification {
                    Some(message) => events.push(Event::Notified {
                        message,
                        with: id,
                        held: payload.held,
                    }),
                    None => self.replies = lane.landed(id, None),
                }
            }
            Sink::Run(chunk) => {
                count_landed(lane, &header, chunk.device().is_some(), true);
                events.push(Event::Settled(chunk));
            }
            Sink::Failed(chunk, error) => events.push(Event::Failed(chunk, error)),
            Sink::Refused {
                chunk,
                status,
                text,
            } => {
                let error = connection.refused(status, &text);
                events.push(Event::Failed(chunk, error));
            }
            Sink::Nowhere(refusal) => match header.kind {
                Kind::Write => {
                    let refusal = refusal.unwrap_or(Refusal::Revoked);
                    let refusal = Some((refusal.status(), refusal.to_string()));
                    self.replies = lane.landed(id, refusal);
                }
                Kind::Ping if header.transfer != 0 => events.push(Event::Ping(header.transfer)),
                _ => {}
            },
            Sink::Message { middle, bytes } => {
                let message = (bytes, payload.held);
                conclude_message(header, &middle, message, connection, events)?;
            }
        }
        Ok(())
    }
}

/// Counts a landed chunk, of this side or of the peer.
fn count_landed(lane: &Lane, header: &Header, is_on_device: bool, is_ours: bool) {
    let path = match is_on_device {
        _ if header.is_on_comm() => PathKind::Plugin,
        true => PathKind::Staged,
        false => PathKind::Stream,
    };
    lane.counters.landed(path, is_ours, header.payload);
}

fn conclude_message(
    header: Header,
    middle: &[u8],
    (bytes, held): (Vec<u8>, Option<Held>),
    connection: &Connection,
    events: &mut Vec<Event>,
) -> Result<(), Ended> {
    let count = HEADER_BYTES + middle.len() + bytes.len();
    let message = match header.kind {
        Kind::Notify => Message::Notified(bytes, held),
        Kind::Send => {
            let (table, tag) = middle.split_at(header.table_bytes());
            let table = Table::decode(&header, table).map_err(Ended::misbehaved)?;
            let inline = (header.flags & FLAG_INLINE != 0).then_some(bytes);
            Message::Announced(Arrival::new(header.transfer, tag, &table, inline), held)
        }
        Kind::SendDone => {
            let status = Status::from_u8(header.flags);
            let error = (status != Status::Ok).then(|| connection.refused(status, &bytes));
            Message::Sent(header.transfer, error)
        }
        Kind::LaneDown => {
            let endings = down::decode(&bytes).map_err(Ended::misbehaved)?;
            Message::Down(StreamId::from_transfer(header.transfer), endings)
        }
        Kind::Goodbye => {
            let text = String::from_utf8_lossy(&bytes).into_owned();
            return Err(Ended::Lost(LostCause::Goodbye(text)));
        }
        _ => return Ok(()),
    };
    events.push(Event::Message(header.seq, count, message));
    Ok(())
}

/// Passes on a payload that has no operations in flight any more.
fn complete(landing: &mut Landing<Incoming>, over: Over<Incoming>) {
    let Over {
        ticket,
        mut payload,
        error,
    } = over;
    if let Some(error) = error {
        payload.fail(error);
    }
    landing.complete(ticket, payload);
}
