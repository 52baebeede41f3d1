//! Clients with a session's info that are malicious, or do not read: they cost the session little
//! memory, and its other peers nothing.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};

use tcpx::{Error, ErrorKind, LostCause, Op};
use tcpx_proto::descriptor::{RegionDescriptor, RegionKey};
use tcpx_proto::frame::{ENTRY_BYTES, Entry, FLAG_INLINE, HEADER_BYTES, Header, Kind};
use tcpx_proto::info::ConnectionInfo;
use tcpx_testkit::host::{LocalMemory, fails};
use tcpx_testkit::raw::{Stranger, closed, dial, flood, shout};
use tcpx_testkit::remote::RemoteMemory;
use tcpx_testkit::{Content, Copy, Expected, GUARD, Host, RemoteProcess, Setup, story, wait_until};

const MIB: usize = 1 << 20;

/// Maximum memory that an insider may cost, including the overhead of the allocator and of honest
/// traffic. Each of them sends several times as much.
const COST: usize = 64 * MIB;

/// Number of bytes that each of them sends, unless it is stopped.
const FLOOD: usize = 256 * MIB;

/// Bob, an honest peer of his, and memory for their transfers.
struct Stage {
    bob: RemoteProcess,
    alice: Host,
    peer: tcpx::Peer,
    here: LocalMemory,
    there: RemoteMemory,
}

impl Stage {
    fn new(setup: &Setup) -> Self {
        let alice = Host::open("alice", setup);
        let bob = RemoteProcess::open("bob", setup);
        let peer = alice.knows(&bob);
        let (here, there) = (alice.memory(MIB), bob.memory(MIB));
        let stage = Self {
            bob,
            alice,
            peer,
            here,
            there,
        };
        // The memory of the first transfer does not count.
        stage.transfer(0);
        stage
    }

    /// Alice writes to bob and reads it back.
    fn transfer(&self, seed: u64) {
        let Self {
            alice, bob, peer, ..
        } = self;
        let all = [Copy::new(0, 0, MIB)];
        self.here.memory.fill(Content::pattern(seed));
        bob.poison(&self.there);
        alice.run(Op::Write, peer, &self.here, &self.there, &all);
        bob.check(&self.there, &Expected::only(Content::pattern(seed)));
        self.here.poison();
        alice.run(Op::Read, peer, &self.here, &self.there, &all);
        self.here.check(&Expected::only(Content::pattern(seed)));
    }

    fn info(&self) -> ConnectionInfo {
        ConnectionInfo::decode(&self.bob.info()).expect("bob's info")
    }

    /// Returns all lanes of an insider.
    fn insider(&self, stranger: &Stranger) -> Vec<TcpStream> {
        let info = self.info();
        let lane = |lane| {
            let mut stream = dial(self.bob.addresses()[0]);
            let stranger = Stranger {
                lane,
                ..stranger.clone()
            };
            let hands = stranger.shake_hands(&mut stream, &info);
            hands.expect("it has bob's info");
            stream
        };
        (0..stranger.lanes).map(lane).collect()
    }

    /// Lets insiders attack while alice and bob transfer; checks the cost for bob.
    fn survives(&self, what: &str, attack: impl FnOnce() + Send) {
        let before = self.bob.resident_bytes();
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let attack = scope.spawn(|| {
                attack();
                over.store(true, Ordering::Relaxed);
            });
            let mut seed = 1;
            while !over.load(Ordering::Relaxed) && !attack.is_finished() {
                self.transfer(seed);
                let cost = self.bob.resident_bytes().saturating_sub(before);
                assert!(cost < COST, "{what}: {cost} bytes more than before");
                seed += 1;
            }
            attack.join().expect("the attack is over");
        });
        let cost = self.bob.resident_bytes().saturating_sub(before);
        eprintln!("{what}: {} KiB", cost >> 10);
        assert!(cost < COST, "{what}: {cost} bytes more than before");
        self.transfer(0);
    }
}

fn mallory(number: u8) -> Stranger {
    Stranger {
        id: [number; 16],
        ..Stranger::MALLORY
    }
}

fn setup() -> Setup {
    Setup::lanes4_workers3().native()
}

/// Returns about a MiB of complete frames.
fn block(frame: &[u8]) -> Vec<u8> {
    frame.repeat((MIB / frame.len()).max(1))
}

fn notification(message: &[u8]) -> Vec<u8> {
    let header = Header {
        payload: message.len() as u64,
        ..Header::new(Kind::Notify, 0)
    };
    let mut frame = Vec::new();
    header.encode(&mut frame);
    frame.extend_from_slice(message);
    frame
}

/// Returns a header with a table of one region and `entries` times the same range.
fn with_table(kind: Kind, (key, address, len): (RegionKey, u64, u32), entries: u32) -> Vec<u8> {
    let header = Header {
        regions: 1,
        entries,
        payload: u64::from(len) * u64::from(entries),
        ..Header::new(kind, 7)
    };
    let mut frame = Vec::new();
    header.encode(&mut frame);
    frame.extend_from_slice(&key.0);
    for _ in 0..entries {
        let region = 0;
        Entry {
            address,
            len,
            region,
        }
        .encode(&mut frame);
    }
    frame
}

/// Returns the announcement of a message under a tag of its own, with a table as long as there can
/// be.
fn announcement(tag: u64) -> Vec<u8> {
    const INLINE: usize = 8192;
    let entries = (8192 - 16) / ENTRY_BYTES;
    let header = Header {
        flags: FLAG_INLINE,
        regions: 1,
        entries: entries as u32,
        extra: 8,
        payload: INLINE as u64,
        ..Header::new(Kind::Send, tag)
    };
    let mut frame = Vec::new();
    header.encode(&mut frame);
    frame.extend_from_slice(&[9; 16]);
    // The ranges add up to the message.
    for entry in 0..entries {
        Entry {
            address: 4096,
            len: match entry {
                0 => (INLINE - (entries - 1)) as u32,
                _ => 1,
            },
            region: 0,
        }
        .encode(&mut frame);
    }
    frame.extend_from_slice(&tag.to_le_bytes());
    frame.resize(frame.len() + INLINE, 0x77);
    frame
}

#[test]
fn answers_that_an_insider_does_not_read_do_not_pile_up() {
    story(|| {
        let stage = Stage::new(&setup());
        let mut ping = Vec::new();
        Header::new(Kind::Ping, 7).encode(&mut ping);
        let mut sign = Vec::new();
        Header::new(Kind::Ping, 0).encode(&mut sign);
        let key = RegionKey([9; 16]);
        let mut write = with_table(Kind::Write, (key, 4096, 8), 1);
        write.extend([0; 8]);
        let read = with_table(Kind::Read, (key, 4096, 8), 1);
        let attacks = [
            ("pings", ping),
            ("pings for a sign of life", sign),
            ("WRITEs that are refused", write),
            ("READs that are refused", read),
        ];
        for (number, (what, frame)) in attacks.into_iter().enumerate() {
            let stranger = Stranger {
                lanes: 4,
                ..mallory(number as u8 + 1)
            };
            let mut lanes = stage.insider(&stranger);
            let block = block(&frame);
            stage.survives(what, || {
                std::thread::scope(|scope| {
                    for lane in &mut lanes {
                        scope.spawn(|| flood(lane, &block, FLOOD / 4));
                    }
                });
            });
            // It has requested more than it may without reading the answers.
            lanes.iter_mut().for_each(|lane| drop(closed(lane)));
        }
    });
}

/// Requests everything allowed on as many lanes as allowed, and parts of more than that.
#[test]
fn all_that_an_insider_may_ask_for_costs_little() {
    story(|| {
        const LEN: u32 = 2000;
        let stage = Stage::new(&setup().with("peer_timeout", "60s"));
        let descriptor = RegionDescriptor::decode(&stage.there.descriptor.to_bytes());
        let descriptor = descriptor.expect("valid");
        let range = (descriptor.key(), descriptor.address(), LEN);
        // Answers of a MiB, each with a table as long as there can be.
        let mut asked = with_table(Kind::Read, range, 511).repeat(16);
        // After them a notification that never ends.
        let header = Header {
            payload: 7 * MIB as u64,
            ..Header::new(Kind::Notify, 0)
        };
        header.encode(&mut asked);
        asked.resize(asked.len() + 6 * MIB, 7);
        let stranger = Stranger {
            lanes: 64,
            ..mallory(1)
        };
        let mut lanes = stage.insider(&stranger);
        stage.survives("many lanes", || {
            std::thread::scope(|scope| {
                for lane in &mut lanes {
                    scope.spawn(|| flood(lane, &asked, asked.len()));
                }
            });
        });
    });
}

#[test]
fn notifications_that_nobody_reads_do_not_pile_up() {
    story(|| {
        // Long enough that no peer times out while the machine is busy.
        let stage = Stage::new(&setup().with("peer_timeout", "60s"));
        let lengths = [0, 1, 100, 5000, 7 * MIB];
        let mut streams = Vec::new();
        for (number, len) in lengths.into_iter().enumerate() {
            let mut lanes = stage.insider(&mallory(number as u8 + 1));
            let block = block(&notification(&vec![7; len]));
            stage.survives(&format!("notifications of {len} bytes"), || {
                // At some point it is no longer read, but not disconnected.
                let taken = flood(&mut lanes[0], &block, FLOOD);
                assert!(taken < FLOOD, "bob takes everything");
            });
            streams.push(lanes);
        }
        // Insiders that have left cost no more than those that stay.
        drop(streams);
        let leave = |number| {
            let mut lanes = stage.insider(&mallory(number));
            flood(&mut lanes[0], &block(&notification(&[7; 1000])), 16 * MIB);
        };
        stage.survives("notifications of those who have left", || {
            (20..26).for_each(leave)
        });
        // An honest peer is still served, and kept messages are delivered.
        stage
            .alice
            .session
            .notify(&stage.peer, b"end")
            .expect("sent");
        let mut from_alice = Vec::new();
        wait_until("alice is heard", || {
            let heard = stage.bob.notifications().into_iter();
            from_alice.extend(heard.filter(|n| n.from == "alice"));
            !from_alice.is_empty()
        });
        assert_eq!(from_alice[0].message, b"end");
    });
}

#[test]
fn messages_without_a_receive_do_not_pile_up() {
    story(|| {
        let stage = Stage::new(&setup().with("peer_timeout", "60s"));
        let tags = 0..FLOOD as u64 / announcement(0).len() as u64;
        // Each under a tag of its own; short ones too, of which there are more.
        let long: Vec<u8> = tags.clone().take(1000).flat_map(announcement).collect();
        let short: Vec<u8> = (0..20_000u64)
            .flat_map(|tag| {
                let header = Header {
                    extra: 8,
                    ..Header::new(Kind::Send, tag)
                };
                let mut frame = Vec::new();
                header.encode(&mut frame);
                frame.extend_from_slice(&tag.to_le_bytes());
                frame
            })
            .collect();
        for (number, (what, block)) in [("long", long), ("short", short)].into_iter().enumerate() {
            let mut lanes = stage.insider(&mallory(number as u8 + 1));
            stage.survives(what, || {
                let taken = flood(&mut lanes[0], &block, FLOOD);
                assert!(taken < FLOOD, "bob takes everything");
            });
        }
    });
}

/// While bob's application takes nothing, a peer's lane is paused; messages are delivered in order,
/// and once.
#[test]
fn a_sender_learns_that_its_peer_does_not_keep_up() {
    story(|| {
        for setup in [Setup::lanes1_workers1(), Setup::lanes4_workers3()] {
            // Only the code that makes room resumes the lane.
            let setup = setup.with("queue_bytes", "1M").with("peer_timeout", "1h");
            let alice = Host::open("alice", &setup);
            let bob = RemoteProcess::open("bob", &setup);
            let peer = alice.meets(&bob);
            let mut sent = 0;
            let message = |number: u32| {
                let mut message = number.to_le_bytes().to_vec();
                message.resize(1000, 7);
                message
            };
            for _ in 0..3 {
                let error = loop {
                    match alice.session.notify(&peer, &message(sent)) {
                        Ok(()) => sent += 1,
                        Err(error) => break error,
                    }
                };
                assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
                assert!(matches!(error, Error::PeerBehind { ref peer, .. } if peer == "bob"));
                // Bob keeps about his limit, and nothing is lost.
                let heard = bob.next_notifications(sent as usize);
                assert_eq!(heard.len(), sent as usize);
                for (number, notice) in heard.iter().enumerate() {
                    assert!(notice.message == message(number as u32), "{number}");
                }
                sent = 0;
                alice.verify_traffic(&peer, &bob, 1);
            }
        }
    });
}

#[test]
fn who_is_not_listened_to_for_long_is_told_why() {
    story(|| {
        for setup in [Setup::lanes1_workers1(), Setup::lanes4_workers3()] {
            let bobs = setup.with("queue_bytes", "1M").with("peer_timeout", "2s");
            let bob = RemoteProcess::open("bob", &bobs);
            let alice = Host::open("alice", &setup.with("peer_timeout", "60s"));
            let peer = alice.meets(&bob);
            let (here, there) = (alice.memory(MIB), bob.memory(MIB));
            // Waits for bytes that bob requests after what he does not read.
            let message = [7; 10_000];
            let write = alice.endless(Op::Write, &peer, &here, &there.descriptor);
            write.post().expect("posted");
            let told = loop {
                match alice.session.notify(&peer, &message) {
                    Ok(()) => {}
                    Err(error) if error.kind() == ErrorKind::Busy => break fails(&write),
                    Err(error) => break error,
                }
            };
            let Error::PeerLost { cause, .. } = &told else {
                panic!("{told}");
            };
            // Bytes in flight may turn bob's goodbye into a reset.
            let is_told = match cause {
                LostCause::Goodbye(text) => text.contains("does not take the notifications"),
                cause => matches!(cause, LostCause::Io(_) | LostCause::ClosedByPeer),
            };
            assert!(is_told, "{told}");
            // Bob still has the messages that he kept; and a new connection works.
            assert!(!bob.notifications().is_empty());
            alice.verify_traffic(&peer, &bob, 1);
        }
    });
}

#[test]
fn a_notification_that_is_longer_than_bob_keeps_ends_the_connection() {
    story(|| {
        let bob = RemoteProcess::open("bob", &setup().with("queue_bytes", "1M"));
        let alice = Host::open("alice", &setup());
        let peer = alice.meets(&bob);
        peer.connect(GUARD).expect("connected");
        // Alice would keep it.
        alice
            .session
            .notify(&peer, &vec![7; MIB])
            .expect("it is sent");
        wait_until("bob has ended the connection", || !peer.is_connected());
        assert!(bob.notifications().is_empty());
        alice.verify_traffic(&peer, &bob, 1);
    });
}

/// Returns a READ of so many bytes of bob's memory.
fn read_of(memory: &RemoteMemory, bytes: usize) -> Vec<u8> {
    let descriptor = RegionDescriptor::decode(&memory.descriptor.to_bytes()).expect("valid");
    let len = bytes.min(64 * MIB);
    let range = (descriptor.key(), descriptor.address(), len as u32);
    with_table(Kind::Read, range, (bytes / len) as u32)
}

/// Waits until an answer has begun, of which the rest cannot be sent.
fn answer_has_begun(stream: &TcpStream) {
    wait_until("the answer has begun", || {
        let mut bytes = vec![0; HEADER_BYTES + 1];
        stream.peek(&mut bytes).expect("a socket") == bytes.len()
    });
}

#[test]
fn an_answer_that_has_begun_is_what_memory_held_when_it_was_taken_back() {
    story(|| {
        let stage = Stage::new(&setup());
        for (number, bytes) in [MIB, 12 * MIB].into_iter().enumerate() {
            let memory = stage.bob.memory(bytes);
            stage.bob.fill(&memory, Content::Byte(1));
            let mut lanes = stage.insider(&mallory(number as u8 + 1));
            shout(&mut lanes[0], &read_of(&memory, bytes));
            answer_has_begun(&lanes[0]);
            stage.bob.deregister(&memory);
            stage.bob.fill(&memory, Content::Byte(2));
            let mut header = [0; HEADER_BYTES];
            lanes[0].read_exact(&mut header).expect("an answer");
            let header = Header::decode(&header).expect("a frame");
            assert_eq!((header.kind, header.payload), (Kind::Data, bytes as u64));
            let mut answer = vec![0; bytes];
            lanes[0].read_exact(&mut answer).expect("all of it");
            let wrong = answer.iter().position(|byte| *byte != 1);
            assert_eq!(wrong, None, "it was read after it was taken back");
            // The connection works as before.
            shout(&mut lanes[0], &read_of(&stage.there, 100));
            lanes[0]
                .read_exact(&mut [0; HEADER_BYTES + 100])
                .expect("an answer");
        }
        stage.transfer(1);
    });
}

#[test]
fn taking_memory_back_does_not_copy_what_a_peer_is_slow_to_read() {
    story(|| {
        let stage = Stage::new(&setup());
        // One long answer; and several, of which each alone would fit, but not all.
        for (number, (lanes, bytes)) in [(1, 256 * MIB), (6, 12 * MIB)].into_iter().enumerate() {
            let memory = stage.bob.memory(64 * MIB);
            stage.bob.fill(&memory, Content::Byte(1));
            let stranger = Stranger {
                lanes,
                ..mallory(number as u8 + 1)
            };
            let mut lanes = stage.insider(&stranger);
            for lane in &mut lanes {
                lane.write_all(&read_of(&memory, bytes)).expect("asked");
                answer_has_begun(lane);
            }
            stage.survives("answers that nobody reads", || {
                stage.bob.deregister(&memory);
            });
            stage.bob.fill(&memory, Content::Byte(2));
            for mut lane in lanes {
                let answer = closed(&mut lane);
                assert!(answer.len() < bytes, "the connection stays");
                let wrong = answer.iter().skip(HEADER_BYTES).position(|byte| *byte != 1);
                assert_eq!(wrong, None, "it was read after it was taken back");
            }
        }
    });
}
