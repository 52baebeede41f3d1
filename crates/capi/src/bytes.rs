//! Byte strings handed to C.

use crate::ffi;

/// Bytes that the library made; whoever received them ends them with `tcpx_bytes_free`.
#[repr(C)]
#[derive(Debug)]
pub struct tcpx_bytes {
    /// The first byte.
    pub data: *mut u8,
    /// How many there are.
    pub len: usize,
}

impl From<Vec<u8>> for tcpx_bytes {
    fn from(bytes: Vec<u8>) -> Self {
        let bytes = Box::leak(bytes.into_boxed_slice());
        Self {
            data: bytes.as_mut_ptr(),
            len: bytes.len(),
        }
    }
}

/// Frees bytes that the library made. Zeroed ones are ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_bytes_free(bytes: tcpx_bytes) {
    // SAFETY: the argument of a function that frees: zeroed, or made by `From<Vec<u8>>` above and given back
    // now.
    ffi::end(unsafe { ffi::box_slice_from(bytes.data, bytes.len) });
}
