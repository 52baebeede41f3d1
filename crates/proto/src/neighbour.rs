//! The messages that two sessions on one host exchange beside their connection, on a Unix socket
//! that preserves message boundaries.
//!
//! The sessions prove to each other that they are the two ends of a connection, and that each can
//! read the other's memory; then each opens regions of the other. Some messages carry descriptors:
//! [`Message::Join`] and [`Message::Welcome`] that of the gates, [`Message::Opened`] those of
//! device memory.

use alloc::vec::Vec;

use hmac::Mac;

use crate::codec::{CodecError, Reader, Writer};
use crate::descriptor::RegionKey;
use crate::info::SessionId;
use crate::secret::Secret;

/// The longest message.
pub const MAX_MESSAGE_BYTES: usize = 32 << 10;

/// The longest text that gives the reason for a refusal.
pub const MAX_REASON_BYTES: usize = 512;

/// Length of the bytes that one side reads from the other's memory to prove that it can.
pub const NONCE_BYTES: usize = 32;

/// Proves knowledge of the listening session's secret.
pub type Tag = [u8; 32];

/// The side that made a [`Tag`]: without it one side's tag could be reflected as the other's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The session that made the connection.
    Client,
    /// The session that accepted it.
    Server,
}

/// One message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message<'a> {
    /// The first message of a client: names the connection.
    Join {
        /// The client's session.
        client: SessionId,
        /// The client's number for the connection.
        connection: u64,
        /// The tag of [`Side::Client`].
        tag: Tag,
        /// The address of the client's nonce.
        nonce_at: u64,
    },
    /// The first message of a server.
    Welcome {
        /// The tag of [`Side::Server`].
        tag: Tag,
        /// The address of the server's nonce.
        nonce_at: u64,
    },
    /// The bytes read at `nonce_at`.
    Found {
        /// The bytes there.
        nonce: [u8; NONCE_BYTES],
    },
    /// The sender cannot read the receiver's memory.
    Unable {
        /// The reason.
        reason: &'a [u8],
    },
    /// Confirms that the other side has read this side's nonce: from here on it may open regions.
    Proven,
    /// Asks for access to a region.
    Open {
        /// Identifies the request.
        request: u32,
        /// The region's key.
        key: RegionKey,
    },
    /// Grants access to a region, until the gate is closed.
    Opened {
        /// The request.
        request: u32,
        /// The gate to pass before each access.
        gate: u32,
        /// The region's first byte, in the owner's address space.
        address: u64,
        /// Its length.
        len: u64,
        /// How device memory is mapped; empty for host memory.
        export: &'a [u8],
    },
    /// Refuses access to a region.
    Refused {
        /// The request.
        request: u32,
        /// Whether lanes would refuse it too: the key is wrong, or the region is gone.
        is_final: bool,
        /// The reason.
        reason: &'a [u8],
    },
    /// The region behind a gate was deregistered.
    Revoked {
        /// The gate, which is closed.
        gate: u32,
    },
    /// The sender will never ask for this gate again.
    Forgotten {
        /// The gate.
        gate: u32,
    },
}

/// The reason bytes are no valid message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NeighbourError {
    /// The fields are malformed.
    #[error("a message of a neighbour is damaged: {0}")]
    Layout(#[from] CodecError),
    /// The kind is unknown.
    #[error("a message of a neighbour is of unknown kind {0}")]
    Kind(u8),
}

const JOIN: u8 = 1;
const WELCOME: u8 = 2;
const FOUND: u8 = 3;
const UNABLE: u8 = 4;
const PROVEN: u8 = 5;
const OPEN: u8 = 6;
const OPENED: u8 = 7;
const REFUSED: u8 = 8;
const REVOKED: u8 = 9;
const FORGOTTEN: u8 = 10;

impl<'a> Message<'a> {
    /// Appends the message.
    pub fn encode(&self, out: &mut Vec<u8>) {
        match *self {
            Self::Join {
                client,
                connection,
                tag,
                nonce_at,
            } => {
                out.put_u8(JOIN);
                out.put_bytes(&client.0);
                out.put_u64(connection);
                out.put_bytes(&tag);
                out.put_u64(nonce_at);
            }
            Self::Welcome { tag, nonce_at } => {
                out.put_u8(WELCOME);
                out.put_bytes(&tag);
                out.put_u64(nonce_at);
            }
            Self::Found { nonce } => {
                out.put_u8(FOUND);
                out.put_bytes(&nonce);
            }
            Self::Unable { reason } => {
                out.put_u8(UNABLE);
                out.put_bytes(shortened(reason));
            }
            Self::Proven => out.put_u8(PROVEN),
            Self::Open { request, key } => {
                out.put_u8(OPEN);
                out.put_u32(request);
                out.put_bytes(&key.0);
            }
            Self::Opened {
                request,
                gate,
                address,
                len,
                export,
            } => {
                out.put_u8(OPENED);
                out.put_u32(request);
                out.put_u32(gate);
                out.put_u64(address);
                out.put_u64(len);
                out.put_bytes(export);
            }
            Self::Refused {
                request,
                is_final,
                reason,
            } => {
                out.put_u8(REFUSED);
                out.put_u32(request);
                out.put_u8(is_final.into());
                out.put_bytes(shortened(reason));
            }
            Self::Revoked { gate } => {
                out.put_u8(REVOKED);
                out.put_u32(gate);
            }
            Self::Forgotten { gate } => {
                out.put_u8(FORGOTTEN);
                out.put_u32(gate);
            }
        }
    }

    /// Decodes a message.
    ///
    /// # Errors
    /// The bytes are no valid message.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, NeighbourError> {
        let mut reader = Reader::new(bytes);
        let message = match reader.u8()? {
            JOIN => Self::Join {
                client: SessionId(reader.array()?),
                connection: reader.u64()?,
                tag: reader.array()?,
                nonce_at: reader.u64()?,
            },
            WELCOME => Self::Welcome {
                tag: reader.array()?,
                nonce_at: reader.u64()?,
            },
            FOUND => Self::Found {
                nonce: reader.array()?,
            },
            UNABLE => Self::Unable {
                reason: reason(&mut reader)?,
            },
            PROVEN => Self::Proven,
            OPEN => Self::Open {
                request: reader.u32()?,
                key: RegionKey(reader.array()?),
            },
            OPENED => Self::Opened {
                request: reader.u32()?,
                gate: reader.u32()?,
                address: reader.u64()?,
                len: reader.u64()?,
                export: reader.rest(),
            },
            REFUSED => Self::Refused {
                request: reader.u32()?,
                is_final: match reader.u8()? {
                    0 => false,
                    1 => true,
                    found => return Err(CodecError::ReservedNotZero { found }.into()),
                },
                reason: reason(&mut reader)?,
            },
            REVOKED => Self::Revoked {
                gate: reader.u32()?,
            },
            FORGOTTEN => Self::Forgotten {
                gate: reader.u32()?,
            },
            kind => return Err(NeighbourError::Kind(kind)),
        };
        reader.finish()?;
        Ok(message)
    }
}

fn shortened(reason: &[u8]) -> &[u8] {
    &reason[..reason.len().min(MAX_REASON_BYTES)]
}

fn reason<'a>(reader: &mut Reader<'a>) -> Result<&'a [u8], CodecError> {
    reader.bytes_within(reader.left(), 0, MAX_REASON_BYTES)
}

/// Computes the tag of one side of a connection, with the secret of the session that accepted it.
#[must_use]
pub fn tag(secret: &Secret, side: Side, client: SessionId, connection: u64) -> Tag {
    mac(secret, side, client, connection)
        .finalize()
        .into_bytes()
        .into()
}

/// Returns whether a tag is right, in constant time.
#[must_use]
pub fn verify(secret: &Secret, side: Side, client: SessionId, connection: u64, tag: &Tag) -> bool {
    mac(secret, side, client, connection)
        .verify_slice(tag)
        .is_ok()
}

fn mac(secret: &Secret, side: Side, client: SessionId, connection: u64) -> crate::secret::Tagger {
    let mut mac = secret.tagger(match side {
        Side::Client => b"tcpx neighbour client",
        Side::Server => b"tcpx neighbour server",
    });
    mac.update(&client.0);
    mac.update(&connection.to_le_bytes());
    mac
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use proptest::prelude::*;

    use super::*;

    fn messages(bytes: &[u8]) -> Vec<Message<'_>> {
        let reason = &bytes[..bytes.len().min(MAX_REASON_BYTES)];
        vec![
            Message::Join {
                client: SessionId([7; SessionId::LEN]),
                connection: 1 << 40,
                tag: [8; 32],
                nonce_at: 0x7fff_1234_5678,
            },
            Message::Welcome {
                tag: [9; 32],
                nonce_at: 1,
            },
            Message::Found {
                nonce: [3; NONCE_BYTES],
            },
            Message::Unable { reason },
            Message::Proven,
            Message::Open {
                request: 5,
                key: RegionKey([4; RegionKey::LEN]),
            },
            Message::Opened {
                request: 6,
                gate: 7,
                address: 8,
                len: 9,
                export: bytes,
            },
            Message::Refused {
                request: 1,
                is_final: true,
                reason,
            },
            Message::Revoked { gate: 2 },
            Message::Forgotten { gate: 3 },
        ]
    }

    proptest! {
        #[test]
        fn every_message_survives_its_encoding(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
            for message in messages(&bytes) {
                let mut out = Vec::new();
                message.encode(&mut out);
                prop_assert_eq!(Message::decode(&out), Ok(message));
            }
        }

        #[test]
        fn no_bytes_are_taken_for_more_than_they_are(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(message) = Message::decode(&bytes) {
                let mut out = Vec::new();
                message.encode(&mut out);
                prop_assert_eq!(out, bytes);
            }
        }
    }

    #[test]
    fn what_is_cut_short_or_goes_on_is_refused() {
        for message in messages(b"") {
            let mut out = Vec::new();
            message.encode(&mut out);
            let is_open_ended = matches!(
                message,
                Message::Opened { .. } | Message::Unable { .. } | Message::Refused { .. }
            );
            assert!(
                Message::decode(&out[..out.len() - 1]).is_err(),
                "{message:?}"
            );
            out.push(0);
            assert_eq!(Message::decode(&out).is_ok(), is_open_ended, "{message:?}");
        }
    }

    #[test]
    fn a_long_reason_is_shortened_and_never_accepted() {
        let mut out = Vec::new();
        Message::Unable {
            reason: &[b'x'; 2 * MAX_REASON_BYTES],
        }
        .encode(&mut out);
        assert_eq!(out.len(), 1 + MAX_REASON_BYTES);
        out.push(b'x');
        assert!(Message::decode(&out).is_err());
    }

    #[test]
    fn a_tag_is_of_one_side_of_one_connection() {
        let (secret, id) = (Secret::new([1; 32]), SessionId([2; SessionId::LEN]));
        let made = tag(&secret, Side::Client, id, 3);
        assert!(verify(&secret, Side::Client, id, 3, &made));
        assert!(!verify(&secret, Side::Server, id, 3, &made));
        assert!(!verify(&secret, Side::Client, id, 4, &made));
        let other = SessionId([3; SessionId::LEN]);
        assert!(!verify(&secret, Side::Client, other, 3, &made));
        assert!(!verify(&Secret::new([2; 32]), Side::Client, id, 3, &made));
    }
}
