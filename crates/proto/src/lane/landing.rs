//! What was received, in the order of its frames.

use alloc::collections::VecDeque;

/// A frame's place in the order of arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(u64);

/// Gives out what was received in the order of its frames, whichever way and however fast each
/// payload came: through a device, on a comm, or with its frame.
///
/// A frame takes a ticket when it begins ([`Landing::reserve`]) and is handed in when nothing of it
/// is under way any more ([`Landing::complete`]). [`Landing::poll_event`] returns the oldest once it
/// was handed in.
#[derive(Debug)]
pub struct Landing<P> {
    /// The number of the oldest ticket.
    first: u64,
    /// One place for each ticket that is not over, oldest first.
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
    /// Whether nothing waits: what has arrived may be dealt with at once.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// How many frames wait, or are waited for.
    #[must_use]
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// Takes the next place in the order of arrival.
    pub fn reserve(&mut self) -> Ticket {
        self.places.push_back(None);
        Ticket(self.first + self.places.len() as u64 - 1)
    }

    /// Hands in the frame that has this ticket. Drops the payload if the ticket is over.
    pub fn complete(&mut self, ticket: Ticket, payload: P) {
        let at = ticket.0.checked_sub(self.first);
        let place = at.and_then(|at| self.places.get_mut(usize::try_from(at).ok()?));
        if let Some(place) = place {
            *place = Some(payload);
        }
    }

    /// The oldest frame, if it was handed in.
    pub fn poll_event(&mut self) -> Option<P> {
        let payload = self.places.front_mut()?.take()?;
        self.places.pop_front();
        self.first += 1;
        Some(payload)
    }

    /// Gives up all places; returns what was handed in.
    pub fn close(&mut self) -> impl Iterator<Item = P> + use<P> {
        self.first += self.places.len() as u64;
        core::mem::take(&mut self.places).into_iter().flatten()
    }
}
