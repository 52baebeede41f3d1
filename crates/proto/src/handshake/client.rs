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

/// What a [`Client`] is made from.
#[derive(Clone, Debug)]
pub struct ClientConfig<'a> {
    /// Who opens the lane.
    pub identity: Identity,
    /// The session to which it is opened.
    pub target: &'a ConnectionInfo,
    /// Which lane it is.
    pub lane: LaneHello,
    /// What this side offers and requires of the optional parts.
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
    /// The server has proven itself; what was agreed on counts once it takes our proof.
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
    /// Our own secret, for the owner tag.
    own_secret: Secret,
    lane: LaneHello,
    offer: Offer,
    transcript: Transcript,
    /// Whole messages that `poll_transmit` has not handed out yet.
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

    /// Takes what was received and returns how much of it was consumed: whole messages only.
    ///
    /// The caller keeps what was not consumed and passes it again with more behind it. Once the
    /// lane is established nothing is consumed: what is left are frames. An error is final; it is
    /// returned again by every later call.
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

    /// The next bytes to send, if any; an error may leave some that tell the peer about it.
    pub fn poll_transmit(&mut self) -> Option<Vec<u8>> {
        let out = mem::take(&mut self.out);
        (!out.is_empty()).then_some(out)
    }

    /// What was agreed on, once the server has taken the proof; `None` before and after a failure.
    #[must_use]
    pub fn established(&self) -> Option<&Established> {
        match &self.state {
            State::Established(established) => Some(established),
            _ => None,
        }
    }

    /// Like [`established`](Self::established), by value.
    #[must_use]
    pub fn into_established(self) -> Option<Established> {
        match self.state {
            State::Established(established) => Some(established),
            _ => None,
        }
    }

    /// Takes one message and returns its length; `None` while it is not whole.
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
        // Fields come after the tag: what a stranger writes into them is never looked at.
        let hello = ServerHello::decode(message.body())?;

        let owner = self.transcript.tag(&self.own_secret, Label::Owner);
        let mut proof = message::proof_before_tag(&owner);
        self.transcript.add(&proof);
        proof.extend(self.transcript.tag(&self.target_secret, Label::Client));
        self.out.extend(proof);

        // The proof is sent in either case: only a server that knows who has proven itself can tell
        // its own user which peer does not fit.
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
            // In place of what was not sent yet: that was written for a peer that behaves.
            self.out = error.reject_code().map(message::reject).unwrap_or_default();
        }
        self.state = State::Failed(error);
        error
    }
}
