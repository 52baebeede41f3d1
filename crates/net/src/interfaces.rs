//! The network interfaces of this machine, and which of them carry lanes.
//!
//! [`discover`] asks the kernel for every interface of the current network namespace: links and
//! addresses over rtnetlink, so that the answer fits the namespace the process runs in, and the
//! hardware behind a link (speed, NUMA node, PCI address, driver) from sysfs. Nothing is guessed:
//! what the kernel does not know is `None`.
//!
//! [`InterfaceSelector`] then chooses, by the syntax of `NCCL_SOCKET_IFNAME`. Selection is pure, a
//! function of the interfaces that were found:
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
/// [`DiscoverError`] when the kernel does not answer a question about its links or addresses.
pub fn discover() -> Result<Vec<Interface>, DiscoverError> {
    discover_with(Path::new(SYSFS))
}

/// As [`discover`], with sysfs read from another root.
///
/// # Errors
///
/// As [`discover`]; what is missing below `sysfs` is no error, those fields are `None`.
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
    /// Whether the other end of the link is there: a cable and a peer for hardware.
    pub running: bool,
    /// What stands behind the name.
    pub kind: InterfaceKind,
    /// Its addresses, in the kernel's order; addresses that cannot be bound yet are left out.
    pub addresses: Vec<InterfaceAddress>,
    /// The largest packet, in bytes.
    pub mtu: u32,
    /// The link's speed in Mbit/s, where the driver knows it.
    pub speed_mbps: Option<u32>,
    /// The NUMA node the device hangs off, on machines that have several. That of all devices below
    /// it, for a bond and the like, if they are on one.
    pub numa_node: Option<u32>,
    /// The PCI address of the device, such as `0000:06:00.0`.
    pub pci_address: Option<String>,
    /// The driver of the device, such as `mlx5_core`.
    pub driver: Option<String>,
    /// Where its device sits, or the devices below a bond, a VLAN and the like. Empty, or of unknown
    /// places, where nothing is known.
    pub locations: Vec<Location>,
}

impl Interface {
    fn assemble(link: Link, addresses: Vec<InterfaceAddress>, hardware: Hardware) -> Self {
        let kind = InterfaceKind::of(link.loopback, link.kind.as_deref(), hardware.has_device);
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

    /// Whether this is the loopback interface.
    pub fn is_loopback(&self) -> bool {
        self.kind == InterfaceKind::Loopback
    }

    /// Whether no hardware stands behind it: bridges, veth, tun, dummy, loopback and the like.
    pub fn is_virtual(&self) -> bool {
        matches!(
            self.kind,
            InterfaceKind::Virtual { .. } | InterfaceKind::Loopback
        )
    }

    /// The addresses a lane can be bound to, best first.
    ///
    /// Link-local addresses mean something on one link only and are left out, with one exception:
    /// an IPv4 link-local address (two machines on one cable) counts where there is no other.
    pub fn lane_addresses(&self) -> Vec<IpAddr> {
        let pick = |link_local: bool| {
            self.addresses
                .iter()
                .filter(move |a| a.link_local == link_local && (a.ip.is_ipv4() || !link_local))
                .map(|a| a.ip)
        };
        let routable: Vec<IpAddr> = pick(false).collect();
        if routable.is_empty() {
            pick(true).collect()
        } else {
            routable
        }
    }

    /// Whether the default selection may use this interface, or why it does not.
    ///
    /// # Errors
    ///
    /// The first reason that stands in the way, the hardest to overcome first.
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

    /// Whether an explicit choice of this interface can work, or what is missing.
    fn ready(&self) -> Result<(), WhyNot> {
        if !self.up {
            Err(WhyNot::Down)
        } else if !self.running {
            Err(WhyNot::NoCarrier)
        } else if self.addresses.is_empty() {
            Err(WhyNot::NoAddress)
        } else if self.lane_addresses().is_empty() {
            Err(WhyNot::OnlyLinkLocal)
        } else {
            Ok(())
        }
    }
}

/// What stands behind an interface's name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InterfaceKind {
    /// A device: a network card, or what a hypervisor presents as one.
    Physical,
    /// A virtual interface on top of real ones that is meant to carry their traffic.
    Stacked {
        /// The kernel's word for it: `bond`, `vlan`, `macvlan`…
        kind: String,
    },
    /// No device: a bridge, one end of a veth pair, a tunnel, a dummy.
    Virtual {
        /// The kernel's word for it, or `unknown`.
        kind: String,
    },
    /// This machine talking to itself.
    Loopback,
}

impl InterfaceKind {
    fn of(loopback: bool, link_kind: Option<&str>, has_device: bool) -> Self {
        const STACKED: [&str; 7] = ["bond", "team", "vlan", "macvlan", "ipvlan", "hsr", "ipoib"];
        match link_kind {
            _ if loopback => InterfaceKind::Loopback,
            Some(kind) if STACKED.contains(&kind) => InterfaceKind::Stacked { kind: kind.into() },
            _ if has_device => InterfaceKind::Physical,
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
    /// An address with its prefix; whether it is link-local follows from the address.
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
        let bridge = InterfaceKind::of(false, Some("bridge"), false);
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

    #[test]
    fn link_local_addresses_are_a_last_resort_and_ipv4_only() {
        let both = physical(vec![address("169.254.1.1", 16), address("10.0.0.1", 24)]);
        assert_eq!(
            both.lane_addresses(),
            ["10.0.0.1".parse::<IpAddr>().unwrap()]
        );
        let cable = physical(vec![address("fe80::1", 64), address("169.254.1.1", 16)]);
        assert_eq!(
            cable.lane_addresses(),
            ["169.254.1.1".parse::<IpAddr>().unwrap()]
        );
        assert_eq!(cable.ready(), Ok(()));
        assert_eq!(cable.usable(), Err(WhyNot::OnlyLinkLocal));
    }

    #[test]
    fn kinds_follow_the_kernel() {
        assert_eq!(
            InterfaceKind::of(true, None, false),
            InterfaceKind::Loopback
        );
        assert_eq!(
            InterfaceKind::of(false, None, true),
            InterfaceKind::Physical
        );
        assert_eq!(
            InterfaceKind::of(false, Some("bond"), false).to_string(),
            "bond"
        );
        assert_eq!(
            InterfaceKind::of(false, None, false),
            InterfaceKind::Virtual {
                kind: "unknown".into()
            }
        );
    }
}
