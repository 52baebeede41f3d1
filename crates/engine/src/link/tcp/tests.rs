//! What a connection does in moments that no peer can bring about at will.

mod near;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::channel;
use std::time::Duration;

use tcpx_net::{Cursor, Listener, SocketOptions, Stream};
use tcpx_proto::frame::down::StreamId;
use tcpx_proto::frame::{FLAG_COMM, Header, Kind};

use super::drive::BUDGET;
use super::{Connection, Lane, Windows};

use crate::carrier::comm::RawLane;
use crate::link::{Link, Rejoined};
use crate::testing::{LONG, Pair, connection, wait_until};
use crate::{Buffer, Config, Error, LostCause, Misbehaviour, Op, Segment, Session};

/// Runs `body` while another thread holds the receiving halves of all lanes: nothing is received.
fn while_deaf<T>(connection: &Connection, body: impl FnOnce() -> T) -> T {
    while_deaf_on(connection, usize::MAX, body)
}

/// As [`while_deaf`], for the first so many lanes.
fn while_deaf_on<T>(connection: &Connection, count: usize, body: impl FnOnce() -> T) -> T {
    let (held, is_held) = channel();
    let (release, released) = channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let lanes = connection.lanes.load();
            let mut guards = Vec::new();
            for lane in lanes.iter().take(count) {
                wait_until("it can be held", || match lane.receiver.try_lock() {
                    Some(guard) => {
                        guards.push(guard);
                        true
                    }
                    None => false,
                });
            }
            held.send(()).unwrap();
            // Ends when the other end is dropped.
            let _ = released.recv();
        });
        is_held.recv().unwrap();
        let result = body();
        drop(release);
        result
    })
}

/// The lane that messages travel on.
fn carrier(connection: &Connection) -> Arc<Lane> {
    Arc::clone(&connection.lanes.load()[connection.messages.carrier()])
}

/// The bytes of a message are asked for by the thread that finds it.
#[test]
fn a_message_that_is_found_after_the_end_keeps_nobody() {
    const LEN: usize = 1 << 20;
    let pair = Pair::new();
    let [here, there] =
        [&pair.alice, &pair.bob].map(|session| session.register(&Buffer::new(LEN)).unwrap());
    let receive = pair.alice.recv(&pair.to_bob, here.at(0), LEN, 7).unwrap();
    let connection = connection(pair.alice.core());
    let send = while_deaf(&connection, || {
        let send = pair.bob.send(&pair.to_alice, there.at(0), LEN, 7).unwrap();
        let lane = carrier(&connection);
        wait_until("the message is there", || lane.stream.is_readable());
        // As those do who end a connection: first this, then the rest.
        connection.end.set(Error::Closed).unwrap();
        send
    });
    let lane = carrier(&connection);
    lane.call_worker();
    let tagged = &pair.to_bob.shared.tagged;
    wait_until("it was found", || !tagged.is_waiting());
    let receiver = lane.receiver.try_lock_for(LONG);
    assert!(receiver.is_some(), "whoever found it waits for itself");
    drop(receiver);
    connection.shut();
    assert!(matches!(receive.wait(LONG), Err(Error::Closed)));
    let error = send.wait(LONG).unwrap_err();
    // Bob's bytes that nobody has read make it a reset.
    let is_closed = |cause: &LostCause| matches!(cause, LostCause::ClosedByPeer | LostCause::Io(_));
    assert!(
        matches!(&error, Error::PeerLost { peer, cause } if peer == "alice" && is_closed(cause)),
        "{error:?}"
    );
}

#[test]
fn an_answer_on_a_comm_that_is_not_there_ends_what_waited_for_it() {
    const LEN: usize = 64;
    let pair = Pair::new();
    let [here, there] =
        [&pair.alice, &pair.bob].map(|session| session.register(&Buffer::new(LEN)).unwrap());
    let (ours, theirs) = (connection(pair.alice.core()), connection(pair.bob.core()));
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
    // Bob does not see what is asked.
    while_deaf(&theirs, || {
        read.post().unwrap();
        // The last number that was given out.
        let id = pair.alice.core().context().next_id() - 1;
        let is_asked = |lane: &Arc<Lane>| lane.load.load(Ordering::Relaxed) > 0;
        wait_until("a chunk is asked for", || {
            ours.lanes.load().iter().any(is_asked)
        });
        let index = ours.lanes.load().iter().position(is_asked).unwrap();
        let header = Header {
            flags: FLAG_COMM,
            payload: LEN as u64,
            ..Header::new(Kind::Data, id)
        };
        theirs.lanes.load()[index].push_control(|out| header.encode(out));
        theirs.lanes.load()[index].call_worker();
        let expected = Error::PeerMisbehaved {
            peer: "bob".into(),
            what: Misbehaviour::CommMissing,
        };
        assert_eq!(read.wait(LONG), Err(expected));
    });
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

/// A connection of one lane that nobody drives but its test, after these bytes have come, and the other
/// end of the stream.
fn undriven(pair: &Pair, early: Vec<u8>) -> (Arc<Connection>, Stream) {
    let of = connection(pair.alice.core());
    let options = SocketOptions {
        buffer_bytes: 64 << 10,
        dead_after: LONG,
    };
    let listener = Listener::bind(([127, 0, 0, 1], 0).into(), &options).unwrap();
    let stream = Stream::connect(listener.local_addr().unwrap(), None, &options).unwrap();
    let mut far = None;
    wait_until("the lane is connected", || {
        far = listener.accept().ok();
        far.is_some()
    });
    let far = far.unwrap().0;
    let windows = Windows::new(&of.context, &of.established, 1);
    let worker = Arc::clone(&of.lanes.load()[0].worker);
    let id = StreamId {
        lane: 0,
        generation: 0,
    };
    let raw = RawLane { stream, early };
    let lane = Lane::new(id, raw, None, windows, worker, &of.context).unwrap();
    // Never started.
    let connection = Connection::new(
        Arc::clone(&of.context),
        Arc::clone(&of.above),
        of.established.clone(),
        windows,
        vec![lane],
    );
    (connection, far)
}

/// What has come behind the handshake is dealt with although nothing follows.
#[test]
fn what_came_with_the_handshake_is_not_waited_behind() {
    let pair = Pair::new();
    let mut early = Vec::new();
    Header::new(Kind::Ping, 0).encode(&mut early);
    let (connection, far) = undriven(&pair, early);
    let lanes = connection.lanes.load();
    connection.drive(&lanes[0], BUDGET);
    let mut answer = [0; 64];
    wait_until("it is answered", || {
        far.recv(&[], Cursor::default(), &mut answer).is_ok()
    });
    let header = Header::decode(answer.first_chunk().unwrap()).unwrap();
    assert_eq!(header, Header::new(Kind::Pong, 0));
    connection.kill(Error::Closed);
}

/// A frame that was begun is completed without a look at what was queued meanwhile.
#[test]
fn what_is_queued_behind_a_frame_that_has_stuck_is_sent() {
    const STUCK: usize = 16 << 20;
    const LATER: usize = 100;
    let pair = Pair::new();
    let (connection, far) = undriven(&pair, Vec::new());
    let lanes = connection.lanes.load();
    let lane = &lanes[0];
    lane.push_control(|out| out.resize(STUCK, 0));
    lane.pump(&connection, BUDGET).unwrap();
    assert!(lane.is_blocked());
    lane.push_control(|out| out.resize(LATER, 0));

    let mut received = 0;
    let mut buffer = vec![0; 1 << 20];
    wait_until("the lane has nothing to send", || {
        while let Ok(count) = far.recv(&[], Cursor::default(), &mut buffer) {
            received += count;
        }
        lane.pump(&connection, BUDGET).unwrap();
        !lane.is_unfinished()
    });
    wait_until("all of it has come", || {
        if let Ok(count) = far.recv(&[], Cursor::default(), &mut buffer) {
            received += count;
        }
        received == STUCK + LATER
    });
    connection.kill(Error::Closed);
}

/// Every lane for bulk stands still, full of it.
#[test]
fn small_transfers_and_messages_pass_large_ones() {
    const LARGE: usize = 64 << 20;
    const SMALL: usize = 4 << 10;
    let pair = Pair::new();
    let [here, there] = [&pair.alice, &pair.bob].map(|session| {
        let buffer = Buffer::new(LARGE + SMALL);
        session.register(&buffer).unwrap()
    });
    let descriptor = there.descriptor();
    let transfer = |op, at: usize, len| {
        let remote = descriptor.at(at);
        let local = here.at(at);
        pair.alice
            .prepare(op, &pair.to_bob, [Segment { local, remote, len }])
            .unwrap()
    };
    let large = transfer(Op::Write, 0, LARGE);
    let bobs = connection(pair.bob.core());
    let bulk_lanes = bobs.lanes();
    while_deaf_on(&bobs, bulk_lanes, || {
        large.post().unwrap();
        for op in [Op::Write, Op::Read] {
            let small = transfer(op, LARGE, SMALL);
            small.post_with_notification(b"small").unwrap();
            small.wait(LONG).unwrap();
            assert_eq!(pair.bob.wait_notification(LONG).unwrap().message, b"small");
        }
        pair.alice.notify(&pair.to_bob, b"alone").unwrap();
        assert_eq!(pair.bob.wait_notification(LONG).unwrap().message, b"alone");
        assert!(!large.poll().is_terminal());
    });
    large.wait(LONG).unwrap();
}

/// Otherwise the lane that is kept for small transfers would be like the others after the first blink.
#[test]
fn messages_return_to_their_lane_when_it_is_back() {
    let pair = Pair::new();
    let ours = connection(pair.alice.core());
    let first = carrier(&ours);
    assert_eq!(first.index(), ours.lanes());
    first.stream.shutdown();
    wait_until("the lane is back", || {
        let lanes = ours.lanes.load();
        let newest = &lanes[first.index()];
        !Arc::ptr_eq(newest, &first) && !newest.is_down()
    });
    wait_until("it carries messages", || {
        carrier(&ours).index() == first.index()
    });
    for number in 0..100u32 {
        let message = number.to_le_bytes();
        pair.alice.notify(&pair.to_bob, &message).unwrap();
    }
    for number in 0..100u32 {
        let heard = pair.bob.wait_notification(LONG).unwrap();
        assert_eq!(heard.message, number.to_le_bytes());
    }
}

#[test]
fn large_transfers_leave_the_lane_for_small_ones_alone() {
    const LARGE: usize = 8 << 20;
    let pair = Pair::new();
    let [here, there] =
        [&pair.alice, &pair.bob].map(|session| session.register(&Buffer::new(LARGE)).unwrap());
    let descriptor = there.descriptor();
    let ours = connection(pair.alice.core());
    let express = Arc::clone(&ours.lanes.load()[ours.lanes()]);
    for op in [Op::Write, Op::Read] {
        let segment = Segment {
            local: here.at(0),
            remote: descriptor.at(0),
            len: LARGE,
        };
        let large = pair.alice.prepare(op, &pair.to_bob, [segment]).unwrap();
        for _ in 0..3 {
            // Posted again behind a notification, too.
            large.post_with_notification(b"large").unwrap();
            large.wait(LONG).unwrap();
        }
    }
    assert!(express.moved() < LARGE as u64 / 100, "{}", express.moved());
}

/// Two sessions that keep little.
fn frugal_pair() -> Pair {
    let [alice, bob] = ["alice", "bob"].map(|name| {
        let config = Config::defaults().with("interfaces", "lo").unwrap();
        let config = config.with("queue_bytes", "1M").unwrap();
        // Nobody is given up meanwhile.
        let config = config.with("peer_timeout", "1h").unwrap();
        Session::new(config.with("name", name).unwrap()).unwrap()
    });
    let to_bob = alice.add_peer(&bob.connection_info()).unwrap();
    to_bob.connect(LONG).unwrap();
    let to_alice = bob.accept(LONG).unwrap();
    Pair {
        alice,
        bob,
        to_bob,
        to_alice,
    }
}

#[test]
fn whoever_notifies_a_peer_that_does_not_keep_up_is_told() {
    const LEN: usize = 64;
    let pair = frugal_pair();
    let [here, there] =
        [&pair.alice, &pair.bob].map(|session| session.register(&Buffer::new(LEN)).unwrap());
    let (ours, theirs) = (connection(pair.alice.core()), connection(pair.bob.core()));
    let remote = there.descriptor();
    let segment = Segment {
        local: here.at(0),
        remote: remote.at(0),
        len: LEN,
    };
    let read = pair.alice.prepare(Op::Read, &pair.to_bob, [segment]);
    let (read, nothing) = (
        read.unwrap(),
        pair.alice.prepare(Op::Write, &pair.to_bob, []),
    );
    let nothing = nothing.unwrap();
    let limit = ours.context.quota.of_a_peer();
    let mut sent = 0;
    while_deaf(&theirs, || {
        let notify = || pair.alice.notify(&pair.to_bob, &[7; 10_000]);
        let mut told = None;
        wait_until("it does not keep up", || {
            told = match notify() {
                Ok(()) => {
                    sent += 1;
                    None
                }
                Err(error) => Some(error),
            };
            told.is_some()
        });
        let Some(Error::PeerBehind { peer, queued }) = told else {
            panic!("{told:?}");
        };
        assert_eq!(peer, "bob");
        assert!(queued > limit && queued < 2 * limit, "{queued}");
        for transfer in [&read, &nothing] {
            let error = transfer.post_with_notification(b"never").unwrap_err();
            assert!(matches!(error, Error::PeerBehind { .. }), "{error}");
        }
        // Without a notification there is nothing to wait for.
        read.post().unwrap();
    });
    for _ in 0..sent {
        let notification = pair.bob.wait_notification(LONG).unwrap();
        assert_eq!(notification.message, [7; 10_000]);
    }
    read.wait(LONG).unwrap();
    wait_until("there is room again", || {
        pair.alice.notify(&pair.to_bob, b"more").is_ok()
    });
    assert_eq!(pair.bob.wait_notification(LONG).unwrap().message, b"more");
    assert_eq!(pair.bob.core().context().quota.used(), 0);
}

#[test]
fn a_peer_that_never_reads_what_it_is_owed_loses_its_connection() {
    let pair = frugal_pair();
    let (ours, theirs) = (connection(pair.alice.core()), connection(pair.bob.core()));
    while_deaf(&theirs, || {
        // As for messages of the peer that are received one after the other.
        wait_until("it is given up", || {
            for message in 0..1000 {
                ours.send_done(message, tcpx_proto::frame::Status::Ok, "");
            }
            ours.is_dead()
        });
    });
    let error = ours.error().unwrap();
    let Error::PeerLost { peer, cause } = &error else {
        panic!("{error}");
    };
    let limit = 2 * ours.context.quota.of_a_peer();
    assert_eq!(peer, "bob");
    assert!(
        matches!(cause, LostCause::NotReading { bytes } if (limit..limit + 100).contains(bytes)),
        "{cause:?}"
    );
}

/// What waits for a connection is limited too.
#[test]
fn notifications_that_wait_for_a_connection_are_limited() {
    let alice = {
        let config = Config::defaults().with("interfaces", "lo").unwrap();
        let config = config.with("queue_bytes", "1M").unwrap();
        Session::new(config.with("name", "alice").unwrap()).unwrap()
    };
    // It listens, and its control thread does not look: connecting goes on and on.
    let bob = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let info = tcpx_proto::info::ConnectionInfo::new(
        tcpx_proto::info::Name::new("bob").unwrap(),
        tcpx_proto::info::SessionId([7; 16]),
        tcpx_proto::info::Secret::new([7; 32]),
        vec![bob.local_addr().unwrap()],
    );
    let to_bob = alice.add_peer(&info.unwrap().encode()).unwrap();
    let told = (0..100).find_map(|_| alice.notify(&to_bob, &[7; 10_000]).err());
    assert!(matches!(told, Some(Error::PeerBehind { .. })), "{told:?}");
    to_bob.disconnect();
    alice.notify(&to_bob, b"there is room again").unwrap();
    to_bob.disconnect();
}

/// All of it is sent at once when the connection is made, and its application was told.
#[test]
fn notifications_that_have_waited_for_a_connection_do_not_end_it() {
    let pair = frugal_pair();
    let (ours, theirs) = (connection(pair.alice.core()), connection(pair.bob.core()));
    let limit = ours.context.quota.of_a_peer();
    while_deaf(&theirs, || {
        while ours.messages.kept() <= 2 * limit {
            ours.notify(0, &[7; 10_000]);
        }
        assert!(!ours.is_dead());
    });
}

/// Otherwise what the peer has sent before would keep its answers from being heard.
#[test]
fn a_session_that_closes_is_not_held_up_by_what_its_application_has_not_read() {
    let pair = frugal_pair();
    let ours = connection(pair.alice.core());
    let mut sent = 0;
    wait_until("she is not listening", || {
        sent += usize::from(pair.bob.notify(&pair.to_alice, &[7; 10_000]).is_ok());
        carrier(&ours).is_paused()
    });
    pair.alice.notify(&pair.to_bob, b"before the end").unwrap();
    pair.alice.close();
    assert!(!carrier(&ours).is_paused());
    assert_eq!(
        pair.bob.wait_notification(LONG).unwrap().message,
        b"before the end"
    );
    // What she had before she can still read.
    let heard = pair.alice.notifications().len();
    assert!(heard > 0 && heard <= sent, "{heard} of {sent}");
}

/// A stream that broke before it could take the place of a lane's.
fn broken_stream(connection: &Connection, stream: StreamId) -> Rejoined {
    let options = SocketOptions {
        buffer_bytes: 0,
        dead_after: LONG,
    };
    let listener = Listener::bind(([127, 0, 0, 1], 0).into(), &options).unwrap();
    let near = Stream::connect(listener.local_addr().unwrap(), None, &options).unwrap();
    wait_until("it is connected", || {
        listener.accept().is_ok_and(|(far, _)| {
            far.reset();
            true
        })
    });
    wait_until("it is broken", || near.peer_addr().is_err());
    Rejoined {
        stream,
        raw: RawLane {
            stream: near,
            early: Vec::new(),
        },
        comms: None,
        owners: Vec::new(),
        worker: Arc::clone(&connection.lanes.load()[0].worker),
    }
}

#[test]
fn a_stream_that_broke_before_its_use_does_not_keep_others_out() {
    let pair = Pair::new();
    let ours = connection(pair.alice.core());
    let lane = || Arc::clone(&ours.lanes.load()[0]);
    let generation = lane().id().generation;
    let stream = |generation| StreamId {
        lane: 0,
        generation,
    };
    let older = broken_stream(&ours, stream(generation));
    assert!(!ours.adopt(older) && !lane().is_down());
    let newer = broken_stream(&ours, stream(generation + 1));
    assert!(!ours.adopt(newer));
    wait_until("another has taken its place", || !lane().is_down());
    assert!(lane().id() > stream(generation));
}
