//! Tests of frames: limits, tables, and encoding and decoding.

use super::*;
use alloc::vec;
use proptest::prelude::*;

fn encoded(header: &Header) -> [u8; HEADER_BYTES] {
    let mut out = Vec::new();
    header.encode(&mut out);
    out.try_into().expect("a header has HEADER_BYTES bytes")
}

fn any_entries() -> impl Strategy<Value = Vec<Entry>> {
    prop::collection::vec(
        (0..u64::MAX / 2, 1..100_000u32, 0..3u32).prop_map(|(address, len, region)| Entry {
            address,
            len,
            region,
        }),
        1..200,
    )
}

fn table_of(entries: &[Entry]) -> Vec<u8> {
    let mut table = vec![7; 3 * REGION_BYTES];
    entries.iter().for_each(|e| e.encode(&mut table));
    table
}

fn write_header(entries: &[Entry]) -> Header {
    Header {
        regions: 3,
        entries: entries.len() as u32,
        payload: entries.iter().map(|e| u64::from(e.len)).sum(),
        ..Header::new(Kind::Write, 9)
    }
}

#[test]
fn payload_on_the_comm_is_not_on_the_wire() {
    let entries = [Entry {
        address: 4096,
        len: 100,
        region: 0,
    }];
    let data = Header {
        payload: 100,
        ..Header::new(Kind::Data, 1)
    };
    for header in [write_header(&entries), data] {
        assert_eq!(header.payload_on_wire(), 100);
        let header = Header {
            flags: FLAG_COMM,
            ..header
        };
        let decoded = Header::decode(&encoded(&header)).unwrap();
        assert!(decoded.is_on_comm());
        assert_eq!((decoded.payload, decoded.payload_on_wire()), (100, 0));
        // Payload on the comm is never empty.
        let empty = Header {
            payload: 0,
            ..header
        };
        assert!(Header::decode(&encoded(&empty)).is_err());
    }
    // Other kinds cannot have payload on the comm.
    for kind in [Kind::Notify, Kind::Ack, Kind::Ping, Kind::Comm] {
        let header = Header {
            flags: FLAG_COMM,
            ..Header::new(kind, 1)
        };
        assert!(Header::decode(&encoded(&header)).is_err());
    }
}

proptest! {
    #[test]
    fn write_frames_survive_the_wire(entries in any_entries(), seq: u32, transfer: u64) {
        let header = Header { seq, transfer, ..write_header(&entries) };
        prop_assert_eq!(Header::decode(&encoded(&header)).unwrap(), header);
        let bytes = table_of(&entries);
        let table = Table::decode(&header, &bytes).unwrap();
        prop_assert_eq!(table.entries().collect::<Vec<_>>(), entries);
        prop_assert_eq!(table.regions().len(), 3);
        prop_assert_eq!(table.total(), header.payload);
    }

    #[test]
    fn no_header_makes_the_decoder_promise_more_than_its_limits(bytes: [u8; HEADER_BYTES]) {
        if let Ok(header) = Header::decode(&bytes) {
            prop_assert!(header.table_bytes() <= MAX_TABLE_BYTES);
            prop_assert!(header.extra as usize <= MAX_EXTRA_BYTES);
            prop_assert!(header.payload <= MAX_CHUNK_BYTES.max(MAX_NOTIFICATION_BYTES));
            prop_assert_eq!(encoded(&header), bytes);
        }
    }

    #[test]
    fn a_flipped_bit_in_a_table_is_refused_or_stays_within_the_frame(
        entries in any_entries(), at: prop::sample::Index, bit in 0..8u8
    ) {
        let header = write_header(&entries);
        let mut bytes = table_of(&entries);
        let at = at.index(bytes.len());
        bytes[at] ^= 1 << bit;
        if let Ok(table) = Table::decode(&header, &bytes) {
            let mut total = 0;
            for entry in table.entries() {
                prop_assert!(entry.address.checked_add(u64::from(entry.len)).is_some());
                prop_assert!(entry.region < 3);
                total += u64::from(entry.len);
            }
            prop_assert_eq!(total, header.payload);
        }
    }
}

#[test]
fn limits_are_exact() {
    let full = (MAX_TABLE_BYTES - REGION_BYTES) / ENTRY_BYTES;
    let mut header = Header {
        regions: 1,
        entries: full as u32,
        payload: full as u64,
        ..Header::new(Kind::Write, 1)
    };
    assert!(Header::decode(&encoded(&header)).is_ok());
    header.entries += 1;
    assert!(matches!(
        Header::decode(&encoded(&header)),
        Err(FrameError::BadSize { .. })
    ));

    let mut chunk = Header {
        payload: MAX_CHUNK_BYTES,
        ..Header::new(Kind::Data, 1)
    };
    assert!(Header::decode(&encoded(&chunk)).is_ok());
    chunk.payload += 1;
    assert!(Header::decode(&encoded(&chunk)).is_err());
}

#[test]
fn kinds_without_a_table_refuse_one() {
    for kind in [
        Kind::Ack,
        Kind::Data,
        Kind::Notify,
        Kind::Ping,
        Kind::Pong,
        Kind::Goodbye,
    ] {
        let header = Header {
            regions: 1,
            entries: 1,
            ..Header::new(kind, 1)
        };
        assert!(Header::decode(&encoded(&header)).is_err(), "{kind:?}");
    }
}

#[test]
fn entries_that_overflow_or_are_empty_are_refused() {
    for entry in [
        Entry {
            address: u64::MAX,
            len: 1,
            region: 0,
        },
        Entry {
            address: 0,
            len: 0,
            region: 0,
        },
        Entry {
            address: 0,
            len: 1,
            region: 3,
        },
    ] {
        let header = Header {
            payload: u64::from(entry.len),
            ..write_header(&[entry])
        };
        let bytes = table_of(&[entry]);
        assert_eq!(
            Table::decode(&header, &bytes).unwrap_err(),
            FrameError::BadEntry(entry)
        );
    }
}

/// One row of *Kinds* in `docs/wire-protocol.md`.
struct Row {
    kind: Kind,
    /// Flags that are bits; none if any status is allowed.
    flags: Option<u8>,
    has_table: bool,
    /// The longest extra section, with the flag or always.
    extra: u32,
    payload: u64,
}

/// Returns the document's table.
fn rows() -> [Row; 15] {
    let row = |kind, flags, has_table, extra, payload| Row {
        kind,
        flags,
        has_table,
        extra,
        payload,
    };
    [
        row(Kind::Write, Some(7), true, 4096, 256 << 20),
        row(Kind::Ack, Some(0), false, 0, 0),
        row(Kind::WriteError, None, false, 0, 1024),
        row(Kind::Read, Some(0), true, 0, 256 << 20),
        row(Kind::Data, Some(6), false, 0, 256 << 20),
        row(Kind::ReadError, None, false, 0, 1024),
        row(Kind::Notify, Some(0), false, 0, 256 << 20),
        row(Kind::Ping, Some(0), false, 0, 0),
        row(Kind::Pong, Some(0), false, 0, 0),
        row(Kind::Send, Some(1), true, 8, 8192),
        row(Kind::SendDone, None, false, 0, 1024),
        row(Kind::Goodbye, Some(0), false, 0, 1024),
        row(Kind::Comm, Some(0), false, 0, 389),
        row(Kind::LaneDown, Some(0), false, 0, 65_536),
        row(Kind::Received, Some(0), false, 0, 0),
    ]
}

impl Row {
    /// Returns whether the document allows a header of this kind.
    fn allows(&self, header: &Header) -> bool {
        let (regions, entries) = (u64::from(header.regions), u64::from(header.entries));
        if 16 * (regions + entries) > 8192 || header.payload > self.payload {
            return false;
        }
        if self.flags.is_some_and(|flags| header.flags & !flags != 0) {
            return false;
        }
        let has_none = regions == 0 && entries == 0;
        let has_both = regions > 0 && entries > 0;
        match self.kind {
            Kind::Write => {
                let says = header.flags & 1 != 0;
                let on_comm = header.flags & 2 != 0;
                has_both
                    && (if says {
                        header.extra <= 4096
                    } else {
                        header.extra == 0
                    })
                    && (!on_comm || header.payload > 0)
            }
            Kind::Data => {
                let on_comm = header.flags & 2 != 0;
                has_none && header.extra == 0 && (!on_comm || header.payload > 0)
            }
            // No table exactly if the message is empty; the tag always; bytes only with the flag.
            Kind::Send => {
                (has_none || has_both)
                    && header.extra == 8
                    && (header.flags == 1 || header.payload == 0)
            }
            _ if self.has_table => has_both && header.extra == 0,
            _ => has_none && header.extra <= self.extra,
        }
    }
}

/// Tests every limit of every kind, one below, at, and one above.
#[test]
fn headers_are_what_the_document_allows() {
    let around = |limit: u64| [limit.saturating_sub(1), limit, limit + 1];
    let (mut allowed, mut refused) = (0, 0);
    for row in rows() {
        let payloads = around(row.payload)
            .into_iter()
            .chain([0, 1, u64::MAX, 1 << 32]);
        for payload in payloads {
            for extra in [0, 1, 7, 8, 9, 4095, 4096, 4097, u32::MAX] {
                for (regions, entries) in [
                    (0, 0),
                    (0, 1),
                    (1, 0),
                    (1, 1),
                    (1, 510),
                    (1, 511),
                    (1, 512),
                    (511, 1),
                    (512, 0),
                    (0, 512),
                    (u16::MAX, 1),
                    (1, u32::MAX),
                    // A length that fits 32 bits only.
                    (1, 1 << 28),
                ] {
                    for flags in [0, 1, 2, 3, 4, 5, 6, 7, 8, 128, 255] {
                        let header = Header {
                            flags,
                            regions,
                            entries,
                            extra,
                            payload,
                            ..Header::new(row.kind, 7)
                        };
                        let decoded = Header::decode(&encoded(&header));
                        if row.allows(&header) {
                            assert_eq!(decoded, Ok(header));
                            allowed += 1;
                        } else {
                            assert!(decoded.is_err(), "{header:?}");
                            refused += 1;
                        }
                    }
                }
            }
        }
    }
    assert!(allowed > 300 && refused > allowed, "{allowed}, {refused}");
}

#[test]
fn every_status_survives_the_wire() {
    use Status::*;
    for status in [
        Ok,
        UnknownRegion,
        OutOfBounds,
        Memory,
        Truncated,
        Aborted,
        Other,
    ] {
        assert_eq!(Status::from_u8(status as u8), status);
    }
    assert_eq!(Status::from_u8(200), Other);
}

#[test]
fn sections_have_the_sizes_that_their_header_says() {
    let header = Header {
        flags: FLAG_NOTIFY,
        regions: 3,
        entries: 5,
        extra: 100,
        payload: 5,
        ..Header::new(Kind::Write, 1)
    };
    assert_eq!(header.table_bytes(), 3 * 16 + 5 * 16);
    assert_eq!(header.middle_bytes(), 3 * 16 + 5 * 16 + 100);
    let read = Header {
        kind: Kind::Read,
        ..header
    };
    assert_eq!((header.payload_on_wire(), read.payload_on_wire()), (5, 0));
}

#[test]
fn a_text_is_cut_to_what_the_protocol_takes() {
    for (len, kept) in [
        (0, 0),
        (1, 1),
        (1023, 1023),
        (1024, 1024),
        (1025, 1024),
        (9999, 1024),
    ] {
        let text = alloc::string::String::from_utf8(vec![b'x'; len]).unwrap();
        let mut out = Vec::new();
        Header::new(Kind::Goodbye, 1).encode_with_text(&mut out, &text);
        assert_eq!(out.len(), HEADER_BYTES + kept);
        let header = Header::decode(out.first_chunk().unwrap()).unwrap();
        assert_eq!(header.payload, kept as u64);
    }
}

/// A message may be announced with its bytes elsewhere; only bytes in the frame must add up.
#[test]
fn tables_add_up_where_their_payload_is_here() {
    let entries = [5, 6].map(|len| Entry {
        address: 4096,
        len,
        region: 0,
    });
    let bytes = table_of(&entries);
    let of = |kind, flags, payload| Header {
        kind,
        flags,
        payload,
        extra: if kind == Kind::Send { 8 } else { 0 },
        ..write_header(&entries)
    };
    for (header, fits) in [
        (of(Kind::Write, 0, 11), true),
        (of(Kind::Write, 0, 10), false),
        (of(Kind::Read, 0, 11), true),
        (of(Kind::Read, 0, 12), false),
        (of(Kind::Send, FLAG_INLINE, 11), true),
        (of(Kind::Send, FLAG_INLINE, 10), false),
        (of(Kind::Send, 0, 0), true),
    ] {
        let table = Table::decode(&header, &bytes);
        assert_eq!(table.is_ok(), fits, "{header:?}");
        if let Ok(table) = table {
            assert_eq!(table.total(), 11);
        }
    }
    // A table that does not fit its header.
    let header = of(Kind::Write, 0, 11);
    for cut in [0, 16, bytes.len() - 16, bytes.len() - 1] {
        assert!(Table::decode(&header, &bytes[..cut]).is_err());
    }
}
