//! The side that opens a lane.

use alloc::vec::Vec;
use core::mem;

use super::config::{Identity, LaneHello, Nonce};
use super::hello::{ClientHello, ServerHello};
use super::message::{self, Message, MessageKind};
use super::offer::{Offer, negotiate};
use super::proof::{Label, Transcript};
use super::{Established, HandshakeError};
use crate::info::{ConnectionInfo, SessionId};
use crate::secret::Secret;

/// The parameters of a [`Client`].
#[derive(Clone, Debug)]
pub struct ClientConfig<'a> {
    /// The identity of the client.
    pub identity: Identity,
    /// The session to connect to.
    pub target: &'a ConnectionInfo,
    /// The lane to open.
    pub lane: LaneHello,
    /// The optional features that this side offers and requires.
    pub offer: Offer,
    /// Fresh random bytes.
    pub nonce: Nonce,
}

/// ```text
///                 ServerHello, tag right             ServerReady
///   AwaitHello ───────────────────────► AwaitReady ───────────────► Established
///       │           ClientProof out          │
///       │                                    │
///       └────────────┬───────────────────────┘
///                    │ anything else (Reject out), or a Reject (nothing out),
///                    │ or a ServerHello that leaves a requirement unmet (ClientProof out)
///                    ▼
///                  Failed
/// ```
#[derive(Clone, Debug)]
enum State {
    AwaitHello,
    /// The server has proven itself; the result is valid once it accepts the client's proof.
    AwaitReady(Established),
    Established(Established),
    Failed(HandshakeError),
}

/// The client's half of one lane's handshake; see [the module](super) for how to drive it.
#[derive(Clone, Debug)]
pub struct Client {
    target: SessionId,
    /// The server's secret: both sides must know it.
    target_secret: Secret,
    /// The client's own secret, for the owner tag.
    own_secret: Secret,
    lane: LaneHello,
    offer: Offer,
    transcript: Transcript,
    /// Complete messages that `poll_transmit` has not returned yet.
    out: Vec<u8>,
    state: State,
}

impl Client {
    /// Starts a handshake; the ClientHello is ready to be sent.
    #[must_use]
    pub fn new(config: ClientConfig<'_>) -> Self {
        let ClientConfig {
            identity,
            target,
            lane,
            offer,
            nonce,
        } = config;
        let hello = ClientHello {
            id: identity.id,
            target: target.id(),
            lane,
            offer,
            name: identity.name,
        };
        let out = hello.encode(&nonce);
        let mut transcript = Transcript::default();
        transcript.add(&out);
        Self {
            target: target.id(),
            target_secret: target.secret().clone(),
            own_secret: identity.secret,
            lane,
            offer,
            transcript,
            out,
            state: State::AwaitHello,
        }
    }

    /// Processes received bytes and returns how many were consumed: complete messages only.
    ///
    /// The caller keeps the rest and passes it again together with the bytes that follow. Once the
    /// lane is established nothing is consumed: the rest are frames. An error is final; every later
    /// call returns it again.
    pub fn handle(&mut self, input: &[u8]) -> Result<usize, HandshakeError> {
        let mut consumed = 0;
        loop {
            let expected = match &self.state {
                State::AwaitHello => MessageKind::ServerHello,
                State::AwaitReady(_) => MessageKind::ServerReady,
                State::Established(_) => return Ok(consumed),
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

    /// Returns the result once the server has accepted the proof; `None` before and after a
    /// failure.
    #[must_use]
    pub fn established(&self) -> Option<&Established> {
        match &self.state {
            State::Established(established) => Some(established),
            _ => None,
        }
    }

    /// Returns the same as [`established`](Self::established), by value.
    #[must_use]
    pub fn into_established(self) -> Option<Established> {
        match self.state {
            State::Established(established) => Some(established),
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
            (State::AwaitReady(established), _) => Ok(State::Established(established.clone())),
            _ => self.server_hello(message),
        }
    }

    fn server_hello(&mut self, message: &Message<'_>) -> Result<State, HandshakeError> {
        let (before_tag, tag) = message.split_tag()?;
        self.transcript.add(before_tag);
        if !self
            .transcript
            .verify(&self.target_secret, Label::Server, tag)
        {
            return Err(HandshakeError::PeerProofWrong);
        }
        self.transcript.add(tag);
        // Fields come after the tag: fields from an unauthenticated server are never read.
        let hello = ServerHello::decode(message.body())?;

        let owner = self.transcript.tag(&self.own_secret, Label::Owner);
        let mut proof = message::proof_before_tag(&owner);
        self.transcript.add(&proof);
        proof.extend(self.transcript.tag(&self.target_secret, Label::Client));
        self.out.extend(proof);

        // The proof is sent in either case: only a server that has authenticated its peer can
        // report which peer is incompatible.
        let features = negotiate(self.offer, hello.offer)
            .map_err(|missing| HandshakeError::PeerIncompatible { missing })?;
        Ok(State::AwaitReady(Established {
            peer_name: hello.name,
            peer_id: self.target,
            version: hello.version,
            features,
            connection: self.lane.connection,
            lane: self.lane.lane,
            lanes: self.lane.lanes,
            generation: self.lane.generation,
            peer_port: 0,
            peer_window: hello.window,
            owners: Vec::new(),
        }))
    }

    fn fail(&mut self, error: HandshakeError) -> HandshakeError {
        if !matches!(error, HandshakeError::PeerIncompatible { .. }) {
            // Replaces unsent messages, which are of no use to a peer that broke the protocol.
            self.out = error.reject_code().map(message::reject).unwrap_or_default();
        }
        self.state = State::Failed(error);
        error
    }
}
