//! Closing a session: what was sent before arrives, and peers that are gone or stopped do not block
//! it.

use tcpx::{ErrorKind, Op};
use tcpx_testkit::host::{done, fails, wait_for_traffic};
use tcpx_testkit::protocol::{Command, Notice};
use tcpx_testkit::{Copy, Host, RemoteProcess, Setup, on_every_setup, on_main_setups, story};

const MIB: usize = 1 << 20;

/// Number and size of the messages that a session sends before it closes.
const LEGACIES: [(usize, usize); 5] = [(1, 0), (1, 32), (1000, 1024), (5000, 3), (10, MIB)];

on_every_setup!(
    notifications_arrive,
    notifications_arrive_though_the_process_ends,
    notifications_arrive_beside_transfers,
    the_peer_learns_that_its_transfers_are_done,
    both_close_at_once,
);

mod peers {
    use super::*;

    on_main_setups!(a_peer_is_stopped, a_peer_is_gone);
}

fn message(index: usize, len: usize) -> Vec<u8> {
    let mut message = (index as u64).to_le_bytes().to_vec();
    message.resize(len, index as u8);
    message
}

#[track_caller]
fn check(heard: &[Notice], from: &str, count: usize, len: usize) {
    for (index, notice) in heard.iter().enumerate() {
        assert_eq!(notice.from, from);
        assert!(
            notice.message == message(index, len),
            "notification {index} of {count} with {len} bytes"
        );
    }
    assert_eq!(heard.len(), count);
}

fn notifications_arrive(setup: &Setup) {
    let bob = RemoteProcess::open("bob", setup);
    for round in 0..4 {
        for (count, len) in LEGACIES {
            let alice = Host::open("alice", setup);
            let peer = alice.knows(&bob);
            if round % 2 == 1 {
                // Otherwise the connection is still being made when the session closes.
                peer.connect(tcpx_testkit::GUARD).expect("bob listens");
            }
            for index in 0..count {
                let message = message(index, len);
                alice.session.notify(&peer, &message).expect("queued");
            }
            if round < 2 {
                alice.session.close();
                let error = alice.session.notify(&peer, b"late").expect_err("closed");
                assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
            } else {
                drop((alice, peer));
            }
            // They have arrived, and are not merely in flight.
            check(&bob.notifications(), "alice", count, len);
        }
    }
}

fn notifications_arrive_though_the_process_ends(setup: &Setup) {
    let alice = Host::open("alice", setup);
    for (count, len) in LEGACIES {
        let bob = RemoteProcess::open("bob", setup);
        bob.knows(&alice);
        let queued: Vec<_> = (0..count)
            .map(|index| {
                let (peer, message) = ("alice".to_owned(), message(index, len));
                bob.begin::<()>(Command::Notify { peer, message })
            })
            .collect();
        let closed = bob.begin::<()>(Command::Close);
        let exited = bob.begin::<()>(Command::Exit);
        for answer in queued.into_iter().chain([closed, exited]) {
            answer.get();
        }
        let heard = alice.session.notifications().into_iter();
        let heard: Vec<_> = heard.map(Notice::from).collect();
        check(&heard, "bob", count, len);
    }
}

fn notifications_arrive_beside_transfers(setup: &Setup) {
    let bob = RemoteProcess::open("bob", setup);
    let there = bob.memory(MIB);
    for op in [Op::Write, Op::Read] {
        let alice = Host::open("alice", setup);
        let peer = alice.meets(&bob);
        let here = alice.memory(MIB);
        let ours = alice.endless(op, &peer, &here, &there.descriptor);
        ours.post_with_notification(b"never").expect("posted");
        let chunk = alice.session.config().chunk_bytes();
        let theirs = bob.endless(op, "alice", &there, &here.region.descriptor(), chunk);
        theirs.post_with_notification(b"never").expect("posted");
        wait_for_traffic(&peer);
        for index in 0..1000 {
            let message = message(index, 1024);
            alice.session.notify(&peer, &message).expect("queued");
        }
        alice.session.close();
        let error = fails(&ours);
        assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
        let error = theirs.wait().expect_err("alice is gone");
        assert_eq!(error.kind(), ErrorKind::Disconnected, "{error}");
        check(&bob.notifications(), "alice", 1000, 1024);
    }
}

fn the_peer_learns_that_its_transfers_are_done(setup: &Setup) {
    let bob = RemoteProcess::open("bob", setup);
    let there = bob.memory(MIB);
    for round in 0..10 {
        for len in [10, 3000, MIB] {
            let alice = Host::open("alice", setup);
            let peer = alice.meets(&bob);
            let here = alice.memory(MIB);
            let copies = [Copy::new(0, 0, len)];
            let write = bob.transfer(
                Op::Write,
                "alice",
                &there,
                &here.region.descriptor(),
                &copies,
            );
            // The other lanes have pending frames as well.
            let others: Vec<_> = (0..round % 4)
                .map(|_| {
                    let descriptor = here.region.descriptor();
                    bob.transfer(Op::Write, "alice", &there, &descriptor, &copies)
                })
                .collect();
            for other in &others {
                other.post_with_notification(b"there").expect("posted");
            }
            write.post_with_notification(b"there").expect("posted");
            let heard = alice.next_notifications(1 + others.len());
            assert_eq!(heard.len(), 1 + others.len());
            let send = bob.send("alice", &there, 0, len, 7);
            let receive = alice.session.recv(&peer, here.region.at(0), len, 7);
            done(&receive.expect("posted"));
            // A message that has arrived here is acknowledged there.
            alice.session.close();
            for transfer in others.into_iter().chain([write, send]) {
                if let Err(error) = transfer.wait() {
                    panic!("round {round}, {len} bytes: {error}");
                }
                transfer.release();
            }
        }
    }
}

fn both_close_at_once(setup: &Setup) {
    let bob = RemoteProcess::open("bob", setup);
    for round in 0..20 {
        let alice = Host::open("alice", setup);
        let peer = alice.meets(&bob);
        if round % 2 == 0 {
            peer.connect(tcpx_testkit::GUARD).expect("bob listens");
        }
        alice.session.notify(&peer, b"farewell").expect("queued");
        bob.notify("alice", b"farewell");
        let closed = bob.begin::<()>(Command::Close);
        alice.session.close();
        closed.get();
        bob.reopen(setup);
    }
}

fn a_peer_is_stopped(setup: &Setup) {
    // Alice gets no error although bob does not keep up.
    let setup = &setup.with("queue_bytes", "256M");
    let (bob, carol) = (
        RemoteProcess::open("bob", setup),
        RemoteProcess::open("carol", setup),
    );
    // With little and with much to send to him, with a connection and without one.
    for (count, len, connected) in [(1, 1, true), (100, MIB, true), (1, 1, false)] {
        let alice = Host::open("alice", setup);
        let (to_bob, to_carol) = (alice.knows(&bob), alice.knows(&carol));
        if connected {
            to_bob
                .connect(tcpx_testkit::GUARD)
                .expect("bob still listens");
        }
        bob.freeze();
        for index in 0..count {
            let message = message(index, len);
            alice.session.notify(&to_bob, &message).expect("queued");
        }
        for index in 0..1000 {
            let message = message(index, 1024);
            alice.session.notify(&to_carol, &message).expect("queued");
        }
        // The time limit of the story shows whether this waits for him for ever.
        alice.session.close();
        check(&carol.notifications(), "alice", 1000, 1024);
        bob.thaw();
    }
}

fn a_peer_is_gone(setup: &Setup) {
    let setup = setup.with("peer_timeout", "1h");
    for connected in [true, false] {
        let alice = Host::open("alice", &setup);
        let bob = RemoteProcess::open("bob", &setup);
        let peer = alice.knows(&bob);
        if connected {
            peer.connect(tcpx_testkit::GUARD)
                .expect("bob still listens");
        }
        bob.kill();
        // Refused or not: it cannot be delivered.
        let _ = alice.session.notify(&peer, b"farewell");
        alice.session.close();
    }
}

#[test]
fn notifications_arrive_though_a_plugin_takes_its_time_to_connect() {
    story(|| {
        let setup = Setup::lanes4_workers3();
        let bob = RemoteProcess::open("bob", &setup);
        // As GPUDirect-TCPX requires; other transports do not need it.
        let mut slow = std::process::Command::new(tcpx_testkit::remote::binary());
        slow.env("TCPX_EMU_PENDING_MS", "6000");
        let alice = RemoteProcess::spawn("alice", slow);
        alice.reopen(&setup);
        alice.knows_info(&bob.info());
        alice.notify("bob", b"farewell");
        alice.begin::<()>(Command::Close).get();
        let heard = bob.notifications();
        assert_eq!(heard.len(), 1);
        assert_eq!(heard[0].message, b"farewell");
    });
}

#[test]
fn a_peer_that_is_stopped_is_not_waited_for_as_long_as_transfers_would() {
    story(|| {
        let setup = Setup::lanes4_workers3().with("peer_timeout", "1h");
        let alice = Host::open("alice", &setup);
        let bob = RemoteProcess::open("bob", &setup);
        let peer = alice.knows(&bob);
        let (here, there) = (alice.memory(MIB), bob.memory(MIB));
        let transfer = alice.endless(Op::Write, &peer, &here, &there.descriptor);
        transfer.post().expect("posted");
        wait_for_traffic(&peer);
        bob.freeze();
        alice.session.notify(&peer, b"farewell").expect("queued");
        alice.session.close();
        assert_eq!(fails(&transfer).kind(), ErrorKind::Closed);
    });
}
