//! An unreliable network: lanes are lost, and transfers continue. Two machines with two cables, as
//! root; otherwise these tests report that they were skipped.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tcpx::{ErrorKind, Op, TransferState};
use tcpx_testkit::host::{fails, wait_for_traffic};
use tcpx_testkit::ledger::verify_agreement;
use tcpx_testkit::netns::{Family, Machine};
use tcpx_testkit::pattern::LOCAL_POISON;
use tcpx_testkit::story::story_within;
use tcpx_testkit::{Content, Copy, Expected, Host, RemoteProcess, Setup, wait_until};

use super::network::Stage;

/// Bytes of each transfer.
const LEN: usize = 8 << 20;

const GUARD: Duration = Duration::from_secs(240);

impl Stage {
    fn blinking(family: Family, settings: &[(&str, &str)]) -> Option<Self> {
        let stage = Self::new(family, "cable0,cable1", settings)?;
        // Slow enough that faults hit transfers in the middle.
        stage.machines.limit(0, "1gbit");
        stage.machines.limit(1, "1gbit");
        stage.works(1);
        Some(stage)
    }

    /// Moves bytes in both directions until `is_over`, verifies all of them, and that every
    /// notification has come once and in order. Returns the number of rounds, and the longest.
    fn traffic(&self, is_over: impl Fn() -> bool) -> (u32, Duration) {
        let (here, there) = (self.alice.memory(LEN), self.bob.memory(LEN));
        let copies = [Copy::new(0, 0, LEN)];
        let target = &there.descriptor;
        let write = self
            .alice
            .transfer(Op::Write, "bob", &here, target, &copies);
        let read = self.alice.transfer(Op::Read, "bob", &here, target, &copies);
        let mut rounds = 0u32;
        let mut longest = Duration::ZERO;
        while !is_over() {
            let begin = Instant::now();
            let content = Content::pattern(u64::from(rounds) + 7);
            self.alice.fill(&here, content);
            let message = |what: &str| format!("{what} {rounds}").into_bytes();
            self.alice.notify("bob", &message("before"));
            write
                .post_with_notification(&message("written"))
                .expect("posted");
            write.wait().expect("written");
            self.alice.notify("bob", &message("after"));
            let expected = Expected::untouched(0).with(0..LEN, content);
            self.bob.check(&there, &expected);
            self.alice.fill(&here, Content::Byte(LOCAL_POISON));
            read.post_with_notification(&message("read"))
                .expect("posted");
            read.wait().expect("read");
            self.alice.check(&here, &expected);
            for what in ["before", "written", "after", "read"] {
                let heard = self.bob.notification();
                assert_eq!(
                    String::from_utf8_lossy(&heard.message),
                    format!("{what} {rounds}")
                );
            }
            rounds += 1;
            longest = longest.max(begin.elapsed());
        }
        assert!(self.bob.notifications().is_empty(), "one came twice");
        verify_agreement(["alice", "bob"], || {
            [self.alice.figures(), self.bob.figures()]
        });
        write.release();
        read.release();
        self.alice.deregister(&here);
        self.bob.deregister(&there);
        (rounds, longest)
    }

    /// Injects `fault` during traffic.
    fn beside_traffic(&self, fault: impl FnOnce() + Send) -> (u32, Duration) {
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                fault();
                is_over.store(true, Ordering::SeqCst);
            });
            self.traffic(|| is_over.load(Ordering::SeqCst))
        })
    }

    fn wait_for_lanes(&self) {
        wait_until("every lane is back", || {
            let lanes = [self.alice.lanes("bob"), self.bob.lanes("alice")];
            lanes.iter().flatten().all(|lane| lane.is_up)
        });
    }
}

#[test]
fn a_cable_is_cut_and_put_back() {
    story_within(GUARD, || {
        for family in [Family::V4, Family::V6] {
            let Some(stage) = Stage::blinking(family, &[]) else {
                return;
            };
            let (rounds, longest) = stage.beside_traffic(|| {
                for cable in [0, 1] {
                    stage.machines.cut(cable);
                    std::thread::sleep(Duration::from_secs(3));
                    stage.machines.mend(cable);
                    std::thread::sleep(Duration::from_secs(2));
                }
            });
            println!("{family:?}: {rounds} rounds, the longest {longest:?}");
            assert!(stage.alice.is_connected("bob"));
            stage.wait_for_lanes();
            stage.works(2);
        }
    });
}

#[test]
fn a_cable_blinks_a_hundred_times() {
    story_within(GUARD, || {
        let Some(stage) = Stage::blinking(Family::V4, &[]) else {
            return;
        };
        let (rounds, longest) = stage.beside_traffic(|| {
            for blink in 0..100 {
                stage.machines.cut(1);
                std::thread::sleep(Duration::from_millis(blink % 7 * 20));
                stage.machines.mend(1);
                std::thread::sleep(Duration::from_millis(blink % 5 * 30));
            }
        });
        println!("{rounds} rounds, the longest {longest:?}");
        stage.wait_for_lanes();
        stage.works(2);
    });
}

#[test]
fn all_streams_are_reset() {
    story_within(GUARD, || {
        for side in [Machine::Left, Machine::Right] {
            let Some(stage) = Stage::blinking(Family::V4, &[]) else {
                return;
            };
            let (rounds, longest) = stage.beside_traffic(|| {
                for _ in 0..20 {
                    std::thread::sleep(Duration::from_millis(150));
                    stage.machines.reset_streams(side);
                }
            });
            println!("{side:?}: {rounds} rounds, the longest {longest:?}");
            stage.wait_for_lanes();
            stage.works(2);
        }
    });
}

/// Also on a plugin, whose own connections stay: the lane gets new comms with its new stream.
#[test]
fn the_stream_of_one_lane_is_reset() {
    story_within(GUARD, || {
        for side in [Machine::Left, Machine::Right] {
            let Some(stage) = Stage::blinking(Family::V4, &[]) else {
                return;
            };
            let (rounds, longest) = stage.beside_traffic(|| {
                for lane in [0, 1, 0, 1, 0, 1] {
                    stage.wait_for_lanes();
                    let port = stage.alice.lanes("bob")[lane].local.port();
                    stage.machines.reset_stream(side, port);
                    wait_until("another stream has taken its place", || {
                        let now = &stage.alice.lanes("bob")[lane];
                        now.is_up && now.local.port() != port
                    });
                }
            });
            println!("{side:?}: {rounds} rounds, the longest {longest:?}");
            stage.wait_for_lanes();
            for lane in stage.alice.lanes("bob") {
                assert!(lane.failovers >= 3, "{lane:?}");
            }
            stage.works(2);
        }
    });
}

#[test]
fn a_stream_is_swallowed_in_silence() {
    story_within(GUARD, || {
        let Some(stage) = Stage::blinking(Family::V4, &[]) else {
            return;
        };
        for side in [Machine::Left, Machine::Right] {
            for lane in [0, 1] {
                let port = stage.alice.lanes("bob")[lane].local.port();
                let way = if side == Machine::Left {
                    "sport"
                } else {
                    "dport"
                };
                if !stage.machines.swallow(side, &format!("tcp {way} {port}")) {
                    return;
                }
                let (rounds, longest) = stage.beside_traffic(|| {
                    std::thread::sleep(Duration::from_secs(4));
                });
                println!("{side:?} {lane}: {rounds} rounds, the longest {longest:?}");
                stage.machines.let_through(side);
                stage.wait_for_lanes();
            }
        }
    });
}

#[test]
fn packets_are_lost() {
    story_within(GUARD, || {
        for loss in [1, 10] {
            let Some(stage) = Stage::blinking(Family::V4, &[]) else {
                return;
            };
            let rule = format!("numgen random mod 1000 < {loss}");
            for side in [Machine::Left, Machine::Right] {
                if !stage.machines.swallow(side, &rule) {
                    return;
                }
            }
            let (rounds, longest) =
                stage.beside_traffic(|| std::thread::sleep(Duration::from_secs(3)));
            println!("{loss} of 1000: {rounds} rounds, the longest {longest:?}");
        }
    });
}

#[test]
fn the_address_of_an_interface_is_removed() {
    story_within(GUARD, || {
        let Some(stage) = Stage::blinking(Family::V4, &[]) else {
            return;
        };
        for side in [Machine::Left, Machine::Right] {
            let (rounds, longest) = stage.beside_traffic(|| {
                stage.machines.set_address(side, 1, false);
                std::thread::sleep(Duration::from_secs(4));
            });
            println!("{side:?}: {rounds} rounds, the longest {longest:?}");
            stage.machines.set_address(side, 1, true);
            stage.wait_for_lanes();
        }
        stage.works(3);
    });
}

#[test]
fn a_process_is_stopped_and_goes_on() {
    story_within(GUARD, || {
        let Some(stage) = Stage::blinking(Family::V4, &[]) else {
            return;
        };
        stage.beside_traffic(|| {
            for _ in 0..3 {
                stage.bob.freeze();
                std::thread::sleep(Duration::from_secs(2));
                stage.bob.thaw();
                std::thread::sleep(Duration::from_millis(300));
            }
        });
        stage.works(3);
    });
}

#[test]
fn a_peer_is_killed_and_restarted_beside_others() {
    story_within(GUARD, || {
        const KILLS: usize = 50;
        let setup = Setup::lanes4_workers3();
        let alice = Host::open("alice", &setup);
        let carol = RemoteProcess::open("carol", &setup);
        let (to_carol, hers) = (alice.meets(&carol), carol.memory(LEN));
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for kill in 0..KILLS {
                    let bob = RemoteProcess::open("bob", &setup);
                    let (to_bob, his) = (alice.meets(&bob), bob.memory(LEN));
                    let here = alice.memory(LEN);
                    let transfer = alice.endless(
                        [Op::Write, Op::Read][kill % 2],
                        &to_bob,
                        &here,
                        &his.descriptor,
                    );
                    transfer.post().expect("posted");
                    wait_for_traffic(&to_bob);
                    bob.kill();
                    let error = fails(&transfer);
                    assert_eq!(error.kind(), ErrorKind::Disconnected, "{error}");
                }
                is_over.store(true, Ordering::SeqCst);
            });
            let here = alice.memory(LEN);
            let mut rounds = 0;
            while !is_over.load(Ordering::SeqCst) {
                let content = Content::pattern(rounds);
                here.memory.fill(content);
                let copies = [Copy::new(0, 0, LEN)];
                let write = alice.transfer(Op::Write, &to_carol, &here, &hers, &copies);
                write.post().expect("posted");
                write.wait(GUARD).expect("carol is not concerned");
                carol.check(&hers, &Expected::only(content));
                rounds += 1;
            }
            assert!(to_carol.is_connected());
        });
    });
}

/// After an abort, either side may reuse its memory.
#[test]
fn ten_thousand_aborts_leave_no_stray_byte() {
    story_within(GUARD, || {
        // Mostly of one frame, sometimes of several chunks.
        const SIZES: [usize; 2] = [16 << 10, 2 << 20];
        let setup = Setup::lanes4_workers3();
        let alice = Host::open("alice", &setup);
        let bob = RemoteProcess::open("bob", &setup);
        let to_bob = alice.meets(&bob);
        let memory = SIZES.map(|len| (alice.memory(len), bob.memory(len)));
        let mut random = 1u64;
        let mut draw = |below: u64| {
            // Any sequence without a short period works.
            random = random
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            (random >> 33) % below
        };
        let mut aborted = 0;
        for round in 0..10_000u64 {
            let (here, there) = &memory[usize::from(round % 50 == 0)];
            let len = 1 + draw(there.len as u64) as usize;
            let op = [Op::Write, Op::Read][draw(2) as usize];
            let copies = [Copy::new(0, 0, len)];
            here.memory.fill(Content::Byte(0x11));
            let transfer = alice.transfer(op, &to_bob, here, there, &copies);
            transfer.post().expect("posted");
            for _ in 0..draw(200) {
                std::hint::spin_loop();
                transfer.poll();
            }
            transfer.abort();
            let begin = Instant::now();
            while !transfer.poll().is_terminal() {
                assert!(begin.elapsed() < GUARD, "the abort does not end");
                std::thread::yield_now();
            }
            aborted += u32::from(transfer.poll() == TransferState::Aborted);
            // Both sides reuse their memory at once.
            let (mine, theirs) = (Content::Byte(0x22), Content::Byte(0x80 | round as u8));
            here.memory.fill(mine);
            bob.fill(there, theirs);
            here.check(&Expected::only(mine));
            bob.check(there, &Expected::only(theirs));
        }
        assert!(aborted > 100, "{aborted} were aborted in time");
    });
}
