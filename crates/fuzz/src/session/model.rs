//! Predicts what a session does with a stream of bytes.

use tcpx::Op;
use tcpx_proto::frame::down::{self, StreamId};
use tcpx_proto::frame::{FLAG_INLINE, HEADER_BYTES, Header, Kind, Status, Table};
use tcpx_testkit::attack::Target;

use super::{GRANTED, WINDOW};

/// Whether the stream continues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    GoesOn,
    /// The victim closes the stream, and keeps the connection.
    Lost,
    Ends,
}

/// A chunk of the victim, from or to the start of its granted bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ours {
    pub(super) op: Op,
    pub(super) transfer: u64,
    pub(super) seq: u32,
    pub(super) len: usize,
}

/// An expected answer.
#[derive(Debug)]
struct Due {
    kind: Kind,
    transfer: u64,
    seq: u32,
    /// The status of a refusal.
    status: Option<Status>,
    payload: Option<Vec<u8>>,
}

/// The destination of the current frame's payload.
#[derive(Debug)]
enum Sink {
    Nothing,
    /// Offsets in the memory.
    Memory(Vec<usize>),
    /// Offsets in the memory, settling a chunk of the victim.
    Answer(Ours),
}

#[derive(Debug)]
enum Stage {
    Header,
    Middle(Header),
    Payload {
        header: Header,
        left: usize,
        sink: Sink,
        status: Option<Status>,
    },
}

pub(super) struct Model {
    verdict: Verdict,
    granted: Option<Target>,
    memory: Vec<u8>,
    /// Number of bytes of the current section.
    buffer: Vec<u8>,
    stage: Stage,
    due: Vec<Due>,
    ours: Vec<Ours>,
    settled: Vec<(Ours, Option<bool>)>,
    /// Number of WRITE chunks and READ requests since the last check.
    writes: usize,
    reads: usize,
    /// The number of the attacker's next message.
    next: u32,
    /// Messages of the victim; the attacker has acknowledged those before `has`.
    said: u32,
    has: u32,
    /// The highest generation of the lane mentioned so far.
    generation: u32,
}

impl Model {
    pub(super) fn new(granted: Target, memory: Vec<u8>) -> Self {
        Self {
            verdict: Verdict::GoesOn,
            granted: Some(granted),
            memory,
            buffer: Vec::new(),
            stage: Stage::Header,
            due: Vec::new(),
            ours: Vec::new(),
            settled: Vec::new(),
            writes: 0,
            reads: 0,
            next: 1,
            said: 0,
            has: 1,
            generation: 0,
        }
    }

    pub(super) fn verdict(&self) -> Verdict {
        self.verdict
    }

    /// Revokes the memory. Chunks stay in flight until they are answered, and land nowhere.
    pub(super) fn deregister(&mut self) {
        self.granted = None;
    }

    pub(super) fn begun(&mut self, ours: Ours) {
        self.ours.push(ours);
    }

    /// Returns whether a chunk of the victim has ended successfully. `None` if it may be either.
    pub(super) fn settled(&self, ours: &Ours) -> Option<bool> {
        let settled = self.settled.iter().find(|(settled, _)| settled == ours);
        settled.map_or(Some(false), |(_, outcome)| *outcome)
    }

    /// Returns whether more bytes could exceed the window, change the result of a READ, or mention
    /// a message that is about to be sent.
    pub(super) fn needs_sync(&self) -> bool {
        let is_saying = self.due.iter().any(|due| due.kind == Kind::LaneDown);
        self.reads > 0 || self.writes + 6 > WINDOW || is_saying
    }

    pub(super) fn awaits_answers(&self) -> bool {
        !self.due.is_empty()
    }

    /// Returns the missing bytes of the current section.
    pub(super) fn missing(&self) -> usize {
        match &self.stage {
            Stage::Header if self.buffer.is_empty() => 0,
            Stage::Header => HEADER_BYTES - self.buffer.len(),
            Stage::Middle(header) => header.middle_bytes() - self.buffer.len(),
            Stage::Payload { left, .. } => *left - self.buffer.len(),
        }
    }

    /// Processes bytes of the stream.
    pub(super) fn feed(&mut self, bytes: &[u8]) {
        let mut rest = bytes;
        while self.verdict == Verdict::GoesOn {
            let wanted = match &self.stage {
                Stage::Header => HEADER_BYTES,
                Stage::Middle(header) => header.middle_bytes(),
                Stage::Payload { left, .. } => *left,
            };
            let count = (wanted - self.buffer.len()).min(rest.len());
            let (now, later) = rest.split_at(count);
            self.buffer.extend_from_slice(now);
            rest = later;
            if self.buffer.len() < wanted {
                return;
            }
            let section = std::mem::take(&mut self.buffer);
            match std::mem::replace(&mut self.stage, Stage::Header) {
                Stage::Header => {
                    let head = section.first_chunk().expect("a header");
                    match Header::decode(head) {
                        Ok(header) => self.stage = Stage::Middle(header),
                        Err(_) => self.verdict = Verdict::Ends,
                    }
                }
                Stage::Middle(header) => self.begin(header, &section),
                Stage::Payload {
                    header,
                    sink,
                    status,
                    ..
                } => {
                    self.conclude(&header, sink, status, &section);
                }
            }
        }
    }

    fn begin(&mut self, header: Header, middle: &[u8]) {
        let table = Table::decode(&header, &middle[..header.table_bytes()]);
        let mut status = None;
        let mut sink = Sink::Nothing;
        match header.kind {
            _ if header.is_on_comm() => return self.verdict = Verdict::Ends,
            Kind::Write | Kind::Read | Kind::Send if table.is_err() => {
                // A message is processed when it is complete.
                if header.kind != Kind::Send {
                    return self.verdict = Verdict::Ends;
                }
            }
            Kind::Write => {
                self.writes += 1;
                match self.resolve(&table.expect("checked above")) {
                    Ok(offsets) => sink = Sink::Memory(offsets),
                    Err(refusal) => status = Some(refusal),
                }
            }
            Kind::Read => {
                self.reads += 1;
                let found = self.resolve(&table.expect("checked above"));
                let (kind, status, payload) = match found {
                    Ok(offsets) => {
                        let bytes = offsets.iter().map(|at| self.memory[*at]).collect();
                        (Kind::Data, None, Some(bytes))
                    }
                    Err(status) => (Kind::ReadError, Some(status), None),
                };
                self.due.push(Due {
                    kind,
                    transfer: header.transfer,
                    seq: header.seq,
                    status,
                    payload,
                });
            }
            Kind::Ack | Kind::WriteError | Kind::Data | Kind::ReadError => {
                let op = match header.kind {
                    Kind::Ack | Kind::WriteError => Op::Write,
                    _ => Op::Read,
                };
                let is_named = |ours: &Ours| {
                    (ours.op, ours.transfer, ours.seq) == (op, header.transfer, header.seq)
                };
                let Some(at) = self.ours.iter().position(is_named) else {
                    return self.verdict = Verdict::Ends;
                };
                if header.kind == Kind::Data && header.payload != self.ours[at].len as u64 {
                    return self.verdict = Verdict::Ends;
                }
                sink = Sink::Answer(self.ours.remove(at));
            }
            Kind::Comm => return self.verdict = Verdict::Ends,
            Kind::Notify
            | Kind::Ping
            | Kind::Pong
            | Kind::Send
            | Kind::SendDone
            | Kind::LaneDown
            | Kind::Received
            | Kind::Goodbye => {}
        }
        self.stage = Stage::Payload {
            header,
            left: header.payload_on_wire() as usize,
            sink,
            status,
        };
        if header.kind == Kind::Send
            && Table::decode(&header, &middle[..header.table_bytes()]).is_err()
        {
            // Ends once its payload has arrived.
            debug_assert!(header.flags <= FLAG_INLINE);
            if let Stage::Payload { status, .. } = &mut self.stage {
                *status = Some(Status::Other);
            }
        }
    }

    fn conclude(&mut self, header: &Header, sink: Sink, status: Option<Status>, payload: &[u8]) {
        match sink {
            Sink::Nothing => {}
            Sink::Memory(offsets) => {
                for (at, byte) in offsets.into_iter().zip(payload) {
                    self.memory[at] = *byte;
                }
            }
            Sink::Answer(ours) => {
                if header.kind == Kind::Data && self.granted.is_some() {
                    self.memory[GRANTED..GRANTED + payload.len()].copy_from_slice(payload);
                }
                let outcome = match header.kind {
                    // It has already left; whether its run fails depends on timing.
                    Kind::Ack if self.granted.is_none() => None,
                    Kind::Ack => Some(true),
                    Kind::Data => Some(self.granted.is_some()),
                    _ => Some(false),
                };
                self.settled.push((ours, outcome));
            }
        }
        let due = |kind, status| Due {
            kind,
            transfer: header.transfer,
            seq: header.seq,
            status,
            payload: None,
        };
        let is_message = matches!(
            header.kind,
            Kind::Notify | Kind::Send | Kind::SendDone | Kind::LaneDown
        );
        if is_message && !self.is_new(header.seq) {
            return;
        }
        match header.kind {
            Kind::LaneDown => self.down(header, payload),
            Kind::Received => self.received(header.seq),
            Kind::Write if status.is_some() => self.due.push(due(Kind::WriteError, status)),
            Kind::Write => self.due.push(due(Kind::Ack, None)),
            Kind::Ping => self.due.push(Due {
                seq: 0,
                ..due(Kind::Pong, None)
            }),
            Kind::Send if status.is_some() => self.verdict = Verdict::Ends,
            Kind::Goodbye => self.verdict = Verdict::Ends,
            _ => {}
        }
    }

    /// Counts a message. Returns whether it is processed: it has no number, or the next one.
    fn is_new(&mut self, number: u32) -> bool {
        if number == 0 {
            return true;
        }
        if number == self.next {
            self.next += 1;
            return true;
        }
        // Half of the numbers are ahead.
        if number.wrapping_sub(self.next) < u32::MAX / 2 {
            self.verdict = Verdict::Ends;
        }
        false
    }

    /// Processes the attacker's LaneDown.
    fn down(&mut self, header: &Header, payload: &[u8]) {
        let stream = StreamId::from_transfer(header.transfer);
        let Ok(endings) = down::decode(payload) else {
            return self.verdict = Verdict::Ends;
        };
        if stream.lane > 0 {
            return self.verdict = Verdict::Ends;
        }
        if stream.generation > self.generation {
            // The victim never had the stream, and reports that.
            self.generation = stream.generation;
            self.said += 1;
            self.due.push(Due {
                kind: Kind::LaneDown,
                transfer: header.transfer & 0xFFFF_FFFF_FFFF,
                seq: self.said,
                status: None,
                payload: Some(Vec::new()),
            });
        } else if stream.generation == 0 {
            self.verdict = Verdict::Lost;
            // The attacker reports how WRITE chunks of the victim have ended.
            for ending in endings {
                let is_named = |ours: &Ours| {
                    let id = (ending.id.transfer, ending.id.seq);
                    ours.op == Op::Write && (ours.transfer, ours.seq) == id
                };
                if let Some(at) = self.ours.iter().position(is_named) {
                    let is_well = Some(ending.refusal.is_none());
                    let outcome = is_well.filter(|well| !well || self.granted.is_some());
                    self.settled.push((self.ours.remove(at), outcome));
                }
            }
        }
    }

    /// Processes the attacker's acknowledgement of the victim's messages before a number.
    fn received(&mut self, next: u32) {
        let ahead = next.wrapping_sub(self.has);
        if next == 0 || (ahead > self.said + 1 - self.has && ahead < u32::MAX / 2) {
            self.verdict = Verdict::Ends;
        } else if ahead < u32::MAX / 2 {
            self.has = next;
        }
    }

    /// Returns the positions of a table in the memory, in payload order.
    fn resolve(&self, table: &Table<'_>) -> Result<Vec<usize>, Status> {
        let granted = self.granted.ok_or(Status::UnknownRegion)?;
        if table.regions().any(|key| key != granted.key) {
            return Err(Status::UnknownRegion);
        }
        let mut offsets = Vec::new();
        for entry in table.entries() {
            let offset = entry.address.wrapping_sub(granted.address);
            if offset > granted.len || u64::from(entry.len) > granted.len - offset {
                return Err(Status::OutOfBounds);
            }
            let start = GRANTED + offset as usize;
            offsets.extend(start..start + entry.len as usize);
        }
        Ok(offsets)
    }

    /// Checks an answer, which must be expected.
    pub(super) fn answered(&mut self, header: &Header, payload: &[u8]) {
        let is_this = |due: &Due| {
            (due.kind, due.transfer, due.seq) == (header.kind, header.transfer, header.seq)
                && due.status.is_none_or(|status| status as u8 == header.flags)
                && due.payload.as_ref().is_none_or(|bytes| bytes == payload)
        };
        let at = self.due.iter().position(is_this);
        let at = at.unwrap_or_else(|| panic!("{header:?} is not due, but {:?}", self.due));
        self.due.remove(at);
        if self.due.is_empty() {
            (self.reads, self.writes) = (0, 0);
        }
    }

    /// Compares the memory, while no payload is incomplete.
    pub(super) fn compare(&self, memory: &[u8]) {
        let wrong = self.memory.iter().zip(memory).position(|(a, b)| a != b);
        if let Some(at) = wrong {
            panic!("byte {at} is {:#x}, not {:#x}", memory[at], self.memory[at]);
        }
    }

    /// Compares the memory, where the bytes of the current payload may have landed.
    pub(super) fn compare_at_end(&mut self, memory: &[u8]) {
        if let Stage::Payload { sink, .. } = &self.stage {
            let offsets = match sink {
                Sink::Nothing => Vec::new(),
                Sink::Memory(offsets) => offsets.clone(),
                Sink::Answer(ours) => (GRANTED..GRANTED + ours.len).collect(),
            };
            for (at, byte) in offsets.into_iter().zip(&self.buffer) {
                // The last of several overlapping ranges counts, or none.
                if memory[at] == *byte {
                    self.memory[at] = *byte;
                }
            }
        }
        self.compare(memory);
    }
}
