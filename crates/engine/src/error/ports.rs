//! Text for listen ports that are taken.

use std::fmt;
use std::net::SocketAddr;

use crate::config::PortRange;

/// Displays that no port of a range is free, with the remedy.
pub(super) struct Taken<'a>(pub(super) &'a PortRange, pub(super) &'a SocketAddr);

impl fmt::Display for Taken<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(ports, address) = self;
        let first = *ports.ports().start();
        match ports.count() {
            _ if ports.is_any() => write!(
                f,
                "no port is free at all addresses of this session (last tried: {address})"
            ),
            1 => write!(
                f,
                "the port {first} of TCPX_LISTEN_PORT is taken ({address}): give a range that the \
                 sessions of this host share, such as {first}-{}",
                first.saturating_add(15)
            ),
            count => write!(
                f,
                "all {count} ports of TCPX_LISTEN_PORT={ports} are taken (last tried: \
                 {address}): widen the range, each session of this host takes one port"
            ),
        }
    }
}
