//! Peers that send false statements.

use std::net::TcpStream;

use tcpx::{ErrorKind, Op, TransferState};
use tcpx_proto::descriptor::RegionKey;
use tcpx_proto::frame::{Entry, Header, Kind, Status};
use tcpx_proto::handshake::{HandshakeError, RejectCode};
use tcpx_proto::info::{ConnectionInfo, Name, Secret, SessionId};
use tcpx_proto::lane::{ChunkId, Violation};
use tcpx_testkit::attack::{GRANTED, Insider, Scene, Target, ask, plain};
use tcpx_testkit::host::{done, fails};
use tcpx_testkit::raw::{closed, shout};
use tcpx_testkit::story::GUARD;
use tcpx_testkit::{Content, story};

fn chunk((transfer, seq): (u64, u32)) -> ChunkId {
    ChunkId { transfer, seq }
}

/// Settles a WRITE of the victim that was never sent, was already settled, or with a frame for
/// READs.
#[test]
fn a_write_is_settled_once_and_by_its_name() {
    story(|| {
        let scene = Scene::new();
        type Lie = fn((u64, u32)) -> (Kind, (u64, u32));
        let lies: [Lie; 8] = [
            |(transfer, seq)| (Kind::Ack, (transfer, seq + 1)),
            |(transfer, seq)| (Kind::Ack, (transfer + 1, seq)),
            |(transfer, _)| (Kind::Ack, (transfer, u32::MAX)),
            |_| (Kind::Ack, (u64::MAX, 0)),
            |(transfer, seq)| (Kind::WriteError, (transfer, seq + 1)),
            |id| (Kind::ReadError, id),
            |id| (Kind::Data, id),
            |(_, seq)| (Kind::Ack, (0, seq)),
        ];
        for lie in lies {
            let mut liar = scene.insider();
            let transfer = scene.begins(Op::Write, &liar, 1000);
            let write = liar.frame();
            assert_eq!(write.header.kind, Kind::Write);
            let (kind, id) = lie(write.id());
            liar.send(&plain(kind, id, &[]));
            let peer = liar.peer.name().to_owned();
            liar.is_ended_for(Violation::NotInFlight {
                id: chunk(id),
                kind,
            });
            let error = fails(&transfer);
            assert_eq!(
                error.kind(),
                ErrorKind::ProtocolViolation,
                "{peer}: {error}"
            );
        }
        // Twice: the transfer is done, and stays so.
        for second in [Kind::Ack, Kind::WriteError] {
            let mut liar = scene.insider();
            let transfer = scene.begins(Op::Write, &liar, 1000);
            let id = liar.frame().id();
            liar.send(&plain(Kind::Ack, id, &[]));
            done(&transfer);
            liar.send(&plain(second, id, &[]));
            let violation = Violation::NotInFlight {
                id: chunk(id),
                kind: second,
            };
            liar.is_ended_for(violation);
            assert_eq!(transfer.poll(), TransferState::Done);
        }
        scene.unharmed();
        scene.honest_peer_goes_on();
    });
}

/// Answers a READ of the victim with a wrong number of bytes. None of them lands.
#[test]
fn an_answer_of_another_length_does_not_land() {
    story(|| {
        const LEN: usize = 1000;
        let scene = Scene::new();
        let honest = |id: (u64, u32)| plain(Kind::Data, id, &[0x33; LEN]);
        for found in [0, 1, LEN - 1, LEN + 1, 3 * GRANTED, 256 << 20] {
            let mut liar = scene.insider();
            let transfer = scene.begins(Op::Read, &liar, LEN);
            let id = liar.frame().id();
            let header = Header {
                seq: id.1,
                payload: found as u64,
                ..Header::new(Kind::Data, id.0)
            };
            let mut bytes = Vec::new();
            header.encode(&mut bytes);
            bytes.resize(bytes.len() + found.min(4 * GRANTED), 0x66);
            liar.send(&bytes);
            liar.is_ended_for(Violation::WrongLength {
                id: chunk(id),
                expected: LEN as u64,
                found: found as u64,
            });
            assert_eq!(fails(&transfer).kind(), ErrorKind::ProtocolViolation);
            scene.unharmed();
        }
        // Data for unrequested chunks, and an acknowledgement of a READ.
        for (kind, other) in [(Kind::Data, 1), (Kind::Data, u32::MAX), (Kind::Ack, 0)] {
            let mut liar = scene.insider();
            let transfer = scene.begins(Op::Read, &liar, LEN);
            let id = liar.frame().id();
            let named = (id.0, id.1.wrapping_add(other));
            let payload: &[u8] = if kind == Kind::Data {
                &[0x66; LEN]
            } else {
                &[]
            };
            liar.send(&plain(kind, named, payload));
            let id = chunk(named);
            liar.is_ended_for(Violation::NotInFlight { id, kind });
            assert_eq!(fails(&transfer).kind(), ErrorKind::ProtocolViolation);
            scene.unharmed();
        }
        // Twice: the first answer stays.
        let mut liar = scene.insider();
        let transfer = scene.begins(Op::Read, &liar, LEN);
        let id = liar.frame().id();
        liar.send(&honest(id));
        done(&transfer);
        liar.send(&plain(Kind::Data, id, &[0x66; LEN]));
        let (id, kind) = (chunk(id), Kind::Data);
        liar.is_ended_for(Violation::NotInFlight { id, kind });
        scene.holds(&[(0, LEN, Content::Byte(0x33))]);
        scene.honest_peer_goes_on();
    });
}

/// The bytes of an aborted READ are dropped.
#[test]
fn an_answer_that_nobody_waits_for_any_more_does_not_land() {
    story(|| {
        const LEN: usize = 1000;
        let scene = Scene::new();
        let mut liar = scene.insider();
        let transfer = scene.begins(Op::Read, &liar, LEN);
        let id = liar.frame().id();
        transfer.abort();
        liar.send(&plain(Kind::Data, id, &[0x66; LEN]));
        assert!(liar.sync().is_empty());
        assert_eq!(fails(&transfer).kind(), ErrorKind::Aborted);
        scene.unharmed();
        // Begun before the abort: the rest is dropped.
        let transfer = scene.begins(Op::Read, &liar, LEN);
        let answer = plain(Kind::Data, liar.frame().id(), &[0x66; LEN]);
        let (begin, rest) = answer.split_at(132);
        liar.send(begin);
        scene.honest_peer_goes_on();
        transfer.abort();
        scene.poison();
        liar.send(rest);
        assert!(liar.sync().is_empty());
        assert_eq!(fails(&transfer).kind(), ErrorKind::Aborted);
        scene.unharmed();
        scene.honest_peer_goes_on();
    });
}

/// Two lanes of one connection.
fn two_lanes(scene: &Scene) -> Insider {
    let mut stranger = scene.stranger();
    stranger.lanes = 2;
    let lanes = [0, 1].map(|lane| {
        stranger.lane = lane;
        let mut stream = scene.dial();
        let shaken = stranger.shake_hands(&mut stream, &scene.info());
        shaken.expect("it has the victim's info");
        stream
    });
    scene.accepted(lanes.into())
}

/// A chunk is settled on the lane that it travelled on.
#[test]
fn a_chunk_is_not_settled_on_another_lane() {
    story(|| {
        let scene = Scene::new();
        for (op, kind) in [(Op::Write, Kind::Ack), (Op::Read, Kind::Data)] {
            let mut liar = two_lanes(&scene);
            let transfer = scene.begins(op, &liar, 1000);
            // The chunk is on one of them.
            let mut ready = 0;
            tcpx_testkit::wait_until("the chunk is there", || {
                ready = usize::from(!has_bytes(&liar.lanes[0]));
                has_bytes(&liar.lanes[ready])
            });
            let id = liar.frame_on(ready).id();
            let payload: &[u8] = if op == Op::Read { &[0x66; 1000] } else { &[] };
            shout(&mut liar.lanes[1 - ready], &plain(kind, id, payload));
            let id = chunk(id);
            liar.is_ended_for(Violation::NotInFlight { id, kind });
            assert_eq!(fails(&transfer).kind(), ErrorKind::ProtocolViolation);
        }
        scene.unharmed();
        scene.honest_peer_goes_on();
    });
}

fn has_bytes(stream: &TcpStream) -> bool {
    stream.set_nonblocking(true).expect("a TCP socket");
    let has = stream.peek(&mut [0]).is_ok_and(|count| count > 0);
    stream.set_nonblocking(false).expect("a TCP socket");
    has
}

/// The victim's announcement of a message that is too long to be inline.
fn announcement(liar: &mut Insider) -> (u64, Target) {
    let frame = liar.frame();
    let header = frame.header;
    assert_eq!((header.kind, header.flags), (Kind::Send, 0));
    assert_eq!((header.regions, header.entries), (1, 1));
    let key = RegionKey(frame.middle[..16].try_into().expect("a key"));
    let word = |at: usize| u64::from_le_bytes(frame.middle[at..at + 8].try_into().expect("8"));
    let target = Target {
        key,
        address: word(16),
        len: word(24) & u64::from(u32::MAX),
    };
    (header.transfer, target)
}

/// The key of a tagged message opens its bytes for reading, until the send has ended.
#[test]
fn the_key_of_a_message_ends_with_it() {
    story(|| {
        const LEN: usize = 20_000;
        let scene = Scene::new();
        let session = &scene.victim.session;
        let mut liar = scene.insider();
        let region = scene.region();
        let send = |liar: &Insider| {
            let sent = session.send(&liar.peer, region.at(1000), LEN, 7);
            sent.expect("posted")
        };
        let read = |liar: &mut Insider, seq: u32, entry: (u64, u32), key: RegionKey| {
            let entries = [(entry.0, entry.1, 0)];
            liar.send(&ask(Kind::Read, (1, seq), &[key], &entries));
            let answer = liar.frame();
            assert_eq!(answer.id(), (1, seq));
            answer
        };
        let refused = |liar: &mut Insider, seq: u32, message: &Target| {
            let entry = (message.address, 8);
            let answer = read(liar, seq, entry, message.key);
            assert_eq!(answer.header.kind, Kind::ReadError);
            assert_eq!(answer.header.flags, Status::UnknownRegion as u8);
        };

        // Read, ended by the receiver, and closed.
        let first = send(&liar);
        let (id, message) = announcement(&mut liar);
        assert_eq!(message.len, LEN as u64);
        let whole = (message.address, LEN as u32);
        let data = read(&mut liar, 0, whole, message.key);
        assert_eq!(data.header.kind, Kind::Data);
        assert!(data.payload.iter().all(|byte| *byte == 0xA5));
        // Neither more than the message, nor for writing.
        for (address, len) in [(message.address - 1, 8), (whole.0, LEN as u32 + 1)] {
            let answer = read(&mut liar, 1, (address, len), message.key);
            assert_eq!(answer.header.kind, Kind::ReadError);
            assert_eq!(answer.header.flags, Status::OutOfBounds as u8);
        }
        let entries = [(message.address, 8, 0)];
        let mut write = ask(Kind::Write, (2, 0), &[message.key], &entries);
        write.extend([0x66; 8]);
        liar.send(&write);
        assert_eq!(liar.frame().header.kind, Kind::WriteError);
        liar.send(&plain(Kind::SendDone, (id, 0), &[]));
        done(&first);
        refused(&mut liar, 2, &message);

        // Refused by the receiver.
        let second = send(&liar);
        let (id, message) = announcement(&mut liar);
        let header = Header {
            flags: Status::Truncated as u8,
            ..Header::new(Kind::SendDone, id)
        };
        let mut bytes = Vec::new();
        header.encode_with_text(&mut bytes, "too long");
        liar.send(&bytes);
        assert_eq!(fails(&second).kind(), ErrorKind::Truncated);
        refused(&mut liar, 3, &message);

        // Aborted by the sender.
        let third = send(&liar);
        let (_, message) = announcement(&mut liar);
        third.abort();
        assert_eq!(fails(&third).kind(), ErrorKind::Aborted);
        refused(&mut liar, 4, &message);

        // Lost with the connection: the key is invalid on another one.
        let fourth = send(&liar);
        let (_, message) = announcement(&mut liar);
        liar.lanes.clear();
        assert_eq!(fails(&fourth).kind(), ErrorKind::Disconnected);
        let mut another = scene.insider();
        refused(&mut another, 5, &message);
        scene.unharmed();
        scene.honest_peer_goes_on();
    });
}

/// The end of a message that was never sent ends nothing.
#[test]
fn messages_end_by_their_names_alone() {
    story(|| {
        let scene = Scene::new();
        let (mut liar, mut other) = (scene.insider(), scene.insider());
        let region = scene.region();
        let session = &scene.victim.session;
        let send = session.send(&liar.peer, region.at(0), 20_000, 7);
        let send = send.expect("posted");
        let (id, _) = announcement(&mut liar);
        for unknown in [0, id - 1, id + 1, u64::MAX] {
            liar.send(&plain(Kind::SendDone, (unknown, 0), &[]));
        }
        assert!(liar.sync().is_empty());
        // The right name from another peer does not either.
        other.send(&plain(Kind::SendDone, (id, 0), &[]));
        assert!(other.sync().is_empty());
        assert_eq!(send.poll(), TransferState::InProgress);
        liar.send(&plain(Kind::SendDone, (id, 0), &[]));
        done(&send);
        liar.send(&plain(Kind::SendDone, (id, 0), &[]));
        assert!(liar.sync().is_empty());
        scene.unharmed();
        scene.honest_peer_goes_on();
    });
}

/// An announced message that does not exist fails its receive, and gives no access to memory of the
/// victim.
#[test]
fn an_announcement_of_nothing_fails_its_receive_alone() {
    story(|| {
        const LEN: usize = 20_000;
        let scene = Scene::new();
        let session = &scene.victim.session;
        let mut liar = scene.insider();
        let receive = session
            .recv(&liar.peer, scene.region().at(0), LEN, 7)
            .expect("posted");
        let header = Header {
            regions: 1,
            entries: 1,
            extra: 8,
            ..Header::new(Kind::Send, 5)
        };
        let mut bytes = Vec::new();
        header.encode(&mut bytes);
        // The address of the victim's own memory: it must ask the liar all the same.
        bytes.extend(scene.granted().key.0);
        let entry = Entry {
            address: scene.granted().address,
            len: LEN as u32,
            region: 0,
        };
        entry.encode(&mut bytes);
        bytes.extend(7u64.to_le_bytes());
        liar.send(&bytes);
        let read = liar.frame();
        assert_eq!(read.header.kind, Kind::Read);
        let id = read.id();
        let refusal = Header {
            flags: Status::UnknownRegion as u8,
            seq: id.1,
            ..Header::new(Kind::ReadError, id.0)
        };
        let mut bytes = Vec::new();
        refusal.encode_with_text(&mut bytes, "never existed");
        liar.send(&bytes);
        assert_eq!(fails(&receive).kind(), ErrorKind::Refused);
        let told = liar.frame();
        assert_eq!(
            (told.header.kind, told.header.transfer),
            (Kind::SendDone, 5)
        );
        assert!(liar.sync().is_empty());
        scene.unharmed();
        scene.honest_peer_goes_on();
    });
}

/// A client that has overheard the number of a connection adds a lane to it, under the name of its
/// owner.
#[test]
fn a_lane_of_another_session_does_not_join_a_connection() {
    story(|| {
        let scene = Scene::new();
        let info = scene.info();
        let owner = tcpx_testkit::raw::Stranger {
            name: "owner",
            lanes: 2,
            ..scene.stranger()
        };
        let known = ConnectionInfo::new(
            Name::new(owner.name).expect("a name"),
            SessionId(owner.id),
            Secret::new(owner.secret),
            vec![([127, 0, 0, 1], 9).into()],
        );
        let known = known.expect("an info").encode();
        let shake = |connection, lane, secret| {
            let mut stream = scene.dial();
            let stranger = tcpx_testkit::raw::Stranger {
                connection,
                lane,
                secret,
                ..owner.clone()
            };
            let shaken = stranger.shake_hands(&mut stream, &info);
            shaken.map(|_| stream)
        };
        let foreign = [0x11; 32];
        // Before the victim can know the owners: when it does, the connection ends.
        let session = &scene.victim.session;
        for (connection, secrets) in [(70, [owner.secret, foreign]), (71, [foreign, owner.secret])]
        {
            let lanes = [0, 1].map(|lane| {
                let lane = shake(connection, lane, secrets[usize::from(lane)]);
                lane.expect("it has the victim's info")
            });
            session.accept(GUARD).expect("both lanes are there");
            session.add_peer(&known).expect("an info");
            for mut lane in lanes {
                closed(&mut lane);
            }
            session.remove_peer(owner.name).expect("known");
        }
        // Afterwards they are refused here.
        session.add_peer(&known).expect("an info");
        let error = shake(72, 1, foreign).expect_err("not the owner");
        let code = RejectCode::BadProof;
        assert_eq!(error, HandshakeError::PeerRejected { code });
        let lanes = [0, 1].map(|lane| shake(73, lane, owner.secret).expect("its owner"));
        let lanes = Vec::from(lanes);
        let mut insider = scene.accepted(lanes);
        assert!(insider.sync().is_empty());
        assert_eq!(insider.peer.name(), "owner");
        drop(insider);
        scene.unharmed();
        scene.honest_peer_goes_on();
    });
}

/// Lanes that their connection does not have, or already has.
#[test]
fn a_lane_that_does_not_fit_its_connection_is_turned_away() {
    story(|| {
        let scene = Scene::new();
        let info = scene.info();
        // docs/wire-protocol.md: lane and lanes are at offsets 52 and 54.
        for (lane, lanes) in [(1u16, 1u16), (u16::MAX, 1), (0, 0), (7, 7)] {
            let mut hello = scene.stranger().client(&info);
            let mut hello = hello.poll_transmit().expect("a hello");
            assert_eq!(hello[52..56], [0, 0, 1, 0]);
            hello[52..54].copy_from_slice(&lane.to_le_bytes());
            hello[54..56].copy_from_slice(&lanes.to_le_bytes());
            let mut stream = scene.dial();
            shout(&mut stream, &hello);
            assert_eq!(closed(&mut stream), b"TCPX\x05\0\x02\0\x06\0");
        }
        // More lanes than allowed.
        let mut many = scene.stranger();
        many.lanes = u16::MAX;
        let error = many
            .shake_hands(&mut scene.dial(), &info)
            .expect_err("too many");
        let code = RejectCode::TooMany;
        assert_eq!(error, HandshakeError::PeerRejected { code });

        // The same lane twice, and one with another number of lanes: the connection waits for the
        // right one.
        let mut stranger = scene.stranger();
        stranger.lanes = 2;
        let shake = |lane, lanes| {
            let mut stream = scene.dial();
            let stranger = tcpx_testkit::raw::Stranger {
                lane,
                lanes,
                ..stranger.clone()
            };
            let shaken = stranger.shake_hands(&mut stream, &info);
            shaken.expect("it has the victim's info");
            stream
        };
        let first = shake(0, 2);
        closed(&mut shake(0, 2));
        closed(&mut shake(1, 3));
        closed(&mut shake(2, 3));
        let timeout = std::time::Duration::ZERO;
        let early = scene.victim.session.accept(timeout);
        assert!(early.is_err(), "accepted without its second lane");
        let mut insider = scene.accepted(vec![first, shake(1, 2)]);
        assert!(insider.sync().is_empty());
        // The other lane is reserved for small transfers.
        assert_eq!(insider.peer.lanes().len(), 1);
        drop(insider);
        scene.unharmed();
        scene.honest_peer_goes_on();
    });
}

/// Handshake messages that come from the wrong side, or after the handshake.
#[test]
fn what_the_other_side_would_say_is_not_taken() {
    story(|| {
        let scene = Scene::new();
        let hello = scene.stranger().client(&scene.info()).poll_transmit();
        let hello = hello.expect("a hello");
        // A server's hello, proof before hello, ready, a reject without need: all to a server.
        let mut answer = b"TCPX\x02\0\x57\0".to_vec();
        answer.resize(8 + 0x57, 1);
        let mut proof = b"TCPX\x03\0\x40\0".to_vec();
        proof.resize(72, 1);
        let ready = b"TCPX\x04\0\0\0".to_vec();
        let twice = [hello.clone(), hello.clone()].concat();
        for wrong in [answer, proof, ready, twice] {
            let mut stream = scene.dial();
            shout(&mut stream, &wrong);
            let said = closed(&mut stream);
            assert!(said.ends_with(b"TCPX\x05\0\x02\0\x06\0"), "{said:x?}");
        }
        let mut stream = scene.dial();
        shout(&mut stream, b"TCPX\x05\0\x02\0\x04\0");
        assert_eq!(closed(&mut stream), b"", "a Reject is not answered");
        // After the handshake a hello is a frame of an unknown kind.
        let mut liar = scene.insider();
        liar.send(&hello);
        liar.is_ended_for(tcpx_proto::frame::FrameError::UnknownKind(b'T'));
        // Comms on a lane that is in use.
        let mut liar = scene.insider();
        liar.send(&plain(Kind::Comm, (0, 0), &[]));
        liar.is_ended_for(Violation::LateComm);
        // A goodbye ends the connection, whatever follows it.
        let mut liar = scene.insider();
        let Target { key, address, .. } = scene.granted();
        let mut bytes = plain(Kind::Goodbye, (0, 0), b"so long");
        bytes.extend(ask(Kind::Write, (1, 0), &[key], &[(address, 8, 0)]));
        bytes.extend([0x66; 8]);
        liar.send(&bytes);
        let error = liar.ended();
        assert_eq!(error.kind(), ErrorKind::Disconnected);
        assert!(error.to_string().contains("so long"), "{error}");
        scene.unharmed();
        scene.honest_peer_goes_on();
        // No connection is left in the accept queue.
        assert!(
            scene
                .victim
                .session
                .accept(std::time::Duration::ZERO)
                .is_err()
        );
    });
}
