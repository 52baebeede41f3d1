//! Restores the order of received frames.

use alloc::collections::VecDeque;

/// A frame's place in the order of arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(u64);

/// Returns received frames in the order of their arrival, whichever way and however fast each
/// payload came: through a device, on a comm, or with its frame.
///
/// A frame takes a ticket when it begins ([`Landing::reserve`]) and is completed when nothing of it
/// is in flight any more ([`Landing::complete`]). [`Landing::poll_event`] returns the oldest frame
/// once it is complete.
#[derive(Debug)]
pub struct Landing<P> {
    /// The number of the oldest ticket.
    first: u64,
    /// One place per ticket still in use, oldest first.
    places: VecDeque<Option<P>>,
}

impl<P> Default for Landing<P> {
    fn default() -> Self {
        Self {
            first: 0,
            places: VecDeque::new(),
        }
    }
}

impl<P> Landing<P> {
    /// Returns whether no frame waits: a frame that has arrived may be processed at once.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Returns the number of frames that wait or are not complete.
    #[must_use]
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// Takes the next place in the order of arrival.
    pub fn reserve(&mut self) -> Ticket {
        self.places.push_back(None);
        Ticket(self.first + self.places.len() as u64 - 1)
    }

    /// Completes the frame with this ticket. Drops the payload if the ticket is no longer valid.
    pub fn complete(&mut self, ticket: Ticket, payload: P) {
        let at = ticket.0.checked_sub(self.first);
        let place = at.and_then(|at| self.places.get_mut(usize::try_from(at).ok()?));
        if let Some(place) = place {
            *place = Some(payload);
        }
    }

    /// Returns the oldest frame, if it is complete.
    pub fn poll_event(&mut self) -> Option<P> {
        let payload = self.places.front_mut()?.take()?;
        self.places.pop_front();
        self.first += 1;
        Some(payload)
    }

    /// Gives up all places; returns the frames that were complete.
    pub fn close(&mut self) -> impl Iterator<Item = P> + use<P> {
        self.first += self.places.len() as u64;
        core::mem::take(&mut self.places).into_iter().flatten()
    }
}
