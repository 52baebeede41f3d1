//! Reaches another process on this host (a neighbour) and moves its memory without the network.
//!
//! ```text
//!   owner of the memory                              user of the memory
//!   Door::open ── name ─ ─ ─ (by any other way) ─ ─► Wire::connect
//!   Door::accept ◄═══════════ Wire ═════════════════► messages with descriptors
//!   Neighbour::of(&wire)                             Neighbour::of(&wire)
//!   Nonce::new ── address ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─► Neighbour::read_nonce ── bytes ─ ─► compare
//!   Gates::create ── descriptor() ─ ─ ─ ─ ─ ─ ─ ─ ─► Gates::open
//!                                                    enter ─► Neighbour::read, write ─► leave
//!   close ─► users() == 0, or is_gone() ─► the memory may be freed
//! ```
//!
//! - [`Door`] and [`Wire`]: a Unix socket, which keeps the boundaries of messages, carries
//!   descriptors, and names the process at its other end.
//! - [`Neighbour`]: the other process; reads and writes its memory by `process_vm_readv` and
//!   `process_vm_writev`, and reports when it has ended. [`Nonce`] proves that it is the intended
//!   process.
//! - [`Gates`]: counters in shared memory, by which the owner of memory stops the other's access.
//!
//! Nothing here blocks, and nothing from the peer is trusted: arbitrary bytes on the wire and in
//! the gates cost at most an error, or keep the memory of the peer itself for longer. The kernel
//! decides who may access whose memory, by the rules of `ptrace`; a [`Refusal`] names the missing
//! permission.

mod door;
mod error;
mod gates;
mod memory;
mod nonce;
mod wire;

pub use door::Door;
pub use error::{Error, Refusal, Side};
pub use gates::{Gates, OwnedPass, Pass};
pub use memory::{Neighbour, Remote};
pub use nonce::{NONCE_BYTES, Nonce};
pub use wire::{Credentials, MAX_FDS, MAX_MESSAGE, Received, Wire};

/// Returns the user that this process runs as.
#[must_use]
pub fn own_user() -> u32 {
    rustix::process::geteuid().as_raw()
}

#[cfg(all(test, not(miri)))]
mod tests;
