//! GPU memory for tcpx: locates memory, and copies between it and pinned host memory.
//!
//! The CUDA driver is loaded at run time, never linked: the same binary runs where there is no GPU.
//!
//! - [`locate`]: finds the device of an address. [`device`], [`devices`]: devices by ordinal.
//!   [`current`]: the device of the thread.
//! - [`Device`]: a CUDA context, or the [`StandIn`], with which everything above is tested without
//!   a GPU.
//! - [`Queue`]: asynchronous copies in order: many small ranges cost one kernel launch.
//! - [`Pinned`]: host memory that the device accesses directly, on its own NUMA node.
//! - [`Batches`]: scattered copies of many callers, moved by few launches.
//! - [`Prepared`]: a list of copies that is laid out once and started many times.
//! - [`Export`], [`Mapped`]: device memory of one process, mapped by another one of the same host.
//! - [`DeviceBuffer`]: device memory for benchmarks and tests. [`Load`]: a simulated model, for
//!   benchmarks.
//!
//! Inside: `sys` is the driver's interface, `context` owns one CUDA context and its resources,
//! `side`, `table` and `pair` (pure) lay lists out as work for the kernel in `kernels/copy.cu`,
//! `rows` (pure) groups ranges into few calls of the copy engine, `ring` (pure) allocates room for
//! the kernel's work, `queue` starts it by a `launch`, `completion` reports when it is done; `load`
//! has kernels of its own in `kernels/load.cu`. A queue, pinned memory and a buffer each hold their
//! context by an `Arc`: dropping in any order is safe.
//!
//! Every entry point leaves the calling thread's current CUDA context unchanged, uses streams of
//! its own that do not wait for the default stream, and never synchronises a device.

mod batch;
mod buffer;
mod completion;
mod context;
mod error;
mod info;
mod ipc;
mod launch;
mod load;
mod locate;
mod memory;
mod pair;
mod pinned;
mod prepared;
mod queue;
mod ring;
mod rows;
mod side;
mod standin;
mod stream;
mod sys;
mod table;

use std::fmt::{self, Debug};
use std::os::fd::OwnedFd;

pub use batch::{BatchTicket, Batches, Move, Wish};
pub use buffer::DeviceBuffer;
pub use error::Error;
pub use info::{DeviceInfo, devices, free_bytes};
pub use ipc::{Description, Export, Gpu, MAX_PIECES, Mapped, import};
pub use load::{Load, Work};
pub use locate::{current, device, locate};
pub use memory::DeviceMemory;
pub use pinned::Pinned;
pub use prepared::Prepared;
pub use rows::{Rows, rows};
pub use standin::StandIn;

/// A contiguous range of a device's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// Its first byte.
    pub address: usize,
    /// Its length in bytes.
    pub len: usize,
}

/// One piece of [`Queue::unpack`]: offsets from two base addresses, in 16 bytes, in the format by
/// which plugins describe received data.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Entry {
    /// Offset from the base of the source.
    pub from: u32,
    /// Length in bytes.
    pub len: u32,
    /// Offset from the base of the target.
    pub to: u64,
}

/// Identifies one copy of a queue; later copies have greater tickets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(u64);

/// The way a queue moves bytes. All ways give the same result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Path {
    /// The copy engine for few, large or equally distant ranges, otherwise the kernel.
    #[default]
    Auto,
    /// The copy engine: one call per range, or for ranges of one length at one distance. Where the
    /// driver refuses such a call, and no split mends that, the kernel copies the list.
    Engine,
    /// Always the kernel: one launch for all ranges. It accesses pinned host memory directly.
    Kernel,
}

/// A device with memory: a CUDA context, or the [`StandIn`].
pub trait Device: Send + Sync + Debug {
    /// Creates a queue: one stream and the events it needs.
    ///
    /// The first queue of a device compiles the kernels, which can take a tenth of a second.
    fn queue(&self) -> Result<Box<dyn Queue>, Error> {
        self.queue_by(Path::Auto)
    }

    /// Creates a queue that moves bytes the given way; for measurements.
    fn queue_by(&self, path: Path) -> Result<Box<dyn Queue>, Error>;

    /// Allocates page-locked host memory near the device (same NUMA node), zeroed, usable by the
    /// queues of every device of its kind.
    fn pin(&self, len: usize) -> Result<Pinned, Error>;

    /// Allocates memory of the device.
    fn allocate(&self, len: usize) -> Result<DeviceMemory, Error>;

    /// Makes the device current on this thread until the guard is dropped. For libraries that work
    /// on the current device of the calling thread.
    fn make_current(&self) -> Result<Current, Error>;

    /// Describes the memory behind a range, for another process of this host to map: the whole
    /// allocation, or all pieces of virtual memory that contain the range.
    ///
    /// # Errors
    /// [`Error::NotShareable`] names what the memory lacks. [`Error::OutOfAllocation`] if the range
    /// does not lie in one allocation, [`Error::TooManyPieces`] if it lies in too many pieces.
    fn export(&self, range: Range) -> Result<Export, Error> {
        Err(Error::NotShareable {
            address: range.address,
            reason: "its device is not one of CUDA",
        })
    }

    /// Maps memory of another process, so that queues of this device copy to and from it. The
    /// memory may be on another GPU, if the two have peer access.
    ///
    /// Each import is a separate mapping: import memory once and keep it. `fds` can be closed
    /// afterwards. Both arguments may be arbitrary: input that the driver refuses is an error.
    ///
    /// # Errors
    /// [`Error::OwnMemory`], [`Error::GpuNotVisible`], [`Error::NoPeerAccess`],
    /// [`Error::MappedShort`], [`Error::BadDescription`] if the number of descriptors is wrong, or
    /// the driver's refusal.
    fn import(&self, description: &Description, fds: &[OwnedFd]) -> Result<Mapped, Error> {
        let _ = fds;
        Err(Error::GpuNotVisible {
            gpu: description.gpu(),
        })
    }

    /// Lays out a list of copies for [`Queue::run`]: `from`, range after range, to `to`. Both have
    /// the same total length and do not overlap, and are memory of this device or mapped there.
    ///
    /// For one use, [`Queue::copy`] is quicker.
    fn prepare(&self, from: &[Range], to: &[Range]) -> Result<Prepared, Error> {
        Prepared::lists(from, to)
    }

    /// Returns the device's ordinal in this process.
    fn ordinal(&self) -> u32;

    /// Returns the device's PCI address in the format of sysfs, if it has one.
    fn pci_bus_id(&self) -> Option<&str> {
        None
    }

    /// Returns the NUMA node of the memory from [`Device::pin`], on machines with several.
    fn numa_node(&self) -> Option<u32> {
        None
    }

    /// Identifies the context, for [`Device::is_same`]: unique among contexts alive at the same
    /// time.
    fn identity(&self) -> usize;

    /// Returns whether both are the same context, so that a queue of one can serve the memory of
    /// the other.
    fn is_same(&self, other: &dyn Device) -> bool {
        self.identity() == other.identity()
    }
}

/// Keeps a device current on this thread; dropping restores the previous one.
pub struct Current(Option<context::Scope>);

impl Current {
    fn new(scope: context::Scope) -> Self {
        Self(Some(scope))
    }

    /// A guard that restores nothing.
    fn nothing() -> Self {
        Self(None)
    }
}

impl Debug for Current {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Current").field(&self.0.is_some()).finish()
    }
}

/// Asynchronous copies in order.
///
/// An error other than [`Error::QueueFull`] is final for the queue: copies already started may
/// still be running, and dropping the queue waits until they are done.
pub trait Queue: Send {
    /// Starts copying `from` (this device's memory), back to back, to `to` (pinned).
    ///
    /// A call of more than 65,536 pieces may wait for room in the queue's tables, piece by piece. So
    /// may one that the kernel makes because the driver has refused a copy of the engine.
    ///
    /// # Safety
    ///
    /// The ranges must be memory of this device, and `to` memory of [`Device::pin`] as long as all
    /// of them together; nothing else writes either, and both stay valid, until the ticket is done
    /// or the queue is dropped.
    unsafe fn gather(&mut self, from: &[Range], to: *mut u8) -> Result<Ticket, Error>;

    /// Starts copying `from` (pinned) to `to` (this device's memory), range after range.
    ///
    /// # Safety
    ///
    /// As for [`Queue::gather`], in the other direction.
    unsafe fn scatter(&mut self, from: *const u8, to: &[Range]) -> Result<Ticket, Error>;

    /// Starts copying within the device, or between its memory and memory that is [`Mapped`] there.
    /// Both lists have the same total length and do not overlap.
    ///
    /// # Safety
    ///
    /// As for [`Queue::gather`], with memory of this device on both sides.
    unsafe fn copy(&mut self, from: &[Range], to: &[Range]) -> Result<Ticket, Error>;

    /// Starts copying within the device, each piece given by offsets from two bases.
    ///
    /// # Safety
    ///
    /// As for [`Queue::copy`], for the range that each entry makes with the bases.
    unsafe fn unpack(
        &mut self,
        from_base: usize,
        to_base: usize,
        entries: &[Entry],
    ) -> Result<Ticket, Error>;

    /// Starts the copies of a prepared list. The cost does not depend on the number of pieces.
    ///
    /// # Errors
    /// [`Error::OtherDevice`] if the list was prepared for another device: nothing was started.
    ///
    /// # Safety
    ///
    /// As for [`Queue::copy`], for the ranges that were prepared.
    unsafe fn run(&mut self, prepared: &Prepared) -> Result<Ticket, Error> {
        match &prepared.work {
            // SAFETY: the caller upholds the same contract.
            prepared::Work::Lists(from, to) => unsafe { self.copy(from, to) },
            prepared::Work::Cuda(..) => Err(Error::OtherDevice),
        }
    }

    /// Returns whether the copy, and all before it, are done. Never blocks.
    ///
    /// A failure (a dead context, a bad address) is reported for every ticket that is not done,
    /// from then on.
    fn is_done(&mut self, ticket: Ticket) -> Result<bool, Error>;

    /// Waits until the copy and all before it are done, yielding to other threads. For slow paths.
    fn wait(&mut self, ticket: Ticket) -> Result<(), Error> {
        let mut turns = 0_u32;
        while !self.is_done(ticket)? {
            give_way(&mut turns);
        }
        Ok(())
    }
}

/// Performs one turn of waiting by polling: yields at first, later sleeps. `turns` begins at 0.
pub fn give_way(turns: &mut u32) {
    *turns = turns.saturating_add(1);
    if *turns < 1000 {
        std::thread::yield_now();
    } else {
        std::thread::sleep(std::time::Duration::from_micros(50));
    }
}
