//! The life of the second process: asleep, stopped, ended.

use std::collections::BTreeSet;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, prlimit};

use super::{RemoteProcess, lock};
use crate::protocol::Command;
use crate::story::wait_until;

impl RemoteProcess {
    /// Puts its application to sleep: from now on it does not even read commands.
    ///
    /// # Panics
    /// When it is asleep already.
    pub fn fall_asleep(&self) {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let file = format!("tcpx-testkit-{}-{number}.wake", std::process::id());
        let file = std::env::temp_dir().join(file);
        // Possibly left by an earlier process with the same id.
        let _ = std::fs::remove_file(&file);
        let before = lock(&self.alarm).replace(file.clone());
        assert!(before.is_none(), "asleep already");
        self.expect(Command::SleepUntil { file })
    }

    /// Ends what [`RemoteProcess::fall_asleep`] began.
    ///
    /// # Panics
    /// When it is awake.
    pub fn wake_up(&self) {
        let file = lock(&self.alarm).take().expect("asleep");
        std::fs::write(&file, []).expect("a file in the temporary directory");
        // Once this is answered it has seen the file.
        self.expect::<()>(Command::Nothing);
        let _ = std::fs::remove_file(file);
    }

    /// Returns how many files and sockets it has open.
    #[must_use]
    pub fn open_files(&self) -> usize {
        let files = format!("/proc/{}/fd", self.pid().as_raw_nonzero());
        std::fs::read_dir(files).map_or(0, Iterator::count)
    }

    /// Returns its sockets and other unnamed descriptors that an executed program would keep.
    #[must_use]
    pub fn kept_on_exec(&self) -> Vec<String> {
        const CLOEXEC: u32 = 0o2_000_000;
        let process = format!("/proc/{}", self.pid().as_raw_nonzero());
        let files = std::fs::read_dir(format!("{process}/fd")).into_iter();
        let kept = files.flatten().flatten().filter_map(|file| {
            let number = file.file_name().into_string().ok()?;
            let what = std::fs::read_link(file.path()).ok()?.display().to_string();
            let info = std::fs::read_to_string(format!("{process}/fdinfo/{number}")).ok()?;
            let flags = info.lines().find_map(|line| line.strip_prefix("flags:"))?;
            let flags = u32::from_str_radix(flags.trim(), 8).ok()?;
            let is_ours = ["socket:", "anon_inode:"]
                .iter()
                .any(|w| what.starts_with(w));
            (is_ours && flags & CLOEXEC == 0).then(|| format!("{number}: {what}"))
        });
        kept.collect()
    }

    /// Returns how much memory it has in use.
    ///
    /// # Panics
    /// When the system does not report it.
    #[must_use]
    pub fn resident_bytes(&self) -> usize {
        let status = format!("/proc/{}/status", self.pid().as_raw_nonzero());
        let status = std::fs::read_to_string(status).expect("the process is there");
        let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:"));
        let kib = line.and_then(|l| l.trim().strip_suffix(" kB")?.trim().parse().ok());
        kib.map(|kib: usize| kib << 10).expect("a number")
    }

    /// Limits its descriptors to those that it has; dropping this restores the limit.
    ///
    /// # Panics
    /// When the limit cannot be changed.
    #[must_use]
    pub fn exhaust_files(&self) -> ExhaustedFiles {
        let files = format!("/proc/{}/fd", self.pid().as_raw_nonzero());
        let open = std::fs::read_dir(files).expect("its files").flatten();
        let open = open.filter_map(|file| file.file_name().to_str()?.parse::<u64>().ok());
        let open: BTreeSet<_> = open.collect();
        // The next file would get the lowest free number.
        let current = (0..).find(|number| !open.contains(number));
        let pid = self.pid();
        let maximum = getrlimit(Resource::Nofile).maximum;
        let limit = Rlimit { current, maximum };
        let before = prlimit(Some(pid), Resource::Nofile, limit).expect("our child's limit");
        ExhaustedFiles { pid, before }
    }

    /// Kills it, as `kill -9` does.
    pub fn kill(&self) {
        self.signal(Signal::KILL);
        self.ended();
    }

    /// Makes it call `abort()`.
    pub fn crash(&self) {
        drop(self.begin::<()>(Command::Crash));
        self.ended();
    }

    /// Makes it exit with everything open.
    pub fn exit(&self) {
        self.expect::<()>(Command::Exit);
        self.ended();
    }

    /// Stops all its threads; returns once they have stopped.
    pub fn freeze(&self) {
        self.signal(Signal::STOP);
        let tasks = format!("/proc/{}/task", self.pid().as_raw_nonzero());
        wait_until("every thread has stopped", || {
            let Ok(tasks) = std::fs::read_dir(&tasks) else {
                return true;
            };
            tasks.flatten().all(|task| {
                let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
                // The name is in parentheses and may contain anything; the state follows.
                stat.rsplit(") ").next().is_none_or(|s| s.starts_with('T'))
            })
        });
    }

    /// Resumes it after [`RemoteProcess::freeze`].
    pub fn thaw(&self) {
        self.signal(Signal::CONT);
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&lock(&self.child))
    }

    fn signal(&self, signal: Signal) {
        // It may have ended.
        let _ = kill_process(self.pid(), signal);
    }

    fn ended(&self) {
        wait_until("the process has ended", || {
            lock(&self.child).try_wait().is_ok_and(|s| s.is_some())
        });
    }
}

/// A process that may open no more files, until this is dropped.
#[derive(Debug)]
pub struct ExhaustedFiles {
    pid: Pid,
    before: Rlimit,
}

impl Drop for ExhaustedFiles {
    fn drop(&mut self) {
        // It may have ended.
        let _ = prlimit(Some(self.pid), Resource::Nofile, self.before);
    }
}

impl Drop for RemoteProcess {
    fn drop(&mut self) {
        let child = self.child.get_mut().unwrap_or_else(PoisonError::into_inner);
        let _ = child.kill();
        let _ = child.wait();
        if let Some(file) = lock(&self.alarm).take() {
            let _ = std::fs::remove_file(file);
        }
    }
}
