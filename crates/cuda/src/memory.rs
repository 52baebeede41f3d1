//! Device memory for copies in flight.

use std::sync::Arc;

use crate::context::{Context, log};
use crate::error::Error;
use crate::pinned::Pinned;
use crate::sys;

/// Memory of a device, made by [`crate::Device::allocate`] and freed when dropped: keep it until
/// the copies that use it are done. Its initial content is unspecified.
#[derive(Debug)]
pub struct DeviceMemory {
    address: usize,
    len: usize,
    owner: Owner,
}

#[derive(Debug)]
enum Owner {
    Context(Arc<Context>),
    /// Memory of the stand-in.
    Host(#[expect(dead_code, reason = "freed with this value")] Pinned),
}

impl DeviceMemory {
    /// Allocates memory of a context's device.
    pub(crate) fn on(context: Arc<Context>, len: usize) -> Result<Self, Error> {
        let scope = context.enter()?;
        let mut address = 0;
        // SAFETY: stores an address.
        let code = unsafe { (context.api.mem_alloc)(&mut address, len.max(1)) };
        context.api.check(code, "allocating device memory")?;
        drop(scope);
        Ok(Self {
            address: address as usize,
            len,
            owner: Owner::Context(context),
        })
    }

    /// Allocates memory of the stand-in.
    pub(crate) fn plain(len: usize) -> Result<Self, Error> {
        let memory = Pinned::plain(len)?;
        Ok(Self {
            address: memory.address().expose_provenance(),
            len,
            owner: Owner::Host(memory),
        })
    }

    /// Returns the address of the first byte, on the device.
    #[must_use]
    pub fn address(&self) -> usize {
        self.address
    }

    /// Returns the length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the length is zero.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        let Owner::Context(context) = &self.owner else {
            return;
        };
        // A destroyed context has freed its memory.
        if let Ok(_scope) = context.enter() {
            // SAFETY: allocated by `on`. Users of the memory keep this value until they are done.
            let code = unsafe { (context.api.mem_free)(self.address as sys::DevicePtr) };
            log(context.api, code, "freeing device memory");
        }
    }
}
