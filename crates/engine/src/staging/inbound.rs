//! Payload on its way from a socket to a device.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tcpx_cuda::Device;
use tcpx_net::{Cursor, Span};

use super::pool::{Direction, Pool, Slot};
use super::queues::{Copy, Queues};
use super::{DEPTH, SHORT_BYTES, look};
use crate::error::Error;

/// The parts of one lane's payloads that are being received or copied on to a device. `T` is what remains to be
/// done once everything before it has landed, such as counting a chunk: it happens in the order of arrival, whether or
/// not a device was involved.
pub(crate) struct Inbound<T> {
    queues: Queues,
    /// The slot that the socket fills, and how far.
    filling: Option<(Slot, usize)>,
    /// Oldest first.
    landing: VecDeque<Landing<T>>,
    slots: usize,
    /// Why a copy of the payload at the front has failed.
    failed: Option<Error>,
    /// Since when there has been no slot for a lane that holds none.
    starved: Option<Instant>,
}

struct Landing<T> {
    /// A copy and the slot it reads.
    copy: Option<(Copy, Slot)>,
    then: Option<T>,
    /// The last of a payload that was given up: what failed until here is nobody's concern.
    is_given_up: bool,
}

/// How long a lane that holds no slot waits for one before it gets one of its own. Slots come back within milliseconds, unless peers that have
/// stopped in the middle of payloads hold them all: the others must not stop with them.
const STARVED: Duration = Duration::from_millis(100);

impl<T> Inbound<T> {
    pub(crate) fn new() -> Self {
        Self {
            queues: Queues::default(),
            filling: None,
            landing: VecDeque::new(),
            slots: 0,
            failed: None,
            starved: None,
        }
    }

    /// Whether nothing is on its way: what has arrived may be dealt with at once.
    pub(crate) fn is_empty(&self) -> bool {
        self.landing.is_empty()
    }

    /// Whether the oldest copy has newer ones behind it.
    pub(crate) fn is_deep(&self) -> bool {
        self.landing.len() > 1
    }

    /// Where the next bytes of a payload go, at most `left`; none while there is no slot for them.
    pub(crate) fn room(
        &mut self,
        device: &dyn Device,
        pool: &Arc<Pool>,
        left: usize,
    ) -> Result<Option<Span>, Error> {
        if self.filling.is_none() {
            if self.slots >= DEPTH {
                return Ok(None);
            }
            let Some(slot) = self.slot(device, pool)? else {
                return Ok(None);
            };
            self.filling = Some((slot, 0));
        }
        Ok(self.filling.as_ref().map(|(slot, filled)| {
            let len = left.min(slot.len() - filled);
            // SAFETY: inside the slot, which is ours until its copy is over.
            unsafe { Span::new(slot.address().wrapping_add(*filled), len) }
        }))
    }

    fn slot(&mut self, device: &dyn Device, pool: &Arc<Pool>) -> Result<Option<Slot>, Error> {
        if let Some(slot) = pool.take(device, Direction::In)? {
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
        Slot::own(device, pool.slot_bytes()).map(Some)
    }

    /// Counts bytes that were put into [`Inbound::room`]. When the slot is full, or the payload is (`is_last`), the device
    /// starts copying it to where `at` stands in `spans`.
    pub(crate) fn filled(
        &mut self,
        count: usize,
        is_last: bool,
        device: &dyn Device,
        spans: &[Span],
        at: &mut Cursor,
    ) -> Result<(), Error> {
        let Some((slot, filled)) = &mut self.filling else {
            return Ok(());
        };
        *filled += count;
        if !is_last && *filled < slot.len() {
            return Ok(());
        }
        let len = *filled;
        let Some((slot, _)) = self.filling.take() else {
            return Ok(());
        };
        let copy = self.queues.scatter(device, spans, *at, &slot, len)?;
        at.advance(spans, len);
        self.slots += 1;
        if is_last && len <= SHORT_BYTES && self.landing.is_empty() {
            let queues = &mut self.queues;
            // A failure is found again when it is due.
            look(|| queues.is_done(copy).unwrap_or(true));
        }
        self.landing.push_back(Landing {
            copy: Some((copy, slot)),
            then: None,
            is_given_up: false,
        });
        Ok(())
    }

    /// Gives up what was received of the current payload and not handed to the device yet.
    pub(crate) fn forget(&mut self) {
        self.filling = None;
        match self.landing.back_mut() {
            Some(last) if last.then.is_none() => last.is_given_up = true,
            Some(_) => {}
            None => self.failed = None,
        }
    }

    /// A payload has been received: `then` is due when all that came before it has landed.
    pub(crate) fn then(&mut self, then: T) {
        match self.landing.back_mut() {
            Some(last) if last.then.is_none() => last.then = Some(then),
            _ => self.landing.push_back(Landing {
                copy: None,
                then: Some(then),
                is_given_up: false,
            }),
        }
    }

    /// What is due now, oldest first, and why its bytes have not landed if they have not.
    pub(crate) fn due(&mut self) -> Option<(T, Option<Error>)> {
        loop {
            let front = self.landing.front_mut()?;
            if let Some((copy, _)) = front.copy {
                match self.queues.is_done(copy) {
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
            if let Some(then) = landing.then {
                return Some((then, self.failed.take()));
            }
            if landing.is_given_up {
                self.failed = None;
            }
            if self.landing.is_empty() {
                // The rest of its payload is still to come.
                return None;
            }
        }
    }

    /// Waits until no copy is under way. What is due stays due.
    pub(crate) fn wait(&mut self) {
        for landing in &self.landing {
            if let Some((copy, _)) = &landing.copy {
                // A failure is found again when it is due.
                let _ = self.queues.wait(*copy);
            }
        }
    }

    /// Gives up everything, after waiting for the copies that are under way; returns what was not due yet.
    pub(crate) fn close(&mut self) -> impl Iterator<Item = T> + use<T> {
        self.wait();
        self.filling = None;
        self.slots = 0;
        let landing = std::mem::take(&mut self.landing);
        landing.into_iter().filter_map(|landing| landing.then)
    }
}
