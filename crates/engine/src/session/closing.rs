//! Closing a session, or flushing one peer: everything that was queued before reaches its peers.
//!
//! Each lane of each connection gets a ping behind everything queued on it. The peer answers a ping
//! after it has handled everything before it, so the answers mean that notifications are delivered
//! and acknowledgements were read. Only then does a closing session say goodbye.

use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::error::Error;
use crate::link::Mark;
use crate::log::limited;
use crate::peers::{PeerShared, SessionCore};
use crate::transfer::deadline;

/// Limits how long closing waits for peers; `peer_timeout` applies if it is shorter. Long enough
/// for a connection in progress and for peers under load, bearable if a peer has vanished silently.
///
/// A plugin may take longer to connect: closing first waits for that, up to `connect_timeout`.
const CLOSE_TIME: Duration = Duration::from_secs(5);

/// The first and the longest interval of checks for answers. A round trip takes at least some tens
/// of microseconds.
const FIRST_LOOK: Duration = Duration::from_micros(50);
const LAST_LOOK: Duration = Duration::from_millis(5);

/// Waits until every peer has received everything, or is unreachable, or the time is over.
pub(super) fn flush(core: &SessionCore) {
    let limit = CLOSE_TIME.min(core.context().config.peer_timeout());
    let (to_connect, to_answer) = match core.parts.slow_connect {
        Some(slow) => (limit.max(slow), Some(limit)),
        None => (limit, None),
    };
    let deadline = Instant::now() + to_connect;
    let peers = core.all_peers().into_iter();
    let mut leaving: Vec<_> = peers.map(|peer| Leaving::new(peer, deadline)).collect();
    let mut pause = FIRST_LOOK;
    loop {
        leaving.retain_mut(|peer| !peer.has_everything(to_answer));
        if leaving.is_empty() {
            return;
        }
        let now = Instant::now();
        if leaving.iter().all(|peer| now >= peer.deadline) {
            break;
        }
        sleep(pause);
        pause = (2 * pause).min(LAST_LOOK);
    }
    for Leaving { peer, .. } in leaving {
        limited!(
            WARN,
            peer = peer.name(),
            remedy = "see whether the peer's process is stopped or its network is gone",
            "the session closes without an answer from a peer, which may not have received \
             everything"
        );
    }
}

/// Waits until a peer has received everything.
///
/// # Errors
/// As for [`crate::Peer::flush`].
pub(super) fn flush_peer(peer: &Arc<PeerShared>, timeout: Duration) -> Result<(), Error> {
    let mut leaving = Leaving::new(Arc::clone(peer), deadline(timeout));
    let mut pause = FIRST_LOOK;
    while !leaving.has_everything(None) {
        let left = leaving.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Error::Timeout {
                what: "the peer's answer",
                after: timeout,
            });
        }
        sleep(pause.min(left));
        pause = (2 * pause).min(LAST_LOOK);
    }
    match peer.link() {
        Some(link) => link.error().map_or(Ok(()), Err),
        None => Err(Error::PeerNotConnected(peer.name().to_owned())),
    }
}

/// A peer whose queued messages are being flushed.
struct Leaving {
    peer: Arc<PeerShared>,
    /// Set once nothing waits for a connection.
    marks: Option<Vec<Box<dyn Mark>>>,
    /// When waiting for the peer ends.
    deadline: Instant,
}

impl Leaving {
    fn new(peer: Arc<PeerShared>, deadline: Instant) -> Self {
        Self {
            peer,
            marks: None,
            deadline,
        }
    }

    /// Returns whether the peer has received everything. Once there is a connection, the answer has
    /// `to_answer` to arrive, if given.
    fn has_everything(&mut self, to_answer: Option<Duration>) -> bool {
        if self.marks.is_none() && self.peer.has_waiting_notifications() {
            return false;
        }
        let marks = self.marks.get_or_insert_with(|| {
            if let Some(limit) = to_answer {
                self.deadline = Instant::now() + limit;
            }
            self.peer.links().iter().map(|link| link.mark()).collect()
        });
        marks.retain_mut(|mark| !mark.is_reached());
        marks.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use crate::testing::{LONG, Pair, session, wait_until};
    use crate::{Buffer, Error};

    #[test]
    fn flushing_waits_for_the_connection_and_the_peer() {
        for _ in 0..20 {
            let (alice, bob) = (session("alice"), session("bob"));
            let to_bob = alice.add_peer(&bob.connection_info()).unwrap();
            let unconnected = Err(Error::PeerNotConnected("bob".into()));
            assert_eq!(to_bob.flush(LONG), unconnected);
            for message in [b"1", b"2"] {
                alice.notify(&to_bob, message).unwrap();
                to_bob.flush(LONG).unwrap();
                assert_eq!(bob.notifications().len(), 1);
            }
            bob.close();
            assert!(to_bob.flush(LONG).is_err());
        }
    }

    /// A connection that ends after the control thread is taken apart all the same.
    #[test]
    fn connection_that_ends_during_closing_leaks_nothing() {
        let pair = Pair::new();
        let buffer = Buffer::new(64);
        let region = pair.alice.register(&buffer).unwrap();
        let never_sent = pair.alice.recv(&pair.to_bob, region.at(0), 64, 7).unwrap();

        let core = Arc::downgrade(pair.alice.core());
        pair.alice.core().parts.control.stop();
        let control = &pair.alice.core().parts.control;
        wait_until("the control thread has ended", || control.has_stopped());
        pair.bob.close();
        pair.alice.close();
        let error = never_sent.wait(LONG).unwrap_err();
        assert!(matches!(error, Error::Closed | Error::PeerLost { .. }));
        drop((never_sent, region, pair));
        assert!(core.upgrade().is_none());
    }

    #[test]
    fn sessions_that_close_at_once_leak_nothing() {
        for _ in 0..50 {
            let Pair { alice, bob, .. } = Pair::new();
            let cores = [&alice, &bob].map(|session| Arc::downgrade(session.core()));
            std::thread::scope(|scope| {
                scope.spawn(|| drop(alice));
                scope.spawn(|| drop(bob));
            });
            assert!(cores.iter().all(|core| core.upgrade().is_none()));
        }
    }

    /// Messages are being matched, and their bytes read,
    /// while the peer is removed and the session closes.
    #[test]
    fn messages_do_not_keep_a_closing_session_alive() {
        const MESSAGES: usize = 300;
        const LEN: usize = 16 << 10;
        for round in 0..50 {
            let pair = Pair::new();
            let [here, there] = [&pair.alice, &pair.bob].map(|session| {
                let buffer = Buffer::new(LEN);
                session.register(&buffer).unwrap()
            });
            let receive = |_| pair.alice.recv(&pair.to_bob, here.at(0), LEN, 7).unwrap();
            let receives: Vec<_> = (0..MESSAGES).map(receive).collect();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let send = |_| pair.bob.send(&pair.to_alice, there.at(0), LEN, 7).ok();
                    let sends: Vec<_> = (0..MESSAGES).map_while(send).collect();
                    for send in sends {
                        let ended = send.wait(LONG);
                        assert!(!matches!(ended, Err(Error::Timeout { .. })));
                    }
                });
                std::thread::sleep(Duration::from_micros(200 + round * 37 % 3000));
                pair.alice.remove_peer("bob").unwrap();
                pair.alice.close();
            });
            for receive in &receives {
                let ended = receive.wait(LONG);
                assert!(!matches!(ended, Err(Error::Timeout { .. })));
            }
            let core = Arc::downgrade(pair.alice.core());
            drop((receives, here, there, pair));
            assert!(core.upgrade().is_none());
        }
    }

    #[test]
    fn waiting_calls_fail_when_the_session_closes() {
        for _ in 0..20 {
            let alice = session("alice");
            let (tell, told) = channel();
            std::thread::scope(|scope| {
                let (alice, tell_too) = (&alice, tell.clone());
                scope.spawn(move || {
                    tell.send(()).unwrap();
                    assert!(matches!(alice.accept(Duration::MAX), Err(Error::Closed)));
                });
                scope.spawn(move || {
                    tell_too.send(()).unwrap();
                    let notification = alice.wait_notification(Duration::MAX);
                    assert!(matches!(notification, Err(Error::Closed)));
                });
                told.recv().unwrap();
                told.recv().unwrap();
                alice.close();
            });
        }
    }
}
