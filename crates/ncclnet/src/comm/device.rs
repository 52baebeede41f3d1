//! What an unpack device hands to its user.

use std::ffi::c_void;

use crate::properties::DeviceType;
use crate::sys::common::{DEVICE_UNPACK, RawDeviceHandle, UNPACK_VERSION};

/// Where the bytes of a [`RecvComm`](crate::RecvComm) are to be found on an unpack device. Its pointers
/// are the plugin's and valid while the comm is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceHandle {
    /// Always [`DeviceType::Unpack`]: there is no handle otherwise.
    pub device_type: DeviceType,
    /// Version of the protocol: 7.
    pub version: i32,
    /// The protocol's own structure, in the memory the protocol says (device memory on real hardware).
    pub handle: *mut c_void,
    /// How many bytes it has.
    pub size: usize,
    /// Whether the plugin makes progress only while requests are tested.
    pub needs_proxy_progress: bool,
}

// SAFETY: an address that this crate never follows.
unsafe impl Send for DeviceHandle {}
// SAFETY: as above.
unsafe impl Sync for DeviceHandle {}

impl DeviceHandle {
    /// The handle a plugin has filled in; `None` if it is not of the unpack protocol.
    pub(super) fn from_raw(raw: &RawDeviceHandle) -> Option<Self> {
        let known = raw.device_type == DEVICE_UNPACK && raw.device_version == UNPACK_VERSION;
        known.then_some(Self {
            device_type: DeviceType::Unpack,
            version: raw.device_version,
            handle: raw.handle,
            size: raw.size,
            needs_proxy_progress: raw.needs_proxy_progress != 0,
        })
    }
}
