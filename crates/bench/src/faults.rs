//! A soak with faults: verified transfers continue while processes die, stop, are flooded, lose
//! their connections and fork.
//!
//! The measuring process survives and is watched. It has two partners: the *steady* one, whose
//! transfers must all succeed whatever happens to the other, and the *victim*, to which the faults
//! happen. A round is one fault:
//!
//! ```text
//!   transfers with the victim are in flight ─► fault ─► verified transfer with the steady partner
//!     ─► outcome of the victim's transfers ─► verified transfer with the victim or its successor
//! ```

use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde::{Deserialize, Serialize};
use tcpx::{Error as EngineError, ErrorKind, Peer, RemoteRegion, Session, Transfer};

use crate::error::Error;
use crate::floor::Waiting;
use crate::measure::{Bench, CONNECT_TIMEOUT, complete, prepare, shared_settings};
use crate::memory::{Contestant, Memory};
use crate::peer::{Program, Remote};
use crate::place::Place;
use crate::soak::{Growth, Noise, SoakOptions, SoakResult, SoakSample};
use crate::usage::Usage;
use crate::workload::{Layout, Op, Shape};

/// Tolerated growth: peers that come and go fragment the allocator, and a flood that is just ending
/// holds descriptors.
const NOISE: Noise = Noise {
    bytes: (16 << 20) as f64,
    handles: 2.0,
};

/// The transfers: total and block size.
const MIX: [(Op, u64, u64); 6] = [
    (Op::Write, 4 << 10, 0),
    (Op::Read, 4 << 20, 16 << 10),
    (Op::Write, 16 << 20, 0),
    (Op::Read, 1 << 20, 0),
    (Op::Write, 1_000_003, 1021),
    (Op::Read, 16 << 20, 64 << 10),
];

/// Number of transfers with the victim in flight when a fault happens.
const TOGETHER: usize = 8;

/// How long a partner is stopped, and a forked child lives.
const PAUSE: Duration = Duration::from_millis(200);

/// Connections per wave of a flood, and number of waves: few enough for 1,024 descriptors.
const WAVE: usize = 100;
const WAVES: usize = 5;

/// An injected fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Fault {
    /// The victim is killed; another process takes its place.
    Kill,
    /// The victim is stopped for a moment.
    Stop,
    /// Unknown clients connect to both processes, send nonsense or nothing, and leave.
    Flood,
    /// The system closes the connections between the two, as `ss -K` does.
    Cut,
    /// This process forks; the child keeps its inherited descriptors for a moment.
    Fork,
}

impl Fault {
    /// All of them.
    pub const ALL: [Fault; 5] = [
        Fault::Kill,
        Fault::Stop,
        Fault::Flood,
        Fault::Cut,
        Fault::Fork,
    ];

    /// Returns whether transfers with the victim may fail.
    fn may_fail(self) -> bool {
        matches!(self, Fault::Kill | Fault::Cut)
    }
}

/// How often a fault was injected.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FaultCount {
    /// The fault.
    pub fault: Fault,
    /// Number of injections.
    pub count: u64,
    /// The reason it was left out, if it was.
    pub skipped: Option<String>,
}

/// The faults of a soak.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FaultsResult {
    /// Each fault.
    pub counts: Vec<FaultCount>,
    /// Transfers that failed, as they may when their peer dies or their connection is cut.
    pub failed: u64,
    /// Whether the soak was ended early.
    pub interrupted: bool,
}

impl Bench {
    /// Moves verified transfers beside random faults, until the time is over or `interrupted` is
    /// set. `program` is the command line of the second process.
    ///
    /// # Errors
    /// A byte is wrong, a transfer failed that no fault may affect, or a partner could not be
    /// reached after a fault.
    pub fn run_faults(
        &mut self,
        program: &Program,
        options: &SoakOptions,
        interrupted: &AtomicBool,
        sampled: &mut dyn FnMut(&SoakSample),
    ) -> Result<SoakResult, Error> {
        let (session, place) = (self.session().clone(), self.place());
        let mut soak = Faults {
            program: program.clone(),
            place,
            victim: Partner::spawn(program, &session)?,
            session,
            steady_memory: None,
            random: u64::from(std::process::id()) | 1,
            seed: 1,
            transfers: 0,
            verified: 0,
            bytes: 0,
            failed: 0,
            counts: Fault::ALL.map(|fault| FaultCount {
                fault,
                count: 0,
                skipped: None,
            }),
        };
        let start = Instant::now();
        let mut samples: Vec<SoakSample> = Vec::new();
        let mut last = (start, 0);
        while start.elapsed() < options.duration && !interrupted.load(Ordering::Relaxed) {
            soak.round(self)?;
            let sample = SoakSample {
                at_s: start.elapsed().as_secs_f64(),
                gb_per_s: crate::units::gigabytes_per_second(soak.bytes - last.1, last.0.elapsed()),
                transfers: soak.transfers,
                initiator: Usage::now(place),
                target: self.remote().usage()?,
            };
            // A round is short, and the first of an interval represents it.
            if samples.is_empty() || last.0.elapsed() >= options.sample_every {
                last = (Instant::now(), soak.bytes);
                sampled(&sample);
            }
            samples.push(sample);
        }
        Ok(SoakResult {
            transfers: soak.transfers,
            verified: soak.verified,
            bytes: soak.bytes,
            growth: Growth::of(&samples, NOISE),
            faults: Some(FaultsResult {
                counts: soak.counts.to_vec(),
                failed: soak.failed,
                interrupted: interrupted.load(Ordering::Relaxed),
            }),
            samples,
        })
    }
}

/// Another process and its session.
struct Partner {
    remote: Remote,
    peer: Peer,
    memory: Option<Memory>,
}

impl Partner {
    fn spawn(program: &Program, session: &Session) -> Result<Self, Error> {
        let settings = shared_settings(session.config(), true);
        let remote = Remote::spawn(program, Place::Host, &settings)?;
        let peer = session.add_peer(remote.connection_info())?;
        peer.connect(CONNECT_TIMEOUT)?;
        Ok(Self {
            remote,
            peer,
            memory: None,
        })
    }
}

struct Faults {
    session: Session,
    program: Program,
    place: Place,
    victim: Partner,
    /// Kept from round to round, so that growth is the engine's.
    steady_memory: Option<Memory>,
    random: u64,
    seed: u64,
    transfers: u64,
    verified: u64,
    bytes: u64,
    failed: u64,
    counts: [FaultCount; 5],
}

impl Faults {
    fn round(&mut self, bench: &mut Bench) -> Result<(), Error> {
        let at = self.below(Fault::ALL.len());
        let fault = Fault::ALL[at];
        let busy_shape = self.shape()?;
        let (memory, region) = self.victim_memory(&busy_shape)?;
        let session = self.session.clone();
        let transfers = (0..TOGETHER)
            .map(|_| prepare(&session, &self.victim.peer, &busy_shape, &memory, &region))
            .collect::<Result<Vec<Transfer>, Error>>()?;
        for transfer in &transfers {
            transfer.post()?;
        }
        match self.make(fault, bench)? {
            None => self.counts[at].count += 1,
            Some(reason) => self.counts[at].skipped = Some(reason),
        }
        for transfer in &transfers {
            self.ended(fault, busy_shape.total_bytes(), transfer)?;
        }
        drop(transfers);
        self.victim.memory = Some(memory);
        if fault == Fault::Kill {
            self.replace_victim()?;
        }
        self.verify_victim()
    }

    /// Injects a fault beside a verified transfer with the steady partner; returns the reason if it
    /// cannot.
    fn make(&mut self, fault: Fault, bench: &mut Bench) -> Result<Option<String>, Error> {
        let mut skipped = None;
        match fault {
            Fault::Kill => {
                self.victim.remote.signal(Signal::KILL);
                self.verify_steady(bench)?;
            }
            Fault::Stop => {
                self.victim.remote.signal(Signal::STOP);
                // Also after a failure: a stopped process would stay stopped.
                let verified = self.verify_steady(bench);
                std::thread::sleep(PAUSE);
                self.victim.remote.signal(Signal::CONT);
                verified?;
            }
            Fault::Flood => {
                let mut targets = self.session.addresses();
                targets.extend(self.victim.peer.lanes().iter().map(|lane| lane.remote));
                let flood = std::thread::spawn(move || flood(&targets));
                let verified = self.verify_steady(bench);
                // It has no result: unknown clients may be refused in any way.
                let _ = flood.join();
                verified?;
            }
            Fault::Cut => {
                skipped = cut(&self.victim.peer);
                self.verify_steady(bench)?;
            }
            Fault::Fork => {
                let child = fork::child(PAUSE);
                self.verify_steady(bench)?;
                skipped = child.and_then(fork::Child::wait).err();
            }
        }
        Ok(skipped)
    }

    fn ended(&mut self, fault: Fault, bytes: u64, transfer: &Transfer) -> Result<(), Error> {
        match complete(transfer, Waiting::Block) {
            Ok(()) => self.count(bytes),
            Err(Error::Engine(error)) if fault.may_fail() && is_loss(&error) => self.failed += 1,
            Err(error) => return Err(error),
        }
        Ok(())
    }

    fn replace_victim(&mut self) -> Result<(), Error> {
        let name = self.victim.peer.name().to_owned();
        self.session.remove_peer(&name)?;
        let memory = self.victim.memory.take();
        self.victim = Partner::spawn(&self.program, &self.session)?;
        self.victim.memory = memory;
        Ok(())
    }

    fn victim_memory(&mut self, shape: &Shape) -> Result<(Memory, RemoteRegion), Error> {
        let region = self.victim.remote.prepare(*shape)?;
        let before = self.victim.memory.take();
        let memory = Memory::for_shape(&self.session, self.place, shape, before)?;
        Ok((memory, region))
    }

    fn verify_victim(&mut self) -> Result<(), Error> {
        let shape = self.shape()?;
        let (mut memory, region) = self.victim_memory(&shape)?;
        let (session, seed) = (self.session.clone(), self.next_seed());
        let Partner { remote, peer, .. } = &mut self.victim;
        verify(&session, peer, remote, &shape, &mut memory, &region, seed)?;
        self.victim.memory = Some(memory);
        self.verified(&shape);
        Ok(())
    }

    fn verify_steady(&mut self, bench: &mut Bench) -> Result<(), Error> {
        let (shape, seed) = (self.shape()?, self.next_seed());
        let region = bench.remote().prepare(shape)?;
        let before = self.steady_memory.take();
        let mut memory = Memory::for_shape(&self.session, self.place, &shape, before)?;
        let (session, peer) = (self.session.clone(), bench.peer().clone());
        let remote = bench.remote();
        verify(&session, &peer, remote, &shape, &mut memory, &region, seed)?;
        self.steady_memory = Some(memory);
        self.verified(&shape);
        Ok(())
    }

    fn verified(&mut self, shape: &Shape) {
        self.verified += 1;
        self.count(shape.total_bytes());
    }

    fn count(&mut self, bytes: u64) {
        self.transfers += 1;
        self.bytes += bytes;
    }

    fn shape(&mut self) -> Result<Shape, Error> {
        let (op, total, block) = MIX[self.below(MIX.len())];
        Ok(Shape::new(op, total, block, Layout::Scattered)?)
    }

    fn next_seed(&mut self) -> u64 {
        self.seed += 2;
        self.seed
    }

    fn below(&mut self, end: usize) -> usize {
        // Marsaglia's xorshift.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 16) as usize % end
    }
}

/// Returns whether an error reports a lost peer.
fn is_loss(error: &EngineError) -> bool {
    error.kind() == ErrorKind::Disconnected
}

/// Performs one transfer and compares every byte.
fn verify(
    session: &Session,
    peer: &Peer,
    remote: &mut Remote,
    shape: &Shape,
    memory: &mut Memory,
    region: &RemoteRegion,
    seed: u64,
) -> Result<(), Error> {
    let (source, poison) = (seed, seed + 1);
    let (own, theirs) = match shape.op() {
        Op::Write => (source, poison),
        Op::Read => (poison, source),
    };
    memory.fill(shape, own)?;
    remote.fill(theirs)?;
    let transfer = prepare(session, peer, shape, memory, region)?;
    transfer.post()?;
    complete(&transfer, Waiting::Block)?;
    let result = match shape.op() {
        Op::Write => remote.verify(source, Contestant::Engine)?,
        Op::Read => memory.verify(shape, source, Contestant::Engine)?,
    };
    result.map_err(|mismatch| Error::Corrupt {
        what: format!("the engine ({shape}, beside a fault)"),
        mismatch,
    })
}

/// Connects in waves to every listener; every second connection sends something.
fn flood(targets: &[SocketAddr]) {
    for _ in 0..WAVES {
        let mut streams = Vec::new();
        for (index, target) in targets.iter().cycle().take(WAVE).enumerate() {
            let Ok(mut stream) = TcpStream::connect_timeout(target, PAUSE) else {
                continue;
            };
            if index % 2 == 0 {
                // An unknown client may be disconnected at any moment.
                let _ = stream.write_all(&[0xa5; 64]);
            }
            streams.push(stream);
        }
    }
}

/// Closes the connection to a peer from outside; returns the reason if that is not possible.
fn cut(peer: &Peer) -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("`ss -K` needs root".into());
    }
    let mut closed = false;
    for lane in peer.lanes() {
        let ports = [lane.local.port(), lane.remote.port()].map(|port| port.to_string());
        let filter = ["sport", "=", &ports[0], "and", "dport", "=", &ports[1]];
        let output = Command::new("ss")
            .args(["-H", "-K", "-t"])
            .args(filter)
            .output();
        match output {
            Ok(output) => closed |= !output.stdout.is_empty(),
            Err(error) => return Some(format!("`ss` cannot be run: {error}")),
        }
    }
    (!closed).then(|| "`ss -K` closed nothing: the kernel lacks CONFIG_INET_DIAG_DESTROY".into())
}

mod fork {
    //! Forks a process that has threads.

    use std::io;
    use std::time::Duration;

    /// A child that has not been waited for.
    pub(super) struct Child(libc::pid_t);

    /// Forks; the child sleeps with everything inherited, and exits.
    pub(super) fn child(lives: Duration) -> Result<Child, String> {
        let time = libc::timespec {
            tv_sec: lives.as_secs() as libc::time_t,
            tv_nsec: lives.subsec_nanos().into(),
        };
        // SAFETY: the child makes two async-signal-safe calls and never returns.
        unsafe {
            match libc::fork() {
                -1 => Err(format!("cannot fork: {}", io::Error::last_os_error())),
                0 => {
                    libc::nanosleep(&raw const time, std::ptr::null_mut());
                    libc::_exit(0)
                }
                child => Ok(Child(child)),
            }
        }
    }

    impl Child {
        /// Waits for its end.
        pub(super) fn wait(self) -> Result<(), String> {
            let mut status = 0;
            // SAFETY: the status is a local, and the process a child of this one.
            let waited = unsafe { libc::waitpid(self.0, &raw mut status, 0) };
            match (waited, status) {
                (child, 0) if child == self.0 => Ok(()),
                _ => Err(format!("a forked child ended with {status}")),
            }
        }
    }
}
