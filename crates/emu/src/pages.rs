//! The bounce pool of a device: 4 KiB pages, shared by all its receive comms. Received bytes stay
//! in them until the receive is consumed; when no page is left, nothing more is read from the
//! sockets.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::cuda::Stream;
use crate::error::Error;
use crate::faults::Random;
use crate::memory::{Block, Memory};
use crate::ring::Entry;

/// Bytes in a page.
pub const PAGE: usize = 4096;
/// Value that overwrites released pages.
pub const POISON: u8 = 0xee;

/// Pages and their allocation.
#[derive(Debug)]
pub(crate) struct Pool {
    memory: Memory,
    arena: Block,
    /// With a GPU: pinned memory of the same shape, into which the sockets are read.
    shadow: Option<Block>,
    total: usize,
    free: Mutex<FreeList>,
}

#[derive(Debug)]
struct FreeList {
    pages: Vec<u32>,
    /// The last page handed out.
    last: u32,
    random: Random,
}

impl Pool {
    pub(crate) fn new(memory: Memory, total: usize, seed: u64) -> Result<Self, Error> {
        let bytes = total * PAGE;
        let arena = memory.device(bytes, "the bounce pages")?;
        let shadow = match memory {
            Memory::Host => None,
            Memory::Cuda(_) => Some(memory.mapped(bytes, "the bounce pages")?),
        };
        let mut random = Random::new(seed);
        let mut pages: Vec<u32> = (0..total as u32).collect();
        random.shuffle(&mut pages);
        let free = Mutex::new(FreeList {
            pages,
            last: u32::MAX - 1,
            random,
        });
        Ok(Self {
            memory,
            arena,
            shadow,
            total,
            free,
        })
    }

    /// Returns the memory that the pages are in.
    pub(crate) fn memory(&self) -> Memory {
        self.memory
    }

    /// Returns the device address of page 0.
    pub(crate) fn base(&self) -> u64 {
        self.arena.device_address()
    }

    /// Returns the address to which socket reads for offset 0 go.
    pub(crate) fn landing(&self) -> *mut u8 {
        self.shadow.as_ref().unwrap_or(&self.arena).host()
    }

    /// Returns the number of pages.
    pub(crate) fn total(&self) -> usize {
        self.total
    }

    /// Returns the number of free pages.
    pub(crate) fn free(&self) -> usize {
        self.lock().pages.len()
    }

    fn lock(&self) -> MutexGuard<'_, FreeList> {
        // The list is consistent between any two statements: a panic elsewhere does not corrupt it.
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds up to `count` pages to `out`, never adjacent ones in order as long as there is another.
    pub(crate) fn take(&self, count: usize, out: &mut Vec<u32>) {
        let mut list = self.lock();
        for _ in 0..count {
            let Some(&page) = list.pages.last() else {
                return;
            };
            let page = if page == list.last.wrapping_add(1) && list.pages.len() > 1 {
                let others = list.pages.len() - 1;
                let other = list.random.below(others);
                list.pages.swap_remove(other)
            } else {
                list.pages.pop();
                page
            };
            list.last = page;
            out.push(page);
        }
    }

    /// Returns pages to the pool.
    pub(crate) fn give(&self, pages: &[u32]) {
        self.lock().pages.extend_from_slice(pages);
    }

    /// Copies the bytes of these entries to the device, if there is one.
    pub(crate) fn upload(&self, entries: &[Entry], stream: Option<&Stream>) -> Result<(), Error> {
        let (Some(shadow), Some(stream)) = (&self.shadow, stream) else {
            return Ok(());
        };
        for entry in entries {
            // SAFETY: the page belongs to the receive until it is consumed, which is after the
            // stream was seen idle.
            unsafe {
                stream.to_device(
                    self.base() + u64::from(entry.src_off),
                    shadow.host().add(entry.src_off as usize),
                    entry.len as usize,
                )?;
            }
        }
        Ok(())
    }

    /// Overwrites whole pages, so that late readers notice.
    pub(crate) fn poison(&self, pages: &[u32], stream: Option<&Stream>) -> Result<(), Error> {
        for &page in pages {
            let offset = page as usize * PAGE;
            match stream {
                // SAFETY: the page is within the arena, and belongs to the caller of this function.
                None => unsafe { self.arena.host().add(offset).write_bytes(POISON, PAGE) },
                // SAFETY: as above; waited for below.
                Some(stream) => unsafe {
                    stream.fill(self.base() + offset as u64, POISON, PAGE)?;
                },
            }
        }
        stream.map_or(Ok(()), Stream::finish)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_scattered_and_come_back() {
        let pool = Pool::new(Memory::Host, 64, 7).unwrap();
        let mut pages = Vec::new();
        pool.take(63, &mut pages);
        assert!(
            pages.windows(2).all(|pair| pair[1] != pair[0] + 1),
            "{pages:?}"
        );
        pool.take(5, &mut pages);
        assert_eq!((pages.len(), pool.free()), (64, 0));
        let mut sorted = pages.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..64).collect::<Vec<_>>());
        pool.give(&pages);
        assert_eq!(pool.free(), 64);
    }

    #[test]
    fn the_seed_decides_the_order() {
        let order = |seed| {
            let mut pages = Vec::new();
            Pool::new(Memory::Host, 256, seed)
                .unwrap()
                .take(256, &mut pages);
            pages
        };
        assert_eq!(order(3), order(3));
        assert_ne!(order(3), order(4));
    }
}
