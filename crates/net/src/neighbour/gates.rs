//! Gates: the owner of memory closes one to stop access to the memory.

mod gate;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic;

use rustix::fs::{
    MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create,
};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use self::gate::Gate;
use crate::fork::{Private, Process};

/// Seals of the shared memory. Memory that could still shrink would end its users with SIGBUS.
const SEALS: SealFlags = SealFlags::SHRINK
    .union(SealFlags::GROW)
    .union(SealFlags::SEAL);

/// Gates in memory that two processes share, by which the owner of memory stops access by the user.
///
/// The owner [creates](Gates::create) them and passes the [descriptor](Gates::descriptor) to the
/// user, which [opens](Gates::open) them. Owner and user agree on which gate stands before which
/// memory. The user [enters](Gates::enter) before each access and leaves after it. The owner
/// [closes](Gates::close) a gate and waits until it has no [users](Gates::users), or until the
/// user's process has ended: from then on nobody accesses the memory.
///
/// # Why nobody is inside
///
/// ```text
///   user                              owner
///   U1  users += 1                    O1  closed = 1
///   U2  closed? ─► users -= 1, out    O2  users == 0 ─► the memory is free
///   …   access
///   U3  users -= 1
/// ```
///
/// All four steps are sequentially consistent, so both processes see them in one order. If U1 comes
/// before O2, the owner sees the user counted, until U3. Otherwise O1 comes before U2 as well, and
/// the user sees the gate closed. A 0 that the owner reads was written by U3 (release), after the
/// access.
///
/// # What the other side can do
///
/// The other process can write anything to the gates. A wrong count can only make the owner wait
/// longer before it frees memory that the other could reach anyway; count and state are separate
/// words, so that no count closes or opens a gate; and the memory is sealed, so that its size never
/// changes.
///
/// A forked child neither enters nor leaves: passes belong to the process that took them.
#[derive(Debug)]
pub struct Gates {
    gates: NonNull<Gate>,
    count: usize,
    memory: Private<OwnedFd>,
    process: Process,
}

// SAFETY: the memory stays mapped until the value is dropped, and all access to it is atomic.
unsafe impl Send for Gates {}
// SAFETY: as above.
unsafe impl Sync for Gates {}

impl Gates {
    /// Makes `count` open gates: the owner's end.
    ///
    /// # Errors
    /// `count` is 0 or too large, or the process is out of descriptors or memory.
    pub fn create(count: usize) -> io::Result<Self> {
        let bytes = bytes_of(count)?;
        let memory = Private::new(|| {
            let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
            let name = c"tcpx-gates";
            // Since Linux 6.3, where an administrator may require the flag.
            match memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL) {
                Err(Errno::INVAL) => memfd_create(name, flags),
                made => made,
            }
        })?;
        ftruncate(&*memory, bytes as u64)?;
        fcntl_add_seals(&*memory, SEALS)?;
        Self::map(memory, count)
    }

    /// Opens `count` gates that another process has made: the user's end.
    ///
    /// # Errors
    /// `InvalidData`: the descriptor is no memory, has another size, or its size is not sealed.
    /// Else as [`Gates::create`].
    pub fn open(memory: OwnedFd, count: usize) -> io::Result<Self> {
        let bytes = bytes_of(count)?;
        // Fails also for a descriptor that is no memory.
        let is_sealed = fcntl_get_seals(&memory).is_ok_and(|seals| seals.contains(SEALS));
        if !is_sealed || u64::try_from(fstat(&memory)?.st_size) != Ok(bytes as u64) {
            let text = "not the sealed memory of the expected number of gates";
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        Self::map(Private::new(|| Ok::<_, io::Error>(memory))?, count)
    }

    fn map(memory: Private<OwnedFd>, count: usize) -> io::Result<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let bytes = bytes_of(count)?;
        // SAFETY: the kernel chooses the address, so the mapping overlaps nothing.
        let gates = unsafe {
            mmap(
                std::ptr::null_mut(),
                bytes,
                access,
                MapFlags::SHARED,
                &*memory,
                0,
            )?
        };
        Ok(Self {
            gates: NonNull::new(gates.cast()).ok_or(io::ErrorKind::OutOfMemory)?,
            count,
            memory,
            process: Process::current(),
        })
    }

    /// Returns the shared memory, to be passed to the other process.
    #[must_use]
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }

    /// Returns how many gates there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.count
    }

    /// Enters a gate, as its user, until the pass is dropped. Returns `None` if the gate is closed
    /// or does not exist.
    #[must_use]
    pub fn enter(&self, index: usize) -> Option<Pass<'_>> {
        // Built lazily: dropping a pass that was not counted in would count it out.
        self.count_in(index).then(|| Pass { gates: self, index })
    }

    /// Enters a gate as [`Gates::enter`] does, with a pass that keeps the gates alive.
    #[must_use]
    pub fn enter_owned(self: &Arc<Self>, index: usize) -> Option<OwnedPass> {
        self.count_in(index).then(|| OwnedPass {
            gates: Arc::clone(self),
            index,
        })
    }

    /// Closes a gate, as its owner. Nobody enters any more; [`Gates::users`] counts the passes
    /// still in use.
    ///
    /// # Panics
    /// There is no such gate.
    pub fn close(&self, index: usize) {
        self.all()[index].close();
    }

    /// Returns the number of passes of a gate in use. Once it has been 0 on a closed gate, nobody
    /// accesses the memory behind it.
    ///
    /// A process that ends inside stays counted: check [`super::Neighbour::is_gone`] as well.
    ///
    /// # Panics
    /// There is no such gate.
    #[must_use]
    pub fn users(&self, index: usize) -> u32 {
        self.all()[index].users()
    }

    /// Reopens a closed gate, as its owner, and returns `true`. Call this only after the user has
    /// confirmed that it has forgotten the memory behind the gate: it could not distinguish that
    /// memory from the next.
    ///
    /// Returns `false`, and leaves the gate closed, while it has users.
    ///
    /// # Panics
    /// There is no such gate.
    #[must_use]
    pub fn reopen(&self, index: usize) -> bool {
        self.all()[index].reopen()
    }

    fn count_in(&self, index: usize) -> bool {
        let Some(gate) = self.all().get(index) else {
            return false;
        };
        // Checked first, so that a user who retries in a loop does not keep the owner waiting.
        if gate.is_closed() || !self.process.is_current() {
            return false;
        }
        gate.enter()
    }

    fn count_out(&self, index: usize) {
        if self.process.is_current() {
            self.all()[index].leave();
        }
    }

    fn all(&self) -> &[Gate] {
        // SAFETY: the mapping has `count` gates, is aligned to pages, stays while `self` lives and
        // cannot shrink. Every value of a gate is valid, and all access to it is atomic.
        unsafe { std::slice::from_raw_parts(self.gates.as_ptr(), self.count) }
    }
}

impl Drop for Gates {
    fn drop(&mut self) {
        // SAFETY: mapped in `map`, and not used afterwards. A forked child unmaps its own mapping.
        // Fails only where the system has no room for a split mapping, which this is not.
        let _ = unsafe { munmap(self.gates.as_ptr().cast(), self.count * size_of::<Gate>()) };
    }
}

/// Permission to access the memory behind a gate, until it is dropped.
#[derive(Debug)]
#[must_use]
pub struct Pass<'a> {
    gates: &'a Gates,
    index: usize,
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        self.gates.count_out(self.index);
    }
}

/// Permission to access the memory behind a gate, until it is dropped; keeps the gates alive.
#[derive(Debug)]
#[must_use]
pub struct OwnedPass {
    gates: Arc<Gates>,
    index: usize,
}

impl Drop for OwnedPass {
    fn drop(&mut self) {
        self.gates.count_out(self.index);
    }
}

/// Returns the size of the memory of `count` gates.
fn bytes_of(count: usize) -> io::Result<usize> {
    let bytes = count.checked_mul(size_of::<Gate>());
    // Offsets in files are signed.
    bytes
        .filter(|bytes| (1..=isize::MAX as usize).contains(bytes))
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "invalid number of gates"))
}
