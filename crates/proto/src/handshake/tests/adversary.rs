//! Peers that lie, replay or reflect: every one is refused.

use super::*;
use crate::codec::CodecError;
use crate::handshake::message;

#[test]
fn a_client_with_the_wrong_secret_is_turned_away() {
    let wrong = Identity {
        secret: Secret::new([0xee; 32]),
        ..identity(SERVER)
    };
    // An honest client with a wrong info notices first: the server's tag does not fit.
    let (mut client, mut server) = (client_to(&info_of(&wrong), 0xc1), server());
    server.handle(&client.poll_transmit().unwrap()).unwrap();
    let answer = server.poll_transmit().unwrap();
    assert_eq!(client.handle(&answer), Err(HandshakeError::PeerProofWrong));
    let told = client.poll_transmit().unwrap();
    assert_eq!(reject_code(Some(told.clone())), RejectCode::BadProof);
    let rejected = HandshakeError::PeerRejected {
        code: RejectCode::BadProof,
    };
    assert_eq!(server.handle(&told), Err(rejected));

    // A client that sends a proof made with a wrong secret anyway is refused.
    let forged = Honest::between(client_to(&info_of(&wrong), 0xc1), server_as(wrong, 0x51));
    let mut server = super::server();
    server.handle(&forged.hello).unwrap();
    server.poll_transmit().unwrap();
    assert_eq!(
        server.handle(&forged.proof),
        Err(HandshakeError::PeerProofWrong)
    );
    assert_eq!(reject_code(server.poll_transmit()), RejectCode::BadProof);
    assert_eq!(server.proven(), None);
    assert_eq!(server.accept(), Err(HandshakeError::CallerAcceptedUnproven));
}

#[test]
fn a_server_with_the_wrong_secret_gets_no_proof() {
    let wrong = Identity {
        secret: Secret::new([0xee; 32]),
        ..identity(SERVER)
    };
    let (mut client, mut server) = (client(), server_as(wrong, 0x51));
    server.handle(&client.poll_transmit().unwrap()).unwrap();
    let answer = server.poll_transmit().unwrap();
    assert_eq!(client.handle(&answer), Err(HandshakeError::PeerProofWrong));
    assert_eq!(reject_code(client.poll_transmit()), RejectCode::BadProof);
    assert_eq!(
        client.handle(&answer),
        Err(HandshakeError::PeerProofWrong),
        "errors are final"
    );
    assert_eq!(client.poll_transmit(), None);
}

#[test]
fn an_impostor_connects_but_owns_nothing() {
    // The impostor has the server's info, and claims to be the third session without its secret.
    let impostor = Identity {
        secret: Secret::new([0xee; 32]),
        ..identity(THIRD)
    };
    let mut client = Client::new(ClientConfig {
        identity: impostor,
        target: &info_of(&identity(SERVER)),
        lane: LaneHello::new(1, 0, 1, window(1)).unwrap(),
        offer: CLIENT_OFFER,
        nonce: [3; NONCE_LEN],
    });
    let mut server = server();
    server.handle(&client.poll_transmit().unwrap()).unwrap();
    client.handle(&server.poll_transmit().unwrap()).unwrap();
    server.handle(&client.poll_transmit().unwrap()).unwrap();
    let established = server.proven().unwrap();
    assert_eq!(established.peer_id, identity(THIRD).id);
    assert!(!established.is_owned_by(&info_of(&identity(THIRD))));
}

#[test]
fn replayed_messages_are_worthless() {
    let honest = Honest::new();
    // An old hello and an old proof, to a server whose nonce is new.
    let mut server = server_as(identity(SERVER), 0x52);
    server.handle(&honest.hello).unwrap();
    assert_eq!(
        server.handle(&honest.proof),
        Err(HandshakeError::PeerProofWrong)
    );
    // An old answer, to a client whose nonce is new.
    let mut client = client_to(&info_of(&identity(SERVER)), 0xc2);
    assert_eq!(
        client.handle(&honest.server_hello),
        Err(HandshakeError::PeerProofWrong)
    );
    // An old proof, for another lane of the same connection: the hello differs in one byte.
    let mut hello = honest.hello.clone();
    hello[52] ^= 1;
    let mut server = super::server();
    server.handle(&hello).unwrap();
    assert_eq!(
        server.handle(&honest.proof),
        Err(HandshakeError::PeerProofWrong)
    );
}

#[test]
fn reflected_messages_are_worthless() {
    let honest = Honest::new();
    let mut client = client();
    assert_eq!(
        client.handle(&honest.hello),
        Err(HandshakeError::PeerMessageUnexpected {
            found: MessageKind::ClientHello,
            expected: MessageKind::ServerHello,
        })
    );
    let mut server = server();
    server.handle(&honest.hello).unwrap();
    let answer = server.poll_transmit().unwrap();
    let tag = *answer.last_chunk::<32>().unwrap();
    let mut twin = server.clone();
    assert_eq!(
        server.handle(&answer),
        Err(HandshakeError::PeerMessageUnexpected {
            found: MessageKind::ServerHello,
            expected: MessageKind::ClientProof,
        })
    );
    // The server's own tag in the place of the client's.
    let proof = [message::proof_before_tag(&tag), tag.to_vec()].concat();
    assert_eq!(twin.handle(&proof), Err(HandshakeError::PeerProofWrong));

    // One session on both ends: a client's hello is answered by the same session's server, which
    // the attacker uses as an oracle for a second server of that session.
    let mut oracle = super::server();
    let mut victim = server_as(identity(SERVER), 0x99);
    victim.handle(&honest.hello).unwrap();
    oracle.handle(&honest.hello).unwrap();
    let tag = *oracle.poll_transmit().unwrap().last_chunk::<32>().unwrap();
    let proof = [message::proof_before_tag(&tag), tag.to_vec()].concat();
    assert_eq!(victim.handle(&proof), Err(HandshakeError::PeerProofWrong));
}

#[test]
fn disjoint_versions_are_rejected() {
    let patched = |min: u16, max: u16, tail: &[u8]| {
        let mut hello = Honest::new().hello;
        hello[8..10].copy_from_slice(&min.to_le_bytes());
        hello[10..12].copy_from_slice(&max.to_le_bytes());
        hello.extend(tail);
        let body = (hello.len() - 8) as u16;
        hello[6..8].copy_from_slice(&body.to_le_bytes());
        hello
    };
    let handle = |hello: &[u8]| {
        let mut server = server();
        let result = server.handle(hello);
        (result, server.poll_transmit())
    };

    let (min, max) = (VERSION + 1, VERSION + 3);
    let (result, answer) = handle(&patched(min, max, b""));
    assert_eq!(
        result,
        Err(HandshakeError::PeerVersionUnsupported { min, max })
    );
    let rejected = HandshakeError::PeerRejected {
        code: RejectCode::Version,
    };
    assert_eq!(client().handle(&answer.unwrap()), Err(rejected));
    // A future hello may have another layout after the version range.
    let future = [b"TCPX\x01\0\x05\0".to_vec(), vec![2, 0, 2, 0, 0xff]].concat();
    let (result, answer) = handle(&future);
    assert_eq!(
        result,
        Err(HandshakeError::PeerVersionUnsupported { min: 2, max: 2 })
    );
    assert_eq!(reject_code(answer), RejectCode::Version);
    let (result, _) = handle(&patched(0, 0, b""));
    assert_eq!(
        result,
        Err(HandshakeError::PeerVersionUnsupported { min: 0, max: 0 })
    );
    let (result, answer) = handle(&patched(3, 2, b""));
    assert_eq!(
        result,
        Err(MessageError::VersionRangeEmpty { min: 3, max: 2 }.into())
    );
    assert_eq!(reject_code(answer), RejectCode::BadMessage);

    // A client that also supports this version may have appended fields; others may not.
    let newer = patched(1, 9, b"fields of version 9");
    let (result, answer) = handle(&newer);
    assert_eq!(result, Ok(newer.len()));
    assert_eq!(answer.unwrap()[8..10], VERSION.to_le_bytes());
    let (result, _) = handle(&patched(1, 1, b"x"));
    assert!(
        matches!(result, Err(HandshakeError::PeerMessageMalformed(_))),
        "{result:?}"
    );
}

#[test]
fn fields_of_an_authentic_server_are_checked() {
    // This server knows the secret: it is authentic and faulty.
    let answer_with = |version: u16, requires: u32, window: u32| {
        let mut client = client();
        let mut transcript = super::super::proof::Transcript::default();
        transcript.add(&client.poll_transmit().unwrap());
        let hello = super::super::hello::ServerHello {
            version,
            offer: SERVER_OFFER,
            window: super::window(1),
            name: Name::new("x").unwrap(),
        };
        let mut answer = hello.encode_before_tag(&[0; 32]);
        answer[14..18].copy_from_slice(&requires.to_le_bytes());
        answer[18..22].copy_from_slice(&window.to_le_bytes());
        transcript.add(&answer);
        answer.extend(transcript.tag(&identity(SERVER).secret, super::super::proof::Label::Server));
        (client.handle(&answer).map(|_| ()), client.poll_transmit())
    };
    assert_eq!(answer_with(1, CHOSEN, 1).0, Ok(()));
    let (result, told) = answer_with(2, 0, 1);
    assert_eq!(
        result,
        Err(MessageError::VersionNotOffered { chosen: 2 }.into())
    );
    assert_eq!(
        reject_code(told),
        RejectCode::BadMessage,
        "and no proof before it"
    );
    let (result, told) = answer_with(1, CHOSEN | 0b101, 1);
    let missing = Features::from_bits(0b101);
    let malformed = MessageError::RequiredNotOffered { missing };
    assert_eq!(result, Err(malformed.into()));
    assert_eq!(reject_code(told), RejectCode::BadMessage);
    assert_eq!(answer_with(1, 0, 0).0, Err(MessageError::WindowZero.into()));
}

#[test]
fn impossible_fields_are_refused_by_name() {
    let with = |at: usize, bytes: &[u8]| {
        let mut hello = Honest::new().hello;
        hello[at..at + bytes.len()].copy_from_slice(bytes);
        let mut server = server();
        let error = server.handle(&hello).unwrap_err();
        (error, reject_code(server.poll_transmit()))
    };
    let bad = |error: MessageError| (error.into(), RejectCode::BadMessage);
    assert_eq!(with(0, b"H"), bad(MessageError::MagicMissing));
    assert_eq!(with(4, &[6]), bad(MessageError::KindUnknown { found: 6 }));
    assert_eq!(
        with(52, &[4, 0]),
        bad(LaneError { lane: 4, lanes: 4 }.into())
    );
    assert_eq!(with(56, &[0; 4]), bad(MessageError::WindowZero));
    let missing = Features::from_bits(0b1000_0001);
    assert_eq!(
        with(70, &[0b1000_0011]),
        bad(MessageError::RequiredNotOffered { missing })
    );
    assert_eq!(with(106, &[0]).1, RejectCode::BadMessage);
    assert_eq!(with(107, &[0xff]).1, RejectCode::BadMessage);
    let asked = SessionId([9; 16]);
    let unknown = HandshakeError::PeerTargetUnknown { asked };
    assert_eq!(with(28, &[9; 16]), (unknown, RejectCode::UnknownSession));
}

#[test]
fn what_is_not_tcpx_is_refused_at_its_first_byte() {
    for garbage in [&b"GET / HTTP/1.1\r\n"[..], b"\x16\x03\x01", b"TCPY", b"\0"] {
        let (mut client, mut server) = (client(), server());
        client.poll_transmit().unwrap();
        let malformed = Err(MessageError::MagicMissing.into());
        assert_eq!(client.handle(garbage), malformed);
        assert_eq!(server.handle(garbage), malformed);
        assert_eq!(reject_code(server.poll_transmit()), RejectCode::BadMessage);
    }
    // Lengths and kinds are refused with the header, before anything is buffered for them.
    for header in [
        &b"TCPX\x01\0\x00\x04"[..], // a ClientHello of 1,024 bytes and its header is too long
        b"TCPX\x01\0\x03\0",        // too short for a version range
        b"TCPX\x03\0\x40\0",        // a proof before the hello
        b"TCPX\x05\0\x01\0",        // a Reject has at least two bytes
        b"TCPX\x05\0\x0b\0",        // and at most ten
        b"TCPX\x01\x01\x60\0",      // reserved
    ] {
        let mut server = server();
        assert!(server.handle(header).is_err(), "{header:?}");
    }
}

/// The numbers are those of `docs/wire-protocol.md`. A ClientHello of another version may be as short
/// as its version range.
#[test]
fn every_length_outside_the_limits_of_its_kind_is_refused_with_the_header() {
    for (kind, limits) in [
        (MessageKind::ClientHello, 4..=1016),
        (MessageKind::ServerHello, 80..=334),
        (MessageKind::ClientProof, 64..=64),
        (MessageKind::ServerReady, 0..=0),
        (MessageKind::Reject, 2..=10),
    ] {
        for len in 0..=u16::MAX {
            let mut header = b"TCPX".to_vec();
            header.extend([kind as u8, 0]);
            header.extend(len.to_le_bytes());
            let found = message::Message::next(&header, kind).map(|_| ());
            let expected: Result<(), HandshakeError> = if limits.contains(&len) {
                Ok(())
            } else {
                let (min, max) = (usize::from(*limits.start()), usize::from(*limits.end()));
                let len = usize::from(len);
                let error = CodecError::LengthOutOfRange { len, min, max };
                Err(MessageError::from(error).into())
            };
            assert_eq!(found, expected, "{kind} of {len} bytes");
        }
    }
}

#[test]
fn a_reject_is_as_long_as_its_code_wants() {
    let said = |body: &[u8]| {
        let mut reject = b"TCPX\x05\0".to_vec();
        reject.extend((body.len() as u16).to_le_bytes());
        reject.extend(body);
        let mut client = client();
        client.poll_transmit().unwrap();
        client.handle(&reject).unwrap_err()
    };
    let code = |code| HandshakeError::PeerRejected { code };
    assert_eq!(said(&[5, 0]), code(RejectCode::Closing));
    assert_eq!(said(&[8, 0]), code(RejectCode::UnknownConnection));
    let trailing = crate::codec::CodecError::Trailing { left: 1 };
    assert_eq!(said(&[5, 0, 0]), MessageError::from(trailing).into());
    // The bytes after an unknown code are unknown too.
    assert_eq!(said(&[200, 0]), code(RejectCode::Other(200)));
    let long = [200, 0, 1, 2, 3, 4, 5, 6, 7, 8];
    assert_eq!(said(&long), code(RejectCode::Other(200)));

    let missing = Missing::new(Features::COMMS, Features::from_bits(0x80)).unwrap();
    let body = [7, 0, 2, 0, 0, 0, 0x80, 0, 0, 0];
    assert_eq!(said(&body), code(RejectCode::Requirement(missing)));
    for len in 2..body.len() {
        let error = said(&body[..len]);
        let malformed = matches!(error, HandshakeError::PeerMessageMalformed(_));
        assert!(malformed, "{len} bytes: {error}");
    }
    let nothing = [7, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    assert_eq!(said(&nothing), MessageError::NothingMissing.into());
}
