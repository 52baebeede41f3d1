//! Limits for the connections of a client that has proven itself.
//!
//! A client that has this session's connection info can prove itself, under any number of
//! identities. So there is a limit per identity, one per session, and one for the descriptors of
//! all accepted lanes. The last two do not apply to peers whose connection info is loaded: invented
//! identities cannot block these peers.

use tcpx_net::process::descriptor_limit;
use tcpx_proto::handshake::{Established, RejectCode};
use tcpx_proto::info::SessionId;

use super::ControlLoop;
use super::listen::Incoming;
use crate::log::limited;

/// Limits the lanes that a peer may request: the largest setting, and the express lane.
const MAX_LANES: u16 = 65;

/// Returns how many descriptors lanes of accepted connections may use: the session, its application
/// and peers whose connection info is loaded need some as well.
fn most_lanes() -> usize {
    descriptor_limit() / 4 * 3
}

impl ControlLoop {
    /// Decides about a lane of a client that has proven itself.
    pub(super) fn admit(&mut self, client: &Established) -> Result<(), RejectCode> {
        if self.core.is_closing() {
            return Err(RejectCode::Closing);
        }
        if client.lanes > MAX_LANES {
            return Err(RejectCode::TooMany);
        }
        let peer = self.core.peer_by_id(client.peer_id);
        let info = peer.as_ref().and_then(|peer| peer.info());
        let name = client.peer_name.as_str();
        if info.as_ref().is_some_and(|info| !client.is_owned_by(info)) {
            limited!(
                WARN,
                peer = name,
                remedy = "give sessions names of their own; load the peer's new metadata if it was restarted",
                "a connection claimed an identity that is not its own"
            );
            return Err(RejectCode::BadProof);
        }
        if client.generation > 0 {
            // The stream replaces one of a lane that was admitted.
            return match self.link_of(client) {
                Some(_) => Ok(()),
                None => Err(RejectCode::UnknownConnection),
            };
        }
        let config = &self.core.context().config;
        let key = (client.peer_id, client.connection);
        let is_new = !self.incoming.arriving.contains_key(&key);
        if is_new {
            self.incoming.drop_abandoned(client.peer_id);
            let links = peer.map(|peer| peer.links()).unwrap_or_default();
            let accepted = links.iter().filter(|l| l.was_accepted() && !l.is_dead());
            let limit = config.max_connections_per_peer();
            if self.incoming.connections_of(client.peer_id) + accepted.count() >= limit {
                limited!(
                    WARN,
                    peer = name,
                    limit,
                    remedy = "raise TCPX_MAX_CONNECTIONS_PER_PEER here, or close sessions there",
                    "refused a connection: max_connections_per_peer"
                );
                return Err(RejectCode::TooMany);
            }
        }
        if info.is_some() {
            return Ok(());
        }
        let (mut connections, mut lanes) = self.incoming.held();
        for link in self.core.context().links() {
            if link.was_accepted() && !link.is_dead() {
                connections += 1;
                lanes += link.streams();
            }
        }
        let limit = config.max_connections();
        if is_new && connections >= limit {
            limited!(
                WARN,
                peer = name,
                limit,
                remedy =
                    "raise TCPX_MAX_CONNECTIONS, or load the metadata of peers that are welcome",
                "refused a connection: max_connections"
            );
            return Err(RejectCode::TooMany);
        }
        let limit = most_lanes();
        if lanes >= limit {
            limited!(
                WARN,
                peer = name,
                limit,
                remedy = "raise the limit of open files (ulimit -n), or lower TCPX_LANES",
                "refused a lane: too few file descriptors"
            );
            return Err(RejectCode::TooMany);
        }
        Ok(())
    }
}

impl Incoming {
    /// Removes connections whose client gave up before all lanes had arrived.
    fn drop_abandoned(&mut self, id: SessionId) {
        self.arriving.retain(|(known, _), arriving| {
            let mut lanes = arriving.lanes.iter().flatten();
            *known != id || !lanes.any(|(stream, _)| stream.has_hung_up())
        });
    }

    /// Counts the incomplete connections of a client.
    fn connections_of(&self, id: SessionId) -> usize {
        let all = self.arriving.keys().chain(self.plugging.keys());
        all.filter(|(known, _)| *known == id).count()
    }

    /// Counts incomplete connections, and their lanes that have arrived.
    fn held(&self) -> (usize, usize) {
        let arriving = self.arriving.values();
        let arriving = arriving.map(|a| a.lanes.iter().flatten().count());
        let lanes = arriving.chain(self.plugging.values().copied()).sum();
        (self.arriving.len() + self.plugging.len(), lanes)
    }
}
