//! A chunk on its way from a device to a socket.

use std::collections::VecDeque;
use std::sync::Arc;

use tcpx_cuda::Device;
use tcpx_net::{Cursor, Span};

use super::pool::{Direction, Pool, Slot};
use super::queues::{Copy, Queues};
use super::{SHORT_BYTES, look};
use crate::error::Error;

/// A chunk that is copied out of a device's memory, part by part, and sent part by part. The chunk's spans are
/// handed in each time: whoever owns this also owns them.
pub(crate) struct Outbound {
    device: Arc<dyn Device>,
    /// Up to where copies have been started.
    at: Cursor,
    /// Bytes after that.
    unstarted: usize,
    /// Oldest first; only the last may be shorter than its slot.
    parts: VecDeque<Part>,
    failed: Option<Error>,
    looked: bool,
}

struct Part {
    slot: Slot,
    // sent ≤ len ≤ slot.len()
    len: usize,
    sent: usize,
    copy: Copy,
    is_over: bool,
}

impl Outbound {
    pub(crate) fn new(device: &Arc<dyn Device>, bytes: usize) -> Self {
        Self {
            device: Arc::clone(device),
            at: Cursor::default(),
            unstarted: bytes,
            parts: VecDeque::new(),
            failed: None,
            looked: false,
        }
    }

    /// Slots that it holds.
    pub(crate) fn slots(&self) -> usize {
        self.parts.len()
    }

    /// Whether some of the chunk is still only on the device.
    pub(crate) fn is_unstarted(&self) -> bool {
        self.unstarted > 0
    }

    /// Bytes in slots, or on their way to them.
    pub(crate) fn started(&self) -> usize {
        self.parts.iter().map(|part| part.len).sum()
    }

    /// Starts the copy of one more part, of so many bytes; none when there is no slot for it now.
    pub(crate) fn start(
        &mut self,
        spans: &[Span],
        queues: &mut Queues,
        pool: &Arc<Pool>,
    ) -> Result<Option<usize>, Error> {
        let Some(slot) = pool.take(self.device.as_ref(), Direction::Out)? else {
            return Ok(None);
        };
        self.start_in(slot, spans, queues).map(Some)
    }

    fn start_in(
        &mut self,
        slot: Slot,
        spans: &[Span],
        queues: &mut Queues,
    ) -> Result<usize, Error> {
        let len = self.unstarted.min(slot.len());
        let copy = queues.gather(self.device.as_ref(), spans, self.at, &slot, len)?;
        self.at.advance(spans, len);
        self.unstarted -= len;
        self.parts.push_back(Part {
            slot,
            len,
            sent: 0,
            copy,
            is_over: false,
        });
        Ok(len)
    }

    /// It is given up, or a copy could not be started: [`Outbound::ready`] says why. No more copies are.
    pub(crate) fn fail(&mut self, error: Error) {
        self.unstarted = 0;
        self.failed = Some(error);
    }

    /// What can be sent now; nothing while its copy is under way.
    pub(crate) fn ready(&mut self, queues: &mut Queues) -> Result<Option<Span>, Error> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let Some(part) = self.parts.front_mut() else {
            return Ok(None);
        };
        if !part.is_over {
            part.is_over = queues.is_done(part.copy)?;
        }
        // SAFETY: the slot is ours until the part is dropped, and no copy writes to it any more.
        let whole = unsafe { Span::new(part.slot.address(), part.len) };
        Ok(part
            .is_over
            .then(|| whole.slice(part.sent, part.len - part.sent))
            .flatten())
    }

    /// Right after the start of a chunk that is small: waits the few microseconds that its copy takes.
    pub(crate) fn look(&mut self, queues: &mut Queues) {
        if self.unstarted == 0
            && !std::mem::replace(&mut self.looked, true)
            && let [part] = self.parts.make_contiguous()
            && part.len <= SHORT_BYTES
        {
            // A failure is found again by `ready`.
            look(|| queues.is_done(part.copy).unwrap_or(true));
        }
    }

    /// Counts bytes of [`Outbound::ready`] as sent. A slot that is empty takes the next part at once, so that a
    /// chunk whose sending has begun never waits for slots that others hold.
    pub(crate) fn sent(
        &mut self,
        count: usize,
        spans: &[Span],
        queues: &mut Queues,
    ) -> Result<(), Error> {
        let Some(part) = self.parts.front_mut() else {
            return Ok(());
        };
        part.sent += count;
        if part.sent < part.len {
            return Ok(());
        }
        if let Some(part) = self.parts.pop_front()
            && self.unstarted > 0
        {
            self.start_in(part.slot, spans, queues)?;
        }
        Ok(())
    }

    /// Makes the chunk independent of the device's memory: waits for the copies that were started, and copies what is
    /// left into a slot of its own. Where that fails no copy uses the memory either.
    pub(crate) fn let_go(&mut self, spans: &[Span], queues: &mut Queues) -> Result<(), Error> {
        let mut rest = Ok(());
        if self.unstarted > 0 {
            let slot = Slot::own(self.device.as_ref(), self.unstarted);
            rest = slot.and_then(|slot| self.start_in(slot, spans, queues).map(drop));
        }
        let waited = self.wait(queues);
        rest.and(waited)
    }

    /// Waits until no copy uses a slot: before this is dropped with parts that were not sent.
    pub(crate) fn wait(&mut self, queues: &mut Queues) -> Result<(), Error> {
        let mut result = Ok(());
        for part in &mut self.parts {
            if !part.is_over {
                let waited = queues.wait(part.copy);
                part.is_over = true;
                result = result.and(waited);
            }
        }
        result
    }
}
