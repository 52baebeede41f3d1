//! The functions behind the tables: convert, check for null, call, turn the outcome into a code. No
//! panic leaves them.
//!
//! Every function here is called from C. "NCCL's contract" in a `SAFETY` comment means: pointers
//! are null or point to what the header says, comms and requests came from this plugin and are
//! open, and data calls on one comm do not overlap.

use std::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use crate::accept::ListenComm;
use crate::comm::Comm;
use crate::connect;
use crate::device;
use crate::emulator::{Emulator, Flavor, VIOLATIONS};
use crate::error::{Error, Misuse};
use crate::faults::Call;
use crate::log::{self, info, warning};
use crate::receive::ReceiveComm;
use crate::registration;
use crate::request::{OP_SEND, Request};
use crate::ring::UnpackHandle;
use crate::send::SendComm;
use crate::tables::{
    DeviceHandle, Logger, PropertiesV6, PropertiesV7, PropertiesV8, net_device, result,
};

/// Runs the body of an entry point.
fn enter(call: Call, body: impl FnOnce(&'static Emulator) -> Result<(), Error>) -> c_int {
    guard(|| {
        let emulator = Emulator::get()?;
        emulator.faults.check(call)?;
        body(emulator)
    })
}

/// Turns errors and panics into codes, with a log line.
pub(crate) fn guard(body: impl FnOnce() -> Result<(), Error>) -> c_int {
    let outcome = catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
        Err(Misuse::Panic {
            what: text.unwrap_or_default(),
        }
        .into())
    });
    match outcome {
        Ok(()) => result::SUCCESS,
        Err(error) => {
            if matches!(error, Error::Misuse(_)) {
                VIOLATIONS.fetch_add(1, Relaxed);
            }
            warning!("{error}");
            error.code()
        }
    }
}

/// Writes to a caller's variable.
///
/// # Safety
/// `out` is null or writable.
unsafe fn put<T>(out: *mut T, value: T, what: &'static str) -> Result<(), Misuse> {
    if out.is_null() {
        return Err(Misuse::Null { what });
    }
    // SAFETY: guaranteed by the caller; C aligns its variables.
    unsafe { out.write(value) };
    Ok(())
}

fn not_null<T>(pointer: *mut T, what: &'static str) -> Result<(), Misuse> {
    if pointer.is_null() {
        Err(Misuse::Null { what })
    } else {
        Ok(())
    }
}

pub(crate) unsafe extern "C" fn init_tcpx(logger: Option<Logger>) -> c_int {
    static DONE: AtomicBool = AtomicBool::new(false);
    guard(|| {
        log::set_logger(logger);
        if DONE.load(Relaxed) {
            return Err(Misuse::SecondInit.into());
        }
        Emulator::start()?;
        if DONE.swap(true, Relaxed) {
            return Err(Misuse::SecondInit.into());
        }
        info!("emulating GPUDirect-TCPX over plain sockets: for tests, not for speed");
        Ok(())
    })
}

pub(crate) unsafe extern "C" fn init_plain(logger: Option<Logger>) -> c_int {
    guard(|| {
        log::set_logger(logger);
        Emulator::start().map(|_| ())
    })
}

pub(crate) unsafe extern "C" fn devices(ndev: *mut c_int) -> c_int {
    enter(Call::Other, |emulator| {
        // SAFETY: NCCL's contract.
        unsafe { put(ndev, emulator.devices.len() as c_int, "ndev") }.map_err(Into::into)
    })
}

/// `getProperties`, for one layout each.
macro_rules! get_properties {
    ($name:ident, $properties:ty, $method:ident) => {
        pub(crate) unsafe extern "C" fn $name(dev: c_int, properties: *mut $properties) -> c_int {
            enter(Call::Other, |emulator| {
                let value = device::find(&emulator.devices, dev)?.$method();
                // SAFETY: NCCL's contract.
                unsafe { put(properties, value, "the properties") }.map_err(Into::into)
            })
        }
    };
}

get_properties!(get_properties_v6, PropertiesV6, properties_v6);
get_properties!(get_properties_v7, PropertiesV7, properties_v7);
get_properties!(get_properties_v8, PropertiesV8, properties_v8);

fn listen(flavor: Flavor, dev: c_int, handle: *mut c_void, out: *mut *mut c_void) -> c_int {
    enter(Call::Listen, |emulator| {
        not_null(handle, "the handle")?;
        not_null(out, "listenComm")?;
        let comm = ListenComm::new(emulator, flavor, dev)?;
        let bytes = comm.handle()?.encode();
        // SAFETY: NCCL's contract: the handle has 128 bytes.
        unsafe {
            handle
                .cast::<u8>()
                .copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
            put(out, Box::into_raw(Box::new(comm)).cast(), "listenComm")?;
        }
        Ok(())
    })
}

pub(crate) unsafe extern "C" fn listen_tcpx(
    dev: c_int,
    handle: *mut c_void,
    out: *mut *mut c_void,
) -> c_int {
    listen(Flavor::Tcpx, dev, handle, out)
}

pub(crate) unsafe extern "C" fn listen_plain(
    dev: c_int,
    handle: *mut c_void,
    out: *mut *mut c_void,
) -> c_int {
    listen(Flavor::Plain, dev, handle, out)
}

fn connect(flavor: Flavor, dev: c_int, handle: *mut c_void, out: *mut *mut c_void) -> c_int {
    enter(Call::Connect, |emulator| {
        not_null(handle, "the handle")?;
        // SAFETY: NCCL's contract.
        unsafe { put(out, std::ptr::null_mut(), "sendComm")? };
        let from = device::find(&emulator.devices, dev)?.address;
        // SAFETY: NCCL's contract: the handle has 128 bytes.
        let Some(link) = (unsafe { connect::connect(emulator, flavor, from, handle.cast())? })
        else {
            return Ok(());
        };
        let comm = Comm::Send(Box::new(SendComm::new(emulator, flavor, link)?));
        // SAFETY: NCCL's contract.
        unsafe { put(out, comm.into_raw(emulator), "sendComm") }.map_err(Into::into)
    })
}

pub(crate) unsafe extern "C" fn connect_tcpx(
    dev: c_int,
    handle: *mut c_void,
    out: *mut *mut c_void,
    _device_handle: *mut *mut DeviceHandle,
) -> c_int {
    connect(Flavor::Tcpx, dev, handle, out)
}

pub(crate) unsafe extern "C" fn connect_plain_v6(
    dev: c_int,
    handle: *mut c_void,
    out: *mut *mut c_void,
) -> c_int {
    connect(Flavor::Plain, dev, handle, out)
}

pub(crate) unsafe extern "C" fn connect_plain_v8(
    dev: c_int,
    handle: *mut c_void,
    out: *mut *mut c_void,
    _device_handle: *mut *mut DeviceHandle,
) -> c_int {
    connect(Flavor::Plain, dev, handle, out)
}

/// Performs `accept`; `device_handle` receives a ring's handle, if there is to be a ring.
fn accept(
    listen: *mut c_void,
    out: *mut *mut c_void,
    device_handle: impl FnOnce() -> Result<Option<*mut DeviceHandle>, Error>,
) -> c_int {
    enter(Call::Accept, |emulator| {
        // SAFETY: NCCL's contract.
        unsafe { put(out, std::ptr::null_mut(), "recvComm")? };
        let device_handle = device_handle()?;
        // SAFETY: NCCL's contract.
        let listen = unsafe { listen.cast::<ListenComm>().as_mut() }
            .ok_or(Misuse::Null { what: "listenComm" })?;
        let Some(link) = listen.accept(&emulator.settings)? else {
            return Ok(());
        };
        let ring = device_handle.is_some();
        let comm = ReceiveComm::new(emulator, listen.flavor, listen.device, link, ring)?;
        if let (Some(to), Some(unpack)) = (device_handle, comm.unpack()) {
            let value = DeviceHandle {
                net_device_type: net_device::UNPACK,
                net_device_version: net_device::UNPACK_VERSION,
                handle: unpack.ring.handle_address() as *mut c_void,
                size: size_of::<UnpackHandle>(),
                needs_proxy_progress: 1,
            };
            // SAFETY: NCCL's contract.
            unsafe { put(to, value, "the device handle")? };
        }
        let comm = Comm::Receive(Box::new(comm)).into_raw(emulator);
        // SAFETY: NCCL's contract.
        unsafe { put(out, comm, "recvComm") }.map_err(Into::into)
    })
}

pub(crate) unsafe extern "C" fn accept_tcpx(
    listen: *mut c_void,
    out: *mut *mut c_void,
    device_handle: *mut *mut DeviceHandle,
) -> c_int {
    accept(listen, out, || {
        if device_handle.is_null() {
            return Ok(None);
        }
        // SAFETY: NCCL's contract.
        let inner = unsafe { device_handle.read() };
        if inner.is_null() {
            Err(Misuse::NoDeviceHandle.into())
        } else {
            Ok(Some(inner))
        }
    })
}

pub(crate) unsafe extern "C" fn accept_plain_v6(
    listen: *mut c_void,
    out: *mut *mut c_void,
) -> c_int {
    accept(listen, out, || Ok(None))
}

pub(crate) unsafe extern "C" fn accept_plain_v8(
    listen: *mut c_void,
    out: *mut *mut c_void,
    _device_handle: *mut *mut DeviceHandle,
) -> c_int {
    accept(listen, out, || Ok(None))
}

pub(crate) unsafe extern "C" fn reg_mr_tcpx(
    comm: *mut c_void,
    data: *mut c_void,
    size: c_int,
    kind: c_int,
    mhandle: *mut *mut c_void,
) -> c_int {
    enter(Call::RegMr, |emulator| {
        not_null(mhandle, "mhandle")?;
        let registration = registration::register(emulator, comm, data, size, kind)?;
        // SAFETY: NCCL's contract.
        unsafe { put(mhandle, registration, "mhandle") }.map_err(Into::into)
    })
}

/// Leaves `mhandle` unchanged, as other socket plugins do.
pub(crate) unsafe extern "C" fn reg_mr_plain<Size>(
    comm: *mut c_void,
    _data: *mut c_void,
    _size: Size,
    kind: c_int,
    _mhandle: *mut *mut c_void,
) -> c_int {
    enter(Call::RegMr, |_| registration::register_plain(comm, kind))
}

pub(crate) unsafe extern "C" fn dereg_mr_tcpx(_comm: *mut c_void, mhandle: *mut c_void) -> c_int {
    enter(Call::Other, |emulator| {
        // SAFETY: NCCL's contract.
        unsafe { registration::deregister(emulator, mhandle) };
        Ok(())
    })
}

pub(crate) unsafe extern "C" fn dereg_mr_plain(_comm: *mut c_void, _mhandle: *mut c_void) -> c_int {
    result::SUCCESS
}

pub(crate) unsafe extern "C" fn isend(
    comm: *mut c_void,
    data: *mut c_void,
    size: c_int,
    _tag: c_int,
    mhandle: *mut c_void,
    request: *mut *mut c_void,
) -> c_int {
    enter(Call::Isend, |emulator| {
        not_null(request, "the request")?;
        // SAFETY: NCCL's contract.
        let sender = unsafe { Comm::from_raw(comm)? }.sender("isend")?;
        let (flavor, strict) = (sender.flavor(), emulator.settings.strict);
        // SAFETY: NCCL's contract.
        let buffer = unsafe { registration::buffer(flavor, strict, comm, data, size, mhandle)? };
        let posted = sender.post(comm, buffer)?.or_null();
        // SAFETY: NCCL's contract.
        unsafe { put(request, posted, "the request") }.map_err(Into::into)
    })
}

pub(crate) unsafe extern "C" fn irecv(
    comm: *mut c_void,
    n: c_int,
    data: *mut *mut c_void,
    sizes: *mut c_int,
    _tags: *mut c_int,
    mhandles: *mut *mut c_void,
    request: *mut *mut c_void,
) -> c_int {
    enter(Call::Irecv, |emulator| {
        if n != 1 {
            return Err(Misuse::NotOne { n }.into());
        }
        not_null(request, "the request")?;
        not_null(data, "the list of buffers")?;
        not_null(sizes, "the list of sizes")?;
        // SAFETY: NCCL's contract.
        let receiver = unsafe { Comm::from_raw(comm)? }.receiver("irecv")?;
        let (flavor, strict) = (receiver.flavor(), emulator.settings.strict);
        // SAFETY: NCCL's contract: lists of one.
        let buffer = unsafe {
            let mhandle = if mhandles.is_null() {
                std::ptr::null_mut()
            } else {
                mhandles.read()
            };
            registration::buffer(flavor, strict, comm, data.read(), sizes.read(), mhandle)?
        };
        let posted = receiver.post(comm, buffer)?.or_null();
        // SAFETY: NCCL's contract.
        unsafe { put(request, posted, "the request") }.map_err(Into::into)
    })
}

/// Converts a request for the caller: null if there is none.
trait OrNull {
    fn or_null(self) -> *mut c_void;
}

impl OrNull for Option<*mut Request> {
    fn or_null(self) -> *mut c_void {
        self.map_or(std::ptr::null_mut(), <*mut Request>::cast)
    }
}

pub(crate) unsafe extern "C" fn iflush_tcpx(
    _comm: *mut c_void,
    _n: c_int,
    _data: *mut *mut c_void,
    _sizes: *mut c_int,
    _mhandles: *mut *mut c_void,
    _request: *mut *mut c_void,
) -> c_int {
    let why = "the real plugin follows the incoming request pointer; consume the receive instead";
    enter(Call::Other, |_| Err(Misuse::Flush { why }.into()))
}

pub(crate) unsafe extern "C" fn iflush_plain(
    _comm: *mut c_void,
    _n: c_int,
    _data: *mut *mut c_void,
    _sizes: *mut c_int,
    _mhandles: *mut *mut c_void,
    _request: *mut *mut c_void,
) -> c_int {
    enter(Call::Other, |_| {
        Err(Misuse::Flush {
            why: "host memory needs none",
        }
        .into())
    })
}

pub(crate) unsafe extern "C" fn test(
    request: *mut c_void,
    done: *mut c_int,
    sizes: *mut c_int,
) -> c_int {
    enter(Call::Test, |emulator| {
        not_null(request, "the request")?;
        not_null(done, "done")?;
        let request = request.cast::<Request>();
        // SAFETY: NCCL's contract: requests belong to an open comm, also when they are done.
        let comm = unsafe { Comm::from_raw((*request).comm)? };
        let size = comm.test(request)?;
        // SAFETY: NCCL's contract.
        unsafe { done.write(c_int::from(size.is_some())) };
        if let Some(size) = size
            && !sizes.is_null()
            && (comm.flavor() == Flavor::Plain || emulator.settings.set_size)
        {
            // SAFETY: NCCL's contract.
            unsafe { sizes.write(size) };
        }
        Ok(())
    })
}

pub(crate) unsafe extern "C" fn irecv_consumed(
    comm: *mut c_void,
    n: c_int,
    request: *mut c_void,
) -> c_int {
    enter(Call::IrecvConsumed, |_| {
        not_null(request, "the request")?;
        if n != 1 {
            return Err(Misuse::NotOne { n }.into());
        }
        let request = request.cast::<Request>();
        // SAFETY: NCCL's contract.
        let (owner, op) = unsafe { ((*request).comm, (*request).op) };
        if op == OP_SEND {
            warning!("irecvConsumed of a send: there is nothing to consume");
            return Ok(());
        }
        if owner != comm {
            return Err(Misuse::ForeignRequest.into());
        }
        // SAFETY: NCCL's contract.
        unsafe { Comm::from_raw(comm)? }
            .receiver("irecvConsumed")?
            .consume(request)
    })
}

pub(crate) unsafe extern "C" fn get_device_mr(
    _comm: *mut c_void,
    _mhandle: *mut c_void,
    _device_mhandle: *mut *mut c_void,
) -> c_int {
    result::SUCCESS
}

/// `closeSend` and `closeRecv`.
pub(crate) unsafe extern "C" fn close(comm: *mut c_void) -> c_int {
    enter(Call::Other, |emulator| {
        // SAFETY: NCCL's contract: the comm is not used again.
        unsafe { Comm::close(emulator, comm) };
        Ok(())
    })
}

pub(crate) unsafe extern "C" fn close_listen(comm: *mut c_void) -> c_int {
    enter(Call::Other, |emulator| {
        let comm = comm.cast::<ListenComm>();
        // SAFETY: NCCL's contract.
        let Some(listen) = (unsafe { comm.as_ref() }) else {
            return Ok(());
        };
        if listen.pending() && emulator.settings.strict {
            return Err(Misuse::CloseDuringAccept.into());
        }
        // SAFETY: NCCL's contract: made by `listen`, not used again.
        drop(unsafe { Box::from_raw(comm) });
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panics_become_codes() {
        assert_eq!(guard(|| panic!("on purpose")), result::INTERNAL_ERROR);
        assert_eq!(guard(|| Err(Error::FailConnect)), result::SYSTEM_ERROR);
        assert_eq!(guard(|| Ok(())), result::SUCCESS);
    }
}
