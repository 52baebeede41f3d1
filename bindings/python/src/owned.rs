//! Values that only the process that made them may end.

use std::mem::ManuallyDrop;
use std::ops::Deref;

/// A value of the engine held by a Python object.
///
/// A forked child inherits the object but none of the engine's threads, and locks in whatever state they were in:
/// ending the value there could wait for ever, so the child leaves it as it is.
pub(crate) struct Owned<T> {
    value: ManuallyDrop<T>,
    process: u32,
}

impl<T> Owned<T> {
    pub(crate) fn new(value: T) -> Self {
        Self {
            value: ManuallyDrop::new(value),
            process: std::process::id(),
        }
    }
}

impl<T> Deref for Owned<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> Drop for Owned<T> {
    fn drop(&mut self) {
        if self.process == std::process::id() {
            // SAFETY: dropped once, here, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
    }
}
