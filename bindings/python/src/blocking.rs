//! Waiting without the interpreter's lock, interruptible by signals.

use std::time::{Duration, Instant};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tcpx::{Error, ErrorKind};

/// How long a wait may leave signals unlooked at: Ctrl-C feels immediate, and waking ten times a second costs
/// nothing.
const SLICE: Duration = Duration::from_millis(100);

/// How a wait ended that did not succeed.
pub(crate) enum Ended {
    /// The engine said so.
    Engine(Error),
    /// A signal handler raised, such as `KeyboardInterrupt`.
    Raised(PyErr),
}

/// Calls `wait` with short timeouts until it succeeds, fails, or `timeout` (for ever without one) runs out.
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
            Err(error) => return Err(Ended::Engine(error)),
            Ok(value) => return Ok(value),
        }
    }
}

/// A timeout in seconds as Python gives it; `None` waits as long as it takes.
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
