//! The sending half of a comm pair.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use tcpx_cuda::{Device, Wish};
use tcpx_ncclnet::{MemoryKind, Request, SendComm};
use tcpx_net::{Cursor, Span};

use tcpx_net::{Store, copy_spans};
use tcpx_proto::frame::FLAG_COMM;

use super::memory::{Own, Registrations, Slot, Slots};
use super::{Broken, Patience, is_inline};
use crate::carrier::{Begin, LetGo, Outgoing, SendCarrier};
use crate::error::Error;
use crate::memory::{Copier, PendingCopy, Place};
use crate::transfer::Run;

/// Messages that a device copies ahead of the messages being sent.
const DEPTH: usize = 4;

/// Sends the payloads that were announced on the stream as messages on the comm, oldest first.
pub(crate) struct CommSend {
    // Dropped before everything that it may use. `None` once it is closed.
    comm: Option<SendComm>,
    registrations: Registrations,
    slots: Slots,
    copier: Copier,
    frames: VecDeque<Frame>,
    /// True if the frame of the last payload has not begun.
    is_fresh: bool,
    /// Messages that are being copied into slots, or wait to be posted; all belong to the first
    /// frame that is not completely posted.
    prepared: VecDeque<Prepared>,
    /// Number of frames that are complete and removed.
    left: u64,
    /// All frames before this number are announced. At least `left`.
    announced: u64,
    posted: VecDeque<Posted>,
    message_bytes: usize,
    next_tag: i32,
    devices: Devices,
    let_go_limit: Duration,
    /// Why the comm was closed.
    broken: Option<Broken>,
    /// Bytes sent since the last call of `take_moved`.
    sent: u64,
}

/// Devices from which the plugin reads directly.
#[derive(Clone)]
pub(super) enum Devices {
    None,
    /// The stand-in for a GPU: its plugin works only with host memory.
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

struct Frame {
    payload: Outgoing,
    /// Bytes that are not in a message yet, and their start.
    unsent: usize,
    at: Cursor,
    /// Messages in [`CommSend::prepared`], and messages that are posted and not done.
    prepared: usize,
    posted: usize,
    /// Copy of the unsent bytes, made when their memory was revoked,
    /// and the number of bytes sent from it.
    own: Option<(Own, usize)>,
}

struct Prepared {
    slot: Slot,
    len: usize,
    /// `None` once the copy is over.
    copy: Option<PendingCopy>,
}

struct Posted {
    request: Request,
    frame: u64,
    len: usize,
    slot: Option<Slot>,
}

/// Result of an attempt to post a message.
enum Tried {
    Posted(Request, usize),
    /// There is currently no room.
    Later,
    /// The message has to pass through a slot.
    Staged,
}

impl CommSend {
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
            registrations: Registrations::new(message_bytes),
            slots,
            copier: Copier::default(),
            frames: VecDeque::new(),
            is_fresh: false,
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

    fn announced_here(&self) -> usize {
        (self.announced - self.left) as usize
    }

    fn try_step(&mut self, announced: bool) -> Result<bool, Error> {
        if announced {
            self.announced = self.left + self.frames.len() as u64;
        }
        let moved = self.test()?;
        Ok(self.post()? | moved)
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

    /// Posts the next message of a frame; returns false if that is currently impossible.
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

    /// Posts a message from its memory, or from the copy of revoked memory.
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
            let place = frame.payload.place();
            let reaches = |device: &Arc<dyn Device>| self.devices.contains(device.as_ref());
            let whole = frame.at.rest(place.spans).next();
            let found = whole
                .and_then(|span| span.slice(0, len))
                .filter(|_| place.device.is_none_or(reaches))
                .and_then(|span| self.registrations.find(comm, &place, span));
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

    /// Posts a message from a slot.
    fn post_staged(&mut self, index: usize) -> Result<(Tried, Option<Slot>), Error> {
        let frame = &mut self.frames[index];
        let Some(comm) = &mut self.comm else {
            return Ok((Tried::Later, None));
        };
        let (limit, ahead) = (self.message_bytes, &mut self.prepared);
        frame.prepare(comm, &mut self.slots, &mut self.copier, ahead, limit)?;
        let Some(front) = self.prepared.front_mut() else {
            return Ok((Tried::Later, None));
        };
        if let Some(copy) = front.copy {
            if !self.copier.is_done(copy, Wish::Soon)? {
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

    fn try_let_go(&mut self, which: LetGo<'_>) -> Result<(), Error> {
        let Some(comm) = &mut self.comm else {
            return Ok(());
        };
        let mut last = None;
        for (index, frame) in self.frames.iter_mut().enumerate() {
            if !which.hits(&frame.payload) {
                continue;
            }
            if frame.posted > 0 {
                last = Some(self.left + index as u64);
            }
            for prepared in self.prepared.iter_mut().take(frame.prepared) {
                if let Some(copy) = prepared.copy.take() {
                    self.copier.wait(copy)?;
                }
            }
            if frame.own.is_none() && !which.may_copy(&frame.payload, frame.unsent) {
                // Closes the comm and ends the connection.
                return Err(Error::Aborted);
            }
            frame.keep_copy(comm, &mut self.copier)?;
        }
        let mut patience = Patience::new(self.let_go_limit);
        // Messages in slots or copies do not use the memory, but they are few and also in flight.
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
    fn shut(&mut self, error: Error) {
        self.comm = None;
        self.broken.get_or_insert_with(|| Broken::new(error));
        for prepared in self.prepared.drain(..) {
            if let Some(copy) = prepared.copy {
                // The outcome no longer matters.
                let _ = self.copier.wait(copy);
            }
        }
        self.posted.clear();
        self.frames.clear();
        self.announced = self.left;
    }
}

impl SendCarrier for CommSend {
    fn takes(&self, _place: &Place<'_>, bytes: usize) -> bool {
        !is_inline(bytes)
    }

    fn flag(&self) -> u8 {
        FLAG_COMM
    }

    /// Returns true if all announced payloads are posted and a request is free.
    fn has_room(&mut self, _bytes: usize, _run: Option<&Arc<Run>>) -> bool {
        let comm = self.comm.as_ref();
        self.frames.back().is_none_or(Frame::is_posted)
            && comm.is_some_and(|comm| comm.in_flight() < comm.slots())
    }

    fn push(&mut self, payload: Outgoing) {
        self.is_fresh = true;
        self.frames.push_back(Frame {
            unsent: payload.bytes(),
            payload,
            at: Cursor::default(),
            prepared: 0,
            posted: 0,
            own: None,
        });
    }

    /// The frame is the announcement, so it begins at once.
    fn poll_begin(&mut self) -> Begin<'_> {
        match self.frames.back() {
            Some(frame) if std::mem::take(&mut self.is_fresh) => Begin::Frame(&frame.payload),
            _ => Begin::Nothing,
        }
    }

    /// Tests for completed messages, and posts messages of payloads whose frames have left.
    ///
    /// Announced payload continues independent of the stream: the peer may not read any further
    /// frames before the payload has arrived.
    fn step(&mut self, announced: bool) -> Result<bool, Error> {
        if !self.is_busy() {
            return Ok(false);
        }
        if let Some(broken) = &self.broken {
            return broken.check().map(|()| false);
        }
        self.try_step(announced).or_else(|error| {
            self.shut(error);
            Ok(false)
        })
    }

    fn poll_over(&mut self) -> Option<Outgoing> {
        if !self.frames.front()?.is_over() {
            return None;
        }
        self.left += 1;
        let frame = self.frames.pop_front()?;
        if let (Some((own, _)), Some(comm)) = (frame.own, &mut self.comm) {
            own.end(comm);
        }
        Some(frame.payload)
    }

    fn is_busy(&self) -> bool {
        !self.frames.is_empty() || self.broken.is_some()
    }

    /// Returns whether messages are outstanding, or announced payload waits to be posted.
    fn is_waiting(&self) -> bool {
        let mut announced = self.frames.iter().take(self.announced_here());
        !self.posted.is_empty() || announced.any(|frame| !frame.is_posted())
    }

    fn comm_error(&self) -> Option<&Error> {
        self.broken.as_ref().and_then(Broken::of_plugin)
    }

    fn take_moved(&mut self) -> u64 {
        std::mem::take(&mut self.sent)
    }

    /// Copies the unsent bytes and waits for outstanding messages. On a timeout the comm is closed,
    /// and the error ends the connection.
    fn let_go(&mut self, which: LetGo<'_>, _rest: &mut Vec<u8>) -> Result<(), Error> {
        if let LetGo::Revoked(_) = which {
            // Marked before the wait: memory that is revoked during the wait may be in use, and is
            // released by another call.
            self.registrations.condemn();
        }
        let outcome = self.try_let_go(which);
        if let Err(error) = &outcome {
            self.shut(error.clone());
        }
        if let Some(comm) = &mut self.comm {
            self.registrations.purge(comm);
        }
        outcome
    }

    fn close(&mut self) {
        self.shut(Error::Closed);
    }
}

impl Frame {
    /// Returns whether all bytes were handed to the plugin.
    fn is_posted(&self) -> bool {
        self.unsent == 0 && self.prepared == 0
    }

    fn is_over(&self) -> bool {
        self.is_posted() && self.posted == 0
    }
}

impl Frame {
    /// Copies the next messages into available slots: one by the CPU, or several ahead by a device.
    fn prepare(
        &mut self,
        comm: &mut SendComm,
        slots: &mut Slots,
        copier: &mut Copier,
        prepared: &mut VecDeque<Prepared>,
        message_bytes: usize,
    ) -> Result<(), Error> {
        let Place { spans, device, .. } = self.payload.place();
        let ahead = if device.is_some() { DEPTH } else { 1 };
        while self.unsent > 0 && self.own.is_none() && self.prepared < ahead {
            let Some(slot) = slots.take(comm, device)? else {
                return Ok(());
            };
            let len = self.unsent.min(message_bytes);
            let copy = match device {
                Some(device) => {
                    Some(copier.gather(device.as_ref(), spans, self.at, slot.span(len))?)
                }
                None => {
                    copy_spans(
                        (spans, self.at),
                        (&[slot.span(len)], Cursor::default()),
                        Store::Cached,
                    )?;
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

    /// Copies the unsent bytes, so that the frame no longer needs its memory.
    fn keep_copy(&mut self, comm: &mut SendComm, copier: &mut Copier) -> Result<(), Error> {
        if self.unsent == 0 || self.own.is_some() {
            return Ok(());
        }
        let Place { spans, device, .. } = self.payload.place();
        let own = Own::new(comm, device, self.unsent, MemoryKind::Host)?;
        // SAFETY: `own` is a separate allocation of at least this length.
        let to = unsafe { Span::new(own.address(), self.unsent) };
        match device {
            Some(device) => {
                let copy = copier.gather(device.as_ref(), spans, self.at, to)?;
                copier.wait(copy)?;
            }
            None => {
                copy_spans((spans, self.at), (&[to], Cursor::default()), Store::Cached)?;
            }
        }
        self.own = Some((own, 0));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tcpx_cuda::StandIn;

    #[test]
    fn devices_contain_only_devices_of_the_plugin() {
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
