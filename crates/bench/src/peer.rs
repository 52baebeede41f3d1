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
//! Over that connection go small JSON messages ([`control`]): make memory, fill it, verify it, run
//! your half of the floor, say what you have used. The connection is also the life line: when it
//! closes, for whatever reason, the served process ends (or the server forgets the client). There
//! is no orphan, also when the parent is killed.

pub mod control;
mod remote;
mod serve;

pub use remote::{Program, Remote};
pub use serve::{Server, ServerEvent, serve_stdin};
