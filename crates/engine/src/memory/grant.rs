//! Access to local memory that a peer has on behalf of one chunk.

use std::sync::Arc;

use tcpx_cuda::Device;
use tcpx_net::Span;
use tcpx_proto::frame::Table;
use tcpx_proto::lane::Op;

use super::registry::{Memory, Refusal, Registry, one_device};

/// Location of the bytes of a chunk.
#[derive(Clone, Copy)]
pub(crate) struct Place<'a> {
    /// The bytes, in payload order.
    pub(crate) spans: &'a [Span],
    /// The device that holds all of the bytes, if sockets cannot access them.
    pub(crate) device: Option<&'a Arc<dyn Device>>,
    /// Registered memory that contains the spans.
    pub(crate) memory: &'a [Arc<Memory>],
}

/// Access to local memory that a peer was granted for one chunk.
#[derive(Default)]
pub(crate) struct Grant {
    pub(crate) spans: Vec<Span>,
    memory: Vec<Arc<Memory>>,
    epoch: u64,
    /// The device that holds all of the bytes, if sockets cannot access them.
    pub(crate) device: Option<Arc<dyn Device>>,
}

impl Grant {
    pub(crate) fn fill(
        &mut self,
        regions: &Registry,
        op: Op,
        table: &Table<'_>,
    ) -> Result<(), Refusal> {
        // Read before the look-up: a later revocation shows as a changed epoch.
        self.epoch = regions.epoch();
        regions.resolve(op, table, &mut self.spans, &mut self.memory)?;
        self.device = one_device(&self.memory)?;
        Ok(())
    }

    pub(crate) fn is_revoked(&mut self, regions: &Registry) -> bool {
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

    /// Releases the memory: a spare grant must not keep unused buffers alive.
    pub(crate) fn clear(&mut self) {
        self.spans.clear();
        self.memory.clear();
        self.device = None;
    }

    /// Returns the same grant, emptied.
    pub(crate) fn cleared(mut self) -> Self {
        self.clear();
        self
    }

    /// Returns the location of the bytes.
    pub(crate) fn place(&self) -> Place<'_> {
        Place {
            spans: &self.spans,
            device: self.device.as_ref(),
            memory: &self.memory,
        }
    }

    pub(crate) fn has_dead_memory(&self) -> bool {
        self.memory.iter().any(|m| !m.is_live())
    }
}
