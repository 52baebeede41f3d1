//! A network that blinks: lanes are lost, and transfers go on. Two machines with two cables, as root;
//! elsewhere these tests say that they were skipped.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tcpx::Op;
use tcpx_testkit::netns::{Family, Machine};
use tcpx_testkit::pattern::LOCAL_POISON;
use tcpx_testkit::story::story_within;
use tcpx_testkit::{Content, Copy, Expected, wait_until};

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

    /// Moves bytes both ways until `is_over`, verifies each of them, and that every notification has
    /// come once and in order. Returns how many rounds there were, and the longest.
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
        write.release();
        read.release();
        self.alice.deregister(&here);
        self.bob.deregister(&there);
        (rounds, longest)
    }

    /// Runs `fault` beside traffic.
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
