//! The hidden half of a receive: its pages, its chunks, and its publication in the ring.

use crate::error::Error;
use crate::faults::Random;
use crate::pages::PAGE;
use crate::receive::Unpack;
use crate::ring::{ENTRIES, Entry, Ring};
use crate::settings::{Reorder, Settings};

/// Replaces consumed entries: a consumer that still reads them copies nothing.
const POISONED: Entry = Entry {
    src_off: 0,
    len: 0,
    dst_off: u64::MAX,
};

/// State of one receive.
#[derive(Debug, Default)]
pub(crate) struct Slot {
    /// Size of the posted buffer.
    pub(crate) posted: u32,
    /// Pages that the receive holds.
    pub(crate) pages: Vec<u32>,
    /// End of each chunk among the entries.
    chunk_ends: Vec<u32>,
    /// Number of fragments laid out, arrived or not.
    pub(crate) planned_entries: usize,
    pub(crate) planned_bytes: u32,
    /// Whether an empty pool was logged.
    pub(crate) told_empty: bool,
    scratch: Vec<Entry>,
}

impl Slot {
    /// Resets the slot for a new receive.
    pub(crate) fn begin(&mut self, posted: u32) {
        self.posted = posted;
        self.chunk_ends.clear();
        self.planned_entries = 0;
        self.planned_bytes = 0;
        self.told_empty = false;
    }

    fn written(&self) -> usize {
        self.chunk_ends.last().map_or(0, |&end| end as usize)
    }

    /// Adds the entries of a complete chunk.
    pub(crate) fn append(&mut self, ring: &Ring, k: u64, entries: &[Entry]) {
        let start = self.written();
        for (index, &entry) in entries.iter().enumerate() {
            ring.write(k, start + index, entry);
            self.pages.push(entry.src_off / PAGE as u32);
        }
        self.chunk_ends.push((start + entries.len()) as u32);
    }

    /// Publishes the receive; returns the count. `short` drops its last byte.
    pub(crate) fn publish(
        &mut self,
        ring: &mut Ring,
        k: u64,
        short: bool,
        settings: &Settings,
    ) -> u64 {
        let mut count = self.written();
        if short && count > 0 {
            // SAFETY: so many entries were written, and none is published.
            let last = unsafe { ring.written(k, count) }
                .iter_mut()
                .max_by_key(|e| e.dst_off);
            if let Some(last) = last {
                last.len -= 1;
            }
        }
        let mut random = Random::new(settings.seed ^ k.rotate_left(32));
        match settings.reorder {
            Reorder::Nothing => {}
            Reorder::Chunks => self.shuffle_chunks(ring, k, &mut random),
            Reorder::Entries => {
                // SAFETY: as above.
                random.shuffle(unsafe { ring.written(k, count) });
            }
        }
        if short && count > 0 {
            count = Self::drop_empty(ring, k, count);
        }
        ring.publish(k, count as u64);
        count as u64
    }

    /// Removes the entry that lost its only byte.
    fn drop_empty(ring: &mut Ring, k: u64, count: usize) -> usize {
        // SAFETY: so many entries were written, and none is published.
        let entries = unsafe { ring.written(k, count) };
        match entries.iter().position(|entry| entry.len == 0) {
            Some(at) => {
                entries[at..].rotate_left(1);
                count - 1
            }
            None => count,
        }
    }

    fn shuffle_chunks(&mut self, ring: &mut Ring, k: u64, random: &mut Random) {
        let count = self.written();
        if self.chunk_ends.len() < 2 {
            return;
        }
        // SAFETY: so many entries were written, and none is published.
        let entries = unsafe { ring.written(k, count) };
        let mut order: Vec<usize> = (0..self.chunk_ends.len()).collect();
        random.shuffle(&mut order);
        self.scratch.clear();
        self.scratch.reserve(ENTRIES);
        for chunk in order {
            let start = chunk
                .checked_sub(1)
                .map_or(0, |before| self.chunk_ends[before] as usize);
            self.scratch
                .extend_from_slice(&entries[start..self.chunk_ends[chunk] as usize]);
        }
        entries.copy_from_slice(&self.scratch);
    }

    /// Releases a consumed receive: overwrites its entries, then returns its pages.
    pub(crate) fn release(
        &mut self,
        unpack: &Unpack,
        k: u64,
        settings: &Settings,
    ) -> Result<(), Error> {
        if settings.poison {
            for index in 0..self.written() {
                unpack.ring.write(k, index, POISONED);
            }
            unpack.pool.poison(&self.pages, unpack.stream.as_ref())?;
        }
        if !settings.stale_count {
            unpack.ring.publish(k, 0);
        }
        unpack.pool.give(&self.pages);
        self.pages.clear();
        Ok(())
    }
}
