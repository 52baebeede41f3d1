//! The plugin's calls: every signature that a member has had, and one way to call it.
//!
//! A variant is named after the version that introduced it. All functions return `ncclResult_t`.

use std::ffi::{c_int, c_void};

use super::common::{CommConfig, INVALID_ARGUMENT, RawDeviceHandle};
use crate::log::Logger;

/// Opaque objects of the plugin: comms, requests, memory handles, contexts; and plain addresses.
pub(crate) type Ptr = *mut c_void;

/// `ncclProfilerCallback_t`.
pub(crate) type Profiler = unsafe extern "C" fn(*mut Ptr, c_int, Ptr, i64, Ptr) -> c_int;

type DeviceOut = *mut *mut RawDeviceHandle;

// Members whose signature never changed.
pub(crate) type Devices = unsafe extern "C" fn(*mut c_int) -> c_int;
pub(crate) type GetProperties = unsafe extern "C" fn(c_int, Ptr) -> c_int;
pub(crate) type RegMrDmaBuf =
    unsafe extern "C" fn(Ptr, Ptr, usize, c_int, u64, c_int, *mut Ptr) -> c_int;
pub(crate) type DeregMr = unsafe extern "C" fn(Ptr, Ptr) -> c_int;
pub(crate) type Test = unsafe extern "C" fn(Ptr, *mut c_int, *mut c_int) -> c_int;
pub(crate) type Close = unsafe extern "C" fn(Ptr) -> c_int;
pub(crate) type GetDeviceMr = unsafe extern "C" fn(Ptr, Ptr, *mut Ptr) -> c_int;
pub(crate) type IrecvConsumed = unsafe extern "C" fn(Ptr, c_int, Ptr) -> c_int;
pub(crate) type MakeVDevice = unsafe extern "C" fn(*mut c_int, Ptr) -> c_int;
pub(crate) type Finalize = unsafe extern "C" fn(Ptr) -> c_int;
pub(crate) type SetNetAttr = unsafe extern "C" fn(Ptr, Ptr) -> c_int;

// Members whose signature has changed.
pub(crate) type InitV4 = unsafe extern "C" fn(Logger) -> c_int;
pub(crate) type InitV10 = unsafe extern "C" fn(Logger, Profiler) -> c_int;
pub(crate) type InitV11 =
    unsafe extern "C" fn(*mut Ptr, u64, *mut CommConfig, Logger, Profiler) -> c_int;
pub(crate) type ListenV4 = unsafe extern "C" fn(c_int, Ptr, *mut Ptr) -> c_int;
pub(crate) type ListenV11 = unsafe extern "C" fn(Ptr, c_int, Ptr, *mut Ptr) -> c_int;
pub(crate) type ConnectV4 = unsafe extern "C" fn(c_int, Ptr, *mut Ptr) -> c_int;
pub(crate) type ConnectV7 = unsafe extern "C" fn(c_int, Ptr, *mut Ptr, DeviceOut) -> c_int;
pub(crate) type ConnectV10 =
    unsafe extern "C" fn(c_int, *mut CommConfig, Ptr, *mut Ptr, DeviceOut) -> c_int;
pub(crate) type ConnectV11 = unsafe extern "C" fn(Ptr, c_int, Ptr, *mut Ptr, DeviceOut) -> c_int;
pub(crate) type AcceptV4 = unsafe extern "C" fn(Ptr, *mut Ptr) -> c_int;
pub(crate) type AcceptV7 = unsafe extern "C" fn(Ptr, *mut Ptr, DeviceOut) -> c_int;
pub(crate) type RegMrV4 = unsafe extern "C" fn(Ptr, Ptr, c_int, c_int, *mut Ptr) -> c_int;
pub(crate) type RegMrV8 = unsafe extern "C" fn(Ptr, Ptr, usize, c_int, *mut Ptr) -> c_int;
pub(crate) type IsendV4 = unsafe extern "C" fn(Ptr, Ptr, c_int, Ptr, *mut Ptr) -> c_int;
pub(crate) type IsendV5 = unsafe extern "C" fn(Ptr, Ptr, c_int, c_int, Ptr, *mut Ptr) -> c_int;
pub(crate) type IsendV9 = unsafe extern "C" fn(Ptr, Ptr, usize, c_int, Ptr, *mut Ptr) -> c_int;
pub(crate) type IsendV10 =
    unsafe extern "C" fn(Ptr, Ptr, usize, c_int, Ptr, Ptr, *mut Ptr) -> c_int;
pub(crate) type IrecvV4 = unsafe extern "C" fn(Ptr, Ptr, c_int, Ptr, *mut Ptr) -> c_int;
pub(crate) type IrecvV5 =
    unsafe extern "C" fn(Ptr, c_int, *mut Ptr, *mut c_int, *mut c_int, *mut Ptr, *mut Ptr) -> c_int;
pub(crate) type IrecvV9 =
    unsafe extern "C" fn(Ptr, c_int, *mut Ptr, *mut usize, *mut c_int, *mut Ptr, *mut Ptr) -> c_int;
pub(crate) type IrecvV10 = unsafe extern "C" fn(
    Ptr,
    c_int,
    *mut Ptr,
    *mut usize,
    *mut c_int,
    *mut Ptr,
    *mut Ptr,
    *mut Ptr,
) -> c_int;
pub(crate) type IflushV4 = unsafe extern "C" fn(Ptr, Ptr, c_int, Ptr, *mut Ptr) -> c_int;
pub(crate) type IflushV5 =
    unsafe extern "C" fn(Ptr, c_int, *mut Ptr, *mut c_int, *mut Ptr, *mut Ptr) -> c_int;

/// Every function of a plugin that this crate calls after `init`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Calls {
    pub(crate) devices: Devices,
    pub(crate) get_properties: GetProperties,
    pub(crate) listen: Listen,
    pub(crate) connect: Connect,
    pub(crate) accept: Accept,
    pub(crate) reg_mr: RegMr,
    pub(crate) reg_mr_dma_buf: Option<RegMrDmaBuf>,
    pub(crate) dereg_mr: DeregMr,
    pub(crate) isend: Isend,
    pub(crate) irecv: Irecv,
    pub(crate) iflush: Option<Iflush>,
    pub(crate) test: Test,
    pub(crate) close_send: Close,
    pub(crate) close_recv: Close,
    pub(crate) close_listen: Close,
    pub(crate) irecv_consumed: Option<IrecvConsumed>,
    pub(crate) finalize: Option<Finalize>,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Init {
    V4(InitV4),
    V10(InitV10),
    V11(InitV11),
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Listen {
    V4(ListenV4),
    V11(ListenV11),
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Connect {
    V4(ConnectV4),
    V7(ConnectV7),
    V10(ConnectV10),
    V11(ConnectV11),
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Accept {
    V4(AcceptV4),
    V7(AcceptV7),
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum RegMr {
    V4(RegMrV4),
    V8(RegMrV8),
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Isend {
    V4(IsendV4),
    V5(IsendV5),
    V9(IsendV9),
    V10(IsendV10),
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Irecv {
    V4(IrecvV4),
    V5(IrecvV5),
    V9(IrecvV9),
    V10(IrecvV10),
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Iflush {
    V4(IflushV4),
    V5(IflushV5),
}

/// A message: its address, length, registration and tag.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Message {
    pub(crate) data: Ptr,
    pub(crate) bytes: usize,
    pub(crate) tag: c_int,
    pub(crate) memory: Ptr,
}

/// The out-parameters of a connect or accept. They keep their address from the first call to the
/// last, because plugins remember them.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct CommOut {
    pub(crate) comm: Ptr,
    pub(crate) device: *mut RawDeviceHandle,
    pub(crate) config: CommConfig,
}

// SAFETY (for every `call` below): the function pointer comes from a plugin's table of the version
// of its variant, so it has that C signature; the caller guarantees that the pointers are what the
// plugin expects, as stated on each function.

impl Init {
    /// # Safety
    ///
    /// `config` lives as long as the context; called at most as often as the version allows.
    pub(crate) unsafe fn call(
        self,
        context: *mut Ptr,
        user: u64,
        config: *mut CommConfig,
        logger: Logger,
    ) -> c_int {
        // SAFETY: see above.
        unsafe {
            match self {
                Self::V4(init) => init(logger),
                Self::V10(init) => init(logger, no_profiler),
                Self::V11(init) => init(context, user, config, logger, no_profiler),
            }
        }
    }
}

impl Listen {
    /// # Safety
    ///
    /// `handle` has room for 128 bytes.
    pub(crate) unsafe fn call(
        self,
        context: Ptr,
        device: c_int,
        handle: Ptr,
        comm: *mut Ptr,
    ) -> c_int {
        // SAFETY: see above.
        unsafe {
            match self {
                Self::V4(listen) => listen(device, handle, comm),
                Self::V11(listen) => listen(context, device, handle, comm),
            }
        }
    }
}

impl Connect {
    /// # Safety
    ///
    /// `handle` and `out` are the same, at the same addresses, as in earlier calls for this
    /// connection, and no earlier call failed.
    pub(crate) unsafe fn call(
        self,
        context: Ptr,
        device: c_int,
        handle: Ptr,
        out: *mut CommOut,
    ) -> c_int {
        // SAFETY: see above; `out` is valid, so its fields have addresses.
        unsafe {
            let comm = &raw mut (*out).comm;
            let device_out = &raw mut (*out).device;
            match self {
                Self::V4(connect) => connect(device, handle, comm),
                Self::V7(connect) => connect(device, handle, comm, device_out),
                Self::V10(connect) => {
                    connect(device, &raw mut (*out).config, handle, comm, device_out)
                }
                Self::V11(connect) => connect(context, device, handle, comm, device_out),
            }
        }
    }
}

impl Accept {
    /// # Safety
    ///
    /// `listener` is open and has not failed; `out` is the same, at the same address, as in earlier
    /// calls.
    pub(crate) unsafe fn call(self, listener: Ptr, out: *mut CommOut) -> c_int {
        // SAFETY: see above; `out` is valid, so its fields have addresses.
        unsafe {
            let comm = &raw mut (*out).comm;
            match self {
                Self::V4(accept) => accept(listener, comm),
                Self::V7(accept) => accept(listener, comm, &raw mut (*out).device),
            }
        }
    }
}

impl RegMr {
    /// # Safety
    ///
    /// `comm` is open; `data` is `bytes` long and stays so while it is registered.
    pub(crate) unsafe fn call(
        self,
        comm: Ptr,
        data: Ptr,
        bytes: usize,
        kind: c_int,
        memory: *mut Ptr,
    ) -> c_int {
        // SAFETY: see above.
        unsafe {
            match self {
                Self::V4(reg_mr) => match c_int::try_from(bytes) {
                    Ok(bytes) => reg_mr(comm, data, bytes, kind, memory),
                    Err(_) => INVALID_ARGUMENT,
                },
                Self::V8(reg_mr) => reg_mr(comm, data, bytes, kind, memory),
            }
        }
    }
}

impl Isend {
    /// # Safety
    ///
    /// `comm` is open and used by no other thread; the message lies in its registration and stays
    /// until the request is done.
    pub(crate) unsafe fn call(self, comm: Ptr, message: Message, request: *mut Ptr) -> c_int {
        let Message {
            data,
            bytes,
            tag,
            memory,
        } = message;
        let int_bytes = c_int::try_from(bytes);
        // SAFETY: see above.
        unsafe {
            match self {
                Self::V4(isend) => match int_bytes {
                    Ok(bytes) => isend(comm, data, bytes, memory, request),
                    Err(_) => INVALID_ARGUMENT,
                },
                Self::V5(isend) => match int_bytes {
                    Ok(bytes) => isend(comm, data, bytes, tag, memory, request),
                    Err(_) => INVALID_ARGUMENT,
                },
                Self::V9(isend) => isend(comm, data, bytes, tag, memory, request),
                Self::V10(isend) => isend(
                    comm,
                    data,
                    bytes,
                    tag,
                    memory,
                    std::ptr::null_mut(),
                    request,
                ),
            }
        }
    }
}

impl Irecv {
    /// Posts one receive; groups are not used, because few plugins take more than one buffer.
    ///
    /// # Safety
    ///
    /// As for `isend`.
    pub(crate) unsafe fn call(self, comm: Ptr, message: Message, request: *mut Ptr) -> c_int {
        let Message {
            mut data,
            mut bytes,
            mut tag,
            mut memory,
        } = message;
        let mut profile: Ptr = std::ptr::null_mut();
        let int_bytes = c_int::try_from(bytes);
        // SAFETY: see above; arrays have the one element that `n = 1` requires, and are read only
        // during the call.
        unsafe {
            match self {
                Self::V4(irecv) => match int_bytes {
                    Ok(bytes) => irecv(comm, data, bytes, memory, request),
                    Err(_) => INVALID_ARGUMENT,
                },
                Self::V5(irecv) => match int_bytes {
                    Ok(mut bytes) => irecv(
                        comm,
                        1,
                        &raw mut data,
                        &raw mut bytes,
                        &raw mut tag,
                        &raw mut memory,
                        request,
                    ),
                    Err(_) => INVALID_ARGUMENT,
                },
                Self::V9(irecv) => irecv(
                    comm,
                    1,
                    &raw mut data,
                    &raw mut bytes,
                    &raw mut tag,
                    &raw mut memory,
                    request,
                ),
                Self::V10(irecv) => irecv(
                    comm,
                    1,
                    &raw mut data,
                    &raw mut bytes,
                    &raw mut tag,
                    &raw mut memory,
                    &raw mut profile,
                    request,
                ),
            }
        }
    }
}

impl Iflush {
    /// # Safety
    ///
    /// As for `irecv`; a receive into this range is done.
    pub(crate) unsafe fn call(self, comm: Ptr, message: Message, request: *mut Ptr) -> c_int {
        let Message {
            mut data,
            bytes,
            mut memory,
            ..
        } = message;
        let Ok(mut bytes) = c_int::try_from(bytes) else {
            return INVALID_ARGUMENT;
        };
        // SAFETY: see above; arrays have one element and are read only during the call.
        unsafe {
            match self {
                Self::V4(iflush) => iflush(comm, data, bytes, memory, request),
                Self::V5(iflush) => iflush(
                    comm,
                    1,
                    &raw mut data,
                    &raw mut bytes,
                    &raw mut memory,
                    request,
                ),
            }
        }
    }
}

/// Does nothing: plugins call it without checking for a profiler.
unsafe extern "C" fn no_profiler(_: *mut Ptr, _: c_int, _: Ptr, _: i64, _: Ptr) -> c_int {
    super::common::SUCCESS
}
