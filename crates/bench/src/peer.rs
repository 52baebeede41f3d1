//! The process model: one process measures, a second one serves it.
//!
//! ```text
//!   tcpx bench                       tcpx bench (hidden argument)      tcpx bench server
//!   ┌───────────────┐  socket pair   ┌─────────────┐                   ┌─────────────┐
//!   │ Remote::spawn ├────────────────┤ serve_stdin │                   │ Server::run │
//!   └───────────────┘  (its stdin)   └─────────────┘                   └──────┬──────┘
//!   ┌─────────────────┐                     TCP                               │
//!   │ Remote::connect ├───────────────────────────────────────────────────────┘
//!   └─────────────────┘
//! ```
//!
//! Small JSON messages ([`control`]) travel over that connection: allocate memory, fill it, verify
//! it, run one half of the floor, report usage. When the connection closes, for whatever reason,
//! the served process ends (or the server drops the client), so that no process is orphaned, also
//! if the parent is killed.

pub mod control;
mod remote;
mod serve;

pub use remote::{Program, Remote};
pub use serve::{Server, ServerEvent, serve_stdin};
