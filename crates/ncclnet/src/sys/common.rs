//! Types and constants that several versions share.

use std::ffi::{c_char, c_int, c_void};

/// Result of every call: `ncclSuccess` is 0.
pub(crate) const SUCCESS: c_int = 0;
/// The code of a conversion that cannot be made (`ncclInvalidArgument`).
pub(crate) const INVALID_ARGUMENT: c_int = 4;

/// Memory kinds: `type` of a registration, bits of `ptrSupport`.
pub(crate) const PTR_HOST: c_int = 1;
pub(crate) const PTR_CUDA: c_int = 2;
pub(crate) const PTR_DMABUF: c_int = 4;

/// `netDeviceType`: bytes arrive in the buffer.
pub(crate) const DEVICE_HOST: c_int = 0;
/// `netDeviceType`: bytes arrive in bounce pages, and the receiver unpacks them.
pub(crate) const DEVICE_UNPACK: c_int = 1;
/// The only version of the unpack protocol.
pub(crate) const UNPACK_VERSION: c_int = 7;

/// Maximum length of a message where sizes are `int`: NCCL's own limit for such plugins.
pub(crate) const MAX_INT_MESSAGE: usize = 1 << 30;
/// Maximum length of a registration where its size is `int`.
pub(crate) const MAX_INT_REGISTRATION: usize = c_int::MAX as usize;

/// Number of requests that NCCL assumes a comm can hold: 8 up to version 6, 32 later. Existing
/// plugins provide 16.
pub(crate) const SLOTS_UP_TO_V6: usize = 8;
pub(crate) const SLOTS_FROM_V7: usize = 16;

/// Names a required member of the table that is NULL.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct MissingMember(pub(crate) &'static str);

/// Reads a member that every plugin must have.
macro_rules! required {
    ($table:ident . $member:ident, $c_name:literal) => {
        $table
            .$member
            .ok_or($crate::sys::common::MissingMember($c_name))?
    };
}
pub(crate) use required;

/// `ncclNetDeviceHandle_vN_t`, the same from version 7 to 12.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct RawDeviceHandle {
    pub(crate) device_type: c_int,
    pub(crate) device_version: c_int,
    pub(crate) handle: *mut c_void,
    pub(crate) size: usize,
    pub(crate) needs_proxy_progress: c_int,
    /// Explicit, so that all 32 bytes are zero at first.
    pub(crate) padding: c_int,
}

impl RawDeviceHandle {
    pub(crate) const fn zeroed() -> Self {
        Self {
            device_type: 0,
            device_version: 0,
            handle: std::ptr::null_mut(),
            size: 0,
            needs_proxy_progress: 0,
            padding: 0,
        }
    }
}

/// `ncclNetCommConfig_vN_t`, the same from version 10 to 12.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct CommConfig {
    pub(crate) traffic_class: c_int,
}

impl CommConfig {
    /// No traffic class: the plugin's own default.
    pub(crate) const UNDEFINED: Self = Self { traffic_class: -1 };
}

/// A buffer for `getProperties` of any version: zeroed, and larger than all of them, because some
/// plugins write a newer layout than their table's version.
#[repr(C, align(16))]
pub(crate) struct PropertyBuffer([u64; 64]);

impl PropertyBuffer {
    pub(crate) fn new() -> Self {
        Self([0; 64])
    }

    pub(crate) fn as_mut_ptr(&mut self) -> *mut c_void {
        self.0.as_mut_ptr().cast()
    }

    /// Reads the buffer as one version's properties.
    pub(crate) fn read<P: Plain>(&self) -> P {
        const { assert!(size_of::<P>() <= size_of::<Self>() && align_of::<P>() <= 16) };
        // SAFETY: it fits and is aligned (checked above), and `P` is valid for any bytes.
        unsafe { self.0.as_ptr().cast::<P>().read() }
    }
}

/// Marks structs for which any bytes are valid: integers, floats and raw pointers only.
///
/// # Safety
///
/// The implementor has no other kind of field.
pub(crate) unsafe trait Plain: Copy {}

/// Properties of any version, in the newest form. Fields that a version lacks have NCCL's default.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RawProperties {
    pub(crate) name: *const c_char,
    pub(crate) pci_path: *const c_char,
    pub(crate) guid: u64,
    pub(crate) ptr_support: c_int,
    pub(crate) reg_is_global: c_int,
    pub(crate) force_flush: c_int,
    pub(crate) speed: c_int,
    pub(crate) port: c_int,
    pub(crate) latency: f32,
    pub(crate) max_comms: c_int,
    pub(crate) max_recvs: c_int,
    pub(crate) device_type: c_int,
    pub(crate) device_version: c_int,
    pub(crate) max_p2p_bytes: usize,
}

impl RawProperties {
    /// The defaults, which a version overwrites with its fields.
    pub(crate) const DEFAULT: Self = Self {
        name: std::ptr::null(),
        pci_path: std::ptr::null(),
        guid: 0,
        ptr_support: 0,
        reg_is_global: 0,
        force_flush: 0,
        speed: 0,
        port: 0,
        latency: 0.0,
        max_comms: 0,
        max_recvs: 1,
        device_type: DEVICE_HOST,
        device_version: 0,
        max_p2p_bytes: MAX_INT_MESSAGE,
    };
}

/// `ncclNetVDeviceProps_vN_t`: which physical devices a virtual one is made of.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct VirtualDevice<const N: usize> {
    pub(crate) count: c_int,
    pub(crate) devices: [c_int; N],
}
