//! Explains which interfaces the memory of a GPU uses, and why.

use std::path::Path;

use serde::Serialize;
use tcpx::cuda::DeviceInfo;
use tcpx::{Config, GpuLocality, TransportKind};
use tcpx_net::interfaces::Interface;
use tcpx_net::topology::{Choice, Distance, Location, SYSFS};

/// Returns the location of a GPU.
pub(crate) fn location(gpu: &DeviceInfo) -> Location {
    Location::of_pci(Path::new(SYSFS), &gpu.pci_bus_id)
}

/// The interfaces that transfers of a GPU's memory use.
#[derive(Debug, Serialize)]
pub(crate) struct Nearest {
    /// The interfaces in use.
    pub(crate) interfaces: Vec<String>,
    /// The distance of the nearest one.
    distance: &'static str,
    /// The reason for the choice.
    why: String,
    /// The distance of each interface that carries lanes.
    distances: Vec<Far>,
}

#[derive(Debug, Serialize)]
struct Far {
    interface: String,
    distance: &'static str,
}

impl Nearest {
    /// Chooses among the interfaces that carry lanes, as a session with these settings does. `None`
    /// if there are none.
    pub(crate) fn choose(
        gpu: &Location,
        interfaces: &[Interface],
        config: &Config,
    ) -> Option<Self> {
        if interfaces.is_empty() {
            return None;
        }
        let choice = Choice::among(gpu, interfaces);
        let nearest = why(&choice, interfaces);
        let all = |why| (interfaces.iter().collect(), why);
        let (used, why): (Vec<&Interface>, String) = if config.transport() == TransportKind::Plugin
        {
            let names = choice.chosen().map(|index| interfaces[index].name.as_str());
            let names = names.collect::<Vec<_>>().join(", ");
            all(format!(
                "the plugin chooses its device; nearest: {names} ({nearest})"
            ))
        } else if config.gpu_locality() == GpuLocality::Off {
            all("all are used, since gpu_locality is off".into())
        } else {
            let used = choice.chosen().map(|index| &interfaces[index]);
            (used.collect(), nearest)
        };
        let far = |(interface, distance): (&Interface, &Distance)| Far {
            interface: interface.name.clone(),
            distance: distance.key(),
        };
        Some(Self {
            interfaces: used.into_iter().map(|i| i.name.clone()).collect(),
            distance: choice.least().key(),
            why,
            distances: interfaces.iter().zip(&choice.distances).map(far).collect(),
        })
    }

    /// Returns the table cell: the interfaces, and the reason.
    pub(crate) fn lines(&self) -> String {
        format!("{}\n{}", self.interfaces.join(", "), self.why)
    }
}

fn why(choice: &Choice, interfaces: &[Interface]) -> String {
    let least = choice.least();
    if choice.is_selective() {
        let named = interfaces.iter().zip(&choice.distances);
        let farther = named.filter(|(_, distance)| **distance != least);
        let farther =
            farther.map(|(interface, distance)| format!("{} ({distance})", interface.name));
        return format!(
            "{least}; farther are {}",
            farther.collect::<Vec<_>>().join(", ")
        );
    }
    if choice.distances.iter().all(|distance| *distance == least) {
        return match interfaces {
            [_] => least.to_string(),
            _ => format!("all alike: {least}"),
        };
    }
    "none is near: all are used".into()
}

#[cfg(test)]
pub(crate) mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use tcpx_net::interfaces::{InterfaceAddress, InterfaceKind};

    use super::*;

    /// A simulated sysfs.
    pub(crate) struct Tree(tempfile::TempDir);

    impl Tree {
        pub(crate) fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        /// Adds a PCI device, and returns its location.
        pub(crate) fn device(&self, path: &str, node: i32) -> Location {
            let device = self.0.path().join("devices").join(path);
            fs::create_dir_all(&device).unwrap();
            fs::write(device.join("numa_node"), format!("{node}\n")).unwrap();
            let (_, address) = path.rsplit_once('/').unwrap();
            let all = self.0.path().join("bus/pci/devices");
            fs::create_dir_all(&all).unwrap();
            symlink(&device, all.join(address)).unwrap();
            Location::of_pci(self.0.path(), address)
        }

        /// Returns the NICs and the GPUs of an A3: below each of four switches, two to a socket,
        /// one NIC and two GPUs.
        pub(crate) fn a3(&self) -> (Vec<Interface>, Vec<Location>) {
            let (mut nics, mut gpus) = (Vec::new(), Vec::new());
            for switch in 1..=4 {
                let above = format!("pci0000:{switch}0/0000:{switch}0:01.0/0000:{switch}1:00.0");
                let below = |port: u32| {
                    let path = format!(
                        "{above}/0000:{switch}2:0{port}.0/0000:{switch}{}:00.0",
                        port + 3
                    );
                    self.device(&path, (switch - 1) / 2)
                };
                gpus.extend([below(0), below(1)]);
                nics.push(nic(&format!("eth{switch}"), vec![below(2)]));
            }
            (nics, gpus)
        }
    }

    pub(crate) fn nic(name: &str, locations: Vec<Location>) -> Interface {
        let location = locations.first();
        Interface {
            index: 1,
            name: name.into(),
            up: true,
            running: true,
            kind: InterfaceKind::Physical,
            addresses: vec![InterfaceAddress::new([10, 0, 0, 1].into(), 24)],
            mtu: 1500,
            speed_mbps: Some(200_000),
            numa_node: location.and_then(|l| l.numa_node),
            pci_address: location.and_then(|l| l.pci_address()).map(str::to_owned),
            driver: None,
            locations,
        }
    }

    fn words(gpu: &Location, interfaces: &[Interface]) -> String {
        let nearest = Nearest::choose(gpu, interfaces, &Config::defaults());
        nearest.unwrap().lines()
    }

    #[test]
    fn on_an_a3_each_gpu_has_its_nic_and_a_reason() {
        let tree = Tree::new();
        let (nics, gpus) = tree.a3();
        assert_eq!(
            words(&gpus[0], &nics),
            "eth1\nsame PCI switch; farther are eth2 (same NUMA node), eth3 (another NUMA node), \
             eth4 (another NUMA node)"
        );
        for (index, gpu) in gpus.iter().enumerate() {
            let nearest = Nearest::choose(gpu, &nics, &Config::defaults()).unwrap();
            assert_eq!(nearest.interfaces, [format!("eth{}", index / 2 + 1)]);
        }
        let document = Nearest::choose(&gpus[7], &nics, &Config::defaults());
        let document = serde_json::to_value(document).unwrap();
        assert_eq!(document["distance"], "same_switch");
        assert_eq!(document["distances"][2]["interface"], "eth3");
        assert_eq!(document["distances"][2]["distance"], "same_node");
    }

    #[test]
    fn where_none_is_nearer_than_others_all_are_used_and_why_is_said() {
        let tree = Tree::new();
        let (nics, gpus) = tree.a3();
        assert_eq!(
            words(&gpus[7], &nics[..2]),
            "eth1, eth2\nall alike: another NUMA node"
        );
        assert_eq!(words(&gpus[0], &nics[..1]), "eth1\nsame PCI switch");
        let nowhere = nic("ens4", Vec::new());
        let unknown = [nowhere.clone(), nic("ens5", Vec::new())];
        assert_eq!(
            words(&gpus[0], &unknown),
            "ens4, ens5\nall alike: distance unknown"
        );
        let mixed = [nics[3].clone(), nowhere];
        assert_eq!(
            words(&gpus[0], &mixed),
            "eth4, ens4\nnone is near: all are used"
        );
        assert!(Nearest::choose(&gpus[0], &[], &Config::defaults()).is_none());
    }

    #[test]
    fn settings_that_make_it_use_all_are_the_reason() {
        let tree = Tree::new();
        let (nics, gpus) = tree.a3();
        for (key, value, reason) in [
            ("gpu_locality", "off", "gpu_locality is off"),
            ("transport", "plugin", "nearest: eth1 (same PCI switch;"),
        ] {
            let config = Config::defaults().with(key, value).unwrap();
            let nearest = Nearest::choose(&gpus[0], &nics, &config).unwrap();
            assert_eq!(nearest.interfaces.len(), 4);
            assert!(nearest.why.contains(reason), "{}", nearest.why);
        }
    }
}
