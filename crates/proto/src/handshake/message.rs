//! Common parts of all messages: kinds, limits, framing. `docs/wire-protocol.md` has the same as
//! tables.

use alloc::vec::Vec;
use core::fmt;
use core::ops::RangeInclusive;

use super::config::LaneError;
use super::hello::{ClientHello, ServerHello};
use super::offer::{Features, Missing};
use super::proof::{TAG_LEN, Tag};
use super::{HandshakeError, MAX_HANDSHAKE_BYTES, MIN_VERSION, VERSION};
use crate::codec::{CodecError, Reader, Writer};
use crate::info::{Name, NameError};

/// Magic bytes at the start of every message.
pub(super) const MAGIC: [u8; 4] = *b"TCPX";
/// Size of a header: magic, kind, a reserved byte, length of the body.
pub(super) const HEADER_LEN: usize = 8;
/// Size of the code of a Reject.
const CODE_LEN: usize = 2;
/// Size of the two sets of features that follow the code of [`RejectCode::Requirement`].
const MISSING_LEN: usize = 4 + 4;

/// The kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
#[non_exhaustive]
pub enum MessageKind {
    /// The client's first message.
    ClientHello = 1,
    /// The server's answer, which proves the server.
    ServerHello = 2,
    /// The client's answer, which proves the client.
    ClientProof = 3,
    /// The server's last message: frames follow.
    ServerReady = 4,
    /// Either side's last message: nothing follows.
    Reject = 5,
}

impl MessageKind {
    fn from_wire(byte: u8) -> Option<Self> {
        Some(match byte {
            1 => Self::ClientHello,
            2 => Self::ServerHello,
            3 => Self::ClientProof,
            4 => Self::ServerReady,
            5 => Self::Reject,
            _ => return None,
        })
    }

    /// Returns the allowed lengths of a body, known before any of it has arrived.
    const fn body_len(self) -> RangeInclusive<usize> {
        match self {
            // Later versions may add fields after those of version 1.
            Self::ClientHello => ClientHello::VERSIONS_LEN..=MAX_HANDSHAKE_BYTES - HEADER_LEN,
            Self::ServerHello => {
                ServerHello::FIXED_LEN + 1..=ServerHello::FIXED_LEN + Name::MAX_LEN
            }
            Self::ClientProof => 2 * TAG_LEN..=2 * TAG_LEN,
            Self::ServerReady => 0..=0,
            // Most codes are followed by nothing; see `RejectCode::decode`.
            Self::Reject => CODE_LEN..=CODE_LEN + MISSING_LEN,
        }
    }
}

impl fmt::Display for MessageKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// The reason one side rejected the handshake. Encoded as a `u16`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RejectCode {
    /// No protocol version in common.
    Version,
    /// The requested session is not here.
    UnknownSession,
    /// A tag is wrong.
    BadProof,
    /// The session has its maximum of connections or lanes.
    TooMany,
    /// The session is closing.
    Closing,
    /// A message is malformed or out of place.
    BadMessage,
    /// A side does not offer a feature that the other requires.
    Requirement(Missing),
    /// The connection that the lane belongs to has ended.
    UnknownConnection,
    /// A reason that this build does not know.
    Other(u16),
}

impl RejectCode {
    fn decode(mut body: Reader<'_>) -> Result<Self, MessageError> {
        let code = match body.u16()? {
            1 => Self::Version,
            2 => Self::UnknownSession,
            3 => Self::BadProof,
            4 => Self::TooMany,
            5 => Self::Closing,
            6 => Self::BadMessage,
            7 => {
                let client_lacks = Features::from_bits(body.u32()?);
                let server_lacks = Features::from_bits(body.u32()?);
                let missing = Missing::new(client_lacks, server_lacks);
                Self::Requirement(missing.ok_or(MessageError::NothingMissing)?)
            }
            8 => Self::UnknownConnection,
            // Bytes that a later version adds are ignored.
            other => return Ok(Self::Other(other)),
        };
        body.finish()?;
        Ok(code)
    }

    fn number(self) -> u16 {
        match self {
            Self::Version => 1,
            Self::UnknownSession => 2,
            Self::BadProof => 3,
            Self::TooMany => 4,
            Self::Closing => 5,
            Self::BadMessage => 6,
            Self::Requirement(_) => 7,
            Self::UnknownConnection => 8,
            Self::Other(code) => code,
        }
    }
}

impl fmt::Display for RejectCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Version => "no protocol version in common",
            Self::UnknownSession => "that session is not there, its connection info is stale",
            Self::BadProof => "the proof is wrong, the connection info does not fit",
            Self::TooMany => "too many connections",
            Self::Closing => "the session is closing",
            Self::BadMessage => "a handshake message was malformed",
            Self::Requirement(missing) => return write!(f, "a requirement is not met: {missing}"),
            Self::UnknownConnection => "the connection of the lost lane has ended",
            Self::Other(code) => return write!(f, "reason {code}"),
        })
    }
}

/// The reason bytes are no handshake message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MessageError {
    /// The bytes do not start with `TCPX`.
    #[error("it is not tcpx")]
    MagicMissing,

    /// No message has this kind.
    #[error("message kind {found} is unknown")]
    KindUnknown {
        /// The kind that was found.
        found: u8,
    },

    /// Fields are cut short, left over, or out of range.
    #[error("its layout is wrong: {0}")]
    LayoutWrong(#[from] CodecError),

    /// The sender's name is invalid.
    #[error(transparent)]
    NameInvalid(#[from] NameError),

    /// The oldest version is newer than the newest.
    #[error("version range {min} to {max} is empty")]
    VersionRangeEmpty {
        /// Oldest version.
        min: u16,
        /// Newest version.
        max: u16,
    },

    /// The lane's number is not below the number of lanes.
    #[error(transparent)]
    LaneInvalid(#[from] LaneError),

    /// A window of zero chunks would block every transfer.
    #[error("a window of 0 chunks blocks every transfer")]
    WindowZero,

    /// The server chose a version that was not offered.
    #[error("version {chosen} was chosen, {MIN_VERSION} to {VERSION} were offered")]
    VersionNotOffered {
        /// The server's choice.
        chosen: u16,
    },

    /// The sender requires a feature that it does not offer itself.
    #[error("it requires {missing}, which it does not offer itself")]
    RequiredNotOffered {
        /// The features required and not offered.
        missing: Features,
    },

    /// A Reject for a missing requirement names no feature.
    #[error("a Reject for a missing requirement names none")]
    NothingMissing,
}

/// A complete received message; the body is not decoded yet.
#[derive(Clone, Copy, Debug)]
pub(super) struct Message<'a> {
    pub(super) kind: MessageKind,
    /// Header and body.
    pub(super) bytes: &'a [u8],
}

impl<'a> Message<'a> {
    /// Returns the first message of `input`, which must be `expected` or a Reject; `None` while it
    /// is incomplete. Invalid input is refused at the first byte that shows it, so that nothing is
    /// buffered for it.
    pub(super) fn next(
        input: &'a [u8],
        expected: MessageKind,
    ) -> Result<Option<Self>, HandshakeError> {
        if input
            .iter()
            .zip(&MAGIC)
            .any(|(found, magic)| found != magic)
        {
            return Err(MessageError::MagicMissing.into());
        }
        let Some(header) = input.get(..HEADER_LEN) else {
            return Ok(None);
        };
        let mut reader = Reader::new(&header[MAGIC.len()..]);
        let (kind, body_len) = decode_header(&mut reader)?;
        if kind != expected && kind != MessageKind::Reject {
            return Err(HandshakeError::PeerMessageUnexpected {
                found: kind,
                expected,
            });
        }
        Ok(input
            .get(..HEADER_LEN + body_len)
            .map(|bytes| Self { kind, bytes }))
    }

    /// Returns the message without its header.
    pub(super) fn body(&self) -> Reader<'a> {
        Reader::new(self.bytes.get(HEADER_LEN..).unwrap_or_default())
    }

    /// Splits off the tag at the end: returns the bytes that it covers, and the tag.
    pub(super) fn split_tag(&self) -> Result<(&'a [u8], &'a Tag), MessageError> {
        let short = CodecError::Truncated {
            needed: TAG_LEN,
            left: self.bytes.len(),
        };
        Ok(self.bytes.split_last_chunk().ok_or(short)?)
    }

    /// Returns the reason that a Reject gives.
    pub(super) fn reject_code(&self) -> Result<RejectCode, MessageError> {
        RejectCode::decode(self.body())
    }
}

/// Decodes the fields after the magic; checks the length of the body against the limits of its
/// kind.
fn decode_header(reader: &mut Reader<'_>) -> Result<(MessageKind, usize), MessageError> {
    let kind = reader.u8()?;
    let Some(kind) = MessageKind::from_wire(kind) else {
        return Err(MessageError::KindUnknown { found: kind });
    };
    reader.reserved()?;
    let len = usize::from(reader.u16()?);
    let (min, max) = kind.body_len().into_inner();
    if len < min || len > max {
        return Err(CodecError::LengthOutOfRange { len, min, max }.into());
    }
    Ok((kind, len))
}

/// Starts a message whose body will have `body_len` bytes.
pub(super) fn start(kind: MessageKind, body_len: usize) -> Vec<u8> {
    debug_assert!(kind.body_len().contains(&body_len));
    let mut out = Vec::with_capacity(HEADER_LEN + body_len);
    out.put_bytes(&MAGIC);
    out.put_u8(kind as u8);
    out.put_u8(0);
    // Never cut: bodies are shorter than MAX_HANDSHAKE_BYTES.
    out.put_u16(body_len as u16);
    out
}

/// Encodes a ClientProof without the client's tag, which covers these bytes.
pub(super) fn proof_before_tag(owner: &Tag) -> Vec<u8> {
    let mut out = start(MessageKind::ClientProof, 2 * TAG_LEN);
    out.put_bytes(owner);
    out
}

/// Encodes a ServerReady.
pub(super) fn ready() -> Vec<u8> {
    start(MessageKind::ServerReady, 0)
}

/// Encodes a Reject.
pub(super) fn reject(code: RejectCode) -> Vec<u8> {
    let missing = match code {
        RejectCode::Requirement(missing) => Some(missing),
        _ => None,
    };
    let mut out = start(
        MessageKind::Reject,
        CODE_LEN + missing.map_or(0, |_| MISSING_LEN),
    );
    out.put_u16(code.number());
    if let Some(missing) = missing {
        out.put_u32(missing.client_lacks().bits());
        out.put_u32(missing.server_lacks().bits());
    }
    out
}
