//! Transfers of a session to itself: copies, checked like any peer's access.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::{Mutex, RwLock};
use tcpx_cuda::Device;
use tcpx_net::{Cursor, Span};
use tcpx_proto::frame::{Header, Kind, Status, Table};

use super::Link;
use super::tcp::conclude_failed;
use crate::core::Core;
use crate::error::Error;
use crate::plan::Op;
use crate::region::{Refusal, one_device};
use crate::run::{After, Run};
use crate::staging::Queues;

/// Runs up to this size are copied by the caller who posts them.
const INLINE_BYTES: u64 = 256 << 10;

/// The copies that wait to be made.
#[derive(Default)]
pub(crate) struct Local {
    runs: Mutex<VecDeque<Arc<Run>>>,
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
            self.runs.lock().push_back(Arc::clone(run));
            core.call_any_worker();
        }
    }

    /// Copies one chunk of whatever waits; false when nothing does.
    pub(crate) fn step(&self, core: &Arc<Core>) -> bool {
        let mut runs = self.runs.lock();
        let Some(run) = runs.front().cloned() else {
            return false;
        };
        drop(runs);
        if !self.copy_chunk(core, &run) {
            runs = self.runs.lock();
            if runs.front().is_some_and(|front| Arc::ptr_eq(front, &run)) {
                runs.pop_front();
            }
        }
        true
    }

    pub(crate) fn is_busy(&self) -> bool {
        !self.runs.lock().is_empty()
    }

    /// Waits until no copy is under way; those that begin later see what was revoked or aborted.
    pub(crate) fn quiesce(&self) {
        drop(self.copying.write());
    }

    /// Fails what waits.
    pub(crate) fn close(&self) {
        for run in std::mem::take(&mut *self.runs.lock()) {
            if run.fail(Error::Closed) {
                conclude_failed(&run);
            }
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
        let result = {
            let _copying = self.copying.read();
            copy(self, core, run, index)
        };
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
