//! Errors, and their result codes.

use std::ffi::c_int;
use std::io;

use crate::faults::Call;
use crate::settings::SettingError;
use crate::tables::result;

/// The reason for a result other than success.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The caller violated the contract. Counted in [`crate::counters::Counters::violations`].
    #[error("{0}")]
    Misuse(#[from] Misuse),
    #[error("{0}")]
    Setting(#[from] SettingError),
    #[error("the plugin is switched off: NCCL_GPUDIRECTTCPX_SOCKET_ENABLE is 0")]
    Disabled,
    #[error("no memory for {what}")]
    OutOfMemory { what: &'static str },
    #[error("{what}: {}", io::Error::from_raw_os_error(*errno))]
    System { what: &'static str, errno: i32 },
    #[error("connecting failed as TCPX_EMU_FAIL_CONNECT requires")]
    FailConnect,
    #[error("the peer's control socket is gone ({what}): this comm will not recover")]
    ControlLost { what: &'static str },
    #[error("the peer closed the connection ({what})")]
    RemoteClosed { what: &'static str },
    #[error("bad control record from the peer: {what} (is the other end this plugin?)")]
    Record { what: &'static str },
    #[error("the peer sent {sent} bytes, the receive has room for {posted}: post larger receives")]
    Truncated { sent: u32, posted: u32 },
    #[error(
        "a message of {size} bytes needs more than {} ring entries: send at most 4 MiB at once",
        crate::ring::ENTRIES
    )]
    RingOverflow { size: u32 },
    #[error("CUDA driver: {what} failed with code {code}")]
    Cuda { what: &'static str, code: c_int },
    #[error(
        "cannot load libcuda.so.1 ({what}): use TCPX_EMU_DEVMEM=host on machines without a GPU"
    )]
    NoDriver { what: String },
    #[error("call {nth} of {call:?} fails as TCPX_EMU_ERROR requires")]
    Injected { call: Call, nth: u64, code: c_int },
}

/// A call that a correct caller never makes. The texts say what to do instead.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum Misuse {
    #[error("init was called a second time: a process initialises the plugin once")]
    SecondInit,
    #[error("a call came before init succeeded")]
    NotInitialised,
    #[error("{what} is NULL")]
    Null { what: &'static str },
    #[error("there is no device {dev}: there are {devices}")]
    NoDevice { dev: c_int, devices: usize },
    #[error("the handle was not written by listen of this plugin")]
    ForeignHandle,
    #[error(
        "connect was called with a copy of a handle in progress: keep calling with the same buffer"
    )]
    MovedHandle,
    #[error("connect was called again with a handle that is used up (it had connected or failed)")]
    HandleUsed,
    #[error(
        "accept was called again on a listen comm that had accepted or failed: one listen comm gives one connection"
    )]
    AcceptAgain,
    #[error(
        "closeListen was called while accept is pending: call accept until it gives a comm or an error"
    )]
    CloseDuringAccept,
    #[error("accept needs a device handle: the pointer that the third argument points to is NULL")]
    NoDeviceHandle,
    #[error("irecv on a comm without a ring: pass accept a device handle")]
    NoRing,
    #[error("unknown memory type {kind}: host is 1, CUDA is 2")]
    MemoryType { kind: c_int },
    #[error("CUDA memory at {address:#x} is not 4096-aligned")]
    Unaligned { address: usize },
    #[error("memory at {address:#x} is not of the GPU that is current, {current}")]
    OtherGpu { address: usize, current: c_int },
    #[error("a registration of {size} bytes: {rule}")]
    RegistrationSize { size: i64, rule: &'static str },
    #[error("a registration was used with a comm that it was not made for")]
    ForeignRegistration,
    #[error(
        "{size} bytes at {address:#x} are not within the registration ({base:#x}, {len} bytes)"
    )]
    OutsideRegistration {
        address: usize,
        size: usize,
        base: usize,
        len: usize,
    },
    #[error("negative size {size}")]
    NegativeSize { size: c_int },
    #[error("{n} buffers in one call: this plugin takes exactly one")]
    NotOne { n: c_int },
    #[error("{call} on a comm of the other direction")]
    WrongDirection { call: &'static str },
    #[error("all {slots} requests of the comm are in use: finish (and consume) one first")]
    SlotsExhausted { slots: usize },
    #[error("test of a request that is not the oldest unfinished one of its comm")]
    TestOrder,
    #[error("test of a receive that was done already: consume it instead")]
    TestAfterDone,
    #[error("irecvConsumed of a receive that is not the oldest finished one of its comm")]
    ConsumeOrder,
    #[error("a request was given to another comm than its own")]
    ForeignRequest,
    #[error("iflush is not supported: {why}")]
    Flush { why: &'static str },
    #[error("the emulator itself failed (this is a bug in it): {what}")]
    Panic { what: String },
}

impl Error {
    /// Wraps the failure of the last system call.
    pub(crate) fn system(what: &'static str, error: &io::Error) -> Self {
        Self::System {
            what,
            errno: error.raw_os_error().unwrap_or(libc::EIO),
        }
    }

    /// Returns the result code for the caller.
    pub(crate) fn code(&self) -> c_int {
        match self {
            Self::Misuse(_)
            | Self::Disabled
            | Self::OutOfMemory { .. }
            | Self::Record { .. }
            | Self::RingOverflow { .. }
            | Self::NoDriver { .. } => result::INTERNAL_ERROR,
            Self::System { .. } | Self::FailConnect | Self::ControlLost { .. } => {
                result::SYSTEM_ERROR
            }
            Self::RemoteClosed { .. } => result::REMOTE_ERROR,
            Self::Setting(_) => result::INVALID_ARGUMENT,
            Self::Truncated { .. } => result::INVALID_USAGE,
            Self::Cuda { .. } => result::UNHANDLED_CUDA_ERROR,
            Self::Injected { code, .. } => *code,
        }
    }
}
