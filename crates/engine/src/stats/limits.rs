//! Finds out what limits the rate to a peer: a pure function of observations over an interval.

use std::fmt;
use std::time::Duration;

use super::data::{LaneStats, Moved, PathKind, PeerStats};

/// Observations of one peer over an interval.
///
/// [`Sample::between`] makes a sample from two readings of the statistics. The speed of the network
/// and the use of the CPU are not part of those:
/// [`ProcessStats::sample`](super::ProcessStats::sample) adds them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sample {
    /// The length of the interval.
    pub elapsed: Duration,
    /// Payload that was moved in the direction under observation, which is the one that moved more.
    pub bytes: u64,
    /// Chunks of this payload.
    pub chunks: u64,
    /// Whether the direction is towards this side. The lanes' kernel counters that matter are then
    /// those of the peer.
    pub is_receiving: bool,
    /// The path that moved most of this payload.
    pub path: Option<PathKind>,
    /// What the interfaces can move in this direction, in bytes per second, if known.
    pub network: Option<f64>,
    /// How busy the busiest thread that moves bytes was, from 0 to 1, if known.
    pub cpu: Option<f64>,
    /// How busy the CPUs of this machine were, from 0 to 1, if known.
    pub cores: Option<f64>,
    /// Lanes that moved a substantial share of the bytes.
    pub lanes: usize,
    /// Whether the peer is on this host.
    pub is_local: bool,
    /// Waits of payload for a pinned slot.
    pub slot_waits: u64,
    /// TCP segments that were retransmitted.
    pub retransmits: u64,
    /// How long lanes had something to send, added up over all lanes.
    pub busy: Duration,
    /// How much of `busy` the peer's receive window was full.
    pub receiver_limited: Duration,
    /// How much of `busy` the send buffer was too small.
    pub buffer_limited: Duration,
    /// The mean round trip of the lanes.
    pub round_trip: Duration,
    /// The mean of the lanes' minimal round trips, as the kernel keeps them over the last minutes.
    pub least_round_trip: Duration,
}

impl Sample {
    /// Makes a sample from two readings of one peer that were taken `elapsed` apart. The readings
    /// include the kernel's view of lanes; `slot_waits` counts those of the session in that time.
    #[must_use]
    pub fn between(
        before: &PeerStats,
        after: &PeerStats,
        elapsed: Duration,
        slot_waits: u64,
    ) -> Self {
        let delta = |now: Moved, then: Moved| Moved {
            chunks: now.chunks.saturating_sub(then.chunks),
            bytes: now.bytes.saturating_sub(then.bytes),
        };
        let (now, then) = (after.total(), before.total());
        let sent = delta(now.sent(), then.sent());
        let received = delta(now.received(), then.received());
        let is_receiving = received.bytes > sent.bytes;
        let Moved { chunks, bytes } = if is_receiving { received } else { sent };
        let on_path = |path: &PathKind| {
            let (now, then) = (after.path(*path), before.path(*path));
            match is_receiving {
                true => delta(now.received(), then.received()).bytes,
                false => delta(now.sent(), then.sent()).bytes,
            }
        };
        let mut sample = Self {
            elapsed,
            bytes,
            chunks,
            is_receiving,
            path: PathKind::ALL.into_iter().max_by_key(on_path),
            slot_waits,
            ..Self::default()
        };
        sample.add_lanes(before, after);
        sample
    }

    /// Adds the lanes that moved a substantial share of the bytes. Lanes that carried only
    /// acknowledgements and messages do not count.
    fn add_lanes(&mut self, before: &PeerStats, after: &PeerStats) {
        /// The share of all bytes, as 1 / `LITTLE`, below which a lane does not count.
        const LITTLE: u64 = 64;
        let same = |lane: &LaneStats, old: &&LaneStats| {
            (old.local, old.remote) == (lane.local, lane.remote)
        };
        let wire = |lane: &LaneStats| match self.is_receiving {
            true => lane.wire_received,
            false => lane.wire_sent,
        };
        let pairs = after.lanes.iter().filter(|lane| lane.is_up).map(|lane| {
            let old = before.lanes.iter().find(|old| same(lane, old));
            (lane, old, wire(lane).saturating_sub(old.map_or(0, wire)))
        });
        let all: u64 = pairs.clone().map(|(_, _, bytes)| bytes).sum();
        let used: Vec<_> = pairs
            .filter(|(_, _, bytes)| *bytes > 0 && bytes * LITTLE >= all)
            .collect();
        self.lanes = used.len();
        let kernel = used.iter().filter_map(|(lane, old, _)| {
            let then = old.and_then(|old| old.kernel).unwrap_or_default();
            Some((lane.kernel?, then))
        });
        for (now, then) in kernel.clone() {
            self.retransmits += now.retransmits.saturating_sub(then.retransmits);
            self.busy += now.busy.saturating_sub(then.busy);
            let limited = |now: Duration, then: Duration| now.saturating_sub(then);
            self.receiver_limited += limited(now.receiver_limited, then.receiver_limited);
            self.buffer_limited += limited(now.buffer_limited, then.buffer_limited);
            self.round_trip += now.rtt;
            self.least_round_trip += now.min_rtt;
        }
        let count = u32::try_from(kernel.count().max(1)).unwrap_or(u32::MAX);
        self.round_trip /= count;
        self.least_round_trip /= count;
    }

    /// Adds a sample of the same peer from another interval.
    pub fn add(&mut self, other: &Self) {
        let (own, more) = (self.elapsed.as_secs_f64(), other.elapsed.as_secs_f64());
        let mean = |a: f64, b: f64| match own + more > 0.0 {
            true => (a * own + b * more) / (own + more),
            false => a,
        };
        let either = |a: Option<f64>, b: Option<f64>| match (a, b) {
            (Some(a), Some(b)) => Some(mean(a, b)),
            (a, b) => a.or(b),
        };
        let time = |a: Duration, b: Duration| {
            Duration::from_secs_f64(mean(a.as_secs_f64(), b.as_secs_f64()))
        };
        *self = Self {
            elapsed: self.elapsed + other.elapsed,
            bytes: self.bytes + other.bytes,
            chunks: self.chunks + other.chunks,
            is_receiving: other.is_receiving,
            path: other.path.or(self.path),
            network: other.network.or(self.network),
            cpu: either(self.cpu, other.cpu),
            cores: either(self.cores, other.cores),
            lanes: self.lanes.max(other.lanes),
            is_local: other.is_local,
            slot_waits: self.slot_waits + other.slot_waits,
            retransmits: self.retransmits + other.retransmits,
            busy: self.busy + other.busy,
            receiver_limited: self.receiver_limited + other.receiver_limited,
            buffer_limited: self.buffer_limited + other.buffer_limited,
            round_trip: time(self.round_trip, other.round_trip),
            least_round_trip: time(self.least_round_trip, other.least_round_trip),
        };
    }

    fn rate(&self) -> f64 {
        self.bytes as f64 / self.elapsed.as_secs_f64()
    }

    /// Returns a duration as a share of the time that lanes had something to send.
    fn share(&self, part: Duration) -> f64 {
        match self.busy.is_zero() {
            true => 0.0,
            false => part.as_secs_f64() / self.busy.as_secs_f64(),
        }
    }

    /// Returns what limits the rate.
    #[must_use]
    pub fn limit(&self) -> Limit {
        /// The share from which on a resource counts as full.
        const FULL: f64 = 0.9;
        /// The same for all CPUs together, some of which always idle a little.
        const ALL: f64 = 0.95;
        /// The share of the time from which on a wait matters.
        const MUCH: f64 = 0.3;
        /// The share of the time that a lane must be busy; below it, the lane waits for the
        /// application.
        const BUSY: f64 = 0.5;
        if self.bytes == 0 || self.elapsed.is_zero() {
            return Limit::Nothing;
        }
        let rate = self.rate();
        if let Some(network) = self.network.filter(|network| rate >= FULL * network) {
            return Limit::Network { rate, network };
        }
        let is_on_lanes = !matches!(
            self.path,
            Some(PathKind::SameHost | PathKind::Local | PathKind::Plugin)
        );
        // Each lane may be busy for the whole interval.
        let busy = self.busy.as_secs_f64() / self.elapsed.as_secs_f64();
        let is_idle = !self.busy.is_zero() && busy < BUSY * self.lanes.max(1) as f64;
        // Check congestion before the CPU: bytes that wait in the network do not wait for a CPU.
        if is_on_lanes && !self.is_receiving && !is_idle && self.is_queueing() {
            return Limit::Congestion {
                rate,
                round_trip: self.round_trip,
                least_round_trip: self.least_round_trip,
            };
        }
        if self.cores.is_some_and(|cores| cores >= ALL) {
            return Limit::Cores;
        }
        if self.cpu.is_some_and(|cpu| cpu >= FULL) {
            return Limit::Cpu;
        }
        if self.slot_waits as f64 >= MUCH * self.chunks as f64 && self.slot_waits > 0 {
            return Limit::Slots;
        }
        match self.path {
            Some(PathKind::SameHost | PathKind::Local) => return Limit::Copies,
            Some(PathKind::Plugin) => return Limit::Plugin,
            _ if self.is_receiving => return Limit::Unknown,
            _ => {}
        }
        if self.share(self.receiver_limited) >= MUCH {
            return Limit::PeerWindow;
        }
        if self.share(self.buffer_limited) >= MUCH {
            return Limit::SendBuffer;
        }
        // Loss matters from about one packet in ten thousand; 1448 is the usual payload of a
        // packet.
        if self.retransmits > 0 && self.retransmits * 10_000 * 1448 > self.bytes {
            let retransmits = self.retransmits;
            return Limit::Loss { retransmits };
        }
        match self.lanes {
            _ if is_idle => Limit::Application,
            1 => Limit::OneLane,
            _ => Limit::Unknown,
        }
    }

    /// Returns whether bytes wait in the network: round trips take much longer than the shortest
    /// ones. Within a host, long round trips mean that a CPU is missing.
    fn is_queueing(&self) -> bool {
        /// Round trips vary by about this much because of the scheduler alone.
        const NOISE: Duration = Duration::from_micros(500);
        let least = self.least_round_trip;
        let is_long = self.round_trip >= 3 * least && self.round_trip >= least + NOISE;
        !self.is_local && !least.is_zero() && is_long
    }
}

/// What limits the rate to a peer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Limit {
    /// Nothing was moved.
    Nothing,
    /// The network is full.
    Network {
        /// Bytes per second that were moved.
        rate: f64,
        /// Bytes per second that the interfaces can move.
        network: f64,
    },
    /// A thread of this process is busy all the time.
    Cpu,
    /// All CPUs of this machine are busy all the time.
    Cores,
    /// Payload of devices waits for pinned slots.
    Slots,
    /// The peer's receive window is full: the peer does not read fast enough.
    PeerWindow,
    /// The send buffer of this end is too small.
    SendBuffer,
    /// The network is full: bytes wait in its queues.
    Congestion {
        /// Bytes per second that were moved.
        rate: f64,
        /// The mean round trip.
        round_trip: Duration,
        /// The mean round trip when queues were empty.
        least_round_trip: Duration,
    },
    /// The network loses packets.
    Loss {
        /// TCP segments that were retransmitted.
        retransmits: u64,
    },
    /// Lanes were idle: there was not enough to send.
    Application,
    /// There is one lane, and it was busy.
    OneLane,
    /// Memory of this host is copied without a network.
    Copies,
    /// A NCCL net plugin moves the bytes, and says nothing about its own limits.
    Plugin,
    /// Nothing on this side is full.
    Unknown,
}

/// Describes the limit in a few words, and names the remedy if there is one.
impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gbits = |rate: &f64| rate * 8e-9;
        match self {
            Self::Nothing => f.write_str("nothing was moved"),
            Self::Network { rate, network } => {
                let (rate, network) = (gbits(rate), gbits(network));
                // Speeds of links are whole numbers of Gbit/s, except for 2.5 and for speeds below
                // 1.
                let precision = usize::from(network.fract() > 0.05);
                write!(f, "the network: {rate:.1} of {network:.precision$} Gbit/s")
            }
            Self::Cpu => f.write_str("this CPU: one thread is busy, raise workers and lanes"),
            Self::Cores => f.write_str("this CPU: all cores are busy"),
            Self::Slots => f.write_str("pinned slots: raise staging_bytes"),
            Self::PeerWindow => f.write_str("the peer's receive window: its CPU or its buffers"),
            Self::SendBuffer => {
                f.write_str("the send buffer: raise net.ipv4.tcp_wmem or socket_buffer_bytes")
            }
            Self::Congestion {
                rate,
                round_trip,
                least_round_trip,
            } => {
                let rate = gbits(rate);
                let precision = if rate < 1.0 { 2 } else { 1 };
                let millis = |time: &Duration| time.as_secs_f64() * 1e3;
                let (long, short) = (millis(round_trip), millis(least_round_trip));
                write!(
                    f,
                    "the network: {rate:.precision$} Gbit/s fill its queues (round trip {long:.1} ms, \
                     {short:.1} ms without load)"
                )
            }
            Self::Loss { retransmits } => {
                write!(f, "the network: it lost {retransmits} segments")
            }
            Self::Application => {
                f.write_str("the application: lanes were idle, post larger or more transfers")
            }
            Self::OneLane => f.write_str("one lane: raise lanes"),
            Self::Copies => f.write_str("copies within this host: the speed of its memory"),
            Self::Plugin => f.write_str("the plugin, or the network behind it"),
            Self::Unknown => f.write_str("the network or the peer: nothing on this side is full"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// Four lanes that were busy for a second and moved 1 GB.
    fn busy() -> Sample {
        Sample {
            elapsed: SECOND,
            bytes: 1_000_000_000,
            chunks: 1000,
            lanes: 4,
            busy: 4 * SECOND,
            ..Sample::default()
        }
    }

    #[test]
    fn each_limit_is_found_where_it_is_and_said_in_words() {
        let cases = [
            (Sample::default(), "nothing was moved"),
            (
                Sample {
                    bytes: 1_200_000_000,
                    network: Some(1.25e9),
                    // True as well, and not the limit.
                    cpu: Some(1.0),
                    ..busy()
                },
                "the network: 9.6 of 10 Gbit/s",
            ),
            (
                Sample {
                    network: Some(1.25e9),
                    cpu: Some(0.95),
                    ..busy()
                },
                "this CPU: one thread",
            ),
            (
                Sample {
                    cpu: Some(0.95),
                    cores: Some(0.98),
                    ..busy()
                },
                "this CPU: all cores",
            ),
            (
                Sample {
                    slot_waits: 400,
                    ..busy()
                },
                "pinned slots",
            ),
            (
                Sample {
                    receiver_limited: 2 * SECOND,
                    ..busy()
                },
                "the peer's receive window",
            ),
            (
                Sample {
                    buffer_limited: 2 * SECOND,
                    ..busy()
                },
                "the send buffer",
            ),
            (
                Sample {
                    retransmits: 100,
                    ..busy()
                },
                "the network: it lost 100 segments",
            ),
            (
                Sample {
                    bytes: 25_000_000,
                    round_trip: SECOND / 40,
                    least_round_trip: SECOND / 2000,
                    // Full queues also overflow.
                    retransmits: 100,
                    ..busy()
                },
                "the network: 0.20 Gbit/s fill its queues (round trip 25.0 ms, 0.5 ms without load)",
            ),
            (
                Sample {
                    busy: SECOND / 2,
                    // Only the few bytes that there are to send waited in queues.
                    round_trip: SECOND / 40,
                    least_round_trip: SECOND / 2000,
                    ..busy()
                },
                "the application",
            ),
            (
                Sample {
                    path: Some(PathKind::SameHost),
                    lanes: 1,
                    ..busy()
                },
                "copies within this host",
            ),
            (
                Sample {
                    path: Some(PathKind::Plugin),
                    ..busy()
                },
                "the plugin",
            ),
            (
                Sample {
                    is_receiving: true,
                    // About bytes that this side sends, which are not under observation.
                    receiver_limited: 4 * SECOND,
                    lanes: 1,
                    ..busy()
                },
                "the network or the peer",
            ),
            (
                Sample {
                    lanes: 1,
                    busy: SECOND,
                    ..busy()
                },
                "one lane",
            ),
            (busy(), "the network or the peer"),
        ];
        for (sample, words) in cases {
            let said = sample.limit().to_string();
            assert!(said.starts_with(words), "{sample:?}: {said}");
        }
    }

    #[test]
    fn round_trips_within_a_host_wait_for_a_cpu() {
        let sample = Sample {
            is_local: true,
            round_trip: SECOND / 40,
            least_round_trip: SECOND / 2000,
            cores: Some(1.0),
            ..busy()
        };
        assert_eq!(sample.limit(), Limit::Cores);
    }

    #[test]
    fn samples_add_up_by_their_time() {
        let mut sum = Sample::default();
        sum.add(&Sample {
            cpu: Some(1.0),
            round_trip: SECOND,
            retransmits: 3,
            ..busy()
        });
        sum.add(&Sample {
            elapsed: 3 * SECOND,
            cpu: Some(0.2),
            lanes: 2,
            path: Some(PathKind::Staged),
            ..busy()
        });
        assert_eq!((sum.elapsed, sum.bytes), (4 * SECOND, 2_000_000_000));
        assert!((sum.cpu.unwrap() - 0.4).abs() < 1e-9, "{sum:?}");
        assert_eq!((sum.lanes, sum.retransmits), (4, 3));
        assert_eq!((sum.busy, sum.round_trip), (8 * SECOND, SECOND / 4));
        assert_eq!(sum.path, Some(PathKind::Staged));
    }

    #[test]
    fn little_of_everything_is_no_limit() {
        let sample = Sample {
            network: Some(1.25e9),
            bytes: 1_000_000_000,
            cpu: Some(0.5),
            cores: Some(0.8),
            round_trip: SECOND / 1000,
            least_round_trip: SECOND / 2000,
            slot_waits: 10,
            receiver_limited: SECOND / 2,
            buffer_limited: SECOND / 2,
            retransmits: 3,
            ..busy()
        };
        assert_eq!(sample.limit(), Limit::Unknown);
    }
}
