//! Outgoing connections.

mod attempt;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use tcpx_net::{Poller, Stream};
use tcpx_proto::info::ConnectionInfo;

pub(super) use self::attempt::Attempt;
use self::attempt::{LaneError, LaneState};
use super::comms::Joined;
use super::rejoin::Rejoin;
use super::resolve::Purpose;
use super::{ControlLoop, Tokens, random};
use crate::carrier::comm::RawLane;
use crate::driver::addresses::socket_options;
use crate::error::{AttemptCause, Error, LostCause};
use crate::link::Caller;
use crate::log::limited;
use crate::peers::{PeerShared, Route, SessionCore};

#[derive(Default)]
pub(super) struct Dialing {
    attempts: Tokens<Attempt>,
    /// The attempt and lane of each token.
    lanes: Tokens<(u64, usize)>,
}

impl Dialing {
    /// Returns the lanes that are getting new streams.
    pub(super) fn rejoins(&self) -> impl Iterator<Item = &Rejoin> {
        self.attempts.values().filter_map(|a| a.rejoin.as_ref())
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        let attempts = self.attempts.values();
        attempts
            .flat_map(|a| {
                let open = a
                    .lanes
                    .iter()
                    .filter(|l| !matches!(l.state, LaneState::Ready { .. }));
                open.map(|l| l.deadline).chain([a.deadline])
            })
            .min()
    }
}

/// Begins to connect on a route; the poller reports the result under `token`.
fn connect(
    poller: &Poller,
    core: &SessionCore,
    route: Route,
    token: u64,
) -> std::io::Result<Stream> {
    let options = socket_options(&core.context().config);
    let stream = Stream::connect(route.remote, route.local, &options)?;
    poller.add(&stream, token)?;
    poller.arm(&stream, token, true)?;
    Ok(stream)
}

impl ControlLoop {
    /// Starts to connect to a peer.
    pub(super) fn dial(&mut self, peer: &Arc<PeerShared>) {
        if peer.link().is_some() {
            // The peer connected to us in the meantime; this error applies only if that connection
            // has already ended.
            peer.unreachable(&Error::PeerLost {
                peer: peer.name().to_owned(),
                cause: LostCause::EndedAtOnce,
            });
            return;
        }
        // The removed peer may be this one, added again: a late stream must not replace a new one.
        self.abandon_removed();
        match peer.info() {
            None => peer.unreachable(&Error::PeerNotConnected(peer.name().to_owned())),
            Some(info) => self.resolve(info, Purpose::Dial(Arc::clone(peer))),
        }
    }

    /// Starts to connect to a peer at these addresses.
    pub(super) fn dial_at(
        &mut self,
        peer: &Arc<PeerShared>,
        info: ConnectionInfo,
        addresses: &[SocketAddr],
    ) {
        let connection = match random() {
            Ok(connection) => u64::from_le_bytes(connection),
            Err(error) => {
                return peer.unreachable(&Error::io("cannot get random bytes", error));
            }
        };
        let routes = self.core.routes_to(addresses);
        let lanes = self.core.lanes_over(&routes) + self.express_lanes();
        let limit = self.core.context().config.connect_timeout();
        self.begin_attempt(Attempt::new(
            Arc::clone(peer),
            info,
            connection,
            routes,
            lanes,
            limit,
        ));
    }

    /// Returns the number of express lanes of a connection: one, unless a plugin carries payload,
    /// which has its own queues.
    pub(super) fn express_lanes(&self) -> usize {
        usize::from(self.net.is_none())
    }

    /// Chooses the workers for the lanes of a connection, of which the first `bulk` are bulk lanes.
    pub(super) fn workers_for(&self, lanes: &[RawLane], bulk: usize) -> Vec<Arc<dyn Caller>> {
        let address = |lane: &RawLane| Some(lane.stream.local_addr().ok()?.ip());
        let addresses: Vec<_> = lanes[..bulk].iter().map(address).collect();
        let mut workers = self.workers.for_lanes(&addresses);
        workers.extend((bulk..lanes.len()).map(|lane| self.worker_for(lane, bulk)));
        workers
    }

    /// Chooses the worker for a lane of a connection with `bulk` bulk lanes.
    pub(super) fn worker_for(&self, lane: usize, bulk: usize) -> Arc<dyn Caller> {
        if lane < bulk {
            self.workers.next()
        } else {
            Arc::clone(self.workers.express()) as Arc<dyn Caller>
        }
    }

    /// Begins to make the lanes of an attempt.
    pub(super) fn begin_attempt(&mut self, attempt: Attempt) {
        let id = self.token();
        let count = attempt.lanes.len();
        self.dialing.attempts.insert(id, attempt);
        for lane in 0..count {
            self.dial_lane(id, lane);
        }
    }

    /// Tries the lane's route, and further routes while they fail at once.
    fn dial_lane(&mut self, id: u64, lane: usize) {
        loop {
            let token = self.token();
            let Some(attempt) = self.dialing.attempts.get_mut(&id) else {
                return;
            };
            let route = attempt.route(lane);
            match connect(&self.poller, &self.core, route, token) {
                Ok(stream) => {
                    attempt.connecting(lane, stream, token, Instant::now());
                    attempt.publish();
                    self.dialing.lanes.insert(token, (id, lane));
                    return;
                }
                Err(error) => {
                    if !attempt.next_route(lane, error.into()) {
                        self.give_up(id);
                        return;
                    }
                }
            }
        }
    }

    pub(super) fn dial_ready(&mut self, token: u64) {
        let Some(&(id, lane)) = self.dialing.lanes.get(&token) else {
            return;
        };
        let Some(attempt) = self.dialing.attempts.get_mut(&id) else {
            return;
        };
        let outcome = attempt.advance(lane, &self.core, self.offer);
        match outcome {
            Ok(true) if attempt.is_complete() => self.connected(id),
            Ok(true) => {
                if let LaneState::Ready { stream, .. } = &attempt.lanes[lane].state {
                    self.poller.remove(stream);
                }
                self.dialing.lanes.remove(&token);
            }
            Ok(false) => {
                attempt.publish();
                // Fails only for a stream that is not registered, and these are.
                let arm = |stream, writable| self.poller.arm(stream, token, writable);
                let _ = match &attempt.lanes[lane].state {
                    LaneState::Connecting(syns) => {
                        syns.iter().try_for_each(|syn| arm(&syn.stream, true))
                    }
                    LaneState::Handshaking { stream, .. } => arm(stream, false),
                    _ => Ok(()),
                };
            }
            Err(LaneError::Route(cause)) => self.lane_failed(id, lane, cause),
            Err(LaneError::Dropped(cause)) => {
                if attempt.pause(lane, Instant::now()) {
                    self.dialing.lanes.remove(&token);
                } else {
                    self.lane_failed(id, lane, cause);
                }
            }
            Err(LaneError::Incompatible(missing)) => {
                let error = Error::Incompatible {
                    peer: attempt.peer.name().to_owned(),
                    peer_lacks: missing.server_lacks(),
                    session_lacks: missing.client_lacks(),
                };
                self.abandon(id, |_| error);
            }
        }
    }

    /// Handles the failure of a lane's route: tries another one.
    fn lane_failed(&mut self, id: u64, lane: usize, cause: AttemptCause) {
        let Some(attempt) = self.dialing.attempts.get_mut(&id) else {
            return;
        };
        self.dialing.lanes.remove(&attempt.lanes[lane].token);
        if attempt.next_route(lane, cause) {
            self.dial_lane(id, lane);
        } else {
            self.give_up(id);
        }
    }

    /// Ends an attempt that has no route left.
    fn give_up(&mut self, id: u64) {
        self.abandon(id, |attempt| Error::PeerUnreachable {
            peer: attempt.peer.name().to_owned(),
            attempts: attempt.failures.clone(),
        });
    }

    /// Ends an attempt; waiting callers learn the error.
    fn abandon(&mut self, id: u64, error: impl FnOnce(&Attempt) -> Error) {
        let Some(mut attempt) = self.forget(id) else {
            return;
        };
        if let Some(rejoin) = attempt.rejoin.take() {
            let causes = attempt.failures.into_iter().map(|failure| failure.cause);
            let causes: Vec<_> = causes.collect();
            return self.rejoin_failed(rejoin, &causes);
        }
        let error = error(&attempt);
        limited!(DEBUG, peer = attempt.peer.name(), %error, "cannot connect");
        attempt.peer.unreachable(&error);
    }

    fn forget(&mut self, id: u64) -> Option<Attempt> {
        let attempt = self.dialing.attempts.remove(&id)?;
        for lane in &attempt.lanes {
            self.dialing.lanes.remove(&lane.token);
        }
        Some(attempt)
    }

    /// Handles an attempt whose lanes are all established.
    fn connected(&mut self, id: u64) {
        let Some(attempt) = self.forget(id) else {
            return;
        };
        let peer = Arc::clone(&attempt.peer);
        let deadline = attempt.deadline;
        let mut lanes = Vec::new();
        let mut first = None;
        for dialing in attempt.lanes {
            let LaneState::Ready {
                stream,
                established,
                early,
            } = dialing.state
            else {
                continue;
            };
            self.poller.remove(&stream);
            lanes.push(RawLane { stream, early });
            first.get_or_insert(*established);
        }
        let Some(established) = first else { return };
        self.joined(Joined {
            dialled: Some(peer),
            rejoins: attempt.rejoin.map(|rejoin| rejoin.link),
            established,
            lanes,
            deadline,
        });
    }

    pub(super) fn expire_dials(&mut self, now: Instant) {
        let late: Vec<_> = self
            .dialing
            .attempts
            .iter()
            .flat_map(|(id, attempt)| {
                let lanes = attempt.lanes.iter().enumerate();
                lanes
                    .filter(|(_, l)| {
                        !matches!(l.state, LaneState::Ready { .. }) && l.deadline <= now
                    })
                    .map(|(lane, _)| (*id, lane))
            })
            .collect();
        for (id, lane) in late {
            let Some(attempt) = self.dialing.attempts.get_mut(&id) else {
                continue;
            };
            if attempt.deadline <= now {
                attempt.failures = attempt.standing();
                self.give_up(id);
            } else if attempt.is_pausing(lane) {
                self.dial_lane(id, lane);
            } else if let Some(route) = attempt.next_syn(lane, now) {
                let (way, token) = (attempt.way(route), attempt.lanes[lane].token);
                let stream = connect(&self.poller, &self.core, way, token);
                attempt.sent_syn(lane, route, stream, now);
            } else {
                let cause = attempt.unanswered(lane).unwrap_or(AttemptCause::TimedOut);
                self.lane_failed(id, lane, cause);
            }
        }
    }

    fn abandon_removed(&mut self) {
        let attempts = self.dialing.attempts.iter();
        let removed = attempts.filter(|(_, attempt)| attempt.peer.is_removed());
        for id in removed.map(|(id, _)| *id).collect::<Vec<_>>() {
            self.forget(id);
        }
    }

    pub(super) fn abandon_dials(&mut self, error: &Error) {
        for (_, attempt) in std::mem::take(&mut self.dialing.attempts) {
            if attempt.rejoin.is_none() {
                attempt.peer.unreachable(error);
            }
        }
        self.dialing.lanes.clear();
    }
}
