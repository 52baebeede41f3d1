//! The bootstrap exchange of two programs: each sends the other a few bytes, usually its connection
//! info, over an ordinary TCP connection.
//!
//! ```text
//!   client                        server
//!     │  magic  length  bytes ───►  │      length: u32, big endian, at most MAX_MESSAGE
//!     │  ◄───  magic  length  bytes │
//! ```
//!
//! [`exchange`] and [`serve`] do just that. A [`Channel`] keeps the connection for further
//! messages; the two processes of a benchmark use one. Nothing here is encrypted or authenticated:
//! every client that reaches the port gets the bytes, as with any bootstrap socket. Open one only
//! for as long as needed and only on trusted networks.

mod error;
mod resolve;

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::sockopt::{set_socket_keepalive, set_tcp_keepidle};

pub use self::error::BootstrapError;
use self::resolve::resolve;
use crate::floor::Door;

/// The longest message either side accepts.
pub const MAX_MESSAGE: usize = 1 << 20;

/// Time without traffic after which the kernel probes whether the other machine is alive.
const KEEPALIVE: Duration = Duration::from_secs(30);

/// Magic bytes of either side. The last one is the version.
const MAGIC: [u8; 8] = *b"tcpx-bs\x01";

/// The bytes that [`serve`] received, and their sender.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The client's address.
    pub address: SocketAddr,
    /// Its bytes.
    pub bytes: Vec<u8>,
}

/// Waits for one client, takes its bytes and sends it `own`.
///
/// A stray connection of another program ends the call with an error; a server that should survive
/// it calls again.
pub fn serve(
    listener: &TcpListener,
    own: &[u8],
    timeout: Duration,
) -> Result<Answer, BootstrapError> {
    let mut channel = Channel::accept(listener, timeout)?;
    let bytes = channel.receive()?;
    channel.send(own)?;
    Ok(Answer {
        address: channel.remote().expect("a TCP channel"),
        bytes,
    })
}

/// Connects to `host` (`name:port` or `address:port`), sends it `own` and returns its bytes.
pub fn exchange(host: &str, own: &[u8], timeout: Duration) -> Result<Vec<u8>, BootstrapError> {
    let mut channel = Channel::connect(host, timeout)?;
    channel.send(own)?;
    channel.receive()
}

/// A connection that carries whole, bounded messages.
#[derive(Debug)]
pub struct Channel {
    stream: Stream,
    /// The peer's name, for error messages.
    name: String,
    timeout: Duration,
    greeted: bool,
    heard: bool,
}

#[derive(Debug)]
enum Stream {
    Tcp(TcpStream, SocketAddr),
    Unix(UnixStream),
}

impl Channel {
    /// Connects to `name:port` within `timeout`, which all of its addresses share. `timeout` also
    /// limits every later wait.
    pub fn connect(host: &str, timeout: Duration) -> Result<Channel, BootstrapError> {
        let deadline = Instant::now() + timeout;
        let addresses = resolve(host, timeout).map_err(|source| BootstrapError::Unresolved {
            host: host.to_owned(),
            source,
        })?;
        let mut attempts = Vec::new();
        for (index, &address) in addresses.iter().enumerate() {
            let others = (addresses.len() - index) as u32;
            let connected = remaining(deadline)
                .and_then(|left| TcpStream::connect_timeout(&address, left / others));
            match connected {
                Ok(stream) => return Channel::tcp(stream, address, timeout),
                Err(error) => attempts.push((address, error)),
            }
        }
        let host = host.to_owned();
        Err(BootstrapError::Unreachable { host, attempts })
    }

    /// Accepts the next connection of a listener.
    pub fn accept(listener: &TcpListener, timeout: Duration) -> Result<Channel, BootstrapError> {
        let accepted = accept_until(listener, Instant::now() + timeout);
        let address = || listener.local_addr().map_or("?".into(), |a| a.to_string());
        Channel::accepted(accepted, timeout, address)
    }

    fn accepted(
        accepted: io::Result<(TcpStream, SocketAddr)>,
        timeout: Duration,
        address: impl FnOnce() -> String,
    ) -> Result<Channel, BootstrapError> {
        match accepted {
            Ok((stream, from)) => Channel::tcp(stream, from, timeout),
            Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                Err(BootstrapError::NobodyCame { after: timeout })
            }
            Err(source) => Err(BootstrapError::Io {
                address: address(),
                source,
            }),
        }
    }

    /// Accepts the next client of a door.
    pub(crate) fn enter(door: &Door, timeout: Duration) -> Result<Channel, BootstrapError> {
        let entered = door.accept_client(Instant::now() + timeout);
        let address = || door.address().map_or("?".into(), |a| a.to_string());
        Channel::accepted(entered, timeout, address)
    }

    /// Returns a channel over one half of a socket pair.
    pub fn over(stream: UnixStream, name: &str, timeout: Duration) -> Channel {
        let name = name.to_owned();
        Channel {
            stream: Stream::Unix(stream),
            name,
            timeout,
            greeted: false,
            heard: false,
        }
    }

    fn tcp(
        stream: TcpStream,
        address: SocketAddr,
        timeout: Duration,
    ) -> Result<Channel, BootstrapError> {
        let name = address.to_string();
        // Keep-alive: a receiver without a deadline notices also a machine that vanished silently.
        let configured = stream.set_nodelay(true).and_then(|()| {
            set_socket_keepalive(&stream, true)?;
            Ok(set_tcp_keepidle(&stream, KEEPALIVE)?)
        });
        if let Err(source) = configured {
            return Err(BootstrapError::Io {
                address: name,
                source,
            });
        }
        let stream = Stream::Tcp(stream, address);
        Ok(Channel {
            stream,
            name,
            timeout,
            greeted: false,
            heard: false,
        })
    }

    /// Returns the other end, of a TCP channel.
    pub fn remote(&self) -> Option<SocketAddr> {
        match self.stream {
            Stream::Tcp(_, address) => Some(address),
            Stream::Unix(_) => None,
        }
    }

    /// Returns this end, of a TCP channel.
    pub fn local(&self) -> Option<SocketAddr> {
        match &self.stream {
            Stream::Tcp(stream, _) => stream.local_addr().ok(),
            Stream::Unix(_) => None,
        }
    }

    /// Sets the time limit of each later wait.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// Returns a second handle on the same connection: one thread may send while another receives.
    pub fn try_clone(&self) -> io::Result<Channel> {
        let stream = match &self.stream {
            Stream::Tcp(stream, address) => Stream::Tcp(stream.try_clone()?, *address),
            Stream::Unix(stream) => Stream::Unix(stream.try_clone()?),
        };
        let Channel {
            ref name,
            timeout,
            greeted,
            heard,
            ..
        } = *self;
        Ok(Channel {
            stream,
            name: name.clone(),
            timeout,
            greeted,
            heard,
        })
    }

    /// Ends the connection for every handle on it.
    pub fn close(&self) {
        // It may already be closed, which is fine.
        let _ = match &self.stream {
            Stream::Tcp(stream, _) => stream.shutdown(Shutdown::Both),
            Stream::Unix(stream) => stream.shutdown(Shutdown::Both),
        };
    }

    /// Sends one message.
    pub fn send(&mut self, message: &[u8]) -> Result<(), BootstrapError> {
        if message.len() > MAX_MESSAGE {
            return Err(BootstrapError::TooLong { len: message.len() });
        }
        let mut frame = Vec::with_capacity(message.len() + 12);
        if !self.greeted {
            frame.extend_from_slice(&MAGIC);
            self.greeted = true;
        }
        frame.extend_from_slice(&(message.len() as u32).to_be_bytes());
        frame.extend_from_slice(message);
        let deadline = Instant::now() + self.timeout;
        let mut rest = &frame[..];
        while !rest.is_empty() {
            let sent = self
                .wait(PollFlags::OUT, deadline)
                .and_then(|()| match &self.stream {
                    Stream::Tcp(stream, _) => (&*stream).write(rest),
                    Stream::Unix(stream) => (&*stream).write(rest),
                });
            match sent {
                Ok(count) => rest = &rest[count..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.failed(error)),
            }
        }
        Ok(())
    }

    /// Receives one message, within the timeout.
    pub fn receive(&mut self) -> Result<Vec<u8>, BootstrapError> {
        self.receive_until(Some(Instant::now() + self.timeout))
    }

    /// Receives one message; waits for its first byte without limit.
    pub fn receive_patiently(&mut self) -> Result<Vec<u8>, BootstrapError> {
        self.receive_until(None)
    }

    fn receive_until(&mut self, first: Option<Instant>) -> Result<Vec<u8>, BootstrapError> {
        let mut deadline = first;
        if !self.heard {
            let mut magic = [0; MAGIC.len()];
            let got = self.fill(&mut magic, &mut deadline);
            self.judge(&magic, got)?;
            self.heard = true;
        }
        let mut prefix = [0; 4];
        self.fill(&mut prefix, &mut deadline)
            .map_err(|(_, error)| self.failed(error))?;
        let len = u32::from_be_bytes(prefix) as usize;
        if len > MAX_MESSAGE {
            return Err(BootstrapError::TooLong { len });
        }
        let mut message = vec![0; len];
        self.fill(&mut message, &mut deadline)
            .map_err(|(_, error)| self.failed(error))?;
        Ok(message)
    }

    /// Decides from the first bytes whether the other end is tcpx. Another program usually sends
    /// something shorter or nothing at all, so the bytes received are examined first.
    fn judge(
        &self,
        magic: &[u8; 8],
        got: Result<(), (usize, io::Error)>,
    ) -> Result<(), BootstrapError> {
        let have = got
            .as_ref()
            .map_or_else(|(count, _)| *count, |()| magic.len());
        let known = have.min(MAGIC.len() - 1);
        if magic[..known] != MAGIC[..known] {
            let found = magic[..have].to_vec();
            return Err(BootstrapError::WrongProtocol {
                address: self.name.clone(),
                found,
            });
        }
        got.map_err(|(_, error)| self.failed(error))?;
        match (magic[7], MAGIC[7]) {
            (found, expected) if found == expected => Ok(()),
            (found, expected) => Err(BootstrapError::WrongVersion {
                address: self.name.clone(),
                found,
                expected,
            }),
        }
    }

    /// Fills `out`. Without a deadline, the first byte starts one. The error has the number of
    /// bytes received.
    fn fill(
        &self,
        out: &mut [u8],
        deadline: &mut Option<Instant>,
    ) -> Result<(), (usize, io::Error)> {
        let mut count = 0;
        while count < out.len() {
            let waited = match *deadline {
                Some(deadline) => self.wait(PollFlags::IN, deadline),
                None => Ok(()),
            };
            let read = waited.and_then(|()| match &self.stream {
                Stream::Tcp(stream, _) => (&*stream).read(&mut out[count..]),
                Stream::Unix(stream) => (&*stream).read(&mut out[count..]),
            });
            match read {
                Ok(0) => return Err((count, io::ErrorKind::UnexpectedEof.into())),
                Ok(more) => count += more,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err((count, error)),
            }
            deadline.get_or_insert_with(|| Instant::now() + self.timeout);
        }
        Ok(())
    }

    fn wait(&self, flags: PollFlags, deadline: Instant) -> io::Result<()> {
        match &self.stream {
            Stream::Tcp(stream, _) => wait_until(stream, flags, deadline),
            Stream::Unix(stream) => wait_until(stream, flags, deadline),
        }
    }

    fn failed(&self, source: io::Error) -> BootstrapError {
        use io::ErrorKind::{BrokenPipe, ConnectionReset, TimedOut, UnexpectedEof};
        let address = self.name.clone();
        match source.kind() {
            TimedOut => BootstrapError::NoAnswer {
                address,
                after: self.timeout,
            },
            UnexpectedEof | ConnectionReset | BrokenPipe => BootstrapError::Closed { address },
            _ => BootstrapError::Io { address, source },
        }
    }
}

/// Accepts one connection before the deadline, or fails with `TimedOut`.
pub(crate) fn accept_until(
    listener: &TcpListener,
    deadline: Instant,
) -> io::Result<(TcpStream, SocketAddr)> {
    // Non-blocking: a connection that is reset between wake-up and accept must not block this call.
    listener.set_nonblocking(true)?;
    loop {
        wait_until(listener, PollFlags::IN, deadline)?;
        match listener.accept() {
            Err(error) if is_transient(&error) => {}
            other => return other,
        }
    }
}

fn is_transient(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, Interrupted, WouldBlock};
    matches!(error.kind(), WouldBlock | Interrupted | ConnectionAborted)
}

/// Returns the time left before a deadline; fails with `TimedOut` if there is none.
pub(crate) fn remaining(deadline: Instant) -> io::Result<Duration> {
    match deadline.saturating_duration_since(Instant::now()) {
        Duration::ZERO => Err(io::ErrorKind::TimedOut.into()),
        left => Ok(left),
    }
}

fn wait_until(fd: &impl AsFd, flags: PollFlags, deadline: Instant) -> io::Result<()> {
    loop {
        let left = remaining(deadline)?;
        let timeout = left.try_into().map_err(|_| io::ErrorKind::InvalidInput)?;
        match poll(&mut [PollFd::new(fd, flags)], Some(&timeout)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => {}
            Ok(_) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_secs(5);
    const AT_ONCE: Duration = Duration::from_millis(50);

    fn listener() -> (TcpListener, String) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        (listener, address)
    }

    /// Returns the error of `exchange` with a server that behaves like `server`.
    fn against(
        server: impl FnOnce(TcpStream) + Send + 'static,
        timeout: Duration,
    ) -> Result<Vec<u8>, BootstrapError> {
        let (listener, address) = listener();
        let thread = std::thread::spawn(move || server(listener.accept().unwrap().0));
        let result = exchange(&address, b"client", timeout);
        thread.join().unwrap();
        result
    }

    #[test]
    fn both_sides_get_the_other_ones_bytes() {
        for len in [0, 1, 1000, MAX_MESSAGE] {
            let (listener, address) = listener();
            let large = vec![7; len];
            let server = std::thread::spawn(move || serve(&listener, b"server", SOON).unwrap());
            assert_eq!(exchange(&address, &large, SOON).unwrap(), b"server");
            let answer = server.join().unwrap();
            assert_eq!(answer.bytes, large);
            assert!(answer.address.ip().is_loopback());
        }
    }

    #[test]
    fn a_channel_carries_many_messages_both_ways() {
        let (listener, address) = listener();
        let echo = std::thread::spawn(move || {
            let mut channel = Channel::accept(&listener, SOON).unwrap();
            while let Ok(message) = channel.receive_patiently() {
                channel.send(&message).unwrap();
            }
        });
        let mut channel = Channel::connect(&address, SOON).unwrap();
        for len in [3, 0, 70_000] {
            channel.send(&vec![1; len]).unwrap();
            assert_eq!(channel.receive().unwrap().len(), len);
        }
        drop(channel);
        echo.join().unwrap();
    }

    #[test]
    fn nobody_listening_is_refused() {
        let (listener, address) = listener();
        drop(listener);
        let error = exchange(&address, b"", SOON).unwrap_err();
        assert!(
            matches!(error, BootstrapError::Unreachable { .. }),
            "{error:?}"
        );
        let port = address.rsplit(':').next().unwrap();
        let remedy = error.remedy().unwrap();
        assert!(remedy.contains(&format!("on port {port}")), "{remedy}");
        assert!(error.to_string().ends_with(&remedy), "{error}");
    }

    #[test]
    fn nobody_connecting_is_said() {
        let (listener, _) = listener();
        let result = serve(&listener, b"", AT_ONCE);
        assert!(matches!(result, Err(BootstrapError::NobodyCame { .. })));
    }

    #[test]
    fn names_without_an_address_are_unresolved() {
        let result = exchange("127.0.0.1", b"", SOON);
        assert!(
            matches!(result, Err(BootstrapError::Unresolved { .. })),
            "no port: {result:?}"
        );
    }

    #[test]
    fn another_protocol_is_recognised_by_its_first_bytes() {
        for words in [
            &b"SSH-2.0-OpenSSH_9.2\r\n"[..],
            b"HTTP/1.1 400 Bad Request\r\n",
            b"hi",
        ] {
            let result = against(move |mut stream| stream.write_all(words).unwrap(), SOON);
            assert!(
                matches!(result, Err(BootstrapError::WrongProtocol { .. })),
                "{result:?}"
            );
        }
    }

    #[test]
    fn another_version_is_recognised() {
        let result = against(|mut stream| stream.write_all(b"tcpx-bs\x09").unwrap(), SOON);
        assert!(
            matches!(result, Err(BootstrapError::WrongVersion { found: 9, .. })),
            "{result:?}"
        );
    }

    #[test]
    fn silence_is_no_answer_and_goodbye_is_closed() {
        let (listener, address) = listener();
        let result = exchange(&address, b"", AT_ONCE);
        assert!(
            matches!(result, Err(BootstrapError::NoAnswer { .. })),
            "{result:?}"
        );
        drop(listener);
        let result = against(|mut stream| drop(stream.read(&mut [0; 64])), SOON);
        assert!(
            matches!(result, Err(BootstrapError::Closed { .. })),
            "{result:?}"
        );
    }

    #[test]
    fn a_message_that_stops_half_way_ends_in_time() {
        let result = against(
            |mut stream| {
                // If this comes late, the other side is gone.
                let _ = stream.write_all(&MAGIC);
                let _ = stream.write_all(&[0, 0, 1, 0, 42]);
                let _ = stream.read(&mut [0; 64]);
                std::thread::sleep(2 * AT_ONCE);
            },
            AT_ONCE,
        );
        assert!(
            matches!(result, Err(BootstrapError::NoAnswer { .. })),
            "{result:?}"
        );
    }

    #[test]
    fn lengths_are_bounded_before_they_are_believed() {
        let result = against(
            |mut stream| {
                stream.write_all(&MAGIC).unwrap();
                stream.write_all(&u32::MAX.to_be_bytes()).unwrap();
                let _ = stream.read(&mut [0; 64]);
            },
            SOON,
        );
        assert!(
            matches!(result, Err(BootstrapError::TooLong { .. })),
            "{result:?}"
        );
        let (_listener, address) = listener();
        let result = exchange(&address, &vec![0; MAX_MESSAGE + 1], SOON);
        assert!(
            matches!(result, Err(BootstrapError::TooLong { .. })),
            "{result:?}"
        );
    }
}
