//! Registered memory: what may be transferred, and what peers may touch.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use hmac::{Hmac, KeyInit, Mac};
use parking_lot::{Mutex, RwLock};
use sha2::Sha256;
use tcpx_cuda::Device;
use tcpx_net::Span;
pub use tcpx_proto::descriptor::Memory as MemoryKind;
use tcpx_proto::descriptor::RegionDescriptor;
use tcpx_proto::descriptor::RegionKey;
use tcpx_proto::frame::{Entry, Status, Table};

use crate::core::Core;
use crate::error::Error;
use crate::memory::Buffer;
use crate::staging::is_same_place;

/// Names a registration within its session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MemId(pub u64);

impl fmt::Display for MemId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// A registration. Clones are handles to the same one; it ends with the last handle or with
/// [`Region::deregister`], and from then on neither this session nor a peer touches the memory
/// through it: transfers that were using it fail.
#[derive(Clone, Debug)]
pub struct Region {
    registration: Arc<Registration>,
}

impl Region {
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
        !self.registration.ended.load(Ordering::Acquire)
    }

    pub(crate) fn belongs_to(&self, core: &Arc<Core>) -> bool {
        std::ptr::eq(self.registration.core.as_ptr(), Arc::as_ptr(core))
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

/// Memory under one or more registrations of the same range.
#[derive(Debug)]
pub(crate) struct Memory {
    /// Of the first registration, for messages.
    pub(crate) id: MemId,
    pub(crate) span: Span,
    pub(crate) kind: MemoryKind,
    /// The device that it lies on, if sockets cannot reach it.
    pub(crate) device: Option<Arc<dyn Device>>,
    descriptor: RegionDescriptor,
    live: AtomicBool,
    /// The memory that this is a part of, under a key of its own.
    part_of: Option<Arc<Memory>>,
    /// Keeps the engine's own buffers alive while they are registered.
    _owner: Option<Buffer>,
}

impl Memory {
    /// What grants a peer access.
    pub(crate) fn key(&self) -> RegionKey {
        self.descriptor.key()
    }

    /// The memory that was registered: itself, or what it is a part of.
    pub(crate) fn root(self: &Arc<Self>) -> &Arc<Self> {
        self.part_of.as_ref().unwrap_or(self)
    }

    /// Whether the memory may still be touched.
    #[inline]
    pub(crate) fn is_live(&self) -> bool {
        self.live.load(Ordering::Acquire)
            && self.part_of.as_ref().is_none_or(|whole| whole.is_live())
    }
}

struct Registration {
    id: MemId,
    memory: Arc<Memory>,
    core: Weak<Core>,
    ended: AtomicBool,
    ending: Mutex<()>,
}

impl Registration {
    /// Ends it once; says whether this call did.
    fn end(&self) -> bool {
        // Held to the end: for whoever comes second, too, the memory is no longer touched when this returns.
        let _ending = self.ending.lock();
        if self.ended.swap(true, Ordering::AcqRel) {
            return false;
        }
        if let Some(core) = self.core.upgrade()
            && core.regions.remove(&self.memory)
        {
            core.revoke();
        }
        true
    }
}

impl fmt::Debug for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registration")
            .field("id", &self.id)
            .field("memory", &self.memory)
            .finish()
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.end();
    }
}

/// All registrations of a session.
pub(crate) struct Regions {
    /// Region keys are a keyed hash of the range under this secret: nobody can guess one, and the
    /// same range always has the same key.
    secret: [u8; 32],
    by_key: RwLock<HashMap<RegionKey, (Arc<Memory>, usize)>>,
    next_id: AtomicU64,
    /// Counts revocations, so that a chunk in flight need not look at its regions each time.
    epoch: AtomicU64,
}

impl Regions {
    pub(crate) fn new(secret: [u8; 32]) -> Self {
        Self {
            secret,
            by_key: RwLock::default(),
            next_id: AtomicU64::new(1),
            epoch: AtomicU64::new(0),
        }
    }

    /// The GPU of the memory that was registered first, of what is still registered.
    pub(crate) fn first_gpu(&self) -> Option<Arc<dyn Device>> {
        let by_key = self.by_key.read();
        let on_gpus = by_key
            .values()
            .filter(|(memory, _)| memory.kind != MemoryKind::Host);
        on_gpus
            .min_by_key(|(memory, _)| memory.id)
            .and_then(|(memory, _)| memory.device.clone())
    }

    /// Registers memory; the same range and kind again shares what is there.
    pub(crate) fn add(
        &self,
        core: &Arc<Core>,
        span: Span,
        kind: MemoryKind,
        owner: Option<Buffer>,
    ) -> Result<Region, Error> {
        let bad = || Error::BadRegion {
            address: span.address(),
            len: span.len(),
        };
        if span.is_empty() || span.address() == 0 {
            return Err(bad());
        }
        let device = core.staging.device_of(span, kind)?;
        let kind = match &device {
            Some(device) if !core.staging.is_host(device.as_ref()) => MemoryKind::Cuda {
                device: device.ordinal(),
            },
            _ => MemoryKind::Host,
        };
        let key = self.key(span, kind);
        let descriptor = RegionDescriptor::new(span.address() as u64, span.len() as u64, key, kind)
            .map_err(|_| bad())?;
        let id = MemId(self.next_id.fetch_add(1, Ordering::Relaxed));
        let mut by_key = self.by_key.write();
        let (memory, count) = by_key.entry(key).or_insert_with(|| {
            let live = AtomicBool::new(true);
            (
                Arc::new(Memory {
                    id,
                    span,
                    kind,
                    device,
                    descriptor,
                    live,
                    part_of: None,
                    _owner: owner,
                }),
                0,
            )
        });
        *count += 1;
        let registration = Registration {
            id,
            memory: Arc::clone(memory),
            core: Arc::downgrade(core),
            ended: AtomicBool::new(false),
            ending: Mutex::new(()),
        };
        Ok(Region {
            registration: Arc::new(registration),
        })
    }

    /// Opens a part of registered memory to whoever has the new key, until [`Regions::remove_alias`].
    pub(crate) fn add_alias(&self, whole: &Arc<Memory>, span: Span) -> Arc<Memory> {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let key = self.keyed_hash(&[b"alias", &id.to_le_bytes()]);
        let (address, len) = (span.address() as u64, span.len() as u64);
        let descriptor = RegionDescriptor::new(address, len, key, whole.kind)
            .expect("inside memory that has a descriptor");
        let memory = Arc::new(Memory {
            id: whole.id,
            span,
            kind: whole.kind,
            device: whole.device.clone(),
            descriptor,
            live: AtomicBool::new(true),
            part_of: Some(Arc::clone(whole)),
            _owner: None,
        });
        self.by_key.write().insert(key, (Arc::clone(&memory), 1));
        memory
    }

    /// Closes an alias; harmless when it is closed already.
    pub(crate) fn remove_alias(&self, alias: &Arc<Memory>) {
        self.remove(alias);
    }

    /// Ends one registration; true when it was the last of its range, so that whoever is using the memory
    /// must be made to stop.
    fn remove(&self, memory: &Arc<Memory>) -> bool {
        let mut by_key = self.by_key.write();
        let key = memory.descriptor.key();
        let Some((_, count)) = by_key.get_mut(&key) else {
            return false;
        };
        *count -= 1;
        if *count > 0 {
            return false;
        }
        by_key.remove(&key);
        memory.live.store(false, Ordering::Release);
        self.epoch.fetch_add(1, Ordering::Release);
        true
    }

    /// A number that changes whenever memory is revoked.
    #[inline]
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    /// Grants access to every range of `table` or to none: fills `spans` in payload order (touching
    /// neighbours merged) and `memory` with what they belong to.
    pub(crate) fn resolve(
        &self,
        table: &Table<'_>,
        spans: &mut Vec<Span>,
        memory: &mut Vec<Arc<Memory>>,
    ) -> Result<(), Refusal> {
        spans.clear();
        memory.clear();
        {
            let by_key = self.by_key.read();
            for (index, key) in table.regions().enumerate() {
                match by_key.get(&key) {
                    Some((found, _)) if found.is_live() => memory.push(Arc::clone(found)),
                    _ => return Err(Refusal::UnknownRegion { index }),
                }
            }
        }
        let mut last = None;
        for entry in table.entries() {
            // The table was decoded: the index is inside.
            let owner = &memory[entry.region as usize];
            let span = owner.slice(entry).ok_or(Refusal::OutOfBounds {
                address: entry.address,
                len: entry.len,
            })?;
            // A device does not copy across allocations, which regions of their own may be though they touch.
            if owner.device.is_none() || last == Some(entry.region) {
                push_merged(spans, span);
            } else if !span.is_empty() {
                spans.push(span);
            }
            last = Some(entry.region);
        }
        Ok(())
    }

    fn key(&self, span: Span, kind: MemoryKind) -> RegionKey {
        let (address, len) = (span.address() as u64, span.len() as u64);
        let kind = kind.to_string();
        self.keyed_hash(&[&address.to_le_bytes(), &len.to_le_bytes(), kind.as_bytes()])
    }

    fn keyed_hash(&self, parts: &[&[u8]]) -> RegionKey {
        let mut mac = <Hmac<Sha256> as KeyInit>::new_from_slice(&self.secret)
            .expect("HMAC takes keys of any length");
        for part in parts {
            mac.update(part);
        }
        let tag = mac.finalize().into_bytes();
        let mut key = [0; RegionKey::LEN];
        key.copy_from_slice(&tag[..RegionKey::LEN]);
        RegionKey(key)
    }
}

impl Memory {
    fn slice(&self, entry: Entry) -> Option<Span> {
        let offset = entry.address.checked_sub(self.span.address() as u64)?;
        self.span
            .slice(usize::try_from(offset).ok()?, entry.len as usize)
    }
}

/// The device that all of `memory` lies on; an error if it lies in more than one place.
pub(crate) fn one_device(memory: &[Arc<Memory>]) -> Result<Option<Arc<dyn Device>>, Refusal> {
    let Some((first, others)) = memory.split_first() else {
        return Ok(None);
    };
    let device = first.device.as_ref();
    if others
        .iter()
        .all(|m| is_same_place(device, m.device.as_ref()))
    {
        Ok(first.device.clone())
    } else {
        Err(Refusal::Mixed)
    }
}

/// Why a peer's access was not granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refusal {
    #[error("region {index} of the request is not registered (any more), or its key is wrong")]
    UnknownRegion { index: usize },
    #[error("{len} bytes at {address:#x} are not inside the region")]
    OutOfBounds { address: u64, len: u32 },
    #[error("the region was deregistered while the transfer was using it")]
    Revoked,
    #[error("the request mixes memory of different kinds or devices in one chunk")]
    Mixed,
    #[error("the device that holds the memory failed")]
    Device,
}

impl Refusal {
    pub(crate) fn status(self) -> Status {
        match self {
            Self::UnknownRegion { .. } | Self::Revoked => Status::UnknownRegion,
            Self::OutOfBounds { .. } => Status::OutOfBounds,
            Self::Mixed | Self::Device => Status::Other,
        }
    }
}

/// Appends a span, joined to the last one when they touch: fewer spans, fewer system calls.
pub(crate) fn push_merged(spans: &mut Vec<Span>, span: Span) {
    if let Some(last) = spans.last_mut()
        && let Some(joined) = last.join(span)
    {
        *last = joined;
        return;
    }
    spans.push(span);
}
