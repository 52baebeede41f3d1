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
const CLOSE_TIME: Duration = Duration::from_secs(5);

/// How soon the answers are looked for, and how seldom in the end. A round trip takes from some tens of microseconds on.
const FIRST_LOOK: Duration = Duration::from_micros(50);
const LAST_LOOK: Duration = Duration::from_millis(5);

/// Waits until every peer has what was sent to it, or cannot be reached, or the time is over.
pub(crate) fn flush(core: &Core) {
    let limit = CLOSE_TIME.min(core.config.peer_timeout());
    let deadline = Instant::now() + limit;
    let mut leaving: Vec<_> = core.all_peers().into_iter().map(Leaving::new).collect();
    let mut pause = FIRST_LOOK;
    loop {
        leaving.retain_mut(|peer| !peer.has_everything());
        if leaving.is_empty() {
            return;
        }
        if Instant::now() >= deadline {
            break;
        }
        sleep(pause);
        pause = (2 * pause).min(LAST_LOOK);
    }
    for Leaving { peer, .. } in leaving {
        tracing::warn!(
            peer = peer.name(),
            ?limit,
            "the session closes without an answer from a peer, which may not get everything that was sent to it"
        );
    }
}

/// A peer that the session is about to leave.
struct Leaving {
    peer: Arc<PeerShared>,
    /// Once nothing waits for a connection.
    marks: Option<Vec<Mark>>,
}

impl Leaving {
    fn new(peer: Arc<PeerShared>) -> Self {
        Self { peer, marks: None }
    }

    fn has_everything(&mut self) -> bool {
        if self.marks.is_none() && self.peer.has_waiting_notifications() {
            return false;
        }
        let mark = || self.peer.connections().iter().map(Mark::new).collect();
        let marks = self.marks.get_or_insert_with(mark);
        marks.retain(|mark| !mark.is_reached());
        marks.is_empty()
    }
}
