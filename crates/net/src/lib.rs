//! Sockets, readiness and interfaces: the operating system as tcpx uses it. Knows nothing of the
//! protocol.
//!
//! - [`span`]: raw ranges of registered memory, the source and target of every transfer.
//! - [`guard`]: copies that report memory which is no longer mapped.
//! - [`stream`]: non-blocking TCP streams that gather from and scatter to spans in the system call.
//! - [`tcp_info`]: the kernel's statistics of a stream.
//! - [`poller`]: one-shot readiness (epoll) with a waker, and a signal for other event loops.
//! - [`fork`]: detection of forks, and descriptors that children do not keep.
//! - [`folder`]: Unix sockets of one user, in a folder that no other user can enter.
//! - [`process`]: standard error, the end of the process, its limit of descriptors, its CPU time.
//! - [`neighbour`]: another process on this host: a socket to it, its memory, gates to local
//!   memory.
//! - [`interfaces`]: the machine's real network interfaces and how to choose among them.
//! - [`topology`]: the location of devices in the machine, and the interfaces nearest to a GPU.
//! - [`cpus`]: the CPUs of a thread and of a NUMA node.
//!
//! `unsafe` lives in [`fork`], [`guard`], [`neighbour`], [`process`], [`span`], [`stream`] and
//! [`tcp_info`] alone.

pub mod cpus;
pub mod folder;
pub mod fork;
pub mod guard;
pub mod interfaces;
pub mod neighbour;
#[cfg(test)]
mod pages;
pub mod poller;
pub mod process;
pub mod route;
pub mod span;
pub mod stream;
pub mod tcp_info;
pub mod topology;

pub use folder::Folder;
pub use fork::{Forked, InProcess, Process};
pub use guard::{Fault, check_handlers, check_handlers_anew};
pub use neighbour::{Door, Gates, Neighbour, Wire};
pub use poller::{Event, Poller, Signal, Waker, sleep_exactly};
pub use route::source_towards;
pub use span::{Cursor, Span, Store, copy_spans};
pub use stream::{
    Delivery, Listener, SocketOptions, Stream, has_congestion_control, is_exhausted,
    set_congestion_control,
};
pub use tcp_info::TcpInfo;

/// Returns the machine's host name, or an empty text when it has none.
#[must_use]
pub fn host_name() -> String {
    rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned()
}
