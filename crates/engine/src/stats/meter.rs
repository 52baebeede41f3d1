//! Counts one transfer.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use super::cells::{BUCKETS, Cell};
use super::counters::PeerCounters;
use super::data::{SizeClass, TransferKind};
use crate::error::ErrorKind;

/// How a transfer has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Completed,
    Failed(ErrorKind),
    Aborted,
}

/// Counts one transfer: its start and its end.
#[derive(Debug)]
pub(crate) struct Meter {
    peer: Arc<PeerCounters>,
    kind: TransferKind,
    bytes: AtomicU64,
    started: Instant,
}

impl std::fmt::Debug for PeerCounters {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PeerCounters").finish_non_exhaustive()
    }
}

impl Meter {
    /// Counts a transfer that starts now. The caller must call [`Meter::end`] exactly once.
    pub(crate) fn start(
        peer: &Arc<PeerCounters>,
        kind: TransferKind,
        bytes: u64,
        started: Instant,
    ) -> Self {
        peer.block().add(Cell::started(kind), 1);
        Self {
            peer: Arc::clone(peer),
            kind,
            bytes: AtomicU64::new(bytes),
            started,
        }
    }

    /// Sets the size of a transfer that was not known when it started.
    pub(crate) fn set_bytes(&self, bytes: u64) {
        self.bytes.store(bytes, Ordering::Relaxed);
    }

    /// Counts the end of the transfer.
    pub(crate) fn end(&self, outcome: Outcome) {
        let block = self.peer.block();
        match outcome {
            Outcome::Completed => {
                let bytes = self.bytes.load(Ordering::Relaxed);
                let nanos = u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX);
                let class = SizeClass::of(bytes);
                block.add(Cell::completed(self.kind), 1);
                block.add(Cell::bytes(self.kind), bytes);
                block.add(Cell::latency(class, bucket(nanos)), 1);
                block.add(Cell::latency_nanos(class), nanos);
            }
            Outcome::Aborted => block.add(Cell::aborted(self.kind), 1),
            Outcome::Failed(cause) => block.add(Cell::failed(cause), 1),
        }
    }
}

/// Returns the bucket of a duration: the first whose bound, 2 to the power of its index in µs, is
/// not below the duration.
fn bucket(nanos: u64) -> usize {
    let micros = nanos.div_ceil(1000).max(1);
    let index = u64::BITS - (micros - 1).leading_zeros();
    (index as usize).min(BUCKETS - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_is_in_the_first_bucket_that_is_not_shorter() {
        let cases = [
            (0, 0),
            (1000, 0),
            (1001, 1),
            (2000, 1),
            (2001, 2),
            (4000, 2),
            (4001, 3),
            (16_777_216_000, 24),
            (16_777_216_001, 25),
            (u64::MAX, 25),
        ];
        for (nanos, expected) in cases {
            assert_eq!(bucket(nanos), expected, "{nanos} ns");
        }
    }
}
