//! A mark is reached when the peer has received the messages before it.

use std::sync::Arc;

use tcpx_net::{Cursor, Stream};
use tcpx_proto::frame::{Header, Kind};

use super::super::drive::BUDGET;
use super::super::{Connection, Lane};
use super::undriven_lanes;
use crate::error::{Error, LostCause};
use crate::link::{Link, Mark};
use crate::testing::{Pair, connection, wait_until};

const MESSAGE: &[u8] = b"the last words of this process";

/// A connection with a bulk and an express lane, that only the test drives.
struct Sender {
    connection: Arc<Connection>,
    far: Vec<Far>,
    _pair: Pair,
}

/// The peer's end of a lane.
struct Far {
    stream: Stream,
    /// The bytes that arrived.
    bytes: Vec<u8>,
    /// Pings that were answered.
    answered: usize,
}

impl Sender {
    fn new() -> Self {
        let pair = Pair::new();
        let worker = Arc::clone(&connection(pair.alice.core()).lanes.load()[0].worker);
        let (connection, far) = undriven_lanes(&pair, vec![Vec::new(); 2], worker);
        let far = far.into_iter().map(|stream| Far {
            stream,
            bytes: Vec::new(),
            answered: 0,
        });
        Self {
            connection,
            far: far.collect(),
            _pair: pair,
        }
    }

    fn lane(&self, index: usize) -> Arc<Lane> {
        Arc::clone(&self.connection.lanes.load()[index])
    }

    /// Answers the pings that arrive on a lane; returns whether any was answered.
    fn answer(&mut self, index: usize) -> bool {
        let lane = self.lane(index);
        let far = &mut self.far[index];
        let mut buffer = [0; 4096];
        if let Ok(count) = far.stream.recv(&[], Cursor::default(), &mut buffer) {
            far.bytes.extend_from_slice(&buffer[..count]);
        }
        let before = far.answered;
        for token in 1..100 {
            let mut ping = Vec::new();
            Header::new(Kind::Ping, token).encode(&mut ping);
            if token as usize > far.answered && far.has(&ping) {
                let mut pong = Vec::new();
                Header::new(Kind::Pong, token).encode(&mut pong);
                far.stream.send(&pong, &[], Cursor::default()).unwrap();
                far.answered = token as usize;
            }
        }
        self.connection.drive(&lane, BUDGET);
        self.far[index].answered > before
    }
}

impl Far {
    fn has(&self, what: &[u8]) -> bool {
        self.bytes.windows(what.len()).any(|bytes| bytes == what)
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        self.connection.kill(Error::Closed);
        self.connection.drain();
    }
}

#[test]
fn every_lane_has_to_answer() {
    for last in [0, 1] {
        let mut sender = Sender::new();
        sender.connection.send_notify(0, MESSAGE);
        let mut mark = sender.connection.put_mark();
        wait_until("one lane has answered", || sender.answer(1 - last));
        sender.answer(1 - last);
        assert!(!mark.is_reached());
        wait_until("both have answered", || {
            sender.answer(last);
            mark.is_reached()
        });
        assert!(sender.far[1].has(MESSAGE));
    }
}

/// Another lane sends them again, once the lost one was taken apart.
#[test]
fn messages_of_a_lost_lane_are_waited_for() {
    let mut sender = Sender::new();
    sender.connection.send_notify(0, MESSAGE);
    let express = sender.lane(1);
    sender
        .connection
        .lane_lost(&express, LostCause::LaneDropped);
    let mut mark = sender.connection.put_mark();
    wait_until("the mark is reached", || {
        sender.answer(0);
        mark.is_reached()
    });
    assert!(sender.far[0].has(MESSAGE));
}
