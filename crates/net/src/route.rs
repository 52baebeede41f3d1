//! Looks up routes in the kernel's routing table.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

/// Returns the local address that the kernel would use towards `remote`; `None` if no route leads
/// there. Sends nothing.
#[must_use]
pub fn source_towards(remote: SocketAddr) -> Option<IpAddr> {
    let any: IpAddr = match remote {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    // Connecting a datagram socket looks the route up, and does no more.
    let socket = UdpSocket::bind(SocketAddr::new(any, 0)).ok()?;
    socket.connect(remote).ok()?;
    Some(socket.local_addr().ok()?.ip())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_left_from_itself() {
        let to = "127.0.0.1:9".parse().unwrap();
        assert_eq!(source_towards(to), Some(Ipv4Addr::LOCALHOST.into()));
    }
}
