//! The sending half of a lane.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tcpx_net::{Cursor, Span, Stream};
use tcpx_proto::frame::{FLAG_NOTIFY, Header, Kind, MAX_EXTRA_BYTES, MAX_TEXT_BYTES};

use super::Connection;
use super::grant::Grant;
use super::lane::{Flying, Lane};
use crate::error::Error;
use crate::plan::Op;
use crate::region::{MemId, Refusal};
use crate::run::{After, Run};

/// READ requests are gathered into one system call up to this size.
const MAX_HEAD_BYTES: usize = 32 << 10;

/// What waits to be sent on a lane. Anybody may add to it; only the holder of [`Tx`] takes from it.
#[derive(Default)]
pub(super) struct Work {
    /// Frames without a table, encoded.
    pub(super) control: Vec<u8>,
    /// Answers to READ requests, in request order.
    pub(super) responses: VecDeque<Response>,
    /// Runs to take chunks from, each in turn.
    pub(super) runs: VecDeque<Arc<Run>>,
    /// Grants to use again.
    pub(super) spare: Vec<Grant>,
    /// The connection has ended: nothing may be added.
    pub(super) closed: bool,
}

impl Work {
    pub(super) fn is_empty(&self) -> bool {
        self.control.is_empty() && self.responses.is_empty() && self.runs.is_empty()
    }
}

/// The answer to a READ request.
pub(super) struct Response {
    pub(super) transfer: u64,
    pub(super) seq: u32,
    pub(super) bytes: u64,
    pub(super) outcome: Result<Grant, Refusal>,
}

/// What a call to [`Tx::step`] achieved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sent {
    /// Bytes went out; there may be more.
    Some,
    /// There is nothing to send.
    Nothing,
    /// The kernel takes no more for now.
    Blocked,
}

/// The payload of the frame that is being sent.
enum Body {
    None,
    Chunk { run: Arc<Run>, index: usize },
    Granted(Grant),
}

/// The frame (or the batch of small frames) that is being sent.
pub(super) struct Tx {
    head: Vec<u8>,
    // ≤ head.len()
    head_sent: usize,
    body: Body,
    cursor: Cursor,
    // Bytes of the body that are not sent yet.
    body_left: usize,
    /// Whether the last payload was an answer: the next is a chunk of our own, if there is one.
    answered: bool,
    closed: bool,
    /// Runs whose local memory is gone, to be failed once no lock on the lane's work is held.
    doomed: Vec<(Arc<Run>, MemId)>,
}

impl Tx {
    pub(super) fn new() -> Self {
        Self {
            head: Vec::with_capacity(1024),
            head_sent: 0,
            body: Body::None,
            cursor: Cursor::default(),
            body_left: 0,
            answered: false,
            closed: false,
            doomed: Vec::new(),
        }
    }

    /// Sends once: the rest of the current frame, or the next one.
    pub(super) fn step(&mut self, lane: &Lane, connection: &Connection) -> io::Result<Sent> {
        if self.is_idle() {
            self.build(lane, connection);
            for (run, id) in self.doomed.drain(..) {
                connection.fail_run(&run, Error::RegionDeregistered(id));
            }
            if self.is_idle() {
                return Ok(Sent::Nothing);
            }
        }
        match self.send(&lane.stream) {
            Ok(count) => {
                lane.bytes_sent.fetch_add(count as u64, Ordering::Relaxed);
                self.advance(count, lane);
                Ok(Sent::Some)
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(Sent::Blocked),
            Err(e) => Err(e),
        }
    }

    /// Whether nothing is half sent.
    pub(super) fn is_idle(&self) -> bool {
        self.head_sent == self.head.len() && self.body_left == 0
    }

    /// Stops using the memory of the current frame if `is_hit`: what is not sent yet is copied, so
    /// that the frame can still be completed.
    pub(super) fn let_go(&mut self, mut is_hit: impl FnMut(&Arc<Run>) -> bool, regions_too: bool) {
        let hit = match &self.body {
            Body::None => false,
            Body::Chunk { run, .. } => is_hit(run),
            Body::Granted(grant) => regions_too && grant.has_dead_memory(),
        };
        if hit {
            let mut rest = self.head.split_off(self.head_sent);
            let at = rest.len();
            rest.resize(at + self.body_left, 0);
            let mut filled = at;
            for span in self.cursor.rest(self.spans()) {
                filled += span.copy_to(&mut rest[filled..]);
            }
            self.head = rest;
            self.head_sent = 0;
            self.body = Body::None;
            self.body_left = 0;
        }
    }

    /// Gives up the current frame and refuses further ones.
    pub(super) fn close(&mut self) {
        self.closed = true;
        self.head.clear();
        self.head_sent = 0;
        self.body = Body::None;
        self.body_left = 0;
    }

    fn spans(&self) -> &[Span] {
        match &self.body {
            Body::None => &[],
            Body::Chunk { run, index } => run.plan.spans(run.plan.chunk(*index)),
            Body::Granted(grant) => &grant.spans,
        }
    }

    fn send(&self, stream: &Stream) -> io::Result<usize> {
        let body = if self.body_left > 0 {
            self.spans()
        } else {
            &[]
        };
        stream.send(&self.head[self.head_sent..], body, self.cursor)
    }

    fn advance(&mut self, count: usize, lane: &Lane) {
        let of_head = count.min(self.head.len() - self.head_sent);
        self.head_sent += of_head;
        let of_body = count - of_head;
        if of_body > 0 {
            let mut cursor = self.cursor;
            cursor.advance(self.spans(), of_body);
            self.cursor = cursor;
            self.body_left -= of_body;
            lane.payload_sent
                .fetch_add(of_body as u64, Ordering::Relaxed);
        }
        if self.is_idle()
            && let Body::Granted(grant) = std::mem::replace(&mut self.body, Body::None)
        {
            lane.work.lock().spare.push(grant);
        }
    }

    /// Gathers what is waiting: the acknowledgement, control frames, READ requests, and at most one
    /// frame with a payload.
    fn build(&mut self, lane: &Lane, connection: &Connection) {
        self.head.clear();
        // A long notification must not leave its size behind on every lane.
        self.head.shrink_to(2 * MAX_HEAD_BYTES);
        self.head_sent = 0;
        self.body = Body::None;
        self.cursor = Cursor::default();
        if self.closed {
            return;
        }
        let mut work = lane.work.lock();
        let landed = lane.landed.load(Ordering::Acquire);
        // Errors are in `control` before `landed` counts their chunk: the peer learns of a failure
        // no later than of the chunk's end.
        if !work.control.is_empty() {
            self.head.append(&mut work.control);
            work.control.shrink_to(2 * MAX_HEAD_BYTES);
        }
        if landed != lane.acked.load(Ordering::Relaxed) {
            Header::new(Kind::Ack, landed).encode(&mut self.head);
            lane.acked.store(landed, Ordering::Release);
        }
        let answer_first = !self.answered || work.runs.is_empty();
        if answer_first && self.add_response(&mut work, connection) {
            return;
        }
        if !self.add_chunks(&mut work, lane, connection) {
            self.add_response(&mut work, connection);
        }
    }

    /// Adds answers until one has a payload; says whether one has.
    fn add_response(&mut self, work: &mut Work, connection: &Connection) -> bool {
        while let Some(response) = work.responses.pop_front() {
            let Response {
                transfer,
                seq,
                bytes,
                outcome,
            } = response;
            let outcome = outcome.and_then(|mut grant| {
                if grant.is_revoked(&connection.core.regions) {
                    work.spare.push(grant);
                    Err(Refusal::Revoked)
                } else {
                    Ok(grant)
                }
            });
            match outcome {
                Ok(grant) => {
                    let header = Header {
                        seq,
                        payload: bytes,
                        ..Header::new(Kind::Data, transfer)
                    };
                    header.encode(&mut self.head);
                    self.body = Body::Granted(grant);
                    self.body_left = bytes as usize;
                    self.answered = true;
                    return true;
                }
                Err(refusal) => {
                    encode_error(&mut self.head, Kind::ReadError, transfer, seq, refusal);
                }
            }
        }
        false
    }

    /// Adds READ requests and at most one WRITE chunk, taking from each run in turn; says whether a payload
    /// was added.
    fn add_chunks(&mut self, work: &mut Work, lane: &Lane, connection: &Connection) -> bool {
        let mut idle_runs = 0;
        while idle_runs < work.runs.len() && self.head.len() < MAX_HEAD_BYTES {
            let Some(run) = work.runs.pop_front() else {
                break;
            };
            if let Some(memory) = run.plan.revoked() {
                let id = memory.id;
                self.doomed.push((run, id));
                continue;
            }
            let mut in_flight = lane.in_flight.lock();
            let queue = match run.plan.op {
                Op::Read => &mut in_flight.reads,
                Op::Write => &mut in_flight.writes,
            };
            // Requests cost nothing to send: without a share, the first lane would take them all.
            let share = match run.plan.op {
                Op::Read => run.plan.len().div_ceil(connection.lanes.len()),
                Op::Write => connection.window,
            };
            let mine = queue.iter().filter(|f| Arc::ptr_eq(&f.run, &run)).count();
            if queue.len() >= connection.window || mine >= share {
                idle_runs += 1;
                work.runs.push_back(run);
                continue;
            }
            let Some(index) = run.take() else { continue };
            idle_runs = 0;
            let chunk = run.plan.chunk(index);
            queue.push_back(Flying {
                run: Arc::clone(&run),
                index,
            });
            drop(in_flight);
            lane.load.fetch_add(chunk.bytes, Ordering::Relaxed);
            let message = match &run.after {
                // Once it is on its way the run cannot be aborted; if it was, it goes without.
                After::Notify(message) if run.rides_along(message) && run.completion.commit() => {
                    Some(message)
                }
                _ => None,
            };
            let kind = match run.plan.op {
                Op::Read => Kind::Read,
                Op::Write => Kind::Write,
            };
            let header = Header {
                flags: if message.is_some() { FLAG_NOTIFY } else { 0 },
                regions: chunk.regions,
                entries: chunk.entries,
                seq: index as u32,
                extra: message.map_or(0, |m| m.len() as u32),
                payload: chunk.bytes as u64,
                ..Header::new(kind, run.id)
            };
            header.encode(&mut self.head);
            self.head.extend_from_slice(run.plan.table(chunk));
            if let Some(message) = message {
                self.head.extend_from_slice(message);
            }
            let bytes = chunk.bytes;
            let op = run.plan.op;
            if run.has_more() {
                work.runs.push_back(Arc::clone(&run));
            }
            if op == Op::Write {
                self.body = Body::Chunk { run, index };
                self.body_left = bytes;
                self.answered = false;
                return true;
            }
        }
        false
    }
}

impl Run {
    /// Whether its notification travels in a frame of its own.
    pub(crate) fn sent_notify(&self) -> bool {
        matches!(&self.after, After::Notify(message) if !self.rides_along(message))
    }

    /// Whether the notification travels inside the only chunk of a WRITE.
    pub(super) fn rides_along(&self, message: &[u8]) -> bool {
        self.plan.op == Op::Write && self.plan.len() == 1 && message.len() <= MAX_EXTRA_BYTES
    }
}

pub(super) fn encode_error(
    out: &mut Vec<u8>,
    kind: Kind,
    transfer: u64,
    seq: u32,
    refusal: Refusal,
) {
    let text = refusal.to_string();
    encode_text(
        out,
        Header {
            flags: refusal.status() as u8,
            seq,
            ..Header::new(kind, transfer)
        },
        &text,
    );
}

/// Appends a frame whose payload is a text, cut to what the protocol takes.
pub(super) fn encode_text(out: &mut Vec<u8>, header: Header, text: &str) {
    let text = &text.as_bytes()[..text.len().min(MAX_TEXT_BYTES as usize)];
    Header {
        payload: text.len() as u64,
        ..header
    }
    .encode(out);
    out.extend_from_slice(text);
}
