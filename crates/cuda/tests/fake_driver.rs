//! Everything that `gpu_probe` checks on a GPU, on a driver made of ordinary memory
//! (`fake/driver.cpp`), which runs the source of the real kernels on the CPU.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Builds the driver, once for each test, and runs the probe with it.
fn probe(arguments: &[&str]) -> String {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake/driver.cpp");
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("fake{}", arguments.concat()));
    std::fs::create_dir_all(&folder).unwrap();
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
    let status = Command::new(&compiler)
        .args([
            "-std=c++17",
            "-O2",
            "-shared",
            "-fPIC",
            "-fno-strict-aliasing",
            "-fsanitize=alignment",
            "-fsanitize-undefined-trap-on-error",
            "-w",
        ])
        .arg(&source)
        .arg("-o")
        .arg(folder.join("libcuda.so.1"))
        .status()
        .unwrap_or_else(|error| {
            panic!("{compiler}: {error}; install a C++ compiler or name one with CXX")
        });
    assert!(
        status.success(),
        "{compiler} cannot compile {}",
        source.display()
    );

    let output = Command::new(example())
        .args(arguments)
        .env("LD_LIBRARY_PATH", &folder)
        .output()
        .unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (printed, complaints) = (text(&output.stdout), text(&output.stderr));
    assert!(
        output.status.success(),
        "{arguments:?}: {}\n{printed}\n{complaints}",
        output.status
    );
    assert!(
        printed.contains("name: \"Fake\""),
        "another driver was found:\n{printed}"
    );
    printed
}

/// `cargo test` builds examples beside the tests' own folder.
fn example() -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    let target = tests.parent().and_then(Path::parent).unwrap();
    let example = target.join("examples/gpu_probe");
    assert!(
        example.exists(),
        "{} is not built: run `cargo test` for the whole package",
        example.display()
    );
    example
}

#[test]
fn every_check_of_the_probe_succeeds() {
    let printed = probe(&["--check-only"]);
    for check in [
        "8 threads at once",
        "batches of 4 threads",
        "the kernels of the load",
    ] {
        assert!(printed.contains(&format!("{check} are right")), "{printed}");
    }
}

#[test]
fn the_second_device_is_told_from_the_first() {
    probe(&["--check-only", "--device", "1"]);
}

#[test]
fn batches_are_checked_alone() {
    let printed = probe(&["--batches"]);
    assert!(printed.contains("batches of 4 threads"), "{printed}");
    assert!(!printed.contains("the load"), "{printed}");
}

#[test]
fn nothing_is_left_behind() {
    probe(&["--leak", "20"]);
}

#[test]
fn a_failure_is_reported_and_survived() {
    let printed = probe(&["--failure"]);
    assert!(printed.contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "{printed}");
}
