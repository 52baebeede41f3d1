//! Everything that can stop a measurement.

use std::io;

use crate::bootstrap::BootstrapError;
use crate::workload::{Mismatch, ShapeError};

/// Why a measurement could not be made, or must not be believed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An option makes no sense.
    #[error("{option} {value}: {reason}")]
    Option {
        /// The option.
        option: &'static str,
        /// What was given.
        value: String,
        /// Why it cannot be used, and what can.
        reason: String,
    },
    /// The sizes make no sense.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// The two processes cannot talk.
    #[error("the other side of the benchmark: {0}")]
    Bootstrap(#[from] BootstrapError),
    /// The second process could not be started.
    #[error("cannot start the second process `{program}`: {source}")]
    Spawn {
        /// What was to be run.
        program: String,
        /// What the system said.
        source: io::Error,
    },
    /// The second process says that something failed over there.
    #[error("the other side of the benchmark failed: {message}")]
    Peer {
        /// Its own words.
        message: String,
    },
    /// The second process said something else than it should.
    #[error("the other side of the benchmark broke the protocol: {what}")]
    Protocol {
        /// What it did.
        what: String,
    },
    /// The engine failed.
    #[error(transparent)]
    Engine(#[from] tcpx::Error),
    /// A setting of the engine is wrong.
    #[error(transparent)]
    Config(#[from] tcpx::ConfigError),
    /// The streams of the floor failed.
    #[error("the raw streams of the floor: {0}")]
    Floor(#[source] io::Error),
    /// The bytes are wrong: the measurement is void.
    #[error("{what} delivered wrong data: {mismatch}")]
    Corrupt {
        /// The engine or the floor, and the operation.
        what: String,
        /// The first wrong byte.
        mismatch: Mismatch,
    },
    /// A load computes something else than it should: nothing can be measured beside it.
    #[error("the built-in load {load} computes wrong values on this GPU: nothing was measured")]
    Load {
        /// Which.
        load: crate::measure::beside::LoadKind,
    },
    /// A report could not be drawn.
    #[error("cannot draw the report: {0}")]
    Report(String),
}
