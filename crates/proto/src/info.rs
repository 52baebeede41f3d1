//! Connection info: what a peer needs to find a session and prove that it may connect.
//!
//! The application carries the encoded bytes to the peer by its own means (NIXL metadata, a
//! bootstrap socket, etcd). Every holder of the bytes can connect, so treat them like a password.

use alloc::vec::Vec;
use core::fmt;
use core::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

use sha2::{Digest, Sha256};

use crate::codec::{CodecError, Reader, Writer};
pub use crate::host::{HostName, HostNameInvalid, NamedAddress};
pub use crate::name::{Name, NameError};
pub use crate::secret::Secret;

/// Magic bytes at the start of every encoded connection info.
const MAGIC: [u8; 4] = *b"TCXI";
/// Layout version of an info with addresses only, which every reader knows.
const VERSION: u8 = 1;
/// Layout version of an info that also has host names.
const NAMED_VERSION: u8 = 2;
/// Bytes of SHA-256 at the end: enough to detect accidental damage. Forgery needs no defence here,
/// because a forged info does not let its user connect.
const CHECKSUM_LEN: usize = 8;

const FAMILY_V4: u8 = 4;
const FAMILY_V6: u8 = 6;

/// Identifies one session: 128 random bits, chosen at session start. Not secret.
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

/// The reason bytes are no connection info, or parts cannot form one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InfoError {
    /// The bytes do not start like a connection info. Typical cause: another blob was passed, or
    /// the bytes were re-encoded as text on the way.
    #[error("these {len} bytes are no tcpx connection info")]
    MagicMissing {
        /// Number of bytes given.
        len: usize,
    },

    /// A layout that this build does not know. Typical cause: the peer runs a newer tcpx.
    #[error("connection info version {found} is unknown, expected {VERSION} or {NAMED_VERSION}")]
    VersionUnknown {
        /// The version that was found.
        found: u8,
    },

    /// The checksum does not fit. Typical cause: the bytes were cut or altered on the way.
    #[error("connection info of {len} bytes was damaged on its way: its checksum does not fit")]
    ChecksumWrong {
        /// Number of bytes given.
        len: usize,
    },

    /// The checksum fits but the layout does not: the encoder is at fault.
    #[error("connection info has a wrong layout: {0}")]
    LayoutWrong(#[from] CodecError),

    /// The name is empty, too long, or no UTF-8.
    #[error("connection info has a wrong name: {0}")]
    NameInvalid(#[from] NameError),

    /// There is neither an address nor a host name, or there are too many.
    #[error(
        "connection info has 1 to {} addresses and host names, found {count}",
        ConnectionInfo::MAX_ADDRESSES
    )]
    AddressCountOutOfRange {
        /// Number found.
        count: usize,
    },

    /// A layout with host names has none, or too many.
    #[error(
        "connection info has up to {} host names, found {count}",
        ConnectionInfo::MAX_NAMES
    )]
    HostCountOutOfRange {
        /// Number found.
        count: usize,
    },

    /// A host name is invalid, or its port is 0.
    #[error("connection info has a wrong host name: {0}")]
    HostInvalid(#[from] HostNameInvalid),

    /// An address is neither IPv4 nor IPv6.
    #[error("address family {found} is unknown, expected {FAMILY_V4} or {FAMILY_V6}")]
    AddressFamilyUnknown {
        /// The family that was found.
        found: u8,
    },

    /// No peer can connect to this address: port 0, or 0.0.0.0 or ::, or a multicast group. Typical
    /// cause: the requested address was published instead of the bound one.
    #[error("no peer can connect to {address}")]
    AddressUnusable {
        /// The address that was found.
        address: SocketAddr,
    },
}

/// The addresses of a session, its identity, and the secret that authorises peers.
///
/// A value of this type is valid: it has a name, and 1 to 64 addresses and host names that can be
/// connected to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectionInfo {
    name: Name,
    id: SessionId,
    secret: Secret,
    /// None unusable, flow information zero. 1 to 64 together with `names`.
    addresses: Vec<SocketAddr>,
    /// At most 8, no port 0.
    names: Vec<NamedAddress>,
}

impl ConnectionInfo {
    /// Maximum addresses that a session may publish; a machine with 8 NICs and both families has
    /// 16.
    pub const MAX_ADDRESSES: usize = 64;

    /// Maximum host names among them.
    pub const MAX_NAMES: usize = 8;

    /// Maximum length of an encoded connection info in bytes.
    pub const MAX_ENCODED_LEN: usize = 8
        + SessionId::LEN
        + Secret::LEN
        + Name::MAX_LEN
        + (Self::MAX_ADDRESSES - Self::MAX_NAMES) * (1 + 2 + 16 + 4)
        + Self::MAX_NAMES * (2 + 1 + HostName::MAX_LEN)
        + CHECKSUM_LEN;

    /// Creates a connection info.
    ///
    /// IPv6 scope ids are kept; flow information is of no use to a peer and is dropped. Fails if
    /// there are no or more than [`MAX_ADDRESSES`](Self::MAX_ADDRESSES) addresses, or one of them
    /// cannot be connected to.
    pub fn new(
        name: Name,
        id: SessionId,
        secret: Secret,
        addresses: Vec<SocketAddr>,
    ) -> Result<Self, InfoError> {
        Self::with_names(name, id, secret, addresses, Vec::new())
    }

    /// Does what [`new`](Self::new) does, with host names beside or instead of addresses; at most
    /// [`MAX_NAMES`](Self::MAX_NAMES). Readers of the first layout version refuse such an info.
    pub fn with_names(
        name: Name,
        id: SessionId,
        secret: Secret,
        mut addresses: Vec<SocketAddr>,
        names: Vec<NamedAddress>,
    ) -> Result<Self, InfoError> {
        check_counts(addresses.len(), names.len())?;
        if names.iter().any(|host| host.port == 0) {
            return Err(HostNameInvalid.into());
        }
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
            names,
        })
    }

    /// Returns the name of the session.
    #[must_use]
    pub fn name(&self) -> &Name {
        &self.name
    }

    /// Returns the id of the session.
    #[must_use]
    pub fn id(&self) -> SessionId {
        self.id
    }

    /// Returns the secret that a peer must know to connect.
    #[must_use]
    pub fn secret(&self) -> &Secret {
        &self.secret
    }

    /// Returns the addresses of the session; empty only if there are [`names`](Self::names).
    #[must_use]
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// Returns the hosts at which the session can be reached; the connecting side resolves them.
    #[must_use]
    pub fn names(&self) -> &[NamedAddress] {
        &self.names
    }

    /// Encodes the info; [`decode`](Self::decode) reads it back.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(Self::MAX_ENCODED_LEN);
        out.put_bytes(&MAGIC);
        out.put_u8(match self.names.is_empty() {
            true => VERSION,
            false => NAMED_VERSION,
        });
        // Never truncated: `with_names` allows at most 64.
        out.put_u8(self.addresses.len() as u8);
        out.put_u8(self.names.len() as u8);
        out.put_u8(self.name.len_u8());
        out.put_bytes(&self.id.0);
        out.put_bytes(self.secret.expose());
        out.put_bytes(self.name.as_str().as_bytes());
        for address in &self.addresses {
            encode_address(&mut out, address);
        }
        for host in &self.names {
            out.put_u16(host.port);
            // Never truncated: a host name has at most 253 bytes.
            out.put_u8(host.name.as_str().len() as u8);
            out.put_bytes(host.name.as_str().as_bytes());
        }
        let checksum = checksum(&out);
        out.put_bytes(&checksum);
        out
    }

    /// Decodes the output of [`encode`](Self::encode); anything else is an error.
    pub fn decode(input: &[u8]) -> Result<Self, InfoError> {
        let mut reader = Reader::new(input);
        if reader.array() != Ok(MAGIC) {
            return Err(InfoError::MagicMissing { len: input.len() });
        }
        let version = reader.u8()?;
        if version != VERSION && version != NAMED_VERSION {
            return Err(InfoError::VersionUnknown { found: version });
        }
        // The limit is checked before the checksum, so that nobody can make this side hash
        // gigabytes.
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
        let names_count = match version {
            NAMED_VERSION => match reader.u8()? {
                0 => return Err(InfoError::HostCountOutOfRange { count: 0 }),
                names => usize::from(names),
            },
            _ => {
                reader.reserved()?;
                0
            }
        };
        check_counts(count, names_count)?;
        let name_len = usize::from(reader.u8()?);
        let id = SessionId(reader.array()?);
        let secret = Secret::new(reader.array()?);
        let name = Name::decode(reader.bytes(name_len)?)?;
        let mut addresses = Vec::with_capacity(count);
        for _ in 0..count {
            addresses.push(decode_address(&mut reader)?);
        }
        let mut names = Vec::with_capacity(names_count);
        for _ in 0..names_count {
            let port = reader.u16()?;
            let len = usize::from(reader.u8()?);
            let name = HostName::decode(reader.bytes(len)?)?;
            names.push(NamedAddress { name, port });
        }
        reader.finish()?;
        Self::with_names(name, id, secret, addresses, names)
    }
}

fn check_counts(addresses: usize, names: usize) -> Result<(), InfoError> {
    if names > ConnectionInfo::MAX_NAMES {
        return Err(InfoError::HostCountOutOfRange { count: names });
    }
    match addresses + names {
        1..=ConnectionInfo::MAX_ADDRESSES => Ok(()),
        count => Err(InfoError::AddressCountOutOfRange { count }),
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
