//! Placement of a worker thread: on the NUMA node of the GPU, its pinned memory and its interfaces,
//! if all in use share one node; otherwise anywhere.

use std::sync::Arc;

use tcpx_net::cpus::Cpus;

use crate::log::limited;
use crate::memory::Nearness;

/// The CPUs of one worker thread.
pub(super) struct Seat {
    nearness: Arc<Nearness>,
    /// Number of threads that share a node: with fewer CPUs than this, threads stay where they are.
    threads: usize,
    /// The node on which the thread was last placed.
    node: Option<u32>,
    /// The CPUs that the thread had before.
    home: Option<Cpus>,
}

impl Seat {
    pub(super) fn new(nearness: Arc<Nearness>, threads: usize) -> Self {
        Self {
            nearness,
            threads,
            node: None,
            home: None,
        }
    }

    /// Moves the calling thread, which must be the seat's thread,
    /// if its node has changed since the last call.
    #[inline]
    pub(super) fn follow(&mut self) {
        let node = self.nearness.node();
        if node != self.node {
            self.node = node;
            self.settle(node);
        }
    }

    #[cold]
    fn settle(&mut self, node: Option<u32>) {
        let home = match (&self.home, Cpus::of_this_thread()) {
            (Some(home), _) => home.clone(),
            (None, Ok(home)) => self.home.insert(home).clone(),
            (None, Err(error)) => {
                limited!(DEBUG, %error, "a worker stays where it is");
                return;
            }
        };
        let of_node = node.and_then(|node| Cpus::of_node(self.nearness.sysfs(), node));
        let near = of_node.map(|cpus| cpus.intersection(&home));
        let cpus = near.filter(|near| near.count() >= self.threads);
        if let Err(error) = cpus.unwrap_or(home).keep_this_thread() {
            limited!(DEBUG, %error, "a worker stays where it is");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use tcpx_cuda::{Device, StandIn};

    use super::*;
    use crate::Config;
    use crate::memory::nearness_tests::{GPUS, nics, two_sockets};

    /// Returns the first CPU that this thread may use.
    fn first_cpu() -> usize {
        let status = fs::read_to_string("/proc/thread-self/status").unwrap();
        let list = status
            .lines()
            .find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
        let first = list.unwrap().trim().split([',', '-']).next();
        first.unwrap().parse().unwrap()
    }

    /// Places a thread on the second node, with this list of CPUs, and then uses a GPU of the first
    /// node as well. Returns the number of its CPUs before, in between and after.
    fn counts(cpulist: &str, threads: usize) -> [usize; 3] {
        let tree = two_sockets();
        let node = tree.path().join("devices/system/node/node1");
        fs::create_dir_all(&node).unwrap();
        fs::write(node.join("cpulist"), cpulist).unwrap();
        let interfaces = nics(tree.path());
        let nearness = Arc::new(Nearness::new(&Config::defaults(), &interfaces, tree.path()));
        let count = || Cpus::of_this_thread().unwrap().count();
        let see = |node: u32| {
            let gpu = StandIn::new(1).at(GPUS[node as usize], node);
            nearness.of(&gpu as &dyn Device);
        };
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                let mut seat = Seat::new(Arc::clone(&nearness), threads);
                seat.follow();
                let before = count();
                see(1);
                seat.follow();
                let between = count();
                see(0);
                seat.follow();
                [before, between, count()]
            });
            thread.join().unwrap()
        })
    }

    #[test]
    fn worker_runs_on_the_gpus_node_while_there_is_only_one() {
        let [before, between, after] = counts(&first_cpu().to_string(), 1);
        assert_eq!((between, after), (1, before));
    }

    #[test]
    fn node_with_too_few_cpus_is_not_used() {
        let one = first_cpu().to_string();
        // Too few CPUs, none that may be used, none at all.
        for (cpulist, threads) in [(one.as_str(), 2), ("1023", 1), ("", 1)] {
            let [before, between, after] = counts(cpulist, threads);
            assert_eq!((between, after), (before, before), "{cpulist}");
        }
    }
}
