//! Pseudo-random numbers and bytes, and their comparison.

use tcpx_cuda::{DeviceBuffer, Range};

use crate::Outcome;

/// Marsaglia's xorshift.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub(crate) fn below(&mut self, limit: usize) -> usize {
        ((self.next() >> 11) % limit as u64) as usize
    }

    pub(crate) fn bytes(&mut self, len: usize) -> Vec<u8> {
        let words = (0..len.div_ceil(8)).flat_map(|_| self.next().to_le_bytes());
        words.take(len).collect()
    }

    pub(crate) fn shuffle<T>(&mut self, list: &mut [T]) {
        for i in (1..list.len()).rev() {
            list.swap(i, self.below(i + 1));
        }
    }
}

/// Returns ranges in random order that do not overlap, with gaps, within the first `len` bytes of a
/// buffer.
pub(crate) fn random_ranges(random: &mut Random, buffer: &DeviceBuffer, len: usize) -> Vec<Range> {
    let longest = [20, 300, 5_000, 100_000][random.below(4)];
    let mut ranges = Vec::new();
    let mut at = random.below(40);
    while ranges.len() < 3_000 {
        let range = 1 + random.below(longest);
        if at + range > len {
            break;
        }
        ranges.push(Range {
            address: buffer.address() + at,
            len: range,
        });
        // Often no gap, often one that keeps blocks aligned, often any.
        at += range + [0, range.next_multiple_of(16) - range, random.below(50)][random.below(3)];
    }
    random.shuffle(&mut ranges);
    ranges
}

pub(crate) fn total(ranges: &[Range]) -> usize {
    ranges.iter().map(|range| range.len).sum()
}

pub(crate) fn expect_equal(what: &str, found: &[u8], expected: &[u8]) -> Outcome {
    if found.len() != expected.len() {
        return Err(format!(
            "{what}: {} bytes instead of {}",
            found.len(),
            expected.len()
        )
        .into());
    }
    match found.iter().zip(expected).position(|(a, b)| a != b) {
        None => Ok(()),
        Some(i) => {
            let (found, expected) = (found[i], expected[i]);
            Err(format!("{what}: byte {i} is {found:#04x} instead of {expected:#04x}").into())
        }
    }
}
