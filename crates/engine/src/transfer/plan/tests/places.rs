//! A plan knows the places of its memory, at both ends.

use super::*;

/// Registered memory of three places: the host, and two devices.
struct Places {
    registry: Arc<Registry>,
    staging: [Staging; 3],
}

impl Places {
    fn new() -> Self {
        let config = Config::defaults();
        let staging = || {
            let nearness = Nearness::new(&config, &[], std::path::Path::new("/nonexistent"));
            Staging::new(&config, nearness, &Trace::default())
        };
        let on_device = |seed| staging().on(StandIn::new(seed));
        Self {
            registry: Registry::new([7; 32]),
            staging: [staging(), on_device(1), on_device(2)],
        }
    }

    fn add(&self, place: usize, span: Span) -> Region {
        let staging = &self.staging[place];
        let added = self.registry.add(staging, span, MemoryKind::Host, None);
        added.unwrap()
    }
}

fn plan_of(pieces: Pieces) -> Plan {
    let limits = Limits {
        chunk_bytes: 1 << 20,
        lanes: 1,
    };
    Plan::new(Op::Write, pieces, limits)
}

/// Plans a piece of each region, in the peer's memory of the kind beside it.
fn plan_between(pairs: &[(&Region, MemoryKind)]) -> Plan {
    let mut pieces = Pieces::default();
    for (region, remote) in pairs {
        let (index, _) = pieces.add_memory(region.memory());
        pieces.push(index, region.memory().span, key(1), 0, *remote);
    }
    plan_of(pieces)
}

#[test]
fn memory_is_added_once() {
    let places = Places::new();
    let regions = [0, 1, 2].map(|i| places.add(0, span(0x1000 + i * 0x1000, 100)));
    let mut pieces = Pieces::default();
    let mut add = |index: usize| pieces.add_memory(regions[index].memory());
    let expected = [(0, true), (1, true), (0, false), (2, true), (1, false)];
    assert_eq!([0, 1, 0, 2, 1].map(&mut add), expected);
}

/// A chunk is moved in one go at each end, so its memory is in one place at each.
#[test]
fn groups_tell_every_pair_of_places_apart() {
    let places = Places::new();
    let kinds = [
        MemoryKind::Host,
        MemoryKind::Cuda { device: 0 },
        MemoryKind::Cuda { device: 1 },
    ];
    let mut pieces = Pieces::default();
    let mut seen = Vec::new();
    for round in 0..2 {
        for place in 0..3 {
            let region = places.add(place, span(0x1000 + (round * 3 + place) * 0x1000, 100));
            let (index, _) = pieces.add_memory(region.memory());
            for kind in kinds {
                pieces.push(index, region.memory().span, key(1), 0, kind);
                seen.push((pieces.list.last().unwrap().group, (place, kind)));
            }
        }
    }
    for (group, pair) in &seen {
        for (other, other_pair) in &seen {
            assert_eq!(group == other, pair == other_pair);
        }
    }
    let plan = plan_of(pieces);
    assert_eq!(plan.len(), 9);
    for chunk in (0..plan.len()).map(|i| plan.layout(i)) {
        let (_, (place, _)) = seen
            .iter()
            .find(|(group, _)| *group == chunk.group)
            .unwrap();
        let host = places.staging[*place].host();
        assert!(is_same_place(plan.device(chunk), host));
        assert!(is_same_place(plan.place(chunk).device, host));
        assert_eq!(plan.place(chunk).memory.len(), 6);
    }
}

#[test]
fn a_plan_knows_which_devices_it_needs() {
    let places = Places::new();
    let [host, device, other] = [0, 1, 2].map(|i| places.add(i, span(0x1000 * (i + 1), 100)));
    let again = places.add(1, span(0x9000, 100));
    let there = MemoryKind::Cuda { device: 3 };
    let found = |pairs: &[(&Region, MemoryKind)]| {
        let plan = plan_between(pairs);
        let only = plan.only_device().cloned();
        if only.is_some() {
            assert!(is_same_place(only.as_ref(), places.staging[1].host()));
        }
        (plan.has_devices(), only.is_some())
    };
    assert_eq!(found(&[]), (false, false));
    assert_eq!(found(&[(&host, MemoryKind::Host)]), (false, false));
    assert_eq!(found(&[(&host, there)]), (true, false));
    assert_eq!(found(&[(&device, MemoryKind::Host)]), (true, false));
    assert_eq!(found(&[(&device, there)]), (true, true));
    assert_eq!(found(&[(&device, there), (&again, there)]), (true, true));
    assert_eq!(found(&[(&device, there), (&other, there)]), (true, false));
    assert_eq!(found(&[(&device, there), (&host, there)]), (true, false));
    assert_eq!(
        found(&[(&device, there), (&again, MemoryKind::Host)]),
        (true, false)
    );
}

#[test]
fn a_plan_knows_its_revoked_memory() {
    let places = Places::new();
    let regions = [0, 1, 2].map(|i| places.add(0, span(0x1000 + i * 0x1000, 100)));
    let plan = plan_between(&[0, 1, 2].map(|i| (&regions[i], MemoryKind::Host)));
    assert!(plan.revoked().is_none());
    regions[1].deregister().unwrap();
    assert_eq!(
        plan.revoked().map(|memory| memory.id),
        Some(regions[1].id())
    );
    regions[0].deregister().unwrap();
    assert_eq!(
        plan.revoked().map(|memory| memory.id),
        Some(regions[0].id())
    );
}

#[test]
fn ranges_of_adjacent_regions_are_not_in_one() {
    let places = Places::new();
    let regions = [0x1000, 0x1064].map(|start| places.add(0, span(start, 100)));
    let plan = plan_between(&[0, 1].map(|i| (&regions[i], MemoryKind::Host)));
    let region_of = |address: usize| match address {
        0x1000..0x1064 => Some(0),
        0x1064..0x10c8 => Some(1),
        _ => None,
    };
    let addresses = [0xfff, 0x1000, 0x1063, 0x1064, 0x10c7, 0x10c8];
    for a in addresses {
        for b in addresses {
            let [first, second] = [a, b].map(|address| tcpx_cuda::Range { address, len: 1 });
            let expected = region_of(a).is_some() && region_of(a) == region_of(b);
            assert_eq!(plan.is_in_one_region(&first, &second), expected);
        }
    }
}
