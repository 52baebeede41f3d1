//! Strangers in great numbers: whoever has no credentials costs little and keeps nobody out.

use std::io::{ErrorKind, Write};
use std::os::fd::AsFd;
use std::process::{Command, Stdio};

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use tcpx_testkit::raw::dial;
use tcpx_testkit::remote::binary;
use tcpx_testkit::{Host, RemoteProcess, Setup, story};

/// A process that logs everything to `stderr`.
fn logging_to(stderr: Stdio) -> RemoteProcess {
    let mut command = Command::new(binary());
    command.env("TCPX_LOG", "debug").stderr(stderr);
    let process = RemoteProcess::spawn("bob", command);
    process.reopen(&Setup::lanes4_workers3().native());
    process
}

/// A pipe that takes nothing more; its reading end must be kept.
fn full_pipe() -> (std::io::PipeReader, std::io::PipeWriter) {
    let (reader, mut writer) = std::io::pipe().expect("a pipe");
    let flags = fcntl_getfl(writer.as_fd()).expect("flags");
    fcntl_setfl(writer.as_fd(), flags | OFlags::NONBLOCK).expect("flags");
    for chunk in [4096, 1] {
        loop {
            match writer.write(&vec![b'.'; chunk]) {
                Ok(_) => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                Err(e) => panic!("cannot fill a pipe: {e}"),
            }
        }
    }
    // The other process has the same open file, and its writes block.
    fcntl_setfl(writer.as_fd(), flags).expect("flags");
    (reader, writer)
}

#[test]
fn a_log_that_nobody_reads_stops_no_thread() {
    story(|| {
        let (_unread, stderr) = full_pipe();
        let bob = logging_to(stderr.into());
        for _ in 0..2000 {
            drop(dial(bob.addresses()[0]));
        }
        let alice = Host::open("alice", &Setup::lanes4_workers3().native());
        let peer = alice.knows(&bob);
        alice.verify_traffic(&peer, &bob, 1);
        // Closing ends the threads, all of them.
        bob.expect::<()>(tcpx_testkit::protocol::Command::Close);
    });
}

#[test]
fn strangers_cannot_fill_the_log() {
    story(|| {
        let log = std::env::temp_dir().join(format!("tcpx-strangers-{}.log", std::process::id()));
        let file = std::fs::File::create(&log).expect("a file");
        let bob = logging_to(file.into());
        for _ in 0..3000 {
            drop(dial(bob.addresses()[0]));
        }
        let alice = Host::open("alice", &Setup::lanes4_workers3().native());
        let peer = alice.knows(&bob);
        alice.verify_traffic(&peer, &bob, 1);
        // The last lines are written as the process exits.
        bob.exit();
        let said = std::fs::read_to_string(&log).expect("the log");
        let _ = std::fs::remove_file(&log);
        let lines = said.lines().count();
        assert!(said.contains("did not prove itself"), "{said}");
        assert!(said.contains("connected"), "{said}");
        assert!(lines < 1000, "{lines} lines for 3000 strangers");
    });
}
