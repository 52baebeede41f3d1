//! Byte strings returned to C.

use crate::ffi;

/// Bytes allocated by the library; the caller frees them with `tcpx_bytes_free`.
#[repr(C)]
#[derive(Debug)]
pub struct tcpx_bytes {
    /// Pointer to the first byte.
    pub data: *mut u8,
    /// Number of bytes.
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

/// Frees bytes allocated by the library. Ignores a zeroed struct.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_bytes_free(bytes: tcpx_bytes) {
    // SAFETY: the argument of a free function: zeroed, or made by `From<Vec<u8>>` above and
    // returned now.
    ffi::end(unsafe { ffi::box_slice_from(bytes.data, bytes.len) });
}
