//! One chunk of a run: what a lane moves at once.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tcpx_cuda::Device;
use tcpx_net::Span;
use tcpx_proto::lane::{self, ChunkId, Op, Take};

use super::plan::Layout;
use super::run::Run;
use crate::error::Error;
use crate::memory::Place;

/// One chunk of a run. Clones refer to the same chunk; whoever takes it from the run settles it once.
#[derive(Clone)]
pub(crate) struct ChunkRef {
    pub(crate) run: Arc<Run>,
    // Below run.plan.len()
    index: u32,
}

impl ChunkRef {
    fn layout(&self) -> &Layout {
        self.run.plan.layout(self.index as usize)
    }

    /// Bytes of its payload.
    pub(crate) fn bytes(&self) -> usize {
        self.layout().bytes
    }

    /// Region keys and entries in its table.
    pub(crate) fn table_counts(&self) -> (u16, u32) {
        let layout = self.layout();
        (layout.regions, layout.entries)
    }

    /// Its table, as it goes on the wire.
    pub(crate) fn table(&self) -> &[u8] {
        self.run.plan.table(self.layout())
    }

    /// The local memory of its payload.
    pub(crate) fn spans(&self) -> &[Span] {
        self.run.plan.spans(self.layout())
    }

    /// The device that this memory lies on, if sockets cannot reach it.
    pub(crate) fn device(&self) -> Option<&Arc<dyn Device>> {
        self.run.plan.device(self.layout())
    }

    /// Where its bytes are.
    pub(crate) fn place(&self) -> Place<'_> {
        self.run.plan.place(self.layout())
    }

    /// Gives the chunk back to its run, since its lane was lost before it had moved. True where the run
    /// hands out no more chunks and this was the last: whoever gives it back concludes the run.
    #[must_use]
    pub(crate) fn give_back(&self) -> bool {
        self.run.give_back(self.index as usize)
    }

    /// Whether bytes may still be written to its local memory. Records why not in the run, if its
    /// memory was revoked.
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

/// A run as a lane sees it: something to take chunks from.
pub(crate) struct Offered(pub(crate) Arc<Run>);

impl Offered {
    /// The next chunk that nobody has taken.
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
        if self.0.plan.revoked().is_some() || self.0.was_let_go() {
            return Take::Dead;
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
