//! Wire format, handshake and connection info of tcpx.
//!
//! Everything here is pure: no I/O, no clock, no randomness, no `unsafe`. Nonces and secrets are
//! arguments, bytes come in as slices and go out as vectors, and whatever was decoded is valid. The
//! format is described byte by byte in `docs/wire-protocol.md`.
//!
//! | module | what it holds |
//! |---|---|
//! | [`info`] | what a session gives away so that peers can connect: [`info::ConnectionInfo`] |
//! | [`descriptor`] | what it gives away with a region of memory: [`descriptor::RegionDescriptor`] |
//! | [`handshake`] | how a TCP stream becomes an authenticated lane |
//! | [`frame`] | what travels on a lane afterwards |
//! | [`lane`] | what the frames of a lane mean, and which one is sent next |
//! | [`connection`] | what outlives a lane: numbered messages, and chunks of lanes that were lost |
//! | [`neighbour`] | what two sessions on one host say to each other beside their connection |
//! | [`codec`] | the bounded reader and the writer beneath all of them |

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

mod name;
mod secret;
