//! regMr, and host memory on either side.

use std::ffi::c_void;
use std::ptr::null_mut;

use nccl_net_tcpx_emu::tables::memory_kind::{CUDA, HOST};

use crate::harness::{Buffer, Pair, Registered, net, pattern, warned};

fn register(pair: &Pair, comm: *mut c_void, data: *mut c_void, size: i32, kind: i32) -> i32 {
    let mut mhandle = null_mut();
    let code = net!(
        pair.plugin.v7,
        reg_mr(comm, data, size, kind, &raw mut mhandle)
    );
    assert_eq!(mhandle.is_null(), code != 0);
    code
}

isolated! {
    fn what_can_be_registered() {
        let pair = Pair::new();
        let buffer = Buffer::new(16384);
        let send = pair.send;
        assert_eq!(register(&pair, send, buffer.at(0), 8192, CUDA), 0);
        assert_eq!(register(&pair, send, buffer.at(8), 100, HOST), 0);
        assert_eq!(register(&pair, null_mut(), buffer.at(0), 4096, CUDA), 3, "no comm");
        assert_eq!(register(&pair, send, buffer.at(0), 4096, 3), 3, "unknown type");
        assert_eq!(register(&pair, send, buffer.at(0), 4096, 0), 3, "unknown type");
        assert_eq!(register(&pair, send, buffer.at(512), 4096, CUDA), 3, "unaligned");
        assert_eq!(register(&pair, send, buffer.at(0), 4095, CUDA), 3, "not whole pages");
        assert_eq!(register(&pair, send, buffer.at(0), 0, HOST), 3, "empty");
        assert_eq!(register(&pair, send, buffer.at(0), -4096, CUDA), 3, "negative");
        assert_eq!(pair.plugin.counters(null_mut()).registrations, 2);
    }
}

isolated! {
    fn what_can_be_registered_when_not_strict(STRICT = "0") {
        let pair = Pair::new();
        let buffer = Buffer::new(8192);
        assert_eq!(register(&pair, pair.send, buffer.at(0), 4095, CUDA), 0);
        assert_eq!(register(&pair, pair.send, buffer.at(512), 4096, CUDA), 3, "always");
    }
}

isolated! {
    fn registrations_are_checked_on_use() {
        let pair = Pair::new();
        let (source, target) = (pair.source(8192), pair.target(8192));
        assert_eq!(pair.isend_at(&source, 4096, 4097), Err(3), "past the end");
        assert_eq!(pair.try_isend(&target, 16), Err(3), "another comm's");
        assert_eq!(pair.try_irecv(&source, 16), Err(3), "another comm's");
        let none = Registered { buffer: Buffer::new(16), mhandle: null_mut() };
        assert_eq!(pair.try_isend(&none, 16), Err(3), "none");
        assert_eq!(pair.try_irecv(&none, 16), Err(3), "none");
        assert_eq!(pair.try_isend(&source, usize::MAX), Err(3), "negative");
        let mut inner = null_mut();
        let second_page = source.buffer.at(4096);
        assert_eq!(net!(pair.plugin.v7, reg_mr(pair.send, second_page, 4096, CUDA, &raw mut inner)), 0);
        let (data, mut request) = (source.buffer.at(4095), null_mut());
        let before = net!(pair.plugin.v7, isend(pair.send, data, 2, 0, inner, &raw mut request));
        assert_eq!(before, 3, "before the start");
        assert_eq!(net!(pair.plugin.v7, dereg_mr(pair.send, inner)), 0);
        assert_eq!(pair.plugin.counters(null_mut()).violations, 7);
        for (comm, registered) in [(pair.send, source), (pair.recv, target)] {
            assert_eq!(net!(pair.plugin.v7, dereg_mr(comm, registered.mhandle)), 0);
        }
        assert_eq!(pair.plugin.counters(null_mut()).registrations, 0);
        pair.close();
    }
}

isolated! {
    fn host_and_device_memory_mix(CHUNK = "8192", NSOCKS = "3") {
        const SIZE: usize = 100_001;
        let mut pair = Pair::new();
        let mut sources = [HOST, CUDA].map(|kind| pair.register(pair.send, SIZE, kind));
        let mut targets = [HOST, CUDA].map(|kind| pair.register(pair.recv, SIZE, kind));
        let mut k = 0;
        for source in &mut sources {
            for (target, is_device) in targets.iter_mut().zip([false, true]) {
                let message = pattern(k, SIZE);
                k += 1;
                source.buffer.bytes()[..SIZE].copy_from_slice(&message);
                target.buffer.bytes().fill(0x5c);
                let (recv, send) = (pair.irecv(target, SIZE), pair.isend(source, SIZE));
                pair.finish(send, recv);
                let unpacked = pair.unpack();
                if is_device {
                    assert!(unpacked == message);
                    let canary = target.buffer.bytes().iter().all(|&byte| byte == 0x5c);
                    assert!(canary, "the posted buffer of a device receive is not touched");
                } else {
                    assert!(unpacked.is_empty(), "host bytes are not in the ring");
                    assert!(target.buffer.bytes()[..SIZE] == message);
                    assert!(target.buffer.bytes()[SIZE..].iter().all(|&byte| byte == 0x5c));
                    assert!(warned("receive into host memory"));
                }
                assert_eq!(pair.consume(recv), 0);
            }
        }
        pair.close();
    }
}
