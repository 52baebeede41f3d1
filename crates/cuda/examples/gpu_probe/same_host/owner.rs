//! The process that owns the memory: serves the requests of the other one.

use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use tcpx_cuda::{Device, Error, Range, device};

use super::wire::{receive, send};
use super::{CHECKED, Request, written};
use crate::Outcome;
use crate::bytes::{Random, expect_equal};
use crate::raw::{AccessDescription, AllocationProperties, Driver, PoolProperties};

const DEVICE: c_int = 1;
const PINNED: c_int = 1;
const POSIX_FD: c_int = 1;

/// Serves requests from standard input, a socket, until it is closed.
pub(crate) fn run(ordinal: u32) -> Outcome {
    // SAFETY: the parent process gave this descriptor to this process only.
    let mut socket = UnixStream::from(unsafe { OwnedFd::from_raw_fd(0) });
    let device = device(ordinal)?;
    let driver = Driver::open()?;
    let mut memory: Option<Memory<'_>> = None;
    while let Ok((request, _)) = receive(&mut socket) {
        let request = Request::decode(&request)?;
        if let Request::Check = request {
            let answer = match &memory {
                Some(memory) => memory.check(),
                None => Err("there is no memory".into()),
            };
            let text = answer.err().map(|error| error.to_string());
            send(&mut socket, text.unwrap_or_default().as_bytes(), &[])?;
            continue;
        }
        drop(memory.take());
        let made = memory.insert(Memory::new(&device, &driver, request)?);
        let whole = Range {
            address: made.address as usize,
            len: made.len,
        };
        match device.export(whole) {
            Ok(export) => {
                expect_closed_on_exec(export.fds())?;
                send(&mut socket, b"", &[])?;
                send(&mut socket, &export.description().encode(), export.fds())?;
            }
            Err(error) => send(&mut socket, kind_of(&error).as_bytes(), &[])?,
        }
    }
    Ok(())
}

/// Checks that programs which this process starts do not inherit the memory.
fn expect_closed_on_exec(fds: &[OwnedFd]) -> Outcome {
    for fd in fds {
        // SAFETY: reads the flags of a descriptor.
        let flags = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFD) };
        if flags & libc::FD_CLOEXEC == 0 {
            return Err("an exported descriptor is inherited by other programs".into());
        }
    }
    Ok(())
}

/// Returns the error with the name of its variant.
fn kind_of(error: &Error) -> String {
    let name = format!("{error:?}");
    let name = name.split([' ', '(']).next().unwrap_or_default();
    format!("{name}: {error}")
}

struct Memory<'a> {
    device: Arc<dyn Device>,
    driver: &'a Driver,
    address: u64,
    len: usize,
    how: How,
}

enum How {
    Malloc,
    Pieces(Vec<usize>),
    Pool(*mut c_void),
    DefaultPool,
}

impl<'a> Memory<'a> {
    fn new(device: &Arc<dyn Device>, driver: &'a Driver, request: Request) -> Outcome<Self> {
        let _current = device.make_current()?;
        let mut address = 0;
        let location_id = device.ordinal() as c_int;
        let (len, how) = match request {
            Request::Malloc { len } => {
                driver.mem_alloc(&mut address, len)?;
                (len, How::Malloc)
            }
            Request::Pieces { .. } | Request::Repeated { .. } => {
                let (pieces, is_shareable, is_one) = match request {
                    Request::Repeated { len, times } => (vec![len; times], true, true),
                    Request::Pieces {
                        pieces,
                        is_shareable,
                    } => (pieces, is_shareable, false),
                    _ => unreachable!("one of the two"),
                };
                let len = pieces.iter().sum();
                let properties = AllocationProperties {
                    kind: PINNED,
                    handle_types: POSIX_FD * c_int::from(is_shareable),
                    location_kind: DEVICE,
                    location_id,
                    ..Default::default()
                };
                driver.mem_address_reserve(&mut address, len, 0, 0, 0)?;
                let (mut at, mut handle) = (address, 0);
                for (i, &len) in pieces.iter().enumerate() {
                    if i == 0 || !is_one {
                        driver.mem_create(&mut handle, len, &properties, 0)?;
                    }
                    driver.mem_map(at, len, 0, handle, 0)?;
                    if i + 1 == pieces.len() || !is_one {
                        driver.mem_release(handle)?;
                    }
                    at += len as u64;
                }
                let access = AccessDescription {
                    location_kind: DEVICE,
                    location_id,
                    flags: 3,
                };
                driver.mem_set_access(address, len, &access, 1)?;
                (len, How::Pieces(pieces))
            }
            Request::Pool { len, is_shareable } => {
                let properties = PoolProperties {
                    kind: PINNED,
                    handle_types: POSIX_FD * c_int::from(is_shareable),
                    location_kind: DEVICE,
                    location_id,
                    ..Default::default()
                };
                let mut pool = std::ptr::null_mut();
                driver.mem_pool_create(&mut pool, &properties)?;
                driver.mem_alloc_from_pool_async(&mut address, len, pool, std::ptr::null_mut())?;
                (len, How::Pool(pool))
            }
            Request::DefaultPool { len } => {
                driver.mem_alloc_async(&mut address, len, std::ptr::null_mut())?;
                (len, How::DefaultPool)
            }
            Request::Check => return Err("no request for memory".into()),
        };
        // Memory of a pool exists once the stream has reached it. The default stream is idle, so
        // that is soon: a copy on the same stream would wait for it.
        if let How::Pool(_) | How::DefaultPool = how {
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
        let made = Self {
            device: Arc::clone(device),
            driver,
            address,
            len,
            how,
        };
        made.fill()?;
        Ok(made)
    }

    fn checked(&self) -> Range {
        Range {
            address: self.address as usize,
            len: self.len.min(CHECKED),
        }
    }

    fn fill(&self) -> Outcome {
        let range = self.checked();
        let host = self.device.pin(range.len)?;
        let bytes = Random::new(range.len as u64).bytes(range.len);
        let mut queue = self.device.queue()?;
        // SAFETY: all memory stays valid, and nothing else uses it, until the copy is done.
        let ticket = unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), host.address(), range.len);
            queue.scatter(host.address(), &[range])?
        };
        Ok(queue.wait(ticket)?)
    }

    /// Checks that the other process has written the expected bytes.
    fn check(&self) -> Outcome {
        let range = self.checked();
        let host = self.device.pin(range.len)?;
        let mut queue = self.device.queue()?;
        // SAFETY: as above.
        let found = unsafe {
            let ticket = queue.gather(&[range], host.address())?;
            queue.wait(ticket)?;
            std::slice::from_raw_parts(host.address(), range.len)
        };
        expect_equal("what the other process wrote", found, &written(range.len))
    }

    fn free(&self) -> Outcome {
        let _current = self.device.make_current()?;
        match &self.how {
            How::Malloc => self.driver.mem_free(self.address),
            How::Pieces(pieces) => {
                let mut at = self.address;
                for &len in pieces {
                    self.driver.mem_unmap(at, len)?;
                    at += len as u64;
                }
                self.driver.mem_address_free(self.address, self.len)
            }
            &How::Pool(pool) => {
                self.driver
                    .mem_free_async(self.address, std::ptr::null_mut())?;
                self.driver.mem_pool_destroy(pool)
            }
            How::DefaultPool => self
                .driver
                .mem_free_async(self.address, std::ptr::null_mut()),
        }
    }
}

impl Drop for Memory<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.free() {
            eprintln!("owner: {error}");
        }
    }
}
