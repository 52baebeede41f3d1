//! Checks how messages are cut, scattered and ordered, and that they can be rebuilt.

use nccl_net_tcpx_emu::ring::Entry;

use crate::harness::{Pair, pattern, until};

/// Exchanges messages of awkward sizes; every byte is verified.
fn exchange_all() {
    let mut pair = Pair::new();
    let (mut source, target) = (pair.source(4 << 20), pair.target(4 << 20));
    for size in [
        1,
        15,
        16,
        17,
        4095,
        4096,
        4097,
        8192,
        65_537,
        500_000,
        4 << 20,
        (4 << 20) - 1,
    ] {
        pair.exchange(&mut source, &target, size);
    }
    let counters = pair.plugin.counters(pair.recv);
    assert_eq!(counters.pages_free, counters.pages_total);
    pair.close();
}

isolated! { fn full() { exchange_all(); } }
isolated! { fn short(FRAG = "short") { exchange_all(); } }
isolated! { fn odd(FRAG = "odd") { exchange_all(); } }
isolated! { fn small_chunks_on_eight_sockets(CHUNK = "8192", NSOCKS = "8") { exchange_all(); } }
isolated! { fn odd_chunks_on_three_sockets(CHUNK = "5001", NSOCKS = "3", REORDER = "1") { exchange_all(); } }
isolated! { fn everything_at_once(CHUNK = "30000", NSOCKS = "5", REORDER = "2", FRAG = "odd") { exchange_all(); } }

/// Returns the ring entries of one message of 64 KiB.
fn entries() -> Vec<Entry> {
    let mut pair = Pair::new();
    let (mut source, target) = (pair.source(1 << 16), pair.target(1 << 16));
    let message = pattern(0, 1 << 16);
    source.buffer.bytes().copy_from_slice(&message);
    let (recv, send) = (pair.irecv(&target, 1 << 16), pair.isend(&source, 1 << 16));
    pair.finish(send, recv);
    let entries = pair.entries(0);
    assert!(pair.unpack() == message);
    entries
}

isolated! {
    fn full_pages_are_never_neighbours() {
        let entries = entries();
        assert_eq!(entries.len(), 16);
        assert!(entries.iter().all(|entry| entry.len == 4096 && entry.src_off % 4096 == 0));
        assert!(entries.is_sorted_by_key(|entry| entry.dst_off));
        assert!(entries.windows(2).all(|pair| pair[1].src_off != pair[0].src_off + 4096));
    }
}

isolated! {
    fn odd_fragments_are_odd(FRAG = "odd") {
        let entries = entries();
        assert!(entries.len() > 16);
        assert!(entries.iter().all(|entry| entry.src_off % 2 == 1));
        assert!(entries.iter().any(|entry| entry.len % 2 == 1));
        assert!(entries.iter().any(|entry| entry.dst_off % 16 != 0));
    }
}

isolated! {
    fn short_fragments_are_multiples_of_16(FRAG = "short") {
        let entries = entries();
        assert!(entries.len() > 16);
        assert!(entries.iter().all(|entry| entry.len % 16 == 0 && entry.src_off % 16 == 0));
        assert!(entries.iter().any(|entry| entry.src_off % 4096 != 0));
    }
}

isolated! {
    fn chunks_are_shuffled(REORDER = "1", CHUNK = "8192") {
        let entries = entries();
        assert!(!entries.is_sorted_by_key(|entry| entry.dst_off));
        for chunk in entries.chunks(2) {
            assert_eq!(chunk[0].dst_off % 8192, 0, "chunks stay whole");
            assert_eq!(chunk[1].dst_off, chunk[0].dst_off + 4096);
        }
    }
}

isolated! {
    fn entries_are_shuffled(REORDER = "2") {
        assert!(!entries().is_sorted_by_key(|entry| entry.dst_off));
    }
}

/// Runs this binary's `entries` in a child with a seed and returns its output.
fn entries_with_seed(seed: &str) -> String {
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "fragments::print_entries",
            "--ignored",
            "--nocapture",
        ])
        .env("TCPX_EMU_SEED", seed)
        .env("TCPX_EMU_FRAG", "odd")
        .output()
        .unwrap();
    let stdout = String::from_utf8(output.stdout).unwrap();
    assert!(
        output.status.success() && stdout.contains("Entry"),
        "{stdout}"
    );
    stdout
        .lines()
        .find(|line| line.contains("Entry"))
        .unwrap()
        .to_owned()
}

#[test]
#[ignore = "run by the_seed_decides"]
fn print_entries() {
    println!("{:?}", entries());
}

#[test]
fn the_seed_decides() {
    assert_eq!(entries_with_seed("5"), entries_with_seed("5"));
    assert_ne!(entries_with_seed("5"), entries_with_seed("6"));
}

/// Sends 9 MiB, which needs 2304 entries.
fn overflow() -> i32 {
    let pair = Pair::new();
    let (source, target) = (pair.source(9 << 20), pair.target(9 << 20));
    let (recv, send) = (pair.irecv(&target, 9 << 20), pair.isend(&source, 9 << 20));
    let mut code = 0;
    until("the error", || {
        let _ = pair.test(send);
        code = pair.test(recv).err().unwrap_or(0);
        code != 0
    });
    code
}

isolated! {
    fn too_many_entries() {
        assert_eq!(overflow(), 3);
    }
}

#[test]
#[ignore = "run by too_many_entries_can_end_the_process"]
fn overflow_alone() {
    overflow();
}

#[test]
fn too_many_entries_can_end_the_process() {
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "fragments::overflow_alone", "--ignored"])
        .env("TCPX_EMU_EXIT_ON_OVERFLOW", "1")
        .output()
        .unwrap();
    // A failed test would end with 101.
    assert_eq!(output.status.code(), Some(1));
}

isolated! {
    fn socket_buffers_can_be_limited(SOCKET_BUFFER = "131072", FRAG = "odd") {
        let mut pair = Pair::new();
        let (mut source, target) = (pair.source(4 << 20), pair.target(4 << 20));
        let message = pattern(0, 4 << 20);
        source.buffer.bytes().copy_from_slice(&message);
        let (recv, send) = (pair.irecv(&target, 4 << 20), pair.isend(&source, 4 << 20));
        for _ in 0..1000 {
            assert_eq!(pair.test(send), Ok(false), "nobody reads");
        }
        // The kernel doubles the requested size, at each of the two ends.
        let in_kernel = pair.plugin.counters(pair.send).bytes;
        assert!(in_kernel > 0 && in_kernel <= 4 * 131_072, "{in_kernel}");
        pair.finish(send, recv);
        assert!(pair.unpack() == message);
    }
}
