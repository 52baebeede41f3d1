//! Chunks in flight in one direction of a lane.

use alloc::collections::VecDeque;

use super::{Chunk, ChunkId};

/// Chunks of this side in flight in one direction, oldest first.
#[derive(Debug)]
pub(super) struct Outstanding<C> {
    // len ≤ window
    pub(super) chunks: VecDeque<C>,
    window: usize,
}

impl<C: Chunk> Outstanding<C> {
    pub(super) fn new(window: usize) -> Self {
        Self {
            chunks: VecDeque::new(),
            window,
        }
    }

    pub(super) fn is_full(&self) -> bool {
        self.chunks.len() >= self.window
    }

    /// Removes a chunk. Answers mostly come in order, so that the first chunk is the likeliest.
    pub(super) fn take(&mut self, id: ChunkId) -> Option<C> {
        let at = self.chunks.iter().position(|chunk| chunk.id() == id)?;
        self.chunks.remove(at)
    }

    pub(super) fn of_transfer(&self, transfer: u64) -> usize {
        let same = |chunk: &&C| chunk.id().transfer == transfer;
        self.chunks.iter().filter(same).count()
    }
}
