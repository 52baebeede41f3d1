//! Memory is revoked in the middle of transfers: nothing accesses it afterwards.

use std::time::Duration;

use tcpx::{ErrorKind, Op, TransferState};
use tcpx_testkit::host::{fails, wait_for_silence, wait_for_traffic};
use tcpx_testkit::pattern::{LOCAL_POISON, REMOTE_POISON};
use tcpx_testkit::{
    Content, Copy, Expected, GUARD, Host, LocalMemory, Memory, RemoteProcess, Setup,
    on_every_setup, story, wait_until,
};

use super::MIB;

on_every_setup!(
    the_target_deregisters_what_is_written_to,
    the_target_deregisters_what_is_read_from,
    the_initiator_deregisters_what_it_reads_into,
    the_initiator_deregisters_what_it_writes_from,
);

fn the_target_deregisters_what_is_written_to(setup: &Setup) {
    let alice = Host::open("alice", setup);
    let bob = RemoteProcess::open("bob", setup);
    let peer = alice.meets(&bob);
    // Bob is the target.
    let (here, there) = (alice.memory(MIB), bob.memory(MIB));
    let transfer = alice.endless(Op::Write, &peer, &here, &there.descriptor);
    transfer.post_with_notification(b"never").expect("posted");
    wait_for_traffic(&peer);
    assert_eq!(transfer.poll(), TransferState::InProgress);
    bob.deregister(&there);
    bob.poison(&there);
    let error = fails(&transfer);
    assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
    bob.check(&there, &Expected::untouched(REMOTE_POISON));

    // Alice is the target: this process can poison its memory in the very next instruction.
    let there = bob.memory(MIB);
    here.poison();
    let chunk = alice.session.config().chunk_bytes();
    let transfer = bob.endless(Op::Write, "alice", &there, &here.region.descriptor(), chunk);
    transfer.post_with_notification(b"never").expect("posted");
    wait_until("bytes land", || {
        here.memory
            .check(&Expected::untouched(LOCAL_POISON))
            .is_err()
    });
    here.region.deregister().expect("registered until now");
    here.poison();
    let error = transfer.wait().expect_err("the target is gone");
    assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
    here.check_untouched();

    assert!(bob.notifications().is_empty());
    assert!(alice.session.notifications().is_empty());
    alice.verify_traffic(&peer, &bob, 1);
}

fn the_target_deregisters_what_is_read_from(setup: &Setup) {
    let alice = Host::open("alice", setup);
    let bob = RemoteProcess::open("bob", setup);
    let peer = alice.meets(&bob);
    let (here, there) = (alice.memory(MIB), bob.memory(MIB));
    let transfer = alice.endless(Op::Read, &peer, &here, &there.descriptor);
    transfer.post_with_notification(b"never").expect("posted");
    wait_for_traffic(&peer);
    bob.deregister(&there);
    let error = fails(&transfer);
    assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
    assert!(bob.notifications().is_empty());

    // Revoked memory may be registered again.
    let again = bob.register(&there, 0, MIB);
    bob.fill(&again, Content::pattern(3));
    alice.run(Op::Read, &peer, &here, &again, &[Copy::new(0, 0, MIB)]);
    here.check(&Expected::only(Content::pattern(3)));
    assert_eq!(again.descriptor, there.descriptor);
    let error = transfer.wait(GUARD).expect_err("it has failed");
    assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
}

fn the_initiator_deregisters_what_it_reads_into(setup: &Setup) {
    let alice = Host::open("alice", setup);
    let bob = RemoteProcess::open("bob", setup);
    let peer = alice.knows(&bob);
    for _ in 0..5 {
        let (here, there) = (alice.memory(MIB), bob.memory(MIB));
        let transfer = alice.endless(Op::Read, &peer, &here, &there.descriptor);
        transfer.post_with_notification(b"never").expect("posted");
        wait_for_traffic(&peer);
        here.region.deregister().expect("registered until now");
        here.poison();
        let error = fails(&transfer);
        assert_eq!(error.kind(), ErrorKind::NotAllowed, "{error}");
        here.check_untouched();
        let error = transfer.post().expect_err("deregistered");
        assert_eq!(error.kind(), ErrorKind::NotAllowed, "{error}");
        wait_for_silence(&peer);
        here.check_untouched();
    }
    assert!(bob.notifications().is_empty());
    alice.verify_traffic(&peer, &bob, 1);
}

fn the_initiator_deregisters_what_it_writes_from(setup: &Setup) {
    let alice = Host::open("alice", setup);
    let bob = RemoteProcess::open("bob", setup);
    let peer = alice.knows(&bob);
    for _ in 0..5 {
        let (here, there) = (alice.memory(MIB), bob.memory(MIB));
        here.memory.fill(Content::Byte(1));
        bob.fill(&there, Content::Byte(1));
        let transfer = alice.endless(Op::Write, &peer, &here, &there.descriptor);
        transfer.post_with_notification(b"never").expect("posted");
        wait_for_traffic(&peer);
        here.region.deregister().expect("registered until now");
        // The memory is reused from here on: none of the new bytes may reach bob.
        here.memory.fill(Content::Byte(2));
        let error = fails(&transfer);
        assert_eq!(error.kind(), ErrorKind::NotAllowed, "{error}");
        bob.check(&there, &Expected::untouched(1));
        wait_for_silence(&peer);
        bob.check(&there, &Expected::untouched(1));
    }
    assert!(bob.notifications().is_empty());
    alice.verify_traffic(&peer, &bob, 1);
}

#[test]
fn a_session_lets_go_of_its_own_memory_too() {
    story(|| {
        let setup = Setup::lanes4_workers3();
        let alice = Host::open("alice", &setup);
        let me = alice.session.peer("alice").expect("itself");
        for round in 0..30 {
            let (a, b) = (alice.memory(MIB), alice.memory(MIB));
            let op = if round % 2 == 0 { Op::Read } else { Op::Write };
            // The target of WRITEs.
            let (target, source) = if op == Op::Read { (&a, &b) } else { (&b, &a) };
            source.memory.fill(Content::pattern(1));
            let transfer = alice.endless(op, &me, &a, &b.region.descriptor());
            transfer.post_with_notification(b"never").expect("posted");
            wait_until("bytes move", || target.memory.bytes(0, 8) != [0; 8]);
            let kind = match round % 5 {
                0 => {
                    transfer.abort();
                    ErrorKind::Aborted
                }
                1 => {
                    a.region.deregister().expect("registered until now");
                    ErrorKind::NotAllowed
                }
                2 => {
                    b.region.deregister().expect("registered until now");
                    ErrorKind::Refused
                }
                3 => {
                    drop(transfer);
                    target.poison();
                    std::thread::sleep(Duration::from_millis(1));
                    target.check_untouched();
                    continue;
                }
                _ => {
                    let session = Host::open("other", &setup);
                    let me = session.session.peer("other").expect("itself");
                    let here = session.memory(MIB);
                    let there = here.region.descriptor();
                    let other = session.endless(Op::Write, &me, &here, &there);
                    other.post().expect("posted");
                    session.session.close();
                    assert_eq!(fails(&other).kind(), ErrorKind::Closed);
                    transfer.abort();
                    ErrorKind::Aborted
                }
            };
            target.poison();
            let error = fails(&transfer);
            assert_eq!(error.kind(), kind, "{op:?}: {error}");
            target.check_untouched();
        }
        assert!(alice.session.notifications().is_empty());
    });
}

#[test]
fn nothing_lands_once_a_peer_was_removed_and_memory_deregistered() {
    story(|| {
        let setup = Setup::lanes4_workers3();
        let alice = Host::open("alice", &setup);
        let bob = RemoteProcess::open("bob", &setup);
        for round in 0..40 {
            let peer = alice.knows(&bob);
            let (here, there) = (alice.memory(MIB), bob.memory(MIB));
            let transfer = alice.endless(Op::Read, &peer, &here, &there.descriptor);
            transfer.post().expect("posted");
            wait_for_traffic(&peer);
            let before = match round % 3 {
                0 => {
                    alice.session.remove_peer("bob").expect("he is there");
                    "he was removed"
                }
                1 => {
                    peer.disconnect();
                    "he was disconnected"
                }
                _ => "nothing happened",
            };
            let untouched = |memory: &Memory| {
                if let Err(mismatch) = memory.check(&Expected::untouched(7)) {
                    panic!("{before}, the memory was deregistered, and it is wrong {mismatch}");
                }
            };
            let LocalMemory { memory, region } = here;
            if round % 2 == 0 {
                region.deregister().expect("registered until now");
            } else {
                // The last handle.
                drop(region);
            }
            memory.fill(Content::Byte(7));
            fails(&transfer);
            untouched(&memory);
            std::thread::sleep(Duration::from_millis(2));
            untouched(&memory);
            bob.deregister(&there);
        }
    });
}

#[test]
fn regions_come_and_go_under_fire() {
    story(|| {
        // Registrations end at all times, on both sides of continuous transfers; released memory is
        // never written again.
        let setup = Setup::lanes4_workers3();
        let alice = Host::open("alice", &setup);
        let bob = RemoteProcess::open("bob", &setup);
        let peer = alice.meets(&bob);
        let there = bob.memory(MIB);
        bob.fill(&there, Content::pattern(1));
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (alice, peer, there) = (&alice, &peer, &there);
                scope.spawn(move || {
                    for round in 0..60 {
                        let here = alice.memory(MIB / 2);
                        let copies = [Copy::new(0, thread, MIB / 2)];
                        let read = alice.transfer(Op::Read, peer, &here, there, &copies);
                        read.post().expect("posted");
                        for _ in 0..round {
                            read.poll();
                        }
                        here.region.deregister().expect("registered until now");
                        here.poison();
                        wait_until("it has ended", || read.poll().is_terminal());
                        here.check_untouched();
                    }
                });
            }
        });
        alice.verify_traffic(&peer, &bob, 1);
    });
}
