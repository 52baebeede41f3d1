//! Move memory between processes over plain TCP as if by RDMA.
//!
//! A [`Session`] registers memory ([`Region`]) and knows [`Peer`]s by their connection info. A
//! [`Transfer`] reads from or writes to a peer's regions, over any number of scattered segments, while the peer's
//! application does nothing; it may notify the peer once every byte is in place. Tagged messages
//! ([`Session::send`], [`Session::recv`]) are there for programs that think in pairs.
//!
//! ```text
//!   Session ─┬─ Region ───────────── what may be touched
//!            ├─ Peer ─┬─ lanes ───── TCP streams, each driven by one thread at a time
//!            └─ Transfer             plan (once) ─► run (each posting) ─► chunks taken by lanes
//! ```
//!
//! # The map of the code
//!
//! Layers, from top to bottom; each may use those below it and no other:
//!
//! | module | what it holds |
//! |---|---|
//! | `session` | what applications touch: [`Session`], [`Peer`], [`Transfer`] |
//! | `driver` | threads: workers that drive lanes, the control thread that connects and watches |
//! | `peers` | what a session knows of its peers: links in use, tagged messages, notifications |
//! | `link` | a way to a peer: the interface, TCP lanes, the session itself |
//! | `carrier` | how payload gets in or out: the stream, staged device memory, a plugin's comm |
//! | `transfer` | what is to move and how it ended; knows no transport |
//! | `memory` | who may touch which bytes, and until when; slots, copies |
//! | `config`, `error` | one typed configuration, one typed error |
//! | [`log`] | log lines: their rate, and a writer that never blocks |
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
mod sync;
#[cfg(test)]
mod testing;
mod transfer;

pub use config::{
    Config, ConfigError, ConfigRow, GpuLocality, SameHostKind, Source, StagingKind, TransportKind,
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
pub use tcpx_cuda as cuda;
pub use tcpx_ncclnet as ncclnet;
pub use tcpx_net::interfaces;
pub use tcpx_net::interfaces::InterfaceSelector;
pub use tcpx_net::topology;
pub use tcpx_net::{Forked, InProcess, Process};
pub use tcpx_proto as proto;
pub use tcpx_proto::frame::Status;
pub use tcpx_proto::handshake::Features;
pub use transfer::{Op, TransferState};
