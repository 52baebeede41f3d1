//! Memory that foreign code may remember the address of.

use std::ptr::NonNull;

/// A value at an address that never changes, reached by raw pointer only: plugins keep pointers into it
/// between calls, which neither a `Box` nor a reference allows for.
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

    /// Leaves it allocated for good.
    pub(super) fn leave(self) {
        std::mem::forget(self);
    }
}

impl<T> Drop for Stable<T> {
    fn drop(&mut self) {
        // SAFETY: it came from a box and is owned by this value alone; whoever lent its address to a
        // plugin drops it only when the plugin is done with it.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}
