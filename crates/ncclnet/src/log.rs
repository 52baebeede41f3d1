//! Forwards a plugin's log lines to `tracing`, with the plugin's own file and line.
//!
//! | plugin level | `tracing` level | |
//! |---|---|---|
//! | ABORT | error | |
//! | WARN | warn | also remembered: the error of the call it belongs to carries it |
//! | VERSION | info | |
//! | INFO | debug | plugins print several lines a connection at this level |
//! | TRACE, anything else | trace | |
//!
//! The target of every line is [`TARGET`], so that a filter such as `nccl_net_plugin=debug` selects
//! them. The logger has no argument that identifies the plugin.
//!
//! Each call site in a plugin's code may write a few lines at once and then one a second; the next
//! line written has the number of suppressed ones in `left_out`.

pub(crate) mod limit;

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_int, c_ulong};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, Once};
use std::time::Instant;

use tracing::Level;

/// The `tracing` target of plugins' log lines.
pub const TARGET: &str = "nccl_net_plugin";

/// The logger's C type. It is variadic; plugins call it, Rust only passes it on.
pub(crate) type Logger =
    unsafe extern "C" fn(c_int, c_ulong, *const c_char, c_int, *const c_char, ...);

const VERSION: c_int = 1;
const WARN: c_int = 2;
const INFO: c_int = 3;
const ABORT: c_int = 4;

unsafe extern "C" {
    fn tcpx_ncclnet_log_install(
        wanted: extern "C" fn(c_int) -> c_int,
        sink: unsafe extern "C" fn(c_int, c_ulong, *const c_char, c_int, *const c_char, usize),
    );
    fn tcpx_ncclnet_log(
        level: c_int,
        flags: c_ulong,
        file: *const c_char,
        line: c_int,
        fmt: *const c_char,
        ...
    );
}

/// Returns the logger to give to a plugin's `init`.
pub(crate) fn logger() -> Logger {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        // SAFETY: both functions live as long as the process; `Once` makes this the only writer,
        // and no plugin has seen the logger before this returns.
        unsafe { tcpx_ncclnet_log_install(wanted, sink) }
    });
    tcpx_ncclnet_log
}

/// Returns the plugin's last warning: the one from this thread during the call that has just
/// failed, else the last of any thread (plugins have threads of their own). Returns each warning
/// once.
pub(crate) fn take_warning() -> Option<String> {
    let own = LAST_HERE.with_borrow_mut(Line::take);
    let mut anywhere = LAST_ANYWHERE.lock().unwrap_or_else(|e| e.into_inner());
    match own {
        Some(text) => {
            // The same line was recorded in both places.
            if anywhere.as_str() == text {
                anywhere.clear();
            }
            Some(text)
        }
        None => anywhere.take(),
    }
}

/// Drops this thread's warning from a successful call: it explains no later failure.
pub(crate) fn forget_warning() {
    if let Some(text) = LAST_HERE.with_borrow_mut(Line::take) {
        let mut anywhere = LAST_ANYWHERE.lock().unwrap_or_else(|e| e.into_inner());
        if anywhere.as_str() == text {
            anywhere.clear();
        }
    }
}

thread_local! {
    // No destructor: plugins log from threads that are ending.
    static LAST_HERE: RefCell<Line> = const { RefCell::new(Line::new()) };
}

static LAST_ANYWHERE: Mutex<Line> = Mutex::new(Line::new());

/// One line of bounded length, kept without allocating.
struct Line {
    bytes: [u8; 512],
    length: usize,
}

impl Line {
    const fn new() -> Self {
        Self {
            bytes: [0; 512],
            length: 0,
        }
    }

    fn set(&mut self, text: &str) {
        self.length = text.floor_char_boundary(self.bytes.len());
        self.bytes[..self.length].copy_from_slice(&text.as_bytes()[..self.length]);
    }

    fn as_str(&self) -> &str {
        str::from_utf8(&self.bytes[..self.length]).unwrap_or_default()
    }

    fn take(&mut self) -> Option<String> {
        let text = self.as_str().to_owned();
        self.clear();
        (!text.is_empty()).then_some(text)
    }

    fn clear(&mut self) {
        self.length = 0;
    }
}

fn level_of(level: c_int) -> Level {
    match level {
        ABORT => Level::ERROR,
        WARN => Level::WARN,
        VERSION => Level::INFO,
        INFO => Level::DEBUG,
        _ => Level::TRACE,
    }
}

/// Returns whether a line of this level is worth formatting. The C side asks first.
extern "C" fn wanted(level: c_int) -> c_int {
    let wanted = level == WARN || level_of(level) <= tracing::level_filters::LevelFilter::current();
    c_int::from(wanted)
}

/// Logs a formatted line from the C side.
///
/// # Safety
///
/// `text` points to `length` readable bytes; `file` is NULL or a C string. Both are used only
/// during the call.
unsafe extern "C" fn sink(
    level: c_int,
    flags: c_ulong,
    file: *const c_char,
    line: c_int,
    text: *const c_char,
    length: usize,
) {
    // SAFETY: the C side passes its own buffer of at least `length` bytes.
    let text = unsafe { std::slice::from_raw_parts(text.cast::<u8>(), length) };
    // SAFETY: plugins pass `__FILE__` or a function's name, or nothing.
    let file = (!file.is_null()).then(|| unsafe { CStr::from_ptr(file) });

    // A subscriber that panics must not unwind through the plugin's frames.
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        let text = printable(text);
        let file = file.map(CStr::to_string_lossy).unwrap_or_default();
        if level == WARN {
            remember(&text);
        }
        emit(level_of(level), flags, &file, line, &text);
    }));
    if let Err(payload) = outcome {
        forget(payload);
    }
}

/// Leaks a panic's payload, whose drop may panic again.
fn forget(payload: Box<dyn Any + Send>) {
    std::mem::forget(payload);
}

fn printable(text: &[u8]) -> std::borrow::Cow<'_, str> {
    String::from_utf8_lossy(text.trim_ascii_end())
}

fn remember(text: &str) {
    let _ = LAST_HERE.try_with(|last| {
        if let Ok(mut last) = last.try_borrow_mut() {
            last.set(text);
        }
    });
    // Never blocks: a plugin may log while it holds locks of its own.
    if let Ok(mut last) = LAST_ANYWHERE.try_lock() {
        last.set(text);
    }
}

fn emit(level: Level, flags: c_ulong, file: &str, line: c_int, text: &str) {
    macro_rules! event {
        ($level:expr) => {
            if tracing::enabled!(target: TARGET, $level)
                && let Some(left_out) = limit::of(file.as_bytes(), line).admit(Instant::now())
            {
                let left_out = (left_out > 0).then_some(left_out);
                let at = format_args!("{file}:{line}");
                tracing::event!(target: TARGET, $level, at = %at, flags, left_out, "{text}")
            }
        };
    }
    match level {
        Level::ERROR => event!(Level::ERROR),
        Level::WARN => event!(Level::WARN),
        Level::INFO => event!(Level::INFO),
        Level::DEBUG => event!(Level::DEBUG),
        _ => event!(Level::TRACE),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    /// Logs as a plugin would.
    fn warn(text: &CStr) {
        // SAFETY: the format has one string argument, and there is one.
        unsafe {
            logger()(
                WARN,
                0x10,
                c"plugin.cc".as_ptr(),
                7,
                c"%s\n".as_ptr(),
                text.as_ptr(),
            );
        }
    }

    #[test]
    fn warnings_are_kept_for_the_thread_that_caused_them_and_given_once() {
        std::thread::spawn(|| {
            warn(c"first");
            warn(c"second");
            assert_eq!(take_warning().as_deref(), Some("second"));
        })
        .join()
        .unwrap();
    }

    #[test]
    fn a_warning_of_a_call_that_succeeded_explains_nothing() {
        std::thread::spawn(|| {
            warn(c"harmless");
            forget_warning();
            assert_eq!(LAST_HERE.with_borrow_mut(Line::take), None);
        })
        .join()
        .unwrap();
    }

    #[test]
    fn lines_become_events_of_their_level_with_the_plugins_file_and_line() {
        let text = written_by(|| {
            for level in [WARN, INFO, ABORT, VERSION, 5, 99] {
                // SAFETY: the format has one int argument, and there is one.
                unsafe {
                    logger()(
                        level,
                        0x10,
                        c"net.cc".as_ptr(),
                        40 + level,
                        c"level %d\n".as_ptr(),
                        level,
                    );
                }
            }
        });
        let lines: Vec<&str> = text.lines().map(str::trim).collect();
        assert_eq!(
            lines,
            [
                "WARN nccl_net_plugin: level 2 at=net.cc:42 flags=16",
                "DEBUG nccl_net_plugin: level 3 at=net.cc:43 flags=16",
                "ERROR nccl_net_plugin: level 4 at=net.cc:44 flags=16",
                "INFO nccl_net_plugin: level 1 at=net.cc:41 flags=16",
            ]
        );
    }

    #[test]
    fn a_plugin_cannot_fill_the_log() {
        const LINES: usize = 10_000;
        let log = |file: &CStr| {
            // SAFETY: the format has no arguments.
            unsafe { logger()(WARN, 0, file.as_ptr(), 1, c"again".as_ptr()) }
        };
        let text = written_by(|| {
            (0..LINES).for_each(|_| log(c"flood.cc"));
            log(c"quiet.cc");
        });
        // One more for each second that the test has taken.
        let flooded = text.matches("at=flood.cc:1").count();
        assert!((limit::BURST as usize..LINES / 2).contains(&flooded));
        assert_eq!(text.matches("at=quiet.cc:1").count(), 1);
        // A suppressed warning still explains the failure of a call.
        assert_eq!(take_warning().as_deref(), Some("again"));
    }

    /// Returns what `body` writes to a log of level DEBUG.
    fn written_by(body: impl FnOnce()) -> String {
        let written = Arc::new(Mutex::new(Vec::new()));
        let writer = Arc::clone(&written);
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(tracing::level_filters::LevelFilter::DEBUG)
            .with_ansi(false)
            .without_time()
            .with_writer(move || Written(Arc::clone(&writer)))
            .finish();
        tracing::subscriber::with_default(subscriber, body);
        let written = written.lock().unwrap();
        String::from_utf8(written.clone()).unwrap()
    }

    struct Written(Arc<Mutex<Vec<u8>>>);

    impl std::io::Write for Written {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn the_plugins_errno_survives_a_log_line() {
        let (failed, errno) = std::thread::spawn(|| {
            let failed = std::fs::File::open("/no/such/file").unwrap_err();
            warn(c"about to look at errno");
            (failed, std::io::Error::last_os_error())
        })
        .join()
        .unwrap();
        assert_eq!(failed.raw_os_error(), errno.raw_os_error());
    }

    #[test]
    fn long_lines_are_cut_at_a_character() {
        let mut line = Line::new();
        line.set(&"é".repeat(400));
        assert_eq!(line.take().unwrap(), "é".repeat(256));
        assert_eq!(line.take(), None);
        let mut line = Line::new();
        line.set(&format!("x{}", "é".repeat(400)));
        assert_eq!(line.take().unwrap(), format!("x{}", "é".repeat(255)));
    }

    #[test]
    fn a_line_longer_than_the_buffer_is_cut_and_harmless() {
        std::thread::spawn(|| {
            let long = std::ffi::CString::new(vec![b'a'; 10_000]).unwrap();
            warn(&long);
            assert_eq!(take_warning().unwrap(), "a".repeat(512));
        })
        .join()
        .unwrap();
    }

    #[test]
    fn missing_file_and_format_are_tolerated() {
        // SAFETY: NULL file and NULL format are the subject of the test; no arguments follow.
        unsafe {
            logger()(WARN, 0, std::ptr::null(), 0, std::ptr::null());
            logger()(INFO, 0, std::ptr::null(), 0, c"plain".as_ptr());
        }
    }
}
