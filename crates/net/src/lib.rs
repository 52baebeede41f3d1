//! Sockets, readiness and interfaces: what tcpx needs from the operating system, and nothing of its
//! protocol.
//!
//! - [`span`]: raw ranges of registered memory, the source and target of every transfer.
//! - [`stream`]: non-blocking TCP streams that gather from and scatter to spans in the system call.
//! - [`poller`]: one-shot readiness (epoll) with a waker.
//! - [`process`]: standard error, the end of the process, its limit of descriptors.
//! - [`interfaces`]: the machine's real network interfaces and how to choose among them.
//!
//! `unsafe` lives in [`span`], [`stream`] and [`process`] alone.

pub mod interfaces;
pub mod poller;
pub mod process;
pub mod span;
pub mod stream;

pub use poller::{Event, Poller, Waker, sleep_exactly};
pub use span::{Cursor, Span, Store, copy_spans};
pub use stream::{
    Listener, SocketOptions, Stream, has_congestion_control, is_exhausted, set_congestion_control,
};

/// The machine's host name, or an empty text when it has none.
#[must_use]
pub fn host_name() -> String {
    rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned()
}
