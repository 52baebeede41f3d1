//! The port at which clients and the streams of floors connect.

use std::collections::VecDeque;
use std::io::{self, Read};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::{MAGIC, Nonce, Streams, configure};
use crate::bootstrap::{accept_until, remaining};

/// The port for clients and for the streams of floors: a firewall has to open only one.
#[derive(Debug)]
pub struct Door {
    listener: TcpListener,
    /// Clients that connected while streams were awaited.
    waiting: Mutex<VecDeque<(TcpStream, SocketAddr)>>,
}

impl Door {
    /// Listens on `address`; port 0 takes a free one.
    pub fn bind(address: SocketAddr) -> io::Result<Door> {
        Ok(Door {
            listener: TcpListener::bind(address)?,
            waiting: Mutex::default(),
        })
    }

    /// Returns its address.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Accepts the next client before the deadline.
    pub(crate) fn accept_client(&self, deadline: Instant) -> io::Result<(TcpStream, SocketAddr)> {
        match self.waiting().pop_front() {
            Some(client) => Ok(client),
            None => accept_until(&self.listener, deadline),
        }
    }

    fn waiting(&self) -> MutexGuard<'_, VecDeque<(TcpStream, SocketAddr)>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The target of a floor, which awaits its streams at a door.
#[derive(Debug)]
pub struct Listener {
    pub(super) door: Arc<Door>,
    nonce: Nonce,
}

impl Listener {
    /// Listens at a door. The nonce must be unpredictable.
    pub fn at(door: Arc<Door>, nonce: Nonce) -> Listener {
        Listener { door, nonce }
    }

    /// Accepts `count` streams. Clients that connect meanwhile wait at the door; streams of other
    /// floors and silent ones are dropped.
    pub fn accept(&self, count: usize, timeout: Duration) -> io::Result<Streams> {
        let deadline = Instant::now() + timeout;
        let mut sockets: Vec<Option<TcpStream>> = Vec::new();
        sockets.resize_with(count, || None);
        while sockets.iter().any(Option::is_none) {
            let (mut socket, from) = accept_until(&self.door.listener, deadline)?;
            socket.set_read_timeout(Some(remaining(deadline)?.min(Duration::from_secs(2))))?;
            match is_stream(&socket) {
                Ok(true) => {}
                Ok(false) => {
                    socket.set_read_timeout(None)?;
                    self.door.waiting().push_back((socket, from));
                    continue;
                }
                Err(_) => continue,
            }
            let mut hello = [0; 26];
            if socket.read_exact(&mut hello).is_err() {
                continue;
            }
            let index = usize::from(u16::from_be_bytes([hello[24], hello[25]]));
            let ours = hello[8..24] == self.nonce;
            if let (true, Some(slot)) = (ours, sockets.get_mut(index)) {
                configure(&socket)?;
                *slot = Some(socket);
            }
        }
        Ok(Streams {
            sockets: sockets.into_iter().flatten().collect(),
            comms: Vec::new(),
        })
    }
}

/// Returns whether a connection begins like a floor stream; does not consume its bytes.
fn is_stream(socket: &TcpStream) -> io::Result<bool> {
    let mut magic = [0; MAGIC.len()];
    for _ in 0..1000 {
        match socket.peek(&mut magic)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            count if magic[..count] != MAGIC[..count] => return Ok(false),
            count if count == magic.len() => return Ok(true),
            // A greeting is sent at once: the rest arrives in a moment, or never.
            _ => std::thread::sleep(Duration::from_millis(1)),
        }
    }
    Err(io::ErrorKind::TimedOut.into())
}
