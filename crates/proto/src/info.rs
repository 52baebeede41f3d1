//! What a session gives away so that peers can find it and prove that they may connect.
//!
//! The application carries the encoded bytes to the peer by its own means (NIXL metadata, a
//! bootstrap socket, etcd). Whoever has them can connect, so they deserve the care of a password.

use alloc::vec::Vec;
use core::fmt;
use core::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

use sha2::{Digest, Sha256};

use crate::codec::{CodecError, Reader, Writer};
pub use crate::name::{Name, NameError};
pub use crate::secret::Secret;

/// First bytes of every encoded connection info.
const MAGIC: [u8; 4] = *b"TCXI";
/// Layout version that [`ConnectionInfo::encode`] writes.
const VERSION: u8 = 1;
/// Bytes of SHA-256 at the end: enough to notice any accident on the way; no defence against
/// forgery, which needs none here because a forged info connects nowhere.
const CHECKSUM_LEN: usize = 8;

const FAMILY_V4: u8 = 4;
const FAMILY_V6: u8 = 6;

/// Identifies one session: 128 random bits, made at session start. Not secret.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(pub [u8; Self::LEN]);

impl SessionId {
    /// Size in bytes.
    pub const LEN: usize = 16;
}

impl fmt::Display for SessionId {
    /// 32 lower-case hexadecimal digits.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SessionId({self})")
    }
}

/// Why bytes are no connection info, or parts make none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InfoError {
    /// The bytes do not start like a connection info. Typical cause: another blob was passed, or
    /// the bytes were re-encoded as text on the way.
    #[error("these {len} bytes are no tcpx connection info")]
    MagicMissing {
        /// How many bytes were given.
        len: usize,
    },

    /// A layout that this build does not know. Typical cause: the peer runs a newer tcpx.
    #[error("connection info version {found} is unknown, expected {VERSION}")]
    VersionUnknown {
        /// The version that was found.
        found: u8,
    },

    /// The checksum does not fit. Typical cause: the bytes were cut or altered on the way.
    #[error("connection info of {len} bytes was damaged on its way: its checksum does not fit")]
    ChecksumWrong {
        /// How many bytes were given.
        len: usize,
    },

    /// The checksum fits but the layout does not: the encoder is at fault.
    #[error("connection info has a wrong layout: {0}")]
    LayoutWrong(#[from] CodecError),

    /// The name is empty, too long, or no UTF-8.
    #[error("connection info has a wrong name: {0}")]
    NameInvalid(#[from] NameError),

    /// There is no address, or there are too many.
    #[error(
        "connection info has 1 to {} addresses, found {count}",
        ConnectionInfo::MAX_ADDRESSES
    )]
    AddressCountOutOfRange {
        /// How many were found.
        count: usize,
    },

    /// An address is neither IPv4 nor IPv6.
    #[error("address family {found} is unknown, expected {FAMILY_V4} or {FAMILY_V6}")]
    AddressFamilyUnknown {
        /// The family that was found.
        found: u8,
    },

    /// No peer can connect to this address: port 0, or 0.0.0.0 or ::, or a multicast group.
    /// Typical cause: the address that was asked for was published, not the one that was bound.
    #[error("no peer can connect to {address}")]
    AddressUnusable {
        /// The address that was found.
        address: SocketAddr,
    },
}

/// Where a session listens, who it is, and the secret that lets peers in.
///
/// A value of this type is valid: it has a name, and 1 to 64 addresses that can be connected to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectionInfo {
    name: Name,
    id: SessionId,
    secret: Secret,
    /// 1 to 64, none unusable, flow information zero.
    addresses: Vec<SocketAddr>,
}

impl ConnectionInfo {
    /// The most addresses a session may publish; a machine with 8 NICs and both families has 16.
    pub const MAX_ADDRESSES: usize = 64;

    /// No encoded connection info is longer than this many bytes.
    pub const MAX_ENCODED_LEN: usize = 8
        + SessionId::LEN
        + Secret::LEN
        + Name::MAX_LEN
        + Self::MAX_ADDRESSES * (1 + 2 + 16 + 4)
        + CHECKSUM_LEN;

    /// Puts a connection info together.
    ///
    /// IPv6 scope ids are kept; flow information means nothing to a peer and is dropped. Fails when
    /// there are no or more than [`MAX_ADDRESSES`](Self::MAX_ADDRESSES) addresses, or one of them
    /// cannot be connected to.
    pub fn new(
        name: Name,
        id: SessionId,
        secret: Secret,
        mut addresses: Vec<SocketAddr>,
    ) -> Result<Self, InfoError> {
        check_address_count(addresses.len())?;
        for address in &mut addresses {
            if let SocketAddr::V6(v6) = address {
                v6.set_flowinfo(0);
            }
            check_usable(*address)?;
        }
        Ok(Self {
            name,
            id,
            secret,
            addresses,
        })
    }

    /// What the session calls itself.
    #[must_use]
    pub fn name(&self) -> &Name {
        &self.name
    }

    /// Which session this is.
    #[must_use]
    pub fn id(&self) -> SessionId {
        self.id
    }

    /// What a peer must know to connect.
    #[must_use]
    pub fn secret(&self) -> &Secret {
        &self.secret
    }

    /// Where the session listens; never empty.
    #[must_use]
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// Writes the info down; [`decode`](Self::decode) reads it back.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(Self::MAX_ENCODED_LEN);
        out.put_bytes(&MAGIC);
        out.put_u8(VERSION);
        // Never cut: `new` lets no more than 64 through.
        out.put_u8(self.addresses.len() as u8);
        out.put_u8(0);
        out.put_u8(self.name.len_u8());
        out.put_bytes(&self.id.0);
        out.put_bytes(self.secret.expose());
        out.put_bytes(self.name.as_str().as_bytes());
        for address in &self.addresses {
            encode_address(&mut out, address);
        }
        let checksum = checksum(&out);
        out.put_bytes(&checksum);
        out
    }

    /// Reads what [`encode`](Self::encode) wrote; anything else is an error.
    pub fn decode(input: &[u8]) -> Result<Self, InfoError> {
        let mut reader = Reader::new(input);
        if reader.array() != Ok(MAGIC) {
            return Err(InfoError::MagicMissing { len: input.len() });
        }
        let version = reader.u8()?;
        if version != VERSION {
            return Err(InfoError::VersionUnknown { found: version });
        }
        // The limit comes before the checksum: nobody makes us hash gigabytes.
        let damaged = InfoError::ChecksumWrong { len: input.len() };
        let (body, found) = match input.split_last_chunk::<CHECKSUM_LEN>() {
            Some(parts) if input.len() <= Self::MAX_ENCODED_LEN => parts,
            _ => return Err(damaged),
        };
        if checksum(body) != *found {
            return Err(damaged);
        }

        let mut reader = Reader::new(body.get(MAGIC.len() + 1..).unwrap_or_default());
        let count = usize::from(reader.u8()?);
        check_address_count(count)?;
        reader.reserved()?;
        let name_len = usize::from(reader.u8()?);
        let id = SessionId(reader.array()?);
        let secret = Secret::new(reader.array()?);
        let name = Name::decode(reader.bytes(name_len)?)?;
        let mut addresses = Vec::with_capacity(count);
        for _ in 0..count {
            addresses.push(decode_address(&mut reader)?);
        }
        reader.finish()?;
        Self::new(name, id, secret, addresses)
    }
}

fn check_address_count(count: usize) -> Result<(), InfoError> {
    match count {
        1..=ConnectionInfo::MAX_ADDRESSES => Ok(()),
        _ => Err(InfoError::AddressCountOutOfRange { count }),
    }
}

fn check_usable(address: SocketAddr) -> Result<(), InfoError> {
    let ip = address.ip();
    if address.port() == 0 || ip.is_unspecified() || ip.is_multicast() {
        return Err(InfoError::AddressUnusable { address });
    }
    Ok(())
}

fn encode_address(out: &mut Vec<u8>, address: &SocketAddr) {
    match address {
        SocketAddr::V4(v4) => {
            out.put_u8(FAMILY_V4);
            out.put_u16(v4.port());
            out.put_bytes(&v4.ip().octets());
        }
        SocketAddr::V6(v6) => {
            out.put_u8(FAMILY_V6);
            out.put_u16(v6.port());
            out.put_bytes(&v6.ip().octets());
            out.put_u32(v6.scope_id());
        }
    }
}

fn decode_address(reader: &mut Reader<'_>) -> Result<SocketAddr, InfoError> {
    let family = reader.u8()?;
    let port = reader.u16()?;
    match family {
        FAMILY_V4 => {
            let ip = Ipv4Addr::from(reader.array::<4>()?);
            Ok(SocketAddrV4::new(ip, port).into())
        }
        FAMILY_V6 => {
            let ip = Ipv6Addr::from(reader.array::<16>()?);
            let scope_id = reader.u32()?;
            Ok(SocketAddrV6::new(ip, port, 0, scope_id).into())
        }
        found => Err(InfoError::AddressFamilyUnknown { found }),
    }
}

fn checksum(body: &[u8]) -> [u8; CHECKSUM_LEN] {
    let digest: [u8; 32] = Sha256::digest(body).into();
    let [a, b, c, d, e, f, g, h, ..] = digest;
    [a, b, c, d, e, f, g, h]
}

#[cfg(test)]
mod tests;
