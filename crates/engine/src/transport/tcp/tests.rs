//! What a connection does in moments that no peer can bring about at will.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tcpx_proto::frame::{FLAG_COMM, Header, Kind};

use super::Liveness;
use crate::plan::Op;
use crate::testing::{LONG, Pair, connection, wait_until};
use crate::{Buffer, Config, Error, Segment, Session};

/// The bytes of a message are asked for by whoever finds it, who holds the lane.
#[test]
fn a_message_that_is_found_after_the_end_keeps_nobody() {
    const LEN: usize = 1 << 20;
    let pair = Pair::new();
    let [here, there] =
        [&pair.alice, &pair.bob].map(|session| session.register(&Buffer::new(LEN)).unwrap());
    let receive = pair.alice.recv(&pair.to_bob, here.at(0), LEN, 7).unwrap();
    let connection = connection(pair.alice.core());
    let rx = connection.lanes[0].rx.lock();
    let send = pair.bob.send(&pair.to_alice, there.at(0), LEN, 7).unwrap();
    let stream = &connection.lanes[0].stream;
    wait_until("the message is there", || stream.is_readable());
    // As those do who end a connection: first this, then the rest.
    connection.end.set(Error::Closed).unwrap();
    drop(rx);
    connection.lanes[0].call_worker();
    let tagged = &pair.to_bob.shared.tagged;
    wait_until("it was found", || !tagged.is_waiting());
    let rx = connection.lanes[0].rx.try_lock_for(LONG);
    assert!(rx.is_some(), "whoever found it waits for itself");
    drop(rx);
    connection.shut();
    assert!(matches!(receive.wait(LONG), Err(Error::Closed)));
    assert!(matches!(send.wait(LONG), Err(Error::PeerLost { .. })));
}

#[test]
fn an_answer_on_a_comm_that_is_not_there_ends_what_waited_for_it() {
    const LEN: usize = 64;
    let pair = Pair::new();
    let [here, there] =
        [&pair.alice, &pair.bob].map(|session| session.register(&Buffer::new(LEN)).unwrap());
    let (ours, theirs) = (connection(pair.alice.core()), connection(pair.bob.core()));
    // Bob does not see what is asked.
    let held: Vec<_> = theirs.lanes.iter().map(|lane| lane.rx.lock()).collect();
    let remote = there.descriptor();
    let segment = Segment {
        local: here.at(0),
        remote: remote.at(0),
        len: LEN,
    };
    let read = pair
        .alice
        .prepare(Op::Read, &pair.to_bob, [segment])
        .unwrap();
    read.post().unwrap();
    let asked = |lane: &super::Lane| Some(lane.in_flight.lock().reads.front()?.run.id);
    let find = || (0..ours.lanes.len()).find_map(|index| Some((index, asked(&ours.lanes[index])?)));
    wait_until("a chunk is asked for", || find().is_some());
    let (index, id) = find().expect("nobody answers");
    let header = Header {
        flags: FLAG_COMM,
        payload: LEN as u64,
        ..Header::new(Kind::Data, id)
    };
    theirs.lanes[index].push_control(|out| header.encode(out));
    theirs.lanes[index].call_worker();
    assert!(matches!(read.wait(LONG), Err(Error::PeerMisbehaved { .. })));
    drop(held);
}

#[test]
fn a_ping_may_have_all_the_time_there_is() {
    let pair = Pair::new();
    pair.to_bob.round_trip(0, Duration::MAX).unwrap();
    let connection = connection(pair.alice.core());
    connection.kill(Error::Aborted);
    assert!(connection.ping(0, Duration::MAX).is_none());
}

#[test]
fn the_time_that_this_process_did_not_run_is_not_its_peers_silence() {
    let limit = Duration::from_secs(8);
    let start = Instant::now();
    let mut liveness = Liveness::default();
    let mut look = |seconds, moved| {
        let passed = liveness.passed(start + Duration::from_secs(seconds), limit);
        liveness.stream.look(Some(moved), passed).as_secs()
    };
    assert_eq!(look(0, 5), 0);
    assert_eq!(look(1, 5), 1);
    // An hour in which nobody looked: the next looks tell.
    assert_eq!(look(3601, 5), 3);
    assert_eq!(look(3603, 5), 5);
    assert_eq!(look(3604, 6), 0);
    assert_eq!(look(3605, 6), 1);
}

#[test]
fn memory_that_nobody_uses_is_not_kept() {
    const LEN: usize = 1 << 20;
    let pair = Pair::new();
    let here = pair.alice.register(&Buffer::new(LEN)).unwrap();
    for op in [Op::Write, Op::Read] {
        let there = pair.bob.register(&Buffer::new(LEN)).unwrap();
        let memory = Arc::downgrade(there.memory());
        let remote = there.descriptor();
        let segment = Segment {
            local: here.at(0),
            remote: remote.at(0),
            len: LEN,
        };
        let transfer = pair.alice.prepare(op, &pair.to_bob, [segment]).unwrap();
        transfer.post().unwrap();
        transfer.wait(LONG).unwrap();
        drop(there);
        wait_until("it is freed", || memory.upgrade().is_none());
    }
}

/// What the caller who polls has taken from the socket, the worker does not hear of from the kernel.
#[test]
fn whoever_stops_polling_leaves_nothing_undone() {
    const LEN: usize = 16 << 20;
    let [alice, bob] = ["alice", "bob"].map(|name| {
        let config = Config::defaults().with("interfaces", "lo").unwrap();
        let config = config.with("lanes", "1").unwrap().with("workers", "1");
        // No sign of life is asked for meanwhile: that would set things going again.
        let config = config.unwrap().with("peer_timeout", "1h").unwrap();
        Session::new(config.with("name", name).unwrap()).unwrap()
    });
    let to_bob = alice.add_peer(&bob.connection_info()).unwrap();
    to_bob.connect(LONG).unwrap();
    let to_alice = bob.accept(LONG).unwrap();
    let [here, there] =
        [&alice, &bob].map(|session| session.register(&Buffer::new(LEN + 8)).unwrap());
    let (at_alice, at_bob) = (here.descriptor(), there.descriptor());
    let word = Segment {
        local: here.at(LEN),
        remote: at_bob.at(LEN),
        len: 8,
    };
    let large = Segment {
        local: there.at(0),
        remote: at_alice.at(0),
        len: LEN,
    };
    let polled = alice.prepare(Op::Read, &to_bob, [word]).unwrap();
    let served = bob.prepare(Op::Read, &to_alice, [large]).unwrap();
    for _ in 0..300 {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                polled.post().unwrap();
                while !polled.poll().is_terminal() {}
            });
            served.post().unwrap();
            served.wait(LONG).unwrap();
        });
    }
}
