//! C programs that use the library, linked both ways.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{crate_dir, library};

fn build(source: &str, into: &Path, link: &[&str]) -> PathBuf {
    let program = into.join("program");
    let status = Command::new("cc")
        .args([
            "-std=c11",
            "-Wall",
            "-Wextra",
            "-Wpedantic",
            "-Werror",
            "-O1",
            "-g",
        ])
        .arg("-I")
        .arg(crate_dir().join("include"))
        .arg(crate_dir().join("tests/c").join(source))
        .arg("-o")
        .arg(&program)
        .args(link)
        .status()
        .expect("cc is there");
    assert!(status.success(), "{source} does not compile");
    program
}

fn run(program: &Path, libraries: &Path) {
    let output = Command::new(program)
        .env("TCPX_INTERFACES", "lo")
        // Cargo's own list begins with a folder that may hold an older build.
        .env("LD_LIBRARY_PATH", libraries)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{text}{error}", output.status);
    print!("{text}");
}

#[test]
fn two_sessions_in_c_with_the_shared_library() {
    let dir = tempfile::tempdir().unwrap();
    let shared = library("libtcpx_p2p.so");
    let program = build("roundtrip.c", dir.path(), &[shared.to_str().unwrap()]);
    run(&program, shared.parent().unwrap());
}

#[test]
fn two_sessions_in_c_with_the_archive() {
    let dir = tempfile::tempdir().unwrap();
    let archive = library("libtcpx_p2p.a");
    let link = [archive.to_str().unwrap(), "-lpthread", "-ldl", "-lm"];
    run(&build("roundtrip.c", dir.path(), &link), dir.path());
}
