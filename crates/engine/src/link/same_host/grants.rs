//! Regions of this session that a neighbour may access.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tcpx_net::{Gates, Neighbour};
use tcpx_proto::neighbour::Message;

use super::GATES;
use super::wired::Line;
use crate::log::limited;
use crate::memory::{Memory, MemoryKind};
use crate::sync::{Mutex, Rank};

/// Time to wait for a neighbour to leave a region before a warning is logged.
const PATIENCE: Duration = Duration::from_secs(1);

/// Limits the pause between two checks of a gate.
const LONGEST_PAUSE: Duration = Duration::from_millis(1);

/// Regions that a neighbour may access, with a gate for each, which it passes before every access.
///
/// The neighbour accesses the memory by itself. Only the gates keep it from memory that was
/// revoked: a revocation closes the gate, and then waits until the neighbour is not inside. It
/// waits for a stopped neighbour inside until that continues or ends.
pub(crate) struct Grants {
    gates: Gates,
    neighbour: Arc<Neighbour>,
    line: Arc<Line>,
    granted: Mutex<Granted>,
}

#[derive(Default)]
struct Granted {
    /// Granted memory, by gate.
    memory: Vec<Option<Arc<Memory>>>,
    /// Gates that the neighbour has released.
    free: Vec<usize>,
    /// True once no more grants are made.
    ended: bool,
}

/// Why a grant was refused.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum NotGranted {
    /// The memory is no longer registered.
    Revoked,
    /// There is no gate left.
    Full,
    /// The connection has ended; the peer will learn that from the connection.
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

    /// Returns the gates, which are sent to the neighbour.
    pub(super) fn gates(&self) -> &Gates {
        &self.gates
    }

    /// Assigns a gate to a region.
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
        // Stored under the lock, and before the check: a revocation either finds the memory here or
        // is seen by the check.
        granted.memory[gate] = Some(Arc::clone(memory));
        if !memory.is_live() {
            granted.memory[gate] = None;
            granted.free.push(gate);
            return Err(NotGranted::Revoked);
        }
        Ok(gate)
    }

    /// Frees a gate that the neighbour no longer uses. Returns false if the gate is not in use, or
    /// the neighbour is still inside.
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

    /// Closes the gates of revoked memory and waits until the neighbour is not inside. For device
    /// memory, waits until a responsive neighbour has unmapped it as well, before it may be freed.
    pub(crate) fn revoke(&self) {
        let due = self.close(|memory| !memory.is_live());
        for &(gate, _) in &due {
            let gate = gate as u32;
            // A neighbour that does not receive this message finds the gate closed.
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

    /// Closes every gate for good.
    pub(super) fn end(&self) {
        let mut granted = self.granted.lock();
        granted.ended = true;
        for gate in 0..granted.memory.len() {
            self.gates.close(gate);
        }
    }

    /// Closes every gate and waits until the neighbour is not inside.
    pub(crate) fn wait(&self) {
        self.end();
        self.close(|_| true);
    }

    /// Returns whether the neighbour no longer accesses any memory, and never will.
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
                    remedy = "resume the process, or end it",
                    "a process on this host is copying memory that is being deregistered, and \
                     makes no progress"
                );
            }
            std::thread::sleep(pause);
            pause = (2 * pause).min(LONGEST_PAUSE);
        }
    }
}
