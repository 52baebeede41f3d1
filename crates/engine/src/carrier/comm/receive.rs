//! The receiving half of a comm pair. [`landing`] copies received messages to their destination.

mod landing;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use tcpx_cuda::Device;
use tcpx_ncclnet::{Flush, RecvComm, Request};
use tcpx_net::Cursor;

use tcpx_proto::frame::FLAG_COMM;
use tcpx_proto::lane::Ticket;

use super::memory::{Registrations, Slot, Slots};
use super::send::Devices;
use super::unpack::Unpack;
use super::{Broken, Patience};
use crate::carrier::{Over, ReceiveCarrier, Room};
use crate::error::{Error, PluginFault};
use crate::memory::{Copier, PendingCopy, Place};

/// A payload that arrives on the comm.
pub(crate) trait Target: Send {
    /// Returns the length of the payload.
    fn bytes(&self) -> usize;

    /// Returns the destination of the bytes; `None` if they are dropped. Called right before the
    /// memory is touched, so that memory revoked in the meantime is not touched.
    fn place(&mut self) -> Option<Place<'_>>;

    /// Returns whether the destination's memory must be released.
    fn is_dead(&self) -> bool;
}

/// Receives the payloads that were announced on the stream, as messages on the comm, in order.
pub(crate) struct CommReceive<T> {
    // Dropped before everything that it may use. `None` once it is closed.
    comm: Option<RecvComm>,
    unpack: Option<Unpack>,
    /// True if the plugin writes directly to device memory, which must then be flushed.
    flushes: bool,
    registrations: Registrations,
    slots: Slots,
    copier: Copier,
    frames: VecDeque<Frame<T>>,
    /// Number of frames that are complete and removed.
    over: u64,
    /// All frames before this number are posted completely.
    unposted: u64,
    /// Messages that are posted and not consumed.
    posted: VecDeque<Message>,
    /// Number of messages that the plugin has reported as done, at most `posted.len()`.
    done: usize,
    message_bytes: usize,
    next_tag: i32,
    /// Stand-in for the device of host memory.
    standin: Option<Arc<dyn Device>>,
    let_go_limit: Duration,
    broken: Option<Broken>,
    /// Bytes received since the last call of `take_moved`.
    received: u64,
}

struct Frame<T> {
    ticket: Ticket,
    then: T,
    /// Bytes without a posted receive, and their destination.
    unposted: usize,
    at: Cursor,
    /// Messages that are posted and have not landed.
    outstanding: usize,
    /// Why the bytes did not reach their device.
    failed: Option<Error>,
}

struct Message {
    request: Request,
    frame: u64,
    len: usize,
    /// Position in the frame's destination.
    at: Cursor,
    state: MessageState,
}

/// ```text
///   Direct ─────────────────────────────────────────────► Landed     written by the plugin
///   Unflushed ──────────── Flushing ────────────────────► Landed     the same, to a device's memory
///   InSlot ─────────────── (CPU) ───────────────────────► Landed
///          ─────────────── Scattering ──────────────────► Landed     to a device
///   Bounced ── (CPU) or Unpacking ──────────────────────► Landed     from bounce pages to where they belong
///           ── Gathering ── InSlot …                                 from a GPU's pages to other memory
/// ```
enum MessageState {
    Direct,
    Unflushed,
    Flushing(Flush),
    InSlot(Slot),
    Bounced,
    /// Copy to a slot, by the device that holds the bounce pages.
    Gathering(PendingCopy, Slot),
    Scattering(PendingCopy, Slot),
    Unpacking(PendingCopy),
    Landed,
}

impl<T: Target> CommReceive<T> {
    pub(super) fn new(
        mut comm: RecvComm,
        message_bytes: usize,
        standin: Option<Arc<dyn Device>>,
        let_go_limit: Duration,
    ) -> Result<Self, Error> {
        let unpack = Unpack::new(&mut comm, message_bytes)?;
        let slots = Slots::new(message_bytes, comm.slots());
        Ok(Self {
            posted: VecDeque::with_capacity(comm.slots()),
            flushes: unpack.is_none() && comm.can_flush() && comm.slots() > 1,
            comm: Some(comm),
            unpack,
            registrations: Registrations::new(message_bytes),
            slots,
            copier: Copier::default(),
            frames: VecDeque::new(),
            over: 0,
            unposted: 0,
            done: 0,
            message_bytes,
            next_tag: 0,
            standin,
            let_go_limit,
            broken: None,
            received: 0,
        })
    }

    /// Returns the devices from which the plugin of this comm reads directly.
    pub(super) fn devices(&self) -> Devices {
        let cuda = self
            .comm
            .as_ref()
            .is_some_and(|comm| comm.properties().cuda_memory);
        match &self.unpack {
            _ if !cuda => Devices::None,
            Some(unpack) => match &unpack.device {
                Some(gpu) => Devices::Only(Arc::clone(gpu)),
                None => Devices::StandIn(self.standin.clone()),
            },
            None => Devices::All,
        }
    }

    fn try_step(&mut self) -> Result<bool, Error> {
        let mut moved = self.post()?;
        moved |= self.test()?;
        moved |= self.land()?;
        Ok(moved)
    }

    fn post(&mut self) -> Result<bool, Error> {
        let mut moved = false;
        while let Some(frame) = self.frames.get_mut((self.unposted - self.over) as usize) {
            if frame.unposted == 0 {
                self.unposted += 1;
                continue;
            }
            let Some(comm) = &mut self.comm else {
                return Ok(moved);
            };
            // A completed receive may keep its request until it is flushed,
            // so reserve one request for the flush.
            if comm.in_flight() + usize::from(self.flushes) >= comm.slots() {
                return Ok(moved);
            }
            let (tag, at) = (self.next_tag, frame.at);
            let len = frame.unposted.min(self.message_bytes);
            let place = frame.then.place();
            let device = place.as_ref().and_then(|place| place.device.cloned());
            let direct = place.and_then(|place| {
                let reaches = match place.device {
                    Some(_) => self.flushes,
                    None => self.unpack.is_none(),
                };
                let span = at.rest(place.spans).next().filter(|_| reaches)?;
                self.registrations.find(comm, &place, span.slice(0, len)?)
            });
            let (request, state) = if let Some(unpack) = &self.unpack {
                (
                    comm.irecv(unpack.landing(), 0, len, tag)?,
                    MessageState::Bounced,
                )
            } else if let Some((handle, offset)) = direct {
                let state = match device {
                    Some(_) => MessageState::Unflushed,
                    None => MessageState::Direct,
                };
                (comm.irecv(handle, offset, len, tag)?, state)
            } else {
                let Some(slot) = self.slots.take(comm, device.as_ref())? else {
                    return Ok(moved);
                };
                let request = match self.slots.handle(&slot) {
                    Some((handle, offset)) => comm.irecv(handle, offset, len, tag)?,
                    None => None,
                };
                if request.is_none() {
                    self.slots.give(slot);
                    return Ok(moved);
                }
                (request, MessageState::InSlot(slot))
            };
            let Some(request) = request else {
                return Ok(moved);
            };
            moved = true;
            self.next_tag = (self.next_tag + 1) & i32::MAX;
            if let Some(place) = frame.then.place() {
                frame.at.advance(place.spans, len);
            }
            frame.unposted -= len;
            frame.outstanding += 1;
            self.posted.push_back(Message {
                request,
                frame: self.unposted,
                len,
                at,
                state,
            });
        }
        Ok(moved)
    }

    fn test(&mut self) -> Result<bool, Error> {
        let mut moved = false;
        while let (Some(comm), Some(message)) = (&mut self.comm, self.posted.get(self.done)) {
            let Some(completion) = comm.test(message.request)? else {
                break;
            };
            // Not every plugin reports the length; a reported length must be correct.
            if let Some(found) = completion.reported_bytes.filter(|n| *n != message.len) {
                let expected = message.len;
                let fault = PluginFault::WrongLength { found, expected };
                return Err(Error::PluginBroke(fault));
            }
            moved = true;
            self.done += 1;
            self.received += message.len as u64;
            self.advance(self.done - 1)?;
            // Consumed at once: bounce pages that are reused soon are still in the cache.
            self.consume()?;
        }
        Ok(moved)
    }

    fn try_let_go(&mut self) -> Result<(), Error> {
        let mut patience = Patience::new(self.let_go_limit);
        loop {
            let over = self.over;
            let frames = &self.frames;
            let is_used = |message: &Message| {
                let touches = matches!(
                    message.state,
                    MessageState::Direct
                        | MessageState::Unflushed
                        | MessageState::Flushing(_)
                        | MessageState::Scattering(..)
                        | MessageState::Unpacking(_)
                );
                touches
                    && frames
                        .get((message.frame - over) as usize)
                        .is_some_and(|frame| frame.then.is_dead())
            };
            if !self.posted.iter().any(is_used) {
                return Ok(());
            }
            let moved = self.test()? | self.land()?;
            if !patience.wait(moved) {
                return Err(patience.error());
            }
        }
    }

    /// Closes the comm, after which the plugin uses no memory, and waits for copies in flight.
    fn shut(&mut self, error: Error) {
        for message in &self.posted {
            if let MessageState::Gathering(copy, _)
            | MessageState::Scattering(copy, _)
            | MessageState::Unpacking(copy) = &message.state
            {
                // The outcome no longer matters.
                let _ = self.copier.wait(*copy);
            }
        }
        self.comm = None;
        self.broken.get_or_insert_with(|| Broken::new(error));
        self.posted.clear();
        self.done = 0;
    }
}

impl<T: Target> ReceiveCarrier<T> for CommReceive<T> {
    fn takes(&self, flag: u8, _place: Option<&Place<'_>>) -> bool {
        flag & FLAG_COMM != 0
    }

    fn is_beside(&self) -> bool {
        true
    }

    /// Returns `None`: no payload bytes travel behind the frame.
    fn room<'a>(&'a mut self, _: &Place<'a>, _: usize) -> Result<Option<Room<'a>>, Error> {
        Ok(None)
    }

    fn filled(&mut self, _: &Place<'_>, _: usize, _: bool) -> Result<(), Error> {
        Ok(())
    }

    fn push(&mut self, ticket: Ticket, payload: T) -> Option<Over<T>> {
        self.frames.push_back(Frame {
            ticket,
            unposted: payload.bytes(),
            then: payload,
            at: Cursor::default(),
            outstanding: 0,
            failed: None,
        });
        None
    }

    /// Posts receives, tests for completion, and copies received bytes to their destination.
    fn step(&mut self) -> Result<bool, Error> {
        if !self.is_busy() {
            return Ok(false);
        }
        if let Some(broken) = &self.broken {
            return broken.check().map(|()| false);
        }
        self.try_step().or_else(|error| {
            self.shut(error);
            Ok(false)
        })
    }

    fn poll_over(&mut self) -> Option<Over<T>> {
        let front = self.frames.front()?;
        if front.unposted > 0 || front.outstanding > 0 {
            return None;
        }
        let frame = self.frames.pop_front()?;
        self.over += 1;
        self.unposted = self.unposted.max(self.over);
        Some(Over {
            ticket: frame.ticket,
            payload: frame.then,
            error: frame.failed,
        })
    }

    fn is_busy(&self) -> bool {
        !self.frames.is_empty() || !self.posted.is_empty() || self.broken.is_some()
    }

    /// Returns whether receives or flushes are outstanding, or payload waits to be posted.
    fn is_waiting(&self) -> bool {
        let is_flushing = |message: &Message| matches!(message.state, MessageState::Flushing(_));
        self.done < self.posted.len()
            || self.posted.iter().any(is_flushing)
            || self.frames.iter().any(|frame| frame.unposted > 0)
    }

    fn comm_error(&self) -> Option<&Error> {
        self.broken.as_ref().and_then(Broken::of_plugin)
    }

    fn take_moved(&mut self) -> u64 {
        std::mem::take(&mut self.received)
    }

    /// Waits for receives into memory that must be released. On a timeout the comm is closed, and
    /// the error ends the connection.
    fn let_go(&mut self) -> Result<(), Error> {
        // Marked before the wait: memory that is revoked during the wait may be in use, and is
        // released by another call.
        self.registrations.condemn();
        let outcome = self.try_let_go();
        if let Err(error) = &outcome {
            self.shut(error.clone());
        }
        if let Some(comm) = &mut self.comm {
            self.registrations.purge(comm);
        }
        outcome
    }

    fn close(&mut self) -> Vec<T> {
        self.shut(Error::Closed);
        let frames = std::mem::take(&mut self.frames);
        frames.into_iter().map(|frame| frame.then).collect()
    }
}
