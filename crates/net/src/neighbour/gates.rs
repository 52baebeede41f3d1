//! Gates to memory, which its owner closes.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::{
    MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create,
};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::fork::{Private, Process};

/// What is sealed: memory that could still shrink would end its users with SIGBUS.
const SEALS: SealFlags = SealFlags::SHRINK
    .union(SealFlags::GROW)
    .union(SealFlags::SEAL);

/// One gate, alone on its cache line: its users do not slow down those of others.
#[repr(C, align(64))]
struct Gate {
    /// Passes that are out. Written by the user alone.
    users: AtomicU32,
    /// Not 0 once the gate is closed. Written by the owner alone.
    closed: AtomicU32,
}

/// Gates in memory that two processes share, by which the owner of memory stops the other's access.
///
/// The owner [creates](Gates::create) them and passes the [descriptor](Gates::descriptor) to the
/// user, which [opens](Gates::open) them. Owner and user agree on which gate stands before which
/// memory. The user [enters](Gates::enter) before each access and leaves after it. The owner
/// [closes](Gates::close) a gate and waits until it has no [users](Gates::users), or until the
/// user's process has ended: then nobody accesses the memory, and nobody will.
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
/// All four steps are sequentially consistent, so they have one order that both see. If U1 comes
/// before O2, the owner finds the user counted, until U3. Otherwise O1 comes before U2 as well, and
/// the user finds the gate closed. What the owner reads as 0 was written by U3 (release), after
/// the access.
///
/// # What the other side can do
///
/// It can write anything to the gates. A count is only ever believed in the sense of "wait longer",
/// by an owner who frees memory that the other could reach anyway; the two words are apart, so that
/// no count closes or opens a gate; and the memory is sealed, so that it stays as long as it is.
///
/// A forked child enters nothing and leaves nothing: passes belong to the process that took them.
#[derive(Debug)]
pub struct Gates {
    gates: NonNull<Gate>,
    count: usize,
    memory: Private<OwnedFd>,
    process: Process,
}

// SAFETY: the memory stays mapped until the value is dropped, and is accessed by atomics alone.
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
            // Since Linux 6.3, where an administrator may demand it.
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
    /// `InvalidData`: the descriptor is no memory, or of another size, or its size is not sealed.
    /// Else as [`Gates::create`].
    pub fn open(memory: OwnedFd, count: usize) -> io::Result<Self> {
        let bytes = bytes_of(count)?;
        // Also refused by whatever is no memory at all.
        let is_sealed = fcntl_get_seals(&memory).is_ok_and(|seals| seals.contains(SEALS));
        if !is_sealed || u64::try_from(fstat(&memory)?.st_size) != Ok(bytes as u64) {
            let text = "not the sealed memory of so many gates";
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        Self::map(Private::new(|| Ok::<_, io::Error>(memory))?, count)
    }

    fn map(memory: Private<OwnedFd>, count: usize) -> io::Result<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let bytes = bytes_of(count)?;
        // SAFETY: a new mapping, which overlaps nothing.
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

    /// Enters a gate, as its user, until the pass is dropped. `None`: it is closed, or there is no
    /// such gate.
    #[must_use]
    pub fn enter(&self, index: usize) -> Option<Pass<'_>> {
        // Not made where it is not given: dropping it would count.
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

    /// Closes a gate, as its owner. Nobody enters any more; whoever is inside is counted by
    /// [`Gates::users`].
    ///
    /// # Panics
    /// There is no such gate.
    pub fn close(&self, index: usize) {
        self.all()[index].closed.store(1, Ordering::SeqCst);
    }

    /// Returns how many passes of a gate are out. Once it has been 0 on a closed gate, nobody
    /// accesses the memory behind it.
    ///
    /// A process that ends inside stays counted: ask [`super::Neighbour::is_gone`] as well.
    ///
    /// # Panics
    /// There is no such gate.
    #[must_use]
    pub fn users(&self, index: usize) -> u32 {
        self.all()[index].users.load(Ordering::SeqCst)
    }

    /// Opens a closed gate anew, as its owner, and returns `true`. Only once the user has said that
    /// it has forgotten what was behind the gate: it could not tell that from what comes next.
    ///
    /// Returns `false`, and leaves the gate closed, while it has users.
    ///
    /// # Panics
    /// There is no such gate.
    #[must_use]
    pub fn reopen(&self, index: usize) -> bool {
        let is_empty = self.users(index) == 0;
        if is_empty {
            self.all()[index].closed.store(0, Ordering::SeqCst);
        }
        is_empty
    }

    fn count_in(&self, index: usize) -> bool {
        let Some(gate) = self.all().get(index) else {
            return false;
        };
        // First, so that a user who tries again and again does not keep the owner waiting.
        if gate.closed.load(Ordering::SeqCst) != 0 || !self.process.is_current() {
            return false;
        }
        gate.users.fetch_add(1, Ordering::SeqCst);
        if gate.closed.load(Ordering::SeqCst) != 0 {
            gate.users.fetch_sub(1, Ordering::SeqCst);
            return false;
        }
        true
    }

    fn count_out(&self, index: usize) {
        if self.process.is_current() {
            self.all()[index].users.fetch_sub(1, Ordering::SeqCst);
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

/// Leave to access what is behind a gate, until it is dropped.
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

/// Leave to access what is behind a gate, until it is dropped; it keeps the gates alive.
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

/// Returns how large the memory of `count` gates is.
fn bytes_of(count: usize) -> io::Result<usize> {
    let bytes = count.checked_mul(size_of::<Gate>());
    // Offsets in files are signed.
    bytes
        .filter(|bytes| (1..=isize::MAX as usize).contains(bytes))
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "so many gates cannot be"))
}
