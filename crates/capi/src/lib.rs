//! The C ABI of tcpx: `libtcpx_p2p` and `include/tcpx_p2p.h`.
//!
//! Every function here is a conversion around one call of the [`tcpx`] crate; whatever there is to decide is
//! decided there.
//!
//! | module | what it holds |
//! |---|---|
//! | `ffi` | where pointers become references and where panics stop |
//! | `status` | the numbers that errors become, and the words that go with them |
//! | `bytes` | byte strings handed to C |
//! | `config`, `session`, `peer`, `region`, `transfer` | the functions, by the object that they are about |
//! | `device` | the network interfaces of this machine |
//! | `log` | where the engine's log lines go |
//!
//! # Safety
//!
//! The functions are called by C and share one contract, which the header states for its readers: a pointer
//! is NULL or points to what its type says, valid for the length of the call; a handle came from this library
//! and has not been freed. NULL is always answered, never followed.

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
mod ffi;
mod log;
mod peer;
mod region;
mod session;
mod status;
mod transfer;

pub use bytes::*;
pub use config::*;
pub use device::*;
pub use log::*;
pub use peer::*;
pub use region::*;
pub use session::*;
pub use status::*;
pub use transfer::*;
