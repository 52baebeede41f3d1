//! Staged payload from a socket to a device.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tcpx_cuda::{Device, Range, Wish};
use tcpx_net::{Cursor, Span};
use tcpx_proto::lane::Ticket;

use crate::carrier::{Over, ReceiveCarrier, Room};
use crate::config::staging::DEPTH;
use crate::error::Error;
use crate::memory::{Copier, Direction, PendingCopy, Place, Pool, Slot, glance, ranges_of};

/// Receives payload into slots, from which a device copies it on while the next slot is being
/// filled. Consecutive payloads share a slot and one copy.
pub(crate) struct StagedReceive<P> {
    pool: Arc<Pool>,
    copier: Copier,
    /// Position in the current payload up to which bytes were received.
    at: Cursor,
    /// The slot that the socket fills.
    filling: Option<Filling<P>>,
    /// The last result of [`ReceiveCarrier::room`].
    room: [Span; 1],
    /// Copies in flight, oldest first.
    landing: VecDeque<Landing<P>>,
    /// Payloads that are over and not returned yet.
    over: VecDeque<Over<P>>,
    slots: usize,
    /// Error of an earlier copy of the payload at the front.
    failed: Option<Error>,
    /// True if the peer has another payload after the current one.
    more: bool,
    /// Start of the time without a slot, for a lane that holds none.
    starved: Option<Instant>,
    /// True if the pool had no slot at the last attempt.
    is_waiting: bool,
    clock: fn() -> Instant,
}

/// A slot that is being filled.
struct Filling<P> {
    slot: Slot,
    device: Arc<dyn Device>,
    // At most `slot.len()`.
    filled: usize,
    /// Destination of the bytes.
    ranges: Vec<Range>,
    /// Complete payloads in the slot, and the bytes and ranges of all of them together.
    whole: Vec<Whole<P>>,
    whole_bytes: usize,
    whole_ranges: usize,
    /// When the first of them was complete, and when bytes last arrived.
    waiting: Option<(Instant, Instant)>,
}

/// A complete payload.
struct Whole<P> {
    ticket: Ticket,
    payload: P,
    /// Bytes and ranges of the slot up to the end of this payload.
    bytes: usize,
    ranges: usize,
}

/// A copy and the slot that it reads.
struct Landing<P> {
    /// A copy that could not be started no longer uses the slot.
    copy: Result<PendingCopy, Error>,
    slot: Arc<Slot>,
    device: Arc<dyn Device>,
    // Range of bytes in the slot.
    bytes: std::ops::Range<usize>,
    /// Destination of the bytes.
    ranges: Vec<Range>,
    /// The payloads that are over with this copy.
    whole: Vec<Whole<P>>,
    /// True if the last bytes belong to a payload that continues in the next slot,
    /// and was not dropped.
    goes_on: bool,
}

/// Time that a lane without a slot waits before it gets an extra slot. Slots are returned within
/// milliseconds, unless stalled peers hold all of them in the middle of payloads: the other peers
/// must not stall as well.
const STARVED: Duration = Duration::from_millis(100);

/// Time that a payload waits for bytes of the next payload, which may share its copy.
const STALLED: Duration = Duration::from_micros(100);
/// Time that a payload waits for its copy while more bytes arrive:
/// fast lanes fill much of a slot in this time.
const LINGER: Duration = Duration::from_micros(500);

impl<P> StagedReceive<P> {
    pub(crate) fn new(pool: Arc<Pool>) -> Self {
        Self::with_clock(pool, Instant::now)
    }

    pub(super) fn with_clock(pool: Arc<Pool>, clock: fn() -> Instant) -> Self {
        // SAFETY: an empty span is never accessed.
        let nothing = unsafe { Span::new(std::ptr::dangling_mut(), 0) };
        Self {
            copier: Copier::batching(&pool),
            pool,
            at: Cursor::default(),
            filling: None,
            room: [nothing],
            landing: VecDeque::new(),
            over: VecDeque::new(),
            slots: 0,
            failed: None,
            more: false,
            starved: None,
            is_waiting: false,
            clock,
        }
    }

    fn slot(&mut self, device: &dyn Device) -> Result<Option<Slot>, Error> {
        if let Some(slot) = self.pool.take(device, Direction::In)? {
            self.starved = None;
            self.is_waiting = false;
            return Ok(Some(slot));
        }
        if !std::mem::replace(&mut self.is_waiting, true) {
            self.pool.note_wait();
        }
        if self.slots > 0 {
            return Ok(None);
        }
        let since = *self.starved.get_or_insert_with(self.clock);
        if (self.clock)().saturating_duration_since(since) < STARVED {
            return Ok(None);
        }
        Slot::own(device, self.pool.slot_bytes()).map(Some)
    }

    /// Starts the copy of the bytes in the slot; the last ones may belong to the current payload.
    fn flush(&mut self) {
        let Some(filling) = self.filling.take_if(|filling| filling.filled > 0) else {
            return;
        };
        let landing = self.start(Landing {
            copy: Err(Error::Aborted),
            slot: Arc::new(filling.slot),
            device: filling.device,
            bytes: 0..filling.filled,
            ranges: filling.ranges,
            whole: filling.whole,
            goes_on: filling.filled > filling.whole_bytes,
        });
        self.landing.push_back(landing);
    }

    /// Starts a copy.
    fn start(&mut self, mut landing: Landing<P>) -> Landing<P> {
        let from = landing.slot.span(landing.bytes.start, landing.bytes.end);
        let device = landing.device.as_ref();
        landing.copy = self.copier.scatter_ranges(device, from, &landing.ranges);
        self.slots += usize::from(landing.copy.is_ok());
        landing
    }

    /// Copies the payloads of a shared copy again, each separately:
    /// memory of one of them was not mapped.
    fn part(&mut self, shared: Landing<P>) {
        let (mut bytes, mut ranges) = (shared.bytes.start, 0);
        let mut parts = Vec::new();
        let alone = |bytes, ranges: &[Range], whole, goes_on| Landing {
            copy: Err(Error::Aborted),
            slot: Arc::clone(&shared.slot),
            device: Arc::clone(&shared.device),
            bytes,
            ranges: ranges.to_vec(),
            whole,
            goes_on,
        };
        for whole in shared.whole {
            let to = (whole.bytes, whole.ranges);
            let its = &shared.ranges[ranges..to.1];
            parts.push(alone(bytes..to.0, its, vec![whole], false));
            (bytes, ranges) = to;
        }
        if shared.goes_on {
            let rest = &shared.ranges[ranges..];
            parts.push(alone(bytes..shared.bytes.end, rest, Vec::new(), true));
        }
        let mut started: Vec<_> = parts.into_iter().map(|part| self.start(part)).collect();
        while let Some(part) = started.pop() {
            self.landing.push_front(part);
        }
    }

    /// Starts the copy of payloads that have waited long enough for others to share it.
    fn flush_due(&mut self) {
        let Some((first, last)) = self.filling.as_ref().and_then(|filling| filling.waiting) else {
            return;
        };
        let now = (self.clock)();
        if now.saturating_duration_since(first) >= LINGER
            || now.saturating_duration_since(last) >= STALLED
        {
            self.flush();
        }
    }

    /// Handles the end of the oldest copy, and of the payloads that are over with it.
    fn landed(&mut self, outcome: Result<(), Error>) {
        let Some(landing) = self.landing.pop_front() else {
            return;
        };
        self.slots -= usize::from(landing.copy.is_ok());
        let end = landing.bytes.end;
        let is_shared = landing.whole.first().is_some_and(|first| first.bytes < end);
        if is_shared && outcome == Err(Error::MemoryFault) {
            return self.part(landing);
        }
        let error = outcome.err();
        let mut earlier = self.failed.take();
        for whole in landing.whole {
            self.over.push_back(Over {
                ticket: whole.ticket,
                payload: whole.payload,
                // The first payload may have had a part in the previous slot.
                error: earlier.take().or_else(|| error.clone()),
            });
        }
        if landing.goes_on {
            self.failed = earlier.or(error);
        }
    }
}

impl<P: Send> ReceiveCarrier<P> for StagedReceive<P> {
    fn takes(&self, _flag: u8, place: Option<&Place<'_>>) -> bool {
        place.is_some_and(|place| place.device.is_some())
    }

    fn defers(&self) -> bool {
        true
    }

    /// Returns true if the oldest copy has newer ones behind it.
    fn is_deep(&self) -> bool {
        self.landing.len() > 1
    }

    fn begin(&mut self, more: bool) {
        self.at = Cursor::default();
        self.more = more;
    }

    fn room<'a>(&'a mut self, place: &Place<'a>, left: usize) -> Result<Option<Room<'a>>, Error> {
        let Some(device) = place.device else {
            return Ok(None);
        };
        // A slot that already has payloads takes another one only if it fits completely.
        let is_full = |filling: &Filling<P>| {
            !filling.whole.is_empty()
                && (left > filling.slot.len() - filling.filled
                    || !filling.device.is_same(device.as_ref()))
        };
        if self.filling.as_ref().is_some_and(is_full) {
            self.flush();
        }
        if self.filling.is_none() {
            if self.slots >= DEPTH {
                return Ok(None);
            }
            let Some(slot) = self.slot(device.as_ref())? else {
                return Ok(None);
            };
            self.filling = Some(Filling::new(slot, device));
        }
        let Some(Filling { slot, filled, .. }) = &self.filling else {
            return Ok(None);
        };
        let end = slot.len().min(filled + left);
        self.room = [slot.span(*filled, end)];
        Ok(Some(Room {
            bytes: end - filled,
            spans: &self.room,
            at: Cursor::default(),
        }))
    }

    /// Records the destination of the bytes.
    /// If the slot is full in the middle of a payload, starts the copy.
    fn filled(&mut self, place: &Place<'_>, count: usize, is_last: bool) -> Result<(), Error> {
        let Some(filling) = &mut self.filling else {
            return Ok(());
        };
        filling.note(&self.at, place.spans, count);
        if let Some((_, last)) = &mut filling.waiting {
            *last = (self.clock)();
        }
        self.at.advance(place.spans, count);
        if !is_last && filling.filled == filling.slot.len() {
            self.flush();
        }
        Ok(())
    }

    fn forget(&mut self) {
        if let Some(filling) = &mut self.filling {
            filling.forget();
        }
        self.flush();
        self.filling = None;
        match self.landing.back_mut() {
            Some(last) => last.goes_on = false,
            None => self.failed = None,
        }
    }

    /// Delays the copy of the payload, so that the next one can share it, if the peer has announced
    /// one and the slot has room.
    fn push(&mut self, ticket: Ticket, payload: P) -> Option<Over<P>> {
        let has_bytes = |filling: &&mut Filling<P>| filling.filled > filling.whole_bytes;
        let Some(filling) = self.filling.as_mut().filter(has_bytes) else {
            // The payload is empty.
            return Some(Over {
                ticket,
                payload,
                error: None,
            });
        };
        filling.complete(ticket, payload);
        let len = filling.filled;
        if self.more && len < filling.slot.len() {
            let now = (self.clock)();
            filling.waiting.get_or_insert((now, now));
            self.flush_due();
            return None;
        }
        let is_alone = self.landing.is_empty();
        self.flush();
        if let Some(Landing { copy: Ok(copy), .. }) = self.landing.back()
            && is_alone
        {
            let copier = &mut self.copier;
            // `poll_over` will find a failure again.
            glance(len, || copier.is_done(*copy, Wish::Soon).unwrap_or(true));
        }
        None
    }

    fn poll_over(&mut self) -> Option<Over<P>> {
        self.flush_due();
        // While more payload arrives and a slot is free for it,
        // a copy may wait for copies of other lanes.
        let wish = match self.more && self.slots + 1 < DEPTH {
            true => Wish::Later,
            false => Wish::Soon,
        };
        loop {
            if let Some(over) = self.over.pop_front() {
                return Some(over);
            }
            let front = self.landing.front()?;
            let outcome = match &front.copy {
                Ok(copy) => match self.copier.is_done(*copy, wish) {
                    Ok(false) => return None,
                    outcome => outcome.map(drop),
                },
                Err(error) => Err(error.clone()),
            };
            self.landed(outcome);
        }
    }

    fn is_busy(&self) -> bool {
        let is_waiting = |filling: &Filling<P>| !filling.whole.is_empty();
        !self.landing.is_empty()
            || !self.over.is_empty()
            || self.filling.as_ref().is_some_and(is_waiting)
    }

    fn let_go(&mut self) -> Result<(), Error> {
        self.flush();
        // Includes repeated copies: nothing is started afterwards.
        while let Some(front) = self.landing.front() {
            let outcome = match &front.copy {
                Ok(copy) => self.copier.wait(*copy),
                Err(error) => Err(error.clone()),
            };
            self.landed(outcome);
        }
        Ok(())
    }

    fn close(&mut self) -> Vec<P> {
        for landing in &self.landing {
            if let Ok(copy) = &landing.copy {
                // The outcome no longer matters.
                let _ = self.copier.wait(*copy);
            }
        }
        self.slots = 0;
        let over = std::mem::take(&mut self.over).into_iter();
        let over = over.map(|over| over.payload);
        let landing = std::mem::take(&mut self.landing).into_iter();
        let landing = landing.flat_map(|landing| landing.whole);
        let filling = self.filling.take().into_iter();
        let whole = landing.chain(filling.flat_map(|filling| filling.whole));
        over.chain(whole.map(|whole| whole.payload)).collect()
    }
}

impl<P> Filling<P> {
    fn new(slot: Slot, device: &Arc<dyn Device>) -> Self {
        Self {
            slot,
            device: Arc::clone(device),
            filled: 0,
            ranges: Vec::new(),
            whole: Vec::new(),
            whole_bytes: 0,
            whole_ranges: 0,
            waiting: None,
        }
    }

    /// Records `count` bytes of the current payload, whose destination begins at `at`. Never joins
    /// two spans: they may belong to adjacent regions, and a device does not copy across those.
    fn note(&mut self, at: &Cursor, spans: &[Span], count: usize) {
        let mut goes_on = at.is_inside();
        for range in ranges_of(spans, at, count) {
            match self.ranges[self.whole_ranges..].last_mut() {
                Some(last) if goes_on => last.len += range.len,
                _ => self.ranges.push(range),
            }
            goes_on = false;
        }
        self.filled += count;
    }

    /// Completes the current payload.
    fn complete(&mut self, ticket: Ticket, payload: P) {
        self.whole_bytes = self.filled;
        self.whole_ranges = self.ranges.len();
        self.whole.push(Whole {
            ticket,
            payload,
            bytes: self.whole_bytes,
            ranges: self.whole_ranges,
        });
    }

    /// Drops the bytes of the current payload.
    fn forget(&mut self) {
        self.filled = self.whole_bytes;
        self.ranges.truncate(self.whole_ranges);
    }
}
