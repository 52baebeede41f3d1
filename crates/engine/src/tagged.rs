//! Tagged two-sided messages: send and receive.
//!
//! The sender announces a message with its tag and where its bytes are; small ones carry the bytes along. The
//! receiver matches announcements with posted receives in order, reads what did not come along straight into
//! the posted buffer, and tells the sender when it has everything.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;
use tcpx_net::Span;
use tcpx_proto::descriptor::RegionKey;
use tcpx_proto::frame::{Entry, FLAG_INLINE, Header, Kind, MAX_INLINE_SEND_BYTES, Status, Table};

use crate::completion::{Completion, TransferState};
use crate::core::Core;
use crate::error::Error;
use crate::peer::PeerShared;
use crate::plan::{Limits, Op, Pieces, Plan};
use crate::region::{Memory, MemoryKind};
use crate::run::{After, Run};
use crate::transport::Link;
use crate::transport::tcp::Connection;

/// Announcements that came before their receive was posted keep their inline bytes up to this sum for each peer;
/// past it the bytes are dropped and read from the sender later.
const MAX_UNEXPECTED_BYTES: usize = 16 << 20;

/// One entry of an announcement covers at most this much, so that its length fits the wire format.
const MAX_ENTRY_BYTES: usize = 1 << 30;

/// A posted send.
pub(crate) struct Send {
    pub(crate) id: u64,
    pub(crate) tag: u64,
    pub(crate) source: Span,
    /// The message, under a key of its own.
    pub(crate) memory: Arc<Memory>,
    pub(crate) completion: Completion,
    core: Weak<Core>,
    /// What it was announced on, and ends with.
    on: OnceLock<Weak<Connection>>,
}

/// A posted receive.
pub(crate) struct Receive {
    pub(crate) tag: u64,
    pub(crate) target: Span,
    pub(crate) memory: Arc<Memory>,
    pub(crate) completion: Completion,
    /// Bytes of the message, once it is known.
    pub(crate) received: AtomicU64,
    /// The sender's number of the message, once it is matched.
    message: AtomicU64,
    /// What reads the bytes, for messages that were not inline.
    pub(crate) run: Mutex<Option<(Link, Arc<Run>)>>,
}

/// The announcement of a message.
#[derive(Debug)]
pub(crate) struct Arrival {
    id: u64,
    tag: u64,
    len: u64,
    pieces: Vec<(RegionKey, Entry)>,
    inline: Option<Vec<u8>>,
}

/// The tagged messages between a session and one peer.
#[derive(Default)]
pub(crate) struct Tagged {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    sends: HashMap<u64, Arc<Send>>,
    posted: HashMap<u64, VecDeque<Arc<Receive>>>,
    arrived: HashMap<u64, VecDeque<(Link, Arrival)>>,
    /// Inline bytes in `arrived`. ≤ MAX_UNEXPECTED_BYTES
    unexpected: usize,
    /// Why nothing will come any more.
    ended: Option<Error>,
}

impl Send {
    /// The peer may read the message and nothing else, and only until the send has ended.
    pub(crate) fn new(core: &Arc<Core>, tag: u64, source: Span, memory: &Arc<Memory>) -> Arc<Self> {
        Arc::new(Self {
            id: core.next_id(),
            tag,
            source,
            memory: core.regions.add_alias(memory, source),
            completion: Completion::new(),
            core: Arc::downgrade(core),
            on: OnceLock::new(),
        })
    }

    fn end(&self, error: Option<Error>) {
        if let Some(core) = self.core.upgrade() {
            core.regions.remove_alias(&self.memory);
        }
        if let Some(error) = error {
            self.completion.record(error);
        }
        self.completion.finish();
    }

    fn is_on(&self, connection: &Arc<Connection>) -> bool {
        let on = self.on.get();
        on.is_some_and(|on| std::ptr::eq(on.as_ptr(), Arc::as_ptr(connection)))
    }

    /// Appends the announcement, with the message itself when it is small. Only below [`Local::guarded`].
    ///
    /// [`Local::guarded`]: crate::transport::local::Local::guarded
    pub(crate) fn encode(&self, out: &mut Vec<u8>, key: RegionKey) {
        let len = self.source.len();
        let inline = len as u64 <= MAX_INLINE_SEND_BYTES
            && self.memory.is_live()
            && self.memory.device.is_none();
        let pieces = self.arrival(key).pieces;
        let header = Header {
            flags: if inline { FLAG_INLINE } else { 0 },
            regions: u16::from(!pieces.is_empty()),
            entries: pieces.len() as u32,
            extra: 8,
            payload: if inline { len as u64 } else { 0 },
            ..Header::new(Kind::Send, self.id)
        };
        header.encode(out);
        if !pieces.is_empty() {
            out.extend_from_slice(&key.0);
        }
        for (_, entry) in &pieces {
            entry.encode(out);
        }
        out.extend_from_slice(&self.tag.to_le_bytes());
        if inline {
            let at = out.len();
            out.resize(at + len, 0);
            self.source.copy_to(&mut out[at..]);
        }
    }
}

impl Send {
    /// The announcement as a session finds it that sends to itself.
    pub(crate) fn arrival(&self, key: RegionKey) -> Arrival {
        let len = self.source.len();
        let pieces = (0..len.div_ceil(MAX_ENTRY_BYTES)).map(|index| {
            let offset = index * MAX_ENTRY_BYTES;
            let address = (self.source.address() + offset) as u64;
            (
                key,
                Entry {
                    address,
                    len: (len - offset).min(MAX_ENTRY_BYTES) as u32,
                    region: 0,
                },
            )
        });
        Arrival {
            id: self.id,
            tag: self.tag,
            len: len as u64,
            pieces: pieces.collect(),
            inline: None,
        }
    }
}

impl Receive {
    pub(crate) fn new(tag: u64, target: Span, memory: Arc<Memory>) -> Arc<Self> {
        Arc::new(Self {
            tag,
            target,
            memory,
            completion: Completion::new(),
            received: AtomicU64::new(0),
            message: AtomicU64::new(0),
            run: Mutex::new(None),
        })
    }

    /// Why a message cannot be received into this buffer.
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

    /// How to read a message that did not come along.
    fn plan(&self, link: &Link, arrival: &Arrival) -> Plan {
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
                // Of what kind the sender's memory is makes no difference: it is all of one kind.
                pieces.push(memory, local, key, address, MemoryKind::Host);
                pieces
            });
        let chunk_bytes = link.core().config.chunk_bytes();
        let limits = Limits {
            chunk_bytes,
            lanes: link.lanes(),
        };
        Plan::new(Op::Read, pieces, limits)
    }

    /// The bytes are in place.
    pub(crate) fn landed(&self, link: &Link) {
        // The run refers to this receive: kept, they would keep each other, and the session with them, alive.
        drop(self.run.lock().take());
        link.send_done(self.message.load(Ordering::Relaxed), Status::Ok, "");
        self.completion.finish();
    }

    /// The bytes did not come.
    pub(crate) fn failed(&self, error: Error) {
        let run = self.run.lock().take();
        if let Some((link, _)) = run
            && !link.is_dead()
        {
            let message = self.message.load(Ordering::Relaxed);
            link.send_done(message, Status::Aborted, &error.to_string());
        }
        self.completion.record(error);
        self.completion.finish();
    }
}

impl Arrival {
    /// From a decoded frame; `tag` has 8 bytes (checked with the header).
    pub(crate) fn new(id: u64, tag: &[u8], table: &Table<'_>, inline: Option<Vec<u8>>) -> Self {
        let mut word = [0; 8];
        word.copy_from_slice(tag);
        let keys: Vec<_> = table.regions().collect();
        let pieces = table
            .entries()
            .map(|e| (keys[e.region as usize], e))
            .collect();
        Self {
            id,
            tag: u64::from_le_bytes(word),
            len: table.total(),
            pieces,
            inline,
        }
    }
}

impl Tagged {
    /// A send that is about to be announced.
    ///
    /// # Errors
    /// The peer is gone for good.
    pub(crate) fn add_send(&self, send: &Arc<Send>) -> Result<(), Error> {
        let mut state = self.state.lock();
        if let Some(error) = state.ended.clone() {
            drop(state);
            send.end(Some(error.clone()));
            return Err(error);
        }
        state.sends.insert(send.id, Arc::clone(send));
        Ok(())
    }

    /// A send has ended: at the peer, or by abort.
    pub(crate) fn sent(&self, id: u64, error: Option<Error>) {
        // One that was aborted is no longer here: its end is not news.
        let send = self.state.lock().sends.remove(&id);
        if let Some(send) = send {
            send.end(error);
        }
    }

    pub(crate) fn forget_receive(&self, receive: &Arc<Receive>) -> bool {
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

    /// Posts a receive; returns the announcement that it matches, if one is already here.
    ///
    /// # Errors
    /// The peer will never send anything any more.
    pub(crate) fn post(&self, receive: &Arc<Receive>) -> Result<Option<(Link, Arrival)>, Error> {
        let mut state = self.state.lock();
        if let Some(error) = &state.ended {
            return Err(error.clone());
        }
        if let Some(queue) = state.arrived.get_mut(&receive.tag) {
            let matched = queue.pop_front();
            if queue.is_empty() {
                state.arrived.remove(&receive.tag);
            }
            if let Some((
                _,
                Arrival {
                    inline: Some(bytes),
                    ..
                },
            )) = &matched
            {
                state.unexpected -= bytes.len();
            }
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

    /// Takes the receive that an announcement matches, or keeps the announcement.
    fn take(&self, link: &Link, mut arrival: Arrival) -> Option<(Arc<Receive>, Arrival)> {
        let mut state = self.state.lock();
        if state.ended.is_some() {
            // Nobody will ask for it, and kept it would keep the session.
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
            if state.unexpected + bytes.len() > MAX_UNEXPECTED_BYTES {
                arrival.inline = None;
            } else {
                state.unexpected += bytes.len();
            }
        }
        let queue = state.arrived.entry(arrival.tag).or_default();
        queue.push_back((link.clone(), arrival));
        None
    }

    /// Whether somebody waits for the peer to send or to receive.
    pub(crate) fn is_waiting(&self) -> bool {
        let state = self.state.lock();
        !state.sends.is_empty() || !state.posted.is_empty()
    }

    /// A connection is gone, and with it what was announced on it. If it was the last one, every receive fails.
    pub(crate) fn lost(&self, connection: &Arc<Connection>, alone: bool, error: &Error) {
        let mut state = self.state.lock();
        let sends = state.sends.extract_if(|_, send| send.is_on(connection));
        let sends: Vec<_> = sends.map(|(_, send)| send).collect();
        let State {
            arrived,
            unexpected,
            ..
        } = &mut *state;
        arrived.retain(|_, queue| {
            queue.retain(|(link, arrival)| {
                let is_lost = matches!(link, Link::Tcp(on) if Arc::ptr_eq(on, connection));
                if is_lost {
                    *unexpected -= arrival.inline.as_ref().map_or(0, Vec::len);
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

    /// The peer is gone for good: everything that waits for it fails, and what is posted from now on is refused.
    pub(crate) fn end(&self, error: &Error) {
        let mut state = self.state.lock();
        let ended = std::mem::take(&mut *state);
        state.ended = ended.ended.or_else(|| Some(error.clone()));
        drop(state);
        fail(ended.sends.into_values(), ended.posted, error);
    }
}

fn fail(
    sends: impl IntoIterator<Item = Arc<Send>>,
    posted: HashMap<u64, VecDeque<Arc<Receive>>>,
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

/// A message was announced.
pub(crate) fn arrived(peer: &PeerShared, link: &Link, arrival: Arrival) {
    if let Some((receive, arrival)) = peer.tagged.take(link, arrival) {
        matched(link, &receive, arrival);
    }
}

/// A receive and a message have found each other.
pub(crate) fn matched(link: &Link, receive: &Arc<Receive>, arrival: Arrival) {
    // Held until it is settled where the bytes go: an abort waits for that.
    let mut reading = receive.run.lock();
    receive.message.store(arrival.id, Ordering::Relaxed);
    receive.received.store(arrival.len, Ordering::Relaxed);
    // A device's memory is reached by reading the message like a large one.
    let inline = arrival.inline.as_ref();
    let inline = inline.filter(|_| receive.memory.device.is_none());
    let refusal = link.core().local.guarded(|| {
        let refusal = receive.refusal(&arrival);
        if let (None, Some(bytes)) = (&refusal, inline) {
            receive.target.copy_from(bytes);
        }
        refusal
    });
    if let Some(error) = refusal {
        drop(reading);
        let status = match error {
            Error::MessageTruncated { .. } => Status::Truncated,
            _ => Status::Aborted,
        };
        link.send_done(arrival.id, status, &error.to_string());
        receive.completion.record(error);
        receive.completion.finish();
        return;
    }
    if inline.is_some() {
        drop(reading);
        receive.landed(link);
        return;
    }
    let plan = receive.plan(link, &arrival);
    if plan.len() == 0 {
        drop(reading);
        receive.landed(link);
        return;
    }
    let after = After::Receive(Arc::clone(receive));
    let run = Arc::new(Run::new(link.core().next_id(), Arc::new(plan), after));
    *reading = Some((link.clone(), Arc::clone(&run)));
    drop(reading);
    link.submit(&run);
}

/// Tells the peer that a message is there for it.
pub(crate) fn announce(link: &Link, send: &Arc<Send>) {
    let key = send.memory.key();
    match link {
        Link::Tcp(connection) => {
            let on = send.on.set(Arc::downgrade(connection));
            debug_assert!(on.is_ok(), "a message is announced once");
            // Given up before there was a connection: the peer's receive is not for it.
            if send.completion.state() != TransferState::InProgress {
                return;
            }
            let local = &connection.core.local;
            connection.control(|out| local.guarded(|| send.encode(out, key)));
            // It may have been taken apart before it had this message to fail.
            if let Some(error) = connection.error() {
                connection.peer.tagged.sent(send.id, Some(error));
            }
        }
        Link::Local(core) => arrived(core.own_peer(), link, send.arrival(key)),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::{Send, announce};
    use crate::testing::{LONG, Pair, session, wait_until};
    use crate::transport::Link;
    use crate::{Buffer, Error, Session, TransferState};

    const SMALL: usize = 64;

    fn region(session: &Session, len: usize) -> crate::Region {
        session.register(&Buffer::new(len)).unwrap()
    }

    /// When both sides have connected there are two connections.
    #[test]
    fn a_message_ends_with_the_connection_that_it_was_announced_on() {
        for _ in 0..1000 {
            let (alice, bob) = (session("alice"), session("bob"));
            let to_bob = alice.add_peer(&bob.connection_info()).unwrap();
            let to_alice = bob.add_peer(&alice.connection_info()).unwrap();
            std::thread::scope(|scope| {
                scope.spawn(|| to_bob.connect(LONG).unwrap());
                scope.spawn(|| to_alice.connect(LONG).unwrap());
            });
            if [&alice, &bob].map(|s| s.core().connections().len()) != [2, 2] {
                continue;
            }
            let here = region(&alice, SMALL);
            let send = alice.send(&to_bob, here.at(0), SMALL, 7).unwrap();
            let receive = alice.recv(&to_bob, here.at(0), SMALL, 8).unwrap();
            let Some(Link::Tcp(used)) = to_bob.shared.link() else {
                panic!("not connected");
            };
            let reason = "as a test wants it".to_owned();
            let peer = "bob".to_owned();
            used.kill(Error::PeerLost { peer, reason });
            assert!(matches!(send.wait(LONG), Err(Error::PeerLost { .. })));
            // The other connection still brings messages.
            let there = region(&bob, SMALL);
            wait_until("bob has noticed", || bob.core().connections().len() == 1);
            let answer = bob.send(&to_alice, there.at(0), SMALL, 8).unwrap();
            answer.wait(LONG).unwrap();
            receive.wait(LONG).unwrap();
            return;
        }
        panic!("never two connections");
    }

    #[test]
    fn a_message_after_a_disconnect_connects_anew() {
        for _ in 0..20 {
            let pair = Pair::new();
            let (here, there) = (region(&pair.alice, SMALL), region(&pair.bob, SMALL));
            pair.to_bob.disconnect();
            let send = pair.alice.send(&pair.to_bob, here.at(0), SMALL, 7).unwrap();
            let to_alice = pair.bob.accept(LONG).unwrap();
            let receive = pair.bob.recv(&to_alice, there.at(0), SMALL, 7).unwrap();
            receive.wait(LONG).unwrap();
            send.wait(LONG).unwrap();
        }
    }

    #[test]
    fn a_message_that_is_given_up_before_it_leaves_meets_no_receive() {
        let (alice, bob) = (session("alice"), session("bob"));
        let to_bob = alice.add_peer(&bob.connection_info()).unwrap();
        let (here, there) = (region(&alice, SMALL), region(&bob, SMALL));
        drop(alice.send(&to_bob, here.at(0), 1, 7).unwrap());
        let next = alice.send(&to_bob, here.at(0), SMALL, 7).unwrap();
        let to_alice = bob.accept(LONG).unwrap();
        let receive = bob.recv(&to_alice, there.at(0), SMALL, 7).unwrap();
        receive.wait(LONG).unwrap();
        next.wait(LONG).unwrap();
        assert_eq!(receive.received(), SMALL as u64);
    }

    #[test]
    fn a_message_to_oneself_does_not_keep_a_closed_session() {
        let alice = session("alice");
        let here = region(&alice, SMALL);
        let core = Arc::downgrade(alice.core());
        let (span, memory) = alice.core().slice(here.at(0), SMALL).unwrap();
        let send = Send::new(alice.core(), 7, span, &memory);
        let own_peer = Arc::clone(alice.core().own_peer());
        own_peer.tagged.add_send(&send).unwrap();
        let link = own_peer.link().unwrap();
        alice.close();
        announce(&link, &send);
        assert_eq!(send.completion.state(), TransferState::Failed);
        assert!(own_peer.tagged.add_send(&send).is_err());
        drop((link, send, here, memory, own_peer, alice));
        assert!(core.upgrade().is_none());
    }

    /// Whoever takes memory back waits for the copies of messages out of it and into it.
    #[test]
    fn messages_are_copied_when_nobody_takes_their_memory_back() {
        let pair = Pair::new();
        let (here, there) = (region(&pair.alice, SMALL), region(&pair.bob, SMALL));
        let waits = |session: &Session, copy: &(dyn Fn() + Sync)| {
            let (tell, told) = channel();
            let taking_back = session.core().local.hold();
            std::thread::scope(|scope| {
                scope.spawn(move || {
                    copy();
                    tell.send(()).unwrap();
                });
                let early = told.recv_timeout(Duration::from_millis(100));
                assert!(early.is_err(), "it was copied meanwhile");
                drop(taking_back);
            });
        };
        let send = || {
            let send = pair.alice.send(&pair.to_bob, here.at(0), SMALL, 7).unwrap();
            // Its end is waited for elsewhere.
            std::mem::forget(send);
        };
        waits(&pair.alice, &send);
        wait_until("the message is there", || {
            let tagged = &pair.to_alice.shared.tagged;
            !tagged.state.lock().arrived.is_empty()
        });
        waits(&pair.bob, &|| {
            let receive = pair
                .bob
                .recv(&pair.to_alice, there.at(0), SMALL, 7)
                .unwrap();
            receive.wait(LONG).unwrap();
        });
    }
}
