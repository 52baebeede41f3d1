//! Tests with two real processes: each test forks the other one.

mod gates;
mod memory;
mod refusal;
mod wire;

use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixDatagram;
use std::panic::{AssertUnwindSafe, catch_unwind};

use rustix::event::{PollFd, PollFlags, poll};

use super::*;

/// A forked process, killed and reaped when it is dropped.
struct Child {
    pid: libc::pid_t,
    is_reaped: bool,
}

impl Child {
    /// Runs `body`, whose result is the child's exit status: 0 for `true`.
    fn fork(body: impl FnOnce() -> bool) -> Self {
        // SAFETY: the child runs `body`, which at most allocates, and exits without unwinding.
        let pid = unsafe { libc::fork() };
        assert!(pid >= 0, "cannot fork");
        if pid == 0 {
            let fine = catch_unwind(AssertUnwindSafe(body)).unwrap_or(false);
            // SAFETY: `_exit` ends the process at once.
            unsafe { libc::_exit(i32::from(!fine)) };
        }
        Self {
            pid,
            is_reaped: false,
        }
    }

    fn kill(&self) {
        // SAFETY: the process is a child of this one and not reaped yet.
        assert_eq!(unsafe { libc::kill(self.pid, libc::SIGKILL) }, 0);
    }

    /// Waits until the child has ended; returns whether `body` returned true.
    fn wait(&mut self) -> bool {
        let mut status = 0;
        // SAFETY: waits for a child of this process, and writes its status.
        let reaped = unsafe { libc::waitpid(self.pid, &raw mut status, 0) };
        assert_eq!(reaped, self.pid);
        self.is_reaped = true;
        status == 0
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        if !self.is_reaped {
            self.kill();
            self.wait();
        }
    }
}

/// Runs `body` in a process of its own, where no other test makes descriptors or forks.
#[track_caller]
fn alone(body: impl FnOnce()) {
    let mut child = Child::fork(|| {
        body();
        true
    });
    assert!(child.wait(), "the child failed, see its output above");
}

/// Forks a process that connects to this one; returns it with this end of the wire.
fn neighbour(body: impl FnOnce(Wire) -> bool) -> (Child, Wire) {
    let door = Door::open().unwrap();
    let child = Child::fork(|| body(Wire::connect(door.name()).unwrap()));
    (child, accept(&door))
}

fn accept(door: &Door) -> Wire {
    wait_for(door, PollFlags::IN);
    door.accept().unwrap().expect("a connection")
}

fn wait_for(source: impl AsFd, event: PollFlags) {
    while poll(&mut [PollFd::new(&source, event)], None).is_err() {}
}

/// Waits for the next message; `None` at the end of the wire.
fn next(wire: &Wire) -> Option<(Vec<u8>, Vec<OwnedFd>)> {
    let mut buffer = vec![0; MAX_MESSAGE];
    loop {
        wait_for(wire, PollFlags::IN);
        match wire.receive(&mut buffer).unwrap() {
            Received::Nothing => {}
            Received::Closed => return None,
            Received::Message { len, fds } => {
                buffer.truncate(len);
                return Some((buffer, fds));
            }
        }
    }
}

fn say(wire: &Wire, text: impl AsRef<[u8]>) {
    assert!(wire.send(text.as_ref(), &[]).unwrap(), "no room");
}

/// Waits for a message with that text.
#[track_caller]
fn expect(wire: &Wire, text: &str) {
    let (bytes, _) = next(wire).expect("the other side has ended");
    assert_eq!(String::from_utf8_lossy(&bytes), text);
}

/// Both ends of a wire, in this process.
fn pair() -> (Wire, Wire) {
    let door = Door::open().unwrap();
    let near = Wire::connect(door.name()).unwrap();
    (near, door.accept().unwrap().unwrap())
}

fn is_open(number: RawFd) -> bool {
    // SAFETY: reads flags, changes nothing.
    unsafe { libc::fcntl(number, libc::F_GETFD) >= 0 }
}

/// Reports a skipped test on stderr, past the harness, which hides the output of passed tests.
fn skipped(test: &str, why: &str) {
    let _ = writeln!(std::io::stderr(), "SKIPPED: neighbour::{test}: {why}");
}

/// Returns whether this process runs as root; reports the test as skipped if not.
fn is_root(test: &str) -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        skipped(test, "only root can do it");
    }
    is_root
}

#[test]
fn forked_children_keep_nothing_and_end_nothing() {
    let (near, far) = pair();
    let door = Door::open().unwrap();
    let gates = Gates::create(1).unwrap();
    let process = Neighbour::of(&near).unwrap();
    let number = near.as_fd().as_raw_fd();
    let numbers = [
        number,
        far.as_fd().as_raw_fd(),
        door.as_fd().as_raw_fd(),
        gates.descriptor().as_raw_fd(),
        process.as_fd().as_raw_fd(),
    ];
    assert!(numbers.iter().all(|number| is_open(*number)));
    let (mine, theirs) = UnixDatagram::pair().unwrap();
    let mut near = Some(near);
    let mut child = Child::fork(|| {
        let none = !numbers.iter().any(|number| is_open(*number));
        // SAFETY: the number is free, and the child uses it for a descriptor of its own.
        let reused = unsafe { libc::dup2(mine.as_raw_fd(), number) } == number;
        drop(near.take());
        none && reused && theirs.send(b"x").is_ok() && mine.send(b"x").is_ok()
    });
    assert!(child.wait());
    say(near.as_ref().unwrap(), "still open");
    expect(&far, "still open");
}
