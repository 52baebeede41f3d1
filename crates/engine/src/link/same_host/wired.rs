//! The Unix socket between two neighbours, and the properties of the other end.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, OnceLock};

use tcpx_net::neighbour::Nonce;
use tcpx_net::{Gates, Neighbour, Wire};
use tcpx_proto::neighbour::Message;

use super::GATES;
use super::grants::Grants;
use crate::link::Control;
use crate::sync::{Mutex, Rank};

/// Limits the messages queued for a neighbour that does not read: more than all gates need.
const MAX_WAITING: usize = 4 * GATES;

/// A wire to the neighbour.
pub(super) struct Wired {
    pub(super) line: Arc<Line>,
    pub(super) neighbour: Arc<Neighbour>,
    /// Grants to the neighbour.
    pub(super) grants: Arc<Grants>,
    /// Bytes that the neighbour must read to prove access.
    pub(super) nonce: Nonce,
    /// The neighbour's gates.
    pub(super) gates: OnceLock<Arc<Gates>>,
}

impl Wired {
    /// Identifies the process at the other end.
    pub(super) fn new(peer: &str, wire: Wire, control: &Arc<dyn Control>) -> Result<Self, String> {
        let neighbour = Neighbour::of(&wire).map_err(|error| error.to_string())?;
        let theirs = neighbour.credentials();
        let ours = tcpx_net::neighbour::own_user();
        if theirs.uid != ours {
            return Err(format!(
                "it runs as user {}, this process as user {ours}: run both as the same user",
                theirs.uid
            ));
        }
        let neighbour = Arc::new(neighbour);
        let failed = |error: std::io::Error| error.to_string();
        let line = Arc::new(Line {
            peer: peer.to_owned(),
            wire,
            waiting: Mutex::new(Rank::Leaf, VecDeque::new()),
            control: Arc::clone(control),
        });
        Ok(Self {
            grants: Arc::new(Grants::new(&neighbour, &line).map_err(failed)?),
            line,
            neighbour,
            nonce: Nonce::new().map_err(failed)?,
            gates: OnceLock::new(),
        })
    }
}

/// A wire, and the messages that are queued until there is room on it.
pub(super) struct Line {
    /// Name of the peer at the other end.
    pub(super) peer: String,
    pub(super) wire: Wire,
    waiting: Mutex<VecDeque<(Vec<u8>, Vec<OwnedFd>)>>,
    control: Arc<dyn Control>,
}

impl Line {
    /// Sends a message, now or as soon as there is room. Never waits.
    ///
    /// # Errors
    /// The neighbour has closed its socket, or does not read.
    pub(super) fn send(&self, message: &Message<'_>, fds: Vec<OwnedFd>) -> Result<(), String> {
        let mut bytes = Vec::new();
        message.encode(&mut bytes);
        let mut waiting = self.waiting.lock();
        if waiting.len() >= MAX_WAITING {
            return Err("it does not read its messages".to_owned());
        }
        let is_first = waiting.is_empty();
        waiting.push_back((bytes, fds));
        if is_first {
            self.send_waiting(&mut waiting)?;
        }
        let is_left = !waiting.is_empty();
        drop(waiting);
        if is_first && is_left {
            self.control.neighbour_waits();
        }
        Ok(())
    }

    /// Sends queued messages, as far as there is room. Returns whether some are left.
    ///
    /// # Errors
    /// The neighbour has closed its socket.
    pub(super) fn flush(&self) -> Result<bool, String> {
        let mut waiting = self.waiting.lock();
        self.send_waiting(&mut waiting)?;
        Ok(!waiting.is_empty())
    }

    fn send_waiting(&self, waiting: &mut VecDeque<(Vec<u8>, Vec<OwnedFd>)>) -> Result<(), String> {
        while let Some((bytes, fds)) = waiting.front() {
            let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
            match self.wire.send(bytes, &fds) {
                Ok(true) => waiting.pop_front(),
                Ok(false) => break,
                Err(error) => {
                    waiting.clear();
                    return Err(error.to_string());
                }
            };
        }
        Ok(())
    }
}
