use tcpx::stats::{Nic, SessionReading, SessionStats};

use super::super::read::Reading;
use super::*;

const SECOND: Duration = Duration::from_secs(1);

/// The traffic of one peer in a test.
#[derive(Clone, Copy)]
pub(crate) struct Done {
    pub(crate) name: &'static str,
    pub(crate) path: PathKind,
    /// Bytes that were sent to the peer.
    pub(crate) bytes: u64,
    pub(crate) in_flight: u64,
}

fn lane_to(index: usize, remote: &str, bytes: u64) -> LaneStats {
    LaneStats {
        index,
        local: format!("10.0.{index}.1:{}", 4000 + index).parse().unwrap(),
        remote: remote.parse().unwrap(),
        is_up: true,
        failovers: 0,
        wire_sent: bytes,
        wire_received: 0,
        traffic: Default::default(),
        waits: Default::default(),
        in_flight: 1,
        queued: 0,
        kernel: None,
    }
}

/// Describes a process at `second`, with a session `decoder` that has these peers.
pub(crate) fn process(second: u64, peers: &[Done]) -> ProcessStats {
    let peers = peers.iter().map(|done| {
        let mut peer = PeerStats {
            name: done.name.into(),
            is_connected: true,
            connections: 1,
            lanes: vec![
                lane_to(0, "10.0.0.9:9", done.bytes / 2),
                lane_to(1, "10.0.1.9:9", done.bytes / 2),
            ],
            ..PeerStats::default()
        };
        peer.transfers[0].started = done.in_flight;
        peer.traffic[done.path as usize].written.bytes = done.bytes;
        peer
    });
    let stats = SessionStats {
        name: "decoder".into(),
        peers: peers.collect(),
        ..SessionStats::default()
    };
    let nic = |name: &str, address: &str| Nic {
        name: name.into(),
        speed_mbps: Some(10_000),
        addresses: vec![address.parse().unwrap()],
    };
    ProcessStats {
        version: "0.1.0".into(),
        pid: 4711,
        command: "python3 serve.py".into(),
        at: u32::try_from(second).unwrap() * SECOND,
        interfaces: vec![nic("eth0", "10.0.0.1"), nic("eth1", "10.0.1.1")],
        sessions: vec![SessionReading { id: 1, stats }],
        ..ProcessStats::default()
    }
}

/// Makes a model from these readings, one per second.
pub(crate) fn model(readings: &[&[Done]]) -> Model {
    let mut model = Model::default();
    for (second, peers) in (1..).zip(readings) {
        model.update(Reading {
            processes: vec![("4711-1.sock".into(), process(second, peers))],
            silent: Vec::new(),
        });
    }
    model
}

pub(crate) const fn done(name: &'static str, bytes: u64, in_flight: u64) -> Done {
    Done {
        name,
        path: PathKind::Stream,
        bytes,
        in_flight,
    }
}

#[test]
fn a_session_is_the_sum_of_its_peers_and_says_what_limits() {
    let gb = 1_000_000_000;
    let model = model(&[
        &[done("a", 0, 2), done("b", gb, 0)],
        &[done("a", 2_400_000_000, 2), done("b", gb, 0)],
    ]);
    let report = Report::new(&model);
    let [session] = &report.sessions[..] else {
        panic!("{report:?}");
    };
    assert_eq!((session.pid, session.name.as_str()), (4711, "decoder"));
    let figures = &session.figures;
    assert_eq!(figures.sent_bytes_per_second, 2.4e9);
    assert_eq!(figures.transfers_in_flight, 2);
    assert_eq!(figures.path, "eth0+eth1");
    let limit = figures.limit.as_deref();
    assert_eq!(limit, Some("the network: 19.2 of 20 Gbit/s"));
    assert_eq!(session.peers[1].figures.limit, None, "nothing moved");
    assert_eq!(session.peers[0].lanes[1].sent_bytes_per_second, 1.2e9);
    assert_eq!(
        figures.last_minute.last(),
        Some(&1.2e9),
        "mean of 0 and 2.4"
    );
}

#[test]
fn a_session_is_a_peer_of_itself_only_where_it_moves_something() {
    let report = Report::new(&model(&[&[done("decoder", 0, 0), done("a", 0, 0)]]));
    let [peer] = &report.sessions[0].peers[..] else {
        panic!("{report:?}");
    };
    assert_eq!(peer.name, "a");
    let report = Report::new(&model(&[&[done("decoder", 9, 0)]]));
    assert_eq!(report.sessions[0].peers.len(), 1);
}

#[test]
fn paths_are_named_as_they_are_used() {
    let one = |path, bytes| Done {
        name: "a",
        path,
        bytes,
        in_flight: 0,
    };
    for (path, word) in [
        (PathKind::Stream, "eth0+eth1"),
        (PathKind::Staged, "staged eth0+eth1"),
        (PathKind::Plugin, "plugin"),
        (PathKind::SameHost, "same host"),
        (PathKind::Local, "own memory"),
    ] {
        let report = Report::new(&model(&[&[one(path, 0)], &[one(path, 10)]]));
        assert_eq!(report.sessions[0].figures.path, word);
    }
    // The path of an idle peer is the one that it used last.
    let report = Report::new(&model(&[&[one(PathKind::SameHost, 9)][..]; 2]));
    assert_eq!(report.sessions[0].figures.path, "same host");
}

#[test]
fn slow_peers_and_lanes_are_named() {
    let gb = 1_000_000_000;
    let first = ["a", "b", "c"].map(|name| done(name, 0, 1));
    let second = [done("a", gb, 1), done("b", gb, 1), done("c", gb / 10, 1)];
    let report = Report::new(&model(&[&first, &second]));
    let slow = report.sessions[0].figures.slow.as_deref();
    assert_eq!(slow, Some("c is slow: 100.0 MB/s, others 1.00 GB/s"));
    let stands = [done("a", 5, 1)];
    let report = Report::new(&model(&[&stands[..]; 6]));
    let slow = report.sessions[0].figures.slow.as_deref();
    assert_eq!(slow, Some("a has moved nothing for 5 s"));
    let idle = [done("a", 5, 0)];
    let report = Report::new(&model(&[&idle[..]; 6]));
    assert_eq!(report.sessions[0].figures.slow, None, "nothing in flight");

    let mut lanes = [3.0, 3.0, 1.0, 0.0].map(|rate| Lane {
        is_up: true,
        sent_bytes_per_second: rate * 1e9,
        bytes_in_flight: u64::from(rate > 0.0),
        ..Lane::default()
    });
    find_slow_lanes(&mut lanes);
    let slow: Vec<_> = lanes.iter().map(|lane| lane.slow.is_some()).collect();
    assert_eq!(slow, [false, false, true, false]);
    lanes[0].is_up = false;
    find_slow_lanes(&mut lanes);
    assert_eq!(lanes[0].slow.as_deref(), Some("is down"));
}

#[test]
fn rates_and_plots_are_short() {
    for (rate, text) in [
        (0.0, "0"),
        (999.0, "999 B/s"),
        (1500.0, "1.5 kB/s"),
        (12.3e6, "12.3 MB/s"),
        (1.234e9, "1.23 GB/s"),
    ] {
        assert_eq!(speed(rate), text);
    }
    assert_eq!(plot(&[0.0, 1.0, 4.0, 8.0]), " ▁▄█");
    assert_eq!(plot(&[0.0, 0.0]), "  ");
}
