//! Processes on one host copy each other's memory: the contract holds, whatever the other one does.

use std::process::Command as Process;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tcpx::{ErrorKind, Op};
use tcpx_testkit::host::{done, fails, wait_for_traffic};
use tcpx_testkit::pattern::Dice;
use tcpx_testkit::remote::binary;
use tcpx_testkit::story::skipped;
use tcpx_testkit::{
    Content, Copy, Expected, GUARD, Host, LocalMemory, RemoteProcess, Setup, story, wait_until,
};

const MIB: usize = 1 << 20;

fn direct() -> Setup {
    Setup::lanes4_workers3().with("same_host", "require")
}

fn either() -> Setup {
    Setup::lanes4_workers3().with("same_host", "auto")
}

/// Returns whether memory was written since it was poisoned.
fn is_touched(memory: &LocalMemory) -> bool {
    let poisoned = Expected::untouched(tcpx_testkit::pattern::LOCAL_POISON);
    memory.memory.check(&poisoned).is_err()
}

#[test]
fn memory_of_a_stopped_process_is_copied_both_ways() {
    story(|| {
        let alice = Host::open("alice", &direct());
        let bob = RemoteProcess::open("bob", &direct());
        let peer = alice.meets(&bob);
        let (here, there) = (alice.memory(4 * MIB), bob.memory(4 * MIB));
        let all = [Copy::new(0, 0, 4 * MIB)];
        // Opens the region.
        alice.run(Op::Read, &peer, &here, &there, &all);
        here.memory.fill(Content::pattern(1));
        bob.freeze();
        let write = alice.transfer(Op::Write, &peer, &here, &there, &all);
        write.post().expect("posted");
        done(&write);
        here.poison();
        alice.run(Op::Read, &peer, &here, &there, &all);
        here.check(&Expected::only(Content::pattern(1)));
        bob.thaw();
        bob.check(&there, &Expected::only(Content::pattern(1)));
        assert!(peer.same_host().is_some_and(|path| path.why_not.is_none()));
    });
}

/// Bob writes to Alice's memory without end; she revokes it at any moment.
fn taken_back(seed: u64, disturb: impl Fn(&RemoteProcess, &AtomicBool) + Sync) {
    let mut dice = Dice::new(seed);
    let alice = Host::open("alice", &direct());
    let bob = RemoteProcess::open("bob", &direct());
    let _peer = alice.meets(&bob);
    let here = alice.memory(MIB);
    here.poison();
    let there = bob.memory(MIB);
    bob.fill(&there, Content::pattern(7));
    let chunk = alice.session.config().chunk_bytes();
    let descriptor = here.region.descriptor();
    let transfer = bob.endless(Op::Write, "alice", &there, &descriptor, chunk);
    let posted = transfer.begin_post(None);
    wait_until("bytes land", || is_touched(&here));
    posted.get();
    std::thread::sleep(Duration::from_micros(dice.below(3000) as u64));
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| disturb(&bob, &is_over));
        std::thread::sleep(Duration::from_micros(dice.below(300) as u64));
        here.region.deregister().expect("registered until now");
        here.poison();
        is_over.store(true, Ordering::Release);
        std::thread::sleep(Duration::from_millis(5));
        here.check_untouched();
    });
    here.check_untouched();
}

#[test]
fn memory_that_is_taken_back_is_written_no_more() {
    story(|| (0..10).for_each(|seed| taken_back(seed, |_, _| {})));
}

/// At any position of the other process: before a gate, inside, after it.
#[test]
fn memory_is_taken_back_from_a_process_that_is_stopped() {
    story(|| {
        for seed in 0..10 {
            taken_back(seed, |bob, is_over| {
                bob.freeze();
                // A process inside a gate is waited for.
                for _ in 0..20 {
                    if is_over.load(Ordering::Acquire) {
                        break;
                    }
                    std::thread::sleep(Duration::from_millis(5));
                }
                bob.thaw();
            });
        }
    });
}

#[test]
fn memory_is_taken_back_from_a_process_that_is_killed() {
    story(|| (0..10).for_each(|seed| taken_back(seed, |bob, _| bob.kill())));
}

#[test]
fn what_a_killed_process_was_asked_for_fails_as_on_lanes() {
    story(|| {
        let alice = Host::open("alice", &direct());
        let bob = RemoteProcess::open("bob", &direct());
        let peer = alice.meets(&bob);
        let (here, there) = (alice.memory(MIB), bob.memory(MIB));
        let transfer = alice.endless(Op::Read, &peer, &here, &there.descriptor);
        transfer.post().expect("posted");
        wait_for_traffic(&peer);
        bob.kill();
        assert_eq!(fails(&transfer).kind(), ErrorKind::Disconnected);
    });
}

/// A stopped process cannot open a region: lanes wait for it.
#[test]
fn what_a_stopped_process_does_not_open_goes_by_lanes() {
    story(|| {
        let alice = Host::open("alice", &either());
        let bob = RemoteProcess::open("bob", &either());
        let peer = alice.meets(&bob);
        let (here, there) = (alice.memory(MIB), bob.memory(MIB));
        bob.fill(&there, Content::pattern(3));
        peer.connect(GUARD).expect("connected");
        let is_known = |why: &str| !why.contains("not found each other yet");
        wait_until("it is known whether they can", || {
            let path = peer.same_host().expect("connected");
            path.why_not.is_none_or(|why| is_known(&why))
        });
        if peer.same_host().is_some_and(|path| path.why_not.is_some()) {
            return skipped("the two sides did not find each other in time");
        }
        bob.freeze();
        let read = alice.transfer(Op::Read, &peer, &here, &there, &[Copy::new(0, 0, MIB)]);
        read.post().expect("posted");
        let sent = || peer.lanes().iter().map(|lane| lane.bytes_sent).sum::<u64>();
        let before = sent();
        wait_until("lanes ask for it", || sent() > before);
        bob.thaw();
        done(&read);
        here.check(&Expected::only(Content::pattern(3)));
    });
}

/// A process of another user uses lanes, and learns why.
#[test]
fn lanes_carry_what_belongs_to_another_user() {
    story(|| {
        if !is_root() {
            return skipped("only root can start a process of another user");
        }
        let setup = either();
        let alice = Host::open("alice", &setup);
        let mut command = Process::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
        let program = readable_copy();
        command.arg(&program);
        let bob = RemoteProcess::spawn("bob", command);
        bob.reopen(&setup);
        // It runs.
        std::fs::remove_file(program).expect("our own");
        let peer = alice.meets(&bob);
        alice.verify_traffic(&peer, &bob, 1);
        let path = peer.same_host().expect("connected");
        assert_eq!(path.bytes, 0);
        let why = path.why_not.expect("another user");
        assert!(why.contains("user"), "{why}");
    });
}

fn is_root() -> bool {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata("/proc/self").is_ok_and(|process| process.uid() == 0)
}

/// Returns a copy of the program that every user can execute.
fn readable_copy() -> std::path::PathBuf {
    use std::os::unix::fs::PermissionsExt;
    let copy = std::env::temp_dir().join(format!("tcpx-testpeer-{}", std::process::id()));
    std::fs::copy(binary(), &copy).expect("copied");
    let all = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(&copy, all).expect("its owner may");
    copy
}

#[test]
fn who_does_not_offer_it_is_served_by_lanes_unless_that_is_refused() {
    story(|| {
        let alice = Host::open("alice", &either());
        let bob = RemoteProcess::open("bob", &Setup::lanes4_workers3());
        let peer = alice.meets(&bob);
        alice.verify_traffic(&peer, &bob, 1);
        let path = peer.same_host().expect("connected");
        assert!(path.bytes == 0 && path.why_not.is_some(), "{path:?}");

        let carol = Host::open("carol", &direct());
        let to_bob = carol.knows(&bob);
        let refused = to_bob
            .connect(Duration::from_secs(30))
            .expect_err("it is required");
        assert_eq!(refused.kind(), ErrorKind::NotSupported, "{refused}");
    });
}
