//! State of a connection that outlives its lanes: numbered messages, and chunks of lost lanes.
//!
//! Pure, like [`lane`](crate::lane). A stream may break at any byte, and each side may notice at a
//! different moment. Three values hide that from the layers above:
//!
//! - [`Outbox`] numbers messages and keeps them until the peer has them, so that they can be sent
//!   again on another lane. [`Inbox`] delivers each number once, in order.
//! - [`Losses`] decides about chunks that were in flight on a lost stream. READ chunks are
//!   requested again as soon as this side has closed the stream: nothing lands from it any more.
//!   WRITE chunks wait for the LaneDown by which the peer confirms that *it* has closed the stream,
//!   and which lists the chunks that had landed: bytes still in flight can then never overwrite
//!   bytes that are sent again.
//!
//! ```text
//!   this side            LaneDown(stream, landed)              the peer
//!   closes the   ──────────────────────────────────────►  closes the stream, if it is open,
//!   stream       ◄──────────────────────────────────────  sends its own LaneDown, settles chunks
//!                        LaneDown(stream, landed)          that landed, sends the others again
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

/// Number of messages after which their receipt is reported to the peer.
const RECEIVED_MESSAGES: u32 = 32;

/// Bytes of messages after which their receipt is reported to the peer.
const RECEIVED_BYTES: usize = 64 << 10;

/// Keeps messages of this side until the peer confirms them.
#[derive(Debug)]
pub struct Outbox {
    /// The number of the oldest message kept. Never 0.
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

/// Returns the number `count` after `number`. 0 means no number.
fn after(number: u32, count: usize) -> u32 {
    // Numbers wrap around: 1 follows the last.
    let span = u64::from(u32::MAX);
    ((u64::from(number) - 1 + count as u64) % span + 1) as u32
}

/// Returns how far `number` comes after `first`; more than half of all numbers if it comes before.
fn distance(first: u32, number: u32) -> usize {
    let span = u64::from(u32::MAX);
    ((u64::from(number) + span - u64::from(first)) % span) as usize
}

/// A number at least this far after another one counts as before it.
const BEFORE: usize = u32::MAX as usize / 2;

impl Outbox {
    /// Keeps a message, which `encode` writes with the number assigned to it. Returns its bytes.
    pub fn push(&mut self, encode: impl FnOnce(u32, &mut Vec<u8>)) -> &[u8] {
        let mut message = Vec::new();
        encode(after(self.first, self.kept.len()), &mut message);
        self.bytes += message.len();
        self.kept.push_back(message);
        self.kept.back().map_or(&[], Vec::as_slice)
    }

    /// Drops the messages before `next`, which the peer has received.
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
            // A repeated, late report.
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

    /// Returns the total size of these messages in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Drops everything, once the connection has ended.
    pub fn close(&mut self) {
        self.kept = VecDeque::new();
        self.bytes = 0;
    }
}

/// Tracks which messages of the peer have been received.
///
/// A report of receipt may be lost with its stream. It is repeated with the next message, and there
/// is one: the peer's LaneDown for that stream.
#[derive(Debug)]
pub struct Inbox {
    /// The number of the next message.
    next: u32,
    /// Number of messages, and their bytes, whose receipt was not reported to the peer.
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
    /// Returns whether to deliver a message: it is the next, or has no number (0). Otherwise it was
    /// delivered before, from another lane.
    ///
    /// # Errors
    /// A message before this one is missing.
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
        // The peer sends a message again if the report of receipt was lost: report at once.
        self.untold = self.untold.max(RECEIVED_MESSAGES);
        Ok(false)
    }

    /// Returns the number of the next message, to be reported to the peer, if the peer keeps many
    /// messages needlessly, or any and it `asks`.
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

/// Maximum ranges of missed generations that a slot remembers. Each costs the peer one
/// reconnection, and is needed until the peer's LaneDown for it has come: old ones can be dropped.
const MAX_MISSED: usize = 64;

/// One lane of a connection: its stream, and chunks of lost streams.
#[derive(Debug)]
struct Slot<C> {
    /// The highest generation known to either side.
    generation: u32,
    /// The generation of the stream open on this side. ≤ generation
    open: Option<u32>,
    /// Past generations that were never open on this side, as first and last: the peer may have had
    /// those streams, and waits for a LaneDown for them. At most `MAX_MISSED`
    missed: VecDeque<(u32, u32)>,
    /// The peer's LaneDown for the stream open on this side, which is about to be closed.
    heard: Option<Vec<Ending>>,
    /// WRITE chunks of streams closed on this side, until the peer reports which had landed.
    unknown: Vec<(u32, Vec<C>)>,
}

impl<C> Slot<C> {
    /// Returns whether a stream was never open here; true once per stream. The peer reports streams
    /// in order, so older ranges are dropped.
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

/// The outcome of WRITE chunks whose stream was lost.
#[derive(Debug, PartialEq, Eq)]
pub struct Known<C> {
    /// Chunks that have landed, or were refused: they are settled.
    pub settled: Vec<(C, Ending)>,
    /// Chunks that will never land: they must be sent again.
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

/// The consequence of a LaneDown of the peer.
#[derive(Debug, PartialEq, Eq)]
pub enum Heard<C> {
    /// The stream is open here: close it, and send a LaneDown.
    Close,
    /// This side never had the stream, and will not: tell the peer that nothing has landed.
    Never,
    /// The outcome of chunks of this side is known.
    Known(Known<C>),
}

/// Tracks lost streams, and the chunks that were in flight on them.
#[derive(Debug)]
pub struct Losses<C> {
    slots: Vec<Slot<C>>,
}

impl<C: Chunk> Losses<C> {
    /// Creates the record of a connection with `lanes` lanes, whose first streams are open.
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

    /// Records the new stream of a lane; returns false if that stream was given up before it was
    /// opened here, or is outdated by a newer one.
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

    /// Records that this side has closed a stream on which these WRITE chunks were in flight.
    /// Returns the outcomes already known.
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

    /// Processes the peer's LaneDown: it has closed a stream, from which these chunks had landed.
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
            // The peer gave up a newer stream before this side had it: no older one is open there.
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

    /// Returns whether chunks wait for a LaneDown of the peer.
    #[must_use]
    pub fn is_waiting(&self) -> bool {
        self.slots.iter().any(|slot| !slot.unknown.is_empty())
    }

    /// Returns the chunks that wait for a LaneDown of the peer, once the connection has ended.
    pub fn end(&mut self) -> Vec<C> {
        let waiting = self
            .slots
            .iter_mut()
            .flat_map(|slot| slot.unknown.drain(..));
        waiting.flat_map(|(_, writes)| writes).collect()
    }
}

/// Sorts chunks by the outcomes that the peer reported.
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
