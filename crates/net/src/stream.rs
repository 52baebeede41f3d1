//! Non-blocking TCP streams and listeners.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::Path;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{
    RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendFlags, SocketFlags, accept_with,
    acceptfrom_with, recv, recvmsg, send, sendmsg,
};
use rustix::process::{Uid, geteuid};
use socket2::{Domain, Protocol, SockAddr, Socket, TcpKeepalive, Type};

use crate::fork::Private;
use crate::span::{Cursor, Span};
use crate::tcp_info::{self, TcpInfo};

/// Maximum spans per system call: enough for 1 MiB of 4 KiB blocks, while the array (4 KiB) stays
/// on the stack and the kernel's own copy of it stays cheap.
const MAX_SPANS: usize = 256;

/// Options set on every socket.
#[derive(Clone, Copy, Debug)]
pub struct SocketOptions {
    /// Send and receive buffer, or 0 for the kernel's autotuning.
    pub buffer_bytes: usize,
    /// Time after which the kernel gives up a connection with unacknowledged data or an unanswered
    /// keep-alive.
    pub dead_after: Duration,
}

impl SocketOptions {
    fn apply(&self, socket: &Socket) -> io::Result<()> {
        // Frames are written whole; waiting for more would only add latency.
        socket.set_tcp_nodelay(true)?;
        socket.set_tcp_user_timeout(Some(self.dead_after))?;
        let step = (self.dead_after / 4).max(Duration::from_secs(1));
        socket.set_tcp_keepalive(
            &TcpKeepalive::new()
                .with_time(step)
                .with_interval(step)
                .with_retries(3),
        )?;
        self.apply_buffers(socket)
    }

    fn apply_buffers(&self, socket: &Socket) -> io::Result<()> {
        if self.buffer_bytes > 0 {
            socket.set_send_buffer_size(self.buffer_bytes)?;
            socket.set_recv_buffer_size(self.buffer_bytes)?;
        }
        Ok(())
    }
}

/// Progress of the bytes sent on a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delivery {
    /// Bytes that the other end has acknowledged.
    pub acknowledged: u64,
    /// Whether unacknowledged bytes are left for which the other end has room.
    pub is_under_way: bool,
}

/// A non-blocking TCP stream.
#[derive(Debug)]
pub struct Stream {
    socket: Private<Socket>,
}

impl Stream {
    /// Starts to connect to `remote`, from `local` if given; a link-local address belongs to the
    /// interface in the scope of `remote`. The stream is usable once it is writable and
    /// [`Stream::connect_result`] reports success.
    ///
    /// # Errors
    /// The socket could not be made or bound, or the attempt not started.
    pub fn connect(
        remote: SocketAddr,
        local: Option<IpAddr>,
        options: &SocketOptions,
    ) -> io::Result<Self> {
        let domain = Domain::for_address(remote);
        let make = || Socket::new(domain, Type::STREAM, Some(Protocol::TCP));
        let socket = Private::new(make)?;
        socket.set_nonblocking(true)?;
        options.apply(&socket)?;
        if let Some(ip) = local {
            let mut address = SocketAddr::new(ip, 0);
            if let (SocketAddr::V6(from), SocketAddr::V6(to)) = (&mut address, remote)
                && from.ip().is_unicast_link_local()
            {
                from.set_scope_id(to.scope_id());
            }
            socket.bind(&SockAddr::from(address))?;
        }
        match socket.connect(&SockAddr::from(remote)) {
            Ok(()) => {}
            Err(e) if e.raw_os_error() == Some(Errno::INPROGRESS.raw_os_error()) => {}
            Err(e) => return Err(e),
        }
        Ok(Self { socket })
    }

    /// Returns whether a connection attempt has succeeded: `None` while it is in progress.
    ///
    /// # Errors
    /// The reason the attempt failed.
    pub fn connect_result(&self) -> io::Result<Option<()>> {
        if let Some(error) = self.socket.take_error()? {
            return Err(error);
        }
        match self.socket.peer_addr() {
            Ok(_) => Ok(Some(())),
            Err(e) if e.kind() == io::ErrorKind::NotConnected => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Sends `head`, then the rest of `body` from `cursor` on, in one system call. Returns the
    /// number of bytes the kernel took, counted through head and body; does not move the cursor.
    ///
    /// # Errors
    /// `WouldBlock` when the send buffer is full; anything else ends the stream.
    pub fn send(&self, head: &[u8], body: &[Span], cursor: Cursor) -> io::Result<usize> {
        // NOSIGNAL: a library must not kill its host with SIGPIPE.
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        if body.is_empty() {
            return retry_interrupted(|| send(&*self.socket, head, flags));
        }
        // Not initialised: clearing 16 KiB would cost more than a small frame.
        let mut spans = [const { MaybeUninit::<Span>::uninit() }; MAX_SPANS];
        let mut count = 0;
        if !head.is_empty() {
            // SAFETY: `head` outlives the call, and sending only reads it.
            spans[0].write(unsafe { Span::new(head.as_ptr().cast_mut(), head.len()) });
            count = 1;
        }
        for (slot, span) in spans[count..].iter_mut().zip(cursor.rest(body)) {
            slot.write(span);
            count += 1;
        }
        // SAFETY: the first `count` are written; `Span` and `IoSlice` both have the layout of
        // `iovec` (asserted below), the spans' memory is valid by the contract of `Span::new`, and
        // the kernel only reads it.
        let slices =
            unsafe { std::slice::from_raw_parts(spans.as_ptr().cast::<IoSlice<'_>>(), count) };
        retry_interrupted(|| {
            sendmsg(
                &*self.socket,
                slices,
                &mut SendAncillaryBuffer::default(),
                flags,
            )
        })
    }

    /// Receives into the rest of `body` from `cursor` on, then into `tail`, in one system call.
    /// Returns the number of bytes received, counted through body and tail; does not move the
    /// cursor.
    ///
    /// # Errors
    /// `WouldBlock` when nothing is there, `UnexpectedEof` when the peer has closed; anything else
    /// ends the stream.
    pub fn recv(&self, body: &[Span], cursor: Cursor, tail: &mut [u8]) -> io::Result<usize> {
        if body.is_empty() {
            // Most polls of an idle stream end here.
            return match retry_interrupted(|| recv(&*self.socket, &mut *tail, RecvFlags::DONTWAIT))?
            {
                (0, _) => Err(io::ErrorKind::UnexpectedEof.into()),
                (count, _) => Ok(count),
            };
        }
        let mut spans = [const { MaybeUninit::<Span>::uninit() }; MAX_SPANS];
        let mut count = 0;
        let mut complete = true;
        for span in cursor.rest(body) {
            if count == MAX_SPANS - 1 {
                complete = false;
                break;
            }
            spans[count].write(span);
            count += 1;
        }
        // The tail follows the whole body or is left out.
        if complete && !tail.is_empty() {
            // SAFETY: `tail` is borrowed exclusively until the call returns.
            spans[count].write(unsafe { Span::new(tail.as_mut_ptr(), tail.len()) });
            count += 1;
        }
        // SAFETY: as in `send`; the kernel writes only inside the spans, whose memory is writable
        // by the contract of `Span::new`.
        let slices = unsafe {
            std::slice::from_raw_parts_mut(spans.as_mut_ptr().cast::<IoSliceMut<'_>>(), count)
        };
        let received = retry_interrupted(|| {
            recvmsg(
                &*self.socket,
                slices,
                &mut RecvAncillaryBuffer::new(&mut []),
                RecvFlags::DONTWAIT,
            )
        })?;
        if received.bytes == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(received.bytes)
    }

    /// Returns whether [`Stream::recv`] would find something: bytes, the end or an error. Unlike
    /// `recv` it does not take the lock of the socket, so it never delays the delivery of bytes.
    #[must_use]
    pub fn is_readable(&self) -> bool {
        let mut fds = [PollFd::new(&*self.socket, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default())) != Ok(0)
    }

    /// Reports the stream as readable only once `bytes` bytes are there, so that a receiver which
    /// knows how much is coming is woken less often. A caller that sets it above 1 must be sure
    /// that so many bytes come, and reset it before less than that is left. Reading is not
    /// affected.
    ///
    /// # Errors
    /// The kernel does not support it for this socket.
    pub fn set_wake_level(&self, bytes: usize) -> io::Result<()> {
        let value = libc::c_int::try_from(bytes).unwrap_or(libc::c_int::MAX);
        // SAFETY: the descriptor is open while `self` lives, and the kernel reads one `c_int` from
        // the pointer during the call.
        let result = unsafe {
            libc::setsockopt(
                self.socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_RCVLOWAT,
                (&raw const value).cast(),
                size_of_val(&value) as libc::socklen_t,
            )
        };
        if result == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }

    /// Returns the progress of sent bytes: how many the other end has acknowledged, and whether
    /// more are in flight.
    ///
    /// # Errors
    /// The kernel does not report it.
    pub fn delivery(&self) -> io::Result<Delivery> {
        let info = self.tcp_info()?;
        // Fields that an older kernel does not report are 0: then only the bytes sent count.
        let may_send = info.send_window > 0 && info.send_window >= info.segment;
        Ok(Delivery {
            acknowledged: info.acknowledged,
            is_under_way: info.in_flight > 0 || (info.not_sent > 0 && may_send),
        })
    }

    /// Returns the kernel's statistics of the stream.
    ///
    /// # Errors
    /// The kernel does not report them.
    pub fn tcp_info(&self) -> io::Result<TcpInfo> {
        tcp_info::read(self.socket.as_raw_fd())
    }

    /// Returns whether the other end is on this machine.
    #[must_use]
    pub fn is_local(&self) -> bool {
        match (self.local_addr(), self.peer_addr()) {
            (Ok(local), Ok(peer)) => local.ip() == peer.ip() || peer.ip().is_loopback(),
            _ => false,
        }
    }

    /// Returns whether the last bytes were delivered by the current core. On a stream within this
    /// machine that is the core on which the other end ran when it sent them: while this thread
    /// polls, the sender cannot run.
    #[must_use]
    pub fn peer_used_this_core(&self) -> bool {
        rustix::net::sockopt::socket_incoming_cpu(&*self.socket)
            .is_ok_and(|core| core as usize == rustix::thread::sched_getcpu())
    }

    /// Returns whether the other end has ended its direction, or the stream is broken. Bytes may
    /// still be there.
    #[must_use]
    pub fn has_hung_up(&self) -> bool {
        let mut fds = [PollFd::new(&*self.socket, PollFlags::RDHUP)];
        poll(&mut fds, Some(&Timespec::default())) != Ok(0)
    }

    /// Closes the stream by a reset: the other end notices at once, and the kernel keeps no state.
    pub fn reset(self) {
        self.reset_when_closed();
    }

    /// Makes a later close reset the stream, so that the kernel keeps no state of it.
    pub fn reset_when_closed(&self) {
        // No TCP socket refuses this; without it this is an ordinary close.
        let _ = self.socket.set_linger(Some(Duration::ZERO));
    }

    /// Ends both directions, so that every thread polling this stream notices.
    pub fn shutdown(&self) {
        // Fails only when the stream has already ended.
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
    }

    /// Returns the address of this end.
    ///
    /// # Errors
    /// The stream is not connected.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        inet(self.socket.local_addr()?)
    }

    /// Returns the address of the other end.
    ///
    /// # Errors
    /// The stream is not connected.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        inet(self.socket.peer_addr()?)
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Length of the queue of connections that wait for [`Listener::accept`], if the system allows so
/// many (`net.core.somaxconn`). The kernel silently drops further ones, and the client retries a
/// second later: as many as a busy thread accepts in a tenth of that time.
const BACKLOG: i32 = 4096;

/// A non-blocking listener.
#[derive(Debug)]
pub struct Listener {
    socket: Private<Socket>,
}

impl Listener {
    /// Listens on `address`; port 0 takes a free one.
    ///
    /// # Errors
    /// The address does not belong to this machine, or the port is taken.
    pub fn bind(address: SocketAddr, options: &SocketOptions) -> io::Result<Self> {
        let domain = Domain::for_address(address);
        let make = || Socket::new(domain, Type::STREAM, Some(Protocol::TCP));
        let socket = Private::new(make)?;
        socket.set_nonblocking(true)?;
        socket.set_reuse_address(true)?;
        if address.is_ipv6() {
            socket.set_only_v6(true)?;
        }
        // Accepted streams inherit the options, in time for window scaling and without a system
        // call each: a flood of connections pays for them only once.
        options.apply(&socket)?;
        socket.bind(&SockAddr::from(address))?;
        socket.listen(BACKLOG)?;
        Ok(Self { socket })
    }

    /// Listens on a Unix socket at `path`, for [`Listener::accept_own`].
    ///
    /// # Errors
    /// The path is taken, or no file can be made there.
    pub fn bind_path(path: &Path) -> io::Result<Self> {
        let socket = Private::new(|| Socket::new(Domain::UNIX, Type::STREAM, None))?;
        socket.set_nonblocking(true)?;
        socket.bind(&SockAddr::unix(path)?)?;
        socket.listen(BACKLOG)?;
        Ok(Self { socket })
    }

    /// Takes the next connection to a Unix socket; those of other users are turned away, the
    /// superuser's is not.
    ///
    /// # Errors
    /// `WouldBlock` when there is none, `PermissionDenied` where one was turned away.
    pub fn accept_own(&self) -> io::Result<Stream> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let accept = || retry_interrupted(|| accept_with(&*self.socket, flags));
        let socket = Private::new(|| accept().map(Socket::from))?;
        let user = socket_peercred(&*socket)?.uid;
        if !is_welcome(user, geteuid()) {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        Ok(Stream { socket })
    }

    /// Takes the next connection.
    ///
    /// # Errors
    /// `WouldBlock` when there is none. Errors that [`is_exhausted`] recognises leave the
    /// connection in the queue; any other error belongs to the connection, which is gone.
    pub fn accept(&self) -> io::Result<(Stream, SocketAddr)> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let mut address = None;
        let socket = Private::new(|| {
            let (socket, from) = acceptfrom_with(&*self.socket, flags)?;
            address = from;
            Ok::<_, io::Error>(socket.into())
        })?;
        let address = address.and_then(|address| address.try_into().ok());
        let address = address.ok_or_else(|| io::Error::other("not an internet address"))?;
        Ok((Stream { socket }, address))
    }

    /// Returns the address it listens on.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        inet(self.socket.local_addr()?)
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Returns whether a process of `user` may connect to a socket of `own`.
fn is_welcome(user: Uid, own: Uid) -> bool {
    user == own || user.is_root()
}

/// Returns whether the process or the system has no descriptor, or no memory, left for a socket.
#[must_use]
pub fn is_exhausted(error: &io::Error) -> bool {
    let exhausted = [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM];
    Errno::from_io_error(error).is_some_and(|errno| exhausted.contains(&errno))
}

/// Chooses a connected socket's congestion control.
///
/// # Errors
/// This kernel does not have it, or reserves it for root.
pub fn set_congestion_control(socket: impl AsFd, name: &str) -> io::Result<()> {
    Ok(rustix::net::sockopt::set_tcp_congestion(socket, name)?)
}

/// Returns whether this process may use a congestion control.
#[must_use]
pub fn has_congestion_control(name: &str) -> bool {
    Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP))
        .and_then(|socket| set_congestion_control(&socket, name))
        .is_ok()
}

const _: () = {
    // std guarantees that IoSlice is ABI compatible with iovec: a pointer, then a length.
    assert!(size_of::<Span>() == size_of::<IoSlice<'_>>());
    assert!(align_of::<Span>() == align_of::<IoSlice<'_>>());
    assert!(size_of::<Span>() == size_of::<IoSliceMut<'_>>());
};

fn inet(address: SockAddr) -> io::Result<SocketAddr> {
    address
        .as_socket()
        .ok_or_else(|| io::Error::other("not an internet address"))
}

/// Repeats a system call that a signal has interrupted.
pub(crate) fn retry_interrupted<T>(
    mut call: impl FnMut() -> rustix::io::Result<T>,
) -> io::Result<T> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            result => return result.map_err(Into::into),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    const OPTIONS: SocketOptions = SocketOptions {
        buffer_bytes: 0,
        dead_after: Duration::from_secs(10),
    };

    #[test]
    fn other_users_are_turned_away_but_for_the_superuser() {
        let [own, other] = [7, 8].map(Uid::from_raw);
        assert!(is_welcome(own, own) && is_welcome(Uid::ROOT, own));
        assert!(!is_welcome(other, own) && !is_welcome(own, Uid::ROOT));
    }

    fn pair() -> (Stream, Stream) {
        pair_with(&OPTIONS)
    }

    fn pair_with(options: &SocketOptions) -> (Stream, Stream) {
        let listener = Listener::bind((Ipv4Addr::LOCALHOST, 0).into(), options).unwrap();
        let client = Stream::connect(listener.local_addr().unwrap(), None, options).unwrap();
        let (server, from) = retry(|| listener.accept());
        assert_eq!(client.connect_result().unwrap(), Some(()));
        assert_eq!(from, client.local_addr().unwrap());
        (client, server)
    }

    fn retry<T>(mut call: impl FnMut() -> io::Result<T>) -> T {
        loop {
            match call() {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => std::thread::yield_now(),
                result => return result.unwrap(),
            }
        }
    }

    #[test]
    fn gathers_and_scatters_more_spans_than_one_call_takes() {
        let (client, server) = pair();
        let mut source: Vec<u8> = (0..40_000u32).map(|i| (i % 251) as u8).collect();
        let mut target = vec![0u8; 40_000];
        // SAFETY: both vectors outlive the spans.
        let (from, to) = unsafe {
            (
                Span::new(source.as_mut_ptr(), source.len()),
                Span::new(target.as_mut_ptr(), target.len()),
            )
        };
        let cut = |span: Span, size| -> Vec<Span> {
            (0..span.len() / size)
                .map(|i| span.slice(i * size, size).unwrap())
                .collect()
        };
        let (from, to) = (cut(from, 40), cut(to, 50));

        let head = [9u8; 5];
        let (mut sent, mut cursor) = (0, Cursor::default());
        while sent < head.len() + source.len() {
            let n = retry(|| client.send(&head[sent.min(head.len())..], &from, cursor));
            cursor.advance(&from, n - head.len().saturating_sub(sent).min(n));
            sent += n;
        }
        client.shutdown();

        let mut got_head = [0u8; 5];
        assert_eq!(
            retry(|| server.recv(&[], Cursor::default(), &mut got_head)),
            5
        );
        let (mut got, mut cursor, mut tail) = (0, Cursor::default(), [0u8; 16]);
        while got < target.len() {
            let n = retry(|| server.recv(&to, cursor, &mut tail));
            cursor.advance(&to, n);
            got += n;
        }
        assert_eq!(got_head, head);
        assert_eq!(source, target);
        let end = server.recv(&[], Cursor::default(), &mut tail).unwrap_err();
        assert_eq!(end.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn both_ends_have_the_options_that_were_asked_for() {
        let options = SocketOptions {
            buffer_bytes: 40 << 10,
            dead_after: Duration::from_secs(12),
        };
        let (client, server) = pair_with(&options);
        for socket in [&client.socket, &server.socket] {
            assert!(socket.tcp_nodelay().unwrap());
            assert!(socket.keepalive().unwrap());
            assert!(socket.nonblocking().unwrap());
            let dead_after = socket.tcp_user_timeout().unwrap();
            assert_eq!(dead_after, Some(options.dead_after));
            let step = Duration::from_secs(3);
            assert_eq!(socket.tcp_keepalive_time().unwrap(), step);
            assert_eq!(socket.tcp_keepalive_interval().unwrap(), step);
            assert_eq!(socket.tcp_keepalive_retries().unwrap(), 3);
            // The kernel doubles them, for its own overhead.
            let buffers = [socket.send_buffer_size(), socket.recv_buffer_size()];
            assert_eq!(buffers.map(Result::unwrap), [2 * options.buffer_bytes; 2]);
        }
    }

    #[test]
    fn a_reset_is_noticed_at_the_other_end() {
        let (client, server) = pair();
        assert!(!client.has_hung_up());
        server.reset();
        assert!(client.has_hung_up());
        let end = client.recv(&[], Cursor::default(), &mut [0]).unwrap_err();
        assert_eq!(end.kind(), io::ErrorKind::ConnectionReset);
    }

    #[test]
    fn a_refused_connection_says_so() {
        let listener = Listener::bind((Ipv4Addr::LOCALHOST, 0).into(), &OPTIONS).unwrap();
        let address = listener.local_addr().unwrap();
        drop(listener);
        let result = Stream::connect(address, None, &OPTIONS).and_then(|s| {
            loop {
                match s.connect_result() {
                    Ok(None) => std::thread::yield_now(),
                    result => return result,
                }
            }
        });
        assert_eq!(result.unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
    }
}
