//! Checks that memory of every kind is located and can be copied, and that the caller's context
//! stays.

use std::ffi::c_int;

use tcpx_cuda::{Error, Range, current, device, locate};

use crate::Outcome;
use crate::bytes::{Random, expect_equal};
use crate::raw::{AccessDescription, AllocationProperties, Context, Driver};

const LEN: usize = 4 << 20;

pub(crate) fn run(ordinal: u32) -> Outcome {
    let driver = Driver::open()?;
    let primary = device(ordinal)?;
    expect_current(&driver, std::ptr::null_mut(), "after opening a device")?;
    if let Some(found) = current()? {
        return Err(format!("{found:?} counts as current where nothing is").into());
    }
    let guard = primary.make_current()?;
    match current()? {
        Some(found) if found.is_same(&*primary) && found.ordinal() == ordinal => {}
        found => return Err(format!("{found:?} counts as current instead of {primary:?}").into()),
    }
    drop(guard);
    expect_current(&driver, std::ptr::null_mut(), "after leaving a device")?;

    // The application's current context in the following checks: one of its own.
    let mut other: Context = std::ptr::null_mut();
    driver.ctx_create(&mut other, 0, ordinal as c_int)?;
    match current()? {
        Some(found) if !found.is_same(&*primary) && found.ordinal() == ordinal => {}
        found => return Err(format!("{found:?} counts as current, not the second context").into()),
    }

    let plain = vec![0_u8; LEN];
    expect_host("plain memory", plain.as_ptr().addr())?;
    expect_host("address zero", 0)?;

    let mut address = 0;
    driver.mem_alloc(&mut address, LEN)?;
    let found =
        locate(address as usize, LEN)?.ok_or("memory of a second context counts as host memory")?;
    if found.is_same(&*primary) {
        return Err("memory of a second context was taken for the primary context's".into());
    }
    usable(&driver, "cuMemAlloc in a second context", address)?;
    match locate(address as usize + 1, LEN) {
        Err(Error::OutOfAllocation { .. }) => {}
        other => return Err(format!("a range past its allocation was accepted: {other:?}").into()),
    }
    drop(found);
    driver.mem_free(address)?;

    let buffer = tcpx_cuda::DeviceBuffer::alloc(ordinal, LEN)?;
    let found = locate(buffer.address() + 5, 100)?.ok_or("a buffer counts as host memory")?;
    if !found.is_same(&*primary) {
        return Err("memory of the primary context was not taken for that".into());
    }
    usable(
        &driver,
        "cuMemAlloc in the primary context",
        buffer.address() as u64,
    )?;

    in_a_forked_child(buffer.address())?;

    driver.mem_alloc_async(&mut address, LEN, std::ptr::null_mut())?;
    // Stream-ordered memory exists once the stream has reached it. The default stream is idle, so
    // that is soon: a copy on the same stream would wait for it.
    std::thread::sleep(std::time::Duration::from_millis(50));
    usable(&driver, "cuMemAllocAsync", address)?;
    driver.mem_free_async(address, std::ptr::null_mut())?;

    virtual_memory(&driver, ordinal)?;

    let mut host = std::ptr::null_mut();
    driver.mem_host_alloc(&mut host, LEN, 0)?;
    expect_host("pinned memory of the driver", host.addr())?;
    driver.mem_free_host(host)?;
    let pinned = primary.pin(LEN)?;
    expect_host("pinned memory", pinned.address().addr())?;
    driver.mem_alloc_managed(&mut address, LEN, 1)?;
    expect_host("managed memory", address as usize)?;
    driver.mem_free(address)?;

    expect_current(&driver, other, "at the end")?;
    driver.ctx_destroy(other)?;
    expect_current(&driver, std::ptr::null_mut(), "after its end")?;
    Ok(())
}

fn expect_host(what: &str, address: usize) -> Outcome {
    if let Some(device) = locate(address, LEN)? {
        return Err(format!("{what} was found on {device:?}").into());
    }
    println!("place: {what} is host memory");
    Ok(())
}

fn expect_current(driver: &Driver, expected: Context, when: &str) -> Outcome {
    let current = driver.current()?;
    if current != expected {
        return Err(
            format!("{when} the current context is {current:?} instead of {expected:?}").into(),
        );
    }
    Ok(())
}

/// Locates memory, fills it by a scatter of small ranges and reads it back by a gather; then the
/// same with every second range, which the copy engine moves.
fn usable(driver: &Driver, what: &str, address: u64) -> Outcome {
    let current = driver.current()?;
    let device =
        locate(address as usize, LEN)?.ok_or_else(|| format!("{what} counts as host memory"))?;
    expect_current(driver, current, what)?;
    let mut queue = device.queue()?;
    expect_current(driver, current, "after making a queue")?;
    let host = device.pin(2 * LEN)?;
    expect_current(driver, current, "after pinning")?;
    let mut random = Random::new(address);
    let bytes = random.bytes(LEN);
    let mut ranges: Vec<Range> = (0..LEN / 4096)
        .map(|i| Range {
            address: address as usize + i * 4096,
            len: 4096,
        })
        .collect();
    let rows: Vec<Range> = ranges.iter().copied().step_by(2).collect();
    random.shuffle(&mut ranges);
    for (list, len) in [(ranges, LEN), (rows, LEN / 2)] {
        // SAFETY: all memory stays valid, and nothing else uses it, until the copies are done.
        let back = unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), host.address(), len);
            queue.scatter(host.address(), &list)?;
            let ticket = queue.gather(&list, host.address().add(LEN))?;
            queue.wait(ticket)?;
            std::slice::from_raw_parts(host.address().add(LEN), len)
        };
        expect_equal(what, back, &bytes[..len])?;
        expect_current(driver, current, "after copies")?;
    }
    drop((queue, host));
    expect_current(driver, current, "after a queue's end")?;
    println!("place: {what} is on device {}", device.ordinal());
    Ok(())
}

/// Checks that a forked child has no CUDA: all memory counts as host memory, and a device is an
/// error.
fn in_a_forked_child(address: usize) -> Outcome {
    // SAFETY: no other thread runs yet, and the child exits without running destructors.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let is_right =
            matches!(locate(address, LEN), Ok(None)) && matches!(device(0), Err(Error::Forked));
        // SAFETY: `_exit` ends the process at once.
        unsafe { libc::_exit(i32::from(!is_right)) };
    }
    let mut status = -1;
    // SAFETY: waits for the child and stores a number.
    unsafe { libc::waitpid(child, &mut status, 0) };
    if status != 0 {
        return Err(format!("a forked child found device memory, or crashed: {status:#x}").into());
    }
    println!("place: to a forked child it is host memory");
    Ok(())
}

/// Checks two adjacent mappings, as made by allocators with expandable segments.
fn virtual_memory(driver: &Driver, ordinal: u32) -> Outcome {
    const DEVICE: c_int = 1;
    let properties = AllocationProperties {
        kind: 1,
        location_kind: DEVICE,
        location_id: ordinal as c_int,
        ..Default::default()
    };
    let access = AccessDescription {
        location_kind: DEVICE,
        location_id: ordinal as c_int,
        flags: 3,
    };
    let half = LEN / 2;
    let mut address = 0;
    driver.mem_address_reserve(&mut address, 2 * LEN, 0, 0, 0)?;
    for i in 0..2 {
        let mut handle = 0;
        driver.mem_create(&mut handle, half, &properties, 0)?;
        driver.mem_map(address + i * half as u64, half, 0, handle, 0)?;
        driver.mem_release(handle)?;
    }
    driver.mem_set_access(address, LEN, &access, 1)?;
    usable(driver, "virtual memory of two mappings", address)?;
    match locate(address as usize, LEN + 1) {
        Err(Error::OutOfAllocation { .. }) => {}
        other => println!("place: note: a range past the mappings gives {other:?}"),
    }
    for i in 0..2 {
        driver.mem_unmap(address + i * half as u64, half)?;
    }
    driver.mem_address_free(address, 2 * LEN)
}
