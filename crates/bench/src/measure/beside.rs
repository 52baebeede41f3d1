//! Measures how much of its speed a model keeps while its memory is moved.
//!
//! A model that computes and a transfer of its memory share a GPU: its memory, its copy engines
//! and, for scattered blocks, its processors. Here built-in loads replace the model, since only
//! their speed matters. Each runs alone and beside a transfer that is posted repeatedly, in turns,
//! so that a clock that falls with the heat slows both.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tcpx::Transfer;
use tcpx::cuda::{Load, Work};

use super::stage::{Stage, complete};
use super::{Bench, Progress, Step};
use crate::error::Error;
use crate::floor::Waiting;
use crate::memory::Contestant;
use crate::place::Place;
use crate::stats::{Latency, median};
use crate::suite::Case;
use crate::units;
use crate::workload::Shape;

/// Number of turns of each load alone and beside each transfer.
const ROUNDS: u32 = 3;

/// Iterations started at once, so that the GPU always has a next one.
const BURST: u32 = 4;

/// The work of the GPU meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LoadKind {
    /// Multiplies large matrices: bound by arithmetic, as prefill is.
    Matmul,
    /// Copies memory within the GPU: bound by the bandwidth of its memory.
    Copy,
    /// Launches many short kernels by a CUDA graph: bound by latency and memory, as decoding is.
    Decode,
}

impl LoadKind {
    /// All of them.
    pub const ALL: [LoadKind; 3] = [LoadKind::Matmul, LoadKind::Copy, LoadKind::Decode];

    /// Returns the work of one iteration, in sizes of current models divided by `divisor`.
    fn work(self, divisor: usize) -> Work {
        let part = |size: usize| (size / divisor.max(1)).max(1);
        match self {
            LoadKind::Matmul => Work::Matmul { side: part(8192) },
            LoadKind::Copy => Work::Copy {
                bytes: part(1 << 30),
            },
            LoadKind::Decode => Work::Decode {
                rows: part(4096),
                launches: part(64),
            },
        }
    }
}

impl fmt::Display for LoadKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            LoadKind::Matmul => "matmul",
            LoadKind::Copy => "copy",
            LoadKind::Decode => "decode",
        })
    }
}

/// The options of [`Bench::run_beside`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BesideOptions {
    /// Time for each load with each transfer, half of it for the load alone.
    pub time: Duration,
    /// Divides the size of the loads: 1, except where there is no real GPU.
    pub divisor: usize,
    /// Verify every byte, before and after.
    pub verify: bool,
}

/// The result of one transfer beside one load.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BesideResult {
    /// The load.
    pub load: LoadKind,
    /// The case's name.
    pub name: String,
    /// The transferred data.
    pub shape: Shape,
    /// Decimal gigabytes per second of the transfer beside the load.
    pub gb_per_s: f64,
    /// The load's speed beside the transfer as a fraction of its speed alone.
    pub keeps: f64,
    /// The smallest and the largest fraction of two consecutive rounds.
    pub keeps_range: (f64, f64),
    /// The load alone.
    pub alone: Pace,
    /// The load beside the transfer.
    pub beside: Pace,
    /// Whether every byte was checked, before and after the rounds. Wrong bytes give no result.
    pub verified: bool,
}

/// The speed of a load.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Pace {
    /// Iterations per second: the median of the rounds.
    pub per_s: f64,
    /// The 99th percentile of the time of a few iterations as a multiple of its median: 1 is
    /// steady.
    pub tail: f64,
    /// Iterations per second of every round, in order.
    pub rounds: Vec<f64>,
}

impl Pace {
    /// Sums up the times of bursts, round by round. `None` without any.
    fn new(rounds: &[Vec<Duration>]) -> Option<Pace> {
        let rate = |bursts: &Vec<Duration>| {
            let time: Duration = bursts.iter().sum();
            f64::from(BURST) * bursts.len() as f64 / time.as_secs_f64().max(1e-9)
        };
        let rates: Vec<f64> = rounds.iter().map(rate).collect();
        let bursts = Latency::new(rounds.iter().flatten())?;
        Some(Pace {
            per_s: median(&rates)?,
            tail: bursts.p99_us / bursts.p50_us.max(1e-3),
            rounds: rates,
        })
    }
}

/// Measurements taken in turns: bursts of the load, and transfers.
#[derive(Default)]
struct Turns {
    alone: Vec<Vec<Duration>>,
    beside: Vec<Vec<Duration>>,
    transfers: Vec<Duration>,
}

impl BesideResult {
    /// Returns `None` if nothing was measured.
    fn new(load: LoadKind, case: &Case, turns: &Turns, verified: bool) -> Option<BesideResult> {
        let (alone, beside) = (Pace::new(&turns.alone)?, Pace::new(&turns.beside)?);
        let pairs = || {
            let pairs = beside.rounds.iter().zip(&alone.rounds);
            pairs.map(|(beside, alone)| beside / alone)
        };
        let shape = case.workload.shape;
        let moved = shape.total_bytes() * turns.transfers.len() as u64;
        Some(BesideResult {
            load,
            name: case.name.clone(),
            shape,
            gb_per_s: units::gigabytes_per_second(moved, turns.transfers.iter().sum()),
            keeps: beside.per_s / alone.per_s,
            keeps_range: (
                pairs().fold(f64::INFINITY, f64::min),
                pairs().fold(0.0, f64::max),
            ),
            alone,
            beside,
            verified,
        })
    }
}

impl Bench {
    /// Measures each load alone and beside each case's transfer. The loads run on the GPU that
    /// holds this side's memory.
    ///
    /// # Errors
    /// This side's memory is not on a GPU, the GPU has no room for the loads, the loads compute
    /// wrong values, or as [`Bench::run`].
    pub fn run_beside(
        &mut self,
        cases: &[Case],
        options: &BesideOptions,
        progress: &mut dyn Progress,
    ) -> Result<Vec<BesideResult>, Error> {
        let Place::Vram(ordinal) = self.place() else {
            return Err(Error::Option {
                option: "mem",
                value: self.places().to_string(),
                reason: "beside a load, this side's memory must lie on a GPU, such as vram:0,host"
                    .into(),
            });
        };
        let mut loads = Vec::new();
        for kind in LoadKind::ALL {
            let work = kind.work(options.divisor);
            loads.push((kind, Load::new(ordinal, work).map_err(tcpx::Error::from)?));
        }
        let mut results = Vec::new();
        for (index, case) in cases.iter().enumerate() {
            if progress.is_interrupted() {
                break;
            }
            progress.started(index, cases.len(), case);
            progress.step(Step::Verifying);
            let mut stage = Stage::new(self, case)?;
            if options.verify {
                stage.verified(Contestant::Engine)?;
            }
            let first = results.len();
            for (turn, (kind, load)) in loads.iter().enumerate() {
                progress.step(Step::Computing {
                    load: *kind,
                    done: turn as f64 / loads.len() as f64,
                });
                let turns = take_turns(load, stage.transfer(), case.waiting, options.time)?;
                if !load.is_right().map_err(tcpx::Error::from)? {
                    return Err(Error::Load { load: *kind });
                }
                results.extend(BesideResult::new(*kind, case, &turns, options.verify));
            }
            if options.verify {
                stage.verified(Contestant::Engine)?;
            }
            for result in &results[first..] {
                progress.finished_beside(result);
            }
        }
        Ok(results)
    }
}

/// Runs a load alone and beside a transfer, in turns.
fn take_turns(
    load: &Load,
    transfer: &Transfer,
    waiting: Waiting,
    time: Duration,
) -> Result<Turns, Error> {
    let window = time / (2 * ROUNDS);
    let mut turns = Turns::default();
    for _ in 0..ROUNDS {
        turns.alone.push(run(load, window)?);
        let (bursts, transfers) = run_beside(load, transfer, waiting, window)?;
        turns.beside.push(bursts);
        turns.transfers.extend(transfers);
    }
    Ok(turns)
}

/// Runs a load for a while; returns the time of each burst, at least one.
fn run(load: &Load, window: Duration) -> Result<Vec<Duration>, Error> {
    let burst = |iterations: u32| -> Result<Duration, tcpx::Error> {
        let start = Instant::now();
        for _ in 0..iterations {
            load.start()?;
        }
        load.wait()?;
        Ok(start.elapsed())
    };
    burst(1)?;
    let start = Instant::now();
    let mut bursts = vec![burst(BURST)?];
    while start.elapsed() < window {
        bursts.push(burst(BURST)?);
    }
    Ok(bursts)
}

/// Runs a load while a transfer is posted repeatedly; returns also the times of the transfers, at
/// least one.
fn run_beside(
    load: &Load,
    transfer: &Transfer,
    waiting: Waiting,
    window: Duration,
) -> Result<(Vec<Duration>, Vec<Duration>), Error> {
    let stop = AtomicBool::new(false);
    let (sender, receiver) = mpsc::channel();
    std::thread::scope(|scope| {
        let stop = &stop;
        let mover = scope.spawn(move || -> Result<(), Error> {
            while !stop.load(Ordering::Relaxed) {
                let start = Instant::now();
                transfer.post()?;
                complete(transfer, waiting)?;
                // The receiver lives until this thread has ended.
                let _ = sender.send(start.elapsed());
            }
            Ok(())
        });
        // The first transfer warms up. If none comes, the mover has failed.
        let first = receiver.recv();
        let bursts = first.map(|_| run(load, window));
        stop.store(true, Ordering::Relaxed);
        match mover.join() {
            Ok(outcome) => outcome?,
            Err(panic) => std::panic::resume_unwind(panic),
        }
        let mut transfers: Vec<Duration> = receiver.try_iter().collect();
        // A short window may end before another one.
        transfers.extend(first.ok().filter(|_| transfers.is_empty()));
        Ok((bursts.unwrap_or_else(|_| Ok(Vec::new()))?, transfers))
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::suite::{Options, cases};

    fn ms(milliseconds: &[u64]) -> Vec<Duration> {
        let each = milliseconds.iter();
        each.map(|&each| Duration::from_millis(each)).collect()
    }

    fn case() -> Case {
        let options = Options {
            sizes: vec![1 << 20],
            ..Options::default()
        };
        cases(&options).unwrap().remove(0)
    }

    #[test]
    fn a_pace_is_the_median_of_its_rounds() {
        // Bursts of 4: 200, 100 and 50 iterations a second.
        let pace = Pace::new(&[ms(&[20]), ms(&[40, 40]), ms(&[80])]).unwrap();
        assert_eq!(pace.rounds, [200.0, 100.0, 50.0]);
        assert_eq!(pace.per_s, 100.0);
        assert!((pace.tail - 2.0).abs() < 0.01, "{}", pace.tail);
        assert_eq!(Pace::new(&[]), None);
        assert_eq!(Pace::new(&[Vec::new()]), None);
    }

    #[test]
    fn what_is_kept_compares_rounds_that_follow_each_other() {
        let turns = Turns {
            alone: vec![ms(&[10]), ms(&[10]), ms(&[20])],
            beside: vec![ms(&[20]), ms(&[40]), ms(&[20])],
            // 2 MiB in 2 ms.
            transfers: ms(&[1, 1]),
        };
        let result = BesideResult::new(LoadKind::Decode, &case(), &turns, true).unwrap();
        assert_eq!(result.keeps, 0.5);
        assert_eq!(result.keeps_range, (0.25, 1.0));
        assert!((result.gb_per_s - 1.048_576).abs() < 1e-9);
        assert_eq!((result.alone.per_s, result.beside.per_s), (400.0, 200.0));
        assert!(result.verified);
        let nothing = BesideResult::new(LoadKind::Copy, &case(), &Turns::default(), true);
        assert_eq!(nothing, None);
    }

    #[test]
    fn loads_shrink_and_never_vanish() {
        let Work::Matmul { side } = LoadKind::Matmul.work(1) else {
            panic!("another work");
        };
        assert_eq!(side, 8192);
        assert_eq!(LoadKind::Copy.work(4), Work::Copy { bytes: 1 << 28 });
        let least = Work::Decode {
            rows: 1,
            launches: 1,
        };
        assert_eq!(LoadKind::Decode.work(usize::MAX), least);
    }
}
