//! Configured failures, and peers that disappear.

use std::ptr::null_mut;
use std::time::{Duration, Instant};

use nccl_net_tcpx_emu::request::Request as Layout;

use crate::harness::{Pair, Plugin, Registered, logger, net, pattern, until, warned};

isolated! {
    fn calls_can_fail(ERROR = "isend:2,irecv:1:5,test:3:2,irecvConsumed:1:6,regMr:3:1,listen:2") {
        let mut pair = Pair::new();
        let (source, target) = (pair.source(4096), pair.target(4096));
        let mut mhandle = null_mut();
        let data = source.buffer.at(0);
        assert_eq!(net!(pair.plugin.v7, reg_mr(pair.send, data, 4096, 2, &raw mut mhandle)), 1);
        let (mut handle, mut listen) = ([0u8; 128], null_mut());
        let raw = handle.as_mut_ptr().cast();
        assert_eq!(net!(pair.plugin.v7, listen(0, raw, &raw mut listen)), 3);
        assert_eq!(pair.try_irecv(&target, 64), Err(5));
        let recv = pair.irecv(&target, 64);
        let send = pair.isend(&source, 64);
        assert_eq!(pair.try_isend(&source, 64), Err(3));
        assert_eq!(pair.test(recv), Ok(false));
        assert_eq!(pair.test(recv), Ok(false));
        assert_eq!(pair.test(recv), Err(2));
        // The failed calls had no effect, and the next ones work.
        pair.finish(send, recv);
        assert_eq!(pair.unpack().len(), 64);
        assert_eq!(pair.consume(recv), 6);
        assert_eq!(pair.consume(recv), 0);
        assert_eq!(pair.plugin.counters(null_mut()).violations, 0, "these are not the caller's");
        pair.close();
    }
}

isolated! {
    fn connect_and_accept_can_fail(ERROR = "connect:1:2,accept:1:2") {
        let plugin = Plugin::init();
        let (mut handle, mut listen) = ([0u8; 128], null_mut());
        let raw = handle.as_mut_ptr().cast();
        assert_eq!(net!(plugin.v7, listen(0, raw, &raw mut listen)), 0);
        let (mut comm, mut none) = (null_mut(), null_mut());
        assert_eq!(net!(plugin.v7, connect(0, raw, &raw mut comm, &raw mut none)), 2);
        assert_eq!(net!(plugin.v7, accept(listen, &raw mut comm, null_mut())), 2);
        Pair::on(plugin, 0).close();
    }
}

isolated! {
    fn completions_can_be_late(DELAY_US = "30000") {
        let mut pair = Pair::new();
        let (mut source, target) = (pair.source(4096), pair.target(4096));
        let start = Instant::now();
        pair.exchange(&mut source, &target, 4096);
        pair.exchange(&mut source, &target, 0);
        // Both ends wait at the same time.
        assert!(start.elapsed() >= Duration::from_millis(60));
    }
}

isolated! {
    fn a_receive_can_be_short(SHORT_RECV = "2") {
        let mut pair = Pair::new();
        let (mut source, target) = (pair.source(8192), pair.target(8192));
        pair.exchange(&mut source, &target, 8192);
        // Of 4097 bytes the last entry holds one: it is removed.
        let message = pattern(1, 4097);
        source.buffer.bytes()[..4097].copy_from_slice(&message);
        let (recv, send) = (pair.irecv(&target, 4097), pair.isend(&source, 4097));
        pair.finish(send, recv);
        assert!(pair.unpack() == message[..4096]);
        // SAFETY: a request of this plugin, done and not consumed.
        assert_eq!(unsafe { (*recv.cast::<Layout>()).size }, 4096);
        assert!(warned("one byte short"));
        assert_eq!(pair.consume(recv), 0);
        pair.exchange(&mut source, &target, 8192);
        let counters = pair.plugin.counters(pair.recv);
        assert_eq!(counters.pages_free, counters.pages_total);
    }
}

isolated! {
    fn a_send_can_reset_the_connection(RESET = "2") {
        let mut pair = Pair::new();
        let (mut source, target) = (pair.source(4096), pair.target(4096));
        pair.exchange(&mut source, &target, 4096);
        let (recv, send) = (pair.irecv(&target, 4096), pair.isend(&source, 4096));
        let mut sent = Ok(false);
        until("the reset", || {
            sent = pair.test(send);
            sent.is_err()
        });
        assert_eq!(sent, Err(2));
        let mut received = Ok(false);
        until("the peer's notice", || {
            received = pair.test(recv);
            received.is_err()
        });
        assert_eq!(received, Err(2));
        assert_eq!(pair.test(recv), Err(2), "for good");
        assert_eq!(pair.try_isend(&source, 16), Err(2), "for good");
        pair.close();
    }
}

/// Returns whether a receive makes progress within many tests of both ends.
fn hangs(pair: &Pair, send: *mut std::ffi::c_void, recv: *mut std::ffi::c_void) -> bool {
    let mut sent = false;
    (0..20_000).all(|_| {
        sent = sent || pair.test(send).unwrap();
        !pair.test(recv).unwrap()
    })
}

isolated! {
    fn a_data_socket_can_fall_silent(DATA_LOSS = "hang:8192", CHUNK = "4096") {
        let mut pair = Pair::new();
        let (mut source, target) = (pair.source(4096), pair.target(4096));
        pair.exchange(&mut source, &target, 4096);
        pair.exchange(&mut source, &target, 4096);
        let (recv, send) = (pair.irecv(&target, 4096), pair.isend(&source, 4096));
        assert!(hangs(&pair, send, recv), "no error, no end");
        pair.close();
    }
}

isolated! {
    fn a_data_socket_can_be_silent_from_the_start(DATA_LOSS = "hang") {
        let pair = Pair::new();
        let (source, target) = (pair.source(4096), pair.target(4096));
        let (recv, send) = (pair.irecv(&target, 4096), pair.isend(&source, 4096));
        assert!(hangs(&pair, send, recv));
    }
}

/// Returns a pair whose sender has closed after one message, which the receiver has not noticed
/// yet.
fn orphan() -> (Pair, Registered, [*mut std::ffi::c_void; 2]) {
    let pair = Pair::new();
    let (mut source, target) = (pair.source(4096), pair.target(4096));
    source.buffer.bytes().copy_from_slice(&pattern(0, 4096));
    let send = pair.isend(&source, 4096);
    until("the send", || pair.test(send).unwrap());
    assert_eq!(net!(pair.plugin.v7, close_send(pair.send)), 0);
    let first = pair.irecv(&target, 4096);
    (pair, target, [first, null_mut()])
}

isolated! {
    fn a_sender_may_leave_when_all_was_received() {
        let (mut pair, _target, [recv, _]) = orphan();
        until("the message", || pair.test(recv).expect("nothing else is expected"));
        assert!(pair.unpack() == pattern(0, 4096));
        assert_eq!(pair.consume(recv), 0);
    }
}

isolated! {
    fn a_receive_that_waits_for_a_sender_who_left() {
        let (pair, target, [first, _]) = orphan();
        // A second receive waits for a record that will not come: this fails the first one too.
        let _second = pair.irecv(&target, 4096);
        let mut outcome = Ok(false);
        until("the error", || {
            outcome = pair.test(first);
            assert_ne!(outcome, Ok(true));
            outcome.is_err()
        });
        assert_eq!(outcome, Err(2));
        assert!(warned("control socket is gone"));
        assert_eq!(pair.test(first), Err(2), "for good");
    }
}

isolated! {
    fn a_sender_that_leaves_in_the_middle_of_a_message(SOCKET_BUFFER = "131072") {
        // Six chunks, all announced at once; the buffers hold less.
        const SIZE: usize = 6 * (512 << 10);
        let pair = Pair::new();
        let (source, target) = (pair.source(SIZE), pair.target(SIZE));
        let (recv, send) = (pair.irecv(&target, SIZE), pair.isend(&source, SIZE));
        assert_eq!(pair.test(send), Ok(false));
        assert_eq!(pair.plugin.counters(pair.send).chunks, 6);
        assert_eq!(net!(pair.plugin.v7, close_send(pair.send)), 0);
        until("the end of the data", || {
            assert_eq!(pair.test(recv), Ok(false));
            warned("data socket 0 of a receive comm broke")
        });
        // No receive waits for a record, so nothing is reported: only a deadline helps.
        for _ in 0..1000 {
            assert_eq!(pair.test(recv), Ok(false));
        }
        assert_eq!(net!(pair.plugin.v7, close_recv(pair.recv)), 0);
        let counters = pair.plugin.counters(null_mut());
        assert_eq!(counters.pages_free, counters.pages_total);
    }
}

isolated! {
    fn a_sender_whose_receiver_left() {
        let pair = Pair::new();
        let source = pair.source(1 << 20);
        assert_eq!(net!(pair.plugin.v7, close_recv(pair.recv)), 0);
        // The first message may still fit the kernel's buffers; eventually a record fails.
        let mut code = 0;
        until("an error", || {
            match pair.try_isend(&source, 1024) {
                Ok(send) => {
                    let mut polls = 0;
                    loop {
                        match pair.test(send) {
                            Ok(true) => break,
                            Ok(false) if polls < 100 => polls += 1,
                            // A broken data socket only hangs.
                            Ok(false) => code = 2,
                            Err(error) => code = error,
                        }
                        if code != 0 {
                            break;
                        }
                    }
                }
                Err(error) => code = error,
            }
            code != 0
        });
        assert_eq!(code, 2);
    }
}

isolated! {
    fn a_plugin_that_is_switched_off() {
        // SAFETY: the only thread of this test's process that accesses the environment.
        unsafe { std::env::set_var("NCCL_GPUDIRECTTCPX_SOCKET_ENABLE", "0") };
        assert_eq!(net!(Plugin::load().v7, init(Some(logger()))), 3);
        assert!(warned("switched off"));
    }
}
