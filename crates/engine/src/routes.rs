//! Which local address goes to which remote address: one route for each pair of interfaces that belong
//! together.
//!
//! Pure: no I/O.

use std::net::{IpAddr, SocketAddr};

/// A way to try: from an address of ours (or whichever the kernel picks) to one of the peer's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Route {
    pub(crate) local: Option<IpAddr>,
    pub(crate) remote: SocketAddr,
}

/// An address of ours that lanes may leave from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LocalAddress {
    pub(crate) ip: IpAddr,
    pub(crate) prefix_len: u8,
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

/// The routes to a peer and how many of them lanes are spread over. The ones after that are tried only when
/// those fail.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Routes {
    pub(crate) all: Vec<Route>,
    pub(crate) preferred: usize,
}

impl Routes {
    /// Pairs our addresses with the peer's. Lanes stay within one address family (the first in the
    /// peer's list that we have, too); the other one is a fall-back.
    pub(crate) fn new(local: &[LocalAddress], remote: &[SocketAddr]) -> Self {
        let reachable = |r: &&SocketAddr| {
            r.ip().is_loopback() || local.iter().any(|l| l.ip.is_ipv4() == r.is_ipv4())
        };
        let family = remote
            .iter()
            .find(reachable)
            .or(remote.first())
            .map(SocketAddr::is_ipv4);
        let theirs: Vec<_> = remote
            .iter()
            .filter(|r| Some(r.is_ipv4()) == family)
            .collect();
        let ours: Vec<_> = local
            .iter()
            .filter(|l| Some(l.ip.is_ipv4()) == family)
            .collect();
        let mut all = Vec::new();
        for index in 0..ours.len().max(theirs.len()) {
            let Some(&&remote) = theirs.get(index % theirs.len().max(1)) else {
                break;
            };
            let route = Route {
                local: source(&ours, local, remote.ip(), index),
                remote,
            };
            if !all.contains(&route) {
                all.push(route);
            }
        }
        let preferred = all.len();
        // Whatever the kernel's routing table makes of the rest.
        for &remote in remote {
            let route = Route {
                local: None,
                remote,
            };
            if !all.contains(&route) {
                all.push(route);
            }
        }
        Self { all, preferred }
    }
}

/// The address to leave from towards `remote`: one on its network if we have one.
fn source(
    ours: &[&LocalAddress],
    all: &[LocalAddress],
    remote: IpAddr,
    index: usize,
) -> Option<IpAddr> {
    // On the same machine the kernel takes loopback whatever we say.
    if remote.is_loopback() || all.iter().any(|l| l.ip == remote) {
        return None;
    }
    let candidates: Vec<_> = ours.iter().filter(|l| !l.ip.is_loopback()).collect();
    let neighbours: Vec<_> = candidates
        .iter()
        .filter(|l| l.is_neighbour(remote))
        .collect();
    if neighbours.is_empty() {
        candidates
            .get(index % candidates.len().max(1))
            .map(|l| l.ip)
    } else {
        Some(neighbours[index % neighbours.len()].ip)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn local(ip: &str, prefix_len: u8) -> LocalAddress {
        LocalAddress {
            ip: ip.parse().unwrap(),
            prefix_len,
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
}
