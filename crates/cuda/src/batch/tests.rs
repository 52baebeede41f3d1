use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use proptest::prelude::*;

use super::*;
use crate::{Current, Entry, Path, Pinned, StandIn};

/// A stand-in that counts kernel launches, and that ends nothing while it is late.
#[derive(Debug)]
struct Counting {
    device: StandIn,
    launches: Arc<AtomicUsize>,
    is_late: Arc<AtomicBool>,
}

struct CountingQueue {
    queue: Box<dyn Queue>,
    launches: Arc<AtomicUsize>,
    is_late: Arc<AtomicBool>,
}

impl Counting {
    fn new(device: StandIn) -> Self {
        Self {
            device,
            launches: Arc::default(),
            is_late: Arc::default(),
        }
    }

    fn launches(&self) -> usize {
        self.launches.load(Ordering::Relaxed)
    }
}

impl Device for Counting {
    fn queue_by(&self, path: Path) -> Result<Box<dyn Queue>, Error> {
        Ok(Box::new(CountingQueue {
            queue: self.device.queue_by(path)?,
            launches: Arc::clone(&self.launches),
            is_late: Arc::clone(&self.is_late),
        }))
    }

    fn pin(&self, len: usize) -> Result<Pinned, Error> {
        self.device.pin(len)
    }

    fn allocate(&self, len: usize) -> Result<DeviceMemory, Error> {
        self.device.allocate(len)
    }

    fn make_current(&self) -> Result<Current, Error> {
        self.device.make_current()
    }

    fn ordinal(&self) -> u32 {
        self.device.ordinal()
    }

    fn identity(&self) -> usize {
        self.device.identity()
    }
}

impl Queue for CountingQueue {
    unsafe fn gather(&mut self, from: &[Range], to: *mut u8) -> Result<Ticket, Error> {
        assert_eq!(from.len(), 1, "the copy engine moves contiguous memory");
        // SAFETY: the caller upholds the same contract.
        unsafe { self.queue.gather(from, to) }
    }

    unsafe fn scatter(&mut self, from: *const u8, to: &[Range]) -> Result<Ticket, Error> {
        assert_eq!(to.len(), 1, "the copy engine moves contiguous memory");
        // SAFETY: the caller upholds the same contract.
        unsafe { self.queue.scatter(from, to) }
    }

    unsafe fn copy(&mut self, from: &[Range], to: &[Range]) -> Result<Ticket, Error> {
        self.launches.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller upholds the same contract.
        unsafe { self.queue.copy(from, to) }
    }

    unsafe fn unpack(&mut self, _: usize, _: usize, _: &[Entry]) -> Result<Ticket, Error> {
        unreachable!("batches do not unpack")
    }

    fn is_done(&mut self, ticket: Ticket) -> Result<bool, Error> {
        match self.is_late.load(Ordering::Relaxed) {
            true => Ok(false),
            false => self.queue.is_done(ticket),
        }
    }
}

/// "Device" memory with blocks in it, and pinned memory for all of them.
struct Copy {
    device: Vec<u8>,
    blocks: Vec<Range>,
    host: Pinned,
    len: usize,
}

impl Copy {
    /// Blocks of the given lengths, with gaps between them.
    fn new(lengths: &[usize], seed: usize) -> Self {
        const GAP: usize = 7;
        let len: usize = lengths.iter().sum();
        let all = len + GAP * lengths.len();
        let device: Vec<u8> = (0..all)
            .map(|i| (i * 31 + seed * 17 + i / 251) as u8)
            .collect();
        let mut at = device.as_ptr().expose_provenance();
        let blocks = lengths
            .iter()
            .map(|&len| {
                let block = Range { address: at, len };
                at += len + GAP;
                block
            })
            .collect();
        Self {
            device,
            blocks,
            host: Pinned::plain(len.max(1)).unwrap(),
            len,
        }
    }

    fn add(&self, batches: &Batches, direction: Move) -> Option<BatchTicket> {
        // SAFETY: the memory is kept until the copies have completed: each test waits for them.
        unsafe { batches.add(direction, &self.blocks, self.host.address()) }
    }

    fn in_blocks(&self) -> Vec<u8> {
        let base = self.device.as_ptr().addr();
        let bytes = |block: &Range| {
            let start = block.address - base;
            self.device[start..start + block.len].to_vec()
        };
        self.blocks.iter().flat_map(bytes).collect()
    }

    fn on_host(&mut self) -> &mut [u8] {
        // SAFETY: the memory is that long, and no copy is in flight.
        unsafe { std::slice::from_raw_parts_mut(self.host.address(), self.len) }
    }
}

const CELL: usize = 1 << 20;
/// Less than the copies of a property together, more than each of them.
const RING: usize = 48 << 10;

/// Creates batches with [`CELL`] bytes for each direction, which is less than a longest batch.
fn batches(device: &dyn Device, full: usize) -> Batches {
    Batches::new(device, 2 * CELL, full).unwrap()
}

#[test]
fn memory_follows_from_what_may_be_taken() {
    let device = StandIn::new(1);
    for (bytes, taken, most) in [
        (96 << 20, 48 << 20, 16 << 20),
        (1 << 30, 48 << 20, 16 << 20),
        (16 << 20, 8 << 20, 8 << 20),
        (80 << 20, 40 << 20, 16 << 20),
        ((2 << 20) + 600, (1 << 20) + 300, (1 << 20) + 256),
    ] {
        let batches = Batches::new(&device, bytes, usize::MAX).unwrap();
        for half in [&batches.gathers, &batches.scatters] {
            let half = half.lock();
            assert_eq!(
                (half.memory.len(), half.most, half.full),
                (taken, most, most)
            );
        }
    }
}

#[test]
fn copies_that_nobody_waits_for_share_a_launch() {
    for direction in [Move::Gather, Move::Scatter] {
        let device = Counting::new(StandIn::new(2));
        let batches = batches(&device, 4 * 1000);
        let copies: Vec<_> = (0..4).map(|i| Copy::new(&[400, 600], i)).collect();
        let add = |copy: &Copy| copy.add(&batches, direction).unwrap();
        let tickets: Vec<_> = copies[..3].iter().map(add).collect();
        assert_eq!(device.launches(), 0);
        let last = add(&copies[3]);
        assert_eq!(device.launches(), 1, "full");
        for ticket in tickets.into_iter().chain([last]) {
            batches.wait(ticket).unwrap();
        }
        assert_eq!(device.launches(), 1);
    }
}

#[test]
fn a_copy_that_is_waited_for_does_not_wait_for_others() {
    let device = Counting::new(StandIn::new(3));
    let batches = batches(&device, CELL);
    let copy = Copy::new(&[100; 10], 1);
    let ticket = copy.add(&batches, Move::Gather).unwrap();
    let mut looks = 0;
    while !batches.is_done(ticket, Wish::Soon).unwrap() {
        assert_eq!(device.launches(), 1, "at the first look");
        looks += 1;
        assert!(looks < 100_000_000);
    }
}

#[test]
fn a_copy_that_nobody_waits_for_does_not_linger_for_ever() {
    let device = Counting::new(StandIn::new(4));
    let batches = batches(&device, CELL);
    let copy = Copy::new(&[100; 10], 1);
    let ticket = copy.add(&batches, Move::Scatter).unwrap();
    while !batches.is_done(ticket, Wish::Later).unwrap() {}
    assert_eq!(device.launches(), 1);
}

#[test]
fn a_batch_starts_although_callers_wait_for_an_earlier_one() {
    for direction in [Move::Gather, Move::Scatter] {
        let device = Counting::new(StandIn::new(8));
        let batches = batches(&device, 1000);
        let (full, short) = (Copy::new(&[400, 600], 1), Copy::new(&[400], 2));
        device.is_late.store(true, Ordering::Relaxed);
        let first = full.add(&batches, direction).unwrap();
        let later = short.add(&batches, direction).unwrap();
        assert_eq!(device.launches(), 1, "the second batch is not full");
        let begun = Instant::now();
        while device.launches() == 1 {
            assert!(!batches.is_done(first, Wish::Soon).unwrap());
            assert!(begun.elapsed() < Duration::from_secs(60), "never started");
        }
        device.is_late.store(false, Ordering::Relaxed);
        batches.wait(first).unwrap();
        batches.wait(later).unwrap();
        assert_eq!(device.launches(), 2);
        for mut copy in [full, short] {
            assert_eq!(copy.in_blocks(), copy.on_host(), "{direction:?}");
        }
    }
}

#[test]
fn without_memory_nothing_is_added() {
    let device = Counting::new(StandIn::new(5));
    let batches = batches(&device, CELL);
    let copies: Vec<_> = (0..2).map(|i| Copy::new(&[CELL / 2 + 1], i)).collect();
    assert!(!batches.is_full(Move::Gather, CELL));
    let first = copies[0].add(&batches, Move::Gather).unwrap();
    assert!(!batches.is_full(Move::Gather, CELL / 2 - 1), "it joins");
    assert!(!batches.is_full(Move::Gather, CELL + 1), "it never will");
    assert!(!batches.is_full(Move::Scatter, CELL), "memory of its own");
    assert_eq!(device.launches(), 0);
    device.is_late.store(true, Ordering::Relaxed);
    // The first is started to make room.
    assert!(batches.is_full(Move::Gather, CELL / 2 + 1));
    assert!(!batches.is_full(Move::Gather, 4096), "short");
    assert_eq!(device.launches(), 1);
    let second = copies[1].add(&batches, Move::Gather);
    assert!(second.is_none());
    device.is_late.store(false, Ordering::Relaxed);
    batches.wait(first).unwrap();
    assert!(!batches.is_full(Move::Gather, CELL / 2 + 1));
    let second = second.or_else(|| copies[1].add(&batches, Move::Gather));
    batches.wait(second.unwrap()).unwrap();
    let long = Copy::new(&[CELL, 1], 3);
    assert!(long.add(&batches, Move::Gather).is_none(), "too long");
}

#[test]
fn a_device_that_fails_fails_what_it_had_and_takes_nothing_more() {
    let device = Counting::new(StandIn::new(6).failing_after(1));
    let batches = batches(&device, CELL);
    let copy = Copy::new(&[1000; 3], 1);
    let ticket = copy.add(&batches, Move::Gather).unwrap();
    let error = batches.wait(ticket).unwrap_err();
    assert!(matches!(error, Error::Injected { .. }), "{error:?}");
    assert_eq!(batches.is_done(ticket, Wish::Soon), Err(error));
    assert!(copy.add(&batches, Move::Gather).is_none());
    assert!(!batches.is_full(Move::Gather, CELL), "nothing would end");
    let other = copy.add(&batches, Move::Scatter);
    assert!(other.is_some(), "the other direction has its own queues");
    let _ = batches.wait(other.unwrap());
}

#[test]
fn few_and_small_blocks_are_not_for_batches() {
    let device = StandIn::new(7);
    let batches = batches(&device, CELL);
    // No three are equally far from each other.
    let suits = |count: usize, len: usize| {
        let block = |i: usize| Range {
            address: (i * i + 1) * len,
            len: len / count,
        };
        let blocks: Vec<_> = (0..count).map(block).collect();
        batches.suits(Move::Gather, &blocks, len)
    };
    assert!(suits(64, 1 << 20));
    assert!(!suits(1, 1 << 20) && !suits(2, 1 << 20), "for the engine");
    assert!(!suits(4, 4 << 20), "for the engine");
    let row = |i: usize| Range {
        address: i * 32_768,
        len: 16_384,
    };
    let rows: Vec<_> = (0..64).map(row).collect();
    assert!(
        !batches.suits(Move::Gather, &rows, 1 << 20),
        "for the engine"
    );
    assert!(!suits(16, 64 << 10), "over sooner without");
    let copy = Copy::new(&[1000; 3], 1);
    let ticket = copy.add(&batches, Move::Gather).unwrap();
    assert!(suits(16, 64 << 10), "in company");
    batches.wait(ticket).unwrap();
}

#[test]
fn batches_that_start_early_leave_their_memory_to_others() {
    const LEN: usize = CELL;
    let device = Counting::new(StandIn::new(9));
    let batches = Batches::new(&device, 16 * CELL, usize::MAX).unwrap();
    let copies: Vec<_> = (0..8).map(|i| Copy::new(&[LEN / 2; 2], i)).collect();
    device.is_late.store(true, Ordering::Relaxed);
    let tickets: Vec<_> = (0..8)
        .map(|i| {
            let ticket = copies[i]
                .add(&batches, Move::Gather)
                .expect("there is memory");
            if i < BATCHES - 1 {
                assert!(!batches.is_done(ticket, Wish::Now).unwrap());
                assert_eq!(device.launches(), i + 1);
            }
            ticket
        })
        .collect();
    // The last batch took the rest, and starts when the next copy finds no memory.
    assert_eq!(device.launches(), BATCHES - 1);
    assert!(batches.is_full(Move::Gather, CELL));
    assert_eq!(device.launches(), BATCHES);
    device.is_late.store(false, Ordering::Relaxed);
    for (ticket, mut copy) in tickets.into_iter().zip(copies) {
        batches.wait(ticket).unwrap();
        assert_eq!(copy.in_blocks(), copy.on_host());
    }
    assert!(!batches.is_full(Move::Gather, CELL));
}

#[test]
fn the_last_batch_does_not_start_before_it_is_full() {
    let device = Counting::new(StandIn::new(11));
    let batches = Batches::new(&device, 16 * CELL, usize::MAX).unwrap();
    let copies: Vec<_> = (0..BATCHES).map(|i| Copy::new(&[LEAST_BYTES], i)).collect();
    device.is_late.store(true, Ordering::Relaxed);
    let mut tickets = Vec::new();
    for copy in &copies {
        let ticket = copy.add(&batches, Move::Gather).unwrap();
        tickets.push(ticket);
        if tickets.len() < BATCHES {
            assert!(!batches.is_done(ticket, Wish::Now).unwrap());
        }
    }
    std::thread::sleep(2 * LINGER);
    for ticket in &tickets {
        assert!(!batches.is_done(*ticket, Wish::Soon).unwrap());
    }
    assert_eq!(
        device.launches(),
        BATCHES - 1,
        "others could not join any more"
    );
    device.is_late.store(false, Ordering::Relaxed);
    for ticket in tickets {
        batches.wait(ticket).unwrap();
    }
}

/// Memory for short copies, of which a few start in batches of their own.
#[test]
fn all_memory_is_free_again_after_the_ring_has_begun_again() {
    let device = Counting::new(StandIn::new(12));
    let batches = batches(&device, CELL);
    let lens = [CELL / 2].into_iter().chain([CELL / 8; BATCHES + 2]);
    let copies: Vec<_> = lens.map(|len| Copy::new(&[len / 2; 2], 1)).collect();
    for round in 0..3 {
        device.is_late.store(true, Ordering::Relaxed);
        let mut taken = Vec::new();
        for copy in &copies {
            if let Some(ticket) = copy.add(&batches, Move::Gather) {
                // Starts its batch.
                assert!(!batches.is_done(ticket, Wish::Now).unwrap());
                taken.push(ticket);
            }
            // The first one ends before the others, which then begin at the start of the memory.
            if taken.len() == 3 {
                device.is_late.store(false, Ordering::Relaxed);
                batches.wait(taken[0]).unwrap();
                device.is_late.store(true, Ordering::Relaxed);
            }
        }
        assert!(taken.len() >= BATCHES - 1, "round {round}");
        device.is_late.store(false, Ordering::Relaxed);
        for ticket in taken {
            batches.wait(ticket).unwrap();
        }
        assert!(!batches.is_full(Move::Gather, CELL), "round {round}");
    }
}

#[test]
fn short_copies_do_not_take_the_last_batch() {
    let device = Counting::new(StandIn::new(13));
    let batches = Batches::new(&device, 8 << 20, usize::MAX).unwrap();
    let (short, long) = (Copy::new(&[100; 2], 1), Copy::new(&[LEAST_BYTES], 2));
    device.is_late.store(true, Ordering::Relaxed);
    let mut taken = Vec::new();
    for _ in 1..BATCHES {
        let ticket = short.add(&batches, Move::Scatter).unwrap();
        assert!(!batches.is_done(ticket, Wish::Now).unwrap());
        taken.push(ticket);
    }
    assert!(short.add(&batches, Move::Scatter).is_none());
    taken.push(long.add(&batches, Move::Scatter).unwrap());
    device.is_late.store(false, Ordering::Relaxed);
    for ticket in taken {
        batches.wait(ticket).unwrap();
    }
}

#[test]
fn nobody_waits_for_memory_of_a_failed_device() {
    let device = Counting::new(StandIn::new(14).failing_after(0));
    let batches = batches(&device, 1000);
    let copy = Copy::new(&[CELL / 2; 2], 1);
    let ticket = copy.add(&batches, Move::Gather);
    // Nobody asks for the copy.
    let begun = Instant::now();
    while batches.is_full(Move::Gather, CELL) {
        assert!(begun.elapsed() < Duration::from_secs(60), "full for ever");
    }
    assert!(copy.add(&batches, Move::Gather).is_none());
    if let Some(ticket) = ticket {
        assert!(batches.is_done(ticket, Wish::Later).is_err());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]
    #[test]
    fn every_byte_arrives_whoever_shares_the_batch(
        lists in prop::collection::vec(prop::collection::vec(1usize..5000, 1..9), 1..30),
        full in 1usize..100_000,
        ways in any::<u32>(),
        wishes in any::<u32>(),
        seed in any::<u64>(),
    ) {
        let device = StandIn::new(seed);
        // Less memory than all copies need.
        let batches = Batches::new(&device, 2 * RING, full).unwrap();
        let mut copies: Vec<_> = lists.iter().zip(0..).map(|(l, i)| Copy::new(l, i)).collect();
        let mut pending: Vec<(usize, Move, BatchTicket)> = Vec::new();
        let mut expected = Vec::new();
        for (index, copy) in copies.iter_mut().enumerate() {
            let direction = match ways >> index & 1 {
                0 => Move::Gather,
                _ => Move::Scatter,
            };
            let len = copy.len;
            let source: Vec<u8> = match direction {
                Move::Gather => copy.in_blocks(),
                Move::Scatter => (0..len).map(|i| (i * 13 + index) as u8).collect(),
            };
            if direction == Move::Scatter {
                copy.on_host().copy_from_slice(&source);
            }
            expected.push(source);
            let ticket = loop {
                if let Some(ticket) = copy.add(&batches, direction) {
                    break ticket;
                }
                // Memory becomes free when copies have completed.
                for (_, _, ticket) in &pending {
                    let _ = batches.is_done(*ticket, Wish::Later).unwrap();
                }
            };
            if wishes >> index & 1 == 1 {
                let _ = batches.is_done(ticket, Wish::Now).unwrap();
            }
            pending.push((index, direction, ticket));
        }
        for (index, direction, ticket) in pending {
            batches.wait(ticket).unwrap();
            let found = match direction {
                Move::Gather => copies[index].on_host().to_vec(),
                Move::Scatter => copies[index].in_blocks(),
            };
            prop_assert_eq!(&found, &expected[index]);
        }
        for half in [&batches.gathers, &batches.scatters] {
            let mut half = half.lock();
            half.reap();
            prop_assert!(half.started.is_empty() && half.ring.next(RING / ITEM_BYTES).is_some());
        }
    }
}
