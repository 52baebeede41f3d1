//! What sysfs knows about the hardware behind a link.

use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// The hardware behind one link; a virtual link has none of it.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Hardware {
    pub(super) has_device: bool,
    pub(super) speed_mbps: Option<u32>,
    pub(super) numa_node: Option<u32>,
    pub(super) pci_address: Option<String>,
    pub(super) driver: Option<String>,
}

/// Reads what `root` says about the interface called `name`.
///
/// A sysfs mount shows the network namespace it was mounted in, which need not be ours: where the
/// index differs, the name stands for somebody else's interface and nothing of it is used.
pub(super) fn hardware(root: &Path, name: &str, index: u32) -> Hardware {
    let link = root.join("class/net").join(name);
    if read::<u32>(&link.join("ifindex")) != Some(index) {
        return Hardware::default();
    }
    // The kernel says -1, or its unsigned twin, when it does not know.
    let speed_mbps = read::<i64>(&link.join("speed"))
        .and_then(|speed| u32::try_from(speed).ok())
        .filter(|&speed| speed > 0 && speed != u32::MAX);
    let Ok(device) = fs::canonicalize(link.join("device")) else {
        return Hardware {
            speed_mbps,
            ..Hardware::default()
        };
    };
    Hardware {
        has_device: true,
        speed_mbps,
        // A virtio device knows its driver and its PCI parent knows the node: look upwards.
        numa_node: upwards(&device, root)
            .find_map(|path| read::<i32>(&path.join("numa_node")))
            .and_then(|node| u32::try_from(node).ok()),
        pci_address: upwards(&device, root).find_map(|path| {
            path.file_name()?
                .to_str()
                .filter(|n| is_pci(n))
                .map(str::to_owned)
        }),
        driver: fs::read_link(device.join("driver"))
            .ok()
            .and_then(|target| Some(target.file_name()?.to_str()?.to_owned())),
    }
}

/// `device` and its parents, as far as `root`.
fn upwards(device: &Path, root: &Path) -> impl Iterator<Item = PathBuf> {
    let root = fs::canonicalize(root).unwrap_or_else(|_| root.to_owned());
    let parents: Vec<PathBuf> = device
        .ancestors()
        .take_while(|path| path.starts_with(&root) && *path != root)
        .map(Path::to_owned)
        .collect();
    parents.into_iter()
}

/// Whether `name` reads domain:bus:device.function, as in `0000:06:00.0`.
fn is_pci(name: &str) -> bool {
    let hex = |part: &str, len: usize| {
        part.len() >= len && part.bytes().all(|byte| byte.is_ascii_hexdigit())
    };
    let Some((rest, function)) = name.rsplit_once('.') else {
        return false;
    };
    let parts: Vec<&str> = rest.split(':').collect();
    matches!(parts[..], [domain, bus, device]
        if hex(domain, 4) && hex(bus, 2) && hex(device, 2) && hex(function, 1))
}

/// The one value in a sysfs file; reading may fail with an error of the driver's own.
fn read<T: FromStr>(path: &Path) -> Option<T> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A sysfs tree in a temporary folder.
    struct Tree(tempfile::TempDir);

    impl Tree {
        fn new() -> Self {
            Tree(tempfile::tempdir().unwrap())
        }

        fn root(&self) -> &Path {
            self.0.path()
        }

        fn file(self, path: &str, text: &str) -> Self {
            let path = self.root().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
            self
        }

        fn link(self, path: &str, to: &str) -> Self {
            let (path, to) = (self.root().join(path), self.root().join(to));
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::create_dir_all(&to).unwrap();
            symlink(to, path).unwrap();
            self
        }
    }

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
                speed_mbps: Some(200_000),
                numa_node: Some(1),
                pci_address: Some("0000:06:00.0".into()),
                driver: Some("mlx5_core".into()),
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

    #[test]
    fn pci_addresses_are_told_from_other_names() {
        assert!(is_pci("0000:06:00.0") && is_pci("10000:e1:00.1"));
        for name in [
            "pci0000:00",
            "virtio2",
            "0000:06:00",
            "0000:06.0",
            "06:00.0",
            "",
        ] {
            assert!(!is_pci(name), "{name}");
        }
    }
}
