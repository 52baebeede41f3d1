//! Counts which chunks of a run are taken and settled.
//! `models/` checks this file under every interleaving.

use crate::sync::atomic::{AtomicU32, Ordering};
use crate::sync::{Mutex, Rank};

/// Value of `next` in a closed tally. Far above any chunk count, far below overflow.
const CLOSED: u32 = 1 << 31;

/// Hands out the chunks of a run to its lanes, and counts settled chunks.
///
/// Each chunk is [taken](Tally::take) by one lane, which settles it or [returns
/// it](Tally::give_back). [`Tally::close`] settles the chunks that no lane has. Exactly one call
/// returns `true`: the call that settles the last chunk. It happens after everything that was done
/// before the other chunks were settled.
pub(crate) struct Tally {
    chunks: u32,
    next: AtomicU32,
    /// Chunks that are not settled yet.
    left: AtomicU32,
    /// Number of chunks in `returned`; changes under its lock.
    returns: AtomicU32,
    /// Chunks that were taken and returned because their lane was lost.
    returned: Mutex<Returned>,
}

#[derive(Default)]
struct Returned {
    chunks: Vec<u32>,
    /// True once no more chunks are handed out.
    closed: bool,
}

impl Tally {
    /// Makes the tally of `chunks` chunks, fewer than 2³¹, none of them taken.
    pub(crate) fn new(chunks: u32) -> Self {
        Self {
            chunks,
            next: AtomicU32::new(0),
            left: AtomicU32::new(chunks),
            returns: AtomicU32::new(0),
            returned: Mutex::new(Rank::Leaf, Returned::default()),
        }
    }

    /// Takes the next chunk, if any.
    #[inline]
    pub(crate) fn take(&self) -> Option<usize> {
        if self.returns.load(Ordering::Acquire) > 0
            && let Some(index) = self.take_returned()
        {
            return Some(index);
        }
        // Checked first, so that polling an exhausted run does not increment `next` for ever.
        if self.next.load(Ordering::Relaxed) >= self.chunks {
            return None;
        }
        let index = self.next.fetch_add(1, Ordering::Relaxed);
        (index < self.chunks).then_some(index as usize)
    }

    fn take_returned(&self) -> Option<usize> {
        let mut returned = self.returned.lock();
        let index = returned.chunks.pop()?;
        self.returns
            .store(returned.chunks.len() as u32, Ordering::Release);
        Some(index as usize)
    }

    /// Returns a chunk that was taken and has not moved, so that it is handed out again. In a
    /// closed tally the chunk is settled instead, and the result is as for [`Tally::settle`].
    #[must_use]
    pub(crate) fn give_back(&self, index: usize) -> bool {
        let mut returned = self.returned.lock();
        if returned.closed {
            drop(returned);
            return self.settle(1);
        }
        returned.chunks.push(index as u32);
        self.returns
            .store(returned.chunks.len() as u32, Ordering::Release);
        false
    }

    /// Returns the next chunk without taking it, if any. Another lane may take it first.
    pub(crate) fn peek(&self) -> Option<usize> {
        let mut index = self.next.load(Ordering::Relaxed);
        if self.returns.load(Ordering::Acquire) > 0
            && let Some(last) = self.returned.lock().chunks.last()
        {
            index = *last;
        }
        (index < self.chunks).then_some(index as usize)
    }

    /// Returns an upper bound of the chunks left to take.
    #[inline]
    pub(crate) fn left_to_take(&self) -> usize {
        let taken = self.next.load(Ordering::Relaxed);
        let returned = self.returns.load(Ordering::Acquire);
        (self.chunks.saturating_sub(taken) + returned) as usize
    }

    /// Settles `chunks` chunks that had been taken.
    /// Returns true for the call that settles the last one.
    #[must_use]
    pub(crate) fn settle(&self, chunks: u32) -> bool {
        chunks > 0 && self.left.fetch_sub(chunks, Ordering::AcqRel) == chunks
    }

    /// Closes the tally: hands out no more chunks and settles the chunks that no lane has. Returns
    /// as [`Tally::settle`] does.
    #[must_use]
    pub(crate) fn close(&self) -> bool {
        let mut returned = self.returned.lock();
        returned.closed = true;
        let given_back = std::mem::take(&mut returned.chunks).len() as u32;
        self.returns.store(0, Ordering::Release);
        drop(returned);
        let taken = self.next.swap(CLOSED, Ordering::AcqRel).min(self.chunks);
        self.settle(self.chunks - taken + given_back)
    }
}
