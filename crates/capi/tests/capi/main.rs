//! Tests the library from C: its header, its symbols, and a C program that uses it.

mod exports;
mod header;
mod programs;
mod released;

use std::path::{Path, PathBuf};

/// Returns this crate's folder.
fn crate_dir() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Returns a library that Cargo built beside this test.
fn library(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("a test knows where it is");
    let deps = test.parent().expect("it is in a folder");
    let path = deps.join(name);
    assert!(path.is_file(), "{} was not built", path.display());
    path
}
