//! Encodes how another process maps device memory. Pure.

use std::fmt;

use crate::Range;
use crate::error::Error;
use crate::side::ADDRESS_BITS;

/// Maximum pieces of virtual memory of one export; each is a file descriptor.
pub const MAX_PIECES: usize = 4096;
/// Maximum bytes of device memory of one export: more than any GPU has.
const MAX_LEN: u64 = 1 << 40;
/// Bytes that only the driver reads.
pub(crate) const OPAQUE: usize = 64;

/// Version of the encoding.
const VERSION: u8 = 1;
const KIND_IPC: u8 = 1;
const KIND_PIECES: u8 = 2;
const KIND_POOL: u8 = 3;

/// Size of version, kind, GPU, owner, base and length.
const HEAD: usize = 2 + 16 + 16 + 8 + 8;

/// A GPU of this host by its UUID, which is the same in every process, unlike its ordinal.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Gpu(pub(crate) [u8; 16]);

impl fmt::Display for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GPU")?;
        for (i, byte) in self.0.iter().enumerate() {
            let dash = if [0, 4, 6, 8, 10].contains(&i) {
                "-"
            } else {
                ""
            };
            write!(f, "{dash}{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Describes device memory of one process to another on the same host: its address there, its GPU,
/// and how to map it. Some descriptions have file descriptors, which travel beside the bytes, in
/// order.
///
/// A decoded description respects all limits of the format; whether the driver accepts it shows
/// when the memory is imported.
#[derive(Clone, PartialEq, Eq)]
pub struct Description {
    pub(crate) gpu: Gpu,
    /// Identifies the process that exported the memory.
    pub(crate) owner: [u8; 16],
    pub(crate) base: usize,
    /// `0 < len <= MAX_LEN`, and the end is below 2^48.
    pub(crate) len: usize,
    pub(crate) way: Way,
}

/// The way memory is mapped.
#[derive(Clone, PartialEq, Eq)]
pub(crate) enum Way {
    /// By a handle of `cuIpcGetMemHandle`.
    Ipc([u8; OPAQUE]),
    /// As adjacent pieces of virtual memory, a file descriptor each: their lengths, which add up to
    /// the description's. `1 <= pieces <= MAX_PIECES`.
    Pieces(Vec<usize>),
    /// As memory of a pool, which is the only file descriptor.
    Pool([u8; OPAQUE]),
}

impl Description {
    /// The longest encoding.
    pub const MAX_BYTES: usize = HEAD + 2 + 8 * MAX_PIECES;

    /// Returns the address of the first byte, in the process that exported it.
    #[must_use]
    pub fn base(&self) -> usize {
        self.base
    }

    /// Returns the length in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns the GPU that holds the memory.
    #[must_use]
    pub fn gpu(&self) -> Gpu {
        self.gpu
    }

    /// Returns the number of file descriptors that belong to it.
    #[must_use]
    pub fn fd_count(&self) -> usize {
        match &self.way {
            Way::Ipc(_) => 0,
            Way::Pieces(pieces) => pieces.len(),
            Way::Pool(_) => 1,
        }
    }

    /// Returns whether all of a range of the exporting process is described.
    #[must_use]
    pub fn contains(&self, range: Range) -> bool {
        range
            .address
            .checked_sub(self.base)
            .and_then(|offset| offset.checked_add(range.len))
            .is_some_and(|end| end <= self.len)
    }

    /// Encodes the description in at most [`Description::MAX_BYTES`] bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEAD + OPAQUE);
        let kind = match &self.way {
            Way::Ipc(_) => KIND_IPC,
            Way::Pieces(_) => KIND_PIECES,
            Way::Pool(_) => KIND_POOL,
        };
        bytes.extend([VERSION, kind]);
        bytes.extend(self.gpu.0);
        bytes.extend(self.owner);
        bytes.extend((self.base as u64).to_le_bytes());
        bytes.extend((self.len as u64).to_le_bytes());
        match &self.way {
            Way::Ipc(handle) | Way::Pool(handle) => bytes.extend(handle),
            Way::Pieces(pieces) => {
                bytes.extend((pieces.len() as u16).to_le_bytes());
                bytes.extend(pieces.iter().flat_map(|&len| (len as u64).to_le_bytes()));
            }
        }
        bytes
    }

    /// Decodes the output of [`Description::encode`]. The bytes may be arbitrary.
    ///
    /// # Errors
    /// [`Error::BadDescription`] if they break the format or its limits.
    pub fn decode(bytes: &[u8]) -> Result<Self, Error> {
        let mut reader = Reader(bytes);
        let [version, kind] = reader.array()?;
        if version != VERSION {
            return Err(bad("its version is unknown"));
        }
        let (gpu, owner) = (Gpu(reader.array()?), reader.array()?);
        let (base, len) = (reader.number()?, reader.number()?);
        if len == 0 || len > MAX_LEN {
            return Err(bad("its length is out of bounds"));
        }
        if base
            .checked_add(len)
            .is_none_or(|end| end >> ADDRESS_BITS != 0)
        {
            return Err(bad("its address is out of bounds"));
        }
        let way = match kind {
            KIND_IPC => Way::Ipc(reader.array()?),
            KIND_PIECES => Way::Pieces(reader.pieces(len)?),
            KIND_POOL => Way::Pool(reader.array()?),
            _ => return Err(bad("its kind is unknown")),
        };
        if !reader.0.is_empty() {
            return Err(bad("bytes follow its end"));
        }
        Ok(Self {
            gpu,
            owner,
            base: base as usize,
            len: len as usize,
            way,
        })
    }
}

impl fmt::Debug for Description {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Description")
            .field("gpu", &self.gpu)
            .field("base", &format_args!("{:#x}", self.base))
            .field("len", &self.len)
            .field("way", &self.way)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ipc(_) => f.write_str("Ipc"),
            Self::Pieces(pieces) => write!(f, "{} pieces", pieces.len()),
            Self::Pool(_) => f.write_str("Pool"),
        }
    }
}

fn bad(reason: &'static str) -> Error {
    Error::BadDescription { reason }
}

/// The bytes not read yet; reading never goes past their end.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn array<const N: usize>(&mut self) -> Result<[u8; N], Error> {
        let (array, rest) = self
            .0
            .split_first_chunk()
            .ok_or_else(|| bad("it is too short"))?;
        self.0 = rest;
        Ok(*array)
    }

    fn number(&mut self) -> Result<u64, Error> {
        self.array().map(u64::from_le_bytes)
    }

    /// Returns the lengths of pieces that add up to `total`.
    fn pieces(&mut self, total: u64) -> Result<Vec<usize>, Error> {
        let count = usize::from(u16::from_le_bytes(self.array()?));
        if count == 0 || count > MAX_PIECES {
            return Err(bad("its number of pieces is out of bounds"));
        }
        // Checked before memory is allocated for the pieces.
        if self.0.len() != 8 * count {
            return Err(bad("its pieces are cut short"));
        }
        let mut left = total;
        let mut pieces = Vec::with_capacity(count);
        for _ in 0..count {
            let len = self.number()?;
            left = match left.checked_sub(len) {
                Some(left) if len > 0 => left,
                _ => return Err(bad("its pieces do not add up to its length")),
            };
            pieces.push(len as usize);
        }
        if left != 0 {
            return Err(bad("its pieces do not add up to its length"));
        }
        Ok(pieces)
    }
}

#[cfg(test)]
mod tests;
