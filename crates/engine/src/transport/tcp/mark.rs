//! A mark behind what waits to leave on a connection.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tcpx_proto::frame::{Header, Kind};

use super::Connection;
use super::lane::Lane;

/// A ping on each lane of a connection, behind everything that waited to leave there when it was made.
pub(crate) struct Mark {
    connection: Arc<Connection>,
    /// The pings' numbers.
    pings: Vec<u64>,
}

impl Mark {
    pub(crate) fn new(connection: &Arc<Connection>) -> Self {
        let mark = |lane: &Lane| {
            let ping = connection.new_ping();
            lane.push_mark(ping);
            connection.check(lane.pump(connection, 1));
            lane.call_worker();
            ping
        };
        let pings = connection.lanes.iter().map(mark).collect();
        connection.core.control.stay_awake();
        Self {
            connection: Arc::clone(connection),
            pings,
        }
    }

    /// Whether the peer has dealt with everything before the mark, or never will.
    pub(crate) fn is_reached(&self) -> bool {
        let waiting = self.connection.pings.waiting.lock();
        let is_answered = |ping| waiting.get(ping) != Some(&None);
        self.connection.is_dead() || self.pings.iter().all(is_answered)
    }
}

impl Lane {
    /// Queues a ping behind the acknowledgement of all that has landed so far, which otherwise follows what is queued.
    fn push_mark(&self, ping: u64) {
        // What is just landing counts: its notification may have been seen already.
        drop(self.rx.lock());
        // Held: its holder alone says how much is acknowledged.
        let tx = self.tx.lock();
        let landed = self.landed.load(Ordering::Acquire);
        self.push_control(|out| {
            if self.acked.swap(landed, Ordering::AcqRel) != landed {
                Header::new(Kind::Ack, landed).encode(out);
            }
            Header::new(Kind::Ping, ping).encode(out);
        });
        drop(tx);
    }
}
