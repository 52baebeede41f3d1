//! Frames: the messages on an authenticated lane.
//!
//! ```text
//! ┌────────────┬──────────────────────────────┬─────────┬───────────┐
//! │ header     │ table                        │ extra   │ payload   │
//! │ 32 bytes   │ regions × 16 + entries × 16  │ 0..4096 │ 0..       │
//! └────────────┴──────────────────────────────┴─────────┴───────────┘
//! ```
//!
//! A decoded header is valid: the sizes of everything that follows are within the limits of this
//! module and fit the kind of frame. A decoded table is valid too: every entry names a region of
//! the table, no address overflows, and the lengths add up to the length in the header. Whether the
//! *receiver* grants access to those addresses is the engine's decision, made before the first
//! payload byte is read.

pub mod comm;
pub mod down;

use alloc::vec::Vec;

use crate::descriptor::RegionKey;

/// Bytes of the fixed header that starts every frame.
pub const HEADER_BYTES: usize = 32;
/// Bytes of one region key in a table.
pub const REGION_BYTES: usize = 16;
/// Bytes of one entry in a table.
pub const ENTRY_BYTES: usize = 16;
/// The largest table: small enough that a receiver can hold header, table and extra in one 16 KiB
/// buffer per lane, large enough (511 entries) that 4 KiB blocks still make 2 MiB chunks.
pub const MAX_TABLE_BYTES: usize = 8192;
/// The largest `extra` section: notifications up to this size ride along with a chunk.
pub const MAX_EXTRA_BYTES: usize = 4096;
/// The most payload a frame with a table may carry.
pub const MAX_CHUNK_BYTES: u64 = 256 << 20;
/// The longest notification. The receiver's memory grows with the bytes that have arrived, not with
/// the announced length.
pub const MAX_NOTIFICATION_BYTES: u64 = 256 << 20;
/// The most bytes carried inside the announcement of a tagged message.
pub const MAX_INLINE_SEND_BYTES: u64 = 8192;
/// The longest error text a peer may attach.
pub const MAX_TEXT_BYTES: u64 = 1024;
/// Bytes of the `extra` section of [`Kind::Send`]: the tag.
pub const TAG_BYTES: usize = 8;

/// The kind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// A WRITE chunk: table of targets, optional notification in `extra`, then the bytes.
    Write = 1,
    /// The WRITE chunk (`transfer`, `seq`) has landed.
    Ack = 2,
    /// The WRITE chunk (`transfer`, `seq`) was refused; the status is in `flags`, a text in the
    /// payload.
    WriteError = 3,
    /// A READ request: table of sources; `payload` is the length of the answer.
    Read = 4,
    /// The bytes of the READ chunk (`transfer`, `seq`).
    Data = 5,
    /// The READ chunk (`transfer`, `seq`) was refused, as in WriteError.
    ReadError = 6,
    /// A notification: the payload is the message.
    Notify = 7,
    /// Answer with [`Kind::Pong`] and the same `transfer`.
    Ping = 8,
    /// The answer to a ping.
    Pong = 9,
    /// A tagged message: table of sources, the tag in `extra`, small messages in the payload.
    Send = 10,
    /// The receiver of the tagged message `transfer` has received it (status 0) or refused it.
    SendDone = 11,
    /// The sender closes the connection in an orderly way.
    Goodbye = 12,
    /// First frames of a lane with comms: first the data that the peer needs to connect to a comm,
    /// then an empty frame once both comms are connected.
    Comm = 13,
    /// The sender has closed a lane's stream; the payload lists the WRITE chunks that had landed
    /// from it. See [`down`].
    LaneDown = 14,
    /// The numbered messages before `seq` were delivered.
    Received = 15,
}

/// Flag of [`Kind::Write`]: `extra` is a notification, delivered once the chunk has landed. A flag
/// and not a length, because a notification may be empty.
pub const FLAG_NOTIFY: u8 = 1;
/// Flag of [`Kind::Write`] and [`Kind::Data`]: the payload does not follow but travels on the
/// lane's comm, in messages that have the order of their frames.
pub const FLAG_COMM: u8 = 2;
/// Flag of [`Kind::Write`] and [`Kind::Data`]: the sender has further payload for this lane. A
/// hint: the receiver may copy this payload to its memory together with the next.
pub const FLAG_MORE: u8 = 4;
/// Flag of [`Kind::Send`]: the payload holds the whole message.
pub const FLAG_INLINE: u8 = 1;

/// The reason a peer refused or could not finish a chunk. Carried in `flags` of the error frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Status {
    /// Nothing is wrong.
    Ok = 0,
    /// The key belongs to no registered region.
    UnknownRegion = 1,
    /// The range is not inside the region.
    OutOfBounds = 2,
    /// The memory could not be accessed.
    Memory = 3,
    /// The message is longer than the buffer that was posted for it.
    Truncated = 4,
    /// The other side aborted the operation.
    Aborted = 5,
    /// Any other failure; the text says more.
    Other = 255,
}

impl Status {
    /// Decodes a status byte; a value unknown to this version is [`Status::Other`].
    #[must_use]
    pub fn from_u8(value: u8) -> Self {
        match value {
            0 => Self::Ok,
            1 => Self::UnknownRegion,
            2 => Self::OutOfBounds,
            3 => Self::Memory,
            4 => Self::Truncated,
            5 => Self::Aborted,
            _ => Self::Other,
        }
    }
}

/// The fixed part of a frame. See [`Kind`] for the meaning of each field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The kind of the frame.
    pub kind: Kind,
    /// Bits whose meaning depends on the kind, or a [`Status`].
    pub flags: u8,
    /// Region keys in the table.
    pub regions: u16,
    /// Entries in the table.
    pub entries: u32,
    /// The transfer this frame belongs to, unique within the sending session.
    pub transfer: u64,
    /// The chunk's number within its transfer. For Notify, Send, SendDone and LaneDown: the
    /// message's number, or 0 if it has none.
    pub seq: u32,
    /// Bytes of the extra section.
    pub extra: u32,
    /// Bytes of the payload; for [`Kind::Read`], of the answer.
    pub payload: u64,
}

impl Header {
    /// Creates a header with everything but the kind and the transfer zero.
    #[must_use]
    pub const fn new(kind: Kind, transfer: u64) -> Self {
        Self {
            kind,
            flags: 0,
            regions: 0,
            entries: 0,
            transfer,
            seq: 0,
            extra: 0,
            payload: 0,
        }
    }

    /// Appends the 32 bytes of this header.
    pub fn encode(&self, out: &mut Vec<u8>) {
        // Assembled first, so that appending checks the capacity once.
        let mut bytes = [0; HEADER_BYTES];
        bytes[0] = self.kind as u8;
        bytes[1] = self.flags;
        bytes[2..4].copy_from_slice(&self.regions.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.entries.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.transfer.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.seq.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.extra.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.payload.to_le_bytes());
        out.extend_from_slice(&bytes);
    }

    /// Sets the number of the message at the start of `frame`.
    pub fn set_number(frame: &mut [u8], number: u32) {
        if let Some(seq) = frame.get_mut(16..20) {
            seq.copy_from_slice(&number.to_le_bytes());
        }
    }

    /// Adds flags to the header at the start of `frame`.
    pub fn add_flags(frame: &mut [u8], flags: u8) {
        if let Some(known) = frame.get_mut(1) {
            *known |= flags;
        }
    }

    /// Appends this header with a text as its payload, cut to the maximum of the protocol.
    pub fn encode_with_text(&self, out: &mut Vec<u8>, text: &str) {
        let text = &text.as_bytes()[..text.len().min(MAX_TEXT_BYTES as usize)];
        Self {
            payload: text.len() as u64,
            ..*self
        }
        .encode(out);
        out.extend_from_slice(text);
    }

    /// Decodes a header and checks every size in it against the limits of its kind.
    ///
    /// # Errors
    /// The sender broke the protocol: an unknown kind, or a size that its kind may not have.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, FrameError> {
        let kind = match bytes[0] {
            1 => Kind::Write,
            2 => Kind::Ack,
            3 => Kind::WriteError,
            4 => Kind::Read,
            5 => Kind::Data,
            6 => Kind::ReadError,
            7 => Kind::Notify,
            8 => Kind::Ping,
            9 => Kind::Pong,
            10 => Kind::Send,
            11 => Kind::SendDone,
            12 => Kind::Goodbye,
            13 => Kind::Comm,
            14 => Kind::LaneDown,
            15 => Kind::Received,
            other => return Err(FrameError::UnknownKind(other)),
        };
        let header = Self {
            kind,
            flags: bytes[1],
            regions: u16::from_le_bytes([bytes[2], bytes[3]]),
            entries: u32_at(bytes, 4),
            transfer: u64_at(bytes, 8),
            seq: u32_at(bytes, 16),
            extra: u32_at(bytes, 20),
            payload: u64_at(bytes, 24),
        };
        header.check()?;
        Ok(header)
    }

    /// Returns the size of the table that follows the header, in bytes.
    #[must_use]
    pub fn table_bytes(&self) -> usize {
        // Cannot overflow: both counts were checked against MAX_TABLE_BYTES.
        usize::from(self.regions) * REGION_BYTES + self.entries as usize * ENTRY_BYTES
    }

    /// Returns the number of bytes between the header and the payload.
    #[must_use]
    pub fn middle_bytes(&self) -> usize {
        self.table_bytes() + self.extra as usize
    }

    /// Returns whether the payload travels on the lane's comm.
    #[must_use]
    pub fn is_on_comm(&self) -> bool {
        matches!(self.kind, Kind::Write | Kind::Data) && self.flags & FLAG_COMM != 0
    }

    /// Returns whether the sender has further payload for this lane.
    #[must_use]
    pub fn has_more(&self) -> bool {
        matches!(self.kind, Kind::Write | Kind::Data) && self.flags & FLAG_MORE != 0
    }

    /// Returns the payload bytes that follow on the wire. A READ request announces bytes but
    /// carries none, and neither does a frame whose payload is on the comm.
    #[must_use]
    pub fn payload_on_wire(&self) -> u64 {
        if self.kind == Kind::Read || self.is_on_comm() {
            0
        } else {
            self.payload
        }
    }

    fn check(&self) -> Result<(), FrameError> {
        let table = u64::from(self.regions) * REGION_BYTES as u64
            + u64::from(self.entries) * ENTRY_BYTES as u64;
        let (needs_table, max_extra, max_payload) = match self.kind {
            Kind::Write => (true, MAX_EXTRA_BYTES as u64, MAX_CHUNK_BYTES),
            Kind::Read => (true, 0, MAX_CHUNK_BYTES),
            Kind::Data => (false, 0, MAX_CHUNK_BYTES),
            Kind::Notify => (false, 0, MAX_NOTIFICATION_BYTES),
            Kind::Send => (self.entries > 0, TAG_BYTES as u64, MAX_INLINE_SEND_BYTES),
            Kind::WriteError | Kind::ReadError | Kind::SendDone | Kind::Goodbye => {
                (false, 0, MAX_TEXT_BYTES)
            }
            Kind::Comm => (false, 0, comm::MAX_SETUP_BYTES as u64),
            Kind::LaneDown => (false, 0, down::MAX_DOWN_BYTES as u64),
            Kind::Ack | Kind::Ping | Kind::Pong | Kind::Received => (false, 0, 0),
        };
        let sizes_fit = table <= MAX_TABLE_BYTES as u64
            && u64::from(self.extra) <= max_extra
            && self.payload <= max_payload;
        let table_fits = if needs_table {
            self.regions > 0 && self.entries > 0
        } else {
            table == 0
        };
        let sections_fit = match self.kind {
            Kind::Send => {
                self.extra as usize == TAG_BYTES
                    && (self.flags & FLAG_INLINE != 0 || self.payload == 0)
            }
            Kind::Write => {
                (self.flags & FLAG_NOTIFY != 0 || self.extra == 0)
                    && (self.flags & FLAG_COMM == 0 || self.payload > 0)
            }
            Kind::Data => self.flags & FLAG_COMM == 0 || self.payload > 0,
            _ => true,
        };
        let flags_fit = match self.kind {
            Kind::Write => self.flags & !(FLAG_NOTIFY | FLAG_COMM | FLAG_MORE) == 0,
            Kind::Data => self.flags & !(FLAG_COMM | FLAG_MORE) == 0,
            Kind::Send => self.flags <= FLAG_INLINE,
            // A status; values unknown to this version are `Status::Other`.
            Kind::WriteError | Kind::ReadError | Kind::SendDone => true,
            _ => self.flags == 0,
        };
        if sizes_fit && table_fits && sections_fit && flags_fit {
            Ok(())
        } else {
            Err(FrameError::BadSize {
                kind: self.kind,
                regions: self.regions,
                entries: self.entries,
                extra: self.extra,
                payload: self.payload,
                flags: self.flags,
            })
        }
    }
}

/// One range of remote memory in a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Address in the owner's address space.
    pub address: u64,
    /// Bytes, at least one.
    pub len: u32,
    /// Index of the region in the table.
    pub region: u32,
}

impl Entry {
    /// Appends the 16 bytes of this entry.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.address.to_le_bytes());
        out.extend_from_slice(&self.len.to_le_bytes());
        out.extend_from_slice(&self.region.to_le_bytes());
    }

    fn decode(bytes: &[u8]) -> Self {
        Self {
            address: u64_at(bytes, 0),
            len: u32_at(bytes, 8),
            region: u32_at(bytes, 12),
        }
    }
}

/// A validated table, borrowed from the receive buffer.
#[derive(Clone, Copy, Debug)]
pub struct Table<'a> {
    regions: &'a [u8],
    entries: &'a [u8],
    total: u64,
}

impl<'a> Table<'a> {
    /// Decodes the table of a frame with this header. `bytes` must be exactly
    /// [`Header::table_bytes`] long.
    ///
    /// # Errors
    /// The sender broke the protocol: wrong length, an empty entry, an entry of a region that is
    /// not in the table, an address that overflows, or lengths that do not add up.
    pub fn decode(header: &Header, bytes: &'a [u8]) -> Result<Self, FrameError> {
        if bytes.len() != header.table_bytes() {
            return Err(FrameError::TableLength {
                expected: header.table_bytes(),
                found: bytes.len(),
            });
        }
        let (regions, entries) = bytes.split_at(usize::from(header.regions) * REGION_BYTES);
        let mut total = 0u64;
        for entry in entries.chunks_exact(ENTRY_BYTES).map(Entry::decode) {
            if entry.len == 0
                || entry.region >= u32::from(header.regions)
                || entry.address.checked_add(u64::from(entry.len)).is_none()
            {
                return Err(FrameError::BadEntry(entry));
            }
            // At most 512 entries of less than 4 GiB: no overflow.
            total += u64::from(entry.len);
        }
        let expected = match header.kind {
            Kind::Write | Kind::Read => header.payload,
            Kind::Send if header.flags & FLAG_INLINE != 0 => header.payload,
            _ => total,
        };
        if total != expected {
            return Err(FrameError::BadTotal {
                announced: expected,
                found: total,
            });
        }
        Ok(Self {
            regions,
            entries,
            total,
        })
    }

    /// Returns the region keys, in the order in which entries refer to them.
    pub fn regions(&self) -> impl ExactSizeIterator<Item = RegionKey> + 'a {
        self.regions.chunks_exact(REGION_BYTES).map(|key| {
            let mut bytes = [0; REGION_BYTES];
            bytes.copy_from_slice(key);
            RegionKey(bytes)
        })
    }

    /// Returns the ranges, in payload order.
    pub fn entries(&self) -> impl ExactSizeIterator<Item = Entry> + 'a {
        self.entries.chunks_exact(ENTRY_BYTES).map(Entry::decode)
    }

    /// Returns the sum of the lengths of all entries.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.total
    }
}

/// Reports a frame that breaks the protocol.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// This version does not know the kind in the first byte.
    #[error("frame of unknown kind {0}")]
    UnknownKind(u8),
    /// A size is over its limit, or a section or flag is present that this kind does not have.
    #[error(
        "{kind:?} frame with impossible sizes or flags: {regions} regions, {entries} entries, \
         {extra} extra bytes, {payload} payload bytes, flags {flags:#x}"
    )]
    BadSize {
        /// The frame's kind.
        kind: Kind,
        /// Regions announced.
        regions: u16,
        /// Entries announced.
        entries: u32,
        /// Extra bytes announced.
        extra: u32,
        /// Payload bytes announced.
        payload: u64,
        /// Flags given.
        flags: u8,
    },
    /// The table's length is not the one that the header announced.
    #[error("table of {found} bytes where the header announced {expected}")]
    TableLength {
        /// Bytes the header announced.
        expected: usize,
        /// Bytes given.
        found: usize,
    },
    /// An entry is empty, overflows, or names a region that the table does not have.
    #[error("table entry is impossible: {0:?}")]
    BadEntry(Entry),
    /// The entries do not cover the payload.
    #[error("table covers {found} bytes where the header announced {announced}")]
    BadTotal {
        /// Bytes the header announced.
        announced: u64,
        /// Bytes the entries cover.
        found: u64,
    },
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

#[cfg(test)]
mod tests;
