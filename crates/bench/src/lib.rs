//! Measures the engine of tcpx beside the raw sockets below it, in two processes, in one run.
//!
//! A number for a transfer engine means little alone: it depends on the machine, the kernel, other
//! load and the day. So every measurement here alternates rounds of the engine with rounds of *the
//! floor* ([`floor`]), a plain `readv`/`writev` loop over the same bytes, blocks and stream count,
//! and reports both with their ratio.
//!
//! # Modules
//!
//! | module | what it is |
//! |---|---|
//! | [`workload`] | the data: sizes, block orders, patterns that verify every byte; pure |
//! | [`floor`], [`plugin_floor`] | the raw loop to compare with, over sockets or over a plugin |
//! | [`bootstrap`] | two programs exchange their first bytes (also used by `tcpx check`) |
//! | [`place`], [`memory`] | the location of the bytes: in the host or on a GPU |
//! | [`peer`] | the second process: spawned here, or a server elsewhere |
//! | [`measure`] | [`Bench`](measure::Bench): rounds, warm-up, verification, one result per case |
//! | [`measure::beside`] | the slowdown of a model that computes meanwhile |
//! | [`path`] | the path of the bytes: lanes, or direct copies within one host |
//! | [`prepare`](mod@prepare) | the cost of preparing and posting many segments |
//! | [`stats`] | medians, percentiles, ratios; pure |
//! | [`suite`] | the named cases, and cases from options; pure |
//! | [`soak`] | memory, descriptors and throughput over a long time; idle cost |
//! | [`faults`] | the same with processes that die, stop, flood, lose connections and fork |
//! | [`report`] | results as JSON and as one page of HTML |
//!
//! The library prints nothing and reads no environment: `crates/cli` is its user interface.

pub mod bootstrap;
pub mod error;
pub mod faults;
pub mod floor;
pub mod machine;
pub mod measure;
pub mod memory;
pub mod path;
pub mod peer;
pub mod place;
pub mod plugin_floor;
pub mod prepare;
pub mod report;
pub mod soak;
pub mod stats;
pub mod suite;
pub mod units;
pub mod usage;
pub mod workload;

pub use error::Error;
