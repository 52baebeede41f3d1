//! Staging through the stand-in for a device, which copies on its own thread.

mod shared;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use proptest::prelude::*;
use tcpx_cuda::{Device, StandIn};
use tcpx_net::{Cursor, Span};

use tcpx_proto::lane::{Landing, Ticket};

use super::StagedReceive;
use super::send::Outbound;
use crate::carrier::ReceiveCarrier;
use crate::error::Error;
use crate::memory::{Copier, Direction, Place, Pool};

const SLOT: usize = 4096;

/// Spans of the given lengths with gaps between them, and the memory that contains them.
struct Memory {
    bytes: Vec<u8>,
    spans: Vec<Span>,
}

impl Memory {
    fn new(lengths: &[usize], gap: usize, fill: impl Fn(usize) -> u8) -> Self {
        let total: usize = lengths.iter().map(|len| len + gap).sum();
        let mut bytes: Vec<u8> = (0..total).map(fill).collect();
        let base = bytes.as_mut_ptr();
        let mut at = 0;
        let spans = lengths
            .iter()
            .map(|&len| {
                // SAFETY: inside `bytes`, which lives as long as the spans and is not touched
                // while they are used.
                let span = unsafe { Span::new(base.wrapping_add(at), len) };
                at += len + gap;
                span
            })
            .collect();
        Self { bytes, spans }
    }

    /// Returns the bytes of the spans, back to back.
    fn content(&self) -> Vec<u8> {
        let mut out = Vec::new();
        for span in &self.spans {
            let at = out.len();
            out.resize(at + span.len(), 0);
            span.copy_to(&mut out[at..]).unwrap();
        }
        out
    }
}

/// Starts the copy of the next part, if there is a slot for it.
fn start(
    out: &mut Outbound,
    spans: &[Span],
    copier: &mut Copier,
    pool: &Arc<Pool>,
) -> Result<bool, Error> {
    let Some(slot) = pool.take(out.device(), Direction::Out)? else {
        return Ok(false);
    };
    out.start_in(&Arc::new(slot), spans, copier)?;
    Ok(true)
}

/// Sends the whole chunk, at most `step` bytes at a time.
fn take_out(
    out: &mut Outbound,
    spans: &[Span],
    copier: &mut Copier,
    pool: &Arc<Pool>,
    step: usize,
) -> Result<Vec<u8>, Error> {
    let total: usize = spans.iter().map(Span::len).sum();
    let mut bytes = Vec::new();
    while bytes.len() < total {
        while out.is_unstarted() && start(out, spans, copier, pool)? {}
        if let Some(ready) = out.ready(spans, copier)? {
            let count = ready.len().min(step);
            let at = bytes.len();
            bytes.resize(at + count, 0);
            ready.copy_to(&mut bytes[at..]).unwrap();
            out.sent(count, spans, copier)?;
        }
    }
    Ok(bytes)
}

fn ticket() -> Ticket {
    Landing::<()>::default().reserve()
}

fn place<'a>(device: &'a Arc<dyn Device>, spans: &'a [Span]) -> Place<'a> {
    Place {
        spans,
        device: Some(device),
        memory: &[],
    }
}

/// Receives bytes, at most `step` at a time; `is_whole` tells whether the payload ends with them.
fn put_part(
    inbound: &mut StagedReceive<u32>,
    place: &Place<'_>,
    bytes: &[u8],
    is_whole: bool,
    step: usize,
) -> Result<(), Error> {
    let mut done = 0;
    while done < bytes.len() {
        let left = bytes.len() - done;
        let Some(mut room) = inbound.room(place, left)? else {
            // A slot is returned when its copy is over.
            assert!(
                inbound.poll_over().is_none(),
                "nothing is over in the middle"
            );
            continue;
        };
        let count = left.min(step).min(room.bytes);
        room.at
            .copy_in(room.spans, &bytes[done..done + count])
            .unwrap();
        done += count;
        inbound.filled(place, count, is_whole && done == bytes.len())?;
    }
    Ok(())
}

/// Receives the whole chunk, at most `step` bytes at a time, and waits until it is over.
fn put_in(
    inbound: &mut StagedReceive<u32>,
    device: &Arc<dyn Device>,
    bytes: &[u8],
    spans: &[Span],
    step: usize,
) -> Result<Option<Error>, Error> {
    inbound.begin(false);
    put_part(inbound, &place(device, spans), bytes, true, step)?;
    inbound.push(ticket(), 7);
    loop {
        if let Some(over) = inbound.poll_over() {
            assert_eq!(over.payload, 7);
            return Ok(over.error);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]
    #[test]
    fn every_byte_passes_whatever_the_slots(
        lengths in prop::collection::vec(1usize..6000, 1..12),
        slots in 2usize..9,
        out_step in 1usize..9000,
        in_step in 1usize..9000,
        seed in any::<u64>(),
    ) {
        let device: Arc<dyn Device> = Arc::new(StandIn::new(seed));
        let pool = Pool::new(SLOT, slots * SLOT);
        let source = Memory::new(&lengths, 3, |i| (i * 31 + i / 251) as u8);
        let total: usize = lengths.iter().sum();

        let mut copier = Copier::default();
        let mut out = Outbound::new(&device, total);
        let bytes = take_out(&mut out, &source.spans, &mut copier, &pool, out_step).unwrap();
        prop_assert_eq!(&bytes, &source.content());

        // The other side has different pieces of the same total length.
        let target = Memory::new(&[total], 0, |_| 0xee);
        let mut inbound = StagedReceive::new(pool);
        let failed = put_in(&mut inbound, &device, &bytes, &target.spans, in_step).unwrap();
        prop_assert!(failed.is_none());
        prop_assert_eq!(&target.bytes, &bytes);
        prop_assert!(!inbound.is_busy());
    }

    #[test]
    fn scattered_targets_keep_their_gaps(
        lengths in prop::collection::vec(1usize..3000, 1..20),
        step in 1usize..5000,
    ) {
        let device: Arc<dyn Device> = Arc::new(StandIn::new(3));
        let pool = Pool::new(SLOT, 4 * SLOT);
        let total: usize = lengths.iter().sum();
        let bytes: Vec<u8> = (0..total).map(|i| (i * 7 + 1) as u8).collect();
        let target = Memory::new(&lengths, 5, |_| 0xee);
        let mut inbound = StagedReceive::new(pool);
        put_in(&mut inbound, &device, &bytes, &target.spans, step).unwrap();
        prop_assert_eq!(&target.content(), &bytes);
        let touched = target.bytes.iter().filter(|b| **b != 0xee).count();
        prop_assert!(touched <= total, "gaps are left alone");
    }
}

#[test]
fn released_memory_is_no_longer_needed_to_send_the_bytes() {
    let device: Arc<dyn Device> = Arc::new(StandIn::new(5));
    let pool = Pool::new(SLOT, 2 * SLOT);
    let mut source = Memory::new(&[5 * SLOT + 17], 0, |i| (i * 13) as u8);
    let expected = source.content();
    let mut copier = Copier::default();
    let mut out = Outbound::new(&device, expected.len());
    assert!(start(&mut out, &source.spans, &mut copier, &pool).unwrap());
    out.let_go(&source.spans, &mut copier).unwrap();
    source.bytes.fill(0);
    let bytes = take_out(&mut out, &source.spans, &mut copier, &pool, 1000).unwrap();
    assert_eq!(bytes, expected);
}

#[test]
fn more_copies_than_a_queue_takes_at_once_wait_for_room() {
    const COPIES: usize = 1000;
    let device = StandIn::new(6);
    let pinned = device.pin(COPIES).unwrap();
    let source = Memory::new(&[1; COPIES], 1, |i| (i * 7) as u8);
    let mut copier = Copier::default();
    let mut last = None;
    for (i, span) in source.spans.iter().enumerate() {
        // SAFETY: inside the pinned memory, which outlives the copies: the last is waited for.
        let to = unsafe { Span::new(pinned.address().wrapping_add(i), 1) };
        let copy = copier.gather(&device, &[*span], Cursor::default(), to);
        last = Some(copy.unwrap());
    }
    copier.wait(last.unwrap()).unwrap();
    // SAFETY: no copy is under way.
    let copied = unsafe { std::slice::from_raw_parts(pinned.address(), COPIES) };
    assert_eq!(copied, source.content());
}

#[test]
fn later_frames_wait_for_earlier_copies() {
    let device: Arc<dyn Device> = Arc::new(StandIn::new(9));
    let pool = Pool::new(SLOT, 8 * SLOT);
    let target = Memory::new(&[100], 0, |_| 0);
    let (mut inbound, mut landing) = (StagedReceive::new(pool), Landing::default());
    inbound.begin(false);
    put_part(
        &mut inbound,
        &place(&device, &target.spans),
        &[1; 100],
        true,
        100,
    )
    .unwrap();
    inbound.push(landing.reserve(), 1);
    // Needs no copy, and still comes second.
    let second = landing.reserve();
    landing.complete(second, 2);
    let mut order = Vec::new();
    while order.len() < 2 {
        if let Some(over) = inbound.poll_over() {
            landing.complete(over.ticket, over.payload);
        }
        order.extend(landing.poll_event());
    }
    assert_eq!(order, [1, 2]);
    assert_eq!(target.bytes, [1; 100]);
}

#[test]
fn failing_device_fails_its_chunk_and_returns_the_slots() {
    let device: Arc<dyn Device> = Arc::new(StandIn::new(1).failing_after(1));
    let pool = Pool::new(SLOT, 4 * SLOT);
    let source = Memory::new(&[3 * SLOT], 0, |i| i as u8);
    let mut copier = Copier::default();
    let mut out = Outbound::new(&device, 3 * SLOT);
    let taken = take_out(&mut out, &source.spans, &mut copier, &pool, SLOT);
    assert!(matches!(taken, Err(Error::Device(_) | Error::DeviceLost)));
    let _ = out.wait(&mut copier);
    drop(out);
    assert_eq!(pool.left(Direction::Out), 2);

    let mut inbound = StagedReceive::new(Arc::clone(&pool));
    let bytes = vec![7; 3 * SLOT];
    let ended = put_in(&mut inbound, &device, &bytes, &source.spans, SLOT);
    assert!(
        matches!(ended, Err(_) | Ok(Some(_))),
        "the failed chunk counts as done"
    );
    drop(inbound);
    assert_eq!(pool.left(Direction::In), 2);
}

#[test]
fn abandoned_chunk_is_not_copied_any_more() {
    let device: Arc<dyn Device> = Arc::new(StandIn::new(1));
    let mut out = Outbound::new(&device, 3 * SLOT);
    assert!(out.is_unstarted());
    out.fail(Error::Aborted);
    assert!(
        !out.is_unstarted(),
        "the copy of an abandoned chunk would start"
    );
    assert!(out.ready(&[], &mut Copier::default()).is_err());
}

#[test]
fn failure_affects_only_its_payload() {
    let bad: Arc<dyn Device> = Arc::new(StandIn::new(1).failing_after(0));
    let good: Arc<dyn Device> = Arc::new(StandIn::new(2));
    let pool = Pool::new(SLOT, 8 * SLOT);
    let target = Memory::new(&[3 * SLOT], 0, |_| 0);
    for landed in [true, false] {
        let mut inbound = StagedReceive::new(Arc::clone(&pool));
        // The first of several parts of a payload.
        inbound.begin(false);
        let there = place(&bad, &target.spans);
        put_part(&mut inbound, &there, &[1; SLOT], false, SLOT).unwrap();
        while landed && inbound.is_busy() {
            assert!(inbound.poll_over().is_none());
        }
        // Revoke the memory of the payload.
        inbound.forget();
        // Another payload, to another device.
        let error = put_in(&mut inbound, &good, &[2; 100], &target.spans, 100).unwrap();
        assert!(error.is_none(), "{error:?}");
    }
}

/// A device for which memory can be pinned only once.
#[derive(Debug)]
struct Scarce(StandIn, AtomicBool);

impl Scarce {
    fn new(seed: u64) -> Self {
        Self(StandIn::new(seed), AtomicBool::new(false))
    }
}

impl Device for Scarce {
    fn queue_by(
        &self,
        path: tcpx_cuda::Path,
    ) -> Result<Box<dyn tcpx_cuda::Queue>, tcpx_cuda::Error> {
        self.0.queue_by(path)
    }

    fn pin(&self, len: usize) -> Result<tcpx_cuda::Pinned, tcpx_cuda::Error> {
        if self.1.swap(true, Ordering::Relaxed) {
            let reason = "none left".into();
            return Err(tcpx_cuda::Error::HostMemory { len, reason });
        }
        self.0.pin(len)
    }

    fn allocate(&self, len: usize) -> Result<tcpx_cuda::DeviceMemory, tcpx_cuda::Error> {
        self.0.allocate(len)
    }

    fn make_current(&self) -> Result<tcpx_cuda::Current, tcpx_cuda::Error> {
        self.0.make_current()
    }

    fn ordinal(&self) -> u32 {
        0
    }

    fn identity(&self) -> usize {
        self.0.identity()
    }
}

#[test]
fn releasing_memory_waits_even_if_nothing_can_be_pinned() {
    for seed in 0..200 {
        let device: Arc<dyn Device> = Arc::new(Scarce::new(seed));
        let pool = Pool::new(1 << 20, 2 << 20);
        let source = Memory::new(&[5 << 20], 0, |i| i as u8);
        let mut copier = Copier::default();
        let mut out = Outbound::new(&device, 5 << 20);
        assert!(start(&mut out, &source.spans, &mut copier, &pool).unwrap());
        assert!(out.let_go(&source.spans, &mut copier).is_err());
        let ready = out.ready(&source.spans, &mut copier).unwrap();
        assert!(ready.is_some(), "a copy was still under way");
    }
}

#[test]
fn slots_in_use_are_awaited_if_no_more_can_be_pinned() {
    let device = Scarce::new(1);
    // Eight of 32 slots are pinned at first.
    let pool = Pool::new(SLOT, 32 * SLOT);
    let take = |direction| pool.take(&device, direction);
    let held: Vec<_> = (0..8)
        .map(|_| take(Direction::In).unwrap().unwrap())
        .collect();
    assert!(take(Direction::In).unwrap().is_none());
    // No slot of this direction is in use that could be returned.
    assert!(take(Direction::Out).is_err());
    drop(held);
    assert!(take(Direction::Out).unwrap().is_some());
}

#[test]
fn lane_without_a_slot_gets_an_extra_one() {
    let device: Arc<dyn Device> = Arc::new(StandIn::new(1));
    let pool = Pool::new(SLOT, 2 * SLOT);
    let held = pool.take(device.as_ref(), Direction::In).unwrap();
    let mut inbound: StagedReceive<u32> = StagedReceive::new(pool);
    let there = place(&device, &[]);
    assert!(inbound.room(&there, SLOT).unwrap().is_none());
    crate::testing::wait_until("the lane has an extra slot", || {
        inbound.room(&there, SLOT).unwrap().is_some()
    });
    drop(held);
}
