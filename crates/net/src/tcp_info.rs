//! Reads the kernel's statistics of a TCP stream: `TCP_INFO`.

use std::io;
use std::time::Duration;

/// Offsets of the fields of `struct tcp_info` that are read here. The structure only ever grows;
/// fields that an older kernel does not report are 0.
mod at {
    pub(super) const STATE_BITS: usize = 7;
    pub(super) const SEGMENT: usize = 16;
    pub(super) const UNACKED: usize = 24;
    pub(super) const RTT: usize = 68;
    pub(super) const RTT_VAR: usize = 72;
    pub(super) const CONGESTION_WINDOW: usize = 80;
    pub(super) const RECEIVE_SPACE: usize = 96;
    pub(super) const TOTAL_RETRANSMITS: usize = 100;
    pub(super) const BYTES_ACKED: usize = 120;
    pub(super) const BYTES_RECEIVED: usize = 128;
    pub(super) const NOT_SENT: usize = 144;
    pub(super) const MIN_RTT: usize = 148;
    pub(super) const DELIVERY_RATE: usize = 160;
    pub(super) const BUSY: usize = 168;
    pub(super) const RECEIVER_LIMITED: usize = 176;
    pub(super) const BUFFER_LIMITED: usize = 184;
    pub(super) const BYTES_RETRANSMITTED: usize = 208;
    pub(super) const SEND_WINDOW: usize = 228;
    pub(super) const LEN: usize = 232;
}

/// The kernel's statistics of a TCP stream.
///
/// Times and counts start with the stream; a field that the kernel does not report is 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct TcpInfo {
    /// The smoothed round trip.
    pub rtt: Duration,
    /// How much the round trip varies.
    pub rtt_var: Duration,
    /// The shortest round trip of the last minutes.
    pub min_rtt: Duration,
    /// Number of segments retransmitted.
    pub retransmits: u64,
    /// Number of bytes retransmitted.
    pub retransmitted_bytes: u64,
    /// The recent rate at which the other end received, in bytes per second.
    pub delivery_rate: u64,
    /// Whether the sending application limited `delivery_rate`.
    pub is_app_limited: bool,
    /// The congestion window in bytes.
    pub congestion_window: u64,
    /// The receive window of the other end, in bytes.
    pub send_window: u64,
    /// The receive window that this end advertises, in bytes.
    pub receive_space: u64,
    /// Number of bytes that the other end has acknowledged.
    pub acknowledged: u64,
    /// Number of bytes received in order.
    pub received: u64,
    /// The maximum segment size for sending, in bytes.
    pub segment: u64,
    /// Approximate number of bytes in flight: sent and not acknowledged.
    pub in_flight: u64,
    /// Number of bytes handed to the kernel and not sent yet.
    pub not_sent: u64,
    /// Time during which there was something to send.
    pub busy: Duration,
    /// The part of `busy` during which the receive window of the other end was full.
    pub receiver_limited: Duration,
    /// The part of `busy` during which the send buffer of this end was too small.
    pub buffer_limited: Duration,
}

impl TcpInfo {
    /// Parses the bytes of `struct tcp_info`, of which an older kernel gives fewer.
    fn parse(info: &[u8]) -> Self {
        let u32_at = |at: usize| {
            let bytes = info.get(at..).and_then(|rest| rest.first_chunk());
            u64::from(bytes.map_or(0, |bytes| u32::from_ne_bytes(*bytes)))
        };
        let u64_at = |at: usize| {
            let bytes = info.get(at..).and_then(|rest| rest.first_chunk());
            bytes.map_or(0, |bytes| u64::from_ne_bytes(*bytes))
        };
        let micros = Duration::from_micros;
        let segment = u32_at(at::SEGMENT);
        // The kernel reports an unknown minimum as the largest number.
        let min_rtt = u32_at(at::MIN_RTT);
        let min_rtt = if min_rtt == u32::MAX.into() {
            0
        } else {
            min_rtt
        };
        Self {
            rtt: micros(u32_at(at::RTT)),
            rtt_var: micros(u32_at(at::RTT_VAR)),
            min_rtt: micros(min_rtt),
            retransmits: u32_at(at::TOTAL_RETRANSMITS),
            retransmitted_bytes: u64_at(at::BYTES_RETRANSMITTED),
            delivery_rate: u64_at(at::DELIVERY_RATE),
            is_app_limited: info.get(at::STATE_BITS).is_some_and(|bits| bits & 1 != 0),
            congestion_window: u32_at(at::CONGESTION_WINDOW) * segment,
            send_window: u32_at(at::SEND_WINDOW),
            receive_space: u32_at(at::RECEIVE_SPACE),
            acknowledged: u64_at(at::BYTES_ACKED),
            received: u64_at(at::BYTES_RECEIVED),
            segment,
            in_flight: u32_at(at::UNACKED) * segment,
            not_sent: u32_at(at::NOT_SENT),
            busy: micros(u64_at(at::BUSY)),
            receiver_limited: micros(u64_at(at::RECEIVER_LIMITED)),
            buffer_limited: micros(u64_at(at::BUFFER_LIMITED)),
        }
    }
}

/// Reads the statistics of a TCP socket from the kernel.
pub(crate) fn read(socket: std::os::fd::RawFd) -> io::Result<TcpInfo> {
    let mut info = [0u8; at::LEN];
    let mut len = info.len() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes to the buffer and the length back; a descriptor
    // that is not open is an error.
    let result = unsafe {
        libc::getsockopt(
            socket,
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &raw mut len,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(TcpInfo::parse(&info[..(len as usize).min(at::LEN)]))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn the_kernel_tells_what_two_ends_have_moved() {
        const BYTES: usize = 100_000;
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut here = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut there, _) = listener.accept().unwrap();
        let mut answer = [0];
        std::thread::scope(|scope| {
            scope.spawn(|| {
                there.read_exact(&mut vec![0; BYTES]).unwrap();
                // Acknowledges the received bytes.
                there.write_all(&[1]).unwrap();
            });
            here.write_all(&vec![7; BYTES]).unwrap();
            here.read_exact(&mut answer).unwrap();
        });
        let sent = read(here.as_raw_fd()).unwrap();
        // The handshake counts as one byte.
        assert_eq!(sent.acknowledged, BYTES as u64 + 1, "{sent:?}");
        assert_eq!((sent.received, sent.not_sent), (1, 0), "{sent:?}");
        assert!(sent.rtt > Duration::ZERO, "{sent:?}");
        assert!(
            sent.congestion_window > 0 && sent.send_window > 0,
            "{sent:?}"
        );
        assert!(sent.delivery_rate > 0, "{sent:?}");
        let received = read(there.as_raw_fd()).unwrap();
        assert_eq!(received.received, BYTES as u64, "{received:?}");
        assert!(received.receive_space > 0, "{received:?}");
    }

    #[test]
    fn an_old_kernel_says_less() {
        let info = TcpInfo::parse(&[0xff; at::RTT_VAR]);
        assert_eq!(info.rtt, Duration::from_micros(u32::MAX.into()));
        assert_eq!((info.rtt_var, info.busy), (Duration::ZERO, Duration::ZERO));
        assert_eq!(TcpInfo::parse(&[]), TcpInfo::default());
    }

    #[test]
    fn a_file_is_no_socket() {
        let file = std::fs::File::open("/dev/null").unwrap();
        assert!(read(file.as_raw_fd()).is_err());
    }
}
