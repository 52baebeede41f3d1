//! Shared copies from a device to slots.

use super::*;

#[test]
fn pending_answers_share_a_slot_and_a_copy() {
    let (device, copies) = counting(StandIn::new(1));
    let pool = Pool::new(SLOT, 8 * SLOT);
    let mut out = StagedSend::new(Arc::clone(&pool));
    let memory: Vec<_> = (0..5)
        .map(|i| Memory::new(&[100 + i, 50], 3, |at| (at * 7 + i) as u8))
        .collect();
    for (seq, memory) in memory.iter().enumerate() {
        assert!(out.has_room(150, None));
        out.push(answer(seq as u32, &device, memory));
    }
    out.step(true).unwrap();
    assert_eq!((copies(), pool.left(Direction::Out)), (1, 3));
    for memory in &memory {
        assert_eq!(
            pool.left(Direction::Out),
            3,
            "the slot is held to its last part"
        );
        assert_eq!(send_next(&mut out).unwrap(), memory.content());
    }
    assert_eq!((copies(), pool.left(Direction::Out)), (1, 4));
    assert!(!out.is_busy());
}

#[test]
fn payloads_that_arrive_during_a_send_share_a_copy() {
    let (device, copies) = counting(StandIn::new(2));
    let mut out = StagedSend::new(Pool::new(SLOT, 8 * SLOT));
    let memory = some_memory(100);
    let push = |out: &mut StagedSend, seq| {
        out.push(answer(seq, &device, &memory));
        out.step(true).unwrap();
    };
    push(&mut out, 0);
    assert_eq!(copies(), 1, "nothing is being sent: copied at once");
    assert_eq!(begin(&mut out).unwrap(), 100);
    push(&mut out, 1);
    assert_eq!(copies(), 2, "nothing is copied ahead: copied at once");
    push(&mut out, 2);
    push(&mut out, 3);
    assert_eq!(copies(), 2);
    send(&mut out, 100, 100);
    assert_eq!(begin(&mut out).unwrap(), 100);
    out.step(true).unwrap();
    assert_eq!(copies(), 3, "both share one copy");
    send(&mut out, 100, 100);
    for _ in 0..2 {
        assert_eq!(send_next(&mut out).unwrap(), memory.content());
    }
    assert_eq!(copies(), 3);
}

#[test]
fn all_slots_are_filled_while_the_device_is_late() {
    let (device, copies) = counting(StandIn::new(9));
    let mut out = StagedSend::new(Pool::new(SLOT, 16 * SLOT));
    let memory = some_memory(SLOT);
    for round in 0..2 {
        let before = copies();
        for seq in 0..DEPTH + 1 {
            out.push(answer(seq as u32, &device, &memory));
        }
        out.step(true).unwrap();
        assert_eq!(copies(), before + 1, "at first, round {round}");
        // The socket takes the whole payload at once, and the next one is not copied yet.
        let bytes = begin(&mut out).unwrap();
        send(&mut out, bytes, usize::MAX);
        out.step(true).unwrap();
        assert_eq!(copies(), before + 1 + DEPTH, "round {round}");
        for _ in 0..DEPTH {
            assert_eq!(send_next(&mut out).unwrap(), memory.content());
        }
        assert!(!out.is_busy());
    }
}

#[test]
fn scattered_copies_wait_for_room_in_the_batches() {
    const LARGE: usize = 1 << 20;
    let (device, counts) = counted(StandIn::new(10));
    let copies = || counts.copies.load(Ordering::Relaxed);
    let pool = Pool::new(LARGE, 16 * LARGE);
    // Memory for one copy in each direction.
    pool.add_batches(Batches::new(device.as_ref(), 2 * LARGE, LARGE).unwrap());
    let mut out = StagedSend::new(pool);
    let memory = Memory::new(&[6000, 10_384].repeat(64), 3, |i| (i * 31 + i / 251) as u8);
    for seq in 0..2 {
        out.push(answer(seq, &device, &memory));
    }
    out.step(true).unwrap();
    assert_eq!(copies(), 2, "to the ring and out of it");
    let bytes = begin(&mut out).unwrap();
    counts.is_late.store(true, Ordering::Relaxed);
    assert_eq!(send(&mut out, bytes, usize::MAX), memory.content());
    out.step(true).unwrap();
    assert_eq!(copies(), 2, "the memory is in use, as far as is known");
    counts.is_late.store(false, Ordering::Relaxed);
    crate::testing::wait_until("the memory is free", || {
        out.step(true).unwrap();
        copies() == 4
    });
    assert!(out.poll_over().is_some());
    assert_eq!(send_next(&mut out).unwrap(), memory.content());
}

#[test]
fn room_is_counted_in_bytes_of_slots() {
    let (device, copies) = counting(StandIn::new(3));
    let push_all = |bytes: usize| {
        let mut out = StagedSend::new(Pool::new(SLOT, 16 * SLOT));
        let memory = some_memory(bytes);
        let mut pushed = 0;
        while out.has_room(bytes, None) {
            out.push(answer(pushed, &device, &memory));
            pushed += 1;
        }
        out.step(true).unwrap();
        assert!(!out.has_room(bytes, None));
        out.close();
        pushed as usize
    };
    assert_eq!(push_all(SLOT), DEPTH);
    assert_eq!(push_all(SLOT / 4), 4 * DEPTH);
    // Two payloads of this length do not fit together.
    assert_eq!(push_all(SLOT / 2 + 1), DEPTH);
    assert_eq!(push_all(1), MAX_QUEUED);
    // Before anything is sent, one slot's worth is copied.
    assert_eq!(copies(), 5);
}

#[test]
fn lone_run_is_left_to_other_lanes_although_its_chunks_fit() {
    let (device, copies) = counting(StandIn::new(4));
    let mut out = StagedSend::new(Pool::new(16 * SLOT, 256 * SLOT));
    let memory = some_memory(64 * SLOT);
    let run = write(1, &device, &memory);
    assert_eq!(run.plan.len(), 64);
    let push_all = |out: &mut StagedSend| {
        let mut pushed = 0;
        while out.has_room(SLOT, Some(&run)) {
            out.push(chunk(&run));
            pushed += 1;
        }
        out.step(true).unwrap();
        pushed
    };
    assert_eq!(push_all(&mut out), DEPTH);
    assert_eq!(push_all(&mut out), 0);
    assert_eq!(copies(), 1, "they share a slot all the same");
    // Payloads that no other lane can take may join.
    assert!(out.has_room(SLOT, None));
    let lone = some_memory(SLOT);
    for id in 2..20 {
        let other = write(id, &device, &lone);
        assert!(out.has_room(SLOT, Some(&other)));
        out.push(chunk(&other));
    }
    // Each chunk that leaves makes room for the next.
    begin(&mut out).unwrap();
    assert_eq!(push_all(&mut out), 1);
    out.close();
}

#[test]
fn lane_queues_at_most_an_equal_share_of_a_lone_run() {
    let (device, _) = counting(StandIn::new(4));
    let memory = some_memory(16 * SLOT);
    let most_queued = |lanes: usize| {
        let mut out = StagedSend::new(Pool::new(SLOT, 64 * SLOT));
        let run = write(1, &device, &memory);
        assert_eq!(run.plan.len(), 16);
        run.lanes.store(lanes, Ordering::Relaxed);
        let mut pushed = 0;
        while out.has_room(SLOT, Some(&run)) {
            out.push(chunk(&run));
            pushed += 1;
        }
        out.step(true).unwrap();
        out.close();
        pushed
    };
    assert_eq!(most_queued(16), 1);
    assert_eq!(most_queued(8), 2);
    assert_eq!(most_queued(7), 3);
    assert_eq!(most_queued(1), DEPTH);
}

#[test]
fn run_that_waits_for_a_slot_is_left_to_other_lanes() {
    let (device, _) = counting(StandIn::new(4));
    let pool = Pool::new(16 * SLOT, 2 * 16 * SLOT);
    let held = pool.take(device.as_ref(), Direction::Out).unwrap();
    let mut out = StagedSend::new(Arc::clone(&pool));
    let memory = some_memory(64 * SLOT);
    let run = write(1, &device, &memory);
    assert!(out.has_room(SLOT, Some(&run)), "one may always wait");
    out.push(chunk(&run));
    out.step(true).unwrap();
    assert!(!out.has_room(SLOT, Some(&run)));
    assert!(out.has_room(SLOT, None), "an answer waits with it");
    drop(held);
    out.step(true).unwrap();
    out.close();
}

#[test]
fn failed_shared_copy_fails_only_its_payloads() {
    let (device, copies) = counting(StandIn::new(5).failing_after(1));
    let pool = Pool::new(SLOT, 8 * SLOT);
    let mut out = StagedSend::new(Arc::clone(&pool));
    let memory = some_memory(100);
    let mut outcomes = Vec::new();
    for payloads in [2, 3, 1] {
        for seq in 0..payloads {
            out.push(answer(seq, &device, &memory));
        }
        out.step(true).unwrap();
        for _ in 0..payloads {
            outcomes.push(send_next(&mut out).is_ok());
        }
    }
    // The third group has another queue.
    assert_eq!(outcomes, [true, true, false, false, false, true]);
    assert_eq!(copies(), 3);
    assert_eq!(pool.left(Direction::Out), 4);
    assert!(!out.is_busy());
}

#[test]
fn releasing_one_payload_keeps_the_others_of_its_slot() {
    for begun in [false, true] {
        // No more memory can be pinned.
        let device: Arc<dyn Device> = Arc::new(Scarce::new(6));
        let pool = Pool::new(2 * SLOT, 4 * SLOT);
        let mut out = StagedSend::new(Arc::clone(&pool));
        let (mut written, answered) = (some_memory(SLOT), some_memory(100));
        let expected = written.content();
        let run = write(1, &device, &written);
        out.push(chunk(&run));
        out.push(answer(1, &device, &answered));
        out.step(true).unwrap();
        if begun {
            begin(&mut out).unwrap();
        }
        out.let_go(LetGo::Aborted(&run), &mut Vec::new()).unwrap();
        written.bytes.fill(0);
        if begun {
            assert_eq!(send(&mut out, SLOT, 1000), expected);
        } else {
            assert!(matches!(send_next(&mut out), Err(Error::Aborted)));
        }
        assert_eq!(send_next(&mut out).unwrap(), answered.content());
        assert_eq!(pool.left(Direction::Out), 1);
    }
}

#[test]
fn closing_returns_shared_slots() {
    let (device, _) = counting(StandIn::new(7));
    let pool = Pool::new(SLOT, 8 * SLOT);
    let mut out = StagedSend::new(Arc::clone(&pool));
    let memory = some_memory(100);
    for seq in 0..3 {
        out.push(answer(seq, &device, &memory));
    }
    out.step(true).unwrap();
    begin(&mut out).unwrap();
    out.close();
    assert!(!out.is_busy());
    assert_eq!(pool.left(Direction::Out), 4);
}

#[test]
fn unmapped_memory_fails_only_its_own_payload() {
    let (device, copies) = counting(StandIn::new(8));
    let mut out = StagedSend::new(Pool::new(SLOT, 8 * SLOT));
    let memory = some_memory(100);
    for (seq, memory) in [&memory, &no_memory(50), &memory].into_iter().enumerate() {
        out.push(answer(seq as u32, &device, memory));
    }
    out.step(true).unwrap();
    assert_eq!(copies(), 1);
    assert_eq!(send_next(&mut out).unwrap(), memory.content());
    assert!(matches!(send_next(&mut out), Err(Error::MemoryFault)));
    assert_eq!(send_next(&mut out).unwrap(), memory.content());
    assert_eq!(copies(), 4);
}
