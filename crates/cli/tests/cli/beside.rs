//! Tests `tcpx bench --beside-compute` with a CUDA driver made of ordinary memory: loads and
//! transfers are real, their speeds mean nothing.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::{Run, run, tcpx};

/// Loads that a CPU computes in milliseconds.
const SMALL: [&str; 6] = [
    "bench",
    "--beside-compute",
    "--load-divisor",
    "1024",
    "--duration",
    "30ms",
];

/// Builds the driver of crates/cuda/tests/fake; returns its folder.
pub(crate) fn fake_driver(name: &str, options: &[&str]) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../cuda/tests/fake/driver.cpp");
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::create_dir_all(&folder).unwrap();
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
    let status = Command::new(&compiler)
        .args(["-std=c++17", "-O2", "-shared", "-fPIC", "-w"])
        .arg("-fno-strict-aliasing")
        .args(options)
        .arg(&source)
        .arg("-o")
        .arg(folder.join("libcuda.so.1"))
        .status()
        .unwrap_or_else(|error| {
            panic!("{compiler}: {error}; install a C++ compiler or name one with CXX")
        });
    assert!(status.success(), "{compiler} cannot compile {source:?}");
    folder
}

fn run_with(driver: &Path, more: &[&str]) -> Run {
    let mut command = tcpx(&[&SMALL[..], more].concat());
    command.env("LD_LIBRARY_PATH", driver);
    command.output().unwrap().into()
}

#[test]
fn every_load_is_measured_beside_every_transfer() {
    let driver = fake_driver("beside", &[]);
    let page = driver.join("out.html");
    let page_name = page.to_str().unwrap();
    let sizes = ["--size", "300000", "--block", "0,4K"];
    let words = [&sizes[..], &["--json", "--report", page_name]].concat();
    let report = run_with(&driver, &words).expect(0).json();
    assert_eq!(report["memory"]["initiator"], "vram:0");
    assert_eq!(report["memory"]["target"], "host");
    assert_eq!(report["cases"].as_array().unwrap().len(), 0);
    let results = report["beside"].as_array().unwrap();
    let mut measured = HashSet::new();
    for result in results {
        let words = [&result["load"], &result["shape"]["op"], &result["name"]];
        measured.insert(words.map(|word| word.as_str().unwrap().to_owned()));
        assert_eq!(result["verified"], true, "{result}");
        assert_eq!(result["alone"]["rounds"].as_array().unwrap().len(), 3);
        let number = |value: &serde_json::Value| value.as_f64().unwrap();
        let (alone, beside) = (&result["alone"]["per_s"], &result["beside"]["per_s"]);
        let keeps = number(beside) / number(alone);
        assert!(number(alone) > 0.0 && keeps > 0.0, "{result}");
        assert!((number(&result["keeps"]) - keeps).abs() < 1e-9, "{result}");
        assert!(number(&result["gb_per_s"]) > 0.0, "{result}");
    }
    // Three loads, two operations, two block sizes.
    assert_eq!((results.len(), measured.len()), (12, 12), "{measured:?}");
    let html = std::fs::read_to_string(page).unwrap();
    assert_eq!(html.matches("<circle").count(), 6, "one mark for each");
    for expected in [
        "Beside a model that computes",
        "● one block",
        "transfer, GB/s",
    ] {
        assert!(html.contains(expected), "{expected}");
    }

    let people = run_with(&driver, &["--size", "4K", "--block", "0", "--op", "read"]).expect(0);
    for expected in [
        "LOAD",
        "KEEPS",
        "ALONE /S",
        "BESIDE /S",
        "matmul",
        "decode",
        "READ",
    ] {
        let table = &people.stdout;
        assert!(table.contains(expected), "{expected} in:\n{table}");
    }
    let lines = people
        .stderr
        .lines()
        .filter(|line| line.contains("the load keeps"));
    assert_eq!(lines.count(), 3, "{}", people.stderr);
}

#[test]
fn a_load_that_computes_wrong_values_gives_no_result() {
    let driver = fake_driver("beside-wrong", &["-DSUM_ERROR=1"]);
    let wrong = run_with(&driver, &["--size", "4K", "--block", "0"]).expect(1);
    assert!(
        wrong.stderr.contains("matmul computes wrong values"),
        "{}",
        wrong.stderr
    );
    assert!(!wrong.stdout.contains("KEEPS"), "{}", wrong.stdout);
}

/// The driver may be installed where this runs; GPU 4096 is not.
#[test]
fn what_is_missing_for_a_load_is_said() {
    let missing = run(&["bench", "--beside-compute", "--mem", "vram:4096,host"]).expect(1);
    assert!(missing.stderr.contains("CUDA"), "{}", missing.stderr);
    let host = run(&["bench", "--beside-compute", "--mem", "host"]).expect(2);
    assert!(host.stderr.contains("vram:0,host"), "{}", host.stderr);
    for other in [["--soak", "1s"], ["--iterations", "3"]] {
        run(&[&["bench", "--beside-compute"][..], &other].concat()).expect(2);
    }
}
