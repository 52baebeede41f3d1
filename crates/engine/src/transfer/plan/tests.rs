//! Every byte is planned once, in chunks that lanes can move.

use super::*;
use crate::memory::nearness_tests::{GPUS, nics, two_sockets};
use crate::memory::{Nearness, Registry, Staging};
use crate::trace::Trace;
use crate::{Buffer, Config};
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

fn piece(local: usize, remote: u64, len: usize, region: u8) -> Piece {
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

fn plan(pieces: &[Piece], chunk_bytes: usize, lanes: usize) -> Plan {
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

/// Returns every byte of a plan as (local, region, remote), in order.
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
fn a_lane_moves_memory_of_a_device_in_two_chunks() {
    for (total, lengths) in [
        (64 << 20, 2 << 20),
        (16 << 20, 1 << 20),
        (4 << 20, 512 << 10),
        (1 << 20, 128 << 10),
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
