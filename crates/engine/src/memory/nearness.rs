//! Which of a session's interfaces are nearest to a device, and the NUMA node of the workers.
//!
//! Interfaces are compared once, when memory of a device is first registered. From then on a
//! transfer and a lane each have an [`InterfaceSet`]: checking whether a lane is near compares two
//! numbers.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use tcpx_cuda::Device;
use tcpx_net::interfaces::Interface;
use tcpx_net::topology::{self, Choice, Location};

use crate::config::{Config, GpuLocality, TransportKind};
use crate::log::limited;
use crate::sync::{Mutex, Rank};

/// Value of `node` for workers that run anywhere.
const ANYWHERE: u32 = u32::MAX;

/// A set of a session's interfaces. Interfaces from position 63 on share one bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InterfaceSet(u64);

impl InterfaceSet {
    /// Every interface, including unknown ones.
    pub(crate) const ALL: Self = Self(u64::MAX);

    /// Returns the set of the interface at this position among the interfaces that carry lanes.
    pub(crate) fn one(index: usize) -> Self {
        Self(1 << index.min(63))
    }

    /// Returns the interfaces in either set.
    pub(crate) fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Returns whether the two sets have a common interface.
    #[inline]
    pub(crate) fn meets(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }
}

/// Locations of a session's interfaces, and the interfaces that memory of each device uses.
pub(crate) struct Nearness {
    sysfs: PathBuf,
    /// Interfaces that carry lanes; empty if locality is disabled.
    interfaces: Vec<Placed>,
    /// Every GPU of this machine uses at least one in `parts` of the interfaces.
    parts: usize,
    devices: Mutex<Vec<Known>>,
    /// The NUMA node of all devices and their interfaces, or `ANYWHERE`.
    node: AtomicU32,
}

struct Placed {
    name: String,
    addresses: Vec<IpAddr>,
    locations: Vec<Location>,
}

/// A device whose memory was registered.
struct Known {
    identity: usize,
    near: InterfaceSet,
    /// The node of the device and all of its interfaces, if they share one.
    node: Option<u32>,
}

impl Nearness {
    /// Locates the interfaces that carry a session's lanes, according to `sysfs`.
    pub(crate) fn new(config: &Config, interfaces: &[Interface], sysfs: &Path) -> Self {
        let is_on = config.gpu_locality() == GpuLocality::Auto
            // A plugin's devices carry the payload,
            // independent of the interface of the lane's stream.
            && config.transport() == TransportKind::Tcp;
        let interfaces: Vec<Placed> = interfaces
            .iter()
            .filter(|_| is_on)
            .map(|interface| Placed {
                name: interface.name.clone(),
                addresses: interface.addresses.iter().map(|a| a.ip).collect(),
                locations: interface.locations.clone(),
            })
            .collect();
        let mut nearness = Self {
            sysfs: sysfs.to_owned(),
            interfaces,
            parts: 1,
            devices: Mutex::new(Rank::Leaf, Vec::new()),
            node: AtomicU32::new(ANYWHERE),
        };
        if nearness.interfaces.len() > 1 {
            let gpus = topology::gpus(sysfs);
            let used = gpus.iter().map(|gpu| nearness.choose(gpu).chosen().count());
            let least = used.min().unwrap_or(usize::MAX);
            nearness.parts = nearness.interfaces.len().div_ceil(least);
        }
        nearness
    }

    /// Returns the root of sysfs.
    pub(crate) fn sysfs(&self) -> &Path {
        &self.sysfs
    }

    /// Returns the divisor `parts`: every GPU of this machine uses at least one in `parts` of the
    /// interfaces; 1 if all GPUs use all interfaces.
    pub(crate) fn parts(&self) -> usize {
        self.parts
    }

    /// Returns how many of a connection's lanes run over these interfaces.
    pub(crate) fn lanes_over(&self, near: InterfaceSet, lanes: usize) -> usize {
        match near {
            InterfaceSet::ALL => lanes,
            InterfaceSet(bits) => {
                let used = bits.count_ones() as usize;
                (lanes * used).div_ceil(self.interfaces.len().max(1))
            }
        }
    }

    /// Returns the NUMA node of all devices and of the interfaces that their memory uses; `None` if
    /// they are on several nodes, or the node is unknown.
    #[inline]
    pub(crate) fn node(&self) -> Option<u32> {
        let node = self.node.load(Ordering::Relaxed);
        (node != ANYWHERE).then_some(node)
    }

    /// Returns the interface of a lane that leaves from this address. Returns all interfaces if the
    /// address is unknown, and for lanes within this machine, where interfaces make no difference.
    pub(crate) fn interface_at(&self, address: IpAddr, is_local: bool) -> InterfaceSet {
        let mut interfaces = self.interfaces.iter();
        let index = interfaces.position(|i| i.addresses.contains(&address));
        let index = index.filter(|_| !is_local);
        index.map_or(InterfaceSet::ALL, InterfaceSet::one)
    }

    /// Returns the interfaces that a device's memory uses.
    pub(crate) fn of(&self, device: &dyn Device) -> InterfaceSet {
        let mut devices = self.devices.lock();
        let mut known = devices.iter();
        if let Some(known) = known.find(|known| known.identity == device.identity()) {
            return known.near;
        }
        let known = self.look_at(device);
        let near = known.near;
        devices.push(known);
        let node = devices[0].node;
        let is_shared = devices.iter().all(|known| known.node == node);
        let node = node.filter(|_| is_shared).unwrap_or(ANYWHERE);
        self.node.store(node, Ordering::Relaxed);
        near
    }

    fn look_at(&self, device: &dyn Device) -> Known {
        let address = device.pci_bus_id().unwrap_or_default();
        let gpu = match address {
            "" => Location::default(),
            address => Location::of_pci(&self.sysfs, address),
        };
        let choice = self.choose(&gpu);
        let chosen = || choice.chosen().map(|index| &self.interfaces[index]);
        let near = match choice.is_selective() {
            true => choice
                .chosen()
                .map(InterfaceSet::one)
                .fold(InterfaceSet(0), InterfaceSet::union),
            false => InterfaceSet::ALL,
        };
        let is_there = |interface: &Placed| {
            let mut locations = interface.locations.iter();
            !interface.locations.is_empty() && locations.all(|l| l.numa_node == gpu.numa_node)
        };
        let is_one = chosen().next().is_some() && chosen().all(is_there);
        limited!(
            DEBUG,
            gpu = device.ordinal(),
            address,
            interfaces = ?chosen().map(|i| i.name.as_str()).collect::<Vec<_>>(),
            distance = %choice.least(),
            "memory of this GPU uses these interfaces"
        );
        Known {
            identity: device.identity(),
            near,
            node: gpu.numa_node.filter(|_| is_one),
        }
    }

    fn choose(&self, gpu: &Location) -> Choice {
        Choice::new(gpu, self.interfaces.iter().map(|i| i.locations.as_slice()))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use tcpx_cuda::StandIn;
    use tcpx_net::interfaces::{InterfaceAddress, InterfaceKind};

    use super::*;

    /// PCI addresses of a machine with two sockets:
    /// each socket has a GPU and a NIC, `eth0` on the first.
    pub(crate) const GPUS: [&str; 2] = ["0000:11:00.0", "0000:91:00.0"];
    const NICS: [&str; 2] = ["0000:01:00.0", "0000:81:00.0"];

    pub(crate) fn two_sockets() -> tempfile::TempDir {
        let tree = tempfile::tempdir().unwrap();
        for (node, address) in [GPUS, NICS].concat().into_iter().enumerate() {
            let device = tree
                .path()
                .join(format!("devices/pci0000:{node}0/{address}"));
            fs::create_dir_all(&device).unwrap();
            fs::write(device.join("numa_node"), format!("{}\n", node % 2)).unwrap();
            let class = if node < 2 { "0x030200" } else { "0x020000" };
            fs::write(device.join("class"), class).unwrap();
            fs::write(device.join("vendor"), "0x10de\n").unwrap();
            let all = tree.path().join("bus/pci/devices");
            fs::create_dir_all(&all).unwrap();
            symlink(&device, all.join(address)).unwrap();
        }
        tree
    }

    /// The NICs of [`two_sockets`], at 10.0.0.1 and 10.0.1.1.
    pub(crate) fn nics(sysfs: &Path) -> Vec<Interface> {
        let nic = |(index, address): (u32, &&str)| Interface {
            index,
            name: format!("eth{index}"),
            up: true,
            running: true,
            kind: InterfaceKind::Physical,
            addresses: vec![InterfaceAddress::new([10, 0, index as u8, 1].into(), 24)],
            mtu: 1500,
            speed_mbps: None,
            numa_node: None,
            pci_address: None,
            driver: None,
            locations: vec![Location::of_pci(sysfs, address)],
        };
        (0..).zip(&NICS).map(nic).collect()
    }

    fn gpu(index: u32) -> StandIn {
        StandIn::new(1).at(GPUS[index as usize], index)
    }

    #[test]
    fn memory_of_a_gpu_uses_the_interface_of_its_socket() {
        let tree = two_sockets();
        let nearness = Nearness::new(&Config::defaults(), &nics(tree.path()), tree.path());
        assert_eq!(nearness.parts(), 2);
        let lanes = |near| nearness.lanes_over(near, 9);
        assert_eq!(
            (lanes(InterfaceSet::ALL), lanes(InterfaceSet::one(1))),
            (9, 5)
        );
        for index in 0..2 {
            let device = gpu(index);
            let near = nearness.of(&device);
            // The second call finds the device already known.
            assert_eq!(nearness.of(&device), near);
            for other in 0..2 {
                let address = [10, 0, other as u8, 1].into();
                let interface = nearness.interface_at(address, false);
                assert_eq!(near.meets(interface), index == other);
                assert!(near.meets(nearness.interface_at(address, true)));
            }
            // A lane over an unknown interface is never excluded.
            let elsewhere = nearness.interface_at([10, 7, 7, 7].into(), false);
            assert!(near.meets(elsewhere));
        }
    }

    #[test]
    fn gpu_of_unknown_location_uses_all_interfaces() {
        let tree = two_sockets();
        let nearness = Nearness::new(&Config::defaults(), &nics(tree.path()), tree.path());
        assert_eq!(nearness.of(&StandIn::new(1)), InterfaceSet::ALL);
        let nowhere = StandIn::new(1).at("0000:77:00.0", 0);
        assert_eq!(nearness.of(&nowhere), InterfaceSet::ALL);
    }

    #[test]
    fn setting_and_plugin_disable_locality() {
        let tree = two_sockets();
        for (key, value) in [("gpu_locality", "off"), ("transport", "plugin")] {
            let config = Config::defaults().with(key, value).unwrap();
            let nearness = Nearness::new(&config, &nics(tree.path()), tree.path());
            assert_eq!(nearness.of(&gpu(1)), InterfaceSet::ALL);
            assert_eq!((nearness.parts(), nearness.node()), (1, None));
        }
    }

    #[test]
    fn workers_have_a_node_while_all_gpus_and_interfaces_share_it() {
        let tree = two_sockets();
        let all = nics(tree.path());
        let nearness = Nearness::new(&Config::defaults(), &all, tree.path());
        assert_eq!(nearness.node(), None);
        nearness.of(&gpu(1));
        assert_eq!(nearness.node(), Some(1));
        nearness.of(&gpu(1));
        assert_eq!(nearness.node(), Some(1));
        nearness.of(&gpu(0));
        assert_eq!(nearness.node(), None);
        // The only interface is at the other socket.
        let nearness = Nearness::new(&Config::defaults(), &all[..1], tree.path());
        nearness.of(&gpu(1));
        assert_eq!((nearness.parts(), nearness.node()), (1, None));
        // The only interface is on the GPU's socket:
        // all interfaces are used, and all are on its node.
        let nearness = Nearness::new(&Config::defaults(), &all[1..], tree.path());
        assert_eq!(nearness.of(&gpu(1)), InterfaceSet::ALL);
        assert_eq!(nearness.node(), Some(1));
        // The location of the interface is unknown.
        let mut unknown = all[1..].to_vec();
        unknown[0].locations.clear();
        let nearness = Nearness::new(&Config::defaults(), &unknown, tree.path());
        nearness.of(&gpu(1));
        assert_eq!(nearness.node(), None);
    }

    #[test]
    fn interfaces_beyond_the_last_bit_share_it() {
        let [near, last, behind] = [3, 63, 200].map(InterfaceSet::one);
        assert!(last.meets(behind) && !near.meets(behind));
        assert!(near.union(last).meets(behind));
        assert!(InterfaceSet::ALL.meets(near));
    }
}
