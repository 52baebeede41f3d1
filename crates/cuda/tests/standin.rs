//! Checks that the stand-in copies every byte, in order and with a delay, as a device does.

use std::sync::Arc;

use proptest::prelude::*;
use tcpx_cuda::{Device, Entry, Error, Queue, Range, StandIn};

const LEN: usize = 64 << 10;

fn filled(seed: u8) -> Vec<u8> {
    (0..LEN)
        .map(|i| (i as u8).wrapping_mul(31).wrapping_add((i >> 8) as u8) ^ seed)
        .collect()
}

/// Ranges of a buffer, as offsets and lengths, that do not overlap, in any order.
fn places() -> impl Strategy<Value = Vec<(usize, usize)>> {
    proptest::collection::vec((0_usize..300, 0_usize..900), 0..60)
        .prop_map(|steps| {
            let mut at = 0;
            let mut places = Vec::new();
            for (gap, len) in steps {
                at += gap;
                if at + len > LEN {
                    break;
                }
                places.push((at, len));
                at += len;
            }
            places
        })
        .prop_shuffle()
}

fn ranges(places: &[(usize, usize)], base: *const u8) -> Vec<Range> {
    let base = base.expose_provenance();
    places
        .iter()
        .map(|&(at, len)| Range {
            address: base + at,
            len,
        })
        .collect()
}

fn total(places: &[(usize, usize)]) -> usize {
    places.iter().map(|place| place.1).sum()
}

fn picked(bytes: &[u8], places: &[(usize, usize)]) -> Vec<u8> {
    places
        .iter()
        .flat_map(|&(at, len)| &bytes[at..][..len])
        .copied()
        .collect()
}

fn spread(bytes: &[u8], places: &[(usize, usize)], memory: &mut [u8]) {
    let mut rest = bytes;
    for &(at, len) in places {
        memory[at..][..len].copy_from_slice(&rest[..len]);
        rest = &rest[len..];
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn gather_and_scatter_move_every_byte(from in places(), to in places(), seed in any::<u64>()) {
        let device = StandIn::new(seed);
        let mut queue = device.queue().unwrap();
        let pinned = device.pin(LEN).unwrap();
        let source = filled(seed as u8);
        let mut target = filled(!seed as u8);
        let mut expected = target.clone();

        // In order: the scatter copies on what the gather has fetched.
        let target_ranges = ranges(&to, target.as_mut_ptr());
        // SAFETY: all memory stays valid, and is not accessed, until the wait has ended.
        unsafe {
            pinned.address().write_bytes(0xee, LEN);
            queue.gather(&ranges(&from, source.as_ptr()), pinned.address()).unwrap();
            let ticket = queue.scatter(pinned.address(), &target_ranges).unwrap();
            queue.wait(ticket).unwrap();
        }
        let mut brought = picked(&source, &from);
        brought.resize(LEN, 0xee);
        spread(&brought, &to, &mut expected);
        // SAFETY: no copy is in flight.
        let found = unsafe { std::slice::from_raw_parts(pinned.address(), LEN) };
        prop_assert!(found == brought);
        prop_assert!(target == expected);
    }

    #[test]
    fn copy_and_unpack_move_every_byte(mut from in places(), mut to in places(), seed in any::<u64>()) {
        let bytes = total(&from).min(total(&to));
        for list in [&mut from, &mut to] {
            let mut left = bytes;
            for place in list {
                place.1 = place.1.min(left);
                left -= place.1;
            }
        }
        let device = StandIn::new(seed);
        let mut queue = device.queue().unwrap();
        let source = filled(1);
        let (mut target, mut other) = (filled(2), filled(3));
        let (mut expected, mut other_expected) = (target.clone(), other.clone());
        let entries: Vec<Entry> = to
            .iter()
            .map(|&(at, len)| Entry { from: (LEN - at - len) as u32, len: len as u32, to: at as u64 })
            .collect();
        // SAFETY: all memory stays valid, and is not accessed, until the wait has ended.
        unsafe {
            let to = ranges(&to, target.as_mut_ptr());
            queue.copy(&ranges(&from, source.as_ptr()), &to).unwrap();
            let bases = (source.as_ptr().expose_provenance(), other.as_mut_ptr().expose_provenance());
            let ticket = queue.unpack(bases.0, bases.1, &entries).unwrap();
            queue.wait(ticket).unwrap();
        }
        spread(&picked(&source, &from), &to, &mut expected);
        for entry in &entries {
            let from = &source[entry.from as usize..][..entry.len as usize];
            other_expected[entry.to as usize..][..entry.len as usize].copy_from_slice(from);
        }
        prop_assert!(target == expected);
        prop_assert!(other == other_expected);
    }
}

/// Starts one copy of one byte.
fn one(queue: &mut dyn Queue, byte: &mut [u8; 2]) -> Result<tcpx_cuda::Ticket, Error> {
    let address = byte.as_mut_ptr().expose_provenance();
    let (from, to) = (
        Range { address, len: 1 },
        Range {
            address: address + 1,
            len: 1,
        },
    );
    // SAFETY: callers keep the bytes until the queue is dropped.
    unsafe { queue.copy(&[from], &[to]) }
}

#[test]
fn a_failure_is_for_every_later_ticket_and_none_before() {
    let device = StandIn::new(1).failing_after(3);
    let mut bytes = [1, 2];
    let mut queue = device.queue().unwrap();
    let mut tickets = Vec::new();
    for _ in 0..6 {
        // The failure may already be known when the later ones are started.
        tickets.extend(one(&mut *queue, &mut bytes));
    }
    assert!(tickets.len() >= 4, "the failure came too early");
    for ticket in &tickets[..3] {
        queue.wait(*ticket).unwrap();
    }
    for ticket in &tickets[3..] {
        assert_eq!(queue.wait(*ticket), Err(Error::Injected { copies: 3 }));
    }
    for ticket in &tickets[..3] {
        assert_eq!(queue.is_done(*ticket), Ok(true));
    }
    assert_eq!(
        one(&mut *queue, &mut bytes),
        Err(Error::Injected { copies: 3 })
    );
}

#[test]
fn a_full_queue_says_so_and_recovers() {
    let device = StandIn::new(2);
    let mut bytes = [7, 0];
    let mut queue = device.queue().unwrap();
    let mut last = None;
    let mut accepted = 0;
    let full = loop {
        match one(&mut *queue, &mut bytes) {
            Ok(ticket) => {
                assert!(Some(ticket) > last);
                last = Some(ticket);
                accepted += 1;
            }
            Err(error) => break error,
        }
        assert!(accepted < 1_000_000, "the queue takes everything");
    };
    assert!(matches!(full, Error::QueueFull { .. }));
    queue.wait(last.unwrap()).unwrap();
    let ticket = one(&mut *queue, &mut bytes).unwrap();
    queue.wait(ticket).unwrap();
    drop(queue);
    assert_eq!(bytes, [7, 7]);
}

#[test]
fn dropping_a_queue_waits_for_its_copies() {
    for seed in 0..20 {
        let device = StandIn::new(seed);
        let mut bytes = [9, 0];
        let mut queue = device.queue().unwrap();
        one(&mut *queue, &mut bytes).unwrap();
        drop(queue);
        assert_eq!(bytes, [9, 9]);
    }
}

#[test]
fn lists_of_different_length_are_refused() {
    let mut queue = StandIn::new(3).queue().unwrap();
    let bytes = [0_u8; 8];
    let address = bytes.as_ptr().addr();
    // SAFETY: nothing is copied.
    let outcome = unsafe { queue.copy(&[Range { address, len: 8 }], &[Range { address, len: 7 }]) };
    assert_eq!(outcome, Err(Error::Lengths { from: 8, to: 7 }));
}

#[test]
fn devices_are_told_apart() {
    let (one, other): (Arc<dyn Device>, Arc<dyn Device>) =
        (Arc::new(StandIn::new(1)), Arc::new(StandIn::new(1)));
    assert!(one.is_same(&*one) && !one.is_same(&*other));
}

#[test]
fn pinned_memory_is_zeroed_and_aligned() {
    let pinned = StandIn::new(1).pin(5000).unwrap();
    assert_eq!((pinned.len(), pinned.address().addr() % 4096), (5000, 0));
    // SAFETY: nothing else uses the memory.
    let bytes = unsafe { std::slice::from_raw_parts(pinned.address(), pinned.len()) };
    assert!(bytes.iter().all(|byte| *byte == 0));
    assert!(StandIn::new(1).pin(0).unwrap().is_empty());
}
