//! Connections that we make to others.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tcpx_net::Stream;
use tcpx_proto::handshake::{
    Client, ClientConfig, Established, HandshakeError, LaneHello, Missing, Offer,
};
use tcpx_proto::info::ConnectionInfo;

use super::comms::Joined;
use super::{ControlLoop, HANDSHAKE_TIME, Inbound, Tokens, random, send_all};
use crate::carrier::comm::RawLane;
use crate::driver::addresses::socket_options;
use crate::error::{self, AttemptCause, Error, LostCause};
use crate::log::limited;
use crate::peers::{PeerShared, Route, Routes, SessionCore};

/// The least time that one route gets before the next one is tried.
const MIN_ROUTE_TIME: Duration = Duration::from_millis(500);

/// And at the most, where there are others: it survives two lost SYN packets, and is less than the time for which the
/// acceptor keeps the lanes that have arrived.
const MAX_ROUTE_TIME: Duration = Duration::from_millis(3500);

/// An attempt to connect to a peer on all lanes.
struct Attempt {
    peer: Arc<PeerShared>,
    info: ConnectionInfo,
    connection: u64,
    routes: Routes,
    /// A route that has led to the peer: the first choice of lanes whose own route fails.
    good: Option<usize>,
    lanes: Vec<DialLane>,
    deadline: Instant,
    route_time: Duration,
    /// What went wrong, for the error.
    failures: Vec<error::Attempt>,
}

struct DialLane {
    /// Which route this lane is on, and which it has tried.
    route: usize,
    tried: Vec<usize>,
    token: u64,
    deadline: Instant,
    state: LaneState,
}

enum LaneState {
    /// Between two routes.
    Idle,
    Connecting(Stream),
    Handshaking {
        stream: Stream,
        client: Box<Client>,
        inbound: Inbound,
    },
    Ready {
        stream: Stream,
        established: Box<Established>,
        early: Vec<u8>,
    },
}

/// Why a lane did not come about.
enum LaneError {
    /// The route failed; another one may lead to the peer.
    Route(AttemptCause),
    /// The peer has proven itself and does not fit; no route changes that.
    Incompatible(Missing),
}

impl From<std::io::Error> for LaneError {
    fn from(error: std::io::Error) -> Self {
        Self::Route(error.into())
    }
}

impl From<HandshakeError> for LaneError {
    fn from(error: HandshakeError) -> Self {
        match error {
            HandshakeError::PeerIncompatible { missing } => Self::Incompatible(missing),
            _ => Self::Route(error.into()),
        }
    }
}

#[derive(Default)]
pub(super) struct Dialing {
    attempts: Tokens<Attempt>,
    /// Which attempt and lane a token belongs to.
    lanes: Tokens<(u64, usize)>,
}

impl Dialing {
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

const _: () = assert!(MAX_ROUTE_TIME.as_millis() < HANDSHAKE_TIME.as_millis());

/// How long a lane tries one of so many routes.
fn route_time(limit: Duration, routes: usize) -> Duration {
    match routes {
        0 | 1 => limit,
        _ => (limit / routes.min(4) as u32).clamp(MIN_ROUTE_TIME, MAX_ROUTE_TIME),
    }
}

/// Chooses the next route of a lane that has tried some: the one that has led to the peer, else one
/// that has failed for no lane, else any. A fall-back is reached in time although many routes
/// before it do not answer, since each fails for one lane only.
fn choose_route(
    count: usize,
    good: Option<usize>,
    tried: &[usize],
    failed: &[usize],
) -> Option<usize> {
    let is_untried = |route: &usize| !tried.contains(route);
    good.filter(is_untried)
        .or_else(|| (0..count).find(|route| is_untried(route) && !failed.contains(route)))
        .or_else(|| (0..count).find(is_untried))
}

impl ControlLoop {
    /// Starts to connect to a peer.
    pub(super) fn dial(&mut self, peer: &Arc<PeerShared>) {
        if peer.link().is_some() {
            // It connected to us in the meantime; should it have left again by the time that is looked at, this is why.
            peer.unreachable(&Error::PeerLost {
                peer: peer.name().to_owned(),
                cause: LostCause::EndedAtOnce,
            });
            return;
        }
        // Should the peer that is gone be this one, added again: what is late must not take the place of what is new.
        self.abandon_removed();
        let begin = || -> Result<_, Error> {
            let info = peer
                .info()
                .ok_or_else(|| Error::PeerNotConnected(peer.name().to_owned()))?;
            let connection = random().map_err(|e| Error::io("cannot get random bytes", e))?;
            Ok((info, u64::from_le_bytes(connection)))
        };
        let (info, connection) = match begin() {
            Ok(begun) => begun,
            Err(error) => {
                peer.unreachable(&error);
                return;
            }
        };
        let routes = self.core.routes_to(&info);
        let limit = self.core.context().config.connect_timeout();
        let now = Instant::now();
        let lanes = (0..self.core.lanes_over(&routes)).map(|index| DialLane {
            route: index % routes.preferred.max(1),
            tried: Vec::new(),
            token: 0,
            deadline: now + limit,
            state: LaneState::Idle,
        });
        let attempt = Attempt {
            peer: Arc::clone(peer),
            connection,
            good: None,
            lanes: lanes.collect(),
            deadline: now + limit,
            route_time: route_time(limit, routes.all.len()),
            routes,
            info,
            failures: Vec::new(),
        };
        let id = self.token();
        let count = attempt.lanes.len();
        self.dialing.attempts.insert(id, attempt);
        for lane in 0..count {
            self.dial_lane(id, lane);
        }
    }

    /// Tries the lane's route, and the next ones while they fail at once.
    fn dial_lane(&mut self, id: u64, lane: usize) {
        loop {
            let token = self.token();
            let Some(attempt) = self.dialing.attempts.get_mut(&id) else {
                return;
            };
            let route = attempt.routes.all[attempt.lanes[lane].route];
            let options = socket_options(&self.core.context().config);
            let result = Stream::connect(route.remote, route.local, &options).and_then(|stream| {
                self.poller.add(&stream, token)?;
                self.poller.arm(&stream, token, true)?;
                Ok(stream)
            });
            match result {
                Ok(stream) => {
                    let dialing = &mut attempt.lanes[lane];
                    dialing.state = LaneState::Connecting(stream);
                    dialing.token = token;
                    dialing.deadline = attempt.deadline.min(Instant::now() + attempt.route_time);
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
                let waiting = match &attempt.lanes[lane].state {
                    LaneState::Connecting(stream) => Some((stream, true)),
                    LaneState::Handshaking { stream, .. } => Some((stream, false)),
                    _ => None,
                };
                if let Some((stream, writable)) = waiting {
                    // Fails only for a stream that is not here, and this one is.
                    let _ = self.poller.arm(stream, token, writable);
                }
            }
            Err(LaneError::Route(cause)) => self.lane_failed(id, lane, cause),
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

    /// A lane's route has failed: tries another one.
    fn lane_failed(&mut self, id: u64, lane: usize, cause: AttemptCause) {
        let Some(attempt) = self.dialing.attempts.get_mut(&id) else {
            return;
        };
        self.dialing.lanes.remove(&attempt.lanes[lane].token);
        // Dropping the stream takes it out of the poller.
        attempt.lanes[lane].state = LaneState::Idle;
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

    /// Ends an attempt; whoever waits for it learns why.
    fn abandon(&mut self, id: u64, error: impl FnOnce(&Attempt) -> Error) {
        let Some(attempt) = self.forget(id) else {
            return;
        };
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

    /// All lanes are there.
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
                attempt.note(lane, AttemptCause::TimedOut);
                self.give_up(id);
            } else {
                self.lane_failed(id, lane, AttemptCause::TimedOut);
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
            attempt.peer.unreachable(error);
        }
        self.dialing.lanes.clear();
    }
}

impl Attempt {
    fn is_complete(&self) -> bool {
        self.lanes
            .iter()
            .all(|l| matches!(l.state, LaneState::Ready { .. }))
    }

    fn route(&self, lane: usize) -> Route {
        self.routes.all[self.lanes[lane].route]
    }

    fn note(&mut self, lane: usize, cause: AttemptCause) {
        let address = self.route(lane).remote;
        let failure = error::Attempt { address, cause };
        // Lanes that fail alike are one line.
        if !self.failures.contains(&failure) {
            self.failures.push(failure);
        }
    }

    /// Puts a lane on the next route worth trying; false when there is none.
    fn next_route(&mut self, lane: usize, cause: AttemptCause) -> bool {
        self.note(lane, cause);
        let dialing = &mut self.lanes[lane];
        dialing.tried.push(dialing.route);
        let failed: Vec<_> = self.lanes.iter().flat_map(|l| l.tried.clone()).collect();
        let tried = &self.lanes[lane].tried;
        let next = choose_route(self.routes.all.len(), self.good, tried, &failed);
        if let Some(route) = next {
            self.lanes[lane].route = route;
        }
        next.is_some()
    }

    /// Goes on with one lane; true once it is ready.
    fn advance(
        &mut self,
        lane: usize,
        core: &SessionCore,
        offer: Offer,
    ) -> Result<bool, LaneError> {
        let lanes = self.lanes.len();
        let state = std::mem::replace(&mut self.lanes[lane].state, LaneState::Idle);
        let state = match state {
            LaneState::Connecting(stream) => match stream.connect_result() {
                Ok(None) => LaneState::Connecting(stream),
                Ok(Some(())) => self.greet(lane, lanes, stream, core, offer)?,
                Err(error) => return Err(error.into()),
            },
            LaneState::Handshaking {
                stream,
                client,
                inbound,
            } => shake(stream, client, inbound)?,
            other => other,
        };
        let ready = matches!(state, LaneState::Ready { .. });
        if ready {
            self.good = Some(self.lanes[lane].route);
        }
        self.lanes[lane].state = state;
        Ok(ready)
    }

    fn greet(
        &self,
        lane: usize,
        lanes: usize,
        stream: Stream,
        core: &SessionCore,
        offer: Offer,
    ) -> Result<LaneState, LaneError> {
        let window =
            NonZeroU32::new(core.context().config.window() as u32).unwrap_or(NonZeroU32::MIN);
        let hello = LaneHello::new(self.connection, lane as u16, lanes as u16, window)
            .expect("a lane is one of at most 64");
        let mut client = Box::new(Client::new(ClientConfig {
            identity: core.parts.identity.clone(),
            target: &self.info,
            lane: hello,
            offer,
            nonce: random()?,
        }));
        while let Some(bytes) = client.poll_transmit() {
            send_all(&stream, &bytes)?;
        }
        Ok(LaneState::Handshaking {
            stream,
            client,
            inbound: Inbound::default(),
        })
    }
}

fn shake(
    stream: Stream,
    mut client: Box<Client>,
    mut inbound: Inbound,
) -> Result<LaneState, LaneError> {
    match inbound.read(&stream) {
        Ok(()) => {}
        Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
        Err(error) => return Err(error.into()),
    }
    let result = client.handle(&inbound.bytes);
    let mut sent = Ok(());
    while let (Ok(()), Some(bytes)) = (&sent, client.poll_transmit()) {
        sent = send_all(&stream, &bytes);
    }
    // Prefers the handshake's error: a failed send says only that the peer has closed.
    inbound.consume(result?);
    sent?;
    match client.established().cloned() {
        Some(established) => Ok(LaneState::Ready {
            stream,
            established: Box::new(established),
            early: inbound.bytes,
        }),
        None => Ok(LaneState::Handshaking {
            stream,
            client,
            inbound,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lane_tries_next_what_has_failed_for_none() {
        assert_eq!(choose_route(4, None, &[0], &[0]), Some(1));
        assert_eq!(choose_route(4, None, &[0], &[0, 1, 2]), Some(3));
        // What leads to the peer comes first, unless it has failed this lane.
        assert_eq!(choose_route(4, Some(2), &[0], &[0]), Some(2));
        assert_eq!(choose_route(4, Some(2), &[2], &[2]), Some(0));
        // Where all have failed for some lane, each lane still tries those that it has not.
        assert_eq!(choose_route(2, None, &[1], &[0, 1]), Some(0));
        assert_eq!(choose_route(2, None, &[0, 1], &[0, 1]), None);
    }

    #[test]
    fn routes_share_the_time_and_leave_some_to_the_next() {
        let (short, usual, long) = [1, 10, 30].map(Duration::from_secs).into();
        assert_eq!(route_time(usual, 1), usual);
        assert_eq!(route_time(long, 1), long);
        assert_eq!(route_time(usual, 2), MAX_ROUTE_TIME);
        assert_eq!(route_time(usual, 4), usual / 4);
        assert_eq!(route_time(usual, 9), usual / 4);
        assert_eq!(route_time(long, 4), MAX_ROUTE_TIME);
        assert_eq!(route_time(short, 4), MIN_ROUTE_TIME);
    }
}
