//! The C ABI of tcpx: `libtcpx_p2p` and `include/tcpx_p2p.h`.
//!
//! Every function here is a conversion around one call of the [`tcpx`] crate, which makes all
//! decisions.
//!
//! | module | what it holds |
//! |---|---|
//! | `ffi` | conversion of pointers into references; stops panics |
//! | `status` | conversion of errors into status numbers and messages |
//! | `bytes` | byte strings returned to C |
//! | `config`, `session`, `peer`, `region`, `transfer` | the functions, by object |
//! | `events` | descriptors for event loops |
//! | `stats` | statistics of a session |
//! | `device` | the network interfaces of this machine |
//! | `log` | output of the engine's log lines |
//!
//! # Safety
//!
//! The functions are called by C and share one contract, which the header states for its readers: a
//! pointer is NULL or points to what its type says, valid for the duration of the call; a handle
//! came from this library and has not been freed. NULL is always checked, never dereferenced.

#![allow(
    non_camel_case_types,
    reason = "types have the names that C knows them by"
)]
#![allow(
    clippy::missing_safety_doc,
    reason = "one contract for all functions, stated above"
)]

mod bytes;
mod config;
mod device;
mod events;
mod ffi;
mod log;
mod peer;
mod region;
mod session;
mod stats;
mod status;
mod transfer;

pub use bytes::*;
pub use config::*;
pub use device::*;
pub use events::*;
pub use log::*;
pub use peer::*;
pub use region::*;
pub use session::*;
pub use stats::*;
pub use status::*;
pub use transfer::*;
