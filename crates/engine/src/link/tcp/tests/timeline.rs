//! What a trace says of a lane that is lost.

use std::sync::atomic::Ordering;

use serde_json::Value;

use super::while_deaf;
use crate::testing::{LONG, Pair, connection, wait_until};
use crate::{Buffer, Config, Op, Segment, Session};

#[test]
fn a_lost_lane_and_the_chunks_that_it_had_are_in_the_trace() {
    const LEN: usize = 16 << 20;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("trace.json");
    let [alice, bob] = ["alice", "bob"].map(|name| {
        let config = Config::defaults().with("interfaces", "lo").unwrap();
        let config = config.with("same_host", "off").unwrap();
        let config = match name {
            "alice" => config.with_trace(file.clone()).unwrap(),
            _ => config,
        };
        Session::new(config.with("name", name).unwrap()).unwrap()
    });
    let pair = Pair::of(alice, bob);
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
    let read = read.unwrap();
    let first = std::sync::Arc::clone(&ours.lanes.load()[0]);
    while_deaf(&theirs, || {
        read.post().unwrap();
        wait_until("the lane has chunks in flight", || {
            first.load.load(Ordering::Relaxed) > 0
        });
        // Nobody answers them.
        first.stream.shutdown();
        wait_until("it is lost", || first.is_apart());
    });
    read.wait(LONG).unwrap();
    wait_until("it is back", || !ours.lanes.load()[0].is_down());
    drop((ours, theirs, first));
    pair.alice.close();

    let text = std::fs::read_to_string(&file).unwrap();
    let events: Vec<Value> = serde_json::from_str(&text).unwrap();
    let named = |name: &str| -> Vec<&Value> {
        let events = events.iter();
        events.filter(|event| event["name"] == name).collect()
    };
    let lost = named("lane lost");
    assert!(lost[0]["args"]["cause"].is_string(), "{lost:?}");
    assert!(!named("lane back").is_empty());
    let chunks = named("chunk in flight");
    let of_phase = |phase: &'static str| chunks.iter().filter(move |chunk| chunk["ph"] == phase);
    assert_eq!(of_phase("b").count(), of_phase("e").count());
    let is_lost = |chunk: &&&Value| chunk["args"]["end"] == "lane lost";
    let lost = of_phase("e").filter(is_lost).count();
    assert!(lost > 0, "the lane had some");
    let bytes = of_phase("b").filter_map(|chunk| chunk["args"]["bytes"].as_u64());
    assert!(bytes.sum::<u64>() > LEN as u64, "they were asked for again");
    let transfer = |phase: &str| {
        let mut events = events.iter();
        let is_meant = |event: &&Value| event["cat"] == "transfer" && event["ph"] == phase;
        events.find(is_meant).cloned().unwrap_or_default()
    };
    assert_eq!(transfer("b")["args"]["bytes"], LEN);
    assert_eq!(transfer("e")["args"]["end"], "done");
}
