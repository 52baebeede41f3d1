//! Connects to a listener: creates the sending end.

use std::ffi::c_int;
use std::fmt;
use std::sync::Arc;
use std::task::Poll;

use super::handle::HandleBuffer;
use super::stable::Stable;
use super::{Comm, Handle, SendComm, Sending};
use crate::error::Error;
use crate::plugin::{Core, check};
use crate::sys::calls::CommOut;
use crate::sys::common::CommConfig;

/// A connection attempt. Poll it until it is ready.
///
/// No call cancels an attempt. Dropping a pending one leaks the plugin's part of it, and a few
/// hundred bytes here that the plugin may still write.
pub struct Connecting {
    core: Arc<Core>,
    device: usize,
    index: c_int,
    /// `None` once it has ended, either way.
    attempt: Option<Stable<Attempt>>,
    started: bool,
}

/// Buffers whose addresses the plugin may remember.
struct Attempt {
    handle: HandleBuffer,
    out: CommOut,
}

// SAFETY: NCCL polls an attempt from any of its service threads; plugins keep its state in the
// handle, not in the thread. `poll` needs `&mut self`: one thread at a time.
unsafe impl Send for Connecting {}

impl Connecting {
    pub(crate) fn new(core: &Arc<Core>, device: usize, handle: &Handle) -> Result<Self, Error> {
        Ok(Self {
            index: core.device(device)?,
            core: Arc::clone(core),
            device,
            attempt: Some(Stable::new(Attempt {
                handle: handle.to_buffer(),
                out: CommOut {
                    comm: std::ptr::null_mut(),
                    // Senders need no device handle; NCCL requests none either.
                    device: std::ptr::null_mut(),
                    config: CommConfig::UNDEFINED,
                },
            })),
            started: false,
        })
    }

    /// Continues connecting. Call it again while it is pending: there is no callback.
    ///
    /// Version 4 plugins may block in it until the peer has answered.
    ///
    /// # Errors
    ///
    /// The plugin's error; the attempt has ended then, and further polls return [`Error::Dead`].
    pub fn poll(&mut self) -> Poll<Result<SendComm, Error>> {
        let Some(attempt) = &self.attempt else {
            return Poll::Ready(Err(Error::Dead { call: "connect" }));
        };
        let first = !std::mem::replace(&mut self.started, true);
        let attempt = attempt.as_ptr();
        let alone = self.core.alone(self.device);
        // SAFETY: handle and out-parameters belong to the attempt and keep their addresses; a
        // failed or completed attempt is no longer here.
        let code = unsafe {
            self.core.calls.connect.call(
                self.core.context,
                self.index,
                (&raw mut (*attempt).handle).cast(),
                &raw mut (*attempt).out,
            )
        };
        drop(alone);
        if let Err(error) = check("connect", code) {
            self.attempt = None;
            return Poll::Ready(Err(error));
        }
        // SAFETY: allocated, and the plugin writes it only during its calls.
        let comm = unsafe { (*attempt).out.comm };
        if comm.is_null() {
            return Poll::Pending;
        }
        self.attempt = None;
        let core = Arc::clone(&self.core);
        Poll::Ready(Ok(Comm::new(
            core,
            comm,
            self.device,
            false,
            Sending::new(first),
        )))
    }
}

impl Drop for Connecting {
    fn drop(&mut self) {
        if self.started
            && let Some(attempt) = self.attempt.take()
        {
            tracing::debug!(plugin = self.core.name, "pending connection leaked");
            attempt.leave();
            // A thread of the plugin may still work on it: keep its code loaded.
            std::mem::forget(Arc::clone(&self.core));
        }
    }
}

impl fmt::Debug for Connecting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connecting")
            .field("plugin", &self.core.name)
            .field("device", &self.device)
            .field("over", &self.attempt.is_none())
            .finish()
    }
}
