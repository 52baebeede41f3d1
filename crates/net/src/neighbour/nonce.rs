//! Random bytes by which a process proves that its memory is the one being read.

use std::io;

/// Length of a [`Nonce`] in bytes.
pub const NONCE_BYTES: usize = 32;

/// Random bytes at an address that stays the same while the value lives.
///
/// A process tells the other one the address and compares the bytes that come back: only a process
/// that can read its memory knows them. Once they are confirmed over an authenticated connection,
/// the other process knows that [`super::Neighbour::read_nonce`] reads the memory of the process
/// that it talks to.
#[derive(Debug)]
pub struct Nonce {
    bytes: Box<[u8; NONCE_BYTES]>,
}

impl Nonce {
    /// Creates new random bytes.
    ///
    /// # Errors
    /// The system has no source of randomness.
    pub fn new() -> io::Result<Self> {
        let mut bytes = Box::new([0; NONCE_BYTES]);
        getrandom::fill(&mut *bytes).map_err(io::Error::other)?;
        Ok(Self { bytes })
    }

    /// Returns the address of the bytes in this process.
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
