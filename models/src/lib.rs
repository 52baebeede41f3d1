//! Runs the lock-free parts of tcpx with [loom](https://docs.rs/loom) under every interleaving and
//! every outcome that the memory model of Rust allows, including those of aarch64.
//!
//! The modules are the engine's own files: only their atomics and locks are loom's ([`sync`]). Each
//! model below is a function that `tests/models.rs` runs; it panics, or deadlocks, if a promise is
//! broken. `scripts/test-loom` runs all of them.

// The models use a part of each file.
#![allow(dead_code)]
#![forbid(unsafe_op_in_unsafe_fn)]

mod driver;
mod link;
mod neighbour;
mod sync;
mod transfer;

pub use driver::{a_call_wakes_a_worker_that_goes_to_sleep, calls_of_two_threads_both_arrive};
pub use link::a_paused_lane_is_resumed;
pub use neighbour::{a_gate_opens_only_when_it_is_empty, nobody_is_inside_a_closed_gate};
pub use transfer::{a_chunk_given_back_is_settled_once, one_call_concludes_a_run};
