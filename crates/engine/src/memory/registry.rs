//! The registry of a session's memory: access rights and their revocation.

use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use tcpx_cuda::Device;
use tcpx_net::Span;
use tcpx_proto::descriptor::{RegionDescriptor, RegionKey};
use tcpx_proto::frame::{Entry, Status, Table};
use tcpx_proto::lane::Op;

use super::nearness::InterfaceSet;
use super::staging::{Staging, is_same_place};
use super::{Buffer, MemId, MemoryKind, Region};
use crate::error::Error;
use crate::sync::{Mutex, Rank, RwLock};

/// The parts of the engine that use a session's memory.
pub(crate) trait Users: Send + Sync {
    /// Returns when revoked memory is no longer touched. Waits for system calls and copies in
    /// flight, never for a peer.
    fn revoke(&self);
}

/// Memory under one or more registrations of the same range.
#[derive(Debug)]
pub(crate) struct Memory {
    /// The first registration's id, for messages.
    pub(crate) id: MemId,
    pub(crate) span: Span,
    pub(crate) kind: MemoryKind,
    /// The device that holds the memory, if sockets cannot access it.
    pub(crate) device: Option<Arc<dyn Device>>,
    /// The interfaces that transfers of this memory use.
    pub(crate) near: InterfaceSet,
    pub(super) descriptor: RegionDescriptor,
    live: AtomicBool,
    /// The memory that an alias is a part of.
    part_of: Option<Arc<Memory>>,
}

impl Memory {
    /// Returns the key that grants a peer access.
    pub(crate) fn key(&self) -> RegionKey {
        self.descriptor.key()
    }

    /// Returns the registered memory: itself, or the memory that an alias is a part of.
    pub(crate) fn root(self: &Arc<Self>) -> &Arc<Self> {
        self.part_of.as_ref().unwrap_or(self)
    }

    /// Returns whether the memory may still be touched.
    #[inline]
    pub(crate) fn is_live(&self) -> bool {
        self.live.load(Ordering::Acquire)
            && self.part_of.as_ref().is_none_or(|whole| whole.is_live())
    }

    /// Returns whether a peer that has the key may perform `op` on the memory now.
    fn is_open_for(&self, op: Op) -> bool {
        self.is_live() && (op == Op::Read || self.part_of.is_none())
    }
}

/// One registration of memory; ends at the latest when it is dropped.
pub(super) struct Registration {
    pub(super) id: MemId,
    pub(super) memory: Arc<Memory>,
    registry: Weak<Registry>,
    ended: AtomicBool,
    ending: Mutex<()>,
    /// Keeps the engine's own buffer alive while it is registered. Stored per registration and not
    /// in `Memory`, because another registration of the same range may have another owner or none.
    _owner: Option<Buffer>,
}

impl Registration {
    pub(super) fn is_in_force(&self) -> bool {
        !self.ended.load(Ordering::Acquire)
    }

    pub(super) fn belongs_to(&self, registry: &Arc<Registry>) -> bool {
        std::ptr::eq(self.registry.as_ptr(), Arc::as_ptr(registry))
    }

    /// Ends the registration once; returns whether this call did.
    pub(super) fn end(&self) -> bool {
        // Held until the end, so that a second caller, too, returns only when the memory is no
        // longer touched.
        let _ending = self.ending.lock();
        if self.ended.swap(true, Ordering::AcqRel) {
            return false;
        }
        if let Some(registry) = self.registry.upgrade()
            && registry.remove(&self.memory)
        {
            registry.revoke();
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

/// Hashes a region key by taking a part of it: keys are the output of a keyed hash, and only the
/// registry inserts keys into the map.
#[derive(Default)]
struct ByKeyHasher(u64);

type ByKey = BuildHasherDefault<ByKeyHasher>;

impl Hasher for ByKeyHasher {
    fn write(&mut self, bytes: &[u8]) {
        if let Some(part) = bytes.first_chunk() {
            self.0 = u64::from_le_bytes(*part);
        }
    }

    /// Skips the length prefix that an array hashes before its bytes.
    fn write_usize(&mut self, _: usize) {}

    fn finish(&self) -> u64 {
        self.0
    }
}

/// All registrations of a session.
///
/// Grants access by key ([`Registry::resolve`]) and revokes it: removing a registration makes its
/// memory dead and changes the epoch, and [`Registry::revoke`] returns when no user touches the
/// memory any more. A chunk in flight checks its memory again only if the epoch has changed.
pub(crate) struct Registry {
    /// Keyed hash state. A region key is the hash of the range under a secret, so keys cannot be
    /// guessed, and the same range always has the same key.
    keyed: Hmac<Sha256>,
    by_key: RwLock<HashMap<RegionKey, (Arc<Memory>, usize), ByKey>>,
    next_id: AtomicU64,
    /// Counts revocations, so that a chunk in flight checks its regions only after one.
    epoch: AtomicU64,
    users: OnceLock<Weak<dyn Users>>,
}

impl Registry {
    pub(crate) fn new(secret: [u8; 32]) -> Arc<Self> {
        Arc::new(Self {
            keyed: <Hmac<Sha256> as KeyInit>::new_from_slice(&secret)
                .expect("HMAC takes keys of any length"),
            by_key: RwLock::new(Rank::Registry, HashMap::default()),
            next_id: AtomicU64::new(1),
            epoch: AtomicU64::new(0),
            users: OnceLock::new(),
        })
    }

    /// Sets the users of the memory. Called once, before the memory is used.
    pub(crate) fn set_users(&self, users: Weak<dyn Users>) {
        let first = self.users.set(users);
        debug_assert!(first.is_ok(), "the users of a registry are set once");
    }

    /// Returns when revoked memory is no longer touched.
    pub(crate) fn revoke(&self) {
        if let Some(users) = self.users.get().and_then(Weak::upgrade) {
            users.revoke();
        }
    }

    /// Returns the GPU of the oldest GPU memory that is still registered.
    pub(crate) fn first_gpu(&self) -> Option<Arc<dyn Device>> {
        let by_key = self.by_key.read();
        let on_gpus = by_key
            .values()
            .filter(|(memory, _)| memory.kind != MemoryKind::Host);
        on_gpus
            .min_by_key(|(memory, _)| memory.id)
            .and_then(|(memory, _)| memory.device.clone())
    }

    /// Registers memory; a repeated registration of the same range and kind shares the entry.
    pub(crate) fn add(
        self: &Arc<Self>,
        staging: &Staging,
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
        let device = staging.device_of(span, kind)?;
        let near = device.as_deref().map(|device| staging.nearness.of(device));
        let near = near.unwrap_or(InterfaceSet::ALL);
        let kind = match &device {
            Some(device) if !staging.is_host(device.as_ref()) => MemoryKind::Cuda {
                device: device.ordinal(),
            },
            _ => MemoryKind::Host,
        };
        let descriptor = self.describe(span, kind).ok_or_else(bad)?;
        let key = descriptor.key();
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
                    near,
                    descriptor,
                    live,
                    part_of: None,
                }),
                0,
            )
        });
        *count += 1;
        let registration = Registration {
            id,
            memory: Arc::clone(memory),
            registry: Arc::downgrade(self),
            ended: AtomicBool::new(false),
            ending: Mutex::new(Rank::Registration, ()),
            _owner: owner,
        };
        Ok(Region::new(registration))
    }

    /// Opens a part of registered memory for READs with a new key, until
    /// [`Registry::remove_alias`].
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
            near: whole.near,
            descriptor,
            live: AtomicBool::new(true),
            part_of: Some(Arc::clone(whole)),
        });
        self.by_key.write().insert(key, (Arc::clone(&memory), 1));
        memory
    }

    /// Closes an alias; does nothing if it is already closed.
    pub(crate) fn remove_alias(&self, alias: &Arc<Memory>) {
        self.remove(alias);
    }

    /// Ends one registration. Returns true if it was the last one of its range, so that the caller
    /// must stop the users of the memory.
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

    /// Returns the memory of a key, if it may be read and written.
    pub(crate) fn find(&self, key: &RegionKey) -> Option<Arc<Memory>> {
        let by_key = self.by_key.read();
        let (memory, _) = by_key.get(key)?;
        memory.is_open_for(Op::Write).then(|| Arc::clone(memory))
    }

    /// Returns a number that changes whenever memory is revoked.
    #[inline]
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    /// Grants access to every range of `table` or to none: fills `spans` in payload order (adjacent
    /// ranges merged) and `memory` with the memory that contains them. An alias is open for READs
    /// only.
    pub(crate) fn resolve(
        &self,
        op: Op,
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
                    Some((found, _)) if found.is_open_for(op) => memory.push(Arc::clone(found)),
                    _ => return Err(Refusal::UnknownRegion { index }),
                }
            }
        }
        let mut last = None;
        for entry in table.entries() {
            // Decoding the table checked that the index is in range.
            let owner = &memory[entry.region as usize];
            let span = owner.slice(entry).ok_or(Refusal::OutOfBounds {
                address: entry.address,
                len: entry.len,
            })?;
            // A device does not copy across allocations,
            // and adjacent regions may be separate allocations.
            if owner.device.is_none() || last == Some(entry.region) {
                push_merged(spans, span);
            } else if !span.is_empty() {
                spans.push(span);
            }
            last = Some(entry.region);
        }
        Ok(())
    }

    /// Describes memory, under the key that this range and kind always have.
    fn describe(&self, span: Span, kind: MemoryKind) -> Option<RegionDescriptor> {
        let (address, len) = (span.address() as u64, span.len() as u64);
        let of = |key| RegionDescriptor::new(address, len, key, kind).ok();
        let without_key = of(RegionKey([0; RegionKey::LEN]))?;
        of(self.keyed_hash(&[&without_key.encode()]))
    }

    fn keyed_hash(&self, parts: &[&[u8]]) -> RegionKey {
        let mut mac = self.keyed.clone();
        for part in parts {
            mac.update(part);
        }
        let tag = mac.finalize().into_bytes();
        let mut secret = [0; RegionKey::SECRET_LEN];
        secret.copy_from_slice(&tag[..RegionKey::SECRET_LEN]);
        RegionKey::from_secret(secret)
    }
}

impl Memory {
    fn slice(&self, entry: Entry) -> Option<Span> {
        let offset = entry.address.checked_sub(self.span.address() as u64)?;
        self.span
            .slice(usize::try_from(offset).ok()?, entry.len as usize)
    }
}

/// Returns the device that holds all of `memory`; an error if it is in more than one place.
pub(crate) fn one_device(memory: &[Arc<Memory>]) -> Result<Option<Arc<dyn Device>>, Refusal> {
    one_place(memory.iter().map(|memory| memory.device.as_ref()))
}

/// Returns the common place of all items: a device, or `None` for host memory.
pub(crate) fn one_place<'a>(
    mut places: impl Iterator<Item = Option<&'a Arc<dyn Device>>>,
) -> Result<Option<Arc<dyn Device>>, Refusal> {
    let Some(first) = places.next() else {
        return Ok(None);
    };
    match places.all(|place| is_same_place(first, place)) {
        true => Ok(first.cloned()),
        false => Err(Refusal::Mixed),
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
    #[error("the region's memory is no longer mapped, or not for this access")]
    Fault,
}

impl Refusal {
    pub(crate) fn status(self) -> Status {
        match self {
            Self::UnknownRegion { .. } | Self::Revoked => Status::UnknownRegion,
            Self::OutOfBounds { .. } => Status::OutOfBounds,
            Self::Mixed | Self::Device => Status::Other,
            Self::Fault => Status::Memory,
        }
    }

    /// Returns the refusal that a peer gets when access to our memory failed with `error`.
    pub(crate) fn failed(error: &Error) -> Self {
        match error {
            Error::MemoryFault => Self::Fault,
            _ => Self::Device,
        }
    }
}

/// Appends a span, joined to the last one if they are adjacent:
/// fewer spans need fewer system calls.
pub(crate) fn push_merged(spans: &mut Vec<Span>, span: Span) {
    if let Some(last) = spans.last_mut()
        && let Some(joined) = last.join(span)
    {
        *last = joined;
        return;
    }
    spans.push(span);
}

#[cfg(test)]
mod tests;
