//! Where the engine's log lines go: to stderr.

use std::ffi::c_char;
use std::sync::Once;

use tracing_subscriber::EnvFilter;

use crate::ffi::{self, text};
use crate::status::Failure;

/// Starts logging by `filter`, unless the process is logging already: the first session decides.
pub(crate) fn start(filter: &str) -> Result<(), Failure> {
    static STARTED: Once = Once::new();
    let parsed = EnvFilter::builder()
        .parse(filter)
        .map_err(|error| Failure::LogFilter {
            filter: filter.to_owned(),
            reason: error.to_string(),
        })?;
    STARTED.call_once(|| {
        let subscriber = tracing_subscriber::fmt()
            .with_env_filter(parsed)
            .with_writer(tcpx::log::stderr)
            .with_ansi(false);
        // Refused when the program has a subscriber of its own, which then gets the lines.
        let _ = subscriber.try_init();
    });
    Ok(())
}

/// Adds a warning to the library's log, for layers above it that can pass on a number only: what could not be
/// done, and why. Goes to stderr as the setting log says; nowhere before the first session.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_log_warning(what: *const c_char, why: *const c_char) {
    ffi::call_or((), || {
        tracing::warn!(target: "tcpx", "{}: {}", text!(what)?, text!(why)?);
        Ok(())
    });
}
