//! Setup of the comms of a connection, after the handshake of its lanes.
//!
//! ```text
//!   for each lane, in both directions at once:
//!   listen ─► Comm frame with the handle ──► connect (on a separate thread)
//!   accept (on a separate thread) ◄──────────────┘
//!   both comms made ─► empty Comm frame ───► the lane is in use once both sides have it
//! ```
//!
//! Everything is polled, on threads that serve only this connection: plugins may take seconds,
//! `accept` of some plugins blocks until the peer has connected, and so does `connect` of old ones.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, TryRecvError};
use std::task::Poll;
use std::time::{Duration, Instant};

use tcpx_cuda::{Current, Device};
use tcpx_ncclnet::{Connecting, Handle, Listener, RecvComm, SendComm};
use tcpx_net::{Cursor, Stream};
use tcpx_proto::frame::comm::Setup;
use tcpx_proto::frame::{HEADER_BYTES, Header, Kind, MAX_TEXT_BYTES};

use super::{CommReceive, CommSend, Net, Target};
use crate::error::{CommCause, Error, Misbehaviour};
use crate::log::limited;

/// Shortest and longest interval at which a plugin is polled for a connection. Each lane has a
/// thread, and the threads of many peers' lanes must leave the cores to threads that move bytes.
const FIRST_LOOK: Duration = Duration::from_millis(1);
const LAST_LOOK: Duration = Duration::from_millis(50);

/// Plugins with a smaller limit are refused.
const MIN_MESSAGE_BYTES: usize = 4096;

/// A lane after its handshake: its stream, and the bytes received after the handshake.
pub(crate) struct RawLane {
    pub(crate) stream: Stream,
    pub(crate) early: Vec<u8>,
}

/// The comms of one lane.
pub(crate) struct Comms {
    net: Arc<Net>,
    send: SendComm,
    recv: RecvComm,
    message_bytes: usize,
}

impl Comms {
    /// Makes the two halves of the lane.
    pub(crate) fn open<T: Target>(self) -> Result<(CommSend, CommReceive<T>), Error> {
        let Self {
            net,
            send,
            recv,
            message_bytes,
        } = self;
        let limit = net.let_go_limit;
        let receive = CommReceive::new(recv, message_bytes, net.standin.clone(), limit)?;
        let send = CommSend::new(send, message_bytes, receive.devices(), limit);
        Ok((send, receive))
    }
}

/// Waits a little, longer as the time since `start` grows.
fn pause(start: Instant) {
    std::thread::sleep((start.elapsed() / 8).clamp(FIRST_LOOK, LAST_LOOK));
}

/// Makes `gpu` current on this thread. GPUDirect-TCPX makes a connection for the GPU that is
/// current when it listens, connects and accepts, and allocates its bounce pages there.
fn make_current(gpu: Option<&Arc<dyn Device>>) -> Option<Current> {
    gpu?.make_current()
        .inspect_err(|error| {
            limited!(
                WARN,
                %error,
                remedy = "see the error; `tcpx doctor` checks the GPUs",
                "the plugin connects without a GPU"
            );
        })
        .ok()
}

/// Makes the comms of all lanes, for a GPU. Blocks, so it needs a separate thread.
pub(crate) fn set_up(
    net: &Arc<Net>,
    gpu: Option<&Arc<dyn Device>>,
    lanes: &mut [RawLane],
    deadline: Instant,
    is_cancelled: impl Fn() -> bool,
) -> Result<Vec<Comms>, CommCause> {
    let given_up = Arc::new(AtomicBool::new(false));
    let _current = make_current(gpu);
    let start = Instant::now();
    let wait = || {
        if is_cancelled() {
            Err(CommCause::Cancelled)
        } else if Instant::now() >= deadline {
            Err(CommCause::TimedOut)
        } else {
            pause(start);
            Ok(())
        }
    };
    let result = connect_all(net, gpu, lanes, &given_up, &wait);
    given_up.store(true, Ordering::Relaxed);
    if let Err(cause) = &result {
        say_goodbye(lanes, cause);
    }
    result
}

fn connect_all(
    net: &Arc<Net>,
    gpu: Option<&Arc<dyn Device>>,
    lanes: &mut [RawLane],
    given_up: &Arc<AtomicBool>,
    wait: &impl Fn() -> Result<(), CommCause>,
) -> Result<Vec<Comms>, CommCause> {
    let mut listeners = Vec::new();
    for (index, lane) in lanes.iter().enumerate() {
        let device = index % net.devices();
        let listener = net.plugin.listen(device)?;
        let setup = Setup {
            message_bytes: net.message_bytes as u32,
            handle: listener.handle().as_bytes(),
            plugin: net.plugin.name(),
        };
        let mut payload = Vec::new();
        setup
            .encode(&mut payload)
            .expect("a handle has 1 to 128 bytes");
        send_frame(&lane.stream, Kind::Comm, &payload)?;
        listeners.push(listener);
    }
    let mut attempts = Vec::new();
    let mut connecting = Vec::new();
    for ((index, lane), listener) in lanes.iter_mut().enumerate().zip(listeners) {
        let payload = lane.read_frame(wait)?;
        let setup = Setup::decode(&payload).map_err(Misbehaviour::from)?;
        if setup.plugin != net.plugin.name() {
            return Err(CommCause::PluginsDiffer {
                ours: net.plugin.name().to_owned(),
                theirs: setup.plugin.to_owned(),
            });
        }
        let message_bytes = net.message_bytes.min(setup.message_bytes as usize);
        if message_bytes < MIN_MESSAGE_BYTES {
            return Err(CommCause::MessagesTooShort {
                bytes: message_bytes,
                min: MIN_MESSAGE_BYTES,
            });
        }
        let handle = Handle::from_bytes(setup.handle)?;
        let device = index % net.devices();
        connecting.push(net.plugin.connect(device, &handle)?);
        attempts.push(Attempt {
            send: None,
            // Not before the peer is known to be compatible: a waiting accept cannot be cancelled.
            accepted: accept(gpu.cloned(), listener, Arc::clone(given_up))?,
            recv: None,
            message_bytes,
        });
    }
    let connected = connect(gpu.cloned(), connecting, Arc::clone(given_up))?;
    loop {
        while let Some((index, comm)) = received(&connected, "connect")? {
            attempts[index].send = Some(comm?);
        }
        let mut complete = true;
        for attempt in &mut attempts {
            complete &= attempt.advance()?;
        }
        if complete {
            break;
        }
        for lane in &mut *lanes {
            // A peer that gave up sends the reason.
            lane.look()?;
        }
        wait()?;
    }
    for lane in lanes.iter() {
        send_frame(&lane.stream, Kind::Comm, &[])?;
    }
    for lane in lanes {
        if !lane.read_frame(wait)?.is_empty() {
            return Err(Misbehaviour::CommTwice.into());
        }
    }
    let comms = attempts.into_iter().filter_map(|attempt| {
        let mut send = attempt.send?;
        // The peer's empty frame confirms that it has accepted.
        send.accepted();
        Some(Comms {
            net: Arc::clone(net),
            send,
            recv: attempt.recv?,
            message_bytes: attempt.message_bytes,
        })
    });
    Ok(comms.collect())
}

struct Attempt {
    send: Option<SendComm>,
    accepted: mpsc::Receiver<Result<RecvComm, tcpx_ncclnet::Error>>,
    recv: Option<RecvComm>,
    message_bytes: usize,
}

impl Attempt {
    /// Returns true once both comms exist.
    fn advance(&mut self) -> Result<bool, CommCause> {
        if self.recv.is_none()
            && let Some(comm) = received(&self.accepted, "accept")?
        {
            self.recv = Some(comm?);
        }
        Ok(self.send.is_some() && self.recv.is_some())
    }
}

/// Starts a thread that calls the plugin for a GPU.
fn spawn(
    name: &str,
    gpu: Option<Arc<dyn Device>>,
    body: impl FnOnce() + Send + 'static,
) -> Result<(), CommCause> {
    let thread = std::thread::Builder::new().name(name.into());
    let body = move || {
        let _current = make_current(gpu.as_ref());
        body();
    };
    let started = thread.spawn(body).map(drop);
    started.map_err(|e| CommCause::Thread(e.into()))
}

/// Returns a result that the thread has sent, if any;
/// an ended thread is an error only after all of its results.
fn received<T>(from: &mpsc::Receiver<T>, call: &'static str) -> Result<Option<T>, CommCause> {
    match from.try_recv() {
        Ok(value) => Ok(Some(value)),
        Err(TryRecvError::Empty) => Ok(None),
        Err(TryRecvError::Disconnected) => Err(CommCause::ThreadEnded { call }),
    }
}

/// The comm of one of several lanes, or the error.
type Connected = (usize, Result<SendComm, tcpx_ncclnet::Error>);

/// Makes all connections on a separate thread. The thread is leaked if the plugin blocks for ever.
fn connect(
    gpu: Option<Arc<dyn Device>>,
    attempts: Vec<Connecting>,
    given_up: Arc<AtomicBool>,
) -> Result<mpsc::Receiver<Connected>, CommCause> {
    let (outcome, connected) = mpsc::channel();
    let start = Instant::now();
    spawn("tcpx-connect", gpu, move || {
        let mut attempts: Vec<_> = attempts.into_iter().enumerate().collect();
        // Runs until the end of the setup: the receiver would take an earlier end for a failure.
        while !given_up.load(Ordering::Relaxed) {
            attempts.retain_mut(|(index, connecting)| match connecting.poll() {
                Poll::Pending => true,
                Poll::Ready(comm) => {
                    // The receiver is gone if the setup was cancelled.
                    let _ = outcome.send((*index, comm));
                    false
                }
            });
            pause(start);
        }
    })?;
    Ok(connected)
}

/// Accepts on a separate thread. The thread is leaked if the plugin blocks for ever.
fn accept(
    gpu: Option<Arc<dyn Device>>,
    mut listener: Listener,
    given_up: Arc<AtomicBool>,
) -> Result<mpsc::Receiver<Result<RecvComm, tcpx_ncclnet::Error>>, CommCause> {
    let (outcome, accepted) = mpsc::channel();
    let start = Instant::now();
    spawn("tcpx-accept", gpu, move || {
        while !given_up.load(Ordering::Relaxed) {
            if let Poll::Ready(comm) = listener.accept() {
                // The receiver is gone if the setup was cancelled.
                let _ = outcome.send(comm);
                return;
            }
            pause(start);
        }
    })?;
    Ok(accepted)
}

fn send_frame(stream: &Stream, kind: Kind, payload: &[u8]) -> Result<(), CommCause> {
    let mut bytes = Vec::with_capacity(HEADER_BYTES + payload.len());
    let header = Header {
        payload: payload.len() as u64,
        ..Header::new(kind, 0)
    };
    header.encode(&mut bytes);
    bytes.extend_from_slice(payload);
    // These are the lane's first bytes after the handshake: they fit any send buffer.
    match stream.send(&bytes, &[], Cursor::default()) {
        Ok(sent) if sent == bytes.len() => Ok(()),
        Ok(_) => Err(CommCause::NotReading),
        Err(error) => Err(error.into()),
    }
}

fn say_goodbye(lanes: &[RawLane], cause: &CommCause) {
    let reason = cause.to_string();
    let text = &reason.as_bytes()[..reason.len().min(MAX_TEXT_BYTES as usize)];
    for lane in lanes {
        // The peer may already be gone.
        let _ = send_frame(&lane.stream, Kind::Goodbye, text);
    }
}

impl RawLane {
    /// Returns the payload of the next setup frame; never reads past it.
    fn read_frame(
        &mut self,
        wait: &impl Fn() -> Result<(), CommCause>,
    ) -> Result<Vec<u8>, CommCause> {
        loop {
            if let Some(payload) = self.next_frame()? {
                return Ok(payload);
            }
            wait()?;
        }
    }

    /// Receives available bytes of the next frame without waiting; detects that the peer gave up.
    fn look(&mut self) -> Result<(), CommCause> {
        self.fill(HEADER_BYTES)?;
        if self.early.first() == Some(&(Kind::Goodbye as u8)) {
            self.next_frame()?;
        }
        Ok(())
    }

    fn next_frame(&mut self) -> Result<Option<Vec<u8>>, CommCause> {
        self.fill(HEADER_BYTES)?;
        let Some(header) = self.early.first_chunk() else {
            return Ok(None);
        };
        let header = Header::decode(header).map_err(Misbehaviour::from)?;
        if !matches!(header.kind, Kind::Comm | Kind::Goodbye) {
            return Err(Misbehaviour::CommNotFirst.into());
        }
        // At most a few hundred bytes, since the header was checked.
        let whole = HEADER_BYTES + header.payload as usize;
        self.fill(whole)?;
        if self.early.len() < whole {
            return Ok(None);
        }
        let payload = self.early[HEADER_BYTES..whole].to_vec();
        self.early.drain(..whole);
        match header.kind {
            Kind::Goodbye => {
                let text = String::from_utf8_lossy(&payload).into_owned();
                Err(CommCause::Goodbye(text))
            }
            _ => Ok(Some(payload)),
        }
    }

    /// Reads until `len` bytes are there, or no more are available.
    fn fill(&mut self, len: usize) -> Result<(), CommCause> {
        while self.early.len() < len {
            let at = self.early.len();
            self.early.resize(len, 0);
            let result = self
                .stream
                .recv(&[], Cursor::default(), &mut self.early[at..]);
            self.early.truncate(at + result.as_ref().map_or(0, |n| *n));
            match result {
                Ok(_) => {}
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}
