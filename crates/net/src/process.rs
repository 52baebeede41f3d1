//! The process: its standard error, its end, its limit of descriptors.

use std::io;
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

/// How soon standard error is tried again where it takes nothing and does not block.
const FULL_STDERR: Duration = Duration::from_millis(10);

/// Writes all of `bytes` to standard error, for as long as that takes.
///
/// Takes none of the locks of [`std::io::stderr`], which a forked child could find locked for good.
///
/// # Errors
/// Standard error is closed.
pub fn write_stderr(mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match rustix::io::write(rustix::stdio::stderr(), bytes) {
            Ok(count) => bytes = &bytes[count..],
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => std::thread::sleep(FULL_STDERR),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Calls `last` when the process exits in good order, or when the library that this crate is part of
/// is unloaded.
pub fn at_exit(last: extern "C" fn()) {
    // SAFETY: `last` is code of this very library, and handlers run before the library is unloaded.
    // Refused only where no memory is left: then nothing is called.
    let _ = unsafe { libc::atexit(last) };
}

/// Returns how many descriptors this process may have, as it is set now.
#[must_use]
pub fn descriptor_limit() -> usize {
    let limit = getrlimit(Resource::Nofile).current;
    limit.map_or(usize::MAX, |limit| {
        usize::try_from(limit).unwrap_or(usize::MAX)
    })
}
