//! Measures the cost of preparing and posting, apart from moving bytes.

use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::floor::Waiting;
use crate::measure::{Bench, complete, prepare};
use crate::memory::Memory;
use crate::stats::median;
use crate::workload::{Layout, Op, Shape};

/// The segment counts of the default suite.
pub const SEGMENTS: [usize; 2] = [10_000, 100_000];

/// Small segments, so that planning dominates and not copying.
const SEGMENT_BYTES: u64 = 1024;

/// Every time is the median of this many.
const REPEATS: usize = 5;

/// The result for one number of segments.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PrepareResult {
    /// Number of segments of the transfer.
    pub segments: usize,
    /// Bytes of each.
    pub segment_bytes: u64,
    /// Median time of `prepare`, in milliseconds.
    pub prepare_ms: f64,
    /// The first `post` until done, in milliseconds.
    pub first_post_ms: f64,
    /// Median of later posts of the same transfer until done, in milliseconds.
    pub repost_ms: f64,
    /// Median time of the later `post` calls alone, in microseconds.
    pub repost_call_us: f64,
}

impl Bench {
    /// Measures `prepare` and `post` for transfers of many small segments, such as [`SEGMENTS`].
    pub fn run_prepare(&mut self, segments: &[usize]) -> Result<Vec<PrepareResult>, Error> {
        segments
            .iter()
            .map(|&count| measure_one(self, count))
            .collect()
    }
}

fn measure_one(bench: &mut Bench, segments: usize) -> Result<PrepareResult, Error> {
    let total = segments as u64 * SEGMENT_BYTES;
    let shape = Shape::new(Op::Write, total, SEGMENT_BYTES, Layout::Scattered)?;
    let region = bench.remote().prepare(shape)?;
    let mut memory = Memory::for_shape(bench.session(), bench.place(), &shape, None)?;
    memory.fill(&shape, 1)?;
    let ms = |start: Instant| start.elapsed().as_secs_f64() * 1e3;

    let (mut prepares, mut first_posts, mut transfers) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..REPEATS {
        let start = Instant::now();
        let transfer = prepare(bench.session(), bench.peer(), &shape, &memory, &region)?;
        prepares.push(ms(start));
        let start = Instant::now();
        transfer.post()?;
        complete(&transfer, Waiting::Block)?;
        first_posts.push(ms(start));
        transfers.push(transfer);
    }
    let (mut reposts, mut calls) = (Vec::new(), Vec::new());
    for transfer in &transfers {
        let start = Instant::now();
        transfer.post()?;
        calls.push(ms(start) * 1e3);
        complete(transfer, Waiting::Block)?;
        reposts.push(ms(start));
    }
    let middle = |values: &[f64]| median(values).unwrap_or_default();
    Ok(PrepareResult {
        segments,
        segment_bytes: SEGMENT_BYTES,
        prepare_ms: middle(&prepares),
        first_post_ms: middle(&first_posts),
        repost_ms: middle(&reposts),
        repost_call_us: middle(&calls),
    })
}
