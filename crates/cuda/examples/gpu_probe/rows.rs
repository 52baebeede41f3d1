//! Checks equally distant ranges that are in an allocation each. The driver refuses to copy such rows
//! by one call.

use tcpx_cuda::{DeviceBuffer, Path, Range, device, rows};

use crate::Outcome;
use crate::bytes::{Random, expect_equal};

const LEN: usize = 256 << 10;
const START: usize = 4096;
const ROW: usize = 16 << 10;
const POISON: u8 = 0xa5;

pub(crate) fn run(ordinal: u32) -> Outcome {
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
