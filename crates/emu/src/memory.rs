//! Memory visible to the device: ordinary memory, or the GPU's through the CUDA driver.

use std::ptr::null_mut;

use crate::cuda::{Driver, Gpu};
use crate::error::Error;
use crate::pages::PAGE;
use crate::settings::DeviceMemory;

/// The source of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Memory {
    /// Ordinary memory in place of the GPU's.
    Host,
    /// Memory of this GPU.
    Cuda(Gpu),
}

impl Memory {
    /// Checks that this kind is available; loads the driver if needed.
    pub(crate) fn check(mode: DeviceMemory) -> Result<(), Error> {
        match mode {
            DeviceMemory::Host => Ok(()),
            DeviceMemory::Cuda => Driver::load().map(|_| ()),
        }
    }

    /// Selects the GPU that is current on the calling thread, or the first one.
    pub(crate) fn current(mode: DeviceMemory) -> Result<Self, Error> {
        match mode {
            DeviceMemory::Host => Ok(Self::Host),
            DeviceMemory::Cuda => Ok(Self::Cuda(Gpu::current(Driver::load()?)?)),
        }
    }

    /// Allocates zeroed host memory that the device can read.
    pub(crate) fn mapped(self, bytes: usize, what: &'static str) -> Result<Block, Error> {
        match self {
            Self::Host => Block::map(bytes, what),
            Self::Cuda(gpu) => {
                let (host, device) = gpu.host_alloc(bytes)?;
                // SAFETY: just allocated, `bytes` long.
                unsafe { host.write_bytes(0, bytes) };
                Ok(Block {
                    host,
                    device,
                    bytes,
                    memory: self,
                    owned: Owned::Pinned,
                })
            }
        }
    }

    /// Allocates device memory, aligned to pages.
    pub(crate) fn device(self, bytes: usize, what: &'static str) -> Result<Block, Error> {
        match self {
            Self::Host => Block::map(bytes, what),
            Self::Cuda(gpu) => {
                // The driver aligns small allocations to 512 bytes only.
                let allocation = gpu.alloc(bytes + PAGE)?;
                Ok(Block {
                    host: null_mut(),
                    device: allocation.next_multiple_of(PAGE as u64),
                    bytes,
                    memory: self,
                    owned: Owned::Device(allocation),
                })
            }
        }
    }

    /// Copies `bytes` to the start of `block`; returns when they have arrived.
    pub(crate) fn upload(self, block: &Block, bytes: &[u8]) -> Result<(), Error> {
        assert!(bytes.len() <= block.bytes);
        match self {
            Self::Host => {
                // SAFETY: the block is at least that long and not shared yet.
                unsafe {
                    block
                        .host
                        .copy_from_nonoverlapping(bytes.as_ptr(), bytes.len())
                };
                Ok(())
            }
            Self::Cuda(gpu) => gpu.copy_to_device(block.device, bytes),
        }
    }

    /// Makes the GPU's context current until the guard is dropped.
    pub(crate) fn enter(self) -> Result<Entered, Error> {
        match self {
            Self::Host => Ok(Entered { gpu: None }),
            Self::Cuda(gpu) => gpu.push().map(|()| Entered { gpu: Some(gpu) }),
        }
    }
}

/// Keeps a context current; dropping restores the previous one.
#[derive(Debug)]
pub(crate) struct Entered {
    gpu: Option<Gpu>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        if let Some(gpu) = self.gpu {
            gpu.pop();
        }
    }
}

/// A piece of memory, freed when dropped.
#[derive(Debug)]
pub(crate) struct Block {
    host: *mut u8,
    device: u64,
    bytes: usize,
    memory: Memory,
    owned: Owned,
}

/// The way a block is freed.
#[derive(Clone, Copy, Debug)]
enum Owned {
    Mapping,
    Pinned,
    /// The allocation from the driver.
    Device(u64),
}

// SAFETY: the block owns its memory, and nothing about it is bound to a thread.
unsafe impl Send for Block {}
// SAFETY: its methods only return addresses; code that uses them justifies it.
unsafe impl Sync for Block {}

impl Block {
    fn map(bytes: usize, what: &'static str) -> Result<Self, Error> {
        // SAFETY: an anonymous mapping at an address that the kernel chooses.
        let host = unsafe {
            libc::mmap(
                null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if host == libc::MAP_FAILED {
            return Err(Error::OutOfMemory { what });
        }
        // SAFETY: the mapping just made. A refusal costs speed only.
        unsafe { libc::madvise(host, bytes, libc::MADV_HUGEPAGE) };
        let host = host.cast::<u8>();
        Ok(Self {
            host,
            device: host as u64,
            bytes,
            memory: Memory::Host,
            owned: Owned::Mapping,
        })
    }

    /// Returns the host's address; null for device memory.
    pub(crate) fn host(&self) -> *mut u8 {
        self.host
    }

    /// Returns the device's address.
    pub(crate) fn device_address(&self) -> u64 {
        self.device
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        match (self.memory, self.owned) {
            (Memory::Cuda(gpu), Owned::Pinned) => gpu.host_free(self.host),
            (Memory::Cuda(gpu), Owned::Device(allocation)) => gpu.free(allocation),
            _ => {
                // SAFETY: mapped in `map` with this length.
                unsafe { libc::munmap(self.host.cast(), self.bytes) };
            }
        }
    }
}
