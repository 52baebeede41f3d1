//! Tests `TCPX_EMU_DEVMEM=cuda`, on machines with a GPU. The pages and the 24-byte handle are then
//! in device memory, and so are the buffers here: everything is copied to be checked.

use std::ffi::{c_int, c_void};
use std::io::Write;
use std::ptr::null_mut;

use nccl_net_tcpx_emu::ring::{RingLayout, SLOTS, UnpackHandle};
use nccl_net_tcpx_emu::tables::memory_kind::CUDA;

use crate::harness::{Plugin, connect, net, pattern, until};

/// The driver functions that this test needs.
struct Driver {
    library: *mut c_void,
}

impl Driver {
    /// Returns `None` on a machine without a GPU.
    fn open() -> Option<Self> {
        // SAFETY: terminated strings; the calls below have these types.
        unsafe {
            let library = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW);
            if library.is_null() {
                return None;
            }
            let driver = Self { library };
            let init: extern "C" fn(u32) -> c_int = driver.symbol(c"cuInit");
            let retain: extern "C" fn(*mut *mut c_void, c_int) -> c_int =
                driver.symbol(c"cuDevicePrimaryCtxRetain");
            let set: extern "C" fn(*mut c_void) -> c_int = driver.symbol(c"cuCtxSetCurrent");
            let mut context = null_mut();
            (init(0) == 0 && retain(&raw mut context, 0) == 0 && set(context) == 0)
                .then_some(driver)
        }
    }

    /// # Safety
    /// The symbol has that type.
    unsafe fn symbol<T: Copy>(&self, name: &std::ffi::CStr) -> T {
        // SAFETY: an open library; a function pointer is as large as a pointer.
        unsafe {
            let symbol = libc::dlsym(self.library, name.as_ptr());
            assert!(!symbol.is_null() && size_of::<T>() == size_of::<*mut c_void>());
            std::mem::transmute_copy(&symbol)
        }
    }

    /// Allocates page-aligned memory: the driver aligns only to 512 bytes.
    fn alloc(&self, bytes: usize) -> u64 {
        let mut pointer = 0u64;
        // SAFETY: the driver's signature.
        unsafe {
            let alloc: extern "C" fn(*mut u64, usize) -> c_int = self.symbol(c"cuMemAlloc_v2");
            assert_eq!(alloc(&raw mut pointer, bytes + 4096), 0);
        }
        pointer.next_multiple_of(4096)
    }

    fn write(&self, to: u64, bytes: &[u8]) {
        // SAFETY: the driver's signature.
        unsafe {
            let copy: extern "C" fn(u64, *const u8, usize) -> c_int =
                self.symbol(c"cuMemcpyHtoD_v2");
            assert_eq!(copy(to, bytes.as_ptr(), bytes.len()), 0);
        }
    }

    fn read(&self, from: u64, bytes: usize) -> Vec<u8> {
        let mut copied = vec![0; bytes];
        // SAFETY: the driver's signature.
        unsafe {
            let copy: extern "C" fn(*mut u8, u64, usize) -> c_int = self.symbol(c"cuMemcpyDtoH_v2");
            assert_eq!(copy(copied.as_mut_ptr(), from, bytes), 0);
        }
        copied
    }
}

isolated! {
    fn device_memory(DEVMEM = "cuda", FRAG = "odd", NSOCKS = "2", CHUNK = "65536") {
        let Some(driver) = Driver::open() else {
            // Past the harness, which hides the output of passed tests.
            let line = "SKIPPED: cuda::device_memory: no CUDA driver on this machine";
            let _ = writeln!(std::io::stderr(), "{line}");
            return;
        };
        let plugin = Plugin::init();
        let (send, recv, handle) = connect(plugin, 0);
        let bytes = driver.read(handle.handle as u64, 24);
        // SAFETY: 24 bytes of this layout.
        let unpack = unsafe { bytes.as_ptr().cast::<UnpackHandle>().read_unaligned() };
        assert_eq!(unpack.head, u64::MAX);
        assert_eq!(unpack.bounce as usize % 4096, 0);
        let size = 1 << 20;
        let (source, target) = (driver.alloc(size), driver.alloc(size));
        let register = |comm, data: u64| {
            let (mut mhandle, data, size) = (null_mut(), data as *mut c_void, size as c_int);
            assert_eq!(net!(plugin.v7, reg_mr(comm, data, size, CUDA, &raw mut mhandle)), 0);
            mhandle
        };
        let (source_mr, target_mr) = (register(send, source), register(recv, target));
        for k in 0..20u64 {
            let len = size - 7 * k as usize;
            let message = pattern(k, len);
            driver.write(source, &message);
            let (mut sending, mut receiving) = (null_mut(), null_mut());
            let data = source as *mut c_void;
            let isend =
                net!(plugin.v7, isend(send, data, len as c_int, 0, source_mr, &raw mut sending));
            let (mut data, mut posted, mut tag) = (target as *mut c_void, size as c_int, 0);
            let mut mhandle = target_mr;
            let irecv = net!(
                plugin.v7,
                irecv(
                    recv,
                    1,
                    &raw mut data,
                    &raw mut posted,
                    &raw mut tag,
                    &raw mut mhandle,
                    &raw mut receiving
                )
            );
            assert_eq!((isend, irecv), (0, 0));
            let test = |request| {
                let mut done = 0;
                assert_eq!(net!(plugin.v7, test(request, &raw mut done, null_mut())), 0);
                done == 1
            };
            let (mut sent, mut received) = (false, false);
            until("the message", || {
                sent = sent || test(sending);
                received = received || test(receiving);
                sent && received
            });
            let slot = (k % SLOTS as u64) as usize;
            // SAFETY: pinned memory has one address on host and device.
            let entries = unsafe {
                let ring: *const RingLayout = unpack.meta;
                let count = (&raw const (*ring).count[slot]).read_volatile() as usize;
                (0..count).map(|i| (*ring).entries[slot][i]).collect::<Vec<_>>()
            };
            let mut rebuilt = vec![0; len];
            for entry in &entries {
                let from = unpack.bounce as u64 + u64::from(entry.src_off);
                let range = entry.dst_off as usize..entry.dst_off as usize + entry.len as usize;
                rebuilt[range].copy_from_slice(&driver.read(from, entry.len as usize));
            }
            assert!(rebuilt == message, "message {k}");
            assert_eq!(net!(plugin.v7, irecv_consumed(recv, 1, receiving)), 0);
            let first = unpack.bounce as u64 + u64::from(entries[0].src_off);
            assert_eq!(driver.read(first, 1), [nccl_net_tcpx_emu::pages::POISON]);
        }
        assert_eq!(net!(plugin.v7, close_send(send)), 0);
        assert_eq!(net!(plugin.v7, close_recv(recv)), 0);
        println!("device memory was used");
    }
}
