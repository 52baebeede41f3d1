//! The receiving half of a comm pair.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use tcpx_cuda::Device;
use tcpx_ncclnet::{RecvComm, Request};
use tcpx_net::{Cursor, Span};

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
///   InSlot ─────────────── (CPU) ───────────────────────► Landed
///          ─────────────── Scattering ──────────────────► Landed     to a device
///   Bounced ── (CPU) or Unpacking ──────────────────────► Landed     from bounce pages to where they belong
///           ── Gathering ── InSlot …                                 from a GPU's pages to other memory
/// ```
enum State {
    Direct,
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
            None => Devices::AllBut(self.standin.clone()),
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

    /// Whether the plugin has receives in hand.
    pub(crate) fn is_waiting(&self) -> bool {
        self.done < self.posted.len()
    }

    /// Bytes of messages that were received, ever.
    pub(crate) fn received(&self) -> u64 {
        self.received
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
            if comm.in_flight() == comm.slots() {
                return Ok(moved);
            }
            let (tag, at) = (self.next_tag, frame.at);
            let len = frame.unposted.min(self.message_bytes);
            let place = frame.then.place();
            let device = place.as_ref().and_then(|place| place.device.cloned());
            let direct = place.and_then(|place| {
                // What a device's own memory would need beyond this is a flush.
                let is_host = place.device.is_none() && self.unpack.is_none();
                let span = at.rest(place.spans).next().filter(|_| is_host)?;
                self.registry.find(comm, &place, span.slice(0, len)?)
            });
            let (request, state) = if let Some(unpack) = &self.unpack {
                (comm.irecv(unpack.landing(), 0, len, tag)?, State::Bounced)
            } else if let Some((handle, offset)) = direct {
                (comm.irecv(handle, offset, len, tag)?, State::Direct)
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

    /// Goes on with messages that are done. Says whether anything has moved.
    fn land(&mut self) -> Result<bool, Error> {
        for index in 0..self.done {
            self.advance(index)?;
        }
        self.consume()
    }

    /// Consumes the messages that have landed, in order.
    fn consume(&mut self) -> Result<bool, Error> {
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
    fn advance(&mut self, index: usize) -> Result<(), Error> {
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

    /// Stops using memory that must be let go: what is being received into it is waited for. If that takes too long the comm
    /// is closed, and the error ends the connection.
    pub(crate) fn let_go(&mut self) -> Result<(), Error> {
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
                    State::Direct | State::Scattering(..) | State::Unpacking(_)
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
            let count = room.copy_span(left);
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
