//! What this machine has: network interfaces, and the settings with their values.

use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use tcpx::Config;

use crate::errors::exception;

/// One network interface.
#[pyclass(frozen, get_all, module = "tcpx")]
pub(crate) struct Interface {
    /// Its name, such as "eth0".
    name: String,
    /// What stands behind the name: "physical", "loopback", or the kernel's word, such as "bond".
    kind: String,
    /// Its addresses with their prefix lengths.
    addresses: Vec<String>,
    /// The largest packet, in bytes.
    mtu: u32,
    /// The link's speed in Mbit/s, where the driver knows it.
    speed_mbps: Option<u32>,
    /// The NUMA node that the device hangs off, on machines that have several.
    numa_node: Option<u32>,
    /// The PCI address of the device.
    pci_address: Option<String>,
    /// The driver of the device.
    driver: Option<String>,
    /// Why sessions do not use it unless the setting `interfaces` names it; None when they do.
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

/// Every network interface of this machine.
#[pyfunction]
pub(crate) fn interfaces() -> PyResult<Vec<Interface>> {
    let found =
        tcpx::interfaces::discover().map_err(|error| PyOSError::new_err(error.to_string()))?;
    let found = found.into_iter().map(|interface| Interface {
        why_not: interface.usable().err().map(|why| why.to_string()),
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
    /// The key, as `Session` takes it.
    key: &'static str,
    /// The environment variable.
    variable: &'static str,
    /// The value in force.
    value: String,
    /// Where the value came from.
    source: String,
    /// What the setting does.
    help: String,
    /// Why the default is what it is.
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

/// Every setting with the value that a session started now would have.
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
