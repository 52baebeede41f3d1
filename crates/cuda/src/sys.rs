//! The CUDA driver's interface, by its oldest entry points that do the job, found at run time.
//!
//! Written by hand rather than taken from a binding crate: those end the process when the library or a
//! function is missing, and cannot ask whether the library *is already loaded*, which [`crate::locate`]
//! needs.

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use libloading::os::unix::{Library, RTLD_LAZY, RTLD_LOCAL};

use crate::error::Error;

pub(crate) type Device = c_int;
pub(crate) type DevicePtr = u64;
/// Opaque handles.
pub(crate) type Context = *mut c_void;
pub(crate) type Stream = *mut c_void;
pub(crate) type Event = *mut c_void;
pub(crate) type Module = *mut c_void;
pub(crate) type Function = *mut c_void;
pub(crate) type Graph = *mut c_void;
pub(crate) type GraphExec = *mut c_void;

/// `CUresult`: zero is success.
pub(crate) type Code = c_int;
pub(crate) const SUCCESS: Code = 0;
pub(crate) const INVALID_VALUE: Code = 1;
pub(crate) const OUT_OF_MEMORY: Code = 2;
pub(crate) const NOT_INITIALIZED: Code = 3;
pub(crate) const DEINITIALIZED: Code = 4;
pub(crate) const STUB_LIBRARY: Code = 34;
pub(crate) const NO_DEVICE: Code = 100;
pub(crate) const INVALID_CONTEXT: Code = 201;
pub(crate) const UNSUPPORTED_PTX: Code = 222;
pub(crate) const INVALID_HANDLE: Code = 400;
pub(crate) const NOT_READY: Code = 600;
pub(crate) const ILLEGAL_ADDRESS: Code = 700;
pub(crate) const CONTEXT_IS_DESTROYED: Code = 709;
pub(crate) const SYSTEM_DRIVER_MISMATCH: Code = 803;

/// The family of errors about graphs that are being captured.
pub(crate) const CAPTURE_ERRORS: std::ops::RangeInclusive<Code> = 900..=908;

/// `CUstreamCaptureMode`: calls that concern other streams are nobody's business.
pub(crate) const CAPTURE_RELAXED: c_int = 2;

pub(crate) const STREAM_NON_BLOCKING: c_uint = 1;
pub(crate) const EVENT_DISABLE_TIMING: c_uint = 2;
pub(crate) const HOST_PORTABLE: c_uint = 1;
pub(crate) const HOST_DEVICEMAP: c_uint = 2;

/// `CUpointer_attribute`.
pub(crate) const POINTER_CONTEXT: c_int = 1;
pub(crate) const POINTER_MEMORY_TYPE: c_int = 2;
pub(crate) const POINTER_IS_MANAGED: c_int = 8;
pub(crate) const POINTER_DEVICE_ORDINAL: c_int = 9;
/// `CUmemorytype`: memory of a device.
pub(crate) const MEMORY_TYPE_DEVICE: c_uint = 2;

/// `CUdevice_attribute`.
pub(crate) const ATTRIBUTE_MAJOR: c_int = 75;
pub(crate) const ATTRIBUTE_MINOR: c_int = 76;

// Memory of one process mapped by another: `ipc`.
pub(crate) type MemPool = *mut c_void;
pub(crate) type MemHandle = u64;
pub(crate) const POINTER_IS_LEGACY_IPC_CAPABLE: c_int = 10;
pub(crate) const POINTER_ALLOWED_HANDLE_TYPES: c_int = 14;
pub(crate) const POINTER_MEMPOOL_HANDLE: c_int = 17;
/// `CUipcMem_flags`: the only one there is.
pub(crate) const IPC_LAZY_ENABLE_PEER_ACCESS: c_uint = 1;
/// `CUmemAllocationHandleType`: a file descriptor.
pub(crate) const HANDLE_POSIX_FD: c_int = 1;

/// `CUipcMemHandle` and `CUmemPoolPtrExportData`: bytes that only the driver reads.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Opaque(pub(crate) [u8; 64]);

/// `CUmemAccessDesc`.
#[repr(C)]
pub(crate) struct AccessDescription {
    location_kind: c_int,
    location_id: c_int,
    flags: c_int,
}

impl AccessDescription {
    /// Lets a device read and write.
    pub(crate) fn read_write(device: Device) -> Self {
        const LOCATION_DEVICE: c_int = 1;
        const READ_WRITE: c_int = 3;
        Self {
            location_kind: LOCATION_DEVICE,
            location_id: device,
            flags: READ_WRITE,
        }
    }
}

macro_rules! api {
    ($($field:ident = $symbol:literal ($($argument:ty),*);)*) => {
        /// The driver's functions.
        pub(crate) struct Api {
            $(pub(crate) $field: unsafe extern "C" fn($($argument),*) -> Code,)*
            /// Names a context for as long as the process lives; since CUDA 12.0.
            pub(crate) ctx_get_id: Option<unsafe extern "C" fn(Context, *mut u64) -> Code>,
            /// What this thread may do while somebody captures a graph; since CUDA 10.1.
            pub(crate) exchange_capture_mode: Option<unsafe extern "C" fn(*mut c_int) -> Code>,
        }

        impl Api {
            /// # Safety
            ///
            /// `library` is the CUDA driver.
            unsafe fn resolve(library: &Library) -> Result<Self, Error> {
                Ok(Self {
                    // SAFETY: each function has the type that the driver's headers give it.
                    $($field: *unsafe { library.get(concat!($symbol, "\0").as_bytes()) }
                        .map_err(|_| Error::MissingSymbol { symbol: $symbol })?,)*
                    // SAFETY: as above.
                    ctx_get_id: unsafe { library.get(c"cuCtxGetId".to_bytes_with_nul()) }
                        .ok().map(|found| *found),
                    // SAFETY: as above.
                    exchange_capture_mode: unsafe {
                        library.get(c"cuThreadExchangeStreamCaptureMode".to_bytes_with_nul())
                    }
                    .ok().map(|found| *found),
                })
            }
        }
    };
}

api! {
    init = "cuInit"(c_uint);
    driver_get_version = "cuDriverGetVersion"(*mut c_int);
    get_error_name = "cuGetErrorName"(Code, *mut *const c_char);

    device_get = "cuDeviceGet"(*mut Device, c_int);
    device_get_count = "cuDeviceGetCount"(*mut c_int);
    device_get_name = "cuDeviceGetName"(*mut c_char, c_int, Device);
    device_get_attribute = "cuDeviceGetAttribute"(*mut c_int, c_int, Device);
    device_get_pci_bus_id = "cuDeviceGetPCIBusId"(*mut c_char, c_int, Device);
    device_total_mem = "cuDeviceTotalMem_v2"(*mut usize, Device);
    primary_ctx_retain = "cuDevicePrimaryCtxRetain"(*mut Context, Device);
    primary_ctx_release = "cuDevicePrimaryCtxRelease_v2"(Device);
    primary_ctx_get_state = "cuDevicePrimaryCtxGetState"(Device, *mut c_uint, *mut c_int);

    ctx_get_current = "cuCtxGetCurrent"(*mut Context);
    ctx_get_device = "cuCtxGetDevice"(*mut Device);
    ctx_push_current = "cuCtxPushCurrent_v2"(Context);
    ctx_pop_current = "cuCtxPopCurrent_v2"(*mut Context);

    pointer_get_attributes = "cuPointerGetAttributes"(c_uint, *const c_int, *const *mut c_void, DevicePtr);
    mem_get_address_range = "cuMemGetAddressRange_v2"(*mut DevicePtr, *mut usize, DevicePtr);
    mem_get_info = "cuMemGetInfo_v2"(*mut usize, *mut usize);
    mem_alloc = "cuMemAlloc_v2"(*mut DevicePtr, usize);
    mem_free = "cuMemFree_v2"(DevicePtr);
    mem_host_register = "cuMemHostRegister_v2"(*mut c_void, usize, c_uint);
    mem_host_unregister = "cuMemHostUnregister"(*mut c_void);
    mem_host_get_device_pointer = "cuMemHostGetDevicePointer_v2"(*mut DevicePtr, *mut c_void, c_uint);
    memcpy_dtoh_async = "cuMemcpyDtoHAsync_v2"(*mut c_void, DevicePtr, usize, Stream);
    memcpy_htod_async = "cuMemcpyHtoDAsync_v2"(DevicePtr, *const c_void, usize, Stream);
    memcpy_dtod_async = "cuMemcpyDtoDAsync_v2"(DevicePtr, DevicePtr, usize, Stream);
    memset_d8_async = "cuMemsetD8Async"(DevicePtr, u8, usize, Stream);

    stream_create = "cuStreamCreate"(*mut Stream, c_uint);
    stream_destroy = "cuStreamDestroy_v2"(Stream);
    stream_query = "cuStreamQuery"(Stream);
    event_create = "cuEventCreate"(*mut Event, c_uint);
    event_destroy = "cuEventDestroy_v2"(Event);
    event_record = "cuEventRecord"(Event, Stream);
    event_query = "cuEventQuery"(Event);

    module_load_data = "cuModuleLoadData"(*mut Module, *const c_void);
    module_unload = "cuModuleUnload"(Module);
    module_get_function = "cuModuleGetFunction"(*mut Function, Module, *const c_char);
    launch_kernel = "cuLaunchKernel"(
        Function, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Stream, *mut *mut c_void, *mut *mut c_void
    );

    stream_synchronize = "cuStreamSynchronize"(Stream);
    stream_begin_capture = "cuStreamBeginCapture_v2"(Stream, c_int);
    stream_end_capture = "cuStreamEndCapture"(Stream, *mut Graph);
    graph_instantiate = "cuGraphInstantiateWithFlags"(*mut GraphExec, Graph, c_ulonglong);
    graph_launch = "cuGraphLaunch"(GraphExec, Stream);
    graph_exec_destroy = "cuGraphExecDestroy"(GraphExec);
    graph_destroy = "cuGraphDestroy"(Graph);

    // Memory of one process mapped by another: `ipc`.
    device_get_uuid = "cuDeviceGetUuid_v2"(*mut [u8; 16], Device);
    device_can_access_peer = "cuDeviceCanAccessPeer"(*mut c_int, Device, Device);
    device_get_default_mem_pool = "cuDeviceGetDefaultMemPool"(*mut MemPool, Device);
    ipc_get_mem_handle = "cuIpcGetMemHandle"(*mut Opaque, DevicePtr);
    ipc_open_mem_handle = "cuIpcOpenMemHandle_v2"(*mut DevicePtr, Opaque, c_uint);
    ipc_close_mem_handle = "cuIpcCloseMemHandle"(DevicePtr);
    mem_retain_allocation_handle = "cuMemRetainAllocationHandle"(*mut MemHandle, *mut c_void);
    mem_export_to_shareable_handle = "cuMemExportToShareableHandle"(*mut c_int, MemHandle, c_int, u64);
    mem_import_from_shareable_handle = "cuMemImportFromShareableHandle"(*mut MemHandle, *mut c_void, c_int);
    mem_release = "cuMemRelease"(MemHandle);
    mem_address_reserve = "cuMemAddressReserve"(*mut DevicePtr, usize, usize, DevicePtr, u64);
    mem_address_free = "cuMemAddressFree"(DevicePtr, usize);
    mem_map = "cuMemMap"(DevicePtr, usize, usize, MemHandle, u64);
    mem_unmap = "cuMemUnmap"(DevicePtr, usize);
    mem_set_access = "cuMemSetAccess"(DevicePtr, usize, *const AccessDescription, usize);
    mem_pool_export_to_shareable_handle = "cuMemPoolExportToShareableHandle"(*mut c_int, MemPool, c_int, u64);
    mem_pool_import_from_shareable_handle = "cuMemPoolImportFromShareableHandle"(*mut MemPool, *mut c_void, c_int, u64);
    mem_pool_export_pointer = "cuMemPoolExportPointer"(*mut Opaque, DevicePtr);
    mem_pool_import_pointer = "cuMemPoolImportPointer"(*mut DevicePtr, MemPool, *mut Opaque);
    mem_pool_set_access = "cuMemPoolSetAccess"(MemPool, *const AccessDescription, usize);
    mem_pool_destroy = "cuMemPoolDestroy"(MemPool);
}

impl Api {
    /// Turns a result into an error that says what was `asked`.
    pub(crate) fn check(&self, code: Code, asked: &'static str) -> Result<(), Error> {
        if code == SUCCESS {
            return Ok(());
        }
        Err(self.error(code, asked))
    }

    /// The error for a code other than success.
    #[cold]
    pub(crate) fn error(&self, code: Code, asked: &'static str) -> Error {
        let mut text: *const c_char = std::ptr::null();
        // SAFETY: the driver stores a pointer to a constant of its own, or null, and it is never unloaded.
        let name = unsafe {
            (self.get_error_name)(code, &mut text);
            if text.is_null() {
                c"an unknown error"
            } else {
                CStr::from_ptr::<'static>(text)
            }
        };
        Error::Driver {
            asked,
            name: name.to_str().unwrap_or("an unreadable error"),
            code,
            advice: advice(code),
        }
    }
}

/// What to do about a failure of the driver.
fn advice(code: Code) -> &'static str {
    match code {
        INVALID_VALUE | INVALID_HANDLE => {
            "The memory may have been freed: keep it until its copies are done"
        }
        OUT_OF_MEMORY => "Free memory of the device, or lower what other programs use of it",
        NOT_INITIALIZED | DEINITIALIZED => {
            "The process is ending, or was forked from one that uses CUDA: start it anew instead"
        }
        STUB_LIBRARY => {
            "The libcuda that was found is the toolkit's stub: take its folder out of LD_LIBRARY_PATH"
        }
        INVALID_CONTEXT | CONTEXT_IS_DESTROYED => {
            "The CUDA context of the memory is gone: keep it until sessions that use it are closed"
        }
        UNSUPPORTED_PTX => "The driver is too old: install driver 520 (CUDA 11.8) or later",
        ILLEGAL_ADDRESS => {
            "A kernel of this process touched memory that is not there: keep registered memory until its transfers \
             are done; compute-sanitizer finds the kernel. The process must be restarted"
        }
        SYSTEM_DRIVER_MISMATCH => {
            "The driver's library and kernel module differ in version: reboot, or reload the module"
        }
        _ => "`nvidia-smi` and the kernel's log (`dmesg | grep Xid`) may say more",
    }
}

static API: OnceLock<Api> = OnceLock::new();

/// The process in which CUDA was first seen at work; zero before that.
static OWNER: AtomicU32 = AtomicU32::new(0);

/// Notes that CUDA works in this process.
pub(crate) fn set_owner() {
    if OWNER.load(Ordering::Relaxed) == 0 {
        OWNER.store(std::process::id(), Ordering::Relaxed);
    }
}

/// Whether this process was forked from one in which CUDA was at work, so that it cannot be here.
pub(crate) fn is_forked() -> bool {
    let owner = OWNER.load(Ordering::Relaxed);
    owner != 0 && owner != std::process::id()
}

/// The driver, if the process has loaded it already.
pub(crate) fn loaded() -> Result<Option<&'static Api>, Error> {
    if let Some(api) = API.get() {
        return Ok(Some(api));
    }
    match open(RTLD_LAZY | RTLD_LOCAL | libc::RTLD_NOLOAD) {
        Ok(library) => resolve(library).map(Some),
        Err(_) => Ok(None),
    }
}

/// The driver, loaded and initialised.
pub(crate) fn initialised() -> Result<&'static Api, Error> {
    if is_forked() {
        return Err(Error::Forked);
    }
    let api = match loaded()? {
        Some(api) => api,
        None => {
            resolve(open(RTLD_LAZY | RTLD_LOCAL).map_err(|reason| Error::NoLibrary { reason })?)?
        }
    };
    // SAFETY: takes no memory; may be called any number of times.
    match unsafe { (api.init)(0) } {
        NO_DEVICE => return Err(Error::NoDevice),
        code => api.check(code, "initialising CUDA")?,
    }
    set_owner();
    Ok(api)
}

fn open(flags: c_int) -> Result<Library, String> {
    // SAFETY: the driver's initialisers are made to run in any process that loads it.
    unsafe { Library::open(Some("libcuda.so.1"), flags) }.map_err(|error| match error {
        libloading::Error::DlOpen { source, .. } => source.to_string(),
        other => other.to_string(),
    })
}

fn resolve(library: Library) -> Result<&'static Api, Error> {
    // SAFETY: the library that goes by this name is the CUDA driver.
    let api = unsafe { Api::resolve(&library)? };
    // Never unloaded: the functions must stay where they are.
    std::mem::forget(library);
    Ok(API.get_or_init(|| api))
}
