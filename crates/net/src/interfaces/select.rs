//! Selects the interfaces that carry lanes, in the syntax of `NCCL_SOCKET_IFNAME`.

use std::cmp::Reverse;
use std::fmt;
use std::str::FromStr;

use super::error::{Candidate, ParseSelectorError, SelectError};
use super::{Interface, InterfaceKind};

/// The longest name the kernel gives an interface (`IFNAMSIZ` less the terminating zero).
pub(super) const NAME_MAX: usize = 15;

/// A choice of interfaces, in the syntax of `NCCL_SOCKET_IFNAME`.
///
/// | text | chooses |
/// |---|---|
/// | (empty) | every usable interface |
/// | `eth` | every interface whose name begins with `eth` |
/// | `eth1,eth2` | interfaces whose names begin with `eth1`, then with `eth2` |
/// | `=eth1,eth2` | exactly `eth1` and `eth2` |
/// | `^docker,lo` | every usable interface whose name begins with none of these |
/// | `^=eth0` | every usable interface but `eth0` |
///
/// A modifier appears once, at the front, and applies to the whole list.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct InterfaceSelector {
    mode: Mode,
    exact: bool,
    // Not empty unless the mode is `Default`.
    names: Vec<String>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Mode {
    #[default]
    Default,
    Include,
    Exclude,
}

impl InterfaceSelector {
    /// Creates the selector of every usable interface: the meaning of an empty text.
    pub fn every_usable() -> Self {
        InterfaceSelector::default()
    }

    /// Returns whether no interface is named, so that the default rules decide.
    pub fn is_default(&self) -> bool {
        self.mode == Mode::Default
    }

    /// Chooses among `interfaces`.
    ///
    /// Interfaces named by the selector come in its order; several matches of one name, and every
    /// interface where none is named, come fastest first, then by index. A named interface may be
    /// loopback or virtual, but it must be up and have an address: an interface named in full that
    /// is not ready is an error; one that shares a prefix with others that are ready is skipped.
    ///
    /// Where no interface is named, the first of these groups that is not empty is selected:
    /// interfaces with a device behind them (including bonds, VLANs and bridges over a device); the
    /// inner ends of containers; loopback with an address that others can reach; tunnels;
    /// interfaces with a device or of containers that have link-local addresses only; loopback.
    /// Bridges without a device, such as `docker0`, are used by name only.
    ///
    /// # Errors
    ///
    /// [`SelectError`], which lists the available interfaces.
    pub fn select(&self, interfaces: &[Interface]) -> Result<Vec<Interface>, SelectError> {
        match self.mode {
            Mode::Include => self.include(interfaces),
            Mode::Default | Mode::Exclude => self.by_default(interfaces),
        }
    }

    fn include(&self, interfaces: &[Interface]) -> Result<Vec<Interface>, SelectError> {
        let mut chosen: Vec<Interface> = Vec::new();
        for name in &self.names {
            let matching: Vec<&Interface> = interfaces
                .iter()
                .filter(|interface| self.matches(name, interface))
                .collect();
            if matching.is_empty() {
                return Err(SelectError::NoMatch {
                    name: name.clone(),
                    existing: names(interfaces),
                });
            }
            let (ready, others): (Vec<&Interface>, Vec<&Interface>) = matching
                .into_iter()
                .partition(|interface| interface.ready().is_ok());
            if ready.is_empty() || others.iter().any(|interface| interface.name == *name) {
                return Err(SelectError::NotReady {
                    name: name.clone(),
                    found: others.into_iter().filter_map(Candidate::unready).collect(),
                });
            }
            for interface in fastest_first(ready) {
                if !chosen.contains(interface) {
                    chosen.push(interface.clone());
                }
            }
        }
        Ok(chosen)
    }

    fn by_default(&self, interfaces: &[Interface]) -> Result<Vec<Interface>, SelectError> {
        let excluded =
            |interface: &&Interface| self.names.iter().any(|name| self.matches(name, interface));
        let left: Vec<&Interface> = interfaces
            .iter()
            .filter(|interface| !excluded(interface))
            .collect();
        let tiers: [fn(&Interface) -> bool; 6] = [
            |interface| interface.usable().is_ok(),
            |interface| is_container_end(interface) && is_reachable(interface),
            |interface| interface.is_loopback() && is_reachable(interface),
            |interface| is_tunnel(interface) && is_reachable(interface),
            |interface| !interface.is_virtual() || is_container_end(interface),
            Interface::is_loopback,
        ];
        let is_ready = |interface: &Interface| interface.ready().is_ok();
        let ready = || left.iter().copied().filter(|i| is_ready(i));
        tiers
            .into_iter()
            .map(|tier| ready().filter(|i| tier(i)).collect::<Vec<_>>())
            .find(|tier| !tier.is_empty())
            .map(|tier| fastest_first(tier).into_iter().cloned().collect())
            .ok_or_else(|| SelectError::NothingUsable {
                selector: self.clone(),
                found: left.into_iter().filter_map(Candidate::unusable).collect(),
            })
    }

    fn matches(&self, name: &str, interface: &Interface) -> bool {
        if self.exact {
            interface.name == name
        } else {
            interface.name.starts_with(name)
        }
    }
}

/// Returns whether a virtual interface may be the only way out of a container.
///
/// On a host the outer ends of these have no address, so they are never ready there; bridges,
/// tunnels and dummies have one, but no peer is reachable over them.
fn is_container_end(interface: &Interface) -> bool {
    matches!(&interface.kind, InterfaceKind::Virtual { kind }
        if ["veth", "netkit", "unknown"].contains(&kind.as_str()))
}

/// Returns whether an interface is a tunnel: the only way out in rootless containers, for example.
fn is_tunnel(interface: &Interface) -> bool {
    const TUNNELS: [&str; 11] = [
        "tun",
        "wireguard",
        "ppp",
        "ipip",
        "gre",
        "sit",
        "ip6tnl",
        "ip6gre",
        "vti",
        "xfrm",
        "vxlan",
    ];
    matches!(&interface.kind, InterfaceKind::Virtual { kind } if TUNNELS.contains(&kind.as_str()))
}

/// Returns whether an interface has an address that is valid on other machines.
fn is_reachable(interface: &Interface) -> bool {
    let mut addresses = interface.addresses.iter();
    addresses.any(|address| !address.link_local && !address.ip.is_loopback())
}

fn fastest_first(mut interfaces: Vec<&Interface>) -> Vec<&Interface> {
    interfaces.sort_by_key(|interface| (Reverse(interface.speed_mbps), interface.index));
    interfaces
}

fn names(interfaces: &[Interface]) -> Vec<String> {
    interfaces
        .iter()
        .map(|interface| interface.name.clone())
        .collect()
}

impl FromStr for InterfaceSelector {
    type Err = ParseSelectorError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let list = text.trim();
        if list.is_empty() {
            return Ok(InterfaceSelector::default());
        }
        let (mode, list) = match list.strip_prefix('^') {
            Some(rest) => (Mode::Exclude, rest),
            None => (Mode::Include, list),
        };
        let (exact, list) = match list.strip_prefix('=') {
            Some(rest) => (true, rest),
            None => (false, list),
        };
        let names = list
            .split(',')
            .map(|name| parse_name(name.trim()))
            .collect::<Result<_, _>>()?;
        Ok(InterfaceSelector { mode, exact, names })
    }
}

fn parse_name(name: &str) -> Result<String, ParseSelectorError> {
    if name.is_empty() {
        Err(ParseSelectorError::EmptyName)
    } else if name.starts_with(['^', '=']) {
        Err(ParseSelectorError::MisplacedModifier { name: name.into() })
    } else if name.len() > NAME_MAX {
        Err(ParseSelectorError::TooLong { name: name.into() })
    } else if let Some(character) = name
        .chars()
        .find(|c| matches!(c, '/' | ':') || c.is_whitespace() || c.is_control())
    {
        Err(ParseSelectorError::BadCharacter {
            name: name.into(),
            character,
        })
    } else {
        Ok(name.into())
    }
}

impl fmt::Display for InterfaceSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.mode == Mode::Exclude {
            f.write_str("^")?;
        }
        if self.exact {
            f.write_str("=")?;
        }
        f.write_str(&self.names.join(","))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::super::InterfaceAddress;
    use super::*;

    /// Returns an interface with a device, up, with an address and no known speed.
    pub(in super::super) fn interface(name: &str) -> Interface {
        Interface {
            index: 1,
            name: name.into(),
            up: true,
            running: true,
            kind: InterfaceKind::Physical,
            addresses: vec![InterfaceAddress::new([10, 0, 0, 1].into(), 24)],
            mtu: 1500,
            speed_mbps: None,
            numa_node: None,
            pci_address: None,
            driver: None,
            locations: Vec::new(),
        }
    }

    fn of_kind(name: &str, kind: &str) -> Interface {
        Interface {
            kind: InterfaceKind::Virtual { kind: kind.into() },
            ..interface(name)
        }
    }

    fn lo() -> Interface {
        Interface {
            kind: InterfaceKind::Loopback,
            addresses: vec![InterfaceAddress::new([127, 0, 0, 1].into(), 8)],
            ..interface("lo")
        }
    }

    fn down(name: &str) -> Interface {
        Interface {
            up: false,
            ..interface(name)
        }
    }

    /// Returns a host with two fast cards, a slow one, one unplugged, and Docker.
    fn host() -> Vec<Interface> {
        let mut found = vec![
            lo(),
            Interface {
                speed_mbps: Some(1_000),
                ..interface("eth0")
            },
            Interface {
                speed_mbps: Some(200_000),
                ..interface("eth1")
            },
            Interface {
                speed_mbps: Some(200_000),
                ..interface("eth2")
            },
            Interface {
                running: false,
                ..interface("eth3")
            },
            of_kind("docker0", "bridge"),
        ];
        for (index, interface) in (1..).zip(&mut found) {
            interface.index = index;
        }
        found
    }

    fn select(selector: &str, interfaces: &[Interface]) -> Result<Vec<String>, SelectError> {
        let chosen = selector
            .parse::<InterfaceSelector>()
            .unwrap()
            .select(interfaces)?;
        Ok(names(&chosen))
    }

    #[test]
    fn by_default_every_usable_interface_is_taken_fastest_first() {
        assert_eq!(select("", &host()).unwrap(), ["eth1", "eth2", "eth0"]);
        let bond = InterfaceKind::Stacked {
            kind: "bond".into(),
        };
        let bond = Interface {
            kind: bond,
            ..interface("bond0")
        };
        assert_eq!(select("", &[lo(), bond]).unwrap(), ["bond0"]);
    }

    #[test]
    fn a_container_leaves_by_its_veth() {
        assert_eq!(
            select("", &[lo(), of_kind("eth0", "veth")]).unwrap(),
            ["eth0"]
        );
        // A bridge is not a way out, whatever its address.
        assert_eq!(
            select("", &[lo(), of_kind("docker0", "bridge")]).unwrap(),
            ["lo"]
        );
    }

    fn only_link_local(name: &str) -> Interface {
        let ip = std::net::Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);
        Interface {
            addresses: vec![InterfaceAddress::new(ip.into(), 64)],
            ..interface(name)
        }
    }

    #[test]
    fn each_group_stands_in_for_the_one_before() {
        let announced = Interface {
            addresses: vec![
                InterfaceAddress::new([127, 0, 0, 1].into(), 8),
                InterfaceAddress::new([10, 0, 0, 7].into(), 32),
            ],
            ..lo()
        };
        let mut found = vec![
            interface("eth1"),
            of_kind("eth0", "veth"),
            announced,
            of_kind("wg0", "wireguard"),
            only_link_local("eth2"),
            lo(),
            of_kind("docker0", "bridge"),
        ];
        for expected in ["eth1", "eth0", "lo", "wg0", "eth2", "lo"] {
            assert_eq!(select("", &found).unwrap(), [expected]);
            found.remove(0);
        }
        let error = select("", &found).unwrap_err();
        assert!(error.to_string().contains("docker0 is virtual"), "{error}");
    }

    #[test]
    fn an_interface_is_usable_where_it_is_the_best() {
        let pod = [lo(), of_kind("eth0", "veth")];
        assert_eq!(pod[1].usable_among(&pod), Ok(()));
        // Beside a card it is not, and loopback never is.
        let host = [lo(), of_kind("veth0", "veth"), interface("eth0")];
        assert!(host[1].usable_among(&host).is_err());
        assert!(host[0].usable_among(&[lo()]).is_err());
    }

    #[test]
    fn loopback_is_the_last_resort() {
        assert_eq!(select("", &[lo(), down("eth0")]).unwrap(), ["lo"]);
        assert_eq!(select("^eth", &host()).unwrap(), ["lo"]);
    }

    #[test]
    fn names_are_prefixes_unless_exact() {
        assert_eq!(select("eth", &host()).unwrap(), ["eth1", "eth2", "eth0"]);
        assert_eq!(select("eth2,eth0", &host()).unwrap(), ["eth2", "eth0"]);
        assert_eq!(select("=eth2,lo", &host()).unwrap(), ["eth2", "lo"]);
        assert_eq!(
            select("eth2,eth", &host()).unwrap(),
            ["eth2", "eth1", "eth0"]
        );
        let error = select("=eth", &host()).unwrap_err();
        assert!(matches!(error, SelectError::NoMatch { .. }), "{error}");
    }

    #[test]
    fn exclusion_leaves_the_default_rules_in_force() {
        assert_eq!(select("^eth1,docker", &host()).unwrap(), ["eth2", "eth0"]);
        assert_eq!(select("^=eth", &host()).unwrap(), ["eth1", "eth2", "eth0"]);
        // Excluding what does not exist is what portable scripts do.
        assert_eq!(
            select("^podman", &host()).unwrap(),
            ["eth1", "eth2", "eth0"]
        );
    }

    #[test]
    fn what_was_asked_for_may_be_virtual_or_loopback() {
        assert_eq!(select("lo", &host()).unwrap(), ["lo"]);
        assert_eq!(select("docker0", &host()).unwrap(), ["docker0"]);
    }

    #[test]
    fn a_full_name_that_is_not_ready_is_an_error_a_prefix_passes_over_it() {
        let error = select("eth0,eth3", &host()).unwrap_err();
        assert_eq!(
            error.to_string(),
            r#"the interfaces that match "eth3" are not ready: eth3 has no carrier"#
        );
        let two = [
            down("eth1"),
            Interface {
                index: 2,
                ..interface("eth10")
            },
        ];
        assert!(matches!(
            select("eth1", &two),
            Err(SelectError::NotReady { .. })
        ));
        assert_eq!(select("eth", &two).unwrap(), ["eth10"]);
    }

    #[test]
    fn errors_list_what_there_is() {
        assert_eq!(
            select("ens", &host()).unwrap_err().to_string(),
            r#"no interface matches "ens"; this machine has lo, eth0, eth1, eth2, eth3, docker0"#
        );
        assert_eq!(
            select("^lo", &[lo(), down("eth0")])
                .unwrap_err()
                .to_string(),
            "no usable interface is left by ^lo: eth0 is down"
        );
        assert_eq!(
            select("", &[]).unwrap_err().to_string(),
            "no usable interface: none"
        );
    }

    #[test]
    fn bad_texts_are_refused_by_what_is_wrong_with_them() {
        use ParseSelectorError::*;
        let parse = |text: &str| text.parse::<InterfaceSelector>().unwrap_err();
        for text in ["^", "=", "^=", "eth0,", ",eth0", "eth0,,eth1"] {
            assert_eq!(parse(text), EmptyName, "{text}");
        }
        assert_eq!(parse("=a,=b"), MisplacedModifier { name: "=b".into() });
        assert_eq!(parse("=^a"), MisplacedModifier { name: "^a".into() });
        assert_eq!(
            parse("a234567890123456"),
            TooLong {
                name: "a234567890123456".into()
            }
        );
        assert_eq!(
            parse("eth0:80"),
            BadCharacter {
                name: "eth0:80".into(),
                character: ':'
            }
        );
    }

    #[test]
    fn spaces_around_names_do_not_count() {
        let selector: InterfaceSelector = " ^= eth0 , eth1 ".parse().unwrap();
        assert_eq!(selector.to_string(), "^=eth0,eth1");
        assert!(" ".parse::<InterfaceSelector>().unwrap().is_default());
    }

    proptest! {
        #[test]
        fn what_is_displayed_parses_to_the_same(
            text in r"(\^?=?[a-z0-9._-]{1,15}(,[a-z0-9._-]{1,15}){0,3})?"
        ) {
            let selector: InterfaceSelector = text.parse().unwrap();
            prop_assert_eq!(selector.to_string(), text);
            prop_assert_eq!(selector.to_string().parse::<InterfaceSelector>(), Ok(selector));
        }

        #[test]
        fn any_text_parses_or_is_refused(text in "\\PC{0,40}|[\\^=,:/ a-z]{0,20}") {
            if let Ok(selector) = text.parse::<InterfaceSelector>() {
                prop_assert_eq!(selector.to_string().parse::<InterfaceSelector>(), Ok(selector));
            }
        }

        #[test]
        fn a_selection_is_never_empty_and_never_repeats(
            text in r"\^?=?(eth[0-9]?|lo|docker0)(,(eth[0-9]?|lo|docker0)){0,3}"
        ) {
            if let Ok(chosen) = select(&text, &host()) {
                let mut unique = chosen.clone();
                unique.sort();
                unique.dedup();
                prop_assert!(!chosen.is_empty());
                prop_assert_eq!(unique.len(), chosen.len());
            }
        }
    }
}
