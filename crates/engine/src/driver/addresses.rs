//! The addresses that a session listens on and leaves from.

use std::net::SocketAddr;
use std::sync::Arc;

use tcpx_net::interfaces::{self, Interface};
use tcpx_net::{Listener, SocketOptions};
use tcpx_proto::info::ConnectionInfo;

use crate::config::Config;
use crate::error::Error;
use crate::peers::{LocalAddress, Role};

pub(crate) fn socket_options(config: &Config) -> SocketOptions {
    SocketOptions {
        buffer_bytes: config.socket_buffer_bytes(),
        dead_after: config.peer_timeout(),
    }
}

/// The interfaces of a session.
pub(crate) struct Chosen {
    /// These carry lanes.
    data: Vec<Interface>,
    /// These are listened on, too. Lanes use them only when no data interface leads to the peer.
    control: Vec<Interface>,
}

impl Chosen {
    /// The interfaces that carry lanes.
    pub(crate) fn data(&self) -> &[Interface] {
        &self.data
    }
}

/// Finds the interfaces that the configuration names.
pub(crate) fn choose_interfaces(config: &Config) -> Result<Chosen, Error> {
    let found = interfaces::discover().map_err(|e| {
        Error::io(
            "cannot list the network interfaces",
            std::io::Error::other(e),
        )
    })?;
    choose(config, &found)
}

fn choose(config: &Config, found: &[Interface]) -> Result<Chosen, Error> {
    let select = |selector: &interfaces::InterfaceSelector| {
        selector
            .select(found)
            .map_err(|e| Error::Interfaces(Arc::new(e)))
    };
    let data = select(config.interfaces())?;
    let mut control = Vec::new();
    if !config.control_interface().is_default() {
        control = select(config.control_interface())?;
        control.retain(|interface| !data.contains(interface));
    }
    Ok(Chosen { data, control })
}

/// Lists one address of each family and interface, those of control interfaces last.
pub(crate) fn lane_addresses(chosen: &Chosen) -> Vec<LocalAddress> {
    let of = |interfaces: &[Interface], role| -> Vec<LocalAddress> {
        interfaces
            .iter()
            .flat_map(|i| addresses_of(i, role))
            .collect()
    };
    let mut all = of(&chosen.data, Role::Data);
    all.extend(of(&chosen.control, Role::Control));
    all
}

fn addresses_of(interface: &Interface, role: Role) -> impl Iterator<Item = LocalAddress> {
    let addresses = interface.lane_addresses();
    [true, false].into_iter().filter_map(move |v4| {
        let ip = *addresses.iter().find(|ip| ip.is_ipv4() == v4)?;
        let known = interface.addresses.iter().find(|a| a.ip == ip);
        Some(LocalAddress {
            ip,
            prefix_len: known.map_or(0, |a| a.prefix_len),
            role,
        })
    })
}

pub(crate) fn listen(
    chosen: &Chosen,
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

#[cfg(test)]
mod tests {
    use tcpx_net::interfaces::{InterfaceAddress, InterfaceKind};

    use super::*;

    fn ethernet(index: u32) -> Interface {
        let ip = format!("10.0.{index}.1").parse().unwrap();
        Interface {
            index,
            name: format!("eth{index}"),
            up: true,
            running: true,
            kind: InterfaceKind::Physical,
            addresses: vec![InterfaceAddress::new(ip, 24)],
            mtu: 1500,
            speed_mbps: None,
            numa_node: None,
            pci_address: None,
            driver: None,
            locations: Vec::new(),
        }
    }

    fn roles(interfaces: &str, control: &str) -> Vec<(String, Role)> {
        let found: Vec<_> = (0..3).map(ethernet).collect();
        let config = Config::defaults().with("interfaces", interfaces).unwrap();
        let config = config.with("control_interface", control).unwrap();
        let addresses = lane_addresses(&choose(&config, &found).unwrap());
        addresses
            .iter()
            .map(|a| (a.ip.to_string(), a.role))
            .collect()
    }

    #[test]
    fn control_interfaces_come_last_and_carry_no_data() {
        let data = |ip: &str| (ip.to_owned(), Role::Data);
        let eth0 = ("10.0.0.1".to_owned(), Role::Control);
        assert_eq!(
            roles("eth1,eth2", "eth0"),
            [data("10.0.1.1"), data("10.0.2.1"), eth0]
        );
        // One that carries lanes anyway goes on doing so.
        assert_eq!(
            roles("", "eth1"),
            [data("10.0.0.1"), data("10.0.1.1"), data("10.0.2.1")]
        );
        assert_eq!(roles("eth1", "eth1"), [data("10.0.1.1")]);
    }
}
