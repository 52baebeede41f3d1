//! Connections that others make to us.
//!
//! Whoever has not proven to know the session's secret holds a bounded amount of memory for a bounded time
//! and is told nothing but why it was turned away. However many of them come, each turn of the control thread
//! deals with a few only, and everything else comes in between.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tcpx_net::process::descriptor_limit;
use tcpx_net::{Stream, is_exhausted};
use tcpx_proto::handshake::{Established, HandshakeError, Missing, Server, ServerConfig};
use tcpx_proto::info::SessionId;

use super::comms::Joined;
use super::strangers::Strangers;
use super::{ControlLoop, HANDSHAKE_TIME, Inbound, random, send_all};
use crate::carrier::comm::RawLane;
use crate::error::Error;
use crate::link::Link;
use crate::log::limited;

/// The most connections that have not proven themselves: enough for 128 peers with eight lanes to connect at
/// once. Where the process may have few descriptors they get a quarter of them.
const MAX_UNPROVEN: usize = 1024;

/// And at the least.
const MIN_UNPROVEN: usize = 16;

/// Connections that one listener accepts before everything else has its turn: at a few microseconds
/// each, less than a millisecond.
const ACCEPTS_A_TURN: usize = 64;

/// How long listeners rest when there is no descriptor left, and nobody to take one from.
const EXHAUSTED: Duration = Duration::from_millis(100);

/// A stream in the middle of its handshake.
struct Unproven {
    stream: Stream,
    from: SocketAddr,
    /// None until the client has said something: the silent cost next to nothing.
    server: Option<Box<Server>>,
    inbound: Inbound,
    /// The client has sent a ClientHello for this session.
    has_greeted: bool,
    deadline: Instant,
}

/// A connection of which some lanes are here.
pub(super) struct Arriving {
    pub(super) lanes: Vec<Option<(Stream, Vec<u8>)>>,
    established: Established,
    deadline: Instant,
}

/// What identifies a connection: who made it, and its number there.
pub(super) type ConnectionKey = (SessionId, u64);

pub(super) struct Incoming {
    unproven: Strangers<Unproven>,
    pub(super) arriving: HashMap<ConnectionKey, Arriving>,
    /// How many lanes each connection has whose comms are being made.
    pub(super) plugging: HashMap<ConnectionKey, usize>,
    /// The last connection that did not fit: each of its lanes is turned away, one is reported.
    unfit: Option<ConnectionKey>,
    /// When listeners that rest go on.
    resume: Option<Instant>,
}

/// How far a handshake has come.
enum Progress {
    Waiting,
    Established(Established),
    /// The client has proven itself, and was not admitted.
    Refused,
    /// The client has proven itself, and was turned away because it does not fit.
    Unfit(Established, Missing),
}

impl Incoming {
    pub(super) fn new() -> Self {
        let places = (descriptor_limit() / 4).clamp(MIN_UNPROVEN, MAX_UNPROVEN);
        Self {
            unproven: Strangers::new(places),
            arriving: HashMap::new(),
            plugging: HashMap::new(),
            unfit: None,
            resume: None,
        }
    }

    pub(super) fn has(&self, token: u64) -> bool {
        self.unproven.contains(token)
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        let unproven = self.unproven.oldest().map(|(_, oldest)| oldest.deadline);
        let arriving = self.arriving.values().map(|a| a.deadline);
        arriving.chain(unproven).chain(self.resume).min()
    }
}

impl ControlLoop {
    /// Takes on what waits at a listener, up to a limit: the rest is reported again.
    pub(super) fn accept(&mut self, listener: usize) {
        for _ in 0..ACCEPTS_A_TURN {
            match self.listeners[listener].accept() {
                Ok((stream, from)) => self.begin_handshake(stream, from),
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => break,
                Err(error) if is_exhausted(&error) => {
                    limited!(WARN, %error, "cannot accept a connection");
                    if !self.evict() {
                        self.incoming.resume = Some(Instant::now() + EXHAUSTED);
                        return;
                    }
                }
                // It has ended before it was accepted.
                Err(error) => limited!(DEBUG, %error, "cannot accept a connection"),
            }
        }
        self.arm_listener(listener);
    }

    pub(super) fn arm_listener(&self, listener: usize) {
        let source = &self.listeners[listener];
        if let Err(error) = self.poller.arm(source, listener as u64, false) {
            limited!(ERROR, %error, "a listener is gone");
        }
    }

    /// Drops an unproven connection in favour of another one; false if there is none.
    fn evict(&mut self) -> bool {
        let Some(dropped) = self.incoming.unproven.evict() else {
            return false;
        };
        limited!(WARN, from = %dropped.from, "too many unproven connections, dropping one");
        dropped.stream.reset();
        true
    }

    fn begin_handshake(&mut self, stream: Stream, from: SocketAddr) {
        let unproven = Unproven {
            stream,
            from,
            server: None,
            inbound: Inbound::default(),
            has_greeted: false,
            deadline: Instant::now() + HANDSHAKE_TIME,
        };
        let token = self.token();
        // Mostly its greeting is here, or it has left again.
        self.go_on(token, unproven, false);
    }

    pub(super) fn incoming_ready(&mut self, token: u64) {
        if let Some(unproven) = self.incoming.unproven.remove(token) {
            self.go_on(token, unproven, true);
        }
    }

    /// Goes on with a handshake; the poller knows the stream if it `is_watched`.
    fn go_on(&mut self, token: u64, mut unproven: Unproven, is_watched: bool) {
        let progress = self.advance(&mut unproven);
        match progress {
            Ok(Progress::Waiting) => {
                let watched = if is_watched {
                    self.poller.arm(&unproven.stream, token, false)
                } else {
                    if self.incoming.unproven.is_full() {
                        self.evict();
                    }
                    self.poller.add_armed(&unproven.stream, token)
                };
                if let Err(error) = watched {
                    limited!(DEBUG, from = %unproven.from, %error, "cannot begin a handshake");
                    return;
                }
                let (ip, has_greeted) = (unproven.from.ip(), unproven.has_greeted);
                let places = &mut self.incoming.unproven;
                places.insert(token, ip, has_greeted, unproven);
            }
            Ok(Progress::Established(established)) => {
                self.poller.remove(&unproven.stream);
                self.lane_arrived(established, unproven.stream, unproven.inbound.bytes);
            }
            // Closing the stream takes it out of the poller.
            Ok(Progress::Refused) => {}
            Ok(Progress::Unfit(client, missing)) => self.report_unfit(&client, missing),
            Err(error) => {
                limited!(DEBUG, from = %unproven.from, %error, "a connection did not prove itself");
            }
        }
    }

    /// Warns of a peer that does not fit, once for all lanes of a connection.
    fn report_unfit(&mut self, client: &Established, missing: Missing) {
        let connection = Some((client.peer_id, client.connection));
        if self.incoming.unfit == connection {
            return;
        }
        self.incoming.unfit = connection;
        let error = Error::Incompatible {
            peer: client.peer_name.as_str().to_owned(),
            peer_lacks: missing.client_lacks(),
            session_lacks: missing.server_lacks(),
        };
        limited!(WARN, %error, "turned a connection away");
    }

    fn lane_arrived(&mut self, established: Established, stream: Stream, early: Vec<u8>) {
        if established.generation > 0 {
            return self.lane_came_back(established, RawLane { stream, early });
        }
        let key = (established.peer_id, established.connection);
        let lane = usize::from(established.lane);
        let lanes = usize::from(established.lanes);
        let entry = self.incoming.arriving.entry(key);
        let arriving = entry.or_insert_with(|| {
            let mut established = established.clone();
            // Of each lane below.
            established.owners.clear();
            Arriving {
                lanes: (0..lanes).map(|_| None).collect(),
                deadline: Instant::now() + HANDSHAKE_TIME,
                established,
            }
        });
        match arriving.lanes.get_mut(lane) {
            Some(slot @ None) if arriving.established.lanes as usize == lanes => {
                *slot = Some((stream, early));
                arriving.established.join(established);
            }
            _ => {
                limited!(WARN, peer = %key.0, lane, "a lane arrived twice or does not fit its connection");
                return;
            }
        }
        if arriving.lanes.iter().all(Option::is_some)
            && let Some(arrived) = self.incoming.arriving.remove(&key)
        {
            self.connection_arrived(arrived);
        }
    }

    /// A lane of a connection that is here has a new stream.
    fn lane_came_back(&mut self, established: Established, raw: RawLane) {
        let link = self.link_of(&established);
        if link.is_none() {
            return;
        }
        self.joined(Joined {
            dialled: None,
            rejoins: link,
            established,
            lanes: vec![raw],
            deadline: Instant::now() + HANDSHAKE_TIME,
        });
    }

    /// The link that a lane which comes back belongs to.
    pub(super) fn link_of(&self, lane: &Established) -> Option<Arc<dyn Link>> {
        let peer = self.core.peer_by_id(lane.peer_id)?;
        let links = peer.links().into_iter();
        let mut links = links.filter(|link| link.was_accepted() && !link.is_dead());
        links.find(|l| l.number() == Some(lane.connection) && l.streams() == lane.lanes.into())
    }

    fn connection_arrived(&mut self, arrived: Arriving) {
        let lanes = arrived.lanes.into_iter().flatten();
        let lanes = lanes.map(|(stream, early)| RawLane { stream, early });
        self.joined(Joined {
            dialled: None,
            rejoins: None,
            established: arrived.established,
            lanes: lanes.collect(),
            deadline: Instant::now() + self.core.context().config.connect_timeout(),
        });
    }

    /// Drops what has taken too long, and lets listeners go on that have rested.
    pub(super) fn expire_incoming(&mut self, now: Instant) {
        // All have the same time: the oldest is the first whose time is over.
        while let Some((token, oldest)) = self.incoming.unproven.oldest()
            && oldest.deadline <= now
        {
            limited!(DEBUG, from = %oldest.from, "a connection said too little for too long");
            self.incoming.unproven.remove(token);
        }
        self.incoming.arriving.retain(|(id, _), arriving| {
            let keep = arriving.deadline > now;
            if !keep {
                limited!(WARN, peer = %id, "not all lanes of a connection arrived");
            }
            keep
        });
        if self.incoming.resume.take_if(|at| *at <= now).is_some() {
            for listener in 0..self.listeners.len() {
                self.arm_listener(listener);
            }
        }
    }

    /// Reads what a client has said, and answers.
    fn advance(&mut self, unproven: &mut Unproven) -> Result<Progress, Box<dyn std::error::Error>> {
        match unproven.inbound.read(&unproven.stream) {
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => return Ok(Progress::Waiting),
            result => result?,
        }
        let server = match &mut unproven.server {
            Some(server) => server,
            none => none.insert(Box::new(self.new_server()?)),
        };
        let result = server.handle(&unproven.inbound.bytes);
        let mut turned_away = None;
        if let Some(proven) = server.proven() {
            let client = proven.clone();
            if let Err(code) = self.admit(&client) {
                server.reject(code);
                turned_away = Some(Progress::Refused);
            } else {
                match server.accept() {
                    Err(HandshakeError::PeerIncompatible { missing }) => {
                        turned_away = Some(Progress::Unfit(client, missing));
                    }
                    accepted => accepted?,
                }
            }
        }
        let mut sent = Ok(());
        while let (Ok(()), Some(bytes)) = (&sent, server.poll_transmit()) {
            sent = send_all(&unproven.stream, &bytes);
        }
        if let Some(turned_away) = turned_away {
            // Whether the Reject was sent does not matter: the client has the ServerHello, and may have
            // closed.
            return Ok(turned_away);
        }
        sent?;
        let consumed = result?;
        unproven.inbound.consume(consumed);
        unproven.has_greeted |= consumed > 0;
        Ok(match server.established() {
            Some(established) => Progress::Established(established.clone()),
            None => Progress::Waiting,
        })
    }

    fn new_server(&self) -> std::io::Result<Server> {
        let window = self.core.context().config.window() as u32;
        Ok(Server::new(ServerConfig {
            identity: self.core.parts.identity.clone(),
            window: NonZeroU32::new(window).unwrap_or(NonZeroU32::MIN),
            offer: self.offer,
            nonce: random()?,
        }))
    }
}
