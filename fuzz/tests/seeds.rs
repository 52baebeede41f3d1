//! The checks hold for every seed, and for every seed with one byte changed or cut off.

use std::fs;
use std::path::Path;

fn each_seed(target: &str, check: fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("seeds")
        .join(target);
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
