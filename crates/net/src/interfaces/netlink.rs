//! Asks the kernel for its links and addresses over rtnetlink.
//!
//! Requests and answers are `rtnetlink(7)` messages: a 16-byte header, a fixed body that depends on
//! the type, then attributes (length, type, value), everything aligned to 4 bytes and in the
//! machine's byte order. Parsing never reads past the bytes it is given.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::OwnedFd;

use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socket_with,
};

use super::InterfaceAddress;

/// One link, as `RTM_GETLINK` describes it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Link {
    pub(super) index: u32,
    pub(super) name: String,
    pub(super) up: bool,
    pub(super) running: bool,
    pub(super) loopback: bool,
    pub(super) mtu: u32,
    /// The kernel's name for the kind of a software link: `veth`, `bridge`, `bond`…
    pub(super) kind: Option<String>,
}

/// Returns every link of this network namespace.
pub(super) fn links() -> io::Result<Vec<Link>> {
    dump(RTM_GETLINK, RTM_NEWLINK, IFINFOMSG, parse_link)
}

/// Returns every address of this network namespace that can be bound, with the index of its link.
pub(super) fn addresses() -> io::Result<Vec<(u32, InterfaceAddress)>> {
    dump(RTM_GETADDR, RTM_NEWADDR, IFADDRMSG, parse_address)
}

// include/uapi/linux/netlink.h
const HEADER: usize = 16;
const NLM_F_REQUEST: u16 = 0x1;
const NLM_F_DUMP: u16 = 0x300;
const NLM_F_DUMP_INTR: u16 = 0x10;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const NLA_TYPE_MASK: u16 = 0x3fff;
// include/uapi/linux/rtnetlink.h
const RTM_NEWLINK: u16 = 16;
const RTM_GETLINK: u16 = 18;
const RTM_NEWADDR: u16 = 20;
const RTM_GETADDR: u16 = 22;
/// Size of `struct ifinfomsg`: family, pad, type (u16), index (i32), flags (u32), change (u32).
const IFINFOMSG: usize = 16;
/// Size of `struct ifaddrmsg`: family, prefix length, flags, scope, index (u32).
const IFADDRMSG: usize = 8;
// include/uapi/linux/if_link.h and if_addr.h
const IFLA_IFNAME: u16 = 3;
const IFLA_MTU: u16 = 4;
const IFLA_LINKINFO: u16 = 18;
const IFLA_INFO_KIND: u16 = 1;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
const IFA_FLAGS: u16 = 8;
const IFA_F_DADFAILED: u32 = 0x08;
const IFA_F_TENTATIVE: u32 = 0x40;
const IFA_F_OPTIMISTIC: u32 = 0x04;
// include/uapi/linux/if.h
const IFF_UP: u32 = 0x1;
const IFF_LOOPBACK: u32 = 0x8;
const IFF_RUNNING: u32 = 0x40;

/// The kernel fills at most 32 KiB per answer of a dump, however large the buffer.
const ANSWER: usize = 64 * 1024;
/// How often a dump is asked for again when the table changed while the kernel was listing it.
const ATTEMPTS: u32 = 8;

/// Asks for every object of one type and parses each answer of type `wanted`.
fn dump<T>(
    request: u16,
    wanted: u16,
    body: usize,
    parse: fn(&[u8]) -> Option<T>,
) -> io::Result<Vec<T>> {
    // Protocol 0 of this family is NETLINK_ROUTE.
    let socket = socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        SocketFlags::CLOEXEC,
        None,
    )?;
    rustix::net::bind(&socket, &SocketAddrNetlink::new(0, 0))?;
    for sequence in 1..=ATTEMPTS {
        if let Some(found) = dump_once(&socket, sequence, request, wanted, body, parse)? {
            return Ok(found);
        }
    }
    Err(io::Error::other(
        "the interfaces keep changing while they are being listed",
    ))
}

/// One dump; `None` when the kernel says that the table changed meanwhile.
fn dump_once<T>(
    socket: &OwnedFd,
    sequence: u32,
    request: u16,
    wanted: u16,
    body: usize,
    parse: fn(&[u8]) -> Option<T>,
) -> io::Result<Option<Vec<T>>> {
    send(
        socket,
        &question(request, sequence, body),
        SendFlags::empty(),
    )?;
    let mut buffer = vec![0; ANSWER];
    let mut found = Vec::new();
    let mut consistent = true;
    loop {
        let (_, len) =
            rustix::io::retry_on_intr(|| recv(socket, &mut buffer[..], RecvFlags::TRUNC))?;
        let answer = buffer
            .get(..len)
            .ok_or_else(|| malformed("longer than its buffer"))?;
        for message in Messages(answer) {
            let message = message?;
            if message.sequence != sequence {
                continue;
            }
            consistent &= message.flags & NLM_F_DUMP_INTR == 0;
            match message.kind {
                NLMSG_DONE => return Ok(consistent.then_some(found)),
                NLMSG_ERROR => return Err(error(message.payload)),
                kind if kind == wanted => found.extend(parse(message.payload)),
                _ => {}
            }
        }
    }
}

/// Returns a dump request with an all-zero body: every family, every link.
fn question(request: u16, sequence: u32, body: usize) -> Vec<u8> {
    let len = HEADER + body;
    let mut message = Vec::with_capacity(len);
    message.extend_from_slice(&(len as u32).to_ne_bytes());
    message.extend_from_slice(&request.to_ne_bytes());
    message.extend_from_slice(&(NLM_F_REQUEST | NLM_F_DUMP).to_ne_bytes());
    message.extend_from_slice(&sequence.to_ne_bytes());
    message.resize(len, 0);
    message
}

/// Returns the error in an `NLMSG_ERROR` payload: a negative errno.
fn error(payload: &[u8]) -> io::Error {
    match u32_at(payload, 0) {
        Some(code) => io::Error::from_raw_os_error((code as i32).wrapping_neg()),
        None => malformed("an error without its number"),
    }
}

fn malformed(what: &str) -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        format!("malformed netlink answer: {what}"),
    )
}

/// One message of an answer.
struct Message<'a> {
    kind: u16,
    flags: u16,
    sequence: u32,
    payload: &'a [u8],
}

/// The messages of one answer; ends after the first malformed one.
struct Messages<'a>(&'a [u8]);

impl<'a> Iterator for Messages<'a> {
    type Item = io::Result<Message<'a>>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let message = self.split();
        if message.is_none() {
            self.0 = &[];
        }
        Some(message.ok_or_else(|| malformed("a message that is not within its answer")))
    }
}

impl<'a> Messages<'a> {
    fn split(&mut self) -> Option<Message<'a>> {
        let len = u32_at(self.0, 0)? as usize;
        let message = Message {
            kind: u16_at(self.0, 4)?,
            flags: u16_at(self.0, 6)?,
            sequence: u32_at(self.0, 8)?,
            payload: self.0.get(HEADER..len)?,
        };
        self.0 = self.0.get(len.next_multiple_of(4)..).unwrap_or(&[]);
        Some(message)
    }
}

/// The attributes of a message; ends where they stop making sense.
struct Attributes<'a>(&'a [u8]);

impl<'a> Iterator for Attributes<'a> {
    type Item = (u16, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let len = usize::from(u16_at(self.0, 0)?);
        let kind = u16_at(self.0, 2)? & NLA_TYPE_MASK;
        let value = self.0.get(4..len)?;
        self.0 = self.0.get(len.next_multiple_of(4)..).unwrap_or(&[]);
        Some((kind, value))
    }
}

fn parse_link(payload: &[u8]) -> Option<Link> {
    let flags = u32_at(payload, 8)?;
    let (mut name, mut mtu, mut kind) = (None, 0, None);
    for (attribute, value) in Attributes(payload.get(IFINFOMSG..)?) {
        match attribute {
            IFLA_IFNAME => name = text(value),
            IFLA_MTU => mtu = u32_at(value, 0)?,
            IFLA_LINKINFO => {
                kind = Attributes(value)
                    .find_map(|(nested, value)| (nested == IFLA_INFO_KIND).then(|| text(value)))
                    .flatten();
            }
            _ => {}
        }
    }
    Some(Link {
        index: u32_at(payload, 4)?,
        name: name?,
        up: flags & IFF_UP != 0,
        running: flags & IFF_RUNNING != 0,
        loopback: flags & IFF_LOOPBACK != 0,
        mtu,
        kind,
    })
}

/// Returns an address that can be bound; `None` for one that failed or awaits its duplicate check.
fn parse_address(payload: &[u8]) -> Option<(u32, InterfaceAddress)> {
    let prefix_len = *payload.get(1)?;
    let mut flags = u32::from(*payload.get(2)?);
    let (mut local, mut address) = (None, None);
    for (attribute, value) in Attributes(payload.get(IFADDRMSG..)?) {
        match attribute {
            // On a point-to-point link IFA_ADDRESS is the far end and IFA_LOCAL the local one.
            IFA_LOCAL => local = ip(value),
            IFA_ADDRESS => address = ip(value),
            // The wider form of the flags in the header.
            IFA_FLAGS => flags = u32_at(value, 0)?,
            _ => {}
        }
    }
    let pending = flags & IFA_F_TENTATIVE != 0 && flags & IFA_F_OPTIMISTIC == 0;
    if pending || flags & IFA_F_DADFAILED != 0 {
        return None;
    }
    Some((
        u32_at(payload, 4)?,
        InterfaceAddress::new(local.or(address)?, prefix_len),
    ))
}

fn ip(value: &[u8]) -> Option<IpAddr> {
    match value.len() {
        4 => <[u8; 4]>::try_from(value)
            .ok()
            .map(|octets| Ipv4Addr::from(octets).into()),
        16 => <[u8; 16]>::try_from(value)
            .ok()
            .map(|octets| Ipv6Addr::from(octets).into()),
        _ => None,
    }
}

fn text(value: &[u8]) -> Option<String> {
    let value = value.split(|&byte| byte == 0).next()?;
    Some(str::from_utf8(value).ok()?.to_owned())
}

fn u16_at(bytes: &[u8], offset: usize) -> Option<u16> {
    let value = bytes.get(offset..offset.checked_add(2)?)?;
    Some(u16::from_ne_bytes(value.try_into().ok()?))
}

fn u32_at(bytes: &[u8], offset: usize) -> Option<u32> {
    let value = bytes.get(offset..offset.checked_add(4)?)?;
    Some(u32::from_ne_bytes(value.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixDatagram;
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        let mut bytes = ((value.len() + 4) as u16).to_ne_bytes().to_vec();
        bytes.extend_from_slice(&kind.to_ne_bytes());
        bytes.extend_from_slice(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    fn link(flags: u32, attributes: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = vec![0; 4];
        bytes.extend_from_slice(&7u32.to_ne_bytes());
        bytes.extend_from_slice(&flags.to_ne_bytes());
        bytes.resize(IFINFOMSG, 0);
        bytes.extend(attributes.concat());
        bytes
    }

    fn addr(prefix: u8, flags: u8, attributes: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = vec![2, prefix, flags, 0];
        bytes.extend_from_slice(&7u32.to_ne_bytes());
        bytes.extend(attributes.concat());
        bytes
    }

    #[test]
    fn a_link_is_parsed() {
        let info = attribute(
            IFLA_LINKINFO | 0x8000,
            &attribute(IFLA_INFO_KIND, b"veth\0"),
        );
        let message = link(
            IFF_UP | IFF_RUNNING,
            &[
                attribute(IFLA_IFNAME, b"veth0\0"),
                attribute(IFLA_MTU, &1500u32.to_ne_bytes()),
                info,
            ],
        );
        let expected = Link {
            index: 7,
            name: "veth0".into(),
            up: true,
            running: true,
            loopback: false,
            mtu: 1500,
            kind: Some("veth".into()),
        };
        assert_eq!(parse_link(&message), Some(expected));
        assert_eq!(parse_link(&link(0, &[])), None, "a link without a name");
    }

    #[test]
    fn each_flag_of_a_link_is_its_own() {
        for flags in 0..0x80 {
            let message = link(flags, &[attribute(IFLA_IFNAME, b"eth0\0")]);
            let link = parse_link(&message).unwrap();
            let expected = [IFF_UP, IFF_RUNNING, IFF_LOOPBACK].map(|flag| flags & flag == flag);
            assert_eq!(
                [link.up, link.running, link.loopback],
                expected,
                "{flags:#x}"
            );
            assert_eq!((link.mtu, link.kind), (0, None));
        }
    }

    #[test]
    fn our_end_of_a_point_to_point_link_is_taken() {
        let (theirs, ours) = (
            attribute(IFA_ADDRESS, &[10, 0, 0, 2]),
            attribute(IFA_LOCAL, &[10, 0, 0, 1]),
        );
        let ours = parse_address(&addr(32, 0, &[theirs, ours]));
        assert_eq!(
            ours,
            Some((7, InterfaceAddress::new([10, 0, 0, 1].into(), 32)))
        );
    }

    #[test]
    fn addresses_that_cannot_be_bound_are_left_out() {
        let address = || attribute(IFA_ADDRESS, &[10, 0, 0, 1]);
        assert!(
            parse_address(&addr(24, 0x80, &[address()])).is_some(),
            "permanent"
        );
        assert_eq!(
            parse_address(&addr(24, 0x40, &[address()])),
            None,
            "tentative"
        );
        let failed = attribute(IFA_FLAGS, &IFA_F_DADFAILED.to_ne_bytes());
        assert_eq!(
            parse_address(&addr(24, 0, &[address(), failed])),
            None,
            "duplicate"
        );
        // An optimistic address can be bound while its duplicate check is outstanding.
        for (flags, is_bindable) in [(0x44, true), (0x04, true), (0x48, false), (0x4c, false)] {
            let found = parse_address(&addr(24, flags, &[address()]));
            assert_eq!(found.is_some(), is_bindable, "{flags:#x}");
        }
    }

    #[test]
    fn addresses_have_the_length_of_their_family() {
        for len in 0..20u8 {
            let bytes: Vec<u8> = (1..=len).collect();
            let expected = match len {
                4 => Some(IpAddr::from([1, 2, 3, 4])),
                16 => Some(IpAddr::from(<[u8; 16]>::try_from(&bytes[..]).unwrap())),
                _ => None,
            };
            assert_eq!(ip(&bytes), expected);
        }
    }

    /// Makes one message of an answer.
    fn message(kind: u16, flags: u16, sequence: u32, payload: &[u8]) -> Vec<u8> {
        let len = HEADER + payload.len();
        let mut bytes = (len as u32).to_ne_bytes().to_vec();
        bytes.extend_from_slice(&kind.to_ne_bytes());
        bytes.extend_from_slice(&flags.to_ne_bytes());
        bytes.extend_from_slice(&sequence.to_ne_bytes());
        bytes.resize(HEADER, 0);
        bytes.extend_from_slice(payload);
        bytes.resize(len.next_multiple_of(4), 0);
        bytes
    }

    /// Sequence number of the request that [`ask`] sends.
    const SEQUENCE: u32 = 5;

    /// Asks for links; each of `answers` is one datagram of the kernel. Returns their names.
    fn ask(answers: &[Vec<u8>]) -> io::Result<Option<Vec<String>>> {
        let (ours, kernel) = UnixDatagram::pair()?;
        // A dump that waits for more than there is fails.
        ours.set_read_timeout(Some(Duration::from_secs(10)))?;
        for answer in answers {
            kernel.send(answer)?;
        }
        let (get, new) = (RTM_GETLINK, RTM_NEWLINK);
        let found = dump_once(&ours.into(), SEQUENCE, get, new, IFINFOMSG, parse_link)?;
        let mut request = [0; 64];
        let len = kernel.recv(&mut request)?;
        assert_eq!(request[..len], question(get, SEQUENCE, IFINFOMSG));
        Ok(found.map(|links| links.into_iter().map(|link| link.name).collect()))
    }

    fn named(name: &[u8]) -> Vec<u8> {
        link(IFF_UP, &[attribute(IFLA_IFNAME, name)])
    }

    #[test]
    fn a_dump_is_the_wanted_messages_with_its_number() {
        let done = message(NLMSG_DONE, 0, SEQUENCE, &[]);
        let first = [
            message(RTM_NEWLINK, 0, SEQUENCE, &named(b"lo\0")),
            message(RTM_NEWLINK, 0, SEQUENCE - 1, &named(b"late\0")),
            message(RTM_NEWADDR, 0, SEQUENCE, &named(b"other\0")),
            message(NLMSG_DONE, 0, SEQUENCE + 1, &[]),
        ];
        let second = [message(RTM_NEWLINK, 0, SEQUENCE, &named(b"eth0\0")), done];
        let found = ask(&[first.concat(), second.concat()]).unwrap();
        assert_eq!(found, Some(vec!["lo".to_owned(), "eth0".to_owned()]));
    }

    #[test]
    fn a_dump_that_was_interrupted_is_not_used() {
        let messages = |interrupted: usize| {
            let kinds = [RTM_NEWLINK, RTM_NEWLINK, NLMSG_DONE].into_iter();
            let messages = kinds.enumerate().map(|(index, kind)| {
                let flag = if index == interrupted {
                    NLM_F_DUMP_INTR
                } else {
                    0
                };
                message(kind, flag | 0x2, SEQUENCE, &named(b"lo\0"))
            });
            messages.collect::<Vec<_>>().concat()
        };
        for interrupted in 0..3 {
            assert_eq!(ask(&[messages(interrupted)]).unwrap(), None);
        }
        assert_eq!(
            ask(&[messages(3)]).unwrap().map(|found| found.len()),
            Some(2)
        );
    }

    #[test]
    fn a_dump_fails_with_the_kernels_error_or_a_malformed_answer() {
        let refused = message(NLMSG_ERROR, 0, SEQUENCE, &(-1i32).to_ne_bytes());
        let error = ask(&[refused]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
        let mut long = message(NLMSG_DONE, 0, SEQUENCE, &[]);
        long[0] += 4;
        let too_long = vec![0; ANSWER + 1];
        for malformed in [long, too_long, vec![0; 3]] {
            let error = ask(&[malformed]).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        }
    }

    #[test]
    fn errors_of_the_kernel_keep_their_number() {
        assert_eq!(
            error(&(-1i32).to_ne_bytes()).kind(),
            io::ErrorKind::PermissionDenied
        );
        assert_eq!(error(&[]).kind(), io::ErrorKind::InvalidData);
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_parsers_panic_or_spin(bytes in proptest::collection::vec(any::<u8>(), 0..512)) {
            let messages = Messages(&bytes).count();
            prop_assert!(messages <= bytes.len() / HEADER + 1);
            prop_assert!(Attributes(&bytes).count() <= bytes.len() / 4 + 1);
            let _ = (parse_link(&bytes), parse_address(&bytes));
        }
    }
}
