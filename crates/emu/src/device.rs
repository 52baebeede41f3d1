//! Devices: their names, addresses, properties and bounce pools.

use std::ffi::{CString, c_int};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};

use crate::error::{Error, Misuse};
use crate::memory::Memory;
use crate::pages::Pool;
use crate::settings::Settings;
use crate::tables::{PropertiesV6, PropertiesV7, PropertiesV8, memory_kind, net_device};

/// Reported speed in Mbit/s if it is unknown, as on loopback.
const UNKNOWN_SPEED: c_int = 10_000;
/// Number of comms that a device claims to support.
const MAX_COMMS: c_int = 65_536;

/// One emulated network interface.
#[derive(Debug)]
pub(crate) struct Device {
    index: usize,
    name: CString,
    pub(crate) address: IpAddr,
    /// One pool per GPU that receives through this device.
    pools: Mutex<Vec<Arc<Pool>>>,
}

impl Device {
    /// Returns all devices of these settings.
    pub(crate) fn all(settings: &Settings) -> Vec<Self> {
        (0..settings.devices)
            .map(|index| Self {
                index,
                name: CString::new(format!("emu{index}")).unwrap_or_default(),
                address: settings.addresses[index % settings.addresses.len()],
                pools: Mutex::default(),
            })
            .collect()
    }

    /// Returns the pool for receives into `memory`, made on first use.
    pub(crate) fn pool(&self, memory: Memory, settings: &Settings) -> Result<Arc<Pool>, Error> {
        let mut pools = self.pools.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pool) = pools.iter().find(|pool| pool.memory() == memory) {
            return Ok(Arc::clone(pool));
        }
        let seed = settings.seed.wrapping_add(self.index as u64);
        let pool = Arc::new(Pool::new(memory, settings.pages, seed)?);
        pools.push(Arc::clone(&pool));
        Ok(pool)
    }

    /// Returns the pages of all pools: total, and free.
    pub(crate) fn pages(&self) -> (usize, usize) {
        let pools = self.pools.lock().unwrap_or_else(PoisonError::into_inner);
        pools.iter().fold((0, 0), |(total, free), pool| {
            (total + pool.total(), free + pool.free())
        })
    }

    pub(crate) fn properties_v6(&self) -> PropertiesV6 {
        PropertiesV6 {
            name: self.name.as_ptr(),
            pci_path: std::ptr::null(),
            guid: self.index as u64,
            ptr_support: memory_kind::HOST,
            speed: UNKNOWN_SPEED,
            port: 0,
            latency: 0.0,
            max_comms: MAX_COMMS,
            max_recvs: 1,
        }
    }

    pub(crate) fn properties_v7(&self) -> PropertiesV7 {
        let common = PropertiesV6 {
            ptr_support: memory_kind::HOST | memory_kind::CUDA,
            ..self.properties_v6()
        };
        PropertiesV7 {
            common,
            net_device_type: net_device::UNPACK,
            net_device_version: net_device::UNPACK_VERSION,
        }
    }

    pub(crate) fn properties_v8(&self) -> PropertiesV8 {
        let v6 = self.properties_v6();
        PropertiesV8 {
            name: v6.name,
            pci_path: v6.pci_path,
            guid: v6.guid,
            ptr_support: v6.ptr_support,
            reg_is_global: 0,
            speed: v6.speed,
            port: v6.port,
            latency: v6.latency,
            max_comms: v6.max_comms,
            max_recvs: v6.max_recvs,
            net_device_type: net_device::HOST,
            net_device_version: net_device::INVALID_VERSION,
        }
    }
}

/// Returns the device with that index.
pub(crate) fn find(devices: &[Device], dev: c_int) -> Result<&Device, Misuse> {
    usize::try_from(dev)
        .ok()
        .and_then(|index| devices.get(index))
        .ok_or(Misuse::NoDevice {
            dev,
            devices: devices.len(),
        })
}
