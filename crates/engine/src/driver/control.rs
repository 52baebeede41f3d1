//! The control thread: everything that is not data. It accepts and makes connections, runs their handshakes, takes dead
//! connections apart and notices peers that have gone silent. It never blocks on a peer, and sleeps while there is
//! nothing to do.

mod admission;
mod comms;
mod dial;
mod listen;
mod neighbours;
mod rejoin;
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

/// How long an accepted connection may take to prove itself, and a connection to have all its lanes.
const HANDSHAKE_TIME: Duration = Duration::from_secs(5);

/// How often links with work outstanding are looked at, at the least.
const LONGEST_TICK: Duration = Duration::from_millis(250);

/// The thread's own state.
pub(crate) struct ControlLoop {
    core: Arc<SessionCore>,
    workers: Arc<Workers>,
    /// The plugin that carries payload, if one does.
    net: Option<Arc<Net>>,
    /// What is said about it in handshakes.
    offer: Offer,
    /// Connections whose comms were set up, by threads of their own.
    plugged: Arc<Mutex<Vec<comms::Plugged>>>,
    poller: Poller,
    listeners: Vec<Listener>,
    incoming: listen::Incoming,
    dialing: dial::Dialing,
    rejoins: rejoin::Rejoins,
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

    /// The thread.
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
                limited!(ERROR, %error, "the control thread cannot wait");
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
            // Last: who is here already goes before who comes.
            for listener in listening.drain(..) {
                self.accept(listener);
            }
        }
    }

    /// Does what is due and returns how long the thread may sleep.
    fn tick(&mut self) -> Option<Duration> {
        let now = Instant::now();
        self.expire_incoming(now);
        self.expire_dials(now);
        self.expire_rejoins(now);
        self.expire_neighbours(now);
        // Said before the look: work that starts after it wakes us.
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
        // Connections that were killed while the session closed.
        for command in self.core.parts.control.close() {
            match command {
                Command::Reap(link) => link.reap(),
                Command::Connect(peer) => peer.unreachable(&Error::Closed),
                Command::LaneLost(_) | Command::Stop => {}
            }
        }
    }
}

/// Bytes of a handshake that are not dealt with yet.
#[derive(Default)]
struct Inbound {
    bytes: Vec<u8>,
}

impl Inbound {
    /// Reads what is there, never past what a handshake may have.
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

/// Sends a handshake message; it is far smaller than any send buffer.
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
