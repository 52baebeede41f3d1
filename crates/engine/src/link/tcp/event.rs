//! What a lane finds out while its locks are held, and what is done about it once they are not.

use std::sync::Arc;

use tcpx_proto::frame::down::{Ending, StreamId};
use tcpx_proto::lane::ChunkId;

use super::Connection;
use super::lane::Lane;
use crate::error::Error;
use crate::link::Held;
use crate::transfer::{Arrival, ChunkRef, Run};

/// Something that a lane has found out.
pub(super) enum Event {
    /// Nothing of this chunk is under way any more.
    Settled(ChunkRef),
    /// The same, and it has failed.
    Failed(ChunkRef, Error),
    /// No chunk of this run may be moved any more.
    Dead(Arc<Run>, Error),
    /// The notification that a WRITE chunk has brought.
    Notified {
        message: Vec<u8>,
        with: ChunkId,
        held: Option<Held>,
    },
    /// A message of the peer, with its number and its bytes on the wire.
    Message(u32, usize, Message),
    /// The peer has the messages before this number.
    Received(u32),
    /// The peer wants to know that everything before this is dealt with.
    Ping(u64),
    /// The answer to a ping of ours.
    Pong(u64),
}

/// A message of the peer.
pub(super) enum Message {
    /// A notification.
    Notified(Vec<u8>, Option<Held>),
    /// A tagged message was announced.
    Announced(Arrival, Option<Held>),
    /// A tagged message of ours has ended at the peer.
    Sent(u64, Option<Error>),
    /// The peer has let go of a stream.
    Down(StreamId, Vec<Ending>),
}

impl Connection {
    /// Deals with an event. Only where no lock of a sending or receiving half is held; events of a
    /// receiving half in their order.
    pub(super) fn deliver(&self, lane: &Lane, event: Event) {
        match event {
            Event::Settled(chunk) => self.settle(&chunk.run),
            Event::Failed(chunk, error) => {
                chunk.run.fail_now(error);
                self.settle(&chunk.run);
            }
            Event::Dead(run, error) => run.fail_now(error),
            Event::Notified {
                message,
                with,
                held,
            } => {
                self.above.notified(&self.origin, message, held);
                // Not before: a peer that knows the chunk's end knows that we have the message.
                lane.landed(with, None);
            }
            Event::Message(number, bytes, message) => {
                self.deliver_message(lane, number, bytes, message);
            }
            Event::Received(next) => self.received(lane, next),
            Event::Ping(token) => {
                self.tell_received_now(lane);
                lane.push_pong(token);
            }
            Event::Pong(token) => self.pings.answered(token),
        }
    }

    /// Delivers a message that is new.
    pub(super) fn deliver_new(&self, message: Message) {
        match message {
            Message::Notified(message, held) => self.above.notified(&self.origin, message, held),
            Message::Announced(arrival, held) => self.above.announced(self.link(), arrival, held),
            Message::Sent(transfer, error) => self.above.sent(transfer, error),
            Message::Down(stream, endings) => self.peer_let_go(stream, endings),
        }
    }

    /// Settles one chunk of a run.
    pub(super) fn settle(&self, run: &Run) {
        if !run.settle(1) {
            return;
        }
        let notify = |message: &[u8]| {
            // Otherwise it has arrived with the chunk.
            if !run.rides_along(message) {
                self.send_notify(run.id, message);
            }
        };
        let measure = || self.above.measured(run.plan.bytes, run.started.elapsed());
        run.conclude(notify, measure);
    }
}
