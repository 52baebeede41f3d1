//! Log lines: their rate limit and a writer that does not block.
//!
//! The engine reports through [`tracing`] events. Two rules keep a peer from harming the session
//! through log lines:
//!
//! - A line that a peer can cause is rate-limited at each call site (`limited!`).
//! - No engine thread waits for log output. [`stderr`] is a writer that never blocks: it queues
//!   lines for a thread of its own and drops lines when that thread cannot keep up.
//!
//! The second rule holds for the subscribers that the `tcpx` command, the C library, the NIXL
//! plugin and the Python package install. A Rust program that installs its own subscriber must make
//! sure that writing a line does not block, most simply with this writer:
//!
//! ```ignore
//! tracing_subscriber::fmt().with_writer(tcpx::log::stderr).init();
//! ```

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Limits the bytes queued for standard error: a few thousand lines.
const MAX_QUEUED: usize = 256 << 10;

/// Limits how long process exit waits for the last lines.
const LAST_LINES: Duration = Duration::from_millis(250);

/// Lines that one call site may write in a row before its rate is limited.
pub(crate) const BURST: u64 = 10;

/// Lines that a call site with one line per peer may write in a row, such as for connections: a
/// session with a thousand peers writes a line for each.
pub(crate) const EACH_PEER: u64 = 1024;

/// Time after which a rate-limited call site may write another line.
const INTERVAL: Duration = Duration::from_secs(1);

/// Writes an event of a level (`WARN`, `DEBUG`), unless this call site has exceeded its rate. The
/// next event written carries the number of suppressed events in `left_out`. `EACH_PEER` before the
/// level allows that many in a row.
macro_rules! limited {
    (EACH_PEER, $level:ident, $($line:tt)+) => {
        $crate::log::limited!(@ $crate::log::EACH_PEER, $level, $($line)+)
    };
    ($level:ident, $($line:tt)+) => {
        $crate::log::limited!(@ $crate::log::BURST, $level, $($line)+)
    };
    (@ $burst:expr, $level:ident, $($line:tt)+) => {{
        static LIMIT: $crate::log::Limit = $crate::log::Limit::with_burst($burst);
        if tracing::enabled!(tracing::Level::$level)
            && let Some(left_out) = LIMIT.admit(std::time::Instant::now())
        {
            let left_out = (left_out > 0).then_some(left_out);
            tracing::event!(tracing::Level::$level, left_out, $($line)+);
        }
    }};
}

pub(crate) use limited;

/// Limits the rate of one call site: ten lines at once, then one per second. For programs and
/// bindings that log errors of this library.
///
/// ```
/// static LIMIT: tcpx::log::Limit = tcpx::log::Limit::new();
/// if let Some(left_out) = LIMIT.admit(std::time::Instant::now()) {
///     eprintln!("something went wrong; {left_out} lines before this one were left out");
/// }
/// ```
#[derive(Debug)]
pub struct Limit {
    burst: u64,
    /// Time at which the admitted lines are paid for at one line per interval, in nanoseconds.
    paid_until: AtomicU64,
    left_out: AtomicU64,
}

impl Limit {
    /// Makes a limit that nothing has used.
    #[must_use]
    pub const fn new() -> Self {
        Self::with_burst(BURST)
    }

    /// Makes a limit that lets so many lines pass at once.
    #[must_use]
    pub const fn with_burst(burst: u64) -> Self {
        Self {
            burst,
            paid_until: AtomicU64::new(0),
            left_out: AtomicU64::new(0),
        }
    }

    /// Decides about a line. Returns the number of lines suppressed before it, or `None` if this
    /// line is suppressed as well.
    pub fn admit(&self, now: Instant) -> Option<u64> {
        static EPOCH: LazyLock<Instant> = LazyLock::new(Instant::now);
        let interval = INTERVAL.as_nanos() as u64;
        let now = now.saturating_duration_since(*EPOCH).as_nanos() as u64;
        let pay = |paid: u64| {
            let paid = paid.max(now) + interval;
            (paid <= now + self.burst * interval).then_some(paid)
        };
        let relaxed = Ordering::Relaxed;
        match self.paid_until.fetch_update(relaxed, relaxed, pay) {
            Ok(_) => Some(self.left_out.swap(0, relaxed)),
            Err(_) => {
                self.left_out.fetch_add(1, relaxed);
                None
            }
        }
    }
}

impl Default for Limit {
    fn default() -> Self {
        Self::new()
    }
}

/// Returns a writer to standard error that never blocks, for a subscriber's lines.
#[must_use]
pub fn stderr() -> Stderr {
    Stderr(())
}

/// A writer to standard error that never blocks.
///
/// Each call of `write` queues one line. The first call starts a thread that writes the lines.
/// While standard error accepts nothing, lines that do not fit into the queue are dropped, and a
/// later line reports how many. Process exit waits up to a quarter of a second for the last lines.
/// A forked child has its own queue and thread.
#[derive(Clone, Copy, Debug)]
pub struct Stderr(());

impl io::Write for Stderr {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        Queue::current().push(line);
        Ok(line.len())
    }

    /// Does nothing: the writer thread already has the lines.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Lines of one process that are queued for standard error.
struct Queue {
    /// Process that owns the queue. A child forked while a thread held the lock must not touch it.
    process: u32,
    state: Mutex<State>,
    changed: Condvar,
    /// The queue of a forked child.
    next: OnceLock<Box<Queue>>,
}

#[derive(Default)]
struct State {
    /// Complete lines, at most [`MAX_QUEUED`] bytes.
    lines: Vec<u8>,
    dropped: u64,
    has_thread: bool,
    /// True while the thread writes lines it has taken.
    is_writing: bool,
}

impl State {
    fn push(&mut self, line: &[u8]) {
        if self.lines.len() + line.len() > MAX_QUEUED {
            self.dropped += 1;
        } else {
            self.lines.extend_from_slice(line);
        }
    }

    fn is_empty(&self) -> bool {
        self.lines.is_empty() && self.dropped == 0
    }

    /// Takes the queued lines and appends the number of dropped lines.
    fn take(&mut self) -> Vec<u8> {
        let mut lines = std::mem::take(&mut self.lines);
        let dropped = std::mem::take(&mut self.dropped);
        if dropped > 0 {
            let line = format!("tcpx: {dropped} log lines were dropped: stderr was full\n");
            lines.extend_from_slice(line.as_bytes());
        }
        lines
    }
}

static FIRST: OnceLock<Queue> = OnceLock::new();

impl Queue {
    fn new(process: u32) -> Self {
        Self {
            process,
            state: Mutex::default(),
            changed: Condvar::new(),
            next: OnceLock::new(),
        }
    }

    /// Returns the queue of this process.
    fn current() -> &'static Self {
        let process = std::process::id();
        let mut queue = FIRST.get_or_init(|| {
            tcpx_net::process::at_exit(write_last_lines);
            Self::new(process)
        });
        while queue.process != process {
            queue = queue.next.get_or_init(|| Box::new(Self::new(process)));
        }
        queue
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&'static self, line: &[u8]) {
        let mut state = self.lock();
        state.push(line);
        let has_thread = std::mem::replace(&mut state.has_thread, true);
        drop(state);
        self.changed.notify_all();
        if !has_thread {
            let thread = std::thread::Builder::new().name("tcpx-log".into());
            if thread.spawn(|| self.run()).is_err() {
                // The next line tries again.
                self.lock().has_thread = false;
            }
        }
    }

    /// Runs the writer thread.
    fn run(&self) {
        let mut state = self.lock();
        loop {
            while state.is_empty() {
                state = self.wait(state, Duration::MAX);
            }
            let lines = state.take();
            state.is_writing = true;
            drop(state);
            // Lines are lost if stderr is closed; nothing can report that.
            let _ = tcpx_net::process::write_stderr(&lines);
            state = self.lock();
            state.is_writing = false;
            self.changed.notify_all();
        }
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>, limit: Duration) -> MutexGuard<'a, State> {
        let waited = self.changed.wait_timeout(state, limit);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Waits until all lines are written, for at most `limit`.
    fn drain(&self, limit: Duration) {
        let deadline = Instant::now() + limit;
        let mut state = self.lock();
        while state.is_writing || !state.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            state = self.wait(state, left);
        }
    }
}

/// Waits for the last lines at process exit. A forked child that has written no line has no queue.
extern "C" fn write_last_lines() {
    let process = std::process::id();
    let mut queue = FIRST.get();
    while let Some(other) = queue.filter(|queue| queue.process != process) {
        queue = other.next.get().map(|next| &**next);
    }
    if let Some(queue) = queue {
        queue.drain(LAST_LINES);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn call_site_writes_a_burst_and_then_one_line_per_interval() {
        let limit = Limit::new();
        let start = Instant::now() + Duration::from_secs(60);
        for _ in 0..BURST {
            assert_eq!(limit.admit(start), Some(0));
        }
        for _ in 0..500 {
            assert_eq!(limit.admit(start), None);
        }
        assert_eq!(limit.admit(start + INTERVAL), Some(500));
        assert_eq!(limit.admit(start + INTERVAL), None);
        // A pause restores the burst.
        let later = start + 100 * INTERVAL;
        assert_eq!(limit.admit(later), Some(1));
        let admitted = (0..100).filter(|_| limit.admit(later).is_some()).count();
        assert_eq!(admitted as u64, BURST - 1);
    }

    #[test]
    fn a_line_of_each_peer_is_not_left_out() {
        let limit = Limit::with_burst(EACH_PEER);
        let now = Instant::now();
        let admitted = (0..2 * EACH_PEER).filter(|_| limit.admit(now).is_some());
        assert_eq!(admitted.count() as u64, EACH_PEER);
    }

    #[test]
    fn full_queue_drops_lines_and_reports_how_many() {
        let mut state = State::default();
        let line = [b'x'; 1024];
        for _ in 0..MAX_QUEUED / line.len() + 7 {
            state.push(&line);
        }
        let taken = state.take();
        let (lines, last) = taken.split_at(MAX_QUEUED);
        assert!(lines.iter().all(|byte| *byte == b'x'));
        let said = "tcpx: 7 log lines were dropped: stderr was full\n";
        assert_eq!(String::from_utf8_lossy(last), said);
        assert!(state.is_empty());
    }
}
