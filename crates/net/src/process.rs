//! The process: its standard error, its exit, its limit on descriptors, its clock, its threads and
//! their CPU time.

use std::fs;
use std::io;
use std::time::Duration;

use rustix::io::Errno;
use rustix::param::clock_ticks_per_second;
use rustix::process::{Resource, getrlimit};
use serde::{Deserialize, Serialize};

/// Delay before standard error is retried, if it is full and non-blocking.
const FULL_STDERR: Duration = Duration::from_millis(10);

/// Writes all of `bytes` to standard error, however long that takes.
///
/// Takes none of the locks of [`std::io::stderr`], which may stay locked for ever in a forked
/// child.
///
/// # Errors
/// Standard error is closed.
pub fn write_stderr(mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match rustix::io::write(rustix::stdio::stderr(), bytes) {
            Ok(count) => bytes = &bytes[count..],
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => std::thread::sleep(FULL_STDERR),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Calls `last` when the process exits normally, or when the library that contains this crate is
/// unloaded.
pub fn at_exit(last: extern "C" fn()) {
    // SAFETY: `last` is code of this library, and handlers run before the library is unloaded.
    // Refused only if no memory is left: then nothing is called.
    let _ = unsafe { libc::atexit(last) };
}

/// Returns the current limit on descriptors of this process.
#[must_use]
pub fn descriptor_limit() -> usize {
    let limit = getrlimit(Resource::Nofile).current;
    limit.map_or(usize::MAX, |limit| {
        usize::try_from(limit).unwrap_or(usize::MAX)
    })
}

/// The CPU time of one thread of this process, user and system.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ThreadTime {
    /// The kernel's number of the thread.
    pub id: u32,
    /// Its name, of which the kernel keeps 15 bytes.
    pub name: String,
    /// Since it began. The kernel counts in hundredths of a second.
    pub cpu: Duration,
}

/// Reads the CPU time of the threads of this process whose names begin so; none where there is no
/// `/proc`.
#[must_use]
pub fn thread_times(prefix: &str) -> Vec<ThreadTime> {
    let tasks = fs::read_dir("/proc/self/task").into_iter().flatten();
    let read = |task: fs::DirEntry| {
        let text = fs::read_to_string(task.path().join("stat")).ok()?;
        parse_thread(&text, clock_ticks_per_second())
    };
    let all = tasks.flatten().filter_map(read);
    all.filter(|thread| thread.name.starts_with(prefix))
        .collect()
}

/// Parses `/proc/self/task/N/stat`: the name is in parentheses, and may have some itself.
fn parse_thread(text: &str, ticks_per_second: u64) -> Option<ThreadTime> {
    let (id, rest) = text.split_once(" (")?;
    let (name, rest) = rest.rsplit_once(") ")?;
    // The user's time is the field 14 and the system's 15; those behind the name begin with 3.
    let mut fields = rest.split(' ').skip(11);
    let mut next = || fields.next()?.parse::<u64>().ok();
    let ticks = next()? + next()?;
    Some(ThreadTime {
        id: id.parse().ok()?,
        name: name.to_owned(),
        cpu: Duration::from_millis(ticks * 1000 / ticks_per_second.max(1)),
    })
}

/// The time of all CPUs of the machine together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineTime {
    /// Ticks in which they did something.
    pub busy: u64,
    /// All ticks.
    pub total: u64,
}

impl MachineTime {
    /// Reads it; none where there is no `/proc`.
    #[must_use]
    pub fn now() -> Option<Self> {
        Self::parse(&fs::read_to_string("/proc/stat").ok()?)
    }

    /// Parses `/proc/stat`: user, nice, system, idle, waiting for disks, interrupts, stolen; guests
    /// are counted as users already.
    fn parse(text: &str) -> Option<Self> {
        let line = text.lines().next()?.strip_prefix("cpu ")?;
        let ticks = line.split_ascii_whitespace().take(8);
        let ticks: Vec<u64> = ticks.map(|n| n.parse().ok()).collect::<Option<_>>()?;
        let idle = ticks.get(3)? + ticks.get(4)?;
        let total = ticks.iter().sum();
        Some(Self {
            busy: total - idle,
            total,
        })
    }

    /// The share of the time since `before` in which CPUs did something; none where no tick has
    /// passed.
    #[must_use]
    pub fn share_since(&self, before: &Self) -> Option<f64> {
        let total = self.total.saturating_sub(before.total);
        (total > 0).then(|| self.busy.saturating_sub(before.busy) as f64 / total as f64)
    }
}

/// Returns the kernel's number of the calling thread.
#[must_use]
pub fn thread_id() -> u32 {
    rustix::thread::gettid()
        .as_raw_nonzero()
        .get()
        .unsigned_abs()
}

/// Returns the machine's monotonic clock, which all of its processes share.
#[must_use]
pub fn monotonic() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    Duration::new(
        u64::try_from(now.tv_sec).unwrap_or(0),
        u32::try_from(now.tv_nsec).unwrap_or(0),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_parsed_whatever_its_name_is() {
        let text = "17 (a) b (c) R 1 2 3 4 5 6 7 8 9 10 150 50 0 0 20 0 1 0 5\n";
        let thread = parse_thread(text, 100).unwrap();
        assert_eq!((thread.id, thread.name.as_str()), (17, "a) b (c"));
        assert_eq!(thread.cpu, Duration::from_secs(2));
        for bad in ["", "17", "17 (a)", "17 (a) R 1 2 3", "x (a) R 1"] {
            assert_eq!(parse_thread(bad, 100), None, "{bad}");
        }
    }

    #[test]
    fn a_busy_thread_is_found_by_its_name() {
        let busy = || {
            let done = || thread_times("spin-").first().map(|thread| thread.cpu);
            while done().is_none_or(|cpu| cpu.is_zero()) {}
            thread_times("spin-")
        };
        let thread = std::thread::Builder::new().name("spin-here".into());
        let found = thread.spawn(busy).unwrap().join().unwrap();
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].name, "spin-here");
    }

    #[test]
    fn the_machine_is_as_busy_as_its_ticks_say() {
        let parse = |text| MachineTime::parse(text).unwrap();
        let before = parse("cpu  100 10 20 500 30 1 2 3 0 0\ncpu0 1 2 3\n");
        let (busy, total) = (136, 666);
        assert_eq!(before, MachineTime { busy, total });
        let after = parse("cpu  150 10 45 520 35 1 2 3 0 0\n");
        assert_eq!(after.share_since(&before), Some(0.75));
        assert_eq!(before.share_since(&before), None);
        assert_eq!(MachineTime::parse("intr 1"), None);
        assert!(MachineTime::now().is_some());
    }
}
