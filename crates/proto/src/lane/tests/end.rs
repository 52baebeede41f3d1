//! One end of one lane, with the caller's part of the work.

use alloc::vec::Vec;
use core::time::Duration;

use super::link::Random;
use super::*;
use crate::frame::{Entry, FLAG_NOTIFY, REGION_BYTES, Table};

/// The state that an end keeps of a READ request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked(Piece);

/// Has room for some answers and not for others, so that they leave in any order.
struct Picky<'a>(&'a mut Random);

impl Room<Run, Asked> for Picky<'_> {
    fn for_write(&mut self, _: &Run) -> bool {
        true
    }

    fn for_answer(&mut self, _: &Asked) -> bool {
        self.0.below(2) == 0
    }
}

/// A frame that has arrived, to be processed in order.
#[derive(Debug)]
pub(super) enum Arrival {
    Written { id: ChunkId, rider: bool },
    Data(Piece),
    Note(u64),
    Mark(u64),
}

/// An event that an end has processed, or has sent, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// A WRITE chunk of the peer has landed or was refused; of the sender, it was sent.
    Write(ChunkId),
    /// A notification was delivered, alone or after its chunk.
    Note(u64),
    /// A ping with this number was processed.
    Mark(u64),
}

/// The frame whose payload is arriving.
#[derive(Debug)]
struct Current {
    header: Header,
    meaning: Meaning<Piece>,
    ticket: Option<Ticket>,
}

/// One end of one lane with the caller's part of its work.
pub(super) struct End {
    pub(super) lane: Lane<Run, Asked>,
    pub(super) landing: Landing<Arrival>,
    window: usize,
    own_window: usize,
    input: Vec<u8>,
    current: Option<Current>,
    /// Payloads that a device is still copying, each with its end time.
    pub(super) copies: Vec<(Duration, Ticket, Arrival)>,
    /// Maximum duration of copies; each takes a random time.
    pub(super) copying: Duration,
    /// Bytes that have arrived.
    pub(super) received: u64,
    /// Writes, notes and marks in the order of sending, and in the order of processing.
    pub(super) sent: Vec<Event>,
    pub(super) dealt_with: Vec<Event>,
    /// Chunks sent and not settled, counted here independently of the lane: writes, reads.
    in_flight: [usize; 2],
    pub(super) peak: [usize; 2],
    /// The outcome of each chunk of this side; `true` if the peer refused it.
    pub(super) settled: Vec<(ChunkId, bool)>,
    pub(super) pongs: Vec<u64>,
}

/// Returns whether the target refuses a chunk, in every test.
pub(super) fn is_refused(id: ChunkId) -> bool {
    id.transfer.is_multiple_of(3) && id.seq % 4 == 1
}

/// Returns whether a WRITE chunk carries a notification, numbered like the transfer.
fn has_rider(id: ChunkId) -> bool {
    id.transfer.is_multiple_of(5) && id.seq == 0
}

fn payload(piece: Piece) -> Vec<u8> {
    let first = piece.id.transfer as u8 ^ piece.id.seq as u8;
    (0..piece.bytes)
        .map(|at| first.wrapping_add(at as u8))
        .collect()
}

fn with_table(kind: Kind, piece: Piece) -> Vec<u8> {
    let mut out = Vec::new();
    Header {
        flags: FLAG_NOTIFY * u8::from(kind == Kind::Write && has_rider(piece.id)),
        regions: 1,
        entries: 1,
        ..frame(kind, piece.id, piece.bytes)
    }
    .encode(&mut out);
    out.resize(out.len() + REGION_BYTES, 0x44);
    let len = piece.bytes as u32;
    Entry {
        address: 0x1000,
        len,
        region: 0,
    }
    .encode(&mut out);
    out
}

impl End {
    pub(super) fn new(window: usize, own_window: usize, lanes: usize) -> Self {
        Self {
            lane: Lane::new(window, own_window, lanes),
            landing: Landing::default(),
            window,
            own_window,
            input: Vec::new(),
            current: None,
            copies: Vec::new(),
            copying: Duration::ZERO,
            received: 0,
            sent: Vec::new(),
            dealt_with: Vec::new(),
            in_flight: [0; 2],
            peak: [0; 2],
            settled: Vec::new(),
            pongs: Vec::new(),
        }
    }

    /// Sends a notification after everything sent before.
    pub(super) fn notify(&mut self, number: u64) {
        let header = Header {
            payload: 8,
            ..Header::new(Kind::Notify, 0)
        };
        self.lane.push_control(|out| {
            header.encode(out);
            out.extend_from_slice(&number.to_le_bytes());
        });
        self.sent.push(Event::Note(number));
    }

    /// Sends a ping that is processed after everything sent before.
    pub(super) fn mark(&mut self, token: u64) {
        assert!(self.lane.push_mark(token));
        self.sent.push(Event::Mark(token));
    }

    fn begin(&mut self, op: Op) {
        let at = usize::from(op == Op::Read);
        self.in_flight[at] += 1;
        assert!(
            self.in_flight[at] <= self.window,
            "more than a window in flight"
        );
        self.peak[at] = self.peak[at].max(self.in_flight[at]);
    }

    /// Returns the next bytes of the stream: urgent frames, then at most one frame with a chunk.
    pub(super) fn transmit(&mut self, random: &mut Random) -> Vec<u8> {
        let mut out = Vec::new();
        self.lane.encode_urgent(&mut out);
        let transmit = self.lane.poll_transmit(&mut Picky(random));
        match transmit.or_else(|| self.lane.poll_transmit(&mut { ROOM })) {
            Some(Transmit::Request(piece)) => {
                self.begin(Op::Read);
                out.extend(with_table(Kind::Read, piece));
            }
            Some(Transmit::Write(piece)) => {
                self.begin(Op::Write);
                self.sent.push(Event::Write(piece.id));
                if has_rider(piece.id) && !is_refused(piece.id) {
                    self.sent.push(Event::Note(piece.id.transfer));
                }
                out.extend(with_table(Kind::Write, piece));
                out.extend(payload(piece));
            }
            Some(Transmit::Answer(Asked(piece))) if is_refused(piece.id) => {
                let refusal = frame(Kind::ReadError, piece.id, 0);
                Header {
                    flags: Status::UnknownRegion as u8,
                    ..refusal
                }
                .encode_with_text(&mut out, "no");
            }
            Some(Transmit::Answer(Asked(piece))) => {
                frame(Kind::Data, piece.id, piece.bytes).encode(&mut out);
                out.extend(payload(piece));
            }
            Some(Transmit::Dead(_)) | None => {}
        }
        out
    }

    /// Receives bytes of the stream and processes the complete frames.
    pub(super) fn handle_input(&mut self, bytes: Vec<u8>, now: Duration, random: &mut Random) {
        self.received += bytes.len() as u64;
        self.input.extend(bytes);
        loop {
            let Some(current) = self.current.take() else {
                let Some(head) = self.input.first_chunk::<HEADER_BYTES>() else {
                    return;
                };
                let header = Header::decode(head).unwrap();
                let end = HEADER_BYTES + header.middle_bytes();
                if self.input.len() < end {
                    return;
                }
                let table = HEADER_BYTES..HEADER_BYTES + header.table_bytes();
                Table::decode(&header, &self.input[table]).unwrap();
                self.input.drain(..end);
                self.begin_frame(header);
                continue;
            };
            let len = current.header.payload_on_wire() as usize;
            if self.input.len() < len {
                self.current = Some(current);
                return;
            }
            let bytes = self.input.drain(..len).collect();
            self.end_frame(current, bytes, now, random);
        }
    }

    fn begin_frame(&mut self, header: Header) {
        let meaning = self.lane.handle_frame(&header).expect("an honest peer");
        // The frame that answers a chunk frees its place in the window, even if bytes follow.
        match header.kind {
            Kind::Ack | Kind::WriteError => self.in_flight[0] -= 1,
            Kind::Data | Kind::ReadError => self.in_flight[1] -= 1,
            _ => {}
        }
        let ordered = match meaning {
            Meaning::Write(_) | Meaning::Data(_) | Meaning::Message => true,
            Meaning::Ping(token) => token != 0,
            _ => false,
        };
        let ticket = ordered.then(|| self.landing.reserve());
        self.current = Some(Current {
            header,
            meaning,
            ticket,
        });
    }

    fn end_frame(&mut self, current: Current, bytes: Vec<u8>, now: Duration, random: &mut Random) {
        let Current {
            header,
            meaning,
            ticket,
        } = current;
        let arrival = match meaning {
            Meaning::Request(id) => {
                assert!(self.lane.answers.len() < self.own_window);
                self.lane.handle_request(Asked(Piece {
                    id,
                    bytes: header.payload,
                }));
                return;
            }
            Meaning::Acknowledged(piece) => return self.settled.push((piece.id, false)),
            Meaning::Refused(piece, status) => {
                assert_eq!((status, &bytes[..]), (Status::UnknownRegion, &b"no"[..]));
                return self.settled.push((piece.id, true));
            }
            Meaning::Pong(token) => return self.pongs.push(token),
            Meaning::Received(_) => unreachable!("never sent in these tests"),
            Meaning::Ping(0) => {
                return self.lane.push_pong(0);
            }
            Meaning::Ping(token) => Arrival::Mark(token),
            Meaning::Message => Arrival::Note(u64::from_le_bytes(bytes[..].try_into().unwrap())),
            Meaning::Write(id) => {
                assert_eq!(
                    bytes,
                    payload(Piece {
                        id,
                        bytes: header.payload
                    })
                );
                Arrival::Written {
                    id,
                    rider: header.flags & FLAG_NOTIFY != 0,
                }
            }
            Meaning::Data(piece) => {
                assert_eq!(bytes, payload(piece));
                Arrival::Data(piece)
            }
        };
        let ticket = ticket.expect("what is ordered has a ticket");
        let copied = matches!(arrival, Arrival::Written { .. } | Arrival::Data(_));
        if copied && !self.copying.is_zero() {
            let takes = Duration::from_nanos(random.below(self.copying.as_nanos() as u64));
            self.copies.push((now + takes, ticket, arrival));
        } else {
            self.landing.complete(ticket, arrival);
        }
        self.handle_landed();
    }

    pub(super) fn handle_copies(&mut self, now: Duration) {
        while let Some(at) = self.copies.iter().position(|(until, ..)| *until <= now) {
            let (_, ticket, arrival) = self.copies.swap_remove(at);
            self.landing.complete(ticket, arrival);
        }
        self.handle_landed();
    }

    fn handle_landed(&mut self) {
        while let Some(arrival) = self.landing.poll_event() {
            match arrival {
                Arrival::Written { id, rider } => {
                    let refused = is_refused(id);
                    self.dealt_with.push(Event::Write(id));
                    if rider && !refused {
                        self.dealt_with.push(Event::Note(id.transfer));
                    }
                    let refusal = refused.then(|| (Status::UnknownRegion, "no".into()));
                    self.lane.handle_landed(id, refusal);
                    assert!(self.lane.replies() <= self.own_window);
                }
                Arrival::Data(piece) => self.settled.push((piece.id, false)),
                Arrival::Note(number) => self.dealt_with.push(Event::Note(number)),
                Arrival::Mark(token) => {
                    self.dealt_with.push(Event::Mark(token));
                    self.lane.push_pong(token);
                }
            }
        }
    }

    /// Closes the lane. Returns the queued offers and all chunks of this side in flight, including
    /// those whose answers were arriving.
    pub(super) fn close(&mut self) -> (Vec<Run>, Vec<ChunkId>) {
        let remains = self.lane.close();
        let mut chunks: Vec<_> = [remains.reads, remains.writes]
            .concat()
            .iter()
            .map(Chunk::id)
            .collect();
        let landing = self
            .landing
            .close()
            .chain(self.copies.drain(..).map(|(.., arrival)| arrival));
        chunks.extend(landing.filter_map(|arrival| match arrival {
            Arrival::Data(piece) => Some(piece.id),
            _ => None,
        }));
        let current = self.current.take().map(|current| current.meaning);
        if let Some(Meaning::Data(piece) | Meaning::Refused(piece, _)) = current {
            chunks.push(piece.id);
        }
        (remains.offers, chunks)
    }
}
