//! Registered memory, and descriptors of peers' memory.

use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::errors::exception;
use crate::owned::Owned;

/// Memory that a session has registered. The registration ends with this object; the memory is kept
/// alive until then.
#[pyclass(frozen, module = "tcpx")]
pub(crate) struct Region {
    // Dropped in this order: the registration ends before the memory can go.
    pub(super) region: Owned<tcpx::Region>,
    _owner: Py<PyAny>,
}

impl Region {
    pub(super) fn new(region: tcpx::Region, owner: Py<PyAny>) -> Self {
        Self {
            region: Owned::waiting(region),
            _owner: owner,
        }
    }
}

#[pymethods]
impl Region {
    /// The registration's number within its session.
    #[getter]
    fn id(&self) -> u64 {
        self.region.facts().id().0
    }

    /// The address of the first byte.
    #[getter]
    fn address(&self) -> usize {
        self.region.facts().address()
    }

    /// Bytes in the region.
    #[getter]
    fn nbytes(&self) -> usize {
        self.region.facts().len()
    }

    /// What kind of memory it is: "host" or "cuda:0".
    #[getter]
    fn memory(&self) -> String {
        self.region.facts().kind().to_string()
    }

    /// What a peer needs to read and write this region, for `RemoteRegion` over there.
    #[getter]
    fn descriptor<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.region.facts().descriptor().to_bytes())
    }

    /// Ends the registration now. When this returns the memory is no longer touched; transfers that were using
    /// it fail.
    fn deregister(&self, py: Python<'_>) -> PyResult<()> {
        let region = self.region.get()?;
        py.detach(|| region.deregister())
            .map_err(|error| exception(py, &error))
    }

    fn __repr__(&self) -> String {
        format!(
            "<tcpx.Region {} of {} bytes at {:#x}>",
            self.id(),
            self.nbytes(),
            self.address()
        )
    }
}

/// A peer's region: address, length and the key that grants access.
#[pyclass(frozen, module = "tcpx")]
pub(crate) struct RemoteRegion {
    pub(super) region: tcpx::RemoteRegion,
}

#[pymethods]
impl RemoteRegion {
    #[new]
    fn new(py: Python<'_>, descriptor: &[u8]) -> PyResult<Self> {
        let region =
            tcpx::RemoteRegion::from_bytes(descriptor).map_err(|error| exception(py, &error))?;
        Ok(Self { region })
    }

    /// The address of the first byte, in its owner's address space.
    #[getter]
    fn address(&self) -> u64 {
        self.region.address()
    }

    /// Bytes in the region.
    #[getter]
    fn nbytes(&self) -> usize {
        self.region.len()
    }

    /// What kind of memory it is at its owner: "host" or "cuda:0".
    #[getter]
    fn memory(&self) -> String {
        self.region.kind().to_string()
    }

    /// The descriptor that it was made from.
    #[getter]
    fn descriptor<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.region.to_bytes())
    }

    fn __repr__(&self) -> String {
        format!(
            "<tcpx.RemoteRegion of {} bytes at {:#x}>",
            self.nbytes(),
            self.address()
        )
    }
}
