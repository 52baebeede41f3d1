//! Resolution of peers' host names for each connection.
//!
//! The connecting side resolves the names: the name of a pod stays while its address changes, and
//! may have another address here than at the peer. A resolver may block for long, so a separate
//! thread calls it, and the control thread continues.

use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tcpx_proto::info::{ConnectionInfo, NamedAddress};

use super::{ControlLoop, Tokens};
use crate::error::{Error, IoError};
use crate::link::{Link, is_same_link};
use crate::peers::PeerShared;
use crate::sync::{Mutex, Rank};

/// Limits how long names may take if the peer also has addresses:
/// these are then tried without the names.
const PATIENCE: Duration = Duration::from_secs(1);

/// The use of the resolved addresses.
pub(super) enum Purpose {
    /// A connection to a peer.
    Dial(Arc<PeerShared>),
    /// A new stream for the last lane of a link.
    Rejoin {
        peer: Arc<PeerShared>,
        link: Arc<dyn Link>,
        lane: usize,
        tries: u32,
    },
}

/// A request that waits for addresses.
struct Waiting {
    purpose: Purpose,
    info: ConnectionInfo,
    until: Instant,
}

/// The addresses of the names, and the last failure: the name, and the resolver's error.
#[derive(Default)]
struct Answer {
    addresses: Vec<SocketAddr>,
    failure: Option<(String, IoError)>,
}

/// Names being resolved.
pub(super) struct Resolving {
    waiting: Tokens<Waiting>,
    answers: Arc<Mutex<Vec<(u64, Answer)>>>,
}

impl Resolving {
    pub(super) fn new() -> Self {
        Self {
            waiting: Tokens::default(),
            answers: Arc::new(Mutex::new(Rank::Leaf, Vec::new())),
        }
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        self.waiting.values().map(|waiting| waiting.until).min()
    }

    /// Returns whether a new stream for a lane waits for addresses.
    pub(super) fn rejoins(&self, link: &Arc<dyn Link>, lane: usize) -> bool {
        self.waiting.values().any(|waiting| match &waiting.purpose {
            Purpose::Dial(_) => false,
            Purpose::Rejoin {
                link: l, lane: n, ..
            } => *n == lane && is_same_link(l, link),
        })
    }

    /// Fails all requests that wait for a connection.
    pub(super) fn abandon(&mut self, error: &Error) {
        for (_, waiting) in std::mem::take(&mut self.waiting) {
            if let Purpose::Dial(peer) = waiting.purpose {
                peer.unreachable(error);
            }
        }
    }
}

impl ControlLoop {
    /// Continues with the addresses of a peer: at once if its info has no names.
    pub(super) fn resolve(&mut self, info: ConnectionInfo, purpose: Purpose) {
        if info.names().is_empty() {
            return self.resolved(info, purpose, Answer::default());
        }
        let token = self.token();
        let names = info.names().to_vec();
        let (answers, control) = (
            Arc::clone(&self.resolving.answers),
            Arc::clone(&self.core.parts.control),
        );
        let ask = move || {
            let answer = ask(&names);
            answers.lock().push((token, answer));
            control.wake();
        };
        let thread = std::thread::Builder::new().name("tcpx-resolve".into());
        if let Err(error) = thread.spawn(ask) {
            let failure = ("a host name".to_owned(), error.into());
            let answer = Answer {
                addresses: Vec::new(),
                failure: Some(failure),
            };
            return self.resolved(info, purpose, answer);
        }
        let limit = match info.addresses().is_empty() {
            true => self.core.context().config.connect_timeout(),
            false => PATIENCE,
        };
        let waiting = Waiting {
            purpose,
            info,
            until: Instant::now() + limit,
        };
        self.resolving.waiting.insert(token, waiting);
    }

    /// Continues requests that were resolved, or take too long.
    pub(super) fn expire_resolving(&mut self, now: Instant) {
        let answers = std::mem::take(&mut *self.resolving.answers.lock());
        for (token, answer) in answers {
            if let Some(waiting) = self.resolving.waiting.remove(&token) {
                self.resolved(waiting.info, waiting.purpose, answer);
            }
        }
        let waiting = self.resolving.waiting.iter();
        let late = waiting.filter(|(_, waiting)| waiting.until <= now);
        for token in late.map(|(token, _)| *token).collect::<Vec<_>>() {
            if let Some(waiting) = self.resolving.waiting.remove(&token) {
                let host = waiting.info.names().last().map(ToString::to_string);
                let error = std::io::Error::from(std::io::ErrorKind::TimedOut);
                let answer = Answer {
                    addresses: Vec::new(),
                    failure: host.map(|host| (host, error.into())),
                };
                self.resolved(waiting.info, waiting.purpose, answer);
            }
        }
    }

    /// Connects to the addresses of an info and of its names.
    fn resolved(&mut self, info: ConnectionInfo, purpose: Purpose, answer: Answer) {
        let mut addresses = info.addresses().to_vec();
        for address in answer.addresses {
            if !addresses.contains(&address) {
                addresses.push(address);
            }
        }
        match purpose {
            Purpose::Rejoin {
                peer,
                link,
                lane,
                tries,
            } => self.rejoin_at(peer, info, &link, lane, tries, &addresses),
            Purpose::Dial(peer) if peer.is_removed() => {}
            Purpose::Dial(peer) => match (addresses.is_empty(), answer.failure) {
                (true, Some((host, source))) => peer.unreachable(&Error::PeerNotResolved {
                    peer: peer.name().to_owned(),
                    host,
                    source,
                }),
                _ => self.dial_at(&peer, info, &addresses),
            },
        }
    }
}

/// Resolves all names with the system's resolver.
fn ask(names: &[NamedAddress]) -> Answer {
    let mut answer = Answer::default();
    for host in names {
        match (host.name.as_str(), host.port).to_socket_addrs() {
            Ok(addresses) => answer.addresses.extend(addresses),
            Err(error) => answer.failure = Some((host.name.to_string(), error.into())),
        }
    }
    if answer.addresses.is_empty() && answer.failure.is_none() {
        let nothing = std::io::Error::from(std::io::ErrorKind::NotFound);
        let host = names.last().map(ToString::to_string).unwrap_or_default();
        answer.failure = Some((host, nothing.into()));
    }
    answer
}
