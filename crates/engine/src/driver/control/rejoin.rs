//! New streams for lost lanes, and checks whether a peer still exists.
//!
//! The side that made a connection makes the new streams, at once and then again with growing
//! pauses, as long as the connection lives. The other side waits for them; when it has no lane
//! left, it checks whether its peer still listens: a connection to a process that has ended is
//! given up at once. It repeats the check while it waits, since a process that ends may close its
//! listener last.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tcpx_net::Stream;
use tcpx_proto::handshake::{Client, ClientConfig, HandshakeError, LaneHello, RejectCode};
use tcpx_proto::info::{ConnectionInfo, Secret};

use super::comms::Joined;
use super::dial::Attempt;
use super::resolve::Purpose;
use super::{ControlLoop, Inbound, Tokens, random, send_all};
use crate::carrier::comm::Comms;
use crate::driver::addresses::socket_options;
use crate::error::{AttemptCause, Error, LostCause};
use crate::link::{Link, Wanted, WantedStream, is_same_link};
use crate::log::limited;
use crate::peers::{PeerShared, Route, Routes};

/// Limits how long one attempt at a stream may take.
const ATTEMPT_TIME: Duration = Duration::from_secs(2);

/// The first and the longest pause between two attempts.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
pub(super) const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Time that a peer has to answer a probe.
const PROBE_TIME: Duration = Duration::from_secs(1);

/// A lane that needs a new stream.
#[derive(Clone)]
pub(super) struct Rejoin {
    pub(super) link: Arc<dyn Link>,
    pub(super) wanted: WantedStream,
    /// Number of failed attempts before.
    tries: u32,
}

/// A lane that is retried later.
struct Later {
    at: Instant,
    link: Arc<dyn Link>,
    lane: usize,
    tries: u32,
}

/// A peer that is probed again later.
struct Look {
    at: Instant,
    link: Arc<dyn Link>,
    tries: u32,
}

/// A probe of the address at which a peer has listened.
struct Probe {
    link: Arc<dyn Link>,
    /// Number of earlier probes.
    tries: u32,
    stream: Stream,
    client: Option<Box<Client>>,
    inbound: Inbound,
    until: Instant,
}

#[derive(Default)]
pub(super) struct Rejoins {
    later: Vec<Later>,
    /// Lanes whose new streams, made by this side, are getting their comms.
    plugging: Vec<(Arc<dyn Link>, u16)>,
    probes: Tokens<Probe>,
    /// Peers whose last probe did not show that they are gone.
    looks: Vec<Look>,
}

impl Rejoins {
    pub(super) fn deadline(&self) -> Option<Instant> {
        let later = self.later.iter().map(|later| later.at);
        later
            .chain(self.probes.values().map(|probe| probe.until))
            .chain(self.looks.iter().map(|look| look.at))
            .min()
    }

    pub(super) fn has(&self, token: u64) -> bool {
        self.probes.contains_key(&token)
    }
}

/// Returns the pause after `tries` failed attempts. Extended randomly by up to a half, so that
/// lanes that were lost together do not always return together.
fn pause_after(tries: u32) -> Duration {
    let pause = (FIRST_PAUSE * 2u32.pow(tries.min(8))).min(LONGEST_PAUSE);
    let [byte] = random().unwrap_or([0]);
    pause + pause * u32::from(byte) / 512
}

impl ControlLoop {
    /// Handles the loss of a lane.
    pub(super) fn lane_lost(&mut self, link: &Arc<dyn Link>) {
        self.bring_back(link, 0);
    }

    /// Tries to restore the lost lanes of a link; `tries` counts earlier probes.
    fn bring_back(&mut self, link: &Arc<dyn Link>, tries: u32) {
        for wanted in link.recover() {
            match wanted {
                Wanted::Stream(lane) if !self.is_rejoining(link, lane) => {
                    self.rejoin(link, lane, 0);
                }
                Wanted::Stream(_) => {}
                Wanted::SignOfLife(address) => self.probe(link, address, tries),
            }
        }
    }

    fn is_rejoining(&self, link: &Arc<dyn Link>, lane: usize) -> bool {
        let mut later = self.rejoins.later.iter();
        let mut plugging = self.rejoins.plugging.iter();
        later.any(|l| l.lane == lane && is_same_link(&l.link, link))
            || plugging.any(|(l, index)| usize::from(*index) == lane && is_same_link(l, link))
            || self.resolving.rejoins(link, lane)
            || self.dialing.rejoins().any(|rejoin| {
                usize::from(rejoin.wanted.id.lane) == lane && is_same_link(&rejoin.link, link)
            })
    }

    /// Makes a new stream for a lane.
    fn rejoin(&mut self, link: &Arc<dyn Link>, lane: usize, tries: u32) {
        let Some(wanted) = link.wanted_stream(lane) else {
            return;
        };
        let peers = self.core.all_peers().into_iter();
        let mut owners = peers.filter(|p| p.links().iter().any(|l| is_same_link(l, link)));
        let Some((peer, info)) = owners.next().and_then(|p| p.info().map(|info| (p, info))) else {
            return;
        };
        if !wanted.is_last {
            return self.rejoin_at(peer, info, link, lane, tries, &[]);
        }
        let link = Arc::clone(link);
        let rejoin = Purpose::Rejoin {
            peer,
            link,
            lane,
            tries,
        };
        self.resolve(info, rejoin);
    }

    /// Makes a new stream for a lane, on its own route or to one of these addresses.
    pub(super) fn rejoin_at(
        &mut self,
        peer: Arc<PeerShared>,
        info: ConnectionInfo,
        link: &Arc<dyn Link>,
        lane: usize,
        tries: u32,
        addresses: &[SocketAddr],
    ) {
        let Some(wanted) = link.wanted_stream(lane) else {
            return;
        };
        let home = Route {
            local: Some(wanted.local),
            remote: wanted.remote,
        };
        let mut routes = Routes {
            all: vec![home],
            preferred: 1,
        };
        let others = self.core.routes_to(addresses).all.into_iter();
        routes.all.extend(others.filter(|route| *route != home));
        let rejoin = Rejoin {
            link: Arc::clone(link),
            wanted,
            tries,
        };
        let limit = ATTEMPT_TIME.min(self.core.context().config.connect_timeout());
        self.begin_attempt(Attempt::rejoin(peer, info, rejoin, routes, limit));
    }

    /// Handles a failed attempt at a new stream: ends the connection if the peer no longer knows
    /// it, or no process listens; otherwise retries later.
    pub(super) fn rejoin_failed(&mut self, rejoin: Rejoin, causes: &[AttemptCause]) {
        let Rejoin {
            link,
            wanted,
            tries,
        } = rejoin;
        let forgotten = causes.iter().find_map(|cause| match cause {
            AttemptCause::Handshake(HandshakeError::PeerRejected { code }) if is_final(*code) => {
                Some(*code)
            }
            _ => None,
        });
        let is_refused = |cause: &AttemptCause| matches!(cause, AttemptCause::Io(error) if error.kind() == std::io::ErrorKind::ConnectionRefused);
        let nobody = wanted.is_last && !causes.is_empty() && causes.iter().all(is_refused);
        if let Some(code) = forgotten {
            link.forgotten(code);
        } else if nobody {
            link.give_up();
        } else {
            self.rejoins.later.push(Later {
                at: Instant::now() + pause_after(tries),
                link,
                lane: usize::from(wanted.id.lane),
                tries: tries + 1,
            });
        }
    }

    /// Records that a new stream made by this side is getting its comms:
    /// no other one is made meanwhile.
    pub(super) fn plugging(&mut self, joined: &Joined) {
        if let (Some(_), Some(link)) = (&joined.dialled, &joined.rejoins) {
            let lane = (Arc::clone(link), joined.established.lane);
            self.rejoins.plugging.push(lane);
        }
    }

    /// Ends the state that [`ControlLoop::plugging`] has recorded.
    pub(super) fn no_longer_plugging(&mut self, link: &Arc<dyn Link>, lane: u16) {
        let plugging = &mut self.rejoins.plugging;
        plugging.retain(|(l, index)| *index != lane || !is_same_link(l, link));
    }

    /// Handles a new stream, made by either side.
    pub(super) fn rejoined(&mut self, joined: Joined, comms: Option<Comms>, link: &Arc<dyn Link>) {
        let lane = joined.established.lane;
        let is_ours = joined.dialled.is_some();
        let worker = self.worker_for(lane.into(), link.lanes());
        let Some(rejoined) = joined.into_rejoined(comms, worker) else {
            return;
        };
        if !link.adopt(rejoined) {
            limited!(DEBUG, lane, "a new stream of a lane is not used");
            // The stream may have broken since its handshake.
            if is_ours {
                self.try_again(link, lane, pause_after(0));
            }
        }
    }

    /// Handles a new stream whose comms failed: if this side made it, makes another one later.
    pub(super) fn not_rejoined(&mut self, joined: &Joined, error: &Error) {
        limited!(DEBUG, %error, "cannot set up the new stream of a lane");
        if let (Some(_), Some(link)) = (&joined.dialled, &joined.rejoins) {
            self.try_again(link, joined.established.lane, LONGEST_PAUSE);
        }
    }

    /// Makes another stream for a lane after a pause, if it still needs one then.
    pub(super) fn try_again(&mut self, link: &Arc<dyn Link>, lane: u16, pause: Duration) {
        let lane = usize::from(lane);
        if !self.is_rejoining(link, lane) {
            self.rejoins.later.push(Later {
                at: Instant::now() + pause,
                link: Arc::clone(link),
                lane,
                tries: 1,
            });
        }
    }

    /// Probes an address to check whether the peer that has listened there still exists.
    fn probe(&mut self, link: &Arc<dyn Link>, address: SocketAddr, tries: u32) {
        let mut probes = self.rejoins.probes.values();
        let mut looks = self.rejoins.looks.iter();
        if probes.any(|probe| is_same_link(&probe.link, link))
            || looks.any(|look| is_same_link(&look.link, link))
        {
            return;
        }
        let options = socket_options(&self.core.context().config);
        let token = self.token();
        let stream = match Stream::connect(address, None, &options) {
            Ok(stream) => stream,
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => {
                return link.give_up();
            }
            // The result is unknown: the connection waits for its peer.
            Err(_) => return self.look_again(Arc::clone(link), tries),
        };
        let watched = self.poller.add(&stream, token);
        if watched
            .and_then(|()| self.poller.arm(&stream, token, true))
            .is_err()
        {
            return self.look_again(Arc::clone(link), tries);
        }
        let probe = Probe {
            link: Arc::clone(link),
            tries,
            stream,
            client: None,
            inbound: Inbound::default(),
            until: Instant::now() + PROBE_TIME,
        };
        self.rejoins.probes.insert(token, probe);
    }

    /// Repeats a probe after a pause, if the link still waits for its peer then.
    fn look_again(&mut self, link: Arc<dyn Link>, tries: u32) {
        self.rejoins.looks.push(Look {
            at: Instant::now() + pause_after(tries),
            link,
            tries: tries + 1,
        });
    }

    pub(super) fn probe_ready(&mut self, token: u64) {
        let Some(mut probe) = self.rejoins.probes.remove(&token) else {
            return;
        };
        match self.advance_probe(&mut probe) {
            Ok(true) => {
                if self
                    .poller
                    .arm(&probe.stream, token, probe.client.is_none())
                    .is_ok()
                {
                    self.rejoins.probes.insert(token, probe);
                }
            }
            Err(LostCause::Forgotten(_)) => probe.link.give_up(),
            Err(LostCause::Io(error)) if error.kind() == std::io::ErrorKind::ConnectionRefused => {
                probe.link.give_up();
            }
            // The session exists, or its process is ending: a closing listener resets the probes
            // that it has not accepted.
            Ok(false) | Err(_) => self.look_again(probe.link, probe.tries),
        }
    }

    /// Advances a probe; returns false once it is known that the session exists.
    fn advance_probe(&self, probe: &mut Probe) -> Result<bool, LostCause> {
        let Some(client) = &mut probe.client else {
            if probe.stream.connect_result()?.is_none() {
                return Ok(true);
            }
            let Some(mut client) = self.question(&probe.link)? else {
                return Ok(false);
            };
            while let Some(bytes) = client.poll_transmit() {
                send_all(&probe.stream, &bytes)?;
            }
            probe.client = Some(Box::new(client));
            return Ok(true);
        };
        match probe.inbound.read(&probe.stream) {
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Ok(true),
            result => result?,
        }
        match client.handle(&probe.inbound.bytes) {
            Err(HandshakeError::PeerRejected { code }) if is_final(code) => {
                Err(LostCause::Forgotten(code))
            }
            // The session has answered, as far as this can be checked without its secret.
            Err(_) => Ok(false),
            Ok(_) => Ok(client.established().is_none()),
        }
    }

    /// Makes a greeting for the session at the other end of a link, which only that session
    /// answers. The handshake is not meant to be completed.
    fn question(&self, link: &Arc<dyn Link>) -> Result<Option<Client>, LostCause> {
        let peers = self.core.all_peers().into_iter();
        let mut owners = peers.filter(|p| p.links().iter().any(|l| is_same_link(l, link)));
        let Some(peer) = owners.next() else {
            return Ok(None);
        };
        let unknown = Secret::new([0; 32]);
        let name = self.core.parts.identity.name.clone();
        let Ok(target) =
            ConnectionInfo::new(name, peer.id, unknown, self.core.parts.addresses.clone())
        else {
            return Ok(None);
        };
        let window = std::num::NonZeroU32::MIN;
        let Ok(lane) = LaneHello::new(0, 0, 1, window) else {
            return Ok(None);
        };
        Ok(Some(Client::new(ClientConfig {
            identity: self.core.parts.identity.clone(),
            target: &target,
            lane,
            offer: self.offer,
            nonce: random()?,
        })))
    }

    /// Retries lanes whose pause is over, and repeats unanswered probes.
    pub(super) fn expire_rejoins(&mut self, now: Instant) {
        let probes = &mut self.rejoins.probes;
        let unanswered: Vec<_> = probes.extract_if(|_, probe| probe.until <= now).collect();
        for (_, Probe { link, tries, .. }) in unanswered {
            self.look_again(link, tries);
        }
        let looks = &mut self.rejoins.looks;
        let looks: Vec<_> = looks.extract_if(.., |look| look.at <= now).collect();
        for Look { link, tries, .. } in looks {
            self.bring_back(&link, tries);
        }
        let due: Vec<_> = self
            .rejoins
            .later
            .extract_if(.., |later| later.at <= now)
            .collect();
        for Later {
            link, lane, tries, ..
        } in due
        {
            self.rejoin(&link, lane, tries);
        }
    }
}

/// Returns whether a rejection means that the connection cannot be restored.
fn is_final(code: RejectCode) -> bool {
    matches!(
        code,
        RejectCode::UnknownSession | RejectCode::UnknownConnection | RejectCode::Closing
    )
}
