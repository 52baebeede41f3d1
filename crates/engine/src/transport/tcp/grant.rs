//! What a peer may do with our memory on behalf of one chunk.

use std::sync::Arc;

use tcpx_cuda::Device;
use tcpx_net::Span;
use tcpx_proto::frame::Table;

use crate::region::{Memory, Refusal, Regions, one_device};
use crate::transport::plugin::Place;

/// Access to local memory that a peer was granted for one chunk.
#[derive(Default)]
pub(super) struct Grant {
    pub(super) spans: Vec<Span>,
    memory: Vec<Arc<Memory>>,
    epoch: u64,
    /// The device that all of it lies on, if sockets cannot reach it.
    pub(super) device: Option<Arc<dyn Device>>,
}

impl Grant {
    pub(super) fn fill(&mut self, regions: &Regions, table: &Table<'_>) -> Result<(), Refusal> {
        // Before the look-up: what is revoked after this shows as a changed epoch.
        self.epoch = regions.epoch();
        regions.resolve(table, &mut self.spans, &mut self.memory)?;
        self.device = one_device(&self.memory)?;
        Ok(())
    }

    pub(super) fn is_revoked(&mut self, regions: &Regions) -> bool {
        let epoch = regions.epoch();
        if epoch == self.epoch {
            return false;
        }
        let dead = self.has_dead_memory();
        if !dead {
            self.epoch = epoch;
        }
        dead
    }

    /// Lets go of the memory: kept for another chunk, it must not keep buffers that nobody uses.
    pub(super) fn clear(&mut self) {
        self.spans.clear();
        self.memory.clear();
        self.device = None;
    }

    /// The same, empty.
    pub(super) fn cleared(mut self) -> Self {
        self.clear();
        self
    }

    /// Where its bytes are.
    pub(super) fn place(&self) -> Place<'_> {
        Place {
            spans: &self.spans,
            device: self.device.as_ref(),
            memory: &self.memory,
        }
    }

    pub(super) fn has_dead_memory(&self) -> bool {
        self.memory.iter().any(|m| !m.is_live())
    }
}
