//! The notification of a short READ waits for other frames, but not for ever.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use tcpx_net::{Cursor, Span, Stream};
use tcpx_proto::frame::{HEADER_BYTES, Header, Kind};
use tcpx_proto::lane::Op;

use super::super::drive::BUDGET;
use super::super::{Connection, Lane};
use super::undriven_lanes;
use crate::error::Error;
use crate::link::{Caller, Driven, Link};
use crate::testing::{Pair, wait_until};
use crate::transfer::{After, Limits, Pieces, Plan, Run, TransferState};

const LEN: usize = 64;
/// Too long for the express lane.
const LARGE: usize = 1 << 20;
const MESSAGE: &[u8] = b"the memory may be used again";

/// A worker that only counts the calls.
#[derive(Default)]
struct Worker(AtomicU32);

impl Caller for Worker {
    fn add(&self, _driven: Arc<dyn Driven>) -> std::io::Result<u64> {
        unreachable!("the test drives the lanes")
    }

    fn remove(&self, _token: u64, _stream: &Stream) {}

    fn call(&self, _token: u64) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn is_awake(&self) -> bool {
        false
    }
}

/// A connection that only the test drives, whose peer answers READs at once.
struct Reader {
    connection: Arc<Connection>,
    /// The express lane, and the peer's end of it.
    lane: Arc<Lane>,
    far: Stream,
    _bulk: Stream,
    worker: Arc<Worker>,
    memory: Vec<u8>,
    pair: Pair,
}

impl Reader {
    fn new() -> Self {
        let pair = Pair::new();
        let worker = Arc::new(Worker::default());
        let caller = Arc::clone(&worker) as Arc<dyn Caller>;
        let (connection, far) = undriven_lanes(&pair, vec![Vec::new(); 2], caller);
        let lane = Arc::clone(&connection.lanes.load()[1]);
        lane.token.set(0).unwrap();
        let [bulk, far] = far.try_into().ok().unwrap();
        Self {
            connection,
            lane,
            far,
            _bulk: bulk,
            worker,
            memory: vec![0; LARGE],
            pair,
        }
    }

    /// Posts a READ with a notification.
    fn post(&mut self) -> Arc<Run> {
        self.submit(Op::Read, LEN)
    }

    /// Submits a transfer of one chunk with a notification.
    fn submit(&mut self, op: Op, len: usize) -> Arc<Run> {
        // SAFETY: the memory is as long, and outlives the connection, which `drop` ends.
        let local = unsafe { Span::new(self.memory[..len].as_mut_ptr(), len) };
        let limits = Limits {
            chunk_bytes: len,
            lanes: 1,
        };
        let plan = Plan::new(op, Pieces::untouched(local, 0), limits);
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
        assert_eq!(self.memory[..LEN], [7; LEN]);
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

/// A poll of any transfer of the session.
#[test]
fn it_leaves_with_a_poll_of_another_transfer() {
    let mut reader = Reader::new();
    let alice = &reader.pair.alice;
    let transfer = alice.prepare(Op::Read, &reader.pair.to_bob, []).unwrap();
    reader.read();
    assert_eq!(transfer.poll(), TransferState::Prepared);
    assert_eq!(reader.expect_message(0), 0);
    reader.read();
    transfer.post().unwrap();
    assert_eq!(reader.expect_message(0), 0);
    reader.read();
    transfer.wait(Duration::ZERO).unwrap();
    assert_eq!(reader.expect_message(0), 0);
}

#[test]
fn it_leaves_with_a_message_to_another_peer() {
    let mut reader = Reader::new();
    reader.read();
    let Pair { alice, to_bob, .. } = &reader.pair;
    alice.notify(to_bob, b"another").unwrap();
    assert_eq!(reader.expect_message(0), 0);
}

/// The notification of a WRITE of one chunk rides along, on any lane.
#[test]
fn a_write_on_another_lane_does_not_overtake_it() {
    let mut reader = Reader::new();
    reader.read();
    let write = reader.submit(Op::Write, LARGE);
    assert_eq!(write.lane.load(Ordering::Relaxed), 0);
    assert_eq!(reader.expect_message(0), 0);
}

/// Unless it watches the caller already.
#[test]
fn a_worker_is_called_when_the_caller_may_leave() {
    let mut reader = Reader::new();
    for (watches, calls) in [(false, 1), (true, 0)] {
        reader.lane.take_care(watches);
        let before = reader.worker.0.load(Ordering::Relaxed);
        reader.read();
        assert_eq!(reader.worker.0.load(Ordering::Relaxed) - before, calls);
        reader.connection.hurry();
        assert_eq!(reader.expect_message(0), 0);
    }
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
