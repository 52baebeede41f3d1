//! The network interfaces of this machine.

use std::ffi::{CString, c_char, c_void};
use std::ptr::null;

use tcpx::interfaces::{self, Interface};

use crate::ffi;
use crate::status::{Failure, c_text, tcpx_status};

/// One network interface; valid while the callback that received it runs.
#[repr(C)]
#[derive(Debug)]
pub struct tcpx_device {
    /// Size of this struct in bytes; later versions add fields at its end.
    pub size: usize,
    /// Its name, such as "eth0".
    pub name: *const c_char,
    /// The kind of device: "physical", "loopback", or the kernel's name, such as "bond" or
    /// "bridge".
    pub kind: *const c_char,
    /// Its addresses with their prefix lengths, separated by commas; "" if it has none.
    pub addresses: *const c_char,
    /// The PCI address of the device, such as "0000:06:00.0"; "" if there is none.
    pub pci_address: *const c_char,
    /// The driver of the device; "" if there is none.
    pub driver: *const c_char,
    /// The reason sessions do not use it unless the setting interfaces names it; NULL if they do.
    pub why_not: *const c_char,
    /// The largest packet, in bytes.
    pub mtu: u32,
    /// The link's speed in Mbit/s; 0 if unknown.
    pub speed_mbps: u32,
    /// The NUMA node of the device; -1 on machines with only one.
    pub numa_node: i32,
}

/// Receives one interface. Must not unwind.
pub type tcpx_device_fn =
    Option<unsafe extern "C" fn(context: *mut c_void, device: *const tcpx_device)>;

/// Passes every network interface of this machine to `callback`, with `context`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_devices_each(
    callback: tcpx_device_fn,
    context: *mut c_void,
) -> tcpx_status {
    ffi::call(|| {
        let callback = callback.ok_or(Failure::Null("callback"))?;
        let found = interfaces::discover().map_err(|e| Failure::Devices(e.to_string()))?;
        for interface in &found {
            let texts = Texts::of(interface, &found);
            let device = texts.device(interface);
            // SAFETY: C passed the function to be called with its context; `device` and its texts
            // outlive the call.
            unsafe { callback(context, &raw const device) };
        }
        Ok(())
    })
}

/// Owns the texts that a [`tcpx_device`] points to.
struct Texts {
    name: CString,
    kind: CString,
    addresses: CString,
    pci_address: CString,
    driver: CString,
    why_not: Option<CString>,
}

impl Texts {
    fn of(interface: &Interface, found: &[Interface]) -> Self {
        let addresses: Vec<_> = interface.addresses.iter().map(|a| a.to_string()).collect();
        let known = |text: &Option<String>| c_text(text.as_deref().unwrap_or_default());
        Self {
            name: c_text(&interface.name),
            kind: c_text(&interface.kind.to_string()),
            addresses: c_text(&addresses.join(",")),
            pci_address: known(&interface.pci_address),
            driver: known(&interface.driver),
            why_not: interface
                .usable_among(found)
                .err()
                .map(|why| c_text(&why.to_string())),
        }
    }

    fn device(&self, interface: &Interface) -> tcpx_device {
        tcpx_device {
            size: size_of::<tcpx_device>(),
            name: self.name.as_ptr(),
            kind: self.kind.as_ptr(),
            addresses: self.addresses.as_ptr(),
            pci_address: self.pci_address.as_ptr(),
            driver: self.driver.as_ptr(),
            why_not: self.why_not.as_ref().map_or(null(), |why| why.as_ptr()),
            mtu: interface.mtu,
            speed_mbps: interface.speed_mbps.unwrap_or(0),
            numa_node: interface
                .numa_node
                .and_then(|node| i32::try_from(node).ok())
                .unwrap_or(-1),
        }
    }
}
