//! Rounds of the engine and rounds of the floor, in turns, over the same bytes.
//!
//! ```text
//!   prepare ─► verified run of each ─► warm-up, floor tuned ─► rounds ─► verified run
//!                                                              engine floor
//!                                                              floor engine
//!                                                              engine floor …
//! ```
//!
//! Taking turns makes a busy neighbour or a falling clock hit both alike, and changing who begins
//! cancels what the first of a pair has from coming first. Before a verified run both buffers are
//! poisoned with different patterns, so that a transfer that does nothing cannot pass.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tcpx::{Config, Peer, RemoteRegion, Segment, Session, Source, Transfer, TransferState};

use crate::error::Error;
use crate::floor::{Blocks, CALL_BYTES, Streams, Tuning, Waiting};
use crate::memory::Memory;
use crate::peer::control::SHARED_SETTINGS;
use crate::peer::{Program, Remote};
use crate::stats::{Measured, Round, median, median_duration};
use crate::suite::{Case, Group};
use crate::usage;
use crate::workload::{Limit, Mismatch, Op, Shape, Side};

/// How many rounds a number of iterations is spread over.
const ROUNDS: u32 = 10;

/// The least number of rounds of a timed case.
const MIN_ROUNDS: usize = 3;

/// The most iterations of one round, which bounds the memory for samples.
const MAX_ROUND_ITERATIONS: u32 = 100_000;

/// How long one transfer may take.
const TRANSFER_TIMEOUT: Duration = Duration::from_secs(120);

/// How long the lanes may take to connect.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);

/// Hears how a measurement goes: draws a bar, prints a line, or does nothing (`()`).
pub trait Progress {
    /// A case begins, `index` (from 0) of `count`.
    fn started(&mut self, index: usize, count: usize, case: &Case) {
        let _ = (index, count, case);
    }

    /// Something happened within the case.
    fn step(&mut self, step: Step) {
        let _ = step;
    }

    /// The case is done.
    fn finished(&mut self, result: &CaseResult) {
        let _ = result;
    }
}

impl Progress for () {}

/// Where a case stands.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Step {
    /// Memory is made and filled, every byte of a first run is checked.
    Verifying,
    /// Warm-up, and the choice of the floor's call size.
    WarmingUp,
    /// Rounds are being measured.
    Measuring {
        /// From 0 to 1.
        done: f64,
        /// GB/s of the engine in the latest round.
        engine: f64,
        /// GB/s of the floor in the latest round.
        floor: Option<f64>,
    },
}

/// What to do besides measuring the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extras {
    /// Measure the floor too.
    pub floor: bool,
    /// Verify every byte, before and after.
    pub verify: bool,
}

impl Default for Extras {
    fn default() -> Extras {
        Extras { floor: true, verify: true }
    }
}

/// What came out of one case.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CaseResult {
    /// The case's name.
    pub name: String,
    /// What it is part of.
    pub group: Group,
    /// What was moved.
    pub shape: Shape,
    /// How the caller waited.
    pub waiting: Waiting,
    /// Lanes of the engine, streams of the floor.
    pub lanes: usize,
    /// Time to prepare the transfer, in milliseconds.
    pub prepare_ms: f64,
    /// The engine.
    pub engine: Measured,
    /// The floor, if it was measured.
    pub floor: Option<FloorResult>,
    /// Whether every byte was checked, before and after the rounds. Wrong bytes give no result.
    pub verified: bool,
}

/// What the floor did in the same case.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FloorResult {
    /// Its numbers.
    #[serde(flatten)]
    pub measured: Measured,
    /// Bytes it offered to one system call: the fastest of the candidates.
    pub call_bytes: usize,
    /// The engine's GB/s as a part of the floor's.
    pub ratio: f64,
    /// The smallest and the largest ratio of any two rounds that followed each other.
    pub ratio_range: (f64, f64),
    /// The engine's CPU seconds per GB as a multiple of the floor's.
    pub cpu_ratio: f64,
}

/// The measuring side: a session of its own, and the other process.
pub struct Bench {
    session: Session,
    peer: Peer,
    remote: Remote,
    streams: Option<Streams>,
    /// Patterns of different runs differ.
    seed: u64,
}

impl Bench {
    /// Measures on this machine, against a second process. Unless the configuration says otherwise
    /// the lanes run over the loopback interface.
    pub fn spawn(program: &Program, mut config: Config) -> Result<Bench, Error> {
        stay_on_loopback(&mut config)?;
        let remote = Remote::spawn(program, &shared_settings(&config, true))?;
        Bench::new(remote, config)
    }

    /// Measures against a [`Server`](crate::peer::Server) at `host`, as `name:port`.
    pub fn connect(host: &str, timeout: Duration, mut config: Config) -> Result<Bench, Error> {
        let local = is_loopback(host);
        if local {
            stay_on_loopback(&mut config)?;
        }
        let remote = Remote::connect(host, timeout, &shared_settings(&config, local))?;
        Bench::new(remote, config)
    }

    fn new(remote: Remote, config: Config) -> Result<Bench, Error> {
        let name = format!("bench-initiator-{}", std::process::id());
        let session = Session::new(config.with_name(name))?;
        let peer = session.add_peer(remote.connection_info())?;
        peer.connect(CONNECT_TIMEOUT)?;
        Ok(Bench { session, peer, remote, streams: None, seed: 1 })
    }

    /// This side's session.
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// The other side's session.
    pub fn peer(&self) -> &Peer {
        &self.peer
    }

    /// The other process.
    pub fn remote(&mut self) -> &mut Remote {
        &mut self.remote
    }

    /// Lanes of the engine, which is also how many streams the floor has.
    pub fn lanes(&self) -> usize {
        self.peer.lanes().len().max(1)
    }

    /// Measures the cases one after the other.
    pub fn run(
        &mut self,
        cases: &[Case],
        extras: Extras,
        progress: &mut dyn Progress,
    ) -> Result<Vec<CaseResult>, Error> {
        let mut results = Vec::with_capacity(cases.len());
        for (index, case) in cases.iter().enumerate() {
            progress.started(index, cases.len(), case);
            let result = self.run_case(case, extras, progress)?;
            progress.finished(&result);
            results.push(result);
        }
        Ok(results)
    }

    /// Measures one case.
    pub fn run_case(
        &mut self,
        case: &Case,
        extras: Extras,
        progress: &mut dyn Progress,
    ) -> Result<CaseResult, Error> {
        progress.step(Step::Verifying);
        let lanes = self.lanes();
        if extras.floor && self.streams.is_none() {
            self.streams = Some(self.remote.floor_streams(lanes)?);
        }
        let mut stage = Stage::new(self, case)?;
        if extras.verify {
            stage.verified("the engine", |stage| stage.engine_round(1).map(drop))?;
            if extras.floor {
                stage.verified("the floor", |stage| stage.floor_round(1).map(drop))?;
            }
        }

        progress.step(Step::WarmingUp);
        let warmup = stage.warm_up(case.workload.warmup, extras.floor)?;
        let rounds = stage.rounds(case.workload.limit, warmup, extras.floor, progress)?;
        if extras.verify {
            stage.verified("the engine", |stage| stage.engine_round(1).map(drop))?;
        }

        let bytes = case.workload.shape.total_bytes();
        let none = || Error::Protocol { what: "no iteration was measured".into() };
        let engine = Measured::new(&rounds.engine, bytes).ok_or_else(none)?;
        let call_bytes = stage.tuning.call_bytes;
        let floor = Measured::new(&rounds.floor, bytes)
            .map(|measured| FloorResult::new(&engine, measured, call_bytes));
        Ok(CaseResult {
            name: case.name.clone(),
            group: case.group,
            shape: case.workload.shape,
            waiting: case.waiting,
            lanes,
            prepare_ms: stage.prepare.as_secs_f64() * 1e3,
            engine,
            floor,
            verified: extras.verify,
        })
    }
}

impl FloorResult {
    fn new(engine: &Measured, measured: Measured, call_bytes: usize) -> FloorResult {
        let pairs = || engine.rounds.iter().zip(&measured.rounds).map(|(ours, raw)| ours / raw);
        let ratio_range = (pairs().fold(f64::INFINITY, f64::min), pairs().fold(0.0, f64::max));
        FloorResult {
            ratio: engine.gb_per_s / measured.gb_per_s,
            ratio_range,
            cpu_ratio: engine.cpu.total / measured.cpu.total,
            call_bytes,
            measured,
        }
    }
}

/// What was measured in turns.
#[derive(Default)]
struct Rounds {
    engine: Vec<Round>,
    floor: Vec<Round>,
}

/// Everything one case needs, set up.
struct Stage<'b> {
    remote: &'b mut Remote,
    streams: Option<&'b Streams>,
    seed: &'b mut u64,
    shape: Shape,
    blocks: Blocks,
    memory: Memory,
    transfer: Transfer,
    prepare: Duration,
    tuning: Tuning,
}

impl<'b> Stage<'b> {
    fn new(bench: &'b mut Bench, case: &Case) -> Result<Stage<'b>, Error> {
        let shape = case.workload.shape;
        let region = bench.remote.prepare(shape)?;
        let memory = Memory::new(&bench.session, shape.total_bytes() as usize)?;
        let start = Instant::now();
        let transfer = prepare(&bench.session, &bench.peer, &shape, &memory, &region)?;
        let prepare = start.elapsed();
        Ok(Stage {
            remote: &mut bench.remote,
            streams: bench.streams.as_ref(),
            seed: &mut bench.seed,
            shape,
            blocks: Blocks::new(shape.spans(Side::Initiator)),
            memory,
            transfer,
            prepare,
            tuning: Tuning { call_bytes: CALL_BYTES[0], waiting: case.waiting },
        })
    }

    /// Poisons both buffers, moves the bytes with `run`, and checks every one of them.
    fn verified(
        &mut self,
        what: &str,
        run: impl FnOnce(&mut Self) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let (source, poison) = (*self.seed, *self.seed + 1);
        *self.seed += 2;
        let seed = |side| if self.shape.op().source() == side { source } else { poison };
        self.remote.fill(seed(Side::Target))?;
        self.memory.fill(seed(Side::Initiator));
        run(self)?;
        let result = match self.shape.op() {
            Op::Read => self.memory.verify(&self.shape, source),
            Op::Write => self.remote.verify(source)?,
        };
        result.map_err(|mismatch: Mismatch| Error::Corrupt {
            what: format!("{what} ({})", self.shape),
            mismatch,
        })
    }

    /// Warms both up, settles the floor's call size, and returns how long an iteration takes.
    fn warm_up(&mut self, iterations: u32, floor: bool) -> Result<Duration, Error> {
        let iterations = iterations.max(1);
        let engine = self.engine_round(iterations)?;
        let mut slowest = median_duration(&engine.samples).unwrap_or_default();
        if floor {
            let mut best: Option<(Duration, usize)> = None;
            for call_bytes in CALL_BYTES {
                self.tuning.call_bytes = call_bytes;
                // Three at least: one sample decides nothing.
                let round = self.floor_round(iterations.max(3))?;
                let time = median_duration(&round.samples).unwrap_or_default();
                if best.is_none_or(|(fastest, _)| time < fastest) {
                    best = Some((time, call_bytes));
                }
                if call_bytes as u64 >= self.shape.total_bytes() {
                    break;
                }
            }
            let (time, call_bytes) = best.expect("there is a candidate");
            self.tuning.call_bytes = call_bytes;
            slowest = slowest.max(time);
        }
        Ok(slowest)
    }

    /// Measures in turns until the limit is reached.
    fn rounds(
        &mut self,
        limit: Limit,
        iteration: Duration,
        floor: bool,
        progress: &mut dyn Progress,
    ) -> Result<Rounds, Error> {
        let plan = RoundPlan::new(limit, iteration, floor);
        let start = Instant::now();
        let mut rounds = Rounds::default();
        while let Some(iterations) = plan.next(rounds.engine.len(), start.elapsed()) {
            let engine_first = rounds.engine.len().is_multiple_of(2);
            if engine_first {
                rounds.engine.push(self.engine_round(iterations)?);
            }
            if floor {
                rounds.floor.push(self.floor_round(iterations)?);
            }
            if !engine_first {
                rounds.engine.push(self.engine_round(iterations)?);
            }
            progress.step(Step::Measuring {
                done: plan.done(rounds.engine.len(), start.elapsed()),
                engine: self.rate(&rounds.engine).unwrap_or_default(),
                floor: self.rate(&rounds.floor),
            });
        }
        Ok(rounds)
    }

    /// GB/s of the latest round.
    fn rate(&self, rounds: &[Round]) -> Option<f64> {
        let elapsed = median_duration(&rounds.last()?.samples)?;
        Some(crate::units::gigabytes_per_second(self.shape.total_bytes(), elapsed))
    }

    fn engine_round(&mut self, iterations: u32) -> Result<Round, Error> {
        let mut samples = Vec::with_capacity(iterations as usize);
        let target_before = self.remote.cpu()?;
        let own_before = usage::cpu();
        for _ in 0..iterations {
            let start = Instant::now();
            self.transfer.post()?;
            complete(&self.transfer, self.tuning.waiting)?;
            samples.push(start.elapsed());
        }
        let initiator_cpu = usage::cpu() - own_before;
        let target_cpu = self.remote.cpu()?.saturating_sub(target_before);
        Ok(Round { samples, initiator_cpu, target_cpu })
    }

    fn floor_round(&mut self, iterations: u32) -> Result<Round, Error> {
        let missing = || Error::Protocol { what: "the floor has no streams".into() };
        let streams = self.streams.ok_or_else(missing)?;
        let (op, tuning) = (self.shape.op(), self.tuning);
        let target_before = self.remote.cpu()?;
        let own_before = usage::cpu();
        let (memory, blocks) = (self.memory.idle_bytes(), &self.blocks);
        let samples = self.remote.floor_run(iterations, tuning, || {
            streams.initiate(op, memory, blocks, iterations, tuning)
        })?;
        let initiator_cpu = usage::cpu() - own_before;
        let target_cpu = self.remote.cpu()?.saturating_sub(target_before);
        Ok(Round { samples, initiator_cpu, target_cpu })
    }
}

/// How many iterations each round has, and when the last one is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RoundPlan {
    /// This many iterations in total.
    Counted { iterations: u32 },
    /// Rounds of `iterations` until the time is up.
    Timed { iterations: u32, duration: Duration },
}

impl RoundPlan {
    fn new(limit: Limit, iteration: Duration, floor: bool) -> RoundPlan {
        match limit {
            Limit::Iterations(iterations) => RoundPlan::Counted { iterations },
            Limit::Duration(duration) => {
                let contestants = if floor { 2 } else { 1 };
                let round = duration.as_secs_f64() / f64::from(ROUNDS * contestants);
                let iterations = (round / iteration.as_secs_f64().max(1e-7)) as u32;
                let iterations = iterations.clamp(1, MAX_ROUND_ITERATIONS);
                RoundPlan::Timed { iterations, duration }
            }
        }
    }

    /// Iterations of the next round after `rounds`; none when it is enough.
    fn next(&self, rounds: usize, elapsed: Duration) -> Option<u32> {
        match *self {
            RoundPlan::Counted { iterations } => {
                let (each, rest) = (iterations / ROUNDS, iterations % ROUNDS);
                let round = rounds as u32;
                let next = each + u32::from(round < rest);
                (round < ROUNDS && next > 0).then_some(next.min(MAX_ROUND_ITERATIONS))
            }
            RoundPlan::Timed { iterations, duration } => {
                (rounds < MIN_ROUNDS || elapsed < duration).then_some(iterations)
            }
        }
    }

    fn done(&self, rounds: usize, elapsed: Duration) -> f64 {
        match *self {
            RoundPlan::Counted { iterations } => rounds as f64 / f64::from(iterations.min(ROUNDS)),
            RoundPlan::Timed { duration, .. } => elapsed.as_secs_f64() / duration.as_secs_f64(),
        }
        .min(1.0)
    }
}

/// Prepares the transfer of a shape between this side's memory and the other's.
pub(crate) fn prepare(
    session: &Session,
    peer: &Peer,
    shape: &Shape,
    memory: &Memory,
    region: &RemoteRegion,
) -> Result<Transfer, Error> {
    let local = shape.spans(Side::Initiator);
    let remote = shape.spans(Side::Target);
    let segments = local.iter().zip(&remote).map(|(here, there)| Segment {
        local: memory.region().at(here.offset),
        remote: region.at(there.offset),
        len: here.len,
    });
    let op = match shape.op() {
        Op::Read => tcpx::Op::Read,
        Op::Write => tcpx::Op::Write,
    };
    Ok(session.prepare(op, peer, segments)?)
}

/// Waits for a posted transfer.
pub(crate) fn complete(transfer: &Transfer, waiting: Waiting) -> Result<(), Error> {
    match waiting {
        Waiting::Block => Ok(transfer.wait(TRANSFER_TIMEOUT)?),
        Waiting::Poll => loop {
            match transfer.poll() {
                TransferState::Done => return Ok(()),
                TransferState::InProgress => std::hint::spin_loop(),
                // The peer's timeout bounds the loop; `wait` has the error's words.
                _ => return Ok(transfer.wait(Duration::ZERO)?),
            }
        },
    }
}

/// Settings of this side that the other must share: what was chosen, not what is default.
/// Interface names mean something else on another machine.
fn shared_settings(config: &Config, same_machine: bool) -> Vec<(String, String)> {
    let rows = config.rows().into_iter().filter(|row| row.source != Source::Default);
    rows.filter(|row| SHARED_SETTINGS.contains(&row.key))
        .filter(|row| same_machine || row.key != "interfaces")
        .map(|row| (row.key.to_owned(), row.value))
        .collect()
}

/// Two processes of one machine meet on loopback, whatever other interfaces there are.
fn stay_on_loopback(config: &mut Config) -> Result<(), Error> {
    let chosen = |row: &tcpx::ConfigRow| row.key == "interfaces" && row.source != Source::Default;
    if !config.rows().iter().any(chosen) {
        config.set("interfaces", "lo")?;
    }
    Ok(())
}

fn is_loopback(host: &str) -> bool {
    use std::net::ToSocketAddrs;

    host.to_socket_addrs().is_ok_and(|mut all| all.all(|address| address.ip().is_loopback()))
}

/// What preparing and posting cost, apart from moving bytes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PrepareResult {
    /// Segments of the transfer.
    pub segments: usize,
    /// Bytes of each.
    pub segment_bytes: u64,
    /// Median time of `prepare`, in milliseconds.
    pub prepare_ms: f64,
    /// The first `post` until done, in milliseconds.
    pub first_post_ms: f64,
    /// Median of later posts of the same transfer until done, in milliseconds.
    pub repost_ms: f64,
    /// Median time of the later `post` calls alone, in microseconds.
    pub repost_call_us: f64,
}

impl Bench {
    /// Measures `prepare` and `post` for transfers of many small segments.
    pub fn run_prepare(&mut self, segments: &[usize]) -> Result<Vec<PrepareResult>, Error> {
        segments.iter().map(|&count| self.run_prepare_one(count)).collect()
    }

    fn run_prepare_one(&mut self, segments: usize) -> Result<PrepareResult, Error> {
        // Small segments, so that planning rather than copying is what is seen.
        const SEGMENT_BYTES: u64 = 1024;
        const REPEATS: usize = 5;

        let total = segments as u64 * SEGMENT_BYTES;
        let shape = Shape::new(Op::Write, total, SEGMENT_BYTES, true)?;
        let region = self.remote.prepare(shape)?;
        let mut memory = Memory::new(&self.session, total as usize)?;
        memory.fill(self.seed);
        let ms = |start: Instant| start.elapsed().as_secs_f64() * 1e3;

        let mut prepares = Vec::new();
        let mut first_posts = Vec::new();
        let mut transfer = None;
        for _ in 0..REPEATS {
            drop(transfer.take());
            let start = Instant::now();
            let prepared = prepare(&self.session, &self.peer, &shape, &memory, &region)?;
            prepares.push(ms(start));
            let start = Instant::now();
            prepared.post()?;
            complete(&prepared, Waiting::Block)?;
            first_posts.push(ms(start));
            transfer = Some(prepared);
        }
        let transfer = transfer.expect("REPEATS is not 0");
        let (mut reposts, mut calls) = (Vec::new(), Vec::new());
        for _ in 0..REPEATS {
            let start = Instant::now();
            transfer.post()?;
            calls.push(ms(start) * 1e3);
            complete(&transfer, Waiting::Block)?;
            reposts.push(ms(start));
        }
        let middle = |values: &[f64]| median(values).unwrap_or_default();
        Ok(PrepareResult {
            segments,
            segment_bytes: SEGMENT_BYTES,
            prepare_ms: middle(&prepares),
            first_post_ms: middle(&first_posts),
            repost_ms: middle(&reposts),
            repost_call_us: middle(&calls),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counted_iterations_are_spread_over_the_rounds() {
        for total in [1, 3, 10, 23, 20_000] {
            let plan = RoundPlan::new(Limit::Iterations(total), Duration::ZERO, true);
            let mut rounds = Vec::new();
            while let Some(iterations) = plan.next(rounds.len(), Duration::ZERO) {
                rounds.push(iterations);
            }
            assert_eq!(rounds.iter().sum::<u32>(), total);
            assert_eq!(rounds.len() as u32, total.min(ROUNDS));
            assert_eq!(plan.done(rounds.len(), Duration::ZERO), 1.0);
        }
    }

    #[test]
    fn timed_rounds_end_when_the_time_is_up() {
        let second = Duration::from_secs(1);
        let plan = RoundPlan::new(Limit::Duration(second), Duration::from_millis(5), true);
        assert_eq!(plan, RoundPlan::Timed { iterations: 10, duration: second });
        assert_eq!(plan.next(0, 2 * second), Some(10), "a few rounds in any case");
        assert_eq!(plan.next(MIN_ROUNDS, second / 2), Some(10));
        assert_eq!(plan.next(MIN_ROUNDS, second), None);
        assert_eq!(plan.done(1, second / 2), 0.5);
    }

    #[test]
    fn a_slow_iteration_still_makes_a_round() {
        let limit = Limit::Duration(Duration::from_millis(10));
        let plan = RoundPlan::new(limit, Duration::from_secs(3), false);
        assert_eq!(plan.next(0, Duration::ZERO), Some(1));
    }

    #[test]
    fn ratios_compare_medians_and_neighbours() {
        let measured = |rates: &[f64], cpu: f64| Measured {
            iterations: rates.len() as u64,
            gb_per_s: median(rates).unwrap(),
            gb_per_s_range: (0.0, 0.0),
            latency: crate::stats::Latency { min_us: 0.0, p50_us: 0.0, p99_us: 0.0, max_us: 0.0 },
            cpu: crate::stats::CpuPerGb { initiator: 0.0, target: cpu, total: cpu },
            rounds: rates.to_vec(),
        };
        let engine = measured(&[3.0, 4.0, 5.0], 0.5);
        let floor = FloorResult::new(&engine, measured(&[6.0, 4.0, 5.0], 0.4), 1 << 20);
        assert_eq!(floor.ratio, 0.8);
        assert_eq!(floor.ratio_range, (0.5, 1.0));
        assert_eq!(floor.cpu_ratio, 1.25);
    }
}
