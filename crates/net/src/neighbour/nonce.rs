//! Random bytes by which a process shows that its memory is the one that is reached.

use std::io;

/// Bytes of a [`Nonce`].
pub const NONCE_BYTES: usize = 32;

/// Random bytes at an address that stays the same while the value lives.
///
/// A process tells the other one the address and compares what comes back: only who can read its
/// memory knows the bytes. The other process learns that the memory that it reads by
/// [`super::Neighbour::read_nonce`] is that of the process that it talks to, once the bytes are
/// confirmed over an authenticated connection.
#[derive(Debug)]
pub struct Nonce {
    bytes: Box<[u8; NONCE_BYTES]>,
}

impl Nonce {
    /// Makes new random bytes.
    ///
    /// # Errors
    /// The system has no source of randomness.
    pub fn new() -> io::Result<Self> {
        let mut bytes = Box::new([0; NONCE_BYTES]);
        getrandom::fill(&mut *bytes).map_err(io::Error::other)?;
        Ok(Self { bytes })
    }

    /// Returns where the bytes are in the memory of this process.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.bytes.as_ptr().expose_provenance() as u64
    }

    /// Returns the bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8; NONCE_BYTES] {
        &self.bytes
    }
}
