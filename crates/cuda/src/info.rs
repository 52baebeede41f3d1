//! Lists the devices of this process.

use std::ffi::{CStr, c_char, c_int};

use crate::context::Context;
use crate::error::Error;
use crate::sys::{self, Api};

/// One GPU that this process sees.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// Its number in this process.
    pub ordinal: u32,
    /// Its name, such as "NVIDIA H200".
    pub name: String,
    /// Its PCI address, such as "0000:0a:00.0".
    pub pci_bus_id: String,
    /// The NUMA node nearest to it, where the machine has several.
    pub numa_node: Option<u32>,
    /// Its total memory in bytes. [`free_bytes`] returns the free part.
    pub total_bytes: u64,
    /// Major and minor compute capability.
    pub compute_capability: (u32, u32),
    /// The newest CUDA version that the driver supports, major and minor.
    pub driver_version: (u32, u32),
}

/// Returns the GPUs that this process sees, at least one.
///
/// Initialises CUDA but creates no context, so that it takes no memory of any device. Fails with
/// the reason if there is none.
pub fn devices() -> Result<Vec<DeviceInfo>, Error> {
    let api = sys::initialised()?;
    let count = count(api)?;
    if count == 0 {
        return Err(Error::NoDevice);
    }
    (0..count).map(|ordinal| describe(api, ordinal)).collect()
}

/// Returns the free memory of a device in bytes, as its driver counts it.
///
/// Creates the device's primary context if there is none yet, which takes a moment and some of the
/// memory.
pub fn free_bytes(ordinal: u32) -> Result<u64, Error> {
    let context = Context::primary(sys::initialised()?, ordinal)?;
    let _scope = context.enter()?;
    let (mut free, mut total) = (0, 0);
    // SAFETY: stores two numbers.
    let code = unsafe { (context.api.mem_get_info)(&mut free, &mut total) };
    context.api.check(code, "asking for free device memory")?;
    Ok(free as u64)
}

fn describe(api: &Api, ordinal: u32) -> Result<DeviceInfo, Error> {
    let device = raw_device(api, ordinal)?;
    let asked = "asking what a device is";
    let attribute = |which: c_int| {
        let mut value: c_int = 0;
        // SAFETY: stores a number.
        let code = unsafe { (api.device_get_attribute)(&mut value, which, device) };
        api.check(code, asked).map(|()| value.unsigned_abs())
    };
    let mut name = [0 as c_char; 128];
    // SAFETY: stores at most as many characters as given, including the terminating zero.
    let code = unsafe { (api.device_get_name)(name.as_mut_ptr(), name.len() as c_int, device) };
    api.check(code, asked)?;
    let mut total_bytes = 0;
    // SAFETY: stores a number.
    let code = unsafe { (api.device_total_mem)(&mut total_bytes, device) };
    api.check(code, asked)?;
    let mut version: c_int = 0;
    // SAFETY: stores a number.
    let code = unsafe { (api.driver_get_version)(&mut version) };
    api.check(code, "asking for the driver's version")?;
    let version = version.unsigned_abs();
    let pci_bus_id = pci_bus_id(api, device).unwrap_or_default();
    Ok(DeviceInfo {
        ordinal,
        name: text(&name),
        numa_node: numa_node(&pci_bus_id),
        pci_bus_id,
        total_bytes: total_bytes as u64,
        compute_capability: (
            attribute(sys::ATTRIBUTE_MAJOR)?,
            attribute(sys::ATTRIBUTE_MINOR)?,
        ),
        driver_version: (version / 1000, version % 1000 / 10),
    })
}

pub(crate) fn count(api: &Api) -> Result<u32, Error> {
    let mut count: c_int = 0;
    // SAFETY: stores a number.
    let code = unsafe { (api.device_get_count)(&mut count) };
    api.check(code, "counting devices")?;
    Ok(count.unsigned_abs())
}

/// Returns the driver's handle for a device.
pub(crate) fn raw_device(api: &Api, ordinal: u32) -> Result<sys::Device, Error> {
    let mut device = 0;
    let wanted = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
    // SAFETY: stores a handle.
    match unsafe { (api.device_get)(&mut device, wanted) } {
        sys::SUCCESS => Ok(device),
        sys::NOT_INITIALIZED => Err(api.error(sys::NOT_INITIALIZED, "opening a device")),
        _ => Err(Error::NoSuchDevice {
            ordinal,
            count: count(api)?,
        }),
    }
}

/// Returns the device's PCI address in the format of sysfs.
pub(crate) fn pci_bus_id(api: &Api, device: sys::Device) -> Option<String> {
    let mut id = [0 as c_char; 32];
    // SAFETY: stores at most as many characters as given, including the terminating zero.
    let code = unsafe { (api.device_get_pci_bus_id)(id.as_mut_ptr(), id.len() as c_int, device) };
    (code == sys::SUCCESS).then(|| text(&id).to_ascii_lowercase())
}

/// Returns the NUMA node of a PCI device; `None` if the machine has only one, or does not report
/// it.
pub(crate) fn numa_node(pci_bus_id: &str) -> Option<u32> {
    let node =
        std::fs::read_to_string(format!("/sys/bus/pci/devices/{pci_bus_id}/numa_node")).ok()?;
    node.trim().parse().ok()
}

fn text(characters: &[c_char]) -> String {
    // `c_char` is signed on x86-64 and unsigned on aarch64.
    let bytes: Vec<u8> = characters.iter().flat_map(|c| c.to_ne_bytes()).collect();
    CStr::from_bytes_until_nul(&bytes)
        .map(|text| text.to_string_lossy().into_owned())
        .unwrap_or_default()
}
