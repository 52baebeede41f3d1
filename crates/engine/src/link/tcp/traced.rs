//! Records the activity of a lane in the trace, if there is one.
//!
//! Each half of a lane keeps the spans that have begun: the frame of a chunk, and a wait. A wait
//! that begins inside a frame ends inside it, so that the spans of a track nest. Without a trace,
//! each call here costs one branch on an option that never changes.

use std::io;

use tcpx_net::{Cursor, Span};
use tcpx_proto::frame::{Header, Kind as FrameKind};
use tcpx_proto::lane::{Chunk, ChunkId};

use super::Connection;
use super::lane::Lane;
use super::send::Sent;
use crate::carrier::Outgoing;
use crate::error::Error;
use crate::trace::{End, Kind, Record, Start, Trace, Traced, Track, Value, result_of};
use crate::transfer::ChunkRef;

/// The tracks of a lane.
#[derive(Clone)]
pub(super) struct LaneTrace {
    trace: Trace,
    track: Track,
}

impl LaneTrace {
    pub(super) fn new(trace: &Trace) -> Self {
        Self {
            trace: trace.clone(),
            track: trace.on().map_or_else(Track::default, Traced::new_track),
        }
    }

    /// Names the tracks of a lane.
    pub(super) fn name(&self, session: &str, peer: &str, lane: &str) {
        if let Some(trace) = self.trace.on() {
            let out = format!("{session}: {lane} → {peer}");
            let r#in = format!("{session}: {lane} ← {peer}");
            trace.name_track(self.track, out, r#in);
        }
    }

    /// Returns the trace if it is on.
    #[inline]
    pub(super) fn on(&self) -> Option<&Traced> {
        self.trace.on()
    }

    /// Records that the lane has taken a chunk of this session.
    #[inline]
    pub(super) fn taken(&self, chunk: &ChunkRef) {
        if let Some(trace) = self.on() {
            let record = of_chunk(Kind::Taken, chunk).track(self.track);
            trace.event(record.bytes(chunk.bytes() as u64));
        }
    }

    /// Records an event of the lane and its cause.
    pub(super) fn event(&self, kind: Kind, cause: &dyn std::fmt::Display) {
        if let Some(trace) = self.on() {
            let cause = trace.text(&cause.to_string());
            let record = Record::new(kind).track(self.track);
            trace.event(record.value(Value::Text(cause)));
        }
    }

    /// Records a span on the lane's track.
    fn span(&self, trace: &Traced, from: Start, to: Start, record: Record) {
        trace.span(from, to, record.track(self.track));
    }
}

fn of_chunk(kind: Kind, chunk: &ChunkRef) -> Record {
    let ChunkId { transfer, seq } = chunk.id();
    Record::new(kind).chunk(transfer, seq)
}

impl Connection {
    /// Records that a chunk of this session is settled.
    #[inline]
    pub(super) fn trace_settled(&self, chunk: &ChunkRef, end: End, error: Option<&Error>) {
        if let Some(trace) = self.context.trace.on() {
            let mut record = of_chunk(Kind::Settled, chunk).end(end);
            if let Some(error) = error {
                record = record.text(trace.text(&error.to_string()));
            }
            trace.event(record);
        }
    }
}

/// The wait of half a lane, and when it began.
type Wait = Option<(Kind, Start)>;

/// A frame with a payload that has begun.
struct Frame {
    began: Start,
    record: Record,
}

/// The spans that half a lane has begun.
#[derive(Default)]
pub(super) struct HalfTrace {
    frame: Option<Frame>,
    wait: Wait,
}

impl HalfTrace {
    /// Begins a frame, and ends a wait for it.
    fn begin(&mut self, lane: &LaneTrace, trace: &Traced, record: Record) {
        let began = Start::now();
        self.end_wait(lane, trace, began);
        self.frame = Some(Frame { began, record });
    }

    /// Ends the current frame, if any, and the wait inside it.
    fn end(&mut self, lane: &LaneTrace, trace: &Traced, end: End) {
        let now = Start::now();
        self.end_wait(lane, trace, now);
        if let Some(Frame { began, record }) = self.frame.take() {
            lane.span(trace, began, now, record.end(end));
        }
    }

    fn wait_for(&mut self, lane: &LaneTrace, trace: &Traced, kind: Kind) {
        if self.wait.is_none_or(|(known, _)| known != kind) {
            let now = Start::now();
            self.end_wait(lane, trace, now);
            self.wait = Some((kind, now));
        }
    }

    fn end_wait(&mut self, lane: &LaneTrace, trace: &Traced, at: Start) {
        if let Some((kind, since)) = self.wait.take() {
            lane.span(trace, since, at, Record::new(kind));
        }
    }

    /// Begins the frame of a payload to be sent.
    #[inline]
    pub(super) fn begin_sending(&mut self, lane: &LaneTrace, payload: &Outgoing) {
        let Some(trace) = lane.on() else { return };
        let (kind, id) = match payload {
            Outgoing::Chunk(chunk) => (Kind::SendWrite, chunk.id()),
            Outgoing::Answer { id, .. } => (Kind::SendAnswer, *id),
        };
        let record = Record::new(kind).chunk(id.transfer, id.seq);
        self.begin(lane, trace, record.bytes(payload.bytes() as u64));
    }

    /// Sends, and records the system call.
    #[inline]
    pub(super) fn send(
        &mut self,
        lane: &Lane,
        head: &[u8],
        spans: &[Span],
        at: Cursor,
    ) -> io::Result<usize> {
        let Some(trace) = lane.trace.on() else {
            return lane.stream.send(head, spans, at);
        };
        let began = Start::now();
        let outcome = lane.stream.send(head, spans, at);
        if outcome.is_ok() {
            self.end_wait(&lane.trace, trace, began);
        }
        self.called(trace, Kind::Sendmsg, began, &outcome);
        outcome
    }

    /// Receives, and records the system call if bytes arrived. Empty calls are left out: threads
    /// poll.
    #[inline]
    pub(super) fn receive(
        &mut self,
        lane: &Lane,
        spans: &[Span],
        at: Cursor,
        tail: &mut [u8],
    ) -> io::Result<usize> {
        let Some(trace) = lane.trace.on() else {
            return lane.stream.recv(spans, at, tail);
        };
        let began = Start::now();
        let outcome = lane.stream.recv(spans, at, tail);
        match &outcome {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return outcome,
            Err(_) => {}
            Ok(_) => self.end_wait(&lane.trace, trace, began),
        }
        self.called(trace, Kind::Recvmsg, began, &outcome);
        outcome
    }

    fn called(&self, trace: &Traced, kind: Kind, began: Start, outcome: &io::Result<usize>) {
        let frame = self.frame.as_ref().map(|frame| frame.record);
        let record = frame.map_or_else(|| Record::new(kind), |frame| frame.of_call(kind));
        trace.span(began, Start::now(), record.value(result_of(outcome)));
    }

    /// Records the outcome of a step of the sending half. `is_idle` is true if no frame is partly
    /// sent, `waits_for_window` if chunks wait for the window.
    pub(super) fn stepped(
        &mut self,
        lane: &LaneTrace,
        trace: &Traced,
        sent: Option<Sent>,
        (is_idle, waits_for_window): (bool, bool),
    ) {
        match sent {
            Some(Sent::Blocked) => self.wait_for(lane, trace, Kind::WaitSocket),
            Some(Sent::Waiting) => self.wait_for(lane, trace, Kind::WaitStaging),
            Some(Sent::Nothing) if waits_for_window => {
                self.wait_for(lane, trace, Kind::WaitWindow);
            }
            Some(Sent::Nothing) => self.end_wait(lane, trace, Start::now()),
            Some(Sent::Some) if is_idle && self.frame.is_some() => self.end(lane, trace, End::Done),
            Some(Sent::Some) | None => {}
        }
    }

    /// Begins an arriving frame whose payload goes to memory; other frames are not recorded.
    #[inline]
    pub(super) fn begin_receiving(&mut self, lane: &LaneTrace, header: &Header) {
        let Some(trace) = lane.on() else { return };
        let kind = match header.kind {
            FrameKind::Data => Kind::ReceiveAnswer,
            FrameKind::Write => Kind::ReceiveWrite,
            _ => return,
        };
        let record = Record::new(kind).chunk(header.transfer, header.seq);
        self.begin(lane, trace, record.bytes(header.payload_on_wire()));
    }

    /// Ends the current frame, whose payload has arrived.
    #[inline]
    pub(super) fn end_receiving(&mut self, lane: &LaneTrace) {
        if let Some(trace) = lane.on() {
            self.end(lane, trace, End::Done);
        }
    }

    /// Records why the receiving half does not receive.
    #[inline]
    pub(super) fn received(&mut self, lane: &LaneTrace, is_starved: bool, is_paused: bool) {
        let Some(trace) = lane.on() else { return };
        match (is_starved, is_paused) {
            (_, true) => self.wait_for(lane, trace, Kind::WaitRoom),
            (true, false) => self.wait_for(lane, trace, Kind::WaitSlot),
            (false, false) => {
                if self.wait.is_some() {
                    self.end_wait(lane, trace, Start::now());
                }
            }
        }
    }

    /// Ends the spans that have begun: the half is closed.
    pub(super) fn close(&mut self, lane: &LaneTrace) {
        if let Some(trace) = lane.on() {
            self.end(lane, trace, End::LaneLost);
        }
    }
}
