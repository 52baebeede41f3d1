//! Measures rates and latencies.

use std::time::{Duration, Instant};

use tcpx_cuda::{DeviceBuffer, Entry, Error, Path, Queue, Range, Ticket, device};

use crate::Outcome;
use crate::bytes::Random;

const MIB: usize = 1 << 20;

pub(crate) fn run(ordinal: u32) -> Outcome {
    within_device(ordinal)?;
    host_time(ordinal)?;
    latency(ordinal)?;
    to_and_from_host(ordinal)
}

/// Returns the blocks of one buffer in random order.
fn blocks(buffer: &DeviceBuffer, size: usize, seed: u64) -> Vec<Range> {
    let mut ranges: Vec<Range> = (0..buffer.len() / size)
        .map(|i| Range {
            address: buffer.address() + i * size,
            len: size,
        })
        .collect();
    Random::new(seed).shuffle(&mut ranges);
    ranges
}

/// Starts a copy, waiting while the queue is full.
fn push(
    queue: &mut dyn Queue,
    start: &mut dyn FnMut(&mut dyn Queue) -> Result<Ticket, Error>,
) -> Outcome<Ticket> {
    loop {
        match start(queue) {
            Err(Error::QueueFull { .. }) => std::thread::yield_now(),
            other => return Ok(other?),
        }
    }
}

/// Measures the seconds that one copy takes when many follow each other.
fn seconds_each(
    queue: &mut dyn Queue,
    rounds: u32,
    mut start: impl FnMut(&mut dyn Queue) -> Result<Ticket, Error>,
) -> Outcome<f64> {
    let warm = push(queue, &mut start)?;
    queue.wait(warm)?;
    let started = Instant::now();
    let mut last = warm;
    for _ in 0..rounds {
        last = push(queue, &mut start)?;
    }
    while !queue.is_done(last)? {}
    Ok(started.elapsed().as_secs_f64() / f64::from(rounds))
}

/// Measures the same calls twice: as a caller sees them, and queued behind other work, so that only
/// the device is measured. The variants take turns, since the device's clocks change with time.
fn within_device(ordinal: u32) -> Outcome {
    const TURNS: usize = 9;
    let ballast = DeviceBuffer::alloc(ordinal, 2048 * MIB)?;
    for len in [16 * MIB, 256 * MIB] {
        let from = DeviceBuffer::alloc(ordinal, len)?;
        let to = DeviceBuffer::alloc(ordinal, len)?;
        let device = device(ordinal)?;
        let rounds = (4096 * MIB / len) as u32;
        let mut cases = Vec::new();
        for size in [len, 4096, 16384, 512] {
            let path = if size == len {
                Path::Engine
            } else {
                Path::Auto
            };
            let lists = (blocks(&from, size, 1), blocks(&to, size, 2));
            cases.push((
                size,
                device.queue_by(path)?,
                lists,
                (Vec::new(), Vec::new()),
            ));
        }
        for _ in 0..TURNS {
            for (_, queue, (from, to), (called, alone)) in &mut cases {
                // SAFETY: the buffers outlive the copies: the last is waited for.
                let each = seconds_each(&mut **queue, rounds, |queue| unsafe {
                    queue.copy(from, to)
                })?;
                called.push(Duration::from_secs_f64(each));
                // A short copy can complete before the work in front of it is seen to be done.
                if from.len() <= 65536 && len > 16 * MIB {
                    alone.push(time_alone(&mut **queue, &ballast, from, to)?);
                }
            }
        }
        let (mut engine, mut engine_alone) = (f64::NAN, f64::NAN);
        for (size, _, _, (called, alone)) in cases {
            let rate = |times: Vec<Duration>| match times.is_empty() {
                true => f64::NAN,
                false => len as f64 / median(times).0 / 1e3,
            };
            let (rate, rate_alone) = (rate(called), rate(alone));
            if size == len {
                (engine, engine_alone) = (rate, rate_alone);
            }
            println!(
                "rate: device copy of {:4} MiB in blocks of {size:>10}: {rate:5.0} GB/s as called, {rate_alone:5.0} on the device alone, {:.2} and {:.2} of cuMemcpyDtoD",
                len / MIB,
                rate / engine,
                rate_alone / engine_alone,
            );
        }
    }
    Ok(())
}

/// Measures how long the device takes for a copy that was queued behind other work.
fn time_alone(
    queue: &mut dyn Queue,
    ballast: &DeviceBuffer,
    from: &[Range],
    to: &[Range],
) -> Outcome<Duration> {
    let half = ballast.len() / 2;
    let part = |at: usize| Range {
        address: ballast.address() + at,
        len: half,
    };
    // SAFETY: the buffers outlive the copies: the last is waited for.
    let (before, last) = unsafe {
        queue.copy(&[part(0)], &[part(half)])?;
        let before = queue.copy(&[part(half)], &[part(0)])?;
        (before, queue.copy(from, to)?)
    };
    while !queue.is_done(before)? {}
    let started = Instant::now();
    while !queue.is_done(last)? {}
    Ok(started.elapsed())
}

fn median(mut times: Vec<Duration>) -> (f64, f64) {
    times.sort();
    let micros = |i: usize| times[i].as_secs_f64() * 1e6;
    (micros(times.len() / 2), micros(times.len() * 99 / 100))
}

/// Measures the time of the calling thread for one call.
fn host_time(ordinal: u32) -> Outcome {
    let from = DeviceBuffer::alloc(ordinal, 64 * MIB)?;
    let to = DeviceBuffer::alloc(ordinal, 64 * MIB)?;
    let device = device(ordinal)?;
    let host = device.pin(64 * MIB)?;
    let mut queue = device.queue()?;
    for (entries, size) in [
        (64, 16384),
        (240, 4096),
        (512, 4096),
        (4096, 4096),
        (4096, 16384),
        (16384, 4096),
    ] {
        let (mut sources, mut targets) = (blocks(&from, size, 1), blocks(&to, size, 2));
        sources.truncate(entries);
        targets.truncate(entries);
        let pairs: Vec<Entry> = sources
            .iter()
            .zip(&targets)
            .map(|(source, target)| Entry {
                from: (source.address - from.address()) as u32,
                len: size as u32,
                to: (target.address - to.address()) as u64,
            })
            .collect();
        let mut show = |what: &str, start: &dyn Fn(&mut dyn Queue) -> Result<Ticket, Error>| {
            let (half, most) = host_micros(&mut *queue, start)?;
            println!(
                "host time: {what} of {entries:>5} x {size:>5}: median {half:6.1} us, 99 % {most:6.1} us"
            );
            Outcome::Ok(())
        };
        // SAFETY: the buffers outlive each copy, which is waited for.
        unsafe {
            show("copy   ", &|queue| queue.copy(&sources, &targets))?;
            show("gather ", &|queue| queue.gather(&sources, host.address()))?;
            show("scatter", &|queue| queue.scatter(host.address(), &targets))?;
            show("unpack ", &|queue| {
                queue.unpack(from.address(), to.address(), &pairs)
            })?;
        }
    }
    Ok(())
}

/// Returns the median and the 99th percentile of the calling thread's time for one call, in µs.
fn host_micros(
    queue: &mut dyn Queue,
    start: &dyn Fn(&mut dyn Queue) -> Result<Ticket, Error>,
) -> Outcome<(f64, f64)> {
    let mut times = Vec::new();
    for _ in 0..400 {
        let started = Instant::now();
        let ticket = start(queue)?;
        times.push(started.elapsed());
        while !queue.is_done(ticket)? {}
    }
    Ok(median(times))
}

/// Measures the time of a call, and the time until a poll reports the copy as done.
fn latency(ordinal: u32) -> Outcome {
    let buffer = DeviceBuffer::alloc(ordinal, 64 * MIB)?;
    let device = device(ordinal)?;
    let host = device.pin(4 * MIB)?;
    let cases = [
        (1, 4096),
        (8, 4096),
        (64, 16384),
        (256, 4096),
        (16, 65536),
        (1, MIB),
    ];
    for (entries, size) in cases {
        let mut ranges = blocks(&buffer, size, 1);
        ranges.truncate(entries);
        for path in [Path::Engine, Path::Kernel] {
            let mut queue = device.queue_by(path)?;
            let mut show = |what: &str, scatter: bool| -> Outcome {
                let (mut calls, mut times) = (Vec::new(), Vec::new());
                for _ in 0..500 {
                    let started = Instant::now();
                    // SAFETY: the buffers outlive the copy, which is waited for.
                    let ticket = unsafe {
                        if scatter {
                            queue.scatter(host.address(), &ranges)
                        } else {
                            queue.gather(&ranges, host.address())
                        }
                    }?;
                    calls.push(started.elapsed());
                    while !queue.is_done(ticket)? {}
                    times.push(started.elapsed());
                }
                let (half, most) = median(times);
                let call = median(calls).0;
                println!(
                    "latency: {what} of {entries:>3} x {size:>7} by {path:<6?}: call {call:5.1} us, done median {half:6.1} us, 99 % {most:6.1} us"
                );
                Ok(())
            };
            show("gather ", false)?;
            show("scatter", true)?;
        }
    }
    Ok(())
}

/// A way to fill or empty slots.
#[derive(Clone, Copy)]
struct Slots {
    path: Path,
    /// Length of the blocks.
    size: usize,
    /// From one block to the next; `None` if they are in random order.
    distance: Option<usize>,
    scatter: bool,
}

/// Lengths and distances of rows: regular ones, odd ones, and rows that are far apart.
const ROWS: [(usize, usize); 15] = [
    (65_536, 131_072),
    (16_384, 32_768),
    (4096, 8192),
    (1024, 2048),
    (256, 512),
    (301, 555),
    (4096, 4112),
    (4096, 4097),
    (4100, 8212),
    (3000, 5001),
    (2049, 4099),
    (20_000, 20_003),
    (65_536, MIB),
    (16_384, 512 << 10),
    (4096, 256 << 10),
];

/// Copies one mebibyte at a time, four in flight on each queue, each queue on a thread of its own.
fn to_and_from_host(ordinal: u32) -> Outcome {
    let mut cases = vec![(Path::Engine, MIB, None)];
    for size in [65_536, 16_384, 4096] {
        cases.extend([(Path::Engine, size, None), (Path::Kernel, size, None)]);
    }
    cases.extend(ROWS.map(|(size, distance)| (Path::Engine, size, Some(distance))));
    for (path, size, distance) in cases {
        for scatter in [false, true] {
            let mut line = String::new();
            for queues in [1, 2, 4, 8] {
                let slots = Slots {
                    path,
                    size,
                    distance,
                    scatter,
                };
                let rate = many_queues(ordinal, slots, queues)?;
                line += &format!(" {rate:6.1}");
            }
            let what = if scatter { "scatter" } else { "gather " };
            let every = distance.map_or(String::new(), |distance| format!("every {distance}"));
            println!(
                "rate: {what} of {:>4} x {size:>7} {every:13} by {path:<8?}: GB/s with 1, 2, 4, 8 queues:{line}",
                MIB / size
            );
        }
    }
    Ok(())
}

/// Measures the rate of several queues together, each on a thread of its own.
fn many_queues(ordinal: u32, slots: Slots, queues: u64) -> Outcome<f64> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..queues)
            .map(|seed| scope.spawn(move || one_queue(ordinal, slots, seed)))
            .collect();
        let mut sum = 0.0;
        for thread in threads {
            sum += thread.join().map_err(|_| "a thread panicked")??;
        }
        Ok(sum)
    })
}

fn one_queue(ordinal: u32, slots: Slots, seed: u64) -> Outcome<f64> {
    const SLOTS: usize = 4;
    const TIME: Duration = Duration::from_millis(200);
    let Slots {
        path,
        size,
        distance,
        scatter,
    } = slots;
    let device = device(ordinal)?;
    let buffer = DeviceBuffer::alloc(ordinal, 256 * MIB)?;
    let host = device.pin(SLOTS * MIB)?;
    let mut queue = device.queue_by(path)?;
    let ranges: Vec<Range> = match distance {
        None => blocks(&buffer, size, seed),
        Some(distance) => (0..buffer.len() / distance)
            .map(|i| Range {
                address: buffer.address() + i * distance,
                len: size,
            })
            .collect(),
    };
    let mut lists = ranges.chunks_exact(MIB / size).cycle();
    let mut tickets = [None; SLOTS];
    let (mut moved, mut slot) = (0, 0);
    let started = Instant::now();
    while started.elapsed() < TIME {
        if let Some(ticket) = tickets[slot] {
            while !queue.is_done(ticket)? {}
            moved += MIB / size * size;
        }
        let list = lists.next().ok_or("no blocks")?;
        // SAFETY: the buffers outlive the queue, whose drop waits for the copies.
        let ticket = unsafe {
            let at = host.address().add(slot * MIB);
            if scatter {
                queue.scatter(at, list)
            } else {
                queue.gather(list, at)
            }
        }?;
        tickets[slot] = Some(ticket);
        slot = (slot + 1) % SLOTS;
    }
    let rate = moved as f64 / started.elapsed().as_secs_f64() / 1e9;
    drop(queue);
    Ok(rate)
}
