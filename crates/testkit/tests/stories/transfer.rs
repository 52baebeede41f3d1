//! READ and WRITE: every byte in its place and no other byte touched, for any shape of the
//! transfer.

mod blocks;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tcpx::{ErrorKind, Op, Segment, Transfer, TransferState};
use tcpx_testkit::host::{done, fails, wait_for_traffic};
use tcpx_testkit::pattern::{Dice, LOCAL_POISON, REMOTE_POISON};
use tcpx_testkit::protocol::{Command, Hex, Piece};
use tcpx_testkit::story::{available_bytes, skipped};
use tcpx_testkit::{
    Content, Copy, Expected, GUARD, Host, LocalMemory, REMOTE_GUARD, RemoteMemory, RemoteProcess,
    Setup, on_every_setup, on_main_setups, story, story_within,
};

on_every_setup!(
    sizes_from_one_byte_on,
    zero_length_segments_move_nothing,
    twenty_thousand_segments,
    random_lists_match_plain_copies,
    hundreds_in_flight_in_both_directions,
    eight_threads_post_at_once,
    a_thousand_repostings,
    the_application_of_the_target_is_asleep,
);

// `super::` of a macro's module: one more module keeps the names apart.
mod main_setups {
    use super::*;

    on_main_setups!(
        many_and_overlapping_regions,
        waiting_may_be_given_up,
        a_session_transfers_to_itself,
    );
}

/// Fills the source and poisons the target of a transfer.
fn prepare(op: Op, seed: u64, here: &LocalMemory, bob: &RemoteProcess, there: &RemoteMemory) {
    match op {
        Op::Write => {
            here.memory.fill(Content::pattern(seed));
            bob.poison(there);
        }
        Op::Read => {
            bob.fill(there, Content::pattern(seed));
            here.poison();
        }
    }
}

/// Checks both sides after the copies: the source is unchanged, the target has the copies and
/// nothing else.
#[track_caller]
fn verify(
    op: Op,
    seed: u64,
    copies: &[Copy],
    here: &LocalMemory,
    bob: &RemoteProcess,
    there: &RemoteMemory,
) {
    let source = Expected::only(Content::pattern(seed));
    match op {
        Op::Write => {
            let mut target = Expected::untouched(REMOTE_POISON);
            for c in copies {
                target.put(c.remote, c.len, Content::pattern(seed).skip(c.local));
            }
            bob.check(there, &target);
            here.check(&source);
        }
        Op::Read => {
            let mut target = Expected::untouched(LOCAL_POISON);
            for c in copies {
                target.put(c.local, c.len, Content::pattern(seed).skip(c.remote));
            }
            here.check(&target);
            bob.check(there, &source);
        }
    }
}

fn sizes_from_one_byte_on(setup: &Setup) {
    let alice = Host::open("alice", setup);
    let bob = RemoteProcess::open("bob", setup);
    let peer = alice.knows(&bob);
    let chunk = alice.session.config().chunk_bytes();
    let mut sizes = vec![1, 2, 3, 7, 8, 63, 4095, 4096, 4097, 65_537];
    sizes.extend([chunk - 1, chunk, chunk + 1, 3 * chunk + 5, 9 << 20]);
    for (round, len) in sizes.into_iter().enumerate() {
        // Odd offsets, different on both sides: nothing is aligned.
        let copies = [Copy::new(13, 4099, len)];
        let (here, there) = (alice.memory(len + 40), bob.memory(len + 5000));
        for op in [Op::Write, Op::Read] {
            let seed = round as u64;
            prepare(op, seed, &here, &bob, &there);
            let transfer = alice.transfer(op, &peer, &here, &there, &copies);
            assert_eq!(transfer.bytes(), len as u64);
            assert_eq!(transfer.poll(), TransferState::Prepared);
            transfer.post().expect("posted");
            done(&transfer);
            assert_eq!(transfer.poll(), TransferState::Done);
            assert!(transfer.error().is_none());
            verify(op, seed, &copies, &here, &bob, &there);
        }
        bob.deregister(&there);
    }
    // Polling is enough, without ever waiting.
    let (here, there) = (alice.memory(1 << 20), bob.memory(1 << 20));
    for op in [Op::Write, Op::Read] {
        prepare(op, 99, &here, &bob, &there);
        let copies = [Copy::new(1, 3, 1_000_000)];
        let transfer = alice.transfer(op, &peer, &here, &there, &copies);
        transfer.post().expect("posted");
        tcpx_testkit::wait_until("polling has finished it", || transfer.poll().is_terminal());
        assert_eq!(transfer.poll(), TransferState::Done);
        verify(op, 99, &copies, &here, &bob, &there);
        let estimate = transfer.estimate();
        assert!(estimate.duration > Duration::ZERO, "{estimate:?}");
    }
}

fn zero_length_segments_move_nothing(setup: &Setup) {
    const LEN: usize = 10_000;
    let alice = Host::open("alice", setup);
    let bob = RemoteProcess::open("bob", setup);
    let peer = alice.knows(&bob);
    let (here, there) = (alice.memory(LEN), bob.memory(LEN));
    let lists: [&[Copy]; 4] = [
        // Among others, also at the very ends.
        &[
            Copy::new(0, 0, 0),
            Copy::new(10, 20, 30),
            Copy::new(40, 50, 0),
            Copy::new(40, 50, 100),
            Copy::new(LEN, LEN, 0),
        ],
        // Nothing but.
        &[
            Copy::new(5, 5, 0),
            Copy::new(LEN, 0, 0),
            Copy::new(0, LEN, 0),
        ],
        &[Copy::new(0, 0, 0)],
        &[],
    ];
    for op in [Op::Write, Op::Read] {
        for (number, copies) in lists.into_iter().enumerate() {
            let seed = number as u64;
            prepare(op, seed, &here, &bob, &there);
            let transfer = alice.transfer(op, &peer, &here, &there, copies);
            let bytes: usize = copies.iter().map(|c| c.len).sum();
            assert_eq!(transfer.bytes(), bytes as u64);
            transfer.post().expect("posted");
            done(&transfer);
            // The notification comes even without any bytes.
            let message = format!("{op:?} {number}");
            transfer
                .post_with_notification(message.as_bytes())
                .expect("posted");
            done(&transfer);
            let notice = bob.notification();
            assert_eq!(
                (&*notice.from, &*notice.message),
                ("alice", message.as_bytes())
            );
            verify(op, seed, copies, &here, &bob, &there);
        }
    }
    assert!(bob.notifications().is_empty());
}

fn twenty_thousand_segments(setup: &Setup) {
    const COUNT: usize = 20_000;
    let alice = Host::open("alice", setup);
    let bob = RemoteProcess::open("bob", setup);
    let peer = alice.knows(&bob);
    let mut dice = Dice::new(20_000);
    let lens: Vec<_> = (0..COUNT).map(|_| dice.within(1..400)).collect();
    // A gap after each on one side, no gaps but another order on the other.
    let (mut local, mut gapped) = (Vec::new(), 0);
    for len in &lens {
        gapped += dice.below(4);
        local.push(gapped);
        gapped += len;
    }
    let mut order: Vec<_> = (0..COUNT).collect();
    dice.shuffle(&mut order);
    let (mut remote, mut packed) = (vec![0; COUNT], 0);
    for i in order {
        remote[i] = packed;
        packed += lens[i];
    }
    let copies: Vec<_> = (0..COUNT)
        .map(|i| Copy::new(local[i], remote[i], lens[i]))
        .collect();
    let (here, there) = (alice.memory(gapped + 10), bob.memory(packed + 10));
    for op in [Op::Write, Op::Read] {
        prepare(op, 20, &here, &bob, &there);
        let transfer = alice.transfer(op, &peer, &here, &there, &copies);
        transfer.post_with_notification(b"all").expect("posted");
        done(&transfer);
        assert_eq!(bob.notification().message, b"all");
        verify(op, 20, &copies, &here, &bob, &there);
    }
}

/// Segments whose targets do not overlap; sources may.
fn random_copies(dice: &mut Dice, op: Op, local_len: usize, remote_len: usize) -> Vec<Copy> {
    let (source_len, target_len) = match op {
        Op::Write => (local_len, remote_len),
        Op::Read => (remote_len, local_len),
    };
    // From lists of tiny pieces to lists of a few large ones.
    let largest = 1 << dice.within(1..18);
    let mut at = dice.below(100);
    let mut copies = Vec::new();
    while copies.len() < 3000 {
        let len = dice.below(largest).min(source_len);
        if at + len > target_len {
            break;
        }
        // Often right after the previous one, so that neighbours merge.
        let follow = copies.last().filter(|_| dice.below(3) == 0);
        let source = match (follow, op) {
            (Some(Copy { local, len, .. }), Op::Write) => local + len,
            (Some(Copy { remote, len, .. }), Op::Read) => remote + len,
            (None, _) => usize::MAX,
        };
        let source = if source <= source_len - len {
            source
        } else {
            dice.below(source_len - len + 1)
        };
        copies.push(match op {
            Op::Write => Copy::new(source, at, len),
            Op::Read => Copy::new(at, source, len),
        });
        at += len
            + if dice.below(2) == 0 {
                0
            } else {
                dice.below(300)
            };
    }
    if dice.below(2) == 0 {
        dice.shuffle(&mut copies);
    }
    copies
}

fn random_lists_match_plain_copies(setup: &Setup) {
    const SEEDS: u64 = 24;
    let alice = Host::open("alice", setup);
    let bob = RemoteProcess::open("bob", setup);
    let peer = alice.knows(&bob);
    for seed in 0..SEEDS {
        let mut dice = Dice::new(seed);
        let (local_len, remote_len) = (dice.within(1..600_000), dice.within(1..600_000));
        let (here, there) = (alice.memory(local_len), bob.memory(remote_len));
        let mut local_model = Content::pattern(2 * seed).to_vec(local_len);
        let mut remote_model = Content::pattern(2 * seed + 1).to_vec(remote_len);
        here.memory.set_bytes(0, &local_model);
        bob.fill(&there, Content::pattern(2 * seed + 1));
        for op in [Op::Write, Op::Read] {
            let copies = random_copies(&mut dice, op, local_len, remote_len);
            alice.run(op, &peer, &here, &there, &copies);
            for c in &copies {
                let local = &mut local_model[c.local..c.local + c.len];
                let remote = &mut remote_model[c.remote..c.remote + c.len];
                match op {
                    Op::Write => remote.copy_from_slice(local),
                    Op::Read => local.copy_from_slice(remote),
                }
            }
            let segments = copies.len();
            assert!(
                here.memory.bytes(0, local_len) == local_model,
                "seed {seed}: local memory is wrong after a {op:?} of {segments} segments"
            );
            assert!(
                bob.bytes(&there) == remote_model,
                "seed {seed}: remote memory is wrong after a {op:?} of {segments} segments"
            );
        }
        bob.deregister(&there);
    }
}

fn hundreds_in_flight_in_both_directions(setup: &Setup) {
    const COUNT: usize = 320;
    const LEN: usize = 40_003;
    let alice = Host::open("alice", setup);
    let bob = RemoteProcess::open("bob", setup);
    let peer = alice.meets(&bob);
    // Each side has memory to send and to receive: one slot for each transfer of either side.
    let (source, target) = (alice.memory(COUNT * LEN), alice.memory(COUNT * LEN));
    let (their_source, their_target) = (bob.memory(COUNT * LEN), bob.memory(COUNT * LEN));
    source.memory.fill(Content::pattern(1));
    bob.fill(&their_source, Content::pattern(2));
    target.poison();
    bob.poison(&their_target);

    // Even slots are moved by alice, odd ones by bob; both READ and WRITE.
    let slot = |i: usize| [Copy::new(i * LEN, i * LEN, LEN - 1)];
    let ours: Vec<_> = (0..COUNT)
        .step_by(2)
        .flat_map(|i| {
            [
                alice.transfer(Op::Write, &peer, &source, &their_target, &slot(i)),
                alice.transfer(Op::Read, &peer, &target, &their_source, &slot(i)),
            ]
        })
        .collect();
    let (give, take) = (source.region.descriptor(), target.region.descriptor());
    let theirs: Vec<_> = (1..COUNT)
        .step_by(2)
        .flat_map(|i| {
            [
                bob.transfer(Op::Write, "alice", &their_source, &take, &slot(i)),
                bob.transfer(Op::Read, "alice", &their_target, &give, &slot(i)),
            ]
        })
        .collect();
    assert_eq!((ours.len(), theirs.len()), (COUNT, COUNT));
    let posted: Vec<_> = theirs.iter().map(|t| t.begin_post(None)).collect();
    for transfer in &ours {
        transfer.post().expect("posted");
    }
    for post in posted {
        post.get();
    }
    for transfer in &ours {
        done(transfer);
    }
    let ends: Vec<_> = theirs.iter().map(|t| t.begin_wait()).collect();
    for end in ends {
        end.get();
    }

    let mut expected = [LOCAL_POISON, REMOTE_POISON].map(Expected::untouched);
    for i in 0..COUNT {
        expected[0].put(i * LEN, LEN - 1, Content::pattern(2).skip(i * LEN));
        expected[1].put(i * LEN, LEN - 1, Content::pattern(1).skip(i * LEN));
    }
    target.check(&expected[0]);
    bob.check(&their_target, &expected[1]);
    source.check(&Expected::only(Content::pattern(1)));
    bob.check(&their_source, &Expected::only(Content::pattern(2)));
}

fn eight_threads_post_at_once(setup: &Setup) {
    const THREADS: usize = 8;
    const ROUNDS: usize = 40;
    const LEN: usize = 30_011;
    let alice = Host::open("alice", setup);
    let bob = RemoteProcess::open("bob", setup);
    // No connection exists: the first posts race for that too.
    let peer = alice.knows(&bob);
    let there = bob.memory(THREADS * LEN);
    bob.poison(&there);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (alice, peer, there) = (&alice, &peer, &there);
            scope.spawn(move || {
                let (here, back) = (alice.memory(LEN), alice.memory(LEN));
                let copies = [Copy::new(0, thread * LEN, LEN)];
                let write = alice.transfer(Op::Write, peer, &here, there, &copies);
                let read = alice.transfer(Op::Read, peer, &back, there, &copies);
                for round in 0..ROUNDS {
                    let content = Content::pattern((thread * ROUNDS + round) as u64);
                    here.memory.fill(content);
                    back.poison();
                    write.post().expect("posted");
                    // Some threads poll, others wait.
                    if thread % 2 == 0 {
                        while !write.poll().is_terminal() {
                            std::thread::yield_now();
                        }
                    }
                    done(&write);
                    read.post().expect("posted");
                    done(&read);
                    back.check(&Expected::only(content));
                }
            });
        }
    });
    let mut expected = Expected::untouched(REMOTE_POISON);
    for thread in 0..THREADS {
        let content = Content::pattern((thread * ROUNDS + ROUNDS - 1) as u64);
        expected.put(thread * LEN, LEN, content);
    }
    bob.check(&there, &expected);
}

fn a_thousand_repostings(setup: &Setup) {
    const ROUNDS: u64 = 1000;
    const LEN: usize = 5003;
    let alice = Host::open("alice", setup);
    let bob = RemoteProcess::open("bob", setup);
    let peer = alice.knows(&bob);
    let (here, there, back) = (alice.memory(LEN), bob.memory(LEN), alice.memory(LEN));
    bob.poison(&there);
    let copies = [Copy::new(2500, 0, 2503), Copy::new(0, 2503, 2400)];
    let write = alice.transfer(Op::Write, &peer, &here, &there, &copies);
    let copies = [Copy::new(0, 1, 4902)];
    let read = alice.transfer(Op::Read, &peer, &back, &there, &copies);
    for round in 0..ROUNDS {
        let source = Content::pattern(round);
        here.memory.fill(source);
        write.post().expect("posted");
        done(&write);
        back.poison();
        read.post().expect("posted");
        done(&read);
        let expected = Expected::untouched(LOCAL_POISON)
            .with(0..2502, source.skip(2501))
            .with(2502..4902, source);
        back.check(&expected);
    }
    let expected = Expected::untouched(REMOTE_POISON)
        .with(0..2503, Content::pattern(ROUNDS - 1).skip(2500))
        .with(2503..4903, Content::pattern(ROUNDS - 1));
    bob.check(&there, &expected);
}

fn the_application_of_the_target_is_asleep(setup: &Setup) {
    const LEN: usize = 3 << 20;
    let alice = Host::open("alice", setup);
    let bob = RemoteProcess::open("bob", setup);
    let peer = alice.knows(&bob);
    let (here, there, back) = (alice.memory(LEN), bob.memory(LEN), alice.memory(LEN));
    here.memory.fill(Content::pattern(8));
    bob.poison(&there);
    back.poison();
    bob.fall_asleep();
    // From here on only bob's engine works, including connecting.
    let copies = [Copy::new(0, 1, LEN - 1)];
    let write = alice.transfer(Op::Write, &peer, &here, &there, &copies);
    write
        .post_with_notification(b"good morning")
        .expect("posted");
    done(&write);
    alice.run(Op::Read, &peer, &back, &there, &copies);
    for lane in peer.lanes() {
        peer.round_trip(lane.index, GUARD).expect("a pong");
    }
    alice.session.notify(&peer, b"sleep well?").expect("sent");
    bob.wake_up();
    let expected = Expected::untouched(REMOTE_POISON).with(1..LEN, Content::pattern(8));
    bob.check(&there, &expected);
    back.check(&Expected::untouched(LOCAL_POISON).with(0..LEN - 1, Content::pattern(8)));
    assert_eq!(bob.notification().message, b"good morning");
    assert_eq!(bob.notification().message, b"sleep well?");
}

fn many_and_overlapping_regions(setup: &Setup) {
    const COUNT: usize = 600;
    const LEN: usize = COUNT * 100;
    let alice = Host::open("alice", setup);
    let bob = RemoteProcess::open("bob", setup);
    let peer = alice.meets(&bob);
    let (here, there) = (alice.memory(LEN), bob.memory(LEN));
    here.memory.fill(Content::pattern(1));
    bob.poison(&there);

    // A region for every piece, on both sides, at odd addresses, each overlapping its neighbours
    // and the whole.
    let ours: Vec<_> = (0..COUNT)
        .map(|i| {
            let region = here.memory.register_range(&alice.session, i * 100, 100);
            region.expect("registered")
        })
        .collect();
    let theirs: Vec<_> = (0..COUNT)
        .map(|i| bob.register(&there, i * 100 + 1, if i + 1 < COUNT { 199 } else { 99 }))
        .collect();
    let segments = (0..COUNT).map(|i| Segment {
        local: ours[i].at(3),
        remote: theirs[COUNT - 1 - i].descriptor.at(7),
        len: 90,
    });
    let write = alice
        .session
        .prepare(Op::Write, &peer, segments)
        .expect("prepared");
    write.post().expect("posted");
    done(&write);
    let mut expected = Expected::untouched(REMOTE_POISON);
    for i in 0..COUNT {
        let at = (COUNT - 1 - i) * 100 + 8;
        expected.put(at, 90, Content::pattern(1).skip(i * 100 + 3));
    }
    bob.check(&there, &expected);

    // Bob reads it back through the whole and the parts, in one transfer.
    let pieces = (0..COUNT).map(|i| Piece {
        region: theirs[i].region_id(),
        descriptor: i % 2,
        copy: Copy::new(0, i * 90, 90),
    });
    let other = here.memory.register_range(&alice.session, 0, LEN - 1);
    let other = other.expect("registered");
    let transfer: u64 = bob.expect(Command::Prepare {
        write: false,
        peer: "alice".into(),
        descriptors: vec![
            Hex(here.region.descriptor().to_bytes()),
            Hex(other.descriptor().to_bytes()),
        ],
        pieces: pieces.collect(),
        repeat: 1,
    });
    bob.poison(&there);
    bob.expect::<()>(Command::Post {
        transfer,
        notification: None,
    });
    bob.expect::<()>(Command::Wait {
        transfer,
        timeout: REMOTE_GUARD,
    });
    let mut expected = Expected::untouched(REMOTE_POISON);
    for i in 0..COUNT {
        expected.put(i * 100 + 1, 90, Content::pattern(1).skip(i * 90));
    }
    bob.check(&there, &expected);

    // The same range twice has one descriptor, valid until the last registration ends.
    let twin = bob.register(&there, 0, LEN);
    assert_eq!(twin.descriptor, there.descriptor);
    bob.deregister(&twin);
    bob.poison(&there);
    alice.run(Op::Write, &peer, &here, &there, &[Copy::new(0, 0, LEN)]);
    bob.check(&there, &Expected::only(Content::pattern(1)));
    bob.deregister(&there);
    let write = alice.transfer(Op::Write, &peer, &here, &there, &[Copy::new(0, 0, 9)]);
    write.post().expect("posted");
    let error = fails(&write);
    assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
    // Overlapping registrations are still valid.
    let (part, copies) = (&theirs[5], [Copy::new(0, 0, 99)]);
    alice.run(Op::Write, &peer, &here, part, &copies);
}

fn waiting_may_be_given_up(setup: &Setup) {
    let setup = setup.with("peer_timeout", "1h");
    let alice = Host::open("alice", &setup);
    let bob = RemoteProcess::open("bob", &setup);
    let peer = alice.knows(&bob);
    let (here, there) = (alice.memory(8 << 20), bob.memory(8 << 20));
    for op in [Op::Write, Op::Read] {
        prepare(op, 5, &here, &bob, &there);
        peer.connect(GUARD).expect("bob listens");
        let copies = [Copy::new(0, 0, 8 << 20)];
        let transfer = alice.transfer(op, &peer, &here, &there, &copies);
        let error = transfer
            .wait(Duration::from_millis(1))
            .expect_err("it was never posted");
        assert_eq!(error.kind(), ErrorKind::NotAllowed, "{error}");
        bob.freeze();
        transfer.post().expect("posted");
        for _ in 0..3 {
            let error = transfer
                .wait(Duration::from_millis(20))
                .expect_err("bob is frozen");
            assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
            assert_eq!(transfer.poll(), TransferState::InProgress);
            let error = transfer.post().expect_err("it is in flight");
            assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
        }
        bob.thaw();
        done(&transfer);
        verify(op, 5, &copies, &here, &bob, &there);
    }
}

fn a_session_transfers_to_itself(setup: &Setup) {
    const LEN: usize = 5 << 20;
    let alice = Host::open("alice", setup);
    let info = alice.session.connection_info();
    let me = alice.session.add_peer(&info).expect("its own info");
    assert_eq!(me.name(), "alice");
    me.connect(GUARD).expect("always connected");
    assert!(me.is_connected());
    let (a, b) = (alice.memory(LEN), alice.memory(LEN));
    let descriptor = b.region.descriptor();
    let copies = [Copy::new(3, 1, LEN - 10), Copy::new(0, LEN - 5, 3)];
    let moved = |op| {
        let (mut expected, seed) = (Expected::untouched(LOCAL_POISON), Content::pattern(3));
        for c in &copies {
            match op {
                Op::Write => expected.put(c.remote, c.len, seed.skip(c.local)),
                Op::Read => expected.put(c.local, c.len, seed.skip(c.remote)),
            }
        }
        expected
    };
    for op in [Op::Write, Op::Read] {
        let (source, target) = if op == Op::Write { (&a, &b) } else { (&b, &a) };
        let transfer = alice.transfer_to(op, &me, &a, &descriptor, &copies);
        for round in 0..3 {
            source.memory.fill(Content::pattern(3));
            target.poison();
            let message = format!("{op:?} {round}");
            transfer
                .post_with_notification(message.as_bytes())
                .expect("posted");
            done(&transfer);
            target.check(&moved(op));
            let notice = alice.notification();
            assert_eq!(
                (&*notice.from, &*notice.message),
                ("alice", message.as_bytes())
            );
        }
    }

    // Within one region: a part is copied over its neighbour, which it overlaps.
    a.memory.fill(Content::pattern(4));
    let own = a.region.descriptor();
    let transfer = alice.transfer_to(Op::Write, &me, &a, &own, &[Copy::new(0, 100, 1000)]);
    transfer.post().expect("posted");
    done(&transfer);
    let expected = Expected::only(Content::pattern(4)).with(100..1100, Content::pattern(4));
    a.check(&expected);

    // Nothing to move, a message on its own, tagged messages small and large.
    let nothing = alice.transfer_to(Op::Read, &me, &a, &descriptor, &[]);
    nothing.post_with_notification(b"empty").expect("posted");
    done(&nothing);
    assert_eq!(alice.notification().message, b"empty");
    alice.session.notify(&me, b"note to self").expect("sent");
    assert_eq!(alice.notification().message, b"note to self");
    for (tag, len) in [(1, 0), (2, 100), (3, LEN)] {
        for receive_first in [true, false] {
            a.memory.fill(Content::pattern(tag));
            b.poison();
            let receive = || alice.session.recv(&me, b.region.at(0), LEN, tag);
            let send = || alice.session.send(&me, a.region.at(0), len, tag);
            let (receive, send) = if receive_first {
                let receive = receive();
                (receive, send())
            } else {
                let send = send();
                (receive(), send)
            };
            let (receive, send) = (receive.expect("posted"), send.expect("posted"));
            done(&receive);
            done(&send);
            assert_eq!(receive.received(), len as u64);
            let expected = Expected::untouched(LOCAL_POISON);
            b.check(&expected.with(0..len, Content::pattern(tag)));
        }
    }

    // Accesses that are refused to others are refused to itself too.
    let gone = alice.memory(1000);
    let descriptor = gone.region.descriptor();
    let transfer = alice.transfer_to(Op::Write, &me, &a, &descriptor, &[Copy::new(0, 0, 1000)]);
    gone.region.deregister().expect("registered until now");
    gone.poison();
    transfer.post_with_notification(b"never").expect("posted");
    let error = fails(&transfer);
    assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
    gone.check_untouched();
    assert!(alice.session.notifications().is_empty());
}

#[test]
fn the_two_sides_are_configured_differently() {
    story(|| {
        let small = Setup::base().with("lanes", 1).with("workers", 1);
        let small = small.with("chunk_bytes", "16K").with("window", 1);
        let large = Setup::base().with("lanes", 7).with("workers", 2);
        let large = large.with("chunk_bytes", "4M").with("window", 1024);
        for (ours, theirs) in [(&small, &large), (&large, &small)] {
            const LEN: usize = 6 << 20;
            let alice = Host::open("alice", ours);
            let bob = RemoteProcess::open("bob", theirs);
            let peer = alice.meets(&bob);
            // The connecting side decides on the lanes.
            peer.connect(GUARD).expect("bob listens");
            assert_eq!(peer.lanes().len(), alice.session.config().lanes());
            let (here, there) = (alice.memory(LEN), bob.memory(LEN));
            let copies = [Copy::new(5, 1, LEN - 10)];
            for op in [Op::Write, Op::Read] {
                prepare(op, 1, &here, &bob, &there);
                alice.run(op, &peer, &here, &there, &copies);
                verify(op, 1, &copies, &here, &bob, &there);
            }
            // Bob is the initiator, with his chunks and alice's lanes.
            let copies = [Copy::new(1, 5, LEN - 10)];
            let target = here.region.descriptor();
            prepare(Op::Read, 2, &here, &bob, &there);
            let transfer = bob.transfer(Op::Write, "alice", &there, &target, &copies);
            transfer.post().expect("posted");
            transfer.wait().expect("written");
            let copies = [Copy::new(5, 1, LEN - 10)];
            verify(Op::Read, 2, &copies, &here, &bob, &there);
            let receive = alice.session.recv(&peer, here.region.at(0), LEN, 1);
            let send = bob.send("alice", &there, 0, LEN, 1);
            done(&receive.expect("posted"));
            send.wait().expect("sent");
            here.check(&Expected::only(Content::pattern(2)));
        }
    });
}

#[test]
fn many_threads_use_one_transfer() {
    story(|| {
        const ROUNDS: usize = 100;
        let setup = Setup::lanes4_workers3();
        let alice = Host::open("alice", &setup);
        let bob = RemoteProcess::open("bob", &setup);
        let peer = alice.knows(&bob);
        let (here, there) = (alice.memory(1 << 20), bob.memory(1 << 20));
        let transfer = alice.transfer(Op::Write, &peer, &here, &there, &[Copy::new(0, 0, 1000)]);
        let shared: &Transfer = &transfer;
        let posted = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..ROUNDS {
                        match shared.post_with_notification(b"posted") {
                            Ok(()) => _ = posted.fetch_add(1, Ordering::Relaxed),
                            Err(error) => assert_eq!(error.kind(), ErrorKind::Busy, "{error}"),
                        }
                        done(shared);
                    }
                });
            }
        });
        // One notification per posting, no posting for a refused attempt.
        let posted = posted.into_inner();
        assert!(posted >= ROUNDS);
        assert_eq!(bob.next_notifications(posted).len(), posted);

        // All waiters of a transfer learn of its end.
        let transfer = alice.endless(Op::Read, &peer, &here, &there.descriptor);
        transfer.post().expect("posted");
        let shared: &Transfer = &transfer;
        std::thread::scope(|scope| {
            let waiting: Vec<_> = (0..4).map(|_| scope.spawn(|| fails(shared))).collect();
            wait_for_traffic(&peer);
            shared.abort();
            for thread in waiting {
                let error = thread.join().expect("it learns of the end");
                assert_eq!(error.kind(), ErrorKind::Aborted, "{error}");
            }
        });
        assert!(bob.notifications().is_empty());
    });
}

#[test]
fn statistics_are_exact_while_other_threads_post() {
    story(|| {
        let setup = Setup::lanes4_workers3();
        let alice = Host::open("alice", &setup);
        let bob = RemoteProcess::open("bob", &setup);
        let peer = alice.knows(&bob);
        let (here, there) = (alice.memory(1 << 20), bob.memory(1 << 20));
        std::thread::scope(|scope| {
            let threads = [Op::Write, Op::Read].map(|op| {
                let (alice, peer, here, there) = (&alice, &peer, &here, &there);
                scope.spawn(move || {
                    let copies = [Copy::new(0, 0, 1000)];
                    let transfer = alice.transfer(op, peer, here, there, &copies);
                    for _ in 0..5000 {
                        transfer.post().expect("posted");
                        done(&transfer);
                    }
                })
            });
            while !threads.iter().all(|thread| thread.is_finished()) {
                alice.ledger.verify(|| alice.session.stats());
            }
        });
        alice.verify_figures(&bob);
    });
}

#[test]
fn what_cannot_be_prepared_is_refused_at_once() {
    story(|| {
        let setup = Setup::lanes1_workers1();
        let alice = Host::open("alice", &setup);
        let carol = Host::open("carol", &setup);
        let bob = RemoteProcess::open("bob", &setup);
        let peer = alice.knows(&bob);
        let (here, there) = (alice.memory(1000), bob.memory(500));
        let prepare = |local: usize, remote: usize, len: usize| {
            let segment = Segment {
                local: here.region.at(local),
                remote: there.descriptor.at(remote),
                len,
            };
            alice.session.prepare(Op::Write, &peer, [segment])
        };
        prepare(500, 0, 500).expect("both ends fit");
        for (local, remote, len) in [
            (501, 0, 500),
            (0, 1, 500),
            (1001, 0, 0),
            (usize::MAX, 0, 2),
            (0, usize::MAX, 2),
            (0, 0, usize::MAX),
        ] {
            let error = prepare(local, remote, len).expect_err("it does not fit");
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        }
        let foreign = carol.memory(1000);
        let segment = Segment {
            local: foreign.region.at(0),
            remote: there.descriptor.at(0),
            len: 1,
        };
        let error = alice
            .session
            .prepare(Op::Write, &peer, [segment])
            .expect_err("carol's memory");
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        let transfer = prepare(0, 0, 1).expect("it fits");
        here.region.deregister().expect("registered until now");
        here.region.deregister().expect_err("only once");
        let error = transfer.post().expect_err("deregistered");
        assert_eq!(error.kind(), ErrorKind::NotAllowed, "{error}");
        let error = prepare(0, 0, 1).expect_err("deregistered");
        assert_eq!(error.kind(), ErrorKind::NotAllowed, "{error}");
    });
}

#[test]
fn four_gibibytes() {
    story_within(Duration::from_secs(300), || {
        if available_bytes().is_some_and(|bytes| bytes < 12 << 30) {
            return skipped("it takes 12 GiB of memory");
        }
        // One byte more, so that no length fits 32 bits.
        const LEN: usize = (4 << 30) + 1;
        let setup = Setup::lanes4_workers3();
        let alice = Host::open("alice", &setup);
        let bob = RemoteProcess::open("bob", &setup);
        let peer = alice.knows(&bob);
        // Bob's memory is zero, which serves as poison. Both sides touch their pages at the same
        // time.
        let allocated = bob.begin(Command::Allocate { len: LEN + 20 });
        let here = alice.memory(LEN + 20);
        here.memory.fill(Content::pattern(4));
        let there = RemoteMemory::new(allocated.get(), LEN + 20);
        let write = alice.transfer(Op::Write, &peer, &here, &there, &[Copy::new(3, 10, LEN)]);
        write.post_with_notification(b"4 GiB").expect("posted");
        done(&write);
        assert_eq!(bob.notification().message, b"4 GiB");
        let arrived = Expected::untouched(0);
        let arrived = arrived.with(10..LEN + 10, Content::pattern(4).skip(3));
        let checked = bob.begin_check(&there, &arrived);

        // Back to another place: every byte changes.
        let read = alice.transfer(Op::Read, &peer, &here, &there, &[Copy::new(7, 10, LEN)]);
        read.post().expect("posted");
        done(&read);
        let back = Expected::only(Content::pattern(4));
        here.check(&back.with(7..LEN + 7, Content::pattern(4).skip(3)));
        checked.verify();
    });
}
