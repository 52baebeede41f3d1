//! Tests with two processes.

use std::io::{Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::ptr::null_mut;

use nccl_net_tcpx_emu::raw_loop::{self, Sender};
use nccl_net_tcpx_emu::tables::HANDLE_BYTES;

use crate::harness::{Buffer, Plugin, pattern, until};

const SIZE: usize = 700_000;
const COMMS: usize = 3;
const MESSAGES: usize = 40;

/// The sending process: reads handles from stdin, sends, then waits for stdin to end.
#[test]
#[ignore = "run by the tests below"]
fn sender() {
    let table = Plugin::init().v7;
    let mut input = std::io::stdin();
    let mut buffers: Vec<Buffer> = (0..COMMS).map(|_| Buffer::new(SIZE * 16)).collect();
    let mut senders: Vec<Sender> = Vec::new();
    for buffer in &mut buffers {
        let mut handle = [0; HANDLE_BYTES];
        input.read_exact(&mut handle).unwrap();
        let memory = (buffer.data, buffer.len());
        // SAFETY: the buffer outlives the sender.
        senders.push(unsafe {
            raw_loop::connect(table, 0, &handle, memory, std::thread::yield_now).unwrap()
        });
    }
    // Sixteen places in each buffer: one is reused only when its send is done.
    for k in 0..MESSAGES {
        for (comm, (sender, buffer)) in senders.iter_mut().zip(&mut buffers).enumerate() {
            until("a free request", || {
                sender.in_flight() < 16 || sender.poll().unwrap()
            });
            let place = (k % 16) * SIZE;
            let message = pattern((comm << 16 | k) as u64, SIZE);
            buffer.bytes()[place..place + SIZE].copy_from_slice(&message);
            until("a request", || sender.post(place, SIZE).unwrap());
            sender.poll().unwrap();
        }
    }
    for sender in &mut senders {
        until("the end", || {
            sender.in_flight() == 0 || sender.poll().unwrap() && sender.in_flight() == 0
        });
    }
    // Closing before the receiver has everything would fail its outstanding receives.
    let mut rest = Vec::new();
    input.read_to_end(&mut rest).unwrap();
    for sender in senders {
        sender.close().unwrap();
    }
}

fn spawn_sender(settings: &[(&str, &str)]) -> (Child, ChildStdin, ChildStdout) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "processes::sender", "--ignored"])
        .envs(settings.iter().copied())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let (input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    (child, input, output)
}

isolated! {
    fn messages_cross(NSOCKS = "3", CHUNK = "65536", FRAG = "odd", REORDER = "2") {
        let table = Plugin::init().v7;
        let (mut child, mut input, _output) = spawn_sender(&[("TCPX_EMU_NULL_REQ_EVERY", "5")]);
        let mut buffers: Vec<Buffer> = (0..COMMS).map(|_| Buffer::new(SIZE)).collect();
        let mut receivers = Vec::new();
        for buffer in &buffers {
            let listening = raw_loop::listen(table, 0).unwrap();
            input.write_all(&listening.handle).unwrap();
            input.flush().unwrap();
            let memory = (buffer.data, buffer.len());
            // SAFETY: the buffer outlives the receiver.
            receivers.push(unsafe { listening.accept(memory, std::thread::yield_now).unwrap() });
        }
        let mut counts = [(0, 0); COMMS];
        until("all messages", || {
            for (comm, (receiver, buffer)) in receivers.iter_mut().zip(&mut buffers).enumerate() {
                let (posted, received) = &mut counts[comm];
                while *posted < MESSAGES && receiver.in_flight() < 4 && receiver.post(SIZE).unwrap()
                {
                    *posted += 1;
                }
                // SAFETY: the buffer has room for a message.
                if let Some(bytes) = unsafe { receiver.poll(0).unwrap() } {
                    assert_eq!(bytes, SIZE);
                    let expected = pattern((comm << 16 | *received) as u64, SIZE);
                    assert!(buffer.bytes()[..SIZE] == expected, "comm {comm}, message {received}");
                    *received += 1;
                }
            }
            counts.iter().all(|&(_, received)| received == MESSAGES)
        });
        drop(input);
        assert!(child.wait().unwrap().success());
        for receiver in receivers {
            receiver.close().unwrap();
        }
        let counters = Plugin::load().counters(null_mut());
        assert_eq!(counters.pages_free, counters.pages_total);
        assert_eq!((counters.violations, counters.comms, counters.registrations), (0, 0, 0));
    }
}

isolated! {
    fn a_sender_that_is_killed() {
        let table = Plugin::init().v7;
        let (mut child, mut input, _output) = spawn_sender(&[]);
        let buffers: Vec<Buffer> = (0..COMMS).map(|_| Buffer::new(SIZE)).collect();
        let mut receivers = Vec::new();
        for buffer in &buffers {
            let listening = raw_loop::listen(table, 0).unwrap();
            input.write_all(&listening.handle).unwrap();
            input.flush().unwrap();
            let memory = (buffer.data, buffer.len());
            // SAFETY: the buffer outlives the receiver.
            receivers.push(unsafe { listening.accept(memory, std::thread::yield_now).unwrap() });
        }
        let receiver = &mut receivers[0];
        for _ in 0..16 {
            assert!(receiver.post(SIZE).unwrap());
        }
        // SAFETY: the buffer has room for a message.
        until("a first message", || unsafe { receiver.poll(0).unwrap() }.is_some());
        child.kill().unwrap();
        child.wait().unwrap();
        // Bytes in the kernel may still arrive, then the loss is noticed: receives are outstanding.
        let mut code = 0;
        until("the error", || {
            while receiver.in_flight() < 16 && code == 0 {
                match receiver.post(SIZE) {
                    Ok(true) => {}
                    Ok(false) => break,
                    Err(error) => code = error.code,
                }
            }
            // SAFETY: as above.
            match unsafe { receiver.poll(0) } {
                Ok(_) => {}
                Err(error) => code = error.code,
            }
            code != 0
        });
        assert_eq!(code, 2);
        drop(input);
    }
}
