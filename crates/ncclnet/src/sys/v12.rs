//! Version 12: more devices in a virtual one, rails and planes (NCCL 2.30 on). The function table
//! is version 11's.

use std::ffi::{c_char, c_int};

use super::common::{Plain, PropertyBuffer, RawProperties, SLOTS_FROM_V7, VirtualDevice};
use super::{Abi, v11};

pub(super) static ABI: Abi = Abi {
    version: 12,
    symbol: c"ncclNetPlugin_v12",
    handle_bytes: 128,
    slots: SLOTS_FROM_V7,
    max_registration: usize::MAX,
    max_message: usize::MAX,
    init: v11::init,
    calls: v11::calls,
    properties,
};

/// `ncclNetProperties_v12_t`.
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
    pub(super) reg_is_global: c_int,
    pub(super) force_flush: c_int,
    pub(super) speed: c_int,
    pub(super) port: c_int,
    pub(super) latency: f32,
    pub(super) max_comms: c_int,
    pub(super) max_recvs: c_int,
    pub(super) device_type: c_int,
    pub(super) device_version: c_int,
    pub(super) virtual_device: VirtualDevice<8>,
    pub(super) max_p2p_bytes: usize,
    pub(super) max_coll_bytes: usize,
    pub(super) max_multi_request_size: c_int,
    pub(super) rail_id: i16,
    pub(super) plane_id: i16,
}

// SAFETY: integers, floats and raw pointers only.
unsafe impl Plain for Properties {}

fn properties(buffer: &PropertyBuffer) -> RawProperties {
    let raw: Properties = buffer.read();
    RawProperties {
        name: raw.name,
        pci_path: raw.pci_path,
        guid: raw.guid,
        ptr_support: raw.ptr_support,
        reg_is_global: raw.reg_is_global,
        force_flush: raw.force_flush,
        speed: raw.speed,
        port: raw.port,
        latency: raw.latency,
        max_comms: raw.max_comms,
        max_recvs: raw.max_recvs,
        device_type: raw.device_type,
        device_version: raw.device_version,
        max_p2p_bytes: raw.max_p2p_bytes,
    }
}
