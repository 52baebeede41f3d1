//! Measures how long a peer has made no progress.

use core::time::Duration;

/// Measures the time that counts as a peer's silence. Times count from any fixed moment.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silence {
    looked: Option<Duration>,
}

impl Silence {
    /// Returns how much of the time since the last call counts as silence, of which the peer may
    /// have `limit`. A late call means that this process did not run: bytes that the peer sent
    /// meanwhile are not read yet.
    pub fn passed(&mut self, now: Duration, limit: Duration) -> Duration {
        let before = self.looked.replace(now).unwrap_or(now);
        now.saturating_sub(before).min(limit / 4)
    }
}

/// Measures for how long a position has not moved.
#[derive(Clone, Copy, Debug, Default)]
pub struct Stall {
    /// The last position, if there is something to move.
    at: Option<u64>,
    time: Duration,
}

impl Stall {
    /// Records the position `at` after another `passed`. Returns for how long it has not moved.
    pub fn look(&mut self, at: Option<u64>, passed: Duration) -> Duration {
        let still = at.is_some() && self.at == at;
        self.at = at;
        self.time = if still {
            self.time + passed
        } else {
            Duration::ZERO
        };
        self.time
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_that_this_process_did_not_run_is_not_its_peers_silence() {
        let limit = Duration::from_secs(8);
        let (mut silence, mut stall) = (Silence::default(), Stall::default());
        let mut look = |seconds, moved| {
            let passed = silence.passed(Duration::from_secs(seconds), limit);
            stall.look(Some(moved), passed).as_secs()
        };
        assert_eq!(look(0, 5), 0);
        assert_eq!(look(1, 5), 1);
        // After an hour without a call, the next calls decide.
        assert_eq!(look(3601, 5), 3);
        assert_eq!(look(3603, 5), 5);
        assert_eq!(look(3604, 6), 0);
        assert_eq!(look(3605, 6), 1);
    }
}
