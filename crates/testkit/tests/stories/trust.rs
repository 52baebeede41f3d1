//! A client without a session's info gets nothing, one with it gets what the keys allow, and no
//! misbehaviour of one disturbs another.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use tcpx::{AttemptCause, ErrorKind, Op, RemoteRegion, Segment, TransferState};
use tcpx_proto::descriptor::{RegionDescriptor, RegionKey};
use tcpx_proto::frame::{Entry, HEADER_BYTES, Header, Kind, Status};
use tcpx_proto::handshake::{Features, HandshakeError, Offer, RejectCode};
use tcpx_proto::info::ConnectionInfo;
use tcpx_testkit::host::{attempts, fails};
use tcpx_testkit::pattern::REMOTE_POISON;
use tcpx_testkit::raw::{Stranger, closed, dial, shout, with_wrong_secret};
use tcpx_testkit::{
    Content, Copy, Expected, GUARD, Host, RemoteProcess, Setup, on_every_setup, story, wait_until,
};

on_every_setup!(what_the_keys_do_not_allow_is_refused);

/// A session, and an honest peer of it.
struct Stage {
    bob: RemoteProcess,
    alice: Host,
    peer: tcpx::Peer,
}

impl Stage {
    fn new() -> Self {
        let setup = Setup::lanes4_workers3().native();
        let alice = Host::open("alice", &setup);
        let bob = RemoteProcess::open("bob", &setup);
        let peer = alice.knows(&bob);
        Self { bob, alice, peer }
    }

    fn dial(&self) -> TcpStream {
        dial(self.bob.addresses()[0])
    }

    fn info(&self) -> ConnectionInfo {
        ConnectionInfo::decode(&self.bob.info()).expect("bob's info")
    }

    /// Returns an unknown client that bob has accepted.
    fn insider(&self, stranger: &Stranger) -> TcpStream {
        let mut stream = self.dial();
        stranger
            .shake_hands(&mut stream, &self.info())
            .expect("it has bob's info");
        stream
    }

    /// Checks that bob serves alice as usual.
    #[track_caller]
    fn still_works(&self, seed: u64) {
        self.alice.verify_traffic(&self.peer, &self.bob, seed);
    }
}

#[test]
fn who_says_too_little_for_too_long_is_dropped() {
    story(|| {
        let stage = Stage::new();
        let files = stage.bob.open_files();
        let began = Instant::now();
        // One sends nothing, one sends a hello and no more, one sends a byte at a time, one has
        // proven itself but brings one lane of the four it announced.
        let mut silent = stage.dial();
        let mut half = stage.dial();
        let hello = Stranger::MALLORY
            .client(&stage.info())
            .poll_transmit()
            .expect("a hello");
        half.write_all(&hello).expect("bob listens");
        let mut slow = stage.dial();
        let mut lonely = stage.insider(&Stranger {
            lanes: 4,
            ..Stranger::MALLORY
        });
        std::thread::scope(|scope| {
            let dropped = [
                scope.spawn(|| closed(&mut silent)),
                scope.spawn(|| closed(&mut half)),
                scope.spawn(|| closed(&mut lonely)),
                scope.spawn(|| {
                    for byte in hello.iter().cycle() {
                        shout(&mut slow, &[*byte]);
                        std::thread::sleep(Duration::from_millis(60));
                        if began.elapsed() > Duration::from_secs(8) {
                            break;
                        }
                    }
                    closed(&mut slow)
                }),
            ];
            let mut rounds = 0;
            while dropped.iter().any(|d| !d.is_finished()) {
                stage.still_works(rounds);
                rounds += 1;
            }
            let [silent, ..] = dropped.map(|d| d.join().expect("closed"));
            assert!(silent.is_empty(), "bob speaks only when spoken to");
        });
        wait_until("the sockets are gone", || {
            // Four lanes of alice for bulk, and one for small transfers.
            stage.bob.open_files() <= files + 5
        });
        stage.still_works(0);
    });
}

#[test]
fn garbage_is_no_greeting() {
    story(|| {
        let stage = Stage::new();
        stage.still_works(0);
        let files = stage.bob.open_files();
        let mut long = b"TCPX\x01\x00".to_vec();
        long.extend([0xFF; 5000]);
        let noise = Content::pattern(1).to_vec(100_000);
        let garbage: [&[u8]; 8] = [
            b"GET / HTTP/1.1\r\nHost: bob\r\n\r\n",
            &[0; 4096],
            &noise,
            &long,
            b"TCPX\x03\x00\x40\x00",
            b"TCPX\x09\x00\x02\x00\x00\x00",
            b"TCPX\x01\x00\x00\x00",
            b"\x01",
        ];
        for bytes in garbage {
            let mut stream = stage.dial();
            shout(&mut stream, bytes);
            let said = closed(&mut stream);
            // At most a Reject.
            assert!(said.len() <= 10, "{said:02x?}");
            stage.still_works(1);
        }
        // Hundreds of them leave no state behind.
        for _ in 0..300 {
            shout(&mut stage.dial(), b"hello");
        }
        wait_until("the sockets are gone", || stage.bob.open_files() <= files);
        stage.still_works(2);
    });
}

#[test]
fn an_unknown_version_is_rejected() {
    story(|| {
        let stage = Stage::new();
        let mut hello = Stranger::MALLORY
            .client(&stage.info())
            .poll_transmit()
            .expect("a hello");
        // docs/wire-protocol.md: oldest and newest version at offsets 8 and 10.
        assert_eq!(hello[8..12], [1, 0, 1, 0]);
        hello[8..12].copy_from_slice(&[9, 0, 200, 0]);
        let mut stream = stage.dial();
        shout(&mut stream, &hello);
        assert_eq!(closed(&mut stream), b"TCPX\x05\x00\x02\x00\x01\x00");
        stage.still_works(1);
    });
}

#[test]
fn a_wrong_secret_opens_nothing() {
    story(|| {
        let stage = Stage::new();
        let forged = with_wrong_secret(&stage.bob.info());
        // An engine with the wrong secret notices that bob does not know it.
        let carol = Host::open("carol", &Setup::lanes4_workers3());
        let peer = carol.session.add_peer(&forged).expect("well-formed");
        let error = peer.connect(GUARD).expect_err("the secret is wrong");
        assert_eq!(error.kind(), ErrorKind::Disconnected, "{error}");
        for attempt in attempts(error) {
            let cause = AttemptCause::Handshake(HandshakeError::PeerProofWrong);
            assert_eq!(attempt.cause, cause);
        }
        let (here, there) = (carol.memory(100), stage.bob.memory(100));
        stage.bob.poison(&there);
        let transfer = carol.transfer(Op::Write, &peer, &here, &there, &[Copy::new(0, 0, 100)]);
        transfer
            .post_with_notification(b"let me in")
            .expect("posted");
        let error = fails(&transfer);
        assert_eq!(error.kind(), ErrorKind::Disconnected, "{error}");

        // A client that ignores this sends a proof all the same, and bob notices.
        let info = ConnectionInfo::decode(&forged).expect("well-formed");
        let mut stream = stage.dial();
        let error = Stranger::MALLORY
            .shake_hands(&mut stream, &info)
            .expect_err("the secret is wrong");
        assert_eq!(error, HandshakeError::PeerProofWrong);
        closed(&mut stream);

        let mut stream = stage.dial();
        let mut client = Stranger::MALLORY.client(&info);
        let hello = client.poll_transmit().expect("a hello");
        stream.write_all(&hello).expect("bob listens");
        let mut header = [0; 8];
        stream.read_exact(&mut header).expect("a ServerHello");
        assert_eq!(&header[..6], b"TCPX\x02\x00");
        let mut proof = b"TCPX\x03\x00\x40\x00".to_vec();
        proof.extend(Content::pattern(1).to_vec(64));
        // A frame right after it, in case it is read.
        Header::new(Kind::Ping, 1).encode(&mut proof);
        shout(&mut stream, &proof);
        let said = closed(&mut stream);
        let reject = b"TCPX\x05\x00\x02\x00\x03\x00";
        assert!(
            said.ends_with(reject) || !said.windows(4).any(|w| w == b"TCPX"),
            "{said:02x?}"
        );

        stage.bob.check(&there, &Expected::untouched(REMOTE_POISON));
        assert!(stage.bob.notifications().is_empty());
        stage.still_works(1);
        // No other peer has connected.
        assert_eq!(stage.bob.accept(), "alice");
        let accepted = stage
            .bob
            .call::<String>(tcpx_testkit::protocol::Command::Accept {
                timeout: Duration::from_millis(10),
            });
        assert_eq!(accepted.expect_err("nobody").kind(), ErrorKind::Timeout);
    });
}

#[test]
fn somebody_elses_identity_is_not_for_the_taking() {
    story(|| {
        let setup = Setup::lanes4_workers3().native();
        let alice = Host::open("alice", &setup);
        let bob = RemoteProcess::open("bob", &setup);
        let peer = alice.knows(&bob);
        let info = ConnectionInfo::decode(&alice.session.connection_info()).expect("her info");
        let bobs = ConnectionInfo::decode(&bob.info()).expect("bob's info");
        // Mallory has alice's info and claims to be bob, or alice herself.
        for id in [bobs.id(), info.id()] {
            let mut stream = dial(alice.session.addresses()[0]);
            let stranger = Stranger {
                name: "bob",
                id: id.0,
                ..Stranger::MALLORY
            };
            if let Err(error) = stranger.shake_hands(&mut stream, &info) {
                let rejected = matches!(error, HandshakeError::PeerRejected { .. });
                assert!(rejected, "{error}");
            }
            shout(&mut stream, &notification(b"hi"));
            closed(&mut stream);
            assert!(!peer.is_connected());
        }
        alice.verify_traffic(&peer, &bob, 1);
        // Under bob's name with an id of his own he is told that this name is proven, and delivers
        // nothing.
        let mut stream = dial(alice.session.addresses()[0]);
        let stranger = Stranger {
            name: "bob",
            ..Stranger::MALLORY
        };
        stranger.shake_hands(&mut stream, &info).expect("let in");
        shout(&mut stream, &notification(b"hi"));
        let said = closed(&mut stream);
        let said = String::from_utf8_lossy(&said);
        assert!(
            said.contains("knows another session by this name"),
            "{said}"
        );
        alice.verify_traffic(&peer, &bob, 2);
        let by_name = alice.session.peer("bob").expect("bob");
        alice.verify_traffic(&by_name, &bob, 3);
        assert!(alice.session.notifications().is_empty());
    });
}

#[test]
fn an_impostor_is_found_out_when_the_info_is_loaded_later() {
    story(|| {
        let setup = Setup::lanes4_workers3().native();
        let alice = Host::open("alice", &setup);
        let bob = RemoteProcess::open("bob", &setup);
        let info = ConnectionInfo::decode(&alice.session.connection_info()).expect("her info");
        let bobs = ConnectionInfo::decode(&bob.info()).expect("bob's info");
        let known = |name| {
            alice
                .session
                .peers()
                .iter()
                .filter(|p| p.name() == name)
                .count()
        };
        // Alice does not know bob yet, and accepts everybody: two others of his name, one who has
        // taken his id as well, and one who has taken only the id and left.
        let claims = [
            ("bob", [1; 16]),
            ("bob", [2; 16]),
            ("bobby", bobs.id().0),
            ("bob", bobs.id().0),
        ];
        let mut impostors = Vec::new();
        for (name, id) in claims {
            let stranger = Stranger {
                name,
                id,
                ..Stranger::MALLORY
            };
            let mut stream = dial(alice.session.addresses()[0]);
            stranger.shake_hands(&mut stream, &info).expect("let in");
            shout(&mut stream, &notification(b"forged"));
            shout(&mut stream, &frame(Header::new(Kind::Ping, 7), &[], 0));
            let mut pong = [0; HEADER_BYTES];
            stream.read_exact(&mut pong).expect("it was delivered");
            if name == "bobby" {
                drop(stream);
                wait_until("it has left", || known("bobby") == 0);
            } else {
                impostors.push(stream);
            }
        }
        // And bob himself, who reclaims his id.
        bob.knows(&alice);
        bob.notify("alice", b"real");
        wait_until("the last one has gone", || {
            impostors[2].set_nonblocking(true).expect("a socket");
            let end = impostors[2].read(&mut [0; 100]);
            !matches!(end, Err(e) if e.kind() == std::io::ErrorKind::WouldBlock)
        });
        let peer = alice.knows(&bob);
        for mut stream in impostors.drain(..2) {
            shout(&mut stream, &notification(b"forged again"));
            closed(&mut stream);
        }
        alice.verify_traffic(&peer, &bob, 1);
        bob.notify("alice", b"end");
        let mut heard = Vec::new();
        wait_until("bob was heard", || {
            heard.extend(alice.session.notifications());
            heard.last().is_some_and(|n| n.message == b"end")
        });
        // Unproven messages do not come under a proven name.
        let of_bob = heard.iter().filter(|n| n.from == "bob");
        let of_bob: Vec<_> = of_bob.map(|n| n.message.as_slice()).collect();
        assert_eq!(of_bob, [&b"real"[..], b"end"]);
        assert_eq!(known("bob"), 1);
    });
}

#[test]
fn three_hundred_idle_connections_keep_nobody_out() {
    story(|| {
        let stage = Stage::new();
        let idle: Vec<_> = (0..300).map(|_| stage.dial()).collect();
        stage.still_works(1);
        // Another peer, too.
        let carol = Host::open("carol", &Setup::lanes4_workers3().native());
        let peer = carol.knows(&stage.bob);
        carol.verify_traffic(&peer, &stage.bob, 2);
        drop(idle);
        stage.still_works(3);
    });
}

/// Returns a notification on its own.
fn notification(message: &[u8]) -> Vec<u8> {
    let header = Header {
        payload: message.len() as u64,
        ..Header::new(Kind::Notify, 0)
    };
    let mut bytes = frame(header, &[], 0);
    bytes.extend_from_slice(message);
    bytes
}

/// Returns a frame that carries `payload` zero bytes.
fn frame(header: Header, table: &[u8], payload: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    header.encode(&mut bytes);
    bytes.extend_from_slice(table);
    bytes.resize(bytes.len() + payload, 0x77);
    bytes
}

fn table(key: RegionKey, address: u64, len: u32) -> Vec<u8> {
    let mut bytes = key.0.to_vec();
    let entry = Entry {
        address,
        len,
        region: 0,
    };
    entry.encode(&mut bytes);
    bytes
}

#[test]
fn an_insider_who_breaks_the_protocol_is_dropped() {
    story(|| {
        let stage = Stage::new();
        stage.still_works(0);
        let memory = stage.bob.memory(1000);
        stage.bob.poison(&memory);
        let descriptor = RegionDescriptor::decode(&memory.descriptor.to_bytes()).expect("valid");
        let (key, address) = (descriptor.key(), descriptor.address());
        let one = |kind| Header {
            regions: 1,
            entries: 1,
            payload: 100,
            ..Header::new(kind, 7)
        };
        let write = one(Kind::Write);
        let bad: Vec<(&str, Vec<u8>)> = vec![
            ("noise", Content::pattern(1).to_vec(100_000)),
            ("zeroes", vec![0; 64]),
            ("an unknown kind", vec![0xEE; 64]),
            (
                "a WRITE without a table",
                frame(
                    Header {
                        payload: 10,
                        ..Header::new(Kind::Write, 1)
                    },
                    &[],
                    10,
                ),
            ),
            (
                "a table that is too long",
                frame(
                    Header {
                        entries: u32::MAX,
                        ..write
                    },
                    &[],
                    100,
                ),
            ),
            (
                "a payload that is too long",
                frame(
                    Header {
                        payload: u64::MAX,
                        ..write
                    },
                    &table(key, address, 100),
                    100,
                ),
            ),
            (
                "lengths that do not add up",
                frame(write, &table(key, address, 99), 100),
            ),
            (
                "an address that wraps",
                frame(write, &table(key, u64::MAX - 5, 100), 100),
            ),
            (
                "an answer to nothing",
                frame(
                    Header {
                        payload: 10,
                        ..Header::new(Kind::Data, 1)
                    },
                    &[],
                    10,
                ),
            ),
            (
                "an error for nothing",
                frame(Header::new(Kind::ReadError, 1), &[], 0),
            ),
            (
                "an error for no WRITE",
                frame(Header::new(Kind::WriteError, 1), &[], 0),
            ),
            (
                "an acknowledgement of nothing",
                frame(Header::new(Kind::Ack, 5), &[], 0),
            ),
            (
                "a notification without end",
                frame(
                    Header {
                        payload: 1 << 40,
                        ..Header::new(Kind::Notify, 1)
                    },
                    &[],
                    100,
                ),
            ),
            (
                "a tagged message without a tag",
                frame(Header::new(Kind::Send, 1), &[], 0),
            ),
            ("more READ requests than the window", {
                // Larger than the socket buffers: the answers stay in the queue.
                let request = frame(one(Kind::Read), &table(key, address, 100), 0);
                request.repeat(5000)
            }),
            ("more WRITE chunks than the window", {
                // Refused, each with a text: the replies stay in the queue.
                let chunk = frame(
                    one(Kind::Write),
                    &table(RegionKey([9; 16]), address, 100),
                    100,
                );
                chunk.repeat(50_000)
            }),
        ];
        for (number, (what, bytes)) in bad.into_iter().enumerate() {
            eprintln!("mallory sends {what}");
            let stranger = Stranger {
                connection: number as u64,
                ..Stranger::MALLORY
            };
            let mut stream = stage.insider(&stranger);
            shout(&mut stream, &bytes);
            closed(&mut stream);
            stage
                .bob
                .check(&memory, &Expected::untouched(REMOTE_POISON));
            stage.still_works(number as u64);
        }
        assert!(stage.bob.notifications().is_empty());
    });
}

#[test]
fn an_insider_without_a_key_gets_an_answer_and_no_more() {
    story(|| {
        let stage = Stage::new();
        let memory = stage.bob.memory(1000);
        stage.bob.poison(&memory);
        let descriptor = RegionDescriptor::decode(&memory.descriptor.to_bytes()).expect("valid");
        let (key, address) = (descriptor.key(), descriptor.address());
        let mut stream = stage.insider(&Stranger::MALLORY);
        let wrong = RegionKey([9; 16]);
        let answer = |stream: &mut TcpStream| {
            let mut bytes = [0; HEADER_BYTES];
            stream.read_exact(&mut bytes).expect("a frame");
            let header = Header::decode(&bytes).expect("a frame");
            let mut payload = vec![0; header.payload_on_wire() as usize];
            stream.read_exact(&mut payload).expect("its payload");
            (header, payload)
        };
        let cases = [
            (wrong, address, Status::UnknownRegion),
            (key, address + 901, Status::OutOfBounds),
            (key, address - 1, Status::OutOfBounds),
            (key, 0, Status::OutOfBounds),
        ];
        for (seq, (key, address, status)) in cases.into_iter().enumerate() {
            let header = Header {
                regions: 1,
                entries: 1,
                seq: seq as u32,
                payload: 100,
                ..Header::new(Kind::Write, 1)
            };
            shout(&mut stream, &frame(header, &table(key, address, 100), 100));
            // An error settles the chunk that it names.
            let (error, text) = answer(&mut stream);
            assert_eq!((error.kind, error.flags), (Kind::WriteError, status as u8));
            assert_eq!((error.transfer, error.seq), (1, seq as u32));
            assert!(!text.is_empty());

            let header = Header {
                kind: Kind::Read,
                ..header
            };
            shout(&mut stream, &frame(header, &table(key, address, 100), 0));
            let (error, _) = answer(&mut stream);
            assert_eq!((error.kind, error.flags), (Kind::ReadError, status as u8));
            assert_eq!((error.transfer, error.seq), (1, seq as u32));
        }
        stage
            .bob
            .check(&memory, &Expected::untouched(REMOTE_POISON));
        // With the right one it works, on the same connection.
        let header = Header {
            regions: 1,
            entries: 1,
            seq: 77,
            payload: 100,
            ..Header::new(Kind::Write, 2)
        };
        shout(
            &mut stream,
            &frame(header, &table(key, address + 900, 100), 100),
        );
        let (ack, _) = answer(&mut stream);
        assert_eq!((ack.kind, ack.transfer, ack.seq), (Kind::Ack, 2, 77));
        let expected = Expected::untouched(REMOTE_POISON);
        let expected = expected.with(900..1000, Content::Byte(0x77));
        stage.bob.check(&memory, &expected);
        stage.still_works(1);
    });
}

#[test]
fn every_chunk_is_acknowledged_once_and_by_its_name() {
    story(|| {
        const WINDOW: u32 = 16;
        let stage = Stage::new();
        let memory = stage.bob.memory(1000);
        let descriptor = RegionDescriptor::decode(&memory.descriptor.to_bytes()).expect("valid");
        let (key, address) = (descriptor.key(), descriptor.address());
        let mut stream = stage.insider(&Stranger::MALLORY);
        for transfer in [3, 1, 2] {
            let chunk = |seq| {
                let header = Header {
                    regions: 1,
                    entries: 1,
                    seq,
                    payload: 100,
                    ..Header::new(Kind::Write, transfer)
                };
                frame(header, &table(key, address, 100), 100)
            };
            // As many as the window allows, all at once and in random order.
            let numbers = (0..WINDOW).map(|i| i * 7 % WINDOW);
            let chunks: Vec<u8> = numbers.flat_map(chunk).collect();
            shout(&mut stream, &chunks);
            let mut acknowledged: Vec<_> = (0..WINDOW)
                .map(|_| {
                    let mut bytes = [0; HEADER_BYTES];
                    stream
                        .read_exact(&mut bytes)
                        .expect("an Ack for each chunk");
                    let ack = Header::decode(&bytes).expect("a frame");
                    assert_eq!((ack.kind, ack.transfer), (Kind::Ack, transfer));
                    ack.seq
                })
                .collect();
            acknowledged.sort_unstable();
            assert_eq!(acknowledged, (0..WINDOW).collect::<Vec<_>>());
        }
        stage.still_works(1);
    });
}

#[test]
fn a_version_or_session_that_is_not_there_is_said_so() {
    story(|| {
        let stage = Stage::new();
        let info = stage.info();
        let other = ConnectionInfo::new(
            info.name().clone(),
            tcpx_proto::info::SessionId([3; 16]),
            info.secret().clone(),
            info.addresses().to_vec(),
        );
        let mut stream = stage.dial();
        let error = Stranger::MALLORY
            .shake_hands(&mut stream, &other.expect("the same parts"))
            .expect_err("no such session");
        let code = RejectCode::UnknownSession;
        assert_eq!(error, HandshakeError::PeerRejected { code });
        stage.still_works(1);
    });
}

#[test]
fn only_who_has_proven_itself_is_reported_as_unfit() {
    story(|| {
        let path = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("unfit-strangers.log");
        let file = std::fs::File::create(&path).expect("a place for files of tests");
        let mut command = std::process::Command::new(tcpx_testkit::remote::binary());
        command
            .env("TCPX_LOG", "tcpx=warn")
            .env("NO_COLOR", "1")
            .stderr(file);
        let bob = RemoteProcess::spawn("bob", command);
        bob.reopen(&Setup::lanes1_workers1().native());
        let warnings = || {
            let log = std::fs::read_to_string(&path).expect("written");
            log.matches("turned a connection away").count()
        };
        let info = ConnectionInfo::decode(&bob.info()).expect("bob's info");
        let unfit = |connection| Stranger {
            connection,
            offer: Offer::new(Features::COMMS, Features::COMMS).expect("offered"),
            ..Stranger::MALLORY
        };

        // Without the secret: it gets the same answer as every unknown client.
        let forged = with_wrong_secret(&bob.info());
        let forged = ConnectionInfo::decode(&forged).expect("connection info");
        let mut stream = dial(bob.addresses()[0]);
        let mut hello = unfit(0).client(&forged);
        shout(&mut stream, &hello.poll_transmit().expect("a hello"));
        let mut proof = b"TCPX\x03\0\x40\0".to_vec();
        proof.extend([7; 64]);
        shout(&mut stream, &proof);
        let said = closed(&mut stream);
        assert!(said.ends_with(b"TCPX\x05\0\x02\0\x03\0"), "{said:?}");
        assert_eq!(warnings(), 0);

        // With it: it is told what is missing. The lanes of a connection cause one warning.
        for (connection, warned) in [(1, 1), (1, 1), (2, 2)] {
            let mut stream = dial(bob.addresses()[0]);
            let error = unfit(connection)
                .shake_hands(&mut stream, &info)
                .expect_err("bob has native lanes");
            let HandshakeError::PeerIncompatible { missing } = error else {
                panic!("{error}");
            };
            assert_eq!(missing.server_lacks(), Features::COMMS);
            assert_eq!(missing.client_lacks(), Features::NONE);
            let told = b"TCPX\x05\0\x0a\0\x07\0\0\0\0\0\x02\0\0\0";
            assert_eq!(closed(&mut stream), told);
            // Another thread writes the log.
            wait_until("it was written", || warnings() >= warned);
            assert_eq!(warnings(), warned);
        }
    });
}

fn what_the_keys_do_not_allow_is_refused(setup: &Setup) {
    const LEN: usize = 100_000;
    let alice = Host::open("alice", setup);
    let bob = RemoteProcess::open("bob", setup);
    let peer = alice.knows(&bob);
    // All of bob's memory, a part of it that alice may use, and one that she may no longer use.
    let whole = bob.memory(LEN + 2000);
    let part = bob.register(&whole, 1000, LEN);
    let gone = bob.register(&whole, 500, LEN);
    bob.deregister(&gone);
    let here = alice.memory(LEN);
    let real = RegionDescriptor::decode(&part.descriptor.to_bytes()).expect("valid");
    let descriptor = |address, len, key| {
        let made =
            RegionDescriptor::new(address, len, key, real.memory()).expect("it does not wrap");
        RemoteRegion::from_bytes(&made.encode()).expect("a descriptor")
    };
    let (address, key) = (real.address(), real.key());
    let mut wrong = key;
    wrong.0[15] ^= 1;
    let len = LEN as u64;
    let lies = [
        ("a wrong key", descriptor(address, len, wrong), 0, 100),
        (
            "the key of nothing",
            descriptor(address, len, RegionKey([0; 16])),
            0,
            100,
        ),
        (
            "one byte past the end",
            descriptor(address, len + 1, key),
            LEN - 99,
            100,
        ),
        (
            "one byte of many past the end",
            descriptor(address, len + 1, key),
            LEN - 9999,
            10_000,
        ),
        (
            "far past the end",
            descriptor(address, 1 << 40, key),
            1 << 39,
            100,
        ),
        (
            "one byte before the start",
            descriptor(address - 1, len, key),
            0,
            100,
        ),
        (
            "one byte of many before the start",
            descriptor(address - 1, len, key),
            0,
            10_000,
        ),
        ("address zero", descriptor(0, len, key), 0, 100),
        (
            "another region's range",
            descriptor(address - 1000, len, key),
            0,
            100,
        ),
        ("what was deregistered", gone.descriptor.clone(), 0, LEN),
    ];
    for (what, region, offset, len) in &lies {
        for op in [Op::Write, Op::Read] {
            bob.poison(&whole);
            here.poison();
            // Alone, and beside a valid segment: nothing of the chunk may land.
            let lie = Segment {
                local: here.region.at(0),
                remote: region.at(*offset),
                len: *len,
            };
            let fine = Segment {
                local: here.region.at(0),
                remote: part.descriptor.at(50),
                len: 10,
            };
            let lists = if *len > 10_000 {
                // Several chunks: the valid one would land.
                vec![vec![lie]]
            } else {
                vec![vec![lie], vec![fine, lie], vec![lie, fine]]
            };
            for segments in lists {
                let transfer = alice.session.prepare(op, &peer, segments);
                let transfer = transfer.expect("it looks fine from here");
                transfer.post_with_notification(b"never").expect("posted");
                let error = fails(&transfer);
                assert_eq!(error.kind(), ErrorKind::Refused, "{op:?}, {what}: {error}");
                assert_eq!(transfer.poll(), TransferState::Failed);
            }
            bob.check(&whole, &Expected::untouched(REMOTE_POISON));
            here.check_untouched();
        }
    }
    assert!(bob.notifications().is_empty());
    // The connection has survived all of it.
    assert_eq!(bob.accept(), "alice");
    let copies = [Copy::new(0, 0, LEN)];
    here.memory.fill(Content::pattern(1));
    alice.run(Op::Write, &peer, &here, &part, &copies);
    let expected = Expected::untouched(REMOTE_POISON);
    bob.check(
        &whole,
        &expected.with(1000..LEN + 1000, Content::pattern(1)),
    );
    let again = bob.call::<String>(tcpx_testkit::protocol::Command::Accept {
        timeout: Duration::from_millis(1),
    });
    assert_eq!(again.expect_err("only one").kind(), ErrorKind::Timeout);

    // Of a long range that ends one byte too late the valid chunks may land, and nothing beyond the
    // region does.
    bob.poison(&whole);
    let lie = descriptor(address, len + 1, key);
    let transfer = alice.transfer_to(Op::Write, &peer, &here, &lie, &[Copy::new(0, 1, LEN)]);
    transfer.post().expect("posted");
    assert_eq!(fails(&transfer).kind(), ErrorKind::Refused);
    let bytes = bob.bytes(&whole);
    let (before, behind) = (&bytes[..1001], &bytes[LEN + 1000..]);
    let untouched = |bytes: &[u8]| bytes.iter().all(|b| *b == REMOTE_POISON);
    assert!(untouched(before) && untouched(behind));
}
