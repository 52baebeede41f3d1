//! An attempt to connect to a peer: which lane is on which route, and how far its handshake is.

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

/// The least time that one route gets before the next one is tried.
const MIN_ROUTE_TIME: Duration = Duration::from_millis(500);

/// And at the most, where there are others: it survives two lost SYN packets, and is less than the time for which the
/// acceptor keeps the lanes that have arrived.
const MAX_ROUTE_TIME: Duration = Duration::from_millis(3500);

/// How often a lane is dropped on one route before another one is tried. A peer whose places are all
/// taken, by strangers or by many peers that connect at once, drops connections before they have
/// proven themselves.
const MAX_DROPS: u32 = 5;

/// The pause after the first drop; each further one is twice as long.
const FIRST_PAUSE: Duration = Duration::from_millis(20);

/// How long a SYN may stay unanswered before another one is sent, from a second socket. The kernel would
/// wait for a second, and a peer whose listener is full drops SYNs in silence. The first socket stays: a
/// long way answers that one.
const PATIENCE: Duration = Duration::from_millis(100);

/// How many such SYNs are sent on a route.
const MAX_SYNS: u32 = 8;

/// An attempt to connect to a peer on all lanes.
pub(in crate::driver::control) struct Attempt {
    pub(super) peer: Arc<PeerShared>,
    info: ConnectionInfo,
    connection: u64,
    /// The lost lane that the attempt is for, if it is not for a whole connection.
    pub(in crate::driver::control) rejoin: Option<Rejoin>,
    routes: Routes,
    /// A route that has led to the peer: the first choice of lanes whose own route fails.
    good: Option<usize>,
    pub(super) lanes: Vec<DialLane>,
    pub(super) deadline: Instant,
    route_time: Duration,
    /// What went wrong, for the error.
    pub(super) failures: Vec<error::Attempt>,
}

pub(super) struct DialLane {
    /// Which route this lane is on, and which it has tried.
    route: usize,
    tried: Vec<usize>,
    /// How often it was dropped on this route, how many further SYNs it has sent there, and until when the
    /// route is tried.
    drops: u32,
    syns: u32,
    route_until: Option<Instant>,
    pub(super) token: u64,
    /// When something is due: the end of a pause, of our patience, or of the time that the route has.
    pub(super) deadline: Instant,
    pub(super) state: LaneState,
}

pub(super) enum LaneState {
    /// Between two routes.
    Idle,
    /// Dropped by the peer, and about to try again.
    Pausing,
    Connecting {
        first: Stream,
        /// The one that has sent the last SYN, after the first.
        again: Option<Stream>,
    },
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
pub(super) enum LaneError {
    /// The route failed; another one may lead to the peer.
    Route(AttemptCause),
    /// The connection was dropped before the handshake was over: the same route may do later.
    Dropped(AttemptCause),
    /// The peer has proven itself and does not fit; no route changes that.
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

/// How long a lane tries one of so many routes.
fn route_time(limit: Duration, routes: usize) -> Duration {
    match routes {
        0 | 1 => limit,
        _ => (limit / routes.min(4) as u32).clamp(MIN_ROUTE_TIME, MAX_ROUTE_TIME),
    }
}

/// How long a lane waits that was dropped so often before. Random by a half, so that lanes and peers
/// that were dropped together come back one by one.
fn pause_after(drops: u32) -> Duration {
    let pause = FIRST_PAUSE * 2u32.pow(drops);
    let [byte] = random().unwrap_or([0]);
    pause + pause * u32::from(byte) / 512
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

impl DialLane {
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
    /// Puts lanes on the routes, each on one that is preferred.
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

    /// Makes the attempt at a new stream for a lane that was lost.
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

    /// Returns what a lane's first message says of it.
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

    /// Returns the route that a lane is on.
    pub(super) fn route(&self, lane: usize) -> Route {
        self.routes.all[self.lanes[lane].route]
    }

    /// Notes that a lane has sent its SYN, from this stream.
    pub(super) fn connecting(&mut self, lane: usize, stream: Stream, token: u64, now: Instant) {
        let dialing = &mut self.lanes[lane];
        let end = self.deadline.min(now + self.route_time);
        dialing.route_until.get_or_insert(end);
        dialing.be_patient(now);
        dialing.token = token;
        dialing.state = LaneState::Connecting {
            first: stream,
            again: None,
        };
    }

    pub(super) fn is_complete(&self) -> bool {
        self.lanes
            .iter()
            .all(|l| matches!(l.state, LaneState::Ready { .. }))
    }

    pub(super) fn note(&mut self, lane: usize, cause: AttemptCause) {
        let address = self.route(lane).remote;
        let failure = error::Attempt { address, cause };
        // Lanes that fail alike are one line.
        if !self.failures.contains(&failure) {
            self.failures.push(failure);
        }
    }

    /// Has a lane that was dropped wait before it tries its route again; false when it has done so often
    /// enough, or for as long as the route has.
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

    /// Whether a lane is at the end of its pause.
    pub(super) fn is_pausing(&self, lane: usize) -> bool {
        matches!(self.lanes[lane].state, LaneState::Pausing)
    }

    /// Whether a lane whose deadline has come sends another SYN.
    pub(super) fn needs_syn(&self, lane: usize, now: Instant) -> bool {
        let dialing = &self.lanes[lane];
        matches!(dialing.state, LaneState::Connecting { .. })
            && dialing.route_until.is_some_and(|end| end > now)
    }

    /// Notes that a lane has sent another SYN, from this stream; none if that was not possible.
    pub(super) fn sent_syn(&mut self, lane: usize, stream: Option<Stream>, now: Instant) {
        let dialing = &mut self.lanes[lane];
        dialing.syns += 1;
        dialing.be_patient(now);
        if let LaneState::Connecting { again, .. } = &mut dialing.state {
            // Dropping the one before takes it out of the poller.
            *again = stream;
        }
    }

    /// Puts a lane on the next route worth trying; false when there is none.
    pub(super) fn next_route(&mut self, lane: usize, cause: AttemptCause) -> bool {
        self.note(lane, cause);
        let dialing = &mut self.lanes[lane];
        dialing.drops = 0;
        dialing.syns = 0;
        dialing.route_until = None;
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
    pub(super) fn advance(
        &mut self,
        lane: usize,
        core: &SessionCore,
        offer: Offer,
    ) -> Result<bool, LaneError> {
        let state = std::mem::replace(&mut self.lanes[lane].state, LaneState::Idle);
        let state = match state {
            LaneState::Connecting { first, again } => match connected(first, again)? {
                Ok(stream) => {
                    let dialing = &mut self.lanes[lane];
                    dialing.deadline = dialing.route_until.unwrap_or(dialing.deadline);
                    self.greet(lane, stream, core, offer)?
                }
                Err(connecting) => connecting,
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
        stream: Stream,
        core: &SessionCore,
        offer: Offer,
    ) -> Result<LaneState, LaneError> {
        let window =
            NonZeroU32::new(core.context().config.window() as u32).unwrap_or(NonZeroU32::MIN);
        let ip = stream.local_addr()?.ip();
        let listening = core.parts.addresses.iter().find(|a| a.ip() == ip);
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

/// Returns the stream that is connected, or else the state of a lane that goes on waiting.
fn connected(first: Stream, again: Option<Stream>) -> std::io::Result<Result<Stream, LaneState>> {
    let was_answered = match &again {
        Some(again) => again.connect_result(),
        None => Ok(None),
    };
    Ok(match (first.connect_result()?, again) {
        (Some(()), _) => Ok(first),
        (None, Some(again)) if was_answered?.is_some() => Ok(again),
        (None, again) => Err(LaneState::Connecting { first, again }),
    })
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
    fn pauses_double_and_are_short_in_sum() {
        for drops in 0..MAX_DROPS {
            let (least, pause) = (FIRST_PAUSE * (1 << drops), pause_after(drops));
            assert!(least <= pause && pause < least * 3 / 2, "{pause:?}");
        }
        let longest: Duration = (0..MAX_DROPS).map(|d| FIRST_PAUSE * (1 << d) * 3 / 2).sum();
        assert!(longest < Duration::from_secs(1), "{longest:?}");
    }

    #[test]
    fn a_syn_that_is_not_answered_is_sent_again_a_few_times() {
        let now = Instant::now();
        let end = now + Duration::from_secs(3);
        let mut lane = DialLane {
            route: 0,
            tried: Vec::new(),
            drops: 0,
            syns: 0,
            route_until: Some(end),
            token: 0,
            deadline: end,
            state: LaneState::Idle,
        };
        lane.be_patient(now);
        assert_eq!(lane.deadline, now + PATIENCE);
        // Never longer than the route has.
        let late = end - PATIENCE / 2;
        lane.be_patient(late);
        assert_eq!(lane.deadline, end);
        lane.syns = MAX_SYNS;
        lane.be_patient(now);
        assert_eq!(lane.deadline, end);
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
