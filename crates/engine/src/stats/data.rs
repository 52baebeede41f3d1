//! Statistics as applications read them: plain data.

use std::net::SocketAddr;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tcpx_net::TcpInfo;

use super::cells::{BUCKETS, Cell, Count, Side, Sums};
use super::failures::Failures;
use super::route::Route;

/// How the payload of a chunk was moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(usize)]
pub enum PathKind {
    /// On a lane, straight from and to host memory.
    Stream,
    /// On a lane, through pinned slots: memory of a device.
    Staged,
    /// On a NCCL net plugin.
    Plugin,
    /// Copied directly from or to the memory of a process on this host.
    SameHost,
    /// Copied within the session.
    Local,
}

impl PathKind {
    /// Every path.
    pub const ALL: [Self; 5] = [
        Self::Stream,
        Self::Staged,
        Self::Plugin,
        Self::SameHost,
        Self::Local,
    ];

    /// The number of paths that lanes have: the first ones of [`Self::ALL`].
    pub(super) const OF_LANES: usize = 3;

    /// The name in metrics.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Stream => "stream",
            Self::Staged => "staged",
            Self::Plugin => "plugin",
            Self::SameHost => "same_host",
            Self::Local => "local",
        }
    }
}

/// The kind of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(usize)]
pub enum TransferKind {
    /// A READ.
    Read,
    /// A WRITE.
    Write,
    /// A tagged message that is sent.
    Send,
    /// A tagged message that is received.
    Receive,
}

impl TransferKind {
    /// Every kind.
    pub const ALL: [Self; 4] = [Self::Read, Self::Write, Self::Send, Self::Receive];

    /// The name in metrics.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Send => "send",
            Self::Receive => "receive",
        }
    }
}

/// A class of transfers by their size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(usize)]
pub enum SizeClass {
    /// Up to 4 KiB.
    UpTo4K,
    /// Up to 64 KiB.
    UpTo64K,
    /// Up to 1 MiB.
    UpTo1M,
    /// Up to 16 MiB.
    UpTo16M,
    /// More than 16 MiB.
    Larger,
}

impl SizeClass {
    /// Every class.
    pub const ALL: [Self; 5] = [
        Self::UpTo4K,
        Self::UpTo64K,
        Self::UpTo1M,
        Self::UpTo16M,
        Self::Larger,
    ];

    /// Returns the class of a transfer of `bytes` bytes.
    #[must_use]
    pub fn of(bytes: u64) -> Self {
        match bytes {
            0..=0x1000 => Self::UpTo4K,
            0x1001..=0x1_0000 => Self::UpTo64K,
            0x1_0001..=0x10_0000 => Self::UpTo1M,
            0x10_0001..=0x100_0000 => Self::UpTo16M,
            _ => Self::Larger,
        }
    }

    /// The name in metrics.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::UpTo4K => "4KiB",
            Self::UpTo64K => "64KiB",
            Self::UpTo1M => "1MiB",
            Self::UpTo16M => "16MiB",
            Self::Larger => "larger",
        }
    }
}

/// Chunks and the bytes of their payload.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moved {
    /// The number of chunks.
    pub chunks: u64,
    /// The bytes of their payload, without framing.
    pub bytes: u64,
}

impl std::ops::Add for Moved {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            chunks: self.chunks + other.chunks,
            bytes: self.bytes + other.bytes,
        }
    }
}

/// Payload that was moved on one path.
///
/// `written` and `read` belong to transfers of this session. Each chunk counts once, even if it was
/// sent again after a lane was lost. If no transfer has failed or was aborted, their bytes add up
/// to the sizes of the transfers that have ended. `landed` and `served` belong to transfers of the
/// peer: `landed` equals the peer's `written` while the connection lives. `served` equals the
/// peer's `read` plus the answers that were lost with a lane: the peer requests those chunks again
/// and counts them as retried.
///
/// Memory that a process on this host copies directly is counted by that process alone. The bytes
/// of a short tagged message travel inside its announcement: they count as bytes of the transfer,
/// not here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Traffic {
    /// WRITE chunks of this session that are in place at the peer.
    pub written: Moved,
    /// READ chunks of this session that are in place here.
    pub read: Moved,
    /// WRITE chunks of the peer that are in place here.
    pub landed: Moved,
    /// READ chunks of the peer that this session has answered: the whole answer was handed to the
    /// network.
    pub served: Moved,
}

impl Traffic {
    /// Returns what was sent: `written` and `served`.
    #[must_use]
    pub fn sent(&self) -> Moved {
        self.written + self.served
    }

    /// Returns what was received: `read` and `landed`.
    #[must_use]
    pub fn received(&self) -> Moved {
        self.read + self.landed
    }
}

impl std::ops::Add for Traffic {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            written: self.written + other.written,
            read: self.read + other.read,
            landed: self.landed + other.landed,
            served: self.served + other.served,
        }
    }
}

/// Transfers of one kind that this session has posted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TransferStats {
    /// Transfers that were posted, including those that wait for a connection and those that failed
    /// at once because of the peer's state.
    pub started: u64,
    /// Transfers that ended as done.
    pub completed: u64,
    /// The bytes of the transfers that ended as done.
    pub bytes: u64,
    /// Transfers that ended as aborted.
    pub aborted: u64,
}

/// Notifications of one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Notified {
    /// The number of notifications.
    pub count: u64,
    /// The bytes of their messages.
    pub bytes: u64,
}

/// The number of waits of a lane, or of all lanes of a peer. Each wait counts once, however long it
/// takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LaneWaits {
    /// Waits of chunks for the window: the peer had not settled enough of the chunks in flight.
    pub window: u64,
    /// Waits for the socket, which accepted no more bytes: the network or the peer was slower.
    pub socket: u64,
    /// Waits of an incoming message until the application had taken earlier ones.
    pub room: u64,
}

/// The durations of transfers, from posting to end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Histogram {
    /// The number of transfers that took up to 2⁰, 2¹, … 2²⁴ µs, and longer. Each transfer is in
    /// one bucket.
    pub counts: [u64; BUCKETS],
    /// The sum of all durations, in nanoseconds.
    pub nanos: u64,
}

impl Histogram {
    /// Returns the number of transfers.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Returns the upper bound of a bucket; none for the last.
    #[must_use]
    pub fn bound(bucket: usize) -> Option<Duration> {
        (bucket + 1 < BUCKETS).then(|| Duration::from_micros(1 << bucket))
    }

    /// Returns the mean duration; none if there was no transfer.
    #[must_use]
    pub fn mean(&self) -> Option<Duration> {
        let count = self.count();
        (count > 0).then(|| Duration::from_nanos(self.nanos / count))
    }

    /// Returns the bound of the bucket within which the share `quantile` (0 to 1) of the transfers
    /// ended; none if there was no transfer, or if that bucket is the last, which has no bound.
    #[must_use]
    pub fn quantile(&self, quantile: f64) -> Option<Duration> {
        let count = self.count();
        let rank = (quantile * count as f64).ceil().max(1.0) as u64;
        let mut seen = 0;
        let within = |within: &u64| {
            seen += within;
            seen >= rank
        };
        let bucket = self.counts.iter().position(within)?;
        Self::bound(bucket)
    }
}

/// The kernel's view of a lane.
pub type KernelStats = TcpInfo;

/// One lane of a connected peer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LaneStats {
    /// Position among the peer's lanes. The last one may be kept for small transfers and messages.
    pub index: usize,
    /// This end's address.
    pub local: SocketAddr,
    /// The peer's address.
    pub remote: SocketAddr,
    /// Whether the lane has a stream now.
    pub is_up: bool,
    /// How often the lane's stream was lost and replaced by another.
    pub failovers: u32,
    /// Bytes sent on the lane's stream, framing included.
    pub wire_sent: u64,
    /// Bytes received on the lane's stream, framing included.
    pub wire_received: u64,
    /// Payload moved on the lane's current stream, in the order of [`PathKind::ALL`]. A new stream
    /// begins at 0; the sums of the peer continue.
    pub traffic: [Traffic; PathKind::ALL.len()],
    /// The lane's waits on its current stream.
    pub waits: LaneWaits,
    /// Bytes of this session's chunks that are in flight on the lane.
    pub in_flight: u64,
    /// Transfers with chunks that wait for their turn on the lane.
    pub queued: usize,
    /// The kernel's view of the lane, if the reader asked for it.
    pub kernel: Option<KernelStats>,
}

/// The traffic between a session and one peer, over all their connections.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct PeerStats {
    /// The peer's name. Sessions of the same name share their statistics.
    pub name: String,
    /// Whether the peer is connected now.
    pub is_connected: bool,
    /// How payload travels to the peer, if it is connected.
    pub route: Option<Route>,
    /// Transfers that this session has posted, in the order of [`TransferKind::ALL`].
    pub transfers: [TransferStats; TransferKind::ALL.len()],
    /// Failures of these transfers, by cause.
    pub failures: Failures,
    /// The durations of transfers that ended as done, in the order of [`SizeClass::ALL`].
    pub latency: [Histogram; SizeClass::ALL.len()],
    /// Payload that was moved, in the order of [`PathKind::ALL`].
    pub traffic: [Traffic; PathKind::ALL.len()],
    /// Chunks of this session's transfers that were moved again, because their lane was lost while
    /// they were in flight: sent again, or requested again.
    pub retried: Moved,
    /// Notifications that were handed to a connection, each once.
    pub notifications_sent: Notified,
    /// Notifications that have arrived, each once.
    pub notifications_received: Notified,
    /// Connections that were made, by either side.
    pub connections: u64,
    /// Connections that have ended.
    pub connections_lost: u64,
    /// Streams of lanes that were lost while their connection went on.
    pub lanes_lost: u64,
    /// Streams that have replaced lost ones.
    pub lanes_rejoined: u64,
    /// The waits of the peer's lanes.
    pub waits: LaneWaits,
    /// Bytes of messages that were sent and that the peer may not have received yet.
    pub queued_bytes: u64,
    /// The lanes of the current connection.
    pub lanes: Vec<LaneStats>,
}

impl PeerStats {
    pub(super) fn new(name: &str, sums: &Sums) -> Self {
        let count = |event| sums.get(Cell::count(event));
        let notified = |sent| {
            let cell = Cell::notifications(sent);
            Notified {
                count: sums.get(cell),
                bytes: sums.get(cell.next()),
            }
        };
        Self {
            name: name.to_owned(),
            is_connected: false,
            route: None,
            transfers: TransferKind::ALL.map(|kind| TransferStats {
                started: sums.get(Cell::started(kind)),
                completed: sums.get(Cell::completed(kind)),
                bytes: sums.get(Cell::bytes(kind)),
                aborted: sums.get(Cell::aborted(kind)),
            }),
            failures: Failures {
                counts: Failures::CAUSES.map(|cause| sums.get(Cell::failed(cause))),
            },
            latency: SizeClass::ALL.map(|class| Histogram {
                counts: std::array::from_fn(|bucket| sums.get(Cell::latency(class, bucket))),
                nanos: sums.get(Cell::latency_nanos(class)),
            }),
            traffic: PathKind::ALL.map(|path| Traffic {
                written: sums.moved(path, Side::Written),
                read: sums.moved(path, Side::Read),
                landed: sums.moved(path, Side::Landed),
                served: sums.moved(path, Side::Served),
            }),
            retried: Moved {
                chunks: count(Count::RetriedChunks),
                bytes: count(Count::RetriedBytes),
            },
            notifications_sent: notified(true),
            notifications_received: notified(false),
            connections: count(Count::Connections),
            connections_lost: count(Count::ConnectionsLost),
            lanes_lost: count(Count::LanesLost),
            lanes_rejoined: count(Count::LanesRejoined),
            waits: LaneWaits {
                window: count(Count::WindowWaits),
                socket: count(Count::SocketWaits),
                room: count(Count::RoomWaits),
            },
            queued_bytes: 0,
            lanes: Vec::new(),
        }
    }

    /// Returns the transfers of one kind that this session has posted.
    #[must_use]
    pub fn transfers(&self, kind: TransferKind) -> TransferStats {
        self.transfers[kind as usize]
    }

    /// Returns the payload that was moved on one path.
    #[must_use]
    pub fn path(&self, path: PathKind) -> Traffic {
        self.traffic[path as usize]
    }

    /// Returns the payload that was moved on all paths.
    #[must_use]
    pub fn total(&self) -> Traffic {
        let all = self.traffic.into_iter();
        all.fold(Traffic::default(), |sum, traffic| sum + traffic)
    }

    /// Returns the number of transfers that were started and have not ended.
    #[must_use]
    pub fn in_flight(&self) -> u64 {
        let started: u64 = self.transfers.iter().map(|t| t.started).sum();
        let ended: u64 = self.transfers.iter().map(|t| t.completed + t.aborted).sum();
        // Counters are read one after the other: an end may be seen whose start is not.
        started.saturating_sub(ended + self.failures.total())
    }
}

/// The statistics of a session since it was opened.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct SessionStats {
    /// The session's name.
    pub name: String,
    /// All peers that the session knows, the session itself, and the peers that went away last,
    /// ordered by name.
    pub peers: Vec<PeerStats>,
    /// The sum of the peers that went away earlier. Its name is empty.
    pub gone: PeerStats,
    /// The number of waits of payload for a pinned slot. Each wait counts once.
    pub slot_waits: u64,
}

impl SessionStats {
    /// Returns the statistics of a peer.
    #[must_use]
    pub fn peer(&self, name: &str) -> Option<&PeerStats> {
        self.peers.iter().find(|peer| peer.name == name)
    }

    /// Returns all peers, and the sum of the peers that went away earlier.
    pub fn all(&self) -> impl Iterator<Item = &PeerStats> {
        self.peers.iter().chain([&self.gone])
    }

    /// Returns the payload that was moved on all paths, to and from all peers.
    #[must_use]
    pub fn total(&self) -> Traffic {
        let all = self.all().map(PeerStats::total);
        all.fold(Traffic::default(), |sum, traffic| sum + traffic)
    }

    /// Returns the transfers of one kind that the session has posted.
    #[must_use]
    pub fn transfers(&self, kind: TransferKind) -> TransferStats {
        let mut sum = TransferStats::default();
        for peer in self.all() {
            let TransferStats {
                started,
                completed,
                bytes,
                aborted,
            } = peer.transfers(kind);
            sum.started += started;
            sum.completed += completed;
            sum.bytes += bytes;
            sum.aborted += aborted;
        }
        sum
    }

    /// Returns the number of transfers that have failed.
    #[must_use]
    pub fn failed(&self) -> u64 {
        self.all().map(|peer| peer.failures.total()).sum()
    }

    /// Returns the number of transfers that were started and have not ended.
    #[must_use]
    pub fn in_flight(&self) -> u64 {
        self.all().map(PeerStats::in_flight).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_in_the_first_class_that_holds_them() {
        let bounds = [4 << 10, 64 << 10, 1 << 20, 16 << 20];
        for (bound, class) in bounds.into_iter().zip(SizeClass::ALL) {
            assert_eq!(SizeClass::of(bound), class);
            assert_ne!(SizeClass::of(bound + 1), class);
        }
        assert_eq!(SizeClass::of(0), SizeClass::UpTo4K);
        assert_eq!(SizeClass::of(u64::MAX), SizeClass::Larger);
    }

    #[test]
    fn quantiles_are_bounds_of_buckets() {
        let mut histogram = Histogram::default();
        assert_eq!((histogram.quantile(0.5), histogram.mean()), (None, None));
        histogram.counts[3] = 90;
        histogram.counts[10] = 9;
        histogram.counts[BUCKETS - 1] = 1;
        histogram.nanos = 1_000_000;
        assert_eq!(histogram.quantile(0.5), Some(Duration::from_micros(8)));
        assert_eq!(histogram.quantile(0.99), Some(Duration::from_micros(1024)));
        assert_eq!(histogram.quantile(1.0), None, "above all bounds");
        assert_eq!(histogram.mean(), Some(Duration::from_micros(10)));
    }
}
