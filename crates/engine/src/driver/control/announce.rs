//! The log line for each new connection: how bytes travel, and which better paths are not used.

use std::collections::BTreeMap;
use std::net::IpAddr;

use crate::config::{SameHostKind, TransportKind};
use crate::link::tcp::Connection;
use crate::link::{LaneInfo, Link};
use crate::log::limited;
use crate::peers::{PeerShared, SessionCore};

/// Logs that a connection is in use.
pub(super) fn announce(
    core: &SessionCore,
    peer: &PeerShared,
    connection: &Connection,
    accepted: bool,
) {
    if !tracing::enabled!(tracing::Level::INFO) {
        return;
    }
    let config = &core.context().config;
    let names = &core.parts.interface_names;
    let lanes = connection.lane_infos();
    let path = match config.transport() {
        TransportKind::Tcp => "tcp",
        TransportKind::Plugin => "plugin",
    };
    let is_local = connection.is_on_this_host();
    let is_off = config.same_host() == SameHostKind::Off;
    let has_reason = !connection.same_host().is_deciding();
    let same_host = connection.same_host().info().why_not;
    let seen = Seen {
        lanes: &lanes,
        names,
        // Unknown while the mutual proof is in progress; a separate line follows.
        same_host: same_host.filter(|_| is_local && has_reason && !is_off),
        same_host_is_off: is_local && is_off,
    };
    let better = seen.better();
    limited!(
        EACH_PEER,
        INFO,
        peer = peer.name(),
        path,
        lanes = lanes.len(),
        over = seen.over(),
        better,
        accepted,
        "connected"
    );
}

/// Properties of a new connection.
struct Seen<'a> {
    lanes: &'a [LaneInfo],
    /// Names of the interfaces that may carry lanes, by address.
    names: &'a [(IpAddr, String)],
    /// Why memory of a peer on this host is not copied directly, if known.
    same_host: Option<String>,
    same_host_is_off: bool,
}

impl Seen<'_> {
    fn name(&self, ip: IpAddr) -> String {
        let found = self.names.iter().find(|(known, _)| *known == ip);
        found.map_or_else(|| ip.to_string(), |(_, name)| name.clone())
    }

    /// Returns the interfaces, with their lanes and destinations.
    fn over(&self) -> String {
        let mut ways: BTreeMap<(String, IpAddr), usize> = BTreeMap::new();
        for lane in self.lanes {
            let way = (self.name(lane.local.ip()), lane.remote.ip());
            *ways.entry(way).or_default() += 1;
        }
        let ways = ways.into_iter();
        let ways = ways.map(|((name, to), lanes)| format!("{name} to {to} ({lanes})"));
        ways.collect::<Vec<_>>().join(", ")
    }

    /// Returns better paths and why they are not used; `None` if the best path is used.
    fn better(&self) -> Option<String> {
        let mut all = Vec::new();
        if self.same_host_is_off {
            all.push("same host: not used, because same_host is off".to_owned());
        }
        if let Some(reason) = &self.same_host {
            all.push(format!("same host: not used, because {reason}"));
        }
        let is_used = |name: &str| {
            let mut lanes = self.lanes.iter();
            lanes.any(|lane| self.name(lane.local.ip()) == name)
        };
        let is_remote = !self.same_host_is_off && self.same_host.is_none();
        let mut unused: Vec<_> = self.names.iter().map(|(_, name)| name.as_str()).collect();
        unused.retain(|name| is_remote && !is_used(name));
        unused.dedup();
        if !unused.is_empty() {
            let unused = unused.join(", ");
            all.push(format!(
                "{unused}: not used, because no lane to this peer uses it"
            ));
        }
        if self.lanes.len() == 1 {
            all.push("more lanes: not used, because lanes is 1 on this side or the peer's".into());
        }
        (!all.is_empty()).then(|| all.join("; "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lane(index: usize, local: &str, remote: &str) -> LaneInfo {
        LaneInfo {
            index,
            local: local.parse().unwrap(),
            remote: remote.parse().unwrap(),
            bytes_sent: 0,
            bytes_received: 0,
            is_up: true,
            failovers: 0,
        }
    }

    #[test]
    fn line_names_interfaces_and_better_paths() {
        let names = [("10.0.0.1", "eth0"), ("10.1.0.1", "eth1")];
        let names = names.map(|(ip, name)| (ip.parse().unwrap(), name.to_owned()));
        let [a, b] = ["10.0.0.1:1", "10.1.0.1:1"];
        let mut lanes = vec![lane(0, a, "10.0.0.2:9"), lane(1, a, "10.0.0.2:9")];
        let seen = |lanes: &[LaneInfo]| {
            let seen = Seen {
                lanes,
                names: &names,
                same_host: None,
                same_host_is_off: false,
            };
            (seen.over(), seen.better())
        };
        let (over, better) = seen(&lanes);
        assert_eq!(over, "eth0 to 10.0.0.2 (2)");
        let better = better.unwrap();
        assert!(better.starts_with("eth1: not used, because"), "{better}");
        lanes.push(lane(2, b, "10.1.0.2:9"));
        let (over, better) = seen(&lanes);
        assert_eq!(over, "eth0 to 10.0.0.2 (2), eth1 to 10.1.0.2 (1)");
        assert_eq!(better, None, "the best path is used");
        let better = seen(&lanes[..1]).1.unwrap();
        assert!(better.contains("more lanes: not used"), "{better}");
    }

    #[test]
    fn line_names_why_lanes_carry_a_peer_on_this_host() {
        let lanes = [(); 2].map(|()| lane(0, "127.0.0.1:1", "127.0.0.1:2"));
        let seen = Seen {
            lanes: &lanes,
            names: &[],
            same_host: Some("the peer does not offer it".into()),
            same_host_is_off: false,
        };
        let better = "same host: not used, because the peer does not offer it";
        assert_eq!(seen.better().as_deref(), Some(better));
    }
}
