//! From where the plugin has put a message to where it belongs.

use tcpx_ncclnet::Flushing;
use tcpx_net::{Cursor, Span};

use super::{Inflow, Message, State, Target};
use crate::error::Error;
use crate::transport::plugin::Place;

impl<T: Target> Inflow<T> {
    /// Goes on with messages that are done. Says whether anything has moved.
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
                state: State::Landed,
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

    /// Brings a message that is done nearer to where it belongs.
    pub(super) fn advance(&mut self, index: usize) -> Result<(), Error> {
        let message = &mut self.posted[index];
        if let State::Landed = message.state {
            return Ok(());
        }
        let frame = &mut self.frames[(message.frame - self.over) as usize];
        loop {
            let state = std::mem::replace(&mut message.state, State::Landed);
            message.state = match state {
                State::Landed => return Ok(()),
                State::Direct => State::Landed,
                // Nobody looks at memory that was revoked.
                State::Unflushed => match (&mut self.comm, frame.then.place()) {
                    (Some(comm), Some(place)) => {
                        let span = message.at.rest(place.spans).next();
                        let span = span.and_then(|span| span.slice(0, message.len));
                        let found = span.and_then(|span| self.registry.find(comm, &place, span));
                        let Some((handle, offset)) = found else {
                            return Err(Error::PluginBroke {
                                what: "it does not know memory that it received into".into(),
                            });
                        };
                        match comm.flush(handle, offset, message.len)? {
                            Flushing::Begun(flush) => State::Flushing(flush),
                            Flushing::Needless => State::Landed,
                            Flushing::Full => {
                                message.state = State::Unflushed;
                                return Ok(());
                            }
                        }
                    }
                    _ => State::Landed,
                },
                State::Flushing(flush) => {
                    if let Some(comm) = &mut self.comm
                        && !comm.test_flush(flush)?
                    {
                        message.state = State::Flushing(flush);
                        return Ok(());
                    }
                    State::Landed
                }
                State::Gathering(copy, slot) => match self.queues.is_done(copy) {
                    Ok(true) => State::InSlot(slot),
                    Ok(false) => {
                        message.state = State::Gathering(copy, slot);
                        return Ok(());
                    }
                    Err(error) => return Err(error),
                },
                State::Scattering(copy, slot) => match self.queues.is_done(copy) {
                    Ok(false) => {
                        message.state = State::Scattering(copy, slot);
                        return Ok(());
                    }
                    ended => {
                        frame.failed = frame.failed.take().or(ended.err());
                        self.slots.give(slot);
                        State::Landed
                    }
                },
                State::Unpacking(copy) => match self.queues.is_done(copy) {
                    Ok(false) => {
                        message.state = State::Unpacking(copy);
                        return Ok(());
                    }
                    ended => {
                        frame.failed = frame.failed.take().or(ended.err());
                        State::Landed
                    }
                },
                State::InSlot(slot) => {
                    let from = slot.span(message.len);
                    match frame.then.place() {
                        Some(Place {
                            spans,
                            device: Some(device),
                            ..
                        }) => {
                            let device = device.as_ref();
                            match self.queues.scatter_at(device, spans, message.at, from) {
                                Ok(copy) => State::Scattering(copy, slot),
                                Err(error) => {
                                    frame.failed.get_or_insert(error);
                                    self.slots.give(slot);
                                    State::Landed
                                }
                            }
                        }
                        Some(Place { spans, .. }) => {
                            scatter(&[from], spans, message.at);
                            self.slots.give(slot);
                            State::Landed
                        }
                        None => {
                            self.slots.give(slot);
                            State::Landed
                        }
                    }
                }
                State::Bounced => {
                    let Some(unpack) = &mut self.unpack else {
                        return Ok(());
                    };
                    unpack.ring.find(message.request.number(), message.len)?;
                    let near = unpack.device.as_ref().or(self.standin.as_ref());
                    let place = frame.then.place();
                    match (place.and_then(|place| place.device), near) {
                        _ if place.is_none() => State::Landed,
                        (Some(device), Some(near)) if device.is_same(near.as_ref()) => {
                            let (base, from) = (unpack.ring.base(), unpack.ring.spans());
                            let to = (place.map_or(&[][..], |p| p.spans), message.at);
                            match self.queues.unpack(device.as_ref(), base, from, to) {
                                Ok(copy) => State::Unpacking(copy),
                                Err(error) => {
                                    frame.failed.get_or_insert(error);
                                    State::Landed
                                }
                            }
                        }
                        (None, _) if unpack.device.is_none() => {
                            scatter(
                                unpack.ring.spans(),
                                place.map_or(&[], |p| p.spans),
                                message.at,
                            );
                            State::Landed
                        }
                        (device, _) => {
                            let Some(comm) = &mut self.comm else {
                                return Ok(());
                            };
                            let pinned = device.or(unpack.device.as_ref());
                            let Some(slot) = self.slots.take(comm, pinned)? else {
                                message.state = State::Bounced;
                                return Ok(());
                            };
                            let to = slot.span(message.len);
                            match &unpack.device {
                                None => {
                                    scatter(unpack.ring.spans(), &[to], Cursor::default());
                                    State::InSlot(slot)
                                }
                                Some(gpu) => {
                                    let (gpu, from) = (gpu.as_ref(), unpack.ring.spans());
                                    let start = Cursor::default();
                                    State::Gathering(
                                        self.queues.gather_at(gpu, from, start, to)?,
                                        slot,
                                    )
                                }
                            }
                        }
                    }
                }
            };
            if let State::Landed = message.state {
                frame.outstanding -= 1;
                return Ok(());
            }
        }
    }
}

/// Copies `from`, back to back, to where `at` stands in `to`.
fn scatter(from: &[Span], to: &[Span], mut at: Cursor) {
    for span in from {
        let mut copied = 0;
        while copied < span.len() {
            let Some(room) = at.rest(to).next() else {
                return;
            };
            let Some(left) = span.slice(copied, span.len() - copied) else {
                return;
            };
            let count = room.stream_span(left);
            at.advance(to, count);
            copied += count;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scattering_goes_on_where_the_cursor_stands() {
        let (mut source, mut target) = ((0..60).collect::<Vec<u8>>(), vec![0xff; 100]);
        // SAFETY: both live to the end of the test, which looks at them afterwards only.
        let span = |memory: &mut Vec<u8>| unsafe { Span::new(memory.as_mut_ptr(), memory.len()) };
        let (from, to) = (span(&mut source), span(&mut target));
        let from = [(0, 7), (20, 30)].map(|(at, len)| from.slice(at, len).unwrap());
        let to = [(50, 10), (0, 10), (70, 25)].map(|(at, len)| to.slice(at, len).unwrap());
        let mut at = Cursor::default();
        at.advance(&to, 6);
        scatter(&from, &to, at);
        let mut expected = vec![0xff; 100];
        expected[56..60].copy_from_slice(&[0, 1, 2, 3]);
        expected[..3].copy_from_slice(&[4, 5, 6]);
        expected[3..10].copy_from_slice(&(20..27).collect::<Vec<_>>());
        expected[70..93].copy_from_slice(&(27..50).collect::<Vec<_>>());
        assert_eq!(target, expected);
    }
}
