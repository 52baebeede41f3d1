//! The socket that neighbours connect to.

use std::fmt::Write;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, listen, socket_with,
};

use super::wire::Wire;
use crate::fork::Private;
use crate::stream::retry_interrupted;

/// Prefix of the name of every door.
const PREFIX: &str = "tcpx-";

/// Number of random bytes in a name.
const RANDOM_BYTES: usize = 16;

/// Length of the queue of connections that wait for [`Door::accept`]. A process that finds the
/// queue full gets an error at once and retries.
const BACKLOG: i32 = 16;

/// A listening Unix socket with a random name, to which processes on this host connect.
///
/// The name is abstract: it leaves no file, and ends with the door. It is reachable from the same
/// network namespace only. It cannot be guessed, but is no secret: `/proc/net/unix` lists it.
/// [`Wire::credentials`] identify the process that connects, and [`super::Nonce`] proves its
/// identity.
#[derive(Debug)]
pub struct Door {
    socket: Private<OwnedFd>,
    name: String,
}

impl Door {
    /// Opens a door with a new name.
    ///
    /// # Errors
    /// The process is out of descriptors, or has no source of randomness.
    pub fn open() -> io::Result<Self> {
        let mut random = [0; RANDOM_BYTES];
        getrandom::fill(&mut random).map_err(io::Error::other)?;
        let mut name = PREFIX.to_owned();
        for byte in random {
            // Writing to a `String` never fails.
            let _ = write!(name, "{byte:02x}");
        }
        Self::open_as(name)
    }

    /// Opens a door with this name, which must be hard to guess: the first process to open it owns
    /// it.
    ///
    /// # Errors
    /// The name is taken or too long, or the process is out of descriptors.
    pub fn open_as(name: String) -> io::Result<Self> {
        let socket = new_socket()?;
        bind(&*socket, &address(&name)?)?;
        listen(&*socket, BACKLOG)?;
        Ok(Self { socket, name })
    }

    /// Returns the name that [`Wire::connect`] takes.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Takes the next connection, or `None` when there is none now.
    ///
    /// # Errors
    /// The process is out of descriptors; the connection stays where it is.
    pub fn accept(&self) -> io::Result<Option<Wire>> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        match Private::new(|| retry_interrupted(|| accept_with(&*self.socket, flags))) {
            Ok(socket) => Ok(Some(Wire::new(socket))),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl AsFd for Door {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Makes a socket for a door, or for a wire to one.
pub(super) fn new_socket() -> Result<Private<OwnedFd>, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Private::new(|| socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None))
}

/// Returns the address of the door with that name.
///
/// The name may come from a peer, which must not direct this process to sockets of others: only
/// names that [`Door::open`] could have made are accepted.
pub(super) fn address(name: &str) -> io::Result<SocketAddrUnix> {
    let random = name.strip_prefix(PREFIX);
    let is_name = random.is_some_and(|random| {
        let is_hex = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        random.len() == 2 * RANDOM_BYTES && random.bytes().all(is_hex)
    });
    if !is_name {
        let text = "this is not the name of a door";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    Ok(SocketAddrUnix::new_abstract_name(name.as_bytes())?)
}
