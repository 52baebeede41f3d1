//! Copies of single chunks, by a thread of this process.

use std::sync::Arc;

use tcpx_cuda::Device;
use tcpx_net::neighbour::{self, OwnedPass, Remote, Side};
use tcpx_net::{Cursor, Neighbour, Span, Store, copy_spans};
use tcpx_proto::frame::Status;
use tcpx_proto::lane::Op;

use super::regions::Opened;
use super::{SameHost, Trouble};
use crate::error::Error;
use crate::memory::{Copier, PendingCopy, Refusal, one_place};
use crate::trace::{self, Kind, Record, Value};
use crate::transfer::ChunkRef;

/// The peer's memory of a chunk, as this process can access it.
struct There {
    /// Addresses in the peer's address space; for device memory, in this process's.
    ranges: Vec<Remote>,
    device: Option<Arc<dyn Device>>,
    /// Gate passes: the owner cannot reclaim the memory while these are held.
    _passes: Vec<OwnedPass>,
    _opened: Vec<Arc<Opened>>,
}

impl SameHost {
    /// Copies a chunk. Must be called while revocations of local memory wait.
    pub(super) fn copy(&self, chunk: &ChunkRef) -> Result<(), Trouble> {
        let run = &chunk.run;
        if let Some(memory) = run.plan.revoked() {
            return Err(Trouble::Failed(Error::RegionDeregistered(memory.id)));
        }
        if run.is_aborted() {
            return Ok(());
        }
        let there = self.find(chunk)?;
        let Some(wired) = self.wired.get() else {
            return Err(Trouble::Path(
                "there is no connection to its process".into(),
            ));
        };
        let (op, here) = (run.plan.op, chunk.spans());
        match (chunk.device(), &there.device) {
            (None, None) => self.move_host(&wired.neighbour, op, here, &there.ranges),
            (here_on, there_on) => {
                let device = here_on.or(there_on.as_ref()).expect("one is on a device");
                let bytes = chunk.bytes();
                let slot = self.context.staging.slot(device.as_ref(), bytes);
                let slot = slot.map_err(Trouble::Failed)?;
                let between = [slot.span(0, bytes)];
                let ends = [
                    End::new(here_on, here, None),
                    End::new(there_on.as_ref(), &[], Some(&there.ranges)),
                ];
                let [from, to] = match op {
                    Op::Write => [&ends[0], &ends[1]],
                    Op::Read => [&ends[1], &ends[0]],
                };
                self.fetch(&wired.neighbour, from, &between)?;
                self.store(&wired.neighbour, &between, to)
            }
        }
    }

    /// Finds a chunk's memory at the peer, passes its gates and checks its bounds.
    fn find(&self, chunk: &ChunkRef) -> Result<There, Trouble> {
        let (regions, entries) = chunk.table_counts();
        let table = chunk
            .read_table()
            .map_err(|error| self.refused(Status::Other, &error))?;
        let mut opened = Vec::with_capacity(regions.into());
        let mut passes = Vec::with_capacity(regions.into());
        for key in table.regions() {
            // The region may have been forgotten since the run was started.
            let region = self.regions.get(&key).ok_or(Trouble::Gate(usize::MAX))?;
            passes.push(region.enter().ok_or(Trouble::Gate(region.gate))?);
            opened.push(region);
        }
        let mut ranges: Vec<Remote> = Vec::with_capacity(entries as usize);
        let mut last_region = None;
        for entry in table.entries() {
            // Decoding the table checked that the index is in range.
            let region = &opened[entry.region as usize];
            let address = region
                .locate(&entry)
                .map_err(|error| self.out_of_reach(error, &entry))?;
            let len = entry.len as usize;
            // A device does not copy across allocations,
            // and adjacent regions may be separate allocations.
            let is_same = last_region.replace(entry.region) == Some(entry.region);
            let may_join = is_same || region.device().is_none();
            match ranges.last_mut() {
                Some(last) if may_join && last.address + last.len as u64 == address => {
                    last.len += len;
                }
                _ => ranges.push(Remote { address, len }),
            }
        }
        let device = one_place(opened.iter().map(|region| region.device()));
        let device = device.map_err(|refusal| self.refused(refusal.status(), &refusal))?;
        Ok(There {
            ranges,
            device,
            _passes: passes,
            _opened: opened,
        })
    }

    fn move_host(
        &self,
        neighbour: &Neighbour,
        op: Op,
        here: &[Span],
        there: &[Remote],
    ) -> Result<(), Trouble> {
        let here = (here, Cursor::default());
        let trace = &self.context.trace;
        let began = trace.start();
        let (kind, moved) = match op {
            Op::Read => (Kind::ProcessVmReadv, neighbour.read(there, here)),
            Op::Write => (Kind::ProcessVmWritev, neighbour.write(here, there)),
        };
        trace.span(began, || match &moved {
            Ok(count) => Record::new(kind).value(Value::Bytes(*count as u64)),
            Err(_) => Record::new(kind).end(trace::End::Failed),
        });
        moved.map(drop).map_err(|error| self.trouble(error))
    }

    /// Copies from one end to a slot.
    fn fetch(
        &self,
        neighbour: &Neighbour,
        from: &End<'_>,
        slot: &[Span; 1],
    ) -> Result<(), Trouble> {
        match (from.device, from.there) {
            (Some(device), _) => {
                let spans = from.spans();
                self.by_device(|copier| {
                    copier.gather(device.as_ref(), &spans, Cursor::default(), slot[0])
                })
            }
            (None, Some(there)) => self.move_host(neighbour, Op::Read, slot, there),
            (None, None) => by_cpu(from.here, slot),
        }
    }

    /// Copies from a slot to one end.
    fn store(&self, neighbour: &Neighbour, slot: &[Span; 1], to: &End<'_>) -> Result<(), Trouble> {
        match (to.device, to.there) {
            (Some(device), _) => {
                let spans = to.spans();
                self.by_device(|copier| {
                    copier.scatter(device.as_ref(), &spans, Cursor::default(), slot[0])
                })
            }
            (None, Some(there)) => self.move_host(neighbour, Op::Write, slot, there),
            (None, None) => by_cpu(slot, to.here),
        }
    }

    /// Starts a copy of a device and waits for it. A copier has streams and pinned memory, which take
    /// longer to make than a chunk takes to copy: it is kept for the next chunk.
    fn by_device(
        &self,
        start: impl FnOnce(&mut Copier) -> Result<PendingCopy, Error>,
    ) -> Result<(), Trouble> {
        let kept = self.copiers.lock().pop();
        let mut copier = kept.unwrap_or_else(|| Copier::batching(&self.context.staging.pool));
        let outcome = start(&mut copier).and_then(|copy| copier.wait_in_company(copy));
        self.copiers.lock().push(copier);
        outcome.map_err(Trouble::Failed)
    }

    fn refused(&self, status: Status, text: &dyn ToString) -> Trouble {
        Trouble::Failed(Error::PeerRefused {
            peer: self.above.name().to_owned(),
            status,
            text: text.to_string(),
        })
    }

    fn trouble(&self, error: neighbour::Error) -> Trouble {
        match error {
            neighbour::Error::Fault {
                side: Side::Here, ..
            } => Trouble::Failed(Error::MemoryFault),
            neighbour::Error::Fault {
                side: Side::There, ..
            } => self.refused(Refusal::Fault.status(), &Refusal::Fault),
            neighbour::Error::Gone => Trouble::Gone,
            error => Trouble::Path(error.to_string()),
        }
    }

    /// Returns a chunk to its run. Returns false if the run has ended meanwhile.
    pub(super) fn give_back(&self, chunk: &ChunkRef) -> bool {
        if chunk.give_back() {
            chunk.run.conclude_failed();
            return false;
        }
        true
    }
}

/// One end of a copy that passes through a slot.
struct End<'a> {
    device: Option<&'a Arc<dyn Device>>,
    here: &'a [Span],
    /// Ranges in the peer's memory, or mapped on the device.
    there: Option<&'a [Remote]>,
}

impl<'a> End<'a> {
    fn new(
        device: Option<&'a Arc<dyn Device>>,
        here: &'a [Span],
        there: Option<&'a [Remote]>,
    ) -> Self {
        Self {
            device,
            here,
            there,
        }
    }

    /// Returns the end's memory, which is on a device.
    fn spans(&self) -> Vec<Span> {
        match self.there {
            // SAFETY: mapped in this process as long as its regions are held;
            // only a device touches it.
            Some(there) => there
                .iter()
                .map(|range| unsafe { Span::new(range.address as *mut u8, range.len) })
                .collect(),
            None => self.here.to_vec(),
        }
    }
}

fn by_cpu(from: &[Span], to: &[Span]) -> Result<(), Trouble> {
    let start = Cursor::default();
    copy_spans((from, start), (to, start), Store::Cached)
        .map(drop)
        .map_err(|_| Trouble::Failed(Error::MemoryFault))
}
