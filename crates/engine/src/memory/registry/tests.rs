//! Access that a region key grants, for which operation, and until when.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tcpx_cuda::StandIn;
use tcpx_net::Span;
use tcpx_proto::descriptor::RegionKey;
use tcpx_proto::frame::{Entry, Header, Kind, Status, Table};
use tcpx_proto::lane::Op;

use super::{Memory, Refusal, Registration, Registry, Users, one_place};
use crate::memory::{Grant, Nearness, Staging, is_same_place};
use crate::sync::{Mutex, Rank};
use crate::testing::session;
use crate::trace::Trace;
use crate::{Buffer, Config, Error, MemoryKind, Region, RemoteRegion, Session};

/// A session with two registered regions of 100 bytes.
struct Stage {
    session: Session,
    first: Region,
    second: Region,
}

impl Stage {
    fn new() -> Self {
        let session = session("alice");
        let region = || session.register(&Buffer::new(100)).unwrap();
        let (first, second) = (region(), region());
        Self {
            session,
            first,
            second,
        }
    }

    fn registry(&self) -> &Arc<Registry> {
        &self.session.core().context().registry
    }

    /// Requests ranges as a peer does.
    fn ask(
        &self,
        op: Op,
        keys: &[RegionKey],
        entries: &[(u64, u32, u32)],
    ) -> Result<Vec<Span>, Refusal> {
        with_table(keys, entries, |table| {
            let (mut spans, mut memory) = (Vec::new(), Vec::new());
            self.registry()
                .resolve(op, table, &mut spans, &mut memory)?;
            assert_eq!(memory.len(), keys.len());
            Ok(spans)
        })
    }

    fn read(&self, memory: &Memory) -> Result<Vec<Span>, Refusal> {
        let start = memory.span.address() as u64;
        self.ask(Op::Read, &[memory.key()], &[(start, 1, 0)])
    }
}

fn with_table<T>(
    keys: &[RegionKey],
    entries: &[(u64, u32, u32)],
    use_it: impl FnOnce(&Table<'_>) -> T,
) -> T {
    let mut bytes: Vec<u8> = keys.iter().flat_map(|key| key.0).collect();
    for &(address, len, region) in entries {
        let entry = Entry {
            address,
            len,
            region,
        };
        entry.encode(&mut bytes);
    }
    let header = Header {
        regions: keys.len() as u16,
        entries: entries.len() as u32,
        payload: entries.iter().map(|(_, len, _)| u64::from(*len)).sum(),
        ..Header::new(Kind::Read, 1)
    };
    use_it(&Table::decode(&header, &bytes).unwrap())
}

fn key(region: &Region) -> RegionKey {
    region.memory().key()
}

#[test]
fn a_range_is_granted_from_its_first_byte_to_its_last() {
    let stage = Stage::new();
    let (key, start) = (key(&stage.first), stage.first.address() as u64);
    for offset in -3i64..104 {
        for len in [1, 2, 50, 99, 100, 101, u32::MAX] {
            let address = start.wrapping_add_signed(offset);
            let found = stage.ask(Op::Write, &[key], &[(address, len, 0)]);
            if offset >= 0 && offset + i64::from(len) <= 100 {
                let [span] = found.unwrap()[..] else {
                    panic!("one range")
                };
                assert_eq!(span.address() as u64, address);
                assert_eq!(span.len(), len as usize);
            } else {
                assert_eq!(found, Err(Refusal::OutOfBounds { address, len }));
            }
        }
    }
}

#[test]
fn all_ranges_are_granted_or_none() {
    let stage = Stage::new();
    let keys = [key(&stage.first), key(&stage.second)];
    let [a, b] = [&stage.first, &stage.second].map(|region| region.address() as u64);
    let good = [(a, 10, 0), (b, 10, 1), (a + 50, 10, 0)];
    assert_eq!(stage.ask(Op::Write, &keys, &good).unwrap().len(), 3);
    // The key of one region does not grant access to the other.
    for at in 0..3 {
        let mut entries = good;
        entries[at].2 ^= 1;
        let (address, len, _) = entries[at];
        let refusal = Refusal::OutOfBounds { address, len };
        assert_eq!(stage.ask(Op::Write, &keys, &entries), Err(refusal));
    }
    // An unused key must be valid as well.
    for index in 0..2 {
        for byte in 0..RegionKey::LEN {
            let mut keys = keys;
            keys[index].0[byte] ^= 1;
            let entries = [(if index == 0 { b } else { a }, 10, 1 - index as u32)];
            let refusal = Refusal::UnknownRegion { index };
            assert_eq!(stage.ask(Op::Read, &keys, &entries), Err(refusal));
        }
    }
}

#[test]
fn adjacent_ranges_are_merged_and_others_are_not() {
    let stage = Stage::new();
    let (key, a) = (key(&stage.first), stage.first.address() as u64);
    let lengths = |entries: &[(u64, u32, u32)]| {
        let spans = stage.ask(Op::Read, &[key], entries).unwrap();
        spans.iter().map(|span| span.len()).collect::<Vec<_>>()
    };
    assert_eq!(lengths(&[(a, 10, 0), (a + 10, 5, 0)]), [15]);
    assert_eq!(lengths(&[(a, 10, 0), (a + 11, 5, 0)]), [10, 5]);
    assert_eq!(lengths(&[(a, 10, 0), (a + 9, 5, 0)]), [10, 5]);
    assert_eq!(lengths(&[(a + 10, 5, 0), (a, 10, 0)]), [5, 10]);
}

#[test]
fn a_range_stays_open_until_its_last_registration_ends() {
    let stage = Stage::new();
    let buffer = Buffer::new(100);
    let [first, again] = [(); 2].map(|()| stage.session.register(&buffer).unwrap());
    assert_eq!(key(&first), key(&again));
    assert_ne!(key(&first), key(&stage.first));
    let memory = Arc::clone(first.memory());
    let epoch = stage.registry().epoch();
    first.deregister().unwrap();
    assert!(first.deregister().is_err(), "the registration ended twice");
    assert!(stage.read(&memory).is_ok(), "the range is still registered");
    assert_eq!(stage.registry().epoch(), epoch);
    drop(again);
    let refusal = Refusal::UnknownRegion { index: 0 };
    assert_eq!(stage.read(&memory), Err(refusal));
    assert!(!memory.is_live());
    assert_ne!(stage.registry().epoch(), epoch, "the epoch did not change");
}

#[test]
fn alias_grants_read_access_until_it_is_removed() {
    let stage = Stage::new();
    let whole = stage.first.memory();
    let part = whole.span.slice(10, 20).unwrap();
    let registry = stage.registry();
    let refusal = Refusal::UnknownRegion { index: 0 };
    let [alias, other] = [(); 2].map(|()| registry.add_alias(whole, part));
    assert_ne!(alias.key(), other.key());
    let start = part.address() as u64;
    let ask = |op, address, len| stage.ask(op, &[alias.key()], &[(address, len, 0)]);
    assert_eq!(ask(Op::Read, start, 20).unwrap().len(), 1);
    for (address, len) in [(start - 1, 1), (start, 21), (start + 20, 1)] {
        let refusal = Refusal::OutOfBounds { address, len };
        assert_eq!(ask(Op::Read, address, len), Err(refusal));
    }
    assert_eq!(ask(Op::Write, start, 20), Err(refusal));
    registry.remove_alias(&alias);
    registry.remove_alias(&alias);
    assert_eq!(stage.read(&alias), Err(refusal));
    // Removing one alias ends neither the other alias nor the whole region.
    assert!(stage.read(&other).is_ok() && stage.read(whole).is_ok());
    stage.first.deregister().unwrap();
    assert_eq!(stage.read(&other), Err(refusal));
}

#[test]
fn a_grant_knows_when_its_own_memory_is_revoked() {
    let stage = Stage::new();
    let registry = stage.registry();
    let (key, start) = (key(&stage.first), stage.first.address() as u64);
    let mut grant = Grant::default();
    with_table(&[key], &[(start, 10, 0)], |table| {
        grant.fill(registry, Op::Write, table).unwrap();
    });
    assert_eq!(grant.place().spans.len(), 1);
    assert_eq!(grant.place().memory.len(), 1);
    assert!(!grant.is_revoked(registry) && !grant.has_dead_memory());
    stage.second.deregister().unwrap();
    assert!(!grant.is_revoked(registry), "another region was revoked");
    stage.first.deregister().unwrap();
    // The answer is the same each time.
    assert!(grant.is_revoked(registry) && grant.is_revoked(registry));
    assert!(grant.has_dead_memory());
    // A spare grant keeps no memory.
    let memory = Arc::downgrade(&grant.place().memory[0]);
    drop(stage.first);
    let grant = grant.cleared();
    assert!(grant.spans.is_empty() && grant.place().memory.is_empty());
    assert!(
        memory.upgrade().is_none(),
        "the spare grant keeps the memory"
    );
}

#[test]
fn refusals_have_the_documented_status() {
    for (refusal, status) in [
        (Refusal::UnknownRegion { index: 0 }, Status::UnknownRegion),
        (Refusal::Revoked, Status::UnknownRegion),
        (
            Refusal::OutOfBounds { address: 0, len: 1 },
            Status::OutOfBounds,
        ),
        (Refusal::Mixed, Status::Other),
        (Refusal::Device, Status::Other),
        (Refusal::Fault, Status::Memory),
    ] {
        assert_eq!(refusal.status(), status);
    }
    assert_eq!(Refusal::failed(&Error::MemoryFault), Refusal::Fault);
    assert_eq!(Refusal::failed(&Error::Closed), Refusal::Device);
}

fn register_raw(session: &Session, buffer: &Buffer) -> Region {
    let (address, len) = (buffer.address() as *mut u8, buffer.len());
    // SAFETY: the caller drops the region before the last owner of the buffer.
    unsafe { session.register_raw(address, len, MemoryKind::Host) }.unwrap()
}

/// Registrations of one range share its key, and each keeps its own buffer.
#[test]
fn each_registration_of_a_range_keeps_its_buffer() {
    let session = session("alice");
    for raw_first in [true, false] {
        let buffer = Buffer::new(4096);
        let memory = buffer.watch();
        let (raw, region) = if raw_first {
            let raw = register_raw(&session, &buffer);
            (raw, session.register(&buffer).unwrap())
        } else {
            let region = session.register(&buffer).unwrap();
            (register_raw(&session, &buffer), region)
        };
        assert_eq!(raw.descriptor(), region.descriptor());
        raw.deregister().unwrap();
        drop((raw, buffer));
        assert!(
            memory.upgrade().is_some(),
            "a registered region keeps the buffer"
        );
        drop(region);
        assert!(memory.upgrade().is_none(), "the buffer leaked");
    }
}

/// A registry without a session, and memory that is never touched.
struct Bare {
    registry: Arc<Registry>,
    /// The host, and two devices.
    staging: [Staging; 3],
}

impl Bare {
    fn new() -> Self {
        let config = Config::defaults();
        let staging = || {
            let nearness = Nearness::new(&config, &[], Path::new("/nonexistent"));
            Staging::new(&config, nearness, &Trace::default())
        };
        let on_device = |seed| staging().on(StandIn::new(seed));
        Self {
            registry: Registry::new([7; 32]),
            staging: [staging(), on_device(1), on_device(2)],
        }
    }

    fn try_add(&self, place: usize, address: usize, len: usize) -> Result<Region, Error> {
        // SAFETY: nothing in these tests accesses the memory.
        let span = unsafe { Span::new(address as *mut u8, len) };
        let staging = &self.staging[place];
        self.registry.add(staging, span, MemoryKind::Host, None)
    }

    fn add(&self, place: usize, address: usize, len: usize) -> Region {
        self.try_add(place, address, len).unwrap()
    }

    fn fill(&self, keys: &[RegionKey], entries: &[(u64, u32, u32)]) -> Result<Grant, Refusal> {
        let mut grant = Grant::default();
        with_table(keys, entries, |table| {
            grant.fill(&self.registry, Op::Write, table)
        })?;
        Ok(grant)
    }
}

#[test]
fn memory_without_bytes_or_beyond_the_last_address_is_refused() {
    let bare = Bare::new();
    for (address, len) in [(0x1000, 0), (0, 100), (0, 0), (usize::MAX - 98, 100)] {
        let refused = bare.try_add(0, address, len);
        let Err(Error::BadRegion { address: a, len: l }) = refused else {
            panic!("{len} bytes at {address:#x}: {refused:?}");
        };
        assert_eq!((a, l), (address, len));
    }
    assert!(bare.try_add(0, 1, 1).is_ok());
}

/// Counts revocations.
#[derive(Default)]
struct Count(AtomicUsize);

impl Users for Count {
    fn revoke(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// Deregistering returns only when no part of the engine touches the memory any more.
#[test]
fn the_last_registration_of_a_range_waits_for_its_users() {
    let bare = Bare::new();
    let users = Arc::new(Count::default());
    let as_users: Arc<dyn Users> = Arc::clone(&users) as _;
    bare.registry.set_users(Arc::downgrade(&as_users));
    let count = || users.0.load(Ordering::Relaxed);
    let [first, again, other] = [0x1000, 0x1000, 0x2000].map(|address| bare.add(0, address, 100));
    first.deregister().unwrap();
    assert_eq!(count(), 0, "the range is still registered");
    again.deregister().unwrap();
    assert_eq!(count(), 1);
    assert!(again.deregister().is_err());
    assert_eq!(count(), 1);
    drop(other);
    assert_eq!(count(), 2);
}

#[test]
fn only_whole_memory_is_found_by_its_key() {
    let bare = Bare::new();
    let [region, other] = [0x1000, 0x2000].map(|address| bare.add(0, address, 100));
    let whole = region.memory();
    let alias = bare
        .registry
        .add_alias(whole, whole.span.slice(10, 20).unwrap());
    let find = |memory: &Memory| bare.registry.find(&memory.key());
    assert!(find(whole).is_some_and(|found| Arc::ptr_eq(&found, whole)));
    assert!(find(&alias).is_none(), "an alias cannot be written");
    assert!(Arc::ptr_eq(alias.root(), whole) && Arc::ptr_eq(whole.root(), whole));
    region.deregister().unwrap();
    assert!(find(whole).is_none() && find(other.memory()).is_some());
}

#[test]
fn a_region_belongs_to_its_registry_while_it_is_registered() {
    let (bare, other) = (Bare::new(), Bare::new());
    let region = bare.add(0, 0x1000, 100);
    assert!(region.belongs_to(&bare.registry) && !region.belongs_to(&other.registry));
    assert!(region.is_registered());
    region.deregister().unwrap();
    assert!(!region.is_registered());
}

/// Keys are secret: the same range has another key in every session.
#[test]
fn keys_depend_on_the_secret_the_range_and_the_kind() {
    let bare = Bare::new();
    let key_of = |address, len| key(&bare.add(0, address, len));
    let first = key_of(0x1000, 100);
    assert_eq!(first, key_of(0x1000, 100));
    assert_ne!(first, key_of(0x1000, 101));
    assert_ne!(first, key_of(0x1001, 100));
    let span = bare.add(0, 0x1000, 100).memory().span;
    let of_kind = |registry: &Registry, kind| registry.describe(span, kind).unwrap().key();
    assert_eq!(of_kind(&bare.registry, MemoryKind::Host), first);
    assert_ne!(
        of_kind(&bare.registry, MemoryKind::Cuda { device: 0 }),
        first
    );
    assert_ne!(of_kind(&Registry::new([8; 32]), MemoryKind::Host), first);
}

/// A chunk is copied by one device: a peer cannot make it mix places.
#[test]
fn a_grant_is_of_one_place() {
    let bare = Bare::new();
    let places = (1..).zip([0, 0, 1, 1, 2]);
    let regions: Vec<_> = places
        .map(|(i, place)| (place, bare.add(place, i * 0x1000, 100)))
        .collect();
    for (place, a) in &regions {
        for (other, b) in &regions {
            let entries = [(a.address() as u64, 10, 0), (b.address() as u64, 10, 1)];
            let grant = bare.fill(&[key(a), key(b)], &entries);
            let found = grant.map(|grant| grant.device);
            if place == other {
                let host = bare.staging[*place].host();
                assert!(is_same_place(found.unwrap().as_ref(), host));
            } else {
                assert_eq!(found.err(), Some(Refusal::Mixed));
            }
        }
    }
    assert!(one_place(std::iter::empty()).unwrap().is_none());
}

/// A device does not copy across allocations, and adjacent regions may be two of them.
#[test]
fn ranges_of_adjacent_regions_are_merged_in_host_memory_only() {
    for (place, expected) in [(0, &[30][..]), (1, &[10, 20])] {
        let bare = Bare::new();
        let [a, b] = [0x1000, 0x1064].map(|address| bare.add(place, address, 100));
        let entries = [(0x105a, 10, 0), (0x1064, 5, 1), (0x1069, 15, 1)];
        let grant = bare.fill(&[key(&a), key(&b)], &entries).unwrap();
        let lengths: Vec<_> = grant.spans.iter().map(|span| span.len()).collect();
        assert_eq!(lengths, expected);
    }
}

#[test]
fn the_first_gpu_is_that_of_the_oldest_registration() {
    let bare = Bare::new();
    assert!(bare.registry.first_gpu().is_none());
    let host = bare.add(1, 0x1000, 100);
    assert!(bare.registry.first_gpu().is_none(), "staged host memory");
    let kind = MemoryKind::Cuda { device: 0 };
    let on_gpu = |place: usize| {
        let like = bare.add(place, 0x2000 * (place + 1), 100);
        let like = like.memory();
        let memory = Arc::new(Memory {
            id: like.id,
            span: like.span,
            kind,
            device: like.device.clone(),
            near: like.near,
            descriptor: bare.registry.describe(like.span, kind).unwrap(),
            live: true.into(),
            part_of: None,
        });
        let entry = (Arc::clone(&memory), 1);
        bare.registry.by_key.write().insert(memory.key(), entry);
        Region::new(Registration {
            id: memory.id,
            memory,
            registry: Arc::downgrade(&bare.registry),
            ended: false.into(),
            ending: Mutex::new(Rank::Registration, ()),
            _owner: None,
        })
    };
    let is_on = |place: usize| {
        let first = bare.registry.first_gpu();
        is_same_place(first.as_ref(), bare.staging[place].host())
    };
    let (older, newer) = (on_gpu(2), on_gpu(1));
    assert_eq!((older.kind(), older.descriptor().kind()), (kind, kind));
    assert!(is_on(2));
    drop(older);
    assert!(is_on(1));
    drop(newer);
    assert!(bare.registry.first_gpu().is_none());
    drop(host);
}

#[test]
fn a_region_and_its_descriptor_say_the_same() {
    let bare = Bare::new();
    let [region, other] = [(0x1000, 100), (0x2000, 7)].map(|(a, len)| bare.add(0, a, len));
    assert_ne!(region.id(), other.id());
    assert_eq!((region.address(), region.len()), (0x1000, 100));
    assert_eq!(
        (region.kind(), region.is_empty()),
        (MemoryKind::Host, false)
    );
    let there = region.descriptor();
    assert_eq!((there.address(), there.len()), (0x1000, 100));
    assert_eq!((there.kind(), there.is_empty()), (MemoryKind::Host, false));
    assert_eq!(there.key(), key(&region));
    assert_ne!(there, other.descriptor());
    assert_eq!(RemoteRegion::from_bytes(&there.to_bytes()).unwrap(), there);
    let short = region.short_descriptor(MemoryKind::Host).unwrap();
    let long = |len| RemoteRegion::from_short(short, 0x1000, len, MemoryKind::Host).unwrap();
    assert_eq!(long(100), there);
    assert!(long(0).is_empty());
    let elsewhere = MemoryKind::Cuda { device: 0 };
    assert_eq!(region.short_descriptor(elsewhere), None);
    assert_eq!(
        RemoteRegion::from_short(short, 0, 1, elsewhere)
            .unwrap()
            .kind(),
        elsewhere
    );
    assert_eq!((region.at(5).offset, there.at(6).offset), (5, 6));
}
