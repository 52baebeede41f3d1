//! An attempt to connect to a peer: the route of each lane, and the state of its handshake.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tcpx_net::Stream;
use tcpx_proto::handshake::{
    Client, ClientConfig, Established, HandshakeError, LaneHello, Missing, Offer,
};
use tcpx_proto::info::ConnectionInfo;

use crate::driver::control::rejoin::Rejoin;
use crate::driver::control::{HANDSHAKE_TIME, Inbound, random, send_all};
use crate::error::{self, AttemptCause};
use crate::peers::{PeerShared, Route, Routes, SessionCore};

/// Minimum time for one route before the next one is tried.
const MIN_ROUTE_TIME: Duration = Duration::from_millis(500);

/// Maximum time for one route if there are others: it survives two lost SYN packets, and is less
/// than the time for which the acceptor keeps lanes of an incomplete connection.
const MAX_ROUTE_TIME: Duration = Duration::from_millis(3500);

/// Limits how often a lane is dropped on one route before another is tried. A peer whose places are
/// all taken, by strangers or by many peers that connect at once, drops connections before they
/// have proven themselves.
const MAX_DROPS: u32 = 5;

/// Pause after the first drop; doubled after each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(20);

/// Time for which a SYN may stay unanswered before another one is sent, from a second socket. The
/// kernel would wait for a second, and a peer whose listener is full drops SYNs silently. The first
/// socket stays: on a path with a long round trip, it is the one that is answered.
const PATIENCE: Duration = Duration::from_millis(100);

/// Limits the additional SYNs on a route.
const MAX_SYNS: u32 = 8;

/// Additional SYNs after which other routes are tried beside an unanswered one: an unreachable
/// address costs a lane less than half a second. Before that, a SYN was probably lost, or the peer
/// is far or busy, and the lane stays on its intended interfaces.
const SYNS_ALONE: u32 = 2;

/// Limits the routes tried beside a lane's own, one after the other.
const MAX_BESIDE: u32 = 4;

/// Limits a handshake while another route has reached the peer: the listener on this route may be
/// another program that sends nothing.
const HANDSHAKE_BESIDE: Duration = Duration::from_secs(1);

/// An attempt to connect to a peer on all lanes.
pub(in crate::driver::control) struct Attempt {
    pub(super) peer: Arc<PeerShared>,
    info: ConnectionInfo,
    connection: u64,
    /// The lost lane for which the attempt is made; `None` for a whole connection.
    pub(in crate::driver::control) rejoin: Option<Rejoin>,
    routes: Routes,
    /// A route that has reached the peer: the first choice of lanes whose own route fails.
    good: Option<usize>,
    pub(super) lanes: Vec<DialLane>,
    pub(super) deadline: Instant,
    route_time: Duration,
    /// Failures so far, for the error.
    pub(super) failures: Vec<error::Attempt>,
}

pub(super) struct DialLane {
    /// The lane's current route, and the routes it has tried.
    route: usize,
    tried: Vec<usize>,
    /// Number of drops and of additional SYNs on this route, and the end of the route's time.
    drops: u32,
    syns: u32,
    route_until: Option<Instant>,
    pub(super) token: u64,
    /// Time of the next action: the end of a pause, the next SYN, or the end of the route's time.
    pub(super) deadline: Instant,
    pub(super) state: LaneState,
}

pub(super) enum LaneState {
    /// Between two routes.
    Idle,
    /// Dropped by the peer, and about to retry.
    Pausing,
    /// SYNs are in flight: the first and the last one on the lane's own route, then those on routes
    /// beside it. The first answer wins.
    Connecting(Vec<Syn>),
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

/// A connection attempt of one socket.
pub(super) struct Syn {
    route: usize,
    pub(super) stream: Stream,
}

/// Why a lane could not be made.
pub(super) enum LaneError {
    /// The route failed; another one may reach the peer.
    Route(AttemptCause),
    /// The connection was dropped during the handshake: the same route may work later.
    Dropped(AttemptCause),
    /// The peer has proven itself but is incompatible; no other route changes that.
    Incompatible(Missing),
}

impl From<std::io::Error> for LaneError {
    fn from(error: std::io::Error) -> Self {
        use std::io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
        match error.kind() {
            UnexpectedEof | ConnectionReset | ConnectionAborted | BrokenPipe => {
                Self::Dropped(error.into())
            }
            _ => Self::Route(error.into()),
        }
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

const _: () = assert!(MAX_ROUTE_TIME.as_millis() < HANDSHAKE_TIME.as_millis());

/// Returns how long a lane tries each of `routes` routes.
fn route_time(limit: Duration, routes: usize) -> Duration {
    match routes {
        0 | 1 => limit,
        _ => (limit / routes.min(4) as u32).clamp(MIN_ROUTE_TIME, MAX_ROUTE_TIME),
    }
}

/// Returns the pause of a lane that was dropped `drops` times before. Extended randomly by up to a
/// half, so that lanes and peers that were dropped together return one by one.
fn pause_after(drops: u32) -> Duration {
    let pause = FIRST_PAUSE * 2u32.pow(drops);
    let [byte] = random().unwrap_or([0]);
    pause + pause * u32::from(byte) / 512
}

/// Chooses the next route of a lane that has tried some: a route that has reached the peer, else
/// one that has failed for no lane, else any. So a fall-back is reached in time even if many routes
/// before it do not answer, since each of them fails for one lane only.
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

impl DialLane {
    /// Lists the routes on which the lane has failed or currently is.
    fn routes(&self) -> Vec<usize> {
        let mut routes = self.tried.clone();
        match &self.state {
            LaneState::Connecting(syns) => routes.extend(syns.iter().map(|syn| syn.route)),
            LaneState::Handshaking { .. } => routes.push(self.route),
            _ => {}
        }
        routes
    }

    /// Lists the routes that are tried beside the lane's own.
    fn beside(&self) -> Vec<usize> {
        match &self.state {
            LaneState::Connecting(syns) => {
                let routes = syns.iter().map(|syn| syn.route);
                routes.filter(|route| *route != self.route).collect()
            }
            _ => Vec::new(),
        }
    }

    /// Sets the deadline of a lane that waits for the answer to a SYN.
    fn be_patient(&mut self, now: Instant) {
        let end = self.route_until.unwrap_or(now);
        self.deadline = match self.syns < MAX_SYNS {
            true => end.min(now + PATIENCE),
            false => end,
        };
    }
}

impl Attempt {
    /// Distributes lanes over the preferred routes.
    pub(super) fn new(
        peer: Arc<PeerShared>,
        info: ConnectionInfo,
        connection: u64,
        routes: Routes,
        lanes: usize,
        limit: Duration,
    ) -> Self {
        let deadline = Instant::now() + limit;
        let lanes = (0..lanes).map(|index| DialLane {
            route: index % routes.preferred.max(1),
            tried: Vec::new(),
            drops: 0,
            syns: 0,
            route_until: None,
            token: 0,
            deadline,
            state: LaneState::Idle,
        });
        Self {
            peer,
            connection,
            rejoin: None,
            good: None,
            lanes: lanes.collect(),
            deadline,
            route_time: route_time(limit, routes.all.len()),
            routes,
            info,
            failures: Vec::new(),
        }
    }

    /// Makes an attempt to get a new stream for a lost lane.
    pub(in crate::driver::control) fn rejoin(
        peer: Arc<PeerShared>,
        info: ConnectionInfo,
        rejoin: Rejoin,
        routes: Routes,
        limit: Duration,
    ) -> Self {
        let connection = rejoin.wanted.connection;
        let mut attempt = Self::new(peer, info, connection, routes, 1, limit);
        attempt.rejoin = Some(rejoin);
        attempt
    }

    /// Returns the description of a lane for its first message.
    fn lane_hello(&self, lane: usize, window: NonZeroU32, port: u16) -> LaneHello {
        let (lane, lanes, generation) = match &self.rejoin {
            None => (lane as u16, self.lanes.len(), 0),
            Some(Rejoin { wanted, .. }) => (wanted.id.lane, wanted.lanes, wanted.id.generation),
        };
        LaneHello::new(self.connection, lane, lanes as u16, window)
            .expect("a lane is one of at most 64")
            .again(generation)
            .listening_at(port)
    }

    /// Returns the route of a lane.
    pub(super) fn route(&self, lane: usize) -> Route {
        self.way(self.lanes[lane].route)
    }

    /// Returns a route by its index.
    pub(super) fn way(&self, route: usize) -> Route {
        self.routes.all[route]
    }

    /// Records that a lane has sent its SYN, from this stream.
    pub(super) fn connecting(&mut self, lane: usize, stream: Stream, token: u64, now: Instant) {
        let dialing = &mut self.lanes[lane];
        let end = self.deadline.min(now + self.route_time);
        dialing.route_until.get_or_insert(end);
        dialing.be_patient(now);
        dialing.token = token;
        let route = dialing.route;
        dialing.state = LaneState::Connecting(vec![Syn { route, stream }]);
    }

    pub(super) fn is_complete(&self) -> bool {
        self.lanes
            .iter()
            .all(|l| matches!(l.state, LaneState::Ready { .. }))
    }

    /// Records the failure of a lane: on its own route, and as a timeout on the routes beside it.
    fn note(&mut self, lane: usize, cause: AttemptCause) {
        self.note_route(self.lanes[lane].route, cause);
        for route in self.lanes[lane].beside() {
            self.note_route(route, AttemptCause::TimedOut);
        }
    }

    fn note_route(&mut self, route: usize, cause: AttemptCause) {
        let address = self.way(route).remote;
        add_failure(&mut self.failures, error::Attempt { address, cause });
    }

    /// Returns the cause of failure if the answer that a lane waits for never arrives.
    pub(super) fn unanswered(&self, lane: usize) -> Option<AttemptCause> {
        match self.lanes[lane].state {
            LaneState::Connecting(_) => Some(AttemptCause::TimedOut),
            LaneState::Handshaking { .. } => Some(AttemptCause::HandshakeTimedOut),
            LaneState::Pausing => Some(AttemptCause::ClosedByPeer),
            LaneState::Idle | LaneState::Ready { .. } => None,
        }
    }

    /// Returns the failures so far, and the pending answers of lanes as failures.
    pub(super) fn standing(&self) -> Vec<error::Attempt> {
        let mut standing = self.failures.clone();
        for (index, lane) in self.lanes.iter().enumerate() {
            let own = self.unanswered(index).map(|cause| (lane.route, cause));
            let beside = lane.beside().into_iter();
            let beside = beside.map(|route| (route, AttemptCause::TimedOut));
            for (route, cause) in own.into_iter().chain(beside) {
                let address = self.way(route).remote;
                add_failure(&mut standing, error::Attempt { address, cause });
            }
        }
        standing
    }

    /// Publishes the state of the attempt to callers that wait for the connection.
    pub(super) fn publish(&self) {
        if self.rejoin.is_none() {
            self.peer.stands(self.standing());
        }
    }

    /// Lets a dropped lane pause before it retries its route; returns false if its retries or the
    /// route's time are used up.
    pub(super) fn pause(&mut self, lane: usize, now: Instant) -> bool {
        let dialing = &mut self.lanes[lane];
        let until = now + pause_after(dialing.drops);
        if dialing.drops == MAX_DROPS || dialing.route_until.is_none_or(|end| until >= end) {
            return false;
        }
        dialing.drops += 1;
        dialing.deadline = until;
        dialing.state = LaneState::Pausing;
        true
    }

    /// Returns whether a lane is pausing.
    pub(super) fn is_pausing(&self, lane: usize) -> bool {
        matches!(self.lanes[lane].state, LaneState::Pausing)
    }

    /// Chooses the route on which a lane whose deadline has passed sends another SYN;
    /// `None` if its time is over.
    pub(super) fn next_syn(&self, lane: usize, now: Instant) -> Option<usize> {
        let dialing = &self.lanes[lane];
        let LaneState::Connecting(syns) = &dialing.state else {
            return None;
        };
        dialing.route_until.filter(|end| *end > now)?;
        let is_beside = (SYNS_ALONE..SYNS_ALONE + MAX_BESIDE).contains(&dialing.syns);
        let beside = is_beside.then(|| {
            let mut busy = dialing.tried.clone();
            busy.extend(syns.iter().map(|syn| syn.route));
            let others = self.lanes.iter().enumerate();
            let others = others.filter(|(index, _)| *index != lane);
            let elsewhere: Vec<_> = others.flat_map(|(_, l)| l.routes()).collect();
            choose_route(self.routes.all.len(), self.good, &busy, &elsewhere)
        });
        beside.flatten().or(Some(dialing.route))
    }

    /// Records that a lane has sent another SYN on a route, from this stream.
    pub(super) fn sent_syn(
        &mut self,
        lane: usize,
        route: usize,
        stream: std::io::Result<Stream>,
        now: Instant,
    ) {
        let dialing = &mut self.lanes[lane];
        dialing.syns += 1;
        dialing.be_patient(now);
        match (stream, &mut dialing.state) {
            (Ok(stream), LaneState::Connecting(syns)) => {
                // The first stream on a route stays.
                // Dropping a later one removes it from the poller.
                let same = syns
                    .iter()
                    .enumerate()
                    .filter(|(_, syn)| syn.route == route);
                if let Some((index, _)) = same.skip(1).last() {
                    syns.remove(index);
                }
                syns.push(Syn { route, stream });
            }
            (Err(error), _) if route != dialing.route => self.rule_out(lane, route, error.into()),
            _ => {}
        }
    }

    /// Excludes a route that is not the lane's own.
    fn rule_out(&mut self, lane: usize, route: usize, cause: AttemptCause) {
        self.note_route(route, cause);
        self.lanes[lane].tried.push(route);
    }

    /// Moves a lane to the next route; returns false if there is none.
    pub(super) fn next_route(&mut self, lane: usize, cause: AttemptCause) -> bool {
        self.note(lane, cause);
        let dialing = &mut self.lanes[lane];
        dialing.drops = 0;
        dialing.syns = 0;
        dialing.route_until = None;
        dialing.tried.push(dialing.route);
        dialing.state = LaneState::Idle;
        let failed: Vec<_> = self.lanes.iter().flat_map(|l| l.tried.clone()).collect();
        let tried = &self.lanes[lane].tried;
        let next = choose_route(self.routes.all.len(), self.good, tried, &failed);
        if let Some(route) = next {
            self.lanes[lane].route = route;
        }
        next.is_some()
    }

    /// Advances one lane; returns true once it is ready.
    pub(super) fn advance(
        &mut self,
        lane: usize,
        core: &SessionCore,
        offer: Offer,
    ) -> Result<bool, LaneError> {
        let state = std::mem::replace(&mut self.lanes[lane].state, LaneState::Idle);
        let state = match state {
            LaneState::Connecting(syns) => match self.answered(lane, syns)? {
                Ok(stream) => {
                    self.hurry(lane, Instant::now());
                    self.greet(lane, stream, core, offer)?
                }
                Err(syns) => LaneState::Connecting(syns),
            },
            LaneState::Handshaking {
                stream,
                client,
                inbound,
            } => shake(stream, client, inbound)?,
            other => other,
        };
        let ready = matches!(state, LaneState::Ready { .. });
        self.lanes[lane].state = state;
        if ready {
            self.good = Some(self.lanes[lane].route);
            for other in 0..self.lanes.len() {
                if matches!(self.lanes[other].state, LaneState::Handshaking { .. }) {
                    self.hurry(other, Instant::now());
                }
            }
        }
        Ok(ready)
    }

    /// Sets the deadline of a lane's handshake: earlier if another route has reached the peer.
    fn hurry(&mut self, lane: usize, now: Instant) {
        let dialing = &mut self.lanes[lane];
        let end = dialing.route_until.unwrap_or(self.deadline);
        dialing.deadline = match self.good {
            Some(good) if good != dialing.route => end.min(now + HANDSHAKE_BESIDE),
            _ => end,
        };
    }

    /// Returns the connected stream of a lane, and sets the lane's route to its route; otherwise
    /// returns the streams that still wait. Fails once none is left, with the error of the last
    /// one.
    fn answered(
        &mut self,
        lane: usize,
        syns: Vec<Syn>,
    ) -> std::io::Result<Result<Stream, Vec<Syn>>> {
        let mut waiting = Vec::new();
        let mut failed = Vec::new();
        for syn in syns {
            match syn.stream.connect_result() {
                Ok(Some(())) => {
                    self.lanes[lane].route = syn.route;
                    return Ok(Ok(syn.stream));
                }
                Ok(None) => waiting.push(syn),
                Err(error) => failed.push((syn.route, error)),
            }
        }
        waiting.retain(|syn| failed.iter().all(|(route, _)| *route != syn.route));
        let Some(next) = waiting.first().map(|syn| syn.route) else {
            let last = failed.pop();
            for (route, error) in failed {
                if last.as_ref().is_some_and(|(other, _)| *other != route) {
                    self.rule_out(lane, route, error.into());
                }
            }
            let Some((route, error)) = last else {
                return Err(std::io::ErrorKind::NotConnected.into());
            };
            self.lanes[lane].route = route;
            return Err(error);
        };
        for (route, error) in failed {
            self.rule_out(lane, route, error.into());
            if self.lanes[lane].route == route {
                self.lanes[lane].route = next;
            }
        }
        Ok(Err(waiting))
    }

    fn greet(
        &self,
        lane: usize,
        stream: Stream,
        core: &SessionCore,
        offer: Offer,
    ) -> Result<LaneState, LaneError> {
        let window =
            NonZeroU32::new(core.context().config.window() as u32).unwrap_or(NonZeroU32::MIN);
        let ip = stream.local_addr()?.ip();
        // Behind an address mapping, the address that the peer sees has no listener.
        let is_mapped = !core.context().config.advertise().keeps_own();
        let mut own = core.parts.addresses.iter();
        let listening = own.find(|a| a.ip() == ip && !is_mapped);
        let hello = self.lane_hello(lane, window, listening.map_or(0, |a| a.port()));
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

/// Adds a failure; equal failures of several lanes are merged.
fn add_failure(failures: &mut Vec<error::Attempt>, failure: error::Attempt) {
    if !failures.contains(&failure) {
        failures.push(failure);
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
    // The handshake's error comes first: a failed send only tells that the peer has closed.
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
mod tests;
