//! Slow and unresponsive peers.

use std::io::{Read, Write};

use tcpx::Op;
use tcpx_proto::frame::{FLAG_NOTIFY, HEADER_BYTES, Header, Kind, Status};
use tcpx_testkit::attack::{GRANTED, Scene, WINDOW, ask, plain, table};
use tcpx_testkit::host::fails;
use tcpx_testkit::raw::shout;
use tcpx_testkit::{Content, Setup, story};

/// A handshake and frames of every kind mean the same in pieces of one byte.
#[test]
fn one_byte_at_a_time_is_as_good_as_all_at_once() {
    story(|| {
        let scene = Scene::new();
        let granted = scene.granted();
        let mut stream = scene.dial();
        let mut client = scene.stranger().client(&scene.info());
        let mut received = Vec::new();
        while client.established().is_none() {
            while let Some(bytes) = client.poll_transmit() {
                for byte in bytes {
                    stream.write_all(&[byte]).expect("taken");
                }
            }
            let mut byte = [0];
            stream.read_exact(&mut byte).expect("an answer");
            received.push(byte[0]);
            let consumed = client.handle(&received).expect("the victim is honest");
            received.drain(..consumed);
        }
        let mut slow = scene.accepted(vec![stream]);

        // A WRITE in two parts, with a notification.
        let entries = [
            (granted.address + 10, 20, 0),
            (granted.address + 100, 30, 0),
        ];
        let write = Header {
            flags: FLAG_NOTIFY,
            regions: 1,
            entries: 2,
            extra: 5,
            payload: 50,
            ..Header::new(Kind::Write, 1)
        };
        let mut bytes = Vec::new();
        write.encode(&mut bytes);
        bytes.extend(table(&[granted.key], &entries));
        bytes.extend(b"there");
        bytes.extend([0x11; 20]);
        bytes.extend([0x22; 30]);
        slow.send_slowly(&bytes);
        let ack = slow.frame();
        assert_eq!((ack.header.kind, ack.id()), (Kind::Ack, (1, 0)));
        let landed = [
            (10, 20, Content::Byte(0x11)),
            (100, 30, Content::Byte(0x22)),
        ];
        scene.holds(&landed);
        assert_eq!(scene.victim.notification().message, b"there");

        // A READ of it, and messages.
        slow.send_slowly(&ask(Kind::Read, (2, 7), &[granted.key], &entries));
        let data = slow.frame();
        assert_eq!((data.header.kind, data.id()), (Kind::Data, (2, 7)));
        assert_eq!(data.payload, [[0x11; 20].to_vec(), vec![0x22; 30]].concat());
        slow.send_slowly(&plain(Kind::Notify, (0, 0), b"slowly"));
        assert!(slow.sync().is_empty());
        assert_eq!(scene.victim.notification().message, b"slowly");
        scene.holds(&landed);
        scene.honest_peer_goes_on();
    });
}

/// Memory is revoked from a peer that has begun a WRITE and does not continue.
#[test]
fn half_a_payload_holds_no_memory() {
    story(|| {
        let scene = Scene::new();
        let granted = scene.granted();
        let mut slow = scene.insider();
        let entries = [(granted.address, GRANTED as u32, 0)];
        slow.send(&ask(Kind::Write, (1, 0), &[granted.key], &entries));
        slow.send(&[0x11; 1000]);
        scene.honest_peer_goes_on();
        scene.region().deregister().expect("registered");
        // Bytes before may have landed, in their place; bytes from now on do not land anywhere.
        scene.poison();
        slow.send(&[0x22; GRANTED - 1000]);
        let refused = slow.frame();
        assert_eq!(
            (refused.header.kind, refused.id()),
            (Kind::WriteError, (1, 0))
        );
        assert_eq!(refused.header.flags, Status::UnknownRegion as u8);
        scene.unharmed();
        // The same for all later requests.
        slow.send(&ask(Kind::Read, (2, 0), &[granted.key], &entries));
        let refused = slow.frame();
        assert_eq!(
            (refused.header.kind, refused.id()),
            (Kind::ReadError, (2, 0))
        );
        assert_eq!(refused.header.flags, Status::UnknownRegion as u8);
        assert!(slow.sync().is_empty());
        scene.honest_peer_goes_on();
    });
}

/// Answers wait for a peer that does not read them. Memory can still be revoked: an answer that has
/// begun is completed from a copy, others are refused.
#[test]
fn answers_that_wait_do_not_use_memory_that_was_taken_back() {
    story(|| {
        let scene = Scene::on(&Setup::small_buffers());
        let granted = scene.granted();
        let mut slow = scene.insider();
        // 4 MiB, more than such sockets hold: the first answer begins and does not end.
        let entries = [(granted.address, GRANTED as u32, 0); 64];
        for seq in 0..3 {
            slow.send(&ask(Kind::Read, (1, seq), &[granted.key], &entries));
        }
        let mut header = [0; HEADER_BYTES];
        slow.lanes[0].read_exact(&mut header).expect("an answer");
        let header = Header::decode(&header).expect("a frame");
        assert_eq!((header.kind, header.seq), (Kind::Data, 0));
        scene.honest_peer_goes_on();
        scene.region().deregister().expect("registered");
        scene.local().memory.fill(Content::Byte(0x77));
        let mut data = vec![0; header.payload as usize];
        slow.lanes[0].read_exact(&mut data).expect("all of it");
        let later = data.iter().filter(|byte| **byte != 0xA5).count();
        assert_eq!(later, 0, "bytes of an answer were read afterwards");
        for seq in 1..3 {
            let refused = slow.frame();
            assert_eq!(
                (refused.header.kind, refused.id()),
                (Kind::ReadError, (1, seq))
            );
            assert_eq!(refused.header.flags, Status::UnknownRegion as u8);
        }
        assert!(slow.sync().is_empty());
        scene.honest_peer_goes_on();
    });
}

/// Transfers that have not left, because the peer settles none of those before, end with the
/// connection too.
#[test]
fn what_waits_for_the_window_fails_with_its_connection() {
    story(|| {
        let scene = Scene::new();
        for op in [Op::Write, Op::Read] {
            let mut slow = scene.insider();
            let transfers: Vec<_> = (0..WINDOW + 3)
                .map(|_| scene.begins(op, &slow, 100))
                .collect();
            for _ in 0..WINDOW {
                slow.frame();
            }
            let states = transfers.iter().map(tcpx::Transfer::poll);
            assert!(states.into_iter().all(|state| !state.is_terminal()));
            slow.lanes.clear();
            for transfer in &transfers {
                let error = fails(transfer);
                assert_eq!(error.kind(), tcpx::ErrorKind::Disconnected, "{error}");
            }
        }
        scene.unharmed();
        scene.honest_peer_goes_on();
    });
}

/// A lane that is cut in the middle of a frame, at each of its parts.
#[test]
fn a_frame_without_an_end_ends_with_its_connection() {
    story(|| {
        let scene = Scene::new();
        let granted = scene.granted();
        let mut write = ask(
            Kind::Write,
            (1, 0),
            &[granted.key],
            &[(granted.address, 100, 0)],
        );
        write.extend([0x11; 100]);
        for cut in [1, 31, 32, 40, 63, 64, 163] {
            let mut slow = scene.insider();
            slow.send(&write[..cut]);
            slow.lanes[0]
                .shutdown(std::net::Shutdown::Write)
                .expect("open");
            let error = slow.ended();
            assert_eq!(error.kind(), tcpx::ErrorKind::Disconnected, "{error}");
        }
        // Nothing beyond the sent bytes has landed.
        let landed = scene.local().memory.bytes(GRANTED, 100);
        let (before, behind) = landed.split_at(99);
        assert!(before.iter().all(|b| [0x11, 0xA5].contains(b)));
        assert_eq!(behind, [0xA5], "a byte that was never sent");
        scene.local().memory.put(GRANTED, 100, Content::Byte(0xA5));
        scene.unharmed();
        scene.honest_peer_goes_on();
    });
}

/// A peer that answers nothing delays the close of a session for a while. Nobody is accepted
/// meanwhile.
#[test]
fn a_session_that_closes_lets_nobody_in() {
    story(|| {
        let scene = Scene::new();
        let (info, stranger) = (scene.info(), scene.stranger());
        let mut slow = scene.insider();
        std::thread::scope(|scope| {
            let closing = scope.spawn(|| scene.victim.session.close());
            // The session asks whether everything has arrived, and waits for the answer for
            // seconds.
            assert_eq!(slow.frame_on(0).header.kind, Kind::Ping);
            let mut stream = scene.dial();
            let mut client = stranger.client(&info);
            shout(&mut stream, &client.poll_transmit().expect("a hello"));
            let mut said = vec![0; 8];
            // On a busy machine it may have closed by now.
            if stream.read_exact(&mut said).is_ok() {
                assert_eq!(&said[..6], b"TCPX\x02\0", "a ServerHello");
                let len = usize::from(u16::from_le_bytes([said[6], said[7]]));
                said.resize(8 + len, 0);
                stream.read_exact(&mut said[8..]).expect("the rest of it");
                client.handle(&said).expect("the victim is honest");
                shout(&mut stream, &client.poll_transmit().expect("a proof"));
                let mut said = [0; 10];
                if stream.read_exact(&mut said).is_ok() {
                    assert_eq!(&said, b"TCPX\x05\0\x02\0\x05\0", "a Reject");
                }
            }
            slow.lanes.clear();
            closing.join().expect("closed");
        });
    });
}
