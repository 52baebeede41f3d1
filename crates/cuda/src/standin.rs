//! A device made of ordinary memory and a thread.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;

use crate::error::Error;
use crate::memory::DeviceMemory;
use crate::pinned::Pinned;
use crate::side::{Dense, List, Ranges, Side, Sources, Targets, measure};
use crate::table::Walk;
use crate::{Current, Device, Entry, Path, Queue, Range, Ticket};

/// Copies in flight on one queue; as many as on a real one.
const TICKETS: u64 = crate::completion::TICKETS as u64;

/// Acts as a device whose memory is ordinary host memory, so that everything above can be tested
/// without a GPU.
///
/// Each queue has a thread that performs the copies in order, each after a small pseudo-random
/// delay: code that treats a copy as done too early sees the old bytes.
#[derive(Debug)]
pub struct StandIn {
    seed: u64,
    fails_after: Option<u64>,
    identity: usize,
    queues: AtomicU64,
    /// Its PCI address and its NUMA node.
    place: Option<(String, u32)>,
}

impl StandIn {
    /// Creates a stand-in whose delays are derived from `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(1);
        Self {
            seed,
            fails_after: None,
            // Odd, unlike the address of any context.
            identity: NEXT.fetch_add(2, Ordering::Relaxed),
            queues: AtomicU64::new(0),
            place: None,
        }
    }

    /// Makes the stand-in report this PCI address and NUMA node.
    #[must_use]
    pub fn at(mut self, pci_bus_id: impl Into<String>, numa_node: u32) -> Self {
        self.place = Some((pci_bus_id.into(), numa_node));
        self
    }

    /// Makes each queue created from now on fail permanently after `copies` copies.
    #[must_use]
    pub fn failing_after(mut self, copies: u64) -> Self {
        self.fails_after = Some(copies);
        self
    }
}

impl Device for StandIn {
    fn queue_by(&self, _: Path) -> Result<Box<dyn Queue>, Error> {
        let index = self.queues.fetch_add(1, Ordering::Relaxed);
        let done = Arc::new(AtomicU64::new(0));
        let (work, incoming) = mpsc::channel::<Vec<Run>>();
        let faults = Arc::new(Mutex::new(VecDeque::new()));
        let worker = Worker {
            done: Arc::clone(&done),
            faults: Arc::clone(&faults),
            // Never zero, which the generator would keep for ever.
            random: (self.seed ^ index.wrapping_mul(0x9e37_79b9_7f4a_7c15)) | 1,
            copies_left: self.fails_after,
        };
        let thread = std::thread::Builder::new()
            .name("tcpx-standin".into())
            .spawn(move || worker.run(&incoming))
            .map_err(|error| Error::HostMemory {
                len: 0,
                reason: error.to_string(),
            })?;
        Ok(Box::new(StandInQueue {
            work: Some(work),
            thread: Some(thread),
            done,
            faults,
            issued: 0,
            fails_after: self.fails_after,
        }))
    }

    fn make_current(&self) -> Result<Current, Error> {
        Ok(Current::nothing())
    }

    fn pin(&self, len: usize) -> Result<Pinned, Error> {
        Pinned::plain(len)
    }

    fn allocate(&self, len: usize) -> Result<DeviceMemory, Error> {
        DeviceMemory::plain(len)
    }

    fn ordinal(&self) -> u32 {
        0
    }

    fn identity(&self) -> usize {
        self.identity
    }

    fn pci_bus_id(&self) -> Option<&str> {
        let (pci_bus_id, _) = self.place.as_ref()?;
        Some(pci_bus_id)
    }

    fn numa_node(&self) -> Option<u32> {
        self.place.as_ref().map(|(_, node)| *node)
    }
}

/// Maximum faults that a queue remembers: more than copies can be in flight.
const MAX_FAULTS: usize = 4 * TICKETS as usize;

/// Copies as `std::ptr::copy` does; returns whether all of the memory was mapped, if the system
/// lets a process check that.
///
/// # Safety
/// Memory mapped at `from` may be read, and memory mapped at `to` may be overwritten.
unsafe fn copy(from: *const u8, to: *mut u8, len: usize) -> bool {
    let part = |address: *mut u8| libc::iovec {
        iov_base: address.cast(),
        iov_len: len,
    };
    let (local, remote) = (part(from.cast_mut()), part(to));
    if from.addr().abs_diff(to.addr()) >= len {
        // SAFETY: the kernel checks both ranges.
        let copied = unsafe {
            libc::process_vm_writev(libc::getpid(), &raw const local, 1, &raw const remote, 1, 0)
        };
        match usize::try_from(copied) {
            Ok(copied) => return copied == len,
            Err(_) => {
                let error = std::io::Error::last_os_error();
                if error.raw_os_error() == Some(libc::EFAULT) {
                    return false;
                }
            }
        }
    }
    // SAFETY: the caller upholds the same contract.
    unsafe { std::ptr::copy(from, to, len) };
    true
}

/// Set in `done` when the queue has failed.
const FAILED: u64 = 1 << 63;

/// One contiguous copy: from, to, length.
type Run = (u64, u64, u64);

struct StandInQueue {
    /// Both are present until `drop`.
    work: Option<mpsc::Sender<Vec<Run>>>,
    thread: Option<JoinHandle<()>>,
    /// The last ticket done, and `FAILED`.
    done: Arc<AtomicU64>,
    /// Tickets whose memory was not mapped, written before they are done.
    faults: Arc<Mutex<VecDeque<u64>>>,
    issued: u64,
    fails_after: Option<u64>,
}

impl StandInQueue {
    fn start(&mut self, runs: Vec<Run>) -> Result<Ticket, Error> {
        let done = self.done.load(Ordering::Acquire);
        if done & FAILED != 0 {
            return Err(self.failure());
        }
        let tickets = self.issued - done;
        if tickets >= TICKETS {
            return Err(Error::QueueFull {
                tickets: TICKETS as usize,
            });
        }
        match self.work.as_ref().map(|work| work.send(runs)) {
            Some(Ok(())) => {}
            // The thread ends early only by failing.
            _ => return Err(self.failure()),
        }
        self.issued += 1;
        Ok(Ticket(self.issued))
    }

    fn failure(&self) -> Error {
        Error::Injected {
            copies: self.fails_after.unwrap_or_default(),
        }
    }
}

fn runs<F: Side, T: Side>(mut walk: Walk<F, T>) -> Vec<Run> {
    std::iter::from_fn(|| walk.next_run(u64::MAX)).collect()
}

impl Queue for StandInQueue {
    unsafe fn gather(&mut self, from: &[Range], to: *mut u8) -> Result<Ticket, Error> {
        let bytes = measure::<Ranges>(from)?.bytes;
        self.start(runs(Walk::new(
            List::<Ranges>::new(from),
            Dense(to.expose_provenance() as u64),
            bytes,
        )))
    }

    unsafe fn scatter(&mut self, from: *const u8, to: &[Range]) -> Result<Ticket, Error> {
        let bytes = measure::<Ranges>(to)?.bytes;
        self.start(runs(Walk::new(
            Dense(from.expose_provenance() as u64),
            List::<Ranges>::new(to),
            bytes,
        )))
    }

    unsafe fn copy(&mut self, from: &[Range], to: &[Range]) -> Result<Ticket, Error> {
        let (bytes, target) = (measure::<Ranges>(from)?.bytes, measure::<Ranges>(to)?.bytes);
        if bytes != target {
            return Err(Error::Lengths {
                from: bytes,
                to: target,
            });
        }
        self.start(runs(Walk::new(
            List::<Ranges>::new(from),
            List::<Ranges>::new(to),
            bytes,
        )))
    }

    unsafe fn unpack(
        &mut self,
        from_base: usize,
        to_base: usize,
        entries: &[Entry],
    ) -> Result<Ticket, Error> {
        let bytes = measure::<Sources>(entries)?.bytes;
        measure::<Targets>(entries)?;
        let (from, to) = (List::<Sources>::new(entries), List::<Targets>::new(entries));
        let mut runs = runs(Walk::new(from, to, bytes));
        for (from, to, _) in &mut runs {
            *from = from.wrapping_add(from_base as u64);
            *to = to.wrapping_add(to_base as u64);
        }
        self.start(runs)
    }

    fn is_done(&mut self, ticket: Ticket) -> Result<bool, Error> {
        let done = self.done.load(Ordering::Acquire);
        if ticket.0 <= done & !FAILED {
            return match self.faults.lock().contains(&ticket.0) {
                true => Err(Error::NotMapped),
                false => Ok(true),
            };
        }
        if done & FAILED != 0 {
            return Err(self.failure());
        }
        Ok(false)
    }
}

impl Drop for StandInQueue {
    fn drop(&mut self) {
        // Ends the thread once it has done its queued work.
        self.work = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            // Logged once for each queue: this is its end.
            tracing::error!(
                remedy = "report this with what the thread has written to stderr",
                "a stand-in's thread ended by a panic"
            );
        }
    }
}

struct Worker {
    done: Arc<AtomicU64>,
    faults: Arc<Mutex<VecDeque<u64>>>,
    random: u64,
    copies_left: Option<u64>,
}

impl Worker {
    fn run(mut self, incoming: &mpsc::Receiver<Vec<Run>>) {
        for runs in incoming {
            self.delay();
            if let Some(left) = &mut self.copies_left {
                if *left == 0 {
                    self.done.fetch_or(FAILED, Ordering::Release);
                    return;
                }
                *left -= 1;
            }
            let mut is_whole = true;
            for (from, to, len) in runs {
                let from = std::ptr::with_exposed_provenance::<u8>(from as usize);
                let to = std::ptr::with_exposed_provenance_mut::<u8>(to as usize);
                // SAFETY: the caller that started the copy allows the use of both ranges until it
                // is done.
                is_whole &= unsafe { copy(from, to, len as usize) };
            }
            if !is_whole {
                let mut faults = self.faults.lock();
                // Callers poll soon after, so old faults can be dropped.
                if faults.len() == MAX_FAULTS {
                    faults.pop_front();
                }
                faults.push_back(self.done.load(Ordering::Relaxed) + 1);
            }
            self.done.fetch_add(1, Ordering::Release);
        }
    }

    /// Waits: mostly briefly, sometimes long, seldom not at all.
    fn delay(&mut self) {
        // Marsaglia's xorshift.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        match self.random % 16 {
            0 => {}
            1..=9 => std::thread::yield_now(),
            10..=14 => std::thread::sleep(Duration::from_micros(self.random >> 32 & 0x3f)),
            _ => std::thread::sleep(Duration::from_micros(self.random >> 32 & 0x1ff)),
        }
    }
}
