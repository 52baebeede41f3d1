//! The traces of two processes: every byte is in a span, and the spans nest.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;
use tcpx::stats::TransferKind;
use tcpx::{Config, Error, Op, Session};
use tcpx_testkit::host::{done, fails, wait_for_traffic};
use tcpx_testkit::ledger::Tracked;
use tcpx_testkit::protocol::Command;
use tcpx_testkit::{
    Content, Copy, Expected, Host, RemoteProcess, Setup, on_main_setups, story, wait_until,
};
use tempfile::TempDir;

const LEN: usize = 5_000_003;

on_main_setups!(
    bytes_on_lanes_are_in_the_spans_of_both_sides,
    bytes_of_devices_are_in_copies_too,
    tagged_messages_are_transfers,
    a_session_that_closes_during_traffic_completes_its_trace,
);

/// The files that both sides record to.
struct Files {
    folder: TempDir,
}

impl Files {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        Self { folder }
    }

    fn of(&self, name: &str) -> PathBuf {
        self.folder.path().join(format!("{name}.json"))
    }

    fn setup(&self, name: &str, setup: &Setup) -> Setup {
        let setup = setup.native().with("trace", self.of(name).display());
        setup.with("trace_bytes", "1G")
    }
}

/// The events of a trace.
struct Trace {
    events: Vec<Value>,
}

impl Trace {
    /// Reads a complete trace and checks that it is consistent.
    fn read(path: &Path) -> Self {
        let trace = Self::read_endless(path);
        assert_eq!(trace.dropped(), 0, "there is room for so few");
        trace.check_pairs();
        trace
    }

    /// Reads a trace with so many events that some may be missing.
    fn read_endless(path: &Path) -> Self {
        let text = fs::read_to_string(path).expect("the trace");
        let events: Result<Vec<Value>, _> = serde_json::from_str(&text);
        let mut events = events.unwrap_or_else(|e| panic!("not JSON: {e}"));
        // The file lists events thread by thread.
        events.sort_by_key(|event| event["ts"].is_number().then(|| nanos(&event["ts"])));
        let trace = Self { events };
        trace.check_nesting();
        trace
    }

    /// Returns the number of missing events.
    fn dropped(&self) -> u64 {
        let closed = self.named("trace closed");
        assert_eq!(closed.len(), 1);
        closed[0]["args"]["dropped"].as_u64().expect("a number")
    }

    fn named(&self, name: &str) -> Vec<&Value> {
        let events = self.events.iter();
        events.filter(|event| event["name"] == name).collect()
    }

    /// Returns the sum of an argument over all spans of a name.
    fn sum(&self, name: &str, argument: &str) -> u64 {
        let spans = self.named(name).into_iter();
        let spans = spans.filter(|event| event["ph"] == "X" || event["ph"] == "b");
        spans
            .filter_map(|event| event["args"][argument].as_u64())
            .sum()
    }

    /// Returns the beginnings and the ends of transfers.
    fn transfers(&self, phase: &str) -> Vec<&Value> {
        let events = self.events.iter();
        let transfers = events.filter(|event| event["cat"] == "transfer" && event["ph"] == phase);
        transfers.collect()
    }

    /// Checks that the spans of a track nest or follow each other.
    fn check_nesting(&self) {
        let mut tracks: BTreeMap<u64, Vec<(u64, u64, &Value)>> = BTreeMap::new();
        for event in self.events.iter().filter(|event| event["ph"] == "X") {
            let [ts, dur] = ["ts", "dur"].map(|key| nanos(&event[key]));
            let track = event["tid"].as_u64().expect("a track");
            tracks.entry(track).or_default().push((ts, ts + dur, event));
        }
        assert!(!tracks.is_empty());
        for spans in tracks.values_mut() {
            // Of two spans that begin at once, the longer one is around the other.
            spans.sort_by_key(|(start, end, _)| (*start, u64::MAX - *end));
            let mut around: Vec<(u64, u64, &Value)> = Vec::new();
            for &(start, end, event) in spans.iter() {
                around.retain(|(_, outer, _)| *outer > start);
                if let Some((_, outer, other)) = around.last() {
                    assert!(end <= *outer, "{event} sticks out of {other}");
                }
                around.push((start, end, event));
            }
        }
    }

    /// Checks that each beginning has an end, in order.
    fn check_pairs(&self) {
        let mut open: BTreeMap<String, Vec<(&Value, u64)>> = BTreeMap::new();
        let events = self.events.iter().filter(|e| e["id2"].is_object());
        for event in events {
            let key = format!("{} {}", event["cat"], event["id2"]["local"]);
            let open = open.entry(key).or_default();
            match event["ph"].as_str() {
                Some("b") => open.push((&event["name"], nanos(&event["ts"]))),
                Some("e") => {
                    let last = open.pop().map(|(name, _)| name);
                    assert_eq!(last, Some(&event["name"]), "{event}");
                }
                _ => {}
            }
        }
        for (key, left) in open {
            assert!(left.is_empty(), "{key} has no end: {left:?}");
        }
    }
}

/// Returns a time of the file in nanoseconds; the file has three decimals of microseconds.
fn nanos(micros: &Value) -> u64 {
    (micros.as_f64().expect("a time") * 1000.0).round() as u64
}

/// Moves bytes in both directions and closes both sides.
fn move_both_ways(files: &Files, setup: &Setup) -> (Trace, Trace) {
    let alice = Host::open("alice", &files.setup("alice", setup));
    let bob = RemoteProcess::open("bob", &files.setup("bob", setup));
    let peer = alice.meets(&bob);
    let (here, there) = (alice.memory(LEN), bob.memory(LEN));
    here.memory.fill(Content::pattern(1));
    let all = [Copy::new(0, 0, LEN)];
    alice.run(Op::Write, &peer, &here, &there, &all);
    here.poison();
    alice.run(Op::Read, &peer, &here, &there, &all);
    here.check(&Expected::only(Content::pattern(1)));
    alice.session.close();
    bob.expect::<()>(Command::Close);
    let traces = ["alice", "bob"].map(|name| Trace::read(&files.of(name)));
    let [ours, theirs] = traces;
    for transfer in ours.transfers("b") {
        assert_eq!(transfer["args"]["bytes"], LEN, "{transfer}");
    }
    let names: Vec<_> = ours
        .transfers("e")
        .iter()
        .map(|e| e["name"].clone())
        .collect();
    assert_eq!(names, ["WRITE to bob", "READ from bob"]);
    assert!(
        ours.transfers("e")
            .iter()
            .all(|e| e["args"]["end"] == "done")
    );
    assert!(theirs.transfers("b").is_empty());
    (ours, theirs)
}

fn check_lanes(ours: &Trace, theirs: &Trace) {
    let len = LEN as u64;
    assert_eq!(ours.sum("send WRITE", "bytes"), len);
    assert_eq!(theirs.sum("receive WRITE", "bytes"), len);
    assert_eq!(theirs.sum("answer READ", "bytes"), len);
    assert_eq!(ours.sum("receive READ", "bytes"), len);
    assert_eq!(ours.sum("chunk in flight", "bytes"), 2 * len);
    for trace in [ours, theirs] {
        // Framing is around the payload.
        for call in ["sendmsg", "recvmsg"] {
            let moved = trace.sum(call, "result");
            assert!((len..2 * len).contains(&moved), "{call}: {moved}");
        }
        let names = trace.named("thread_name").into_iter();
        let names: Vec<_> = names.filter_map(|n| n["args"]["name"].as_str()).collect();
        for part in ["lane 0 →", "lane 0 ←", "tcpx-worker-0"] {
            assert!(
                names.iter().any(|n| n.contains(part)),
                "{part} in {names:?}"
            );
        }
    }
    assert_eq!(ours.named("first chunk").len(), 2);
    assert_eq!(ours.named("post").len(), 2);
}

fn bytes_on_lanes_are_in_the_spans_of_both_sides(setup: &Setup) {
    let setup = setup.with("staging", "auto");
    let (ours, theirs) = move_both_ways(&Files::new(), &setup);
    check_lanes(&ours, &theirs);
}

fn bytes_of_devices_are_in_copies_too(setup: &Setup) {
    let setup = setup.with("staging", "always");
    let (ours, theirs) = move_both_ways(&Files::new(), &setup);
    check_lanes(&ours, &theirs);
    for trace in [&ours, &theirs] {
        for copy in ["device to host", "host to device"] {
            assert_eq!(trace.sum(copy, "bytes"), LEN as u64, "{copy}");
        }
    }
}

#[test]
fn bytes_of_a_process_on_this_host_are_in_system_calls() {
    story(|| {
        let setup = Setup::lanes4_workers3().with("staging", "auto");
        let setup = setup.with("same_host", "require");
        let (ours, theirs) = move_both_ways(&Files::new(), &setup);
        assert_eq!(ours.sum("copy chunk", "bytes"), 2 * LEN as u64);
        for call in ["process_vm_readv", "process_vm_writev"] {
            assert_eq!(ours.sum(call, "result"), LEN as u64, "{call}");
        }
        for trace in [&ours, &theirs] {
            assert_eq!(trace.sum("send WRITE", "bytes"), 0);
        }
    });
}

fn tagged_messages_are_transfers(setup: &Setup) {
    let files = Files::new();
    let alice = Host::open("alice", &files.setup("alice", setup));
    let bob = RemoteProcess::open("bob", &files.setup("bob", setup));
    let peer = alice.meets(&bob);
    let (here, there) = (alice.memory(LEN), bob.memory(LEN));
    let receive = bob.recv("alice", &there, 0, LEN, 7);
    let send = alice.session.send(&peer, here.region.at(0), LEN, 7);
    let send = Tracked::started(send.expect("posted"), TransferKind::Send, &alice.ledger);
    done(&send);
    receive.wait().expect("received");
    receive.release();
    alice.session.close();
    bob.expect::<()>(Command::Close);
    let [ours, theirs] = ["alice", "bob"].map(|name| Trace::read(&files.of(name)));
    let ends = |trace: &Trace| -> Vec<_> {
        let ends = trace.transfers("e").into_iter();
        ends.map(|e| (e["name"].clone(), e["args"]["end"].clone()))
            .collect()
    };
    assert_eq!(ends(&ours), [("SEND to bob".into(), "done".into())]);
    assert_eq!(
        ends(&theirs),
        [("RECEIVE from alice".into(), "done".into())]
    );
}

fn a_session_that_closes_during_traffic_completes_its_trace(setup: &Setup) {
    let files = Files::new();
    let alice = Host::open("alice", &files.setup("alice", setup));
    let bob = RemoteProcess::open("bob", &files.setup("bob", setup));
    let peer = alice.meets(&bob);
    let (here, there) = (alice.memory(1 << 20), bob.memory(1 << 20));
    let [write, read] = [Op::Write, Op::Read].map(|op| {
        let transfer = alice.endless(op, &peer, &here, &there.descriptor);
        transfer.post().expect("posted");
        transfer
    });
    wait_for_traffic(&peer);
    alice.session.close();
    for transfer in [&write, &read] {
        fails(transfer);
    }
    let ours = Trace::read_endless(&files.of("alice"));
    assert!(ours.sum("sendmsg", "result") > 0);
    if ours.dropped() > 0 {
        // The machine was so busy that events were not written in time.
        return;
    }
    ours.check_pairs();
    let ends = ours.transfers("e");
    assert_eq!(ends.len(), 2);
    for end in ends {
        assert_eq!(end["args"]["end"], "failed", "{end}");
        assert!(end["args"]["cause"].is_string(), "{end}");
    }
}

#[test]
fn a_process_that_is_killed_leaves_whole_events() {
    story(|| {
        let files = Files::new();
        let setup = Setup::lanes4_workers3();
        let alice = Host::open("alice", &setup.native());
        let bob = RemoteProcess::open("bob", &files.setup("bob", &setup));
        let peer = alice.meets(&bob);
        let (here, there) = (alice.memory(1 << 20), bob.memory(1 << 20));
        let write = alice.endless(Op::Write, &peer, &here, &there.descriptor);
        write.post().expect("posted");
        let file = files.of("bob");
        wait_until("something was written", || {
            fs::metadata(&file).is_ok_and(|found| found.len() > 100_000)
        });
        bob.kill();
        fails(&write);
        let text = fs::read_to_string(&file).expect("the trace");
        // The last line may be cut if the process was killed in the middle of a write.
        let whole = text.rfind(",\n").expect("many events");
        let events: Vec<Value> = serde_json::from_str(&format!("{}]", &text[..whole]))
            .expect("the rest is an array without its end");
        assert!(events.len() > 100);
    });
}

#[test]
fn processes_that_name_one_file_have_one_each() {
    story(|| {
        let files = Files::new();
        let setup = files.setup("both", &Setup::lanes1_workers1());
        let alice = Host::open("alice", &setup);
        let bob = RemoteProcess::open("bob", &setup);
        let peer = alice.meets(&bob);
        alice.verify_traffic(&peer, &bob, 1);
        let own = alice.session.flush_trace().expect("it is recorded");
        assert_eq!(own, files.of("both"));
        alice.session.close();
        bob.expect::<()>(Command::Close);
        let written = fs::read_dir(files.folder.path())
            .expect("the folder")
            .flatten();
        let traces: Vec<_> = written.map(|file| Trace::read(&file.path())).collect();
        assert_eq!(traces.len(), 2);
        let pids: Vec<_> = traces.iter().map(|t| t.events[0]["pid"].clone()).collect();
        assert_ne!(pids[0], pids[1]);
    });
}

#[test]
fn a_trace_that_cannot_be_written_is_an_error_of_the_session() {
    let config = Config::defaults().with("interfaces", "lo").unwrap();
    let config = config
        .with("trace", "/proc/no/such/folder/trace.json")
        .unwrap();
    let error = Session::new(config).unwrap_err();
    assert!(matches!(error, Error::Trace { .. }), "{error:?}");
    let text = error.to_string();
    assert!(text.contains("/proc/no/such/folder/trace.json") && text.contains("TCPX_TRACE"));
}
