//! Messages between the two sides of a check, over the bootstrap socket.

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
        /// The value of [`tcpx::Session::connection_info`].
        info: Vec<u8>,
    },
    /// The client asks whether the server can connect to it, at the addresses of its info.
    Reach {
        /// The time limit.
        limit: Duration,
    },
    /// The result of [`Message::Reach`].
    Reached {
        /// The result at each address.
        attempts: Vec<Attempt>,
    },
    /// The client asks for memory to write to and read from.
    Want {
        /// The number of bytes.
        bytes: usize,
    },
    /// The memory.
    Region {
        /// The value of [`tcpx::RemoteRegion::to_bytes`].
        descriptor: Vec<u8>,
    },
    /// The client has written the pattern of this seed to the memory.
    Written {
        /// The seed.
        seed: u64,
    },
    /// The server has compared the memory, and then filled it from another seed.
    Compared {
        /// The offset of the first wrong byte.
        difference: Option<usize>,
        /// The seed of the memory's new content.
        seed: u64,
    },
    /// The connection info of the sender's second session, which may copy directly.
    Beside {
        /// The value of [`tcpx::Session::connection_info`].
        info: Vec<u8>,
    },
    /// The client asks the server's second session for a little memory.
    Lend {
        /// The kind of memory.
        kind: Kind,
    },
    /// The client asks the server's second session for memory to measure with.
    Pour {
        /// The number of bytes.
        bytes: usize,
    },
    /// The server has no such memory, or cannot start a second session.
    Without {
        /// The reason.
        reason: String,
    },
    /// The client is done.
    Done {
        /// The problem that the client found, if any.
        problem: Option<String>,
    },
    /// The server has made its report: the client may close its session.
    Noted,
    /// The sender cannot continue.
    Failed {
        /// The reason.
        problem: String,
    },
}

/// A message that cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MessageError {
    /// The message is not one of `tcpx check`.
    #[error("the other side sent what is no message of `tcpx check`: {0}")]
    Unreadable(serde_json::Error),
    /// The message is not the expected one.
    #[error(
        "the other side sent {found} where {expected} was due; use the same tcpx on both sides"
    )]
    Unexpected {
        /// The name of the received message.
        found: String,
        /// The name of the expected message.
        expected: &'static str,
    },
}

impl Message {
    pub(super) fn send(&self, channel: &mut Channel) -> Result<(), BootstrapError> {
        let text = serde_json::to_vec(self).expect("messages are plain data");
        channel.send(&text)
    }

    /// Receives the next message; [`Message::Failed`] becomes an error.
    pub(super) fn receive(channel: &mut Channel) -> Result<Self, CheckError> {
        let text = channel.receive()?;
        match serde_json::from_slice(&text).map_err(MessageError::Unreadable)? {
            Message::Failed { problem } => Err(CheckError::Remote(problem)),
            message => Ok(message),
        }
    }

    /// Returns an error that names this message and the expected one.
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
