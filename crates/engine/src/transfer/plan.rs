//! The plan of a transfer: segment lists become chunks, once.
//!
//! Blocks of device memory are put in order where that joins them (`order.rs`). Segments that are
//! adjacent on both sides are merged, small neighbours share a chunk, large segments are split. All
//! data that a lane sends for a chunk is laid out here (the table in wire format, the local spans),
//! so that posting does no work per segment.
//!
//! Pure: no I/O, no clock, no threads.

mod order;
mod overlap;
#[cfg(test)]
mod tests;

use std::any::Any;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use tcpx_cuda::Device;
use tcpx_net::Span;
use tcpx_proto::descriptor::RegionKey;
use tcpx_proto::frame::{
    ENTRY_BYTES, Entry, FrameError, Header, Kind, MAX_CHUNK_BYTES, MAX_TABLE_BYTES, REGION_BYTES,
    Table,
};
use tcpx_proto::lane::Op;

use self::overlap::Ranges;
use crate::config::staging::CHUNK_FACTOR;
use crate::error::Side;
use crate::memory::{InterfaceSet, Memory, MemoryKind, Place, is_same_place, push_merged};
use crate::sync::{Mutex, Rank};

/// Transfers below this size are not spread over more lanes:
/// a second lane costs more than it saves.
const MIN_SPREAD_BYTES: usize = 128 << 10;

/// As [`MIN_SPREAD_BYTES`], for staged memory: each chunk also costs copies of the device.
const MIN_STAGED_BYTES: usize = 256 << 10;

/// Number of chunks of staged memory per lane, so that the device copies some while the network
/// carries others.
const STAGED_CHUNKS: usize = 4;

/// Maximum local ranges of a chunk: as many as the peer can have, so that a chunk never consists of
/// a million ranges at one end.
const MAX_SPANS: usize = MAX_TABLE_BYTES / ENTRY_BYTES;

/// One piece of a transfer with both ends resolved.
#[derive(Clone, Copy, Debug)]
struct Piece {
    local: Span,
    /// Index of the memory that contains the piece.
    memory: u32,
    key: RegionKey,
    address: u64,
    group: u16,
}

/// Location of the memory of a chunk:
/// one place on each side, so that each side can move the chunk in one go.
#[derive(Debug)]
struct Group {
    device: Option<Arc<dyn Device>>,
    remote: MemoryKind,
}

impl Group {
    fn is_on_device(&self, side: Side) -> bool {
        match side {
            Side::Local => self.device.is_some(),
            Side::Remote => self.remote != MemoryKind::Host,
        }
    }

    /// Returns whether the bytes pass through pinned memory at either end.
    fn is_staged(&self) -> bool {
        self.is_on_device(Side::Local) || self.is_on_device(Side::Remote)
    }
}

/// The pieces of a transfer, in the order in which they were given.
#[derive(Debug, Default)]
pub(crate) struct Pieces {
    list: Vec<Piece>,
    /// The local memory that contains the pieces.
    memory: Vec<Arc<Memory>>,
    groups: Vec<Group>,
}

impl Pieces {
    pub(crate) fn with_capacity(pieces: usize) -> Self {
        Self {
            list: Vec::with_capacity(pieces),
            ..Self::default()
        }
    }

    /// Adds memory that contains pieces; returns its index, and whether it is new.
    pub(crate) fn add_memory(&mut self, memory: &Arc<Memory>) -> (u32, bool) {
        // Adjacent pieces usually share a region: search from the last one.
        let known = self.memory.iter().rposition(|m| Arc::ptr_eq(m, memory));
        if known.is_none() {
            self.memory.push(Arc::clone(memory));
        }
        let index = known.unwrap_or(self.memory.len() - 1);
        (index as u32, known.is_none())
    }

    /// Adds a piece: `local`, inside the memory with that index, and as many bytes at the peer's
    /// `address`, in memory of kind `remote`.
    pub(crate) fn push(
        &mut self,
        memory: u32,
        local: Span,
        key: RegionKey,
        address: u64,
        remote: MemoryKind,
    ) {
        let group = self.group(memory, remote);
        self.list.push(Piece {
            local,
            memory,
            key,
            address,
            group,
        });
    }

    /// Returns the interfaces that are nearest to any of the memory.
    pub(crate) fn near(&self) -> InterfaceSet {
        let near = self.memory.iter().map(|memory| memory.near);
        near.reduce(InterfaceSet::union)
            .unwrap_or(InterfaceSet::ALL)
    }

    /// Makes one piece of host memory, for tests that never touch it.
    #[cfg(test)]
    pub(crate) fn untouched(local: Span, address: u64) -> Self {
        let mut pieces = Self::unregistered(local, None);
        pieces.list[0].address = address;
        pieces
    }

    /// Makes one piece of device memory, for tests without a registry.
    #[cfg(test)]
    pub(crate) fn unregistered(local: Span, device: Option<&Arc<dyn Device>>) -> Self {
        let mut pieces = Self::default();
        pieces.groups.push(Group {
            device: device.cloned(),
            remote: MemoryKind::Host,
        });
        pieces.list.push(Piece {
            local,
            memory: 0,
            key: RegionKey([1; 16]),
            address: 0,
            group: 0,
        });
        pieces
    }

    fn group(&mut self, memory: u32, remote: MemoryKind) -> u16 {
        let device = self.memory[memory as usize].device.as_ref();
        let is_same =
            |group: &Group| group.remote == remote && is_same_place(group.device.as_ref(), device);
        let known = self.groups.iter().rposition(is_same);
        known.unwrap_or_else(|| {
            self.groups.push(Group {
                device: device.cloned(),
                remote,
            });
            self.groups.len() - 1
        }) as u16
    }
}

/// Limits for chunks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) chunk_bytes: usize,
    pub(crate) lanes: usize,
}

impl Limits {
    /// Returns the chunk size for memory of `group` in a transfer of `total` bytes: small transfers
    /// are split finer, so that every lane has a share, and several chunks of staged memory.
    fn chunk_bytes(&self, total: usize, group: &Group) -> usize {
        let (chunks, least, most) = if group.is_staged() {
            let most = (CHUNK_FACTOR * self.chunk_bytes).min(MAX_CHUNK_BYTES as usize);
            (STAGED_CHUNKS, MIN_STAGED_BYTES, most)
        } else {
            (1, MIN_SPREAD_BYTES, self.chunk_bytes)
        };
        let share = total.div_ceil(self.lanes.max(1) * chunks);
        share.next_multiple_of(4096).clamp(least.min(most), most)
    }
}

/// Layout of one chunk, the unit that one lane moves at once.
/// The ranges index into the plan's arrays.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    table: Range<usize>,
    spans: Range<usize>,
    pub(crate) regions: u16,
    pub(crate) entries: u32,
    pub(crate) bytes: usize,
    group: u16,
}

/// A transfer, laid out once and ready to be posted any number of times.
///
/// Immutable except for what is computed later (`remote`, `made`), so that any number of lanes and
/// postings share a plan without a lock.
pub(crate) struct Plan {
    pub(crate) op: Op,
    pub(crate) bytes: u64,
    chunks: Vec<Layout>,
    tables: Vec<u8>,
    spans: Vec<Span>,
    /// The local memory in use.
    memory: Vec<Arc<Memory>>,
    /// The interfaces to use: the union over all local memory.
    pub(crate) near: InterfaceSet,
    groups: Vec<Group>,
    /// Keys of the peer's regions in use, without duplicates.
    keys: Vec<RegionKey>,
    /// See [`Plan::remote_ranges`]; empty until somebody asks.
    remote: OnceLock<Ranges>,
    /// State that a link has derived from the plan, cached for the next posting.
    pub(crate) made: Mutex<Option<Arc<dyn Any + Send + Sync>>>,
}

impl Plan {
    /// Splits and combines `pieces` into chunks.
    pub(crate) fn new(op: Op, pieces: Pieces, limits: Limits) -> Self {
        let near = pieces.near();
        let Pieces {
            list: mut pieces,
            memory,
            groups,
        } = pieces;
        if groups.len() > 1 {
            // A chunk has memory of one group, so sort pieces by group.
            pieces.sort_by_key(|p| p.group);
        }
        for of_group in pieces.chunk_by_mut(|a, b| a.group == b.group) {
            let group = &groups[usize::from(of_group[0].group)];
            order::arrange(of_group, group, op);
        }
        let total: usize = pieces.iter().map(|p| p.local.len()).sum();
        let mut builder = Builder {
            limits,
            chunk_bytes: groups.first().map_or(0, |g| limits.chunk_bytes(total, g)),
            group: 0,
            keys: Vec::new(),
            entries: Vec::new(),
            last: None,
            open_bytes: 0,
            open_spans: 0,
            memory: 0,
            plan: Self {
                op,
                bytes: total as u64,
                chunks: Vec::new(),
                tables: Vec::with_capacity(pieces.len() * ENTRY_BYTES),
                spans: Vec::with_capacity(pieces.len()),
                memory,
                near,
                groups,
                keys: Vec::new(),
                remote: OnceLock::new(),
                made: Mutex::new(Rank::Neighbour, None),
            },
        };
        let mut pieces = pieces.iter().filter(|p| !p.local.is_empty()).copied();
        if let Some(mut run) = pieces.next() {
            for piece in pieces {
                match run.join(&piece) {
                    Some(joined) => run = joined,
                    None => {
                        builder.push(run);
                        run = piece;
                    }
                }
            }
            builder.push(run);
        }
        let mut plan = builder.finish();
        // An application may keep a million plans, most with one chunk: do not waste capacity.
        plan.chunks.shrink_to_fit();
        plan.tables.shrink_to_fit();
        plan.spans.shrink_to_fit();
        plan.memory.shrink_to_fit();
        plan.groups.shrink_to_fit();
        plan.keys.sort_unstable_by_key(|key| key.0);
        plan.keys.dedup();
        plan.keys.shrink_to_fit();
        plan
    }

    /// Returns the number of chunks; 0 if there are no bytes to move.
    pub(crate) fn len(&self) -> usize {
        self.chunks.len()
    }

    pub(crate) fn layout(&self, index: usize) -> &Layout {
        &self.chunks[index]
    }

    /// Returns the table of a chunk in wire format.
    pub(crate) fn table(&self, chunk: &Layout) -> &[u8] {
        &self.tables[chunk.table.clone()]
    }

    /// Decodes the table of a chunk, as the peer that owns the memory would.
    pub(crate) fn read_table(&self, chunk: &Layout) -> Result<Table<'_>, FrameError> {
        let header = Header {
            regions: chunk.regions,
            entries: chunk.entries,
            payload: chunk.bytes as u64,
            ..Header::new(Kind::Write, 0)
        };
        Table::decode(&header, self.table(chunk))
    }

    /// Returns the local memory of a chunk.
    pub(crate) fn spans(&self, chunk: &Layout) -> &[Span] {
        &self.spans[chunk.spans.clone()]
    }

    /// Returns the device that holds the local memory of a chunk, if sockets cannot access it.
    pub(crate) fn device(&self, chunk: &Layout) -> Option<&Arc<dyn Device>> {
        self.groups[chunk.group as usize].device.as_ref()
    }

    /// Returns the keys of the peer's regions in use.
    pub(crate) fn keys(&self) -> &[RegionKey] {
        &self.keys
    }

    /// Returns whether any bytes pass through pinned memory at either end.
    pub(crate) fn has_devices(&self) -> bool {
        self.groups.iter().any(Group::is_staged)
    }

    /// Returns whether two ranges of local memory lie in the same registered memory.
    pub(crate) fn is_in_one_region(&self, a: &tcpx_cuda::Range, b: &tcpx_cuda::Range) -> bool {
        let has = |memory: &Memory, range: &tcpx_cuda::Range| {
            let first = memory.span.address();
            (first..first + memory.span.len()).contains(&range.address)
        };
        let mut memory = self.memory.iter();
        memory.any(|memory| has(memory, a) && has(memory, b))
    }

    /// Returns the device that holds all local memory, if all remote memory is on devices as well.
    pub(crate) fn only_device(&self) -> Option<&Arc<dyn Device>> {
        let first = self.groups.first()?.device.as_ref()?;
        let mut groups = self.groups.iter();
        let is_same = |group: &Group| {
            group.remote != MemoryKind::Host && is_same_place(group.device.as_ref(), Some(first))
        };
        groups.all(is_same).then_some(first)
    }

    /// Returns the location of the local memory of a chunk.
    pub(crate) fn place(&self, chunk: &Layout) -> Place<'_> {
        Place {
            spans: self.spans(chunk),
            device: self.device(chunk),
            memory: &self.memory,
        }
    }

    /// Returns the first local memory that was revoked.
    pub(crate) fn revoked(&self) -> Option<&Memory> {
        self.memory.iter().map(Arc::as_ref).find(|m| !m.is_live())
    }
}

impl Piece {
    /// Merges two pieces that are adjacent on both sides.
    fn join(&self, next: &Self) -> Option<Self> {
        let touches = self.group == next.group
            && self.touches(next, Side::Local)
            && self.touches(next, Side::Remote);
        let local = touches.then(|| self.local.join(next.local))??;
        Some(Self { local, ..*self })
    }

    /// Returns whether the next piece begins where this one ends, in the same region.
    fn touches(&self, next: &Self, side: Side) -> bool {
        let end = self.start(side).checked_add(self.local.len() as u64);
        end == Some(next.start(side))
            && match side {
                Side::Local => self.memory == next.memory,
                Side::Remote => self.key == next.key,
            }
    }

    fn start(&self, side: Side) -> u64 {
        match side {
            Side::Local => self.local.address() as u64,
            Side::Remote => self.address,
        }
    }
}

struct Builder {
    limits: Limits,
    /// Chunk size for memory of the current group.
    chunk_bytes: usize,
    // The chunk being filled; `keys` and `entries` together never exceed MAX_TABLE_BYTES.
    keys: Vec<RegionKey>,
    entries: Vec<u8>,
    /// The last of `entries`.
    last: Option<Entry>,
    open_bytes: usize,
    open_spans: usize,
    group: u16,
    /// Index of the memory that contains the last span.
    memory: u32,
    plan: Plan,
}

impl Builder {
    fn push(&mut self, piece: Piece) {
        if piece.group != self.group {
            self.close();
            self.group = piece.group;
            let group = &self.plan.groups[usize::from(piece.group)];
            self.chunk_bytes = self.limits.chunk_bytes(self.plan.bytes as usize, group);
        }
        let mut offset = 0;
        while offset < piece.local.len() {
            let left = piece.local.len() - offset;
            let room = self.chunk_bytes - self.open_bytes;
            // A block that fits into one chunk is not split to fill the current chunk.
            let worth_cutting = left > self.chunk_bytes || self.open_bytes < self.chunk_bytes / 2;
            if room == 0 || (left > room && !worth_cutting) {
                self.close();
                continue;
            }
            let Some(region) = self.region(piece.key) else {
                self.close();
                continue;
            };
            let len = left.min(room);
            self.push_entry(Entry {
                address: piece.address + offset as u64,
                // A chunk has at most MAX_CHUNK_BYTES, far below 4 GiB.
                len: len as u32,
                region,
            });
            let span = piece.local.slice(offset, len).expect("within the piece");
            self.push_span(span, piece.memory);
            self.open_bytes += len;
            offset += len;
        }
    }

    /// Returns the index of `key` in the open table, or `None` if the table or the list of local
    /// ranges is full.
    fn region(&mut self, key: RegionKey) -> Option<u32> {
        if self.plan.spans.len() - self.open_spans >= MAX_SPANS {
            return None;
        }
        let used = self.keys.len() * REGION_BYTES + self.entries.len() + ENTRY_BYTES;
        // Pieces usually share a region with the one before, or go through all regions in turns:
        // search from the last one on.
        let (before, from) = self
            .keys
            .split_at(self.last.map_or(0, |l| l.region as usize));
        let is_key = |known: &RegionKey| *known == key;
        let known = from.iter().position(is_key).map(|at| before.len() + at);
        if let Some(index) = known.or_else(|| before.iter().position(is_key)) {
            return (used <= MAX_TABLE_BYTES).then_some(index as u32);
        }
        (used + REGION_BYTES <= MAX_TABLE_BYTES).then(|| {
            self.keys.push(key);
            self.plan.keys.push(key);
            (self.keys.len() - 1) as u32
        })
    }

    /// Adds an entry to the open table, joined to the last one if they are adjacent.
    fn push_entry(&mut self, mut entry: Entry) {
        if let Some(last) = self.last
            && last.region == entry.region
            && last.address.checked_add(u64::from(last.len)) == Some(entry.address)
        {
            entry = Entry {
                len: last.len + entry.len,
                ..last
            };
            self.entries.truncate(self.entries.len() - ENTRY_BYTES);
        }
        entry.encode(&mut self.entries);
        self.last = Some(entry);
    }

    fn push_span(&mut self, span: Span, memory: u32) {
        let is_host = self.plan.groups[usize::from(self.group)].device.is_none();
        // A device does not copy across allocations,
        // and adjacent regions may be separate allocations.
        let may_join = is_host || self.memory == memory;
        self.memory = memory;
        if may_join && self.plan.spans.len() > self.open_spans {
            push_merged(&mut self.plan.spans, span);
        } else {
            // Never joined to the last span of the previous chunk.
            self.plan.spans.push(span);
        }
    }

    fn close(&mut self) {
        if self.open_bytes == 0 {
            return;
        }
        let plan = &mut self.plan;
        let table = plan.tables.len();
        for key in &self.keys {
            plan.tables.extend_from_slice(&key.0);
        }
        plan.tables.extend_from_slice(&self.entries);
        plan.chunks.push(Layout {
            table: table..plan.tables.len(),
            spans: self.open_spans..plan.spans.len(),
            regions: self.keys.len() as u16,
            entries: (self.entries.len() / ENTRY_BYTES) as u32,
            bytes: self.open_bytes,
            group: self.group,
        });
        self.keys.clear();
        self.entries.clear();
        self.last = None;
        self.open_bytes = 0;
        self.open_spans = plan.spans.len();
    }

    fn finish(mut self) -> Plan {
        self.close();
        self.plan
    }
}
