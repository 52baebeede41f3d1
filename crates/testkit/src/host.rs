//! The session of a story in this process.

use std::sync::Arc;
use std::time::Duration;

use tcpx::stats::TransferKind;
use tcpx::{Op, Peer, Region, RemoteRegion, Segment, Session, Transfer};

use crate::ledger::{self, Figures, Ledger, Tracked};
use crate::memory::Memory;
use crate::pattern::{Content, Expected, LOCAL_POISON};
use crate::protocol::Copy;
use crate::remote::{RemoteMemory, RemoteProcess};
use crate::setup::Setup;
use crate::story::{GUARD, wait_until};

/// A session in this process.
#[derive(Clone, Debug)]
pub struct Host {
    /// The session.
    pub session: Session,
    /// The requests made of it.
    pub ledger: Arc<Ledger>,
    /// Counts the clones.
    clones: Arc<()>,
}

/// Compares the requests with the session's statistics, when the last handle is dropped.
impl Drop for Host {
    fn drop(&mut self) {
        let is_last = Arc::strong_count(&self.clones) == 1;
        if is_last && !std::thread::panicking() {
            self.ledger.verify(|| self.session.stats());
        }
    }
}

impl Host {
    /// Starts a session.
    ///
    /// # Panics
    /// When that fails.
    #[must_use]
    pub fn open(name: &str, setup: &Setup) -> Self {
        let session = Session::new(setup.config(name));
        Self {
            session: session.unwrap_or_else(|e| panic!("session {name}: {e}")),
            ledger: Arc::default(),
            clones: Arc::default(),
        }
    }

    /// Adds the session of another process as a peer.
    ///
    /// # Panics
    /// When its info is not accepted.
    pub fn knows(&self, process: &RemoteProcess) -> Peer {
        self.session.add_peer(&process.info()).expect("valid info")
    }

    /// Adds both sessions to each other as peers.
    pub fn meets(&self, process: &RemoteProcess) -> Peer {
        process.knows(self);
        self.knows(process)
    }

    /// Allocates and registers memory.
    ///
    /// # Panics
    /// When that fails.
    #[must_use]
    pub fn memory(&self, len: usize) -> LocalMemory {
        let memory = Memory::new(len);
        let region = memory.register(&self.session).expect("it has bytes");
        LocalMemory { memory, region }
    }

    /// Maps and registers memory that can be unmapped, see [`Memory::allow`].
    ///
    /// # Panics
    /// When that fails.
    #[must_use]
    pub fn mapped(&self, len: usize) -> LocalMemory {
        let memory = Memory::mapped(len);
        let region = memory.register(&self.session).expect("it has bytes");
        LocalMemory { memory, region }
    }

    /// Prepares a transfer.
    ///
    /// # Panics
    /// When that fails.
    #[must_use]
    pub fn transfer(
        &self,
        op: Op,
        peer: &Peer,
        local: &LocalMemory,
        remote: &RemoteMemory,
        copies: &[Copy],
    ) -> Tracked {
        self.transfer_to(op, peer, local, &remote.descriptor, copies)
    }

    /// Prepares a transfer to any region.
    ///
    /// # Panics
    /// When that fails.
    #[must_use]
    pub fn transfer_to(
        &self,
        op: Op,
        peer: &Peer,
        local: &LocalMemory,
        remote: &RemoteRegion,
        copies: &[Copy],
    ) -> Tracked {
        let segments = copies.iter().map(|copy| Segment {
            local: local.region.at(copy.local),
            remote: remote.at(copy.remote),
            len: copy.len,
        });
        let transfer = self.session.prepare(op, peer, segments);
        let transfer = transfer.unwrap_or_else(|e| panic!("{op:?} cannot be prepared: {e}"));
        let kind = match op {
            Op::Read => TransferKind::Read,
            Op::Write => TransferKind::Write,
        };
        Tracked::new(transfer, kind, &self.ledger)
    }

    /// Prepares a transfer over the same bytes, so often that it ends only by interference.
    #[must_use]
    pub fn endless(
        &self,
        op: Op,
        peer: &Peer,
        local: &LocalMemory,
        remote: &RemoteRegion,
    ) -> Tracked {
        let len = local.memory.len().min(remote.len());
        let bytes = Setup::ENDLESS_CHUNKS * self.session.config().chunk_bytes();
        let copies = vec![Copy::new(0, 0, len); bytes.div_ceil(len)];
        self.transfer_to(op, peer, local, remote, &copies)
    }

    /// Performs one transfer and waits for its end.
    ///
    /// # Panics
    /// When it fails.
    #[track_caller]
    pub fn run(
        &self,
        op: Op,
        peer: &Peer,
        local: &LocalMemory,
        remote: &RemoteMemory,
        copies: &[Copy],
    ) {
        let transfer = self.transfer(op, peer, local, remote, copies);
        transfer.post().expect("posted");
        done(&transfer);
    }

    /// Checks that a peer works: writes to it, reads back, and verifies every byte on both sides.
    #[track_caller]
    pub fn verify_traffic(&self, peer: &Peer, process: &RemoteProcess, seed: u64) {
        const LEN: usize = 300_007;
        let (here, there) = (self.memory(LEN), process.memory(LEN));
        here.memory.fill(Content::pattern(seed));
        process.poison(&there);
        let copies = [Copy::new(11, 5, LEN - 100)];
        self.run(Op::Write, peer, &here, &there, &copies);
        let arrived = Expected::untouched(crate::pattern::REMOTE_POISON)
            .with(5..LEN - 95, Content::pattern(seed).skip(11));
        process.check(&there, &arrived);
        here.poison();
        self.run(Op::Read, peer, &here, &there, &[Copy::new(3, 5, LEN - 100)]);
        let back =
            Expected::untouched(LOCAL_POISON).with(3..LEN - 97, Content::pattern(seed).skip(11));
        here.check(&back);
        process.deregister(&there);
        self.verify_figures(process);
    }

    /// Checks that both sides have counted the requested transfers, and the same bytes between
    /// them, unless something is in flight.
    #[track_caller]
    pub fn verify_figures(&self, process: &RemoteProcess) {
        self.ledger.verify(|| self.session.stats());
        let names = [self.session.name(), process.name()];
        ledger::verify_agreement(names, || {
            [Figures::of(&self.session.stats()), process.figures()]
        });
    }

    /// Returns the next notification.
    ///
    /// # Panics
    /// When none comes.
    pub fn notification(&self) -> tcpx::Notification {
        self.session
            .wait_notification(GUARD)
            .expect("a notification")
    }

    /// Returns the next `count` notifications.
    #[must_use]
    pub fn next_notifications(&self, count: usize) -> Vec<tcpx::Notification> {
        let mut all = Vec::new();
        wait_until("all notifications are there", || {
            all.extend(self.session.notifications());
            all.len() >= count
        });
        all
    }
}

/// Registered memory of a [`Host`].
#[derive(Clone, Debug)]
pub struct LocalMemory {
    /// The bytes.
    pub memory: Memory,
    /// The registration.
    pub region: Region,
}

impl LocalMemory {
    /// Fills all of it with a pattern that nobody writes.
    pub fn poison(&self) {
        self.memory.fill(Content::Byte(LOCAL_POISON));
    }

    /// Compares all of it.
    ///
    /// # Panics
    /// When a byte is not as expected.
    #[track_caller]
    pub fn check(&self, expected: &Expected) {
        if let Err(mismatch) = self.memory.check(expected) {
            panic!("the memory of this process is wrong {mismatch}");
        }
    }

    /// Checks that it was not written since [`LocalMemory::poison`].
    #[track_caller]
    pub fn check_untouched(&self) {
        self.check(&Expected::untouched(LOCAL_POISON));
    }
}

/// Waits for a transfer, which must succeed.
///
/// # Panics
/// When it does not.
#[track_caller]
pub fn done(transfer: &Transfer) {
    if let Err(error) = transfer.wait(GUARD) {
        panic!("{transfer:?} was to succeed: {error}");
    }
}

/// Waits for a transfer, which must fail, and returns its error.
///
/// # Panics
/// When it succeeds or does not end.
#[track_caller]
pub fn fails(transfer: &Transfer) -> tcpx::Error {
    let error = transfer.wait(GUARD).expect_err("it was to fail");
    assert!(
        transfer.poll().is_terminal(),
        "{transfer:?} was to fail, and has not ended: {error}"
    );
    error
}

/// Returns the addresses tried, from an error about an unreachable peer.
///
/// # Panics
/// When it is another error, or names no address.
#[must_use]
pub fn attempts(error: tcpx::Error) -> Vec<tcpx::Attempt> {
    match error {
        tcpx::Error::PeerUnreachable { attempts, .. } if !attempts.is_empty() => attempts,
        error => panic!("not about a peer that cannot be reached: {error:?}"),
    }
}

/// Returns the error of everything that was in flight on the connection to a peer.
#[must_use]
pub fn lost(peer: &str, cause: tcpx::LostCause) -> tcpx::Error {
    tcpx::Error::PeerLost {
        peer: peer.to_owned(),
        cause,
    }
}

/// Returns the bytes moved between this process and a peer, in any direction and on any path.
fn moved(peer: &Peer) -> u64 {
    let lanes = peer.lanes().into_iter();
    let sent: u64 = lanes.map(|l| l.bytes_sent + l.bytes_received).sum();
    sent + peer.same_host().map_or(0, |same_host| same_host.bytes)
}

/// Waits until bytes are moving between this process and a peer.
pub fn wait_for_traffic(peer: &Peer) {
    let before = moved(peer);
    wait_until("bytes move", || moved(peer) > before + (256 << 10));
}

/// Waits until no byte has moved on a peer's lanes for a moment: everything in flight has arrived.
pub fn wait_for_silence(peer: &Peer) {
    let mut before = (moved(peer), std::time::Instant::now());
    wait_until("the lanes are silent", || {
        let now = moved(peer);
        if now != before.0 {
            before = (now, std::time::Instant::now());
        }
        before.1.elapsed() > Duration::from_millis(150)
    });
}
