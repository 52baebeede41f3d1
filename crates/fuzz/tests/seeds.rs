//! Runs the checks for every seed, for every seed with one bit changed or an end cut off, for every
//! input that fuzzing has found, and for noise where it gets past the first checks.

use std::fs;
use std::path::{Path, PathBuf};

/// Returns a folder of inputs of a target, in `fuzz/`.
fn inputs(kind: &str, target: &str) -> PathBuf {
    let fuzz = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz");
    fuzz.join(kind).join(target)
}

fn each_seed(target: &str, check: fn(&[u8])) {
    let folder = inputs("seeds", target);
    let mut count = 0;
    for entry in fs::read_dir(folder).expect("seeds: run the `seeds` example") {
        let mut seed = fs::read(entry.unwrap().path()).unwrap();
        check(&seed);
        for at in 0..seed.len() {
            check(&seed[..at]);
            for bit in 0..8 {
                seed[at] ^= 1 << bit;
                check(&seed);
                seed[at] ^= 1 << bit;
            }
        }
        count += 1;
    }
    assert!(count > 0, "no seeds for {target}");
    let found = inputs("found", target);
    for entry in fs::read_dir(found).expect("inputs that were found: scripts/fuzz --keep") {
        check(&fs::read(entry.unwrap().path()).unwrap());
    }
}

#[test]
fn connection_info() {
    each_seed("connection_info", tcpx_fuzz::connection_info::check);
}

#[test]
fn frame() {
    each_seed("frame", tcpx_fuzz::frame::check);
}

#[test]
fn handshake() {
    each_seed("handshake", tcpx_fuzz::handshake::check);
}

#[test]
fn lane() {
    each_seed("lane", tcpx_fuzz::lane::check);
}

#[test]
fn session() {
    each_seed("session", tcpx_fuzz::session::check);
}

#[test]
fn noise_on_lanes() {
    // A linear congruential generator: the same noise each time. Every byte is an operation.
    let mut state = 1u64;
    let mut byte = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (state >> 56) as u8
    };
    for len in (0..2000).step_by(10) {
        let mut input: Vec<u8> = (0..len).map(|_| byte()).collect();
        input.insert(0, tcpx_fuzz::lane::PAIR);
        tcpx_fuzz::lane::check(&input);
    }
}
