//! The end of a session: what it was given to send before reaches its peers.
//!
//! Each lane of each connection gets a ping behind everything else that waits to leave on it. The peer answers a ping once it has
//! dealt with what came before it, so that the answers mean that notifications are delivered and that acknowledgements
//! were read. Only then does the session say goodbye.

use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::link::Mark;
use crate::peers::{PeerShared, SessionCore};

/// How long closing waits for peers at the most; less where `peer_timeout` is less. Long enough for a connection that
/// is still being made and for peers under load, bearable where a peer has vanished without a word.
///
/// A plugin may take longer to make a connection: that is waited for first, as long as connecting may take.
const CLOSE_TIME: Duration = Duration::from_secs(5);

/// How soon the answers are looked for, and how seldom in the end. A round trip takes from some tens of microseconds on.
const FIRST_LOOK: Duration = Duration::from_micros(50);
const LAST_LOOK: Duration = Duration::from_millis(5);

/// Waits until every peer has what was sent to it, or cannot be reached, or the time is over.
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
        tracing::warn!(
            peer = peer.name(),
            "the session closes without an answer from a peer, which may not get everything that was sent to it"
        );
    }
}

/// A peer that the session is about to leave.
struct Leaving {
    peer: Arc<PeerShared>,
    /// Once nothing waits for a connection.
    marks: Option<Vec<Box<dyn Mark>>>,
    /// When it is no longer waited for.
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

    /// Once there is a connection, the answer has `to_answer` to come, if it has a time of its own.
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

    /// A connection that ends when the control thread no longer looks is taken apart all the same.
    #[test]
    fn what_ends_as_the_session_closes_fails_and_holds_nothing() {
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
    fn sessions_that_leave_each_other_at_once_hold_nothing() {
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

    /// Messages are being matched, and their bytes read, as the peer is removed and the session closes.
    #[test]
    fn messages_do_not_keep_a_session_that_closes() {
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
    fn whoever_waits_learns_that_the_session_closes() {
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
