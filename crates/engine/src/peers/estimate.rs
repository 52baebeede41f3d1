//! Estimates of transfer durations, from earlier transfers.

use std::time::Duration;

/// Assumptions before anything was measured: a 10 Gbit/s link across a data centre.
const ASSUMED_BYTES_PER_SECOND: f64 = 1.25e9;
const ASSUMED_ROUND_TRIP: f64 = 100e-6;

/// Transfers up to this size measure the round trip, transfers from `BULK_BYTES` on the bandwidth.
const SMALL_BYTES: u64 = 16 << 10;
const BULK_BYTES: u64 = 1 << 20;

/// The weight of a new sample.
const WEIGHT: f64 = 0.125;

/// An estimate of a transfer's duration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Estimate {
    /// The most likely duration.
    pub duration: Duration,
    /// Uncertainty of the duration: about four mean deviations of the measurements, or the whole
    /// duration without any.
    pub margin: Duration,
}

impl Estimate {
    /// The estimate of a transfer that does not happen.
    pub(crate) const NONE: Self = Self {
        duration: Duration::ZERO,
        margin: Duration::ZERO,
    };
}

/// A smoothed value and its mean deviation, as TCP smooths its round trip.
#[derive(Clone, Copy, Debug)]
struct Smoothed {
    mean: f64,
    deviation: f64,
}

impl Smoothed {
    fn add(this: &mut Option<Self>, sample: f64) {
        match this {
            None => {
                *this = Some(Self {
                    mean: sample,
                    deviation: sample / 2.0,
                })
            }
            Some(s) => {
                let error = sample - s.mean;
                s.mean += WEIGHT * error;
                s.deviation += WEIGHT * (error.abs() - s.deviation);
            }
        }
    }
}

/// Measurements of the path to a peer.
#[derive(Debug, Default)]
pub(crate) struct Measured {
    seconds_per_byte: Option<Smoothed>,
    round_trip: Option<Smoothed>,
}

impl Measured {
    pub(crate) fn transfer(&mut self, bytes: u64, elapsed: Duration) {
        let seconds = elapsed.as_secs_f64();
        if bytes <= SMALL_BYTES {
            Smoothed::add(&mut self.round_trip, seconds);
        } else if bytes >= BULK_BYTES {
            let base = self.round_trip.map_or(0.0, |r| r.mean);
            let moving = (seconds - base).max(seconds / 2.0);
            Smoothed::add(&mut self.seconds_per_byte, moving / bytes as f64);
        }
    }

    pub(crate) fn round_trip(&mut self, elapsed: Duration) {
        Smoothed::add(&mut self.round_trip, elapsed.as_secs_f64());
    }

    pub(crate) fn estimate(&self, bytes: u64) -> Estimate {
        let unknown = |mean: f64| Smoothed {
            mean,
            deviation: mean / 4.0,
        };
        let base = self
            .round_trip
            .unwrap_or_else(|| unknown(ASSUMED_ROUND_TRIP));
        let per_byte = self
            .seconds_per_byte
            .unwrap_or_else(|| unknown(1.0 / ASSUMED_BYTES_PER_SECOND));
        let bytes = bytes as f64;
        let seconds = base.mean + per_byte.mean * bytes;
        let margin = 4.0 * (base.deviation + per_byte.deviation * bytes);
        Estimate {
            duration: Duration::from_secs_f64(seconds),
            margin: Duration::from_secs_f64(margin),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn estimates_converge_to_the_measurements() {
        let mut measured = Measured::default();
        let blind = measured.estimate(64 << 20);
        assert!(
            blind.margin >= blind.duration / 2,
            "the margin of an unmeasured estimate is too small: {blind:?}"
        );
        for _ in 0..100 {
            measured.transfer(4096, Duration::from_micros(20));
            measured.transfer(64 << 20, Duration::from_millis(20));
        }
        let seen = measured.estimate(64 << 20);
        let error = seen.duration.abs_diff(Duration::from_millis(20));
        assert!(error < Duration::from_millis(1), "{seen:?}");
        assert!(seen.margin < blind.margin);
    }
}
