//! The receiving half of a comm pair. [`landing`] brings what was received to where it belongs.

mod landing;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use tcpx_cuda::Device;
use tcpx_ncclnet::{Flush, RecvComm, Request};
use tcpx_net::Cursor;

use super::memory::{Registry, Slot, Slots};
use super::outflow::Devices;
use super::unpack::Unpack;
use super::{Broken, Patience, Place};
use crate::error::Error;
use crate::staging::{Copy, Queues};

/// A payload that comes on the comm, and what remains to be done once it is there.
pub(crate) trait Target {
    /// Where its bytes go; none if they are dropped. Asked right before they are touched, so that memory that was revoked
    /// since is not.
    fn place(&mut self) -> Option<Place<'_>>;

    /// Whether the memory at its place must be let go.
    fn is_dead(&self) -> bool;
}

/// The payloads that were announced on the stream and come on the comm, in order, and what has to wait for them.
pub(crate) struct Inflow<T> {
    // Before everything that it may use. None once it is closed.
    comm: Option<RecvComm>,
    unpack: Option<Unpack>,
    /// The plugin writes to devices' memory by itself, and is told to flush it.
    flushes: bool,
    registry: Registry,
    slots: Slots,
    queues: Queues,
    frames: VecDeque<Frame<T>>,
    /// Frames that were dealt with.
    over: u64,
    /// Frames before this one are posted completely.
    unposted: u64,
    /// Messages that are posted and not consumed.
    posted: VecDeque<Message>,
    /// How many of those the plugin has reported as done. ≤ posted.len()
    done: usize,
    message_bytes: usize,
    next_tag: i32,
    /// Stands for the device of host memory.
    standin: Option<Arc<dyn Device>>,
    let_go_limit: Duration,
    broken: Option<Broken>,
    /// Bytes of messages that were received, and that nobody has counted yet.
    received: u64,
}

struct Frame<T> {
    then: T,
    /// Bytes for which no receive is posted, and where they go.
    unposted: usize,
    at: Cursor,
    /// Messages that are posted and have not landed.
    outstanding: usize,
    /// Why its bytes have not reached their device.
    failed: Option<Error>,
}

struct Message {
    request: Request,
    frame: u64,
    len: usize,
    /// Where in the frame's place.
    at: Cursor,
    state: State,
}

/// ```text
///   Direct ─────────────────────────────────────────────► Landed     written by the plugin
///   Unflushed ──────────── Flushing ────────────────────► Landed     the same, to a device's memory
///   InSlot ─────────────── (CPU) ───────────────────────► Landed
///          ─────────────── Scattering ──────────────────► Landed     to a device
///   Bounced ── (CPU) or Unpacking ──────────────────────► Landed     from bounce pages to where they belong
///           ── Gathering ── InSlot …                                 from a GPU's pages to other memory
/// ```
enum State {
    Direct,
    Unflushed,
    Flushing(Flush),
    InSlot(Slot),
    Bounced,
    /// To a slot, by the device that the bounce pages are on.
    Gathering(Copy, Slot),
    Scattering(Copy, Slot),
    Unpacking(Copy),
    Landed,
}

impl<T: Target> Inflow<T> {
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
            registry: Registry::new(message_bytes),
            slots,
            queues: Queues::default(),
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

    /// Which devices the plugin of this comm reads from by itself.
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

    pub(crate) fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// How many payloads and followers wait.
    pub(crate) fn len(&self) -> usize {
        self.frames.len()
    }

    /// Whether somebody has to look again soon.
    pub(crate) fn is_busy(&self) -> bool {
        !self.frames.is_empty() || !self.posted.is_empty() || self.broken.is_some()
    }

    /// Whether the plugin has receives or flushes in hand, or ought to take some.
    pub(crate) fn is_waiting(&self) -> bool {
        let is_flushing = |message: &Message| matches!(message.state, State::Flushing(_));
        self.done < self.posted.len()
            || self.posted.iter().any(is_flushing)
            || self.frames.iter().any(|frame| frame.unposted > 0)
    }

    /// Bytes of messages that were received and not counted before.
    pub(crate) fn take_received(&mut self) -> u64 {
        std::mem::take(&mut self.received)
    }

    /// A payload of `bytes` bytes was announced; none for what only has to wait its turn.
    pub(crate) fn push(&mut self, then: T, bytes: usize) {
        self.frames.push_back(Frame {
            then,
            unposted: bytes,
            at: Cursor::default(),
            outstanding: 0,
            failed: None,
        });
    }

    /// Posts receives, looks which are done, and brings their bytes where they belong. Says whether anything has moved.
    pub(crate) fn step(&mut self) -> Result<bool, Error> {
        if let Some(broken) = &self.broken {
            return broken.check().map(|()| false);
        }
        self.try_step().or_else(|error| {
            self.shut(error);
            Ok(false)
        })
    }

    fn try_step(&mut self) -> Result<bool, Error> {
        let mut moved = self.post()?;
        moved |= self.test()?;
        moved |= self.land()?;
        Ok(moved)
    }

    /// The oldest payload, once all of it has landed, and why it has not reached its device if it has not.
    pub(crate) fn due(&mut self) -> Option<(T, Option<Error>)> {
        let front = self.frames.front()?;
        if front.unposted > 0 || front.outstanding > 0 {
            return None;
        }
        let frame = self.frames.pop_front()?;
        self.over += 1;
        self.unposted = self.unposted.max(self.over);
        Some((frame.then, frame.failed))
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
            // A receive that is done may keep its request until it is flushed, so one is left for that.
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
                self.registry.find(comm, &place, span.slice(0, len)?)
            });
            let (request, state) = if let Some(unpack) = &self.unpack {
                (comm.irecv(unpack.landing(), 0, len, tag)?, State::Bounced)
            } else if let Some((handle, offset)) = direct {
                let state = match device {
                    Some(_) => State::Unflushed,
                    None => State::Direct,
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
                (request, State::InSlot(slot))
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
            // Not every plugin says how much came; what one says must be true.
            if let Some(bytes) = completion.reported_bytes.filter(|n| *n != message.len) {
                return Err(Error::PluginBroke {
                    what: format!("it received {bytes} bytes of a message of {}", message.len),
                });
            }
            moved = true;
            self.done += 1;
            self.received += message.len as u64;
            self.advance(self.done - 1)?;
            // At once: bounce pages that are used again soon are still in the cache.
            self.consume()?;
        }
        Ok(moved)
    }

    /// Stops using memory that must be let go: what is being received into it is waited for. If that takes too long the comm
    /// is closed, and the error ends the connection.
    pub(crate) fn let_go(&mut self) -> Result<(), Error> {
        // Before the look: what is revoked during the wait may be in use, and is let go by whoever revokes it.
        self.registry.condemn();
        let outcome = self.try_let_go();
        if let Err(error) = &outcome {
            self.shut(error.clone());
        }
        if let Some(comm) = &mut self.comm {
            self.registry.purge(comm);
        }
        outcome
    }

    fn try_let_go(&mut self) -> Result<(), Error> {
        let mut patience = Patience::new(self.let_go_limit);
        loop {
            let over = self.over;
            let frames = &self.frames;
            let is_used = |message: &Message| {
                let touches = matches!(
                    message.state,
                    State::Direct
                        | State::Unflushed
                        | State::Flushing(_)
                        | State::Scattering(..)
                        | State::Unpacking(_)
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

    /// Gives up everything; returns what was not due yet.
    pub(crate) fn close(&mut self, error: Error) -> impl Iterator<Item = T> + use<T> {
        self.shut(error);
        let frames = std::mem::take(&mut self.frames);
        frames.into_iter().map(|frame| frame.then)
    }

    /// Closes the comm, after which the plugin uses no memory, and waits for the copies that are under way.
    fn shut(&mut self, error: Error) {
        for message in &self.posted {
            if let State::Gathering(copy, _) | State::Scattering(copy, _) | State::Unpacking(copy) =
                &message.state
            {
                // How it ended makes no difference any more.
                let _ = self.queues.wait(*copy);
            }
        }
        self.comm = None;
        self.broken.get_or_insert_with(|| Broken::new(error));
        self.posted.clear();
        self.done = 0;
    }
}
