//! What the two machines are made from.

use core::num::NonZeroU32;
use core::ops::BitAnd;

use crate::info::{Name, SessionId};
use crate::secret::Secret;

/// Size of a [`Nonce`] in bytes.
pub const NONCE_LEN: usize = 32;

/// Random bytes that make a handshake unlike any other. They must come from the system's secure
/// random source and be used once.
pub type Nonce = [u8; NONCE_LEN];

/// Optional parts of the protocol, one bit each; a lane uses those that both sides offer.
///
/// Bits that this build does not know are kept in an offer and never chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Features(u32);

impl Features {
    /// Nothing optional.
    pub const NONE: Self = Self(0);

    /// Reserved for the encryption of everything after the handshake.
    ///
    /// No build implements it yet, so [`Client`](super::Client) and [`Server`](super::Server)
    /// remove it from what they are told to offer: a lane can never be taken for encrypted.
    /// Offers are covered by both tags, so whoever sits on the path cannot remove it later on.
    pub const ENCRYPTION: Self = Self(1);

    /// Large payloads travel on comms of a NCCL net plugin beside the lane.
    pub const COMMS: Self = Self(2);

    /// Takes the bits as they travel.
    #[must_use]
    pub const fn from_bits(bits: u32) -> Self {
        Self(bits)
    }

    /// The bits as they travel.
    #[must_use]
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// Whether every bit of `other` is in `self`.
    #[must_use]
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// `self` with what has no implementation taken out.
    pub(super) const fn offerable(self) -> Self {
        Self(self.0 & !Self::ENCRYPTION.0)
    }
}

impl BitAnd for Features {
    type Output = Self;

    fn bitand(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }
}

/// Who this side is: the parts of its own connection info that the handshake needs.
#[derive(Clone, Debug)]
pub struct Identity {
    /// What this session calls itself.
    pub name: Name,
    /// Which session this is.
    pub id: SessionId,
    /// This session's own secret.
    pub secret: Secret,
}

/// Which lane a client opens: valid by construction, `lane < lanes`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneHello {
    pub(super) connection: u64,
    /// `lane < lanes`
    pub(super) lane: u16,
    pub(super) lanes: u16,
    pub(super) window: NonZeroU32,
}

/// A lane's number is not below the number of lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("lane {lane} of {lanes}: lanes are numbered from 0")]
pub struct LaneError {
    /// The lane's number.
    pub lane: u16,
    /// How many lanes there are.
    pub lanes: u16,
}

impl LaneHello {
    /// Describes lane number `lane` of the `lanes` lanes of `connection`.
    ///
    /// `connection` is any number that is the same for all lanes of one connection and different
    /// for the client's other connections. `window` is how many chunks the server may keep in
    /// flight on this lane. Fails unless `lane < lanes`.
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
        })
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

    #[test]
    fn features_are_a_set() {
        let both = Features::from_bits(0b110) & Features::from_bits(0b011);
        assert_eq!(both.bits(), 0b010);
        assert!(Features::from_bits(0b110).contains(both) && both.contains(Features::NONE));
        assert!(!both.contains(Features::from_bits(0b110)));
        assert_eq!(Features::from_bits(0b111).offerable().bits(), 0b110);
    }
}
