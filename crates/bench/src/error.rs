//! Errors that stop a measurement.

use std::io;

use crate::bootstrap::BootstrapError;
use crate::workload::{Mismatch, ShapeError};

/// The reason a measurement could not be made, or is invalid.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An option is invalid.
    #[error("{option} {value}: {reason}")]
    Option {
        /// The option.
        option: &'static str,
        /// The given value.
        value: String,
        /// The reason it is invalid, and what is allowed.
        reason: String,
    },
    /// The sizes are invalid.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// The two processes cannot communicate.
    #[error("the other side of the benchmark: {0}")]
    Bootstrap(#[from] BootstrapError),
    /// The second process could not be started.
    #[error("cannot start the second process `{program}`: {source}")]
    Spawn {
        /// The program.
        program: String,
        /// The system's error.
        source: io::Error,
    },
    /// The second process reports a failure.
    #[error("the other side of the benchmark failed: {message}")]
    Peer {
        /// Its message.
        message: String,
    },
    /// The second process sent an unexpected message.
    #[error("the other side of the benchmark broke the protocol: {what}")]
    Protocol {
        /// The unexpected behaviour.
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
    /// A load computes wrong results: nothing can be measured beside it.
    #[error("the built-in load {load} computes wrong values on this GPU: nothing was measured")]
    Load {
        /// The load.
        load: crate::measure::beside::LoadKind,
    },
    /// A report could not be drawn.
    #[error("cannot draw the report: {0}")]
    Report(String),
}
