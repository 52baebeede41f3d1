//! Tagged messages: each send matches one receive of its tag, in order, completely or not at all.

use std::time::Duration;

use tcpx::{ErrorKind, Op, TransferState};
use tcpx_testkit::host::{done, fails, wait_for_silence, wait_for_traffic};
use tcpx_testkit::pattern::{Dice, LOCAL_POISON, REMOTE_POISON};
use tcpx_testkit::protocol::Command;
use tcpx_testkit::{
    Content, Copy, Expected, GUARD, Host, REMOTE_GUARD, RemoteProcess, Setup, on_every_setup,
    on_main_setups, wait_until,
};

const MIB: usize = 1 << 20;

on_every_setup!(
    small_and_large_before_and_after,
    many_tags_interleaved,
    the_order_within_a_tag_is_kept,
    a_message_that_is_too_long_fails_on_both_sides,
    nothing_is_a_message_too,
);

mod trouble {
    use super::*;

    on_main_setups!(
        the_peer_dies_while_somebody_waits,
        the_peer_dies_in_the_middle_of_a_message,
        the_peer_hangs_while_somebody_waits,
        nobody_waits_for_a_peer_that_is_gone_for_good,
        a_receive_is_given_up,
        a_send_is_given_up,
        memory_is_deregistered_under_a_message,
        a_tagged_transfer_cannot_be_posted_again,
    );
}

fn small_and_large_before_and_after(setup: &Setup) {
    const LEN: usize = 6 * MIB;
    let alice = Host::open("alice", setup);
    let bob = RemoteProcess::open("bob", setup);
    let peer = alice.meets(&bob);
    let (here, there) = (alice.memory(LEN + 100), bob.memory(LEN + 100));
    let lens = [1, 100, 8191, 8192, 8193, 70_000, LEN];
    for (tag, len) in lens.into_iter().enumerate() {
        let tag = tag as u64;
        for receive_first in [true, false] {
            // From here to there …
            here.memory.fill(Content::pattern(tag));
            bob.poison(&there);
            let send = || {
                let source = here.region.at(3);
                let send = alice.session.send(&peer, source, len, tag);
                send.expect("posted")
            };
            let receive = || bob.recv("alice", &there, 7, len + 50, tag);
            let (send, receive) = if receive_first {
                // Bob has only alice's info: he need not be connected to wait for her.
                let receive = receive();
                (send(), receive)
            } else {
                let send = send();
                assert_eq!(send.poll(), TransferState::InProgress);
                (send, receive())
            };
            receive.wait().expect("received");
            done(&send);
            assert_eq!(receive.received(), len as u64);
            let expected = Expected::untouched(REMOTE_POISON);
            let content = Content::pattern(tag).skip(3);
            bob.check(&there, &expected.with(7..len + 7, content));

            // … and back, into a buffer of exactly that size.
            here.poison();
            let receive = || {
                let target = here.region.at(1);
                let receive = alice.session.recv(&peer, target, len, tag);
                receive.expect("posted")
            };
            let send = || bob.send("alice", &there, 7, len, tag);
            let (receive, send) = if receive_first {
                let receive = receive();
                assert_eq!(receive.poll(), TransferState::InProgress);
                assert_eq!(receive.received(), 0);
                (receive, send())
            } else {
                let send = send();
                (receive(), send)
            };
            done(&receive);
            send.wait().expect("sent");
            assert_eq!(receive.received(), len as u64);
            let expected = Expected::untouched(LOCAL_POISON);
            here.check(&expected.with(1..len + 1, content));
        }
    }
}

fn many_tags_interleaved(setup: &Setup) {
    const COUNT: usize = 200;
    const SLOT: usize = 20_000;
    let alice = Host::open("alice", setup);
    let bob = RemoteProcess::open("bob", setup);
    let peer = alice.meets(&bob);
    let (here, there) = (alice.memory(COUNT * SLOT), bob.memory(COUNT * SLOT));
    here.poison();
    bob.fill(&there, Content::pattern(9));
    let mut dice = Dice::new(9);
    let mut receive_order: Vec<_> = (0..COUNT).collect();
    let mut send_order = receive_order.clone();
    dice.shuffle(&mut receive_order);
    dice.shuffle(&mut send_order);
    let lens: Vec<_> = (0..COUNT).map(|_| dice.below(SLOT)).collect();
    // Some receives come before their message, some after; the tags are far apart.
    let tag = |i: usize| (i as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mut receives = Vec::new();
    let mut sends = Vec::new();
    for step in 0..COUNT {
        let i = receive_order[step];
        let target = here.region.at(i * SLOT);
        let receive = alice.session.recv(&peer, target, SLOT, tag(i));
        receives.push((i, receive.expect("posted")));
        let i = send_order[step];
        sends.push(bob.send("alice", &there, i * SLOT, lens[i], tag(i)));
    }
    let mut expected = Expected::untouched(LOCAL_POISON);
    for (i, receive) in &receives {
        done(receive);
        assert_eq!(receive.received(), lens[*i] as u64);
        expected.put(i * SLOT, lens[*i], Content::pattern(9).skip(i * SLOT));
    }
    for send in &sends {
        send.wait().expect("sent");
    }
    here.check(&expected);
}

fn the_order_within_a_tag_is_kept(setup: &Setup) {
    const COUNT: usize = 120;
    const SLOT: usize = 30_000;
    let alice = Host::open("alice", setup);
    let bob = RemoteProcess::open("bob", setup);
    let peer = alice.meets(&bob);
    let (here, there) = (alice.memory(COUNT * SLOT), bob.memory(COUNT * SLOT));
    here.memory.fill(Content::pattern(5));
    bob.poison(&there);
    // Short and long messages take different paths.
    let len = |i: usize| {
        if i.is_multiple_of(3) {
            20_000 + i
        } else {
            10 + i
        }
    };
    let receive = |i: usize| bob.recv("alice", &there, i * SLOT, SLOT, 77);
    let send = |i: usize| {
        let source = here.region.at(i * SLOT);
        let send = alice.session.send(&peer, source, len(i), 77);
        send.expect("posted")
    };
    // A third of the receives before, a third while they come, a third after.
    let mut receives: Vec<_> = (0..COUNT / 3).map(receive).collect();
    let mut sends: Vec<_> = (0..COUNT / 2).map(send).collect();
    receives.extend((COUNT / 3..2 * COUNT / 3).map(receive));
    sends.extend((COUNT / 2..COUNT).map(send));
    receives.extend((2 * COUNT / 3..COUNT).map(receive));
    let mut expected = Expected::untouched(REMOTE_POISON);
    for (i, receive) in receives.iter().enumerate() {
        receive.wait().expect("received");
        assert_eq!(receive.received(), len(i) as u64, "message {i}");
        expected.put(i * SLOT, len(i), Content::pattern(5).skip(i * SLOT));
    }
    for send in &sends {
        done(send);
    }
    bob.check(&there, &expected);
}

fn a_message_that_is_too_long_fails_on_both_sides(setup: &Setup) {
    let alice = Host::open("alice", setup);
    let bob = RemoteProcess::open("bob", setup);
    let peer = alice.meets(&bob);
    let (here, there) = (alice.memory(MIB), bob.memory(MIB));
    for len in [11, 5000, MIB] {
        for receive_first in [true, false] {
            bob.poison(&there);
            let send = || alice.session.send(&peer, here.region.at(0), len, 1);
            let receive = || bob.recv("alice", &there, 0, len - 1, 1);
            let (send, receive) = if receive_first {
                let receive = receive();
                (send(), receive)
            } else {
                let send = send();
                (send, receive())
            };
            let send = send.expect("posted");
            let error = receive.wait().expect_err("it does not fit");
            assert_eq!(error.kind(), ErrorKind::Truncated, "{error}");
            let error = fails(&send);
            assert_eq!(error.kind(), ErrorKind::Truncated, "{error}");
            bob.check(&there, &Expected::untouched(REMOTE_POISON));
            // The next one of the same tag is independent.
            let receive = bob.recv("alice", &there, 0, len, 1);
            let send = alice.session.send(&peer, here.region.at(0), len, 1);
            done(&send.expect("posted"));
            receive.wait().expect("received");
        }
    }
}

fn nothing_is_a_message_too(setup: &Setup) {
    let alice = Host::open("alice", setup);
    let bob = RemoteProcess::open("bob", setup);
    let peer = alice.meets(&bob);
    let (here, there) = (alice.memory(10), bob.memory(10));
    bob.poison(&there);
    for room in [0, 10] {
        // At the very end of the region, even.
        let receive = bob.recv("alice", &there, 10 - room, room, 3);
        let send = alice.session.send(&peer, here.region.at(10), 0, 3);
        done(&send.expect("posted"));
        receive.wait().expect("received");
        assert_eq!(receive.received(), 0);
        let send = alice.session.send(&peer, here.region.at(0), 0, 4);
        let receive = bob.recv("alice", &there, 0, room, 4);
        receive.wait().expect("received");
        done(&send.expect("posted"));
    }
    bob.check(&there, &Expected::untouched(REMOTE_POISON));
    // Ranges outside the region are refused at once.
    for (offset, len) in [(11, 0), (0, 11), (10, 1), (usize::MAX, 2)] {
        let error = alice.session.send(&peer, here.region.at(offset), len, 3);
        let error = error.expect_err("it does not fit");
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        let error = alice.session.recv(&peer, here.region.at(offset), len, 3);
        let error = error.expect_err("it does not fit");
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    }
}

fn the_peer_dies_while_somebody_waits(setup: &Setup) {
    let alice = Host::open("alice", setup);
    let bob = RemoteProcess::open("bob", setup);
    let peer = alice.meets(&bob);
    alice.verify_traffic(&peer, &bob, 1);
    let here = alice.memory(MIB);
    here.poison();
    let receive = alice.session.recv(&peer, here.region.at(0), 10, 1);
    let small = alice.session.send(&peer, here.region.at(0), 10, 2);
    let large = alice.session.send(&peer, here.region.at(0), MIB, 2);
    let transfers = [receive, small, large].map(|t| t.expect("posted"));
    wait_for_silence(&peer);
    bob.kill();
    for transfer in &transfers {
        let error = fails(transfer);
        assert_eq!(error.kind(), ErrorKind::Disconnected, "{error}");
        assert_eq!(transfer.poll(), TransferState::Failed);
    }
    here.check_untouched();
    // Sending to nobody fails as well, now or later.
    match alice.session.send(&peer, here.region.at(0), 10, 2) {
        Ok(send) => assert_eq!(fails(&send).kind(), ErrorKind::Disconnected),
        Err(error) => assert_eq!(error.kind(), ErrorKind::Disconnected),
    }
}

fn the_peer_dies_in_the_middle_of_a_message(setup: &Setup) {
    const LEN: usize = 256 * MIB;
    let alice = Host::open("alice", setup);
    let here = alice.memory(LEN);
    for sending in [false, true] {
        let bob = RemoteProcess::open("bob", setup);
        let peer = alice.meets(&bob);
        let there = bob.memory(LEN);
        alice.verify_traffic(&peer, &bob, 1);
        let transfer = if sending {
            bob.recv("alice", &there, 0, LEN, 1);
            alice.session.send(&peer, here.region.at(0), LEN, 1)
        } else {
            let receive = alice.session.recv(&peer, here.region.at(0), LEN, 1);
            bob.send("alice", &there, 0, LEN, 1);
            receive
        };
        let transfer = transfer.expect("posted");
        wait_for_traffic(&peer);
        bob.kill();
        // It may have ended already on a busy machine.
        match transfer.wait(GUARD) {
            Ok(()) => eprintln!("a message of {LEN} bytes came in time"),
            Err(error) => assert_eq!(error.kind(), ErrorKind::Disconnected, "{error}"),
        }
        assert!(transfer.poll().is_terminal());
    }
}

fn nobody_waits_for_a_peer_that_is_gone_for_good(setup: &Setup) {
    let alice = Host::open("alice", setup);
    let here = alice.memory(10);
    let receive_of = |peer: &tcpx::Peer| alice.session.recv(peer, here.region.at(0), 10, 1);

    let bob = RemoteProcess::open("bob", setup);
    let removed = alice.meets(&bob);
    let posted_before = receive_of(&removed).expect("posted");
    alice.session.remove_peer("bob").expect("removed");
    assert_eq!(fails(&posted_before).kind(), ErrorKind::Disconnected);
    let error = receive_of(&removed).expect_err("it was removed");
    assert_eq!(error.kind(), ErrorKind::Disconnected, "{error}");

    // A peer that this side cannot reach by itself.
    let carol = RemoteProcess::open("carol", setup);
    carol.knows(&alice);
    let connected = carol.begin::<()>(Command::Connect {
        peer: "alice".into(),
        timeout: REMOTE_GUARD,
    });
    let left = alice.session.accept(GUARD).expect("carol connects");
    assert_eq!(left.name(), "carol");
    connected.get();
    carol.kill();
    wait_until("a receive is refused", || match receive_of(&left) {
        // Posted before her departure was noticed.
        Ok(receive) => {
            assert_eq!(fails(&receive).kind(), ErrorKind::Disconnected);
            false
        }
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::Disconnected, "{error}");
            true
        }
    });
}

fn the_peer_hangs_while_somebody_waits(setup: &Setup) {
    // If the connection is given up before the second send, that one reconnects.
    let setup = setup
        .with("peer_timeout", "2s")
        .with("connect_timeout", "5s");
    let alice = Host::open("alice", &setup);
    let bob = RemoteProcess::open("bob", &setup);
    let peer = alice.meets(&bob);
    alice.verify_traffic(&peer, &bob, 1);
    let here = alice.memory(MIB);
    // A peer that has not posted a receive yet does not time out, however long that takes.
    let waiting = alice.session.send(&peer, here.region.at(0), MIB, 1);
    let waiting = waiting.expect("posted");
    let error = waiting.wait(Duration::from_secs(4)).expect_err("not yet");
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    assert_eq!(waiting.poll(), TransferState::InProgress);
    // One that does not even answer does.
    bob.freeze();
    let small = alice.session.send(&peer, here.region.at(0), 10, 2);
    for send in [waiting, small.expect("posted")] {
        let error = fails(&send);
        assert_eq!(error.kind(), ErrorKind::Disconnected, "{error}");
    }
    bob.thaw();
    alice.verify_traffic(&peer, &bob, 1);
}

fn a_receive_is_given_up(setup: &Setup) {
    let setup = setup.with("peer_timeout", "1h");
    let alice = Host::open("alice", &setup);
    let bob = RemoteProcess::open("bob", &setup);
    let peer = alice.meets(&bob);
    let (here, there) = (alice.memory(64 * MIB), bob.memory(64 * MIB));
    bob.fill(&there, Content::pattern(1));
    here.poison();
    // Before a message came: the message goes to the next receive.
    let receive = alice.session.recv(&peer, here.region.at(0), MIB, 1);
    let receive = receive.expect("posted");
    receive.abort();
    assert_eq!(receive.poll(), TransferState::Aborted);
    assert_eq!(fails(&receive).kind(), ErrorKind::Aborted);
    drop(alice.session.recv(&peer, here.region.at(0), MIB, 1));
    let send = bob.send("alice", &there, 0, 10, 1);
    let receive = alice.session.recv(&peer, here.region.at(100), MIB, 1);
    done(&receive.expect("posted"));
    send.wait().expect("sent");
    let expected = Expected::untouched(LOCAL_POISON);
    here.check(&expected.with(100..110, Content::pattern(1)));

    // In the middle of a message, also while the sender is frozen: no byte lands from then on, both
    // sides end.
    for frozen in [false, true] {
        here.poison();
        let receive = alice.session.recv(&peer, here.region.at(0), 64 * MIB, 2);
        let receive = receive.expect("posted");
        let send = bob.send("alice", &there, 0, 64 * MIB, 2);
        wait_until("it has begun", || {
            receive.poll();
            receive.received() > 0
        });
        if frozen {
            bob.freeze();
        }
        receive.abort();
        here.poison();
        bob.thaw();
        wait_until("it has ended", || receive.poll().is_terminal());
        if receive.poll() == TransferState::Done {
            // It ended before it could be aborted.
            send.wait().expect("sent");
            continue;
        }
        assert_eq!(receive.poll(), TransferState::Aborted);
        assert_eq!(fails(&receive).kind(), ErrorKind::Aborted);
        let error = send.wait().expect_err("the receiver has given up");
        if !(frozen && setup.is_plugin() && error.kind() == ErrorKind::Disconnected) {
            assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
        }
        wait_for_silence(&peer);
        here.check_untouched();
    }
    alice.verify_traffic(&peer, &bob, 1);
}

fn a_send_is_given_up(setup: &Setup) {
    let alice = Host::open("alice", setup);
    let bob = RemoteProcess::open("bob", setup);
    let peer = alice.meets(&bob);
    let (here, there) = (alice.memory(MIB), bob.memory(MIB));
    for len in [100, MIB] {
        here.memory.fill(Content::pattern(1));
        bob.poison(&there);
        let send = alice.session.send(&peer, here.region.at(0), len, 1);
        let send = send.expect("posted");
        alice.session.notify(&peer, b"announced").expect("sent");
        assert_eq!(bob.notification().message, b"announced");
        send.abort();
        assert_eq!(send.poll(), TransferState::Aborted);
        // The memory is reused from here on: bob may get the message unchanged, or an error, or the
        // next message; never these bytes as the message.
        here.memory.fill(Content::pattern(2));
        let receive = bob.recv("alice", &there, 0, MIB, 1);
        let next = alice.session.send(&peer, here.region.at(0), len, 1);
        let next = next.expect("posted");
        let whole = |seed| {
            let expected = Expected::untouched(REMOTE_POISON);
            expected.with(0..len, Content::pattern(seed))
        };
        // Determines who got the message whose send has ended. The next one is done when bob's
        // receives are.
        match receive.wait() {
            Ok(()) => {
                let first: Option<_> = bob.begin_check(&there, &whole(1)).get();
                if first.is_none() {
                    // Unchanged. The next one is still to come.
                    bob.poison(&there);
                    bob.recv("alice", &there, 0, MIB, 1)
                        .wait()
                        .expect("received");
                    bob.check(&there, &whole(2));
                } else {
                    // The next one; then the aborted one must be gone.
                    bob.check(&there, &whole(2));
                    assert_eq!(
                        next.wait(Duration::from_secs(5)).ok(),
                        Some(()),
                        "bob has received bytes of a send that was aborted ({len} bytes)"
                    );
                }
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
                bob.check(&there, &Expected::untouched(REMOTE_POISON));
                bob.recv("alice", &there, 0, MIB, 1)
                    .wait()
                    .expect("received");
                bob.check(&there, &whole(2));
            }
        }
        done(&next);
    }
    alice.verify_traffic(&peer, &bob, 1);
}

fn memory_is_deregistered_under_a_message(setup: &Setup) {
    let alice = Host::open("alice", setup);
    let bob = RemoteProcess::open("bob", setup);
    let peer = alice.meets(&bob);
    let there = bob.memory(MIB);
    for len in [100, MIB] {
        // The receiver's.
        let here = alice.memory(MIB);
        let receive = alice.session.recv(&peer, here.region.at(0), MIB, 1);
        let receive = receive.expect("posted");
        here.region.deregister().expect("registered until now");
        here.poison();
        let send = bob.send("alice", &there, 0, len, 1);
        let error = fails(&receive);
        assert_eq!(error.kind(), ErrorKind::NotAllowed, "{error}");
        let error = send.wait().expect_err("nowhere to put it");
        assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
        here.check_untouched();

        // The sender's, before the receiver has fetched the bytes: small messages are already in
        // flight.
        let here = alice.memory(MIB);
        here.memory.fill(Content::pattern(1));
        bob.poison(&there);
        let send = alice.session.send(&peer, here.region.at(0), len, 2);
        let send = send.expect("posted");
        here.region.deregister().expect("registered until now");
        here.memory.fill(Content::pattern(2));
        let receive = bob.recv("alice", &there, 0, MIB, 2);
        let rest = Expected::untouched(REMOTE_POISON);
        match receive.wait() {
            Ok(()) => {
                bob.check(&there, &rest.with(0..len, Content::pattern(1)));
                done(&send);
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
                bob.check(&there, &rest);
                fails(&send);
            }
        }
    }
    alice.verify_traffic(&peer, &bob, 1);
}

fn a_tagged_transfer_cannot_be_posted_again(setup: &Setup) {
    let alice = Host::open("alice", setup);
    let bob = RemoteProcess::open("bob", setup);
    let peer = alice.meets(&bob);
    let (here, there) = (alice.memory(100), bob.memory(100));
    let send = alice.session.send(&peer, here.region.at(0), 100, 1);
    let send = send.expect("posted");
    let receive = bob.recv("alice", &there, 0, 100, 1);
    receive.wait().expect("received");
    done(&send);
    assert_eq!(send.bytes(), 100);
    let error = send.post().expect_err("only once");
    assert_eq!(error.kind(), ErrorKind::NotAllowed, "{error}");
    let error = receive.post().expect_err("only once");
    assert_eq!(error.kind(), ErrorKind::NotAllowed, "{error}");
    alice.run(Op::Write, &peer, &here, &there, &[Copy::new(0, 0, 100)]);
}
