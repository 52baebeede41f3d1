//! The sending half of a lane.

mod staged;

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tcpx_net::{Cursor, Span, Stream};
use tcpx_proto::frame::{FLAG_COMM, FLAG_NOTIFY, Header, Kind, MAX_EXTRA_BYTES, MAX_TEXT_BYTES};

pub(super) use self::staged::Source;
use self::staged::Staged;
use super::grant::Grant;
use super::lane::{Flying, Lane};
use super::{Connection, fail_run};
use crate::error::Error;
use crate::plan::Op;
use crate::region::Refusal;
use crate::run::{After, Run};
use crate::staging::Queues;
use crate::transport::plugin::{INLINE_BYTES, Outflow};

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
    /// What is to be sent next is still being copied from a device.
    Waiting,
}

/// The payload of the frame that is being sent.
enum Body {
    None,
    Chunk { run: Arc<Run>, index: usize },
    Granted(Grant),
    Staged(Staged),
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
    /// Runs that cannot go on, to be failed once no lock on the lane's work is held, with the chunk that had been
    /// taken, if one had.
    doomed: Vec<(Arc<Run>, Error, Option<usize>)>,
    /// Payloads that come from a device, in the order in which they will be sent.
    staged: VecDeque<Staged>,
    /// Slots that the frames now being built may have payloads staged for.
    slots_left: Option<usize>,
    slot_bytes: usize,
    queues: Queues,
    /// Large payloads on their way on the lane's comm, if it has one.
    flow: Option<Outflow<Source>>,
}

impl Tx {
    pub(super) fn new(slot_bytes: usize, flow: Option<Outflow<Source>>) -> Self {
        Self {
            flow,
            head: Vec::with_capacity(1024),
            head_sent: 0,
            body: Body::None,
            cursor: Cursor::default(),
            body_left: 0,
            answered: false,
            closed: false,
            doomed: Vec::new(),
            staged: VecDeque::new(),
            slots_left: None,
            slot_bytes,
            queues: Queues::default(),
        }
    }

    /// Sends once: the rest of the current frame, or the next one.
    pub(super) fn step(&mut self, lane: &Lane, connection: &Arc<Connection>) -> io::Result<Sent> {
        let moved = self.flow(lane)?;
        if self.is_idle() {
            self.build(lane, connection);
            for (run, error, taken) in self.doomed.drain(..) {
                fail_run(&run, error);
                if let Some(index) = taken {
                    lane.unload(&Flying {
                        run: Arc::clone(&run),
                        index,
                    });
                    connection.settle(&run);
                }
            }
            if self.is_idle() {
                return Ok(if moved {
                    Sent::Some
                } else if self.is_staging() {
                    Sent::Waiting
                } else {
                    Sent::Nothing
                });
            }
        }
        let ready = match &mut self.body {
            // A frame that has begun cannot be taken back: without its bytes the connection ends.
            Body::Staged(staged) => match staged.out.ready(&mut self.queues) {
                Ok(None) if self.head_sent == self.head.len() => return Ok(Sent::Waiting),
                Ok(ready) => ready,
                Err(error) => return Err(io::Error::other(error)),
            },
            _ => None,
        };
        match self.send(&lane.stream, ready.as_slice()) {
            Ok(count) => {
                lane.bytes_sent.fetch_add(count as u64, Ordering::Relaxed);
                self.advance(count, lane)?;
                self.flow(lane)?;
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

    /// Whether payloads are being copied from a device or wait for that.
    pub(super) fn is_staging(&self) -> bool {
        !self.staged.is_empty() || matches!(self.body, Body::Staged(_)) || self.is_flowing()
    }

    /// Whether payloads are on their way on the comm: nobody reports their end.
    pub(super) fn is_flowing(&self) -> bool {
        self.flow.as_ref().is_some_and(Outflow::is_busy)
    }

    /// Goes on with the payloads on the comm; says whether anything has moved.
    fn flow(&mut self, lane: &Lane) -> io::Result<bool> {
        // Never before their frames: the peer could not take them.
        let announced = self.is_idle();
        let Some(flow) = self.flow.as_mut().filter(|flow| flow.is_busy()) else {
            return Ok(false);
        };
        let moved = flow.step(announced).map_err(io::Error::other)?;
        let sent = flow.take_sent();
        if sent > 0 {
            lane.bytes_sent.fetch_add(sent, Ordering::Relaxed);
            lane.payload_sent.fetch_add(sent, Ordering::Relaxed);
        }
        lane.comm_out.update(flow.is_waiting(), sent);
        while let Some(source) = flow.done() {
            if let Source::Answer { grant, .. } = source {
                lane.work.lock().spare.push(grant.cleared());
            }
        }
        Ok(moved)
    }

    /// Whether a payload of so many bytes goes on the comm.
    fn is_on_comm(&self, bytes: usize) -> bool {
        self.flow.is_some() && bytes > INLINE_BYTES
    }

    /// Whether the next payload has to wait for those on the comm.
    fn is_full(&self) -> bool {
        self.flow.as_ref().is_some_and(|flow| !flow.has_room())
    }

    /// Stops using the memory of the current frame if `is_hit`: what is not sent yet is copied, so
    /// that the frame can still be completed. The same for payloads that are being copied from a device.
    pub(super) fn let_go(
        &mut self,
        mut is_hit: impl FnMut(&Arc<Run>) -> bool,
        regions_too: bool,
    ) -> Result<(), Error> {
        let mut outcome = Ok(());
        if let Some(flow) = &mut self.flow {
            outcome = flow.let_go(
                |source| source.is_hit(&mut is_hit, regions_too),
                regions_too,
            );
        }
        // A frame that has begun must be completed; what has not begun is given up.
        if let Body::Staged(Staged { source, out }) = &mut self.body
            && source.is_hit(&mut is_hit, regions_too)
            && let Err(error) = out.let_go(source.spans(), &mut self.queues)
        {
            out.fail(error);
        }
        for Staged { source, out } in &mut self.staged {
            if source.is_hit(&mut is_hit, regions_too) {
                // Only that they are over counts.
                let _ = out.wait(&mut self.queues);
                out.fail(Error::Aborted);
            }
        }
        let hit = match &self.body {
            Body::None | Body::Staged(_) => false,
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
        outcome
    }

    /// Gives up the current frame and refuses further ones, after waiting for the copies that are under way. Returns
    /// the chunks that had been taken and not begun to be sent.
    pub(super) fn close(&mut self) -> Vec<Flying> {
        self.closed = true;
        if let Some(flow) = &mut self.flow {
            flow.close(Error::Closed);
        }
        self.head.clear();
        self.head_sent = 0;
        self.body_left = 0;
        if let Body::Staged(mut staged) = std::mem::replace(&mut self.body, Body::None) {
            // How they ended makes no difference any more.
            let _ = staged.out.wait(&mut self.queues);
        }
        let mut taken = Vec::new();
        for mut staged in self.staged.drain(..) {
            let _ = staged.out.wait(&mut self.queues);
            if let Source::Chunk { run, index } = staged.source {
                taken.push(Flying { run, index });
            }
        }
        taken
    }

    /// The host memory of the current frame's payload.
    fn spans(&self) -> &[Span] {
        match &self.body {
            Body::None | Body::Staged(_) => &[],
            Body::Chunk { run, index } => run.plan.spans(run.plan.chunk(*index)),
            Body::Granted(grant) => &grant.spans,
        }
    }

    /// `staged` is what is ready of a payload that comes from a device.
    fn send(&self, stream: &Stream, staged: &[Span]) -> io::Result<usize> {
        let head = &self.head[self.head_sent..];
        if !staged.is_empty() {
            return stream.send(head, staged, Cursor::default());
        }
        let body = if self.body_left > 0 {
            self.spans()
        } else {
            &[]
        };
        stream.send(head, body, self.cursor)
    }

    fn advance(&mut self, count: usize, lane: &Lane) -> io::Result<()> {
        let of_head = count.min(self.head.len() - self.head_sent);
        self.head_sent += of_head;
        let of_body = count - of_head;
        if of_body > 0 {
            if let Body::Staged(staged) = &mut self.body {
                let spans = staged.source.spans();
                let sent = staged.out.sent(of_body, spans, &mut self.queues);
                sent.map_err(io::Error::other)?;
            } else {
                let mut cursor = self.cursor;
                cursor.advance(self.spans(), of_body);
                self.cursor = cursor;
            }
            self.body_left -= of_body;
            lane.payload_sent
                .fetch_add(of_body as u64, Ordering::Relaxed);
        }
        if self.is_idle() {
            match std::mem::replace(&mut self.body, Body::None) {
                Body::Granted(grant)
                | Body::Staged(Staged {
                    source: Source::Answer { grant, .. },
                    ..
                }) => lane.work.lock().spare.push(grant.cleared()),
                _ => {}
            }
        }
        Ok(())
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
        self.slots_left = None;
        self.stage_answers(&mut work, connection);
        if self.add_staged(lane, connection) {
            return;
        }
        let answer_first = !self.answered || work.runs.is_empty();
        if answer_first && self.add_response(&mut work, connection) {
            return;
        }
        if !self.add_chunks(&mut work, lane, connection) {
            self.add_response(&mut work, connection);
        }
        drop(work);
        self.start_copies(&connection.core.staging.pool);
        if self.head.is_empty()
            && let [staged] = self.staged.make_contiguous()
        {
            staged.out.look(&mut self.queues);
            self.add_staged(lane, connection);
        }
    }

    /// Adds answers until one has a payload; says whether one has.
    fn add_response(&mut self, work: &mut Work, connection: &Connection) -> bool {
        // Answers go out in the order of the requests: none overtakes one that is being copied from a device, and one
        // that is yet to be copied goes that way too.
        let is_ahead = |s: &Staged| matches!(s.source, Source::Answer { .. });
        if self.staged.iter().any(is_ahead) {
            return false;
        }
        while let Some(response) = work.responses.pop_front() {
            let on_comm = self.is_on_comm(response.bytes as usize);
            if let Ok(grant) = &response.outcome
                && ((on_comm && self.is_full()) || (!on_comm && grant.device.is_some()))
                && !grant.has_dead_memory()
            {
                work.responses.push_front(response);
                return false;
            }
            let Response {
                transfer,
                seq,
                bytes,
                outcome,
            } = response;
            let outcome = outcome.and_then(|mut grant| {
                if grant.is_revoked(&connection.core.regions) {
                    work.spare.push(grant.cleared());
                    Err(Refusal::Revoked)
                } else {
                    Ok(grant)
                }
            });
            match outcome {
                Ok(grant) => {
                    self.answered = true;
                    match self.flow.as_mut().filter(|_| on_comm) {
                        Some(flow) => {
                            encode_answer(&mut self.head, transfer, seq, bytes, FLAG_COMM);
                            let source = Source::Answer {
                                transfer,
                                seq,
                                bytes,
                                grant,
                            };
                            flow.push(source, bytes as usize);
                        }
                        None => {
                            encode_answer(&mut self.head, transfer, seq, bytes, 0);
                            self.body = Body::Granted(grant);
                            self.body_left = bytes as usize;
                        }
                    }
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
                let error = Error::RegionDeregistered(memory.id);
                self.doomed.push((run, error, None));
                continue;
            }
            if run.plan.op == Op::Write && self.is_full() {
                idle_runs += 1;
                work.runs.push_back(run);
                continue;
            }
            let is_staged = run.plan.op == Op::Write && run.plan.has_device();
            if is_staged && self.slots_left(&connection.core.staging.pool) == 0 {
                idle_runs += 1;
                work.runs.push_back(run);
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
            lane.load.fetch_add(chunk.bytes, Ordering::Relaxed);
            let on_comm = run.plan.op == Op::Write && self.is_on_comm(chunk.bytes);
            if run.plan.op == Op::Write
                && !on_comm
                && let Some(device) = run.plan.device(chunk)
            {
                drop(in_flight);
                let (device, bytes) = (Arc::clone(device), chunk.bytes);
                if run.has_more() {
                    work.runs.push_back(Arc::clone(&run));
                }
                self.stage(Source::Chunk { run, index }, &device, bytes);
                continue;
            }
            queue.push_back(Flying {
                run: Arc::clone(&run),
                index,
            });
            drop(in_flight);
            self.encode_chunk(&run, index);
            let bytes = chunk.bytes;
            let op = run.plan.op;
            if run.has_more() {
                work.runs.push_back(Arc::clone(&run));
            }
            if op == Op::Write {
                self.answered = false;
                match self.flow.as_mut().filter(|_| on_comm) {
                    Some(flow) => flow.push(Source::Chunk { run, index }, bytes),
                    None => {
                        self.body = Body::Chunk { run, index };
                        self.body_left = bytes;
                    }
                }
                return true;
            }
        }
        false
    }

    /// Appends the start of a chunk's frame: a request, or what goes before the bytes.
    fn encode_chunk(&mut self, run: &Run, index: usize) {
        let chunk = run.plan.chunk(index);
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
        let on_comm = kind == Kind::Write && self.is_on_comm(chunk.bytes);
        let header = Header {
            flags: if message.is_some() { FLAG_NOTIFY } else { 0 }
                | if on_comm { FLAG_COMM } else { 0 },
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

fn encode_answer(out: &mut Vec<u8>, transfer: u64, seq: u32, bytes: u64, flags: u8) {
    let header = Header {
        flags,
        seq,
        payload: bytes,
        ..Header::new(Kind::Data, transfer)
    };
    header.encode(out);
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
