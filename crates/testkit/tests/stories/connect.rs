//! Connecting: lazily, explicitly, both sides at once, many at a time, and without success.

use std::net::SocketAddr;
use std::time::Duration;

use tcpx::{AttemptCause, Error, ErrorKind, LostCause, Op};
use tcpx_proto::handshake::{HandshakeError, RejectCode};
use tcpx_proto::info::ConnectionInfo;
use tcpx_testkit::host::{attempts, done, fails, lost, wait_for_traffic};
use tcpx_testkit::pattern::REMOTE_POISON;
use tcpx_testkit::protocol::Command;
use tcpx_testkit::story::skipped;
use tcpx_testkit::{
    Content, Copy, Expected, GUARD, Host, REMOTE_GUARD, RemoteProcess, Setup, on_every_setup,
    story, wait_until,
};

on_every_setup!(
    the_first_transfer_connects,
    connecting_is_explicit_and_idempotent,
    a_peer_that_was_only_accepted_is_a_peer_like_any_other,
    after_a_disconnect_the_next_transfer_connects_anew,
);

fn the_first_transfer_connects(setup: &Setup) {
    let alice = Host::open("alice", setup);
    let bob = RemoteProcess::open("bob", setup);
    let peer = alice.knows(&bob);
    assert_eq!(peer.name(), "bob");
    assert!(!peer.is_connected());
    assert!(peer.lanes().is_empty());

    alice.verify_traffic(&peer, &bob, 1);
    assert!(peer.is_connected());
    assert_eq!(peer.lanes().len(), alice.session.config().lanes());
    assert_eq!(bob.accept(), "alice");
    assert!(bob.is_connected("alice"));
}

fn connecting_is_explicit_and_idempotent(setup: &Setup) {
    let alice = Host::open("alice", setup);
    let bob = RemoteProcess::open("bob", setup);
    let peer = alice.knows(&bob);
    peer.connect(GUARD).expect("bob listens");
    assert!(peer.is_connected());
    let lanes = peer.lanes();
    assert_eq!(lanes.len(), alice.session.config().lanes());
    for lane in &lanes {
        assert!(lane.remote.ip().is_loopback(), "{lane:?}");
        assert!(bob.addresses().contains(&lane.remote), "{lane:?}");
        peer.round_trip(lane.index, GUARD).expect("a pong");
    }

    peer.connect(GUARD).expect("connected already");
    let again = alice.session.add_peer(&bob.info()).expect("the same info");
    again.connect(GUARD).expect("connected already");
    let ports = |lanes: &[tcpx::LaneInfo]| lanes.iter().map(|l| l.local).collect::<Vec<_>>();
    assert_eq!(ports(&peer.lanes()), ports(&lanes), "no new connection");
    assert_eq!(alice.session.peers().len(), 1);
    assert_eq!(bob.accept(), "alice");
    alice.verify_traffic(&peer, &bob, 2);
}

fn a_peer_that_was_only_accepted_is_a_peer_like_any_other(setup: &Setup) {
    let alice = Host::open("alice", setup);
    let bob = RemoteProcess::open("bob", setup);
    bob.knows(&alice);
    let pending = bob.begin::<()>(Command::Connect {
        peer: "alice".into(),
        timeout: REMOTE_GUARD,
    });
    let peer = alice.session.accept(GUARD).expect("bob connects");
    pending.get();
    assert_eq!(peer.name(), "bob");
    assert!(peer.is_connected());
    // Alice never got bob's info and uses the connection that he made.
    alice.verify_traffic(&peer, &bob, 3);

    // Once it is gone she cannot reach him.
    bob.disconnect("alice");
    wait_until("alice has noticed", || !peer.is_connected());
    let error = peer.connect(GUARD).expect_err("no info");
    assert_eq!(error, Error::PeerNotConnected("bob".into()));

    // Until she gets his info.
    let peer = alice.knows(&bob);
    alice.verify_traffic(&peer, &bob, 4);
}

fn after_a_disconnect_the_next_transfer_connects_anew(setup: &Setup) {
    let alice = Host::open("alice", setup);
    let bob = RemoteProcess::open("bob", setup);
    let peer = alice.meets(&bob);
    for round in 0..5 {
        alice.verify_traffic(&peer, &bob, round);
        if round % 2 == 0 {
            peer.disconnect();
        } else {
            bob.disconnect("alice");
        }
        wait_until("both have noticed", || {
            !peer.is_connected() && !bob.is_connected("alice")
        });
    }
}

#[test]
fn both_sides_connect_at_once() {
    story(|| {
        let setup = Setup::lanes4_workers3();
        let bob = RemoteProcess::open("bob", &setup);
        for round in 0..50 {
            bob.reopen(&setup);
            let alice = Host::open("alice", &setup);
            let peer = alice.meets(&bob);
            let (here, there) = (alice.memory(100_000), bob.memory(100_000));
            here.memory.fill(Content::pattern(round));
            bob.poison(&there);

            if round % 2 == 0 {
                // Explicitly.
                let theirs = bob.begin::<()>(Command::Connect {
                    peer: "alice".into(),
                    timeout: REMOTE_GUARD,
                });
                peer.connect(GUARD).expect("bob listens");
                theirs.get();
            }
            // Lazily in odd rounds: both post and leave connecting to the engine.
            let back = alice.memory(100_000);
            back.poison();
            let theirs = bob.transfer(
                Op::Read,
                "alice",
                &there,
                &here.region.descriptor(),
                &[Copy::new(0, 0, 50_000)],
            );
            let ours = alice.transfer(
                Op::Write,
                &peer,
                &here,
                &there,
                &[Copy::new(50_000, 50_000, 50_000)],
            );
            let posted = theirs.begin_post(Some(b"from bob"));
            ours.post_with_notification(b"from alice").expect("posted");
            posted.get();
            done(&ours);
            theirs.wait().expect("bob's READ");
            bob.check(&there, &Expected::only(Content::pattern(round)));

            let notice = alice.notification();
            assert_eq!((&*notice.from, &*notice.message), ("bob", &b"from bob"[..]));
            let notice = bob.notification();
            assert_eq!(
                (&*notice.from, &*notice.message),
                ("alice", &b"from alice"[..])
            );
            assert!(alice.session.notifications().is_empty(), "exactly once");
            assert!(bob.notifications().is_empty(), "exactly once");
            assert!(peer.is_connected() && bob.is_connected("alice"));
            alice.session.close();
        }
    });
}

#[test]
fn order_is_kept_when_both_sides_connect_at_once() {
    story(|| {
        const COUNT: u32 = 200;
        let setup = Setup::lanes4_workers3();
        let bob = RemoteProcess::open("bob", &setup);
        for round in 0..30 {
            bob.reopen(&setup);
            let alice = Host::open("alice", &setup);
            let peer = alice.meets(&bob);
            let memory = bob.memory(COUNT as usize * 4);
            let (here, there) = (alice.memory(COUNT as usize * 4), &memory);
            // Receives of one tag are matched in the order in which the messages were sent.
            let receives: Vec<_> = (0..COUNT as usize)
                .map(|i| {
                    let target = here.region.at(4 * i);
                    alice.session.recv(&peer, target, 4, 7).expect("posted")
                })
                .collect();
            let mut pending = Vec::new();
            for i in 0..COUNT {
                let bytes = i.to_le_bytes().to_vec();
                pending.push(bob.begin::<serde_json::Value>(Command::SetBytes {
                    memory: there.id(),
                    offset: 4 * i as usize,
                    bytes: bytes.clone(),
                }));
                pending.push(bob.begin(Command::Send {
                    peer: "alice".into(),
                    region: there.region_id(),
                    offset: 4 * i as usize,
                    len: 4,
                    tag: 7,
                }));
                pending.push(bob.begin(Command::Notify {
                    peer: "alice".into(),
                    message: bytes,
                }));
                alice.session.notify(&peer, &i.to_le_bytes()).expect("sent");
            }
            for answer in pending {
                answer.get();
            }
            for receive in &receives {
                done(receive);
            }
            let number = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().expect("4 bytes"));
            let all: Vec<u32> = (0..COUNT).collect();
            let received: Vec<u32> = (0..COUNT as usize)
                .map(|i| number(&here.memory.bytes(4 * i, 4)))
                .collect();
            assert_eq!(received, all, "tagged messages of one tag, round {round}");
            let notices = alice.next_notifications(COUNT as usize);
            let heard: Vec<u32> = notices.iter().map(|n| number(&n.message)).collect();
            assert_eq!(heard, all, "notifications to alice, round {round}");
            let notices = bob.next_notifications(COUNT as usize);
            let heard: Vec<u32> = notices.iter().map(|n| number(&n.message)).collect();
            assert_eq!(heard, all, "notifications to bob, round {round}");
            alice.session.close();
        }
    });
}

#[test]
fn a_session_with_32_peers() {
    story(|| {
        const PEERS: usize = 32;
        const LEN: usize = 1 << 20;
        // A hundred threads may share few cores: the duration of a single wait does not matter.
        let setup = Setup::lanes4_workers3().with("peer_timeout", "40s");
        let hub = Host::open("hub", &setup);
        let names: Vec<_> = (0..PEERS).map(|i| format!("spoke-{i}")).collect();
        let spokes: Vec<_> = names
            .iter()
            .map(|n| RemoteProcess::open(n, &setup))
            .collect();
        let peers: Vec<_> = spokes.iter().map(|s| hub.meets(s)).collect();
        let there: Vec<_> = spokes.iter().map(|s| s.memory(LEN)).collect();
        let here = hub.memory(PEERS * LEN);
        here.memory.fill(Content::pattern(32));
        for (spoke, memory) in spokes.iter().zip(&there) {
            spoke.poison(memory);
        }

        // A WRITE to each at the same time, each with a notification, and each of them writes back.
        let inbox = hub.memory(PEERS * 1000);
        inbox.poison();
        let writes: Vec<_> = (0..PEERS)
            .map(|i| {
                let copies = [Copy::new(i * LEN, 0, LEN)];
                hub.transfer(Op::Write, &peers[i], &here, &there[i], &copies)
            })
            .collect();
        for (i, write) in writes.iter().enumerate() {
            write
                .post_with_notification(format!("for {i}").as_bytes())
                .expect("posted");
        }
        for write in &writes {
            done(write);
        }
        for (i, spoke) in spokes.iter().enumerate() {
            let notice = spoke.notification();
            let expected = format!("for {i}");
            assert_eq!(
                (&*notice.from, &*notice.message),
                ("hub", expected.as_bytes())
            );
            let expected = Expected::only(Content::pattern(32).skip(i * LEN));
            spoke.check(&there[i], &expected);
            spoke.fill(&there[i], Content::pattern(100 + i as u64));
        }
        let descriptor = inbox.region.descriptor();
        let theirs: Vec<_> = spokes
            .iter()
            .enumerate()
            .map(|(i, spoke)| {
                let copies = [Copy::new(0, i * 1000, 1000)];
                spoke.transfer(Op::Write, "hub", &there[i], &descriptor, &copies)
            })
            .collect();
        let posted: Vec<_> = theirs.iter().map(|t| t.begin_post(Some(b"hi"))).collect();

        // Meanwhile a READ from each.
        here.poison();
        let reads: Vec<_> = (0..PEERS)
            .map(|i| {
                let copies = [Copy::new(i * LEN, 0, LEN)];
                hub.transfer(Op::Read, &peers[i], &here, &there[i], &copies)
            })
            .collect();
        for read in &reads {
            read.post().expect("posted");
        }
        for read in &reads {
            done(read);
        }
        for post in posted {
            post.get();
        }
        for transfer in &theirs {
            transfer.wait().expect("a spoke's WRITE");
        }
        let mut expected = Expected::untouched(REMOTE_POISON);
        let mut expected_inbox = expected.clone();
        for i in 0..PEERS {
            let content = Content::pattern(100 + i as u64);
            expected.put(i * LEN, LEN, content);
            expected_inbox.put(i * 1000, 1000, content);
        }
        here.check(&expected);
        inbox.check(&expected_inbox);
        let mut from: Vec<_> = hub
            .next_notifications(PEERS)
            .into_iter()
            .map(|n| n.from)
            .collect();
        from.sort();
        let mut all = names.clone();
        all.sort();
        assert_eq!(from, all, "one notification from each");
        assert_eq!(hub.session.peers().len(), PEERS);

        // Half of them are removed, the others stay.
        for name in &names[..PEERS / 2] {
            hub.session.remove_peer(name).expect("it is there");
        }
        assert_eq!(hub.session.peers().len(), PEERS / 2);
        hub.verify_traffic(&peers[PEERS - 1], &spokes[PEERS - 1], 7);
    });
}

#[test]
fn nobody_listens_at_a_dead_address() {
    story(|| {
        let setup = Setup::lanes4_workers3();
        let alice = Host::open("alice", &setup);
        let bob = RemoteProcess::open("bob", &setup);
        let peer = alice.knows(&bob);
        let (here, there) = (alice.memory(1000), bob.memory(1000));
        let addresses = bob.addresses();
        bob.kill();

        let error = peer.connect(GUARD).expect_err("nobody is there");
        assert_eq!(error.kind(), ErrorKind::Disconnected, "{error}");
        let refused = AttemptCause::Io(std::io::ErrorKind::ConnectionRefused.into());
        let mut tried = Vec::new();
        for attempt in attempts(error) {
            assert_eq!(attempt.cause, refused);
            tried.push(attempt.address);
        }
        assert!(
            addresses.iter().all(|address| tried.contains(address)),
            "{tried:?} of {addresses:?}"
        );

        let transfer = alice.transfer(Op::Write, &peer, &here, &there, &[Copy::new(0, 0, 9)]);
        transfer.post_with_notification(b"never").expect("posted");
        let error = fails(&transfer);
        assert_eq!(error.kind(), ErrorKind::Disconnected, "{error}");
        let error = transfer.error().expect("it is kept");
        assert_eq!(error.kind(), ErrorKind::Disconnected, "{error}");
    });
}

/// Returns an info with other addresses.
fn with_addresses(info: &[u8], addresses: Vec<SocketAddr>) -> Vec<u8> {
    let info = ConnectionInfo::decode(info).expect("info");
    let (name, id, secret) = (info.name().clone(), info.id(), info.secret().clone());
    let info = ConnectionInfo::new(name, id, secret, addresses);
    info.expect("usable addresses").encode()
}

#[test]
fn one_good_address_is_enough() {
    story(|| {
        let setup = Setup::lanes4_workers3();
        let bob = RemoteProcess::open("bob", &setup);
        // Nobody listens at the first two.
        let dead = ["127.0.0.77:9", "127.0.0.78:9"].map(|a| a.parse().expect("an address"));
        for good in bob.addresses() {
            let alice = Host::open("alice", &setup);
            let info = with_addresses(&bob.info(), vec![dead[0], dead[1], good]);
            let peer = alice.session.add_peer(&info).expect("valid info");
            peer.connect(GUARD).expect("the third one is good");
            assert!(peer.lanes().iter().all(|l| l.remote == good));
            alice.verify_traffic(&peer, &bob, 1);
        }
    });
}

#[test]
fn ipv6_is_as_good_as_ipv4() {
    story(|| {
        let setup = Setup::lanes4_workers3();
        let alice = Host::open("alice", &setup);
        let bob = RemoteProcess::open("bob", &setup);
        let mut addresses = bob.addresses();
        addresses.retain(SocketAddr::is_ipv6);
        if addresses.is_empty() {
            skipped("loopback has no IPv6 address here");
            return;
        }
        let info = with_addresses(&bob.info(), addresses);
        let peer = alice.session.add_peer(&info).expect("valid info");
        alice.verify_traffic(&peer, &bob, 1);
        assert!(
            peer.lanes()
                .iter()
                .all(|l| l.remote.is_ipv6() && l.local.is_ipv6())
        );
    });
}

#[test]
fn stale_info_is_told_apart_from_a_dead_address() {
    story(|| {
        let setup = Setup::lanes1_workers1();
        let alice = Host::open("alice", &setup);
        let bob = RemoteProcess::open("bob", &setup);
        let port = bob.addresses()[0].port();
        let on_port = setup.with("listen_port", port);
        bob.reopen(&on_port);
        let stale = bob.info();
        bob.reopen(&on_port);
        assert_eq!(bob.addresses()[0].port(), port);

        let old = alice.session.add_peer(&stale).expect("valid info");
        let error = old.connect(GUARD).expect_err("another session is there");
        assert_eq!(error.kind(), ErrorKind::Disconnected, "{error}");
        let code = RejectCode::UnknownSession;
        let cause = AttemptCause::Handshake(HandshakeError::PeerRejected { code });
        for attempt in attempts(error) {
            assert_eq!(attempt.cause, cause);
        }

        let new = alice.knows(&bob);
        alice.verify_traffic(&new, &bob, 1);
    });
}

#[test]
fn a_frozen_process_does_not_answer_in_time() {
    story(|| {
        let setup = Setup::lanes4_workers3().with("connect_timeout", "1s");
        let alice = Host::open("alice", &setup);
        let bob = RemoteProcess::open("bob", &setup);
        let peer = alice.knows(&bob);
        bob.freeze();
        // The caller's timeout: it learns the state of the attempt …
        let address = bob.addresses()[0];
        wait_until("the caller learns what was tried", || {
            let error = peer.connect(Duration::from_millis(50));
            match error.expect_err("bob is frozen") {
                tcpx::Error::NotReachedInTime { attempts, .. } => {
                    attempts.iter().any(|attempt| attempt.address == address)
                }
                error => {
                    assert_eq!(error.kind(), ErrorKind::Disconnected, "{error}");
                    false
                }
            }
        });
        // … and the engine's timeout.
        let error = peer.connect(GUARD).expect_err("bob is frozen");
        assert_eq!(error.kind(), ErrorKind::Disconnected, "{error}");
        for attempt in attempts(error) {
            // His kernel has accepted the connection.
            assert_eq!(attempt.cause, AttemptCause::HandshakeTimedOut);
        }
        bob.thaw();
        // He is running; whether a second is enough depends on the machine.
        let carol = Host::open("carol", &Setup::lanes4_workers3());
        carol.verify_traffic(&carol.knows(&bob), &bob, 1);
        wait_until("bob answers in time", || peer.connect(GUARD).is_ok());
        alice.verify_traffic(&peer, &bob, 2);
    });
}

#[test]
fn a_removed_peer_is_gone_until_it_is_added_again() {
    story(|| {
        let setup = Setup::lanes4_workers3();
        let alice = Host::open("alice", &setup);
        let bob = RemoteProcess::open("bob", &setup);
        let peer = alice.knows(&bob);
        let (here, there) = (alice.memory(1 << 20), bob.memory(1 << 20));
        let transfer = alice.endless(Op::Write, &peer, &here, &there.descriptor);
        transfer.post().expect("posted");
        wait_for_traffic(&peer);

        alice.session.remove_peer("bob").expect("he is there");
        assert_eq!(fails(&transfer), lost("bob", LostCause::Removed));
        assert!(alice.session.peer("bob").is_none());
        let error = alice.session.remove_peer("bob").expect_err("he is gone");
        assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
        let error = transfer.post().expect_err("he is gone");
        assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
        wait_until("bob has noticed", || !bob.is_connected("alice"));

        let peer = alice.knows(&bob);
        alice.verify_traffic(&peer, &bob, 1);
    });
}

#[test]
fn whoever_hears_from_a_peer_can_answer_it() {
    story(|| {
        let setup = Setup::lanes4_workers3();
        let alice = Host::open("alice", &setup);
        let bob = RemoteProcess::open("bob", &setup);
        // Bob never got alice's info: her connection is his only way to her.
        let peer = alice.knows(&bob);
        for round in 0..300_u32 {
            let heard = bob.begin::<serde_json::Value>(Command::WaitNotification {
                timeout: REMOTE_GUARD,
            });
            let answered = bob.begin::<()>(Command::Notify {
                peer: "alice".into(),
                message: b"here I am".to_vec(),
            });
            alice
                .session
                .notify(&peer, b"where are you?")
                .expect("sent");
            heard.get();
            if let Err(error) = answered.result() {
                panic!("round {round}: bob was spoken to and cannot answer: {error}");
            }
            assert_eq!(alice.notification().message, b"here I am");
            peer.disconnect();
            wait_until("bob has noticed", || !bob.is_connected("alice"));
        }
    });
}

#[test]
fn connections_leave_nothing_behind() {
    story(|| {
        let setup = Setup::lanes4_workers3();
        let alice = RemoteProcess::open("alice", &setup);
        let bob = RemoteProcess::open("bob", &setup);
        alice.knows_info(&bob.info());
        bob.knows_info(&alice.info());
        let (here, there) = (alice.memory(1 << 20), bob.memory(1 << 20));
        let files = (alice.open_files(), bob.open_files());
        for round in 0..30 {
            let transfer = alice.endless(Op::Write, "bob", &here, &there.descriptor, 1 << 20);
            transfer.post().expect("posted");
            wait_until("both are connected", || {
                alice.is_connected("bob") && bob.is_connected("alice")
            });
            match round % 3 {
                0 => bob.disconnect("alice"),
                1 => alice.disconnect("bob"),
                _ => {
                    // Both at once.
                    let peer = "alice".to_owned();
                    let pending = bob.begin::<()>(Command::Disconnect { peer });
                    alice.disconnect("bob");
                    pending.get();
                }
            }
            let error = transfer.wait().expect_err("disconnected");
            assert_eq!(error.kind(), ErrorKind::Disconnected, "{error}");
            transfer.release();
            wait_until("both have noticed", || {
                !alice.is_connected("bob") && !bob.is_connected("alice")
            });
        }
        wait_until("the sockets are gone", || {
            (alice.open_files(), bob.open_files()) == files
        });
    });
}

#[test]
fn nothing_waits_for_a_frozen_peer() {
    story(|| {
        // A caller that waited would wait for an hour.
        let setup = Setup::lanes4_workers3().with("peer_timeout", "1h");
        let alice = Host::open("alice", &setup);
        let bob = RemoteProcess::open("bob", &setup);
        let (here, there) = (alice.memory(1 << 20), bob.memory(1 << 20));
        let endless = |op| {
            let peer = alice.knows(&bob);
            let transfer = alice.endless(op, &peer, &here, &there.descriptor);
            transfer.post().expect("posted");
            wait_for_traffic(&peer);
            bob.freeze();
            (peer, transfer)
        };
        let (peer, transfer) = endless(Op::Write);
        peer.disconnect();
        assert_eq!(fails(&transfer), lost("bob", LostCause::Disconnected));
        // Transfers that wait for a connection end, too.
        transfer.post().expect("posted");
        peer.disconnect();
        assert_eq!(fails(&transfer), lost("bob", LostCause::Disconnected));
        bob.thaw();
        let (_, transfer) = endless(Op::Read);
        alice.session.remove_peer("bob").expect("he is there");
        assert_eq!(fails(&transfer), lost("bob", LostCause::Removed));
        bob.thaw();
        let (peer, transfer) = endless(Op::Write);
        let waiting = alice.session.send(&peer, here.region.at(0), 10, 1);
        let waiting = waiting.expect("posted");
        alice.session.close();
        assert_eq!(fails(&transfer).kind(), ErrorKind::Closed);
        assert_eq!(fails(&waiting).kind(), ErrorKind::Closed);
        drop((alice, peer, transfer, waiting));
        bob.thaw();
    });
}

#[test]
fn info_that_is_none_is_refused() {
    story(|| {
        let setup = Setup::lanes1_workers1();
        let alice = Host::open("alice", &setup);
        let info = alice.session.connection_info();
        let mut flipped = info.clone();
        flipped[30] ^= 1;
        for bad in [&[][..], b"hello", &info[..info.len() - 1], &flipped] {
            let error = alice.session.add_peer(bad).expect_err("no info");
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        }
        let peer = alice.session.add_peer(&info).expect("its own");
        assert_eq!(peer.name(), "alice");
        assert!(alice.session.peers().is_empty(), "it is nobody else");
    });
}

#[test]
fn closing_a_session_ends_its_transfers_on_both_sides() {
    story(|| {
        let setup = Setup::lanes4_workers3();
        let alice = Host::open("alice", &setup);
        let bob = RemoteProcess::open("bob", &setup);
        let peer = alice.meets(&bob);
        let (here, there) = (alice.memory(1 << 20), bob.memory(1 << 20));
        let ours = alice.endless(Op::Read, &peer, &here, &there.descriptor);
        ours.post().expect("posted");
        let chunk = alice.session.config().chunk_bytes();
        let theirs = bob.endless(Op::Read, "alice", &there, &here.region.descriptor(), chunk);
        theirs.post().expect("posted");
        let notified = bob.begin_fill(&there, Content::Byte(1));
        wait_for_traffic(&peer);
        notified.get();

        alice.session.close();
        alice.session.close();
        here.poison();
        let error = fails(&ours);
        assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
        let error = theirs.wait().expect_err("alice is gone");
        assert_eq!(error.kind(), ErrorKind::Disconnected, "{error}");
        here.check_untouched();

        let error = ours.post().expect_err("closed");
        assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
        let error = alice.session.add_peer(&bob.info()).expect_err("closed");
        assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
        let error = alice.session.accept(GUARD).expect_err("closed");
        assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
        assert!(peer.lanes().is_empty());

        // Bob goes on.
        let carol = Host::open("carol", &setup);
        let peer = carol.knows(&bob);
        carol.verify_traffic(&peer, &bob, 1);
    });
}
