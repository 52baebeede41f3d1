//! Incoming connections.
//!
//! A client that has not proven to know the session's secret uses a bounded amount of memory for a
//! bounded time, and learns only why it was rejected. However many such clients connect, each turn
//! of the control thread handles only a few of them, so that all other work proceeds.

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

/// Limits the connections that have not proven themselves: enough for 128 peers with eight lanes to
/// connect at once. If the process has few descriptors, the limit is a quarter of them.
const MAX_UNPROVEN: usize = 1024;

/// Lower bound of that limit.
const MIN_UNPROVEN: usize = 16;

/// Limits the connections that one listener accepts per turn:
/// at a few microseconds each, less than a millisecond.
const ACCEPTS_A_TURN: usize = 64;

/// Pause of the listeners when there is no descriptor left, and no connection to evict.
const EXHAUSTED: Duration = Duration::from_millis(100);

/// A stream during its handshake.
struct Unproven {
    stream: Stream,
    from: SocketAddr,
    /// `None` until the client has sent something: silent connections cost very little.
    server: Option<Box<Server>>,
    inbound: Inbound,
    /// True once the client has sent a ClientHello for this session.
    has_greeted: bool,
    deadline: Instant,
}

/// A connection of which some lanes have arrived.
pub(super) struct Arriving {
    pub(super) lanes: Vec<Option<(Stream, Vec<u8>)>>,
    established: Established,
    deadline: Instant,
}

/// Identity of a connection: the client, and the client's number for it.
pub(super) type ConnectionKey = (SessionId, u64);

pub(super) struct Incoming {
    unproven: Strangers<Unproven>,
    pub(super) arriving: HashMap<ConnectionKey, Arriving>,
    /// Number of lanes of each connection whose comms are being made.
    pub(super) plugging: HashMap<ConnectionKey, usize>,
    /// The last incompatible connection: each of its lanes is rejected, but only one is logged.
    unfit: Option<ConnectionKey>,
    /// When paused listeners resume.
    resume: Option<Instant>,
}

/// Progress of a handshake.
enum Progress {
    Waiting,
    Established(Established),
    /// The client has proven itself, but was not admitted.
    Refused,
    /// The client has proven itself, but was rejected as incompatible.
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
    /// Accepts connections of a listener, up to a limit: the poller reports the rest again.
    pub(super) fn accept(&mut self, listener: usize) {
        for _ in 0..ACCEPTS_A_TURN {
            match self.listeners[listener].accept() {
                Ok((stream, from)) => self.begin_handshake(stream, from),
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => break,
                Err(error) if is_exhausted(&error) => {
                    limited!(
                        WARN,
                        %error,
                        remedy = "raise the limit of open files (ulimit -n), or free memory",
                        "cannot accept a connection"
                    );
                    if !self.evict() {
                        self.incoming.resume = Some(Instant::now() + EXHAUSTED);
                        return;
                    }
                }
                // The connection ended before it was accepted.
                Err(error) => limited!(DEBUG, %error, "cannot accept a connection"),
            }
        }
        self.arm_listener(listener);
    }

    pub(super) fn arm_listener(&self, listener: usize) {
        let source = &self.listeners[listener];
        if let Err(error) = self.poller.arm(source, listener as u64, false) {
            limited!(
                ERROR,
                %error,
                remedy = "make a new session: peers cannot reach this address of it any more",
                "cannot watch a listener"
            );
        }
    }

    /// Drops an unproven connection to make room for another; returns false if there is none.
    fn evict(&mut self) -> bool {
        let Some(dropped) = self.incoming.unproven.evict() else {
            return false;
        };
        limited!(
            WARN,
            from = %dropped.from,
            remedy = "keep strangers from the port (TCPX_LISTEN_PORT) by a firewall",
            "too many unproven connections, dropping one"
        );
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
        // Usually the greeting has already arrived, or the client has already left.
        self.go_on(token, unproven, false);
    }

    pub(super) fn incoming_ready(&mut self, token: u64) {
        if let Some(unproven) = self.incoming.unproven.remove(token) {
            self.go_on(token, unproven, true);
        }
    }

    /// Continues a handshake; the poller knows the stream if it `is_watched`.
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
            // Closing the stream removes it from the poller.
            Ok(Progress::Refused) => {}
            Ok(Progress::Unfit(client, missing)) => self.report_unfit(&client, missing),
            Err(error) => {
                limited!(DEBUG, from = %unproven.from, %error, "a connection did not prove itself");
            }
        }
    }

    /// Warns of an incompatible peer, once for all lanes of a connection.
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
        limited!(
            WARN,
            %error,
            remedy = "run the same release with matching settings on both sides",
            "turned a connection away"
        );
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
            // Joined from each lane below.
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
                limited!(
                    WARN,
                    peer = %key.0,
                    lane,
                    remedy = "run the same release on both sides; the peer reconnects",
                    "a lane arrived twice or has a wrong number"
                );
                return;
            }
        }
        if arriving.lanes.iter().all(Option::is_some)
            && let Some(arrived) = self.incoming.arriving.remove(&key)
        {
            self.connection_arrived(arrived);
        }
    }

    /// Handles a new stream for a lane of an existing connection.
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

    /// Returns the link of a lane that got a new stream.
    pub(super) fn link_of(&self, lane: &Established) -> Option<Arc<dyn Link>> {
        let peer = self.core.peer_by_id(lane.peer_id)?;
        let links = peer.links().into_iter();
        let mut links = links.filter(|link| link.was_accepted() && !link.is_dead());
        links
            .find(|l| l.number() == Some(lane.connection) && l.streams() == usize::from(lane.lanes))
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

    /// Drops connections that have taken too long, and resumes paused listeners.
    pub(super) fn expire_incoming(&mut self, now: Instant) {
        // All have the same time limit: the oldest expires first.
        while let Some((token, oldest)) = self.incoming.unproven.oldest()
            && oldest.deadline <= now
        {
            limited!(DEBUG, from = %oldest.from, "a handshake took too long");
            self.incoming.unproven.remove(token);
        }
        self.incoming.arriving.retain(|(id, _), arriving| {
            let keep = arriving.deadline > now;
            if !keep {
                limited!(
                    WARN,
                    peer = %id,
                    remedy = "let firewalls pass the port (TCPX_LISTEN_PORT) on every interface, or name those that reach each other in TCPX_INTERFACES",
                    "not all lanes of a connection arrived"
                );
            }
            keep
        });
        if self.incoming.resume.take_if(|at| *at <= now).is_some() {
            for listener in 0..self.listeners.len() {
                self.arm_listener(listener);
            }
        }
    }

    /// Reads the client's bytes, and answers.
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
            // Whether the Reject was sent does not matter:
            // the client has the ServerHello, and may have closed.
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
