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
    /// Frames that have left.
    left: u64,
    posted: VecDeque<Posted>,
    message_bytes: usize,
    next_tag: i32,
    devices: Devices,
    let_go_limit: Duration,
    /// Why the comm was closed.
    broken: Option<Broken>,
    /// Bytes of messages that are done.
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
    /// Any GPU, but no stand-in.
    AllBut(Option<Arc<dyn Device>>),
}

impl Devices {
    pub(super) fn contains(&self, device: &dyn Device) -> bool {
        let is = |other: &Arc<dyn Device>| other.is_same(device);
        match self {
            Self::None => false,
            Self::StandIn(standin) => standin.as_ref().is_some_and(is),
            Self::Only(gpu) => is(gpu),
            Self::AllBut(standin) => !standin.as_ref().is_some_and(is),
        }
    }
}

struct Frame<S> {
    source: S,
    /// Bytes that are not in a message yet, and where they begin.
    unsent: usize,
    at: Cursor,
    /// Messages that are being put into slots, or wait to be posted.
    prepared: VecDeque<Prepared>,
    /// Messages that are posted and not done.
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
            left: 0,
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

    /// Whether the plugin has messages in hand.
    pub(crate) fn is_waiting(&self) -> bool {
        !self.posted.is_empty()
    }

    /// Bytes of messages that are done, ever.
    pub(crate) fn sent(&self) -> u64 {
        self.sent
    }

    /// Takes a payload whose frame is encoded.
    pub(crate) fn push(&mut self, source: S, bytes: usize) {
        self.frames.push_back(Frame {
            source,
            unsent: bytes,
            at: Cursor::default(),
            prepared: VecDeque::new(),
            posted: 0,
            own: None,
        });
    }

    /// Looks for messages that are done, and posts others if `announced`: the frames of all payloads have left.
    /// Says whether anything has moved.
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
        let moved = self.test()?;
        Ok((announced && self.post()?) | moved)
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
        for index in 0..self.frames.len() {
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
        let frame = &mut self.frames[index];
        let Some(comm) = &mut self.comm else {
            return Ok(false);
        };
        if comm.in_flight() == comm.slots() {
            return Ok(false);
        }
        let tag = self.next_tag;
        let len = frame.unsent.min(self.message_bytes);
        let (request, len, slot) =
            if let Some((own, sent)) = frame.own.as_mut().filter(|_| frame.prepared.is_empty()) {
                let Some(request) = comm.isend(&own.handle, *sent, len, tag)? else {
                    return Ok(false);
                };
                *sent += len;
                frame.unsent -= len;
                (request, len, None)
            } else {
                let place = frame.source.place();
                let whole = frame.at.rest(place.spans).next();
                let direct = whole
                    .and_then(|span| span.slice(0, len))
                    .filter(|_| frame.prepared.is_empty())
                    .filter(|_| {
                        place
                            .device
                            .is_none_or(|d| self.devices.contains(d.as_ref()))
                    })
                    .and_then(|span| self.registry.find(comm, &place, span));
                if let Some((handle, offset)) = direct {
                    let Some(request) = comm.isend(handle, offset, len, tag)? else {
                        return Ok(false);
                    };
                    frame.at.advance(place.spans, len);
                    frame.unsent -= len;
                    (request, len, None)
                } else {
                    frame.prepare(comm, &mut self.slots, &mut self.queues, self.message_bytes)?;
                    let Some(front) = frame.prepared.front_mut() else {
                        return Ok(false);
                    };
                    if let Some(copy) = front.copy {
                        if !self.queues.is_done(copy)? {
                            return Ok(false);
                        }
                        front.copy = None;
                    }
                    let Some((handle, offset)) = self.slots.handle(&front.slot) else {
                        return Ok(false);
                    };
                    let Some(request) = comm.isend(handle, offset, front.len, tag)? else {
                        return Ok(false);
                    };
                    let Some(Prepared { slot, len, .. }) = frame.prepared.pop_front() else {
                        return Ok(false);
                    };
                    (request, len, Some(slot))
                }
            };
        frame.posted += 1;
        self.next_tag = (self.next_tag + 1) & i32::MAX;
        self.posted.push_back(Posted {
            request,
            frame: self.left + index as u64,
            len,
            slot,
        });
        Ok(true)
    }

    /// Stops using the memory of the payloads for which `is_hit` holds, and of revoked regions: what is not sent yet is copied,
    /// what the plugin has in hand is waited for. If that takes too long the comm is closed, and the connection with it.
    pub(crate) fn let_go(&mut self, mut is_hit: impl FnMut(&S) -> bool) {
        if let Err(error) = self.try_let_go(&mut is_hit) {
            self.close(error);
        }
        if let Some(comm) = &mut self.comm {
            self.registry.purge(comm);
        }
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
            for prepared in &mut frame.prepared {
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
                return Err(Error::PluginBroke {
                    what: "a message was not sent while its memory was to be let go".into(),
                });
            }
        }
        Ok(())
    }

    /// Closes the comm: from then on the plugin uses no memory.
    pub(crate) fn close(&mut self, error: Error) {
        self.comm = None;
        self.broken.get_or_insert_with(|| Broken::new(error));
        for frame in &mut self.frames {
            for prepared in &mut frame.prepared {
                if let Some(copy) = prepared.copy.take() {
                    // How it ended makes no difference any more.
                    let _ = self.queues.wait(copy);
                }
            }
        }
        self.posted.clear();
        self.frames.clear();
    }
}

impl<S> Frame<S> {
    /// Whether all of it was handed to the plugin.
    fn is_posted(&self) -> bool {
        self.unsent == 0 && self.prepared.is_empty()
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
        message_bytes: usize,
    ) -> Result<(), Error> {
        let Place { spans, device, .. } = self.source.place();
        let ahead = if device.is_some() { DEPTH } else { 1 };
        while self.unsent > 0 && self.own.is_none() && self.prepared.len() < ahead {
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
            self.prepared.push_back(Prepared { slot, len, copy });
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
