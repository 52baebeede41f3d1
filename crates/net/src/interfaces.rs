//! Finds the network interfaces of this machine and selects those that carry lanes.
//!
//! [`discover`] asks the kernel for every interface of the current network namespace: links and
//! addresses over rtnetlink, so that the answer fits the namespace of the process, and the hardware
//! behind a link (speed, NUMA node, PCI address, driver) from sysfs. Nothing is guessed: a value
//! that the kernel does not report is `None`.
//!
//! [`InterfaceSelector`] then selects, in the syntax of `NCCL_SOCKET_IFNAME`. Selection is a pure
//! function of the interfaces found:
//!
//! ```
//! use tcpx_net::interfaces::{self, InterfaceSelector};
//!
//! let found = interfaces::discover()?;
//! let selector: InterfaceSelector = "=lo".parse()?;
//! let chosen = selector.select(&found)?;
//! assert_eq!(chosen[0].name, "lo");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod error;
mod netlink;
mod select;
mod sysfs;

use std::fmt;
use std::net::IpAddr;
use std::path::Path;

pub use self::error::{Candidate, DiscoverError, ParseSelectorError, SelectError, WhyNot};
use self::netlink::Link;
pub use self::select::InterfaceSelector;
use self::sysfs::Hardware;
use crate::topology::{Location, SYSFS};

/// Finds every interface of the current network namespace, in order of index.
///
/// # Errors
///
/// [`DiscoverError`] if the kernel does not report its links or addresses.
pub fn discover() -> Result<Vec<Interface>, DiscoverError> {
    discover_with(Path::new(SYSFS))
}

/// Does what [`discover`] does, with sysfs read from another root.
///
/// # Errors
///
/// As [`discover`]. Missing files below `sysfs` are no error: their fields are `None`.
pub fn discover_with(sysfs: &Path) -> Result<Vec<Interface>, DiscoverError> {
    let links = netlink::links().map_err(|source| DiscoverError {
        what: "links",
        source,
    })?;
    let addresses = netlink::addresses().map_err(|source| DiscoverError {
        what: "addresses",
        source,
    })?;
    let mut interfaces: Vec<Interface> = links
        .into_iter()
        .map(|link| {
            let hardware = sysfs::hardware(sysfs, &link.name, link.index);
            let own = addresses.iter().filter(|(index, _)| *index == link.index);
            let own = own.map(|(_, address)| *address).collect();
            Interface::assemble(link, own, hardware)
        })
        .collect();
    interfaces.sort_by_key(|interface| interface.index);
    Ok(interfaces)
}

/// One network interface, as it was when [`discover`] looked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interface {
    /// The kernel's number for it, unique in its network namespace.
    pub index: u32,
    /// Its name, such as `eth0`.
    pub name: String,
    /// Whether it was switched on (`ip link set up`).
    pub up: bool,
    /// Whether the link has a carrier: for hardware, a cable and a peer at its other end.
    pub running: bool,
    /// The kind of device behind the name.
    pub kind: InterfaceKind,
    /// Its addresses, in the kernel's order; addresses that cannot be bound yet are left out.
    pub addresses: Vec<InterfaceAddress>,
    /// The largest packet, in bytes.
    pub mtu: u32,
    /// The link's speed in Mbit/s, where the driver knows it.
    pub speed_mbps: Option<u32>,
    /// The NUMA node of the device, on machines with several. For a bond and other stacked
    /// interfaces, the node of all devices below, if they share one.
    pub numa_node: Option<u32>,
    /// The PCI address of the device, such as `0000:06:00.0`.
    pub pci_address: Option<String>,
    /// The driver of the device, such as `mlx5_core`.
    pub driver: Option<String>,
    /// The location of the device, or of all devices below a bond, a VLAN and the like. Empty, or
    /// with unknown places, where nothing is known.
    pub locations: Vec<Location>,
}

impl Interface {
    fn assemble(link: Link, addresses: Vec<InterfaceAddress>, hardware: Hardware) -> Self {
        let kind = InterfaceKind::of(link.loopback, link.kind.as_deref(), &hardware);
        Interface {
            index: link.index,
            name: link.name,
            up: link.up,
            running: link.running,
            kind,
            addresses,
            mtu: link.mtu,
            speed_mbps: hardware.speed_mbps,
            numa_node: hardware.numa_node,
            pci_address: hardware.pci_address,
            driver: hardware.driver,
            locations: hardware.locations,
        }
    }

    /// Returns whether this is the loopback interface.
    pub fn is_loopback(&self) -> bool {
        self.kind == InterfaceKind::Loopback
    }

    /// Returns whether no hardware is behind it: bridges, veth, tun, dummy, loopback and the like.
    pub fn is_virtual(&self) -> bool {
        matches!(
            self.kind,
            InterfaceKind::Virtual { .. } | InterfaceKind::Loopback
        )
    }

    /// Returns the addresses a lane can be bound to, best first: one per network.
    ///
    /// Link-local addresses are valid on one link only and are used where there is no other. On
    /// loopback, addresses that other machines can reach (as on a machine that announces its own
    /// address to its switches) precede those that only this machine can reach.
    pub fn lane_addresses(&self) -> Vec<IpAddr> {
        let ranks: [fn(&InterfaceAddress) -> bool; 3] = [
            |a| !a.link_local && !a.ip.is_loopback(),
            |a| a.link_local,
            |a| a.ip.is_loopback(),
        ];
        let of_rank = |rank: &dyn Fn(&InterfaceAddress) -> bool| {
            let mut kept: Vec<InterfaceAddress> = Vec::new();
            for address in self.addresses.iter().filter(|a| rank(a)) {
                if !kept.iter().any(|k| k.shares_network(address)) {
                    kept.push(*address);
                }
            }
            kept
        };
        let kept = ranks.iter().map(|rank| of_rank(rank));
        let mut kept = kept.into_iter().filter(|kept| !kept.is_empty());
        let first = kept.next().unwrap_or_default();
        first.iter().map(|a| a.ip).collect()
    }

    /// Returns whether this machine uses the interface by default, given all its interfaces, or why
    /// not. Loopback counts as not usable, also where nothing else is left.
    ///
    /// # Errors
    ///
    /// As [`Interface::usable`].
    pub fn usable_among(&self, found: &[Interface]) -> Result<(), WhyNot> {
        let chosen = InterfaceSelector::every_usable().select(found);
        let is_chosen = chosen.is_ok_and(|chosen| chosen.contains(self));
        match is_chosen && !self.is_loopback() {
            true => Ok(()),
            false => self.usable(),
        }
    }

    /// Returns whether this interface is used by default on every machine, or why not. An interface
    /// that is not may still be the best of its machine: see [`Interface::usable_among`].
    ///
    /// # Errors
    ///
    /// The first obstacle, the hardest to overcome first.
    pub fn usable(&self) -> Result<(), WhyNot> {
        self.ready()?;
        if self.addresses.iter().all(|address| address.link_local) {
            return Err(WhyNot::OnlyLinkLocal);
        }
        match &self.kind {
            InterfaceKind::Physical | InterfaceKind::Stacked { .. } => Ok(()),
            InterfaceKind::Loopback => Err(WhyNot::Loopback),
            InterfaceKind::Virtual { kind } => Err(WhyNot::Virtual { kind: kind.clone() }),
        }
    }

    /// Returns whether this interface can be selected by name, or what is missing.
    fn ready(&self) -> Result<(), WhyNot> {
        if !self.up {
            Err(WhyNot::Down)
        } else if !self.running {
            Err(WhyNot::NoCarrier)
        } else if self.addresses.is_empty() {
            Err(WhyNot::NoAddress)
        } else {
            Ok(())
        }
    }
}

/// The kind of device behind an interface's name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InterfaceKind {
    /// A device: a network card, or one that a hypervisor presents.
    Physical,
    /// A virtual interface on top of real ones that is meant to carry their traffic.
    Stacked {
        /// The kernel's name for its kind: `bond`, `vlan`, `macvlan`, `bridge`…
        kind: String,
    },
    /// No device: a bridge, one end of a veth pair, a tunnel, a dummy.
    Virtual {
        /// The kernel's name for its kind, or `unknown`.
        kind: String,
    },
    /// The loopback interface.
    Loopback,
}

impl InterfaceKind {
    fn of(loopback: bool, link_kind: Option<&str>, hardware: &Hardware) -> Self {
        const STACKED: [&str; 7] = ["bond", "team", "vlan", "macvlan", "ipvlan", "hsr", "ipoib"];
        match link_kind {
            _ if loopback => InterfaceKind::Loopback,
            Some(kind) if STACKED.contains(&kind) => InterfaceKind::Stacked { kind: kind.into() },
            // A bridge that has a card leads where the card does; others lead to containers.
            Some("bridge") if hardware.has_device_below => InterfaceKind::Stacked {
                kind: "bridge".into(),
            },
            _ if hardware.has_device => InterfaceKind::Physical,
            kind => InterfaceKind::Virtual {
                kind: kind.unwrap_or("unknown").into(),
            },
        }
    }
}

impl fmt::Display for InterfaceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            InterfaceKind::Physical => f.write_str("physical"),
            InterfaceKind::Loopback => f.write_str("loopback"),
            InterfaceKind::Stacked { kind } | InterfaceKind::Virtual { kind } => f.write_str(kind),
        }
    }
}

/// An address of an interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InterfaceAddress {
    /// The address itself.
    pub ip: IpAddr,
    /// How many leading bits name the network.
    pub prefix_len: u8,
    /// Whether it is meaningful on its own link only (`169.254.0.0/16`, `fe80::/10`).
    pub link_local: bool,
}

impl InterfaceAddress {
    /// Creates an address with its prefix; whether it is link-local follows from the address.
    pub fn new(ip: IpAddr, prefix_len: u8) -> Self {
        let link_local = match ip {
            IpAddr::V4(v4) => v4.is_link_local(),
            IpAddr::V6(v6) => v6.is_unicast_link_local(),
        };
        InterfaceAddress {
            ip,
            prefix_len,
            link_local,
        }
    }
}

impl InterfaceAddress {
    /// Returns whether one of the two lies on the network of the other.
    fn shares_network(&self, other: &Self) -> bool {
        let bits = u32::from(self.prefix_len.min(other.prefix_len));
        match (self.ip, other.ip) {
            (IpAddr::V4(a), IpAddr::V4(b)) => {
                let differing = u32::from(a) ^ u32::from(b);
                differing.leading_zeros() >= bits
            }
            (IpAddr::V6(a), IpAddr::V6(b)) => {
                let differing = u128::from(a) ^ u128::from(b);
                differing.leading_zeros() >= bits
            }
            _ => false,
        }
    }
}

impl fmt::Display for InterfaceAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.ip, self.prefix_len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str, prefix_len: u8) -> InterfaceAddress {
        InterfaceAddress::new(text.parse().unwrap(), prefix_len)
    }

    fn physical(addresses: Vec<InterfaceAddress>) -> Interface {
        Interface {
            kind: InterfaceKind::Physical,
            addresses,
            ..select::tests::interface("eth0")
        }
    }

    #[test]
    fn this_machine_has_a_loopback_interface() {
        let found = discover().unwrap();
        let lo = found
            .iter()
            .find(|interface| interface.is_loopback())
            .expect("a loopback");
        assert!(lo.index > 0 && lo.mtu > 0);
        assert_eq!(lo.pci_address, None);
        if lo.up {
            assert!(lo.addresses.contains(&address("127.0.0.1", 8)), "{lo:?}");
            assert_eq!(lo.usable(), Err(WhyNot::Loopback));
        }
        assert!(found.is_sorted_by_key(|interface| interface.index));
    }

    #[test]
    fn the_first_obstacle_is_named() {
        let fine = physical(vec![address("10.0.0.1", 24), address("fe80::1", 64)]);
        assert_eq!(fine.usable(), Ok(()));
        assert_eq!(
            Interface {
                up: false,
                ..fine.clone()
            }
            .usable(),
            Err(WhyNot::Down)
        );
        assert_eq!(
            Interface {
                running: false,
                ..fine.clone()
            }
            .usable(),
            Err(WhyNot::NoCarrier)
        );
        assert_eq!(physical(vec![]).usable(), Err(WhyNot::NoAddress));
        assert_eq!(
            physical(vec![address("fe80::1", 64)]).usable(),
            Err(WhyNot::OnlyLinkLocal)
        );
        let bridge = InterfaceKind::of(false, Some("bridge"), &Hardware::default());
        let bridge = Interface {
            kind: bridge,
            ..fine
        };
        assert_eq!(
            bridge.usable(),
            Err(WhyNot::Virtual {
                kind: "bridge".into()
            })
        );
    }

    fn lanes(addresses: &[(&str, u8)]) -> Vec<String> {
        let addresses = addresses.iter().map(|(ip, len)| address(ip, *len));
        let lanes = physical(addresses.collect()).lane_addresses();
        lanes.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn link_local_addresses_are_a_last_resort() {
        assert_eq!(
            lanes(&[("169.254.1.1", 16), ("fe80::1", 64), ("10.0.0.1", 24)]),
            ["10.0.0.1"]
        );
        let cable = [("fe80::1", 64), ("169.254.1.1", 16)];
        assert_eq!(lanes(&cable), ["fe80::1", "169.254.1.1"]);
        let cable = physical(vec![address("fe80::1", 64)]);
        assert_eq!(cable.ready(), Ok(()));
        assert_eq!(cable.usable(), Err(WhyNot::OnlyLinkLocal));
        // Where there is nothing else it is used.
        assert_eq!(cable.usable_among(std::slice::from_ref(&cable)), Ok(()));
    }

    #[test]
    fn each_network_of_an_interface_has_one_address() {
        // Private and public; a second address and a floating one on the same networks.
        assert_eq!(
            lanes(&[
                ("10.0.0.1", 24),
                ("203.0.113.5", 24),
                ("10.0.0.2", 24),
                ("203.0.113.9", 32),
                ("fd00::1", 64),
                ("fd00::2", 128),
            ]),
            ["10.0.0.1", "203.0.113.5", "fd00::1"]
        );
        // Each of these has a network of its own.
        assert_eq!(
            lanes(&[("10.0.0.1", 32), ("10.0.0.2", 32)]),
            ["10.0.0.1", "10.0.0.2"]
        );
        // The address of a machine that announces it to its switches.
        assert_eq!(
            lanes(&[("127.0.0.1", 8), ("::1", 128), ("10.0.0.7", 32)]),
            ["10.0.0.7"]
        );
        assert_eq!(
            lanes(&[("127.0.0.1", 8), ("::1", 128)]),
            ["127.0.0.1", "::1"]
        );
    }

    #[test]
    fn kinds_follow_the_kernel() {
        let none = Hardware::default();
        let device = Hardware {
            has_device: true,
            ..Hardware::default()
        };
        let over_device = Hardware {
            has_device_below: true,
            ..Hardware::default()
        };
        let kind = |kind: &str| kind.to_owned();
        assert_eq!(
            InterfaceKind::of(false, Some("bridge"), &over_device),
            InterfaceKind::Stacked {
                kind: kind("bridge")
            }
        );
        assert_eq!(
            InterfaceKind::of(false, Some("bridge"), &none),
            InterfaceKind::Virtual {
                kind: kind("bridge")
            }
        );
        assert_eq!(
            InterfaceKind::of(true, None, &none),
            InterfaceKind::Loopback
        );
        assert_eq!(
            InterfaceKind::of(false, None, &device),
            InterfaceKind::Physical
        );
        assert_eq!(
            InterfaceKind::of(false, Some("bond"), &none).to_string(),
            "bond"
        );
        assert_eq!(
            InterfaceKind::of(false, None, &none),
            InterfaceKind::Virtual {
                kind: "unknown".into()
            }
        );
    }
}
