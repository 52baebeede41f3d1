//! Memory that a comm may use: registrations of regions, and slots.

use std::collections::HashMap;
use std::sync::Arc;

use tcpx_cuda::{Device, Pinned, StandIn};
use tcpx_ncclnet::{Comm, Direction, MemoryHandle, MemoryKind};
use tcpx_net::Span;

use crate::error::Error;
use crate::log::limited;
use crate::memory::{MemId, Memory, Place, SlotList};

/// Size of the windows in which regions are registered; older plugins take sizes as `int`.
const WINDOW_BYTES: usize = 1 << 30;

/// GPUDirect-TCPX accepts device memory only in pages of this size.
const CUDA_PAGE: usize = 4096;

/// Regions registered on one comm, each at its first use.
pub(super) struct Registrations {
    /// Windows overlap by this length, so that no message crosses the end of a window.
    message_bytes: usize,
    windows: HashMap<(MemId, usize), Window>,
    /// Position of the last region found among the regions of a chunk:
    /// the next message usually shares it.
    hint: usize,
}

struct Window {
    memory: Arc<Memory>,
    start: usize,
    /// `None` if the plugin refuses the memory.
    handle: Option<MemoryHandle>,
    /// True once the memory was revoked; the registration is about to be removed.
    condemned: bool,
}

impl Registrations {
    pub(super) fn new(message_bytes: usize) -> Self {
        Self {
            message_bytes,
            windows: HashMap::new(),
            hint: 0,
        }
    }

    /// Returns the registration that contains `span`, a message of the chunk at `place`, and the
    /// offset in it. Returns `None` if the plugin cannot use the memory directly.
    pub(super) fn find<D: Direction>(
        &mut self,
        comm: &mut Comm<D>,
        place: &Place<'_>,
        span: Span,
    ) -> Option<(&MemoryHandle, usize)> {
        let memory = self.owner(place.memory, span)?;
        let offset = span.address() - memory.span.address();
        let index = offset / WINDOW_BYTES;
        let message_bytes = self.message_bytes;
        let window = self.windows.entry((memory.id, index)).or_insert_with(|| {
            let start = index * WINDOW_BYTES;
            let len = (memory.span.len() - start).min(WINDOW_BYTES + message_bytes);
            Window {
                start: memory.span.address() + start,
                handle: register(comm, memory.span.address() + start, len, place.device),
                memory: Arc::clone(memory),
                condemned: false,
            }
        });
        let handle = window.handle.as_ref()?;
        let offset = span.address() - window.start;
        // The last page of device memory may be missing.
        (offset + span.len() <= handle.bytes()).then_some((handle, offset))
    }

    fn owner<'a>(&mut self, memory: &'a [Arc<Memory>], span: Span) -> Option<&'a Arc<Memory>> {
        let count = memory.len();
        let hint = if self.hint < count { self.hint } else { 0 };
        let found = (hint..count)
            .chain(0..hint)
            .find(|index| contains(memory[*index].root().span, span))?;
        self.hint = found;
        Some(memory[found].root())
    }

    /// Marks the registrations of revoked memory.
    pub(super) fn condemn(&mut self) {
        for window in self.windows.values_mut() {
            window.condemned |= !window.memory.is_live();
        }
    }

    /// Removes the marked registrations. None of their memory is in use.
    pub(super) fn purge<D: Direction>(&mut self, comm: &mut Comm<D>) {
        let condemned = self.windows.extract_if(|_, window| window.condemned);
        for (_, window) in condemned {
            if let Some(handle) = window.handle
                && let Err(error) = comm.deregister(handle)
            {
                limited!(
                    WARN,
                    %error,
                    remedy = "see the plugin's own lines; the memory stays pinned until the process ends",
                    "a plugin cannot deregister memory"
                );
            }
        }
    }
}

fn contains(whole: Span, part: Span) -> bool {
    part.address() >= whole.address()
        && part.address() + part.len() <= whole.address() + whole.len()
}

fn register<D: Direction>(
    comm: &mut Comm<D>,
    address: usize,
    len: usize,
    device: Option<&Arc<dyn Device>>,
) -> Option<MemoryHandle> {
    let (kind, len) = match device {
        None => (MemoryKind::Host, len),
        Some(_) if !address.is_multiple_of(CUDA_PAGE) => return None,
        Some(_) => (MemoryKind::Cuda, len - len % CUDA_PAGE),
    };
    if len == 0 || !comm.properties().reaches(kind) {
        return None;
    }
    // GPUDirect-TCPX assumes that the memory belongs to the current GPU.
    let current = device.map(|device| device.make_current()).transpose();
    let _current = current
        .inspect_err(|error| tracing::debug!(%error, len, "memory goes through slots"))
        .ok()?;
    // SAFETY: the memory is a region that is registered with the session. It stays valid until its
    // revocation has waited for the requests that use it and purged the window, or has closed the
    // comm.
    let registered = unsafe { comm.register(address as *mut u8, len, kind) };
    registered
        .inspect_err(|error| tracing::debug!(%error, len, "memory goes through slots"))
        .ok()
}

/// Total size of the slots that the CPU fills and empties, per comm. Kept small, so that bytes just
/// written are still in the cache when they are read.
const HOST_SLOTS_BYTES: usize = 1 << 20;

/// Minimum number of such slots, for messages of any length: one is filled or emptied while the
/// plugin has the others.
const MIN_HOST_SLOTS: usize = 4;

/// The engine's own memory, divided into slots for messages. Allocated at first use.
pub(super) struct Slots {
    slot_bytes: usize,
    /// Number of slots for device copies: as many as the comm has requests. CPU copies have fewer.
    count: usize,
    /// Slots for host memory, and for device memory.
    slabs: [Option<Registered>; 2],
}

/// Slots and their registration.
struct Registered {
    slots: SlotList,
    /// Start of the registration.
    base: usize,
    handle: MemoryHandle,
}

/// One slot, until it is returned.
#[derive(Debug)]
pub(super) struct Slot {
    slab: usize,
    address: usize,
}

impl Slot {
    pub(super) fn span(&self, len: usize) -> Span {
        // SAFETY: the caller owns the slot until it is returned, and the slots outlive it.
        unsafe { Span::new(self.address as *mut u8, len) }
    }
}

impl Slots {
    pub(super) fn new(slot_bytes: usize, count: usize) -> Self {
        Self {
            slot_bytes,
            count,
            slabs: [None, None],
        }
    }

    /// Takes a slot that `device` can copy to and from; returns `None` while all are in use.
    pub(super) fn take<D: Direction>(
        &mut self,
        comm: &mut Comm<D>,
        device: Option<&Arc<dyn Device>>,
    ) -> Result<Option<Slot>, Error> {
        let which = usize::from(device.is_some());
        if self.slabs[which].is_none() {
            let count = match device {
                Some(_) => self.count,
                None => (HOST_SLOTS_BYTES / self.slot_bytes)
                    .max(MIN_HOST_SLOTS)
                    .min(self.count),
            };
            let bytes = self.slot_bytes * count;
            let memory = match device {
                Some(device) => device.pin(bytes)?,
                None => StandIn::new(0).pin(bytes)?,
            };
            // SAFETY: the slots are dropped after the comm that uses them.
            let handle = unsafe { comm.register(memory.address(), bytes, MemoryKind::Host) }?;
            let base = memory.address() as usize;
            let mut slots = SlotList::new(self.slot_bytes);
            slots.add(memory);
            self.slabs[which] = Some(Registered {
                slots,
                base,
                handle,
            });
        }
        let slab = self.slabs[which].as_mut();
        let taken = slab.and_then(|slab| slab.slots.take());
        Ok(taken.map(|address| Slot {
            slab: which,
            address,
        }))
    }

    /// Returns the registration of a slot, and the offset in it.
    pub(super) fn handle(&self, slot: &Slot) -> Option<(&MemoryHandle, usize)> {
        let slab = self.slabs[slot.slab].as_ref()?;
        Some((&slab.handle, slot.address - slab.base))
    }

    pub(super) fn give(&mut self, slot: Slot) {
        if let Some(slab) = &mut self.slabs[slot.slab] {
            slab.slots.give(slot.address);
        }
    }
}

/// Registered memory for one purpose.
pub(super) struct Own {
    memory: Pinned,
    pub(super) handle: MemoryHandle,
}

impl Own {
    pub(super) fn new<D: Direction>(
        comm: &mut Comm<D>,
        device: Option<&Arc<dyn Device>>,
        bytes: usize,
        kind: MemoryKind,
    ) -> Result<Self, Error> {
        let bytes = bytes.next_multiple_of(CUDA_PAGE);
        let memory = match device {
            Some(device) => device.pin(bytes)?,
            None => StandIn::new(0).pin(bytes)?,
        };
        // SAFETY: the owner drops this value after the comm.
        let handle = unsafe { comm.register(memory.address(), bytes, kind) }?;
        Ok(Self { memory, handle })
    }

    pub(super) fn address(&self) -> *mut u8 {
        self.memory.address()
    }

    /// Removes the registration. No request uses the memory any more.
    pub(super) fn end<D: Direction>(self, comm: &mut Comm<D>) {
        if let Err(error) = comm.deregister(self.handle) {
            limited!(
                WARN,
                %error,
                remedy = "see the plugin's own lines; the memory stays pinned until the process ends",
                "a plugin cannot deregister memory"
            );
        }
    }
}
