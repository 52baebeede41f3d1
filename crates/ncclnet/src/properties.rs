//! Properties of a plugin's device.

use std::ffi::{CStr, c_char};
use std::fmt;

use crate::sys::Abi;
use crate::sys::common::{
    DEVICE_UNPACK, MAX_INT_MESSAGE, PTR_CUDA, PTR_DMABUF, PTR_HOST, RawProperties,
};

/// The kind of registered memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MemoryKind {
    /// Memory of the host.
    Host,
    /// Memory of a CUDA device.
    Cuda,
}

impl MemoryKind {
    pub(crate) fn raw(self) -> i32 {
        match self {
            Self::Host => PTR_HOST,
            Self::Cuda => PTR_CUDA,
        }
    }
}

impl fmt::Display for MemoryKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Host => "host",
            Self::Cuda => "CUDA",
        })
    }
}

/// The way received bytes reach the buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DeviceType {
    /// The plugin writes them there.
    Host,
    /// They stay in bounce pages of the plugin. The receiver unpacks them, by the ring behind
    /// [`DeviceHandle`](crate::DeviceHandle), and only then [consumes](crate::RecvComm::consume)
    /// the receive.
    Unpack,
}

/// One network device, as the plugin describes it. Fields that a version of the API lacks have
/// NCCL's default.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Properties {
    /// The device's name, such as `eth1` or `mlx5_0`.
    pub name: String,
    /// Its place in `/sys`, if it is a PCI device.
    pub pci_path: Option<String>,
    /// The plugin's own identity for it.
    pub guid: u64,
    /// Whether host memory can be registered.
    pub host_memory: bool,
    /// Whether CUDA memory can be registered.
    pub cuda_memory: bool,
    /// Whether CUDA memory can be registered by its dma-buf.
    pub dmabuf: bool,
    /// Whether a registration on one comm is valid on all; registering on each comm is correct
    /// either way.
    pub reg_is_global: bool,
    /// Whether a flush is needed after each receive into CUDA memory.
    pub force_flush: bool,
    /// Line rate in Mbit/s, as the plugin reports it.
    pub speed_mbps: i32,
    /// Port number.
    pub port: i32,
    /// Latency in microseconds, 0 if unknown.
    pub latency_us: f32,
    /// Maximum comms of the device. Version 4 plugins may report anything here: some write a later
    /// layout.
    pub max_comms: i32,
    /// Maximum buffers of one receive. This crate posts one.
    pub max_recvs: i32,
    /// The way received bytes reach the buffer.
    pub device_type: DeviceType,
    /// Maximum bytes of one `isend` or `irecv`.
    pub max_message_bytes: usize,
    /// Maximum bytes of one registration.
    pub max_registration_bytes: usize,
}

impl Properties {
    /// Returns whether memory of this kind can be registered.
    #[must_use]
    pub fn reaches(&self, kind: MemoryKind) -> bool {
        match kind {
            MemoryKind::Host => self.host_memory,
            MemoryKind::Cuda => self.cuda_memory,
        }
    }

    /// # Safety
    ///
    /// The strings are NULL or C strings of the plugin.
    pub(crate) unsafe fn from_raw(raw: &RawProperties, abi: &Abi) -> Self {
        let plugin_limit = match raw.max_p2p_bytes {
            0 => MAX_INT_MESSAGE,
            bytes => bytes,
        };
        Self {
            // SAFETY: the caller guarantees the strings.
            name: unsafe { text(raw.name) }.unwrap_or_default(),
            // SAFETY: as above.
            pci_path: unsafe { text(raw.pci_path) },
            guid: raw.guid,
            host_memory: raw.ptr_support & PTR_HOST != 0,
            cuda_memory: raw.ptr_support & PTR_CUDA != 0,
            dmabuf: raw.ptr_support & PTR_DMABUF != 0,
            reg_is_global: raw.reg_is_global != 0,
            force_flush: raw.force_flush != 0,
            speed_mbps: raw.speed,
            port: raw.port,
            latency_us: raw.latency,
            max_comms: raw.max_comms,
            max_recvs: raw.max_recvs,
            device_type: if raw.device_type == DEVICE_UNPACK {
                DeviceType::Unpack
            } else {
                DeviceType::Host
            },
            max_message_bytes: plugin_limit.min(abi.max_message),
            max_registration_bytes: abi.max_registration,
        }
    }
}

/// # Safety
///
/// `text` is NULL or a C string.
unsafe fn text(text: *const c_char) -> Option<String> {
    if text.is_null() {
        return None;
    }
    // SAFETY: the caller guarantees the string.
    Some(
        unsafe { CStr::from_ptr(text) }
            .to_string_lossy()
            .into_owned(),
    )
}
