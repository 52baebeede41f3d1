//! Reads from sysfs the hardware behind a link.

use std::fs;
use std::path::Path;

use crate::topology::{Location, read};

/// The hardware behind one link; a virtual link has none of it.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Hardware {
    pub(super) has_device: bool,
    /// Whether a device is among the lower links, as for a bond or a bridge.
    pub(super) has_device_below: bool,
    pub(super) speed_mbps: Option<u32>,
    pub(super) numa_node: Option<u32>,
    pub(super) pci_address: Option<String>,
    pub(super) driver: Option<String>,
    /// The location of the device, or of the devices below; empty for a link without any.
    pub(super) locations: Vec<Location>,
}

/// Reads what `root` says about the interface called `name`.
///
/// A sysfs mount shows the network namespace it was mounted in, which may be another one: if the
/// index differs, the name belongs to another interface and nothing of it is used.
pub(super) fn hardware(root: &Path, name: &str, index: u32) -> Hardware {
    let link = root.join("class/net").join(name);
    if read::<u32>(&link.join("ifindex")) != Some(index) {
        return Hardware::default();
    }
    // The kernel reports -1, or its unsigned form, for an unknown speed.
    let speed_mbps = read::<i64>(&link.join("speed"))
        .and_then(|speed| u32::try_from(speed).ok())
        .filter(|&speed| speed > 0 && speed != u32::MAX);
    let locations = Location::of_link(root, name);
    let Ok(device) = fs::canonicalize(link.join("device")) else {
        return Hardware {
            has_device_below: has_device_below(&link, MAX_LEVELS),
            speed_mbps,
            numa_node: shared_node(&locations),
            locations,
            ..Hardware::default()
        };
    };
    let location = locations.first();
    Hardware {
        has_device: true,
        has_device_below: false,
        speed_mbps,
        numa_node: shared_node(&locations),
        pci_address: location.and_then(|l| l.pci_address()).map(str::to_owned),
        driver: fs::read_link(device.join("driver"))
            .ok()
            .and_then(|target| Some(target.file_name()?.to_str()?.to_owned())),
        locations,
    }
}

/// Number of levels searched below a link: a VLAN on a bridge on a bond on a device.
const MAX_LEVELS: usize = 4;

/// Returns whether a link has a device below it, at most `levels` down.
fn has_device_below(link: &Path, levels: usize) -> bool {
    let Ok(entries) = fs::read_dir(link) else {
        return false;
    };
    let is_lower =
        |entry: &fs::DirEntry| entry.file_name().as_encoded_bytes().starts_with(b"lower_");
    let mut lower = entries.flatten().filter(is_lower);
    lower.any(|entry| {
        let path = entry.path();
        path.join("device").exists() || (levels > 1 && has_device_below(&path, levels - 1))
    })
}

/// Returns the NUMA node of all these devices, if they are on one.
fn shared_node(locations: &[Location]) -> Option<u32> {
    let node = locations.first()?.numa_node?;
    let is_there = |location: &Location| location.numa_node == Some(node);
    locations.iter().all(is_there).then_some(node)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::tests::Tree;

    #[test]
    fn a_card_is_described() {
        let tree = Tree::new()
            .file("devices/pci0000:00/0000:06:00.0/numa_node", "1\n")
            .link(
                "devices/pci0000:00/0000:06:00.0/driver",
                "bus/pci/drivers/mlx5_core",
            )
            .file("class/net/eth1/ifindex", "3\n")
            .file("class/net/eth1/speed", "200000\n")
            .link("class/net/eth1/device", "devices/pci0000:00/0000:06:00.0");
        assert_eq!(
            hardware(tree.root(), "eth1", 3),
            Hardware {
                has_device: true,
                has_device_below: false,
                speed_mbps: Some(200_000),
                numa_node: Some(1),
                pci_address: Some("0000:06:00.0".into()),
                driver: Some("mlx5_core".into()),
                locations: vec![Location {
                    numa_node: Some(1),
                    pci_path: vec!["pci0000:00".into(), "0000:06:00.0".into()],
                }],
            }
        );
        // The same name in another namespace is another interface.
        assert_eq!(hardware(tree.root(), "eth1", 4), Hardware::default());
    }

    #[test]
    fn virtio_sits_on_a_pci_device_and_does_not_know_its_speed() {
        let tree = Tree::new()
            .file("devices/pci0000:00/0000:00:03.0/numa_node", "-1\n")
            .link(
                "devices/pci0000:00/0000:00:03.0/virtio2/driver",
                "bus/virtio/drivers/virtio_net",
            )
            .file("class/net/eth0/ifindex", "2")
            .file("class/net/eth0/speed", "-1\n")
            .link(
                "class/net/eth0/device",
                "devices/pci0000:00/0000:00:03.0/virtio2",
            );
        assert_eq!(
            hardware(tree.root(), "eth0", 2),
            Hardware {
                has_device: true,
                pci_address: Some("0000:00:03.0".into()),
                driver: Some("virtio_net".into()),
                locations: vec![Location {
                    numa_node: None,
                    pci_path: vec!["pci0000:00".into(), "0000:00:03.0".into()],
                }],
                ..Hardware::default()
            }
        );
    }

    #[test]
    fn a_veth_has_a_speed_and_no_device() {
        let tree = Tree::new()
            .file("class/net/veth0/ifindex", "9")
            .file("class/net/veth0/speed", "10000");
        let expected = Hardware {
            speed_mbps: Some(10_000),
            ..Hardware::default()
        };
        assert_eq!(hardware(tree.root(), "veth0", 9), expected);
    }

    #[test]
    fn a_bridge_over_a_card_is_told_from_one_for_containers() {
        let tree = Tree::new()
            .file("class/net/eth0/ifindex", "2")
            .link("class/net/eth0/device", "devices/pci0000:00/0000:00:03.0")
            .file("class/net/bond0/ifindex", "3")
            .link("class/net/bond0/lower_eth0", "class/net/eth0")
            .file("class/net/br0/ifindex", "4")
            .link("class/net/br0/lower_bond0", "class/net/bond0")
            .file("class/net/veth0/ifindex", "5")
            .file("class/net/docker0/ifindex", "6")
            .link("class/net/docker0/lower_veth0", "class/net/veth0");
        assert!(hardware(tree.root(), "br0", 4).has_device_below);
        assert!(!hardware(tree.root(), "docker0", 6).has_device_below);
    }

    #[test]
    fn garbage_is_unknown() {
        let tree = Tree::new()
            .file("class/net/eth0/ifindex", "2")
            .file("class/net/eth0/speed", "fast")
            .link("class/net/eth0/device", "devices/platform/thing");
        let expected = Hardware {
            has_device: true,
            ..Hardware::default()
        };
        assert_eq!(hardware(tree.root(), "eth0", 2), expected);
        assert_eq!(
            hardware(Path::new("/nonexistent"), "eth0", 2),
            Hardware::default()
        );
    }
}
