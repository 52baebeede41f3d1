//! The layout of one peer's counters.
//!
//! Each counter is a cell of a flat array. Threads add to blocks of atomic cells; a reader adds the
//! blocks up, cell by cell, into [`Sums`].

use std::sync::atomic::{AtomicU64, Ordering};

use super::data::{Moved, PathKind, SizeClass, TransferKind};
use super::failures::Failures;
use crate::error::ErrorKind;

/// Buckets of a latency histogram: up to 2⁰, 2¹, … 2²⁴ µs (16.8 s), and above.
pub(super) const BUCKETS: usize = 26;

const KINDS: usize = TransferKind::ALL.len();
const PATHS: usize = PathKind::ALL.len();
const CLASSES: usize = SizeClass::ALL.len();
/// The number of variants of [`Side`].
const SIDES: usize = 4;

const STARTED: usize = 0;
const COMPLETED: usize = STARTED + KINDS;
const BYTES: usize = COMPLETED + KINDS;
const ABORTED: usize = BYTES + KINDS;
const FAILED: usize = ABORTED + KINDS;
const NOTIFICATIONS: usize = FAILED + Failures::CAUSES.len();
const EVENTS: usize = NOTIFICATIONS + 4;
const MOVED: usize = EVENTS + Count::ALL;
const LATENCY: usize = MOVED + PATHS * SIDES * 2;
const LATENCY_NANOS: usize = LATENCY + CLASSES * BUCKETS;
pub(super) const CELLS: usize = LATENCY_NANOS + CLASSES;

/// Who asked for a chunk, and which way its bytes went.
#[derive(Clone, Copy)]
pub(crate) enum Side {
    /// A WRITE of this session, acknowledged by the peer.
    Written,
    /// A READ of this session that has landed here.
    Read,
    /// A WRITE of the peer that has landed here.
    Landed,
    /// A READ of the peer, answered by this session.
    Served,
}

/// Events of a peer that are counted one by one.
#[derive(Clone, Copy)]
pub(crate) enum Count {
    Connections,
    ConnectionsLost,
    LanesLost,
    LanesRejoined,
    RetriedChunks,
    RetriedBytes,
    WindowWaits,
    SocketWaits,
    RoomWaits,
}

impl Count {
    const ALL: usize = 9;
}

/// The index of a cell.
#[derive(Clone, Copy)]
pub(super) struct Cell(usize);

impl Cell {
    pub(super) fn started(kind: TransferKind) -> Self {
        Self(STARTED + kind as usize)
    }

    pub(super) fn completed(kind: TransferKind) -> Self {
        Self(COMPLETED + kind as usize)
    }

    pub(super) fn bytes(kind: TransferKind) -> Self {
        Self(BYTES + kind as usize)
    }

    pub(super) fn aborted(kind: TransferKind) -> Self {
        Self(ABORTED + kind as usize)
    }

    pub(super) fn failed(cause: ErrorKind) -> Self {
        Self(FAILED + Failures::index(cause))
    }

    /// The number of notifications; the next cell has their bytes.
    pub(super) fn notifications(sent: bool) -> Self {
        Self(NOTIFICATIONS + 2 * usize::from(!sent))
    }

    pub(super) fn count(event: Count) -> Self {
        Self(EVENTS + event as usize)
    }

    /// The number of chunks; the next cell has their bytes.
    pub(super) fn chunks(path: PathKind, side: Side) -> Self {
        Self(MOVED + (path as usize * SIDES + side as usize) * 2)
    }

    pub(super) fn latency(class: SizeClass, bucket: usize) -> Self {
        Self(LATENCY + class as usize * BUCKETS + bucket)
    }

    pub(super) fn latency_nanos(class: SizeClass) -> Self {
        Self(LATENCY_NANOS + class as usize)
    }

    pub(super) fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

/// Cells that several threads may write. The alignment keeps two blocks from sharing a cache line,
/// or the pair of lines that some processors fetch together.
#[repr(align(128))]
pub(super) struct Block([AtomicU64; CELLS]);

impl Default for Block {
    fn default() -> Self {
        Self([const { AtomicU64::new(0) }; CELLS])
    }
}

impl Block {
    #[inline]
    pub(super) fn add(&self, cell: Cell, count: u64) {
        self.0[cell.0].fetch_add(count, Ordering::Relaxed);
    }
}

/// The sums of a peer's cells.
#[derive(Clone)]
pub(super) struct Sums(Box<[u64; CELLS]>);

impl Default for Sums {
    fn default() -> Self {
        Self(Box::new([0; CELLS]))
    }
}

impl Sums {
    pub(super) fn get(&self, cell: Cell) -> u64 {
        self.0[cell.0]
    }

    pub(super) fn moved(&self, path: PathKind, side: Side) -> Moved {
        let chunks = Cell::chunks(path, side);
        Moved {
            chunks: self.get(chunks),
            bytes: self.get(chunks.next()),
        }
    }

    pub(super) fn add(&mut self, cell: Cell, count: u64) {
        self.0[cell.0] += count;
    }

    pub(super) fn add_block(&mut self, block: &Block) {
        for (sum, cell) in self.0.iter_mut().zip(&block.0) {
            *sum += cell.load(Ordering::Relaxed);
        }
    }

    pub(super) fn add_all(&mut self, other: &Self) {
        for (sum, more) in self.0.iter_mut().zip(&*other.0) {
            *sum += more;
        }
    }
}
