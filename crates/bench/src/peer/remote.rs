//! The measuring process's handle of the other one.

use std::ffi::OsString;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tcpx::{Config, TransportKind};

use super::control::{Reply, Request, SHARED_SETTINGS, VERSION, parse, send};
use crate::bootstrap::Channel;
use crate::error::Error;
use crate::floor::{Streams, Tuning};
use crate::machine::Machine;
use crate::memory::Contestant;
use crate::place::Place;
use crate::usage::Usage;
use crate::workload::{Mismatch, Shape};

/// Time limit of any one answer. The longest work between two messages is filling or verifying the
/// memory of a workload, or one round of the floor.
const PATIENCE: Duration = Duration::from_secs(120);

/// How long a second process may take to exit after it was told to.
const GRACE: Duration = Duration::from_secs(2);

/// The command line of the second process, which calls [`serve_stdin`](super::serve_stdin).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// The executable.
    pub path: PathBuf,
    /// Its arguments.
    pub arguments: Vec<OsString>,
    /// Further environment variables.
    pub environment: Vec<(OsString, OsString)>,
}

impl Program {
    /// Returns the command line of this program, with other arguments.
    ///
    /// # Errors
    /// The system does not report the executable of this program.
    pub fn same(
        arguments: impl IntoIterator<Item = impl Into<OsString>>,
    ) -> Result<Program, Error> {
        // The running file, even if a new build has replaced it since.
        let running = PathBuf::from("/proc/self/exe");
        let named = std::env::current_exe();
        let path = if running.exists() { Ok(running) } else { named };
        let path = path.map_err(|source| Error::Spawn {
            program: "this program".into(),
            source,
        })?;
        let arguments = arguments.into_iter().map(Into::into).collect();
        Ok(Program {
            path,
            arguments,
            environment: Vec::new(),
        })
    }
}

/// The other process of a measurement.
#[derive(Debug)]
pub struct Remote {
    channel: Channel,
    child: Option<Child>,
    machine: Machine,
    info: Vec<u8>,
}

impl Remote {
    /// Starts a second process on this machine. Its standard input is the control connection. Its
    /// memory will be at `place`.
    pub fn spawn(
        program: &Program,
        place: Place,
        settings: &[(String, String)],
    ) -> Result<Remote, Error> {
        let name = program.path.display().to_string();
        let failed = |source| Error::Spawn {
            program: name.clone(),
            source,
        };
        let (ours, theirs) = UnixStream::pair().map_err(failed)?;
        let child = Command::new(&program.path)
            .args(&program.arguments)
            .envs(program.environment.iter().map(|(key, value)| (key, value)))
            .stdin(OwnedFd::from(theirs))
            .stdout(Stdio::null())
            // A terminal interrupts only this process, which ends the other in order.
            .process_group(0)
            .spawn()
            .map_err(failed)?;
        let channel = Channel::over(ours, "the second process", PATIENCE);
        Remote::greet(channel, Some(child), place, settings)
    }

    /// Returns whether the other process was started by this one.
    #[must_use]
    pub fn is_child(&self) -> bool {
        self.child.is_some()
    }

    /// Connects to a [`Server`](super::Server), `name:port`, whose memory will be at `place`.
    pub fn connect(
        host: &str,
        timeout: Duration,
        place: Place,
        settings: &[(String, String)],
    ) -> Result<Remote, Error> {
        let mut channel = Channel::connect(host, timeout)?;
        channel.set_timeout(PATIENCE);
        Remote::greet(channel, None, place, settings)
    }

    fn greet(
        channel: Channel,
        child: Option<Child>,
        place: Place,
        settings: &[(String, String)],
    ) -> Result<Remote, Error> {
        let mut remote = Remote {
            channel,
            child,
            machine: Machine::default(),
            info: Vec::new(),
        };
        let shared = |(key, _): &&(String, String)| SHARED_SETTINGS.contains(&key.as_str());
        let settings = settings.iter().filter(shared).cloned().collect();
        match remote.ask(&Request::Hello {
            version: VERSION,
            settings,
            place,
        })? {
            Reply::Hello {
                version: VERSION,
                machine,
                info,
            } => {
                (remote.machine, remote.info) = (machine, info);
                Ok(remote)
            }
            other => Err(unexpected(&other)),
        }
    }

    /// Sends a signal to a process that was started here.
    pub(crate) fn signal(&self, signal: Signal) {
        if let Some(child) = &self.child {
            // It may have ended, which some faults cause.
            let _ = kill_process(Pid::from_child(child), signal);
        }
    }

    /// Returns the machine it runs on.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// Returns the connection info of its session.
    pub fn connection_info(&self) -> &[u8] {
        &self.info
    }

    /// Returns whether it runs on this machine, as far as the control connection can tell.
    pub fn is_local(&self) -> bool {
        match (self.channel.local(), self.channel.remote()) {
            (Some(here), Some(there)) => here.ip() == there.ip() || there.ip().is_loopback(),
            _ => true,
        }
    }

    /// Returns its CPU time so far.
    pub(crate) fn cpu(&mut self) -> Result<Duration, Error> {
        match self.ask(&Request::Cpu)? {
            Reply::Cpu(time) => Ok(time),
            other => Err(unexpected(&other)),
        }
    }

    /// Returns its usage so far.
    pub fn usage(&mut self) -> Result<Usage, Error> {
        match self.ask(&Request::Usage)? {
            Reply::Usage(usage) => Ok(usage),
            other => Err(unexpected(&other)),
        }
    }

    /// Makes it allocate and register memory; returns the descriptor.
    pub(crate) fn prepare(&mut self, shape: Shape) -> Result<tcpx::RemoteRegion, Error> {
        match self.ask(&Request::Prepare { shape })? {
            Reply::Region { descriptor } => Ok(tcpx::RemoteRegion::from_bytes(&descriptor)?),
            other => Err(unexpected(&other)),
        }
    }

    pub(crate) fn fill(&mut self, seed: u64) -> Result<(), Error> {
        self.ask_done(&Request::Fill { seed })
    }

    /// Checks that its memory has the pattern of this side.
    pub(crate) fn verify(
        &mut self,
        seed: u64,
        contestant: Contestant,
    ) -> Result<Result<(), Mismatch>, Error> {
        match self.ask(&Request::Verify { seed, contestant })? {
            Reply::Done => Ok(Ok(())),
            Reply::Corrupt(mismatch) => Ok(Err(mismatch)),
            other => Err(unexpected(&other)),
        }
    }

    /// Opens the streams of a floor, as many as a session of this configuration has lanes.
    pub(crate) fn floor_streams(
        &mut self,
        count: usize,
        config: &Config,
    ) -> Result<Streams, Error> {
        let Reply::Listening { port, nonce } = self.ask(&Request::FloorListen)? else {
            return Err(Error::Protocol {
                what: "no port for the floor".into(),
            });
        };
        // The address by which the server was reached, which works through a firewall or a port
        // mapping.
        let address = match (port, self.channel.remote()) {
            (None, Some(remote)) => remote,
            (port, _) => SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port.unwrap_or(0)),
        };
        let timeout = Duration::from_secs(10);
        let mut streams = Streams::connect(address, nonce, count, timeout).map_err(Error::Floor)?;
        let congestion_control = config.congestion_control(self.is_local()).map(String::from);
        if let Some(name) = &congestion_control {
            streams.set_congestion_control(name);
        }
        self.ask_done(&Request::FloorAccept {
            streams: count,
            congestion_control,
        })?;
        if config.transport() == TransportKind::Plugin {
            send(&mut self.channel, &Request::FloorPlug)?;
            streams.plug(config).map_err(Error::Floor)?;
            match self.answer()? {
                Reply::Done => {}
                other => return Err(unexpected(&other)),
            }
        }
        Ok(streams)
    }

    /// Makes it serve a round of the floor while `round` runs here.
    pub(crate) fn floor_run<T>(
        &mut self,
        iterations: u32,
        tuning: Tuning,
        round: impl FnOnce() -> io::Result<T>,
    ) -> Result<T, Error> {
        send(&mut self.channel, &Request::FloorRun { iterations, tuning })?;
        // After an error its half cannot end by itself, and its answer is not awaited: the two
        // processes no longer agree on anything.
        let result = round().map_err(Error::Floor)?;
        match self.answer()? {
            Reply::Done => Ok(result),
            other => Err(unexpected(&other)),
        }
    }

    /// Makes it start idle sessions; returns their connection infos.
    pub(crate) fn sessions(&mut self, count: usize) -> Result<Vec<Vec<u8>>, Error> {
        match self.ask(&Request::Sessions { count })? {
            Reply::Sessions { infos } => Ok(infos),
            other => Err(unexpected(&other)),
        }
    }

    fn ask_done(&mut self, request: &Request) -> Result<(), Error> {
        match self.ask(request)? {
            Reply::Done => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    fn ask(&mut self, request: &Request) -> Result<Reply, Error> {
        send(&mut self.channel, request)?;
        self.answer()
    }

    fn answer(&mut self) -> Result<Reply, Error> {
        match parse(&self.channel.receive()?)? {
            Reply::Failed { message } => Err(Error::Peer { message }),
            reply => Ok(reply),
        }
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        // Best effort: closing the connection has the same effect.
        let _ = send(&mut self.channel, &Request::Quit);
        let Some(mut child) = self.child.take() else {
            return;
        };
        let deadline = Instant::now() + GRACE;
        while Instant::now() < deadline {
            if let Ok(Some(_)) | Err(_) = child.try_wait() {
                return;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        let _ = child.kill();
        let _ = child.wait();
    }
}

fn unexpected(reply: &Reply) -> Error {
    let mut what = format!("an unexpected answer: {reply:?}");
    what.truncate(what.floor_char_boundary(200));
    Error::Protocol { what }
}
