//! A CUDA stream owned by this crate.

use std::sync::Arc;

use crate::context::{Context, log};
use crate::error::Error;
use crate::sys;

/// A stream that neither waits for the default stream nor makes it wait.
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

    /// Returns whether work is left on the stream. The context must be current.
    pub(crate) fn query(&self) -> sys::Code {
        // SAFETY: the stream belongs to this value.
        unsafe { (self.context.api.stream_query)(self.raw) }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // A destroyed context has destroyed its streams.
        if let Ok(_scope) = self.context.enter() {
            // SAFETY: the stream belongs to this value; the driver lets its remaining work
            // continue.
            let code = unsafe { (self.context.api.stream_destroy)(self.raw) };
            log(self.context.api, code, "closing a stream");
        }
    }
}
