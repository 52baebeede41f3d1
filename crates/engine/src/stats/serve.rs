//! Serves statistics over HTTP/1.1: `GET /metrics` returns OpenMetrics text for scrapers, and
//! `GET /stats` on a Unix socket returns the JSON document of `tcpx top`.
//!
//! One thread serves each address that sessions of the process name, and one serves the Unix
//! socket, which all sessions of the process share. Readers do not delay transfers: this thread
//! alone serves them, and holds the lock of a lane only while it copies a few counters. Limits
//! bound what a reader can make the thread keep: the number of connections, the size of a request,
//! and the time for both.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tcpx_net::{Cursor, Event, Folder, Listener, Poller, SocketOptions, Stream, Waker};

use super::data::SessionStats;
use super::openmetrics;
use super::process::{ProcessStats, SessionReading};
use crate::config::MetricsAddress;
use crate::log::limited;

/// The name of the folders that hold the sockets of `tcpx top`, for
/// [`Folder::places`](tcpx_net::Folder::places).
pub const FOLDER: &str = "tcpx";

/// The limit for connections that are served at the same time; further ones wait in the kernel.
const MAX_CLIENTS: usize = 16;
/// The largest request, in bytes.
const MAX_REQUEST: usize = 8 << 10;
/// How long a connection may take for its request and its answer.
const PATIENCE: Duration = Duration::from_secs(if cfg!(test) { 3 } else { 10 });
/// How long the listener rests after a failure to accept. A process without free descriptors leaves
/// the connection in the queue, and the poller would report it again at once.
const REST: Duration = Duration::from_millis(100);
/// The token of the listener; those of clients follow.
const LISTENER: u64 = 0;

/// A provider of statistics.
pub(crate) trait Source: Send + Sync {
    /// Reads the statistics, with the kernel's view of lanes.
    fn read(&self) -> SessionStats;
}

/// Where statistics are served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Asked {
    /// At an address, to scrapers.
    Metrics(MetricsAddress),
    /// On a Unix socket in the first of these folders that can be used, to `tcpx top`.
    Top(Vec<PathBuf>),
}

impl Asked {
    /// Names the folders of this user, for `tcpx top`.
    pub(crate) fn top() -> Self {
        Self::Top(Folder::places(FOLDER))
    }
}

/// The servers of this process, one per address or socket.
static SERVERS: Mutex<Vec<Arc<Server>>> = Mutex::new(Vec::new());

/// How long to wait for the list of servers. Threads hold its lock for moments only, but a child
/// that was forked at such a moment inherits a lock that stays taken: the child continues without a
/// server.
const LIST_TIME: Duration = Duration::from_secs(1);

struct Server {
    /// The process that started the thread. A forked child does not have its parent's threads.
    process: u32,
    asked: Asked,
    sources: Mutex<Vec<(u64, Weak<dyn Source>)>>,
    is_over: AtomicBool,
    waker: Waker,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// Keeps a source served. Dropping the registration removes the source, and the last one ends the
/// server.
pub(crate) struct Registration {
    server: Arc<Server>,
    /// The number of the source.
    id: u64,
}

impl Drop for Registration {
    fn drop(&mut self) {
        let Some(mut servers) = SERVERS.try_lock_for(LIST_TIME) else {
            return;
        };
        let mut sources = self.server.sources.lock();
        sources.retain(|(id, _)| *id != self.id);
        if !sources.is_empty() {
            return;
        }
        drop(sources);
        servers.retain(|known| !Arc::ptr_eq(known, &self.server));
        drop(servers);
        self.server.is_over.store(true, Ordering::Release);
        self.server.waker.wake();
        let thread = self.server.thread.lock().take();
        // The last source may be dropped on the thread itself, which was reading it.
        let is_other =
            |thread: &JoinHandle<()>| thread.thread().id() != std::thread::current().id();
        if let Some(thread) = thread.filter(is_other) {
            let _ = thread.join();
        }
    }
}

/// Serves the statistics of a source. A failure is logged: the session works without metrics.
pub(crate) fn register(asked: Asked, source: Weak<dyn Source>) -> Option<Registration> {
    let error = match try_register(&asked, source) {
        Ok(registration) => return Some(registration),
        Err(error) => error,
    };
    match asked {
        Asked::Metrics(address) => limited!(
            WARN,
            %address,
            %error,
            remedy = "name another address or a range of ports in TCPX_METRICS",
            "metrics are not served"
        ),
        Asked::Top(places) => tracing::debug!(
            ?places,
            %error,
            "`tcpx top` will not show this process: none of the folders can be used"
        ),
    }
    None
}

fn try_register(asked: &Asked, source: Weak<dyn Source>) -> io::Result<Registration> {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let mut servers = SERVERS
        .try_lock_for(LIST_TIME)
        .ok_or_else(|| io::Error::other("the process was forked while others were set up"))?;
    let process = std::process::id();
    let id = NEXT.fetch_add(1, Ordering::Relaxed);
    let known = servers
        .iter()
        .find(|known| known.process == process && known.asked == *asked);
    if let Some(server) = known {
        let server = Arc::clone(server);
        server.sources.lock().push((id, source));
        return Ok(Registration { server, id });
    }
    let door = Door::open(asked)?;
    let poller = Poller::new()?;
    poller.add_armed(&door.listener, LISTENER)?;
    let server = Arc::new(Server {
        process,
        asked: asked.clone(),
        sources: Mutex::new(vec![(id, source)]),
        is_over: AtomicBool::new(false),
        waker: poller.waker(),
        thread: Mutex::new(None),
    });
    let served = Arc::clone(&server);
    let name = match asked {
        Asked::Metrics(_) => "tcpx-metrics",
        Asked::Top(_) => "tcpx-top",
    };
    let run = move || {
        Loop {
            server: served,
            poller,
            door,
            rests_until: None,
            clients: Vec::new(),
            next: LISTENER + 1,
        }
        .run();
    };
    let thread = std::thread::Builder::new().name(name.into());
    *server.thread.lock() = Some(thread.spawn(run)?);
    servers.push(Arc::clone(&server));
    Ok(Registration { server, id })
}

/// The listener that readers connect to.
struct Door {
    listener: Listener,
    /// Takes the next connection, as [`Listener::accept`] does.
    accept: fn(&Listener) -> io::Result<Stream>,
    /// The folder and the file name, if the listener is a Unix socket.
    name: Option<(Folder, String)>,
}

impl Door {
    fn open(asked: &Asked) -> io::Result<Self> {
        match asked {
            Asked::Metrics(address) => {
                let listener = bind(*address)?;
                let address = listener.local_addr()?;
                tracing::info!("metrics are served at http://{address}/metrics");
                Ok(Self {
                    listener,
                    accept: |listener| listener.accept().map(|(stream, _)| stream),
                    name: None,
                })
            }
            Asked::Top(places) => {
                let folder = Folder::make(places)?;
                // Add random digits: another PID namespace may have a process with the same ID.
                let mut random = [0; 8];
                getrandom::fill(&mut random).map_err(io::Error::other)?;
                let (process, random) = (std::process::id(), u64::from_ne_bytes(random));
                let (listener, name) = folder.listen(&format!("{process}-{random:016x}"))?;
                Ok(Self {
                    listener,
                    accept: Listener::accept_own,
                    name: Some((folder, name)),
                })
            }
        }
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        if let Some((folder, name)) = &self.name {
            folder.remove(name);
        }
    }
}

/// Listens at the first free port of the range.
fn bind(asked: MetricsAddress) -> io::Result<Listener> {
    let options = SocketOptions {
        buffer_bytes: 0,
        dead_after: PATIENCE,
    };
    let mut last = io::Error::from(io::ErrorKind::AddrInUse);
    for port in asked.first_port..=asked.last_port {
        let address = SocketAddr::new(asked.ip, port);
        match Listener::bind(address, &options) {
            Ok(listener) => return Ok(listener),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// The state of the serving thread.
struct Loop {
    server: Arc<Server>,
    poller: Poller,
    door: Door,
    /// The end of the rest after a failure to accept; the listener is not armed before.
    rests_until: Option<Instant>,
    clients: Vec<Client>,
    next: u64,
}

/// One connection of a reader.
struct Client {
    token: u64,
    stream: Stream,
    deadline: Instant,
    request: Vec<u8>,
    /// None while the request is incomplete.
    answer: Option<Vec<u8>>,
    // ≤ the length of the answer
    sent: usize,
}

impl Loop {
    fn run(mut self) {
        if let Some((folder, _)) = &self.door.name {
            // Ignore failures: the sweep fails only if the folder is gone.
            let _ = folder.sweep();
        }
        let mut events = Vec::new();
        while !self.server.is_over.load(Ordering::Acquire) {
            let timeout = self.prepare(Instant::now());
            if self.poller.wait(&mut events, timeout).is_err() {
                return;
            }
            for event in events.drain(..) {
                match event {
                    Event::Ready(LISTENER) => self.accept(Instant::now()),
                    Event::Ready(token) => self.serve(token),
                    Event::Woken => {}
                }
            }
        }
    }

    /// Drops clients whose time is over, and arms the listener if a connection may be accepted.
    /// Returns how long the thread may wait for events.
    fn prepare(&mut self, now: Instant) -> Option<Duration> {
        self.clients.retain(|client| client.deadline > now);
        self.rests_until = self.rests_until.filter(|until| *until > now);
        // Accept no more than the limit: further connections wait in the kernel until a client is
        // done.
        if self.clients.len() < MAX_CLIENTS && self.rests_until.is_none() {
            let _ = self.poller.arm(&self.door.listener, LISTENER, false);
        }
        let deadlines = self.clients.iter().map(|client| client.deadline);
        let next = deadlines.chain(self.rests_until).min();
        next.map(|next| next.saturating_duration_since(now))
    }

    fn accept(&mut self, now: Instant) {
        while self.clients.len() < MAX_CLIENTS {
            let stream = match (self.door.accept)(&self.door.listener) {
                Ok(stream) => stream,
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => continue,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) => {
                    limited!(
                        WARN,
                        %error,
                        remedy = "raise the limit of open files (ulimit -n), or free memory",
                        "cannot accept a reader of statistics"
                    );
                    self.rests_until = Some(now + REST);
                    return;
                }
            };
            let token = self.next;
            self.next += 1;
            if self.poller.add_armed(&stream, token).is_ok() {
                self.clients.push(Client {
                    token,
                    stream,
                    deadline: now + PATIENCE,
                    request: Vec::new(),
                    answer: None,
                    sent: 0,
                });
            }
        }
    }

    fn serve(&mut self, token: u64) {
        let at = self.clients.iter().position(|client| client.token == token);
        let Some(at) = at else { return };
        let client = &mut self.clients[at];
        let goes_on = client.step(&self.server).unwrap_or(false);
        let is_armed = goes_on && {
            let poller = &self.poller;
            match client.answer {
                None => poller.arm(&client.stream, token, false).is_ok(),
                Some(_) => poller.arm_for_writing(&client.stream, token).is_ok(),
            }
        };
        if !is_armed {
            self.clients.swap_remove(at);
        }
    }
}

impl Client {
    /// Continues with the request or the answer; returns false once the whole answer is sent.
    fn step(&mut self, server: &Server) -> io::Result<bool> {
        if self.answer.is_none() {
            let mut buffer = [0; 2048];
            let count = match self.stream.recv(&[], Cursor::default(), &mut buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(true),
                outcome => outcome?,
            };
            if count == 0 {
                return Ok(false);
            }
            self.request.extend_from_slice(&buffer[..count]);
            let is_whole = self.request.windows(4).any(|end| end == b"\r\n\r\n");
            if !is_whole && self.request.len() < MAX_REQUEST {
                return Ok(true);
            }
            self.answer = Some(match is_whole {
                true => answer(&self.request, server),
                false => plain("431 Request Header Fields Too Large", "too long\n"),
            });
        }
        let answer = self.answer.as_deref().unwrap_or_default();
        while self.sent < answer.len() {
            let rest = &answer[self.sent..];
            match self.stream.send(rest, &[], Cursor::default()) {
                Ok(count) => self.sent += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(true),
                Err(error) => return Err(error),
            }
        }
        self.stream.shutdown();
        Ok(false)
    }
}

impl Server {
    /// Reads all sources.
    fn read(&self) -> Vec<SessionReading> {
        let sources: Vec<_> = self.sources.lock().iter().cloned().collect();
        let read = |(id, source): &(u64, Weak<dyn Source>)| {
            let stats = source.upgrade()?.read();
            Some(SessionReading { id: *id, stats })
        };
        let mut sessions: Vec<_> = sources.iter().filter_map(read).collect();
        sessions.sort_by(|a, b| a.stats.name.cmp(&b.stats.name));
        sessions
    }

    fn metrics(&self) -> String {
        let sessions: Vec<_> = self.read().into_iter().map(|one| one.stats).collect();
        openmetrics(&sessions)
    }

    fn document(&self) -> String {
        let process = ProcessStats::of_this_process(self.read());
        serde_json::to_string(&process).unwrap_or_default()
    }
}

/// Returns the answer to a complete request.
fn answer(request: &[u8], server: &Server) -> Vec<u8> {
    let line = request.split(|byte| *byte == b'\r').next();
    let line = String::from_utf8_lossy(line.unwrap_or_default());
    let mut words = line.split(' ');
    let (method, target) = (words.next(), words.next().unwrap_or_default());
    let path = target.split('?').next();
    match (method, path, &server.asked) {
        (Some("GET"), Some("/metrics"), _) => http(
            "200 OK",
            "application/openmetrics-text; version=1.0.0; charset=utf-8",
            &server.metrics(),
        ),
        (Some("GET"), Some("/stats"), Asked::Top(_)) => {
            http("200 OK", "application/json", &server.document())
        }
        (Some("GET"), ..) => plain("404 Not Found", "see /metrics\n"),
        _ => plain("405 Method Not Allowed", "GET only\n"),
    }
}

fn plain(status: &str, body: &str) -> Vec<u8> {
    http(status, "text/plain; charset=utf-8", body)
}

fn http(status: &str, kind: &str, body: &str) -> Vec<u8> {
    let len = body.len();
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len}\r\n\
         Connection: close\r\n\r\n"
    );
    [head.as_bytes(), body.as_bytes()].concat()
}

#[cfg(test)]
mod tests;
