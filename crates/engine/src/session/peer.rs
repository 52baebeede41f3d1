//! Peers as applications see them.

use std::sync::Arc;
use std::time::Duration;

use tcpx_net::InProcess;

use crate::error::{Error, LostCause};
use crate::link::{LaneInfo, SameHostInfo};
use crate::peers::{PeerShared, SessionCore};

/// A remote session, or this one itself. Clones are handles to the same peer.
#[derive(Clone)]
pub struct Peer {
    pub(crate) shared: InProcess<Arc<PeerShared>>,
    pub(crate) core: InProcess<Arc<SessionCore>>,
}

impl Peer {
    /// What the peer calls itself.
    #[must_use]
    pub fn name(&self) -> &str {
        self.shared.name()
    }

    /// Whether a connection is there now.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        self.core.is_current() && self.shared.link().is_some()
    }

    /// Connects now rather than with the first transfer. Returns at once when a connection is there; either
    /// side may do this, both at once included.
    ///
    /// # Errors
    /// The peer cannot be reached, refuses us, or `timeout` runs out first (the attempt then goes
    /// on by itself).
    pub fn connect(&self, timeout: Duration) -> Result<(), Error> {
        self.check()?;
        self.shared.connect(&self.core, timeout)
    }

    /// Ends all connections to the peer; its transfers fail, also those that wait for a connection. A later
    /// transfer connects anew.
    pub fn disconnect(&self) {
        if !self.core.is_current() {
            return;
        }
        let error = Error::PeerLost {
            peer: self.name().to_owned(),
            cause: LostCause::Disconnected,
        };
        self.shared.disconnect("the peer disconnected", &error);
    }

    /// The lanes of the current connection; none when there is no connection.
    #[must_use]
    pub fn lanes(&self) -> Vec<LaneInfo> {
        if !self.core.is_current() {
            return Vec::new();
        }
        let link = self.shared.link();
        link.map_or_else(Vec::new, |link| link.lane_infos())
    }

    /// Whether memory of the peer is copied directly, since it is on this host, and otherwise why not;
    /// none when there is no connection.
    #[must_use]
    pub fn same_host(&self) -> Option<SameHostInfo> {
        if !self.core.is_current() {
            return None;
        }
        self.shared.link().and_then(|link| link.same_host_info())
    }

    /// Counts how often the peer was lost so far: connected, and then no longer. Tagged messages that were
    /// in flight have failed each time; protocols layered on them must restart.
    #[must_use]
    pub fn losses(&self) -> u64 {
        self.shared.losses()
    }

    /// Sends a ping on one lane and waits for the answer, which the peer gives without its
    /// application's help.
    ///
    /// # Errors
    /// The peer is not connected, has no such lane, or does not answer within `timeout`.
    pub fn round_trip(&self, lane: usize, timeout: Duration) -> Result<Duration, Error> {
        self.check()?;
        let link = self
            .shared
            .link()
            .ok_or_else(|| Error::PeerNotConnected(self.name().to_owned()))?;
        let rtt = link.round_trip(lane, timeout)?;
        if rtt > Duration::ZERO {
            self.shared.measured_round_trip(rtt);
        }
        Ok(rtt)
    }

    /// Refuses a call in a process that was forked.
    pub(super) fn check(&self) -> Result<(), Error> {
        Ok(self.core.check()?)
    }
}

impl std::fmt::Debug for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Peer")
            .field("name", &self.name())
            .field("connected", &self.is_connected())
            .finish_non_exhaustive()
    }
}
