//! The simulated network.

use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::time::Duration;

/// Number of bytes on a link above which a sender waits.
const LINK_BYTES: usize = 2048;

/// Reproducible random numbers (xorshift).
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

/// One direction of a lane.
pub(super) struct Link {
    pub(super) latency: Duration,
    /// Bytes per second.
    pub(super) bandwidth: u64,
    /// Whether nothing arrives.
    pub(super) stalled: bool,
    /// When the last byte sent has left.
    left: Duration,
    /// Pieces in flight with their arrival times, in order.
    pieces: VecDeque<(Duration, Vec<u8>)>,
}

impl Link {
    pub(super) fn new(latency: Duration, bandwidth: u64) -> Self {
        Self {
            latency,
            bandwidth,
            stalled: false,
            left: Duration::ZERO,
            pieces: VecDeque::new(),
        }
    }

    pub(super) fn has_room(&self) -> bool {
        self.pieces
            .iter()
            .map(|(_, bytes)| bytes.len())
            .sum::<usize>()
            < LINK_BYTES
    }

    pub(super) fn send(&mut self, now: Duration, bytes: Vec<u8>) {
        let nanos = bytes.len() as u64 * 1_000_000_000 / self.bandwidth;
        self.left = self.left.max(now) + Duration::from_nanos(nanos);
        let before = self.pieces.back().map_or(Duration::ZERO, |(at, _)| *at);
        self.pieces
            .push_back((before.max(self.left + self.latency), bytes));
    }

    pub(super) fn arrival(&self) -> Option<Duration> {
        self.pieces
            .front()
            .map(|(at, _)| *at)
            .filter(|_| !self.stalled)
    }

    /// Returns the oldest piece in flight.
    pub(super) fn receive(&mut self) -> Option<Vec<u8>> {
        self.pieces.pop_front().map(|(_, bytes)| bytes)
    }
}
