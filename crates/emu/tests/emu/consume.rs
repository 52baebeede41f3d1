//! irecvConsumed and the bounce pool.

use std::ptr::null_mut;

use nccl_net_tcpx_emu::pages::POISON;

use crate::harness::{Pair, net, pattern, until, warned};

isolated! {
    fn too_early_shows_poison() {
        let mut pair = Pair::new();
        let (mut source, target) = (pair.source(16384), pair.target(16384));
        source.buffer.bytes().copy_from_slice(&pattern(0, 16384));
        let (recv, send) = (pair.irecv(&target, 16384), pair.isend(&source, 16384));
        pair.finish(send, recv);
        let entries = pair.entries(0);
        assert_eq!(entries.len(), 4);
        let free = pair.plugin.counters(pair.recv).pages_free;
        assert_eq!(pair.consume(recv), 0);
        assert_eq!(pair.plugin.counters(pair.recv).pages_free, free + 4);
        for entry in &entries {
            assert_eq!(pair.page_bytes(entry), vec![POISON; entry.len as usize]);
        }
        assert!(pair.entries(0).is_empty(), "the count is back to 0");
        pair.received += 1;
        pair.exchange(&mut source, &target, 16384);
    }
}

isolated! {
    fn nothing_is_spoiled_without_poison(POISON = "0") {
        let pair = Pair::new();
        let (mut source, target) = (pair.source(4096), pair.target(4096));
        let message = pattern(0, 4096);
        source.buffer.bytes().copy_from_slice(&message);
        let (recv, send) = (pair.irecv(&target, 4096), pair.isend(&source, 4096));
        pair.finish(send, recv);
        let entries = pair.entries(0);
        assert_eq!(pair.consume(recv), 0);
        assert!(pair.page_bytes(&entries[0]) == message);
    }
}

isolated! {
    fn in_order_once_and_only_receives() {
        let pair = Pair::new();
        let (source, target) = (pair.source(4096), pair.target(4096));
        // The second one is empty: order applies to empty ones too.
        let sizes = [100, 0, 300];
        let recvs = sizes.map(|size| pair.irecv(&target, size));
        assert_eq!(pair.consume(recvs[0]), 3, "not done");
        let sends = sizes.map(|size| pair.isend(&source, size));
        for (&send, &recv) in sends.iter().zip(&recvs) {
            pair.finish(send, recv);
        }
        assert_eq!(pair.consume(recvs[1]), 3, "not the oldest");
        assert_eq!(pair.consume(recvs[2]), 3, "not the oldest");
        assert_eq!(pair.consume(null_mut()), 3);
        assert_eq!(net!(pair.plugin.v7, irecv_consumed(pair.recv, 2, recvs[0])), 3);
        assert_eq!(net!(pair.plugin.v7, irecv_consumed(pair.send, 1, recvs[0])), 3);
        assert_eq!(pair.consume(sends[0]), 0, "a send is let pass");
        assert!(warned("irecvConsumed of a send"));
        for recv in recvs {
            assert_eq!(pair.consume(recv), 0);
        }
        assert_eq!(pair.consume(recvs[2]), 3, "twice");
        assert_eq!(pair.plugin.counters(pair.recv).head, 3);
    }
}

isolated! {
    fn never_stalls_the_pool(PAGES = "8") {
        let mut pair = Pair::new();
        let (mut source, target) = (pair.source(16384), pair.target(16384));
        let message = pattern(0, 16384);
        source.buffer.bytes().copy_from_slice(&message);
        let recvs = [(); 3].map(|()| pair.irecv(&target, 16384));
        let sends = [(); 3].map(|()| pair.isend(&source, 16384));
        pair.finish(sends[0], recvs[0]);
        pair.finish(sends[1], recvs[1]);
        // Eight pages are in use: the third receive makes no progress, however often it is tested.
        until("the last send", || pair.test(sends[2]).unwrap());
        for _ in 0..1000 {
            assert_eq!(pair.test(recvs[2]), Ok(false));
        }
        let counters = pair.plugin.counters(pair.recv);
        assert_eq!((counters.pages_total, counters.pages_free), (8, 0));
        assert!(counters.stalls > 0);
        assert!(pair.unpack() == message);
        assert_eq!(pair.consume(recvs[0]), 0);
        until("the stalled receive", || pair.test(recvs[2]).unwrap());
        for recv in &recvs[1..] {
            assert!(pair.unpack() == message);
            assert_eq!(pair.consume(*recv), 0);
        }
        assert_eq!(pair.plugin.counters(pair.recv).pages_free, 8);
        pair.close();
    }
}

isolated! {
    fn two_comms_share_the_pool(PAGES = "8") {
        let mut first = Pair::new();
        let mut second = Pair::on(first.plugin, 0);
        let other_device = Pair::on(first.plugin, 1);
        let (mut source, target) = (first.source(32768), first.target(32768));
        let (mut source2, target2) = (second.source(4096), second.target(4096));
        let message = pattern(0, 32768);
        source.buffer.bytes().copy_from_slice(&message);
        let (recv, send) = (first.irecv(&target, 32768), first.isend(&source, 32768));
        first.finish(send, recv);
        // The first comm has all pages of the device; the other device has its own.
        source2.buffer.bytes().copy_from_slice(&pattern(9, 4096));
        let (recv2, send2) = (second.irecv(&target2, 4096), second.isend(&source2, 4096));
        until("the send", || second.test(send2).unwrap());
        for _ in 0..1000 {
            assert_eq!(second.test(recv2), Ok(false));
        }
        assert_eq!(first.plugin.counters(null_mut()).pages_free, 8, "those of the other device");
        assert!(first.unpack() == message);
        assert_eq!(first.consume(recv), 0);
        until("the receive", || second.test(recv2).unwrap());
        assert!(second.unpack() == pattern(9, 4096));
        assert_eq!(second.consume(recv2), 0);
        first.close();
        second.close();
        other_device.close();
    }
}

isolated! {
    fn closing_gives_pages_back() {
        let pair = Pair::new();
        let (source, target) = (pair.source(1 << 20), pair.target(1 << 20));
        let recvs = [(); 2].map(|()| pair.irecv(&target, 1 << 20));
        let sends = [(); 2].map(|()| pair.isend(&source, 1 << 20));
        pair.finish(sends[0], recvs[0]);
        // The second one is half complete.
        while pair.plugin.counters(pair.recv).bytes == 1 << 20 {
            let _ = pair.test(sends[1]);
            let _ = pair.test(recvs[1]);
        }
        let plugin = pair.plugin;
        assert!(plugin.counters(null_mut()).pages_free < plugin.counters(null_mut()).pages_total);
        pair.close();
        assert!(warned("not consumed"));
        let counters = plugin.counters(null_mut());
        assert_eq!(counters.pages_free, counters.pages_total);
    }
}

/// Reads the count of slot 0 after seventeen receives, before anything of the last has arrived.
fn count_before_the_first_record() -> usize {
    let mut pair = Pair::new();
    let (mut source, target) = (pair.source(8192), pair.target(8192));
    for _ in 0..16 {
        pair.exchange(&mut source, &target, 8192);
    }
    let recv = pair.irecv(&target, 8192);
    assert_eq!(pair.test(recv), Ok(false));
    let stale = pair.entries(16).len();
    let send = pair.isend(&source, 4096);
    pair.finish(send, recv);
    assert_eq!(pair.entries(16).len(), 1);
    stale
}

isolated! {
    fn the_count_is_zero_until_done() {
        assert_eq!(count_before_the_first_record(), 0);
    }
}

isolated! {
    fn the_count_can_be_stale(STALE_CNT = "1") {
        assert_eq!(count_before_the_first_record(), 2);
    }
}

isolated! {
    fn the_first_record_clears_a_stale_count(STALE_CNT = "1", PAGES = "2") {
        let mut pair = Pair::new();
        let (mut source, target) = (pair.source(16384), pair.target(16384));
        for _ in 0..16 {
            pair.exchange(&mut source, &target, 8192);
        }
        // Four pages are needed and two exist: the receive begins and cannot complete.
        let (recv, send) = (pair.irecv(&target, 16384), pair.isend(&source, 16384));
        assert_eq!(pair.entries(16).len(), 2);
        until("the send", || pair.test(send).unwrap());
        until("the first record", || {
            assert_eq!(pair.test(recv), Ok(false));
            pair.plugin.counters(pair.recv).stalls > 0
        });
        assert!(pair.entries(16).is_empty());
        pair.close();
    }
}

isolated! {
    fn a_message_may_fill_the_whole_pool(PAGES = "4", NSOCKS = "4", CHUNK = "4096") {
        let mut pair = Pair::new();
        let (mut source, target) = (pair.source(16384), pair.target(16384));
        let message = pattern(0, 16384);
        source.buffer.bytes().copy_from_slice(&message);
        // All have arrived when the first one is tested: they must not take its pages.
        let sends = [(); 3].map(|()| pair.isend(&source, 16384));
        for send in sends {
            until("the send", || pair.test(send).unwrap());
        }
        let recvs = [(); 3].map(|()| pair.irecv(&target, 16384));
        for recv in recvs {
            until("the receive", || pair.test(recv).unwrap());
            assert!(pair.unpack() == message);
            assert_eq!(pair.consume(recv), 0);
        }
        pair.close();
    }
}
