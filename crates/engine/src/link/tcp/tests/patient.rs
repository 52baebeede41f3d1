//! The notification of a short READ waits for other frames, but not for ever.

use std::sync::Arc;
use std::time::Duration;

use tcpx_net::{Cursor, Span, Stream};
use tcpx_proto::frame::{HEADER_BYTES, Header, Kind};
use tcpx_proto::lane::Op;

use super::super::drive::BUDGET;
use super::super::{Connection, Lane};
use super::undriven;
use crate::error::Error;
use crate::link::Link;
use crate::testing::{Pair, wait_until};
use crate::transfer::{After, Limits, Pieces, Plan, Run, TransferState};

const LEN: usize = 64;
const MESSAGE: &[u8] = b"the memory may be used again";

/// A connection that only the test drives, whose peer answers READs at once.
struct Reader {
    connection: Arc<Connection>,
    lane: Arc<Lane>,
    far: Stream,
    memory: Box<[u8; LEN]>,
    pair: Pair,
}

impl Reader {
    fn new() -> Self {
        let pair = Pair::new();
        let (connection, far) = undriven(&pair, Vec::new());
        let lane = Arc::clone(&connection.lanes.load()[0]);
        Self {
            connection,
            lane,
            far,
            memory: Box::new([0; LEN]),
            pair,
        }
    }

    /// Posts a READ with a notification.
    fn post(&mut self) -> Arc<Run> {
        // SAFETY: the memory outlives the connection, which `drop` ends.
        let local = unsafe { Span::new(self.memory.as_mut_ptr(), LEN) };
        let limits = Limits {
            chunk_bytes: LEN,
            lanes: 1,
        };
        let plan = Plan::new(Op::Read, Pieces::untouched(local, 0), limits);
        let number = self.connection.context.next_id();
        let after = After::Notify(MESSAGE.into());
        let run = Arc::new(Run::new(number, Arc::new(plan), after));
        self.connection.submit(&run);
        run
    }

    /// Returns the bytes that arrive at the peer, at least `least`.
    fn sent(&self, least: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut buffer = [0; 4096];
        wait_until("the peer has the bytes", || {
            if let Ok(count) = self.far.recv(&[], Cursor::default(), &mut buffer) {
                bytes.extend_from_slice(&buffer[..count]);
            }
            bytes.len() >= least
        });
        bytes
    }

    /// Posts a READ, answers its request, and polls for its end.
    fn read(&mut self) {
        let run = self.post();
        self.sent(HEADER_BYTES);
        let mut answer = Vec::new();
        let header = Header {
            payload: LEN as u64,
            ..Header::new(Kind::Data, run.id)
        };
        header.encode(&mut answer);
        answer.resize(answer.len() + LEN, 7);
        let sent = self.far.send(&answer, &[], Cursor::default());
        assert_eq!(sent.unwrap(), answer.len());
        wait_until("the READ has ended", || {
            self.connection.drive_for(&run);
            run.completion.state().is_terminal()
        });
        assert_eq!(run.completion.state(), TransferState::Done);
        assert_eq!(*self.memory, [7; LEN]);
        // Nothing was sent for it yet.
        assert!(self.lane.has_patient() && !self.lane.is_urgent());
        assert!(self.lane.is_unfinished() && self.lane.is_dirty());
    }

    /// Checks that the notification is sent, and returns what follows it.
    #[track_caller]
    fn expect_message(&self, more: usize) -> usize {
        let bytes = self.sent(HEADER_BYTES + MESSAGE.len() + more);
        let is_message = |bytes: &[u8]| bytes == MESSAGE;
        let at = bytes.windows(MESSAGE.len()).position(is_message);
        assert_eq!(at, Some(HEADER_BYTES));
        assert!(!self.lane.is_unfinished());
        bytes.len() - HEADER_BYTES - MESSAGE.len()
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.connection.kill(Error::Closed);
        self.connection.drain();
    }
}

#[test]
fn it_leaves_with_the_next_request() {
    let mut reader = Reader::new();
    for _ in 0..3 {
        reader.read();
        reader.post();
        assert!(reader.expect_message(HEADER_BYTES) >= HEADER_BYTES);
    }
}

#[test]
fn it_leaves_with_the_next_message() {
    let mut reader = Reader::new();
    reader.read();
    reader.connection.send_notify(0, b"another");
    assert!(reader.expect_message(HEADER_BYTES) >= HEADER_BYTES);
}

#[test]
fn it_leaves_with_the_next_poll() {
    let mut reader = Reader::new();
    reader.read();
    reader.connection.attend(&reader.lane);
    assert_eq!(reader.expect_message(0), 0);
}

/// Also when the worker finds that no caller drives the lane any more.
#[test]
fn the_worker_sends_it() {
    let mut reader = Reader::new();
    reader.read();
    reader.connection.drive(&reader.lane, BUDGET);
    assert_eq!(reader.expect_message(0), 0);
}

/// The application may wait for the peer's reaction.
#[test]
fn it_leaves_when_notifications_are_polled() {
    let mut reader = Reader::new();
    reader.read();
    assert!(reader.pair.alice.notifications().is_empty());
    assert_eq!(reader.expect_message(0), 0);
    reader.read();
    let waited = reader.pair.alice.wait_notification(Duration::ZERO);
    assert!(matches!(waited, Err(Error::Timeout { .. })));
    assert_eq!(reader.expect_message(0), 0);
}

#[test]
fn it_leaves_when_a_transfer_is_released() {
    let mut reader = Reader::new();
    let alice = &reader.pair.alice;
    let transfer = alice.prepare(Op::Read, &reader.pair.to_bob, []).unwrap();
    reader.read();
    drop(transfer);
    assert_eq!(reader.expect_message(0), 0);
}
