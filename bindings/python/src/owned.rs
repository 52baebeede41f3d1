//! Values that only the process that made them may use and end.

use std::mem::ManuallyDrop;

use pyo3::{PyResult, Python};
use tcpx::InProcess;

use crate::errors::exception;

/// A value of the engine held by a Python object.
///
/// A forked child inherits the object but none of the engine's threads, and locks in whatever state
/// they were in: using or ending the value there could wait for ever. The child's calls raise, and
/// it leaves the value as it is.
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

    /// A value whose end waits, as that of a session does for its peers: other threads of Python go on meanwhile.
    pub(crate) fn waiting(value: T) -> Self {
        let mut owned = Self::new(value);
        owned.waits = true;
        owned
    }

    /// The value, for whatever may wait or take a lock. Raises `ForkedError` in another process.
    pub(crate) fn get(&self) -> PyResult<&T> {
        match self.value.check() {
            Ok(()) => Ok(&self.value),
            Err(forked) => Err(Python::attach(|py| exception(py, &forked.into()))),
        }
    }

    /// The value, for what never changes, in any process.
    pub(crate) fn facts(&self) -> &T {
        &self.value
    }
}

impl<T: Send> Drop for Owned<T> {
    fn drop(&mut self) {
        // Nothing would be dropped there, and nobody needs to be let go on.
        if !self.value.is_current() {
            return;
        }
        // SAFETY: taken once, here, and not used afterwards.
        let mut value = Some(unsafe { ManuallyDrop::take(&mut self.value) });
        if self.waits {
            Python::try_attach(|py| py.detach(|| drop(value.take())));
        }
        // Also where no interpreter is left to be attached to.
        drop(value);
    }
}
