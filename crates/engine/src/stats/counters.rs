//! The counters that threads write.

use std::cell::Cell as LocalCell;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use super::cells::{Block, Cell, Count, Side, Sums};
use super::data::{LaneWaits, Moved, PathKind, Traffic};
use crate::sync::{Mutex, Rank};

/// The number of blocks of a peer's counters. Threads are assigned to blocks in turn, so that a few
/// threads share none.
const BLOCKS: usize = 4;

/// Adds to a counter that is written under one lock only, and read at any time without it.
#[inline]
fn add_locked(counter: &AtomicU64, count: u64) {
    counter.store(counter.load(Ordering::Relaxed) + count, Ordering::Relaxed);
}

/// Chunks and bytes, written under one lock.
#[derive(Default)]
struct Pair {
    chunks: AtomicU64,
    bytes: AtomicU64,
}

impl Pair {
    #[inline]
    fn add(&self, bytes: u64) {
        add_locked(&self.chunks, 1);
        add_locked(&self.bytes, bytes);
    }

    fn get(&self) -> Moved {
        Moved {
            chunks: self.chunks.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
        }
    }
}

/// Counters that are written under the lock of a lane's sending half.
#[derive(Default)]
#[repr(align(128))]
struct Sending {
    served: [Pair; PathKind::OF_LANES],
    window_waits: AtomicU64,
    socket_waits: AtomicU64,
}

/// Counters that are written under the lock of a lane's receiving half.
#[derive(Default)]
#[repr(align(128))]
struct Receiving {
    written: [Pair; PathKind::OF_LANES],
    read: [Pair; PathKind::OF_LANES],
    landed: [Pair; PathKind::OF_LANES],
    room_waits: AtomicU64,
}

/// The counters of one stream of a lane.
#[derive(Default)]
pub(crate) struct LaneCounters {
    sending: Sending,
    receiving: Receiving,
}

const _: () = assert!(size_of::<LaneCounters>() < 4096, "memory per lane");

impl LaneCounters {
    /// Counts an answer to a READ of the peer that was handed to the network. The caller holds the
    /// sending half.
    #[inline]
    pub(crate) fn served(&self, path: PathKind, bytes: u64) {
        self.sending.served[path as usize].add(bytes);
    }

    /// Counts one wait of chunks for the window. The caller holds the sending half.
    pub(crate) fn waits_for_window(&self) {
        add_locked(&self.sending.window_waits, 1);
    }

    /// Counts one wait for the socket, which accepted no more bytes. The caller holds the sending
    /// half.
    pub(crate) fn waits_for_socket(&self) {
        add_locked(&self.sending.socket_waits, 1);
    }

    /// Counts a chunk of this session's WRITE that the peer has acknowledged. The caller holds the
    /// receiving half.
    #[inline]
    pub(crate) fn written(&self, path: PathKind, bytes: u64) {
        self.receiving.written[path as usize].add(bytes);
    }

    /// Counts a chunk that has landed here: of a READ of this session, or of a WRITE of the peer.
    /// The caller holds the receiving half.
    #[inline]
    pub(crate) fn landed(&self, path: PathKind, is_ours: bool, bytes: u64) {
        let list = match is_ours {
            true => &self.receiving.read,
            false => &self.receiving.landed,
        };
        list[path as usize].add(bytes);
    }

    /// Counts one wait of a frame for room in the queue of its message. The caller holds the
    /// receiving half.
    pub(crate) fn waits_for_room(&self) {
        add_locked(&self.receiving.room_waits, 1);
    }

    /// Returns the payload that was moved on one path.
    pub(crate) fn traffic(&self, path: PathKind) -> Traffic {
        let at = path as usize;
        if at >= PathKind::OF_LANES {
            return Traffic::default();
        }
        Traffic {
            written: self.receiving.written[at].get(),
            read: self.receiving.read[at].get(),
            landed: self.receiving.landed[at].get(),
            served: self.sending.served[at].get(),
        }
    }

    pub(crate) fn waits(&self) -> LaneWaits {
        LaneWaits {
            window: self.sending.window_waits.load(Ordering::Relaxed),
            socket: self.sending.socket_waits.load(Ordering::Relaxed),
            room: self.receiving.room_waits.load(Ordering::Relaxed),
        }
    }

    fn add_to(&self, sums: &mut Sums) {
        for path in PathKind::ALL {
            let traffic = self.traffic(path);
            let sides = [
                (Side::Written, traffic.written),
                (Side::Read, traffic.read),
                (Side::Landed, traffic.landed),
                (Side::Served, traffic.served),
            ];
            for (side, moved) in sides {
                let chunks = Cell::chunks(path, side);
                sums.add(chunks, moved.chunks);
                sums.add(chunks.next(), moved.bytes);
            }
        }
        let waits = self.waits();
        sums.add(Cell::count(Count::WindowWaits), waits.window);
        sums.add(Cell::count(Count::SocketWaits), waits.socket);
        sums.add(Cell::count(Count::RoomWaits), waits.room);
    }
}

/// The counters of a lane's stream. Dropping the meter adds them to the counters of the lane's
/// peer.
#[derive(Default)]
pub(crate) struct LaneMeter {
    counters: Arc<LaneCounters>,
    peer: OnceLock<Arc<PeerCounters>>,
}

impl LaneMeter {
    /// Assigns the lane to a peer, whose sums include the lane from then on. Later calls do
    /// nothing.
    pub(crate) fn belongs_to(&self, peer: &Arc<PeerCounters>) {
        if self.peer.set(Arc::clone(peer)).is_ok() {
            peer.lanes.lock().live.push(Arc::clone(&self.counters));
        }
    }
}

impl std::ops::Deref for LaneMeter {
    type Target = LaneCounters;

    fn deref(&self) -> &LaneCounters {
        &self.counters
    }
}

/// Retires the counters: every thread that wrote them has released the lane.
impl Drop for LaneMeter {
    fn drop(&mut self) {
        if let Some(peer) = self.peer.get() {
            peer.lanes.lock().retire(&self.counters);
        }
    }
}

/// The counters of one peer, over all its connections.
#[derive(Default)]
pub(crate) struct PeerCounters {
    blocks: [Block; BLOCKS],
    lanes: Mutex<Lanes>,
}

struct Lanes {
    live: Vec<Arc<LaneCounters>>,
    /// The sums of lanes that are gone.
    gone: Sums,
}

impl Lanes {
    fn retire(&mut self, lane: &Arc<LaneCounters>) {
        self.live.retain(|known| !Arc::ptr_eq(known, lane));
        lane.add_to(&mut self.gone);
    }
}

impl Default for Mutex<Lanes> {
    fn default() -> Self {
        let lanes = Lanes {
            live: Vec::new(),
            gone: Sums::default(),
        };
        Self::new(Rank::Counters, lanes)
    }
}

impl PeerCounters {
    #[inline]
    pub(super) fn block(&self) -> &Block {
        &self.blocks[own_block()]
    }

    /// Counts an event.
    pub(crate) fn count(&self, event: Count) {
        self.block().add(Cell::count(event), 1);
    }

    /// Counts a chunk that is moved again because its lane was lost while the chunk was in flight.
    pub(crate) fn retried(&self, bytes: u64) {
        let block = self.block();
        block.add(Cell::count(Count::RetriedChunks), 1);
        block.add(Cell::count(Count::RetriedBytes), bytes);
    }

    /// Counts chunks of this session's transfers that no lane counts: direct copies, and chunks
    /// that a lost lane had delivered.
    #[inline]
    pub(crate) fn moved(&self, path: PathKind, is_write: bool, chunks: u64, bytes: u64) {
        let side = match is_write {
            true => Side::Written,
            false => Side::Read,
        };
        let (block, cell) = (self.block(), Cell::chunks(path, side));
        block.add(cell, chunks);
        block.add(cell.next(), bytes);
    }

    /// Counts a notification that was handed to the connection.
    pub(crate) fn notified(&self, bytes: usize) {
        self.notification(true, bytes);
    }

    /// Counts a notification that has arrived.
    pub(crate) fn heard(&self, bytes: usize) {
        self.notification(false, bytes);
    }

    fn notification(&self, sent: bool, bytes: usize) {
        let (block, cell) = (self.block(), Cell::notifications(sent));
        block.add(cell, 1);
        block.add(cell.next(), bytes as u64);
    }

    /// Returns the bytes of all chunks that have arrived on a path: acknowledged or landed.
    pub(crate) fn arrived(&self, path: PathKind) -> u64 {
        let sums = self.sums();
        let sides = [Side::Written, Side::Read, Side::Landed];
        sides.map(|side| sums.moved(path, side).bytes).iter().sum()
    }

    pub(super) fn sums(&self) -> Sums {
        // Hold the lock while adding up: a lane that retires meanwhile would be counted twice, or
        // not at all.
        let lanes = self.lanes.lock();
        let mut sums = lanes.gone.clone();
        for lane in &lanes.live {
            lane.add_to(&mut sums);
        }
        drop(lanes);
        for block in &self.blocks {
            sums.add_block(block);
        }
        sums
    }
}

/// Returns the index of the block that this thread adds to.
#[inline]
fn own_block() -> usize {
    thread_local! {
        static OWN: LocalCell<usize> = const { LocalCell::new(usize::MAX) };
    }
    OWN.with(|own| match own.get() {
        usize::MAX => {
            static NEXT: AtomicUsize = AtomicUsize::new(0);
            let block = NEXT.fetch_add(1, Ordering::Relaxed) % BLOCKS;
            own.set(block);
            block
        }
        block => block,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_are_part_of_their_peer_before_and_after_they_go() {
        let peer = Arc::new(PeerCounters::default());
        let count = |cell| peer.sums().get(cell);
        let landed = Cell::chunks(PathKind::Staged, Side::Landed);
        let lane = LaneMeter::default();
        lane.belongs_to(&peer);
        lane.landed(PathKind::Staged, false, 700);
        lane.waits_for_window();
        assert_eq!([count(landed), count(landed.next())], [1, 700]);
        drop(lane);
        assert_eq!([count(landed), count(landed.next())], [1, 700]);
        assert_eq!(count(Cell::count(Count::WindowWaits)), 1);
        let other = LaneMeter::default();
        other.belongs_to(&peer);
        other.landed(PathKind::Staged, false, 1);
        assert_eq!([count(landed), count(landed.next())], [2, 701]);
    }

    #[test]
    fn no_count_is_lost_between_threads() {
        const ROUNDS: u64 = 1000;
        let peer = PeerCounters::default();
        std::thread::scope(|scope| {
            for _ in 0..2 * BLOCKS {
                scope.spawn(|| {
                    for _ in 0..ROUNDS {
                        peer.moved(PathKind::Local, true, 1, 3);
                        peer.heard(5);
                    }
                });
            }
        });
        let all = 2 * BLOCKS as u64 * ROUNDS;
        let sums = peer.sums();
        let moved = sums.moved(PathKind::Local, Side::Written);
        assert_eq!((moved.chunks, moved.bytes), (all, 3 * all));
        let heard = Cell::notifications(false);
        assert_eq!([sums.get(heard), sums.get(heard.next())], [all, 5 * all]);
        assert_eq!(sums.get(Cell::notifications(true)), 0);
    }
}
