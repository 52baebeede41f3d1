//! Sessions on this host: how they find each other beside their connections.
//!
//! Each session has a Unix socket (its door), named after its identity. The side that has made a
//! connection connects to it and names the connection; both sides then check whether they can
//! access each other's memory ([`crate::link::same_host`]).

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tcpx_net::{Door, Wire};
use tcpx_proto::handshake::Established;
use tcpx_proto::info::{ConnectionInfo, SessionId};
use tcpx_proto::neighbour::{Side, verify};

use super::listen::ConnectionKey;
use super::{ControlLoop, Tokens};
use crate::link::same_host::{Join, SameHost};
use crate::log::limited;

/// Limits the wires that have not identified themselves,
/// or whose connection is not established yet.
const MAX_STRANGERS: usize = 64;

/// Limits how long these may take.
const STRANGERS_TIME: Duration = Duration::from_secs(1);

/// Limits the wires accepted per turn.
const ACCEPTS_A_TURN: usize = 16;

#[derive(Default)]
pub(super) struct Neighbours {
    door: Option<(u64, Door)>,
    strangers: Tokens<(Wire, Instant)>,
    /// Neighbours whose connection is not established yet.
    early: HashMap<ConnectionKey, (Join, Instant)>,
    /// Connections whose other side is expected at the door.
    awaited: HashMap<ConnectionKey, Arc<SameHost>>,
    /// Known neighbours, by the token of the wire.
    known: Tokens<Known>,
    /// Neighbours without a wire, until the decision about direct copies.
    lost: Vec<Arc<SameHost>>,
}

struct Known {
    same_host: Arc<SameHost>,
    /// The server that we connected to, and our connection;
    /// `None` if the neighbour connected to us.
    server: Option<(ConnectionInfo, u64)>,
}

/// Returns the name of a session's door.
fn door_of(session: SessionId) -> String {
    format!("tcpx-{session}")
}

impl Neighbours {
    pub(super) fn has(&self, token: u64) -> bool {
        self.is_door(token)
            || self.strangers.contains_key(&token)
            || self.known.contains_key(&token)
    }

    /// Returns whether neighbours can connect.
    pub(super) fn has_door(&self) -> bool {
        self.door.is_some()
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        let strangers = self.strangers.values().map(|stranger| stranger.1);
        let early = self.early.values().map(|early| early.1);
        let awaited = self.awaited.values().map(|awaited| awaited.deadline());
        let deciding = self.known.values().map(|known| &known.same_host);
        let deciding = deciding
            .chain(&self.lost)
            .filter(|known| known.is_deciding());
        let deciding = deciding.map(|known| known.deadline());
        strangers.chain(early).chain(awaited).chain(deciding).min()
    }

    fn is_door(&self, token: u64) -> bool {
        self.door.as_ref().is_some_and(|door| door.0 == token)
    }
}

impl ControlLoop {
    /// Opens the session's door.
    pub(super) fn open_door(&mut self) {
        let token = self.token();
        let opened = Door::open_as(door_of(self.core.id()))
            .and_then(|door| self.poller.add_armed(&door, token).map(|()| door));
        match opened {
            Ok(door) => self.neighbours.door = Some((token, door)),
            Err(error) => {
                limited!(
                    WARN,
                    %error,
                    remedy = "raise the limit of open files (ulimit -n), or set TCPX_SAME_HOST=off",
                    "processes on this host cannot copy this session's memory"
                );
            }
        }
    }

    /// Checks whether a new connection is to a neighbour. `info` belongs to a peer that we dialled.
    pub(super) fn look_for_neighbour(
        &mut self,
        same_host: &Arc<SameHost>,
        info: Option<ConnectionInfo>,
        established: &Established,
    ) {
        if !same_host.is_deciding() {
            return;
        }
        let connection = established.connection;
        if let Some(info) = info {
            let door = door_of(info.id());
            same_host.knock(&door, self.core.id(), connection, info.secret());
            return self.watch(same_host, Some((info, connection)));
        }
        let key = (established.peer_id, connection);
        match self.neighbours.early.remove(&key) {
            Some((join, _)) => self.welcome(same_host, join),
            None => {
                self.neighbours.awaited.insert(key, Arc::clone(same_host));
            }
        }
    }

    fn welcome(&mut self, same_host: &Arc<SameHost>, join: Join) {
        same_host.admit(join, &self.core.parts.identity.secret);
        self.watch(same_host, None);
    }

    fn watch(&mut self, same_host: &Arc<SameHost>, server: Option<(ConnectionInfo, u64)>) {
        let token = self.token();
        let Some(wire) = same_host.wire() else {
            self.neighbours.lost.push(Arc::clone(same_host));
            return;
        };
        if let Err(error) = self.poller.add_armed(wire, token) {
            return same_host.give_up(&error.to_string());
        }
        let same_host = Arc::clone(same_host);
        self.neighbours
            .known
            .insert(token, Known { same_host, server });
    }

    pub(super) fn neighbour_ready(&mut self, token: u64) {
        if self.neighbours.is_door(token) {
            self.answer_door();
        } else if let Some((wire, deadline)) = self.neighbours.strangers.remove(&token) {
            self.hear_stranger(token, wire, deadline);
        } else {
            self.hear_neighbour(token);
        }
    }

    fn answer_door(&mut self) {
        for _ in 0..ACCEPTS_A_TURN {
            let Some((_, door)) = &self.neighbours.door else {
                return;
            };
            match door.accept() {
                Ok(Some(wire)) => {
                    let token = self.token();
                    let deadline = Instant::now() + STRANGERS_TIME;
                    if self.neighbours.strangers.len() < MAX_STRANGERS
                        && self.poller.add_armed(&wire, token).is_ok()
                    {
                        self.neighbours.strangers.insert(token, (wire, deadline));
                    }
                }
                Ok(None) => break,
                Err(error) => {
                    limited!(
                        WARN,
                        %error,
                        remedy = "raise the limit of open files (ulimit -n); lanes carry what moves between the two",
                        "cannot accept a neighbour"
                    );
                    break;
                }
            }
        }
        if let Some((token, door)) = &self.neighbours.door
            && let Err(error) = self.poller.arm(door, *token, false)
        {
            limited!(
                ERROR,
                %error,
                remedy = "make a new session; until then lanes carry everything",
                "cannot watch the socket for neighbours: processes on this host can no longer copy this \
                 session's memory"
            );
        }
    }

    fn hear_stranger(&mut self, token: u64, wire: Wire, deadline: Instant) {
        let secret = &self.core.parts.identity.secret;
        let join = match Join::receive(wire, secret) {
            Ok(Ok(join)) => join,
            Ok(Err(wire)) => {
                if self.poller.arm(&wire, token, false).is_ok() {
                    self.neighbours.strangers.insert(token, (wire, deadline));
                }
                return;
            }
            Err(reason) => {
                limited!(DEBUG, reason, "refused a neighbour");
                return;
            }
        };
        join.unwatch(&self.poller);
        let key = (join.client, join.connection);
        match self.neighbours.awaited.remove(&key) {
            Some(same_host) => self.welcome(&same_host, join),
            None if self.neighbours.early.len() < MAX_STRANGERS => {
                self.neighbours.early.insert(key, (join, deadline));
            }
            None => {}
        }
    }

    fn hear_neighbour(&mut self, token: u64) {
        let Some(known) = self.neighbours.known.get(&token) else {
            return;
        };
        let own = self.core.id();
        let verify_server = |tag: &[u8; 32]| {
            let server = known.server.as_ref();
            server.is_some_and(|(info, connection)| {
                verify(info.secret(), Side::Server, own, *connection, tag)
            })
        };
        let goes_on = known.same_host.hear(verify_server) && self.arm_neighbour(token, known);
        if !goes_on {
            self.forget_neighbour(token);
        }
    }

    /// Arms the poller for incoming messages, and for room if messages are queued.
    fn arm_neighbour(&self, token: u64, known: &Known) -> bool {
        let has_more = known.same_host.flush();
        let wire = known.same_host.wire();
        wire.is_some_and(|wire| self.poller.arm(wire, token, has_more).is_ok())
    }

    /// Sends queued messages.
    pub(super) fn flush_neighbours(&mut self) {
        let known = self.neighbours.known.iter();
        let over: Vec<_> = known
            .filter(|(token, known)| !self.arm_neighbour(**token, known))
            .map(|(token, _)| *token)
            .collect();
        for token in over {
            self.forget_neighbour(token);
        }
    }

    fn forget_neighbour(&mut self, token: u64) {
        if let Some(known) = self.neighbours.known.remove(&token)
            && let Some(wire) = known.same_host.wire()
        {
            self.poller.remove(wire);
            if known.same_host.is_deciding() {
                self.neighbours.lost.push(known.same_host);
            }
        }
    }

    /// Gives up neighbours that take too long.
    pub(super) fn expire_neighbours(&mut self, now: Instant) {
        let neighbours = &mut self.neighbours;
        neighbours
            .strangers
            .retain(|_, (_, deadline)| now < *deadline);
        neighbours.early.retain(|_, (_, deadline)| now < *deadline);
        let still_waits = |same_host: &Arc<SameHost>| {
            same_host.look_after(now);
            same_host.is_deciding()
        };
        neighbours
            .awaited
            .retain(|_, same_host| still_waits(same_host));
        neighbours.lost.retain(still_waits);
        let mut over = Vec::new();
        for (token, known) in &neighbours.known {
            if known.same_host.is_deciding() {
                known.same_host.look_after(now);
            }
            if known.same_host.has_ended() {
                over.push(*token);
            }
        }
        for token in over {
            self.forget_neighbour(token);
        }
    }
}
