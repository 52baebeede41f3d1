//! Non-blocking TCP sockets.

use std::io::{self, ErrorKind};
use std::mem::MaybeUninit;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsRawFd;

use socket2::{Domain, Protocol, SockAddr, Socket as Raw, Type};

/// Maximum pieces of one system call (`UIO_MAXIOV`).
pub(crate) const MAX_PIECES: usize = 1024;

/// The result of a read or write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// The number of bytes, at least one.
    Moved(usize),
    /// Nothing to read, or no room.
    Blocked,
    /// The peer closed its side.
    Closed,
}

/// A connected socket, or one that is about to be.
#[derive(Debug)]
pub(crate) struct Socket(Raw);

impl Socket {
    /// Starts to connect; ready once [`Socket::connected`] returns true.
    pub(crate) fn connect(to: SocketAddr, from: IpAddr, buffer: usize) -> io::Result<Self> {
        let raw = Raw::new(Domain::for_address(to), Type::STREAM, Some(Protocol::TCP))?;
        // A device reaches what its address reaches; loopback reaches only itself.
        if from.is_ipv4() == to.is_ipv4() && !from.is_loopback() {
            raw.bind(&SockAddr::from(SocketAddr::new(from, 0)))?;
        }
        let socket = Self::configure(raw, buffer)?;
        match socket.0.connect(&SockAddr::from(to)) {
            Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => Err(error),
            _ => Ok(socket),
        }
    }

    fn configure(raw: Raw, buffer: usize) -> io::Result<Self> {
        raw.set_nonblocking(true)?;
        raw.set_tcp_nodelay(true)?;
        // Pacing, which some systems have by default, only delays the sockets of one machine.
        // Without this algorithm they are delayed.
        let _ = raw.set_tcp_congestion(b"cubic");
        if buffer > 0 {
            raw.set_send_buffer_size(buffer)?;
            raw.set_recv_buffer_size(buffer)?;
        }
        Ok(Self(raw))
    }

    /// Returns whether connecting has finished.
    pub(crate) fn connected(&self) -> io::Result<bool> {
        let mut poll = libc::pollfd {
            fd: self.0.as_raw_fd(),
            events: libc::POLLOUT,
            revents: 0,
        };
        // SAFETY: one entry, no waiting.
        match unsafe { libc::poll(&raw mut poll, 1, 0) } {
            0 => Ok(false),
            1 => self.0.take_error()?.map_or(Ok(true), Err),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Sends from ordinary bytes.
    pub(crate) fn send(&self, bytes: &[u8]) -> io::Result<Progress> {
        progress(self.0.send_with_flags(bytes, libc::MSG_NOSIGNAL))
    }

    /// Receives into ordinary bytes; returns the number received.
    pub(crate) fn receive(&self, bytes: &mut [u8]) -> io::Result<Progress> {
        // SAFETY: initialised bytes may be treated as maybe-uninitialised; recv only writes them.
        let uninit = unsafe { &mut *(std::ptr::from_mut(bytes) as *mut [MaybeUninit<u8>]) };
        progress(self.0.recv(uninit))
    }

    /// Sends from the pieces, in order.
    ///
    /// # Safety
    /// The pieces are readable memory.
    pub(crate) unsafe fn send_pieces(&self, pieces: &mut [libc::iovec]) -> io::Result<Progress> {
        // SAFETY: a zeroed header is valid: no name, no control data.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = pieces.as_mut_ptr();
        message.msg_iovlen = pieces.len().min(MAX_PIECES) as _;
        // SAFETY: the caller guarantees the pieces.
        let n =
            unsafe { libc::sendmsg(self.0.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL) };
        progress(usize::try_from(n).map_err(|_| io::Error::last_os_error()))
    }

    /// Receives into the pieces, in order.
    ///
    /// # Safety
    /// The pieces are writable memory that nothing else uses.
    pub(crate) unsafe fn receive_pieces(&self, pieces: &[libc::iovec]) -> io::Result<Progress> {
        let count = pieces.len().min(MAX_PIECES) as i32;
        // SAFETY: the caller guarantees the pieces.
        let n = unsafe { libc::readv(self.0.as_raw_fd(), pieces.as_ptr(), count) };
        progress(usize::try_from(n).map_err(|_| io::Error::last_os_error()))
    }

    /// Aborts the connection: the peer gets a reset.
    pub(crate) fn reset(&self) {
        // Connecting to AF_UNSPEC is how Linux aborts a connection without closing its descriptor.
        // SAFETY: zeroes are a valid address of family AF_UNSPEC.
        let nothing: libc::sockaddr = unsafe { std::mem::zeroed() };
        let bytes = size_of_val(&nothing) as libc::socklen_t;
        // SAFETY: an address and its size.
        unsafe { libc::connect(self.0.as_raw_fd(), &raw const nothing, bytes) };
    }
}

fn progress(result: io::Result<usize>) -> io::Result<Progress> {
    match result {
        Ok(0) => Ok(Progress::Closed),
        Ok(n) => Ok(Progress::Moved(n)),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
            Ok(Progress::Blocked)
        }
        Err(error) => Err(error),
    }
}

/// A listening socket.
#[derive(Debug)]
pub(crate) struct Listener {
    raw: Raw,
    buffer: usize,
}

impl Listener {
    /// Listens on a port that the kernel chooses.
    pub(crate) fn bind(address: IpAddr, buffer: usize) -> io::Result<Self> {
        let address = SocketAddr::new(address, 0);
        let raw = Raw::new(
            Domain::for_address(address),
            Type::STREAM,
            Some(Protocol::TCP),
        )?;
        raw.set_nonblocking(true)?;
        raw.bind(&SockAddr::from(address))?;
        raw.listen(64)?;
        Ok(Self { raw, buffer })
    }

    pub(crate) fn address(&self) -> io::Result<SocketAddr> {
        self.raw
            .local_addr()?
            .as_socket()
            .ok_or_else(|| ErrorKind::Unsupported.into())
    }

    /// Returns the next connection, if there is one.
    pub(crate) fn accept(&self) -> io::Result<Option<Socket>> {
        match self.raw.accept() {
            Ok((raw, _)) => Socket::configure(raw, self.buffer).map(Some),
            Err(error) => match error.kind() {
                ErrorKind::WouldBlock | ErrorKind::Interrupted | ErrorKind::ConnectionAborted => {
                    Ok(None)
                }
                _ => Err(error),
            },
        }
    }
}
