//! Where the engine's log lines go: to stderr.

use std::sync::Once;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tracing_subscriber::EnvFilter;

/// Starts logging by `filter`, unless the process is logging already: the first session decides.
pub(crate) fn start(filter: &str) -> PyResult<()> {
    static STARTED: Once = Once::new();
    let parsed = EnvFilter::builder().parse(filter).map_err(|error| {
        PyValueError::new_err(format!("log={filter:?} cannot be used: {error}"))
    })?;
    STARTED.call_once(|| {
        let subscriber = tracing_subscriber::fmt()
            .with_env_filter(parsed)
            .with_writer(tcpx::log::stderr)
            .with_ansi(false);
        // Refused when something else in the process has a subscriber, which then gets the lines.
        let _ = subscriber.try_init();
    });
    Ok(())
}
