//! Information about this machine: network interfaces, and the settings with their values.

use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use tcpx::Config;

use crate::errors::exception;

/// One network interface.
#[pyclass(frozen, get_all, module = "tcpx")]
pub(crate) struct Interface {
    /// Its name, such as "eth0".
    name: String,
    /// The kind of device: "physical", "loopback", or the kernel's name, such as "bond".
    kind: String,
    /// Its addresses with their prefix lengths.
    addresses: Vec<String>,
    /// The largest packet, in bytes.
    mtu: u32,
    /// The link's speed in Mbit/s, if known.
    speed_mbps: Option<u32>,
    /// The NUMA node of the device, on machines with several.
    numa_node: Option<u32>,
    /// The PCI address of the device.
    pci_address: Option<String>,
    /// The driver of the device.
    driver: Option<String>,
    /// The reason sessions do not use it unless the setting `interfaces` names it; None if they do.
    why_not: Option<String>,
}

#[pymethods]
impl Interface {
    fn __repr__(&self) -> String {
        format!(
            "<tcpx.Interface {} {} [{}]>",
            self.name,
            self.kind,
            self.addresses.join(", ")
        )
    }
}

/// Returns every network interface of this machine.
#[pyfunction]
pub(crate) fn interfaces() -> PyResult<Vec<Interface>> {
    let found =
        tcpx::interfaces::discover().map_err(|error| PyOSError::new_err(error.to_string()))?;
    let why_not = |interface: &tcpx::interfaces::Interface| {
        let why = interface.usable_among(&found).err();
        why.map(|why| why.to_string())
    };
    let found = found.iter().cloned().map(|interface| Interface {
        why_not: why_not(&interface),
        kind: interface.kind.to_string(),
        addresses: interface.addresses.iter().map(|a| a.to_string()).collect(),
        name: interface.name,
        mtu: interface.mtu,
        speed_mbps: interface.speed_mbps,
        numa_node: interface.numa_node,
        pci_address: interface.pci_address,
        driver: interface.driver,
    });
    Ok(found.collect())
}

/// One setting.
#[pyclass(frozen, get_all, module = "tcpx")]
pub(crate) struct Setting {
    /// The key, as passed to `Session`.
    key: &'static str,
    /// The environment variable.
    variable: &'static str,
    /// The value in force.
    value: String,
    /// The origin of the value.
    source: String,
    /// A description of the setting.
    help: String,
    /// The reason for the default.
    reason: String,
}

#[pymethods]
impl Setting {
    fn __repr__(&self) -> String {
        format!(
            "<tcpx.Setting {}={} ({})>",
            self.key, self.value, self.source
        )
    }
}

/// Returns every setting with the value that a session started now would have.
#[pyfunction]
pub(crate) fn settings(py: Python<'_>) -> PyResult<Vec<Setting>> {
    let config = Config::from_env().map_err(|error| exception(py, &error.into()))?;
    Ok(rows(&config))
}

pub(super) fn rows(config: &Config) -> Vec<Setting> {
    let rows = config.rows().into_iter().map(|row| Setting {
        key: row.key,
        variable: row.variables.first().copied().unwrap_or_default(),
        value: row.value,
        source: row.source.to_string(),
        help: row.help,
        reason: row.reason,
    });
    rows.collect()
}
