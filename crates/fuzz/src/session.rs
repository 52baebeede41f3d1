//! A live session that receives frames of an insider: a real engine, a real TCP lane, an
//! established handshake.
//!
//! The input is a list of [`Action`]s. The attacker's bytes pass through a model on their way to
//! the victim: a parser of the stream and a copy of the victim's memory, which predicts for each
//! frame whether it ends the connection, what the victim answers, and which bytes change.

mod model;

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

use socket2::SockRef;
use tcpx::{Config, Op, Peer, Region, RemoteRegion, Segment, Session, Transfer};
use tcpx_proto::descriptor::{Memory as MemoryKind, RegionDescriptor, RegionKey};
use tcpx_proto::frame::{FLAG_COMM, FLAG_NOTIFY, HEADER_BYTES, Header, Kind};
use tcpx_proto::info::ConnectionInfo;
use tcpx_testkit::Memory;
use tcpx_testkit::attack::{Target, ask};
use tcpx_testkit::raw::Stranger;

use self::model::{Ours, Verdict};

/// Number of bytes that the attacker may access, and of inaccessible bytes on either side.
pub const GRANTED: usize = 4096;
/// Maximum chunks of the attacker in flight.
pub const WINDOW: usize = 16;
/// A time limit longer than anything takes, also on a busy machine.
const LONG: Duration = Duration::from_secs(60);
/// Payload longer than this is not sent to its end.
const LONG_PAYLOAD: usize = 64 << 10;

/// An action of the attacker: the first byte of a record.
#[derive(Clone, Copy, Debug)]
#[repr(u8)]
pub enum Action {
    /// `key, flags, count, (offset u16, len u16)…`: a WRITE of 1 to 4 ranges.
    Write = 0,
    /// A READ of 1 to 4 ranges, in the same format.
    Read = 1,
    /// `kind, transfer, seq, flags, payload u16`: a frame without a table.
    Plain = 2,
    /// `count, bytes…`: any bytes.
    Bytes = 3,
    /// 32 bytes of a header, followed by the sections that it announces.
    Header = 4,
    /// `op, len u16`: the victim begins a transfer.
    Begin = 5,
    /// `which, kind, delta`: settles a chunk of the victim.
    Settle = 6,
    /// Reads the victim's answers, and checks its memory.
    Sync = 7,
    /// The victim revokes its memory.
    Deregister = 8,
}

impl Action {
    const ALL: [Self; 9] = [
        Self::Write,
        Self::Read,
        Self::Plain,
        Self::Bytes,
        Self::Header,
        Self::Begin,
        Self::Settle,
        Self::Sync,
        Self::Deregister,
    ];
}

/// Checks any input; panics when a session breaks a promise.
pub fn check(data: &[u8]) {
    // One at a time, since they share the victim's memory.
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    Attack::new().run(&mut Input(data));
}

/// The session under attack, which lives as long as the process.
struct Victim {
    session: Session,
    info: ConnectionInfo,
    memory: Memory,
    dead: Target,
}

fn victim() -> &'static Victim {
    static VICTIM: OnceLock<Victim> = OnceLock::new();
    VICTIM.get_or_init(|| {
        let mut config = Config::defaults();
        let window = WINDOW.to_string();
        for (key, value) in [
            ("name", "victim"),
            ("interfaces", "lo"),
            ("workers", "1"),
            ("window", &window),
            ("peer_timeout", "1h"),
        ] {
            config.set(key, value).expect("a setting");
        }
        let session = Session::new(config).expect("a session");
        let info = ConnectionInfo::decode(&session.connection_info()).expect("its info");
        let memory = Memory::new(3 * GRANTED);
        let other = Memory::new(64);
        let gone = other.register(&session).expect("it has bytes");
        let dead = Target::of(&gone.descriptor());
        drop(gone);
        Victim {
            session,
            info,
            memory,
            dead,
        }
    })
}

struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn bytes<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (bytes, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*bytes)
    }

    fn u16(&mut self) -> Option<u16> {
        self.bytes().map(u16::from_le_bytes)
    }
}

/// One connection of the attacker.
struct Attack {
    victim: &'static Victim,
    stream: TcpStream,
    peer: Peer,
    region: Region,
    granted: Target,
    model: model::Model,
    transfers: Vec<(Ours, Transfer)>,
    next: u32,
}

impl Attack {
    fn new() -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(1);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let victim = victim();
        let mut id = [0x66; 16];
        id[..8].copy_from_slice(&number.to_le_bytes());
        let mallory = Stranger {
            id,
            connection: number,
            ..Stranger::MALLORY
        };
        let mut stream = TcpStream::connect(victim.session.addresses()[0]).expect("it listens");
        let socket = SockRef::from(&stream);
        // A reset frees the port: there are thousands of connections a second.
        socket.set_linger(Some(Duration::ZERO)).expect("an option");
        socket.set_tcp_nodelay(true).expect("an option");
        stream.set_read_timeout(Some(LONG)).expect("an option");
        let shaken = mallory.shake_hands(&mut stream, &victim.info);
        shaken.expect("it has the victim's info");
        let peer = victim.session.accept(LONG).expect("an insider");
        let region = victim
            .memory
            .register_range(&victim.session, GRANTED, GRANTED);
        let region = region.expect("inside");
        let granted = Target::of(&region.descriptor());
        let before = victim.memory.bytes(0, 3 * GRANTED);
        Self {
            victim,
            stream,
            peer,
            model: model::Model::new(granted, before),
            granted,
            region,
            transfers: Vec::new(),
            next: 0,
        }
    }

    /// Acts until the input or the connection ends, and checks that it ends as it should.
    fn run(mut self, input: &mut Input<'_>) {
        while self.step(input).is_some() && self.model.verdict() == Verdict::GoesOn {}
        if self.model.verdict() == Verdict::GoesOn && self.complete() {
            self.sync();
        }
        self.end();
    }

    /// Processes one record; returns whether there was one.
    fn step(&mut self, input: &mut Input<'_>) -> Option<()> {
        let [action] = input.bytes()?;
        match Action::ALL[usize::from(action) % Action::ALL.len()] {
            Action::Write => self.ask(Kind::Write, input)?,
            Action::Read => self.ask(Kind::Read, input)?,
            Action::Plain => {
                let [kind, transfer, seq, flags] = input.bytes()?;
                let payload = usize::from(input.u16()? % 2048);
                let mut bytes = Vec::new();
                let header = Header {
                    flags,
                    seq: u32::from(seq),
                    payload: payload as u64,
                    ..Header::new(Kind::Ping, u64::from(transfer))
                };
                header.encode(&mut bytes);
                bytes[0] = kind % 16;
                bytes.resize(bytes.len() + payload, 0x55);
                self.send(&bytes);
            }
            Action::Bytes => {
                let [count] = input.bytes()?;
                let (bytes, rest) = input.0.split_at(usize::from(count).min(input.0.len()));
                input.0 = rest;
                self.send(bytes);
            }
            Action::Header => {
                let head = input.bytes::<HEADER_BYTES>()?;
                self.send(&head);
                if !self.complete() {
                    return None;
                }
            }
            Action::Begin => {
                let [op] = input.bytes()?;
                let len = 1 + usize::from(input.u16()?) % GRANTED;
                self.begin(if op & 1 == 0 { Op::Write } else { Op::Read }, len)?;
            }
            Action::Settle => {
                let [which, kind, delta] = input.bytes()?;
                self.settle(which, kind, delta);
            }
            Action::Sync if self.complete() => self.sync(),
            Action::Deregister if self.complete() => {
                self.sync();
                if self.model.verdict() == Verdict::GoesOn && self.region.deregister().is_ok() {
                    self.model.deregister();
                }
            }
            Action::Sync | Action::Deregister => return None,
        }
        Some(())
    }

    fn ask(&mut self, kind: Kind, input: &mut Input<'_>) -> Option<()> {
        let [key, flags, count] = input.bytes()?;
        let (dead, granted) = (&self.victim.dead, &self.granted);
        let key = match key % 8 {
            0 => dead.key,
            1 => RegionKey([key; 16]),
            _ => granted.key,
        };
        let mut entries = Vec::new();
        for _ in 0..=count % 4 {
            let (offset, len) = (input.u16()?, input.u16()?);
            // Mostly inside; both ends can be reached.
            let offset = i64::from(offset as i16) % (2 * GRANTED as i64);
            let address = granted.address.wrapping_add_signed(offset);
            entries.push((address, u32::from(len) % (GRANTED as u32 + 2), 0));
        }
        let id = (u64::from(self.next), self.next);
        self.next += 1;
        let mut bytes = ask(kind, id, &[key], &entries);
        if kind == Kind::Write {
            let total: u32 = entries.iter().map(|(_, len, _)| len).sum();
            bytes[1] = flags & (FLAG_NOTIFY | if flags == 0xFF { FLAG_COMM } else { 0 });
            bytes.resize(bytes.len() + total as usize, flags | 1);
        }
        self.send(&bytes);
        Some(())
    }

    /// Makes the victim begin a transfer of `len` bytes, and reads its frame.
    fn begin(&mut self, op: Op, len: usize) -> Option<()> {
        if !self.complete() {
            return None;
        }
        self.sync();
        if self.model.verdict() != Verdict::GoesOn || self.transfers.len() >= WINDOW {
            return Some(());
        }
        let theirs = RegionDescriptor::new(64, len as u64, RegionKey([7; 16]), MemoryKind::Host);
        let theirs = RemoteRegion::from_bytes(&theirs.expect("no wrap").encode());
        let theirs = theirs.expect("a descriptor");
        let segment = Segment {
            local: self.region.at(0),
            remote: theirs.at(0),
            len,
        };
        // Refused once the memory is revoked.
        let transfer = self
            .victim
            .session
            .prepare(op, &self.peer, [segment])
            .ok()?;
        transfer.post().expect("connected");
        let (header, _, payload) = self.frame().expect("the chunk");
        let kind = if op == Op::Read {
            Kind::Read
        } else {
            Kind::Write
        };
        assert_eq!((header.kind, header.payload), (kind, len as u64));
        assert_eq!(payload.len(), if op == Op::Write { len } else { 0 });
        let ours = Ours {
            op,
            transfer: header.transfer,
            seq: header.seq,
            len,
        };
        self.model.begun(ours);
        self.transfers.push((ours, transfer));
        Some(())
    }

    fn settle(&mut self, which: u8, kind: u8, delta: u8) {
        let Some((ours, _)) = self
            .transfers
            .get(usize::from(which) % self.transfers.len().max(1))
        else {
            return;
        };
        let kind = match kind % 8 {
            0 => Kind::Ack,
            1 => Kind::WriteError,
            2 => Kind::Data,
            3 => Kind::ReadError,
            // The expected chunk.
            _ if ours.op == Op::Read => Kind::Data,
            _ => Kind::Ack,
        };
        let payload = match kind {
            // A wrong length one time in eight.
            Kind::Data if delta.is_multiple_of(8) => ours.len + usize::from(delta) / 8,
            Kind::Data => ours.len,
            _ => 0,
        };
        let header = Header {
            seq: ours.seq,
            payload: payload as u64,
            ..Header::new(kind, ours.transfer)
        };
        let mut bytes = Vec::new();
        header.encode(&mut bytes);
        bytes.resize(bytes.len() + payload, delta);
        self.send(&bytes);
    }

    /// Sends bytes, through the model.
    fn send(&mut self, bytes: &[u8]) {
        // Answers whose content depends on later bytes, or more than the window: they are read
        // first.
        if self.model.needs_sync() && self.complete() {
            self.sync();
        }
        if self.model.verdict() == Verdict::GoesOn {
            self.model.feed(bytes);
            // The victim may have closed in the middle.
            let _ = self.stream.write_all(bytes);
        }
    }

    /// Completes the frame that was begun, so that others can follow. Returns false if it is too
    /// long.
    fn complete(&mut self) -> bool {
        while self.model.verdict() == Verdict::GoesOn {
            let missing = self.model.missing();
            if missing == 0 {
                return true;
            }
            if missing > LONG_PAYLOAD {
                return false;
            }
            let rest = vec![0; missing];
            self.model.feed(&rest);
            let _ = self.stream.write_all(&rest);
        }
        true
    }

    /// Reads the answers to everything sent, and compares them and the memory.
    fn sync(&mut self) {
        if self.model.verdict() != Verdict::GoesOn {
            return;
        }
        let mut ping = Vec::new();
        Header::new(Kind::Ping, u64::MAX).encode(&mut ping);
        let _ = self.stream.write_all(&ping);
        loop {
            let Some((header, _, payload)) = self.frame() else {
                panic!("the victim ended a connection that should go on");
            };
            if (header.kind, header.transfer) == (Kind::Pong, u64::MAX) {
                break;
            }
            self.model.answered(&header, &payload);
        }
        // Answers of READs and refusals may come after the Pong.
        while self.model.awaits_answers() {
            let (header, _, payload) = self.frame().expect("an answer to everything");
            self.model.answered(&header, &payload);
        }
        let memory = self.victim.memory.bytes(0, 3 * GRANTED);
        self.model.compare(&memory);
        let _ = self.victim.session.notifications();
    }

    /// Reads a frame; `None` if the victim has closed.
    fn frame(&mut self) -> Option<(Header, Vec<u8>, Vec<u8>)> {
        loop {
            let head = self.read(HEADER_BYTES)?;
            let head = head.first_chunk().expect("a header");
            let header = Header::decode(head).expect("the victim is honest");
            let middle = self.read(header.middle_bytes())?;
            let payload = self.read(header.payload_on_wire() as usize)?;
            // The victim sends pings, and reports received messages, at any time.
            let is_unasked = (header.kind, header.transfer) == (Kind::Ping, 0);
            if !is_unasked && header.kind != Kind::Received {
                return Some((header, middle, payload));
            }
        }
    }

    fn read(&mut self, len: usize) -> Option<Vec<u8>> {
        let mut bytes = vec![0; len];
        match self.stream.read_exact(&mut bytes) {
            Ok(()) => Some(bytes),
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                panic!("the victim hangs")
            }
            Err(_) => None,
        }
    }

    /// Ends the connection, or observes the victim ending it.
    fn end(mut self) {
        if self.model.verdict() != Verdict::GoesOn {
            while self.frame().is_some() {}
        }
        drop(self.stream);
        // The victim would wait for the lane to reconnect.
        self.peer.disconnect();
        // When this returns, nothing writes there any more.
        let _ = self.region.deregister();
        let memory = self.victim.memory.bytes(0, 3 * GRANTED);
        self.model.compare_at_end(&memory);
        for (ours, transfer) in self.transfers {
            let outcome = transfer.wait(LONG);
            assert!(
                transfer.poll().is_terminal(),
                "a transfer hangs: {outcome:?}"
            );
            if let Some(settled) = self.model.settled(&ours) {
                assert_eq!(outcome.is_ok(), settled, "{outcome:?}");
            }
        }
        let _ = self.victim.session.notifications();
    }
}
