//! Registered memory, and descriptors of peers' memory.

use std::hash::{DefaultHasher, Hash, Hasher};

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyType};

use crate::arguments::{self, Bytes};
use crate::errors::exception;
use crate::owned::Owned;

/// Memory registered by a session. The registration ends with this object, which keeps the memory
/// alive until then.
#[pyclass(frozen, module = "tcpx")]
pub(crate) struct Region {
    // Dropped in this order: the registration ends before the memory can be freed.
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

    /// The size in bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.region.facts().len()
    }

    /// The kind of memory: "host" or "cuda:0".
    #[getter]
    fn memory(&self) -> String {
        self.region.facts().kind().to_string()
    }

    /// The descriptor that a peer needs to read and write this region, for its `RemoteRegion`.
    #[getter]
    fn descriptor<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.region.facts().descriptor().to_bytes())
    }

    /// Ends the registration now. When this returns the memory is no longer accessed; transfers
    /// that use it fail.
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

/// A peer's region: address, length and the key that grants access. Equal descriptors make equal
/// objects, which can be hashed and pickled; a pickle grants access, as the descriptor does.
#[pyclass(frozen, module = "tcpx")]
pub(crate) struct RemoteRegion {
    pub(super) region: tcpx::RemoteRegion,
}

#[pymethods]
impl RemoteRegion {
    #[new]
    fn new(
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::descriptor)] descriptor: Bytes<'_>,
    ) -> PyResult<Self> {
        let region =
            tcpx::RemoteRegion::from_bytes(&descriptor).map_err(|error| exception(py, &error))?;
        Ok(Self { region })
    }

    /// The address of the first byte, in its owner's address space.
    #[getter]
    fn address(&self) -> u64 {
        self.region.address()
    }

    /// The size in bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.region.len()
    }

    /// The kind of memory at its owner: "host" or "cuda:0".
    #[getter]
    fn memory(&self) -> String {
        self.region.kind().to_string()
    }

    /// The descriptor that it was made from.
    #[getter]
    fn descriptor<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.region.to_bytes())
    }

    fn __eq__(&self, other: &Self) -> bool {
        self.region.to_bytes() == other.region.to_bytes()
    }

    fn __hash__(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.region.to_bytes().hash(&mut hasher);
        hasher.finish()
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> (Bound<'py, PyType>, (Bound<'py, PyBytes>,)) {
        (slf.get_type(), (slf.get().descriptor(slf.py()),))
    }

    fn __repr__(&self) -> String {
        format!(
            "<tcpx.RemoteRegion of {} bytes at {:#x}>",
            self.nbytes(),
            self.address()
        )
    }
}
