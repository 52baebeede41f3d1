//! Connection numbers, and peers that have connected.
//!
//! The engine has one connection between two sessions, whichever side made it. The interface
//! identifies connections by number, on both sides, and one side's `accept` waits for the other's
//! `connect`. So the connecting side announces itself in a notification, with a number of its own,
//! which also keeps messages of different connections apart.

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tcpx::{Error, ErrorKind, LostCause, Notification, Peer, Session};

/// Magic bytes at the start of the notification.
const HELLO: &[u8; 8] = b"p2phello";

/// How long to wait for a peer's confirmation of a connection.
const ANSWER: Duration = Duration::from_secs(1);

/// The call that requested a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Way {
    /// `connect`: for `accept`.
    Network,
    /// `connect_local`: for `accept_local`.
    Local,
}

/// One connection.
#[derive(Clone)]
pub(super) struct Connection {
    pub(super) peer: Peer,
    /// The tags of messages in each direction, the same on both sides.
    pub(super) send_tag: u64,
    pub(super) recv_tag: u64,
    /// Number of times that the peer had been lost when the connection was created.
    losses: u64,
}

impl Connection {
    fn new(peer: Peer, send_tag: u64, recv_tag: u64) -> Self {
        Self {
            losses: peer.losses(),
            peer,
            send_tag,
            recv_tag,
        }
    }

    /// Returns why the connection carries no more messages, if so: the accepting side does not know
    /// a connection made in its place.
    pub(super) fn lost(&self) -> Option<Error> {
        (self.peer.losses() != self.losses).then(|| Error::PeerLost {
            peer: self.peer.name().to_owned(),
            cause: LostCause::Stale,
        })
    }
}

/// The announcement of a peer that connected.
pub(super) struct Hello {
    way: Way,
    number: u64,
    pub(super) gpu: i32,
    pub(super) bdf: String,
}

impl Hello {
    fn encode(&self) -> Vec<u8> {
        let mut bytes = HELLO.to_vec();
        bytes.push(u8::from(self.way == Way::Local));
        bytes.extend(self.number.to_le_bytes());
        bytes.extend(self.gpu.to_le_bytes());
        bytes.extend(self.bdf.as_bytes());
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let rest = bytes.strip_prefix(HELLO)?;
        let (way, rest) = rest.split_first()?;
        let (number, rest) = rest.split_first_chunk()?;
        let (gpu, bdf) = rest.split_first_chunk()?;
        Some(Self {
            way: if *way == 0 { Way::Network } else { Way::Local },
            number: u64::from_le_bytes(*number),
            gpu: i32::from_le_bytes(*gpu),
            bdf: String::from_utf8_lossy(bdf).into_owned(),
        })
    }
}

/// A peer that connected, with its accepted connection.
pub(super) struct Accepted {
    pub(super) id: u64,
    pub(super) ip: IpAddr,
    pub(super) hello: Hello,
}

#[derive(Default)]
pub(super) struct Connections {
    by_id: Mutex<HashMap<u64, Connection>>,
    /// The results of `add_remote_endpoint`, by metadata.
    by_metadata: Mutex<HashMap<Vec<u8>, u64>>,
    next_id: AtomicU64,
    next_number: AtomicU64,
    /// Announcements not accepted yet.
    waiting: Mutex<VecDeque<(String, Hello)>>,
    passive: AtomicBool,
}

impl Connections {
    pub(super) fn get(&self, id: u64) -> Option<Connection> {
        self.by_id.lock().get(&id).cloned()
    }

    pub(super) fn len(&self) -> usize {
        self.by_id.lock().len()
    }

    /// Creates a connection to a connected peer, and announces it.
    pub(super) fn open(
        &self,
        session: &Session,
        peer: Peer,
        way: Way,
        gpu: i32,
        bdf: &str,
    ) -> Result<u64, Error> {
        let number = self.next_number.fetch_add(1, Ordering::Relaxed);
        let hello = Hello {
            way,
            number,
            gpu,
            bdf: bdf.to_owned(),
        };
        session.notify(&peer, &hello.encode())?;
        // A process that ends right after connecting has been heard. A peer that does not answer is
        // gone, which the first transfer will report.
        let _ = peer.flush(ANSWER);
        // The lowest bit tells whether the sender made the connection.
        let connection = Connection::new(peer, number << 1, number << 1 | 1);
        if self.passive.load(Ordering::Relaxed) {
            // No `accept` will take these.
            self.collect(session.notifications());
            self.waiting.lock().clear();
        }
        Ok(self.insert(connection))
    }

    fn insert(&self, connection: Connection) -> u64 {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        self.by_id.lock().insert(id, connection);
        id
    }

    /// Removes a connection. The peer's own side is not affected; a peer that is gone is removed as
    /// well.
    pub(super) fn remove(&self, session: &Session, id: u64) -> bool {
        let Some(connection) = self.by_id.lock().remove(&id) else {
            return false;
        };
        self.by_metadata.lock().retain(|_, known| *known != id);
        if !connection.peer.is_connected() {
            // Fails only if it was removed before.
            let _ = session.remove(&connection.peer);
        }
        true
    }

    pub(super) fn cached(&self, metadata: &[u8]) -> Option<u64> {
        self.by_metadata.lock().get(metadata).copied()
    }

    pub(super) fn cache(&self, metadata: &[u8], id: u64) {
        self.by_metadata.lock().insert(metadata.to_vec(), id);
    }

    /// Declares that `accept` will not be called from now on.
    pub(super) fn be_passive(&self) {
        self.passive.store(true, Ordering::Relaxed);
    }

    /// Waits for the next peer that connects in this way.
    pub(super) fn accept(
        &self,
        session: &Session,
        way: Way,
        timeout: Duration,
    ) -> Result<Accepted, Error> {
        self.collect(session.notifications());
        if let Some(accepted) = self.take(session, way) {
            return Ok(accepted);
        }
        match session.wait_notification(timeout) {
            Ok(notification) => self.collect(vec![notification]),
            Err(error) if error.kind() == ErrorKind::Timeout => {}
            Err(error) => return Err(error),
        }
        self.take(session, way).ok_or(Error::Timeout {
            what: "a connection from a peer",
            after: timeout,
        })
    }

    fn collect(&self, notifications: Vec<Notification>) {
        let hellos = notifications
            .into_iter()
            .filter_map(|n| Some((n.from, Hello::decode(&n.message)?)));
        self.waiting.lock().extend(hellos);
    }

    fn take(&self, session: &Session, way: Way) -> Option<Accepted> {
        let (from, hello) = {
            let mut waiting = self.waiting.lock();
            let position = waiting.iter().position(|(_, hello)| hello.way == way)?;
            waiting.remove(position)?
        };
        let peer = session.peer(&from)?;
        let lanes = peer.lanes();
        let ip = lanes.first().map(|lane| lane.remote.ip());
        let connection = Connection::new(peer, hello.number << 1 | 1, hello.number << 1);
        Some(Accepted {
            id: self.insert(connection),
            ip: ip.unwrap_or(Ipv4Addr::LOCALHOST.into()),
            hello,
        })
    }
}
