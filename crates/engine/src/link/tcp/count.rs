//! Counters and descriptions of lanes.

use std::sync::atomic::Ordering;

use super::Connection;
use super::lane::{Books, Lane};
use crate::carrier::comm::is_inline;
use crate::config::SameHostKind;
use crate::link::LaneInfo;
use crate::stats::{LaneStats, PathKind, Route, SameHostUse};
use crate::transfer::ChunkRef;

impl Lane {
    pub(super) fn info(&self) -> LaneInfo {
        LaneInfo {
            index: self.index(),
            local: self.local(),
            remote: self.remote(),
            bytes_sent: self.bytes_sent.load(Ordering::Relaxed),
            bytes_received: self.bytes_received.load(Ordering::Relaxed),
            is_up: !self.is_down(),
            failovers: self.failovers,
        }
    }

    /// Publishes what the lane has in flight and queued, for the choice of lanes.
    pub(super) fn note_load(&self, books: &Books) {
        let (load, queued) = (books.lane.load() as usize, books.lane.offered());
        self.load.store(load, Ordering::Relaxed);
        self.queued.store(queued, Ordering::Relaxed);
    }

    fn stats(&self, with_kernel: bool) -> LaneStats {
        let info = self.info();
        let queued = self.books.lock().lane.offered();
        LaneStats {
            index: info.index,
            local: info.local,
            remote: info.remote,
            is_up: info.is_up,
            failovers: info.failovers,
            wire_sent: info.bytes_sent,
            wire_received: info.bytes_received,
            traffic: PathKind::ALL.map(|path| self.counters.traffic(path)),
            waits: self.counters.waits(),
            in_flight: self.load.load(Ordering::Relaxed) as u64,
            queued,
            kernel: with_kernel.then(|| self.stream.tcp_info().ok()).flatten(),
        }
    }

    /// Returns the path of a payload that this side sends, according to
    /// [`SendCarriers`](crate::carrier::SendCarriers).
    pub(super) fn path_of(&self, is_on_device: bool, bytes: usize) -> PathKind {
        match is_on_device {
            _ if self.has_comm && !is_inline(bytes) => PathKind::Plugin,
            true => PathKind::Staged,
            false => PathKind::Stream,
        }
    }

    /// Returns the path of a WRITE chunk of this side.
    pub(super) fn path_of_chunk(&self, chunk: &ChunkRef) -> PathKind {
        self.path_of(chunk.device().is_some(), chunk.bytes())
    }

    /// Records whether the kernel accepts no more bytes.
    /// Must be called with the sending half locked.
    pub(super) fn note_blocked(&self, is_blocked: bool) {
        if is_blocked && !self.is_blocked() {
            self.counters.waits_for_socket();
        }
        self.blocked.store(is_blocked, Ordering::Release);
    }
}

impl Connection {
    /// Returns the statistics of all lanes, including the express lane.
    pub(super) fn stats(&self, with_kernel: bool) -> (Vec<LaneStats>, u64) {
        let lanes = self.lanes.load();
        let lanes = lanes.iter().map(|lane| lane.stats(with_kernel));
        (lanes.collect(), self.messages.kept() as u64)
    }

    /// Returns how payload travels.
    pub(super) fn route(&self) -> Route {
        let config = &self.context.config;
        let is_used = self.same_host.info().why_not.is_none();
        let same_host = match config.same_host() {
            _ if is_used => SameHostUse::Used,
            _ if !self.is_on_this_host() => SameHostUse::OtherHost,
            SameHostKind::Off => SameHostUse::Off,
            _ if self.same_host.is_deciding() => SameHostUse::Undecided,
            _ => SameHostUse::Impossible,
        };
        let transport = config.transport();
        Route {
            transport,
            same_host,
        }
    }

    /// Returns whether each lane connects an address with itself.
    pub(crate) fn is_on_this_host(&self) -> bool {
        let lanes = self.lanes.load();
        let mut lanes = lanes.iter();
        lanes.all(|lane| lane.local().ip() == lane.remote().ip())
    }

    /// Counts a WRITE chunk of a lost lane that has landed according to the peer.
    pub(super) fn count_landed(&self, chunk: &ChunkRef) {
        let path = match self.lanes.load().first() {
            Some(lane) => lane.path_of_chunk(chunk),
            None => return,
        };
        let counters = self.above.counters();
        counters.moved(path, true, 1, chunk.bytes() as u64);
    }
}
