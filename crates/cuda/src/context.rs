//! A CUDA context and the kernels, which are loaded once in it.

use std::ffi::{CStr, c_int, c_uint, c_void};
use std::fmt;
use std::marker::PhantomData;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;

use crate::error::Error;
use crate::memory::DeviceMemory;
use crate::pinned::Pinned;
use crate::prepared::Tables;
use crate::queue::CudaQueue;
use crate::sys::{self, Api};
use crate::{
    Current, Description, Device, Export, Mapped, Path, Prepared, Queue, Range, info, ipc, prepared,
};

/// The kernels, as PTX: the driver compiles them for the GPU it finds.
const PTX: &CStr = match CStr::from_bytes_with_nul(
    concat!(include_str!("../kernels/copy.ptx"), "\0").as_bytes(),
) {
    Ok(text) => text,
    Err(_) => panic!("copy.ptx contains a zero byte"),
};

/// A CUDA context.
pub(crate) struct Context {
    pub(crate) api: &'static Api,
    pub(crate) raw: sys::Context,
    /// The id from `Api::ctx_get_id`; zero where the driver has none.
    id: u64,
    device: sys::Device,
    ordinal: u32,
    /// Whether a reference to the device's primary context is held.
    is_retained: bool,
    kernels: OnceLock<Kernels>,
    /// Cached, for pinned memory.
    pci_bus_id: OnceLock<Option<String>>,
    numa_node: OnceLock<Option<u32>>,
    /// Held while the kernels are being compiled, so that it happens once.
    compiling: Mutex<()>,
    /// Used by queues and prepared lists, which hold the context.
    tables: Mutex<Weak<Tables>>,
    weak: Weak<Context>,
}

// SAFETY: contexts and functions are handles that the driver allows on any thread, with its own
// locks.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// The context's functions, and the module that they live in.
pub(crate) struct Kernels {
    module: sys::Module,
    /// The kernel whose work items are kernel parameters.
    pub(crate) inline: sys::Function,
    /// The kernel whose work items are in memory.
    pub(crate) table: sys::Function,
}

/// Contexts in use, so that all memory of one context shares one value.
static CONTEXTS: Mutex<Vec<Weak<Context>>> = Mutex::new(Vec::new());

impl Context {
    /// Returns the primary context of a device; creates it if needed.
    pub(crate) fn primary(api: &'static Api, ordinal: u32) -> Result<Arc<Self>, Error> {
        let device = info::raw_device(api, ordinal)?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: stores a handle.
        let code = unsafe { (api.primary_ctx_retain)(&mut raw, device) };
        api.check(code, "opening the device's primary context")?;
        Ok(Self::shared(api, raw, device, ordinal, true))
    }

    /// Returns a context that this crate did not create: that of some memory, or of a thread.
    pub(crate) fn of_raw(
        api: &'static Api,
        raw: sys::Context,
        ordinal: u32,
    ) -> Result<Arc<Self>, Error> {
        // Called for each registered region: this makes one driver call instead of five.
        if let Some(context) = Self::known(raw, id_of(api, raw)) {
            return Ok(context);
        }
        let device = info::raw_device(api, ordinal)?;
        let (mut flags, mut is_active): (c_uint, c_int) = (0, 0);
        // SAFETY: stores two numbers.
        let code = unsafe { (api.primary_ctx_get_state)(device, &mut flags, &mut is_active) };
        api.check(code, "asking for the state of the primary context")?;
        if is_active != 0 {
            let primary = Self::primary(api, ordinal)?;
            if primary.raw == raw {
                return Ok(primary);
            }
        }
        Ok(Self::shared(api, raw, device, ordinal, false))
    }

    /// Returns the value in use for a context with an id, which distinguishes it from an earlier
    /// context at the same address. Drivers before CUDA 12 have no ids.
    fn known(raw: sys::Context, id: u64) -> Option<Arc<Self>> {
        let contexts = CONTEXTS.lock();
        let mut known = contexts.iter().filter_map(Weak::upgrade);
        known.find(|context| id != 0 && context.raw == raw && context.id == id)
    }

    /// Returns the value in use for a context, or a new one. Takes over one reference to a primary
    /// context.
    fn shared(
        api: &'static Api,
        raw: sys::Context,
        device: sys::Device,
        ordinal: u32,
        is_retained: bool,
    ) -> Arc<Self> {
        let id = id_of(api, raw);
        let mut contexts = CONTEXTS.lock();
        contexts.retain(|context| context.strong_count() > 0);
        let known = contexts.iter().filter_map(Weak::upgrade);
        // The id distinguishes a context from an earlier one at the same address.
        if let Some(context) = known.into_iter().find(|c| c.raw == raw && c.id == id) {
            drop(contexts);
            if is_retained {
                release(api, device);
            }
            return context;
        }
        let context = Arc::new_cyclic(|weak| Self {
            api,
            raw,
            id,
            device,
            ordinal,
            is_retained,
            kernels: OnceLock::new(),
            pci_bus_id: OnceLock::new(),
            numa_node: OnceLock::new(),
            compiling: Mutex::new(()),
            tables: Mutex::new(Weak::new()),
            weak: weak.clone(),
        });
        contexts.push(Arc::downgrade(&context));
        context
    }

    /// Makes the context current on this thread until the guard is dropped.
    pub(crate) fn enter(&self) -> Result<Scope, Error> {
        let mut current = std::ptr::null_mut();
        // SAFETY: stores a handle.
        let code = unsafe { (self.api.ctx_get_current)(&mut current) };
        self.api.check(code, "asking for the current context")?;
        let is_pushed = current != self.raw;
        if is_pushed {
            // SAFETY: a handle; the driver detects one that is no longer valid.
            let code = unsafe { (self.api.ctx_push_current)(self.raw) };
            self.api.check(code, "entering the CUDA context")?;
        }
        Ok(Scope {
            capture_mode: exchange_capture_mode(self.api, sys::CAPTURE_RELAXED),
            api: self.api,
            is_pushed,
            not_send: PhantomData,
        })
    }

    /// Returns the kernels, compiled by the first call. The context must be current.
    pub(crate) fn kernels(&self) -> Result<&Kernels, Error> {
        if let Some(kernels) = self.kernels.get() {
            return Ok(kernels);
        }
        let _compiling = self.compiling.lock();
        if let Some(kernels) = self.kernels.get() {
            return Ok(kernels);
        }
        let api = self.api;
        let mut module = std::ptr::null_mut();
        // SAFETY: the text ends with a zero byte.
        let code = unsafe { (api.module_load_data)(&mut module, PTX.as_ptr().cast::<c_void>()) };
        api.check(code, "compiling the copy kernels")?;
        let function = |name: &CStr| {
            let mut function = std::ptr::null_mut();
            // SAFETY: the module was loaded just now, the name ends with a zero byte.
            let code = unsafe { (api.module_get_function)(&mut function, module, name.as_ptr()) };
            api.check(code, "finding a copy kernel").map(|()| function)
        };
        let kernels = (|| {
            Ok(Kernels {
                module,
                inline: function(c"tcpx_copy_inline")?,
                table: function(c"tcpx_copy_table")?,
            })
        })();
        match kernels {
            Ok(kernels) => Ok(self.kernels.get_or_init(|| kernels)),
            Err(error) => {
                // SAFETY: nothing of the module is in use.
                unsafe { (api.module_unload)(module) };
                Err(error)
            }
        }
    }

    /// Returns this context by the `Arc` it lives in.
    pub(crate) fn arc(&self) -> Arc<Self> {
        // A context is made in an `Arc` only, and the caller of this method keeps it alive.
        self.weak.upgrade().expect("a context lives in an Arc")
    }

    /// Returns the memory for prepared lists, shared by all users.
    pub(crate) fn tables(&self) -> Arc<Tables> {
        let mut tables = self.tables.lock();
        tables.upgrade().unwrap_or_else(|| {
            let made = Arc::new(Tables::new(self.arc()));
            *tables = Arc::downgrade(&made);
            made
        })
    }

    pub(crate) fn device(&self) -> sys::Device {
        self.device
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context")
            .field("ordinal", &self.ordinal)
            .field("raw", &self.raw)
            .finish_non_exhaustive()
    }
}

impl Device for Context {
    fn queue_by(&self, path: Path) -> Result<Box<dyn Queue>, Error> {
        Ok(Box::new(CudaQueue::new(self.arc(), path)?))
    }

    fn pin(&self, len: usize) -> Result<Pinned, Error> {
        Pinned::near(self.arc(), len)
    }

    fn allocate(&self, len: usize) -> Result<DeviceMemory, Error> {
        DeviceMemory::on(self.arc(), len)
    }

    fn make_current(&self) -> Result<Current, Error> {
        self.enter().map(Current::new)
    }

    fn export(&self, range: Range) -> Result<Export, Error> {
        ipc::export(self, range)
    }

    fn import(&self, description: &Description, fds: &[OwnedFd]) -> Result<Mapped, Error> {
        ipc::map(&self.arc(), description, fds)
    }

    fn prepare(&self, from: &[Range], to: &[Range]) -> Result<Prepared, Error> {
        prepared::on(&self.arc(), from, to)
    }

    fn ordinal(&self) -> u32 {
        self.ordinal
    }

    fn pci_bus_id(&self) -> Option<&str> {
        let asked = || info::pci_bus_id(self.api, self.device);
        self.pci_bus_id.get_or_init(asked).as_deref()
    }

    fn numa_node(&self) -> Option<u32> {
        let read = || self.pci_bus_id().and_then(info::numa_node);
        *self.numa_node.get_or_init(read)
    }

    fn identity(&self) -> usize {
        self.raw.addr()
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if let Some(kernels) = self.kernels.get()
            && let Ok(_scope) = self.enter()
        {
            // SAFETY: queues, the only users, hold the context and are gone.
            let code = unsafe { (self.api.module_unload)(kernels.module) };
            log(self.api, code, "unloading the copy kernels");
        }
        if self.is_retained {
            release(self.api, self.device);
        }
    }
}

/// Returns the unique id of a context; zero where the driver has none.
fn id_of(api: &Api, raw: sys::Context) -> u64 {
    let mut id = 0;
    if let Some(get_id) = api.ctx_get_id {
        // SAFETY: stores a number. It stays zero if that fails.
        unsafe { get_id(raw, &mut id) };
    }
    id
}

fn release(api: &Api, device: sys::Device) {
    // SAFETY: releases one reference that was retained.
    let code = unsafe { (api.primary_ctx_release)(device) };
    log(api, code, "releasing the device's primary context");
}

/// Logs an error in `Drop`, which cannot report it. Ignores that CUDA has shut down first, as it
/// does when a process ends.
pub(crate) fn log(api: &Api, code: sys::Code, asked: &'static str) {
    if code != sys::SUCCESS && code != sys::DEINITIALIZED {
        static LOGGED: AtomicU32 = AtomicU32::new(0);
        let error = api.error(code, asked);
        if LOGGED.fetch_add(1, Ordering::Relaxed) < 10 {
            // Logged ten times at most: a GPU that has failed fails each call.
            tracing::warn!(
                remedy = "see why the GPU failed (dmesg, nvidia-smi) and restart the process",
                "{error}"
            );
        }
    }
}

/// Keeps a context current on this thread; dropping restores the previous one.
pub(crate) struct Scope {
    api: &'static Api,
    is_pushed: bool,
    /// The previous mode, where the driver supports it.
    capture_mode: Option<c_int>,
    /// The current context belongs to the thread.
    not_send: PhantomData<*const ()>,
}

/// Lets this thread poll for the end of copies while the application captures a graph, on any
/// thread: this crate's streams are no part of the capture, and a poll would otherwise end it.
/// Returns the previous mode.
fn exchange_capture_mode(api: &Api, mut mode: c_int) -> Option<c_int> {
    // SAFETY: stores a mode of this thread.
    let code = unsafe { (api.exchange_capture_mode?)(&mut mode) };
    (code == sys::SUCCESS).then_some(mode)
}

impl Drop for Scope {
    fn drop(&mut self) {
        if let Some(mode) = self.capture_mode {
            exchange_capture_mode(self.api, mode);
        }
        if self.is_pushed {
            let mut popped = std::ptr::null_mut();
            // SAFETY: pops the context that `enter` pushed.
            let code = unsafe { (self.api.ctx_pop_current)(&mut popped) };
            log(self.api, code, "leaving the CUDA context");
        }
    }
}
