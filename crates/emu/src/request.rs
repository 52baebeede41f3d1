//! Requests: 128 bytes each, in the layout of GPUDirect-TCPX, in one array per comm whose addresses
//! are reused. Some callers access them directly, so the fields that they use are kept valid.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ffi::{c_int, c_void};
use std::ops::{Index, IndexMut};
use std::ptr::NonNull;

use crate::error::{Error, Misuse};
use crate::ring::Entry;

/// Number of requests of a TCPX comm.
pub(crate) const TCPX_REQUESTS: usize = 16;
/// Number of requests of a comm of a plain table, as NCCL may assume.
pub(crate) const PLAIN_REQUESTS: usize = 32;

/// `op` of a send.
pub(crate) const OP_SEND: c_int = 0;
/// `op` of a receive.
pub(crate) const OP_RECEIVE: c_int = 1;

/// The ring slot of a receive.
#[repr(C)]
#[derive(Debug)]
pub struct UnpackSlot {
    /// Whether the receive occupies the slot.
    pub active: bool,
    /// Number of the receive; the slot is this modulo 16.
    pub idx: u64,
    /// The slot's entries. Stale until the first header has arrived.
    pub mem: *mut Entry,
    /// The slot's count. Null until the first header has arrived.
    pub cnt: *mut u64,
    /// The count that was published.
    pub cnt_cache: u64,
    /// Unused: bookkeeping of page tokens in the real plugin.
    pub fds_cnt: *mut usize,
    /// Unused.
    pub pgtok_cnts: *mut usize,
    /// Unused.
    pub fds: *mut c_int,
    /// Unused.
    pub pgtoks: *mut c_void,
}

/// One send or receive.
#[repr(C)]
#[derive(Debug)]
pub struct Request {
    /// The comm it belongs to.
    pub comm: *mut c_void,
    /// The buffer.
    pub data: *mut u8,
    /// 0 send, 1 receive.
    pub op: c_int,
    /// Memory kind of the buffer.
    pub mem_type: c_int,
    /// Data socket of the next chunk.
    pub next_sock_id: c_int,
    /// Size of the next chunk.
    pub next_size: c_int,
    /// Bytes passed to data sockets.
    pub offset: u32,
    /// The posted size; for a receive, the true total once the first header has arrived.
    pub size: u32,
    /// Bytes not moved yet.
    pub size_pending: u32,
    /// Unused: −1.
    pub gpu_mem_fd: c_int,
    /// Offset of `data` in its registration.
    pub gpu_mem_off: u64,
    /// For receives.
    pub unpack_slot: UnpackSlot,
}

const _: () = {
    assert!(size_of::<Request>() == 128);
    assert!(std::mem::offset_of!(Request, size) == 36);
    assert!(std::mem::offset_of!(Request, gpu_mem_off) == 48);
    assert!(std::mem::offset_of!(Request, unpack_slot) == 56);
    assert!(std::mem::offset_of!(UnpackSlot, mem) == 16);
    assert!(std::mem::offset_of!(UnpackSlot, cnt) == 24);
    assert!(std::mem::offset_of!(UnpackSlot, cnt_cache) == 32);
};

/// A comm's requests. Request k is in slot k modulo the number of slots.
///
/// ```text
///   released ≤ finished ≤ posted ≤ released + slots
/// ```
#[derive(Debug)]
pub(crate) struct Requests {
    base: NonNull<Request>,
    slots: usize,
    /// Requests posted so far.
    pub(crate) posted: u64,
    /// Requests that `test` has reported as done.
    pub(crate) finished: u64,
    /// Requests whose slot is free again.
    pub(crate) released: u64,
}

impl Requests {
    pub(crate) fn new(slots: usize) -> Self {
        let layout = Self::layout(slots);
        // SAFETY: the layout is not empty.
        let base = unsafe { alloc_zeroed(layout) };
        let Some(base) = NonNull::new(base.cast::<Request>()) else {
            handle_alloc_error(layout)
        };
        Self {
            base,
            slots,
            posted: 0,
            finished: 0,
            released: 0,
        }
    }

    fn layout(slots: usize) -> Layout {
        Layout::array::<Request>(slots).expect("a few requests fit in memory")
    }

    /// Returns the number of free slots.
    pub(crate) fn free(&self) -> usize {
        self.slots - (self.posted - self.released) as usize
    }

    /// Returns the slot of the next request.
    pub(crate) fn vacant(&self) -> Result<u64, Misuse> {
        match self.free() {
            0 => Err(Misuse::SlotsExhausted { slots: self.slots }),
            _ => Ok(self.posted),
        }
    }

    /// Returns the pointer that the caller holds for request `k`.
    pub(crate) fn pointer(&self, k: u64) -> *mut Request {
        // SAFETY: the index is below the number of slots.
        unsafe { self.base.as_ptr().add((k % self.slots as u64) as usize) }
    }

    /// Returns whether `request` is the oldest unfinished one, which is the only one that `test`
    /// accepts.
    pub(crate) fn check_order(&self, request: *mut Request, strict: bool) -> Result<Order, Error> {
        if self.finished < self.posted && request == self.pointer(self.finished) {
            return Ok(Order::Oldest(self.finished));
        }
        let done = (self.released..self.finished).any(|k| request == self.pointer(k));
        match done {
            true if strict => Err(Misuse::TestAfterDone.into()),
            true => Ok(Order::Done),
            false => Err(Misuse::TestOrder.into()),
        }
    }
}

/// The request passed to `test`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// The oldest unfinished request.
    Oldest(u64),
    /// A receive that is done and not consumed.
    Done,
}

impl Index<u64> for Requests {
    type Output = Request;

    fn index(&self, k: u64) -> &Request {
        // SAFETY: the pointer is within the array, which was zeroed (a valid request). The caller
        // serialises calls on one comm, so nothing writes meanwhile.
        unsafe { &*self.pointer(k) }
    }
}

impl IndexMut<u64> for Requests {
    fn index_mut(&mut self, k: u64) -> &mut Request {
        // SAFETY: as above.
        unsafe { &mut *self.pointer(k) }
    }
}

impl Drop for Requests {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with the same layout.
        unsafe { dealloc(self.base.as_ptr().cast(), Self::layout(self.slots)) };
    }
}
