//! Wire format, handshake and connection info of tcpx.
//!
//! Everything here is pure: no I/O, no clock, no randomness, no `unsafe`. Nonces and secrets are
//! arguments, input is a slice and output a vector, and every decoded value is valid.
//! `docs/wire-protocol.md` describes the format byte by byte.
//!
//! | module | what it holds |
//! |---|---|
//! | [`info`] | what peers need to connect to a session: [`info::ConnectionInfo`] |
//! | [`descriptor`] | what peers need to access memory: [`descriptor::RegionDescriptor`] |
//! | [`handshake`] | the handshake, which turns a TCP stream into an authenticated lane |
//! | [`frame`] | the frames on an authenticated lane |
//! | [`lane`] | the meaning of a lane's frames, and the choice of the next one to send |
//! | [`connection`] | state that outlives a lane: numbered messages, and chunks of lost lanes |
//! | [`neighbour`] | messages of two sessions on one host beside their connection |
//! | [`codec`] | the bounded reader and the writer that all of them use |

#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

pub mod codec;
pub mod connection;
pub mod descriptor;
pub mod frame;
pub mod handshake;
pub mod info;
pub mod lane;
pub mod neighbour;

mod host;
mod name;
mod secret;
