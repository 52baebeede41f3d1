//! Checks the layouts, number by number, against C compilers and the published headers (x86-64
//! Linux).
//!
//! Nothing here is computed from the Rust structs: a member added, dropped or moved fails a line.

use std::mem::{offset_of, size_of};

use super::common::{CommConfig, RawDeviceHandle};
use super::{ABIS, v4, v5, v6, v7, v8, v9, v10, v11, v12};

macro_rules! layout {
    ($test:ident, $type:ty, $size:literal, $($member:ident = $offset:literal),+ $(,)?) => {
        #[test]
        fn $test() {
            $(assert_eq!(
                offset_of!($type, $member),
                $offset,
                concat!(stringify!($type), ".", stringify!($member))
            );)+
            assert_eq!(size_of::<$type>(), $size, concat!("size of ", stringify!($type)));
        }
    };
}

layout!(
    table_v4,
    v4::Table,
    128,
    name = 0,
    init = 8,
    devices = 16,
    get_properties = 24,
    listen = 32,
    connect = 40,
    accept = 48,
    reg_mr = 56,
    dereg_mr = 64,
    isend = 72,
    irecv = 80,
    iflush = 88,
    test = 96,
    close_send = 104,
    close_recv = 112,
    close_listen = 120,
);

layout!(
    table_v5,
    v5::Table,
    128,
    name = 0,
    init = 8,
    devices = 16,
    get_properties = 24,
    listen = 32,
    connect = 40,
    accept = 48,
    reg_mr = 56,
    dereg_mr = 64,
    isend = 72,
    irecv = 80,
    iflush = 88,
    test = 96,
    close_send = 104,
    close_recv = 112,
    close_listen = 120,
);

layout!(
    table_v6,
    v6::Table,
    136,
    name = 0,
    init = 8,
    devices = 16,
    get_properties = 24,
    listen = 32,
    connect = 40,
    accept = 48,
    reg_mr = 56,
    reg_mr_dma_buf = 64,
    dereg_mr = 72,
    isend = 80,
    irecv = 88,
    iflush = 96,
    test = 104,
    close_send = 112,
    close_recv = 120,
    close_listen = 128,
);

layout!(
    table_v7,
    v7::Table,
    152,
    name = 0,
    init = 8,
    devices = 16,
    get_properties = 24,
    listen = 32,
    connect = 40,
    accept = 48,
    reg_mr = 56,
    reg_mr_dma_buf = 64,
    dereg_mr = 72,
    isend = 80,
    irecv = 88,
    iflush = 96,
    test = 104,
    close_send = 112,
    close_recv = 120,
    close_listen = 128,
    get_device_mr = 136,
    irecv_consumed = 144,
);

layout!(
    table_v8,
    v8::Table,
    152,
    name = 0,
    init = 8,
    devices = 16,
    get_properties = 24,
    listen = 32,
    connect = 40,
    accept = 48,
    reg_mr = 56,
    reg_mr_dma_buf = 64,
    dereg_mr = 72,
    isend = 80,
    irecv = 88,
    iflush = 96,
    test = 104,
    close_send = 112,
    close_recv = 120,
    close_listen = 128,
    get_device_mr = 136,
    irecv_consumed = 144,
);

layout!(
    table_v9,
    v9::Table,
    160,
    name = 0,
    init = 8,
    devices = 16,
    get_properties = 24,
    listen = 32,
    connect = 40,
    accept = 48,
    reg_mr = 56,
    reg_mr_dma_buf = 64,
    dereg_mr = 72,
    isend = 80,
    irecv = 88,
    iflush = 96,
    test = 104,
    close_send = 112,
    close_recv = 120,
    close_listen = 128,
    get_device_mr = 136,
    irecv_consumed = 144,
    make_v_device = 152,
);

layout!(
    table_v10,
    v10::Table,
    160,
    name = 0,
    init = 8,
    devices = 16,
    get_properties = 24,
    listen = 32,
    connect = 40,
    accept = 48,
    reg_mr = 56,
    reg_mr_dma_buf = 64,
    dereg_mr = 72,
    isend = 80,
    irecv = 88,
    iflush = 96,
    test = 104,
    close_send = 112,
    close_recv = 120,
    close_listen = 128,
    get_device_mr = 136,
    irecv_consumed = 144,
    make_v_device = 152,
);

layout!(
    table_v11,
    v11::Table,
    176,
    name = 0,
    init = 8,
    devices = 16,
    get_properties = 24,
    listen = 32,
    connect = 40,
    accept = 48,
    reg_mr = 56,
    reg_mr_dma_buf = 64,
    dereg_mr = 72,
    isend = 80,
    irecv = 88,
    iflush = 96,
    test = 104,
    close_send = 112,
    close_recv = 120,
    close_listen = 128,
    get_device_mr = 136,
    irecv_consumed = 144,
    make_v_device = 152,
    finalize = 160,
    set_net_attr = 168,
);

layout!(
    properties_v4,
    v4::Properties,
    40,
    name = 0,
    pci_path = 8,
    guid = 16,
    ptr_support = 24,
    speed = 28,
    port = 32,
    max_comms = 36,
);

layout!(
    properties_v6,
    v6::Properties,
    48,
    name = 0,
    pci_path = 8,
    guid = 16,
    ptr_support = 24,
    speed = 28,
    port = 32,
    latency = 36,
    max_comms = 40,
    max_recvs = 44,
);

layout!(
    properties_v7,
    v7::Properties,
    56,
    name = 0,
    pci_path = 8,
    guid = 16,
    ptr_support = 24,
    speed = 28,
    port = 32,
    latency = 36,
    max_comms = 40,
    max_recvs = 44,
    device_type = 48,
    device_version = 52,
);

layout!(
    properties_v8,
    v8::Properties,
    64,
    name = 0,
    pci_path = 8,
    guid = 16,
    ptr_support = 24,
    reg_is_global = 28,
    speed = 32,
    port = 36,
    latency = 40,
    max_comms = 44,
    max_recvs = 48,
    device_type = 52,
    device_version = 56,
);

layout!(
    properties_v9,
    v9::Properties,
    104,
    name = 0,
    pci_path = 8,
    guid = 16,
    ptr_support = 24,
    reg_is_global = 28,
    force_flush = 32,
    speed = 36,
    port = 40,
    latency = 44,
    max_comms = 48,
    max_recvs = 52,
    device_type = 56,
    device_version = 60,
    virtual_device = 64,
    max_p2p_bytes = 88,
    max_coll_bytes = 96,
);

layout!(
    properties_v11,
    v11::Properties,
    112,
    name = 0,
    pci_path = 8,
    guid = 16,
    ptr_support = 24,
    reg_is_global = 28,
    force_flush = 32,
    speed = 36,
    port = 40,
    latency = 44,
    max_comms = 48,
    max_recvs = 52,
    device_type = 56,
    device_version = 60,
    virtual_device = 64,
    max_p2p_bytes = 88,
    max_coll_bytes = 96,
    max_multi_request_size = 104,
);

layout!(
    properties_v12,
    v12::Properties,
    128,
    name = 0,
    pci_path = 8,
    guid = 16,
    ptr_support = 24,
    reg_is_global = 28,
    force_flush = 32,
    speed = 36,
    port = 40,
    latency = 44,
    max_comms = 48,
    max_recvs = 52,
    device_type = 56,
    device_version = 60,
    virtual_device = 64,
    max_p2p_bytes = 104,
    max_coll_bytes = 112,
    max_multi_request_size = 120,
    rail_id = 124,
    plane_id = 126,
);

layout!(
    device_handle,
    RawDeviceHandle,
    32,
    device_type = 0,
    device_version = 4,
    handle = 8,
    size = 16,
    needs_proxy_progress = 24,
);

layout!(comm_config, CommConfig, 4, traffic_class = 0,);

#[test]
fn versions_are_complete_newest_first_and_named_after_their_symbol() {
    let versions: Vec<u32> = ABIS.iter().map(|abi| abi.version).collect();
    assert_eq!(versions, [12, 11, 10, 9, 8, 7, 6, 5, 4]);
    for abi in ABIS {
        let symbol = format!("ncclNetPlugin_v{}", abi.version);
        assert_eq!(abi.symbol.to_str(), Ok(symbol.as_str()));
        assert_eq!(abi.handle_bytes, if abi.version == 4 { 64 } else { 128 });
    }
}
