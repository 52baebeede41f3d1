//! The raw loop: keeps a plugin's request window full, tests the oldest, unpacks, consumes. Its
//! throughput is the floor for anything built on the plugin.
//!
//! It uses a [`NetV7`] table and nothing else of this crate, so it drives any v7 plugin whose
//! bounce memory the CPU can read.

use std::collections::VecDeque;
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

use crate::ring::{RingLayout, SLOTS, UnpackHandle};
use crate::tables::{DeviceHandle, HANDLE_BYTES, NetV7, memory_kind, result};

/// Reports a call with a result other than success.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("{call} returned {code}")]
pub struct CallError {
    /// The member of the table.
    pub call: &'static str,
    /// The result code.
    pub code: c_int,
}

fn check(call: &'static str, code: c_int) -> Result<(), CallError> {
    if code == result::SUCCESS {
        Ok(())
    } else {
        Err(CallError { call, code })
    }
}

/// Calls a member, which is missing only in a broken table.
macro_rules! call {
    ($table:expr, $member:ident($($arg:expr),* $(,)?)) => {
        match $table.$member {
            // SAFETY: the arguments are live and of the types that the table declares; calls on one
            // comm come from the thread that owns this value.
            Some(function) => check(stringify!($member), unsafe { function($($arg),*) }),
            None => Err(CallError { call: stringify!($member), code: -1 }),
        }
    };
}

/// A listening comm and the handle that the sender needs.
pub struct Listening {
    table: &'static NetV7,
    comm: *mut c_void,
    /// The handle, to be carried to the sender.
    pub handle: [u8; HANDLE_BYTES],
}

/// Listens on a device.
///
/// # Errors
/// The plugin's error.
pub fn listen(table: &'static NetV7, dev: c_int) -> Result<Listening, CallError> {
    let mut handle = [0; HANDLE_BYTES];
    let mut comm: *mut c_void = null_mut();
    call!(
        table,
        listen(dev, handle.as_mut_ptr().cast(), &raw mut comm)
    )?;
    Ok(Listening {
        table,
        comm,
        handle,
    })
}

/// The sending end: sends the same buffer repeatedly.
pub struct Sender {
    table: &'static NetV7,
    comm: *mut c_void,
    mhandle: *mut c_void,
    data: *mut u8,
    in_flight: VecDeque<*mut c_void>,
}

/// Connects and registers a page-aligned buffer. `idle` runs between attempts.
///
/// # Errors
/// The plugin's error.
///
/// # Safety
/// `data` is `bytes` long, and stays until the sender is closed.
pub unsafe fn connect(
    table: &'static NetV7,
    dev: c_int,
    handle: &[u8; HANDLE_BYTES],
    (data, bytes): (*mut u8, usize),
    mut idle: impl FnMut(),
) -> Result<Sender, CallError> {
    // Progress is kept inside the handle: one private copy that does not move.
    let mut handle = Box::new(*handle);
    let mut comm: *mut c_void = null_mut();
    while comm.is_null() {
        let mut device_handle = null_mut();
        let handle = handle.as_mut_ptr().cast();
        call!(
            table,
            connect(dev, handle, &raw mut comm, &raw mut device_handle)
        )?;
        idle();
    }
    let mut mhandle = null_mut();
    let (kind, size) = (memory_kind::CUDA, bytes as c_int);
    call!(
        table,
        reg_mr(comm, data.cast(), size, kind, &raw mut mhandle)
    )?;
    Ok(Sender {
        table,
        comm,
        mhandle,
        data,
        in_flight: VecDeque::with_capacity(SLOTS),
    })
}

impl Sender {
    /// Returns the number of outstanding requests.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Posts one send of `bytes` from `offset`; returns false if the plugin is busy.
    ///
    /// # Errors
    /// The plugin's error.
    pub fn post(&mut self, offset: usize, bytes: usize) -> Result<bool, CallError> {
        let mut request = null_mut();
        let data = self.data.wrapping_add(offset).cast();
        let size = bytes as c_int;
        call!(
            self.table,
            isend(self.comm, data, size, 0, self.mhandle, &raw mut request)
        )?;
        if !request.is_null() {
            self.in_flight.push_back(request);
        }
        Ok(!request.is_null())
    }

    /// Tests the oldest send; returns true when it is done.
    ///
    /// # Errors
    /// The plugin's error.
    pub fn poll(&mut self) -> Result<bool, CallError> {
        let Some(&request) = self.in_flight.front() else {
            return Ok(false);
        };
        let mut done = 0;
        call!(self.table, test(request, &raw mut done, null_mut()))?;
        if done != 0 {
            self.in_flight.pop_front();
        }
        Ok(done != 0)
    }

    /// Closes the comm.
    ///
    /// # Errors
    /// The plugin's error.
    pub fn close(self) -> Result<(), CallError> {
        call!(self.table, dereg_mr(self.comm, self.mhandle))?;
        call!(self.table, close_send(self.comm))
    }
}

/// The receiving end: every receive goes to the same buffer.
pub struct Receiver {
    table: &'static NetV7,
    comm: *mut c_void,
    mhandle: *mut c_void,
    data: *mut u8,
    unpack: UnpackHandle,
    /// Number of completed receives.
    received: u64,
    in_flight: VecDeque<*mut c_void>,
}

impl Listening {
    /// Accepts and registers a page-aligned buffer. `idle` runs between attempts.
    ///
    /// # Errors
    /// The plugin's error.
    ///
    /// # Safety
    /// `data` is `bytes` long, and stays until the receiver is closed.
    pub unsafe fn accept(
        self,
        (data, bytes): (*mut u8, usize),
        mut idle: impl FnMut(),
    ) -> Result<Receiver, CallError> {
        let table = self.table;
        let mut device_handle = Box::new(DeviceHandle::ZERO);
        let mut comm: *mut c_void = null_mut();
        while comm.is_null() {
            let mut pointer = &raw mut *device_handle;
            call!(table, accept(self.comm, &raw mut comm, &raw mut pointer))?;
            idle();
        }
        call!(table, close_listen(self.comm))?;
        let mut mhandle = null_mut();
        let (kind, size) = (memory_kind::CUDA, bytes as c_int);
        call!(
            table,
            reg_mr(comm, data.cast(), size, kind, &raw mut mhandle)
        )?;
        // SAFETY: a v7 plugin fills in a pointer to these 24 bytes; the CPU can read them, as the
        // module's documentation requires.
        let unpack = unsafe { device_handle.handle.cast::<UnpackHandle>().read() };
        let in_flight = VecDeque::with_capacity(SLOTS);
        Ok(Receiver {
            table,
            comm,
            mhandle,
            data,
            unpack,
            received: 0,
            in_flight,
        })
    }
}

impl Receiver {
    /// Returns the number of outstanding requests.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Posts one receive of `bytes`; returns false if the plugin is busy.
    ///
    /// # Errors
    /// The plugin's error.
    pub fn post(&mut self, bytes: usize) -> Result<bool, CallError> {
        let mut request = null_mut();
        let mut data = self.data.cast();
        let (mut size, mut tag, mut mhandle) = (bytes as c_int, 0, self.mhandle);
        call!(
            self.table,
            irecv(
                self.comm,
                1,
                &raw mut data,
                &raw mut size,
                &raw mut tag,
                &raw mut mhandle,
                &raw mut request
            )
        )?;
        if !request.is_null() {
            self.in_flight.push_back(request);
        }
        Ok(!request.is_null())
    }

    /// Tests the oldest receive; when it is done, copies its bytes to the buffer at `offset`,
    /// consumes it and returns the number of bytes.
    ///
    /// # Errors
    /// The plugin's error.
    ///
    /// # Safety
    /// The buffer has room for the largest message that is sent, from `offset` on.
    pub unsafe fn poll(&mut self, offset: usize) -> Result<Option<usize>, CallError> {
        let Some(&request) = self.in_flight.front() else {
            return Ok(None);
        };
        let mut done = 0;
        call!(self.table, test(request, &raw mut done, null_mut()))?;
        if done == 0 {
            return Ok(None);
        }
        // SAFETY: the receive is done and not consumed: its slot and pages do not change.
        let bytes = unsafe { self.unpack_to(self.data.wrapping_add(offset)) };
        self.in_flight.pop_front();
        self.received += 1;
        call!(self.table, irecv_consumed(self.comm, 1, request))?;
        Ok(Some(bytes))
    }

    /// Copies the fragments of the next slot to their destinations.
    ///
    /// # Safety
    /// The slot is done and not consumed; `to` has room for all its fragments.
    unsafe fn unpack_to(&self, to: *mut u8) -> usize {
        let slot = (self.received % SLOTS as u64) as usize;
        let ring: *const RingLayout = self.unpack.meta;
        let mut bytes = 0;
        // SAFETY: the caller guarantees that the ring and the pages are readable.
        unsafe {
            let count = (&raw const (*ring).count[slot]).read_volatile();
            for index in 0..count as usize {
                let entry = (&raw const (*ring).entries[slot][index]).read();
                let from = self.unpack.bounce.add(entry.src_off as usize);
                to.add(entry.dst_off as usize)
                    .copy_from_nonoverlapping(from, entry.len as usize);
                bytes += entry.len as usize;
            }
        }
        bytes
    }

    /// Closes the comm.
    ///
    /// # Errors
    /// The plugin's error.
    pub fn close(self) -> Result<(), CallError> {
        call!(self.table, dereg_mr(self.comm, self.mhandle))?;
        call!(self.table, close_recv(self.comm))
    }
}

/// Sends `count` messages of `bytes` on every comm, up to `window` at once.
///
/// # Errors
/// The plugin's first error.
pub fn send_all(
    senders: &mut [Sender],
    bytes: usize,
    count: usize,
    window: usize,
) -> Result<(), CallError> {
    let mut left = vec![(count, count); senders.len()];
    while left.iter().any(|&(_, finish)| finish > 0) {
        for (sender, (post, finish)) in senders.iter_mut().zip(&mut left) {
            while *post > 0 && sender.in_flight() < window && sender.post(0, bytes)? {
                *post -= 1;
            }
            while sender.poll()? {
                *finish -= 1;
            }
        }
    }
    Ok(())
}

/// Receives `count` messages of `bytes` on every comm, up to `window` at once; returns the bytes.
///
/// # Errors
/// The plugin's first error.
///
/// # Safety
/// Every receiver's buffer has room for the largest message that is sent.
pub unsafe fn receive_all(
    receivers: &mut [Receiver],
    bytes: usize,
    count: usize,
    window: usize,
) -> Result<usize, CallError> {
    let mut left = vec![(count, count); receivers.len()];
    let mut total = 0;
    while left.iter().any(|&(_, finish)| finish > 0) {
        for (receiver, (post, finish)) in receivers.iter_mut().zip(&mut left) {
            while *post > 0 && receiver.in_flight() < window && receiver.post(bytes)? {
                *post -= 1;
            }
            // SAFETY: guaranteed by the caller.
            while let Some(received) = unsafe { receiver.poll(0)? } {
                *finish -= 1;
                total += received;
            }
        }
    }
    Ok(total)
}
