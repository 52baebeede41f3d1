//! Memory of the second process.

use tcpx::RemoteRegion;

use super::{Pending, RemoteProcess};
use crate::mapping::Access;
use crate::pattern::{Content, Expected, Mismatch, REMOTE_POISON};
use crate::protocol::{Command, Hex, Registered};

/// Registered memory of a [`RemoteProcess`].
#[derive(Clone, Debug)]
pub struct RemoteMemory {
    memory: u64,
    region: u64,
    /// The descriptor that others need to address it.
    pub descriptor: RemoteRegion,
    /// Length in bytes.
    pub len: usize,
}

impl RemoteMemory {
    /// Returns the id of the memory in a [`Command`].
    #[must_use]
    pub fn id(&self) -> u64 {
        self.memory
    }

    /// Returns the id of its registration in a [`Command`].
    #[must_use]
    pub fn region_id(&self) -> u64 {
        self.region
    }

    /// Creates it from the answer to a [`Command`] that registered `len` bytes.
    ///
    /// # Panics
    /// When its descriptor is invalid.
    #[must_use]
    pub fn new(registered: Registered, len: usize) -> Self {
        let descriptor =
            RemoteRegion::from_bytes(&registered.descriptor).expect("the engine made it");
        Self {
            memory: registered.memory,
            region: registered.region,
            descriptor,
            len,
        }
    }
}

impl RemoteProcess {
    /// Allocates and registers memory in it.
    pub fn memory(&self, len: usize) -> RemoteMemory {
        let registered: Registered = self.expect(Command::Allocate { len });
        RemoteMemory::new(registered, len)
    }

    /// Maps and registers memory in it that can be unmapped, see [`RemoteProcess::allow`].
    pub fn mapped(&self, len: usize) -> RemoteMemory {
        let registered: Registered = self.expect(Command::Map { len });
        RemoteMemory::new(registered, len)
    }

    /// Changes the allowed access to pages of memory from [`RemoteProcess::mapped`].
    pub fn allow(&self, memory: &RemoteMemory, access: Access, offset: usize, len: usize) {
        let memory = memory.memory;
        self.expect(Command::Allow {
            memory,
            access,
            offset,
            len,
        })
    }

    /// Registers a part of its memory.
    pub fn register(&self, memory: &RemoteMemory, offset: usize, len: usize) -> RemoteMemory {
        let memory = memory.memory;
        let registered: Registered = self.expect(Command::Register {
            memory,
            offset,
            len,
        });
        RemoteMemory::new(registered, len)
    }

    /// Deregisters it; the memory stays.
    pub fn deregister(&self, memory: &RemoteMemory) {
        let region = memory.region;
        self.expect(Command::Deregister { region })
    }

    /// Fills all of it.
    pub fn fill(&self, memory: &RemoteMemory, content: Content) {
        self.begin_fill(memory, content).get();
    }

    /// Does what [`RemoteProcess::fill`] does, without waiting.
    pub fn begin_fill(&self, memory: &RemoteMemory, content: Content) -> Pending<'_, ()> {
        self.begin(Command::Put {
            memory: memory.memory,
            offset: 0,
            len: memory.len,
            content,
        })
    }

    /// Fills all of it with a pattern that nobody writes.
    pub fn poison(&self, memory: &RemoteMemory) {
        self.fill(memory, Content::Byte(REMOTE_POISON));
    }

    /// Writes these bytes to its start.
    pub fn set_bytes(&self, memory: &RemoteMemory, bytes: &[u8]) {
        let (memory, offset, bytes) = (memory.memory, 0, bytes.to_vec());
        self.expect(Command::SetBytes {
            memory,
            offset,
            bytes,
        })
    }

    /// Returns all of its bytes.
    pub fn bytes(&self, memory: &RemoteMemory) -> Vec<u8> {
        let (memory, offset, len) = (memory.memory, 0, memory.len);
        let Hex(bytes) = self.expect(Command::Bytes {
            memory,
            offset,
            len,
        });
        bytes
    }

    /// Compares all of it.
    ///
    /// # Panics
    /// When a byte is not as expected.
    #[track_caller]
    pub fn check(&self, memory: &RemoteMemory, expected: &Expected) {
        self.begin_check(memory, expected).verify();
    }

    /// Does what [`RemoteProcess::check`] does, without waiting: [`Pending::verify`] does.
    pub fn begin_check(
        &self,
        memory: &RemoteMemory,
        expected: &Expected,
    ) -> Pending<'_, Option<Mismatch>> {
        let (memory, expected) = (memory.memory, expected.clone());
        self.begin(Command::Check { memory, expected })
    }
}
