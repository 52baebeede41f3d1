//! Version 7: device handles and `irecvConsumed` (NCCL 2.19 on). GPUDirect-TCPX implements this
//! one.

use std::ffi::{c_char, c_int, c_void};

use super::Abi;
use super::calls::{
    Accept, AcceptV7, Calls, Close, Connect, ConnectV7, DeregMr, Devices, GetDeviceMr,
    GetProperties, Iflush, IflushV5, Init, InitV4, Irecv, IrecvConsumed, IrecvV5, Isend, IsendV5,
    Listen, ListenV4, RegMr, RegMrDmaBuf, RegMrV4, Test,
};
use super::common::{
    MAX_INT_MESSAGE, MAX_INT_REGISTRATION, MissingMember, Plain, PropertyBuffer, RawProperties,
    SLOTS_FROM_V7, required,
};

pub(super) static ABI: Abi = Abi {
    version: 7,
    symbol: c"ncclNetPlugin_v7",
    handle_bytes: 128,
    slots: SLOTS_FROM_V7,
    max_registration: MAX_INT_REGISTRATION,
    max_message: MAX_INT_MESSAGE,
    init,
    calls,
    properties,
};

/// `ncclNet_v7_t`.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(
    dead_code,
    reason = "members that are never read are part of the layout"
)]
pub(super) struct Table {
    pub(super) name: *const c_char,
    pub(super) init: Option<InitV4>,
    pub(super) devices: Option<Devices>,
    pub(super) get_properties: Option<GetProperties>,
    pub(super) listen: Option<ListenV4>,
    pub(super) connect: Option<ConnectV7>,
    pub(super) accept: Option<AcceptV7>,
    pub(super) reg_mr: Option<RegMrV4>,
    pub(super) reg_mr_dma_buf: Option<RegMrDmaBuf>,
    pub(super) dereg_mr: Option<DeregMr>,
    pub(super) isend: Option<IsendV5>,
    pub(super) irecv: Option<IrecvV5>,
    pub(super) iflush: Option<IflushV5>,
    pub(super) test: Option<Test>,
    pub(super) close_send: Option<Close>,
    pub(super) close_recv: Option<Close>,
    pub(super) close_listen: Option<Close>,
    pub(super) get_device_mr: Option<GetDeviceMr>,
    pub(super) irecv_consumed: Option<IrecvConsumed>,
}

/// `ncclNetProperties_v7_t`.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(
    dead_code,
    reason = "members that are never read are part of the layout"
)]
pub(super) struct Properties {
    pub(super) name: *const c_char,
    pub(super) pci_path: *const c_char,
    pub(super) guid: u64,
    pub(super) ptr_support: c_int,
    pub(super) speed: c_int,
    pub(super) port: c_int,
    pub(super) latency: f32,
    pub(super) max_comms: c_int,
    pub(super) max_recvs: c_int,
    pub(super) device_type: c_int,
    pub(super) device_version: c_int,
}

// SAFETY: integers, floats and raw pointers only.
unsafe impl Plain for Properties {}

/// # Safety
///
/// `table` points to a table of this version.
unsafe fn init(table: *const c_void) -> Option<Init> {
    // SAFETY: guaranteed by the caller; reads only this member, since only it is valid before
    // `init`.
    unsafe { (*table.cast::<Table>()).init }.map(Init::V4)
}

/// # Safety
///
/// `table` points to a table of this version, and `init` has succeeded.
unsafe fn calls(table: *const c_void) -> Result<Calls, MissingMember> {
    // SAFETY: guaranteed by the caller.
    let table = unsafe { table.cast::<Table>().read() };
    Ok(Calls {
        devices: required!(table.devices, "devices"),
        get_properties: required!(table.get_properties, "getProperties"),
        listen: Listen::V4(required!(table.listen, "listen")),
        connect: Connect::V7(required!(table.connect, "connect")),
        accept: Accept::V7(required!(table.accept, "accept")),
        reg_mr: RegMr::V4(required!(table.reg_mr, "regMr")),
        reg_mr_dma_buf: table.reg_mr_dma_buf,
        dereg_mr: required!(table.dereg_mr, "deregMr"),
        isend: Isend::V5(required!(table.isend, "isend")),
        irecv: Irecv::V5(required!(table.irecv, "irecv")),
        iflush: table.iflush.map(Iflush::V5),
        test: required!(table.test, "test"),
        close_send: required!(table.close_send, "closeSend"),
        close_recv: required!(table.close_recv, "closeRecv"),
        close_listen: required!(table.close_listen, "closeListen"),
        irecv_consumed: table.irecv_consumed,
        finalize: None,
    })
}

fn properties(buffer: &PropertyBuffer) -> RawProperties {
    let raw: Properties = buffer.read();
    RawProperties {
        name: raw.name,
        pci_path: raw.pci_path,
        guid: raw.guid,
        ptr_support: raw.ptr_support,
        speed: raw.speed,
        port: raw.port,
        latency: raw.latency,
        max_comms: raw.max_comms,
        max_recvs: raw.max_recvs,
        device_type: raw.device_type,
        device_version: raw.device_version,
        ..RawProperties::DEFAULT
    }
}
