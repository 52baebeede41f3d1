//! Announcements of tagged messages.

use std::sync::Arc;

use tcpx_net::Span;
use tcpx_proto::descriptor::RegionKey;
use tcpx_proto::frame::{Entry, FLAG_INLINE, Header, Kind, MAX_INLINE_SEND_BYTES, Table};

use crate::memory::Memory;

/// Limits the length of one entry of an announcement, so that it fits the wire format.
const MAX_ENTRY_BYTES: usize = 1 << 30;

/// A message to be announced.
pub(crate) struct Announcement {
    pub(crate) id: u64,
    pub(crate) tag: u64,
    pub(crate) source: Span,
    /// The alias of the message's memory, which has its own key.
    pub(crate) memory: Arc<Memory>,
}

impl Announcement {
    /// Appends the frame, with the message itself if it is small. Must be called while revocations
    /// of the memory wait.
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        let len = self.source.len();
        let mut bytes = Vec::new();
        let mut inline = len as u64 <= MAX_INLINE_SEND_BYTES
            && self.memory.is_live()
            && self.memory.device.is_none();
        if inline {
            bytes.resize(len, 0);
            // If the memory cannot be read, the peer's READ of the message will be refused.
            inline = self.source.copy_to(&mut bytes).is_ok();
        }
        let pieces = self.arrival().pieces;
        let header = Header {
            flags: if inline { FLAG_INLINE } else { 0 },
            regions: u16::from(!pieces.is_empty()),
            entries: pieces.len() as u32,
            extra: 8,
            payload: if inline { len as u64 } else { 0 },
            ..Header::new(Kind::Send, self.id)
        };
        header.encode(out);
        if !pieces.is_empty() {
            out.extend_from_slice(&self.memory.key().0);
        }
        for (_, entry) in &pieces {
            entry.encode(out);
        }
        out.extend_from_slice(&self.tag.to_le_bytes());
        if inline {
            out.append(&mut bytes);
        }
    }

    /// Returns the announcement as a session that sends to itself receives it.
    pub(crate) fn arrival(&self) -> Arrival {
        let len = self.source.len();
        let key = self.memory.key();
        let pieces = (0..len.div_ceil(MAX_ENTRY_BYTES)).map(|index| {
            let offset = index * MAX_ENTRY_BYTES;
            let address = (self.source.address() + offset) as u64;
            (
                key,
                Entry {
                    address,
                    len: (len - offset).min(MAX_ENTRY_BYTES) as u32,
                    region: 0,
                },
            )
        });
        Arrival {
            id: self.id,
            tag: self.tag,
            len: len as u64,
            pieces: pieces.collect(),
            inline: None,
        }
    }
}

/// An announcement that has arrived.
#[derive(Debug)]
pub(crate) struct Arrival {
    pub(crate) id: u64,
    pub(crate) tag: u64,
    pub(crate) len: u64,
    pub(crate) pieces: Vec<(RegionKey, Entry)>,
    pub(crate) inline: Option<Vec<u8>>,
}

impl Arrival {
    /// Makes an arrival from a decoded frame; `tag` has 8 bytes (checked with the header).
    pub(crate) fn new(id: u64, tag: &[u8], table: &Table<'_>, inline: Option<Vec<u8>>) -> Self {
        let mut word = [0; 8];
        word.copy_from_slice(tag);
        let keys: Vec<_> = table.regions().collect();
        let pieces = table
            .entries()
            .map(|e| (keys[e.region as usize], e))
            .collect();
        Self {
            id,
            tag: u64::from_le_bytes(word),
            len: table.total(),
            pieces,
            inline,
        }
    }
}
