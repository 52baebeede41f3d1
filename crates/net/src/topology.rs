//! Locates devices in the machine, and finds the network interfaces nearest to a GPU.
//!
//! A [`Location`] is read from sysfs: the NUMA node and the PCI path of a device. [`Distance`]
//! compares two of them as NCCL does (PIX, PXB, PHB, NODE, SYS), and [`Choice`] selects the
//! interfaces for a GPU's bytes. Nothing is guessed: where sysfs has no answer, as on many virtual
//! machines, all interfaces are equal.
//!
//! Every function takes the root of sysfs, `/sys` ([`SYSFS`]) outside of tests.

#[cfg(test)]
pub(crate) mod tests;

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::interfaces::Interface;

/// The usual mount point of sysfs.
pub const SYSFS: &str = "/sys";

/// Maximum levels of stacked interfaces that are followed: a VLAN on a bond is two.
const MAX_LEVELS: usize = 8;

/// NVIDIA's PCI vendor number, as sysfs writes it.
const NVIDIA: &str = "0x10de";

/// PCI class of display controllers, as sysfs writes it; 3D controllers included.
const DISPLAY: &str = "0x03";

/// The distance that bytes travel between two devices, nearest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Distance {
    /// Below the same PCI switch, with nothing but its ports between (NCCL: PIX).
    SameSwitch,
    /// Below the same port of a PCI root, through several switches (NCCL: PXB).
    SeveralSwitches,
    /// Below the same PCI root (NCCL: PHB).
    SameRoot,
    /// On the same NUMA node (NCCL: NODE).
    SameNode,
    /// On different NUMA nodes: every byte crosses the link between CPUs (NCCL: SYS).
    OtherNode,
    /// The distance is not known.
    Unknown,
}

impl Distance {
    /// All distances, nearest first.
    pub const ALL: [Self; 6] = [
        Self::SameSwitch,
        Self::SeveralSwitches,
        Self::SameRoot,
        Self::SameNode,
        Self::OtherNode,
        Self::Unknown,
    ];

    /// Names the distance for programs, such as `same_switch`.
    #[must_use]
    pub fn key(self) -> &'static str {
        match self {
            Self::SameSwitch => "same_switch",
            Self::SeveralSwitches => "several_switches",
            Self::SameRoot => "same_root",
            Self::SameNode => "same_node",
            Self::OtherNode => "other_node",
            Self::Unknown => "unknown",
        }
    }

    /// Returns whether bytes stay on one NUMA node. Devices farther apart are never near.
    #[must_use]
    pub fn is_near(self) -> bool {
        self <= Self::SameNode
    }
}

impl fmt::Display for Distance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::SameSwitch => "same PCI switch",
            Self::SeveralSwitches => "several PCI switches",
            Self::SameRoot => "same PCI root",
            Self::SameNode => "same NUMA node",
            Self::OtherNode => "another NUMA node",
            Self::Unknown => "distance unknown",
        })
    }
}

/// The location of a device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Location {
    /// The NUMA node, on machines that have several.
    pub numa_node: Option<u32>,
    /// The path from the PCI root, such as `pci0000:00`, over bridges to the device itself, such as
    /// `0000:06:00.0`. Empty if unknown.
    pub pci_path: Vec<String>,
}

impl Location {
    /// Locates the device with this PCI address, such as `0000:06:00.0`.
    #[must_use]
    pub fn of_pci(sysfs: &Path, address: &str) -> Self {
        fs::canonicalize(sysfs.join("bus/pci/devices").join(address))
            .map(|device| Self::of_device(sysfs, &device))
            .unwrap_or_default()
    }

    /// Locates the device of this folder: a canonical path below `sysfs`.
    pub(crate) fn of_device(sysfs: &Path, device: &Path) -> Self {
        let root = fs::canonicalize(sysfs).unwrap_or_else(|_| sysfs.to_owned());
        let below = device.strip_prefix(&root).unwrap_or(device);
        let names = below.iter().filter_map(|name| name.to_str());
        Self {
            // Searches upwards: a virtio device has a driver, but its PCI parent has the node. The
            // kernel reports -1 for an unknown node.
            numa_node: upwards(device, &root)
                .find_map(|path| read::<i32>(&path.join("numa_node")))
                .and_then(|node| u32::try_from(node).ok()),
            pci_path: names
                .filter(|name| is_root(name) || is_pci(name))
                .map(str::to_owned)
                .collect(),
        }
    }

    /// Locates the hardware of a network interface: its own device, or the devices below a bond, a
    /// VLAN and the like. Empty if unknown.
    pub(crate) fn of_link(sysfs: &Path, name: &str) -> Vec<Self> {
        let mut found = Vec::new();
        let link = sysfs.join("class/net").join(name);
        collect(sysfs, &link, MAX_LEVELS, &mut found);
        if found.iter().all(|location| *location == Self::default()) {
            found.clear();
        }
        found
    }

    /// Returns the PCI address of the device itself.
    #[must_use]
    pub fn pci_address(&self) -> Option<&str> {
        self.pci_path
            .last()
            .map(String::as_str)
            .filter(|name| is_pci(name))
    }

    /// Returns the distance between two devices.
    #[must_use]
    pub fn distance(&self, other: &Self) -> Distance {
        let nodes = self.numa_node.zip(other.numa_node);
        if nodes.is_some_and(|(ours, theirs)| ours != theirs) {
            return Distance::OtherNode;
        }
        let pairs = self.pci_path.iter().zip(&other.pci_path);
        let shared = pairs.take_while(|(ours, theirs)| ours == theirs).count();
        // A port of the switch and the device behind it.
        let is_below_one_switch = |path: &[String]| path.len() <= shared + 2;
        match shared {
            0 if nodes.is_some() => Distance::SameNode,
            0 => Distance::Unknown,
            1 => Distance::SameRoot,
            _ if is_below_one_switch(&self.pci_path) && is_below_one_switch(&other.pci_path) => {
                Distance::SameSwitch
            }
            _ => Distance::SeveralSwitches,
        }
    }
}

/// Adds the locations of the devices behind the interface of this folder.
fn collect(sysfs: &Path, link: &Path, levels: usize, found: &mut Vec<Location>) {
    if let Ok(device) = fs::canonicalize(link.join("device")) {
        return found.push(Location::of_device(sysfs, &device));
    }
    let lower = lower_links(link);
    if levels == 0 || lower.is_empty() {
        // No hardware, or nothing that names the lower links.
        return found.push(Location::default());
    }
    for link in lower {
        collect(sysfs, &link, levels - 1, found);
    }
}

/// Returns the interfaces directly below one, in the order of their names.
fn lower_links(link: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(link) else {
        return Vec::new();
    };
    let is_lower = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str());
        name.is_some_and(|name| name.starts_with("lower_"))
    };
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let mut lower: Vec<PathBuf> = paths.filter(is_lower).collect();
    lower.sort();
    lower
}

/// Locates all NVIDIA GPUs on the PCI bus, including those that this process does not use.
#[must_use]
pub fn gpus(sysfs: &Path) -> Vec<Location> {
    let Ok(entries) = fs::read_dir(sysfs.join("bus/pci/devices")) else {
        return Vec::new();
    };
    let begins = |path: &Path, file: &str, with: &str| {
        fs::read_to_string(path.join(file)).is_ok_and(|text| text.starts_with(with))
    };
    let devices = entries.filter_map(|entry| fs::canonicalize(entry.ok()?.path()).ok());
    devices
        .filter(|path| begins(path, "class", DISPLAY) && begins(path, "vendor", NVIDIA))
        .map(|path| Location::of_device(sysfs, &path))
        .collect()
}

/// Selects the interfaces for the bytes of a GPU: the nearest ones, or all of them if none is near
/// or all are equally near.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// The distance of each interface.
    pub distances: Vec<Distance>,
}

impl Choice {
    /// Compares interfaces, each given by the locations of its hardware. An interface with several
    /// devices, such as a bond, is as far as its farthest device: bytes use all of them.
    pub fn new<'a>(gpu: &Location, interfaces: impl IntoIterator<Item = &'a [Location]>) -> Self {
        let farthest = |devices: &[Location]| {
            let distances = devices.iter().map(|device| gpu.distance(device));
            distances.max().unwrap_or(Distance::Unknown)
        };
        Self {
            distances: interfaces.into_iter().map(farthest).collect(),
        }
    }

    /// Does what [`Choice::new`] does, for discovered interfaces.
    #[must_use]
    pub fn among(gpu: &Location, interfaces: &[Interface]) -> Self {
        Self::new(gpu, interfaces.iter().map(|i| i.locations.as_slice()))
    }

    /// Returns the shortest distance; unknown if there is no interface.
    #[must_use]
    pub fn least(&self) -> Distance {
        let least = self.distances.iter().min();
        least.copied().unwrap_or(Distance::Unknown)
    }

    /// Returns whether some interfaces are left out.
    #[must_use]
    pub fn is_selective(&self) -> bool {
        (0..self.distances.len()).any(|index| !self.contains(index))
    }

    /// Returns whether the interface at this position is used.
    #[must_use]
    pub fn contains(&self, index: usize) -> bool {
        let least = self.least();
        !least.is_near() || self.distances.get(index) == Some(&least)
    }

    /// Returns the positions of the interfaces that are used.
    pub fn chosen(&self) -> impl Iterator<Item = usize> {
        (0..self.distances.len()).filter(|&index| self.contains(index))
    }
}

/// `device` and its parents, as far as `root`.
fn upwards<'a>(device: &'a Path, root: &'a Path) -> impl Iterator<Item = &'a Path> {
    let parents = device.ancestors();
    parents.take_while(move |path| path.starts_with(root) && *path != root)
}

/// Returns whether `name` is a PCI root, as in `pci0000:00`.
fn is_root(name: &str) -> bool {
    name.strip_prefix("pci").is_some_and(|rest| {
        let parts = rest.split_once(':');
        parts.is_some_and(|(domain, bus)| is_hex(domain, 4) && is_hex(bus, 2))
    })
}

/// Returns whether `name` reads domain:bus:device.function, as in `0000:06:00.0`.
pub(crate) fn is_pci(name: &str) -> bool {
    let Some((rest, function)) = name.rsplit_once('.') else {
        return false;
    };
    let parts: Vec<&str> = rest.split(':').collect();
    matches!(parts[..], [domain, bus, device]
        if is_hex(domain, 4) && is_hex(bus, 2) && is_hex(device, 2) && is_hex(function, 1))
}

fn is_hex(part: &str, len: usize) -> bool {
    part.len() >= len && part.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Returns the one value in a sysfs file; reading may fail with an error of the driver's own.
pub(crate) fn read<T: FromStr>(path: &Path) -> Option<T> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}
