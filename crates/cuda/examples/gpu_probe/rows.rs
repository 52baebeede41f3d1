//! Checks equally distant ranges that are in an allocation each. The driver refuses to copy such rows
//! by one call.

use tcpx_cuda::{DeviceBuffer, Path, Range, device, rows};

use crate::Outcome;
use crate::bytes::{Random, expect_equal, total};

const LEN: usize = 256 << 10;
const START: usize = 4096;
const ROW: usize = 16 << 10;
const POISON: u8 = 0xa5;

pub(crate) fn run(ordinal: u32) -> Outcome {
    last_row(ordinal)?;
    many_at_once(ordinal)?;
    println!("check: rows at the end of an allocation, and many refused lists at once, are right");
    for allocations in [2, 9, 90] {
        for path in [Path::Auto, Path::Engine] {
            let calls = check(ordinal, allocations, path)?;
            println!(
                "check {path:?}: rows of {allocations} allocations, {calls} at once, are right"
            );
        }
    }
    Ok(())
}

/// Checks rows of which the last one ends where its allocation does: the rest of the distance is
/// outside.
fn last_row(ordinal: u32) -> Outcome {
    const DISTANCE: usize = 3 * ROW;
    let mut random = Random::new(7);
    let count = 40;
    let buffer = DeviceBuffer::alloc(ordinal, (count - 1) * DISTANCE + ROW)?;
    let row = |i: usize| Range {
        address: buffer.address() + i * DISTANCE,
        len: ROW,
    };
    let list: Vec<Range> = (0..count).map(row).collect();
    let device = device(ordinal)?;
    let mut queue = device.queue_by(Path::Engine)?;
    let pinned = device.pin(2 * count * ROW)?;
    let sent = random.bytes(count * ROW);
    // SAFETY: this function owns the memory; the host uses it only while no copy is in flight.
    let back = unsafe {
        let (there, back) = (pinned.address(), pinned.address().add(sent.len()));
        std::ptr::copy_nonoverlapping(sent.as_ptr(), there, sent.len());
        queue.scatter(there, &list)?;
        let ticket = queue.gather(&list, back)?;
        queue.wait(ticket)?;
        std::slice::from_raw_parts(back, sent.len())
    };
    expect_equal("rows at the end of an allocation", back, &sent)
}

/// Starts more lists than a queue has tables for, without asking for their ends. Each list begins with rows
/// that the engine copies, and ends with rows of many allocations, so that the kernel copies it.
fn many_at_once(ordinal: u32) -> Outcome {
    const SHORT: usize = 256;
    const SHORT_ROWS: usize = 50_000;
    const LISTS: usize = 8;
    let mut random = Random::new(8);
    let regular = DeviceBuffer::alloc(ordinal, 2 * SHORT * SHORT_ROWS)?;
    let alloc = |_| DeviceBuffer::alloc(ordinal, LEN);
    let mut buffers = (0..90).map(alloc).collect::<Result<Vec<_>, _>>()?;
    buffers.sort_by_key(DeviceBuffer::address);
    let short = |i: usize| Range {
        address: regular.address() + i * 2 * SHORT,
        len: SHORT,
    };
    let row = |buffer: &DeviceBuffer| Range {
        address: buffer.address() + START,
        len: ROW,
    };
    let mut list: Vec<Range> = (0..SHORT_ROWS).map(short).collect();
    list.extend(buffers.iter().map(row));
    let len = total(&list);

    let device = device(ordinal)?;
    let mut queue = device.queue_by(Path::Auto)?;
    let pinned = device.pin(2 * len)?;
    let sent = random.bytes(len);
    // SAFETY: as above; copies of one queue follow each other, so that each finds the same bytes.
    let back = unsafe {
        let (there, back) = (pinned.address(), pinned.address().add(len));
        std::ptr::copy_nonoverlapping(sent.as_ptr(), there, len);
        queue.scatter(there, &list)?;
        let mut last = queue.gather(&list, back)?;
        for _ in 2..LISTS {
            last = queue.gather(&list, back)?;
        }
        queue.wait(last)?;
        std::slice::from_raw_parts(back, len)
    };
    expect_equal("many refused lists at once", back, &sent)
}

/// Returns the most ranges that are at one distance.
fn check(ordinal: u32, allocations: usize, path: Path) -> Outcome<usize> {
    let mut random = Random::new(allocations as u64);
    let alloc = |_| DeviceBuffer::alloc(ordinal, LEN);
    let mut buffers = (0..allocations).map(alloc).collect::<Result<Vec<_>, _>>()?;
    buffers.sort_by_key(DeviceBuffer::address);
    let row = |buffer: &DeviceBuffer| Range {
        address: buffer.address() + START,
        len: ROW,
    };
    let list: Vec<Range> = buffers.iter().map(row).collect();

    let device = device(ordinal)?;
    let mut queue = device.queue_by(path)?;
    let pinned = device.pin(allocations * ROW)?;
    // SAFETY: this function owns the memory, and uses it only while no copy is in flight.
    let host = unsafe { std::slice::from_raw_parts_mut(pinned.address(), pinned.len()) };
    let host = &mut host[..allocations * ROW];

    let sent = random.bytes(host.len());
    for (buffer, bytes) in buffers.iter().zip(sent.chunks(ROW)) {
        buffer.fill(POISON)?;
        buffer.copy_from_host(START, bytes)?;
    }
    host.fill(POISON);
    // SAFETY: the buffers stay valid, and nothing else uses them, until the copy is done.
    let ticket = unsafe { queue.gather(&list, host.as_mut_ptr()) }?;
    queue.wait(ticket)?;
    expect_equal("gather of rows of many allocations", host, &sent)?;

    let sent = random.bytes(host.len());
    host.copy_from_slice(&sent);
    // SAFETY: as above.
    let ticket = unsafe { queue.scatter(host.as_ptr(), &list) }?;
    queue.wait(ticket)?;
    let mut found = vec![0; LEN];
    for (buffer, bytes) in buffers.iter().zip(sent.chunks(ROW)) {
        buffer.copy_to_host(0, &mut found)?;
        let mut expected = vec![POISON; LEN];
        expected[START..][..ROW].copy_from_slice(bytes);
        expect_equal("scatter to rows of many allocations", &found, &expected)?;
    }
    Ok(rows(list).map(|rows| rows.count).max().unwrap_or(0))
}
