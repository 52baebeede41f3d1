//! Bytes between the two ends: the connection handle, the greeting on each socket, and the control
//! records.

use std::ffi::c_int;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::error::{Error, Misuse};
use crate::tables::HANDLE_BYTES;

/// Number of meaningful bytes of a handle.
const HANDLE_USED: usize = 88;
/// Offset at which connect keeps a pointer to its progress.
pub(crate) const STATE_AT: usize = 80;

/// The handle from `listen` for the connecting side, in the layout of GPUDirect-TCPX.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Handle {
    pub(crate) address: SocketAddr,
    pub(crate) sockets: usize,
}

impl Handle {
    /// Encodes the 128 bytes; unused ones are zero, including the state pointer.
    pub(crate) fn encode(&self) -> [u8; HANDLE_BYTES] {
        let mut bytes = [0; HANDLE_BYTES];
        let address = encode_address(self.address);
        bytes[..28].copy_from_slice(&address);
        let integers = [i32::from(self.address.port()), 1, self.sockets as i32, 1];
        for (field, value) in bytes[28..44].chunks_exact_mut(4).zip(integers) {
            field.copy_from_slice(&value.to_ne_bytes());
        }
        bytes[48..76].copy_from_slice(&address);
        bytes
    }

    /// Decodes a handle from any source.
    pub(crate) fn decode(bytes: &[u8; HANDLE_BYTES]) -> Result<Self, Misuse> {
        let address = decode_address(&bytes[..28]).ok_or(Misuse::ForeignHandle)?;
        let sockets = i32::from_ne_bytes([bytes[36], bytes[37], bytes[38], bytes[39]]);
        let sockets = usize::try_from(sockets)
            .ok()
            .filter(|n| (1..=8).contains(n));
        let unused = bytes[HANDLE_USED..].iter().all(|&byte| byte == 0);
        match sockets {
            Some(sockets) if unused => Ok(Self { address, sockets }),
            _ => Err(Misuse::ForeignHandle),
        }
    }
}

/// Encodes a `sockaddr_in` or `sockaddr_in6` in 28 bytes.
fn encode_address(address: SocketAddr) -> [u8; 28] {
    let mut bytes = [0; 28];
    bytes[2..4].copy_from_slice(&address.port().to_be_bytes());
    match address.ip() {
        IpAddr::V4(ip) => {
            bytes[..2].copy_from_slice(&(libc::AF_INET as u16).to_ne_bytes());
            bytes[4..8].copy_from_slice(&ip.octets());
        }
        IpAddr::V6(ip) => {
            bytes[..2].copy_from_slice(&(libc::AF_INET6 as u16).to_ne_bytes());
            bytes[8..24].copy_from_slice(&ip.octets());
        }
    }
    bytes
}

fn decode_address(bytes: &[u8]) -> Option<SocketAddr> {
    let family = c_int::from(u16::from_ne_bytes([bytes[0], bytes[1]]));
    let port = u16::from_be_bytes([bytes[2], bytes[3]]);
    let ip = match family {
        libc::AF_INET => IpAddr::V4(Ipv4Addr::new(bytes[4], bytes[5], bytes[6], bytes[7])),
        libc::AF_INET6 => IpAddr::V6(Ipv6Addr::from(<[u8; 16]>::try_from(&bytes[8..24]).ok()?)),
        _ => return None,
    };
    (port != 0).then_some(SocketAddr::new(ip, port))
}

/// Size of a greeting.
pub(crate) const GREETING_BYTES: usize = 24;
const GREETING_MAGIC: u32 = 0x7c9e_07e7;

/// The first bytes on every socket: its connection, and its role.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Greeting {
    /// The same on all sockets of a connection.
    pub(crate) connection: u64,
    /// 0 for the control socket, then the data sockets.
    pub(crate) index: u32,
    /// Data sockets of the connection.
    pub(crate) sockets: u32,
    /// Whether the other end uses a plain table.
    pub(crate) plain: bool,
}

impl Greeting {
    pub(crate) fn encode(&self) -> [u8; GREETING_BYTES] {
        let mut bytes = [0; GREETING_BYTES];
        bytes[..4].copy_from_slice(&GREETING_MAGIC.to_le_bytes());
        bytes[4..8].copy_from_slice(&u32::from(self.plain).to_le_bytes());
        bytes[8..12].copy_from_slice(&self.index.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.sockets.to_le_bytes());
        bytes[16..].copy_from_slice(&self.connection.to_le_bytes());
        bytes
    }

    pub(crate) fn decode(bytes: &[u8; GREETING_BYTES]) -> Option<Self> {
        let word = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let (low, high) = (u64::from(word(16)), u64::from(word(20)));
        let plain = match word(4) {
            0 => false,
            1 => true,
            _ => return None,
        };
        (word(0) == GREETING_MAGIC && word(8) <= word(12)).then_some(Self {
            connection: high << 32 | low,
            index: word(8),
            sockets: word(12),
            plain,
        })
    }
}

/// Size of a control record.
pub(crate) const RECORD_BYTES: usize = 16;

/// Announces one chunk of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    /// Data socket that carries it.
    pub(crate) socket: u16,
    pub(crate) size: u32,
    /// Its offset in the message.
    pub(crate) offset: u32,
    /// Bytes of the whole message.
    pub(crate) total: u32,
}

/// Record type of a chunk on a data socket.
const NORMAL: u16 = 0;
/// Record type of an empty message, which has no chunk.
const INLINE: u16 = 1;

impl Record {
    /// Creates the record of an empty message.
    pub(crate) const EMPTY: Self = Self {
        socket: 0,
        size: 0,
        offset: 0,
        total: 0,
    };

    pub(crate) fn encode(&self) -> [u8; RECORD_BYTES] {
        let kind = if self.total == 0 { INLINE } else { NORMAL };
        let mut bytes = [0; RECORD_BYTES];
        bytes[..2].copy_from_slice(&kind.to_le_bytes());
        bytes[2..4].copy_from_slice(&self.socket.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.size.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.offset.to_le_bytes());
        bytes[12..].copy_from_slice(&self.total.to_le_bytes());
        bytes
    }

    /// Decodes a record and checks everything that does not depend on the message.
    pub(crate) fn decode(bytes: &[u8; RECORD_BYTES], sockets: usize) -> Result<Self, Error> {
        let half = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let word = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let record = Self {
            socket: half(2),
            size: word(4),
            offset: word(8),
            total: word(12),
        };
        let end = record.offset.checked_add(record.size);
        let fits = end.is_some_and(|end| end <= record.total);
        let what = match half(0) {
            NORMAL if record.size == 0 => "a chunk without bytes",
            NORMAL if usize::from(record.socket) >= sockets => "no such data socket",
            NORMAL if !fits => "a chunk past the end of its message",
            NORMAL if record.total > i32::MAX as u32 => "a message of 2 GiB or more",
            INLINE if record != Self::EMPTY => "an inline message that is not empty",
            NORMAL | INLINE => return Ok(record),
            _ => "unknown type",
        };
        Err(Error::Record { what })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_survives_the_journey_and_has_its_fields_in_place() {
        for address in ["127.0.0.1:4567", "[::1]:89"] {
            let handle = Handle {
                address: address.parse().unwrap(),
                sockets: 3,
            };
            let bytes = handle.encode();
            assert_eq!(Handle::decode(&bytes).unwrap(), handle);
            assert_eq!(bytes[..28], bytes[48..76]);
            assert_eq!(bytes[36], 3);
            assert!(bytes[STATE_AT..].iter().all(|&byte| byte == 0));
        }
        assert!(Handle::decode(&[0; HANDLE_BYTES]).is_err());
        assert!(Handle::decode(&[0xff; HANDLE_BYTES]).is_err());
    }

    #[test]
    fn records_are_checked() {
        let good = Record {
            socket: 1,
            size: 10,
            offset: 5,
            total: 15,
        };
        assert_eq!(Record::decode(&good.encode(), 2).unwrap(), good);
        assert_eq!(
            Record::decode(&Record::EMPTY.encode(), 1).unwrap(),
            Record::EMPTY
        );
        let bad = [
            Record { socket: 2, ..good },
            Record { size: 11, ..good },
            Record { size: 0, ..good },
            Record {
                offset: u32::MAX,
                ..good
            },
            Record {
                total: u32::MAX,
                ..good
            },
        ];
        for record in bad {
            assert!(Record::decode(&record.encode(), 2).is_err(), "{record:?}");
        }
        let mut unknown = good.encode();
        unknown[0] = 7;
        assert!(Record::decode(&unknown, 2).is_err());
    }

    #[test]
    fn greetings_are_checked() {
        let good = Greeting {
            connection: 0x1234_5678_9abc_def0,
            index: 2,
            sockets: 2,
            plain: true,
        };
        assert_eq!(Greeting::decode(&good.encode()), Some(good));
        assert_eq!(
            Greeting::decode(&Greeting { index: 3, ..good }.encode()),
            None
        );
        assert_eq!(Greeting::decode(&[0; GREETING_BYTES]), None);
    }
}
