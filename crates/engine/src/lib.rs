//! Move memory between processes over plain TCP as if by RDMA.
//!
//! A [`Session`] registers memory ([`Region`]) and knows [`Peer`]s by their connection info. A
//! [`Transfer`] reads or writes any number of scattered segments of a peer's regions while the
//! peer's application does nothing; it may notify the peer once every byte is in place. Tagged
//! messages ([`Session::send`], [`Session::recv`]) serve programs that match sends with receives.
//! Callers poll, wait, or let [`Events`] wake their event loop.
//!
//! ```text
//!   Session ─┬─ Region ───────────── memory that transfers may touch
//!            ├─ Peer ─┬─ lanes ───── TCP streams, each driven by one thread at a time
//!            └─ Transfer             plan (once) ─► run (each posting) ─► chunks taken by lanes
//! ```
//!
//! # The map of the code
//!
//! Layers, from top to bottom; each layer uses only the layers below it:
//!
//! | module | what it holds |
//! |---|---|
//! | `session` | the public handles: [`Session`], [`Peer`], [`Transfer`] |
//! | `driver` | threads: workers that drive lanes, the control thread that connects and watches |
//! | `peers` | the state of each peer: links in use, tagged messages, notifications |
//! | `link` | a way to a peer: the interface, TCP lanes, the session itself |
//! | `carrier` | how payload gets in or out: the stream, staged device memory, a plugin's comm |
//! | `transfer` | plans, runs and their completion; knows no transport |
//! | `memory` | registered memory and its revocation; staging slots, copies |
//! | [`stats`] | counters: bytes moved, paths used, outcomes, time spent waiting |
//! | `trace` | events for a timeline of transfers |
//! | `config`, `error` | one typed configuration, one typed error |
//! | [`log`] | log lines: rate limits, and a writer that never blocks |
//! | `sync` | locks that check their order in debug builds |
//!
//! See [`Session`] for a complete example.

mod carrier;
mod config;
mod driver;
mod error;
mod ids;
mod link;
pub mod log;
mod memory;
mod peers;
mod session;
pub mod stats;
mod sync;
#[cfg(test)]
mod testing;
mod trace;
mod transfer;

pub use config::{
    Advertise, Config, ConfigError, ConfigRow, GpuLocality, MetricsAddress, PortRange,
    SameHostKind, Source, StagingKind, TransportKind, UnknownVariable,
};
pub use error::{
    Attempt, AttemptCause, CommCause, Error, ErrorKind, IoError, LostCause, Misbehaviour,
    PluginFault, Side,
};
pub use link::{LaneInfo, SameHostInfo};
pub use memory::{
    Buffer, LocalSlice, MemId, MemoryKind, Region, RemoteRegion, RemoteSlice, Segment,
};
pub use peers::{Estimate, Notification};
pub use session::Session;
pub use session::peer::Peer;
pub use session::transfer::Transfer;
pub use stats::{PeerStats, SessionStats};
pub use tcpx_cuda as cuda;
pub use tcpx_ncclnet as ncclnet;
pub use tcpx_net::interfaces;
pub use tcpx_net::interfaces::InterfaceSelector;
pub use tcpx_net::topology;
pub use tcpx_net::{Forked, InProcess, Process};
pub use tcpx_proto as proto;
pub use tcpx_proto::frame::Status;
pub use tcpx_proto::handshake::Features;
pub use transfer::{Events, Happened, Op, TransferState};

/// Runs the code of docs/rust.md with the documentation tests.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/rust.md")]
struct Guide;
