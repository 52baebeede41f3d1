//! Accepts connections: creates the receiving end.

use std::fmt;
use std::sync::Arc;
use std::task::Poll;

use super::handle::HandleBuffer;
use super::stable::Stable;
use super::{Comm, DeviceHandle, Handle, Receiving, RecvComm};
use crate::error::Error;
use crate::log::limit::limited_warning;
use crate::plugin::{Core, check};
use crate::properties::DeviceType;
use crate::sys::calls::{CommOut, Ptr};
use crate::sys::common::{CommConfig, RawDeviceHandle};

/// Waits for one connection. Another connection needs another listener: plugins do not reset
/// theirs.
///
/// Dropping it closes it, unless an accept is pending: plugin threads then work on the listener and
/// no call stops them, so it is leaked, as NCCL does.
pub struct Listener {
    core: Arc<Core>,
    raw: Ptr,
    device: usize,
    handle: Handle,
    state: State,
}

enum State {
    /// `accept` has not been called.
    Idle(Stable<Buffers>),
    /// `accept` was called and has not finished.
    Pending(Stable<Buffers>),
    /// The listener has returned its connection.
    Spent,
    /// The listener has failed.
    Failed,
}

/// Buffers whose addresses the plugin may remember. The comm keeps them.
#[derive(Debug)]
pub(super) struct Buffers {
    out: CommOut,
    device_handle: RawDeviceHandle,
}

// SAFETY: NCCL listens on one thread and accepts on another, so plugins do not tie a listener to a
// thread. `accept` needs `&mut self`: one thread at a time.
unsafe impl Send for Listener {}

impl Listener {
    pub(crate) fn new(core: &Arc<Core>, device: usize) -> Result<Self, Error> {
        let index = core.device(device)?;
        let mut handle = HandleBuffer([0; Handle::MAX_BYTES]);
        let mut raw = std::ptr::null_mut();
        let _alone = core.alone(device);
        // SAFETY: the buffer has 128 bytes, the most that any version writes.
        let code = unsafe {
            core.calls
                .listen
                .call(core.context, index, (&raw mut handle).cast(), &raw mut raw)
        };
        check("listen", code)?;
        if raw.is_null() {
            return Err(Error::Contract {
                call: "listen",
                what: "it reported success and gave no listener",
            });
        }
        let buffers = Stable::new(Buffers {
            out: CommOut {
                comm: std::ptr::null_mut(),
                device: std::ptr::null_mut(),
                config: CommConfig::UNDEFINED,
            },
            device_handle: RawDeviceHandle::zeroed(),
        });
        if core.devices[device].device_type == DeviceType::Unpack {
            // The plugin fills it in during the call that returns the comm.
            let buffers = buffers.as_ptr();
            // SAFETY: allocated just now, and not shared yet.
            unsafe { (*buffers).out.device = &raw mut (*buffers).device_handle };
        }
        Ok(Self {
            core: Arc::clone(core),
            raw,
            device,
            handle: Handle::from_buffer(&handle, core.abi.handle_bytes),
            state: State::Idle(buffers),
        })
    }

    /// Returns the handle that the peer needs to connect here.
    #[must_use]
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Continues accepting. Call it again while it is pending: there is no callback.
    ///
    /// It should not block, but in some plugins it does (Fast Socket, and any plugin of version 4),
    /// until the peer has connected; GPUDirect-TCPX takes some seconds of polling. **Run it on a
    /// thread of its own**, and never let the peer's `connect` wait for that thread.
    ///
    /// # Errors
    ///
    /// The plugin's error; the listener is dead then, and further calls return [`Error::Dead`].
    /// [`Error::ListenerSpent`] after it has returned its connection.
    pub fn accept(&mut self) -> Poll<Result<RecvComm, Error>> {
        let buffers = match std::mem::replace(&mut self.state, State::Failed) {
            State::Idle(buffers) | State::Pending(buffers) => buffers,
            State::Spent => {
                self.state = State::Spent;
                return Poll::Ready(Err(Error::ListenerSpent));
            }
            State::Failed => return Poll::Ready(Err(Error::Dead { call: "accept" })),
        };
        let out = buffers.as_ptr();
        let _alone = self.core.alone(self.device);
        // SAFETY: the listener is open and has not failed; the out-parameters keep their addresses.
        let code = unsafe { self.core.calls.accept.call(self.raw, &raw mut (*out).out) };
        if let Err(error) = check("accept", code) {
            return Poll::Ready(Err(error));
        }
        // SAFETY: allocated, and the plugin writes it only during its calls.
        let comm = unsafe { (*out).out.comm };
        if comm.is_null() {
            self.state = State::Pending(buffers);
            return Poll::Pending;
        }
        self.state = State::Spent;
        Poll::Ready(self.finish(comm, buffers))
    }

    fn finish(&self, raw: Ptr, buffers: Stable<Buffers>) -> Result<RecvComm, Error> {
        let core = Arc::clone(&self.core);
        let unpacks = core.devices[self.device].device_type == DeviceType::Unpack;
        // SAFETY: allocated, and the plugin no longer writes it: it has returned the comm.
        let filled = unsafe { (*buffers.as_ptr()).out.device };
        let device_handle = if unpacks && !filled.is_null() {
            // SAFETY: either this buffer, or one that the plugin has put in its place.
            DeviceHandle::from_raw(&unsafe { filled.read() })
        } else {
            None
        };
        let keeps_done = core.calls.irecv_consumed.is_some();
        let receiving = Receiving::new(device_handle, core.abi.slots, buffers);
        let comm = Comm::new(core, raw, self.device, keeps_done, receiving);
        if unpacks && device_handle.is_none() {
            // Dropping the comm closes it.
            return Err(Error::Contract {
                call: "accept",
                what: "an unpack device gave no device handle",
            });
        }
        Ok(comm)
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let State::Pending(buffers) = std::mem::replace(&mut self.state, State::Failed) {
            limited_warning!(
                plugin = self.core.name,
                remedy = "see whether the peer's plugin answers; the listener stays until the process ends",
                "listener left open: its accept is pending"
            );
            buffers.leave();
            // A thread of the plugin may still work on it: keep its code loaded.
            std::mem::forget(Arc::clone(&self.core));
            return;
        }
        // SAFETY: the listener is open, no accept is pending, and this is its last use.
        let code = unsafe { (self.core.calls.close_listen)(self.raw) };
        if let Err(error) = check("closeListen", code) {
            limited_warning!(
                plugin = self.core.name,
                %error,
                remedy = "report it to the maker of the plugin; what it held stays until the process ends",
                "a listener was not closed cleanly"
            );
        }
    }
}

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listener")
            .field("plugin", &self.core.name)
            .field("device", &self.device)
            .field("pending", &matches!(self.state, State::Pending(_)))
            .finish()
    }
}
