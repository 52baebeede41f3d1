//! Which interfaces carry lanes: the syntax of `NCCL_SOCKET_IFNAME` and the rules behind it.

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
/// | `eth1,eth2` | those beginning with `eth1`, then those beginning with `eth2` |
/// | `=eth1,eth2` | exactly `eth1` and `eth2` |
/// | `^docker,lo` | every usable interface whose name begins with none of these |
/// | `^=eth0` | every usable interface but `eth0` |
///
/// A modifier stands once, at the front, and holds for the whole list.
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
    /// Every usable interface: what an empty text means.
    pub fn every_usable() -> Self {
        InterfaceSelector::default()
    }

    /// Whether this names nothing and leaves the choice to the default rules.
    pub fn is_default(&self) -> bool {
        self.mode == Mode::Default
    }

    /// Chooses among `interfaces`.
    ///
    /// Interfaces that were asked for come in the order of the selector, those one name matches
    /// (and every interface where nothing was asked for) fastest first, then by index. Asked for,
    /// an interface may be loopback or virtual, but it must be up and have an address: one that
    /// was named in full and is not ready is an error, one that merely shares a prefix with others
    /// that are ready is passed over.
    ///
    /// Where nothing was asked for, the first of these groups that is not empty is chosen:
    /// interfaces with a device behind them (bonds, VLANs and the like included); the inner ends
    /// of containers; loopback.
    ///
    /// # Errors
    ///
    /// [`SelectError`], which lists what there is to choose from.
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
        let tiers: [fn(&Interface) -> bool; 3] = [
            |interface| interface.usable().is_ok(),
            |interface| is_container_end(interface) && interface.ready().is_ok(),
            |interface| interface.is_loopback() && interface.ready().is_ok(),
        ];
        tiers
            .into_iter()
            .map(|tier| left.iter().copied().filter(|i| tier(i)).collect::<Vec<_>>())
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

/// A virtual interface that may be the only way out of a container.
///
/// On a host the outer ends of these have no address, so they are never ready there; bridges,
/// tunnels and dummies do have one and lead nowhere a peer could be expected.
fn is_container_end(interface: &Interface) -> bool {
    matches!(&interface.kind, InterfaceKind::Virtual { kind }
        if ["veth", "netkit", "unknown"].contains(&kind.as_str()))
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

    /// An interface with a device, up, with an address and no known speed.
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
            ..interface("lo")
        }
    }

    fn down(name: &str) -> Interface {
        Interface {
            up: false,
            ..interface(name)
        }
    }

    /// A host with two fast cards, a slow one, one unplugged, and Docker.
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
        // A bridge is no way out, whatever its address.
        assert_eq!(
            select("", &[lo(), of_kind("docker0", "bridge")]).unwrap(),
            ["lo"]
        );
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
