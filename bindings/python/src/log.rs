//! Writes the engine's log lines to stderr.

use std::sync::Once;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tracing_subscriber::EnvFilter;

/// Starts logging by `filter`, unless the process already does: the first session decides.
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
        // Refused if the process has a subscriber of its own, which then receives the lines.
        let _ = subscriber.try_init();
    });
    Ok(())
}
