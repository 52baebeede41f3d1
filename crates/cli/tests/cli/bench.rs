//! `tcpx bench`: small measurements over two real processes. Numbers are not judged, bytes are.

use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::beside::fake_driver;
use crate::support::{Run, Server, deaf_address, run, tcpx};

#[test]
fn a_measurement_is_a_document_with_the_floor_in_it() {
    let arguments = [
        "bench",
        "--size",
        "64K,1M",
        "--block",
        "0,4K",
        "--iterations",
        "5",
        "--json",
    ];
    let run = run(&arguments).expect(0);
    let report = run.json();
    assert_eq!(report["schema"], "tcpx-bench/1");
    let cases = report["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 8);
    for case in cases {
        assert_eq!(case["verified"], true, "{case}");
        assert!(case["engine"]["gb_per_s"].as_f64().unwrap() > 0.0, "{case}");
        assert!(case["floor"]["ratio"].as_f64().unwrap() > 0.0, "{case}");
    }
    assert_eq!(run.stderr, "", "a document comes without chatter");
}

/// Alone, lanes are measured; the other path is a word away, and no floor comes with it.
#[test]
fn the_path_can_be_chosen_and_is_named() {
    let measure = |extra: &[&str]| {
        let base = ["bench", "--size", "300K", "--iterations", "3"];
        run(&[&base, extra].concat()).expect(0)
    };
    let lanes = measure(&["--json"]).json();
    assert_eq!(lanes["path"], "lanes");
    assert_eq!(lanes["why_lanes"], "same_host is off");
    let direct = measure(&["--path", "same-host", "--json"]).json();
    assert_eq!(direct["path"], "same-host");
    for case in direct["cases"].as_array().unwrap() {
        assert_eq!(case["verified"], true, "{case}");
        assert!(case["floor"].is_null(), "{case}");
    }
    let table = measure(&["--path", "lanes"]).stdout;
    assert!(table.contains("--path same-host"), "{table}");
    let table = measure(&["--path", "same-host"]).stdout;
    assert!(table.contains("Path: same host"), "{table}");
    run(&["bench", "--path", "sockets"]).expect(2);
}

/// Without --path, whatever connecting decides is measured; --path goes for both processes.
#[test]
fn a_client_measures_the_path_that_connecting_decides() {
    for (there, extra, path) in [
        ("auto", &[][..], "same-host"),
        ("auto", &["--path", "lanes"], "lanes"),
        ("off", &[], "lanes"),
        ("off", &["--path", "same-host"], "same-host"),
    ] {
        let base = ["bench", "server", "--bind", "127.0.0.1", "--port", "0"];
        let there = format!("TCPX_SAME_HOST={there}");
        let once = ["--once", "--set", &there];
        let server = Server::start(tcpx(&[&base[..], &once].concat()));
        let client = ["bench", "client", &server.address, "--size", "64K"];
        let rest = ["--iterations", "3", "--json"];
        let report = run(&[&client[..], &rest, extra].concat()).expect(0).json();
        assert_eq!(report["path"], path, "{there} {extra:?}");
        server.finish().expect(0);
    }
}

/// One file with what both processes have done, and nothing else in the folder.
#[test]
fn a_measurement_can_be_recorded() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("100% of it.json");
    let measure = ["bench", "--size", "300K", "--iterations", "3", "--no-floor"];
    let trace = ["--trace", file.to_str().unwrap()];
    let run = run(&[&measure[..], &trace].concat()).expect(0);
    assert!(run.stderr.contains("ui.perfetto.dev"), "{}", run.stderr);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    let text = std::fs::read_to_string(&file).unwrap();
    let events: Vec<serde_json::Value> = serde_json::from_str(&text).unwrap();
    let pids_of = |name: &str| -> std::collections::BTreeSet<u64> {
        let named = events.iter().filter(|event| event["name"] == name);
        named.filter_map(|event| event["pid"].as_u64()).collect()
    };
    assert_eq!(pids_of("trace closed").len(), 2);
    assert_eq!(pids_of("send WRITE").len(), 1);
    assert_eq!(pids_of("answer READ").len(), 1);
    assert_ne!(pids_of("send WRITE"), pids_of("receive WRITE"));
    let missing = folder.path().join("missing/trace.json");
    let trace = ["--trace", missing.to_str().unwrap()];
    crate::support::run(&[&measure[..], &trace].concat()).expect(2);
}

/// With a CUDA driver made of ordinary memory: between a GPU and the host lanes are chosen.
#[test]
fn memory_of_gpus_has_paths_of_its_own() {
    let driver = fake_driver("paths", &[]);
    for (places, path) in [("vram:0", "same-host"), ("vram:0,host", "lanes")] {
        let words = ["bench", "--mem", places, "--size", "300K", "--json"];
        let rest = ["--iterations", "2", "--set", "TCPX_SAME_HOST=auto"];
        let mut command = tcpx(&[&words[..], &rest].concat());
        let run: Run = command
            .env("LD_LIBRARY_PATH", &driver)
            .output()
            .unwrap()
            .into();
        let report = run.expect(0).json();
        assert_eq!(report["path"], path, "{places}: {}", report["why_lanes"]);
        for case in report["cases"].as_array().unwrap() {
            assert_eq!(case["verified"], true, "{case}");
            assert_eq!(case["floor"].is_null(), path == "same-host", "{case}");
        }
    }
}

#[test]
fn people_get_a_table() {
    let run = run(&[
        "bench",
        "--size",
        "64K",
        "--op",
        "write",
        "--iterations",
        "5",
        "--no-floor",
    ]);
    let table = run.expect(0).stdout;
    for expected in [
        "CASE",
        "GB/S",
        "CPU S/GB",
        "64K",
        "WRITE",
        "Every byte was verified",
    ] {
        assert!(table.contains(expected), "{expected} in:\n{table}");
    }
}

#[test]
fn a_page_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join("out.html");
    let path = page.to_str().unwrap();
    let arguments = [
        "bench",
        "--size",
        "4K,64K",
        "--iterations",
        "5",
        "--report",
        path,
    ];
    assert!(run(&arguments).expect(0).stderr.contains("Wrote "));
    let html = std::fs::read_to_string(page).unwrap();
    assert!(html.contains("<svg") && html.contains("64K"));
    let missing = folder.path().join("missing/out.html");
    run(&["bench", "--quick", "--report", missing.to_str().unwrap()]).expect(2);
}

#[test]
fn a_server_is_measured_against() {
    let arguments = [
        "bench",
        "server",
        "--bind",
        "127.0.0.1",
        "--port",
        "0",
        "--once",
    ];
    let server = Server::start(tcpx(&arguments));
    let client = [
        "--size",
        "256K",
        "--iterations",
        "5",
        "--lanes",
        "2",
        "--json",
    ];
    let report = run(&[&["bench", "client", &server.address], &client[..]].concat());
    let report = report.expect(0).json();
    assert_eq!(report["lanes"], 2);
    assert_eq!(report["cases"].as_array().unwrap().len(), 2);
    server.finish().expect(0);
}

/// Host memory by way of the stand-in for a GPU, both processes.
#[test]
fn staged_memory_is_verified_too() {
    let arguments = [
        "bench",
        "--size",
        "5000001",
        "--block",
        "0,4099",
        "--iterations",
        "5",
        "--json",
    ];
    let staged: Run = tcpx(&arguments)
        .env("TCPX_STAGING", "always")
        .output()
        .unwrap()
        .into();
    let report = staged.expect(0).json();
    assert_eq!(report["memory"]["initiator"], "host");
    for case in report["cases"].as_array().unwrap() {
        assert_eq!(case["verified"], true, "{case}");
    }
}

/// The driver may be there where this runs; GPU 4096 is not.
#[test]
fn memory_of_a_gpu_that_is_not_there_is_a_failure_that_says_what_is_missing() {
    for (places, from) in [
        ("vram:4096", ""),
        ("host,vram:4096", "the other side of the benchmark failed: "),
    ] {
        let refused = run(&["bench", "--mem", places, "--quick", "--json"]).expect(1);
        let error = refused.json()["error"]["message"]
            .as_str()
            .unwrap()
            .to_owned();
        let rest = error
            .strip_prefix(from)
            .unwrap_or_else(|| panic!("{error}"));
        assert!(rest.contains("CUDA"), "{error}");
    }
    let word = run(&["bench", "--mem", "gpu"]).expect(2);
    assert!(word.stderr.contains("vram:N"), "{}", word.stderr);
}

#[test]
fn a_server_without_the_gpu_says_so() {
    let arguments = [
        "bench",
        "server",
        "--bind",
        "127.0.0.1",
        "--port",
        "0",
        "--once",
    ];
    let server = Server::start(tcpx(&arguments));
    let client = ["bench", "client", &server.address, "--quick"];
    let refused = run(&[&client[..], &["--mem", "host,vram:4096"]].concat()).expect(1);
    assert!(
        refused.stderr.contains("the other side"),
        "{}",
        refused.stderr
    );
    assert!(refused.stderr.contains("CUDA"), "{}", refused.stderr);
    // For the server that was a client like any other.
    server.finish().expect(0);
}

#[test]
fn a_short_soak_moves_and_verifies() {
    let run = run(&["bench", "--soak", "2s", "--json"]);
    // Two seconds are too short to tell a leak (status 1) from a cache that fills.
    assert!(run.code <= 1, "{}", run.stderr);
    let report = run.json();
    assert!(report["soak"]["transfers"].as_u64().unwrap() > 0);
    assert!(report["soak"]["verified"].as_u64().unwrap() > 0);
}

/// A transfer that fails beside a fault that may not touch it, or a wrong byte, gives no document.
#[test]
fn a_soak_beside_faults_moves_and_verifies() {
    let run = run(&["bench", "--soak", "3s", "--faults", "--json"]);
    // As above: too short to tell a leak.
    assert!(run.code <= 1, "{}", run.stderr);
    let soak = &run.json()["soak"];
    assert!(soak["verified"].as_u64().unwrap() > 0);
    assert_eq!(soak["faults"]["interrupted"], false);
    let counts = soak["faults"]["counts"].as_array().unwrap();
    assert_eq!(counts.len(), 5);
    let made = counts.iter().map(|entry| entry["count"].as_u64().unwrap());
    let skipped = counts.iter().filter(|entry| !entry["skipped"].is_null());
    assert!(made.sum::<u64>() + skipped.count() as u64 > 0, "{counts:?}");
}

#[test]
fn faults_need_a_soak_on_this_machine() {
    run(&["bench", "--faults"]).expect(2);
    let arguments = ["bench", "client", "127.0.0.1:1", "--soak", "1s", "--faults"];
    run(&arguments).expect(2);
}

#[test]
fn a_server_that_is_not_there_is_a_failure() {
    let (address, _held) = deaf_address();
    let refused = run(&["bench", "client", &address.to_string(), "--quick"]).expect(1);
    assert!(refused.stderr.contains("refused"), "{}", refused.stderr);
}

#[test]
fn the_second_process_is_not_for_people() {
    let lost = run(&["bench", "second-process"]).expect(1);
    assert!(lost.stderr.contains("measuring process"), "{}", lost.stderr);
}

/// Ctrl-C, as soon as the first of two long cases is being measured.
#[test]
fn an_interrupted_measurement_prints_what_it_has() {
    let words = "bench --size 64K --duration 1h --json";
    let child = tcpx(&words.split(' ').collect::<Vec<_>>())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    wait_for_handler(child.id());
    // SAFETY: sends a signal to a child that was not waited for.
    unsafe { libc::kill(child.id() as libc::pid_t, libc::SIGINT) };
    let run: Run = child.wait_with_output().unwrap().into();
    let run = run.expect(130);
    let report = run.json();
    assert_eq!(report["interrupted"], true);
    assert!(report["cases"].as_array().unwrap().len() < 2, "{report}");
    assert!(run.stderr.contains("Interrupted"), "{}", run.stderr);
}

/// Waits until a process handles SIGINT itself.
fn wait_for_handler(process: u32) {
    let deadline = Instant::now() + Duration::from_secs(60);
    let handles = || {
        let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
        let caught = u64::from_str_radix(caught.unwrap().trim(), 16).unwrap();
        caught & (1 << (libc::SIGINT - 1)) != 0
    };
    while !handles() {
        assert!(Instant::now() < deadline, "it does not begin to measure");
        std::thread::sleep(Duration::from_millis(10));
    }
}
