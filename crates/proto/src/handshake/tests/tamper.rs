//! Paths that alter messages, and peers that send noise: no handshake succeeds.

use super::*;
use crate::handshake::message::MAGIC;

/// Runs a handshake in which `tamper` may change each message, and returns both sides.
fn run(mut tamper: impl FnMut(MessageKind, &mut Vec<u8>)) -> (Client, Server) {
    let (mut client, mut server) = (client(), server());
    let (mut at_client, mut at_server) = (Vec::new(), Vec::new());
    let mut send = |kind, out: Option<Vec<u8>>| {
        let mut bytes = out.unwrap_or_default();
        tamper(kind, &mut bytes);
        bytes
    };
    at_server.extend(send(MessageKind::ClientHello, client.poll_transmit()));
    let consumed = server.handle(&at_server).unwrap_or(0);
    at_server.drain(..consumed);
    at_client.extend(send(MessageKind::ServerHello, server.poll_transmit()));
    let consumed = client.handle(&at_client).unwrap_or(0);
    at_client.drain(..consumed);
    at_server.extend(send(MessageKind::ClientProof, client.poll_transmit()));
    let _ = server.handle(&at_server);
    let _ = server.accept();
    at_client.extend(send(MessageKind::ServerReady, server.poll_transmit()));
    let _ = client.handle(&at_client);
    (client, server)
}

#[test]
fn no_flipped_bit_gets_in() {
    let honest = Honest::new();
    for (kind, len) in [
        (MessageKind::ClientHello, honest.hello.len()),
        (MessageKind::ServerHello, honest.server_hello.len()),
        (MessageKind::ClientProof, honest.proof.len()),
        (MessageKind::ServerReady, honest.ready.len()),
    ] {
        for bit in 0..len * 8 {
            let (client, server) = run(|at, bytes| {
                if at == kind {
                    bytes[bit / 8] ^= 1 << (bit % 8);
                }
            });
            assert_eq!(client.established(), None, "{kind} bit {bit}");
            // Once accepted, a server cannot notice that its last message was altered.
            let accepted = kind == MessageKind::ServerReady;
            assert_eq!(server.established().is_some(), accepted, "{kind} bit {bit}");
        }
    }
    let (client, server) = run(|_, _| {});
    assert!(client.established().is_some() && server.established().is_some());
}

fn any_header() -> impl Strategy<Value = Vec<u8>> {
    (0..7u8, prop_oneof![0..90u16, 0..1100u16]).prop_map(|(kind, len)| {
        let mut bytes = MAGIC.to_vec();
        bytes.extend([kind, 0]);
        bytes.extend(len.to_le_bytes());
        bytes
    })
}

fn any_input() -> impl Strategy<Value = Vec<u8>> {
    let honest = Honest::new();
    let piece = prop_oneof![
        any_header(),
        prop::collection::vec(any::<u8>(), 0..300),
        Just(honest.hello),
        Just(honest.server_hello),
        Just(honest.ready),
    ];
    prop::collection::vec(piece, 0..6).prop_map(|pieces| pieces.concat())
}

proptest! {
    /// For any input in any pieces: no panic, no client gets in, and either the machine has failed
    /// or less than the documented number of bytes waits in the caller's buffer.
    #[test]
    fn noise_gets_nobody_in(input in any_input(), sizes: Vec<u8>) {
        let pieces = || sizes.iter().map(|size| usize::from(*size).max(1));
        let mut server = server_as(identity(SERVER), 0x77);
        let kept = feed(&input, pieces(), |bytes| server.handle(bytes));
        prop_assert!(kept.is_err() || kept.unwrap().len() < MAX_HANDSHAKE_BYTES);
        prop_assert!(server.proven().is_none());
        prop_assert!(server.poll_transmit().is_none_or(|out| out.len() <= MAX_HANDSHAKE_BYTES));

        let mut client = client_to(&info_of(&identity(SERVER)), 0x78);
        client.poll_transmit().unwrap();
        let kept = feed(&input, pieces(), |bytes| client.handle(bytes));
        prop_assert!(kept.is_err() || kept.unwrap().len() < MAX_HANDSHAKE_BYTES);
        prop_assert!(client.established().is_none());
    }

    /// Any edit of any message: spans replaced, cut, repeated.
    #[test]
    fn no_edit_gets_in(
        kind in 1..=4u8, at: prop::sample::Index, len in 0..8usize, with: Vec<u8>,
    ) {
        let (mut changed, mut followed) = (false, false);
        let (client, server) = run(|now, bytes| {
            if now as u8 != kind || bytes.is_empty() {
                return;
            }
            let before = bytes.clone();
            let start = at.index(bytes.len());
            let end = (start + len).min(bytes.len());
            bytes.splice(start..end, with.iter().copied());
            changed = !bytes.starts_with(&before);
            followed = !changed && bytes.len() > before.len();
        });
        // Bytes after the last message of a side belong to the frames; bytes between two messages
        // are covered by another test.
        prop_assume!(!followed || kind >= 3);
        prop_assert_eq!(client.established().is_some(), !changed);
        prop_assert_eq!(server.established().is_some(), !changed || kind == 4);
    }
}

/// Found by the fuzzer: the message was complete, and the bytes after it were not.
#[test]
fn a_failed_side_sends_its_reject_and_nothing_else() {
    let honest = Honest::new();
    let malformed = HandshakeError::from(MessageError::MagicMissing);
    let mut server = server();
    assert_eq!(
        server.handle(&[&honest.hello[..], b"0"].concat()),
        Err(malformed)
    );
    assert_eq!(
        reject_code(server.poll_transmit()),
        RejectCode::BadMessage,
        "no ServerHello"
    );

    let mut client = client();
    client.poll_transmit().unwrap();
    assert_eq!(
        client.handle(&[&honest.server_hello[..], b"0"].concat()),
        Err(malformed)
    );
    assert_eq!(
        reject_code(client.poll_transmit()),
        RejectCode::BadMessage,
        "no proof"
    );
}
