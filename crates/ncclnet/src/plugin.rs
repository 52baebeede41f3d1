//! An opened and initialised plugin with its devices.

use std::ffi::{c_int, c_void};
use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use libloading::os::unix::Library;

use crate::comm::{Connecting, Handle, Listener};
use crate::error::{Code, Error, Tried};
use crate::log::limit::limited_warning;
use crate::properties::{DeviceType, Properties};
use crate::sys::calls::Calls;
use crate::sys::common::{
    CommConfig, DEVICE_HOST, DEVICE_UNPACK, PropertyBuffer, SUCCESS, UNPACK_VERSION,
};
use crate::sys::{self, Abi};
use crate::{find, log, registry};

/// A NCCL net plugin, ready for use. Clones share it, and so does everything created from it.
///
/// # What opening does to the process
///
/// Opening loads foreign code and calls its `init`, which looks for devices and may start threads.
/// Up to API version 10 a library is initialised once in a process and stays loaded until its end:
/// no call stops its threads, so unloading could remove code that they run. Opening it again
/// returns the same plugin, and a failed `init` is not repeated: the same error is returned. From
/// version 11 on each `open` creates a context of its own; it is finalised, and the library
/// released, when the last clone, listener and comm are gone.
///
/// GPUDirect-TCPX **ends the process** (exit status 1) if the CUDA driver cannot be initialised, so
/// do not open it without a working GPU. It also takes the GPU from the calling thread: it uses the
/// CUDA device that is current at `listen`, the first `connect` and `accept`, and at registration.
///
/// # Threads
///
/// A plugin may be used from many threads at once; each listener, connection attempt and comm from
/// one at a time.
#[derive(Clone)]
pub struct Plugin {
    core: Arc<Core>,
}

impl Plugin {
    /// Opens the first usable plugin of a list, as NCCL does with `NCCL_NET_PLUGIN`: names or
    /// paths, separated by commas (see [`find`]). An empty list means `libnccl-net.so`.
    ///
    /// Of the API versions that both the library and this crate know, the newest is used.
    ///
    /// # Errors
    ///
    /// With one entry, its failure; with several, [`Error::NoneUsable`] with every name tried and
    /// the reason each failed. [`Error::Disabled`] if the list is `none`.
    pub fn open(list: &str) -> Result<Self, Error> {
        Self::open_any(list, None)
    }

    /// Does what [`Plugin::open`] does, with a given API version (4 to 12) instead of the newest.
    ///
    /// # Errors
    ///
    /// As [`Plugin::open`]; and [`Error::VersionMissing`] if the library does not export it,
    /// [`Error::VersionInUse`] if it already runs under another one.
    pub fn open_version(list: &str, version: u32) -> Result<Self, Error> {
        Self::open_any(list, Some(version))
    }

    fn open_any(list: &str, version: Option<u32>) -> Result<Self, Error> {
        let entries = find::entries(list)?;
        let mut tried = Vec::new();
        for entry in &entries {
            let Some(opened) = find::open(entry, &mut tried) else {
                continue;
            };
            let name = opened.name.clone();
            match registry::obtain(opened, version) {
                Ok(core) => return Ok(Self { core }),
                Err(error) if entries.len() == 1 => return Err(error),
                Err(error) => tried.push(Tried {
                    name,
                    reason: error.to_string(),
                }),
            }
        }
        Err(Error::NoneUsable { tried })
    }

    /// Returns the plugin's own name, such as `GPUDirectTCPX_v7`.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.core.name
    }

    /// Returns the library's name or path as it was opened.
    #[must_use]
    pub fn library(&self) -> &str {
        &self.core.library_name
    }

    /// Returns the API version in use, 4 to 12.
    #[must_use]
    pub fn api_version(&self) -> u32 {
        self.core.abi.version
    }

    /// Returns the devices, at least one. [`Plugin::listen`] and [`Plugin::connect`] take their
    /// index.
    #[must_use]
    pub fn devices(&self) -> &[Properties] {
        &self.core.devices
    }

    /// Returns the number of slots of a comm: 8 up to API version 6, 16 from version 7 on.
    ///
    /// Plugins treat one request more than they can hold as a failure of the comm, and do not
    /// report how many that is. NCCL relies on 8 in the older versions; existing plugins have 16.
    #[must_use]
    pub fn slots(&self) -> usize {
        self.core.abi.slots
    }

    /// Returns whether [`RecvComm::consume`](crate::RecvComm::consume) does anything: the plugin
    /// keeps a received message's slot until then.
    #[must_use]
    pub fn needs_consume(&self) -> bool {
        self.core.calls.irecv_consumed.is_some()
    }

    /// Listens for one connection to a device. Does not block.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchDevice`], or the plugin's error.
    pub fn listen(&self, device: usize) -> Result<Listener, Error> {
        Listener::new(&self.core, device)
    }

    /// Begins to connect from a device to the listener of this handle. Nothing happens before
    /// [`Connecting::poll`] is called.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchDevice`].
    pub fn connect(&self, device: usize, handle: &Handle) -> Result<Connecting, Error> {
        Connecting::new(&self.core, device, handle)
    }
}

impl fmt::Debug for Plugin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Plugin")
            .field("name", &self.name())
            .field("library", &self.library())
            .field("api_version", &self.api_version())
            .field("devices", &self.devices().len())
            .finish()
    }
}

/// State shared by everything created from a plugin.
pub(crate) struct Core {
    pub(crate) calls: Calls,
    pub(crate) abi: &'static Abi,
    /// The context from `init` (version 11 on), else NULL.
    pub(crate) context: *mut c_void,
    pub(crate) name: String,
    pub(crate) devices: Vec<Properties>,
    /// Serialises connection set-up, see [`Core::alone`].
    setting_up: Mutex<()>,
    library_name: String,
    /// Versions 11 and on may keep its address.
    _config: Box<CommConfig>,
    /// Released in `drop`, after `finalize`; never before version 11 (see [`Plugin`]).
    library: ManuallyDrop<Library>,
}

// SAFETY: the function pointers and the context may be used from any thread, several at once: NCCL
// calls `listen` and `connect` of one context from the service threads of its communicators, and
// reads properties from anywhere. `init`, `devices` and `finalize` are called with the registry
// locked.
unsafe impl Send for Core {}
// SAFETY: as above; nothing in it changes after `start`.
unsafe impl Sync for Core {}

impl Core {
    /// Initialises a library; [`find_devices`](Core::find_devices) must follow. Called with the
    /// registry locked.
    ///
    /// # Safety
    ///
    /// `table` is the library's table of version `abi`; the library is not initialised yet, if its
    /// version allows that only once.
    pub(crate) unsafe fn start(
        library: Library,
        library_name: &str,
        abi: &'static Abi,
        table: *const c_void,
    ) -> Result<Self, Error> {
        // From here on code of the library may be running, whatever fails.
        let library = ManuallyDrop::new(library);
        let incomplete = |member| Error::Incomplete {
            library: library_name.to_owned(),
            version: abi.version,
            member,
        };

        // SAFETY: the caller guarantees the table.
        let name = unsafe { sys::name(table) }.ok_or_else(|| incomplete("name"))?;
        // SAFETY: the caller guarantees the table.
        let init = unsafe { (abi.init)(table) }.ok_or_else(|| incomplete("init"))?;
        let mut config = Box::new(CommConfig::UNDEFINED);
        let mut context = std::ptr::null_mut();
        // SAFETY: the configuration is kept in `Core`; the caller guarantees that `init` may be
        // called.
        let code = unsafe { init.call(&raw mut context, user(), &raw mut *config, log::logger()) };
        check("init", code)?;

        // SAFETY: `init` has succeeded.
        let calls = unsafe { (abi.calls)(table) }.map_err(|missing| incomplete(missing.0))?;
        Ok(Self {
            calls,
            abi,
            context,
            name,
            devices: Vec::new(),
            setting_up: Mutex::new(()),
            library_name: library_name.to_owned(),
            _config: config,
            library,
        })
    }

    /// Queries the devices and their properties. Called once, with the registry locked.
    pub(crate) fn find_devices(&mut self) -> Result<(), Error> {
        let mut count: c_int = 0;
        // SAFETY: a valid out-parameter.
        check("devices", unsafe { (self.calls.devices)(&raw mut count) })?;
        if count <= 0 {
            return Err(Error::NoDevices {
                library: self.library_name.clone(),
                count,
            });
        }
        self.devices = (0..count)
            .map(|device| self.properties(device))
            .collect::<Result<_, _>>()?;
        Ok(())
    }

    fn properties(&self, device: c_int) -> Result<Properties, Error> {
        let mut buffer = PropertyBuffer::new();
        // SAFETY: the buffer is larger than any version's properties.
        let code = unsafe { (self.calls.get_properties)(device, buffer.as_mut_ptr()) };
        check("getProperties", code)?;
        let raw = (self.abi.properties)(&buffer);
        match (raw.device_type, raw.device_version) {
            (DEVICE_HOST, _) | (DEVICE_UNPACK, UNPACK_VERSION) => {}
            (device_type, device_version) => {
                return Err(Error::DeviceType {
                    library: self.library_name.clone(),
                    device: device as usize,
                    device_type,
                    device_version,
                });
            }
        }
        // SAFETY: the plugin has just set the strings.
        Ok(unsafe { Properties::from_raw(&raw, self.abi) })
    }

    /// Serialises calls that set up connections of a device. GPUDirect-TCPX creates the shared
    /// state of a GPU's connections in the first of them, without a lock of its own; those calls
    /// never block. Calls of other plugins may block, and share nothing.
    pub(crate) fn alone(&self, device: usize) -> Option<MutexGuard<'_, ()>> {
        let unpacks = self.devices[device].device_type == DeviceType::Unpack;
        // A panic while it was held leaves no broken state.
        unpacks.then(|| {
            self.setting_up
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
        })
    }

    /// Returns a device's index in the plugin's type.
    pub(crate) fn device(&self, device: usize) -> Result<c_int, Error> {
        let count = self.devices.len();
        match c_int::try_from(device) {
            Ok(index) if device < count => Ok(index),
            _ => Err(Error::NoSuchDevice { device, count }),
        }
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        if !self.abi.has_contexts() {
            // Reached only when a first `open` failed after `init`: the library stays.
            return;
        }
        if let Some(finalize) = self.calls.finalize {
            let _order = registry::lock();
            // SAFETY: the context came from `init`, and this is its last use: everything created
            // from it held this core.
            let code = unsafe { finalize(self.context) };
            if let Err(error) = check("finalize", code) {
                limited_warning!(
                    plugin = self.name,
                    %error,
                    remedy = "report it to the maker of the plugin; what it held stays until the process ends",
                    "the plugin does not end: it is kept loaded"
                );
                return;
            }
            // SAFETY: not used afterwards. A plugin of these versions ends its threads in
            // `finalize`; the system unloads it when no other context of it is left.
            unsafe { ManuallyDrop::drop(&mut self.library) };
        }
    }
}

/// Turns a result code into an error, with the plugin's last warning.
pub(crate) fn check(call: &'static str, code: c_int) -> Result<(), Error> {
    if code == SUCCESS {
        log::forget_warning();
        return Ok(());
    }
    Err(Error::Call {
        call,
        code: Code(code),
        warning: log::take_warning(),
    })
}

/// Returns a number that no other context of this machine is likely to have.
fn user() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    u64::from(std::process::id()) << 32 | NEXT.fetch_add(1, Ordering::Relaxed)
}
