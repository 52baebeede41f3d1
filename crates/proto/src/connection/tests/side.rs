//! One side of a connection: its lanes, the state that outlives them, and the caller's part.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::rc::Rc;
use core::cell::RefCell;

use super::*;
use crate::frame::{Entry, FLAG_NOTIFY, HEADER_BYTES, Header, Kind, REGION_BYTES, Table, down};
use crate::lane::{Landing, Lane, Meaning, Offer, Op, Room, Take, Ticket, Transmit};

/// Identifies a chunk of either side.
type Key = (usize, ChunkId);

/// Returns whether the target refuses a chunk, in every test.
fn is_refused(id: ChunkId) -> bool {
    id.transfer.is_multiple_of(3) && id.seq % 4 == 1
}

/// Returns whether a WRITE chunk carries a notification.
fn has_rider(id: ChunkId) -> bool {
    id.transfer.is_multiple_of(5) && id.seq == 0
}

/// The content of the target memory of one chunk.
#[derive(Debug)]
struct Image {
    op: Op,
    /// For each byte, the attempt that it came with; 0 before the first.
    bytes: Vec<u8>,
    /// How often the chunk was sent or asked for.
    attempts: u8,
    /// Whether the target of a WRITE has processed it.
    dealt_with: bool,
    /// Once the chunk is settled: whether it was refused.
    settled: Option<bool>,
    riders: usize,
}

/// Tracks and checks the chunks of both sides.
#[derive(Debug, Default)]
pub(super) struct Books(BTreeMap<Key, Image>);

impl Books {
    fn image(&mut self, key: Key) -> &mut Image {
        self.0.get_mut(&key).expect("a chunk that was posted")
    }

    fn attempt(&mut self, key: Key) -> u8 {
        let image = self.image(key);
        assert_eq!(image.settled, None, "{key:?} is sent after its end");
        image.attempts += 1;
        assert!(image.attempts < 16);
        image.attempts
    }

    /// Writes payload to memory.
    fn land(&mut self, key: Key, at: usize, payload: &[u8]) {
        let image = self.image(key);
        assert_eq!(image.settled, None, "{key:?} lands after its end");
        assert!(!image.dealt_with, "{key:?} lands again");
        assert!(!is_refused(key.1));
        for (at, byte) in (at..).zip(payload) {
            let attempt = byte >> 4;
            assert_eq!(*byte, pattern(key.1, attempt, at));
            let newest = *image.bytes.iter().max().unwrap();
            assert!(attempt >= newest, "{key:?} lands behind newer bytes");
            image.bytes[at] = attempt;
        }
    }

    fn settle(&mut self, key: Key, refused: bool) {
        let image = self.image(key);
        assert_eq!(image.settled.replace(refused), None, "{key:?} twice");
        assert_eq!(refused, is_refused(key.1));
        let whole = image.bytes.iter().all(|byte| *byte == image.bytes[0]);
        assert!(
            whole && refused == (image.bytes[0] == 0),
            "{key:?} has holes"
        );
    }

    /// Records that the target has processed a WRITE chunk.
    fn written(&mut self, key: Key, rider: bool) {
        let image = self.image(key);
        assert!(!image.dealt_with, "{key:?} lands again");
        image.dealt_with = true;
        image.riders += usize::from(rider);
    }

    /// Checks that every chunk is settled, and every notification of a chunk delivered.
    pub(super) fn assert_all_settled(&self) {
        for (key, image) in &self.0 {
            let (side, id) = key;
            assert!(
                image.settled.is_some(),
                "{id} of side {side} hangs: {image:?}"
            );
            let rides = image.op == Op::Write && has_rider(*id) && !is_refused(*id);
            assert_eq!(image.riders, usize::from(rides), "{id} of side {side}");
        }
    }
}

/// Returns a byte of a payload, from the attempt and the position.
fn pattern(id: ChunkId, attempt: u8, at: usize) -> u8 {
    attempt << 4 | (id.transfer as u8 ^ id.seq as u8).wrapping_add(at as u8) & 15
}

fn payload(piece: Piece, attempt: u8) -> impl Iterator<Item = u8> {
    (0..piece.bytes as usize).map(move |at| pattern(piece.id, attempt, at))
}

/// Chunks not taken yet. Clones share them.
#[derive(Clone, Debug)]
struct Batch {
    op: Op,
    transfer: u64,
    count: usize,
    pieces: Rc<RefCell<VecDeque<Piece>>>,
}

impl Batch {
    fn new(op: Op, pieces: VecDeque<Piece>) -> Self {
        Self {
            op,
            transfer: pieces[0].id.transfer,
            count: pieces.len(),
            pieces: Rc::new(RefCell::new(pieces)),
        }
    }
}

impl Offer for Batch {
    type Chunk = Piece;

    fn transfer(&self) -> u64 {
        self.transfer
    }

    fn op(&self) -> Op {
        self.op
    }

    fn chunks(&self) -> usize {
        self.count
    }

    fn take(&self) -> Take<Piece> {
        let piece = self.pieces.borrow_mut().pop_front();
        piece.map_or(Take::Nothing, Take::Chunk)
    }

    fn left(&self) -> usize {
        self.pieces.borrow().len()
    }
}

/// A READ request, with the number of its attempt.
#[derive(Clone, Copy, Debug)]
struct Asked(Piece, u8);

struct Roomy;

impl Room<Batch, Asked> for Roomy {
    fn for_write(&mut self, _: &Batch) -> bool {
        true
    }

    fn for_answer(&mut self, _: &Asked) -> bool {
        true
    }
}

/// A frame that has arrived, to be processed in order.
#[derive(Debug)]
enum Arrival {
    Written { id: ChunkId, rider: bool },
    Data(Piece),
    Message(Header, Vec<u8>),
}

/// The frame whose payload is arriving.
#[derive(Debug)]
struct Current {
    header: Header,
    meaning: Meaning<Piece>,
    attempt: u8,
    ticket: Option<Ticket>,
    payload: Vec<u8>,
}

/// A payload that a device is copying, with the steps left.
#[derive(Debug)]
struct Copying {
    steps: u32,
    ticket: Ticket,
    arrival: Arrival,
    key: Key,
    payload: Vec<u8>,
}

/// One end of one stream.
#[derive(Debug)]
struct End {
    stream: StreamId,
    lane: Lane<Batch, Asked>,
    landing: Landing<Arrival>,
    input: Vec<u8>,
    current: Option<Box<Current>>,
    copies: Vec<Copying>,
}

/// Limits of a side that do not change.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) window: usize,
    pub(super) own_window: usize,
    /// Maximum steps in which a device copies a payload; 0 for host memory.
    pub(super) copying: u32,
}

/// One side of a connection.
#[derive(Debug)]
pub(super) struct Side {
    index: usize,
    limits: Limits,
    ends: Vec<Option<End>>,
    outbox: Outbox,
    inbox: Inbox,
    losses: Losses<Piece>,
    /// The lane that messages travel on.
    carrier: Option<usize>,
    /// The offers of every lane, also of lanes that reconnect.
    offers: Vec<Batch>,
    books: Rc<RefCell<Books>>,
    said: u64,
    /// Notifications of the peer, in order.
    pub(super) heard: Vec<u64>,
}

impl Side {
    pub(super) fn new(
        index: usize,
        lanes: usize,
        limits: Limits,
        books: Rc<RefCell<Books>>,
    ) -> Self {
        let mut side = Self {
            index,
            limits,
            ends: (0..lanes).map(|_| None).collect(),
            outbox: Outbox::default(),
            inbox: Inbox::default(),
            losses: Losses::new(lanes),
            carrier: Some(0),
            offers: Vec::new(),
            books,
            said: 0,
            heard: Vec::new(),
        };
        for lane in 0..lanes {
            side.ends[lane] = Some(side.end(stream(lane as u16, 0)));
        }
        side
    }

    fn end(&self, stream: StreamId) -> End {
        let Limits {
            window, own_window, ..
        } = self.limits;
        let mut lane = Lane::new(window, own_window, self.ends.len());
        for offer in self.offers.iter().filter(|offer| offer.has_more()) {
            lane.offer(offer.clone()).unwrap();
        }
        End {
            stream,
            lane,
            landing: Landing::default(),
            input: Vec::new(),
            current: None,
            copies: Vec::new(),
        }
    }

    /// Returns the stream that is open here.
    pub(super) fn stream(&self, lane: usize) -> Option<StreamId> {
        self.ends[lane].as_ref().map(|end| end.stream)
    }

    /// Posts a transfer.
    pub(super) fn post(&mut self, op: Op, transfer: u64, lengths: &[u64]) {
        let pieces = (0..).zip(lengths).map(|(seq, bytes)| Piece {
            id: ChunkId { transfer, seq },
            bytes: *bytes,
        });
        let pieces: VecDeque<_> = pieces.collect();
        for piece in &pieces {
            let image = Image {
                op,
                bytes: vec![0; piece.bytes as usize],
                attempts: 0,
                dealt_with: false,
                settled: None,
                riders: 0,
            };
            let key = (self.index, piece.id);
            assert!(self.books.borrow_mut().0.insert(key, image).is_none());
        }
        self.offer(Batch::new(op, pieces));
    }

    fn offer(&mut self, batch: Batch) {
        for end in self.ends.iter_mut().flatten() {
            end.lane.offer(batch.clone()).unwrap();
        }
        self.offers.push(batch);
    }

    fn again(&mut self, op: Op, pieces: impl IntoIterator<Item = Piece>) {
        for piece in pieces {
            self.offer(Batch::new(op, VecDeque::from([piece])));
        }
    }

    /// Sends a notification.
    pub(super) fn notify(&mut self) {
        self.said += 1;
        let said = self.said;
        self.say(|number, out| {
            let header = Header {
                seq: number,
                payload: 8,
                ..Header::new(Kind::Notify, 0)
            };
            header.encode(out);
            out.extend(said.to_le_bytes());
        });
    }

    pub(super) fn said(&self) -> u64 {
        self.said
    }

    fn say(&mut self, encode: impl FnOnce(u32, &mut Vec<u8>)) {
        let message = self.outbox.push(encode);
        let end = self.carrier.and_then(|lane| self.ends[lane].as_mut());
        if let Some(end) = end {
            end.lane.push_control(|out| out.extend_from_slice(message));
        }
    }

    /// Chooses the lane that carries messages, and sends all kept messages again on it.
    fn elect(&mut self) {
        self.carrier = self.ends.iter().position(Option::is_some);
        if let Some(lane) = self.carrier {
            let end = self.ends[lane]
                .as_mut()
                .expect("chosen because it is there");
            for message in self.outbox.messages() {
                end.lane.push_control(|out| out.extend_from_slice(message));
            }
        }
    }

    /// Asks for signs of life on every lane.
    pub(super) fn ping(&mut self) {
        for end in self.ends.iter_mut().flatten() {
            assert!(end.lane.push_ping(0));
        }
    }

    /// Adopts a new stream; returns false if it is outdated.
    pub(super) fn open(&mut self, stream: StreamId) -> bool {
        if !self.losses.open(stream) {
            return false;
        }
        let end = self.end(stream);
        let old = self.ends[usize::from(stream.lane)].replace(end);
        assert!(old.is_none(), "two streams of one lane");
        if self.carrier.is_none() {
            self.elect();
        }
        true
    }

    /// Closes a lane's stream, and sends a LaneDown.
    pub(super) fn close(&mut self, lane: usize) {
        let Some(mut end) = self.ends[lane].take() else {
            return;
        };
        // Nothing lands any more: unfinished READs are requested again, complete ones count.
        let mut reads = Vec::new();
        let begun = end.current.take().map(|current| current.meaning);
        let copied = end.copies.drain(..).map(|copy| copy.arrival);
        reads.extend(copied.filter_map(|arrival| match arrival {
            Arrival::Data(piece) => Some(piece),
            _ => None,
        }));
        match begun {
            Some(Meaning::Data(piece)) => reads.push(piece),
            // Only the text is missing.
            Some(Meaning::Refused(piece, _)) => self.settle(piece.id, true),
            _ => {}
        }
        for arrival in end.landing.close() {
            match arrival {
                Arrival::Written { id, rider } => self.written(&mut end.lane, id, rider),
                Arrival::Data(piece) => self.settle(piece.id, false),
                // The peer sends it again.
                Arrival::Message(..) => {}
            }
        }
        let remains = end.lane.close();
        for offer in remains.offers {
            let is_kept = |kept: &Batch| Rc::ptr_eq(&kept.pieces, &offer.pieces);
            assert!(self.offers.iter().any(is_kept));
        }
        reads.extend(remains.reads);
        let known = self.losses.close(end.stream, remains.writes);
        if self.carrier == Some(lane) {
            self.elect();
        }
        self.say_down(end.stream, &remains.endings);
        self.again(Op::Read, reads);
        self.know(known);
    }

    fn say_down(&mut self, stream: StreamId, endings: &[Ending]) {
        self.say(|number, out| down::encode(out, stream, number, endings));
    }

    fn know(&mut self, known: Known<Piece>) {
        for (piece, ending) in known.settled {
            self.settle(piece.id, ending.refusal.is_some());
        }
        self.again(Op::Write, known.again);
    }

    fn settle(&mut self, id: ChunkId, refused: bool) {
        self.books.borrow_mut().settle((self.index, id), refused);
    }

    /// Processes a WRITE chunk of the peer that has landed, or was refused.
    fn written(&self, lane: &mut Lane<Batch, Asked>, id: ChunkId, rider: bool) {
        let refusal = is_refused(id).then(|| (Status::UnknownRegion, String::from("no")));
        let key = (1 - self.index, id);
        let rider = rider && refusal.is_none();
        self.books.borrow_mut().written(key, rider);
        lane.handle_landed(id, refusal);
    }

    /// Appends the next bytes of a stream: urgent frames, then at most one frame with a chunk.
    pub(super) fn transmit(&mut self, lane: usize, out: &mut Vec<u8>) {
        let Some(end) = &mut self.ends[lane] else {
            return;
        };
        if let Some(next) = self.inbox.poll_received(false) {
            end.lane.push_control(|out| received(out, next));
        }
        end.lane.encode_urgent(out);
        match end.lane.poll_transmit(&mut Roomy) {
            Some(Transmit::Request(piece)) => self.begin(out, Kind::Read, piece),
            Some(Transmit::Write(piece)) => self.begin(out, Kind::Write, piece),
            Some(Transmit::Answer(Asked(piece, _))) if is_refused(piece.id) => Header {
                flags: Status::UnknownRegion as u8,
                ..header(Kind::ReadError, piece.id, 0)
            }
            .encode_with_text(out, "no"),
            Some(Transmit::Answer(Asked(piece, attempt))) => {
                header(Kind::Data, piece.id, piece.bytes).encode(out);
                out.extend(payload(piece, attempt));
            }
            Some(Transmit::Dead(_)) | None => {}
        }
    }

    /// Appends a frame with a table that encodes the attempt.
    fn begin(&self, out: &mut Vec<u8>, kind: Kind, piece: Piece) {
        let attempt = self.books.borrow_mut().attempt((self.index, piece.id));
        Header {
            flags: FLAG_NOTIFY * u8::from(kind == Kind::Write && has_rider(piece.id)),
            regions: 1,
            entries: 1,
            ..header(kind, piece.id, piece.bytes)
        }
        .encode(out);
        out.resize(out.len() + REGION_BYTES, 0x44);
        let entry = Entry {
            address: attempt.into(),
            len: piece.bytes as u32,
            region: 0,
        };
        entry.encode(out);
        if kind == Kind::Write {
            out.extend(payload(piece, attempt));
        }
    }

    /// Processes received bytes of a stream.
    pub(super) fn handle_input(&mut self, lane: usize, bytes: &[u8]) {
        let end = self.ends[lane].as_mut().expect("a stream that is open");
        end.input.extend_from_slice(bytes);
        while let Some(end) = &mut self.ends[lane] {
            if end.current.is_none() && !end.begin_frame() {
                return;
            }
            let current = end.current.as_mut().expect("just begun");
            let missing = current.header.payload_on_wire() as usize - current.payload.len();
            let count = missing.min(end.input.len());
            let at = current.payload.len();
            current.payload.extend(end.input.drain(..count));
            // Host memory is written as the bytes arrive.
            if self.limits.copying == 0
                && let Some(key) = key(self.index, current)
            {
                self.books
                    .borrow_mut()
                    .land(key, at, &current.payload[at..]);
            }
            if count < missing {
                return;
            }
            let current = end.current.take().expect("just looked at");
            self.end_frame(lane, *current);
            self.deliver(lane);
        }
    }

    fn end_frame(&mut self, lane: usize, current: Current) {
        let end = self.ends[lane].as_mut().expect("a stream that is open");
        let target = key(self.index, &current);
        let arrival = match current.meaning {
            Meaning::Request(id) => {
                let bytes = current.header.payload;
                let asked = Asked(Piece { id, bytes }, current.attempt);
                return end.lane.handle_request(asked);
            }
            Meaning::Acknowledged(piece) => return self.settle(piece.id, false),
            Meaning::Refused(piece, _) => return self.settle(piece.id, true),
            Meaning::Received(next) => return self.outbox.handle_received(next).unwrap(),
            Meaning::Ping(token) => {
                if let Some(next) = self.inbox.poll_received(true) {
                    end.lane.push_control(|out| received(out, next));
                }
                return end.lane.push_pong(token);
            }
            Meaning::Pong(_) => return,
            Meaning::Message => Arrival::Message(current.header, current.payload.clone()),
            Meaning::Write(id) => Arrival::Written {
                id,
                rider: current.header.flags & FLAG_NOTIFY != 0,
            },
            Meaning::Data(piece) => Arrival::Data(piece),
        };
        let ticket = current.ticket.expect("what is ordered has a ticket");
        match target.filter(|_| self.limits.copying > 0) {
            Some(key) => end.copies.push(Copying {
                // Copies of later chunks may be faster.
                steps: (key.1.seq * 5 + key.1.transfer as u32 * 3) % (self.limits.copying + 1),
                ticket,
                arrival,
                key,
                payload: current.payload,
            }),
            None => end.landing.complete(ticket, arrival),
        }
    }

    /// Lets devices copy for one step. Returns whether they have work.
    pub(super) fn step_copies(&mut self) -> bool {
        let mut is_busy = false;
        for lane in 0..self.ends.len() {
            let Some(end) = &mut self.ends[lane] else {
                continue;
            };
            is_busy |= !end.copies.is_empty();
            for copy in &mut end.copies {
                copy.steps = copy.steps.saturating_sub(1);
            }
            for copy in end.copies.extract_if(.., |copy| copy.steps == 0) {
                self.books.borrow_mut().land(copy.key, 0, &copy.payload);
                end.landing.complete(copy.ticket, copy.arrival);
            }
            self.deliver(lane);
        }
        is_busy
    }

    /// Processes the frames whose turn has come.
    fn deliver(&mut self, lane: usize) {
        while let Some(mut end) = self.ends[lane].take() {
            let arrival = end.landing.poll_event();
            if let Some(Arrival::Written { id, rider }) = arrival {
                self.written(&mut end.lane, id, rider);
            }
            self.ends[lane] = Some(end);
            match arrival {
                None => return,
                Some(Arrival::Written { .. }) => {}
                Some(Arrival::Data(piece)) => self.settle(piece.id, false),
                Some(Arrival::Message(header, payload)) => self.hear(header, &payload),
            }
        }
    }

    fn hear(&mut self, header: Header, payload: &[u8]) {
        let bytes = HEADER_BYTES + payload.len();
        let is_new = self.inbox.handle_message(header.seq, bytes);
        if !is_new.expect("an honest peer") {
            return;
        }
        if header.kind == Kind::Notify {
            let note = payload.try_into().unwrap();
            return self.heard.push(u64::from_le_bytes(note));
        }
        let stream = StreamId::from_transfer(header.transfer);
        let endings = down::decode(payload).unwrap();
        match self.losses.handle_down(stream, endings).unwrap() {
            Heard::Close => self.close(usize::from(stream.lane)),
            Heard::Never => self.say_down(stream, &[]),
            Heard::Known(known) => self.know(known),
        }
    }

    /// Returns whether messages are kept that the peer may not have.
    pub(super) fn has_messages(&self) -> bool {
        self.outbox.bytes() > 0
    }

    /// Checks that nothing is left.
    pub(super) fn assert_idle(&self) {
        assert!(!self.losses.is_waiting());
        assert_eq!(self.outbox.messages().count(), 0, "messages that are kept");
        for end in self.ends.iter().flatten() {
            assert_eq!((end.lane.load(), end.lane.replies()), (0, 0));
            assert!(!end.lane.is_busy() && !end.lane.has_work() && end.landing.is_empty());
        }
    }
}

fn header(kind: Kind, id: ChunkId, payload: u64) -> Header {
    Header {
        seq: id.seq,
        payload,
        ..Header::new(kind, id.transfer)
    }
}

fn received(out: &mut Vec<u8>, next: u32) {
    let header = Header {
        seq: next,
        ..Header::new(Kind::Received, 0)
    };
    header.encode(out);
}

/// Returns the chunk whose memory takes a frame's payload, if any does.
fn key(receiver: usize, current: &Current) -> Option<Key> {
    match &current.meaning {
        Meaning::Write(id) if !is_refused(*id) => Some((1 - receiver, *id)),
        Meaning::Data(piece) => Some((receiver, piece.id)),
        _ => None,
    }
}

impl End {
    /// Begins the next frame once all of it but the payload has arrived.
    fn begin_frame(&mut self) -> bool {
        let Some(head) = self.input.first_chunk::<HEADER_BYTES>() else {
            return false;
        };
        let header = Header::decode(head).unwrap();
        let end = HEADER_BYTES + header.middle_bytes();
        if self.input.len() < end {
            return false;
        }
        let table = Table::decode(&header, &self.input[HEADER_BYTES..end]).unwrap();
        let attempt = table
            .entries()
            .next()
            .map_or(0, |entry| entry.address as u8);
        self.input.drain(..end);
        let meaning = self.lane.handle_frame(&header).expect("an honest peer");
        let is_ordered = matches!(
            meaning,
            Meaning::Write(_) | Meaning::Data(_) | Meaning::Message
        );
        self.current = Some(Box::new(Current {
            header,
            meaning,
            attempt,
            ticket: is_ordered.then(|| self.landing.reserve()),
            payload: Vec::new(),
        }));
        true
    }
}
