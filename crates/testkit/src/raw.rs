//! Sockets that violate the protocol, or send nothing.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::num::NonZeroU32;
use std::time::Duration;

use tcpx_proto::handshake::{
    Client, ClientConfig, Established, HandshakeError, Identity, LaneHello, Offer,
};
use tcpx_proto::info::{ConnectionInfo, Name, Secret, SessionId};

use crate::story::GUARD;

/// Connects to a session without sending anything. Reads and writes have a time limit.
///
/// # Panics
/// When nobody listens there.
#[must_use]
pub fn dial(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect_timeout(&address, GUARD)
        .unwrap_or_else(|e| panic!("cannot connect to {address}: {e}"));
    stream.set_read_timeout(Some(GUARD)).expect("a valid time");
    stream.set_write_timeout(Some(GUARD)).expect("a valid time");
    stream
}

/// Waits until the other side has closed the connection, in any way; returns the bytes it sent
/// before.
///
/// # Panics
/// When it keeps the connection.
pub fn closed(stream: &mut TcpStream) -> Vec<u8> {
    let mut said = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => return said,
            Ok(count) => said.extend_from_slice(&buffer[..count]),
            Err(e) if matches!(e.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe) => {
                return said;
            }
            Err(e) => panic!("the other side has not closed the connection: {e}"),
        }
    }
}

/// Writes as many bytes as the other side accepts; it may have closed.
pub fn shout(stream: &mut TcpStream, bytes: &[u8]) {
    let _ = stream.write_all(bytes);
}

/// Writes `block` repeatedly, `total` bytes in all, and reads nothing. Stops when the other side
/// accepts nothing for a while or closes; returns the number of bytes accepted.
///
/// # Panics
/// When the socket cannot be set up.
pub fn flood(stream: &mut TcpStream, block: &[u8], total: usize) -> usize {
    let patience = Some(Duration::from_millis(500));
    stream.set_write_timeout(patience).expect("a valid time");
    let mut taken = 0;
    while taken < total {
        // Resumes in the middle of a block after a short write, so that frames stay complete.
        let at = taken % block.len();
        match stream.write(&block[at..]) {
            Ok(count) => taken += count,
            Err(_) => break,
        }
    }
    stream.set_write_timeout(Some(GUARD)).expect("a valid time");
    taken
}

/// The identity that a raw socket claims, and its lane.
#[derive(Clone, Debug)]
pub struct Stranger {
    /// Its name.
    pub name: &'static str,
    /// Its session's id.
    pub id: [u8; 16],
    /// Its session's secret, which proves its identity.
    pub secret: [u8; 32],
    /// The number of its connection.
    pub connection: u64,
    /// The index of the lane.
    pub lane: u16,
    /// The number of lanes that it announces.
    pub lanes: u16,
    /// The features that it offers and requires.
    pub offer: Offer,
}

impl Stranger {
    /// A client with one lane.
    pub const MALLORY: Self = Self {
        name: "mallory",
        id: [0x66; 16],
        secret: [0x66; 32],
        connection: 1,
        lane: 0,
        lanes: 1,
        offer: Offer::NONE,
    };

    /// Returns the client's side of a handshake.
    ///
    /// # Panics
    /// When it announces no lanes.
    #[must_use]
    pub fn client(&self, target: &ConnectionInfo) -> Client {
        let window = NonZeroU32::new(16).expect("not zero");
        Client::new(ClientConfig {
            identity: Identity {
                name: Name::new(self.name).expect("a name"),
                id: SessionId(self.id),
                secret: Secret::new(self.secret),
            },
            target,
            lane: LaneHello::new(self.connection, self.lane, self.lanes, window).expect("a lane"),
            offer: self.offer,
            nonce: [0x66; 32],
        })
    }

    /// Completes the handshake on a stream; afterwards frames are exchanged.
    ///
    /// # Errors
    /// The reason either side failed.
    ///
    /// # Panics
    /// When the other side does not answer.
    pub fn shake_hands(
        &self,
        stream: &mut TcpStream,
        target: &ConnectionInfo,
    ) -> Result<Established, HandshakeError> {
        finish(self.client(target), stream)
    }

    /// Dials until its greeting is answered: a flooded session may drop clients that have not sent
    /// one.
    ///
    /// # Panics
    /// When nobody listens there.
    #[must_use]
    pub fn greet(&self, address: SocketAddr, target: &ConnectionInfo) -> (TcpStream, Client) {
        loop {
            let (mut stream, mut client) = (dial(address), self.client(target));
            let hello = client.poll_transmit().expect("a hello");
            if stream.write_all(&hello).is_ok() && stream.peek(&mut [0]).is_ok_and(|n| n == 1) {
                return (stream, client);
            }
        }
    }
}

/// Continues a handshake to its end; afterwards frames are exchanged.
///
/// # Errors
/// The reason either side failed.
///
/// # Panics
/// When the other side does not answer.
pub fn finish(mut client: Client, stream: &mut TcpStream) -> Result<Established, HandshakeError> {
    let mut received = Vec::new();
    loop {
        while let Some(bytes) = client.poll_transmit() {
            stream.write_all(&bytes).expect("the session listens");
        }
        if let Some(established) = client.established() {
            return Ok(established.clone());
        }
        // Byte by byte, so that nothing after the handshake is consumed.
        let mut byte = [0];
        stream.read_exact(&mut byte).expect("an answer");
        received.push(byte[0]);
        let consumed = client.handle(&received);
        if consumed.is_err() {
            // Sends the Reject, if any.
            while let Some(bytes) = client.poll_transmit() {
                shout(stream, &bytes);
            }
        }
        received.drain(..consumed?);
    }
}

/// Returns a session's connection info with another address.
///
/// # Panics
/// When it is no connection info.
#[must_use]
pub fn with_address(info: &[u8], address: SocketAddr) -> Vec<u8> {
    let info = ConnectionInfo::decode(info).expect("connection info");
    let (name, secret) = (info.name().clone(), info.secret().clone());
    let other = ConnectionInfo::new(name, info.id(), secret, vec![address]);
    other.expect("the same parts").encode()
}

/// Returns a session's connection info with one bit of its secret flipped.
///
/// # Panics
/// When it is no connection info.
#[must_use]
pub fn with_wrong_secret(info: &[u8]) -> Vec<u8> {
    let decoded = ConnectionInfo::decode(info).expect("connection info");
    let mut secret = [0; Secret::LEN];
    // docs/wire-protocol.md: the secret is at offset 24.
    secret.copy_from_slice(&info[24..24 + Secret::LEN]);
    assert!(*decoded.secret() == Secret::new(secret), "the secret moved");
    secret[17] ^= 0x10;
    let (name, addresses) = (decoded.name().clone(), decoded.addresses().to_vec());
    let forged = ConnectionInfo::new(name, decoded.id(), Secret::new(secret), addresses);
    forged.expect("the same parts").encode()
}
