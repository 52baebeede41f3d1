//! Tagged messages in races that applications cannot trigger on purpose.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use super::{Tagged, TaggedReceive, TaggedSend, announce};
use crate::testing::{LONG, Pair, session, wait_until};
use crate::transfer::Arrival;
use crate::{Buffer, Error, Session, TransferState};

const SMALL: usize = 64;

fn region(session: &Session, len: usize) -> crate::Region {
    session.register(&Buffer::new(len)).unwrap()
}

/// There are two connections if both sides have connected.
#[test]
fn message_fails_with_the_connection_it_was_announced_on() {
    for _ in 0..1000 {
        let (alice, bob) = (session("alice"), session("bob"));
        let to_bob = alice.add_peer(&bob.connection_info()).unwrap();
        let to_alice = bob.add_peer(&alice.connection_info()).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| to_bob.connect(LONG).unwrap());
            scope.spawn(|| to_alice.connect(LONG).unwrap());
        });
        if [&alice, &bob].map(|s| s.core().context().links().len()) != [2, 2] {
            continue;
        }
        let here = region(&alice, SMALL);
        let send = alice.send(&to_bob, here.at(0), SMALL, 7).unwrap();
        let receive = alice.recv(&to_bob, here.at(0), SMALL, 8).unwrap();
        let used = to_bob.shared.link().expect("connected");
        used.kill(Error::Aborted);
        assert_eq!(send.wait(LONG), Err(Error::Aborted));
        // The other connection still delivers messages.
        let there = region(&bob, SMALL);
        wait_until("bob has noticed", || {
            bob.core().context().links().len() == 1
        });
        let answer = bob.send(&to_alice, there.at(0), SMALL, 8).unwrap();
        answer.wait(LONG).unwrap();
        receive.wait(LONG).unwrap();
        return;
    }
    panic!("never two connections");
}

#[test]
fn message_after_a_disconnect_reconnects() {
    for _ in 0..20 {
        let pair = Pair::new();
        let (here, there) = (region(&pair.alice, SMALL), region(&pair.bob, SMALL));
        pair.to_bob.disconnect();
        let send = pair.alice.send(&pair.to_bob, here.at(0), SMALL, 7).unwrap();
        let to_alice = pair.bob.accept(LONG).unwrap();
        let receive = pair.bob.recv(&to_alice, there.at(0), SMALL, 7).unwrap();
        receive.wait(LONG).unwrap();
        send.wait(LONG).unwrap();
    }
}

#[test]
fn message_aborted_before_it_is_sent_matches_no_receive() {
    let (alice, bob) = (session("alice"), session("bob"));
    let to_bob = alice.add_peer(&bob.connection_info()).unwrap();
    let (here, there) = (region(&alice, SMALL), region(&bob, SMALL));
    drop(alice.send(&to_bob, here.at(0), 1, 7).unwrap());
    let next = alice.send(&to_bob, here.at(0), SMALL, 7).unwrap();
    let to_alice = bob.accept(LONG).unwrap();
    let receive = bob.recv(&to_alice, there.at(0), SMALL, 7).unwrap();
    receive.wait(LONG).unwrap();
    next.wait(LONG).unwrap();
    assert_eq!(receive.received(), SMALL as u64);
}

#[test]
fn message_to_oneself_does_not_keep_a_closed_session_alive() {
    let alice = session("alice");
    let here = region(&alice, SMALL);
    let core = Arc::downgrade(alice.core());
    let (span, memory) = alice.core().slice(here.at(0), SMALL).unwrap();
    let send = TaggedSend::new(
        alice.core().context(),
        alice.core().own_peer().metered(),
        7,
        span,
        &memory,
    );
    let own_peer = Arc::clone(alice.core().own_peer());
    own_peer.tagged.add_send(&send).unwrap();
    let link = own_peer.link().unwrap();
    alice.close();
    announce(&own_peer, &link, &send);
    assert_eq!(send.completion.state(), TransferState::Failed);
    assert!(own_peer.tagged.add_send(&send).is_err());
    drop((link, send, here, memory, own_peer, alice));
    assert!(core.upgrade().is_none());
}

/// A revocation waits for the copies of messages from and to its memory.
#[test]
fn messages_are_not_copied_during_a_revocation() {
    let pair = Pair::new();
    let (here, there) = (region(&pair.alice, SMALL), region(&pair.bob, SMALL));
    let waits = |session: &Session, copy: &(dyn Fn() + Sync)| {
        let (tell, told) = channel();
        let taking_back = session.core().context().copies.hold();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                copy();
                tell.send(()).unwrap();
            });
            let early = told.recv_timeout(Duration::from_millis(100));
            assert!(
                early.is_err(),
                "the message was copied during the revocation"
            );
            drop(taking_back);
        });
    };
    let send = || {
        let send = pair.alice.send(&pair.to_bob, here.at(0), SMALL, 7).unwrap();
        // The end of the send is not awaited here.
        std::mem::forget(send);
    };
    waits(&pair.alice, &send);
    wait_until("the message has arrived", || {
        let tagged = &pair.to_alice.shared.tagged;
        !tagged.state.lock().arrived.is_empty()
    });
    waits(&pair.bob, &|| {
        let receive = pair
            .bob
            .recv(&pair.to_alice, there.at(0), SMALL, 7)
            .unwrap();
        receive.wait(LONG).unwrap();
    });
}

/// Makes a message that arrived with its announcement.
fn arrival(tag: u64) -> Arrival {
    Arrival {
        id: tag,
        tag,
        len: SMALL as u64,
        pieces: Vec::new(),
        inline: Some(vec![0; SMALL]),
    }
}

#[test]
fn unmatched_bytes_are_kept_up_to_a_limit() {
    let pair = Pair::new();
    let link = pair.to_bob.shared.link().expect("connected");
    let here = region(&pair.alice, SMALL);
    let tagged = Tagged::new(2 * SMALL);
    let has_bytes = |tag| {
        let (target, memory) = pair.alice.core().slice(here.at(0), SMALL).unwrap();
        let metered = pair.to_bob.shared.metered();
        let context = pair.alice.core().context();
        let receive = TaggedReceive::new(context, metered, tag, target, memory);
        let found = tagged
            .post(&receive)
            .unwrap()
            .expect("the announcement has arrived");
        found.arrival.inline.is_some()
    };
    for tag in 0..3 {
        assert!(tagged.take(&link, arrival(tag), None).is_none());
    }
    assert_eq!([0, 1, 2].map(has_bytes), [true, true, false]);
    // Matched messages have made room.
    assert!(tagged.take(&link, arrival(3), None).is_none());
    assert!(has_bytes(3));
}

#[test]
fn announcement_after_the_end_is_not_kept() {
    let pair = Pair::new();
    let link = pair.to_bob.shared.link().expect("connected");
    let tagged = Tagged::new(SMALL);
    tagged.end(&Error::Closed);
    assert!(tagged.take(&link, arrival(7), None).is_none());
    assert!(tagged.state.lock().arrived.is_empty());
}
