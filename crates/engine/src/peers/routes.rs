//! Which local address goes to which remote address: one route for each pair of interfaces that
//! belong together.
//!
//! Pure: no I/O.

use std::net::{IpAddr, SocketAddr};

/// A way to try: from an address of ours (or whichever the kernel picks) to one of the peer's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Route {
    pub(crate) local: Option<IpAddr>,
    pub(crate) remote: SocketAddr,
}

/// What an address of ours is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// It carries lanes.
    Data,
    /// It carries lanes only when no data address leads to the peer.
    Control,
}

/// An address of ours that lanes may leave from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LocalAddress {
    pub(crate) ip: IpAddr,
    pub(crate) prefix_len: u8,
    pub(crate) role: Role,
}

impl LocalAddress {
    fn is_neighbour(&self, remote: IpAddr) -> bool {
        match (self.ip, remote) {
            (IpAddr::V4(a), IpAddr::V4(b)) => {
                let shift = 32 - u32::from(self.prefix_len.min(32));
                u32::from(a).checked_shr(shift) == u32::from(b).checked_shr(shift)
            }
            (IpAddr::V6(a), IpAddr::V6(b)) => {
                let shift = 128 - u32::from(self.prefix_len.min(128));
                u128::from(a).checked_shr(shift) == u128::from(b).checked_shr(shift)
            }
            _ => false,
        }
    }
}

/// The routes to a peer and how many of them lanes are spread over. The ones after that are tried
/// only when those fail.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Routes {
    pub(crate) all: Vec<Route>,
    pub(crate) preferred: usize,
}

impl Routes {
    /// Pairs our addresses with the peer's. Lanes stay within one address family: the first in the
    /// peer's list that our data addresses have, too. The other family is a fall-back, as are the
    /// control addresses of both sides.
    pub(crate) fn new(local: &[LocalAddress], remote: &[SocketAddr]) -> Self {
        let family = family(local, remote);
        let theirs = remote.iter().copied();
        let theirs: Vec<_> = theirs.filter(|r| Some(r.is_ipv4()) == family).collect();
        let ours = |role| -> Vec<LocalAddress> {
            let ours = local.iter().copied();
            ours.filter(|l| l.role == role && Some(l.ip.is_ipv4()) == family)
                .collect()
        };
        let (data, control) = (ours(Role::Data), ours(Role::Control));
        let (their_data, their_control) = split_by_role(&data, &control, &theirs);
        let is_own = |ip| local.iter().any(|l| l.ip == ip);
        let mut all = if data.is_empty() || their_data.is_empty() {
            pairs(&control, &theirs, is_own)
        } else {
            pairs(&data, &their_data, is_own)
        };
        let preferred = all.len();
        // Then whatever the kernel's routing table makes of the rest.
        let unbound = their_control.iter().chain(remote);
        let fall_backs = unbound.map(|&remote| Route {
            local: None,
            remote,
        });
        let by_control = pairs(&control, &their_control, is_own);
        for route in by_control.into_iter().chain(fall_backs) {
            if !all.contains(&route) {
                all.push(route);
            }
        }
        Self { all, preferred }
    }

    /// How many pairs of interfaces lanes should use. Routes within this machine count as none: the
    /// kernel takes loopback whatever their addresses.
    pub(crate) fn pairs(&self) -> usize {
        let preferred = self.all[..self.preferred].iter();
        preferred.filter(|route| route.local.is_some()).count()
    }
}

/// Chooses the address family of the lanes; `true` means IPv4.
fn family(local: &[LocalAddress], remote: &[SocketAddr]) -> Option<bool> {
    let is_served = |roles: &[Role], r: &SocketAddr| {
        let mut served = local.iter().filter(|l| roles.contains(&l.role));
        r.ip().is_loopback() || served.any(|l| l.ip.is_ipv4() == r.is_ipv4())
    };
    let by = |roles: &[Role]| remote.iter().find(|r| is_served(roles, r));
    by(&[Role::Data])
        .or_else(|| by(&[Role::Control]))
        .or(remote.first())
        .map(SocketAddr::is_ipv4)
}

/// Tells the peer's data addresses from its control addresses, which its list does not say.
///
/// An address on a network where we have nothing but a control address is one. Where networks do
/// not tell, since all addresses share one or none (every address has a prefix of its own, as in
/// some clouds), the peer is taken to be set up as we are: it lists control addresses last. Never
/// does that leave it fewer data addresses than we have.
fn split_by_role(
    data: &[LocalAddress],
    control: &[LocalAddress],
    theirs: &[SocketAddr],
) -> (Vec<SocketAddr>, Vec<SocketAddr>) {
    let meets = |ours: &[LocalAddress], r: &SocketAddr| ours.iter().any(|l| l.is_neighbour(r.ip()));
    let (mut their_control, mut their_data): (Vec<_>, Vec<_>) = theirs
        .iter()
        .copied()
        .partition(|r| meets(control, r) && !meets(data, r));
    if their_control.is_empty() {
        let spare = their_data.len().saturating_sub(data.len());
        for _ in 0..spare.min(control.len()) {
            let is_undecided = |r: &SocketAddr| meets(control, r) == meets(data, r);
            if let Some(last) = their_data.iter().rposition(is_undecided) {
                their_control.insert(0, their_data.remove(last));
            }
        }
    }
    (their_data, their_control)
}

/// Pairs addresses so that each of the peer's and each of ours is on a route, where it leads
/// anywhere.
fn pairs(
    ours: &[LocalAddress],
    theirs: &[SocketAddr],
    is_own: impl Fn(IpAddr) -> bool,
) -> Vec<Route> {
    let ours: Vec<_> = ours.iter().filter(|l| !l.ip.is_loopback()).collect();
    // On the same machine the kernel takes loopback whatever we say.
    let is_here = |r: &SocketAddr| r.ip().is_loopback() || is_own(r.ip());
    // A network that we are on is left to the addresses there.
    let leads = |l: &LocalAddress, r: &SocketAddr| {
        !is_here(r)
            && (l.is_neighbour(r.ip()) || !ours.iter().any(|other| other.is_neighbour(r.ip())))
    };
    let mut routes: Vec<Route> = Vec::new();
    for remote in theirs {
        let uses = |ip| routes.iter().filter(|r| r.local == Some(ip)).count();
        let sources = ours.iter().filter(|l| leads(l, remote));
        let route = Route {
            local: sources.min_by_key(|l| uses(l.ip)).map(|l| l.ip),
            remote: *remote,
        };
        routes.push(route);
    }
    for local in &ours {
        if routes.iter().any(|r| r.local == Some(local.ip)) {
            continue;
        }
        let uses = |remote: &SocketAddr| routes.iter().filter(|r| r.remote == *remote).count();
        let targets = theirs.iter().filter(|r| leads(local, r));
        if let Some(&remote) = targets.min_by_key(|r| uses(r)) {
            let local = Some(local.ip);
            routes.push(Route { local, remote });
        }
    }
    routes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn local(ip: &str, prefix_len: u8) -> LocalAddress {
        LocalAddress {
            ip: ip.parse().unwrap(),
            prefix_len,
            role: Role::Data,
        }
    }

    fn control(ip: &str, prefix_len: u8) -> LocalAddress {
        LocalAddress {
            role: Role::Control,
            ..local(ip, prefix_len)
        }
    }

    fn remote(list: &[&str]) -> Vec<SocketAddr> {
        list.iter().map(|a| a.parse().unwrap()).collect()
    }

    fn preferred(local: &[LocalAddress], to: &[&str]) -> Vec<(Option<String>, String)> {
        let routes = Routes::new(local, &remote(to));
        routes.all[..routes.preferred]
            .iter()
            .map(|r| (r.local.map(|l| l.to_string()), r.remote.to_string()))
            .collect()
    }

    fn pair(local: &str, remote: &str) -> (Option<String>, String) {
        (Some(local.to_owned()), remote.to_owned())
    }

    #[test]
    fn interfaces_on_the_same_network_are_paired() {
        let ours = [local("10.0.1.1", 24), local("10.0.2.1", 24)];
        let got = preferred(&ours, &["10.0.2.9:5", "10.0.1.9:5"]);
        assert_eq!(
            got,
            [
                pair("10.0.2.1", "10.0.2.9:5"),
                pair("10.0.1.1", "10.0.1.9:5")
            ]
        );
    }

    #[test]
    fn several_of_ours_on_one_network_are_all_used() {
        let ours = [local("10.0.0.1", 24), local("10.0.0.2", 24)];
        let got = preferred(&ours, &["10.0.0.9:5"]);
        assert_eq!(
            got,
            [
                pair("10.0.0.1", "10.0.0.9:5"),
                pair("10.0.0.2", "10.0.0.9:5")
            ]
        );
    }

    #[test]
    fn loopback_and_own_addresses_leave_the_source_to_the_kernel() {
        let ours = [local("10.0.0.1", 24)];
        assert_eq!(
            preferred(&ours, &["127.0.0.1:5"]),
            [(None, "127.0.0.1:5".to_owned())]
        );
        assert_eq!(
            preferred(&ours, &["10.0.0.1:5"]),
            [(None, "10.0.0.1:5".to_owned())]
        );
        assert_eq!(
            preferred(&[local("127.0.0.1", 8)], &["10.0.0.1:5"]),
            [(None, "10.0.0.1:5".to_owned())]
        );
    }

    #[test]
    fn one_family_is_preferred_and_the_other_a_fall_back() {
        let ours = [local("10.0.0.1", 24), local("fd00::1", 64)];
        let routes = Routes::new(&ours, &remote(&["10.0.0.9:5", "[fd00::9]:5"]));
        assert_eq!(routes.preferred, 1);
        assert!(routes.all.iter().any(|r| r.remote.is_ipv6()));
        let only_v6 = Routes::new(&ours[1..], &remote(&["10.0.0.9:5", "[fd00::9]:5"]));
        assert!(only_v6.all[0].remote.is_ipv6());
    }

    #[test]
    fn a_prefix_of_zero_or_full_length_does_not_overflow() {
        assert!(local("10.0.0.1", 0).is_neighbour("192.0.2.1".parse().unwrap()));
        assert!(!local("10.0.0.1", 32).is_neighbour("10.0.0.2".parse().unwrap()));
        assert!(local("fd00::1", 0).is_neighbour("fe00::1".parse().unwrap()));
    }

    #[test]
    fn no_interface_is_left_over() {
        let ours = [
            local("10.0.1.1", 24),
            local("10.0.2.1", 24),
            local("10.0.2.2", 24),
        ];
        let expected = [
            pair("10.0.1.1", "10.0.1.9:5"),
            pair("10.0.2.1", "10.0.2.9:5"),
            pair("10.0.2.2", "10.0.2.9:5"),
        ];
        assert_eq!(preferred(&ours, &["10.0.1.9:5", "10.0.2.9:5"]), expected);
        // An interface that shares no network with the peer is not used towards its networks.
        let ours = [local("10.0.1.1", 24), local("10.0.7.1", 24)];
        let expected = [pair("10.0.1.1", "10.0.1.9:5")];
        assert_eq!(preferred(&ours, &["10.0.1.9:5"]), expected);
    }

    /// Three networks: the first for control, as both sides list them.
    const THREE: [&str; 3] = ["10.0.1.9:5", "10.0.2.9:5", "10.0.0.9:5"];

    #[test]
    fn lanes_keep_off_the_control_interface() {
        let ours = [
            local("10.0.1.1", 24),
            local("10.0.2.1", 24),
            control("10.0.0.1", 24),
        ];
        let expected = [
            pair("10.0.1.1", "10.0.1.9:5"),
            pair("10.0.2.1", "10.0.2.9:5"),
        ];
        assert_eq!(preferred(&ours, &THREE), expected);
        // Wherever the peer lists it.
        let first = ["10.0.0.9:5", "10.0.1.9:5", "10.0.2.9:5"];
        assert_eq!(preferred(&ours, &first), expected);
        // The fall-back after them is the way over both control interfaces.
        let routes = Routes::new(&ours, &remote(&THREE));
        let next = routes.all[routes.preferred];
        assert_eq!(next.local, Some("10.0.0.1".parse().unwrap()));
        assert_eq!(next.remote, "10.0.0.9:5".parse().unwrap());
        for to in remote(&THREE) {
            assert!(routes.all.contains(&Route {
                local: None,
                remote: to
            }));
        }
    }

    #[test]
    fn a_peer_that_only_the_control_interface_reaches_is_reached() {
        let ours = [local("10.0.1.1", 24), control("10.0.0.1", 24)];
        let expected = [pair("10.0.0.1", "10.0.0.9:5")];
        assert_eq!(preferred(&ours, &["10.0.0.9:5"]), expected);
        let ours = [local("fd00::1", 64), control("10.0.0.1", 24)];
        assert_eq!(preferred(&ours, &["10.0.0.9:5"]), expected);
    }

    #[test]
    fn a_control_interface_does_not_choose_the_family() {
        let ours = [local("fd00::1", 64), control("10.0.0.1", 24)];
        let got = preferred(&ours, &["10.0.0.9:5", "[fd00::9]:5"]);
        assert_eq!(got, [pair("fd00::1", "[fd00::9]:5")]);
    }

    #[test]
    fn where_networks_do_not_tell_the_last_addresses_are_for_control() {
        // Each address has a prefix of its own, or all share one.
        for prefix in [32, 16] {
            let ours = [
                local("10.0.1.1", prefix),
                local("10.0.2.1", prefix),
                control("10.0.0.1", prefix),
            ];
            let expected = [
                pair("10.0.1.1", "10.0.1.9:5"),
                pair("10.0.2.1", "10.0.2.9:5"),
            ];
            assert_eq!(preferred(&ours, &THREE), expected);
            // A peer with no more addresses than we have for data uses all of them.
            assert_eq!(preferred(&ours, &THREE[..2]), expected);
        }
        // An address on a network of ours is no control address, wherever it stands.
        let ours = [
            local("10.0.1.1", 24),
            local("10.0.2.1", 24),
            control("10.0.0.1", 24),
        ];
        let expected = [
            pair("10.0.1.1", "10.0.1.9:5"),
            pair("10.0.2.1", "10.0.2.9:5"),
        ];
        let got = preferred(&ours, &["10.0.3.9:5", "10.0.1.9:5", "10.0.2.9:5"]);
        assert_eq!(got, expected);
    }

    #[test]
    fn routes_within_a_machine_are_no_pairs_of_interfaces() {
        let ours = [local("10.0.1.1", 24), local("10.0.2.1", 24)];
        let pairs = |to: &[&str]| Routes::new(&ours, &remote(to)).pairs();
        assert_eq!(pairs(&["10.0.1.1:5", "10.0.2.1:5"]), 0);
        assert_eq!(pairs(&["127.0.0.1:5"]), 0);
        assert_eq!(pairs(&["10.0.1.9:5", "10.0.2.9:5"]), 2);
        assert_eq!(pairs(&["10.0.1.9:5"]), 1);
    }
}
