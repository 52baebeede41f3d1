//! Version 10: a profiler callback, a configuration per connect (NCCL 2.26 on). The properties are
//! version 9's.

use std::ffi::{c_char, c_void};

use super::calls::{
    Accept, AcceptV7, Calls, Close, Connect, ConnectV10, DeregMr, Devices, GetDeviceMr,
    GetProperties, Iflush, IflushV5, Init, InitV10, Irecv, IrecvConsumed, IrecvV10, Isend,
    IsendV10, Listen, ListenV4, MakeVDevice, RegMr, RegMrDmaBuf, RegMrV8, Test,
};
use super::common::{MissingMember, SLOTS_FROM_V7, required};
use super::{Abi, v9};

pub(super) static ABI: Abi = Abi {
    version: 10,
    symbol: c"ncclNetPlugin_v10",
    handle_bytes: 128,
    slots: SLOTS_FROM_V7,
    max_registration: usize::MAX,
    max_message: usize::MAX,
    init,
    calls,
    properties: v9::properties,
};

/// `ncclNet_v10_t`.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(
    dead_code,
    reason = "members that are never read are part of the layout"
)]
pub(super) struct Table {
    pub(super) name: *const c_char,
    pub(super) init: Option<InitV10>,
    pub(super) devices: Option<Devices>,
    pub(super) get_properties: Option<GetProperties>,
    pub(super) listen: Option<ListenV4>,
    pub(super) connect: Option<ConnectV10>,
    pub(super) accept: Option<AcceptV7>,
    pub(super) reg_mr: Option<RegMrV8>,
    pub(super) reg_mr_dma_buf: Option<RegMrDmaBuf>,
    pub(super) dereg_mr: Option<DeregMr>,
    pub(super) isend: Option<IsendV10>,
    pub(super) irecv: Option<IrecvV10>,
    pub(super) iflush: Option<IflushV5>,
    pub(super) test: Option<Test>,
    pub(super) close_send: Option<Close>,
    pub(super) close_recv: Option<Close>,
    pub(super) close_listen: Option<Close>,
    pub(super) get_device_mr: Option<GetDeviceMr>,
    pub(super) irecv_consumed: Option<IrecvConsumed>,
    pub(super) make_v_device: Option<MakeVDevice>,
}

/// # Safety
///
/// `table` points to a table of this version.
unsafe fn init(table: *const c_void) -> Option<Init> {
    // SAFETY: guaranteed by the caller; reads only this member, since only it is valid before
    // `init`.
    unsafe { (*table.cast::<Table>()).init }.map(Init::V10)
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
        connect: Connect::V10(required!(table.connect, "connect")),
        accept: Accept::V7(required!(table.accept, "accept")),
        reg_mr: RegMr::V8(required!(table.reg_mr, "regMr")),
        reg_mr_dma_buf: table.reg_mr_dma_buf,
        dereg_mr: required!(table.dereg_mr, "deregMr"),
        isend: Isend::V10(required!(table.isend, "isend")),
        irecv: Irecv::V10(required!(table.irecv, "irecv")),
        iflush: table.iflush.map(Iflush::V5),
        test: required!(table.test, "test"),
        close_send: required!(table.close_send, "closeSend"),
        close_recv: required!(table.close_recv, "closeRecv"),
        close_listen: required!(table.close_listen, "closeListen"),
        irecv_consumed: table.irecv_consumed,
        finalize: None,
    })
}
