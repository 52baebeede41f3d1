//! Status numbers of errors, and their messages.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};

use tcpx::{Error, ErrorKind, Side, Status};

/// The result of a call. The numbers are stable: new ones are added at the end, none is ever
/// reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub enum tcpx_status {
    /// Success.
    TCPX_OK = 0,
    /// An argument is invalid.
    TCPX_ERROR_INVALID_ARGUMENT = 1,
    /// The named object does not exist.
    TCPX_ERROR_NOT_FOUND = 2,
    /// The state of the object forbids the call.
    TCPX_ERROR_NOT_ALLOWED = 3,
    /// The transfer is still in flight, or the peer does not keep up. Try again later.
    TCPX_ERROR_BUSY = 4,
    /// The caller's timeout expired; nothing was cancelled.
    TCPX_ERROR_TIMEOUT = 5,
    /// The peer is gone, unreachable or silent.
    TCPX_ERROR_DISCONNECTED = 6,
    /// The peer refused.
    TCPX_ERROR_REFUSED = 7,
    /// The transfer was aborted by this side.
    TCPX_ERROR_ABORTED = 8,
    /// A tagged message was longer than the buffer posted for it.
    TCPX_ERROR_TRUNCATED = 9,
    /// This machine lacks a required resource.
    TCPX_ERROR_ENVIRONMENT = 10,
    /// The session is closed.
    TCPX_ERROR_CLOSED = 11,
    /// The peer broke the protocol.
    TCPX_ERROR_PROTOCOL = 12,
    /// Not available in this build or on this machine.
    TCPX_ERROR_NOT_SUPPORTED = 13,
    /// A defect of this library: please report it.
    TCPX_ERROR_INTERNAL = 14,
    /// The peer no longer has the region: get a new descriptor.
    TCPX_ERROR_REGION_GONE = 15,
    /// The handle belongs to the parent of this forked process: create a session in this process.
    TCPX_ERROR_FORKED = 16,
}

use tcpx_status::*;

/// Converts the engine's errors into numbers. No other code does.
impl From<&Error> for tcpx_status {
    fn from(error: &Error) -> Self {
        if let Error::PeerRefused {
            status: Status::UnknownRegion,
            ..
        } = error
        {
            return TCPX_ERROR_REGION_GONE;
        }
        match error.kind() {
            ErrorKind::InvalidArgument => TCPX_ERROR_INVALID_ARGUMENT,
            ErrorKind::NotFound => TCPX_ERROR_NOT_FOUND,
            ErrorKind::NotAllowed => TCPX_ERROR_NOT_ALLOWED,
            ErrorKind::Busy => TCPX_ERROR_BUSY,
            ErrorKind::Timeout => TCPX_ERROR_TIMEOUT,
            ErrorKind::Disconnected => TCPX_ERROR_DISCONNECTED,
            ErrorKind::Refused => TCPX_ERROR_REFUSED,
            ErrorKind::Aborted => TCPX_ERROR_ABORTED,
            ErrorKind::Truncated => TCPX_ERROR_TRUNCATED,
            ErrorKind::Environment => TCPX_ERROR_ENVIRONMENT,
            ErrorKind::Closed => TCPX_ERROR_CLOSED,
            ErrorKind::Forked => TCPX_ERROR_FORKED,
            ErrorKind::ProtocolViolation => TCPX_ERROR_PROTOCOL,
            ErrorKind::NotSupported => TCPX_ERROR_NOT_SUPPORTED,
            _ => TCPX_ERROR_INTERNAL,
        }
    }
}

/// Returns the name of a status, such as "DISCONNECTED"; "UNKNOWN" for an undefined number.
#[unsafe(no_mangle)]
pub extern "C" fn tcpx_status_name(status: i32) -> *const c_char {
    let name: &'static CStr = match status {
        0 => c"OK",
        1 => c"INVALID_ARGUMENT",
        2 => c"NOT_FOUND",
        3 => c"NOT_ALLOWED",
        4 => c"BUSY",
        5 => c"TIMEOUT",
        6 => c"DISCONNECTED",
        7 => c"REFUSED",
        8 => c"ABORTED",
        9 => c"TRUNCATED",
        10 => c"ENVIRONMENT",
        11 => c"CLOSED",
        12 => c"PROTOCOL",
        13 => c"NOT_SUPPORTED",
        14 => c"INTERNAL",
        15 => c"REGION_GONE",
        16 => c"FORKED",
        _ => c"UNKNOWN",
    };
    name.as_ptr()
}

/// Returns the message of the last failed call of this thread; never NULL. The text is valid until
/// the thread's next failed call.
#[unsafe(no_mangle)]
pub extern "C" fn tcpx_last_error() -> *const c_char {
    LAST_ERROR
        .try_with(|last| last.borrow().as_ptr())
        // The thread is ending, and its texts are gone.
        .unwrap_or(c"".as_ptr())
}

/// Returns the version of this library, such as "0.1.0".
#[unsafe(no_mangle)]
pub extern "C" fn tcpx_version() -> *const c_char {
    const VERSION: &CStr =
        match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
            Ok(version) => version,
            Err(_) => panic!("a version has no NUL inside"),
        };
    VERSION.as_ptr()
}

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::default();
}

/// The reason a call failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    #[error(transparent)]
    Engine(#[from] Error),

    #[error("{0} is NULL")]
    Null(&'static str),

    #[error("{0} is not UTF-8")]
    NotText(&'static str),

    #[error("{name} is {value}: expected {expected}")]
    BadNumber {
        name: &'static str,
        value: u32,
        expected: &'static str,
    },

    #[error("segment {index}: its {side} region is NULL")]
    SegmentNull { index: usize, side: Side },

    #[error(
        "segment {index}: {address:#x} lies before its {side} region, which begins at {start:#x}"
    )]
    SegmentBeforeRegion {
        index: usize,
        side: Side,
        address: u64,
        start: u64,
    },

    #[error("{address:#x} lies before the region, which begins at {start:#x}")]
    BeforeRegion { address: u64, start: u64 },

    #[error("cannot list the network interfaces: {0}")]
    Devices(String),

    #[error("log={filter:?} cannot be used: {reason}")]
    LogFilter { filter: String, reason: String },

    #[error("a defect of this library, please report it: {0}")]
    Panic(String),
}

impl From<tcpx::ConfigError> for Failure {
    fn from(error: tcpx::ConfigError) -> Self {
        Self::Engine(error.into())
    }
}

impl Failure {
    pub(crate) fn of_panic(panic: &(dyn Any + Send)) -> Self {
        let text = panic
            .downcast_ref::<&str>()
            .map(|text| (*text).to_owned())
            .or_else(|| panic.downcast_ref::<String>().cloned());
        Self::Panic(text.unwrap_or_else(|| "it panicked".into()))
    }

    pub(crate) fn status(&self) -> tcpx_status {
        match self {
            Self::Engine(error) => error.into(),
            Self::Panic(_) => TCPX_ERROR_INTERNAL,
            Self::Devices(_) => TCPX_ERROR_ENVIRONMENT,
            _ => TCPX_ERROR_INVALID_ARGUMENT,
        }
    }

    /// Stores this as the thread's last error.
    pub(crate) fn remember(&self) -> tcpx_status {
        let text = c_text(&self.to_string());
        // A thread that is ending cannot store it; the status still reports the failure.
        let _ = LAST_ERROR.try_with(|last| *last.borrow_mut() = text);
        self.status()
    }
}

/// Converts a text to C: cut at the first NUL, if there is one inside.
pub(crate) fn c_text(text: &str) -> CString {
    let upto = text.split('\0').next().unwrap_or_default();
    CString::new(upto).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ffi;

    #[test]
    fn every_status_has_a_name_of_its_own() {
        let mut names = std::collections::HashSet::new();
        for number in TCPX_OK as i32..=TCPX_ERROR_FORKED as i32 {
            assert!(names.insert(tcpx_status_name(number)), "{number}");
        }
        assert!(!names.contains(&tcpx_status_name(TCPX_ERROR_FORKED as i32 + 1)));
        assert!(!names.contains(&tcpx_status_name(-1)));
    }

    #[test]
    fn a_panic_becomes_a_status_and_a_text() {
        let status = ffi::call(|| panic!("at {}", "noon"));
        assert_eq!(status, TCPX_ERROR_INTERNAL);
        let text = LAST_ERROR.with(|last| last.borrow().to_str().unwrap().to_owned());
        assert!(text.ends_with("please report it: at noon"), "{text}");
        assert_eq!(ffi::call_or(7, || panic!("again")), 7);
    }

    #[test]
    fn a_text_with_nul_inside_is_cut() {
        assert_eq!(c_text("a\0b").as_c_str(), c"a");
    }
}
