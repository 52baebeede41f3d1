//! Frames: a header and its table.

use tcpx_proto::frame::down::{self, StreamId};
use tcpx_proto::frame::{
    HEADER_BYTES, Header, Kind, MAX_CHUNK_BYTES, MAX_EXTRA_BYTES, MAX_NOTIFICATION_BYTES,
    MAX_TABLE_BYTES, Status, Table,
};

/// Decodes `data` as a header and its table.
pub fn check(data: &[u8]) {
    let Some((head, rest)) = data.split_first_chunk::<HEADER_BYTES>() else {
        return;
    };
    let Ok(header) = Header::decode(head) else {
        return;
    };
    check_header(&header, head);
    if header.kind == Kind::LaneDown {
        check_down(&header, rest);
    }

    // The bytes as they are, and the right number of bytes: the former are refused unless the
    // number is right.
    let expected = header.table_bytes();
    if rest.len() != expected {
        assert!(
            Table::decode(&header, rest).is_err(),
            "a table of the wrong length"
        );
    }
    let mut bytes = rest.to_vec();
    bytes.resize(expected, 0);
    check_table(&header, &bytes);
}

fn check_header(header: &Header, head: &[u8; HEADER_BYTES]) {
    let mut again = Vec::new();
    header.encode(&mut again);
    assert_eq!(again, head, "one encoding of each header");
    // The sizes of a receiver's buffers.
    assert!(header.table_bytes() <= MAX_TABLE_BYTES);
    assert!(header.extra as usize <= MAX_EXTRA_BYTES);
    assert!(header.middle_bytes() <= MAX_TABLE_BYTES + MAX_EXTRA_BYTES);
    assert!(header.payload <= MAX_CHUNK_BYTES.max(MAX_NOTIFICATION_BYTES));
    assert!(header.payload_on_wire() <= header.payload);
    let _ = Status::from_u8(header.flags);
}

/// Decodes a LaneDown payload, and encodes it again.
fn check_down(header: &Header, payload: &[u8]) {
    let Ok(endings) = down::decode(payload) else {
        return;
    };
    assert!(endings.len() <= payload.len() / 16);
    let stream = StreamId::from_transfer(header.transfer);
    let mut again = Vec::new();
    down::encode(&mut again, stream, header.seq, &endings);
    let (head, payload) = again.split_first_chunk().expect("a header");
    let decoded = down::decode(payload).expect("what is written can be read");
    let ids = |endings: &[down::Ending]| endings.iter().map(|e| e.id).collect::<Vec<_>>();
    assert_eq!(ids(&decoded), ids(&endings));
    // A window fits; nobody reports more than that.
    if endings.len() <= 1024 {
        let written = Header::decode(head).expect("a frame that may be sent");
        assert_eq!(StreamId::from_transfer(written.transfer), stream);
    }
}

fn check_table(header: &Header, bytes: &[u8]) {
    let Ok(table) = Table::decode(header, bytes) else {
        return;
    };
    assert_eq!(table.regions().len(), usize::from(header.regions));
    assert_eq!(table.entries().len(), header.entries as usize);
    let mut total = 0u64;
    let mut again = Vec::new();
    table.regions().for_each(|key| again.extend(key.0));
    for entry in table.entries() {
        assert!(entry.len > 0);
        assert!(entry.region < u32::from(header.regions));
        assert!(entry.address.checked_add(u64::from(entry.len)).is_some());
        total = total
            .checked_add(u64::from(entry.len))
            .expect("no overflow");
        entry.encode(&mut again);
    }
    assert_eq!(again, bytes, "one encoding of each table");
    assert_eq!(table.total(), total);
    if matches!(header.kind, Kind::Write | Kind::Read) {
        assert_eq!(total, header.payload);
    }
}
