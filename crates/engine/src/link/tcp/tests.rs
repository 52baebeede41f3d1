//! Races and limits that no peer can trigger on purpose.

mod flush;
mod near;
mod patient;
mod timeline;
mod undriven;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::channel;
use std::time::Duration;

use tcpx_net::{Cursor, Listener, SocketOptions, Stream};
use tcpx_proto::frame::down::StreamId;
use tcpx_proto::frame::{FLAG_COMM, Header, Kind};

use self::undriven::{undriven, undriven_lanes};
use super::drive::BUDGET;
use super::{Connection, Lane};

use crate::carrier::comm::RawLane;
use crate::link::{Link, Rejoined};
use crate::testing::{LONG, Pair, connection, wait_until};
use crate::{Buffer, Config, Error, LostCause, Misbehaviour, Op, Segment, Session};

/// Runs `body` while another thread holds the receiving halves of all lanes: nothing is received.
fn while_deaf<T>(connection: &Connection, body: impl FnOnce() -> T) -> T {
    while_deaf_on(connection, usize::MAX, body)
}

/// Like [`while_deaf`], for the first `count` lanes.
fn while_deaf_on<T>(connection: &Connection, count: usize, body: impl FnOnce() -> T) -> T {
    let (held, is_held) = channel();
    let (release, released) = channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let lanes = connection.lanes.load();
            let mut guards = Vec::new();
            for lane in lanes.iter().take(count) {
                wait_until("the receiver can be locked", || {
                    match lane.receiver.try_lock() {
                        Some(guard) => {
                            guards.push(guard);
                            true
                        }
                        None => false,
                    }
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

/// Returns the lane on which messages travel.
fn carrier(connection: &Connection) -> Arc<Lane> {
    Arc::clone(&connection.lanes.load()[connection.messages.carrier()])
}

/// The thread that finds a message requests its bytes.
#[test]
fn message_found_after_the_end_does_not_deadlock() {
    const LEN: usize = 1 << 20;
    let pair = Pair::new();
    let [here, there] =
        [&pair.alice, &pair.bob].map(|session| session.register(&Buffer::new(LEN)).unwrap());
    let receive = pair.alice.recv(&pair.to_bob, here.at(0), LEN, 7).unwrap();
    let connection = connection(pair.alice.core());
    let send = while_deaf(&connection, || {
        let send = pair.bob.send(&pair.to_alice, there.at(0), LEN, 7).unwrap();
        let lane = carrier(&connection);
        wait_until("the message has arrived", || lane.stream.is_readable());
        // The first step of ending a connection, before the others.
        connection.end.set(Error::Closed).unwrap();
        send
    });
    let lane = carrier(&connection);
    lane.call_worker();
    let tagged = &pair.to_bob.shared.tagged;
    wait_until("the message was found", || !tagged.is_waiting());
    let receiver = lane.receiver.try_lock_for(LONG);
    assert!(
        receiver.is_some(),
        "the thread that found the message waits for itself"
    );
    drop(receiver);
    connection.shut();
    assert!(matches!(receive.wait(LONG), Err(Error::Closed)));
    let error = send.wait(LONG).unwrap_err();
    // Bob's unread bytes cause a reset.
    let is_closed = |cause: &LostCause| matches!(cause, LostCause::ClosedByPeer | LostCause::Io(_));
    assert!(
        matches!(&error, Error::PeerLost { peer, cause } if peer == "alice" && is_closed(cause)),
        "{error:?}"
    );
}

#[test]
fn answer_on_a_missing_comm_fails_its_transfer() {
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
    // Bob does not receive the request.
    while_deaf(&theirs, || {
        read.post().unwrap();
        // The identifier that was assigned last.
        let id = pair.alice.core().context().next_id() - 1;
        let is_asked = |lane: &Arc<Lane>| lane.load.load(Ordering::Relaxed) > 0;
        wait_until("a chunk is requested", || {
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
fn ping_accepts_an_unlimited_timeout() {
    let pair = Pair::new();
    pair.to_bob.round_trip(0, Duration::MAX).unwrap();
    let connection = connection(pair.alice.core());
    connection.kill(Error::Aborted);
    assert!(connection.ping(0, Duration::MAX).is_none());
}

#[test]
fn unused_memory_is_freed() {
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
        wait_until("the memory is freed", || memory.upgrade().is_none());
    }
}

/// The kernel does not report bytes to the worker that a polling caller has already read.
#[test]
fn caller_that_stops_polling_leaves_no_work_behind() {
    const LEN: usize = 16 << 20;
    let [alice, bob] = ["alice", "bob"].map(|name| {
        let config = Config::defaults().with("interfaces", "lo").unwrap();
        let config = config.with("lanes", "1").unwrap().with("workers", "1");
        // No pings in the meantime: they would hide a stall.
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

/// Bytes that arrived after the handshake are handled although nothing follows.
#[test]
fn bytes_received_with_the_handshake_are_handled() {
    let pair = Pair::new();
    let mut early = Vec::new();
    Header::new(Kind::Ping, 0).encode(&mut early);
    let (connection, far) = undriven(&pair, early);
    let lanes = connection.lanes.load();
    connection.drive(&lanes[0], BUDGET);
    let mut answer = [0; 64];
    wait_until("the ping is answered", || {
        far.recv(&[], Cursor::default(), &mut answer).is_ok()
    });
    let header = Header::decode(answer.first_chunk().unwrap()).unwrap();
    assert_eq!(header, Header::new(Kind::Pong, 0));
    connection.kill(Error::Closed);
}

/// A frame that has begun is completed without a look at frames queued in the meantime.
#[test]
fn frames_queued_behind_a_blocked_frame_are_sent() {
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
    wait_until("all bytes have arrived", || {
        if let Ok(count) = far.recv(&[], Cursor::default(), &mut buffer) {
            received += count;
        }
        received == STUCK + LATER
    });
    connection.kill(Error::Closed);
}

/// Every bulk lane is blocked and full.
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

/// Without this, the express lane would be like any other after its first loss.
#[test]
fn messages_return_to_the_express_lane_when_it_is_restored() {
    let pair = Pair::new();
    let ours = connection(pair.alice.core());
    let first = carrier(&ours);
    assert_eq!(first.index(), ours.lanes());
    first.stream.shutdown();
    wait_until("the lane is restored", || {
        let lanes = ours.lanes.load();
        let newest = &lanes[first.index()];
        !Arc::ptr_eq(newest, &first) && !newest.is_down()
    });
    wait_until("the lane carries messages", || {
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
fn large_transfers_do_not_use_the_express_lane() {
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
            // Includes postings that follow a notification.
            large.post_with_notification(b"large").unwrap();
            large.wait(LONG).unwrap();
        }
    }
    assert!(express.moved() < LARGE as u64 / 100, "{}", express.moved());
}

/// Two sessions with a small quota.
fn frugal_pair() -> Pair {
    let [alice, bob] = ["alice", "bob"].map(|name| {
        let config = Config::defaults().with("interfaces", "lo").unwrap();
        let config = config.with("queue_bytes", "1M").unwrap();
        // No connection times out in the meantime.
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
fn notifying_a_peer_that_does_not_keep_up_fails() {
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
        wait_until("the peer does not keep up", || {
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
        // A posting without a notification succeeds.
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
fn peer_that_never_reads_loses_its_connection() {
    let pair = frugal_pair();
    let (ours, theirs) = (connection(pair.alice.core()), connection(pair.bob.core()));
    while_deaf(&theirs, || {
        // As for messages of the peer that are received one after the other.
        wait_until("the connection ends", || {
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

/// Notifications queued for a connection are limited as well.
#[test]
fn notifications_queued_for_a_connection_are_limited() {
    let alice = {
        let config = Config::defaults().with("interfaces", "lo").unwrap();
        let config = config.with("queue_bytes", "1M").unwrap();
        Session::new(config.with("name", "alice").unwrap()).unwrap()
    };
    // The listener never accepts, so that connecting takes for ever.
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

/// All queued notifications are sent at once when the connection is made;
/// their limit was checked before.
#[test]
fn notifications_queued_for_a_connection_do_not_end_it() {
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

/// Otherwise the peer's earlier messages would block its answers.
#[test]
fn closing_is_not_blocked_by_unread_notifications() {
    let pair = frugal_pair();
    let ours = connection(pair.alice.core());
    let mut sent = 0;
    wait_until("the lane is paused", || {
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
    // Notifications that arrived before are still readable.
    let heard = pair.alice.notifications().len();
    assert!(heard > 0 && heard <= sent, "{heard} of {sent}");
}

/// Makes a stream that broke before it could replace the stream of a lane.
fn broken_stream(connection: &Connection, stream: StreamId) -> Rejoined {
    let options = SocketOptions {
        buffer_bytes: 0,
        dead_after: LONG,
    };
    let listener = Listener::bind(([127, 0, 0, 1], 0).into(), &options).unwrap();
    let near = Stream::connect(listener.local_addr().unwrap(), None, &options).unwrap();
    wait_until("the stream is connected", || {
        listener.accept().is_ok_and(|(far, _)| {
            far.reset();
            true
        })
    });
    wait_until("the stream is broken", || near.peer_addr().is_err());
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
fn stream_broken_before_its_use_does_not_block_others() {
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
    wait_until("another stream has replaced it", || !lane().is_down());
    assert!(lane().id() > stream(generation));
}
