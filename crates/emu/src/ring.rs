//! The ring that a receive comm shows to code on the device: 16 slots, each with up to 2048 entries
//! that map bytes of the bounce pages to positions in the posted buffer.
//!
//! ```text
//!   UnpackHandle (24 bytes, device memory)        Ring (524 416 bytes)
//!   ┌ meta ──────────────────────────────────────► entries[16][2048] │ count[16]
//!   ├ bounce ───► page 0 │ page 1 │ …                 └ { src_off, len, dst_off }
//!   └ head: u64::MAX, advanced by the consumer
//! ```

use std::mem::offset_of;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use crate::error::Error;
use crate::memory::{Block, Memory};

/// Slots in the ring; receive k uses slot k modulo 16.
pub const SLOTS: usize = 16;
/// Entries in a slot.
pub const ENTRIES: usize = 2048;

/// One fragment of a received message.
#[repr(C, align(16))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Entry {
    /// Offset of the fragment from the bounce base.
    pub src_off: u32,
    /// Its length.
    pub len: u32,
    /// Offset of its destination from the posted pointer.
    pub dst_off: u64,
}

/// The ring in memory.
#[repr(C)]
pub struct RingLayout {
    /// Entries of each slot.
    pub entries: [[Entry; ENTRIES]; SLOTS],
    /// Number of valid entries. Trust it only between "done" and `irecvConsumed`.
    pub count: [u64; SLOTS],
}

/// The target of a device handle.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct UnpackHandle {
    /// The ring, as the device sees it.
    pub meta: *const RingLayout,
    /// The first bounce page.
    pub bounce: *const u8,
    /// The consumer's own counter: advanced before each unpack. The plugin never reads it.
    pub head: u64,
}

const _: () = {
    assert!(size_of::<Entry>() == 16);
    assert!(size_of::<RingLayout>() == 524_416);
    assert!(offset_of!(RingLayout, count) == 524_288);
    assert!(size_of::<UnpackHandle>() == 24);
};

/// The plugin's side of one comm's ring.
#[derive(Debug)]
pub(crate) struct Ring {
    /// Host memory that the device can read.
    memory: Block,
    /// The 24 bytes.
    handle: Block,
}

impl Ring {
    pub(crate) fn new(memory: &Memory, bounce: u64) -> Result<Self, Error> {
        let ring = memory.mapped(size_of::<RingLayout>(), "a ring")?;
        let handle = memory.device(size_of::<UnpackHandle>(), "a device handle")?;
        let value = UnpackHandle {
            meta: ring.device_address() as *const RingLayout,
            bounce: bounce as *const u8,
            head: u64::MAX,
        };
        // SAFETY: a plain struct without padding (asserted above: 24 bytes in three words).
        let bytes = unsafe {
            std::slice::from_raw_parts((&raw const value).cast::<u8>(), size_of_val(&value))
        };
        memory.upload(&handle, bytes)?;
        Ok(Self {
            memory: ring,
            handle,
        })
    }

    /// Returns the address of the device handle's 24 bytes.
    pub(crate) fn handle_address(&self) -> u64 {
        self.handle.device_address()
    }

    /// Returns the first entry of receive `k`.
    pub(crate) fn entries(&self, k: u64) -> *mut Entry {
        let slot = (k % SLOTS as u64) as usize;
        // SAFETY: within the block, which is as large as a `RingLayout`.
        unsafe { self.memory.host().cast::<Entry>().add(slot * ENTRIES) }
    }

    /// Returns the count of receive `k`.
    pub(crate) fn count(&self, k: u64) -> *mut u64 {
        let slot = (k % SLOTS as u64) as usize;
        // SAFETY: as above.
        unsafe {
            self.memory
                .host()
                .add(offset_of!(RingLayout, count))
                .cast::<u64>()
                .add(slot)
        }
    }

    /// Writes entry `index` of receive `k`. Nothing may read it before the count is published.
    pub(crate) fn write(&self, k: u64, index: usize, entry: Entry) {
        assert!(index < ENTRIES, "the caller keeps within the slot");
        // SAFETY: within the slot; consumers read it only after `publish`, and not after the slot
        // was consumed.
        unsafe { self.entries(k).add(index).write(entry) };
    }

    /// Publishes `count` entries of receive `k`, together with their bytes.
    pub(crate) fn publish(&self, k: u64, count: u64) {
        // SAFETY: aligned, within the block, and only ever accessed atomically or by a device.
        unsafe { AtomicU64::from_ptr(self.count(k)) }.store(count, Ordering::Release);
        // A device reads over the bus: the store must have left this core.
        fence(Ordering::SeqCst);
    }

    /// Returns the entries of receive `k` as a slice, for shuffling.
    ///
    /// # Safety
    /// The receive is not published, and `len` entries were written.
    pub(crate) unsafe fn written(&mut self, k: u64, len: usize) -> &mut [Entry] {
        assert!(len <= ENTRIES);
        // SAFETY: within the slot and initialised, as the caller guarantees; `&mut self` excludes
        // other access.
        unsafe { std::slice::from_raw_parts_mut(self.entries(k), len) }
    }
}
