//! Registered memory of one side, in the host or on a GPU, with the operations of a measurement.

use std::fmt;

use serde::{Deserialize, Serialize};
use tcpx::cuda::{self, DeviceBuffer};
use tcpx::{Buffer, MemoryKind, Region, Session};

use crate::error::Error;
use crate::machine::available_bytes;
use crate::place::Place;
use crate::workload::{Mismatch, Pattern, Shape, verify};

/// Memory of a [`Place`], registered with a session, read and written by copies.
pub struct Placed {
    /// Before `storage`: memory of a GPU must outlive its registration.
    region: Region,
    storage: Storage,
}

enum Storage {
    Host(Buffer),
    Device(DeviceBuffer),
}

impl Placed {
    /// Allocates and registers `len` bytes.
    ///
    /// # Errors
    /// The place does not exist or has not enough memory, or the session is closed.
    pub fn new(session: &Session, place: Place, len: usize) -> Result<Placed, tcpx::Error> {
        match place {
            Place::Host => {
                let buffer = Buffer::new(len);
                Ok(Placed {
                    region: session.register(&buffer)?,
                    storage: Storage::Host(buffer),
                })
            }
            Place::Vram(ordinal) => {
                let buffer = DeviceBuffer::alloc(ordinal, len)?;
                let kind = MemoryKind::Cuda { device: ordinal };
                // SAFETY: the buffer's memory stays allocated until the buffer is dropped, and
                // nothing moves it out of this value, whose `region` is dropped before it.
                let region =
                    unsafe { session.register_raw(buffer.address() as *mut u8, len, kind)? };
                Ok(Placed {
                    region,
                    storage: Storage::Device(buffer),
                })
            }
        }
    }

    /// Returns its registration.
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        match &self.storage {
            Storage::Host(buffer) => buffer.len(),
            Storage::Device(buffer) => buffer.len(),
        }
    }

    /// Returns whether there are no bytes; never, since empty memory cannot be registered.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies `bytes` to the beginning of the memory.
    ///
    /// # Errors
    /// The GPU failed.
    ///
    /// # Panics
    /// Panics if they do not fit into host memory; memory of a GPU returns an error.
    pub fn write(&self, bytes: &[u8]) -> Result<(), tcpx::Error> {
        match &self.storage {
            Storage::Host(buffer) => buffer.write(0, bytes),
            Storage::Device(buffer) => buffer.copy_from_host(0, bytes)?,
        }
        Ok(())
    }

    /// Copies the beginning of the memory to `bytes`.
    ///
    /// # Errors
    /// The GPU failed.
    ///
    /// # Panics
    /// As for [`Placed::write`].
    pub fn read(&self, bytes: &mut [u8]) -> Result<(), tcpx::Error> {
        match &self.storage {
            Storage::Host(buffer) => buffer.read(0, bytes),
            Storage::Device(buffer) => buffer.copy_to_host(0, bytes)?,
        }
        Ok(())
    }
}

/// The contestant that has moved the bytes to verify.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Contestant {
    /// The engine, between the registered memory of both sides.
    Engine,
    /// The floor, which uses host memory only.
    Floor,
}

impl fmt::Display for Contestant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Contestant::Engine => "the engine",
            Contestant::Floor => "the floor",
        })
    }
}

/// Registered memory, of which a workload uses the beginning, and the host memory of the floor.
///
/// In host memory both are the same bytes, so that neither has better pages or warmer caches. Raw
/// sockets cannot access memory of a GPU: there the floor has host memory of its own, through which
/// patterns are written and verified too.
pub(crate) struct Memory {
    placed: Placed,
    /// As long as memory of a GPU beside it; otherwise empty.
    beside: Vec<u8>,
}

impl Memory {
    /// Returns memory for a workload: reused if it is large enough, else new.
    pub(crate) fn for_shape(
        session: &Session,
        place: Place,
        shape: &Shape,
        before: Option<Memory>,
    ) -> Result<Memory, tcpx::Error> {
        let len = shape.buffer_bytes() as usize;
        if let Some(memory) = before
            && memory.placed.len() >= len
        {
            return Ok(memory);
        }
        Ok(Memory {
            placed: Placed::new(session, place, len)?,
            beside: if place.is_host() {
                Vec::new()
            } else {
                vec![0; len]
            },
        })
    }

    pub(crate) fn region(&self) -> &Region {
        self.placed.region()
    }

    /// Fills the part that a workload uses with a pattern, for both contestants.
    pub(crate) fn fill(&mut self, shape: &Shape, seed: u64) -> Result<(), tcpx::Error> {
        Pattern::new(seed).fill(0, self.idle_bytes(shape));
        match self.placed.storage {
            Storage::Host(_) => Ok(()),
            Storage::Device(_) => self
                .placed
                .write(&self.beside[..shape.buffer_bytes() as usize]),
        }
    }

    /// Checks that the pattern of the source has arrived here.
    pub(crate) fn verify(
        &mut self,
        shape: &Shape,
        seed: u64,
        contestant: Contestant,
    ) -> Result<Result<(), Mismatch>, tcpx::Error> {
        if let (Storage::Device(_), Contestant::Engine) = (&self.placed.storage, contestant) {
            // If nothing is copied, the pattern of `fill` stays, which differs from the source's.
            self.placed
                .read(&mut self.beside[..shape.buffer_bytes() as usize])?;
        }
        Ok(verify(shape, Pattern::new(seed), self.idle_bytes(shape)))
    }

    /// Returns the floor's view of the part that a workload uses, to be accessed only while no
    /// transfer is in flight.
    pub(crate) fn idle_bytes(&mut self, shape: &Shape) -> &mut [u8] {
        let len = shape.buffer_bytes() as usize;
        let Storage::Host(buffer) = &self.placed.storage else {
            return &mut self.beside[..len];
        };
        // SAFETY: `buffer` is a live allocation of initialised bytes that this value owns and never
        // lends or clones, so `&mut self` excludes every other access of this process. The engine
        // accesses it only for a transfer, and only the initiator of the measurement posts any: it
        // does not ask a side to fill, verify or run the floor before its transfers have completed
        // (`measure`, `soak`), and a completed transfer accesses no memory.
        let bytes =
            unsafe { std::slice::from_raw_parts_mut(buffer.address() as *mut u8, buffer.len()) };
        &mut bytes[..len]
    }
}

/// Refuses a workload for which this machine, or its GPU, has not enough memory.
///
/// Half of the free memory may be used: the measuring process may be on this machine and need as
/// much.
pub(crate) fn check_room(place: Place, shape: &Shape) -> Result<(), Error> {
    let refuse = |limit: u64, of: &str| Error::Option {
        option: "size",
        value: shape.buffer_bytes().to_string(),
        reason: format!("more than half of the memory that is free {of} ({limit} bytes)"),
    };
    let limit = available_bytes() / 2;
    if shape.buffer_bytes() > limit {
        return Err(refuse(limit, "here"));
    }
    if let Place::Vram(ordinal) = place {
        let limit = cuda::free_bytes(ordinal).map_err(tcpx::Error::from)? / 2;
        if shape.buffer_bytes() > limit {
            return Err(refuse(limit, &format!("on GPU {ordinal}")));
        }
    }
    Ok(())
}
