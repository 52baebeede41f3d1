//! What a lane finds out while its locks are held, and what is done about it once they are not.

use std::sync::Arc;

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
    /// A notification, with the WRITE chunk that it rode along with.
    Notified {
        message: Vec<u8>,
        with: Option<ChunkId>,
        held: Option<Held>,
    },
    /// A tagged message was announced.
    Announced(Arrival, Option<Held>),
    /// A tagged message of ours has ended at the peer.
    Sent { transfer: u64, error: Option<Error> },
    /// The peer wants to know that everything before this is dealt with.
    Ping(u64),
    /// The answer to a ping of ours.
    Pong(u64),
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
                if let Some(id) = with {
                    // Not before: a peer that knows the chunk's end knows that we have the message.
                    lane.landed(id, None);
                }
            }
            Event::Announced(arrival, held) => self.above.announced(self.link(), arrival, held),
            Event::Sent { transfer, error } => self.above.sent(transfer, error),
            Event::Ping(token) => lane.push_pong(token),
            Event::Pong(token) => self.pings.answered(token),
        }
    }

    /// Settles one chunk of a run.
    fn settle(&self, run: &Run) {
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
