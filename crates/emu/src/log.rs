//! Writes log lines through the logger from `init`.

use std::ffi::{CString, c_int, c_ulong};
use std::sync::OnceLock;

use crate::tables::Logger;

/// Severity, as NCCL numbers it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Level {
    Warn = 2,
    Info = 3,
}

/// `NCCL_NET`.
const NET: c_ulong = 0x10;

static LOGGER: OnceLock<Logger> = OnceLock::new();

/// Stores the logger. The first one stays: `init` of another table passes the same one.
pub(crate) fn set_logger(logger: Option<Logger>) {
    if let Some(logger) = logger {
        let _ = LOGGER.set(logger);
    }
}

/// Writes one line; without a logger it is lost.
pub(crate) fn line(level: Level, line: u32, message: &str) {
    let Some(logger) = LOGGER.get() else { return };
    // An interior NUL can only come from a value in the environment: cut there.
    let text = match CString::new(message) {
        Ok(text) => text,
        Err(error) => {
            let end = error.nul_position();
            let mut bytes = error.into_vec();
            bytes.truncate(end);
            CString::new(bytes).unwrap_or_default()
        }
    };
    let line = c_int::try_from(line).unwrap_or(0);
    // SAFETY: the strings live until the call returns, and the format has exactly one `%s`. Like
    // the real plugin, the emulator passes its own name where a file name is expected.
    unsafe {
        logger(
            level as c_int,
            NET,
            c"tcpx-emu".as_ptr(),
            line,
            c"%s".as_ptr(),
            text.as_ptr(),
        );
    }
}

/// Logs something that the user must act on.
macro_rules! warning {
    ($($arg:tt)*) => {
        $crate::log::line($crate::log::Level::Warn, line!(), &format!($($arg)*))
    };
}

/// Logs something that explains later lines.
macro_rules! info {
    ($($arg:tt)*) => {
        $crate::log::line($crate::log::Level::Info, line!(), &format!($($arg)*))
    };
}

pub(crate) use {info, warning};
