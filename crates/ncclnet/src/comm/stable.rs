//! Memory whose address foreign code may remember.

use std::ptr::NonNull;

/// A value at a fixed address, accessed by raw pointer only: plugins keep pointers into it between
/// calls, which neither a `Box` nor a reference permits.
#[derive(Debug)]
pub(super) struct Stable<T>(NonNull<T>);

impl<T> Stable<T> {
    pub(super) fn new(value: T) -> Self {
        // A box is never NULL.
        Self(NonNull::from(Box::leak(Box::new(value))))
    }

    pub(super) fn as_ptr(&self) -> *mut T {
        self.0.as_ptr()
    }

    /// Leaks the allocation.
    pub(super) fn leave(self) {
        std::mem::forget(self);
    }
}

impl<T> Drop for Stable<T> {
    fn drop(&mut self) {
        // SAFETY: it came from a box that only this value owns; code that passes its address to a
        // plugin drops it only when the plugin no longer uses it.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}
