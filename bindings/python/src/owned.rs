//! Values that only the process that made them may end.

use std::mem::ManuallyDrop;
use std::ops::Deref;

use pyo3::Python;

/// A value of the engine held by a Python object.
///
/// A forked child inherits the object but none of the engine's threads, and locks in whatever state they were in:
/// ending the value there could wait for ever, so the child leaves it as it is.
pub(crate) struct Owned<T: Send> {
    value: ManuallyDrop<T>,
    process: u32,
    waits: bool,
}

impl<T: Send> Owned<T> {
    pub(crate) fn new(value: T) -> Self {
        Self {
            value: ManuallyDrop::new(value),
            process: std::process::id(),
            waits: false,
        }
    }

    /// A value whose end waits, as that of a session does for its peers: other threads of Python go on meanwhile.
    pub(crate) fn waiting(value: T) -> Self {
        let mut owned = Self::new(value);
        owned.waits = true;
        owned
    }
}

impl<T: Send> Deref for Owned<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T: Send> Drop for Owned<T> {
    fn drop(&mut self) {
        if self.process != std::process::id() {
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
