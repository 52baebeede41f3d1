//! The registry of a session's memory: who may touch which bytes, and until when.

use std::collections::HashMap;
use std::fmt;
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

/// Those who may be using a session's memory.
pub(crate) trait Users: Send + Sync {
    /// Makes sure that revoked memory is no longer touched. Waits for system calls and copies that
    /// are under way, never for a peer.
    fn revoke(&self);
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
    /// The interfaces that transfers of it use.
    pub(crate) near: InterfaceSet,
    pub(super) descriptor: RegionDescriptor,
    live: AtomicBool,
    /// The memory that this is a part of, under a key of its own.
    part_of: Option<Arc<Memory>>,
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

    /// Whether a peer that has the key may do this with the memory now.
    fn is_open_for(&self, op: Op) -> bool {
        self.is_live() && (op == Op::Read || self.part_of.is_none())
    }
}

/// One registration of memory; ends when it is dropped, if not before.
pub(super) struct Registration {
    pub(super) id: MemId,
    pub(super) memory: Arc<Memory>,
    registry: Weak<Registry>,
    ended: AtomicBool,
    ending: Mutex<()>,
    /// Keeps the engine's own buffer alive while it is registered. Belongs to the registration and
    /// not to the memory: another registration of the range keeps it by other means, or by none.
    _owner: Option<Buffer>,
}

impl Registration {
    pub(super) fn is_in_force(&self) -> bool {
        !self.ended.load(Ordering::Acquire)
    }

    pub(super) fn belongs_to(&self, registry: &Arc<Registry>) -> bool {
        std::ptr::eq(self.registry.as_ptr(), Arc::as_ptr(registry))
    }

    /// Ends it once; says whether this call did.
    pub(super) fn end(&self) -> bool {
        // Held to the end: for whoever comes second, too, the memory is no longer touched when this returns.
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

/// All registrations of a session.
pub(crate) struct Registry {
    /// Region keys are a keyed hash of the range under this secret: nobody can guess one, and the
    /// same range always has the same key.
    secret: [u8; 32],
    by_key: RwLock<HashMap<RegionKey, (Arc<Memory>, usize)>>,
    next_id: AtomicU64,
    /// Counts revocations, so that a chunk in flight need not look at its regions each time.
    epoch: AtomicU64,
    users: OnceLock<Weak<dyn Users>>,
}

impl Registry {
    pub(crate) fn new(secret: [u8; 32]) -> Arc<Self> {
        Arc::new(Self {
            secret,
            by_key: RwLock::new(Rank::Registry, HashMap::new()),
            next_id: AtomicU64::new(1),
            epoch: AtomicU64::new(0),
            users: OnceLock::new(),
        })
    }

    /// Says who uses the memory. Called once, before anybody does.
    pub(crate) fn set_users(&self, users: Weak<dyn Users>) {
        let first = self.users.set(users);
        debug_assert!(first.is_ok(), "a registry has its users once");
    }

    /// Makes sure that revoked memory is no longer touched.
    pub(crate) fn revoke(&self) {
        if let Some(users) = self.users.get().and_then(Weak::upgrade) {
            users.revoke();
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

    /// Opens a part of registered memory for READs of whoever has the new key, until
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

    /// The memory that a key stands for, if it may be read and written.
    pub(crate) fn find(&self, key: &RegionKey) -> Option<Arc<Memory>> {
        let by_key = self.by_key.read();
        let (memory, _) = by_key.get(key)?;
        memory.is_open_for(Op::Write).then(|| Arc::clone(memory))
    }

    /// A number that changes whenever memory is revoked.
    #[inline]
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    /// Grants access to every range of `table` or to none: fills `spans` in payload order (touching
    /// neighbours merged) and `memory` with what they belong to. An alias is open for READs alone.
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
    one_place(memory.iter().map(|memory| memory.device.as_ref()))
}

/// The one of these places, which must all be the same: a device, or none of them.
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

    /// What a peer is told whose access to our memory has failed with `error`.
    pub(crate) fn failed(error: &Error) -> Self {
        match error {
            Error::MemoryFault => Self::Fault,
            _ => Self::Device,
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

#[cfg(test)]
mod tests;
