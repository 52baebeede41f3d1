//! Transfers of a session to itself: copies, checked like any peer's access.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use tcpx_cuda::Device;
use tcpx_net::{Cursor, Span, Store, copy_spans};
use tcpx_proto::frame::Status;

use super::desk::{Copying, INLINE_BYTES, Step, of_copy};
use super::{Above, Context, Link, Mark, Origin};
use crate::error::Error;
use crate::memory::{Copier, Refusal, one_device};
use crate::stats::{PathKind, PeerCounters};
use crate::sync::{Mutex, Rank};
use crate::transfer::{Announcement, ChunkRef, Offered, Op, Run};

/// The link of a session to itself.
pub(crate) struct Local {
    this: Weak<Self>,
    context: Arc<Context>,
    /// The peer that represents the session itself.
    above: Weak<dyn Above>,
    /// True once no more runs are accepted.
    closed: AtomicBool,
    copier: Mutex<Copier>,
    counters: Arc<PeerCounters>,
}

impl Local {
    pub(crate) fn new(context: Arc<Context>, above: Weak<dyn Above>) -> Arc<Self> {
        let counters = above.upgrade().map(|above| Arc::clone(above.counters()));
        Arc::new_cyclic(|this| Self {
            counters: counters.unwrap_or_default(),
            this: this.clone(),
            context,
            above,
            closed: AtomicBool::new(false),
            copier: Mutex::new(Rank::Local, Copier::default()),
        })
    }

    fn this(&self) -> Arc<Self> {
        self.this.upgrade().expect("the caller holds a reference")
    }

    /// Returns the session's name.
    fn name(&self) -> String {
        let above = self.above.upgrade();
        above.map_or_else(String::new, |above| above.name().to_owned())
    }

    fn refused(&self, status: Status, text: impl ToString) -> Error {
        Error::PeerRefused {
            peer: self.name(),
            status,
            text: text.to_string(),
        }
    }

    /// Checks a chunk as its owner would, and copies it.
    fn copy(&self, chunk: &ChunkRef) -> Result<(), Error> {
        let run = &chunk.run;
        if let Some(memory) = run.plan.revoked() {
            return Err(Error::RegionDeregistered(memory.id));
        }
        if run.is_aborted() {
            return Ok(());
        }
        let table = chunk
            .read_table()
            .map_err(|error| self.refused(Status::Other, error))?;
        let refused = |refusal: Refusal| self.refused(refusal.status(), refusal);
        let (mut there, mut memory) = (Vec::new(), Vec::new());
        let registry = &self.context.registry;
        registry
            .resolve(run.plan.op, &table, &mut there, &mut memory)
            .map_err(refused)?;
        let device = one_device(&memory).map_err(refused)?;
        let there = Side {
            device: device.as_ref(),
            spans: &there,
        };
        let here = Side {
            device: chunk.device(),
            spans: chunk.spans(),
        };
        match run.plan.op {
            Op::Write => self.move_bytes(&here, &there),
            Op::Read => self.move_bytes(&there, &here),
        }
    }

    /// Copies from one place to another. With a device on either side this waits for the device:
    /// the memory belongs to this session, and other transfers are delayed by one chunk at most.
    fn move_bytes(&self, from: &Side<'_>, to: &Side<'_>) -> Result<(), Error> {
        let start = Cursor::default();
        let by_cpu = |from: &[Span], to: &[Span]| {
            copy_spans((from, start), (to, start), Store::Cached)
                .map(|_| ())
                .map_err(|_| self.refused(Refusal::Fault.status(), Refusal::Fault))
        };
        let Some(device) = to.device.or(from.device) else {
            return by_cpu(from.spans, to.spans);
        };
        let mut copier = self.copier.lock();
        if let (Some(a), Some(b)) = (to.device, from.device)
            && a.is_same(b.as_ref())
            && !overlap(to.spans, from.spans)
        {
            let copy = copier.copy(device.as_ref(), from.spans, to.spans)?;
            return copier.wait(copy);
        }
        let bytes = from.spans.iter().map(Span::len).sum();
        let slot = self.context.staging.slot(device.as_ref(), bytes)?;
        let between = slot.span(0, bytes);
        match from.device {
            Some(device) => {
                let copy = copier.gather(device.as_ref(), from.spans, start, between)?;
                copier.wait(copy)?;
            }
            None => by_cpu(from.spans, &[between])?,
        }
        match to.device {
            Some(device) => {
                let copy = copier.scatter(device.as_ref(), to.spans, start, between)?;
                copier.wait(copy)
            }
            None => by_cpu(&[between], to.spans),
        }
    }

    /// Fails queued runs, and all later ones.
    fn end(&self) {
        self.closed.store(true, Ordering::SeqCst);
        for run in self.context.desk.take(self) {
            run.fail_now(Error::Closed);
        }
    }
}

impl Copying for Local {
    fn copy_chunk(&self, run: &Arc<Run>) -> Step {
        let Some(chunk) = Offered::next(run) else {
            return Step::Over;
        };
        let trace = &self.context.trace;
        let began = trace.start();
        let copied = self.context.copies.guarded(|| self.copy(&chunk));
        trace.span(began, || of_copy(&chunk, copied.is_ok()));
        let mut last = false;
        match copied {
            Err(error) => last |= run.fail(error),
            Ok(()) if run.is_aborted() => {}
            Ok(()) => {
                let is_write = run.plan.op == Op::Write;
                let bytes = chunk.bytes() as u64;
                self.counters.moved(PathKind::Local, is_write, 1, bytes);
            }
        }
        last |= run.settle(1);
        if last {
            run.conclude(|message| self.notify(run.id, message), |_| {});
        }
        Step::Copied
    }
}

impl Link for Local {
    #[cfg(test)]
    fn as_any(self: Arc<Self>) -> Arc<dyn std::any::Any + Send + Sync> {
        self
    }

    /// Small runs are over when this returns.
    fn submit(&self, run: &Arc<Run>) {
        if run.plan.bytes <= INLINE_BYTES {
            while self.copy_chunk(run) == Step::Copied {}
            return;
        }
        self.context.desk.push(run, self.this(), run.plan.len());
        // The closing thread fails the runs that were pushed before.
        if self.closed.load(Ordering::SeqCst) {
            self.end();
        }
    }

    fn notify(&self, _transfer: u64, message: &[u8]) {
        if let Some(above) = self.above.upgrade() {
            self.counters.notified(message.len());
            let from = Origin::new(above.name(), None);
            above.notified(&from, message.to_vec(), None);
        }
    }

    fn announce(&self, message: &Announcement) {
        if let Some(above) = self.above.upgrade() {
            above.announced(self.this(), message.arrival(), None);
        }
    }

    fn send_done(&self, transfer: u64, status: Status, text: &str) {
        let error = (status != Status::Ok).then(|| self.refused(status, text));
        if let Some(above) = self.above.upgrade() {
            above.sent(transfer, error);
        }
    }

    fn drive_for(&self, run: &Run) {
        self.copy_for(run);
    }

    fn copy_for(&self, run: &Run) -> Step {
        self.context.desk.step_for(run)
    }

    fn hand_over(&self) {
        self.context.desk.hand_over();
    }

    fn lanes(&self) -> usize {
        1
    }

    fn round_trip(&self, _lane: usize, _timeout: Duration) -> Result<Duration, Error> {
        Ok(Duration::ZERO)
    }

    fn error(&self) -> Option<Error> {
        None
    }

    /// Does nothing: copies check for themselves, and [`Context::let_go`] waits for them.
    fn let_go(&self, _run: &Arc<Run>) {}

    fn revoke(&self) {}

    fn mark(&self) -> Box<dyn Mark> {
        Box::new(Reached)
    }

    fn close(&self, _reason: &str, _error: Error) {
        self.end();
    }

    fn kill(&self, _error: Error) {
        self.end();
    }
}

/// A mark on a link that never has anything in flight.
struct Reached;

impl Mark for Reached {
    fn is_reached(&mut self) -> bool {
        true
    }
}

/// Memory on one side of a copy.
struct Side<'a> {
    device: Option<&'a Arc<dyn Device>>,
    spans: &'a [Span],
}

/// Returns whether the two lists share a byte. Lists are short: they belong to one chunk.
fn overlap(a: &[Span], b: &[Span]) -> bool {
    let range = |s: &Span| s.address()..s.address() + s.len();
    a.iter().any(|a| {
        let a = range(a);
        b.iter().any(|b| {
            let b = range(b);
            a.start < b.end && b.start < a.end
        })
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Instant;

    use crate::testing::{LONG, session};
    use crate::transfer::{After, Limits, Op, Plan, Run};
    use crate::{Buffer, Segment};

    /// Covers a caller that found the session open just before it closed.
    #[test]
    fn run_submitted_after_the_end_fails() {
        const LEN: usize = 1 << 20;
        let alice = session("alice");
        let [from, to] = [(); 2].map(|()| alice.register(&Buffer::new(LEN)).unwrap());
        let there = to.descriptor();
        let segment = Segment {
            local: from.at(0),
            remote: there.at(0),
            len: LEN,
        };
        let limits = Limits {
            chunk_bytes: LEN / 4,
            lanes: 1,
        };
        let plan = Plan::new(Op::Write, alice.core().resolve([segment]).unwrap(), limits);
        let run = Arc::new(Run::new(1, Arc::new(plan), After::Nothing));
        let link = alice.core().own_peer().link().unwrap();
        alice.close();
        link.submit(&run);
        assert!(run.completion.wait_until(Instant::now() + LONG));
        assert!(run.completion.error().is_some());
    }
}
