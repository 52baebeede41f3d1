//! Payload on its way from a socket to a device.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tcpx_cuda::{Device, Wish};
use tcpx_net::{Cursor, Span};
use tcpx_proto::lane::Ticket;

use crate::carrier::{Over, ReceiveCarrier, Room};
use crate::config::staging::DEPTH;
use crate::error::Error;
use crate::memory::{Copier, Direction, PendingCopy, Place, Pool, Slot, glance};

/// Receives payload into slots, from where a device copies it on while the next slot is being filled.
pub(crate) struct StagedReceive<P> {
    pool: Arc<Pool>,
    copier: Copier,
    /// Up to where the current payload was handed to the device.
    at: Cursor,
    /// The slot that the socket fills, and how far.
    filling: Option<(Slot, usize)>,
    /// What [`ReceiveCarrier::room`] returned last.
    room: [Span; 1],
    /// Copies under way, oldest first.
    landing: VecDeque<Landing<P>>,
    slots: usize,
    /// Why a copy of the payload at the front has failed.
    failed: Option<Error>,
    /// Whether the peer has another payload behind the current one.
    more: bool,
    /// Since when there has been no slot for a lane that holds none.
    starved: Option<Instant>,
}

/// A copy and the slot that it reads.
struct Landing<P> {
    copy: Option<(PendingCopy, Slot)>,
    /// The payload that is over with this copy.
    then: Option<(Ticket, P)>,
    /// The last of a payload that was given up: its failures concern nobody.
    is_given_up: bool,
}

/// How long a lane that holds no slot waits for one before it gets one of its own. Slots come back
/// within milliseconds, unless peers that have stopped in the middle of payloads hold them all: the
/// others must not stop with them.
const STARVED: Duration = Duration::from_millis(100);

impl<P> StagedReceive<P> {
    pub(crate) fn new(pool: Arc<Pool>) -> Self {
        // SAFETY: an empty span is never accessed.
        let nothing = unsafe { Span::new(std::ptr::dangling_mut(), 0) };
        Self {
            copier: Copier::batching(&pool),
            pool,
            at: Cursor::default(),
            filling: None,
            room: [nothing],
            landing: VecDeque::new(),
            slots: 0,
            failed: None,
            more: false,
            starved: None,
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
        let since = *self.starved.get_or_insert_with(Instant::now);
        if since.elapsed() < STARVED {
            return Ok(None);
        }
        Slot::own(device, self.pool.slot_bytes()).map(Some)
    }

    /// Waits until no copy is under way. What is over stays over.
    fn wait(&mut self) {
        for landing in &self.landing {
            if let Some((copy, _)) = &landing.copy {
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
        if self.filling.is_none() {
            if self.slots >= DEPTH {
                return Ok(None);
            }
            let Some(slot) = self.slot(device.as_ref())? else {
                return Ok(None);
            };
            self.filling = Some((slot, 0));
        }
        let Some((slot, filled)) = &self.filling else {
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

    /// When the slot is full, or the payload is, the device starts copying it on.
    fn filled(&mut self, place: &Place<'_>, count: usize, is_last: bool) -> Result<(), Error> {
        let (Some((slot, filled)), Some(device)) = (&mut self.filling, place.device) else {
            return Ok(());
        };
        *filled += count;
        if !is_last && *filled < slot.len() {
            return Ok(());
        }
        let Some((slot, len)) = self.filling.take() else {
            return Ok(());
        };
        let from = slot.span(0, len);
        let copy = self
            .copier
            .scatter(device.as_ref(), place.spans, self.at, from)?;
        self.at.advance(place.spans, len);
        self.slots += 1;
        if is_last && self.landing.is_empty() {
            let copier = &mut self.copier;
            // A failure is found again by `poll_over`.
            glance(len, || copier.is_done(copy, Wish::Soon).unwrap_or(true));
        }
        self.landing.push_back(Landing {
            copy: Some((copy, slot)),
            then: None,
            is_given_up: false,
        });
        Ok(())
    }

    fn forget(&mut self) {
        self.filling = None;
        match self.landing.back_mut() {
            Some(last) if last.then.is_none() => last.is_given_up = true,
            Some(_) => {}
            None => self.failed = None,
        }
    }

    fn push(&mut self, ticket: Ticket, payload: P) -> Option<Over<P>> {
        match self.landing.back_mut() {
            Some(last) if last.then.is_none() => {
                last.then = Some((ticket, payload));
                None
            }
            // Its copies are over already; a failure that is noted then is its own.
            last => {
                let is_alone = last.is_none();
                let error = self.failed.take_if(|_| is_alone);
                Some(Over {
                    ticket,
                    payload,
                    error,
                })
            }
        }
    }

    fn poll_over(&mut self) -> Option<Over<P>> {
        // While more payload comes and a slot is free for it, a copy may wait for those of other lanes.
        let wish = match self.more && self.slots + 1 < DEPTH {
            true => Wish::Later,
            false => Wish::Soon,
        };
        loop {
            let front = self.landing.front_mut()?;
            if let Some((copy, _)) = front.copy {
                match self.copier.is_done(copy, wish) {
                    Ok(false) => return None,
                    Ok(true) => {}
                    Err(error) => {
                        self.failed.get_or_insert(error);
                    }
                }
                front.copy = None;
                self.slots -= 1;
            }
            let landing = self.landing.pop_front()?;
            if let Some((ticket, payload)) = landing.then {
                return Some(Over {
                    ticket,
                    payload,
                    error: self.failed.take(),
                });
            }
            if landing.is_given_up {
                self.failed = None;
            }
        }
    }

    fn is_busy(&self) -> bool {
        !self.landing.is_empty()
    }

    fn let_go(&mut self) -> Result<(), Error> {
        self.wait();
        Ok(())
    }

    fn close(&mut self) -> Vec<P> {
        self.wait();
        self.filling = None;
        self.slots = 0;
        let landing = std::mem::take(&mut self.landing);
        let waiting = landing.into_iter().filter_map(|landing| landing.then);
        waiting.map(|(_, payload)| payload).collect()
    }
}
