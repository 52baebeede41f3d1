//! One chunk of a run: the unit that a lane moves at once.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tcpx_cuda::Device;
use tcpx_net::Span;
use tcpx_proto::frame::{FrameError, Table};
use tcpx_proto::lane::{self, ChunkId, Op, Take};

use super::plan::Layout;
use super::run::Run;
use crate::error::Error;
use crate::memory::Place;

/// One chunk of a run. Clones refer to the same chunk;
/// the lane that takes it from the run settles it once.
#[derive(Clone)]
pub(crate) struct ChunkRef {
    pub(crate) run: Arc<Run>,
    // Less than `run.plan.len()`.
    index: u32,
}

impl ChunkRef {
    fn layout(&self) -> &Layout {
        self.run.plan.layout(self.index as usize)
    }

    /// Returns the length of the payload.
    pub(crate) fn bytes(&self) -> usize {
        self.layout().bytes
    }

    /// Returns the numbers of region keys and entries in the table.
    pub(crate) fn table_counts(&self) -> (u16, u32) {
        let layout = self.layout();
        (layout.regions, layout.entries)
    }

    /// Returns the table in wire format.
    pub(crate) fn table(&self) -> &[u8] {
        self.run.plan.table(self.layout())
    }

    /// Decodes the table, as the peer that owns the memory would.
    pub(crate) fn read_table(&self) -> Result<Table<'_>, FrameError> {
        self.run.plan.read_table(self.layout())
    }

    /// Returns the local memory of the payload.
    pub(crate) fn spans(&self) -> &[Span] {
        self.run.plan.spans(self.layout())
    }

    /// Returns the device that holds the local memory, if sockets cannot access it.
    pub(crate) fn device(&self) -> Option<&Arc<dyn Device>> {
        self.run.plan.device(self.layout())
    }

    /// Returns the location of the local memory.
    pub(crate) fn place(&self) -> Place<'_> {
        self.run.plan.place(self.layout())
    }

    /// Returns the chunk to its run because its lane was lost before the chunk had moved. Returns
    /// true if the run is closed and this was its last chunk: then the caller concludes the run.
    #[must_use]
    pub(crate) fn give_back(&self) -> bool {
        self.run.give_back(self.index as usize)
    }

    /// Returns whether bytes may still be written to the local memory. Records the error in the run
    /// if the memory was revoked.
    pub(crate) fn may_land(&self) -> bool {
        if let Some(memory) = self.run.plan.revoked() {
            let error = Error::RegionDeregistered(memory.id);
            self.run.completion.record(error);
            return false;
        }
        !self.run.is_aborted()
    }
}

impl lane::Chunk for ChunkRef {
    fn id(&self) -> ChunkId {
        ChunkId {
            transfer: self.run.id,
            seq: self.index,
        }
    }

    fn bytes(&self) -> u64 {
        self.layout().bytes as u64
    }
}

/// A run as a lane sees it: a source of chunks.
pub(crate) struct Offered(pub(crate) Arc<Run>);

impl Offered {
    /// Takes the next chunk that no lane has taken.
    pub(crate) fn next(run: &Arc<Run>) -> Option<ChunkRef> {
        run.take().map(|index| ChunkRef {
            run: Arc::clone(run),
            index: index as u32,
        })
    }
}

impl lane::Offer for Offered {
    type Chunk = ChunkRef;

    fn transfer(&self) -> u64 {
        self.0.id
    }

    fn op(&self) -> Op {
        self.0.plan.op
    }

    fn chunks(&self) -> usize {
        self.0.plan.len()
    }

    fn take(&self) -> Take<ChunkRef> {
        // Read before the number of chunks left: an abort that came too late to stop the run
        // returned its memory after the last chunk was taken.
        if self.0.plan.revoked().is_some() || self.0.was_let_go() {
            return match self.0.left_to_take() {
                0 => Take::Nothing,
                _ => Take::Dead,
            };
        }
        Self::next(&self.0).map_or(Take::Nothing, Take::Chunk)
    }

    fn left(&self) -> usize {
        self.0.left_to_take()
    }

    fn lanes(&self, all: usize) -> usize {
        match self.0.lanes.load(Ordering::Relaxed) {
            0 => all,
            lanes => lanes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transfer::TransferState;
    use tcpx_proto::lane::Offer;

    /// A lane that still has the offer must not fail a run that other lanes have completed.
    #[test]
    fn run_that_was_aborted_too_late_is_not_dead() {
        let offered = Offered(Arc::new(Run::untouched(1)));
        assert!(matches!(offered.take(), Take::Chunk(_)));
        assert!(offered.0.completion.commit());
        assert!(!offered.0.completion.begin_abort());
        offered.0.let_go();
        assert!(matches!(offered.take(), Take::Nothing));
        assert!(offered.0.settle(1));
        offered.0.conclude(|_| {}, |_| {});
        assert_eq!(offered.0.completion.state(), TransferState::Done);
    }

    #[test]
    fn run_whose_memory_was_returned_hands_out_nothing() {
        let offered = Offered(Arc::new(Run::untouched(2)));
        assert!(matches!(offered.take(), Take::Chunk(_)));
        offered.0.let_go();
        assert!(matches!(offered.take(), Take::Dead));
    }
}
