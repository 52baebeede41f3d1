//! Parameters of the client and the server.

use core::num::NonZeroU32;

use crate::info::{Name, SessionId};
use crate::secret::Secret;

/// Size of a [`Nonce`] in bytes.
pub const NONCE_LEN: usize = 32;

/// Random bytes that make each handshake unique. They must come from the system's secure random
/// source and be used once.
pub type Nonce = [u8; NONCE_LEN];

/// The identity of this side: the parts of its own connection info that the handshake needs.
#[derive(Clone, Debug)]
pub struct Identity {
    /// The name of this session.
    pub name: Name,
    /// The id of this session.
    pub id: SessionId,
    /// This session's own secret.
    pub secret: Secret,
}

/// The lane that a client opens: valid by construction, `lane < lanes`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneHello {
    pub(super) connection: u64,
    /// `lane < lanes`
    pub(super) lane: u16,
    pub(super) lanes: u16,
    pub(super) window: NonZeroU32,
    pub(super) generation: u32,
    pub(super) port: u16,
}

/// Reports a lane whose number is not below the number of lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("lane {lane} of {lanes}: lanes are numbered from 0")]
pub struct LaneError {
    /// The lane's number.
    pub lane: u16,
    /// Number of lanes.
    pub lanes: u16,
}

impl LaneHello {
    /// Describes lane number `lane` of the `lanes` lanes of `connection`.
    ///
    /// `connection` is any number that is the same for all lanes of one connection and different
    /// for the client's other connections. `window` is the number of chunks that the server may
    /// keep in flight on this lane. Fails unless `lane < lanes`.
    pub const fn new(
        connection: u64,
        lane: u16,
        lanes: u16,
        window: NonZeroU32,
    ) -> Result<Self, LaneError> {
        if lane >= lanes {
            return Err(LaneError { lane, lanes });
        }
        Ok(Self {
            connection,
            lane,
            lanes,
            window,
            generation: 0,
            port: 0,
        })
    }

    /// Sets the generation of the stream, counted from 0 per lane: a stream that reconnects a lost
    /// lane has the next one.
    #[must_use]
    pub const fn again(self, generation: u32) -> Self {
        Self { generation, ..self }
    }

    /// Sets the port on which the client listens; 0 for none. A server that loses the connection
    /// probes it to learn whether the client still exists.
    #[must_use]
    pub const fn listening_at(self, port: u16) -> Self {
        Self { port, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lane_is_below_the_number_of_lanes() {
        let new = |lane, lanes| LaneHello::new(1, lane, lanes, NonZeroU32::MIN).map(|_| ());
        assert_eq!(new(0, 1), Ok(()));
        assert_eq!(new(65534, 65535), Ok(()));
        assert_eq!(new(0, 0), Err(LaneError { lane: 0, lanes: 0 }));
        assert_eq!(new(4, 4), Err(LaneError { lane: 4, lanes: 4 }));
    }
}
