use alloc::string::String;
use alloc::vec;
use alloc::{format, string::ToString};

use proptest::prelude::*;

use super::*;

fn info() -> ConnectionInfo {
    ConnectionInfo::new(
        Name::new("prefill-0").unwrap(),
        SessionId([0x11; 16]),
        Secret::new([0x22; 32]),
        vec![
            "10.1.2.3:7000".parse().unwrap(),
            "[fe80::1%5]:7001".parse().unwrap(),
        ],
    )
    .unwrap()
}

fn host(name: &str, port: u16) -> NamedAddress {
    NamedAddress {
        name: HostName::new(name).unwrap(),
        port,
    }
}

fn named(
    addresses: Vec<SocketAddr>,
    names: Vec<NamedAddress>,
) -> Result<ConnectionInfo, InfoError> {
    ConnectionInfo::with_names(
        Name::new("prefill-0").unwrap(),
        SessionId([0x11; 16]),
        Secret::new([0x22; 32]),
        addresses,
        names,
    )
}

/// Replaces the checksum by a right one, as a faulty encoder would write it.
fn seal(mut bytes: Vec<u8>) -> Vec<u8> {
    bytes.truncate(bytes.len() - CHECKSUM_LEN);
    let checksum = checksum(&bytes);
    bytes.extend(checksum);
    bytes
}

/// Decodes an honest info with one byte changed before the checksum was computed.
fn decode_with(at: usize, value: u8) -> Result<ConnectionInfo, InfoError> {
    let mut bytes = info().encode();
    bytes[at] = value;
    ConnectionInfo::decode(&seal(bytes))
}

#[test]
fn the_layout_is_the_documented_one() {
    let mut expected = b"TCXI".to_vec();
    expected.extend([1, 2, 0, 9]);
    expected.extend([0x11; 16]);
    expected.extend([0x22; 32]);
    expected.extend(b"prefill-0");
    expected.extend([4, 0x58, 0x1b, 10, 1, 2, 3]);
    expected.extend([6, 0x59, 0x1b, 0xfe, 0x80]);
    expected.extend([0; 13]);
    expected.extend([1, 5, 0, 0, 0]);
    let digest: [u8; 32] = Sha256::digest(&expected).into();
    expected.extend(&digest[..8]);
    assert_eq!(info().encode(), expected);
}

#[test]
fn host_names_have_a_layout_of_their_own() {
    let address = "10.1.2.3:7000".parse().unwrap();
    let info = named(vec![address], vec![host("pod-0.svc", 7001)]).unwrap();
    let bytes = info.encode();
    assert_eq!(bytes[4..8], [2, 1, 1, 9]);
    let entry = [&[0x59, 0x1b, 9][..], b"pod-0.svc"].concat();
    assert_eq!(bytes[72..bytes.len() - 8], entry);
    assert_eq!(ConnectionInfo::decode(&bytes), Ok(info));
    // Names alone are enough.
    let alone = named(vec![], vec![host("a", 1)]).unwrap();
    assert_eq!(ConnectionInfo::decode(&alone.encode()), Ok(alone));
    let with = |at: usize, value: u8| {
        let mut bytes = bytes.clone();
        bytes[at] = value;
        ConnectionInfo::decode(&seal(bytes))
    };
    let names = |count| Err(InfoError::HostCountOutOfRange { count });
    // Without a name it is the first layout: every info has exactly one encoding.
    assert_eq!(with(6, 0), names(0));
    assert_eq!(with(6, 9), names(9));
    assert!(matches!(with(4, 1), Err(InfoError::LayoutWrong(_))));
    assert_eq!(with(75, b' '), Err(HostNameInvalid.into()));
    assert_eq!(with(75, 0xff), Err(HostNameInvalid.into()));
    assert_eq!(
        named(vec![], vec![host("a", 0)]),
        Err(HostNameInvalid.into())
    );
    assert_eq!(named(vec![], vec![host("a", 1); 9]), names(9));
    assert_eq!(
        named(vec![address; 64], vec![host("a", 1)]),
        Err(InfoError::AddressCountOutOfRange { count: 65 })
    );
}

#[test]
fn the_longest_info_is_as_long_as_promised() {
    let label = "x".repeat(63);
    let name = format!("{label}.{label}.{label}.{}", "x".repeat(61));
    let longest = ConnectionInfo::with_names(
        Name::new("n".repeat(255)).unwrap(),
        SessionId([0; 16]),
        Secret::new([0; 32]),
        vec!["[::1]:1".parse().unwrap(); 56],
        vec![host(&name, 1); 8],
    )
    .unwrap();
    let bytes = longest.encode();
    assert_eq!(bytes.len(), ConnectionInfo::MAX_ENCODED_LEN);
    assert_eq!(ConnectionInfo::decode(&bytes), Ok(longest));
}

#[test]
fn every_truncation_is_noticed() {
    let bytes = info().encode();
    for len in 0..bytes.len() {
        let error = ConnectionInfo::decode(&bytes[..len]).unwrap_err();
        let expected = match len {
            0..4 => matches!(error, InfoError::MagicMissing { .. }),
            4 => matches!(error, InfoError::LayoutWrong(CodecError::Truncated { .. })),
            _ => matches!(error, InfoError::ChecksumWrong { .. }),
        };
        assert!(expected, "{len}: {error}");
    }
}

#[test]
fn every_flipped_bit_is_noticed() {
    let bytes = info().encode();
    for bit in 0..bytes.len() * 8 {
        let mut bytes = bytes.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        let error = ConnectionInfo::decode(&bytes).unwrap_err();
        let expected = match bit / 8 {
            0..4 => matches!(error, InfoError::MagicMissing { .. }),
            4 => matches!(error, InfoError::VersionUnknown { .. }),
            _ => matches!(error, InfoError::ChecksumWrong { .. }),
        };
        assert!(expected, "{bit}: {error}");
    }
}

#[test]
fn a_faulty_encoder_is_refused_by_name() {
    let count = |count| Err(InfoError::AddressCountOutOfRange { count });
    assert_eq!(decode_with(5, 0), count(0));
    assert_eq!(decode_with(5, 65), count(65));
    assert!(matches!(
        decode_with(5, 1),
        Err(InfoError::LayoutWrong(CodecError::Trailing { .. }))
    ));
    assert!(matches!(
        decode_with(5, 3),
        Err(InfoError::LayoutWrong(CodecError::Truncated { .. }))
    ));
    assert!(matches!(decode_with(6, 1), Err(InfoError::LayoutWrong(_))));
    assert!(matches!(decode_with(7, 0), Err(InfoError::NameInvalid(_))));
    assert!(matches!(
        decode_with(7, 255),
        Err(InfoError::LayoutWrong(_))
    ));
    assert!(matches!(
        decode_with(60, 0xff),
        Err(InfoError::NameInvalid(_))
    ));
    assert_eq!(
        decode_with(65, 5),
        Err(InfoError::AddressFamilyUnknown { found: 5 })
    );
    assert!(matches!(
        decode_with(68, 224),
        Err(InfoError::AddressUnusable { .. })
    ));
}

#[test]
fn bytes_after_the_end_are_refused_before_they_are_hashed() {
    let mut bytes = info().encode();
    bytes.resize(ConnectionInfo::MAX_ENCODED_LEN + 1, 0);
    let len = bytes.len();
    assert_eq!(
        ConnectionInfo::decode(&seal(bytes)),
        Err(InfoError::ChecksumWrong { len })
    );
}

#[test]
fn addresses_that_nobody_can_connect_to_are_refused() {
    let with = |addresses| {
        ConnectionInfo::new(
            Name::new("x").unwrap(),
            SessionId([0; 16]),
            Secret::new([0; 32]),
            addresses,
        )
    };
    assert_eq!(
        with(vec![]),
        Err(InfoError::AddressCountOutOfRange { count: 0 })
    );
    let good: SocketAddr = "127.0.0.1:1".parse().unwrap();
    assert_eq!(
        with(vec![good; 65]),
        Err(InfoError::AddressCountOutOfRange { count: 65 })
    );
    for bad in [
        "127.0.0.1:0",
        "0.0.0.0:1",
        "[::]:1",
        "224.0.0.1:1",
        "[ff02::1]:1",
    ] {
        let address = bad.parse().unwrap();
        assert_eq!(
            with(vec![good, address]),
            Err(InfoError::AddressUnusable { address }),
            "{bad}"
        );
    }
}

#[test]
fn the_scope_id_is_kept_and_the_flow_label_dropped() {
    let address = SocketAddrV6::new("fe80::7".parse().unwrap(), 9, 77, 3);
    let info = ConnectionInfo::new(
        Name::new("x").unwrap(),
        SessionId([0; 16]),
        Secret::new([0; 32]),
        vec![address.into()],
    )
    .unwrap();
    let SocketAddr::V6(kept) = info.addresses()[0] else {
        panic!("family changed")
    };
    assert_eq!((kept.scope_id(), kept.flowinfo()), (3, 0));
    assert_eq!(ConnectionInfo::decode(&info.encode()), Ok(info));
}

#[test]
fn ids_print_as_hex_and_secrets_not_at_all() {
    let id = SessionId([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 0xff]);
    assert_eq!(id.to_string(), "000102030405060708090a0b0c0d0eff");
    let text = format!("{:?}", info());
    assert!(
        text.contains("SessionId(1111") && text.contains("Secret(..)"),
        "{text}"
    );
    assert!(!text.contains("34, 34"), "{text}");
}

fn any_name() -> impl Strategy<Value = Name> {
    // Any characters, cut to the length of a name.
    prop::collection::vec(any::<char>(), 1..=255).prop_map(|chars| {
        let mut name = String::new();
        for c in chars {
            if name.len() + c.len_utf8() > Name::MAX_LEN {
                break;
            }
            name.push(c);
        }
        Name::new(name).unwrap()
    })
}

fn any_address() -> impl Strategy<Value = SocketAddr> {
    let v4 = (any::<u32>(), 1..=u16::MAX)
        .prop_map(|(ip, port)| SocketAddrV4::new(Ipv4Addr::from(ip), port).into());
    let v6 = (any::<u128>(), 1..=u16::MAX, any::<u32>())
        .prop_map(|(ip, port, scope)| SocketAddrV6::new(Ipv6Addr::from(ip), port, 0, scope).into());
    prop_oneof![v4, v6].prop_filter("usable", |address| check_usable(*address).is_ok())
}

/// Names of hosts, as a regular expression.
const HOST: &str = "[a-z0-9_]{1,63}(\\.[a-z][a-z-]{0,20}){0,3}";

proptest! {
    #[test]
    fn what_was_encoded_is_decoded(
        name in any_name(),
        id: [u8; 16],
        secret: [u8; 32],
        addresses in prop::collection::vec(any_address(), 1..=56),
        names in prop::collection::vec((HOST, 1..=u16::MAX), 0..=8),
    ) {
        let names = names.iter().map(|(name, port)| host(name, *port)).collect();
        let (id, secret) = (SessionId(id), Secret::new(secret));
        let info = ConnectionInfo::with_names(name, id, secret, addresses, names).unwrap();
        let bytes = info.encode();
        prop_assert!(bytes.len() <= ConnectionInfo::MAX_ENCODED_LEN);
        prop_assert_eq!(ConnectionInfo::decode(&bytes), Ok(info));
    }

    /// With the checksum corrected, the decoder sees arbitrary bytes and stays canonical.
    #[test]
    fn anything_that_decodes_encodes_to_itself(
        head in [1..3u8, 0..5u8, 0..2u8, 1..9u8],
        tail in prop::collection::vec(any::<u8>(), 48..200),
    ) {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(head);
        bytes.extend(tail);
        bytes.extend([0; CHECKSUM_LEN]);
        let bytes = seal(bytes);
        if let Ok(info) = ConnectionInfo::decode(&bytes) {
            prop_assert_eq!(info.encode(), bytes);
        }
    }
}
