use std::collections::HashSet;

use super::*;
use crate::stats::{Route, SameHostUse};

#[test]
fn names_are_escaped_and_samples_are_unique() {
    let peer = |name: &str| PeerStats {
        name: name.into(),
        ..PeerStats::default()
    };
    let session = SessionStats {
        name: "a \"b\"\\\n".into(),
        peers: vec![peer("x\n"), peer("y")],
        ..SessionStats::default()
    };
    let text = openmetrics(&[session.clone(), session]);
    assert!(text.ends_with("# EOF\n"));
    assert!(
        text.contains(r#"session="a \"b\"\\\n",peer="x\n""#),
        "{text}"
    );
    let samples = text.lines().filter(|line| !line.starts_with('#'));
    let names: Vec<_> = samples.map(|s| s.rsplit_once(' ').unwrap().0).collect();
    let unique: HashSet<_> = names.iter().collect();
    assert_eq!(names.len(), unique.len());
}

/// Returns a session with one peer that has used everything.
fn busy() -> SessionStats {
    let lane = LaneStats {
        index: 0,
        local: "10.0.0.1:1".parse().unwrap(),
        remote: "10.0.0.2:2".parse().unwrap(),
        is_up: true,
        failovers: 1,
        wire_sent: 1,
        wire_received: 1,
        traffic: Default::default(),
        waits: Default::default(),
        in_flight: 0,
        queued: 0,
        kernel: Some(Default::default()),
    };
    let mut peer = PeerStats {
        name: "bob".into(),
        route: Some(Route {
            transport: TransportKind::Tcp,
            same_host: SameHostUse::Impossible,
        }),
        lanes: vec![lane],
        ..PeerStats::default()
    };
    for histogram in &mut peer.latency {
        histogram.counts[3] = 2;
    }
    for transfers in &mut peer.transfers {
        transfers.started = 1;
    }
    SessionStats {
        name: "alice".into(),
        peers: vec![peer],
        ..SessionStats::default()
    }
}

/// Checks names and units against <https://prometheus.io/docs/practices/naming/> and OpenMetrics.
#[test]
fn names_end_with_their_unit_and_those_of_counters_with_total() {
    let text = openmetrics(&[busy()]);
    let words = |line: &str| line.split(' ').map(str::to_owned).collect::<Vec<_>>();
    let units = ["bytes", "seconds", "bytes_per_second"];
    let mut family = (String::new(), String::new());
    for line in text.lines().map(words) {
        match [&line[0], &line[1]] {
            [mark, what] if mark == "#" && what == "TYPE" => {
                family = (line[2].clone(), line[3].clone());
                assert!(!family.0.ends_with("_total"), "{line:?}");
            }
            [mark, what] if mark == "#" && what == "UNIT" => {
                assert!(units.contains(&line[3].as_str()), "{line:?}");
                assert!(line[2].ends_with(&format!("_{}", line[3])), "{line:?}");
            }
            [mark, what] if mark == "#" && (what == "HELP" || what == "EOF") => {}
            [sample, _] => {
                let name = sample.split('{').next().unwrap();
                let suffix = name.strip_prefix(&family.0).expect("in its family");
                let suffixes: &[&str] = match family.1.as_str() {
                    "counter" => &["_total"],
                    "gauge" => &[""],
                    "info" => &["_info"],
                    _ => &["_bucket", "_count", "_sum"],
                };
                assert!(suffixes.contains(&suffix), "{line:?}");
            }
        }
    }
}

#[test]
fn failures_begin_with_zero_and_routes_are_told() {
    let text = openmetrics(&[busy()]);
    let peer = r#"session="alice",peer="bob""#;
    let cause = r#"cause="disconnected""#;
    let failed = format!("tcpx_transfers_failed_total{{{peer},{cause}}} 0\n");
    assert!(text.contains(&failed), "{text}");
    let route = r#"transport="tcp",same_host="impossible""#;
    let info = format!("tcpx_peer_info{{{peer},{route}}} 1\n");
    assert!(text.contains(&info), "{text}");
}
