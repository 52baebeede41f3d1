use super::*;
use crate::stats::{Limit, PathKind};

fn lane(local: &str, remote: &str) -> LaneStats {
    LaneStats {
        index: 0,
        local: local.parse().unwrap(),
        remote: remote.parse().unwrap(),
        is_up: true,
        failovers: 0,
        wire_sent: 0,
        wire_received: 0,
        traffic: Default::default(),
        waits: Default::default(),
        in_flight: 0,
        queued: 0,
        kernel: None,
    }
}

fn nic(name: &str, speed_mbps: Option<u32>, address: &str) -> Nic {
    Nic {
        name: name.into(),
        speed_mbps,
        addresses: vec![address.parse().unwrap()],
    }
}

/// Describes a process that has sent `bytes` bytes to bob by `second`, on lanes over two
/// interfaces.
fn process(second: u64, bytes: u64) -> ProcessStats {
    let mut peer = PeerStats {
        name: "bob".into(),
        lanes: vec![
            lane("10.0.0.1:1", "10.0.0.9:1"),
            lane("[::ffff:10.0.1.1]:2", "10.0.1.9:1"),
        ],
        ..PeerStats::default()
    };
    peer.traffic[PathKind::Stream as usize].written.bytes = bytes;
    for lane in &mut peer.lanes {
        lane.wire_sent = bytes / 2;
    }
    let stats = SessionStats {
        name: "alice".into(),
        peers: vec![peer],
        ..SessionStats::default()
    };
    ProcessStats {
        at: Duration::from_secs(second),
        cpu: CpuTimes {
            threads: vec![ThreadTime {
                id: 7,
                name: "tcpx-worker-0".into(),
                cpu: Duration::from_millis(second * 950),
            }],
            machine: None,
        },
        interfaces: vec![
            nic("eth0", Some(10_000), "10.0.0.1"),
            nic("eth1", Some(10_000), "10.0.1.1"),
        ],
        sessions: vec![SessionReading { id: 3, stats }],
        ..ProcessStats::default()
    }
}

#[test]
fn a_network_is_full_at_the_sum_of_its_interfaces() {
    let (before, after) = (process(1, 0), process(2, 2_400_000_000));
    let sample = after.sample(&before, 3, "bob").unwrap();
    let said = sample.limit().to_string();
    assert_eq!(said, "the network: 19.2 of 20 Gbit/s");
    assert_eq!(after.sample(&before, 3, "carol"), None);
    assert_eq!(after.sample(&before, 4, "bob"), None);
}

#[test]
fn a_speed_that_is_not_known_is_not_made_up() {
    let (before, mut after) = (process(1, 0), process(2, 2_400_000_000));
    after.interfaces[1].speed_mbps = None;
    let sample = after.sample(&before, 3, "bob").unwrap();
    assert_eq!((sample.network, sample.limit()), (None, Limit::Cpu));
    // A lane within this host does not use its interface.
    after.interfaces[1].speed_mbps = Some(10_000);
    after.sessions[0].stats.peers[0].lanes[0].remote = "10.0.1.1:9".parse().unwrap();
    assert_eq!(after.sample(&before, 3, "bob").unwrap().network, None);
}

#[test]
fn a_reading_survives_its_text() {
    let before = process(5, 77);
    let text = serde_json::to_string(&before).unwrap();
    let after: ProcessStats = serde_json::from_str(&text).unwrap();
    assert_eq!(format!("{before:?}"), format!("{after:?}"));
    // Fields of a newer version are ignored, and fields that an older version lacks are empty.
    let text = r#"{"pid": 3, "news": 1, "sessions": [{"stats": {"name": "alice"}}]}"#;
    let after: ProcessStats = serde_json::from_str(text).unwrap();
    assert_eq!(
        (after.pid, after.sessions[0].stats.name.as_str()),
        (3, "alice")
    );
}

#[test]
fn a_command_is_short_and_says_what_runs() {
    for (line, expected) in [
        (
            "/usr/bin/python3\0/srv/app/serve.py\0--key\0secret\0",
            "python3 serve.py",
        ),
        (
            "python3\0-m\0vllm.entrypoints\0",
            "python3 vllm.entrypoints",
        ),
        ("./server\0--key=secret\0", "server"),
        ("", ""),
    ] {
        assert_eq!(command_of(line), expected);
    }
    assert!(!command().is_empty());
}
