//! Payloads that share slots and copies.

mod receive;
mod send;

use std::cell::Cell;
use std::sync::atomic::AtomicUsize;
use std::time::{Duration, Instant};

use tcpx_cuda::{Batches, Current, DeviceMemory, Entry, Path, Pinned, Queue, Range};
use tcpx_proto::lane::{ChunkId, Op};

use super::*;
use crate::carrier::staged::send::{MAX_QUEUED, StagedSend};
use crate::carrier::{Begin, LetGo, Outgoing, SendCarrier};
use crate::config::staging::DEPTH;
use crate::memory::Grant;
use crate::transfer::{After, Limits, Offered, Pieces, Plan, Run};

type Code<T> = Result<T, tcpx_cuda::Error>;

/// A stand-in that counts started copies, and the ranges that they scatter to; no copy ends while it
/// is late.
#[derive(Debug)]
struct Counting(StandIn, Arc<Counts>);

#[derive(Debug, Default)]
struct Counts {
    copies: AtomicUsize,
    scattered: AtomicUsize,
    is_late: AtomicBool,
}

struct CountingQueue(Box<dyn Queue>, Arc<Counts>);

impl CountingQueue {
    fn count(&mut self) -> &mut dyn Queue {
        self.1.copies.fetch_add(1, Ordering::Relaxed);
        self.0.as_mut()
    }
}

/// Returns a device and a function that returns the number of copies started on it.
fn counting(device: StandIn) -> (Arc<dyn Device>, impl Fn() -> usize) {
    let (device, counts) = counted(device);
    (device, move || counts.copies.load(Ordering::Relaxed))
}

fn counted(device: StandIn) -> (Arc<dyn Device>, Arc<Counts>) {
    let counts = Arc::new(Counts::default());
    (Arc::new(Counting(device, Arc::clone(&counts))), counts)
}

impl Device for Counting {
    fn queue_by(&self, path: Path) -> Code<Box<dyn Queue>> {
        let queue = self.0.queue_by(path)?;
        Ok(Box::new(CountingQueue(queue, Arc::clone(&self.1))))
    }

    fn pin(&self, len: usize) -> Code<Pinned> {
        self.0.pin(len)
    }

    fn allocate(&self, len: usize) -> Code<DeviceMemory> {
        self.0.allocate(len)
    }

    fn make_current(&self) -> Code<Current> {
        self.0.make_current()
    }

    fn ordinal(&self) -> u32 {
        0
    }

    fn identity(&self) -> usize {
        self.0.identity()
    }
}

impl Queue for CountingQueue {
    unsafe fn gather(&mut self, from: &[Range], to: *mut u8) -> Code<tcpx_cuda::Ticket> {
        // SAFETY: passed on from the caller.
        unsafe { self.count().gather(from, to) }
    }

    unsafe fn scatter(&mut self, from: *const u8, to: &[Range]) -> Code<tcpx_cuda::Ticket> {
        self.1.scattered.fetch_add(to.len(), Ordering::Relaxed);
        // SAFETY: passed on from the caller.
        unsafe { self.count().scatter(from, to) }
    }

    unsafe fn copy(&mut self, from: &[Range], to: &[Range]) -> Code<tcpx_cuda::Ticket> {
        // SAFETY: passed on from the caller.
        unsafe { self.count().copy(from, to) }
    }

    unsafe fn unpack(&mut self, from: usize, to: usize, e: &[Entry]) -> Code<tcpx_cuda::Ticket> {
        // SAFETY: passed on from the caller.
        unsafe { self.count().unpack(from, to, e) }
    }

    fn is_done(&mut self, ticket: tcpx_cuda::Ticket) -> Code<bool> {
        match self.1.is_late.load(Ordering::Relaxed) {
            true => Ok(false),
            false => self.0.is_done(ticket),
        }
    }
}

/// Makes the answer to a READ of the whole memory.
fn answer(seq: u32, device: &Arc<dyn Device>, memory: &Memory) -> Outgoing {
    let mut grant = Grant::default();
    grant.spans.clone_from(&memory.spans);
    grant.device = Some(Arc::clone(device));
    Outgoing::Answer {
        id: ChunkId { transfer: 1, seq },
        bytes: memory.spans.iter().map(Span::len).sum(),
        grant,
    }
}

/// Makes a WRITE of the whole memory, in chunks of [`SLOT`] bytes.
fn write(id: u64, device: &Arc<dyn Device>, memory: &Memory) -> Arc<Run> {
    let limits = Limits {
        chunk_bytes: SLOT / 2,
        lanes: 16,
    };
    let pieces = Pieces::unregistered(memory.spans[0], Some(device));
    let plan = Arc::new(Plan::new(Op::Write, pieces, limits));
    Arc::new(Run::new(id, plan, After::Nothing))
}

fn chunk(run: &Arc<Run>) -> Outgoing {
    Outgoing::Chunk(Offered::next(run).unwrap())
}

fn some_memory(len: usize) -> Memory {
    Memory::new(&[len], 0, |i| (i * 31 + i / 251) as u8)
}

/// Makes memory that is not mapped.
fn no_memory(len: usize) -> Memory {
    // SAFETY: used only by copies that check whether memory is mapped.
    let nowhere = unsafe { Span::new(std::ptr::without_provenance_mut(4096), len) };
    Memory {
        bytes: Vec::new(),
        spans: vec![nowhere],
    }
}

/// Waits until the next frame begins; returns its length, or the error if it failed before.
fn begin(out: &mut StagedSend) -> Result<usize, Error> {
    loop {
        match out.poll_begin() {
            Begin::Frame(payload) => return Ok(payload.bytes()),
            Begin::Failed(_, error) => return Err(error),
            Begin::Nothing => std::thread::yield_now(),
        }
    }
}

/// Takes `bytes` bytes of the frame that has begun, at most `step` at a time.
fn send(out: &mut StagedSend, bytes: usize, step: usize) -> Vec<u8> {
    let mut sent = Vec::new();
    while sent.len() < bytes {
        let Some((spans, at)) = out.ready().unwrap() else {
            continue;
        };
        let ready = at.rest(spans).next().unwrap();
        let count = ready.len().min(step);
        let mut part = vec![0; ready.len()];
        ready.copy_to(&mut part).unwrap();
        sent.extend_from_slice(&part[..count]);
        out.sent(count).unwrap();
    }
    sent
}

/// Sends the next payload completely.
fn send_next(out: &mut StagedSend) -> Result<Vec<u8>, Error> {
    let bytes = begin(out)?;
    out.step(true).unwrap();
    let sent = send(out, bytes, usize::MAX);
    assert!(out.poll_over().is_some());
    Ok(sent)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]
    #[test]
    fn payloads_arrive_byte_for_byte_and_in_order(
        payloads in prop::collection::vec(
            (prop::collection::vec(1usize..3000, 1..6), any::<bool>(), 1usize..5),
            1..24,
        ),
        slots in 1usize..6,
        step in 1usize..5000,
        seed in any::<u64>(),
    ) {
        let device: Arc<dyn Device> = Arc::new(StandIn::new(seed));
        let pool = Pool::new(SLOT, 2 * slots * SLOT);
        let mut out = StagedSend::new(Arc::clone(&pool));
        let mut inbound = StagedReceive::new(pool);
        let sources: Vec<_> = payloads
            .iter()
            .enumerate()
            .map(|(i, (lengths, ..))| Memory::new(lengths, 3, |at| (at * 31 + i * 7) as u8))
            .collect();
        let total = |memory: &Memory| memory.spans.iter().map(Span::len).sum::<usize>();
        // The other side has different blocks.
        let targets: Vec<_> = sources
            .iter()
            .map(|source| Memory::new(&[1, total(source) - 1], 5, |_| 0xee))
            .collect();
        let (mut pushed, mut begun, mut landed) = (0, 0, Vec::new());
        while landed.len() < payloads.len() {
            // Push several payloads together, as far as there is room.
            let together = payloads[pushed.min(payloads.len() - 1)].2;
            for _ in 0..together {
                if pushed < payloads.len() && out.has_room(total(&sources[pushed]), None) {
                    out.push(answer(pushed as u32, &device, &sources[pushed]));
                    pushed += 1;
                }
            }
            out.step(true).unwrap();
            if let Begin::Frame(payload) = out.poll_begin() {
                let bytes = payload.bytes();
                out.step(true).unwrap();
                let sent = send(&mut out, bytes, step);
                let more = payloads[begun].1 && begun + 1 < payloads.len();
                inbound.begin(more);
                let there = place(&device, &targets[begun].spans);
                let mut done = 0;
                while done < bytes {
                    let Some(mut room) = inbound.room(&there, bytes - done).unwrap() else {
                        landed.extend(inbound.poll_over().map(|over| over.payload));
                        continue;
                    };
                    let count = (bytes - done).min(step).min(room.bytes);
                    room.at.copy_in(room.spans, &sent[done..done + count]).unwrap();
                    done += count;
                    inbound.filled(&there, count, done == bytes).unwrap();
                }
                prop_assert!(inbound.push(ticket(), begun as u32).is_none());
                begun += 1;
            }
            while let Some(over) = inbound.poll_over() {
                prop_assert!(over.error.is_none());
                landed.push(over.payload);
            }
        }
        let in_order: Vec<_> = (0..payloads.len() as u32).collect();
        prop_assert_eq!(landed, in_order);
        for (source, target) in sources.iter().zip(&targets) {
            prop_assert_eq!(source.content(), target.content());
            prop_assert_eq!(&target.bytes[1..6], &[0xee; 5], "gaps are left alone");
        }
        prop_assert!(!out.is_busy() && !inbound.is_busy());
    }
}
