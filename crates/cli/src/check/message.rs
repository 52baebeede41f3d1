//! What the two sides of a check say to each other over the bootstrap socket.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tcpx_bench::bootstrap::{BootstrapError, Channel};

use super::CheckError;
use super::paths::Kind;
use super::reverse::Attempt;

/// One message, as JSON; the channel bounds its length.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Message {
    /// The sender's connection info.
    Hello {
        /// As [`tcpx::Session::connection_info`] gives it.
        info: Vec<u8>,
    },
    /// The client asks whether the server could connect to it, at the addresses of its info.
    Reach {
        /// How long that may take.
        limit: Duration,
    },
    /// What came of it.
    Reached {
        /// Each address.
        attempts: Vec<Attempt>,
    },
    /// The client asks for memory to write to and read from.
    Want {
        /// How much.
        bytes: usize,
    },
    /// The memory.
    Region {
        /// As [`tcpx::RemoteRegion::to_bytes`] gives it.
        descriptor: Vec<u8>,
    },
    /// The memory now holds the pattern of this seed.
    Written {
        /// The seed.
        seed: u64,
    },
    /// The server compared, and then filled the memory from another seed.
    Compared {
        /// The first byte that was not as expected.
        difference: Option<usize>,
        /// The seed of what is there now.
        seed: u64,
    },
    /// The connection info of the sender's session that copies directly.
    Beside {
        /// As [`tcpx::Session::connection_info`] gives it.
        info: Vec<u8>,
    },
    /// The client asks that session for a little memory.
    Lend {
        /// Of this kind.
        kind: Kind,
    },
    /// The client asks that session for memory to measure with.
    Pour {
        /// How much.
        bytes: usize,
    },
    /// There is no such memory, or no such session.
    Without {
        /// Why.
        reason: String,
    },
    /// The client is done.
    Done {
        /// What did not work, if anything.
        problem: Option<String>,
    },
    /// The server has its report: the client may close its session.
    Noted,
    /// The sender cannot go on.
    Failed {
        /// Why.
        problem: String,
    },
}

/// A message that makes no sense here.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MessageError {
    /// Not one of ours.
    #[error("the other side sent what is no message of `tcpx check`: {0}")]
    Unreadable(serde_json::Error),
    /// One of ours, at the wrong time.
    #[error(
        "the other side sent {found} where {expected} was due; use the same tcpx on both sides"
    )]
    Unexpected {
        /// What came.
        found: String,
        /// What should have.
        expected: &'static str,
    },
}

impl Message {
    pub(super) fn send(&self, channel: &mut Channel) -> Result<(), BootstrapError> {
        let text = serde_json::to_vec(self).expect("messages are plain data");
        channel.send(&text)
    }

    /// The next message; one that says [`Message::Failed`] is an error.
    pub(super) fn receive(channel: &mut Channel) -> Result<Self, CheckError> {
        let text = channel.receive()?;
        match serde_json::from_slice(&text).map_err(MessageError::Unreadable)? {
            Message::Failed { problem } => Err(CheckError::Remote(problem)),
            message => Ok(message),
        }
    }

    /// An error that says what was due instead of this.
    pub(super) fn unexpected(&self, expected: &'static str) -> CheckError {
        let text = format!("{self:?}");
        let name = text
            .split(|c: char| !c.is_alphanumeric())
            .next()
            .unwrap_or_default();
        MessageError::Unexpected {
            found: name.to_owned(),
            expected,
        }
        .into()
    }
}

/// Tells the other side why this one stops, and passes the result on.
pub(super) fn or_tell<T>(
    result: Result<T, CheckError>,
    channel: &mut Channel,
) -> Result<T, CheckError> {
    if let Err(error) = &result
        && !matches!(error, CheckError::Bootstrap(_) | CheckError::Remote(_))
    {
        let problem = crate::error::chain(error);
        // The other side may be gone already; this side reports the error either way.
        let _ = Message::Failed { problem }.send(channel);
    }
    result
}
