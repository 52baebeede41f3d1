//! The one system call that no safe crate wraps.

use std::io;
use std::net::TcpListener;
use std::os::fd::AsRawFd;

/// Asks the kernel to allow zero-copy sends on a TCP socket; fails with its reason to refuse.
pub(crate) fn probe_zerocopy() -> io::Result<()> {
    // A listener is a TCP socket that needs no peer.
    let socket = TcpListener::bind("127.0.0.1:0")?;
    let on: libc::c_int = 1;
    // SAFETY: `socket` keeps the descriptor open during the call, and the kernel reads exactly the
    // given size from `on`, which lives on this stack frame.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ZEROCOPY,
            (&raw const on).cast(),
            size_of_val(&on) as libc::socklen_t,
        )
    };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}
