//! The address of a listener.

use std::fmt;

use crate::error::Error;

/// The address of a [`Listener`](crate::Listener): bytes that only the plugin understands. Carry
/// them to the peer unchanged; the peer must use the same plugin.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Handle {
    bytes: [u8; Handle::MAX_BYTES],
    length: usize,
}

impl Handle {
    /// Maximum length of a handle: 64 bytes in API version 4, 128 later.
    pub const MAX_BYTES: usize = 128;

    /// Creates a handle from bytes of a peer.
    ///
    /// # Errors
    ///
    /// [`Error::HandleLength`] if there are no or too many bytes.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, Error> {
        let length = bytes.len();
        if length == 0 || length > Self::MAX_BYTES {
            return Err(Error::HandleLength { length });
        }
        let mut handle = Self {
            bytes: [0; Self::MAX_BYTES],
            length,
        };
        handle.bytes[..length].copy_from_slice(bytes);
        Ok(handle)
    }

    /// Returns the bytes to carry to the peer.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }

    pub(super) fn from_buffer(buffer: &HandleBuffer, length: usize) -> Self {
        Self {
            bytes: buffer.0,
            length,
        }
    }

    pub(super) fn to_buffer(self) -> HandleBuffer {
        HandleBuffer(self.bytes)
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Handle({} bytes)", self.length)
    }
}

/// A handle in the form that plugins take. They keep pointers and the progress of a connect in it,
/// so it is aligned and never moves while in use.
#[derive(Debug)]
#[repr(C, align(16))]
pub(super) struct HandleBuffer(pub(super) [u8; Handle::MAX_BYTES]);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_round_trip_and_lengths_are_checked() {
        let bytes: Vec<u8> = (0..128).collect();
        for length in [1, 64, 128] {
            let handle = Handle::from_bytes(&bytes[..length]).unwrap();
            assert_eq!(handle.as_bytes(), &bytes[..length]);
            assert!(handle.to_buffer().0[length..].iter().all(|b| *b == 0));
        }
        for length in [0, 129] {
            let error = Handle::from_bytes(&vec![1; length]).unwrap_err();
            assert_eq!(error, Error::HandleLength { length });
        }
    }
}
