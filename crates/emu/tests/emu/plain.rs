//! Tables v6 and v8: an ordinary socket plugin.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

use nccl_net_tcpx_emu::tables::HANDLE_BYTES;

use crate::harness::{Plugin, logger, net, pattern, until};

/// A connection over table v8 or v6; they share everything but the types of their members.
struct Plain {
    plugin: &'static Plugin,
    send: *mut c_void,
    recv: *mut c_void,
}

/// Connects with the members of one table.
macro_rules! connect_plain {
    ($plugin:expr, $table:ident $(, $device_handle:expr)?) => {{
        let plugin: &'static Plugin = $plugin;
        assert_eq!(net!(plugin.$table, init(Some(logger()))), 0);
        let (mut listen, mut send, mut recv) = (null_mut(), null_mut::<c_void>(), null_mut::<c_void>());
        let mut handle = [0u8; HANDLE_BYTES];
        let raw = handle.as_mut_ptr().cast::<c_void>();
        assert_eq!(net!(plugin.$table, listen(0, raw, &raw mut listen)), 0);
        // Unlike TCPX, connecting does not wait for accept.
        until("connect", || {
            assert_eq!(net!(plugin.$table, connect(0, raw, &raw mut send $(, $device_handle)?)), 0);
            !send.is_null()
        });
        until("accept", || {
            assert_eq!(net!(plugin.$table, accept(listen, &raw mut recv $(, $device_handle)?)), 0);
            !recv.is_null()
        });
        assert_eq!(net!(plugin.$table, close_listen(listen)), 0);
        Plain { plugin, send, recv }
    }};
}

impl Plain {
    fn isend(&self, data: &[u8]) -> Result<*mut c_void, c_int> {
        let mut request = null_mut();
        let (pointer, size) = (data.as_ptr().cast_mut().cast(), data.len() as c_int);
        let code = net!(
            self.plugin.v8,
            isend(self.send, pointer, size, 0, null_mut(), &raw mut request)
        );
        if code == 0 { Ok(request) } else { Err(code) }
    }

    fn irecv(&self, data: &mut [u8]) -> Result<*mut c_void, c_int> {
        let mut request = null_mut();
        let (mut pointer, mut size) = (data.as_mut_ptr().cast::<c_void>(), data.len() as c_int);
        let (mut tag, mut mhandle) = (0, null_mut());
        let code = net!(
            self.plugin.v8,
            irecv(
                self.recv,
                1,
                &raw mut pointer,
                &raw mut size,
                &raw mut tag,
                &raw mut mhandle,
                &raw mut request
            )
        );
        if code == 0 { Ok(request) } else { Err(code) }
    }

    /// Performs `test`: returns the size when it is done.
    fn test(&self, request: *mut c_void) -> Result<Option<c_int>, c_int> {
        let (mut done, mut size) = (0, -1);
        match net!(self.plugin.v8, test(request, &raw mut done, &raw mut size)) {
            0 => Ok((done == 1).then_some(size)),
            code => Err(code),
        }
    }

    fn exchange_all(&self) {
        for (k, size) in [0, 1, 4096, 100_000, 3 << 20].into_iter().enumerate() {
            let message = pattern(k as u64, size);
            let mut received = vec![0x5c; size + 64];
            let recv = self.irecv(&mut received).unwrap();
            let send = self.isend(&message).unwrap();
            let (mut sent, mut got) = (None, None);
            until("the message", || {
                sent = sent.or_else(|| self.test(send).unwrap());
                got = got.or_else(|| self.test(recv).unwrap());
                sent.is_some() && got.is_some()
            });
            assert_eq!((sent, got), (Some(size as c_int), Some(size as c_int)));
            assert!(received[..size] == message);
            assert!(received[size..].iter().all(|&byte| byte == 0x5c));
        }
    }
}

isolated! {
    fn v8_moves_bytes(CHUNK = "10000", NSOCKS = "4") {
        let plain = connect_plain!(Plugin::load(), v8, null_mut());
        plain.exchange_all();
        assert_eq!(net!(plain.plugin.v8, close_send(plain.send)), 0);
        assert_eq!(net!(plain.plugin.v8, close_recv(plain.recv)), 0);
    }
}

isolated! {
    fn v6_moves_bytes() {
        let plain = connect_plain!(Plugin::load(), v6);
        plain.exchange_all();
        let mut untouched = 7 as *mut c_void;
        let mut byte = 0u8;
        let data = (&raw mut byte).cast();
        let register = |kind, out| net!(plain.plugin.v6, reg_mr(plain.send, data, 1, kind, out));
        assert_eq!(register(1, &raw mut untouched), 0);
        assert_eq!(untouched as usize, 7, "mhandle is not written");
        assert_eq!(register(2, &raw mut untouched), 3, "host memory only");
        assert_eq!(net!(plain.plugin.v6, dereg_mr(plain.send, null_mut())), 0);
    }
}

isolated! {
    fn thirty_two_requests_and_free_when_done() {
        let plain = connect_plain!(Plugin::load(), v8, null_mut());
        let message = pattern(0, 1000);
        let mut buffers = vec![vec![0; 1000]; 32];
        let recvs: Vec<_> = buffers.iter_mut().map(|buffer| plain.irecv(buffer).unwrap()).collect();
        let sends: Vec<_> = (0..32).map(|_| plain.isend(&message).unwrap()).collect();
        assert_eq!(plain.isend(&message), Err(3));
        assert_eq!(plain.irecv(&mut [0; 8]), Err(3));
        assert_eq!(plain.test(recvs[1]), Err(3));
        for (send, recv) in sends.into_iter().zip(recvs) {
            until("the send", || plain.test(send).unwrap().is_some());
            until("the receive", || plain.test(recv).unwrap().is_some());
        }
        assert!(buffers.iter().all(|buffer| *buffer == message));
        assert_eq!(plain.plugin.counters(plain.recv).slots_free, 32);
    }
}

isolated! {
    fn errors_of_the_peer() {
        let plain = connect_plain!(Plugin::load(), v8, null_mut());
        let mut small = [0; 10];
        let (recv, send) = (plain.irecv(&mut small).unwrap(), plain.isend(&[1; 11]).unwrap());
        until("the send", || plain.test(send).unwrap().is_some());
        let mut code = 0;
        until("the error", || {
            code = plain.test(recv).err().unwrap_or(0);
            code != 0
        });
        assert_eq!(code, 5);
        assert_eq!(small, [0; 10]);

        let plain = connect_plain!(Plugin::load(), v8, null_mut());
        let recv = plain.irecv(&mut small).unwrap();
        assert_eq!(net!(plain.plugin.v8, close_send(plain.send)), 0);
        until("the error", || {
            code = plain.test(recv).err().unwrap_or(0);
            code != 0
        });
        assert_eq!(code, 6);
    }
}

isolated! {
    fn the_kinds_do_not_mix() {
        let plugin = Plugin::init();
        assert_eq!(net!(plugin.v8, init(None)), 0);
        let (mut listen, mut send) = (null_mut(), null_mut());
        let mut handle = [0u8; HANDLE_BYTES];
        let raw = handle.as_mut_ptr().cast::<c_void>();
        assert_eq!(net!(plugin.v8, listen(0, raw, &raw mut listen)), 0);
        let mut code = 0;
        until("the refusal", || {
            let mut recv = null_mut();
            code = net!(plugin.v7, connect(0, raw, &raw mut send, null_mut()));
            assert_eq!(net!(plugin.v8, accept(listen, &raw mut recv, null_mut())), 0);
            code != 0
        });
        assert_eq!(code, 2);
    }
}
