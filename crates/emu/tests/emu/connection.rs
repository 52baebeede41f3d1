//! listen, connect, accept.

use std::ffi::c_void;
use std::ptr::null_mut;

use nccl_net_tcpx_emu::ring::UnpackHandle;
use nccl_net_tcpx_emu::tables::{DeviceHandle, HANDLE_BYTES};

use crate::harness::{Pair, Plugin, connect, net, until, warned};

type Handle = [u8; HANDLE_BYTES];

fn listen(plugin: &Plugin) -> (Handle, *mut c_void) {
    // Poisoned, to check that the plugin writes all 128 bytes.
    let mut handle = [0xaa; HANDLE_BYTES];
    let mut comm = null_mut();
    assert_eq!(
        net!(
            plugin.v7,
            listen(0, handle.as_mut_ptr().cast(), &raw mut comm)
        ),
        0
    );
    assert!(!comm.is_null());
    (handle, comm)
}

fn try_connect(plugin: &Plugin, handle: &mut Handle) -> Result<*mut c_void, i32> {
    let mut comm = 0x10 as *mut c_void;
    let mut device_handle = 0x20 as *mut DeviceHandle;
    let raw = handle.as_mut_ptr().cast();
    let code = net!(
        plugin.v7,
        connect(0, raw, &raw mut comm, &raw mut device_handle)
    );
    assert_eq!(
        device_handle as usize, 0x20,
        "connect leaves the device handle alone"
    );
    if code == 0 { Ok(comm) } else { Err(code) }
}

fn try_accept(
    plugin: &Plugin,
    listen: *mut c_void,
    device_handle: &mut DeviceHandle,
) -> Result<*mut c_void, i32> {
    let mut comm = null_mut();
    let mut inner = &raw mut *device_handle;
    match net!(plugin.v7, accept(listen, &raw mut comm, &raw mut inner)) {
        0 => Ok(comm),
        code => Err(code),
    }
}

isolated! {
    fn pending_calls_come_first(PENDING_CALLS = "5") {
        let plugin = Plugin::init();
        let (mut handle, listener) = listen(plugin);
        assert!(handle[80..].iter().all(|&byte| byte == 0), "no state, zeroes behind it");
        let mut device_handle = DeviceHandle::ZERO;
        for _ in 0..5 {
            assert!(try_connect(plugin, &mut handle).unwrap().is_null());
            assert!(try_accept(plugin, listener, &mut device_handle).unwrap().is_null());
            assert!(device_handle.handle.is_null(), "filled only with the comm");
            assert_ne!(handle[80..88], [0; 8], "progress is in the handle");
        }
        let mut recv = null_mut();
        until("accept", || {
            recv = try_accept(plugin, listener, &mut device_handle).unwrap();
            !recv.is_null()
        });
        let mut send = null_mut();
        until("connect", || {
            send = try_connect(plugin, &mut handle).unwrap();
            !send.is_null()
        });
        let DeviceHandle { net_device_type, net_device_version, size, needs_proxy_progress, .. } =
            device_handle;
        assert_eq!((net_device_type, net_device_version, size, needs_proxy_progress), (1, 7, 24, 1));
        // SAFETY: host mode, filled in by accept.
        let unpack = unsafe { device_handle.handle.cast::<UnpackHandle>().read() };
        assert_eq!(unpack.head, u64::MAX);
        assert_eq!(unpack.meta as usize % 16, 0);
        assert_eq!(unpack.bounce as usize % 4096, 0);
        // Both are used up now.
        assert_eq!(try_connect(plugin, &mut handle), Err(3));
        assert_eq!(try_accept(plugin, listener, &mut device_handle), Err(3));
        assert_eq!(net!(plugin.v7, close_listen(listener)), 0);
        assert_eq!(plugin.counters(null_mut()).comms, 2);
        assert_eq!(net!(plugin.v7, close_send(send)), 0);
        assert_eq!(net!(plugin.v7, close_recv(recv)), 0);
        assert_eq!(plugin.counters(null_mut()).comms, 0);
    }
}

isolated! {
    fn connect_waits_for_accept() {
        let plugin = Plugin::init();
        let (mut handle, listener) = listen(plugin);
        for _ in 0..200 {
            assert!(try_connect(plugin, &mut handle).unwrap().is_null());
            std::thread::yield_now();
        }
        let mut device_handle = DeviceHandle::ZERO;
        until("both", || {
            let accepted = try_accept(plugin, listener, &mut device_handle).unwrap();
            !accepted.is_null()
        });
        until("connect", || !try_connect(plugin, &mut handle).unwrap().is_null());
    }
}

isolated! {
    fn a_moved_handle_is_noticed() {
        let plugin = Plugin::init();
        let (mut handle, _listener) = listen(plugin);
        assert!(try_connect(plugin, &mut handle).unwrap().is_null());
        let mut copy = Box::new(handle);
        assert_eq!(try_connect(plugin, &mut copy), Err(3));
        assert!(warned("copy of a handle"));
        // The original continues.
        assert!(try_connect(plugin, &mut handle).unwrap().is_null());
    }
}

isolated! {
    fn a_moved_handle_goes_on_when_not_strict(STRICT = "0") {
        let plugin = Plugin::init();
        let (mut handle, listener) = listen(plugin);
        assert!(try_connect(plugin, &mut handle).unwrap().is_null());
        let mut copy = Box::new(handle);
        let mut device_handle = DeviceHandle::ZERO;
        let (mut sent, mut received) = (false, false);
        until("both", || {
            sent = sent || !try_connect(plugin, &mut copy).unwrap().is_null();
            received =
                received || !try_accept(plugin, listener, &mut device_handle).unwrap().is_null();
            sent && received
        });
        // The state of the original is gone with it.
        assert_eq!(try_connect(plugin, &mut handle), Err(3));
    }
}

isolated! {
    fn handles_from_elsewhere() {
        let plugin = Plugin::init();
        assert_eq!(try_connect(plugin, &mut [0; HANDLE_BYTES]), Err(3));
        assert_eq!(try_connect(plugin, &mut [0xff; HANDLE_BYTES]), Err(3));
        let mut comm = null_mut();
        let mut handle = [0u8; HANDLE_BYTES];
        assert_eq!(net!(plugin.v7, listen(9, handle.as_mut_ptr().cast(), &raw mut comm)), 3);
        assert_eq!(net!(plugin.v7, listen(0, null_mut(), &raw mut comm)), 3);
        assert!(comm.is_null());
    }
}

isolated! {
    fn close_listen_during_accept() {
        let plugin = Plugin::init();
        let (_handle, listener) = listen(plugin);
        let mut device_handle = DeviceHandle::ZERO;
        assert!(try_accept(plugin, listener, &mut device_handle).unwrap().is_null());
        assert_eq!(net!(plugin.v7, close_listen(listener)), 3);
        let (_handle, unused) = listen(plugin);
        assert_eq!(net!(plugin.v7, close_listen(unused)), 0);
    }
}

isolated! {
    fn fail_connect(FAIL_CONNECT = "2") {
        let pair = Pair::new();
        let (mut handle, listener) = listen(pair.plugin);
        let mut device_handle = DeviceHandle::ZERO;
        for _ in 0..3 {
            assert!(try_connect(pair.plugin, &mut handle).unwrap().is_null());
            assert!(try_accept(pair.plugin, listener, &mut device_handle).unwrap().is_null());
        }
        assert_eq!(try_connect(pair.plugin, &mut handle), Err(2), "after the pending calls");
        assert_eq!(try_connect(pair.plugin, &mut handle), Err(3), "an error is final");
        connect(pair.plugin, 1);
    }
}

isolated! {
    fn refused_connects_are_retried_and_then_fail(CONNECT_RETRIES = "3") {
        let plugin = Plugin::init();
        let (mut handle, listener) = listen(plugin);
        assert_eq!(net!(plugin.v7, close_listen(listener)), 0);
        let mut outcome = Ok(null_mut());
        until("an error", || {
            outcome = try_connect(plugin, &mut handle);
            outcome.is_err()
        });
        assert_eq!(outcome, Err(2));
        assert!(warned("trying again"));
    }
}

isolated! {
    fn pending_time_passes_first(PENDING_MS = "150") {
        let start = std::time::Instant::now();
        let pair = Pair::new();
        assert!(start.elapsed() >= std::time::Duration::from_millis(150));
        pair.close();
    }
}

isolated! {
    fn accept_wants_its_device_handle() {
        let plugin = Plugin::init();
        let (mut handle, listener) = listen(plugin);
        let mut comm = null_mut();
        let mut inner = null_mut();
        assert_eq!(net!(plugin.v7, accept(listener, &raw mut comm, &raw mut inner)), 3);
        // Without the argument there is a comm, but it cannot receive.
        let mut send = null_mut::<c_void>();
        until("both", || {
            if send.is_null() {
                send = try_connect(plugin, &mut handle).unwrap();
            }
            if comm.is_null() {
                assert_eq!(net!(plugin.v7, accept(listener, &raw mut comm, null_mut())), 0);
            }
            !send.is_null() && !comm.is_null()
        });
        let mut data = [0u8; 64];
        let mut mhandle = null_mut();
        let raw = data.as_mut_ptr().cast::<c_void>();
        assert_eq!(net!(plugin.v7, reg_mr(comm, raw, 64, 1, &raw mut mhandle)), 0);
        let (mut list, mut size, mut tag, mut request) = (raw, 64, 0, null_mut());
        let code = net!(
            plugin.v7,
            irecv(
                comm,
                1,
                &raw mut list,
                &raw mut size,
                &raw mut tag,
                &raw mut mhandle,
                &raw mut request
            )
        );
        assert_eq!(code, 3);
        assert!(request.is_null());
    }
}

isolated! {
    fn addresses_devices_and_sockets_can_be_chosen(
        NDEV = "3", ADDRESS = "127.0.0.1,127.0.0.2", NSOCKS = "5"
    ) {
        let plugin = Plugin::init();
        let mut devices = 0;
        assert_eq!(net!(plugin.v7, devices(&raw mut devices)), 0);
        assert_eq!(devices, 3);
        let addresses = [0, 1, 2].map(|dev| {
            let mut handle = [0u8; HANDLE_BYTES];
            let mut comm = null_mut();
            let raw = handle.as_mut_ptr().cast();
            assert_eq!(net!(plugin.v7, listen(dev, raw, &raw mut comm)), 0);
            assert_eq!(handle[36], 5, "sockets");
            [handle[4], handle[5], handle[6], handle[7]]
        });
        assert_eq!(addresses, [[127, 0, 0, 1], [127, 0, 0, 2], [127, 0, 0, 1]]);
        Pair::on(plugin, 1).close();
    }
}
