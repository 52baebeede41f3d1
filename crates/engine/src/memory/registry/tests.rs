//! Access that a region key grants, for which operation, and until when.

use std::sync::Arc;

use tcpx_net::Span;
use tcpx_proto::descriptor::RegionKey;
use tcpx_proto::frame::{Entry, Header, Kind, Status, Table};
use tcpx_proto::lane::Op;

use super::{Memory, Refusal, Registry};
use crate::memory::Grant;
use crate::testing::session;
use crate::{Buffer, MemoryKind, Region, Session};

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
    ] {
        assert_eq!(refusal.status(), status);
    }
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
