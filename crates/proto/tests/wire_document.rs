//! The examples of `docs/wire-protocol.md` match the encoder's output.

use std::num::NonZeroU32;

use tcpx_proto::descriptor::{Memory, RegionDescriptor, RegionKey};
use tcpx_proto::handshake::{
    Client, ClientConfig, Features, Identity, LaneHello, Offer, Server, ServerConfig,
};
use tcpx_proto::info::{ConnectionInfo, Name, Secret, SessionId};

const DOCUMENT: &str = include_str!("../../../docs/wire-protocol.md");

/// Checks that the document has these bytes as a block of hex, 32 bytes per line.
fn assert_documented(what: &str, bytes: &[u8]) {
    let lines = bytes.chunks(32).map(|line| {
        let digits = line.iter().map(|byte| format!("{byte:02x}"));
        digits.collect::<String>()
    });
    let block = lines.collect::<Vec<_>>().join("\n");
    assert!(
        DOCUMENT.contains(&format!("```text\n{block}\n```")),
        "{what} should be:\n{block}"
    );
}

/// Returns bytes that count up.
fn counting<const N: usize>(from: u8) -> [u8; N] {
    std::array::from_fn(|at| from + at as u8)
}

fn window(chunks: u32) -> NonZeroU32 {
    NonZeroU32::new(chunks).unwrap()
}

#[test]
fn connection_info() {
    let info = ConnectionInfo::new(
        Name::new("prefill-0").unwrap(),
        SessionId([0x11; 16]),
        Secret::new([0x22; 32]),
        vec![
            "10.1.2.3:7000".parse().unwrap(),
            "[fe80::1%5]:7001".parse().unwrap(),
        ],
    );
    assert_documented("connection info", &info.unwrap().encode());
}

#[test]
fn region_descriptor() {
    let (address, len, key) = (0x1122_3344_5566_7788, 153, RegionKey([0xee; 16]));
    let region = RegionDescriptor::new(address, len, key, Memory::Cuda { device: 3 });
    assert_documented("region descriptor", &region.unwrap().encode());
}

/// Returns the two sides of the test vector.
fn sides(client: Offer, server: Offer) -> (Client, Server) {
    let server_identity = Identity {
        name: Name::new("decode-0").unwrap(),
        id: SessionId(counting(0x20)),
        secret: Secret::new(counting(0x40)),
    };
    let target = ConnectionInfo::new(
        server_identity.name.clone(),
        server_identity.id,
        server_identity.secret.clone(),
        vec!["127.0.0.1:7000".parse().unwrap()],
    );
    let client = Client::new(ClientConfig {
        identity: Identity {
            name: Name::new("prefill-0").unwrap(),
            id: SessionId(counting(0x10)),
            secret: Secret::new(counting(0x60)),
        },
        target: &target.unwrap(),
        lane: LaneHello::new(0x0102_0304_0506_0708, 1, 4, window(8))
            .unwrap()
            .again(3)
            .listening_at(7000),
        offer: client,
        nonce: counting(0x80),
    });
    let server = Server::new(ServerConfig {
        identity: server_identity,
        window: window(16),
        offer: server,
        nonce: counting(0xa0),
    });
    (client, server)
}

fn offer(offers: u32, requires: u32) -> Offer {
    Offer::new(Features::from_bits(offers), Features::from_bits(requires)).unwrap()
}

#[test]
fn handshake() {
    let (mut client, mut server) = sides(offer(0x12, 0x02), offer(0x02, 0));
    let hello = client.poll_transmit().unwrap();
    assert_documented("ClientHello", &hello);
    server.handle(&hello).unwrap();
    let answer = server.poll_transmit().unwrap();
    assert_documented("ServerHello", &answer);
    client.handle(&answer).unwrap();
    let proof = client.poll_transmit().unwrap();
    assert_documented("ClientProof", &proof);
    server.handle(&proof).unwrap();
    server.accept().unwrap();
    assert_eq!(server.established().unwrap().features, Features::COMMS);
    assert_documented("ServerReady", &server.poll_transmit().unwrap());
}

#[test]
fn handshake_of_sides_that_do_not_fit() {
    let (mut client, mut server) = sides(offer(0x20, 0x20), offer(0x02, 0x02));
    server.handle(&client.poll_transmit().unwrap()).unwrap();
    client.handle(&server.poll_transmit().unwrap()).unwrap_err();
    server.handle(&client.poll_transmit().unwrap()).unwrap();
    server.accept().unwrap_err();
    assert_documented("Reject", &server.poll_transmit().unwrap());
}
