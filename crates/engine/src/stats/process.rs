//! A process as it describes itself to `tcpx top`: its sessions, and what they run on.

use std::net::IpAddr;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tcpx_net::interfaces::{Interface, discover};
use tcpx_net::process::{MachineTime, ThreadTime, thread_times};

use super::data::{LaneStats, PeerStats, SessionStats};
use super::limits::Sample;

/// Prefixes of the names of threads that move bytes.
const MOVERS: [&str; 2] = ["tcpx-worker", "tcpx-express"];

/// A description of a process at one moment, by the process itself.
///
/// Two readings of one process tell what limits each of its peers ([`ProcessStats::sample`]).
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ProcessStats {
    /// The version of tcpx in the process.
    pub version: String,
    /// The process ID, in the PID namespace of the process.
    pub pid: u32,
    /// The program and the first word of its arguments, without folders.
    pub command: String,
    /// When this was read, on a clock of the process.
    pub at: Duration,
    /// The CPU time of its threads and of the machine.
    pub cpu: CpuTimes,
    /// The network interfaces that the process sees.
    pub interfaces: Vec<Nic>,
    /// The sessions of the process.
    pub sessions: Vec<SessionReading>,
}

/// One session of a process.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct SessionReading {
    /// A number that is unique among the sessions of the process.
    pub id: u64,
    /// The session's statistics.
    pub stats: SessionStats,
}

/// CPU time up to one moment.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct CpuTimes {
    /// Each thread of the engine that moves bytes.
    pub threads: Vec<ThreadTime>,
    /// All CPUs of the machine.
    pub machine: Option<MachineTime>,
}

/// A network interface.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Nic {
    /// The name, such as `eth0`.
    pub name: String,
    /// The speed in Mbit/s, if the interface is hardware and reports one.
    pub speed_mbps: Option<u32>,
    /// The addresses of the interface.
    pub addresses: Vec<IpAddr>,
}

impl From<&Interface> for Nic {
    fn from(found: &Interface) -> Self {
        Self {
            name: found.name.clone(),
            // Ignore the speed of virtual interfaces, which means nothing: each veth reports 10
            // Gbit/s.
            speed_mbps: found.speed_mbps.filter(|_| !found.is_virtual()),
            addresses: found.addresses.iter().map(|address| address.ip).collect(),
        }
    }
}

impl ProcessStats {
    /// Describes this process and the given sessions.
    #[must_use]
    pub fn of_this_process(sessions: Vec<SessionReading>) -> Self {
        let interfaces = discover().unwrap_or_default();
        Self {
            version: env!("CARGO_PKG_VERSION").into(),
            pid: std::process::id(),
            command: command(),
            at: now(),
            cpu: CpuTimes::now(),
            interfaces: interfaces.iter().map(Nic::from).collect(),
            sessions,
        }
    }

    /// Describes this process and one session.
    #[must_use]
    pub fn with_session(stats: SessionStats) -> Self {
        Self::of_this_process(vec![SessionReading { id: 0, stats }])
    }

    /// Returns the session with this number.
    #[must_use]
    pub fn session(&self, id: u64) -> Option<&SessionStats> {
        let found = self.sessions.iter().find(|session| session.id == id);
        found.map(|session| &session.stats)
    }

    /// Compares one peer of a session with an earlier reading; none if the peer is missing in
    /// either.
    #[must_use]
    pub fn sample(&self, before: &Self, session: u64, peer: &str) -> Option<Sample> {
        let (then, now) = (before.session(session)?, self.session(session)?);
        let (old, new) = (then.peer(peer)?, now.peer(peer)?);
        let elapsed = self.at.saturating_sub(before.at);
        let slot_waits = now.slot_waits.saturating_sub(then.slot_waits);
        let mut sample = Sample::between(old, new, elapsed, slot_waits);
        sample.cpu = self.cpu.busiest_since(&before.cpu, elapsed);
        let machine = self.cpu.machine.zip(before.cpu.machine);
        sample.cores = machine.and_then(|(now, then)| now.share_since(&then));
        sample.network = self.network_of(new);
        let is_here = |lane: &LaneStats| self.owner_of(lane.remote.ip()).is_some();
        sample.is_local = new.lanes.iter().any(is_here);
        Some(sample)
    }

    /// Returns the interface that a lane uses; none if the other end is on this host, or if the
    /// interface is gone.
    #[must_use]
    pub fn interface_of(&self, lane: &LaneStats) -> Option<&Nic> {
        if self.owner_of(lane.remote.ip()).is_some() {
            return None;
        }
        self.owner_of(lane.local.ip())
    }

    fn owner_of(&self, ip: IpAddr) -> Option<&Nic> {
        let ip = ip.to_canonical();
        let has = |nic: &&Nic| nic.addresses.contains(&ip);
        self.interfaces.iter().find(has)
    }

    /// Returns what the interfaces of a peer's lanes can move, in bytes per second; none if one of
    /// them reports no speed.
    fn network_of(&self, peer: &PeerStats) -> Option<f64> {
        let mut used: Vec<&Nic> = Vec::new();
        for lane in peer.lanes.iter().filter(|lane| lane.is_up) {
            let nic = self.interface_of(lane)?;
            if !used.contains(&nic) {
                used.push(nic);
            }
        }
        let speeds: Option<Vec<f64>> = used
            .iter()
            .map(|nic| nic.speed_mbps.map(|speed| f64::from(speed) * 125e3))
            .collect();
        speeds
            .map(|speeds| speeds.iter().sum())
            .filter(|sum| *sum > 0.0)
    }
}

impl CpuTimes {
    /// Reads the CPU time that the threads of this process have used.
    #[must_use]
    pub fn now() -> Self {
        let mut threads = thread_times("tcpx-");
        threads.retain(|thread| MOVERS.iter().any(|mover| thread.name.starts_with(mover)));
        Self {
            threads,
            machine: MachineTime::now(),
        }
    }

    /// Returns how busy the busiest thread was since an earlier reading, from 0 to 1.
    fn busiest_since(&self, before: &Self, elapsed: Duration) -> Option<f64> {
        let used = |thread: &ThreadTime| {
            let old = before.threads.iter().find(|old| old.id == thread.id)?;
            Some(thread.cpu.saturating_sub(old.cpu).as_secs_f64())
        };
        let most = self.threads.iter().filter_map(used).reduce(f64::max)?;
        (!elapsed.is_zero()).then(|| (most / elapsed.as_secs_f64()).min(1.0))
    }
}

/// Returns the time since the first call in this process.
fn now() -> Duration {
    static FIRST: OnceLock<Instant> = OnceLock::new();
    FIRST.get_or_init(Instant::now).elapsed()
}

/// Returns the program and its first argument that is no option, without folders:
/// `python3 serve.py`.
fn command() -> String {
    let line = std::fs::read("/proc/self/cmdline").unwrap_or_default();
    let line = String::from_utf8_lossy(&line);
    // A process that starts itself again has this path in its command line.
    let this = "/proc/self/exe";
    match (line.strip_prefix(this), std::fs::read_link(this)) {
        (Some(rest), Ok(program)) => command_of(&format!("{}{rest}", program.display())),
        _ => command_of(&line),
    }
}

fn command_of(line: &str) -> String {
    let mut words = line.split('\0').filter(|word| !word.is_empty());
    let base = |word: &str| word.rsplit('/').next().unwrap_or_default().to_owned();
    let program = words.next().map(base).unwrap_or_default();
    // Python's `-m MODULE` also names the program.
    let first = match words.next() {
        Some("-m") => words.next(),
        first => first.filter(|word| !word.starts_with('-')),
    };
    match first {
        Some(first) => format!("{program} {}", base(first)),
        None => program,
    }
}

#[cfg(test)]
mod tests;
