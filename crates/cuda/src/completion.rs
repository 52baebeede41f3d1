//! How a queue learns what is done.

use std::sync::Arc;

use crate::context::{Context, log};
use crate::error::Error;
use crate::sys;

/// Copies in flight on one queue: far more than it takes to keep a device busy.
pub(crate) const TICKETS: usize = 64;

/// The tickets of one stream: which was issued last, which is done last.
///
/// By events. A number that the stream writes to host memory is seen half a microsecond earlier, but
/// writing it costs the caller a microsecond more, and holds up the launch behind it.
pub(crate) struct Completion {
    context: Arc<Context>,
    stream: sys::Stream,
    /// The event of ticket `n` is at `(n - 1) % TICKETS`.
    events: Vec<sys::Event>,
    /// `done <= issued <= done + TICKETS`.
    issued: u64,
    done: u64,
}

impl Completion {
    /// `stream` must be a stream of the context, and live as long as this. The context must be current.
    pub(crate) fn new(context: Arc<Context>, stream: sys::Stream) -> Result<Self, Error> {
        let api = context.api;
        let mut made = Self {
            context,
            stream,
            events: Vec::with_capacity(TICKETS),
            issued: 0,
            done: 0,
        };
        // From here on `drop` gives back what was made.
        for _ in 0..TICKETS {
            let mut event = std::ptr::null_mut();
            // SAFETY: stores a handle.
            let code = unsafe { (api.event_create)(&mut event, sys::EVENT_DISABLE_TIMING) };
            api.check(code, "making an event")?;
            made.events.push(event);
        }
        Ok(made)
    }

    pub(crate) fn issued(&self) -> u64 {
        self.issued
    }

    pub(crate) fn done(&self) -> u64 {
        self.done
    }

    pub(crate) fn in_flight(&self) -> usize {
        (self.issued - self.done) as usize
    }

    /// Issues a ticket for everything on the stream so far. The context must be current, and fewer than
    /// `TICKETS` in flight.
    pub(crate) fn issue(&mut self) -> Result<u64, Error> {
        let (api, ticket) = (self.context.api, self.issued + 1);
        // SAFETY: our own event and stream.
        let code = unsafe { (api.event_record)(self.events[index(ticket)], self.stream) };
        api.check(code, "marking the end of a copy")?;
        self.issued = ticket;
        Ok(ticket)
    }

    /// Whether a ticket that was issued is done. An error if the device has failed.
    pub(crate) fn look(&mut self, ticket: u64) -> Result<bool, Error> {
        if ticket <= self.done {
            return Ok(true);
        }
        let api = self.context.api;
        let _scope = self.context.enter()?;
        // SAFETY: our own event, recorded with this ticket: at most `TICKETS` are in flight.
        match unsafe { (api.event_query)(self.events[index(ticket)]) } {
            sys::NOT_READY => Ok(false),
            code => {
                api.check(code, "copying on the device")?;
                self.done = ticket;
                Ok(true)
            }
        }
    }

    /// Notes all that is done.
    pub(crate) fn reap(&mut self) -> Result<(), Error> {
        while self.done < self.issued && self.look(self.done + 1)? {}
        Ok(())
    }
}

/// The place of a ticket among `TICKETS`.
pub(crate) fn index(ticket: u64) -> usize {
    ((ticket - 1) % TICKETS as u64) as usize
}

impl Drop for Completion {
    fn drop(&mut self) {
        // A context that is gone has taken them along.
        let Ok(_scope) = self.context.enter() else {
            return;
        };
        let api = self.context.api;
        // A context that has failed refuses each of them: once is enough to know.
        let mut refused = sys::SUCCESS;
        for event in self.events.drain(..) {
            // SAFETY: our own, and no longer waited for.
            let code = unsafe { (api.event_destroy)(event) };
            refused = if code == sys::SUCCESS { refused } else { code };
        }
        log(api, refused, "closing events");
    }
}
