//! The native module of the Python package `tcpx`: conversions around the [`tcpx`] crate.
//!
//! | module | what it holds |
//! |---|---|
//! | `native` | the package's own classes: `Session`, `Peer`, `Region`, `Transfer` |
//! | `p2p` | `tcpx.p2p`: the calls of `uccl.p2p` on top of a session |
//! | `blocking` | waiting without the interpreter's lock, interruptible by signals |
//! | `owned` | what a forked child must leave alone, and what ends without holding up other threads |
//! | `errors`, `log` | exceptions; where log lines go |
//!
//! Whatever takes longer than a few microseconds is done without the interpreter's lock. Importing starts
//! nothing: no thread, no socket, no CUDA.

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
