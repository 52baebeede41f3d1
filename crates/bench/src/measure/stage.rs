//! One prepared case: the memory of both contestants, and their rounds.

use std::time::{Duration, Instant};

use tcpx::stats::{ProcessStats, Sample};
use tcpx::{Peer, RemoteRegion, Segment, Session, Transfer, TransferState};

use super::rounds::RoundPlan;
use super::{Bench, Progress, Step};
use crate::error::Error;
use crate::floor::{Blocks, CALL_BYTES, Streams, Tuning, Waiting};
use crate::memory::{Contestant, Memory, check_room};
use crate::peer::Remote;
use crate::stats::{Round, median_duration};
use crate::suite::Case;
use crate::usage;
use crate::workload::{Limit, Mismatch, Op, Shape, Side};

/// Number of turns of each candidate of the floor.
const TUNING_TURNS: usize = 3;

/// Approximate bytes moved in each turn.
const TUNING_BYTES: u64 = 128 << 20;

/// Time limit of one transfer.
const TRANSFER_TIMEOUT: Duration = Duration::from_secs(120);

/// Measurements taken in turns.
#[derive(Default)]
pub(super) struct Rounds {
    pub(super) engine: Vec<Round>,
    pub(super) floor: Vec<Round>,
    /// What was observed of the engine meanwhile.
    pub(super) observed: Sample,
}

/// Everything that one case needs, prepared.
pub(super) struct Stage<'b> {
    session: &'b Session,
    peer: &'b Peer,
    remote: &'b mut Remote,
    streams: Option<&'b Streams>,
    seed: &'b mut u64,
    shape: Shape,
    blocks: Blocks,
    memory: Memory,
    transfer: Transfer,
    pub(super) prepare: Duration,
    pub(super) tuning: Tuning,
}

impl<'b> Stage<'b> {
    pub(super) fn new(bench: &'b mut Bench, case: &Case) -> Result<Stage<'b>, Error> {
        let shape = case.workload.shape;
        let place = bench.place();
        check_room(place, &shape)?;
        let region = bench.remote.prepare(shape)?;
        let memory = Memory::for_shape(&bench.session, place, &shape, None)?;
        let start = Instant::now();
        let transfer = prepare(&bench.session, &bench.peer, &shape, &memory, &region)?;
        let prepare = start.elapsed();
        Ok(Stage {
            session: &bench.session,
            peer: &bench.peer,
            remote: &mut bench.remote,
            streams: bench.streams.as_ref(),
            seed: &mut bench.seed,
            shape,
            blocks: Blocks::new(shape.spans(Side::Initiator)),
            memory,
            transfer,
            prepare,
            tuning: Tuning {
                call_bytes: CALL_BYTES[0],
                waiting: case.waiting,
            },
        })
    }

    /// Poisons both buffers, lets one contestant move the bytes, and checks every one of them.
    pub(super) fn verified(&mut self, contestant: Contestant) -> Result<(), Error> {
        let (source, poison) = (*self.seed, *self.seed + 1);
        *self.seed += 2;
        let seed = |side| {
            if self.shape.op().source() == side {
                source
            } else {
                poison
            }
        };
        self.remote.fill(seed(Side::Target))?;
        let seed = seed(Side::Initiator);
        self.memory.fill(&self.shape, seed)?;
        match contestant {
            Contestant::Engine => self.engine_round(1)?,
            Contestant::Floor => self.floor_round(1)?,
        };
        let result = match self.shape.op() {
            Op::Read => self.memory.verify(&self.shape, source, contestant)?,
            Op::Write => self.remote.verify(source, contestant)?,
        };
        result.map_err(|mismatch: Mismatch| Error::Corrupt {
            what: format!("{contestant} ({})", self.shape),
            mismatch,
        })
    }

    /// Warms both up, chooses the floor's call size, and returns the duration of an iteration.
    pub(super) fn warm_up(&mut self, iterations: u32, floor: bool) -> Result<Duration, Error> {
        let iterations = iterations.max(1);
        let engine = self.engine_round(iterations)?;
        let mut slowest = median_duration(&engine.samples).unwrap_or_default();
        if floor {
            slowest = slowest.max(self.tune_floor()?);
        }
        Ok(slowest)
    }

    /// Tries every call size, in turns so that other load affects all alike, and keeps the fastest.
    /// Returns the duration of an iteration with it.
    fn tune_floor(&mut self) -> Result<Duration, Error> {
        let total = self.shape.total_bytes();
        // For a transfer that fits the smallest call, larger calls make no difference.
        let fits = total <= CALL_BYTES[0] as u64;
        let candidates = if fits {
            &CALL_BYTES[..1]
        } else {
            &CALL_BYTES[..]
        };
        let iterations = (TUNING_BYTES / total).clamp(1, 200) as u32;
        let mut samples = vec![Vec::new(); candidates.len()];
        for _ in 0..TUNING_TURNS {
            for (&call_bytes, samples) in candidates.iter().zip(&mut samples) {
                self.tuning.call_bytes = call_bytes;
                samples.extend(self.floor_round(iterations)?.samples);
            }
        }
        let times = samples
            .iter()
            .map(|samples| median_duration(samples).unwrap_or_default());
        let (time, call_bytes) = times
            .zip(candidates)
            .min_by_key(|(time, _)| *time)
            .expect("never empty");
        self.tuning.call_bytes = *call_bytes;
        Ok(time)
    }

    /// Measures in turns until the limit is reached.
    pub(super) fn rounds(
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
                self.observed_round(iterations, &mut rounds)?;
            }
            if floor {
                rounds.floor.push(self.floor_round(iterations)?);
            }
            if !engine_first {
                self.observed_round(iterations, &mut rounds)?;
            }
            progress.step(Step::Measuring {
                done: plan.done(rounds.engine.len(), start.elapsed()),
                engine: self.rate(&rounds.engine).unwrap_or_default(),
                floor: self.rate(&rounds.floor),
            });
            if progress.is_interrupted() {
                break;
            }
        }
        Ok(rounds)
    }

    /// Runs a round of the engine between two readings of its statistics.
    fn observed_round(&mut self, iterations: u32, rounds: &mut Rounds) -> Result<(), Error> {
        let read = |session: &Session| ProcessStats::with_session(session.stats_with_kernel());
        let before = read(self.session);
        rounds.engine.push(self.engine_round(iterations)?);
        let sample = read(self.session).sample(&before, 0, self.peer.name());
        if let Some(sample) = sample {
            rounds.observed.add(&sample);
        }
        Ok(())
    }

    /// Returns GB/s of the latest round.
    fn rate(&self, rounds: &[Round]) -> Option<f64> {
        let elapsed = median_duration(&rounds.last()?.samples)?;
        Some(crate::units::gigabytes_per_second(
            self.shape.total_bytes(),
            elapsed,
        ))
    }

    pub(super) fn engine_round(&mut self, iterations: u32) -> Result<Round, Error> {
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
        Ok(Round {
            samples,
            initiator_cpu,
            target_cpu,
        })
    }

    /// Returns the engine's transfer, which is not in flight.
    pub(super) fn transfer(&self) -> &Transfer {
        &self.transfer
    }

    /// Returns whether the floor goes over a plugin.
    pub(super) fn is_plugged(&self) -> bool {
        self.streams.is_some_and(Streams::is_plugged)
    }

    pub(super) fn floor_round(&mut self, iterations: u32) -> Result<Round, Error> {
        let missing = || Error::Protocol {
            what: "the floor has no streams".into(),
        };
        let streams = self.streams.ok_or_else(missing)?;
        let (op, tuning) = (self.shape.op(), self.tuning);
        let target_before = self.remote.cpu()?;
        let own_before = usage::cpu();
        let (memory, blocks) = (self.memory.idle_bytes(&self.shape), &self.blocks);
        let samples = self.remote.floor_run(iterations, tuning, || {
            streams.initiate(op, memory, blocks, iterations, tuning)
        })?;
        let initiator_cpu = usage::cpu() - own_before;
        let target_cpu = self.remote.cpu()?.saturating_sub(target_before);
        Ok(Round {
            samples,
            initiator_cpu,
            target_cpu,
        })
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
                // The peer timeout bounds the loop; `wait` returns the error.
                _ => return Ok(transfer.wait(Duration::ZERO)?),
            }
        },
    }
}
