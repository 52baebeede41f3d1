//! Many clients without credentials: they cost little and keep no peer out.

use std::io::{ErrorKind, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use tcpx::AttemptCause;
use tcpx_proto::handshake::{HandshakeError, RejectCode};
use tcpx_proto::info::ConnectionInfo;
use tcpx_testkit::flood::Flooder;
use tcpx_testkit::host::attempts;
use tcpx_testkit::netns::{Family, Machine, TwoMachines};
use tcpx_testkit::raw::{Stranger, closed, dial, finish, shout, with_address};
use tcpx_testkit::remote::binary;
use tcpx_testkit::{GUARD, Host, RemoteProcess, Setup, story, story_within, wait_until};

/// Returns a process that logs everything to `stderr`.
fn logging_to(stderr: Stdio) -> RemoteProcess {
    let mut command = Command::new(binary());
    command.env("TCPX_LOG", "debug").stderr(stderr);
    let process = RemoteProcess::spawn("bob", command);
    process.reopen(&Setup::lanes4_workers3().native());
    process
}

/// Returns a full pipe; its reading end must be kept.
fn full_pipe() -> (std::io::PipeReader, std::io::PipeWriter) {
    let (reader, mut writer) = std::io::pipe().expect("a pipe");
    let flags = fcntl_getfl(writer.as_fd()).expect("flags");
    fcntl_setfl(writer.as_fd(), flags | OFlags::NONBLOCK).expect("flags");
    for chunk in [4096, 1] {
        loop {
            match writer.write(&vec![b'.'; chunk]) {
                Ok(_) => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                Err(e) => panic!("cannot fill a pipe: {e}"),
            }
        }
    }
    // The other process has the same open file, and its writes block.
    fcntl_setfl(writer.as_fd(), flags).expect("flags");
    (reader, writer)
}

#[test]
fn a_log_that_nobody_reads_stops_no_thread() {
    story(|| {
        let (_unread, stderr) = full_pipe();
        let bob = logging_to(stderr.into());
        for _ in 0..2000 {
            drop(dial(bob.addresses()[0]));
        }
        let alice = Host::open("alice", &Setup::lanes4_workers3().native());
        let peer = alice.knows(&bob);
        alice.verify_traffic(&peer, &bob, 1);
        // Closing ends the threads, all of them.
        bob.expect::<()>(tcpx_testkit::protocol::Command::Close);
    });
}

#[test]
fn strangers_cannot_fill_the_log() {
    story(|| {
        let log = std::env::temp_dir().join(format!("tcpx-strangers-{}.log", std::process::id()));
        let file = std::fs::File::create(&log).expect("a file");
        let bob = logging_to(file.into());
        for _ in 0..3000 {
            drop(dial(bob.addresses()[0]));
        }
        let alice = Host::open("alice", &Setup::lanes4_workers3().native());
        let peer = alice.knows(&bob);
        alice.verify_traffic(&peer, &bob, 1);
        // The last lines are written as the process exits.
        bob.exit();
        let said = std::fs::read_to_string(&log).expect("the log");
        let _ = std::fs::remove_file(&log);
        let lines = said.lines().count();
        assert!(said.contains("did not prove itself"), "{said}");
        assert!(said.contains("connected"), "{said}");
        assert!(lines < 1000, "{lines} lines for 3000 strangers");
    });
}

/// Connects to bob repeatedly, each time as a new session; returns how long each took.
fn honest_connects(
    alice: &RemoteProcess,
    setup: &Setup,
    bob: &RemoteProcess,
    count: usize,
) -> Vec<Duration> {
    let connect = |_| {
        alice.reopen(setup);
        alice.knows_info(&bob.info());
        let start = Instant::now();
        alice.connect("bob").expect("bob has room for the honest");
        start.elapsed()
    };
    (0..count).map(connect).collect()
}

#[test]
fn floods_keep_no_honest_peer_out_and_hide_no_death() {
    story(|| {
        let setup = Setup::lanes4_workers3().native();
        // Enough time for a busy machine.
        let setup = setup.with("connect_timeout", "30s");
        let bob = RemoteProcess::open("bob", &setup);
        let carol = RemoteProcess::open("carol", &setup);
        bob.knows_info(&carol.info());
        bob.connect(carol.name()).expect("carol listens");
        let address = bob.addresses()[0];
        let _floods = [1, 4000].map(|held| Flooder::start(address, held, None));
        let alice = RemoteProcess::open("alice", &setup);
        honest_connects(&alice, &setup, &bob, 20);
        carol.kill();
        wait_until("bob has noticed", || !bob.is_connected(carol.name()));
    });
}

/// Copies bytes from one side to the other, until either ends.
fn copy(mut from: TcpStream, mut to: TcpStream) {
    let _ = std::io::copy(&mut from, &mut to);
    let _ = to.shutdown(std::net::Shutdown::Both);
}

#[test]
fn a_lane_that_is_dropped_comes_again() {
    story(|| {
        let setup = Setup::lanes1_workers1().native();
        let bob = RemoteProcess::open("bob", &setup);
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let info = with_address(&bob.info(), listener.local_addr().expect("bound"));
        let bobs = bob.addresses()[0];
        // Drops three connections as a session with no free places does, then forwards to bob.
        std::thread::spawn(move || {
            for (index, near) in listener.incoming().enumerate() {
                let near = near.expect("a connection");
                if index < 3 {
                    continue;
                }
                let far = dial(bobs);
                for stream in [&near, &far] {
                    stream.set_read_timeout(None).expect("valid");
                }
                let copies = [(&near, &far), (&far, &near)];
                for (from, to) in copies.map(|(a, b)| (a.try_clone(), b.try_clone())) {
                    let (from, to) = (from.expect("cloned"), to.expect("cloned"));
                    std::thread::spawn(move || copy(from, to));
                }
            }
        });
        let alice = Host::open("alice", &setup);
        let peer = alice.session.add_peer(&info).expect("bob's info");
        peer.connect(GUARD).expect("bob is there at last");
        alice.verify_traffic(&peer, &bob, 1);
    });
}

#[test]
fn a_long_way_is_no_reason_to_be_kept_out() {
    story(|| {
        let bob = RemoteProcess::open("bob", &Setup::lanes4_workers3().native());
        let (address, info) = (bob.addresses()[0], bob.info());
        let info = ConnectionInfo::decode(&info).expect("bob's info");
        let _floods = [4000, 4000].map(|held| Flooder::start(address, held, None));
        for connection in 1..4 {
            let mallory = Stranger {
                connection,
                ..Stranger::MALLORY
            };
            let (mut stream, client) = mallory.greet(address, &info);
            // Unknown clients take every place several times meanwhile.
            std::thread::sleep(Duration::from_millis(500));
            finish(client, &mut stream).expect("who has greeted keeps its place");
        }
    });
}

#[test]
fn a_stranger_costs_little_memory() {
    const MOST: usize = 64 << 10;
    story(|| {
        let bob = RemoteProcess::open("bob", &Setup::lanes4_workers3().native());
        let (address, info) = (bob.addresses()[0], bob.info());
        let info = ConnectionInfo::decode(&info).expect("bob's info");
        let before = bob.resident_bytes();
        // As many as there are places, each of which has sent a greeting.
        let strangers: Vec<_> = (0..1024)
            .map(|_| Stranger::MALLORY.greet(address, &info))
            .collect();
        let cost = bob.resident_bytes().saturating_sub(before) / strangers.len();
        assert!(cost < MOST, "{cost} bytes for each");
        // A client that sends more than a greeting is ignored.
        for (mut stream, _) in strangers.into_iter().take(100) {
            shout(&mut stream, &[0x55; 1 << 20]);
            closed(&mut stream);
        }
        let cost = bob.resident_bytes().saturating_sub(before) / 1024;
        assert!(cost < MOST, "{cost} bytes for each");
    });
}

/// Bob, with a limited number of descriptors.
fn bob_with_files(count: usize, setup: &Setup) -> RemoteProcess {
    let mut command = Command::new("sh");
    let script = format!("ulimit -n {count}; exec \"$0\"");
    command.args(["-c", &script]).arg(binary());
    let bob = RemoteProcess::spawn("bob", command);
    bob.reopen(setup);
    bob
}

#[test]
fn strangers_give_their_descriptors_to_the_honest() {
    story(|| {
        // He uses nine himself: fewer are left than the places for unknown clients, each for five
        // seconds.
        let setup = Setup::lanes1_workers1().native();
        let bob = bob_with_files(20, &setup);
        let _silent: Vec<_> = (0..300).map(|_| dial(bob.addresses()[0])).collect();
        let alice = Host::open("alice", &setup);
        let peer = alice.knows(&bob);
        for seed in 0..3 {
            alice.verify_traffic(&peer, &bob, seed);
            peer.disconnect();
        }
    });
}

#[test]
fn a_session_listens_again_once_there_are_descriptors() {
    story(|| {
        let setup = Setup::lanes1_workers1().native();
        let bob = RemoteProcess::open("bob", &setup);
        let alice = Host::open("alice", &setup);
        let peer = alice.knows(&bob);
        let exhausted = bob.exhaust_files();
        // Nothing can be kept, and no other connection can be dropped to free a descriptor. Bob may
        // reset this one before the call returns.
        let _silent = TcpStream::connect_timeout(&bob.addresses()[0], GUARD);
        let timeout = Duration::from_millis(300);
        let error = peer.connect(timeout).expect_err("bob has no descriptor");
        assert_eq!(error.kind(), tcpx::ErrorKind::Timeout, "{error}");
        drop(exhausted);
        alice.verify_traffic(&peer, &bob, 1);
    });
}

/// Returns a client of bob's with one lane of `lanes`, which may be refused.
fn insider(
    bob: &RemoteProcess,
    id: u8,
    connection: u64,
    lanes: u16,
) -> Result<TcpStream, HandshakeError> {
    let info = ConnectionInfo::decode(&bob.info()).expect("bob's info");
    let stranger = Stranger {
        id: [id; 16],
        connection,
        lanes,
        ..Stranger::MALLORY
    };
    let mut stream = dial(bob.addresses()[0]);
    stranger.shake_hands(&mut stream, &info)?;
    Ok(stream)
}

const TOO_MANY: HandshakeError = HandshakeError::PeerRejected {
    code: RejectCode::TooMany,
};

#[test]
fn one_identity_has_few_connections() {
    story(|| {
        let setup = Setup::lanes4_workers3().native();
        let bob = RemoteProcess::open("bob", &setup.with("max_connections_per_peer", 3));
        // Of two announced lanes only one comes; one connection is complete.
        let first = insider(&bob, 1, 1, 4).expect("let in");
        let _second = insider(&bob, 1, 2, 4).expect("let in");
        let _whole = insider(&bob, 1, 3, 1).expect("let in");
        assert_eq!(insider(&bob, 1, 4, 1).expect_err("one too many"), TOO_MANY);
        assert_eq!(insider(&bob, 1, 5, 4).expect_err("one too many"), TOO_MANY);
        // Other clients have limits of their own.
        let _other = insider(&bob, 2, 1, 1).expect("let in");
        // A client that has given up does not count.
        drop(first);
        wait_until("its place is free", || insider(&bob, 1, 6, 4).is_ok());
    });
}

/// A refused connection does not stay for the rest of the handshake timeout.
#[test]
fn who_is_refused_is_not_kept() {
    story(|| {
        let setup = Setup::lanes1_workers1().native();
        let bob = RemoteProcess::open("bob", &setup);
        let info = ConnectionInfo::decode(&bob.info()).expect("bob's info");
        let greedy = Stranger {
            lanes: u16::MAX,
            ..Stranger::MALLORY
        };
        let is_closed_before_an_older_one = || {
            let older = dial(bob.addresses()[0]);
            let mut refused = dial(bob.addresses()[0]);
            let error = greedy.shake_hands(&mut refused, &info);
            assert_eq!(error.expect_err("too many lanes"), TOO_MANY);
            closed(&mut refused);
            older.set_nonblocking(true).expect("a socket");
            let looked = older.peek(&mut [0]);
            looked.is_err_and(|e| e.kind() == ErrorKind::WouldBlock)
        };
        // On a busy machine the older one may time out before it is examined.
        assert!((0..3).any(|_| is_closed_before_an_older_one()));
    });
}

#[test]
fn made_up_identities_keep_no_loaded_peer_out() {
    story(|| {
        let setup = Setup::lanes4_workers3().native();
        let bob = RemoteProcess::open("bob", &setup.with("max_connections", 3));
        let _made_up: Vec<_> = (0..3).map(|id| insider(&bob, id, 1, 1)).collect();
        // An unknown session is refused, with the reason.
        let carol = Host::open("carol", &setup);
        let peer = carol.session.add_peer(&bob.info()).expect("bob's info");
        let error = peer.connect(GUARD).expect_err("one too many");
        assert!(
            error.to_string().contains("too many connections"),
            "{error}"
        );
        for attempt in attempts(error) {
            assert_eq!(attempt.cause, AttemptCause::Handshake(TOO_MANY));
        }
        // A known one is not.
        let alice = Host::open("alice", &setup);
        bob.knows(&alice);
        let peer = alice.knows(&bob);
        alice.verify_traffic(&peer, &bob, 1);
    });
}

#[test]
fn silent_insiders_leave_descriptors_to_loaded_peers() {
    story(|| {
        let setup = Setup::lanes1_workers1().native();
        let bob = bob_with_files(80, &setup);
        let mut held = Vec::new();
        let error = loop {
            match insider(&bob, held.len() as u8, 1, 1) {
                Ok(stream) => held.push(stream),
                Err(error) => break error,
            }
        };
        assert_eq!(error, TOO_MANY);
        assert_eq!(held.len(), 60, "three quarters");
        let alice = Host::open("alice", &setup);
        bob.knows(&alice);
        let peer = alice.knows(&bob);
        alice.verify_traffic(&peer, &bob, 1);
    });
}

/// Prints how long honest connects take, and until a death is noticed, under two flooders on the
/// last core: on loopback and, as root, with a round trip of 20 ms.
/// `cargo test -p tcpx-testkit --test stories strangers::measure -- --ignored --nocapture`
#[test]
#[ignore = "a measurement"]
fn measure_floods() {
    story_within(Duration::from_secs(600), || {
        let setup = Setup::lanes4_workers3().native();
        let last = std::thread::available_parallelism().map_or(0, |n| n.get() - 1);
        let machines = TwoMachines::build(Family::V4, 1);
        let machines = machines.filter(|m| m.delay(Duration::from_millis(10)));
        for held in [[1, 1], [4000, 4000], [1, 4000]] {
            let spawn = |_, name: &str| RemoteProcess::spawn(name, Command::new(binary()));
            let flood = |address| held.map(|held| Flooder::start(address, held, Some(last)));
            measure("0 ms", &held, &setup, &spawn, &flood);
        }
        let Some(machines) = &machines else { return };
        let setup = setup.with("interfaces", "cable0");
        for held in [[4000, 4000], [16_000, 16_000]] {
            let spawn = |machine, name: &str| machines.spawn(machine, name, &[]);
            let flood = |address| {
                held.map(|held| {
                    let command = machines.command(Machine::Left);
                    Flooder::start_by(command, address, held, Some(last))
                })
            };
            measure("20 ms", &held, &setup, &spawn, &flood);
        }
    });
}

fn measure(
    round_trip: &str,
    held: &[usize],
    setup: &Setup,
    spawn: &dyn Fn(Machine, &str) -> RemoteProcess,
    flood: &dyn Fn(SocketAddr) -> [Flooder; 2],
) {
    let open = |machine, name| {
        let process = spawn(machine, name);
        process.reopen(setup);
        process
    };
    let bob = open(Machine::Right, "bob");
    let alice = open(Machine::Left, "alice");
    let _floods = flood(bob.addresses()[0]);
    std::thread::sleep(Duration::from_millis(500));
    let mut times = honest_connects(&alice, setup, &bob, 100);
    times.sort();
    let deaths = (0..10).map(|_| {
        let carol = open(Machine::Left, "carol");
        bob.knows_info(&carol.info());
        bob.connect(carol.name()).expect("carol listens");
        carol.kill();
        let start = Instant::now();
        wait_until("bob has noticed", || !bob.is_connected(carol.name()));
        start.elapsed()
    });
    let death = deaths.max().unwrap_or_default();
    let late = times.iter().filter(|t| **t > Duration::from_secs(1));
    eprintln!(
        "{round_trip}, held {held:?}: connect median {:?}, worst {:?}, {} of 100 late; death {death:?}",
        times[50],
        times[99],
        late.count(),
    );
}
