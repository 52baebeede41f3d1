//! Firewalls, mapped ports and unusual addresses, between network namespaces, as root. Otherwise
//! these tests report that they were skipped.

use std::collections::BTreeSet;

use tcpx::{Error, Session};
use tcpx_testkit::netns::{Family, Machine, TwoMachines};
use tcpx_testkit::story::skipped;
use tcpx_testkit::{Host, RemoteProcess, Setup, story, wait_until};

use crate::network::{Stage, moves_bytes};

/// Enough for several chunks, and little to verify.
const LEN: usize = 300_007;

/// Builds two machines. Returns `None` if that is impossible, or if a plugin carries the bytes: a
/// plugin makes its own connections, and ignores these settings.
fn machines(family: Family, cables: usize) -> Option<TwoMachines> {
    if Setup::names_a_plugin() {
        skipped("a plugin makes its own connections");
        return None;
    }
    TwoMachines::build(family, cables)
}

/// Returns the settings of sessions that discover their interfaces.
fn zero_settings() -> Setup {
    Setup::base().with("interfaces", "")
}

/// Starts a process on a machine, and a session in it.
fn open(machines: &TwoMachines, machine: Machine, name: &str, setup: &Setup) -> RemoteProcess {
    let process = machines.spawn(machine, name, &[]);
    process.reopen(setup);
    process
}

/// Adds bob as alice's peer, connects, and moves bytes.
#[track_caller]
fn reaches(alice: &RemoteProcess, bob: &RemoteProcess) {
    alice.knows_info(&bob.info());
    alice.connect(bob.name()).expect("a connection");
    moves_bytes(alice, bob, LEN, 5);
}

#[test]
fn one_port_serves_all_addresses_and_one_session() {
    story(|| {
        let setup = Setup::lanes1_workers1().native();
        let first = Host::open("first", &setup);
        let addresses = first.session.addresses();
        let port = addresses[0].port();
        assert!(addresses.iter().all(|a| a.port() == port), "{addresses:?}");
        let config = setup.with("listen_port", port).config("second");
        let error = Session::new(config.clone()).expect_err("the port is taken");
        assert!(matches!(error, Error::PortsTaken { .. }), "{error:?}");
        let remedy = format!("such as {port}-");
        assert!(error.to_string().contains(&remedy), "{error}");
        drop(first);
        Session::new(config).expect("the port is free again");
    });
}

#[test]
fn sixteen_agents_share_a_hole_of_sixteen_ports() {
    story(|| {
        let Some(machines) = machines(Family::V4, 1) else {
            return;
        };
        let hole = [
            "iif lo accept",
            "ct state established accept",
            "tcp dport 18000-18015 accept",
        ];
        let chain = "type filter hook input priority 0; policy drop;";
        if !machines.filter(Machine::Right, chain, &hole) {
            return;
        }
        let setup = zero_settings()
            .with("listen_port", "18000-18015")
            .with("lanes", 1)
            .with("workers", 1);
        let spawn = |index| machines.spawn(Machine::Right, &format!("agent-{index}"), &[]);
        let agents: Vec<_> = (0..16).map(spawn).collect();
        // Start all at once. The processes are children of this thread and end with it.
        std::thread::scope(|scope| {
            for agent in &agents {
                scope.spawn(|| agent.reopen(&setup));
            }
        });
        let ports: BTreeSet<_> = agents.iter().map(|a| a.addresses()[0].port()).collect();
        assert_eq!(ports, (18000..=18015).collect());
        let alice = open(
            &machines,
            Machine::Left,
            "alice",
            &setup.with("listen_port", 0),
        );
        for agent in &agents {
            reaches(&alice, agent);
        }
    });
}

#[test]
fn mapped_ports_are_advertised() {
    story(|| {
        let Some(machines) = machines(Family::V4, 1) else {
            return;
        };
        // Bob's pod has an address that alice has no route to; the node maps ports to it.
        for change in [
            "link add pod0 type veth peer name node0",
            "address add 10.99.0.2/24 dev pod0",
            "link set node0 up",
            "link set pod0 up",
        ] {
            machines.ip(Machine::Right, change);
        }
        wait_until("the pod has a carrier", || {
            let link = machines.exec(Machine::Right, &["ip", "link", "show", "pod0"]);
            link.is_ok_and(|link| link.contains("state UP"))
        });
        machines.ip(Machine::Left, "route add 203.0.113.5/32 via 10.201.0.2");
        let map = [
            "ip daddr 203.0.113.5 tcp dport 30000 dnat to 10.99.0.2:18000",
            "ip daddr 203.0.113.5 tcp dport 30001 dnat to 10.99.0.2:18001",
        ];
        let chain = "type nat hook prerouting priority -100;";
        if !machines.filter(Machine::Right, chain, &map) {
            return;
        }
        let inside = Setup::base()
            .with("interfaces", "pod0")
            .with("listen_port", "18000-18001")
            .with("advertise", "203.0.113.5:30000-30001");
        let alice = open(&machines, Machine::Left, "alice", &zero_settings());
        let pods = ["bob", "carol"].map(|name| open(&machines, Machine::Right, name, &inside));
        for pod in &pods {
            reaches(&alice, pod);
        }
    });
}

#[test]
fn names_are_resolved_when_a_connection_is_made() {
    story(|| {
        let Some(machines) = machines(Family::V4, 1) else {
            return;
        };
        machines.set_hosts(Machine::Left, "127.0.0.1 localhost\n");
        let named = zero_settings().with("advertise", "bob.pod");
        let alice = open(&machines, Machine::Left, "alice", &zero_settings());
        let bob = open(&machines, Machine::Right, "bob", &named);
        alice.knows_info(&bob.info());
        let error = alice.connect("bob").expect_err("nobody knows the name");
        assert!(error.text.contains("bob.pod"), "{error:?}");
        machines.set_hosts(Machine::Left, "10.201.0.2 bob.pod\n");
        reaches(&alice, &bob);
    });
}

#[test]
fn a_firewall_in_front_of_one_address_leaves_the_other() {
    story(|| {
        let Some(machines) = machines(Family::V4, 2) else {
            return;
        };
        for cable in 0..2 {
            let address = machines.address(Machine::Right, cable);
            let wall = format!("ip daddr {address} drop");
            let chain = "type filter hook input priority 0;";
            if !machines.filter(Machine::Right, chain, &[&wall]) {
                return;
            }
            let alice = open(&machines, Machine::Left, "alice", &zero_settings());
            let bob = open(&machines, Machine::Right, "bob", &zero_settings());
            assert_eq!(bob.addresses().len(), 2);
            reaches(&alice, &bob);
            let other = machines.address(Machine::Right, 1 - cable);
            let lanes = alice.lanes("bob");
            assert!(lanes.iter().all(|l| l.remote.ip() == other), "{lanes:?}");
        }
    });
}

#[test]
fn ipv6_alone_is_enough() {
    story(|| {
        let Some(machines) = TwoMachines::build(Family::V6, 2) else {
            return;
        };
        let stage = Stage::on(machines, "", &[]);
        stage.alice.connect("bob").expect("bob listens");
        let used: BTreeSet<_> = stage.lanes().into_iter().collect();
        assert_eq!(used, BTreeSet::from([stage.ends(0), stage.ends(1)]));
        moves_bytes(&stage.alice, &stage.bob, LEN, 2);
    });
}

#[test]
fn link_local_addresses_are_enough() {
    story(|| {
        let Some(machines) = machines(Family::V6, 2) else {
            return;
        };
        for machine in [Machine::Left, Machine::Right] {
            for cable in 0..2 {
                machines.set_address(machine, cable, false);
                let name = format!("cable{cable}");
                let settled = ["ip", "-6", "address", "show", "dev", &name, "-tentative"];
                wait_until("the link-local address is confirmed", || {
                    let addresses = machines.exec(machine, &settled);
                    addresses.is_ok_and(|text| text.contains("inet6 fe80"))
                });
            }
        }
        let stage = Stage::on(machines, "", &[]);
        stage.alice.connect("bob").expect("bob listens");
        let lanes = stage.lanes();
        let are_local = lanes.iter().all(|(from, to)| {
            [from, to]
                .iter()
                .all(|ip| ip.to_string().starts_with("fe80:"))
        });
        assert!(are_local, "{lanes:?}");
        moves_bytes(&stage.alice, &stage.bob, LEN, 3);
    });
}

#[test]
fn networks_of_one_address_pair_as_their_routes_say() {
    story(|| {
        let Some(machines) = machines(Family::V4, 2) else {
            return;
        };
        for (machine, other) in [
            (Machine::Left, Machine::Right),
            (Machine::Right, Machine::Left),
        ] {
            for cable in 0..2 {
                machines.set_address(machine, cable, false);
                let own = machines.address(machine, cable);
                let theirs = machines.address(other, cable);
                let cable = format!("cable{cable}");
                machines.ip(machine, &format!("address add {own}/32 dev {cable}"));
                machines.ip(machine, &format!("route add {theirs}/32 dev {cable}"));
            }
        }
        let alice = open(&machines, Machine::Left, "alice", &zero_settings());
        // Bob lists his addresses in the opposite order.
        let setup = zero_settings().with("interfaces", "cable1,cable0");
        let bob = open(&machines, Machine::Right, "bob", &setup);
        reaches(&alice, &bob);
        let lanes = alice.lanes("bob");
        let used: BTreeSet<_> = lanes
            .iter()
            .map(|l| (l.local.ip(), l.remote.ip()))
            .collect();
        let ends = |cable| {
            (
                machines.address(Machine::Left, cable),
                machines.address(Machine::Right, cable),
            )
        };
        assert_eq!(used, BTreeSet::from([ends(0), ends(1)]));
    });
}

/// Gives both machines a common configuration: a bridge for containers with the same address on
/// both, and cards without a carrier.
fn clutter(machines: &TwoMachines) {
    for machine in [Machine::Left, Machine::Right] {
        for change in [
            "link add docker0 type bridge",
            "address add 172.17.0.1/16 dev docker0",
            "link add container type veth peer name inside",
            "link set container master docker0",
            "link set container up",
            "link set inside up",
            "link set docker0 up",
            "link add eth9 type veth peer name unplugged",
            "address add 192.0.2.1/24 dev eth9",
            "link set eth9 up",
        ] {
            machines.ip(machine, change);
        }
        wait_until("the bridge has a carrier", || {
            let link = machines.exec(machine, &["ip", "link", "show", "docker0"]);
            link.is_ok_and(|link| link.contains("state UP"))
        });
    }
    machines.cut(1);
    wait_until("the other end of the cable notices", || {
        let link = machines.exec(Machine::Right, &["ip", "link", "show", "cable1"]);
        link.is_ok_and(|link| link.contains("NO-CARRIER"))
    });
}

#[test]
fn bridges_and_dead_cards_are_left_alone() {
    story(|| {
        let Some(machines) = machines(Family::V4, 2) else {
            return;
        };
        clutter(&machines);
        let stage = Stage::on(machines, "", &[]);
        for process in [&stage.alice, &stage.bob] {
            let listens: Vec<_> = process.addresses().iter().map(|a| a.ip()).collect();
            let (left, right) = stage.ends(0);
            assert!(listens == [left] || listens == [right], "{listens:?}");
        }
        stage.alice.connect("bob").expect("bob listens");
        assert!(stage.lanes().iter().all(|lane| *lane == stage.ends(0)));
        moves_bytes(&stage.alice, &stage.bob, LEN, 4);
    });
}

#[test]
fn an_address_that_both_machines_have_leads_back_and_is_passed_over() {
    story(|| {
        let Some(machines) = machines(Family::V4, 2) else {
            return;
        };
        clutter(&machines);
        // Selected by name, and with the same port on both: bob's address is also alice's own.
        let settings = [("listen_port", "18000"), ("lanes", "4")];
        let stage = Stage::on(machines, "docker0,cable0", &settings);
        stage.alice.connect("bob").expect("the cable leads to bob");
        let lanes = stage.lanes();
        assert!(lanes.iter().all(|lane| *lane == stage.ends(0)), "{lanes:?}");
        moves_bytes(&stage.alice, &stage.bob, LEN, 6);
    });
}

#[test]
fn a_public_and_a_private_address_of_one_card_both_serve() {
    story(|| {
        let Some(machines) = machines(Family::V4, 1) else {
            return;
        };
        // The first address of bob's card is one that alice cannot reach.
        machines.set_address(Machine::Right, 0, false);
        machines.ip(Machine::Right, "address add 203.0.113.7/24 dev cable0");
        machines.ip(Machine::Right, "address add 10.201.0.2/24 dev cable0");
        let stage = Stage::on(machines, "", &[]);
        assert_eq!(stage.bob.addresses().len(), 2);
        stage
            .alice
            .connect("bob")
            .expect("the second address leads to bob");
        assert!(stage.lanes().iter().all(|lane| *lane == stage.ends(0)));
        moves_bytes(&stage.alice, &stage.bob, LEN, 7);
    });
}
