//! Regions as applications see them: registered memory, and positions in it.

use std::sync::Arc;

use tcpx_net::InProcess;
pub use tcpx_proto::descriptor::Memory as MemoryKind;
use tcpx_proto::descriptor::{RegionDescriptor, RegionKey};

use super::registry::{Memory, Registration, Registry};
use crate::error::Error;
use crate::ids::MemId;

/// A registration. Clones are handles to the same one; it ends with the last handle or with
/// [`Region::deregister`], and from then on neither this session nor a peer touches the memory
/// through it: transfers that were using it fail.
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

    /// The registration's number within its session.
    #[must_use]
    pub fn id(&self) -> MemId {
        self.registration.id
    }

    /// Bytes in the region.
    #[must_use]
    pub fn len(&self) -> usize {
        self.memory().span.len()
    }

    /// Whether the region has no bytes; it always has some.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The address of the first byte.
    #[must_use]
    pub fn address(&self) -> usize {
        self.memory().span.address()
    }

    /// What kind of memory it is.
    #[must_use]
    pub fn kind(&self) -> MemoryKind {
        self.memory().kind
    }

    /// What a peer needs to address this region. Registering the same range again gives the same
    /// descriptor, so that what a peer has stored stays good.
    #[must_use]
    pub fn descriptor(&self) -> RemoteRegion {
        RemoteRegion {
            descriptor: self.memory().descriptor,
        }
    }

    /// The position `offset` bytes into the region, for use in a [`Segment`].
    #[must_use]
    pub fn at(&self, offset: usize) -> LocalSlice<'_> {
        LocalSlice {
            region: self,
            offset,
        }
    }

    /// Ends the registration now, whatever other handles exist. When this returns, the memory is no
    /// longer touched and may be freed.
    ///
    /// # Errors
    /// It had already ended.
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

    /// Whether the registration is still in force.
    pub(crate) fn is_registered(&self) -> bool {
        self.registration.is_in_force()
    }

    pub(crate) fn belongs_to(&self, registry: &Arc<Registry>) -> bool {
        self.registration.belongs_to(registry)
    }
}

/// A peer's region: address, length and the key that grants access. Carry it to the peer that shall
/// use it by whatever means the application has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteRegion {
    descriptor: RegionDescriptor,
}

impl RemoteRegion {
    /// The descriptor as bytes.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        self.descriptor.encode().to_vec()
    }

    /// Reads a descriptor.
    ///
    /// # Errors
    /// The bytes are no descriptor.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, Error> {
        let descriptor = RegionDescriptor::decode(bytes).map_err(Error::BadDescriptor)?;
        Ok(Self { descriptor })
    }

    /// Bytes in the region.
    #[must_use]
    pub fn len(&self) -> usize {
        usize::try_from(self.descriptor.len()).unwrap_or(usize::MAX)
    }

    /// Whether the region has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.descriptor.len() == 0
    }

    /// The address of the first byte, in the owner's address space.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.descriptor.address()
    }

    /// What kind of memory it is, at its owner.
    #[must_use]
    pub fn kind(&self) -> MemoryKind {
        self.descriptor.memory()
    }

    /// The position `offset` bytes into the region, for use in a [`Segment`].
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
    /// Bytes from its start.
    pub offset: usize,
}

/// A position in a peer's memory.
#[derive(Clone, Copy, Debug)]
pub struct RemoteSlice<'a> {
    /// The region.
    pub region: &'a RemoteRegion,
    /// Bytes from its start.
    pub offset: usize,
}

/// One piece of a transfer: `len` bytes here and there. A READ copies from remote to local, a WRITE
/// from local to remote.
#[derive(Clone, Copy, Debug)]
pub struct Segment<'a> {
    /// Where, in this session.
    pub local: LocalSlice<'a>,
    /// Where, at the peer.
    pub remote: RemoteSlice<'a>,
    /// How many bytes; none is legal and moves nothing.
    pub len: usize,
}
