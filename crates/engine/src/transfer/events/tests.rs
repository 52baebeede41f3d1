use std::fs::File;
use std::io::Read;
use std::sync::Barrier;
use std::time::Duration;

use tcpx_net::Poller;

use super::*;
use crate::testing::{LONG, Pair};
use crate::transfer::Completion;
use crate::{Buffer, ErrorKind, Op, Segment, Transfer, TransferState};

/// Waits until the descriptor is readable, as an event loop does; returns whether it became so.
fn is_readable(events: &Events, limit: Duration) -> bool {
    let poller = Poller::new().unwrap();
    poller.add_armed(events, 7).unwrap();
    let mut found = Vec::new();
    poller.wait(&mut found, Some(limit)).unwrap();
    !found.is_empty()
}

fn ended(keys: &[u64]) -> Happened {
    Happened {
        ended: keys.to_vec(),
        ..Happened::default()
    }
}

#[test]
fn pending_events_raise_the_signal_once() {
    let events = Events::new().unwrap();
    assert!(!is_readable(&events, Duration::ZERO));
    for key in 0..5 {
        events.queue.ended(key);
    }
    events.queue.notified();
    let mut raised = [0; 8];
    let copy = events.as_fd().try_clone_to_owned().unwrap();
    File::from(copy).read_exact(&mut raised).unwrap();
    assert_eq!(
        u64::from_ne_bytes(raised),
        1,
        "each event made a system call"
    );
}

#[test]
fn taking_all_events_makes_the_descriptor_unreadable() {
    let events = Events::new().unwrap();
    events.queue.ended(3);
    events.queue.notified();
    events.queue.closed();
    assert!(is_readable(&events, Duration::ZERO));
    let happened = events.take(8).unwrap();
    assert_eq!(happened.ended, [3]);
    assert!(happened.notified && happened.closed && !happened.more);
    assert!(!is_readable(&events, Duration::ZERO));
    assert_eq!(events.take(8).unwrap(), Happened::default());
    events.queue.ended(4);
    assert!(is_readable(&events, Duration::ZERO), "raised again");
}

#[test]
fn remaining_events_keep_the_descriptor_readable() {
    let events = Events::new().unwrap();
    for key in 0..3 {
        events.queue.ended(key);
    }
    let first = events.take(2).unwrap();
    assert_eq!((first.ended, first.more), (vec![0, 1], true));
    assert!(is_readable(&events, Duration::ZERO));
    assert_eq!(events.take(2).unwrap(), ended(&[2]));
    assert!(!is_readable(&events, Duration::ZERO));
}

/// Either the caller sees the ended state, or an event arrives; never neither, never both.
#[test]
fn end_concurrent_with_arming_is_seen_exactly_once() {
    let events = Events::new().unwrap();
    let queue = events.queue().unwrap();
    for key in 0..2000 {
        let (completion, start) = (Completion::new(), Barrier::new(2));
        let state = std::thread::scope(|scope| {
            scope.spawn(|| {
                start.wait();
                completion.finish();
            });
            start.wait();
            completion.arm(queue, key)
        });
        let seen = usize::from(state.is_terminal());
        assert_eq!(events.take(8).unwrap().ended.len() + seen, 1);
    }
}

/// A loop that waits only for the descriptor learns of every end.
#[test]
fn no_wake_up_is_lost_between_taking_and_waiting() {
    const ENDS: u64 = 20_000;
    let events = Events::new().unwrap();
    let queue = events.queue().unwrap();
    let mut seen = 0;
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| (0..ENDS).for_each(|key| queue.ended(key)));
        }
        while seen < 2 * ENDS {
            assert!(is_readable(&events, LONG), "lost after {seen}");
            seen += events.take(usize::MAX).unwrap().ended.len() as u64;
        }
    });
    assert_eq!(seen, 2 * ENDS);
}

/// Prepares a WRITE of `len` bytes from a buffer of Alice's to one of Bob's.
fn write(pair: &Pair, len: usize) -> Transfer {
    let (source, target) = (Buffer::new(len), Buffer::new(len));
    let local = pair.alice.register(&source).unwrap();
    let remote = pair.bob.register(&target).unwrap();
    let descriptor = remote.descriptor();
    let segment = Segment {
        local: local.at(0),
        remote: descriptor.at(0),
        len,
    };
    let transfer = pair.alice.prepare(Op::Write, &pair.to_bob, [segment]);
    // Skip deregistration, which these tests do not cover.
    std::mem::forget((local, remote));
    transfer.unwrap()
}

#[test]
fn transfer_ends_and_signals_without_polling() {
    for pair in [Pair::new(), Pair::on_same_host()] {
        let events = Events::new().unwrap();
        for len in [4096, 8 << 20] {
            let transfer = write(&pair, len);
            let unposted = transfer.arm(&events, 1).unwrap();
            assert_eq!(unposted, TransferState::Prepared);
            for _ in 0..3 {
                transfer.post().unwrap();
                let key = len as u64;
                if !transfer.arm(&events, key).unwrap().is_terminal() {
                    // Arming twice causes one event.
                    transfer.arm(&events, key).unwrap();
                    assert!(is_readable(&events, LONG));
                    assert_eq!(events.take(8).unwrap(), ended(&[key]));
                }
                assert_eq!(transfer.arm(&events, key).unwrap(), TransferState::Done);
                assert_eq!(events.take(8).unwrap(), Happened::default());
            }
        }
    }
}

#[test]
fn failures_and_aborts_are_ends_too() {
    let pair = Pair::new();
    let events = Events::new().unwrap();
    let buffer = Buffer::new(64);
    let region = pair.alice.register(&buffer).unwrap();
    let receive = || pair.alice.recv(&pair.to_bob, region.at(0), 64, 7).unwrap();
    let (aborted, failed) = (receive(), receive());
    for (key, transfer) in [(1, &aborted), (2, &failed)] {
        let state = transfer.arm(&events, key).unwrap();
        assert_eq!(state, TransferState::InProgress);
    }
    aborted.abort();
    assert_eq!(events.take(8).unwrap(), ended(&[1]));
    pair.alice.close();
    assert!(is_readable(&events, LONG));
    assert_eq!(events.take(8).unwrap(), ended(&[2]));
    assert_eq!(failed.error().unwrap().kind(), ErrorKind::Closed);
}

#[test]
fn each_subscriber_gets_notifications_and_the_end_of_the_session() {
    let pair = Pair::new();
    let both = [Events::new().unwrap(), Events::new().unwrap()];
    for events in &both {
        pair.bob.subscribe(events).unwrap();
        pair.bob.subscribe(events).unwrap();
    }
    // Dropped at once: a subscriber without a handle.
    pair.bob.subscribe(&Events::new().unwrap()).unwrap();
    pair.alice.notify(&pair.to_bob, b"one").unwrap();
    for events in &both {
        assert!(is_readable(events, LONG));
        assert!(events.take(8).unwrap().notified);
    }
    assert_eq!(pair.bob.notifications().len(), 1);
    pair.bob.close();
    for events in &both {
        assert!(is_readable(events, LONG));
        assert!(events.take(8).unwrap().closed);
    }
    let late = pair.bob.subscribe(&both[0]).unwrap_err();
    assert_eq!(late.kind(), ErrorKind::Closed);
}
