//! Divides a limit into rounds; pure.

use std::time::Duration;

use crate::workload::Limit;

/// Number of rounds over which iterations are spread.
const ROUNDS: u32 = 10;

/// Minimum rounds of a timed case.
const MIN_ROUNDS: usize = 3;

/// Intended maximum duration of a round of a timed case: an interrupted measurement ends after its
/// current round.
const MAX_ROUND: Duration = Duration::from_secs(1);

/// Maximum iterations of one round, which bounds the memory for samples.
const MAX_ROUND_ITERATIONS: u32 = 100_000;

/// The number of iterations per round, and the end condition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RoundPlan {
    /// This many iterations in total.
    Counted { iterations: u32 },
    /// Rounds of `iterations` until the time is up.
    Timed { iterations: u32, duration: Duration },
}

impl RoundPlan {
    pub(super) fn new(limit: Limit, iteration: Duration, floor: bool) -> RoundPlan {
        match limit {
            Limit::Iterations(iterations) => RoundPlan::Counted { iterations },
            Limit::Duration(duration) => {
                let contestants = if floor { 2 } else { 1 };
                let round = (duration / (ROUNDS * contestants)).min(MAX_ROUND);
                let iterations = (round.as_secs_f64() / iteration.as_secs_f64().max(1e-7)) as u32;
                let iterations = iterations.clamp(1, MAX_ROUND_ITERATIONS);
                RoundPlan::Timed {
                    iterations,
                    duration,
                }
            }
        }
    }

    /// Returns the iterations of the next round after `rounds`; `None` at the end.
    pub(super) fn next(&self, rounds: usize, elapsed: Duration) -> Option<u32> {
        match *self {
            RoundPlan::Counted { iterations } => {
                let (each, rest) = (iterations / ROUNDS, iterations % ROUNDS);
                let round = rounds as u32;
                let next = each + u32::from(round < rest);
                (round < ROUNDS && next > 0).then_some(next.min(MAX_ROUND_ITERATIONS))
            }
            RoundPlan::Timed {
                iterations,
                duration,
            } => (rounds < MIN_ROUNDS || elapsed < duration).then_some(iterations),
        }
    }

    pub(super) fn done(&self, rounds: usize, elapsed: Duration) -> f64 {
        match *self {
            RoundPlan::Counted { iterations } => rounds as f64 / f64::from(iterations.min(ROUNDS)),
            RoundPlan::Timed { duration, .. } => elapsed.as_secs_f64() / duration.as_secs_f64(),
        }
        .min(1.0)
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
        assert_eq!(
            plan,
            RoundPlan::Timed {
                iterations: 10,
                duration: second
            }
        );
        assert_eq!(
            plan.next(0, 2 * second),
            Some(10),
            "a few rounds in any case"
        );
        assert_eq!(plan.next(MIN_ROUNDS, second / 2), Some(10));
        assert_eq!(plan.next(MIN_ROUNDS, second), None);
        assert_eq!(plan.done(1, second / 2), 0.5);
    }

    #[test]
    fn rounds_of_a_long_case_stay_short() {
        let hour = Limit::Duration(Duration::from_secs(3600));
        let plan = RoundPlan::new(hour, Duration::from_millis(10), true);
        assert_eq!(plan.next(0, Duration::ZERO), Some(100));
    }

    #[test]
    fn a_slow_iteration_still_makes_a_round() {
        let limit = Limit::Duration(Duration::from_millis(10));
        let plan = RoundPlan::new(limit, Duration::from_secs(3), false);
        assert_eq!(plan.next(0, Duration::ZERO), Some(1));
    }
}
