//! Addresses that a session's connection info tells peers to connect to: the setting `advertise`.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use tcpx_proto::info::{HostName, NamedAddress};

use super::form::Form;
use super::ports::PortRange;

/// Addresses that peers connect to. The connection info lists them instead of the addresses that
/// the session listens on, or before them.
///
/// The text is a list of addresses and DNS names, each with a port if ports are mapped:
/// `203.0.113.5`, `node-7.example:30000-30015`, `[fd00::5]:30000`. A leading `+` keeps the
/// session's own addresses, after the list. An empty list means only the session's own addresses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Advertise {
    is_addition: bool,
    places: Vec<Place>,
}

/// One entry of an [`Advertise`].
#[derive(Clone, Debug, PartialEq, Eq)]
struct Place {
    host: Host,
    /// Ports that map to the ports of `listen_port`, in order; `None` if the numbers are equal.
    ports: Option<PortRange>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Host {
    Address(IpAddr),
    Name(HostName),
}

/// The ports of an entry do not match the ports that the session listens on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PortsDoNotFit;

impl Advertise {
    /// Returns whether the connection info lists only the session's own addresses.
    #[must_use]
    pub fn is_default(&self) -> bool {
        self.places.is_empty()
    }

    /// Returns whether the connection info includes the session's own addresses.
    #[must_use]
    pub fn keeps_own(&self) -> bool {
        self.is_addition || self.is_default()
    }

    /// Returns the advertised addresses and names of a session that listens on `port` of `range`.
    pub(crate) fn places(
        &self,
        port: u16,
        range: PortRange,
    ) -> Result<(Vec<SocketAddr>, Vec<NamedAddress>), PortsDoNotFit> {
        let (mut addresses, mut names) = (Vec::new(), Vec::new());
        for place in &self.places {
            let port = match place.ports {
                None => port,
                Some(ports) if !range.is_any() && ports.count() == range.count() => {
                    ports.ports().start() + (port - range.ports().start())
                }
                Some(_) => return Err(PortsDoNotFit),
            };
            match &place.host {
                Host::Address(ip) => addresses.push(SocketAddr::new(*ip, port)),
                Host::Name(name) => names.push(NamedAddress {
                    name: name.clone(),
                    port,
                }),
            }
        }
        Ok((addresses, names))
    }
}

impl FromStr for Advertise {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let text = text.trim();
        if text.is_empty() {
            return Ok(Self::default());
        }
        let (is_addition, list) = match text.strip_prefix('+') {
            Some(list) => (true, list),
            None => (false, text),
        };
        let places = list.split(',').map(|place| place.trim().parse());
        Ok(Self {
            is_addition,
            places: places.collect::<Result<_, _>>()?,
        })
    }
}

impl FromStr for Place {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        // An IPv6 address contains colons: with a port it needs brackets.
        if let Ok(ip) = text.parse::<IpAddr>() {
            return Ok(Self {
                host: Host::address(ip)?,
                ports: None,
            });
        }
        let (host, ports) = match text.strip_prefix('[').and_then(|t| t.split_once(']')) {
            Some((ip, rest)) => {
                let ip = Host::address(IpAddr::V6(ip.parse().map_err(|_| ())?))?;
                let ports = rest.strip_prefix(':');
                if ports.is_none() && !rest.is_empty() {
                    return Err(());
                }
                (ip, ports)
            }
            None => match text.split_once(':') {
                Some((host, ports)) => (Host::name(host)?, Some(ports)),
                None => (Host::name(text)?, None),
            },
        };
        let ports = ports.map(str::parse::<PortRange>).transpose()?;
        match ports {
            Some(ports) if ports.is_any() => Err(()),
            ports => Ok(Self { host, ports }),
        }
    }
}

impl Host {
    /// Accepts any address that can be connected to: neither an unspecified nor a multicast one.
    fn address(ip: IpAddr) -> Result<Self, ()> {
        let is_usable = !ip.is_unspecified() && !ip.is_multicast();
        is_usable.then_some(Self::Address(ip)).ok_or(())
    }

    fn name(text: &str) -> Result<Self, ()> {
        match text.parse::<IpAddr>() {
            Ok(ip) => Self::address(ip),
            Err(_) => HostName::new(text).map(Self::Name).map_err(|_| ()),
        }
    }
}

impl fmt::Display for Advertise {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let places: Vec<_> = self.places.iter().map(Place::to_string).collect();
        let sign = if self.is_addition { "+" } else { "" };
        write!(f, "{sign}{}", places.join(","))
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.host, self.ports) {
            (Host::Address(IpAddr::V6(ip)), Some(ports)) => write!(f, "[{ip}]:{ports}"),
            (Host::Address(ip), Some(ports)) => write!(f, "{ip}:{ports}"),
            (Host::Address(ip), None) => write!(f, "{ip}"),
            (Host::Name(name), Some(ports)) => write!(f, "{name}:{ports}"),
            (Host::Name(name), None) => write!(f, "{name}"),
        }
    }
}

/// A list of addresses and names that peers connect to.
pub(super) struct Places;

impl Form for Places {
    type Value = Advertise;

    fn read(&self, text: &str) -> Option<Advertise> {
        text.parse().ok()
    }

    fn accepts(&self, _: &Advertise) -> bool {
        true
    }

    fn show(&self, value: &Advertise) -> String {
        value.to_string()
    }

    fn expected(&self) -> String {
        "addresses or DNS names, with mapped ports if any: 203.0.113.5, node-7.example or \
         203.0.113.5:30000-30015,[fd00::5]:30000; +203.0.113.5 keeps the session's own addresses"
            .into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(text: &str, port: u16, range: &str) -> Result<Vec<String>, PortsDoNotFit> {
        let advertise: Advertise = text.parse().unwrap();
        let (addresses, names) = advertise.places(port, range.parse().unwrap())?;
        let addresses = addresses.iter().map(ToString::to_string);
        let names = names.iter().map(|n| format!("{}:{}", n.name, n.port));
        Ok(addresses.chain(names).collect())
    }

    #[test]
    fn displayed_text_parses_to_the_same_value() {
        for text in [
            "203.0.113.5",
            "+203.0.113.5",
            "node-7.example:30000-30015,fd00::5",
            "[fd00::5]:30000",
            "pod_1",
        ] {
            let advertise: Advertise = text.parse().unwrap();
            assert_eq!(advertise.to_string(), text);
            assert_eq!(advertise.keeps_own(), text.starts_with('+'));
        }
        assert!("".parse::<Advertise>().unwrap().keeps_own());
        for text in [
            "+",
            ",",
            "a,",
            "0.0.0.0",
            "224.0.0.1",
            "::",
            "a:",
            "a:0",
            "a:b",
            "[a]:1",
            "[::1]1",
            "a b",
            "-a",
            "1.2.3.4:1:2",
        ] {
            assert_eq!(text.parse::<Advertise>(), Err(()), "{text:?}");
        }
    }

    #[test]
    fn ports_are_mapped_in_order() {
        assert_eq!(
            places("203.0.113.5,node", 7, "0").unwrap(),
            ["203.0.113.5:7", "node:7"]
        );
        assert_eq!(
            places("203.0.113.5:30000-30015", 18003, "18000-18015").unwrap(),
            ["203.0.113.5:30003"]
        );
        assert_eq!(places("node:443", 700, "700").unwrap(), ["node:443"]);
        // An unknown port cannot be mapped, and many ports cannot map to one.
        assert_eq!(places("node:443", 18003, "18000-18015"), Err(PortsDoNotFit));
        assert_eq!(places("node:443", 40000, "0"), Err(PortsDoNotFit));
    }
}
