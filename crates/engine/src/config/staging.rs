//! Fixed sizes of staging, from which settings and their texts are derived.

/// Limits the slots per half of a lane: one at the socket, one at the device, and one so that
/// neither waits for the other.
pub(crate) const DEPTH: usize = 3;

/// Factor by which chunks of device memory are longer. Each chunk costs driver calls and a thread
/// hand-over at both ends.
pub(crate) const CHUNK_FACTOR: usize = 2;

/// Limits the size of a slot. Larger slots only take memory; smaller slots cost as much per byte as
/// shorter chunks.
pub(crate) const MAX_SLOT_BYTES: usize = 2 << 20;
