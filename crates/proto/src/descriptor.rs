//! Region descriptors: what a peer needs to access one region of a session's memory.
//!
//! Descriptors are sent by the thousand (one for each KV block pool, layer and rank), so they have
//! one small fixed size and no checksum: the region's owner refuses a damaged key or address like
//! any other wrong key.

use core::fmt;
use core::hash::{Hash, Hasher};

use crate::codec::{CodecError, Reader};
use crate::secret::constant_time_eq;

/// Layout version that [`RegionDescriptor::encode`] writes in its first byte.
const VERSION: u8 = 1;

/// The key that a peer must present to access a region: 112 random bits, then zeros, so that a
/// descriptor is short where address, length and kind travel by other means.
///
/// `Debug` prints none of it, and comparison takes constant time.
#[derive(Clone, Copy)]
pub struct RegionKey(pub [u8; Self::LEN]);

impl RegionKey {
    /// Size in bytes.
    pub const LEN: usize = 16;

    /// Number of random bytes; the others are zero.
    pub const SECRET_LEN: usize = 14;

    /// Creates a key from its random bytes.
    #[must_use]
    pub fn from_secret(secret: [u8; Self::SECRET_LEN]) -> Self {
        let mut key = [0; Self::LEN];
        key[..Self::SECRET_LEN].copy_from_slice(&secret);
        Self(key)
    }
}

impl PartialEq for RegionKey {
    #[inline]
    fn eq(&self, other: &Self) -> bool {
        constant_time_eq(&self.0, &other.0)
    }
}

impl Eq for RegionKey {}

impl Hash for RegionKey {
    #[inline]
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.hash(state);
    }
}

impl fmt::Debug for RegionKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RegionKey(..)")
    }
}

/// The kind of memory that holds a region.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Memory {
    /// Ordinary memory of the process.
    #[default]
    Host,
    /// Memory of a CUDA device.
    Cuda {
        /// The device's ordinal in the owner's process.
        device: u32,
    },
}

impl Memory {
    const HOST: u8 = 0;
    const CUDA: u8 = 1;
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("host"),
            Self::Cuda { device } => write!(f, "cuda:{device}"),
        }
    }
}

/// The reason bytes are no region descriptor, or numbers no region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DescriptorError {
    /// The size is not [`RegionDescriptor::ENCODED_LEN`].
    #[error("a region descriptor has {len} bytes: {0}", len = RegionDescriptor::ENCODED_LEN)]
    LayoutWrong(#[from] CodecError),

    /// The first byte names a layout that this build does not know.
    #[error("region descriptor version {found} is unknown, expected {VERSION}")]
    VersionUnknown {
        /// The version that was found.
        found: u8,
    },

    /// This build does not know the memory kind.
    #[error("memory kind {found} is unknown")]
    MemoryUnknown {
        /// The kind that was found.
        found: u8,
    },

    /// Host memory was given a device ordinal.
    #[error("host memory names device {found}, expected 0")]
    DeviceUnexpected {
        /// The ordinal that was found; never zero.
        found: u32,
    },

    /// The region would run past the end of the address space.
    #[error("region at {address:#x} of {len} bytes runs past the address space")]
    RangeOverflows {
        /// First address.
        address: u64,
        /// Length in bytes.
        len: u64,
    },
}

/// Describes one region of a session's memory to a peer.
///
/// A value of this type never overflows: `address + len` fits a `u64`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RegionDescriptor {
    address: u64,
    /// `address + len <= u64::MAX`
    len: u64,
    key: RegionKey,
    memory: Memory,
}

impl RegionDescriptor {
    /// Size of an encoded descriptor in bytes.
    pub const ENCODED_LEN: usize = 38;

    /// Size in bytes of [`encode_short`](Self::encode_short).
    pub const SHORT_LEN: usize = 1 + RegionKey::SECRET_LEN;

    /// Describes `len` bytes at `address`; fails when they run past the address space.
    pub const fn new(
        address: u64,
        len: u64,
        key: RegionKey,
        memory: Memory,
    ) -> Result<Self, DescriptorError> {
        if address.checked_add(len).is_none() {
            return Err(DescriptorError::RangeOverflows { address, len });
        }
        Ok(Self {
            address,
            len,
            key,
            memory,
        })
    }

    /// Returns the first address of the region, in the owner's process.
    #[must_use]
    pub const fn address(&self) -> u64 {
        self.address
    }

    /// Returns the length in bytes; may be zero.
    #[must_use]
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// Returns whether the region holds no byte at all.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the key that must be presented to access the region.
    #[must_use]
    pub const fn key(&self) -> RegionKey {
        self.key
    }

    /// Returns the kind of memory that holds the bytes.
    #[must_use]
    pub const fn memory(&self) -> Memory {
        self.memory
    }

    /// Returns whether `len` bytes at `address` lie wholly inside the region. Never overflows.
    #[must_use]
    pub const fn contains(&self, address: u64, len: u64) -> bool {
        let Some(end) = address.checked_add(len) else {
            return false;
        };
        address >= self.address && end <= self.address + self.len
    }

    /// Encodes the descriptor; [`decode`](Self::decode) reads it back.
    #[must_use]
    pub fn encode(&self) -> [u8; Self::ENCODED_LEN] {
        let (kind, device) = match self.memory {
            Memory::Host => (Memory::HOST, 0),
            Memory::Cuda { device } => (Memory::CUDA, device),
        };
        let mut out = [0; Self::ENCODED_LEN];
        out[0] = VERSION;
        out[1] = kind;
        out[2..6].copy_from_slice(&device.to_le_bytes());
        out[6..14].copy_from_slice(&self.address.to_le_bytes());
        out[14..22].copy_from_slice(&self.len.to_le_bytes());
        out[22..38].copy_from_slice(&self.key.0);
        out
    }

    /// Encodes the descriptor for readers that know address, length and memory;
    /// [`decode_short`](Self::decode_short) reads it back. Returns `None` unless the key was made
    /// by [`RegionKey::from_secret`].
    #[must_use]
    pub fn encode_short(&self) -> Option<[u8; Self::SHORT_LEN]> {
        let (secret, zeros) = self.key.0.split_at(RegionKey::SECRET_LEN);
        let mut out = [VERSION; Self::SHORT_LEN];
        out[1..].copy_from_slice(secret);
        zeros.iter().all(|&byte| byte == 0).then_some(out)
    }

    /// Decodes the output of [`encode_short`](Self::encode_short), given the rest of the
    /// description.
    pub fn decode_short(
        input: &[u8; Self::SHORT_LEN],
        address: u64,
        len: u64,
        memory: Memory,
    ) -> Result<Self, DescriptorError> {
        let [version, secret @ ..] = *input;
        if version != VERSION {
            return Err(DescriptorError::VersionUnknown { found: version });
        }
        Self::new(address, len, RegionKey::from_secret(secret), memory)
    }

    /// Decodes the output of [`encode`](Self::encode); anything else is an error.
    pub fn decode(input: &[u8]) -> Result<Self, DescriptorError> {
        let mut reader = Reader::new(input);
        let version = reader.u8()?;
        if version != VERSION {
            return Err(DescriptorError::VersionUnknown { found: version });
        }
        let kind = reader.u8()?;
        let device = reader.u32()?;
        let memory = match (kind, device) {
            (Memory::HOST, 0) => Memory::Host,
            (Memory::HOST, found) => return Err(DescriptorError::DeviceUnexpected { found }),
            (Memory::CUDA, device) => Memory::Cuda { device },
            (found, _) => return Err(DescriptorError::MemoryUnknown { found }),
        };
        let address = reader.u64()?;
        let len = reader.u64()?;
        let key = RegionKey(reader.array()?);
        reader.finish()?;
        Self::new(address, len, key, memory)
    }
}

#[cfg(test)]
mod tests {
    use alloc::format;
    use alloc::vec::Vec;

    use proptest::prelude::*;

    use super::*;

    const KEY: RegionKey = RegionKey([0xee; 16]);

    fn cuda() -> RegionDescriptor {
        RegionDescriptor::new(0x1122_3344_5566_7788, 0x99, KEY, Memory::Cuda { device: 3 }).unwrap()
    }

    #[test]
    fn the_layout_is_the_documented_one() {
        let mut expected = Vec::from([1, 1, 3, 0, 0, 0]);
        expected.extend([0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11]);
        expected.extend([0x99, 0, 0, 0, 0, 0, 0, 0]);
        expected.extend([0xee; 16]);
        assert_eq!(cuda().encode()[..], expected);
    }

    #[test]
    fn the_short_form_is_completed_by_what_the_reader_knows() {
        let memory = Memory::Cuda { device: 3 };
        let key = RegionKey::from_secret([0xab; RegionKey::SECRET_LEN]);
        let region = RegionDescriptor::new(4096, 99, key, memory).unwrap();
        let mut short = region.encode_short().unwrap();
        let decode = |short: &_| RegionDescriptor::decode_short(short, 4096, 99, memory);
        assert_eq!(decode(&short), Ok(region));
        short[0] = 0xff;
        let unknown = DescriptorError::VersionUnknown { found: 0xff };
        assert_eq!(decode(&short), Err(unknown));
        // A key that does not end in zeros would change by encoding and decoding.
        assert_eq!(cuda().encode_short(), None);
    }

    #[test]
    fn every_truncation_and_every_extension_is_refused() {
        let bytes = cuda().encode();
        for len in 0..bytes.len() {
            let error = RegionDescriptor::decode(&bytes[..len]).unwrap_err();
            assert!(
                matches!(error, DescriptorError::LayoutWrong(_)),
                "{len}: {error}"
            );
        }
        let mut long = Vec::from(bytes);
        long.push(0);
        assert_eq!(
            RegionDescriptor::decode(&long),
            Err(DescriptorError::LayoutWrong(CodecError::Trailing {
                left: 1
            }))
        );
    }

    #[test]
    fn unknown_values_are_refused_by_name() {
        let with = |at: usize, value: u8| {
            let mut bytes = cuda().encode();
            bytes[at] = value;
            RegionDescriptor::decode(&bytes)
        };
        assert_eq!(
            with(0, 2),
            Err(DescriptorError::VersionUnknown { found: 2 })
        );
        assert_eq!(with(1, 2), Err(DescriptorError::MemoryUnknown { found: 2 }));
        assert_eq!(
            with(1, 0),
            Err(DescriptorError::DeviceUnexpected { found: 3 })
        );
    }

    #[test]
    fn a_region_ends_inside_the_address_space() {
        let last = RegionDescriptor::new(u64::MAX, 0, KEY, Memory::Host).unwrap();
        assert!(last.is_empty());
        assert!(RegionDescriptor::new(1, u64::MAX - 1, KEY, Memory::Host).is_ok());
        let (address, len) = (1, u64::MAX);
        assert_eq!(
            RegionDescriptor::new(address, len, KEY, Memory::Host),
            Err(DescriptorError::RangeOverflows { address, len })
        );
        let mut bytes = cuda().encode();
        bytes[14..22].fill(0xff);
        assert!(matches!(
            RegionDescriptor::decode(&bytes),
            Err(DescriptorError::RangeOverflows { len: u64::MAX, .. })
        ));
    }

    #[test]
    fn contains_knows_both_edges() {
        let region = RegionDescriptor::new(100, 50, KEY, Memory::Host).unwrap();
        for (address, len, inside) in [
            (100, 50, true),
            (100, 0, true),
            (150, 0, true),
            (149, 1, true),
            (99, 1, false),
            (149, 2, false),
            (151, 0, false),
            (100, u64::MAX, false),
            (u64::MAX, u64::MAX, false),
        ] {
            assert_eq!(region.contains(address, len), inside, "{address}+{len}");
        }
    }

    #[test]
    fn keys_are_not_printed() {
        let text = format!("{:?}", cuda());
        assert!(
            text.contains("RegionKey(..)") && !text.contains("238"),
            "{text}"
        );
        assert_eq!(
            format!("{} {}", Memory::Host, cuda().memory()),
            "host cuda:3"
        );
    }

    proptest! {
        #[test]
        fn what_was_encoded_is_decoded(
            address: u64, len: u64, key: [u8; 16], device: Option<u32>,
        ) {
            let memory = device.map_or(Memory::Host, |device| Memory::Cuda { device });
            let Ok(region) = RegionDescriptor::new(address, len, RegionKey(key), memory) else {
                prop_assert!(address.checked_add(len).is_none());
                return Ok(());
            };
            prop_assert_eq!(RegionDescriptor::decode(&region.encode()), Ok(region));
        }

        /// There is one encoding of each descriptor: what decodes encodes to the same bytes.
        #[test]
        fn the_encoding_is_canonical(head in [0..3u8, 0..3u8], tail: [u8; 36]) {
            let bytes = [&head[..], &tail[..]].concat();
            if let Ok(region) = RegionDescriptor::decode(&bytes) {
                prop_assert_eq!(&region.encode()[..], &bytes[..]);
            }
        }
    }
}
