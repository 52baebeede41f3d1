//! Creates and drops everything, and compares the memory in use.

use tcpx_cuda::{DeviceBuffer, Path, Range, device, free_bytes};

use crate::Outcome;

pub(crate) fn run(ordinal: u32, rounds: u32) -> Outcome {
    // Keeps the context, so that its own memory stays constant.
    let keep = device(ordinal)?;
    let once = || -> Outcome {
        let host = keep.pin(4 << 20)?;
        let buffer = DeviceBuffer::alloc(ordinal, 4 << 20)?;
        let ranges: Vec<Range> = (0..1000)
            .map(|i| Range {
                address: buffer.address() + i * 4096,
                len: 4000,
            })
            .collect();
        for path in [Path::Auto, Path::Engine, Path::Kernel] {
            let mut queue = keep.queue_by(path)?;
            // SAFETY: both outlive the queue, whose drop waits for the copy.
            unsafe { queue.gather(&ranges, host.address()) }?;
        }
        keep.export(ranges[0])?;
        let (from, to) = ranges.split_at(500);
        let prepared = keep.prepare(from, to)?;
        // SAFETY: as above.
        unsafe { keep.queue()?.run(&prepared) }?;
        Ok(())
    };
    for _ in 0..5 {
        once()?;
    }
    let before = (free_bytes(ordinal)?, resident()?);
    for _ in 0..rounds {
        once()?;
    }
    let after = (free_bytes(ordinal)?, resident()?);
    println!(
        "free on the device {} -> {}, resident {} -> {} KiB",
        before.0, after.0, before.1, after.1
    );
    if after.0 + (2 << 20) < before.0 || after.1 > before.1 + 4096 {
        return Err(format!("{rounds} rounds left memory behind").into());
    }
    Ok(())
}

/// Returns this process's resident memory, in KiB.
fn resident() -> Outcome<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let words = line.ok_or("no VmRSS in /proc/self/status")?;
    Ok(words.trim().trim_end_matches(" kB").parse()?)
}
