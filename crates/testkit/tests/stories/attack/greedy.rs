//! Peers that ask for more than they may have.

use tcpx_proto::descriptor::RegionKey;
use tcpx_proto::frame::{
    Entry, FrameError, Header, Kind, MAX_CHUNK_BYTES, MAX_EXTRA_BYTES, Status,
};
use tcpx_proto::lane::Violation;
use tcpx_testkit::attack::{GRANTED, Scene, Target, WINDOW, ask, table};
use tcpx_testkit::{Content, story};

/// Maximum entries of a table with one key.
const MAX_ENTRIES: usize = 511;

/// Ranges outside the granted bytes, and wrong keys, are refused.
#[test]
fn ranges_beyond_the_bounds_are_refused() {
    story(|| {
        let scene = Scene::new();
        let Target { key, address, len } = scene.granted();
        let end = address + len;
        let gone = scene.victim.memory(100);
        let dead = Target::of(&gone.region.descriptor());
        gone.region.deregister().expect("registered");
        let foreign = tcpx_testkit::Host::open("other", &tcpx_testkit::Setup::base().native());
        let foreign = foreign.memory(100);
        let theirs = Target::of(&foreign.region.descriptor());
        let mut flipped = key;
        flipped.0[0] ^= 0x80;
        let (bounds, unknown) = (Status::OutOfBounds, Status::UnknownRegion);
        let (all, good) = (len as u32, (address, 8, 0));
        let far = (u64::MAX - 8, 8, 0);
        type Ask = (Status, Vec<RegionKey>, Vec<(u64, u32, u32)>);
        let asked: Vec<Ask> = vec![
            (bounds, vec![key], vec![(address, all + 1, 0)]),
            (bounds, vec![key], vec![(address + 1, all, 0)]),
            (bounds, vec![key], vec![(address - 1, all, 0)]),
            (bounds, vec![key], vec![(end, 1, 0)]),
            (bounds, vec![key], vec![(end - 1, 2, 0)]),
            (bounds, vec![key], vec![(address - 1, 1, 0)]),
            (bounds, vec![key], vec![(0, 8, 0)]),
            (bounds, vec![key], vec![far]),
            (bounds, vec![key], vec![(address ^ 1 << 63, 8, 0)]),
            (
                bounds,
                vec![key],
                vec![(address, MAX_CHUNK_BYTES as u32, 0)],
            ),
            // The first of many, the last of many, one in between.
            (bounds, vec![key], vec![far, good, good]),
            (bounds, vec![key], vec![good, good, far]),
            (bounds, vec![key], vec![good, far, good]),
            // A range of one region with the key of another.
            (bounds, vec![key, key], vec![good, (end, 8, 1)]),
            (unknown, vec![flipped], vec![good]),
            (unknown, vec![RegionKey([0; 16])], vec![good]),
            (unknown, vec![RegionKey([0xFF; 16])], vec![good]),
            (unknown, vec![dead.key], vec![(dead.address, 8, 0)]),
            (unknown, vec![theirs.key], vec![(theirs.address, 8, 0)]),
            // A key that no entry uses must be valid too.
            (unknown, vec![key, flipped], vec![good]),
            (unknown, vec![key, flipped], vec![good, (address, 8, 1)]),
        ];
        let mut greedy = scene.insider();
        for (seq, (status, keys, entries)) in asked.iter().enumerate() {
            let id = (3, seq as u32);
            let mut write = ask(Kind::Write, id, keys, entries);
            let bytes: usize = entries.iter().map(|(_, len, _)| *len as usize).sum();
            // A megabyte stands for anything longer: the header is refused before its payload
            // arrives.
            let is_long = bytes > 1 << 20;
            if !is_long {
                write.resize(write.len() + bytes, 0x66);
                greedy.send(&write);
                let answer = greedy.frame();
                assert_eq!((answer.header.kind, answer.id()), (Kind::WriteError, id));
                assert_eq!(answer.header.flags, *status as u8, "{entries:x?}");
            }
            greedy.send(&ask(Kind::Read, id, keys, entries));
            let answer = greedy.frame();
            assert_eq!((answer.header.kind, answer.id()), (Kind::ReadError, id));
            assert_eq!(answer.header.flags, *status as u8, "{entries:x?}");
        }
        assert!(greedy.sync().is_empty());
        scene.unharmed();
        scene.honest_peer_goes_on();
    });
}

/// The longest lists of overlapping ranges access what they name and nothing else.
#[test]
fn the_longest_lists_of_overlapping_ranges_stay_inside() {
    story(|| {
        let scene = Scene::new();
        let Target { key, address, len } = scene.granted();
        let mut greedy = scene.insider();
        // Each begins one byte later; the last ends with the region.
        let span = len as u32 - (MAX_ENTRIES as u32 - 1);
        let entries: Vec<_> = (0..MAX_ENTRIES as u64)
            .map(|i| (address + i, span, 0))
            .collect();
        let mut write = ask(Kind::Write, (1, 0), &[key], &entries);
        write.resize(write.len() + MAX_ENTRIES * span as usize, 0x66);
        greedy.send(&write);
        let ack = greedy.frame();
        assert_eq!((ack.header.kind, ack.id()), (Kind::Ack, (1, 0)));
        scene.holds(&[(0, GRANTED, Content::Byte(0x66))]);
        // Read back they make 33 MB of 64 KiB.
        greedy.send(&ask(Kind::Read, (2, 0), &[key], &entries));
        let data = greedy.frame();
        assert_eq!(data.payload.len(), MAX_ENTRIES * span as usize);
        assert!(data.payload.iter().all(|byte| *byte == 0x66));
        // With one range more, all of it is refused.
        scene.poison();
        let mut entries = entries;
        entries[MAX_ENTRIES - 1].1 += 1;
        let mut write = ask(Kind::Write, (3, 0), &[key], &entries);
        write.resize(write.len() + MAX_ENTRIES * span as usize + 1, 0x77);
        greedy.send(&write);
        let refused = greedy.frame();
        assert_eq!(
            (refused.header.kind, refused.id()),
            (Kind::WriteError, (3, 0))
        );
        scene.unharmed();
        scene.honest_peer_goes_on();
    });
}

/// While one answer is being sent, a window of further requests may wait, and not one more.
#[test]
fn one_request_more_than_the_window_ends_the_connection() {
    story(|| {
        let scene = Scene::new();
        let Target { key, address, len } = scene.granted();
        // 33 MB, more than sockets hold: the answer begins and does not end.
        let entries = vec![(address, len as u32, 0); MAX_ENTRIES];
        let request = |seq| ask(Kind::Read, (1, seq), &[key], &entries);
        let mut greedy = scene.insider();
        greedy.send(&request(0));
        let mut begun = [0; 1];
        std::io::Read::read_exact(&mut greedy.lanes[0], &mut begun).expect("an answer");
        assert_eq!(begun, [Kind::Data as u8]);
        for seq in 1..=WINDOW as u32 {
            greedy.send(&request(seq));
        }
        scene.honest_peer_goes_on();
        assert!(
            greedy.peer.is_connected(),
            "a window of requests is allowed"
        );
        greedy.send(&request(WINDOW as u32 + 1));
        greedy.is_ended_for(Violation::TooManyRequests { window: WINDOW });
        scene.unharmed();
        scene.honest_peer_goes_on();
    });
}

/// Sizes over their limits, by one and by the maximum.
#[test]
fn impossible_sizes_end_the_connection() {
    story(|| {
        let scene = Scene::new();
        let Target { key, address, len } = scene.granted();
        let (len, write) = (
            len as u32,
            Header {
                regions: 1,
                entries: 1,
                payload: 8,
                ..Header::new(Kind::Write, 1)
            },
        );
        let max = MAX_CHUNK_BYTES;
        let sizes = [
            Header {
                payload: max + 1,
                ..write
            },
            Header {
                payload: u64::MAX,
                ..write
            },
            Header {
                payload: 1 << 63,
                ..write
            },
            Header {
                kind: Kind::Read,
                payload: max + 1,
                ..write
            },
            Header {
                kind: Kind::Read,
                payload: u64::MAX,
                ..write
            },
            Header {
                entries: MAX_ENTRIES as u32 + 1,
                ..write
            },
            Header {
                entries: u32::MAX,
                ..write
            },
            // 2³² bytes of table and a few: an overflow of 32 bits.
            Header {
                entries: 1 << 28,
                ..write
            },
            Header {
                regions: u16::MAX,
                ..write
            },
            Header {
                regions: 0,
                ..write
            },
            Header {
                entries: 0,
                ..write
            },
            Header { extra: 1, ..write },
            Header {
                flags: 1,
                extra: MAX_EXTRA_BYTES as u32 + 1,
                ..write
            },
            Header {
                flags: 1,
                extra: u32::MAX,
                ..write
            },
            Header { flags: 8, ..write },
            Header {
                flags: 0xFF,
                ..write
            },
            Header {
                kind: Kind::Data,
                ..write
            },
            Header {
                kind: Kind::Ack,
                ..write
            },
            Header {
                payload: 1,
                ..Header::new(Kind::Ack, 1)
            },
            Header {
                payload: 1,
                ..Header::new(Kind::Ping, 1)
            },
            Header {
                extra: 1,
                ..Header::new(Kind::Pong, 1)
            },
            Header {
                payload: 1025,
                ..Header::new(Kind::ReadError, 1)
            },
            Header {
                payload: 1025,
                ..Header::new(Kind::Goodbye, 1)
            },
            Header {
                payload: max + 1,
                ..Header::new(Kind::Notify, 1)
            },
            Header {
                flags: 1,
                ..Header::new(Kind::Notify, 1)
            },
            Header {
                extra: 8,
                payload: 8193,
                flags: 1,
                ..Header::new(Kind::Send, 1)
            },
            Header {
                extra: 7,
                ..Header::new(Kind::Send, 1)
            },
            Header {
                extra: 8,
                payload: 1,
                ..Header::new(Kind::Send, 1)
            },
            Header {
                extra: 8,
                flags: 2,
                ..Header::new(Kind::Send, 1)
            },
        ];
        for header in sizes {
            let mut greedy = scene.insider();
            let mut bytes = Vec::new();
            header.encode(&mut bytes);
            // Bytes that would be read as a table and a payload.
            bytes.extend(table(&[key], &[(address, 8, 0)]));
            bytes.extend([0x66; 5000]);
            greedy.send(&bytes);
            greedy.is_ended_for(FrameError::BadSize {
                kind: header.kind,
                regions: header.regions,
                entries: header.entries,
                extra: header.extra,
                payload: header.payload,
                flags: header.flags,
            });
        }
        // Invalid tables: no bytes, a missing key, an address that wraps.
        let entry = |address, len, region| Entry {
            address,
            len,
            region,
        };
        let wrong = [
            entry(address, 0, 0),
            entry(address, 8, 1),
            entry(address, 8, u32::MAX),
            entry(u64::MAX - 6, 8, 0),
            entry(u64::MAX, 8, 0),
            entry(u64::MAX, u32::MAX, 0),
        ];
        for (kind, entry) in [Kind::Write, Kind::Read]
            .into_iter()
            .flat_map(|kind| wrong.map(|entry| (kind, entry)))
        {
            let mut greedy = scene.insider();
            let mut bytes = Vec::new();
            Header { kind, ..write }.encode(&mut bytes);
            bytes.extend(table(&[key], &[(entry.address, entry.len, entry.region)]));
            bytes.extend([0x66; 5000]);
            greedy.send(&bytes);
            greedy.is_ended_for(FrameError::BadEntry(entry));
        }
        // Lengths that do not add up: a byte less, a byte more, the maximum of 32 bits.
        for (kind, entries) in [
            (Kind::Write, [7, 0]),
            (Kind::Read, [9, 0]),
            (Kind::Write, [4, 5]),
            (Kind::Read, [u32::MAX, 9]),
            (Kind::Write, [len, len]),
        ] {
            let mut greedy = scene.insider();
            let entries: Vec<_> = entries
                .into_iter()
                .filter(|len| *len > 0)
                .map(|len| (address, len, 0))
                .collect();
            let header = Header {
                kind,
                entries: entries.len() as u32,
                ..write
            };
            let mut bytes = Vec::new();
            header.encode(&mut bytes);
            bytes.extend(table(&[key], &entries));
            bytes.extend([0x66; 5000]);
            greedy.send(&bytes);
            greedy.is_ended_for(FrameError::BadTotal {
                announced: 8,
                found: entries.iter().map(|(_, len, _)| u64::from(*len)).sum(),
            });
        }
        scene.unharmed();
        scene.honest_peer_goes_on();
    });
}
