//! The native module of the Python package `tcpx`: conversions around the [`tcpx`] crate.
//!
//! | module | what it holds |
//! |---|---|
//! | `native` | the package's own classes: `Session`, `Peer`, `Region`, `Transfer` |
//! | `p2p` | `tcpx.p2p`: the calls of `uccl.p2p` on top of a session |
//! | `arguments` | conversion of Python arguments, with errors that name them |
//! | `blocking` | waiting without the interpreter's lock, interruptible by signals |
//! | `owned` | values that forked children must not touch, or whose drop blocks |
//! | `errors`, `log` | exceptions; output of log lines |
//!
//! Calls that take longer than a few microseconds release the interpreter's lock. Importing starts
//! nothing: no thread, no socket, no CUDA.

mod arguments;
mod blocking;
mod errors;
mod log;
mod native;
mod owned;
mod p2p;

use pyo3::prelude::*;

#[pymodule]
fn _tcpx(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    native::add_to(module)?;
    p2p::add_to(module)
}
