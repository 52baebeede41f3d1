//! Payload on its way from a device to a socket.

use std::collections::VecDeque;
use std::sync::Arc;

use tcpx_cuda::{Device, Wish};
use tcpx_net::{Cursor, Span};

use crate::carrier::{Begin, LetGo, Outgoing, SendCarrier};
use crate::config::staging::DEPTH;
use crate::error::Error;
use crate::memory::{Copier, Direction, PendingCopy, Place, Pool, Slot, glance};

/// Sends payload from slots, into which a device copies it ahead of time and while the payloads before
/// it are being sent.
pub(crate) struct StagedSend {
    pool: Arc<Pool>,
    copier: Copier,
    /// In the order in which their frames begin.
    queue: VecDeque<Staged>,
    /// The payload whose frame has begun.
    current: Option<Staged>,
    /// Slots that payloads may still be pushed for. Asked of the pool once for each frame and only
    /// where something is to be staged: what cannot be copied yet is better left to other lanes.
    slots_left: Option<usize>,
    /// What [`SendCarrier::ready`] returned last.
    ready: Option<[Span; 1]>,
    over: Option<Outgoing>,
}

struct Staged {
    payload: Outgoing,
    out: Outbound,
}

impl StagedSend {
    pub(crate) fn new(pool: Arc<Pool>) -> Self {
        Self {
            copier: Copier::batching(&pool),
            pool,
            queue: VecDeque::new(),
            current: None,
            slots_left: None,
            ready: None,
            over: None,
        }
    }

    fn slots_left(&mut self) -> usize {
        if let Some(left) = self.slots_left {
            return left;
        }
        let left = if self.queue.iter().any(|s| s.out.is_unstarted()) {
            0
        } else {
            let held: usize = self.queue.iter().map(|s| s.out.slots()).sum();
            let left = DEPTH.saturating_sub(held);
            let left = left.min(self.pool.left(Direction::Out));
            left.max(usize::from(self.queue.is_empty()))
        };
        self.slots_left = Some(left);
        left
    }

    /// Starts as many copies as there are slots for, in the order in which they will be sent. A slot's
    /// worth to begin with: all lanes begin at once, the device copies for one after the other, and so
    /// all can soon send.
    fn start_copies(&mut self) {
        let mut slots: usize = self.queue.iter().map(|s| s.out.slots()).sum();
        let mut started: usize = self.queue.iter().map(|s| s.out.started()).sum();
        let is_sending = self.current.is_some();
        let slot_bytes = self.pool.slot_bytes();
        let mut index = 0;
        while index < self.queue.len() && slots < DEPTH && (is_sending || started < slot_bytes) {
            let Staged { payload, out } = &mut self.queue[index];
            if !out.is_unstarted() {
                index += 1;
                continue;
            }
            match out.start(payload.place().spans, &mut self.copier, &self.pool) {
                Ok(Some(bytes)) => {
                    slots += 1;
                    started += bytes;
                }
                // Worth another look later.
                Ok(None) => return,
                Err(error) => {
                    out.fail(error);
                    index += 1;
                }
            }
        }
    }
}

impl SendCarrier for StagedSend {
    fn takes(&self, place: &Place<'_>, _bytes: usize) -> bool {
        place.device.is_some()
    }

    fn prepares(&self) -> bool {
        true
    }

    fn look(&mut self) {
        if let [staged] = self.queue.make_contiguous() {
            staged.out.look(&mut self.copier);
        }
    }

    fn has_room(&mut self) -> bool {
        self.slots_left() > 0
    }

    fn push(&mut self, payload: Outgoing) {
        let bytes = payload.bytes();
        let slots = bytes.div_ceil(self.pool.slot_bytes());
        self.slots_left = self.slots_left.map(|left| left.saturating_sub(slots));
        // Only payload on a device is pushed here.
        if let Some(device) = payload.place().device.cloned() {
            let out = Outbound::new(&device, bytes);
            self.queue.push_back(Staged { payload, out });
        }
    }

    fn has_next(&self) -> bool {
        !self.queue.is_empty()
    }

    fn poll_begin(&mut self) -> Begin<'_> {
        self.slots_left = None;
        let Some(front) = self.queue.front_mut() else {
            return Begin::Nothing;
        };
        let ready = front.out.ready(&mut self.copier);
        if let Ok(None) = ready {
            return Begin::Nothing;
        }
        let Some(mut staged) = self.queue.pop_front() else {
            return Begin::Nothing;
        };
        match ready {
            Ok(_) => {
                let current = self.current.insert(staged);
                Begin::Frame(&current.payload)
            }
            Err(error) => {
                // A slot must not be used again while a copy may still write to it.
                let _ = staged.out.wait(&mut self.copier);
                Begin::Failed(staged.payload, error)
            }
        }
    }

    fn ready(&mut self) -> Result<Option<(&[Span], Cursor)>, Error> {
        let Some(current) = &mut self.current else {
            return Ok(None);
        };
        self.ready = current.out.ready(&mut self.copier)?.map(|span| [span]);
        let spans = self.ready.as_ref().map(|spans| &spans[..]);
        Ok(spans.map(|spans| (spans, Cursor::default())))
    }

    fn sent(&mut self, count: usize) -> Result<(), Error> {
        if let Some(Staged { payload, out }) = &mut self.current {
            out.sent(count, payload.place().spans, &mut self.copier)?;
            if out.is_over() {
                self.over = self.current.take().map(|staged| staged.payload);
            }
        }
        Ok(())
    }

    fn step(&mut self, _announced: bool) -> Result<bool, Error> {
        self.start_copies();
        self.slots_left = None;
        Ok(false)
    }

    fn poll_over(&mut self) -> Option<Outgoing> {
        self.over.take()
    }

    fn is_busy(&self) -> bool {
        !self.queue.is_empty() || self.current.is_some()
    }

    fn let_go(&mut self, which: LetGo<'_>, _rest: &mut Vec<u8>) -> Result<(), Error> {
        // A frame that has begun must be completed; what has not begun is given up.
        if let Some(Staged { payload, out }) = &mut self.current
            && which.hits(payload)
        {
            let let_go = if which.may_copy(payload, out.unstarted) {
                out.let_go(payload.place().spans, &mut self.copier)
            } else {
                // The connection ends.
                out.wait(&mut self.copier).and(Err(Error::Aborted))
            };
            if let Err(error) = let_go {
                out.fail(error);
            }
        }
        for Staged { payload, out } in &mut self.queue {
            if which.hits(payload) {
                // Only that they are over counts.
                let _ = out.wait(&mut self.copier);
                out.fail(Error::Aborted);
            }
        }
        Ok(())
    }

    fn close(&mut self) {
        for mut staged in self.current.take().into_iter().chain(self.queue.drain(..)) {
            // How the copies ended makes no difference any more.
            let _ = staged.out.wait(&mut self.copier);
        }
    }
}

/// A chunk that is copied out of a device's memory, part by part, and sent part by part. The chunk's spans are
/// handed in each time: whoever owns this also owns them.
pub(super) struct Outbound {
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
    copy: PendingCopy,
    is_over: bool,
}

impl Outbound {
    pub(super) fn new(device: &Arc<dyn Device>, bytes: usize) -> Self {
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
    pub(super) fn slots(&self) -> usize {
        self.parts.len()
    }

    /// Whether all of it was sent.
    fn is_over(&self) -> bool {
        self.unstarted == 0 && self.parts.is_empty()
    }

    /// Whether some of the chunk is still only on the device.
    pub(super) fn is_unstarted(&self) -> bool {
        self.unstarted > 0
    }

    /// Bytes in slots, or on their way to them.
    pub(super) fn started(&self) -> usize {
        self.parts.iter().map(|part| part.len).sum()
    }

    /// Starts the copy of one more part, of so many bytes; none when there is no slot for it now.
    pub(super) fn start(
        &mut self,
        spans: &[Span],
        copier: &mut Copier,
        pool: &Arc<Pool>,
    ) -> Result<Option<usize>, Error> {
        let Some(slot) = pool.take(self.device.as_ref(), Direction::Out)? else {
            return Ok(None);
        };
        self.start_in(slot, spans, copier).map(Some)
    }

    fn start_in(
        &mut self,
        slot: Slot,
        spans: &[Span],
        copier: &mut Copier,
    ) -> Result<usize, Error> {
        let len = self.unstarted.min(slot.len());
        let copy = copier.gather(self.device.as_ref(), spans, self.at, slot.span(0, len))?;
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
    pub(super) fn fail(&mut self, error: Error) {
        self.unstarted = 0;
        self.failed = Some(error);
    }

    /// What can be sent now; nothing while its copy is under way.
    pub(super) fn ready(&mut self, copier: &mut Copier) -> Result<Option<Span>, Error> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let Some(part) = self.parts.front_mut() else {
            return Ok(None);
        };
        if !part.is_over {
            // Asked for when there is nothing else to send.
            part.is_over = copier.is_done(part.copy, Wish::Soon)?;
        }
        Ok(part.is_over.then(|| part.slot.span(part.sent, part.len)))
    }

    /// Right after the start of a chunk that is small: waits the few microseconds that its copy takes.
    pub(super) fn look(&mut self, copier: &mut Copier) {
        if self.unstarted == 0
            && !std::mem::replace(&mut self.looked, true)
            && let [part] = self.parts.make_contiguous()
        {
            // A failure is found again by `ready`.
            glance(part.len, || {
                copier.is_done(part.copy, Wish::Soon).unwrap_or(true)
            });
        }
    }

    /// Counts bytes of [`Outbound::ready`] as sent. A slot that is empty takes the next part at once, so that a
    /// chunk whose sending has begun never waits for slots that others hold.
    pub(super) fn sent(
        &mut self,
        count: usize,
        spans: &[Span],
        copier: &mut Copier,
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
            self.start_in(part.slot, spans, copier)?;
        }
        Ok(())
    }

    /// Makes the chunk independent of the device's memory: waits for the copies that were started, and copies what is
    /// left into a slot of its own. Where that fails no copy uses the memory either.
    pub(super) fn let_go(&mut self, spans: &[Span], copier: &mut Copier) -> Result<(), Error> {
        let mut rest = Ok(());
        if self.unstarted > 0 {
            let slot = Slot::own(self.device.as_ref(), self.unstarted);
            rest = slot.and_then(|slot| self.start_in(slot, spans, copier).map(drop));
        }
        let waited = self.wait(copier);
        rest.and(waited)
    }

    /// Waits until no copy uses a slot: before this is dropped with parts that were not sent.
    pub(super) fn wait(&mut self, copier: &mut Copier) -> Result<(), Error> {
        let mut result = Ok(());
        for part in &mut self.parts {
            if !part.is_over {
                let waited = copier.wait(part.copy);
                part.is_over = true;
                result = result.and(waited);
            }
        }
        result
    }
}
