//! Two sides of a connection over a simulated network, in virtual time.
//!
//! A [`Pair`] has two sides with one [`End`] for each lane, and a [`Link`] for each direction of
//! each lane. Links carry the bytes of frames with a delay, may stall and may be cut after any
//! byte. [`Pair::step`] delivers what is due, lets every end send, and then advances the clock.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::time::Duration;

use super::end::{End, is_refused};
use super::link::{Link, Random};
use super::*;

/// The parameters of a [`Pair`].
#[derive(Clone, Debug)]
pub(super) struct Setup {
    pub(super) lanes: usize,
    /// The window that each side grants the other.
    pub(super) windows: [usize; 2],
    pub(super) latency: Duration,
    pub(super) bandwidth: u64,
    /// Maximum duration of copies.
    pub(super) copying: Duration,
    pub(super) seed: u64,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            lanes: 1,
            windows: [8; 2],
            latency: Duration::from_millis(1),
            bandwidth: 1 << 20,
            copying: Duration::ZERO,
            seed: 1,
        }
    }
}

/// Two sides, their links and the clock.
pub(super) struct Pair {
    pub(super) now: Duration,
    /// By side, then by lane.
    pub(super) ends: [Vec<End>; 2],
    /// By sending side, then by lane.
    pub(super) links: [Vec<Link>; 2],
    /// Number of bytes that still arrive before everything is cut.
    pub(super) until_cut: u64,
    runs: Vec<(usize, Run)>,
    random: Random,
}

impl Pair {
    pub(super) fn new(setup: &Setup) -> Self {
        let end = |side: usize| {
            let (window, own) = (setup.windows[1 - side], setup.windows[side]);
            let mut end = End::new(window, own, setup.lanes);
            end.copying = setup.copying;
            end
        };
        let link = || Link::new(setup.latency, setup.bandwidth);
        Self {
            now: Duration::ZERO,
            ends: [0, 1].map(|side| (0..setup.lanes).map(|_| end(side)).collect()),
            links: [(); 2].map(|()| (0..setup.lanes).map(|_| link()).collect()),
            until_cut: u64::MAX,
            runs: Vec::new(),
            random: Random(setup.seed | 1 << 40),
        }
    }

    /// Offers a transfer to all lanes of a side.
    pub(super) fn post(&mut self, side: usize, op: Op, lengths: &[u64]) -> Run {
        let run = Run::new(op, self.runs.len() as u64 + 1, lengths);
        for end in &mut self.ends[side] {
            end.lane.offer(run.clone()).unwrap();
        }
        self.runs.push((side, run.clone()));
        run
    }

    /// Delivers what is due and lets all ends send; then advances the clock to the next event.
    /// Returns whether there is one by `limit`.
    pub(super) fn step(&mut self, limit: Duration) -> bool {
        for side in [0, 1] {
            for lane in 0..self.links[side].len() {
                self.deliver(side, lane);
            }
        }
        let Self {
            ends,
            links,
            now,
            random,
            ..
        } = self;
        let mut next = None::<Duration>;
        for side in [0, 1] {
            for (end, link) in ends[side].iter_mut().zip(&mut links[side]) {
                end.handle_copies(*now);
                while link.has_room() {
                    let bytes = end.transmit(random);
                    if bytes.is_empty() {
                        break;
                    }
                    link.send(*now, bytes);
                }
                let copied = end.copies.iter().map(|(until, ..)| *until);
                next = next.into_iter().chain(copied).chain(link.arrival()).min();
            }
        }
        let next = next.filter(|next| *next <= limit && self.until_cut > 0);
        self.now = self.now.max(next.unwrap_or_default());
        next.is_some()
    }

    fn deliver(&mut self, from: usize, lane: usize) {
        let (link, end) = (&mut self.links[from][lane], &mut self.ends[1 - from][lane]);
        while link.arrival().is_some_and(|at| at <= self.now) && self.until_cut > 0 {
            let mut bytes = link.receive().expect("an arrival");
            bytes.truncate(usize::try_from(self.until_cut).unwrap_or(usize::MAX));
            self.until_cut -= bytes.len() as u64;
            end.handle_input(bytes, self.now, &mut self.random);
        }
    }

    /// Runs until a moment.
    pub(super) fn run_until(&mut self, moment: Duration) {
        while self.step(moment) {}
        self.now = moment;
    }

    /// Runs until nothing is in flight any more, or everything is cut.
    pub(super) fn run(&mut self) {
        while self.step(Duration::MAX) {}
    }

    /// Returns the bytes that have arrived on either side.
    pub(super) fn received(&self) -> u64 {
        self.ends.iter().flatten().map(|end| end.received).sum()
    }

    /// Checks that every chunk was settled exactly once, in the right way, and that nothing is
    /// left.
    pub(super) fn assert_all_settled(&self) {
        for (side, run) in &self.runs {
            for piece in &*run.pieces {
                let settled = self.ends[*side].iter().flat_map(|end| &end.settled);
                let ends: Vec<_> = settled.filter(|(id, _)| *id == piece.id).collect();
                assert_eq!(ends, [&(piece.id, is_refused(piece.id))], "{:?}", run.op);
            }
        }
        for end in self.ends.iter().flatten() {
            assert_eq!((end.lane.load(), end.lane.replies()), (0, 0));
            assert!(!end.lane.is_busy() && !end.lane.has_work() && end.landing.is_empty());
            assert_eq!(end.lane.unsettled, 0);
        }
    }

    /// Checks that each side has processed writes, notes and marks in the order of their frames.
    pub(super) fn assert_in_order(&self) {
        for (sending, receiving) in [(0, 1), (1, 0)] {
            for (from, to) in self.ends[sending].iter().zip(&self.ends[receiving]) {
                assert_eq!(from.sent, to.dealt_with);
            }
        }
    }

    /// Closes all lanes and checks that each chunk is exactly one of: settled, in flight on one
    /// lane, or never taken.
    pub(super) fn assert_close_accounts_for_all(&mut self) {
        for (side, ends) in self.ends.iter_mut().enumerate() {
            let mut count = BTreeMap::<ChunkId, usize>::new();
            let mut offers = Vec::new();
            for end in ends {
                let (queued, chunks) = end.close();
                offers.extend(queued);
                let settled = end.settled.iter().map(|(id, _)| *id);
                chunks
                    .into_iter()
                    .chain(settled)
                    .for_each(|id| *count.entry(id).or_default() += 1);
            }
            for (_, run) in self.runs.iter().filter(|(of, _)| *of == side) {
                assert!(!run.has_more() || offers.contains(run), "a lost offer");
                for piece in run.rest() {
                    *count.entry(piece.id).or_default() += 1;
                }
                for piece in &*run.pieces {
                    assert_eq!(count.remove(&piece.id), Some(1), "{}", piece.id);
                }
            }
            assert!(count.is_empty(), "chunks that nobody posted: {count:?}");
        }
    }
}
