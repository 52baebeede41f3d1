//! Connections that others make to us.
//!
//! Whoever has not proven to know the session's secret holds a bounded amount of memory for a bounded time
//! and is told nothing but why it was turned away.

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::time::Instant;

use tcpx_net::Stream;
use tcpx_proto::handshake::{
    Established, HandshakeError, Missing, RejectCode, Server, ServerConfig,
};
use tcpx_proto::info::SessionId;

use super::comms::Joined;
use super::{ControlLoop, HANDSHAKE_TIME, Inbound, Tokens, random, send_all};
use crate::carrier::comm::RawLane;
use crate::error::Error;
use crate::log::limited;
use crate::peers::SessionCore;

/// Connections that have not proven themselves yet: enough for 32 peers with eight lanes to connect at once.
const MAX_UNPROVEN: usize = 256;
/// The most lanes a peer may ask for.
const MAX_LANES: u16 = 64;

/// A stream in the middle of its handshake.
struct Unproven {
    stream: Stream,
    server: Server,
    inbound: Inbound,
    deadline: Instant,
}

/// A connection of which some lanes are here.
struct Arriving {
    lanes: Vec<Option<(Stream, Vec<u8>)>>,
    established: Established,
    deadline: Instant,
}

#[derive(Default)]
pub(super) struct Incoming {
    unproven: Tokens<Unproven>,
    arriving: HashMap<(SessionId, u64), Arriving>,
    /// The last connection that did not fit: each of its lanes is turned away, one is reported.
    unfit: Option<(SessionId, u64)>,
}

/// How far a handshake has come.
enum Progress {
    Waiting,
    Established(Established),
    /// The client has proven itself, and was turned away because it does not fit.
    Unfit(Established, Missing),
}

impl Incoming {
    pub(super) fn has(&self, token: u64) -> bool {
        self.unproven.contains_key(&token)
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        let unproven = self.unproven.values().map(|u| u.deadline);
        unproven
            .chain(self.arriving.values().map(|a| a.deadline))
            .min()
    }
}

impl ControlLoop {
    pub(super) fn accept(&mut self, listener: usize) {
        loop {
            match self.listeners[listener].accept() {
                Ok((stream, from)) => {
                    self.make_room();
                    if let Err(error) = self.begin_handshake(stream) {
                        limited!(DEBUG, %from, %error, "cannot begin a handshake");
                    }
                }
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => break,
                Err(error) => {
                    // Out of descriptors, or the connection is already gone: try again at the next event.
                    limited!(WARN, %error, "cannot accept a connection");
                    std::thread::sleep(std::time::Duration::from_millis(1));
                    break;
                }
            }
        }
        let source = &self.listeners[listener];
        if let Err(error) = self.poller.arm(source, listener as u64, false) {
            limited!(ERROR, %error, "a listener is gone");
        }
    }

    /// Drops the oldest unproven connection when there are too many: an honest handshake is over
    /// long before it is the oldest.
    fn make_room(&mut self) {
        if self.incoming.unproven.len() < MAX_UNPROVEN {
            return;
        }
        let oldest = self
            .incoming
            .unproven
            .iter()
            .min_by_key(|(_, u)| u.deadline)
            .map(|(t, _)| *t);
        if let Some(dropped) = oldest.and_then(|token| self.incoming.unproven.remove(&token)) {
            limited!(WARN, from = ?dropped.stream.peer_addr().ok(), "too many unproven connections, dropping the oldest");
            self.poller.remove(&dropped.stream);
        }
    }

    fn begin_handshake(&mut self, stream: Stream) -> std::io::Result<()> {
        let server = Server::new(ServerConfig {
            identity: self.core.parts.identity.clone(),
            window: NonZeroU32::new(self.core.context().config.window() as u32)
                .unwrap_or(NonZeroU32::MIN),
            offer: self.offer,
            nonce: random()?,
        });
        let token = self.token();
        self.poller.add(&stream, token)?;
        self.poller.arm(&stream, token, false)?;
        let deadline = Instant::now() + HANDSHAKE_TIME;
        let unproven = Unproven {
            stream,
            server,
            inbound: Inbound::default(),
            deadline,
        };
        self.incoming.unproven.insert(token, unproven);
        Ok(())
    }

    pub(super) fn incoming_ready(&mut self, token: u64) {
        let Some(mut unproven) = self.incoming.unproven.remove(&token) else {
            return;
        };
        match unproven.advance(&self.core) {
            Ok(Progress::Waiting) => {
                if self.poller.arm(&unproven.stream, token, false).is_ok() {
                    self.incoming.unproven.insert(token, unproven);
                }
            }
            Ok(Progress::Established(established)) => {
                self.poller.remove(&unproven.stream);
                self.lane_arrived(established, unproven.stream, unproven.inbound.bytes);
            }
            Ok(Progress::Unfit(client, missing)) => {
                self.poller.remove(&unproven.stream);
                self.report_unfit(&client, missing);
            }
            Err(error) => {
                let from = unproven.stream.peer_addr().ok();
                limited!(DEBUG, ?from, %error, "a connection did not prove itself");
                self.poller.remove(&unproven.stream);
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
        let key = (established.peer_id, established.connection);
        let lane = usize::from(established.lane);
        let lanes = usize::from(established.lanes);
        let arriving = self
            .incoming
            .arriving
            .entry(key)
            .or_insert_with(|| Arriving {
                lanes: (0..lanes).map(|_| None).collect(),
                deadline: Instant::now() + HANDSHAKE_TIME,
                established,
            });
        match arriving.lanes.get_mut(lane) {
            Some(slot @ None) if arriving.established.lanes as usize == lanes => {
                *slot = Some((stream, early));
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

    fn connection_arrived(&mut self, arrived: Arriving) {
        let lanes = arrived.lanes.into_iter().flatten();
        let lanes = lanes.map(|(stream, early)| RawLane { stream, early });
        self.joined(Joined {
            dialled: None,
            established: arrived.established,
            lanes: lanes.collect(),
            deadline: Instant::now() + self.core.context().config.connect_timeout(),
        });
    }

    /// Drops what has taken too long.
    pub(super) fn expire_incoming(&mut self, now: Instant) {
        let poller = &self.poller;
        self.incoming.unproven.retain(|_, unproven| {
            let keep = unproven.deadline > now;
            if !keep {
                limited!(DEBUG, from = ?unproven.stream.peer_addr().ok(), "a connection said too little for too long");
                poller.remove(&unproven.stream);
            }
            keep
        });
        self.incoming.arriving.retain(|(id, _), arriving| {
            let keep = arriving.deadline > now;
            if !keep {
                limited!(WARN, peer = %id, "not all lanes of a connection arrived");
            }
            keep
        });
    }
}

impl Unproven {
    /// Goes on with the handshake.
    fn advance(&mut self, core: &SessionCore) -> Result<Progress, Box<dyn std::error::Error>> {
        match self.inbound.read(&self.stream) {
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => return Ok(Progress::Waiting),
            result => result?,
        }
        let result = self.server.handle(&self.inbound.bytes);
        let mut unfit = None;
        if let Some(proven) = self.server.proven() {
            if core.is_closing() {
                self.server.reject(RejectCode::Closing);
            } else if proven.lanes > MAX_LANES {
                self.server.reject(RejectCode::TooMany);
            } else {
                let client = proven.clone();
                match self.server.accept() {
                    Err(HandshakeError::PeerIncompatible { missing }) => {
                        unfit = Some(Progress::Unfit(client, missing));
                    }
                    accepted => accepted?,
                }
            }
        }
        let mut sent = Ok(());
        while let (Ok(()), Some(bytes)) = (&sent, self.server.poll_transmit()) {
            sent = send_all(&self.stream, &bytes);
        }
        if let Some(unfit) = unfit {
            // Whether the Reject was sent does not matter: the client has the ServerHello, and may have
            // closed.
            return Ok(unfit);
        }
        sent?;
        self.inbound.consume(result?);
        Ok(match self.server.established() {
            Some(established) => Progress::Established(established.clone()),
            None => Progress::Waiting,
        })
    }
}
