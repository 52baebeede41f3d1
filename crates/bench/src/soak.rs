//! Watches sessions over a long time: whether memory and speed stay the same after minutes of work,
//! and what an idle session costs.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tcpx::{RemoteRegion, Transfer};

use crate::error::Error;
use crate::faults::FaultsResult;
use crate::floor::Waiting;
use crate::measure::CONNECT_TIMEOUT;
use crate::measure::{Bench, complete, prepare};
use crate::memory::{Contestant, Memory};
use crate::place::Place;
use crate::stats::median;
use crate::usage::Usage;
use crate::workload::{Layout, Op, Shape};

/// The growth that counts as noise and not as a leak.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Noise {
    /// Resident bytes, which the allocator may keep.
    pub bytes: f64,
    /// Descriptors or threads.
    pub handles: f64,
}

const NOISE: Noise = Noise {
    bytes: (2 << 20) as f64,
    handles: 0.0,
};

/// The same for the memory of a GPU, which drivers allocate in pieces of a few MiB.
const DEVICE_NOISE_BYTES: f64 = (16 << 20) as f64;

/// The fraction of a soak that is warm-up: pools, caches and autotuned buffers reach their size.
const WARMUP_PART: f64 = 0.2;

/// Minimum number of samples: a short soak is sampled more often than requested.
const MIN_SAMPLES: u32 = 30;

/// The options of a soak.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SoakOptions {
    /// The duration.
    pub duration: Duration,
    /// Maximum time between two samples of both processes.
    pub sample_every: Duration,
}

/// Both processes at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SoakSample {
    /// Seconds since the soak began.
    pub at_s: f64,
    /// GB/s since the sample before, verification included.
    pub gb_per_s: f64,
    /// Transfers since the soak began.
    pub transfers: u64,
    /// The measuring process.
    pub initiator: Usage,
    /// The other process.
    pub target: Usage,
}

/// The result of a soak. Wrong data is an error, not a result.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SoakResult {
    /// Transfers completed.
    pub transfers: u64,
    /// Transfers whose every byte was checked.
    pub verified: u64,
    /// Bytes moved.
    pub bytes: u64,
    /// The growth of either side's steady state, and whether it exceeds noise.
    pub growth: Growth,
    /// The faults injected, if any.
    #[serde(default)]
    pub faults: Option<FaultsResult>,
    /// The whole series.
    pub samples: Vec<SoakSample>,
}

/// Compares the steady state early and late.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Growth {
    /// Resident bytes of the measuring process, late minus early.
    pub initiator_bytes: f64,
    /// Resident bytes of the other process, late minus early.
    pub target_bytes: f64,
    /// Descriptors of both, late minus early.
    pub descriptors: f64,
    /// Threads of both, late minus early.
    #[serde(default)]
    pub threads: f64,
    /// GPU memory that is no longer free, on the GPU that lost more of it; 0 without one.
    #[serde(default)]
    pub device_bytes: f64,
    /// Whether any of these grew by more than noise.
    pub grew: bool,
}

/// The result for an idle, connected session.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct IdleResult {
    /// The duration in seconds.
    pub seconds: f64,
    /// CPU of the measuring process as a fraction of one core.
    pub initiator_cpu: f64,
    /// CPU of the other process as a fraction of one core.
    pub target_cpu: f64,
}

/// Memory of a session with many idle peers.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct IdlePeersResult {
    /// Number of peers.
    pub peers: usize,
    /// Resident bytes each of them added to the session's process.
    pub bytes_per_peer: f64,
    /// Descriptors each of them added.
    pub descriptors_per_peer: f64,
}

impl Bench {
    /// Watches both processes while nothing happens.
    pub fn run_idle(&mut self, duration: Duration) -> Result<IdleResult, Error> {
        // Lets the last acknowledgements and spins of earlier work end.
        std::thread::sleep(Duration::from_millis(200));
        let before = (Usage::now(Place::Host), self.remote().usage()?);
        let start = Instant::now();
        std::thread::sleep(duration);
        let seconds = start.elapsed().as_secs_f64();
        let after = (Usage::now(Place::Host), self.remote().usage()?);
        let part = |before: Usage, after: Usage| (after.cpu - before.cpu).as_secs_f64() / seconds;
        Ok(IdleResult {
            seconds,
            initiator_cpu: part(before.0, after.0),
            target_cpu: part(before.1, after.1),
        })
    }

    /// Connects this session to many others and measures their memory. They are only connected: no
    /// transfer has warmed them up.
    pub fn run_idle_peers(&mut self, count: usize) -> Result<IdlePeersResult, Error> {
        let infos = self.remote().sessions(count)?;
        let before = Usage::now(Place::Host);
        let mut peers = Vec::with_capacity(count);
        for info in &infos {
            let peer = self.session().add_peer(info)?;
            peer.connect(CONNECT_TIMEOUT)?;
            peers.push(peer);
        }
        std::thread::sleep(Duration::from_millis(200));
        let after = Usage::now(Place::Host);
        for peer in &peers {
            self.session().remove_peer(peer.name())?;
        }
        self.remote().sessions(0)?;
        let each = |before: u64, after: u64| (after as f64 - before as f64) / count.max(1) as f64;
        Ok(IdlePeersResult {
            peers: count,
            bytes_per_peer: each(before.resident_bytes, after.resident_bytes),
            descriptors_per_peer: each(before.descriptors, after.descriptors),
        })
    }

    /// Moves mixed transfers for a while: large and small, contiguous and scattered, in both
    /// directions, newly prepared and posted again, one at a time and many at once. Checks every
    /// byte of one transfer of each kind between two samples.
    pub fn run_soak(
        &mut self,
        options: &SoakOptions,
        interrupted: &AtomicBool,
        sampled: &mut dyn FnMut(&SoakSample),
    ) -> Result<SoakResult, Error> {
        let sample_every = options.sample_every.min(options.duration / MIN_SAMPLES);
        let start = Instant::now();
        let mut soak = Soak::default();
        let mut samples: Vec<SoakSample> = Vec::new();
        let mut last = (start, 0);
        let mut kind = 0;
        while start.elapsed() < options.duration && !interrupted.load(Ordering::Relaxed) {
            let (op, shape) = MIX[kind % MIX.len()];
            soak.run_kind(self, op, shape, sample_every / MIX.len() as u32)?;
            kind += 1;
            if kind.is_multiple_of(MIX.len()) {
                let bytes = soak.bytes - last.1;
                let sample = SoakSample {
                    at_s: start.elapsed().as_secs_f64(),
                    gb_per_s: crate::units::gigabytes_per_second(bytes, last.0.elapsed()),
                    transfers: soak.transfers,
                    initiator: Usage::now(self.place()),
                    target: self.remote().usage()?,
                };
                last = (Instant::now(), soak.bytes);
                sampled(&sample);
                samples.push(sample);
            }
        }
        Ok(SoakResult {
            transfers: soak.transfers,
            verified: soak.verified,
            bytes: soak.bytes,
            growth: Growth::of(&samples, NOISE),
            faults: None,
            samples,
        })
    }
}

/// Total and block size of a kind of transfer.
type Kind = (u64, u64);

/// The mix of a soak.
const MIX: [(Op, Kind); 8] = [
    (Op::Write, (4 << 10, 0)),
    (Op::Read, (16 << 20, 16 << 10)),
    (Op::Write, (64 << 20, 0)),
    (Op::Read, (1 << 20, 0)),
    (Op::Write, (8 << 20, 4 << 10)),
    (Op::Read, (4 << 10, 0)),
    (Op::Write, (1_000_003, 1021)),
    (Op::Read, (64 << 20, 64 << 10)),
];

/// Number of transfers of one kind in flight together.
const TOGETHER: usize = 4;

#[derive(Default)]
struct Soak {
    transfers: u64,
    verified: u64,
    bytes: u64,
    /// Kept from kind to kind, so that growth is the engine's.
    memory: Option<Memory>,
}

impl Soak {
    fn run_kind(
        &mut self,
        bench: &mut Bench,
        op: Op,
        (total, block): Kind,
        time: Duration,
    ) -> Result<(), Error> {
        let shape = Shape::new(op, total, block, Layout::Scattered)?;
        let region = bench.remote().prepare(shape)?;
        let mut memory =
            Memory::for_shape(bench.session(), bench.place(), &shape, self.memory.take())?;
        self.verify(bench, &shape, &mut memory, &region)?;
        let start = Instant::now();
        while start.elapsed() < time {
            // Concurrent transfers write the same bytes to the same places.
            let transfers = (0..TOGETHER)
                .map(|_| prepare(bench.session(), bench.peer(), &shape, &memory, &region))
                .collect::<Result<Vec<Transfer>, Error>>()?;
            for _ in 0..4 {
                for transfer in &transfers {
                    transfer.post()?;
                }
                for transfer in &transfers {
                    complete(transfer, Waiting::Block)?;
                    self.count(total);
                }
            }
        }
        self.memory = Some(memory);
        Ok(())
    }

    fn verify(
        &mut self,
        bench: &mut Bench,
        shape: &Shape,
        memory: &mut Memory,
        region: &RemoteRegion,
    ) -> Result<(), Error> {
        let (source, poison) = (2 * self.transfers + 1, 2 * self.transfers + 2);
        let (own, theirs) = match shape.op() {
            Op::Write => (source, poison),
            Op::Read => (poison, source),
        };
        memory.fill(shape, own)?;
        bench.remote().fill(theirs)?;
        let transfer = prepare(bench.session(), bench.peer(), shape, memory, region)?;
        transfer.post()?;
        complete(&transfer, Waiting::Block)?;
        let result = match shape.op() {
            Op::Write => bench.remote().verify(source, Contestant::Engine)?,
            Op::Read => memory.verify(shape, source, Contestant::Engine)?,
        };
        let what = || format!("the engine ({shape}, after {} transfers)", self.transfers);
        result.map_err(|mismatch| Error::Corrupt {
            what: what(),
            mismatch,
        })?;
        self.verified += 1;
        self.count(shape.total_bytes());
        Ok(())
    }

    fn count(&mut self, bytes: u64) {
        self.transfers += 1;
        self.bytes += bytes;
    }
}

impl Growth {
    /// Compares the first third of the steady state with the last, by their medians: a single
    /// sample in the middle of a burst is not representative.
    pub fn of(samples: &[SoakSample], noise: Noise) -> Growth {
        let end = samples.last().map_or(0.0, |sample| sample.at_s);
        let steady: Vec<&SoakSample> = samples
            .iter()
            .filter(|sample| sample.at_s >= WARMUP_PART * end)
            .collect();
        let third = steady.len().div_ceil(3);
        let (early, late) = (&steady[..third], &steady[steady.len() - third..]);
        let change = |of: fn(&SoakSample) -> u64| {
            let middle = |samples: &[&SoakSample]| {
                let values: Vec<f64> = samples.iter().map(|sample| of(sample) as f64).collect();
                median(&values).unwrap_or_default()
            };
            middle(late) - middle(early)
        };
        let initiator_bytes = change(|sample| sample.initiator.resident_bytes);
        let target_bytes = change(|sample| sample.target.resident_bytes);
        let descriptors = change(|sample| sample.initiator.descriptors + sample.target.descriptors);
        let threads = change(|sample| sample.initiator.threads + sample.target.threads);
        let device_bytes = 0.0
            - f64::min(
                change(|sample| sample.initiator.device_free_bytes.unwrap_or_default()),
                change(|sample| sample.target.device_free_bytes.unwrap_or_default()),
            );
        let grew = initiator_bytes.max(target_bytes) > noise.bytes
            || descriptors.max(threads) > noise.handles
            || device_bytes > DEVICE_NOISE_BYTES;
        Growth {
            initiator_bytes,
            target_bytes,
            descriptors,
            threads,
            device_bytes,
            grew,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(resident: impl Fn(u64) -> u64, descriptors: impl Fn(u64) -> u64) -> Vec<SoakSample> {
        let usage = |at| Usage {
            cpu: Duration::ZERO,
            resident_bytes: resident(at),
            descriptors: descriptors(at),
            threads: 3,
            device_free_bytes: None,
        };
        (0..100)
            .map(|at| SoakSample {
                at_s: at as f64,
                gb_per_s: 1.0,
                transfers: at,
                initiator: usage(at),
                target: usage(at),
            })
            .collect()
    }

    #[test]
    fn a_steady_process_with_a_warm_up_and_noise_does_not_grow() {
        let resident = |at: u64| (100 << 20) + at.min(15) * (4 << 20) + at % 7 * (1 << 20);
        let growth = Growth::of(&samples(resident, |_| 20), NOISE);
        assert!(!growth.grew, "{growth:?}");
    }

    #[test]
    fn a_slow_leak_is_seen() {
        let growth = Growth::of(&samples(|at| (100 << 20) + at * (100 << 10), |_| 20), NOISE);
        assert!(growth.grew, "{growth:?}");
        assert!(growth.initiator_bytes > 4e6);
        let growth = Growth::of(&samples(|_| 100 << 20, |at| 20 + at / 30), NOISE);
        assert!(growth.grew, "{growth:?}");
    }

    #[test]
    fn memory_that_a_gpu_loses_is_seen() {
        let mut samples = samples(|_| 100 << 20, |_| 20);
        let mut growth = |lost_each: u64| {
            for (at, sample) in (0..).zip(&mut samples) {
                sample.target.device_free_bytes = Some((80 << 30) - at * lost_each);
            }
            Growth::of(&samples, NOISE)
        };
        assert!(!growth(0).grew);
        assert!(!growth(1 << 10).grew, "noise");
        let leak = growth(1 << 20);
        assert!(
            leak.grew && leak.device_bytes > (16 << 20) as f64,
            "{leak:?}"
        );
    }

    #[test]
    fn too_few_samples_show_nothing() {
        assert!(!Growth::of(&[], NOISE).grew);
        assert!(!Growth::of(&samples(|_| 1, |_| 1)[..1], NOISE).grew);
    }
}
