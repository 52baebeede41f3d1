//! Copies to, from and within devices.

use std::sync::Arc;

use tcpx_cuda::{BatchTicket, Batches, Device, Entry, Move, Queue, Range, Ticket, Wish};
use tcpx_net::{Cursor, Span};

use super::slots::Pool;
use crate::error::Error;
use crate::trace::{End, Kind, Record, Start};

/// Starts copies on devices and reports their completion. Has one queue for each device that it has
/// used, usually one, and adds scattered copies to the session's batches.
#[derive(Default)]
pub(crate) struct Copier {
    /// The pool that holds the batches; `None` disables batching.
    pool: Option<Arc<Pool>>,
    /// Batches by device identity, for each device used so far; `None` if the device has none.
    batches: Vec<(usize, Option<Arc<Batches>>)>,
    queues: Vec<Made>,
    made: u64,
    /// Copies that were started and are not known to be over, where there is a trace.
    traced: Vec<TracedCopy>,
    ranges: Vec<Range>,
    entries: Vec<Entry>,
}

struct Made {
    serial: u64,
    device: usize,
    queue: Box<dyn Queue>,
}

/// Copies that a copier keeps for a trace: more than any has under way.
const MAX_TRACED: usize = 64;

/// A copy that is recorded when it is over.
struct TracedCopy {
    copy: PendingCopy,
    began: Start,
    record: Record,
}

/// The outcome of adding a copy to batches.
enum Joined {
    Batch(PendingCopy),
    /// Batches suit it, and have no room for it until some of them end.
    Full,
    Unsuited,
}

/// A copy that was started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PendingCopy {
    Queued {
        /// The queue's serial number. A failed queue is replaced
        /// by a new one whose tickets restart.
        queue: u64,
        ticket: Ticket,
    },
    Batched {
        device: usize,
        ticket: BatchTicket,
    },
}

impl Copier {
    /// Makes a copier that adds scattered copies to the batches of a session.
    pub(crate) fn batching(pool: &Arc<Pool>) -> Self {
        Self {
            pool: Some(Arc::clone(pool)),
            ..Self::default()
        }
    }

    /// Starts copying device memory, from the position of `cursor` in `spans`, to pinned memory,
    /// until `to` is full.
    pub(crate) fn gather(
        &mut self,
        device: &dyn Device,
        spans: &[Span],
        cursor: Cursor,
        to: Span,
    ) -> Result<PendingCopy, Error> {
        self.collect(spans, cursor, to.len());
        let ranges = std::mem::take(&mut self.ranges);
        let copy = self.gather_ranges(device, &ranges, to);
        self.ranges = ranges;
        copy
    }

    /// Starts copying ranges of device memory, back to back,
    /// to pinned memory of the same total length.
    fn gather_ranges(
        &mut self,
        device: &dyn Device,
        from: &[Range],
        to: Span,
    ) -> Result<PendingCopy, Error> {
        let began = self.trace_start();
        let copy = match self.join(device, Move::Gather, from, to) {
            Joined::Batch(copy) => copy,
            Joined::Full | Joined::Unsuited => self.start_gather(device, from, to)?,
        };
        self.trace_copy(began, copy, Kind::CopyToHost, to.len());
        Ok(copy)
    }

    /// Does the same, unless batches suit the copy and have no room for it now: then it starts
    /// nothing, since the copy would cross the bus by itself, and returns `None`.
    pub(crate) fn gather_ranges_in_time(
        &mut self,
        device: &dyn Device,
        from: &[Range],
        to: Span,
    ) -> Result<Option<PendingCopy>, Error> {
        let began = self.trace_start();
        let copy = match self.join(device, Move::Gather, from, to) {
            Joined::Batch(copy) => copy,
            Joined::Full => return Ok(None),
            Joined::Unsuited => self.start_gather(device, from, to)?,
        };
        self.trace_copy(began, copy, Kind::CopyToHost, to.len());
        Ok(Some(copy))
    }

    fn start_gather(
        &mut self,
        device: &dyn Device,
        from: &[Range],
        to: Span,
    ) -> Result<PendingCopy, Error> {
        let at = to.address() as *mut u8;
        // SAFETY: the ranges are registered memory of the device, which stays valid until its
        // revocation has waited for this copy; `to` is pinned and is not returned before the copy
        // has completed.
        self.start(device, |queue| unsafe { queue.gather(from, at) })
    }

    /// Starts copying pinned memory to device memory, from the position of `cursor` in `spans`.
    pub(crate) fn scatter(
        &mut self,
        device: &dyn Device,
        spans: &[Span],
        cursor: Cursor,
        from: Span,
    ) -> Result<PendingCopy, Error> {
        self.collect(spans, cursor, from.len());
        let ranges = std::mem::take(&mut self.ranges);
        let copy = self.scatter_ranges(device, from, &ranges);
        self.ranges = ranges;
        copy
    }

    /// Starts copying pinned memory to ranges of device memory of the same total length.
    pub(crate) fn scatter_ranges(
        &mut self,
        device: &dyn Device,
        from: Span,
        to: &[Range],
    ) -> Result<PendingCopy, Error> {
        let began = self.trace_start();
        let copy = match self.join(device, Move::Scatter, to, from) {
            Joined::Batch(copy) => copy,
            Joined::Full | Joined::Unsuited => {
                let at = from.address() as *mut u8;
                // SAFETY: as in `start_gather`.
                self.start(device, |queue| unsafe { queue.scatter(at, to) })?
            }
        };
        self.trace_copy(began, copy, Kind::CopyToDevice, from.len());
        Ok(copy)
    }

    /// Starts copying fragments within a device to the position of the cursor in `to`. All
    /// fragments must end within 4 GiB after `base`.
    pub(crate) fn unpack(
        &mut self,
        device: &dyn Device,
        base: usize,
        from: &[Span],
        (to, at): (&[Span], Cursor),
    ) -> Result<PendingCopy, Error> {
        let mut entries = std::mem::take(&mut self.entries);
        entries.clear();
        let (mut source, mut target) = (Cursor::default(), at);
        while let (Some(from_left), Some(to_left)) =
            (source.rest(from).next(), target.rest(to).next())
        {
            let count = from_left.len().min(to_left.len());
            entries.push(Entry {
                from: (from_left.address() - base) as u32,
                len: count as u32,
                to: to_left.address() as u64,
            });
            source.advance(from, count);
            target.advance(to, count);
        }
        // SAFETY: as in `start_gather`, for both lists; the fragments stay until their receive is
        // consumed, which happens after this copy.
        let copy = self.start(device, |queue| unsafe { queue.unpack(base, 0, &entries) });
        self.entries = entries;
        copy
    }

    /// Starts copying within a device.
    pub(crate) fn copy(
        &mut self,
        device: &dyn Device,
        from: &[Span],
        to: &[Span],
    ) -> Result<PendingCopy, Error> {
        let ranges = |spans: &[Span]| spans.iter().map(range).collect::<Vec<_>>();
        let (from, to) = (ranges(from), ranges(to));
        // SAFETY: as in `start_gather`, for both lists; the caller keeps them valid.
        self.start(device, |queue| unsafe { queue.copy(&from, &to) })
    }

    /// Returns whether a copy has completed. `wish` tells how urgently the caller needs it.
    pub(crate) fn is_done(&mut self, copy: PendingCopy, wish: Wish) -> Result<bool, Error> {
        let outcome = match copy {
            PendingCopy::Queued { queue, ticket } => self.ask(queue, |q| q.is_done(ticket)),
            PendingCopy::Batched { device, ticket } => {
                let batches = self.met(device).ok_or(Error::DeviceLost)?;
                batches.is_done(ticket, wish).map_err(Error::from)
            }
        };
        if outcome != Ok(false) && !self.traced.is_empty() {
            self.trace_end(copy, outcome.is_ok());
        }
        outcome
    }

    /// Waits until a copy has completed or failed.
    pub(crate) fn wait(&mut self, copy: PendingCopy) -> Result<(), Error> {
        let outcome = match copy {
            PendingCopy::Queued { queue, ticket } => self.ask(queue, |q| q.wait(ticket)),
            PendingCopy::Batched { device, ticket } => {
                let batches = self.met(device).ok_or(Error::DeviceLost)?;
                batches.wait(ticket).map_err(Error::from)
            }
        };
        if !self.traced.is_empty() {
            self.trace_end(copy, outcome.is_ok());
        }
        outcome
    }

    /// Waits until a copy has completed or failed. Other threads do the same, so the copy may wait
    /// for a batch of theirs and join the next one.
    pub(crate) fn wait_in_company(&mut self, copy: PendingCopy) -> Result<(), Error> {
        let mut turns = 0;
        while !self.is_done(copy, Wish::Soon)? {
            tcpx_cuda::give_way(&mut turns);
        }
        Ok(())
    }

    #[inline]
    fn trace_start(&self) -> Option<Start> {
        self.pool.as_ref().and_then(|pool| pool.trace().start())
    }

    /// Notes a copy that was started, to be recorded when it is over.
    fn trace_copy(&mut self, began: Option<Start>, copy: PendingCopy, kind: Kind, bytes: usize) {
        let Some(began) = began else { return };
        if self.traced.len() == MAX_TRACED {
            // Given up, and never asked after.
            self.traced.remove(0);
        }
        let record = Record::new(kind).bytes(bytes as u64);
        self.traced.push(TracedCopy {
            copy,
            began,
            record,
        });
    }

    /// Records a copy that is over. Others may share it, and ask as well: it is recorded once.
    fn trace_end(&mut self, copy: PendingCopy, is_good: bool) {
        let Some(at) = self.traced.iter().position(|known| known.copy == copy) else {
            return;
        };
        let TracedCopy { began, record, .. } = self.traced.swap_remove(at);
        if let Some(pool) = &self.pool {
            let end = match is_good {
                true => End::Done,
                false => End::Failed,
            };
            pool.trace().span(Some(began), || record.end(end));
        }
    }

    /// Returns the batches of a device that was used before.
    fn met(&self, device: usize) -> Option<&Batches> {
        let met = self.batches.iter().find(|met| met.0 == device)?;
        met.1.as_deref()
    }

    /// Adds a copy to the device's batches, if batching suits it.
    fn join(
        &mut self,
        device: &dyn Device,
        direction: Move,
        ranges: &[Range],
        host: Span,
    ) -> Joined {
        let identity = device.identity();
        if !self.batches.iter().any(|met| met.0 == identity) {
            let found = self.pool.as_ref().and_then(|pool| pool.batches(device));
            self.batches.push((identity, found));
        }
        let Some(batches) = self.met(identity) else {
            return Joined::Unsuited;
        };
        let len = host.len();
        if !batches.suits(direction, ranges, len) {
            return Joined::Unsuited;
        }
        // SAFETY: as in `start_gather`.
        match unsafe { batches.add(direction, ranges, host.address() as *mut u8) } {
            Some(ticket) => Joined::Batch(PendingCopy::Batched {
                device: identity,
                ticket,
            }),
            None if batches.is_full(direction, len) => Joined::Full,
            None => Joined::Unsuited,
        }
    }

    /// Stores `len` bytes of device memory, from the position of `cursor` in `spans`, as ranges.
    fn collect(&mut self, spans: &[Span], cursor: Cursor, len: usize) {
        self.ranges.clear();
        self.ranges.extend(ranges_of(spans, &cursor, len));
    }

    /// Starts a copy on the queue of a device.
    fn start(
        &mut self,
        device: &dyn Device,
        start: impl Fn(&mut dyn Queue) -> Result<Ticket, tcpx_cuda::Error>,
    ) -> Result<PendingCopy, Error> {
        let identity = device.identity();
        let at = match self.queues.iter().position(|q| q.device == identity) {
            Some(at) => at,
            None => {
                self.made += 1;
                self.queues.push(Made {
                    serial: self.made,
                    device: identity,
                    queue: device.queue()?,
                });
                self.queues.len() - 1
            }
        };
        let made = &mut self.queues[at];
        let serial = made.serial;
        let mut turns = 0;
        let outcome = loop {
            match start(made.queue.as_mut()) {
                // Copies in flight make room when they complete;
                // if they fail, this one fails as well.
                Err(tcpx_cuda::Error::QueueFull { .. }) => tcpx_cuda::give_way(&mut turns),
                outcome => break outcome,
            }
        };
        match outcome {
            Ok(ticket) => Ok(PendingCopy::Queued {
                queue: serial,
                ticket,
            }),
            Err(error) => {
                self.fail(serial);
                Err(error.into())
            }
        }
    }

    fn ask<T>(
        &mut self,
        serial: u64,
        ask: impl FnOnce(&mut dyn Queue) -> Result<T, tcpx_cuda::Error>,
    ) -> Result<T, Error> {
        let made = self.queues.iter_mut().find(|q| q.serial == serial);
        let Some(made) = made else {
            return Err(Error::DeviceLost);
        };
        ask(made.queue.as_mut()).map_err(|error| match error {
            // This failure affects only this copy.
            tcpx_cuda::Error::NotMapped => Error::MemoryFault,
            error => {
                self.fail(serial);
                error.into()
            }
        })
    }

    /// Drops a failed queue, which waits until none of its copies runs any more.
    fn fail(&mut self, serial: u64) {
        self.queues.retain(|q| q.serial != serial);
    }
}

/// Returns the ranges of `len` bytes, from the position of `cursor` in `spans`.
pub(crate) fn ranges_of<'a>(
    spans: &'a [Span],
    cursor: &'a Cursor,
    len: usize,
) -> impl Iterator<Item = Range> + 'a {
    cursor.rest(spans).scan(len, |left, span| {
        let len = span.len().min(*left);
        let is_needed = *left > 0;
        *left -= len;
        is_needed.then_some(Range {
            address: span.address(),
            len,
        })
    })
}

fn range(span: &Span) -> Range {
    Range {
        address: span.address(),
        len: span.len(),
    }
}
