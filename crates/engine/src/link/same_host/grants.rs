//! Regions of this session that a neighbour may touch.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tcpx_net::{Gates, Neighbour};
use tcpx_proto::neighbour::Message;

use super::GATES;
use super::wired::Line;
use crate::log::limited;
use crate::memory::{Memory, MemoryKind};
use crate::sync::{Mutex, Rank};

/// How long somebody waits without a word for a neighbour to leave a region.
const PATIENCE: Duration = Duration::from_secs(1);

/// The longest pause between two looks at a gate.
const LONGEST_PAUSE: Duration = Duration::from_millis(1);

/// Which regions a neighbour may touch: one gate each, which it passes before every access.
///
/// The neighbour touches the memory by itself. What it is told here is all that keeps it from
/// memory that was given back: a gate is closed first, and then everybody waits until nobody is
/// inside. A neighbour that was stopped inside is waited for until it goes on or ends.
pub(crate) struct Grants {
    gates: Gates,
    neighbour: Arc<Neighbour>,
    line: Arc<Line>,
    granted: Mutex<Granted>,
}

#[derive(Default)]
struct Granted {
    /// By gate.
    memory: Vec<Option<Arc<Memory>>>,
    /// Gates that the neighbour has forgotten.
    free: Vec<usize>,
    /// Nothing is granted any more.
    ended: bool,
}

/// Why nothing was granted.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum NotGranted {
    /// The memory is no longer registered.
    Revoked,
    /// There is no gate left.
    Full,
    /// The connection has ended, which the peer is about to learn.
    Ended,
}

impl Grants {
    pub(super) fn new(neighbour: &Arc<Neighbour>, line: &Arc<Line>) -> std::io::Result<Self> {
        Ok(Self {
            gates: Gates::create(GATES)?,
            neighbour: Arc::clone(neighbour),
            line: Arc::clone(line),
            granted: Mutex::new(Rank::Leaf, Granted::default()),
        })
    }

    /// The gates, as the neighbour is to open them.
    pub(super) fn gates(&self) -> &Gates {
        &self.gates
    }

    /// Opens a gate for a region.
    pub(super) fn grant(&self, memory: &Arc<Memory>) -> Result<usize, NotGranted> {
        let mut granted = self.granted.lock();
        if granted.ended {
            return Err(NotGranted::Ended);
        }
        let gate = match granted.free.pop() {
            Some(gate) => gate,
            None if granted.memory.len() < GATES => {
                granted.memory.push(None);
                granted.memory.len() - 1
            }
            None => return Err(NotGranted::Full),
        };
        // With the lock, and before the look: whoever revokes the memory either finds it here or is
        // seen.
        granted.memory[gate] = Some(Arc::clone(memory));
        if !memory.is_live() {
            granted.memory[gate] = None;
            granted.free.push(gate);
            return Err(NotGranted::Revoked);
        }
        Ok(gate)
    }

    /// Takes a gate back that the neighbour will not ask for any more. False where it is none, or the
    /// neighbour is still inside.
    pub(super) fn forgotten(&self, gate: usize) -> bool {
        let mut granted = self.granted.lock();
        let is_open = granted.memory.get(gate).is_some_and(Option::is_some);
        if !is_open || granted.ended || !self.gates.reopen(gate) {
            return false;
        }
        granted.memory[gate] = None;
        granted.free.push(gate);
        true
    }

    /// Closes the gates of memory that was revoked and waits until nobody is inside. Device memory is
    /// also unmapped by a neighbour that answers: it must not be freed before.
    pub(crate) fn revoke(&self) {
        let due = self.close(|memory| !memory.is_live());
        for &(gate, _) in &due {
            let gate = gate as u32;
            // A neighbour that does not hear of it finds the gate closed.
            let _ = self.line.send(&Message::Revoked { gate }, Vec::new());
        }
        for (gate, memory) in due {
            if memory.kind != MemoryKind::Host {
                self.wait_until_forgotten(gate);
            }
        }
    }

    fn wait_until_forgotten(&self, gate: usize) {
        let until = Instant::now() + PATIENCE;
        let is_kept = || {
            let granted = self.granted.lock();
            !granted.ended && granted.memory[gate].is_some()
        };
        while is_kept() && Instant::now() < until && !self.neighbour.is_gone() {
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// Closes every gate. Nobody is let in from here on.
    pub(super) fn end(&self) {
        let mut granted = self.granted.lock();
        granted.ended = true;
        for gate in 0..granted.memory.len() {
            self.gates.close(gate);
        }
    }

    /// Ends it and waits until nobody is inside.
    pub(crate) fn wait(&self) {
        self.end();
        self.close(|_| true);
    }

    /// Whether the neighbour touches nothing any more, and never will.
    pub(crate) fn is_over(&self) -> bool {
        let granted = self.granted.lock();
        let mut gates = 0..granted.memory.len();
        granted.ended && (self.neighbour.is_gone() || gates.all(|gate| self.gates.users(gate) == 0))
    }

    fn close(&self, is_due: impl Fn(&Memory) -> bool) -> Vec<(usize, Arc<Memory>)> {
        let mut due = Vec::new();
        for (gate, memory) in self.granted.lock().memory.iter().enumerate() {
            if let Some(memory) = memory
                && is_due(memory)
            {
                self.gates.close(gate);
                due.push((gate, Arc::clone(memory)));
            }
        }
        for (gate, _) in &due {
            self.wait_for(*gate);
        }
        due
    }

    fn wait_for(&self, gate: usize) {
        let begun = Instant::now();
        let mut pause = Duration::from_micros(1);
        let mut has_warned = false;
        while self.gates.users(gate) > 0 && !self.neighbour.is_gone() {
            if !has_warned && begun.elapsed() >= PATIENCE {
                has_warned = true;
                limited!(
                    WARN,
                    peer = self.line.peer,
                    pid = self.neighbour.pid().as_raw_nonzero().get(),
                    "a process on this host is copying memory that is to be given back, and does not go on: \
                     let it go on, or end it"
                );
            }
            std::thread::sleep(pause);
            pause = (2 * pause).min(LONGEST_PAUSE);
        }
    }
}
