//! Copies memory that may be unmapped, and reports a fault instead of ending the process.
//!
//! Registered memory belongs to the application, which may unmap or protect it too early. A system
//! call then returns `EFAULT`; a copy in user space would end the process by SIGSEGV, or by SIGBUS
//! if a mapped file has become shorter. Every copy of registered memory by the CPU goes through
//! this module.
//!
//! | way | used | cost of 4 KiB |
//! |---|---|---|
//! | *handler*: a fault in one of the three loops below makes the loop return | on `x86_64`, while the signal handlers are ours | that of `memcpy` |
//! | *system call*: `process_vm_writev` on this process | otherwise | 1 to 3 µs more |
//! | *plain*: nothing is guarded | where the system call is forbidden, as some containers do | that of `memcpy` |
//!
//! The handlers are installed with the first copy and stay. They act on faults whose instruction
//! lies in the loops and pass everything else to the previous handlers, or to the default action. A
//! program that installs handlers later replaces these: [`check_handlers`] notices, and from then
//! on copies use the system call. So do copies on threads that block the two signals, since a fault
//! there ends the process whatever the handlers are.

use std::cell::Cell;
use std::sync::Once;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::time::Instant;

/// The memory to copy is not mapped, or not for this access. Some bytes may have been copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the memory is not mapped, or not for this access")]
pub struct Fault;

impl Fault {
    /// Returns whether `error` is what a system call returns for such memory.
    #[must_use]
    pub fn is_in(error: &std::io::Error) -> bool {
        error.raw_os_error() == Some(libc::EFAULT)
    }
}

/// The smallest page size of any supported machine.
const PAGE_BYTES: usize = 4096;

/// The way copies are guarded: one of the constants below.
static WAY: AtomicU8 = AtomicU8::new(BY_HANDLER);
const BY_HANDLER: u8 = 0;
const BY_SYSTEM_CALL: u8 = 1;
const PLAIN: u8 = 2;

/// Counts how often other handlers have replaced this module's.
static WARNED: AtomicU32 = AtomicU32::new(0);

/// Checks whether faults still reach the handlers of this module, and installs them if they never
/// were. Costs two system calls: cheap enough everywhere but on the data path.
pub fn check_handlers() {
    let way = WAY.load(Ordering::Relaxed);
    let found = if handlers::are_ours() {
        BY_HANDLER
    } else {
        BY_SYSTEM_CALL
    };
    if way == found || way == PLAIN {
        return;
    }
    // Other threads may have copies in progress the old way; those cannot be protected.
    if WAY.swap(found, Ordering::Relaxed) == BY_HANDLER
        && handlers::EXIST
        && WARNED.fetch_add(1, Ordering::Relaxed) < 10
    {
        // Logged ten times at most: some programs replace handlers all the time.
        tracing::warn!(
            remedy = "install that handler before memory is registered",
            "another handler of SIGSEGV or SIGBUS replaces this library's: small copies are guarded \
             by system calls from now on, which are slower"
        );
    }
}

/// Does what [`check_handlers`] does, unless that was done within the last millisecond. For callers
/// that check many times in a row.
pub fn check_handlers_anew() {
    /// The time of the last check in microseconds, counted from the first check.
    static LAST: AtomicU64 = AtomicU64::new(0);
    static FIRST: OnceLock<Instant> = OnceLock::new();
    let first = FIRST.get_or_init(Instant::now);
    // Never zero: zero means that no check was made.
    let now = u64::try_from(first.elapsed().as_micros()).unwrap_or(u64::MAX) | 1;
    let last = LAST.load(Ordering::Relaxed);
    if last == 0 || now.saturating_sub(last) >= 1000 {
        LAST.store(now, Ordering::Relaxed);
        check_handlers();
    }
}

/// Copies `count` bytes; the two ranges may overlap.
///
/// # Safety
/// Whatever is mapped at `from` may be read and whatever is mapped at `to` may be overwritten.
pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, count: usize) -> Result<(), Fault> {
    let distance = from.addr().abs_diff(to.addr());
    if distance >= count {
        // SAFETY: the caller upholds the same contract; the ranges do not overlap.
        return unsafe { copy_apart(from, to, count) };
    }
    // Copies through a buffer, piece by piece, starting at the end that is overwritten last.
    let mut buffer = [0; PAGE_BYTES];
    let mut done = 0;
    while done < count {
        let len = (count - done).min(PAGE_BYTES);
        let at = match from.addr() > to.addr() {
            true => done,
            false => count - done - len,
        };
        // SAFETY: inside the caller's ranges, and the buffer is apart from both.
        unsafe {
            copy_apart(from.wrapping_add(at), buffer.as_mut_ptr(), len)?;
            copy_apart(buffer.as_ptr(), to.wrapping_add(at), len)?;
        }
        done += len;
    }
    Ok(())
}

/// Copies `lines` times 64 bytes past the cache. A thread that observes a later write of this
/// thread also observes these bytes.
///
/// # Safety
/// As [`copy`], without overlap; `to` is aligned to 16 bytes.
#[cfg(target_arch = "x86_64")]
pub(crate) unsafe fn stream(from: *const u8, to: *mut u8, lines: usize) -> Result<(), Fault> {
    if way() == BY_HANDLER {
        // SAFETY: the caller upholds the same contract; the handlers are installed.
        return unsafe { handlers::stream(from, to, lines) };
    }
    // SAFETY: the caller upholds the same contract.
    unsafe { copy_apart(from, to, lines * 64) }
}

/// Checks whether memory can be read: every page where that is cheap, else the first and the last.
pub(crate) fn probe(address: *const u8, len: usize) -> Result<(), Fault> {
    if len == 0 {
        return Ok(());
    }
    if way() == BY_HANDLER {
        let ahead = address.addr() % PAGE_BYTES;
        let pages = (ahead + len).div_ceil(PAGE_BYTES);
        return handlers::probe(address.wrapping_sub(ahead), pages);
    }
    let mut byte = 0;
    for address in [address, address.wrapping_add(len - 1)] {
        // SAFETY: the target is a local, and reading one byte that the caller names has no effect.
        unsafe { copy_apart(address, &raw mut byte, 1)? };
    }
    Ok(())
}

/// Copies ranges that do not overlap.
///
/// # Safety
/// As [`copy`].
unsafe fn copy_apart(from: *const u8, to: *mut u8, count: usize) -> Result<(), Fault> {
    if count == 0 {
        return Ok(());
    }
    match way() {
        // SAFETY: the caller upholds the same contract; the handlers are installed.
        BY_HANDLER => unsafe { handlers::copy(from, to, count) },
        BY_SYSTEM_CALL => by_system_call(from, to, count),
        _ => {
            // SAFETY: the caller upholds the same contract.
            unsafe { std::ptr::copy_nonoverlapping(from, to, count) };
            Ok(())
        }
    }
}

/// Returns the way this thread's next copy is guarded.
fn way() -> u8 {
    if cfg!(miri) {
        return PLAIN;
    }
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(check_handlers);
    match WAY.load(Ordering::Relaxed) {
        BY_HANDLER if is_deaf() => BY_SYSTEM_CALL,
        way => way,
    }
}

/// Returns whether this thread blocks the fault signals. Asked once per thread: a thread that
/// blocks them does so from its start.
fn is_deaf() -> bool {
    thread_local! {
        static DEAF: Cell<Option<bool>> = const { Cell::new(None) };
    }
    DEAF.with(|deaf| {
        if let Some(deaf) = deaf.get() {
            return deaf;
        }
        // SAFETY: a set of signals is plain data; all pointers are to locals.
        let found = unsafe {
            let mut set = std::mem::zeroed();
            libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), &raw mut set);
            [libc::SIGSEGV, libc::SIGBUS].map(|signal| libc::sigismember(&raw const set, signal))
        };
        let found = found != [0, 0];
        deaf.set(Some(found));
        found
    })
}

fn by_system_call(from: *const u8, to: *mut u8, count: usize) -> Result<(), Fault> {
    let mut done = 0;
    while done < count {
        let part = |address: *mut u8| libc::iovec {
            iov_base: address.wrapping_add(done).cast(),
            iov_len: count - done,
        };
        let (local, remote) = (part(from.cast_mut()), part(to));
        // SAFETY: the kernel checks both ranges; what may be overwritten is the caller's promise.
        let copied = unsafe {
            libc::process_vm_writev(libc::getpid(), &raw const local, 1, &raw const remote, 1, 0)
        };
        match usize::try_from(copied) {
            Ok(0) => return Err(Fault),
            Ok(copied) => done += copied,
            Err(_) => match std::io::Error::last_os_error().raw_os_error() {
                Some(libc::EFAULT) => return Err(Fault),
                Some(libc::EINTR) => {}
                _ => {
                    if WAY.swap(PLAIN, Ordering::Relaxed) != PLAIN {
                        // Logged once.
                        tracing::warn!(
                            remedy =
                                "let seccomp allow it, or deregister memory before it is unmapped",
                            "process_vm_writev is forbidden here: registered memory that is unmapped \
                             too early ends this process"
                        );
                    }
                    // SAFETY: inside the caller's ranges, which do not overlap.
                    unsafe {
                        std::ptr::copy_nonoverlapping(
                            from.wrapping_add(done),
                            to.wrapping_add(done),
                            count - done,
                        );
                    }
                    return Ok(());
                }
            },
        }
    }
    Ok(())
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod handlers {
    //! The loops and the handlers that end them.

    use std::arch::global_asm;
    use std::mem::{MaybeUninit, zeroed};
    use std::sync::OnceLock;

    use libc::{c_int, c_void, sigaction, siginfo_t, ucontext_t};

    use super::Fault;

    pub(super) const EXIST: bool = true;

    const SIGNALS: [c_int; 2] = [libc::SIGSEGV, libc::SIGBUS];

    // Each loop returns the remaining count in rax: 0, or more after a fault. A fault between
    // `…_begin` and `…_end` resumes at `…_end`. The loops push nothing and use caller-saved
    // registers only.
    global_asm!(
        ".macro tcpx_guard_function name",
        ".hidden \\name",
        ".hidden \\name\\()_begin",
        ".hidden \\name\\()_end",
        ".globl \\name",
        ".globl \\name\\()_begin",
        ".globl \\name\\()_end",
        ".type \\name, @function",
        ".endm",
        ".text",
        // (rdi: to, rsi: from, rdx: bytes)
        "tcpx_guard_function tcpx_guard_copy",
        "tcpx_guard_copy:",
        ".cfi_startproc",
        "mov rcx, rdx",
        "tcpx_guard_copy_begin:",
        "rep movsb",
        "tcpx_guard_copy_end:",
        "mov rax, rcx",
        "ret",
        ".cfi_endproc",
        // (rdi: to, rsi: from, rdx: lines)
        "tcpx_guard_function tcpx_guard_stream",
        "tcpx_guard_stream:",
        ".cfi_startproc",
        "mov rax, rdx",
        "test rax, rax",
        "jz tcpx_guard_stream_end",
        "tcpx_guard_stream_begin:",
        "movups xmm0, [rsi]",
        "movups xmm1, [rsi + 16]",
        "movups xmm2, [rsi + 32]",
        "movups xmm3, [rsi + 48]",
        "movntps [rdi], xmm0",
        "movntps [rdi + 16], xmm1",
        "movntps [rdi + 32], xmm2",
        "movntps [rdi + 48], xmm3",
        "add rsi, 64",
        "add rdi, 64",
        "dec rax",
        "jnz tcpx_guard_stream_begin",
        "tcpx_guard_stream_end:",
        // Streaming stores are not ordered with others.
        "sfence",
        "ret",
        ".cfi_endproc",
        // (rdi: address, rsi: pages)
        "tcpx_guard_function tcpx_guard_probe",
        "tcpx_guard_probe:",
        ".cfi_startproc",
        "mov rax, rsi",
        "tcpx_guard_probe_begin:",
        "mov cl, [rdi]",
        "add rdi, 4096",
        "dec rax",
        "jnz tcpx_guard_probe_begin",
        "tcpx_guard_probe_end:",
        "ret",
        ".cfi_endproc",
        ".purgem tcpx_guard_function",
    );

    unsafe extern "C" {
        fn tcpx_guard_copy(to: *mut u8, from: *const u8, bytes: usize) -> usize;
        fn tcpx_guard_stream(to: *mut u8, from: *const u8, lines: usize) -> usize;
        fn tcpx_guard_probe(address: *const u8, pages: usize) -> usize;
        static tcpx_guard_copy_begin: u8;
        static tcpx_guard_copy_end: u8;
        static tcpx_guard_stream_begin: u8;
        static tcpx_guard_stream_end: u8;
        static tcpx_guard_probe_begin: u8;
        static tcpx_guard_probe_end: u8;
    }

    /// As [`super::copy`], without overlap.
    ///
    /// # Safety
    /// As there; the handlers are installed.
    pub(super) unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) -> Result<(), Fault> {
        // SAFETY: the caller upholds the same contract; a fault ends the loop.
        outcome(unsafe { tcpx_guard_copy(to, from, bytes) })
    }

    /// As [`super::stream`].
    ///
    /// # Safety
    /// As there; the handlers are installed.
    pub(super) unsafe fn stream(from: *const u8, to: *mut u8, lines: usize) -> Result<(), Fault> {
        // SAFETY: the caller upholds the same contract; a fault ends the loop.
        outcome(unsafe { tcpx_guard_stream(to, from, lines) })
    }

    /// Reads a byte of each of `pages` pages, at least one.
    pub(super) fn probe(address: *const u8, pages: usize) -> Result<(), Fault> {
        // SAFETY: a byte is read and forgotten; a fault ends the loop.
        outcome(unsafe { tcpx_guard_probe(address, pages) })
    }

    fn outcome(left: usize) -> Result<(), Fault> {
        match left {
            0 => Ok(()),
            _ => Err(Fault),
        }
    }

    /// The previous signal actions, in the order of [`SIGNALS`].
    static BEFORE: OnceLock<[sigaction; 2]> = OnceLock::new();

    /// Installs the handlers at the first call; returns whether they are still installed.
    pub(super) fn are_ours() -> bool {
        let mut is_first = false;
        BEFORE.get_or_init(|| {
            is_first = true;
            SIGNALS.map(current)
        });
        if is_first {
            for signal in SIGNALS {
                install(signal);
            }
        }
        SIGNALS.map(|signal| current(signal).sa_sigaction) == [handle as *const () as usize; 2]
    }

    fn current(signal: c_int) -> sigaction {
        let mut action = MaybeUninit::<sigaction>::zeroed();
        // SAFETY: the kernel fills a local; zeroes are a valid action in any case.
        unsafe {
            libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr());
            action.assume_init()
        }
    }

    fn install(signal: c_int) {
        let before = current(signal);
        // SAFETY: zeroes are a valid action.
        let mut action: sigaction = unsafe { zeroed() };
        action.sa_sigaction = handle as *const () as usize;
        // Keeps the mask and flags of the previous handler, since this handler calls it. Runs on
        // the thread's alternate stack, if there is one: a stack that has overflowed has no room
        // for a handler.
        action.sa_mask = before.sa_mask;
        action.sa_flags = libc::SA_SIGINFO
            | libc::SA_ONSTACK
            | before.sa_flags & (libc::SA_NODEFER | libc::SA_RESTART);
        // SAFETY: the handler is async-signal-safe: it looks at its arguments and at `BEFORE`.
        unsafe { libc::sigaction(signal, &raw const action, std::ptr::null_mut()) };
    }

    extern "C" fn handle(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
        let at = context.cast::<ucontext_t>();
        // SAFETY: the kernel passes the state of the interrupted thread, which the handler may
        // change.
        let counter = unsafe { &mut (*at).uc_mcontext.gregs[libc::REG_RIP as usize] };
        let loops = [
            (
                &raw const tcpx_guard_copy_begin,
                &raw const tcpx_guard_copy_end,
            ),
            (
                &raw const tcpx_guard_stream_begin,
                &raw const tcpx_guard_stream_end,
            ),
            (
                &raw const tcpx_guard_probe_begin,
                &raw const tcpx_guard_probe_end,
            ),
        ];
        for (begin, end) in loops {
            if (begin.addr()..end.addr()).contains(&(*counter as usize)) {
                *counter = end.addr() as i64;
                return;
            }
        }
        pass_on(signal, info, context);
    }

    /// Does what would happen without this handler.
    fn pass_on(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
        let at = SIGNALS.iter().position(|known| *known == signal);
        let before = BEFORE.get().zip(at).map(|(actions, at)| actions[at]);
        let handler = before.map_or(libc::SIG_DFL, |action| action.sa_sigaction);
        // SAFETY: the kernel passes a valid `info`. A positive code means a fault of the processor,
        // which recurs on return; a signal sent by `kill` does not.
        let is_sent = unsafe { (*info).si_code } <= 0;
        if handler == libc::SIG_IGN && is_sent {
            return;
        }
        // SAFETY: these calls are async-signal-safe. A handler that was installed for the signal is
        // called as the kernel would call it.
        unsafe {
            if handler == libc::SIG_DFL || handler == libc::SIG_IGN {
                let mut action: sigaction = zeroed();
                action.sa_sigaction = libc::SIG_DFL;
                libc::sigaction(signal, &raw const action, std::ptr::null_mut());
                if is_sent {
                    libc::raise(signal);
                }
                return;
            }
            if before.is_some_and(|action| action.sa_flags & libc::SA_SIGINFO != 0) {
                let call: extern "C" fn(c_int, *mut siginfo_t, *mut c_void) =
                    std::mem::transmute(handler);
                call(signal, info, context);
            } else {
                let call: extern "C" fn(c_int) = std::mem::transmute(handler);
                call(signal);
            }
        }
    }
}

#[cfg(not(all(target_arch = "x86_64", not(miri))))]
mod handlers {
    //! This processor has no loops: every copy uses the system call.

    use super::Fault;

    pub(super) const EXIST: bool = false;

    pub(super) unsafe fn copy(_: *const u8, _: *mut u8, _: usize) -> Result<(), Fault> {
        Err(Fault)
    }

    #[cfg(target_arch = "x86_64")]
    pub(super) unsafe fn stream(_: *const u8, _: *mut u8, _: usize) -> Result<(), Fault> {
        Err(Fault)
    }

    pub(super) fn probe(_: *const u8, _: usize) -> Result<(), Fault> {
        Err(Fault)
    }

    pub(super) fn are_ours() -> bool {
        false
    }
}

#[cfg(all(test, not(miri)))]
mod tests;
