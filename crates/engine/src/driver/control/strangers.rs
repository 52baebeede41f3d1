//! Places of connections that have not proven themselves, and their eviction when all are taken.
//!
//! A connection that has greeted has sent a whole ClientHello with this session's id, which
//! strangers do not know. Silent connections lose their places first: an honest client greets with
//! its first packet, and is silent only until that packet arrives.
//!
//! Sources share the places. The source with the most places loses its oldest, so that a flood from
//! one address evicts its own connections.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;

/// Source of connections: an IPv4 address, or the 64-bit prefix of an IPv6 network, within which
/// one machine may have any number of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Source(u64);

impl Source {
    fn of(address: IpAddr) -> Self {
        match address.to_canonical() {
            IpAddr::V4(v4) => Self(u64::from(v4.to_bits())),
            IpAddr::V6(v6) => Self((v6.to_bits() >> 64) as u64),
        }
    }
}

/// Connections of a source, by token: the oldest comes first.
#[derive(Default)]
struct Held {
    silent: BTreeSet<u64>,
    greeted: BTreeSet<u64>,
}

struct Place<T> {
    source: Source,
    connection: T,
}

/// Connections that have not proven themselves, by token. Later connections have larger tokens.
pub(super) struct Strangers<T> {
    places: BTreeMap<u64, Place<T>>,
    /// Sources that hold a place.
    sources: HashMap<Source, Held>,
    limit: usize,
}

impl<T> Strangers<T> {
    /// Makes `limit` places.
    pub(super) fn new(limit: usize) -> Self {
        Self {
            places: BTreeMap::new(),
            sources: HashMap::new(),
            limit,
        }
    }

    pub(super) fn is_full(&self) -> bool {
        self.places.len() >= self.limit
    }

    pub(super) fn contains(&self, token: u64) -> bool {
        self.places.contains_key(&token)
    }

    /// Returns the oldest connection.
    pub(super) fn oldest(&self) -> Option<(u64, &T)> {
        let (token, place) = self.places.first_key_value()?;
        Some((*token, &place.connection))
    }

    pub(super) fn insert(&mut self, token: u64, from: IpAddr, has_greeted: bool, connection: T) {
        let source = Source::of(from);
        let held = self.sources.entry(source).or_default();
        match has_greeted {
            true => held.greeted.insert(token),
            false => held.silent.insert(token),
        };
        self.places.insert(token, Place { source, connection });
    }

    pub(super) fn remove(&mut self, token: u64) -> Option<T> {
        let Place { source, connection } = self.places.remove(&token)?;
        if let Some(held) = self.sources.get_mut(&source) {
            held.silent.remove(&token);
            held.greeted.remove(&token);
            if held.silent.is_empty() && held.greeted.is_empty() {
                self.sources.remove(&source);
            }
        }
        Some(connection)
    }

    /// Evicts a connection: the oldest silent one of the source that has the most of them; if all
    /// have greeted, the same among the greeted ones.
    pub(super) fn evict(&mut self) -> Option<T> {
        let silent = self.sources.values().map(|held| &held.silent);
        let greeted = self.sources.values().map(|held| &held.greeted);
        let token = oldest_of_most(silent).or_else(|| oldest_of_most(greeted))?;
        self.remove(token)
    }
}

/// Returns the first element of the largest set; of sets of equal size, the smallest first element.
fn oldest_of_most<'a>(sets: impl Iterator<Item = &'a BTreeSet<u64>>) -> Option<u64> {
    let firsts = sets.filter_map(|set| Some((set.len(), *set.first()?)));
    let most = firsts.max_by_key(|(count, oldest)| (*count, std::cmp::Reverse(*oldest)));
    most.map(|(_, oldest)| oldest)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    /// Makes strangers whose connections are their tokens.
    fn strangers(all: &[(u64, &str, bool)]) -> Strangers<u64> {
        let mut strangers = Strangers::new(100);
        for (token, from, has_greeted) in all {
            strangers.insert(*token, ip(from), *has_greeted, *token);
        }
        strangers
    }

    fn evictions(mut strangers: Strangers<u64>) -> Vec<u64> {
        std::iter::from_fn(|| strangers.evict()).collect()
    }

    #[test]
    fn the_source_with_the_most_loses_its_oldest() {
        let all = [
            (1, "10.0.0.1", false),
            (2, "10.0.0.2", false),
            (3, "10.0.0.2", false),
            (4, "10.0.0.2", false),
            (5, "10.0.0.1", false),
        ];
        // Once both have equally many, the older one is evicted.
        assert_eq!(evictions(strangers(&all)), [2, 1, 3, 4, 5]);
    }

    #[test]
    fn greeted_connections_stay_while_others_are_silent() {
        let all = [
            (1, "10.0.0.1", true),
            (2, "10.0.0.1", true),
            (3, "10.0.0.1", false),
            (4, "10.0.0.2", false),
            (5, "10.0.0.2", true),
        ];
        assert_eq!(evictions(strangers(&all)), [3, 4, 1, 2, 5]);
    }

    #[test]
    fn an_ipv6_network_is_one_source() {
        let all = [
            (1, "10.0.0.1", false),
            (2, "::ffff:10.0.0.1", false),
            (3, "fd00::1", false),
            (4, "fd00::2", false),
            (5, "fd00::ffff:1", false),
            (6, "fd00:0:0:1::1", false),
        ];
        assert_eq!(evictions(strangers(&all)), [3, 1, 4, 2, 5, 6]);
    }

    #[test]
    fn removed_connections_leave_nothing_behind() {
        let mut strangers = strangers(&[(7, "10.0.0.1", false), (8, "10.0.0.2", true)]);
        assert_eq!(strangers.oldest(), Some((7, &7)));
        assert_eq!(strangers.remove(7), Some(7));
        assert_eq!(strangers.remove(7), None);
        assert!(!strangers.contains(7) && strangers.contains(8));
        assert_eq!(strangers.evict(), Some(8));
        assert!(strangers.sources.is_empty() && strangers.oldest().is_none());
        let full = Strangers::<u64>::new(0);
        assert!(full.is_full());
    }
}
