//! Blocks of a cache, listed in another order than that of their memory.

use tcpx::Op;
use tcpx_testkit::pattern::Dice;
use tcpx_testkit::{Copy, Host, RemoteProcess, Setup, on_every_setup};

use super::{prepare, verify};

on_every_setup!(blocks_at_equal_distances);

/// Returns the starts of blocks in random order: `distance` bytes apart, except after every `run`
/// blocks.
fn starts(dice: &mut Dice, count: usize, distance: usize, run: usize) -> Vec<usize> {
    let mut starts: Vec<_> = (0..count).map(|i| i * distance + i / run * 100).collect();
    dice.shuffle(&mut starts);
    starts
}

fn blocks_at_equal_distances(setup: &Setup) {
    const COUNT: usize = 400;
    let alice = Host::open("alice", setup);
    let bob = RemoteProcess::open("bob", setup);
    let peer = alice.knows(&bob);
    let mut dice = Dice::new(400);
    // The length of a block, and the distance of two on each side.
    for (len, here, there) in [
        (2048, 4096, 2048),
        (2500, 2500, 6001),
        (4096, 4112, 12_288),
        (300, 1000, 700),
        (20_000, 50_000, 20_001),
    ] {
        for run in [COUNT, 150] {
            let local = starts(&mut dice, COUNT, here, run);
            let remote = starts(&mut dice, COUNT, there, run);
            let pairs = local.into_iter().zip(remote);
            let copies: Vec<_> = pairs
                .map(|(here, there)| Copy::new(here, there, len))
                .collect();
            let end = |distance: usize| COUNT * (distance + 100) + len;
            let (here, there) = (alice.memory(end(here)), bob.memory(end(there)));
            for op in [Op::Write, Op::Read] {
                prepare(op, 40, &here, &bob, &there);
                alice.run(op, &peer, &here, &there, &copies);
                verify(op, 40, &copies, &here, &bob, &there);
            }
            bob.deregister(&there);
        }
    }
}
