//! The counters of all peers of a session.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use super::cells::Sums;
use super::counters::PeerCounters;
use super::data::PeerStats;
use crate::sync::{Mutex, Rank};

/// The limit for peers that are gone and still have counters of their own. The counters of older
/// ones are added to one sum.
pub(crate) const MAX_GONE: usize = 64;

/// The counters of a session's peers, by name. A peer that comes back continues its old counters.
pub(crate) struct Book {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    peers: BTreeMap<String, Entry>,
    /// Names of peers that are gone and still have counters of their own, the oldest first.
    gone: VecDeque<String>,
    /// The sum of the counters of all other peers that are gone.
    sum: Sums,
}

struct Entry {
    counters: Arc<PeerCounters>,
    /// The number of [`OpenPeer`]s of this name. A peer without any is gone: its name is in `gone`.
    users: usize,
}

impl Default for Book {
    fn default() -> Self {
        Self {
            state: Mutex::new(Rank::Book, State::default()),
        }
    }
}

/// The counters of a peer that the session knows. Dropping the last handle of a name marks the peer
/// as gone.
pub(crate) struct OpenPeer {
    book: Arc<Book>,
    name: String,
    counters: Arc<PeerCounters>,
}

impl std::ops::Deref for OpenPeer {
    type Target = Arc<PeerCounters>;

    fn deref(&self) -> &Arc<PeerCounters> {
        &self.counters
    }
}

/// Closes the entry. The last handle of a name marks its peer as gone.
impl Drop for OpenPeer {
    fn drop(&mut self) {
        self.book.state.lock().close(&self.name);
    }
}

impl Book {
    /// Returns the counters of a peer of this name.
    pub(crate) fn open(self: &Arc<Self>, name: &str) -> OpenPeer {
        let mut state = self.state.lock();
        let State { peers, gone, .. } = &mut *state;
        let entry = peers.entry(name.to_owned()).or_insert_with(|| Entry {
            counters: Arc::default(),
            users: 0,
        });
        if entry.users == 0 {
            gone.retain(|known| known != name);
        }
        entry.users += 1;
        OpenPeer {
            book: Arc::clone(self),
            name: name.to_owned(),
            counters: Arc::clone(&entry.counters),
        }
    }

    /// Returns the statistics of each peer that has counters of its own, and the sum of all others.
    pub(crate) fn read(&self) -> (Vec<PeerStats>, PeerStats) {
        let state = self.state.lock();
        let gone = PeerStats::new("", &state.sum);
        let peers = state.peers.iter();
        let peers: Vec<_> = peers
            .map(|(name, entry)| (name.clone(), Arc::clone(&entry.counters)))
            .collect();
        drop(state);
        let peers = peers.into_iter();
        let peers = peers.map(|(name, counters)| PeerStats::new(&name, &counters.sums()));
        (peers.collect(), gone)
    }
}

impl State {
    fn close(&mut self, name: &str) {
        let Some(entry) = self.peers.get_mut(name) else {
            return;
        };
        entry.users -= 1;
        if entry.users > 0 {
            return;
        }
        self.gone.push_back(name.to_owned());
        if self.gone.len() > MAX_GONE
            && let Some(oldest) = self.gone.pop_front()
            && let Some(entry) = self.peers.remove(&oldest)
        {
            self.sum.add_all(&entry.counters.sums());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::PathKind;

    fn bytes(peer: &PeerStats) -> u64 {
        peer.path(PathKind::Local).written.bytes
    }

    #[test]
    fn what_peers_moved_outlives_them_and_costs_no_more_memory() {
        let book = Arc::new(Book::default());
        let all = 3 * MAX_GONE as u64;
        for number in 0..all {
            let peer = book.open(&format!("peer {number:04}"));
            peer.moved(PathKind::Local, true, 1, number + 1);
        }
        let (peers, gone) = book.read();
        assert_eq!(peers.len(), MAX_GONE, "the others are one sum");
        assert!(peers.iter().all(|peer| peer.name.as_str() >= "peer 0128"));
        let kept: u64 = peers.iter().map(bytes).sum();
        assert_eq!(kept + bytes(&gone), all * (all + 1) / 2);
    }

    #[test]
    fn a_peer_that_comes_back_goes_on_where_it_was() {
        let book = Arc::new(Book::default());
        for _ in 0..3 {
            let (first, second) = (book.open("bob"), book.open("bob"));
            first.moved(PathKind::Local, true, 1, 10);
            second.moved(PathKind::Local, true, 1, 1);
        }
        let (peers, _) = book.read();
        let [bob] = &peers[..] else {
            panic!("one peer")
        };
        assert_eq!(bytes(bob), 33);
        // A peer that came back is not in `gone`, so other peers that go do not push it out.
        let _here = book.open("bob");
        for number in 0..=MAX_GONE {
            drop(book.open(&format!("other {number}")));
        }
        assert!(book.read().0.iter().any(|peer| peer.name == "bob"));
    }
}
