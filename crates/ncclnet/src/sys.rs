//! The C tables: one file per API version, all converted into one set of calls.
//!
//! Each `vN` declares that version's function table and properties exactly as C lays them out, and
//! names the signature of every member in that version. [`calls`] handles the differences between
//! signatures; nothing above this module depends on versions.
//!
//! | version | what it changed |
//! |---|---|
//! | [`v4`] | the oldest: 64-byte handles, no tags, one buffer per receive, connect and accept may block |
//! | [`v5`] | tags, arrays of receives, 128-byte handles, connect and accept must not block |
//! | [`v6`] | registration of dma-bufs |
//! | [`v7`] | device handles, `irecvConsumed` |
//! | [`v8`] | registrations of 2 GiB and more |
//! | [`v9`] | messages of 2 GiB and more, virtual devices |
//! | [`v10`] | a profiler, a configuration per connect |
//! | [`v11`] | contexts: `init` per user, `finalize` |
//! | [`v12`] | more of the properties |

pub(crate) mod calls;
pub(crate) mod common;
mod v10;
mod v11;
mod v12;
mod v4;
mod v5;
mod v6;
mod v7;
mod v8;
mod v9;

#[cfg(test)]
mod layout;

use std::ffi::{CStr, c_char, c_void};

use calls::{Calls, Init};
use common::{MissingMember, PropertyBuffer, RawProperties};

/// The description of one API version.
#[derive(Debug)]
pub(crate) struct Abi {
    /// The version's number.
    pub(crate) version: u32,
    /// The exported symbol, which is the table itself.
    pub(crate) symbol: &'static CStr,
    /// Number of bytes of a connection handle that the plugin uses.
    pub(crate) handle_bytes: usize,
    /// Minimum requests that a comm of this version must be able to hold.
    pub(crate) slots: usize,
    /// The largest registration `regMr` takes.
    pub(crate) max_registration: usize,
    /// The largest message `isend` takes, whatever the plugin reports.
    pub(crate) max_message: usize,
    /// Reads the members that are valid before `init`: the signature of `init` and its address.
    pub(crate) init: unsafe fn(*const c_void) -> Option<Init>,
    /// Reads all other members, after `init`.
    pub(crate) calls: unsafe fn(*const c_void) -> Result<Calls, MissingMember>,
    /// Converts the output of `getProperties`.
    pub(crate) properties: fn(&PropertyBuffer) -> RawProperties,
}

impl Abi {
    /// Returns whether `init` creates a context per user that `finalize` ends (version 11 on),
    /// instead of initialising the library once for all.
    pub(crate) fn has_contexts(&self) -> bool {
        self.version >= 11
    }
}

/// Every supported version, newest first.
pub(crate) static ABIS: [&Abi; 9] = [
    &v12::ABI,
    &v11::ABI,
    &v10::ABI,
    &v9::ABI,
    &v8::ABI,
    &v7::ABI,
    &v6::ABI,
    &v5::ABI,
    &v4::ABI,
];

/// Returns the plugin's name: the first member of every table.
///
/// # Safety
///
/// `table` points to a plugin's table.
pub(crate) unsafe fn name(table: *const c_void) -> Option<String> {
    // SAFETY: `name` is the first member in every version.
    let name = unsafe { table.cast::<*const c_char>().read() };
    if name.is_null() {
        return None;
    }
    // SAFETY: the contract makes it a C string that lives as long as the library.
    Some(
        unsafe { CStr::from_ptr(name) }
            .to_string_lossy()
            .into_owned(),
    )
}
