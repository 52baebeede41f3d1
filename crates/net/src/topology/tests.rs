//! Simulated machines: an A3, two sockets, virtual machines.

use std::os::unix::fs::symlink;

use super::*;

/// A sysfs tree in a temporary folder.
pub(crate) struct Tree(tempfile::TempDir);

impl Tree {
    pub(crate) fn new() -> Self {
        Tree(tempfile::tempdir().unwrap())
    }

    pub(crate) fn root(&self) -> &Path {
        self.0.path()
    }

    pub(crate) fn file(self, path: &str, text: &str) -> Self {
        let path = self.root().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
        self
    }

    pub(crate) fn link(self, path: &str, to: &str) -> Self {
        let (path, to) = (self.root().join(path), self.root().join(to));
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::create_dir_all(&to).unwrap();
        symlink(to, path).unwrap();
        self
    }

    /// Adds a PCI device: `path` from its root on, such as `pci0000:00/0000:00:01.0/0000:01:00.0`.
    fn device(self, path: &str, node: Option<i32>) -> Self {
        let (_, address) = path.rsplit_once('/').unwrap();
        let folder = format!("devices/{path}");
        let tree = self.link(&format!("bus/pci/devices/{address}"), &folder);
        match node {
            Some(node) => tree.file(&format!("{folder}/numa_node"), &format!("{node}\n")),
            None => tree,
        }
    }

    /// Adds a NIC.
    fn nic(self, name: &str, path: &str, node: Option<i32>) -> Self {
        self.device(path, node).link(
            &format!("class/net/{name}/device"),
            &format!("devices/{path}"),
        )
    }

    /// Adds a GPU.
    fn gpu(self, path: &str, node: Option<i32>) -> Self {
        self.device(path, node)
            .file(&format!("devices/{path}/class"), "0x030200\n")
            .file(&format!("devices/{path}/vendor"), "0x10de\n")
    }

    /// Puts one interface on top of another.
    fn stack(self, upper: &str, lower: &str) -> Self {
        self.link(
            &format!("class/net/{upper}/lower_{lower}"),
            &format!("class/net/{lower}"),
        )
    }

    /// Returns the names among `interfaces` that a GPU's bytes take, and how far the nearest is.
    fn nearest(&self, gpu: &str, interfaces: &[&str]) -> (Distance, Vec<String>) {
        let gpu = Location::of_pci(self.root(), gpu);
        let locations = interfaces
            .iter()
            .map(|name| Location::of_link(self.root(), name));
        let locations: Vec<_> = locations.collect();
        let choice = Choice::new(&gpu, locations.iter().map(Vec::as_slice));
        let names = choice.chosen().map(|index| interfaces[index].to_owned());
        (choice.least(), names.collect())
    }
}

/// Eight GPUs and four NICs on two sockets, two GPUs and a NIC below each of four PCI switches, and
/// a NIC on its own at the first socket. GPU number n is `0000:{n}4:00.0`, NIC number n
/// `0000:{n}6:00.0`.
pub(crate) fn a3() -> Tree {
    let mut tree = Tree::new().nic("eth0", "pci0000:00/0000:00:03.0", Some(0));
    for switch in 0..4 {
        // Each has a root of its own, a root port, and both ports of the switch.
        let (root, node) = (switch + 1, switch / 2);
        let above = format!("pci0000:{root}0/0000:{root}0:01.0/0000:{root}1:00.0");
        let below = |port: i32, bus: i32, slot: i32| {
            format!("{above}/0000:{root}2:0{port}.0/0000:{bus}{slot}:00.0")
        };
        tree = tree
            .gpu(&below(0, 2 * switch, 4), Some(node))
            .gpu(&below(1, 2 * switch + 1, 4), Some(node))
            .nic(&format!("eth{root}"), &below(2, switch, 6), Some(node));
    }
    tree
}

#[test]
fn on_an_a3_each_gpu_takes_the_nic_below_its_switch() {
    let tree = a3();
    let all = ["eth0", "eth1", "eth2", "eth3", "eth4"];
    for gpu in 0..8 {
        let nearest = tree.nearest(&format!("0000:{gpu}4:00.0"), &all);
        let nic = format!("eth{}", gpu / 2 + 1);
        assert_eq!(nearest, (Distance::SameSwitch, vec![nic]));
    }
    // Without that NIC, all of the same node; without those, every NIC.
    let gpu = "0000:04:00.0";
    assert_eq!(
        tree.nearest(gpu, &["eth0", "eth2", "eth3", "eth4"]),
        (Distance::SameNode, vec!["eth0".into(), "eth2".into()])
    );
    assert_eq!(
        tree.nearest(gpu, &["eth3", "eth4"]),
        (Distance::OtherNode, vec!["eth3".into(), "eth4".into()])
    );
}

#[test]
fn a_nic_of_the_first_switch_is_nearer_than_one_behind_a_second() {
    let up = "pci0000:10/0000:10:01.0/0000:11:00.0";
    let second = format!("{up}/0000:12:00.0/0000:13:00.0");
    let tree = Tree::new()
        .gpu(&format!("{second}/0000:14:00.0/0000:15:00.0"), Some(0))
        .nic(
            "near",
            &format!("{second}/0000:14:01.0/0000:16:00.0"),
            Some(0),
        )
        .nic("tree", &format!("{up}/0000:12:01.0/0000:17:00.0"), Some(0))
        .nic("root", "pci0000:10/0000:10:02.0/0000:18:00.0", Some(0))
        .nic("node", "pci0000:20/0000:20:02.0/0000:21:00.0", Some(0));
    let gpu = "0000:15:00.0";
    let one = |name: &'static str| tree.nearest(gpu, &[name, "node"]);
    let names = |name: &str| vec![name.to_owned()];
    assert_eq!(one("near"), (Distance::SameSwitch, names("near")));
    assert_eq!(one("tree"), (Distance::SeveralSwitches, names("tree")));
    assert_eq!(one("root"), (Distance::SameRoot, names("root")));
    assert_eq!(tree.nearest(gpu, &["tree", "near", "root"]).1, ["near"]);
}

/// Two sockets with a NIC each, a GPU at the second.
fn two_sockets() -> Tree {
    Tree::new()
        .nic("eth0", "pci0000:00/0000:00:01.0/0000:01:00.0", Some(0))
        .nic("eth1", "pci0000:80/0000:80:01.0/0000:81:00.0", Some(1))
        .gpu("pci0000:90/0000:90:01.0/0000:91:00.0", Some(1))
}

#[test]
fn on_two_sockets_a_gpu_takes_the_nic_of_its_own() {
    let nearest = two_sockets().nearest("0000:91:00.0", &["eth0", "eth1"]);
    assert_eq!(nearest, (Distance::SameNode, vec!["eth1".into()]));
}

/// Different NUMA nodes outweigh a shared PCI root, which a hypervisor may present.
#[test]
fn nodes_count_more_than_a_root_that_spans_them() {
    let tree = Tree::new()
        .nic("eth0", "pci0000:00/0000:00:01.0", Some(0))
        .nic("eth1", "pci0000:00/0000:00:02.0", Some(1))
        .gpu("pci0000:00/0000:00:03.0", Some(1));
    let nearest = tree.nearest("0000:00:03.0", &["eth0", "eth1"]);
    assert_eq!(nearest, (Distance::SameRoot, vec!["eth1".into()]));
}

#[test]
fn where_nothing_is_known_all_are_equal() {
    let all = ["eth0", "eth1", "veth0"];
    let used: Vec<String> = all.map(str::to_owned).into();
    // No sysfs at all.
    let nothing = Tree::new();
    let nearest = nothing.nearest("0000:00:05.0", &all);
    assert_eq!(nearest, (Distance::Unknown, used.clone()));
    // A virtual machine: virtio, nodes missing or -1, each device on a root of its own.
    let tree = Tree::new()
        .nic("eth0", "pci0000:00/0000:00:03.0/virtio0", Some(-1))
        .nic("eth1", "pci0000:01/0000:01:03.0/virtio1", None)
        .file("class/net/veth0/ifindex", "7")
        .gpu("pci0000:02/0000:02:05.0", Some(-1));
    let nearest = tree.nearest("0000:02:05.0", &all);
    assert_eq!(nearest, (Distance::Unknown, used.clone()));
    // An interface that is known to be on another node does not exclude the others.
    let tree = tree
        .nic("eth2", "pci0000:03/0000:03:00.0", Some(1))
        .gpu("pci0000:04/0000:04:05.0", Some(0));
    let nearest = tree.nearest("0000:04:05.0", &["eth0", "eth2"]);
    assert_eq!(nearest.0, Distance::OtherNode);
    assert_eq!(nearest.1, ["eth0", "eth2"]);
}

/// The PCI tree of a small virtual machine.
#[test]
fn below_one_root_all_are_equal() {
    let tree = Tree::new()
        .nic("eth0", "pci0000:00/0000:00:03.0", None)
        .nic("eth1", "pci0000:00/0000:00:04.0", None)
        .gpu("pci0000:00/0000:00:05.0", None);
    let nearest = tree.nearest("0000:00:05.0", &["eth0", "eth1"]);
    assert_eq!(nearest.0, Distance::SameRoot);
    assert_eq!(nearest.1, ["eth0", "eth1"]);
}

#[test]
fn a_bond_counts_as_the_devices_below_it() {
    let tree = a3()
        .stack("bond0", "eth1")
        .stack("bond0", "eth2")
        .stack("vlan7", "bond0")
        .stack("bond1", "eth3")
        .stack("bond1", "eth1");
    let bonds = ["bond0", "bond1", "eth4"];
    // Both NICs are on the GPU's node, one below its switch: the farther one counts.
    let gpu = "0000:04:00.0";
    assert_eq!(
        tree.nearest(gpu, &bonds),
        (Distance::SameNode, vec!["bond0".into()])
    );
    assert_eq!(tree.nearest(gpu, &["eth3", "vlan7"]).1, ["vlan7"]);
    // One of them is on the other node.
    assert_eq!(tree.nearest(gpu, &["bond1"]).0, Distance::OtherNode);
    // A member with an unknown location makes the whole bond unknown.
    let tree = tree
        .stack("bond0", "veth0")
        .file("class/net/veth0/ifindex", "7");
    assert_eq!(tree.nearest(gpu, &["bond0"]).0, Distance::Unknown);
}

/// `ip link` cannot make a loop, but something mounted over sysfs can.
#[test]
fn interfaces_on_top_of_each_other_are_followed_to_an_end() {
    let tree = Tree::new().stack("a", "b").stack("b", "a");
    assert_eq!(Location::of_link(tree.root(), "a"), []);
}

#[test]
fn gpus_are_told_from_other_display_controllers() {
    let tree = a3()
        .device("pci0000:00/0000:00:09.0", Some(0))
        .file("devices/pci0000:00/0000:00:09.0/class", "0x030000\n")
        .file("devices/pci0000:00/0000:00:09.0/vendor", "0x1a03\n");
    let gpus = gpus(tree.root());
    assert_eq!(gpus.len(), 8);
    assert!(gpus.iter().all(|gpu| gpu.pci_path.len() == 5), "{gpus:?}");
    assert!(super::gpus(Tree::new().root()).is_empty());
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
    assert!(is_root("pci0000:00") && !is_root("pci") && !is_root("0000:06:00.0"));
}

#[test]
fn each_distance_has_a_name_of_its_own() {
    assert!(Distance::ALL.is_sorted());
    let mut keys = Distance::ALL.map(Distance::key).to_vec();
    keys.sort_unstable();
    keys.dedup();
    assert_eq!(keys.len(), Distance::ALL.len());
}
