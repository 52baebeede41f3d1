//! State of a process: settings, devices, counters.

use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;

use crate::device::Device;
use crate::error::{Error, Misuse};
use crate::faults::Faults;
use crate::log::info;
use crate::memory::Memory;
use crate::settings::Settings;

/// The family a comm belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flavor {
    /// Behaves like GPUDirect-TCPX (table v7).
    Tcpx,
    /// An ordinary socket plugin for host memory (tables v6 and v8).
    Plain,
}

/// The emulator of this process.
#[derive(Debug)]
pub(crate) struct Emulator {
    pub(crate) settings: Settings,
    pub(crate) devices: Vec<Device>,
    pub(crate) faults: Faults,
    /// Number of connects begun, for `TCPX_EMU_FAIL_CONNECT`.
    pub(crate) connects: AtomicU64,
    /// Number of open comms.
    pub(crate) comms: AtomicU64,
    /// Number of live registrations.
    pub(crate) registrations: AtomicU64,
}

/// Number of calls that violated the contract. Not part of the emulator, because a call before
/// `init` is one.
pub(crate) static VIOLATIONS: AtomicU64 = AtomicU64::new(0);

static EMULATOR: OnceLock<Emulator> = OnceLock::new();

impl Emulator {
    /// Returns the emulator, once an `init` has succeeded.
    pub(crate) fn get() -> Result<&'static Self, Error> {
        EMULATOR.get().ok_or_else(|| Misuse::NotInitialised.into())
    }

    /// Reads the settings and creates the emulator, unless another table's `init` did.
    pub(crate) fn start() -> Result<&'static Self, Error> {
        if let Some(emulator) = EMULATOR.get() {
            return Ok(emulator);
        }
        if std::env::var_os("NCCL_GPUDIRECTTCPX_SOCKET_ENABLE").is_some_and(|value| value == "0") {
            return Err(Error::Disabled);
        }
        let settings = Settings::from_env()?;
        Memory::check(settings.memory)?;
        info!("{settings:?}");
        Ok(EMULATOR.get_or_init(|| Self {
            devices: Device::all(&settings),
            faults: Faults::new(settings.errors.clone()),
            connects: AtomicU64::new(0),
            comms: AtomicU64::new(0),
            registrations: AtomicU64::new(0),
            settings,
        }))
    }
}
