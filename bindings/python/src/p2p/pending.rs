//! Transfers in flight, by number.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;
use tcpx::{Error, Transfer, TransferState};

use super::connections::Connection;
use super::endpoint::failed;
use super::memory::Memory;

/// Number of failures remembered for callers that ask again.
const FAILURES: usize = 1024;

/// The transfers that one call started.
pub(super) struct Started {
    /// Dropped first: transfers in flight are aborted before the memory goes.
    pub(super) parts: Vec<Transfer>,
    /// Memory registered only for the transfer, which ends with it.
    pub(super) _memory: Vec<Arc<Memory>>,
    /// The connection that the transfers cannot outlive: the peer identifies messages by it.
    pub(super) on: Option<Connection>,
}

impl Started {
    /// Returns why the transfers can never complete, if so.
    pub(super) fn cut_off(&self) -> Option<Error> {
        self.on.as_ref().and_then(Connection::lost)
    }

    /// Returns whether all transfers have ended; fails with the first error.
    fn poll(&self) -> Result<bool, Error> {
        let mut done = true;
        for part in &self.parts {
            match part.poll() {
                TransferState::Done => {}
                TransferState::Prepared | TransferState::InProgress => done = false,
                _ => return Err(part.error().unwrap_or(Error::Aborted)),
            }
        }
        match self.cut_off() {
            Some(error) if !done => Err(error),
            _ => Ok(done),
        }
    }
}

#[derive(Default)]
pub(super) struct Pending {
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    started: HashMap<u64, Arc<Started>>,
    last_id: u64,
    failed: VecDeque<u64>,
    /// Number of transfers at which ended ones are swept.
    sweep_at: usize,
}

/// The state of a transfer.
pub(super) enum Known {
    Done,
    InFlight,
    Failed(Error),
    /// The transfer has already failed, or never existed.
    Nothing,
}

impl Pending {
    pub(super) fn add(&self, started: Started) -> u64 {
        let mut inner = self.inner.lock();
        if inner.started.len() >= inner.sweep_at.max(256) {
            inner.sweep();
        }
        inner.last_id += 1;
        let id = inner.last_id;
        inner.started.insert(id, Arc::new(started));
        id
    }

    pub(super) fn poll(&self, id: u64) -> Known {
        let started = {
            let inner = self.inner.lock();
            match inner.started.get(&id) {
                Some(started) => Arc::clone(started),
                None if id == 0 || id > inner.last_id || inner.failed.contains(&id) => {
                    return Known::Nothing;
                }
                // A transfer that is gone without a failure was done.
                None => return Known::Done,
            }
        };
        match started.poll() {
            Ok(false) => Known::InFlight,
            Ok(true) => {
                self.inner.lock().started.remove(&id);
                Known::Done
            }
            Err(error) => {
                self.inner.lock().fail(id);
                Known::Failed(error)
            }
        }
    }
}

impl Inner {
    fn fail(&mut self, id: u64) {
        self.started.remove(&id);
        if self.failed.len() == FAILURES {
            self.failed.pop_front();
        }
        self.failed.push_back(id);
    }

    /// Forgets ended transfers: some programs never poll.
    fn sweep(&mut self) {
        let ended = |(id, started): (&u64, &Arc<Started>)| match started.poll() {
            Ok(false) => None,
            Ok(true) => Some((*id, None)),
            Err(error) => Some((*id, Some(error))),
        };
        for (id, error) in self.started.iter().filter_map(ended).collect::<Vec<_>>() {
            match error {
                None => {
                    self.started.remove(&id);
                }
                Some(error) => {
                    failed("a transfer that was never polled", &error);
                    self.fail(id);
                }
            }
        }
        self.sweep_at = self.started.len() * 2;
    }
}
