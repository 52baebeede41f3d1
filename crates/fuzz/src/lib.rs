//! The checks of the fuzz targets. Each module has one `check`, which takes any bytes and panics
//! when `tcpx-proto`, or a whole session, breaks a promise; the targets in `fuzz/` only pass bytes
//! on, and need a nightly compiler.
//!
//! ```text
//! cargo +nightly fuzz run handshake fuzz/corpus/handshake fuzz/seeds/handshake -- -max_len=4096
//! cargo test --package tcpx-fuzz                # seeds and noise, on stable
//! cargo run --package tcpx-fuzz --example seeds # writes fuzz/seeds again
//! ```
//!
//! Inputs that fuzzing finds go to `fuzz/corpus`, which is not committed; `fuzz/seeds` (made by
//! hand) and `fuzz/found` (the smallest part of the corpus with the same coverage, by `scripts/fuzz
//! --keep`) are. A crash becomes a unit test beside the code it was found in.

#![forbid(unsafe_code)]

pub mod connection_info;
pub mod frame;
pub mod handshake;
pub mod lane;
pub mod session;
