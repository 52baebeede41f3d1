//! Measures the usage of this process: CPU, memory, descriptors, and free memory of its GPU.

use std::fs;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use crate::place::Place;

/// A snapshot of one process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// CPU time of all threads, user and system, since the process began.
    pub cpu: Duration,
    /// Resident memory in bytes.
    pub resident_bytes: u64,
    /// Open file descriptors.
    pub descriptors: u64,
    /// Threads.
    #[serde(default)]
    pub threads: u64,
    /// Free memory of the GPU that the process measures with, in bytes: less what other processes
    /// use.
    #[serde(default)]
    pub device_free_bytes: Option<u64>,
}

impl Usage {
    /// Measures this process now; its memory is at `place`.
    pub fn now(place: Place) -> Usage {
        Usage {
            cpu: cpu(),
            resident_bytes: resident_bytes(),
            descriptors: entries("fd"),
            threads: entries("task"),
            device_free_bytes: match place {
                Place::Host => None,
                Place::Vram(ordinal) => tcpx::cuda::free_bytes(ordinal).ok(),
            },
        }
    }
}

/// Returns the CPU time of all threads of this process, user and system. The clock has nanosecond
/// resolution, while `getrusage` divides the same sum into ticks on some kernels.
pub fn cpu() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Returns the second field of `statm`, in bytes. 0 without `/proc`.
fn resident_bytes() -> u64 {
    let statm = fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: u64 = statm
        .split_ascii_whitespace()
        .nth(1)
        .and_then(|n| n.parse().ok())
        .unwrap_or(0);
    pages * rustix::param::page_size() as u64
}

/// Counts the entries of a folder that describes this process.
fn entries(of: &str) -> u64 {
    let entries = fs::read_dir(format!("/proc/self/{of}"));
    let count = entries.map_or(0, |entries| entries.count() as u64);
    // One of the descriptors is the directory being read.
    count.saturating_sub(u64::from(of == "fd"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_process_uses_cpu_memory_and_descriptors() {
        let before = Usage::now(Place::Host);
        let memory = vec![1u8; 8 << 20];
        let sum: u64 = memory.iter().map(|&byte| u64::from(byte)).sum();
        let file = fs::File::open("/proc/self/statm").unwrap();
        let after = Usage::now(Place::Host);
        assert_eq!(sum, 8 << 20);
        assert!(after.cpu > before.cpu);
        assert!(after.resident_bytes > 0 && after.descriptors > 0 && after.threads > 0);
        assert_eq!(after.device_free_bytes, None);
        drop((file, memory));
    }
}
