//! Payload on its way from a socket to a device.

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

/// Receives payload into slots, from where a device copies it on while the next slot is being filled.
/// Payloads that follow each other share a slot, and one copy.
pub(crate) struct StagedReceive<P> {
    pool: Arc<Pool>,
    copier: Copier,
    /// Up to where the current payload was received.
    at: Cursor,
    /// The slot that the socket fills.
    filling: Option<Filling<P>>,
    /// What [`ReceiveCarrier::room`] returned last.
    room: [Span; 1],
    /// Copies under way, oldest first.
    landing: VecDeque<Landing<P>>,
    /// Payloads that are over and not returned yet.
    over: VecDeque<Over<P>>,
    slots: usize,
    /// Why a copy of the payload at the front has failed.
    failed: Option<Error>,
    /// Whether the peer has another payload behind the current one.
    more: bool,
    /// Since when there has been no slot for a lane that holds none.
    starved: Option<Instant>,
    clock: fn() -> Instant,
}

/// A slot that is being filled.
struct Filling<P> {
    slot: Slot,
    device: Arc<dyn Device>,
    // ≤ slot.len()
    filled: usize,
    /// Where these bytes go.
    ranges: Vec<Range>,
    /// Those of its payloads that are complete, and what all of them have of the above.
    whole: Vec<Whole<P>>,
    whole_bytes: usize,
    whole_ranges: usize,
    /// When the first of them was complete, and when bytes came last.
    waiting: Option<(Instant, Instant)>,
}

/// A payload that is complete.
struct Whole<P> {
    ticket: Ticket,
    payload: P,
    /// Bytes and ranges of the slot up to its end.
    bytes: usize,
    ranges: usize,
}

/// A copy and the slot that it reads.
struct Landing<P> {
    /// One that could not be started uses the slot no more.
    copy: Result<PendingCopy, Error>,
    slot: Arc<Slot>,
    device: Arc<dyn Device>,
    // From where to where in the slot.
    bytes: std::ops::Range<usize>,
    /// Where these bytes go.
    ranges: Vec<Range>,
    /// The payloads that are over with this copy.
    whole: Vec<Whole<P>>,
    /// Whether the last bytes are of a payload that goes on in the next slot, and was not given up.
    goes_on: bool,
}

/// How long a lane that holds no slot waits for one before it gets one of its own. Slots come back
/// within milliseconds, unless peers that have stopped in the middle of payloads hold them all: the
/// others must not stop with them.
const STARVED: Duration = Duration::from_millis(100);

/// How long a payload waits for bytes of the next one, which is to share its copy.
const STALLED: Duration = Duration::from_micros(100);
/// How long a payload waits for its copy while more come: fast lanes fill much of a slot meanwhile.
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
            clock,
        }
    }

    fn slot(&mut self, device: &dyn Device) -> Result<Option<Slot>, Error> {
        if let Some(slot) = self.pool.take(device, Direction::In)? {
            self.starved = None;
            return Ok(Some(slot));
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

    /// Starts the copy of what the slot has, of which the current payload's part may be the last.
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

    /// Copies the payloads of a shared copy again, each alone: memory of one of them was not mapped.
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

    /// Deals with the end of the oldest copy, and of the payloads that are over with it.
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
                // The first may have had a part in the slot before.
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

    /// The oldest copy has newer ones behind it.
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
        // A slot that has payloads takes another if that fits.
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

    /// Notes where the bytes go. When the slot is full in the middle of a payload, the device starts
    /// copying it on.
    fn filled(&mut self, place: &Place<'_>, count: usize, is_last: bool) -> Result<(), Error> {
        let Some(filling) = &mut self.filling else {
            return Ok(());
        };
        filling.note(ranges_of(place.spans, &self.at, count), count);
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

    /// Lets the payload wait for the next one, which shares its copy, if the peer has said that there is
    /// one and the slot has room.
    fn push(&mut self, ticket: Ticket, payload: P) -> Option<Over<P>> {
        let has_bytes = |filling: &&mut Filling<P>| filling.filled > filling.whole_bytes;
        let Some(filling) = self.filling.as_mut().filter(has_bytes) else {
            // It has none.
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
            // A failure is found again by `poll_over`.
            glance(len, || copier.is_done(*copy, Wish::Soon).unwrap_or(true));
        }
        None
    }

    fn poll_over(&mut self) -> Option<Over<P>> {
        self.flush_due();
        // While more payload comes and a slot is free for it, a copy may wait for those of other lanes.
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
        // Also what is copied again: nothing is started afterwards.
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
                // How they ended makes no difference any more.
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

    /// Notes `count` bytes of the current payload, and where they go.
    fn note(&mut self, ranges: impl Iterator<Item = Range>, count: usize) {
        for range in ranges {
            match self.ranges[self.whole_ranges..].last_mut() {
                Some(last) if last.address + last.len == range.address => last.len += range.len,
                _ => self.ranges.push(range),
            }
        }
        self.filled += count;
    }

    /// The current payload is complete.
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

    /// Drops what there is of the current payload.
    fn forget(&mut self) {
        self.filled = self.whole_bytes;
        self.ranges.truncate(self.whole_ranges);
    }
}
