//! Host memory, sent and received directly by the stream.

use tcpx_net::{Cursor, Fault, Span};
use tcpx_proto::lane::Ticket;

use super::{Begin, LetGo, Outgoing, Over, ReceiveCarrier, Room, SendCarrier};
use crate::error::Error;
use crate::memory::Place;

/// Sends payload directly from its memory: the system call gathers the blocks.
#[derive(Default)]
pub(crate) struct StreamSend {
    /// At most one payload at a time, since its frame begins as soon as it is pushed.
    current: Option<Outgoing>,
    at: Cursor,
    left: usize,
    over: Option<Outgoing>,
}

impl SendCarrier for StreamSend {
    fn takes(&self, place: &Place<'_>, _bytes: usize) -> bool {
        place.device.is_none()
    }

    fn push(&mut self, payload: Outgoing) {
        debug_assert!(self.current.is_none(), "the frame before it is complete");
        self.left = payload.bytes();
        self.at = Cursor::default();
        self.current = Some(payload);
    }

    /// Probes the memory first: a frame that has begun must be completed, so memory that turns out
    /// to be unmapped later costs the connection.
    fn poll_begin(&mut self) -> Begin<'_> {
        let is_gone = |payload: &mut Outgoing| {
            let spans = payload.place().spans;
            spans.iter().any(|span| span.probe().is_err())
        };
        if let Some(payload) = self.current.take_if(is_gone) {
            return Begin::Failed(payload, Error::MemoryFault);
        }
        self.current.as_ref().map_or(Begin::Nothing, Begin::Frame)
    }

    fn ready(&mut self) -> Result<Option<(&[Span], Cursor)>, Error> {
        let spans = self.current.as_ref().map(|payload| payload.place().spans);
        Ok(spans.map(|spans| (spans, self.at)))
    }

    fn sent(&mut self, count: usize) -> Result<(), Error> {
        if let Some(payload) = &self.current {
            self.at.advance(payload.place().spans, count);
            self.left -= count;
            if self.left == 0 {
                self.over = self.current.take();
            }
        }
        Ok(())
    }

    fn poll_over(&mut self) -> Option<Outgoing> {
        self.over.take()
    }

    fn let_go(&mut self, which: LetGo<'_>, rest: &mut Vec<u8>) -> Result<(), Error> {
        let Some(payload) = self.current.take_if(|payload| which.hits(payload)) else {
            return Ok(());
        };
        let start = rest.len();
        let mut copied = Ok(start);
        if which.may_copy(&payload, self.left) {
            rest.resize(start + self.left, 0);
            let mut unsent = self.at.rest(payload.place().spans);
            copied = unsent.try_fold(start, |filled, span| {
                Ok(filled + span.copy_to(&mut rest[filled..])?)
            });
        }
        self.over = Some(payload);
        copied.map(|_| ()).map_err(|fault: Fault| {
            // The frame cannot be completed.
            rest.truncate(start);
            fault.into()
        })
    }

    fn close(&mut self) {
        self.current = None;
    }
}

/// Receives payload directly into its memory: the system call scatters the blocks.
#[derive(Default)]
pub(crate) struct StreamReceive {
    at: Cursor,
}

impl<P> ReceiveCarrier<P> for StreamReceive {
    fn takes(&self, _flag: u8, place: Option<&Place<'_>>) -> bool {
        place.is_some_and(|place| place.device.is_none())
    }

    fn begin(&mut self, _more: bool) {
        self.at = Cursor::default();
    }

    fn room<'a>(&'a mut self, place: &Place<'a>, left: usize) -> Result<Option<Room<'a>>, Error> {
        Ok(Some(Room {
            spans: place.spans,
            at: self.at,
            bytes: left,
        }))
    }

    fn filled(&mut self, place: &Place<'_>, count: usize, _is_last: bool) -> Result<(), Error> {
        self.at.advance(place.spans, count);
        Ok(())
    }

    fn push(&mut self, ticket: Ticket, payload: P) -> Option<Over<P>> {
        Some(Over {
            ticket,
            payload,
            error: None,
        })
    }

    fn let_go(&mut self) -> Result<(), Error> {
        Ok(())
    }

    fn close(&mut self) -> Vec<P> {
        Vec::new()
    }
}
