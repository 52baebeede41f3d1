//! Values that only the process that created them may use and drop.

use std::mem::ManuallyDrop;

use pyo3::{PyResult, Python};
use tcpx::InProcess;

use crate::errors::exception;

/// A value of the engine held by a Python object.
///
/// A forked child inherits the object but none of the engine's threads, and locks in any state:
/// using or dropping the value there could block for ever. The child's calls raise, and it does not
/// touch the value.
pub(crate) struct Owned<T: Send> {
    value: ManuallyDrop<InProcess<T>>,
    waits: bool,
}

impl<T: Send> Owned<T> {
    pub(crate) fn new(value: T) -> Self {
        Self {
            value: ManuallyDrop::new(InProcess::new(value)),
            waits: false,
        }
    }

    /// Creates a value whose drop blocks, as a session's does for its peers: other Python threads
    /// run meanwhile.
    pub(crate) fn waiting(value: T) -> Self {
        let mut owned = Self::new(value);
        owned.waits = true;
        owned
    }

    /// Returns the value, for calls that may block or take a lock. Raises `ForkedError` in another
    /// process.
    pub(crate) fn get(&self) -> PyResult<&T> {
        match self.value.check() {
            Ok(()) => Ok(&self.value),
            Err(forked) => Err(Python::attach(|py| exception(py, &forked.into()))),
        }
    }

    /// Returns the value, for constant properties, in any process.
    pub(crate) fn facts(&self) -> &T {
        &self.value
    }
}

impl<T: Send> Drop for Owned<T> {
    fn drop(&mut self) {
        // Nothing is dropped in another process, so no lock has to be released.
        if !self.value.is_current() {
            return;
        }
        // SAFETY: the value is taken once, here, and not used afterwards.
        let mut value = Some(unsafe { ManuallyDrop::take(&mut self.value) });
        if self.waits {
            Python::try_attach(|py| py.detach(|| drop(value.take())));
        }
        // Dropped here if no interpreter is left to attach to.
        drop(value);
    }
}
