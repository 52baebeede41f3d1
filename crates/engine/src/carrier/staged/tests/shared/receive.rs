//! Shared copies from slots to a device.

use super::*;

thread_local! {
    static NOW: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// Returns a simulated time, which stands still until [`pass`].
fn clock() -> Instant {
    NOW.get().unwrap_or_else(|| {
        let now = Instant::now();
        NOW.set(Some(now));
        now
    })
}

fn pass(time: Duration) {
    NOW.set(Some(clock() + time));
}

fn receiver(pool: &Arc<Pool>) -> StagedReceive<u32> {
    StagedReceive::with_clock(Arc::clone(pool), clock)
}

/// Receives a payload completely.
fn put(
    inbound: &mut StagedReceive<u32>,
    device: &Arc<dyn Device>,
    target: &Memory,
    (name, more): (u32, bool),
    bytes: &[u8],
) {
    inbound.begin(more);
    put_part(inbound, &place(device, &target.spans), bytes, true, 1000).unwrap();
    assert!(inbound.push(ticket(), name).is_none());
}

/// Waits until everything is over; returns the names of the payloads and whether they have landed.
fn land(inbound: &mut StagedReceive<u32>) -> Vec<(u32, bool)> {
    let mut landed = Vec::new();
    while inbound.is_busy() {
        pass(Duration::from_micros(100));
        let over = inbound.poll_over();
        landed.extend(over.map(|over| (over.payload, over.error.is_none())));
    }
    landed
}

#[test]
fn consecutive_payloads_share_a_slot_and_a_copy() {
    let (device, copies) = counting(StandIn::new(1));
    let pool = Pool::new(SLOT, 8 * SLOT);
    let mut inbound = receiver(&pool);
    let targets: Vec<_> = (0..4)
        .map(|_| Memory::new(&[60, 40], 3, |_| 0xee))
        .collect();
    for (i, target) in targets.iter().enumerate() {
        let name = (i as u32, i < 3);
        put(&mut inbound, &device, target, name, &[i as u8; 100]);
        assert!(inbound.is_busy(), "the carrier must be polled again");
        assert_eq!(copies(), i / 3);
    }
    assert_eq!(pool.left(Direction::In), 3);
    assert_eq!(
        land(&mut inbound),
        [(0, true), (1, true), (2, true), (3, true)]
    );
    for (i, target) in targets.iter().enumerate() {
        assert_eq!(target.content(), [i as u8; 100]);
        assert_eq!(target.bytes.iter().filter(|b| **b == 0xee).count(), 6);
    }
    assert_eq!(pool.left(Direction::In), 4);
}

/// They may belong to adjacent regions, which a device does not copy across.
#[test]
fn adjacent_spans_are_not_joined_but_parts_of_a_span_are() {
    let (device, counts) = counted(StandIn::new(1));
    let pool = Pool::new(SLOT, 8 * SLOT);
    let mut inbound = receiver(&pool);
    let target = Memory::new(&[60, 40], 0, |_| 0xee);
    inbound.begin(false);
    // Arrives in parts that end inside the first span, and inside the second.
    put_part(
        &mut inbound,
        &place(&device, &target.spans),
        &[7; 100],
        true,
        25,
    )
    .unwrap();
    assert!(inbound.push(ticket(), 0).is_none());
    assert_eq!(land(&mut inbound), [(0, true)]);
    assert_eq!(target.content(), [7; 100]);
    assert_eq!(counts.scattered.load(Ordering::Relaxed), 2);
}

#[test]
fn payload_does_not_wait_if_nothing_follows_or_fits() {
    let (device, copies) = counting(StandIn::new(2));
    let (other, other_copies) = counting(StandIn::new(3));
    let pool = Pool::new(SLOT, 8 * SLOT);
    let mut inbound = receiver(&pool);
    let target = some_memory(SLOT);
    let mut landed = Vec::new();
    let mut put = |device: &Arc<dyn Device>, name, bytes: usize| {
        put(&mut inbound, device, &target, name, &vec![1; bytes]);
        // All slots are returned, except for the one being filled.
        while pool.left(Direction::In) < 3 {
            landed.extend(inbound.poll_over().map(|over| over.payload));
        }
    };
    put(&device, (1, false), 100);
    assert_eq!(copies(), 1, "nothing follows");
    put(&device, (2, true), SLOT);
    assert_eq!(copies(), 2, "the slot is full");
    put(&device, (3, true), 100);
    assert_eq!(copies(), 2, "the payload waits for the next one");
    put(&device, (4, true), SLOT - 50);
    assert_eq!(copies(), 3, "the next one does not fit");
    put(&other, (5, true), 10);
    assert_eq!(copies(), 4, "the next one has another device");
    assert_eq!(other_copies(), 0);
    landed.extend(land(&mut inbound).iter().map(|(name, _)| name));
    assert_eq!(landed, [1, 2, 3, 4, 5]);
}

#[test]
fn payload_that_fits_a_slot_is_not_split() {
    let device: Arc<dyn Device> = Arc::new(StandIn::new(3));
    let mut inbound = receiver(&Pool::new(SLOT, 8 * SLOT));
    let target = some_memory(SLOT);
    put(&mut inbound, &device, &target, (1, true), &[1; 100]);
    inbound.begin(false);
    let room = inbound.room(&place(&device, &target.spans), SLOT - 50);
    assert_eq!(room.unwrap().unwrap().bytes, SLOT - 50);
    assert_eq!(land(&mut inbound), [(1, true)]);
}

#[test]
fn the_end_of_a_long_payload_shares_its_slot() {
    let (device, copies) = counting(StandIn::new(3));
    let pool = Pool::new(SLOT, 8 * SLOT);
    let mut inbound = receiver(&pool);
    let (long, short) = (some_memory(2 * SLOT + 10), some_memory(10));
    let bytes = vec![5; 2 * SLOT + 10];
    put(&mut inbound, &device, &long, (1, true), &bytes);
    assert_eq!(copies(), 2);
    put(&mut inbound, &device, &short, (2, false), &[6; 10]);
    assert_eq!(copies(), 3);
    assert_eq!(land(&mut inbound), [(1, true), (2, true)]);
    assert_eq!((long.content(), short.content()), (bytes, vec![6; 10]));
}

#[test]
fn a_payload_waits_a_bounded_time_for_others() {
    let step = Duration::from_micros(99);
    let (device, copies) = counting(StandIn::new(4));
    let pool = Pool::new(SLOT, 8 * SLOT);
    let mut inbound = receiver(&pool);
    let (first, second) = (some_memory(10), some_memory(SLOT / 2));
    put(&mut inbound, &device, &first, (1, true), &[1; 10]);
    pass(step);
    assert!(inbound.poll_over().is_none());
    assert_eq!(copies(), 0);
    pass(step);
    let over = inbound.poll_over();
    assert_eq!(copies(), 1, "nothing has come meanwhile");
    assert_eq!(land(&mut inbound).len() + usize::from(over.is_some()), 1);

    // While bytes arrive, the wait is longer; also in the middle of a payload.
    put(&mut inbound, &device, &first, (1, true), &[1; 10]);
    inbound.begin(false);
    let there = place(&device, &second.spans);
    for part in 0..8 {
        assert_eq!(copies(), 1 + usize::from(part > 5), "{part}");
        pass(step);
        put_part(&mut inbound, &there, &[part; 100], false, 100).unwrap();
        if let Some(over) = inbound.poll_over() {
            assert_eq!((over.payload, over.error.is_none()), (1, true));
        }
    }
    put_part(&mut inbound, &there, &[9; SLOT / 2 - 800], true, SLOT).unwrap();
    inbound.push(ticket(), 2);
    let landed = land(&mut inbound);
    assert_eq!(landed.last(), Some(&(2, true)));
    assert_eq!(copies(), 3);
    let content = second.content();
    let parts = (0..8).all(|part| content[part * 100..][..100] == [part as u8; 100]);
    assert!(parts && content[800..] == [9; SLOT / 2 - 800]);
}

#[test]
fn releasing_memory_lands_pending_bytes() {
    for seed in 0..50 {
        let device: Arc<dyn Device> = Arc::new(StandIn::new(seed));
        let pool = Pool::new(SLOT, 8 * SLOT);
        let mut inbound = receiver(&pool);
        let (whole, parted) = (some_memory(100), some_memory(200));
        put(&mut inbound, &device, &whole, (1, true), &[1; 100]);
        inbound.begin(false);
        let there = place(&device, &parted.spans);
        put_part(&mut inbound, &there, &[2; 150], false, 150).unwrap();
        inbound.let_go().unwrap();
        // Nothing is copied afterwards.
        assert_eq!(whole.content(), [1; 100]);
        assert_eq!(parted.content()[..150], [2; 150]);
        put_part(&mut inbound, &there, &[3; 50], true, 50).unwrap();
        assert!(inbound.push(ticket(), 2).is_none());
        assert_eq!(land(&mut inbound), [(1, true), (2, true)]);
        assert_eq!(parted.content()[150..], [3; 50]);
    }
}

#[test]
fn abandoned_payload_does_not_affect_earlier_ones() {
    let (device, copies) = counting(StandIn::new(6));
    let pool = Pool::new(SLOT, 8 * SLOT);
    let mut inbound = receiver(&pool);
    let (whole, gone) = (some_memory(100), some_memory(200));
    let before = gone.content();
    put(&mut inbound, &device, &whole, (1, true), &[1; 100]);
    inbound.begin(true);
    put_part(
        &mut inbound,
        &place(&device, &gone.spans),
        &[2; 150],
        false,
        150,
    )
    .unwrap();
    inbound.forget();
    assert_eq!(copies(), 1);
    put(&mut inbound, &device, &whole, (3, false), &[3; 100]);
    assert_eq!(land(&mut inbound), [(1, true), (3, true)]);
    assert_eq!((whole.content(), gone.content()), (vec![3; 100], before));
}

#[test]
fn failed_shared_copy_fails_only_its_payloads() {
    // Each queue fails with its second copy.
    let (device, copies) = counting(StandIn::new(7).failing_after(1));
    let pool = Pool::new(SLOT, 8 * SLOT);
    let mut inbound = receiver(&pool);
    let target = some_memory(100);
    let mut landed = Vec::new();
    for (first, count) in [(0, 2), (2, 3), (5, 1)] {
        for i in 0..count {
            let name = (first + i, i + 1 < count);
            put(&mut inbound, &device, &target, name, &[1; 100]);
        }
        landed.extend(land(&mut inbound));
    }
    assert_eq!(copies(), 3);
    let failed: Vec<_> = landed.iter().map(|(_, has_landed)| !has_landed).collect();
    assert_eq!(failed, [false, false, true, true, true, false]);
    assert_eq!(pool.left(Direction::In), 4);
}

#[test]
fn failed_copy_fails_the_payload_that_continues_after_it() {
    let device: Arc<dyn Device> = Arc::new(StandIn::new(7).failing_after(0));
    let good: Arc<dyn Device> = Arc::new(StandIn::new(8));
    let pool = Pool::new(SLOT, 8 * SLOT);
    let mut inbound = receiver(&pool);
    let target = some_memory(200);
    put(&mut inbound, &device, &target, (1, true), &[1; 100]);
    inbound.begin(true);
    let there = place(&device, &target.spans);
    put_part(&mut inbound, &there, &[2; 50], false, 50).unwrap();
    inbound.let_go().unwrap();
    // The rest reaches its memory, but the payload has failed.
    let there = place(&good, &target.spans);
    put_part(&mut inbound, &there, &[2; 50], true, 50).unwrap();
    inbound.push(ticket(), 2);
    put(&mut inbound, &good, &target, (3, false), &[3; 100]);
    assert_eq!(land(&mut inbound), [(1, false), (2, false), (3, true)]);
}

#[test]
fn closing_returns_pending_payloads_of_a_shared_slot() {
    let (device, copies) = counting(StandIn::new(9));
    let pool = Pool::new(SLOT, 8 * SLOT);
    let mut inbound = receiver(&pool);
    let target = some_memory(100);
    put(&mut inbound, &device, &target, (1, true), &[1; 100]);
    put(&mut inbound, &device, &target, (2, false), &[2; 100]);
    put(&mut inbound, &device, &target, (3, true), &[3; 100]);
    put(&mut inbound, &device, &target, (4, true), &[4; 100]);
    assert_eq!(inbound.close(), [1, 2, 3, 4]);
    assert_eq!(copies(), 1);
    assert!(!inbound.is_busy());
    assert_eq!(pool.left(Direction::In), 4);
    assert_eq!(target.content(), [2; 100], "the copy was waited for");
}

#[test]
fn unmapped_memory_fails_only_its_own_payload() {
    for let_go in [false, true] {
        let (device, copies) = counting(StandIn::new(8));
        let pool = Pool::new(SLOT, 8 * SLOT);
        let mut inbound = receiver(&pool);
        let (first, third) = (some_memory(100), some_memory(200));
        put(&mut inbound, &device, &first, (1, true), &[1; 100]);
        put(&mut inbound, &device, &no_memory(50), (2, true), &[2; 50]);
        inbound.begin(false);
        let there = place(&device, &third.spans);
        put_part(&mut inbound, &there, &[3; 150], false, 150).unwrap();
        pass(Duration::from_millis(1));
        if let_go {
            inbound.let_go().unwrap();
            assert_eq!(
                third.content()[..150],
                [3; 150],
                "repeated copies are awaited too"
            );
        }
        let mut landed = land(&mut inbound);
        assert_eq!(landed, [(1, true), (2, false)]);
        put_part(&mut inbound, &there, &[3; 50], true, 50).unwrap();
        inbound.push(ticket(), 3);
        landed = land(&mut inbound);
        assert_eq!(landed, [(3, true)]);
        assert_eq!(copies(), 1 + 3 + 1);
        assert_eq!(
            (first.content(), third.content()),
            (vec![1; 100], vec![3; 200])
        );
        assert_eq!(pool.left(Direction::In), 4);
    }
}
