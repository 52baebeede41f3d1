//! The last step of connecting: once all lanes are established, their comms are made on a separate
//! thread, if a plugin carries payload. Then the connection is passed to the peer.

use std::sync::Arc;
use std::time::Instant;

use tcpx_proto::frame::down::StreamId;
use tcpx_proto::handshake::{Established, Features, Offer};

use super::ControlLoop;
use super::announce::announce;
use super::listen::ConnectionKey;
use super::rejoin::LONGEST_PAUSE;
use crate::carrier::comm::{Comms, Net, RawLane, set_up};
use crate::config::SameHostKind;
use crate::error::{CommCause, Error};
use crate::link::tcp::{Connection, Lane, Windows};
use crate::link::{Above, Caller, Link, Rejoined};
use crate::log::limited;
use crate::peers::PeerShared;

/// A connection whose lanes have completed their handshakes.
pub(super) struct Joined {
    /// The peer that we dialled; `None` if the peer connected to us.
    pub(super) dialled: Option<Arc<PeerShared>>,
    /// The link for which the only lane is a new stream; `None` for a new connection.
    pub(super) rejoins: Option<Arc<dyn Link>>,
    pub(super) established: Established,
    pub(super) lanes: Vec<RawLane>,
    /// Deadline for the setup of its comms.
    pub(super) deadline: Instant,
}

impl Joined {
    fn name(&self) -> &str {
        self.established.peer_name.as_str()
    }

    /// Converts the connection into the new stream of a lane.
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

/// A joined connection with its comms, or the reason for their failure.
pub(super) struct Plugged {
    joined: Joined,
    comms: Result<Vec<Comms>, CommCause>,
}

/// Goodbye for a client that claims the proven identity or name of another session. Typical cause:
/// a session that was restarted under its old name.
const NOT_PROVEN: &str = "it knows another session by this name or identity: load this session's \
                          connection info there";

/// Returns the features that a session offers and requires in handshakes. A session whose payload
/// travels on a plugin requires comms.
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
    /// Handles a connection whose lanes are all established.
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

    /// Handles the result of the setup of comms.
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
        // If there are several lanes, the last one is the express lane.
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
        // Not before: a peer without a connection is removed.
        let Some(peer) = dialled.or_else(|| self.core.inbound_peer(&established)) else {
            limited!(
                WARN,
                peer = established.peer_name.as_str(),
                remedy = "give sessions names of their own; load the peer's new metadata if it was restarted",
                "refused a connection that claimed the identity or name of another session"
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
        announce(&self.core, &peer, &connection, accepted);
        // Attached before its first frame is read, so that the application can answer at once.
        peer.attached(&link);
        if accepted {
            self.core.accepted(&peer);
        }
        connection.start();
        self.look_for_neighbour(connection.same_host(), info, &established);
    }
}

/// Handles a connection that failed before it was in use; a dialling caller learns the reason.
fn not_in_use(dialled: Option<&Arc<PeerShared>>, error: &Error) {
    match dialled {
        Some(peer) => {
            limited!(DEBUG, peer = peer.name(), %error, "cannot connect");
            peer.unreachable(error);
        }
        None => limited!(
            WARN,
            %error,
            remedy = "none where the peer has ended; else see the error, and the log of the peer",
            "an incoming connection broke during its setup"
        ),
    }
}
