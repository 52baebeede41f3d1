//! The readings of the last minute.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use tcpx::stats::{PeerStats, ProcessStats};

use super::read::{Reading, Silent};

/// How far back plots reach.
pub(crate) const SPAN: Duration = Duration::from_secs(60);

/// The last two readings of all processes.
#[derive(Debug, Default)]
pub(crate) struct Model {
    pub(crate) processes: BTreeMap<String, Process>,
    pub(crate) silent: Vec<Silent>,
}

/// One process.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) now: ProcessStats,
    /// The previous reading; none at first.
    pub(crate) before: Option<ProcessStats>,
    /// The recent past of each session, and of each of its peers.
    past: BTreeMap<(u64, Option<String>), Past>,
}

/// The recent past of a session or peer.
#[derive(Debug, Default, Clone)]
pub(crate) struct Past {
    /// Bytes per second in both directions, each with the end of its interval on the process's
    /// clock.
    rates: VecDeque<(Duration, f64)>,
    /// When bytes moved last, or when the first reading was made.
    moved: Duration,
}

impl Past {
    fn add(&mut self, at: Duration, rate: f64) {
        if rate > 0.0 || self.rates.is_empty() {
            self.moved = at;
        }
        self.rates.push_back((at, rate));
        let oldest = at.saturating_sub(SPAN);
        while self.rates.front().is_some_and(|(at, _)| *at <= oldest) {
            self.rates.pop_front();
        }
    }

    /// Returns the mean rates of `count` equal parts of the last minute, the latest last.
    pub(crate) fn parts(&self, count: usize) -> Vec<f64> {
        let mut parts = vec![(0.0, 0u32); count];
        let Some((now, _)) = self.rates.back() else {
            return vec![0.0; count];
        };
        for (at, rate) in &self.rates {
            let age = now.saturating_sub(*at).as_secs_f64() / SPAN.as_secs_f64();
            let back = ((age * count as f64) as usize).min(count - 1);
            let (sum, number) = &mut parts[count - 1 - back];
            *sum += rate;
            *number += 1;
        }
        let mean = |(sum, number): &(f64, u32)| sum / f64::from((*number).max(1));
        parts.iter().map(mean).collect()
    }

    /// Returns for how long no bytes have moved.
    pub(crate) fn idle(&self) -> Duration {
        let now = self.rates.back().map_or(self.moved, |(at, _)| *at);
        now.saturating_sub(self.moved)
    }
}

impl Model {
    /// Adds a reading. Processes that are missing in it are forgotten.
    pub(crate) fn update(&mut self, reading: Reading) {
        let mut old = std::mem::take(&mut self.processes);
        for (name, now) in reading.processes {
            let process = match old.remove(&name) {
                Some(mut process) => {
                    process.before = Some(std::mem::replace(&mut process.now, now));
                    process
                }
                None => Process {
                    now,
                    before: None,
                    past: BTreeMap::new(),
                },
            };
            self.processes.insert(name, process.advanced());
        }
        self.silent = reading.silent;
    }
}

impl Process {
    fn advanced(mut self) -> Self {
        let mut past = std::mem::take(&mut self.past);
        let mut kept = BTreeMap::new();
        for session in &self.now.sessions {
            let id = session.id;
            let mut both = 0.0;
            for peer in &session.stats.peers {
                let (sent, received) = self.rates(id, &peer.name);
                both += sent + received;
                let key = (id, Some(peer.name.clone()));
                let mut one = past.remove(&key).unwrap_or_default();
                one.add(self.now.at, sent + received);
                kept.insert(key, one);
            }
            let mut one = past.remove(&(id, None)).unwrap_or_default();
            one.add(self.now.at, both);
            kept.insert((id, None), one);
        }
        self.past = kept;
        self
    }

    /// Returns the recent past of a session, or of one of its peers.
    pub(crate) fn past(&self, session: u64, peer: Option<&str>) -> Past {
        let key = (session, peer.map(str::to_owned));
        self.past.get(&key).cloned().unwrap_or_default()
    }

    /// Returns a peer in the previous reading.
    pub(crate) fn peer_before(&self, session: u64, peer: &str) -> Option<&PeerStats> {
        self.before.as_ref()?.session(session)?.peer(peer)
    }

    /// Returns the time between the two readings; none if there is only one.
    pub(crate) fn elapsed(&self) -> Option<Duration> {
        let before = self.before.as_ref()?;
        let elapsed = self.now.at.saturating_sub(before.at);
        (!elapsed.is_zero()).then_some(elapsed)
    }

    /// Returns the bytes per second sent to and received from a peer.
    pub(crate) fn rates(&self, session: u64, peer: &str) -> (f64, f64) {
        let now = self.now.session(session).and_then(|one| one.peer(peer));
        let (Some(now), Some(elapsed)) = (now, self.elapsed()) else {
            return (0.0, 0.0);
        };
        // A peer that is new has moved all its bytes since the previous reading.
        let before = self.peer_before(session, peer).map(PeerStats::total);
        let before = before.unwrap_or_default();
        let rate = |now: u64, then: u64| now.saturating_sub(then) as f64 / elapsed.as_secs_f64();
        let total = now.total();
        (
            rate(total.sent().bytes, before.sent().bytes),
            rate(total.received().bytes, before.received().bytes),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_plot_has_the_last_minute_and_nothing_older() {
        let mut past = Past::default();
        for second in 0..100 {
            past.add(second * SECOND, f64::from(second));
        }
        let parts = past.parts(6);
        let expected = [44.5, 54.5, 64.5, 74.5, 84.5, 94.5];
        assert_eq!(parts, expected);
        assert_eq!(Past::default().parts(3), [0.0; 3]);
        let mut short = Past::default();
        short.add(SECOND, 7.0);
        assert_eq!(short.parts(3), [0.0, 0.0, 7.0]);
    }

    #[test]
    fn idle_times_begin_with_the_last_byte() {
        let mut past = Past::default();
        past.add(SECOND, 0.0);
        past.add(3 * SECOND, 0.0);
        assert_eq!(past.idle(), 2 * SECOND);
        past.add(4 * SECOND, 1.0);
        past.add(9 * SECOND, 0.0);
        assert_eq!(past.idle(), 5 * SECOND);
    }
}
