//! Measures how fast one process reads and writes memory of another.

use std::sync::Arc;
use std::time::Instant;

use tcpx_cuda::{Device, DeviceBuffer, Queue, Range, Ticket};

use super::{MIB, Owner, blocks, import, kinds};
use crate::Outcome;

const LEN: usize = 512 * MIB;
const ROUNDS: usize = 20;

/// Prints, for each kind of memory, the median time from the call until its end is seen.
pub(super) fn run(owner: &mut Owner, device: &Arc<dyn Device>) -> Outcome {
    let own = DeviceBuffer::alloc(device.ordinal(), LEN)?;
    let mut queue = device.queue()?;
    for (what, request) in kinds(LEN) {
        let (bytes, fds) = owner.export(&request)?;
        let started = Instant::now();
        let mapped = import(device, &bytes, &fds)?;
        let opened = started.elapsed().as_secs_f64() * 1e6;
        println!("same host: {what}: mapped in {opened:.0} µs");
        // Length and size of blocks; a single block is contiguous.
        for (len, size) in [
            (4096, 4096),
            (64 * MIB, 64 * MIB),
            (LEN, LEN),
            (64 * MIB, 16384),
            (64 * MIB, 4096),
        ] {
            for is_write in [false, true] {
                let (mine, theirs) = (
                    blocks(own.address(), len, size, 1),
                    blocks(mapped.address(), len, size, 2),
                );
                let (from, to) = match is_write {
                    true => (&mine, &theirs),
                    false => (&theirs, &mine),
                };
                measure(&mut *queue, device, from, to, |text| {
                    let how = if is_write { "WRITE" } else { "READ " };
                    println!(
                        "same host: {what:14} {how} {:>7} KiB in blocks of {:>7} KiB: {text}",
                        len >> 10,
                        size >> 10
                    );
                })?;
            }
        }
    }
    Ok(())
}

fn measure(
    queue: &mut dyn Queue,
    device: &Arc<dyn Device>,
    from: &[Range],
    to: &[Range],
    print: impl Fn(&str),
) -> Outcome {
    let bytes: usize = from.iter().map(|range| range.len).sum();
    let started = Instant::now();
    let prepared = device.prepare(from, to)?;
    let preparing = started.elapsed().as_secs_f64() * 1e6;
    // SAFETY: the memory outlives the copies, each of which is waited for, and nothing else uses
    // it.
    let by_run = median(queue, |queue| unsafe { Ok(queue.run(&prepared)?) })?;
    // SAFETY: as above.
    let by_copy = median(queue, |queue| unsafe { Ok(queue.copy(from, to)?) })?;
    let rate = bytes as f64 / by_run.0 / 1e3;
    print(&format!(
        "prepared {:6.1} µs ({:4.1} to start), {rate:6.1} GB/s; at once {:6.1} µs ({:4.1} to start); \
         {preparing:.1} µs to prepare",
        by_run.0, by_run.1, by_copy.0, by_copy.1
    ));
    Ok(())
}

/// Returns the median microseconds until a copy is seen to be done, and until its call returns.
fn median(
    queue: &mut dyn Queue,
    start: impl Fn(&mut dyn Queue) -> Outcome<Ticket>,
) -> Outcome<(f64, f64)> {
    let mut times = Vec::new();
    for _ in 0..ROUNDS {
        let started = Instant::now();
        let ticket = start(queue)?;
        let called = started.elapsed();
        while !queue.is_done(ticket)? {}
        times.push((started.elapsed(), called));
    }
    let micros = |mut times: Vec<std::time::Duration>| {
        times.sort();
        times[times.len() / 2].as_secs_f64() * 1e6
    };
    let (all, called) = times.into_iter().unzip();
    Ok((micros(all), micros(called)))
}
