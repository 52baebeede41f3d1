//! Honest handshakes between compatible sides. Incompatible sides are in `negotiation`, dishonest
//! ones in `adversary` and `tamper`, the transitions in `table`.

mod adversary;
mod negotiation;
mod table;
mod tamper;

use alloc::vec;
use alloc::vec::Vec;
use core::num::NonZeroU32;

use proptest::prelude::*;

use super::*;
use crate::secret::Secret;

const FRAMES: &[u8] = b"TCPX\x05\0\x02\0frames, of which the first looks like a Reject";

fn identity(seed: u8) -> Identity {
    Identity {
        name: Name::new(["client", "server", "third"][usize::from(seed % 3)]).unwrap(),
        id: SessionId([seed; 16]),
        secret: Secret::new([seed + 100; 32]),
    }
}

fn info_of(identity: &Identity) -> ConnectionInfo {
    let Identity { name, id, secret } = identity.clone();
    ConnectionInfo::new(name, id, secret, vec!["127.0.0.1:7000".parse().unwrap()]).unwrap()
}

const CLIENT: u8 = 0;
const SERVER: u8 = 1;
const THIRD: u8 = 2;

const fn offer(offers: u32, requires: u32) -> Offer {
    match Offer::from_wire(Features::from_bits(offers), Features::from_bits(requires)) {
        Ok(offer) => offer,
        Err(_) => panic!("required and not offered"),
    }
}

/// Each side offers a feature that the other does not know, and requires one: bits 1 and 4 are
/// chosen.
const CLIENT_OFFER: Offer = offer(0b0011_0010, 0b0000_0010);
const SERVER_OFFER: Offer = offer(0b0101_0010, 0b0001_0000);
const CHOSEN: u32 = 0b0001_0010;

fn window(chunks: u32) -> NonZeroU32 {
    NonZeroU32::new(chunks).unwrap()
}

/// Returns a client that opens lane 2 of 4 to the session `target`.
fn client_to(target: &ConnectionInfo, nonce: u8) -> Client {
    client_with(target, nonce, CLIENT_OFFER)
}

fn client_with(target: &ConnectionInfo, nonce: u8, offer: Offer) -> Client {
    Client::new(ClientConfig {
        identity: identity(CLIENT),
        target,
        lane: LaneHello::new(77, 2, 4, window(8))
            .unwrap()
            .again(5)
            .listening_at(7000),
        offer,
        nonce: [nonce; NONCE_LEN],
    })
}

fn client() -> Client {
    client_to(&info_of(&identity(SERVER)), 0xc1)
}

fn server_as(identity: Identity, nonce: u8) -> Server {
    server_with(identity, nonce, SERVER_OFFER)
}

fn server_with(identity: Identity, nonce: u8, offer: Offer) -> Server {
    Server::new(ServerConfig {
        identity,
        window: window(16),
        offer,
        nonce: [nonce; NONCE_LEN],
    })
}

fn server() -> Server {
    server_as(identity(SERVER), 0x51)
}

/// The four messages of an honest handshake.
struct Honest {
    hello: Vec<u8>,
    server_hello: Vec<u8>,
    proof: Vec<u8>,
    ready: Vec<u8>,
}

impl Honest {
    fn between(mut client: Client, mut server: Server) -> Self {
        let hello = client.poll_transmit().unwrap();
        assert_eq!(server.handle(&hello), Ok(hello.len()));
        let server_hello = server.poll_transmit().unwrap();
        assert_eq!(client.handle(&server_hello), Ok(server_hello.len()));
        let proof = client.poll_transmit().unwrap();
        assert_eq!(server.handle(&proof), Ok(proof.len()));
        server.accept().unwrap();
        let ready = server.poll_transmit().unwrap();
        assert_eq!(client.handle(&ready), Ok(ready.len()));
        assert!(client.established().is_some() && server.established().is_some());
        assert!(client.poll_transmit().is_none() && server.poll_transmit().is_none());
        Self {
            hello,
            server_hello,
            proof,
            ready,
        }
    }

    fn new() -> Self {
        Self::between(client(), server())
    }
}

/// Returns the code of a message that must be a single Reject.
fn reject_code(bytes: Option<Vec<u8>>) -> RejectCode {
    let bytes = bytes.expect("a Reject");
    let message = message::Message::next(&bytes, MessageKind::Reject)
        .unwrap()
        .unwrap();
    assert_eq!(message.bytes.len(), bytes.len(), "one message");
    message.reject_code().unwrap()
}

/// Passes `input` in pieces as a socket would deliver it, and returns the bytes not consumed.
fn feed<E>(
    input: &[u8],
    sizes: impl IntoIterator<Item = usize>,
    mut handle: impl FnMut(&[u8]) -> Result<usize, E>,
) -> Result<Vec<u8>, E> {
    let mut kept = Vec::new();
    let mut rest = input;
    let mut sizes = sizes.into_iter();
    while !rest.is_empty() {
        let size = sizes.next().unwrap_or(usize::MAX).min(rest.len());
        kept.extend(&rest[..size]);
        rest = &rest[size..];
        let consumed = handle(&kept)?;
        kept.drain(..consumed);
    }
    Ok(kept)
}

#[test]
fn both_sides_agree() {
    let (mut client, mut server) = (client(), server());
    server.handle(&client.poll_transmit().unwrap()).unwrap();
    client.handle(&server.poll_transmit().unwrap()).unwrap();
    server.handle(&client.poll_transmit().unwrap()).unwrap();
    assert_eq!(
        client.established(),
        None,
        "the server has not answered yet"
    );
    assert_eq!(
        server.established(),
        None,
        "the caller has not answered yet"
    );
    let proven = server.proven().unwrap().clone();
    server.accept().unwrap();
    assert_eq!(server.proven(), None);
    client.handle(&server.poll_transmit().unwrap()).unwrap();

    let at_server = server.into_established().unwrap();
    assert_eq!(at_server, proven);
    assert_eq!(at_server.peer_name.as_str(), "client");
    assert_eq!(at_server.peer_id, identity(CLIENT).id);
    assert_eq!(at_server.peer_window, window(8));
    let at_client = client.into_established().unwrap();
    assert_eq!(at_client.peer_name.as_str(), "server");
    assert_eq!(at_client.peer_id, identity(SERVER).id);
    assert_eq!(at_client.peer_window, window(16));
    assert_eq!(at_client.owners, []);
    assert_eq!((at_client.peer_port, at_server.peer_port), (0, 7000));
    for side in [at_client, at_server] {
        assert_eq!((side.version, side.features.bits()), (VERSION, CHOSEN));
        assert_eq!((side.connection, side.lane, side.lanes), (77, 2, 4));
        assert_eq!(side.generation, 5);
    }
}

#[test]
fn the_owner_is_known_by_its_secret() {
    let (mut client, mut server) = (client(), server());
    server.handle(&client.poll_transmit().unwrap()).unwrap();
    client.handle(&server.poll_transmit().unwrap()).unwrap();
    server.handle(&client.poll_transmit().unwrap()).unwrap();
    let established = server.proven().unwrap();
    let [owner] = &established.owners[..] else {
        panic!("one lane has one proof");
    };
    assert!(owner.verify(&identity(CLIENT).secret));
    assert!(!owner.verify(&identity(SERVER).secret));
    assert!(established.is_owned_by(&info_of(&identity(CLIENT))));
    assert!(!established.is_owned_by(&info_of(&identity(THIRD))));
    let same_secret = Identity {
        id: SessionId([9; 16]),
        ..identity(CLIENT)
    };
    assert!(
        !established.is_owned_by(&info_of(&same_secret)),
        "another session's id"
    );
}

#[test]
fn a_connection_belongs_to_whoever_has_proven_every_lane() {
    let proven = |secret| {
        let mut client = Client::new(ClientConfig {
            identity: Identity {
                secret,
                ..identity(CLIENT)
            },
            target: &info_of(&identity(SERVER)),
            lane: LaneHello::new(77, 2, 4, window(8)).unwrap(),
            offer: CLIENT_OFFER,
            nonce: [1; NONCE_LEN],
        });
        let mut server = server();
        server.handle(&client.poll_transmit().unwrap()).unwrap();
        client.handle(&server.poll_transmit().unwrap()).unwrap();
        server.handle(&client.poll_transmit().unwrap()).unwrap();
        server.proven().unwrap().clone()
    };
    let info = info_of(&identity(CLIENT));
    let (own, foreign) = (identity(CLIENT).secret, identity(THIRD).secret);
    for (first, second, is_owned) in [
        (&own, &own, true),
        (&own, &foreign, false),
        (&foreign, &own, false),
    ] {
        let mut connection = proven(first.clone());
        connection.join(proven(second.clone()));
        assert_eq!(connection.is_owned_by(&info), is_owned);
    }
}

#[test]
fn a_session_can_connect_to_itself() {
    let client = client_to(&info_of(&identity(CLIENT)), 1);
    Honest::between(client, server_as(identity(CLIENT), 2));
}

#[test]
fn the_longest_messages_fit_the_limit() {
    let long = || Name::new("n".repeat(Name::MAX_LEN)).unwrap();
    let at_server = Identity {
        name: long(),
        ..identity(SERVER)
    };
    let mut client = client_to(&info_of(&at_server), 1);
    assert_eq!(client.poll_transmit().unwrap().len(), 8 + 99 + 6);
    let client = Client::new(ClientConfig {
        identity: Identity {
            name: long(),
            ..identity(CLIENT)
        },
        target: &info_of(&at_server),
        lane: LaneHello::new(u64::MAX, 65534, 65535, NonZeroU32::MAX)
            .unwrap()
            .again(u32::MAX)
            .listening_at(u16::MAX),
        offer: CLIENT_OFFER,
        nonce: [1; NONCE_LEN],
    });
    let honest = Honest::between(client, server_as(at_server, 2));
    assert_eq!(honest.hello.len(), 8 + 99 + 255);
    assert_eq!(honest.server_hello.len(), 8 + 79 + 255);
    assert_eq!(honest.proof.len(), 8 + 64);
    assert_eq!(honest.ready.len(), 8);
    assert!(honest.hello.len().max(honest.server_hello.len()) <= MAX_HANDSHAKE_BYTES);
}

#[test]
fn a_cut_message_is_waited_for() {
    let honest = Honest::new();
    for len in 0..honest.hello.len() {
        let mut server = server();
        assert_eq!(server.handle(&honest.hello[..len]), Ok(0), "{len}");
        assert_eq!(server.poll_transmit(), None, "{len}");
    }
    for len in 0..honest.server_hello.len() {
        let mut client = client();
        client.poll_transmit().unwrap();
        assert_eq!(client.handle(&honest.server_hello[..len]), Ok(0), "{len}");
        assert_eq!(
            client.poll_transmit(),
            None,
            "no proof for a stranger: {len}"
        );
    }
    for len in 0..honest.proof.len() {
        let mut server = server();
        server.handle(&honest.hello).unwrap();
        assert_eq!(server.handle(&honest.proof[..len]), Ok(0), "{len}");
        assert_eq!(server.proven(), None, "{len}");
    }
    for len in 0..honest.ready.len() {
        let mut client = client();
        client.handle(&honest.server_hello).unwrap();
        assert_eq!(client.handle(&honest.ready[..len]), Ok(0), "{len}");
        assert_eq!(client.established(), None, "{len}");
    }
}

proptest! {
    #[test]
    fn messages_may_arrive_in_pieces_of_any_size(
        sizes in prop::collection::vec(1..40usize, 0..400),
        frames: bool,
    ) {
        let (mut client, mut server) = (client(), server());
        let pieces = || sizes.iter().copied().chain(core::iter::repeat(1));
        let frames = if frames { FRAMES } else { &[] };

        let hello = client.poll_transmit().unwrap();
        prop_assert_eq!(feed(&hello, pieces(), |b| server.handle(b)), Ok(vec![]));
        let answer = server.poll_transmit().unwrap();
        prop_assert_eq!(feed(&answer, pieces(), |b| client.handle(b)), Ok(vec![]));
        let proof = [&client.poll_transmit().unwrap(), frames].concat();
        prop_assert_eq!(feed(&proof, pieces(), |b| server.handle(b)), Ok(frames.to_vec()));
        server.accept().unwrap();
        prop_assert_eq!(server.handle(frames), Ok(0));
        let ready = [&server.poll_transmit().unwrap(), frames].concat();
        prop_assert_eq!(feed(&ready, pieces(), |b| client.handle(b)), Ok(frames.to_vec()));
        prop_assert_eq!(client.handle(frames), Ok(0));
        prop_assert!(client.established().is_some());
    }
}
