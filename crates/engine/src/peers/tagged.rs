//! Tagged two-sided messages: send and receive.
//!
//! The sender announces a message with its tag and the location of its bytes; small messages
//! include the bytes. The receiver matches announcements with posted receives in order, reads bytes
//! that were not included directly into the posted buffer, and tells the sender when it has
//! everything.

#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Instant;

use tcpx_net::Span;
use tcpx_proto::frame::Status;

use super::peer::PeerShared;
use crate::error::Error;
use crate::link::{Context, Held, Link, is_same_link};
use crate::memory::{Memory, MemoryKind, Registry};
use crate::stats::{Meter, PeerCounters, TransferKind};
use crate::sync::{Mutex, Rank};
use crate::trace::{TransferNames, TransferTrace};
use crate::transfer::{
    After, Announcement, Arrival, Completion, Conclusion, Limits, Op, Pieces, Plan, Run,
    TransferState,
};

/// A posted send.
pub(crate) struct TaggedSend {
    pub(crate) message: Announcement,
    pub(crate) completion: Completion,
    registry: Weak<Registry>,
    /// The link on which the message was announced, and with which it fails.
    on: OnceLock<Weak<dyn Link>>,
}

/// A posted receive.
pub(crate) struct TaggedReceive {
    tag: u64,
    pub(crate) target: Span,
    memory: Arc<Memory>,
    pub(crate) completion: Completion,
    /// Length of the message, once it is known.
    pub(crate) received: AtomicU64,
    /// The sender's number of the message, once it is matched.
    message: AtomicU64,
    /// The READ of the bytes, for messages that were not inline.
    pub(crate) reading: Mutex<Option<Reading>>,
}

/// The READ of a message's bytes.
#[derive(Clone)]
pub(crate) struct Reading {
    pub(crate) link: Arc<dyn Link>,
    pub(crate) run: Arc<Run>,
}

/// An announcement and the link on which it arrived.
struct Found {
    link: Arc<dyn Link>,
    arrival: Arrival,
    /// Released once the announcement is matched or dropped.
    _held: Option<Held>,
}

/// The tagged messages between a session and one peer.
///
/// Each send and each receive ends exactly once: by a match, an abort, the loss of its link, or the
/// end of the peer. The thread that removes it from `state` ends it, after it has released the
/// lock; copies and messages to the peer also happen without the lock.
pub(crate) struct Tagged {
    state: Mutex<Messages>,
    /// Limits the inline bytes of unmatched announcements; beyond it, the bytes are dropped and
    /// read from the sender later.
    max_unexpected: usize,
}

#[derive(Default)]
struct Messages {
    sends: HashMap<u64, Arc<TaggedSend>>,
    posted: HashMap<u64, VecDeque<Arc<TaggedReceive>>>,
    arrived: HashMap<u64, VecDeque<Found>>,
    /// Inline bytes in `arrived`, at most `max_unexpected`.
    unexpected: usize,
    /// Why nothing will arrive any more.
    ended: Option<Error>,
}

impl TaggedSend {
    /// Makes a send. The peer may read only the message, and only until the send has ended.
    pub(crate) fn new(
        context: &Context,
        (counters, names): (&Arc<PeerCounters>, &TransferNames),
        tag: u64,
        source: Span,
        memory: &Arc<Memory>,
    ) -> Arc<Self> {
        let registry = &context.registry;
        let (id, bytes, now) = (context.next_id(), source.len() as u64, Instant::now());
        let meter = Meter::start(counters, TransferKind::Send, bytes, now);
        let trace = TransferTrace::posted(&context.trace, (id, names.send), (bytes, 0), now);
        Arc::new(Self {
            message: Announcement {
                id,
                tag,
                source,
                memory: registry.add_alias(memory, source),
            },
            completion: Completion::metered(meter, trace),
            registry: Arc::downgrade(registry),
            on: OnceLock::new(),
        })
    }

    pub(crate) fn id(&self) -> u64 {
        self.message.id
    }

    /// Prevents the peer from reading the message any more.
    pub(crate) fn revoke(&self) {
        if let Some(registry) = self.registry.upgrade() {
            registry.remove_alias(&self.message.memory);
        }
    }

    fn end(&self, error: Option<Error>) {
        self.revoke();
        if let Some(error) = error {
            self.completion.record(error);
        }
        self.completion.finish();
    }

    fn is_on(&self, link: &Arc<dyn Link>) -> bool {
        let on = self.on.get().and_then(Weak::upgrade);
        on.is_some_and(|on| is_same_link(&on, link))
    }
}

impl TaggedReceive {
    pub(crate) fn new(
        context: &Context,
        (counters, names): (&Arc<PeerCounters>, &TransferNames),
        tag: u64,
        target: Span,
        memory: Arc<Memory>,
    ) -> Arc<Self> {
        let now = Instant::now();
        let meter = Meter::start(counters, TransferKind::Receive, 0, now);
        // What it reads is a transfer of its own.
        let trace = context.trace.on().map(|_| context.next_id());
        let trace = trace
            .and_then(|id| TransferTrace::posted(&context.trace, (id, names.receive), (0, 0), now));
        Arc::new(Self {
            tag,
            target,
            memory,
            completion: Completion::metered(meter, trace),
            received: AtomicU64::new(0),
            message: AtomicU64::new(0),
            reading: Mutex::new(Rank::Reading, None),
        })
    }

    /// Returns why a message cannot be received into this buffer.
    fn refusal(&self, arrival: &Arrival) -> Option<Error> {
        let capacity = self.target.len() as u64;
        if self.completion.is_aborting() {
            Some(Error::Aborted)
        } else if !self.memory.is_live() {
            Some(Error::RegionDeregistered(self.memory.id))
        } else if arrival.len > capacity {
            Some(Error::MessageTruncated {
                len: arrival.len,
                capacity,
            })
        } else {
            None
        }
    }

    /// Makes the plan for reading a message that was not inline.
    fn plan(&self, context: &Context, link: &dyn Link, arrival: &Arrival) -> Plan {
        let mut offset = 0;
        let mut noted = Pieces::default();
        let (memory, _) = noted.add_memory(&self.memory);
        let pieces = arrival
            .pieces
            .iter()
            .filter_map(|(key, entry)| {
                // Always inside: the length was compared with the capacity.
                let local = self.target.slice(offset, entry.len as usize)?;
                offset += entry.len as usize;
                Some((local, *key, entry.address))
            })
            .fold(noted, |mut pieces, (local, key, address)| {
                // The kind of the sender's memory does not matter here: it is all of one kind.
                pieces.push(memory, local, key, address, MemoryKind::Host);
                pieces
            });
        let nearness = &context.staging.nearness;
        let limits = Limits {
            chunk_bytes: context.config.chunk_bytes(),
            lanes: nearness.lanes_over(pieces.near(), link.lanes()),
        };
        Plan::new(Op::Read, pieces, limits)
    }

    /// Tells the sender that the bytes are in place.
    fn complete(&self, link: &dyn Link) {
        link.send_done(self.message.load(Ordering::Relaxed), Status::Ok, "");
        self.completion.finish();
    }
}

impl Conclusion for TaggedReceive {
    fn landed(&self) {
        // The run refers to this receive:
        // if kept, they would keep each other and the session alive.
        let reading = self.reading.lock().take();
        if let Some(Reading { link, .. }) = reading {
            self.complete(link.as_ref());
        }
    }

    fn failed(&self, error: Error) {
        let reading = self.reading.lock().take();
        if let Some(Reading { link, .. }) = reading
            && !link.is_dead()
        {
            let message = self.message.load(Ordering::Relaxed);
            let status = match error {
                Error::MemoryFault => Status::Memory,
                _ => Status::Aborted,
            };
            link.send_done(message, status, &error.to_string());
        }
        self.completion.record(error);
        self.completion.finish();
    }
}

impl Tagged {
    pub(super) fn new(max_unexpected: usize) -> Self {
        Self {
            max_unexpected,
            state: Mutex::new(Rank::Tagged, Messages::default()),
        }
    }

    /// Adds a send that is about to be announced.
    ///
    /// # Errors
    /// The peer is gone for good.
    pub(crate) fn add_send(&self, send: &Arc<TaggedSend>) -> Result<(), Error> {
        let mut state = self.state.lock();
        if let Some(error) = state.ended.clone() {
            drop(state);
            send.end(Some(error.clone()));
            return Err(error);
        }
        state.sends.insert(send.id(), Arc::clone(send));
        Ok(())
    }

    /// Ends a send that has ended at the peer, or was aborted.
    pub(crate) fn sent(&self, id: u64, error: Option<Error>) {
        // An aborted send was already removed.
        let send = self.state.lock().sends.remove(&id);
        if let Some(send) = send {
            send.end(error);
        }
    }

    pub(crate) fn forget_receive(&self, receive: &Arc<TaggedReceive>) -> bool {
        let mut state = self.state.lock();
        let Some(queue) = state.posted.get_mut(&receive.tag) else {
            return false;
        };
        let before = queue.len();
        queue.retain(|r| !Arc::ptr_eq(r, receive));
        let found = queue.len() < before;
        if queue.is_empty() {
            state.posted.remove(&receive.tag);
        }
        found
    }

    /// Posts a receive; returns the matching announcement, if one has already arrived.
    ///
    /// # Errors
    /// The peer will never send anything any more.
    fn post(&self, receive: &Arc<TaggedReceive>) -> Result<Option<Found>, Error> {
        let mut state = self.state.lock();
        if let Some(error) = &state.ended {
            return Err(error.clone());
        }
        if let Some(queue) = state.arrived.get_mut(&receive.tag) {
            let matched = queue.pop_front();
            if queue.is_empty() {
                state.arrived.remove(&receive.tag);
            }
            let inline = matched.as_ref().and_then(|m| m.arrival.inline.as_ref());
            state.unexpected -= inline.map_or(0, Vec::len);
            if matched.is_some() {
                return Ok(matched);
            }
        }
        state
            .posted
            .entry(receive.tag)
            .or_default()
            .push_back(Arc::clone(receive));
        Ok(None)
    }

    /// Returns the receive that matches an announcement, or keeps the announcement.
    fn take(
        &self,
        link: &Arc<dyn Link>,
        mut arrival: Arrival,
        mut held: Option<Held>,
    ) -> Option<(Arc<TaggedReceive>, Arrival)> {
        let mut state = self.state.lock();
        if state.ended.is_some() {
            // The message will not be received, and keeping it would keep the session alive.
            return None;
        }
        if let Some(queue) = state.posted.get_mut(&arrival.tag) {
            let matched = queue.pop_front();
            if queue.is_empty() {
                state.posted.remove(&arrival.tag);
            }
            if let Some(receive) = matched {
                return Some((receive, arrival));
            }
        }
        if let Some(bytes) = &arrival.inline {
            if state.unexpected + bytes.len() > self.max_unexpected {
                if let Some(held) = &mut held {
                    held.reduce(bytes.len());
                }
                arrival.inline = None;
            } else {
                state.unexpected += bytes.len();
            }
        }
        let queue = state.arrived.entry(arrival.tag).or_default();
        queue.push_back(Found {
            link: Arc::clone(link),
            arrival,
            _held: held,
        });
        None
    }

    /// Returns whether sends or receives wait for the peer.
    pub(crate) fn is_waiting(&self) -> bool {
        let state = self.state.lock();
        !state.sends.is_empty() || !state.posted.is_empty()
    }

    /// Handles the loss of a link, and of the messages announced on it. If it was the last link,
    /// every receive fails.
    pub(crate) fn lost(&self, link: &Arc<dyn Link>, alone: bool, error: &Error) {
        let mut state = self.state.lock();
        let sends = state.sends.extract_if(|_, send| send.is_on(link));
        let sends: Vec<_> = sends.map(|(_, send)| send).collect();
        let Messages {
            arrived,
            unexpected,
            ..
        } = &mut *state;
        arrived.retain(|_, queue| {
            queue.retain(|found| {
                let is_lost = is_same_link(&found.link, link);
                if is_lost {
                    *unexpected -= found.arrival.inline.as_ref().map_or(0, Vec::len);
                }
                !is_lost
            });
            !queue.is_empty()
        });
        let posted = if alone {
            std::mem::take(&mut state.posted)
        } else {
            HashMap::new()
        };
        drop(state);
        fail(sends, posted, error);
    }

    /// Handles the final end of the peer:
    /// all pending sends and receives fail, and later ones are refused.
    pub(crate) fn end(&self, error: &Error) {
        let mut state = self.state.lock();
        let ended = std::mem::take(&mut *state);
        state.ended = ended.ended.or_else(|| Some(error.clone()));
        drop(state);
        fail(ended.sends.into_values(), ended.posted, error);
    }
}

fn fail(
    sends: impl IntoIterator<Item = Arc<TaggedSend>>,
    posted: HashMap<u64, VecDeque<Arc<TaggedReceive>>>,
    error: &Error,
) {
    for send in sends {
        send.end(Some(error.clone()));
    }
    for receive in posted.into_values().flatten() {
        receive.completion.record(error.clone());
        receive.completion.finish();
    }
}

/// Handles an announcement.
pub(super) fn announced(
    peer: &PeerShared,
    link: Arc<dyn Link>,
    arrival: Arrival,
    held: Option<Held>,
) {
    if let Some((receive, arrival)) = peer.tagged.take(&link, arrival, held) {
        matched(&peer.context, &link, &receive, arrival);
    }
}

/// Posts a receive, and matches it with its message if that has already arrived.
///
/// # Errors
/// The peer will never send anything any more.
pub(crate) fn post(peer: &PeerShared, receive: &Arc<TaggedReceive>) -> Result<(), Error> {
    if let Some(Found { link, arrival, .. }) = peer.tagged.post(receive)? {
        matched(&peer.context, &link, receive, arrival);
    }
    Ok(())
}

/// Delivers a message to its matching receive.
fn matched(
    context: &Context,
    link: &Arc<dyn Link>,
    receive: &Arc<TaggedReceive>,
    arrival: Arrival,
) {
    // Held until the destination of the bytes is decided: an abort waits for that.
    let mut reading = receive.reading.lock();
    receive.message.store(arrival.id, Ordering::Relaxed);
    receive.received.store(arrival.len, Ordering::Relaxed);
    receive.completion.set_bytes(arrival.len);
    // A message to device memory is read like a large one.
    let inline = arrival.inline.as_ref();
    let inline = inline.filter(|_| receive.memory.device.is_none());
    let refusal = context.copies.guarded(|| {
        let refusal = receive.refusal(&arrival);
        if let (None, Some(bytes)) = (&refusal, inline) {
            return receive.target.copy_from(bytes).err().map(Error::from);
        }
        refusal
    });
    if let Some(error) = refusal {
        drop(reading);
        let status = match error {
            Error::MessageTruncated { .. } => Status::Truncated,
            Error::MemoryFault => Status::Memory,
            _ => Status::Aborted,
        };
        link.send_done(arrival.id, status, &error.to_string());
        receive.completion.record(error);
        receive.completion.finish();
        return;
    }
    let plan = match inline {
        None => Some(receive.plan(context, link.as_ref(), &arrival)),
        Some(_) => None,
    };
    let Some(plan) = plan.filter(|plan| plan.len() > 0) else {
        drop(reading);
        return receive.complete(link.as_ref());
    };
    let after = After::Tell(Arc::clone(receive) as Arc<dyn Conclusion>);
    let run = Arc::new(Run::new(context.next_id(), Arc::new(plan), after));
    *reading = Some(Reading {
        link: Arc::clone(link),
        run: Arc::clone(&run),
    });
    drop(reading);
    link.submit(&run);
}

/// Announces a message to the peer.
pub(super) fn announce(peer: &PeerShared, link: &Arc<dyn Link>, send: &Arc<TaggedSend>) {
    let on = send.on.set(Arc::downgrade(link));
    debug_assert!(on.is_ok(), "a message is announced once");
    // The send was aborted before there was a link: it must not match the peer's receive.
    if send.completion.state() != TransferState::InProgress {
        return;
    }
    link.announce(&send.message);
    // The link may have been taken apart before this message could fail with it.
    if let Some(error) = link.error() {
        peer.tagged.sent(send.id(), Some(error));
    }
}
