//! Every byte is planned once, in chunks that lanes can move.

mod places;

use super::*;
use crate::memory::nearness_tests::{GPUS, nics, two_sockets};
use crate::memory::{Nearness, Registry, Staging};
use crate::trace::Trace;
use crate::{Buffer, Config, Region};
use proptest::prelude::*;
use tcpx_cuda::StandIn;
use tcpx_proto::frame::{Header, Kind, Table};

/// Spans are only compared and cut here, never read.
fn span(address: usize, len: usize) -> Span {
    // SAFETY: nothing in these tests accesses the memory.
    unsafe { Span::new(address as *mut u8, len) }
}

fn key(n: u8) -> RegionKey {
    RegionKey([n; 16])
}

pub(super) fn piece(local: usize, remote: u64, len: usize, region: u8) -> Piece {
    Piece {
        local: span(local, len),
        memory: 0,
        key: key(region),
        address: remote,
        group: 0,
    }
}

/// Makes groups; the first is host memory at both ends.
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

pub(super) fn plan(pieces: &[Piece], chunk_bytes: usize, lanes: usize) -> Plan {
    let pieces = Pieces {
        list: pieces.to_vec(),
        memory: Vec::new(),
        groups: groups(3),
    };
    Plan::new(Op::Write, pieces, Limits { chunk_bytes, lanes })
}

#[test]
fn device_does_not_copy_across_adjacent_regions() {
    let other = Piece {
        memory: 1,
        ..piece(1100, 0x2000, 100, 1)
    };
    let spans = |remote: u64, device: Option<Arc<dyn Device>>| {
        let mut pieces = Pieces {
            list: vec![piece(1000, remote, 100, 1), other],
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
    // Whether or not the pieces are adjacent in the peer's memory, too.
    for remote in [0x5000, 0x2000 - 100] {
        assert_eq!(spans(remote, None), 1);
        assert_eq!(spans(remote, Some(Arc::new(StandIn::new(1)))), 2);
    }
}

#[test]
fn a_plan_uses_the_interfaces_nearest_to_any_of_its_memory() {
    let tree = two_sockets();
    let staging = |gpu: Option<u32>| {
        let config = Config::defaults();
        let nearness = Nearness::new(&config, &nics(tree.path()), tree.path());
        let staging = Staging::new(&config, nearness, &Trace::default());
        match gpu {
            Some(gpu) => staging.on(StandIn::new(1).at(GPUS[gpu as usize], gpu)),
            None => staging,
        }
    };
    let registry = Registry::new([7; 32]);
    let buffers = [0; 3].map(|_| Buffer::new(100));
    let memory = [Some(0), Some(1), None].map(|gpu: Option<u32>| {
        let span = buffers[gpu.map_or(2, |gpu| gpu as usize)].span();
        registry
            .add(&staging(gpu), span, MemoryKind::Host, None)
            .unwrap()
    });
    let near = |used: &[usize]| {
        let mut pieces = Pieces::default();
        for &index in used {
            let memory = memory[index].memory();
            let (number, _) = pieces.add_memory(memory);
            pieces.push(number, memory.span, key(1), 0, MemoryKind::Host);
        }
        let limits = Limits {
            chunk_bytes: 1 << 20,
            lanes: 1,
        };
        Plan::new(Op::Write, pieces, limits).near
    };
    let [first, second] = [0, 1].map(InterfaceSet::one);
    assert_eq!((near(&[0]), near(&[1])), (first, second));
    assert_eq!(near(&[1, 0]), first.union(second));
    assert_eq!(near(&[0, 2]), InterfaceSet::ALL);
    assert_eq!(near(&[2]), InterfaceSet::ALL);
    assert_eq!(near(&[]), InterfaceSet::ALL);
    // An alias, as a tagged message uses, has the interfaces of the whole region.
    let alias = registry.add_alias(memory[1].memory(), memory[1].memory().span);
    assert_eq!(alias.near, second);
}

/// Returns every byte of a plan as (local, region, remote), in the order of moving.
fn bytes_of(plan: &Plan) -> Vec<(usize, RegionKey, u64)> {
    let mut out = Vec::new();
    for i in 0..plan.len() {
        let chunk = plan.layout(i);
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
    fn every_byte_is_moved_once_and_within_limits(
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
        let expected = pieces
            .iter()
            .flat_map(|p| (0..p.local.len()).map(|i| (p.local.address() + i, p.key, p.address + i as u64)));
        let sorted = |mut bytes: Vec<(usize, RegionKey, u64)>| {
            bytes.sort_unstable_by_key(|(local, key, remote)| (*local, key.0, *remote));
            bytes
        };
        prop_assert_eq!(sorted(bytes_of(&plan)), sorted(expected.collect()));
        for i in 0..plan.len() {
            let chunk = plan.layout(i);
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
            let only = Plan { chunks: vec![plan.layout(i).clone()], ..plan_parts(&plan) };
            let of_chunk = bytes_of(&only);
            prop_assert!(of_chunk.iter().all(|(_, _, r)| group_of(*r) == plan.layout(i).group));
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

/// Returns a plan with the same arrays and no chunks, to check single chunks.
fn plan_parts(plan: &Plan) -> Plan {
    Plan {
        op: plan.op,
        bytes: plan.bytes,
        chunks: Vec::new(),
        tables: plan.tables.clone(),
        spans: plan.spans.clone(),
        memory: Vec::new(),
        near: plan.near,
        groups: groups(3),
        keys: Vec::new(),
        remote: OnceLock::new(),
        made: Mutex::new(Rank::Leaf, None),
    }
}

#[test]
fn adjacent_segments_are_merged() {
    let pieces: Vec<_> = (0..64)
        .map(|i| piece(4096 + i * 100, 7000 + i as u64 * 100, 100, 1))
        .collect();
    let plan = plan(&pieces, 1 << 20, 1);
    assert_eq!((plan.len(), plan.layout(0).entries), (1, 1));
    assert_eq!(plan.spans(plan.layout(0)).len(), 1);
}

/// As if they were one: the peer checks one entry.
#[test]
fn segments_that_are_adjacent_at_one_end_are_one_range_there() {
    let there = |i: u64| piece(4096 + i as usize * 200, 7000 + i * 100, 100, 1);
    let pieces: Vec<_> = (0..64).map(there).collect();
    let remote = plan(&pieces, 1 << 20, 1);
    let chunk = remote.layout(0);
    assert_eq!((remote.len(), chunk.entries), (1, 1));
    assert_eq!(remote.spans(chunk).len(), 64);
    // Not across regions, and not from one chunk to the next.
    let two_regions = [piece(4096, 7000, 100, 1), piece(9000, 7100, 100, 2)];
    assert_eq!(plan(&two_regions, 1 << 20, 1).layout(0).entries, 2);
    let cut = plan(&pieces, 3200, 1);
    assert_eq!((cut.len(), cut.layout(1).entries), (2, 1));
    assert_eq!(bytes_of(&cut), bytes_of(&remote));
}

#[test]
fn a_chunk_has_no_more_ranges_here_than_there() {
    let pieces: Vec<_> = (0..2000)
        .map(|i| piece(4096 + i * 2, i as u64, 1, 1))
        .collect();
    let plan = plan(&pieces, 1 << 20, 1);
    assert_eq!(plan.spans(plan.layout(0)).len(), MAX_SPANS);
    assert_eq!(plan.len(), 2000_usize.div_ceil(MAX_SPANS));
    assert_eq!(bytes_of(&plan).len(), 2000);
}

#[test]
fn blocks_of_a_device_are_moved_in_the_order_of_its_memory() {
    let backwards: Vec<_> = (0..64)
        .rev()
        .map(|i| Piece {
            group: 1,
            ..piece(4096 + i * 300, i as u64 * 100, 100, 1)
        })
        .collect();
    let plan = plan(&backwards, 1 << 20, 1);
    assert_eq!((plan.len(), plan.layout(0).entries), (1, 1));
    let remote = bytes_of(&plan).into_iter().map(|(_, _, remote)| remote);
    assert_eq!(remote.collect::<Vec<_>>(), (0..6400).collect::<Vec<_>>());
}

#[test]
fn only_pieces_that_are_adjacent_on_both_sides_are_merged() {
    let first = piece(4096, 7000, 100, 1);
    let next = piece(4196, 7100, 100, 1);
    let joined = first.join(&next).unwrap();
    assert_eq!((joined.local.address(), joined.local.len()), (4096, 200));
    assert_eq!(joined.address, 7000);
    let others = [
        piece(4197, 7100, 100, 1),
        piece(4195, 7100, 100, 1),
        piece(4196, 7101, 100, 1),
        piece(4196, 7099, 100, 1),
        piece(4196, 7100, 100, 2),
        Piece { memory: 1, ..next },
        Piece { group: 1, ..next },
    ];
    for other in others {
        assert!(first.join(&other).is_none(), "{other:?}");
    }
}

#[test]
fn small_blocks_share_chunks_and_stay_whole() {
    let pieces: Vec<_> = (0..4096)
        .map(|i| piece(4096 + i * 40_000, i as u64 * 50_000, 16 << 10, 1))
        .collect();
    let plan = plan(&pieces, 1 << 20, 1);
    assert_eq!(plan.len(), 64, "64 MiB in chunks of 1 MiB");
    assert!((0..plan.len()).all(|i| plan.layout(i).entries == 64));
}

#[test]
fn a_full_table_ends_a_chunk() {
    let pieces: Vec<_> = (0..2000)
        .map(|i| piece(4096 + i * 2, i as u64 * 3, 1, 1))
        .collect();
    let plan = plan(&pieces, 1 << 20, 1);
    assert_eq!(
        plan.layout(0).entries as usize,
        (MAX_TABLE_BYTES - REGION_BYTES) / ENTRY_BYTES
    );
}

/// A table has the keys of its regions as well, each once.
#[test]
fn keys_count_in_a_full_table() {
    let list = |keys: usize| -> Vec<_> {
        let key = |i: usize| RegionKey((i as u128 % keys as u128).to_le_bytes());
        let piece = |i: usize| Piece {
            key: key(i),
            ..piece(4096 + i * 2, i as u64 * 3, 1, 1)
        };
        (0..2000).map(piece).collect()
    };
    for keys in [1, 2, 3, 100, 255, 256, 257, 2000] {
        let plan = plan(&list(keys), 1 << 20, 1);
        let first = plan.layout(0);
        let used = |entries: usize| entries.min(keys) * REGION_BYTES + entries * ENTRY_BYTES;
        let most = (1..).take_while(|&entries| used(entries) <= MAX_TABLE_BYTES);
        let most = most.last().unwrap();
        assert_eq!(
            (first.entries as usize, most.min(keys)),
            (most, first.regions.into())
        );
        assert_eq!(plan.table(first).len(), used(most));
        assert!(plan.keys().is_sorted_by(|a, b| a.0 < b.0));
        assert_eq!(plan.keys().len(), keys);
    }
}

/// A block that fits into one chunk is cut only if the open chunk is less than half full.
#[test]
fn blocks_are_cut_where_chunks_would_stay_short() {
    const CHUNK: usize = 1 << 20;
    let lengths = |first: usize, second: usize| {
        let second = piece(4096 + 2 * CHUNK, 4 << 20, second, 1);
        let plan = plan(&[piece(4096, 0, first, 1), second], CHUNK, 1);
        (0..plan.len())
            .map(|i| plan.layout(i).bytes)
            .collect::<Vec<_>>()
    };
    let half = CHUNK / 2;
    assert_eq!(lengths(half, CHUNK), [half, CHUNK]);
    assert_eq!(lengths(half - 1, CHUNK), [CHUNK, half - 1]);
    assert_eq!(lengths(half, CHUNK + 1), [CHUNK, half + 1]);
    assert_eq!(lengths(CHUNK, 1), [CHUNK, 1]);
    assert_eq!(lengths(CHUNK - 1, 1), [CHUNK]);
    assert_eq!(lengths(CHUNK - 1, 2), [CHUNK - 1, 2]);
}

#[test]
fn chunks_are_as_long_as_lanes_and_limits_allow() {
    const KIB: usize = 1 << 10;
    const MIB: usize = 1 << 20;
    let groups = groups(2);
    let bytes = |total, chunk_bytes, lanes| {
        let limits = Limits { chunk_bytes, lanes };
        [0, 1].map(|group: usize| limits.chunk_bytes(total, &groups[group]))
    };
    // Large transfers have full chunks, longer ones for staged memory.
    assert_eq!(bytes(1 << 30, MIB, 4), [MIB, CHUNK_FACTOR * MIB]);
    let most = MAX_CHUNK_BYTES as usize;
    assert_eq!(bytes(1 << 40, most, 4), [most, most]);
    // Others have a chunk per lane, in pages, or four of staged memory that is long enough.
    assert_eq!(bytes(2 * MIB, MIB, 4), [512 * KIB, MIN_STAGED_BYTES]);
    assert_eq!(bytes(6 * MIB, 4 * MIB, 4), [1536 * KIB, 384 * KIB]);
    assert_eq!(bytes(8 * MIB + 1, 4 * MIB, 4), [2052 * KIB, 516 * KIB]);
    // Short transfers are not spread further.
    assert_eq!(bytes(100, MIB, 4), [MIN_SPREAD_BYTES, MIN_STAGED_BYTES]);
    assert_eq!(bytes(100, 4 * KIB, 4), [4 * KIB, CHUNK_FACTOR * 4 * KIB]);
    // Without lanes the transfer is planned as for one.
    assert_eq!(bytes(2 * MIB, 4 * MIB, 0), [2 * MIB, 512 * KIB]);
}

#[test]
fn the_table_of_a_chunk_is_what_the_peer_reads() {
    let plan = plan(
        &[piece(4096, 7000, 100, 1), piece(9000, 8000, 50, 2)],
        1 << 20,
        1,
    );
    let table = plan.read_table(plan.layout(0)).unwrap();
    assert_eq!(table.regions().collect::<Vec<_>>(), [key(1), key(2)]);
    let entries = table.entries().map(|e| (e.address, e.len, e.region));
    assert_eq!(entries.collect::<Vec<_>>(), [(7000, 100, 0), (8000, 50, 1)]);
    assert_eq!(plan.bytes, 150);
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
        .map(|i| (plan.layout(i).group, plan.layout(i).bytes >> 20))
        .collect();
    let expected = [vec![(0, 1); 32], vec![(1, CHUNK_FACTOR); 16 / CHUNK_FACTOR]];
    assert_eq!(lengths, expected.concat());
}

#[test]
fn a_lane_moves_memory_of_a_device_in_several_chunks() {
    for (total, lengths) in [
        (64 << 20, 2 << 20),
        (16 << 20, 512 << 10),
        (4 << 20, 256 << 10),
        (1 << 20, 256 << 10),
    ] {
        let on_device = Piece {
            group: 1,
            ..piece(4096, 0, total, 1)
        };
        let plan = plan(&[on_device], 1 << 20, 8);
        let mut chunks = (0..plan.len()).map(|i| plan.layout(i));
        assert!(chunks.all(|chunk| chunk.bytes == lengths), "{total}");
    }
}

#[test]
fn no_bytes_make_no_chunks() {
    assert_eq!(plan(&[piece(4096, 0, 0, 1)], 1 << 20, 4).len(), 0);
    assert_eq!(plan(&[], 1 << 20, 4).len(), 0);
}
