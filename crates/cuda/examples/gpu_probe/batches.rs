//! Checks that scattered blocks moved in batches, by several threads at once, arrive correctly.

use std::time::{Duration, Instant};

use tcpx_cuda::{Batches, Device, DeviceBuffer, Move, Pinned, Range, Wish, device, give_way};

use crate::Outcome;
use crate::bytes::{Random, expect_equal};

/// Memory of each thread, and bytes of all batches: less than the copies of all threads need at
/// once.
const LEN: usize = 4 << 20;
const BATCH_BYTES: usize = 8 << 20;
const THREADS: u64 = 4;
const ROUNDS: usize = 12;
const POISON: u8 = 0xa5;
/// Limits the wait: failed batches accept no blocks and report nothing.
const PATIENCE: Duration = Duration::from_secs(120);

pub(crate) fn run(ordinal: u32) -> Outcome {
    let device = device(ordinal)?;
    let batches = Batches::new(&*device, BATCH_BYTES, BATCH_BYTES / 4)?;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|seed| {
                scope.spawn({
                    let (device, batches) = (&*device, &batches);
                    move || Mover::new(device, ordinal, seed)?.run(batches)
                })
            })
            .collect();
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().map_err(|_| "a thread panicked")?)
    })?;
    println!("check: batches of {THREADS} threads are right");
    Ok(())
}

/// The memory of one thread.
struct Mover {
    buffer: DeviceBuffer,
    host: Pinned,
    random: Random,
}

impl Mover {
    fn new(device: &dyn Device, ordinal: u32, seed: u64) -> Outcome<Self> {
        Ok(Self {
            buffer: DeviceBuffer::alloc(ordinal, LEN)?,
            host: device.pin(LEN)?,
            random: Random::new(seed + 11),
        })
    }

    fn run(&mut self, batches: &Batches) -> Outcome {
        // Typical sizes of cache blocks, some that rule out 16-byte accesses, and one single block.
        for size in [4096, 16384, 4100, 777, 1 << 20]
            .into_iter()
            .cycle()
            .take(ROUNDS)
        {
            let blocks = self.blocks(size);
            self.gather(batches, &blocks)?;
            self.scatter(batches, &blocks)?;
        }
        Ok(())
    }

    /// Returns some blocks of the buffer, at most a batch's worth, in random order.
    fn blocks(&mut self, size: usize) -> Vec<Range> {
        let place = |i: usize| Range {
            address: self.buffer.address() + i * size,
            len: size,
        };
        let mut blocks: Vec<Range> = (0..LEN / size).map(place).collect();
        self.random.shuffle(&mut blocks);
        let most = (BATCH_BYTES / 8).div_ceil(size).min(blocks.len());
        blocks.truncate(1 + self.random.below(most));
        blocks
    }

    fn gather(&mut self, batches: &Batches, blocks: &[Range]) -> Outcome {
        let bytes = self.random.bytes(LEN);
        self.buffer.copy_from_host(0, &bytes)?;
        self.host().fill(POISON);
        self.complete(batches, Move::Gather, blocks)?;
        let mut expected = vec![POISON; LEN];
        for (at, range) in self.pieces(blocks) {
            expected[at..][..range.len()].copy_from_slice(&bytes[range]);
        }
        expect_equal("gather in a batch", self.host(), &expected)
    }

    fn scatter(&mut self, batches: &Batches, blocks: &[Range]) -> Outcome {
        let bytes = self.random.bytes(LEN);
        self.host().copy_from_slice(&bytes);
        self.buffer.fill(POISON)?;
        self.complete(batches, Move::Scatter, blocks)?;
        let mut expected = vec![POISON; LEN];
        for (at, range) in self.pieces(blocks) {
            let len = range.len();
            expected[range].copy_from_slice(&bytes[at..][..len]);
        }
        let mut found = vec![0; LEN];
        self.buffer.copy_to_host(0, &mut found)?;
        expect_equal("scatter in a batch", &found, &expected)
    }

    /// Lists the position of each block in host memory and in the buffer.
    fn pieces(&self, blocks: &[Range]) -> Vec<(usize, std::ops::Range<usize>)> {
        let base = self.buffer.address();
        let place = |at: &mut usize, block: &Range| {
            let (start, offset) = (*at, block.address - base);
            *at += block.len;
            Some((start, offset..offset + block.len))
        };
        blocks.iter().scan(0, place).collect()
    }

    /// Moves blocks, by a batch that other threads may share.
    fn complete(&mut self, batches: &Batches, direction: Move, blocks: &[Range]) -> Outcome {
        let (mut turns, begun) = (0, Instant::now());
        let ticket = loop {
            // SAFETY: buffer and host memory stay valid, and nothing else uses them, until the copy
            // has completed.
            match unsafe { batches.add(direction, blocks, self.host.address()) } {
                Some(ticket) => break ticket,
                None if begun.elapsed() > PATIENCE => {
                    return Err("no batch takes the blocks".into());
                }
                None => give_way(&mut turns),
            }
        };
        let wish = [Wish::Later, Wish::Soon, Wish::Now][self.random.below(3)];
        let mut turns = 0;
        while !batches.is_done(ticket, wish)? {
            give_way(&mut turns);
        }
        Ok(())
    }

    fn host(&mut self) -> &mut [u8] {
        // SAFETY: this value owns the memory, and no copy is in flight when this is called.
        unsafe { std::slice::from_raw_parts_mut(self.host.address(), self.host.len()) }
    }
}
