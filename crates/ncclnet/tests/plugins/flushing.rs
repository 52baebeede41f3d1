//! Receives into CUDA memory, which become visible by a flush.

use std::ops::Range;

use tcpx_ncclnet::{Error, Flushing, MemoryHandle, MemoryKind, RecvComm, SendComm};

use crate::build;
use crate::rules::open;
use crate::wire::{Memory, connect, post};

/// Sends as many messages of 64 bytes as there are numbers, and receives them into CUDA memory, one
/// after the other.
fn receive(send: &mut SendComm, recv: &mut RecvComm, to: &MemoryHandle, numbers: Range<usize>) {
    let mut source = Memory::new(64);
    let from = source.register(send, MemoryKind::Host).unwrap();
    for number in numbers {
        source.bytes().fill(number as u8 + 1);
        let sent = post(|| send.isend(&from, 0, 64, 0)).unwrap();
        let received = post(|| recv.irecv(to, number * 64, 64, 0)).unwrap();
        while send.test(sent).unwrap().is_none() {}
        while recv.test(received).unwrap().is_none() {}
        recv.consume(received).unwrap();
    }
    send.deregister(from).unwrap();
}

#[test]
fn bytes_for_cuda_memory_are_there_once_they_are_flushed() {
    for version in build::VERSIONS {
        let plugin = open(&format!("flush-{version}"), version, &[]);
        let (mut send, mut recv) = connect(&plugin, 0, 1);
        assert!(recv.can_flush());
        let mut target = Memory::new(5 * 64);
        let to = target.register(&mut recv, MemoryKind::Cuda).unwrap();
        receive(&mut send, &mut recv, &to, 0..5);
        assert!(target.bytes().iter().all(|byte| *byte == 0));
        let mut begin = |number: usize| recv.flush(&to, number * 64, 64).unwrap();
        let (Flushing::Begun(first), Flushing::Begun(second), Flushing::Begun(third)) =
            (begin(0), begin(1), begin(2))
        else {
            panic!("version {version} begins three flushes");
        };
        // The plugin completes the fourth without a request.
        assert_eq!(begin(3), Flushing::Needless);
        assert_eq!(recv.in_flight(), 3);
        // No flush completes before an earlier one, however often it is tested.
        for _ in 0..5 {
            assert_eq!(recv.test_flush(second), Ok(false));
        }
        for flush in [first, second, third] {
            assert_eq!(recv.test_flush(flush), Ok(false));
            assert_eq!(recv.test_flush(flush), Ok(true));
        }
        let again = recv.test_flush(second);
        assert!(matches!(again, Err(Error::OutOfOrder { .. })), "{again:?}");
        assert_eq!(recv.in_flight(), 0);
        for (number, bytes) in target.bytes().chunks(64).enumerate() {
            let expected = if number < 4 { number as u8 + 1 } else { 0 };
            assert!(bytes.iter().all(|byte| *byte == expected), "{number}");
        }
    }
}

#[test]
fn flushes_take_slots() {
    let plugin = open("flush-full", 9, &["-DSLOTS=16"]);
    let (mut send, mut recv) = connect(&plugin, 0, 1);
    let target = Memory::new(32 * 64);
    let to = target.register(&mut recv, MemoryKind::Cuda).unwrap();
    receive(&mut send, &mut recv, &to, 0..22);
    let mut flushes = Vec::new();
    for number in 0..22 {
        match recv.flush(&to, number * 64, 64).unwrap() {
            Flushing::Begun(flush) => flushes.push(flush),
            Flushing::Needless => {}
            Flushing::Full => assert_eq!(flushes.len(), 16),
        }
    }
    // The plugin would fail permanently at either.
    for _ in 0..5 {
        assert_eq!(recv.flush(&to, 21 * 64, 64), Ok(Flushing::Full));
        assert_eq!(recv.irecv(&to, 0, 64, 0), Ok(None));
    }
    while !recv.test_flush(flushes[0]).unwrap() {}
    assert!(post(|| recv.irecv(&to, 0, 64, 0)).is_ok());
    assert_eq!(recv.flush(&to, 21 * 64, 64), Ok(Flushing::Full));
}

#[test]
fn flushes_are_made_where_they_are_legal() {
    let plugin = open("flush-host", 12, &[]);
    let (_send, mut recv) = connect(&plugin, 0, 1);
    let memory = Memory::new(64);
    let host = memory.register(&mut recv, MemoryKind::Host).unwrap();
    let cuda = memory.register(&mut recv, MemoryKind::Cuda).unwrap();
    // The plugin aborts the process when an unpack device is flushed.
    let plugin = open("flush-unpack", 7, &["-DDEVICE_TYPE=1"]);
    let (_send, mut unpack) = connect(&plugin, 0, 1);
    assert!(!unpack.can_flush());
    let foreign = memory.register(&mut unpack, MemoryKind::Cuda).unwrap();
    for outcome in [
        recv.flush(&host, 0, 64),
        recv.flush(&cuda, 0, 0),
        unpack.flush(&foreign, 0, 64),
    ] {
        let is_refused = matches!(outcome, Err(Error::Unsupported { call: "iflush", .. }));
        assert!(is_refused, "{outcome:?}");
    }
    // A flush of bytes that were not received fails, and ends the comm.
    assert!(matches!(recv.flush(&cuda, 0, 64), Err(Error::Call { .. })));
    let dead = recv.flush(&cuda, 0, 64);
    assert!(
        matches!(dead, Err(Error::Dead { call: "iflush" })),
        "{dead:?}"
    );
}
