//! Counters for tests: `tcpx_emu_counters`.

use std::ffi::{c_int, c_void};
use std::sync::atomic::Ordering::Relaxed;

use crate::comm::Comm;
use crate::emulator::{Emulator, VIOLATIONS};
use crate::entry::guard;
use crate::error::Misuse;

/// A snapshot. Fields of a comm are 0 if none was given.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Calls of this process that violated the contract.
    pub violations: u64,
    /// Open comms of this process.
    pub comms: u64,
    /// Live registrations of this process.
    pub registrations: u64,
    /// Bounce pages of this process.
    pub pages_total: u64,
    /// Free bounce pages.
    pub pages_free: u64,
    /// Free request slots of the comm.
    pub slots_free: u64,
    /// Requests of the comm whose slot is free again (consumed receives, finished sends).
    pub head: u64,
    /// Requests of the comm that `test` reported as done.
    pub finished: u64,
    /// Requests posted on the comm.
    pub tail: u64,
    /// Bytes that the comm moved.
    pub bytes: u64,
    /// Chunks that the comm moved or announced.
    pub chunks: u64,
    /// Number of times that isend or irecv returned no request on purpose.
    pub null_requests: u64,
    /// Number of times that the comm could not read because no page was free.
    pub stalls: u64,
}

/// Fills `out`. `comm` is a send or receive comm that no other call uses meanwhile, or null.
///
/// # Safety
/// `comm` is null or open, `out` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_emu_counters(comm: *mut c_void, out: *mut Counters) -> c_int {
    guard(|| {
        let emulator = Emulator::get()?;
        if out.is_null() {
            return Err(Misuse::Null {
                what: "the counters",
            }
            .into());
        }
        let mut counters = Counters {
            violations: VIOLATIONS.load(Relaxed),
            comms: emulator.comms.load(Relaxed),
            registrations: emulator.registrations.load(Relaxed),
            ..Counters::default()
        };
        for device in &emulator.devices {
            let (total, free) = device.pages();
            counters.pages_total += total as u64;
            counters.pages_free += free as u64;
        }
        // SAFETY: guaranteed by the caller.
        if let Ok(comm) = unsafe { Comm::from_raw(comm) } {
            let (requests, counts) = match comm {
                Comm::Send(comm) => (&comm.requests, comm.counts()),
                Comm::Receive(comm) => (&comm.requests, comm.counts()),
            };
            counters.slots_free = requests.free() as u64;
            counters.head = requests.released;
            counters.finished = requests.finished;
            counters.tail = requests.posted;
            counters.bytes = counts.bytes;
            counters.chunks = counts.chunks;
            counters.null_requests = counts.null_requests;
            counters.stalls = counts.stalls;
        }
        // SAFETY: guaranteed by the caller.
        unsafe { out.write(counters) };
        Ok(())
    })
}
