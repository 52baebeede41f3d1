//! Fixed sizes of staging, which settings and their texts follow from.

/// Slots that each half of a lane holds at most: one at the socket, one at the device, and one so that neither waits
/// for the other.
pub(crate) const DEPTH: usize = 3;

/// How many times as long chunks of a device's memory are as others. Each costs calls of the driver at both ends, and
/// a change of hands.
pub(crate) const CHUNK_FACTOR: usize = 2;

/// Larger slots gain nothing but take memory; smaller ones cost as shorter chunks do.
pub(crate) const MAX_SLOT_BYTES: usize = 2 << 20;
