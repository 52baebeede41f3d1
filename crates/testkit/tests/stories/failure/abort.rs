//! Aborted and failed transfers: memory is released at once, and none of them is reported as done.

use tcpx::{ErrorKind, Op, Peer, Segment, TransferState};
use tcpx_testkit::host::{done, fails, wait_for_silence, wait_for_traffic};
use tcpx_testkit::pattern::REMOTE_POISON;
use tcpx_testkit::{
    Content, Copy, Expected, GUARD, Host, LocalMemory, RemoteMemory, RemoteProcess, Setup, Tracked,
    on_every_setup, wait_until,
};

use super::MIB;

on_every_setup!(
    no_byte_lands_after_a_read_was_aborted,
    no_byte_lands_after_a_write_was_aborted,
    aborting_does_not_wait_for_the_peer,
    releasing_does_not_wait_for_the_peer,
    a_write_after_an_aborted_one_has_the_last_word,
    a_write_after_a_released_one_has_the_last_word,
    held_writes_end_with_their_peer,
    held_writes_end_with_a_killed_peer,
    held_writes_end_with_their_session,
    an_aborted_transfer_does_not_notify,
    a_failed_transfer_does_not_notify,
);

fn no_byte_lands_after_a_read_was_aborted(setup: &Setup) {
    let alice = Host::open("alice", setup);
    let bob = RemoteProcess::open("bob", setup);
    let peer = alice.knows(&bob);
    let (here, there) = (alice.memory(MIB), bob.memory(MIB));
    bob.fill(&there, Content::pattern(1));
    let transfer = alice.endless(Op::Read, &peer, &here, &there.descriptor);
    // An aborted transfer may be posted again.
    for _ in 0..10 {
        transfer.post_with_notification(b"never").expect("posted");
        wait_for_traffic(&peer);
        transfer.abort();
        here.poison();
        let error = fails(&transfer);
        assert_eq!(error.kind(), ErrorKind::Aborted, "{error}");
        assert_eq!(transfer.poll(), TransferState::Aborted);
        here.check_untouched();
    }
    wait_for_silence(&peer);
    here.check_untouched();
    transfer.abort();
    assert_eq!(transfer.poll(), TransferState::Aborted);
    assert!(bob.notifications().is_empty());
    alice.verify_traffic(&peer, &bob, 1);
}

fn no_byte_lands_after_a_write_was_aborted(setup: &Setup) {
    let alice = Host::open("alice", setup);
    let bob = RemoteProcess::open("bob", setup);
    let peer = alice.knows(&bob);
    let (here, there) = (alice.memory(MIB), bob.memory(MIB));
    bob.fill(&there, Content::Byte(1));
    let transfer = alice.endless(Op::Write, &peer, &here, &there.descriptor);
    for _ in 0..10 {
        here.memory.fill(Content::Byte(1));
        transfer.post_with_notification(b"never").expect("posted");
        wait_for_traffic(&peer);
        transfer.abort();
        // The memory may be reused, although bytes of it are still in flight.
        here.memory.fill(Content::Byte(2));
        let error = fails(&transfer);
        assert_eq!(error.kind(), ErrorKind::Aborted, "{error}");
        assert_eq!(transfer.poll(), TransferState::Aborted);
        // Bob's memory may be reused too, now that the state says so.
        bob.check(&there, &Expected::untouched(1));
        bob.poison(&there);
        alice.session.notify(&peer, b"round").expect("sent");
        assert_eq!(bob.notification().message, b"round");
        bob.check(&there, &Expected::untouched(REMOTE_POISON));
        bob.fill(&there, Content::Byte(1));
    }
    bob.poison(&there);
    wait_for_silence(&peer);
    bob.check(&there, &Expected::untouched(REMOTE_POISON));
    assert!(bob.notifications().is_empty());
    alice.verify_traffic(&peer, &bob, 1);
}

fn aborting_does_not_wait_for_the_peer(setup: &Setup) {
    // A call that waited for bob would wait for an hour.
    let setup = setup.with("peer_timeout", "1h");
    let alice = Host::open("alice", &setup);
    let bob = RemoteProcess::open("bob", &setup);
    let peer = alice.knows(&bob);
    let (here, there) = (alice.memory(MIB), bob.memory(MIB));
    for op in [Op::Write, Op::Read] {
        let transfer = alice.endless(op, &peer, &here, &there.descriptor);
        transfer.post().expect("posted");
        wait_for_traffic(&peer);
        bob.freeze();
        transfer.abort();
        here.poison();
        let state = transfer.poll();
        assert!(
            matches!(state, TransferState::Aborting | TransferState::Aborted),
            "{state:?}"
        );
        if state == TransferState::Aborting {
            let error = transfer.post().expect_err("it has not ended");
            assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
        }
        bob.thaw();
        let error = fails(&transfer);
        assert_eq!(error.kind(), ErrorKind::Aborted, "{error}");
        here.check_untouched();
    }
    // Deregistering does not wait for him either.
    let transfer = alice.endless(Op::Read, &peer, &here, &there.descriptor);
    transfer.post().expect("posted");
    wait_for_traffic(&peer);
    bob.freeze();
    here.region.deregister().expect("registered until now");
    here.poison();
    bob.thaw();
    let error = fails(&transfer);
    assert_eq!(error.kind(), ErrorKind::NotAllowed, "{error}");
    here.check_untouched();

    // Aborting a transfer that waits for a connection does not wait either.
    peer.disconnect();
    wait_until("the connection is gone", || !peer.is_connected());
    bob.freeze();
    let here = alice.memory(MIB);
    let transfer = alice.transfer(Op::Write, &peer, &here, &there, &[Copy::new(0, 0, MIB)]);
    transfer.post_with_notification(b"never").expect("posted");
    transfer.abort();
    assert_eq!(transfer.poll(), TransferState::Aborted);
    bob.thaw();
    alice.verify_traffic(&peer, &bob, 1);
    assert!(bob.notifications().is_empty());
}

fn releasing_does_not_wait_for_the_peer(setup: &Setup) {
    let setup = setup.with("peer_timeout", "1h");
    let alice = Host::open("alice", &setup);
    let bob = RemoteProcess::open("bob", &setup);
    let peer = alice.knows(&bob);
    let (here, there) = (alice.memory(MIB), bob.memory(MIB));
    for frozen in [true, false] {
        let transfer = alice.endless(Op::Read, &peer, &here, &there.descriptor);
        transfer.post_with_notification(b"never").expect("posted");
        wait_for_traffic(&peer);
        if frozen {
            bob.freeze();
        }
        drop(transfer);
        here.poison();
        bob.thaw();
        wait_for_silence(&peer);
        here.check_untouched();
    }
    for frozen in [true, false] {
        let transfer = alice.endless(Op::Write, &peer, &here, &there.descriptor);
        transfer.post_with_notification(b"never").expect("posted");
        wait_for_traffic(&peer);
        if frozen {
            bob.freeze();
        }
        drop(transfer);
        bob.thaw();
        // Bytes in flight have landed when a ping after them is answered. If the connection has
        // ended, the next one begins when nothing of the last lands any more.
        for lane in 0..peer.lanes().len() {
            let _ = peer.round_trip(lane, GUARD);
        }
        alice.verify_traffic(&peer, &bob, 1);
        bob.poison(&there);
        wait_for_silence(&peer);
        bob.check(&there, &Expected::untouched(REMOTE_POISON));
    }
    // Hundreds at once, in all stages.
    let transfers: Vec<_> = (0..300)
        .map(|i| {
            let op = if i % 2 == 0 { Op::Read } else { Op::Write };
            let transfer = alice.transfer(op, &peer, &here, &there, &[Copy::new(0, 0, MIB / 2)]);
            if i % 5 != 0 {
                transfer.post().expect("posted");
            }
            transfer
        })
        .collect();
    drop(transfers);
    here.poison();
    wait_for_silence(&peer);
    here.check_untouched();
    assert!(bob.notifications().is_empty());
    alice.verify_traffic(&peer, &bob, 2);
}

/// Although nobody waits for the end of the abort, and bytes of it are still in flight.
fn a_write_after_an_aborted_one_has_the_last_word(setup: &Setup) {
    let alice = Host::open("alice", setup);
    let bob = RemoteProcess::open("bob", setup);
    let peer = alice.knows(&bob);
    let (first, second, there) = (alice.memory(MIB), alice.memory(MIB), bob.memory(MIB));
    first.memory.fill(Content::Byte(1));
    second.memory.fill(Content::Byte(2));
    bob.fill(&there, Content::Byte(2));
    let write = || alice.transfer(Op::Write, &peer, &second, &there, &[Copy::new(0, 0, MIB)]);
    for round in 0..6 {
        let transfer = alice.endless(Op::Write, &peer, &first, &there.descriptor);
        transfer.post().expect("posted");
        wait_for_traffic(&peer);
        bob.freeze();
        drop(transfer);
        if round % 2 == 1 {
            // Aborted while it waits for the first: the next one waits as well.
            let between = write();
            between.post().expect("posted");
            drop(between);
        }
        let last = write();
        last.post_with_notification(b"last").expect("posted");
        bob.thaw();
        done(&last);
        assert_eq!(bob.notification().message, b"last");
        bob.check(&there, &Expected::untouched(2));
    }
    wait_for_silence(&peer);
    bob.check(&there, &Expected::untouched(2));
    assert!(bob.notifications().is_empty());
    alice.verify_traffic(&peer, &bob, 1);
}

/// A WRITE of one chunk that notifies can no longer be aborted once it has left.
fn a_write_after_a_released_one_has_the_last_word(setup: &Setup) {
    const LEN: usize = 512 << 10;
    let alice = Host::open("alice", setup);
    let bob = RemoteProcess::open("bob", setup);
    let peer = alice.knows(&bob);
    let (first, second, there) = (alice.memory(LEN), alice.memory(LEN), bob.memory(LEN));
    first.memory.fill(Content::Byte(1));
    second.memory.fill(Content::Byte(2));
    let write = |from, at, len| {
        let transfer = alice.transfer(Op::Write, &peer, from, &there, &[Copy::new(at, at, len)]);
        transfer.post_with_notification(b"new").expect("posted");
        transfer
    };
    done(&write(&first, 0, LEN));
    let (at, len) = (LEN - 4096, 4096);
    for _ in 0..20 {
        bob.freeze();
        drop(write(&first, 0, LEN));
        let last = write(&second, at, len);
        bob.thaw();
        done(&last);
        // The first one may have been aborted in part, or may have arrived.
        let tail = &bob.bytes(&there)[at..];
        assert!(
            tail.iter().all(|byte| *byte == 2),
            "the released WRITE landed last"
        );
    }
    wait_for_silence(&peer);
    alice.verify_traffic(&peer, &bob, 1);
}

/// Posts a WRITE to a frozen peer that waits for the end of an aborted one.
fn held_write(
    alice: &Host,
    bob: &RemoteProcess,
    peer: &Peer,
    (here, there): (&LocalMemory, &RemoteMemory),
) -> Tracked {
    let transfer = alice.endless(Op::Write, peer, here, &there.descriptor);
    transfer.post().expect("posted");
    wait_for_traffic(peer);
    bob.freeze();
    drop(transfer);
    let held = alice.transfer(Op::Write, peer, here, there, &[Copy::new(0, 0, MIB)]);
    held.post_with_notification(b"never").expect("posted");
    held
}

fn held_writes_end_with_their_peer(setup: &Setup) {
    let alice = Host::open("alice", setup);
    let bob = RemoteProcess::open("bob", setup);
    let peer = alice.knows(&bob);
    let (here, there) = (alice.memory(MIB), bob.memory(MIB));
    let held = held_write(&alice, &bob, &peer, (&here, &there));
    peer.disconnect();
    let error = fails(&held);
    assert_eq!(error.kind(), ErrorKind::Disconnected, "{error}");
    bob.thaw();
    // The next one connects again.
    held.post_with_notification(b"now").expect("posted");
    done(&held);
    assert_eq!(bob.notification().message, b"now");
    alice.verify_traffic(&peer, &bob, 2);
}

/// The end of the connection ends the aborted WRITE; there is no other connection to start on.
fn held_writes_end_with_a_killed_peer(setup: &Setup) {
    let alice = Host::open("alice", setup);
    let bob = RemoteProcess::open("bob", setup);
    let peer = alice.knows(&bob);
    let (here, there) = (alice.memory(MIB), bob.memory(MIB));
    let held = held_write(&alice, &bob, &peer, (&here, &there));
    bob.kill();
    let error = fails(&held);
    assert_eq!(error.kind(), ErrorKind::Disconnected, "{error}");
}

fn held_writes_end_with_their_session(setup: &Setup) {
    let alice = Host::open("alice", setup);
    let bob = RemoteProcess::open("bob", setup);
    let peer = alice.knows(&bob);
    let (here, there) = (alice.memory(MIB), bob.memory(MIB));
    let held = held_write(&alice, &bob, &peer, (&here, &there));
    alice.session.close();
    let error = fails(&held);
    assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
    bob.thaw();
    assert!(bob.notifications().is_empty());
}

fn an_aborted_transfer_does_not_notify(setup: &Setup) {
    const LEN: usize = 4 * MIB;
    let alice = Host::open("alice", setup);
    let bob = RemoteProcess::open("bob", setup);
    let peer = alice.knows(&bob);
    let (here, there) = (alice.memory(LEN), bob.memory(LEN));
    peer.connect(GUARD).expect("bob listens");
    let mut expected = Vec::new();
    let mut transfers = Vec::new();
    for op in [Op::Write, Op::Read] {
        for len in [1, 3000, 60_000, LEN] {
            transfers.push(alice.transfer(op, &peer, &here, &there, &[Copy::new(0, 0, len)]));
        }
    }
    for round in 0..400_usize {
        let transfer = &transfers[round % transfers.len()];
        let message = format!("{round}").into_bytes();
        transfer.post_with_notification(&message).expect("posted");
        // At all stages of its life.
        for _ in 0..round / 40 {
            transfer.poll();
        }
        transfer.abort();
        wait_until("it has ended", || transfer.poll().is_terminal());
        match transfer.poll() {
            // The abort came too late.
            TransferState::Done => expected.push(message),
            TransferState::Aborted => {}
            state => panic!("{state:?}: {:?}", transfer.error()),
        }
    }
    alice.session.notify(&peer, b"end").expect("sent");
    let mut heard = Vec::new();
    loop {
        let notice = bob.notification();
        if notice.message == b"end" {
            break;
        }
        heard.push(notice.message);
    }
    let text = |all: &[Vec<u8>]| -> Vec<String> {
        let all = all.iter();
        all.map(|m| String::from_utf8_lossy(m).into_owned())
            .collect()
    };
    let (heard, expected) = (text(&heard), text(&expected));
    let surplus: Vec<_> = heard.iter().filter(|m| !expected.contains(m)).collect();
    assert!(
        surplus.is_empty(),
        "{} of 400 transfers were done; bob also heard of these, which were aborted: {surplus:?}",
        expected.len()
    );
    assert_eq!(heard, expected, "one notification for each that was done");
    alice.verify_traffic(&peer, &bob, 1);
}

fn a_failed_transfer_does_not_notify(setup: &Setup) {
    let alice = Host::open("alice", setup);
    let bob = RemoteProcess::open("bob", setup);
    let peer = alice.knows(&bob);
    let (here, good, bad) = (alice.memory(2 * MIB), bob.memory(2 * MIB), bob.memory(100));
    bob.deregister(&bad);
    for op in [Op::Write, Op::Read] {
        for len in [10, 2 * MIB - 200] {
            for bad_first in [true, false] {
                let segment = |len| Segment {
                    local: here.region.at(0),
                    remote: good.descriptor.at(100),
                    len,
                };
                let broken = Segment {
                    remote: bad.descriptor.at(0),
                    ..segment(50)
                };
                let segments = if bad_first {
                    [broken, segment(len)]
                } else {
                    [segment(len), broken]
                };
                let transfer = alice.session.prepare(op, &peer, segments);
                let transfer = transfer.expect("prepared");
                for _ in 0..3 {
                    transfer.post_with_notification(b"never").expect("posted");
                    let error = fails(&transfer);
                    assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
                    assert_eq!(transfer.poll(), TransferState::Failed);
                }
            }
        }
    }
    alice.session.notify(&peer, b"end").expect("sent");
    assert_eq!(bob.notification().message, b"end");
    alice.verify_traffic(&peer, &bob, 1);
    assert!(bob.notifications().is_empty());
}
