//! NCCL net plugins, API versions 4 to 12, behind one safe type.
//!
//! A net plugin is a shared library that moves messages between processes: the fast networks of
//! NVIDIA and the cloud vendors are available this way. [`Plugin`] loads one as NCCL would and
//! hides which version of the API it implements.
//!
//! The API expresses its contract by NULL pointers and rules of order; here both are types:
//!
//! | the plugin | this crate |
//! |---|---|
//! | success and a NULL comm: call again, same buffers | `Poll::Pending` from [`Connecting::poll`], [`Listener::accept`] |
//! | success and a NULL request: nothing was queued | `None` from [`SendComm::isend`](Comm::isend), [`RecvComm::irecv`](Comm::irecv) |
//! | one request more than it has slots for: an error | `None` as well: the comm counts |
//! | a request tested or consumed out of turn: an error or worse | [`Error::OutOfOrder`], and the plugin is not called |
//! | any other code than success | [`Error::Call`], with the code's name and the plugin's last warning |
//! | a call after a failed one: use after free | [`Error::Dead`], and the plugin is not called |
//! | a size that does not fit the version's `int` | [`Error::TooLarge`] |
//!
//! The only `unsafe` part is registering memory, [`Comm::register`]: its owner promises to keep it.
//!
//! # Example
//!
//! ```no_run
//! use std::task::Poll;
//! use tcpx_ncclnet::{Handle, MemoryKind, Plugin};
//!
//! # fn carry_to_peer(_: &[u8]) {}
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let plugin = Plugin::open("tcpx")?; // `tcpx`, then `libnccl-net-tcpx.so`
//! println!("{} implements version {}", plugin.name(), plugin.api_version());
//!
//! // The receiver listens, and carries the handle to the sender by its own means.
//! let mut listener = plugin.listen(0)?;
//! carry_to_peer(listener.handle().as_bytes());
//! let receiver = std::thread::spawn(move || -> Result<Vec<u8>, tcpx_ncclnet::Error> {
//!     // Some plugins block here: hence the thread.
//!     let mut comm = loop {
//!         match listener.accept() {
//!             Poll::Ready(comm) => break comm?,
//!             Poll::Pending => std::thread::yield_now(),
//!         }
//!     };
//!     let mut buffer = vec![0; 4096];
//!     // SAFETY: the buffer outlives the comm, and is read when the receive is done.
//!     let memory =
//!         unsafe { comm.register(buffer.as_mut_ptr(), buffer.len(), MemoryKind::Host) }?;
//!     let request = loop {
//!         match comm.irecv(&memory, 0, 4096, 7)? {
//!             Some(request) => break request,
//!             None => std::thread::yield_now(),
//!         }
//!     };
//!     while comm.test(request)?.is_none() {}
//!     comm.consume(request)?;
//!     drop(comm);
//!     Ok(buffer)
//! });
//! # drop(receiver);
//!
//! // The sender, on its machine:
//! # let bytes_from_peer = [0; 128];
//! let mut connecting = plugin.connect(0, &Handle::from_bytes(&bytes_from_peer)?)?;
//! let mut comm = loop {
//!     match connecting.poll() {
//!         Poll::Ready(comm) => break comm?,
//!         Poll::Pending => std::thread::yield_now(),
//!     }
//! };
//! // register, isend, test: as above
//! # drop(comm);
//! # Ok(())
//! # }
//! ```
//!
//! # Modules
//!
//! | module | what it holds |
//! |---|---|
//! | [`find`] | finds the library of a name |
//! | `registry` | the initialised libraries, each with its version |
//! | `plugin`, `properties` | [`Plugin`] and its devices |
//! | `comm` | listeners, connection attempts, the two kinds of comm, registered memory |
//! | `window` | the requests of a comm and their order |
//! | `sys` | the C tables of each version, turned into one set of calls |
//! | [`log`] | turns the plugin's log lines into `tracing` events |
//! | `error` | [`Error`] |
//!
//! # Cost
//!
//! `isend`, `irecv`, `test` and `consume` check a few integers, allocate nothing, take no lock and
//! make one indirect call.

mod comm;
mod error;
pub mod find;
pub mod log;
mod plugin;
mod properties;
mod registry;
mod sys;
mod window;

pub use comm::{
    Comm, Completion, Connecting, DeviceHandle, Direction, Flush, Flushing, Handle, Listener,
    MemoryHandle, Receiving, RecvComm, Request, SendComm, Sending,
};
pub use error::{Code, Error, Fault, Tried};
pub use plugin::Plugin;
pub use properties::{DeviceType, MemoryKind, Properties};
