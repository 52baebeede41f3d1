//! Incompatible sides, and offers of unknown features.

use alloc::format;
use alloc::string::ToString;

use super::*;

/// Bits that no build knows yet.
const FUTURE: u32 = 0xff00_0000;

fn missing(client_lacks: u32, server_lacks: u32) -> Missing {
    let [client, server] = [client_lacks, server_lacks].map(Features::from_bits);
    Missing::new(client, server).unwrap()
}

/// Runs a handshake between honest sides and returns its result at the client and at the server,
/// together with the server's last message.
fn shake(
    at_client: Offer,
    at_server: Offer,
) -> (
    Result<Features, HandshakeError>,
    Result<Features, HandshakeError>,
    Vec<u8>,
) {
    let mut client = client_with(&info_of(&identity(SERVER)), 0xc1, at_client);
    let mut server = server_with(identity(SERVER), 0x51, at_server);
    server.handle(&client.poll_transmit().unwrap()).unwrap();
    let verdict = client.handle(&server.poll_transmit().unwrap());
    // Compatible or not, the client proves itself, and is identified before it is rejected.
    let proof = client.poll_transmit().unwrap();
    assert_eq!(server.handle(&proof), Ok(proof.len()));
    assert_eq!(server.proven().unwrap().peer_name.as_str(), "client");
    let accepted = server.accept();
    assert_eq!(server.proven(), None);
    let last = server.poll_transmit().unwrap();
    let at_server = accepted.map(|()| server.established().unwrap().features);
    assert_eq!(server.established().is_some(), at_server.is_ok());
    let at_client = verdict
        .and_then(|_| client.handle(&last))
        .map(|_| client.established().unwrap().features);
    assert_eq!(client.established().is_some(), at_client.is_ok());
    assert_eq!(client.poll_transmit(), None, "a Reject is not answered");
    (at_client, at_server, last)
}

/// Checks that both sides report the same missing features, and that the Reject carries them.
fn unfit(client: Offer, server: Offer, missing: Missing) {
    let (at_client, at_server, last) = shake(client, server);
    let incompatible = HandshakeError::PeerIncompatible { missing };
    assert_eq!(at_client, Err(incompatible));
    assert_eq!(at_server, Err(incompatible));
    assert_eq!(reject_code(Some(last)), RejectCode::Requirement(missing));
}

fn fit(client: Offer, server: Offer, chosen: u32) {
    let (at_client, at_server, _) = shake(client, server);
    let chosen = Features::from_bits(chosen);
    assert_eq!((at_client, at_server), (Ok(chosen), Ok(chosen)));
}

#[test]
fn a_requirement_that_is_not_offered_is_named_with_its_side() {
    let comms = Features::COMMS.bits();
    let plugin = offer(comms, comms);
    let native = offer(0, 0);
    fit(plugin, plugin, comms);
    fit(native, native, 0);
    unfit(plugin, native, missing(0, comms));
    unfit(native, plugin, missing(comms, 0));
    // Each side lacks a feature.
    unfit(offer(0x30, 0x20), offer(0x50, 0x40), missing(0x40, 0x20));
    // Features that are offered and not required prevent nothing.
    fit(offer(comms, 0), native, 0);
    fit(native, offer(comms, 0), 0);
    fit(offer(comms, 0), plugin, comms);
    fit(plugin, offer(comms, 0), comms);
}

#[test]
fn errors_name_the_message_the_reason_and_the_feature() {
    let unexpected = HandshakeError::PeerMessageUnexpected {
        found: MessageKind::ServerReady,
        expected: MessageKind::ServerHello,
    };
    assert_eq!(
        unexpected.to_string(),
        "the peer sent ServerReady where ServerHello belongs"
    );
    let codes = [
        (RejectCode::Version, "no protocol version in common"),
        (RejectCode::TooMany, "too many connections"),
        (RejectCode::Other(300), "reason 300"),
    ];
    for (code, text) in codes {
        let rejected = HandshakeError::PeerRejected { code };
        let expected = format!("the peer refused the connection: {text}");
        assert_eq!(rejected.to_string(), expected);
    }
    let missing = missing(Features::COMMS.bits(), 0x30);
    for text in [
        HandshakeError::PeerIncompatible { missing }.to_string(),
        RejectCode::Requirement(missing).to_string(),
    ] {
        assert!(text.contains("comms of a plugin"), "{text}");
        assert!(text.contains("features 0x30"), "{text}");
    }
}

#[test]
fn unknown_offers_are_ignored() {
    let ours = Offer::new(Features::COMMS, Features::COMMS).unwrap();
    let theirs = offer(FUTURE | Features::COMMS.bits(), 0);
    fit(ours, theirs, Features::COMMS.bits());
    fit(theirs, ours, Features::COMMS.bits());
}

#[test]
fn unknown_requirements_are_not_met() {
    let ours = Offer::new(Features::COMMS, Features::NONE).unwrap();
    for bit in (0..32).map(|bit| 1 << bit).filter(|bit| *bit != 2) {
        let theirs = offer(FUTURE | bit, bit);
        unfit(theirs, ours, missing(0, bit));
        unfit(ours, theirs, missing(bit, 0));
    }
}

#[test]
fn encryption_is_never_agreed_on() {
    // An offer of everything does not include encryption.
    let all = Offer::new(Features::from_bits(u32::MAX), Features::NONE).unwrap();
    let mut client = client_with(&info_of(&identity(SERVER)), 1, all);
    let hello = client.poll_transmit().unwrap();
    assert_eq!(hello[66..74], [0xf6, 0xff, 0xff, 0xff, 0, 0, 0, 0]);
    let mut server = server_with(identity(SERVER), 2, all);
    server.handle(&hello).unwrap();
    let answer = server.poll_transmit().unwrap();
    assert_eq!(answer[10..18], [0xf6, 0xff, 0xff, 0xff, 0, 0, 0, 0]);

    // Future sides may offer encryption and are answered without it, or require it and fail.
    let encryption = Features::ENCRYPTION.bits();
    let reserved = 0b1001;
    fit(offer(u32::MAX, 0), all, !reserved);
    fit(all, offer(u32::MAX, 0), !reserved);
    unfit(offer(u32::MAX, encryption), all, missing(0, encryption));
    unfit(all, offer(u32::MAX, encryption), missing(encryption, 0));
}

#[test]
fn a_stranger_is_not_told_that_it_does_not_fit() {
    // The client knows the session's id, but not its secret.
    let requires = offer(FUTURE, FUTURE);
    let mut stranger = client_with(&info_of(&identity(SERVER)), 0xc1, requires);
    let mut server = server();
    server.handle(&stranger.poll_transmit().unwrap()).unwrap();
    let answer = server.poll_transmit().unwrap();
    assert_eq!(answer[4], MessageKind::ServerHello as u8);
    let forged = [message::proof_before_tag(&[7; 32]), vec![7; 32]].concat();
    assert_eq!(server.handle(&forged), Err(HandshakeError::PeerProofWrong));
    assert_eq!(reject_code(server.poll_transmit()), RejectCode::BadProof);
    assert_eq!(server.accept(), Err(HandshakeError::CallerAcceptedUnproven));
}

#[test]
fn requirements_of_an_unauthenticated_server_are_ignored() {
    // The server's tag is checked first.
    let wrong = Identity {
        secret: Secret::new([0xee; 32]),
        ..identity(SERVER)
    };
    let mut server = server_with(wrong, 0x51, offer(FUTURE, FUTURE));
    let mut client = client();
    server.handle(&client.poll_transmit().unwrap()).unwrap();
    let answer = server.poll_transmit().unwrap();
    assert_eq!(client.handle(&answer), Err(HandshakeError::PeerProofWrong));
    assert_eq!(reject_code(client.poll_transmit()), RejectCode::BadProof);
}

#[test]
fn a_caller_may_reject_an_incompatible_client() {
    let mut client = client_with(&info_of(&identity(SERVER)), 0xc1, offer(0x80, 0x80));
    let mut server = server();
    server.handle(&client.poll_transmit().unwrap()).unwrap();
    client.handle(&server.poll_transmit().unwrap()).unwrap_err();
    server.handle(&client.poll_transmit().unwrap()).unwrap();
    server.reject(RejectCode::Closing);
    assert_eq!(reject_code(server.poll_transmit()), RejectCode::Closing);
    assert_eq!(server.accept(), Err(HandshakeError::CallerAcceptedUnproven));
}

proptest! {
    /// For any offers and requirements, both sides come to the same result.
    #[test]
    fn both_sides_come_to_the_same_end(
        client_offers: u32, client_mask: u32, server_offers: u32, server_mask: u32,
    ) {
        let client = offer(client_offers, client_offers & client_mask);
        let server = offer(server_offers, server_offers & server_mask);
        let (at_client, at_server, _) = shake(client, server);
        prop_assert_eq!(at_client, at_server);
        let requires = client.requires() | server.requires();
        let chosen = client.offers() & server.offers();
        prop_assert_eq!(at_client.is_ok(), chosen.contains(requires));
    }
}
