//! Checks the state after a copy from unmapped memory. The context is dead afterwards, so this
//! needs a process of its own.

use tcpx_cuda::{DeviceBuffer, Error, Path, Range, device};

use crate::Outcome;

pub(crate) fn run(ordinal: u32) -> Outcome {
    let device = device(ordinal)?;
    let buffer = DeviceBuffer::alloc(ordinal, 1 << 20)?;
    let host = device.pin(1 << 20)?;
    let mut queue = device.queue_by(Path::Kernel)?;
    let good: Vec<Range> = (0..16)
        .map(|i| Range {
            address: buffer.address() + i * 4096,
            len: 4096,
        })
        .collect();
    let bad = [Range {
        address: 1 << 20,
        len: 4096,
    }];
    // SAFETY: the good copy's memory stays valid. The bad copy is the subject of the test: the
    // device refuses it.
    let (done, broken) = unsafe {
        let done = queue.gather(&good, host.address())?;
        queue.wait(done)?;
        (done, queue.gather(&bad, host.address())?)
    };
    let first = match queue.wait(broken) {
        Err(error @ Error::Driver { .. }) => error,
        other => return Err(format!("a copy from nowhere gives {other:?}").into()),
    };
    println!("failure: {first}");
    if queue.is_done(broken) != Err(first.clone()) || queue.is_done(done) != Ok(true) {
        return Err("a failure is not reported again, or for a copy that was done".into());
    }
    // SAFETY: the queue has failed and starts nothing.
    match unsafe { queue.gather(&good, host.address()) } {
        Err(again) if again == first => Ok(()),
        other => Err(format!("a queue that failed gives {other:?}").into()),
    }
}
