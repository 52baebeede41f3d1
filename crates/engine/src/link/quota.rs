//! Limits for memory that a session keeps on behalf of peers.
//!
//! A session keeps data that a peer has sent and the application has not taken: notifications, and
//! tagged messages without a matching receive. Each item holds its bytes ([`Held`]) of its peer's
//! [`Share`] of the session's [`Quota`]. Bytes are reserved when the frame begins, before its
//! payload is read, so that frames in flight on many lanes count as well, and returned when the
//! application takes the item. A frame without room is not read: its lane is *paused*, until enough
//! bytes were returned and [`Control::resume`] calls the lane again.
//!
//! `models/` checks under every interleaving that a paused lane is called again.
//!
//! A pause ends when this session's application takes items, or after a time limit; it never waits
//! for the peer. So two sessions that pause each other's lanes do not wait for each other.

use std::sync::Arc;

use tcpx_proto::frame::{FLAG_NOTIFY, Header, Kind};

use super::Control;
use crate::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Divides the quota among peers: a peer whose messages are not taken does not block the others.
const PEERS: usize = 2;

/// Bytes that a peer may always use, even if others use up the quota.
const GUARANTEED_BYTES: usize = 64 << 10;

/// Overhead of keeping a notification: its place in the inbox, and allocations.
const NOTIFICATION_BYTES: usize = 128;

/// Overhead of keeping an announced message: a queue for its tag, and its place.
const ANNOUNCEMENT_BYTES: usize = 512;

/// Cost of each entry of an announcement's table.
const ENTRY_BYTES: usize = 32;

/// Returns the length of the longest notification that a session with this `queue_bytes` accepts.
pub(crate) fn longest_notification(queue_bytes: usize) -> usize {
    queue_bytes / PEERS - NOTIFICATION_BYTES
}

/// Returns the bytes that a session keeps for a frame until its application takes them.
pub(crate) fn cost(header: &Header) -> Option<usize> {
    // The lengths were checked with the header: the sums cannot overflow.
    match header.kind {
        Kind::Notify => Some(header.payload as usize + NOTIFICATION_BYTES),
        Kind::Write if header.flags & FLAG_NOTIFY != 0 => {
            Some(header.extra as usize + NOTIFICATION_BYTES)
        }
        Kind::Send => {
            let entries = header.entries as usize * ENTRY_BYTES;
            Some(header.payload as usize + entries + ANNOUNCEMENT_BYTES)
        }
        _ => None,
    }
}

/// Memory that a session keeps for all peers.
pub(crate) struct Quota {
    limit: usize,
    used: AtomicUsize,
    /// True if a lane was paused since the last wake-up.
    has_paused: AtomicBool,
    /// True once the application takes nothing any more: data that does not fit is dropped.
    is_closing: AtomicBool,
    control: Arc<dyn Control>,
}

impl Quota {
    pub(crate) fn new(limit: usize, control: Arc<dyn Control>) -> Arc<Self> {
        Arc::new(Self {
            limit,
            used: AtomicUsize::new(0),
            has_paused: AtomicBool::new(false),
            is_closing: AtomicBool::new(false),
            control,
        })
    }

    /// Returns the limit for one peer; it also limits the bytes queued for one peer.
    pub(crate) fn of_a_peer(&self) -> usize {
        self.limit / PEERS
    }

    /// Makes the share of a peer.
    pub(crate) fn share(self: &Arc<Self>) -> Arc<Share> {
        Arc::new(Share {
            quota: Arc::clone(self),
            used: AtomicUsize::new(0),
        })
    }

    /// Drops data that does not fit from now on,
    /// so that the lanes keep moving until the session ends.
    pub(crate) fn close(&self) {
        self.is_closing.store(true, Ordering::SeqCst);
        self.control.resume();
    }

    #[cfg(test)]
    pub(crate) fn used(&self) -> usize {
        self.used.load(Ordering::SeqCst)
    }
}

/// Memory that a session keeps for one peer.
pub(crate) struct Share {
    quota: Arc<Quota>,
    used: AtomicUsize,
}

/// Result of a reservation.
pub(crate) enum Reserved {
    /// There is room.
    Room(Held),
    /// There is currently no room; the lane is called when there may be.
    Full,
    /// There will be no room, and the item will not be needed.
    Nobody,
}

impl Share {
    /// Reserves memory for an item that the application has to take.
    pub(crate) fn reserve(self: &Arc<Self>, bytes: usize) -> Reserved {
        if let Some(held) = self.try_reserve(bytes) {
            return Reserved::Room(held);
        }
        if self.quota.is_closing.load(Ordering::SeqCst) {
            return Reserved::Nobody;
        }
        // Either the thread that returns memory sees this flag, or the second attempt sees the
        // returned memory.
        self.quota.has_paused.store(true, Ordering::SeqCst);
        match self.try_reserve(bytes) {
            Some(held) => Reserved::Room(held),
            None => Reserved::Full,
        }
    }

    fn try_reserve(self: &Arc<Self>, bytes: usize) -> Option<Held> {
        let quota = &self.quota;
        let of_a_peer = quota.of_a_peer();
        let before = add_within(&self.used, bytes, of_a_peer)?;
        if before + bytes <= GUARANTEED_BYTES {
            quota.used.fetch_add(bytes, Ordering::SeqCst);
        } else if add_within(&quota.used, bytes, quota.limit).is_none() {
            self.used.fetch_sub(bytes, Ordering::SeqCst);
            return None;
        }
        Some(Held {
            share: Arc::clone(self),
            bytes,
        })
    }

    fn give_back(&self, bytes: usize) {
        let quota = &self.quota;
        quota.used.fetch_sub(bytes, Ordering::SeqCst);
        let left = self.used.fetch_sub(bytes, Ordering::SeqCst) - bytes;
        // Not after each message: lanes resume when there is room for many.
        if left <= quota.of_a_peer() / 2
            && quota.has_paused.load(Ordering::SeqCst)
            && quota.has_paused.swap(false, Ordering::SeqCst)
        {
            quota.control.resume();
        }
    }
}

/// Adds `bytes` if the sum stays within `limit`; returns the previous value.
fn add_within(used: &AtomicUsize, bytes: usize, limit: usize) -> Option<usize> {
    let add = |used: usize| used.checked_add(bytes).filter(|sum| *sum <= limit);
    used.fetch_update(Ordering::SeqCst, Ordering::SeqCst, add)
        .ok()
}

/// Bytes kept for a peer, until this value is dropped.
pub(crate) struct Held {
    share: Arc<Share>,
    bytes: usize,
}

impl Held {
    /// Returns a part of the bytes.
    pub(crate) fn reduce(&mut self, bytes: usize) {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        self.share.give_back(bytes);
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.share.give_back(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::{GUARANTEED_BYTES, Held, Quota, Reserved, Share};
    use crate::link::{Control, Link};

    const MIB: usize = 1 << 20;

    #[derive(Default)]
    struct Calls(AtomicUsize);

    impl Control for Calls {
        fn stay_awake(&self) {}
        fn reap(&self, _link: Arc<dyn Link>) {}
        fn lane_lost(&self, _link: Arc<dyn Link>) {}
        fn neighbour_waits(&self) {}

        fn resume(&self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn quota(limit: usize) -> (Arc<Quota>, Arc<Calls>) {
        let calls = Arc::new(Calls::default());
        let control: Arc<dyn Control> = Arc::clone(&calls) as Arc<dyn Control>;
        (Quota::new(limit, control), calls)
    }

    fn held(share: &Arc<Share>, bytes: usize) -> Option<Held> {
        match share.reserve(bytes) {
            Reserved::Room(held) => Some(held),
            Reserved::Full | Reserved::Nobody => None,
        }
    }

    #[test]
    fn a_peer_has_its_share_and_all_of_them_the_quota() {
        let (quota, _) = quota(8 * MIB);
        let peers: Vec<_> = (0..3).map(|_| quota.share()).collect();
        let all: Vec<_> = peers[..2].iter().map(|p| held(p, 4 * MIB)).collect();
        assert!(all.iter().all(Option::is_some));
        assert!(held(&peers[0], 1).is_none(), "more than its share");
        assert!(held(&peers[2], MIB).is_none(), "more than the quota");
        // A peer keeps its guaranteed bytes when others use up the quota.
        let little = held(&peers[2], GUARANTEED_BYTES);
        assert!(little.is_some());
        assert!(held(&peers[2], 1).is_none());
        drop((all, little));
        assert_eq!(quota.used(), 0);
        assert!(held(&peers[2], 4 * MIB).is_some());
    }

    #[test]
    fn paused_lanes_are_called_once_there_is_room_for_many() {
        let (quota, calls) = quota(4 * MIB);
        let calls = || calls.0.load(Ordering::SeqCst);
        let peer = quota.share();
        let mut first = held(&peer, MIB).unwrap();
        let second = held(&peer, MIB).unwrap();
        assert!(matches!(peer.reserve(1), Reserved::Full));
        let before = calls();
        first.reduce(MIB / 2);
        assert_eq!(calls(), before, "half of the share is in use");
        first.reduce(MIB);
        assert_eq!(calls(), before + 1);
        drop(second);
        assert_eq!(calls(), before + 1, "no lane was paused since");
        drop(first);
        assert_eq!(quota.used(), 0);
    }

    #[test]
    fn closing_session_pauses_no_lane() {
        let (quota, calls) = quota(4 * MIB);
        let peer = quota.share();
        let kept = held(&peer, 2 * MIB);
        assert!(matches!(peer.reserve(1), Reserved::Full));
        quota.close();
        assert!(calls.0.load(Ordering::SeqCst) > 0);
        assert!(matches!(peer.reserve(1), Reserved::Nobody));
        drop(kept);
    }

    #[test]
    fn concurrent_reservations_stay_within_the_quota() {
        let (quota, _) = quota(2 * MIB);
        let peers: Vec<_> = (0..8).map(|_| quota.share()).collect();
        std::thread::scope(|scope| {
            for peer in &peers {
                scope.spawn(|| {
                    let mut kept = Vec::new();
                    for round in 0..2000 {
                        kept.extend(held(peer, 100_000));
                        assert!(kept.len() <= MIB / 100_000);
                        if round % 7 == 0 {
                            kept.clear();
                        }
                    }
                });
            }
        });
        assert_eq!(quota.used(), 0);
    }
}
