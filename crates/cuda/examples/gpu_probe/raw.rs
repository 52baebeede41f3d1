//! Driver functions that the crate itself does not need.

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};

use libloading::os::unix::Library;

use crate::Outcome;

pub(crate) struct Driver(Library);

pub(crate) type Context = *mut c_void;

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Default)]
pub(crate) struct AllocationProperties {
    pub(crate) kind: c_int,
    pub(crate) handle_types: c_int,
    pub(crate) location_kind: c_int,
    pub(crate) location_id: c_int,
    pub(crate) win32: usize,
    pub(crate) flags: [u8; 8],
}

/// `CUmemPoolProps`.
#[repr(C)]
#[derive(Default)]
pub(crate) struct PoolProperties {
    pub(crate) kind: c_int,
    pub(crate) handle_types: c_int,
    pub(crate) location_kind: c_int,
    pub(crate) location_id: c_int,
    pub(crate) win32: usize,
    pub(crate) most: usize,
    pub(crate) reserved: [u64; 7],
}

/// `CUmemAccessDesc`.
#[repr(C)]
pub(crate) struct AccessDescription {
    pub(crate) location_kind: c_int,
    pub(crate) location_id: c_int,
    pub(crate) flags: c_int,
}

macro_rules! functions {
    ($($name:ident = $symbol:literal ($($argument:ident: $kind:ty),*);)*) => {
        impl Driver {
            $(pub(crate) fn $name(&self, $($argument: $kind),*) -> Outcome {
                // SAFETY: the types are those of the driver's headers; callers pass the arguments
                // they require.
                let code = unsafe {
                    let function = self.0.get::<unsafe extern "C" fn($($kind),*) -> c_int>(
                        concat!($symbol, "\0").as_bytes())?;
                    function($($argument),*)
                };
                if code == 0 { Ok(()) } else { Err(format!("{} gives {code}", $symbol).into()) }
            })*
        }
    };
}

functions! {
    ctx_create = "cuCtxCreate_v2"(context: *mut Context, flags: c_uint, device: c_int);
    ctx_destroy = "cuCtxDestroy_v2"(context: Context);
    ctx_get_current = "cuCtxGetCurrent"(context: *mut Context);
    mem_alloc = "cuMemAlloc_v2"(address: *mut u64, len: usize);
    mem_free = "cuMemFree_v2"(address: u64);
    mem_alloc_async = "cuMemAllocAsync"(address: *mut u64, len: usize, stream: *mut c_void);
    mem_free_async = "cuMemFreeAsync"(address: u64, stream: *mut c_void);
    mem_alloc_managed = "cuMemAllocManaged"(address: *mut u64, len: usize, flags: c_uint);
    mem_host_alloc = "cuMemHostAlloc"(address: *mut *mut c_void, len: usize, flags: c_uint);
    mem_free_host = "cuMemFreeHost"(address: *mut c_void);
    mem_create = "cuMemCreate"(handle: *mut c_ulonglong, len: usize, properties: *const AllocationProperties, flags: c_ulonglong);
    mem_release = "cuMemRelease"(handle: c_ulonglong);
    mem_address_reserve = "cuMemAddressReserve"(address: *mut u64, len: usize, alignment: usize, hint: u64, flags: c_ulonglong);
    mem_address_free = "cuMemAddressFree"(address: u64, len: usize);
    mem_map = "cuMemMap"(address: u64, len: usize, offset: usize, handle: c_ulonglong, flags: c_ulonglong);
    mem_unmap = "cuMemUnmap"(address: u64, len: usize);
    mem_pool_create = "cuMemPoolCreate"(pool: *mut *mut c_void, properties: *const PoolProperties);
    mem_pool_destroy = "cuMemPoolDestroy"(pool: *mut c_void);
    mem_alloc_from_pool_async = "cuMemAllocFromPoolAsync"(address: *mut u64, len: usize, pool: *mut c_void, stream: *mut c_void);
    mem_set_access = "cuMemSetAccess"(address: u64, len: usize, access: *const AccessDescription, count: usize);
}

impl Driver {
    pub(crate) fn open() -> Outcome<Self> {
        // SAFETY: the CUDA driver, which the crate has loaded already.
        Ok(Self(unsafe { Library::new("libcuda.so.1") }?))
    }

    pub(crate) fn current(&self) -> Outcome<Context> {
        let mut context = std::ptr::null_mut();
        self.ctx_get_current(&mut context)?;
        Ok(context)
    }
}
