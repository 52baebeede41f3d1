//! Limits the rate of a plugin's log lines: a peer may cause them, and plugins have no limit.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Maximum lines that a call site in a plugin's code may write at once.
pub(super) const BURST: u64 = 10;

/// The interval of further lines of a call site at its limit.
const INTERVAL: Duration = Duration::from_secs(1);

/// Number of call sites with a limit of their own: far more than log lines while things go wrong.
/// Further ones share a limit.
const PLACES: usize = 64;

static LIMITS: [Limit; PLACES] = [const { Limit::new() }; PLACES];

/// Returns the limit of a call site in a plugin's code. Takes no lock and allocates nothing: a
/// plugin may log anywhere.
pub(crate) fn of(file: &[u8], line: i32) -> &'static Limit {
    // FNV-1a.
    let bytes = file.iter().copied().chain(line.to_le_bytes());
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    // The upper bits are distributed better.
    &LIMITS[(hash >> 32) as usize % PLACES]
}

/// Writes a warning of this crate, unless this call site has exceeded its rate.
macro_rules! limited_warning {
    ($($line:tt)+) => {{
        let place = $crate::log::limit::of(file!().as_bytes(), line!().cast_signed());
        if let Some(left_out) = place.admit(std::time::Instant::now()) {
            let left_out = (left_out > 0).then_some(left_out);
            tracing::warn!(left_out, $($line)+);
        }
    }};
}

pub(crate) use limited_warning;

/// The rate of one call site: [`BURST`] lines at once, then one each [`INTERVAL`].
pub(crate) struct Limit {
    /// The time at which the admitted lines would have come at one per interval, in nanoseconds.
    paid_until: AtomicU64,
    left_out: AtomicU64,
}

impl Limit {
    const fn new() -> Self {
        Self {
            paid_until: AtomicU64::new(0),
            left_out: AtomicU64::new(0),
        }
    }

    /// Decides about a line: returns the number of lines suppressed before it, or `None` if it is
    /// suppressed.
    pub(crate) fn admit(&self, now: Instant) -> Option<u64> {
        static EPOCH: LazyLock<Instant> = LazyLock::new(Instant::now);
        let interval = INTERVAL.as_nanos() as u64;
        let now = now.saturating_duration_since(*EPOCH).as_nanos() as u64;
        let pay = |paid: u64| {
            let paid = paid.max(now) + interval;
            (paid <= now + BURST * interval).then_some(paid)
        };
        let relaxed = Ordering::Relaxed;
        match self.paid_until.fetch_update(relaxed, relaxed, pay) {
            Ok(_) => Some(self.left_out.swap(0, relaxed)),
            Err(_) => {
                self.left_out.fetch_add(1, relaxed);
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_writes_a_burst_and_then_one_line_each_interval() {
        let limit = Limit::new();
        let start = Instant::now() + Duration::from_secs(60);
        let admitted = |at| (0..500).filter(|_| limit.admit(at).is_some()).count() as u64;
        assert_eq!(admitted(start), BURST);
        assert_eq!(limit.admit(start + INTERVAL), Some(500 - BURST));
        assert_eq!(limit.admit(start + INTERVAL), None);
        assert_eq!(admitted(start + 100 * INTERVAL), BURST);
    }

    #[test]
    fn places_have_limits_of_their_own() {
        let [here, next, there] = [of(b"net.cc", 1), of(b"net.cc", 2), of(b"gpu.cc", 1)];
        assert!(std::ptr::eq(here, of(b"net.cc", 1)));
        assert!(!std::ptr::eq(here, next) && !std::ptr::eq(here, there));
    }
}
