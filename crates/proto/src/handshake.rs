//! The handshake, which turns a TCP stream into an authenticated lane.
//!
//! ```text
//!   client                                                             server
//!     │  ClientHello   who I am, whom I want, which lane, offer, nonce   │
//!     ├─────────────────────────────────────────────────────────────────►│
//!     │  ServerHello   version chosen, offer, nonce, server's tag        │
//!     │◄─────────────────────────────────────────────────────────────────┤
//!     │  ClientProof   owner tag, client's tag                           │
//!     ├─────────────────────────────────────────────────────────────────►│
//!     │  ServerReady                                                     │
//!     │◄─────────────────────────────────────────────────────────────────┤
//!     │  frames, both ways                                               │
//! ```
//!
//! Either side may send a Reject in place of its next message and is finished then.
//!
//! **What it proves.** Both sides know the *server's* secret, which is in the server's
//! [`ConnectionInfo`]: without the info nobody can play either part. A tag is the last field of its
//! message and covers every byte of the handshake before it, both nonces included, so nothing can
//! be altered, replayed or reflected. The server proves itself first; a client sends no proof to an
//! unauthenticated server. The owner tag is made with the *client's* secret: a server that also
//! holds the client's connection info can check with [`Established::is_owned_by`] that the client
//! did not merely claim another session's identity.
//!
//! **What it negotiates.** The hello of each side carries the optional features that it [offers and
//! requires](Offer); a lane uses the features that both offer. If a requirement is not met, the
//! client learns it from the ServerHello, which the server's tag covers, and fails; the server
//! learns it once the client has proven itself. An unauthenticated peer cannot cause such a failure
//! on either side.
//!
//! **What it does not do.** The lane is not encrypted, and an attacker on the path can take it over
//! after the handshake. [`Features::ENCRYPTION`] is reserved for a layer that changes this.
//!
//! **How to drive it.** [`Client`] and [`Server`] do no I/O. Pass received bytes to `handle`, drop
//! as many as it consumed, and pass the rest again together with the bytes that follow; send the
//! output of `poll_transmit`, also after an error. Neither ever consumes a byte past the handshake.
//! The caller sets a deadline and the size of its buffer: [`MAX_HANDSHAKE_BYTES`] is enough.
//!
//! ```
//! # use core::num::NonZeroU32;
//! # use tcpx_proto::handshake::*;
//! # use tcpx_proto::info::*;
//! # let identity = |name, id| Identity {
//! #     name: Name::new(name).unwrap(),
//! #     id: SessionId([id; 16]),
//! #     secret: Secret::new([id; 32]),
//! # };
//! # let Identity { name, id, secret } = identity("decode-0", 1);
//! # let target = vec!["127.0.0.1:7000".parse().unwrap()];
//! # let target = ConnectionInfo::new(name, id, secret, target).unwrap();
//! let window = NonZeroU32::new(16).unwrap();
//! let mut client = Client::new(ClientConfig {
//!     identity: identity("prefill-0", 0),
//!     target: &target, // carried over by the application
//!     lane: LaneHello::new(7, 0, 1, window)?,
//!     offer: Offer::NONE,
//!     nonce: [3; 32], // random in real life
//! });
//! let mut server = Server::new(ServerConfig {
//!     identity: identity("decode-0", 1),
//!     window,
//!     offer: Offer::NONE,
//!     nonce: [4; 32],
//! });
//!
//! // The network is perfect here: every message arrives whole and alone.
//! while client.established().is_none() {
//!     if let Some(bytes) = client.poll_transmit() {
//!         server.handle(&bytes)?;
//!     }
//!     if server.proven().is_some() {
//!         server.accept()?;
//!     }
//!     if let Some(bytes) = server.poll_transmit() {
//!         client.handle(&bytes)?;
//!     }
//! }
//! assert_eq!(server.into_established().unwrap().peer_name.as_str(), "prefill-0");
//! # Ok::<_, Box<dyn std::error::Error>>(())
//! ```

mod client;
mod config;
mod hello;
mod message;
mod offer;
mod proof;
mod server;
#[cfg(test)]
mod tests;

use alloc::vec::Vec;
use core::num::NonZeroU32;

pub use self::client::{Client, ClientConfig};
pub use self::config::{Identity, LaneError, LaneHello, NONCE_LEN, Nonce};
pub use self::message::{MessageError, MessageKind, RejectCode};
pub use self::offer::{Features, Missing, Offer, OfferError};
pub use self::proof::OwnerProof;
pub use self::server::{Server, ServerConfig};
use crate::info::{ConnectionInfo, Name, SessionId};

/// The protocol version that this build prefers.
pub const VERSION: u16 = 1;
/// The oldest protocol version that this build still supports.
pub const MIN_VERSION: u16 = 1;

/// Limits the input that one unauthenticated connection can make the caller buffer.
///
/// No message is longer than this, and `handle` consumes a message as soon as it is complete: with
/// a receive buffer of this size a handshake always advances or fails. The state machines keep a
/// peer's name (at most 255 bytes) and otherwise a few hundred bytes of fixed size.
pub const MAX_HANDSHAKE_BYTES: usize = 1024;

/// The result of a finished handshake.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Established {
    /// The peer's name.
    pub peer_name: Name,
    /// The peer's session. A client has verified it; a server has only the client's claim unless
    /// [`is_owned_by`](Self::is_owned_by) holds.
    pub peer_id: SessionId,
    /// The protocol version of the frames to come.
    pub version: u16,
    /// The features that both sides offered.
    pub features: Features,
    /// The client's number for the connection to which this lane belongs.
    pub connection: u64,
    /// Index of this lane in the connection: `lane < lanes`.
    pub lane: u16,
    /// Number of lanes that the connection will have.
    pub lanes: u16,
    /// Number of earlier streams of this lane.
    pub generation: u32,
    /// Port on which the client listens; 0 for none, and on clients.
    pub peer_port: u16,
    /// Maximum chunks that this side may keep in flight on this lane.
    pub peer_window: NonZeroU32,
    /// The proofs that the client owns `peer_id`, one per lane. Only servers have them: to a
    /// client, the server has proven itself already.
    pub owners: Vec<OwnerProof>,
}

impl Established {
    /// Returns whether the peer proved to a server, on every lane, that it knows the secret of the
    /// session `info`.
    ///
    /// Any holder of `info` knows that secret: this distinguishes a session from strangers, and
    /// from peers that were given other infos only.
    #[must_use]
    pub fn is_owned_by(&self, info: &ConnectionInfo) -> bool {
        !self.owners.is_empty()
            && self.owners.iter().all(|owner| owner.verify(info.secret()))
            && self.peer_id == info.id()
    }

    /// Adds another lane of the same connection. Any client that knows the connection's number can
    /// add a lane to it: the owner is established only by the proofs of all lanes.
    pub fn join(&mut self, lane: Self) {
        self.owners.extend(lane.owners);
    }
}

/// The reason a handshake failed. The first word of a variant names the side that must act.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HandshakeError {
    /// The peer's bytes are no handshake message. Typical cause: something that is not tcpx
    /// connected to the port, or the port belongs to something that is not tcpx.
    #[error("the peer sent no valid handshake message: {0}")]
    PeerMessageMalformed(#[from] MessageError),

    /// The peer sent a message out of order.
    #[error("the peer sent {found} where {expected} belongs")]
    PeerMessageUnexpected {
        /// The message that arrived.
        found: MessageKind,
        /// The message that was expected.
        expected: MessageKind,
    },

    /// The client supports only versions that this build does not.
    #[error(
        "the peer supports protocol versions {min} to {max}, this build {MIN_VERSION} to \
         {VERSION}: run the same release on both sides"
    )]
    PeerVersionUnsupported {
        /// The client's oldest version.
        min: u16,
        /// The client's newest version.
        max: u16,
    },

    /// The client asked for another session. Typical cause: its connection info is from an earlier
    /// process that listened on the same port.
    #[error("the peer asked for session {asked}, which is not here: its connection info is stale")]
    PeerTargetUnknown {
        /// The session that the client asked for.
        asked: SessionId,
    },

    /// The peer's tag is wrong: it does not know the secret, or the handshake was altered on the
    /// way.
    #[error("the peer does not know the secret of the connection info")]
    PeerProofWrong,

    /// A side requires a feature that the other does not offer. The peer has proven itself by then.
    /// Typical cause: the two sessions are configured differently.
    #[error("the peer is not compatible: {missing}")]
    PeerIncompatible {
        /// The missing features, by the side that does not offer them.
        missing: Missing,
    },

    /// The peer rejected the handshake.
    #[error("the peer refused the connection: {code}")]
    PeerRejected {
        /// The reason that the peer gave.
        code: RejectCode,
    },

    /// This side rejected the handshake: [`Server::reject`] was called.
    #[error("this side refused the connection: {code}")]
    CallerRejected {
        /// The reason that was given.
        code: RejectCode,
    },

    /// [`Server::accept`] was called before the client has proven itself, or twice.
    #[error("a client can be accepted once, after it has proven itself")]
    CallerAcceptedUnproven,
}

impl HandshakeError {
    /// Returns the code to send to the peer; `None` if it knows already, or did nothing wrong.
    fn reject_code(&self) -> Option<RejectCode> {
        match self {
            Self::PeerMessageMalformed(_) | Self::PeerMessageUnexpected { .. } => {
                Some(RejectCode::BadMessage)
            }
            Self::PeerVersionUnsupported { .. } => Some(RejectCode::Version),
            Self::PeerTargetUnknown { .. } => Some(RejectCode::UnknownSession),
            Self::PeerProofWrong => Some(RejectCode::BadProof),
            Self::PeerIncompatible { missing } => Some(RejectCode::Requirement(*missing)),
            Self::CallerRejected { code } => Some(*code),
            Self::PeerRejected { .. } | Self::CallerAcceptedUnproven => None,
        }
    }
}
