//! Log lines: how often one is written, and by whom.
//!
//! The engine reports by [`tracing`] events. Two rules keep a peer from harming the session with them:
//!
//! - A line that a peer can cause is limited in rate at each place in the code (`limited!`).
//! - No thread of the engine waits for a log. [`stderr`] is a writer that never blocks: it queues
//!   lines for a thread of its own and drops them where that thread cannot keep up.
//!
//! The second rule holds for the subscribers that the `tcpx` command, the C library, the NIXL plugin
//! and the Python package install. A Rust program that installs its own subscriber must see to it
//! itself that writing a line does not block, most simply by using this writer:
//!
//! ```ignore
//! tracing_subscriber::fmt().with_writer(tcpx::log::stderr).init();
//! ```

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Bytes that wait for standard error: some thousand lines.
const MAX_QUEUED: usize = 256 << 10;

/// How long the end of the process waits for the last lines.
const LAST_LINES: Duration = Duration::from_millis(250);

/// Lines in a row that a place in the code may write before its rate is limited.
const BURST: u64 = 10;

/// The time after which a place whose rate is limited may write another line.
const INTERVAL: Duration = Duration::from_secs(1);

/// Writes an event of a level (`WARN`, `DEBUG`), unless this place has written too many. The next one
/// that is written says in `left_out` how many were not.
macro_rules! limited {
    ($level:ident, $($line:tt)+) => {{
        static LIMIT: $crate::log::Limit = $crate::log::Limit::new();
        if tracing::enabled!(tracing::Level::$level)
            && let Some(left_out) = LIMIT.admit(std::time::Instant::now())
        {
            let left_out = (left_out > 0).then_some(left_out);
            tracing::event!(tracing::Level::$level, left_out, $($line)+);
        }
    }};
}

pub(crate) use limited;

/// The rate of the lines of one place in the code: [`BURST`] at once, then one each [`INTERVAL`].
pub(crate) struct Limit {
    /// When the lines that were admitted so far would have come at one each interval, in nanoseconds.
    paid_until: AtomicU64,
    left_out: AtomicU64,
}

impl Limit {
    pub(crate) const fn new() -> Self {
        Self {
            paid_until: AtomicU64::new(0),
            left_out: AtomicU64::new(0),
        }
    }

    /// Decides about a line: returns how many were left out before it, or none if it is left out too.
    pub(crate) fn admit(&self, now: Instant) -> Option<u64> {
        static EPOCH: LazyLock<Instant> = LazyLock::new(Instant::now);
        let interval = INTERVAL.as_nanos() as u64;
        let now = now.saturating_duration_since(*EPOCH).as_nanos() as u64;
        let pay = |paid: u64| {
            let paid = paid.max(now) + interval;
            (paid <= now + BURST * interval).then_some(paid)
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

/// Returns a writer to standard error that never blocks, for a subscriber's lines.
#[must_use]
pub fn stderr() -> Stderr {
    Stderr(())
}

/// A writer to standard error that never blocks.
///
/// Each call of `write` queues one line; a thread of its own, which is started by the first one,
/// writes them. Where standard error takes nothing, lines that do not fit into the queue are dropped,
/// and a line that says how many follows. The last lines are written as the process exits, unless
/// that takes longer than a quarter of a second. A forked child has a queue and a thread of its own.
#[derive(Clone, Copy, Debug)]
pub struct Stderr(());

impl io::Write for Stderr {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        Queue::current().push(line);
        Ok(line.len())
    }

    /// Does nothing: lines are on their way.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The lines of one process that wait for standard error.
struct Queue {
    /// Whose it is. A child that was forked while a thread held the lock must not touch it.
    process: u32,
    state: Mutex<State>,
    changed: Condvar,
    /// The queue of a child.
    next: OnceLock<Box<Queue>>,
}

#[derive(Default)]
struct State {
    /// Whole lines, never more than [`MAX_QUEUED`] bytes.
    lines: Vec<u8>,
    dropped: u64,
    has_thread: bool,
    /// The thread is writing.
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

    /// Takes what is to be written.
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

    /// The queue of this process.
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

    /// The thread.
    fn run(&self) {
        let mut state = self.lock();
        loop {
            while state.is_empty() {
                state = self.wait(state, Duration::MAX);
            }
            let lines = state.take();
            state.is_writing = true;
            drop(state);
            // Where stderr is closed, lines are lost: there is nowhere to say so.
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

    /// Waits until all lines are written, at most for so long.
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

/// Called as the process exits. A child that has written no line has no queue, and nothing to wait for.
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
    fn a_place_writes_a_burst_and_then_one_line_each_interval() {
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
        // After a pause it is a burst again.
        let later = start + 100 * INTERVAL;
        assert_eq!(limit.admit(later), Some(1));
        let admitted = (0..100).filter(|_| limit.admit(later).is_some()).count();
        assert_eq!(admitted as u64, BURST - 1);
    }

    #[test]
    fn a_full_queue_drops_lines_and_says_how_many() {
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
