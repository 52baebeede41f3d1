//! Chunks, and offers to take chunks from.

/// Identifies a chunk, on whichever lane it travels: unique within the session that posted the
/// transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ChunkId {
    /// Number of the transfer.
    pub transfer: u64,
    /// Position of the chunk in its transfer.
    pub seq: u32,
}

impl core::fmt::Display for ChunkId {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "chunk {} of transfer {}", self.seq, self.transfer)
    }
}

/// The direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// From the peer's memory to this side's.
    Read,
    /// From this side's memory to the peer's.
    Write,
}

/// The caller's handle to a chunk of its own. Clones refer to the same chunk.
pub trait Chunk: Clone {
    /// Returns the id of the chunk.
    fn id(&self) -> ChunkId;
    /// Returns the length of its payload in bytes.
    fn bytes(&self) -> u64;
}

/// A source of chunks: one posting of a transfer. Several lanes may take from the same one.
pub trait Offer {
    /// The handle of one chunk.
    type Chunk: Chunk;

    /// Returns the number of the transfer that all of its chunks belong to.
    fn transfer(&self) -> u64;

    /// Returns the direction of all of its chunks.
    fn op(&self) -> Op;

    /// Returns the total number of chunks.
    fn chunks(&self) -> usize;

    /// Takes the next chunk that no lane has taken.
    fn take(&self) -> Take<Self::Chunk>;

    /// Returns an upper bound of the chunks left to take.
    fn left(&self) -> usize;

    /// Returns how many of a connection's lanes take chunks from it: `all`, unless it uses only
    /// some.
    fn lanes(&self, all: usize) -> usize {
        all
    }

    /// Returns whether there may be a chunk left to take.
    fn has_more(&self) -> bool {
        self.left() > 0
    }
}

/// The result of taking a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Take<C> {
    /// The chunk, for which the taker is now responsible.
    Chunk(C),
    /// Other lanes have taken every chunk.
    Nothing,
    /// No chunk may be moved any more, for instance because its memory was revoked.
    Dead,
}
