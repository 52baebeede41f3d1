//! Regions as applications see them: registered memory, and positions in it.

use std::sync::Arc;

use tcpx_net::InProcess;
pub use tcpx_proto::descriptor::Memory as MemoryKind;
use tcpx_proto::descriptor::{RegionDescriptor, RegionKey};

use super::registry::{Memory, Registration, Registry};
use crate::error::Error;
use crate::ids::MemId;

/// A registration of memory. Clones are handles to the same registration, which ends with the last
/// handle or with [`Region::deregister`]. From then on neither this session nor a peer touches the
/// memory through it: transfers that were using it fail.
#[derive(Clone, Debug)]
pub struct Region {
    registration: InProcess<Arc<Registration>>,
}

impl Region {
    pub(super) fn new(registration: Registration) -> Self {
        Self {
            registration: InProcess::new(Arc::new(registration)),
        }
    }

    /// Returns the registration's number within its session.
    #[must_use]
    pub fn id(&self) -> MemId {
        self.registration.id
    }

    /// Returns the length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.memory().span.len()
    }

    /// Returns whether the region is empty; it never is.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Returns the address of the first byte.
    #[must_use]
    pub fn address(&self) -> usize {
        self.memory().span.address()
    }

    /// Returns the kind of memory.
    #[must_use]
    pub fn kind(&self) -> MemoryKind {
        self.memory().kind
    }

    /// Returns the descriptor that a peer needs to address this region. Registering the same range
    /// again gives the same descriptor, so descriptors that peers have stored remain valid.
    #[must_use]
    pub fn descriptor(&self) -> RemoteRegion {
        RemoteRegion {
            descriptor: self.memory().descriptor,
        }
    }

    /// Returns a short form of [`Region::descriptor`], for [`RemoteRegion::from_short`] at peers
    /// that know address, length and kind of the region by other means. Returns `None` if the
    /// region is not of the given kind.
    #[must_use]
    pub fn short_descriptor(&self, kind: MemoryKind) -> Option<[u8; RemoteRegion::SHORT_LEN]> {
        let memory = self.memory();
        (memory.kind == kind).then(|| memory.descriptor.encode_short())?
    }

    /// Returns the position `offset` bytes into the region, for use in a [`Segment`].
    #[must_use]
    pub fn at(&self, offset: usize) -> LocalSlice<'_> {
        LocalSlice {
            region: self,
            offset,
        }
    }

    /// Ends the registration now, even if other handles exist. When this returns, the memory is no
    /// longer touched and may be freed.
    ///
    /// # Errors
    /// The registration has already ended.
    pub fn deregister(&self) -> Result<(), Error> {
        self.registration.check()?;
        if self.registration.end() {
            Ok(())
        } else {
            Err(Error::RegionDeregistered(self.id()))
        }
    }

    pub(crate) fn memory(&self) -> &Arc<Memory> {
        &self.registration.memory
    }

    /// Returns whether the registration has not ended.
    pub(crate) fn is_registered(&self) -> bool {
        self.registration.is_in_force()
    }

    pub(crate) fn belongs_to(&self, registry: &Arc<Registry>) -> bool {
        self.registration.belongs_to(registry)
    }
}

/// A peer's region: address, length and the key that grants access. Applications send it to the
/// peer that will use it by any means they have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteRegion {
    descriptor: RegionDescriptor,
}

impl RemoteRegion {
    /// Length of [`Region::short_descriptor`].
    pub const SHORT_LEN: usize = RegionDescriptor::SHORT_LEN;

    /// Makes a descriptor from its short form and the known properties of the region.
    ///
    /// # Errors
    /// The bytes are not a short descriptor, or the range wraps.
    pub fn from_short(
        short: [u8; Self::SHORT_LEN],
        address: u64,
        len: u64,
        kind: MemoryKind,
    ) -> Result<Self, Error> {
        let descriptor = RegionDescriptor::decode_short(&short, address, len, kind);
        let descriptor = descriptor.map_err(Error::BadDescriptor)?;
        Ok(Self { descriptor })
    }

    /// Returns the descriptor as bytes.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        self.descriptor.encode().to_vec()
    }

    /// Decodes a descriptor.
    ///
    /// # Errors
    /// The bytes are not a descriptor.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, Error> {
        let descriptor = RegionDescriptor::decode(bytes).map_err(Error::BadDescriptor)?;
        Ok(Self { descriptor })
    }

    /// Returns the length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        usize::try_from(self.descriptor.len()).unwrap_or(usize::MAX)
    }

    /// Returns whether the region is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.descriptor.len() == 0
    }

    /// Returns the address of the first byte, in the owner's address space.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.descriptor.address()
    }

    /// Returns the kind of memory at its owner.
    #[must_use]
    pub fn kind(&self) -> MemoryKind {
        self.descriptor.memory()
    }

    /// Returns the position `offset` bytes into the region, for use in a [`Segment`].
    #[must_use]
    pub fn at(&self, offset: usize) -> RemoteSlice<'_> {
        RemoteSlice {
            region: self,
            offset,
        }
    }

    pub(crate) fn key(&self) -> RegionKey {
        self.descriptor.key()
    }
}

/// A position in memory of this session.
#[derive(Clone, Copy, Debug)]
pub struct LocalSlice<'a> {
    /// The region.
    pub region: &'a Region,
    /// Offset from the start of the region.
    pub offset: usize,
}

/// A position in a peer's memory.
#[derive(Clone, Copy, Debug)]
pub struct RemoteSlice<'a> {
    /// The region.
    pub region: &'a RemoteRegion,
    /// Offset from the start of the region.
    pub offset: usize,
}

/// One piece of a transfer: `len` bytes of local and remote memory. A READ copies from remote to
/// local, a WRITE from local to remote.
///
/// The segments of a transfer move in any order. If the targets of two segments overlap, or a target
/// and the source of another segment, the content of the overlapping bytes is unspecified.
#[derive(Clone, Copy, Debug)]
pub struct Segment<'a> {
    /// Position in local memory.
    pub local: LocalSlice<'a>,
    /// Position in the peer's memory.
    pub remote: RemoteSlice<'a>,
    /// Length in bytes; 0 is allowed and moves nothing.
    pub len: usize,
}
