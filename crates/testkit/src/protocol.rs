//! The protocol between a test and its second process: one JSON object per line, over the process's
//! standard input and output.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tcpx::stats::Failures;
use tcpx::{Error, ErrorKind, Op, TransferState};

use crate::mapping::Access;
use crate::pattern::{Content, Expected};

/// One piece of a transfer between two pieces of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Copy {
    /// Offset in the initiator's memory.
    pub local: usize,
    /// Offset in the target's memory.
    pub remote: usize,
    /// Length in bytes.
    pub len: usize,
}

impl Copy {
    /// Creates a copy of `len` bytes at these offsets.
    #[must_use]
    pub fn new(local: usize, remote: usize, len: usize) -> Self {
        Self { local, remote, len }
    }
}

/// A [`struct@Copy`] between any of several regions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Piece {
    /// The process's region.
    pub region: u64,
    /// Index in the list of the other side's descriptors.
    pub descriptor: usize,
    /// Offsets and length.
    pub copy: Copy,
}

/// A request with the number that its answer repeats.
#[derive(Debug, Serialize, Deserialize)]
pub struct Question {
    /// The number.
    pub id: u64,
    /// The command.
    pub command: Command,
}

/// The answer to a request.
#[derive(Debug, Serialize, Deserialize)]
pub struct Answer {
    /// The request's number.
    pub id: u64,
    /// The result.
    pub result: Result<serde_json::Value, Failure>,
}

/// Commands to the process. Objects are identified by numbers that it assigned.
#[derive(Debug, Serialize, Deserialize)]
#[expect(missing_docs, reason = "each is the call of the same name")]
pub enum Command {
    /// Starts a session, replacing the previous one. Settings override the environment.
    Open {
        settings: Vec<(String, String)>,
    },
    Close,
    AddPeer {
        #[serde(with = "hex")]
        info: Vec<u8>,
    },
    RemovePeer {
        peer: String,
    },
    Connect {
        peer: String,
        timeout: Duration,
    },
    Accept {
        timeout: Duration,
    },
    Disconnect {
        peer: String,
    },
    Lanes {
        peer: String,
    },
    IsConnected {
        peer: String,
    },
    /// Allocates and registers memory.
    Allocate {
        len: usize,
    },
    /// Maps and registers memory.
    Map {
        len: usize,
    },
    /// Changes the allowed access to its pages.
    Allow {
        memory: u64,
        access: Access,
        offset: usize,
        len: usize,
    },
    /// Registers a part of it.
    Register {
        memory: u64,
        offset: usize,
        len: usize,
    },
    Deregister {
        region: u64,
    },
    Put {
        memory: u64,
        offset: usize,
        len: usize,
        content: Content,
    },
    SetBytes {
        memory: u64,
        offset: usize,
        #[serde(with = "hex")]
        bytes: Vec<u8>,
    },
    Bytes {
        memory: u64,
        offset: usize,
        len: usize,
    },
    Check {
        memory: u64,
        expected: Expected,
    },
    Prepare {
        write: bool,
        peer: String,
        descriptors: Vec<Hex>,
        pieces: Vec<Piece>,
        /// Repeats the list this often.
        repeat: usize,
    },
    Send {
        peer: String,
        region: u64,
        offset: usize,
        len: usize,
        tag: u64,
    },
    Receive {
        peer: String,
        region: u64,
        offset: usize,
        len: usize,
        tag: u64,
    },
    Post {
        transfer: u64,
        notification: Option<Hex>,
    },
    Poll {
        transfer: u64,
    },
    Wait {
        transfer: u64,
        timeout: Duration,
    },
    Abort {
        transfer: u64,
    },
    Received {
        transfer: u64,
    },
    /// Drops the transfer.
    Release {
        transfer: u64,
    },
    Notify {
        peer: String,
        #[serde(with = "hex")]
        message: Vec<u8>,
    },
    /// Sends the same message this often, as fast as possible.
    NotifyOften {
        peer: String,
        #[serde(with = "hex")]
        message: Vec<u8>,
        count: usize,
    },
    TakeNotifications,
    WaitNotification {
        timeout: Duration,
    },
    /// Forks a child that must not use inherited objects, and that writes to a region of its
    /// parent. Answers with its process id; it lives until [`Command::EndChild`].
    Fork {
        region: u64,
    },
    EndChild {
        child: u32,
    },
    /// Compares the requests to the process with its session's statistics, and returns them.
    Figures,
    Nothing,
    /// Answers, and then sleeps until the file exists.
    SleepUntil {
        file: PathBuf,
    },
    /// Answers, and then exits without closing the engine.
    Exit,
    /// Aborts without an answer.
    Crash,
}

/// The result of [`Command::Open`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Opened {
    /// The session's connection info.
    #[serde(with = "hex")]
    pub info: Vec<u8>,
    /// The addresses on which it listens.
    pub addresses: Vec<std::net::SocketAddr>,
}

/// The result of [`Command::Allocate`] and [`Command::Register`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Registered {
    /// Identifies the memory.
    pub memory: u64,
    /// Identifies the region.
    pub region: u64,
    /// The descriptor that the other side needs.
    #[serde(with = "hex")]
    pub descriptor: Vec<u8>,
}

/// The result of [`Command::Lanes`] for each lane.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Lane {
    /// This end.
    pub local: std::net::SocketAddr,
    /// The other end.
    pub remote: std::net::SocketAddr,
    /// Bytes sent.
    pub bytes_sent: u64,
    /// Bytes received.
    pub bytes_received: u64,
    /// Whether it has a stream.
    pub is_up: bool,
    /// Number of times its stream was replaced.
    pub failovers: u32,
}

/// A notification that arrived.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Notice {
    /// The sender's name.
    pub from: String,
    /// The message.
    #[serde(with = "hex")]
    pub message: Vec<u8>,
}

impl From<tcpx::Notification> for Notice {
    fn from(n: tcpx::Notification) -> Self {
        Self {
            from: n.from,
            message: n.message,
        }
    }
}

/// An error of the engine in the other process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Failure {
    kind: String,
    /// The error in `Debug` format.
    value: String,
    /// Its message.
    pub text: String,
}

impl Failure {
    /// Returns whether it is this error. System errors are compared with their codes and messages.
    #[must_use]
    pub fn is(&self, error: &Error) -> bool {
        self.value == format!("{error:?}")
    }

    /// Returns the kind of the error.
    ///
    /// # Panics
    /// When the other process knows a kind that this one does not.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        let found = Failures::CAUSES
            .into_iter()
            .find(|k| format!("{k:?}") == self.kind);
        found.unwrap_or_else(|| panic!("a kind that the test kit does not know: {self:?}"))
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self {
            kind: format!("{:?}", error.kind()),
            value: format!("{error:?}"),
            text: error.to_string(),
        }
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({})", self.text, self.kind)
    }
}

/// Encodes a state.
#[must_use]
pub fn state_name(state: TransferState) -> String {
    format!("{state:?}")
}

/// Decodes a state.
///
/// # Panics
/// When the name is unknown.
#[must_use]
pub fn state_named(name: &str) -> TransferState {
    let states = [
        TransferState::Prepared,
        TransferState::InProgress,
        TransferState::Done,
        TransferState::Failed,
        TransferState::Aborting,
        TransferState::Aborted,
    ];
    let found = states.into_iter().find(|s| state_name(*s) == name);
    found.unwrap_or_else(|| panic!("a state that the test kit does not know: {name}"))
}

/// Converts the operation.
#[must_use]
pub fn op(write: bool) -> Op {
    if write { Op::Write } else { Op::Read }
}

/// Bytes that are encoded as hexadecimal digits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hex(#[serde(with = "hex")] pub Vec<u8>);

mod hex {
    use std::fmt::Write;

    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(bytes: &[u8], out: S) -> Result<S::Ok, S::Error> {
        let mut text = String::with_capacity(2 * bytes.len());
        for byte in bytes {
            write!(text, "{byte:02x}").expect("a String takes everything");
        }
        out.serialize_str(&text)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(input: D) -> Result<Vec<u8>, D::Error> {
        let text = <std::borrow::Cow<'de, str>>::deserialize(input)?;
        let digit = |c: u8| {
            (c as char)
                .to_digit(16)
                .ok_or_else(|| D::Error::custom("not a hexadecimal digit"))
        };
        let pairs = text.as_bytes().chunks(2);
        pairs
            .map(|pair| match pair {
                [high, low] => Ok((digit(*high)? * 16 + digit(*low)?) as u8),
                _ => Err(D::Error::custom("an odd number of digits")),
            })
            .collect()
    }
}
