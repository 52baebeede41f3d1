//! Peers.

use pyo3::prelude::*;

use crate::arguments;
use crate::blocking;
use crate::owned::Owned;

/// A remote session, or the session itself.
#[pyclass(frozen, module = "tcpx")]
pub(crate) struct Peer {
    pub(super) peer: Owned<tcpx::Peer>,
}

impl Peer {
    pub(super) fn new(peer: tcpx::Peer) -> Self {
        Self {
            peer: Owned::new(peer),
        }
    }
}

#[pymethods]
impl Peer {
    /// The peer's name.
    #[getter]
    fn name(&self) -> &str {
        self.peer.facts().name()
    }

    /// Whether the peer is connected now.
    #[getter]
    fn connected(&self) -> PyResult<bool> {
        Ok(self.peer.get()?.is_connected())
    }

    /// Connects now instead of with the first transfer.
    #[pyo3(signature = (timeout=None))]
    fn connect(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::timeout)] timeout: Option<f64>,
    ) -> PyResult<()> {
        let timeout = blocking::seconds(timeout)?;
        let peer = self.peer.get()?;
        blocking::wait(py, timeout, |slice| peer.connect(slice))
            .map_err(|ended| ended.into_exception(py))
    }

    /// Ends all connections; transfers fail. A later transfer reconnects.
    fn disconnect(&self, py: Python<'_>) -> PyResult<()> {
        let peer = self.peer.get()?;
        py.detach(|| peer.disconnect());
        Ok(())
    }

    /// The lanes of the current connection; empty without a connection.
    #[getter]
    fn lanes(&self) -> PyResult<Vec<Lane>> {
        let lanes = self.peer.get()?.lanes().into_iter().map(|lane| Lane {
            local: lane.local.to_string(),
            remote: lane.remote.to_string(),
            bytes_sent: lane.bytes_sent,
            bytes_received: lane.bytes_received,
        });
        Ok(lanes.collect())
    }

    /// Whether memory of a peer on this host is copied directly, and otherwise why not; None
    /// without a connection.
    #[getter]
    fn same_host(&self) -> PyResult<Option<SameHost>> {
        let info = self.peer.get()?.same_host();
        Ok(info.map(|info| SameHost {
            why_not: info.why_not,
            bytes: info.bytes,
        }))
    }

    fn __repr__(&self) -> String {
        let state = if self.peer.facts().is_connected() {
            ""
        } else {
            "not "
        };
        format!("<tcpx.Peer {:?} {state}connected>", self.name())
    }
}

/// One TCP stream to a peer.
#[pyclass(frozen, get_all, module = "tcpx")]
pub(crate) struct Lane {
    /// This end's address and port.
    local: String,
    /// The peer's address and port.
    remote: String,
    /// Bytes sent on this lane, framing included.
    bytes_sent: u64,
    /// Bytes received on this lane, framing included.
    bytes_received: u64,
}

#[pymethods]
impl Lane {
    fn __repr__(&self) -> String {
        format!("<tcpx.Lane {} -> {}>", self.local, self.remote)
    }
}

/// The path to a peer on the same host.
#[pyclass(frozen, get_all, module = "tcpx")]
pub(crate) struct SameHost {
    /// The reason lanes carry everything; None if memory is copied directly.
    why_not: Option<String>,
    /// Bytes that this session has copied directly, in both directions, over the current
    /// connection.
    bytes: u64,
}

#[pymethods]
impl SameHost {
    fn __repr__(&self) -> String {
        match &self.why_not {
            None => format!("<tcpx.SameHost {} bytes copied>", self.bytes),
            Some(why_not) => format!("<tcpx.SameHost not used: {why_not}>"),
        }
    }
}
