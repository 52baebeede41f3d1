//! Notifications: with a transfer and on their own, exactly once, in order, with the sender's name.

use tcpx::{ErrorKind, Op};
use tcpx_testkit::host::done;
use tcpx_testkit::protocol::Command;
use tcpx_testkit::{
    Content, Copy, Expected, Host, REMOTE_GUARD, RemoteProcess, Setup, on_every_setup, story,
};

const MIB: usize = 1 << 20;

on_every_setup!(
    with_a_transfer,
    on_their_own,
    twenty_thousand_arrive_in_order_and_once,
    repostings_notify_in_order,
    bytes_are_there_before_the_notification,
);

fn with_a_transfer(setup: &Setup) {
    let alice = Host::open("alice", setup);
    let bob = RemoteProcess::open("bob", setup);
    let peer = alice.knows(&bob);
    let (here, there) = (alice.memory(8 * MIB), bob.memory(8 * MIB));
    // One chunk and many; messages that travel with a chunk and ones that do not; none of either.
    for op in [Op::Write, Op::Read] {
        for bytes in [0, 1, 10_000, 8 * MIB] {
            let transfer = alice.transfer(op, &peer, &here, &there, &[Copy::new(0, 0, bytes)]);
            for len in [0, 1, 4095, 4096, 4097, 100_000, MIB] {
                let message = Content::pattern(len as u64).to_vec(len);
                transfer.post_with_notification(&message).expect("posted");
                done(&transfer);
                let notice = bob.notification();
                assert_eq!(notice.from, "alice");
                assert!(
                    notice.message == message,
                    "{op:?} of {bytes} bytes with a message of {len}"
                );
            }
            // Without one there is none.
            transfer.post().expect("posted");
            done(&transfer);
        }
    }
    alice.session.notify(&peer, b"end").expect("sent");
    assert_eq!(bob.notification().message, b"end");
    assert!(bob.notifications().is_empty());
}

fn on_their_own(setup: &Setup) {
    let alice = Host::open("alice", setup);
    let bob = RemoteProcess::open("bob", setup);
    // The first one connects.
    let peer = alice.knows(&bob);
    for len in [0, 1, 32, 4096, 5000, MIB, 0] {
        let message = Content::pattern(len as u64).to_vec(len);
        alice.session.notify(&peer, &message).expect("sent");
        let notice = bob.notification();
        assert_eq!(notice.from, "alice");
        assert!(notice.message == message, "a message of {len} bytes");
    }
    // Bob answers on the connection that alice has made.
    bob.notify("alice", b"");
    bob.notify("alice", b"got it");
    assert_eq!(alice.notification().message, b"");
    let notice = alice.notification();
    assert_eq!((&*notice.from, &*notice.message), ("bob", &b"got it"[..]));
    assert!(alice.session.notifications().is_empty());
    assert!(bob.notifications().is_empty());
}

fn twenty_thousand_arrive_in_order_and_once(setup: &Setup) {
    const COUNT: usize = 20_000;
    let alice = Host::open("alice", setup);
    let bob = RemoteProcess::open("bob", setup);
    let peer = alice.meets(&bob);
    let message = |i: usize| {
        // Of all lengths.
        let mut message = (i as u32).to_le_bytes().to_vec();
        message.resize(4 + i % 97, i as u8);
        message
    };
    // Traffic beside them does not change their order.
    let (here, there) = (alice.memory(MIB), bob.memory(MIB));
    let transfer = alice.endless(Op::Write, &peer, &here, &there.descriptor);
    transfer.post().expect("posted");
    let mut heard = Vec::new();
    for i in 0..COUNT {
        alice.session.notify(&peer, &message(i)).expect("sent");
        if i % 5000 == 4999 {
            heard.extend(bob.notifications());
        }
    }
    heard.extend(bob.next_notifications(COUNT - heard.len()));
    transfer.abort();
    assert_eq!(heard.len(), COUNT);
    for (i, notice) in heard.iter().enumerate() {
        assert_eq!(notice.message, message(i), "notification {i}");
        assert_eq!(notice.from, "alice");
    }

    // In the other direction too, all sent before the first is taken.
    const BACK: usize = 2000;
    let sent: Vec<_> = (0..BACK)
        .map(|i| {
            let (peer, message) = ("alice".to_owned(), message(i));
            bob.begin::<()>(Command::Notify { peer, message })
        })
        .collect();
    for answer in sent {
        answer.get();
    }
    let heard = alice.next_notifications(BACK);
    assert_eq!(heard.len(), BACK);
    for (i, notice) in heard.iter().enumerate() {
        assert_eq!(notice.message, message(i), "notification {i}");
        assert_eq!(notice.from, "bob");
    }
}

fn repostings_notify_in_order(setup: &Setup) {
    const ROUNDS: usize = 40;
    let alice = Host::open("alice", setup);
    let bob = RemoteProcess::open("bob", setup);
    let peer = alice.knows(&bob);
    let (here, there) = (alice.memory(2 * MIB), bob.memory(2 * MIB));
    // Something else is always in flight, so that lanes differ in load.
    let other = alice.endless(Op::Write, &peer, &here, &there.descriptor);
    other.post().expect("posted");
    for op in [Op::Write, Op::Read] {
        for bytes in [100, 2 * MIB] {
            let transfer = alice.transfer(op, &peer, &here, &there, &[Copy::new(0, 0, bytes)]);
            let rounds = if bytes > MIB { ROUNDS / 10 } else { ROUNDS };
            // Some travel with a chunk, some after it; some are long, some are short.
            let message = |i: usize| {
                let mut message = (i as u32).to_le_bytes().to_vec();
                message.resize([4, 4 << 10, 60 << 10, 300][i % 4], 7);
                message
            };
            for i in 0..rounds {
                transfer
                    .post_with_notification(&message(i))
                    .expect("posted");
                done(&transfer);
            }
            let heard = bob.next_notifications(rounds);
            let number = |m: &[u8]| u32::from_le_bytes(m[..4].try_into().expect("4 bytes"));
            let order: Vec<_> = heard.iter().map(|n| number(&n.message)).collect();
            let expected: Vec<_> = (0..rounds as u32).collect();
            assert_eq!(order, expected, "{op:?} of {bytes} bytes");
            for (i, notice) in heard.iter().enumerate() {
                assert!(notice.message == message(i), "notification {i}");
            }
        }
    }
    other.abort();
    assert!(bob.notifications().is_empty());
}

fn bytes_are_there_before_the_notification(setup: &Setup) {
    // Bob reads his memory when he is notified, not when alice knows that it is done.
    const LEN: usize = 5 * MIB;
    let alice = Host::open("alice", setup);
    let bob = RemoteProcess::open("bob", setup);
    let peer = alice.knows(&bob);
    let (here, there) = (alice.memory(LEN), bob.memory(LEN));
    for round in 0..20 {
        let len = [10, 5000, LEN][round % 3];
        let content = Content::pattern(round as u64);
        here.memory.fill(content);
        bob.poison(&there);
        let transfer = alice.transfer(Op::Write, &peer, &here, &there, &[Copy::new(0, 0, len)]);
        // He already waits, and compares as soon as it comes.
        let told = bob.begin::<serde_json::Value>(Command::WaitNotification {
            timeout: REMOTE_GUARD,
        });
        let rest = tcpx_testkit::pattern::REMOTE_POISON;
        let expected = Expected::untouched(rest).with(0..len, content);
        let checked = bob.begin_check(&there, &expected);
        transfer.post_with_notification(b"look").expect("posted");
        told.get();
        checked.verify();
        done(&transfer);
    }
}

#[test]
fn a_message_has_a_limit() {
    story(|| {
        let setup = Setup::lanes1_workers1();
        let alice = Host::open("alice", &setup);
        let me = alice.session.peer("alice").expect("itself");
        let message = vec![0; (256 << 20) + 1];
        let error = alice
            .session
            .notify(&me, &message)
            .expect_err("it is too long");
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        let memory = alice.memory(10);
        let descriptor = memory.region.descriptor();
        let transfer = alice.transfer_to(Op::Write, &me, &memory, &descriptor, &[]);
        let error = transfer
            .post_with_notification(&message)
            .expect_err("it is too long");
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        assert!(alice.session.notifications().is_empty());
        let error = alice
            .session
            .wait_notification(std::time::Duration::from_millis(1))
            .expect_err("there is none");
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    });
}
