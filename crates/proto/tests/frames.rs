//! Frames keep their encoding: a peer of another release can read what this one writes.
//!
//! `docs/compatibility.md` promises it. A line that has to change means a new protocol version.

use tcpx_proto::frame::{
    Entry, FLAG_COMM, FLAG_INLINE, FLAG_MORE, FLAG_NOTIFY, HEADER_BYTES, Header, Kind, Status,
};

/// Every kind of frame, with the bytes of its header.
///
/// Byte by byte: kind, flags, regions (2), entries (4), transfer (8), seq (4), extra (4),
/// payload (8); numbers are little-endian.
const HEADERS: &[(Header, &str)] = &[
    (
        Header {
            flags: FLAG_NOTIFY,
            regions: 0x0203,
            entries: 0x0104,
            seq: 0x0a0b_0c0d,
            extra: 0x0e0f,
            payload: 0x0102_0304,
            ..Header::new(Kind::Write, 0x1112_1314_1516_1718)
        },
        "01010302040100001817161514131211 0d0c0b0a0f0e0000 0403020100000000",
    ),
    (
        numbered(Kind::Ack, 0, 0),
        "02000000000000000700000000000000 0900000000000000 0000000000000000",
    ),
    (
        numbered(Kind::WriteError, Status::OutOfBounds as u8, 0),
        "03020000000000000700000000000000 0900000000000000 0000000000000000",
    ),
    (
        Header {
            regions: 1,
            entries: 2,
            ..numbered(Kind::Read, 0, 0x2000)
        },
        "04000100020000000700000000000000 0900000000000000 0020000000000000",
    ),
    (
        numbered(Kind::Data, FLAG_COMM | FLAG_MORE, 0x2000),
        "05060000000000000700000000000000 0900000000000000 0020000000000000",
    ),
    (
        numbered(Kind::ReadError, Status::UnknownRegion as u8, 3),
        "06010000000000000700000000000000 0900000000000000 0300000000000000",
    ),
    (
        numbered(Kind::Notify, 0, 5),
        "07000000000000000700000000000000 0900000000000000 0500000000000000",
    ),
    (
        numbered(Kind::Ping, 0, 0),
        "08000000000000000700000000000000 0900000000000000 0000000000000000",
    ),
    (
        numbered(Kind::Pong, 0, 0),
        "09000000000000000700000000000000 0900000000000000 0000000000000000",
    ),
    (
        Header {
            extra: 8,
            ..numbered(Kind::Send, FLAG_INLINE, 6)
        },
        "0a010000000000000700000000000000 0900000008000000 0600000000000000",
    ),
    (
        numbered(Kind::SendDone, Status::Truncated as u8, 0),
        "0b040000000000000700000000000000 0900000000000000 0000000000000000",
    ),
    (
        numbered(Kind::Goodbye, 0, 4),
        "0c000000000000000700000000000000 0900000000000000 0400000000000000",
    ),
    (
        numbered(Kind::Comm, 0, 16),
        "0d000000000000000700000000000000 0900000000000000 1000000000000000",
    ),
    (
        numbered(Kind::LaneDown, 0, 16),
        "0e000000000000000700000000000000 0900000000000000 1000000000000000",
    ),
    (
        numbered(Kind::Received, 0, 0),
        "0f000000000000000700000000000000 0900000000000000 0000000000000000",
    ),
];

const fn numbered(kind: Kind, flags: u8, payload: u64) -> Header {
    Header {
        flags,
        seq: 9,
        payload,
        ..Header::new(kind, 7)
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn headers_keep_their_bytes() {
    for (header, bytes) in HEADERS {
        let mut out = Vec::new();
        header.encode(&mut out);
        assert_eq!(out.len(), HEADER_BYTES);
        assert_eq!(hex(&out), bytes.replace(' ', ""), "{:?}", header.kind);
    }
}

#[test]
fn every_kind_of_frame_is_listed() {
    for kind in 0..=u8::MAX {
        let is_listed = HEADERS.iter().any(|(header, _)| header.kind as u8 == kind);
        let mut bytes = [0; HEADER_BYTES];
        bytes[0] = kind;
        let is_known = match Header::decode(&bytes) {
            Err(error) => !error.to_string().contains("unknown"),
            Ok(_) => true,
        };
        assert_eq!(is_listed, is_known, "kind {kind}");
    }
}

#[test]
fn entries_of_tables_keep_their_bytes() {
    let entry = Entry {
        address: 0x1112_1314_1516_1718,
        len: 0x0102_0304,
        region: 0x0506,
    };
    let mut out = Vec::new();
    entry.encode(&mut out);
    assert_eq!(hex(&out), "18171615141312110403020106050000");
}

#[test]
fn status_codes_keep_their_numbers() {
    let codes = [
        (Status::Ok, 0),
        (Status::UnknownRegion, 1),
        (Status::OutOfBounds, 2),
        (Status::Memory, 3),
        (Status::Truncated, 4),
        (Status::Aborted, 5),
        (Status::Other, 255),
    ];
    for (status, number) in codes {
        assert_eq!((status as u8, Status::from_u8(number)), (number, status));
    }
}
