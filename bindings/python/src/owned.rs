//! Values that only the process that made them may end.

use std::mem::ManuallyDrop;
use std::ops::Deref;

use pyo3::Python;

/// A value of the engine held by a Python object.
///
/// A forked child inherits the object but none of the engine's threads, and locks in whatever state they were in:
/// ending the value there could wait for ever, so the child leaves it as it is.
///
/// Ending a session waits for its peers, ending a region for transfers: other threads of Python go on meanwhile.
pub(crate) struct Owned<T: Send> {
    value: ManuallyDrop<T>,
    process: u32,
}

impl<T: Send> Owned<T> {
    pub(crate) fn new(value: T) -> Self {
        Self {
            value: ManuallyDrop::new(value),
            process: std::process::id(),
        }
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
        Python::try_attach(|py| py.detach(|| drop(value.take())));
        // An interpreter that is shutting down attaches nobody.
        drop(value);
    }
}
