//! Sockets, readiness and interfaces: what tcpx needs from the operating system, and nothing of its
//! protocol.
//!
//! - [`span`]: raw ranges of registered memory, the source and target of every transfer.
//! - [`guard`]: copies that report memory which is no longer mapped.
//! - [`stream`]: non-blocking TCP streams that gather from and scatter to spans in the system call.
//! - [`poller`]: one-shot readiness (epoll) with a waker.
//! - [`fork`]: which process a value belongs to, and descriptors that children do not keep.
//! - [`process`]: standard error, the end of the process, its limit of descriptors.
//! - [`neighbour`]: another process on this host: a socket to it, its memory, gates to ours.
//! - [`interfaces`]: the machine's real network interfaces and how to choose among them.
//! - [`topology`]: where devices sit in the machine, which interfaces are nearest to a GPU.
//! - [`cpus`]: the CPUs of a thread and of a NUMA node.
//!
//! `unsafe` lives in [`fork`], [`guard`], [`neighbour`], [`process`], [`span`] and [`stream`] alone.

pub mod cpus;
pub mod fork;
pub mod guard;
pub mod interfaces;
pub mod neighbour;
pub mod poller;
pub mod process;
pub mod span;
pub mod stream;
pub mod topology;

pub use fork::{Forked, InProcess, Process};
pub use guard::{Fault, check_handlers};
pub use neighbour::{Door, Gates, Neighbour, Wire};
pub use poller::{Event, Poller, Waker, sleep_exactly};
pub use span::{Cursor, Span, Store, copy_spans};
pub use stream::{
    Delivery, Listener, SocketOptions, Stream, has_congestion_control, is_exhausted,
    set_congestion_control,
};

/// The machine's host name, or an empty text when it has none.
#[must_use]
pub fn host_name() -> String {
    rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned()
}
