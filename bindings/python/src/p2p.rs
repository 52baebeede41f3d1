//! `tcpx.p2p`: the calls of `uccl.p2p` on top of a session.
//!
//! | module | what it holds |
//! |---|---|
//! | `endpoint` | the class: construction, connections |
//! | `registration`, `onesided`, `twosided`, `local` | its other methods, by subject |
//! | `arguments` | conversion of numbers and lists from Python |
//! | `metadata` | the bytes that let a peer connect |
//! | `descriptor` | `XferDesc`, and the blobs that represent memory |
//! | `memory` | registrations, shared where one covers the other |
//! | `connections` | connection numbers, and peers that have connected |
//! | `nearby` | endpoints of this user on this host, found without their metadata |
//! | `pending` | transfers in flight, by number |

mod arguments;
mod connections;
mod descriptor;
mod endpoint;
mod local;
mod memory;
mod metadata;
mod nearby;
mod onesided;
mod pending;
mod registration;
mod twosided;

use pyo3::prelude::*;

pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<endpoint::Endpoint>()?;
    module.add_class::<descriptor::XferDesc>()?;
    module.add_class::<descriptor::XferHandle>()?;
    module.add_function(wrap_pyfunction!(metadata::get_oob_ip, module)?)
}
