//! A NCCL net plugin over plain sockets that behaves like GPUDirect-TCPX, for tests.
//!
//! The library exports three function tables as data symbols:
//!
//! | symbol | name | behaves like |
//! |---|---|---|
//! | `ncclNetPlugin_v7` | `GPUDirectTCPX_v7` | GPUDirect-TCPX: 16 requests a comm, received bytes scattered over bounce pages, a ring that says where they belong, receives that have to be consumed in order |
//! | `ncclNetPlugin_v6` | `Socket_v6` | an ordinary socket plugin: host memory, bytes land in the posted buffer |
//! | `ncclNetPlugin_v8` | `Socket_v8` | the same with table v8 |
//!
//! (Without the feature `plain` only v7 is exported, as in the real plugin.) Sending works the same
//! in both kinds: one control socket with a 16-byte record per chunk, and up to eight data sockets.
//! `test` does all the work; there are no threads.
//!
//! The emulator is strict: anything that crashes the real plugin, corrupts data in it or works
//! there by luck returns 3 and logs a line here. It needs no GPU; a "CUDA" pointer is a host
//! pointer that was registered as CUDA, unless `TCPX_EMU_DEVMEM=cuda`.
//!
//! # Settings
//!
//! Read from the environment at the first `init`. An unknown `TCPX_EMU_` variable or a bad value
//! makes `init` return 4 and log what was expected. `NCCL_GPUDIRECTTCPX_SOCKET_ENABLE=0` makes it
//! return 3.
//!
//! | variable | default | meaning |
//! |---|---|---|
//! | `TCPX_EMU_STRICT` | `1` | what crashes or corrupts in the real plugin is refused with 3 (5 for a send larger than its receive); `0` does as the real plugin, as far as memory stays intact |
//! | `TCPX_EMU_NDEV` | `2` | devices, up to 16, named `emu0`, `emu1`, … |
//! | `TCPX_EMU_ADDRESS` | `127.0.0.1` | address of the devices; several, separated by commas, are given out in turn |
//! | `TCPX_EMU_DEVMEM` | `host` | where bounce pages and device handle are: `host`, or `cuda` (the GPU that is current, else the first; the ring in pinned memory) |
//! | `TCPX_EMU_SEED` | `1` | decides pages, fragments and orders |
//! | `TCPX_EMU_NSOCKS` | `1` | data sockets of a connection, up to 8; the listening side decides |
//! | `TCPX_EMU_CHUNK` | `524288` | bytes of a chunk, the unit that goes to one socket |
//! | `TCPX_EMU_SOCKET_BUFFER` | `0` | socket buffers in bytes; `0` is the kernel's choice |
//! | `TCPX_EMU_PAGES` | `4096` | bounce pages of a device (of 4096 bytes, shared by its receive comms) |
//! | `TCPX_EMU_FRAG` | `full` | fragments: `full` pages; `short` ones that start within a page (multiples of 16); `odd` starts and lengths |
//! | `TCPX_EMU_REORDER` | `0` | order in the ring: `0` as completed, `1` chunks shuffled, `2` entries shuffled |
//! | `TCPX_EMU_STALE_CNT` | `0` | `1` keeps a slot's old count until the next receive's first record, as the real plugin does |
//! | `TCPX_EMU_POISON` | `1` | consumed pages are overwritten with 0xee, consumed entries emptied; `0` saves the time |
//! | `TCPX_EMU_EXIT_ON_OVERFLOW` | `0` | `1` ends the process with status 1 when a receive needs more than 2048 entries, instead of returning 3 |
//! | `TCPX_EMU_SET_SIZE` | `0` | `1` makes `test` of v7 write sizes (the plain tables always do) |
//! | `TCPX_EMU_PENDING_CALLS` | `3` | calls of connect and accept that return no comm, at least 1 |
//! | `TCPX_EMU_PENDING_MS` | `0` | time during which they return no comm; 5000 imitates the real accept |
//! | `TCPX_EMU_CONNECT_RETRIES` | `20000` | how often a refused connect is tried again, 1 ms apart |
//! | `TCPX_EMU_FAIL_CONNECT` | `none` | connects that give 2 after the pending calls: `all`, or the n-th of the process |
//! | `TCPX_EMU_NULL_REQ_EVERY` | `0` | every n-th isend and irecv of a comm gives no request (0: none, 1 is not allowed) |
//! | `TCPX_EMU_DELAY_US` | `0` | time between a request's completion and the `test` that reports it |
//! | `TCPX_EMU_SHORT_RECV` | `0` | the n-th receive of each comm lacks its last byte |
//! | `TCPX_EMU_RESET` | `0` | the n-th send of each comm resets the connection instead |
//! | `TCPX_EMU_DATA_LOSS` | `none` | `hang` or `hang:BYTES`: the first data socket of each receive comm is no longer read once it has brought so many bytes (0) |
//! | `TCPX_EMU_ERROR` | | `CALL:NTH` or `CALL:NTH:CODE`, several with commas: the n-th call in the process of listen, connect, accept, regMr, isend, irecv, test or irecvConsumed does nothing and returns the code (3) |
//!
//! # Results
//!
//! | code | when |
//! |---|---|
//! | 1 | a CUDA driver call failed |
//! | 2 | a system call failed; connecting failed; v7: the control socket ended while a receive waits, or was reset |
//! | 3 | the contract was broken, requests are exhausted, a receive needs too many entries, a second `init` of v7 |
//! | 4 | a bad setting |
//! | 5 | more was sent than the receive has room for |
//! | 6 | v6, v8: the peer closed the connection |
//!
//! A data socket of v7 that breaks is only logged: `test` then returns "not done" for ever, as in
//! the real plugin. [`counters::tcpx_emu_counters`] exposes the state to tests.
//!
//! # Modules
//!
//! `entry` has the C functions, `emulator` the state of the process, `connect` and `accept` create
//! a `comm`, which is a `send` or a `receive` comm. A receive comm reads `control` records and
//! `inbound` data sockets; bytes go into [`pages`] as `fragment` decides, a `slot` tracks them, and
//! the [`ring`] publishes the result. [`raw_loop`] is the smallest program that drives a plugin at
//! full speed.

use crate::tables::{NetV6, NetV7, NetV8};

pub mod counters;
pub mod faults;
pub mod pages;
pub mod raw_loop;
pub mod request;
pub mod ring;
pub mod settings;
pub mod tables;

mod accept;
mod comm;
mod connect;
mod control;
mod cuda;
mod device;
mod emulator;
mod entry;
mod error;
mod fragment;
mod inbound;
mod log;
mod memory;
mod receive;
mod registration;
mod send;
mod slot;
mod socket;
mod wire;

/// The plain table v6.
#[cfg_attr(feature = "plain", unsafe(no_mangle))]
#[allow(non_upper_case_globals, reason = "NCCL looks for this name")]
pub static ncclNetPlugin_v6: NetV6 = NetV6 {
    name: c"Socket_v6".as_ptr(),
    init: Some(entry::init_plain),
    devices: Some(entry::devices),
    get_properties: Some(entry::get_properties_v6),
    listen: Some(entry::listen_plain),
    connect: Some(entry::connect_plain_v6),
    accept: Some(entry::accept_plain_v6),
    reg_mr: Some(entry::reg_mr_plain),
    reg_mr_dma_buf: None,
    dereg_mr: Some(entry::dereg_mr_plain),
    isend: Some(entry::isend),
    irecv: Some(entry::irecv),
    iflush: Some(entry::iflush_plain),
    test: Some(entry::test),
    close_send: Some(entry::close),
    close_recv: Some(entry::close),
    close_listen: Some(entry::close_listen),
};

/// The table that emulates GPUDirect-TCPX.
#[unsafe(no_mangle)]
pub static ncclNetPlugin_v7: NetV7 = NetV7 {
    name: c"GPUDirectTCPX_v7".as_ptr(),
    init: Some(entry::init_tcpx),
    devices: Some(entry::devices),
    get_properties: Some(entry::get_properties_v7),
    listen: Some(entry::listen_tcpx),
    connect: Some(entry::connect_tcpx),
    accept: Some(entry::accept_tcpx),
    reg_mr: Some(entry::reg_mr_tcpx),
    reg_mr_dma_buf: None,
    dereg_mr: Some(entry::dereg_mr_tcpx),
    isend: Some(entry::isend),
    irecv: Some(entry::irecv),
    iflush: Some(entry::iflush_tcpx),
    test: Some(entry::test),
    close_send: Some(entry::close),
    close_recv: Some(entry::close),
    close_listen: Some(entry::close_listen),
    get_device_mr: Some(entry::get_device_mr),
    irecv_consumed: Some(entry::irecv_consumed),
};

/// The plain table v8.
#[cfg_attr(feature = "plain", unsafe(no_mangle))]
#[allow(non_upper_case_globals, reason = "NCCL looks for this name")]
pub static ncclNetPlugin_v8: NetV8 = NetV8 {
    name: c"Socket_v8".as_ptr(),
    init: Some(entry::init_plain),
    devices: Some(entry::devices),
    get_properties: Some(entry::get_properties_v8),
    listen: Some(entry::listen_plain),
    connect: Some(entry::connect_plain_v8),
    accept: Some(entry::accept_plain_v8),
    reg_mr: Some(entry::reg_mr_plain),
    reg_mr_dma_buf: None,
    dereg_mr: Some(entry::dereg_mr_plain),
    isend: Some(entry::isend),
    irecv: Some(entry::irecv),
    iflush: Some(entry::iflush_plain),
    test: Some(entry::test),
    close_send: Some(entry::close),
    close_recv: Some(entry::close),
    close_listen: Some(entry::close_listen),
    get_device_mr: None,
    irecv_consumed: None,
};
