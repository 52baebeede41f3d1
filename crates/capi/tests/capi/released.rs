//! Checks that programs built with an earlier release run with this one.
//!
//! `released.txt` lists the functions and constants of all releases, which must stay. A release
//! adds its new ones: `TCPX_BLESS=1 cargo test -p tcpx-capi --test capi released`.

use std::collections::BTreeSet;

use crate::{crate_dir, exports};

/// Returns the constants of the header, as `NAME = NUMBER`.
fn constants() -> BTreeSet<String> {
    let header = std::fs::read_to_string(crate_dir().join("include/tcpx_p2p.h")).unwrap();
    let lines = header.lines().filter_map(|line| {
        let (name, number) = line.trim().trim_end_matches(',').split_once(" = ")?;
        let is_constant = name.starts_with("TCPX_") && number.parse::<u64>().is_ok();
        is_constant.then(|| format!("{name} = {number}"))
    });
    lines.collect()
}

#[test]
fn released_functions_and_constants_are_still_there() {
    let file = crate_dir().join("tests/capi/released.txt");
    let text = std::fs::read_to_string(&file).unwrap_or_default();
    let mut released: BTreeSet<String> = text.lines().map(str::to_owned).collect();
    let now: BTreeSet<String> = exports::declared().union(&constants()).cloned().collect();
    assert!(now.contains("TCPX_OK = 0") && now.contains("tcpx_version"));
    let gone: Vec<_> = released.difference(&now).collect();
    assert!(gone.is_empty(), "no longer in the header: {gone:?}");
    if std::env::var_os("TCPX_BLESS").is_some() {
        released.extend(now);
        let lines: Vec<_> = released.into_iter().collect();
        std::fs::write(&file, lines.join("\n") + "\n").unwrap();
    }
}
