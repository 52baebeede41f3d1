//! Two sides that move transfers at once, over networks of all kinds.

use alloc::vec::Vec;
use core::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;

use super::end::Event;
use super::link::Random;
use super::pair::{Pair, Setup};
use super::*;

const MS: Duration = Duration::from_millis(1);

fn setups() -> impl Strategy<Value = Setup> {
    let speed = prop::sample::select(&[4096, 1 << 20, 1 << 30][..]);
    let times = (0u32..50, prop::sample::select(&[0u32, 1, 100][..]));
    (
        1usize..4,
        [1usize..10, 1usize..10],
        times,
        speed,
        any::<u64>(),
    )
        .prop_map(
            |(lanes, windows, (latency, copying), bandwidth, seed)| Setup {
                lanes,
                windows,
                latency: MS * latency,
                bandwidth,
                copying: MS * copying,
                seed,
            },
        )
}

/// Transfers of both sides: the side that posts, the direction, the lengths of the chunks.
fn transfers() -> impl Strategy<Value = Vec<(usize, bool, Vec<u64>)>> {
    vec((0usize..2, any::<bool>(), vec(1u64..300, 1..12)), 1..8)
}

fn op(read: bool) -> Op {
    if read { Op::Read } else { Op::Write }
}

proptest! {
    #[test]
    fn everything_settles_once_and_in_order_whatever_the_delays(
        setup in setups(),
        transfers in transfers(),
    ) {
        let mut pair = Pair::new(&setup);
        let mut random = Random(setup.seed | 1);
        for (side, read, lengths) in &transfers {
            pair.post(*side, op(*read), lengths);
            pair.ends[*side][0].notify(random.below(1000));
            // The network changes while they move.
            let moment = pair.now + MS * random.below(40) as u32;
            pair.run_until(moment);
            let lane = random.below(setup.lanes as u64) as usize;
            pair.links[*side][lane].latency = MS * random.below(60) as u32;
            pair.links[1 - *side][lane].bandwidth = 1000 + random.below(1 << 20);
            pair.links[1 - *side][lane].stalled = random.below(2) == 0;
            pair.ends[1 - *side][lane].mark(1000 + random.below(1000));
        }
        let links = pair.links.iter_mut().flatten();
        links.for_each(|link| link.stalled = false);
        pair.run();
        pair.assert_all_settled();
        pair.assert_in_order();
    }

    #[test]
    fn a_cut_at_any_moment_leaves_each_chunk_in_one_place(
        setup in setups(),
        transfers in transfers(),
        until_cut in 0u64..20_000,
    ) {
        let mut pair = Pair::new(&setup);
        pair.until_cut = until_cut;
        for (side, read, lengths) in &transfers {
            pair.post(*side, op(*read), lengths);
        }
        pair.run();
        pair.assert_close_accounts_for_all();
    }
}

#[test]
fn a_cut_after_any_byte_leaves_each_chunk_in_one_place() {
    // Copies take time, so that cuts fall also between arrival and landing.
    let setup = Setup {
        lanes: 2,
        windows: [2, 3],
        copying: MS * 3,
        ..Setup::default()
    };
    let posted = |until_cut| {
        let mut pair = Pair::new(&setup);
        pair.until_cut = until_cut;
        pair.post(0, Op::Write, &[5; 3]);
        pair.post(0, Op::Read, &[7; 3]);
        pair.post(1, Op::Read, &[3; 4]);
        pair.post(1, Op::Write, &[9; 2]);
        pair.run();
        pair
    };
    let whole = posted(u64::MAX);
    whole.assert_all_settled();
    for until_cut in 0..=whole.received() {
        let mut pair = posted(until_cut);
        assert_eq!(pair.received(), until_cut);
        pair.assert_close_accounts_for_all();
    }
}

#[test]
fn windows_are_used_and_never_exceeded() {
    // With a long latency, everything that may be in flight is. (`End::begin` checks the limits.)
    let setup = Setup {
        windows: [3, 5],
        latency: MS * 500,
        bandwidth: 1 << 30,
        ..Setup::default()
    };
    let mut pair = Pair::new(&setup);
    for side in [0, 1] {
        pair.post(side, Op::Write, &[50; 20]);
        pair.post(side, Op::Read, &[50; 20]);
    }
    pair.run();
    pair.assert_all_settled();
    assert_eq!(pair.ends[0][0].peak, [5, 5]);
    assert_eq!(pair.ends[1][0].peak, [3, 3]);
}

#[test]
fn lanes_ask_for_their_shares_of_one_posting() {
    let mut pair = Pair::new(&Setup {
        lanes: 4,
        windows: [64; 2],
        ..Setup::default()
    });
    pair.post(0, Op::Read, &[1000; 64]);
    pair.run();
    pair.assert_all_settled();
    for end in &pair.ends[0] {
        let [writes, reads] = end.peak;
        assert!(writes == 0 && (4..=16).contains(&reads), "{reads}");
    }
}

#[test]
fn a_slow_lane_leaves_the_rest_to_the_others() {
    for op in [Op::Read, Op::Write] {
        let mut pair = Pair::new(&Setup {
            lanes: 4,
            windows: [4; 2],
            ..Setup::default()
        });
        // The payloads of a READ come from the peer.
        pair.links[usize::from(op == Op::Read)][0].bandwidth /= 100;
        pair.post(0, op, &[1000; 64]);
        pair.run();
        pair.assert_all_settled();
        let moved = |lane: usize| pair.ends[0][lane].settled.len();
        assert!(
            (1..4).all(|lane| 2 * moved(0) < moved(lane)),
            "{op:?}: {} by one",
            moved(0)
        );
    }
}

#[test]
fn notifications_wait_for_the_payloads_before_them() {
    for seed in 1..200 {
        // Copies take far longer than the frames between them.
        let mut pair = Pair::new(&Setup {
            copying: MS * 1000,
            seed,
            ..Setup::default()
        });
        for number in 0..6 {
            pair.post(0, Op::Write, &[20; 2]);
            pair.step(Duration::MAX);
            pair.ends[0][0].notify(100 + number);
            pair.ends[0][0].mark(200 + number);
        }
        pair.run();
        pair.assert_all_settled();
        pair.assert_in_order();
        assert_eq!(pair.ends[0][0].pongs, (200..206).collect::<Vec<_>>());
        // Transfer 5 carries its notification, which comes right after its chunk.
        let rider = Event::Write(chunk(5, 0));
        let events = &pair.ends[1][0].dealt_with;
        let at = events.iter().position(|event| *event == rider).unwrap();
        assert_eq!(events[at + 1], Event::Note(5));
    }
}

#[test]
fn a_ping_without_a_number_overtakes_a_payload_that_is_landing() {
    let mut pair = Pair::new(&Setup {
        copying: MS * 1000,
        seed: 3,
        ..Setup::default()
    });
    pair.post(0, Op::Write, &[20]);
    pair.step(Duration::MAX);
    assert!(pair.ends[0][0].lane.push_ping(0));
    pair.ends[0][0].mark(9);
    while pair.ends[0][0].pongs.is_empty() {
        assert!(pair.step(Duration::MAX));
    }
    assert_eq!(pair.ends[0][0].pongs, [0]);
    assert_eq!(pair.ends[1][0].dealt_with, []);
    pair.run();
    assert_eq!(pair.ends[0][0].pongs, [0, 9]);
}

#[test]
fn a_dead_posting_ends_with_what_was_sent_of_it() {
    let mut pair = Pair::new(&Setup {
        windows: [2; 2],
        ..Setup::default()
    });
    let [dead, other] = [Op::Write, Op::Read].map(|op| pair.post(0, op, &[10; 6]));
    pair.step(Duration::MAX);
    assert_eq!(dead.rest().len(), 4);
    dead.dead.set(true);
    pair.run();
    let of = |run: &Run| {
        let settled = pair.ends[0][0].settled.iter();
        settled
            .filter(|(id, _)| id.transfer == run.transfer())
            .count()
    };
    assert_eq!((of(&dead), of(&other)), (2, 6));
    assert!(!pair.ends[0][0].lane.has_work() && !pair.ends[0][0].lane.is_busy());
}

/// Returns how long the first side has seen no progress when it checks eight times within its
/// limit, and its link from the peer stalls for `stall`.
fn longest_silence(limit: Duration, stall: Duration) -> Duration {
    let mut pair = Pair::new(&Setup {
        bandwidth: 100_000,
        ..Setup::default()
    });
    pair.post(0, Op::Read, &[100; 200]);
    let (mut silence, mut still) = (Silence::default(), Stall::default());
    let mut longest = Duration::ZERO;
    for look in 0..200 {
        pair.links[1][0].stalled = pair.now >= limit && pair.now < limit + stall;
        pair.run_until(limit * look / 8);
        let end = &pair.ends[0][0];
        let at = end.lane.is_busy().then_some(end.received);
        longest = longest.max(still.look(at, silence.passed(pair.now, limit)));
    }
    pair.run();
    pair.assert_all_settled();
    longest
}

#[test]
fn silence_is_as_long_as_the_stall_and_an_idle_lane_has_none() {
    let limit = MS * 80;
    assert!(longest_silence(limit, Duration::ZERO) < limit / 4);
    // Checks are an eighth of the limit apart, and the last bytes may come right after one.
    for eighths in [4, 7, 10] {
        let stall = limit * eighths / 8;
        let seen = longest_silence(limit, stall);
        assert!(
            seen <= stall + limit / 8 && seen + limit / 8 >= stall,
            "{seen:?} of {stall:?}"
        );
    }
}

/// Neither side ever stops reading, so that no two sides wait for each other: whatever two sides
/// request of each other at once stays within the limits.
#[test]
fn two_sides_that_ask_all_they_may_at_once_both_get_their_answers() {
    for seed in 1..20 {
        let mut pair = Pair::new(&Setup {
            windows: [3, 1],
            copying: MS * 5,
            bandwidth: 400_000,
            seed,
            ..Setup::default()
        });
        let mut asked = [0; 2];
        for round in 0..40 {
            for side in [0, 1] {
                pair.post(side, [Op::Read, Op::Write][round % 2], &[50; 3]);
                // The answers of one side are delayed for a while, then those of the other.
                pair.links[side][0].stalled = (round as u64 + seed) / 5 % 2 == side as u64;
                let lane = &mut pair.ends[side][0].lane;
                // A ping with a number waits for the payloads before it; 0 does not.
                while lane.push_ping(asked[side] % 2) {
                    asked[side] += 1;
                }
            }
            pair.run_until(MS * 10 * round as u32);
        }
        for side in [0, 1] {
            pair.links[side][0].stalled = false;
        }
        pair.run();
        pair.assert_all_settled();
        for side in [0, 1] {
            assert!(asked[side] >= MAX_PINGS as u64, "{asked:?}");
            assert_eq!(pair.ends[side][0].pongs.len() as u64, asked[side]);
        }
    }
}
