//! Handshakes. The first byte of the input chooses the attacker, the rest its actions.

use core::num::NonZeroU32;

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};
use tcpx_proto::codec::Reader;
use tcpx_proto::handshake::{
    Client, ClientConfig, Established, Features, HandshakeError, Identity, LaneHello,
    MAX_HANDSHAKE_BYTES, Missing, Offer, Server, ServerConfig,
};
use tcpx_proto::info::{ConnectionInfo, Name, Secret, SessionId};

/// An unknown peer sends a stream to either side, cut into pieces: `count, sizes…, stream…`.
pub const NOISE: u8 = 0;
/// An attacker on the path edits an honest handshake: `(message, at, at, operation, value)…`.
pub const EDITS: u8 = 1;
/// A server that knows the secret sends `fields…` after the header and a valid tag.
pub const FAULTY_SERVER: u8 = 2;
/// A client that knows the secret sends `fields…` after the header and a valid proof.
pub const FAULTY_CLIENT: u8 = 3;

const SERVER_SECRET: [u8; 32] = [0x51; 32];
const SERVER_NONCE: u8 = 0x53;
const CLIENT_NONCE: u8 = 0xc3;
/// Offers and requirements of the honest sides.
const CLIENT_OFFER: [u32; 2] = [0b0011_0010, 0b0000_0010];
const SERVER_OFFER: [u32; 2] = [0b0101_0010, 0b0001_0000];

/// Checks any input; panics when the state machines break a promise.
pub fn check(data: &[u8]) {
    let Some((mode, rest)) = data.split_first() else {
        return;
    };
    match *mode {
        NOISE => noise(rest),
        EDITS => edits(rest),
        FAULTY_SERVER => faulty_server(rest),
        FAULTY_CLIENT => faulty_client(rest),
        _ => {}
    }
}

fn identity(name: &str, id: u8, secret: [u8; 32]) -> Identity {
    let name = Name::new(name).expect("a name");
    Identity {
        name,
        id: SessionId([id; 16]),
        secret: Secret::new(secret),
    }
}

fn server_identity() -> Identity {
    identity("decode-0", 0x52, SERVER_SECRET)
}

fn offer([offers, requires]: [u32; 2]) -> Offer {
    let [offers, requires] = [offers, requires].map(Features::from_bits);
    Offer::new(offers, requires).expect("required is what is offered")
}

/// Returns the honest client of every check.
fn client(nonce: u8) -> Client {
    let Identity { name, id, secret } = server_identity();
    let addresses = vec!["127.0.0.1:7000".parse().expect("an address")];
    let target = ConnectionInfo::new(name, id, secret, addresses).expect("a connection info");
    Client::new(ClientConfig {
        identity: identity("prefill-0", 0xc2, [0xc1; 32]),
        target: &target,
        lane: LaneHello::new(7, 1, 4, NonZeroU32::MIN)
            .expect("a lane")
            .again(3)
            .listening_at(7000),
        offer: offer(CLIENT_OFFER),
        nonce: [nonce; 32],
    })
}

/// Returns the honest server of every check.
fn server(nonce: u8) -> Server {
    Server::new(ServerConfig {
        identity: server_identity(),
        window: NonZeroU32::MIN,
        offer: offer(SERVER_OFFER),
        nonce: [nonce; 32],
    })
}

/// Runs one handshake over a path that may alter each of its four messages, and returns whether the
/// client and the server have established the lane at the end.
pub fn run(mut path: impl FnMut(usize, &mut Vec<u8>)) -> (bool, bool) {
    let (mut client, mut server) = (client(CLIENT_NONCE), server(SERVER_NONCE));
    let (mut at_client, mut at_server) = (Vec::new(), Vec::new());
    let mut send = |index, out: Option<Vec<u8>>| {
        let mut bytes = out.unwrap_or_default();
        path(index, &mut bytes);
        bytes
    };
    at_server.extend(send(0, client.poll_transmit()));
    let consumed = server.handle(&at_server).unwrap_or(0);
    at_server.drain(..consumed);
    at_client.extend(send(1, server.poll_transmit()));
    let consumed = client.handle(&at_client).unwrap_or(0);
    at_client.drain(..consumed);
    at_server.extend(send(2, client.poll_transmit()));
    let _ = server.handle(&at_server);
    assert_eq!(server.accept().is_ok(), server.established().is_some());
    at_client.extend(send(3, server.poll_transmit()));
    let _ = client.handle(&at_client);
    (
        client.established().is_some(),
        server.established().is_some(),
    )
}

fn noise(data: &[u8]) {
    let mut reader = Reader::new(data);
    let Ok(count) = reader.u8() else { return };
    let sizes = reader.bytes(usize::from(count)).unwrap_or_default();
    let stream = reader.rest();

    // The seeds are recorded handshakes: with another nonce they are replays, and useless.
    let mut server = server(!SERVER_NONCE);
    feed(stream, sizes, |bytes| server.handle(bytes));
    assert!(server.proven().is_none(), "a stranger got in");
    assert!(server.accept().is_err());
    assert!(
        server
            .poll_transmit()
            .is_none_or(|out| out.len() <= MAX_HANDSHAKE_BYTES)
    );

    let mut client = client(!CLIENT_NONCE);
    client.poll_transmit().expect("a hello");
    feed(stream, sizes, |bytes| client.handle(bytes));
    assert!(
        client.established().is_none(),
        "a stranger passed for the server"
    );
    assert!(
        client
            .poll_transmit()
            .is_none_or(|out| out.len() <= MAX_HANDSHAKE_BYTES)
    );
}

/// Delivers `stream` in pieces as a socket would, and keeps the bytes not consumed.
fn feed(
    stream: &[u8],
    sizes: &[u8],
    mut handle: impl FnMut(&[u8]) -> Result<usize, HandshakeError>,
) {
    let mut sizes = sizes.iter().map(|size| usize::from(*size).max(1));
    let (mut kept, mut rest) = (Vec::new(), stream);
    while !rest.is_empty() {
        let (piece, later) = rest.split_at(sizes.next().unwrap_or(rest.len()).min(rest.len()));
        kept.extend_from_slice(piece);
        rest = later;
        match handle(&kept) {
            Ok(consumed) => drop(kept.drain(..consumed)),
            Err(error) => {
                assert_eq!(handle(&kept), Err(error), "errors are final");
                return;
            }
        }
        assert!(
            kept.len() < MAX_HANDSHAKE_BYTES,
            "more is buffered than promised"
        );
    }
}

/// The change of a message by the path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd)]
enum Fate {
    Intact,
    /// Unchanged, with bytes appended.
    Followed,
    Altered,
}

fn edits(data: &[u8]) {
    let mut fates = [Fate::Altered; 4];
    // The bytes that the client gets after the answer to its hello.
    let mut behind = Vec::new();
    let (client, server) = run(|index, bytes| {
        let before = bytes.clone();
        for edit in data.as_chunks::<5>().0 {
            let [message, low, high, operation, value] = *edit;
            if usize::from(message % 4) == index && !bytes.is_empty() {
                let at = usize::from(u16::from_le_bytes([low, high])) % bytes.len();
                match operation % 4 {
                    0 => bytes[at] ^= value,
                    1 => bytes.insert(at, value),
                    2 => drop(bytes.remove(at)),
                    _ => bytes.truncate(at),
                }
            }
        }
        let left = bytes.strip_prefix(&before[..]);
        match index {
            1 => behind.extend_from_slice(left.unwrap_or_default()),
            3 => behind.extend_from_slice(bytes),
            _ => {}
        }
        fates[index] = match left {
            _ if before.is_empty() => Fate::Altered,
            Some([]) => Fate::Intact,
            Some(_) => Fate::Followed,
            None => Fate::Altered,
        };
    });
    let [hello, answer, proof, ready] = fates;
    let reached = hello == Fate::Intact && answer <= Fate::Followed;
    // Frames may follow a proof and a ServerReady, but nothing may come between the messages.
    let all = reached && proof <= Fate::Followed && ready <= Fate::Followed;
    assert!(
        !server || reached && proof <= Fate::Followed,
        "the server is in: {fates:?}"
    );
    // A ServerReady has no tag, like the frames: the path may forge one, after the answer or from a
    // Reject. The client has authenticated the server by then.
    let is_answered = hello <= Fate::Followed && answer <= Fate::Followed;
    assert!(
        !client || is_answered && behind.starts_with(&message(4, 0)),
        "the client is in: {fates:?}"
    );
    assert!(
        (client && server) || !all || answer == Fate::Followed,
        "left out: {fates:?}"
    );
}

fn faulty_server(fields: &[u8]) {
    let mut client = client(CLIENT_NONCE);
    let hello = client.poll_transmit().expect("a hello");
    let mut answer = message(2, fields.len() + 32);
    answer.extend_from_slice(fields);
    answer.extend(tag(b"tcpx server", &[&hello, &answer]));
    let result = client.handle(&answer);
    if result == Ok(answer.len()) {
        assert_eq!(client.handle(&message(4, 0)), Ok(8));
        let established = client.established().expect("an established lane");
        assert_eq!(established.owners, []);
        check_established(established, CLIENT_OFFER, offer_at(fields, 2));
    } else {
        assert!(client.established().is_none());
    }
    if let Err(HandshakeError::PeerIncompatible { missing }) = result {
        check_missing(missing, CLIENT_OFFER, offer_at(fields, 2));
    }
}

fn faulty_client(fields: &[u8]) {
    let mut server = server(SERVER_NONCE);
    let mut hello = message(1, fields.len());
    hello.extend_from_slice(fields);
    if server.handle(&hello) != Ok(hello.len()) {
        return;
    }
    let answer = server.poll_transmit().expect("an answer");
    let mut proof = message(3, 64);
    proof.extend([0xff; 32]);
    proof.extend(tag(b"tcpx client", &[&hello, &answer, &proof]));
    assert_eq!(
        server.handle(&proof),
        Ok(proof.len()),
        "it does know the secret"
    );
    let proven = server.proven().expect("a proven client");
    let [owner] = &proven.owners[..] else {
        panic!("one lane has one proof");
    };
    assert!(
        !owner.verify(&Secret::new(SERVER_SECRET)),
        "that tag was made up"
    );
    let theirs = offer_at(fields, 58);
    match server.accept() {
        Ok(()) => {
            let established = server.established().expect("an established lane");
            check_established(established, SERVER_OFFER, theirs);
        }
        Err(HandshakeError::PeerIncompatible { missing }) => {
            check_missing(missing, theirs, SERVER_OFFER);
            assert!(server.established().is_none());
        }
        Err(error) => panic!("a proven client: {error}"),
    }
}

/// The features that the attacker claims to offer and require.
fn offer_at(fields: &[u8], at: usize) -> [u32; 2] {
    let mut reader = Reader::new(&fields[at..]);
    [(); 2].map(|()| reader.u32().expect("a whole hello"))
}

fn check_missing(missing: Missing, client: [u32; 2], server: [u32; 2]) {
    let lacks = [missing.client_lacks(), missing.server_lacks()].map(Features::bits);
    assert_eq!(lacks, [server[1] & !client[0], client[1] & !server[0]]);
    assert_ne!(lacks, [0, 0], "nothing is missing");
}

fn check_established(lane: &Established, ours: [u32; 2], theirs: [u32; 2]) {
    assert_eq!(lane.version, 1);
    let chosen = lane.features.bits();
    assert_eq!(chosen, ours[0] & theirs[0]);
    assert_eq!(
        (ours[1] | theirs[1]) & !chosen,
        0,
        "a requirement is not met"
    );
    assert!(lane.lane < lane.lanes);
    assert!((1..=255).contains(&lane.peer_name.as_str().len()));
}

/// Encodes a header; the length is truncated if needed, which is one more lie.
fn message(kind: u8, body_len: usize) -> Vec<u8> {
    let [low, high] = (body_len as u16).to_le_bytes();
    [&b"TCPX"[..], &[kind, 0, low, high]].concat()
}

fn tag(label: &[u8], transcript: &[&[u8]]) -> [u8; 32] {
    let mut mac = Hmac::<Sha256>::new_from_slice(&SERVER_SECRET).expect("any length will do");
    mac.update(label);
    mac.update(&Sha256::digest(transcript.concat()));
    mac.finalize().into_bytes().into()
}
