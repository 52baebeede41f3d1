//! Fixtures for unit tests of several modules: two sessions in this process.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::link::tcp::Connection;
use crate::peers::SessionCore;
use crate::{Config, Peer, Session};

/// A limit for events that must happen, long enough for a busy machine.
pub(crate) const LONG: Duration = Duration::from_secs(60);

/// A session whose transfers use lanes.
pub(crate) fn session(name: &str) -> Session {
    session_with(name, "off")
}

/// A session with this setting of `same_host`.
pub(crate) fn session_with(name: &str, same_host: &str) -> Session {
    let config = Config::defaults().with("interfaces", "lo").unwrap();
    let config = config.with("same_host", same_host).unwrap();
    Session::new(config.with("name", name).unwrap()).unwrap()
}

#[track_caller]
pub(crate) fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + LONG;
    while !condition() {
        assert!(Instant::now() < end, "timed out waiting until {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Two sessions in this process; Alice has connected to Bob.
pub(crate) struct Pair {
    pub(crate) alice: Session,
    pub(crate) bob: Session,
    pub(crate) to_bob: Peer,
    pub(crate) to_alice: Peer,
}

impl Pair {
    pub(crate) fn new() -> Self {
        Self::of(session("alice"), session("bob"))
    }

    /// Two sessions that copy each other's memory directly.
    pub(crate) fn on_same_host() -> Self {
        Self::of(
            session_with("alice", "require"),
            session_with("bob", "require"),
        )
    }

    /// These two.
    pub(crate) fn of(alice: Session, bob: Session) -> Self {
        let to_bob = alice.add_peer(&bob.connection_info()).unwrap();
        to_bob.connect(LONG).unwrap();
        let to_alice = bob.accept(LONG).unwrap();
        Self {
            alice,
            bob,
            to_bob,
            to_alice,
        }
    }
}

/// The only connection of a session.
pub(crate) fn connection(core: &SessionCore) -> Arc<Connection> {
    let link = core.context().links().pop().expect("connected");
    link.as_any().downcast().expect("a connection")
}
