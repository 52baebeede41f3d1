//! Tests the rules of the contract: the loader follows them, and refuses callers that do not.

use std::os::fd::AsFd;
use std::task::Poll;

use tcpx_ncclnet::{Code, Error, Fault, MemoryKind, Plugin};

use crate::build::{self, Counters};
use crate::wire::{Memory, connect, post};

pub(crate) fn open(name: &str, version: u32, options: &[&str]) -> Plugin {
    Plugin::open(build::path(&build::plugin(name, version, options))).unwrap()
}

#[test]
fn a_failed_connect_is_over_and_the_plugin_is_not_called_again() {
    // The plugin aborts the process if it is called again.
    for version in [4, 7, 12] {
        let plugin = open(
            &format!("fail-connect-{version}"),
            version,
            &["-DFAIL_CONNECT"],
        );
        let listener = plugin.listen(0).unwrap();
        let mut connecting = plugin.connect(1, listener.handle()).unwrap();
        for _ in 0..3 {
            assert!(connecting.poll().is_pending());
        }
        let Poll::Ready(Err(error)) = connecting.poll() else {
            panic!("it fails");
        };
        assert_eq!(
            error.to_string(),
            "connect failed: ncclSystemError (2); the plugin's last warning: no way to device 1"
        );
        for _ in 0..2 {
            let Poll::Ready(Err(error)) = connecting.poll() else {
                panic!("it is over");
            };
            assert_eq!(error, Error::Dead { call: "connect" });
        }
    }
}

#[test]
fn a_failed_accept_is_over_and_the_listener_can_be_closed() {
    let library = build::plugin("fail-accept", 7, &["-DFAIL_ACCEPT"]);
    let counters = Counters::of(&library);
    let plugin = Plugin::open(build::path(&library)).unwrap();
    let mut listener = plugin.listen(0).unwrap();
    assert!(listener.accept().is_pending() && listener.accept().is_pending());
    assert!(matches!(
        listener.accept(),
        Poll::Ready(Err(Error::Call { .. }))
    ));
    assert!(matches!(
        listener.accept(),
        Poll::Ready(Err(Error::Dead { .. }))
    ));
    assert_eq!(counters.live(), 1);
    drop(listener);
    assert_eq!(counters.live(), 0);
}

#[test]
fn listeners_are_closed_but_for_one_whose_accept_is_pending() {
    // The plugin aborts the process when the pending one is closed.
    let library = build::plugin("listeners", 12, &[]);
    let counters = Counters::of(&library);
    let plugin = Plugin::open(build::path(&library)).unwrap();
    let idle = plugin.listen(0).unwrap();
    let mut pending = plugin.listen(0).unwrap();
    assert!(pending.accept().is_pending());
    assert_eq!(counters.live(), 3);
    drop((idle, pending));
    assert_eq!(counters.live(), 2);
    // The context is not finalised under it either.
    drop(plugin);
    assert_eq!(counters.live(), 2);
}

#[test]
fn a_comm_that_was_given_at_once_is_closed_only_if_the_peer_accepted_it() {
    // The plugin aborts the process when a comm is closed that its thread is connecting.
    for version in [4, 6, 12] {
        let library = build::plugin(&format!("eager-{version}"), version, &["-DEAGER"]);
        let counters = Counters::of(&library);
        let plugin = Plugin::open(build::path(&library)).unwrap();
        let idle = counters.live();
        let listener = plugin.listen(0).unwrap();
        let mut connecting = plugin.connect(0, listener.handle()).unwrap();
        let Poll::Ready(Ok(comm)) = connecting.poll() else {
            panic!("it is given at once");
        };
        drop((comm, listener));
        assert_eq!(counters.live(), idle + 1, "it was leaked");
        let (mut send, recv) = connect(&plugin, 0, 1);
        // The acceptor can be ahead of the connecting thread.
        while counters.connecting() > 0 {
            std::thread::yield_now();
        }
        send.accepted();
        drop((send, recv));
        assert_eq!(counters.live(), idle + 1);
    }
}

#[test]
fn a_listener_gives_one_connection() {
    let plugin = open("spent", 6, &[]);
    let mut listener = plugin.listen(0).unwrap();
    let mut connecting = plugin.connect(0, listener.handle()).unwrap();
    let _send = loop {
        if let Poll::Ready(comm) = connecting.poll() {
            break comm.unwrap();
        }
    };
    let _recv = loop {
        if let Poll::Ready(comm) = listener.accept() {
            break comm.unwrap();
        }
    };
    assert!(matches!(
        listener.accept(),
        Poll::Ready(Err(Error::ListenerSpent))
    ));
    assert!(matches!(
        connecting.poll(),
        Poll::Ready(Err(Error::Dead { .. }))
    ));
}

#[test]
fn a_success_without_a_listener_is_a_broken_contract() {
    let plugin = open("null-listen", 7, &["-DNULL_LISTEN"]);
    let error = plugin.listen(0).unwrap_err();
    assert!(matches!(error, Error::Contract { call: "listen", .. }));
}

#[test]
fn an_unpack_device_without_a_device_handle_is_a_broken_contract() {
    let options = ["-DDEVICE_TYPE=1", "-DEMPTY_DEVICE_HANDLE"];
    let library = build::plugin("empty-device-handle", 7, &options);
    let counters = Counters::of(&library);
    let plugin = Plugin::open(build::path(&library)).unwrap();
    let mut listener = plugin.listen(0).unwrap();
    let mut connecting = plugin.connect(0, listener.handle()).unwrap();
    let send = loop {
        if let Poll::Ready(comm) = connecting.poll() {
            break comm.unwrap();
        }
    };
    let error = loop {
        if let Poll::Ready(comm) = listener.accept() {
            break comm.unwrap_err();
        }
    };
    assert!(matches!(error, Error::Contract { call: "accept", .. }));
    drop((listener, send));
    assert_eq!(counters.live(), 0);
}

#[test]
fn a_full_comm_takes_nothing_more_until_its_oldest_request_is_over() {
    for (version, slots) in [(4, 8), (6, 8), (7, 16), (12, 16)] {
        let plugin = open(&format!("full-{version}"), version, &[]);
        assert_eq!(plugin.slots(), slots);
        let (mut send, mut recv) = connect(&plugin, 0, 1);
        let (mut source, target) = (Memory::new(slots * 8), Memory::new(slots * 8));
        source.bytes().fill(7);
        let from = source.register(&mut send, MemoryKind::Host).unwrap();
        let to = target.register(&mut recv, MemoryKind::Host).unwrap();
        let mut sends = Vec::new();
        let mut receives = Vec::new();
        for slot in 0..slots {
            sends.push(post(|| send.isend(&from, slot * 8, 8, 0)).unwrap());
            receives.push(post(|| recv.irecv(&to, slot * 8, 8, 0)).unwrap());
        }
        // The plugin would fail permanently here.
        for _ in 0..20 {
            assert_eq!(send.isend(&from, 0, 8, 0), Ok(None));
            assert_eq!(recv.irecv(&to, 0, 8, 0), Ok(None));
        }
        assert_eq!((send.in_flight(), recv.in_flight()), (slots, slots));
        while send.test(sends[0]).unwrap().is_none() {}
        post(|| send.isend(&from, 0, 8, 0)).unwrap();

        while recv.test(receives[0]).unwrap().is_none() {}
        if plugin.needs_consume() {
            assert_eq!(recv.irecv(&to, 0, 8, 0), Ok(None));
            recv.consume(receives[0]).unwrap();
        }
        post(|| recv.irecv(&to, 0, 8, 0)).unwrap();
        drop((send, recv));
    }
}

#[test]
fn requests_out_of_turn_are_refused_and_do_no_harm() {
    let plugin = open("turns", 8, &[]);
    let (mut send, mut recv) = connect(&plugin, 0, 1);
    let (mut source, mut target) = (Memory::new(64), Memory::new(64));
    source.bytes().fill(5);
    let from = source.register(&mut send, MemoryKind::Host).unwrap();
    let to = target.register(&mut recv, MemoryKind::Host).unwrap();
    let sends = [0, 8].map(|at| post(|| send.isend(&from, at, 8, 0)).unwrap());
    let receives = [0, 8].map(|at| post(|| recv.irecv(&to, at, 8, 0)).unwrap());
    assert_eq!([receives[0].number(), receives[1].number()], [0, 1]);

    let out_of_order = |call, asked, next| Error::OutOfOrder { call, asked, next };
    let error = send.test(sends[1]).unwrap_err();
    assert_eq!(error, out_of_order("test", 1, Some(0)));
    assert_eq!(error.fault(), Fault::Caller);
    let error = recv.consume(receives[0]).unwrap_err();
    assert_eq!(error, out_of_order("irecvConsumed", 0, None));
    let foreign = Error::Foreign {
        what: "the request",
    };
    assert_eq!(recv.test(sends[0]).unwrap_err(), foreign);
    assert_eq!(send.test(receives[0]).unwrap_err(), foreign);

    for index in 0..2 {
        while send.test(sends[index]).unwrap().is_none() {}
        while recv.test(receives[index]).unwrap().is_none() {}
    }
    let error = send.test(sends[0]).unwrap_err();
    assert_eq!(error, out_of_order("test", 0, None));
    let error = recv.consume(receives[1]).unwrap_err();
    assert_eq!(error, out_of_order("irecvConsumed", 1, Some(0)));
    recv.consume(receives[0]).unwrap();
    recv.consume(receives[1]).unwrap();
    let error = recv.consume(receives[1]).unwrap_err();
    assert_eq!(error, out_of_order("irecvConsumed", 1, None));
    assert!(send.is_alive() && recv.is_alive());
    drop((send, recv));
    assert_eq!(&target.bytes()[..16], &[5; 16]);
    assert_eq!(&target.bytes()[16..], &[0; 48]);
}

#[test]
fn a_comm_that_failed_is_dead() {
    // Fewer slots than the version promises: the plugin fails, and aborts if it is used again.
    let library = build::plugin("dead", 7, &["-DSLOTS=4"]);
    let counters = Counters::of(&library);
    let plugin = Plugin::open(build::path(&library)).unwrap();
    let (mut send, recv) = connect(&plugin, 0, 1);
    let memory = Memory::new(64);
    let from = memory.register(&mut send, MemoryKind::Host).unwrap();
    let first = post(|| send.isend(&from, 0, 8, 0)).unwrap();
    for _ in 1..4 {
        post(|| send.isend(&from, 0, 8, 0)).unwrap();
    }
    let error = post(|| send.isend(&from, 0, 8, 0)).unwrap_err();
    assert_eq!(
        error,
        Error::Call {
            call: "isend",
            code: Code(3),
            warning: Some("all 4 requests are in use".into()),
        }
    );
    assert!(!send.is_alive());
    assert_eq!(
        send.isend(&from, 0, 8, 0),
        Err(Error::Dead { call: "isend" })
    );
    assert_eq!(send.test(first), Err(Error::Dead { call: "test" }));
    let error = memory.register(&mut send, MemoryKind::Host).unwrap_err();
    assert_eq!(error, Error::Dead { call: "regMr" });
    drop((send, recv));
    assert_eq!(counters.live(), 0);
}

#[test]
fn the_end_of_the_peer_is_an_error() {
    let plugin = open("peer-gone", 9, &[]);
    let (send, mut recv) = connect(&plugin, 0, 1);
    let memory = Memory::new(64);
    let to = memory.register(&mut recv, MemoryKind::Host).unwrap();
    let request = post(|| recv.irecv(&to, 0, 64, 0)).unwrap();
    assert_eq!(recv.test(request), Ok(None));
    drop(send);
    let error = loop {
        match recv.test(request) {
            Ok(None) => {}
            other => break other.unwrap_err(),
        }
    };
    assert_eq!(
        error.to_string(),
        "test failed: ncclSystemError (2); the plugin's last warning: \
         the peer is gone: end of stream"
    );
}

#[test]
fn sizes_and_ranges_are_checked_before_the_plugin_sees_them() {
    let plugin = open("ranges", 9, &[]);
    let (mut send, mut recv) = connect(&plugin, 0, 1);
    let limit = plugin.devices()[0].max_message_bytes;
    let memory = Memory::new(limit + 64);
    let bytes = limit + 64;
    let from = memory.register(&mut send, MemoryKind::Host).unwrap();
    let to = memory.register(&mut recv, MemoryKind::Host).unwrap();
    let too_large = |call| Error::TooLarge {
        call,
        bytes: limit + 1,
        limit,
    };
    assert_eq!(send.isend(&from, 0, limit + 1, 0), Err(too_large("isend")));
    assert_eq!(recv.irecv(&to, 0, limit + 1, 0), Err(too_large("irecv")));
    for (offset, length) in [(bytes, 1), (bytes - 3, 4), (usize::MAX, 2)] {
        let expected = Error::OutOfBounds {
            offset,
            bytes: length,
            registered: bytes,
        };
        assert_eq!(send.isend(&from, offset, length, 0), Err(expected));
    }
    assert!(send.isend(&from, bytes, 0, 0).unwrap().is_some());
    let foreign = Error::Foreign {
        what: "the memory handle",
    };
    assert_eq!(send.isend(&to, 0, 1, 0), Err(foreign.clone()));
    assert_eq!(send.deregister(to), Err(foreign));
    assert!(send.is_alive());
    assert_eq!(
        plugin.listen(2).unwrap_err(),
        Error::NoSuchDevice {
            device: 2,
            count: 2
        }
    );

    // Where sizes are `int`, a registration ends at 2 GiB.
    let old = open("ranges-int", 7, &[]);
    let (mut send, _recv) = connect(&old, 0, 1);
    // SAFETY: refused before anything accesses the memory.
    let error = unsafe { send.register(memory.as_ptr(), 1 << 31, MemoryKind::Host) }.unwrap_err();
    assert_eq!(
        error,
        Error::TooLarge {
            call: "regMr",
            bytes: 1 << 31,
            limit: (1 << 31) - 1
        }
    );
}

#[test]
fn a_failed_registration_concerns_that_memory_alone() {
    let plugin = open("registrations", 8, &[]);
    let (mut send, _recv) = connect(&plugin, 0, 1);
    let memory = Memory::new(128);
    // SAFETY: inside the allocation; the plugin refuses it.
    let error = unsafe { send.register(memory.as_ptr().add(1), 8, MemoryKind::Host) }.unwrap_err();
    assert!(matches!(
        error,
        Error::Call {
            call: "regMr",
            code: Code(3),
            ..
        }
    ));
    assert!(send.is_alive());
    let one = memory.register(&mut send, MemoryKind::Host).unwrap();
    let two = memory.register(&mut send, MemoryKind::Cuda).unwrap();
    assert_eq!((one.bytes(), one.kind()), (128, MemoryKind::Host));
    send.deregister(one).unwrap();
    let three = memory.register(&mut send, MemoryKind::Host).unwrap();
    assert!(post(|| send.isend(&two, 0, 1, 0)).is_ok());
    assert!(post(|| send.isend(&three, 0, 1, 0)).is_ok());
}

#[test]
fn dma_bufs_are_registered_where_the_version_has_them() {
    let file = tempfile::tempfile().unwrap();
    for version in [5, 6, 12] {
        let plugin = open(&format!("dmabuf-{version}"), version, &[]);
        let (_send, mut recv) = connect(&plugin, 0, 1);
        let memory = Memory::new(64);
        // SAFETY: the memory outlives the comm; this plugin does not use the descriptor.
        let outcome = unsafe {
            recv.register_dmabuf(memory.as_ptr(), 64, MemoryKind::Cuda, file.as_fd(), 4096)
        };
        match outcome {
            Ok(handle) => {
                assert!(version >= 6);
                assert_eq!(handle.bytes(), 64);
            }
            Err(error) => {
                assert_eq!(version, 5);
                assert!(matches!(
                    error,
                    Error::Unsupported {
                        call: "regMrDmaBuf",
                        ..
                    }
                ));
            }
        }
    }
}
