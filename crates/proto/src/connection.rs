//! What outlives the lanes of a connection: numbered messages, and chunks whose lane was lost.
//!
//! Pure, as [`lane`](crate::lane) is. A stream may break at any byte, and each side may notice at
//! another moment. Three values make that invisible to what is above:
//!
//! - [`Outbox`] numbers messages and keeps them until the peer has them, so that they can be sent
//!   again on another lane. [`Inbox`] delivers each number once, in order.
//! - [`Losses`] decides about chunks that were in flight on a stream that was lost. READ chunks are
//!   asked for again as soon as this side has let go of the stream: nothing lands from it any more.
//!   WRITE chunks wait for the peer's word that *it* has let go of the stream, which says what had
//!   landed: bytes that are still under way can never land behind those that are sent again.
//!
//! ```text
//!   this side            LaneDown(stream, landed)              the peer
//!   lets go of   ──────────────────────────────────────►  lets go of the stream, if it has not,
//!   the stream   ◄──────────────────────────────────────  sends its own LaneDown, settles what this
//!                        LaneDown(stream, landed)          side had, sends again what it had not
//! ```
//!
//! LaneDown is a numbered message: it arrives, whichever lanes are lost meanwhile. The order of
//! calls matters in two places: a side calls [`Losses::close`] before [`Losses::open`] for the next
//! stream of a lane, and queues its LaneDown before it sends anything on that next stream.

#[cfg(test)]
mod tests;

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use crate::frame::down::{Ending, StreamId};
use crate::lane::{Chunk, Violation};

/// Messages after which the peer is told that they are here.
const RECEIVED_MESSAGES: u32 = 32;

/// Bytes of messages after which the peer is told that they are here.
const RECEIVED_BYTES: usize = 64 << 10;

/// Messages of ours that the peer may not have.
#[derive(Debug)]
pub struct Outbox {
    /// The number of the first message that is kept. Never 0.
    first: u32,
    kept: VecDeque<Vec<u8>>,
    bytes: usize,
}

impl Default for Outbox {
    fn default() -> Self {
        Self {
            first: 1,
            kept: VecDeque::new(),
            bytes: 0,
        }
    }
}

/// Returns the number that comes `count` after `number`. 0 is none.
fn after(number: u32, count: usize) -> u32 {
    // Numbers go round: 1 follows the last.
    let span = u64::from(u32::MAX);
    ((u64::from(number) - 1 + count as u64) % span + 1) as u32
}

/// Returns how far after `first` a number comes; more than half of all numbers where it comes
/// before.
fn distance(first: u32, number: u32) -> usize {
    let span = u64::from(u32::MAX);
    ((u64::from(number) + span - u64::from(first)) % span) as usize
}

/// Numbers that are this far after another one come before it.
const BEFORE: usize = u32::MAX as usize / 2;

impl Outbox {
    /// Keeps a message, which `encode` writes with the number that it gets. Returns its bytes.
    pub fn push(&mut self, encode: impl FnOnce(u32, &mut Vec<u8>)) -> &[u8] {
        let mut message = Vec::new();
        encode(after(self.first, self.kept.len()), &mut message);
        self.bytes += message.len();
        self.kept.push_back(message);
        self.kept.back().map_or(&[], Vec::as_slice)
    }

    /// Forgets the messages before `next`, which the peer has.
    ///
    /// # Errors
    /// No such message was sent.
    pub fn handle_received(&mut self, next: u32) -> Result<(), Violation> {
        let count = distance(self.first, next);
        if next == 0 || (count > self.kept.len() && count < BEFORE) {
            let sent = match self.kept.len() {
                0 => self.first - 1,
                kept => after(self.first, kept - 1),
            };
            return Err(Violation::MessageNotSent { sent, found: next });
        }
        if count >= BEFORE {
            // Said again, and late.
            return Ok(());
        }
        let bytes: usize = self.kept.drain(..count).map(|message| message.len()).sum();
        self.bytes -= bytes;
        self.first = next;
        Ok(())
    }

    /// Returns the messages that the peer may not have, oldest first.
    pub fn messages(&self) -> impl Iterator<Item = &[u8]> {
        self.kept.iter().map(Vec::as_slice)
    }

    /// Bytes of them.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Forgets everything, once the connection has ended.
    pub fn close(&mut self) {
        self.kept = VecDeque::new();
        self.bytes = 0;
    }
}

/// Which messages of the peer have come.
///
/// What the peer is told of them may be lost with its stream. It is told again with the next
/// message, and there is one: the peer's LaneDown for that stream.
#[derive(Debug)]
pub struct Inbox {
    /// The number of the message that comes next.
    next: u32,
    /// Messages, and their bytes, that the peer was not told of.
    untold: u32,
    untold_bytes: usize,
}

impl Default for Inbox {
    fn default() -> Self {
        Self {
            next: 1,
            untold: 0,
            untold_bytes: 0,
        }
    }
}

impl Inbox {
    /// Says whether a message is to be delivered: it is the next, or has no number (0). Otherwise
    /// it was delivered before, from another lane.
    ///
    /// # Errors
    /// A message before it was left out.
    pub fn handle_message(&mut self, number: u32, bytes: usize) -> Result<bool, Violation> {
        if number == 0 {
            return Ok(true);
        }
        if number == self.next {
            self.next = after(self.next, 1);
            self.untold += 1;
            self.untold_bytes = self.untold_bytes.saturating_add(bytes);
            return Ok(true);
        }
        if distance(self.next, number) < BEFORE {
            return Err(Violation::MessageMissing {
                expected: self.next,
                found: number,
            });
        }
        // Whoever sends it again has not heard.
        self.untold = self.untold.max(RECEIVED_MESSAGES);
        Ok(false)
    }

    /// Returns what is to be told of the messages that have come: the number of the next one, if
    /// the peer keeps many that it need not keep, or any and it `asks`.
    pub fn poll_received(&mut self, asks: bool) -> Option<u32> {
        let is_due = self.untold >= RECEIVED_MESSAGES || self.untold_bytes >= RECEIVED_BYTES;
        let is_asked = asks && self.untold > 0;
        if !is_due && !is_asked {
            return None;
        }
        (self.untold, self.untold_bytes) = (0, 0);
        Some(self.next)
    }
}

/// Ranges of generations that a slot remembers not to have had. Each costs one reconnection, and is
/// of use until the peer's word on it has come: old ones can go.
const MAX_MISSED: usize = 64;

/// One lane of a connection: its stream, and chunks of streams that were lost.
#[derive(Debug)]
struct Slot<C> {
    /// The highest generation that is known, here or there.
    generation: u32,
    /// The generation of the stream that is open here. ≤ generation
    open: Option<u32>,
    /// Generations before the present one that were never open here, as first and last: the peer
    /// may have had those streams, and waits for a word on them. At most `MAX_MISSED`
    missed: VecDeque<(u32, u32)>,
    /// What the peer has said of the stream that is open here: it is about to be closed.
    heard: Option<Vec<Ending>>,
    /// WRITE chunks of streams that were closed here, until the peer says what became of them.
    unknown: Vec<(u32, Vec<C>)>,
}

impl<C> Slot<C> {
    /// Says whether a stream was never open here, once. The peer speaks of streams in their order:
    /// it says nothing of older ones after this.
    fn miss(&mut self, generation: u32) -> bool {
        let is_missed = self
            .missed
            .iter()
            .any(|(first, last)| (*first..=*last).contains(&generation));
        if is_missed {
            self.missed.retain(|(_, last)| *last > generation);
            if let Some((first, _)) = self.missed.front_mut() {
                *first = (*first).max(generation + 1);
            }
        }
        is_missed
    }
}

/// What is known of WRITE chunks whose stream was lost.
#[derive(Debug, PartialEq, Eq)]
pub struct Known<C> {
    /// They have landed, or were refused: they are settled.
    pub settled: Vec<(C, Ending)>,
    /// They never will: they must be sent again.
    pub again: Vec<C>,
}

impl<C> Default for Known<C> {
    fn default() -> Self {
        Self {
            settled: Vec::new(),
            again: Vec::new(),
        }
    }
}

/// What the peer's word on a stream leads to.
#[derive(Debug, PartialEq, Eq)]
pub enum Heard<C> {
    /// The stream is open here: close it, and say so.
    Close,
    /// This side never had the stream, and will not: tell the peer that nothing has landed.
    Never,
    /// Chunks of ours are known to have landed, or not.
    Known(Known<C>),
}

/// Streams that were lost, and the chunks that were in flight on them.
#[derive(Debug)]
pub struct Losses<C> {
    slots: Vec<Slot<C>>,
}

impl<C: Chunk> Losses<C> {
    /// Makes the record of a connection of so many lanes, whose first streams are open.
    #[must_use]
    pub fn new(lanes: usize) -> Self {
        let slot = || Slot {
            generation: 0,
            open: Some(0),
            missed: VecDeque::new(),
            heard: None,
            unknown: Vec::new(),
        };
        Self {
            slots: core::iter::repeat_with(slot).take(lanes).collect(),
        }
    }

    /// Notes that a lane has a new stream; false where that stream was given up before it was here,
    /// or a newer one is.
    #[must_use]
    pub fn open(&mut self, stream: StreamId) -> bool {
        let Some(slot) = self.slots.get_mut(usize::from(stream.lane)) else {
            return false;
        };
        if slot.open.is_some() || stream.generation <= slot.generation {
            return false;
        }
        let missed = (slot.generation + 1, stream.generation - 1);
        if missed.0 <= missed.1 {
            if slot.missed.len() >= MAX_MISSED {
                slot.missed.pop_front();
            }
            slot.missed.push_back(missed);
        }
        slot.generation = stream.generation;
        slot.open = Some(stream.generation);
        true
    }

    /// Notes that this side has let go of a stream on which these WRITE chunks were in flight.
    /// Returns what is known of them already.
    pub fn close(&mut self, stream: StreamId, writes: Vec<C>) -> Known<C> {
        let Some(slot) = self.slots.get_mut(usize::from(stream.lane)) else {
            return Known::default();
        };
        if slot.open == Some(stream.generation) {
            slot.open = None;
        }
        match slot.heard.take() {
            Some(endings) => know(writes, endings),
            None if writes.is_empty() => Known::default(),
            None => {
                slot.unknown.push((stream.generation, writes));
                Known::default()
            }
        }
    }

    /// Takes the peer's word that it has let go of a stream, and what had landed from it.
    ///
    /// # Errors
    /// The connection has no such lane.
    pub fn handle_down(
        &mut self,
        stream: StreamId,
        endings: Vec<Ending>,
    ) -> Result<Heard<C>, Violation> {
        let lanes = self.slots.len();
        let lane = stream.lane;
        let slot = self
            .slots
            .get_mut(usize::from(lane))
            .ok_or(Violation::NoSuchLane { lane, lanes })?;
        if stream.generation > slot.generation {
            // The peer has given a newer stream up before this side had it: no older one is left
            // there.
            slot.generation = stream.generation;
            return Ok(Heard::Never);
        }
        if slot.open == Some(stream.generation) {
            slot.heard = Some(endings);
            return Ok(Heard::Close);
        }
        if slot.miss(stream.generation) {
            return Ok(Heard::Never);
        }
        let is_it = |(generation, _): &mut (u32, Vec<C>)| *generation == stream.generation;
        let mut found = slot.unknown.extract_if(.., is_it);
        let known = found.next().map(|(_, writes)| know(writes, endings));
        Ok(Heard::Known(known.unwrap_or_default()))
    }

    /// Whether chunks wait for the peer's word.
    #[must_use]
    pub fn is_waiting(&self) -> bool {
        self.slots.iter().any(|slot| !slot.unknown.is_empty())
    }

    /// Gives the chunks back that wait for the peer's word, once the connection has ended.
    pub fn end(&mut self) -> Vec<C> {
        let waiting = self
            .slots
            .iter_mut()
            .flat_map(|slot| slot.unknown.drain(..));
        waiting.flat_map(|(_, writes)| writes).collect()
    }
}

/// Divides chunks by what the peer has said of them.
fn know<C: Chunk>(writes: Vec<C>, mut endings: Vec<Ending>) -> Known<C> {
    let mut known = Known::default();
    for chunk in writes {
        match endings.iter().position(|ending| ending.id == chunk.id()) {
            Some(at) => known.settled.push((chunk, endings.swap_remove(at))),
            None => known.again.push(chunk),
        }
    }
    known
}
