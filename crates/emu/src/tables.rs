//! The C side: function tables, properties and constants of NCCL net plugins v6, v7 and v8.
//!
//! Every C enum is a plain `c_int` here, and every function pointer may be null: a reader of a
//! foreign table cannot assume more.

use std::ffi::{c_char, c_int, c_ulong, c_void};

/// Result codes (`ncclResult_t`).
pub mod result {
    use std::ffi::c_int;

    /// Success, or in progress.
    pub const SUCCESS: c_int = 0;
    /// A CUDA driver call failed.
    pub const UNHANDLED_CUDA_ERROR: c_int = 1;
    /// A system call failed, or the peer is gone.
    pub const SYSTEM_ERROR: c_int = 2;
    /// The call violates the contract, or a limit was reached.
    pub const INTERNAL_ERROR: c_int = 3;
    /// A setting has an invalid value.
    pub const INVALID_ARGUMENT: c_int = 4;
    /// More was sent than fits the receive.
    pub const INVALID_USAGE: c_int = 5;
    /// The peer closed the connection (plain tables).
    pub const REMOTE_ERROR: c_int = 6;
}

/// Memory kinds, as bits in `ptr_support` and as the `type` of `regMr`.
pub mod memory_kind {
    use std::ffi::c_int;

    /// Ordinary memory.
    pub const HOST: c_int = 1;
    /// GPU memory.
    pub const CUDA: c_int = 2;
}

/// Device types of a net device and of a device handle.
pub mod net_device {
    use std::ffi::c_int;

    /// Received bytes are in the posted buffer.
    pub const HOST: c_int = 0;
    /// Received bytes are in bounce pages and have to be unpacked.
    pub const UNPACK: c_int = 1;
    /// The version of [`HOST`].
    pub const INVALID_VERSION: c_int = 0;
    /// The version of [`UNPACK`].
    pub const UNPACK_VERSION: c_int = 7;
}

/// Maximum bytes of a connection handle.
pub const HANDLE_BYTES: usize = 128;

/// `ncclDebugLogger_t`: printf-style.
pub type Logger = unsafe extern "C" fn(
    level: c_int,
    flags: c_ulong,
    file: *const c_char,
    line: c_int,
    format: *const c_char,
    ...
);

/// `ncclNetDeviceHandle_v7_t`: the interface of a receive comm for code on the device.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DeviceHandle {
    /// One of [`net_device`].
    pub net_device_type: c_int,
    /// Its version.
    pub net_device_version: c_int,
    /// Device pointer to [`crate::ring::UnpackHandle`].
    pub handle: *mut c_void,
    /// Size of the target of `handle`.
    pub size: usize,
    /// Whether the host has to poll for progress.
    pub needs_proxy_progress: c_int,
}

impl DeviceHandle {
    /// All zero, as `accept` expects it.
    pub const ZERO: Self = Self {
        net_device_type: 0,
        net_device_version: 0,
        handle: std::ptr::null_mut(),
        size: 0,
        needs_proxy_progress: 0,
    };
}

/// `ncclNetProperties_v6_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PropertiesV6 {
    /// Name of the device; owned by the plugin.
    pub name: *const c_char,
    /// Path in sysfs, null for a virtual device.
    pub pci_path: *const c_char,
    /// Identifies the device.
    pub guid: u64,
    /// Bits of [`memory_kind`].
    pub ptr_support: c_int,
    /// Mbit/s.
    pub speed: c_int,
    /// Port number.
    pub port: c_int,
    /// µs.
    pub latency: f32,
    /// Maximum comms.
    pub max_comms: c_int,
    /// Maximum receives of one `irecv`.
    pub max_recvs: c_int,
}

/// `ncclNetProperties_v7_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PropertiesV7 {
    /// The fields of v6, in the same places.
    pub common: PropertiesV6,
    /// One of [`net_device`].
    pub net_device_type: c_int,
    /// Its version.
    pub net_device_version: c_int,
}

/// `ncclNetProperties_v8_t`: `reg_is_global` shifts the rest.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PropertiesV8 {
    /// Name of the device; owned by the plugin.
    pub name: *const c_char,
    /// Path in sysfs, null for a virtual device.
    pub pci_path: *const c_char,
    /// Identifies the device.
    pub guid: u64,
    /// Bits of [`memory_kind`].
    pub ptr_support: c_int,
    /// Whether a registration is valid for every comm.
    pub reg_is_global: c_int,
    /// Mbit/s.
    pub speed: c_int,
    /// Port number.
    pub port: c_int,
    /// µs.
    pub latency: f32,
    /// Maximum comms.
    pub max_comms: c_int,
    /// Maximum receives of one `irecv`.
    pub max_recvs: c_int,
    /// One of [`net_device`].
    pub net_device_type: c_int,
    /// Its version.
    pub net_device_version: c_int,
}

// The members' types, in the order of the tables.
type Init = unsafe extern "C" fn(Option<Logger>) -> c_int;
type Devices = unsafe extern "C" fn(*mut c_int) -> c_int;
type GetProperties<P> = unsafe extern "C" fn(c_int, *mut P) -> c_int;
type Listen = unsafe extern "C" fn(c_int, *mut c_void, *mut *mut c_void) -> c_int;
type ConnectV6 = unsafe extern "C" fn(c_int, *mut c_void, *mut *mut c_void) -> c_int;
type Connect =
    unsafe extern "C" fn(c_int, *mut c_void, *mut *mut c_void, *mut *mut DeviceHandle) -> c_int;
type AcceptV6 = unsafe extern "C" fn(*mut c_void, *mut *mut c_void) -> c_int;
type Accept = unsafe extern "C" fn(*mut c_void, *mut *mut c_void, *mut *mut DeviceHandle) -> c_int;
type RegMr<Size> =
    unsafe extern "C" fn(*mut c_void, *mut c_void, Size, c_int, *mut *mut c_void) -> c_int;
type RegMrDmaBuf = unsafe extern "C" fn(
    *mut c_void,
    *mut c_void,
    usize,
    c_int,
    u64,
    c_int,
    *mut *mut c_void,
) -> c_int;
type DeregMr = unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_int;
type Isend = unsafe extern "C" fn(
    *mut c_void,
    *mut c_void,
    c_int,
    c_int,
    *mut c_void,
    *mut *mut c_void,
) -> c_int;
type Irecv = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    *mut *mut c_void,
    *mut c_int,
    *mut c_int,
    *mut *mut c_void,
    *mut *mut c_void,
) -> c_int;
type Iflush = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    *mut *mut c_void,
    *mut c_int,
    *mut *mut c_void,
    *mut *mut c_void,
) -> c_int;
type Test = unsafe extern "C" fn(*mut c_void, *mut c_int, *mut c_int) -> c_int;
type Close = unsafe extern "C" fn(*mut c_void) -> c_int;
type GetDeviceMr = unsafe extern "C" fn(*mut c_void, *mut c_void, *mut *mut c_void) -> c_int;
type IrecvConsumed = unsafe extern "C" fn(*mut c_void, c_int, *mut c_void) -> c_int;

/// `ncclNet_v6_t`.
#[repr(C)]
#[expect(missing_docs, reason = "the members are NCCL's, see its headers")]
pub struct NetV6 {
    pub name: *const c_char,
    pub init: Option<Init>,
    pub devices: Option<Devices>,
    pub get_properties: Option<GetProperties<PropertiesV6>>,
    pub listen: Option<Listen>,
    pub connect: Option<ConnectV6>,
    pub accept: Option<AcceptV6>,
    pub reg_mr: Option<RegMr<c_int>>,
    pub reg_mr_dma_buf: Option<RegMrDmaBuf>,
    pub dereg_mr: Option<DeregMr>,
    pub isend: Option<Isend>,
    pub irecv: Option<Irecv>,
    pub iflush: Option<Iflush>,
    pub test: Option<Test>,
    pub close_send: Option<Close>,
    pub close_recv: Option<Close>,
    pub close_listen: Option<Close>,
}

/// `ncclNet_v7_t`, and with other parameters `ncclNet_v8_t`.
#[repr(C)]
#[expect(missing_docs, reason = "the members are NCCL's, see its headers")]
pub struct NetTable<Properties, Size> {
    pub name: *const c_char,
    pub init: Option<Init>,
    pub devices: Option<Devices>,
    pub get_properties: Option<GetProperties<Properties>>,
    pub listen: Option<Listen>,
    pub connect: Option<Connect>,
    pub accept: Option<Accept>,
    pub reg_mr: Option<RegMr<Size>>,
    pub reg_mr_dma_buf: Option<RegMrDmaBuf>,
    pub dereg_mr: Option<DeregMr>,
    pub isend: Option<Isend>,
    pub irecv: Option<Irecv>,
    pub iflush: Option<Iflush>,
    pub test: Option<Test>,
    pub close_send: Option<Close>,
    pub close_recv: Option<Close>,
    pub close_listen: Option<Close>,
    pub get_device_mr: Option<GetDeviceMr>,
    pub irecv_consumed: Option<IrecvConsumed>,
}

/// `ncclNet_v7_t`: sizes of registrations are `int`.
pub type NetV7 = NetTable<PropertiesV7, c_int>;
/// `ncclNet_v8_t`: sizes of registrations are `size_t`.
pub type NetV8 = NetTable<PropertiesV8, usize>;

// SAFETY: a table is never written after it was made, and its strings are static.
unsafe impl Sync for NetV6 {}
// SAFETY: as above.
unsafe impl<P, S> Sync for NetTable<P, S> {}

const _: () = {
    assert!(size_of::<DeviceHandle>() == 32);
    assert!(size_of::<PropertiesV6>() == 48);
    assert!(size_of::<PropertiesV7>() == 56);
    assert!(size_of::<PropertiesV8>() == 64);
    assert!(size_of::<NetV6>() == 136);
    assert!(size_of::<NetV7>() == 152);
    assert!(size_of::<NetV8>() == 152);
};
