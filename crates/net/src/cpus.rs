//! Sets of CPUs: those of a thread and those of a NUMA node.

use std::fs;
use std::io;
use std::path::Path;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// A set of CPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cpus(CpuSet);

impl Cpus {
    /// Returns the CPUs that the calling thread may run on.
    ///
    /// # Errors
    /// Fails if the machine has more CPUs than the system call can report.
    pub fn of_this_thread() -> io::Result<Self> {
        Ok(Self(sched_getaffinity(None)?))
    }

    /// Returns the CPUs of a NUMA node; an empty set if sysfs does not list them.
    #[must_use]
    pub fn of_node(sysfs: &Path, node: u32) -> Option<Self> {
        let path = sysfs.join(format!("devices/system/node/node{node}/cpulist"));
        Self::parse(fs::read_to_string(path).ok()?.trim())
    }

    /// Parses a list as the kernel writes it: `0-15,32-47`.
    fn parse(list: &str) -> Option<Self> {
        let mut set = CpuSet::new();
        for range in list.split(',').filter(|range| !range.is_empty()) {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
            if last >= CpuSet::MAX_CPU {
                return None;
            }
            (first..=last).for_each(|cpu| set.set(cpu));
        }
        Some(Self(set))
    }

    /// Returns the CPUs that are in both sets.
    #[must_use]
    pub fn intersection(&self, other: &Self) -> Self {
        let mut both = CpuSet::new();
        let cpus = (0..CpuSet::MAX_CPU).filter(|&cpu| self.0.is_set(cpu) && other.0.is_set(cpu));
        cpus.for_each(|cpu| both.set(cpu));
        Self(both)
    }

    /// Returns the number of CPUs in the set.
    #[must_use]
    pub fn count(&self) -> usize {
        self.0.count() as usize
    }

    /// Keeps the calling thread on these CPUs.
    ///
    /// # Errors
    /// Fails if this process may use none of these CPUs.
    pub fn keep_this_thread(&self) -> io::Result<()> {
        Ok(sched_setaffinity(None, &self.0)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cpus(list: &str) -> Option<Vec<usize>> {
        let Cpus(set) = Cpus::parse(list)?;
        Some((0..CpuSet::MAX_CPU).filter(|&c| set.is_set(c)).collect())
    }

    #[test]
    fn lists_are_parsed_as_the_kernel_writes_them() {
        assert_eq!(cpus("0-2,5,8-9"), Some(vec![0, 1, 2, 5, 8, 9]));
        // A node that has memory and no CPUs.
        assert_eq!(cpus(""), Some(vec![]));
        for bad in ["a", "0-", "1-x", "0-99999", "5000"] {
            assert_eq!(cpus(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_thread_stays_on_the_cpus_of_a_node() {
        std::thread::spawn(|| {
            let all = Cpus::of_this_thread().unwrap();
            let first = (0..CpuSet::MAX_CPU).find(|&cpu| all.0.is_set(cpu)).unwrap();
            let tree = tempfile::tempdir().unwrap();
            let node = tree.path().join("devices/system/node/node1");
            fs::create_dir_all(&node).unwrap();
            fs::write(node.join("cpulist"), format!("{first}\n")).unwrap();
            let near = Cpus::of_node(tree.path(), 1).unwrap();
            assert_eq!(near.intersection(&all).count(), 1);
            near.keep_this_thread().unwrap();
            assert_eq!(Cpus::of_this_thread().unwrap(), near);
            all.keep_this_thread().unwrap();
            assert_eq!(Cpus::of_this_thread().unwrap(), all);
            assert_eq!(Cpus::of_node(tree.path(), 0), None);
        })
        .join()
        .unwrap();
    }
}
