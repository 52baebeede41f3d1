//! Routes: pairs of local and remote addresses, one for each pair of interfaces that belong
//! together.
//!
//! Pure: no I/O.

use std::net::{IpAddr, SocketAddr};

/// A route to try: from a local address (or the kernel's choice) to one of the peer's addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Route {
    pub(crate) local: Option<IpAddr>,
    pub(crate) remote: SocketAddr,
}

/// Role of a local address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// Carries lanes.
    Data,
    /// Carries lanes only if no data address reaches the peer.
    Control,
}

/// A local address from which lanes may leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LocalAddress {
    pub(crate) ip: IpAddr,
    pub(crate) prefix_len: u8,
    pub(crate) role: Role,
    /// The index of the address's interface.
    pub(crate) interface: u32,
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

    /// Returns the address with a port. A link-local address has its interface as scope.
    pub(crate) fn with_port(&self, port: u16) -> SocketAddr {
        scoped(SocketAddr::new(self.ip, port), self.interface)
    }
}

/// Returns whether an address is an IPv6 link-local address,
/// which is valid only on the link of its scope.
fn needs_scope(ip: IpAddr) -> bool {
    matches!(ip, IpAddr::V6(v6) if v6.is_unicast_link_local())
}

/// Sets the scope of an IPv6 link-local address to the link of a local interface.
fn scoped(mut address: SocketAddr, interface: u32) -> SocketAddr {
    if let SocketAddr::V6(v6) = &mut address
        && v6.ip().is_unicast_link_local()
    {
        v6.set_scope_id(interface);
    }
    address
}

/// The routes to a peer, and the number of preferred ones, over which lanes are spread. The others
/// are tried only if these fail.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Routes {
    pub(crate) all: Vec<Route>,
    pub(crate) preferred: usize,
}

impl Routes {
    /// Pairs our addresses with the peer's. Lanes use one address family: the first in the peer's
    /// list that our data addresses have as well. The other family is a fall-back, as are the
    /// control addresses of both sides. `source` returns the address from which the kernel would
    /// leave.
    pub(crate) fn new(
        local: &[LocalAddress],
        remote: &[SocketAddr],
        source: &dyn Fn(SocketAddr) -> Option<IpAddr>,
    ) -> Self {
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
            pairs(&control, &theirs, is_own, source)
        } else {
            pairs(&data, &their_data, is_own, source)
        };
        let preferred = all.len();
        // Then the remaining addresses, with the source left to the kernel's routing table.
        let unbound = their_control.iter().chain(remote);
        let fall_backs = unbound.flat_map(|remote| unbound_routes(local, *remote));
        let by_control = pairs(&control, &their_control, is_own, source);
        for route in by_control.into_iter().chain(fall_backs) {
            if !all.contains(&route) {
                all.push(route);
            }
        }
        Self { all, preferred }
    }

    /// Returns how many pairs of interfaces lanes should use. Routes within this machine do not
    /// count: the kernel uses loopback for all of their addresses.
    pub(crate) fn pairs(&self) -> usize {
        let preferred = self.all[..self.preferred].iter();
        preferred.filter(|route| route.local.is_some()).count()
    }
}

/// Lists the routes to an address that leave the source to the kernel: one route, or one over each
/// local interface if the address does not determine its link. The peer's scope is valid only on
/// its own machine, which may be this one.
fn unbound_routes(local: &[LocalAddress], remote: SocketAddr) -> Vec<Route> {
    let mut remotes = vec![remote];
    if needs_scope(remote.ip()) {
        let is_own = local.iter().any(|l| l.ip == remote.ip());
        remotes.retain(|_| is_own);
        for l in local.iter().filter(|l| !l.ip.is_loopback()) {
            let remote = scoped(remote, l.interface);
            if !remotes.contains(&remote) {
                remotes.push(remote);
            }
        }
    }
    let unbound = |remote| Route {
        local: None,
        remote,
    };
    remotes.into_iter().map(unbound).collect()
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

/// Separates the peer's data addresses from its control addresses, which its list does not mark.
///
/// An address on a network where we have only a control address is a control address. If networks
/// do not decide, because all addresses share one or none (in some clouds each address has its own
/// prefix), the peer is assumed to be configured as we are: it lists control addresses last. This
/// never leaves it fewer data addresses than we have.
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

/// Pairs addresses so that each remote and each local address is on a route,
/// if it reaches the other side.
fn pairs(
    ours: &[LocalAddress],
    theirs: &[SocketAddr],
    is_own: impl Fn(IpAddr) -> bool,
    source: &dyn Fn(SocketAddr) -> Option<IpAddr>,
) -> Vec<Route> {
    let ours: Vec<_> = ours.iter().filter(|l| !l.ip.is_loopback()).collect();
    // Within the same machine the kernel always uses loopback.
    let is_here = |r: &SocketAddr| r.ip().is_loopback() || is_own(r.ip());
    let is_near = |r: &SocketAddr| ours.iter().any(|l| l.is_neighbour(r.ip()));
    let far = theirs.iter().filter(|r| !is_here(r) && !is_near(r));
    let sources = Sources::new(&ours, far, source);
    // A network on which we have addresses is reached only from these.
    let leads = |l: &LocalAddress, r: &SocketAddr| {
        !is_here(r)
            && needs_scope(l.ip) == needs_scope(r.ip())
            && (l.is_neighbour(r.ip()) || (!is_near(r) && sources.allow(l, r)))
    };
    let route = |l: Option<&LocalAddress>, r: SocketAddr| Route {
        local: l.map(|l| l.ip),
        remote: l.map_or(r, |l| scoped(r, l.interface)),
    };
    let mut routes: Vec<Route> = Vec::new();
    for remote in theirs {
        let uses = |ip| routes.iter().filter(|r| r.local == Some(ip)).count();
        let sources = ours.iter().filter(|l| leads(l, remote));
        let local = sources.min_by_key(|l| uses(l.ip)).copied();
        // Without a matching local address, a link-local address belongs to another link.
        if local.is_some() || is_here(remote) || !needs_scope(remote.ip()) {
            routes.push(route(local, *remote));
        }
    }
    for local in &ours {
        if routes.iter().any(|r| r.local == Some(local.ip)) {
            continue;
        }
        let uses = |to: &SocketAddr| {
            let same = |r: &&Route| (r.remote.ip(), r.remote.port()) == (to.ip(), to.port());
            routes.iter().filter(same).count()
        };
        let targets = theirs.iter().filter(|r| leads(local, r));
        if let Some(&remote) = targets.min_by_key(|r| uses(r)) {
            routes.push(route(Some(local), remote));
        }
    }
    routes
}

/// Local addresses from which remote networks are reached, according to the kernel's routing table,
/// which has one answer per destination.
///
/// If the answers are on several interfaces, the table has routes for these destinations (as in
/// clouds, where each address has its own network), and these are followed. If all answers are the
/// same, that may be a default route without information: all interfaces are used, each with the
/// address that the kernel returns, or else with its first.
struct Sources {
    answers: Vec<(SocketAddr, LocalAddress)>,
    tells: bool,
    /// Addresses that are not used, because another address of the same interface is the kernel's
    /// choice or comes before them.
    second: Vec<IpAddr>,
}

impl Sources {
    fn new<'a>(
        ours: &[&LocalAddress],
        far: impl Iterator<Item = &'a SocketAddr>,
        source: &dyn Fn(SocketAddr) -> Option<IpAddr>,
    ) -> Self {
        let answer = |r: &SocketAddr| {
            let ip = source(*r)?;
            let local = ours.iter().find(|l| l.ip == ip)?;
            Some((*r, **local))
        };
        let answers: Vec<_> = far.filter_map(answer).collect();
        let tells = answers
            .iter()
            .any(|(_, l)| l.interface != answers[0].1.interface);
        let is_answer = |l: &LocalAddress| answers.iter().any(|(_, a)| a.ip == l.ip);
        let is_second = |l: &LocalAddress| {
            let same =
                |o: &&&LocalAddress| o.interface == l.interface && o.ip.is_ipv4() == l.ip.is_ipv4();
            let mut peers = ours.iter().filter(same);
            match ours.iter().filter(same).any(|o| is_answer(o)) {
                true => !is_answer(l),
                false => peers.next().is_some_and(|first| first.ip != l.ip),
            }
        };
        let second = ours.iter().filter(|l| is_second(l)).map(|l| l.ip).collect();
        Self {
            answers,
            tells,
            second,
        }
    }

    /// Returns whether a network on which we have no address may be reached from a local address.
    fn allow(&self, local: &LocalAddress, remote: &SocketAddr) -> bool {
        let answer = self.answers.iter().find(|(r, _)| r == remote);
        match answer {
            Some((_, l)) if self.tells => l.ip == local.ip,
            _ => !self.second.contains(&local.ip),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn local(ip: &str, prefix_len: u8) -> LocalAddress {
        LocalAddress {
            ip: ip.parse().unwrap(),
            prefix_len,
            role: Role::Data,
            interface: 1,
        }
    }

    /// Returns an address of the interface with this index.
    fn on(interface: u32, address: LocalAddress) -> LocalAddress {
        LocalAddress {
            interface,
            ..address
        }
    }

    /// A routing table without information.
    fn unknown(_: SocketAddr) -> Option<IpAddr> {
        None
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
        let routes = Routes::new(local, &remote(to), &unknown);
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
    fn several_local_addresses_on_one_network_are_all_used() {
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
        let routes = Routes::new(&ours, &remote(&["10.0.0.9:5", "[fd00::9]:5"]), &unknown);
        assert_eq!(routes.preferred, 1);
        assert!(routes.all.iter().any(|r| r.remote.is_ipv6()));
        let only_v6 = Routes::new(
            &ours[1..],
            &remote(&["10.0.0.9:5", "[fd00::9]:5"]),
            &unknown,
        );
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
        // An interface that shares no network with the peer is not used for the peer's networks.
        let ours = [local("10.0.1.1", 24), local("10.0.7.1", 24)];
        let expected = [pair("10.0.1.1", "10.0.1.9:5")];
        assert_eq!(preferred(&ours, &["10.0.1.9:5"]), expected);
    }

    /// Addresses on three networks; the last is for control.
    const THREE: [&str; 3] = ["10.0.1.9:5", "10.0.2.9:5", "10.0.0.9:5"];

    #[test]
    fn lanes_avoid_the_control_interface() {
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
        // The position in the peer's list does not matter.
        let first = ["10.0.0.9:5", "10.0.1.9:5", "10.0.2.9:5"];
        assert_eq!(preferred(&ours, &first), expected);
        // The first fall-back is the route over both control interfaces.
        let routes = Routes::new(&ours, &remote(&THREE), &unknown);
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
    fn peer_reachable_only_over_the_control_interface_is_reached() {
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
    fn last_addresses_are_for_control_if_networks_do_not_decide() {
        // Each address has its own prefix, or all share one.
        for prefix in [32, 16] {
            let ours = [
                on(1, local("10.0.1.1", prefix)),
                on(2, local("10.0.2.1", prefix)),
                on(3, control("10.0.0.1", prefix)),
            ];
            let expected = [
                pair("10.0.1.1", "10.0.1.9:5"),
                pair("10.0.2.1", "10.0.2.9:5"),
            ];
            assert_eq!(preferred(&ours, &THREE), expected);
            // A peer with as many addresses as we have for data uses all of them.
            assert_eq!(preferred(&ours, &THREE[..2]), expected);
        }
        // An address on a network with a local address is not a control address,
        // whatever its position.
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
        let pairs = |to: &[&str]| Routes::new(&ours, &remote(to), &unknown).pairs();
        assert_eq!(pairs(&["10.0.1.1:5", "10.0.2.1:5"]), 0);
        assert_eq!(pairs(&["127.0.0.1:5"]), 0);
        assert_eq!(pairs(&["10.0.1.9:5", "10.0.2.9:5"]), 2);
        assert_eq!(pairs(&["10.0.1.9:5"]), 1);
    }

    #[test]
    fn networks_of_one_address_follow_the_routing_table() {
        let ours = [on(1, local("10.0.1.1", 32)), on(2, local("10.0.2.1", 32))];
        // The peer lists its addresses in reverse order.
        let to = remote(&["10.0.2.9:5", "10.0.1.9:5"]);
        let table = |r: SocketAddr| match r.to_string().starts_with("10.0.2.") {
            true => Some(ours[1].ip),
            false => Some(ours[0].ip),
        };
        let routes = Routes::new(&ours, &to, &table);
        let expected = [("10.0.2.1", "10.0.2.9:5"), ("10.0.1.1", "10.0.1.9:5")];
        assert_eq!(routes.preferred, 2);
        for (route, (local, remote)) in routes.all.iter().zip(expected) {
            assert_eq!(route.local, Some(local.parse().unwrap()));
            assert_eq!(route.remote, remote.parse().unwrap());
        }
        // A default route has no information: all interfaces are used.
        let routes = Routes::new(&ours, &to, &|_| Some(ours[0].ip));
        assert_eq!(routes.pairs(), 2);
        assert_ne!(routes.all[0].local, routes.all[1].local);
    }

    #[test]
    fn interface_has_one_source_for_other_networks() {
        let ours = [local("10.0.0.1", 24), local("203.0.113.5", 24)];
        let to = remote(&["198.51.100.7:5"]);
        let local_of = |routes: &Routes| routes.all[0].local.map(|ip| ip.to_string());
        // The kernel's choice, or else the first address.
        let routes = Routes::new(&ours, &to, &|_| Some(ours[1].ip));
        assert_eq!(
            (routes.preferred, local_of(&routes)),
            (1, Some("203.0.113.5".into()))
        );
        let routes = Routes::new(&ours, &to, &unknown);
        assert_eq!(
            (routes.preferred, local_of(&routes)),
            (1, Some("10.0.0.1".into()))
        );
        // A network shared by both sides is reached from the address on it.
        let both = remote(&["203.0.113.7:5", "10.0.0.7:5"]);
        let routes = Routes::new(&ours, &both, &unknown);
        assert_eq!(
            (routes.preferred, local_of(&routes)),
            (2, Some("203.0.113.5".into()))
        );
    }

    #[test]
    fn link_local_addresses_are_tried_on_each_link() {
        let ours = [on(3, local("fe80::a", 64)), on(4, local("fe80::b", 64))];
        let routes = Routes::new(&ours, &remote(&["[fe80::c%7]:5"]), &unknown);
        let all: Vec<_> = routes.all.iter().map(|r| r.remote.to_string()).collect();
        assert_eq!(routes.preferred, 2);
        assert_eq!(all[..2], ["[fe80::c%3]:5", "[fe80::c%4]:5"]);
        // The peer's interface index has no meaning here.
        assert!(!all.contains(&"[fe80::c%7]:5".to_owned()), "{all:?}");
        // Also from an interface that has only other addresses.
        let ours = [on(3, local("fd00::1", 64))];
        let routes = Routes::new(&ours, &remote(&["[fe80::c%7]:5"]), &unknown);
        assert_eq!(routes.all.len(), 1);
        assert_eq!(routes.all[0].remote.to_string(), "[fe80::c%3]:5");
        // Within a machine the interface index is valid.
        let ours = [on(3, local("fe80::a", 64)), on(4, local("fe80::b", 64))];
        let routes = Routes::new(&ours, &remote(&["[fe80::b%4]:5"]), &unknown);
        assert_eq!(routes.all[0].local, None);
        assert_eq!(routes.all[0].remote.to_string(), "[fe80::b%4]:5");
    }

    #[test]
    fn without_an_address_there_is_no_route() {
        let routes = Routes::new(&[local("10.0.0.1", 24)], &[], &unknown);
        assert_eq!((routes.all.len(), routes.pairs()), (0, 0));
    }
}
