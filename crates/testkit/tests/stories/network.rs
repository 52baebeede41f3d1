//! Two machines with cables between them: network namespaces, as root. Otherwise these tests report
//! that they were skipped.

use std::collections::BTreeSet;
use std::net::IpAddr;

use tcpx::{ErrorKind, Op};
use tcpx_testkit::netns::{Family, Machine, TwoMachines};
use tcpx_testkit::pattern::{LOCAL_POISON, REMOTE_POISON};
use tcpx_testkit::story::skipped;
use tcpx_testkit::{Content, Copy, Expected, RemoteProcess, Setup, story, wait_until};

/// Alice on the left and bob on the right, who know each other.
pub(crate) struct Stage {
    pub(crate) alice: RemoteProcess,
    pub(crate) bob: RemoteProcess,
    pub(crate) machines: TwoMachines,
}

impl Stage {
    /// With two cables.
    pub(crate) fn new(family: Family, interfaces: &str, settings: &[(&str, &str)]) -> Option<Self> {
        let machines = TwoMachines::build(family, 2)?;
        Some(Self::on(machines, interfaces, settings))
    }

    /// With three cables, of which the first is for control.
    fn with_control_cable(family: Family) -> Option<Self> {
        let machines = TwoMachines::build(family, 3)?;
        let settings = [("control_interface", "cable0"), ("lanes", "4")];
        Some(Self::on(machines, "cable1,cable2", &settings))
    }

    pub(crate) fn on(machines: TwoMachines, interfaces: &str, settings: &[(&str, &str)]) -> Self {
        let setup = Setup::base().with("interfaces", interfaces);
        let settings = settings.iter();
        let setup = settings.fold(setup, |setup, (key, value)| setup.with(key, *value));
        let open = |machine, name| {
            // If the emulator carries payload: each cable has a device.
            let devices = [0, 1].map(|cable| machines.address(machine, cable).to_string());
            let devices = devices.join(",");
            let variables = [("TCPX_EMU_NDEV", "2"), ("TCPX_EMU_ADDRESS", &devices)];
            let process = machines.spawn(machine, name, &variables);
            process.reopen(&setup);
            process
        };
        let (alice, bob) = (open(Machine::Left, "alice"), open(Machine::Right, "bob"));
        alice.knows_info(&bob.info());
        bob.knows_info(&alice.info());
        Self {
            alice,
            bob,
            machines,
        }
    }

    /// Returns the address pairs of alice's lanes to bob.
    pub(crate) fn lanes(&self) -> Vec<(IpAddr, IpAddr)> {
        let lanes = self.alice.lanes("bob").into_iter();
        lanes.map(|l| (l.local.ip(), l.remote.ip())).collect()
    }

    /// Returns the two ends of a cable.
    pub(crate) fn ends(&self, cable: usize) -> (IpAddr, IpAddr) {
        (
            self.machines.address(Machine::Left, cable),
            self.machines.address(Machine::Right, cable),
        )
    }

    /// Moves bytes both ways and verifies them.
    #[track_caller]
    pub(crate) fn works(&self, seed: u64) {
        moves_bytes(&self.alice, &self.bob, 16 << 20, seed);
    }

    /// Moves bytes until the first two cables have carried some in both directions: the lane of a
    /// chunk depends on scheduling.
    #[track_caller]
    fn works_on_both_cables(&self, seed: u64) {
        wait_until("both cables carry bytes both ways", || {
            self.works(seed);
            let lanes = self.alice.lanes("bob");
            (0..2).all(|cable| {
                let lanes = || lanes.iter().filter(|l| l.local.ip() == self.ends(cable).0);
                let sent: u64 = lanes().map(|l| l.bytes_sent).sum();
                let received: u64 = lanes().map(|l| l.bytes_received).sum();
                sent > 1 << 20 && received > 1 << 20
            })
        });
    }
}

/// Moves bytes from alice to bob and back, and verifies them.
#[track_caller]
pub(crate) fn moves_bytes(alice: &RemoteProcess, bob: &RemoteProcess, len: usize, seed: u64) {
    let (here, there) = (alice.memory(len), bob.memory(len));
    alice.fill(&here, Content::pattern(seed));
    bob.poison(&there);
    let copies = [Copy::new(1, 3, len - 100)];
    let target = &there.descriptor;
    let write = alice.transfer(Op::Write, bob.name(), &here, target, &copies);
    write.post_with_notification(b"done").expect("posted");
    write.wait().expect("written");
    assert_eq!(bob.notification().message, b"done");
    let expected = Expected::untouched(REMOTE_POISON);
    let expected = expected.with(3..len - 97, Content::pattern(seed).skip(1));
    bob.check(&there, &expected);

    alice.fill(&here, Content::Byte(LOCAL_POISON));
    let read = alice.transfer(Op::Read, bob.name(), &here, target, &copies);
    read.post().expect("posted");
    read.wait().expect("read");
    let expected = Expected::untouched(LOCAL_POISON);
    let expected = expected.with(1..len - 99, Content::pattern(seed).skip(1));
    alice.check(&here, &expected);
    alice.deregister(&here);
    bob.deregister(&there);
}

fn lanes_spread_over_both_cables(family: Family) {
    story(move || {
        let Some(stage) = Stage::new(family, "cable0,cable1", &[("lanes", "4")]) else {
            return;
        };
        // Bob listens on both, and on nothing else.
        let listens: BTreeSet<_> = stage.bob.addresses().iter().map(|a| a.ip()).collect();
        assert_eq!(listens, BTreeSet::from([stage.ends(0).1, stage.ends(1).1]));
        stage.alice.connect("bob").expect("bob listens");
        let lanes = stage.lanes();
        assert_eq!(lanes.len(), 4);
        for cable in 0..2 {
            let on_cable = lanes.iter().filter(|l| **l == stage.ends(cable)).count();
            assert_eq!(on_cable, 2, "cable {cable} of {lanes:?}");
        }
        stage.works_on_both_cables(1);
    });
}

#[test]
fn ipv4_lanes_spread_over_both_cables() {
    lanes_spread_over_both_cables(Family::V4);
}

#[test]
fn ipv6_lanes_spread_over_both_cables() {
    lanes_spread_over_both_cables(Family::V6);
}

#[test]
fn both_cables_have_a_lane_by_default() {
    story(|| {
        let Some(stage) = Stage::new(Family::V4, "cable0,cable1", &[]) else {
            return;
        };
        stage.alice.connect("bob").expect("bob listens");
        let used: BTreeSet<_> = stage.lanes().into_iter().collect();
        assert_eq!(used, BTreeSet::from([stage.ends(0), stage.ends(1)]));
        stage.works_on_both_cables(6);
    });
}

#[test]
fn one_lane_is_one_lane_where_it_is_asked_for() {
    story(|| {
        if Setup::names_a_plugin() {
            return skipped("a plugin's devices are not chosen by routes");
        }
        let Some(stage) = Stage::new(Family::V4, "cable0,cable1", &[("lanes", "1")]) else {
            return;
        };
        stage.works(7);
        assert_eq!(stage.lanes(), [stage.ends(0)]);
    });
}

#[test]
fn lanes_keep_off_the_control_cable() {
    story(|| {
        for family in [Family::V4, Family::V6] {
            let Some(stage) = Stage::with_control_cable(family) else {
                return;
            };
            let listens: BTreeSet<_> = stage.bob.addresses().iter().map(|a| a.ip()).collect();
            let all = [0, 1, 2].map(|cable| stage.ends(cable).1);
            assert_eq!(listens, BTreeSet::from(all));
            stage.alice.connect("bob").expect("bob listens");
            let mut lanes = stage.lanes();
            lanes.sort_unstable();
            let (one, two) = (stage.ends(1), stage.ends(2));
            assert_eq!(lanes, [one, one, two, two]);
            stage.works(8);
        }
    });
}

#[test]
fn the_control_cable_serves_where_the_others_are_cut() {
    story(|| {
        if Setup::names_a_plugin() {
            return skipped("a plugin's devices are not chosen by what they reach");
        }
        for family in [Family::V4, Family::V6] {
            let Some(stage) = Stage::with_control_cable(family) else {
                return;
            };
            stage.machines.cut(1);
            stage.machines.cut(2);
            stage.alice.connect("bob").expect("there is another way");
            assert_eq!(stage.lanes(), [stage.ends(0); 4]);
            stage.works(9);
        }
    });
}

#[test]
fn only_the_chosen_cable_is_used() {
    story(|| {
        for family in [Family::V4, Family::V6] {
            let Some(stage) = Stage::new(family, "=cable1", &[("lanes", "4")]) else {
                return;
            };
            stage.works(2);
            assert_eq!(stage.lanes(), [stage.ends(1); 4]);
        }
    });
}

#[test]
fn a_cable_that_was_cut_before_is_avoided() {
    story(|| {
        if Setup::names_a_plugin() {
            // Each of its devices has a lane, and connects to the matching device.
            return skipped("a plugin's devices are not chosen by what they reach");
        }
        let Some(stage) = Stage::new(Family::V4, "cable0,cable1", &[("lanes", "4")]) else {
            return;
        };
        stage.machines.cut(0);
        stage.alice.connect("bob").expect("there is another way");
        assert_eq!(stage.lanes(), [stage.ends(1); 4]);
        stage.works(5);
    });
}

#[test]
fn interfaces_that_are_not_there_are_an_error() {
    story(|| {
        let setup = Setup::base().with("interfaces", "=nosuch0");
        let error = tcpx::Session::new(setup.config("alice")).expect_err("no such interface");
        assert_eq!(error.kind(), ErrorKind::Environment, "{error}");
        assert!(error.to_string().contains("nosuch0"), "{error}");
    });
}
