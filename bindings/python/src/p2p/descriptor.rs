//! Blobs that stand for memory, and `XferDesc`.

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use tcpx::RemoteRegion;
use tcpx_proto::descriptor::{Memory, RegionDescriptor, RegionKey};

/// Bytes of the blob that `advertise` makes.
pub(super) const BLOB: usize = 64;
/// Bytes of the blob that `advertise_ipc` makes.
pub(super) const IPC_BLOB: usize = 104;

/// Where the region's descriptor begins in each of them. In front are address (8) and size (4) of the part that is meant, which
/// programs change in place; here and there the region that it is a part of.
const BLOB_REGION: usize = 12;
const IPC_REGION: usize = 16;

/// Part of a peer's region.
pub(super) struct Remote {
    pub(super) region: RemoteRegion,
    /// From the region's start.
    pub(super) offset: usize,
}

impl Remote {
    /// From the blob that the peer's `advertise` made.
    pub(super) fn from_blob(blob: &[u8]) -> PyResult<Self> {
        Self::from_parts(blob, BLOB, BLOB_REGION)
    }

    /// From the blob that the peer's `advertise_ipc` made.
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

    /// From an address and the key of the region that it lies in; `len` bytes of it are going to be used.
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
        // The owner knows where the region begins and ends; here the part that is used says it all.
        let part = RegionDescriptor::new(address, len, key, memory)
            .map_err(|error| wrong(&error.to_string()))?;
        let region =
            RemoteRegion::from_bytes(&part.encode()).map_err(|error| wrong(&error.to_string()))?;
        Ok(Self { region, offset: 0 })
    }
}

/// The blob for a part of a region.
pub(super) fn blob(address: u64, size: u64, region: &RemoteRegion) -> [u8; BLOB] {
    let mut blob = [0; BLOB];
    blob[..8].copy_from_slice(&address.to_le_bytes());
    // Programs read four bytes here; larger sizes travel in the calls.
    let size = u32::try_from(size).unwrap_or(u32::MAX);
    blob[8..12].copy_from_slice(&size.to_le_bytes());
    let region = region.to_bytes();
    blob[BLOB_REGION..BLOB_REGION + region.len()].copy_from_slice(&region);
    blob
}

/// The blob for a part of a region, in the form of the calls for one host.
pub(super) fn ipc_blob(address: u64, size: u64, region: &RemoteRegion) -> [u8; IPC_BLOB] {
    let mut blob = [0; IPC_BLOB];
    blob[..8].copy_from_slice(&address.to_le_bytes());
    blob[8..16].copy_from_slice(&size.to_le_bytes());
    let region = region.to_bytes();
    blob[IPC_REGION..IPC_REGION + region.len()].copy_from_slice(&region);
    blob
}

/// What a descriptor says of a region in numbers, four each: on which device the memory lies, from 1 on, where 0 is the host; and
/// the key.
pub(super) fn key_words(region: &RemoteRegion) -> (Vec<u32>, Vec<u32>) {
    // A descriptor that the engine made is one.
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
    (vec![place, 0, 0, 0], words.collect())
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

/// Describes memory for `transfer`: address and size, the registration here, the keys that grant access. Copying the keys into a
/// new object with another address and size describes a part of the same registration.
#[pyclass(get_all, set_all, module = "tcpx.p2p")]
#[derive(Default)]
pub(super) struct XferDesc {
    pub(super) addr: u64,
    pub(super) size: u64,
    pub(super) mr_id: u64,
    pub(super) lkeys: Vec<u32>,
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

    /// Takes the next descriptor of a serialised list.
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

/// What a transfer is known by. Nothing returns one; it is here because programs name the type.
#[pyclass(frozen, get_all, module = "tcpx.p2p")]
pub(super) struct XferHandle {
    conn_id: u64,
    op_name: String,
    transfer_id: u64,
}
