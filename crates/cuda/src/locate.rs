//! Finds the device of an address.

use std::sync::Arc;

use crate::Device;
use crate::context::Context;
use crate::error::Error;
use crate::sys::{self, Api};

/// Returns the device that holds memory; `None` if it is host memory.
///
/// Never loads or initialises CUDA: if the process has not done so, all memory is host memory.
/// Cheap, and safe in a forked child, where all memory counts as host memory.
///
/// Pinned host memory is host memory. So is managed memory (`cudaMallocManaged`): the CPU may
/// access it at any time and the driver moves its pages, so sockets can use it directly, whereas a
/// copy by the device would only move the pages back and forth.
///
/// The range must lie in one allocation, or in adjacent mappings of one address reservation.
pub fn locate(address: usize, len: usize) -> Result<Option<Arc<dyn Device>>, Error> {
    if sys::is_forked() {
        return Ok(None);
    }
    let Some(api) = sys::loaded()? else {
        return Ok(None);
    };
    let Some(place) = Place::of(api, address)? else {
        return Ok(None);
    };
    let context = if place.context.is_null() {
        // Pools and virtual memory management belong to a device, not to a context.
        Context::primary(api, place.ordinal)?
    } else {
        Context::of_raw(api, place.context, place.ordinal)?
    };
    place.check_range(&context, address, len)?;
    Ok(Some(context))
}

/// Returns the device whose context is current on this thread; `None` if there is none.
///
/// Never loads or initialises CUDA, and is safe in a forked child, as [`locate`] is.
pub fn current() -> Result<Option<Arc<dyn Device>>, Error> {
    if sys::is_forked() {
        return Ok(None);
    }
    let Some(api) = sys::loaded()? else {
        return Ok(None);
    };
    let mut context = std::ptr::null_mut();
    // SAFETY: stores a handle.
    let code = unsafe { (api.ctx_get_current)(&mut context) };
    match code {
        sys::SUCCESS => sys::set_owner(),
        // CUDA is not initialised, or already shut down.
        sys::NOT_INITIALIZED | sys::DEINITIALIZED => return Ok(None),
        code => api.check(code, "asking for the current context")?,
    }
    if context.is_null() {
        return Ok(None);
    }
    let mut device = 0;
    // SAFETY: stores a number.
    let code = unsafe { (api.ctx_get_device)(&mut device) };
    api.check(code, "asking for the current device")?;
    let ordinal = device.unsigned_abs();
    Ok(Some(Context::of_raw(api, context, ordinal)?))
}

/// Returns the device's primary context; creates it, and initialises CUDA, if needed.
pub fn device(ordinal: u32) -> Result<Arc<dyn Device>, Error> {
    Ok(Context::primary(sys::initialised()?, ordinal)?)
}

/// The location of an address in device memory.
struct Place {
    /// Null if the memory belongs to no context.
    context: sys::Context,
    ordinal: u32,
}

impl Place {
    fn of(api: &Api, address: usize) -> Result<Option<Self>, Error> {
        let attributes = [
            sys::POINTER_CONTEXT,
            sys::POINTER_MEMORY_TYPE,
            sys::POINTER_IS_MANAGED,
            sys::POINTER_DEVICE_ORDINAL,
        ];
        let [context, kind, is_managed, ordinal] = match api.pointer_attributes(address, attributes)
        {
            Ok(values) => values,
            // CUDA is not at work here (yet, or any more), or knows nothing of the address.
            Err(
                sys::NOT_INITIALIZED
                | sys::DEINITIALIZED
                | sys::INVALID_VALUE
                | sys::INVALID_CONTEXT,
            ) => return Ok(None),
            Err(code) => return Err(api.error(code, "asking which device memory lies on")),
        };
        sys::set_owner();
        if kind != u64::from(sys::MEMORY_TYPE_DEVICE) || is_managed != 0 {
            return Ok(None);
        }
        Ok(Some(Self {
            context: context as sys::Context,
            ordinal: ordinal as u32,
        }))
    }

    /// Checks that all of the range is mapped, as far as the driver reports it.
    fn check_range(&self, context: &Context, address: usize, len: usize) -> Result<(), Error> {
        let _scope = context.enter()?;
        let end = address.saturating_add(len);
        let Some((base, mut reached)) = extent(context.api, address) else {
            // The extent of some kinds of memory is unknown.
            return Ok(());
        };
        // Memory with a context was allocated as a whole. An allocator that maps memory piece by
        // piece returns ranges that continue in the next piece.
        while reached < end
            && self.context.is_null()
            && let Some((_, further)) = extent(context.api, reached)
            && further > reached
        {
            reached = further;
        }
        if reached < end {
            return Err(Error::OutOfAllocation {
                address,
                len,
                base,
                size: reached - base,
            });
        }
        Ok(())
    }
}

/// Returns start and end of the allocation, or mapping, that contains an address. A context must be
/// current.
pub(crate) fn extent(api: &Api, address: usize) -> Option<(usize, usize)> {
    let (mut base, mut size) = (0, 0);
    // SAFETY: stores two numbers; the driver only looks the address up.
    let code =
        unsafe { (api.mem_get_address_range)(&mut base, &mut size, address as sys::DevicePtr) };
    let base = base as usize;
    (code == sys::SUCCESS).then_some((base, base.saturating_add(size)))
}
