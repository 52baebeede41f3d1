//! Messages between two sessions on one host: mutual proofs, then requests for regions.
//!
//! Only the control thread receives messages. An invalid message costs only the direct path: the
//! connection continues with lanes.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use tcpx_net::neighbour::{self, Received};
use tcpx_net::{Gates, Wire};
use tcpx_proto::info::{Secret, SessionId};
use tcpx_proto::neighbour::{MAX_MESSAGE_BYTES, Message, Side, tag, verify};

use super::grants::NotGranted;
use super::regions::{Access, Opened};
use super::wired::Wired;
use super::{GATES, PATIENCE, SameHost};
use crate::config::SameHostKind;
use crate::error::Error;
use crate::log::limited;
use crate::memory::Refusal;

/// Limits the messages handled in one turn.
const MESSAGES_A_TURN: usize = 64;

/// A verified first message of a neighbour.
pub(crate) struct Join {
    pub(crate) client: SessionId,
    pub(crate) connection: u64,
    nonce_at: u64,
    gates: OwnedFd,
    wire: Wire,
}

impl Join {
    /// Receives the first message of a wire. Returns the wire if the message has not arrived yet.
    ///
    /// # Errors
    /// The reason for which the neighbour is refused.
    pub(crate) fn receive(wire: Wire, secret: &Secret) -> Result<Result<Self, Wire>, String> {
        let mut bytes = [0; MAX_MESSAGE_BYTES];
        let received = wire.receive(&mut bytes);
        let (len, fds) = match received.map_err(|error| error.to_string())? {
            Received::Nothing => return Ok(Err(wire)),
            Received::Closed => return Err("it has closed its socket".into()),
            Received::Message { len, fds } => (len, fds),
        };
        let message = Message::decode(&bytes[..len]).map_err(|error| error.to_string())?;
        let Message::Join {
            client,
            connection,
            tag,
            nonce_at,
        } = message
        else {
            return Err("it does not identify itself".into());
        };
        if !verify(secret, Side::Client, client, connection, &tag) {
            return Err("it does not know this session's secret".into());
        }
        Ok(Ok(Self {
            client,
            connection,
            nonce_at,
            gates: only(fds)?,
            wire,
        }))
    }
}

impl Join {
    /// Removes the wire from a poller.
    pub(crate) fn unwatch(&self, poller: &tcpx_net::Poller) {
        poller.remove(&self.wire);
    }
}

/// Sends a message along with the gates.
fn send_with_gates(wired: &Wired, message: &Message<'_>) -> Result<(), String> {
    let gates = wired.grants.gates().descriptor().try_clone_to_owned();
    let gates = gates.map_err(|error| error.to_string())?;
    wired.line.send(message, vec![gates])
}

/// Returns the only descriptor of a message.
fn only(fds: Vec<OwnedFd>) -> Result<OwnedFd, String> {
    let [fd] = <[OwnedFd; 1]>::try_from(fds)
        .map_err(|fds| format!("{} descriptors arrived instead of one", fds.len()))?;
    Ok(fd)
}

impl SameHost {
    /// Connects to the peer's socket, as the side that made the connection.
    pub(crate) fn knock(&self, door: &str, own: SessionId, connection: u64, secret: &Secret) {
        let outcome = Wire::connect(door)
            .map_err(|error| format!("cannot connect to its socket: {error}"))
            .and_then(|wire| self.take_wire(wire))
            .and_then(|wired| {
                let tag = tag(secret, Side::Client, own, connection);
                let message = Message::Join {
                    client: own,
                    connection,
                    tag,
                    nonce_at: wired.nonce.address(),
                };
                send_with_gates(wired, &message)
            });
        if let Err(reason) = outcome {
            self.left(&reason);
        }
    }

    /// Accepts a peer that connected to our socket, as the side that accepted the connection.
    pub(crate) fn admit(&self, join: Join, secret: &Secret) {
        let Join {
            client,
            connection,
            nonce_at,
            gates,
            wire,
        } = join;
        let outcome = self.take_wire(wire).and_then(|wired| {
            let tag = tag(secret, Side::Server, client, connection);
            let message = Message::Welcome {
                tag,
                nonce_at: wired.nonce.address(),
            };
            send_with_gates(wired, &message)?;
            self.look_over(wired, nonce_at, gates)
        });
        if let Err(reason) = outcome {
            self.left(&reason);
        }
    }

    /// Returns the socket to watch, if there is one.
    pub(crate) fn wire(&self) -> Option<BorrowedFd<'_>> {
        self.wired.get().map(|wired| wired.line.wire.as_fd())
    }

    fn take_wire(&self, wire: Wire) -> Result<&Wired, String> {
        let wired = Wired::new(self.above.name(), wire, &self.context.control)?;
        // Revocations consider the grants from here on.
        self.context.add_grants(&wired.grants);
        if self.wired.set(wired).is_err() {
            return Err("it connected twice".into());
        }
        Ok(self.wired.get().expect("just set"))
    }

    /// Reads the peer's nonce, and reports it to prove access.
    fn look_over(&self, wired: &Wired, nonce_at: u64, gates: OwnedFd) -> Result<(), String> {
        let gates = Gates::open(gates, GATES).map_err(|error| error.to_string())?;
        let _ = wired.gates.set(Arc::new(gates));
        match wired.neighbour.read_nonce(nonce_at) {
            Ok(nonce) => wired.line.send(&Message::Found { nonce }, Vec::new()),
            Err(error @ neighbour::Error::Gone) => Err(error.to_string()),
            Err(error) => {
                let reason = error.to_string();
                let told = Message::Unable {
                    reason: reason.as_bytes(),
                };
                // The peer may still be able to access our memory.
                self.decide(Err(&reason));
                wired.line.send(&told, Vec::new())
            }
        }
    }

    /// Sends queued messages. Returns whether some are left.
    pub(crate) fn flush(&self) -> bool {
        let flushed = self
            .wired
            .get()
            .map_or(Ok(false), |wired| wired.line.flush());
        flushed.unwrap_or_else(|reason| {
            self.left(&reason);
            false
        })
    }

    /// Handles messages that the peer has sent. Returns false when no more will follow.
    ///
    /// `verify_server` checks whether the tag of a Welcome is from the session that we connected
    /// to.
    pub(crate) fn hear(&self, verify_server: impl Fn(&[u8; 32]) -> bool) -> bool {
        let Some(wired) = self.wired.get() else {
            return false;
        };
        let mut bytes = vec![0; MAX_MESSAGE_BYTES];
        for _ in 0..MESSAGES_A_TURN {
            let outcome = match wired.line.wire.receive(&mut bytes) {
                Ok(Received::Nothing) => return true,
                Ok(Received::Closed) => Err("it has closed its socket".to_owned()),
                Ok(Received::Message { len, fds }) => Message::decode(&bytes[..len])
                    .map_err(|error| error.to_string())
                    .and_then(|message| self.handle(wired, message, fds, &verify_server)),
                Err(error) => Err(error.to_string()),
            };
            if let Err(reason) = outcome {
                limited!(
                    DEBUG,
                    peer = self.above.name(),
                    reason,
                    "the direct path to this peer has ended"
                );
                self.left(&reason);
                return false;
            }
        }
        true
    }

    /// Ends the use of the wire: closes all gates, and leaves pending runs to lanes.
    pub(super) fn left(&self, reason: &str) {
        self.close_gates();
        if self.is_deciding() && self.context.config.same_host() == SameHostKind::Require {
            // Usually the connection is about to end, with its own reason.
            // Otherwise waiting runs fail soon.
            let _ = self.lost.set((reason.into(), Instant::now() + PATIENCE));
            return;
        }
        self.is_over.store(true, Ordering::Release);
        self.decide(Err(reason));
        self.abandon();
    }

    fn handle(
        &self,
        wired: &Wired,
        message: Message<'_>,
        fds: Vec<OwnedFd>,
        verify_server: &impl Fn(&[u8; 32]) -> bool,
    ) -> Result<(), String> {
        match message {
            Message::Welcome { tag, nonce_at } => {
                if wired.gates.get().is_some() || !verify_server(&tag) {
                    return Err("it is not the expected session".into());
                }
                self.look_over(wired, nonce_at, only(fds)?)
            }
            Message::Found { nonce } => {
                if nonce != *wired.nonce.bytes() {
                    return Err("it has read the memory of another process".into());
                }
                self.is_proven.store(true, Ordering::Release);
                wired.line.send(&Message::Proven, Vec::new())
            }
            Message::Unable { reason } => {
                let reason = String::from_utf8_lossy(reason);
                limited!(
                    EACH_PEER,
                    INFO,
                    peer = self.above.name(),
                    %reason,
                    "this peer is on this host, but cannot copy this session's memory directly"
                );
                Ok(())
            }
            Message::Proven if wired.gates.get().is_some() => {
                self.decide(Ok(()));
                Ok(())
            }
            Message::Open { request, key } if self.is_proven.load(Ordering::Acquire) => {
                self.open(wired, request, key)
            }
            Message::Opened {
                request,
                gate,
                address,
                len,
                export,
            } => self.opened(wired, request, gate, (address, len), (export, fds)),
            Message::Refused {
                request,
                is_final,
                reason,
            } => {
                let reason = String::from_utf8_lossy(reason);
                // A region that is not registered now may be registered later.
                let access = (!is_final).then(|| Access::Lanes(reason.as_ref().into()));
                self.answered(request, access);
                Ok(())
            }
            Message::Revoked { gate } => {
                self.regions.forget(gate as usize);
                Ok(())
            }
            Message::Forgotten { gate } => {
                wired.grants.forgotten(gate as usize);
                Ok(())
            }
            Message::Join { .. } | Message::Proven | Message::Open { .. } => {
                Err("it sent an unexpected message".into())
            }
        }
    }

    /// Opens a local region for the peer.
    fn open(
        &self,
        wired: &Wired,
        request: u32,
        key: tcpx_proto::descriptor::RegionKey,
    ) -> Result<(), String> {
        let refuse = |is_final, reason: &str| {
            let reason = reason.as_bytes();
            let refused = Message::Refused {
                request,
                is_final,
                reason,
            };
            wired.line.send(&refused, Vec::new())
        };
        let Some(memory) = self.context.registry.find(&key) else {
            return refuse(true, "the region is not registered, or its key is wrong");
        };
        let exported = match self.export(wired, &memory) {
            Ok(exported) => exported,
            Err(reason) => return refuse(false, &reason),
        };
        let gate = match wired.grants.grant(&memory) {
            Ok(gate) => gate,
            Err(NotGranted::Revoked) => return refuse(true, "the region was deregistered"),
            Err(NotGranted::Full) => return refuse(false, "too many regions are open"),
            Err(NotGranted::Ended) => return Ok(()),
        };
        let (export, fds) = exported;
        let opened = Message::Opened {
            request,
            gate: gate as u32,
            address: memory.span.address() as u64,
            len: memory.span.len() as u64,
            export: &export,
        };
        wired.line.send(&opened, fds)
    }

    /// Handles the answer that a region of the peer is open.
    fn opened(
        &self,
        wired: &Wired,
        request: u32,
        gate: u32,
        (address, len): (u64, u64),
        (export, fds): (&[u8], Vec<OwnedFd>),
    ) -> Result<(), String> {
        let gate = gate as usize;
        let gates = wired.gates.get().filter(|gates| gate < gates.count());
        let gates = gates.ok_or("it names a gate that does not exist")?;
        if self.regions.asked(request).is_none() || address.checked_add(len).is_none() {
            return Err("it opens a region that was not requested".into());
        }
        let mapping = self.mapping(wired, (address, len), export, fds);
        let line = &wired.line;
        let access = match mapping {
            Ok(device) => {
                let opened = Opened::new(gate, gates, line, (address, len), device);
                Access::Open(Arc::new(opened))
            }
            Err(reason) => {
                drop(Opened::new(gate, gates, line, (address, len), None));
                Access::Lanes(reason.into())
            }
        };
        self.answered(request, Some(access));
        Ok(())
    }

    /// Continues the runs that have waited for an answer.
    /// Without access, the region is not registered.
    fn answered(&self, request: u32, access: Option<Access>) {
        let unknown = match access {
            Some(_) => None,
            None => self.regions.asked(request),
        };
        for run in self.regions.answered(request, access) {
            let index = unknown.and_then(|key| run.plan.keys().iter().position(|k| *k == key));
            if let Some(index) = index {
                let refusal = Refusal::UnknownRegion { index };
                run.fail_now(Error::PeerRefused {
                    peer: self.above.name().to_owned(),
                    status: refusal.status(),
                    text: refusal.to_string(),
                });
            } else if !self.submit(&run) {
                self.carry_by_lanes(&run);
            }
        }
    }
}
