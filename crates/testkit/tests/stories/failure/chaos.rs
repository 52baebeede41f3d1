//! Many failures at once.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tcpx::{ErrorKind, Op, TransferState};
use tcpx_testkit::pattern::{Dice, LOCAL_POISON};
use tcpx_testkit::{Content, Copy, Expected, GUARD, Host, RemoteProcess, Setup, on_every_setup};

on_every_setup!(chaos);

/// Everything at once: transfers that are awaited, aborted, dropped, or lose their memory, on a
/// connection that is cut repeatedly. Every one of them ends, completed ones have moved their
/// bytes, and nothing else is touched.
fn chaos(setup: &Setup) {
    const THREADS: usize = 4;
    const ROUNDS: usize = 120;
    const LEN: usize = 300_000;
    // Another seed gives another sequence: to search for bugs, run it many times with different
    // ones.
    let seed = std::env::var("TCPX_TEST_SEED").map_or(0, |s| s.parse().expect("a number"));
    let alice = Host::open("alice", setup);
    let bob = RemoteProcess::open("bob", setup);
    let peer = alice.meets(&bob);
    let source = bob.memory(LEN);
    bob.fill(&source, Content::pattern(1));
    let slots: Vec<_> = (0..THREADS).map(|_| bob.memory(LEN)).collect();
    let busy = AtomicUsize::new(THREADS);
    std::thread::scope(|scope| {
        for (thread, slot) in slots.iter().enumerate() {
            let (alice, peer, source, busy) = (&alice, &peer, &source, &busy);
            scope.spawn(move || {
                // Stops the wrecker also when an assertion below fails.
                let _over = OnDrop(|| _ = busy.fetch_sub(1, Ordering::AcqRel));
                let mut dice = Dice::new(seed + thread as u64);
                for round in 0..ROUNDS {
                    let here = alice.memory(LEN);
                    let len = [1, 3000, 100_000, LEN][dice.below(4)];
                    let at = dice.below(LEN - len + 1);
                    let copies = [Copy::new(at, at, len)];
                    let read = dice.below(2) == 0;
                    let transfer = if read {
                        here.poison();
                        alice.transfer(Op::Read, peer, &here, source, &copies)
                    } else {
                        here.memory.fill(Content::pattern(1));
                        alice.transfer(Op::Write, peer, &here, slot, &copies)
                    };
                    transfer.post_with_notification(b"done").expect("posted");
                    for _ in 0..dice.below(10) {
                        transfer.poll();
                    }
                    let interference = dice.below(6);
                    match interference {
                        0 => transfer.abort(),
                        1 => here.region.deregister().expect("registered until now"),
                        _ => {}
                    }
                    if interference == 2 {
                        drop(transfer);
                        here.poison();
                        std::thread::yield_now();
                        here.check_untouched();
                        continue;
                    }
                    let interfered = interference < 2 && transfer.poll() != TransferState::Done;
                    if interfered {
                        here.poison();
                    }
                    let result = transfer.wait(GUARD);
                    assert!(transfer.poll().is_terminal());
                    if let Err(error) = &result {
                        let kinds = [
                            ErrorKind::Aborted,
                            ErrorKind::Disconnected,
                            ErrorKind::NotAllowed,
                        ];
                        assert!(kinds.contains(&error.kind()), "round {round}: {error}");
                    }
                    if interfered {
                        here.check_untouched();
                    } else if read && result.is_ok() {
                        let moved = Content::pattern(1).skip(at);
                        let expected = Expected::untouched(LOCAL_POISON);
                        here.check(&expected.with(at..at + len, moved));
                    }
                }
            });
        }
        scope.spawn(|| {
            let mut dice = Dice::new(seed + 99);
            while busy.load(Ordering::Acquire) > 0 {
                std::thread::sleep(Duration::from_millis(dice.below(15) as u64));
                if dice.below(2) == 0 {
                    peer.disconnect();
                } else if peer.is_connected() {
                    bob.disconnect("alice");
                }
            }
        });
    });
    // Only the pattern was written, and only where it belongs.
    bob.check(&source, &Expected::only(Content::pattern(1)));
    for slot in &slots {
        let bytes = bob.bytes(slot);
        let pattern = Content::pattern(1).to_vec(LEN);
        let wrong = bytes
            .iter()
            .zip(&pattern)
            .position(|(b, p)| *b != 0 && b != p);
        assert_eq!(wrong, None, "a byte in the wrong place");
    }
    alice.verify_traffic(&peer, &bob, 1);
}

/// Calls a function when it goes out of scope.
struct OnDrop<F: FnMut()>(F);

impl<F: FnMut()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}
