//! Messages and descriptors between two processes.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown, connect, recvmsg, sendmsg, shutdown,
};
use rustix::process::Pid;

use super::door;
use crate::fork::Private;
use crate::stream::retry_interrupted;

/// Maximum bytes of a message: well below the default send buffer of a Unix socket.
pub const MAX_MESSAGE: usize = 64 << 10;

/// Maximum descriptors of a message. The kernel allows 253.
pub const MAX_FDS: usize = 64;

/// A connected Unix socket, which keeps the boundaries of messages and carries descriptors.
///
/// Calls never block: poll the wire ([`AsFd`]) for a message or for room to send one. Dropping the
/// wire ends it for both sides at once; messages sent before still arrive.
#[derive(Debug)]
pub struct Wire {
    socket: Arc<Private<OwnedFd>>,
}

/// The result of [`Wire::receive`].
#[derive(Debug)]
pub enum Received {
    /// No message is there now.
    Nothing,
    /// The other side has closed the wire or has ended, and no message is left. An empty message,
    /// which no wire sends, counts as this too.
    Closed,
    /// A message.
    Message {
        /// Its length; it lies at the start of the buffer.
        len: usize,
        /// Its descriptors, at most [`MAX_FDS`], closed on `exec`.
        fds: Vec<OwnedFd>,
    },
}

/// The process that connected to a door, or opened it, as the kernel recorded it at that moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// The process id, or `None` if the process is in a PID namespace not visible from here.
    pub pid: Option<Pid>,
    /// Its effective user.
    pub uid: u32,
    /// Its effective group.
    pub gid: u32,
}

impl Wire {
    pub(super) fn new(socket: Private<OwnedFd>) -> Self {
        Self {
            socket: Arc::new(socket),
        }
    }

    /// Connects to the door with that name. The wire can be used at once, even before the other
    /// side has accepted it.
    ///
    /// # Errors
    /// `InvalidInput`: no door has such a name. `ConnectionRefused`: there is no such door in this
    /// network namespace. `WouldBlock`: many connections wait there already; try again later.
    pub fn connect(name: &str) -> io::Result<Self> {
        let address = door::address(name)?;
        let socket = door::new_socket()?;
        retry_interrupted(|| connect(&*socket, &address))?;
        Ok(Self::new(socket))
    }

    /// Sends a message with descriptors, of which the other side gets copies. Returns `false`, and
    /// sends nothing, if there is no room for it now.
    ///
    /// # Errors
    /// `InvalidInput`: the message is empty, or it or the list of descriptors is too long. Anything
    /// else ends the wire, most often `BrokenPipe` when the other side has closed it.
    pub fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<bool> {
        if bytes.is_empty() || bytes.len() > MAX_MESSAGE || fds.len() > MAX_FDS {
            let text = "an empty message, or one that is too long for a wire";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // NOSIGNAL: a library must not kill its host with SIGPIPE.
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let slices = [IoSlice::new(bytes)];
        match retry_interrupted(|| sendmsg(&**self.socket, &slices, &mut ancillary, flags)) {
            // A message is sent whole or not at all.
            Ok(_) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Receives the next message into `buffer`, which should have [`MAX_MESSAGE`] bytes.
    ///
    /// # Errors
    /// `InvalidData`: the message is longer than `buffer` or has more than [`MAX_FDS`] descriptors;
    /// it is lost, and its descriptors are closed. Anything else ends the wire.
    pub fn receive(&self, buffer: &mut [u8]) -> io::Result<Received> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        // Closes the descriptors that are still in it when it is dropped.
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut slices = [IoSliceMut::new(buffer)];
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let received = loop {
            match recvmsg(&**self.socket, &mut slices, &mut ancillary, flags) {
                Ok(received) => break received,
                Err(Errno::AGAIN) => return Ok(Received::Nothing),
                // Reported once, ahead of messages still queued: the other side has closed the wire
                // without reading everything.
                Err(Errno::INTR | Errno::CONNRESET) => {}
                Err(error) => return Err(error.into()),
            }
        };
        let mut fds = Vec::new();
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(more) = message {
                fds.extend(more);
            }
        }
        let is_cut = received
            .flags
            .intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC);
        if is_cut || fds.len() > MAX_FDS {
            let text = "a message with more bytes or descriptors than a wire carries";
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        Ok(match received.bytes {
            0 => Received::Closed,
            len => Received::Message { len, fds },
        })
    }

    /// Returns the credentials of the process at the other end.
    ///
    /// # Errors
    /// Fails if the socket is closed.
    pub fn credentials(&self) -> io::Result<Credentials> {
        // Not by rustix, which assumes that the process is always visible.
        let mut found = libc::ucred {
            pid: 0,
            uid: 0,
            gid: 0,
        };
        self.option(libc::SO_PEERCRED, &mut found)?;
        Ok(Credentials {
            pid: Pid::from_raw(found.pid.max(0)),
            uid: found.uid,
            gid: found.gid,
        })
    }

    /// Fills `value` with an option of the socket.
    ///
    /// `T` must be plain data of which the kernel may write any prefix.
    pub(super) fn option<T: Copy>(&self, name: libc::c_int, value: &mut T) -> io::Result<()> {
        let mut len = size_of::<T>() as libc::socklen_t;
        // SAFETY: the descriptor is open while `self` lives, and the kernel writes at most `len`
        // bytes to `value`, which the callers in this module make plain integers.
        let result = unsafe {
            libc::getsockopt(
                self.socket.as_raw_fd(),
                libc::SOL_SOCKET,
                name,
                std::ptr::from_mut(value).cast(),
                &raw mut len,
            )
        };
        match result {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    pub(super) fn socket(&self) -> Arc<Private<OwnedFd>> {
        Arc::clone(&self.socket)
    }
}

impl AsFd for Wire {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        // A `Neighbour` may keep the socket open. In a forked child the number may be reused.
        if self.socket.is_current() {
            // Fails only when the other side has already closed it.
            let _ = shutdown(&**self.socket, Shutdown::Both);
        }
    }
}
