//! Errors of devices, with their remedies.

use crate::ipc::Gpu;

/// The reason an operation on a device failed. The text says what was asked, what was found and
/// what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is no CUDA driver on this machine (or in this container).
    #[error(
        "CUDA is not available: libcuda.so.1 cannot be loaded ({reason}). Install the NVIDIA driver, or give the \
         container access to it (`--gpus all`)"
    )]
    NoLibrary {
        /// The message of the dynamic linker.
        reason: String,
    },
    /// The driver lacks a function that every supported version has.
    #[error(
        "the CUDA driver has no function {symbol}: it is too old, install driver 520 (CUDA 11.8) or later"
    )]
    MissingSymbol {
        /// The function.
        symbol: &'static str,
    },
    /// The driver is there and works, but sees no GPU.
    #[error("the CUDA driver sees no GPU: check `nvidia-smi` and CUDA_VISIBLE_DEVICES")]
    NoDevice,
    /// The requested device is not visible to the process.
    #[error(
        "there is no CUDA device {ordinal}: this process sees {count}, numbered from 0 (CUDA_VISIBLE_DEVICES selects them)"
    )]
    NoSuchDevice {
        /// The requested device.
        ordinal: u32,
        /// Number of visible devices.
        count: u32,
    },
    /// The process was forked from one that uses CUDA, where CUDA cannot work.
    #[error(
        "CUDA cannot be used in a process forked from one that uses it: start a new process instead (Python: the `spawn` start method)"
    )]
    Forked,
    /// The driver refused, or an earlier copy failed on the device.
    #[error("{asked} failed: {name} ({code}). {advice}")]
    Driver {
        /// The operation requested from the driver.
        asked: &'static str,
        /// The driver's name for the failure.
        name: &'static str,
        /// The driver's number for the failure.
        code: i32,
        /// The remedy.
        advice: &'static str,
    },
    /// Too many copies are in flight on this queue; nothing was started. Poll `is_done`, then try
    /// again.
    #[error(
        "the copy queue is full ({tickets} copies in flight): ask whether the oldest is done, then try again"
    )]
    QueueFull {
        /// Copies in flight.
        tickets: usize,
    },
    /// A range begins in one allocation and ends outside of it.
    #[error(
        "{len} bytes at {address:#x} do not lie in one allocation: the one there is {size} bytes at {base:#x}"
    )]
    OutOfAllocation {
        /// Start of the range asked for.
        address: usize,
        /// Its length.
        len: usize,
        /// Start of the allocation.
        base: usize,
        /// Its length.
        size: usize,
    },
    /// The two lists of a copy differ in length.
    #[error(
        "{from} bytes cannot be copied to {to} bytes: both lists must have the same total length"
    )]
    Lengths {
        /// Bytes to copy from.
        from: u64,
        /// Bytes to copy to.
        to: u64,
    },
    /// An address that no GPU can have.
    #[error("the range that ends at {end:#x} is not device memory: addresses are below 2^48")]
    BadAddress {
        /// One past the highest byte asked for.
        end: u64,
    },
    /// The operating system gave no memory.
    #[error(
        "cannot get {len} bytes of host memory for the device: {reason}. Check `free` and `ulimit -l`"
    )]
    HostMemory {
        /// Number of bytes requested.
        len: usize,
        /// The message of the operating system.
        reason: String,
    },
    /// An access outside a buffer.
    #[error("bytes {offset}..{offset}+{len} are outside the buffer of {size}")]
    OutOfBounds {
        /// First byte.
        offset: usize,
        /// Length of the access.
        len: usize,
        /// The buffer's length.
        size: usize,
    },
    /// Memory that another process cannot map.
    #[error("the memory at {address:#x} cannot be mapped by another process: {reason}")]
    NotShareable {
        /// An address of the memory.
        address: usize,
        /// The missing property, and how to allocate the memory instead.
        reason: &'static str,
    },
    /// A range is made of more pieces of virtual memory than one export describes.
    #[error(
        "{len} bytes at {address:#x} are made of more than {most} pieces of virtual memory: export \
         them in several ranges"
    )]
    TooManyPieces {
        /// Start of the range asked for.
        address: usize,
        /// Its length.
        len: usize,
        /// Maximum pieces of one export.
        most: usize,
    },
    /// The description of another process's memory breaks its format.
    #[error("the description of another process's memory is malformed: {reason}")]
    BadDescription {
        /// The reason.
        reason: &'static str,
    },
    /// A process was given the description of its own memory.
    #[error("the memory was exported by this process itself: use it at its own address")]
    OwnMemory,
    /// The memory of another process is on a GPU that this process does not see.
    #[error(
        "the memory of the other process is on {gpu}, which this process does not see: check \
         CUDA_VISIBLE_DEVICES, and the devices given to the container"
    )]
    GpuNotVisible {
        /// The GPU, as `nvidia-smi -L` names it.
        gpu: Gpu,
    },
    /// Two GPUs cannot read each other's memory.
    #[error(
        "GPU {device} cannot access the memory of GPU {owner}: the machine has no peer access \
         between them (`nvidia-smi topo -p2p r`)"
    )]
    NoPeerAccess {
        /// The GPU that is to copy, by its number in this process.
        device: u32,
        /// The GPU that the memory is on, by its number in this process.
        owner: u32,
    },
    /// The driver mapped less memory than the description promised.
    #[error(
        "the other process describes {described} bytes of memory, but the driver maps {mapped}"
    )]
    MappedShort {
        /// Bytes that the description has.
        described: usize,
        /// Bytes that the driver maps.
        mapped: usize,
    },
    /// A prepared list was given to a queue of another device.
    #[error("the list was prepared for another device than the queue's")]
    OtherDevice,
    /// A stand-in's copy found memory that is not mapped, or not for this access. Other copies
    /// continue.
    #[error("the memory is not mapped, or not for this access")]
    NotMapped,
    /// The failure that a stand-in was configured to have.
    #[error("the stand-in failed after {copies} copies, as configured")]
    Injected {
        /// Number of copies before the failure.
        copies: u64,
    },
}
