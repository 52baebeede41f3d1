//! Runs every check of `gpu_probe` on a driver made of ordinary memory (`fake/driver.cpp`), which
//! executes the source of the real kernels on the CPU.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Builds the driver, once for all tests, and returns its folder.
fn driver() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake/driver.cpp");
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fake");
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
        folder
    })
}

/// Runs the probe with the driver; returns whether it succeeds, and its output.
fn run(arguments: &[&str], environment: &[(&str, &str)]) -> (bool, String) {
    let output = Command::new(example())
        .args(arguments)
        .env("LD_LIBRARY_PATH", driver())
        .env_remove("CUDA_VISIBLE_DEVICES")
        .envs(environment.iter().copied())
        .output()
        .unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let printed = format!("{}\n{}", text(&output.stdout), text(&output.stderr));
    assert!(
        printed.contains("name: \"Fake\""),
        "another driver was found:\n{printed}"
    );
    (output.status.success(), printed)
}

fn probe(arguments: &[&str]) -> String {
    let (is_right, printed) = run(arguments, &[]);
    assert!(is_right, "{arguments:?}:\n{printed}");
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
    // The system places allocations: most of them, not all, are equally far apart.
    for path in ["Auto", "Engine"] {
        let rows = format!("check {path}: rows of 90 allocations, ");
        let at_once = printed.split(&rows).nth(1).and_then(|rest| {
            let count = rest.split(' ').next()?;
            count.parse::<usize>().ok()
        });
        assert!(at_once >= Some(10), "{printed}");
    }
}

#[test]
fn grids_that_the_driver_refuses_are_copied_otherwise() {
    for how_often in ["1", "1%2"] {
        let refused = format!("cuMemcpy2DAsync_v2={how_often}");
        let (is_right, printed) = run(&["--check-only"], &[("FAKE_CUDA_REFUSE", &refused)]);
        assert!(is_right, "{refused}:\n{printed}");
    }
}

#[test]
fn the_second_device_is_told_from_the_first() {
    probe(&["--batches", "--device", "1"]);
}

#[test]
fn batches_are_checked_alone() {
    let printed = probe(&["--batches"]);
    assert!(printed.contains("batches of 4 threads"), "{printed}");
    assert!(!printed.contains("the load"), "{printed}");
}

#[test]
fn batches_are_right_although_their_kernels_begin_late() {
    let (is_right, printed) = run(&["--batches"], &[("FAKE_CUDA_LATE_US", "3000")]);
    assert!(is_right, "{printed}");
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

const SAME_HOST: [&str; 2] = ["--same-host", "--check-only"];

/// Returns the error text that ends a run of two processes.
fn same_host_error(owner: &[&str], environment: &[(&str, &str)]) -> String {
    let (is_right, printed) = run(&[&SAME_HOST, owner].concat(), environment);
    assert!(!is_right, "{owner:?} {environment:?}:\n{printed}");
    assert!(!printed.contains("leaves something behind"), "{printed}");
    let error = printed.lines().find(|line| line.starts_with("error: "));
    error.unwrap_or_else(|| panic!("{printed}")).to_owned()
}

#[test]
fn another_process_reads_and_writes_memory_of_every_kind() {
    let printed = probe(&SAME_HOST);
    for kind in ["cudaMalloc", "virtual memory", "pool"] {
        for line in [
            "is read and written, prepared: false",
            "is read and written, prepared: true",
            "said to be longer is refused",
            "with a changed UUID is refused: the memory of the other process is on GPU-",
        ] {
            let line = format!("same host: {kind} {line}");
            assert!(printed.contains(&line), "{line}:\n{printed}");
        }
    }
}

#[test]
fn a_gpu_is_found_by_its_uuid_whatever_its_number() {
    let owner = [
        "--owner-device",
        "1",
        "--owner-env",
        "CUDA_VISIBLE_DEVICES=1,0",
    ];
    let (is_right, printed) = run(
        &[&SAME_HOST[..], &owner].concat(),
        &[("FAKE_CUDA_NO_PEERS", "1")],
    );
    assert!(is_right, "{printed}");
}

#[test]
fn memory_of_another_gpu_is_reached_by_peer_access() {
    let (is_right, printed) = run(&[&SAME_HOST[..], &["--owner-device", "1"]].concat(), &[]);
    assert!(is_right, "{printed}");
}

#[test]
fn without_peer_access_memory_of_another_gpu_is_refused() {
    let error = same_host_error(&["--owner-device", "1"], &[("FAKE_CUDA_NO_PEERS", "1")]);
    assert!(
        error.contains("GPU 0 cannot access the memory of GPU 1"),
        "{error}"
    );
}

#[test]
fn a_gpu_that_the_process_does_not_see_is_named() {
    let error = same_host_error(
        &["--owner-env", "CUDA_VISIBLE_DEVICES=0"],
        &[("CUDA_VISIBLE_DEVICES", "1")],
    );
    let gpu = "is on GPU-66616b65-2d63-7564-612d-6770752d2d00, which this process does not see";
    assert!(error.contains(gpu), "{error}");
}

#[test]
fn what_the_driver_refuses_is_reported_and_undone() {
    for (call, text) in [
        ("cuDeviceGetUuid_v2", "asking for the UUID of a device"),
        ("cuIpcOpenMemHandle_v2", "opening the IPC handle"),
        ("cuMemAddressReserve", "reserving a range of addresses"),
        (
            "cuMemImportFromShareableHandle",
            "importing another process's memory",
        ),
        ("cuMemMap", "mapping a piece"),
        (
            "cuMemSetAccess",
            "getting access to another process's memory",
        ),
        (
            "cuMemPoolImportFromShareableHandle",
            "importing another process's pool",
        ),
        (
            "cuMemPoolImportPointer",
            "mapping memory of another process's pool",
        ),
    ] {
        let refused = format!("{call}=801");
        let owner = ["--owner-env", "FAKE_CUDA_REFUSE="];
        let error = same_host_error(&owner, &[("FAKE_CUDA_REFUSE", &refused)]);
        assert!(
            error.contains(text) && error.contains("(801)"),
            "{call}: {error}"
        );
    }
    for (call, text) in [
        ("cuIpcGetMemHandle", "asking for the IPC handle"),
        (
            "cuMemExportToShareableHandle",
            "exporting a piece of virtual memory",
        ),
        (
            "cuMemPoolExportToShareableHandle",
            "exporting a memory pool",
        ),
        ("cuMemPoolExportPointer", "exporting memory of a pool"),
    ] {
        let refused = format!("FAKE_CUDA_REFUSE={call}=801");
        let error = same_host_error(&["--owner-env", &refused], &[]);
        assert!(
            error.contains(text) && error.contains("(801)"),
            "{call}: {error}"
        );
    }
}
