//! The few CUDA driver calls that `TCPX_EMU_DEVMEM=cuda` needs, loaded at run time.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr::null_mut;
use std::sync::OnceLock;

use crate::error::Error;

type Code = c_int;
type Pointer = u64;
type Handle = *mut c_void;

/// `CUDA_ERROR_NOT_READY`.
const NOT_READY: Code = 600;
/// `CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP`.
const PORTABLE_MAPPED: c_uint = 1 | 2;
/// `CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL`.
const DEVICE_ORDINAL: c_int = 9;
/// `CU_STREAM_NON_BLOCKING`: unordered with the caller's default stream.
const NON_BLOCKING: c_uint = 1;

/// Declares the driver's functions once: field, symbol and type together.
macro_rules! driver {
    ($($field:ident = $symbol:literal: fn($($arg:ty),*);)*) => {
        /// The driver's entry points.
        #[derive(Debug)]
        pub(crate) struct Driver {
            $($field: unsafe extern "C" fn($($arg),*) -> Code,)*
        }

        impl Driver {
            fn open() -> Result<Self, Error> {
                let library = open_library(c"libcuda.so.1")?;
                Ok(Self {
                    $($field: {
                        let symbol = find_symbol(library, $symbol)?;
                        // SAFETY: the driver's ABI gives this symbol this type.
                        unsafe {
                            std::mem::transmute::<
                                *mut c_void,
                                unsafe extern "C" fn($($arg),*) -> Code,
                            >(symbol)
                        }
                    },)*
                })
            }
        }
    };
}

driver! {
    init = c"cuInit": fn(c_uint);
    primary_retain = c"cuDevicePrimaryCtxRetain": fn(*mut Handle, c_int);
    current = c"cuCtxGetCurrent": fn(*mut Handle);
    context_device = c"cuCtxGetDevice": fn(*mut c_int);
    attributes = c"cuPointerGetAttributes": fn(c_uint, *const c_int, *const *mut c_void, Pointer);
    push = c"cuCtxPushCurrent_v2": fn(Handle);
    pop = c"cuCtxPopCurrent_v2": fn(*mut Handle);
    alloc = c"cuMemAlloc_v2": fn(*mut Pointer, usize);
    free = c"cuMemFree_v2": fn(Pointer);
    host_alloc = c"cuMemHostAlloc": fn(*mut *mut c_void, usize, c_uint);
    host_free = c"cuMemFreeHost": fn(*mut c_void);
    host_device = c"cuMemHostGetDevicePointer_v2": fn(*mut Pointer, *mut c_void, c_uint);
    to_device = c"cuMemcpyHtoD_v2": fn(Pointer, *const c_void, usize);
    to_device_async = c"cuMemcpyHtoDAsync_v2": fn(Pointer, *const c_void, usize, Handle);
    to_host_async = c"cuMemcpyDtoHAsync_v2": fn(*mut c_void, Pointer, usize, Handle);
    fill_async = c"cuMemsetD8Async": fn(Pointer, u8, usize, Handle);
    stream_create = c"cuStreamCreate": fn(*mut Handle, c_uint);
    stream_destroy = c"cuStreamDestroy_v2": fn(Handle);
    stream_query = c"cuStreamQuery": fn(Handle);
    stream_synchronize = c"cuStreamSynchronize": fn(Handle);
}

impl Driver {
    /// Opens and initialises the driver, once; remembers a failure.
    pub(crate) fn load() -> Result<&'static Self, Error> {
        static DRIVER: OnceLock<Result<Driver, Error>> = OnceLock::new();
        DRIVER
            .get_or_init(|| {
                let driver = Self::open()?;
                // SAFETY: the flags have to be 0.
                check("cuInit", unsafe { (driver.init)(0) })?;
                Ok(driver)
            })
            .as_ref()
            .map_err(Clone::clone)
    }
}

fn open_library(name: &CStr) -> Result<*mut c_void, Error> {
    // SAFETY: a terminated string. The library is never closed.
    let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if library.is_null() {
        Err(Error::NoDriver { what: last_error() })
    } else {
        Ok(library)
    }
}

fn find_symbol(library: *mut c_void, name: &CStr) -> Result<*mut c_void, Error> {
    // SAFETY: an open library and a terminated string.
    let symbol = unsafe { libc::dlsym(library, name.as_ptr()) };
    if symbol.is_null() {
        Err(Error::NoDriver { what: last_error() })
    } else {
        Ok(symbol)
    }
}

fn last_error() -> String {
    // SAFETY: null, or a string that is valid until this thread's next dl call.
    let text: *const c_char = unsafe { libc::dlerror() };
    if text.is_null() {
        return "no reason given".to_owned();
    }
    // SAFETY: as above.
    unsafe { CStr::from_ptr(text) }
        .to_string_lossy()
        .into_owned()
}

fn check(what: &'static str, code: Code) -> Result<(), Error> {
    if code == 0 {
        Ok(())
    } else {
        Err(Error::Cuda { what, code })
    }
}

/// A GPU, identified by a context on it. Contexts live as long as the process: they belong to the
/// caller, or are a primary context that is retained and never released.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gpu {
    driver: &'static Driver,
    context: Handle,
}

impl PartialEq for Gpu {
    fn eq(&self, other: &Self) -> bool {
        self.context == other.context
    }
}

impl Eq for Gpu {}

// SAFETY: contexts may be pushed by any thread.
unsafe impl Send for Gpu {}
// SAFETY: as above; the driver has its own locks.
unsafe impl Sync for Gpu {}

// Every call below passes live pointers of the stated type to the driver, and runs with the context
// current: each SAFETY comment calls this "the driver's contract".
impl Gpu {
    pub(crate) fn current(driver: &'static Driver) -> Result<Self, Error> {
        let mut context = null_mut();
        // SAFETY: the driver's contract.
        check("cuCtxGetCurrent", unsafe {
            (driver.current)(&raw mut context)
        })?;
        if context.is_null() {
            // SAFETY: the driver's contract.
            let code = unsafe { (driver.primary_retain)(&raw mut context, 0) };
            check("cuDevicePrimaryCtxRetain", code)?;
        }
        Ok(Self { driver, context })
    }

    /// Returns the ordinal of this GPU, and of the GPU of some memory.
    pub(crate) fn ordinals(self, address: usize) -> Result<(c_int, c_int), Error> {
        self.within(|driver| {
            let (mut own, mut of_memory): (c_int, c_int) = (-1, -1);
            // SAFETY: the driver's contract.
            check("cuCtxGetDevice", unsafe {
                (driver.context_device)(&raw mut own)
            })?;
            let (attribute, value) = (DEVICE_ORDINAL, (&raw mut of_memory).cast::<c_void>());
            // SAFETY: the driver's contract; one attribute, which is an int.
            let code = unsafe {
                (driver.attributes)(1, &raw const attribute, &raw const value, address as u64)
            };
            check("cuPointerGetAttributes", code)?;
            Ok((own, of_memory))
        })
    }

    pub(crate) fn push(self) -> Result<(), Error> {
        // SAFETY: the driver's contract.
        check("cuCtxPushCurrent", unsafe {
            (self.driver.push)(self.context)
        })
    }

    pub(crate) fn pop(self) {
        let mut context = null_mut();
        // SAFETY: the driver's contract. A failure has no remedy.
        unsafe { (self.driver.pop)(&raw mut context) };
    }

    /// Runs `body` with the context current.
    fn within<T>(self, body: impl FnOnce(&Driver) -> Result<T, Error>) -> Result<T, Error> {
        self.push()?;
        let outcome = body(self.driver);
        self.pop();
        outcome
    }

    pub(crate) fn alloc(self, bytes: usize) -> Result<Pointer, Error> {
        self.within(|driver| {
            let mut pointer = 0;
            // SAFETY: the driver's contract.
            check("cuMemAlloc", unsafe {
                (driver.alloc)(&raw mut pointer, bytes)
            })?;
            Ok(pointer)
        })
    }

    pub(crate) fn free(self, pointer: Pointer) {
        // SAFETY: the driver's contract; a failure leaves nothing to do.
        let _ = self.within(|driver| check("cuMemFree", unsafe { (driver.free)(pointer) }));
    }

    /// Allocates pinned memory: returns its address here, and on the device.
    pub(crate) fn host_alloc(self, bytes: usize) -> Result<(*mut u8, Pointer), Error> {
        self.within(|driver| {
            let (mut host, mut device) = (null_mut(), 0);
            // SAFETY: the driver's contract.
            let code = unsafe { (driver.host_alloc)(&raw mut host, bytes, PORTABLE_MAPPED) };
            check("cuMemHostAlloc", code)?;
            // SAFETY: the driver's contract.
            let code = unsafe { (driver.host_device)(&raw mut device, host, 0) };
            check("cuMemHostGetDevicePointer", code)?;
            Ok((host.cast(), device))
        })
    }

    pub(crate) fn host_free(self, host: *mut u8) {
        // SAFETY: the driver's contract; a failure leaves nothing to do.
        let _ = self
            .within(|driver| check("cuMemFreeHost", unsafe { (driver.host_free)(host.cast()) }));
    }

    pub(crate) fn copy_to_device(self, to: Pointer, bytes: &[u8]) -> Result<(), Error> {
        self.within(|driver| {
            // SAFETY: the driver's contract.
            let code = unsafe { (driver.to_device)(to, bytes.as_ptr().cast(), bytes.len()) };
            check("cuMemcpyHtoD", code)
        })
    }
}

/// A stream of one comm. Its calls expect the GPU's context to be current.
#[derive(Debug)]
pub(crate) struct Stream {
    gpu: Gpu,
    stream: Handle,
}

// SAFETY: streams may be used by any thread.
unsafe impl Send for Stream {}

impl Stream {
    pub(crate) fn new(gpu: Gpu) -> Result<Self, Error> {
        gpu.within(|driver| {
            let mut stream = null_mut();
            // SAFETY: the driver's contract.
            let code = unsafe { (driver.stream_create)(&raw mut stream, NON_BLOCKING) };
            check("cuStreamCreate", code)?;
            Ok(Self { gpu, stream })
        })
    }

    /// Starts a copy from pinned memory.
    ///
    /// # Safety
    /// Both ranges stay valid until the stream is idle.
    pub(crate) unsafe fn to_device(
        &self,
        to: Pointer,
        from: *const u8,
        bytes: usize,
    ) -> Result<(), Error> {
        // SAFETY: the driver's contract; the ranges are guaranteed by the caller.
        let code =
            unsafe { (self.gpu.driver.to_device_async)(to, from.cast(), bytes, self.stream) };
        check("cuMemcpyHtoDAsync", code)
    }

    /// Copies to pinned memory and waits for it.
    ///
    /// # Safety
    /// Both ranges are valid.
    pub(crate) unsafe fn to_host(
        &self,
        to: *mut u8,
        from: Pointer,
        bytes: usize,
    ) -> Result<(), Error> {
        // SAFETY: the driver's contract; the ranges are guaranteed by the caller.
        let code = unsafe { (self.gpu.driver.to_host_async)(to.cast(), from, bytes, self.stream) };
        check("cuMemcpyDtoHAsync", code)?;
        self.finish()
    }

    /// Starts to fill device memory.
    ///
    /// # Safety
    /// The range stays valid until the stream is idle.
    pub(crate) unsafe fn fill(&self, at: Pointer, byte: u8, bytes: usize) -> Result<(), Error> {
        // SAFETY: the driver's contract; the ranges are guaranteed by the caller.
        let code = unsafe { (self.gpu.driver.fill_async)(at, byte, bytes, self.stream) };
        check("cuMemsetD8Async", code)
    }

    /// Returns whether all that was started is finished.
    pub(crate) fn idle(&self) -> Result<bool, Error> {
        // SAFETY: the driver's contract.
        match unsafe { (self.gpu.driver.stream_query)(self.stream) } {
            NOT_READY => Ok(false),
            code => check("cuStreamQuery", code).map(|()| true),
        }
    }

    /// Waits until all that was started is finished.
    pub(crate) fn finish(&self) -> Result<(), Error> {
        // SAFETY: the driver's contract.
        let code = unsafe { (self.gpu.driver.stream_synchronize)(self.stream) };
        check("cuStreamSynchronize", code)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let stream = self.stream;
        let _ = self.gpu.within(|driver| {
            // SAFETY: the driver's contract; a failure leaves nothing to do.
            let code = unsafe { (driver.stream_destroy)(stream) };
            check("cuStreamDestroy", code)
        });
    }
}
