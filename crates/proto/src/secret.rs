//! Values that authorise: their bytes are compared in constant time and never printed.

use core::fmt;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

/// Computes and verifies tags.
pub(crate) type Tagger = Hmac<Sha256>;

/// The secret that a session's peers must know to connect: 256 random bits, chosen at session
/// start.
///
/// The secret travels only inside [`ConnectionInfo`](crate::info::ConnectionInfo); the handshake
/// proves knowledge of it and never sends it. Comparison takes constant time, and `Debug` prints
/// none of it.
#[derive(Clone)]
pub struct Secret([u8; Self::LEN]);

impl Secret {
    /// Size in bytes.
    pub const LEN: usize = 32;

    /// Wraps 32 bytes, which must come from the system's secure random source.
    #[inline]
    pub const fn new(bytes: [u8; Self::LEN]) -> Self {
        Self(bytes)
    }

    /// Returns the bytes themselves, for encoding.
    pub(crate) const fn expose(&self) -> &[u8; Self::LEN] {
        &self.0
    }

    /// Begins a tag for one purpose, named by the label: tags for different purposes never match.
    pub(crate) fn tagger(&self, label: &[u8]) -> Tagger {
        // HMAC pads a short key with zeros to the hash's block; padded here, creating the MAC
        // cannot fail.
        let mut key = [0; 64];
        key[..Self::LEN].copy_from_slice(&self.0);
        let mut mac = Tagger::new(&key.into());
        mac.update(label);
        mac
    }
}

impl PartialEq for Secret {
    fn eq(&self, other: &Self) -> bool {
        constant_time_eq(&self.0, &other.0)
    }
}

impl Eq for Secret {}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// Compares without stopping at the first difference, so that timing does not reveal its position.
pub(crate) fn constant_time_eq<const N: usize>(a: &[u8; N], b: &[u8; N]) -> bool {
    let difference = a.iter().zip(b).fold(0, |seen, (x, y)| seen | (x ^ y));
    // The optimiser must not learn that only zero matters and turn the fold into an early exit.
    core::hint::black_box(difference) == 0
}

#[cfg(test)]
mod tests {
    use alloc::format;

    use super::*;

    #[test]
    fn debug_shows_nothing() {
        assert_eq!(format!("{:?}", Secret::new([0xab; 32])), "Secret(..)");
    }

    #[test]
    fn every_byte_counts_in_a_comparison() {
        let secret = Secret::new([7; 32]);
        assert_eq!(secret, Secret::new([7; 32]));
        for at in 0..Secret::LEN {
            let mut other = [7; 32];
            other[at] ^= 0x80;
            assert_ne!(secret, Secret::new(other), "byte {at}");
        }
    }
}
