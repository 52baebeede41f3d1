//! The control thread, which handles everything except for data. It accepts and makes connections,
//! runs their handshakes, takes dead connections apart and detects silent peers. It never blocks on
//! a peer, and sleeps while there is nothing to do.

mod admission;
mod announce;
mod comms;
mod dial;
mod listen;
mod neighbours;
mod rejoin;
mod resolve;
mod strangers;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tcpx_net::{Cursor, Event, Listener, Poller, Stream};
use tcpx_proto::handshake::{MAX_HANDSHAKE_BYTES, Offer};

use super::workers::Workers;
use crate::carrier::comm::Net;
use crate::config::SameHostKind;
use crate::error::Error;
use crate::log::limited;
use crate::peers::{Command, SessionCore};
use crate::sync::{Mutex, Rank};

/// Limits how long an accepted connection may take to prove itself,
/// and a connection to have all its lanes.
const HANDSHAKE_TIME: Duration = Duration::from_secs(5);

/// Longest interval between checks of links with outstanding work.
const LONGEST_TICK: Duration = Duration::from_millis(250);

/// State of the control thread.
///
/// [`ControlLoop::run`] repeats these steps: handle the commands of the mailbox, do the work that is
/// due ([`ControlLoop::tick`]), sleep in the poller, handle its events, accept new connections. Only
/// this thread accepts, dials, recovers lanes and takes links apart, and it begins each step
/// without a lock.
pub(crate) struct ControlLoop {
    core: Arc<SessionCore>,
    workers: Arc<Workers>,
    /// The plugin that carries payload, if any.
    net: Option<Arc<Net>>,
    /// The features to offer in handshakes.
    offer: Offer,
    /// Connections whose comms were set up, by separate threads.
    plugged: Arc<Mutex<Vec<comms::Plugged>>>,
    poller: Poller,
    listeners: Vec<Listener>,
    incoming: listen::Incoming,
    dialing: dial::Dialing,
    rejoins: rejoin::Rejoins,
    resolving: resolve::Resolving,
    neighbours: neighbours::Neighbours,
    next_token: u64,
    next_tick: Option<Instant>,
}

impl ControlLoop {
    pub(crate) fn new(
        core: Arc<SessionCore>,
        workers: Arc<Workers>,
        net: Option<Arc<Net>>,
        poller: Poller,
        listeners: Vec<Listener>,
    ) -> std::io::Result<Self> {
        for (token, listener) in listeners.iter().enumerate() {
            poller.add(listener, token as u64)?;
            poller.arm(listener, token as u64, false)?;
        }
        let mut control = Self {
            core,
            workers,
            offer: Offer::NONE,
            net,
            plugged: Arc::new(Mutex::new(Rank::Leaf, Vec::new())),
            poller,
            next_token: listeners.len() as u64,
            listeners,
            incoming: listen::Incoming::new(),
            dialing: dial::Dialing::default(),
            rejoins: rejoin::Rejoins::default(),
            resolving: resolve::Resolving::new(),
            neighbours: neighbours::Neighbours::default(),
            next_tick: None,
        };
        let same_host = control.core.context().config.same_host();
        if same_host != SameHostKind::Off {
            control.open_door();
        }
        let has_door = control.neighbours.has_door();
        control.offer = comms::offer(control.net.as_ref(), has_door, same_host);
        Ok(control)
    }

    /// Runs the thread.
    pub(crate) fn run(mut self) {
        let mut events = Vec::new();
        let mut listening = Vec::new();
        loop {
            let mut stop = false;
            for command in self.core.parts.control.take() {
                match command {
                    Command::Connect(peer) => self.dial(&peer),
                    Command::Reap(link) => link.reap(),
                    Command::LaneLost(link) => self.lane_lost(&link),
                    Command::Release(peer) => peer.release(&self.core),
                    Command::Stop => stop = true,
                }
            }
            if self.core.parts.control.take_resume() {
                for link in self.core.context().links() {
                    link.hand_over();
                }
            }
            if self.core.parts.control.take_neighbour_waits() {
                self.flush_neighbours();
            }
            let plugged = std::mem::take(&mut *self.plugged.lock());
            for plugged in plugged {
                self.plugged(plugged);
            }
            if stop {
                return self.shut_down();
            }
            let timeout = self.tick();
            if let Err(error) = self.poller.wait(&mut events, timeout) {
                limited!(
                    ERROR,
                    %error,
                    remedy = "raise the limit of open files (ulimit -n); where that is not it, restart the process",
                    "the control thread cannot wait"
                );
                std::thread::sleep(Duration::from_millis(10));
            }
            for event in events.drain(..) {
                let Event::Ready(token) = event else { continue };
                if (token as usize) < self.listeners.len() {
                    listening.push(token as usize);
                } else if self.incoming.has(token) {
                    self.incoming_ready(token);
                } else if self.rejoins.has(token) {
                    self.probe_ready(token);
                } else if self.neighbours.has(token) {
                    self.neighbour_ready(token);
                } else {
                    self.dial_ready(token);
                }
            }
            // Last, so that existing connections come before new ones.
            for listener in listening.drain(..) {
                self.accept(listener);
            }
        }
    }

    /// Does the work that is due; returns how long the thread may sleep.
    fn tick(&mut self) -> Option<Duration> {
        let now = Instant::now();
        self.expire_incoming(now);
        self.expire_resolving(now);
        self.expire_dials(now);
        self.expire_rejoins(now);
        self.expire_neighbours(now);
        // Set before the check: work that starts after it wakes this thread.
        self.core.parts.control.set_dozing(true);
        let limit = self.core.context().config.peer_timeout();
        if self.next_tick.is_none_or(|at| now >= at) {
            let mut busy = false;
            tcpx_net::check_handlers();
            for peer in self.core.all_peers() {
                busy |= peer.check_liveness(now, limit);
            }
            let pause = (limit / 8).clamp(Duration::from_millis(5), LONGEST_TICK);
            self.next_tick = busy.then(|| now + pause);
        }
        if self.next_tick.is_some() {
            self.core.parts.control.set_dozing(false);
        }
        let deadlines = [
            self.next_tick,
            self.incoming.deadline(),
            self.dialing.deadline(),
            self.rejoins.deadline(),
            self.resolving.deadline(),
            self.neighbours.deadline(),
        ];
        let first = deadlines.into_iter().flatten().min()?;
        Some(
            first
                .saturating_duration_since(now)
                .max(Duration::from_millis(1)),
        )
    }

    fn token(&mut self) -> u64 {
        self.next_token += 1;
        self.next_token
    }

    fn shut_down(&mut self) {
        self.listeners.clear();
        self.abandon_dials(&Error::Closed);
        self.resolving.abandon(&Error::Closed);
        // Includes connections that were ended while the session closed.
        for command in self.core.parts.control.close() {
            match command {
                Command::Reap(link) => link.reap(),
                Command::Connect(peer) => peer.unreachable(&Error::Closed),
                Command::Release(peer) => peer.fail_held(&Error::Closed),
                Command::LaneLost(_) | Command::Stop => {}
            }
        }
    }
}

/// Unprocessed bytes of a handshake.
#[derive(Default)]
struct Inbound {
    bytes: Vec<u8>,
}

impl Inbound {
    /// Reads available bytes, up to the longest handshake.
    fn read(&mut self, stream: &Stream) -> std::io::Result<()> {
        let mut buffer = [0; MAX_HANDSHAKE_BYTES];
        let room = MAX_HANDSHAKE_BYTES.saturating_sub(self.bytes.len());
        let count = stream.recv(&[], Cursor::default(), &mut buffer[..room])?;
        self.bytes.extend_from_slice(&buffer[..count]);
        Ok(())
    }

    fn consume(&mut self, count: usize) {
        self.bytes.drain(..count);
    }
}

/// Sends a handshake message, which is far smaller than any send buffer.
fn send_all(stream: &Stream, bytes: &[u8]) -> std::io::Result<()> {
    let sent = stream.send(bytes, &[], Cursor::default())?;
    if sent == bytes.len() {
        Ok(())
    } else {
        Err(std::io::ErrorKind::WriteZero.into())
    }
}

fn random<const N: usize>() -> std::io::Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(std::io::Error::other)?;
    Ok(bytes)
}

type Tokens<T> = HashMap<u64, T>;
