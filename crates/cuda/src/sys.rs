//! The CUDA driver's interface, by its oldest suitable entry points, resolved at run time.
//!
//! Written by hand instead of taken from a binding crate: such crates end the process if the
//! library or a function is missing, and cannot check whether the library *is already loaded*,
//! which [`crate::locate`] needs.

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

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

/// The errors about graphs that are being captured.
pub(crate) const CAPTURE_ERRORS: std::ops::RangeInclusive<Code> = 900..=908;

/// `CUstreamCaptureMode`: calls on other streams do not affect a capture.
pub(crate) const CAPTURE_RELAXED: c_int = 2;

pub(crate) const STREAM_NON_BLOCKING: c_uint = 1;
pub(crate) const EVENT_DISABLE_TIMING: c_uint = 2;
pub(crate) const HOST_PORTABLE: c_uint = 1;
pub(crate) const HOST_DEVICEMAP: c_uint = 2;

/// `CUpointer_attribute`.
pub(crate) const POINTER_CONTEXT: PointerAttribute = PointerAttribute(1);
pub(crate) const POINTER_MEMORY_TYPE: PointerAttribute = PointerAttribute(2);
pub(crate) const POINTER_IS_MANAGED: PointerAttribute = PointerAttribute(8);
pub(crate) const POINTER_DEVICE_ORDINAL: PointerAttribute = PointerAttribute(9);
/// `CUmemorytype`: host memory.
const MEMORY_TYPE_HOST: c_uint = 1;
/// `CUmemorytype`: memory of a device.
pub(crate) const MEMORY_TYPE_DEVICE: c_uint = 2;

/// `CUDA_MEMCPY2D`: rows of one length, at one distance on each side.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Grid {
    from: GridSide,
    to: GridSide,
    width: usize,
    height: usize,
}

/// One side of a [`Grid`].
#[repr(C)]
#[derive(Clone, Copy)]
struct GridSide {
    x: usize,
    y: usize,
    kind: c_uint,
    host: *mut c_void,
    device: DevicePtr,
    array: *mut c_void,
    distance: usize,
}

impl Grid {
    /// `height` rows of `width` bytes from device memory, `distance` bytes apart, to host memory,
    /// where they are adjacent.
    pub(crate) fn gather(rows: (DevicePtr, usize), to: *mut c_void, size: (usize, usize)) -> Self {
        Self::new(GridSide::device(rows), GridSide::host(to, size.0), size)
    }

    /// The same in the other direction.
    pub(crate) fn scatter(
        from: *mut c_void,
        rows: (DevicePtr, usize),
        size: (usize, usize),
    ) -> Self {
        Self::new(GridSide::host(from, size.0), GridSide::device(rows), size)
    }

    fn new(from: GridSide, to: GridSide, (width, height): (usize, usize)) -> Self {
        Self {
            from,
            to,
            width,
            height,
        }
    }
}

impl GridSide {
    const NOTHING: Self = Self {
        x: 0,
        y: 0,
        kind: 0,
        host: std::ptr::null_mut(),
        device: 0,
        array: std::ptr::null_mut(),
        distance: 0,
    };

    fn host(host: *mut c_void, distance: usize) -> Self {
        Self {
            kind: MEMORY_TYPE_HOST,
            host,
            distance,
            ..Self::NOTHING
        }
    }

    fn device((device, distance): (DevicePtr, usize)) -> Self {
        Self {
            kind: MEMORY_TYPE_DEVICE,
            device,
            distance,
            ..Self::NOTHING
        }
    }
}

/// `CUdevice_attribute`.
pub(crate) const ATTRIBUTE_MAJOR: c_int = 75;
pub(crate) const ATTRIBUTE_MINOR: c_int = 76;

// For memory of one process mapped by another: `ipc`.
pub(crate) type MemPool = *mut c_void;
pub(crate) type MemHandle = u64;
pub(crate) const POINTER_IS_LEGACY_IPC_CAPABLE: PointerAttribute = PointerAttribute(10);
pub(crate) const POINTER_ALLOWED_HANDLE_TYPES: PointerAttribute = PointerAttribute(14);
pub(crate) const POINTER_MEMPOOL_HANDLE: PointerAttribute = PointerAttribute(17);
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
    /// Grants a device read and write access.
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
            /// Returns an id that is unique in the process; since CUDA 12.0.
            pub(crate) ctx_get_id: Option<unsafe extern "C" fn(Context, *mut u64) -> Code>,
            /// Sets what this thread may do while a graph is captured; since CUDA 10.1.
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
    memcpy_2d_async = "cuMemcpy2DAsync_v2"(*const Grid, Stream);
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

    // For memory of one process mapped by another: `ipc`.
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

/// An attribute of an address (`CUpointer_attribute`) whose value has at most eight bytes.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct PointerAttribute(c_int);

impl Api {
    /// Asks the driver what it knows of an address. Each value is in the lowest bytes of its place,
    /// as many as the attribute has; the others are 0.
    pub(crate) fn pointer_attributes<const N: usize>(
        &self,
        address: usize,
        attributes: [PointerAttribute; N],
    ) -> Result<[u64; N], Code> {
        let mut values = [0; N];
        let places: [*mut c_void; N] = values.each_mut().map(|value| (&raw mut *value).cast());
        // SAFETY: no value is larger than its place, as the type of attributes promises. The driver
        // only looks the address up.
        let code = unsafe {
            (self.pointer_get_attributes)(
                N as c_uint,
                attributes.as_ptr().cast(),
                places.as_ptr(),
                address as DevicePtr,
            )
        };
        if code == SUCCESS {
            Ok(values)
        } else {
            Err(code)
        }
    }

    /// Turns a result into an error that says what was `asked`.
    pub(crate) fn check(&self, code: Code, asked: &'static str) -> Result<(), Error> {
        if code == SUCCESS {
            return Ok(());
        }
        Err(self.error(code, asked))
    }

    /// Returns the error for a code other than success.
    #[cold]
    pub(crate) fn error(&self, code: Code, asked: &'static str) -> Error {
        let mut text: *const c_char = std::ptr::null();
        // SAFETY: the driver stores a pointer to a constant of its own, or null, and it is never
        // unloaded.
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

/// Returns the remedy for a failure of the driver.
fn advice(code: Code) -> &'static str {
    match code {
        INVALID_VALUE | INVALID_HANDLE => {
            "The memory may have been freed: keep it until its copies are done"
        }
        OUT_OF_MEMORY => "Free memory of the device, or lower what other programs use of it",
        NOT_INITIALIZED | DEINITIALIZED => {
            "The process is ending, or was forked from one that uses CUDA: start a new process instead"
        }
        STUB_LIBRARY => {
            "The libcuda that was found is the toolkit's stub: take its folder out of LD_LIBRARY_PATH"
        }
        INVALID_CONTEXT | CONTEXT_IS_DESTROYED => {
            "The CUDA context of the memory is gone: keep it until sessions that use it are closed"
        }
        UNSUPPORTED_PTX => "The driver is too old: install driver 520 (CUDA 11.8) or later",
        ILLEGAL_ADDRESS => {
            "A kernel of this process accessed unmapped memory: keep registered memory until its transfers \
             are done; compute-sanitizer finds the kernel. The process must be restarted"
        }
        SYSTEM_DRIVER_MISMATCH => {
            "The driver's library and kernel module differ in version: reboot, or reload the module"
        }
        _ => "`nvidia-smi` and the kernel's log (`dmesg | grep Xid`) may say more",
    }
}

static API: OnceLock<Api> = OnceLock::new();

/// The process in which CUDA was first used; zero before that.
static OWNER: AtomicU32 = AtomicU32::new(0);

/// Records that CUDA works in this process.
pub(crate) fn set_owner() {
    if OWNER.load(Ordering::Relaxed) == 0 {
        OWNER.store(std::process::id(), Ordering::Relaxed);
    }
}

/// Returns whether this process was forked from one that used CUDA, so that CUDA cannot work here.
pub(crate) fn is_forked() -> bool {
    let owner = OWNER.load(Ordering::Relaxed);
    owner != 0 && owner != std::process::id()
}

/// Returns the driver, if the process has loaded it already.
pub(crate) fn loaded() -> Result<Option<&'static Api>, Error> {
    /// Number of libraries loaded when the driver was found missing; zero before that.
    static MISSED_AT: AtomicU64 = AtomicU64::new(0);
    if let Some(api) = API.get() {
        return Ok(Some(api));
    }
    // The loader searches all folders for a missing library, which takes longer than the rest of
    // registering memory. The answer can change only if another library was loaded.
    let loads = library_loads();
    if loads != 0 && MISSED_AT.load(Ordering::Relaxed) == loads {
        return Ok(None);
    }
    match open(RTLD_LAZY | RTLD_LOCAL | libc::RTLD_NOLOAD) {
        Ok(library) => resolve(library).map(Some),
        Err(_) => {
            MISSED_AT.store(loads, Ordering::Relaxed);
            Ok(None)
        }
    }
}

/// Counts the libraries that this process has ever loaded. The loader holds its lock while it
/// counts, so that a counted library can be found.
fn library_loads() -> u64 {
    unsafe extern "C" fn first(
        info: *mut libc::dl_phdr_info,
        size: usize,
        loads: *mut c_void,
    ) -> c_int {
        let field = std::mem::offset_of!(libc::dl_phdr_info, dlpi_adds);
        if size >= field + size_of::<c_ulonglong>() {
            // SAFETY: the loader passes a description that has the field, and `loads` is the local
            // below.
            unsafe { *loads.cast::<u64>() = (*info).dlpi_adds };
        }
        // Stops here: the count is the same in every description.
        1
    }
    let mut loads = 0u64;
    // SAFETY: the callback writes only to the local, during the call.
    unsafe { libc::dl_iterate_phdr(Some(first), (&raw mut loads).cast()) };
    loads
}

/// Returns the driver, loaded and initialised.
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
    // SAFETY: the driver's initialisers may run in any process that loads it.
    unsafe { Library::open(Some("libcuda.so.1"), flags) }.map_err(|error| match error {
        libloading::Error::DlOpen { source, .. } => source.to_string(),
        other => other.to_string(),
    })
}

fn resolve(library: Library) -> Result<&'static Api, Error> {
    // SAFETY: the library of this name is the CUDA driver.
    let api = unsafe { Api::resolve(&library)? };
    // Never unloaded: the functions must stay valid.
    std::mem::forget(library);
    Ok(API.get_or_init(|| api))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Otherwise a driver that is loaded later would not be found.
    #[test]
    fn a_library_that_is_loaded_is_counted() {
        // Parts of the C library that have moved elsewhere: files that few programs load.
        let rare = ["libutil.so.1", "librt.so.1", "libanl.so.1", "libdl.so.2"];
        let open = |name: &str, flags: c_int| {
            // SAFETY: these initialisers do nothing.
            unsafe { Library::open(Some(name), flags) }
        };
        let is_loaded = |name: &str| open(name, RTLD_LAZY | libc::RTLD_NOLOAD).is_ok();
        let before = library_loads();
        assert_ne!(before, 0);
        let Some(name) = rare.into_iter().find(|name| !is_loaded(name)) else {
            return;
        };
        let Ok(_library) = open(name, RTLD_LAZY) else {
            return;
        };
        assert!(library_loads() > before);
    }
}
