//! Forked children of a test's second process: calls on inherited objects that must fail, and
//! sessions of their own.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use tcpx::{
    Buffer, Config, Error, Events, Op, Peer, Region, RemoteRegion, Segment, Session, Transfer,
    TransferState,
};

use crate::story::REMOTE_GUARD;

/// Seconds after which a child ends by itself, if its test is killed.
const LIFE: u32 = 300;

/// The byte that children write into memory of their parent.
pub const MARK: u8 = 0xC5;

/// Forks. The child runs `body` and reports its result; it lives on until it is killed. Returns the
/// child's process id and its report.
///
/// # Panics
/// When the process cannot fork.
pub fn fork(body: impl FnOnce() -> Result<(), String>) -> (u32, Result<(), String>) {
    let (words, answer) = std::io::pipe().expect("a pipe");
    // SAFETY: the child waits for no lock of another thread, which `body` tests, and memory can be
    // allocated after a fork.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "cannot fork");
    if child == 0 {
        drop(words);
        let result = catch_unwind(AssertUnwindSafe(|| {
            leave_the_test_alone();
            body()
        }));
        let result = result.unwrap_or_else(|_| Err("the child panicked".into()));
        let mut answer = File::from(std::os::fd::OwnedFd::from(answer));
        let _ = answer.write_all(&result.err().unwrap_or_default().into_bytes());
        drop(answer);
        loop {
            std::thread::park();
        }
    }
    drop(answer);
    let child = Pid::from_raw(child).expect("a child has a number");
    let id = child.as_raw_nonzero().get().unsigned_abs();
    let result = hear(File::from(std::os::fd::OwnedFd::from(words)));
    (id, result)
}

/// Ends a child of this process.
pub fn end(child: u32) {
    let child = i32::try_from(child).ok().and_then(Pid::from_raw);
    let child = child.expect("a child has a number");
    // It may have ended already.
    let _ = kill_process(child, Signal::KILL);
    let _ = waitpid(Some(child), WaitOptions::empty());
}

/// Reads a child's report to its end; an empty text means success.
fn hear(mut words: File) -> Result<(), String> {
    let mut said = Vec::new();
    loop {
        let limit = Timespec::try_from(REMOTE_GUARD).expect("seconds");
        let mut fds = [PollFd::new(&words, PollFlags::IN)];
        if poll(&mut fds, Some(&limit)) != Ok(1) {
            return Err("the child hangs".into());
        }
        let mut piece = [0; 4096];
        match words.read(&mut piece) {
            Ok(0) => break,
            Ok(count) => said.extend_from_slice(&piece[..count]),
            Err(error) => return Err(error.to_string()),
        }
    }
    match String::from_utf8_lossy(&said).into_owned() {
        said if said.is_empty() => Ok(()),
        said => Err(said),
    }
}

/// Closes the pipes to the test, which must see its own process end.
fn leave_the_test_alone() {
    // SAFETY: sets a timer of this process, whose signal ends it.
    unsafe { libc::alarm(LIFE) };
    let null = File::options().read(true).write(true).open("/dev/null");
    let null = null.expect("/dev/null is there");
    for standard in 0..2 {
        // SAFETY: replaces a descriptor of this process that nothing here uses any more.
        unsafe { libc::dup2(std::os::fd::AsRawFd::as_raw_fd(&null.as_fd()), standard) };
    }
}

/// Every kind of object that a process may hold of a session.
pub(crate) struct Inherited<'a> {
    pub(crate) session: &'a Session,
    pub(crate) peers: &'a [Peer],
    pub(crate) regions: Vec<&'a Region>,
    pub(crate) transfers: Vec<&'a Transfer>,
    pub(crate) events: &'a Events,
}

impl Inherited<'_> {
    /// Makes every call, each of which must fail at once because it is made in the wrong process.
    pub(crate) fn refuses_everything(&self) -> Result<(), String> {
        let (session, second) = (self.session, Duration::from_secs(1));
        let own = session.own_peer();
        let buffer = Buffer::new(64);
        refused("add_peer", session.add_peer(&session.connection_info()))?;
        refused("remove_peer", session.remove_peer("nobody"))?;
        refused("remove", session.remove(&own))?;
        refused("accept", session.accept(second))?;
        refused("register", session.register(&buffer))?;
        refused("prepare", session.prepare(Op::Read, &own, []))?;
        refused("notify", session.notify(&own, b"never"))?;
        refused("wait_notification", session.wait_notification(second))?;
        refused("subscribe", session.subscribe(self.events))?;
        refused("take", self.events.take(1))?;
        nothing("peer", session.peer(session.name()).is_none())?;
        nothing("peers", session.peers().is_empty())?;
        nothing("notifications", session.notifications().is_empty())?;
        for peer in self.peers.iter().chain([&own]) {
            refused("notify", session.notify(peer, b"never"))?;
            refused("connect", peer.connect(second))?;
            refused("round_trip", peer.round_trip(0, second))?;
            refused("flush", peer.flush(second))?;
            nothing("is_connected", !peer.is_connected())?;
            nothing("lanes", peer.lanes().is_empty())?;
            peer.disconnect();
            for region in &self.regions {
                refused("send", session.send(peer, region.at(0), 1, 7))?;
                refused("recv", session.recv(peer, region.at(0), 1, 7))?;
            }
        }
        for region in &self.regions {
            refused("deregister", region.deregister())?;
        }
        for transfer in &self.transfers {
            refused("post", transfer.post())?;
            refused("post", transfer.post_with_notification(b"never"))?;
            refused("wait", transfer.wait(second))?;
            refused("arm", transfer.arm(self.events, 0))?;
            nothing("poll", transfer.poll() == TransferState::Failed)?;
            let error = transfer.error().map_or(Ok(()), Err);
            refused("error", error)?;
            let _ = transfer.estimate();
            transfer.abort();
            let _ = format!("{transfer:?}");
        }
        session.close();
        Ok(())
    }
}

/// Creates a session and writes [`MARK`] over `target` of the parent's session, with a
/// notification.
pub(crate) fn write_to(parent: &[u8], target: &RemoteRegion, config: Config) -> Result<(), Error> {
    let session = Session::new(config)?;
    let peer = session.add_peer(parent)?;
    let source = Buffer::from_bytes(&vec![MARK; target.len()]);
    let region = session.register(&source)?;
    let segment = Segment {
        local: region.at(0),
        remote: target.at(0),
        len: target.len(),
    };
    let transfer = session.prepare(Op::Write, &peer, [segment])?;
    transfer.post_with_notification(b"from a child")?;
    transfer.wait(REMOTE_GUARD)?;
    session.close();
    Ok(())
}

fn refused<T>(call: &str, result: Result<T, Error>) -> Result<(), String> {
    match result {
        Err(Error::Forked(_)) => Ok(()),
        Err(other) => Err(format!("{call} was refused for another reason: {other}")),
        Ok(_) => Err(format!("{call} was not refused")),
    }
}

fn nothing(call: &str, is_nothing: bool) -> Result<(), String> {
    is_nothing
        .then_some(())
        .ok_or_else(|| format!("{call} found something"))
}
