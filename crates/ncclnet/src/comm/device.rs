//! The device handle of an unpack device.

use std::ffi::c_void;

use crate::properties::DeviceType;
use crate::sys::common::{DEVICE_UNPACK, RawDeviceHandle, UNPACK_VERSION};

/// Locates the received bytes of a [`RecvComm`](crate::RecvComm) on an unpack device. Its pointers
/// belong to the plugin and are valid while the comm is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceHandle {
    /// Always [`DeviceType::Unpack`]: there is no handle otherwise.
    pub device_type: DeviceType,
    /// Version of the protocol: 7.
    pub version: i32,
    /// The protocol's own structure, in the memory that the protocol requires (device memory on
    /// real hardware).
    pub handle: *mut c_void,
    /// Its length in bytes.
    pub size: usize,
    /// Whether the plugin makes progress only while requests are tested.
    pub needs_proxy_progress: bool,
}

// SAFETY: an address that this crate never dereferences.
unsafe impl Send for DeviceHandle {}
// SAFETY: as above.
unsafe impl Sync for DeviceHandle {}

impl DeviceHandle {
    /// Converts a handle that a plugin has filled in; `None` if it is not of the unpack protocol.
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
