//! Peers that die, hang, restart or disconnect: their transfers fail, no call blocks for ever, and
//! other peers are not affected.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tcpx::{ErrorKind, LostCause, Op, Peer, TransferState};
use tcpx_testkit::host::{done, fails, lost, wait_for_silence, wait_for_traffic};
use tcpx_testkit::{
    Content, Copy, Expected, Host, RemoteProcess, Setup, on_main_setups, story, wait_until,
};

use super::MIB;

on_main_setups!(
    a_peer_is_killed,
    a_peer_hangs,
    a_peer_restarts_under_the_same_name,
    a_new_session_of_the_same_name_connects_to_us_first,
    a_peer_disconnects_in_the_middle,
);

/// Runs `trouble` while another thread keeps a healthy peer busy, which must not be affected.
fn while_carol_is_busy(alice: &Host, carol: &(RemoteProcess, Peer), trouble: impl FnOnce()) {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let busy = scope.spawn(|| {
            let mut rounds = 0;
            while !over.load(Ordering::Acquire) || rounds < 3 {
                alice.verify_traffic(&carol.1, &carol.0, rounds);
                rounds += 1;
            }
        });
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(trouble));
        over.store(true, Ordering::Release);
        busy.join().expect("carol is not to notice");
        if let Err(panic) = result {
            std::panic::resume_unwind(panic);
        }
    });
}

fn carol(alice: &Host, setup: &Setup) -> (RemoteProcess, Peer) {
    let carol = RemoteProcess::open("carol", setup);
    let peer = alice.knows(&carol);
    (carol, peer)
}

fn a_peer_is_killed(setup: &Setup) {
    let alice = Host::open("alice", setup);
    let carol = carol(&alice, setup);
    for (op, how) in [(Op::Write, 0), (Op::Read, 0), (Op::Write, 1), (Op::Read, 2)] {
        let bob = RemoteProcess::open("bob", setup);
        let peer = alice.knows(&bob);
        let (here, there) = (alice.memory(MIB), bob.memory(MIB));
        let transfer = alice.endless(op, &peer, &here, &there.descriptor);
        let queued = alice.transfer(op, &peer, &here, &there, &[Copy::new(0, 0, 10)]);
        while_carol_is_busy(&alice, &carol, || {
            transfer.post_with_notification(b"never").expect("posted");
            wait_for_traffic(&peer);
            match how {
                0 => bob.kill(),
                1 => bob.crash(),
                _ => bob.exit(),
            }
            let error = fails(&transfer);
            assert_eq!(error.kind(), ErrorKind::Disconnected, "{error}");
            assert_eq!(transfer.poll(), TransferState::Failed);
            wait_until("it shows", || !peer.is_connected());
            // There is nobody to connect to.
            queued.post().expect("posted");
            let error = fails(&queued);
            assert_eq!(error.kind(), ErrorKind::Disconnected, "{error}");
        });
    }
}

fn a_peer_hangs(setup: &Setup) {
    // More in flight than the kernel's buffers hold: a hanging side leaves the other with bytes to
    // send. If a connection is given up before the next transfer, that one reconnects.
    let setup = setup
        .with("peer_timeout", "3s")
        .with("connect_timeout", "5s");
    let setup = setup.with("window", 256);
    let alice = Host::open("alice", &setup);
    let carol = carol(&alice, &setup);
    let bob = RemoteProcess::open("bob", &setup);
    let peer = alice.meets(&bob);
    let (here, there) = (alice.memory(MIB), bob.memory(MIB));
    for op in [Op::Write, Op::Read] {
        let transfer = alice.endless(op, &peer, &here, &there.descriptor);
        while_carol_is_busy(&alice, &carol, || {
            transfer.post_with_notification(b"never").expect("posted");
            wait_for_traffic(&peer);
            bob.freeze();
            let error = fails(&transfer);
            assert_eq!(error.kind(), ErrorKind::Disconnected, "{error}");
        });
        bob.thaw();
        // He is back, and nothing prevents a connection.
        alice.verify_traffic(&peer, &bob, 1);
    }
    // One small READ that was sent to an idle peer, which never answers.
    wait_for_silence(&peer);
    bob.freeze();
    let small = alice.transfer(Op::Read, &peer, &here, &there, &[Copy::new(0, 0, 10)]);
    small.post().expect("posted");
    let error = fails(&small);
    assert_eq!(error.kind(), ErrorKind::Disconnected, "{error}");
    bob.thaw();
    alice.verify_traffic(&peer, &bob, 2);

    // The initiator hangs while it is being served: the target drops it and continues.
    let chunk = alice.session.config().chunk_bytes();
    let theirs = bob.endless(Op::Read, "alice", &there, &here.region.descriptor(), chunk);
    while_carol_is_busy(&alice, &carol, || {
        theirs.post().expect("posted");
        wait_for_traffic(&peer);
        bob.freeze();
        wait_until("alice has given up", || !peer.is_connected());
    });
    bob.thaw();
    let error = theirs.wait().expect_err("alice has closed the connection");
    assert_eq!(error.kind(), ErrorKind::Disconnected, "{error}");
    alice.verify_traffic(&peer, &bob, 3);
}

fn a_peer_restarts_under_the_same_name(setup: &Setup) {
    let alice = Host::open("alice", setup);
    let here = alice.memory(MIB);
    let mut old: Option<(RemoteProcess, tcpx_testkit::Tracked)> = None;
    for round in 0..4 {
        let bob = RemoteProcess::open("bob", setup);
        let peer = alice.meets(&bob);
        assert_eq!(alice.session.peers().len(), 1);
        if let Some((old_bob, transfer)) = old.take() {
            // Killed or not: another process takes its place.
            let error = fails(&transfer);
            assert_eq!(error.kind(), ErrorKind::Disconnected, "{error}");
            if round == 3 {
                // Nothing else was wrong with it.
                assert_eq!(error, lost("bob", LostCause::Replaced));
            }
            let error = transfer.post().expect_err("that session is gone");
            assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
            drop(old_bob);
        }
        alice.verify_traffic(&peer, &bob, round);
        let there = bob.memory(MIB);
        let op = if round % 2 == 0 { Op::Read } else { Op::Write };
        let transfer = alice.endless(op, &peer, &here, &there.descriptor);
        transfer.post_with_notification(b"never").expect("posted");
        wait_for_traffic(&peer);
        match round {
            0 => bob.kill(),
            1 => bob.freeze(),
            _ => {}
        }
        old = Some((bob, transfer));
    }
}

fn a_new_session_of_the_same_name_connects_to_us_first(setup: &Setup) {
    let alice = Host::open("alice", setup);
    let old = RemoteProcess::open("bob", setup);
    let old_peer = alice.knows(&old);
    alice.verify_traffic(&old_peer, &old, 1);
    let new = RemoteProcess::open("bob", setup);
    new.knows(&alice);
    // No peer has proven to be bob: under this name alice knows another.
    let _ = new.connect("alice");
    new.notify("alice", b"early");
    wait_until("he was turned away", || !new.is_connected("alice"));
    alice.verify_traffic(&old_peer, &old, 2);
    assert_eq!(alice.session.peers().len(), 1);
    assert!(alice.session.notifications().is_empty());
    // Until his info is loaded.
    let new_peer = alice.knows(&new);
    alice.verify_traffic(&new_peer, &new, 3);
    new.notify("alice", b"from the new one");
    let mut notice = alice.notification();
    if notice.message == b"early" {
        // The transfer has waited for a connection, and one was made in time.
        notice = alice.notification();
    }
    assert_eq!(
        (&*notice.from, &*notice.message),
        ("bob", &b"from the new one"[..])
    );
    wait_until("the old one is gone", || !old_peer.is_connected());
    let by_name = alice.session.peer("bob").expect("there is a bob");
    alice.verify_traffic(&by_name, &new, 5);
}

fn a_peer_disconnects_in_the_middle(setup: &Setup) {
    let alice = Host::open("alice", setup);
    let bob = RemoteProcess::open("bob", setup);
    let peer = alice.meets(&bob);
    let (here, there) = (alice.memory(MIB), bob.memory(MIB));
    for (round, op) in [Op::Write, Op::Read, Op::Write, Op::Read]
        .into_iter()
        .enumerate()
    {
        let transfer = alice.endless(op, &peer, &here, &there.descriptor);
        transfer.post_with_notification(b"never").expect("posted");
        wait_for_traffic(&peer);
        if round < 2 {
            // Bytes move as soon as he accepts her, a little before he reports it.
            wait_until("bob is connected", || bob.is_connected("alice"));
            bob.disconnect("alice");
        } else {
            peer.disconnect();
        }
        let error = fails(&transfer);
        assert_eq!(error.kind(), ErrorKind::Disconnected, "{error}");
        if round >= 2 {
            assert_eq!(error, lost("bob", LostCause::Disconnected));
        }
        here.poison();
        // Posting again reconnects; the failed transfer is no obstacle.
        alice.verify_traffic(&peer, &bob, 1);
        here.check_untouched();
    }
    assert!(bob.notifications().is_empty());
}

#[test]
fn a_session_that_only_serves_notices_who_hangs() {
    story(|| {
        let setup = Setup::lanes4_workers3();
        let setup = setup.with("peer_timeout", "3s").with("window", 256);
        let (server, client) = (
            RemoteProcess::open("server", &setup),
            RemoteProcess::open("client", &setup),
        );
        client.knows_info(&server.info());
        let (here, there) = (client.memory(MIB), server.memory(MIB));
        let read = client.endless(Op::Read, "server", &here, &there.descriptor, MIB);
        read.post().expect("posted");
        wait_until("it is served", || {
            let lanes = server.lanes("client").into_iter();
            lanes.map(|l| l.bytes_sent).sum::<u64>() > 64 << 20
        });
        client.freeze();
        wait_until("the server has given up", || !server.is_connected("client"));
        client.thaw();
        let error = read.wait().expect_err("the server has given up");
        assert_eq!(error.kind(), ErrorKind::Disconnected, "{error}");
        let copies = [Copy::new(0, 0, MIB)];
        let again = client.transfer(Op::Read, "server", &here, &there.descriptor, &copies);
        again.post().expect("posted");
        again.wait().expect("there is nothing between them");
    });
}

#[test]
fn what_was_sent_before_a_disconnect_does_not_land_behind_what_was_written_after_it() {
    story(|| {
        let setup = Setup::lanes4_workers3().with("peer_timeout", "1h");
        let alice = Host::open("alice", &setup);
        let bob = RemoteProcess::open("bob", &setup);
        let peer = alice.knows(&bob);
        let (old, new, there) = (alice.memory(MIB), alice.memory(MIB), bob.memory(MIB));
        old.memory.fill(Content::pattern(1));
        new.memory.fill(Content::pattern(2));
        let rewrite = alice.transfer(Op::Write, &peer, &new, &there, &[Copy::new(0, 0, MIB)]);
        for round in 0..20 {
            let transfer = alice.endless(Op::Write, &peer, &old, &there.descriptor);
            transfer.post().expect("posted");
            wait_for_traffic(&peer);
            // Bob's sockets are full of chunks that he has not read.
            bob.freeze();
            std::thread::sleep(Duration::from_millis(5));
            peer.disconnect();
            assert_eq!(fails(&transfer), lost("bob", LostCause::Disconnected));
            rewrite.post().expect("posted");
            bob.thaw();
            done(&rewrite);
            let expected = Expected::only(Content::pattern(2));
            bob.check(&there, &expected);
            wait_for_silence(&peer);
            if let Some(mismatch) = bob.begin_check(&there, &expected).get() {
                panic!(
                    "round {round}: a WRITE was done, then older bytes landed over it {mismatch}"
                );
            }
        }
    });
}
