//! Reduces samples to the few numbers worth printing.

use std::time::Duration;

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

use crate::units::gigabytes_per_second;

/// Maximum of a sample: longer ones count as this.
const MAX_SAMPLE: Duration = Duration::from_secs(3600);

/// One round of one contestant: its iterations, one after the other, and the CPU they took.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Round {
    /// How long each iteration took.
    pub samples: Vec<Duration>,
    /// CPU time of the measuring process.
    pub initiator_cpu: Duration,
    /// CPU time of the other process.
    pub target_cpu: Duration,
}

/// The result of all rounds of one contestant.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Measured iterations.
    pub iterations: u64,
    /// Decimal gigabytes per second: the median of the rounds' medians.
    pub gb_per_s: f64,
    /// The slowest and the fastest round's median.
    pub gb_per_s_range: (f64, f64),
    /// Time of one iteration, from its start to its completion at the initiator.
    pub latency: Latency,
    /// CPU seconds per decimal gigabyte.
    pub cpu: CpuPerGb,
    /// The median GB/s of every round, in order: the raw series behind the medians.
    pub rounds: Vec<f64>,
}

/// Percentiles in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Latency {
    /// The fastest.
    pub min_us: f64,
    /// The median.
    pub p50_us: f64,
    /// The 99th percentile.
    pub p99_us: f64,
    /// The slowest.
    pub max_us: f64,
}

/// CPU seconds per decimal gigabyte.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct CpuPerGb {
    /// CPU of the measuring process.
    pub initiator: f64,
    /// CPU of the other process.
    pub target: f64,
    /// CPU of both.
    pub total: f64,
}

impl Measured {
    /// Combines the rounds of transfers of `bytes` each. `None` without a single sample.
    pub fn new(rounds: &[Round], bytes: u64) -> Option<Measured> {
        let iterations = rounds
            .iter()
            .map(|round| round.samples.len() as u64)
            .sum::<u64>();
        let rates: Vec<f64> = rounds
            .iter()
            .filter_map(|round| median_duration(&round.samples))
            .map(|elapsed| gigabytes_per_second(bytes, elapsed))
            .collect();
        let fold = |start: f64, pick: fn(f64, f64) -> f64| rates.iter().copied().fold(start, pick);
        let moved = iterations as f64 * bytes as f64 / 1e9;
        let cpu = |of: fn(&Round) -> Duration| {
            rounds
                .iter()
                .map(|round| of(round).as_secs_f64())
                .sum::<f64>()
                / moved
        };
        let (initiator, target) = (
            cpu(|round| round.initiator_cpu),
            cpu(|round| round.target_cpu),
        );
        Some(Measured {
            iterations,
            gb_per_s: median(&rates)?,
            gb_per_s_range: (fold(f64::INFINITY, f64::min), fold(0.0, f64::max)),
            latency: Latency::new(rounds.iter().flat_map(|round| &round.samples))?,
            cpu: CpuPerGb {
                initiator,
                target,
                total: initiator + target,
            },
            rounds: rates,
        })
    }
}

impl Latency {
    /// Computes percentiles of samples; `None` without any.
    pub fn new<'s>(samples: impl IntoIterator<Item = &'s Duration>) -> Option<Latency> {
        // Nanoseconds with three digits; grows to a few hundred KiB at most.
        let mut histogram = Histogram::<u64>::new(3).expect("three digits are within 0 to 5");
        for sample in samples {
            let nanoseconds = sample.as_nanos().min(MAX_SAMPLE.as_nanos()) as u64;
            histogram
                .record(nanoseconds)
                .expect("the histogram grows to MAX_SAMPLE");
        }
        let us = |nanoseconds: u64| nanoseconds as f64 / 1e3;
        (!histogram.is_empty()).then(|| Latency {
            min_us: us(histogram.min()),
            p50_us: us(histogram.value_at_quantile(0.5)),
            p99_us: us(histogram.value_at_quantile(0.99)),
            max_us: us(histogram.max()),
        })
    }
}

/// Returns the middle value, or the mean of the two middle ones. `None` for no values.
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let upper = *sorted.get(sorted.len() / 2)?;
    match sorted.len() % 2 {
        1 => Some(upper),
        _ => Some((sorted[sorted.len() / 2 - 1] + upper) / 2.0),
    }
}

/// Returns the median of durations.
pub fn median_duration(samples: &[Duration]) -> Option<Duration> {
    let seconds: Vec<f64> = samples.iter().map(Duration::as_secs_f64).collect();
    median(&seconds).map(Duration::from_secs_f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    #[test]
    fn medians_of_odd_even_and_nothing() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0]), Some(3.0));
        assert_eq!(median(&[9.0, 1.0, 5.0]), Some(5.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 100.0]), Some(3.0));
        assert_eq!(median_duration(&[ms(10), ms(20)]), Some(ms(15)));
    }

    #[test]
    fn rounds_are_summed_up_by_their_medians() {
        let round = |samples: &[u64], cpu| Round {
            samples: samples.iter().map(|&n| ms(n)).collect(),
            initiator_cpu: ms(cpu),
            target_cpu: ms(2 * cpu),
        };
        // 100 MB in 10, 20 and 50 ms: 10, 5 and 2 GB/s. The outlier of the second round is ignored.
        let rounds = [round(&[10], 5), round(&[20, 20, 900], 5), round(&[50], 20)];
        let measured = Measured::new(&rounds, 100_000_000).unwrap();
        assert_eq!(measured.iterations, 5);
        assert!((measured.gb_per_s - 5.0).abs() < 1e-9);
        assert!((measured.gb_per_s_range.0 - 2.0).abs() < 1e-9);
        assert!((measured.gb_per_s_range.1 - 10.0).abs() < 1e-9);
        assert!((measured.cpu.initiator - 0.06).abs() < 1e-9);
        assert!((measured.cpu.total - 0.18).abs() < 1e-9);
        assert_eq!(measured.rounds.len(), 3);
        assert!((measured.latency.p50_us - 20_000.0).abs() < 40.0);
        assert!(measured.latency.max_us >= 900_000.0);
    }

    #[test]
    fn nothing_measured_is_nothing() {
        assert_eq!(Measured::new(&[], 1), None);
        assert_eq!(Measured::new(&[Round::default()], 1), None);
    }
}
