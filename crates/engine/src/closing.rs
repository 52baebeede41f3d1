//! The end of a session: what it was given to send before reaches its peers.
//!
//! Each lane of each connection gets a ping behind everything else that waits to leave on it. The peer answers a ping once it has
//! dealt with what came before it, so that the answers mean that notifications are delivered and that acknowledgements
//! were read. Only then does the session say goodbye.

use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::core::Core;
use crate::peer::PeerShared;
use crate::transport::tcp::Mark;

/// How long closing waits for peers at the most; less where `peer_timeout` is less. Long enough for a connection that
/// is still being made and for peers under load, bearable where a peer has vanished without a word.
///
/// A plugin may take longer to make a connection: that is waited for first, as long as connecting may take.
const CLOSE_TIME: Duration = Duration::from_secs(5);

/// How soon the answers are looked for, and how seldom in the end. A round trip takes from some tens of microseconds on.
const FIRST_LOOK: Duration = Duration::from_micros(50);
const LAST_LOOK: Duration = Duration::from_millis(5);

/// Waits until every peer has what was sent to it, or cannot be reached, or the time is over.
pub(crate) fn flush(core: &Core) {
    let limit = CLOSE_TIME.min(core.config.peer_timeout());
    let (to_connect, to_answer) = match core.net {
        Some(_) => (limit.max(core.config.connect_timeout()), Some(limit)),
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
    marks: Option<Vec<Mark>>,
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
            self.peer.connections().iter().map(Mark::new).collect()
        });
        marks.retain(|mark| !mark.is_reached());
        marks.is_empty()
    }
}
