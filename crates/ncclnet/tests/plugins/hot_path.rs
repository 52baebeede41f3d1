//! Checks that the calls made for every message do not allocate.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use tcpx_ncclnet::{MemoryKind, Plugin};

use crate::build::{self, VERSIONS};
use crate::wire::{Memory, connect};

/// Counts the allocations of each thread.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// SAFETY: the system's allocator does everything; counting touches only a cell of the thread.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: guaranteed by the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: guaranteed by the caller.
        unsafe { System.dealloc(pointer, layout) }
    }
}

fn allocations() -> u64 {
    ALLOCATIONS.with(Cell::get)
}

#[test]
fn messages_are_moved_without_allocating() {
    for version in VERSIONS {
        let library = build::plugin(&format!("hot-{version}"), version, &[]);
        let plugin = Plugin::open(build::path(&library)).unwrap();
        let (mut send, mut recv) = connect(&plugin, 0, 1);
        let (mut source, mut target) = (Memory::new(4096), Memory::new(4096));
        source.bytes().fill(3);
        let from = source.register(&mut send, MemoryKind::Host).unwrap();
        let to = target.register(&mut recv, MemoryKind::Host).unwrap();

        let before = allocations();
        for _ in 0..100 {
            let sending = loop {
                if let Some(request) = send.isend(&from, 0, 4096, 0).unwrap() {
                    break request;
                }
            };
            let receiving = loop {
                if let Some(request) = recv.irecv(&to, 0, 4096, 0).unwrap() {
                    break request;
                }
            };
            while send.test(sending).unwrap().is_none() {}
            while recv.test(receiving).unwrap().is_none() {}
            recv.consume(receiving).unwrap();
        }
        assert_eq!(allocations(), before, "version {version}");
        drop((send, recv));
        assert!(target.bytes().iter().all(|byte| *byte == 3));
    }
}
