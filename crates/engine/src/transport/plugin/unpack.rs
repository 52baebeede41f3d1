//! GPUDirect-TCPX receives: bytes lie in bounce pages, and a ring tells which fragment belongs where.
//!
//! The ring is reached through the device handle alone. Receive `k` of a comm has slot `k mod 16`, valid from the moment
//! its request is done until it is consumed:
//!
//! ```text
//!   device handle ─► { ring, bounce pages, head }        24 bytes, on the device or (an emulator's) on the host
//!   ring           = entries[16][2048] ‖ u64 count[16]
//!   entry          = u32 source (from the bounce pages) ‖ u32 length ‖ u64 target (from the posted address)
//! ```

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use tcpx_cuda::{Device, DeviceBuffer};
use tcpx_ncclnet::{MemoryHandle, MemoryKind, RecvComm};
use tcpx_net::{Cursor, Span};

use super::memory::Own;
use crate::error::Error;
use crate::region::push_merged;
use crate::staging::Queues;

const SLOTS: u64 = 16;
const ENTRIES: usize = 2048;
const HANDLE_BYTES: usize = 24;
const RING_BYTES: usize = SLOTS as usize * (ENTRIES * size_of::<Entry>() + size_of::<u64>());
const COUNTS_AT: usize = SLOTS as usize * ENTRIES * size_of::<Entry>();

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Entry {
    source: u32,
    len: u32,
    target: u64,
}

const _: () = assert!(size_of::<Entry>() == 16 && RING_BYTES == 524_416);

/// The receiving side of an unpack device.
pub(super) struct Unpack {
    ring: usize,
    bounce: usize,
    /// The GPU that the bounce pages are on; none if the CPU can read them.
    pub(super) device: Option<Arc<dyn Device>>,
    /// What receives are posted on. The plugin never writes to it, so they all share it.
    landing: Landing,
    /// The fragments of the receive that is being dealt with, in payload order.
    entries: Vec<Entry>,
    spans: Vec<Span>,
}

enum Landing {
    /// Host memory that the plugin takes for a device's.
    Host(Own),
    Device {
        handle: MemoryHandle,
        _memory: DeviceBuffer,
    },
}

impl Unpack {
    /// Reads the comm's device handle, once. None if receives on this comm land in the posted memory: the plugin takes no
    /// memory of a device that this process has.
    pub(super) fn new(comm: &mut RecvComm, message_bytes: usize) -> Result<Option<Self>, Error> {
        let Some(handle) = comm.device_handle() else {
            return Ok(None);
        };
        let bad = |what| Error::PluginBroke {
            what: format!("its device handle {what}"),
        };
        if handle.size != HANDLE_BYTES || handle.handle.is_null() {
            return Err(bad(format!("has {} bytes", handle.size)));
        }
        let bytes = read_anywhere(handle.handle as usize, HANDLE_BYTES)?;
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[at..at + 8]);
            u64::from_ne_bytes(word) as usize
        };
        let (ring, bounce) = (word(0), word(8));
        if ring == 0 || !ring.is_multiple_of(16) || bounce == 0 {
            return Err(bad(format!(
                "names a ring at {ring:#x} and pages at {bounce:#x}"
            )));
        }
        if tcpx_cuda::locate(ring, RING_BYTES)?.is_some() {
            return Err(bad("names a ring that the CPU cannot read".into()));
        }
        let device = tcpx_cuda::locate(bounce, 1)?;
        let landing = match &device {
            Some(device) => {
                let bytes = message_bytes.next_multiple_of(4096);
                let memory = DeviceBuffer::alloc(device.ordinal(), bytes)?;
                let address = memory.address() as *mut u8;
                // SAFETY: the buffer is kept beside the comm, and dropped after it.
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
            ring,
            bounce,
            device,
            landing,
            entries: Vec::with_capacity(ENTRIES),
            spans: Vec::with_capacity(ENTRIES),
        }))
    }

    /// What receives are posted on.
    pub(super) fn landing(&self) -> &MemoryHandle {
        match &self.landing {
            Landing::Host(own) => &own.handle,
            Landing::Device { handle, .. } => handle,
        }
    }

    /// Finds the fragments of a receive of `len` bytes that is done and not consumed: [`Unpack::spans`] has them in payload order.
    pub(super) fn find(&mut self, number: u64, len: usize) -> Result<(), Error> {
        let slot = (number % SLOTS) as usize;
        let broke = |what| Err(Error::PluginBroke { what });
        let count = (self.ring + COUNTS_AT + slot * size_of::<u64>()) as *const u64;
        // SAFETY: the ring is the comm's, which is open; the slot holds still until the receive is consumed.
        let count = unsafe { count.read_volatile() };
        fence(Ordering::Acquire);
        if count > ENTRIES as u64 {
            return broke(format!(
                "a receive has {count} fragments, {ENTRIES} is the most"
            ));
        }
        let entries = (self.ring + slot * ENTRIES * size_of::<Entry>()) as *const Entry;
        // SAFETY: as above; so many entries were written, and Entry is 16 bytes of plain integers.
        let entries = unsafe { std::slice::from_raw_parts(entries, count as usize) };
        self.entries.clear();
        self.entries.extend_from_slice(entries);
        // Chunks are appended in the order of their completion.
        self.entries.sort_unstable_by_key(|entry| entry.target);
        self.spans.clear();
        let mut end = 0;
        for entry in &self.entries {
            if entry.target != end {
                break;
            }
            end += u64::from(entry.len);
            let source = self.bounce + entry.source as usize;
            // SAFETY: a fragment in the plugin's pages, which are ours to read until the receive is consumed.
            let span = unsafe { Span::new(source as *mut u8, entry.len as usize) };
            push_merged(&mut self.spans, span);
        }
        if end != len as u64 {
            return broke(format!(
                "{count} fragments cover {end} bytes of a message of {len}"
            ));
        }
        Ok(())
    }

    /// Where the bounce pages begin.
    pub(super) fn base(&self) -> usize {
        self.bounce
    }

    /// The fragments that were found last, in payload order.
    pub(super) fn spans(&self) -> &[Span] {
        &self.spans
    }
}

/// Reads a few bytes, wherever they are.
fn read_anywhere(address: usize, len: usize) -> Result<Vec<u8>, Error> {
    let mut bytes = vec![0; len];
    // SAFETY: the plugin says that these bytes are there.
    let span = unsafe { Span::new(address as *mut u8, len) };
    match tcpx_cuda::locate(address, len)? {
        None => {
            span.copy_to(&mut bytes);
        }
        Some(device) => {
            let slot = device.pin(len)?;
            // SAFETY: pinned memory of so many bytes, until the end of this block.
            let pinned = unsafe { Span::new(slot.address(), len) };
            let mut queues = Queues::default();
            let copy = queues.gather_at(device.as_ref(), &[span], Cursor::default(), pinned)?;
            queues.wait(copy)?;
            pinned.copy_to(&mut bytes);
        }
    }
    Ok(bytes)
}
