//! Checks that the committed header is up to date with the sources.

use std::path::Path;
use std::process::Command;

use crate::crate_dir;

fn generated() -> String {
    let config = cbindgen::Config::from_file(crate_dir().join("cbindgen.toml")).unwrap();
    let bindings = cbindgen::generate_with_config(crate_dir(), config).unwrap();
    let mut header = Vec::new();
    bindings.write(&mut header);
    String::from_utf8(header).unwrap()
}

#[test]
fn the_committed_header_is_up_to_date() {
    let path = crate_dir().join("include/tcpx_p2p.h");
    let generated = generated();
    if std::env::var_os("TCPX_BLESS").is_some() {
        std::fs::write(&path, &generated).unwrap();
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        committed == generated,
        "{} is stale: run TCPX_BLESS=1 cargo test -p tcpx-capi header and commit it",
        path.display()
    );
}

fn compiles(compiler: &str, header: &str, arguments: &[&str]) {
    let status = Command::new(compiler)
        .args(["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only"])
        .args(arguments)
        .arg(Path::new("include").join(header))
        .current_dir(crate_dir())
        .status()
        .unwrap_or_else(|e| panic!("cannot run {compiler}: {e}"));
    assert!(status.success(), "{compiler} {arguments:?}");
}

#[test]
fn it_is_c11_and_cpp() {
    compiles("cc", "tcpx_p2p.h", &["-std=c11", "-x", "c"]);
    compiles("c++", "tcpx_p2p.h", &["-std=c++11", "-x", "c++"]);
    compiles("c++", "tcpx_p2p.h", &["-std=c++20", "-x", "c++"]);
}

#[test]
fn the_classes_are_cpp17() {
    compiles("c++", "tcpx_p2p.hpp", &["-std=c++17", "-x", "c++"]);
    compiles("c++", "tcpx_p2p.hpp", &["-std=c++20", "-x", "c++"]);
}
