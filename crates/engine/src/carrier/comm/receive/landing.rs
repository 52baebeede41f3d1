//! Copies of messages from where the plugin has put them to their destination.

use tcpx_cuda::Wish;
use tcpx_ncclnet::Flushing;
use tcpx_net::{Cursor, Fault, Span, Store, copy_spans};

use super::{CommReceive, Message, MessageState, Target};
use crate::carrier::comm::memory::Slot;
use crate::error::{Error, PluginFault};
use crate::memory::{PendingCopy, Place};

impl<T: Target> CommReceive<T> {
    /// Advances messages that are done. Returns whether anything has moved.
    pub(super) fn land(&mut self) -> Result<bool, Error> {
        for index in 0..self.done {
            self.advance(index)?;
        }
        self.consume()
    }

    /// Consumes the messages that have landed, in order.
    pub(super) fn consume(&mut self) -> Result<bool, Error> {
        let mut moved = false;
        while self.done > 0 {
            let Some(Message {
                request,
                state: MessageState::Landed,
                ..
            }) = self.posted.front()
            else {
                break;
            };
            let Some(comm) = &mut self.comm else { break };
            comm.consume(*request)?;
            self.posted.pop_front();
            self.done -= 1;
            moved = true;
        }
        Ok(moved)
    }

    /// Advances a message that is done towards its destination.
    pub(super) fn advance(&mut self, index: usize) -> Result<(), Error> {
        let message = &self.posted[index];
        if let MessageState::Landed = message.state {
            return Ok(());
        }
        let part = Part {
            number: message.request.number(),
            frame: (message.frame - self.over) as usize,
            len: message.len,
            at: message.at,
        };
        loop {
            let state = &mut self.posted[index].state;
            let next = match std::mem::replace(state, MessageState::Landed) {
                MessageState::Landed => return Ok(()),
                MessageState::Direct => Next::Now(MessageState::Landed),
                MessageState::Unflushed => self.flush(&part)?,
                MessageState::Flushing(flush) => {
                    let tested = self.comm.as_mut().map(|comm| comm.test_flush(flush));
                    match tested.transpose()? {
                        Some(false) => Next::Later(MessageState::Flushing(flush)),
                        _ => Next::Now(MessageState::Landed),
                    }
                }
                MessageState::Gathering(copy, slot) if self.copier.is_done(copy, Wish::Soon)? => {
                    Next::Now(MessageState::InSlot(slot))
                }
                MessageState::Gathering(copy, slot) => {
                    Next::Later(MessageState::Gathering(copy, slot))
                }
                MessageState::Scattering(copy, slot) if self.is_over(copy, &part) => {
                    self.slots.give(slot);
                    Next::Now(MessageState::Landed)
                }
                MessageState::Scattering(copy, slot) => {
                    Next::Later(MessageState::Scattering(copy, slot))
                }
                MessageState::Unpacking(copy) if self.is_over(copy, &part) => {
                    Next::Now(MessageState::Landed)
                }
                MessageState::Unpacking(copy) => Next::Later(MessageState::Unpacking(copy)),
                MessageState::InSlot(slot) => Next::Now(self.empty_slot(slot, &part)),
                MessageState::Bounced => self.unpack(&part)?,
            };
            match next {
                Next::Now(MessageState::Landed) => {
                    self.frames[part.frame].outstanding -= 1;
                    return Ok(());
                }
                Next::Now(state) => self.posted[index].state = state,
                Next::Later(state) => {
                    self.posted[index].state = state;
                    return Ok(());
                }
            }
        }
    }

    /// Returns whether a copy to the destination is over. A failure fails the frame.
    fn is_over(&mut self, copy: PendingCopy, part: &Part) -> bool {
        match self.copier.is_done(copy, Wish::Soon) {
            Ok(is_over) => is_over,
            Err(error) => {
                self.frames[part.frame].failed.get_or_insert(error);
                true
            }
        }
    }

    /// Makes a device see the bytes that the plugin has written to its memory.
    fn flush(&mut self, part: &Part) -> Result<Next, Error> {
        let place = self.frames[part.frame].then.place();
        let (Some(comm), Some(place)) = (&mut self.comm, place) else {
            // Nobody reads revoked memory, so no flush is needed.
            return Ok(Next::Now(MessageState::Landed));
        };
        let span = part.at.rest(place.spans).next();
        let span = span.and_then(|span| span.slice(0, part.len));
        let found = span.and_then(|span| self.registrations.find(comm, &place, span));
        let Some((handle, offset)) = found else {
            return Err(Error::PluginBroke(PluginFault::UnknownMemory));
        };
        Ok(match comm.flush(handle, offset, part.len)? {
            Flushing::Begun(flush) => Next::Now(MessageState::Flushing(flush)),
            Flushing::Needless => Next::Now(MessageState::Landed),
            Flushing::Full => Next::Later(MessageState::Unflushed),
        })
    }

    /// Copies the bytes in a slot to their destination.
    fn empty_slot(&mut self, slot: Slot, part: &Part) -> MessageState {
        let from = slot.span(part.len);
        let frame = &mut self.frames[part.frame];
        match frame.then.place() {
            Some(Place {
                spans,
                device: Some(device),
                ..
            }) => match self.copier.scatter(device.as_ref(), spans, part.at, from) {
                Ok(copy) => return MessageState::Scattering(copy, slot),
                Err(error) => {
                    frame.failed.get_or_insert(error);
                }
            },
            Some(Place { spans, .. }) => {
                if let Err(fault) = scatter(&[from], spans, part.at) {
                    frame.failed.get_or_insert(fault.into());
                }
            }
            None => {}
        }
        self.slots.give(slot);
        MessageState::Landed
    }

    /// Copies the bytes in bounce pages to their destination, or to a slot if the device that holds
    /// them cannot access the destination.
    fn unpack(&mut self, part: &Part) -> Result<Next, Error> {
        let (Some(unpack), Some(comm)) = (&mut self.unpack, &mut self.comm) else {
            return Ok(Next::Later(MessageState::Bounced));
        };
        unpack.ring.find(part.number, part.len)?;
        let frame = &mut self.frames[part.frame];
        let Some(Place { spans, device, .. }) = frame.then.place() else {
            return Ok(Next::Now(MessageState::Landed));
        };
        let near = unpack.device.as_ref().or(self.standin.as_ref());
        if let (Some(device), Some(near)) = (device, near)
            && device.is_same(near.as_ref())
        {
            let (base, from) = (unpack.ring.base(), unpack.ring.spans());
            let copy = self
                .copier
                .unpack(device.as_ref(), base, from, (spans, part.at));
            return Ok(Next::Now(match copy {
                Ok(copy) => MessageState::Unpacking(copy),
                Err(error) => {
                    frame.failed.get_or_insert(error);
                    MessageState::Landed
                }
            }));
        }
        if device.is_none() && unpack.device.is_none() {
            if let Err(fault) = scatter(unpack.ring.spans(), spans, part.at) {
                frame.failed.get_or_insert(fault.into());
            }
            return Ok(Next::Now(MessageState::Landed));
        }
        let pinned = device.or(unpack.device.as_ref());
        let Some(slot) = self.slots.take(comm, pinned)? else {
            return Ok(Next::Later(MessageState::Bounced));
        };
        let (from, to) = (unpack.ring.spans(), slot.span(part.len));
        let start = Cursor::default();
        Ok(Next::Now(match &unpack.device {
            None => {
                scatter(from, &[to], start)?;
                MessageState::InSlot(slot)
            }
            Some(gpu) => {
                let copy = self.copier.gather(gpu.as_ref(), from, start, to)?;
                MessageState::Gathering(copy, slot)
            }
        }))
    }
}

/// The message that is being copied to its destination.
struct Part {
    /// The request's number on its comm.
    number: u64,
    /// Position of its frame in `frames`.
    frame: usize,
    len: usize,
    /// Position in the frame's destination.
    at: Cursor,
}

/// The next state of a message.
enum Next {
    /// Continue at once.
    Now(MessageState),
    /// Continue at the next call.
    Later(MessageState),
}

/// Copies `from`, back to back, to the position of `at` in `to`.
/// Bypasses the cache: the bytes are not read soon.
fn scatter(from: &[Span], to: &[Span], at: Cursor) -> Result<(), Fault> {
    copy_spans((from, Cursor::default()), (to, at), Store::Streamed)?;
    Ok(())
}
