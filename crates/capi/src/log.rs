//! Writes the engine's log lines to stderr.

use std::ffi::c_char;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Once;
use std::time::Instant;

use tcpx::log::Limit;
use tracing_subscriber::EnvFilter;

use crate::ffi::{self, text};
use crate::status::Failure;

/// Starts logging by `filter`, unless the process already does: the first session decides.
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
        // Refused if the program has a subscriber of its own, which then receives the lines.
        let _ = subscriber.try_init();
    });
    Ok(())
}

/// Returns the rate limit of warnings about one subject. Subjects beyond a few share limits.
fn limit_of(what: &str) -> &'static Limit {
    const PLACES: usize = 64;
    static LIMITS: [Limit; PLACES] = [const { Limit::new() }; PLACES];
    let mut hasher = DefaultHasher::new();
    what.hash(&mut hasher);
    &LIMITS[hasher.finish() as usize % PLACES]
}

/// Adds a warning to the library's log, for layers above it that can return only a status: what
/// failed, and why. Goes to stderr as the setting log says; nowhere before the first session. The
/// rate is limited per `what`: ten lines at once, then one per second; `left_out` counts the
/// suppressed lines.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_log_warning(what: *const c_char, why: *const c_char) {
    ffi::call_or((), || {
        let (what, why) = (text!(what)?, text!(why)?);
        if let Some(left_out) = limit_of(what).admit(Instant::now()) {
            let left_out = (left_out > 0).then_some(left_out);
            tracing::warn!(target: "tcpx", left_out, "{what}: {why}");
        }
        Ok(())
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repeated_warning_is_limited_and_keeps_no_other_one_back() {
        let now = Instant::now();
        for what in ["a transfer failed", "cannot post a transfer"] {
            let written = (0..500).filter(|_| limit_of(what).admit(now).is_some());
            assert_eq!(written.count(), 10, "{what}");
        }
    }
}
