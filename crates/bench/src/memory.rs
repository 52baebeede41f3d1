//! The buffer of one side: registered with the engine, and lent to the floor in between.
//!
//! Both run over the very same bytes, so neither has the better pages or the warmer caches.

use tcpx::{Buffer, Region, Session};

use crate::workload::{Mismatch, Pattern, Shape, verify};

/// Registered memory, of which a workload uses the beginning.
pub(crate) struct Memory {
    buffer: Buffer,
    region: Region,
}

impl Memory {
    /// Memory for a workload: what was used before if that is large enough, else new.
    pub(crate) fn for_shape(
        session: &Session,
        shape: &Shape,
        before: Option<Memory>,
    ) -> Result<Memory, tcpx::Error> {
        let len = shape.total_bytes() as usize;
        if let Some(memory) = before
            && memory.buffer.len() >= len
        {
            return Ok(memory);
        }
        let buffer = Buffer::new(len);
        let region = session.register(&buffer)?;
        Ok(Memory { buffer, region })
    }

    pub(crate) fn region(&self) -> &Region {
        &self.region
    }

    /// Fills what a workload uses with a pattern.
    pub(crate) fn fill(&mut self, shape: &Shape, seed: u64) {
        Pattern::new(seed).fill(0, self.idle_bytes(shape));
    }

    /// Checks that the pattern of the source has arrived here.
    pub(crate) fn verify(&mut self, shape: &Shape, seed: u64) -> Result<(), Mismatch> {
        verify(shape, Pattern::new(seed), self.idle_bytes(shape))
    }

    /// What a workload uses, to be touched only while no transfer is in flight.
    pub(crate) fn idle_bytes(&mut self, shape: &Shape) -> &mut [u8] {
        // SAFETY: `buffer` is a live allocation of initialised bytes that this value owns and never
        // lends or clones, so `&mut self` excludes every other access of this process. The engine
        // touches it only for a transfer, and only the initiator of the measurement posts any: it
        // does not ask a side to fill, verify or run the floor before its transfers have completed
        // (`measure`, `soak`), and a completed transfer touches no memory.
        let bytes = unsafe {
            std::slice::from_raw_parts_mut(self.buffer.address() as *mut u8, self.buffer.len())
        };
        &mut bytes[..shape.total_bytes() as usize]
    }
}
