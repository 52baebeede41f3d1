//! The addresses that a session listens on, and from which its lanes leave.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use tcpx_net::SocketOptions;
use tcpx_net::interfaces::{self, Interface};
use tcpx_proto::info::{ConnectionInfo, NamedAddress};

use crate::config::{Config, ConfigError, PortsDoNotFit};
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
    /// Interfaces that carry lanes.
    data: Vec<Interface>,
    /// Further interfaces to listen on. Lanes use them only if no data interface reaches the peer.
    control: Vec<Interface>,
}

impl Chosen {
    /// Returns the interfaces that carry lanes.
    pub(crate) fn data(&self) -> &[Interface] {
        &self.data
    }
}

/// Finds the interfaces that the configuration selects.
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

/// Lists the addresses of all interfaces, one per network, with control interfaces last.
pub(crate) fn lane_addresses(chosen: &Chosen) -> Vec<LocalAddress> {
    let of = |interfaces: &[Interface], role| -> Vec<LocalAddress> {
        interfaces
            .iter()
            .flat_map(|i| addresses_of(i, role))
            .collect()
    };
    let mut all = of(&chosen.data, Role::Data);
    all.extend(of(&chosen.control, Role::Control));
    all.truncate(ConnectionInfo::MAX_ADDRESSES);
    all
}

/// Returns the names of the interfaces that carry lanes, by address.
pub(crate) fn interface_names(chosen: &Chosen) -> Vec<(IpAddr, String)> {
    let named = |i: &Interface| -> Vec<_> {
        let addresses = i.lane_addresses();
        addresses.iter().map(|ip| (*ip, i.name.clone())).collect()
    };
    chosen.data.iter().flat_map(named).collect()
}

/// Lists the addresses of an interface, IPv4 first.
fn addresses_of(interface: &Interface, role: Role) -> impl Iterator<Item = LocalAddress> {
    let mut addresses = interface.lane_addresses();
    addresses.sort_by_key(IpAddr::is_ipv6);
    addresses.into_iter().map(move |ip| {
        let known = interface.addresses.iter().find(|a| a.ip == ip);
        LocalAddress {
            ip,
            prefix_len: known.map_or(0, |a| a.prefix_len),
            role,
            interface: interface.index,
        }
    })
}

/// Returns the addresses and names that a session tells its peers: those it advertises, and those
/// on which it listens.
pub(crate) fn published(
    config: &Config,
    listening: &[SocketAddr],
) -> Result<(Vec<SocketAddr>, Vec<NamedAddress>), Error> {
    let advertise = config.advertise();
    let port = listening.first().map_or(0, SocketAddr::port);
    let places = advertise.places(port, config.listen_port());
    let (mut addresses, names) = places.map_err(|PortsDoNotFit| {
        let ports = config.listen_port();
        let expected = match ports.is_any() {
            true => "no ports while listen_port is 0, which cannot be mapped: set listen_port"
                .to_owned(),
            false => format!(
                "as many ports for each mapped address as listen_port has: {} for {ports}",
                ports.count()
            ),
        };
        Error::Config(ConfigError::BadValue {
            name: "advertise".into(),
            value: advertise.to_string(),
            expected,
        })
    })?;
    if advertise.keeps_own() {
        let own = listening.iter().filter(|a| !addresses.contains(a));
        let own: Vec<_> = own.copied().collect();
        addresses.extend(own);
        let room = ConnectionInfo::MAX_ADDRESSES.saturating_sub(names.len());
        addresses.truncate(room);
    }
    Ok((addresses, names))
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
        // An interface that carries lanes continues to do so.
        assert_eq!(
            roles("", "eth1"),
            [data("10.0.0.1"), data("10.0.1.1"), data("10.0.2.1")]
        );
        assert_eq!(roles("eth1", "eth1"), [data("10.0.1.1")]);
    }

    #[test]
    fn advertised_addresses_precede_own_addresses() {
        let listening = ["10.0.0.1:7".parse().unwrap()];
        let told = |port: &str, advertise: &str| {
            let config = Config::defaults().with("listen_port", port).unwrap();
            let config = config.with("advertise", advertise).unwrap();
            published(&config, &listening).map(|(addresses, names)| {
                let names = names.iter().map(ToString::to_string);
                let addresses = addresses.iter().map(ToString::to_string);
                addresses.chain(names).collect::<Vec<_>>()
            })
        };
        assert_eq!(told("0", "").unwrap(), ["10.0.0.1:7"]);
        assert_eq!(told("0", "203.0.113.5").unwrap(), ["203.0.113.5:7"]);
        assert_eq!(
            told("7", "+203.0.113.5:9,10.0.0.1,pod").unwrap(),
            ["203.0.113.5:9", "10.0.0.1:7", "pod:7"]
        );
        let error = told("0", "203.0.113.5:9").unwrap_err().to_string();
        assert!(error.contains("cannot be mapped"), "{error}");
        let error = told("7-9", "203.0.113.5:9").unwrap_err().to_string();
        assert!(error.contains("3 for 7-9"), "{error}");
    }
}
