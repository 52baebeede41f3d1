//! The sending half of a comm pair.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use tcpx_cuda::Device;
use tcpx_ncclnet::{MemoryKind, Request, SendComm};
use tcpx_net::{Cursor, Span};

use super::memory::{Own, Registry, Slot, Slots};
use super::{Broken, Patience, Place};
use crate::error::Error;
use crate::staging::{Copy, Queues};

/// Messages that a device copies ahead of those that are being sent.
const DEPTH: usize = 4;

/// A chunk whose payload goes on the comm.
pub(crate) trait Source {
    /// Where its bytes are.
    fn place(&self) -> Place<'_>;
}

/// The payloads that were announced on the stream and are on their way on the comm, oldest first.
pub(crate) struct Outflow<S> {
    // Before everything that it may use. None once it is closed.
    comm: Option<SendComm>,
    registry: Registry,
    slots: Slots,
    queues: Queues,
    frames: VecDeque<Frame<S>>,
    /// Messages that are being put into slots, or wait to be posted: all of the first frame that is not posted completely.
    prepared: VecDeque<Prepared>,
    /// Frames that have left.
    left: u64,
    /// Frames before this one are announced. ≥ left
    announced: u64,
    posted: VecDeque<Posted>,
    message_bytes: usize,
    next_tag: i32,
    devices: Devices,
    let_go_limit: Duration,
    /// Why the comm was closed.
    broken: Option<Broken>,
    /// Bytes of messages that are done, and that nobody has counted yet.
    sent: u64,
}

/// Which devices the plugin reads from by itself.
#[derive(Clone)]
pub(super) enum Devices {
    None,
    /// The stand-in for a GPU: its plugin works with host memory alone.
    StandIn(Option<Arc<dyn Device>>),
    /// This GPU.
    Only(Arc<dyn Device>),
    All,
}

impl Devices {
    pub(super) fn contains(&self, device: &dyn Device) -> bool {
        let is = |other: &Arc<dyn Device>| other.is_same(device);
        match self {
            Self::None => false,
            Self::StandIn(standin) => standin.as_ref().is_some_and(is),
            Self::Only(gpu) => is(gpu),
            Self::All => true,
        }
    }
}

struct Frame<S> {
    source: S,
    /// Bytes that are not in a message yet, and where they begin.
    unsent: usize,
    at: Cursor,
    /// Messages that are in [`Outflow::prepared`], and those that are posted and not done.
    prepared: usize,
    posted: usize,
    /// A copy of what was unsent when its memory was revoked, and how far it has been sent.
    own: Option<(Own, usize)>,
}

struct Prepared {
    slot: Slot,
    len: usize,
    /// None once it is over.
    copy: Option<Copy>,
}

struct Posted {
    request: Request,
    frame: u64,
    len: usize,
    slot: Option<Slot>,
}

/// What came of an attempt to post a message.
enum Tried {
    Posted(Request, usize),
    /// There is no room now.
    Later,
    /// It has to go through a slot.
    Staged,
}

impl<S: Source> Outflow<S> {
    pub(super) fn new(
        comm: SendComm,
        message_bytes: usize,
        devices: Devices,
        let_go_limit: Duration,
    ) -> Self {
        let slots = Slots::new(message_bytes, comm.slots());
        Self {
            posted: VecDeque::with_capacity(comm.slots()),
            comm: Some(comm),
            registry: Registry::new(message_bytes),
            slots,
            queues: Queues::default(),
            frames: VecDeque::new(),
            prepared: VecDeque::with_capacity(DEPTH),
            left: 0,
            announced: 0,
            message_bytes,
            next_tag: 0,
            devices,
            let_go_limit,
            broken: None,
            sent: 0,
        }
    }

    /// Whether another payload may be announced: all that were are in the plugin's hands.
    pub(crate) fn has_room(&self) -> bool {
        let comm = self.comm.as_ref();
        self.frames.back().is_none_or(Frame::is_posted)
            && comm.is_some_and(|comm| comm.in_flight() < comm.slots())
    }

    /// Whether somebody has to look again soon.
    pub(crate) fn is_busy(&self) -> bool {
        !self.frames.is_empty() || self.broken.is_some()
    }

    /// Whether the plugin has messages in hand, or ought to take some.
    pub(crate) fn is_waiting(&self) -> bool {
        let mut announced = self.frames.iter().take(self.announced_here());
        !self.posted.is_empty() || announced.any(|frame| !frame.is_posted())
    }

    /// Bytes of messages that are done and were not counted before.
    pub(crate) fn take_sent(&mut self) -> u64 {
        std::mem::take(&mut self.sent)
    }

    fn announced_here(&self) -> usize {
        (self.announced - self.left) as usize
    }

    /// Takes a payload whose frame is encoded.
    pub(crate) fn push(&mut self, source: S, bytes: usize) {
        self.frames.push_back(Frame {
            source,
            unsent: bytes,
            at: Cursor::default(),
            prepared: 0,
            posted: 0,
            own: None,
        });
    }

    /// Looks for messages that are done, and posts others: those of payloads whose frames have left, which is true of all that are
    /// here if `announced`. Says whether anything has moved.
    ///
    /// What was announced goes on whatever the stream does: the peer may read no more of that before it has come.
    pub(crate) fn step(&mut self, announced: bool) -> Result<bool, Error> {
        if let Some(broken) = &self.broken {
            return broken.check().map(|()| false);
        }
        self.try_step(announced).or_else(|error| {
            self.close(error);
            Ok(false)
        })
    }

    fn try_step(&mut self, announced: bool) -> Result<bool, Error> {
        if announced {
            self.announced = self.left + self.frames.len() as u64;
        }
        let moved = self.test()?;
        Ok(self.post()? | moved)
    }

    /// A payload that has left.
    pub(crate) fn done(&mut self) -> Option<S> {
        if !self.frames.front()?.is_over() {
            return None;
        }
        self.left += 1;
        let frame = self.frames.pop_front()?;
        if let (Some((own, _)), Some(comm)) = (frame.own, &mut self.comm) {
            own.end(comm);
        }
        Some(frame.source)
    }

    fn test(&mut self) -> Result<bool, Error> {
        let Some(comm) = &mut self.comm else {
            return Ok(false);
        };
        let mut moved = false;
        while let Some(front) = self.posted.front() {
            if comm.test(front.request)?.is_none() {
                break;
            }
            moved = true;
            let Some(posted) = self.posted.pop_front() else {
                break;
            };
            self.sent += posted.len as u64;
            if let Some(slot) = posted.slot {
                self.slots.give(slot);
            }
            let index = (posted.frame - self.left) as usize;
            self.frames[index].posted -= 1;
        }
        Ok(moved)
    }

    fn post(&mut self) -> Result<bool, Error> {
        let mut moved = false;
        for index in 0..self.announced_here() {
            while !self.frames[index].is_posted() {
                if !self.post_message(index)? {
                    return Ok(moved);
                }
                moved = true;
            }
        }
        Ok(moved)
    }

    /// Posts the next message of a frame; false when that is not possible now.
    fn post_message(&mut self, index: usize) -> Result<bool, Error> {
        let has_slot = |comm: &SendComm| comm.in_flight() < comm.slots();
        if !self.comm.as_ref().is_some_and(has_slot) {
            return Ok(false);
        }
        let mut slot = None;
        let mut posted = self.post_direct(index)?;
        if let Tried::Staged = posted {
            (posted, slot) = self.post_staged(index)?;
        }
        let Tried::Posted(request, len) = posted else {
            return Ok(false);
        };
        self.frames[index].posted += 1;
        self.next_tag = (self.next_tag + 1) & i32::MAX;
        self.posted.push_back(Posted {
            request,
            frame: self.left + index as u64,
            len,
            slot,
        });
        Ok(true)
    }

    /// Posts a message out of its memory, or of the copy that was made of that.
    fn post_direct(&mut self, index: usize) -> Result<Tried, Error> {
        let frame = &mut self.frames[index];
        let Some(comm) = self.comm.as_mut().filter(|_| frame.prepared == 0) else {
            return Ok(Tried::Staged);
        };
        let len = frame.unsent.min(self.message_bytes);
        let request = if let Some((own, sent)) = &mut frame.own {
            let request = comm.isend(&own.handle, *sent, len, self.next_tag)?;
            *sent += request.map_or(0, |_| len);
            request
        } else {
            let place = frame.source.place();
            let reaches = |device: &Arc<dyn Device>| self.devices.contains(device.as_ref());
            let whole = frame.at.rest(place.spans).next();
            let found = whole
                .and_then(|span| span.slice(0, len))
                .filter(|_| place.device.is_none_or(reaches))
                .and_then(|span| self.registry.find(comm, &place, span));
            let Some((handle, offset)) = found else {
                return Ok(Tried::Staged);
            };
            let request = comm.isend(handle, offset, len, self.next_tag)?;
            frame.at.advance(place.spans, request.map_or(0, |_| len));
            request
        };
        let Some(request) = request else {
            return Ok(Tried::Later);
        };
        frame.unsent -= len;
        Ok(Tried::Posted(request, len))
    }

    /// Posts a message that was put into a slot.
    fn post_staged(&mut self, index: usize) -> Result<(Tried, Option<Slot>), Error> {
        let frame = &mut self.frames[index];
        let Some(comm) = &mut self.comm else {
            return Ok((Tried::Later, None));
        };
        let (limit, ahead) = (self.message_bytes, &mut self.prepared);
        frame.prepare(comm, &mut self.slots, &mut self.queues, ahead, limit)?;
        let Some(front) = self.prepared.front_mut() else {
            return Ok((Tried::Later, None));
        };
        if let Some(copy) = front.copy {
            if !self.queues.is_done(copy)? {
                return Ok((Tried::Later, None));
            }
            front.copy = None;
        }
        let request = match self.slots.handle(&front.slot) {
            Some((handle, offset)) => comm.isend(handle, offset, front.len, self.next_tag)?,
            None => None,
        };
        match request.and_then(|request| Some((request, self.prepared.pop_front()?))) {
            Some((request, Prepared { slot, len, .. })) => {
                frame.prepared -= 1;
                Ok((Tried::Posted(request, len), Some(slot)))
            }
            None => Ok((Tried::Later, None)),
        }
    }

    /// Stops using the memory of the payloads for which `is_hit` holds, with `regions_too` of all that is revoked: what is not sent yet is copied,
    /// what the plugin has in hand is waited for. If that takes too long the comm is closed, and the error ends the connection.
    pub(crate) fn let_go(
        &mut self,
        mut is_hit: impl FnMut(&S) -> bool,
        regions_too: bool,
    ) -> Result<(), Error> {
        if regions_too {
            // Before the look: what is revoked during the wait may be in use, and is let go by whoever revokes it.
            self.registry.condemn();
        }
        let outcome = self.try_let_go(&mut is_hit);
        if let Err(error) = &outcome {
            self.close(error.clone());
        }
        if let Some(comm) = &mut self.comm {
            self.registry.purge(comm);
        }
        outcome
    }

    fn try_let_go(&mut self, is_hit: &mut impl FnMut(&S) -> bool) -> Result<(), Error> {
        let Some(comm) = &mut self.comm else {
            return Ok(());
        };
        let mut last = None;
        for (index, frame) in self.frames.iter_mut().enumerate() {
            if !is_hit(&frame.source) {
                continue;
            }
            if frame.posted > 0 {
                last = Some(self.left + index as u64);
            }
            for prepared in self.prepared.iter_mut().take(frame.prepared) {
                if let Some(copy) = prepared.copy.take() {
                    self.queues.wait(copy)?;
                }
            }
            frame.keep_copy(comm, &mut self.queues)?;
        }
        let mut patience = Patience::new(self.let_go_limit);
        // Messages in slots and copies are no use of the memory, but they are few, and on their way too.
        while self
            .posted
            .iter()
            .any(|posted| posted.slot.is_none() && Some(posted.frame) <= last)
        {
            let moved = self.test()?;
            if !patience.wait(moved) {
                return Err(patience.error());
            }
        }
        Ok(())
    }

    /// Closes the comm: from then on the plugin uses no memory.
    pub(crate) fn close(&mut self, error: Error) {
        self.comm = None;
        self.broken.get_or_insert_with(|| Broken::new(error));
        for prepared in self.prepared.drain(..) {
            if let Some(copy) = prepared.copy {
                // How it ended makes no difference any more.
                let _ = self.queues.wait(copy);
            }
        }
        self.posted.clear();
        self.frames.clear();
        self.announced = self.left;
    }
}

impl<S> Frame<S> {
    /// Whether all of it was handed to the plugin.
    fn is_posted(&self) -> bool {
        self.unsent == 0 && self.prepared == 0
    }

    fn is_over(&self) -> bool {
        self.is_posted() && self.posted == 0
    }
}

impl<S: Source> Frame<S> {
    /// Puts the next messages into slots, as far as there are any: one by the CPU, some ahead by a device.
    fn prepare(
        &mut self,
        comm: &mut SendComm,
        slots: &mut Slots,
        queues: &mut Queues,
        prepared: &mut VecDeque<Prepared>,
        message_bytes: usize,
    ) -> Result<(), Error> {
        let Place { spans, device, .. } = self.source.place();
        let ahead = if device.is_some() { DEPTH } else { 1 };
        while self.unsent > 0 && self.own.is_none() && self.prepared < ahead {
            let Some(slot) = slots.take(comm, device)? else {
                return Ok(());
            };
            let len = self.unsent.min(message_bytes);
            let copy = match device {
                Some(device) => {
                    Some(queues.gather_at(device.as_ref(), spans, self.at, slot.span(len))?)
                }
                None => {
                    gather(spans, self.at, slot.span(len));
                    None
                }
            };
            self.at.advance(spans, len);
            self.unsent -= len;
            self.prepared += 1;
            prepared.push_back(Prepared { slot, len, copy });
        }
        Ok(())
    }

    /// Makes what is unsent independent of its memory.
    fn keep_copy(&mut self, comm: &mut SendComm, queues: &mut Queues) -> Result<(), Error> {
        if self.unsent == 0 || self.own.is_some() {
            return Ok(());
        }
        let Place { spans, device, .. } = self.source.place();
        let own = Own::new(comm, device, self.unsent, MemoryKind::Host)?;
        // SAFETY: memory of its own, at least so long.
        let to = unsafe { Span::new(own.address(), self.unsent) };
        match device {
            Some(device) => {
                let copy = queues.gather_at(device.as_ref(), spans, self.at, to)?;
                queues.wait(copy)?;
            }
            None => gather(spans, self.at, to),
        }
        self.own = Some((own, 0));
        Ok(())
    }
}

/// Copies from where `at` stands in `spans`, as much as `to` holds.
fn gather(spans: &[Span], at: Cursor, to: Span) {
    let mut filled = 0;
    for span in at.rest(spans) {
        let Some(room) = to.slice(filled, span.len().min(to.len() - filled)) else {
            return;
        };
        if room.is_empty() {
            return;
        }
        filled += room.copy_span(span);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tcpx_cuda::StandIn;

    #[test]
    fn gathering_stops_when_the_slot_is_full() {
        let (mut source, mut slot) = ((0..100).collect::<Vec<u8>>(), vec![0xff; 30]);
        // SAFETY: both live to the end of the test, which looks at them afterwards only.
        let span = |memory: &mut Vec<u8>| unsafe { Span::new(memory.as_mut_ptr(), memory.len()) };
        let (from, to) = (span(&mut source), span(&mut slot));
        let from = [(90, 10), (0, 50)].map(|(at, len)| from.slice(at, len).unwrap());
        let mut at = Cursor::default();
        at.advance(&from, 4);
        gather(&from, at, to);
        assert_eq!(slot, (94..100).chain(0..24).collect::<Vec<_>>());
        // Less than the slot holds: the rest is left alone.
        at.advance(&from, 46);
        gather(&from, at, to);
        assert_eq!(slot, (40..50).chain(4..24).collect::<Vec<_>>());
    }

    #[test]
    fn a_plugin_is_given_the_devices_that_it_reaches() {
        let one: Arc<dyn Device> = Arc::new(StandIn::new(1));
        let other: Arc<dyn Device> = Arc::new(StandIn::new(2));
        let takes = |devices: Devices| {
            (
                devices.contains(one.as_ref()),
                devices.contains(other.as_ref()),
            )
        };
        assert_eq!(takes(Devices::None), (false, false));
        assert_eq!(takes(Devices::StandIn(None)), (false, false));
        assert_eq!(
            takes(Devices::StandIn(Some(Arc::clone(&one)))),
            (true, false)
        );
        assert_eq!(takes(Devices::Only(Arc::clone(&other))), (false, true));
        assert_eq!(takes(Devices::All), (true, true));
    }
}
