//! The shared library exports the functions of the header and nothing else.

use std::collections::BTreeSet;
use std::process::Command;

use crate::{crate_dir, library};

fn exported() -> BTreeSet<String> {
    let output = Command::new("nm")
        .args(["--dynamic", "--defined-only", "--format=just-symbols"])
        .arg(library("libtcpx_p2p.so"))
        .output()
        .expect("nm is there");
    assert!(output.status.success(), "{output:?}");
    let symbols = String::from_utf8(output.stdout).unwrap();
    symbols.lines().map(str::to_owned).collect()
}

/// Returns the functions that the header declares: names before a parenthesis.
pub(crate) fn declared() -> BTreeSet<String> {
    let header = std::fs::read_to_string(crate_dir().join("include/tcpx_p2p.h")).unwrap();
    let mut in_comment = false;
    let code = header.lines().filter(|line| {
        let comment = in_comment || line.trim_start().starts_with("/*");
        in_comment = comment && !line.contains("*/");
        !comment
    });
    code.filter_map(|line| {
        let name = line.split_once('(')?.0.rsplit([' ', '*']).next()?;
        name.starts_with("tcpx_").then(|| name.to_owned())
    })
    .collect()
}

#[test]
fn only_what_the_header_declares() {
    let declared = declared();
    assert!(declared.len() > 30, "{declared:?}");
    assert_eq!(exported(), declared);
}

#[test]
fn it_is_position_independent_and_read_only_where_it_can_be() {
    let output = Command::new("readelf")
        .args(["--wide", "--dynamic", "--program-headers"])
        .arg(library("libtcpx_p2p.so"))
        .output()
        .expect("readelf is there");
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(!text.contains("TEXTREL"), "{text}");
    assert!(text.contains("soname: [libtcpx_p2p.so]"), "{text}");
    assert!(text.contains("GNU_RELRO"), "{text}");
    // The stack must not be executable.
    let stack = text.lines().find(|l| l.contains("GNU_STACK")).unwrap();
    assert!(!stack.contains("RWE"), "{stack}");
}
