//! Where devices sit in the machine, and which network interfaces are nearest to a GPU.
//!
//! A [`Location`] is read from sysfs: the NUMA node and the PCI path of a device. [`Distance`] compares
//! two of them as NCCL does (PIX, PXB, PHB, NODE, SYS), and [`Choice`] says which interfaces a GPU's
//! bytes should take. Nothing is guessed: where sysfs does not say, as on many virtual machines, all
//! interfaces are equal.
//!
//! Every function takes the root of sysfs, `/sys` ([`SYSFS`]) outside of tests.

#[cfg(test)]
pub(crate) mod tests;

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::interfaces::Interface;

/// Where sysfs is mounted on every Linux machine.
pub const SYSFS: &str = "/sys";

/// The most levels of interfaces on top of each other that are followed: a VLAN on a bond is two.
const MAX_LEVELS: usize = 8;

/// NVIDIA's PCI vendor number, as sysfs writes it.
const NVIDIA: &str = "0x10de";

/// PCI class of display controllers, as sysfs writes it; 3D controllers included.
const DISPLAY: &str = "0x03";

/// How far bytes travel between two devices, nearest first.
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
    /// The machine does not say.
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

    /// Whether bytes stay on one NUMA node. Among devices that are farther apart, none is near.
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

/// Where a device sits.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Location {
    /// The NUMA node, on machines that have several.
    pub numa_node: Option<u32>,
    /// The way from the PCI root, such as `pci0000:00`, over bridges to the device itself, such as
    /// `0000:06:00.0`. Empty where it is not known.
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
            // A virtio device knows its driver and its PCI parent knows the node: look upwards. The
            // kernel says -1 where it does not know.
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
    /// VLAN and the like. Empty where nothing is known.
    pub(crate) fn of_link(sysfs: &Path, name: &str) -> Vec<Self> {
        let mut found = Vec::new();
        let link = sysfs.join("class/net").join(name);
        collect(sysfs, &link, MAX_LEVELS, &mut found);
        if found.iter().all(|location| *location == Self::default()) {
            found.clear();
        }
        found
    }

    /// The PCI address of the device itself.
    #[must_use]
    pub fn pci_address(&self) -> Option<&str> {
        self.pci_path
            .last()
            .map(String::as_str)
            .filter(|name| is_pci(name))
    }

    /// Returns how far apart two devices are.
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
        // Something without hardware, or nothing that says what is below.
        return found.push(Location::default());
    }
    for link in lower {
        collect(sysfs, &link, levels - 1, found);
    }
}

/// The interfaces directly below one, in the order of their names.
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

/// Locates all NVIDIA GPUs of the machine, by what PCI says of them; also those that this process
/// does not use.
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

/// Which of several interfaces the bytes of a GPU take: the nearest ones, or all of them where none is
/// near, or all are equally near.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// The distance of each interface.
    pub distances: Vec<Distance>,
}

impl Choice {
    /// Compares interfaces, each given by the locations of its hardware. One with several devices, as
    /// a bond, is as far as the farthest of them: bytes take all of them.
    pub fn new<'a>(gpu: &Location, interfaces: impl IntoIterator<Item = &'a [Location]>) -> Self {
        let farthest = |devices: &[Location]| {
            let distances = devices.iter().map(|device| gpu.distance(device));
            distances.max().unwrap_or(Distance::Unknown)
        };
        Self {
            distances: interfaces.into_iter().map(farthest).collect(),
        }
    }

    /// As [`Choice::new`], among interfaces that were found.
    #[must_use]
    pub fn among(gpu: &Location, interfaces: &[Interface]) -> Self {
        Self::new(gpu, interfaces.iter().map(|i| i.locations.as_slice()))
    }

    /// The least distance; unknown where there is no interface.
    #[must_use]
    pub fn least(&self) -> Distance {
        let least = self.distances.iter().min();
        least.copied().unwrap_or(Distance::Unknown)
    }

    /// Whether some interfaces are left out.
    #[must_use]
    pub fn is_selective(&self) -> bool {
        (0..self.distances.len()).any(|index| !self.contains(index))
    }

    /// Whether the interface at this position is used.
    #[must_use]
    pub fn contains(&self, index: usize) -> bool {
        let least = self.least();
        !least.is_near() || self.distances.get(index) == Some(&least)
    }

    /// The positions of the interfaces that are used.
    pub fn chosen(&self) -> impl Iterator<Item = usize> {
        (0..self.distances.len()).filter(|&index| self.contains(index))
    }
}

/// `device` and its parents, as far as `root`.
fn upwards<'a>(device: &'a Path, root: &'a Path) -> impl Iterator<Item = &'a Path> {
    let parents = device.ancestors();
    parents.take_while(move |path| path.starts_with(root) && *path != root)
}

/// Whether `name` is a PCI root, as in `pci0000:00`.
fn is_root(name: &str) -> bool {
    name.strip_prefix("pci").is_some_and(|rest| {
        let parts = rest.split_once(':');
        parts.is_some_and(|(domain, bus)| is_hex(domain, 4) && is_hex(bus, 2))
    })
}

/// Whether `name` reads domain:bus:device.function, as in `0000:06:00.0`.
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

/// The one value in a sysfs file; reading may fail with an error of the driver's own.
pub(crate) fn read<T: FromStr>(path: &Path) -> Option<T> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}
