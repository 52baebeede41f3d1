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
//! | module | what it holds |
//! |---|---|
//! | `session`, `peer`, `core` | the public objects and what they share |
//! | `config`, `error` | one typed configuration, one typed error |
//! | `sync` | locks with ranks, which check the order of locking in debug builds |
//! | `memory`, `region` | owned buffers; registered memory, keys, access checks |
//! | `plan` | segments become chunks; pure |
//! | `transfer`, `run`, `completion` | a transfer, one posting of it, how it ends |
//! | `tagged`, `inbox`, `estimate` | tagged messages, notifications, cost estimates |
//! | `transport/tcp` | lanes: sending half, receiving half, scheduling, acknowledgements |
//! | `transport/local` | transfers of a session to itself |
//! | `staging` | GPU memory on its way through pinned host memory |
//! | `progress` | worker threads that drive lanes |
//! | `control` | connecting, accepting, handshakes, silent peers |
//! | `closing` | the end of a session, and what reaches its peers before |
//! | `addresses`, `routes` | where a session listens; which address of ours goes to which of a peer |
//!
//! See [`Session`] for a complete example.

mod addresses;
mod closing;
mod completion;
mod config;
mod control;
mod core;
mod error;
mod estimate;
mod inbox;
mod memory;
mod peer;
mod plan;
mod progress;
mod region;
mod routes;
mod run;
mod session;
mod staging;
mod sync;
mod tagged;
#[cfg(test)]
mod testing;
mod transfer;
mod transport;

pub use completion::TransferState;
pub use config::{Config, ConfigError, ConfigRow, Source, StagingKind, TransportKind};
pub use error::{Error, ErrorKind, Side};
pub use estimate::Estimate;
pub use inbox::Notification;
pub use memory::Buffer;
pub use peer::{LaneInfo, Peer};
pub use plan::Op;
pub use region::{LocalSlice, MemId, MemoryKind, Region, RemoteRegion, RemoteSlice, Segment};
pub use session::Session;
pub use tcpx_cuda as cuda;
pub use tcpx_ncclnet as ncclnet;
pub use tcpx_net::interfaces;
pub use tcpx_net::interfaces::InterfaceSelector;
pub use tcpx_proto::frame::Status;
pub use tcpx_proto::handshake::Features;
pub use transfer::Transfer;
