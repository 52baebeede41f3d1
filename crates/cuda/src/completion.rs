//! Tracks which copies of a queue are done.

use std::sync::Arc;

use crate::context::{Context, log};
use crate::error::Error;
use crate::sys;

/// Maximum copies in flight on one queue: far more than needed to keep a device busy.
pub(crate) const TICKETS: usize = 64;

/// The tickets of one stream: the last issued and the last done.
///
/// Uses events. A number that the stream writes to host memory is visible half a microsecond
/// earlier, but writing it costs the caller a microsecond more, and delays the launch behind it.
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
    /// `stream` must be a stream of the context, and outlive this value. The context must be
    /// current.
    pub(crate) fn new(context: Arc<Context>, stream: sys::Stream) -> Result<Self, Error> {
        let api = context.api;
        let mut made = Self {
            context,
            stream,
            events: Vec::with_capacity(TICKETS),
            issued: 0,
            done: 0,
        };
        // From here on `drop` destroys the events made so far.
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

    /// Issues a ticket for everything queued on the stream so far. The context must be current, and
    /// fewer than `TICKETS` in flight.
    pub(crate) fn issue(&mut self) -> Result<u64, Error> {
        let (api, ticket) = (self.context.api, self.issued + 1);
        // SAFETY: event and stream belong to this value.
        let code = unsafe { (api.event_record)(self.events[index(ticket)], self.stream) };
        api.check(code, "marking the end of a copy")?;
        self.issued = ticket;
        Ok(ticket)
    }

    /// Returns whether an issued ticket is done. Fails if the device has failed.
    pub(crate) fn look(&mut self, ticket: u64) -> Result<bool, Error> {
        if ticket <= self.done {
            return Ok(true);
        }
        let api = self.context.api;
        let _scope = self.context.enter()?;
        // SAFETY: the event belongs to this value and was recorded with this ticket: at most
        // `TICKETS` are in flight.
        match unsafe { (api.event_query)(self.events[index(ticket)]) } {
            sys::NOT_READY => Ok(false),
            code => {
                api.check(code, "copying on the device")?;
                self.done = ticket;
                Ok(true)
            }
        }
    }

    /// Records all tickets that are done.
    pub(crate) fn reap(&mut self) -> Result<(), Error> {
        while self.done < self.issued && self.look(self.done + 1)? {}
        Ok(())
    }
}

/// Returns the index of a ticket among `TICKETS`.
pub(crate) fn index(ticket: u64) -> usize {
    ((ticket - 1) % TICKETS as u64) as usize
}

impl Drop for Completion {
    fn drop(&mut self) {
        // A destroyed context has destroyed its events.
        let Ok(_scope) = self.context.enter() else {
            return;
        };
        let api = self.context.api;
        // A failed context refuses every call: the first error is enough.
        let mut refused = sys::SUCCESS;
        for event in self.events.drain(..) {
            // SAFETY: the event belongs to this value, and nothing waits for it.
            let code = unsafe { (api.event_destroy)(event) };
            refused = if code == sys::SUCCESS { refused } else { code };
        }
        log(api, refused, "closing events");
    }
}
