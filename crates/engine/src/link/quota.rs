//! How much memory peers can make a session keep for them.
//!
//! What a peer sends and the application has not taken is kept: notifications that nobody has read,
//! tagged messages without a receive. Each of them holds its bytes ([`Held`]) of its peer's
//! [`Share`] of the session's [`Quota`]. They are reserved when the frame begins, before its payload
//! is read, so that frames which are under way on many lanes count too, and given back when the
//! application takes it. A frame for which there is no room is not read: its lane is *paused*, until
//! so much was given back that [`Control::resume`] has it looked at again.
//!
//! A pause ends by what this session's application does, or by a limit of time; it never waits for
//! the peer. So two sessions that pause for each other's messages do not wait for each other.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use tcpx_proto::frame::{FLAG_NOTIFY, Header, Kind};

use super::Control;

/// One peer may use this part of the quota: one that is not read does not keep the others out.
const PEERS: usize = 2;

/// Bytes that a peer may always use: others that use up the quota do not silence it.
const GUARANTEED_BYTES: usize = 64 << 10;

/// What keeping a notification costs besides its message: its place in the inbox, and allocations.
const NOTIFICATION_BYTES: usize = 128;

/// What keeping an announced message costs besides its bytes: a queue for its tag, and its place.
const ANNOUNCEMENT_BYTES: usize = 512;

/// What each entry of an announcement's table costs.
const ENTRY_BYTES: usize = 32;

/// The longest notification that a session with this `queue_bytes` takes.
pub(crate) fn longest_notification(queue_bytes: usize) -> usize {
    queue_bytes / PEERS - NOTIFICATION_BYTES
}

/// The bytes that a frame makes a session keep until its application takes them.
pub(crate) fn cost(header: &Header) -> Option<usize> {
    // The lengths were checked with the header: none comes near an overflow.
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

/// What all peers of a session may make it keep.
pub(crate) struct Quota {
    limit: usize,
    used: AtomicUsize,
    /// A lane was paused since the last wake-up.
    has_paused: AtomicBool,
    /// Nobody takes anything any more: what does not fit is dropped.
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

    /// The most that one peer may use; also the most that waits to be sent to one.
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

    /// Drops from now on what does not fit, so that the lanes go on to the end of the session.
    pub(crate) fn close(&self) {
        self.is_closing.store(true, Ordering::SeqCst);
        self.control.resume();
    }

    #[cfg(test)]
    pub(crate) fn used(&self) -> usize {
        self.used.load(Ordering::SeqCst)
    }
}

/// What one peer may make a session keep.
pub(crate) struct Share {
    quota: Arc<Quota>,
    used: AtomicUsize,
}

/// What came of reserving memory.
pub(crate) enum Reserved {
    /// There is room.
    Room(Held),
    /// There is none now: somebody calls when there may be.
    Full,
    /// There will be none, and nobody will look for what this was for.
    Nobody,
}

impl Share {
    /// Reserves memory for something that the application has to take.
    pub(crate) fn reserve(self: &Arc<Self>, bytes: usize) -> Reserved {
        if let Some(held) = self.try_reserve(bytes) {
            return Reserved::Room(held);
        }
        if self.quota.is_closing.load(Ordering::SeqCst) {
            return Reserved::Nobody;
        }
        // Whoever gives memory back sees this, or what it gave back is seen by the second attempt.
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
        // Not for each message: lanes go on when there is room for many.
        if left <= quota.of_a_peer() / 2
            && quota.has_paused.load(Ordering::SeqCst)
            && quota.has_paused.swap(false, Ordering::SeqCst)
        {
            quota.control.resume();
        }
    }
}

/// Adds where the sum stays within `limit`; returns what there was before.
fn add_within(used: &AtomicUsize, bytes: usize, limit: usize) -> Option<usize> {
    let add = |used: usize| used.checked_add(bytes).filter(|sum| *sum <= limit);
    used.fetch_update(Ordering::SeqCst, Ordering::SeqCst, add)
        .ok()
}

/// Bytes that are kept for a peer, until this is dropped.
pub(crate) struct Held {
    share: Arc<Share>,
    bytes: usize,
}

impl Held {
    /// Gives a part of the bytes back.
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
        // Others that use up the quota do not silence a peer.
        let little = held(&peers[2], GUARANTEED_BYTES);
        assert!(little.is_some());
        assert!(held(&peers[2], 1).is_none());
        drop((all, little));
        assert_eq!(quota.used(), 0);
        assert!(held(&peers[2], 4 * MIB).is_some());
    }

    #[test]
    fn whoever_was_paused_is_called_once_there_is_room_for_more() {
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
        assert_eq!(calls(), before + 1, "nobody was paused since");
        drop(first);
        assert_eq!(quota.used(), 0);
    }

    #[test]
    fn a_session_that_closes_pauses_nobody() {
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
    fn threads_that_reserve_at_once_use_no_more_than_there_is() {
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
