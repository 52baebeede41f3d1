//! Events: results that a lane finds under its locks, and that are handled without them.

use std::sync::Arc;

use tcpx_proto::frame::down::{Ending, StreamId};
use tcpx_proto::lane::{ChunkId, Op};

use super::Connection;
use super::lane::Lane;
use crate::error::Error;
use crate::link::Held;
use crate::trace::End;
use crate::transfer::{Arrival, ChunkRef, Run};

/// A result of a step of a lane.
pub(super) enum Event {
    /// The chunk has no operations in flight any more.
    Settled(ChunkRef),
    /// The same, and the chunk has failed.
    Failed(ChunkRef, Error),
    /// No further chunk of this run may be moved.
    Dead(Arc<Run>, Error),
    /// A notification that arrived with a WRITE chunk.
    Notified {
        message: Vec<u8>,
        with: ChunkId,
        held: Option<Held>,
    },
    /// A message from the peer, with its number and its length on the wire.
    Message(u32, usize, Message),
    /// The peer has received all messages before this number.
    Received(u32),
    /// The peer requests an answer once everything before the ping is handled.
    Ping(u64),
    /// The answer to one of our pings.
    Pong(u64),
}

/// A message from the peer.
pub(super) enum Message {
    /// A notification.
    Notified(Vec<u8>, Option<Held>),
    /// The announcement of a tagged message.
    Announced(Arrival, Option<Held>),
    /// A tagged message of this side has ended at the peer.
    Sent(u64, Option<Error>),
    /// The peer has taken a stream apart.
    Down(StreamId, Vec<Ending>),
}

impl Connection {
    /// Handles an event. Must be called while no sending or receiving half is locked; events of a
    /// receiving half are handled in order.
    pub(super) fn deliver(&self, lane: &Lane, event: Event) {
        match event {
            Event::Settled(chunk) => {
                self.trace_settled(&chunk, End::Done, None);
                self.settle(&chunk.run, Some(lane));
            }
            Event::Failed(chunk, error) => {
                self.trace_settled(&chunk, End::Failed, Some(&error));
                chunk.run.fail_now(error);
                self.settle(&chunk.run, None);
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

    /// Delivers a message that was not delivered before.
    pub(super) fn deliver_new(&self, message: Message) {
        match message {
            Message::Notified(message, held) => self.above.notified(&self.origin, message, held),
            Message::Announced(arrival, held) => self.above.announced(self.link(), arrival, held),
            Message::Sent(transfer, error) => self.above.sent(transfer, error),
            Message::Down(stream, endings) => self.peer_let_go(stream, endings),
        }
    }

    /// Settles one chunk of a run. `driven` is the lane that the calling thread drives, if any.
    ///
    /// The notification of a short READ does not delay a caller that polls: it waits for the next
    /// frames of the lane, and leaves with them by one system call. The worker sends it if there are
    /// none for a millisecond or two. A WRITE's notification says that bytes have arrived, and never
    /// waits.
    pub(super) fn settle(&self, run: &Run, driven: Option<&Lane>) {
        if !run.settle(1) {
            return;
        }
        let patient = driven.filter(|_| run.plan.op == Op::Read && run.is_short());
        let mut is_unsent = false;
        let notify = |message: &[u8]| match run.rides_along(message) {
            // It has arrived with the chunk.
            true => self.above.counters().notified(message.len()),
            false => is_unsent = !self.queue_notify(run.id, message, patient),
        };
        let measure = |elapsed| self.above.measured(run.plan.bytes, elapsed);
        run.conclude(notify, measure);
        if is_unsent {
            self.send_messages();
        }
    }
}
