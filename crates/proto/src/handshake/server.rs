//! The side that listens.

use alloc::vec;
use alloc::vec::Vec;
use core::mem;
use core::num::NonZeroU32;

use super::config::{Identity, Nonce};
use super::hello::{ClientHello, ServerHello};
use super::message::{self, Message, MessageKind, RejectCode};
use super::offer::{Features, Missing, Offer, negotiate};
use super::proof::{Label, OwnerProof, TAG_LEN, Transcript};
use super::{Established, HandshakeError};

/// The parameters of a [`Server`].
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// The identity of the server.
    pub identity: Identity,
    /// Maximum chunks that the client may keep in flight on this lane.
    pub window: NonZeroU32,
    /// The optional features that this side offers and requires.
    pub offer: Offer,
    /// Fresh random bytes.
    pub nonce: Nonce,
}

/// ```text
///                ClientHello              ClientProof, tag right           accept()
///   AwaitHello ─────────────► AwaitProof ────────────────────────► Proven ───────────► Accepted
///       │     ServerHello out      │                                  │  ServerReady out
///       │                          │                                  │
///       ├──────────────────────────┴──────────────────────────────────┘
///       │ reject(), or any other message (Reject out), or a Reject (nothing out),
///       │ or accept() while a requirement is not met (Reject out)
///       ▼
///     Failed
/// ```
///
/// In Proven and Accepted no message is expected: further input is not consumed, it belongs to the
/// frames.
#[derive(Clone, Debug)]
enum State {
    AwaitHello,
    /// The client's claims, valid once they are proven. `owners` is still empty.
    AwaitProof(Established),
    /// The client knows the secret; the caller decides whether to accept it.
    Proven(Established),
    Accepted(Established),
    Failed(HandshakeError),
}

/// The server's half of one lane's handshake; see [the module](super) for how to drive it.
///
/// The handshake advances by itself until the client has proven itself. Then
/// [`proven`](Self::proven) returns the client's identity, and the caller calls
/// [`accept`](Self::accept) or [`reject`](Self::reject).
#[derive(Clone, Debug)]
pub struct Server {
    identity: Identity,
    window: NonZeroU32,
    offer: Offer,
    /// Requirements not met, known from the ClientHello on: such a client is not accepted.
    missing: Option<Missing>,
    nonce: Nonce,
    transcript: Transcript,
    /// Complete messages that `poll_transmit` has not returned yet.
    out: Vec<u8>,
    state: State,
}

impl Server {
    /// Starts to wait for a client.
    #[must_use]
    pub fn new(config: ServerConfig) -> Self {
        let ServerConfig {
            identity,
            window,
            offer,
            nonce,
        } = config;
        Self {
            identity,
            window,
            offer,
            missing: None,
            nonce,
            transcript: Transcript::default(),
            out: Vec::new(),
            state: State::AwaitHello,
        }
    }

    /// Processes received bytes and returns how many were consumed: complete messages only.
    ///
    /// The caller keeps the rest and passes it again together with the bytes that follow. Once the
    /// client has proven itself nothing is consumed: the rest are frames. An error is final; every
    /// later call returns it again. The client is told about it: send the output of
    /// [`poll_transmit`](Self::poll_transmit) before closing.
    pub fn handle(&mut self, input: &[u8]) -> Result<usize, HandshakeError> {
        let mut consumed = 0;
        loop {
            let expected = match &self.state {
                State::AwaitHello => MessageKind::ClientHello,
                State::AwaitProof(_) => MessageKind::ClientProof,
                State::Proven(_) | State::Accepted(_) => return Ok(consumed),
                State::Failed(error) => return Err(*error),
            };
            match self.advance(&input[consumed..], expected) {
                Ok(Some(len)) => consumed += len,
                Ok(None) => return Ok(consumed),
                Err(error) => return Err(self.fail(error)),
            }
        }
    }

    /// Returns the next bytes to send, if any; after an error they may tell the peer about it.
    pub fn poll_transmit(&mut self) -> Option<Vec<u8>> {
        let out = mem::take(&mut self.out);
        (!out.is_empty()).then_some(out)
    }

    /// Returns the client that has proven itself and waits for [`accept`](Self::accept) or
    /// [`reject`](Self::reject); `None` in every other state. Its features are empty if a
    /// requirement is not met.
    #[must_use]
    pub fn proven(&self) -> Option<&Established> {
        match &self.state {
            State::Proven(established) => Some(established),
            _ => None,
        }
    }

    /// Accepts the proven client; frames may follow.
    ///
    /// Fails with [`PeerIncompatible`](HandshakeError::PeerIncompatible) if a requirement of either
    /// side is not met, and rejects the client. Fails and changes nothing unless the client is
    /// [`proven`](Self::proven).
    pub fn accept(&mut self) -> Result<(), HandshakeError> {
        let State::Proven(established) = &self.state else {
            return Err(HandshakeError::CallerAcceptedUnproven);
        };
        if let Some(missing) = self.missing {
            return Err(self.fail(HandshakeError::PeerIncompatible { missing }));
        }
        self.state = State::Accepted(established.clone());
        self.out.extend(message::ready());
        Ok(())
    }

    /// Rejects the client, at any time before [`accept`](Self::accept); does nothing after that or
    /// after a failure.
    pub fn reject(&mut self, code: RejectCode) {
        match &self.state {
            State::AwaitHello | State::AwaitProof(_) | State::Proven(_) => {
                self.fail(HandshakeError::CallerRejected { code });
            }
            State::Accepted(_) | State::Failed(_) => {}
        }
    }

    /// Returns the result once the client has been accepted; `None` before and after a failure.
    #[must_use]
    pub fn established(&self) -> Option<&Established> {
        match &self.state {
            State::Accepted(established) => Some(established),
            _ => None,
        }
    }

    /// Returns the same as [`established`](Self::established), by value.
    #[must_use]
    pub fn into_established(self) -> Option<Established> {
        match self.state {
            State::Accepted(established) => Some(established),
            _ => None,
        }
    }

    /// Processes one message and returns its length; `None` while it is incomplete.
    fn advance(
        &mut self,
        input: &[u8],
        expected: MessageKind,
    ) -> Result<Option<usize>, HandshakeError> {
        let Some(message) = Message::next(input, expected)? else {
            return Ok(None);
        };
        self.state = self.step(&message)?;
        Ok(Some(message.bytes.len()))
    }

    fn step(&mut self, message: &Message<'_>) -> Result<State, HandshakeError> {
        match (&self.state, message.kind) {
            (_, MessageKind::Reject) => Err(HandshakeError::PeerRejected {
                code: message.reject_code()?,
            }),
            (State::AwaitProof(claimed), _) => {
                let claimed = claimed.clone();
                self.client_proof(message, claimed)
            }
            _ => self.client_hello(message),
        }
    }

    fn client_hello(&mut self, message: &Message<'_>) -> Result<State, HandshakeError> {
        let (version, client) = ClientHello::decode(message.body())?;
        if client.target != self.identity.id {
            return Err(HandshakeError::PeerTargetUnknown {
                asked: client.target,
            });
        }
        self.transcript.add(message.bytes);

        // An incompatible client is told so once it has proven itself, and not before.
        let negotiated = negotiate(client.offer, self.offer);
        self.missing = negotiated.err();
        let features = negotiated.unwrap_or(Features::NONE);
        let name = self.identity.name.clone();
        let mut hello = ServerHello {
            version,
            offer: self.offer,
            window: self.window,
            name,
        }
        .encode_before_tag(&self.nonce);
        self.transcript.add(&hello);
        let tag = self.transcript.tag(&self.identity.secret, Label::Server);
        self.transcript.add(&tag);
        hello.extend(tag);
        self.out.extend(hello);

        Ok(State::AwaitProof(Established {
            peer_name: client.name,
            peer_id: client.id,
            version,
            features,
            connection: client.lane.connection,
            lane: client.lane.lane,
            lanes: client.lane.lanes,
            generation: client.lane.generation,
            peer_port: client.lane.port,
            peer_window: client.lane.window,
            owners: Vec::new(),
        }))
    }

    fn client_proof(
        &mut self,
        message: &Message<'_>,
        claimed: Established,
    ) -> Result<State, HandshakeError> {
        // The owner tag covers both hellos and is itself covered by the client's tag.
        let transcript = self.transcript.hash();
        let (before_tag, tag) = message.split_tag()?;
        self.transcript.add(before_tag);
        if !self
            .transcript
            .verify(&self.identity.secret, Label::Client, tag)
        {
            return Err(HandshakeError::PeerProofWrong);
        }
        let owner: [u8; TAG_LEN] = message
            .body()
            .array()
            .map_err(message::MessageError::from)?;
        let owners = vec![OwnerProof {
            transcript,
            tag: owner,
        }];
        Ok(State::Proven(Established { owners, ..claimed }))
    }

    fn fail(&mut self, error: HandshakeError) -> HandshakeError {
        // Replaces unsent messages, which are of no use to a peer that broke the protocol.
        self.out = error.reject_code().map(message::reject).unwrap_or_default();
        self.state = State::Failed(error);
        error
    }
}
