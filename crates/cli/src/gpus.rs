//! Where GPUs and network interfaces sit, and which of them are near each other.

use std::fmt;
use std::fs;
use std::path::{Component, Path};

use serde::Serialize;
use tcpx::cuda::DeviceInfo;
use tcpx_net::interfaces::Interface;

/// How far the bytes of a GPU travel to an interface, nearest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Distance {
    /// Behind the same PCI bridge.
    SameSwitch,
    /// Below the same PCI root.
    SameRoot,
    /// On the same NUMA node.
    SameNode,
    /// On another NUMA node: every byte crosses the link between CPUs.
    OtherNode,
    /// The machine does not say, as virtual ones do not.
    Unknown,
}

impl fmt::Display for Distance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Distance::SameSwitch => "same PCI switch",
            Distance::SameRoot => "same PCI root",
            Distance::SameNode => "same NUMA node",
            Distance::OtherNode => "another NUMA node",
            Distance::Unknown => "distance unknown",
        })
    }
}

/// Where a device sits.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Location {
    /// The NUMA node, on machines that have several.
    pub(crate) numa_node: Option<u32>,
    /// The way from its PCI root, such as `pci0000:00`, over bridges to the device itself; empty
    /// where it is not known.
    pub(crate) pci_path: Vec<String>,
}

impl Location {
    fn distance(&self, other: &Location) -> Distance {
        let shared = self
            .pci_path
            .iter()
            .zip(&other.pci_path)
            .take_while(|(ours, theirs)| ours == theirs)
            .count();
        match (shared, self.numa_node, other.numa_node) {
            (2.., ..) => Distance::SameSwitch,
            (1, ..) => Distance::SameRoot,
            (0, Some(ours), Some(theirs)) if ours == theirs => Distance::SameNode,
            (0, Some(_), Some(_)) => Distance::OtherNode,
            _ => Distance::Unknown,
        }
    }
}

/// The interfaces nearest to a device, in their order, and how near they are. None where none of
/// them has a place.
pub(crate) fn nearest<'n>(
    device: &Location,
    interfaces: &'n [(String, Location)],
) -> Option<(Distance, Vec<&'n str>)> {
    let distances = || {
        interfaces
            .iter()
            .map(|(name, location)| (device.distance(location), name.as_str()))
    };
    let least = distances().map(|(distance, _)| distance).min()?;
    if least == Distance::Unknown {
        return None;
    }
    let names = distances().filter(|(distance, _)| *distance == least);
    Some((least, names.map(|(_, name)| name).collect()))
}

/// Where a GPU sits.
pub(crate) fn of_gpu(gpu: &DeviceInfo) -> Location {
    Location {
        numa_node: gpu.numa_node,
        pci_path: pci_path(&gpu.pci_bus_id),
    }
}

/// Where the interfaces sit that have hardware behind them.
pub(crate) fn of_interfaces(interfaces: &[Interface]) -> Vec<(String, Location)> {
    interfaces
        .iter()
        .filter(|interface| !interface.is_loopback())
        .map(|interface| {
            let path = interface.pci_address.as_deref().map(pci_path);
            let location = Location {
                numa_node: interface.numa_node,
                pci_path: path.unwrap_or_default(),
            };
            (interface.name.clone(), location)
        })
        .collect()
}

/// What sysfs knows of a PCI address.
fn pci_path(address: &str) -> Vec<String> {
    fs::canonicalize(Path::new("/sys/bus/pci/devices").join(address))
        .map(|path| below_root(&path))
        .unwrap_or_default()
}

/// `/sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0` → from the root on.
fn below_root(path: &Path) -> Vec<String> {
    path.components()
        .filter_map(|component| match component {
            Component::Normal(name) => name.to_str(),
            _ => None,
        })
        .skip_while(|name| !name.starts_with("pci"))
        .map(str::to_owned)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(numa_node: Option<u32>, path: &str) -> Location {
        Location {
            numa_node,
            pci_path: below_root(Path::new(path)),
        }
    }

    fn interfaces(all: &[(&str, Location)]) -> Vec<(String, Location)> {
        all.iter()
            .map(|(name, location)| ((*name).to_owned(), location.clone()))
            .collect()
    }

    #[test]
    fn paths_begin_at_the_root() {
        let location = at(None, "/sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0");
        assert_eq!(
            location.pci_path,
            ["pci0000:00", "0000:00:01.0", "0000:01:00.0"]
        );
        assert!(below_root(Path::new("/sys/devices/virtual/net/lo")).is_empty());
    }

    #[test]
    fn the_same_switch_is_nearer_than_the_root_than_the_node() {
        let gpu = at(Some(0), "/sys/devices/pci0000:10/0000:10:01.0/0000:11:00.0");
        let all = interfaces(&[
            ("far", at(Some(1), "/sys/devices/pci0000:80/0000:80:01.0")),
            ("node", at(Some(0), "/sys/devices/pci0000:20/0000:20:01.0")),
            ("root", at(Some(0), "/sys/devices/pci0000:10/0000:10:02.0")),
            (
                "switch",
                at(Some(0), "/sys/devices/pci0000:10/0000:10:01.0/0000:12:00.0"),
            ),
        ]);
        let near = |count: usize| nearest(&gpu, &all[..count]).unwrap();
        assert_eq!(near(4), (Distance::SameSwitch, vec!["switch"]));
        assert_eq!(near(3), (Distance::SameRoot, vec!["root"]));
        assert_eq!(near(2), (Distance::SameNode, vec!["node"]));
        assert_eq!(near(1), (Distance::OtherNode, vec!["far"]));
    }

    #[test]
    fn all_that_are_equally_near_are_named_in_order() {
        let gpu = at(Some(1), "/sys/devices/pci0000:80/0000:80:01.0");
        let node = |node| at(Some(node), "");
        let all = interfaces(&[("eth3", node(1)), ("eth0", node(0)), ("eth1", node(1))]);
        assert_eq!(
            nearest(&gpu, &all),
            Some((Distance::SameNode, vec!["eth3", "eth1"]))
        );
    }

    #[test]
    fn what_is_not_known_is_not_guessed() {
        let gpu = at(None, "/sys/devices/pci0000:80/0000:80:01.0");
        assert_eq!(nearest(&gpu, &[]), None);
        let virtual_one = interfaces(&[("eth0", Location::default())]);
        assert_eq!(nearest(&gpu, &virtual_one), None);
        // One that is known wins over one that is not, however far.
        let gpu = at(Some(0), "");
        let all = interfaces(&[("eth0", Location::default()), ("eth1", at(Some(1), ""))]);
        assert_eq!(
            nearest(&gpu, &all),
            Some((Distance::OtherNode, vec!["eth1"]))
        );
    }
}
