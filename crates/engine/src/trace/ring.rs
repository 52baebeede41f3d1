//! The records of one thread, until they are written.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::record::{Record, WORDS};

/// The number of records in a ring: 1 MiB, enough for some hundred chunks in flight.
pub(super) const RECORDS: usize = 16 << 10;

/// A queue of records: one thread adds to it, another takes from it. Neither waits for the other: a
/// record that finds the ring full is dropped and counted.
///
/// `added` and `taken` count records since the start, and only grow. A slot is written before
/// `added` passes it (release), and read after `added` was seen to have passed it (acquire). The
/// slot is written again only after `taken` has passed it, in the same way.
pub(super) struct Ring {
    slots: Box<[[AtomicU64; WORDS]]>,
    // taken ≤ added ≤ taken + slots.len()
    added: AtomicU64,
    taken: AtomicU64,
    dropped: AtomicU64,
    /// Set once the thread has ended: no more records are added.
    is_over: AtomicBool,
    /// The kernel's ID of the thread.
    pub(super) thread: u32,
}

impl Ring {
    pub(super) fn new(thread: u32, records: usize) -> Self {
        let slots = (0..records).map(|_| [const { AtomicU64::new(0) }; WORDS]);
        Self {
            slots: slots.collect(),
            added: AtomicU64::new(0),
            taken: AtomicU64::new(0),
            dropped: AtomicU64::new(0),
            is_over: AtomicBool::new(false),
            thread,
        }
    }

    /// Adds a record. Only the ring's own thread may call this. Returns true once each time the
    /// ring becomes a quarter full, to wake the writer.
    pub(super) fn push(&self, record: &Record) -> bool {
        let added = self.added.load(Ordering::Relaxed);
        let waiting = added - self.taken.load(Ordering::Acquire);
        let len = self.slots.len() as u64;
        if waiting >= len {
            self.dropped.fetch_add(1, Ordering::Relaxed);
            return false;
        }
        let slot = &self.slots[(added % len) as usize];
        for (cell, word) in slot.iter().zip(record.encode()) {
            cell.store(word, Ordering::Relaxed);
        }
        self.added.store(added + 1, Ordering::Release);
        waiting + 1 == len / 4
    }

    /// Returns whether the ring is at least a quarter full.
    pub(super) fn is_filling(&self) -> bool {
        let taken = self.taken.load(Ordering::Relaxed);
        let waiting = self.added.load(Ordering::Relaxed).saturating_sub(taken);
        waiting >= self.slots.len() as u64 / 4
    }

    /// Counts a record that is not kept. Returns false, as [`Ring::push`] does.
    pub(super) fn skip(&self) -> bool {
        self.dropped.fetch_add(1, Ordering::Relaxed);
        false
    }

    /// Returns the number of records added since the start, for [`Ring::drain`].
    pub(super) fn added(&self) -> u64 {
        self.added.load(Ordering::Acquire)
    }

    /// Takes the records that were there when [`Ring::added`] returned `until`. Returns the number
    /// of records dropped since the last call. Only one thread at a time may call this.
    pub(super) fn drain(&self, until: u64, mut each: impl FnMut(Record)) -> u64 {
        let mut taken = self.taken.load(Ordering::Relaxed);
        while taken < until {
            let slot = &self.slots[(taken % self.slots.len() as u64) as usize];
            let words = std::array::from_fn(|at| slot[at].load(Ordering::Relaxed));
            if let Some(record) = Record::decode(&words) {
                each(record);
            }
            taken += 1;
            // Free each slot at once: a thread in a hurry finds room while other records are
            // written.
            self.taken.store(taken, Ordering::Release);
        }
        self.dropped.swap(0, Ordering::Relaxed)
    }

    /// Notes that the thread has ended.
    pub(super) fn finish(&self) {
        self.is_over.store(true, Ordering::Release);
    }

    /// Returns whether the thread has ended: the next [`Ring::added`] then counts its last records.
    pub(super) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }
}
