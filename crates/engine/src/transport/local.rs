//! Transfers of a session to itself: copies, checked like any peer's access.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::{Mutex, RwLock};
use tcpx_cuda::Device;
use tcpx_net::{Cursor, Span};
use tcpx_proto::frame::{Header, Kind, Status, Table};

use super::Link;
use super::tcp::{conclude_failed, fail_run};
use crate::core::Core;
use crate::error::Error;
use crate::plan::Op;
use crate::region::{Refusal, one_device};
use crate::run::{After, Run};
use crate::staging::Queues;

/// Runs up to this size are copied by the caller who posts them.
const INLINE_BYTES: u64 = 256 << 10;

/// Copies within the session.
#[derive(Default)]
pub(crate) struct Local {
    runs: Mutex<Waiting>,
    /// Held shared while memory is copied: taking it exclusively waits for all copies to end.
    copying: RwLock<()>,
    queues: Mutex<Queues>,
}

impl Local {
    /// Starts a run; small ones are over when this returns.
    pub(crate) fn submit(&self, core: &Arc<Core>, run: &Arc<Run>) {
        if run.plan.bytes <= INLINE_BYTES {
            while self.copy_chunk(core, run) {}
        } else {
            let mut waiting = self.runs.lock();
            if waiting.closed {
                drop(waiting);
                return fail_run(run, Error::Closed);
            }
            waiting.runs.push_back(Arc::clone(run));
            drop(waiting);
            core.call_any_worker();
        }
    }

    /// Makes a copy of, or into, memory of the session that no lane's locks protect. `copy` looks whether the memory is live:
    /// whoever revokes it waits for the copy.
    pub(crate) fn guarded<T>(&self, copy: impl FnOnce() -> T) -> T {
        let _copying = self.copying.read();
        copy()
    }

    /// Copies one chunk of whatever waits; false when nothing does.
    pub(crate) fn step(&self, core: &Arc<Core>) -> bool {
        let Some(run) = self.runs.lock().runs.front().cloned() else {
            return false;
        };
        if !self.copy_chunk(core, &run) {
            let runs = &mut self.runs.lock().runs;
            if runs.front().is_some_and(|front| Arc::ptr_eq(front, &run)) {
                runs.pop_front();
            }
        }
        true
    }

    /// Keeps copies from being made, as a revocation does, until what is returned goes.
    #[cfg(test)]
    pub(crate) fn hold(&self) -> parking_lot::RwLockWriteGuard<'_, ()> {
        self.copying.write()
    }

    pub(crate) fn is_busy(&self) -> bool {
        !self.runs.lock().runs.is_empty()
    }

    /// Waits until no copy is under way; those that begin later see what was revoked or aborted.
    pub(crate) fn quiesce(&self) {
        drop(self.copying.write());
    }

    /// Fails what waits, and what comes from now on.
    pub(crate) fn close(&self) {
        let mut waiting = self.runs.lock();
        waiting.closed = true;
        let runs = std::mem::take(&mut waiting.runs);
        drop(waiting);
        for run in runs {
            fail_run(&run, Error::Closed);
        }
    }

    /// Copies from one place to another. With a device on either side this waits for the device: it is the caller's
    /// own memory, and nobody else's transfer is kept waiting but by the time of one chunk.
    fn copy(&self, core: &Core, to: &Place<'_>, from: &Place<'_>) -> Result<(), Error> {
        let (Some(device), queues) = (to.device.as_ref().or(from.device.as_ref()), &self.queues)
        else {
            copy_spans(to.spans, from.spans);
            return Ok(());
        };
        let mut queues = queues.lock();
        if let (Some(a), Some(b)) = (&to.device, &from.device)
            && a.is_same(b.as_ref())
            && !overlap(to.spans, from.spans)
        {
            let copy = queues.copy(device.as_ref(), from.spans, to.spans)?;
            return queues.wait(copy);
        }
        let bytes = from.spans.iter().map(Span::len).sum();
        let slot = core.staging.slot(device.as_ref(), bytes)?;
        // SAFETY: the slot is ours until it is dropped, after the last copy that uses it.
        let between = [unsafe { Span::new(slot.address(), bytes) }];
        let start = Cursor::default();
        match &from.device {
            Some(device) => {
                let copy = queues.gather(device.as_ref(), from.spans, start, &slot, bytes)?;
                queues.wait(copy)?;
            }
            None => copy_spans(&between, from.spans),
        }
        match &to.device {
            Some(device) => {
                let copy = queues.scatter(device.as_ref(), to.spans, start, &slot, bytes)?;
                queues.wait(copy)
            }
            None => {
                copy_spans(to.spans, &between);
                Ok(())
            }
        }
    }

    fn copy_chunk(&self, core: &Arc<Core>, run: &Arc<Run>) -> bool {
        let Some(index) = run.take() else {
            return false;
        };
        let result = self.guarded(|| copy(self, core, run, index));
        let mut last = false;
        if let Err(error) = result {
            last |= run.fail(error);
        }
        last |= run.settle(1);
        if last {
            conclude(core, run);
        }
        true
    }
}

/// The copies that wait to be made.
#[derive(Default)]
struct Waiting {
    runs: VecDeque<Arc<Run>>,
    closed: bool,
}

fn copy(local: &Local, core: &Core, run: &Run, index: usize) -> Result<(), Error> {
    if let Some(memory) = run.plan.revoked() {
        return Err(Error::RegionDeregistered(memory.id));
    }
    if run.is_aborted() {
        return Ok(());
    }
    let chunk = run.plan.chunk(index);
    let header = Header {
        regions: chunk.regions,
        entries: chunk.entries,
        payload: chunk.bytes as u64,
        ..Header::new(Kind::Write, run.id)
    };
    let refused = |status, text| Error::PeerRefused {
        peer: core.name().to_owned(),
        status,
        text,
    };
    let table = Table::decode(&header, run.plan.table(chunk))
        .map_err(|e| refused(Status::Other, e.to_string()))?;
    let (mut there, mut memory) = (Vec::new(), Vec::new());
    core.regions
        .resolve(&table, &mut there, &mut memory)
        .map_err(|refusal: Refusal| refused(refusal.status(), refusal.to_string()))?;
    let there = Place {
        device: one_device(&memory).map_err(|r| refused(r.status(), r.to_string()))?,
        spans: &there,
    };
    let here = Place {
        device: run.plan.device(chunk).cloned(),
        spans: run.plan.spans(chunk),
    };
    match run.plan.op {
        Op::Write => local.copy(core, &there, &here),
        Op::Read => local.copy(core, &here, &there),
    }
}

/// Memory of one kind.
struct Place<'a> {
    device: Option<Arc<dyn Device>>,
    spans: &'a [Span],
}

/// Copies between two lists of spans of the same total length.
fn copy_spans(to: &[Span], from: &[Span]) {
    let (mut to_at, mut from_at) = (Cursor::default(), Cursor::default());
    loop {
        let (Some(target), Some(source)) = (to_at.rest(to).next(), from_at.rest(from).next())
        else {
            return;
        };
        let count = target.copy_span(source);
        to_at.advance(to, count);
        from_at.advance(from, count);
    }
}

/// Whether a byte of one list is also in the other. Lists are short: a chunk's.
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

fn conclude(core: &Arc<Core>, run: &Arc<Run>) {
    if !run.completion.commit() {
        conclude_failed(run);
        return;
    }
    match &run.after {
        After::Nothing => {}
        After::Notify(message) => core.inbox.push(core.name(), message.to_vec()),
        After::Receive(receive) => receive.landed(&Link::Local(Arc::clone(core))),
    }
    run.completion.finish();
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Instant;

    use crate::plan::{Limits, Op, Plan};
    use crate::run::{After, Run};
    use crate::testing::{LONG, session};
    use crate::{Buffer, Segment};

    /// Posted by somebody who found the session open.
    #[test]
    fn a_run_that_comes_after_the_end_fails() {
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
