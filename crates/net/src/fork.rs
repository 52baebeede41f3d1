//! Detects forks and keeps descriptors out of forked children.
//!
//! A forked child has its parent's memory and none of its threads: locks may stay held for ever,
//! and a stream that both processes use is corrupted. [`Process`] identifies the process that owns
//! a value, at the cost of one load; [`InProcess`] holds a value that other processes must not
//! touch. `Private` holds a descriptor that the fork itself closes in every child, so that a child
//! keeps neither connections nor ports of its parent.
//!
//! Each process has a *generation*, kept on a page that the kernel clears in children
//! (`MADV_WIPEONFORK`). The handlers of `pthread_atfork` clear the page as well, for kernels
//! without that call, and close descriptors. Children made without these handlers (`clone`,
//! `_Fork`) keep the descriptors, but still see that they are children. Executed programs keep
//! none: every descriptor is closed on `exec`.
//!
//! ```text
//!   fork:  before_fork ── waits until no descriptor is being made or closed
//!            ├─ parent: in_parent ── lets them go on
//!            └─ child:  in_child ─── clears the generation, closes the descriptors
//! ```

use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::os::fd::{AsRawFd, RawFd};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Identifies one process, distinct from its parents and children by fork.
#[derive(Clone, Copy, Debug)]
pub struct Process {
    /// The process that is running.
    now: &'static Current,
    generation: u64,
    id: u32,
}

impl Process {
    /// Returns the current process.
    #[must_use]
    pub fn current() -> Self {
        let now = page();
        let generation = generation(now);
        Self {
            now,
            generation,
            id: now.id.load(Ordering::Relaxed),
        }
    }

    /// Returns whether this is the current process. Never blocks, and takes no lock.
    #[inline]
    #[must_use]
    pub fn is_current(&self) -> bool {
        self.now.generation.load(Ordering::Relaxed) == self.generation
    }

    /// Refuses a call made in another process. Never blocks, and takes no lock.
    ///
    /// # Errors
    /// Fails if the current process was forked from this one.
    #[inline]
    pub fn check(&self) -> Result<(), Forked> {
        if self.is_current() {
            Ok(())
        } else {
            Err(Forked { process: self.id })
        }
    }
}

/// Reports a call made in a child of the process that owns the handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "this belongs to the session of process {process}, which forked: create a session in this process"
)]
pub struct Forked {
    /// The process that the handle belongs to.
    pub process: u32,
}

/// Holds a value that only its own process uses and drops. A child may read what never changes;
/// every call that waits or takes a lock calls [`InProcess::check`] first. Dropping it in a child
/// does nothing.
#[derive(Debug)]
pub struct InProcess<T> {
    value: ManuallyDrop<T>,
    process: Process,
}

impl<T> InProcess<T> {
    /// Creates a value that belongs to the current process.
    #[must_use]
    pub fn new(value: T) -> Self {
        Self::of(Process::current(), value)
    }

    /// Creates a value that belongs to `process`.
    #[must_use]
    pub fn of(process: Process, value: T) -> Self {
        Self {
            value: ManuallyDrop::new(value),
            process,
        }
    }

    /// Returns the process that the value belongs to.
    #[must_use]
    pub fn process(&self) -> Process {
        self.process
    }

    /// Returns whether the value belongs to the current process.
    #[inline]
    #[must_use]
    pub fn is_current(&self) -> bool {
        self.process.is_current()
    }

    /// Refuses a call made in another process.
    ///
    /// # Errors
    /// As [`Process::check`].
    #[inline]
    pub fn check(&self) -> Result<(), Forked> {
        self.process.check()
    }
}

impl<T: Clone> Clone for InProcess<T> {
    fn clone(&self) -> Self {
        Self::of(self.process, T::clone(&self.value))
    }
}

impl<T> Deref for InProcess<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> Drop for InProcess<T> {
    fn drop(&mut self) {
        if self.is_current() {
            // SAFETY: the value is dropped once, here, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
    }
}

/// A descriptor that forked children do not keep. A child must not use it: there, its number may
/// refer to something else.
#[derive(Debug)]
pub(crate) struct Private<T: AsRawFd> {
    descriptor: ManuallyDrop<T>,
    process: Process,
}

impl<T: AsRawFd> Private<T> {
    /// Creates a descriptor. `make` must not block, since a fork waits for it.
    pub(crate) fn new<E>(make: impl FnOnce() -> Result<T, E>) -> Result<Self, E> {
        // First, since this installs the fork handlers.
        let process = Process::current();
        let _turn = Turn::take();
        let descriptor = make()?;
        set_private(descriptor.as_raw_fd(), true);
        Ok(Self {
            descriptor: ManuallyDrop::new(descriptor),
            process,
        })
    }

    /// Returns whether the descriptor belongs to the current process. Children must not use it.
    pub(crate) fn is_current(&self) -> bool {
        self.process.is_current()
    }
}

impl<T: AsRawFd> Deref for Private<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.descriptor
    }
}

impl<T: AsRawFd> Drop for Private<T> {
    fn drop(&mut self) {
        // The fork closed the descriptor; its number may have been reused since.
        if !self.is_current() {
            return;
        }
        let _turn = Turn::take();
        set_private(self.descriptor.as_raw_fd(), false);
        // SAFETY: the descriptor is dropped once, here, and not used afterwards.
        unsafe { ManuallyDrop::drop(&mut self.descriptor) };
    }
}

/// State of the current process, on a page that the kernel clears in children.
#[derive(Debug, Default)]
struct Current {
    /// The generation of the process; zero until it is first asked for.
    generation: AtomicU64,
    /// The process id, valid once there is a generation. Cached, since asking the kernel costs a
    /// call.
    id: AtomicU32,
}

/// The page of this process, once there is one.
static PAGE: AtomicPtr<Current> = AtomicPtr::new(null_mut());

/// The generation assigned last. Children inherit this counter, so their generations are higher.
static LAST: AtomicU64 = AtomicU64::new(0);

/// Highest descriptor number that is closed in children: the default limit of Linux.
const MAX_DESCRIPTORS: usize = 1 << 20;

/// One bit for each private descriptor. Untouched parts cost no memory.
static PRIVATE: [AtomicU64; MAX_DESCRIPTORS / 64] =
    [const { AtomicU64::new(0) }; MAX_DESCRIPTORS / 64];

/// Number of words of [`PRIVATE`] ever used.
static USED: AtomicUsize = AtomicUsize::new(0);

/// Counts descriptors being made or closed, and marks a fork in progress: each waits for the other.
static TURNS: AtomicU32 = AtomicU32::new(0);
static FORKS: AtomicU32 = AtomicU32::new(0);

/// Limits how long a fork waits. A signal handler that forks may have interrupted the very thread
/// that it would wait for.
const FORK_WAIT: Duration = Duration::from_secs(5);

/// Permission to make or close a descriptor; no fork happens while it is held.
struct Turn;

impl Turn {
    fn take() -> Self {
        loop {
            TURNS.fetch_add(1, Ordering::SeqCst);
            if FORKS.load(Ordering::SeqCst) == 0 {
                return Self;
            }
            TURNS.fetch_sub(1, Ordering::SeqCst);
            while FORKS.load(Ordering::SeqCst) != 0 {
                // Forking a large process takes milliseconds.
                std::thread::sleep(Duration::from_micros(50));
            }
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        TURNS.fetch_sub(1, Ordering::SeqCst);
    }
}

fn set_private(descriptor: RawFd, private: bool) {
    let Ok(number) = usize::try_from(descriptor) else {
        return;
    };
    let (word, bit) = (number / 64, 1 << (number % 64));
    // Children keep descriptors whose numbers are beyond the table.
    let Some(bits) = PRIVATE.get(word) else {
        return;
    };
    if private {
        USED.fetch_max(word + 1, Ordering::SeqCst);
        bits.fetch_or(bit, Ordering::SeqCst);
    } else {
        bits.fetch_and(!bit, Ordering::SeqCst);
    }
}

/// Returns the generation of this process; assigns a new one in a child that has none yet.
fn generation(now: &Current) -> u64 {
    match now.generation.load(Ordering::Acquire) {
        0 => {
            now.id.store(std::process::id(), Ordering::Relaxed);
            let next = LAST.fetch_add(1, Ordering::Relaxed) + 1;
            let (done, raced) = (Ordering::AcqRel, Ordering::Acquire);
            let exchanged = now.generation.compare_exchange(0, next, done, raced);
            exchanged.err().unwrap_or(next)
        }
        known => known,
    }
}

/// Returns the page; makes it, and installs the handlers, at the first call. Takes no lock, since a
/// fork by another thread could leave the lock held.
fn page() -> &'static Current {
    let known = PAGE.load(Ordering::Acquire);
    if !known.is_null() {
        // SAFETY: the page was made below, aligned and zeroed, and is never freed.
        return unsafe { &*known };
    }
    let made = wiped_page();
    // Two threads may both get here; the handlers then run twice, which is harmless.
    // SAFETY: the handlers are functions of this program, and do only what a fork allows.
    unsafe { libc::pthread_atfork(Some(before_fork), Some(in_parent), Some(in_child)) };
    let raced = PAGE.compare_exchange(null_mut(), made, Ordering::AcqRel, Ordering::Acquire);
    // SAFETY: as above; the page of the thread that lost the race stays unused.
    unsafe { &*raced.err().unwrap_or(made) }
}

/// Returns a zeroed page that the kernel clears in children.
fn wiped_page() -> *mut Current {
    const LEN: usize = 4096;
    // SAFETY: the kernel chooses the address, so the mapping overlaps nothing.
    let page = unsafe {
        libc::mmap(
            null_mut(),
            LEN,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    if page == libc::MAP_FAILED {
        // Without a mapping, only the handlers detect forks.
        return Box::into_raw(Box::default());
    }
    // Kernels before 4.14 refuse this; there only the handlers detect forks.
    // SAFETY: the mapping was made above, and nothing else uses it.
    unsafe { libc::madvise(page, LEN, libc::MADV_WIPEONFORK) };
    page.cast()
}

extern "C" fn before_fork() {
    FORKS.fetch_add(1, Ordering::SeqCst);
    let since = Instant::now();
    while TURNS.load(Ordering::SeqCst) != 0 && since.elapsed() < FORK_WAIT {
        std::thread::yield_now();
    }
}

extern "C" fn in_parent() {
    FORKS.fetch_sub(1, Ordering::SeqCst);
}

/// Runs in the child right after the fork: uses atomics and `close` only, as a fork requires.
extern "C" fn in_child() {
    let page = PAGE.load(Ordering::Acquire);
    if !page.is_null() {
        // SAFETY: as in `page`.
        unsafe { &*page }.generation.store(0, Ordering::Relaxed);
    }
    let used = USED.load(Ordering::SeqCst);
    for (index, bits) in PRIVATE.iter().take(used).enumerate() {
        let mut bits = bits.swap(0, Ordering::SeqCst);
        while bits != 0 {
            let number = index * 64 + bits.trailing_zeros() as usize;
            bits &= bits - 1;
            // Closes the child's reference only; the parent's connection stays open.
            // SAFETY: the descriptor is the engine's of the parent process, and the child does not
            // use it.
            unsafe { libc::close(number as RawFd) };
        }
    }
    TURNS.store(0, Ordering::SeqCst);
    FORKS.store(0, Ordering::SeqCst);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    /// Runs `body` in a forked child and returns whether it returned true.
    fn in_a_child(body: impl FnOnce() -> bool) -> bool {
        // SAFETY: the child runs `body`, which at most allocates, and exits without unwinding.
        let child = unsafe { libc::fork() };
        assert!(child >= 0, "cannot fork");
        if child == 0 {
            let fine = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body));
            // SAFETY: `_exit` ends the process at once.
            unsafe { libc::_exit(i32::from(!fine.unwrap_or(false))) };
        }
        let mut status = 0;
        // SAFETY: waits for the child above, and writes its status.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        status == 0
    }

    fn is_open(number: RawFd) -> bool {
        // SAFETY: reads flags, changes nothing.
        unsafe { libc::fcntl(number, libc::F_GETFD) >= 0 }
    }

    #[test]
    fn every_process_is_another_one() {
        let parent = Process::current();
        assert!(parent.is_current());
        assert!(in_a_child(|| {
            let child = Process::current();
            !parent.is_current()
                && child.is_current()
                && child.id == std::process::id()
                && parent.check() == Err(Forked { process: parent.id })
                && in_a_child(|| {
                    !child.is_current() && !parent.is_current() && Process::current().is_current()
                })
                && child.is_current()
        }));
        assert!(parent.is_current());
    }

    #[test]
    fn a_value_is_dropped_in_its_own_process_alone() {
        struct Counted<'a>(&'a AtomicU32);
        impl Drop for Counted<'_> {
            fn drop(&mut self) {
                self.0.fetch_add(1, Ordering::Relaxed);
            }
        }
        let drops = AtomicU32::new(0);
        let mut value = Some(InProcess::new(Counted(&drops)));
        assert!(in_a_child(|| {
            let refused = value.as_ref().is_some_and(|value| value.check().is_err());
            drop(value.take());
            refused && drops.load(Ordering::Relaxed) == 0
        }));
        drop(value);
        assert_eq!(drops.load(Ordering::Relaxed), 1);
    }

    /// Without fork handlers, only the page that the kernel clears identifies a child.
    #[test]
    fn a_child_made_without_handlers_is_another_one_too() {
        let parent = Process::current();
        // SAFETY: as in `in_a_child`; nothing is shared with the child, as with `fork`.
        let child = unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) };
        assert!(child >= 0, "cannot clone");
        if child == 0 {
            // SAFETY: `_exit` ends the process at once.
            unsafe { libc::_exit(i32::from(parent.is_current())) };
        }
        let (child, mut status) = (child as libc::pid_t, 0);
        // SAFETY: waits for the child above, and writes its status.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "the child takes itself for its parent");
    }

    #[test]
    fn children_keep_no_private_descriptors() {
        let (near, mut far) = UnixStream::pair().unwrap();
        let (near_number, far_number) = (near.as_raw_fd(), far.as_raw_fd());
        let mut near = Some(Private::new(|| Ok::<_, std::io::Error>(near)).unwrap());
        assert!(in_a_child(|| {
            let closed = !is_open(near_number) && is_open(far_number);
            // The number now refers to another descriptor; dropping the inherited value must not
            // close it.
            // SAFETY: duplicates a descriptor of this process.
            let reused = unsafe { libc::dup2(far_number, near_number) } == near_number;
            drop(near.take());
            closed && reused && is_open(near_number)
        }));
        far.set_nonblocking(true).unwrap();
        let quiet = far.read(&mut [0]).unwrap_err();
        assert_eq!(quiet.kind(), std::io::ErrorKind::WouldBlock, "still open");
    }

    /// A descriptor number that the application has reused belongs to the application.
    #[test]
    fn children_keep_what_was_private_once() {
        // In a child, where no other test can get the number.
        assert!(in_a_child(|| {
            let (near, far) = UnixStream::pair().unwrap();
            let number = near.as_raw_fd();
            drop(Private::new(|| Ok::<_, std::io::Error>(near)).unwrap());
            // SAFETY: duplicates a descriptor of this process.
            let reused = unsafe { libc::dup2(far.as_raw_fd(), number) } == number;
            reused && in_a_child(|| is_open(number))
        }));
    }

    /// Children of a process that makes and closes descriptors all the time keep none of them.
    #[test]
    fn forks_wait_for_descriptors_that_are_being_made() {
        let stop = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        let make =
                            || rustix::event::eventfd(77, rustix::event::EventfdFlags::CLOEXEC);
                        drop(Private::new(make).unwrap());
                    }
                });
            }
            let eventfds = || {
                let all = std::fs::read_dir("/proc/self/fd").unwrap();
                let links = all.filter_map(|e| std::fs::read_link(e.ok()?.path()).ok());
                links
                    .filter(|l| l.to_string_lossy().contains("eventfd"))
                    .count()
            };
            let kept = (0..100).filter(|_| !in_a_child(|| eventfds() == 0)).count();
            stop.store(true, Ordering::Relaxed);
            assert_eq!(kept, 0);
        });
    }
}
