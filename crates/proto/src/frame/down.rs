//! The payload of [`Kind::LaneDown`]: how the WRITE chunks of a lost stream ended.
//!
//! The `transfer` of the frame names the stream: the lane in its low 16 bits, above them the
//! generation of the stream in this lane. Each entry has 16 bytes and a text.

use alloc::string::String;
use alloc::vec::Vec;

use super::{Header, Kind, Status};
use crate::codec::{CodecError, Reader, Writer};
use crate::lane::ChunkId;

/// The longest list: entries for the largest window, each with a short text.
pub const MAX_DOWN_BYTES: usize = 64 << 10;

/// Bytes of an entry without its text.
const ENTRY_BYTES: usize = 16;

/// The longest text of an entry.
const MAX_TEXT: usize = MAX_DOWN_BYTES / 1024 - ENTRY_BYTES;

/// One stream of a connection: a lane, and the number of earlier streams of that lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StreamId {
    /// Number of the lane.
    pub lane: u16,
    /// 0 for the lane's first stream.
    pub generation: u32,
}

impl StreamId {
    /// Decodes the `transfer` of a LaneDown frame.
    #[must_use]
    pub fn from_transfer(transfer: u64) -> Self {
        Self {
            lane: transfer as u16,
            generation: (transfer >> 16) as u32,
        }
    }

    fn transfer(self) -> u64 {
        u64::from(self.lane) | u64::from(self.generation) << 16
    }
}

/// The outcome of a WRITE chunk of the peer: landed, or refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ending {
    /// The chunk.
    pub id: ChunkId,
    /// The reason it was refused, if it was.
    pub refusal: Option<(Status, String)>,
}

/// Appends a LaneDown frame with this number.
pub fn encode<'a>(
    out: &mut Vec<u8>,
    stream: StreamId,
    number: u32,
    endings: impl IntoIterator<Item = &'a Ending>,
) {
    let mut payload = Vec::new();
    for Ending { id, refusal } in endings {
        let (status, text) = match refusal {
            None => (Status::Ok, ""),
            Some((status, text)) => (*status, text.as_str()),
        };
        let text = &text.as_bytes()[..text.floor_char_boundary(MAX_TEXT)];
        payload.put_u64(id.transfer);
        payload.put_u32(id.seq);
        payload.put_u8(status as u8);
        payload.put_u8(0);
        payload.put_u16(text.len() as u16);
        payload.put_bytes(text);
    }
    let header = Header {
        seq: number,
        payload: payload.len() as u64,
        ..Header::new(Kind::LaneDown, stream.transfer())
    };
    header.encode(out);
    out.append(&mut payload);
}

/// Decodes the payload of a LaneDown frame.
///
/// # Errors
/// An entry is cut short, or has a reserved byte that is not 0.
pub fn decode(payload: &[u8]) -> Result<Vec<Ending>, CodecError> {
    let mut reader = Reader::new(payload);
    let mut endings = Vec::new();
    while reader.left() > 0 {
        let id = ChunkId {
            transfer: reader.u64()?,
            seq: reader.u32()?,
        };
        let status = Status::from_u8(reader.u8()?);
        reader.reserved()?;
        let len = usize::from(reader.u16()?);
        let text = String::from_utf8_lossy(reader.bytes(len)?).into_owned();
        let refusal = (status != Status::Ok).then_some((status, text));
        endings.push(Ending { id, refusal });
    }
    Ok(endings)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::HEADER_BYTES;
    use alloc::vec;

    fn ending(seq: u32, refusal: Option<(Status, String)>) -> Ending {
        let id = ChunkId { transfer: 7, seq };
        Ending { id, refusal }
    }

    #[test]
    fn what_is_told_of_a_stream_is_what_is_heard() {
        let stream = StreamId {
            lane: 3,
            generation: u32::MAX,
        };
        let refused = Some((Status::OutOfBounds, String::from("no")));
        let told = vec![ending(0, None), ending(u32::MAX, refused)];
        let mut frame = Vec::new();
        encode(&mut frame, stream, 9, &told);
        let (header, payload) = frame.split_first_chunk::<HEADER_BYTES>().unwrap();
        let header = Header::decode(header).unwrap();
        assert_eq!((header.kind, header.seq), (Kind::LaneDown, 9));
        assert_eq!(header.payload as usize, payload.len());
        assert_eq!(StreamId::from_transfer(header.transfer), stream);
        assert_eq!(decode(payload), Ok(told));
        for cut in (1..payload.len()).filter(|cut| *cut != 16) {
            assert!(decode(&payload[..cut]).is_err(), "{cut}");
        }
        let mut reserved = payload.to_vec();
        reserved[13] = 1;
        let found = CodecError::ReservedNotZero { found: 1 };
        assert_eq!(decode(&reserved), Err(found));
    }

    #[test]
    fn a_long_text_is_cut_between_characters() {
        let stream = StreamId {
            lane: 0,
            generation: 0,
        };
        let refused = Some((Status::Other, "ä".repeat(40) + "x"));
        let mut frame = Vec::new();
        encode(&mut frame, stream, 1, &[ending(0, refused)]);
        let [heard] = &decode(&frame[HEADER_BYTES..]).unwrap()[..] else {
            panic!("one entry");
        };
        let text = Some((Status::Other, "ä".repeat(MAX_TEXT / 2)));
        assert_eq!(heard.refusal, text);
    }

    #[test]
    fn the_largest_window_fits() {
        let text = "x".repeat(2000);
        let refused = Some((Status::Other, text));
        let told = vec![ending(1, refused); 1024];
        let mut frame = Vec::new();
        encode(
            &mut frame,
            StreamId {
                lane: 0,
                generation: 0,
            },
            1,
            &told,
        );
        Header::decode(frame.first_chunk().unwrap()).unwrap();
        assert_eq!(decode(&frame[HEADER_BYTES..]).unwrap().len(), 1024);
    }
}
