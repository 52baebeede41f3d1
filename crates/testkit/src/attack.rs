//! A victim in this process, attackers on raw sockets, and an honest peer in a process of its own.
//!
//! An [`Insider`] has completed the handshake and sends frames. The victim keeps a receive posted
//! that nothing matches: it fails with the reason for which the victim ends the connection.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicU64, Ordering};

use tcpx::{Error, Misbehaviour, Op, Peer, Region, RemoteRegion, Segment, Transfer};
use tcpx_proto::descriptor::{Memory as MemoryKind, RegionDescriptor, RegionKey};
use tcpx_proto::frame::{Entry, HEADER_BYTES, Header, Kind};
use tcpx_proto::info::ConnectionInfo;

use crate::host::fails;
use crate::memory::Memory;
use crate::pattern::{Content, Expected, LOCAL_POISON};
use crate::raw::{Stranger, closed, dial, shout};
use crate::story::GUARD;
use crate::{Host, LocalMemory, RemoteProcess, Setup};

/// Number of bytes that peers may access, and of the bytes on either side of them that nobody may.
pub const GRANTED: usize = 64 << 10;
/// Maximum chunks that a peer may keep in flight on a lane of the victim.
pub const WINDOW: usize = 16;
/// The tag of the receive that no attacker may match.
const WITNESS: u64 = 0x7769_746E_6573_7321;

/// A session under attack, with memory between two canaries, and its honest peer.
pub struct Scene {
    /// The session under attack.
    pub victim: Host,
    /// Canary, granted bytes, canary: [`GRANTED`] bytes each.
    memory: Memory,
    granted: Region,
    /// The target of what the victim receives, with canaries on either side too.
    inbox: Memory,
    inbox_region: Region,
    bob: RemoteProcess,
    to_bob: Peer,
    insiders: AtomicU64,
}

impl Default for Scene {
    fn default() -> Self {
        Self::new()
    }
}

impl Scene {
    /// Starts both sessions and connects them.
    #[must_use]
    pub fn new() -> Self {
        Self::on(&Setup::lanes4_workers3())
    }

    /// Does what [`Scene::new`] does, with other settings.
    ///
    /// # Panics
    /// When that fails.
    #[must_use]
    pub fn on(setup: &Setup) -> Self {
        let setup = setup.native();
        let victim = Host::open("victim", &setup.with("window", WINDOW));
        let bob = RemoteProcess::open("bob", &setup);
        let to_bob = victim.knows(&bob);
        let guarded = || {
            let memory = Memory::new(3 * GRANTED);
            let region = memory.register_range(&victim.session, GRANTED, GRANTED);
            (memory, region.expect("inside"))
        };
        let ((memory, granted), (inbox, inbox_region)) = (guarded(), guarded());
        let scene = Self {
            victim,
            memory,
            granted,
            inbox,
            inbox_region,
            bob,
            to_bob,
            insiders: AtomicU64::new(1),
        };
        scene.poison();
        scene.honest_peer_goes_on();
        scene
    }

    /// Returns the victim's connection info, which insiders have.
    ///
    /// # Panics
    /// Never: the engine made it.
    #[must_use]
    pub fn info(&self) -> ConnectionInfo {
        ConnectionInfo::decode(&self.victim.session.connection_info()).expect("the victim's info")
    }

    /// Connects to the victim without sending anything.
    #[must_use]
    pub fn dial(&self) -> TcpStream {
        let stream = dial(self.victim.session.addresses()[0]);
        stream.set_nodelay(true).expect("a TCP socket");
        stream
    }

    /// Returns a client that the victim has never seen.
    pub fn stranger(&self) -> Stranger {
        let number = self.insiders.fetch_add(1, Ordering::Relaxed);
        let mut id = Stranger::MALLORY.id;
        id[..8].copy_from_slice(&number.to_le_bytes());
        Stranger {
            id,
            connection: number,
            ..Stranger::MALLORY
        }
    }

    /// Completes the handshake on one lane for a client with the victim's info.
    ///
    /// # Panics
    /// When the victim rejects it.
    #[must_use]
    pub fn insider(&self) -> Insider {
        let mut stream = self.dial();
        let shaken = self.stranger().shake_hands(&mut stream, &self.info());
        shaken.expect("it has the victim's info");
        self.accepted(vec![stream])
    }

    /// Creates an insider from streams that have completed their handshakes.
    ///
    /// # Panics
    /// When the victim does not accept them.
    #[must_use]
    pub fn accepted(&self, lanes: Vec<TcpStream>) -> Insider {
        let session = &self.victim.session;
        let peer = session.accept(GUARD).expect("all lanes are there");
        let target = self.inbox_region.at(0);
        let witness = session.recv(&peer, target, 1, WITNESS).expect("posted");
        Insider {
            lanes,
            peer,
            witness,
        }
    }

    /// Returns the granted bytes.
    ///
    /// # Panics
    /// Never: the engine made the descriptor.
    #[must_use]
    pub fn granted(&self) -> Target {
        Target::of(&self.granted.descriptor())
    }

    /// Returns the registration of the granted bytes.
    #[must_use]
    pub fn region(&self) -> &Region {
        &self.granted
    }

    /// Returns the granted bytes as local memory of the victim.
    #[must_use]
    pub fn local(&self) -> LocalMemory {
        LocalMemory {
            memory: self.memory.clone(),
            region: self.granted.clone(),
        }
    }

    /// Fills all memory with a pattern that nobody writes.
    pub fn poison(&self) {
        self.memory.fill(Content::Byte(LOCAL_POISON));
        self.inbox.fill(Content::Byte(LOCAL_POISON));
    }

    /// Checks that no memory of the victim was written since [`Scene::poison`].
    #[track_caller]
    pub fn unharmed(&self) {
        self.holds(&[]);
    }

    /// Checks every byte: the granted ones hold `landed` (offset, length, content), all others are
    /// unchanged.
    ///
    /// # Panics
    /// When a byte is not as expected.
    #[track_caller]
    pub fn holds(&self, landed: &[(usize, usize, Content)]) {
        let mut expected = Expected::untouched(LOCAL_POISON);
        for (offset, len, content) in landed {
            let start = GRANTED + offset;
            expected = expected.with(start..start + len, *content);
        }
        if let Err(mismatch) = self.memory.check(&expected) {
            panic!("the victim's memory is wrong {mismatch}");
        }
        let untouched = Expected::untouched(LOCAL_POISON);
        if let Err(mismatch) = self.inbox.check(&untouched) {
            panic!("the victim received what nobody sent {mismatch}");
        }
    }

    /// Checks that the honest peer is served as usual.
    #[track_caller]
    pub fn honest_peer_goes_on(&self) {
        let seed = self.insiders.load(Ordering::Relaxed);
        self.victim.verify_traffic(&self.to_bob, &self.bob, seed);
    }

    /// Makes the victim begin a transfer with an insider, from or to the first `len` granted bytes.
    ///
    /// # Panics
    /// When it cannot be posted.
    pub fn begins(&self, op: Op, insider: &Insider, len: usize) -> Transfer {
        let kind = MemoryKind::Host;
        let theirs = RegionDescriptor::new(0x1000, len as u64, RegionKey([7; 16]), kind);
        let theirs = theirs.expect("it does not wrap").encode();
        let theirs = RemoteRegion::from_bytes(&theirs).expect("a descriptor");
        let segment = Segment {
            local: self.granted.at(0),
            remote: theirs.at(0),
            len,
        };
        let transfer = self.victim.session.prepare(op, &insider.peer, [segment]);
        let transfer = transfer.expect("it looks fine from here");
        transfer.post().expect("posted");
        transfer
    }
}

/// Memory that a key grants access to.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Its key.
    pub key: RegionKey,
    /// Its first address.
    pub address: u64,
    /// Its length.
    pub len: u64,
}

impl Target {
    /// Decodes a descriptor.
    ///
    /// # Panics
    /// When it is invalid.
    #[must_use]
    pub fn of(region: &RemoteRegion) -> Self {
        let descriptor = RegionDescriptor::decode(&region.to_bytes()).expect("a descriptor");
        Self {
            key: descriptor.key(),
            address: descriptor.address(),
            len: descriptor.len(),
        }
    }
}

/// Encodes a table.
#[must_use]
pub fn table(keys: &[RegionKey], entries: &[(u64, u32, u32)]) -> Vec<u8> {
    let mut bytes: Vec<u8> = keys.iter().flat_map(|key| key.0).collect();
    for &(address, len, region) in entries {
        Entry {
            address,
            len,
            region,
        }
        .encode(&mut bytes);
    }
    bytes
}

/// Encodes a frame with a table whose lengths add up, and no payload.
///
/// # Panics
/// When there are more keys than a table can have.
#[must_use]
pub fn ask(kind: Kind, id: (u64, u32), keys: &[RegionKey], entries: &[(u64, u32, u32)]) -> Vec<u8> {
    let header = Header {
        regions: keys.len().try_into().expect("few keys"),
        entries: entries.len() as u32,
        seq: id.1,
        payload: entries.iter().map(|(_, len, _)| u64::from(*len)).sum(),
        ..Header::new(kind, id.0)
    };
    let mut bytes = Vec::new();
    header.encode(&mut bytes);
    bytes.extend(table(keys, entries));
    bytes
}

/// Encodes a frame without a table.
#[must_use]
pub fn plain(kind: Kind, id: (u64, u32), payload: &[u8]) -> Vec<u8> {
    let header = Header {
        seq: id.1,
        payload: payload.len() as u64,
        ..Header::new(kind, id.0)
    };
    let mut bytes = Vec::new();
    header.encode(&mut bytes);
    bytes.extend_from_slice(payload);
    bytes
}

/// A client that has completed the handshake and sends arbitrary frames.
pub struct Insider {
    /// Its lanes.
    pub lanes: Vec<TcpStream>,
    /// The victim's handle of it.
    pub peer: Peer,
    witness: Transfer,
}

impl Insider {
    /// Sends bytes on the first lane; the victim may have closed it.
    pub fn send(&mut self, bytes: &[u8]) {
        shout(&mut self.lanes[0], bytes);
    }

    /// Sends bytes on the first lane one by one.
    ///
    /// # Panics
    /// When the victim does not accept them.
    pub fn send_slowly(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.lanes[0].write_all(&[*byte]).expect("taken");
        }
    }

    /// Reads the next frame on the first lane, except pings: on a busy machine the victim may send
    /// one at any moment.
    pub fn frame(&mut self) -> Frame {
        loop {
            let frame = self.frame_on(0);
            if frame.header.kind != Kind::Ping {
                return frame;
            }
        }
    }

    /// Reads the next frame on a lane.
    ///
    /// # Panics
    /// When there is none.
    pub fn frame_on(&mut self, lane: usize) -> Frame {
        let stream = &mut self.lanes[lane];
        let mut bytes = [0; HEADER_BYTES];
        stream.read_exact(&mut bytes).expect("a frame");
        let header = Header::decode(&bytes).expect("a frame");
        let mut part = |len: usize| {
            let mut bytes = vec![0; len];
            stream.read_exact(&mut bytes).expect("the rest of a frame");
            bytes
        };
        Frame {
            header,
            middle: part(header.middle_bytes()),
            payload: part(header.payload_on_wire() as usize),
        }
    }

    /// Returns the frames that the victim sends until it has processed everything before. The
    /// connection continues.
    pub fn sync(&mut self) -> Vec<Frame> {
        self.send(&plain(Kind::Ping, (u64::MAX, 0), &[]));
        let mut before = Vec::new();
        loop {
            let frame = self.frame();
            let header = &frame.header;
            if (header.kind, header.transfer) == (Kind::Pong, u64::MAX) {
                return before;
            }
            before.push(frame);
        }
    }

    /// Waits until the victim has ended the connection; returns the error.
    ///
    /// # Panics
    /// When the connection continues.
    #[track_caller]
    pub fn ended(mut self) -> Error {
        let error = fails(&self.witness);
        self.lanes.iter_mut().for_each(|lane| drop(closed(lane)));
        error
    }

    /// Checks that the victim has ended the connection for this reason.
    ///
    /// # Panics
    /// When it continues, or was ended for another reason.
    #[track_caller]
    pub fn is_ended_for(self, reason: impl Into<Misbehaviour>) {
        let name = self.peer.name().to_owned();
        let expected = Error::PeerMisbehaved {
            peer: name,
            what: reason.into(),
        };
        assert_eq!(self.ended(), expected);
    }
}

/// A frame of the victim.
#[derive(Clone, Debug)]
pub struct Frame {
    /// Its header.
    pub header: Header,
    /// Table and extra.
    pub middle: Vec<u8>,
    /// Payload that followed it.
    pub payload: Vec<u8>,
}

impl Frame {
    /// Returns the chunk that it names.
    #[must_use]
    pub fn id(&self) -> (u64, u32) {
        (self.header.transfer, self.header.seq)
    }
}
