//! The end of a lane.

use std::io;

use tcpx_net::Fault;

use crate::error::{Error, LostCause, Misbehaviour};

/// Why a lane has ended, and whether the connection has.
#[derive(Debug)]
pub(super) enum Ended {
    /// The stream is broken: the connection goes on.
    Broken(LostCause),
    Lost(LostCause),
    Misbehaved(Misbehaviour),
}

impl Ended {
    pub(super) fn misbehaved(what: impl Into<Misbehaviour>) -> Self {
        Self::Misbehaved(what.into())
    }
}

impl From<io::Error> for Ended {
    fn from(error: io::Error) -> Self {
        // Memory that cannot be read is not the stream's fault, and would break the next one, too.
        match Fault::is_in(&error) {
            true => Self::Lost(error.into()),
            false => Self::Broken(error.into()),
        }
    }
}

impl From<Error> for Ended {
    fn from(error: Error) -> Self {
        Self::Lost(error.into())
    }
}
