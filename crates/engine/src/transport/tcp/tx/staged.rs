//! Payloads that come from a device: copied to the host ahead of time, and while those before them are being sent.

use std::sync::Arc;

use tcpx_cuda::Device;
use tcpx_net::Span;
use tcpx_proto::frame::Kind;

use super::{Body, Response, Tx, Work, encode_answer, encode_error};
use crate::error::Error;
use crate::region::Refusal;
use crate::run::Run;
use crate::staging::{DEPTH, Direction, Outbound, Pool};
use crate::transport::plugin::{self, Place};
use crate::transport::tcp::Connection;
use crate::transport::tcp::grant::Grant;
use crate::transport::tcp::lane::{Flying, Lane};

/// A payload on a device: copied to the host before its frame begins, and while those before it are being sent.
pub(super) struct Staged {
    pub(super) source: Source,
    pub(super) out: Outbound,
}

/// What a payload is.
pub(in crate::transport::tcp) enum Source {
    /// A WRITE chunk of ours.
    Chunk { run: Arc<Run>, index: usize },
    /// The answer to a READ request.
    Answer {
        transfer: u64,
        seq: u32,
        bytes: u64,
        grant: Grant,
    },
}

impl Source {
    pub(super) fn spans(&self) -> &[Span] {
        match self {
            Self::Chunk { run, index } => run.plan.spans(run.plan.chunk(*index)),
            Self::Answer { grant, .. } => &grant.spans,
        }
    }

    /// Whether its memory must be let go, as [`Tx::let_go`] says.
    pub(super) fn is_hit(
        &self,
        is_hit: &mut impl FnMut(&Arc<Run>) -> bool,
        regions_too: bool,
    ) -> bool {
        match self {
            Self::Chunk { run, .. } => is_hit(run),
            Self::Answer { grant, .. } => regions_too && grant.has_dead_memory(),
        }
    }
}

impl plugin::Source for Source {
    fn place(&self) -> Place<'_> {
        match self {
            Self::Chunk { run, index } => {
                let chunk = run.plan.chunk(*index);
                Place {
                    spans: run.plan.spans(chunk),
                    device: run.plan.device(chunk),
                    memory: run.plan.memory(),
                }
            }
            Self::Answer { grant, .. } => grant.place(),
        }
    }
}

impl Tx {
    /// Takes answers that come from a device out of the queue, in order, to have them copied ahead.
    pub(super) fn stage_answers(&mut self, work: &mut Work, connection: &Connection) {
        loop {
            let Some(Response {
                outcome: Ok(grant),
                bytes,
                ..
            }) = work.responses.front_mut()
            else {
                return;
            };
            let Some(device) = grant.device.clone() else {
                return;
            };
            if self.is_on_comm(*bytes as usize) {
                return;
            }
            if self.slots_left(&connection.core.staging.pool) == 0 {
                return;
            }
            if grant.is_revoked(&connection.core.regions) {
                // The refusal keeps its place.
                return;
            }
            let Some(Response {
                transfer,
                seq,
                bytes,
                outcome: Ok(grant),
            }) = work.responses.pop_front()
            else {
                return;
            };
            let source = Source::Answer {
                transfer,
                seq,
                bytes,
                grant,
            };
            self.stage(source, &device, bytes as usize);
        }
    }

    pub(super) fn stage(&mut self, source: Source, device: &Arc<dyn Device>, bytes: usize) {
        let slots = bytes.div_ceil(self.slot_bytes);
        self.slots_left = self.slots_left.map(|left| left.saturating_sub(slots));
        let out = Outbound::new(device, bytes);
        self.staged.push_back(Staged { source, out });
    }

    /// Slots that payloads may be staged for, asked of the pool once a frame and only where something is to be staged. What cannot be copied yet is better left to other lanes, and to what
    /// is more urgent.
    pub(super) fn slots_left(&mut self, pool: &Pool) -> usize {
        if let Some(left) = self.slots_left {
            return left;
        }
        let left = if self.staged.iter().any(|s| s.out.is_unstarted()) {
            0
        } else {
            let held: usize = self.staged.iter().map(|s| s.out.slots()).sum();
            let left = DEPTH.saturating_sub(held).min(pool.left(Direction::Out));
            left.max(usize::from(self.staged.is_empty()))
        };
        self.slots_left = Some(left);
        left
    }

    /// Starts as many copies from devices as there are slots for, in the order in which they will be sent. A slot's worth
    /// to begin with: all lanes begin at once, the device copies for one after the other, and so all can soon send.
    pub(super) fn start_copies(&mut self, pool: &Arc<Pool>) {
        let mut slots: usize = self.staged.iter().map(|s| s.out.slots()).sum();
        let mut started: usize = self.staged.iter().map(|s| s.out.started()).sum();
        let is_sending = matches!(self.body, Body::Staged(_));
        let mut index = 0;
        while index < self.staged.len()
            && slots < DEPTH
            && (is_sending || started < self.slot_bytes)
        {
            let Staged { source, out } = &mut self.staged[index];
            if !out.is_unstarted() {
                index += 1;
                continue;
            }
            match out.start(source.spans(), &mut self.queues, pool) {
                Ok(Some(bytes)) => {
                    slots += 1;
                    started += bytes;
                }
                // Worth another look later.
                Ok(None) => return,
                Err(error) => {
                    out.fail(error);
                    index += 1;
                }
            }
        }
    }

    /// Begins the frame of the oldest payload from a device if its first bytes are there; says whether it did.
    pub(super) fn add_staged(&mut self, lane: &Lane, connection: &Connection) -> bool {
        while let Some(staged) = self.staged.front_mut() {
            if matches!(staged.source, Source::Chunk { .. })
                && lane.in_flight.lock().writes.len() >= connection.window
            {
                return false;
            }
            let ready = staged.out.ready(&mut self.queues);
            if let Ok(None) = ready {
                return false;
            }
            let Some(staged) = self.staged.pop_front() else {
                return false;
            };
            match ready {
                Ok(_) => {
                    self.begin_staged(staged, lane);
                    self.start_copies(&connection.core.staging.pool);
                    return true;
                }
                Err(error) => self.drop_staged(staged, error),
            }
        }
        false
    }

    pub(super) fn begin_staged(&mut self, staged: Staged, lane: &Lane) {
        match &staged.source {
            Source::Chunk { run, index } => {
                self.body_left = run.plan.chunk(*index).bytes;
                self.answered = false;
                let flying = Flying {
                    run: Arc::clone(run),
                    index: *index,
                };
                lane.in_flight.lock().writes.push_back(flying);
                self.encode_chunk(run, *index);
            }
            Source::Answer {
                transfer,
                seq,
                bytes,
                ..
            } => {
                self.body_left = *bytes as usize;
                self.answered = true;
                encode_answer(&mut self.head, *transfer, *seq, *bytes, 0);
            }
        }
        self.body = Body::Staged(staged);
    }

    /// A device failed before the frame of its payload had begun.
    pub(super) fn drop_staged(&mut self, mut staged: Staged, error: Error) {
        // A slot must not be used again while a copy may still write to it.
        let _ = staged.out.wait(&mut self.queues);
        match staged.source {
            Source::Chunk { run, index } => {
                let error = match run.plan.revoked() {
                    Some(memory) => Error::RegionDeregistered(memory.id),
                    None => error,
                };
                self.doomed.push((run, error, Some(index)));
            }
            Source::Answer {
                transfer,
                seq,
                grant,
                ..
            } => {
                let refusal = if grant.has_dead_memory() {
                    Refusal::Revoked
                } else {
                    tracing::warn!(%error, "a device failed, a peer's READ is refused");
                    Refusal::Device
                };
                encode_error(&mut self.head, Kind::ReadError, transfer, seq, refusal);
            }
        }
    }
}
