//! Negotiation of the protocol's optional features.

use core::fmt;
use core::ops::{BitAnd, BitOr};

/// Optional features of the protocol, one bit each.
///
/// A set may have bits that this build does not know; [`Offer`] describes how they are treated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Features(u32);

impl Features {
    /// Nothing optional.
    pub const NONE: Self = Self(0);

    /// Reserved for the encryption of everything after the handshake.
    ///
    /// No build implements it yet, so [`Offer::new`] never offers it: no lane can be mistaken for
    /// an encrypted one.
    pub const ENCRYPTION: Self = Self(1);

    /// Large payloads travel on comms of a NCCL net plugin beside the lane.
    pub const COMMS: Self = Self(1 << 1);

    /// Sessions on one host copy each other's memory, as [`crate::neighbour`] describes.
    pub const SAME_HOST: Self = Self(1 << 2);

    /// Reserved for connections that reconnect a lost lane and continue. Never offered yet.
    pub const RESUME: Self = Self(1 << 3);

    /// Features that have a name and no implementation.
    const RESERVED: Self = Self(Self::ENCRYPTION.0 | Self::RESUME.0);

    const NAMES: [(Self, &'static str); 4] = [
        (Self::ENCRYPTION, "encryption"),
        (Self::COMMS, "comms of a plugin"),
        (Self::SAME_HOST, "memory of the same host"),
        (Self::RESUME, "resuming"),
    ];

    /// Creates a set from its encoding.
    #[must_use]
    pub const fn from_bits(bits: u32) -> Self {
        Self(bits)
    }

    /// Returns the encoding of the set.
    #[must_use]
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// Returns whether every bit of `other` is in `self`.
    #[must_use]
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Returns whether no bit is set.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Returns the features in `self` that are not in `other`.
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }
}

impl BitAnd for Features {
    type Output = Self;

    fn bitand(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }
}

impl BitOr for Features {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// Lists the features by name, and unnamed ones as one number: `encryption, features 0x30`.
impl fmt::Display for Features {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rest = *self;
        let mut separator = "";
        for (feature, name) in Self::NAMES {
            if self.contains(feature) {
                write!(f, "{separator}{name}")?;
                separator = ", ";
                rest = rest.without(feature);
            }
        }
        match rest.bits() {
            0 if separator.is_empty() => f.write_str("nothing"),
            0 => Ok(()),
            bits => write!(f, "{separator}features {bits:#x}"),
        }
    }
}

/// The features that one side supports and requires: `requires` is a part of `offers`.
///
/// A lane uses the features that both sides offer, and is established only if they include
/// everything that either side requires. A side ignores an unknown feature in an offer; an unknown
/// feature in a requirement is not met.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Offer {
    offers: Features,
    /// `offers.contains(requires)`
    requires: Features,
}

/// The reason an [`Offer`] cannot be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OfferError {
    /// A required feature is not implemented by any build yet.
    #[error("{0} cannot be required: this build does not implement it")]
    NotImplemented(Features),

    /// A required feature is not offered.
    #[error("{0} cannot be required without being offered")]
    NotOffered(Features),
}

impl Offer {
    /// Nothing optional.
    pub const NONE: Self = Self {
        offers: Features::NONE,
        requires: Features::NONE,
    };

    /// Creates this side's offer.
    ///
    /// Reserved features are removed from `offers`. Fails if one of them is in `requires`, or any
    /// other feature that is not in `offers`.
    pub const fn new(offers: Features, requires: Features) -> Result<Self, OfferError> {
        let unimplemented = Features(requires.0 & Features::RESERVED.0);
        if !unimplemented.is_empty() {
            return Err(OfferError::NotImplemented(unimplemented));
        }
        match Self::from_wire(offers.without(Features::RESERVED), requires) {
            Ok(offer) => Ok(offer),
            Err(missing) => Err(OfferError::NotOffered(missing)),
        }
    }

    /// Decodes a peer's offer, which may have bits that this build does not know. Fails with the
    /// features that are required and not offered.
    pub(super) const fn from_wire(offers: Features, requires: Features) -> Result<Self, Features> {
        let missing = requires.without(offers);
        if !missing.is_empty() {
            return Err(missing);
        }
        Ok(Self { offers, requires })
    }

    /// Returns the features that this side supports.
    #[must_use]
    pub const fn offers(self) -> Features {
        self.offers
    }

    /// Returns the features that this side requires.
    #[must_use]
    pub const fn requires(self) -> Features {
        self.requires
    }
}

/// Chooses the features of a lane, or returns the requirements that are not met.
pub(super) fn negotiate(client: Offer, server: Offer) -> Result<Features, Missing> {
    let client_lacks = server.requires.without(client.offers);
    let server_lacks = client.requires.without(server.offers);
    match Missing::new(client_lacks, server_lacks) {
        Some(missing) => Err(missing),
        None => Ok(client.offers & server.offers),
    }
}

/// Requirements of one side that the other does not offer; at least one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Missing {
    client_lacks: Features,
    server_lacks: Features,
}

impl Missing {
    pub(super) fn new(client_lacks: Features, server_lacks: Features) -> Option<Self> {
        let missing = Self {
            client_lacks,
            server_lacks,
        };
        (!(client_lacks | server_lacks).is_empty()).then_some(missing)
    }

    /// Returns the features that the server requires and the client does not offer.
    #[must_use]
    pub const fn client_lacks(self) -> Features {
        self.client_lacks
    }

    /// Returns the features that the client requires and the server does not offer.
    #[must_use]
    pub const fn server_lacks(self) -> Features {
        self.server_lacks
    }
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.client_lacks, self.server_lacks) {
            (Features::NONE, server) => write!(f, "the server does not offer {server}"),
            (client, Features::NONE) => write!(f, "the client does not offer {client}"),
            (client, server) => write!(
                f,
                "the client does not offer {client}, the server does not offer {server}"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use alloc::string::ToString;

    use proptest::prelude::*;

    use super::*;

    fn bits(bits: u32) -> Features {
        Features::from_bits(bits)
    }

    #[test]
    fn features_are_a_set() {
        let both = bits(0b110) & bits(0b011);
        assert_eq!(both.bits(), 0b010);
        assert_eq!((bits(0b110) | bits(0b011)).bits(), 0b111);
        assert!(bits(0b110).contains(both) && both.contains(Features::NONE));
        assert!(!both.contains(bits(0b110)));
        assert_eq!(bits(0b110).without(bits(0b011)), bits(0b100));
        assert!(Features::NONE.is_empty() && !both.is_empty());
    }

    #[test]
    fn features_are_named() {
        assert_eq!(Features::NONE.to_string(), "nothing");
        assert_eq!(Features::COMMS.to_string(), "comms of a plugin");
        assert_eq!(bits(0x31).to_string(), "encryption, features 0x30");
        assert_eq!(bits(0x8000_0000).to_string(), "features 0x80000000");
    }

    #[test]
    fn what_is_only_reserved_is_neither_offered_nor_required() {
        let all = Offer::new(bits(u32::MAX), Features::COMMS).unwrap();
        assert_eq!(all.offers().bits(), 0xffff_fff6);
        for bit in [0, 3].map(|bit| bits(1 << bit)) {
            let refused = Offer::new(bits(u32::MAX), bit | Features::COMMS);
            assert_eq!(refused, Err(OfferError::NotImplemented(bit)));
        }
        let refused = Offer::new(Features::NONE, Features::COMMS);
        assert_eq!(refused, Err(OfferError::NotOffered(Features::COMMS)));
    }

    fn any_offer() -> impl Strategy<Value = Offer> {
        (any::<u32>(), any::<u32>())
            .prop_map(|(offers, mask)| Offer::from_wire(bits(offers), bits(offers & mask)).unwrap())
    }

    proptest! {
        /// Tests every bit on its own: chosen if both sides offer it, missing on the side that does
        /// not offer a feature which the other requires.
        #[test]
        fn every_bit_is_negotiated_on_its_own(client in any_offer(), server in any_offer()) {
            let result = negotiate(client, server);
            for bit in (0..32).map(|bit| bits(1 << bit)) {
                let [at_client, at_server] = [client, server].map(|side| side.offers.contains(bit));
                let client_lacks = server.requires.contains(bit) && !at_client;
                let server_lacks = client.requires.contains(bit) && !at_server;
                match result {
                    Ok(chosen) => {
                        prop_assert!(!client_lacks && !server_lacks);
                        prop_assert_eq!(chosen.contains(bit), at_client && at_server);
                    }
                    Err(missing) => {
                        prop_assert_eq!(missing.client_lacks.contains(bit), client_lacks);
                        prop_assert_eq!(missing.server_lacks.contains(bit), server_lacks);
                    }
                }
            }
            if let Ok(chosen) = result {
                prop_assert!(chosen.contains(client.requires | server.requires));
            }
        }

        #[test]
        fn what_is_required_is_offered(offers: u32, requires: u32) {
            let offer = Offer::from_wire(bits(offers), bits(requires));
            match requires & !offers {
                0 => prop_assert!(offer.is_ok()),
                missing => prop_assert_eq!(offer, Err(bits(missing))),
            }
        }
    }
}
