//! Sessions on this host: how they find each other beside their connections.
//!
//! Each session has a door, named after its identity. The side that has made a connection goes there and
//! says which connection it is about; both then find out whether they can reach each other's memory
//! ([`crate::link::same_host`]).

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

/// Wires that have not said who they are, or whose connection is not here yet.
const MAX_STRANGERS: usize = 64;

/// How long they may take.
const STRANGERS_TIME: Duration = Duration::from_secs(1);

/// Wires that are accepted before everything else has its turn.
const ACCEPTS_A_TURN: usize = 16;

#[derive(Default)]
pub(super) struct Neighbours {
    door: Option<(u64, Door)>,
    strangers: Tokens<(Wire, Instant)>,
    /// Those whose connection is not here yet.
    early: HashMap<ConnectionKey, (Join, Instant)>,
    /// Connections whose other side is to come to the door.
    awaited: HashMap<ConnectionKey, Arc<SameHost>>,
    /// By the token of the wire.
    known: Tokens<Known>,
}

struct Known {
    same_host: Arc<SameHost>,
    /// At whose door we were, and with which connection; none if they came to ours.
    server: Option<(ConnectionInfo, u64)>,
}

/// The name of a session's door.
fn door_of(session: SessionId) -> String {
    format!("tcpx-{session}")
}

impl Neighbours {
    pub(super) fn has(&self, token: u64) -> bool {
        self.is_door(token)
            || self.strangers.contains_key(&token)
            || self.known.contains_key(&token)
    }

    /// Whether neighbours can come.
    pub(super) fn has_door(&self) -> bool {
        self.door.is_some()
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        let strangers = self.strangers.values().map(|stranger| stranger.1);
        let early = self.early.values().map(|early| early.1);
        let awaited = self.awaited.values().map(|awaited| awaited.deadline());
        let deciding = self
            .known
            .values()
            .filter(|known| known.same_host.is_deciding());
        let deciding = deciding.map(|known| known.same_host.deadline());
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
                limited!(WARN, %error, "processes on this host cannot copy this session's memory");
            }
        }
    }

    /// Finds out whether a new connection is to a neighbour. `info` is that of a peer we have dialled.
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
        let Some(wire) = same_host.wire() else { return };
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
                    limited!(WARN, %error, "cannot accept a neighbour");
                    break;
                }
            }
        }
        if let Some((token, door)) = &self.neighbours.door
            && let Err(error) = self.poller.arm(door, *token, false)
        {
            limited!(ERROR, %error, "the door is gone");
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
                limited!(DEBUG, reason, "a neighbour is not let in");
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

    /// Has the poller say when there is something to be heard, or room for what waits.
    fn arm_neighbour(&self, token: u64, known: &Known) -> bool {
        let has_more = known.same_host.flush();
        let wire = known.same_host.wire();
        wire.is_some_and(|wire| self.poller.arm(wire, token, has_more).is_ok())
    }

    /// Sends what waits for room.
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
        }
    }

    /// Gives up on those who take too long.
    pub(super) fn expire_neighbours(&mut self, now: Instant) {
        let neighbours = &mut self.neighbours;
        neighbours
            .strangers
            .retain(|_, (_, deadline)| now < *deadline);
        neighbours.early.retain(|_, (_, deadline)| now < *deadline);
        neighbours.awaited.retain(|_, same_host| {
            same_host.look_after(now);
            same_host.is_deciding()
        });
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
