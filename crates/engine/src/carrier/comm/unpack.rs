//! GPUDirect-TCPX receives: bytes arrive in bounce pages, and a ring lists the fragments.
//!
//! The ring is accessible only through the device handle. Receive `k` of a comm has slot
//! `k mod 16`, valid from the completion of its request until it is consumed:
//!
//! ```text
//!   device handle ─► { ring, bounce pages, head }   24 bytes, on the device or (emulator) the host
//!   ring           = entries[16][2048] ‖ u64 count[16]
//!   entry          = u32 source (from the bounce pages) ‖ u32 length
//!                    ‖ u64 target (from the posted address)
//! ```

use std::mem::offset_of;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use tcpx_cuda::{Device, DeviceBuffer, Entry};
use tcpx_ncclnet::{MemoryHandle, MemoryKind, RecvComm};
use tcpx_net::{Cursor, Span};

use super::memory::Own;
use crate::error::{Error, PluginFault};
use crate::memory::{Copier, push_merged};

const SLOTS: u64 = 16;
const ENTRIES: usize = 2048;
const HANDLE_BYTES: usize = 24;
const RING_BYTES: usize = SLOTS as usize * (ENTRIES * size_of::<Entry>() + size_of::<u64>());
const COUNTS_AT: usize = SLOTS as usize * ENTRIES * size_of::<Entry>();

// The plugin writes the entries of its ring with this layout.
const _: () = assert!(offset_of!(Entry, from) == 0 && offset_of!(Entry, len) == 4);
const _: () = assert!(offset_of!(Entry, to) == 8 && size_of::<Entry>() == 16);
const _: () = assert!(RING_BYTES == 524_416);

/// The receiving side of an unpack device.
pub(super) struct Unpack {
    pub(super) ring: Ring,
    /// The GPU that holds the bounce pages; `None` if the CPU can read them.
    pub(super) device: Option<Arc<dyn Device>>,
    /// Memory on which receives are posted.
    /// The plugin never writes to it, so all receives share it.
    landing: Landing,
}

/// The plugin's ring, and the fragments found last.
pub(super) struct Ring {
    address: usize,
    bounce: usize,
    /// The fragments of one receive, in payload order.
    entries: Vec<Entry>,
    spans: Vec<Span>,
}

enum Landing {
    /// Host memory that the plugin treats as device memory.
    Host(Own),
    Device {
        handle: MemoryHandle,
        _memory: DeviceBuffer,
    },
}

impl Unpack {
    /// Reads the comm's device handle, once. Returns `None` if receives on this comm land in the
    /// posted memory, because the plugin supports no device memory of this process.
    pub(super) fn new(comm: &mut RecvComm, message_bytes: usize) -> Result<Option<Self>, Error> {
        let Some(handle) = comm.device_handle() else {
            return Ok(None);
        };
        let broke = |fault| Err(Error::PluginBroke(fault));
        if handle.size != HANDLE_BYTES {
            return broke(PluginFault::HandleSize {
                found: handle.size,
                expected: HANDLE_BYTES,
            });
        }
        if handle.handle.is_null() {
            return broke(PluginFault::HandleNull);
        }
        let bytes = read_anywhere(handle.handle as usize, HANDLE_BYTES)?;
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[at..at + 8]);
            u64::from_ne_bytes(word) as usize
        };
        let (ring, bounce) = (word(0), word(8));
        if ring == 0 || !ring.is_multiple_of(16) || bounce == 0 {
            let pages = bounce;
            return broke(PluginFault::HandleAddresses { ring, pages });
        }
        if tcpx_cuda::locate(ring, RING_BYTES)?.is_some() {
            return broke(PluginFault::RingOnDevice { ring });
        }
        let device = tcpx_cuda::locate(bounce, 1)?;
        tracing::debug!(
            gpu = device.as_ref().map(|device| device.ordinal()),
            "a comm receives into bounce pages"
        );
        let landing = match &device {
            Some(device) => {
                let _current = device.make_current()?;
                let bytes = message_bytes.next_multiple_of(4096);
                let memory = DeviceBuffer::alloc(device.ordinal(), bytes + 4096)?;
                let address = memory.address().next_multiple_of(4096) as *mut u8;
                // SAFETY: the buffer is stored beside the comm, and dropped after it.
                let handle = unsafe { comm.register(address, bytes, MemoryKind::Cuda) }?;
                Landing::Device {
                    handle,
                    _memory: memory,
                }
            }
            None => match Own::new(comm, None, message_bytes, MemoryKind::Cuda) {
                Ok(own) => Landing::Host(own),
                Err(error) => {
                    tracing::debug!(%error, "an unpack device receives into host memory");
                    return Ok(None);
                }
            },
        };
        Ok(Some(Self {
            // SAFETY: the plugin's ring and pages exist as long as the comm.
            ring: unsafe { Ring::new(ring, bounce) },
            device,
            landing,
        }))
    }

    /// Returns the memory on which receives are posted.
    pub(super) fn landing(&self) -> &MemoryHandle {
        match &self.landing {
            Landing::Host(own) => &own.handle,
            Landing::Device { handle, .. } => handle,
        }
    }
}

impl Ring {
    /// # Safety
    /// A ring at `address` and pages at `bounce` must exist as long as this value is used, and
    /// [`Ring::find`] may be called only for a receive that is done and not consumed.
    unsafe fn new(address: usize, bounce: usize) -> Self {
        Self {
            address,
            bounce,
            entries: Vec::with_capacity(ENTRIES),
            spans: Vec::with_capacity(ENTRIES),
        }
    }

    /// Finds the fragments of a receive of `len` bytes that is done and not consumed:
    /// [`Ring::spans`] then returns them in payload order.
    pub(super) fn find(&mut self, number: u64, len: usize) -> Result<(), Error> {
        let slot = (number % SLOTS) as usize;
        let broke = |fault| Err(Error::PluginBroke(fault));
        let count = (self.address + COUNTS_AT + slot * size_of::<u64>()) as *const u64;
        // SAFETY: the ring belongs to the comm, which is open; the slot does not change until the
        // receive is consumed.
        let count = unsafe { count.read_volatile() };
        fence(Ordering::Acquire);
        if count > ENTRIES as u64 {
            let max = ENTRIES as u64;
            return broke(PluginFault::TooManyFragments { count, max });
        }
        let entries = (self.address + slot * ENTRIES * size_of::<Entry>()) as *const Entry;
        // SAFETY: as above; the plugin has written `count` entries,
        // and Entry is 16 bytes of plain integers.
        let entries = unsafe { std::slice::from_raw_parts(entries, count as usize) };
        self.entries.clear();
        self.entries.extend_from_slice(entries);
        // Chunks are appended in the order of their completion.
        self.entries.sort_unstable_by_key(|entry| entry.to);
        self.spans.clear();
        let mut end = 0;
        // Empty fragments are ignored, wherever their target.
        for entry in self.entries.iter().filter(|entry| entry.len > 0) {
            if entry.to != end {
                break;
            }
            end += u64::from(entry.len);
            if u64::from(entry.from) + u64::from(entry.len) > 1 << 32 {
                return broke(PluginFault::FragmentOutOfBounds {
                    offset: entry.from,
                    len: entry.len,
                });
            }
            let source = self.bounce + entry.from as usize;
            // SAFETY: the fragment lies in the plugin's pages,
            // which may be read until the receive is consumed.
            let span = unsafe { Span::new(source as *mut u8, entry.len as usize) };
            push_merged(&mut self.spans, span);
        }
        if end != len as u64 {
            return broke(PluginFault::FragmentsMismatch {
                count,
                covered: end,
                len: len as u64,
            });
        }
        Ok(())
    }

    /// Returns the start of the bounce pages.
    pub(super) fn base(&self) -> usize {
        self.bounce
    }

    /// Returns the fragments found last, in payload order.
    pub(super) fn spans(&self) -> &[Span] {
        &self.spans
    }
}

/// Reads a few bytes from host or device memory.
fn read_anywhere(address: usize, len: usize) -> Result<Vec<u8>, Error> {
    let mut bytes = vec![0; len];
    // SAFETY: the plugin declares that these bytes exist.
    let span = unsafe { Span::new(address as *mut u8, len) };
    match tcpx_cuda::locate(address, len)? {
        None => {
            span.copy_to(&mut bytes)?;
        }
        Some(device) => {
            let slot = device.pin(len)?;
            // SAFETY: pinned memory of this length, valid until the end of this block.
            let pinned = unsafe { Span::new(slot.address(), len) };
            let mut copier = Copier::default();
            let copy = copier.gather(device.as_ref(), &[span], Cursor::default(), pinned)?;
            copier.wait(copy)?;
            pinned.copy_to(&mut bytes)?;
        }
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A ring in ordinary memory, with pages of known bytes.
    struct Fake {
        memory: Vec<u128>,
        pages: Vec<u8>,
    }

    impl Fake {
        fn new() -> Self {
            Self {
                memory: vec![0; RING_BYTES.div_ceil(16)],
                pages: (0..100_000).map(|i| (i % 251) as u8).collect(),
            }
        }

        fn ring(&self) -> Ring {
            // SAFETY: both live as long as the test that uses them.
            unsafe { Ring::new(self.memory.as_ptr() as usize, self.pages.as_ptr() as usize) }
        }

        fn put(&mut self, number: u64, entries: &[Entry]) {
            let slot = (number % SLOTS) as usize;
            for (index, entry) in entries.iter().enumerate() {
                let word = u128::from(entry.from)
                    | u128::from(entry.len) << 32
                    | u128::from(entry.to) << 64;
                self.memory[slot * ENTRIES + index] = word;
            }
            self.set_count(number, entries.len() as u64);
        }

        fn set_count(&mut self, number: u64, count: u64) {
            let slot = (number % SLOTS) as usize;
            let word = &mut self.memory[(COUNTS_AT + slot * 8) / 16];
            let shift = (slot % 2) * 64;
            *word = *word & !(u128::from(u64::MAX) << shift) | u128::from(count) << shift;
        }

        fn bytes(&self, ring: &Ring) -> Vec<u8> {
            let mut all = Vec::new();
            for span in ring.spans() {
                let at = all.len();
                all.resize(at + span.len(), 0);
                span.copy_to(&mut all[at..]).unwrap();
            }
            all
        }
    }

    fn entry(from: u32, len: u32, to: u64) -> Entry {
        Entry { from, len, to }
    }

    #[test]
    fn fragments_are_put_into_the_order_of_the_payload() {
        let mut fake = Fake::new();
        // The 19th receive has slot 3; an older receive used the slot before.
        fake.put(3, &[entry(0, 4096, 0); 7]);
        fake.put(
            19,
            &[
                entry(8192, 10, 30),
                entry(4099, 30, 0),
                entry(50_001, 1, 40),
            ],
        );
        let mut ring = fake.ring();
        ring.find(19, 41).unwrap();
        let expected = [
            &fake.pages[4099..4129],
            &fake.pages[8192..8202],
            &fake.pages[50_001..50_002],
        ];
        assert_eq!(fake.bytes(&ring), expected.concat());
        // A message of no bytes has no fragments.
        fake.put(20, &[]);
        ring.find(20, 0).unwrap();
        assert!(ring.spans().is_empty());
        // Empty fragments are ignored.
        for (at, empty) in [(21, entry(500, 0, 20)), (22, entry(900, 0, 7))] {
            fake.put(at, &[empty, entry(0, 20, 0)]);
            ring.find(at, 20).unwrap();
            assert_eq!(ring.spans().len(), 1);
            assert_eq!(fake.bytes(&ring), &fake.pages[..20]);
        }
    }

    #[test]
    fn adjacent_fragments_are_merged() {
        let mut fake = Fake::new();
        fake.put(
            0,
            &[
                entry(4096, 4096, 4096),
                entry(0, 4096, 0),
                entry(20_480, 5, 8192),
            ],
        );
        let mut ring = fake.ring();
        ring.find(0, 8197).unwrap();
        assert_eq!(ring.spans().len(), 2);
    }

    #[test]
    fn fragments_that_do_not_cover_the_message_are_refused() {
        let mut fake = Fake::new();
        let gap = [entry(0, 10, 0), entry(100, 10, 11)];
        let overlap = [entry(0, 10, 0), entry(100, 10, 9)];
        let short = [entry(0, 19, 0)];
        let long = [entry(0, 21, 0)];
        let twice = [entry(0, 10, 0), entry(0, 10, 0)];
        let past_offsets = [entry(u32::MAX - 18, 20, 0)];
        let covered = |count, covered| PluginFault::FragmentsMismatch {
            count,
            covered,
            len: 20,
        };
        let out_of_bounds = PluginFault::FragmentOutOfBounds {
            offset: u32::MAX - 18,
            len: 20,
        };
        for (entries, fault) in [
            (&gap[..], covered(2, 10)),
            (&overlap, covered(2, 10)),
            (&short, covered(1, 19)),
            (&long, covered(1, 21)),
            (&twice, covered(2, 10)),
            (&past_offsets, out_of_bounds),
            (&[], covered(0, 0)),
        ] {
            fake.put(1, entries);
            assert_eq!(fake.ring().find(1, 20), Err(Error::PluginBroke(fault)));
        }
        let (count, max) = (ENTRIES as u64 + 1, ENTRIES as u64);
        fake.set_count(1, count);
        let fault = PluginFault::TooManyFragments { count, max };
        assert_eq!(fake.ring().find(1, 20), Err(Error::PluginBroke(fault)));
    }
}
