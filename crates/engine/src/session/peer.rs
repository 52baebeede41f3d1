//! Peers as applications see them.

use std::sync::Arc;
use std::time::Duration;

use tcpx_net::InProcess;

use super::closing;
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
    /// Returns the peer's name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.shared.name()
    }

    /// Returns whether there is currently a connection.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        self.core.is_current() && self.shared.link().is_some()
    }

    /// Connects now instead of with the first transfer. Returns at once if there is a connection;
    /// either side may call this, also both at once.
    ///
    /// # Errors
    /// The peer cannot be reached, refuses us, or `timeout` expires first (the attempt then
    /// continues).
    pub fn connect(&self, timeout: Duration) -> Result<(), Error> {
        self.check()?;
        self.shared.connect(&self.core, timeout)
    }

    /// Ends all connections to the peer; its transfers fail, including those that wait for a
    /// connection. A later transfer reconnects.
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

    /// Returns the lanes of the current connection; empty without a connection.
    #[must_use]
    pub fn lanes(&self) -> Vec<LaneInfo> {
        if !self.core.is_current() {
            return Vec::new();
        }
        let link = self.shared.link();
        link.map_or_else(Vec::new, |link| link.lane_infos())
    }

    /// Returns whether the peer's memory is copied directly because it is on this host, or why not;
    /// `None` without a connection.
    #[must_use]
    pub fn same_host(&self) -> Option<SameHostInfo> {
        if !self.core.is_current() {
            return None;
        }
        self.shared.link().and_then(|link| link.same_host_info())
    }

    /// Returns how often the peer has lost its last connection. Tagged messages in flight have
    /// failed each time; protocols layered on them must restart.
    #[must_use]
    pub fn losses(&self) -> u64 {
        self.shared.losses()
    }

    /// Sends a ping on one lane and waits for the answer, which does not involve the peer's
    /// application.
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

    /// Waits until the peer's session has received all notifications that were sent to it, also
    /// those that wait for a connection. Call this, or [`Session::close`](crate::Session::close),
    /// before the process ends. The peer's application need not do anything, unless it has so many
    /// notifications that its session takes no more (`queue_bytes`).
    ///
    /// # Errors
    /// The peer is not connected, was lost meanwhile, or does not answer within `timeout`.
    pub fn flush(&self, timeout: Duration) -> Result<(), Error> {
        self.check()?;
        self.core.context().hurry();
        closing::flush_peer(&self.shared, timeout)
    }

    /// Refuses a call in a forked child.
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
