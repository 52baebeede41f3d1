//! The rows of sessions, peers and lanes, as plain data.

use std::collections::BTreeSet;
use std::time::Duration;

use serde::Serialize;
use tcpx::stats::{LaneStats, PathKind, PeerStats, ProcessStats, Traffic};

use super::model::{Model, Process};
use super::read::Silent;

/// The number of parts of the last minute.
const PARTS: usize = 20;

/// How long a peer with transfers in flight may move no bytes before it counts as stalled.
const STALLED: Duration = Duration::from_secs(3);

/// All rows at one moment.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Report {
    /// The sessions of all processes.
    pub(crate) sessions: Vec<Session>,
    /// Processes that could not be read.
    pub(crate) silent: Vec<Silent>,
}

/// One session.
#[derive(Debug, Default, Clone, Serialize)]
pub(crate) struct Session {
    pub(crate) pid: u32,
    /// The name of the process's socket.
    #[serde(skip)]
    pub(crate) process: String,
    /// A number that is unique among the sessions of the process.
    pub(crate) id: u64,
    pub(crate) name: String,
    pub(crate) command: String,
    pub(crate) version: String,
    #[serde(flatten)]
    pub(crate) figures: Figures,
    pub(crate) peers: Vec<Peer>,
}

/// One peer of a session.
#[derive(Debug, Default, Clone, Serialize)]
pub(crate) struct Peer {
    pub(crate) name: String,
    pub(crate) is_connected: bool,
    #[serde(flatten)]
    pub(crate) figures: Figures,
    pub(crate) lanes: Vec<Lane>,
}

/// The figures that sessions and peers have in common.
#[derive(Debug, Default, Clone, Serialize)]
pub(crate) struct Figures {
    /// The path of the bytes: interfaces, `staged`, `same host`, `plugin`.
    pub(crate) path: String,
    pub(crate) sent_bytes_per_second: f64,
    pub(crate) received_bytes_per_second: f64,
    /// Bytes per second in both directions, in equal parts of the last minute, the latest last.
    pub(crate) last_minute: Vec<f64>,
    pub(crate) transfers_in_flight: u64,
    pub(crate) transfers_failed: u64,
    /// Chunks that were moved again because their lane was lost.
    pub(crate) retried_chunks: u64,
    /// Streams of lanes that were lost while their connection continued.
    pub(crate) failovers: u64,
    /// What limits the rate; none while no bytes move.
    pub(crate) limit: Option<String>,
    /// A description of a slow peer or lane, if there is one.
    pub(crate) slow: Option<String>,
}

impl Figures {
    /// Returns the bytes per second, both directions together.
    pub(crate) fn rate(&self) -> f64 {
        self.sent_bytes_per_second + self.received_bytes_per_second
    }
}

/// One lane of a peer.
#[derive(Debug, Default, Clone, Serialize)]
pub(crate) struct Lane {
    pub(crate) index: usize,
    pub(crate) local: String,
    pub(crate) remote: String,
    /// The interface; none if the other end is on this host.
    pub(crate) interface: Option<String>,
    pub(crate) is_up: bool,
    pub(crate) failovers: u32,
    pub(crate) sent_bytes_per_second: f64,
    pub(crate) received_bytes_per_second: f64,
    /// Bytes of this session's chunks in flight on the lane.
    pub(crate) bytes_in_flight: u64,
    pub(crate) round_trip_seconds: f64,
    pub(crate) retransmits: u64,
    /// Why the lane counts as slow, if it does.
    pub(crate) slow: Option<String>,
}

impl Lane {
    /// Returns the bytes per second, both directions together.
    pub(crate) fn rate(&self) -> f64 {
        self.sent_bytes_per_second + self.received_bytes_per_second
    }
}

impl Report {
    /// Computes the rows, ordered by process and session.
    pub(crate) fn new(model: &Model) -> Self {
        let mut sessions: Vec<_> = model
            .processes
            .iter()
            .flat_map(|(name, process)| sessions(name, process))
            .collect();
        sessions.sort_by(|a, b| (a.pid, &a.name, a.id).cmp(&(b.pid, &b.name, b.id)));
        Self {
            sessions,
            silent: model.silent.clone(),
        }
    }

    /// Returns the number of processes that have sessions.
    pub(crate) fn processes(&self) -> usize {
        let names = self.sessions.iter().map(|session| &session.process);
        names.collect::<BTreeSet<_>>().len()
    }
}

fn sessions(name: &str, process: &Process) -> Vec<Session> {
    let now = &process.now;
    let one = |reading: &tcpx::stats::SessionReading| {
        let mut peers: Vec<_> = reading
            .stats
            .peers
            .iter()
            .filter(|peer| is_worth_a_row(peer, &reading.stats.name))
            .map(|one| peer(process, reading.id, one))
            .collect();
        find_slow_peers(&mut peers, |name| {
            process.past(reading.id, Some(name)).idle()
        });
        let sum = |of: fn(&Figures) -> u64| peers.iter().map(|peer| of(&peer.figures)).sum();
        let rate = |of: fn(&Figures) -> f64| peers.iter().map(|peer| of(&peer.figures)).sum();
        // The session shows the limit of the peer that moves the most.
        let busiest = peers
            .iter()
            .max_by(|a, b| a.figures.rate().total_cmp(&b.figures.rate()));
        let paths: BTreeSet<&str> = peers
            .iter()
            .map(|peer| peer.figures.path.as_str())
            .collect();
        let paths: Vec<_> = paths.into_iter().filter(|path| !path.is_empty()).collect();
        let slow = peers.iter().find_map(|peer| {
            let slow = peer.figures.slow.as_ref()?;
            Some(format!("{} {slow}", peer.name))
        });
        let figures = Figures {
            path: paths.join(", "),
            sent_bytes_per_second: rate(|one| one.sent_bytes_per_second),
            received_bytes_per_second: rate(|one| one.received_bytes_per_second),
            last_minute: process.past(reading.id, None).parts(PARTS),
            transfers_in_flight: sum(|one| one.transfers_in_flight),
            transfers_failed: reading.stats.failed(),
            retried_chunks: reading.stats.all().map(|peer| peer.retried.chunks).sum(),
            failovers: reading.stats.all().map(|peer| peer.lanes_lost).sum(),
            limit: busiest.and_then(|peer| peer.figures.limit.clone()),
            slow,
        };
        Session {
            pid: now.pid,
            process: name.to_owned(),
            id: reading.id,
            name: reading.stats.name.clone(),
            command: now.command.clone(),
            version: now.version.clone(),
            figures,
            peers,
        }
    };
    now.sessions.iter().map(one).collect()
}

/// Returns whether a peer was ever connected or used. Each session is always connected to itself.
fn is_worth_a_row(peer: &PeerStats, session: &str) -> bool {
    let is_used = peer.transfers.iter().any(|kind| kind.started > 0);
    let is_met = (peer.is_connected || peer.connections > 0) && peer.name != session;
    is_used || is_met || peer.total() != Traffic::default()
}

fn peer(process: &Process, session: u64, peer: &PeerStats) -> Peer {
    let before = process.peer_before(session, &peer.name);
    let (sent, received) = process.rates(session, &peer.name);
    let earlier = process.before.as_ref();
    let sample = earlier.and_then(|before| process.now.sample(before, session, &peer.name));
    let mut lanes: Vec<_> = peer
        .lanes
        .iter()
        .map(|one| lane(process, before, one))
        .collect();
    find_slow_lanes(&mut lanes);
    let slow = lanes.iter().find_map(|lane| {
        let slow = lane.slow.as_ref()?;
        Some(format!("lane {} {slow}", lane.index))
    });
    Peer {
        name: peer.name.clone(),
        is_connected: peer.is_connected,
        figures: Figures {
            path: path_of(&process.now, before, peer),
            sent_bytes_per_second: sent,
            received_bytes_per_second: received,
            last_minute: process.past(session, Some(&peer.name)).parts(PARTS),
            transfers_in_flight: peer.in_flight(),
            transfers_failed: peer.failures.total(),
            retried_chunks: peer.retried.chunks,
            failovers: peer.lanes_lost,
            limit: sample
                .filter(|sample| sample.bytes > 0)
                .map(|sample| sample.limit().to_string()),
            slow,
        },
        lanes,
    }
}

fn lane(process: &Process, before: Option<&PeerStats>, lane: &LaneStats) -> Lane {
    let is_same = |old: &&LaneStats| (old.local, old.remote) == (lane.local, lane.remote);
    let old = before.and_then(|before| before.lanes.iter().find(is_same));
    let seconds = process.elapsed().map(|elapsed| elapsed.as_secs_f64());
    let rate = |now: u64, then: Option<u64>| match seconds {
        Some(seconds) => now.saturating_sub(then.unwrap_or(0)) as f64 / seconds,
        None => 0.0,
    };
    let kernel = lane.kernel.unwrap_or_default();
    Lane {
        index: lane.index,
        local: lane.local.to_string(),
        remote: lane.remote.to_string(),
        interface: process.now.interface_of(lane).map(|nic| nic.name.clone()),
        is_up: lane.is_up,
        failovers: lane.failovers,
        sent_bytes_per_second: rate(lane.wire_sent, old.map(|old| old.wire_sent)),
        received_bytes_per_second: rate(lane.wire_received, old.map(|old| old.wire_received)),
        bytes_in_flight: lane.in_flight,
        round_trip_seconds: kernel.rtt.as_secs_f64(),
        retransmits: kernel.retransmits,
        slow: None,
    }
}

/// Names the path of a peer's bytes: of those moved since the previous reading, or else of all.
fn path_of(process: &ProcessStats, before: Option<&PeerStats>, peer: &PeerStats) -> String {
    let bytes = |traffic: Traffic| traffic.sent().bytes + traffic.received().bytes;
    let ever = |path: PathKind| bytes(peer.path(path));
    let lately = |path: PathKind| match before {
        Some(before) => ever(path).saturating_sub(bytes(before.path(path))),
        None => 0,
    };
    let used = |of: &dyn Fn(PathKind) -> u64| -> Vec<PathKind> {
        let all: u64 = PathKind::ALL.iter().map(|path| of(*path)).sum();
        let is_used = |path: &PathKind| of(*path) > 0 && of(*path) * 20 >= all;
        PathKind::ALL.into_iter().filter(is_used).collect()
    };
    let mut paths = used(&lately);
    if paths.is_empty() {
        paths = used(&ever);
    }
    let nics = interfaces_of(process, peer);
    if paths.is_empty() {
        return nics;
    }
    let word = |path: &PathKind| match path {
        PathKind::Stream => nics.clone(),
        PathKind::Staged => format!("staged {nics}"),
        PathKind::Plugin => "plugin".into(),
        PathKind::SameHost => "same host".into(),
        PathKind::Local => "own memory".into(),
    };
    let words: Vec<String> = paths.iter().map(word).collect();
    words.join(", ").trim().to_owned()
}

/// Names the interfaces of a peer's lanes: `eth0+eth1`.
fn interfaces_of(process: &ProcessStats, peer: &PeerStats) -> String {
    let mut names: Vec<String> = Vec::new();
    for lane in peer.lanes.iter().filter(|lane| lane.is_up) {
        let name = match process.interface_of(lane) {
            Some(nic) => nic.name.clone(),
            None if lane.remote.ip() == lane.local.ip() => "loopback".into(),
            None if lane.remote.ip().to_canonical().is_loopback() => "loopback".into(),
            None => lane.local.ip().to_string(),
        };
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names.sort();
    names.join("+")
}

/// Marks peers that move no bytes with transfers in flight, and peers that move less than half of
/// the median.
fn find_slow_peers(peers: &mut [Peer], idle: impl Fn(&str) -> Duration) {
    let is_busy = |peer: &Peer| peer.figures.transfers_in_flight > 0 || peer.figures.rate() > 0.0;
    let rates: Vec<f64> = peers
        .iter()
        .filter(|peer| is_busy(peer))
        .map(|peer| peer.figures.rate())
        .collect();
    for peer in peers.iter_mut().filter(|peer| is_busy(peer)) {
        let idle = idle(&peer.name);
        if peer.figures.transfers_in_flight > 0 && idle >= STALLED {
            let seconds = idle.as_secs();
            peer.figures.slow = Some(format!("has moved nothing for {seconds} s"));
        } else if let Some(words) = slower(peer.figures.rate(), &rates) {
            peer.figures.slow = Some(words);
        }
    }
}

/// Marks lanes that are down, and lanes that move less than half of the median.
fn find_slow_lanes(lanes: &mut [Lane]) {
    // Skip lanes with nothing in flight, such as the one for small transfers: they have nothing to
    // send.
    let is_busy = |lane: &Lane| lane.is_up && lane.bytes_in_flight > 0;
    let rates: Vec<f64> = lanes
        .iter()
        .filter(|lane| is_busy(lane))
        .map(Lane::rate)
        .collect();
    for lane in lanes.iter_mut() {
        if !lane.is_up {
            lane.slow = Some("is down".into());
        } else if is_busy(lane) {
            lane.slow = slower(lane.rate(), &rates);
        }
    }
}

/// Describes a rate that is less than half of the median; none otherwise, or with fewer than three
/// rates.
fn slower(rate: f64, all: &[f64]) -> Option<String> {
    let mut all = all.to_vec();
    all.sort_by(f64::total_cmp);
    let median = all.get(all.len() / 2).copied()?;
    if all.len() < 3 || rate >= 0.5 * median {
        return None;
    }
    let (rate, median) = (speed(rate), speed(median));
    Some(format!("is slow: {rate}, others {median}"))
}

/// Formats a rate: `1.23 GB/s`, `12.3 MB/s`, `0`.
pub(crate) fn speed(rate: f64) -> String {
    match rate {
        r if r < 0.5 => "0".into(),
        r if r < 1e3 => format!("{r:.0} B/s"),
        r if r < 1e6 => format!("{:.1} kB/s", r / 1e3),
        r if r < 1e9 => format!("{:.1} MB/s", r / 1e6),
        r => format!("{:.2} GB/s", r / 1e9),
    }
}

/// Draws a row of bars, one for each value. The largest value has a full block.
pub(crate) fn plot(values: &[f64]) -> String {
    const BARS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let most = values.iter().copied().fold(0.0, f64::max);
    let bar = |value: &f64| {
        if most <= 0.0 || *value <= 0.0 {
            return BARS[0];
        }
        BARS[((value / most * 8.0).ceil() as usize).clamp(1, 8)]
    };
    values.iter().map(bar).collect()
}

#[cfg(test)]
pub(super) mod tests;
