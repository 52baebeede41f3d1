//! A stream of our own.

use std::sync::Arc;

use crate::context::{Context, log};
use crate::error::Error;
use crate::sys;

/// A stream that does not wait for the default stream, nor that for it.
#[derive(Debug)]
pub(crate) struct Stream {
    context: Arc<Context>,
    pub(crate) raw: sys::Stream,
}

impl Stream {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Self, Error> {
        let _scope = context.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: stores a handle.
        let code = unsafe { (context.api.stream_create)(&mut raw, sys::STREAM_NON_BLOCKING) };
        context.api.check(code, "making a stream")?;
        Ok(Self {
            context: Arc::clone(context),
            raw,
        })
    }

    /// Whether there is still work on it. The context must be current.
    pub(crate) fn query(&self) -> sys::Code {
        // SAFETY: our own stream.
        unsafe { (self.context.api.stream_query)(self.raw) }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // A context that is gone has taken it along.
        if let Ok(_scope) = self.context.enter() {
            // SAFETY: our own stream; the driver lets work that is still on it go on.
            let code = unsafe { (self.context.api.stream_destroy)(self.raw) };
            log(self.context.api, code, "closing a stream");
        }
    }
}
