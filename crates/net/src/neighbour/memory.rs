//! The memory of another process.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, getgid, getpid, getuid, pidfd_open};

use super::error::{Error, Refusal, Side, ptrace_scope};
use super::nonce::NONCE_BYTES;
use super::wire::{Credentials, Wire};
use crate::fork::Private;
use crate::span::{Cursor, Span};

/// Number of pieces of either side per system call: 1 MiB of 4 KiB blocks, while the arrays (4 KiB
/// each) stay on the stack. The kernel allows 1024.
const MAX_PIECES: usize = 256;

/// A range of a neighbour's memory. Any value is harmless: the kernel checks it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remote {
    /// The first address, in the neighbour.
    pub address: u64,
    /// Bytes in the range.
    pub len: usize,
}

/// The process at the other end of a wire: reads and writes its memory, and reports when it has
/// ended.
///
/// [`Neighbour::of`] holds the process by a descriptor (pidfd) that never refers to another one.
/// The calls that move memory identify it by process id, which the kernel may reuse after the
/// process has ended. Therefore
///
/// - a read checks *after* the last byte whether the process still exists: the bytes that it
///   returns with success came from that process;
/// - a write checks before every system call. The window that remains is the time between the two
///   calls: the process would have to end, be reaped, and its id be reused within that time, while
///   the kernel reuses all other ids first.
///
/// A process that executes another program keeps its id and its pidfd, with other memory behind the
/// same addresses. `exec` closes its end of the wire, so both checks include the wire: move memory
/// only while the [`Wire`] is open.
///
/// The descriptor ([`AsFd`]) is readable once the process has ended. All its threads have then left
/// the kernel: none of its memory accesses is in progress.
#[derive(Debug)]
pub struct Neighbour {
    pid: Pid,
    credentials: Credentials,
    process: Private<OwnedFd>,
    wire: Arc<Private<OwnedFd>>,
}

impl Neighbour {
    /// Opens the process at the other end of `wire`: the one that connected, or that opened the
    /// door.
    ///
    /// # Errors
    /// [`Error::Gone`], [`Refusal::OtherNamespace`], or the kernel has no descriptors of processes
    /// (before 5.3).
    pub fn of(wire: &Wire) -> Result<Self, Error> {
        let credentials = wire.credentials()?;
        let pid = credentials.pid.ok_or(Refusal::OtherNamespace)?;
        let process = Private::new(|| open_process(wire, pid))?;
        let neighbour = Self {
            pid,
            credentials,
            process,
            wire: wire.socket(),
        };
        // An id opened while the wire was open belongs to the process at its other end.
        neighbour.check()?;
        Ok(neighbour)
    }

    /// Returns the process id.
    #[must_use]
    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// Returns the credentials of the process at the time it connected, or opened the door.
    #[must_use]
    pub fn credentials(&self) -> Credentials {
        self.credentials
    }

    /// Returns whether the process has ended. From then on it accesses no memory.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        has_event(&mut [PollFd::new(&*self.process, PollFlags::IN)])
    }

    /// Copies memory of the neighbour, range after range, to the cursor's position in a list of
    /// spans, until either list ends. Returns the number of bytes copied.
    ///
    /// # Errors
    /// Any [`Error`]; some bytes may have been copied.
    pub fn read(&self, from: &[Remote], to: (&[Span], Cursor)) -> Result<usize, Error> {
        let moved = self.transfer(Way::Read, from, to)?;
        self.check()?;
        Ok(moved)
    }

    /// Copies from the cursor's position in a list of spans to memory of the neighbour, range after
    /// range, until either list ends. Returns the number of bytes copied.
    ///
    /// # Errors
    /// Any [`Error`]; some bytes may have been copied.
    pub fn write(&self, from: (&[Span], Cursor), to: &[Remote]) -> Result<usize, Error> {
        self.transfer(Way::Write, to, from)
    }

    /// Reads the [`super::Nonce`] at an address of the neighbour. This also shows whether its
    /// memory can be reached at all.
    ///
    /// # Errors
    /// Any [`Error`]; [`Error::Refused`] names the missing permission.
    pub fn read_nonce(&self, address: u64) -> Result<[u8; NONCE_BYTES], Error> {
        let mut bytes = [0; NONCE_BYTES];
        let len = bytes.len();
        // SAFETY: only this call uses the array, which outlives the span.
        let to = unsafe { Span::new(bytes.as_mut_ptr(), len) };
        self.read(&[Remote { address, len }], (&[to], Cursor::default()))?;
        Ok(bytes)
    }

    /// Fails if the process has ended, or its wire is closed.
    fn check(&self) -> Result<(), Error> {
        let mut either = [
            PollFd::new(&*self.process, PollFlags::IN),
            PollFd::new(&**self.wire, PollFlags::RDHUP),
        ];
        if has_event(&mut either) {
            return Err(Error::Gone);
        }
        Ok(())
    }

    fn transfer(
        &self,
        way: Way,
        remote: &[Remote],
        (local, mut at): (&[Span], Cursor),
    ) -> Result<usize, Error> {
        let mut ahead = Ahead {
            ranges: remote,
            offset: 0,
        };
        let mut moved = 0;
        loop {
            let (mut here, mut there) = (Pieces::new(), Pieces::new());
            let here = here.fill(at.rest(local).map(|span| (span.address(), span.len())));
            let there = there.fill(ahead.rest());
            if here.is_empty() || there.is_empty() {
                return Ok(moved);
            }
            if way == Way::Write {
                self.check()?;
            }
            match way.call(self.pid, here, there) {
                Ok(count @ 1..) => {
                    at.advance(local, count);
                    ahead.advance(count);
                    moved += count;
                }
                Err(Errno::INTR) => {}
                Ok(0) | Err(Errno::FAULT) => {
                    let side = self.faulty_side(way, at.rest(local), there[0]);
                    return Err(Error::Fault { side, at: moved });
                }
                Err(Errno::SRCH) => return Err(Error::Gone),
                Err(Errno::PERM | Errno::NOSYS) => return Err(self.refusal().into()),
                Err(error) => return Err(Error::System(error.into())),
            }
        }
    }

    /// Finds out whose memory stopped a transfer, given the first bytes not moved on either side.
    fn faulty_side(
        &self,
        way: Way,
        mut here: impl Iterator<Item = Span>,
        there: libc::iovec,
    ) -> Side {
        let mut byte = 0_u8;
        let is_there = match way {
            // The target is mapped, so that only the source can fault.
            Way::Read => {
                let one = |iov_base| libc::iovec {
                    iov_base,
                    iov_len: 1,
                };
                let (to, from) = (one((&raw mut byte).cast()), one(there.iov_base));
                way.call(self.pid, &[to], &[from]).is_err()
            }
            // Probes without writing: the kernel checks all addresses of a list first.
            Way::Write => !here.any(|span| {
                let first = span.slice(0, 1);
                first.is_some_and(|first| first.copy_to(std::slice::from_mut(&mut byte)).is_err())
            }),
        };
        if is_there { Side::There } else { Side::Here }
    }

    /// Finds out why the kernel does not let this process access the other.
    fn refusal(&self) -> Refusal {
        let mut bytes = [0_u8; 2];
        let [from, to] = bytes.each_mut().map(|byte| libc::iovec {
            iov_base: std::ptr::from_mut(byte).cast(),
            iov_len: 1,
        });
        // Every process may reach its own memory.
        if Way::Read.call(getpid(), &[to], &[from]).is_err() {
            return Refusal::Filtered;
        }
        let Credentials { uid, gid, .. } = self.credentials;
        if (uid, gid) != (getuid().as_raw(), getgid().as_raw()) {
            return Refusal::OtherUser { uid, gid };
        }
        match ptrace_scope() {
            0 => Refusal::Protected,
            scope => Refusal::Yama { scope },
        }
    }
}

impl AsFd for Neighbour {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.process.as_fd()
    }
}

/// Opens a descriptor of the process at the other end of a wire.
fn open_process(wire: &Wire, pid: Pid) -> Result<OwnedFd, Error> {
    let mut number: libc::c_int = -1;
    // Since Linux 6.5: a descriptor of the very process that the credentials name.
    match wire.option(libc::SO_PEERPIDFD, &mut number) {
        // SAFETY: the kernel has made the descriptor for this call; it is closed on `exec`.
        Ok(()) if number >= 0 => return Ok(unsafe { OwnedFd::from_raw_fd(number) }),
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => return Err(Error::Gone),
        _ => {}
    }
    // The caller checks that the process id was not reused.
    pidfd_open(pid, PidfdFlags::empty()).map_err(|error| match error {
        Errno::SRCH => Error::Gone,
        error => Error::System(error.into()),
    })
}

/// Returns whether one of the descriptors reports something now.
fn has_event(fds: &mut [PollFd<'_>]) -> bool {
    loop {
        match poll(fds, Some(&Timespec::default())) {
            Err(Errno::INTR) => {}
            // A failed poll counts as an event.
            result => return result != Ok(0),
        }
    }
}

/// The direction of a transfer.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    /// From the neighbour to this process.
    Read,
    /// From this process to the neighbour.
    Write,
}

impl Way {
    /// Moves bytes between this process and another, as many as the shorter list has, and returns
    /// their number: less if memory on the way is not mapped.
    fn call(self, pid: Pid, here: &[libc::iovec], there: &[libc::iovec]) -> Result<usize, Errno> {
        let (pid, call) = (
            pid.as_raw_nonzero().get(),
            match self {
                Self::Read => libc::process_vm_readv,
                Self::Write => libc::process_vm_writev,
            },
        );
        let (here_count, there_count) = (here.len() as libc::c_ulong, there.len() as libc::c_ulong);
        // SAFETY: the kernel checks all ranges. Local ranges come from spans, which may be read and
        // overwritten by the contract of `Span::new`, or from locals of the caller.
        let moved = unsafe {
            call(
                pid,
                here.as_ptr(),
                here_count,
                there.as_ptr(),
                there_count,
                0,
            )
        };
        usize::try_from(moved).map_err(|_| {
            let error = io::Error::last_os_error();
            Errno::from_io_error(&error).unwrap_or(Errno::IO)
        })
    }
}

/// Ranges of one side for one system call. Left uninitialised: clearing them would cost more than a
/// small transfer.
struct Pieces([MaybeUninit<libc::iovec>; MAX_PIECES]);

impl Pieces {
    fn new() -> Self {
        Self([const { MaybeUninit::uninit() }; MAX_PIECES])
    }

    /// Writes as many ranges, by address and length, as fit; skips empty ones.
    fn fill(&mut self, ranges: impl Iterator<Item = (usize, usize)>) -> &[libc::iovec] {
        let mut count = 0;
        let ranges = ranges.filter(|(_, len)| *len > 0);
        for (slot, (address, iov_len)) in self.0.iter_mut().zip(ranges) {
            slot.write(libc::iovec {
                iov_base: std::ptr::with_exposed_provenance_mut(address),
                iov_len,
            });
            count += 1;
        }
        // SAFETY: the first `count` elements are written.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), count) }
    }
}

/// The rest of a list of remote ranges.
struct Ahead<'a> {
    ranges: &'a [Remote],
    // Less than the length of the first range, or 0.
    offset: usize,
}

impl Ahead<'_> {
    fn rest(&self) -> impl Iterator<Item = (usize, usize)> {
        let mut skip = self.offset;
        self.ranges.iter().map(move |range| {
            let skip = std::mem::take(&mut skip);
            // Nothing is mapped at an address beyond the range of pointers.
            let address = usize::try_from(range.address).unwrap_or(usize::MAX);
            (address.wrapping_add(skip), range.len - skip)
        })
    }

    /// Moves forward by `count` bytes, which must not go past the end.
    fn advance(&mut self, count: usize) {
        let mut count = count;
        while let Some(first) = self.ranges.first() {
            let left = first.len - self.offset;
            if count < left {
                self.offset += count;
                return;
            }
            count -= left;
            self.ranges = &self.ranges[1..];
            self.offset = 0;
        }
    }
}
