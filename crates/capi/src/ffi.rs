//! Converts pointers from C into references, and stops panics. No other module does.
//!
//! Use the macros only with arguments of an `extern "C"` function of this crate: the contract in
//! the crate's documentation makes the conversions sound.

use std::ffi::{CStr, c_char};
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;

use tcpx::Process;

use crate::status::{Failure, tcpx_status};

/// A type whose values C holds as pointers, made by [`Out::give`] and ended by [`take!`].
pub(crate) trait Boxed: Send + Sync {
    /// Whether a handle is usable only in the process that made it. A forked child inherits its
    /// parent's handles but none of its threads, and locks in any state: there [`borrow!`] refuses
    /// handles, and [`take!`] leaves them alone (C++ destructors free at exit).
    const BELONGS_TO_PROCESS: bool = true;
}

/// The target of a handle: the value, and its process.
#[repr(C)]
struct Held<T> {
    /// First, so that a pointer to the value is a pointer to this struct.
    value: T,
    process: Process,
}

impl<T: Boxed> Held<T> {
    fn check(&self) -> Result<(), Failure> {
        if T::BELONGS_TO_PROCESS {
            self.process.check().map_err(tcpx::Error::from)?;
        }
        Ok(())
    }
}

/// Runs the body of a call from C. Turns errors and panics into a status and the thread's last
/// error.
pub(crate) fn call(f: impl FnOnce() -> Result<(), Failure>) -> tcpx_status {
    match caught(f) {
        Ok(()) => tcpx_status::TCPX_OK,
        Err(failure) => failure.remember(),
    }
}

/// Does what [`call`] does, for functions that return a value, with a `fallback` for failures.
pub(crate) fn call_or<T>(fallback: T, f: impl FnOnce() -> Result<T, Failure>) -> T {
    caught(f).unwrap_or_else(|failure| {
        failure.remember();
        fallback
    })
}

/// Drops a value that C returned.
pub(crate) fn end<T>(given_back: Option<T>) {
    call_or((), || {
        drop(given_back);
        Ok(())
    });
}

fn caught<T>(f: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    // Unwind safe: shared state of the engine is behind its own locks, and what was borrowed from C
    // is not used again.
    catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(|panic| Err(Failure::of_panic(&*panic)))
}

/// A place that C provided for a result.
pub(crate) struct Out<T>(NonNull<T>);

impl<T> Out<T> {
    pub(crate) fn write(self, value: T) {
        // SAFETY: `out!` checked that it is not NULL; the caller provided it for writing, and
        // nothing else accesses it before the call returns.
        unsafe { self.0.write(value) }
    }
}

impl<T: Boxed> Out<*mut T> {
    /// Passes ownership of a new object to C.
    pub(crate) fn give(self, value: T) {
        let process = Process::current();
        self.write(Box::into_raw(Box::new(Held { value, process })).cast());
    }
}

/// # Safety
/// `pointer` is NULL or valid for writing for the duration of the call.
pub(crate) unsafe fn out_from<T>(pointer: *mut T, name: &'static str) -> Result<Out<T>, Failure> {
    NonNull::new(pointer).map(Out).ok_or(Failure::Null(name))
}

/// # Safety
/// `pointer` is NULL or came from [`Out::give`], and its value lives, unchanged, for the duration
/// of the call.
pub(crate) unsafe fn ref_from<'a, T: Boxed>(
    pointer: *const T,
    name: &'static str,
) -> Result<&'a T, Failure> {
    // SAFETY: guaranteed by the caller; a `Held` begins with its value.
    let held = unsafe { pointer.cast::<Held<T>>().as_ref() }.ok_or(Failure::Null(name))?;
    held.check()?;
    Ok(&held.value)
}

/// # Safety
/// As [`ref_from`], and nothing else uses the `T` for the duration of the call.
pub(crate) unsafe fn mut_from<'a, T>(
    pointer: *mut T,
    name: &'static str,
) -> Result<&'a mut T, Failure> {
    // SAFETY: guaranteed by the caller.
    unsafe { pointer.as_mut() }.ok_or(Failure::Null(name))
}

/// # Safety
/// `pointer` is NULL or the start of `len` values that live, unchanged, for the duration of the
/// call.
pub(crate) unsafe fn slice_from<'a, T>(
    pointer: *const T,
    len: usize,
    name: &'static str,
) -> Result<&'a [T], Failure> {
    match (pointer.is_null(), len) {
        (_, 0) => Ok(&[]),
        (true, _) => Err(Failure::Null(name)),
        // SAFETY: guaranteed by the caller.
        (false, _) => Ok(unsafe { std::slice::from_raw_parts(pointer, len) }),
    }
}

/// # Safety
/// `pointer` is NULL or the start of a place for `len` values, which nothing else uses for the
/// duration of the call.
pub(crate) unsafe fn slice_mut_from<'a, T>(
    pointer: *mut T,
    len: usize,
    name: &'static str,
) -> Result<&'a mut [MaybeUninit<T>], Failure> {
    match (pointer.is_null(), len) {
        (_, 0) => Ok(&mut []),
        (true, _) => Err(Failure::Null(name)),
        // SAFETY: guaranteed by the caller.
        (false, _) => Ok(unsafe { std::slice::from_raw_parts_mut(pointer.cast(), len) }),
    }
}

/// # Safety
/// `pointer` is NULL or a text that ends with NUL and lives, unchanged, for the duration of the
/// call.
pub(crate) unsafe fn text_from<'a>(
    pointer: *const c_char,
    name: &'static str,
) -> Result<&'a str, Failure> {
    if pointer.is_null() {
        return Err(Failure::Null(name));
    }
    // SAFETY: guaranteed by the caller.
    let text = unsafe { CStr::from_ptr(pointer) };
    text.to_str().map_err(|_| Failure::NotText(name))
}

/// # Safety
/// `pointer` is NULL or came from [`Out::give`] and was not taken before.
pub(crate) unsafe fn value_from<T: Boxed>(pointer: *mut T) -> Option<T> {
    let held = NonNull::new(pointer)?.cast::<Held<T>>();
    // SAFETY: guaranteed by the caller; a `Held` begins with its value.
    unsafe { held.as_ref() }.check().ok()?;
    // SAFETY: guaranteed by the caller; C returns ownership with this call.
    Some(unsafe { Box::from_raw(held.as_ptr()) }.value)
}

/// # Safety
/// `pointer` is NULL, or it and `len` came from a leaked boxed slice that was not taken before.
pub(crate) unsafe fn box_slice_from<T>(pointer: *mut T, len: usize) -> Option<Box<[T]>> {
    let slice = NonNull::slice_from_raw_parts(NonNull::new(pointer)?, len);
    // SAFETY: guaranteed by the caller; C returns ownership with this call.
    Some(unsafe { Box::from_raw(slice.as_ptr()) })
}

/// Converts an argument into a reference; NULL is an error that names it.
macro_rules! borrow {
    ($pointer:ident) => {
        // SAFETY: an argument of a function that C calls: NULL or valid for the call.
        unsafe { $crate::ffi::ref_from($pointer, stringify!($pointer)) }
    };
}

/// Converts an argument into a mutable reference.
macro_rules! borrow_mut {
    ($pointer:ident) => {
        // SAFETY: an argument of a function that C calls: NULL, or valid and used by nothing else
        // for the call.
        unsafe { $crate::ffi::mut_from($pointer, stringify!($pointer)) }
    };
}

/// Converts a pointer and a length into a slice.
macro_rules! slice {
    ($pointer:ident, $len:ident) => {
        // SAFETY: arguments of a function that C calls: NULL or the start of that many values.
        unsafe { $crate::ffi::slice_from($pointer.cast(), $len, stringify!($pointer)) }
    };
}

/// Converts a pointer and a length into a slice to be filled.
macro_rules! slice_mut {
    ($pointer:ident, $len:ident) => {
        // SAFETY: arguments of a function that C calls: NULL or the start of that many values, used
        // by nothing else for the call.
        unsafe { $crate::ffi::slice_mut_from($pointer, $len, stringify!($pointer)) }
    };
}

/// Converts an argument into a text.
macro_rules! text {
    ($pointer:ident) => {
        // SAFETY: an argument of a function that C calls: NULL or a text that ends with NUL.
        unsafe { $crate::ffi::text_from($pointer, stringify!($pointer)) }
    };
}

/// Converts an argument into a place for a result.
macro_rules! out {
    ($pointer:ident) => {
        // SAFETY: an argument of a function that C calls: NULL or a place for the result.
        unsafe { $crate::ffi::out_from($pointer, stringify!($pointer)) }
    };
}

/// Takes a handle back from C.
macro_rules! take {
    ($pointer:ident) => {
        // SAFETY: the argument of a free function: NULL or a handle that C returns now.
        unsafe { $crate::ffi::value_from($pointer) }
    };
}

pub(crate) use {borrow, borrow_mut, out, slice, slice_mut, take, text};

#[cfg(test)]
mod tests {
    use super::*;
    use std::ptr::{null, null_mut};

    #[test]
    fn null_is_no_place_for_a_result() {
        // SAFETY: NULL is allowed.
        let result = unsafe { out_from::<u32>(null_mut(), "result") };
        assert!(matches!(result, Err(Failure::Null("result"))));
        // SAFETY: as above.
        let result = unsafe { mut_from::<u32>(null_mut(), "result") };
        assert!(matches!(result, Err(Failure::Null("result"))));
    }

    #[test]
    fn null_is_a_slice_of_nothing_only() {
        // SAFETY: NULL is allowed.
        let slice = |len| unsafe { slice_from::<u8>(null(), len, "bytes") };
        assert!(matches!(slice(0), Ok([])));
        assert!(matches!(slice(1), Err(Failure::Null("bytes"))));
        // SAFETY: as above.
        let slice = |len| unsafe { slice_mut_from::<u8>(null_mut(), len, "bytes") };
        assert!(matches!(slice(0), Ok([])));
        assert!(matches!(slice(1), Err(Failure::Null("bytes"))));
    }

    #[test]
    fn a_text_is_there_and_is_utf8() {
        // SAFETY: literals end with NUL, and NULL is allowed.
        let text = |pointer| unsafe { text_from(pointer, "name") };
        assert!(matches!(text(c"caf\u{e9}".as_ptr()), Ok("caf\u{e9}")));
        assert!(matches!(
            text(c"caf\xe9".as_ptr()),
            Err(Failure::NotText("name"))
        ));
        assert!(matches!(text(null()), Err(Failure::Null("name"))));
    }

    #[test]
    fn a_panic_does_not_reach_c() {
        struct Clumsy;
        impl Drop for Clumsy {
            fn drop(&mut self) {
                panic!("while it was freed");
            }
        }
        let internal = tcpx_status::TCPX_ERROR_INTERNAL;
        assert_eq!(call(|| panic!("in a call")), internal);
        assert_eq!(call_or(7, || panic!("in a call")), 7);
        end(Some(Clumsy));
    }
}
