//! The statistics of a session.

use super::shared::SessionCore;
use crate::stats::{SessionStats, Source};

impl SessionCore {
    /// Returns the statistics of the session, with the kernel's data for each lane if requested.
    pub(crate) fn stats(&self, with_kernel: bool) -> SessionStats {
        let (mut peers, gone) = self.context().stats.read();
        for peer in self.all_peers() {
            let Some(link) = peer.link() else { continue };
            let stats = peers.iter_mut().find(|stats| stats.name == peer.name());
            // Of several peers with the same name, only the lanes of one are shown.
            if let Some(stats) = stats.filter(|stats| stats.lanes.is_empty()) {
                stats.is_connected = true;
                stats.route = link.route();
                (stats.lanes, stats.queued_bytes) = link.lane_stats(with_kernel);
            }
        }
        SessionStats {
            name: self.name().to_owned(),
            peers,
            gone,
            slot_waits: self.context().staging.pool.waits(),
        }
    }
}

impl Source for SessionCore {
    fn read(&self) -> SessionStats {
        self.stats(true)
    }
}
