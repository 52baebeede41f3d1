//! The listening socket of a server.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use clap::Args;

/// The default port of the bootstrap socket.
pub(crate) const DEFAULT_PORT: u16 = 17777;

/// The options of a server's bootstrap socket.
#[derive(Debug, Args)]
pub(crate) struct Listen {
    /// Bootstrap port; 0 takes a free one and prints it
    #[arg(long, default_value_t = DEFAULT_PORT)]
    port: u16,

    /// Bootstrap address to listen on [default: all]
    #[arg(long, value_name = "IP")]
    bind: Option<IpAddr>,
}

/// Reports that the bootstrap socket cannot be opened.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {address}: {source}; is another server running? --port chooses another")]
pub(crate) struct ListenError {
    address: SocketAddr,
    source: io::Error,
}

impl Listen {
    /// Listens by `bind` on the requested address, or on all, with or without IPv6.
    pub(crate) fn with<T>(
        &self,
        bind: impl Fn(SocketAddr) -> io::Result<T>,
    ) -> Result<T, ListenError> {
        let Some(ip) = self.bind else {
            // An IPv6 socket accepts IPv4 clients too, if the machine has IPv6.
            let address = SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), self.port);
            return bind(address).or_else(|_| self.attempt(Ipv4Addr::UNSPECIFIED.into(), &bind));
        };
        self.attempt(ip, &bind)
    }

    fn attempt<T>(
        &self,
        ip: IpAddr,
        bind: impl Fn(SocketAddr) -> io::Result<T>,
    ) -> Result<T, ListenError> {
        let address = SocketAddr::new(ip, self.port);
        bind(address).map_err(|source| ListenError { address, source })
    }
}
