//! Blobs that represent memory, and `XferDesc`.

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use tcpx::RemoteRegion;
use tcpx_proto::descriptor::{Memory, RegionDescriptor, RegionKey};

/// Size of the blob from `advertise`.
pub(super) const BLOB: usize = 64;
/// Size of the blob from `advertise_ipc`.
pub(super) const IPC_BLOB: usize = 104;

/// Offset of the region's descriptor in each blob. Before it are address (8) and size (4) of the
/// advertised part, which programs change in place; the descriptor covers the whole region.
const BLOB_REGION: usize = 12;
const IPC_REGION: usize = 16;

/// Part of a peer's region.
pub(super) struct Remote {
    pub(super) region: RemoteRegion,
    /// Offset from the region's start.
    pub(super) offset: usize,
}

impl Remote {
    /// Parses a blob from the peer's `advertise`.
    pub(super) fn from_blob(blob: &[u8]) -> PyResult<Self> {
        Self::from_parts(blob, BLOB, BLOB_REGION)
    }

    /// Parses a blob from the peer's `advertise_ipc`.
    pub(super) fn from_ipc_blob(blob: &[u8]) -> PyResult<Self> {
        Self::from_parts(blob, IPC_BLOB, IPC_REGION)
    }

    fn from_parts(blob: &[u8], len: usize, region_at: usize) -> PyResult<Self> {
        let wrong = |why: String| {
            PyRuntimeError::new_err(format!("not usable as metadata of memory: {why}"))
        };
        if blob.len() != len {
            return Err(wrong(format!("{} bytes, expected {len}", blob.len())));
        }
        let mut address = [0; 8];
        address.copy_from_slice(&blob[..8]);
        let region = &blob[region_at..region_at + RegionDescriptor::ENCODED_LEN];
        let region = RemoteRegion::from_bytes(region).map_err(|error| wrong(error.to_string()))?;
        let address = u64::from_le_bytes(address);
        let offset = address
            .checked_sub(region.address())
            .and_then(|offset| usize::try_from(offset).ok())
            .ok_or_else(|| {
                wrong(format!(
                    "{address:#x} lies before its region, which begins at {:#x}",
                    region.address()
                ))
            })?;
        Ok(Self { region, offset })
    }

    /// Creates it from an address and the key of its region; `len` bytes of it will be used.
    pub(super) fn from_keys(
        (address, len): (u64, u64),
        lkeys: &[u32],
        rkeys: &[u32],
    ) -> PyResult<Self> {
        let wrong =
            |why: &str| PyRuntimeError::new_err(format!("not usable as a descriptor: {why}"));
        let key = key_from_words(rkeys).ok_or_else(|| wrong("it has no keys"))?;
        let memory = match lkeys.first().and_then(|place| place.checked_sub(1)) {
            Some(device) => Memory::Cuda { device },
            None => Memory::Host,
        };
        // The owner knows the bounds of the region; here the used part is enough.
        let part = RegionDescriptor::new(address, len, key, memory)
            .map_err(|error| wrong(&error.to_string()))?;
        let region =
            RemoteRegion::from_bytes(&part.encode()).map_err(|error| wrong(&error.to_string()))?;
        Ok(Self { region, offset: 0 })
    }
}

/// Creates the blob for a part of a region.
pub(super) fn blob(address: u64, size: u64, region: &RemoteRegion) -> [u8; BLOB] {
    let mut blob = [0; BLOB];
    blob[..8].copy_from_slice(&address.to_le_bytes());
    // Programs read four bytes here; larger sizes are arguments of the calls.
    let size = u32::try_from(size).unwrap_or(u32::MAX);
    blob[8..12].copy_from_slice(&size.to_le_bytes());
    let region = region.to_bytes();
    blob[BLOB_REGION..BLOB_REGION + region.len()].copy_from_slice(&region);
    blob
}

/// Creates the blob for a part of a region, in the format of the calls for one host.
pub(super) fn ipc_blob(address: u64, size: u64, region: &RemoteRegion) -> [u8; IPC_BLOB] {
    let mut blob = [0; IPC_BLOB];
    blob[..8].copy_from_slice(&address.to_le_bytes());
    blob[8..16].copy_from_slice(&size.to_le_bytes());
    let region = region.to_bytes();
    blob[IPC_REGION..IPC_REGION + region.len()].copy_from_slice(&region);
    blob
}

/// Describes a region by two lists of four numbers. `rkeys` is the key. `lkeys` begins with the
/// device of the memory, from 1 on, where 0 is the host; the rest is the key's, so that programs
/// which compare `lkeys` get the same result as with `rkeys`.
pub(super) fn key_words(region: &RemoteRegion) -> (Vec<u32>, Vec<u32>) {
    // A descriptor from the engine is always valid.
    let Ok(descriptor) = RegionDescriptor::decode(&region.to_bytes()) else {
        return (Vec::new(), Vec::new());
    };
    let place = match descriptor.memory() {
        Memory::Cuda { device } => device.saturating_add(1),
        _ => 0,
    };
    let key = descriptor.key().0;
    let words = key.chunks_exact(4);
    let words = words.map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]));
    let rkeys: Vec<u32> = words.collect();
    let lkeys = std::iter::once(place).chain(rkeys[1..].iter().copied());
    (lkeys.collect(), rkeys)
}

fn key_from_words(words: &[u32]) -> Option<RegionKey> {
    let mut key = [0; RegionKey::LEN];
    if words.len() * 4 != key.len() {
        return None;
    }
    for (bytes, word) in key.chunks_exact_mut(4).zip(words) {
        bytes.copy_from_slice(&word.to_le_bytes());
    }
    Some(RegionKey(key))
}

/// Describes memory for `transfer`: address and size, the local registration, the keys that grant
/// access. Copying the keys into a new object with another address and size describes a part of the
/// same registration.
#[pyclass(get_all, set_all, module = "tcpx.p2p")]
#[derive(Default)]
pub(super) struct XferDesc {
    /// The address of the first byte.
    pub(super) addr: u64,
    /// Bytes.
    pub(super) size: u64,
    /// The number of the local registration; it is not sent to peers.
    pub(super) mr_id: u64,
    /// Keys of the registration for this side: equal for memory that shares a registration.
    pub(super) lkeys: Vec<u32>,
    /// Keys that grant access to peers.
    pub(super) rkeys: Vec<u32>,
}

#[pymethods]
impl XferDesc {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    fn __repr__(&self) -> String {
        format!(
            "<XferDesc addr={} size={} mr_id={}>",
            self.addr, self.size, self.mr_id
        )
    }
}

impl XferDesc {
    /// Appends the descriptor to a serialised list.
    pub(super) fn write_to(&self, bytes: &mut Vec<u8>) {
        let keys = self.lkeys.len().min(self.rkeys.len());
        for number in [self.addr, self.size, keys as u64] {
            bytes.extend(number.to_le_bytes());
        }
        for key in self.lkeys[..keys].iter().chain(&self.rkeys[..keys]) {
            bytes.extend(key.to_le_bytes());
        }
        // Nothing else is needed within a host.
        bytes.extend(0u64.to_le_bytes());
    }

    /// Reads the next descriptor of a serialised list.
    pub(super) fn read_from(bytes: &mut &[u8]) -> Option<Self> {
        let (addr, size) = (take_u64(bytes)?, take_u64(bytes)?);
        let keys = usize::try_from(take_u64(bytes)?).ok()?;
        let mut take_keys = || {
            let words = bytes.split_off(..keys.checked_mul(4)?)?.chunks_exact(4);
            let words = words.map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]));
            Some(words.collect::<Vec<_>>())
        };
        let (lkeys, rkeys) = (take_keys()?, take_keys()?);
        let more = usize::try_from(take_u64(bytes)?).ok()?;
        bytes.split_off(..more)?;
        Some(Self {
            addr,
            size,
            mr_id: u64::MAX,
            lkeys,
            rkeys,
        })
    }
}

pub(super) fn take_u64(bytes: &mut &[u8]) -> Option<u64> {
    let word = bytes.split_off(..8)?;
    Some(u64::from_le_bytes(word.try_into().ok()?))
}

/// Identifies a transfer. Nothing returns one; it exists because programs name the type.
#[pyclass(frozen, get_all, module = "tcpx.p2p")]
pub(super) struct XferHandle {
    /// The connection's number.
    conn_id: u64,
    /// "read" or "write".
    op_name: String,
    /// The transfer's number.
    transfer_id: u64,
}
