//! Counts the requests of a story independently of the engine, and compares them with its
//! statistics.
//!
//! [`Tracked`] transfers are noted in a [`Ledger`] as they are posted and as they end.
//! [`Ledger::verify`] compares it with the session's statistics, and [`verify_agreement`]
//! compares those of two sessions that were connected.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tcpx::stats::{PathKind, PeerStats, SessionStats, TransferKind};
use tcpx::{Error, Transfer, TransferState};

use crate::story::GUARD;

/// The known transfers of a session.
#[derive(Debug, Default)]
pub struct Ledger {
    truth: Mutex<Truth>,
    /// Held shared while a transfer is posted and recorded, exclusively while the statistics are
    /// read: they contain a posting if and only if the ledger does.
    posting: RwLock<()>,
}

#[derive(Clone, Debug, Default)]
struct Truth {
    started: u64,
    /// Number of postings that the engine refused: some count as started.
    refused: u64,
    /// Number of postings that were dropped before their end was known.
    abandoned: u64,
    /// Number of postings whose end was not observed yet.
    open: u64,
    failed: u64,
    aborted: u64,
    completed: [u64; 4],
    bytes: [u64; 4],
}

impl Truth {
    /// Number of postings whose end is unknown.
    fn unknown(&self) -> u64 {
        self.open + self.abandoned
    }
}

/// A transfer that is recorded in a ledger.
///
/// One thread at a time posts and observes it: a posting and its record are two steps. Threads that
/// share the transfer use the [`Transfer`] inside; the ledger treats that as a transfer without a
/// ledger.
#[derive(Debug)]
pub struct Tracked {
    transfer: Transfer,
    kind: TransferKind,
    ledger: Arc<Ledger>,
    is_open: Cell<bool>,
}

impl Tracked {
    /// Records a transfer that is posted explicitly.
    #[must_use]
    pub fn new(transfer: Transfer, kind: TransferKind, ledger: &Arc<Ledger>) -> Self {
        Self {
            transfer,
            kind,
            ledger: Arc::clone(ledger),
            is_open: Cell::new(false),
        }
    }

    /// Records a transfer that is in flight from the beginning: a tagged message.
    #[must_use]
    pub fn started(transfer: Transfer, kind: TransferKind, ledger: &Arc<Ledger>) -> Self {
        let tracked = Self::new(transfer, kind, ledger);
        let _ = tracked.start(|| Ok(()));
        tracked
    }

    /// As [`Transfer::post`].
    ///
    /// # Errors
    /// As [`Transfer::post`].
    pub fn post(&self) -> Result<(), Error> {
        self.note_end();
        self.start(|| self.transfer.post())
    }

    /// As [`Transfer::post_with_notification`].
    ///
    /// # Errors
    /// As [`Transfer::post_with_notification`].
    pub fn post_with_notification(&self, message: &[u8]) -> Result<(), Error> {
        self.note_end();
        self.start(|| self.transfer.post_with_notification(message))
    }

    /// Posts and records the transfer, in one step for [`Ledger::verify`].
    fn start(&self, post: impl FnOnce() -> Result<(), Error>) -> Result<(), Error> {
        let posting = self.ledger.posting.read();
        let _posting = posting.unwrap_or_else(PoisonError::into_inner);
        let outcome = post();
        let mut truth = self.ledger.lock();
        match &outcome {
            Ok(()) => {
                truth.started += 1;
                truth.open += 1;
                self.is_open.set(true);
            }
            Err(_) => truth.refused += 1,
        }
        outcome
    }

    /// Records how the last posting has ended, if it has; returns whether nothing is open.
    fn note_end(&self) -> bool {
        if !self.is_open.get() {
            return true;
        }
        let state = self.transfer.poll();
        if !state.is_terminal() {
            return false;
        }
        let mut truth = self.ledger.lock();
        match state {
            TransferState::Done => {
                let kind = self.kind as usize;
                truth.completed[kind] += 1;
                truth.bytes[kind] += match self.kind {
                    TransferKind::Receive => self.transfer.received(),
                    _ => self.transfer.bytes(),
                };
            }
            TransferState::Aborted => truth.aborted += 1,
            _ => truth.failed += 1,
        }
        truth.open -= 1;
        self.is_open.set(false);
        true
    }
}

impl Deref for Tracked {
    type Target = Transfer;

    fn deref(&self) -> &Transfer {
        &self.transfer
    }
}

impl Drop for Tracked {
    fn drop(&mut self) {
        if !self.note_end() {
            let mut truth = self.ledger.lock();
            truth.open -= 1;
            truth.abandoned += 1;
        }
    }
}

impl Ledger {
    fn lock(&self) -> MutexGuard<'_, Truth> {
        self.truth.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Compares the requests with the session's statistics, which `read` returns, and returns
    /// those. Exact, except for transfers whose end was not observed, and for transfers without a
    /// ledger.
    ///
    /// Counters are read one after the other: a transfer that ends meanwhile may be in some of
    /// them only. The comparison is repeated where such a transfer is possible.
    ///
    /// # Panics
    /// When they differ.
    #[track_caller]
    pub fn verify(&self, read: impl Fn() -> SessionStats) -> SessionStats {
        let start = Instant::now();
        loop {
            let (truth, stats) = self.snapshot(&read);
            let counted = Counts::sum(&stats);
            let Err(difference) = truth.compare(&counted) else {
                return stats;
            };
            let is_quiet = truth.unknown() + truth.others(&counted) == 0;
            assert!(
                !is_quiet && start.elapsed() < GUARD,
                "{difference}: asked for {truth:?}; counted {counted:?}"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Returns the requests, and statistics that contain the same postings.
    fn snapshot(&self, read: impl Fn() -> SessionStats) -> (Truth, SessionStats) {
        let posting = self.posting.write();
        let _posting = posting.unwrap_or_else(PoisonError::into_inner);
        // Ends are recorded after they were counted: the requests are read first.
        let truth = self.lock().clone();
        (truth, read())
    }
}

impl Truth {
    /// Number of counted transfers without a ledger.
    fn others(&self, counted: &Counts) -> u64 {
        let started: u64 = counted.started.iter().sum();
        started.saturating_sub(self.started + self.refused)
    }

    /// Returns the first difference from what was counted.
    fn compare(&self, counted: &Counts) -> Result<(), String> {
        let (unknown, others) = (self.unknown(), self.others(counted));
        let within = |what: &str, counted: u64, known: u64, more: u64| match (known
            ..=known.saturating_add(more))
            .contains(&counted)
        {
            true => Ok(()),
            false => Err(format!("{what}: {counted}, not {known}")),
        };
        let started = counted.started.iter().sum();
        within("started", started, self.started, self.refused + others)?;
        for kind in TransferKind::ALL {
            let (index, label) = (kind as usize, kind.label());
            let (completed, more) = (counted.completed[index], unknown + others);
            within(label, completed, self.completed[index], more)?;
            let more = if more == 0 { 0 } else { u64::MAX };
            within(label, counted.bytes[index], self.bytes[index], more)?;
        }
        within("aborted", counted.aborted, self.aborted, unknown + others)?;
        let more = self.refused + unknown + others;
        within("failed", counted.failed, self.failed, more)?;
        counted.compare_moved()
    }
}

/// The statistics of a session to one peer, or to all.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Counts {
    started: [u64; 4],
    completed: [u64; 4],
    bytes: [u64; 4],
    aborted: u64,
    failed: u64,
    in_flight: u64,
    /// Bytes moved for own transfers, on all paths: READ, WRITE.
    own: [u64; 2],
    /// Bytes on lanes: written, read, landed, served.
    lanes: [u64; 4],
    /// Chunks on lanes, in the same order.
    chunks: [u64; 4],
    retried: u64,
    notified: [u64; 2],
    heard: [u64; 2],
    connections_lost: u64,
    /// Streams lost while their connection continued.
    pub lanes_lost: u64,
}

impl Counts {
    fn of(peer: &PeerStats) -> Self {
        let lanes = [PathKind::Stream, PathKind::Staged, PathKind::Plugin];
        let lanes = lanes.map(|path| peer.path(path));
        let [a, b, c] = lanes;
        let lanes = a + b + c;
        let lanes = [lanes.written, lanes.read, lanes.landed, lanes.served];
        let total = peer.total();
        Self {
            started: peer.transfers.map(|t| t.started),
            completed: peer.transfers.map(|t| t.completed),
            bytes: peer.transfers.map(|t| t.bytes),
            aborted: peer.transfers.iter().map(|t| t.aborted).sum(),
            failed: peer.failures.total(),
            in_flight: peer.in_flight(),
            own: [total.read.bytes, total.written.bytes],
            lanes: lanes.map(|moved| moved.bytes),
            chunks: lanes.map(|moved| moved.chunks),
            retried: peer.retried.bytes,
            notified: [peer.notifications_sent.count, peer.notifications_sent.bytes],
            heard: [
                peer.notifications_received.count,
                peer.notifications_received.bytes,
            ],
            connections_lost: peer.connections_lost,
            lanes_lost: peer.lanes_lost,
        }
    }

    fn sum(stats: &SessionStats) -> Self {
        let mut sum = Self::default();
        for peer in stats.all().map(Self::of) {
            for kind in 0..4 {
                sum.started[kind] += peer.started[kind];
                sum.completed[kind] += peer.completed[kind];
                sum.bytes[kind] += peer.bytes[kind];
            }
            sum.aborted += peer.aborted;
            sum.failed += peer.failed;
            sum.in_flight += peer.in_flight;
            sum.own[0] += peer.own[0];
            sum.own[1] += peer.own[1];
        }
        sum
    }

    /// Returns whether the peer has counted the same bytes for transfers of this side.
    fn agrees(&self, peer: &Self) -> bool {
        let [written, read, ..] = self.lanes;
        let [.., landed, served] = peer.lanes;
        // Answers lost with a lane were sent and have not arrived: their chunks were requested
        // again. Answers of an aborted transfer arrive, and are dropped.
        let is_read_whole = self.retried + self.failed + self.aborted == 0;
        let is_served = match is_read_whole {
            true => served == read && self.chunks[1] == peer.chunks[3],
            false => served >= read,
        };
        written == landed
            && self.chunks[0] == peer.chunks[2]
            && is_served
            && self.notified[0] >= peer.heard[0]
            && self.notified[1] >= peer.heard[1]
    }

    /// Compares the bytes moved with the sizes of the ended transfers: each byte counts once, also
    /// if lanes were lost.
    fn compare_moved(&self) -> Result<(), String> {
        let [read, written] = self.own;
        let [of_reads, of_writes, _, of_receives] = self.bytes;
        let is_at_rest = self.failed + self.aborted + self.in_flight == 0;
        // Short tagged messages travel inside their announcement.
        let (most_read, most_written) = match is_at_rest {
            true => (of_reads + of_receives, of_writes),
            false => (u64::MAX, u64::MAX),
        };
        if !(of_reads..=most_read).contains(&read) {
            return Err(format!("bytes read: {read}, not {of_reads}"));
        }
        if !(of_writes..=most_written).contains(&written) {
            return Err(format!("bytes written: {written}, not {of_writes}"));
        }
        Ok(())
    }
}

/// The statistics of a session, in the form that is compared.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Figures {
    peers: BTreeMap<String, Counts>,
}

impl Figures {
    /// Converts the statistics of a session.
    #[must_use]
    pub fn of(stats: &SessionStats) -> Self {
        let peers = stats.peers.iter();
        let peers = peers.map(|peer| (peer.name.clone(), Counts::of(peer)));
        Self {
            peers: peers.collect(),
        }
    }

    /// Returns the statistics of one peer.
    #[must_use]
    pub fn peer(&self, name: &str) -> Counts {
        self.peers.get(name).cloned().unwrap_or_default()
    }

    /// Returns whether two sessions have counted the same bytes on the lanes between each other.
    /// `None` if they need not: something is in flight, or a connection was lost together with the
    /// last acknowledgements.
    fn agree(&self, name: &str, other: &Self, other_name: &str) -> Option<bool> {
        let (here, there) = (self.peer(other_name), other.peer(name));
        let is_lost = here.connections_lost + there.connections_lost > 0;
        if is_lost || here.in_flight + there.in_flight > 0 {
            return None;
        }
        Some(here.agrees(&there) && there.agrees(&here))
    }
}

/// Checks that two sessions have counted the same bytes between each other. `figures` returns the
/// statistics of both; the last counts of one side may be a moment late.
///
/// # Panics
/// When they differ and stay so.
#[track_caller]
pub fn verify_agreement(names: [&str; 2], mut figures: impl FnMut() -> [Figures; 2]) {
    let start = Instant::now();
    loop {
        let [here, there] = figures();
        if here.agree(names[0], &there, names[1]) != Some(false) {
            return;
        }
        assert!(
            start.elapsed() < GUARD,
            "{} has counted {:?}, {} has counted {:?}",
            names[0],
            here.peer(names[1]),
            names[1],
            there.peer(names[0]),
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}
