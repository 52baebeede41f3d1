//! The addresses that a session listens on and leaves from.

use std::net::SocketAddr;
use std::sync::Arc;

use tcpx_net::interfaces::{self, Interface};
use tcpx_net::{Listener, SocketOptions};
use tcpx_proto::info::ConnectionInfo;

use crate::config::Config;
use crate::error::Error;
use crate::routes::LocalAddress;

pub(crate) fn socket_options(config: &Config) -> SocketOptions {
    SocketOptions {
        buffer_bytes: config.socket_buffer_bytes(),
        dead_after: config.peer_timeout(),
    }
}

pub(crate) fn choose_interfaces(config: &Config) -> Result<Vec<Interface>, Error> {
    let found = interfaces::discover().map_err(|e| {
        Error::io(
            "cannot list the network interfaces",
            std::io::Error::other(e),
        )
    })?;
    let select = |selector: &interfaces::InterfaceSelector| {
        selector
            .select(&found)
            .map_err(|e| Error::Interfaces(Arc::new(e)))
    };
    let mut chosen = select(config.interfaces())?;
    if !config.control_interface().is_default() {
        for interface in select(config.control_interface())? {
            // Last: lanes use it only when the others lead nowhere.
            if !chosen.contains(&interface) {
                chosen.push(interface);
            }
        }
    }
    Ok(chosen)
}

/// One address of each family and interface.
pub(crate) fn lane_addresses(chosen: &[Interface]) -> Vec<LocalAddress> {
    let mut out = Vec::new();
    for interface in chosen {
        let addresses = interface.lane_addresses();
        for v4 in [true, false] {
            let Some(ip) = addresses.iter().find(|ip| ip.is_ipv4() == v4) else {
                continue;
            };
            let prefix = interface
                .addresses
                .iter()
                .find(|a| a.ip == *ip)
                .map(|a| a.prefix_len);
            out.push(LocalAddress {
                ip: *ip,
                prefix_len: prefix.unwrap_or(0),
            });
        }
    }
    out
}

pub(crate) fn listen(
    chosen: &[Interface],
    config: &Config,
    options: &SocketOptions,
) -> Result<(Vec<Listener>, Vec<SocketAddr>), Error> {
    let mut listeners = Vec::new();
    let mut addresses = Vec::new();
    let mut failure = None;
    for local in lane_addresses(chosen)
        .into_iter()
        .take(ConnectionInfo::MAX_ADDRESSES)
    {
        let address = SocketAddr::new(local.ip, config.listen_port());
        let bound = Listener::bind(address, options)
            .and_then(|listener| Ok((listener.local_addr()?, listener)));
        match bound {
            Ok((address, listener)) => {
                addresses.push(address);
                listeners.push(listener);
            }
            Err(error) => {
                tracing::warn!(%address, %error, "cannot listen");
                failure = Some(error);
            }
        }
    }
    match failure {
        Some(error) if listeners.is_empty() => {
            Err(Error::io("cannot listen on any interface", error))
        }
        _ => Ok((listeners, addresses)),
    }
}
