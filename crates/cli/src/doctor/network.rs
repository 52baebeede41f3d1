//! Checks the network: interfaces, packets, congestion control, the listen queue.

use tcpx_net::interfaces::{Interface, InterfaceSelector};

use super::machine::Machine;
use super::{Finding, Level};
use crate::error::chain;
use crate::units::{count, megabits_per_second};

/// The packet size of a network made for bulk data.
const JUMBO: u32 = 9000;
/// Peers that may connect in the same instant, as when a job starts.
const BURST: usize = 32;

/// Runs all checks but the choice of interfaces.
pub(super) fn findings(machine: &Machine, chosen: &[Interface], lanes: usize) -> Vec<Finding> {
    let probing = machine.sysctl_number("net/ipv4/tcp_mtu_probing");
    let congestion = machine.sysctl("net/ipv4/tcp_congestion_control");
    let mut findings = Vec::new();
    findings.extend(packets(chosen, probing));
    findings.push(congestion_control(congestion.as_deref()));
    findings.extend(
        machine
            .sysctl_number("net/core/somaxconn")
            .map(|max| backlog(max, lanes)),
    );
    findings
}

/// Checks which interfaces the settings choose.
pub(super) fn selection(selector: &InterfaceSelector, found: &[Interface]) -> Finding {
    const ID: &str = "network.interfaces";
    let chosen = match selector.select(found) {
        Ok(chosen) => chosen,
        Err(error) => {
            return Finding::fail(
                ID,
                chain(&error),
                "`tcpx devices` shows every interface; choose with TCPX_INTERFACES",
            );
        }
    };
    let names: Vec<String> = chosen.iter().map(describe).collect();
    let found = format!("lanes run over {}", names.join(", "));
    if chosen.iter().all(Interface::is_loopback) && selector.is_default() {
        return Finding {
            level: Level::Warn,
            ..Finding::ok(ID, format!("{found}: only this machine can be reached"))
        }
        .advise("`tcpx devices` says why no other interface is usable");
    }
    Finding::ok(ID, found)
}

/// Reports that the kernel did not list its interfaces.
pub(super) fn undiscovered(error: &str) -> Finding {
    Finding::fail(
        "network.interfaces",
        error,
        "allow netlink sockets (AF_NETLINK) in the sandbox this runs in",
    )
}

fn describe(interface: &Interface) -> String {
    match interface.speed_mbps {
        Some(speed) => format!("{} ({})", interface.name, megabits_per_second(speed.into())),
        None => interface.name.clone(),
    }
}

/// Checks the packet size: small packets cost CPU time. Nothing if only loopback is used.
fn packets(chosen: &[Interface], probing: Option<u8>) -> Option<Finding> {
    const ID: &str = "network.mtu";
    let real: Vec<&Interface> = chosen.iter().filter(|i| !i.is_loopback()).collect();
    let list = |interfaces: &[&Interface]| {
        let items: Vec<String> = interfaces
            .iter()
            .map(|i| format!("MTU {} on {}", i.mtu, i.name))
            .collect();
        items.join(", ")
    };
    let small: Vec<&Interface> = real.iter().copied().filter(|i| i.mtu < JUMBO).collect();
    if real.is_empty() {
        return None;
    }
    if !small.is_empty() {
        return Some(Finding::info(ID, list(&small)).advise(format!(
            "where every switch on the way allows it, `ip link set NAME mtu {JUMBO}` lowers the \
             CPU time per byte"
        )));
    }
    let found = list(&real);
    if probing == Some(0) {
        return Some(Finding::info(ID, found).advise(
            "`sysctl -w net.ipv4.tcp_mtu_probing=1` survives a path that drops large packets \
             without saying so",
        ));
    }
    Some(Finding::ok(ID, found))
}

fn congestion_control(name: Option<&str>) -> Finding {
    const ID: &str = "network.congestion";
    match name {
        Some(name @ ("cubic" | "bbr" | "dctcp" | "bbr2" | "bbr3")) => {
            Finding::ok(ID, format!("congestion control: {name}"))
        }
        Some(name) => Finding::info(ID, format!("congestion control: {name}"))
            .advise("`sysctl -w net.ipv4.tcp_congestion_control=cubic` is the usual choice"),
        None => Finding::info(ID, "congestion control: unknown"),
    }
}

fn backlog(max: u64, lanes: usize) -> Finding {
    const ID: &str = "network.backlog";
    let wanted = (BURST * lanes) as u64;
    let found = format!("up to {max} connections may wait to be accepted");
    if max >= wanted {
        return Finding::ok(ID, found);
    }
    Finding::warn(
        ID,
        format!(
            "{found}; {BURST} peers of {} open {wanted} at once",
            count(lanes, "lane")
        ),
        format!(
            "`sysctl -w net.core.somaxconn={}`",
            wanted.next_power_of_two().max(4096)
        ),
    )
}

#[cfg(test)]
mod tests {
    use tcpx_net::interfaces::{InterfaceAddress, InterfaceKind};

    use super::super::machine::tests::Fake;
    use super::*;

    fn interface(name: &str, kind: InterfaceKind, mtu: u32) -> Interface {
        Interface {
            index: 1,
            name: name.into(),
            up: true,
            running: true,
            kind,
            addresses: vec![InterfaceAddress::new([10, 0, 0, 1].into(), 24)],
            mtu,
            speed_mbps: Some(200_000),
            numa_node: None,
            pci_address: None,
            driver: None,
            locations: Vec::new(),
        }
    }

    fn card(mtu: u32) -> Interface {
        interface("eth1", InterfaceKind::Physical, mtu)
    }

    fn lo() -> Interface {
        interface("lo", InterfaceKind::Loopback, 65536)
    }

    #[test]
    fn the_chosen_interfaces_are_named() {
        let finding = selection(&InterfaceSelector::every_usable(), &[lo(), card(9000)]);
        assert_eq!(
            finding,
            Finding::ok("network.interfaces", "lanes run over eth1 (200 Gbit/s)")
        );
    }

    #[test]
    fn loopback_alone_is_a_warning_unless_asked_for() {
        assert_eq!(
            selection(&InterfaceSelector::every_usable(), &[lo()]).level,
            Level::Warn
        );
        assert_eq!(selection(&"lo".parse().unwrap(), &[lo()]).level, Level::Ok);
    }

    #[test]
    fn no_interface_means_no_transfers() {
        let finding = selection(&"ib".parse().unwrap(), &[lo()]);
        assert_eq!(finding.level, Level::Fail);
        assert!(
            finding.found.contains("this machine has lo"),
            "{}",
            finding.found
        );
        assert_eq!(undiscovered("refused").level, Level::Fail);
    }

    #[test]
    fn small_packets_are_a_note() {
        assert_eq!(packets(&[lo()], Some(0)), None);
        assert_eq!(
            packets(&[card(1500)], Some(0)).unwrap().found,
            "MTU 1500 on eth1"
        );
        assert_eq!(packets(&[card(9000)], Some(0)).unwrap().level, Level::Info);
        assert_eq!(packets(&[card(9000)], Some(1)).unwrap().level, Level::Ok);
    }

    #[test]
    fn the_listen_queue_holds_a_starting_job() {
        assert_eq!(backlog(4096, 8).level, Level::Ok);
        let short = backlog(128, 8);
        assert_eq!(short.level, Level::Warn);
        assert!(
            short.found.contains("32 peers of 8 lanes open 256 at once"),
            "{}",
            short.found
        );
    }

    #[test]
    fn what_cannot_be_read_is_left_out_or_said() {
        let findings = findings(&Fake::new().machine(), &[], 4);
        assert_eq!(
            findings,
            [Finding::info(
                "network.congestion",
                "congestion control: unknown"
            )]
        );
    }
}
