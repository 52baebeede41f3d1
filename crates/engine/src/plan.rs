//! The plan of a transfer: segment lists become chunks, once.
//!
//! Small neighbours share a chunk, large segments are cut, segments that touch on both sides are one.
//! Everything a lane sends for a chunk is laid out here (the table in wire format, the local spans), so
//! that posting, and posting again, does no work per segment.
//!
//! Pure: no I/O, no clock, no threads.

use std::ops::Range;
use std::sync::Arc;

use tcpx_cuda::Device;
use tcpx_net::Span;
use tcpx_proto::descriptor::RegionKey;
use tcpx_proto::frame::{ENTRY_BYTES, Entry, MAX_CHUNK_BYTES, MAX_TABLE_BYTES, REGION_BYTES};

use crate::region::{Memory, MemoryKind, push_merged};
use crate::staging::{CHUNK_FACTOR, is_same_place};

/// The direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// From the peer's memory into ours.
    Read,
    /// From our memory into the peer's.
    Write,
}

/// Below this a transfer is not spread over more lanes: a second lane costs more than it saves.
const MIN_SPREAD_BYTES: usize = 128 << 10;

/// One piece of a transfer with both ends resolved.
#[derive(Clone, Copy, Debug)]
struct Piece {
    local: Span,
    /// Which of the pieces' memory it lies in.
    memory: u32,
    key: RegionKey,
    address: u64,
    group: u16,
}

/// Where the memory of a chunk lies: all of it in one place on either side, so that each side can move it in
/// one go.
#[derive(Debug)]
struct Group {
    device: Option<Arc<dyn Device>>,
    remote: MemoryKind,
}

impl Group {
    /// Whether its bytes pass through pinned memory at either end.
    fn is_staged(&self) -> bool {
        self.device.is_some() || self.remote != MemoryKind::Host
    }
}

/// The pieces of a transfer, in the order in which they were given.
#[derive(Debug, Default)]
pub(crate) struct Pieces {
    list: Vec<Piece>,
    /// The local memory that they lie in.
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

    /// Notes memory that pieces lie in; returns its number, and whether it is new.
    pub(crate) fn add_memory(&mut self, memory: &Arc<Memory>) -> (u32, bool) {
        // Neighbours mostly share a region: the last one is the likeliest.
        let known = self.memory.iter().rposition(|m| Arc::ptr_eq(m, memory));
        if known.is_none() {
            self.memory.push(Arc::clone(memory));
        }
        let index = known.unwrap_or(self.memory.len() - 1);
        (index as u32, known.is_none())
    }

    /// Adds a piece: `local`, inside the memory of that number, and as many bytes at the peer's `address`, in memory of kind `remote`.
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

    /// One piece of host memory, for tests that never touch it.
    #[cfg(test)]
    pub(crate) fn untouched(local: Span) -> Self {
        let mut pieces = Self::default();
        pieces.groups.push(Group {
            device: None,
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

/// What chunks may be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) chunk_bytes: usize,
    pub(crate) lanes: usize,
}

impl Limits {
    /// The chunk size for memory of `group` in a transfer of `total` bytes: small transfers are cut finer, so that
    /// every lane has a share.
    fn chunk_bytes(&self, total: usize, group: &Group) -> usize {
        let most = if group.is_staged() {
            (CHUNK_FACTOR * self.chunk_bytes).min(MAX_CHUNK_BYTES as usize)
        } else {
            self.chunk_bytes
        };
        let share = total.div_ceil(self.lanes.max(1)).next_multiple_of(4096);
        share.clamp(MIN_SPREAD_BYTES.min(most), most)
    }
}

/// What one lane moves at once. The ranges index into the plan's arrays.
#[derive(Clone, Debug)]
pub(crate) struct Chunk {
    table: Range<usize>,
    spans: Range<usize>,
    pub(crate) regions: u16,
    pub(crate) entries: u32,
    pub(crate) bytes: usize,
    group: u16,
}

/// A transfer, ready to be posted any number of times.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) op: Op,
    pub(crate) bytes: u64,
    chunks: Vec<Chunk>,
    tables: Vec<u8>,
    spans: Vec<Span>,
    /// The local memory that is used.
    memory: Vec<Arc<Memory>>,
    groups: Vec<Group>,
}

impl Plan {
    /// Cuts and gathers `pieces` into chunks.
    pub(crate) fn new(op: Op, pieces: Pieces, limits: Limits) -> Self {
        let Pieces {
            list: mut pieces,
            memory,
            groups,
        } = pieces;
        if groups.len() > 1 {
            // A chunk has memory of one group: those of a group belong together.
            pieces.sort_by_key(|p| p.group);
        }
        let total: usize = pieces.iter().map(|p| p.local.len()).sum();
        let mut builder = Builder {
            limits,
            chunk_bytes: groups.first().map_or(0, |g| limits.chunk_bytes(total, g)),
            group: 0,
            keys: Vec::new(),
            entries: Vec::new(),
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
                groups,
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
        builder.finish()
    }

    /// How many chunks there are; none when no byte is to be moved.
    pub(crate) fn len(&self) -> usize {
        self.chunks.len()
    }

    pub(crate) fn chunk(&self, index: usize) -> &Chunk {
        &self.chunks[index]
    }

    /// The table of a chunk, as it goes on the wire.
    pub(crate) fn table(&self, chunk: &Chunk) -> &[u8] {
        &self.tables[chunk.table.clone()]
    }

    /// The local memory of a chunk.
    pub(crate) fn spans(&self, chunk: &Chunk) -> &[Span] {
        &self.spans[chunk.spans.clone()]
    }

    /// The device that the local memory of a chunk lies on, if sockets cannot reach it.
    pub(crate) fn device(&self, chunk: &Chunk) -> Option<&Arc<dyn Device>> {
        self.groups[chunk.group as usize].device.as_ref()
    }

    /// The local memory that the chunks use.
    pub(crate) fn memory(&self) -> &[Arc<Memory>] {
        &self.memory
    }

    /// Whether local memory lies on a device.
    pub(crate) fn has_device(&self) -> bool {
        self.groups.iter().any(|group| group.device.is_some())
    }

    /// The first local memory that may no longer be touched.
    pub(crate) fn revoked(&self) -> Option<&Memory> {
        self.memory.iter().map(Arc::as_ref).find(|m| !m.is_live())
    }
}

impl Piece {
    /// Both as one, when they touch on both sides.
    fn join(&self, next: &Self) -> Option<Self> {
        let touches = self.address.checked_add(self.local.len() as u64) == Some(next.address)
            && self.key == next.key
            && self.memory == next.memory
            && self.group == next.group;
        let local = touches.then(|| self.local.join(next.local))??;
        Some(Self { local, ..*self })
    }
}

struct Builder {
    limits: Limits,
    /// For memory of the current group.
    chunk_bytes: usize,
    // The chunk that is being filled; `keys` and `entries` together never exceed MAX_TABLE_BYTES.
    keys: Vec<RegionKey>,
    entries: Vec<u8>,
    open_bytes: usize,
    open_spans: usize,
    group: u16,
    /// What the last span lies in.
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
            // A block that fits a chunk of its own is not cut to fill up this one.
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
            let entry = Entry {
                address: piece.address + offset as u64,
                // A chunk has at most MAX_CHUNK_BYTES, far below 4 GiB.
                len: len as u32,
                region,
            };
            entry.encode(&mut self.entries);
            let span = piece.local.slice(offset, len).expect("within the piece");
            self.push_span(span, piece.memory);
            self.open_bytes += len;
            offset += len;
        }
    }

    /// The index of `key` in the open table, or `None` when the table is full.
    fn region(&mut self, key: RegionKey) -> Option<u32> {
        let used = self.keys.len() * REGION_BYTES + self.entries.len() + ENTRY_BYTES;
        // Neighbours mostly share a region: the last one is the likeliest.
        if let Some(index) = self.keys.iter().rposition(|k| *k == key) {
            return (used <= MAX_TABLE_BYTES).then_some(index as u32);
        }
        (used + REGION_BYTES <= MAX_TABLE_BYTES).then(|| {
            self.keys.push(key);
            (self.keys.len() - 1) as u32
        })
    }

    fn push_span(&mut self, span: Span, memory: u32) {
        let is_host = self.plan.groups[usize::from(self.group)].device.is_none();
        // A device does not copy across allocations, which regions of their own may be though they touch.
        let may_join = is_host || self.memory == memory;
        self.memory = memory;
        if may_join && self.plan.spans.len() > self.open_spans {
            push_merged(&mut self.plan.spans, span);
        } else {
            // Never joined to the last span of the chunk before.
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
        plan.chunks.push(Chunk {
            table: table..plan.tables.len(),
            spans: self.open_spans..plan.spans.len(),
            regions: self.keys.len() as u16,
            entries: (self.entries.len() / ENTRY_BYTES) as u32,
            bytes: self.open_bytes,
            group: self.group,
        });
        self.keys.clear();
        self.entries.clear();
        self.open_bytes = 0;
        self.open_spans = plan.spans.len();
    }

    fn finish(mut self) -> Plan {
        self.close();
        self.plan
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tcpx_proto::frame::{Header, Kind, Table};

    /// Spans are only compared and cut here, never read.
    fn span(address: usize, len: usize) -> Span {
        // SAFETY: nothing in these tests accesses the memory.
        unsafe { Span::new(address as *mut u8, len) }
    }

    fn key(n: u8) -> RegionKey {
        RegionKey([n; 16])
    }

    fn piece(local: usize, remote: u64, len: usize, region: u8) -> Piece {
        Piece {
            local: span(local, len),
            memory: 0,
            key: key(region),
            address: remote,
            group: 0,
        }
    }

    /// The first is host memory at both ends.
    fn groups(count: u32) -> Vec<Group> {
        let remote = |group| match group {
            0 => MemoryKind::Host,
            device => MemoryKind::Cuda { device },
        };
        (0..count)
            .map(|group| Group {
                device: None,
                remote: remote(group),
            })
            .collect()
    }

    fn plan(pieces: &[Piece], chunk_bytes: usize, lanes: usize) -> Plan {
        let pieces = Pieces {
            list: pieces.to_vec(),
            memory: Vec::new(),
            groups: groups(3),
        };
        Plan::new(Op::Write, pieces, Limits { chunk_bytes, lanes })
    }

    #[test]
    fn a_device_does_not_copy_across_regions_that_touch() {
        let other = Piece {
            memory: 1,
            ..piece(1100, 0x2000, 100, 1)
        };
        let list = vec![piece(1000, 0x5000, 100, 1), other];
        let spans = |device: Option<Arc<dyn Device>>| {
            let mut pieces = Pieces {
                list: list.clone(),
                memory: Vec::new(),
                groups: groups(1),
            };
            pieces.groups[0].device = device;
            let limits = Limits {
                chunk_bytes: 1 << 20,
                lanes: 1,
            };
            Plan::new(Op::Write, pieces, limits).spans.len()
        };
        assert_eq!(spans(None), 1);
        assert_eq!(spans(Some(Arc::new(tcpx_cuda::StandIn::new(1)))), 2);
    }

    /// Every byte of a plan as (local, region, remote), in order.
    fn bytes_of(plan: &Plan) -> Vec<(usize, RegionKey, u64)> {
        let mut out = Vec::new();
        for i in 0..plan.len() {
            let chunk = plan.chunk(i);
            let header = Header {
                regions: chunk.regions,
                entries: chunk.entries,
                payload: chunk.bytes as u64,
                ..Header::new(Kind::Write, 1)
            };
            let table = Table::decode(&header, plan.table(chunk)).expect("a valid table");
            let keys: Vec<_> = table.regions().collect();
            let local = plan
                .spans(chunk)
                .iter()
                .flat_map(|s| (0..s.len()).map(move |i| s.address() + i));
            let remote = table.entries().flat_map(|e| {
                let key = keys[e.region as usize];
                (0..u64::from(e.len)).map(move |i| (key, e.address + i))
            });
            let (local, remote): (Vec<_>, Vec<_>) = (local.collect(), remote.collect());
            assert_eq!(
                local.len(),
                remote.len(),
                "both sides of a chunk have its bytes"
            );
            assert_eq!(local.len(), chunk.bytes);
            out.extend(local.into_iter().zip(remote).map(|(l, (k, r))| (l, k, r)));
        }
        out
    }

    proptest! {
        #[test]
        fn every_byte_is_moved_once_in_order_and_within_limits(
            segments in prop::collection::vec(
                (0..50usize, 0..50u64, 0..5000usize, 0..3u8), 0..60),
            chunk_bytes in 16usize..9000,
            lanes in 1usize..9,
        ) {
            let pieces: Vec<_> = segments
                .iter()
                .map(|&(l, r, len, key)| piece(l * 1000 + 4096, r * 1000, len, key))
                .collect();
            let plan = plan(&pieces, chunk_bytes, lanes);
            let expected: Vec<_> = pieces
                .iter()
                .flat_map(|p| (0..p.local.len()).map(|i| (p.local.address() + i, p.key, p.address + i as u64)))
                .collect();
            prop_assert_eq!(bytes_of(&plan), expected);
            for i in 0..plan.len() {
                let chunk = plan.chunk(i);
                prop_assert!(chunk.bytes > 0 && chunk.bytes <= chunk_bytes);
                prop_assert!(plan.table(chunk).len() <= MAX_TABLE_BYTES);
            }
        }
    }

    proptest! {
        #[test]
        fn chunks_have_memory_of_one_kind_and_none_is_lost(
            segments in prop::collection::vec((0..50usize, 0..3000usize, 0..3u16), 0..60),
            chunk_bytes in 16usize..9000,
        ) {
            let pieces: Vec<_> = segments
                .iter()
                .enumerate()
                .map(|(i, &(l, len, group))| Piece {
                    group,
                    ..piece(l * 1000 + 4096, i as u64 * 10_000, len, 1)
                })
                .collect();
            let plan = plan(&pieces, chunk_bytes, 2);
            let group_of = |address: u64| pieces[(address / 10_000) as usize].group;
            for i in 0..plan.len() {
                let only = Plan { chunks: vec![plan.chunk(i).clone()], ..plan_parts(&plan) };
                let of_chunk = bytes_of(&only);
                prop_assert!(of_chunk.iter().all(|(_, _, r)| group_of(*r) == plan.chunk(i).group));
            }
            let mut moved = bytes_of(&plan);
            let mut expected: Vec<_> = pieces
                .iter()
                .flat_map(|p| (0..p.local.len()).map(|i| (p.local.address() + i, p.key, p.address + i as u64)))
                .collect();
            moved.sort_unstable_by_key(|(l, _, r)| (*r, *l));
            expected.sort_unstable_by_key(|(l, _, r)| (*r, *l));
            prop_assert_eq!(moved, expected);
        }
    }

    /// A plan with the same arrays, for looking at single chunks.
    fn plan_parts(plan: &Plan) -> Plan {
        Plan {
            op: plan.op,
            bytes: plan.bytes,
            chunks: Vec::new(),
            tables: plan.tables.clone(),
            spans: plan.spans.clone(),
            memory: Vec::new(),
            groups: groups(3),
        }
    }

    #[test]
    fn touching_segments_are_one() {
        let pieces: Vec<_> = (0..64)
            .map(|i| piece(4096 + i * 100, 7000 + i as u64 * 100, 100, 1))
            .collect();
        let plan = plan(&pieces, 1 << 20, 1);
        assert_eq!((plan.len(), plan.chunk(0).entries), (1, 1));
        assert_eq!(plan.spans(plan.chunk(0)).len(), 1);
    }

    #[test]
    fn small_blocks_share_chunks_and_stay_whole() {
        let pieces: Vec<_> = (0..4096)
            .map(|i| piece(4096 + i * 40_000, i as u64 * 50_000, 16 << 10, 1))
            .collect();
        let plan = plan(&pieces, 1 << 20, 1);
        assert_eq!(plan.len(), 64, "64 MiB in chunks of 1 MiB");
        assert!((0..plan.len()).all(|i| plan.chunk(i).entries == 64));
    }

    #[test]
    fn a_full_table_ends_a_chunk() {
        let pieces: Vec<_> = (0..2000)
            .map(|i| piece(4096 + i * 2, i as u64 * 3, 1, 1))
            .collect();
        let plan = plan(&pieces, 1 << 20, 1);
        assert_eq!(
            plan.chunk(0).entries as usize,
            (MAX_TABLE_BYTES - REGION_BYTES) / ENTRY_BYTES
        );
    }

    #[test]
    fn a_small_transfer_is_spread_over_the_lanes() {
        assert_eq!(plan(&[piece(4096, 0, 2 << 20, 1)], 1 << 20, 8).len(), 8);
        assert_eq!(plan(&[piece(4096, 0, 64 << 10, 1)], 1 << 20, 8).len(), 1);
        assert_eq!(plan(&[piece(4096, 0, 64 << 20, 1)], 1 << 20, 8).len(), 64);
    }

    #[test]
    fn memory_of_devices_is_cut_into_longer_chunks() {
        let len = 16 << 20;
        let on = |group| Piece {
            group,
            ..piece(4096 + usize::from(group) * len, 0, len, 1)
        };
        let plan = plan(&[on(0), on(1), on(0)], 1 << 20, 2);
        let lengths: Vec<_> = (0..plan.len())
            .map(|i| (plan.chunk(i).group, plan.chunk(i).bytes >> 20))
            .collect();
        let expected = [vec![(0, 1); 32], vec![(1, CHUNK_FACTOR); 16 / CHUNK_FACTOR]];
        assert_eq!(lengths, expected.concat());
    }

    #[test]
    fn no_bytes_make_no_chunks() {
        assert_eq!(plan(&[piece(4096, 0, 0, 1)], 1 << 20, 4).len(), 0);
        assert_eq!(plan(&[], 1 << 20, 4).len(), 0);
    }
}
