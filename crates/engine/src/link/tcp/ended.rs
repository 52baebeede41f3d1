//! The end of a lane.

use std::io;

use tcpx_net::Fault;

use crate::error::{Error, LostCause, Misbehaviour};

/// Why a lane has ended, and whether the connection has ended with it.
#[derive(Debug)]
pub(super) enum Ended {
    /// The stream is broken, and the connection continues.
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
        // Unreadable memory is not the fault of the stream, and would break the next one as well.
        match Fault::is_in(&error) {
            true => Self::Lost(error.into()),
            false => Self::Broken(error.into()),
        }
    }
}

impl From<Error> for Ended {
    fn from(error: Error) -> Self {
        match error {
            // The plugin reported an error: the lane needs new comms, and with them a new stream.
            Error::Plugin(tcpx_ncclnet::Error::Call { .. }) => Self::Broken(error.into()),
            error => Self::Lost(error.into()),
        }
    }
}
