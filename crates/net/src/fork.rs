//! Forks: which process a value belongs to, and descriptors that children do not keep.
//!
//! A forked child has the memory of its parent and none of its threads: locks may be held for ever,
//! and a stream that both use is ruined. [`Process`] tells whose a value is, at the cost of one
//! load; [`InProcess`] holds a value that is left alone elsewhere. `Private` holds a descriptor
//! that is closed in every child by the fork itself, so that a child keeps neither connections nor
//! ports of its parent.
//!
//! The current process is known by its *generation*, which is kept on a page that the kernel clears
//! in children (`MADV_WIPEONFORK`). The handlers of `pthread_atfork` clear it as well, for kernels
//! without that call, and close descriptors. Children made without these handlers (`clone`,
//! `_Fork`) keep the descriptors; they know all the same that they are children. Programs that are
//! executed keep none: every descriptor is closed on `exec`.
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

/// One process, told apart from those that it was forked from and those forked from it.
#[derive(Clone, Copy, Debug)]
pub struct Process {
    /// The generation of the process that is running.
    now: &'static AtomicU64,
    generation: u64,
    id: u32,
}

impl Process {
    /// The process that is running.
    #[must_use]
    pub fn current() -> Self {
        let now = page();
        Self {
            now,
            generation: generation(now),
            id: std::process::id(),
        }
    }

    /// Whether this is the process that is running. Never waits, and takes no lock.
    #[inline]
    #[must_use]
    pub fn is_current(&self) -> bool {
        self.now.load(Ordering::Relaxed) == self.generation
    }

    /// Refuses a call in another process. Never waits, and takes no lock.
    ///
    /// # Errors
    /// Another process is running, which was forked from this one.
    #[inline]
    pub fn check(&self) -> Result<(), Forked> {
        if self.is_current() {
            Ok(())
        } else {
            Err(Forked { process: self.id })
        }
    }
}

/// A call was made in a child of the process that the handle belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "this belongs to the session of process {process}, which forked: create a session in this process"
)]
pub struct Forked {
    /// The process that the handle belongs to.
    pub process: u32,
}

/// A value that only its own process uses and drops. A child may read what never changes; whatever
/// waits or takes a lock asks [`InProcess::check`] first. Dropping it in a child does nothing.
#[derive(Debug)]
pub struct InProcess<T> {
    value: ManuallyDrop<T>,
    process: Process,
}

impl<T> InProcess<T> {
    /// A value of the process that is running.
    #[must_use]
    pub fn new(value: T) -> Self {
        Self::of(Process::current(), value)
    }

    /// A value of that process.
    #[must_use]
    pub fn of(process: Process, value: T) -> Self {
        Self {
            value: ManuallyDrop::new(value),
            process,
        }
    }

    /// The process that the value belongs to.
    #[must_use]
    pub fn process(&self) -> Process {
        self.process
    }

    /// Whether the value belongs to the process that is running.
    #[inline]
    #[must_use]
    pub fn is_current(&self) -> bool {
        self.process.is_current()
    }

    /// Refuses a call in another process.
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
            // SAFETY: dropped once, here, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
    }
}

/// A descriptor that forked children do not keep. They must not use it: its number may stand for
/// something else there.
#[derive(Debug)]
pub(crate) struct Private<T: AsRawFd> {
    descriptor: ManuallyDrop<T>,
    process: Process,
}

impl<T: AsRawFd> Private<T> {
    /// Makes a descriptor; `make` must not wait, since a fork waits for it.
    pub(crate) fn new<E>(make: impl FnOnce() -> Result<T, E>) -> Result<Self, E> {
        // First: it sees to the handlers.
        let process = Process::current();
        let _turn = Turn::take();
        let descriptor = make()?;
        set_private(descriptor.as_raw_fd(), true);
        Ok(Self {
            descriptor: ManuallyDrop::new(descriptor),
            process,
        })
    }

    /// Returns whether the descriptor belongs to the process that is running. Children must not use
    /// it.
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
        // Closed by the fork; what has its number now is somebody else's.
        if !self.is_current() {
            return;
        }
        let _turn = Turn::take();
        set_private(self.descriptor.as_raw_fd(), false);
        // SAFETY: dropped once, here, and not used afterwards.
        unsafe { ManuallyDrop::drop(&mut self.descriptor) };
    }
}

/// The page with the generation of this process, once there is one.
static PAGE: AtomicPtr<AtomicU64> = AtomicPtr::new(null_mut());

/// The generation that was given out last. Children inherit it: theirs are higher.
static LAST: AtomicU64 = AtomicU64::new(0);

/// Highest number of a descriptor that is closed in children: what Linux allows unless told
/// otherwise.
const MAX_DESCRIPTORS: usize = 1 << 20;

/// One bit for each private descriptor. Untouched parts cost no memory.
static PRIVATE: [AtomicU64; MAX_DESCRIPTORS / 64] =
    [const { AtomicU64::new(0) }; MAX_DESCRIPTORS / 64];

/// Words of [`PRIVATE`] that were ever used.
static USED: AtomicUsize = AtomicUsize::new(0);

/// Descriptors that are being made or closed, and forks under way: one waits for the other.
static TURNS: AtomicU32 = AtomicU32::new(0);
static FORKS: AtomicU32 = AtomicU32::new(0);

/// How long a fork waits at most. A signal handler that forks may have interrupted the thread it
/// would wait for.
const FORK_WAIT: Duration = Duration::from_secs(5);

/// A turn to make or close a descriptor, during which nobody forks.
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
                // A fork of a large process takes milliseconds.
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
    // Beyond the table, children keep the descriptor.
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

/// The generation of this process; a new one in a child that has none yet.
fn generation(now: &AtomicU64) -> u64 {
    match now.load(Ordering::Relaxed) {
        0 => {
            let next = LAST.fetch_add(1, Ordering::Relaxed) + 1;
            let raced = now.compare_exchange(0, next, Ordering::Relaxed, Ordering::Relaxed);
            raced.err().unwrap_or(next)
        }
        known => known,
    }
}

/// The page; makes it, and installs the handlers, at the first call. Takes no lock, which a fork by
/// another thread could leave held.
fn page() -> &'static AtomicU64 {
    let known = PAGE.load(Ordering::Acquire);
    if !known.is_null() {
        // SAFETY: made below, aligned and zeroed, and never freed.
        return unsafe { &*known };
    }
    let made = wiped_page();
    // Two threads may both come here: the handlers run twice then, which is harmless.
    // SAFETY: the handlers are functions of this program, and do only what a fork allows.
    unsafe { libc::pthread_atfork(Some(before_fork), Some(in_parent), Some(in_child)) };
    let raced = PAGE.compare_exchange(null_mut(), made, Ordering::AcqRel, Ordering::Acquire);
    // SAFETY: as above; the page of whoever came second stays unused.
    unsafe { &*raced.err().unwrap_or(made) }
}

/// A zeroed page that the kernel clears in children.
fn wiped_page() -> *mut AtomicU64 {
    const LEN: usize = 4096;
    // SAFETY: a new mapping, which overlaps nothing.
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
        // Without a page of its own only the handlers tell.
        return Box::into_raw(Box::default());
    }
    // Refused by kernels before 4.14, where the handlers tell.
    // SAFETY: the mapping was made above and belongs to nobody else.
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

/// Does what may be done between a fork and whatever comes next: atomics and `close`.
extern "C" fn in_child() {
    let page = PAGE.load(Ordering::Acquire);
    if !page.is_null() {
        // SAFETY: as in `page`.
        unsafe { &*page }.store(0, Ordering::Relaxed);
    }
    let used = USED.load(Ordering::SeqCst);
    for (index, bits) in PRIVATE.iter().take(used).enumerate() {
        let mut bits = bits.swap(0, Ordering::SeqCst);
        while bits != 0 {
            let number = index * 64 + bits.trailing_zeros() as usize;
            bits &= bits - 1;
            // Closes the child's own reference; the connection is the parent's and goes on.
            // SAFETY: the parent's engine had made the descriptor, and the child does not use it.
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

    /// Runs `body` in a forked child and says whether it returned true.
    fn in_a_child(body: impl FnOnce() -> bool) -> bool {
        // SAFETY: the child calls `body`, which allocates at most, and ends without unwinding.
        let child = unsafe { libc::fork() };
        assert!(child >= 0, "cannot fork");
        if child == 0 {
            let fine = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body));
            // SAFETY: ends this process, at once.
            unsafe { libc::_exit(i32::from(!fine.unwrap_or(false))) };
        }
        let mut status = 0;
        // SAFETY: waits for the child above, and writes its status.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        status == 0
    }

    fn is_open(number: RawFd) -> bool {
        // SAFETY: asks for flags, changes nothing.
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

    /// Only the kernel's own clearing tells where no handler runs.
    #[test]
    fn a_child_made_without_handlers_is_another_one_too() {
        let parent = Process::current();
        // SAFETY: as in `in_a_child`; nothing is shared with the child, as with `fork`.
        let child = unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) };
        assert!(child >= 0, "cannot clone");
        if child == 0 {
            // SAFETY: ends this process, at once.
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
            // Somebody else's by now; dropping what was inherited leaves it alone.
            // SAFETY: duplicates a descriptor of this process.
            let reused = unsafe { libc::dup2(far_number, near_number) } == near_number;
            drop(near.take());
            closed && reused && is_open(near_number)
        }));
        far.set_nonblocking(true).unwrap();
        let quiet = far.read(&mut [0]).unwrap_err();
        assert_eq!(quiet.kind(), std::io::ErrorKind::WouldBlock, "still open");
    }

    /// A number that the application has got after it was ours is the application's.
    #[test]
    fn children_keep_what_was_private_once() {
        // In a child, where no other test gets the number.
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
