//! The process that is measured against: it serves requests and sleeps in between.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

use rustix::process::Signal;
use tcpx::{Config, Session};

use super::control::{Reply, Request, SHARED_SETTINGS, VERSION, parse, send};
use crate::bootstrap::{BootstrapError, Channel};
use crate::error::Error;
use crate::floor::{Blocks, Door, Listener, MAX_STREAMS, Nonce, Streams, Tuning};
use crate::machine::Machine;
use crate::measure::unmapped;
use crate::memory::{Memory, check_room};
use crate::place::{Opened, Place};
use crate::usage::{self, Usage};
use crate::workload::{Shape, Side};

/// Time limit for a client to send the rest of a message, or to read an answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// Maximum idle sessions that a client may request.
const MAX_SESSIONS: usize = 256;

/// Serves the process at the other end of standard input; the main function of a spawned second
/// process.
///
/// Never outlives that process: when the connection closes this process exits at once, whatever it
/// is doing.
///
/// # Errors
/// Standard input is no socket: the program was not started by [`Remote`](super::Remote).
pub fn serve_stdin(config: Config) -> Result<(), Error> {
    let stdin = io::stdin().as_fd().try_clone_to_owned();
    let stream = UnixStream::from(stdin.map_err(not_spawned)?);
    stream.peer_addr().map_err(not_spawned)?;
    // A stopped process does not notice that the connection closes.
    let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
    // Started as `/proc/self/exe`: without this, `ps` would show the process as `exe`.
    let _ = std::fs::write("/proc/self/comm", "tcpx-bench");
    let channel = Channel::over(stream, "the measuring process", PATIENCE);
    serve(channel, None, unmapped(config)?, || std::process::exit(0))
}

fn not_spawned(source: io::Error) -> Error {
    let address = "standard input (which should be a socket of the measuring process)".into();
    Error::Bootstrap(BootstrapError::Io { address, source })
}

/// An event that a [`Server`] reports to its operator.
#[derive(Debug)]
#[non_exhaustive]
pub enum ServerEvent<'e> {
    /// A client is being served.
    Connected(SocketAddr),
    /// The client is done.
    Finished(SocketAddr),
    /// The client was refused or failed; the server continues.
    Failed(Option<SocketAddr>, &'e Error),
}

/// A server that other machines measure against, one client after the other.
#[derive(Debug)]
pub struct Server {
    door: Arc<Door>,
    config: Config,
}

impl Server {
    /// Listens on `address`; sessions start from `config`, which the client may adjust within
    /// [`SHARED_SETTINGS`].
    pub fn bind(address: SocketAddr, config: Config) -> io::Result<Server> {
        Ok(Server {
            door: Arc::new(Door::bind(address)?),
            config,
        })
    }

    /// Returns its address.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.door.address()
    }

    /// Serves clients until `event` returns false.
    pub fn run(&self, mut event: impl FnMut(ServerEvent<'_>) -> bool) {
        loop {
            // An hour is as good as no limit: no client is no failure.
            let channel = match Channel::enter(&self.door, Duration::from_secs(3600)) {
                Ok(channel) => channel,
                Err(BootstrapError::NobodyCame { .. }) => continue,
                Err(error) => {
                    if !event(ServerEvent::Failed(None, &error.into())) {
                        return;
                    }
                    // For example too many open files: let the machine recover.
                    std::thread::sleep(Duration::from_millis(100));
                    continue;
                }
            };
            let address = channel.remote().expect("a TCP channel");
            if !event(ServerEvent::Connected(address))
                || !event(self.serve(channel, address).event())
            {
                return;
            }
        }
    }

    fn serve(&self, mut channel: Channel, address: SocketAddr) -> Outcome {
        channel.set_timeout(PATIENCE);
        Outcome {
            address,
            result: serve(channel, Some(&self.door), self.config.clone(), || ()),
        }
    }
}

struct Outcome {
    address: SocketAddr,
    result: Result<(), Error>,
}

impl Outcome {
    fn event(&self) -> ServerEvent<'_> {
        match &self.result {
            Ok(()) => ServerEvent::Finished(self.address),
            Err(error) => ServerEvent::Failed(Some(self.address), error),
        }
    }
}

/// Serves the requests of a channel until it asks to quit or closes.
///
/// A thread of its own reads them, so that the end of the connection is noticed (`closed`) also
/// while a request is being processed.
fn serve(
    mut channel: Channel,
    door: Option<&Arc<Door>>,
    config: Config,
    closed: impl FnOnce() + Send + 'static,
) -> Result<(), Error> {
    let reader = channel.try_clone().map_err(|source| {
        Error::Bootstrap(BootstrapError::Io {
            address: "the client".into(),
            source,
        })
    })?;
    let requests = read_requests(reader, closed);
    let result = obey_all(&requests, &mut channel, config, door);
    channel.close();
    result
}

fn obey_all(
    requests: &Receiver<Result<Request, Error>>,
    channel: &mut Channel,
    config: Config,
    door: Option<&Arc<Door>>,
) -> Result<(), Error> {
    let mut target = None;
    while let Ok(request) = requests.recv() {
        let reply = match (request?, &mut target) {
            (Request::Quit, _) => break,
            (
                Request::Hello {
                    version,
                    settings,
                    place,
                },
                None,
            ) => Target::new(version, &settings, place, config.clone(), door.cloned()).map(|new| {
                let info = new.session.connection_info();
                target = Some(new);
                Reply::Hello {
                    version: VERSION,
                    machine: Machine::here(),
                    info,
                }
            }),
            (request, Some(target)) => target.obey(request),
            (_, None) => Err(Error::Protocol {
                what: "a request before the greeting".into(),
            }),
        };
        let reply = reply.unwrap_or_else(|error| Reply::Failed {
            message: error.to_string(),
        });
        send(channel, &reply)?;
    }
    Ok(())
}

fn read_requests(
    mut channel: Channel,
    closed: impl FnOnce() + Send + 'static,
) -> Receiver<Result<Request, Error>> {
    // One request is outstanding at a time; a client that sends more waits.
    let (sender, receiver) = mpsc::sync_channel(1);
    std::thread::spawn(move || {
        // A client sends its first request at once; later requests may be a long measurement apart.
        let mut message = channel.receive();
        loop {
            let request = match message {
                Ok(bytes) => parse(&bytes),
                Err(BootstrapError::Closed { .. }) => break,
                Err(error) => Err(error.into()),
            };
            let failed = request.is_err();
            if sender.send(request).is_err() || failed {
                break;
            }
            message = channel.receive_patiently();
        }
        drop(sender);
        closed();
    });
    receiver
}

/// The prepared workload.
struct Work {
    shape: Shape,
    blocks: Blocks,
    memory: Memory,
}

/// One client's session and memory.
struct Target {
    session: Session,
    config: Config,
    place: Place,
    /// Held between workloads, so that no workload pays for a new context.
    _device: Opened,
    /// The client's door; `None` if it is connected by other means than the network.
    door: Option<Arc<Door>>,
    work: Option<Work>,
    listener: Option<Listener>,
    streams: Option<Streams>,
    idle: Vec<Session>,
}

impl Target {
    fn new(
        version: u32,
        settings: &[(String, String)],
        place: Place,
        mut config: Config,
        door: Option<Arc<Door>>,
    ) -> Result<Target, Error> {
        if version != VERSION {
            let what = format!("version {version} of the benchmark, this one is {VERSION}");
            return Err(Error::Protocol { what });
        }
        for (key, value) in settings {
            if !SHARED_SETTINGS.contains(&key.as_str()) {
                let what = format!("the setting `{key}`, which is not for a client to choose");
                return Err(Error::Protocol { what });
            }
            config.set(key, value)?;
        }
        let device = place.open()?;
        let config = config.with_name(format!("bench-target-{}", std::process::id()))?;
        let session = Session::new(config.clone())?;
        Ok(Target {
            session,
            config,
            place,
            _device: device,
            door,
            work: None,
            listener: None,
            streams: None,
            idle: Vec::new(),
        })
    }

    fn obey(&mut self, request: Request) -> Result<Reply, Error> {
        match request {
            Request::Hello { .. } | Request::Quit => {
                return Err(Error::Protocol {
                    what: "a second greeting".into(),
                });
            }
            Request::Prepare { shape } => return self.prepare(shape),
            Request::Fill { seed } => {
                let work = self.work()?;
                work.memory.fill(&work.shape, seed)?;
            }
            Request::Verify { seed, contestant } => {
                let work = self.work()?;
                if let Err(mismatch) = work.memory.verify(&work.shape, seed, contestant)? {
                    return Ok(Reply::Corrupt(mismatch));
                }
            }
            Request::FloorListen => return self.floor_listen().map_err(Error::Floor),
            Request::FloorAccept {
                streams,
                congestion_control,
            } => {
                self.floor_accept(streams, congestion_control.as_deref())?;
            }
            Request::FloorPlug => self.floor_plug()?,
            Request::FloorRun { iterations, tuning } => self.floor_run(iterations, tuning)?,
            Request::Cpu => return Ok(Reply::Cpu(usage::cpu())),
            Request::Usage => return Ok(Reply::Usage(Usage::now(self.place))),
            Request::Sessions { count } => return self.sessions(count),
        }
        Ok(Reply::Done)
    }

    fn work(&mut self) -> Result<&mut Work, Error> {
        let missing = || Error::Protocol {
            what: "no memory has been prepared".into(),
        };
        self.work.as_mut().ok_or_else(missing)
    }

    fn prepare(&mut self, shape: Shape) -> Result<Reply, Error> {
        let before = self.work.take().map(|work| work.memory);
        check_room(self.place, &shape)?;
        let memory = Memory::for_shape(&self.session, self.place, &shape, before)?;
        let descriptor = memory.region().descriptor().to_bytes();
        let blocks = Blocks::new(shape.spans(Side::Target));
        self.work = Some(Work {
            shape,
            blocks,
            memory,
        });
        Ok(Reply::Region { descriptor })
    }

    fn floor_listen(&mut self) -> io::Result<Reply> {
        self.streams = None;
        let nonce = nonce()?;
        let (door, port) = match &self.door {
            Some(door) => (Arc::clone(door), None),
            None => {
                let door = Door::bind(SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 0))?;
                let port = door.address()?.port();
                (Arc::new(door), Some(port))
            }
        };
        self.listener = Some(Listener::at(door, nonce));
        Ok(Reply::Listening { port, nonce })
    }

    fn floor_accept(
        &mut self,
        count: usize,
        congestion_control: Option<&str>,
    ) -> Result<(), Error> {
        if count == 0 || count > MAX_STREAMS {
            let reason = format!("a floor has 1 to {MAX_STREAMS}");
            return Err(Error::Option {
                option: "streams",
                value: count.to_string(),
                reason,
            });
        }
        let missing = || Error::Protocol {
            what: "no listener for the floor".into(),
        };
        let listener = self.listener.take().ok_or_else(missing)?;
        let streams = listener.accept(count, PATIENCE).map_err(Error::Floor)?;
        if let Some(name) = congestion_control {
            streams.set_congestion_control(name);
        }
        self.streams = Some(streams);
        Ok(())
    }

    fn floor_plug(&mut self) -> Result<(), Error> {
        let missing = || Error::Protocol {
            what: "comms for a floor without streams".into(),
        };
        let streams = self.streams.as_mut().ok_or_else(missing)?;
        streams.plug(self.session.config()).map_err(Error::Floor)
    }

    fn floor_run(&mut self, iterations: u32, tuning: Tuning) -> Result<(), Error> {
        let (Some(work), Some(streams)) = (&mut self.work, &self.streams) else {
            return Err(Error::Protocol {
                what: "a floor without memory or streams".into(),
            });
        };
        if tuning.call_bytes == 0 {
            let reason = "a call moves at least one byte".into();
            return Err(Error::Option {
                option: "call",
                value: "0".into(),
                reason,
            });
        }
        let op = work.shape.op();
        streams
            .serve(
                op,
                work.memory.idle_bytes(&work.shape),
                &work.blocks,
                iterations,
                tuning,
            )
            .map_err(Error::Floor)
    }

    fn sessions(&mut self, count: usize) -> Result<Reply, Error> {
        if count > MAX_SESSIONS {
            let reason = format!("at most {MAX_SESSIONS}");
            return Err(Error::Option {
                option: "peers",
                value: count.to_string(),
                reason,
            });
        }
        self.idle.clear();
        for index in 0..count {
            let name = format!("bench-idle-{}-{index}", std::process::id());
            self.idle
                .push(Session::new(self.config.clone().with_name(name)?)?);
        }
        Ok(Reply::Sessions {
            infos: self.idle.iter().map(Session::connection_info).collect(),
        })
    }
}

/// Returns unpredictable bytes from the kernel.
fn nonce() -> io::Result<Nonce> {
    use std::io::Read;

    let mut nonce = Nonce::default();
    std::fs::File::open("/dev/urandom")?.read_exact(&mut nonce)?;
    Ok(nonce)
}
