//! Staged payload from a device to a socket.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tcpx_cuda::{Device, Range, Wish};
use tcpx_net::{Cursor, Span};

use crate::carrier::{Begin, LetGo, Outgoing, SendCarrier};
use crate::config::staging::DEPTH;
use crate::error::Error;
use crate::memory::{Copier, Direction, PendingCopy, Place, Pool, Slot, glance, ranges_of};
use crate::transfer::Run;

/// Limits the payloads that wait for their frames: enough to share slots, few enough to search.
pub(super) const MAX_QUEUED: usize = 64;

/// Sends payload from slots, into which a device copies it ahead of time, while earlier payloads
/// are being sent.
pub(crate) struct StagedSend {
    pool: Arc<Pool>,
    copier: Copier,
    /// Queued payloads, in the order in which their frames begin.
    queue: VecDeque<Staged>,
    /// The payload whose frame has begun.
    current: Option<Staged>,
    /// Room for payloads that may still be pushed. Computed once for each frame and only if
    /// something is to be staged: payload that cannot be copied yet is better left to other lanes.
    space: Option<Space>,
    /// Blocks of the copy that is being started.
    ranges: Vec<Range>,
    /// The last result of [`SendCarrier::ready`].
    ready: Option<[Span; 1]>,
    over: Option<Outgoing>,
    /// True if a frame has begun since there was last nothing to send.
    has_begun: bool,
    /// True if the pool had no slot at the last attempt.
    is_waiting: bool,
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
            space: None,
            ranges: Vec::new(),
            ready: None,
            over: None,
            has_begun: false,
            is_waiting: false,
        }
    }

    /// Counts slots that hold payloads whose frames have not begun, excluding the slot that is
    /// being sent from.
    fn slots_ahead(&self) -> usize {
        let current = self.current.as_ref().and_then(|s| s.out.parts.back());
        let mut last = current.map(|part| Arc::as_ptr(&part.slot));
        let parts = self.queue.iter().flat_map(|s| &s.out.parts);
        // Payloads that share a slot are consecutive.
        parts
            .filter(|part| {
                let slot = Some(Arc::as_ptr(&part.slot));
                std::mem::replace(&mut last, slot) != slot
            })
            .count()
    }

    fn space(&mut self) -> &mut Space {
        let space = self.space.take().unwrap_or_else(|| self.measure());
        self.space.insert(space)
    }

    fn measure(&self) -> Space {
        let left = DEPTH.saturating_sub(self.slots_ahead());
        let left = left.min(self.pool.left(Direction::Out));
        let mut space = Space {
            slot_bytes: self.pool.slot_bytes(),
            slots: left.max(usize::from(self.queue.is_empty())),
            rest: 0,
        };
        for staged in &self.queue {
            space.take(staged.out.unstarted);
        }
        space
    }

    /// Starts copies in the order of sending:
    /// queued payloads that fit a slot together share it, and one copy.
    fn start_copies(&mut self) {
        while let Some(first) = self.queue.iter().position(|s| s.out.is_unstarted()) {
            let (count, bytes) = self.group(first);
            if !self.may_start(bytes) || !self.start_group(first, count, bytes) {
                return;
            }
        }
    }

    /// Returns how many payloads, starting with this one,
    /// fit one slot together, and their total length.
    fn group(&self, first: usize) -> (usize, usize) {
        let slot_bytes = self.pool.slot_bytes();
        let device = self.queue[first].out.device();
        let (mut count, mut bytes) = (0, 0);
        for Staged { out, .. } in self.queue.range(first..) {
            if count > 0 && (bytes + out.unstarted > slot_bytes || !out.device.is_same(device)) {
                break;
            }
            bytes += out.unstarted.min(slot_bytes);
            count += 1;
        }
        (count, bytes)
    }

    /// Returns whether a copy of `bytes` to a slot may start now. Before anything is sent, one
    /// slot's worth may start: all lanes begin at once, the device serves them one after the other,
    /// and so all lanes can soon send. While something is being sent, small payloads are collected
    /// until nothing else is copied ahead. Where all that was copied is sent and the device is late,
    /// slots are filled as if something were being sent: more copies can then end together.
    fn may_start(&self, bytes: usize) -> bool {
        let slot_bytes = self.pool.slot_bytes();
        let slots = self.slots_ahead();
        let started = || self.queue.iter().map(|s| s.out.started()).sum::<usize>();
        let is_large = bytes > slot_bytes / 2;
        slots < DEPTH
            && match self.current {
                None => (self.has_begun && is_large) || started() < slot_bytes,
                Some(_) => slots == 0 || is_large,
            }
    }

    /// Starts the copy of `count` payloads, starting with `first`, to one slot; returns false if
    /// there is currently no slot, or no room in the batches, so that the caller retries later.
    fn start_group(&mut self, first: usize, count: usize, bytes: usize) -> bool {
        let device = Arc::clone(&self.queue[first].out.device);
        let slot = match self.pool.take(device.as_ref(), Direction::Out) {
            Ok(Some(slot)) => Ok(Arc::new(slot)),
            Ok(None) => {
                if !std::mem::replace(&mut self.is_waiting, true) {
                    self.pool.note_wait();
                }
                return false;
            }
            Err(error) => Err(error),
        };
        self.is_waiting = false;
        self.ranges.clear();
        for Staged { payload, out } in self.queue.range(first..first + count) {
            let len = out.unstarted.min(bytes);
            self.ranges
                .extend(ranges_of(payload.place().spans, &out.at, len));
        }
        let copied = slot.and_then(|slot| {
            let to = slot.span(0, bytes);
            let copier = &mut self.copier;
            let copy = copier.gather_ranges_in_time(device.as_ref(), &self.ranges, to)?;
            Ok(copy.map(|copy| (slot, copy)))
        });
        let Some(started) = copied.transpose() else {
            return false;
        };
        let mut at = 0;
        let group = self.queue.range_mut(first..first + count);
        // Skips payloads that were given up.
        for Staged { payload, out } in group.filter(|s| s.out.is_unstarted()) {
            match &started {
                Ok((slot, copy)) => {
                    let len = out.unstarted.min(bytes);
                    out.add(
                        slot,
                        at..at + len,
                        (*copy, count > 1),
                        payload.place().spans,
                    );
                    at += len;
                }
                Err(error) => out.fail(error.clone()),
            }
        }
        true
    }

    /// Returns whether a run has so many chunks here that the next one is better left to other
    /// lanes: a run without competition must stay spread over all of its lanes. The lane on which
    /// it begins takes chunks before the others know of the run, so an equal share is the limit.
    /// Counts as if each chunk had its own slot.
    fn has_its_share(&mut self, run: &Arc<Run>) -> bool {
        if run.plan.len() == 1 {
            return false;
        }
        let is_of_run = |staged: &&Staged| match &staged.payload {
            Outgoing::Chunk(chunk) => Arc::ptr_eq(&chunk.run, run),
            Outgoing::Answer { .. } => false,
        };
        let lanes = run.lanes.load(Ordering::Relaxed).max(1);
        let share = run.plan.len().div_ceil(lanes).min(DEPTH);
        match self.queue.iter().filter(is_of_run).count() {
            0 => false,
            chunks => chunks >= share || self.space().slots == 0,
        }
    }
}

/// Room for payloads that have no slot yet.
struct Space {
    slot_bytes: usize,
    /// Slots without assigned payload.
    slots: usize,
    /// Bytes left in the slot assigned to the last payload.
    rest: usize,
}

impl Space {
    fn has(&self, bytes: usize) -> bool {
        self.slots > 0 || bytes <= self.rest
    }

    fn take(&mut self, bytes: usize) {
        match self.rest.checked_sub(bytes) {
            Some(rest) => self.rest = rest,
            None => {
                let slots = bytes.div_ceil(self.slot_bytes);
                self.rest = slots * self.slot_bytes - bytes;
                self.slots = self.slots.saturating_sub(slots);
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

    fn look(&mut self) -> bool {
        match self.queue.make_contiguous() {
            [staged] => staged.out.look(&mut self.copier),
            _ => false,
        }
    }

    fn has_room(&mut self, bytes: usize, run: Option<&Arc<Run>>) -> bool {
        self.queue.len() < MAX_QUEUED
            && self.space().has(bytes)
            && run.is_none_or(|run| !self.has_its_share(run))
    }

    fn push(&mut self, payload: Outgoing) {
        self.has_begun &= self.is_busy();
        let bytes = payload.bytes();
        if let Some(space) = &mut self.space {
            space.take(bytes);
        }
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
        self.space = None;
        let Some(front) = self.queue.front_mut() else {
            return Begin::Nothing;
        };
        let spans = front.payload.place().spans;
        let ready = front.out.ready(spans, &mut self.copier);
        if let Ok(None) = ready {
            return Begin::Nothing;
        }
        let Some(mut staged) = self.queue.pop_front() else {
            return Begin::Nothing;
        };
        match ready {
            Ok(_) => {
                self.has_begun = true;
                let current = self.current.insert(staged);
                Begin::Frame(&current.payload)
            }
            Err(error) => {
                // A slot must not be reused while a copy may still write to it.
                let _ = staged.out.wait(&mut self.copier);
                Begin::Failed(staged.payload, error)
            }
        }
    }

    fn ready(&mut self) -> Result<Option<(&[Span], Cursor)>, Error> {
        let Some(Staged { payload, out }) = &mut self.current else {
            return Ok(None);
        };
        let ready = out.ready(payload.place().spans, &mut self.copier)?;
        self.ready = ready.map(|span| [span]);
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
        self.space = None;
        Ok(false)
    }

    fn poll_over(&mut self) -> Option<Outgoing> {
        self.over.take()
    }

    fn is_busy(&self) -> bool {
        !self.queue.is_empty() || self.current.is_some()
    }

    fn let_go(&mut self, which: LetGo<'_>, _rest: &mut Vec<u8>) -> Result<(), Error> {
        // A frame that has begun must be completed; other payloads are given up.
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
                // Only the end of the copies matters.
                let _ = out.wait(&mut self.copier);
                out.fail(Error::Aborted);
            }
        }
        Ok(())
    }

    fn close(&mut self) {
        for mut staged in self.current.take().into_iter().chain(self.queue.drain(..)) {
            // The outcome no longer matters.
            let _ = staged.out.wait(&mut self.copier);
        }
    }
}

/// A chunk that is copied out of device memory and sent, part by part. The caller passes the
/// chunk's spans to each call, because the owner of this value also owns the spans.
pub(super) struct Outbound {
    device: Arc<dyn Device>,
    /// Position up to which copies have been started.
    at: Cursor,
    /// Bytes after `at`.
    unstarted: usize,
    /// Parts in flight, oldest first; only the last may be shorter than its slot,
    /// and share it with other chunks.
    parts: VecDeque<Part>,
    failed: Option<Error>,
    looked: bool,
}

struct Part {
    slot: Arc<Slot>,
    /// Start of the part in the slot.
    at: usize,
    // Invariant: `sent` ≤ `len` ≤ `slot.len() - at`.
    len: usize,
    /// Start of the part in the chunk's spans.
    start: Cursor,
    /// True if other chunks share the copy.
    is_shared: bool,
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

    pub(super) fn device(&self) -> &dyn Device {
        self.device.as_ref()
    }

    /// Returns whether all bytes were sent.
    fn is_over(&self) -> bool {
        self.unstarted == 0 && self.parts.is_empty()
    }

    /// Returns whether some of the chunk is not being copied yet.
    pub(super) fn is_unstarted(&self) -> bool {
        self.unstarted > 0
    }

    /// Returns the bytes in slots, or being copied to slots.
    pub(super) fn started(&self) -> usize {
        self.parts.iter().map(|part| part.len).sum()
    }

    /// Starts the copy of the next part, as long as the slot.
    pub(super) fn start_in(
        &mut self,
        slot: &Arc<Slot>,
        spans: &[Span],
        copier: &mut Copier,
    ) -> Result<(), Error> {
        let len = self.unstarted.min(slot.len());
        let copy = copier.gather(self.device.as_ref(), spans, self.at, slot.span(0, len))?;
        self.add(slot, 0..len, (copy, false), spans);
        Ok(())
    }

    /// Adds a part whose copy to a range of the slot was started.
    fn add(
        &mut self,
        slot: &Arc<Slot>,
        at: std::ops::Range<usize>,
        (copy, is_shared): (PendingCopy, bool),
        spans: &[Span],
    ) {
        let start = self.at;
        self.at.advance(spans, at.len());
        self.unstarted -= at.len();
        self.parts.push_back(Part {
            slot: Arc::clone(slot),
            at: at.start,
            len: at.len(),
            start,
            is_shared,
            sent: 0,
            copy,
            is_over: false,
        });
    }

    /// Gives up the chunk, or records that a copy could not be started: [`Outbound::ready`] returns
    /// the error. No more copies are started.
    pub(super) fn fail(&mut self, error: Error) {
        self.unstarted = 0;
        self.failed = Some(error);
    }

    /// Returns the bytes that can be sent now; `None` while their copy is in flight. If a shared
    /// copy failed because of unmapped memory, the part is copied again separately: the memory may
    /// belong to another chunk.
    pub(super) fn ready(
        &mut self,
        spans: &[Span],
        copier: &mut Copier,
    ) -> Result<Option<Span>, Error> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let Some(part) = self.parts.front_mut() else {
            return Ok(None);
        };
        if !part.is_over {
            // The caller asks only if there is nothing else to send.
            part.is_over = match copier.is_done(part.copy, Wish::Soon) {
                Err(Error::MemoryFault) if part.is_shared => {
                    let to = part.slot.span(part.at, part.at + part.len);
                    part.copy = copier.gather(self.device.as_ref(), spans, part.start, to)?;
                    part.is_shared = false;
                    false
                }
                outcome => outcome?,
            };
        }
        let (from, to) = (part.at + part.sent, part.at + part.len);
        Ok(part.is_over.then(|| part.slot.span(from, to)))
    }

    /// Spins for the few microseconds that the copy of a small chunk takes, right after its start.
    /// Returns whether the copy is over.
    pub(super) fn look(&mut self, copier: &mut Copier) -> bool {
        let mut is_over = false;
        if self.unstarted == 0
            && !std::mem::replace(&mut self.looked, true)
            && let [part] = self.parts.make_contiguous()
        {
            glance(part.len, || {
                // `ready` will find a failure again.
                is_over = copier.is_done(part.copy, Wish::Soon).unwrap_or(true);
                is_over
            });
        }
        is_over
    }

    /// Counts bytes of [`Outbound::ready`] as sent. An emptied slot takes the next part at once, so
    /// that a chunk whose sending has begun never waits for slots that others hold: only its last
    /// part shares a slot.
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
            self.start_in(&part.slot, spans, copier)?;
        }
        Ok(())
    }

    /// Releases the device's memory: waits for the copies that were started, and copies the rest
    /// into an extra slot. If that fails, no copy uses the memory either.
    pub(super) fn let_go(&mut self, spans: &[Span], copier: &mut Copier) -> Result<(), Error> {
        let mut rest = Ok(());
        if self.unstarted > 0 {
            let slot = Slot::own(self.device.as_ref(), self.unstarted);
            rest = slot.and_then(|slot| self.start_in(&Arc::new(slot), spans, copier));
        }
        let waited = self.wait(copier);
        rest.and(waited)
    }

    /// Waits until no copy uses a slot. Required before this value is dropped with unsent parts.
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
