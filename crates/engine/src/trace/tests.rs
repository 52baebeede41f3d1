//! Tests of records, rings, files and lines, without a session.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use serde_json::Value as Json;
use tempfile::TempDir;

use super::file::{Output, expand, insert};
use super::json::escaped;
use super::record::{End, Kind, Record, Text, Track, Value};
use super::ring::Ring;
use super::tracer::{self, Tracer};
use super::{Start, Trace, Traced};

const LIMIT: u64 = 1 << 20;

fn folder() -> TempDir {
    tempfile::tempdir().expect("a folder")
}

/// Returns the events of a complete file.
fn events(path: &Path) -> Vec<Json> {
    let text = fs::read_to_string(path).expect("the file");
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e} in {text}"))
}

fn named<'a>(events: &'a [Json], name: &str) -> Vec<&'a Json> {
    events
        .iter()
        .filter(|event| event["name"] == name)
        .collect()
}

fn open(path: &Path, limit: u64) -> (Arc<Tracer>, Trace) {
    let (tracer, session) = tracer::open(path, limit).expect("opened");
    let traced = Traced {
        tracer: Arc::clone(&tracer),
        session,
    };
    (tracer, Trace(Some(Arc::new(traced))))
}

fn push(trace: &Trace, record: Record) {
    trace.on().expect("it is on").event(record);
}

#[test]
fn records_are_what_they_were() {
    for (at, kind) in Kind::ALL.into_iter().enumerate() {
        assert_eq!(kind as usize, at, "{kind:?}");
        let values = [
            Value::Nothing,
            Value::Bytes(u64::MAX),
            Value::Errno(-11),
            Value::Text(Text(9)),
        ];
        for (value, end) in
            values
                .into_iter()
                .zip([End::Done, End::Failed, End::Aborted, End::LaneLost])
        {
            let record = Record::new(kind)
                .chunk(u64::MAX - 1, u32::MAX)
                .bytes(1 << 50)
                .track(Track(77))
                .text(Text(5))
                .value(value)
                .end(end)
                .between(u32::MAX, 12, 90);
            assert_eq!(Record::decode(&record.encode()), Some(record));
            assert_eq!((record.start, record.nanos), (12, 78));
        }
    }
    assert_eq!(Record::decode(&[0xff; 8]), None);
}

#[test]
fn a_ring_keeps_the_order_and_counts_what_it_has_no_room_for() {
    let ring = Ring::new(7, 4);
    let record = |number| Record::new(Kind::Sendmsg).chunk(number, 0);
    let mut seen = Vec::new();
    for round in 0..3 {
        for number in 0..6 {
            ring.push(&record(10 * round + number));
        }
        let dropped = ring.drain(ring.added(), |record| seen.push(record.transfer));
        assert_eq!(dropped, 2);
    }
    assert_eq!(seen, [0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22, 23]);
    assert_eq!(ring.drain(ring.added(), |_| panic!("it is empty")), 0);
}

#[test]
fn a_ring_loses_nothing_between_threads_but_what_it_counts() {
    const RECORDS: u64 = 200_000;
    let ring = Ring::new(7, 64);
    let (mut next, mut taken, mut dropped) = (0, 0, 0);
    std::thread::scope(|scope| {
        let pushing = scope.spawn(|| {
            for number in 0..RECORDS {
                // All words come from one record.
                let record = Record::new(Kind::Recvmsg).chunk(number, number as u32);
                ring.push(&record.bytes(number));
            }
            ring.finish();
        });
        loop {
            let is_over = ring.is_over();
            dropped += ring.drain(ring.added(), |record| {
                assert!(record.transfer >= next, "in order");
                assert_eq!(record.bytes, record.transfer);
                assert_eq!(record.seq, record.transfer as u32);
                next = record.transfer + 1;
                taken += 1;
            });
            if is_over {
                break;
            }
        }
        pushing.join().expect("no panic");
    });
    assert_eq!(taken + dropped, RECORDS);
}

#[test]
fn every_kind_becomes_valid_json() {
    let folder = folder();
    let path = folder.path().join("trace.json");
    let (tracer, trace) = open(&path, LIMIT);
    let traced = trace.on().expect("on");
    let odd = traced.text("a \"name\"\\ with\nodd \u{1} letters é");
    let track = traced.new_track();
    traced.name_track(track, "out \"x\"".into(), "in".into());
    for kind in Kind::ALL {
        let record = Record::new(kind)
            .chunk(3, 1)
            .bytes(10)
            .track(track)
            .text(odd);
        push(&trace, record.value(Value::Text(odd)));
        push(&trace, record.value(Value::Errno(11)).end(End::LaneLost));
        push(&trace, Record::new(kind));
    }
    tracer::close(&tracer);
    let events = events(&path);
    assert!(events.len() >= 3 * Kind::ALL.len());
    for event in &events {
        assert_eq!(event["pid"], std::process::id(), "{event}");
        let phase = event["ph"].as_str().expect("a phase");
        assert!("XbneistM".contains(phase), "{event}");
        assert!(phase == "M" || event["ts"].is_number(), "{event}");
        assert_eq!(phase == "X", event["dur"].is_number(), "{event}");
    }
    let lost = named(&events, "lane lost");
    assert_eq!(
        lost[0]["args"]["cause"],
        "a \"name\"\\ with\nodd \u{1} letters é"
    );
    let names: Vec<_> = named(&events, "thread_name");
    assert!(names.iter().any(|name| name["args"]["name"] == "out \"x\""));
    assert_eq!(named(&events, "trace closed")[0]["args"]["dropped"], 0);
}

#[test]
fn spans_have_their_times() {
    let folder = folder();
    let path = folder.path().join("trace.json");
    let (tracer, trace) = open(&path, LIMIT);
    let start = std::time::Instant::now();
    let end = start + std::time::Duration::from_nanos(1_234_567);
    let record = Record::new(Kind::Sendmsg).value(Value::Bytes(5));
    let traced = trace.on().expect("on");
    traced.span(Start::at(start), Start::at(end), record);
    tracer::close(&tracer);
    let events = events(&path);
    let [call] = named(&events, "sendmsg")[..] else {
        panic!("one call: {events:?}");
    };
    assert_eq!(call["dur"].as_f64(), Some(1234.567));
    assert_eq!(call["args"]["result"], 5);
    let opened = named(&events, "trace opened")[0]["ts"].as_f64().unwrap();
    assert!(call["ts"].as_f64().unwrap() >= opened);
    assert_eq!(call["tid"], tcpx_net::process::thread_id());
}

#[test]
fn a_file_is_never_longer_than_its_limit_and_says_what_is_missing() {
    const RECORDS: u64 = 5000;
    let folder = folder();
    let path = folder.path().join("trace.json");
    let (tracer, trace) = open(&path, 64 << 10);
    for number in 0..RECORDS {
        push(&trace, Record::new(Kind::Sendmsg).chunk(number + 1, 0));
        if number == RECORDS / 2 {
            // From here on, records are only counted.
            tracer.flush();
        }
    }
    tracer::close(&tracer);
    assert!(fs::metadata(&path).unwrap().len() <= 64 << 10);
    let events = events(&path);
    let written = named(&events, "sendmsg").len() as u64;
    assert!(written > 100, "{written}");
    let dropped = named(&events, "trace closed")[0]["args"]["dropped"].as_u64();
    assert_eq!(dropped, Some(RECORDS - written));
}

#[test]
fn records_that_found_no_room_are_told_in_the_file() {
    let folder = folder();
    let path = folder.path().join("trace.json");
    let (tracer, trace) = open(&path, 64 << 20);
    let all = 2 * super::ring::RECORDS as u64;
    for number in 0..all {
        push(&trace, Record::new(Kind::Sleep).bytes(number));
    }
    tracer::close(&tracer);
    let events = events(&path);
    let written = named(&events, "sleep").len() as u64;
    let dropped = named(&events, "trace closed")[0]["args"]["dropped"].as_u64();
    assert_eq!(dropped, Some(all - written));
    let told = named(&events, "events dropped");
    let told: u64 = told
        .iter()
        .map(|e| e["args"]["dropped"].as_u64().unwrap())
        .sum();
    assert_eq!(Some(told), dropped);
}

/// A process that is killed leaves such a file.
#[test]
fn a_file_without_its_end_has_one_whole_event_a_line() {
    let folder = folder();
    let path = folder.path().join("trace.json");
    let (tracer, trace) = open(&path, LIMIT);
    push(&trace, Record::new(Kind::Post).chunk(1, 0));
    tracer.flush();
    let text = fs::read_to_string(&path).unwrap();
    let mut lines = text.lines();
    assert_eq!(lines.next(), Some("["));
    let whole = |line: &str| serde_json::from_str::<Json>(line.trim_end_matches(',')).is_ok();
    assert!(lines.clone().count() > 2 && lines.all(whole), "{text}");
    assert!(serde_json::from_str::<Json>(&format!("{text}]")).is_ok());
    tracer::close(&tracer);
    assert!(events(&path).len() > 2);
}

#[test]
fn threads_that_have_ended_leave_their_records_and_no_ring() {
    let folder = folder();
    let path = folder.path().join("trace.json");
    let (tracer, trace) = open(&path, LIMIT);
    // Use more threads than there may be rings at once.
    for number in 1..200 {
        let trace = trace.clone();
        let record = Record::new(Kind::Post).chunk(number, 0);
        std::thread::spawn(move || push(&trace, record))
            .join()
            .unwrap();
        tracer.flush();
    }
    tracer::close(&tracer);
    let events = events(&path);
    assert_eq!(named(&events, "post").len(), 199);
    assert_eq!(named(&events, "trace closed")[0]["args"]["dropped"], 0);
}

#[test]
fn sessions_of_a_process_share_a_file_and_later_ones_go_on_with_it() {
    let folder = folder();
    let path = folder.path().join("trace.json");
    let (first, one) = open(&path, LIMIT);
    let (second, two) = open(&path, LIMIT);
    assert!(Arc::ptr_eq(&first, &second));
    assert_ne!(one.on().unwrap().session, two.on().unwrap().session);
    push(&one, Record::new(Kind::Posted).chunk(1, 0));
    push(&two, Record::new(Kind::Posted).chunk(1, 0));
    tracer::close(&first);
    push(&two, Record::new(Kind::Post).chunk(2, 0));
    tracer::close(&second);
    let before = events(&path);
    assert_eq!(named(&before, "post").len(), 1);
    let transfers = before.iter().filter(|event| event["cat"] == "transfer");
    let ids: Vec<_> = transfers
        .map(|event| event["id2"]["local"].clone())
        .collect();
    assert!(ids.len() == 2 && ids[0] != ids[1], "{ids:?}");
    // A record after the end of its session is ignored.
    push(&two, Record::new(Kind::Post).chunk(3, 0));

    let (third, three) = open(&path, LIMIT);
    push(&three, Record::new(Kind::Post).chunk(4, 0));
    tracer::close(&third);
    let after = events(&path);
    assert_eq!(after[..before.len()], before[..]);
    assert_eq!(named(&after, "post").len(), 2);
    // A file with other content is begun anew.
    fs::write(&path, "something else").unwrap();
    tracer::close(&open(&path, LIMIT).0);
    assert_eq!(named(&events(&path), "post").len(), 0);
}

#[test]
fn a_file_that_somebody_else_writes_to_is_left_alone() {
    let folder = folder();
    let path = folder.path().join("trace.json");
    let other = fs::File::create(&path).unwrap();
    other.lock().unwrap();
    fs::write(&path, "theirs").unwrap();
    let (tracer, _trace) = open(&path, LIMIT);
    let own = tracer.flush().expect("a file");
    let name = format!("trace.{}.json", std::process::id());
    assert_eq!(own, folder.path().join(name));
    tracer::close(&tracer);
    assert!(!events(&own).is_empty());
    assert_eq!(fs::read_to_string(&path).unwrap(), "theirs");
}

#[test]
fn what_cannot_be_written_is_an_error_at_once() {
    let folder = folder();
    let missing = folder.path().join("missing/trace.json");
    let (path, error) = tracer::open(&missing, LIMIT).err().expect("no folder");
    assert_eq!(
        (path, error.kind()),
        (missing, std::io::ErrorKind::NotFound)
    );
    let (_, error) = tracer::open(folder.path(), LIMIT).err().expect("a folder");
    assert!(error.to_string().contains("not a regular file"), "{error}");
}

/// Tests a device that is full at the first write after the file was opened.
#[test]
fn a_full_disk_ends_the_trace_and_nothing_else() {
    let full = fs::OpenOptions::new().write(true).open("/dev/full");
    let output = Output::broken(full.expect("every Linux has it"));
    let tracer = Arc::new(Tracer::new(output));
    let traced = Traced {
        tracer: Arc::clone(&tracer),
        session: 1,
    };
    let trace = Trace(Some(Arc::new(traced)));
    for number in 0..100 {
        push(&trace, Record::new(Kind::Post).chunk(number, 0));
        assert_eq!(tracer.flush(), None, "nothing is written any more");
    }
    assert!(tracer.finish().is_none());
}

#[test]
fn names_of_files_have_the_number_of_the_process() {
    let cases = [
        ("/tmp/a.json", "/tmp/a.json", "/tmp/a.7.json"),
        ("/tmp/%p.json", "/tmp/7.json", "/tmp/7.7.json"),
        ("x-%p-%p", "x-7-7", "x-7-7.7"),
        ("100%%p%", "100%p%", "100%p%.7"),
        ("a.b/trace", "a.b/trace", "a.b/trace.7"),
    ];
    for (asked, expanded, inserted) in cases {
        let path = expand(Path::new(asked), 7);
        assert_eq!(path, Path::new(expanded), "{asked}");
        assert_eq!(insert(&path, 7), Path::new(inserted), "{asked}");
    }
}

#[test]
fn texts_that_repeat_are_kept_once() {
    let folder = folder();
    let (tracer, trace) = open(&folder.path().join("trace.json"), LIMIT);
    let traced = trace.on().unwrap();
    assert_eq!(traced.text("bob"), traced.text("bob"));
    assert_ne!(traced.text("bob"), traced.text("carol"));
    for number in 0..20_000 {
        traced.text(&format!("{number}"));
    }
    assert_eq!(traced.text("one more"), Text::default(), "there is a limit");
    assert_ne!(traced.text("bob"), Text::default());
    tracer::close(&tracer);
}

#[test]
fn text_is_escaped() {
    assert_eq!(escaped("a\"b\\c\n\u{7}é"), "a\\\"b\\\\c\\u000a\\u0007é");
}
