//! The path of payload to a connected peer, and why it is not a better one.

use serde::{Deserialize, Serialize};

use crate::config::TransportKind;

/// How payload travels to a connected peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Route {
    /// The transport of payload that is not copied directly.
    pub transport: TransportKind,
    /// Whether memory is copied directly.
    pub same_host: SameHostUse,
}

/// Whether memory of a peer is copied directly.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SameHostUse {
    /// Memory is copied directly.
    Used,
    /// The peer is on another host, or in another network namespace.
    OtherHost,
    /// The setting `same_host` is off.
    Off,
    /// The two sides have not decided yet.
    Undecided,
    /// The peer is on this host, and its memory cannot be copied directly:
    /// [`Peer::same_host`](crate::Peer::same_host) says why.
    Impossible,
}

impl SameHostUse {
    /// The name in metrics.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Used => "used",
            Self::OtherHost => "other_host",
            Self::Off => "off",
            Self::Undecided => "undecided",
            Self::Impossible => "impossible",
        }
    }
}
