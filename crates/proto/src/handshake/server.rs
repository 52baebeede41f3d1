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

/// What a [`Server`] is made from.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// Who listens.
    pub identity: Identity,
    /// How many chunks the client may keep in flight on this lane.
    pub window: NonZeroU32,
    /// What this side offers and requires of the optional parts.
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
/// In Proven and Accepted no message is expected: input is left alone, it belongs to the frames.
#[derive(Clone, Debug)]
enum State {
    AwaitHello,
    /// What the client claims; counts once it is proven. `owners` is still empty.
    AwaitProof(Established),
    /// The client knows the secret; the caller decides whether there is room for it.
    Proven(Established),
    Accepted(Established),
    Failed(HandshakeError),
}

/// The server's half of one lane's handshake; see [the module](super) for how to drive it.
///
/// It goes on by itself until the client has proven itself. Then [`proven`](Self::proven) tells
/// who it is, and the caller calls [`accept`](Self::accept) or [`reject`](Self::reject).
#[derive(Clone, Debug)]
pub struct Server {
    identity: Identity,
    window: NonZeroU32,
    offer: Offer,
    /// Requirements that are not met, known from the ClientHello on: such a client is not accepted.
    missing: Option<Missing>,
    nonce: Nonce,
    transcript: Transcript,
    /// Whole messages that `poll_transmit` has not handed out yet.
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

    /// Takes what was received and returns how much of it was consumed: whole messages only.
    ///
    /// The caller keeps what was not consumed and passes it again with more behind it. Once the
    /// client has proven itself nothing is consumed: what is left are frames. An error is final;
    /// it is returned again by every later call. The client is told about it: send what
    /// [`poll_transmit`](Self::poll_transmit) has before closing.
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

    /// The next bytes to send, if any; an error may leave some that tell the peer about it.
    pub fn poll_transmit(&mut self) -> Option<Vec<u8>> {
        let out = mem::take(&mut self.out);
        (!out.is_empty()).then_some(out)
    }

    /// The client that has proven itself and waits for [`accept`](Self::accept) or
    /// [`reject`](Self::reject); `None` in every other state. Its features are empty
    /// if a requirement is not met.
    #[must_use]
    pub fn proven(&self) -> Option<&Established> {
        match &self.state {
            State::Proven(established) => Some(established),
            _ => None,
        }
    }

    /// Lets the proven client in; frames may follow.
    ///
    /// Fails with [`PeerIncompatible`](HandshakeError::PeerIncompatible) when a requirement of
    /// either side is not met; the client is turned away then. Fails and changes nothing unless the
    /// client is [`proven`](Self::proven).
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

    /// Turns the client away, at any time before [`accept`](Self::accept); nothing happens after
    /// that or after a failure.
    pub fn reject(&mut self, code: RejectCode) {
        match &self.state {
            State::AwaitHello | State::AwaitProof(_) | State::Proven(_) => {
                self.fail(HandshakeError::CallerRejected { code });
            }
            State::Accepted(_) | State::Failed(_) => {}
        }
    }

    /// What was agreed on, once the client has been accepted; `None` before and after a failure.
    #[must_use]
    pub fn established(&self) -> Option<&Established> {
        match &self.state {
            State::Accepted(established) => Some(established),
            _ => None,
        }
    }

    /// Like [`established`](Self::established), by value.
    #[must_use]
    pub fn into_established(self) -> Option<Established> {
        match self.state {
            State::Accepted(established) => Some(established),
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

        // A client that does not fit is told so once it has proven itself, and not before.
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
        // In place of what was not sent yet: that was written for a peer that behaves.
        self.out = error.reject_code().map(message::reject).unwrap_or_default();
        self.state = State::Failed(error);
        error
    }
}
