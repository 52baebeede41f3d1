//! The workers of a session, and the assignment of lanes to them.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::worker::Worker;
use crate::link::Caller;
use crate::peers::Crew;
use crate::trace::Trace;

/// The workers of a session.
pub(crate) struct Workers {
    bulk: Vec<Arc<Worker>>,
    /// Drives the express lanes, so that no small transfer waits for a thread that moves megabytes.
    express: Arc<Worker>,
    next: AtomicUsize,
}

impl Workers {
    pub(crate) fn new(count: usize, trace: &Trace) -> std::io::Result<Arc<Self>> {
        let bulk: std::io::Result<_> = (0..count).map(|_| Worker::new(trace)).collect();
        Ok(Arc::new(Self {
            bulk: bulk?,
            express: Worker::new(trace)?,
            next: AtomicUsize::new(0),
        }))
    }

    /// Returns whether a worker moves bulk data, or polls for it.
    pub(crate) fn is_bulk_moving(&self) -> bool {
        let mut bulk = self.bulk.iter();
        bulk.any(|worker| worker.is_awake())
    }

    /// Wakes up to `count` bulk workers.
    pub(crate) fn wake(&self, count: usize) {
        for worker in self.bulk.iter().take(count) {
            worker.wake();
        }
    }

    /// Returns the bulk workers.
    pub(crate) fn bulk(&self) -> &[Arc<Worker>] {
        &self.bulk
    }

    /// Returns the worker of the express lanes.
    pub(crate) fn express(&self) -> &Arc<Worker> {
        &self.express
    }

    /// Chooses the worker of each bulk lane of a connection, given the lanes' local addresses.
    /// Transfers may use only the lanes of one address, so these are spread over all workers.
    pub(crate) fn for_lanes(&self, addresses: &[Option<IpAddr>]) -> Vec<Arc<dyn Caller>> {
        let first = self.next.fetch_add(addresses.len(), Ordering::Relaxed);
        let bulk = self.bulk.len();
        let chosen = spread(addresses, bulk).into_iter();
        chosen
            .map(|index| Arc::clone(&self.bulk[(first + index) % bulk]) as Arc<dyn Caller>)
            .collect()
    }

    /// Returns the worker for the next bulk lane.
    pub(crate) fn next(&self) -> Arc<dyn Caller> {
        let index = self.next.fetch_add(1, Ordering::Relaxed) % self.bulk.len();
        Arc::clone(&self.bulk[index]) as Arc<dyn Caller>
    }
}

impl Crew for Workers {
    fn stop(&self) {
        for worker in self.bulk.iter().chain([&self.express]) {
            worker.stop();
        }
    }
}

/// Assigns each lane to one of `workers` workers: to one that has the fewest lanes of the same
/// address, and among these to one that has the fewest lanes.
fn spread<A: PartialEq>(lanes: &[A], workers: usize) -> Vec<usize> {
    let mut chosen: Vec<usize> = Vec::with_capacity(lanes.len());
    for address in lanes {
        let load = |worker: &usize| {
            let given = chosen.iter().zip(lanes).filter(|(w, _)| *w == worker);
            let alike = given.clone().filter(|(_, a)| *a == address);
            (alike.count(), given.count())
        };
        chosen.extend((0..workers).min_by_key(load));
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lanes_of_each_address_are_spread_over_all_workers() {
        // Eight lanes over each of four interfaces, in turn.
        let lanes: Vec<usize> = (0..32).map(|lane| lane % 4).collect();
        let chosen = spread(&lanes, 8);
        for address in 0..4 {
            let of = (0..32).filter(|&lane| lanes[lane] == address);
            let mut workers: Vec<usize> = of.map(|lane| chosen[lane]).collect();
            workers.sort_unstable();
            assert_eq!(workers, [0, 1, 2, 3, 4, 5, 6, 7]);
        }
        // Consecutive lanes, which a short transfer uses, have different workers.
        assert_eq!(chosen[..8], [0, 1, 2, 3, 4, 5, 6, 7]);
        // With one address, workers alternate.
        assert_eq!(spread(&[0; 5], 2), [0, 1, 0, 1, 0]);
    }
}
