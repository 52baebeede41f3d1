//! Converts the engine's errors into Python's exceptions, which `tcpx.errors` defines.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use tcpx::{Error, ErrorKind, Status};

use crate::blocking::Ended;

/// Creates the exception for an error.
pub(crate) fn exception(py: Python<'_>, error: &Error) -> PyErr {
    static MODULE: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    MODULE
        .get_or_try_init(py, || Ok(py.import("tcpx.errors")?.unbind()))
        .and_then(|module| module.bind(py).getattr(class_name(error)))
        .and_then(|class| class.call1((error.to_string(),)))
        .map_or_else(|failed| failed, PyErr::from_value)
}

impl Ended {
    pub(crate) fn into_exception(self, py: Python<'_>) -> PyErr {
        match self {
            Self::Engine(error) => exception(py, &error),
            Self::Raised(raised) => raised,
        }
    }
}

fn class_name(error: &Error) -> &'static str {
    if let Error::PeerRefused {
        status: Status::UnknownRegion,
        ..
    } = error
    {
        return "RegionGoneError";
    }
    match error.kind() {
        ErrorKind::InvalidArgument => "InvalidArgumentError",
        ErrorKind::NotFound => "NotFoundError",
        ErrorKind::NotAllowed => "NotAllowedError",
        ErrorKind::Busy => "BusyError",
        ErrorKind::Timeout => "TimeoutError",
        ErrorKind::Disconnected => "DisconnectedError",
        ErrorKind::Refused => "RefusedError",
        ErrorKind::Aborted => "AbortedError",
        ErrorKind::Truncated => "TruncatedError",
        ErrorKind::Environment => "EnvironmentError",
        ErrorKind::Closed => "ClosedError",
        ErrorKind::Forked => "ForkedError",
        ErrorKind::ProtocolViolation => "ProtocolError",
        ErrorKind::NotSupported => "NotSupportedError",
        _ => "Error",
    }
}
