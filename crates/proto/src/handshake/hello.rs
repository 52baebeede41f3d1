//! The messages by which the two sides introduce themselves.

use alloc::vec::Vec;
use core::num::NonZeroU32;

use super::config::{LaneHello, NONCE_LEN, Nonce};
use super::message::{self, MessageError, MessageKind};
use super::offer::{Features, Offer};
use super::proof::TAG_LEN;
use super::{HandshakeError, MIN_VERSION, VERSION};
use crate::codec::{Reader, Writer};
use crate::info::{Name, SessionId};

/// Size of two sets of features.
const OFFER_LEN: usize = 4 + 4;

/// The client's identity, its target and the lane it opens. The nonce matters only as a part of the
/// transcript, so it is encoded but not kept.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ClientHello {
    pub(super) id: SessionId,
    pub(super) target: SessionId,
    pub(super) lane: LaneHello,
    pub(super) offer: Offer,
    pub(super) name: Name,
}

impl ClientHello {
    /// The version range: the one part of the body that every version can read.
    pub(super) const VERSIONS_LEN: usize = 4;
    /// Size of the body of version 1 without the name.
    pub(super) const FIXED_LEN: usize =
        Self::VERSIONS_LEN + 2 * SessionId::LEN + 8 + 2 + 2 + 4 + 4 + 2 + OFFER_LEN + NONCE_LEN + 1;

    pub(super) fn encode(&self, nonce: &Nonce) -> Vec<u8> {
        let name = self.name.as_str().as_bytes();
        let mut out = message::start(MessageKind::ClientHello, Self::FIXED_LEN + name.len());
        out.put_u16(MIN_VERSION);
        out.put_u16(VERSION);
        out.put_bytes(&self.id.0);
        out.put_bytes(&self.target.0);
        out.put_u64(self.lane.connection);
        out.put_u16(self.lane.lane);
        out.put_u16(self.lane.lanes);
        out.put_u32(self.lane.window.get());
        out.put_u32(self.lane.generation);
        out.put_u16(self.lane.port);
        encode_offer(&mut out, self.offer);
        out.put_bytes(nonce);
        out.put_u8(self.name.len_u8());
        out.put_bytes(name);
        out
    }

    /// Decodes a hello, and the newest version that both sides support.
    pub(super) fn decode(mut body: Reader<'_>) -> Result<(u16, Self), HandshakeError> {
        let (min, max, version) = decode_versions(&mut body)?;
        // Checked before the rest, whose layout may differ in versions that this build does not
        // support.
        let version = version.ok_or(HandshakeError::PeerVersionUnsupported { min, max })?;
        let hello = Self::decode_fields(&mut body)?;
        if max <= VERSION {
            body.finish().map_err(MessageError::from)?;
        }
        // A newer client may have added fields for newer servers. The tags cover them too.
        Ok((version, hello))
    }

    fn decode_fields(body: &mut Reader<'_>) -> Result<Self, MessageError> {
        let id = SessionId(body.array()?);
        let target = SessionId(body.array()?);
        let connection = body.u64()?;
        let lane = body.u16()?;
        let lanes = body.u16()?;
        let window = decode_window(body)?;
        let generation = body.u32()?;
        let port = body.u16()?;
        let lane = LaneHello::new(connection, lane, lanes, window)?
            .again(generation)
            .listening_at(port);
        let offer = decode_offer(body)?;
        body.bytes(NONCE_LEN)?;
        let name = decode_name(body)?;
        Ok(Self {
            id,
            target,
            lane,
            offer,
            name,
        })
    }
}

/// The server's identity, the version it has chosen and its offer. Only a server that knows the
/// secret can make the tag at the end; see [`message::Message::split_tag`].
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ServerHello {
    pub(super) version: u16,
    pub(super) offer: Offer,
    pub(super) window: NonZeroU32,
    pub(super) name: Name,
}

impl ServerHello {
    /// Size of the body without the name.
    pub(super) const FIXED_LEN: usize = 2 + OFFER_LEN + 4 + NONCE_LEN + 1 + TAG_LEN;

    /// Encodes everything but the tag, which covers these bytes.
    pub(super) fn encode_before_tag(&self, nonce: &Nonce) -> Vec<u8> {
        let name = self.name.as_str().as_bytes();
        let mut out = message::start(MessageKind::ServerHello, Self::FIXED_LEN + name.len());
        out.put_u16(self.version);
        encode_offer(&mut out, self.offer);
        out.put_u32(self.window.get());
        out.put_bytes(nonce);
        out.put_u8(self.name.len_u8());
        out.put_bytes(name);
        out
    }

    pub(super) fn decode(mut body: Reader<'_>) -> Result<Self, MessageError> {
        let version = body.u16()?;
        if !(MIN_VERSION..=VERSION).contains(&version) {
            return Err(MessageError::VersionNotOffered { chosen: version });
        }
        let offer = decode_offer(&mut body)?;
        let window = decode_window(&mut body)?;
        body.bytes(NONCE_LEN)?;
        let name = decode_name(&mut body)?;
        body.bytes(TAG_LEN)?;
        body.finish()?;
        Ok(Self {
            version,
            offer,
            window,
            name,
        })
    }
}

/// Decodes the client's range and finds the newest version in it that this build supports.
fn decode_versions(body: &mut Reader<'_>) -> Result<(u16, u16, Option<u16>), MessageError> {
    let min = body.u16()?;
    let max = body.u16()?;
    if min > max {
        return Err(MessageError::VersionRangeEmpty { min, max });
    }
    let newest = max.min(VERSION);
    Ok((min, max, (newest >= min.max(MIN_VERSION)).then_some(newest)))
}

fn encode_offer(out: &mut Vec<u8>, offer: Offer) {
    out.put_u32(offer.offers().bits());
    out.put_u32(offer.requires().bits());
}

fn decode_offer(body: &mut Reader<'_>) -> Result<Offer, MessageError> {
    let offers = Features::from_bits(body.u32()?);
    let requires = Features::from_bits(body.u32()?);
    Offer::from_wire(offers, requires)
        .map_err(|missing| MessageError::RequiredNotOffered { missing })
}

fn decode_window(body: &mut Reader<'_>) -> Result<NonZeroU32, MessageError> {
    NonZeroU32::new(body.u32()?).ok_or(MessageError::WindowZero)
}

fn decode_name(body: &mut Reader<'_>) -> Result<Name, MessageError> {
    let len = usize::from(body.u8()?);
    Ok(Name::decode(body.bytes(len)?)?)
}
