//! The last step of a connection: its lanes are there; where a plugin carries payload, their comms are made, on a thread of
//! its own. Then it is handed to the peer.

use std::sync::Arc;
use std::time::Instant;

use tcpx_proto::frame::down::StreamId;
use tcpx_proto::handshake::{Established, Features, Offer};

use super::ControlLoop;
use super::listen::ConnectionKey;
use super::rejoin::LONGEST_PAUSE;
use crate::carrier::comm::{Comms, Net, RawLane, set_up};
use crate::config::SameHostKind;
use crate::error::{CommCause, Error};
use crate::link::tcp::{Connection, Lane, Windows};
use crate::link::{Above, Caller, Link, Rejoined};
use crate::log::limited;
use crate::peers::PeerShared;

/// A connection whose lanes have done their handshake.
pub(super) struct Joined {
    /// Whom we have dialled; none if it was the other way round.
    pub(super) dialled: Option<Arc<PeerShared>>,
    /// The link that the one lane is a new stream for; none for a new connection.
    pub(super) rejoins: Option<Arc<dyn Link>>,
    pub(super) established: Established,
    pub(super) lanes: Vec<RawLane>,
    /// Until when its comms must be there.
    pub(super) deadline: Instant,
}

impl Joined {
    fn name(&self) -> &str {
        self.established.peer_name.as_str()
    }

    /// Makes it the new stream of a lane.
    pub(super) fn into_rejoined(
        self,
        comms: Option<Comms>,
        worker: Arc<dyn Caller>,
    ) -> Option<Rejoined> {
        let stream = StreamId {
            lane: self.established.lane,
            generation: self.established.generation,
        };
        let raw = self.lanes.into_iter().next()?;
        Some(Rejoined {
            stream,
            raw,
            comms,
            owners: self.established.owners,
            worker,
        })
    }

    fn key(&self) -> ConnectionKey {
        (self.established.peer_id, self.established.connection)
    }
}

/// The same with its comms, or why there are none.
pub(super) struct Plugged {
    joined: Joined,
    comms: Result<Vec<Comms>, CommCause>,
}

/// What somebody is told who claims what is proven to be another's. Typical cause: a session that was
/// restarted under its old name.
const NOT_PROVEN: &str = "it knows another session by this name or identity: load this session's \
                          connection info there";

/// What a session offers and requires in its handshakes. One whose payload travels on a plugin has no
/// other way.
pub(super) fn offer(net: Option<&Arc<Net>>, has_door: bool, same_host: SameHostKind) -> Offer {
    let comms = match net {
        Some(_) => Features::COMMS,
        None => Features::NONE,
    };
    let beside = match has_door {
        true => Features::SAME_HOST,
        false => Features::NONE,
    };
    let required = match same_host {
        SameHostKind::Require => beside,
        SameHostKind::Auto | SameHostKind::Off => Features::NONE,
    };
    Offer::new(comms | beside, comms | required).expect("both are implemented")
}

impl ControlLoop {
    /// The lanes are there.
    pub(super) fn joined(&mut self, mut joined: Joined) {
        let Some(net) = self.net.clone() else {
            let lanes = joined.lanes.len();
            return self.in_use(joined, (0..lanes).map(|_| None).collect());
        };
        self.plugging(&joined);
        let dialled = joined.dialled.clone();
        let rejoins = joined.rejoins.clone();
        let lane = joined.established.lane;
        let key = joined.key();
        if dialled.is_none() {
            self.incoming.plugging.insert(key, joined.lanes.len());
        }
        let (core, done) = (Arc::clone(&self.core), Arc::clone(&self.plugged));
        let plug = move || {
            let gpu = net.gpu(&core.context().registry);
            let Joined {
                dialled,
                lanes,
                deadline,
                ..
            } = &mut joined;
            let removed = || dialled.as_ref().is_some_and(|peer| peer.is_removed());
            let is_cancelled = || core.is_ending() || removed();
            let comms = set_up(&net, gpu.as_ref(), lanes, *deadline, is_cancelled);
            done.lock().push(Plugged { joined, comms });
            core.parts.control.wake();
        };
        let thread = std::thread::Builder::new().name("tcpx-plugin".into());
        if let Err(error) = thread.spawn(plug) {
            self.incoming.plugging.remove(&key);
            let error = Error::io("cannot start a thread", error);
            match rejoins {
                None => not_in_use(dialled.as_ref(), &error),
                Some(link) => {
                    self.no_longer_plugging(&link, lane);
                    if dialled.is_some() {
                        self.try_again(&link, lane, LONGEST_PAUSE);
                    }
                }
            }
        }
    }

    /// The comms are there, or will not be.
    pub(super) fn plugged(&mut self, plugged: Plugged) {
        let Plugged { joined, comms } = plugged;
        match &joined.rejoins {
            _ if joined.dialled.is_none() => {
                self.incoming.plugging.remove(&joined.key());
            }
            Some(link) => self.no_longer_plugging(link, joined.established.lane),
            None => {}
        }
        match comms {
            Ok(comms) => self.in_use(joined, comms.into_iter().map(Some).collect()),
            Err(cause) => {
                let error = Error::PluginNotConnected {
                    peer: joined.name().to_owned(),
                    cause,
                };
                if joined.rejoins.is_some() {
                    return self.not_rejoined(&joined, &error);
                }
                not_in_use(joined.dialled.as_ref(), &error);
            }
        }
    }

    fn in_use(&mut self, joined: Joined, mut comms: Vec<Option<Comms>>) {
        if let Some(link) = joined.rejoins.clone() {
            let comms = comms.pop().flatten();
            return self.rejoined(joined, comms, &link);
        }
        let accepted = joined.dialled.is_none();
        let Joined {
            dialled,
            established,
            lanes,
            ..
        } = joined;
        let context = self.core.context();
        // The last lane is the one for small transfers, where there are several.
        let bulk = (lanes.len() - self.express_lanes()).max(1);
        let windows = Windows::new(context, &established, bulk);
        let workers = self.workers_for(&lanes, bulk);
        let lanes = lanes.into_iter().zip(comms).zip(workers);
        let lanes: Result<Vec<_>, Error> = (0..)
            .zip(lanes)
            .map(|(lane, ((raw, comms), worker))| {
                let generation = 0;
                let id = StreamId { lane, generation };
                Lane::new(id, raw, comms, windows, worker, context)
            })
            .collect();
        let lanes = match lanes {
            Ok(lanes) => lanes,
            Err(error) => return not_in_use(dialled.as_ref(), &error),
        };
        // Not before: a peer that has no connection is forgotten.
        let Some(peer) = dialled.or_else(|| self.core.inbound_peer(&established)) else {
            limited!(
                WARN,
                peer = established.peer_name.as_str(),
                "a connection claimed an identity, or the name of a loaded peer, that is not its own"
            );
            if let Some(lane) = lanes.first() {
                lane.say_goodbye(NOT_PROVEN);
            }
            return;
        };
        peer.fence(accepted);
        let above = Arc::clone(&peer) as Arc<dyn Above>;
        let info = peer.info().filter(|_| !accepted);
        let connection = Connection::new(
            Arc::clone(context),
            above,
            established.clone(),
            windows,
            lanes,
        );
        let link = Arc::clone(&connection) as Arc<dyn Link>;
        limited!(
            DEBUG,
            peer = peer.name(),
            lanes = link.lanes(),
            accepted,
            "connected"
        );
        // Known before its first frame is read: whoever hears from it can answer.
        peer.attached(&link);
        if accepted {
            self.core.accepted(&peer);
        }
        connection.start();
        self.look_for_neighbour(connection.same_host(), info, &established);
    }
}

/// A connection has failed before it was one; whoever dialled learns why.
fn not_in_use(dialled: Option<&Arc<PeerShared>>, error: &Error) {
    match dialled {
        Some(peer) => {
            limited!(DEBUG, peer = peer.name(), %error, "cannot connect");
            peer.unreachable(error);
        }
        None => limited!(WARN, %error, "a connection broke as it was made"),
    }
}
