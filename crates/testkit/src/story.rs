//! A time limit around a test, and waiting for conditions.

use std::io::Write;
use std::panic::resume_unwind;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use tracing_subscriber::EnvFilter;

/// Time after which a wait counts as hung. No statement about performance.
pub const GUARD: Duration = Duration::from_secs(45);

/// The same for waits in another process, which then has time left to answer.
pub const REMOTE_GUARD: Duration = Duration::from_secs(40);

/// Time limit of a story.
const STORY: Duration = Duration::from_secs(150);

/// Runs a test under a time limit: a test that hangs fails with a message and does not block the
/// others.
///
/// # Panics
/// When the test does, or when it takes too long.
pub fn story(body: impl FnOnce() + Send + 'static) {
    story_within(STORY, body);
}

/// Does what [`story`] does, with a limit of its own.
///
/// # Panics
/// When the test does, or when it takes too long.
pub fn story_within(limit: Duration, body: impl FnOnce() + Send + 'static) {
    log_if_asked();
    let (ended, end) = mpsc::channel::<()>();
    let teller = std::thread::current().name().unwrap_or("story").to_owned();
    let thread = std::thread::Builder::new()
        .name(teller)
        .spawn(move || {
            // Dropped at the end, however the test ends.
            let _ended = ended;
            body();
        })
        .expect("a thread can be started");
    if let Err(mpsc::RecvTimeoutError::Timeout) = end.recv_timeout(limit) {
        panic!("the test hangs: it is not over after {limit:?}");
    }
    if let Err(panic) = thread.join() {
        resume_unwind(panic);
    }
}

/// Logs the sessions of this process, if `TCPX_LOG` is set.
pub fn log_if_asked() {
    if let Ok(filter) = EnvFilter::try_from_env("TCPX_LOG") {
        // Refused if it was done before.
        let _ = tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_writer(tcpx::log::stderr)
            .try_init();
    }
}

/// Reports a skipped test, also if cargo captures the output of passed tests.
pub fn skipped(why: &str) {
    let test = std::thread::current().name().unwrap_or("a test").to_owned();
    let _ = writeln!(std::io::stderr(), "SKIPPED: {test}: {why}");
}

/// Returns the available memory of the machine, if it reports it.
#[must_use]
pub fn available_bytes() -> Option<u64> {
    let all = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = all.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib << 10)
}

/// Waits until a condition holds.
///
/// # Panics
/// When it does not hold before [`GUARD`] has passed.
pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(
            start.elapsed() < GUARD,
            "waited {GUARD:?} in vain until {what}"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}
