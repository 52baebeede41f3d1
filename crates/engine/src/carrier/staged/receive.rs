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
    /// Those of its payloads that are complete, and what they have of the above.
    whole: Vec<(Ticket, P)>,
    whole_bytes: usize,
    whole_ranges: usize,
    /// When the first of them was complete, and when bytes came last.
    waiting: Option<(Instant, Instant)>,
}

/// A copy and the slot that it reads.
struct Landing<P> {
    copy: Result<(PendingCopy, Slot), Error>,
    /// The payloads that are over with this copy.
    whole: Vec<(Ticket, P)>,
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
        let Filling {
            slot,
            device,
            filled,
            ranges,
            ..
        } = &filling;
        let from = slot.span(0, *filled);
        let copier = &mut self.copier;
        let copy = copier.scatter_ranges(device.as_ref(), from, ranges);
        self.slots += usize::from(copy.is_ok());
        self.landing.push_back(Landing {
            goes_on: filling.filled > filling.whole_bytes,
            whole: filling.whole,
            // One that could not be started uses the slot no more.
            copy: copy.map(|copy| (copy, filling.slot)),
        });
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

    /// Notes that a copy is over, and with it payloads.
    fn landed(&mut self, landing: Landing<P>, error: Option<Error>) {
        let mut earlier = self.failed.take();
        for (ticket, payload) in landing.whole {
            // The first may have had a part in the slot before.
            let error = earlier.take().or_else(|| error.clone());
            self.over.push_back(Over {
                ticket,
                payload,
                error,
            });
        }
        if landing.goes_on {
            self.failed = earlier.or(error);
        }
    }

    /// Waits until no copy is under way. What is over stays over.
    fn wait(&mut self) {
        for landing in &self.landing {
            if let Ok((copy, _)) = &landing.copy {
                // A failure is found again by `poll_over`.
                let _ = self.copier.wait(*copy);
            }
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
        if let Some(Landing {
            copy: Ok((copy, _)),
            ..
        }) = self.landing.back()
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
            let error = match &front.copy {
                Ok((copy, _)) => {
                    let outcome = self.copier.is_done(*copy, wish);
                    if let Ok(false) = outcome {
                        return None;
                    }
                    self.slots -= 1;
                    outcome.err()
                }
                Err(error) => Some(error.clone()),
            };
            let landing = self.landing.pop_front()?;
            self.landed(landing, error);
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
        self.wait();
        Ok(())
    }

    fn close(&mut self) -> Vec<P> {
        self.wait();
        self.slots = 0;
        let over = std::mem::take(&mut self.over).into_iter();
        let over = over.map(|over| over.payload);
        let landing = std::mem::take(&mut self.landing).into_iter();
        let landing = landing.flat_map(|landing| landing.whole);
        let filling = self.filling.take().into_iter();
        let whole = landing.chain(filling.flat_map(|filling| filling.whole));
        over.chain(whole.map(|(_, payload)| payload)).collect()
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
        self.whole.push((ticket, payload));
        self.whole_bytes = self.filled;
        self.whole_ranges = self.ranges.len();
    }

    /// Drops what there is of the current payload.
    fn forget(&mut self) {
        self.filled = self.whole_bytes;
        self.ranges.truncate(self.whole_ranges);
    }
}
