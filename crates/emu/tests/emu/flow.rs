//! Requests: slots, order, sizes, and what `test` writes.

use std::ptr::null_mut;

use nccl_net_tcpx_emu::request::Request as Layout;
use nccl_net_tcpx_emu::tables::memory_kind::HOST;

use crate::harness::{Pair, Plugin, net, pattern, until};

isolated! {
    fn many_messages_wrap_ring_and_requests() {
        let mut pair = Pair::new();
        let (mut source, target) = (pair.source(1 << 20), pair.target(1 << 20));
        assert_eq!(pair.unpack_head(), u64::MAX);
        let mut requests = Vec::new();
        for k in 0..50 {
            let size = (k * 7919) % (1 << 20);
            let message = pattern(k as u64, size);
            source.buffer.bytes()[..size].copy_from_slice(&message);
            let (recv, send) = (pair.irecv(&target, 1 << 20), pair.isend(&source, size));
            requests.push((send, recv));
            pair.finish(send, recv);
            // SAFETY: a request of this plugin, done and not consumed.
            let layout = unsafe { &*recv.cast::<Layout>() };
            assert_eq!(layout.size as usize, size, "the true size");
            assert_eq!(layout.unpack_slot.idx, k as u64);
            let entries = pair.entries(k as u64);
            assert_eq!(layout.unpack_slot.cnt_cache as usize, entries.len());
            // SAFETY: the slot is published.
            unsafe {
                assert_eq!(*layout.unpack_slot.cnt as usize, entries.len());
                assert!(entries.is_empty() || *layout.unpack_slot.mem == entries[0]);
            }
            assert!(pair.unpack() == message, "message {k}");
            assert_eq!(pair.consume(recv), 0);
        }
        for (k, (send, recv)) in requests.iter().enumerate() {
            assert_eq!((send, recv), (&requests[k % 16].0, &requests[k % 16].1), "{k}");
            assert_eq!(*send as usize, requests[0].0 as usize + 128 * (k % 16));
        }
        let counters = pair.plugin.counters(pair.recv);
        assert_eq!((counters.head, counters.tail, counters.slots_free), (50, 50, 16));
        assert_eq!(counters.pages_free, counters.pages_total);
        assert_eq!(counters.violations, 0);
        pair.close();
    }
}

isolated! {
    fn sixteen_at_once_and_no_more() {
        let mut pair = Pair::new();
        let (mut source, target) = (pair.source(1 << 16), pair.target(1 << 16));
        let message = pattern(0, 1 << 16);
        source.buffer.bytes().copy_from_slice(&message);
        let recvs: Vec<_> = (0..16).map(|_| pair.irecv(&target, 1 << 16)).collect();
        let sends: Vec<_> = (0..16).map(|k| pair.isend(&source, (1 << 16) - k)).collect();
        assert_eq!(pair.try_isend(&source, 16), Err(3));
        assert_eq!(pair.try_irecv(&target, 16), Err(3));
        let mut untouched = 9 as *mut std::ffi::c_void;
        let (data, mhandle) = (source.buffer.at(0), source.mhandle);
        let code = net!(pair.plugin.v7, isend(pair.send, data, 8, 0, mhandle, &raw mut untouched));
        assert_eq!((code, untouched as usize), (3, 9));
        for (&send, &recv) in sends.iter().zip(&recvs) {
            pair.finish(send, recv);
        }
        // All are done: send slots are free again, receive slots only when they are consumed.
        assert_eq!(pair.plugin.counters(pair.send).slots_free, 16);
        assert_eq!(pair.plugin.counters(pair.recv).slots_free, 0);
        assert_eq!(pair.try_irecv(&target, 16), Err(3));
        for (k, &recv) in recvs.iter().enumerate() {
            assert!(pair.unpack() == message[..(1 << 16) - k]);
            assert_eq!(pair.consume(recv), 0);
        }
        assert_eq!(pair.plugin.counters(pair.recv).slots_free, 16);
        assert!(pair.try_irecv(&target, 16).is_ok());
    }
}

isolated! {
    fn requests_that_are_null(NULL_REQ_EVERY = "3") {
        let mut pair = Pair::new();
        let (mut source, target) = (pair.source(4096), pair.target(4096));
        let (mut nulls, mut calls) = (0, 0);
        for k in 0..20u64 {
            let message = pattern(k, 3000);
            source.buffer.bytes()[..3000].copy_from_slice(&message);
            let mut retry = |post: &dyn Fn() -> Result<*mut std::ffi::c_void, i32>| {
                loop {
                    calls += 1;
                    match post().unwrap() {
                        request if request.is_null() => nulls += 1,
                        request => return request,
                    }
                }
            };
            let recv = retry(&|| pair.try_irecv(&target, 3000));
            let send = retry(&|| pair.try_isend(&source, 3000));
            pair.finish(send, recv);
            assert!(pair.unpack() == message);
            assert_eq!(pair.consume(recv), 0);
        }
        // Each comm counts separately: 20 requests took 29 calls, 9 of them without a request.
        assert_eq!((calls, nulls), (58, 18));
        assert_eq!(pair.plugin.counters(pair.send).null_requests, 9);
        assert_eq!(pair.plugin.counters(pair.send).tail, 20);
    }
}

isolated! {
    fn empty_messages() {
        let mut pair = Pair::new();
        let (mut source, target) = (pair.source(4096), pair.target(4096));
        for size in [0, 5, 0, 0, 4096] {
            pair.exchange(&mut source, &target, size);
        }
        let empty = pair.register(pair.recv, 4096, HOST);
        pair.exchange(&mut source, &empty, 0);
        let counters = pair.plugin.counters(pair.recv);
        assert_eq!((counters.tail, counters.chunks, counters.bytes), (6, 2, 4101));
        pair.close();
    }
}

isolated! {
    fn only_the_oldest_is_tested() {
        let mut pair = Pair::new();
        let (source, target) = (pair.source(4096), pair.target(4096));
        let recvs = [(); 3].map(|()| pair.irecv(&target, 100));
        let sends = [(); 3].map(|()| pair.isend(&source, 100));
        assert_eq!(pair.test(recvs[1]), Err(3));
        assert_eq!(pair.test(sends[2]), Err(3));
        assert_eq!(pair.test(null_mut()), Err(3));
        pair.finish(sends[0], recvs[0]);
        assert_eq!(pair.test(recvs[0]), Err(3), "it was done");
        assert_eq!(pair.test(sends[0]), Err(3), "it was done");
        pair.finish(sends[1], recvs[1]);
        pair.finish(sends[2], recvs[2]);
        assert_eq!(pair.test(sends[2]), Err(3), "all were done");
        assert_eq!(pair.plugin.counters(null_mut()).violations, 6);
        for recv in recvs {
            pair.unpack();
            assert_eq!(pair.consume(recv), 0);
        }
        pair.close();
    }
}

isolated! {
    fn a_done_receive_may_be_tested_again_when_not_strict(STRICT = "0") {
        let pair = Pair::new();
        let (source, target) = (pair.source(4096), pair.target(4096));
        let (recv, send) = (pair.irecv(&target, 100), pair.isend(&source, 100));
        pair.finish(send, recv);
        assert_eq!(pair.test(recv), Ok(true));
        assert_eq!(pair.consume(recv), 0);
    }
}

/// Sends 100 bytes into a receive of 200; returns what `test` writes into sizes.
fn reported_size() -> i32 {
    let pair = Pair::new();
    let (source, target) = (pair.source(4096), pair.target(4096));
    let (recv, send) = (pair.irecv(&target, 200), pair.isend(&source, 100));
    let mut size = -77;
    let (mut sent, mut received) = (false, false);
    until("the message", || {
        sent = sent || pair.test(send).unwrap();
        if !received {
            let mut done = -1;
            assert_eq!(
                net!(pair.plugin.v7, test(recv, &raw mut done, &raw mut size)),
                0
            );
            received = done == 1;
        }
        sent && received
    });
    size
}

isolated! {
    fn sizes_are_left_alone() {
        assert_eq!(reported_size(), -77);
    }
}

isolated! {
    fn sizes_are_written_on_request(SET_SIZE = "1") {
        assert_eq!(reported_size(), 100);
    }
}

isolated! {
    fn nothing_moves_outside_test() {
        let mut pair = Pair::new();
        let (mut source, target) = (pair.source(4096), pair.target(4096));
        let message = pattern(3, 4096);
        source.buffer.bytes().copy_from_slice(&message);
        let (recv, send) = (pair.irecv(&target, 4096), pair.isend(&source, 4096));
        for _ in 0..100 {
            assert_eq!(pair.test(recv), Ok(false), "the send was not tested");
        }
        assert_eq!(pair.plugin.counters(pair.send).chunks, 0);
        pair.finish(send, recv);
        assert!(pair.unpack() == message);
    }
}

isolated! {
    fn a_send_larger_than_its_receive() {
        let pair = Pair::new();
        let (source, target) = (pair.source(8192), pair.target(8192));
        let (recv, send) = (pair.irecv(&target, 4096), pair.isend(&source, 4097));
        let mut outcome = Ok(false);
        until("the error", || {
            let _ = pair.test(send);
            outcome = pair.test(recv);
            outcome.is_err()
        });
        assert_eq!(outcome, Err(5));
        assert_eq!(pair.test(recv), Err(5), "it stays");
    }
}

isolated! {
    fn a_send_larger_than_its_receive_when_not_strict(STRICT = "0") {
        let mut pair = Pair::new();
        let (mut source, target) = (pair.source(8192), pair.target(8192));
        let message = pattern(1, 5000);
        source.buffer.bytes()[..5000].copy_from_slice(&message);
        let (recv, send) = (pair.irecv(&target, 4096), pair.isend(&source, 5000));
        pair.finish(send, recv);
        assert!(pair.unpack() == message, "the ring speaks of all that was sent");
    }
}

isolated! {
    fn one_buffer_for_each_call() {
        let pair = Pair::new();
        let target = pair.target(4096);
        let (mut data, mut size, mut tag) = (target.buffer.at(0), 16, 0);
        let (mut mhandle, mut request) = (target.mhandle, null_mut());
        for n in [0, 2, -1] {
            let code = net!(
                pair.plugin.v7,
                irecv(
                    pair.recv,
                    n,
                    &raw mut data,
                    &raw mut size,
                    &raw mut tag,
                    &raw mut mhandle,
                    &raw mut request
                )
            );
            assert_eq!(code, 3, "{n}");
        }
        let code =
            net!(pair.plugin.v7, isend(pair.recv, data, 16, 0, mhandle, &raw mut request));
        assert_eq!(code, 3, "isend on a receive comm");
        assert!(request.is_null());
    }
}

isolated! {
    fn comms_on_several_threads(PAGES = "512", CHUNK = "16384", NSOCKS = "2", FRAG = "short") {
        let plugin = Plugin::init();
        std::thread::scope(|scope| {
            for thread in 0..4 {
                scope.spawn(move || {
                    let mut pair = Pair::on(plugin, 0);
                    // 128 KiB take about 80 pages in short fragments: four fit into the pool.
                    let (mut source, target) = (pair.source(1 << 17), pair.target(1 << 17));
                    for k in 0..100 {
                        let size = (thread * 1013 + k * 7919) % (1 << 17);
                        pair.exchange(&mut source, &target, size);
                    }
                    pair.close();
                });
            }
        });
        let counters = plugin.counters(null_mut());
        assert_eq!((counters.pages_free, counters.pages_total), (512, 512));
        assert_eq!((counters.comms, counters.violations), (0, 0));
    }
}
