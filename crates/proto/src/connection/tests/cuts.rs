//! Streams that are cut at every byte, noticed by either side first.

extern crate std;

use proptest::collection::vec;
use proptest::prelude::*;

use super::pair::{Attempt, Comeback, Cut, Pair, Setup};
use super::*;
use crate::lane::Op;

/// Both sides read and write, and send notifications in between. Some chunks are refused, and some
/// carry a notification.
fn play(setup: &Setup) -> Pair {
    let mut pair = Pair::new(setup);
    let [client, server] = &mut pair.sides;
    client.notify();
    client.post(Op::Write, 15, &[5, 6, 1]);
    client.post(Op::Read, 3, &[7; 3]);
    server.post(Op::Read, 3, &[3; 2]);
    server.notify();
    server.post(Op::Write, 5, &[9, 2, 4, 8]);
    for _ in 0..4 {
        pair.step();
    }
    pair.sides.iter_mut().for_each(|side| side.notify());
    pair.run();
    pair
}

/// Lists every byte at which one of the first streams can be cut, in each of the eight ways.
fn all_cuts(setup: &Setup) -> Vec<Cut> {
    let whole = play(setup);
    let mut cuts = Vec::new();
    for (stream, wires) in &whole.streams {
        for (from, wire) in wires.iter().enumerate() {
            for at in 0..=wire.delivered {
                for bits in 0..8 {
                    cuts.push(Cut {
                        stream: *stream,
                        from,
                        at,
                        flows_back: bits & 1 != 0,
                        first: usize::from(bits & 2 != 0),
                        at_once: bits & 4 != 0,
                    });
                }
            }
        }
    }
    assert!(
        cuts.len() > 8 * 1000,
        "the script has too few cuts: {}",
        cuts.len()
    );
    cuts
}

/// Lists every byte in one of the eight ways only, which takes less time.
fn each_byte(setup: &Setup) -> impl Iterator<Item = Cut> {
    let every = |(at, cut): (usize, Cut)| (at % 8 == at / 8 % 8).then_some(cut);
    all_cuts(setup).into_iter().enumerate().filter_map(every)
}

/// Plays the script for each of these cuts, and reports the cut that failed.
fn play_all(setup: &Setup, cuts: impl IntoIterator<Item = Vec<Cut>>) {
    for cuts in cuts {
        let setup = Setup {
            cuts,
            ..setup.clone()
        };
        let told = Told(&setup);
        play(&setup);
        core::mem::forget(told);
    }
}

/// Prints a setup when it is dropped during a panic, so that a failed test shows it.
struct Told<'a>(&'a Setup);

impl Drop for Told<'_> {
    fn drop(&mut self) {
        std::eprintln!("{:?}", self.0);
    }
}

#[test]
fn one_of_two_lanes_is_cut_after_any_byte() {
    let setup = Setup::default();
    play_all(&setup, all_cuts(&setup).into_iter().map(|cut| vec![cut]));
}

#[test]
fn the_only_lane_is_cut_after_any_byte() {
    let setup = Setup {
        lanes: 1,
        ..Setup::default()
    };
    play_all(&setup, all_cuts(&setup).into_iter().map(|cut| vec![cut]));
}

#[test]
fn a_lane_comes_back_while_the_other_goes_on() {
    use Attempt::{Fails, HalfOpen, Late, Succeeds};
    // The server's chunks may be on a stream that the client never had.
    for lanes in [1, 2] {
        for attempts in [[Succeeds; 3], [Late; 3], [HalfOpen, Fails, HalfOpen]] {
            let setup = Setup {
                lanes,
                comeback: Comeback::AtOnce,
                attempts: attempts.to_vec(),
                ..Setup::default()
            };
            play_all(&setup, each_byte(&setup).map(|cut| vec![cut]));
        }
    }
}

#[test]
fn both_lanes_are_cut_after_any_byte() {
    let setup = Setup {
        comeback: Comeback::WhenIdle,
        ..Setup::default()
    };
    let both = |cut: Cut| {
        let other = Cut {
            stream: stream(1 - cut.stream.lane, 0),
            first: 1 - cut.first,
            ..cut
        };
        vec![cut, other]
    };
    play_all(&setup, each_byte(&setup).map(both));
}

#[test]
fn a_lane_is_cut_after_any_byte_while_copies_are_under_way() {
    for copying in [3, 9] {
        let setup = Setup {
            copying,
            comeback: Comeback::WhenIdle,
            ..Setup::default()
        };
        play_all(&setup, each_byte(&setup).map(|cut| vec![cut]));
    }
}

#[test]
fn a_stream_is_given_up_before_the_client_has_it() {
    let setup = Setup {
        comeback: Comeback::AtOnce,
        attempts: vec![Attempt::Late],
        ..Setup::default()
    };
    let given_up = |cut: Cut| {
        let next = Cut {
            stream: stream(cut.stream.lane, 1),
            at: 0,
            first: 1,
            at_once: true,
            ..cut
        };
        vec![cut, next]
    };
    play_all(&setup, each_byte(&setup).map(given_up));
}

fn cuts(lanes: usize) -> impl Strategy<Value = Vec<Cut>> {
    let place = (0..lanes as u16, 0u32..4, 0usize..2);
    // Late attempts matter where the stream is lost before it is used.
    let at = prop_oneof![1 => Just(0u64), 3 => 0u64..500, 1 => 0u64..3000];
    let cut = (place, at, any::<bool>(), 0usize..2, any::<bool>());
    let cut = cut.prop_map(
        |((lane, generation, from), at, flows_back, first, at_once)| Cut {
            stream: stream(lane, generation),
            from,
            at,
            flows_back,
            first,
            at_once,
        },
    );
    vec(cut, 0..=5)
}

fn setups() -> impl Strategy<Value = Setup> {
    use Attempt::{Fails, HalfOpen, Late, Succeeds};
    let comebacks = [Comeback::Never, Comeback::AtOnce, Comeback::WhenIdle];
    let attempt = prop::sample::select(vec![Succeeds, Late, HalfOpen, Fails]);
    (1usize..4).prop_flat_map(move |lanes| {
        (
            [1usize..5, 1usize..5],
            0u32..6,
            cuts(lanes),
            prop::sample::select(comebacks.to_vec()),
            vec(attempt.clone(), 0..6),
            prop::sample::select(vec![48, 200, 1000]),
            proptest::option::of(any::<u64>()),
        )
            .prop_map(
                move |(windows, copying, cuts, comeback, attempts, room, seed)| Setup {
                    lanes,
                    windows,
                    copying,
                    cuts,
                    comeback,
                    attempts,
                    room,
                    seed,
                },
            )
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn up_to_five_losses_change_nothing(
        setup in setups(),
        script in vec((0usize..2, any::<bool>(), vec(1u64..40, 1..8), 0usize..40, 0u32..30), 1..8),
    ) {
        let mut pair = Pair::new(&setup);
        let mut transfers = [0; 2];
        for (side, read, lengths, notes, steps) in script {
            transfers[side] += 1;
            let op = if read { Op::Read } else { Op::Write };
            pair.sides[side].post(op, transfers[side], &lengths);
            (0..notes).for_each(|_| pair.sides[side].notify());
            for _ in 0..steps {
                pair.step();
            }
        }
        pair.run();
    }
}
