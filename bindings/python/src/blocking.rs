//! Waits without the interpreter's lock, interruptible by signals.

use std::time::{Duration, Instant};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tcpx::{Error, ErrorKind};

/// Interval at which a wait checks for signals: Ctrl-C feels immediate, and waking ten times a
/// second costs nothing.
const SLICE: Duration = Duration::from_millis(100);

/// The reason a wait did not succeed.
pub(crate) enum Ended {
    /// An error of the engine.
    Engine(Error),
    /// A signal handler raised, such as `KeyboardInterrupt`.
    Raised(PyErr),
}

/// Calls `wait` with short timeouts until it succeeds, fails, or `timeout` (none: for ever)
/// expires.
pub(crate) fn wait<T: Send>(
    py: Python<'_>,
    timeout: Option<Duration>,
    wait: impl Fn(Duration) -> Result<T, Error> + Send + Sync,
) -> Result<T, Ended> {
    let until = timeout.and_then(|t| Instant::now().checked_add(t));
    loop {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let slice = left.map_or(SLICE, |left| left.min(SLICE));
        let last = left.is_some_and(|left| left <= SLICE);
        match py.detach(|| wait(slice)) {
            Err(error) if error.kind() == ErrorKind::Timeout && !last => {
                py.check_signals().map_err(Ended::Raised)?;
            }
            Err(Error::Timeout { what, .. }) => {
                let after = timeout.unwrap_or_default();
                return Err(Ended::Engine(Error::Timeout { what, after }));
            }
            Err(Error::NotReachedInTime { peer, attempts, .. }) => {
                let after = timeout.unwrap_or_default();
                let error = Error::NotReachedInTime {
                    peer,
                    after,
                    attempts,
                };
                return Err(Ended::Engine(error));
            }
            Err(error) => return Err(Ended::Engine(error)),
            Ok(value) => return Ok(value),
        }
    }
}

/// Converts a timeout in seconds; `None` has no limit.
pub(crate) fn seconds(timeout: Option<f64>) -> PyResult<Option<Duration>> {
    timeout
        .map(|seconds| {
            Duration::try_from_secs_f64(seconds).map_err(|_| {
                PyValueError::new_err(format!(
                    "timeout is {seconds}: expected seconds, 0 or more, or None"
                ))
            })
        })
        .transpose()
}
